"""Slots in two lanes: how an engine on a CPU decodes, by two calls side by side.

1. XLA keeps both cores of a machine busy only while it multiplies by weights. What lies between, above all the attention of each
   sequence over its own keys, it runs on one. Two calls, each for half of the slots, fill each other's gaps: a step of 64
   slots of the 4 M model takes 5.2 ms instead of 6.2, of 16 slots 2.1 instead of 2.3 (2 cores, in turns).
2. A lane is a `DecodeState` of its own. All have one shape and so run one program: no bit depends on the lane, and a lane of 32
   slots gives the bits of an engine of 32. Lane n holds the slots from n times its size on.
3. Each lane's call comes from a thread of its own: what one thread asks for, XLA runs one after the other.

Each lane reads the weights for itself, so this is for weights that a CPU's caches hold. With 400 MB of them, 32 slots take 1.15
times as long in two lanes as in one, 8 slots 1.4 times.
"""

import concurrent.futures
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from inference.engine import cpu_decode_attention
from inference.engine import decode_state as state_lib
from models import config as config_lib
from models import transformer

NUM = 2
MIN_SLOTS = 4  # of a lane
MAX_WEIGHTS_BYTES = 2**26  # 16 MB were measured to gain, 400 MB to lose


@struct.dataclass
class SubBatches:
    """The decode states of an engine's lanes."""

    states: tuple[state_lib.DecodeState, ...]

    @property
    def size(self) -> int:
        """Slots of a lane."""
        return len(self.states[0].token)


State = state_lib.DecodeState | SubBatches  # of all slots of an engine


def count(model: config_lib.ModelConfig, num_slots: int) -> int:
    """How many lanes so many slots are decoded in."""
    is_small = cpu_decode_attention.fits(model) and transformer.num_bytes(model) <= MAX_WEIGHTS_BYTES
    return NUM if is_small and num_slots % NUM == 0 and num_slots >= NUM * MIN_SLOTS else 1


def each(function: Callable[[state_lib.DecodeState], state_lib.DecodeState], state: State) -> State:
    return SubBatches(tuple(map(function, state.states))) if isinstance(state, SubBatches) else function(state)


def at(
    function: Callable[[state_lib.DecodeState, np.ndarray], state_lib.DecodeState], state: State, slots_N: Sequence[int]
) -> State:
    """Every lane with its part of the slots; the others are those out of range in it. A lane without any stays as it is."""
    if not isinstance(state, SubBatches):
        return function(state, slots_N)
    rows_LN = [_rows(state, lane, slots_N) for lane in range(len(state.states))]
    pairs = zip(state.states, rows_LN, strict=True)
    return SubBatches(tuple(function(one, rows) if (rows < state.size).any() else one for one, rows in pairs))


def gather(
    function: Callable[[state_lib.DecodeState, np.ndarray], tuple[jax.Array, ...]], state: State, slots_N: Sequence[int]
) -> tuple[jax.Array, ...]:
    """What `function` gives row by row [N, ...] of each slot's own lane."""
    if not isinstance(state, SubBatches):
        return function(state, slots_N)
    lane_N = np.asarray(slots_N) // state.size
    got = [function(one, np.asarray(slots_N) % state.size) for one in state.states]
    return tuple(jnp.stack(parts)[lane_N, np.arange(len(lane_N))] for parts in zip(*got, strict=True))


class ConcurrentDecoder:
    """Calls a function of one lane for all of them at once."""

    def __init__(self):
        self._others = concurrent.futures.ThreadPoolExecutor(NUM - 1, thread_name_prefix="lane")
        self._is_compiled = False

    def __call__(self, function: Callable[[state_lib.DecodeState], tuple], lanes: SubBatches) -> list[tuple]:
        first, *rest = lanes.states
        if not self._is_compiled:  # at once, each thread would compile it for itself
            results = [function(one) for one in lanes.states]
            self._is_compiled = True
            return results
        later = [self._others.submit(function, one) for one in rest]
        return [function(first), *(future.result() for future in later)]


def _rows(state: SubBatches, lane: int, slots_N: Sequence[int]) -> np.ndarray:
    rows_N = np.asarray(slots_N, np.int32) - lane * state.size
    return np.where((0 <= rows_N) & (rows_N < state.size), rows_N, state.size).astype(np.int32)
