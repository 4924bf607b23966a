"""The validator runs the experts that a rollout names, and compares them with the choice of the routers."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from inference.engine import engine as engine_lib
from models import moe, transformer
from rl.trust.verification import checks, replay, verifier
from rl.trust.verification import rules as rules_lib
from tests.rl.trust.verification import test_verifier as stand
from tests.support import bare_rules, claims, stacking

pytestmark = pytest.mark.usefixtures("compile_fast")

CAPACITY = 64
ENGINE = engine_lib.EngineConfig(4, CAPACITY, 2, 4, routed_experts=True)
STRICT = rules_lib.Tolerance(margin=1e-4, max_wrong_tokens=0, logprob=1e-4, routing=1e-4)
FAST = ((False, "prompt"), (False, "last"))  # whose programs are compiled for other tests, too
REQUEST = dataclasses.replace(stand.HONEST, max_tokens=30, seed=5, routed_experts=True)


def weights(version, epoch=0):
    return stand.params(version, claims.MODEL)


@functools.cache
def honest(updated=False):
    """A group as the scheduler makes it and a worker writes it down; with `updated`, of two versions."""
    return tuple(stand.rollouts_of(REQUEST, updates={2: 1} if updated else {}, model=claims.MODEL, config=ENGINE))


def validator(tolerance=STRICT, model=claims.MODEL, weights=weights):
    return verifier.Verifier(model, weights, bare_rules.make(model, CAPACITY, tolerance))


def check(rollouts):
    return validator().check_with_weights(rollouts)


@pytest.mark.parametrize("updated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_honest_claims_are_accepted_with_and_beside_others(updated):
    """Within one version and across a swap in flight; a group in which one claims nothing is judged as well."""
    rollouts = list(honest(updated))
    versions = np.unique(np.concatenate([r.versions for r in rollouts])).tolist()
    assert versions == ([0, 1] if updated else [0])
    assert all(verdict.accepted for verdict in check(rollouts)), check(rollouts)
    beside = [rollouts[0], dataclasses.replace(rollouts[1], routed_experts=None), *rollouts[2:]]
    assert all(verdict.accepted for verdict in check(beside)), check(beside)


@pytest.mark.parametrize(
    ("updated", "where"),
    [
        pytest.param(*one, marks=[] if one in FAST else pytest.mark.slow)
        for one in itertools.product((False, True), ("prompt", "prompt's last", "first", "last"))
    ],
)
def test_one_expert_that_the_policy_did_not_choose_is_found(updated, where):
    """Changes one token in either MoE layer; its neighbors pass."""
    rollouts = list(honest(updated))
    t = {"prompt": 1, "prompt's last": 4, "first": 5, "last": len(rollouts[2].tokens) - 2}[where]
    for layer in (0, 2):
        claim = rollouts[2].routed_experts.copy()
        claim[t, layer, 1] = next(e for e in range(5) if e not in claim[t, layer])
        found = check([*rollouts[:2], dataclasses.replace(rollouts[2], routed_experts=claim), rollouts[3]])
        assert [verdict.reason for verdict in found] == ["ok", "ok", "routing", "ok"], found
        assert f"token {t} miss" in found[2].detail or updated


@pytest.mark.slow
def test_stacked_layers_are_replayed_as_single_ones():
    """Rollouts of one version replay in packed rows, those of two over a KV cache."""
    stacked = dataclasses.replace(claims.MODEL, scan_layers=True)
    stacked_validator = validator(
        model=stacked, weights=lambda version, epoch: stacking.stack(weights(version), stacked)
    )
    for updated in (False, True):
        rollouts = list(honest(updated))
        claim = rollouts[1].routed_experts.copy()
        claim[-1, 2, 0] = next(e for e in range(5) if e not in claim[-1, 2])
        rollouts[1] = dataclasses.replace(rollouts[1], routed_experts=claim)
        found = stacked_validator.check_with_weights(rollouts)
        assert [verdict.reason for verdict in found] == ["ok", "routing", "ok", "ok"], found


def test_a_claim_of_experts_at_random_is_refused_for_that():
    """The learner would run these. The reason is routing, and not text that was not sampled."""
    (rollout, *_) = honest()
    rows = claims.good_claim(len(rollout.tokens) - 1)
    (verdict,) = check([dataclasses.replace(rollout, routed_experts=rows)])
    assert verdict.reason == "routing" and "name experts that their policy does not choose" in verdict.detail
    for malformed in (rows[:, :2], np.full_like(rows, 200), np.zeros_like(rows)):
        verdict = checks.experts_exist(dataclasses.replace(rollout, routed_experts=malformed), validator().rules)
        assert verdict.reason == "routing"


@pytest.mark.slow
def test_near_ties_are_forgiven_up_to_the_tolerance_and_measured():
    """Swaps the second choice for the third in the last layer of the last token: the margin is the difference of their logits.

    Nothing that was sampled later reads it, but for one token's log-probability, so that `routing` is asked alone.
    """
    rollout = honest()[0]
    t = len(rollout.tokens) - 2
    padded = np.zeros((1, CAPACITY), np.int32)
    padded[0, : len(rollout.tokens)] = rollout.tokens
    seen = []
    spied = functools.partial(spy, seen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "route", spied)
        transformer.apply(weights(0), claims.MODEL, padded)  # not compiled: arrays pass through `route`
    logits_E = seen[-1][0, t]
    order = np.argsort(-logits_E)
    claim = rollout.routed_experts.copy()
    assert set(claim[t, 2].tolist()) == set(order[:2].tolist())
    claim[t, 2] = order[[0, 2]]
    flipped = dataclasses.replace(rollout, routed_experts=claim)
    gap = float(logits_E[order[1]] - logits_E[order[2]])
    loose = dataclasses.replace(STRICT, margin=1e9, logprob=1e9)
    (one,) = validator(loose).replay([flipped])
    assert one.gap_T[t] == pytest.approx(gap, abs=1e-4) and np.delete(one.gap_T, t).max() < 1e-4
    for routing, reason in ((gap * 0.99, "routing"), (gap * 1.01, "ok")):
        rules = validator(dataclasses.replace(loose, routing=routing)).rules
        assert checks.routing(one, rules).reason == reason


_route = moe.route


def spy(seen, x_BTD, params, config, **options):
    seen.append(np.asarray(x_BTD, np.float64) @ np.asarray(params["router"], np.float64))
    return _route(x_BTD, params, config, **options)


def test_a_gap_that_is_no_number_is_refused():
    one = replay.Replayed(honest()[0], *[np.zeros(2)] * 6, gap_T=np.array([0.0, np.nan]))
    assert checks.routing(one, validator().rules).reason == "routing"
    assert checks.routing(dataclasses.replace(one, gap_T=None), validator().rules).accepted
