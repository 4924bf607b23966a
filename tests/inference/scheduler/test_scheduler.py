"""The scheduler: a completion depends on its request and the weights alone, and no future is left hanging.

`Stepped` engines run one `generate` call per permit, so that a test knows between which calls its message arrives.
Equalities between two schedules of one program are bit for bit.
"""

import concurrent.futures
import dataclasses
import functools
import threading
import time
import types

import jax
import numpy as np
import pytest

from inference.engine import compiled_steps
from inference.engine import engine as engine_lib
from inference.proofs import toploc
from inference.scheduler import prefill_queue
from inference.scheduler import scheduler as scheduler_lib
from inference.scheduler import slots as slots_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from tests.support import cases, clock, engines, tiny
from tests.support import proofs as proofs_lib

MODEL = tiny.model()
K = 8
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=96, prefill_batch=2, steps_per_call=K)
WAIT_S = 300  # to compile on a busy machine, too: a future that hangs fails its test
Request = scheduler_lib.GenerateRequest
Ask = functools.partial(Request, tuple(b"hello"), seed=11, max_tokens=24)
pytestmark = pytest.mark.usefixtures("several_blocks")


@functools.cache
def params(version=0):
    return jax.device_put(tiny.params(MODEL, 100 + version))


def engine(kind=engine_lib.Engine, config=CONFIG):
    return kind(MODEL, config, tokenizer_lib.byte_chatml())


class Stepped(engine_lib.Engine):
    """Each `generate` call waits for a permit."""

    def __init__(self, *args):
        super().__init__(*args)
        self.entered, self.permits, self.free = threading.Semaphore(0), threading.Semaphore(0), False

    def generate(self, *args):
        self.entered.release()
        assert self.free or self.permits.acquire(timeout=WAIT_S)
        return super().generate(*args)

    def step(self, act=lambda: None):
        """Lets one call run; messages of `act` are read after this call, before the next."""
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

    def start(kind=engine_lib.Engine, config=CONFIG, **options):
        made = engine(kind, config)
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
    """Returns the completions of a request in a scheduler of its own."""
    with engines.server(engine(), params()) as quiet:
        yield functools.cache(lambda request: quiet.scheduler.submit(request).result(WAIT_S))


def test_samples_share_a_prefill_and_count_their_seeds_up(start, alone):
    """Five samples in four slots, over the end of uint32."""
    scheduler = start()
    samples = scheduler.submit(Ask(seed=2**32 - 2, num_samples=5)).result(WAIT_S)
    assert samples == [alone(Ask(seed=(2**32 - 2 + i) % 2**32))[0] for i in range(5)]
    assert len({tuple(sample.tokens) for sample in samples}) == 5
    assert scheduler.stats["prefill_calls"] == 1 and scheduler.stats["prompt_tokens"] == 5
    assert scheduler.stats["samples"] == 5 and scheduler.stats["tokens"] == 5 * 24
    scheduler.forget_counts().result(WAIT_S)
    assert not any(scheduler.stats.values())


def test_where_a_completion_ends(alone):
    """A completion ends at a stop id, which is kept, after max_tokens, or with the context; its tokens are unchanged."""
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
    (short,) = alone(Request(tuple(range(95)), max_tokens=5))
    assert len(short.tokens) == 1 and short.finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 1025}, "got 1025"),
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
        ({"stop_texts": ("a",) * 65}, "65 stop strings given; at most 64"),
        ({"logit_bias": ((1, float("nan")),)}, "in -100..100; got nan"),
        ({"logit_bias": ((1, 1.0),) * 301}, "301 logit_bias entries given; at most 300"),
        ({"allowed_ids": (1,) * 301}, "301 allowed_token_ids given; at most 300"),
    ],
)
def test_invalid_requests_are_rejected(start, changes, message):
    scheduler = start(max_queue=1)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(dataclasses.replace(Ask(), **changes))
    assert scheduler.num_pending == 0 and scheduler.is_alive


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_log_probabilities_are_finite_at_the_ends_of_the_temperature(alone, temperature):
    (sample,) = alone(Ask(temperature=temperature, top_k=2**31 - 1))
    assert np.isfinite(sample.logprobs).all() and max(sample.logprobs) <= 0


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
    with engines.server(engine(), params(3), 3) as fresh:
        assert fresh.scheduler.submit(Ask()).result(WAIT_S) == [late]
    assert set(late.versions) == {3} == {late.prompt_version}


