"""Payment and penalties of a request at the validation service: each file is settled separately, and a client's claims cost a worker nothing.

The validator is a stand-in without weights: signatures are real, and the test sets the result of the replay. There are two groups of four
samples, two workers with a stake each, a ledger, and files on disk.
"""

import concurrent.futures
import dataclasses
import hashlib
import sqlite3
import threading
import time

import numpy as np
import pytest

from inference.proofs import toploc
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.ledger import balances
from rl.ledger import events as ledger_events
from rl.ledger import ledger as ledger_lib
from rl.protocol import lease
from rl.validator import service as service_lib
from rl.validator import state
from rl.validator import status as validator_status
from rl.verification import checks, evidence_log, replay, sequential_test, verifier
from rl.verification import rules as rules_lib
from tests.support import bare_rules, tiny

KEEPER, KEY, OTHER = (rollout_lib.WorkerKey.generate() for _ in range(3))
G, STAKE, SLASH, WAIT_S = 4, 100, 30, 60


def prescribed(step, number):
    return lease.Lease(step, number, "train", number, 0, G, 1.0, max(0, step - 2))


BANDS = sequential_test.Bands(margin=0.1, logprob=0.1, proof=0.1, shape=0.1)
RULES = dataclasses.replace(
    bare_rules.make(tiny.model(), 64, rules_lib.Tolerance(0, 0, 0)),
    env="e",
    env_seed=0,
    groups=lambda step: [prescribed(step, g) for g in range(2 * step - 2, 2 * step)],
)


class Evidence(evidence_log.EvidenceLog):
    def add_claims(self, rollouts):  # nothing here was drawn
        return [checks.OK] * len(rollouts)


class Validator(verifier.Validator):
    """Checks signatures and versions; `verdict` is the replay, and may raise. Every rollout is evidence of `margin`."""

    def __init__(self, rules):
        super().__init__(tiny.model(), None, rules, Evidence(BANDS))
        self.verdict, self.margin = lambda rollout: checks.OK, 0.0

    def check_without_weights(self, rollouts, *, newest):
        rules = dataclasses.replace(self.rules, newest=newest)
        return [checks.first_failure((checks.signature, checks.version_window), r, rules) for r in rollouts]

    def check_with_weights(self, rollouts):
        return [self._verdict(rollout) for rollout in rollouts]

    def _verdict(self, rollout):
        verdict = self.verdict(rollout)
        if not verdict.accepted:
            return verdict
        results = [toploc.ProofResult(True, "ok", 0, 0.0, 0.0, 0)]
        margin_N, zeros = np.full(5, self.margin), np.zeros(len(sequential_test.TILTS))
        values = np.arange(3, 8), margin_N, np.ones(5), np.full(5, -0.5), zeros, np.zeros((5, 32))
        evidence = replay.Replayed(rollout, *values, proofs=results).evidence
        self.evidence.add_replays([(rollout, evidence)])
        return self.evidence.verdict(rollout.worker)


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


def make_ledger(folder, *keys):
    with ledger_lib.Ledger.create(folder / "ledger.db", KEEPER) as ledger:
        for key in keys or (KEY, OTHER):
            ledger.append(ledger_events.sign("join", key.worker, key))
            ledger.append(ledger_events.sign("stake", key.worker, key, amount=STAKE))
    (folder / "files").mkdir()


def start(folder, validator=None, *, keeper=KEEPER, rules=RULES, eject=True, min_rate=0.05):
    """Starts a service on the files in `folder`."""
    return service_lib.Service(
        validator or Validator(rules),
        folder / "files",
        lambda: 8,
        secret=b"s",
        min_rate=min_rate,
        state=state.State(folder / "state.db", "a run", keep_steps=8),
        ledger=ledger_lib.Ledger(folder / "ledger.db", keeper),
        slash=SLASH,
        eject=eject,
    )


@pytest.fixture
def service(tmp_path):
    """Everything is replayed, however well its node is reputed."""
    make_ledger(tmp_path)
    made = start(tmp_path, min_rate=1.0)
    yield made
    close(made)


def close(service):
    service.close()
    service._ledger.close()


def flops(rollouts):
    return sum(validator_status.flops_of(tiny.model(), rollout)[1] for rollout in rollouts)


