"""Prints where the time of a run went: the parts of a step, the busy roles, and the load of the servers.

    python -m bench.where_time_goes runs/quickstart

1. The parts are means over the steps without the first, which compiles; "other" is the rest of a step.
2. Busy, idle, and overlap are parts of the learner's time, as in the report and in trace.json (rl/experiment/reporting/timeline_trace.py).
3. The load and the utilization are means of the metrics machine/*, where the run has them.
"""

import pathlib
import statistics
import sys
from collections.abc import Iterator

from rl.experiment.reporting import metrics, timeline_trace
from sharding.system import cli

MACHINE = ("mfu", "device_memory_peak_bytes", "servers_running", "servers_waiting", "servers_kv_used")


def table(workdir: pathlib.Path) -> Iterator[str]:
    """Yields the lines of the table. Raises ValueError if the run has no step."""
    steps = metrics.read_steps(workdir)
    if not steps:
        raise ValueError(
            f"{workdir} has no step of RL in metrics.jsonl; give the directory of a run that has taken one"
        )
    later = steps[1:] or steps
    mean = lambda name: statistics.fmean(step.get(name, 0.0) for step in later)  # noqa: E731
    whole_s, parts = mean("time/step_s"), {part: mean(f"time/{part}_s") for part in timeline_trace.PARTS}
    parts["other"] = whole_s - sum(parts.values())
    yield f"{len(steps)} steps, {whole_s:.3f} s each"
    for part, seconds in parts.items():
        yield f"  {part:<12} {seconds:>9.3f} s {seconds / whole_s:>6.1%}"
    for role, shares in timeline_trace.shares(timeline_trace.write(workdir, steps)).items():
        yield f"{role:<12} " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    for name in MACHINE:
        if any(f"machine/{name}" in step for step in later):
            yield f"machine/{name} {metrics.format_value(mean(f'machine/{name}'))}"


def main() -> int:
    """Prints the table of a run; returns 0, or 1 with a line if it has none."""
    parser = cli.Parser(prog="python -m bench.where_time_goes", description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path, metavar="WORKDIR", help="the directory of a run")
    try:
        for line in table(parser.parse_args().workdir):
            print(line)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
