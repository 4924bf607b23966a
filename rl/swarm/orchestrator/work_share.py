"""Shares of the work: how many groups each worker may hold, by the speed at which it finished groups.

1. The speed of a worker is the number of its accepted groups over the time in which it held any, both halved every `HALF_AFTER` groups,
   so that it follows a worker that slows down. A worker without a record counts as an average one, and its speed falls while it holds
   groups and finishes none.
2. A worker may hold `num_unfinished * speed / (sum of speeds of active workers)` groups, and at least one: all would finish together.
   The first to ask therefore does not take the whole batch. A worker far below the average gets none where the others would wait
   for it. Its record fades while it holds nothing, so that it is tried again.
3. A group is late (`is_late`), and a second worker may get it, if its lease is older than a multiple of the mean time that groups
   take, or if its holder has far more than its share: it asked when no other worker did.

Pure: the caller provides the time, and names only workers with a record or an invitation, so that keys cost no memory.
Left out: the number of groups that a worker runs at the same time. The measured speed contains it.
"""

import collections
import dataclasses
import math

HALF_AFTER = 64  # groups
BACKUP_AFTER = 1.5  # mean durations of a group
MOST_HELD = 2.0  # shares; beyond, others may copy groups of the holder
PRIOR = 10.0  # groups at the average speed, which each record begins with
SMOOTHING = 0.05  # of the mean duration, per group
REFRESH_S = 1.0  # the sum of many speeds is at most this old, or a millisecond per worker
SLOW = 3.0  # times slower than the average: such a worker gets no group that would take longer than 1 / LEAST_SHARE of the rest
LEAST_SHARE = 0.75
FEW = 64  # speeds, whose sum is always new


@dataclasses.dataclass
class _Record:
    """The work of one worker. `num_finished` and `busy_s` decay together."""

    seen_s: float
    num_held: int = 0
    looked_s: float = 0.0  # up to when busy_s counts
    num_finished: float = 0.0
    busy_s: float = 0.0
    speed: float = 0.0  # as it is in the sum of all

    def look(self, now_s: float, fades_s: float) -> None:
        """Adds the time since the last look if groups were held, else lets the record fade."""
        if self.num_held:
            self.busy_s += now_s - self.looked_s
        else:
            kept = math.exp((self.looked_s - now_s) / fades_s)
            self.num_finished, self.busy_s = self.num_finished * kept, self.busy_s * kept
        self.looked_s = now_s


class WorkShare:
    """The speeds of the workers that asked for work in the last `active_s` seconds, and the shares that follow from them."""

    def __init__(self, active_s: float):
        self._active_s = active_s
        self._records: collections.OrderedDict[str, _Record] = collections.OrderedDict()  # the last seen at the end
        self._mean_group_s = math.nan  # from lease to acceptance
        self._sum, self._summed_s, self._speed_of_average = 0.0, -math.inf, 1.0
        self._num_unfinished = 0  # groups, when a worker asked last

    def seen(self, worker: str, num_held: int, now_s: float) -> None:
        """Records that a worker asked for work, or changed the number of groups that it holds."""
        record = self._records.setdefault(worker, _Record(now_s, looked_s=now_s))
        record.look(now_s, self._active_s)
        record.seen_s, record.num_held = now_s, num_held
        self._records.move_to_end(worker)
        while now_s - next(iter(self._records.values())).seen_s > self._active_s:
            self.left(next(iter(self._records)))

    def left(self, worker: str) -> None:
        """Records that a worker takes no more groups: it has left, or is banned."""
        if record := self._records.pop(worker, None):
            self._sum -= record.speed

    def finished(self, worker: str, since_s: float, now_s: float) -> None:
        """Records that a group which a worker leased at `since_s` was accepted."""
        group_s = now_s - since_s
        if math.isfinite(group_s):
            mean_s = group_s if math.isnan(self._mean_group_s) else self._mean_group_s
            self._mean_group_s = mean_s + SMOOTHING * (group_s - mean_s)
        if record := self._records.get(worker):
            record.look(now_s, self._active_s)
            record.num_finished += 1
            if record.num_finished > HALF_AFTER:
                record.num_finished, record.busy_s = record.num_finished / 2, record.busy_s / 2

    def speed(self, worker: str, now_s: float) -> float:
        """Returns the speed of a worker in groups per second. Until a worker has finished a group, only the ratios of speeds have a meaning."""
        self._refresh(now_s)
        return self._speed(self._records[worker], now_s) if worker in self._records else self._speed_of_average

    def room(self, worker: str, num_held: int, num_unfinished: int, now_s: float) -> int:
        """Returns how many more groups a worker should hold than `num_held`. `num_unfinished` is the number of all unfinished groups, held or not."""
        self._num_unfinished = num_unfinished
        speed = self.speed(worker, now_s)
        share = num_unfinished * speed / max(self._sum, speed)
        is_slow = share < LEAST_SHARE and speed * SLOW < self._speed_of_average
        return (0 if is_slow else max(1, math.floor(share + 0.5))) - num_held

    def is_late(self, worker: str, since_s: float, now_s: float) -> bool:
        """Returns True if a group that a worker holds since `since_s` should go to a second worker, too."""
        if now_s - since_s > BACKUP_AFTER * self._mean_group_s:  # False for NaN
            return True
        record = self._records.get(worker)
        if record is None:
            return False
        speed = self.speed(worker, now_s)
        return record.num_held > max(1.0, MOST_HELD * self._num_unfinished * speed / max(self._sum, speed))

    def _speed(self, record: _Record, now_s: float) -> float:
        busy_s = record.busy_s + (now_s - record.looked_s if record.num_held else 0.0)
        return (record.num_finished + PRIOR) / (busy_s + PRIOR / self._speed_of_average)

    def _refresh(self, now_s: float) -> None:
        if len(self._records) > FEW and now_s - self._summed_s < max(REFRESH_S, len(self._records) / 1000):
            return
        for record in self._records.values():
            record.look(now_s, self._active_s)
        num_finished = sum(record.num_finished for record in self._records.values())
        busy_s = sum(record.busy_s for record in self._records.values())
        if num_finished and busy_s:
            self._speed_of_average = num_finished / busy_s
        for record in self._records.values():
            record.speed = self._speed(record, now_s)
        self._sum = sum(record.speed for record in self._records.values())
        self._summed_s = now_s
