"""The ledger: acknowledged entries stay, changed bytes are found, and balances equal those of a second implementation."""

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import hypothesis
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import strategies as st

from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import balances, storage, task_ranges
from rl.protocol.ledger import events as ledger_events
from rl.protocol.ledger import ledger as ledger_lib
from tests.support import commands, ledgers

ROOT = pathlib.Path(__file__).parents[4]


def key(number):
    return rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)))


KEEPER, JUDGE, ANN, BOB = key(1), key(2), key(3), key(4)


def work(number):
    return f"{number:064x}"


def ann(kind, **fields):
    return ledger_events.sign(kind, ANN.worker, ANN, **fields)


def judge(kind, **fields):
    return ledger_events.sign(kind, ANN.worker, JUDGE, **fields)


OPENED = []


@pytest.fixture(autouse=True)
def close_all():
    """Closes all that the test opened."""
    yield
    while OPENED:
        OPENED.pop().close()


def opened(function):
    def call(*args, **kwargs):
        OPENED.append(function(*args, **kwargs))
        return OPENED[-1]

    return call


reopen = opened(ledger_lib.Ledger)


def make(path, window_ms=10**9):
    return opened(ledger_lib.Ledger.create)(path, KEEPER, validators=(JUDGE.worker,), window_ms=window_ms)


def filled(path):
    ledger = make(path)
    ledger.append(ann("join"), ann("stake", amount=500))
    ledger.append(ann("submit", work=work(1), units=10), judge("accept", work=work(1), checked=True))
    ledger.append(ann("submit", work=work(2), units=7))
    ledger.append(judge("invalidate", work=work(2), units=3, reason="sampling"))
    ledger.append(judge("slash", amount=200, reason="sampling"), judge("eject", reason="sampling"))
    return ledger


# ---- contents ---------------------------------------------------------------------------------------------


def test_a_story_and_its_balances(tmp_path):
    ledger = filled(tmp_path / "ledger.db")
    node = ledger.state.workers[ANN.worker]
    assert (node.stake, node.slashed, node.ejected) == (300, 200, True)
    assert ledger.state.balance(ANN.worker, 0) == balances.Balance(0, 0, 0, invalidated=3, forfeited=14)
    report = ledgers.verify(tmp_path / "ledger.db", keeper=KEEPER.worker)
    assert report.error is None and report.num_entries == 9
    again = reopen(tmp_path / "ledger.db")
    assert again.state.workers == ledger.state.workers and [e.seq for e in again.entries()] == list(range(9))
    assert ledgers.verify(tmp_path / "ledger.db", head=report.head).error is None


def test_units_are_locked_for_the_window_and_final_after(tmp_path, monkeypatch):
    now = [1000]
    monkeypatch.setattr(ledger_lib, "now_ms", lambda: now[0])
    ledger = make(tmp_path / "ledger.db", window_ms=100)
    ledger.append(ann("join"))
    for number in (1, 2):
        ledger.append(ann("submit", work=work(number), units=10))
    assert ledger.state.balance(ANN.worker, 1000).pending == 20
    now[0] = 1050
    for number in (1, 2):
        ledger.append(judge("accept", work=work(number), checked=False))
    assert ledger.state.balance(ANN.worker, 1099) == balances.Balance(0, 20, 0, 0, 0)
    assert ledger.state.balance(ANN.worker, 1100) == balances.Balance(0, 0, 20, 0, 0)
    now[0] = 1099
    ledger.append(judge("invalidate", work=work(1), units=4, reason="late"))
    now[0] = 1100
    with pytest.raises(ValueError, match="its window of 100 ms is over"):
        ledger.append(judge("invalidate", work=work(1), units=1, reason="too late"))
    ledger.append(judge("slash", amount=5, reason="nothing is locked any more"))
    assert ledger.state.balance(ANN.worker, 1100) == balances.Balance(0, 0, 16, 4, 0)
    now[0] = 7  # the clock was set back
    (entry,) = ledger.append(ann("stake", amount=1))
    assert entry.time_ms == 1100 and ledgers.verify(tmp_path / "ledger.db").error is None


