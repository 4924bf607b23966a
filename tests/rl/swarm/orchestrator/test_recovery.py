"""An orchestrator that is killed at any moment: groups that were taken are not made again, and none is trained on twice."""

import dataclasses
import math
import shutil

import numpy as np
import pytest

from inference.rollouts import parquet, row_log
from inference.rollouts import rollout as rollout_lib
from rl.protocol import timeline
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks
from tests.support import killed as killed_lib
from tests.support import ledgers, validators
from tests.support.groups import answers
from tests.support.killed import KEY, WAIT_S


@pytest.fixture
def start(tmp_path):
    running = []

    def start(*args, killed: killed_lib.Process | None = None, **options):
        path = tmp_path / str(len(running))
        if killed:
            killed.ledger.flush()
            shutil.copytree(killed.path, path)
        path.mkdir(exist_ok=True)
        running.append(killed_lib.Process(path, *args, **options))
        return running[-1]

    yield start
    for process in running:
        process.end()


def begun(process):
    """Returns a process in which the run has begun, with policy 0 of epoch 4."""
    process.ledger.resumed(0)
    process.resume(0, timeline.Policy(4, 0))
    return process


@pytest.mark.parametrize("rate", [1e-9, 1.0])
def test_a_killed_orchestrator_goes_on_with_the_groups_that_it_took(start, rate):
    first = begun(start(rate))
    assert first.answer(2) == [0, 1]
    validators.settled(first.orchestrator)
    second = start(rate, killed=first)
    second.resume(0, timeline.Policy(4, 0))
    validators.settled(second.orchestrator)
    assert second.replayed == [] and second.answer(9) == [2, 3, 4, 5]  # 0 and 1 are not made again, or replayed
    assert first.answer(1) == [2]
    expected = first.batch(1)
    assert second.batch(1) == expected
    # Killed after the batch is in the ledger, before or after the learner has it.
    for killed, received in ((second, 0), (second, 1)):
        third = start(rate, killed=killed)
        third.resume(received, timeline.Policy(4, 0))
        third.ledger.flush()
        if not received:
            assert third.batch(1) == expected
        assert third.orchestrator.state(1) == second.orchestrator.state(1) != {}
        third.orchestrator.publish(timeline.Policy(4, 1))
        assert third.batch(2) and third.answer(9) == [6, 7, 8]
    third.ledger.flush()
    assert ledgers.verify(third.path / "ledger.db").error is None
    kept = {len(parquet.read(path)) for path in third.path.glob("rollouts/step_*/accepted.parquet")}
    assert kept == {6} and sorted(path.name for path in third.path.glob("rollouts/open/*.log")) == [
        "step_2.log",
        "step_3.log",
    ]


def test_a_killed_run_goes_on_with_late_groups_in_later_batches(start):
    options = {"rl": {"batch": "first", "max_lag": 2, "oversampling": 1.4}, "ledger_options": {"any_step": True}}
    first = begun(start(**options))
    slow = [first.orchestrator.leases.lease(KEY.worker, 1)[0] for _ in range(2)]
    assert [group.group for group in slow] == [0, 1] and len(first.answer(99)) == math.ceil(3 * 3 * 1.4) - 2
    expected = first.batch(1)
    assert first.trained(1) == [2, 3, 4]
    second = start(killed=first, **options)
    second.resume(0, timeline.Policy(4, 0))
    assert second.batch(1) == expected  # may have been lost
    second.orchestrator.publish(timeline.Policy(4, 1))
    assert second.batch(2) and second.trained(2) == [5, 6, 7]
    assert second.answer(2) == [0, 1]  # opened again, first
    second.orchestrator.publish(timeline.Policy(4, 2))
    second.batch(3)
    assert second.trained(3) == [0, 1, 8]
    assert second.orchestrator.state(3)["batches"] == {"num_opened": 19, "waiting": [*range(9, 19)]}
    second.ledger.flush()
    assert ledgers.verify(second.path / "ledger.db").error is None


def test_a_checkpoint_without_the_groups_that_were_taken_is_refused(start):
    """Only batches of "prescribed" groups are known to have taken the first ones."""
    marks = {"workers": {}, "expired_with": []}
    start().orchestrator.resume(2, {"standing": marks, "servers": marks})
    with pytest.raises(ValueError, match="step 2 lacks the groups that its batches took; resume from another"):
        start(rl={"batch": "first"}).orchestrator.resume(2, {"standing": marks, "servers": marks})


def test_work_of_an_earlier_epoch_is_made_again(start):
    first = begun(start())
    first.answer(2)
    second = start(killed=first)  # with a learner that started again
    second.ledger.resumed(0)
    second.resume(0, timeline.Policy(5, 0))
    assert second.answer(9) == [0, 1, 2, 3, 4, 5]
    assert second.batch(1)


def test_a_group_that_only_trust_let_pass_is_replayed_once_its_worker_is_caught(start, monkeypatch):
    def screen(rollouts, split):
        is_bad = rollouts[0].task.group == 2
        return (checks.Verdict("prompt", "bad"), {}) if is_bad else killed_lib.screened(rollouts, split)

    first = begun(start(check_group_without_weights=screen))
    first.answer(2)
    (third,) = first.orchestrator.leases.lease(KEY.worker, 1)
    bad = [rollout_lib.sign(r, KEY) for r in answers(third)]
    with monkeypatch.context() as patch:
        patch.setattr(verdict_collector.VerdictCollector, "ask", lambda *_: None)  # killed before any verdict
        (reply,) = first.orchestrator.submit(parquet.decode(parquet.to_bytes(bad))).values()
        assert reply.result(WAIT_S).startswith("refused")
    second = start(killed=first)
    second.resume(0, timeline.Policy(4, 0))
    validators.settled(second.orchestrator)
    assert sorted(second.replayed) == [0, 1]


def test_a_log_that_lacks_the_ledgers_batch_is_refused(start):
    first = begun(start())
    first.answer(3)
    first.batch(1)
    second = start(killed=first)
    (second.path / "rollouts" / "open" / "step_1.log").unlink()
    with pytest.raises(ValueError, match="batch 1 is in the ledger, and 3 of its groups are not in"):
        second.resume(0, timeline.Policy(4, 0))


def test_groups_whose_rows_were_changed_between_two_starts_are_made_again(start):
    """Attack: other tokens under the digest that a verdict had accepted, by who can write the log and no key."""
    first = begun(start())
    first.answer(2)
    validators.settled(first.orchestrator)
    second = start(killed=first)
    log = row_log.RowLog(second.path / "rollouts" / "open")
    records = [*log.read(1)]
    log.remove(1)
    for head, rows in records:
        changed = [dataclasses.replace(r, tokens=np.where(r.tokens == 20, 7, r.tokens)) for r in rows.rollouts]
        log.append(1, head, parquet.decode(parquet.to_bytes(changed))).result(WAIT_S)
    log.close()
    second.resume(0, timeline.Policy(4, 0))
    assert second.answer(9) == [0, 1, 2, 3, 4, 5]
