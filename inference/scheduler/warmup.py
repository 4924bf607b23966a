"""What a server runs before it takes requests, so that these do not wait for a compiler.

1. `largest` compiles the two programs that take longest, prefill and generate, side by side.
2. `requests` are run next, as any others: they compile what copies prompts into slots, for each number of slots. With
   `every_length` also prefill and copies for prompts of every length; without, the first request of each length waits.
"""

import concurrent.futures
from collections.abc import Iterator

import numpy as np

from inference.engine import cpu_sub_batches
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from models import transformer


def largest(engine: engine_lib.Engine, params: transformer.Params) -> cpu_sub_batches.State:
    """Compiles prefill and generate; returns the decode state, with no slot in use."""
    tokens_PT = np.zeros((engine.config.prefill_batch, engine.config.buckets[0]), np.int32)
    length_P = np.ones((engine.config.prefill_batch,), np.int32)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        prefilled = other.submit(engine.prefill_batch, params, tokens_PT, length_P)
        state, _ = engine.generate(params, engine.init_decode_state())  # no slot is active: not a step is run
        prefilled.result()
    return state


def requests(config: engine_lib.EngineConfig, *, every_length: bool) -> Iterator[request_lib.GenerateRequest]:
    """One request per program; each is to end before the next is sent."""
    longest = config.max_model_len - 1  # a prompt leaves room for one token
    lengths = [min(bucket, longest) for bucket in config.buckets] if every_length else [min(8, longest)]
    if every_length and longest > config.prefill_chunk:
        lengths.append(config.prefill_chunk + 1)  # by chunks
    for length in lengths:
        for size in config.insert_sizes:
            yield request_lib.GenerateRequest((0,) * length, max_tokens=1, num_samples=size, proofs=True)
