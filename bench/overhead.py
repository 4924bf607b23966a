"""Measures the cost of metrics, logs, and the page: the quickstart with them against without, in pairs.

    python -m bench.overhead                                    # three pairs of the whole quickstart
    python -m bench.overhead --pairs 1 --set rl.num_steps=20    # a trial

1. A short run first fills the compile cache. The runs of a pair follow each other, and the next pair has the other order.
2. "with" is a run whose /metrics is scraped every 10 s, as by examples/monitoring, and whose page is fetched every 5 s, as by an open browser; it
   writes TensorBoard files and logs. "without" has none of these: no monitor, no listener, and lines of logs are dropped. Both write
   metrics.jsonl and the report, which are the data of the run itself.
3. The wall time is that of the whole command, and the CPU time that of all its processes.

Acceptance: the median ratio of the wall times is at most 1.02, on an idle machine.
"""

import contextlib
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

import httpx

from sharding.system import cli

SCRAPE_S, PAGE_S = 10.0, 5.0
RUN = "import runpy, sys; runpy.run_module('rl.train', run_name='__main__', alter_sys=True)"
WITHOUT_LOGS = f"from sharding.logs import run_logs; run_logs.Log.write = lambda self, text: None; {RUN}"


def measure(folder: pathlib.Path, options: Sequence[str], is_watched: bool) -> tuple[float, float, int]:
    """Runs the quickstart in `folder`; returns (wall seconds, CPU seconds, number of replies to scrapes and pages). Raises ValueError if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    own = [f"--config.topology.metrics={address}"] if is_watched else ["--config.topology.monitors=()"]
    code = RUN if is_watched else WITHOUT_LOGS
    command = [sys.executable, "-c", code, "--config=configs/quickstart.py", f"--workdir={folder}", *options, *own]
    before, begun_s = _cpu_s(), time.perf_counter()
    with folder.with_suffix(".log").open("w") as output, _watched(address, is_watched) as replies:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        wall_s = time.perf_counter() - begun_s
    if status:
        raise ValueError(f"the run in {folder} ended with code {status}; its output is in {output.name}")
    return wall_s, _cpu_s() - before, len(replies)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _watched(address: str, is_watched: bool) -> Iterator[list[int]]:
    """Fetches metrics and page of a run during the block; yields the sizes of the replies."""
    replies: list[int] = []
    ended = threading.Event()

    def fetch(path: str, every_s: float) -> None:
        while not ended.wait(every_s):
            with contextlib.suppress(httpx.HTTPError):
                replies.append(len(httpx.get(f"http://{address}/{path}", timeout=60).content))

    threads = [threading.Thread(target=fetch, args=args) for args in (("metrics", SCRAPE_S), ("run", PAGE_S))]
    for thread in threads if is_watched else ():
        thread.start()
    try:
        yield replies
    finally:
        ended.set()
        for thread in threads if is_watched else ():
            thread.join()


def main() -> int:
    """Runs the pairs and prints their ratios; returns 0 if the median is within the limit."""
    parser = cli.Parser(prog="python -m bench.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the config, for both")
    args = parser.parse_args()
    options, ratios = [f"--config.{field}" for field in args.set], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        measure(folder / "first", [*options, "--config.rl.num_steps=2"], False)
        for pair in range(args.pairs):
            found = {}
            for is_watched in (True, False) if pair % 2 else (False, True):
                found[is_watched] = measure(folder / f"pair_{pair}_{is_watched}", options, is_watched)
            (wall_s, cpu_s, replies), (plain_s, plain_cpu_s, _) = found[True], found[False]
            ratios.append(wall_s / plain_s)
            text = f"pair {pair}: wall {wall_s:.1f} and {plain_s:.1f} s, ratio {ratios[-1]:.3f}; CPU {cpu_s:.1f} and "
            print(f"{text}{plain_cpu_s:.1f} s, ratio {cpu_s / plain_cpu_s:.3f}; {replies} replies", flush=True)
    median = statistics.median(ratios)
    print(f"median ratio of the wall time with and without: {median:.3f} (at most 1.02)")
    return 0 if median <= 1.02 else 1


if __name__ == "__main__":
    sys.exit(main())
