"""A restart must not undo decisions: a service is closed, broken, or killed, and another continues with its state file.

The judge is the stand-in of tests/rl/validator/test_service.py; the ledger and the files are real, and so is the kill.
"""

import dataclasses
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.ledger import events, task_ranges
from rl.validator import state as validator_state
from rl.verification import checks, sequential_test
from tests.rl.validator import test_service as stand
from tests.support import ledgers

FLAGRANT = sequential_test.Evidence(0.3, 0.0, 0.0, 0.0, *[np.zeros(0)] * 5)  # of margin, against a band of 0.1
MANY = dataclasses.replace(stand.RULES, groups=lambda step: [stand.prescribed(step, g) for g in range(400)])


@pytest.fixture
def restart(tmp_path):
    """Call it for a service on the same files as the one before, which it closes. Everything is replayed."""
    stand.make_ledger(tmp_path)
    made = []

    def again(**changes):
        if made:
            stand.close(made.pop())
        made.append(stand.start(tmp_path, min_rate=1.0, **changes))
        return made[0]

    yield again
    stand.close(made.pop())


def number_asked(service):
    """Returns a list that collects the rollouts replayed from now on."""
    asked, replay = [], service._validator.check_with_weights
    service._validator.check_with_weights = lambda rollouts: asked.extend(rollouts) or replay(rollouts)
    return asked


def test_verdicts_are_kept_and_nothing_is_judged_again(restart):
    service = restart()
    good = stand.put(service, "a.parquet", stand.group(0))
    bad = stand.put(service, "b-0.parquet", stand.group(1, stand.OTHER), stand.OTHER)
    before = [stand.ask(service, "a.parquet", good)]
    service._validator.verdict = lambda r: checks.Verdict("sampling", "no") if r.sample == 3 else checks.OK
    before += [stand.ask(service, "b-0.parquet", bad, group=True)]
    assert [status.status for status in before] == ["accept", "reject"] and before[1].reasons == {0: "sampling: no"}
    service = restart()
    asked = number_asked(service)
    assert [service.status("a.parquet"), service.status("b-0.parquet", group=True)] == before
    assert service.status("b-0.parquet").status == "unknown"
    assert stand.ask(service, "b-0.parquet", bad, group=False).reasons == {3: "sampling: no"}
    assert stand.ask(service, "a.parquet", good) == before[0] and not asked
    assert service._ledger.state.workers[stand.OTHER.worker].num_slashes == 1
    assert ledgers.verify(service._ledger._path).error is None


def test_work_is_not_paid_twice_across_a_restart(restart):
    service = restart()
    stand.ask(service, "a.parquet", stand.put(service, "a.parquet", stand.group(0)))
    service = restart()
    for name, rollouts, said in [
        ("b", stand.group(0)[::-1], "this rollout was accepted before"),
        ("c", stand.group(0, length=9), "sample 0 of group 0 was accepted before"),
    ]:
        again = stand.put(service, f"{name}.parquet", rollouts)
        assert said in stand.ask(service, f"{name}.parquet", again).reason and not stand.paid(service, again)


