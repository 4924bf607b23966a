"""Adapters against W + (alpha / rank) A B written out with numpy, and against training that product alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import lora, transformer
from rl.learning.batch import packing
from rl.learning.learner import objective, train_step
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import small_learner, tiny

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 32, "first_dense_layers": 1}
MODEL = tiny.model(vocab_size=64, num_heads=8, num_kv_heads=4, **EXPERTS)
CONFIG = lora.LoraConfig(rank=2, alpha=6.0)
SPECS = transformer.specs(MODEL)

pytestmark = pytest.mark.usefixtures("compile_fast")


def draw(specs, seed):
    rng = np.random.default_rng(seed)

    def one(spec):
        return (rng.standard_normal(spec.shape) * 0.2 + (len(spec.shape) == 1)).astype(np.float32)

    return jax.tree.map(one, specs, is_leaf=rules.is_spec)


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_merge_adds_the_product_at_every_target():
    """Compares with a loop over experts, inputs, outputs and ranks for each way a kernel is laid out."""
    params, adapters = draw(SPECS, 0), draw(lora.specs(SPECS, CONFIG), 1)
    merged = leaves(lora.merge(lora.attach(params, adapters, CONFIG)))
    product, changed = small_learner.PRODUCTS, 0
    for where, before in leaves(params).items():
        name = where.split("'")[-2]
        if name not in product:
            np.testing.assert_array_equal(merged[where], before)
            continue
        a, b = (leaves(adapters)[f"{where}['{part}']"].astype(np.float64) for part in "ab")
        if before.ndim == 3 and name in ("gate", "up", "down"):
            change = np.stack([np.einsum(product[name], a[e], b[e]) for e in range(4)])
        else:
            change = np.einsum(product[name], a, b)
        np.testing.assert_allclose(merged[where], before + 3.0 * change, atol=1e-6)  # one float32 sum of size 1
        changed += 1
    assert changed == 2 * 4 + 2 * 3 and np.abs(change).max() > 0.01
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    summed = lora.merge(lora.attach(jax.tree.map(lambda x: x.astype(jnp.float32), narrow), adapters, CONFIG))
    for where, x in leaves(lora.merge(lora.attach(narrow, adapters, CONFIG))).items():  # one rounding, of the sum
        np.testing.assert_array_equal(x, leaves(summed)[where].astype(jnp.bfloat16))


def test_a_fresh_adapter_changes_no_bit():
    params = draw(SPECS, 0)
    adapters = lora.init(jax.random.key(0), lora.specs(SPECS, CONFIG))
    merged = lora.merge(lora.attach(params, adapters, CONFIG))
    jax.tree.map(np.testing.assert_array_equal, merged, params)
    for where, x in leaves(adapters).items():
        assert x.any() == where.endswith("['a']")
    gate, up = (adapters["layers"]["000"]["mlp"][name]["a"] for name in ("gate", "up"))
    assert gate.shape == up.shape and (gate != up).all()
    spread = float(jnp.std(adapters["layers"]["001"]["moe"]["down"]["a"]))
    assert spread == pytest.approx(1 / math.sqrt(MODEL.expert_ffn_dim), rel=0.3)  # of 256 draws


def test_only_targets_are_adapted_and_wrong_ones_are_refused():
    some = lora.specs(SPECS, dataclasses.replace(CONFIG, targets=("q", "router")))
    adapted = leaves(jax.tree.map(lambda s: 0, some, is_leaf=rules.is_spec))
    assert {where.split("'")[-4] for where in adapted} == {"q", "router"}
    for changes, words in (
        ({"targets": ("q", "w_q")}, ("'w_q'", "no such parameter; choose from ", "down, ")),
        ({"targets": ("q_norm",)}, ("'q_norm'", "not a matrix")),
        ({"targets": ()}, ("lora.targets", "nothing would train")),
        ({"rank": -1}, ("lora.rank", "-1")),
    ):
        with pytest.raises(ValueError) as error:
            lora.specs(SPECS, dataclasses.replace(CONFIG, **changes))
        assert all(word in str(error.value) for word in words)


def test_the_default_targets_fit_latent_attention():
    """A target stands for the projections that make it; a name that the model has is that parameter alone."""
    latent = dict(kv_latent_dim=16, rope_dim=4, head_dim=12, num_heads=4, num_kv_heads=4, qk_norm=False)
    for q_latent_dim, queries in ((0, {"q"}), (24, {"q_down", "q_up"})):
        specs = transformer.specs(tiny.model(**latent, q_latent_dim=q_latent_dim))
        made = lora.specs(specs, CONFIG)["layers"]["000"]
        assert made["attn"].keys() == queries | {"kv_down", "k_rope", "k_up", "v_up", "o"}
        assert made["mlp"].keys() == {"gate", "up", "down"}
    assert made["attn"]["k_up"]["b"].logical_axes == ("rank", "heads", "head_dim")


def test_a_rank_above_that_of_a_kernel_is_refused():
    """The key kernel is 32 x (4 x 8), a router 32 x 4."""
    lora.specs(SPECS, dataclasses.replace(CONFIG, rank=32))
    for changes, words in (
        ({}, "33 exceeds the rank 32 of the kernel"),
        ({"targets": ("router",)}, "rank 4 of the kernel 'router'"),
    ):
        with pytest.raises(
            ValueError, match="lora.rank = 33 exceeds.*; lower it, or leave the kernel out of lora.targets"
        ) as error:
            lora.specs(SPECS, dataclasses.replace(CONFIG, rank=33, **changes))
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param(dataclasses.replace(MODEL, num_layers=1, first_dense_layers=0), {}, id="one"),
        pytest.param(MODEL, {"expert": 2, "fsdp": 2, "tensor": 2}, id="eight", marks=pytest.mark.slow),
    ],
)
def test_the_same_step_trains_adapters_alone(model, sizes):
    """Against the gradient of the merged parameters, pulled back through the product by hand; the base keeps every bit."""
    mesh = mesh_lib.create(sizes, devices=None if sizes else jax.devices()[:1])
    optimizer = optax.sgd(0.1)
    rng = np.random.default_rng(2)
    trees = [
        packing.stream(rng.integers(0, 64, 9).astype(np.int32), *(np.r_[0, np.ones(8)].astype(np.float32),) * 3, 1.0)
        for _ in range(8)
    ]
    batch = packing.place(packing.pack(trees, packing.Layout(18, 4, 1)), mesh)
    loss = objective.bind("cross_entropy", {})
    learner = train_step.Learner(model, optimizer, loss, mesh, lora=CONFIG)
    specs, last = transformer.specs(model), f"{model.num_layers - 1:03d}"
    base, start = draw(specs, 0), draw(lora.specs(specs, CONFIG), 1)
    state = train_step.init_state(jax.random.key(0), learner, base)
    assert small_learner.kinds(train_step.abstract_state(learner)) == small_learner.kinds(state)
    layout = jax.tree.map(lambda x: x.sharding, state.params)
    state = state.replace(params=jax.device_put(start, layout))
    merged = jax.tree.map(np.asarray, lora.merge(train_step.policy(learner, state)))
    after, metrics = train_step.jit_train_step(learner)(state, batch)
    jax.tree.map(np.testing.assert_array_equal, after.frozen, base)

    whole = dataclasses.replace(learner, lora=None)
    full = train_step.init_state(jax.random.key(0), whole, merged)
    moved, full_metrics = train_step.jit_train_step(whole)(full, batch)
    assert float(metrics["loss/total"]) == pytest.approx(float(full_metrics["loss/total"]), abs=1e-6)
    gradient = jax.tree.map(lambda a, b: (a.astype(np.float64) - np.asarray(b)) / 0.1, merged, moved.params)
    d_q, d_down = gradient["layers"]["000"]["attn"]["q"], gradient["layers"][last]["moe"]["down"]
    q, down = start["layers"]["000"]["attn"]["q"], start["layers"][last]["moe"]["down"]
    expected = {
        ("000", "attn", "q", "a"): 3.0 * np.einsum("dhc,rhc->dr", d_q, q["b"]),
        ("000", "attn", "q", "b"): 3.0 * np.einsum("dhc,dr->rhc", d_q, q["a"]),
        (last, "moe", "down", "a"): 3.0 * np.einsum("efd,erd->efr", d_down, down["b"]),
        (last, "moe", "down", "b"): 3.0 * np.einsum("efd,efr->erd", d_down, down["a"]),
    }
    for (layer, part, kernel, which), gradient in expected.items():
        before = start["layers"][layer][part][kernel][which]
        got = (before - np.asarray(after.params["layers"][layer][part][kernel][which])) / 0.1
        # The full gradient was read off a float32 difference over 0.1: 2^-24 / 0.1 on values of size 1, times 32 summands.
        np.testing.assert_allclose(got, gradient, atol=3e-5 * max(1, np.abs(gradient).max() * 3))
        assert np.abs(gradient).max() > 1e-3
