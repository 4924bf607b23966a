"""Programs of one layer, and decode states that follow the load: completions are those of the program of all layers.

Products of other numbers of rows may round otherwise, so log-probabilities have a float32 tolerance.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import cpu_layers, cpu_sub_batches, jetstream_engine, weights
from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from tests.support import cases, engines, tiny

MODEL = tiny.model(
    window=24, layer_pattern="SF", num_experts=5, experts_per_token=2, expert_ffn_dim=16, first_dense_layers=1
)
DENSE = tiny.model(num_layers=4, window=24, layer_pattern="SF")
CONFIG = engine_lib.EngineConfig(
    num_slots=4, max_model_len=96, prefill_batch=4, steps_per_call=4, prefill_chunk=32, kept_tokens=20
)
HELLO = tuple(b"hello")
Ask = functools.partial(scheduler_lib.GenerateRequest, max_tokens=20)
pytestmark = pytest.mark.usefixtures("several_blocks")
LONG = Ask(tuple(range(50)), seed=5, max_tokens=40)
REQUESTS = [
    *(Ask(tuple(b"one %d" % n), seed=n, max_tokens=6 + 9 * n, proofs=n % 2 == 0) for n in range(4)),
    Ask(HELLO, seed=10, top_k=20, top_p=0.8, min_p=0.01, temperature=1.3, kept_tokens=True),
    Ask(HELLO, seed=11, num_samples=3, raw_logprobs=True, top_logprobs=3, logit_bias=((104, 3.0),), min_tokens=9),
    Ask(HELLO, seed=12, stop_texts=("e",), proofs=True),
    LONG,
]


@pytest.fixture
def layered(monkeypatch):
    monkeypatch.setattr(cpu_sub_batches, "MAX_WEIGHTS_BYTES", 0)


class Recording(engine_lib.Engine):
    """An engine that records the sizes of the state of each decode call."""

    def __init__(self, *args):
        super().__init__(*args)
        self.used = []

    def generate(self, params, decode_state, *args):
        self.used.append(self.sizes(decode_state))
        return super().generate(params, decode_state, *args)


def engine(model=MODEL, **changes):
    config = dataclasses.replace(CONFIG, routed_experts=model.num_experts > 0, **changes)
    return Recording(model, config, tokenizer_lib.byte_chatml())


def weights_of(made):
    """Returns the weights of an engine's model, output-major, as a server keeps them."""
    single = dataclasses.replace(made.model, scan_layers=False)
    store = weights.Store(single, mesh_lib.create({}, devices=jax.local_devices()[:1]))
    return store.load(tiny.params(single, 5))


def complete(made, requests, params=None):
    """Returns the completions of requests submitted together."""
    found = engines.complete(made, weights_of(made) if params is None else params, requests)
    return [sample for samples in found for sample in samples]


def assert_close(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a.tokens, a.finish_reason, len(a.proofs), a.kept) == (b.tokens, b.finish_reason, len(b.proofs), b.kept)
        for x, y in ((a.logprobs, b.logprobs), (a.raw_logprobs, b.raw_logprobs)):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)  # float32, sums over 32 to 64 numbers in another order
        assert [[token for token, _ in row] for row in a.top] == [[token for token, _ in row] for row in b.top]
        np.testing.assert_array_equal(a.experts, b.experts)


def test_completions_are_those_of_the_program_of_all_layers(monkeypatch):
    """Together, while the state grows and shrinks, and one after the other in states of few slots. With the experts of each token."""
    requests = [dataclasses.replace(request, routed_experts=True) for request in REQUESTS]
    wanted = complete(engine(), requests)
    monkeypatch.setattr(cpu_sub_batches, "MAX_WEIGHTS_BYTES", 0)
    made = engine()
    assert made.follows_load
    assert_close(complete(made, requests), wanted)
    slots, positions = zip(*made.used, strict=True)
    assert max(slots) == 4 and slots[-1] == 1 and max(positions) == 96 and min(positions) < 96
    made.used.clear()
    one_by_one = [sample for request in requests[-3:] for sample in complete(made, [request])]
    assert_close(one_by_one, wanted[-len(one_by_one) :])
    assert {slots for slots, _ in made.used} == {1, 4} and (1, 32) in made.used


