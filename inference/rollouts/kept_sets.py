"""The kept set of each sampled token: the token IDs that top-k, top-p, and min-p left to sample from.

1. The engine records them (`Completion.kept`), a worker hands them on (`Rollout.kept`), and a replay verifies them (rl/trust/verification).
2. The learner normalizes its probabilities over the same IDs: DeepSeek-V3.2's "keep sampling mask"
   (arXiv 2512.02556, section 3.1). So a ratio to the sampler is 1 where the policies are equal.

Encoded, they are little-endian uint32: for each call of the server the number of IDs of each sampled token, then all IDs, ascending
for each token. No jax here.

Letters: N sampled tokens, W IDs of the largest set that a run allows.
"""

from collections.abc import Mapping, Sequence

import numpy as np

MAX_KEPT = 1024  # IDs of a set
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the filters that keep all tokens


def width(sampling: Mapping[str, float], vocab_size: int) -> int:
    """Returns the most IDs that the filters in `sampling` keep, or 0 if they keep all tokens, which are not recorded then."""
    if all(sampling.get(name, off) == off for name, off in OFF.items()):
        return 0
    return int(min(sampling.get("top_k") or vocab_size, vocab_size))


def encode(ids_NW: np.ndarray) -> bytes:
    """Returns the encoded sets of the sampled tokens of one call; rows have -1 where a set has fewer than W IDs."""
    ids_NW = np.sort(ids_NW, axis=1)
    is_id_NW = ids_NW >= 0
    return np.concatenate([is_id_NW.sum(axis=1), ids_NW[is_id_NW]]).astype("<u4").tobytes()


def read(data: bytes, lengths: Sequence[int], most: int = MAX_KEPT) -> tuple[np.ndarray, np.ndarray]:
    """Returns (number of IDs of each sampled token [N], all IDs) of calls with these numbers of tokens.

    Raises ValueError with the rule that untrusted bytes break: whole sets, of 1 to `most` ascending IDs below 2^31.
    """
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are not whole IDs")
    left, found = np.frombuffer(data, "<u4").astype(np.int64), []
    for length in lengths:
        counts, left = left[:length], left[length:]
        if len(counts) < length or not 1 <= counts.min(initial=1) <= counts.max(initial=1) <= most:
            raise ValueError(f"must be a set of 1 to {most} IDs for each of {sum(lengths)} sampled tokens")
        total = int(counts.sum())
        ids, left = left[:total], left[total:]
        steps = np.diff(ids, prepend=-1)
        steps[np.cumsum(counts)[:-1][np.cumsum(counts)[:-1] < len(ids)]] = 1
        if len(ids) < total or ids.max(initial=0) >= 2**31 or steps.min(initial=1) < 1:
            raise ValueError("must be whole sets of ascending IDs below 2^31")
        found.append((counts, ids))
    if len(left):
        raise ValueError(f"{len(data)} bytes hold more than the sets of {sum(lengths)} sampled tokens")
    counts, ids = zip(*found, strict=True) if found else ((), ())
    return np.concatenate([*counts, np.zeros(0, int)]), np.concatenate([*ids, np.zeros(0, int)])


def decode(data: bytes, lengths: Sequence[int], most: int) -> np.ndarray:
    """Returns the sets as int32 [N, W], W = `most`, -1 where a set has fewer IDs. Raises ValueError as `read` does."""
    counts_N, ids = read(data, lengths, most)
    out = np.full((len(counts_N), most), -1, np.int32)
    out[np.arange(most)[None] < counts_N[:, None]] = ids
    return out