def put(service, name, rollouts, node=KEY, units=None):
    """Writes a file and submits its work for `node`, unless that is None; returns its hash."""
    contents = rollouts if isinstance(rollouts, bytes) else parquet.to_bytes(rollouts)
    sha = hashlib.sha256(contents).hexdigest()
    (service._root / name).write_bytes(contents)
    if node is not None:
        units = units or (9 if isinstance(rollouts, bytes) else flops(rollouts))
        service._ledger.append(ledger_events.sign("submit", node.worker, node, work=sha, units=units))
    return sha


def ask(service, name, *shas, group=None, address=None):
    group = len(shas) > 1 if group is None else group
    service.submit(name, shas, address, group=group)
    concurrent.futures.wait(list(service._futures.values()), WAIT_S)
    return service.status(name, group=group)


def paid(service, sha):
    work = service._ledger.state.works[sha]
    return work.units if work.status == "accepted" else 0


def unharmed(service, key):
    """No event of the ledger took anything from the node, or from its name."""
    node = service._ledger.state.workers[key.worker]
    return (node.stake, node.num_slashes, node.num_invalidated, node.ejected) == (STAKE, 0, 0, False)


# ---- each file for itself --------------------------------------------------------------------------------------------


def test_claimed_units_are_held_against_each_file_in_any_company(service):
    greedy = put(service, "a-0.parquet", group(0), units=2**53)
    stray = put(service, "a-1.parquet", group(2, OTHER, step=2), None)
    with pytest.raises(ValueError, match=f"{stray} is not work of this ledger; append its submit event first"):
        service.submit("a-0.parquet", [greedy, stray], group=True)
    assert put(service, "a-1.parquet", group(2, OTHER, step=2), OTHER) == stray
    assert ask(service, "a-1.parquet", stray, group=False).status == "accept"
    honest = put(service, "b-1.parquet", group(1, OTHER, length=9), OTHER)
    (service._root / "b-0.parquet").write_bytes((service._root / "a-0.parquet").read_bytes())
    status = ask(service, "b-0.parquet", greedy, honest)
    assert status.status == "reject" and status.failing_indices == (0,) and status.reasons[0].startswith("units: ")
    assert paid(service, greedy) == 0 and service._ledger.state.workers[KEY.worker].stake == STAKE - SLASH
    assert paid(service, honest) == flops(group(1, OTHER, length=9)) and unharmed(service, OTHER)


def test_nobody_is_paid_for_a_file_that_another_signed(service):
    stolen = put(service, "a-0.parquet", group(0), OTHER)
    own = put(service, "a-1.parquet", group(1, OTHER), OTHER)
    status = ask(service, "a-0.parquet", stolen, own)
    assert status.reasons == {0: "signature: another worker signed the rollouts than the one that submitted the work"}
    assert paid(service, stolen) == 0 and service._ledger.state.workers[OTHER.worker].ejected and unharmed(service, KEY)


def test_a_neighbours_garbage_is_the_neighbours(service):
    garbage = put(service, "a-0.parquet", b"PAR1 and so on PAR1", OTHER)
    honest = put(service, "a-1.parquet", group(0))
    status = ask(service, "a-0.parquet", garbage, honest)
    assert (status.status, status.failing_indices) == ("reject", (0,))
    assert paid(service, honest) == flops(group(0)) and unharmed(service, KEY)
    assert service._ledger.state.workers[OTHER.worker].ejected


def test_a_neighbour_cannot_spoil_or_complete_a_group(service):
    """OTHER sends the second half of a group whose first half is KEY's."""
    half, rest = put(service, "a-0.parquet", group(0)[:2]), put(service, "a-1.parquet", group(0, OTHER)[2:], OTHER)
    assert ask(service, "a-0.parquet", half, rest).status == "incomplete_group"
    service._validator.verdict = lambda r: checks.Verdict("sampling") if r.worker == OTHER.worker else checks.OK
    twin = put(service, "b-1.parquet", group(1, OTHER), OTHER)
    mine = put(service, "b-0.parquet", group(1))
    status = ask(service, "b-0.parquet", mine, twin)
    assert status.failing_indices == (1,) and paid(service, mine) == flops(group(1)) and unharmed(service, KEY)


