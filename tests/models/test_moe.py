"""Routers, experts, grouped matmuls and load statistics against dense products; tests/models/hf compares them with transformers.

Letters as in models/moe.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import kv_cache
from models import moe, moe_experts, transformer
from rl.experiment.plan import hlo
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import cases, tiny

B, T, D, E, F = 4, 6, 16, 8, 12
BASE = tiny.model(model_dim=D, num_experts=E, experts_per_token=3, expert_ffn_dim=F, num_layers=1)
SIGMOID = dict(router="sigmoid", router_correction=True, routed_scale=2.5)
ROUTERS = {
    "softmax": BASE,
    "softmax_unnormalised": dataclasses.replace(BASE, norm_topk=False),
    "sigmoid": dataclasses.replace(BASE, **SIGMOID),
    "sigmoid_groups": dataclasses.replace(BASE, **SIGMOID, router_groups=4, router_groups_kept=2, norm_topk=False),
    "topk_softmax": dataclasses.replace(BASE, router="topk_softmax", router_bias=True),
}
GPT_OSS = dataclasses.replace(ROUTERS["topk_softmax"], expert_bias=True, activation="clamped", clamp_limit=1.5)
SHARED = dataclasses.replace(ROUTERS["sigmoid"], num_shared_experts=2)

pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def params_of(config):
    return tiny.drawn(transformer.specs(config)["layers"]["000"]["moe"], 0, 0.4)


def draw(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=2)
def run(x_BTD, params, config, cotangent_BTD, experts_BTX=None, valid_BT=None):
    """(output, gradients, routing)."""

    def total(x_BTD, params):
        out_BTD, routing = moe.ffn(x_BTD, params, config, experts_BTX=experts_BTX, valid_BT=valid_BT)
        return jnp.sum(out_BTD * cotangent_BTD), (out_BTD, routing)

    grads, (out_BTD, routing) = jax.grad(total, argnums=(0, 1), has_aux=True)(x_BTD, params)
    return out_BTD, grads, routing


route = jax.jit(moe.route, static_argnums=2)


# ---- routers ---------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=2)
def run_dense(x_BTD, params, config, cotangent_BTD):
    """Every expert on every token, weighed by a masked softmax: no assignment, no gather, no grouped matmul."""

    def total(x_BTD, params):
        probs_BTE = jax.nn.softmax(jnp.einsum("BTD,DE->BTE", x_BTD, params["router"]), axis=-1)
        rank_BTE = jnp.argsort(jnp.argsort(-probs_BTE, axis=-1), axis=-1)
        weights_BTE = jnp.where(rank_BTE < config.experts_per_token, probs_BTE, 0.0)
        if config.norm_topk:
            weights_BTE /= weights_BTE.sum(axis=-1, keepdims=True)
        gate = jnp.einsum("BTD,EDF->BTEF", x_BTD, params["gate"])
        up = jnp.einsum("BTD,EDF->BTEF", x_BTD, params["up"])
        out = jnp.einsum("BTEF,EFD,BTE->BTD", gate * jax.nn.sigmoid(gate) * up, params["down"], weights_BTE)
        return jnp.sum(out * cotangent_BTD), out

    grads, out_BTD = jax.grad(total, argnums=(0, 1), has_aux=True)(x_BTD, params)
    return out_BTD, grads


@pytest.mark.parametrize("config", [BASE, ROUTERS["softmax_unnormalised"]], ids=["normalised", "plain"])
def test_output_and_gradient_equal_every_expert_on_every_token(config):
    args = draw(B, T, D), params_of(config), config, draw(B, T, D, seed=2)
    got, want = run(*args)[:2], run_dense(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-5), got, want)  # sums over 24 tokens


def test_routing_is_float32_under_bfloat16_activations():
    """Scores that bfloat16 cannot tell apart: 1 + 2^-9 times a logit still wins."""
    config = dataclasses.replace(BASE, experts_per_token=1)
    router = np.zeros((D, E), np.float32)
    router[0] = 1.0
    router[0, 5] = 1.0 + 2**-9
    x_BTD = jnp.ones((1, 1, D), jnp.bfloat16)
    assert route(x_BTD, {"router": router}, config).experts[0, 0, 0] == 5


def test_the_correction_acts_on_the_choice_and_has_no_gradient():
    config = ROUTERS["sigmoid"]
    params = params_of(config) | {"correction": np.where(np.arange(E) == 6, 100.0, 0.0).astype(np.float32)}
    x_BTD = draw(B, T, D)
    _, (_, d_params), routing = run(x_BTD, params, config, draw(B, T, D, seed=2))
    assert (np.asarray(routing.experts) == 6).any(axis=-1).all()
    assert (np.asarray(d_params["correction"]) == 0).all()
    np.testing.assert_allclose(routing.weights.sum(axis=-1), config.routed_scale, rtol=1e-5)  # of plain scores


# ---- undefined rows --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("config", [SHARED, GPT_OSS], ids=["shared", "gpt_oss"])
def test_rows_past_the_groups_may_hold_anything(config, monkeypatch):
    """With experts on several devices a device's groups end before its rows do; what comes out there is undefined.

    Here it is NaN, in the result and in the gradient: neither may reach anything. Catches a mask by multiplication.
    """
    real = jax.lax.ragged_dot

    @jax.custom_vjp
    def hostile(rows, kernel, sizes):
        out = real(rows, kernel, sizes)
        return jnp.where(jnp.arange(out.shape[0])[:, None] < sizes.sum(), out, jnp.nan)

    def forward(rows, kernel, sizes):
        return hostile(rows, kernel, sizes), (rows, kernel, sizes)

    def backward(saved, grad):
        rows, kernel, sizes = saved
        d_rows, d_kernel = jax.vjp(lambda r, k: real(r, k, sizes), rows, kernel)[1](grad)
        outside = jnp.arange(rows.shape[0])[:, None] >= sizes.sum()
        poison = jnp.where(jnp.any(outside & (grad != 0)), jnp.nan, 0.0)  # reads rows past the groups
        return jnp.where(outside, jnp.nan, d_rows), d_kernel + poison, None

    hostile.defvjp(forward, backward)
    want = run(draw(8, T, D), params_of(config), config, draw(8, T, D, seed=2))[:2]
    monkeypatch.setattr(jax.lax, "ragged_dot", lambda *args, preferred_element_type: hostile(*args))  # that of the rows
    same_on_mesh({"expert": 4, "fsdp": 2}, config, lambda *_: want)


# ---- experts of other devices ----------------------------------------------------------------------------------------


def on_mesh(sizes, x_BTD, params, config, cotangent):
    """`run` on a mesh, traced anew; (its results, the text of the program)."""
    mesh = mesh_lib.create(sizes, jax.devices()[: math.prod(sizes.values())])
    layout = rules.shardings(transformer.specs(config)["layers"]["000"]["moe"], mesh)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(rules.RULES["batch"]))
    args = jax.device_put(x_BTD, rows), jax.device_put(params, layout), config, jax.device_put(cotangent, rows)
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(run.__wrapped__), static_argnums=2).lower(*args).compile()
        return compiled(args[0], args[1], args[3]), compiled.as_text()


def same_on_mesh(sizes, config, want=None):
    """Compares values and gradients with one device's; a sum taken twice or never over an axis is a factor of 2 off."""
    x_BTD, cotangent = draw(8, T, D), draw(8, T, D, seed=2)
    want = run(x_BTD, params_of(config), config, cotangent)[:2] if want is None else want(x_BTD, cotangent)
    got, text = on_mesh(sizes, x_BTD, params_of(config), config, cotangent)
    # Float32 sums over 48 tokens, split and added in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-4), got[:2], want)
    return text


