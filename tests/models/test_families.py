"""Every family under every layout: meshes of eight devices, stacked layers, rematerialisation, packing.

One oracle for all: the plain program on one device, which tests/models/hf/test_checkpoint.py compares with
transformers. Letters as in models/transformer.py.
"""

import dataclasses
import functools
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import kv_cache
from models import attention, layers, lora, transformer
from models import config as config_lib
from models.kernels import adapted, cpu_attention
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import cases, stacking, tiny

B, T, V = 8, 16, 64
DENSE = dict(vocab_size=V, num_heads=8, num_kv_heads=4, qk_norm=False, tie_embeddings=False)
MIXED = dict(DENSE, num_experts=8, experts_per_token=3, expert_ffn_dim=32)
SIGMOID = dict(MIXED, router="sigmoid", router_correction=True, routed_scale=2.5, num_shared_experts=1)
YARN = dict(rope_scaling="yarn", rope_factor=4.0, rope_original_positions=8)

# One small model per family: dims that every mesh below divides, and each switch its family has.
FAMILIES = {
    "llama": tiny.model(
        **DENSE | dict(family="llama", rope_scaling="llama3", rope_factor=8.0, rope_original_positions=8, ffn_bias=True)
    ),
    "qwen2": tiny.model(**DENSE | YARN | dict(family="qwen2", qkv_bias=True, tie_embeddings=True)),
    "qwen3": tiny.model(**DENSE | dict(family="qwen3", qk_norm=True, out_bias=True, qkv_bias=True)),
    "qwen3_moe": tiny.model(**MIXED | dict(family="qwen3", qk_norm=True, num_layers=3, dense_layers=(1,))),
    "glm4_moe": tiny.model(
        **SIGMOID | dict(family="glm4_moe", qkv_bias=True, rope_dim=4, num_layers=3, first_dense_layers=1)
    ),
    "deepseek_v3": tiny.model(
        **SIGMOID
        | YARN
        | dict(family="deepseek_v3", num_kv_heads=8, head_dim=12, rope_dim=4, rope_interleaved=True, kv_latent_dim=16)
        | dict(q_latent_dim=24, value_dim=6, rope_mscale=1.0, rope_mscale_all_dim=1.0, num_layers=3)
        | dict(first_dense_layers=1, router_groups=4, router_groups_kept=2, qkv_bias=True, out_bias=True)
    ),
    "gpt_oss": tiny.model(
        **MIXED
        | YARN
        | dict(family="gpt_oss", norm="rms_float32", activation="clamped", clamp_limit=1.0, sinks=True, window=5)
        | dict(layer_pattern="SF", num_layers=4, qkv_bias=True, out_bias=True, router="topk_softmax")
        | dict(router_bias=True, expert_bias=True, rope_truncate=False)
    ),
    "gemma3": tiny.model(
        **DENSE
        | dict(family="gemma3", norm="rms_plus_one", post_norms=True, scale_embeddings=True, activation="gelu")
        | dict(tie_embeddings=True, qk_norm=True, window=4, layer_pattern="SF", num_layers=5)
        | dict(final_softcap=30.0, attention_scale=0.3, rope_local_theta=100.0, rope_scaling="linear", rope_factor=8.0)
    ),
}
MESHES = {
    "fsdp8": {"fsdp": 8},
    "fsdp2_tensor4": {"fsdp": 2, "tensor": 4},
    "expert4_fsdp2": {"expert": 4, "fsdp": 2},
    "context2_fsdp4": {"context": 2, "fsdp": 4},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}


pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def params_of(name):
    """Kernels of roughly unit gain; scales, biases and sinks redrawn, so that one which is misplaced is seen."""
    rng = np.random.default_rng(5)
    config = FAMILIES[name]

    def draw(path, spec):
        kind = path[-1].key
        if kind.endswith("norm"):
            return (rng.uniform(0.5, 1.5, spec.shape) - (config.norm == "rms_plus_one")).astype(np.float32)
        size = 0.3 if kind.endswith("bias") or kind in ("correction", "sinks") else spec.shape[0] ** -0.5
        if kind in ("gate", "up", "down", "o") and len(spec.shape) == 3:
            size = spec.shape[1] ** -0.5
        return (rng.standard_normal(spec.shape) * size).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, transformer.specs(config), is_leaf=rules.is_spec)


