"""The decoder against a float64 one in numpy, loops over tokens, heads and experts; and what must hold by construction.

Norm scales are redrawn around 1, so that a scale which is ignored or put in the wrong place is seen.
Letters: B sequences, T tokens, D model, H query heads, K key heads, C head dim, F ffn, E experts, X experts per token,
V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import kv_cache
from models import transformer
from sharding import rules
from tests.support import tiny

DENSE = tiny.model(vocab_size=48, head_dim=16, ffn_dim=40)
UNTIED = dataclasses.replace(DENSE, qk_norm=False, tie_embeddings=False, num_kv_heads=1, norm_eps=1e-2, remat="block")
MIXED = dataclasses.replace(DENSE, num_experts=4, experts_per_token=2, expert_ffn_dim=24, first_dense_layers=1)

# float32 against float64: measured 3e-6 on hidden states and logits of size 4. The smallest deliberate error tried, an
# epsilon of 1e-4 for 1e-6, moves them by 5e-3; a rope theta of 3000 for 1000 by 0.7.
ATOL = 5e-5


@functools.cache
def params_of(config):
    """Unit-gain matrices drawn by numpy (compiling `init` takes a second per layer); norm scales in 0.5 .. 1.5."""
    rng = np.random.default_rng(7)

    def draw(path, spec):
        if len(spec.shape) == 1:
            return rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        return (rng.standard_normal(spec.shape) / math.sqrt(fan_in(path))).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, transformer.specs(config), is_leaf=rules.is_spec)


FAN_IN = {"embed": 32, "lm_head": 32, "q": 32, "k": 32, "v": 32, "o": 64, "mlp.gate": 32, "mlp.up": 32, "mlp.down": 40}
FAN_IN |= {"moe.router": 32, "moe.gate": 32, "moe.up": 32, "moe.down": 24}


def fan_in(path):
    names = [key.key for key in path]
    return FAN_IN.get(".".join(names[-2:])) or FAN_IN[names[-1]]


pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.partial(jax.jit, static_argnums=1)
def run(params, config, tokens_BT, layout=None):
    hidden_BTD, _ = transformer.apply(params, config, tokens_BT, **(layout or {}))
    return hidden_BTD, transformer.logits(params, config, hidden_BTD)


def draw_tokens(shape, seed=0):
    return np.random.default_rng(seed).integers(0, DENSE.vocab_size, shape).astype(np.int32)


# ---- the oracle: one sequence, float64, from the published equations -------------------------------------------------


def oracle_norm(x, weight, eps):
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * weight


def oracle_rotate(x, position, theta):
    C, out = len(x), np.empty(len(x))
    for i in range(C // 2):
        angle = position * theta ** (-2 * i / C)
        a, b = x[i], x[i + C // 2]  # half-split pairing
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + C // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def oracle_swiglu(x, gate, up, down):
    g = x @ gate
    return (g / (1 + np.exp(-g)) * (x @ up)) @ down


def oracle_moe(x, moe_params, config):
    """One token: softmax over all experts, the X best, renormalised if norm_topk, experts one after the other."""
    scores = x @ moe_params["router"]
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    best = sorted(range(len(probs)), key=lambda e: -probs[e])[: config.experts_per_token]
    total = sum(probs[e] for e in best) if config.norm_topk else 1.0
    out = np.zeros_like(x)
    for e in best:
        out += probs[e] / total * oracle_swiglu(x, moe_params["gate"][e], moe_params["up"][e], moe_params["down"][e])
    return out


def oracle(params, config, tokens):
    """Returns (hidden [T, D] after the final norm, logits [T, V])."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    eps, C, G = config.norm_eps, config.head_dim, config.num_heads // config.num_kv_heads
    xs = [params["embed"][token] for token in tokens]
    for index in range(config.num_layers):
        layer = params["layers"][f"{index:03d}"]
        attn = layer["attn"]
        hs = [oracle_norm(x, layer["attn_norm"], eps) for x in xs]

        def head(t, name, h, layer_hs=hs, attn=attn):
            x = layer_hs[t] @ attn[name][:, h]
            if config.qk_norm and name != "v":
                x = oracle_norm(x, attn[f"{name}_norm"], eps)
            return x if name == "v" else oracle_rotate(x, t, config.rope_theta)

        keys = [[head(t, "k", k) for k in range(config.num_kv_heads)] for t in range(len(tokens))]
        values = [[head(t, "v", k) for k in range(config.num_kv_heads)] for t in range(len(tokens))]
        for t in range(len(tokens)):
            out = np.zeros(config.model_dim)
            for h in range(config.num_heads):
                q = head(t, "q", h)
                scores = np.array([q @ keys[s][h // G] / math.sqrt(C) for s in range(t + 1)])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out += sum(w * values[s][h // G] for s, w in enumerate(weights)) @ attn["o"][h]
            xs[t] = xs[t] + out
        for t, x in enumerate(xs):
            h = oracle_norm(x, layer["mlp_norm"], eps)
            if config.is_moe(index):
                xs[t] = x + oracle_moe(h, layer["moe"], config)
            else:
                xs[t] = x + oracle_swiglu(h, *(layer["mlp"][name] for name in ("gate", "up", "down")))
    hidden = np.stack([oracle_norm(x, params["final_norm"], eps) for x in xs])
    return hidden, hidden @ (params["embed"].T if config.tie_embeddings else params["lm_head"])


@pytest.mark.parametrize("config", [DENSE, UNTIED, MIXED], ids=["dense_tied_qknorm", "untied_mqa_remat", "moe"])
def test_apply_and_logits_equal_the_oracle(config):
    tokens_BT = draw_tokens((3, 16))
    hidden_BTD, logits_BTV = run(params_of(config), config, tokens_BT)
    assert hidden_BTD.dtype == logits_BTV.dtype == jnp.float32
    for b in range(3):
        hidden_TD, logits_TV = oracle(params_of(config), config, tokens_BT[b])
        np.testing.assert_allclose(hidden_BTD[b], hidden_TD, atol=ATOL)
        np.testing.assert_allclose(logits_BTV[b], logits_TV, atol=ATOL)


def test_bfloat16_activations_give_float32_logits_near_the_oracle():
    config = dataclasses.replace(DENSE, dtype="bfloat16")
    tokens_BT = draw_tokens((3, 16))
    hidden_BTD, logits_BTV = run(params_of(DENSE), config, tokens_BT)
    assert hidden_BTD.dtype == jnp.bfloat16 and logits_BTV.dtype == jnp.float32
    _, logits_TV = oracle(params_of(DENSE), config, tokens_BT[0])
    # bfloat16 keeps 8 bits: 2^-8 per rounding, some 40 roundings on the way to logits of size 4; measured 0.08.
    np.testing.assert_allclose(logits_BTV[0], logits_TV, atol=0.2)
    assert np.abs(logits_BTV[0] - logits_TV).max() > 1e-3  # it did run in bfloat16


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


# ---- the cache -------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=1)
def extend(params, config, tokens_BT, start_B, cache):
    positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
    return transformer.extend(params, config, tokens_BT, positions_BT, cache, kv_cache.attend_at(start_B))[:2]


def test_a_prompt_in_two_pieces_equals_apply():
    params, tokens_BT = params_of(MIXED), draw_tokens((2, 16))
    whole, _ = run(params, MIXED, tokens_BT)
    dirty = jax.tree.map(
        lambda x: x + 3, kv_cache.create(MIXED, 2, 20)
    )  # columns that were never written weigh nothing
    _, cache = extend(params, MIXED, tokens_BT[:, :8], np.zeros(2, np.int32), dirty)
    hidden, _ = extend(params, MIXED, tokens_BT[:, 8:], np.full(2, 8, np.int32), cache)
    np.testing.assert_allclose(hidden, whole[:, 8:], atol=1e-5)  # order of float32 sums


# ---- initial values --------------------------------------------------------------------------------------------------

# A dense layer and an MoE layer with an output head; and the same model without the MoE layer and the head. Two programs to compile.
LARGE = dataclasses.replace(MIXED, tie_embeddings=False)
SMALL = dataclasses.replace(MIXED, num_layers=1)


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


def test_no_two_parameters_share_their_draw():
    heads = [x.ravel()[:8].tobytes() for x in initial(LARGE)[0].values() if x.ndim > 1]
    assert len(set(heads)) == len(heads) == 2 + 7 + 8
    # A 31-bit hash of the path that collides in a long model would not show above.
    deep = transformer.specs(dataclasses.replace(LARGE, num_layers=92))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(deep, is_leaf=rules.is_spec)]
    assert len({transformer._path_hash([key.key for key in path]) for path in paths}) == len(paths) > 1000
