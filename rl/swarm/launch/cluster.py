"""The commands of a run on several machines, for any engine that starts them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rl.experiment import experiment as experiment_lib
from rl.swarm import processes, supervisor

EVERYWHERE = "0.0.0.0"
ACCELERATED = ("learner", "server", "validator")  # roles with devices of their own
ELASTIC = ("relay", "server", "worker")  # roles whose nodes may come and go


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run to start. `counts` has the number of nodes of each role other than the learner; `hosts` is the number of the learner's hosts.

    `experiment` may be None if the learner is the only role. `port` is the first of the ports in use.
    """

    experiment: experiment_lib.Experiment | None
    workdir: pathlib.Path
    counts: Mapping[str, int]
    arguments: Sequence[str]  # the user's, about the config
    hosts: int
    port: int  # the first

    @property
    def learners(self) -> list[str]:
        """The names of the learner's hosts."""
        return ["learner", *(f"learner{i}" for i in range(1, self.hosts))]

    @functools.cached_property
    def roles(self) -> dict[str, str]:
        """The role of each node by name, the learner first."""
        return {"learner": "learner"} | {f"{r}{i}": r for r in processes.ROLES for i in range(self.counts[r])}

    @property
    def names(self) -> list[str]:
        """The names of all processes, the learner's hosts first."""
        return [*self.learners, *list(self.roles)[1:]]

    def specs(self, host_of: Callable[[str], str]) -> list[supervisor.Spec]:
        """Returns the process of each node, the learner first. `host_of(node)` returns the node's host, or a placeholder such as "@node@" for it."""
        if len(self.roles) == 1:
            command = ["rl.train", *self.arguments, f"--workdir={self.workdir}"]
            return [supervisor.Spec("learner", "learner", command)]
        assert self.experiment is not None
        ports = {
            name: self.port + i for i, name in enumerate(("orchestrator", "weights", "control", "metrics", *self.roles))
        }
        at = {port: name if name in self.roles else "learner" for name, port in ports.items()}

        def connect(ends: frozenset[str], port: int) -> str:
            return f"http://{host_of(at[port])}:{port}"

        swarm = processes.plan(
            self.experiment,
            self.workdir,
            self.roles,
            self.arguments,
            connect=connect,
            ports=ports,
            listen=EVERYWHERE,
        )
        return [dataclasses.replace(spec, after_port=0) for spec in swarm.specs]

    def each_host(self, host_of: Mapping[str, str]) -> list[supervisor.Spec]:
        """Returns all processes, each with its host from `host_of`. The learner has one process per host, and its config names the first of them."""
        learner, *others = self.specs(host_of.__getitem__)
        learners = [learner]
        if self.hosts > 1:
            place = {"coordinator": f"{host_of['learner']}:{self.port - 2}", "num_processes": self.hosts}
            flags = [f"--config.topology.{key}={value}" for key, value in place.items()]
            learners = []
            for i, name in enumerate(self.learners):
                command = [*learner.command, *flags, f"--config.topology.process_id={i}"]
                learners.append(dataclasses.replace(learner, name=name, command=command))
        return [dataclasses.replace(spec, host=host_of[spec.name]) for spec in (*learners, *others)]
