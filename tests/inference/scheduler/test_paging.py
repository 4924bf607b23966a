"""Random schedules in a cache with few pages: a sample's tokens, log-probabilities, and proofs are those of the same sample alone."""

import concurrent.futures
import dataclasses
import functools
import random
import time
import types

import jax
import numpy as np
import pytest

from inference.engine import engine as engine_lib
from inference.scheduler import paging, sequence, slots
from inference.scheduler import scheduler as scheduler_lib
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from tests.support import engines, tiny

MODEL = tiny.model(scan_layers=True)
CONFIG = engine_lib.EngineConfig(
    num_slots=4, max_model_len=64, prefill_batch=2, steps_per_call=4, prefill_chunk=16, num_pages=9
)
TEXT = b"the quick brown fox jumps over the lazy dog"
Ask = functools.partial(scheduler_lib.GenerateRequest, proofs=True)
ASKS = [
    Ask(tuple(TEXT[:length]), seed=seed, max_tokens=most, temperature=temperature, num_samples=num)
    for seed, (length, most, temperature, num) in enumerate(
        # Prompts of one page or several, on a border and next to it, in one chunk or several, alone or in groups.
        [
            (1, 63, 1, 1),
            (3, 20, 1, 3),
            (8, 9, 1, 2),
            (9, 30, 0.7, 2),
            (16, 40, 1, 3),
            (17, 12, 1, 2),
            (33, 31, 1, 2),
            (41, 5, 0, 1),
        ]
    )
]
WAIT_S = 300
pytestmark = pytest.mark.usefixtures("pages_of_8")


@functools.cache
def params(version=0):
    return jax.device_put(tiny.params(MODEL, 100 + version))


@functools.cache
def engine(num_pages=CONFIG.num_pages):
    config = dataclasses.replace(CONFIG, num_pages=num_pages)
    return engine_lib.Engine(MODEL, config, tokenizer_lib.byte_chatml())


@pytest.fixture
def start():
    started = []

    def start(num_pages=CONFIG.num_pages):
        started.append(scheduler_lib.Scheduler(engine(num_pages), params(), 0))
        return started[-1]

    yield start
    for scheduler in started:
        scheduler.close()


def results(completions):
    return [(c.tokens, c.logprobs, c.proofs, c.versions, c.finish_reason) for c in completions]


@functools.cache
def alone(num):
    """The samples of a request, each with an engine for itself and as many pages as the slots could fill."""
    seeds = range(ASKS[num].seed, ASKS[num].seed + ASKS[num].num_samples)
    asks = [dataclasses.replace(ASKS[num], num_samples=1, seed=seed) for seed in seeds]
    return [one for ask in asks for one in results(engines.complete(engine(32), params(), [ask])[0])]


def run(scheduler, seed):
    """One schedule: requests that come while others run, and some that are cancelled; then no page is in use."""
    rng, futures = random.Random(seed), []
    for _ in range(rng.randint(3, 7)):
        num = rng.randrange(len(ASKS))
        futures.append((num, scheduler.submit(ASKS[num])))
        if rng.random() < 0.4:
            time.sleep(rng.random() * 0.01)
        if rng.random() < 0.2:
            rng.choice(futures)[1].cancel()
    for num, future in futures:
        if not future.cancelled():
            assert results(future.result(WAIT_S)) == alone(num), (seed, num)
    for _ in range(2):  # after a turn of the thread, which drops the cancelled ones
        scheduler.pause().result(WAIT_S)
    assert not scheduler.paging and scheduler.paging.pages.usage() == 0 and not scheduler.slots.running
    scheduler.resume().result(WAIT_S)


def test_random_schedules(start):
    scheduler = start()
    for seed in range(8):
        run(scheduler, seed)
    assert scheduler.stats["num_preemptions"] > 8


@pytest.mark.slow
def test_a_thousand_random_schedules(start):
    scheduler = start()
    for seed in range(100, 1100):
        run(scheduler, seed)
    assert scheduler.stats["num_preemptions"] > 1000


