"""Writes the metrics of a run to files, and shows its progress on the terminal.

The name of a metric begins with its area: `loss/`, `optimizer/`, `rollout/`, `sync/`, `trust/`, `time/`, or `machine/`. All metrics
that depend on the clock or the hardware are under `time/` and `machine/`: without them, two identical runs have the same lines, byte for
byte. `time/<name>_s` are seconds of the main loop and do not overlap; `time/step_s` is the whole step, with its checkpoint and evaluation,
and the time that `time/tokens_per_s` divides by; `time/unix` is its end, in Unix seconds. docs/metrics.md lists them all.
"""

import atexit
import collections
import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import rich.console
import rich.progress
import rich.text

from rl.experiment.reporting import monitors as monitors_lib
from sharding.system import atomic_file
from sharding.system.logs import run_logs
from sharding.system.multihost import hosts as hosts_lib

PLAIN_LINE_S = 5.0  # at most one line per phase in this time, where the output is not a terminal


def of_host(
    workdir: pathlib.Path,
    hosts: hosts_lib.Hosts,
    monitors: Mapping[str, monitors_lib.Monitor],
    log: run_logs.Log | None = None,
) -> tuple["Progress", "MetricsWriter"]:
    """Returns (progress display, metrics writer) of a run for this host. On hosts other than host 0 both do nothing.

    The lines of the display go to `log`, too.
    """
    progress = Progress(active=hosts.is_first, log=log)
    hosts.before_exit(progress.stop)
    return progress, MetricsWriter(workdir, monitors, active=hosts.is_first)


class MetricsWriter:
    """Writes metrics to metrics.jsonl in a run's work directory and to its monitors. Without `active`, writes nothing."""

    def __init__(
        self,
        workdir: str | os.PathLike,
        monitors: Mapping[str, monitors_lib.Monitor] | None = None,
        *,
        active: bool = True,
    ):
        self.path = pathlib.Path(workdir) / "metrics.jsonl"
        self.monitors = monitors_lib.Monitors(monitors or {})
        self._active = active
        if active:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def write(self, step: int, phase: str, values: dict[str, float]) -> None:
        """Appends the metrics of a step of a phase. Raises ValueError for a name without an area, such as loss/ in loss/total."""
        if not self._active:
            return
        if bare := [name for name in values if "/" not in name]:
            raise ValueError(f"metrics {bare} have no area; name them loss/..., rollout/..., time/... or similar")
        values = {name: float(values[name]) for name in sorted(values)}
        line: dict[str, Any] = {"phase": phase, "step": int(step)}
        line |= {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self.monitors.write(int(step), phase, values)

    def truncate(self, phase: str, after_step: int) -> None:
        """Removes the metrics of `phase` after step `after_step`, for a resume. Readers see the old file or the new one."""
        if not self._active:
            return
        records = read(self.path)
        lines = zip(self.path.read_bytes().splitlines(keepends=True), records, strict=True)
        kept = [line for line, record in lines if record["phase"] != phase or record["step"] <= after_step]
        if phase == "rl":
            written = {record["step"] for record in records if record["phase"] == phase}
            if lost := {*range(1, after_step)} - written:  # a kill before its line is written may lose the last step
                text = f"notice: {self.path} lacks {len(lost)} of the {after_step} steps before the resume"
                print(f"{text}: it was cut, and the report lacks them, too", file=sys.stderr, flush=True)
        self._file.close()
        atomic_file.write(self.path, *kept)
        self._open()
        self.monitors.truncate(phase, after_step)

    def close(self) -> None:
        self.monitors.close()
        if self._active:
            with contextlib.suppress(OSError):  # a full disk, which must not hide the error that ended the run
                self._file.close()

    def _open(self):
        if self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        self._file = self.path.open("a", encoding="ascii", newline="\n")


def read_steps(workdir: pathlib.Path) -> list[dict]:
    """Returns the lines of the RL steps of the run in a working directory, as `read` does."""
    return read(workdir / "metrics.jsonl", "rl")


def read(path: str | os.PathLike, phase: str = "") -> list[dict]:
    """Returns the lines of a metrics.jsonl, or those of one phase: `{"phase": str, "step": int, name: float, ...}`.

    Without a file there are none. Skips an incomplete last line, which a killed process may leave. Raises ValueError with the number of a malformed line.
    """
    return [record for record in Reader(path).records() if phase in ("", record["phase"])]


class Reader:
    """A metrics.jsonl that grows. Lines that were read once are not read again."""

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._forget()

    def records(self) -> list[dict]:
        """Returns all lines, as `read` does. A file that was cut or replaced is read again from its start."""
        if not self._path.exists():
            self._forget()
            return []
        with self._path.open("rb") as file:
            file.seek(self._end - len(self._last))
            if os.fstat(file.fileno()).st_ino != self._inode or file.read(len(self._last)) != self._last:
                self._forget()
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(0)
            lines = file.read().split(b"\n")[:-1]
        found = [self._parsed(number, line) for number, line in enumerate(lines, start=len(self._records) + 1)]
        if lines:
            self._records += found
            self._end, self._last = self._end + sum(len(line) + 1 for line in lines), lines[-1] + b"\n"
        return list(self._records)

    def _forget(self) -> None:
        self._records: list[dict] = []
        self._end, self._last, self._inode = 0, b"", -1  # the end of the last line that was read, and this line

    def _parsed(self, number: int, line: bytes) -> dict:
        text = line.decode("utf-8", "replace")
        try:
            record = json.loads(text)
            floats = {name: float(value) for name, value in record.items() if "/" in name}
            return {"phase": record["phase"], "step": int(record["step"])} | floats
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self._path}:{number}: {text[:60]!r} is not a line of metrics; delete it") from error