SPLITS = [{"expert": 4, "fsdp": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "expert": 2, "context": 2}]


@pytest.mark.parametrize("sizes", cases.slow_but([*SPLITS, {"fsdp": 4, "tensor": 2}], SPLITS[1]), ids=str)
def test_eight_devices_equal_one(sizes):
    same_on_mesh(sizes, BASE, lambda x_BTD, cotangent: run_dense(x_BTD, params_of(BASE), BASE, cotangent))


TRAVELS = {
    "expert_fsdp": ({"expert": 4, "fsdp": 2}, SHARED),
    "biases": ({"expert": 4, "fsdp": 2}, GPT_OSS),
    "experts_over_tensor": ({"expert": 2, "tensor": 4}, GPT_OSS),
    "ffn_over_tensor": ({"expert": 2, "tensor": 3}, GPT_OSS),  # 3 do not divide 8 experts, but 12 columns
}


@pytest.fixture
def travel(monkeypatch):
    """Makes assignments move to the devices of their experts."""
    monkeypatch.setattr(moe_experts, "GATHERED", 0)
    monkeypatch.setattr(moe_experts, "TILE", 8)


@pytest.mark.parametrize(
    ("name", "rounds"),
    cases.slow_but([(n, rounds) for n in TRAVELS for rounds in ("one", "several")], ("experts_over_tensor", "several")),
)
def test_assignments_that_travel_equal_one_device(name, rounds, travel, monkeypatch):
    """In one round, and in rounds of 8 rows that cut through the rows of sources and experts."""
    monkeypatch.setattr(moe_experts, "SLACK", {"one": 4.0, "several": 0.1}[rounds])
    assert "all-to-all" in same_on_mesh(*TRAVELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_device", "fsdp", "expert"])
def test_a_part_of_the_tokens_at_a_time_changes_nothing(name, travel, monkeypatch):
    """At most 15 assignments (5 tokens) at a time: 12 parts of 4 tokens, or 2 of a device's 6."""
    whole = run(draw(8, T, D), params_of(GPT_OSS), GPT_OSS, draw(8, T, D, seed=2))[:2]
    monkeypatch.setattr(moe_experts, "ROWS", 15)
    sizes = {"one_device": {}, "fsdp": {"fsdp": 8}, "expert": {"expert": 4, "fsdp": 2}}[name]
    same_on_mesh(sizes, GPT_OSS, lambda *_: whole)


def test_a_prime_number_of_tokens_is_padded_to_few_parts(monkeypatch):
    """47 tokens, at most 5 at a time: 10 parts of 5, not 47 of one."""
    args = draw(1, 47, D), params_of(GPT_OSS), GPT_OSS, draw(1, 47, D, seed=2)
    whole, run_all, sizes = run(*args)[:2], moe_experts._run_all, set()
    monkeypatch.setattr(moe_experts, "ROWS", 15)
    monkeypatch.setattr(moe_experts, "_run_all", lambda x, *a, **k: sizes.add(x.shape) or run_all(x, *a, **k))
    got = jax.jit(functools.partial(run.__wrapped__), static_argnums=2)(*args)[:2]
    assert sizes == {(1, 5, D)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-4), got, whole)


