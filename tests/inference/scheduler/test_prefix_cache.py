"""The prefix cache against a search through all that was stored."""

import itertools
from typing import Any

import jax
import numpy as np

from inference.engine import decode_state
from inference.scheduler import prefix_cache

CHUNK, SLOTS = 32, 5


def prefix(size):
    cache: Any = ((np.zeros(size, np.uint8),),)
    return decode_state.Prefix(cache, np.zeros(1), np.zeros(1))


class Slots:
    """Slots whose keys and values are the tokens themselves, and a prefix cache that reads them. A token takes `size` bytes."""

    def __init__(self, max_bytes, size=1):
        self.tokens, self.num_reads, self.size = [()] * SLOTS, 0, size
        self.cache = prefix_cache.PrefixCache(CHUNK, max_bytes, self.read)

    def read(self, slot, num_tokens) -> Any:
        self.num_reads += 1
        return ((np.repeat(np.array(self.tokens[slot][:num_tokens], np.uint8), self.size),),)

    def num_found(self, tokens):
        found = self.cache.find(tokens)
        return found.num_tokens if found else 0

    def run(self, slot, tokens, num_prefilled, runs=()):
        """Runs a sequence in a slot to its end."""
        self.cache.take(slot)
        self.tokens[slot] = tokens
        self.cache.add_sequence(tokens, slot, num_prefilled, runs or [(len(tokens), 0)])


