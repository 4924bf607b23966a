"""The engine against the learner's own forward pass, and under a stock JetStream Driver.

A completion is a pure function of weights, prompt, sampling parameters and seed. Equalities with `apply`, a program of other
shapes, have a float32 tolerance.
"""

import asyncio
import dataclasses
import functools
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import engine as engine_lib
from inference.engine import jetstream_engine, kv_cache, sampler
from inference.engine import request as request_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from tests.support import cases, engines, stacking, tiny

MODEL = tiny.model(num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1)
CAPACITY = 96
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=CAPACITY, prefill_batch=2, steps_per_call=5)
TOKENIZER = tokenizer_lib.byte_chatml()
Ask = functools.partial(request_lib.GenerateRequest, max_tokens=12)
pytestmark = pytest.mark.usefixtures("several_blocks")


@functools.cache
def params():
    return jax.tree.map(jnp.asarray, tiny.params(MODEL, 3))


@functools.cache
def alone(ask):
    """Returns the completion of a request that has an engine for itself."""
    ((sample,),) = engines.complete(engine_lib.Engine(MODEL, CONFIG, TOKENIZER), params(), [ask])
    return sample.tokens, sample.logprobs


HELLO = Ask(tuple(b"hello"), seed=11)
OTHER = Ask(tuple(b"the quick brown"), seed=2**32 - 1, temperature=0.7)
COLD = Ask(tuple(b"x"), seed=5, temperature=0.0)
SIEVED = Ask(tuple(b"top of the"), seed=77, temperature=1.3, top_k=20, top_p=0.8, min_p=0.01)


@jax.jit
def teacher(tokens_1T):
    return transformer.logits(params(), MODEL, transformer.apply(params(), MODEL, tokens_1T)[0])[0]


def teacher_forced(prompt, tokens):
    """Row j: the float64 logits that predict token j of the completion."""
    sequence = np.zeros((1, CAPACITY), np.int32)
    sequence[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    rows = slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    return np.asarray(teacher(sequence), np.float64)[rows]


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("ask", "most"),
    [(HELLO, 40), (OTHER, 40), (COLD, 40), (HELLO, 10**6)],
    ids=["T=1", "T=0.7", "greedy", "to the end"],
)
def test_logprobs_are_those_of_teacher_forcing(ask, most):
    """Up to the last column of the cache, where a sequence without a limit ends."""
    ask = dataclasses.replace(ask, max_tokens=most)
    tokens, logprobs = alone(ask)
    num = min(most, CAPACITY - len(ask.tokens))
    assert len(tokens) == len(logprobs) == num and len(set(tokens)) > 3
    logits_JV = teacher_forced(ask.tokens, tokens)
    expected = log_softmax(logits_JV / (ask.temperature or 1.0))[np.arange(num), tokens]
    # float32 on both sides, sums over 96 masked keys against sums over the keys there are: measured 2.4e-6.
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
    # Token j is at position len(prompt) + j: the argmax with the noise of exactly that position.
    positions = np.arange(len(ask.tokens), len(ask.tokens) + num)
    noise_JV = np.asarray(sampler.noise(np.full(num, ask.seed, np.uint32), positions, MODEL.vocab_size))
    noised_JV = logits_JV / ask.temperature + noise_JV if ask.temperature else logits_JV
    np.testing.assert_array_equal(tokens, noised_JV.argmax(axis=-1))


def test_filtered_logprobs_are_normalized_over_kept_tokens():
    tokens, logprobs = alone(SIEVED)
    logits_JV = teacher_forced(SIEVED.tokens, tokens)
    for token, logprob, logits in zip(tokens, logprobs, logits_JV, strict=True):
        p = np.exp(log_softmax(logits / 1.3))
        order = np.argsort(-p)[:20]
        p = p[order] / p[order].sum()
        kept = order[(np.cumsum(p) - p < 0.8) & (p >= 0.01 * p[0])]
        assert token in kept and len(kept) < 20
        assert logprob == pytest.approx(log_softmax(logits[kept] / 1.3)[kept.tolist().index(token)], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_slots": 0}, "inference.num_slots = 0 must be at least 1"),
        ({"prefill_batch": -1}, "inference.prefill_batch = -1 must be at least 1"),
        ({"steps_per_call": 33}, "inference.steps_per_call = 33 must be at most 32"),
    ],
)
def test_sizes_are_checked(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **change)
    assert [CONFIG.bucket(n) for n in (1, 16, 17, 30, 65)] == [16, 16, 32, 32, 96]


