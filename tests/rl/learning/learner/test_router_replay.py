"""The learner runs the experts that it is given.

The oracle is the loss and gradient of rows that are neither packed nor share a prompt. Weights are random, so experts that are merely
similar give other numbers.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from models import transformer
from rl.learning.batch import packing, router_replay
from rl.learning.learner import objective as objective_lib
from rl.learning.learner import train_step
from tests.support import small_learner as small

pytestmark = pytest.mark.usefixtures("compile_fast")

MOE = small.MOE  # a dense layer, then an MoE layer: the input of its router does not depend on its experts
ONE = dataclasses.replace(MOE, num_layers=1, first_dense_layers=0)
SCAN = dataclasses.replace(MOE, num_layers=4, first_dense_layers=0, scan_layers=True)
ROW = small.ROW


def experts_of(key, length, config):
    """[length, L, X] drawn per token."""
    rng = np.random.default_rng(key)
    rows = router_replay.RouterReplay.of(config).empty(length)
    for t, layer in np.ndindex(rows.shape[:2]):
        rows[t, layer] = rng.choice(config.num_experts, config.experts_per_token, replace=False)
    return rows


def plain_rows(config, choose):
    """([N, T] tokens, [L, N, T, X] experts, -1 in padding), every branch with its prompt in a row of its own."""
    tokens_NT, *_ = small.plain_rows()
    L, X = router_replay.RouterReplay.of(config).empty(0).shape[1:]
    experts_NTLX = np.full((*tokens_NT.shape, L, X), -1)
    pairs = [(i, tree, j, branch) for i, tree in enumerate(small.trees()) for j, branch in enumerate(tree.branches)]
    for row, (i, tree, j, branch) in enumerate(pairs):
        prompt, own = choose(i, tree, j, branch)
        experts_NTLX[row, : len(prompt) + len(own)] = np.concatenate([prompt, own])
    return tokens_NT, np.moveaxis(experts_NTLX, 2, 0)


def drawn_experts(config):
    def choose(i, tree, j, branch):
        return experts_of((1, i), len(tree.prompt), config), experts_of((2, i, j), len(branch.tokens), config)

    return choose


def with_experts(choose):
    """The trees of tests/support/small_learner.py with these experts."""
    out = []
    for i, tree in enumerate(small.trees()):
        chosen = [choose(i, tree, j, branch) for j, branch in enumerate(tree.branches)]
        branches = [
            dataclasses.replace(branch, routed_experts=own)
            for branch, (_, own) in zip(tree.branches, chosen, strict=True)
        ]
        out.append(dataclasses.replace(tree, branches=tuple(branches), routed_experts=chosen[0][0]))
    return out


def pack(trees, config, rows=2, capacity=6):
    return packing.pack(trees, packing.Layout(ROW, rows, capacity, router_replay=router_replay.RouterReplay.of(config)))


axes = small.axes


@pytest.mark.parametrize(
    ("config", "sizes", "rows", "capacity"),
    [
        (ONE, axes(), 2, 6),
        pytest.param(MOE, axes(), 2, 6, marks=pytest.mark.slow),
        pytest.param(MOE, axes(expert=4, fsdp=2), 8, 2, marks=pytest.mark.slow),
        pytest.param(MOE, axes(data=2, fsdp=2, context=2), 4, 3, marks=pytest.mark.slow),
        pytest.param(SCAN, axes(), 2, 6, marks=pytest.mark.slow),
    ],
    ids=["one", "two_layers", "expert_parallel", "context_parallel", "stacked"],
)
def test_the_given_experts_are_run_packed_sharded_and_accumulated(config, sizes, rows, capacity):
    """Against unpacked rows with repeated prompts on one device; and far from the result of the routers' own choice."""
    choose = drawn_experts(config)
    step, fresh, mesh = small.compiled(config, sizes)
    state, metrics = step(fresh(), packing.place(pack(with_experts(choose), config, rows, capacity), mesh))
    params = small.params_of(config)
    tokens_NT, experts = plain_rows(config, choose)
    (loss, _), expected = small.reference(params, config, experts)
    assert float(metrics["loss/total"]) == pytest.approx(float(loss), abs=3e-6)
    small.assert_gradient(optax.tree.get(state.opt_state, "trace"), expected)
    (own, _), _ = small.reference(params, config)
    assert abs(float(own) - float(loss)) > 1e-3
    counts = np.array([(experts[layer][..., None] == np.arange(4)).sum() for layer in range(len(experts))])
    assert (counts > 0).all()


def test_the_part_that_would_have_been_chosen_otherwise():
    """Compares with the router's own choice on unpacked rows, counted over the tokens of the trees, a shared prompt once."""
    choose = drawn_experts(ONE)
    tokens_NT, experts_LNTX = plain_rows(ONE, choose)
    _, routing = jax.jit(transformer.apply, static_argnums=1)(small.params_of(ONE), ONE, tokens_NT)
    own_NT2, given_NT2 = (np.sort(np.asarray(x)[0], axis=-1) for x in (routing.experts, experts_LNTX))
    row, differs = 0, []
    for tree in small.trees():
        room = 0
        for branch in tree.branches:
            computes_prompt = room < len(branch.tokens)  # no room next to its siblings: a prompt of its own
            room = (ROW - len(tree.prompt) if computes_prompt else room) - len(branch.tokens)
            span = slice(0 if computes_prompt else len(tree.prompt), len(tree.prompt) + len(branch.tokens))
            differs += (own_NT2[row, span] != given_NT2[row, span]).any(axis=-1).tolist()
            row += 1
    step, fresh, mesh = small.compiled(ONE, ())
    batch = pack(with_experts(choose), ONE)
    assert (batch.segment_ids > 0).sum() == len(differs)
    _, metrics = step(fresh(), packing.place(batch, mesh))
    assert float(metrics["moe/routing_mismatch"]) == pytest.approx(np.mean(differs)) and 0.5 < np.mean(differs) < 1
    _, without = step.eval_shape(fresh(), packing.place(small.pack(), mesh))
    assert without.keys() == metrics.keys() - {"moe/routing_mismatch"} and "moe/max_violation" in without


@pytest.mark.slow
def test_learners_old_logprobs_run_the_given_experts_too():
    """The ratio of one step on a batch is against these very parameters: 1, only if both passes ran the same experts."""
    step = train_step.jit_train_step(small.make(MOE, objective=objective_lib.Objective(old_logprobs="learner")))
    _, fresh, mesh = small.compiled(MOE, ())
    batch = packing.place(pack(with_experts(drawn_experts(MOE)), MOE), mesh)
    _, metrics = step(fresh(), batch)
    assert float(metrics["loss/mismatch_kl"]) < 1e-9 and float(metrics["moe/routing_mismatch"]) > 0.5
    score = functools.partial(train_step.score, small.make(MOE))  # a reference's routers choose for themselves
    state = fresh()
    np.testing.assert_array_equal(score(state.params, batch), score(state.params, packing.place(small.pack(), mesh)))
