"""The train step against a plain one: no packing, no shared prompts, no micro-batches, one device, the loss written out.

Gradients are read from the state of `sgd` with momentum: after one step its trace is the gradient itself.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import config as config_lib
from models import transformer
from rl import learner, packing
from sharding import mesh as mesh_lib
from sharding import rules
from tests import tiny

DENSE = tiny.model(vocab_size=64, num_layers=1, num_heads=8, num_kv_heads=4)
MIXED = dataclasses.replace(
    DENSE, num_layers=2, num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1
)
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "delta": 4.0}
ROW = 16


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    """Every program here runs a few times on tiny arrays: LLVM at its lowest level halves the time of this file."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def params_of(config):
    """Matrices of roughly unit gain drawn by numpy (compiling `init` takes a second per layer); scales in 0.5 .. 1.5."""
    rng = np.random.default_rng(7)

    def draw(spec):
        if len(spec.shape) == 1:
            return rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        return (rng.standard_normal(spec.shape) * config.model_dim**-0.5).astype(np.float32)

    return jax.tree.map(draw, transformer.specs(config), is_leaf=rules.is_spec)


@functools.cache
def trees():
    """Twelve streams and two groups that share a prompt: a prompt, sampled tokens with an observation inside.

    The second group is longer than a row, and is split with its prompt computed twice. One stream is a single token.
    """
    rng = np.random.default_rng(1)

    def branch(length, first):
        mask = ((np.arange(length) >= first) & (rng.random(length) < 0.9)).astype(np.float32)
        return packing.Branch(
            tokens=rng.integers(0, DENSE.vocab_size, length).astype(np.int32),
            loss_mask=mask,
            behavior_logp=rng.uniform(-6, -3, length).astype(np.float32) * mask,
            advantage=np.float32(rng.standard_normal()) * mask,
            temperature=float(rng.choice([0.6, 1.0, 1.5])),
        )

    def tree(prompt_length, *lengths):
        prompt = rng.integers(0, DENSE.vocab_size, prompt_length).astype(np.int32)
        first = [0 if prompt_length else max(1, length // 3) for length in lengths]
        return packing.Tree(prompt, tuple(branch(*pair) for pair in zip(lengths, first, strict=True)))

    return [tree(4, 3, 5, 2), tree(6, 10, 4, 1), *(tree(0, n) for n in (14, 13, 12, 11, 9, 8, 7, 7, 5, 3, 2, 1))]


def pack(rows=2, capacity=6):
    """By default six micro-batches of two rows, of which five are used."""
    return packing.pack(trees(), packing.Layout(ROW, rows, capacity))


@functools.cache
def reference(config):
    """(loss, entropy, gradient): every branch with its prompt in a row of its own, all logits, INTELLECT-2's formula."""
    pairs = [(tree.prompt, branch) for tree in trees() for branch in tree.branches]
    N, T = len(pairs), ROW
    arrays = {name: np.zeros((N, T), np.float32) for name in ("loss_mask", "behavior_logp", "advantage")}
    tokens_NT, temperature_NT = np.zeros((N, T), np.int32), np.ones((N, T), np.float32)
    for row, (prompt, branch) in enumerate(pairs):
        sequence = [*prompt, *branch.tokens]
        tokens_NT[row, : len(sequence)], temperature_NT[row] = sequence, branch.temperature
        for name, array in arrays.items():
            array[row, len(prompt) : len(sequence)] = getattr(branch, name)
    target_NT = np.eye(config.vocab_size, dtype=np.float32)[tokens_NT[:, 1:]]
    mask_NT, behavior_NT, A_NT = (array[:, 1:] for array in arrays.values())

    def loss(params):
        hidden = transformer.apply(params, config, tokens_NT)  # padding follows the tokens: causality hides it
        logits = transformer.logits(params, config, hidden)[:, :-1] / temperature_NT[:, 1:, None]
        logp_NTV = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        r = jnp.exp((logp_NTV * target_NT).sum(axis=-1) - behavior_NT)
        bounded = jnp.clip(r, 0.0, CLIP["delta"])
        clipped = jnp.clip(bounded, 1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        total = (jnp.maximum(-bounded * A_NT, -clipped * A_NT) * mask_NT).sum() / mask_NT.sum()
        entropy = -(jnp.exp(logp_NTV) * logp_NTV).sum(axis=-1)
        return total, (entropy * mask_NT).sum() / mask_NT.sum()

    (total, entropy), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params_of(config))
    return float(total), float(entropy), jax.tree.map(np.asarray, grads)


SGD = optax.sgd(0.1, momentum=0.9)


@functools.cache
def compiled(config, sizes):
    """(step, a maker of fresh states, mesh); a layout's programs are shared by the whole file."""
    mesh = make_mesh(sizes)
    step = learner.make_train_step(config, SGD, "two_sided_clip", CLIP, mesh)
    state = learner.init_state(jax.random.key(0), config, SGD, mesh, params=params_of(config))
    layout = jax.tree.map(lambda x: x.sharding, state)
    host = jax.tree.map(np.array, state)
    return step, lambda: jax.device_put(host, layout), mesh


def make_mesh(sizes):
    return mesh_lib.create(dict(sizes), devices=None if sizes else jax.devices()[:1])


def step_once(batch, config=DENSE, sizes=()):
    """(metrics, gradient, new state) of one step."""
    step, fresh, mesh = compiled(config, sizes)
    state, metrics = step(fresh(), packing.place(batch, mesh))
    grads = jax.tree.map(np.asarray, optax.tree.get(state.opt_state, "trace"))
    return {name: float(x) for name, x in metrics.items()}, grads, state


def axes(**sizes):
    return tuple(sizes.items())


# ---- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sizes", "rows", "capacity"),
    [
        (DENSE, axes(), 2, 6),
        (DENSE, axes(fsdp=8), 16, 1),
        (DENSE, axes(fsdp=2, tensor=4), 2, 6),
        (DENSE, axes(data=2, fsdp=2, tensor=2), 4, 3),
        (DENSE, axes(fsdp=4, context=2), 4, 3),
        (MIXED, axes(expert=4, fsdp=2), 8, 2),
    ],
    ids=lambda x: {DENSE: "dense", MIXED: "mixture"}.get(x) if isinstance(x, config_lib.ModelConfig) else str(x),
)
def test_packed_sharded_and_accumulated_gradients_equal_the_plain_one(config, sizes, rows, capacity):
    batch = pack(rows, capacity)
    metrics, grads, state = step_once(batch, config, sizes)
    loss, entropy, expected = reference(config)
    # Float32 sums of 12 x 16 tokens in another order, and over 8 devices: measured 5e-7 on losses of size 1.
    assert metrics["loss/total"] == pytest.approx(loss, abs=3e-6)
    assert metrics["loss/entropy"] == pytest.approx(entropy, abs=3e-6)
    num_tokens = sum(branch.loss_mask.sum() for tree in trees() for branch in tree.branches)
    assert metrics["loss/num_tokens"] == num_tokens > 50
    # A gradient's entries are sums of 100 products that cancel: measured 2e-6 of the largest entry of a leaf.
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max() > 1e-3, path
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max(), err_msg=str(path))
    norm = math.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in jax.tree.leaves(expected)))
    assert metrics["loss/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for p, g, q in zip(*map(jax.tree.leaves, (params_of(config), grads, state.params)), strict=True):
        np.testing.assert_allclose(q, p - np.float32(0.1) * g, rtol=0, atol=1e-6)  # what sgd promises; one rounding


def test_what_trains_nothing_changes_nothing():
    """Other tokens in the padding, other numbers where the mask is 0 and in micro-batches past the count: bitwise."""
    batch, rng = pack(), np.random.default_rng(0)
    padding, idle = batch.segment_ids == 0, batch.loss_mask == 0
    assert batch.num_micro_batches == 5 and padding[5].all() and padding[:5].any()
    spoiled = batch.replace(
        tokens=np.where(padding, rng.integers(0, 64, padding.shape), batch.tokens).astype(np.int32),
        behavior_logp=np.where(idle, np.float32(-np.inf), batch.behavior_logp),
        advantage=np.where(idle, np.float32(100), batch.advantage),
    )
    spoiled.advantage[5] = np.nan
    expected, got = step_once(batch), step_once(spoiled)
    assert got[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, got[1], expected[1])


def test_nothing_to_learn_is_a_gradient_of_zero():
    """No advantage, no token, or no micro-batch in use: finite, and the parameters stay where they are."""
    batch = pack()
    for idle in (
        batch.replace(advantage=np.zeros_like(batch.advantage)),
        batch.replace(loss_mask=np.zeros_like(batch.loss_mask)),
        batch.replace(num_micro_batches=np.int32(0)),  # the rest of the array is not run
        packing.pack([], packing.Layout(ROW, 2, 6)),
    ):
        metrics, _, state = step_once(idle)
        assert metrics["loss/total"] == metrics["loss/grad_norm"] == 0 and all(map(math.isfinite, metrics.values()))
        jax.tree.map(np.testing.assert_array_equal, state.params, params_of(DENSE))


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="loss 'ppo' is unknown; choose one of two_sided_clip, "):
        learner.make_train_step(DENSE, SGD, "ppo", {}, make_mesh(()))


