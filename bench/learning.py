"""Trains the small model on environments of several calls: does each learn in 15 minutes, and does a learning rate of 0 stay flat?

    python -m bench.learning                                    # configs/environments.py:python_tool and so on, four runs each
    python -m bench.learning --names rlm --seeds 0 --steps 4            # a trial

Each run is one of `bench.lag`: a process of its own, and not repeated once it is finished. Its row has its minutes (the warm-up
included; of the last attempt), the held-out score before and after, the largest mismatch KL of learner and sampler, the number of rejected rollouts,
and the mean reward of each fifth of its steps. The row "flat" is seed 0 with a learning rate of 0.
"""

import itertools
import json
import pathlib
import statistics
import sys

from bench import lag
from rl.experiment.reporting import metrics
from sharding.system import cli

NAMES = ("python_tool", "rlm", "search", "wordle")


def row(folder: pathlib.Path) -> str:
    """Returns the cells of a finished run."""
    steps = metrics.read_steps(folder)
    scores = [one["scores"]["avg@1"] for one in json.loads((folder / "evaluations.json").read_text())]
    minutes = ((folder / "report.html").stat().st_mtime - (folder / ".lock").stat().st_mtime) / 60
    bounds = [len(steps) * fifth // 5 for fifth in range(6)]
    means = [statistics.fmean(step["rollout/reward"] for step in steps[a:b]) for a, b in itertools.pairwise(bounds)]
    mismatch = max(abs(step.get("loss/mismatch_kl", 0.0)) for step in steps)
    rejected = sum(step["trust/num_refused"] for step in steps)
    curve = " ".join(f"{mean:.2f}" for mean in means)
    return f"{minutes:.1f} | {scores[0]:.2f} | {scores[-1]:.2f} | {mismatch:.1e} | {rejected:.0f} | {curve} |"


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (default: the process's arguments); returns the exit code."""
    parser = cli.Parser(prog="python -m bench.learning", description=__doc__)
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    options = lag.parse(parser, "runs/learning", argv)
    print(
        "| environment, seed | minutes | before | after | mismatch KL | rejected | mean reward by fifths |\n|"
        + "---|" * 7
    )
    for name in options.names:
        runs = [(f"seed {seed}", [f"seed={seed}"]) for seed in options.seeds]
        for label, fields in (*runs, ("flat", ["seed=0", "optimizer.learning_rate=0.0"])):
            folder = options.workdir / f"{name}_{label.replace(' ', '_')}"
            lag.train(folder, [*fields, *options.set], f"configs/environments.py:{name}")
            print(f"| `{name}`, {label} | {row(folder)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
