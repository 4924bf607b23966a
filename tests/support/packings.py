"""Random packed rows, with and without shared prompts."""

import jax
import numpy as np

from models import attention


def draw(rng: np.random.Generator, T: int, *, branches: bool, longest: int = 60) -> attention.Packing:
    """Returns the packing of one row: sequences of fewer than `longest` tokens, each with 0 to 4 branches, then maybe padding."""
    positions, segments, branch_ids = (np.zeros(T, np.int32) for _ in range(3))
    at, end, segment = 0, T - int(rng.integers(0, T // 2)) * int(rng.random() < 0.7), 0
    while at < end:
        segment, prompt = segment + 1, int(rng.integers(1, longest))
        lengths = [prompt, *rng.integers(1, longest, int(rng.integers(0, 5)) if branches else 0).tolist()]
        for branch, length in enumerate(lengths):
            columns = slice(at, min(at + length, end))
            num = columns.stop - columns.start
            positions[columns] = np.arange(num) + (prompt if branch else 0)
            segments[columns], branch_ids[columns] = segment, branch
            at = columns.stop
    return attention.Packing(positions, segments, branch_ids if branches else None)


def rows(rng: np.random.Generator, B: int, T: int, **options) -> attention.Packing:
    """Returns the packing of B rows."""
    return jax.tree.map(lambda *rows: np.stack(rows), *[draw(rng, T, **options) for _ in range(B)])
