"""The scheduler: what a request gets depends on the request and the weights alone, and no future is left hanging.

`Stepped` engines run one `generate` call per permit, so that a test knows between which calls its message arrives.
Equalities between two schedules of one program are bit for bit.
"""

import concurrent.futures
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import engine as engine_lib
from inference import scheduler as scheduler_lib
from inference import toploc
from models import tokenizer as tokenizer_lib
from models import transformer
from sharding import rules
from tests import tiny

MODEL = tiny.model()
K = 8
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=96, prefill_batch=2, steps_per_call=K)
WAIT_S = 60  # far more than anything here takes: a future that hangs fails its test
Ask = functools.partial(scheduler_lib.GenerateRequest, tuple(b"hello"), seed=11, max_tokens=24)


@functools.cache
def params(version=0):
    """Matrices of unit gain drawn by numpy: tokens are far from uniform, and two versions far from each other."""
    rng = np.random.default_rng(100 + version)

    def draw(spec):
        if len(spec.shape) == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, spec.shape), jnp.float32)
        return jnp.asarray(rng.standard_normal(spec.shape) * MODEL.model_dim**-0.5, jnp.float32)

    return jax.tree.map(draw, transformer.specs(MODEL), is_leaf=rules.is_spec)


def engine(kind=engine_lib.Engine, steps_per_call=K):
    config = dataclasses.replace(CONFIG, steps_per_call=steps_per_call)
    return kind(MODEL, config, tokenizer_lib.byte_chatml(), params())


class Stepped(engine_lib.Engine):
    """Each `generate` call waits for a permit."""

    def __init__(self, *args):
        super().__init__(*args)
        self.entered, self.permits, self.free = threading.Semaphore(0), threading.Semaphore(0), False

    def generate(self, params, state):
        self.entered.release()
        assert self.free or self.permits.acquire(timeout=WAIT_S)
        return super().generate(params, state)

    def step(self, act=lambda: None):
        """Lets one call run; what `act` sends to the scheduler is read after this call, before the next."""
        assert self.entered.acquire(timeout=WAIT_S)
        result = act()
        self.permits.release()
        return result

    def run(self):
        self.free = True
        self.permits.release()


@pytest.fixture
def start():
    """Schedulers of the test, closed at its end."""
    started = []

    def start(kind=engine_lib.Engine, steps_per_call=K, **options):
        made = engine(kind, steps_per_call)
        scheduler = scheduler_lib.Scheduler(made, params(), 0, **options)
        started.append((made, scheduler))
        return scheduler if kind is engine_lib.Engine else (scheduler, made)

    yield start
    for made, scheduler in started:
        if isinstance(made, Stepped):
            made.run()
        scheduler.close()


@pytest.fixture(scope="module")
def alone():
    """What a request gets with a scheduler to itself."""
    quiet = scheduler_lib.Scheduler(engine(), params(), 0)
    yield functools.cache(lambda request: quiet.submit(request).result(WAIT_S))
    quiet.close()


# ---- what a request gets ---------------------------------------------------------------------------------------------


def test_samples_share_a_prefill_and_count_their_seeds_up(start, alone):
    """Five samples in four slots, over the end of uint32."""
    scheduler = start()
    samples = scheduler.submit(Ask(seed=2**32 - 2, num_samples=5)).result(WAIT_S)
    assert samples == [alone(Ask(seed=(2**32 - 2 + i) % 2**32))[0] for i in range(5)]
    assert len({tuple(sample.tokens) for sample in samples}) == 5
    assert scheduler.stats["prefill_calls"] == 1 and scheduler.stats["prompt_tokens"] == 5
    assert scheduler.stats["samples"] == 5 and scheduler.stats["tokens"] == 5 * 24


MIXED = [
    Ask(num_samples=3, proofs=True),
    Ask(seed=2, max_tokens=1),
    Ask(temperature=0.0, max_tokens=40, proofs=True),
    scheduler_lib.GenerateRequest(tuple(b"the quick brown"), num_samples=2, max_tokens=33, temperature=0.7, seed=5),
    scheduler_lib.GenerateRequest(tuple(b"sieved"), max_tokens=9, temperature=1.3, top_k=20, top_p=0.8, min_p=0.01),
    scheduler_lib.GenerateRequest((7,), num_samples=6, max_tokens=7, seed=9, stop_ids=tuple(range(8))),
    scheduler_lib.GenerateRequest(tuple(range(80)), num_samples=2, max_tokens=1000, seed=3, proofs=True),
]