def test_reputation_grows_with_verified_work_and_falls_fast(tmp_path):
    ledger = make(tmp_path / "ledger.db")
    assert ledger.state.reputation(ANN.worker) == 0
    ledger.append(ann("join"))
    events = []
    for number in range(64):
        events.append(ann("submit", work=work(number), units=1))
        events.append(judge("accept", work=work(number), checked=number % 2 == 0))
    ledger.append(*events)
    assert ledger.state.reputation(ANN.worker) == 32 / (32 + 32)  # only replayed work counts
    ledger.append(judge("invalidate", work=work(0), units=1, reason="x"))
    assert ledger.state.reputation(ANN.worker) == 32 / (32 + 32 + 64)
    ledger.append(judge("eject", reason="x"))
    assert ledger.state.reputation(ANN.worker) == 0


def test_tasks_are_done_once_accepted_and_free_again_when_all_is_taken_back(tmp_path):
    run, other = "a" * 16, "b" * 16
    ledger = make(tmp_path / "ledger.db")
    ledger.append(ann("join"))
    for number in (1, 2, 3):
        ledger.append(ann("submit", work=work(number), units=5))

    def verdict(kind, number, **fields):
        ledger.append(ledger_events.sign(kind, ANN.worker, JUDGE, work=work(number), **fields))

    verdict("accept", 1, checked=True, run=run, tasks="3:0-1,1023-1025 4:7")
    verdict("accept", 2, checked=True)  # as ledgers had it before
    verdict("invalidate", 3, units=5, reason="x", run=run, tasks="4:8")
    for state in (ledger.state, reopen(tmp_path / "ledger.db").state):
        done = [(step, group) for step in (3, 4) for group in range(2100) if (run, step, group) in state.done]
        assert done == [(3, 0), (3, 1), (3, 1023), (3, 1024), (3, 1025), (4, 7), (4, 8)]
        assert (other, 3, 0) not in state.done
    verdict("invalidate", 1, units=4, reason="x")
    assert (run, 3, 0) in ledger.state.done
    verdict("invalidate", 1, units=1, reason="x")
    assert (run, 3, 0) not in ledger.state.done and (run, 4, 8) in ledger.state.done
    assert ledgers.verify(tmp_path / "ledger.db").error is None


TASKS = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 40) | st.integers(0, 2**53)), min_size=1, max_size=60)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(TASKS)
def test_tasks_have_one_spelling(tasks):
    text = task_ranges.format_tasks(tasks)
    assert task_ranges.parse_tasks(text) == sorted(tasks)


@pytest.mark.parametrize(
    "text",
    ["", "1", "1:", ":1", "1:2 ", "1:2,1", "1:2,3", "1:2-2", "1:3-2", "2:1 1:1", "1:1 1:3", "01:1", "1:+1", "1:\u0661"]
    + ["1:0-65536", "1:0-9007199254740992", "1:9007199254740993", "1:" + "9" * 5000, "x:y", "1:1-2-3"],
)
def test_what_is_not_spelled_so_is_no_tasks(text):
    with pytest.raises(ValueError, match="is not an integer|ends before it starts|list at most 65536|are not in order"):
        task_ranges.parse_tasks(text)
    event = judge("accept", work=work(1), checked=True, run="a" * 16, tasks=text)
    assert ledger_events.form_error(event).startswith("tasks: ")


def test_events_and_entries_are_spelled_as_ever():
    """A change of any of these bytes makes every ledger that was written a bad one."""
    event = dataclasses.replace(ann("stake", amount=500), nonce="00ff" * 8)
    nonce, node = "00ff" * 8, ANN.worker
    spelled = (
        f'{{"author":"{node}","fields":{{"amount":500}},"kind":"stake","node":"{node}","nonce":"{nonce}"}}'.encode()
    )
    assert ledger_events.encode(event) == spelled
    ANN.private.public_key().verify(ann("stake", nonce="00ff" * 8, amount=500).signature, b"intellax/event/1" + spelled)
    preimage = b"intellax/entry/1" + (7).to_bytes(8, "little") + (1234).to_bytes(8, "little") + b"p" * 32
    preimage += len(spelled).to_bytes(8, "little") + spelled + b"s" * 64
    assert storage.hash_of(7, 1234, b"p" * 32, spelled, b"s" * 64) == hashlib.sha256(preimage).digest()


