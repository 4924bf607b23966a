"""Payment and penalties of a request at the validation service: each file is settled separately, and a client's claims cost a worker nothing.

A restart must not undo decisions: a service is closed, broken, or killed, and another continues with its state file.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import random
import sqlite3
import threading
import time

import numpy as np
import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import balances, events, task_ranges
from rl.trust.validator import service as service_lib
from rl.trust.validator import state as validator_state
from rl.trust.verification import checks, sequential_test
from tests.support import commands, file_validator, ledgers
from tests.support.file_validator import KEY, OTHER, SLASH, STAKE, UNHARMED, WAIT_S, Checker, Stand, flops, group

REASON = checks.Reason


@pytest.fixture
def start(tmp_path):
    """Call it for a service on the same files as the one before, which it closes."""
    file_validator.make_ledger(tmp_path)
    made = []

    def again(checker=None, **options):
        if made:
            made.pop().close()
        made.append(Stand(tmp_path, checker, **options))
        return made[0]

    yield again
    made.pop().close()


@pytest.fixture
def stand(start):
    return start()


def rejects(**of):
    """A replay that rejects rollouts with these fields."""
    return lambda r: (
        checks.Verdict(REASON.SAMPLING, "no") if all(getattr(r, n) == v for n, v in of.items()) else checks.OK
    )


# ---- each file for itself --------------------------------------------------------------------------------------------


def test_claimed_units_are_held_against_each_file_in_any_company(stand):
    greedy = stand.put("a-0.parquet", group(0), units=2**53)
    stray = stand.write("a-1.parquet", group(2, OTHER, step=2))
    with pytest.raises(ValueError, match=f"{stray} is not work of this ledger; append its submit event first"):
        stand.service.submit("a-0.parquet", [greedy, stray], group=True)
    assert stand.put("a-1.parquet", group(2, OTHER, step=2), OTHER) == stray
    assert stand.ask("a-1.parquet", stray).status == "accept"
    honest = stand.put("b-1.parquet", group(1, OTHER, length=9), OTHER)
    stand.write("b-0.parquet", group(0))
    status = stand.ask("b-0.parquet", greedy, honest)
    assert status.status == "reject" and status.failing_indices == (0,) and status.reasons[0].startswith("units: ")
    assert stand.paid(greedy) == 0 and stand.node(KEY)[0] == STAKE - SLASH
    assert stand.paid(honest) == flops(group(1, OTHER, length=9)) and stand.node(OTHER) == UNHARMED


@pytest.mark.parametrize(
    ("bad", "reasons"),
    [
        (group(0), {0: "signature: another worker signed the rollouts than the one that submitted the work"}),
        (b"PAR1 and so on PAR1", {0: "rollout file: "}),
        ([dataclasses.replace(one, reward=1.0) for one in group(0, OTHER)], {0: "signature: the key"}),
        ([], {0: "file: a-0.parquet contains no rollout"}),
    ],
    ids=["another's", "garbage", "changed", "empty"],
)
def test_a_bad_file_costs_its_submitter_alone(stand, bad, reasons):
    if bad == []:
        bad = parquet.to_bytes([])
    shas = [stand.put("a-0.parquet", bad, OTHER), stand.put("a-1.parquet", group(1))]
    status = stand.ask("a-0.parquet", *shas)
    assert (status.status, status.failing_indices, [*status.reasons]) == ("reject", (0,), [0])
    assert status.reasons[0].startswith(reasons[0])
    assert stand.paid(shas[0]) == 0 and stand.node(OTHER)[1:] == (1, 1, True)
    assert stand.paid(shas[1]) == flops(group(1)) and stand.node(KEY) == UNHARMED


def test_a_neighbour_cannot_spoil_or_complete_a_group(stand):
    """OTHER sends the second half of a group whose first half is KEY's."""
    half, rest = stand.put("a-0.parquet", group(0)[:2]), stand.put("a-1.parquet", group(0, OTHER)[2:], OTHER)
    assert stand.ask("a-0.parquet", half, rest).status == "incomplete_group"
    stand.checker.verdict = rejects(worker=OTHER.worker)
    twin, mine = stand.put("b-1.parquet", group(1, OTHER), OTHER), stand.put("b-0.parquet", group(1))
    status = stand.ask("b-0.parquet", mine, twin)
    assert status.failing_indices == (1,) and stand.paid(mine) == flops(group(1)) and stand.node(KEY) == UNHARMED