@pytest.mark.parametrize("order", range(3))
def test_a_completion_does_not_depend_on_its_company(start, alone, order):
    """16 samples of 7 requests in 4 slots, in any order, some of them late: tokens, log-probabilities, proofs."""
    rng = np.random.default_rng(order)
    scheduler, stepped = start(Stepped)
    futures = {}
    for index in rng.permutation(len(MIXED)):
        futures[index] = scheduler.submit(MIXED[index])
        if rng.random() < 0.5:
            stepped.step()
    stepped.run()
    for index, future in futures.items():
        assert future.result(WAIT_S) == alone(MIXED[index]), MIXED[index]
    assert scheduler.num_running == scheduler.num_pending == 0


def test_the_number_of_steps_per_call_changes_no_token(start, alone):
    """1 against 8: programs with the same loop body, which XLA may fuse differently; hence a tolerance of a few float32
    ulp of a log-probability near 10 (measured on CPU: 0)."""
    assert K == 8
    scheduler = start(steps_per_call=1)
    one = [scheduler.submit(dataclasses.replace(request, proofs=False)) for request in MIXED[:5]]
    one = [sample for future in one for sample in future.result(WAIT_S)]
    for a, b in zip(one, [sample for request in MIXED[:5] for sample in alone(request)], strict=True):
        assert a.tokens == b.tokens and a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=5e-6)


def test_where_a_completion_ends(alone):
    """At a stop id, which is kept; after max_tokens; where the context does. The tokens are those of the longest run."""
    (full,) = alone(Ask(max_tokens=10**9))
    assert len(full.tokens) == CONFIG.max_model_len - 5 and full.finish_reason == "length"
    for at in (0, K - 1, K, 17):
        end = full.tokens.index(full.tokens[at]) + 1
        (stopped,) = alone(Ask(max_tokens=10**9, stop_ids=(full.tokens[at],)))
        assert (stopped.tokens, stopped.logprobs) == (full.tokens[:end], full.logprobs[:end])
        assert stopped.finish_reason == "stop"
        (cut,) = alone(Ask(max_tokens=at + 1))
        assert (cut.tokens, cut.logprobs, cut.finish_reason) == (
            full.tokens[: at + 1],
            full.logprobs[: at + 1],
            "length",
        )
    end = full.tokens.index(full.tokens[6]) + 1
    (both,) = alone(Ask(max_tokens=end, stop_ids=(full.tokens[6],)))  # the stop id is the last token allowed
    assert len(both.tokens) == end and both.finish_reason == "stop"
    (short,) = alone(scheduler_lib.GenerateRequest(tuple(range(95)), max_tokens=5))
    assert len(short.tokens) == 1 and short.finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "token_ids is empty"),
        ({"tokens": (1, 272)}, "token id 272 is outside the vocabulary of 272"),
        ({"tokens": (-1,)}, "token id -1 is outside"),
        ({"tokens": (0,) * 96}, "maximum context length is 96 tokens, but the prompt has 96"),
        ({"num_samples": 0}, "n must be in 1..1024; got 0"),
        ({"num_samples": 1025}, "got 1025"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"temperature": -0.5}, "temperature must be 0, or in 1e-6..1e6; got -0.5"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": float("inf")}, "got inf"),
        ({"temperature": 1e-40}, "got 1e-40"),
        ({"top_k": -2}, "top_k must be in 0..2\\^31 - 1, or -1 for off; got -2"),
        ({"top_k": 2**31}, "got 2147483648"),
        ({"top_p": 0.0}, "top_p must be in \\(0, 1\\]; got 0.0"),
        ({"top_p": float("nan")}, "got nan"),
        ({"min_p": 1.1}, "min_p must be in \\[0, 1\\]; got 1.1"),
        ({"seed": -1}, "seed must be in 0..2\\^32 - 1; got -1"),
        ({"seed": 2**32}, "got 4294967296"),
        ({"stop_ids": tuple(range(9))}, "9 stop token ids given; at most 8"),
        ({"stop_ids": (1, 2**40)}, f"stop token id {2**40} is outside the vocabulary of 272"),
    ],
)
def test_what_is_refused(start, changes, message):
    scheduler = start(max_queue=1)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(dataclasses.replace(Ask(), **changes))
    assert scheduler.num_pending == 0 and scheduler.is_alive


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_log_probabilities_are_finite_at_the_ends_of_the_temperature(alone, temperature):
    (sample,) = alone(Ask(temperature=temperature, top_k=2**31 - 1))
    assert np.isfinite(sample.logprobs).all() and max(sample.logprobs) <= 0