@functools.cache
def packed_rows(branches=True):
    """Rows of two sequences and padding, the first a prompt with two continuations; other cuts in each row."""
    rng = np.random.default_rng(2)
    tokens_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    segment_ids_BT, branch_ids_BT, positions_BT = (np.zeros((B, T), np.int32) for _ in range(3))
    for b in range(B):
        prompt, first, second, other = 2 + b % 3, 3, 2, 3 + b % 4
        lengths = [(1, 0, 0, prompt), (1, 1, prompt, first), (1, 2, prompt, second), (2, 0, 0, other)]
        if not branches:
            lengths = [(1, 0, 0, prompt + first), (2, 0, 0, second), (3, 0, 0, other)]
        column = 0
        for segment, branch, position, length in lengths:
            at = slice(column, column + length)
            segment_ids_BT[b, at], branch_ids_BT[b, at] = segment, branch
            positions_BT[b, at] = position + np.arange(length)
            column += length
    rows = dict(tokens_BT=tokens_BT, positions_BT=positions_BT)
    return rows | dict(segment_ids_BT=segment_ids_BT, branch_ids_BT=branch_ids_BT)


WEIGHT_BTV = np.random.default_rng(9).standard_normal((B, T, V)).astype(np.float32) / 16


@functools.partial(jax.jit, static_argnums=1)
def run(params, config, rows, weight_BTV):
    """(logits of real tokens, loads, loss, gradients)."""

    def loss(params):
        rows_ = dict(rows)
        hidden_BTD, routing = transformer.apply(params, config, rows_.pop("tokens_BT"), **rows_)
        logits_BTV = transformer.logits(params, config, hidden_BTD)
        logits_BTV = jnp.where(rows["segment_ids_BT"][..., None] > 0, logits_BTV, 0.0)
        return jnp.sum(logits_BTV * weight_BTV), (logits_BTV, None if routing is None else routing.load)

    (value, (logits_BTV, load)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return logits_BTV, load, value, grads


@functools.cache
def reference(name):
    return jax.tree.map(np.asarray, run(params_of(name), FAMILIES[name], packed_rows(), WEIGHT_BTV))


def assert_same(got, want, what):
    """Float32 sums in another order: 1e-4 of the largest entry of each array, where the smallest error seen when a sum
    over an axis is left out or taken twice is a factor of two in a whole array. The loss is a sum of 5000 terms of
    either sign and size 0.1, which leaves little of them: 1e-4 in itself."""

    def same(path, a, b):
        scale = max(np.abs(b).max(), 1.0 if what == "loss" else 1e-2)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * scale, err_msg=f"{what} {jax.tree_util.keystr(path)}")

    jax.tree_util.tree_map_with_path(same, jax.tree.map(np.asarray, got), want)


def on_mesh(name, sizes, adapters=None, **changes):
    config, mesh = dataclasses.replace(FAMILIES[name], **changes), mesh_lib.create(sizes)
    params, specs = params_of(name), transformer.specs(config)
    layout = rules.shardings(specs, mesh)
    if adapters:
        params, specs = adapted_params(name)[0], lora.specs(specs, adapters)
        layout = lora.attach(layout, rules.shardings(specs, mesh), adapters)
    if config.scan_layers:
        params = stacking.stack(params, config)
    rows = {key: jax.device_put(x, rules.batch_sharding(mesh, 2)) for key, x in packed_rows().items()}
    params = jax.device_put(params, layout)
    with jax.set_mesh(mesh):
        compiled = run.lower(params, config, rows, WEIGHT_BTV).compile()
        return compiled, compiled(params, rows, WEIGHT_BTV), config


def assert_same_run(got, name, config):
    *values, grads = got
    *wanted, want_grads = reference(name)
    for what, a, b in zip(("logits", "load", "loss"), values, wanted, strict=True):
        assert_same(a, b, what)
    assert_same(stacking.unstack(grads, config) if config.scan_layers else grads, want_grads, "gradient")


# Each axis once here, those of data and tensors with adapters; the whole product is marked slow.
QUICK = [("glm4_moe", "expert4_fsdp2", True), ("qwen3", "context2_fsdp4", False)]
SCANNED = [("glm4_moe", "expert4_fsdp2", True), ("gemma3", "fsdp2_tensor4", True), ("gpt_oss", "fsdp8", True)]
EIGHT = [(name, mesh, False) for name in FAMILIES for mesh in MESHES] + SCANNED