# ---- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        (lambda: ledger_events.sign("open", KEEPER.worker, KEEPER, validators=[ANN.worker], window_ms=1), "open: "),
        (lambda: ann("join"), "join: the worker has joined"),
        (lambda: ledger_events.sign("join", BOB.worker, ANN), "author: join must be signed by the worker"),
        (lambda: ledger_events.sign("stake", BOB.worker, BOB, amount=1), "node: the worker has not joined"),
        (lambda: ann("stake", amount=0), "amount: 0 in the event stake: .* greater than 0; correct the event"),
        (lambda: ann("stake", amount=1.0), "amount: 1.0 in"),
        (lambda: ann("stake", amount=True), "amount: True in"),
        (lambda: ann("stake", amount=2**60), "amount: 1152921504606846976 in"),
        (lambda: ann("stake", amount=1, more=1), "more: 1 in the event stake: Extra inputs"),
        (lambda: ann("stake"), "amount: {} in the event stake: Field required"),
        (lambda: ann("submit", work=work(1), units=1), "work: it was submitted"),
        (lambda: ann("submit", work="AB" * 32, units=1), "work: 'ABAB"),
        (lambda: ann("accept", work=work(1), checked=True), "author: accept must be"),
        (lambda: judge("accept", work=work(2), checked=True), "work: this worker did not"),
        (lambda: judge("accept", work=work(1), checked=True), "work: it is accepted"),
        (
            lambda: judge("invalidate", work=work(1), units=11, reason="x"),
            "units: 11 cannot be taken back, 10 are left",
        ),
        (lambda: judge("invalidate", work=work(1), units=1, reason=""), "reason: '' in .* printable"),
        (lambda: ann("stake", amount=1, run="a" * 16, tasks="1:1"), "run: 'a*' in the event stake: Extra inputs"),
        (
            lambda: judge("accept", work=work(1), checked=True, tasks="1:1"),
            "fields: .* run and tasks must both be given, or neither",
        ),
        (lambda: judge("accept", work=work(1), checked=True, tasks="1:1", run="A" * 16), "run: 'A*' in"),
        (lambda: judge("praise"), "kind: must be one of"),
        (lambda: ledger_events.sign("stake", "ann", ANN, amount=1), "node: must be a public key"),
        (lambda: dataclasses.replace(ann("stake", amount=1), nonce="1"), "signature: "),
        (lambda: dataclasses.replace(ann("stake", amount=1), author=BOB.worker), "signat"),
        (lambda: dataclasses.replace(ann("stake", amount=1), fields={1: {2}}), "fields: "),
        (lambda: dataclasses.replace(ann("stake", amount=1), author=None), "signature: "),
        (lambda: dataclasses.replace(ann("stake", amount=1), signature=None), "signature"),
    ],
)
def test_each_rule_refuses_and_nothing_is_written(tmp_path, event, rule):
    ledger = make(tmp_path / "ledger.db")
    ledger.append(ann("join"))
    ledger.append(ann("submit", work=work(1), units=10))
    ledger.append(judge("accept", work=work(1), checked=True))
    good = ann("stake", amount=5)
    with pytest.raises(ValueError, match=f"is refused: {rule}"):
        ledger.append(good, event())  # all or none
    assert ledger.state.workers[ANN.worker].stake == 0 and len(ledger.entries()) == 4
    ledger.append(good)
    with pytest.raises(ValueError, match="nonce: this event is in the ledger already"):
        ledger.append(good)
    assert ledger.state.workers[ANN.worker].stake == 5 and ledgers.verify(tmp_path / "ledger.db").num_entries == 5


def test_who_was_ejected_does_nothing_more(tmp_path):
    ledger = filled(tmp_path / "ledger.db")
    for event in (
        ann("stake", amount=1),
        ann("submit", work=work(9), units=1),
        ann("join"),
        judge("eject", reason="again"),
    ):
        with pytest.raises(ValueError, match="was ejected|has joined"):
            ledger.append(event)