@pytest.mark.parametrize(
    "gathered", cases.slow_but([0, moe_experts.GATHERED], moe_experts.GATHERED), ids=["travel", "gathered"]
)
def test_one_expert_of_one_device_serves_all(gathered, monkeypatch):
    """All 192 assignments go to one device, which holds rows for 1.25 x 24 at a time: none is dropped."""
    config = dataclasses.replace(BASE, experts_per_token=1)
    params = params_of(config) | {"router": params_of(config)["router"] + (np.arange(E) == 2) * np.float32(5)}
    x_BTD, cotangent = np.abs(draw(8, 24, D)), draw(8, 24, D, seed=2)
    monkeypatch.setattr(moe_experts, "GATHERED", gathered)
    monkeypatch.setattr(moe_experts, "TILE", 8)
    (*got, routing), _ = on_mesh({"expert": 8}, x_BTD, params, config, cotangent)
    np.testing.assert_array_equal(routing.load, np.where(np.arange(E) == 2, 8 * 24, 0))
    want = run_dense(x_BTD, params, config, cotangent)
    # Float32 sums over 192 tokens, in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, abs(b).max())), got, [*want])
    assert (np.delete(np.asarray(got[1][1]["down"]), 2, axis=0) == 0).all()  # experts that no token chose


@pytest.mark.slow
@pytest.mark.parametrize("gathered", [0, moe_experts.GATHERED], ids=["travel", "gathered"])
def test_no_device_ever_holds_all_experts(gathered, monkeypatch):
    """Parameters are gathered over `fsdp` alone: the bytes between devices at a time are at most one device's part of one kernel."""
    monkeypatch.setattr(moe_experts, "GATHERED", gathered)
    config = dataclasses.replace(BASE, expert_ffn_dim=512)  # so that no activation is as large as a kernel
    _, text = on_mesh({"expert": 4, "fsdp": 2}, draw(8, T, D), params_of(config), config, draw(8, T, D, seed=2))
    found = hlo.collectives(hlo.parse(text))
    largest = max(c.num_bytes for c in found if c.kind == "all-gather")
    assert largest == E // 4 * D * 512 * 4
    assert {c.kind for c in found} >= ({"all-to-all"} if gathered == 0 else {"all-gather"})


