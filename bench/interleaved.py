"""Measures the cost of evaluations during a run: the quickstart with and without them, in turns.

    python -m bench.interleaved                                   # evaluation.every = 20 and 0, three seeds: six runs
    python -m bench.interleaved --seeds 0 --set rl.num_steps=4 warmup.num_steps=20 --every 2      # a trial

The seconds of a run are those of its steps after the first, which compiles. They have no evaluation before the first or after the last step. Each run is one of
`bench.lag`: a process of its own, and not repeated once it is finished.
"""

import statistics
import sys

from bench import lag
from rl.reporting import metrics
from sharding.system import cli


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (default: the process's arguments); returns the exit code."""
    parser = cli.Parser(prog="python -m bench.interleaved", description=__doc__)
    every_help = "value of evaluation.every; the other run of a pair has 0"
    parser.add_argument("--every", type=int, default=20, help=every_help)
    options = lag.parse(parser, "runs/interleaved", argv)
    costs = []
    for seed in options.seeds:
        seconds = {}
        for every in (options.every, 0) if seed % 2 else (0, options.every):
            folder = options.workdir / f"every_{every}_seed_{seed}"
            lag.train(folder, [f"seed={seed}", f"evaluation.every={every}", *options.set])
            seconds[every] = sum(step["time/step_s"] for step in metrics.read_steps(folder)[1:])
        costs.append(seconds[options.every] / seconds[0] - 1)
        print(
            f"seed {seed}: {seconds[0]:.1f} s without, {seconds[options.every]:.1f} s with: {costs[-1]:+.1%}",
            flush=True,
        )
    print(f"mean {statistics.fmean(costs):+.1%} of {len(costs)} pairs; the limit is +5 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
