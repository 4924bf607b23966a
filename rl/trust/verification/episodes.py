"""Plays the episodes of submitted rollouts again, with the program of the environment and the recorded calls, and scores them.

The programs run in a child process of this one (rl/envs/host), from a thread with an event loop. Any thread may ask.
"""

import asyncio
import threading
from collections.abc import Collection, Sequence

from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.foreign import host as foreign_host
from rl.envs.foreign import process as foreign_process
from rl.envs.host import host as host_lib
from rl.envs.recording import session as session_lib
from rl.envs.recording import tape as tape_lib
from rl.envs.scoring import scorer
from rl.protocol import lease
from rl.trust.verification import rules as rules_lib

HOLD_S = 0.5  # of an answer, in which a process on a busy machine makes its next request


class Episodes:
    """Plays episodes again. `host` has the time limits of a validator; `limits` and `thinking` are those of the run."""

    def __init__(
        self,
        host: host_lib.Plays,
        tokenizer: tokenizer_lib.Tokenizer,
        limits: session_lib.Limits,
        thinking: str,
        stop_ids: Collection[int],
    ):
        self._host, self._tokenizer, self._limits = host, tokenizer, limits
        self._thinking, self._stop_ids = thinking, stop_ids
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the child processes and the thread."""
        asyncio.run_coroutine_threadsafe(self._host.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def replay(
        self, group: lease.Lease, episodes: Sequence[Sequence[rollout_lib.Rollout]]
    ) -> list[rules_lib.Recomputed]:
        """Returns the scores of each episode, or its difference from the environment's. Blocks. Raises ValueError if the environment is broken."""

        async def all_of_them() -> list[rules_lib.Recomputed]:
            return await asyncio.gather(*(self._replay(group, one) for one in episodes))

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    async def _replay(self, group: lease.Lease, rollouts: Sequence[rollout_lib.Rollout]) -> rules_lib.Recomputed:
        found = await self._attempt(group, rollouts, 0.0)
        if found.mismatch and isinstance(self._host, foreign_host.ForeignHost):
            # Only the times of its requests show whether it makes calls at the same time, which may begin in another order here.
            found = await self._attempt(group, rollouts, HOLD_S)
        return found

    async def _attempt(
        self, group: lease.Lease, rollouts: Sequence[rollout_lib.Rollout], hold_s: float
    ) -> rules_lib.Recomputed:
        first = rollouts[0]
        try:
            tape = tape_lib.of_rollouts(rollouts, self._stop_ids)
        except ValueError as error:
            return rules_lib.Recomputed({}, mismatch=str(error))
        options = {"seed": group.seed, "sample": int(first.sample), "thinking": self._thinking, "tape": tape}
        options |= {"sampling": {"temperature": float(first.temperature)}, "hold_s": hold_s}
        session = session_lib.Session(self._tokenizer, None, self._limits, **options)
        played, mismatch = None, None
        try:
            played = await self._host.play(session, group.index, group.split)
            mismatch = tape_lib.difference(session, rollouts)
        except session_lib.NotOnTape as error:
            mismatch = str(error)
        except foreign_process.Died:  # again and again: an episode of a stranger must not end the run
            return rules_lib.Recomputed(dict(host_lib.FAILED), timed_out=True)
        is_slow = session.cpu_s >= scorer.LIMIT_S / scorer.SPREAD or session.has_slow_tool
        is_slow |= played is not None and not played.in_time
        if is_slow and first.rewards == host_lib.FAILED and not session.unused():
            # a worker stops after less time, and gets no more replies
            return rules_lib.Recomputed(dict(host_lib.FAILED))
        if (played is not None and not played.in_time) or (mismatch and session.has_slow_tool):
            return rules_lib.Recomputed(dict(host_lib.FAILED), timed_out=True)
        return rules_lib.Recomputed({} if played is None else played.scores, mismatch=mismatch or "")
