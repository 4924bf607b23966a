"""Log-probabilities against the full softmax in float64, one token at a time; and what chunking must not cost or change."""

import functools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import logprobs, transformer
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import cases, tiny

pytestmark = pytest.mark.usefixtures("compile_fast")
TIED = tiny.model(model_dim=16)
UNTIED = tiny.model(model_dim=16, tie_embeddings=False)
B, T = 8, 8
RNG = np.random.default_rng(0)
HIDDEN_BTD = RNG.standard_normal((B, T, 16)).astype(np.float32)
TOKENS_BT = RNG.integers(0, 272, (B, T)).astype(np.int32)
TEMPERATURE_BT = RNG.choice([0.0, 0.6, 1.0, 1.7], (B, T)).astype(np.float32)
BEFORE_BT = np.tile(np.arange(T) - 1, (B, 1)).astype(np.int32)
BRANCHED_BT = np.where(RNG.random((B, T)) < 0.4, BEFORE_BT // 2, BEFORE_BT).astype(np.int32)  # some predict twice
# Two thirds of the tokens have a kept set, of 1 to 40 entries, their own among them.
KEPT_BTW = np.full((B, T, 40), -1, np.int32)
for place in np.argwhere(RNG.random((B, T)) < 2 / 3).tolist():
    others = RNG.permutation(272)[: RNG.choice([0, 3, 39])]
    own = np.unique([TOKENS_BT[tuple(place)], *others])
    KEPT_BTW[tuple(place)][: len(own)] = RNG.permutation(own)
D_LOGP_BT, D_ENTROPY_BT = RNG.standard_normal((2, B, T)).astype(np.float32)


def head_of(config, scale=1.0):
    """The parameters that are read: unit-variance logits times `scale`."""
    name = "embed" if config.tie_embeddings else "lm_head"
    shape = transformer.specs(config)[name].shape
    return {name: (np.random.default_rng(1).standard_normal(shape) * scale / 4).astype(np.float32)}


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def score(config, params, hidden_BTD, temperature_BT, predictors_BT, shape, options):
    """(logp, entropy) and the gradients of sum(D_LOGP logp + D_ENTROPY entropy); `options` in capitals are constants."""
    options = dict(options)
    constants = {name: options.pop(name) for name in list(options) if name.isupper()}
    with mock.patch.dict(vars(logprobs), constants):
        b, t = shape
        d_BT = jnp.asarray(D_LOGP_BT[:b, :t]), jnp.asarray(D_ENTROPY_BT[:b, :t])
        options |= {"predictors_BT": predictors_BT}
        options |= {"kept_BTW": KEPT_BTW} if options.pop("kept", False) else {}

        def token_logprobs(params, hidden_BTD):
            return logprobs.token_logprobs(params, config, hidden_BTD, TOKENS_BT[:b, :t], temperature_BT, **options)

        (logp_BT, entropy_BT), pull = jax.vjp(token_logprobs, params, hidden_BTD)
        return logp_BT, entropy_BT, *pull(d_BT)


def oracle(config, params, hidden_BTD, predictors_BT, *, entropy_gradient, kept=False):
    """The same in float64 from all logits of one token at a time; the softcap's derivative is 1 - tanh^2."""
    (kernel,) = params.values()
    kernel_DV = (kernel.T if config.tie_embeddings else kernel).astype(np.float64)
    logp_BT, entropy_BT = np.zeros((B, T)), np.zeros((B, T))
    d_hidden_BTD, d_kernel_DV = np.zeros(hidden_BTD.shape), np.zeros(kernel_DV.shape)
    for b in range(B):
        for t in range(1, T):
            source, token, temperature = predictors_BT[b, t], TOKENS_BT[b, t], float(TEMPERATURE_BT[b, t]) or 1.0
            hidden = hidden_BTD[b, source].astype(np.float64)
            raw, cap = hidden @ kernel_DV, config.final_softcap
            logits = (cap * np.tanh(raw / cap) if cap else raw) / temperature
            if kept and KEPT_BTW[b, t, 0] >= 0:
                logits = np.where(np.isin(np.arange(272), KEPT_BTW[b, t]), logits, -1e9)
            logp = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
            p = np.exp(logp)
            logp_BT[b, t], entropy_BT[b, t] = logp[token], -(p * logp).sum()
            d_logits = D_LOGP_BT[b, t] * (np.eye(len(p))[token] - p)
            if entropy_gradient:
                d_logits -= D_ENTROPY_BT[b, t] * p * (logp + entropy_BT[b, t])
            d_raw = d_logits / temperature * (1 - np.tanh(raw / cap) ** 2 if cap else 1)
            d_hidden_BTD[b, source] += kernel_DV @ d_raw
            d_kernel_DV += np.outer(hidden, d_raw)
    return logp_BT, entropy_BT, d_kernel_DV.T if config.tie_embeddings else d_kernel_DV, d_hidden_BTD


def check(got, config, params, predictors_BT, *, entropy_gradient=False, kept=False):
    """float32 sums of 16 products of size 1, over logits below 20 and gradients of 56 tokens: a few 1e-6."""
    logp_BT, entropy_BT, (d_kernel), d_hidden_BTD = got
    (d_kernel,) = d_kernel.values()
    expected = oracle(config, params, HIDDEN_BTD, predictors_BT, entropy_gradient=entropy_gradient, kept=kept)
    for value, correct in zip((logp_BT, entropy_BT, d_kernel, d_hidden_BTD), expected, strict=True):
        np.testing.assert_allclose(value, correct, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "predictors_BT", "options"),
    [
        (TIED, None, {}),
        (UNTIED, BRANCHED_BT, {"CHUNK_LOGITS": 24 * 272}),
        (UNTIED, None, {"CHUNK_LOGITS": 7 * 128, "VOCAB_CHUNK": 100, "entropy_gradient": True}),
        (TIED, BRANCHED_BT, {"CHUNK_LOGITS": 64 * 128, "VOCAB_CHUNK": 128, "entropy_gradient": True}),
        (tiny.model(model_dim=16, final_softcap=3.0), BRANCHED_BT, {"VOCAB_CHUNK": 100, "entropy_gradient": True}),
        (TIED, None, {"kept": True}),
        (
            tiny.model(model_dim=16, final_softcap=3.0),
            BRANCHED_BT,
            {"CHUNK_LOGITS": 7 * 128, "VOCAB_CHUNK": 100, "entropy_gradient": True, "kept": True},
        ),
    ],
    ids=["one_chunk", "token_chunks", "uneven_chunks", "vocabulary_chunks", "softcap", "kept", "kept_in_chunks"],
)
def test_values_and_gradients_equal_the_full_softmax(config, predictors_BT, options):
    """272 columns in chunks of 100 are 3 chunks of 128, of which the last begins early."""
    params = head_of(config)
    got = score(config, params, HIDDEN_BTD, TEMPERATURE_BT, predictors_BT, (B, T), tuple(options.items()))
    assert (np.asarray(got[0])[:, 0] == 0).all() and (np.asarray(got[1])[:, 0] == 0).all()
    expected = BEFORE_BT if predictors_BT is None else predictors_BT
    own = {name: options.get(name, False) for name in ("entropy_gradient", "kept")}
    check(got, config, params, expected, **own)


