"""Numbers of a run: where they are kept, how they are added up, what the terminal shows.

  1. `MetricsWriter(workdir)` opens `<workdir>/metrics.jsonl` and cuts off a last line torn by a kill.
  2. On resume `truncate(phase, step)` drops what came after the checkpoint: no step stands twice.
  3. `write(step, phase, values)` appends one JSON line, and one TensorBoard point per value.
  4. `Progress` shows every phase alike: a live bar under one line per step, or plain lines off a terminal.
  5. `read` gives the lines back, `reduce` makes one dict of several, `summary_table` closes the run.

A metric is a scalar named by place: `loss/...`, `optimizer/...`, `rollout/...`, `sync/...`, `trust/...`, `time/...`. Whatever
depends on the clock lives under `time/`: drop it, and two identical runs have the same lines, byte for byte.
`time/<what>_s` are seconds of the main loop and do not overlap; `time/step_s` is the whole step. The last
part of a name says how it is reduced: `num_*` and `time/*_s` by sum, `*_max`, `*_min`, all others by mean.

Left out: W&B and Prometheus (both can follow metrics.jsonl; neither may delay a step), histograms (the
rollouts are on disk), asynchrony (a line costs microseconds). Values are on the host: fetch them first.
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

import rich.console
import rich.live
import rich.progress_bar
import rich.spinner
import rich.table
import rich.text
import tensorboardX

from sharding.multihost import hosts as hosts_lib
from sharding.system import atomic_file


def of_host(workdir, hosts: hosts_lib.Hosts) -> tuple["Progress", "MetricsWriter"]:
    """The display and the file of a run, on its first host; elsewhere such as do nothing."""
    progress = Progress(active=hosts.is_first)
    if hosts.count > 1:
        hosts.before_exit(progress.stop)
    return progress, MetricsWriter(workdir, active=hosts.is_first)


class MetricsWriter:
    """Appends to `<workdir>/metrics.jsonl` and `<workdir>/tensorboard/<phase>/`; `active` on one host."""

    def __init__(self, workdir, *, tensorboard: bool = True, active: bool = True):
        self.path = pathlib.Path(workdir) / "metrics.jsonl"
        self._active, self._tensorboard = active, tensorboard
        self._writers, self._purge_steps, self._num_opened = {}, {}, 0
        if active:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def write(self, step: int, phase: str, values: dict[str, float]) -> None:
        if not self._active:
            return
        if bare := [name for name in values if "/" not in name]:
            raise ValueError(f"metrics {bare} have no place; name them loss/..., rollout/..., time/... or so")
        values = {name: float(values[name]) for name in sorted(values)}
        line = {"phase": phase, "step": int(step)}
        line |= {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard:
            writer = self._event_writer(phase)
            for name, value in values.items():
                writer.add_scalar(name, value, int(step))

    def truncate(self, phase: str, after_step: int) -> None:
        """Drops the lines of `phase` with step > `after_step`; a reader sees the old file or the new one."""
        if not self._active:
            return
        lines = _lines(self.path)
        kept = [text for record, text in lines if record["phase"] != phase or record["step"] <= after_step]
        self._file.close()
        atomic_file.write(self.path, "".join(text + "\n" for text in kept).encode())
        self._open()
        if phase in self._writers:
            self._writers.pop(phase).close()
        self._purge_steps[phase] = after_step + 1  # TensorBoard then hides the older points from there on

    def close(self) -> None:
        if self._active:
            self._file.close()
        for writer in self._writers.values():
            writer.close()

    def _open(self):
        if self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        self._file = self.path.open("a", encoding="ascii", newline="\n")

    def _event_writer(self, phase):
        if phase not in self._writers:
            # tensorboardX names files by the second and opens them with "wb": two of one second would be one.
            self._num_opened += 1
            self._writers[phase] = tensorboardX.SummaryWriter(
                str(self.path.parent / "tensorboard" / phase),
                purge_step=self._purge_steps.get(phase),
                flush_secs=10,
                filename_suffix=f".{os.getpid()}.{self._num_opened}",
            )
        return self._writers[phase]


def read(path) -> list[dict]:
    """The whole lines of a metrics.jsonl, `{"phase": str, "step": int, name: float, ...}`; no torn end."""
    return [record for record, _ in _lines(pathlib.Path(path))]


def reduce(rows: list[dict[str, float]]) -> dict[str, float]:
    """One dict from several (micro-batches, rollouts, hosts); each name over the rows that have it."""
    columns = collections.defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name].append(float(value))
    return {name: _reduction(name)(column) for name, column in columns.items()}


def sampler_kl(values: dict[str, float]) -> str:
    """The metric that says how far the learner is from the sampler. Where ratios are taken against the learner's own old policy,
    `loss/mismatch_kl` says what the batch's steps changed, and this is a metric of its own."""
    return "loss/sampler_kl" if "loss/sampler_kl" in values else "loss/mismatch_kl"