@pytest.mark.parametrize("num_pinned", [1, 3, 6])  # also more than have slots
@pytest.mark.parametrize("in_time", [True, False])
def test_an_update_waits_for_pinned_requests_and_for_no_later_ones(start, alone, monkeypatch, num_pinned, in_time):
    """Attack: pinned requests without end, to hold back new weights or to see the better of two versions."""
    monkeypatch.setattr(scheduler_lib, "PIN_WAIT_S", WAIT_S if in_time else 0.0)
    scheduler, stepped = start(Stepped)
    free = scheduler.submit(Ask(seed=50, max_tokens=80))
    pinned = [Ask(seed=seed, max_tokens=5 * K, policy_version=0) for seed in range(num_pinned)]
    futures = stepped.step(lambda: [scheduler.submit(request) for request in pinned])
    update = stepped.step(lambda: scheduler.update(params(1), 1))
    late = stepped.step(lambda: [scheduler.submit(Ask(policy_version=v, max_tokens=80)) for v in (0, 1, 2)])
    stepped.run()
    assert update.result(WAIT_S) == 1 == scheduler.version
    for future in late if in_time else [late[0], late[2]]:
        with pytest.raises(
            scheduler_lib.VersionGone, match=r"version [012] was requested, and this server has version 1"
        ):
            future.result(WAIT_S)
    for request, future in zip(pinned, futures, strict=True):
        if in_time:
            (sample,) = future.result(WAIT_S)
            (expected,) = alone(dataclasses.replace(request, policy_version=-1))
            assert (sample.tokens, sample.prompt_version, {*sample.versions}) == (expected.tokens, 0, {0})
        else:
            with pytest.raises(scheduler_lib.VersionGone):
                future.result(WAIT_S)
    if not in_time:  # the new version is in use when the late requests come
        assert {*late[1].result(WAIT_S)[0].versions} == {1}
    (sample,) = free.result(WAIT_S)  # swapped in flight, unless pinned requests took as long
    assert {*sample.versions} == ({0, 1} if num_pinned < 6 or not in_time else {0})
    (after,) = scheduler.submit(Ask(policy_version=1)).result(WAIT_S)
    assert {after.prompt_version, *after.versions} == {1}


def test_weights_of_another_epoch_end_every_request(start):
    """A resumed run publishes a number again: a rollout of both weights would name one version for two policies."""
    scheduler, stepped = start(Stepped)
    scheduler.submit(Ask(max_tokens=1))  # its prompt is in the prefix cache from now on
    asked = [Ask(max_tokens=80), Ask(policy_version=0, max_tokens=80), *(Ask(seed=s, max_tokens=80) for s in range(5))]
    futures = stepped.step(lambda: [scheduler.submit(request) for request in asked])  # more than have slots
    stepped.step()
    messages = lambda: (scheduler.update(params(1), 0, epoch=1), scheduler.submit(Ask(policy_epoch=0)))  # noqa: E731
    update, late = stepped.step(messages)
    stepped.run()
    assert update.result(WAIT_S) == 0 and (scheduler.version, scheduler.epoch) == (0, 1)
    for future in (*futures, late):
        with pytest.raises(scheduler_lib.VersionGone, match="this server has version 0 of epoch 1"):
            future.result(WAIT_S)
    (sample,) = scheduler.submit(Ask(policy_version=0, policy_epoch=1)).result(WAIT_S)
    fresh = scheduler_lib.Scheduler(engine(), params(1), 0, epoch=1)
    assert fresh.submit(Ask()).result(WAIT_S) == [sample] and (sample.epoch, sample.num_cached) == (1, 0)
    fresh.close()


def test_an_update_during_a_pause_waits_for_no_pinned_request(start):
    scheduler, stepped = start(Stepped)
    pinned = scheduler.submit(Ask(policy_version=0))
    paused = stepped.step(scheduler.pause)
    assert paused.result(WAIT_S) == 0
    assert scheduler.update(params(1), 1).result(WAIT_S) == 1
    with pytest.raises(scheduler_lib.VersionGone):
        pinned.result(WAIT_S)
    scheduler.resume()
    stepped.run()
    assert {*scheduler.submit(Ask()).result(WAIT_S)[0].versions} == {1}


def test_released_sequences_continue_bit_for_bit(start, alone):
    """The state leaves the device between two calls, and comes back; without a running sequence it is made anew."""
    scheduler, stepped = start(Stepped)
    asked = [Ask(seed=seed, proofs=True) for seed in range(6)]  # more than have slots
    futures = [scheduler.submit(request) for request in asked]
    for _ in range(3):
        released = stepped.step(scheduler.release)
        assert released.result(WAIT_S) == 0 and scheduler._state == () and scheduler.prefixes.num_bytes == 0
        kept = [g.prefix for g in (*scheduler.slots.groups, *scheduler._waiting) if hasattr(g, "prefix")]
        assert kept and all(prefix.cache is None for prefix in kept)
        late = scheduler.submit(Ask(seed=77))
        assert not stepped.entered.acquire(timeout=0.05)  # no call runs
        scheduler.resume()  # a control route: it ends no release
        scheduler.reclaim().result(WAIT_S)
    stepped.run()
    assert [future.result(WAIT_S) for future in futures] == [alone(request) for request in asked]
    assert late.result(WAIT_S) == alone(Ask(seed=77))
    num_compiled = compiled_steps.generate._cache_size  # pyright: ignore  # not in the stub
    before = num_compiled()
    scheduler.release().result(WAIT_S)
    assert scheduler._released[1] is None
    scheduler.reclaim().result(WAIT_S)
    assert scheduler.submit(Ask()).result(WAIT_S) == alone(Ask())
    assert num_compiled() == before  # nothing is compiled again