def test_who_may_keep_and_create(tmp_path):
    filled(tmp_path / "ledger.db")
    with pytest.raises(ValueError, match="does not keep ledger"):
        reopen(tmp_path / "ledger.db", ANN)
    with pytest.raises(ValueError, match="without the keeper's key"):
        reopen(tmp_path / "ledger.db").append()
    with pytest.raises(FileExistsError):
        make(tmp_path / "ledger.db")
    with pytest.raises(FileNotFoundError):
        reopen(tmp_path / "absent.db")
    with pytest.raises(ValueError, match="window_ms: 0 in the event open"):
        make(tmp_path / "other.db", window_ms=0)
    assert not (tmp_path / "other.db").exists()
    (tmp_path / "text.db").write_text("hello")
    with pytest.raises(ValueError, match="is not a ledger"):
        reopen(tmp_path / "text.db")


# ---- properties -----------------------------------------------------------------------------------------------------


class Oracle:
    """The same rules from the events' list, the slow way: everything is counted again at every question."""

    def __init__(self, window_ms):
        self.window_ms, self.log = window_ms, []

    def units(self, node, number, now):
        """(submitted at, accepted, left, invalidated, forfeited), or None."""
        at = left = None
        accepted, invalidated, forfeited = False, 0, 0
        for time_ms, kind, who, fields in self.log:
            mine = who == node and fields.get("work") == work(number)
            if kind == "submit" and mine:
                at, left = time_ms, fields["units"]
            elif at is None:
                continue
            elif kind == "accept" and mine:
                accepted = True
            elif kind == "invalidate" and mine:
                left, invalidated = left - fields["units"], invalidated + fields["units"]
            elif kind == "slash" and who == node and (time_ms < at + self.window_ms or not (accepted or left == 0)):
                left, forfeited = 0, forfeited + left
        return None if at is None else (at, accepted or (left == 0 and invalidated > 0), left, invalidated, forfeited)

    def balance(self, node, now):
        out = collections.Counter()
        for number in range(6):
            if found := self.units(node, number, now):
                at, accepted, left, invalidated, forfeited = found
                out["pending" if not accepted else "locked" if at + self.window_ms > now else "final"] += left
                out["invalidated"] += invalidated
                out["forfeited"] += forfeited
        return balances.Balance(*(out[name] for name in ("pending", "locked", "final", "invalidated", "forfeited")))

    def stake(self, node):
        stake = 0
        for _, kind, who, fields in self.log:
            if who == node:
                stake += fields["amount"] if kind == "stake" else 0
                stake = max(0, stake - fields["amount"]) if kind == "slash" else stake
        return stake


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("join", "stake", "submit", "accept", "invalidate", "slash", "eject")),
        st.sampled_from((ANN, BOB)),
        st.integers(0, 5),
        st.integers(1, 12),
        st.integers(0, 40),
    ),
    max_size=30,
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(STEPS)
@hypothesis.example([("submit", ANN, 1, 5, 0), ("slash", ANN, 0, 3, 60)])  # pending, and its window is over
@hypothesis.example([("submit", ANN, 1, 5, 0), ("accept", ANN, 1, 1, 9), ("slash", ANN, 0, 3, 41)])  # at its very end
def test_balances_windows_and_duplicates_are_those_of_a_recount(steps):
    # Mutations seen to fail here: <= for < at the window's end; a slash that spares pending work.
    state, oracle, now, submitted = balances.State(), Oracle(50), 0, collections.Counter()
    state.apply(ledger_events.sign("open", KEEPER.worker, KEEPER, validators=[JUDGE.worker], window_ms=50), 0)
    for kind, node, number, amount, wait in [("join", ANN, 0, 1, 0), *steps]:
        now += wait
        fields = {
            "join": {},
            "stake": {"amount": amount},
            "submit": {"work": work(number), "units": amount},
            "accept": {"work": work(number), "checked": True},
            "invalidate": {"work": work(number), "units": amount, "reason": "x"},
            "slash": {"amount": amount, "reason": "x"},
            "eject": {"reason": "x"},
        }[kind]
        author = node if kind in ledger_events.NODE_KINDS else JUDGE
        event = ledger_events.sign(kind, node.worker, author, **fields)
        duplicate = kind == "submit" and any(oracle.units(n.worker, number, now) for n in (ANN, BOB))
        refused = state.refusal(event, now)
        assert refused or not duplicate
        if refused:
            continue
        state.apply(event, now)
        oracle.log.append((now, kind, node.worker, fields))
        submitted[node.worker] += amount if kind == "submit" else 0
        for who in (ANN.worker, BOB.worker):
            for at in (now, now + 25, now + 50):
                balance = state.balance(who, at)
                assert balance == oracle.balance(who, at)
                assert sum(dataclasses.astuple(balance)) == submitted[who] and min(dataclasses.astuple(balance)) >= 0
            if who in state.workers:
                assert state.workers[who].stake == oracle.stake(who) >= 0
                assert 0 <= state.reputation(who) < 1


