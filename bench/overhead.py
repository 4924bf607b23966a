"""Measures the cost of metrics, logs, and the page: the steps of the quickstart with them against the same steps without.

    python -m bench.overhead                                                   # three seeds, two runs each
    python -m bench.overhead --seeds 0 --set warmup.num_steps=20 rl.num_steps=24 --window 2     # a trial

1. The speed of a machine drifts by a fifth within minutes. So windows of steps with and without them alternate within a run: with, without,
   without, with. The other run of a seed has the other order, and its steps do the same work.
2. "with": /metrics is scraped every 10 s, as by examples/monitoring, the page is fetched every 5 s, as by an open browser, each step goes to
   TensorBoard and to Prometheus, and lines to logs. "without" has none of these; metrics.jsonl and the listener are in both.
3. A window lasts from the end of the step before it. Its ratio is that of the two runs; two windows, one of each kind, are a pair, in which a
   difference between the runs cancels. The uncertainty is 1.96 standard errors of the mean of the pairs.
4. Each run is one of `bench.lag`: a process of its own, and not repeated once it is finished.

Acceptance: the ratio is at most 1.02, on an idle machine.
"""

import contextlib
import math
import pathlib
import runpy
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import httpx

from bench import lag
from rl.experiment.reporting import metrics, monitors
from sharding.system import cli
from sharding.system.logs import run_logs

PERIODS_S = {"metrics": 10.0, "run": 5.0}
FIRST = 5  # step of the first window: the steps before it wait for the compiler and the first evaluation


def is_watched(step: int, window: int, is_other: bool) -> bool:
    """Returns True if a step is with metrics, logs, and page, in the first run of a seed or the other one."""
    return ((step - FIRST) // window % 4 in (0, 3)) != is_other


def run(flag: str, window: int, is_other: bool) -> None:
    """Is `rl.train` with the arguments of the process. Only while the file `flag` exists, from `is_watched`, it writes to monitors and logs."""
    file, to_monitors, to_log = pathlib.Path(flag), monitors.Monitors.write, run_logs.Log.write

    def write(self, step, phase, values):
        if phase == "rl":
            file.touch() if is_watched(step + 1, window, is_other) else file.unlink(missing_ok=True)
        if file.exists():
            to_monitors(self, step, phase, values)

    file.unlink(missing_ok=True)
    monitors.Monitors.write = write
    run_logs.Log.write = lambda self, text: to_log(self, text) if file.exists() else None
    runpy.run_module("rl.train", run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _watched(address: str, flag: pathlib.Path) -> Iterator[list[int]]:
    """Fetches metrics and page of a run during the block, while the file `flag` exists; yields the sizes of the replies."""
    replies: list[int] = []
    ended = threading.Event()

    def fetch(path: str, every_s: float) -> None:
        with httpx.Client(trust_env=False, timeout=60) as client:
            due_s = time.monotonic()
            while not ended.wait(max(due_s - time.monotonic(), 0)):
                due_s += every_s
                with contextlib.suppress(httpx.HTTPError):
                    if flag.exists():
                        replies.append(len(client.get(f"http://{address}/{path}").raise_for_status().content))

    threads = [threading.Thread(target=fetch, args=args) for args in PERIODS_S.items()]
    for thread in threads:
        thread.start()
    try:
        yield replies
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def log_ratios(folders: Sequence[pathlib.Path], window: int) -> list[float]:
    """Returns the logarithm of with : without of each pair of windows of two runs, the first with `is_other` False."""
    ends = [{step["step"]: step["time/unix"] for step in metrics.read_steps(folder)} for folder in folders]
    found = []
    for first in range(FIRST, min(map(len, ends)) - window + 2, window):
        own_s, other_s = (end[first + window - 1] - end[first - 1] for end in ends)
        found.append(math.log(own_s / other_s) * (1 if is_watched(first, window, False) else -1))
    return [(one + next_) / 2 for one, next_ in zip(found[::2], found[1::2], strict=False)]


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (default: the process's arguments); returns 0 if the ratio is within the limit."""
    parser = cli.Parser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--window", type=int, default=4, help="steps of a window")
    options = lag.parse(parser, "runs/overhead", argv)
    logs: list[float] = []
    num_replies = 0
    for seed in options.seeds:
        folders = [options.workdir / f"window_{options.window}_seed_{seed}_{number}" for number in range(2)]
        for folder, is_other in zip(folders, (False, True), strict=True):
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            flag = folder.with_suffix(".watched").absolute()
            code = f"from bench import overhead; overhead.run({str(flag)!r}, {options.window}, {is_other})"
            with _watched(address, flag) as replies:
                lag.train(folder, [f"seed={seed}", f"topology.metrics={address}", *options.set], program=("-c", code))
            num_replies += len(replies)
        logs += log_ratios(folders, options.window)
        ratio, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        text = f"{math.exp(ratio):.4f} ± {1.96 * error:.4f} from {len(logs)} pairs of windows, {num_replies} replies"
        print(f"time of steps with : without after seed {seed}: {text} (at most 1.02)", flush=True)
    return 0 if math.exp(ratio) <= 1.02 else 1


if __name__ == "__main__":
    sys.exit(main())