def common(a, b):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_the_longest_prefix_is_found_among_random_prompts_and_sequences(monkeypatch):
    """Few tokens and forks of stored sequences, so that many share prefixes; nothing is evicted, and few slots are used again and again."""
    monkeypatch.setattr(prefix_cache, "COPIES", 1000)
    rng = np.random.default_rng(0)
    slots, stored, asked = Slots(2**30), [], [()]
    cache = slots.cache
    lengths = {"cached": 0, "sampled": 0}
    for _ in range(600):
        base = asked[rng.integers(len(asked))]
        tokens = (*base[: rng.integers(len(base) + 1)], *rng.integers(0, 2, rng.integers(1, 40)).tolist())
        asked.append(tokens)
        expected = 0
        for other, num_prefilled in stored:
            same = common(tokens, other)
            if num_prefilled is None:
                is_same_kind = (len(tokens) <= CHUNK) == (len(other) <= CHUNK)
                ends = {same // CHUNK * CHUNK} | ({len(tokens)} if same == len(tokens) else set())
                # A whole prompt is found as such, or as whole chunks of a longer one.
                ends = {end for end in ends if end % CHUNK == 0 or end == len(other)}
                expected = max(expected, *(ends if is_same_kind else {0}), 0)
            elif (end := same // prefix_cache.BLOCK * prefix_cache.BLOCK) > num_prefilled:
                expected = max(expected, end)
        found = cache.find(tokens)
        assert (found.num_tokens if found else 0) == expected
        lengths["cached"] += expected
        if found and not found.is_prompt:
            lengths["sampled"] += 1
            # The keys are those of the sequence that was found, not of a later one in its slot.
            assert tuple(jax.tree.leaves(found.prefix)[0][:expected]) == tokens[:expected]
        if rng.integers(2):
            cache.add(tokens, prefix(1), 0)
            stored.append((tokens, None))
        else:
            num_prefilled = int(rng.integers(len(tokens) + 1))
            slots.run(rng.integers(SLOTS), tokens, num_prefilled)
            stored.append((tokens, num_prefilled))
    assert lengths["cached"] > 3000 and lengths["sampled"] > 50


def test_the_cache_stays_within_its_bytes_and_drops_what_was_used_longest_ago():
    slots = Slots(120)
    cache = slots.cache
    sequences = [(n,) * 40 for n in range(4)]
    for slot, tokens in enumerate(sequences[:3]):
        slots.run(slot, tokens, 0)
    assert cache.num_bytes == 0  # all are in their slots
    for tokens in (*sequences[:3], sequences[0]):
        assert slots.num_found(tokens) == 32
    assert cache.num_bytes == 120
    slots.run(3, sequences[3], 0)
    cache.find(sequences[3])
    assert [cache.find(tokens) is not None for tokens in sequences] == [True, False, True, True]
    slots.run(0, (*sequences[0], *(1,) * 8), 0)  # the next turn, in place of the one before
    assert slots.num_found((*sequences[0], *(1,) * 20)) == 48 and cache.num_bytes == 88
    slots.run(0, (9,) * 121, 0)
    assert cache.find((9,) * 121) is None
    slots.run(1, (9,) * 15, 0)  # not a whole block
    slots.run(2, (9,) * 40, 32)  # no block with a sampled token
    assert cache.find((9,) * 40) is None
    slots.run(0, (7,) * 40, 0)
    cache.clear()
    cache.take(0)
    assert cache.find((7,) * 40) is None and cache.num_bytes == 0
    for length in (40, 48):  # the next turn replaces the one before, although both would fit
        slots.run(0, (7,) * length, 0)
        assert slots.num_found((7,) * length) == length // 16 * 16 and cache.num_bytes == length
    slots.run(0, (5,) * 64, 0)
    cache.add((5,) * 64, prefix(1), 0)
    found = cache.find((5,) * 65)  # the prompt, of which reuse changes no bit
    assert found and found.num_tokens == 64 and found.is_prompt


def test_sequences_are_copied_out_of_reused_slots_only_while_sequences_are_continued(monkeypatch):
    """Replies that nothing continues cost few copies. After one that is lost and continued, the next ones are found."""
    monkeypatch.setattr(prefix_cache, "MAX_LOST", 6)
    slots, tokens = Slots(2**30), itertools.count()

    def run():
        slots.run(0, sequence := (next(tokens),) * 40, 0)
        return sequence

    many = [run() for _ in range(100)]
    assert slots.num_reads == prefix_cache.COPIES
    assert slots.cache.find((*many[-1], 1)) is not None and slots.num_reads == prefix_cache.COPIES + 1
    many = [run() for _ in range(100)]
    slots.cache.add((250,) * 40, prefix(1), 0)
    assert slots.num_found((250,) * 40) == 40  # a prompt: not a sign
    for slot, sequence in ((1, twice := (251,) * 40), (2, twice), (1, (252,) * 40)):
        slots.run(slot, sequence, 0)
    assert slots.num_reads == 2 * prefix_cache.COPIES + 1 and len(slots.cache._lost) == 6
    assert slots.cache.find((*many[-2], 1)) is None  # lost, but a sign
    first, _ = run(), run()
    assert slots.cache.find((*first, 1)) is not None and slots.cache.find((*twice, 1)) is not None


def test_sequences_of_an_older_version_are_found_by_requests_that_allow_it_until_it_is_too_old():
    slots = Slots(2**30)
    whole, mixed = (1,) * 70, (2,) * 70
    slots.cache.add((3,) * 40, prefix(1), 0)
    slots.run(0, whole, 0, [(70, 4)])
    slots.run(1, mixed, 0, [(20, 4), (70, 5)])

    def found(oldest, *prompts):
        pairs = [slots.cache.find(tokens, oldest) for tokens in prompts or (whole, mixed)]
        return [one and (one.num_tokens, [*one.runs]) for one in pairs]

    slots.cache.clear(4)  # version 5 replaces version 4
    assert slots.cache.find((3,) * 40, 0) is None  # a prompt is never of another version
    assert found(5) == [None, None] and slots.num_reads == 0
    slots.run(2, whole[:40], 0, [(40, 5)])
    assert found(5) == [(32, [(32, 5)]), None]  # shorter, and not of version 4
    assert found(4, mixed, mixed[:20]) == [(64, [(20, 4), (64, 5)]), (16, [(16, 4)])]
    assert found(5, mixed) == [None]
    slots.run(1, copied := (7,) * 70, 0, [(20, 4), (70, 5)])
    slots.run(4, resident := (8,) * 70, 0, [(20, 4), (70, 5)])
    assert found(4, copied) == [(64, [(20, 4), (64, 5)])]
    slots.run(3, mixed, 0, [(30, 5), (70, 6)])
    slots.cache.clear(5)
    assert found(4) == [(32, [(32, 5)]), (64, [(30, 5), (64, 6)])] and found(4, copied, resident) == [None, None]
    slots.cache.clear()
    assert found(0) == [None, None]


def test_runs_are_joined_and_cut():
    runs = [(5, 1), (9, 1), (9, 2), (20, 3), (21, 3)]
    assert prefix_cache.joined_runs(runs) == [(9, 1), (21, 3)] and prefix_cache.joined_runs([(0, 1), (2, 4)]) == [
        (2, 4)
    ]
    assert prefix_cache.cut_runs(runs, 9) == [(9, 1)] and prefix_cache.cut_runs(runs, 10) == [(9, 1), (10, 3)]