def test_a_cheat_in_one_half_costs_its_node_both_and_its_sound_group_is_done(stand):
    stand.checker.verdict = rejects(sample=3)
    shas = [stand.put(f"a-{i}.parquet", group(0)[2 * i : 2 * i + 2]) for i in range(2)]
    status = stand.ask("a-0.parquet", *shas)
    assert (status.status, status.failing_indices) == ("reject", (0, 1))
    assert set(status.reasons.values()) == {"sampling: no"} and stand.node(KEY)[1:] == (1, 2, True)


# ---- a client's claims cost nothing ----------------------------------------------------------------------------------


def test_a_part_of_a_group_asked_alone_costs_nothing(stand):
    shas = [stand.put(f"a-{i}.parquet", group(0)[2 * i : 2 * i + 2] + (group(1) if i == 0 else [])) for i in range(2)]
    for is_group in (False, True):
        status = stand.ask("a-0.parquet", shas[0], group=is_group)
        assert status.status == "incomplete_group" and status.reason.startswith("samples: expected 0..3 once each")
    assert stand.node(KEY) == UNHARMED and stand.ledger.state.works[shas[0]].status == "pending"
    assert stand.ask("a-0.parquet", *shas).status == "accept" and all(map(stand.paid, shas))
    assert stand.ask("a-0.parquet", shas[0], group=False).status == "accept"  # the same bytes, the same status
    assert stand.checker.num_replayed == 8  # the whole group of the first file was replayed once


def test_a_file_is_judged_once_under_any_name_and_route(stand):
    sha = stand.put("a-0.parquet", group(0))
    stand.write("b-0.parquet", group(0))
    other = stand.put("b-1.parquet", group(1))
    assert stand.ask("a-0.parquet", sha).status == "accept"
    for name, shas, is_group in (("a-0", [sha], True), ("b-0", [sha], False), ("b-0", [sha, other], True)):
        status = stand.ask(f"{name}.parquet", *shas, group=is_group)
        assert status.status == "accept" and status.output_flops == sum(map(stand.paid, shas)) > 0
    assert stand.node(KEY) == UNHARMED and stand.checker.num_replayed == 8


def test_a_status_is_that_of_its_own_route(stand):
    shas = [stand.put(f"a-{i}.parquet", group(0)[2 * i : 2 * i + 2]) for i in range(2)]
    (stand.root / "a-1.parquet").rename(stand.root / "b-1.parquet")
    assert stand.ask("a-0.parquet", *shas).reason == "file: a-1.parquet does not exist yet"
    (stand.root / "b-1.parquet").rename(stand.root / "a-1.parquet")
    assert stand.ask("a-0.parquet", *shas).status == "accept"
    assert stand.service.status("a-0.parquet").status == "unknown"


@pytest.mark.parametrize(
    ("name", "shas", "is_group", "words"),
    [
        ("a.parquet", ["0" * 64], True, "is not a name of a group's file"),
        ("a-0.parquet", ["0" * 64] * 2, True, "names one file twice"),
        ("a-0.parquet", ["xyz"], False, "file_sha must be a SHA-256"),
        ("a-0.parquet", [], True, "file_sha must be a SHA-256"),
        *(
            (n, ["0" * 64], False, "is not a name of a rollout")
            for n in ("../a.parquet", "/a.parquet", "a.txt", "", ".a.parquet")
        ),
        ("x" * 300 + ".parquet", ["0" * 64], False, "is not a name of a rollout"),
        ("link.parquet", ["0" * 64], False, "is outside"),
        ("a-0.parquet", ["0" * 64], False, "is not work of this ledger"),
    ],
)
def test_bad_requests_are_refused(stand, name, shas, is_group, words):
    (stand.root / "link.parquet").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=words):
        stand.service.submit(name, shas, group=is_group)


