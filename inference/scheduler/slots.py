"""The slot policy: which sequence is in which slot, how many steps the next decode call runs, and how long an idle engine gathers requests.

Pure: no thread, no clock, no device. Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Iterator

from inference.scheduler import sequence as sequence_lib

SHORT = 4  # a short call runs steps_per_call / SHORT steps
GAP_S = 0.005  # an idle engine starts once no request came for this long,
GATHER_S = 0.03  # or once it has gathered requests for this long
RECENT_S = 0.25  # after a request, another is likely for this long


class Slots:
    """The engine's slots and the running sequence in each. Iteration yields one sequence per slot, None for a free slot."""

    def __init__(self, num_slots: int, max_model_len: int, num_positions: int = 0):
        """Creates free slots, whose cache has `num_positions` in all (0: `max_model_len` each)."""
        self._sequences: list[sequence_lib.Sample | None] = [None] * num_slots
        self._max_model_len, self._num_positions = max_model_len, num_positions or num_slots * max_model_len

    def __iter__(self) -> Iterator[sequence_lib.Sample | None]:
        return iter(list(self._sequences))  # a copy: other threads iterate while the scheduler's thread changes it

    @property
    def running(self) -> list[tuple[int, sequence_lib.Sample]]:
        """The (slot number, sequence) pairs of all slots in use."""
        return [(slot, sequence) for slot, sequence in enumerate(self) if sequence is not None]

    @property
    def groups(self) -> list[sequence_lib.SequenceGroup]:
        """The requests that have at least one sequence in a slot, without duplicates."""
        return list(dict.fromkeys(sequence.group for _, sequence in self.running))

    @property
    def free(self) -> list[int]:
        """The numbers of the slots not in use, in ascending order."""
        return [slot for slot, sequence in enumerate(self) if sequence is None]

    def usage(self) -> float:
        """Returns the fraction of the cache's positions that contain a token, 0 to 1."""
        lengths = [len(s.group.request.tokens) + len(s.completion.tokens) for _, s in self.running]
        return min(sum(lengths) / self._num_positions, 1.0)  # of shared prompts each slot counts its own

    def put(self, slot: int, sequence: sequence_lib.Sample) -> None:
        """Assigns a sequence to a free slot."""
        assert self._sequences[slot] is None
        self._sequences[slot] = sequence

    def release(self, slot: int) -> None:
        """Frees a slot in use and counts one running sequence less for its request."""
        sequence = self._sequences[slot]
        assert sequence is not None
        sequence.group.num_running -= 1
        self._sequences[slot] = None

    def move(self, slot: int, to: int) -> None:
        """Moves a sequence to a free slot."""
        sequence, self._sequences[slot] = self._sequences[slot], None
        assert sequence is not None
        self.put(to, sequence)

    def clear(self) -> None:
        """Frees all slots; does not change the counts of their requests."""
        self._sequences = [None] * len(self._sequences)

    def num_steps(self, steps_per_call: int, *, is_any_waiting: bool, is_request_likely: bool) -> int:
        """Returns the most steps that the next decode call should run.

        While requests wait, the call ends when the first slot is certain to be free. While slots are free and another request is
        likely, the call is short, so that the new request starts soon. Otherwise it runs `steps_per_call` steps.
        """
        if is_any_waiting:
            return min(steps_per_call, *(sequence.num_left(self._max_model_len) for _, sequence in self.running))
        if is_request_likely and self.free:
            return -(-steps_per_call // SHORT)
        return steps_per_call


class ArrivalWindow:
    """A short time window in which an idle engine gathers requests, up to a full batch, before it starts them together.

    Gathering pays because a decode call costs the same for one slot in use as for all.
    """

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self._opened_s: float | None = None
        self._num_samples = 0
        self._last_s = float("-inf")

    def reopen(self) -> None:
        """Ends the window; the next request opens a new one."""
        self._opened_s, self._num_samples = None, 0

    def add(self, num_samples: int, now_s: float) -> float:
        """Counts a request of `num_samples`; returns the seconds to wait for the next one, 0 if the window is over."""
        if self._opened_s is None:
            self._opened_s = now_s
        self._last_s = now_s
        self._num_samples += num_samples
        is_open = now_s - self._opened_s < GATHER_S and self._num_samples < self._num_slots
        return GAP_S if is_open else 0.0

    def is_next_likely(self, now_s: float) -> bool:
        """Returns True if the last request came less than `RECENT_S` seconds ago, so that another is likely soon."""
        return now_s - self._last_s < RECENT_S