def test_a_cheat_in_one_half_costs_its_node_both(service):
    service._validator.verdict = lambda r: checks.Verdict("sampling", "no") if r.sample == 3 else checks.OK
    shas = [put(service, f"a-{i}.parquet", group(0)[2 * i : 2 * i + 2]) for i in range(2)]
    status = ask(service, "a-0.parquet", *shas)
    assert (status.status, status.failing_indices, status.reasons) == ("reject", (0, 1), {1: "sampling: no"})
    node = service._ledger.state.workers[KEY.worker]
    assert (node.num_invalidated, node.num_slashes, node.ejected) == (2, 1, True)


# ---- a client's claims cost nothing ----------------------------------------------------------------------------------


def test_a_part_of_a_group_asked_alone_costs_nothing(service):
    shas = [
        put(service, f"a-{i}.parquet", group(0)[2 * i : 2 * i + 2] + (group(1) if i == 0 else [])) for i in range(2)
    ]
    for is_group in (False, True):
        status = ask(service, "a-0.parquet", shas[0], group=is_group)
        assert status.status == "incomplete_group" and status.reason.startswith("samples: expected 0..3 once each")
    assert unharmed(service, KEY) and service._ledger.state.works[shas[0]].status == "pending"
    assert ask(service, "a-0.parquet", *shas).status == "accept"
    assert [paid(service, sha) > 0 for sha in shas] == [True, True]
    assert ask(service, "a-0.parquet", shas[0], group=False).status == "accept"  # the same bytes, the same status


def test_what_was_not_replayed_is_not_taken_for_done(service):
    """A forged group, a good one, and half a group of another worker in one request: the good task can be submitted again."""
    forged = [dataclasses.replace(rollout, reward=1.0) for rollout in group(0)]
    shas = [put(service, "a-0.parquet", forged + group(1)), put(service, "a-1.parquet", group(0, OTHER)[:2], OTHER)]
    status = ask(service, "a-0.parquet", *shas)
    assert status.status == "reject" and list(status.reasons) == [0] and not status.checked
    again = put(service, "b.parquet", group(1, OTHER), OTHER)
    assert ask(service, "b.parquet", again).status == "accept" and unharmed(service, OTHER)


def test_a_file_is_judged_once_under_any_name_and_route(service):
    sha = put(service, "a-0.parquet", group(0))
    (service._root / "b-0.parquet").write_bytes((service._root / "a-0.parquet").read_bytes())
    other = put(service, "b-1.parquet", group(1))
    assert ask(service, "a-0.parquet", sha, group=False).status == "accept"
    for name, shas, is_group in (("a-0", [sha], True), ("b-0", [sha], False), ("b-0", [sha, other], True)):
        status = ask(service, f"{name}.parquet", *shas, group=is_group)
        assert status.status == "accept" and status.output_flops == sum(paid(service, s) for s in shas) > 0
    assert unharmed(service, KEY)


def test_a_status_is_that_of_its_own_route(service):
    shas = [put(service, f"a-{i}.parquet", group(0)[2 * i : 2 * i + 2]) for i in range(2)]
    (service._root / "a-1.parquet").rename(service._root / "b-1.parquet")
    assert ask(service, "a-0.parquet", *shas).status == "incomplete_group"
    (service._root / "b-1.parquet").rename(service._root / "a-1.parquet")
    assert ask(service, "a-0.parquet", *shas).status == "accept"
    assert service.status("a-0.parquet").status == "unknown"
    with pytest.raises(ValueError, match="is not a name of a group's file"):
        service.submit("a.parquet", shas[:1], group=True)
    with pytest.raises(ValueError, match="names one file twice"):
        service.submit("a-0.parquet", [shas[0]] * 2, group=True)


