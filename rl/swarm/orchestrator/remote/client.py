"""The orchestrator of a run in another process (`python -m rl.swarm.orchestrator`), with the methods of one in this process.

Every call is repeated until the orchestrator answers, so that it may be restarted at any moment; a repeated call has no second effect.
It also takes the place of the run's ledger, which belongs to that process.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from inference import client as client_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.learning.batch import packing, training_batch
from rl.protocol import timeline
from rl.swarm.orchestrator.remote import host

NOTICE_S = 30.0
END_S = 60.0  # the patience at the end of the run, whose answer may be lost: the other process ends, too
PAUSE_S = 0.5  # after a call without an answer


class RemoteOrchestrator(contextlib.AbstractContextManager):
    """A client of the orchestrator at `address`, a URL or unix:PATH, for one learner process.

    `learner` is a name that no other process has; hosts of one learner share it. `layout` is that of its batches. `notify` gets lines
    for people. A call raises ValueError if the orchestrator refuses it, or is away for `patience_s` seconds.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        learner: str,
        layout: packing.Layout,
        patience_s: float,
        notify: Callable[[str], None] = lambda line: None,
    ):
        path = address.removeprefix("unix:")
        transport = httpx.HTTPTransport(uds=path) if path != address else None
        headers, timeout = {"authorization": f"Bearer {token}"}, httpx.Timeout(3 * host.WAIT_S, connect=10)
        base_url = "http://localhost" if transport else address
        self._http = httpx.Client(transport=transport, base_url=base_url, headers=headers, timeout=timeout)
        self._address, self._learner, self._sizes = address, learner, host.sizes_of(layout)
        self._patience_s, self._notify = patience_s, notify
        self._failure: BaseException | None = None
        self.url = ""  # for workers
        self.metrics = None  # of the orchestrator, which serves them itself

    def __exit__(self, *_) -> None:
        """Closes the connections. The orchestrator goes on, and waits for the learner."""
        self._http.close()

    def check(self, fields: dict) -> None:
        """Waits for the orchestrator. Raises ValueError if another server answers, or it has another token or other config fields."""
        if self._call("check", fields=fields) is not True:
            found = f"topology.orchestrator = {self._address!r} is not the control listener of rl.swarm.orchestrator"
            raise ValueError(f"{found}; set it to the URL that it prints for the learner")

    def attach(self, fields: dict, step: int, state: dict, head: str | None) -> None:
        """Begins or continues the run after batch `step`; `state` and `head` are those of its checkpoint."""
        self.url = self._call("attach", fields=fields, step=step, state=state, head=head)["url"]

    # The methods of an orchestrator.

    def publish(self, policy: timeline.Policy) -> None:
        """Records a policy, published already, and names it to the servers."""
        self._call("publish", policy=policy.to_json())

    def next_batch(self, step: int) -> training_batch.Batch:
        """Blocks until batch `step` is complete; returns it without its trees and groups: `rows` returns them packed."""
        found = self._call("batch", step=step, sizes=self._sizes)
        return training_batch.Batch([], found["metrics"], [], found["num_micro_batches"])

    def rows(self, step: int, regions: Sequence[tuple[slice, slice]]) -> bytes:
        """Returns (rows, columns) blocks of batch `step`, in the order of `host_feed.cut`."""
        spans = [[[span.start, span.stop] for span in region] for region in regions]
        return self._call("rows", step=step, sizes=self._sizes, regions=spans)

    def evaluate(self, version: int, name: str = "") -> list[list[rollout_lib.Rollout]]:
        """Blocks until workers have submitted the rollouts of an evaluation set by policy `version`; returns a list of rollouts per task.

        It is [] if the evaluation was given up.
        """
        found = self._call("evaluate", version=version, set_name=name)
        rollouts = parquet.from_bytes(found) if found else []
        return [list(group) for _, group in itertools.groupby(rollouts, key=lambda rollout: rollout.task.group)]

    def state(self, step: int) -> dict:
        """Returns the orchestrator's state as of batch `step`, for the checkpoint."""
        return self._call("state", step=step)

    def waiting_for(self) -> str:
        """Returns why the learner waits, as a line for people, or ""; within seconds, also if the orchestrator is away."""
        try:
            response = self._http.post("/learner/waiting_for", json={"learner": self._learner}, timeout=2.0)
            return response.json()["result"] if response.status_code == 200 else client_lib.error_message(response)
        except httpx.TransportError as error:
            return f"waiting for the orchestrator at {self._address}: {str(error) or type(error).__name__}"

    def fail(self, error: BaseException) -> None:
        """Makes waiting and later calls raise `error`, such as the death of a child process."""
        self._failure = self._failure or error

    def end(self) -> None:
        """Ends the run for the workers, and the process of the orchestrator, unless that is away."""
        self._call("end")

    # The methods of a ledger.

    def head(self) -> str:
        """Returns the ledger's head."""
        return self._call("head")

    def published(self, version: int, digest: str, epoch: int) -> None:
        """Does nothing: `publish` records the policy."""

    def _call(self, name: str, **fields: Any) -> Any:
        answered_s, patience_s = time.monotonic(), min(self._patience_s, END_S if name == "end" else math.inf)
        noticed_s = -math.inf if name == "check" else answered_s  # the address may be wrong
        while True:
            if self._failure:
                raise self._failure
            problem = ""
            try:
                response = self._http.post(f"/learner/{name}", json={"learner": self._learner} | fields)
                if response.status_code == 202:
                    answered_s, problem = time.monotonic(), response.json()["waiting_for"]
                elif response.status_code in (502, 503, 504):
                    problem = f"waiting for {self._address}: {client_lib.error_message(response)}"
                    time.sleep(PAUSE_S)
                elif response.status_code >= 400:
                    raise ValueError(f"the orchestrator at {self._address}: {client_lib.error_message(response)}")
                else:
                    is_json = response.headers.get("content-type", "").startswith("application/json")
                    return response.json()["result"] if is_json else response.content
            except httpx.TransportError as error:  # some have no text
                problem = f"waiting for the orchestrator at {self._address}: {str(error) or type(error).__name__}"
                time.sleep(PAUSE_S)
            now_s = time.monotonic()
            if now_s - answered_s > patience_s:
                found = f"no answer from the orchestrator for {patience_s:.0f} s (topology.patience_s): {problem}"
                if name == "end":
                    return self._notify(f"the run has ended, and got {found}. End that process if it still runs")
                raise ValueError(f"{found}. Start it, then continue with the same command")
            if problem and now_s - noticed_s > NOTICE_S:
                noticed_s = now_s
                self._notify(problem)
