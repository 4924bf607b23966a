"""The scheduler's policies without a thread, a clock, or a device: when to start, how many steps to run, and which tokens are likely."""

import concurrent.futures

import numpy as np

from inference.engine import request as request_lib
from inference.scheduler import sequence as sequence_lib
from inference.scheduler import slots as slots_lib


def group(**changes):
    request = request_lib.GenerateRequest((1, 2, 3), **changes)
    return sequence_lib.SequenceGroup(request, concurrent.futures.Future(), None, 0.0)


def test_an_arrival_window_ends_full_late_or_after_a_gap():
    window = slots_lib.ArrivalWindow(num_slots=4)
    assert not window.is_next_likely(0.0)
    assert [window.add(1, 10.0), window.add(2, 10.01)] == [slots_lib.GAP_S] * 2
    assert window.add(1, 10.02) == 0.0  # four samples fill four slots
    window.reopen()
    assert window.add(1, 20.0) == slots_lib.GAP_S and window.add(1, 20.0 + slots_lib.GATHER_S) == 0.0
    last_s = 20.0 + slots_lib.GATHER_S
    assert window.is_next_likely(last_s + 0.99 * slots_lib.RECENT_S)
    assert not window.is_next_likely(last_s + 1.01 * slots_lib.RECENT_S)


def test_the_likeliest_tokens_are_those_that_can_be_drawn():
    one = group(top_logprobs=3).start_next(None)
    ids = np.array([[4, 5, 6, 7], [8, 9, 10, 11]])
    logps = np.array([[-0.1, -2.5, -np.inf, -np.inf], [-1.0, -1.5, -2.0, -2.5]])  # a filter left two in the first row
    one.append_top(ids, logps)
    assert one.completion.top == [[(4, -0.1), (5, -2.5)], [(8, -1.0), (9, -1.5), (10, -2.0)]]


def test_steps_of_the_next_call():
    slots = slots_lib.Slots(3, max_model_len=20)
    for slot, max_tokens in ((0, 9), (2, 6)):
        slots.put(slot, group(max_tokens=max_tokens).start_next(None))

    def steps(waiting, likely):
        return slots.num_steps(8, is_any_waiting=waiting, is_request_likely=likely)

    assert [steps(False, False), steps(True, False), steps(True, True), steps(False, True)] == [8, 6, 6, 2]
    slots.put(1, group(max_tokens=1000).start_next(None))  # no slot is free: no reason for a short call
    assert steps(False, True) == 8
    slots.release(2)
    assert steps(True, False) == 8 and slots.free == [2]
    slots.put(2, group(max_tokens=1).start_next(None))
    assert steps(True, False) == 1