def test_an_update_waits_for_pinned_requests_longer_by_the_time_of_a_release(start, monkeypatch):
    now = clock.Clock()
    of_the_test = types.SimpleNamespace(monotonic=now, perf_counter=time.perf_counter, sleep=time.sleep)
    monkeypatch.setattr(scheduler_lib, "time", of_the_test)
    scheduler, stepped = start(Stepped)
    pinned = scheduler.submit(Ask(policy_version=0, max_tokens=2 * K))
    update = stepped.step(lambda: scheduler.update(params(1), 1))
    stepped.step(scheduler.release).result(WAIT_S)
    now.now += 2 * scheduler_lib.PIN_WAIT_S
    scheduler.reclaim().result(WAIT_S)
    stepped.run()
    assert {*pinned.result(WAIT_S)[0].versions} == {0} and update.result(WAIT_S) == 1


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


def test_proofs_are_of_the_hidden_states_of_apply(alone):
    prompt, completions = tuple(b"hello"), alone(Ask(num_samples=2, max_tokens=70, proofs=True))
    tokens = np.array([[*prompt, *sample.tokens] for sample in completions], np.int32)
    hidden_BTD = np.asarray(jax.jit(transformer.apply, static_argnums=1)(params(), MODEL, tokens)[0])
    for sample, hidden_TD in zip(completions, hidden_BTD, strict=True):
        rows_ND = hidden_TD[len(prompt) - 1 : -1]  # row j predicted new token j
        results = proofs_lib.verify(rows_ND, toploc.split(sample.proofs, *rows_ND.shape))
        assert [result.reason for result in results] == ["ok"] * 3
        # Both are float32, rounded to bfloat16: a value at a rounding boundary moves by one unit, and few are.
        assert max(result.exp_mismatches for result in results) <= 2
        assert max(result.mantissa_mean for result in results) < 0.1
        shifted_ND = hidden_TD[len(prompt) :]  # the wrong rows
        results = proofs_lib.verify(shifted_ND, toploc.split(sample.proofs, *shifted_ND.shape))
        assert not any(result.accepted for result in results)
    assert alone(Ask())[0].proofs == b""  # not asked for


def test_a_cancelled_request_frees_its_slots(start, alone):
    scheduler, stepped = start(Stepped)
    running = scheduler.submit(Ask(num_samples=7, max_tokens=90))  # four in slots, three ready
    other = stepped.step(lambda: scheduler.submit(Ask()))
    waiting = scheduler.submit(Ask(seed=99))
    assert scheduler.num_pending == 3 and len(scheduler.slots.running) == 4
    stepped.step(lambda: (running.cancel(), waiting.cancel()))
    assert scheduler.num_pending == 1
    stepped.run()
    assert other.result(WAIT_S) == alone(Ask())
    assert scheduler.stats["aborted"] == 4 and scheduler.stats["samples"] == 1 and scheduler.is_alive


def test_a_full_queue_rejects_requests(start):
    scheduler, stepped = start(Stepped, max_queue=2)
    futures = [scheduler.submit(Ask(seed=seed)) for seed in range(2)]
    with pytest.raises(scheduler_lib.Overloaded, match="2 requests are pending"):
        scheduler.submit(Ask())
    futures[1].cancel()
    futures[1] = scheduler.submit(Ask(seed=1))  # there is room again
    stepped.run()
    assert all(future.result(WAIT_S) for future in futures)


def test_close_fails_pending_requests(start):
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
        scheduler.update(params(1), 1)  # its future would hang
    scheduler.close()  # again


def test_no_future_hangs_when_submitters_race_with_close(start):
    scheduler, futures = start(max_queue=10**9), []

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


@pytest.mark.parametrize("method", ["prefill_batch", "insert_batch", "generate", "read"])
def test_an_engine_that_breaks_fails_every_request_and_ends_the_thread(start, monkeypatch, method):
    """Requests in slots, prefilled, in the failing call, and waiting."""

    class Broken(Exception):
        pass

    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    scheduler, stepped = start(Stepped)
    ask = functools.partial(Ask, num_samples=2, max_tokens=2 * K, proofs=True)
    futures = [scheduler.submit(dataclasses.replace(ask(), tokens=(seed, 65, 66))) for seed in range(4)]
    futures.append(scheduler.submit(Request(tuple(range(20)), num_samples=3)))

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


