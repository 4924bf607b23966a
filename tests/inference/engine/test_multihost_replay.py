"""The replay of an engine's calls: what host 0 has on its devices, another host has, too, after any schedule of requests.

Both hosts are in this process, and the messages are bytes in between. So their arrays are whole, and are compared to the bit.
"""

import collections
import dataclasses
import functools
import gc
import json
import queue
import random

import jax
import numpy as np
import pytest

from inference.engine import engine as engine_lib
from inference.engine import multihost_replay, weights
from inference.scheduler import scheduler as scheduler_lib
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from tests.support import cases, tiny

MODEL = tiny.model(num_experts=4, experts_per_token=2, expert_ffn_dim=32, num_layers=1)
CONFIG = engine_lib.EngineConfig(4, 64, prefill_batch=2, steps_per_call=4, prefill_chunk=16, routed_experts=True)
PAGED = dataclasses.replace(CONFIG, num_pages=9)
WAIT_S = 300
pytestmark = pytest.mark.usefixtures("pages_of_8")
Request = scheduler_lib.GenerateRequest


class Wire:
    """Both ends of the connection of two hosts, as bytes."""

    def __init__(self):
        self.messages, self.errors = queue.SimpleQueue(), []

    def scatter(self, part):
        header, arrays = part(1)
        self.messages.put((json.dumps({"kind": "part"} | header), b"".join(array.tobytes() for array in arrays)))

    def receive(self):
        header, data = self.messages.get_nowait()
        return json.loads(header), bytearray(data)

    def report(self, kind, error, trace):
        self.errors += [error] if error else []


@functools.cache
def placed(version=0, axis="data"):
    mesh = mesh_lib.create({axis: 2}, jax.devices()[:2])
    return jax.device_put(tiny.params(MODEL, version), weights.Store(MODEL, mesh).shardings), mesh


def equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def asks(chance):
    """Requests that use each call: short and long prompts, some the beginning of others, stops that the host finds, scores."""
    for _ in range(6):
        tokens = tuple(range(7, 7 + chance.choice([3, 16, 17, 33])))
        options = {"seed": chance.randrange(99), "max_tokens": chance.randrange(1, 24), "proofs": chance.random() < 0.8}
        options |= {"num_samples": chance.randrange(1, 4), "prompt_logprobs": chance.random() < 0.3}
        yield Request(tokens, stop_ids=tuple(range(chance.choice([0, 64]))), routed_experts=True, **options)


def results(schedulers, batch):
    """The completions of each scheduler, with the experts apart."""
    futures = [[scheduler.submit(ask) for ask in batch] for scheduler in schedulers]
    for found in futures:
        completions = [completion for future in found for completion in future.result(WAIT_S)]
        yield [dataclasses.replace(one, experts=None) for one in completions], [one.experts for one in completions]


PAGES = "tensor", PAGED, "insert_pages swap_out swap_in"


@pytest.mark.parametrize(("axis", "config", "more"), cases.slow_but([("data", CONFIG, ""), PAGES], PAGES))
def test_another_host_has_the_arrays_of_the_first(axis, config, more, monkeypatch):
    """And it runs the same programs in the same order: else the hosts would wait for each other for ever."""
    programs, run = collections.defaultdict(list), engine_lib.Engine._run

    def recorded(engine, function, *args):
        programs[engine].append(getattr(function, "__name__", ""))
        return run(engine, function, *args)

    monkeypatch.setattr(engine_lib.Engine, "_run", recorded)
    wire, (old, mesh), (new, _) = Wire(), placed(0, axis), placed(1, axis)
    parts = MODEL, config, tokenizer_lib.byte_chatml(), mesh
    leading = multihost_replay.LeadingEngine(wire, *parts)
    calls, names = multihost_replay.Replay(engine_lib.Engine(*parts), old, lambda params: new), collections.Counter()
    scheduler = scheduler_lib.Scheduler(leading, old, 0, prefix_cache_bytes=2**17)  # it forgets prompts
    plain = scheduler_lib.Scheduler(engine_lib.Engine(*parts), old, 0)
    chance = random.Random(1)

    def swap(params):
        with leading.sent("swap"):
            return new

    try:
        for turn in range(4):
            if turn == 2:
                scheduler.update(swap, 1).result(WAIT_S)
                plain.update(new, 1).result(WAIT_S)
            (found, experts), (expected, same_experts) = results((scheduler, plain), list(asks(chance)))
            assert found == expected
            equal(experts, same_experts)
            scheduler.pause().result(WAIT_S)
            while not wire.messages.empty():
                header, arrays = multihost_replay.receive(wire)
                names[header["call"]] += 1
                calls.run(header, arrays)
            equal(calls._state, scheduler._state)
            assert programs[calls._engine] == programs[leading]
            for entry in scheduler.prefixes._found.values():
                equal(calls._kept[leading._number(entry.prefix.cache)], entry.prefix.cache)
            gc.collect()
            assert calls._kept.keys() - set(leading._freed) == set(leading._numbers.values())
            scheduler.resume().result(WAIT_S)
        assert calls._params is new and not wire.errors
    finally:
        scheduler.close()
        plain.close()
    all_calls = "prefill_batch prefill_chunk prompt_logprobs insert_batch deactivate top_values generate swap"
    assert names.keys() >= set(f"{all_calls} {more}".split())


def test_an_error_on_host_0_is_reported():
    wire, (_, mesh) = Wire(), placed()
    leading = multihost_replay.LeadingEngine(wire, MODEL, CONFIG, tokenizer_lib.byte_chatml(), mesh)
    with pytest.raises(RuntimeError, match="out of memory"), leading.sent("swap"):
        raise RuntimeError("out of memory")
    assert [str(error) for error in wire.errors] == ["out of memory"]