# ---- tampering ------------------------------------------------------------------------------------------------------


def test_any_changed_byte_of_an_entry_names_that_entry(tmp_path):
    filled(tmp_path / "good.db")
    columns = ("time_ms", "event", "signature", "previous", "hash", "seal")
    rows = opened(sqlite3.connect)(tmp_path / "good.db").execute(f"SELECT {', '.join(columns)} FROM entries").fetchall()
    shutil.copy(tmp_path / "good.db", tmp_path / "bad.db")
    connection = opened(sqlite3.connect)(tmp_path / "bad.db", isolation_level=None)
    rng = np.random.default_rng(0)
    for seq, row in [*enumerate(rows)][::2]:
        for name, value in zip(columns, row, strict=True):
            offsets = range(0, 8) if name == "time_ms" else range(0, len(value), 3 if seq == 2 else 17)
            for at in offsets:
                if name == "time_ms":
                    changed = value ^ (1 << (5 * at))
                else:
                    changed = bytearray(value)
                    changed[at] ^= int(rng.integers(1, 256))
                    changed = bytes(changed)
                connection.execute(f"UPDATE entries SET {name} = ? WHERE seq = ?", (changed, seq))
                report = ledgers.verify(tmp_path / "bad.db")
                assert report.error and report.num_entries == seq, (seq, name, at)
                connection.execute(f"UPDATE entries SET {name} = ? WHERE seq = ?", (value, seq))
    assert ledgers.verify(tmp_path / "bad.db").error is None


def test_any_changed_byte_of_the_file_is_seen_or_changes_nothing(tmp_path):
    ledger = filled(tmp_path / "good.db")
    data, expected = (tmp_path / "good.db").read_bytes(), ledger.entries()
    rng = np.random.default_rng(1)
    seen = 0
    for _ in range(200):
        changed = bytearray(data)
        for at in rng.integers(0, len(data), int(rng.integers(1, 4))):
            changed[at] ^= int(rng.integers(1, 256))
        (tmp_path / "bad.db").write_bytes(changed)
        report = ledgers.verify(tmp_path / "bad.db")
        seen += report.error is not None
        if report.error is None:
            assert reopen(tmp_path / "bad.db").entries() == expected
        else:
            assert report.num_entries <= len(expected)
    assert seen > 50  # the rest hit unused bytes of a page
    for length in (0, 1, 100, 4096, len(data) - 1):
        (tmp_path / "bad.db").write_bytes(data[:length])
        # SQLite reads zeros past the end: one file in 256 ends in one.
        changes_nothing = not any(data[length:])
        assert bool(ledgers.verify(tmp_path / "bad.db").error) != changes_nothing


