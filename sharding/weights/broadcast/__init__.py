"""The broadcast of weights: `publish` and `Publisher` for the learner, `pull` for every reader. `pull` verifies every byte."""

from sharding.weights.broadcast.assemble import Pulled
from sharding.weights.broadcast.destination import remove
from sharding.weights.broadcast.placement import Staged
from sharding.weights.broadcast.publish import Publisher, PublishOptions, publish
from sharding.weights.broadcast.pull import (
    entry_of,
    latest,
    latest_order,
    pull,
    read_manifest,
    verify,
    versions,
    wait_for,
    watch,
)
from sharding.weights.format.journal import CorruptSource

__all__ = ["CorruptSource", "PublishOptions", "Publisher", "Pulled", "Staged", "entry_of", "latest", "latest_order"]
__all__ += ["publish", "pull", "read_manifest", "remove", "verify", "versions", "wait_for", "watch"]
