"""Measures the cost of evaluations during a run: the time of the quickstart's steps with one, against that of the steps around them.

    python -m bench.interleaved                                   # evaluation.every = 20, three seeds
    python -m bench.interleaved --seeds 0 --set rl.num_steps=12 warmup.num_steps=20 --every 4     # a trial

1. The steps of an evaluation are those that begin before its end. Its cost is their time beyond the mean of the steps without one, up to `NEAR`
   steps away. So the drift of a machine's speed during a run is not counted: it hides 5 % between two runs.
2. The cost of a run is the sum, by the time of its steps after the first without this sum. The first step compiles, and the evaluations before it and after
   the last have no step.
3. Each run is one of `bench.lag`: a process of its own, and not repeated once it is finished.
"""

import pathlib
import statistics
import sys

from bench import lag
from rl.experiment.reporting import metrics
from sharding.system import cli

NEAR = 12


def costs(folder: pathlib.Path) -> tuple[list[float], float]:
    """Returns the seconds that each evaluation cost a run, and its relative cost."""
    step_s = {step["step"]: step["time/step_s"] for step in metrics.read_steps(folder)[1:]}
    of = {}  # step of an evaluation -> its steps
    for record in metrics.read(folder / "metrics.jsonl"):
        if "time/eval_s" in record and "time/step_s" not in record and record["step"] + 1 in step_s:
            left_s, own = record["time/eval_s"], record["step"] + 1
            of[record["step"]] = steps = []
            while left_s > 0 and own in step_s:
                steps.append(own)
                left_s, own = left_s - step_s[own], own + 1
    plain = step_s.keys() - {own for steps in of.values() for own in steps}
    extra_s = []
    for step, steps in of.items():
        near_s = statistics.fmean(step_s[other] for other in plain if abs(other - step) <= NEAR)
        extra_s.append(sum(step_s[own] - near_s for own in steps))
    return extra_s, sum(extra_s) / (sum(step_s.values()) - sum(extra_s))


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (default: the process's arguments); returns the exit code."""
    parser = cli.Parser(prog="python -m bench.interleaved", description=__doc__)
    parser.add_argument("--every", type=int, default=20, help="value of evaluation.every")
    options = lag.parse(parser, "runs/interleaved", argv)
    found = []
    for seed in options.seeds:
        folder = options.workdir / f"every_{options.every}_seed_{seed}"
        lag.train(folder, [f"seed={seed}", f"evaluation.every={options.every}", *options.set])
        extra_s, cost = costs(folder)
        found.append(cost)
        each = ", ".join(f"{one:.1f}" for one in extra_s)
        print(f"seed {seed}: the evaluations cost {each} s, {cost:+.1%} of the other time of the steps", flush=True)
    print(f"mean {statistics.fmean(found):+.1%} of {len(found)} runs; the limit is +5 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