def sampler_kl(values: dict[str, float]) -> str:
    """Returns the name of the metric in `values` for the mismatch KL of learner and sampler.

    If importance ratios are taken against the learner's own old policy, `loss/mismatch_kl` measures the change by
    this batch's optimizer steps, and the mismatch with the sampler is in `loss/sampler_kl`.
    """
    return "loss/sampler_kl" if "loss/sampler_kl" in values else "loss/mismatch_kl"


class Progress:
    """The terminal display of a run: progress bars, notes, and lines of text. Without `active`, shows nothing.

    Example:
        progress.note("compiling train_step for [8, 256]")     # shown with a timer until the next line
        with progress.phase("rl", total=150, initial=resumed_step) as bar:
            bar.update(step, {"reward": 0.433, "loss": -0.0123, "tok/s": 8123.0})
    prints
        rl  step  12/150  reward 0.433  loss -0.0123  tok/s 8.1k  1.21 s/step  eta 2:47

    Outputs that are not a terminal get the first and the last line of a phase, and at most one per PLAIN_LINE_S in between.
    """

    def __init__(
        self,
        *,
        out: TextIO | None = None,
        active: bool = True,
        clock: Callable[[], float] = time.monotonic,
        log: run_logs.Log | None = None,
    ):
        self._stream, self._active, self._clock, self._log = out or sys.stdout, active, clock, log
        self._is_live = active and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._display = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", style="bold", markup=False),
            rich.progress.BarColumn(32),
            _Status(),
            console=rich.console.Console(file=self._stream, markup=False, highlight=False, emoji=False),
            transient=True,
            disable=not self._is_live,
        )
        self._note: tuple[str, float, rich.progress.TaskID | None] | None = None
        if self._is_live:
            atexit.register(self.stop)  # restores the cursor if a note was the last line shown

    @contextlib.contextmanager
    def phase(self, name: str, *, total: int, initial: int = 0) -> Iterator["Bar"]:
        """Shows a progress bar for a phase of `total` steps, `initial` of them done before a resume. Yields the Bar to update."""

        def show(is_last: bool = False) -> None:
            self._display.update(task, completed=bar.step)
            if self._is_live or is_last or bar.is_due(self._clock()):
                bar.shown_step, bar.shown_s = bar.step, self._clock()
                self.say(bar.line())

        bar = Bar(name, total, initial, self._clock, show)
        task = self._display.add_task(name, total=total, completed=initial, status=bar.status)
        self.say()
        try:
            yield bar
        finally:
            if bar.step != bar.shown_step:
                show(is_last=True)
            self._display.remove_task(task)
            self.say()

    def note(self, text: str) -> None:
        """Shows a text such as "compiling" until the next line. A terminal adds a timer, and finally prints the text with its time."""
        self.say(*([] if self._is_live else [text]))
        begun_s, task = self._clock(), None
        if self._is_live:
            task = self._display.add_task(text, total=None, status=lambda: format_seconds(self._clock() - begun_s))
            self._display.start()
        self._note = text, begun_s, task

    def doing(self) -> str:
        """Returns the current note, with the seconds since then; "" if a line ended it."""
        note = self._note
        return f"{note[0]}, for {format_seconds(self._clock() - note[1])}" if note else ""

    def say(self, *lines: str) -> None:
        """Prints lines above the progress bars. Ends the current note, if any."""
        if self._note:
            (text, begun_s, task), self._note = self._note, None
            if task is not None:
                self._display.remove_task(task)
                lines = (f"{text}  {self._clock() - begun_s:.1f} s", *lines)
        for line in lines if self._active else ():
            if self._is_live:
                self._display.console.print(rich.text.Text(line), soft_wrap=True)
            else:
                print(f"{line}\n", end="", file=self._stream, flush=True)  # one write: other threads print, too
            if self._log:
                self._log.write(line.encode())
        self._display.start() if self._display.tasks else self._display.stop()

    def stop(self) -> None:
        """Removes the progress bars and restores the terminal's cursor."""
        self._display.stop()


