"""The workers that wait for work: each is woken when there is some for it, in the order of arrival.

A worker that polls costs its orchestrator a millisecond per request, and an idle one asks for nothing else. So its request waits
here (a long poll), and costs nothing until a group is open. Known workers come before newcomers, because keys cost nothing. But a
newcomer is first once per `NEWCOMER_S`: a single known worker may take all groups of each batch, and no other would get any. Networks
have turns then, and none may take more places than it leaves free: a thousand keys at one address hold up no newcomer elsewhere.
Where there is work and no waiter may have it (they lost it, or their share is used up), fewer and fewer try, each in turn.
Only for use in the event loop of the HTTP server.
"""

import asyncio
import collections
import contextlib
import itertools
from collections.abc import Callable

from rl.protocol import lease

Attempt = Callable[[], list[lease.Lease]]
_Queue = collections.OrderedDict[asyncio.Future, tuple[Attempt, str]]
MAX_STRANGERS = 4096  # that wait; others get their reply, and poll: a connection costs a stranger nothing
NEWCOMER_S = 10.0
MAX_FAILURES = 32  # attempts without a group, until the next call; more would hold up the loop
MIN_FAILURES = 8  # after calls in which no attempt got one; fewer would hold up a newcomer after many of an attacker's


class LeaseWaiters:
    """Waiting lease requests by order of arrival. `has_work()` returns True if groups wait for workers."""

    def __init__(self, has_work: Callable[[], bool]):
        self._has_work, self._is_closed, self._turn_s = has_work, False, 0.0
        self._max_failures = MAX_FAILURES  # in the next call of `wake`
        # {result: (the worker's attempt, its network)} by arrival; first those of known workers.
        self._queues = tuple[_Queue, _Queue](collections.OrderedDict() for _ in range(2))
        self._waits: dict[str, asyncio.Future] = {}  # by worker

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def workers(self) -> list[str]:
        """Returns the public keys of the waiting workers."""
        return [worker for worker, groups in self._waits.items() if not groups.done()]

    async def wait(
        self, worker: str, attempt: Attempt, timeout_s: float, network: str, *, is_known: bool, gone: asyncio.Future
    ) -> list[lease.Lease]:
        """Returns the groups of the first `attempt()` that gets some, or [] after `timeout_s`, after `close`, or when `gone` is done.

        Known workers are served before strangers. Returns [] without a wait if too many strangers wait already, in all or on this
        `network`. A worker waits once: a new request ends its earlier one. `gone` is done when the client's connection is lost:
        otherwise the request would lease groups that no process works on.
        """
        queue, groups = self._queues[not is_known], asyncio.get_running_loop().create_future()
        if not is_known and sum(place[1] == network for place in queue.values()) >= MAX_STRANGERS - len(queue):
            return []
        self.leave(worker)
        queue[groups], self._waits[worker] = (attempt, network), groups
        gone.add_done_callback(lambda _: self._finish(groups))
        timer = asyncio.get_running_loop().call_later(timeout_s, self._finish, groups)
        try:
            return [] if self._is_closed else await groups
        finally:
            timer.cancel()
            queue.pop(groups, None)
            if self._waits.get(worker) is groups:
                del self._waits[worker]

    def wake(self) -> None:
        """Lets waiters try to lease, one after the other, as long as there is work."""
        known, newcomers = self._queues
        now_s, limit, results = asyncio.get_running_loop().time(), self._max_failures, []
        if newcomers and now_s > self._turn_s and self._has_work():
            first: dict[str, asyncio.Future] = {}  # that waits, by network
            for groups, (_, network) in newcomers.items():
                if not groups.done():  # an attempt that ends as it begins must not take the turn
                    first.setdefault(network, groups)
            for groups in itertools.islice(first.values(), limit):
                results.append(self._try(newcomers, groups))
                if results[-1] and groups.exception() is None:
                    self._turn_s = now_s + NEWCOMER_S
                    break
        for queue in (known, newcomers):
            num_failures, most = 0, min(limit, len(queue))
            while queue and num_failures < most and self._has_work():
                results.append(self._try(queue, next(iter(queue))))
                num_failures += not results[-1]
        self._max_failures = max(MIN_FAILURES, limit // 2) if results and not any(results) else MAX_FAILURES

    def _try(self, queue: _Queue, groups: asyncio.Future) -> bool:
        """Lets a waiter of a queue try to lease; returns False if it got nothing, and waits on."""
        attempt = (place := queue.pop(groups))[0]
        try:
            if groups.done():
                return True
            if found := attempt():
                groups.set_result(found)
                return True
        except (ValueError, OSError) as error:  # the reply of that request
            groups.set_exception(error)
            return True
        queue[groups] = place  # at the end, or the same ones would be tried each time
        return False

    def leave(self, worker: str) -> None:
        """Ends the wait of a worker, if any, without groups."""
        if groups := self._waits.get(worker):
            self._finish(groups)

    def close(self) -> None:
        """Ends all waits, and those that begin later, without groups."""
        self._is_closed = True
        for groups in itertools.chain(*self._queues):
            self._finish(groups)

    def _finish(self, groups: asyncio.Future) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            groups.set_result([])
