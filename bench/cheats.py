"""Measures how soon cheats are caught: every known way to cheat, played by a worker's double against the real validator.

    python -m bench.cheats
    python -m bench.cheats --cheats int8_weights temperature_1.1 --rollouts 512 --regimes bfloat16

1. A model of 2 layers and 32 dims with random weights generates the prescribed groups of a run through the real
   scheduler; each double (tests/support/doubles.py) changes its requests or its claims, and signs the result.
2. The validator checks the rollouts as those of one worker. Printed per cheat: the fraction of rollouts rejected on their own,
   the reasons, and the number of rollouts until the worker is caught: mean and worst over starting points.
3. Regimes: "float32" replays in the dtype that generated, so a token is right or wrong; "bfloat16" likewise, where decode
   and prefill round differently; "mixed" generates in bfloat16 and replays in float32. The last two have limits and bands
   calibrated on honest rollouts of that pair, of other tasks.
4. Honest rollouts run first, and must all pass: a rejection is a false alarm. Cheats with experts use an MoE model, in a run with
   router replay, with honest rollouts and limits of its own.
5. The time to verify rollouts is compared with the time to generate them, both after a warm-up.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from rl.verification import sequential_test
from sharding.system import cli
from tests.support import cheats, doubles


def cost(repeat: int = 3) -> tuple[float, float]:
    """Returns the seconds to generate 128 honest rollouts and to verify them, the best of a few after compilation."""
    generating, verifying = [], []
    for _ in range(repeat + 1):
        begun = time.perf_counter()
        rollouts = doubles.honest(doubles.Double(3))
        generating.append(time.perf_counter() - begun)
        validator = doubles.make_validator()
        begun = time.perf_counter()
        assert all(verdict.accepted for verdict in validator.check_without_weights(rollouts))
        validator.check_with_weights(rollouts)
        verifying.append(time.perf_counter() - begun)
    return min(generating[1:]), min(verifying[1:])


def main(argv: list[str] | None = None) -> int:
    """Prints a table per regime and the cost; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.cheats", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=512, help="number of rollouts per cheat")
    parser.add_argument(
        "--honest", type=int, default=2048, help="number of honest rollouts per regime, and for calibration"
    )
    parser.add_argument(
        "--cheats",
        nargs="+",
        default=list(doubles.CHEATS),
        help=f"ways to cheat (default: all of {', '.join(doubles.CHEATS)})",
    )
    parser.add_argument(
        "--regimes", nargs="+", choices=list(cheats.REGIMES), default=list(cheats.REGIMES), help="dtypes"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.cheats if name not in doubles.CHEATS]:
        parser.error(f"--cheats {unknown[0]!r} is not a cheat; choose among {', '.join(doubles.CHEATS)}")
    for regime in args.regimes:
        for mixture, first in ((False, doubles.honest), (True, doubles.honest_mixture)):
            names = [name for name in args.cheats if (doubles.CHEATS[name] in doubles.MIXTURES) == mixture]
            if names:
                _print_table(regime, first, names, args)
    generating, verifying = cost()
    print(
        f"128 rollouts: generated in {generating:.3f} s, verified in {verifying:.3f} s, 1/{generating / verifying:.1f}"
    )
    return 0


def _print_table(regime: str, first: Callable, names: Sequence[str], args: argparse.Namespace) -> None:
    """Prints the cheats on one model, after the honest rollouts of `first`."""
    mixture = first in doubles.MIXTURES
    tolerance, bands = (
        (doubles.FLOAT32, doubles.EXACT) if regime == "float32" else cheats.calibrated(args.honest, regime, mixture)
    )
    print(
        f"{regime}: {tolerance}\n  {bands}; an honest worker is flagged with probability <= {sequential_test.ALPHA:.0e}"
    )
    print(f"  {'double':<18}{'rollouts':>9}{'rejected':>9}{'until: mean':>13}{'worst':>7}  reasons")
    counts = {first.__name__: (first, args.honest)} | {name: (doubles.CHEATS[name], args.rollouts) for name in names}
    for name, (double, count) in counts.items():
        caught = cheats.play(double, count, tolerance, bands, regime)
        reasons = " ".join(f"{reason} {count}" for reason, count in caught.reasons.items())
        print(
            f"  {name:<18}{caught.num_rollouts:>9}{caught.rate:>9.3f}{caught.mean_until:>13.2f}"
            f"{caught.worst_until:>7.0f}  {reasons}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
