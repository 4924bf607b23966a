"""The workers that wait for work: each is woken when there is some for it, in the order of arrival.

A worker that polls costs its orchestrator a millisecond per request, and an idle one asks for nothing else. So its request waits
here (a long poll), and costs nothing until a group is open. Known workers come before strangers, because keys cost nothing. Only
for use in the event loop of the HTTP server.
"""

import asyncio
import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator

from rl.protocol import task_schedule

Attempt = Callable[[], list[task_schedule.Group]]
_Queue = collections.OrderedDict[asyncio.Future, tuple[str, Attempt]]
MAX_STRANGERS = 4096  # that wait; others get their reply, and poll: a connection costs a stranger nothing
MAX_FAILURES = 32  # attempts without a group, until the next call; more would hold up the loop


class LeaseWaiters:
    """Waiting lease requests by order of arrival. `has_work()` returns True if groups wait for workers."""

    def __init__(self, has_work: Callable[[], bool]):
        self._has_work, self._is_closed = has_work, False
        # {result: (worker, its attempt)} by arrival; first those of known workers.
        self._queues = tuple[_Queue, _Queue](collections.OrderedDict() for _ in range(2))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def workers(self) -> Iterator[str]:
        """Yields the public keys of the waiting workers."""
        return (worker for queue in self._queues for worker, _ in queue.values())

    async def wait(
        self, worker: str, attempt: Attempt, timeout_s: float, *, is_known: bool, gone: asyncio.Future
    ) -> list[task_schedule.Group]:
        """Returns the groups of the first `attempt()` that gets some, or [] after `timeout_s`, after `close`, or when `gone` is done.

        It is [] without a wait if too many strangers wait already.
        """
        queue, groups = self._queues[not is_known], asyncio.get_running_loop().create_future()
        if not is_known and len(queue) >= MAX_STRANGERS:
            return []
        queue[groups] = worker, attempt
        gone.add_done_callback(lambda _: self._finish(groups))
        timer = asyncio.get_running_loop().call_later(timeout_s, self._finish, groups)
        try:
            return [] if self._is_closed else await groups
        finally:
            timer.cancel()
            queue.pop(groups, None)

    def wake(self) -> None:
        """Lets waiters try to lease, one after the other, as long as there is work."""
        for queue in self._queues:
            num_failures = 0
            while queue and num_failures < MAX_FAILURES and self._has_work():
                groups, (worker, attempt) = queue.popitem(last=False)
                if groups.done():
                    continue
                try:
                    if found := attempt():
                        groups.set_result(found)
                        continue
                except (ValueError, OSError) as error:  # the reply of that request
                    groups.set_exception(error)
                    continue
                queue[groups] = worker, attempt  # at the end, or the same ones would be tried each time
                num_failures += 1

    def close(self) -> None:
        """Ends all waits, and those that begin later, without groups."""
        self._is_closed = True
        for groups in itertools.chain(*self._queues):
            self._finish(groups)

    def _finish(self, groups: asyncio.Future) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            groups.set_result([])
