"""Kept sets of strangers: the replay accepts those of the filters, and no others that would change the ratios of the learner."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from inference.rollouts import kept_sets
from rl.protocol import lease
from rl.trust.verification import checks
from rl.trust.verification import replay as replay_lib
from tests.rl.trust.verification import test_verifier
from tests.support import bare_rules

pytestmark = pytest.mark.usefixtures("compile_fast")
FILTERS = kept_sets.OFF | {"top_k": 20, "top_p": 0.9}
ENGINE = dataclasses.replace(test_verifier.CONFIG, kept_tokens=20)
REQUEST = dataclasses.replace(test_verifier.HONEST, top_k=20, top_p=0.9, kept_tokens=True)


@functools.cache
def honest():
    """A group that the engine sampled under `FILTERS`, with its kept sets."""
    return test_verifier.rollouts_of(REQUEST, config=ENGINE, with_kept=True)


def changed(rollout, change):
    """Returns the rollout with `change(set of IDs, token, number)` of each sampled token's kept set, for every token."""
    sets = kept_sets.decode(rollout.kept, [int(rollout.sampled_mask.sum())], 20)
    tokens = rollout.tokens[rollout.sampled_mask].tolist()
    own = [sorted(change(set(row[row >= 0].tolist()), token)) for row, token in zip(sets, tokens, strict=True)]
    width = max(map(len, own))
    return dataclasses.replace(
        rollout, kept=kept_sets.encode(np.array([ids + [-1] * (width - len(ids)) for ids in own]))
    )


def test_an_honest_group_passes_and_needs_its_sets():
    """The replay takes log-probabilities over the claimed sets: they are those of the sampler to rounding."""
    rollouts = honest()
    assert all(rollout.kept for rollout in rollouts) and test_verifier.check(rollouts, FILTERS) is None
    rules = bare_rules.make(test_verifier.MODEL, test_verifier.CAPACITY, test_verifier.STRICT, filters=FILTERS)
    for one in replay_lib.replay(test_verifier.MODEL, test_verifier.weights, rules, rollouts):
        sizes, _ = kept_sets.read(one.rollout.kept, [len(one.positions_N)])
        assert one.kept_gap_N.max() < 1e-4 and 1 < sizes.mean() <= sizes.max() <= 20


@pytest.mark.parametrize(
    "change",
    [
        lambda own, token: {token},  # its ratio would always be 1
        lambda own, token: {*own, *range(200, 203)} if len(own) < 18 else own,  # unlikely ones
        lambda own, token: own - {min(own - {token}, default=-1)},
        lambda own, token: {*own, 271} - {max(own - {token}, default=-1)},  # as many, but others
        lambda own, token: set(range(20)) | {token},
    ],
    ids=["itself", "more", "fewer", "others", "any"],
)
def test_other_sets_are_refused(change):
    """Also where the claimed log-probabilities fit the claimed sets, so that no other check sees a difference."""
    rollouts = [changed(rollout, change) for rollout in honest()]
    assert test_verifier.check(rollouts, FILTERS).startswith("kept: ")
    rules = bare_rules.make(test_verifier.MODEL, test_verifier.CAPACITY, test_verifier.STRICT, filters=FILTERS)
    replayed = replay_lib.replay(test_verifier.MODEL, test_verifier.weights, rules, rollouts)
    for one in replayed:  # the liar's log-probabilities are exactly those of its sets
        logprobs = one.rollout.logprobs.copy()
        logprobs[one.positions_N] = one.logp_N
        one = dataclasses.replace(one, rollout=dataclasses.replace(one.rollout, logprobs=logprobs))
        assert checks.kept(one, rules).reason == "kept" and checks.logprob(one, rules).accepted