SPLIT = {"fsdp": 2, "context": 2, "tensor": 2}, UNTIED
MESHES = [
    ({"fsdp": 8}, UNTIED),
    SPLIT,
    ({"data": 2, "expert": 2, "tensor": 2}, TIED),
    ({"context": 4, "tensor": 2}, TIED),
]


@pytest.mark.parametrize(
    ("axes", "config"),
    cases.slow_but(MESHES, SPLIT),
    ids=["fsdp8", "fsdp2_context2_tensor2", "data2_expert2_tensor2", "context4_tensor2"],
)
def test_a_mesh_changes_nothing(axes, config):
    """Predictors lie in other devices' columns, targets in other devices' vocabulary."""
    mesh = mesh_lib.create(axes)
    params = head_of(config)
    specs = {name: transformer.specs(config)[name] for name in params}
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, rules.shardings(specs, mesh))
        layout = jax.NamedSharding(mesh, jax.P(("data", "fsdp", "expert"), "context", None))
        hidden_BTD = jax.device_put(HIDDEN_BTD, layout)
        options = (("CHUNK_LOGITS", 5 * 128), ("VOCAB_CHUNK", 20), ("entropy_gradient", True), ("kept", True))
        got = score(config, placed, hidden_BTD, TEMPERATURE_BT, BRANCHED_BT, (B, T), options)
    assert got[2].keys() == placed.keys()
    for name, d_kernel in got[2].items():
        assert d_kernel.sharding.is_equivalent_to(placed[name].sharding, 2)
    check(jax.device_get(got), config, params, BRANCHED_BT, entropy_gradient=True, kept=True)


