"""The size of the decode state, for an engine whose state follows the load (inference/engine/cpu_layers.py).

1. `grown` gives the state room for new sequences, and for the next tokens of all. A state without sequences becomes as small as
   the new ones allow.
2. `shrunk` moves the sequences into fewer slots once these were enough for two calls: a copy costs a tenth of a call.

Sequences that ended are copied out of slots that are given up or reused (prefix_cache.py).
"""

from inference.engine import engine as engine_lib
from inference.scheduler import prefix_cache
from inference.scheduler import slots as slots_lib


class StateSize:
    """Chooses the sizes of the decode state of one scheduler, in its thread. States of a fixed size stay as they are."""

    def __init__(self, engine: engine_lib.Engine, slots: slots_lib.Slots, prefixes: prefix_cache.PrefixCache):
        self._engine, self._slots, self._prefixes = engine, slots, prefixes
        self._was_enough = False  # True if fewer slots were enough for the last call

    def grown(self, state: engine_lib.State, num_new: int = 0) -> engine_lib.State:
        """Returns a state with room for all running sequences, `num_new` of which are not inserted yet. Deletes `state` if it returns another one."""
        running, config = self._slots.running, self._engine.config
        num_tokens = max(len(one.group.request.tokens) + len(one.completion.tokens) for _, one in running)
        num_tokens = min(num_tokens + config.steps_per_call, config.capacity)
        old, new = self._engine.sizes(state), self._engine.fitting(running[-1][0] + 1, num_tokens)
        if num_new == len(running) and new < old:
            for slot in range(old[0]):
                self._prefixes.take(slot)
            return self._engine.resized(state, (), new)
        if new[0] > old[0] or new[1] > old[1]:
            return self._engine.resized(state, range(old[0]), (max(old[0], new[0]), max(old[1], new[1])))
        return state

    def shrunk(self, state: engine_lib.State) -> engine_lib.State:
        """Returns a state of fewer slots with the same sequences, if fewer were enough in two calls in a row. Deletes `state` if it returns another one."""
        running, (num_slots, num_positions) = self._slots.running, self._engine.sizes(state)
        fewer, _ = self._engine.fitting(len(running), 1)
        was_enough, self._was_enough = self._was_enough, fewer < num_slots
        if not (was_enough and self._was_enough):
            return state
        moved = [*range(fewer)]
        for slot, _ in running:
            if slot >= fewer:
                to = self._slots.free[0]
                self._prefixes.take(to)
                self._slots.move(slot, to)
                moved[to] = slot
        for slot in range(fewer, num_slots):
            self._prefixes.take(slot)
        self._was_enough = False
        return self._engine.resized(state, moved, (fewer, num_positions))