@pytest.mark.parametrize("model", cases.slow_but([DENSE, MODEL], MODEL), ids=["dense", "experts"])
def test_the_common_beginning_of_prompts_is_computed_once(layered, model, monkeypatch):
    """Four prompts in a call begin with 23 tokens: the first call has as many as the shortest has, but for its last one."""
    prompts = [tuple(b"You count. Question 1 a" + end) for end in (b"", b" b", b" and c", b" every")]
    is_mixture = model is MODEL
    requests = [Ask(tokens, seed=n, routed_experts=is_mixture) for n, tokens in enumerate(prompts)]
    sizes, real = [], cpu_layers.prefill_chunk
    monkeypatch.setattr(cpu_layers, "prefill_chunk", lambda *args: sizes.append(args[3].shape) or real(*args))
    made = engine(model)
    got = complete(made, requests)
    assert (1, 16) in sizes and {size for size in sizes if size[0] > 1} == {(4, 16)}
    monkeypatch.setattr(cpu_layers, "num_shared", lambda *args: 0)
    assert_close(got, complete(made, requests))


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [([b"x" * 30, b"x" * 20], 16), ([b"x" * 17, b"x" * 17], 16), ([b"x" * 16, b"x" * 30], 8), ([b"x" * 30], 0)],
)
def test_the_number_of_common_tokens_leaves_each_prompt_its_last_one(prompts, expected):
    """A row of one token is padding."""
    tokens_PT = np.zeros((len(prompts) + 1, 32), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_PT[row, : len(prompt)] = tuple(prompt)
    assert cpu_layers.num_shared(tokens_PT, np.array([*map(len, prompts), 1])) == expected


def test_layers_in_stacks_are_views_and_give_the_same_bits(layered):
    scanned, made = engine(dataclasses.replace(DENSE, scan_layers=True)), engine(DENSE)
    params = jax.device_put(tiny.params(DENSE, 5))
    layers = [params["layers"][f"{index:03d}"] for index in range(4)]
    stacks = transformer.stacks(scanned.model)
    stacked = {key: jax.tree.map(lambda *x: np.stack(x), *(layers[n] for n in at)) for key, at in stacks.items()}
    stacked = jax.device_put(params | {"layers": stacked})
    assert len(stacks) == 2
    request = Ask(HELLO, seed=5, max_tokens=8)
    assert complete(scanned, [request], stacked) == complete(made, [request], params)
    (at, *_), view = stacks.values(), scanned._layers.of(stacked)["layers"]
    kernel = stacked["layers"]["000"]["mlp"]["gate"]
    last = view[f"{at[-1]:03d}"]["mlp"]["gate"]
    assert last.unsafe_buffer_pointer() - kernel.unsafe_buffer_pointer() == (len(at) - 1) * last.nbytes


def test_a_conversation_goes_on_after_the_state_shrank(layered):
    """A sequence that ended in a slot that is given up, or moved, is copied, and read again by its next turn."""
    made = engine(DENSE, num_slots=8, max_model_len=176)
    first = [Ask(tuple(b"turn %d" % n), seed=n, max_tokens=60 if n == 3 else 28) for n in range(4)]
    with engines.server(made, weights_of(made)) as server:
        submit = server.scheduler.submit
        ended = [future.result(engines.WAIT_S)[0] for future in map(submit, first)]
        turns = [(*request.tokens, *done.tokens, 32, 33) for request, done in zip(first, ended, strict=True)]
        later = [submit(Ask(turn, seed=9, max_tokens=8)).result(engines.WAIT_S)[0] for turn in turns]
    assert all(done.num_cached >= 16 for done in later)
    fresh = [complete(made, [Ask(turn, seed=9, max_tokens=8)])[0] for turn in turns]
    assert [done.num_cached for done in fresh] == [0] * 4
    assert_close(later, fresh)


def test_sizes_of_an_unused_state(layered):
    """A new state has room for one short sequence, and copies into it leave its memory in place."""
    made = engine()
    state = made.init_decode_state()
    assert made.sizes(state) == (1, 32) and made.fitting(3, 33) == (4, 64) and made.fitting(4, 96) == (4, 96)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state[0].cache)]
    params = weights_of(made)
    adapter = jetstream_engine.JetStreamEngine(made, params)
    prefix = adapter.prefill(params=params, padded_tokens=jnp.arange(16), true_length=9)
    state = adapter.insert(prefix, state, 0)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state[0].cache)] == before
