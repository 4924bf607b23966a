"""Publishes weights and reads them back, verified: `publish` and `Publisher` on the learner, `pull` on every reader."""

from sharding.broadcast.publish import Publisher, publish, remove, tree_digest
from sharding.broadcast.pull import (
    DTYPES,
    CorruptBroadcast,
    Pulled,
    latest,
    pull,
    read_manifest,
    verify,
    versions,
    wait_for,
    watch,
)

__all__ = [
    "DTYPES",
    "CorruptBroadcast",
    "Publisher",
    "Pulled",
    "latest",
    "publish",
    "pull",
    "read_manifest",
    "remove",
    "tree_digest",
    "verify",
    "versions",
    "wait_for",
    "watch",
]
