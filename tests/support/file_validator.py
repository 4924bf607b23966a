"""A validation service on real files, state, and ledger, whose checks are a stand-in without weights: the test sets the result of the replay."""

import dataclasses
import hashlib
import pathlib
import time

import numpy as np

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease
from rl.protocol.ledger import events, ledger
from rl.trust.validator import judge, service, state, status
from rl.trust.verification import checks, evidence_log, sequential_test
from rl.trust.verification import rules as rules_lib
from tests.support import bare_rules, tiny

KEEPER, KEY, OTHER, RUN = (rollout_lib.WorkerKey.generate() for _ in range(4))
G, STAKE, SLASH, WAIT_S, KEEP_STEPS = 4, 100, 30, 60, 8
BANDS = sequential_test.Bands(margin=0.1, logprob=0.1, proof=0.1, shape=0.1)


def prescribed(step, number):
    return lease.Lease(step, number, "train", number, 0, G, 1.0, max(0, step - 2))


def rules(per_step=2):
    """Rules by which step n has the groups from per_step * (n - 1) on."""
    return dataclasses.replace(
        bare_rules.make(tiny.model(), 64, rules_lib.Tolerance(0, 0, 0)),
        env="e",
        env_seed=0,
        groups=lambda step: {n: prescribed(step, n) for n in range(per_step * (step - 1), per_step * step)},
    )


class Checker:
    """Checks versions; `verdict` is the replay of a rollout, and may raise. Every rollout is evidence of `margin`."""

    def __init__(self, of=None):
        self.model, self.rules, self.evidence = tiny.model(), of or rules(), evidence_log.EvidenceLog(BANDS)
        self.verdict, self.margin, self.num_replayed = (lambda rollout: checks.OK), 0.0, 0

    def check_group_without_weights(self, rollouts):
        return checks.first_rejection(checks.version_window(one, self.rules) for one in rollouts), {}

    def check_groups_with_weights(self, groups):
        return [self._replay(rollouts) for rollouts in groups]

    def _replay(self, rollouts):
        self.num_replayed += len(rollouts)
        verdict = checks.first_rejection(map(self.verdict, rollouts))
        if not verdict.accepted:
            return verdict
        self.evidence.add_replays([(rollout, evidence(self.margin)) for rollout in rollouts])
        return self.evidence.verdict(rollouts[0].worker)


def evidence(margin):
    return sequential_test.Evidence(margin, 0.0, np.zeros(len(sequential_test.TILTS)), 0.0, *[np.zeros(0)] * 5)


def group(number=0, key=KEY, *, length=8, step=1, version=0):
    """One group's rollouts, signed."""
    mask = np.arange(length) >= 3
    return [
        rollout_lib.sign(
            tiny.rollout(
                mask,
                tokens=np.full(length, 5, np.int32),
                logprobs=np.where(mask, -0.5, 0).astype(np.float32),
                versions=np.full(length, version, np.int32),
                seed=sample,
                task=rollout_lib.TaskRef("e", number, number, 0),
                sample=sample,
                step=step,
            ),
            key,
        )
        for sample in range(G)
    ]


def flops(rollouts):
    return sum(status.flops_of(tiny.model(), rollout)[1] for rollout in rollouts)


def make_ledger(folder, *keys):
    with ledger.Ledger.create(folder / "ledger.db", KEEPER) as opened:
        for key in keys or (KEY, OTHER):
            opened.append(events.sign("join", key.worker, key))
            opened.append(events.sign("stake", key.worker, key, amount=STAKE))
    (folder / "files").mkdir()


class Stand:
    """A service on the files, the ledger, and the state in a folder of `make_ledger`. Everything is replayed, unless `min_rate` is lower."""

    def __init__(self, folder: pathlib.Path, checker=None, *, keeper=KEEPER, min_rate=1.0, eject=True, newest=8):
        self.folder, self.root, self.newest = folder, folder / "files", newest
        self.checker = checker or Checker()
        self.ledger = ledger.Ledger(folder / "ledger.db", keeper)
        self.state = state.State(folder / "state.db", "a run")
        self.judge = judge.Judge(self.checker, KEY, RUN.worker, state=self.state, keep_steps=KEEP_STEPS)
        options = {"ledger": self.ledger, "slash": SLASH, "eject": eject, "secret": b"s", "min_rate": min_rate}
        self.service = service.Service(self.judge, self.root, lambda: self.newest, **options)

    def close(self):
        self.service.close()
        self.state.close()
        self.ledger.close()

    def write(self, name, rollouts) -> str:
        """Writes a file; returns its hash."""
        contents = rollouts if isinstance(rollouts, bytes) else parquet.to_bytes(list(rollouts))
        (self.root / name).write_bytes(contents)
        return hashlib.sha256(contents).hexdigest()

    def put(self, name, rollouts, node=KEY, units=None) -> str:
        """Writes a file and submits its work for `node`; returns its hash."""
        sha = self.write(name, rollouts)
        units = units or (9 if isinstance(rollouts, bytes) else flops(rollouts))
        self.ledger.append(events.sign("submit", node.worker, node, work=sha, units=units))
        return sha

    def ask(self, name, *shas, group=None, address=None) -> status.Status:
        """Requests a verdict and waits for it."""
        group = len(shas) > 1 if group is None else group
        self.service.submit(name, shas, address, group=group)
        return self.wait(name, group=group)

    def wait(self, name, *, group=False) -> status.Status:
        deadline = time.monotonic() + WAIT_S
        while (found := self.service.status(name, group=group)).status == "pending":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return found

    def paid(self, sha) -> int:
        work = self.ledger.state.works[sha]
        return work.units if work.status == "accepted" else 0

    def node(self, key):
        """(stake, slashes, invalidated submissions, is it ejected) of a worker by the ledger."""
        found = self.ledger.refresh().workers[key.worker]
        return found.stake, found.num_slashes, found.num_invalidated, found.ejected


UNHARMED = STAKE, 0, 0, False
