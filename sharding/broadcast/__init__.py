"""The broadcast of weights: `publish` and `Publisher` for the learner, `pull` for every reader. `pull` verifies every byte."""

from sharding.broadcast.assemble import Pulled
from sharding.broadcast.destination import remove
from sharding.broadcast.placement import Staged
from sharding.broadcast.publish import Publisher, PublishOptions, publish
from sharding.broadcast.pull import (
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
from sharding.format.journal import CorruptSource

__all__ = ["CorruptSource", "PublishOptions", "Publisher", "Pulled", "Staged", "entry_of", "latest", "latest_order"]
__all__ += ["publish", "pull", "read_manifest", "remove", "verify", "versions", "wait_for", "watch"]
