"""An actor of Ray that keeps a process of a run alive. It imports no JAX, so it starts fast."""

import collections
import time

from rl.swarm import supervisor
from sharding.logs import run_logs
from sharding.system import child_process

PAUSE_S = 5.0  # before a process starts again


class Process:
    """A process on a node of the cluster."""

    def host(self) -> str:
        """Returns the address of this node."""
        import ray  # pyright: ignore[reportMissingImports]

        return ray.util.get_node_ip_address()

    def keep(self, spec: supervisor.Spec, logs: run_logs.Folder) -> str:
        """Keeps a process alive; returns once the learner ended well, or its last words if it died too often in a row."""
        words, died_s = "", collections.deque[float](maxlen=supervisor.MAX_DEATHS)
        while spec.role != "learner" or not supervisor.is_too_often(died_s):
            with child_process.ChildProcess(spec.name, spec.command, logs) as child:
                if child.process.wait() == 0 and spec.role == "learner":
                    return ""
                words = child.obituary()
            died_s.append(time.monotonic())
            time.sleep(PAUSE_S)
        return words
