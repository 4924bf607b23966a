"""Copies new versions from the upstreams into a relay's store.

1. Files on disk are hashed again and exposed (`Store.recover`).
2. Each upstream is mirrored by threads of its own (`sharding/relay/upstream.py`), so that no upstream can delay another.
3. The versions to keep are chosen for all of them together (`sharding/relay/plan.py`). On a full disk the oldest version goes first.

Failures (upstream gone, disk full, version rejected) are counted, reported and retried; complete versions stay.
"""

import time
from collections.abc import Mapping

from sharding.download import source
from sharding.format import head as head_lib
from sharding.relay import plan as plan_lib
from sharding.relay import store as store_lib
from sharding.relay import upstream as upstream_lib

NUM_DOWNLOADS = 8  # objects that are downloaded at the same time, from all upstreams together


class Mirror:
    """The threads that copy new versions from `sources` (by name) into `store` until `stop`, and the state of their work."""

    def __init__(
        self,
        store: store_lib.Store,
        sources: Mapping[str, source.Source],
        keep: int,
        trusted: head_lib.HeadVerifier | None = None,
    ):
        plan = plan_lib.Plan(store, len(sources), keep, trusted)
        self._plan, self.log, share = plan, plan.log, max(2, NUM_DOWNLOADS // len(sources))
        self.upstreams = [upstream_lib.Upstream(name, opened, plan, share) for name, opened in sources.items()]

    @property
    def is_upstream_alive(self) -> bool:
        """True if an upstream answered when it was asked last."""
        return any(upstream.is_alive for upstream in self.upstreams)

    def health(self) -> dict:
        """Returns {"upstream": True if one is alive, "error": the last, "since": when threads began to fail, "epoch": the newest head's}.

        "since" is a Unix time, or None; "epoch" is -1 without a head.
        """
        ended = [u.thread for u in self.upstreams if u.thread.since is not None]
        since = min((t.since for t in ended if t.since is not None), default=None)
        error = "; ".join(t.error for t in ended) or self.log.last
        return {"upstream": self.is_upstream_alive, "error": error, "since": since, "epoch": self._plan.epoch}

    def stop(self) -> None:
        """Stops the threads and closes the upstreams. Blocks for at most 30 s."""
        for upstream in self.upstreams:
            upstream.stop()
        deadline_s = time.monotonic() + 30
        for upstream in self.upstreams:
            upstream.join(max(0.0, deadline_s - time.monotonic()))
