"""The load of experts in the learner: its metrics, the auxiliary loss, and the correction that it moves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import transformer
from rl.learning.batch import packing
from rl.learning.learner import objective as objective_lib
from rl.learning.learner import train_step
from tests.support import small_learner as small

pytestmark = pytest.mark.usefixtures("compile_fast")
MODEL = dataclasses.replace(small.MOE, router="sigmoid", router_correction=True)
SCANNED = dataclasses.replace(MODEL, num_layers=3, scan_layers=True)  # a dense layer, then two mixtures stacked
RATE, COEF = 0.01, 0.3
OPTIONS = {"ratio_low": 0.0, "ratio_high": 1e9}


def stepped(model, sizes, rows, capacity, objective):
    """(metrics, gradient, corrections before, corrections after) of one step."""
    objective, loss = objective_lib.Objective(**objective), "masked_importance_sampling"
    learner = small.make(model, loss, OPTIONS, sizes, objective=objective)
    params = small.params_of(model)
    state = train_step.init_state(jax.random.key(0), learner, params)
    batch = packing.place(small.pack(rows, capacity), learner.mesh)
    state, metrics = train_step.jit_train_step(learner)(state, batch)
    grads = jax.tree.map(np.asarray, optax.tree.get(state.opt_state, "trace"))
    return {k: float(v) for k, v in metrics.items()}, grads, corrections(params), corrections(state.params)


def corrections(params):
    """[L, E] over the mixture layers."""
    blocks = [block["moe"] for _, block in sorted(params["layers"].items()) if "moe" in block]
    return np.concatenate([np.atleast_2d(moe["correction"]) for moe in blocks])


def loads(model, rows, capacity):
    """[M, L, E]: per micro-batch, how often each expert was chosen by a token that is not padding, counted one by one."""
    batch, params = small.pack(rows, capacity), jax.tree.map(jnp.asarray, small.params_of(model))
    routed = jax.jit(
        lambda tokens, positions, segments, branches: transformer.apply(
            params, model, tokens, positions_BT=positions, segment_ids_BT=segments, branch_ids_BT=branches
        )[1]
    )
    out, scores = [], []
    for m in range(int(batch.num_micro_batches)):
        routing = routed(batch.tokens[m], batch.positions[m], batch.segment_ids[m], batch.branch_ids[m])
        load_LE = np.zeros((routing.experts.shape[0], model.num_experts))
        for layer, b, t, choice in np.ndindex(*routing.experts.shape):
            load_LE[layer, int(routing.experts[layer, b, t, choice])] += batch.segment_ids[m, b, t] != 0
        out.append(load_LE)
        scores.append(np.asarray(routing.score))
    return np.array(out), np.array(scores)


@pytest.mark.parametrize(
    ("model", "sizes", "rows", "capacity"),
    [
        pytest.param(dataclasses.replace(MODEL, num_layers=1, first_dense_layers=0), (), 2, 6, id="one"),
        pytest.param(SCANNED, small.axes(expert=4, fsdp=2), 8, 2, id="scanned_on_eight", marks=pytest.mark.slow),
    ],
)
def test_corrections_move_against_the_load_of_the_whole_step(model, sizes, rows, capacity):
    metrics, _, before, after = stepped(model, sizes, rows, capacity, {"router_balance_rate": RATE})
    load_LE = loads(model, rows, capacity)[0].sum(axis=0)
    expected = before + RATE * np.sign(load_LE.mean(axis=-1, keepdims=True) - load_LE)
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-7)  # one float32 addition
    violation = np.mean(load_LE.max(axis=-1) / load_LE.mean(axis=-1) - 1)
    assert metrics["moe/max_violation"] == pytest.approx(violation, rel=1e-5)


@pytest.mark.slow
def test_the_auxiliary_loss_weighs_micro_batches_by_their_tokens():
    """E sum_e f_e p_e of each micro-batch (Switch Transformer, eq. 4-6), by its part of the step's tokens; into the gradient, too."""
    plain, without, before, after = stepped(MODEL, (), 2, 6, {})
    np.testing.assert_array_equal(before, after)  # nothing else moves them
    metrics, grads, *_ = stepped(MODEL, (), 2, 6, {"router_balance_coef": COEF})
    load_MLE, score_MLE = loads(MODEL, 2, 6)
    f_MLE, p_MLE = (x / x.sum(axis=-1, keepdims=True) for x in (load_MLE, score_MLE))
    tokens_M = load_MLE.sum(axis=(1, 2))
    balance_M = MODEL.num_experts * (f_MLE * p_MLE).sum(axis=-1).mean(axis=-1)
    expected = (balance_M * tokens_M).sum() / tokens_M.sum()
    assert metrics["loss/router_balance"] == pytest.approx(expected, rel=1e-5)
    # As in tests/rl/learning/learner/test_train_step.py: sums of float32 in another order.
    assert metrics["loss/total"] - plain["loss/total"] == pytest.approx(COEF * expected, rel=1e-5)
    moved = {
        jax.tree_util.keystr(path)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(without), strict=True)
        if not np.allclose(a, b, rtol=1e-4, atol=1e-6)
    }
    assert "['layers']['001']['moe']['router']" in moved


def test_a_rate_needs_corrections():
    with pytest.raises(ValueError, match=r"this model lacks \(model.router_correction\); set it to 0"):
        stepped(small.MOE, (), 2, 6, {"router_balance_rate": RATE})