LONG = dataclasses.replace(CONFIG, prefill_chunk=16)
TURN = tuple(np.random.default_rng(1).integers(0, 256, 70).tolist())


@pytest.fixture
def chunked(start):
    """Schedulers whose prompts beyond 16 tokens are prefilled in chunks of 16."""
    return functools.partial(start, config=LONG)


def test_a_prompt_in_chunks_is_the_prompt_in_one_piece(chunked, alone):
    """Other programs, so log-probabilities agree to float32 (measured 2e-6); the noise draws the same tokens."""
    scheduler = chunked()
    assert LONG.capacity == 96 and LONG.buckets == (16,)
    for length in (15, 16, 17, 32, 33, 64, 70):
        request = Request(TURN[:length], max_tokens=1000, seed=length, proofs=True)
        (got,), (expected,) = scheduler.submit(request).result(WAIT_S), alone(request)
        assert got.tokens == expected.tokens and len(got.tokens) == 96 - length
        np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert scheduler.stats["prefill_calls"] == 2  # 15 and 16
    assert scheduler.stats["prefill_chunks"] == 2 + 1 + 1 + 2 + 1  # of 17, then the rest of 32, 33, 64, 70


def test_reuse_changes_no_bit(chunked):
    """The turns of a conversation, on one that keeps prefixes and on one that keeps none; tokens, logp and proofs."""
    reusing, plain = chunked(), chunked(prefix_cache_bytes=0)
    requests = [
        Request(TURN[:length], max_tokens=9, seed=seed, proofs=True)
        for seed, length in enumerate((20, 40, 40, 41, 70, 48, 5, 5, 16))
    ]
    got = [reusing.submit(request).result(WAIT_S) for request in requests]
    assert got == [plain.submit(request).result(WAIT_S) for request in requests]
    other = Request((1, *TURN[1:40]), max_tokens=9)  # one token differs, at the start
    assert reusing.submit(other).result(WAIT_S) == plain.submit(other).result(WAIT_S)
    assert plain.stats["prefix_hits"] == 0 and plain.prefixes.num_bytes == 0
    # 16 of 40, all of 40 again, 32 of 41, 32 of 70, all 48 (three chunks of the 70), 5 again; nothing of the 16 and the other
    assert reusing.stats["prefix_hits"] == 16 + 40 + 32 + 32 + 48 + 5
    assert reusing.stats["prefix_queries"] == sum(len(r.tokens) for r in requests) + 40
    assert reusing.stats["prompt_tokens"] == reusing.stats["prefix_queries"] - reusing.stats["prefix_hits"]


WIDE = dataclasses.replace(CONFIG, max_model_len=160)  # a padded chunk of 64 fits after each turn


@pytest.mark.parametrize("config", cases.slow_but([WIDE, LONG], LONG))
def test_a_turn_reuses_the_tokens_that_the_turn_before_sampled(start, config):
    """Decode rounds otherwise than prefill: log-probabilities agree to float32, and the noise draws the same tokens.

    Three conversations at the same time, so that slots decode after their neighbors have ended, and get other sequences.
    """
    reusing, plain = start(config=config), start(config=config, prefix_cache_bytes=0)
    prompts = [TURN[:first] for first in (3, 11, 20)]
    cached = [0] * 3
    for turn in range(3):
        requests = [Request(prompt, max_tokens=(9, 14, 17)[n], seed=n, proofs=True) for n, prompt in enumerate(prompts)]
        found = [reusing.submit(request) for request in requests]
        expected = [plain.submit(request).result(WAIT_S)[0] for request in requests]
        for n, future in enumerate(found):
            (got,) = future.result(WAIT_S)
            assert got.tokens == expected[n].tokens and got.num_cached == cached[n]
            np.testing.assert_allclose(got.logprobs, expected[n].logprobs, rtol=0, atol=1e-5)
            whole = (*prompts[n], *got.tokens)
            cached[n] = (len(whole) - 1) // 16 * 16 if (len(whole) - 1) // 16 * 16 > len(prompts[n]) else cached[n]
            prompts[n] = (*whole, turn, 2, 3)
    assert min(cached) >= 32


