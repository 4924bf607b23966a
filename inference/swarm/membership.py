"""Makes an inference server a node of a run: heartbeats to its orchestrator, whose replies name the policy to load.

A failed pull is repeated with growing pauses, and reported. So a server that lags is left out by the orchestrator, and comes back.
"""

import threading
import time
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server
from sharding.system import sign_in

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


def sign_in_server(
    orchestrator: str,
    private: ed25519.Ed25519PrivateKey,
    server: inference_server.InferenceServer,
    url: str,
    run: str = "",
) -> sign_in.SignIn:
    """Starts the heartbeats of `server`, which workers reach at `url`, and makes it follow the policies of the run; returns them."""
    follower = PolicyFollower(server)
    before = time.monotonic(), 0.0

    def report() -> dict[str, Any]:
        nonlocal before
        scheduler, (then_s, num_tokens) = server.scheduler, before
        before = time.monotonic(), float(scheduler.stats["tokens"])
        load = server.load() | {"tokens_per_s": (before[1] - num_tokens) / max(before[0] - then_s, 1e-3)}
        problem = "paused" if scheduler.is_paused else follower.problem
        policy = {"epoch": scheduler.epoch, "version": scheduler.version, "digest": server.policy_digest}
        return {"url": url, "policy": policy, "load": load, "problem": problem}

    def hear(reply: dict) -> None:
        if reply["policy"]:
            follower.follow(reply["policy"])

    options = {"run": run, "on_reply": hear, "on_notice": inference_server.log}
    return sign_in.SignIn(orchestrator, private, "server", report, **options).start()


class PolicyFollower:
    """The thread that updates `server` to the policy given to `follow` last. `problem` is the error of the last update, or ""."""

    def __init__(self, server: inference_server.InferenceServer):
        self._server, self._wanted, self.problem = server, None, ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="follow-policy", daemon=True)
        self._thread.start()

    def follow(self, policy: dict[str, Any]) -> None:
        """Names the newest policy: {"epoch", "version", "digest"}."""
        with self._changed:
            if policy != self._wanted:
                self._wanted = policy
                self._changed.notify()

    def _is_current(self) -> bool:
        scheduler = self._server.scheduler
        return self._wanted is None or (self._wanted["epoch"], self._wanted["version"]) == (
            scheduler.epoch,
            scheduler.version,
        )

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_current())
                wanted = self._wanted
            assert wanted is not None
            try:
                self._server.update(wanted["version"], epoch=wanted["epoch"], digest=wanted["digest"])
                self.problem, pause_s = "", FIRST_PAUSE_S
            except (ValueError, OSError) as error:
                inference_server.log(f"weights not updated: {error}; the weights in use keep serving")
                self.problem = f"weights not updated: {error}"
                with self._changed:  # a newer policy is tried at once
                    self._changed.wait_for(lambda wanted=wanted: self._wanted != wanted, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except scheduler_lib.Closed:
                return
