"""Requests after a warm-up wait for no compiler."""

import jax
import numpy as np
import pytest

from inference.engine import compiled_steps, weights
from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import startup
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from tests.support import cases, tiny

MODEL = tiny.model(num_layers=1, head_dim=24)  # of its own: nothing is compiled for it yet
CONFIG = engine_lib.EngineConfig(num_slots=10, max_model_len=128, prefill_batch=2, steps_per_call=3, prefill_chunk=32)
PROGRAMS = ("prefill", "prefill_chunk", "_insert_entry", "_insert_rows", "generate", "deactivate")
WAIT_S = 300


def num_compiled():
    return {name: getattr(compiled_steps, name)._cache_size() for name in PROGRAMS}


@pytest.mark.parametrize("every_length", cases.slow_but([False, True], False))
def test_no_request_compiles_after_a_warm_up(every_length, caplog):
    mesh = mesh_lib.create({}, devices=jax.local_devices()[:1])
    params = weights.Store(MODEL, mesh).load(tiny.params(MODEL, 0))
    engine = engine_lib.Engine(MODEL, CONFIG, tokenizer_lib.byte_chatml(), mesh)
    with jax.log_compiles():
        scheduler = scheduler_lib.Scheduler(engine, params, 0, state=startup.compile_largest(engine, params))
        for request in startup.warmup_requests(engine, every_length=every_length):
            scheduler.submit(request).result(WAIT_S)
    compiled = sum("Compiling jit(generate)" in message for message in caplog.messages)
    assert compiled == (not every_length)  # once, though the first state comes from another program
    before = num_compiled()
    rng = np.random.default_rng(0)
    lengths = (1, 9, 16, 17, 32, 33, 65, 127) if every_length else (1, 9, 16)
    for length in lengths:
        for num_samples in (1, 2, 3, 9, 10):
            prompt = tuple(rng.integers(0, 256, length).tolist())
            scheduler.submit(scheduler_lib.GenerateRequest(prompt, num_samples, 5)).result(WAIT_S)
    assert num_compiled() == before
    longer = scheduler_lib.GenerateRequest((1,) * 20)
    scheduler.submit(longer).result(WAIT_S)
    scheduler.close()
    assert (num_compiled()["prefill"] > before["prefill"]) == (not every_length)