def test_bfloat16_accumulates_in_float32():
    """Products of bfloat16 summed in float32: the values are those of the rounded inputs to float32 accuracy."""
    params = head_of(UNTIED)
    rounded = {name: np.asarray(jnp.bfloat16(x), np.float32) for name, x in params.items()}
    hidden_BTD = jnp.bfloat16(HIDDEN_BTD)
    options = (("CHUNK_LOGITS", 9 * 128), ("VOCAB_CHUNK", 128))
    got = score(UNTIED, params, hidden_BTD, TEMPERATURE_BT, None, (B, T), options)
    expected = oracle(UNTIED, rounded, np.asarray(hidden_BTD, np.float32), BEFORE_BT, entropy_gradient=False)
    assert got[2]["lm_head"].dtype == jnp.float32 and got[3].dtype == jnp.bfloat16
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], atol=1e-5)
    # The gradient of each logit is rounded to bfloat16 (2^-9 relative) before it is multiplied; d_hidden once more.
    np.testing.assert_allclose(got[2]["lm_head"], expected[2], rtol=2**-7, atol=2**-8)
    np.testing.assert_allclose(np.asarray(got[3], np.float32), expected[3], rtol=2**-7, atol=2**-8)


def test_peaked_logits_stay_finite_and_below_zero():
    """Logits of +-300: a sum about 0 would overflow, and a certain token must not get log p > 0."""
    params = head_of(TIED, scale=100.0)
    logp_BT, entropy_BT, d_params, d_hidden_BTD = score(
        TIED, params, HIDDEN_BTD, TEMPERATURE_BT, None, (B, T), (("VOCAB_CHUNK", 100), ("entropy_gradient", True))
    )
    assert (np.asarray(logp_BT) <= 0).all() and (np.asarray(entropy_BT) >= -1e-6).all()  # rounding of log(1 + tail)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((logp_BT, entropy_BT, d_params, d_hidden_BTD)))


def test_one_column_has_nothing_to_score():
    got = score(TIED, head_of(TIED), HIDDEN_BTD[:2, :1], TEMPERATURE_BT[:2, :1], None, (2, 1), ())
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(got))


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    """512 tokens x 16384 columns are 32 MiB; in chunks of 64 x 1024, no array is near that, forward or backward."""
    config = tiny.model(model_dim=8, vocab_size=16384)
    tokens_BT = jnp.zeros((1, 512), jnp.int32)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 64 * 1024)
    monkeypatch.setattr(logprobs, "VOCAB_CHUNK", 1024)

    def loss(params, hidden_BTD):
        logp_BT, entropy_BT = logprobs.token_logprobs(
            params, config, hidden_BTD, tokens_BT, jnp.ones((1, 512)), entropy_gradient=True
        )
        return logp_BT.sum() + entropy_BT.sum()

    params = {"embed": jax.ShapeDtypeStruct((16384, 8), jnp.float32)}
    hidden_BTD = jax.ShapeDtypeStruct((1, 512, 8), jnp.float32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden_BTD).compile()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())]
    assert max(sizes) == 16384 * 8  # the head and its gradient
    # 0.5 MiB of the head's gradient, and a few arrays of one chunk (0.25 MiB).
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 2**20