class Progress:
    """The one display of a run; hosts other than the first pass `active=False`.

    Example:
        progress = Progress()
        progress.note("compiling train_step for [8, 256]")     # until the next line of any kind
        with progress.phase("rl", total=150, initial=resumed_step) as bar:
            bar.update(step, {"reward": 0.433, "loss": -0.0123, "tok/s": 8123.0})
    prints
        rl  step  12/150  reward 0.433  loss -0.0123  tok/s 8.1k  1.21 s/step  eta 2:47

    Phases nest. An update without values only moves the bar: evaluation counts its tasks so. Colab and log
    files are no terminals and get plain lines: the first, the last, and one per `every_s` in each phase.
    """

    def __init__(self, *, every_s: float = 5.0, stream=None, active: bool = True, clock=time.monotonic):
        self._stream, self._every_s, self._active, self._clock = stream or sys.stdout, every_s, active, clock
        self._bars, self._note, self._live = [], None, None
        if active and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            console = rich.console.Console(file=self._stream, markup=False, highlight=False, emoji=False)
            self._live = rich.live.Live(get_renderable=self._render, console=console, transient=True)
            atexit.register(self._live.stop)  # gives the cursor back when a note was the last thing shown

    @contextlib.contextmanager
    def phase(self, name: str, *, total: int | None = None, unit: str = "step", initial: int = 0):
        """A phase of `total` steps, of which a resumed run has done `initial`."""
        bar = Bar(name, total, unit, initial, self._clock, self._show)
        self._bars.append(bar)
        self.say()
        try:
            yield bar
        finally:
            self._bars.remove(bar)
            self.say(*([] if bar.shown else [bar.line()]))

    def note(self, text: str) -> None:
        """Says what will take long; a terminal shows a spinner, and afterwards the time it took."""
        self.say(*([] if self._live else [text]))
        if self._live:
            self._note = (text, self._clock(), rich.spinner.Spinner("dots"))
            self._live.start(refresh=True)

    def say(self, *lines: str) -> None:
        """Prints lines above the bars; a note has then come to its end."""
        if self._note:
            (text, started, _), self._note = self._note, None
            lines = (f"{text}  {self._clock() - started:.1f} s", *lines)
        for line in lines if self._active else ():
            if self._live:
                self._live.console.print(rich.text.Text(line), soft_wrap=True)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()
        if self._live:
            self._live.start(refresh=True) if self._bars else self._live.stop()

    def stop(self) -> None:
        """Gives the terminal back, before a process ends that takes leave of nobody."""
        if self._live:
            self._live.stop()

    def _show(self, bar, now):
        due = bar.first or bar.step == bar.total or now - bar.shown_at >= self._every_s
        bar.shown = bool(bar.values) if self._live else due
        bar.shown_at = now if bar.shown else bar.shown_at
        self.say(*([bar.line()] if bar.shown else []))

    def _render(self):
        grid = rich.table.Table.grid(padding=(0, 2))
        for bar in list(self._bars):
            pulse = rich.progress_bar.ProgressBar(total=bar.total, completed=bar.step, width=32)
            texts = [f"{bar.step}/{bar.total}" if bar.total else str(bar.step), *bar.pace()]
            grid.add_row(rich.text.Text(bar.name, style="bold"), pulse, rich.text.Text("  ".join(texts)))
        if self._note is None:
            return grid
        text, started, spinner = self._note
        spinner.update(text=rich.text.Text(f"{text}  {format_seconds(self._clock() - started)}"))
        return rich.console.Group(grid, spinner)


