"""The groups of each batch, and the time at which they open: a pure data structure on the group queue.

The groups of a run have one prescribed order (rl/protocol/task_schedule.py). Each is opened once, in this order, and taken by one batch
or dropped for a counted reason. Batch n trains on
- "prescribed": the next P groups of the order. It waits for each of them, so that no worker selects the data, and lag 0 repeats.
- "first": the first P in the order among those that are eligible. Late ones are kept for later batches, up to `max_off_policy`
  versions; then they are dropped ("stale"). Slow workers hold up nothing, and long answers come later or never: the metrics show both.

Rollouts that become too old before they are eligible are void (`too_old`, `void`), and their group is made again: nothing can replay
them once the weights of their versions are gone.

1. `load(version)`: groups open until as many are on their way as the batches up to version + 1 + max_lag need, times `oversampling`.
2. `collect(n)` returns the groups of batch n, or None as long as some are missing.
3. With `refill`, a group without a signal (all advantages are zero) is dropped ("flat"), and the next of the order takes its place, for
   at most refill * P of them per batch. In a "prescribed" batch the earlier groups still come first, however slow they are.
   With a curriculum, each step has numbers of its own for the groups that replace others, so that its tasks depend on no later step.
4. Once an environment is left out (`leave_out`), no group of it opens any more. Later groups take their places, but if each batch has the
   groups of its step, it is smaller. A resume tries the environment again.
5. With `tokens_per_step`, a batch ends with the group that brings its sampled tokens to this number; P is then the most groups of a batch.
"""

import collections
import fractions
import math
from collections.abc import Callable, Collection, Sequence

from rl.protocol import curriculum, env_mix, lease, task_schedule
from rl.swarm.orchestrator.groups import group_queue, queue_entry
from rl.swarm.orchestrator.groups.queue_entry import Key, State

REASONS = ("stale", "flat", "duplicate", "late", "epoch")  # of the queue's drops


