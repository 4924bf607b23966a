"""Optimizers against their papers in float64, one parameter at a time; Muon against a singular value decomposition.

Specs replace parameters: decay, orthogonalization and the shape of a matrix follow from the names of dims.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import transformer
from rl.learning.learner import objective, optimizers, train_step
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import tiny

CONFIG = optimizers.OptimizerConfig(
    learning_rate=0.1, warmup_steps=4, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3, clip_norm=0.7
)


def spec(shape, *axes):
    return rules.ParamSpec(shape, "float32", axes, None)


SPECS = {
    "embed": spec((6, 4), "vocab", "model"),
    "kernel": spec((4, 5), "model", "ffn"),
    "scale": spec((5,), "norm"),
    "stacked_scale": spec((2, 5), "layers", "norm"),
    "bias": spec((2, 3), "heads", "head_dim"),
}
MATRICES = {"embed", "kernel"}


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(s.shape) * scale for name, s in SPECS.items()}


def single(tree):
    return {name: jnp.asarray(x, jnp.float32) for name, x in tree.items()}


def steps(config, num=7):
    """(parameters before, gradients in float64, parameters after) of `num` steps on gradients now above the clip, now below."""
    optimizer = optimizers.make(config, SPECS)
    params, update = single(draw(0)), jax.jit(optimizer.update)
    state = optimizer.init(params)
    for n in range(num):
        assert optimizers.next_rate(config, state) == pytest.approx(rate_of(config, n), rel=1e-6)  # float32
        grads = draw(n + 1, 3.0 if n % 2 == 0 else 0.05)
        updates, state = update(single(grads), state, params)
        after = optax.apply_updates(params, updates)
        yield params, grads, after
        params = after


def clipped(grads, clip_norm):
    norm = math.sqrt(sum((x**2).sum() for x in grads.values()))
    return {name: x * min(1.0, clip_norm / norm) if clip_norm else x for name, x in grads.items()}


def rate_of(config, n):
    return config.learning_rate * (min(1.0, (n + 1) / config.warmup_steps) if config.warmup_steps else 1.0)


# ---- rules -----------------------------------------------------------------------------------------------------------


def assert_steps(config, direction):
    """Clips the whole gradient, decays matrices only; n = 1, 2, ... has the rate learning_rate x min(1, n / warmup_steps)."""
    w = draw(0)
    for n, (_, grads, after) in enumerate(steps(config), start=1):
        for name, g in clipped(grads, config.clip_norm).items():
            decay = 0.3 * w[name] if name in MATRICES else 0.0
            w[name] = w[name] - rate_of(config, n - 1) * (direction(name, g, n) + decay)
            np.testing.assert_allclose(after[name], w[name], atol=3e-6)  # seven float32 steps on values of size 1


@pytest.mark.parametrize(("warmup_steps", "clip_norm"), [(0, 0.0), (1, 0.7), (4, 0.7)])
def test_adamw(warmup_steps, clip_norm):
    """Loshchilov & Hutter 2019, algorithm 2. The first step already moves."""
    m, v = ({name: np.zeros(s.shape) for name, s in SPECS.items()} for _ in range(2))

    def direction(name, g, n):
        m[name] = 0.8 * m[name] + 0.2 * g
        v[name] = 0.9 * v[name] + 0.1 * g**2
        return m[name] / (1 - 0.8**n) / (np.sqrt(v[name] / (1 - 0.9**n)) + 1e-3)

    assert_steps(dataclasses.replace(CONFIG, warmup_steps=warmup_steps, clip_norm=clip_norm), direction)


def test_sgd():
    """Nesterov (Sutskever 2013): m <- mu m + g, step along mu m + g."""
    m = {name: np.zeros(s.shape) for name, s in SPECS.items()}

    def direction(name, g, n):
        m[name] = 0.9 * m[name] + g
        return 0.9 * m[name] + g

    assert_steps(dataclasses.replace(CONFIG, name="sgd", momentum=0.9), direction)


def test_sign():
    assert_steps(dataclasses.replace(CONFIG, name="sign"), lambda name, g, n: np.sign(g))


def newton_schulz(x):
    """Jordan 2024, in float64: p(s) = a s + b s^3 + c s^5 on every singular value, by the decomposition itself."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(x)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ vt