class Bar:
    """Handle of an open phase: `update(step, values)`, with `step` the number of steps done so far."""

    def __init__(self, name, total, unit, initial, clock, show):
        self.name, self.total, self.unit, self.step = name, total, unit, initial
        self.values, self.first, self.shown, self.shown_at = {}, False, True, 0.0
        self._clock, self._show, self._widths, self._started, self._num_updates = clock, show, {}, clock(), 0
        self._marks = collections.deque([(self._started, initial)], maxlen=20)

    def update(self, step: int, values: dict[str, float] | None = None) -> None:
        now = self._clock()
        if self._num_updates == 1:
            self._marks.popleft()  # the first step compiled: from the second on it no longer counts
        self._marks.append((now, step))
        self._num_updates += 1
        self.step, self.values = step, dict(values or {})
        self.first, self.shown = self._num_updates == 1, False
        self._show(self, now)

    def line(self) -> str:
        """`rl  step  12/150  reward 0.433  1.21 s/step  eta 2:47`; columns keep the widest width they had."""
        count = f"{self.step:>{len(str(self.total))}}/{self.total}" if self.total else str(self.step)
        cells = [self.name, f"{self.unit} {count}"]
        for name, value in self.values.items():
            text = format_value(value)
            self._widths[name] = max(len(text), self._widths.get(name, 0))
            cells.append(f"{name} {text:<{self._widths[name]}}")
        return "  ".join([*cells, *self.pace()])

    def pace(self) -> list[str]:
        """Rate over the last 20 updates and the time left; once all is done the time taken."""
        (then, first), (last, step) = self._marks[0], self._marks[-1]
        texts = []
        if step > first and last > then:
            step_s = (last - then) / (step - first)
            per_step, per_s = f"{step_s:.2f} s/{self.unit}", f"{format_value(1 / step_s)} {self.unit}/s"
            texts.append(per_step if step_s >= 0.1 else per_s)
            if self.total and self.step < self.total:
                left_s = (self.total - self.step) * step_s - (self._clock() - last)
                texts.append(f"eta {format_seconds(max(left_s, 0.0))}")
        if self._num_updates and self.step == self.total:
            texts.append(f"took {format_seconds(last - self._started)}")
        return texts


def summary_table(rows: list[dict], *, stream=None) -> None:
    """Prints dicts as an aligned table: columns in order of first appearance, text left, numbers right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = []
    for name in names:
        column = [name, *(format_value(row.get(name, "-")) for row in rows)]
        width = max(map(len, column))
        is_text = any(isinstance(row.get(name), str) for row in rows)
        column.insert(1, "-" * width)
        columns.append([f"{cell:<{width}}" if is_text else f"{cell:>{width}}" for cell in column])
    for cells in zip(*columns, strict=True):
        print("  ".join(cells).rstrip(), file=stream)


def format_value(value) -> str:
    """0.433, -0.0123, 256, 8.1k, 3.1e-08: three digits, never more than eight characters."""
    if isinstance(value, str):
        return value
    value = float(value)
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size < 1e5 and value == int(value):
        return str(int(value))
    if size < 1e-3 or size >= 1e15:
        return f"{value:.1e}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * unit:  # 999.7 is 1.0k: rounded to three digits it has four
            return f"{value / unit:.1f}{letter}"
    return f"{value:#.3g}".rstrip(".")


def format_seconds(seconds: float) -> str:
    """2:41 or 1:02:41."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _lines(path):
    """Pairs (record, its text). What follows the last newline was torn by a kill and is nobody's data."""
    for number, text in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n")[:-1], start=1):
        try:
            record = json.loads(text)
            floats = {name: float(value) for name, value in record.items() if "/" in name}
            record = {"phase": record["phase"], "step": int(record["step"])} | floats
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: {text[:60]!r} is no metrics line; delete it") from error
        yield record, text


def _reduction(name):
    last = name.rpartition("/")[2]
    if last.startswith("num_") or (name.startswith("time/") and last.endswith("_s")):
        return math.fsum
    if last.endswith(("_max", "_min")):
        return max if last.endswith("_max") else min
    return lambda column: math.fsum(column) / len(column)