def test_a_turn_reuses_no_token_after_the_first_that_differs(start):
    scheduler, plain = start(config=WIDE), start(config=WIDE, prefix_cache_bytes=0)
    (reply,) = scheduler.submit(Request(TURN[:10], max_tokens=40)).result(WAIT_S)
    whole = [*TURN[:10], *reply.tokens]
    for at, num_cached in ((9, 0), (15, 0), (16, 16), (40, 32), (48, 48)):
        other = (*whole[:at], whole[at] ^ 1, *whole[at + 1 :])
        (got,) = scheduler.submit(Request(other, max_tokens=9)).result(WAIT_S)
        assert got.num_cached == num_cached
        assert got.tokens == plain.submit(Request(other, max_tokens=9)).result(WAIT_S)[0].tokens
    small = start()  # of 96 positions: a chunk of 64 fits after 32 tokens, and not after 48
    (reply,) = small.submit(Request(TURN[:10], max_tokens=40)).result(WAIT_S)
    assert small.submit(Request((*TURN[:10], *reply.tokens, 5), max_tokens=1)).result(WAIT_S)[0].num_cached == 32
    for oldest, num_cached in ((-1, 0), (0, 48)):  # rollouts do not go on, but for those of episodes
        asked = {"seed": 5 * oldest + 9, "oldest_prefix_version": oldest}
        group = scheduler.submit(Request(TURN[20:30], num_samples=2, max_tokens=40, **asked)).result(WAIT_S)
        turns = [Request((*TURN[20:30], *reply.tokens), max_tokens=1) for reply in group]
        assert [scheduler.submit(turn).result(WAIT_S)[0].num_cached for turn in turns] == [num_cached] * 2
    before = scheduler.prefixes.num_bytes
    scheduler.update(params(1), 0).result(WAIT_S)
    assert scheduler.prefixes.num_bytes == 0 < before
    (fresh,) = scheduler.submit(Request(tuple(whole), max_tokens=9)).result(WAIT_S)
    assert fresh.num_cached == 0


def test_keys_of_two_versions_are_not_reused(start):
    """A sequence that new weights interrupted ends under them, and its first keys are of the old ones."""
    scheduler, stepped = start(Stepped)
    future = scheduler.submit(Request(TURN[:10], max_tokens=3 * K))
    stepped.step()
    stepped.step(lambda: scheduler.update(params(1), 0))
    stepped.run()
    (reply,) = future.result(WAIT_S)
    (got,) = scheduler.submit(Request((*TURN[:10], *reply.tokens), max_tokens=2)).result(WAIT_S)
    assert got.num_cached == 0 and scheduler.stats["weight_updates"] == 1


def test_a_turn_reuses_keys_of_the_version_before_if_the_request_allows_them(start):
    """The reply names them. A prompt that is cached as a whole has at least its last keys from the version in use."""
    scheduler = start(config=WIDE)
    (reply,) = scheduler.submit(Request(TURN[:10], max_tokens=54)).result(WAIT_S)
    whole = (*TURN[:10], *reply.tokens)
    assert len(whole) == 64
    scheduler.update(params(1), 1).result(WAIT_S)

    def ask(tokens, **options):
        (got,) = scheduler.submit(Request(tokens, max_tokens=12, **options)).result(WAIT_S)
        return got

    for n, pin in enumerate(({}, {"policy_version": 1, "oldest_prefix_version": 0}, {"oldest_prefix_version": 1})):
        assert ask(whole[: 61 + n], **pin).num_cached == 0
    for tokens, end in ((whole, 48), ((*whole[:40], 7), 32), (whole[:48], 32)):
        got = ask(tokens, oldest_prefix_version=0)
        assert (got.num_cached, [*got.prefix_versions], got.prompt_version) == (end, [(end, 0)], 1)
    longer = (*whole, *ask(whole, oldest_prefix_version=0).tokens)
    again = ask((*longer, 3), oldest_prefix_version=0)  # of a sequence that has keys of both
    assert again.num_cached == 64 and again.prefix_versions == ((48, 0),) and set(again.versions) == {1}
    scheduler.update(params(2), 2).result(WAIT_S)
    assert ask((*longer, 3), oldest_prefix_version=0).num_cached == 0  # two versions ago
    scheduler.update(params(1), 1).result(WAIT_S)  # a rollback
    last = ask((*longer, 3), oldest_prefix_version=0)
    assert last.num_cached == 0
    scheduler.update(params(2), 2, 1).result(WAIT_S)  # of another epoch
    assert ask((*longer, 3, *last.tokens), oldest_prefix_version=0).num_cached == 0


def test_a_sequence_that_new_weights_interrupted_names_the_version_of_each_key(start):
    scheduler, stepped = start(Stepped, config=WIDE)
    future = scheduler.submit(Request(TURN[:10], max_tokens=40))
    stepped.step()
    stepped.step(lambda: scheduler.update(params(1), 1))
    stepped.run()
    (reply,) = future.result(WAIT_S)
    num_old = reply.versions.count(0)
    assert 0 < num_old < 40
    request = Request((*TURN[:10], *reply.tokens, 5), max_tokens=2, oldest_prefix_version=0)
    (got,) = scheduler.submit(request).result(WAIT_S)
    assert got.num_cached == 48 and got.prefix_versions == ((9 + num_old, 0),) and got.prompt_version == 1


