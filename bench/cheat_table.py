"""The table of `python -m bench.cheats --model FOLDER`: honest rollouts and cheats of a pretrained model, judged by a validator.

1. Honest rollouts of short sums, and of GSM8K (`--gsm8k FOLDER`): two runs. The first MEASURED rollouts of each are the run's own, from
   which its limits and bands are measured; `--honest` others are of strangers (bench/cheat_lab.py).
2. Of each cheat (bench/pretrained_cheats.py) FEW rollouts are played, and `--rollouts` of those that are seldom refused.
3. Regimes are pairs of dtypes, of the sampler and of the validator. Printed per cheat: the share of rollouts refused on their own; the
   rollouts until a worker is caught, median and worst over starting points.
4. Where statistics catch it, the mean of LIVES workers whose groups are drawn from all of its own with replacement: of new workers, and
   after HONEST_BEFORE honest rollouts ("debt").
5. Its gain: mean number of tokens, share of wanted tokens, and nats per token by which the sampler favors its own tokens.
"""

import argparse
import collections
import copy
import dataclasses
from collections.abc import Sequence

import numpy as np

from bench import cheat_lab, pretrained_cheats
from rl.trust.verification import measurement, replay, sequential_test
from rl.trust.verification import rules as rules_lib

MEASURED = 128  # rollouts of a kind
HONEST_BEFORE = 512  # rollouts
FEW = 16  # rollouts
SELDOM = 0.25  # share of rollouts refused on their own
LIVES, MOST = 64, 1024  # workers; rollouts of each at most: as many as an epoch has
REGIMES = {
    f"{a}-{b}": (x, y)
    for a, x in (("f32", "float32"), ("bf16", "bfloat16"))
    for b, y in (("f32", "float32"), ("bf16", "bfloat16"))
}
HEAD = ("cheat", "rollouts", "alone", "median", "worst", "new", "debt", "tokens", "wanted", "nats")
ROW = "  {:<36}{:>9}{:>7}{:>8}{:>7}{:>8}{:>8}{:>8}{:>8}{:>9}  {}"


def main(args: argparse.Namespace) -> int:
    """Prints a table per regime; returns the exit code: 1 after a false alarm."""
    args.cache.mkdir(parents=True, exist_ok=True)
    alarms = 0
    for regime in args.regimes:
        dtype, validator = REGIMES[regime]
        print(regime, ROW.format(*HEAD, "reasons"), sep="\n")
        for kind in ("sums", "gsm8k")[: 1 + bool(args.gsm8k)]:
            lab = cheat_lab.Lab(args.model, dtype, kind, args.gsm8k, args.cache)
            found = lab.replayed_honest(MEASURED + args.honest, validator)
            rules = _measured(lab, found[:MEASURED])
            honest = cheat_lab.judged(found[MEASURED:], rules)
            refused = [reason for group in honest for reason in group.refused if reason]
            tested = [dataclasses.replace(group, refused=[""] * len(group.refused)) for group in honest]
            flagged, stream = cheat_lab.until(tested, _test(rules))
            alarms += len(refused) + (flagged < float("inf"))
            _print_row(lab, f"honest {kind}", found[MEASURED:], honest, [flagged], [*refused, stream])
            if args.rollouts:
                _print_cheats(lab, validator, rules, honest, args)
    print(f"false alarms of honest workers: {alarms}", flush=True)
    return 1 if alarms else 0


def _measured(lab: cheat_lab.Lab, own: Sequence[replay.Replayed]) -> rules_lib.Rules:
    """Returns the rules of a run with the limits of its own rollouts, and prints these."""
    measured = measurement.Measured()
    for one in own:
        measured.add(one)
    tolerance, bands = measurement.limits([measured])
    measurement.check_other_texts(tolerance.proofs, [measured])
    numbers = {name: round(x, 5) for name, x in measured.numbers().items()}
    print(f"  {lab.kind}: {numbers}\n  {tolerance}\n  {bands}", flush=True)
    return dataclasses.replace(rules_lib.Rules.of(lab.experiment.config), tolerance=tolerance, bands=bands)


def _print_cheats(
    lab: cheat_lab.Lab,
    validator: str,
    rules: rules_lib.Rules,
    honest: Sequence[cheat_lab.Judged],
    args: argparse.Namespace,
) -> None:
    chosen = [name for name in pretrained_cheats.names(lab) if not args.cheats or name in args.cheats]
    few = min(FEW, args.rollouts)
    pretrained_cheats.make_requests(lab, chosen, few)
    seldom = [name for name in chosen if _is_seldom(pretrained_cheats.played(lab, validator, name, few), rules)]
    pretrained_cheats.make_requests(lab, seldom, args.rollouts)
    before = _test(rules)
    for group in [*honest] * HONEST_BEFORE:
        if before.num_rollouts < HONEST_BEFORE:
            cheat_lab.add(before, group)
    for name in chosen:
        count = args.rollouts if name in seldom else few
        for variant, found in pretrained_cheats.played(lab, validator, name, count).items():
            groups = cheat_lab.judged(found, rules)
            caught = [cheat_lab.until(groups[n:] + groups[:n], _test(rules)) for n in range(len(groups))]
            lives = _lives(groups, _test(rules)), _lives(groups, before)
            until, reasons = zip(*caught, strict=True)
            _print_row(lab, variant, found, groups, [np.median(until), max(until), *lives], reasons)


def _print_row(
    lab: cheat_lab.Lab,
    name: str,
    found: Sequence[replay.Replayed],
    groups: Sequence[cheat_lab.Judged],
    until: Sequence[float],
    reasons: Sequence[str],
) -> None:
    alone = np.mean([bool(reason) for group in groups for reason in group.refused])
    counts = [f"{x:.4g}" for x in until] + [""] * (4 - len(until))
    gained = gain(lab, found)
    print(
        ROW.format(name, len(found), f"{alone:.3f}", *counts, *gained, dict(collections.Counter(reasons))), flush=True
    )


def _is_seldom(found: dict[str, list[replay.Replayed]], rules: rules_lib.Rules) -> bool:
    """Returns whether a variant of a cheat is seldom refused on its own."""
    groups = [cheat_lab.judged(variant, rules) for variant in found.values()]
    return any(np.mean([bool(reason) for group in one for reason in group.refused]) < SELDOM for one in groups)


def _test(rules: rules_lib.Rules) -> sequential_test.SequentialTest:
    return sequential_test.SequentialTest(rules.bands)


def _lives(groups: Sequence[cheat_lab.Judged], before: sequential_test.SequentialTest) -> float:
    """Returns the mean number of rollouts until workers are caught, at most MOST, whose groups are drawn from these after `before`."""
    draw = np.random.default_rng(0)
    turns = draw.integers(len(groups), size=(LIVES, MOST // cheat_lab.GROUP))
    found = [cheat_lab.until((groups[i] for i in life), copy.deepcopy(before))[0] for life in turns]
    return float(np.minimum(found, MOST).mean())


def gain(lab: cheat_lab.Lab, found: Sequence[replay.Replayed]) -> tuple[str, str, str]:
    """Returns (mean number of tokens, share of wanted tokens, mean claimed less replayed log-probability) of rollouts."""
    tokens = np.concatenate([one.rollout.tokens[one.positions_N] for one in found])
    error = float(np.concatenate([one.error_N for one in found]).mean())
    wanted = float(np.isin(tokens, pretrained_cheats.wanted(lab)).mean())
    return f"{len(tokens) / len(found):.1f}", f"{wanted:.3f}", f"{error:.4f}"
