"""Trains the quickstart at several lags and seeds: the held-out score of each, the time of a step, and the busy roles.

    python -m bench.lag        # lags 0, 1, 2, and 4 with three seeds each
    python -m bench.lag --lags 0 1 --seeds 0 --steps 2 --set evaluation.num_tasks=8     # a trial

1. Each run is `rl.train` in a process of its own, one after the other, in WORKDIR/lag_L_seed_S. A finished run is not repeated.
2. The spread of a lag is the largest difference between its seeds. "within" compares its mean with that of lag 0: it differs by no more
   than the larger spread of the two.
3. The time of a step is the mean without the first, which compiles; the parts of it in which learner, workers, and validators were busy
   are those of the run's trace (rl/experiment/reporting/timeline_trace.py), "both" those in which the workers generated while the learner trained.

Acceptance: "within" at each lag, and at lag 1 at most 0.8 of the time at lag 0 on two cores, or shares that show why not.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence

from rl.experiment.reporting import metrics, timeline_trace
from sharding.system import cli


def parse(parser: cli.Parser, workdir: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a command of several runs: its own and `seeds`, `set` (with `--steps`), and `workdir`."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="rl.num_steps (default: the config's)")
    parser.add_argument("--set", nargs="*", default=[], help="further fields of the config, as NAME=VALUE")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path(workdir))
    options = parser.parse_args(argv)
    if options.steps is not None:
        options.set = [f"rl.num_steps={options.steps}", *options.set]
    return options


def train(
    folder: pathlib.Path,
    options: Sequence[str],
    config: str = "configs/quickstart.py",
    program: Sequence[str] = ("-m", "rl.train"),
) -> None:
    """Runs or resumes a run of `config` in `folder`, unless it has ended. Raises ValueError if it fails."""
    if (folder / "report.html").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *program, f"--config={config}", f"--workdir={folder}"]
    with open(log := folder.with_suffix(".log"), "a") as output:
        flags = [f"--config.{option}" for option in options]
        code = subprocess.run([*command, *flags], stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise ValueError(f"the run in {folder} ended with code {code}; its output is in {log}")


def figures(folder: pathlib.Path) -> dict[str, float]:
    """Returns the last held-out score of a finished run, the mean seconds of its steps, and busy shares of its roles."""
    steps = metrics.read_steps(folder)
    shares = timeline_trace.shares(timeline_trace.write(folder, steps))
    evaluations = json.loads((folder / "evaluations.json").read_text())
    found = {"score": evaluations[-1]["scores"]["avg@1"], "version lag": statistics.fmean(s["sync/lag"] for s in steps)}
    found["step_s"] = statistics.fmean(step["time/step_s"] for step in steps[1:] or steps)
    return found | {role: shares[role]["busy"] for role in shares} | {"both": shares["workers"]["overlap"]}


def row(lag: int, runs: Sequence[dict[str, float]], base: Sequence[dict[str, float]]) -> str:
    """Returns the line of the table for the runs of a lag; `base` are those of lag 0."""
    scores, others = ([run["score"] for run in some] for some in (runs, base))
    spread, other = max(scores) - min(scores), max(others) - min(others)
    is_within = abs(statistics.fmean(scores) - statistics.fmean(others)) <= max(spread, other)
    means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    ratio = means["step_s"] / statistics.fmean(run["step_s"] for run in base)
    busy = " | ".join(f"{means[name]:.2f}" for name in (*timeline_trace.ROLES, "both"))
    cells = f"{' '.join(f'{score:.3f}' for score in scores)} | {spread:.3f} | {'yes' if is_within else 'no'}"
    return f"| {lag} | {cells} | {means['version lag']:.2f} | {means['step_s']:.2f} | {ratio:.2f} | {busy} |"


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (default: the process's arguments); returns the exit code."""
    parser = cli.Parser(prog="python -m bench.lag", description=__doc__)
    lags_help = "values of rl.max_lag; the first is the base"
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4], help=lags_help)
    options = parse(parser, "runs/lag", argv)
    print("| lag | held-out score by seed | spread | within | versions behind | s per step | of lag 0 ", end="")
    print("| learner busy | workers | validators | both |\n|" + "---|" * 11)
    base: list[dict[str, float]] = []
    for lag in options.lags:
        runs = []
        for seed in options.seeds:
            folder = options.workdir / f"lag_{lag}_seed_{seed}"
            train(folder, [f"rl.max_lag={lag}", f"seed={seed}", *options.set])
            runs.append(figures(folder))
        base = base or runs
        print(row(lag, runs, base), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
