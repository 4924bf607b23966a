"""The prefix cache against a search through all that was stored."""

import itertools

import numpy as np

from inference.engine import decode_state
from inference.scheduler import prefix_cache

CHUNK = 32


def prefix(size):
    return decode_state.Prefix(((np.zeros(size, np.uint8),),), np.zeros(1), np.zeros(1))


def common(a, b):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_the_longest_prefix_is_found_among_random_prompts_and_sequences():
    """Few tokens and forks of stored sequences, so that many share prefixes; nothing is evicted."""
    rng = np.random.default_rng(0)
    cache, stored, asked = prefix_cache.PrefixCache(CHUNK, 2**30), [], [()]
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
        lengths["sampled"] += bool(found and not found.is_prompt)
        if rng.integers(2):
            cache.add(tokens, prefix(1), 0)
            stored.append((tokens, None))
        else:
            num_prefilled = int(rng.integers(len(tokens) + 1))
            cache.add_sequence(tokens, prefix(1), num_prefilled)
            stored.append((tokens, num_prefilled))
    assert lengths["cached"] > 3000 and lengths["sampled"] > 50


def test_the_cache_stays_within_its_bytes_and_drops_what_was_used_longest_ago():
    cache = prefix_cache.PrefixCache(CHUNK, 30)
    sequences = [(n,) * 40 for n in range(4)]
    for tokens in sequences[:3]:
        cache.add_sequence(tokens, prefix(10), 0)
    assert cache.find(sequences[0]).num_tokens == 32
    cache.add_sequence(sequences[3], prefix(10), 0)
    assert [cache.find(tokens) is not None for tokens in sequences] == [True, False, True, True]
    cache.add_sequence(
        (*sequences[0], 1, 1, 1, 1, 1, 1, 1, 1), prefix(10), 0
    )  # the next turn, in place of the one before
    assert cache.num_bytes == 30 and cache.find((*sequences[0], *(1,) * 20)).num_tokens == 48
    cache.add_sequence((9,) * 40, prefix(31), 0)
    cache.add_sequence((9,) * 15, prefix(1), 0)  # not a whole block
    cache.add_sequence((9,) * 40, prefix(1), 32)  # no block with a sampled token
    assert cache.num_bytes == 30 and cache.find((9,) * 40) is None
