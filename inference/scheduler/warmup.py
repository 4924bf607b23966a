"""Warm-up of a server: compiles programs before requests come, so that none waits for the compiler.

1. `compile_largest` compiles the two programs that take longest, prefill and decode, at the same time.
2. `requests` are then run as any others: they compile the copies of prompts into slots, and prefill for further lengths.
"""

import concurrent.futures
from collections.abc import Iterator

import numpy as np

from inference.adapters import adapter_set
from inference.engine import cpu_sub_batches
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from models import transformer


def compile_largest(engine: engine_lib.Engine, params: transformer.Params) -> cpu_sub_batches.State:
    """Compiles the slowest programs (prefill of the shortest bucket, and decode); returns a decode state with no slot in use.

    Where the state follows the load, it has one slot, and no program is slow.
    """
    if engine.follows_load:
        return engine.init_decode_state()
    tokens_PT = np.zeros((engine.config.prefill_batch, engine.config.buckets[0]), np.int32)
    length_P = np.ones((engine.config.prefill_batch,), np.int32)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        chosen = engine.choose(params, [adapter_set.NONE] * len(length_P))
        prefilled = other.submit(engine.prefill_batch, chosen, tokens_PT, length_P)
        chosen = engine.choose(params, [adapter_set.NONE] * engine.config.num_slots)
        state, _ = engine.generate(chosen, engine.init_decode_state())  # no slot is active, so no step runs
        prefilled.result()
    return state


def requests(engine: engine_lib.Engine, *, every_length: bool) -> Iterator[request_lib.GenerateRequest]:
    """Yields warm-up requests, one per program that the engine is to compile; each must end before the next is sent."""
    config = engine.config
    longest = config.max_model_len - 1  # leaves room for one new token
    shortest = 64 if engine.follows_load else 8
    lengths = [min(bucket, longest) for bucket in (config.buckets if every_length else [shortest])]
    if every_length and longest > config.prefill_chunk:
        for count in config.key_counts[:-1]:  # after it, a short chunk and a whole one
            lengths += [count + 1, min(count + config.prefill_chunk, longest)]
    for length in dict.fromkeys(lengths):
        # With long prompts in all slots, a state that follows the load would take the memory of its whole capacity.
        is_any_size = not engine.follows_load or (every_length and length == lengths[0])
        for size in engine.slot_sizes if is_any_size else (1,):
            yield request_lib.GenerateRequest((0,) * length, max_tokens=1, num_samples=size, proofs=True)
