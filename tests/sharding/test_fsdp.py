"""Gathers and sums in two steps: the tori that need them, the gradient of a train step, and its collectives."""

import functools
import types

import jax
import numpy as np
import optax
import pytest

from rl.batch import packing
from rl.learner import train_step
from rl.plan import hlo
from sharding import fsdp
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