def test_removed_reordered_and_added_entries_are_seen(tmp_path):
    filled(tmp_path / "good.db")
    head = ledgers.verify(tmp_path / "good.db").head
    for statements, seq in [
        (["DELETE FROM entries WHERE seq = 8"], 8),  # the tail is cut off
        (["DELETE FROM entries WHERE seq = 3"], 3),
        (["DELETE FROM entries"], 0),
        (["DELETE FROM head"], 9),
        (["UPDATE head SET seq = 7"], 9),
        (["UPDATE head SET signature = zeroblob(64)"], 9),
        (["UPDATE entries SET seq = 99 WHERE seq = 3", "UPDATE entries SET seq = 3 WHERE seq = 4"], 3),
        (["INSERT INTO entries SELECT 9, time_ms, event, signature, previous, hash, seal FROM entries LIMIT 1"], 9),
        (["UPDATE entries SET event = 'text' WHERE seq = 5"], 5),
        (["UPDATE entries SET time_ms = -1 WHERE seq = 5"], 5),
        (["UPDATE entries SET time_ms = 1e300 WHERE seq = 5"], 5),
        (["UPDATE entries SET event = zeroblob(100000) WHERE seq = 5"], 5),
        (["UPDATE entries SET event = zeroblob(1000000) WHERE seq = 5"], 5),
        (["INSERT INTO entries SELECT -5, time_ms, event, signature, previous, hash, seal FROM entries LIMIT 1"], 0),
        (["CREATE VIEW v AS SELECT 1"], 0),
        (["DROP TABLE head"], 0),
    ]:
        shutil.copy(tmp_path / "good.db", tmp_path / "bad.db")
        connection = opened(sqlite3.connect)(tmp_path / "bad.db", isolation_level=None)
        for statement in statements:
            connection.execute(statement)
        connection.close()
        report = ledgers.verify(tmp_path / "bad.db")
        assert report.error and report.num_entries == seq, (statements, report)
        with pytest.raises((ValueError, sqlite3.Error)):
            reopen(tmp_path / "bad.db")
    # An older copy, and another ledger, are good in themselves: only a head noted elsewhere shows it.
    older = make(tmp_path / "older.db")
    assert ledgers.verify(tmp_path / "older.db").error is None
    assert "ends after entry 0: an older or another history" in ledgers.verify(tmp_path / "older.db", head=head).error
    older.append(*[ledger_events.sign("join", k.worker, k) for k in map(key, range(10, 20))])
    assert "has another entry there" in ledgers.verify(tmp_path / "older.db", head=head).error
    assert "another keeper" in ledgers.verify(tmp_path / "older.db", keeper=ANN.worker).error


def test_a_rewritten_history_lacks_the_keepers_seal(tmp_path):
    """All hashes and links made right again, by someone without the key."""
    filled(tmp_path / "bad.db")
    connection = opened(sqlite3.connect)(tmp_path / "bad.db", isolation_level=None)
    rows = connection.execute("SELECT seq, time_ms, event, signature FROM entries ORDER BY seq").fetchall()
    previous = bytes(32)
    for seq, time_ms, event, signature in rows:
        time_ms += seq >= 4
        hash_ = storage.hash_of(seq, time_ms, previous, event, signature)
        connection.execute(
            "UPDATE entries SET time_ms = ?, previous = ?, hash = ? WHERE seq = ?", (time_ms, previous, hash_, seq)
        )
        previous = hash_
    connection.close()
    report = ledgers.verify(tmp_path / "bad.db")
    assert (report.num_entries, report.error) == (4, "the keeper did not seal it")


# ---- processes ------------------------------------------------------------------------------------------------------