class Batches:
    """The batches of a run, from the groups of `queue`. Only these methods may add, take, or drop its training groups.

    `rl` is that section of the run's config. `make_groups(numbers, min_version)` returns the groups with these numbers in the prescribed
    order (from 0); `has_signal` returns False for an eligible entry with zero advantages only.
    """

    def __init__(
        self,
        rl,
        queue: group_queue.GroupQueue,
        make_groups: Callable[[Sequence[int], int], Sequence[lease.Lease]],
        has_signal: Callable[[queue_entry.Entry], bool] = lambda entry: True,
    ):
        self._rl, self._queue, self._make_groups, self._has_signal = rl, queue, make_groups, has_signal
        self._is_fixed, self._max_flat = task_schedule.is_fixed(rl), env_mix.max_flat(rl)
        self._per_step = curriculum.groups_per_step(rl)  # numbers of groups that each step has
        self._version = -1  # the newest that servers have
        self.step = 0  # the last batch that was taken
        self._num_opened = 0  # groups of the order
        self._of_step: collections.Counter[int] = collections.Counter()  # the same for each step of a curriculum
        self._again: list[int] = []  # numbers to open before further ones, after a resume
        self._waiting: dict[Key, None] = {}  # opened, and neither taken nor dropped, in order
        self._left_out: set[str] = set()  # environments
        # (step, group) of these environments, in batches to come that have the groups of their step
        self._missing: set[tuple[int, int]] = set()
        self._flat: dict[Key, str] = {}  # eligible groups without a signal, with their digest
        self._taken: collections.Counter[int] = collections.Counter()  # groups by batch that the servers' version lacks
        self._hole: Key | None = None  # the group for which the last `collect` waited
        self._gone: list[tuple[int, int]] = []  # (step, group) dropped since `take_dropped`
        self._flat_gone: list[queue_entry.Entry] = []  # dropped as "flat" since `take_flat`
        self._dropped: list[int] = []  # sampled tokens of the rollouts in dropped groups, since `take_metrics`
        self._counted: collections.Counter[str] = collections.Counter()  # drops of the queue at that time

    def load(self, version: int) -> None:
        """Opens the groups that may be generated once the servers have `version`."""
        self._version = max(self._version, version)
        self._taken = collections.Counter({step: n for step, n in self._taken.items() if step > version})
        self._open()

    def accepted(self, key: Key) -> None:
        """Checks whether a group that became eligible has a signal, and opens a replacement if it has none. `collect` does so, too, but later."""
        if self._max_flat and key in self._waiting and not self._signals(key):
            self._open()

    def leave_out(self, env: str) -> None:
        """Drops the groups of an environment that have no rollouts, and opens no more of it."""
        self._left_out.add(env)
        for key in [*self._waiting]:
            entry = self._queue.entries[key]
            if entry.group.env == env and not entry.is_submitted:
                if self._is_fixed:
                    self._missing.add(key[1:])
                    self._forget(key)
                    self._queue.drop(key, "left_out")
                else:
                    self._drop(key, "left_out")
        self._open()

    @property
    def oldest(self) -> int:
        """The oldest version that the next batch may have."""
        return self.step - self._rl.max_off_policy

    def too_old(self) -> list[Key]:
        """Returns the groups whose rollouts wait for checks or a verdict, and are too old for the next batch."""
        found = ((key, self._queue.entries[key]) for key in self._waiting)
        waiting, oldest = (State.SUBMITTED, State.QUARANTINED), self.oldest
        return [key for key, entry in found if entry.state in waiting and entry.oldest_version < oldest]

    def void(self, key: Key) -> queue_entry.Entry:
        """Drops the rollouts of a group that are too old, so that it is made again; returns its entry as it was before."""
        entry = self._queue.void(key)
        self._dropped += entry.lengths
        return entry

    def collect(self, step: int) -> list[queue_entry.Entry] | None:
        """Takes batch `step`, the one after the last; returns its entries in order, or None if it is not complete.

        Raises ValueError if all of its groups are of environments that were left out.
        """
        assert step == self.step + 1, (step, self.step)
        if self._hole in self._waiting and self._queue.num_eligible([self._hole]) == 0:
            return None
        if not (wanted := self._wanted(step)):
            found = f"all groups of batch {step} are of {', '.join(sorted(self._left_out))}, which no worker can make"
            raise ValueError(f"{found}; raise rl.prompts_per_step, or remove envs.{min(self._left_out)}")
        most_tokens = self._rl.tokens_per_step
        if not most_tokens and self._queue.count()[State.ELIGIBLE] < wanted:
            return None
        waits = self._rl.batch == "prescribed"
        taken: list[Key] = []
        flat: list[Key] = []
        stale: list[Key] = []
        num_tokens, oldest, self._hole = 0, self.oldest, None
        of_step = (key for key in self._waiting if key[1] == step)
        for key in sorted(of_step) if self._rl.curriculum else self._waiting:
            entry = self._queue.entries[key]
            if entry.state is not State.ELIGIBLE:
                if waits:
                    self._hole = key
                    break
            elif entry.oldest_version < oldest:
                stale.append(key)
            elif len(flat) < self._max_flat and not self._signals(key):
                flat.append(key)
            else:
                taken.append(key)
                num_tokens += sum(entry.lengths)
                if len(taken) == wanted or 0 < most_tokens <= num_tokens:
                    return self._take(step, taken, flat, stale)
        self._drop_stale(stale)
        self._open()
        return None

    def progress(self) -> tuple[int, int]:
        """Returns (number of eligible groups that the next batch could use, number that it needs at most), for people."""
        most = self._wanted(self.step + 1)
        candidates = [*self._waiting][: most if self._rl.batch == "prescribed" else None]
        return min(self._queue.num_eligible(candidates), most), most

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics of the groups that no batch took: the queue's drops by reason since the last call, and lengths in tokens.

        batch/length_dropped, batch/length_waiting: mean lengths of rollouts in dropped groups, and in those that later batches may take.
        With rollout/response_length of the batch they show whether it prefers short rollouts. They are 0 if there are none.
        """
        drops, dropped = self._queue.drops - self._counted, self._dropped
        self._counted, self._dropped = self._queue.drops.copy(), []
        entries = [self._queue.entries[key] for key in self._waiting]
        waiting = [n for entry in entries if entry.state is State.ELIGIBLE for n in entry.lengths]
        counts = dict.fromkeys(REASONS, 0) | drops
        lengths = {"dropped": dropped, "waiting": waiting}
        means = {f"batch/length_{name}": sum(found) / max(1, len(found)) for name, found in lengths.items()}
        return means | {f"batch/num_{reason}": float(number) for reason, number in counts.items()}

    def take_dropped(self) -> list[tuple[int, int]]:
        """Returns the (step, group) of those dropped since the last call: no batch will have them."""
        gone, self._gone = self._gone, []
        return gone

    def take_flat(self) -> list[queue_entry.Entry]:
        """Returns the groups that were dropped without a signal since the last call."""
        gone, self._flat_gone = self._flat_gone, []
        return gone

    def state(self) -> dict:
        """Returns the position in the order as plain JSON, for `restore`: groups on their way are opened again after a resume."""
        waiting = [number for *_, number in (*self._waiting, *self._missing)]
        return {"num_opened": self._num_opened, "waiting": waiting + self._again}

    def restore(self, step: int, state: dict | None) -> None:
        """Continues after batch `step`, before any group is open.

        Without a state, the batches up to `step` are assumed to have taken the first groups of the order, P each. Raises ValueError if
        batches may take other groups (`task_schedule.is_fixed` is False), since only a state names those.
        """
        if step and state is None and not self._is_fixed:
            found = f"the checkpoint of step {step} lacks the groups that its batches took"
            raise ValueError(f"{found}; resume from another one, or start another --workdir")
        self.step = step
        self._num_opened = state["num_opened"] if state else step * self._rl.prompts_per_step
        self._again = sorted(state["waiting"]) if state else []
        # Until servers have version `step`.
        self._taken = collections.Counter({step: self._rl.prompts_per_step} if step else {})

    def skip(self, step: int, numbers: Collection[int], dropped: Collection[int] = ()) -> None:
        """Continues after batch `step`, which took groups `numbers`; no batch will have those in `dropped`. Call it after `restore`."""
        self.step, self._taken[step] = step, len(numbers)
        if self._rl.curriculum:  # the groups of later steps open as ever
            return
        gone, first = {*numbers, *dropped}, step * self._rl.prompts_per_step if self._is_fixed else 0
        num_opened = max(self._num_opened, max(gone) + 1, first)
        on_their_way = {*self._again, *range(self._num_opened, num_opened)} - gone
        self._num_opened, self._again = num_opened, sorted(number for number in on_their_way if number >= first)

    def reopen(self, kept: Collection[int], version: int) -> None:
        """Opens the groups up to the last number in `kept` again, before servers have a policy; `version` is the oldest that they may have."""
        if self._rl.curriculum:
            later = [number for number in kept if number >= self.step * self._per_step]
            for step in sorted({number // self._per_step + 1 for number in later}):
                last = max(number for number in later if number // self._per_step + 1 == step)
                self._add(self._fresh(step, last % self._per_step + 1), version)
            return
        last = max(kept, default=-1)
        fresh = range(self._num_opened, last + 1)
        numbers = [number for number in self._again if number <= last] + [*fresh]
        self._again = [number for number in self._again if number > last]
        self._num_opened = max(self._num_opened, last + 1)
        self._add(numbers, version)

    def _take(self, step: int, taken: list[Key], flat: list[Key], stale: list[Key]) -> list[queue_entry.Entry] | None:
        if stale and self._rl.batch == "prescribed":  # their places are not filled by later groups
            self._drop_stale(stale)
            return None
        self._drop_stale(stale)
        for key in flat:
            self._drop(key, "flat")
        for key in taken:
            self._forget(key)
        self.step = step
        if step > self._version:
            self._taken[step] = len(taken) + sum(of == step for of, _ in self._missing)
        self._missing = {one for one in self._missing if one[0] > step}
        entries = self._queue.take(taken)
        for key in [key for key in self._waiting if key[1] <= step] if self._rl.curriculum else ():
            self._drop(key, "late")  # it replaced a group that has a signal after all
        self._open()
        return entries

    def _drop_stale(self, stale: list[Key]) -> None:
        for key in reversed(stale):
            if self._rl.batch == "prescribed":
                self.void(key)
                self._hole = key
            else:
                self._drop(key, "stale")

    def _drop(self, key: Key, reason: str) -> None:
        self._forget(key)
        self._gone.append(key[1:])
        entry = self._queue.drop(key, reason)
        self._dropped += entry.lengths
        self._flat_gone += [entry] * (reason == "flat")

    def _forget(self, key: Key) -> None:
        del self._waiting[key]
        self._flat.pop(key, None)

    def _signals(self, key: Key) -> bool:
        """Returns True if an eligible group has a signal; remembers one that has none."""
        entry = self._queue.entries[key]
        if self._flat.get(key) == entry.digest:
            return False
        if self._has_signal(entry):
            self._flat.pop(key, None)
            return True
        self._flat[key] = entry.digest
        return False

    def _open(self) -> None:
        """Opens groups until enough are on their way: those waiting, and those in batches that are not published yet."""
        if self._version < 0:
            return
        # One that servers have: work of a lease that pins it is not refused.
        self._queue.min_version = min(self._version, self.oldest)
        rl = self._rl
        if rl.curriculum:
            flat = collections.Counter(step for _, step, _ in self._flat)
            for step in range(self.step + 1, min(self._version + 1 + rl.max_lag, rl.num_steps) + 1):
                wanted = min(rl.prompts_per_step + flat[step], self._per_step)
                if numbers := self._fresh(step, wanted):
                    self._add(numbers, self._version)
            return
        num_batches = min(self._version + 1 + rl.max_lag, rl.num_steps) - min(self._version, self.step)
        needed = math.ceil(num_batches * rl.prompts_per_step * fractions.Fraction(str(rl.oversampling)))
        needed += min(len(self._flat), self._max_flat) - self._taken.total()
        while (count := needed - len(self._waiting) - len(self._missing)) > 0:  # more than once if some are left out
            numbers, self._again = self._again[:count], self._again[count:]
            fresh = range(self._num_opened, self._num_opened + count - len(numbers))
            self._num_opened = fresh.stop
            self._add([*numbers, *fresh], self._version)

    def _wanted(self, step: int) -> int:
        """Returns the number of groups that batch `step` needs at most."""
        return self._rl.prompts_per_step - sum(of == step for of, _ in self._missing)

    def _fresh(self, step: int, count: int) -> range:
        """Returns the numbers of the first `count` groups of a step that were not opened yet, and counts them as opened."""
        first, opened = (step - 1) * self._per_step, self._of_step[step]
        self._of_step[step] = max(opened, count)
        return range(first + opened, first + count)

    def _add(self, numbers: Sequence[int], version: int) -> None:
        prescribed = self._make_groups(numbers, version)
        groups = [group for group in prescribed if group.env not in self._left_out]
        if self._is_fixed:
            self._missing.update(group.key[1:] for group in prescribed if group.env in self._left_out)
        self._queue.add(groups)
        self._waiting.update(dict.fromkeys(group.key for group in groups))