def test_the_gap_is_0_for_the_filters_own_set_and_more_for_every_other():
    """Against an exhaustive oracle over all sets of 5 entries, for 30 draws of logits and filters."""
    rng = np.random.default_rng(0)
    V = 5
    subsets = np.array([[bool(bits >> v & 1) for v in range(V)] for bits in range(1, 2**V)])
    gap = jax.jit(replay_lib.kept_gap)
    for _ in range(30):
        logits = (rng.standard_normal(V) * 1.5).astype(np.float32)
        filters = {"top_k": int(rng.choice([0, 2, 4])), "top_p": float(rng.choice([1.0, 0.8])), "min_p": 0.0}
        filters["min_p"] = float(rng.choice([0.0, 0.15]))
        order = np.argsort(-logits)[: filters["top_k"] or V]
        p = np.exp(np.float64(logits[order]))
        before = np.cumsum(p) / p.sum() - p / p.sum()
        stays = (before < filters["top_p"]) & (p >= filters["min_p"] * p[0])
        right = np.isin(np.arange(V), order[stays])
        arrays = {"top_k": np.int32(filters["top_k"])} | {n: np.float32(filters[n]) for n in ("top_p", "min_p")}
        gaps = np.asarray(gap(np.tile(logits, (len(subsets), 1)), subsets, arrays))
        is_right = (subsets == right).all(axis=1)
        assert gaps[is_right] == 0, (logits, filters)
        assert (gaps[~is_right] > 0).all(), (logits, filters, gaps, right)
        # Near a threshold, a set is off by as little as the logits are.
        nearer = logits + np.float32(1e-3) * rng.standard_normal(V).astype(np.float32)
        moved = np.asarray(gap(nearer[None], right[None], arrays))
        assert moved[0] < 0.02


def test_an_honest_set_under_top_k_alone_is_whole():
    """Also where the replay's own tolerance would accept a smaller one: a choice of its worker that nothing adds up."""
    rollouts = test_verifier.rollouts_of(dataclasses.replace(REQUEST, top_p=1.0), config=ENGINE, with_kept=True)
    for one in rollouts:
        sizes, _ = kept_sets.read(one.kept, [int(one.sampled_mask.sum())])
        assert {*sizes.tolist()} == {20}


def test_what_a_submission_can_be_refused_for_without_weights():
    group = honest()
    scheduled = lease.Lease(1, 0, "train", 0, seed=7, num_samples=1, temperature=1.0, min_version=0)
    rules = bare_rules.make(
        test_verifier.MODEL, test_verifier.CAPACITY, test_verifier.STRICT, filters=FILTERS, kept=20,
        groups=lambda step: {scheduled.group: scheduled},
    )  # fmt: skip
    for change, words in (
        (lambda r: r, ""),
        (lambda r: dataclasses.replace(r, kept=b""), "0 bytes of kept tokens, but the run's filters keep 20"),
        (lambda r: changed(r, lambda own, token: own - {token} or {token + 1}), "not in its own kept set"),
        (lambda r: changed(r, lambda own, token: {token, 5000}), "outside the vocabulary"),
        (lambda r: changed(r, lambda own, token: {token, *range(40)}), "1 to 20 IDs"),
    ):
        found = checks.kept_named(change(group[0]), rules)
        assert words in found.detail and found.accepted == (not words)
    exact = dataclasses.replace(rules, filters=kept_sets.OFF | {"top_k": 20})
    full = changed(group[0], lambda own, token: {*sorted({*own, *range(40)} - {token})[:19], token})
    fewer = changed(group[0], lambda own, token: {*sorted({*own, *range(40)} - {token})[:18], token})
    assert checks.kept_named(full, exact).accepted and checks.kept_named(fewer, rules).accepted
    assert checks.kept_named(fewer, exact).detail == "a kept set has 19 IDs, but top-k alone keeps 20"
    unfiltered = dataclasses.replace(rules, kept=0)
    assert checks.kept_named(group[0], unfiltered).reason == "kept"
    assert checks.kept_named(dataclasses.replace(group[0], kept=b""), unfiltered).accepted