def test_the_same_task_twice_is_not_paid_twice_and_no_offence(service):
    """A lease that ran out: both did the task."""
    first, second = put(service, "a.parquet", group(0)), put(service, "b.parquet", group(0, OTHER), OTHER)
    assert ask(service, "a.parquet", first).status == "accept"
    assert ask(service, "b.parquet", second).reason.startswith("duplicate: sample 0 of group 0 was accepted before")
    node = service._ledger.state.workers[OTHER.worker]
    assert paid(service, second) == 0 and (node.stake, node.num_slashes, node.ejected) == (STAKE, 0, False)
    both = [put(service, f"c-{i}.parquet", group(1, key), key) for i, key in enumerate((KEY, OTHER))]
    assert ask(service, "c-0.parquet", *both).failing_indices == (1,)
    assert [paid(service, sha) > 0 for sha in both] == [True, False]


def test_simultaneous_askers_get_one_verdict(service):
    shas = [put(service, f"{i}.parquet", group(i)) for i in range(2)]
    with concurrent.futures.ThreadPoolExecutor(8) as askers:
        for i, sha in enumerate(shas):
            said = list(askers.map(lambda _, i=i, sha=sha: service.submit(f"{i}.parquet", [sha]).status, range(32)))
            assert set(said) <= {"pending", "accept"}
    concurrent.futures.wait(list(service._futures.values()), WAIT_S)
    assert service.counts == {"accept": 2} and len(service._futures) == 2 and unharmed(service, KEY)


def test_a_drawn_group_is_replayed_in_any_file(tmp_path, monkeypatch):
    """Its weights are gone: no choice of files, no other bytes, and no other worker of the same repute gets it accepted."""
    monkeypatch.setattr(balances.State, "reputation", lambda self, worker: 0.5)
    make_ledger(tmp_path)
    service = start(
        tmp_path, rules=dataclasses.replace(RULES, groups=lambda step: [prescribed(step, g) for g in range(8)])
    )
    service._validator.verdict = lambda rollout: checks.Verdict("weights", "cleaned away")
    drawn, other, *spared = sorted(range(8), key=lambda g: not service._is_drawn(group(g)[0]))
    assert service._is_drawn(group(other)[0]) and not any(service._is_drawn(group(g)[0]) for g in spared[-2:])
    for number, company in enumerate([[drawn], [drawn, other], *([drawn, g] for g in spared)]):
        sha = put(service, f"{number}.parquet", [one for g in company for one in group(g)])
        assert ask(service, f"{number}.parquet", sha).status == "crashed"
    assert ask(service, "o.parquet", put(service, "o.parquet", group(drawn, OTHER), OTHER)).status == "crashed"
    status = ask(service, "s.parquet", put(service, "s.parquet", group(spared[-1])))
    assert status.status == "accept" and not status.checked
    close(service)


# ---- our own faults --------------------------------------------------------------------------------------------------


def test_a_slow_scorer_delays_the_node_that_it_is_slow_for(service):
    """Many slow files of one node: another's are judged meanwhile, also in company, and so are they in the end."""
    go_on, begun, judge = threading.Event(), threading.Semaphore(0), service._validator.check_without_weights

    def slow(rollouts, *, newest):
        if rollouts and rollouts[0].worker == KEY.worker:
            begun.release()
            assert go_on.wait(WAIT_S)
        return judge(rollouts, newest=newest)

    service._validator.check_without_weights = slow
    shas = [put(service, f"slow{n}.parquet", group(0)[: n + 1]) for n in range(3)]
    for n, sha in enumerate(shas):
        assert service.submit(f"slow{n}.parquet", [sha]).status == "pending"
    assert begun.acquire(timeout=WAIT_S) and begun.acquire(timeout=WAIT_S)
    quick = put(service, "quick.parquet", group(1, OTHER), OTHER)
    service.submit("quick.parquet", [quick])
    deadline = time.monotonic() + WAIT_S
    while service.status("quick.parquet").status != "accept":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(service.status(f"slow{n}.parquet").status == "pending" for n in range(3))
    go_on.set()
    concurrent.futures.wait(list(service._futures.values()), WAIT_S)
    assert [service.status(f"slow{n}.parquet").status for n in range(3)] == ["incomplete_group"] * 3