@pytest.mark.parametrize("kernel_of", ["megablox", "triton"])
def test_kernels_equal_ragged_dot(kernel_of):
    """The kernels of TPUs and GPUs, interpreted, with groups that end before the rows do: values and gradients."""
    sizes = np.array([3, 0, 70, 40], np.int32)
    rows, kernel, cotangent = draw(150, 32), draw(4, 32, 48, seed=2), draw(150, 48, seed=3)
    inside = np.arange(150) < sizes.sum()

    @functools.partial(jax.jit, static_argnums=0)
    def run(which):
        config = dataclasses.replace(BASE, grouped_matmul=which)
        options = {"interpret": which != "ragged_dot"}
        out, pull = jax.vjp(
            lambda r, k: moe_experts.grouped_matmul(r, k, sizes, inside, config, **options), rows, kernel
        )
        return out, pull(cotangent)

    got, want = run(kernel_of), run("ragged_dot")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), got, want)  # sums of up to 70
    starts = np.cumsum(sizes) - sizes
    for e, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        at = slice(start, start + size)
        np.testing.assert_allclose(want[0][at], rows[at] @ kernel[e], rtol=0, atol=1e-4)
        np.testing.assert_allclose(want[1][1][e], rows[at].T @ cotangent[at], rtol=0, atol=1e-4)
    assert (np.asarray(want[0])[~inside] == 0).all() and (np.asarray(want[1][0])[~inside] == 0).all()


@pytest.mark.parametrize("kernel_of", ["megablox", "triton", "ragged_dot"])
def test_a_layer_in_its_stack_equals_a_slice(kernel_of):
    sizes, config = np.array([3, 0, 70, 40], np.int32), dataclasses.replace(BASE, grouped_matmul=kernel_of)
    rows, stack, inside = draw(150, 32), jnp.asarray(draw(3, 4, 32, 48, seed=2)), np.arange(150) < sizes.sum()
    for layer in range(3):
        pair = moe_experts.InStack(stack, jnp.int32(layer)), stack[layer]
        options = {"interpret": kernel_of != "ragged_dot"}
        got, want = (moe_experts.grouped_matmul(rows, x, sizes, inside, config, **options) for x in pair)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("axes", "num_slices"), [({"tensor": 2}, 0), ({"fsdp": 2}, 3)])
def test_a_decode_step_slices_no_stack_of_experts(axes, num_slices):
    """A TPU would copy a layer's experts in front of the kernel, and read them twice. Over `fsdp`, each layer is gathered."""
    config = tiny.model(num_experts=4, experts_per_token=2, expert_ffn_dim=24, num_layers=3, scan_layers=True)
    config = dataclasses.replace(config, grouped_matmul="megablox")
    mesh, experts = mesh_lib.create(axes, jax.devices()[:2]), (4, config.model_dim, 24)
    cache = kv_cache.create(config, 2, 8)

    def step(params, tokens_B1, cache):
        return transformer.extend(params, config, tokens_B1, tokens_B1, cache, kv_cache.attend_at(tokens_B1[:, 0]))

    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(step)(transformer.abstract(config), jnp.zeros((2, 1), jnp.int32), cache)
    (scan,) = (equation for equation in traced.eqns if equation.primitive.name == "scan")
    shapes = [x.aval.shape for x in scan.params["jaxpr"].jaxpr.invars]
    sliced = [shape for shape in shapes if sorted(shape) == sorted(experts)]
    assert len(sliced) == num_slices and shapes.count((3, *experts)) == (2 if not num_slices else 0)