def test_threads_and_a_second_process_share_one_chain(tmp_path):
    first, second = make(tmp_path / "ledger.db"), reopen(tmp_path / "ledger.db", KEEPER)
    first.append(ann("join"))

    def stake(ledger):
        for _ in range(5):
            ledger.append(ann("stake", amount=1))

    threads = [threading.Thread(target=stake, args=(ledger,)) for ledger in (first, second, first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.refresh().workers[ANN.worker].stake == second.refresh().workers[ANN.worker].stake == 15
    assert ledgers.verify(tmp_path / "ledger.db").num_entries == 17


def test_a_commit_that_fails_leaves_nothing_behind(tmp_path):
    """A reader holds the file for longer than the writer waits."""
    ledger = make(tmp_path / "ledger.db")
    ledger.append(ann("join"))
    ledger._connection.execute("PRAGMA busy_timeout = 20")
    reader = opened(sqlite3.connect)(tmp_path / "ledger.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM entries").fetchone()
    event = ann("stake", amount=5)
    for _ in range(2):
        with pytest.raises(OSError, match="cannot be written .*locked.*; nothing was appended; end other readers"):
            ledger.append(event)
        assert ledger.refresh().workers[ANN.worker].stake == 0 and not ledger._connection.in_transaction
    reader.execute("COMMIT")
    ledger.append(event)
    assert ledger.state.workers[ANN.worker].stake == 5 and ledgers.verify(tmp_path / "ledger.db").num_entries == 3


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_swapped_under_a_running_keeper_is_named(tmp_path, is_replaced):
    ledger, other = make(tmp_path / "ledger.db"), make(tmp_path / "other.db")
    (tmp_path / "ledger.db").rename(tmp_path / "moved.db")
    if is_replaced:
        shutil.copy(tmp_path / "other.db", tmp_path / "ledger.db")
    with pytest.raises(
        OSError, match="ledger.db cannot be written .*readonly.*; nothing was appended; .* put the file back"
    ):
        ledger.append(ann("join"))
    assert not other.refresh().workers
    (tmp_path / "moved.db").rename(tmp_path / "ledger.db")
    ledger.append(ann("join"))
    assert ledgers.verify(tmp_path / "ledger.db").num_entries == 2


def test_a_fault_before_the_head_is_written_leaves_nothing_behind(tmp_path, monkeypatch):
    ledger = make(tmp_path / "ledger.db")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_head", lambda *args: 1 / 0)
        for attempt in (lambda: make(tmp_path / "new.db"), lambda: ledger.append(ann("join"))):
            with pytest.raises(ZeroDivisionError):
                attempt()
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.db"] and not ledger.refresh().workers
    ledger.append(ann("join"))
    assert ledgers.verify(tmp_path / "ledger.db").num_entries == 2


def test_a_ledger_is_opened_while_others_append(tmp_path, monkeypatch):
    """An entry that comes between the reading of the last one and of the head is not a missing entry."""
    first, late = make(tmp_path / "ledger.db"), [ann("join")]
    checked = storage.checked

    def slow(*args):
        yield from checked(*args)
        if late and args[0] is not first._connection:
            first.append(late.pop())

    monkeypatch.setattr(storage, "checked", slow)
    assert ANN.worker in reopen(tmp_path / "ledger.db").state.workers and not late


def test_the_command(tmp_path, capsys, monkeypatch):
    filled(tmp_path / "ledger.db")
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", itertools.count(0, 3).__next__)
        assert commands.run("rl.ledger", "events", str(tmp_path / "ledger.db")) == 0
    assert "checked 9 entries, 0 per second\n" in capsys.readouterr().err
    assert commands.run("rl.ledger", "verify", str(tmp_path / "ledger.db"), "--keeper", KEEPER.worker) == 0
    head = capsys.readouterr().out.split()[-1]
    assert commands.run("rl.ledger", "show", str(tmp_path / "ledger.db"), "--head", head) == 0
    shown = capsys.readouterr().out
    assert ANN.worker[:16] in shown and "ejected" in shown and "slash" in shown
    connection = opened(sqlite3.connect)(tmp_path / "ledger.db", isolation_level=None)
    connection.execute("UPDATE entries SET time_ms = time_ms + 1 WHERE seq = 6")
    assert commands.run("rl.ledger", "verify", str(tmp_path / "ledger.db")) == 1
    assert "is bad at entry 6: its hash does not fit its content" in capsys.readouterr().err
    assert commands.run("rl.ledger", "verify", str(tmp_path / "absent.db")) == 1
    assert commands.run("rl.ledger", "verify", str(tmp_path / "ledger.db"), "--head", "x") == 1


def test_events_are_streamed_as_lines_of_json_while_others_append(tmp_path, capsys):
    path = tmp_path / "ledger.db"
    ledger = filled(path)
    head = ledger.head
    assert commands.run("rl.ledger", "events", str(path), "--kind", "submit", "slash", "--head", head) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["seq"], line["kind"], line["fields"].get("units")) for line in lines] == [
        (3, "submit", 10),
        (5, "submit", 7),
        (7, "slash", None),
    ]
    for wrong, error in (
        (("--head", "99:" + "0" * 64), "ends after entry 8"),
        (("--keeper", ANN.worker), "is kept by"),
    ):
        assert commands.run("rl.ledger", "events", str(path), *wrong) == 1
        assert error in capsys.readouterr().err
    for stop in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-m", "rl.ledger", "events", str(path), "--follow", "--kind", "join"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert json.loads(process.stdout.readline())["node"] == ANN.worker
        new = rollout_lib.WorkerKey.generate()
        ledger.append(ledger_events.sign("join", new.worker, new))
        nodes = [json.loads(process.stdout.readline())["node"]]
        while nodes[-1] != new.worker:  # those that earlier rounds appended
            nodes.append(json.loads(process.stdout.readline())["node"])
        process.send_signal(stop)
        assert process.communicate(timeout=20) == ("", "") and process.returncode == 0