def test_muon():
    """Momentum and Newton-Schulz on the kernel; the embedding, scales and biases are AdamW's."""
    config = dataclasses.replace(CONFIG, name="muon", clip_norm=0.0)
    adamw = steps(dataclasses.replace(config, name="adamw"))
    w, m = draw(0)["kernel"], np.zeros((4, 5))
    for n, ((_, grads, after), (_, _, by_adamw)) in enumerate(zip(steps(config), adamw, strict=True)):
        m = 0.95 * m + 0.05 * grads["kernel"]
        direction = newton_schulz(0.95 * m + 0.05 * grads["kernel"]) * 0.2 * math.sqrt(5)
        w = w - rate_of(config, n) * (direction + 0.3 * w)
        # Five quintic steps in float32: each multiplies an error of 1e-7 by at most 3.5.
        np.testing.assert_allclose(after["kernel"], w, atol=1e-4)
        for name in SPECS.keys() - {"kernel"}:
            np.testing.assert_array_equal(after[name], by_adamw[name])


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)])
def test_orthogonalize_pushes_singular_values_to_one(shape):
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    got = np.asarray(optimizers.orthogonalize(jnp.asarray(x)))
    for a, b in zip(x, got, strict=True):
        np.testing.assert_allclose(b, newton_schulz(a.astype(np.float64)), atol=2e-4)
        values = np.linalg.svd(b, compute_uv=False)
        assert values.max() < 1.25 and np.median(values) > 0.6  # Jordan: most land in 0.7 .. 1.2
    assert (np.asarray(optimizers.orthogonalize(jnp.zeros((1, 4, 5)))) == 0).all()


KERNELS = {
    "q": (spec((4, 2, 3), "model", "heads", "head_dim"), lambda x: x.reshape(4, 6)),
    "o": (spec((2, 3, 4), "heads", "head_dim", "model"), lambda x: x.reshape(6, 4)),
    "down": (spec((6, 4), "ffn", "model"), lambda x: x),
    "router": (spec((4, 6), "model", "router"), lambda x: x),
}


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 1}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "context": 2}], ids=str
)
def test_muon_takes_a_kernel_as_one_matrix_and_copies_as_many(sizes, capfd):
    """All these have 24 numbers; stacks of layers and of experts are orthogonalised one by one, over the devices or not.

    No device has a whole stack meanwhile: the compiler would warn of it.
    """
    specs = {name: kernel for name, (kernel, _) in KERNELS.items()}
    specs["stack"] = spec((3, 4, 6), "layers", "model", "ffn")
    specs["experts"] = spec((2, 4, 4, 6), "layers", "experts", "model", "expert_ffn")
    rng = np.random.default_rng(1)
    grads = {name: rng.standard_normal(s.shape) for name, s in specs.items()}
    muon = optimizers.scale_by_muon(specs, 0.0, "bfloat16")  # the momentum that is kept, not the step
    mesh = mesh_lib.create(sizes, devices=jax.devices()[: math.prod(sizes.values())])
    layout = rules.shardings(specs, mesh)
    with jax.set_mesh(mesh):
        update = jax.jit(lambda grads: muon.update(grads, muon.init(grads))[0], out_shardings=layout)
        got = update(jax.device_put(single(grads), layout))
    assert "rematerialization" not in capfd.readouterr().err
    for name, (_, as_matrix) in KERNELS.items():
        expected = newton_schulz(as_matrix(grads[name])) * 0.2 * math.sqrt(6)
        np.testing.assert_allclose(as_matrix(np.asarray(got[name])), expected, atol=2e-4)
    for name in ("stack", "experts"):
        many = zip(grads[name].reshape(-1, 4, 6), np.asarray(got[name]).reshape(-1, 4, 6), strict=True)
        for x, y in many:
            np.testing.assert_allclose(y, newton_schulz(x) * 0.2 * math.sqrt(6), atol=2e-4)


