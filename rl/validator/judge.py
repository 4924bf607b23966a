"""Signed verdicts on the groups of one run, which its orchestrator asks for (rl/orchestrator/verdicts/verdict_collector.py).

1. A request is a Parquet file of training groups. It is signed by the key of the run, so that strangers cannot use up this validator's time.
2. Every group passes all checks, those without weights included, so that a verdict needs no other's word. The groups of a request
   are replayed together. A verdict states the digest of the bytes that it is about.
3. Evidence against workers is in a file before a verdict is sent, so that a restart does not help a cheat. A group that was
   judged before gets the same verdict again, and counts once as evidence.
"""

import collections
import hashlib
import json
import pathlib
import threading
from collections.abc import Sequence

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease
from rl.protocol import verdict as verdict_lib
from rl.verification import checks, verifier
from rl.verification import rules as rules_lib
from sharding.system import atomic_file

KEPT = 4096  # verdicts that are sent again when asked again
OUR_FAULT = ("weights",)  # reasons that may not hold at the next request

Group = tuple[str, int, int]  # worker, step, number


class Judge:
    """Checks groups of rollouts and signs verdicts on them. Any thread may call `judge`; one request is replayed at a time.

    Args:
      validator: the checks, with access to the published weights.
      key: this validator's own key.
      run: public key of the run, which signs the requests.
      memory: JSON file of the evidence against workers, created if it does not exist.
      keep_steps: steps after which a rollout is not submitted again.
    """

    def __init__(
        self,
        validator: verifier.Validator,
        key: rollout_lib.WorkerKey,
        run: str,
        *,
        memory: pathlib.Path,
        keep_steps: int,
    ):
        self._validator, self.key, self.run = validator, key, run
        self._memory, self._keep_steps, self._newest = memory, keep_steps, 0
        self._requests = lease.RequestVerifier(lease.Session(run, key.worker), admit=self._admit)
        # A request has as many groups as fit one replay, or one group.
        num_rows = validator.rules.max_samples * validator.rules.max_branches
        self._max_rows = max(rules_lib.MAX_REPLAY_ROWS, num_rows)
        self._known: collections.OrderedDict[str, verdict_lib.SignedVerdict] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        if memory.exists():
            saved = atomic_file.read_json(memory, dict)
            if saved.get("run") != run:
                raise ValueError(f"{memory} is of run {str(saved.get('run'))[:16]}, not of {run[:16]}; remove it")
            try:
                validator.evidence.restore(**saved["evidence"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{memory} is damaged ({error!r}); remove it: its evidence is lost") from error

    @property
    def is_busy(self) -> bool:
        """Returns True while a request is checked."""
        return self._lock.locked()

    def verify(self, header: str) -> dict:
        """Returns the signed request, which has the SHA-256 of its body; the body need not be read before. Raises ValueError to reject it."""
        message = lease.read_header(header)
        self._requests.verify(message, "verdicts")
        return message

    def judge(self, body: bytes, digest: str) -> list[verdict_lib.SignedVerdict]:
        """Returns a verdict on each group in the bytes of a Parquet file with this SHA-256. Raises ValueError if it is not such a file."""
        if hashlib.sha256(body).hexdigest() != digest:
            raise ValueError(f"the body does not have the SHA-256 {digest} that was signed; send it again")
        by_group: dict[Group, list[rollout_lib.Rollout]] = collections.defaultdict(list)
        for rollout in parquet.from_bytes(
            body, max_rows=self._max_rows, max_tokens=self._validator.rules.max_model_len
        ):
            by_group[rollout.worker, rollout.step, rollout.task.group].append(rollout)
        groups = {verdict_lib.group_digest(rollouts): rollouts for rollouts in by_group.values()}
        with self._lock:
            if new := {name: rollouts for name, rollouts in groups.items() if name not in self._known}:
                self._check(new)
            verdicts = [self._known[name] for name in groups]
            for name in groups:
                if self._known[name].reason in OUR_FAULT:
                    del self._known[name]
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return verdicts

    def _admit(self, worker: str, message: dict) -> None:
        if worker != self.run:
            raise ValueError(f"the request is not signed by run {self.run[:16]}; sign it with the key of the run")

    def _check(self, groups: dict[str, list[rollout_lib.Rollout]]) -> None:
        """Adds verdicts on new groups, by digest, to those that are known."""
        found = {name: self._check_without_weights(rollouts) for name, rollouts in groups.items()}
        passed = [name for name, verdict in found.items() if verdict.accepted]
        replayed = self._validator.check_groups_with_weights([groups[name] for name in passed])
        found |= dict(zip(passed, replayed, strict=True))
        self._newest = max([self._newest, *(rollouts[0].step for rollouts in groups.values())])
        evidence = self._validator.evidence.state(self._newest - self._keep_steps)
        atomic_file.write(self._memory, json.dumps({"run": self.run, "evidence": evidence}).encode(), durable=True)
        for name, rollouts in groups.items():
            place, verdict = ("train", rollouts[0].step, rollouts[0].task.group), found[name]
            signed = verdict_lib.SignedVerdict(self.run, *place, name, verdict.accepted, verdict.reason, verdict.detail)
            self._known[name] = signed.sign(self.key)
            self.counts[verdict.reason] += 1

    def _check_without_weights(self, rollouts: Sequence[rollout_lib.Rollout]) -> checks.Verdict:
        whole = checks.whole_group(rollouts, self._validator.rules)
        return self._validator.check_group_without_weights(rollouts)[0] if whole.accepted else whole