# ---- weights change --------------------------------------------------------------------------------------------------


def test_an_update_under_load(start, alone):
    """Six requests, three versions: stamps rise, at a call's boundary, and nothing is lost or recomputed."""
    scheduler, stepped = start(Stepped)
    requests = [Ask(seed=seed, max_tokens=44 + 7 * seed, num_samples=2) for seed in range(5)]
    futures = [scheduler.submit(request) for request in requests]
    stepped.step()
    stepped.step()
    first = stepped.step(lambda: scheduler.update(params(1), 1))  # read after the third call
    assert first.result(WAIT_S) == 1 == scheduler.version
    futures.append(stepped.step(lambda: scheduler.submit(Ask(seed=77, max_tokens=6))))
    second = stepped.step(lambda: (scheduler.update(params(2), 2), scheduler.update(params(3), 3))[1])
    stepped.run()
    assert second.result(WAIT_S) == 3
    results = [future.result(WAIT_S) for future in futures]
    # The four samples in slots from the start: three calls by version 0, two by 1, the rest by 3 (2 came with 3).
    for sample in results[0] + results[1]:
        assert sample.versions[: 5 * K] == [0] * 3 * K + [1] * 2 * K and set(sample.versions[5 * K :]) == {3}
    for request, samples in zip(requests, results[:5], strict=True):
        before = alone(request)
        for sample, old in zip(samples, before, strict=True):
            assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == request.max_tokens
            assert sample.versions == sorted(sample.versions)
            count = sample.versions.count(0)  # up to the change: as if there had been none
            assert (sample.tokens[:count], sample.logprobs[:count]) == (old.tokens[:count], old.logprobs[:count])
            assert sample.tokens != old.tokens
    prompts = {sample.prompt_version for samples in results for sample in samples}
    assert {sample.prompt_version for sample in results[0]} == {0} and prompts >= {0, 3}
    assert all(s.prompt_version <= s.versions[0] for samples in results for s in samples)
    assert scheduler.stats["weight_updates"] == 3
    # Afterwards it serves version 3 as a scheduler that never knew another.
    (late,) = scheduler.submit(Ask()).result(WAIT_S)
    fresh = scheduler_lib.Scheduler(engine(), params(3), 3)
    assert fresh.submit(Ask()).result(WAIT_S) == [late] and set(late.versions) == {3} == {late.prompt_version}
    fresh.close()


def test_a_prompt_keeps_the_version_that_prefilled_it(start):
    """Samples that waited for a slot through an update: their prompt's keys are older than their first token."""
    scheduler, stepped = start(Stepped)
    future = scheduler.submit(Ask(num_samples=6, max_tokens=2 * K))
    stepped.step()
    stepped.step(lambda: scheduler.update(params(1), 1))
    stepped.run()
    samples = future.result(WAIT_S)
    assert [sample.prompt_version for sample in samples] == [0] * 6
    assert [set(sample.versions) for sample in samples] == [{0}] * 4 + [{1}] * 2


# ---- proofs ----------------------------------------------------------------------------------------------------------


