"""The number of samples that one inference server should run: a pure state machine on the reports of the server.

More samples use a server better until their keys and values no longer fit: then it preempts some, and does their work again.
After PRIME-RL's controller, per server and poll:
1. The limit grows per turnover of the running samples by the factor that would fill the KV cache to `TARGET`, from `GROWTH` to
   `FAST_GROWTH` (each finished sample multiplies it by factor^(1 / running)), while the cache is below `GROW_BELOW`, no sample
   waits, and the limit is nearly used. A failed sample is not a finished one.
2. A KV cache above `DRAIN_ABOVE` lowers the limit to the number of samples that would fill it to `TARGET`.
3. A preemption cuts the limit by `PREEMPTED`, and a long queue over `PATIENCE` polls by `QUEUED`. After a cut, `PATIENCE` polls pass
   until the next one, unless a preemption shows that it was not enough: that one cuts by `REPEATED`.
4. After `BLIND_S` seconds without a report the limit stays as it is until there is another one.

PRIME-RL's levels (0.6, 0.8, 0.9, 0.7), growth (1.25) and cuts (0.8, 0.5) reached 0.69 to 0.77 of the best fixed limit where the cache
is the bound, in the simulation of tests/rl/protocol/test_request_limit.py; these reach 0.93 to 1.07.
"""

import dataclasses

from rl.protocol import registry

GROWTH, FAST_GROWTH, GROW_BELOW, USED = 1.5, 4.0, 0.95, 0.9
DRAIN_ABOVE, TARGET = 0.99, 0.98
PREEMPTED, QUEUED, REPEATED = 0.97, 0.9, 0.95
LONG_QUEUE = 0.5  # waiting samples per running one
PATIENCE = 6  # polls
BLIND_S = 15.0
MAX_LIMIT = 1024.0


@dataclasses.dataclass(frozen=True)
class State:
    """The limit of one server, and the state of its controller."""

    limit: float
    last: registry.Load | None = None
    last_s: float = 0.0  # when it was reported
    num_queued: int = 0  # polls in a row with a long queue
    cooldown: int = 0  # polls until the next cut


def start(capacity: float) -> State:
    """Returns the first state of a server's limit: `capacity` samples, as many as fit in its KV cache at their greatest length."""
    return State(min(max(1.0, capacity), MAX_LIMIT))


def observe(state: State, load: registry.Load, now_s: float, blind_s: float = BLIND_S) -> State:
    """Returns the state after a report: run `int(state.limit)` samples. It grows only if the last report is less than `blind_s` seconds old."""
    last = state.last or load
    # A server that restarted counts from 0 again.
    is_new = load.finished < last.finished or load.preemptions < last.preemptions
    num_finished = 0 if is_new else load.finished - last.finished
    was_preempted = not is_new and load.preemptions > last.preemptions
    is_blind = state.last is None or now_s - state.last_s > blind_s
    running, limit = max(1, load.running), state.limit
    num_queued = state.num_queued + 1 if load.waiting > LONG_QUEUE * running else 0
    cut = 1.0
    if was_preempted:
        cut = REPEATED if state.cooldown else PREEMPTED
    elif not state.cooldown and load.kv_used > DRAIN_ABOVE:
        cut = min(1.0, running * TARGET / load.kv_used / limit)
    elif not state.cooldown and num_queued >= PATIENCE:
        cut = QUEUED
    grows = cut == 1 and not is_blind and not state.cooldown
    if grows and load.kv_used < GROW_BELOW and not load.waiting and running >= USED * int(limit):
        growth = min(max(GROWTH, TARGET / max(load.kv_used, 0.01)), FAST_GROWTH)
        limit *= growth ** min(num_finished / running, 20.0)  # more are a false report
    limit = min(max(1.0, limit * cut), MAX_LIMIT)
    is_cut = cut < 1
    cooldown = PATIENCE if is_cut else max(0, state.cooldown - 1)
    return State(limit, load, now_s, 0 if is_cut else num_queued, cooldown)
