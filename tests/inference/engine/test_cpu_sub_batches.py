"""Sub-batches: a request gets the bits of an engine with the slots of one sub-batch, in either of them.

The oracle is an engine of half as many slots, which runs one call at a time.
"""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from inference.engine import cpu_sub_batches, jetstream_engine
from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from models.text import tokenizer as tokenizer_lib
from tests.support import shapes, tiny

MODEL = tiny.model(num_layers=1, num_experts=5, experts_per_token=2, expert_ffn_dim=16)
WIDE = engine_lib.EngineConfig(num_slots=8, max_model_len=96, prefill_batch=2, steps_per_call=8, routed_experts=True)
WAIT_S = 300
Ask = functools.partial(scheduler_lib.GenerateRequest, tuple(b"hello"), max_tokens=40, routed_experts=True)
pytestmark = pytest.mark.usefixtures("several_blocks")


def engine(**changes):
    return engine_lib.Engine(MODEL, dataclasses.replace(WIDE, **changes), tokenizer_lib.byte_chatml())


def complete(made, requests, cancelled=()):
    """Returns the completions of requests submitted together, while `cancelled` ones start and are given up."""
    scheduler = scheduler_lib.Scheduler(made, jax.device_put(tiny.params(made.model, 5)), 0)
    others = [scheduler.submit(request) for request in cancelled]
    futures = [scheduler.submit(request) for request in requests]
    for other in others:
        other.cancel()
    results = [future.result(WAIT_S) for future in futures]
    assert len(scheduler.slots.running) == scheduler.num_pending == 0
    scheduler.close()
    return results


def test_a_request_gets_the_bits_of_an_engine_of_one_sub_batch():
    """Requests of every kind in slots of both: experts, proofs, also of windows that only the host ends, and optional outputs."""
    requests = [Ask(seed=seed, proofs=seed % 2 == 0, max_tokens=30 + seed) for seed in range(7)]
    requests += [Ask(seed=seed, num_samples=3, raw_logprobs=True, top_logprobs=4, temperature=0.7) for seed in (20, 30)]
    text = complete(engine(num_slots=4), [Ask(seed=41)])[0][0].tokens
    stop = tokenizer_lib.byte_chatml().decode(text[19:21]) or "e"
    requests += [Ask(seed=41, stop_texts=(stop,), proofs=True) for _ in range(6)]
    made = engine()
    assert [len(one.init_decode_state()) for one in (made, engine(num_slots=4))] == [2, 1]
    cancelled = [Ask(seed=seed, max_tokens=90) for seed in range(50, 54)]
    got, alone = complete(made, requests, cancelled), complete(engine(num_slots=4), requests)
    assert got == alone
    for samples, others in zip(got, alone, strict=True):
        for a, b in zip(samples, others, strict=True):
            np.testing.assert_array_equal(a.experts, b.experts)


@pytest.mark.parametrize("slot", [1, 6])
def test_one_slot_of_either_sub_batch(slot):
    """JetStream's contract: the other sub-batch's slots stay empty."""
    made, alone = engine(), engine(num_slots=4)
    tokens_T, params = np.array([104, 101, 108, 108, 111, 0, 0, 0], np.int32), jax.device_put(tiny.params(MODEL, 5))
    got = []
    for one, where in ((made, slot), (alone, slot % 4)):
        adapter = jetstream_engine.JetStreamEngine(one, params)
        prefix = adapter.prefill(params=params, padded_tokens=tokens_T, true_length=5)
        state = adapter.insert(prefix, one.init_decode_state(), where)
        state, result = one.generate(params, state)
        result = one.read(result)
        num_slots = len(result.counts)
        assert result.counts.tolist() == [8 * (n == where) for n in range(num_slots)]
        got.append((result.tokens[where], result.logprobs[where], *one.top_values(state, where, 0, 5)))
        stopped = np.full((num_slots,), num_slots, np.int32)
        stopped[0] = where
        state, result = one.generate(params, one.deactivate(state, stopped))
        assert not one.read(result).counts.any()
    for a, b in zip(*got, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_number_of_sub_batches():
    assert cpu_sub_batches.count(MODEL, 8) == cpu_sub_batches.count(shapes.model("4m"), 64) == 2
    assert cpu_sub_batches.count(MODEL, 6) == cpu_sub_batches.count(MODEL, 9) == 1  # too few, or no halves
    assert cpu_sub_batches.count(shapes.model("100m"), 64) == 1  # weights that no cache holds
    assert cpu_sub_batches.count(dataclasses.replace(MODEL, scan_layers=True), 64) == 1


def test_sub_batches_run_at_the_same_time():
    """Each waits for the other, so sequential calls break the barrier. The first time, one compiles for all."""
    barrier = threading.Barrier(2, timeout=WAIT_S)
    states, calls, concurrently = engine().init_decode_state(), [], cpu_sub_batches.ConcurrentDecoder()

    def run(state):
        calls.append(threading.current_thread().name)
        return len(calls) <= 2 or barrier.wait()

    assert concurrently(run, states) == [True, True] and len(set(calls)) == 1
    assert sorted(concurrently(run, states)) == [0, 1] and len(set(calls[2:])) == 2
