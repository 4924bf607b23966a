"""The reputation of environments: sums of the counts in batch events, refusals by reason, and batches that a resume took back."""

import contextlib
import dataclasses
import types

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import environments, run_ledger, run_rules, storage
from rl.protocol.ledger import events as ledger_events
from rl.swarm.orchestrator.groups import rewards as rewards_lib
from tests.support import commands, ledgers, rollouts

A, B = "a" * 64, "b" * 64


def counts(name, digest, groups, signal, num, errors):
    return {"name": name, "digest": digest, "groups": groups, "signal": signal, "rollouts": num, "errors": errors}


@pytest.fixture
def path(tmp_path):
    """A ledger of three batches, after a resume that took back two, of which one was made again, and three refusals."""
    key, file = rollout_lib.WorkerKey.generate(), tmp_path / "ledger.db"
    with run_ledger.RunLedger(file, key, "9" * 64) as ledger:
        ledger.resumed(0)
        ledger.joined(ledgers.WORKER, invited=True)

        def train(step, found):
            ledger.leased(ledgers.WORKER, "train", step, 0, version=step - 1)
            ledger.submitted(ledgers.WORKER, "train", step, 0, A)
            ledger.batch(step, run_rules.batch_digest([A]), {(step, 0): "trusted"}, environments=found).result()

        def refuse(step, environment, reason):
            ledger.leased(ledgers.WORKER, "train", step, 7, version=step - 1)
            ledger.submitted(ledgers.WORKER, "train", step, 7, B)
            ledger.refused(ledgers.WORKER, "train", step, 7, B, reason, environment).result()

        train(1, [counts("gsm8k", A, 4, 3, 16, 1), counts("wordle", B, 2, 0, 8, 0)])
        refuse(2, "gsm8k", "reward: claimed 1, found 0")
        train(2, [counts("gsm8k", A, 4, 1, 16, 1)])
        refuse(3, "wordle", "tokens: x")
        refuse(3, "", "tokens: y")
        train(3, [counts("gsm8k", A, 100, 100, 100, 100)])
        train(4, [counts("gsm8k", A, 100, 100, 100, 100)])
        ledger.resumed(2)
        train(3, [counts("gsm8k", B, 1, 1, 4, 0)])
    return file


def test_reputations_are_sums_over_the_batches_that_count(path):
    by_name = {(one.name, one.digest): one for one in environments.read(path)}
    old, new = by_name["gsm8k", A], by_name["gsm8k", B]
    assert (old.groups, old.signal, old.rollouts, old.errors, old.refusals) == (8, 4, 32, 2, {})
    assert (old.signal_share, old.error_rate) == (0.5, 2 / 32)
    assert (new.groups, new.signal, new.refusals) == (1, 1, {"reward": 1})  # of the newest digest
    assert by_name["wordle", B].refusals == {"tokens": 1} and by_name["wordle", B].signal_share == 0
    assert by_name[environments.UNKNOWN, ""].refusals == {"tokens": 1} and len(by_name) == 4


@pytest.mark.parametrize("num_entries", [0, 6, 14])
def test_entries_that_were_read_are_not_read_again(path, tmp_path, monkeypatch, num_entries):
    """Each poll of the page of a run read its whole ledger: 5 s with 10,000 steps. The last entries of this one follow a resume."""
    begun, read = [], storage.read
    monkeypatch.setattr(environments.storage, "read", lambda db, start: begun.append(start) or read(db, start))
    whole, reader = path.read_bytes(), environments.Reader(path)
    with contextlib.closing(storage.connect(path)) as db:
        (last,) = db.execute("SELECT max(seq) FROM entries").fetchone()
        db.execute("DELETE FROM entries WHERE seq >= ?", (num_entries,))
    reader.reputations()
    path.write_bytes(whole)
    assert reader.reputations() == reader.reputations() == environments.read(path)
    assert begun[:3] == [0, num_entries, last + 1] and last > 14
    assert environments.Reader(tmp_path / "none.db").reputations() == []


def test_the_commands_print_them(path, capsys):
    assert commands.run("rl.ledger", "environments", path) == 0
    out = capsys.readouterr().out
    assert "gsm8k" in out and "50.0%" in out and "reward 1" in out and "entries are good" in out
    assert commands.run("rl.envs", "info", "reverse_text", "--ledger", path) == 0
    assert "has no batch of this digest" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"signal": 5},
        {"errors": 17},
        {"digest": "A"},
        {"name": ""},
        {"name": "a\nb"},
        {"groups": -1},
        {"groups": 1.5},
        {"more": 1},
    ],
)
def test_malformed_counts_are_refused(change):
    key = rollout_lib.WorkerKey.generate()
    fields = {"step": 1, "digest": A, "epoch": 0, "verified": "1:0", "trusted": ""}
    good = counts("gsm8k", A, 4, 3, 16, 1)

    def error(found):
        return ledger_events.form_error(ledger_events.sign("batch", key.worker, key, **fields, environments=found))

    assert error([good]) is None
    assert (error([good | change]) or "").startswith("environments.0")
    assert error([]) and error([good] * 65) and error("x")


def test_counts_of_a_batch_by_environment():
    def entry(env, *rewards, scores=None, **changes):
        made = []
        for i, reward in enumerate(rewards):
            one = rollouts.make(i, reward=reward, rewards={"reward": reward, "error": 0.0})
            task = dataclasses.replace(one.task, env=env)
            made.append(dataclasses.replace(one, task=task, sample=i, **changes))
        return types.SimpleNamespace(rollouts=made, scores=scores or {})

    failed = {"reward": 0.0, "error": 1.0}
    taken = [
        entry("b", 0, 1),
        entry("b", 0, 0, scores={0: failed, 1: None}),
        entry("a", 1, 1),
        types.SimpleNamespace(rollouts=[]),
    ]
    flat = [entry("a", 0, 0), entry("a", 1, 0)]  # no batch had the last: it counts as one without a signal
    signal = lambda one: len({rollout.reward for rollout in one.rollouts}) > 1  # noqa: E731
    assert rewards_lib.by_environment(taken, flat, signal, {"a": A}) == [
        counts("a", A, 3, 0, 6, 0),
        counts("b", "", 2, 1, 4, 2),
    ]
