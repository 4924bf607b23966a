"""The orchestrator of a run as its learner sees it from another process: calls that may be repeated, and that survive a kill of either.

1. A learner attaches when it starts, with the step of its checkpoint and a name of its own. The orchestrator before it, if any, ends; all
   groups that no batch has taken are void, as the learner begins an epoch. An older learner that wakes up later is refused.
2. A restarted orchestrator continues by itself (`recover`): learner, checkpoint, and newest policy are in `learner.json`, accepted groups
   in the log, the rest in the ledger. The learner repeats its call until it is answered.
3. `batch` and `evaluate` return None after a time, and the learner asks again. A batch is assembled and packed once; each host of the
   learner is sent the rows that its devices need.

Left out: the counts of rollouts in the metrics of a batch begin anew with the process.
"""

import contextlib
import dataclasses
import json
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from inference.rollouts import parquet
from rl.learning.batch import host_feed, packing
from rl.protocol import timeline
from rl.protocol.ledger import run_ledger
from sharding.system import atomic_file

WAIT_S = 20.0  # that a call takes at most
MAX_EVALUATIONS = 16  # that go on at the same time, or whose results are kept
LAYOUT = ("row_length", "rows", "num_micro_batches", "shards", "key_cost")


class AnotherLearner(ValueError):
    """Raised for the call of a learner that another one has replaced."""