class Bar:
    """The progress of one phase of a run. `shown_step` and `shown_s` are the step and the time of its last printed line."""

    def __init__(self, name: str, total: int, initial: int, clock: Callable[[], float], show: Callable[[], None]):
        self.step = self.shown_step = initial
        self.shown_s = 0.0
        self._name, self._total, self._clock, self._show = name, total, clock, show
        self._values: dict[str, float] = {}
        self._widths: dict[str, int] = collections.defaultdict(int)
        self._num_updates, self._begun_s = 0, clock()
        self._marks = collections.deque([(self._begun_s, initial)], maxlen=20)

    def update(self, step: int, values: dict[str, float]) -> None:
        """Sets the number of steps done to `step`, and shows the metrics `values` of that step if a line is due."""
        if self._num_updates == 0:
            self._marks.clear()  # the first step compiles, and waits for servers and workers: it does not count
        self._marks.append((self._clock(), step))
        self._num_updates += 1
        self.step, self._values = step, values
        self._show()

    def is_due(self, now_s: float) -> bool:
        """Returns True if a line is due at time `now_s` on an output that is not a terminal."""
        return self._num_updates == 1 or self.step == self._total or now_s - self.shown_s >= PLAIN_LINE_S

    def line(self) -> str:
        """Returns the line `rl  step  12/150  reward 0.433  1.21 s/step  eta 2:47`; columns keep the largest width they had."""
        cells = [self._name, f"step {self.step:>{len(str(self._total))}}/{self._total}"]
        for name, text in ((name, format_value(value)) for name, value in self._values.items()):
            self._widths[name] = max(len(text), self._widths[name])
            cells.append(f"{name} {text:<{self._widths[name]}}")
        return "  ".join([*cells, *self.pace()])

    def status(self) -> str:
        """Returns the text after the bar on a terminal: steps done, rate, and time left."""
        return "  ".join([f"{self.step}/{self._total}", *self.pace()])

    def pace(self) -> list[str]:
        """Returns texts for the rate over the last 20 updates and the time left, or the total time if all steps are done."""
        (then_s, first), (last_s, step) = self._marks[0], self._marks[-1]
        texts = []
        if step > first and last_s > then_s:
            step_s = (last_s - then_s) / (step - first)
            texts.append(f"{step_s:.2f} s/step" if step_s >= 0.1 else f"{format_value(1 / step_s)} step/s")
            if self.step < self._total:
                left_s = (self._total - self.step) * step_s - (self._clock() - last_s)
                texts.append(f"eta {format_seconds(max(left_s, 0.0))}")
        if self._num_updates and self.step == self._total:
            texts.append(f"took {format_seconds(last_s - self._begun_s)}")
        return texts


class _Status(rich.progress.ProgressColumn):
    """The column of the terminal display with a task's status: the text that the function in `task.fields["status"]` returns."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(task.fields["status"]())


def format_value(value: Any) -> str:
    """Formats a number in short: whole ones below 100,000 in full (12345), others as 0.433, 81.2k, or 3.1e-08. Returns a string as it is."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    value, size = float(value), abs(value)
    if size < 1e5 and value == int(value):
        return str(int(value))
    if size < 1e-3 or size >= 1e15:
        return f"{value:.1e}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * unit:  # 999.7 is 1.0k: rounded to three digits it has four
            return f"{value / unit:.1f}{letter}"
    return f"{value:#.3g}".rstrip(".")


def format_seconds(seconds: float) -> str:
    """Formats a duration in seconds as 2:41 or 1:02:41."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
