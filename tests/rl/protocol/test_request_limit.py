"""Adaptive concurrency against simulated inference servers, whose KV caches overflow, and the best fixed limit."""

import dataclasses

import numpy as np
import pytest

from rl.protocol import registry, request_limit

PROMPT, MAX_TOKENS, POLL_S = 200, 8000, 1.0
WATERMARK = 0.95  # of the KV cache, above which no request is admitted


class Server:
    """A server with room for `kv_tokens`. Its requests share `peak` tokens/s, each gets at most `each`; prompts cost a tenth.

    If the keys and values do not fit, the youngest requests are preempted. They start again with a prefill of all their tokens, once
    there is room, as in vLLM.
    """

    def __init__(self, kv_tokens, lengths, *, peak=4000.0, each=40.0):
        self.kv_tokens, self.lengths, self.peak, self.each = kv_tokens, lengths, peak, each
        # Tokens made and to be made of the running requests, the oldest first.
        self.done, self.total = np.zeros(0), np.zeros(0)
        self.lost = []  # preempted requests: total, made
        self.prefill = 0.0  # tokens of decoding that prefills cost, in the next poll
        self.waiting = 0
        self.now_s, self.tokens, self.preemptions, self.finished = 0.0, 0.0, 0, 0

    def step(self, limit):
        """Lets one poll pass, and admits requests up to `limit`; there are always more."""
        self.now_s += POLL_S
        spent = min(self.prefill, self.peak * POLL_S)
        self.prefill -= spent
        if len(self.done):
            most = min(self.each * POLL_S, (self.peak * POLL_S - spent) / len(self.done))
            made = np.minimum(most, self.total - self.done)
            self.tokens += float(made.sum())
            self.done = self.done + made
            is_done = self.done >= self.total
            self.finished += int(is_done.sum())
            self.keep(~is_done)
        while self.used() > 1:
            self.preemptions += 1
            self.lost.append((self.total[-1], self.done[-1]))
            self.keep(slice(-1))
        new, used = [], self.used()
        while len(self.done) + len(new) < limit and used < WATERMARK:
            new.append(self.lost.pop() if self.lost else (self.lengths(self.now_s), 0.0))
            used += (PROMPT + new[-1][1]) / self.kv_tokens
        self.waiting = max(0, limit - len(self.done) - len(new))
        if new:
            self.total = np.append(self.total, [total for total, _ in new])
            self.done = np.append(self.done, [made for _, made in new])
            self.prefill += sum(PROMPT + made for _, made in new) / 10

    def keep(self, which):
        self.done, self.total = self.done[which], self.total[which]

    def used(self):
        return float((self.done + PROMPT).sum()) / self.kv_tokens

    def observed(self, state):
        counts = {"preemptions": self.preemptions, "finished": self.finished}
        load = registry.Load(len(self.done), self.waiting, min(1.0, self.used()), **counts)
        return request_limit.observe(state, load, self.now_s)


def spread(draw, mean, sigma=0.5):
    """Lengths of a mean that may depend on the time, with a lognormal spread."""
    of = mean if callable(mean) else lambda now_s: mean
    return lambda now_s: min(MAX_TOKENS, of(now_s) * draw.lognormal(-(sigma**2) / 2, sigma))


KINDS = {
    "steady": lambda draw: spread(draw, 1200.0),
    "step": lambda draw: spread(draw, lambda now_s: 600.0 if now_s < 600 else 2400.0),
    "step down": lambda draw: spread(draw, lambda now_s: 2400.0 if now_s < 600 else 600.0),
    "ramp": lambda draw: spread(draw, lambda now_s: 400.0 + 2.0 * now_s),
    "heavy tail": lambda draw: spread(draw, 1200.0, sigma=1.5),
}


def make(kind, peak, kv_tokens=200_000):
    return Server(kv_tokens, KINDS[kind](np.random.default_rng(0)), peak=peak)


def fixed(server, limit, seconds=1200, warm=0):
    for i in range(seconds):
        if i == warm:
            server.tokens = 0.0
        server.step(limit)
    return server.tokens