def test_a_lost_state_file_changes_nothing_about_payment(restart, tmp_path):
    """Finished tasks follow from the ledger: under other hashes, of other workers, and in files that were rejected for another group."""
    service = restart(eject=False)
    one = stand.put(service, "a.parquet", stand.group(0))
    service._validator.verdict = lambda r: checks.Verdict("sampling", "no") if r.task.group == 2 else checks.OK
    half = stand.put(service, "b.parquet", stand.group(2, step=2) + stand.group(3, step=2))
    status = stand.ask(service, "a.parquet", one)
    assert (status.status, status.tasks) == ("accept", "1:0")
    status = stand.ask(service, "b.parquet", half)
    assert (status.status, status.tasks) == ("reject", "2:3")  # the sound half is not to be done again
    stand.close(service)
    (tmp_path / "state.db").unlink()
    service = stand.start(tmp_path, eject=False)
    for name, rollouts, key in [
        ("c", stand.group(0)[::-1], stand.KEY),
        ("d", stand.group(0, stand.OTHER, length=9), stand.OTHER),
        ("e", stand.group(3, stand.OTHER, step=2), stand.OTHER),
    ]:
        sha = stand.put(service, f"{name}.parquet", rollouts, key)
        status = stand.ask(service, f"{name}.parquet", sha)
        assert status.reason == "duplicate: by the ledger, its task was accepted before"
        assert not stand.paid(service, sha)
    assert [service._ledger.state.workers[key.worker].num_slashes for key in (stand.KEY, stand.OTHER)] == [1, 0]
    again = stand.put(service, "f.parquet", stand.group(2, stand.OTHER, step=2), stand.OTHER)  # was never done
    service._validator.verdict = lambda rollout: checks.OK
    assert stand.ask(service, "f.parquet", again).status == "accept" and stand.paid(service, again)
    # The old files again: their status is that of the ledger, and nothing happens.
    num_entries = len(service._ledger.entries())
    before = dataclasses.replace(service._ledger.state.workers[stand.KEY.worker])
    status = stand.ask(service, "a.parquet", one)
    assert (status.status, status.output_flops) == ("accept", stand.flops(stand.group(0)))
    status = stand.ask(service, "b.parquet", half)
    assert status.status == "reject" and status.reason.startswith("ledger: it was taken back")
    assert len(service._ledger.entries()) == num_entries and service._ledger.state.workers[stand.KEY.worker] == before
    assert ledgers.verify(service._ledger._path).error is None
    stand.close(service)


def test_a_file_of_more_groups_than_an_event_names_is_refused_and_no_offence(restart, monkeypatch):
    service = restart()
    monkeypatch.setattr(task_ranges, "MAX_CHARS", 8)
    rollouts = stand.group(0) + stand.group(2, step=2) + stand.group(4, step=3)
    sha = stand.put(service, "a.parquet", rollouts)
    assert stand.ask(service, "a.parquet", sha).reason.startswith("file: too many groups for an event")
    node = service._ledger.state.workers[stand.KEY.worker]
    assert not stand.paid(service, sha) and node.num_slashes == 0 and not node.ejected


def test_what_is_no_number_is_evidence_of_the_worst():
    """And does not stop the bets for ever."""
    nothing = dataclasses.replace(FLAGRANT, margin=float("nan"), shape=np.zeros(len(sequential_test.TILTS)))
    records = sequential_test.SequentialTest(stand.BANDS), sequential_test.SequentialTest(stand.BANDS)
    for _ in range(20):
        records[0].add([nothing])
        records[1].add([dataclasses.replace(nothing, margin=7.0)])
    assert records[0].state() == records[1].state() and records[0].flag.startswith("margin: ")


