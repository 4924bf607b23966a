"""The evidence against all workers of a run: one sequential test per worker, fed with every checked rollout.

1. A registered server that vouches for a group (`server_of`) has a test of its own in place of the worker's. Its
   flag is for people and refuses nothing: workers choose which samples they hand in with its signature, after they have seen them.
2. The same holds for the run's own workers, and for all of them until the differences of honest replays are measured for this model
   (rl/trust/verification/run_bands.py): a flag then means that numbers differ. All groups of such a node are replayed.
3. A key costs nothing, so a cheat could use a fresh one before its test has seen enough. So all workers that were not invited share one
   more test (NEWCOMERS) for their first PROBATION rollouts. It convicts no key. After its alarm, the groups of newcomers are
   evidence only: they are refused without blame ("newcomer") until the worker's own test has seen PROBATION rollouts.

A refused group is the fault of its worker, or of a registered server that vouched for every sample of it, if the reason is something
that a server decides (`server_at_fault`):
1. A worker that forges a sample cannot blame a server, since no signature fits (`checks.vouched`); and it gains nothing by mixing servers.
2. "statistics" never counts: it sums up earlier groups, of which a worker may have hidden the server, or chosen those that look bad.
3. Versions that the lease excludes are the worker's fault: a server signs those that it has, and its client refuses older ones. A server
   that invents versions, newer than any or in descending order, is at fault.
4. Kept sets that a worker did not ask for, or asked for without need, are its own fault: a signature does not cover this choice.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.protocol import task_schedule
from rl.trust.verification import checks, peers, sequential_test
from rl.trust.verification import rules as rules_lib

NEWCOMERS = "newcomers"  # the name of their common test; no public key
PROBATION = 64  # replayed rollouts of a worker that was not invited
Reason = checks.Reason
OF_SERVERS = (
    Reason.VERSIONS,
    Reason.LENGTH,
    Reason.TOKENS,
    Reason.ROUTING,
    Reason.KEPT,
    Reason.LOGPROB,
    Reason.TERMINATION,
)
OF_SERVERS += (Reason.TOPLOC, Reason.SAMPLING, Reason.SHAPE)


class EvidenceLog:
    """The evidence that workers cheat: one sequential test per worker, which adds up deviations over rollouts. Thread-safe.

    A sample counts once. A group is handed in again if it became stale, was rejected for another member, or was lost in a restart; its
    sampling noise, and so its evidence, is the same.

    Args:
      bands: tolerance bands (largest mean deviations of honest workers); None: replays are ignored, only claims count.
      servers: public keys of the servers that answer for the samples they sign.
      own: public keys of the run's own workers, which no test convicts.
      invited: public keys of workers that are not newcomers.
      convicts: False until the bands are measured: flags are for people only.
      open_steps: steps after which the groups of a step are over (`task_schedule.num_open_steps`).
      on_flagged: called with the key of a node that is flagged but not convicted (or NEWCOMERS), and a line for people.
    """

    def __init__(
        self,
        bands: sequential_test.Bands | None,
        *,
        servers: Collection[str] = (),
        own: Collection[str] = (),
        invited: Collection[str] = (),
        convicts: bool = True,
        open_steps: int = peers.OPEN_STEPS,
        on_flagged: Callable[[str, str], None] = lambda key, line: None,
    ):
        self._bands, self._servers = bands, frozenset(servers)
        self._own, self._invited, self._convicts = frozenset(own), frozenset((*own, *invited)), convicts
        self._lock = threading.Lock()
        self._open_steps, self._on_flagged = open_steps, on_flagged
        self._told: set[str] = set()
        self._to_tell: list[tuple[str, str]] = []  # (key, line), to pass on without the lock
        self._seen = self._nothing_seen()
        self._peers = peers.Peers(open_steps)
        self.tests: dict[str, sequential_test.SequentialTest] = {}

    @classmethod
    def of(
        cls, config, bands: sequential_test.Bands | None, *, servers: Collection[str] = (), **options
    ) -> "EvidenceLog":
        """Returns the log of a run from its resolved config. `servers` are added to `topology.server_keys`; `options` are arguments of the class."""
        answering, invited = frozenset({*config.topology.server_keys, *servers}), config.topology.workers
        open_steps = task_schedule.num_open_steps(config)
        return cls(bands, servers=answering, invited=invited, open_steps=open_steps, **options)

    def set_bands(self, bands: sequential_test.Bands) -> None:
        """Tests replays against these bands from now on, and convicts by them."""
        with self._lock:
            self._bands, self._convicts = bands, True
            for test in self.tests.values():
                test.bands = bands

    def add_claims(self, rollouts: Sequence[rollout_lib.Rollout]) -> list[checks.Verdict]:
        """Adds the claimed log-probabilities of whole groups to their workers' tests. Returns "statistics" for rollouts of a flagged cheat, else OK."""
        rollouts, groups = self.attributed(rollouts), collections.defaultdict(list)
        for rollout in rollouts:
            groups[rollout.step, rollout.task.group, rollout.worker].append(rollout)
        with self._lock:
            for (step, _, _), group in sorted(groups.items()):
                self._peers.add(group)
                for worker, ratio_K in self._peers.bets(step):
                    self._test(worker).add_peers(ratio_K)
        noise = zip(rollouts, checks.exponential_noise(rollouts), strict=True)
        ratios = {id(r): sequential_test.claims_ratio(y_N) * (r.temperature > 0) for r, y_N in noise}
        with self._lock:
            for (_, _, worker), group in groups.items():
                new = [rollout for rollout in group if self._mark("claims", rollout)]
                if new:
                    ratio_K = np.sum([ratios[id(rollout)] for rollout in new], axis=0)
                    for test in self._tests_of(worker):
                        test.add_claims(ratio_K, len(new))
            out = [self._verdict(rollout.worker) for rollout in rollouts]
        self._tell_all()
        return out

    def add_verified(self, rollouts: Sequence[rollout_lib.Rollout]) -> None:
        """Records that a replay, here or elsewhere, accepted these samples of one group: others' claims are compared with theirs."""
        first = self.attributed(rollouts)[0]
        with self._lock:
            self._peers.verify(first)

    def add_replays(self, group: Sequence[tuple[rollout_lib.Rollout, sequential_test.Evidence]]) -> None:
        """Adds accepted replays of one node's samples of one group (`attributed`) to its test, if this log has bands."""
        worker = group[0][0].worker
        with self._lock:
            new = [evidence for rollout, evidence in group if self._mark("replay", rollout)]
            if self._bands is not None and new:
                for test in self._tests_of(worker):
                    test.add(new)
            elif self._bands is not None and self._is_alarm():
                self._test(worker).count_again(len(group))  # it has no other work, and its probation must end

    def attributed(self, rollouts: Sequence[rollout_lib.Rollout]) -> list[rollout_lib.Rollout]:
        """Returns the rollouts with the node that answers for each as its `worker`: the one server of its whole group, or its worker."""
        groups = collections.defaultdict(list)
        if not self._servers:
            return list(rollouts)
        for rollout in rollouts:
            groups[rollout.step, rollout.task.group, rollout.worker].append(rollout)
        nodes = {name: server_of(group, self._servers) for name, group in groups.items()}
        named = [(r, nodes[r.step, r.task.group, r.worker]) for r in rollouts]
        return [dataclasses.replace(r, worker=server) if server else r for r, server in named]

    def verdict(self, worker: str) -> checks.Verdict:
        """Returns the verdict on an accepted replay: "statistics" if its worker is flagged as a cheat, "newcomer" on probation, else OK."""
        with self._lock:
            found, is_alarm = self._verdict(worker), self._is_alarm()
            if found.accepted and is_alarm and self._convicts and self._is_newcomer(worker):
                deviation = f"new workers deviate together: {self.tests[NEWCOMERS].flag}"
                line = (
                    f"{deviation}; the first {PROBATION} rollouts of a new worker are evidence only, and train nothing"
                )
                self._tell(NEWCOMERS, line)
                found = checks.Verdict(
                    Reason.NEWCOMER, f"{deviation}, and this worker has too few rollouts to be judged alone"
                )
        self._tell_all()
        return found

    def notify(self, worker: str, found: str) -> None:
        """Reports that a rollout of one of the run's own nodes differs from its replay by `found`, once."""
        with self._lock:
            self._tell_differs(worker, found)
        self._tell_all()

    def forget(self, workers: Iterable[str]) -> None:
        """Removes the sequential tests of these workers; their evidence starts again from nothing."""
        with self._lock:
            for worker in workers:
                self.tests.pop(worker, None)

    def state(self, after: int) -> dict:
        """Returns all tests ("records") and the counted samples of steps after `after` ("counted") as plain JSON for `restore`."""
        with self._lock:
            tests = {worker: test.state() for worker, test in self.tests.items()}
            counted = [[step, *entry] for step, entry in sorted(self._seen) if step > after]
            return {"records": tests, "counted": counted, "groups": self._peers.state()}

    def restore(self, records: dict[str, dict], counted: Iterable[Sequence] = (), groups: dict | None = None) -> None:
        """Replaces all evidence by that of an earlier `state`: the tests (`records`), the counted samples, and the open groups (None: keep them)."""
        with self._lock:
            if groups is not None:
                self._peers = peers.Peers.restored(groups, self._open_steps)
            self.tests = {w: sequential_test.SequentialTest.restored(self._bands, s) for w, s in records.items()}
            self._seen = self._nothing_seen()
            for step, *entry in counted:
                self._seen.add(step, tuple(entry))

    def _nothing_seen(self) -> "_SeenSet":
        return _SeenSet(max(16, self._open_steps))

    def _mark(self, stream: str, rollout: rollout_lib.Rollout) -> bool:
        """Marks a rollout's sample as counted. Returns False if it was counted before."""
        item = rollout.step, (stream, rollout.worker, rollout.task.group, rollout.number)
        if item in self._seen:
            return False
        self._seen.add(*item)
        return True

    def _test(self, worker: str) -> sequential_test.SequentialTest:
        return self.tests.setdefault(worker, sequential_test.SequentialTest(self._bands))

    def _tests_of(self, worker: str) -> list[sequential_test.SequentialTest]:
        """Returns the test of a worker, and before it that of all newcomers if it is one."""
        names = [NEWCOMERS, worker] if self._is_newcomer(worker) else [worker]
        return [self._test(name) for name in names]

    def _is_alarm(self) -> bool:
        return NEWCOMERS in self.tests and self.tests[NEWCOMERS].flag is not None

    def _is_newcomer(self, worker: str) -> bool:
        is_named = worker in self._invited or worker in self._servers
        return not is_named and (worker not in self.tests or self.tests[worker].num_rollouts < PROBATION)

    def _verdict(self, worker: str) -> checks.Verdict:
        flag = self.tests[worker].flag if worker in self.tests else None
        if not flag:
            return checks.OK
        if worker in self._servers - self._own:
            found = (
                f"server {worker[:16]} or the workers that use it may cheat, by statistics over their groups: {flag}"
            )
            self._tell(worker, f"{found}; replay samples that you request from it, or remove its key")
        elif worker in self._own or not self._convicts:
            self._tell_differs(worker, f"by statistics: {flag}")
        else:
            return checks.Verdict(Reason.STATISTICS, flag)
        return checks.OK

    def _tell_differs(self, worker: str, found: str) -> None:
        line = f"rollouts that {worker[:16]} answers for differ from their replay more than honest ones did: {found}"
        self._tell(worker, f"{line}; this bans no worker, and each of its groups is replayed from now on")

    def _tell(self, key: str, line: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._to_tell.append((key, line))

    def _tell_all(self) -> None:
        with self._lock:
            lines, self._to_tell = self._to_tell, []
        for key, line in lines:
            self._on_flagged(key, line)


def server_of(rollouts: Sequence[rollout_lib.Rollout], registered: Collection[str]) -> str:
    """Returns the one server of `registered` (public keys in hex) that all samples of a group name, or "". Checks no signature."""
    servers = {rollout.server for rollout in rollouts}
    server = servers.pop() if len(servers) == 1 else ""
    return server if server in registered else ""


def server_at_fault(
    rollouts: Sequence[rollout_lib.Rollout],
    verdict: checks.Verdict,
    rules: rules_lib.Rules,
    registered: Collection[str],
) -> str:
    """Returns the server that is at fault for a refused group of well-formed rollouts, or "" if its worker is.

    `verdict` is the reason of the refusal, `rules` are those of the group's lease, and `registered` the public keys of the run's
    servers.
    """
    if verdict.reason not in OF_SERVERS or not (server := server_of(rollouts, registered)):
        return ""
    if verdict.reason == Reason.VERSIONS and any(checks.is_excluded(rollout, rules) for rollout in rollouts):
        return ""
    if verdict.reason == Reason.KEPT and any(bool(one.kept) != bool(checks.kept_width(one, rules)) for one in rollouts):
        return ""
    return server if all(checks.vouched(rollout, rules).accepted for rollout in rollouts) else ""


class _SeenSet:
    """A set of (step, entry) pairs that keeps only the newest `keep_steps` steps."""

    def __init__(self, keep_steps: int):
        self._keep_steps = keep_steps
        self._by_step: dict[int, set[Any]] = {}

    def __contains__(self, item: tuple[int, Any]) -> bool:
        step, entry = item
        return entry in self._by_step.get(step, ())

    def add(self, step: int, entry: Any) -> None:
        """Adds a hashable entry of one step, and drops all entries of steps that are too old."""
        self._by_step.setdefault(step, set()).add(entry)
        over = max(self._by_step) - self._keep_steps
        for old in [old for old in self._by_step if old <= over]:
            del self._by_step[old]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((step, entry) for step, entries in self._by_step.items() for entry in entries)
