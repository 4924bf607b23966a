"""The engine against the learner's own forward pass, against itself among other requests, and under a stock JetStream Driver.

A completion is a pure function of weights, prompt, sampling parameters and seed. Equalities between two ways of
driving the engine are bitwise; those with `apply`, a program of other shapes, have a float32 tolerance.
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

from inference.engine import decode_state, jetstream_shim, kv_cache, sampler  # noqa: F401  (the shim is before jetstream)
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.proofs import toploc
from models import transformer
from models.text import tokenizer as tokenizer_lib
from tests.support import proofs as proofs_lib
from tests.support import tiny

MODEL = tiny.model(num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1)
CAPACITY = 96  # more than 64 + 16: the ring of hidden states goes round
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=CAPACITY, prefill_batch=2, steps_per_call=5)
TOKENIZER = tokenizer_lib.byte_chatml()
NO_SLOT = CONFIG.num_slots
Ask = functools.partial(request_lib.GenerateRequest, max_tokens=12)
pytestmark = pytest.mark.usefixtures("several_blocks")


@functools.cache
def params():
    return jax.tree.map(jnp.asarray, tiny.params(MODEL, 3))


@functools.cache
def engine():
    return engine_lib.Engine(MODEL, CONFIG, TOKENIZER, params())


class Bench:
    """Drives the engine by hand: prefill one or two prompts, put rows into slots, generate, collect."""

    def __init__(self):
        self.engine = engine()
        self.state = self.engine.init_decode_state()
        self.tokens = {slot: [] for slot in range(CONFIG.num_slots)}
        self.logprobs = {slot: [] for slot in range(CONFIG.num_slots)}

    def prefill(self, *asks):
        T = self.engine.config.bucket(max(len(ask.tokens) for ask in asks))
        tokens_PT, length_P = np.zeros((2, T), np.int32), np.ones((2,), np.int32)
        for row, ask in enumerate(asks):
            length_P[row] = len(ask.tokens)
            tokens_PT[row, : length_P[row]] = ask.tokens
        return self.engine.prefill_batch(params(), tokens_PT, length_P), asks

    def insert(self, prefix, *starts):
        """Starts rows of a prefill; each start is (row, slot, seed)."""
        prefix, asks = prefix
        rows, slots = np.zeros((4,), np.int32), np.full((4,), NO_SLOT, np.int32)
        for i, (row, slot, _) in enumerate(starts):
            rows[i], slots[i] = row, slot
            self.tokens[slot], self.logprobs[slot] = [], []
        requests = [dataclasses.replace(asks[row], seed=seed) for row, _, seed in starts]
        arrays = decode_state.request_arrays(requests, 4)
        self.state = self.engine.insert_batch(prefix, rows, self.state, slots, arrays)

    def generate(self, calls=1):
        for _ in range(calls):
            self.state, result = self.engine.generate(params(), self.state)
            tokens, logprobs, counts = self.engine.read(result)
            assert tokens.shape == logprobs.shape == (CONFIG.num_slots, self.engine.config.steps_per_call)
            for slot, count in enumerate(counts.tolist()):
                self.tokens[slot] += tokens[slot, :count].tolist()
                self.logprobs[slot] += logprobs[slot, :count].tolist()

    def run(self):
        while self.state[0].active.any():
            self.generate()

    def result(self, slot):
        return self.tokens[slot], self.logprobs[slot]


@functools.cache
def alone(ask):
    """Returns the completion of a request in an engine of its own."""
    bench = Bench()
    bench.insert(bench.prefill(ask), (0, 0, ask.seed))
    bench.run()
    return bench.result(0)


HELLO = Ask(tuple(b"hello"), seed=11)
OTHER = Ask(tuple(b"the quick brown"), seed=2**32 - 1, temperature=0.7)
COLD = Ask(tuple(b"x"), seed=5, temperature=0.0)
SIEVED = Ask(tuple(b"top of the"), seed=77, temperature=1.3, top_k=20, top_p=0.8, min_p=0.01)


@jax.jit
def teacher(tokens_1T):
    hidden_1TD, _ = transformer.apply(params(), MODEL, tokens_1T)
    return hidden_1TD[0], transformer.logits(params(), MODEL, hidden_1TD)[0]


def teacher_forced(prompt, tokens):
    """Row j: the hidden state and the float64 logits that predict token j of the completion."""
    sequence = np.zeros((1, CAPACITY), np.int32)
    sequence[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    hidden_TD, logits_TV = teacher(sequence)
    rows = slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    return np.asarray(hidden_TD)[rows], np.asarray(logits_TV, np.float64)[rows]


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
    _, logits_JV = teacher_forced(ask.tokens, tokens)
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
    _, logits_JV = teacher_forced(SIEVED.tokens, tokens)
    for token, logprob, logits in zip(tokens, logprobs, logits_JV, strict=True):
        p = np.exp(log_softmax(logits / 1.3))
        order = np.argsort(-p)[:20]
        p = p[order] / p[order].sum()
        kept = order[(np.cumsum(p) - p < 0.8) & (p >= 0.01 * p[0])]
        assert token in kept and len(kept) < 20
        assert logprob == pytest.approx(log_softmax(logits[kept] / 1.3)[kept.tolist().index(token)], abs=1e-5)


def test_the_ring_holds_the_hidden_states_that_predicted_the_last_tokens():
    """A window while it is fresh, and the last 64 rows once the ring has gone round."""
    ask = dataclasses.replace(HELLO, max_tokens=1000)
    bench = Bench()
    bench.insert(bench.prefill(OTHER, ask), (1, 2, ask.seed))
    rings = {}
    for _ in range(7):
        bench.generate()
    rings[35] = np.asarray(bench.state[0].ring).view(jnp.bfloat16)
    bench.run()
    tokens, _ = bench.result(2)
    assert len(tokens) == CAPACITY - len(ask.tokens)
    rings[len(tokens)] = np.asarray(bench.state[0].ring).view(jnp.bfloat16)
    hidden_JD, _ = teacher_forced(ask.tokens, tokens)
    for count, ring in rings.items():
        assert ring.shape == (4, 2, 32, MODEL.model_dim)
        for j in range(max(0, count - 64), count):
            got = ring[2].reshape(64, -1)[j % 64].astype(np.float64)
            # Half a unit of bfloat16 (2^-8 of the value) for the rounding, and the float32 difference before it.
            assert (np.abs(got - hidden_JD[j]) <= 2**-8 * np.abs(hidden_JD[j]) + 2e-5).all(), (count, j)
    assert not rings[len(tokens)][0].astype(np.float32).any()  # slot 0 was never used


def test_proofs_are_of_windows_that_were_asked_for():
    """Two samples of which one wants proofs: indices and values of its windows in the calls that complete them."""
    bench = Bench()
    ask = dataclasses.replace(HELLO, max_tokens=38, proofs=True)
    bench.insert(bench.prefill(ask, dataclasses.replace(ask, proofs=False)), (0, 1, ask.seed), (1, 3, ask.seed))
    found = {}
    while bench.state[0].active.any():
        before = len(bench.tokens[1])
        bench.state, result = bench.engine.generate(params(), bench.state)
        tokens, _, counts = bench.engine.read(result)
        bench.tokens[1] += tokens[1, : counts[1]].tolist()
        indices, bits = bench.engine.read_proofs(result)
        for which in range(2):
            for slot in range(CONFIG.num_slots):
                if indices[slot, which].any():
                    found[which, slot] = before, toploc.encode([(indices[slot, which], bits[slot, which])])[0]
    assert {key: before for key, (before, _) in found.items()} == {(0, 1): 30, (1, 1): 35}
    hidden_JD, _ = teacher_forced(ask.tokens, bench.tokens[1])
    results = proofs_lib.verify(hidden_JD, [found[0, 1][1], found[1, 1][1]])
    assert [result.reason for result in results] == ["ok", "ok"]
    # Both are float32, rounded to bfloat16: a value at a rounding boundary moves by one unit, and few are.
    assert max(result.exp_mismatches for result in results) <= 2


def test_a_longer_bucket_changes_no_token():
    """Another program prefills: log-probabilities agree to float32, tokens are drawn by the same noise."""
    long = dataclasses.replace(OTHER, tokens=OTHER.tokens * 2)  # 30 tokens
    assert [engine().config.bucket(n) for n in (1, 16, 17, 30, 65)] == [16, 16, 32, 32, 96]
    bench = Bench()
    bench.insert(bench.prefill(dataclasses.replace(HELLO, max_tokens=8), long), (0, 0, HELLO.seed), (1, 1, long.seed))
    bench.run()
    tokens, logprobs = alone(dataclasses.replace(HELLO, max_tokens=8))
    assert bench.tokens[0] == tokens
    np.testing.assert_allclose(bench.logprobs[0], logprobs, rtol=0, atol=1e-5)
    _, logits_JV = teacher_forced(long.tokens, bench.tokens[1])
    expected = log_softmax(logits_JV / long.temperature)[np.arange(len(logits_JV)), bench.tokens[1]]
    np.testing.assert_allclose(bench.logprobs[1], expected, rtol=0, atol=1e-5)


def test_new_weights_take_effect_at_the_next_call():
    """The sequence goes on with its keys. Twice the final norm: the same keys, logits times two, the same argmax."""
    bench, ask = Bench(), dataclasses.replace(COLD, max_tokens=10)
    bench.insert(bench.prefill(ask), (0, 0, 0))
    bench.generate()
    bench.state, result = bench.engine.generate(params() | {"final_norm": 2 * params()["final_norm"]}, bench.state)
    tokens, logprobs, _ = bench.engine.read(result)
    expected_tokens, expected_logprobs = alone(ask)
    assert bench.tokens[0] + tokens[0].tolist() == expected_tokens
    assert bench.logprobs[0] == expected_logprobs[:5]
    _, logits_JV = teacher_forced(ask.tokens, expected_tokens)
    doubled = log_softmax(2 * logits_JV)[np.arange(5, 10), expected_tokens[5:]]
    np.testing.assert_allclose(logprobs[0], doubled, rtol=0, atol=2e-5)  # twice the error of float32 logits


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


def test_copy_rows_skips_rows_out_of_range():
    source = np.tile(np.arange(1, 3).reshape(2, 1, 1, 1), (1, 2, 4, 3))  # rows of ones and of twos, [B, K, S, C]
    target = jnp.zeros((3, 2, 6, 3), jnp.int32)
    rows, slots = np.array([1, 0, 0]), np.array([2, 0, 3])
    ((keys, _),) = jax.jit(kv_cache.copy_rows)(((source, source),), rows, ((target, target),), slots)
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
    """The same tokens as by hand. The Driver's own defaults: temperature 1, seed 0; the stop id is not handed out.

    Six prompts, over four slots at first, so that slots are used again. Text, because the Driver puts a BOS before a list of ids.
    """
    prompts = ["hello", "a", "the quick brown", "x = 1", "fifth", "sixth"]
    sizes = dataclasses.replace(CONFIG, num_slots=num_slots)
    made = engine_lib.Engine(MODEL, sizes, TOKENIZER, params())
    got = drive(orchestrator, made, prompts, max_tokens=10)
    for prompt, tokens in zip(prompts, got, strict=True):
        ask = Ask(tuple(TOKENIZER.encode(prompt)), seed=0, max_tokens=10)
        expected, _ = alone(ask)
        cut = next((i for i, token in enumerate(expected) if token in TOKENIZER.stop_ids), len(expected))
        assert tokens == expected[:cut], prompt
    assert any(len(tokens) == 10 for tokens in got)