@dataclasses.dataclass
class Host:
    """Runs the orchestrator of a run for the learner that attached last. Any thread may call the methods."""

    directory: pathlib.Path  # the log's, which also keeps `learner.json`
    states_file: str  # there: the states of the last batches
    ledger: run_ledger.RunLedger
    # An orchestrator that serves until the end of the stack, from the state of a step, if any.
    make: Callable[[contextlib.ExitStack, dict | None], Any]
    layout: Callable[..., packing.Layout]  # packs batches; the learner names its sizes
    check: Callable[[dict], None]  # raises ValueError for a learner with these config fields
    notify: Callable[[str], None] = lambda line: None  # gets lines for people

    def __post_init__(self) -> None:
        self._file, self._states_file = self.directory / "learner.json", self.directory / self.states_file
        self._lock = threading.RLock()  # guards everything below
        self._saved: dict[str, Any] = atomic_file.read_json(self._file, dict)
        self._orchestrator: Any = None
        self._stack = contextlib.ExitStack()
        self._pool = futures.ThreadPoolExecutor(MAX_EVALUATIONS + 2, "learner-call")
        self._jobs: dict[tuple, futures.Future] = {}
        self.ended = threading.Event()  # the learner has finished the run

    def close(self) -> None:
        """Ends the orchestrator."""
        with self._lock:
            self._end("the orchestrator ends")
        self._pool.shutdown(cancel_futures=True)

    def recover(self) -> bool:
        """Continues the run of the last learner after a restart; returns False if that needs a new one to attach."""
        with self._lock:
            if not self._saved:
                return False
            policy = self._saved["policy"] and timeline.Policy.from_json(self._saved["policy"])
            step = policy.version if policy else self._saved["step"]
            self.ledger.flush()
            recorded = self.ledger.run.step
            if recorded not in (step, step + 1):
                return False
            saved = atomic_file.read_json(self._states_file, dict)
            state = self._saved["state"] if step == self._saved["step"] else saved.get(str(step))
            try:
                self._begin(step, state, saved.get(str(step + 1)) if recorded > step else None)
                if policy:
                    self._orchestrator.publish(policy)
                return True
            except ValueError as error:
                if self._orchestrator is None:  # it cannot serve
                    raise
                self._end(str(error))
                self.notify(f"the run waits for its learner to start again: {error}")
                return False

    def attach(self, learner: str, fields: dict, step: int, state: dict, head: str | None) -> None:
        """Begins or continues the run after batch `step` for a learner that has started. Raises ValueError for another config or ledger."""
        self.check(fields)
        with self._lock:
            if self._orchestrator is not None and self._saved.get("learner") == learner:
                return  # the reply was lost
            if head:
                self.ledger.check_contains(head, "the restored checkpoint")
            self._end("another learner continues this run")
            self.ledger.resumed(step).result()
            self._states_file.unlink(missing_ok=True)
            self._save(learner=learner, step=step, state=state, policy=None)
            self._begin(step, state, None)

    def publish(self, learner: str, policy: timeline.Policy) -> None:
        """Records a published policy, once, and names it to the servers."""
        with self._lock:
            orchestrator = self.of(learner)
            if (policy.epoch, policy.version) not in self.ledger.run.published:
                self.ledger.published(policy.version, policy.digest, policy.epoch).result()
            self._save(policy=policy.to_json())
            orchestrator.publish(policy)

    def head(self, learner: str) -> str:
        """Returns the ledger's head."""
        self.of(learner)
        return self.ledger.head()

    def batch(self, learner: str, step: int, sizes: dict) -> dict | None:
        """Returns the metrics of batch `step` and its number of micro-batches; None if it is not complete yet."""
        found = self._packed(learner, step, sizes)
        return found and found[1]

    def rows(self, learner: str, step: int, sizes: dict, regions: Sequence) -> bytes | None:
        """Returns (rows, columns) blocks of batch `step`, in the order of `host_feed.cut`; None if it is not complete yet."""
        if (found := self._packed(learner, step, sizes)) is None:
            return None
        blocks = [(slice(*rows), slice(*columns)) for rows, columns in regions]
        return b"".join(x.tobytes() for x in host_feed.cut(found[0], self.layout(**sizes), blocks))

    def evaluate(self, learner: str, version: int, set_name: str = "") -> bytes | None:
        """Returns the rollouts of an evaluation set as a Parquet file, with the rewards that we computed; None while some are missing.

        The file is b"" if the evaluation was given up.
        """

        def evaluate(orchestrator) -> bytes:
            rollouts = [rollout for group in orchestrator.evaluate(version, set_name) for rollout in group]
            return parquet.to_bytes(rollouts) if rollouts else b""

        return self._job(learner, ("evaluate", version, set_name), evaluate)

    def end(self, learner: str) -> None:
        """Ends the run for the workers; this process may end, too."""
        self.of(learner).end()
        self.ended.set()

    def of(self, learner: str) -> Any:
        """Returns the orchestrator for a call. Raises AnotherLearner unless `learner` attached last."""
        with self._lock:
            if self._saved.get("learner") != learner:
                raise AnotherLearner("another learner continues this run; end this one")
            if self._orchestrator is None:
                raise AnotherLearner("the orchestrator could not continue from its files; start the learner again")
            return self._orchestrator

    def _packed(self, learner: str, step: int, sizes: dict) -> tuple[packing.TrainBatch, dict] | None:
        def make(orchestrator) -> tuple[packing.TrainBatch, dict]:
            batch = orchestrator.next_batch(step)
            packed = packing.pack(batch.trees, self.layout(**sizes))
            return packed, {"metrics": batch.metrics, "num_micro_batches": int(packed.num_micro_batches)}

        return self._job(learner, ("batch", step), make)

    def _job(self, learner: str, name: tuple, function: Callable[[Any], Any]) -> Any:
        """Returns the result of a call that is made once however often it is asked for; None if it is not there after `WAIT_S`."""
        with self._lock:
            orchestrator = self.of(learner)
            if name not in self._jobs:
                done = [other for other, job in self._jobs.items() if other[0] == name[0] and job.done()]
                for other in done if name[0] == "batch" else done[:-MAX_EVALUATIONS]:
                    del self._jobs[other]
                self._jobs[name] = self._pool.submit(function, orchestrator)
            job = self._jobs[name] = self._jobs.pop(name)  # the newest request is dropped last
        futures.wait([job], WAIT_S)
        return job.result() if job.done() else None

    def _begin(self, step: int, state: dict | None, later: dict | None) -> None:
        self._orchestrator = self.make(self._stack, later or state)
        self._orchestrator.resume(step, state, later)

    def _end(self, reason: str) -> None:
        if self._orchestrator is not None:
            self._orchestrator.fail(ValueError(reason))
        self._stack.close()
        self._orchestrator, self._jobs = None, {}

    def _save(self, **fields: Any) -> None:
        self._saved |= fields
        self._file.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(self._file, json.dumps(self._saved).encode(), durable=True)


def sizes_of(layout: packing.Layout) -> dict:
    """Returns the sizes of a layout as a JSON object."""
    return {name: value for name, value in dataclasses.asdict(layout).items() if name in LAYOUT}