# ---- the state -------------------------------------------------------------------------------------------------------

ADAMW = learner.OptimizerConfig(
    learning_rate=2e-2, warmup_steps=2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, clip_norm=1.0
)


def test_a_step_is_a_fixed_point_of_types_and_overfits():
    """Twenty steps of supervised learning, on eight devices: one program, same types, old states gone.

    Every third batch is a small one, with fewer micro-batches in use: that is data, and compiles nothing.
    """
    mesh = make_mesh(axes(fsdp=2, tensor=4))
    optimizer = learner.make_optimizer(ADAMW)
    step = learner.make_train_step(DENSE, optimizer, "cross_entropy", {}, mesh)
    state = learner.init_state(jax.random.key(0), DENSE, optimizer, mesh, params=params_of(DENSE))
    layout = packing.Layout(ROW, 2, 6)
    whole, part = (
        packing.place(batch.replace(advantage=np.ones_like(batch.advantage)), mesh)
        for batch in (pack(), packing.pack(trees()[:4], layout))
    )
    assert (int(whole.num_micro_batches), int(part.num_micro_batches)) == (5, 3)

    def types(state):
        return jax.tree.map(lambda x: (jax.typeof(x), x.sharding, x.committed), state)

    promised = learner.abstract_state(DENSE, optimizer, mesh)
    before, losses = types(state), []
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), promised) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), state
    )
    for i in range(20):
        old = state
        state, metrics = step(old, part if i % 3 == 2 else whole)
        losses.append(float(metrics["loss/total"]))
        assert types(state) == before
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        assert int(state.step) == i + 1 and not whole.tokens.is_deleted()
    assert step.jitted._cache_size() == 1
    # It starts near log V = 4.2; that it learns 70 random tokens by heart is the point of 20 steps at a rate of 0.02.
    assert losses[0] > 3 and losses[-1] < losses[0] / 3


