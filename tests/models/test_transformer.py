"""Properties of the decoder that hold by construction; its values are compared with transformers' in tests/models/hf/test_checkpoint.py.

Letters: B sequences, T tokens, D model, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from rl.experiment.plan import hlo
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import cases, tiny

DENSE = tiny.model(vocab_size=48, head_dim=16, ffn_dim=40)
MIXED = dataclasses.replace(DENSE, num_experts=4, experts_per_token=2, expert_ffn_dim=24, first_dense_layers=1)
pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def params_of(config):
    return tiny.params(config, 7)


@functools.partial(jax.jit, static_argnums=1)
def run(params, config, tokens_BT, layout=None):
    hidden_BTD, _ = transformer.apply(params, config, tokens_BT, **(layout or {}))
    return hidden_BTD, transformer.logits(params, config, hidden_BTD)


def draw_tokens(shape, seed=0):
    return np.random.default_rng(seed).integers(0, DENSE.vocab_size, shape).astype(np.int32)


def test_bfloat16_activations_give_float32_logits_near_those_of_float32():
    tokens_BT = draw_tokens((3, 16))
    _, expected_BTV = run(params_of(DENSE), DENSE, tokens_BT)
    hidden_BTD, logits_BTV = run(params_of(DENSE), dataclasses.replace(DENSE, dtype="bfloat16"), tokens_BT)
    assert hidden_BTD.dtype == jnp.bfloat16 and logits_BTV.dtype == expected_BTV.dtype == jnp.float32
    # bfloat16 keeps 8 bits: 2^-8 per rounding, some 40 roundings on the way to logits of size 4; measured 0.08.
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=0.2)
    assert np.abs(logits_BTV - expected_BTV).max() > 1e-3  # it did run in bfloat16


# ---- packing, padding, causality -------------------------------------------------------------------------------------
# From here on a model whose first layer is dense and whose second is an MoE layer, grouped queries, norms on queries and keys.

# One row of 16 tokens: a prompt of 3 that branches of 4 and 2 continue, a sequence of one token, one of 4, padding.
SEGMENTS_T = np.array([1] * 9 + [2] + [3] * 4 + [0] * 2, np.int32)
BRANCHES_T = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 1, 1, 1, 1, 0, 0], np.int32)
POSITIONS_T = np.array([0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 0, 1, 2, 3, 0, 0], np.int32)
SEQUENCES = ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 7, 8], [9], [10, 11, 12, 13])  # columns of each


def layout(rows):
    columns = {"positions_BT": POSITIONS_T, "segment_ids_BT": SEGMENTS_T, "branch_ids_BT": BRANCHES_T}
    return {name: np.tile(x_T, (rows, 1)) for name, x_T in columns.items()}


def test_packed_sequences_equal_separate_ones():
    """Row 0 is packed, with a shared prompt; rows 1 to 4 hold its sequences alone, at the start of the row."""
    tokens_BT, packed = np.zeros((5, 16), np.int32), layout(5)
    tokens_BT[0] = draw_tokens(16)
    for row, columns in enumerate(SEQUENCES, start=1):
        tokens_BT[row, : len(columns)] = tokens_BT[0, columns]
        packed["positions_BT"][row], packed["branch_ids_BT"][row] = np.arange(16), 0
        packed["segment_ids_BT"][row] = np.arange(16) < len(columns)
    hidden_BTD, _ = run(params_of(MIXED), MIXED, tokens_BT, packed)
    for row, columns in enumerate(SEQUENCES, start=1):
        # Masked scores weigh exactly 0 in both; only the order of float32 sums differs.
        np.testing.assert_allclose(hidden_BTD[0, columns], hidden_BTD[row, : len(columns)], atol=1e-5)


def test_a_token_sees_itself_and_its_own_past():
    """d hidden[t] / d embedding of token s is zero exactly where s is later, or in another sequence or branch.

    Every token id occurs once, so that a row of the embedding's gradient belongs to one position. Padding is a segment
    of its own. Catches an off-by-one of the causal mask, a mask without segments, and experts that mix tokens.
    """
    params, tokens_1T = params_of(MIXED), np.random.default_rng(1).permutation(MIXED.vocab_size)[None, :16]
    direction_D = np.random.default_rng(2).standard_normal(MIXED.model_dim).astype(np.float32)

    @jax.grad
    def gradient(embed, t):
        return transformer.apply(params | {"embed": embed}, MIXED, tokens_1T, **layout(1))[0][0, t] @ direction_D

    @jax.jit
    def gradients(embed):
        return jax.lax.map(lambda t: gradient(embed, t), jnp.arange(16))

    depends_TS = np.asarray(gradients(params["embed"]))[:, tokens_1T[0]].any(axis=-1)
    for t in range(14):
        for s in range(16):
            assert depends_TS[t, s] == any(s <= t and {s, t} <= set(columns) for columns in SEQUENCES), (t, s)
    assert not depends_TS[14:, :14].any()


# ---- initial values --------------------------------------------------------------------------------------------------

# A dense layer and an MoE layer with an output head; and the same model without the MoE layer and the head. Two programs to compile.
LARGE = dataclasses.replace(MIXED, tie_embeddings=False)
SMALL = dataclasses.replace(MIXED, num_layers=1)
FAN_IN = {"embed": 32, "lm_head": 32, "q": 32, "k": 32, "v": 32, "o": 64, "mlp.gate": 32, "mlp.up": 32, "mlp.down": 40}
FAN_IN |= {"moe.router": 32, "moe.gate": 32, "moe.up": 32, "moe.down": 24}


def fan_in(path):
    names = [key.key for key in path]
    return FAN_IN.get(".".join(names[-2:])) or FAN_IN[names[-1]]


@functools.cache
def initial(config):
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(3), config)
    return {path: np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}, params


def test_initial_weights_keep_a_unit_variance():
    """Variance 1 / fan-in, mean 0, cut at two standard deviations of the normal; norm scales are 1."""
    for path, x in initial(LARGE)[0].items():
        if x.ndim == 1:
            assert (x == 1).all(), path
            continue
        scaled = x.ravel() * math.sqrt(fan_in(path))
        error = 5 / math.sqrt(scaled.size)  # five standard errors of the mean; those of the variance are smaller
        assert abs(scaled.mean()) < error and abs(scaled.var() - 1) < error, path
        assert np.abs(scaled).max() < 2 / 0.8796 + 1e-3, path  # 0.8796: deviation of a unit normal cut at +-2


def test_initial_logits_have_unit_variance():
    _, logits_BTV = run(initial(LARGE)[1], LARGE, draw_tokens((3, 16)))
    # 48 output rows and 48 hidden states, each of 32 dims: the mean square is within 1/sqrt(48 / 2) = 0.2 or so of 1.
    assert 0.7 < np.asarray(logits_BTV).var() < 1.4


def test_adding_a_layer_changes_no_other_parameter():
    small, large = initial(SMALL)[0], initial(LARGE)[0]
    assert len(large) == len(small) + 12 + 1  # an MoE layer is 12 parameters, the head is one
    for path, x in small.items():
        np.testing.assert_array_equal(x, large[path], err_msg=str(path))


WINDOWS = dataclasses.replace(DENSE, num_layers=5, window=8, layer_pattern="SSF")


@pytest.mark.parametrize("config", cases.slow_but([DENSE, MIXED, WINDOWS], WINDOWS))
def test_layers_are_stacked_and_taken_apart(config):
    """The random parameters of a layer are the same in a stack, so the two ways to store them have equal values."""
    models = [dataclasses.replace(config, scan_layers=is_scanned) for is_scanned in (False, True)]
    params = [transformer.init(jax.random.key(7), model) for model in models]
    for old, new in ((0, 1), (1, 0), (1, 1)):
        found = transformer.restacked(params[old], models[old], models[new])
        jax.tree.map(np.testing.assert_array_equal, found, params[new])
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), transformer.abstract(models[1]))
    assert shapes == jax.tree.map(lambda x: (x.shape, str(x.dtype)), params[1])


def test_no_two_parameters_share_their_draw():
    heads = [x.ravel()[:8].tobytes() for x in initial(LARGE)[0].values() if x.ndim > 1]
    assert len(set(heads)) == len(heads) == 2 + 7 + 8
    # A 31-bit hash of the path that collides in a long model would not show above.
    deep = transformer.specs(dataclasses.replace(LARGE, num_layers=92))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(deep, is_leaf=rules.is_spec)]
    assert len({transformer._path_hash([key.key for key in path]) for path in paths}) == len(paths) > 1000


AXES = [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"fsdp": 4, "context": 2}]


@pytest.mark.parametrize("axes", cases.slow_but(AXES, AXES[2]))
def test_rows_of_the_embedding_are_exchanged_instead_of_the_table(axes):
    """Values and gradients are those of one device. A table of fewer entries than a device has tokens is gathered."""
    for vocab_size in (4096, 8):
        config, mesh = tiny.model(vocab_size=vocab_size), mesh_lib.create(axes)
        layout = rules.shardings(transformer.specs(config), mesh)["embed"]
        table = jax.random.normal(jax.random.key(0), (vocab_size, config.model_dim), jnp.float32)
        tokens_BT = draw_tokens((8, 32)) % vocab_size

        def cubes(table, tokens_BT, config=config):
            return (transformer.embed({"embed": table}, config, tokens_BT, tokens_BT)[0] ** 3).sum()

        gradient = jax.value_and_grad(cubes)
        with jax.set_mesh(mesh):
            args = jax.device_put(table, layout), jax.device_put(tokens_BT, rules.batch_sharding(mesh, 2))
            compiled = jax.jit(gradient, out_shardings=(None, layout)).lower(*args).compile()
            value, got = compiled(*args)
        expected, want = gradient(table, tokens_BT)
        assert float(value) == pytest.approx(float(expected), rel=1e-5)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        found = {c.kind: c.num_bytes for c in hlo.collectives(hlo.parse(compiled.as_text()))}
        assert ("all-to-all" in found) == (vocab_size == 4096)
        assert vocab_size == 8 or found["all-gather"] <= tokens_BT.size * 4  # of tokens alone
