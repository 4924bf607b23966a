"""Rollouts for tests: one of two turns with a fixed key, how two are compared, and a table as the bytes of a Parquet file."""

import dataclasses
import io

import numpy as np
import pyarrow.parquet as pq
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.rollouts import rollout as rollout_lib
from tests.support import tiny

KEY = rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


def make(number=0, /, **changes):
    """Two turns: prompt, sampled, tool result, sampled; a weight update arrives in between."""
    rng = np.random.default_rng(number)
    mask = np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], bool)
    fields = dict(
        tokens=rng.integers(0, 1000, 10).astype(np.int32),
        logprobs=np.where(mask, -rng.exponential(1.0, 10), 0).astype(np.float32),
        versions=np.array([7, 7, 7, 7, 7, 8, 8, 8, 8, 8], np.int32),
        temperature=0.7,
        seed=2**32 - 1,
        task=rollout_lib.TaskRef(env="arithmetic", index=12, group=3, seed=2**40),
        sample=5,
        step=9,
        reward=0.1,
        rewards={"correct": 0.3, "format": -0.2},
        finish_reason="stop",
        proofs=bytes(range(256)),
    )
    return tiny.rollout(mask, **fields | changes)


def assert_equal(a, b):
    for field in dataclasses.fields(rollout_lib.Rollout):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype and np.array_equal(left, right), field.name
        else:
            assert type(left) is type(right) and left == right, field.name
    assert rollout_lib.digest(a) == rollout_lib.digest(b)


def table_bytes(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, **({"use_dictionary": False, "compression": "zstd"} | options))
    return sink.getvalue()
