"""Measures how soon cheats are caught: every known way to cheat, played by a worker's double against the real validator.

    python -m bench.cheats
    python -m bench.cheats --cheats int8_weights temperature_1.1 --rollouts 512 --regimes mixed

1. A model of 2 layers and 32 dims with random weights generates the prescribed groups of a run through the real
   scheduler; each double (tests/support/doubles.py, forgeries.py) changes its requests or its claims, and signs the result.
2. The validator checks the rollouts as those of one worker. Printed per cheat: the fraction of rollouts rejected on their own,
   the number of rollouts until the worker is caught, median and worst over starting points, and the reasons.
3. Regimes: "float32" replays in the dtype that generated, so a token is right or wrong; "bfloat16" likewise, where decode
   and prefill round differently; "mixed" generates in bfloat16 and replays in float32. Limits and bands are measured on honest rollouts.
4. Honest rollouts run first, and must all pass: a rejection or a flag is a false alarm, and the exit code is 1. Cheats with experts use an
   MoE model, in a run with router replay, with honest rollouts and limits of its own.
5. Forgers without a model also run among honest workers, and none of their groups is replayed.

`--model FOLDER` plays those of bench/pretrained_cheats.py with a pretrained model instead (bench/cheat_table.py). `--run DIR` writes the working directory of the run instead, for `python -m rl.validator calibrate`.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

from bench import cheat_table
from rl.trust.verification import sequential_test
from sharding.system import cli
from tests.support import cheats, doubles


def main(argv: list[str] | None = None) -> int:
    """Prints a table per regime; returns the exit code: 1 after a false alarm."""
    parser = cli.Parser(prog="python -m bench.cheats", description=__doc__)
    parser.add_argument(
        "--rollouts", type=int, default=128, help="number of rollouts per cheat; 0 with --model: honest ones alone"
    )
    parser.add_argument("--honest", type=int, default=2048, help="number of honest rollouts per regime")
    names = list(cheats.CHEATS)
    parser.add_argument(
        "--cheats", nargs="+", default=[], help=f"ways to cheat (default: all; without --model of {', '.join(names)})"
    )
    regimes = [*cheats.REGIMES, *cheat_table.REGIMES]
    parser.add_argument("--regimes", nargs="+", choices=regimes, default=["float32", "mixed"], help="dtypes")
    parser.add_argument("--model", help="folder of a pretrained model; regimes are then bf16-f32 and so on")
    parser.add_argument(
        "--gsm8k", default="", help="with --model: folder of GSM8K's two files, whose questions are asked, too"
    )
    parser.add_argument(
        "--cache", type=pathlib.Path, default=pathlib.Path("runs/cheats"), help="with --model: kept rollouts"
    )
    parser.add_argument("--run", type=pathlib.Path, help="write the run to this directory, and end")
    parser.add_argument("--mixture", action="store_true", help="with --run: of the MoE model")
    args = parser.parse_args(argv)
    if args.model:
        return cheat_table.main(args)
    if args.run:
        args.run.mkdir(parents=True, exist_ok=True)
        cheats.write_run(args.run, args.mixture)
        return 0
    args.cheats = args.cheats or names
    if unknown := [name for name in args.cheats if name not in cheats.CHEATS]:
        parser.error(f"--cheats {unknown[0]!r} is not a cheat; choose among {', '.join(cheats.CHEATS)}")
    plays = [
        (regime, mixture, name)
        for regime in args.regimes
        for mixture, first in ((False, "honest"), (True, "honest_mixture"))
        if (own := [n for n in args.cheats if (cheats.CHEATS[n] in doubles.MIXTURES) == mixture])
        for name in (first, *own)
    ]
    alarms = _play(plays, args)
    for name in ("no_model_random_proofs", "honest"):
        flagged, others = cheats.play_among_others(cheats.CHEATS.get(name, doubles.honest))
        print(f"{name} among honest workers, never replayed: flagged after {flagged} rollouts; {others}")
    return 1 if alarms else 0


def _play(plays: Sequence[tuple[str, bool, str]], args: argparse.Namespace) -> int:
    """Plays (regime, is MoE, name), with progress on stderr. Prints a table per regime; returns the number of false alarms."""
    begun, table, alarms, limits = time.monotonic(), [], 0, None
    for number, (regime, mixture, name) in enumerate(plays):
        spent = time.monotonic() - begun
        eta = f"eta {spent / number * (len(plays) - number):.0f} s" if number else ""
        print(f"\r{number}/{len(plays)} {regime} {name} {eta}".ljust(78), end="", file=sys.stderr, flush=True)
        if is_honest := name.startswith("honest"):
            limits = cheats.measured(regime, mixture)
            table += [f"{regime}: {limits[0]}", f"  {limits[1]}"]
            table += [f"  an honest worker is flagged with probability <= {sequential_test.ALPHA:.0e}"]
            table += [f"  {'cheat':<24}{'rollouts':>9}{'refused':>9}{'until: median':>15}{'worst':>7}  reasons"]
        assert limits is not None
        cheat = {"honest": doubles.honest, "honest_mixture": doubles.honest_mixture}.get(name) or cheats.CHEATS[name]
        caught = cheats.play(cheat, args.honest if is_honest else args.rollouts, *limits, regime)
        alarms += is_honest * (round(caught.rate * caught.num_rollouts) + (caught.worst_until < float("inf")))
        reasons = " ".join(f"{reason} {count}" for reason, count in caught.reasons.items())
        figures = f"{caught.num_rollouts:>9}{caught.rate:>9.3f}{caught.median_until:>15.1f}{caught.worst_until:>7.0f}"
        table.append(f"  {name:<24}{figures}  {reasons}{' FALSE ALARM' * (is_honest and alarms > 0)}")
    print(file=sys.stderr)
    print("\n".join(table), f"\nfalse alarms of honest workers: {alarms}", flush=True)
    return alarms


if __name__ == "__main__":
    sys.exit(main())