def test_what_an_asker_says_costs_nobody_anything(stand):
    sha = stand.put("a.parquet", group(0))
    for name, other, words in [
        ("a.parquet", stand.put("c.parquet", group(1)), "a.parquet does not have the SHA-256 "),
        ("b.parquet", sha, "does not exist"),
    ]:
        with pytest.raises(ValueError, match=words):
            stand.service.submit(name, [other])
    assert stand.ask("a.parquet", sha, address="0" * 64).status == "accept"
    found = stand.service.submit("a.parquet", [sha], "0" * 64)
    assert found.reason.startswith("signature: another worker signed the file")
    assert stand.service.submit("a.parquet", [sha], KEY.worker).status == "accept"
    assert stand.service.counts == {"accept": 1} and stand.node(KEY) == UNHARMED


def test_the_same_task_twice_is_not_paid_twice_and_no_offence(stand):
    """A lease that ran out: both did the task."""
    first, second = stand.put("a.parquet", group(0)), stand.put("b.parquet", group(0, OTHER), OTHER)
    assert stand.ask("a.parquet", first).status == "accept"
    assert stand.ask("b.parquet", second).reason == "duplicate: group 0 of step 1 was accepted before"
    assert stand.paid(second) == 0 and stand.node(OTHER) == (STAKE, 0, 1, False)
    both = [stand.put(f"c-{i}.parquet", group(1, key), key) for i, key in enumerate((KEY, OTHER))]
    assert stand.ask("c-0.parquet", *both).failing_indices == (1,)
    assert [stand.paid(sha) > 0 for sha in both] == [True, False]
    stand.ask("d.parquet", stand.put("d.parquet", group(18, step=10, version=8)))
    late = stand.put("e.parquet", group(3, step=2))
    assert "step 2 is over: rollouts of step 10 were accepted already" in stand.ask("e.parquet", late).reason


def test_simultaneous_askers_get_one_verdict(stand):
    """Also alone and in a group at the same time: one verdict, one payment."""
    shas = [stand.put(f"a-{i}.parquet", group(i)) for i in range(2)]
    with concurrent.futures.ThreadPoolExecutor(8) as askers:
        requests = [
            ("a-0.parquet", shas[:1], False),
            ("a-1.parquet", shas[1:], False),
            ("a-0.parquet", shas, True),
        ] * 16
        found = askers.map(lambda one: stand.service.submit(*one[:2], group=one[2]).status, requests)
        assert set(found) <= {"pending", "accept"}
    for name, _, is_group in requests[:3]:
        assert stand.wait(name, group=is_group).status == "accept"
    assert stand.service.counts == {"accept": 3} and stand.checker.num_replayed == 8
    assert stand.ledger.refresh().workers[KEY.worker].num_accepted == 2 and stand.node(KEY) == UNHARMED


def test_groups_are_drawn_by_repute_in_any_file(start, monkeypatch):
    """A drawn group's weights are gone: no choice of files, no other bytes, and no other worker of the same repute gets it accepted."""
    monkeypatch.setattr(balances.State, "reputation", lambda self, worker: 0.5)
    stand = start(Checker(file_validator.rules(per_step=400)), min_rate=0.05)
    stand.checker.verdict = lambda rollout: checks.Verdict(REASON.WEIGHTS, "cleaned away")
    sha = stand.put("all.parquet", [one for number in range(100) for one in group(number)])
    failing = stand.ask("all.parquet", sha).failing_indices
    assert 30 < len(failing) / file_validator.G < 70  # half of 100: +- 4 standard errors
    drawn = failing[0] // file_validator.G
    spared = next(n for n in range(100) if n * file_validator.G not in failing)
    for key, numbers in ((KEY, [drawn]), (KEY, [drawn, spared]), (OTHER, [drawn])):
        name = f"{key.worker[:4]}{len(numbers)}.parquet"
        sha = stand.put(name, [one for number in numbers for one in group(number, key)], key)
        assert stand.ask(name, sha).status == "crashed"
    status = stand.ask("s.parquet", stand.put("s.parquet", group(spared)))
    assert status.status == "accept" and not status.checked
    monkeypatch.setattr(balances.State, "reputation", lambda self, worker: 0.9999)
    sha = stand.put("t.parquet", [one for number in range(200, 400) for one in group(number)])
    assert 2 < len(stand.ask("t.parquet", sha).failing_indices) / file_validator.G < 23  # never below the lowest rate