def test_what_became_final_while_it_was_looked_over_stays_so(service):
    """Requested alone and in a group at the same time: one verdict, one payment."""
    judge, gate = service._validator.check_without_weights, threading.Barrier(2)

    def together(rollouts, *, newest):
        gate.wait(WAIT_S)
        return judge(rollouts, newest=newest)

    service._validator.check_without_weights = together
    shas = [put(service, f"a-{n}.parquet", group(n)) for n in range(2)]
    service.submit("a-0.parquet", shas[:1])
    service.submit("a-0.parquet", shas, group=True)
    concurrent.futures.wait(list(service._futures.values()), WAIT_S)
    assert service.status("a-0.parquet").status == service.status("a-0.parquet", group=True).status == "accept"
    assert service._ledger.state.workers[KEY.worker].num_accepted == 2 and service.counts == {"accept": 2}


def test_weights_that_cannot_be_had_cost_nobody_anything(service):
    sha = put(service, "a.parquet", group(0))
    check = service._validator.check_without_weights
    for name, fault, reason in (
        ("verdict", lambda rollout: checks.Verdict("weights", "v3 was cleaned away"), "v3 was cleaned away"),
        ("verdict", lambda rollout: (_ for _ in ()).throw(ConnectionError("no relay answers")), "ConnectionError"),
        ("check_without_weights", lambda rollouts, newest: 1 / 0, "ZeroDivisionError"),
    ):
        setattr(service._validator, name, fault)
        status = ask(service, "a.parquet", sha)
        assert status.status == "crashed" and reason in status.reason
        assert unharmed(service, KEY) and service._ledger.state.works[sha].status == "pending"
    service._validator.verdict, service._validator.check_without_weights = lambda rollout: checks.OK, check
    assert ask(service, "a.parquet", sha).status == "accept" and paid(service, sha)  # handed in again


def test_a_version_that_has_not_come_here_yet_is_no_offence(service):
    service._newest = lambda: 1
    sha = put(service, "a-0.parquet", group(4, step=3, version=2))
    fine = put(service, "a-1.parquet", group(0, OTHER), OTHER)
    status = ask(service, "a-0.parquet", sha, fine)
    assert status.status == "crashed" and "version 2 is not here yet" in status.reason
    assert unharmed(service, KEY) and unharmed(service, OTHER) and not service._validator.evidence.tests
    assert ask(service, "a-1.parquet", fine).status == "accept"
    service._newest = lambda: 2
    assert ask(service, "a-0.parquet", sha).status == "accept"
    early = put(service, "b.parquet", group(4, OTHER, step=3, version=3), OTHER)  # batch 3 is made with version 2
    assert ask(service, "b.parquet", early).reason.startswith("versions: 3 is newer than 2")
    assert service._ledger.state.workers[OTHER.worker].ejected


def test_a_ledger_that_could_not_be_written_is_written_when_asked_again(service, monkeypatch):
    sha = put(service, "a.parquet", group(0))
    with monkeypatch.context() as patch:
        patch.setattr(service._ledger, "append", lambda *events: (_ for _ in ()).throw(sqlite3.Error("locked")))
        assert ask(service, "a.parquet", sha).status == "crashed"
    assert ask(service, "a.parquet", sha).status == "accept" and paid(service, sha) == flops(group(0))


def test_a_request_is_bounded_before_it_is_read(service, monkeypatch):
    shas = [put(service, f"a-{i}.parquet", group(i)) for i in range(2)]
    size = (service._root / "a-0.parquet").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(service_lib.parquet_footer, "MAX_FILE_BYTES", size + 9)
        with pytest.raises(ValueError, match=f"at most {size + 9} are read"):
            service.submit("a-0.parquet", shas, group=True)
    experts = np.zeros((7, 2, 8), np.uint8)  # 112 bytes, where tokens and proofs of both files take 210
    for limit, claims in ((200, {}), (400, {"routed_experts": experts})):
        with monkeypatch.context() as patch:
            one = dataclasses.replace(group(0)[0], proofs=b"x", **claims)
            patch.setattr(service_lib.parquet, "from_bytes", lambda data, one=one, **limits: [one])
            patch.setattr(service_lib.parquet_footer, "MAX_DECODED_BYTES", limit)
            assert ask(service, "a-0.parquet", *shas).status == "crashed"
    assert ask(service, "a-0.parquet", *shas).status == "accept"
    many = put(service, "many.parquet", group(0) * 17)  # a step has 8, and 8 steps are remembered
    assert "68 rows, at most 64 are read" in ask(service, "many.parquet", many).reason