# ---- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.25, 0.5, 0.75, 1.0] + [1.0] * 8),
        (
            {"schedule": "linear", "total_steps": 12, "decay_steps": 4},
            [0.25, 0.5, 0.75] + [1.0] * 6 + [0.75, 0.5, 0.25],
        ),
        (
            {"schedule": "linear", "total_steps": 12, "final_rate": 0.2},
            [0.25, 0.5, 0.75, 1.0, 1.0] + [1 - 0.1 * n for n in range(1, 8)],
        ),
        (
            {"schedule": "cosine", "total_steps": 12, "final_rate": 0.1},
            [0.25, 0.5, 0.75, 1.0] + [0.1 + 0.45 * (1 + math.cos(math.pi * n / 8)) for n in range(8)],
        ),
        (
            {"warmup_steps": 0, "schedule": "cosine", "total_steps": 12},
            [(1 + math.cos(math.pi * n / 12)) / 2 for n in range(12)],
        ),
    ],
)
def test_schedules(changes, expected):
    rate = optimizers.learning_rate(dataclasses.replace(CONFIG, learning_rate=2.0, **changes))
    np.testing.assert_allclose([float(rate(n)) / 2 for n in range(12)], expected, atol=1e-6)  # float32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "adam"}, ("optimizer.name", "'adam'", "adamw, muon, sgd, sign")),
        ({"schedule": "step"}, ("optimizer.schedule", "constant, linear, cosine")),
        ({"moment_dtype": "int8"}, ("optimizer.moment_dtype", "bfloat16")),
        ({"schedule": "cosine"}, ("optimizer.total_steps = 0", "= 4; raise")),
        ({"schedule": "linear", "total_steps": 9, "decay_steps": 5}, ("optimizer.total_steps", "9")),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(CONFIG, **changes)
    for word in words:
        assert word in str(error.value)


# ---- the state -------------------------------------------------------------------------------------------------------

MODEL = tiny.model(num_layers=2, num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1)


@pytest.mark.parametrize("name", optimizers.RULES)
@pytest.mark.parametrize("offload", [False, True])
def test_the_state_lies_as_its_parameters(name, offload):
    """Split like them, in the memory asked for, first moments in the dtype asked for; counts are everywhere."""
    config = dataclasses.replace(CONFIG, name=name, moment_dtype="bfloat16", offload_moments=offload)
    mesh = mesh_lib.create({"fsdp": 2, "expert": 2, "tensor": 2})
    optimizer, loss = train_step.make_optimizer(config, MODEL), objective.bind("cross_entropy", {})
    state = train_step.abstract_state(train_step.Learner(MODEL, optimizer, loss, mesh))
    params = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract(MODEL, mesh))
    }
    num = 0
    assert state.step.sharding.is_fully_replicated and state.step.dtype == jnp.int32
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if leaf.ndim == 0:
            assert leaf.sharding.is_fully_replicated and leaf.sharding.memory_kind != "pinned_host"
            continue
        where = jax.tree_util.keystr(path)
        (mine,) = (param for key, param in params.items() if where.endswith(key))
        assert leaf.shape == mine.shape and leaf.sharding.spec == mine.sharding.spec
        assert (leaf.sharding.memory_kind == "pinned_host") == offload
        assert leaf.dtype == ("float32" if ".nu" in where else "bfloat16")
        num += leaf.size
    total = sum(param.size for param in params.values())
    if name == "adamw":
        assert num == 2 * total
    elif name == "sgd":
        assert num == total
    elif name == "sign":
        assert num == 0
    else:
        assert total < num < 2 * total  # one momentum for the matrices of Muon


def test_which_parameters_of_a_model_are_matrices():
    specs = transformer.specs(MODEL)
    found = {"matrix": set(), "muon": set(), "none": set()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(specs, is_leaf=rules.is_spec):
        kind = "muon" if optimizers.is_hidden_matrix(leaf) else "matrix" if rules.is_matrix(leaf) else "none"
        found[kind].add(path[-1].key)
    assert found["muon"] == {"q", "k", "v", "o", "gate", "up", "down", "router"}
    assert found["matrix"] == {"embed"}
    assert found["none"] == {"q_norm", "k_norm", "attn_norm", "mlp_norm", "final_norm"}