def adaptive(server, seconds=1200, warm=0):
    state, limits = request_limit.start(server.kv_tokens / (PROMPT + MAX_TOKENS)), []
    for i in range(seconds):
        if i == warm:
            server.tokens = 0.0
        server.step(int(state.limit))
        state = server.observed(state)
        limits.append(int(state.limit))
    return server.tokens, limits


@pytest.mark.parametrize("peak", [4000.0, 16000.0], ids=["its speed", "its cache"])
@pytest.mark.parametrize("kind", KINDS)
def test_throughput_is_within_a_tenth_of_the_best_fixed_limit(kind, peak):
    """The bound is the speed of the server, or its KV cache."""
    best = max(fixed(make(kind, peak), limit, warm=300) for limit in (48, 64, 80, 100, 140, 170, 200, 240, 300))
    found, _ = adaptive(make(kind, peak), warm=300)
    assert found >= 0.9 * best, (found, best)


def survives(seed):
    """Random sizes, lengths, and speeds, with a restart: the limit never collapses."""
    draw = np.random.default_rng(seed)
    kv_tokens, mean, sigma = draw.uniform(3e4, 4e5), draw.uniform(200, 3000), draw.uniform(0, 1.5)
    kinds = [*KINDS.values(), lambda draw: spread(draw, mean, sigma)]
    server = Server(kv_tokens, kinds[draw.integers(len(kinds))](draw), each=draw.uniform(10, 100))
    state, low, restart_s = request_limit.start(int(kv_tokens) / (PROMPT + MAX_TOKENS)), 0, draw.integers(100, 500)
    for i in range(500):
        if i == restart_s:
            fresh = Server(kv_tokens, server.lengths, each=server.each)
            fresh.now_s, server = server.now_s, fresh
        server.step(int(state.limit))
        if draw.random() < 0.95:  # else the report is lost
            state = server.observed(state)
        limit = int(state.limit)
        assert 1 <= limit <= request_limit.MAX_LIMIT
        fits = 0.5 * kv_tokens / (PROMPT + MAX_TOKENS)  # half of those that fit at any lengths
        low = low + 1 if limit < min(fits, 1024) else 0
        assert low < 30, (seed, i, limit, fits)


@pytest.mark.parametrize("block", range(2))
def test_no_random_trace_ends_in_a_collapse(block):
    for seed in range(20 * block, 20 * (block + 1)):
        survives(seed)


@pytest.mark.slow
def test_none_of_a_thousand_random_traces_ends_in_a_collapse():
    for seed in range(1000):
        survives(seed)


def test_each_rule_of_the_controller():
    quiet = registry.Load(10, 0, 0.5, preemptions=5, finished=100)

    def after(state=None, now_s=1.0, **changes):
        first = request_limit.observe(state or request_limit.State(10.0), quiet, 0.0)
        return request_limit.observe(first, dataclasses.replace(quiet, **{"finished": 110} | changes), now_s)

    def limit(*args, **changes):
        return int(after(*args, **changes).limit)

    assert limit(finished=2**53) == request_limit.MAX_LIMIT  # a false report
    assert limit() == 19 and limit(kv_used=0.1) == 40 and limit(kv_used=0.8) == 15  # a turnover
    for change in ({"finished": 100}, {"waiting": 1}, {"kv_used": 0.95}, {"running": 8}, {"now_s": 16.0}):
        assert limit(**change) == 10, change
    assert limit(request_limit.State(100.0), kv_used=1.0, running=100, finished=100) == 98
    state = after(preemptions=6)
    assert int(state.limit) == 9 and state.cooldown == request_limit.PATIENCE
    again = dataclasses.replace(quiet, running=8, preemptions=7, finished=110)
    assert request_limit.observe(state, again, 2.0).limit == pytest.approx(10 * 0.97 * 0.95)
    drains = dataclasses.replace(again, preemptions=6, kv_used=1.0)
    assert int(request_limit.observe(state, drains, 2.0).limit) == 9
    assert limit(preemptions=0, finished=0) == 10  # a restart
    state = request_limit.State(10.0)
    for i in range(request_limit.PATIENCE):
        assert state.limit == 10
        state = request_limit.observe(state, dataclasses.replace(quiet, waiting=6), float(i))
    assert int(state.limit) == 9
    assert request_limit.start(10**7).limit == 1024 and request_limit.start(0.1).limit == 1