def test_chunks_of_several_prompts_run_between_two_calls(chunked, monkeypatch):
    """Four prompts of three chunks each: one decode call after all of them, or one after each chunk from the first prompt on."""
    for budget, fewest, most in ((12, 1, 1), (1, 4, 12)):
        monkeypatch.setattr(prefill_queue, "BUDGET", budget)
        scheduler = chunked()
        scheduler.pause().result(WAIT_S)
        futures = [scheduler.submit(Request((first, *TURN[1:40]), max_tokens=K)) for first in range(4)]
        scheduler.resume().result(WAIT_S)
        assert [future.result(WAIT_S)[0].finish_reason for future in futures] == ["length"] * 4
        assert scheduler.stats["prefill_chunks"] == 12 and fewest <= scheduler.stats["generate_calls"] <= most


def test_an_update_restarts_a_prompt_that_is_half_prefilled(chunked, monkeypatch):
    """Its keys must not be of two versions. A later prompt comes after it."""
    monkeypatch.setattr(prefill_queue, "BUDGET", 1)
    scheduler = chunked()
    extend, seen, later = scheduler._engine.prefill_chunk, [], []

    def slow(*args, **how):
        seen.append((int(args[1][0, 0]), args[2]))
        if len(seen) == 2:
            later.append(scheduler.submit(Request((2, *TURN[1:32]), max_tokens=1)))
            scheduler.update(params(1), 1)  # both are read before the next chunk
        return extend(*args, **how)

    scheduler._engine.prefill_chunk = slow
    request = Request((1, *TURN[1:60]), max_tokens=5)
    (got,) = scheduler.submit(request).result(WAIT_S)
    later[0].result(WAIT_S)
    assert [num_done for _, num_done in seen[:6]] == [0, 16, 0, 16, 32, 48]
    assert [first for first, num_done in seen if num_done == 0] == [1, 1, 2]
    assert got.prompt_version == 1 and set(got.versions) == {1}
    assert scheduler.stats["prompt_tokens"] == scheduler.stats["prefix_queries"] == 60 + 32
    fresh = chunked()
    fresh.update(params(1), 1).result(WAIT_S)
    assert fresh.submit(request).result(WAIT_S) == [got]


def test_duplicates_in_the_queue_share_a_row(start, alone):
    scheduler, stepped = start(Stepped)
    blocker = scheduler.submit(dataclasses.replace(Ask(num_samples=4, max_tokens=K), tokens=(9, 9)))
    asks = [Request((5, 6, 7), max_tokens=6, seed=seed) for seed in range(4)]
    futures = stepped.step(lambda: [scheduler.submit(ask) for ask in asks])
    stepped.run()
    assert [f.result(WAIT_S) for f in futures] == [alone(ask) for ask in asks] and blocker.result(WAIT_S)
    assert scheduler.stats["prefill_calls"] == 2 and scheduler.stats["prompt_tokens"] == 2 + 3


def test_a_large_request_leaves_half_of_the_slots_to_others(start):
    scheduler, stepped = start(Stepped)
    large = scheduler.submit(Ask(num_samples=40, max_tokens=K))
    small = stepped.step(
        lambda: scheduler.submit(dataclasses.replace(Ask(seed=5, max_tokens=2 * K, num_samples=2), tokens=(3, 4)))
    )
    for _ in range(3):
        assert not small.done() and not large.done()
        stepped.step()
    assert len(small.result(WAIT_S)) == 2 and not large.done()  # its turn came with the second call, and took two
    stepped.run()
    assert len(large.result(WAIT_S)) == 40


def test_calls_end_where_a_slot_is_due(start):
    """Skewed lengths: while requests wait, no slot stands empty; the steps are those of a perfect packing."""
    scheduler, stepped = start(Stepped)
    lengths = [3, 17, 8, 30, 5, 11, 2, 26, 9, 14]
    futures = [scheduler.submit(Ask(seed=seed, max_tokens=n)) for seed, n in enumerate(lengths)]
    stepped.run()
    for n, future in zip(lengths, futures, strict=True):
        assert len(future.result(WAIT_S)[0].tokens) == n
    ends = [0] * 4  # greedy list scheduling of the lengths over four slots, in order of arrival
    for n in lengths:
        slot = ends.index(min(ends))
        ends[slot] += n
    assert scheduler.stats["decode_steps"] == max(ends)


