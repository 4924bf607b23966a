"""Sends the metrics of a run to programs that show them. metrics.jsonl (rl/experiment/reporting/metrics.py) is always written.

`topology.monitors` names them: "tensorboard" writes WORKDIR/tensorboard, "wandb" and "trackio" their folders in WORKDIR, "mlflow"
WORKDIR/mlflow.db. They send nothing to the network unless their own environment variables allow it: WANDB_MODE=online, TRACKIO_SPACE_ID,
MLFLOW_TRACKING_URI. A resumed run continues under the same name; only TensorBoard hides the points of the steps that it repeats.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tensorboardX import event_file_writer
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from sharding.system.logs import role_metrics

PROJECT = "intellax"


class Monitor(Protocol):
    """A program that gets the metrics of a run, step after step, such as TensorBoard."""

    def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        """Records the metrics of a step of a phase."""
        ...

    def truncate(self, phase: str, after_step: int) -> None:
        """Takes note that a resume repeats the steps of `phase` after `after_step`; most programs keep the repeated steps."""

    def close(self) -> None:
        """Writes all that is left, and ends."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as monitors name it. `key` is the same after a resume, and no other run has it."""

    workdir: pathlib.Path
    key: str
    config: Mapping[str, Any]  # field -> value


def check(names: Sequence[str]) -> None:
    """Raises ValueError if one of `topology.monitors` is unknown or not installed."""
    for name in names:
        if name not in MONITORS:
            found = f"topology.monitors contains {name!r}, which is unknown"
            raise ValueError(f"{found}; choose from {', '.join(MONITORS)}")
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise ValueError(f"topology.monitors contains {name!r}, which is not installed; pip install {name}")


def begin(names: Iterable[str], run: Run) -> dict[str, Monitor]:
    """Returns the monitors of these names for a run."""
    return {name: MONITORS[name](run) for name in names}


class Monitors(Monitor):
    """Several monitors as one. The first error of a member is printed, and only that member ends: a run needs no monitor."""

    def __init__(self, members: Mapping[str, Monitor]):
        self._members = dict(members)

    def add(self, name: str, member: Monitor) -> None:
        """Adds a monitor, which gets all later steps."""
        self._members[name] = member

    def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        self._each(lambda member: member.write(step, phase, values))

    def truncate(self, phase: str, after_step: int) -> None:
        self._each(lambda member: member.truncate(phase, after_step))

    def close(self) -> None:
        self._each(lambda member: member.close())

    def _each(self, action: Callable[[Monitor], None]) -> None:
        for name, member in [*self._members.items()]:
            try:
                action(member)
            except Exception as error:  # foreign code
                del self._members[name]
                print(f"notice: monitor {name!r} failed and gets no more metrics: {error}", file=sys.stderr, flush=True)


class TensorBoard(Monitor):
    """A TensorBoard run per phase, without the thread of `SummaryWriter`, which prints its own errors."""

    def __init__(self, run: Run):
        self._directory = run.workdir / "tensorboard"
        self._writers: dict[str, event_file_writer.EventsWriter] = {}
        self._purge_steps: dict[str, int] = {}

    def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        if phase not in self._writers:
            self._writers[phase] = self._open(phase)
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writers[phase].write_event(Event(wall_time=time.time(), step=int(step), summary=summary))
        self._writers[phase].flush()

    def truncate(self, phase: str, after_step: int) -> None:
        if phase in self._writers:
            self._writers.pop(phase).close()
        self._purge_steps[phase] = after_step + 1

    def close(self) -> None:
        for writer in self._writers.values():
            with contextlib.suppress(OSError):  # a full disk, which must not hide the error that ended the run
                writer.close()

    def _open(self, phase: str) -> event_file_writer.EventsWriter:
        directory = self._directory / phase
        directory.mkdir(parents=True, exist_ok=True)
        # Files are named by the second and opened with "wb": two of one second would be one.
        writer = event_file_writer.EventsWriter(str(directory / "events"), f".{secrets.token_hex(4)}")
        if (step := self._purge_steps.get(phase)) is not None:
            writer.write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        return writer


class Prometheus(Monitor):
    """The learner's metrics for a scrape: the newest value of each, and histograms of the parts of a train step."""

    PARTS = ("step", "wait", "train_step", "publish", "checkpoint", "eval")

    def __init__(self):
        self.step = 0  # the newest train step
        self._last: dict[str, Mapping[str, float]] = {}  # by phase
        self.metrics = role_metrics.RoleMetrics("learner", self._values, self.PARTS)

    def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        self._last = self._last | {phase: values}
        if phase == "rl":
            self.step = step
            for part in self.PARTS:
                if (seconds := values.get(f"time/{part}_s")) is not None:
                    self.metrics.seconds[part].observe(seconds)

    def _values(self) -> role_metrics.Values:
        newest = {name: value for values in self._last.values() for name, value in values.items()}
        return {"step": self.step, "metric": newest | dict(self._last.get("rl", {}))}


class Wandb(Monitor):
    """A run of Weights & Biases, offline by default. `wandb sync WORKDIR/wandb/offline-run-*` uploads it."""

    def __init__(self, run: Run):
        import wandb  # pyright: ignore[reportMissingImports]

        os.environ.setdefault("WANDB_MODE", "offline")
        name, config = run.workdir.name, dict(run.config)
        options = {"project": PROJECT, "name": name, "id": run.key[:16], "dir": str(run.workdir), "config": config}
        self._run = wandb.init(**options, resume="allow")
        self._phases: set[str] = set()

    def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log({f"{phase}/{name}": value for name, value in values.items()} | {f"{phase}/step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio(Monitor):
    """A run of trackio, in WORKDIR/trackio unless TRACKIO_DIR or TRACKIO_SPACE_ID are set. `trackio show` shows it."""

    def __init__(self, run: Run):
        os.environ.setdefault("TRACKIO_DIR", str(run.workdir / "trackio"))
        import trackio  # pyright: ignore[reportMissingImports]

        config = {name: str(value) for name, value in run.config.items()}
        self._run = trackio.init(project=PROJECT, name=run.workdir.name, config=config, resume="allow")

    def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        self._run.log({f"{phase}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow(Monitor):
    """A run of MLflow, in WORKDIR/mlflow.db unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, run: Run):
        import mlflow  # pyright: ignore[reportMissingImports]

        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.workdir.resolve() / 'mlflow.db'}")
        self._client = mlflow.MlflowClient(uri)
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        found = self._client.search_runs([number], f"tags.key = '{run.key}'", max_results=1)
        if not found:
            found = [self._client.create_run(number, run_name=run.workdir.name, tags={"key": run.key})]
            for name, value in run.config.items():
                self._client.log_param(found[0].info.run_id, name, str(value)[:6000])
        self._id, self._metric = found[0].info.run_id, mlflow.entities.Metric

    def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
        now_ms = int(1000 * time.time())
        self._client.log_batch(self._id, [self._metric(f"{phase}/{n}", v, now_ms, step) for n, v in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


MONITORS: dict[str, Callable[[Run], Monitor]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
