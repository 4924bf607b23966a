"""Makes an inference server a node of a run: heartbeats to its orchestrator, whose replies name the policy to load.

It reports after each pull. A failed one is repeated with growing pauses: a server that lags is left out, and comes back.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server
from sharding.system import cli, retries, sign_in

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


def sign_in_server(
    orchestrator: str, server: inference_server.InferenceServer, url: str, notify: Callable[[str], None] = cli.note
) -> sign_in.SignIn:
    """Returns the heartbeats of `server`, which workers reach at `url`; their replies make it follow the policies of the run.

    `notify` receives lines for people when the orchestrator is lost or found.
    """
    assert server.signer is not None

    def report() -> dict[str, Any]:
        scheduler = server.scheduler
        if not scheduler.is_alive:  # no beat: such a server must count as silent
            raise ValueError("the scheduler ended by an error; see its log, and start this server again")
        problem = "paused" if scheduler.is_paused else follower.problem
        policy = {"epoch": scheduler.epoch, "version": scheduler.version, "digest": server.policy_digest}
        return {"url": url, "policy": policy, "load": server.load(), "problem": problem}

    def hear(reply: dict) -> None:
        server.run = node.run
        if reply["policy"]:
            follower.follow(reply["policy"])

    options = {"run": server.run, "on_reply": hear, "on_notice": notify}
    node = sign_in.SignIn(orchestrator, server.signer.private, "server", report, **options)
    follower = PolicyFollower(server, node.beat_now)
    return node


class PolicyFollower:
    """Updates `server` in a thread of its own to the policies given to `follow`. `problem` is the error of the last update, or "".

    `on_update` is called after each update, also a failed one.
    """

    def __init__(self, server: inference_server.InferenceServer, on_update: Callable[[], None]):
        self._server, self._on_update, self.problem = server, on_update, ""
        self._thread: threading.Thread | None = None
        self._failed: dict[str, Any] = {}  # the policy of a failed update, which is tried again
        self._retry_s, self._pauses = 0.0, retries.Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    def follow(self, policy: dict[str, Any]) -> None:
        """Starts to load a policy {"epoch", "version", "digest"}. Does nothing if it is in use, if a load is running, or if this policy failed a moment ago."""
        scheduler = self._server.scheduler
        is_here = (policy["epoch"], policy["version"]) == (scheduler.epoch, scheduler.version)
        is_busy = self._thread is not None and self._thread.is_alive()
        if not (is_here or is_busy or (policy == self._failed and time.monotonic() < self._retry_s)):
            self._thread = threading.Thread(target=self._load, args=(policy,), name="follow-policy", daemon=True)
            self._thread.start()

    def _load(self, policy: dict[str, Any]) -> None:
        try:
            self._server.update(policy["version"], epoch=policy["epoch"], digest=policy["digest"])
            self.problem = ""
            self._pauses.reset()
        except (ValueError, OSError) as error:
            cli.note(f"weights not updated: {error}; the weights in use keep serving")
            self.problem, self._failed = f"weights not updated: {error}", policy
            self._retry_s = time.monotonic() + self._pauses.next_s()
        except scheduler_lib.Closed:
            return
        self._on_update()
