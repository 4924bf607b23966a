"""Verdicts on the groups of one run: the only place where a validator decides, and the only memory of its evidence.

1. `judge` answers a run's orchestrator (rl/swarm/orchestrator/verdicts/verdict_collector.py) with signed verdicts. A request is a Parquet file of
   training groups. It is signed by the key of the run, so that strangers cannot use up this validator's time.
2. `check` gives the verdicts. Every group passes all checks, those without weights included, so that a verdict needs no other's word.
   The groups of a request are replayed together. rl/trust/validator/service.py calls it for rollout files.
3. Evidence against workers is in a file before a verdict leaves, so that a restart does not help a cheat. A group that was
   judged before gets the same verdict again, and counts once as evidence.
"""

import collections
import hashlib
import threading
from collections.abc import Collection, Mapping, Sequence

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease
from rl.protocol import verdict as verdict_lib
from rl.trust.validator import state as validator_state
from rl.trust.verification import checks, verifier
from rl.trust.verification import rules as rules_lib

KEPT = 4096  # verdicts that are given again when asked again
OUR_FAULT = (checks.Reason.WEIGHTS,)  # reasons that may not hold at the next request

Rollouts = Sequence[rollout_lib.Rollout]  # of one group
Group = tuple[str, int, int]  # worker, step, number


class Judge:
    """Checks groups of rollouts and signs verdicts on them. Any thread may call the methods; one request is checked at a time.

    Args:
      checker: the checks, with access to the published weights.
      key: this validator's own key.
      run: public key of the run, which signs the requests.
      state: file of the evidence against workers; the caller closes it.
      keep_steps: steps after which a rollout is not submitted again.
    """

    def __init__(
        self,
        checker: verifier.Verifier,
        key: rollout_lib.WorkerKey,
        run: str,
        *,
        state: validator_state.State,
        keep_steps: int,
    ):
        self.checker, self.key, self.run = checker, key, run
        self.state, self.keep_steps, self._newest = state, keep_steps, 0
        self._requests = lease.RequestVerifier(lease.Session(run, key.worker), admit=self._admit)
        # A request has as many groups as fit one replay, or one group.
        num_rows = checker.rules.max_samples * checker.rules.max_branches
        self._max_rows = max(rules_lib.MAX_REPLAY_ROWS, num_rows)
        self._known: collections.OrderedDict[str, checks.Verdict] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        checker.evidence.restore(state.all(validator_state.TESTS), **state.get(validator_state.COUNTED, "") or {})

    @property
    def is_busy(self) -> bool:
        """Returns True while a request is checked."""
        return self._lock.locked()

    def verify(self, header: str) -> dict:
        """Returns the signed request in an HTTP header; its field names the SHA-256 of the body. Raises ValueError to reject it before the body is read."""
        message = lease.read_header(header)
        self._requests.verify(message, "verdicts")
        return message

    def judge(self, body: bytes, digest: str) -> list[verdict_lib.SignedVerdict]:
        """Returns a verdict on each group in the bytes of a Parquet file with this SHA-256. Raises ValueError if it is not such a file."""
        if hashlib.sha256(body).hexdigest() != digest:
            raise ValueError(f"the body does not have the SHA-256 {digest} that was signed; send it again")
        by_group: dict[Group, list[rollout_lib.Rollout]] = collections.defaultdict(list)
        for rollout in parquet.from_bytes(body, max_rows=self._max_rows, max_tokens=self.checker.rules.max_model_len):
            by_group[rollout.worker, rollout.step, rollout.task.group].append(rollout)
        groups = {verdict_lib.group_digest(rollouts): rollouts for rollouts in by_group.values()}
        verdicts = []
        for name, found in self.check(groups).items():
            first = groups[name][0]
            signed = verdict_lib.SignedVerdict(
                run=self.run,
                split="train",
                step=first.step,
                group=first.task.group,
                digest=name,
                accepted=found.accepted,
                reason=str(found.reason),
                detail=found.detail,
            )
            verdicts.append(signed.sign(self.key))
            self.counts[found.reason] += 1
        return verdicts

    def check(self, groups: Mapping[str, Rollouts], drawn: Collection[str] | None = None) -> dict[str, checks.Verdict]:
        """Returns a verdict on each of these well-formed groups of one worker each, by their digest. Blocks while another request is checked.

        Only groups in `drawn` are replayed (None: all). The others pass if all else is good.
        """
        drawn = groups.keys() if drawn is None else drawn
        with self._lock:
            found = {name: self._known[name] for name in groups if name in self._known}
            if new := {name: rollouts for name, rollouts in groups.items() if name not in found}:
                found |= self._check(new, drawn)
        return {name: found[name] for name in groups}

    def _admit(self, worker: str, message: dict) -> None:
        if worker != self.run:
            raise ValueError(f"the request is not signed by run {self.run[:16]}; sign it with the key of the run")

    def _check(self, groups: Mapping[str, Rollouts], drawn: Collection[str]) -> dict[str, checks.Verdict]:
        """Checks new groups, writes the evidence, and remembers the verdicts that will hold. The caller has the lock."""
        found = {name: self._check_without_weights(rollouts) for name, rollouts in groups.items()}
        replayed = [name for name, verdict in found.items() if verdict.accepted and name in drawn]
        verdicts = self.checker.check_groups_with_weights([groups[name] for name in replayed])
        found |= dict(zip(replayed, verdicts, strict=True))
        self._newest = max([self._newest, *(rollouts[0].step for rollouts in groups.values())])
        self._write_evidence()
        for name, verdict in found.items():
            if verdict.reason not in OUR_FAULT and (name in replayed or not verdict.accepted):
                self._known[name] = verdict
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found

    def _check_without_weights(self, rollouts: Rollouts) -> checks.Verdict:
        whole = checks.whole_group(rollouts, self.checker.rules)
        return self.checker.check_group_without_weights(rollouts)[0] if whole.accepted else whole

    def _write_evidence(self) -> None:
        """Writes the tests of all workers; if there are too many, without those with the least evidence."""
        evidence = self.checker.evidence.state(self._newest - self.keep_steps)
        tests = evidence.pop("records")
        if len(tests) > validator_state.MAX_ENTRIES:
            by_evidence = sorted(tests, key=lambda worker: max(map(max, tests[worker]["log_wealth"].values())))
            dropped = by_evidence[: len(tests) // 4]
            self.checker.evidence.forget(dropped)
            tests |= dict.fromkeys(dropped)
        self.state.commit({validator_state.TESTS: tests, validator_state.COUNTED: {"": evidence}})