def test_calls_are_short_while_slots_are_free_and_requests_come(start, monkeypatch):
    scheduler, stepped = start(Stepped)
    monkeypatch.setattr(slots_lib, "RECENT_S", 1e9)
    future, seen = scheduler.submit(Ask(max_tokens=24)), []
    for recent_s in (1e9, 0.0, 0.0, 0.0):  # the steps of the call that waits now were chosen before

        def look(recent_s=recent_s):
            seen.append(scheduler.stats["decode_steps"])
            monkeypatch.setattr(slots_lib, "RECENT_S", recent_s)

        stepped.step(look)
    stepped.run()
    assert seen == [0, K // 4, 2 * (K // 4), 2 * (K // 4) + K] and len(future.result(WAIT_S)[0].tokens) == 24


def test_an_idle_engine_gathers_requests(start, monkeypatch):
    """It waits for as many as there are slots (test_policies.py has the rule), and they share one call."""
    monkeypatch.setattr(slots_lib, "GAP_S", WAIT_S)
    scheduler, stepped = start(Stepped)
    futures = [scheduler.submit(Ask(seed=seed, max_tokens=1)) for seed in range(3)]
    assert not stepped.entered.acquire(timeout=0.2)
    futures.append(scheduler.submit(Ask(seed=3, max_tokens=1)))
    stepped.run()
    concurrent.futures.wait(futures, WAIT_S)
    assert scheduler.stats["generate_calls"] == 1 and scheduler.stats["samples"] == 4


@pytest.mark.parametrize("at", [2, K - 1, K, 19])
def test_a_stop_string_ends_with_the_token_that_completes_it(start, alone, at):
    """The token is before, at and after the end of a call. The slot is free for another request."""
    ask = Ask(max_tokens=40, stop_texts=("never said",), proofs=True)
    (full,) = alone(ask)
    assert full.finish_reason == "length"
    byte = next(token for token in full.tokens[at:] if token < 128)  # a character of its own in any text
    text, end = chr(byte), full.tokens.index(byte) + 1
    scheduler, stepped = start(Stepped)
    future = scheduler.submit(dataclasses.replace(ask, stop_texts=("never said", text)))
    others = [scheduler.submit(Ask(seed=seed, max_tokens=12)) for seed in range(5)]
    stepped.run()
    (cut,) = future.result(WAIT_S)
    assert (cut.tokens, cut.logprobs, cut.finish_reason) == (full.tokens[:end], full.logprobs[:end], "stop")
    assert len(cut.versions) == end
    rows = [min(32, end - start) for start in range(0, end, 32)]
    assert len(cut.proofs) == sum(2 + 2 * min(128, n * MODEL.model_dim) for n in rows)
    assert [f.result(WAIT_S) for f in others] == [alone(Ask(seed=seed, max_tokens=12)) for seed in range(5)]


def test_more_stop_ids_than_the_device_checks(alone):
    (full,) = alone(Ask(max_tokens=30))
    unused = [t for t in range(200, 272) if t not in full.tokens][:20]
    stop = full.tokens[20]
    end = full.tokens.index(stop) + 1
    (cut,) = alone(Ask(max_tokens=30, stop_ids=(*unused, stop)))
    assert (cut.tokens, cut.finish_reason) == (full.tokens[:end], "stop")


class Poisoned(Stepped):
    """Reads a NaN for slot 0, as a log-probability or as the top value of a window, while a flag is set."""

    logprob = hidden = False

    def read(self, result):
        result = super().read(result)
        logprobs, bits = np.array(result.logprobs), np.array(result.proof_bits)
        assert not bits[2:].any()  # only the first two slots want proofs
        if self.logprob:
            logprobs[0, 0] = np.nan
        if self.hidden:
            bits[0, :, 5] = 0x7FC0  # NaN in bfloat16
        return result.replace(logprobs=logprobs, proof_bits=bits)


@pytest.mark.parametrize("flag", ["logprob", "hidden"])
def test_a_number_that_is_not_finite_fails_its_request_only(start, alone, flag):
    scheduler, engine = start(Poisoned)
    bad = scheduler.submit(Ask(num_samples=2, max_tokens=2 * K, proofs=True))
    good = scheduler.submit(dataclasses.replace(Ask(seed=3, max_tokens=2 * K), tokens=(1, 2, 3)))
    setattr(engine, flag, True)
    engine.run()
    with pytest.raises(scheduler_lib.Fault, match="not finite"):
        bad.result(WAIT_S)
    setattr(engine, flag, False)
    assert good.result(WAIT_S) == alone(dataclasses.replace(Ask(seed=3, max_tokens=2 * K), tokens=(1, 2, 3)))
    assert scheduler.submit(Ask()).result(WAIT_S) == alone(Ask()) and scheduler.is_alive
    assert len(scheduler.slots.running) == scheduler.num_pending == 0 and scheduler.stats["faults"] >= 1


def test_a_device_that_fails_once_fails_its_requests(start, alone, monkeypatch):
    """Its state was donated and is gone; the next request finds a new one."""
    scheduler, stepped = start(Stepped)
    running = [scheduler.submit(Ask(seed=seed, max_tokens=3 * K)) for seed in range(6)]

    def fails(*args):
        monkeypatch.undo()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    stepped.step(lambda: monkeypatch.setattr(stepped, "generate", fails))
    stepped.run()
    for future in running:
        with pytest.raises(scheduler_lib.Fault, match="RESOURCE_EXHAUSTED"):
            future.result(WAIT_S)
    assert scheduler.submit(Ask()).result(WAIT_S) == alone(Ask()) and scheduler.is_alive


def test_cancelled_messages_have_no_effect(start, alone):
    """A cancelled update is not made; it must not break the thread either."""
    scheduler, stepped = start(Stepped)
    running = scheduler.submit(Ask())

    def act():
        update, pause = scheduler.update(params(1), 1), scheduler.pause()
        assert update.cancel() and pause.cancel()
        return scheduler.resume()

    resumed = stepped.step(act)
    stepped.run()
    assert running.result(WAIT_S) == alone(Ask()) and resumed.result(WAIT_S) == 0
    assert scheduler.version == 0 and scheduler.stats["weight_updates"] == 0 and not scheduler.is_paused


def test_close_waits_for_running_requests(start, alone):
    scheduler = start()
    futures = [scheduler.submit(Ask(seed=seed, max_tokens=50)) for seed in range(6)]
    scheduler.close(drain_s=WAIT_S)
    assert [f.result(0) for f in futures] == [alone(Ask(seed=seed, max_tokens=50)) for seed in range(6)]


def random_requests(rng, count):
    """Requests of every kind: filters, biases, stops, several samples, prompts that share beginnings."""
    made = []
    for _ in range(count):
        base = TURN[: int(rng.integers(1, 60))] if rng.random() < 0.5 else rng.integers(0, 256, rng.integers(1, 40))
        proofs, delays = bool(rng.random() < 0.3), bool(rng.random() < 0.2)
        changes = {
            "logit_bias": ((65, 3.0),) if rng.random() < 0.2 else (),
            "allowed_ids": tuple(range(60, 120)) if rng.random() < 0.1 else (),
            "min_tokens": 1 if delays else 0,
        }
        made.append(
            Request(
                tuple(int(t) for t in base),
                num_samples=int(rng.integers(1, 4)),
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.choice([0.0, 0.5, 1.0, 1.3])),
                top_k=int(rng.choice([0, 0, 5])),
                top_p=float(rng.choice([1.0, 1.0, 0.8])),
                min_p=float(rng.choice([0.0, 0.0, 0.05])),
                seed=int(rng.integers(2**32)),
                stop_ids=tuple(rng.integers(0, 272, 2).tolist()),
                stop_texts=("e",) if not delays and rng.random() < 0.2 else (),
                proofs=proofs,
                **({} if proofs else changes),
                raw_logprobs=bool(rng.random() < 0.2),
                top_logprobs=int(rng.choice([0, 0, 4])),
            )
        )
    return made