@pytest.mark.parametrize(("name", "mesh", "scanned"), cases.slow_but(EIGHT, *QUICK))
def test_eight_devices_equal_one(name, mesh, scanned, capfd):
    changes = dict(scan_layers=True, remat="block") if scanned else {}
    compiled, got, config = on_mesh(name, MESHES[mesh], **changes)
    # XLA's partitioner prints this if it has to build the whole array to change from one layout to the next.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    assert_same_run(got, name, config)
    # A layer's at a time, never the tree; a whole stack would be two layers' parameters in one gather.
    largest = max(x.size for x in jax.tree.leaves(params_of(name)))
    assert max(gathered(compiled.as_text()), default=0) <= largest


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapters_of(name):
    more = ("router",) if FAMILIES[name].num_experts else ()
    return lora.LoraConfig(rank=2, alpha=6.0, targets=(*lora.KERNELS, *more))


def change_of(kernel):
    """s A B by numpy: a product of two matrices per expert."""
    experts = [len(kernel.a)] if kernel.a.ndim + kernel.b.ndim > kernel.base.ndim + 2 else []
    a, b = kernel.a.reshape(*experts, -1, 2), kernel.b.reshape(*experts, 2, -1)
    return (3.0 * a.astype(np.float64) @ b).reshape(kernel.base.shape), (*experts, a.shape[-2], b.shape[-1])


@functools.cache
def adapted_params(name):
    """(parameters with adapters next to them, the same ones merged by numpy)."""
    config = adapters_of(name)
    drawn = tiny.drawn(lora.specs(transformer.specs(FAMILIES[name]), config), 11, 0.2)
    attached = lora.attach(params_of(name), drawn, config)

    def merge(kernel):
        return (kernel.base + change_of(kernel)[0]).astype(np.float32) if adapted.is_adapted(kernel) else kernel

    return attached, jax.tree.map(merge, attached, is_leaf=adapted.is_adapted)


ADAPTED = [("qwen2", "data2_fsdp2_tensor2", False), ("deepseek_v3", None, False), ("glm4_moe", "expert4_fsdp2", True)]
ADAPTED += [(name, mesh, False) for name in FAMILIES for mesh in ("expert4_fsdp2", "fsdp2_tensor4")]


@pytest.mark.parametrize(("name", "mesh", "scanned"), cases.slow_but(ADAPTED, ADAPTED[0]))
def test_adapters_next_to_kernels_equal_merged_ones(name, mesh, scanned):
    """Values and gradients, against the model of W + s A B and its gradient pulled back by numpy. The kernels get none."""
    attached, merged = adapted_params(name)
    *wanted, d_merged = jax.tree.map(np.asarray, run(merged, FAMILIES[name], packed_rows(), WEIGHT_BTV))
    changes = dict(scan_layers=True, remat="dots") if scanned else {}
    if mesh is None:
        config, (*values, grads) = FAMILIES[name], run(attached, FAMILIES[name], packed_rows(), WEIGHT_BTV)
    else:
        _, (*values, grads), config = on_mesh(name, MESHES[mesh], adapters_of(name), **changes)
    for what, a, b in zip(("logits", "load", "loss"), values, wanted, strict=True):
        assert_same(a, b, what)

    def pulled_back(kernel, d_kernel):
        if not adapted.is_adapted(kernel):
            return d_kernel
        *experts, rows, columns = change_of(kernel)[1]
        a, b = kernel.a.reshape(*experts, rows, 2), kernel.b.reshape(*experts, 2, columns)
        d = 3.0 * d_kernel.astype(np.float64).reshape(*experts, rows, columns)
        d_a, d_b = d @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ d
        return kernel.replace(
            base=np.zeros_like(d_kernel), a=d_a.reshape(kernel.a.shape), b=d_b.reshape(kernel.b.shape)
        )

    grads = stacking.unstack(grads, config) if scanned else grads
    want = jax.tree.map(pulled_back, attached, d_merged, is_leaf=adapted.is_adapted)
    if config.num_experts:  # routers are merged, and their own gradients computed
        for tree in (grads, want):
            for layer in tree["layers"].values():
                if "moe" in layer:
                    layer["moe"]["router"] = layer["moe"]["router"].replace(base=0.0)
    assert_same(grads, want, "gradient")


