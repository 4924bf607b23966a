"""The load of a server, by which an orchestrator limits its requests."""

import types

import pytest

from inference.engine import engine as engine_lib
from inference.scheduler import slots as slots_lib
from inference.server import inference_server
from rl.protocol import registry


@pytest.mark.parametrize(("num_pages", "capacity"), [(0, 8), (13, 3), (40, 8)])  # a sequence of 256 tokens fills four
def test_the_load_counts_preemptions_and_the_longest_sequences_that_fit(num_pages, capacity):
    config = engine_lib.EngineConfig(8, 256, 4, 8, prefill_chunk=128, num_pages=num_pages)
    slots = slots_lib.Slots(config.num_slots, config.max_model_len, config.num_positions)
    scheduler = types.SimpleNamespace(
        slots=slots, num_waiting=3, stats={"samples": 5, "num_preemptions": 2, "tokens": 0}
    )
    engine = types.SimpleNamespace(config=config)
    server = inference_server.InferenceServer(None, scheduler, engine, None)
    assert registry.Load(**server.load()) == registry.Load(waiting=3, preemptions=2, finished=5, capacity=capacity)