def orders_agree(count, orders, config=LONG):
    """Each request alone, and the same in several random orders and paces, with aborted ones between, other steps per call, and
    midway the same weights swapped in, a pause, and in every other order a restart that resumes the requests in flight."""
    rng = np.random.default_rng(7)
    requests = random_requests(rng, count)
    quiet = scheduler_lib.Scheduler(engine(config=config), params(), 0, prefix_cache_bytes=0)
    alone = [quiet.submit(request).result(300) for request in requests]
    quiet.close()
    for order in orders:
        made = engine(config=dataclasses.replace(config, steps_per_call=(8, 3, 1, 5)[order % 4]))
        scheduler = scheduler_lib.Scheduler(made, params(), 0)
        futures, aborted, num_again = {}, [], 0
        for position, index in enumerate(rng.permutation(count).tolist()):
            futures[index] = scheduler.submit(requests[index])
            if rng.random() < 0.2:
                aborted.append(scheduler.submit(dataclasses.replace(requests[index], seed=1, max_tokens=25)))
            if rng.random() < 0.1:
                futures[index].result(300)
            if aborted and rng.random() < 0.5:
                aborted.pop().cancel()
            if position % max(count // 4, 1) == 5:
                scheduler.update(params(), 0)
                scheduler.pause()
                scheduler.resume().result(300)
            if position == count // 2 and order % 2:
                scheduler.close()
                scheduler = scheduler_lib.Scheduler(made, params(), 0)
                for again in [i for i, future in futures.items() if future.exception(300)]:
                    futures[again], num_again = scheduler.submit(requests[again]), num_again + 1
        results = [futures[index].result(300) for index in range(count)]
        scheduler.close()
        assert num_again > 0 or order % 2 == 0
        for request, a, b in zip(requests, alone, results, strict=True):
            assert a == b, request


def test_any_order_and_any_number_of_steps_gives_the_same_bits():
    orders_agree(24, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [4, 8])  # one and two sub-batches
def test_a_thousand_requests_in_any_order(num_slots):
    orders_agree(1000, range(4), dataclasses.replace(LONG, num_slots=num_slots))