def test_a_step_of_adapters_skips_the_gradient_of_kernels():
    """Operations of the gradient's program: those of their own gradient, a third of the products, are gone."""
    name = "llama"
    attached, merged = adapted_params(name)
    rows, config = packed_rows()["tokens_BT"], FAMILIES[name]

    def flops(function, trained):
        gradient = jax.grad(lambda trained: transformer.apply(function(trained), config, rows)[0].sum())
        return jax.jit(gradient).lower(trained).cost_analysis()["flops"]

    params, adapters = lora.detach(attached)
    full, beside = (
        flops(lambda params: params, merged),
        flops(lambda x: lora.attach(params, x, adapters_of(name)), adapters),
    )
    products = 2 * rows.size * sum(x.size for x in jax.tree.leaves(params["layers"]) if x.ndim > 1)
    low = 2 * rows.size * sum(x.size for x in jax.tree.leaves(adapters))
    assert full - beside > 0.9 * (products - 4 * low), (full, beside, products, low)


def gathered(hlo):
    """Elements of the results of all-gathers in a compiled program."""
    for shapes in re.findall(r"= (\S+|\(.*?\)) all-gather(?:-start)?\(", hlo):
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):
            yield int(np.prod([int(dim) for dim in dims.split(",") if dim], dtype=np.int64))


# ---- stacked layers, rematerialisation -------------------------------------------------------------------------------


def test_layers_are_stacked_by_kind():
    def stacks(**changes):
        return transformer.stacks(tiny.model(scan_layers=True, **changes))

    assert stacks(num_layers=4) == {"000": [0, 1, 2, 3]}
    gemma = dict(window=4, layer_pattern="SSSSSF")
    assert stacks(num_layers=14, **gemma) == {f"{j:03d}": [j, j + 6] for j in range(6)} | {"012": [12, 13]}
    glm = dict(num_experts=4, experts_per_token=2, expert_ffn_dim=8, first_dense_layers=1)
    assert stacks(num_layers=5, **glm) == {"000": [0], "001": [1, 2, 3, 4]}
    assert stacks(num_layers=6, window=4, layer_pattern="SF") == {"000": [0, 2, 4], "001": [1, 3, 5]}