def test_the_youngest_leave_first_and_the_oldest_return_first():
    """Three prompts take two of six pages each, and decode calls have 8 steps. The engine is a stand-in that records swaps."""
    config, swapped = dataclasses.replace(CONFIG, max_model_len=48, num_pages=6), []
    swap = {"swap_out": lambda state, slot, pages: len(pages), "swap_in": lambda state, *call: swapped.append(call)}
    all_slots = slots.Slots(config.num_slots, config.max_model_len)
    table = paging.Paging(
        types.SimpleNamespace(config=config, mesh=mesh_lib.create({}, jax.devices()[:1]), **swap), all_slots
    )

    def add(slot, begun_s):
        group = sequence.SequenceGroup(Ask((slot,) * 16, max_tokens=32), concurrent.futures.Future(), None, 0.0)
        table.admit(slot, group)
        all_slots.put(slot, one := group.start_next(None))
        one.begun_s = begun_s
        return one

    middle, youngest, oldest = add(0, 2.0), add(1, 3.0), add(2, 1.0)
    assert table.make_room((), 8) == [1] and youngest.group.num_running == 0  # the others have three pages each
    for one in (oldest, middle):
        one.completion.tokens += [0] * 8
    assert table.make_room((), 8) == [0] and len(table.pages.pages(2)) == 4
    table.resume(())
    assert not swapped and table.groups == [middle.group, youngest.group]
    table.pages.release(2)
    all_slots.release(2)
    assert not table.fits(oldest.group)  # first those that wait
    table.resume(())
    ((slot, pages, num_copied),) = swapped  # for the other, the next call may lack a page
    assert (slot, len(pages), num_copied) == (0, 3, 3) and middle.group.num_running == 1
    youngest.group.future.cancel()
    table.pages.release(0)
    assert table.drop_done() == 1 and not table and table.fits(oldest.group)


def test_results_are_those_of_whole_slots(start):
    """Attention of the same shape, of whole slots: other programs, so to rounding."""
    dense, paged = start(0), start()
    for ask in ASKS:
        wanted, found = (scheduler.submit(ask).result(WAIT_S) for scheduler in (dense, paged))
        for a, b in zip(wanted, found, strict=True):
            assert a.tokens == b.tokens
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)  # float32, sums of up to 272 terms


def test_samples_share_the_full_pages_of_their_prompt(start, monkeypatch):
    """The second and third sample of a prompt with 17 tokens copy one page of three."""
    wanted, copied = alone(5), []
    insert = engine_lib.Engine.insert_pages
    monkeypatch.setattr(engine_lib.Engine, "insert_pages", lambda *args: copied.append(args[-1]) or insert(*args))
    scheduler = start(32)
    found = scheduler.submit(dataclasses.replace(ASKS[5], num_samples=3)).result(WAIT_S)
    assert results(found)[:2] == wanted
    assert sorted(number for copies in copied for _, number, _ in copies) == [0, 1, 2, 2, 2]


def test_preempted_sequences_end_with_their_request(start, monkeypatch):
    """A cancellation, or weights of another epoch, end them. After a failure of the device, all pages are free, too."""
    scheduler = start()
    futures = [scheduler.submit(dataclasses.replace(ASKS[0], seed=seed)) for seed in range(4)]
    deadline = time.monotonic() + WAIT_S
    while not scheduler.paging and time.monotonic() < deadline:
        time.sleep(0.001)
    scheduler.pause().result(WAIT_S)
    groups = scheduler.paging.groups
    assert groups and not {*groups} & {*scheduler.slots.groups}
    groups[0].future.cancel()
    scheduler.update(params(1), 0, epoch=1).result(WAIT_S)
    for future in futures:
        assert future.cancelled() or isinstance(future.exception(WAIT_S), scheduler_lib.VersionGone)
    scheduler.resume().result(WAIT_S)
    scheduler.pause().result(WAIT_S)
    assert not scheduler.paging and scheduler.paging.pages.usage() == 0

    def fail(*args):
        raise jax.errors.JaxRuntimeError("lost")

    scheduler.resume().result(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler._engine, "generate", fail)
        with pytest.raises(scheduler_lib.Fault):
            scheduler.submit(ASKS[0]).result(WAIT_S)
    scheduler.update(params(), 0, epoch=2).result(WAIT_S)
    assert results(scheduler.submit(ASKS[0]).result(WAIT_S)) == alone(0)
