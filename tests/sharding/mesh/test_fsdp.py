"""Gathers and sums in two steps: the tori that need them, the gradient of a train step, and its collectives."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models import layers
from models.kernels import adapted
from rl.experiment.plan import hlo
from rl.learning.batch import packing
from rl.learning.learner import train_step
from sharding.mesh import fsdp
from sharding.mesh import mesh as mesh_lib
from tests.support import small_learner as small


@pytest.mark.parametrize(
    ("kind", "sizes", "near"),
    [
        ("TPU v5", {"fsdp": 64}, 4),  # 4 x 4 x 4
        ("TPU v5", {"data": 2, "fsdp": 128}, 8),  # 4 x 4 x 8, two slices
        ("TPU v5", {"fsdp": 512}, 8),
        ("TPU v5", {"fsdp": 256}, 8),  # 4 x 8 x 8
        ("TPU v5 lite", {"fsdp": 64}, 1),  # 8 x 8
        ("TPU v5", {"fsdp": 32}, 1),
        ("TPU v5", {"fsdp": 64, "tensor": 2}, 1),
        ("cpu", {"fsdp": 64}, 1),
    ],
)
def test_the_devices_of_the_last_dim_are_near(monkeypatch, kind, sizes, near):
    device = types.SimpleNamespace(platform=kind[:3].lower(), device_kind=kind)
    mesh = types.SimpleNamespace(shape=sizes, abstract_device=device)
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    assert fsdp.near() == near


@pytest.mark.parametrize(
    ("config", "sizes"), [(small.DENSE, {"fsdp": 8}), (small.MOE, {"data": 2, "fsdp": 4})], ids=["dense", "mixture"]
)
def test_a_gradient_in_two_steps_equals_the_plain_one(monkeypatch, config, sizes):
    monkeypatch.setattr(fsdp, "near", lambda: 2)
    learner = small.make(
        config, sizes=small.axes(**sizes), optimizer=optax.sgd(0.1, momentum=0.9)
    )  # compiled for none else
    state = train_step.init_state(jax.random.key(0), learner, small.params_of(config))
    batch = packing.place(small.pack(16, 1), learner.mesh)
    step = jax.jit(functools.partial(train_step.train_step, learner)).lower(state, batch).compile()
    state, _ = step(state, batch)
    _, expected = jax.tree.map(np.asarray, small.reference(small.params_of(config), config))
    small.assert_gradient(optax.tree.get(state.opt_state, "trace"), expected)
    found = hlo.collectives(hlo.parse(step.as_text()))
    groups = {(c.kind, len(c.group)) for c in found if c.kind in ("all-gather", "reduce-scatter")}
    steps = {2, sizes["fsdp"] // 2}
    assert groups >= {(kind, size) for kind in ("all-gather", "reduce-scatter") for size in steps}
    if sizes["fsdp"] == 8:  # no collective over the whole axis has a matrix
        whole = [c for c in found if len(c.group) == 8 and c.kind != "all-to-all"]
        assert max(c.num_bytes for c in whole) < 4 * config.model_dim * config.ffn_dim / 8, whole


@pytest.mark.parametrize("near", [1, 2])
@pytest.mark.parametrize(("dtype", "total"), [("float32", 263), ("bfloat16", 264)])
def test_gradients_are_summed_in_the_dtype_of_the_weights(monkeypatch, near, dtype, total):
    """One device has 256, seven have 1: bfloat16 has no 263."""
    monkeypatch.setattr(fsdp, "near", lambda: near)
    mesh = mesh_lib.create({"fsdp": 8})
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    rows, kernel = jnp.ones((8, 1, 8), jnp.bfloat16), jnp.ones((8, 4), dtype)
    grad = jnp.ones((8, 1, 4), jnp.bfloat16).at[0].set(256)

    @jax.jit
    def product(rows, kernel, grad):
        return jax.vjp(lambda kernel: layers.project(rows, kernel), kernel)[1](grad)[0]

    @jax.jit
    def gathered(kernel, grad):
        spec = PartitionSpec("fsdp")
        gather = lambda kernel, grad: jnp.vdot(fsdp.gather_as(jnp.bfloat16, 0, kernel), grad[0])[None]  # noqa: E731
        run = jax.shard_map(gather, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        return jax.grad(lambda kernel: run(kernel, grad).astype(jnp.float32).sum())(kernel)

    with jax.set_mesh(mesh):
        rows, kernel, grad = place(rows, "fsdp"), place(kernel, "fsdp"), place(grad, "fsdp")
        found = product(rows, kernel, grad), gathered(kernel, jnp.broadcast_to(grad, (8, 8, 4)))
    for one in found:
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, total)


@pytest.mark.parametrize(("config", "sizes"), [(small.DENSE, {"fsdp": 8}), (small.MOE, {"data": 2, "fsdp": 4})])
def test_a_train_step_sums_matrices_in_float32_if_told_so(monkeypatch, config, sizes):
    """The program before XLA is read: on a CPU, XLA sums bfloat16 in float32."""
    monkeypatch.setattr(fsdp, "near", lambda: 2)
    for reduce_dtype in ("auto", "float32"):
        model = dataclasses.replace(config, dtype="bfloat16", reduce_dtype=reduce_dtype)
        learner = small.make(model, sizes=small.axes(**sizes))
        state = train_step.init_state(jax.random.key(0), learner, small.params_of(model))
        batch = packing.place(small.pack(16, 1), learner.mesh)
        program = jax.jit(functools.partial(train_step.train_step, learner)).lower(state, batch).as_text()
        found = re.findall(r'"stablehlo.reduce_scatter".*?-> tensor<[\dx]*(\w+)>', program, re.DOTALL)
        assert len(found) > 4 and ("bf16" in found) == (reduce_dtype == "auto")


def test_adapters_next_to_a_kernel_that_is_gathered_in_two_steps(monkeypatch):
    """Values and gradients by numpy, for the kernel's model dim on either side."""
    monkeypatch.setattr(fsdp, "near", lambda: 2)
    mesh, rng = mesh_lib.create({"fsdp": 8}), np.random.default_rng(0)
    place = lambda x, *spec: jax.device_put(x.astype(np.float32), NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    x, weight = rng.standard_normal((8, 3, 16)), rng.standard_normal((8, 3, 8))
    base, a, b = rng.standard_normal((16, 8)), rng.standard_normal((16, 2)), rng.standard_normal((2, 8))
    for model, spec in ((0, ("fsdp",)), (-1, (None, "fsdp"))):

        @jax.jit
        def run(x, base, a, b, model=model):
            def loss(x, base, a, b):
                out = layers.project(x, adapted.Adapted(base, a, b, 3.0), model)
                return jnp.sum(out * weight), out

            return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, base, a, b)

        with jax.set_mesh(mesh):
            grads, out = run(place(x, "fsdp"), place(base, *spec), place(a), place(b))
        np.testing.assert_allclose(out, x @ (base + 3 * a @ b), atol=1e-4)  # float32 sums of 16 products of size 10
        d_merged = np.einsum("btd,btf->df", x, weight)
        wanted = weight @ (base + 3 * a @ b).T, 0 * base, 3 * d_merged @ b.T, 3 * a.T @ d_merged
        for got, want in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-3)