@pytest.mark.parametrize("scanned", [False, True], ids=["single", "stacked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_weight_decay_acts_on_matrices_alone(name, scanned):
    """Not on scales, biases, sinks or corrections, however many dims they have."""
    config = dataclasses.replace(FAMILIES[name], scan_layers=scanned)
    decayed_tree = jax.tree.map(rules.is_matrix, transformer.specs(config), is_leaf=rules.is_spec)
    for path, decayed in jax.tree_util.tree_leaves_with_path(decayed_tree):
        kind = path[-1].key
        assert decayed == (not kind.endswith(("norm", "bias")) and kind not in ("sinks", "correction")), path


@pytest.mark.parametrize("remat", cases.slow_but(["block", "dots", "attention", "offload"], "attention"))
def test_rematerialisation_changes_no_value(remat):
    config = dataclasses.replace(FAMILIES["qwen3"], remat=remat)
    assert_same_run(run(params_of("qwen3"), config, packed_rows(), WEIGHT_BTV), "qwen3", config)


def test_rematerialisation_by_name_saves_less():
    """Bytes of residuals between forward and backward, from the shapes of the linearised function's constants."""

    def residuals(remat):
        config = dataclasses.replace(FAMILIES["qwen3"], remat=remat)
        rows = packed_rows()
        _, pull = jax.eval_shape(
            lambda p: jax.vjp(lambda p: transformer.apply(p, config, rows["tokens_BT"])[0], p), params_of("qwen3")
        )
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    none, dots, attention, block = (residuals(remat) for remat in ("none", "dots", "attention", "block"))
    assert none > 1.5 * dots > 1.5 * block and dots > attention
    B, T = packed_rows()["tokens_BT"].shape
    config = FAMILIES["qwen3"]
    assert attention - block == 4 * config.num_layers * B * T * config.num_heads * config.v_dim  # one output per layer


CALLS = {"none": 2, "attention": 2, "block": 3, "dots": 3}
KERNELS = [(remat, calls, scanned) for remat, calls in CALLS.items() for scanned in (False, True)]


@pytest.mark.parametrize(
    ("remat", "calls", "scanned"), cases.slow_but(KERNELS, *[(*one, n % 2 == 1) for n, one in enumerate(CALLS.items())])
)
def test_the_attention_kernel_runs_again_unless_its_results_are_saved(remat, calls, scanned):
    """Kernels per layer in the gradient's program for a TPU: forward, maybe forward again, backward."""
    changes = {"attention": "splash", "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "scan_layers": scanned}
    config = dataclasses.replace(FAMILIES["qwen3"], remat=remat, **changes)
    tokens_BT = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    gradient = jax.grad(lambda params, tokens_BT: transformer.apply(params, config, tokens_BT)[0].sum())

    def count(jaxpr):
        eqns = [eqn for eqn in jaxpr.eqns if eqn.outvars]  # JAX leaves a call without results behind, which XLA drops
        inner = [x for eqn in eqns for value in eqn.params.values() for x in jax.tree.leaves(value)]
        inner = [getattr(x, "jaxpr", x) for x in inner]
        own = sum(eqn.primitive.name == "pallas_call" for eqn in eqns)
        return own + sum(count(x) for x in inner if hasattr(x, "eqns"))

    program = jax.make_jaxpr(gradient)(transformer.abstract(config), tokens_BT)
    assert count(program.jaxpr) == calls * (1 if scanned else config.num_layers)


def test_offloaded_layer_inputs_are_in_host_memory():
    """The residual of each layer has the memory space of the host; the layer's inside is recomputed from it."""
    config = dataclasses.replace(FAMILIES["qwen3"], remat="offload")
    gradient = jax.grad(lambda p: transformer.apply(p, config, packed_rows()["tokens_BT"])[0].sum())
    program = jax.make_jaxpr(gradient)(params_of("qwen3"))
    moved = re.findall(r"f32<host>\[8,16,32\]", str(program))
    assert len(moved) >= config.num_layers


# ---- the cache, packing ----------------------------------------------------------------------------------------------


CACHED = [(name, scanned) for name in ("deepseek_v3", "gpt_oss", "gemma3", "glm4_moe") for scanned in (False, True)]


@pytest.mark.slow  # test_checkpoint.py decodes one sequence fast, and tests/inference several
@pytest.mark.parametrize(("name", "scanned"), CACHED)
def test_prefill_then_decode_equals_apply(name, scanned):
    """Two sequences of different lengths decode together, over a cache of rows that were copied from a prefill's.

    Adapters are next to their kernels here, and merged in the oracle.
    """
    config = dataclasses.replace(FAMILIES[name], scan_layers=scanned)
    params, merged = adapted_params(name)
    params = stacking.stack(params, config) if scanned else params
    tokens_BT, start_B = packed_rows()["tokens_BT"][:2], np.array([9, 6], np.int32)
    whole, _ = jax.jit(transformer.apply, static_argnums=1)(merged, FAMILIES[name], tokens_BT)

    @jax.jit
    def extend(params, tokens_BT, start_B, cache):
        positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
        return transformer.extend(params, config, tokens_BT, positions_BT, cache, kv_cache.attend_at(start_B))[:2]

    def dirty(rows, capacity):  # columns that were never written must weigh nothing
        return jax.tree.map(lambda x: x + 3, kv_cache.create(config, rows, capacity))

    prompt_BT = np.where(np.arange(10)[None] < start_B[:, None], tokens_BT[:, :10], 0)
    hidden, prefix = extend(params, prompt_BT, np.zeros(2, np.int32), dirty(2, 10))
    for b in range(2):
        np.testing.assert_allclose(hidden[b, : start_B[b]], whole[b, : start_B[b]], rtol=0, atol=1e-5)
    slots = np.array([2, 0])
    copy = jax.jit(kv_cache.copy_rows)
    pairs = zip(prefix, dirty(3, 20), strict=True)
    cache = tuple(copy(old, np.array([0, 1]), new, slots) for old, new in pairs)
    assert cache[0][0].shape[-2] == 20
    token_B1, position_B = np.zeros((3, 1), np.int32), np.zeros(3, np.int32)
    for step in range(5):
        token_B1[slots, 0], position_B[slots] = tokens_BT[np.arange(2), start_B + step], start_B + step
        hidden, cache = extend(params, token_B1, position_B, cache)
        np.testing.assert_allclose(hidden[slots, 0], whole[np.arange(2), start_B + step], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scanned", cases.slow_but([False, True], False), ids=["single", "stacked"])
def test_a_masked_write_keeps_the_old_entries(scanned):
    config = dataclasses.replace(FAMILIES["deepseek_v3"], scan_layers=scanned)
    params = params_of("deepseek_v3")
    params = stacking.stack(params, config) if scanned else params
    tokens_BT, zeros_B = packed_rows()["tokens_BT"][:2], np.zeros(2, np.int32)
    write_BT = np.random.default_rng(1).random((2, T)) < 0.5

    @jax.jit
    def extend(params, cache, write_BT):
        attend = kv_cache.attend_at(zeros_B, write_BT=write_BT)
        positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (2, T))
        cache = transformer.extend(params, config, jnp.asarray(tokens_BT), positions_BT, cache, attend)[1]
        return jax.tree.leaves(cache)[0]  # the first layer's keys, which depend on the tokens alone

    full = extend(params, kv_cache.create(config, 2, T), np.ones((2, T), bool))
    old = jax.tree.map(lambda x: x + 7, kv_cache.create(config, 2, T))
    first = extend(params, old, write_BT), full, jax.tree.leaves(old)[0]
    kept, written, before = (np.asarray(x[0] if scanned else x)[:, 0] for x in first)
    np.testing.assert_allclose(kept, np.where(write_BT[..., None], written, before), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scanned", cases.slow_but([False, True], True), ids=["single", "stacked"])
def test_given_experts_run_in_their_own_layer(scanned):
    """Every MoE layer gets other experts; -1 leaves the choice to the router. Packed and cached."""
    config = dataclasses.replace(FAMILIES["glm4_moe"], scan_layers=scanned)
    params = stacking.stack(params_of("glm4_moe"), config) if scanned else params_of("glm4_moe")
    rng, tokens_BT = np.random.default_rng(0), packed_rows()["tokens_BT"][:2]
    given = np.stack([rng.permutation(8)[:3] for _ in range(2 * 2 * T)]).reshape(2, 2, T, 3).astype(np.int32)
    given[:, 1] = -1

    @jax.jit
    def routings(params, given):
        positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (2, T))
        cached = kv_cache.create(config, 2, T), kv_cache.attend_at(jnp.zeros(2, jnp.int32))
        packed = transformer.apply(params, config, tokens_BT, experts_LBTX=given)
        extended = transformer.extend(params, config, tokens_BT, positions_BT, *cached, experts_LBTX=given)
        return packed[1], extended[2]

    for replayed, own in zip(routings(params, given), routings(params, np.full_like(given, -1)), strict=True):
        np.testing.assert_array_equal(replayed.experts[:, 0], given[:, 0])
        np.testing.assert_array_equal(replayed.experts[:, 1], own.experts[:, 1])
        assert (np.asarray(replayed.margin)[:, 0] > 0).mean() > 0.5 and not np.asarray(replayed.margin)[:, 1].any()


# ---- attention -------------------------------------------------------------------------------------------------------


def draw_attention(T, dim=16, value_dim=16, dtype=np.float32):
    rng = np.random.default_rng(3)
    shapes = [(2, T, 4, dim), (2, T, 2, dim), (2, T, 2, value_dim)]
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    segment_ids = np.sort(rng.integers(1, 4, (2, T)), axis=1).astype(np.int32)
    segment_ids[0, -T // 8 :] = 0
    starts = np.stack([np.searchsorted(row, row) for row in np.where(segment_ids == 0, 9, segment_ids)])
    positions = (np.arange(T)[None] - starts).astype(np.int32)
    return q, k, v, attention.Packing(positions, segment_ids), rng.standard_normal(4).astype(np.float32)


def attention_oracle(q, k, v, packing, sinks, *, window, scale):
    """Float64, one query at a time; rows of padding are zero."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, h in np.ndindex(q.shape[:3]):
        if packing.segment_ids[b, t] == 0:
            continue
        keys = [s for s in range(t + 1) if packing.segment_ids[b, s] == packing.segment_ids[b, t]]
        keys = [s for s in keys if not window or t - s < window]
        scores = np.array([q[b, t, h].astype(np.float64) @ k[b, s, h // 2] * scale for s in keys])
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[h])))
        out[b, t, h] = sum(w * v[b, s, h // 2] for w, s in zip(weights / total, keys, strict=True))
    return out


@pytest.mark.parametrize("block", [24, 512])
@pytest.mark.parametrize(("window", "sunk"), [(0, False), (18, True), (25, False)])
def test_attention_equals_the_oracle(block, window, sunk, monkeypatch):
    """XLA in one block of queries and in several, which do not divide the 64 columns. Kernels are compared with it."""
    q, k, v, packing, sinks = draw_attention(64)
    how = dict(window=window, scale=0.3)
    want = attention_oracle(q, k, v, packing, sinks if sunk else None, **how)
    how["sinks_H"] = sinks if sunk else None
    monkeypatch.setattr(attention, "BLOCK", block)
    got = jax.jit(functools.partial(attention.attend_packed, implementation="xla", **how))(q, k, v, packing)
    real = packing.segment_ids > 0
    np.testing.assert_allclose(np.asarray(got)[real], want[real], rtol=0, atol=2e-5)  # float32 sums of 64 terms


@pytest.mark.parametrize("sunk", [False, True], ids=["tiles", "blocks"])
def test_long_rows_hold_no_full_score_matrix(sunk, monkeypatch):
    """Forward and backward of 1024 columns in tiles or blocks of 64: no array of 1024 x 1024 per head in the program."""
    monkeypatch.setattr(cpu_attention, "TILE", 64)
    monkeypatch.setattr(attention, "BLOCK", 64)
    q, k, v, packing, sinks = draw_attention(1024, dim=4, value_dim=4)

    def total(q, k, v):
        sinks_H = sinks if sunk else None
        return attention.attend_packed(q, k, v, packing, implementation="xla", sinks_H=sinks_H).sum()

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, v).compile()
    full = 2 * 4 * 1024 * 1024 * 4  # bytes of one float32 [B, H, T, T]
    assert compiled.memory_analysis().temp_size_in_bytes < full / 2


@pytest.mark.parametrize(
    "sizes", [{"context": 4, "tensor": 2}, pytest.param({"context": 2, "tensor": 4}, marks=pytest.mark.slow)], ids=str
)
def test_ring_attention_equals_one_device(sizes):
    """Keys go round the devices; values and gradients, with a window, sinks and continuations of a shared prompt.

    There are two key heads: with four tensor shards, two of these read the same one.
    """
    q, k, v, packing, sinks = draw_attention(64)
    packing = packing._replace(branch_ids=np.random.default_rng(1).integers(0, 3, packing.segment_ids.shape))
    cotangent = np.random.default_rng(2).standard_normal((2, 64, 4, 16)).astype(np.float32)

    @jax.jit
    def run_attention(q, k, v, packing, sinks):
        out, pull = jax.vjp(
            lambda q, k, v, sinks: attention.attend_packed(q, k, v, packing, window=20, sinks_H=sinks), q, k, v, sinks
        )
        return out, pull(cotangent * (packing.segment_ids > 0)[..., None, None])

    want = run_attention(q, k, v, packing, sinks)
    mesh = mesh_lib.create(sizes)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "context"))
    with jax.set_mesh(mesh):
        got = run_attention(*jax.device_put((q, k, v, packing), rows), sinks)
    real = packing.segment_ids > 0
    np.testing.assert_allclose(np.asarray(got[0])[real], np.asarray(want[0])[real], rtol=0, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got[1], want[1])


@pytest.mark.parametrize(
    ("implementation", "T", "dtype", "words"),
    [
        ("splash", 100, np.float32, "multiple of 128"),
        ("splash", 2**18 + 128, np.float32, "exceed 262144"),
        ("triton", 128, np.float32, "the platform is cpu"),
    ],
)
def test_a_kernel_that_cannot_express_the_layer_is_refused(implementation, T, dtype, words):
    shapes = [jax.ShapeDtypeStruct((2, T, heads, 16), dtype) for heads in (4, 2, 2)]
    packing = attention.Packing(*[jax.ShapeDtypeStruct((2, T), np.int32)] * 2)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(attention.attend_packed, implementation=implementation), *shapes, packing)


def test_a_gpu_without_bfloat16_runs_the_attention_of_xla(monkeypatch):
    """A T4 of Colab: Triton has no kernels for it."""
    q, k, v, packing, _ = draw_attention(128, dtype=jnp.bfloat16)
    want = attention.attend_packed(q, k, v, packing, implementation="xla")
    monkeypatch.setattr(attention.mesh_lib, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability="7.5")])
    np.testing.assert_array_equal(attention.attend_packed(q, k, v, packing), want)
    with pytest.raises(ValueError, match="compute capability 7.5 has no bfloat16"):
        attention.attend_packed(q, k, v, packing, implementation="triton")


# ---- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_kv_heads=3), ("num_heads = 4", "num_kv_heads = 3")),
        (dict(head_dim=7), ("head_dim = 7", "even")),
        (dict(remat="all"), ("remat = 'all'", "'offload'")),
        (dict(layer_pattern="SF"), ("window = 0", "'SF'")),
        (dict(layer_pattern="X"), ("layer_pattern = 'X'",)),
        (dict(rope_scaling="yarn"), ("rope_original_positions = 0", "'yarn'")),
        (dict(num_experts=4, experts_per_token=5), ("experts_per_token = 5", "4")),
        (dict(num_experts=4, experts_per_token=2, router_groups=2), ("router_groups = 2", "'sigmoid'")),
        (dict(num_experts=6, experts_per_token=1, router_groups=4), ("router_groups = 4", "6")),
        (SIGMOID | dict(router_groups=8), ("router_groups = 8", "fewer than 2 of 8")),
        (SIGMOID | dict(router_groups=4, router_groups_kept=1), ("experts_per_token = 3", "at most 2")),
        (dict(kv_latent_dim=8), ("kv_latent_dim = 8", "num_kv_heads = num_heads")),
        (dict(family="gpt5"), ("family = 'gpt5'", "'qwen2'")),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        tiny.model(**changes)
    for word in words:
        assert word in str(error.value)


def test_a_config_survives_json():
    config = tiny.model(dense_layers=(1,))
    again = config_lib.ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config and hash(again) == hash(config)


# ---- rotary frequencies ----------------------------------------------------------------------------------------------


def wavelength_llama3(base, factor, low, high, original):
    """Llama 3.1's rule for one dim, by wavelength, as its reference states it."""
    wavelength = 2 * math.pi / base
    if wavelength < original / high:
        return base
    if wavelength > original / low:
        return base / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * base / factor + smooth * base


@pytest.mark.parametrize(
    ("dim", "theta", "factor", "low", "high", "original"),
    [(128, 5e5, 8.0, 1.0, 4.0, 8192), (64, 1e4, 32.0, 1.5, 6.0, 256)],
)
def test_llama3_frequencies(dim, theta, factor, low, high, original):
    scaling = dict(rope_scaling="llama3", rope_factor=factor, rope_low_freq=low, rope_high_freq=high)
    config = tiny.model(head_dim=dim, rope_theta=theta, rope_original_positions=original, **scaling)
    got, attention_factor = layers.frequencies(config, sliding=False)
    want = [wavelength_llama3(theta ** (-2 * i / dim), factor, low, high, original) for i in range(dim // 2)]
    np.testing.assert_allclose(got, want, rtol=1e-6)  # float32
    assert attention_factor == 1.0
    plain = theta ** (-2 * np.arange(dim // 2) / dim)
    assert sum((plain / factor < np.array(want) * 0.999) & (np.array(want) * 0.999 < plain * 0.99)) >= 3  # interpolated


@pytest.mark.parametrize(
    ("dim", "theta", "factor", "fast", "slow", "original", "truncate"),
    [
        (64, 1e4, 40.0, 32.0, 1.0, 4096, True),
        (64, 150000.0, 32.0, 32.0, 1.0, 4096, False),
        (128, 1e6, 4.0, 32.0, 1.0, 32768, True),
    ],
    ids=["deepseek_v3", "gpt_oss", "qwen"],
)
def test_yarn_frequencies(dim, theta, factor, fast, slow, original, truncate):
    """YaRN (arXiv 2309.00071): dims that turn more than `fast` times in the trained length keep their frequency, those that
    turn less than `slow` times are stretched; the ramp between is linear in the dim, its ends rounded outwards."""
    scaling = dict(rope_scaling="yarn", rope_factor=factor, rope_beta_fast=fast, rope_beta_slow=slow)
    config = tiny.model(
        head_dim=dim, rope_theta=theta, rope_original_positions=original, rope_truncate=truncate, **scaling
    )
    got, attention_factor = layers.frequencies(config, sliding=False)

    def dim_of(turns):  # original * theta ** (-2 i / dim) / (2 pi) = turns, solved for i
        return dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    first, last = dim_of(fast), dim_of(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    for i in range(dim // 2):
        base = theta ** (-2 * i / dim)
        part = min(max((i - first) / (last - first), 0.0), 1.0)
        assert math.isclose(got[i], base * (1 - part) + base / factor * part, rel_tol=1e-6), i
    assert 0 < first < last < dim / 2  # the ramp lies inside, so that both ends are seen
    assert math.isclose(attention_factor, 0.1 * math.log(factor) + 1)
    with_mscale = dataclasses.replace(config, rope_mscale=0.7, rope_mscale_all_dim=1.0)
    want = (0.07 * math.log(factor) + 1) / (0.1 * math.log(factor) + 1)
    assert math.isclose(layers.frequencies(with_mscale, sliding=False)[1], want)