@pytest.mark.parametrize("scan_layers", cases.slow_but([False, True], True))
def test_a_chunk_reads_no_more_keys_than_its_program_has(scan_layers):
    """Keys that are not written yet are NaN, which a masked product would pass on; the counts double, up to the capacity."""
    model = tiny.model(scan_layers=scan_layers)
    engine = engine_lib.Engine(model, dataclasses.replace(CONFIG, prefill_chunk=16), TOKENIZER)
    assert engine.config.key_counts == (16, 32, 64, 96)
    weights = stacking.stack(tiny.params(tiny.model(), 0), model) if scan_layers else tiny.params(model, 0)
    tokens_1T = np.arange(48, dtype=np.int32)[None]
    caches = engine.empty_prefix(), jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine.empty_prefix())
    for start, end in ((0, 16), (16, 32)):
        caches = [engine.prefill_chunk(weights, tokens_1T[:, start:end], start, cache)[0] for cache in caches]
    clean, poisoned = (jax.tree.leaves(jax.tree.map(lambda x: x[..., :32, :], cache)) for cache in caches)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)
    third = engine.prefill_chunk(weights, tokens_1T[:, 32:], 32, caches[1])[0]
    assert [cache[0][0].shape[-2] for cache in (*caches, third)] == [32, 32, 64]


def test_copy_rows_skips_rows_out_of_range():
    source = np.tile(np.arange(1, 3).reshape(2, 1, 1, 1), (1, 2, 4, 3))  # rows of ones and of twos, [B, K, S, C]
    target = jnp.zeros((3, 2, 6, 3), jnp.int32)
    rows, slots = np.array([1, 0, 0]), np.array([2, 0, 3])
    (keys, _) = jax.jit(kv_cache.copy_rows)((source, source), rows, (target, target), slots)
    np.testing.assert_array_equal(keys[:, 0, :, 0], [[1, 1, 1, 1, 0, 0], [0] * 6, [2, 2, 2, 2, 0, 0]])


@pytest.fixture
def orchestrator(monkeypatch):
    """JetStream's orchestrator, whose threads report an error here instead of killing this process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    from jetstream.core import orchestrator  # sets the root logger to DEBUG, with a handler on stdout

    root.setLevel(level)
    root.handlers[:] = handlers
    errors = []

    def kill(pid, signal):
        errors.append(sys.exc_info()[1])

    monkeypatch.setattr(orchestrator, "os", types.SimpleNamespace(kill=kill, getpid=lambda: 0))
    yield orchestrator
    assert not errors, errors


def drive(orchestrator, engine, prompts, max_tokens):
    """Token ids per prompt, all in flight together, from a stock Driver in interleaved mode."""
    driver = orchestrator.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[engine.load_params()],
        generate_params=[engine.load_params()],
        interleaved_mode=True,
        jax_padding=False,
    )

    async def collect():
        channels = []
        for prompt in prompts:
            channel = orchestrator.async_multifuture.AsyncMultifuture()
            driver.place_request_on_prefill_queue(
                orchestrator.ActiveRequest(
                    max_tokens=max_tokens,
                    prefill_content=prompt,
                    history_path="",
                    is_client_side_tokenization=True,
                    return_channel=channel,
                )
            )
            channels.append(channel)

        async def drain(channel):
            return [token async for (sample,) in channel for token in sample.token_ids]

        return await asyncio.wait_for(asyncio.gather(*map(drain, channels)), timeout=60)

    loop = asyncio.new_event_loop()  # closed after the Driver has stopped, because its threads use it until then
    try:
        return loop.run_until_complete(collect())
    finally:
        driver.stop()
        loop.close()


@pytest.mark.parametrize("num_slots", [4, 8])  # one sub-batch, and two of four slots
def test_a_stock_jetstream_driver_runs_the_engine(orchestrator, num_slots):
    """The same tokens as from the scheduler. The Driver's own defaults: temperature 1, seed 0; the stop id is not handed out.

    Six prompts, over four slots at first, so that slots are used again. Text, because the Driver puts a BOS before a list of ids.
    """
    prompts = ["hello", "a", "the quick brown", "x = 1", "fifth", "sixth"]
    sizes = dataclasses.replace(CONFIG, num_slots=num_slots)
    made = jetstream_engine.JetStreamEngine(engine_lib.Engine(MODEL, sizes, TOKENIZER), params())
    got = drive(orchestrator, made, prompts, max_tokens=10)
    for prompt, tokens in zip(prompts, got, strict=True):
        ask = Ask(tuple(TOKENIZER.encode(prompt)), seed=0, max_tokens=10)
        expected, _ = alone(ask)
        cut = next((i for i, token in enumerate(expected) if token in TOKENIZER.stop_ids), len(expected))
        assert tokens == expected[:cut], prompt
    assert any(len(tokens) == 10 for tokens in got)