# ---- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_replaying_the_routers_own_choice_changes_nothing(name):
    config = ROUTERS[name]
    args = draw(B, T, D), params_of(config), config, draw(B, T, D, seed=2)
    want = run(*args)
    *got, routing = run(*args, want[2].experts)
    assert not np.asarray(routing.margin).any()
    got = *got, routing._replace(margin=None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)


def test_the_margin_of_an_expert_whose_group_is_not_kept_is_that_of_the_groups():
    """Two sums of two sigmoids differ by 0.01: two logits have to move, 4 nats per 1 where a sigmoid is steepest."""
    config = dataclasses.replace(
        BASE, model_dim=4, num_experts=4, experts_per_token=1, router="sigmoid", router_groups=2, router_groups_kept=1
    )
    scores = np.array([0.9, 0.1, 0.5, 0.49])
    x_11D = np.log(scores / (1 - scores)).astype(np.float32)[None, None]
    for expert, margin in ((0, 0.0), (2, 0.01 * 4 / 2)):  # the router chooses 0
        routing = route(x_11D, {"router": np.eye(4, dtype=np.float32)}, config, experts_BTX=np.array([[[expert]]]))
        assert float(routing.margin[0, 0]) == pytest.approx(margin, abs=1e-6)


@pytest.mark.parametrize("num_groups", [1, 4, 8])
@pytest.mark.parametrize("correction", [False, True])
def test_honest_rounding_moves_a_margin_by_at_most_twice_as_much(num_groups, correction):
    """Another backend's logits differ by up to r = 0.05: it may drop, keep, and pass over groups and experts at near ties only."""
    config = dataclasses.replace(BASE, model_dim=32, num_experts=16, experts_per_token=3, router="sigmoid")
    config = dataclasses.replace(config, router_groups=num_groups, router_groups_kept=(num_groups + 1) // 2)
    rng, r = np.random.default_rng(num_groups), 0.05
    x_1TD = np.concatenate([rng.normal(0, 1, (1, 4096, 16)), rng.uniform(-r, r, (1, 4096, 16))], axis=-1).astype(
        np.float32
    )
    router = 0.3 * rng.standard_normal((16, 16)).astype(np.float32)
    theirs, ours = (np.concatenate([router, rounds * np.eye(16, dtype=np.float32)]) for rounds in (1, 0))
    own = {"correction": rng.normal(0, 0.1, 16).astype(np.float32)} if correction else {}
    chosen = moe.route(x_1TD, own | {"router": theirs}, config).experts
    margin_T = np.asarray(moe.route(x_1TD, own | {"router": ours}, config, experts_BTX=chosen).margin)[0]
    assert 0 < (margin_T > 0).mean() < 0.5 and margin_T.max() <= 2 * r + 1e-5
    # A bound of half as much would refuse honest workers.
    assert margin_T.max() > r / 2


def test_replayed_experts_run_with_this_routers_weights_and_gradient():
    """Experts of another policy: weights are this router's scores of them, and its gradient is that of those weights."""
    config = ROUTERS["softmax"]
    params, x_BTD, cotangent = params_of(config), draw(B, T, D), draw(B, T, D, seed=2)
    forced = np.stack([np.random.default_rng(n).permutation(E)[:3] for n in range(B * T)]).reshape(B, T, 3)
    out, (_, d_params), routing = run(x_BTD, params, config, cotangent, forced.astype(np.int32))
    np.testing.assert_array_equal(routing.experts, forced)

    def total(router):
        probs_BTE = jax.nn.softmax(jnp.einsum("BTD,DE->BTE", x_BTD, router), axis=-1)
        chosen_BTE = jax.nn.one_hot(forced, E).sum(axis=2)
        weights_BTE = probs_BTE * chosen_BTE / (probs_BTE * chosen_BTE).sum(axis=-1, keepdims=True)
        gate, up = (jnp.einsum("BTD,EDF->BTEF", x_BTD, params[name]) for name in ("gate", "up"))
        out = jnp.einsum("BTEF,EFD,BTE->BTD", jax.nn.silu(gate) * up, params["down"], weights_BTE)
        return jnp.sum(out * cotangent), out

    d_router, want = jax.jit(jax.grad(total, has_aux=True))(params["router"])
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
    np.testing.assert_allclose(d_params["router"], d_router, rtol=0, atol=1e-4)  # sums over 24 tokens


# ---- load ------------------------------------------------------------------------------------------------------------


def test_load_statistics_count_real_tokens():
    config, x_BTD = ROUTERS["softmax"], draw(B, T, D)
    valid_BT = np.arange(T)[None] < np.array([6, 3, 1, 0])[:, None]
    routing = route(x_BTD, params_of(config), config, valid_BT=valid_BT)
    load, score = np.zeros(E), np.zeros(E)
    for b, t in zip(*np.nonzero(valid_BT), strict=True):
        logits = x_BTD[b, t].astype(np.float64) @ params_of(config)["router"]
        score += np.exp(logits) / np.exp(logits).sum()
        load[np.asarray(routing.experts)[b, t]] += 1
    np.testing.assert_array_equal(routing.load, load)
    np.testing.assert_allclose(routing.score, score, rtol=1e-5)
    layers = jax.tree.map(lambda x: np.stack([x, np.ones_like(x)]), routing)  # the second layer: perfect balance
    metrics = {name: float(x) for name, x in jax.jit(moe.load_metrics)(layers.load).items()}
    violation, share = load.max() / load.mean() - 1, load[load > 0] / load.sum()
    entropy = -(share * np.log(share)).sum() / math.log(E)
    assert math.isclose(metrics["moe/max_violation"], violation / 2, rel_tol=1e-5)
    assert math.isclose(metrics["moe/max_violation_worst_layer"], violation, rel_tol=1e-5)
    assert math.isclose(metrics["moe/load_entropy"], (entropy + 1) / 2, rel_tol=1e-5)
    balance = (E * (load / load.sum() * score / score.sum()).sum() + 1) / 2
    assert math.isclose(float(jax.jit(moe.balance_loss)(layers)), balance, rel_tol=1e-5)


def test_the_auxiliary_loss_pushes_the_router_towards_balance():
    """A step against its gradient lowers the scores of the busiest expert; none reaches the experts themselves."""
    config, x_BTD = ROUTERS["softmax"], jnp.abs(draw(B, T, D))
    params = params_of(config) | {"router": params_of(config)["router"] + (np.arange(E) == 3) * np.float32(0.8)}

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        routing = moe.ffn(x_BTD, params, config)[1]
        return moe.balance_loss(jax.tree.map(lambda x: x[None], routing)), routing

    (before, routing), grads = loss(params)
    assert routing.load.argmax() == 3 and before > 1
    (after, moved), _ = loss(params | {"router": params["router"] - 0.5 * grads["router"]})
    assert moved.score[3] < routing.score[3] and after < before
    assert all((np.asarray(grads[name]) == 0).all() for name in ("gate", "up", "down"))


def test_the_correction_moves_against_the_load_until_it_is_even():
    """Algorithm 1 of arXiv 2408.15664, by hand for one step; and it balances a skewed router."""
    corrected = moe.balanced_correction(jnp.array([0.0, 1.0, 2.0]), jnp.array([4.0, 1.0, 1.0]), 0.5)
    np.testing.assert_allclose(corrected, [-0.5, 1.5, 2.5])
    config, x_BTD = ROUTERS["sigmoid"], np.abs(draw(16, 32, D))
    params = params_of(config) | {"correction": np.zeros(E, np.float32)}

    @jax.jit
    def step(correction):
        routing = moe.route(x_BTD, params | {"correction": correction}, config)
        metrics = moe.load_metrics(routing.load[None])
        return moe.balanced_correction(correction, routing.load, 0.01), metrics["moe/max_violation"]

    correction, first = step(params["correction"])
    for _ in range(200):
        correction, last = step(correction)
    assert first > 0.8 and last < 0.15