def test_proofs_are_of_the_hidden_states_of_apply(alone):
    prompt, completions = tuple(b"hello"), alone(Ask(num_samples=2, max_tokens=70, proofs=True))
    tokens = np.array([[*prompt, *sample.tokens] for sample in completions], np.int32)
    hidden_BTD = np.asarray(jax.jit(transformer.apply, static_argnums=1)(params(), MODEL, tokens))
    for sample, hidden_TD in zip(completions, hidden_BTD, strict=True):
        rows_ND = hidden_TD[len(prompt) - 1 : -1]  # row j predicted new token j
        results = toploc.verify_proofs(rows_ND, toploc.split(sample.proofs, *rows_ND.shape))
        assert [result.reason for result in results] == ["ok"] * 3
        # Both are float32, rounded to bfloat16: a value at a rounding boundary moves by one unit, and few are there.
        assert max(result.exp_mismatches for result in results) <= 2
        assert max(result.mantissa_mean for result in results) < 0.1
        shifted_ND = hidden_TD[len(prompt) :]  # the wrong rows
        results = toploc.verify_proofs(shifted_ND, toploc.split(sample.proofs, *shifted_ND.shape))
        assert not any(result.accepted for result in results)
    assert alone(Ask())[0].proofs == b""  # not asked for


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_slots(start, alone):
    scheduler, stepped = start(Stepped)
    running = scheduler.submit(Ask(num_samples=7, max_tokens=90))  # four in slots, three ready behind them
    other = stepped.step(lambda: scheduler.submit(Ask()))
    waiting = scheduler.submit(Ask(seed=99))
    assert scheduler.num_pending == 3 and scheduler.num_running == 4
    stepped.step(lambda: (running.cancel(), waiting.cancel()))
    assert scheduler.num_pending == 1
    stepped.run()
    assert other.result(WAIT_S) == alone(Ask())
    assert scheduler.stats["aborted"] == 4 and scheduler.stats["samples"] == 1 and scheduler.is_alive


def test_a_full_queue_says_so(start):
    scheduler, stepped = start(Stepped, max_queue=2)
    futures = [scheduler.submit(Ask(seed=seed)) for seed in range(2)]
    with pytest.raises(scheduler_lib.Overloaded, match="2 requests are pending"):
        scheduler.submit(Ask())
    futures[1].cancel()
    futures[1] = scheduler.submit(Ask(seed=1))  # there is room again
    stepped.run()
    assert all(future.result(WAIT_S) for future in futures)


def test_close_fails_what_is_pending(start):
    scheduler, stepped = start(Stepped)
    futures = [scheduler.submit(Ask(num_samples=3, max_tokens=90, seed=seed)) for seed in range(4)]
    closer = threading.Thread(target=scheduler.close)
    stepped.step(closer.start)
    stepped.run()
    closer.join(WAIT_S)
    for future in futures:
        with pytest.raises(scheduler_lib.Closed, match="before the request was finished|shutting down"):
            future.result(WAIT_S)
    assert not scheduler.is_alive and scheduler.num_pending == 0
    with pytest.raises(scheduler_lib.Closed):
        scheduler.submit(Ask())
    with pytest.raises(scheduler_lib.Closed):
        scheduler.update(params(1), 1)  # nobody would ever answer it
    scheduler.close()  # again


def test_no_future_hangs_when_submitters_race_with_close(start):
    scheduler, futures = start(), []

    def submit():
        with pytest.raises(scheduler_lib.Closed):
            while True:
                futures.append(scheduler.submit(Ask(max_tokens=1)))
                futures.append(scheduler.update(params(), 0))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(futures) < 50:
        pass
    scheduler.close()
    for thread in threads:
        thread.join(WAIT_S)
    done, hanging = concurrent.futures.wait(futures, WAIT_S)
    assert len(done) >= 50 and not hanging


@pytest.mark.parametrize("method", ["prefill_batch", "insert_batch", "generate", "harvest"])
def test_an_engine_that_breaks_fails_every_request_and_ends_the_thread(start, monkeypatch, method):
    """Those in slots, those prefilled, those in the very call, and those that wait."""

    class Broken(Exception):
        pass

    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    scheduler, stepped = start(Stepped)
    futures = [scheduler.submit(Ask(num_samples=2, max_tokens=2 * K, seed=seed, proofs=True)) for seed in range(4)]
    futures.append(scheduler.submit(scheduler_lib.GenerateRequest(tuple(range(20)), num_samples=3)))

    def broken(*args):
        raise Broken

    stepped.step(lambda: monkeypatch.setattr(stepped, method, broken))
    stepped.run()
    done, hanging = concurrent.futures.wait(futures, WAIT_S)
    assert not hanging
    for future in futures[2:]:  # the first two had their slots, and need neither prefill nor insert
        with pytest.raises(scheduler_lib.Closed, match="stopped before the request was finished"):
            future.result()
    scheduler._thread.join(WAIT_S)
    assert raised == [Broken] and not scheduler.is_alive
    with pytest.raises(scheduler_lib.Closed):
        scheduler.submit(Ask())
