"""The distance of a claim of experts from a router's choice.

Oracles: routers written as loops over experts in float64.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import moe
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("compile_fast")
E, X, D = 8, 3, 16
BASE = tiny.model(model_dim=D, num_experts=E, experts_per_token=X, expert_ffn_dim=12, num_layers=1)
SIGMOID = {"router": "sigmoid", "router_correction": True}
ROUTERS = {
    "softmax": BASE,
    "sigmoid": dataclasses.replace(BASE, **SIGMOID),
    "groups": dataclasses.replace(BASE, **SIGMOID, router_groups=4, router_groups_kept=2),
    "topk_softmax": dataclasses.replace(BASE, router="topk_softmax"),
}


@functools.partial(jax.jit, static_argnums=1)
def route(logits_NE, config, correction_E, given_NX=None):
    """The margins of a router whose weights are the identity, so that its inputs are its logits."""
    params = {"router": jnp.eye(E)} | ({"correction": correction_E} if config.router_correction else {})
    given = None if given_NX is None else given_NX[None]
    return moe.route(logits_NE[None], params, dataclasses.replace(config, model_dim=E), experts_BTX=given)


def drawn(name, count=400, seed=0):
    """(logits, correction)"""
    rng = np.random.default_rng(seed)
    correction = 0.1 * rng.standard_normal(E) if ROUTERS[name].router_correction else np.zeros(E)
    return (1.5 * rng.standard_normal((count, E))).astype(np.float32), correction.astype(np.float32)


@pytest.mark.parametrize("name", ROUTERS)
def test_what_a_router_would_choose_with_other_roundings_is_near(name):
    """Logits moved by up to r: the choice then is at most 2 r from the choice before. And the choice itself is at 0."""
    config, (logits_NE, correction_E) = ROUTERS[name], drawn(name)
    own = route(logits_NE, config, correction_E)
    assert own.margin is None
    assert not np.asarray(route(logits_NE, config, correction_E, own.experts[0]).margin).any()
    for r, rarely in ((1e-3, 0.05), (0.3, 1.0)):
        moved = logits_NE + np.random.default_rng(1).uniform(-r, r, logits_NE.shape).astype(np.float32)
        claimed_NX = np.asarray(route(moved, config, correction_E).experts[0])
        gap_N = np.asarray(route(logits_NE, config, correction_E, claimed_NX).margin)[0]
        differs_N = (np.sort(claimed_NX) != np.sort(np.asarray(own.experts[0]))).any(axis=1)
        np.testing.assert_array_equal(gap_N > 0, differs_N)
        assert gap_N.max() <= 2 * r + 1e-5 and differs_N.mean() <= rarely  # 1e-5: float32 of logits of size 5
        assert r < 0.1 or differs_N.mean() > 0.1


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "topk_softmax"])
def test_a_choice_far_from_the_routers_is_as_far_as_a_loop_says(name):
    """Every choice of three of eight, against the best that it passed over and the worst that it took."""
    config, (logits_NE, correction_E) = ROUTERS[name], drawn(name, 4)
    every = list(itertools.combinations(range(E), X))
    for logits_E in logits_NE.astype(np.float64):
        rank_E, unit = logits_E, 1.0
        if name == "sigmoid":
            rank_E, unit = 1 / (1 + np.exp(-logits_E)) + correction_E, 4.0
        repeated = np.repeat(logits_E[None].astype(np.float32), len(every), axis=0)
        gap_N = np.asarray(route(repeated, config, correction_E, np.array(every)).margin)[0]
        for claimed, gap in zip(every, gap_N, strict=True):
            passed_over = max(rank_E[e] for e in range(E) if e not in claimed)
            expected = max(0.0, unit * (passed_over - min(rank_E[e] for e in claimed)))
            assert gap == pytest.approx(expected, abs=2e-5)  # float32 of numbers of size 10


def test_experts_of_groups_that_are_not_kept_are_far():
    config, (logits_NE, correction_E) = ROUTERS["groups"], drawn("groups", 50)
    own_NX = np.asarray(route(logits_NE, config, correction_E).experts[0])
    score_NE = 1 / (1 + np.exp(-logits_NE.astype(np.float64))) + correction_E
    worth_NG = np.sort(score_NE.reshape(-1, 4, 2)).sum(axis=-1)
    order_NG = np.argsort(-worth_NG)
    claimed_NX = own_NX.copy()
    claimed_NX[:, 2] = 2 * order_NG[:, 3]  # an expert of the worst group in place of the third choice
    gap_N = np.asarray(route(logits_NE, config, correction_E, claimed_NX).margin)[0]
    least_N = 2 * (np.sort(worth_NG)[:, 2] - worth_NG.min(axis=1))  # that group comes up to the last that was kept
    assert (gap_N >= least_N - 1e-5).all() and np.median(least_N) > 0.5


def test_a_router_chooses_where_nothing_is_given_and_nan_is_never_near():
    config, (logits_NE, correction_E) = ROUTERS["softmax"], drawn("softmax", 3)
    own = route(logits_NE, config, correction_E)
    given = np.array([[7, 6, 5], [-1, -1, -1], [5, 6, 7]])
    got = route(logits_NE, config, correction_E, given)
    expected = np.where(given < 0, np.asarray(own.experts[0]), given)
    np.testing.assert_array_equal(got.experts[0], expected)
    assert got.margin[0, 1] == 0 and got.margin.shape == (1, 3)
    logits_NE[0, 0] = np.nan
    assert np.isnan(np.asarray(route(logits_NE, config, correction_E, given).margin)[0, 0])