def test_moments_are_split_as_their_parameters():
    optimizer = learner.make_optimizer(ADAMW)
    state = learner.abstract_state(MIXED, optimizer, make_mesh(axes(expert=2, fsdp=2, tensor=2)))
    layout = jax.tree.map(lambda x: x.sharding, state.params)
    for name in ("mu", "nu"):
        assert jax.tree.map(lambda x: x.sharding, optax.tree.get(state.opt_state, name)) == layout
    assert state.step.sharding.is_fully_replicated and state.step.dtype == jnp.int32


def test_parameters_are_born_the_same_on_every_mesh():
    key = jax.random.key(5)
    expected = jax.jit(transformer.init, static_argnums=1)(key, DENSE)
    state = learner.init_state(key, DENSE, SGD, make_mesh(axes(fsdp=2, tensor=4)))
    # The bits drawn are equal; the inverse error function behind a normal may be fused otherwise, one unit off.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state.params, expected)
    assert int(state.step) == 0 and not np.asarray(optax.tree.get(state.opt_state, "trace")["embed"]).any()


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup_steps", "clip_norm"), [(0, 0.0), (1, 0.7), (4, 0.7)])
def test_the_optimizer_is_adamw_with_warm_up_and_clipping(warmup_steps, clip_norm):
    """Loshchilov & Hutter 2019, algorithm 2, in float64: clip the whole gradient, decay matrices only, warm up linearly.

    At step n = 1, 2, ... the rate is learning_rate x min(1, n / warmup_steps): the first step already moves.
    """
    config = learner.OptimizerConfig(
        learning_rate=0.1,
        warmup_steps=warmup_steps,
        beta1=0.8,
        beta2=0.9,
        eps=1e-3,
        weight_decay=0.3,
        clip_norm=clip_norm,
    )
    rng = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "scale": (5,)}
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    m = {name: np.zeros(shape) for name, shape in shapes.items()}
    v = {name: np.zeros(shape) for name, shape in shapes.items()}
    optimizer = learner.make_optimizer(config)
    params = {name: jnp.asarray(x, jnp.float32) for name, x in w.items()}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for n in range(1, 8):
        scale = 3.0 if n % 2 else 0.05  # now above the clip, now below
        g = {name: rng.standard_normal(shape) * scale for name, shape in shapes.items()}
        updates, state = update({name: jnp.asarray(x, jnp.float32) for name, x in g.items()}, state, params)
        params = optax.apply_updates(params, updates)

        norm = math.sqrt(sum((x**2).sum() for x in g.values()))
        rate = 0.1 * (min(1.0, n / warmup_steps) if warmup_steps else 1.0)
        for name in shapes:
            clipped = g[name] * min(1.0, clip_norm / norm) if clip_norm else g[name]
            m[name] = 0.8 * m[name] + 0.2 * clipped
            v[name] = 0.9 * v[name] + 0.1 * clipped**2
            direction = m[name] / (1 - 0.8**n) / (np.sqrt(v[name] / (1 - 0.9**n)) + 1e-3)
            decay = 0.3 * w[name] if name == "matrix" else 0.0
            w[name] = w[name] - rate * (direction + decay)
            np.testing.assert_allclose(params[name], w[name], atol=3e-6)  # seven float32 steps on values of size 1


def test_a_learning_rate_of_zero_moves_no_bit():
    """Weight decay is scaled by the rate too."""
    optimizer = learner.make_optimizer(dataclasses.replace(ADAMW, learning_rate=0.0, weight_decay=0.1))
    params = {name: jnp.asarray(params_of(DENSE)[name]) for name in ("embed", "final_norm")}
    state, moved = optimizer.init(params), params
    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(params, state, moved)  # any gradient will do
        moved = optax.apply_updates(moved, updates)
    jax.tree.map(np.testing.assert_array_equal, moved, params)
    assert np.abs(optax.tree.get(state, "mu")["embed"]).max() > 0.001