def test_a_file_of_more_groups_than_an_event_names_is_refused_and_no_offence(stand, monkeypatch):
    monkeypatch.setattr(task_ranges, "MAX_CHARS", 8)
    sha = stand.put("a.parquet", group(0) + group(2, step=2) + group(4, step=3))
    assert stand.ask("a.parquet", sha).reason.startswith("file: too many groups for an event")
    assert not stand.paid(sha) and stand.node(KEY) == (STAKE, 0, 1, False)


# ---- our own faults --------------------------------------------------------------------------------------------------


def test_a_slow_request_delays_another_worker_by_one_turn(stand):
    go_on, begun, order = threading.Event(), threading.Event(), []

    def slow(rollout):
        begun.set()
        assert go_on.wait(WAIT_S)
        order.append(rollout.worker)
        return checks.OK

    stand.checker.verdict = slow
    for n in range(3):
        stand.service.submit(f"slow{n}.parquet", [stand.put(f"slow{n}.parquet", group(n, step=1 + n // 2))])
        assert begun.wait(WAIT_S) and stand.service.is_busy
    stand.service.submit("quick.parquet", [stand.put("quick.parquet", group(3, OTHER, step=2), OTHER)])
    go_on.set()
    for name in ("slow0", "slow1", "slow2", "quick"):
        assert stand.wait(f"{name}.parquet").status == "accept"
    assert order == [KEY.worker] * 8 + [OTHER.worker] * 4 + [KEY.worker] * 4


def test_weights_that_cannot_be_had_cost_nobody_anything(stand):
    """And what comes again counts once as evidence."""
    sha, screen = stand.put("a.parquet", group(0)), stand.checker.check_group_without_weights
    for name, fault, reason in (
        ("verdict", lambda r: checks.Verdict(REASON.WEIGHTS, "gone") if r.sample == 3 else checks.OK, "gone"),
        ("verdict", lambda rollout: (_ for _ in ()).throw(ConnectionError("no relay answers")), "ConnectionError"),
        ("check_group_without_weights", lambda rollouts: 1 / 0, "ZeroDivisionError"),
    ):
        setattr(stand.checker, name, fault)
        status = stand.ask("a.parquet", sha)
        assert status.status == "crashed" and reason in status.reason
        assert stand.node(KEY) == UNHARMED and stand.ledger.state.works[sha].status == "pending"
    stand.checker.verdict, stand.checker.check_group_without_weights = lambda rollout: checks.OK, screen
    assert stand.ask("a.parquet", sha).status == "accept" and stand.paid(sha)  # handed in again
    assert stand.checker.evidence.tests[KEY.worker].num_rollouts == file_validator.G


def test_a_version_that_has_not_come_here_yet_is_no_offence(stand):
    stand.newest = 1
    sha, fine = stand.put("a-0.parquet", group(4, step=3, version=2)), stand.put("a-1.parquet", group(0, OTHER), OTHER)
    status = stand.ask("a-0.parquet", sha, fine)
    assert status.status == "crashed" and "version 2 is not here yet, the newest is 1" in status.reason
    assert stand.node(KEY) == stand.node(OTHER) == UNHARMED and KEY.worker not in stand.checker.evidence.tests
    stand.newest = 2
    assert stand.ask("a-0.parquet", sha, fine).status == "accept"
    early = stand.put("b.parquet", group(5, OTHER, step=3, version=3), OTHER)  # batch 3 is made with version 2
    assert stand.ask("b.parquet", early).reason.startswith("versions: 3 is newer than 2")


def test_a_request_is_bounded_before_it_is_read(stand, monkeypatch):
    shas = [stand.put(f"a-{i}.parquet", group(i)) for i in range(2)]
    size = (stand.root / "a-0.parquet").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(service_lib.parquet_footer, "MAX_FILE_BYTES", size + 9)
        with pytest.raises(ValueError, match=f"at most {size + 9} are read"):
            stand.service.submit("a-0.parquet", shas, group=True)
    experts = np.zeros((7, 2, 8), np.uint8)  # 112 bytes, where tokens and proofs of both files take 210
    for limit, claims in ((200, {}), (400, {"routed_experts": experts})):
        with monkeypatch.context() as patch:
            one = rollout_lib.sign(dataclasses.replace(group(0)[0], proofs=b"x", **claims), KEY)
            patch.setattr(service_lib.parquet, "from_bytes", lambda data, one=one, **limits: [one])
            patch.setattr(service_lib.parquet_footer, "MAX_DECODED_BYTES", limit)
            assert stand.ask("a-0.parquet", *shas).status == "crashed"
    assert stand.ask("a-0.parquet", *shas).status == "accept"
    many = stand.put("many.parquet", group(0) * 17)  # a step has 8, and 8 steps are remembered
    assert "68 rows, at most 64 are read" in stand.ask("many.parquet", many).reason


# ---- restarts --------------------------------------------------------------------------------------------------------


def test_verdicts_are_kept_and_nothing_is_judged_again(start):
    stand = start()
    good, bad = stand.put("a.parquet", group(0)), stand.put("b-0.parquet", group(1, OTHER), OTHER)
    before = [stand.ask("a.parquet", good)]
    stand.checker.verdict = rejects(sample=3)
    before += [stand.ask("b-0.parquet", bad, group=True)]
    assert [status.status for status in before] == ["accept", "reject"] and before[1].reasons == {0: "sampling: no"}
    stand = start()
    assert [stand.service.status("a.parquet"), stand.service.status("b-0.parquet", group=True)] == before
    assert stand.service.status("b-0.parquet").status == "unknown"
    assert stand.ask("a.parquet", good) == before[0] and stand.ask("b-0.parquet", bad).reasons == {0: "sampling: no"}
    for name, rollouts in (("c", group(0)[::-1]), ("d", group(0, length=9))):
        again = stand.put(f"{name}.parquet", rollouts)
        assert "was accepted before" in stand.ask(f"{name}.parquet", again).reason and not stand.paid(again)
    assert stand.checker.num_replayed == 0 and stand.node(OTHER)[1] == 1
    assert ledgers.verify(stand.folder / "ledger.db").error is None


def test_a_lost_state_file_changes_nothing_about_payment(start, tmp_path):
    """Finished tasks follow from the ledger: under other hashes, of other workers, and in files that were rejected for another group."""
    stand = start(eject=False)
    one = stand.put("a.parquet", group(0))
    stand.checker.verdict = rejects(task=rollout_lib.TaskRef("e", 2, 2, 0))
    half = stand.put("b.parquet", group(2, step=2) + group(3, step=2))
    found = [stand.ask("a.parquet", one), stand.ask("b.parquet", half)]
    assert [(status.status, status.tasks) for status in found] == [("accept", "1:0"), ("reject", "2:3")]
    stand = start(eject=False)
    assert (
        "was accepted before" in stand.ask("s.parquet", stand.put("s.parquet", group(3, OTHER, step=2), OTHER)).reason
    )
    stand.close()
    (tmp_path / "state.db").unlink()
    stand = start(eject=False)
    for name, rollouts, key in [
        ("c", group(0)[::-1], KEY),
        ("d", group(0, OTHER, length=9), OTHER),
        ("e", group(3, OTHER, step=2, length=9), OTHER),
    ]:
        sha = stand.put(f"{name}.parquet", rollouts, key)
        assert stand.ask(f"{name}.parquet", sha).reason == "duplicate: by the ledger, its task was accepted before"
        assert not stand.paid(sha)
    assert [stand.node(key)[1] for key in (KEY, OTHER)] == [1, 0]
    again = stand.put("f.parquet", group(2, OTHER, step=2), OTHER)  # was never done
    assert stand.ask("f.parquet", again).status == "accept" and stand.paid(again)
    # The old files again: their status is that of the ledger, and nothing happens.
    num_entries, before = len(stand.ledger.entries()), stand.node(KEY)
    status = stand.ask("a.parquet", one)
    assert (status.status, status.output_flops) == ("accept", flops(group(0)))
    status = stand.ask("b.parquet", half)
    assert status.status == "reject" and status.reason.startswith("ledger: it was taken back")
    assert len(stand.ledger.entries()) == num_entries and stand.node(KEY) == before


def test_evidence_goes_on_where_it_was(start):
    whole, found = sequential_test.SequentialTest(file_validator.BANDS), None
    for number in range(14):
        stand = start()
        stand.checker.margin = 1.0
        sha = stand.put(f"{number}.parquet", group(number, step=1 + number // 2, version=number // 2))
        status = stand.ask(f"{number}.parquet", sha)
        found = whole.add([file_validator.evidence(1.0)] * file_validator.G)
        state, expected = stand.checker.evidence.tests[KEY.worker].state(), whole.state()
        assert state == expected and (status.status == "reject") == (found is not None)
        if found:
            break
    assert found and found.startswith("margin: ") and "statistics: margin" in status.reason


@pytest.mark.parametrize("is_told", [False, True])
def test_what_the_ledger_missed_is_written_at_the_next_start_and_once(start, monkeypatch, is_told):
    """A service breaks before it writes to the ledger, or after."""
    stand = start(eject=False)
    shas = [stand.put(f"{i}.parquet", group(i, key), key) for i, key in enumerate((KEY, OTHER))]
    stand.checker.verdict = rejects(worker=OTHER.worker)
    reason = "its pending work is worth nothing"
    stand.ledger.append(events.sign("slash", OTHER.worker, file_validator.KEEPER, amount=1, reason=reason))
    append = stand.ledger.append
    with monkeypatch.context() as patch:
        patch.setattr(stand.ledger, "append", lambda *of: (is_told and append(*of)) + 1 / 0)
        assert [stand.ask(f"{i}.parquet", sha).status for i, sha in enumerate(shas)] == ["crashed"] * 2
    assert stand.ask("0.parquet", shas[0]).status == "accept" and stand.paid(shas[0])  # or when asked again
    for _ in range(2):
        stand = start(eject=False)
        assert stand.paid(shas[0]) == flops(group(0)) and stand.node(OTHER)[1] == 2
    assert [stand.ask(f"{i}.parquet", sha).status for i, sha in enumerate(shas)] == ["accept", "reject"]


def test_the_file_is_bounded(start, monkeypatch):
    for name, value in (("MAX_ENTRIES", 4), ("MAX_BYTES", 2000)):
        monkeypatch.setattr(validator_state, name, value)
    stand, keys = (
        start(Checker(file_validator.rules(400)), eject=False),
        [rollout_lib.WorkerKey.generate() for _ in range(7)],
    )
    for number, key in enumerate(keys):
        stand.ledger.append(events.sign("join", key.worker, key))
        stand.checker.margin = 0.2 if number in (1, 2) else 0.05
        sha = stand.put(f"{number}.parquet", group(number, key), key)
        assert stand.ask(f"{number}.parquet", sha).status == "accept"
    again = start(Checker(file_validator.rules(400)), eject=False)
    files, requests = again.state.all(validator_state.FILES), again.state.all(validator_state.REQUESTS)
    assert sha in files and len(requests) == 4 and len(files) <= 4
    assert sum(len(json.dumps(one, separators=(",", ":"))) for one in files.values()) <= 2000
    assert set(stand.checker.evidence.tests) == set(again.checker.evidence.tests)
    left = set(again.checker.evidence.tests)
    assert {keys[1].worker, keys[2].worker} < left and len(left) <= 4  # most is known against these two


def test_another_state_file_than_ours(tmp_path):
    path = tmp_path / "state.db"
    state = validator_state.State(path, "a run")
    with pytest.raises(ValueError, match="locked; stop the validator that uses it"):
        validator_state.State(path, "a run")
    state.commit({"file": {"a": 1, "b": 2}})
    state.commit({"file": {"a": 3, "b": None}})
    assert state.all("file") == {"a": 3} and state.get("file", "b") is None
    state.close()
    with pytest.raises(ValueError, match="belongs to a run, not to another; .* or give another --state"):
        validator_state.State(path, "another")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(ValueError, match="is not a validator state of format 2"):
        validator_state.State(path, "a run")
    path.write_bytes(b"SQLite, but for the rest of it" * 100)
    with pytest.raises(ValueError, match="not a database"):
        validator_state.State(path, "a run")
    with pytest.raises(ValueError, match="unable to open database file; .* or give another --state"):
        validator_state.State(tmp_path / "absent" / "state.db", "a run")


def judge_until_killed(folder, answers):
    """Runs in a separate process and sends each verdict when it is reported. Groups whose number divides by 3 are refused."""
    keeper, node = (rollout_lib.WorkerKey.load(folder / f"{name}.key") for name in ("keeper", "node"))
    stand = Stand(folder, Checker(file_validator.rules(400)), keeper=keeper, min_rate=0.05, eject=False)
    stand.checker.verdict = lambda r: checks.OK if r.task.group % 3 else checks.Verdict(REASON.SAMPLING, "no")
    for path in sorted((folder / "files").iterdir()):
        rollouts = parquet.from_bytes(path.read_bytes())
        sha = hashlib.sha256(path.read_bytes()).hexdigest()
        if sha not in stand.ledger.state.works:
            stand.ledger.append(events.sign("submit", node.worker, node, work=sha, units=flops(rollouts)))
        answers.send([path.name, sha, stand.ask(path.name, sha).status])


def run_and_kill(folder, count, rng):
    """Returns the verdicts of a process that is killed some time after its `count`-th one."""
    answers, (here, there) = [], commands.CONTEXT.Pipe(duplex=False)
    process = commands.CONTEXT.Process(target=judge_until_killed, args=(folder, there))
    process.start()
    there.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            answers.append(here.recv())
            if len(answers) == count:
                time.sleep(rng.random() * 0.02)
                process.kill()
    process.join()
    return answers


@pytest.mark.parametrize("num_kills", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_kill_loses_no_verdict(tmp_path, num_kills):
    file_validator.make_ledger(tmp_path)
    for name, key in (("keeper", file_validator.KEEPER), ("node", KEY)):
        key.save(tmp_path / f"{name}.key")
    for number in range(12 * num_kills):
        (tmp_path / "files" / f"{number:03}.parquet").write_bytes(parquet.to_bytes(group(number)))
    rng, answers = random.Random(0), {}
    for _ in range(num_kills):
        for name, sha, status in run_and_kill(tmp_path, len(answers) + 5, rng):
            assert answers.setdefault(sha, (name, status)) == (name, status)  # the same after every kill
    assert 5 * num_kills <= len(answers) < 12 * num_kills
    assert {status for _, status in answers.values()} == {"accept", "reject"}
    stand = Stand(tmp_path, Checker(file_validator.rules(400)), eject=False)
    files = stand.state.all(validator_state.FILES)
    for sha, (name, status) in answers.items():
        assert files[sha]["status"] == stand.service.status(name).status == status
        assert stand.ledger.state.works[sha].status == {"accept": "accepted", "reject": "invalidated"}[status]
    accepted = [file for file in files.values() if file["status"] == "accept"]
    node = stand.ledger.state.workers[KEY.worker]
    assert (node.num_slashes, node.num_accepted) == (len(files) - len(accepted), len(accepted))
    replayed = sum(file["checked"] for file in accepted)  # repute spares some
    assert stand.checker.evidence.tests[KEY.worker].num_rollouts == file_validator.G * replayed
    assert ledgers.verify(tmp_path / "ledger.db").error is None
    stand.close()