def test_wealth_goes_on_where_it_was(restart):
    whole = sequential_test.SequentialTest(stand.BANDS)
    service = restart()
    for number in range(8):
        service._validator.margin = 0.3
        sha = stand.put(service, f"{number}.parquet", stand.group(number, step=1 + number // 2, version=number // 2))
        status = stand.ask(service, f"{number}.parquet", sha)
        for _ in range(stand.G):
            accused = whole.add([dataclasses.replace(FLAGRANT, shape=np.zeros(len(sequential_test.TILTS)))])
        service = restart()
        found, expected = service._validator.evidence.tests[stand.KEY.worker].state(), whole.state()
        assert (
            found["log_wealth"]["margin"] == expected["log_wealth"]["margin"]
            and found["accused"] == expected["accused"]
        )
        assert found["num_rollouts"] == expected["num_rollouts"]
        assert (status.status == "reject") == (accused is not None)
        if accused:
            break
    assert number == 3 and accused.startswith("margin: ") and "statistics: margin" in status.reason


def test_what_comes_again_after_our_own_fault_counts_once(restart, monkeypatch):
    service = restart()
    sha = stand.put(service, "a.parquet", stand.group(0))
    rest = stand.put(service, "b.parquet", stand.group(1))
    missing = lambda rollout: checks.Verdict("weights", "gone") if rollout.sample == 3 else checks.OK  # noqa: E731
    service._validator.verdict = missing
    assert stand.ask(service, "a.parquet", sha).status == "crashed" and not service._validator.evidence.tests
    service._validator.verdict = lambda rollout: checks.OK
    with monkeypatch.context() as patch:
        patch.setattr(service._state, "commit", lambda *args: 1 / 0)
        assert stand.ask(service, "a.parquet", sha).status == "crashed" and not service._validator.evidence.tests
    assert stand.ask(service, "a.parquet", sha).status == "accept"
    assert stand.ask(service, "b.parquet", rest).status == "accept"
    assert service._validator.evidence.tests[stand.KEY.worker].num_rollouts == 2 * stand.G


@pytest.mark.parametrize("is_told", [False, True])
def test_what_the_ledger_missed_is_written_at_the_next_start_and_once(restart, is_told):
    """A service breaks between its own file and the ledger, or between the ledger and its note of it."""
    service = restart(eject=False)
    shas = [
        stand.put(service, f"{i}.parquet", stand.group(i, key), key) for i, key in enumerate((stand.KEY, stand.OTHER))
    ]
    service._validator.verdict = lambda r: checks.OK if r.worker == stand.KEY.worker else checks.Verdict("sampling")
    service._ledger.append(
        events.sign("slash", stand.OTHER.worker, stand.KEEPER, amount=1, reason="its pending work is worth nothing")
    )
    owner, name = (service._state, "settle") if is_told else (service._ledger, "append")
    setattr(owner, name, lambda *args: (_ for _ in ()).throw(sqlite3.OperationalError("disk full")))
    assert [stand.ask(service, f"{i}.parquet", sha).status for i, sha in enumerate(shas)] == ["crashed"] * 2
    assert stand.paid(restart(eject=False), shas[0]) == stand.flops(stand.group(0))
    service = restart(eject=False)
    assert service._ledger.state.workers[stand.OTHER.worker].num_slashes == 2
    assert not service._state.unsettled


def test_the_file_is_bounded(restart, monkeypatch):
    for name, value in (("MAX_FILES", 5), ("MAX_TESTS", 4)):
        monkeypatch.setattr(validator_state, name, value)
    service = restart(rules=MANY, eject=False)
    keys = [rollout_lib.WorkerKey.generate() for _ in range(7)]
    for number, key in enumerate(keys):
        service._ledger.append(events.sign("join", key.worker, key))
        service._validator.margin = 0.2 if number in (1, 2) else 0.05
        sha = stand.put(service, f"{number}.parquet", stand.group(number, key), key)
        assert stand.ask(service, f"{number}.parquet", sha).status == "accept"
    again = restart(rules=MANY, eject=False)
    for state in (service._state, again._state):
        assert len(state.files) == len(state.names) == 5 and sha in state.files and ("6.parquet", False) in state.names
        # A few steps of prescribed work: bounded by itself.
        assert not checks.duplicate(stand.group(0, keys[0])[0], state.seen).accepted
    assert set(service._validator.evidence.tests) == set(again._validator.evidence.tests)
    left = set(again._validator.evidence.tests)
    assert {keys[1].worker, keys[2].worker} < left and len(left) <= 4  # most is known against these two
    monkeypatch.setattr(validator_state, "MAX_BYTES", again._state._num_bytes)
    monkeypatch.setattr(validator_state, "MAX_FILES", 99)
    sha = stand.put(again, "7.parquet", stand.group(7))
    assert stand.ask(again, "7.parquet", sha).status == "accept"
    assert len(again._state.files) <= 5 and again._state._num_bytes <= validator_state.MAX_BYTES
    assert again._state._num_bytes == sum(len(validator_state._to_json(s)) for s in again._state.files.values())


def test_old_steps_are_forgotten_on_disk_too(restart):
    service = restart()
    for number, step in ((0, 1), (16, 9)):
        sha = stand.put(service, f"{step}.parquet", stand.group(number, step=step, version=step - 1))
        assert stand.ask(service, f"{step}.parquet", sha).status == "accept"
    service = restart()
    assert service._state._connection.execute("SELECT DISTINCT step FROM seen").fetchall() == [(9,)]
    assert "is over" in str(checks.duplicate(stand.group(0)[0], service._state.seen))


def test_another_file_than_ours(tmp_path):
    path = tmp_path / "state.db"
    state = validator_state.State(path, "a run", keep_steps=4)
    with pytest.raises(ValueError, match="locked; stop the validator that uses it"):
        validator_state.State(path, "a run", keep_steps=4)
    state.close()
    with pytest.raises(ValueError, match="belongs to a run, not to another; .* or give another --state"):
        validator_state.State(path, "another", keep_steps=4)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(ValueError, match="is not a validator state of format 1"):
        validator_state.State(path, "a run", keep_steps=4)
    path.write_bytes(b"SQLite, but for the rest of it" * 100)
    with pytest.raises(ValueError, match="not a database"):
        validator_state.State(path, "a run", keep_steps=4)
    with pytest.raises(ValueError, match="unable to open database file; .* or give another --state"):
        validator_state.State(tmp_path / "absent" / "state.db", "a run", keep_steps=4)
    assert validator_state.identity(b"1", None) != validator_state.identity(b"2", None)
    assert validator_state.identity(b"1", "ab") != validator_state.identity(b"1", None)


def test_without_a_ledger_nothing_waits_for_it(restart):
    service = restart()
    ledger, service._ledger = service._ledger, None
    part = stand.put(service, "a.parquet", stand.group(0)[:1], node=None)
    assert stand.ask(service, "a.parquet", part).status == "incomplete_group"
    assert not service._state.unsettled
    service._ledger = ledger


# ---- kill ------------------------------------------------------------------------------------------------------------


def judge_until_killed(folder):
    """Runs in a separate process and prints each verdict when it is reported. Groups whose number divides by 3 are refused."""
    keys = [rollout_lib.WorkerKey.load(folder / f"{name}.key") for name in ("keeper", "node")]
    service = stand.start(folder, keeper=keys[0], rules=MANY, eject=False)
    service._validator.verdict = lambda r: checks.OK if r.task.group % 3 else checks.Verdict("sampling", "no")
    for path in sorted((folder / "files").iterdir()):
        sha = stand.hashlib.sha256(path.read_bytes()).hexdigest()
        if sha not in service._ledger.state.works:
            units = stand.flops(parquet.from_bytes(path.read_bytes()))
            service._ledger.append(events.sign("submit", keys[1].worker, keys[1], work=sha, units=units))
        while (status := service.submit(path.name, [sha])).status == "pending":
            time.sleep(0.0005)
        print(json.dumps([path.name, sha, status.status]), flush=True)


def run_and_kill(folder, count, rng):
    """Returns the verdicts of a process that is killed some time after its `count`-th one."""
    code = f"import pathlib; from tests.rl.validator import test_state as t; t.judge_until_killed(pathlib.Path({str(folder)!r}))"
    told = []
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            told.append(json.loads(line))
            if len(told) == count:
                time.sleep(rng.random() * 0.02)
                process.send_signal(signal.SIGKILL)
    return told


@pytest.mark.parametrize("num_kills", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_kill_loses_no_verdict(tmp_path, num_kills):
    stand.make_ledger(tmp_path)
    for name, key in (("keeper", stand.KEEPER), ("node", stand.KEY)):
        key.save(tmp_path / f"{name}.key")
    for number in range(12 * num_kills):
        (tmp_path / "files" / f"{number:03}.parquet").write_bytes(parquet.to_bytes(stand.group(number)))
    rng, told = random.Random(0), {}
    for _ in range(num_kills):
        for name, sha, status in run_and_kill(tmp_path, len(told) + 5, rng):
            assert told.setdefault(sha, (name, status)) == (name, status)  # the same after every kill
    assert 5 * num_kills <= len(told) < 12 * num_kills
    assert {status for _, status in told.values()} == {"accept", "reject"}
    service = stand.start(tmp_path, rules=MANY, eject=False)
    service._validator.check_with_weights = None  # nothing is judged again
    state, node = service._state, service._ledger.state.workers[stand.KEY.worker]
    for sha, (name, status) in told.items():
        assert state.files[sha].status == service.status(name).status == status
        assert service._ledger.state.works[sha].status == {"accept": "accepted", "reject": "invalidated"}[status]
        assert (not checks.duplicate(stand.group(int(name[:3]))[0], state.seen).accepted) == (status == "accept")
    accepted = sum(file.status == "accept" for file in state.files.values())
    assert node.num_slashes == len(state.files) - accepted and node.num_accepted == accepted
    replayed = sum(file.status == "accept" and file.checked for file in state.files.values())  # repute spares some
    assert state.tests()[stand.KEY.worker]["num_rollouts"] == stand.G * replayed
    assert not state.unsettled and ledgers.verify(tmp_path / "ledger.db").error is None
    stand.close(service)
