"""The slots of an engine on a CPU, split into two sub-batches that are decoded concurrently.

1. XLA keeps both cores of a machine busy only during products with weights; attention runs on one. Two concurrent calls,
   each for half of the slots, fill each other's gaps (docs/decisions/kept.md has the times).
2. A sub-batch is a `DecodeState`. All have one shape and so one program: no bit depends on the sub-batch. Sub-batch n
   contains the slots from n times its size on.
3. Each call has its own thread, because XLA runs the calls of one thread one after the other.

Each sub-batch reads all weights, so this is for weights that fit a CPU's caches: 400 MB take 1.15 times as long in two.
"""

import concurrent.futures
from collections.abc import Callable

import numpy as np

from inference.engine import cpu_decode_attention, decode_state
from models import config as config_lib
from models import transformer

NUM = 2
MIN_SLOTS = 4  # of a sub-batch
MAX_WEIGHTS_BYTES = 2**26  # measured: a gain at 16 MB, a loss at 400 MB

State = tuple[decode_state.DecodeState, ...]  # all slots of an engine: one sub-batch, or `NUM`


def count(model: config_lib.ModelConfig, num_slots: int) -> int:
    """Returns the number of sub-batches that slots are split into: 2 for small weights on a CPU and enough slots, else 1."""
    is_small = cpu_decode_attention.fits(model) and transformer.num_bytes(model) <= MAX_WEIGHTS_BYTES
    return NUM if is_small and num_slots % NUM == 0 and num_slots >= NUM * MIN_SLOTS else 1


def at(function: Callable[..., decode_state.DecodeState], state: State, slots_N) -> State:
    """Applies `function(sub-batch, slots)` to each sub-batch that contains one of `slots_N`; returns the new state.

    The slots are renumbered from the first slot of the sub-batch. Slots of other sub-batches get a number out of range.
    """
    states, size = [], len(state[0].token)
    for n, part in enumerate(state):
        own_N = np.asarray(slots_N, np.int32) - n * size
        is_own_N = (0 <= own_N) & (own_N < size)
        states.append(function(part, np.where(is_own_N, own_N, size).astype(np.int32)) if is_own_N.any() else part)
    return tuple(states)


class ConcurrentDecoder:
    """Calls a decode function for all sub-batches of slots at the same time, each in its own thread."""

    def __init__(self):
        self._others = concurrent.futures.ThreadPoolExecutor(NUM - 1, thread_name_prefix="sub-batch")
        self._is_compiled = False

    def __call__(self, function: Callable[[decode_state.DecodeState], tuple], state: State) -> list[tuple]:
        """Calls `function` on each sub-batch; returns the results in order. The first calls are sequential: one compiles for all."""
        if not self._is_compiled:
            self._is_compiled = True
            return [function(part) for part in state]
        later = [self._others.submit(function, part) for part in state[1:]]
        return [function(state[0]), *(future.result() for future in later)]
