"""Verdicts of validators elsewhere, over HTTP: quorums, and validators that are silent, broken, or lie."""

import asyncio
import random
import re
import threading
import time
import types

import fastapi
import pytest

from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.protocol import task_schedule
from rl.protocol import verdict as verdict_lib
from rl.swarm.orchestrator.verdicts import verdict_case, verdict_collector
from tests.support import proxy, validators
from tests.support.groups import answers

RUN, WORKER = rollout_lib.WorkerKey.generate(), rollout_lib.WorkerKey.generate()
WAIT_S = 60
BAD = frozenset({1, 4})  # the groups that honest validators reject


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    pause(monkeypatch, 0.02, 0.1)


def pause(monkeypatch, first_s, max_s):
    monkeypatch.setattr(verdict_collector, "FIRST_PAUSE_S", first_s)
    monkeypatch.setattr(verdict_collector, "MAX_PAUSE_S", max_s)


def groups(count, step=1):
    config = quickstart.get_config()
    config.rl.prompts_per_step = count
    return task_schedule.train_groups(experiment.resolve(config).config, step)


def judge(rollouts):
    """An honest validator."""
    return (False, "sampling") if rollouts[0].task.group in BAD else (True, "ok")


def opposite(rollouts):
    accepted, _ = judge(rollouts)
    return (False, "toploc") if accepted else (True, "ok")


def double(**options):
    return validators.Double(RUN.worker, **{"judge": judge} | options)


class Collected:
    """A collector over these doubles, its decisions, and its lines for people."""

    def __init__(self, names, *, quorum=0, verdict_s=60.0):
        self.lines = []
        options = dict(quorum=quorum, verdict_s=verdict_s, on_fault=self.lines.append)
        self.source = verdict_collector.VerdictCollector(RUN, validators=names, **options)
        self.decisions = validators.Decisions(self.source)

    def ask(self, asked):
        for group in asked:
            rollouts = [rollout_lib.sign(r, WORKER) for r in answers(group)]
            self.source.ask(group.key, rollouts, verdict_lib.group_digest(rollouts))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.source.close()


def honest(count):
    return {("train", 1, n): "sampling" if n in BAD else "ok" for n in range(count)}


def test_a_majority_decides_and_no_more_are_asked_than_needed():
    doubles = [double() for _ in range(3)]
    with validators.served(*doubles) as names, Collected(names) as collected:
        collected.ask(groups(12))
        assert collected.decisions.wait(12) == honest(12)
        assert collected.source.notice() == "" and collected.lines == []
        for key, signed in collected.decisions.signed.items():
            assert len({one.validator for one in signed}) == 2 and all(one.check() for one in signed), key
        asked = [group for one in doubles for request in one.asked for group in request]
    assert len(asked) == 24 and all(one.asked for one in doubles)  # by lot: each judges some
    assert collected.source.counts() == {"validator_faults": 0, "validator_contradictions": 0, "validators_excluded": 0}


def test_waiting_groups_are_sent_together_the_earliest_step_first(monkeypatch):
    monkeypatch.setattr(verdict_case.rules_lib, "MAX_REPLAY_ROWS", 16)  # two groups of 8
    one = double()
    with validators.served(one) as names, Collected(names) as collected:
        late, early = groups(5, 2), groups(4, 1)
        all_asked = threading.Event()
        asyncio.run_coroutine_threadsafe(
            asyncio.sleep(0.05), collected.source._loop
        ).result()  # it waits for groups now
        collected.source._loop.call_soon_threadsafe(all_asked.wait)  # so that all wait before the first request
        collected.ask([*late, *early])
        all_asked.set()
        collected.decisions.wait(9)
    assert sorted(map(len, one.asked)) == [1, 2, 2, 2, 2]
    assert [group for request in one.asked for group in request] == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def three():
    """Three validators that are served once for all misdeeds, of which the first has one at a time."""
    doubles = [double() for _ in range(3)]
    with validators.served(*doubles) as names:
        yield doubles, names


@pytest.mark.parametrize(
    "misdeed", [pytest.param(x, marks=pytest.mark.slow) if x == "sleeps" else x for x in validators.MISDEEDS]
)
def test_a_validator_at_fault_is_replaced_and_named(misdeed, three, monkeypatch):
    pause(monkeypatch, 60.0, 60.0)  # it is asked once: each of its groups would take the limit
    limit_s = 3.0 if misdeed == "sleeps" else 60.0  # the other validators keep to it, even on a busy machine
    (bad, *_), names = three
    bad.asked, bad.act = [], validators.MISDEEDS[misdeed]
    with Collected(names, verdict_s=limit_s) as collected:
        # By lot, one of three groups does not go to it: of six, none did in 1 of 729 runs.
        collected.ask(groups(12))
        assert collected.decisions.wait(12) == honest(12)
        assert (
            bad.asked and bad.url in collected.source.notice() and collected.lines[0].startswith(f"validator {bad.url}")
        )
        assert collected.source.counts()["validator_faults"] >= 1 and not collected.decisions.failures
        for signed in collected.decisions.signed.values():
            assert bad.key.worker not in {one.validator for one in signed}


def test_a_group_on_which_validators_fail_holds_up_no_other_and_is_void():
    """Three answers that fail of each of two of three make it void, also if it is the only group that waits."""

    def crash(found, key):
        assert all(one.group != 3 for one in found)
        return found

    doubles = [double(act=crash) for _ in range(3)]
    with validators.served(*doubles) as names, Collected(names) as collected:
        collected.ask(groups(8))
        assert collected.decisions.wait(8) == honest(8) | {("train", 1, 3): "unanswered"}
        assert "group train/1/3 is void, and is generated again: too many validators fail" in "".join(collected.lines)
        alone = sum(request == [3] for one in doubles for request in one.asked)
        assert 2 * verdict_case.MAX_FAILURES <= alone <= 3 * verdict_case.MAX_FAILURES
        for count, (step, reason) in enumerate([(9, "ok"), (4, "unanswered")], 9):  # numbers 8 and 3
            collected.ask(groups(1, step))
            assert collected.decisions.wait(count)["train", step, step - 1] == reason


@pytest.mark.parametrize(("misdeed", "count"), [("sleeps", 3), ("errs", 2)])
def test_an_outage_whose_health_check_answers_is_a_pause(misdeed, count):
    """All accelerators hang or fail: no group is void, however long it takes, and though two validators take turns."""
    doubles = [double(act=validators.MISDEEDS[misdeed]) for _ in range(count)]
    with validators.served(*doubles) as names, Collected(names, verdict_s=0.1) as collected:
        collected.ask(groups(2))
        proxy.wait_until(lambda: min(len(one.asked) for one in doubles) > 8, timeout_s=60)
        assert not collected.decisions.found
        collected.source._verdict_s = 60.0  # else this machine may have an outage, too
        for one in doubles:
            one.act = None
        assert collected.decisions.wait(2) == honest(2)


def test_validators_that_do_not_answer_are_named_at_the_start():
    """Before any group is drawn; a reset connection, whose error has no text, is named by its request."""
    with (
        validators.served(double(), down := double(is_up=False)) as names,
        proxy.Proxy("http://127.0.0.1:9", lambda rng: "refuse") as gone,
    ):
        with Collected([*names, f"{gone.url}#{RUN.worker}"]) as collected:
            proxy.wait_until(lambda: collected.lines)
    ended = f"{gone.url} \\(GET /health ended with \\w.*; see whether it runs, and read its log\\)"
    start = "validators without an answer at the start: "
    assert re.fullmatch(f"{start}{down.url} \\(status 503 of /health\\), {ended}", *collected.lines)


def test_a_liar_is_outvoted_counted_and_excluded():
    """One of three: each of its lies costs a third verdict, until it is not asked any more."""
    liar = double(judge=opposite)
    doubles = [double(), liar, double()]
    with validators.served(*doubles) as names, Collected(names) as collected:
        for step in range(1, 9):
            collected.ask(groups(4, step))
            found = collected.decisions.wait(4 * step)
        assert {key: reason for key, reason in found.items() if reason != "ok"} == {
            ("train", 1, 1): "sampling",
            ("train", 2, 4): "sampling",
        }
        proxy.wait_until(lambda: collected.source.counts()["validators_excluded"] == 1)
        assert "contradict the others" in collected.source.notice() and liar.url in collected.source.notice()
        before = len(liar.asked)
        collected.ask(groups(4, 9))
        collected.decisions.wait(36)
        assert len(liar.asked) == before


@pytest.mark.parametrize(
    ("num_sure", "share"), [(1, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 8), (2, 1)))]
)
def test_evidence_that_others_lack_is_a_weak_contradiction(num_sure, share):
    """The sum of small deviations over the groups that some validators saw: the quorum decides; who alone rejects all is excluded."""
    sure = lambda rollouts: (False, "statistics") if rollouts[0].step % share == 0 else (True, "ok")  # noqa: E731
    doubles = [double(judge=sure) for _ in range(num_sure)]
    doubles += [double(judge=lambda rollouts: (True, "ok")) for _ in range(3 - num_sure)]
    with validators.served(*doubles) as names, Collected(names) as collected:
        for step in range(1, 17):
            collected.ask(groups(4, step))
            collected.decisions.wait(4 * step)
        counts = collected.source.counts()
    assert set(collected.decisions.found.values()) == {"statistics" if num_sure > 1 else "ok"}
    assert counts["validator_contradictions"] == 0 == counts["validators_excluded"] - (num_sure == share == 1)


def test_a_copy_of_an_earlier_reply_fails_no_run():
    """A party on the way to all validators has replies of when they lacked the weights."""
    doubles = [double(act=validators.copied) for _ in range(3)]
    with validators.served(*doubles) as names, Collected(names, verdict_s=1.0) as collected:
        begun = time.monotonic()
        collected.ask(groups(1))
        found = lambda: "not signed by its key over this request" in collected.source.notice()  # noqa: E731
        proxy.wait_until(lambda: (time.monotonic() > begun + 2 and found()) or collected.decisions.failures, WAIT_S)
        assert not collected.decisions.failures


def test_a_group_that_waits_for_an_excluded_validator_is_void(monkeypatch):
    """Two validators contradict each other on the group of step 1. The third is down then, and is excluded for its verdicts on step 2."""
    order = types.SimpleNamespace(sample=lambda three, _: [three[0], three[2], three[1]])
    monkeypatch.setattr(verdict_collector.random, "SystemRandom", lambda: order)
    released = threading.Event()

    async def doubt(found, key):
        if found[0].step == 1:
            return validators.changed(accepted=False, reason="toploc")(found, key)
        await asyncio.to_thread(released.wait)
        return found

    def leave(found, key):
        return found if found[0].step == 2 else fastapi.Response("{}", 503)

    doubter, liar = double(act=doubt), double(judge=opposite, act=leave, is_up=False)
    with validators.served(double(), doubter, liar) as names, Collected(names) as collected:
        collected.ask(groups(1))
        proxy.wait_until(lambda: doubter.asked and liar.asked)
        collected.ask(groups(5, 2))
        lies = lambda: [liar.key.worker in one.verdicts for one in collected.source._cases.copy().values()]  # noqa: E731
        proxy.wait_until(lambda: sum(lies()) == 5)
        released.set()
        assert collected.decisions.wait(6, timeout_s=10)["train", 1, 0] == "undecided"
        assert collected.source.counts()["validators_excluded"] == 1


def test_two_that_contradict_each_other_decide_nothing_and_the_group_is_void():
    doubles = [double(), double(judge=opposite)]
    with validators.served(*doubles) as names, Collected(names) as collected:
        collected.ask(groups(3))
        assert set(collected.decisions.wait(3).values()) == {"undecided"}
        assert collected.source.counts()["validators_excluded"] == 0  # either may be right


def test_without_weights_anywhere_the_run_fails_and_not_before_the_limit():
    doubles = [double(act=validators.MISDEEDS["no weights"]) for _ in range(3)]
    with validators.served(*doubles) as names, Collected(names, verdict_s=0.5) as collected:
        begun = time.monotonic()
        collected.ask(groups(1))
        proxy.wait_until(lambda: collected.decisions.failures)
        assert time.monotonic() - begun > 0.5 and "no validator can pull the weights" in str(
            collected.decisions.failures[0]
        )
        assert collected.decisions.found == {}


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_any_minority_of_validators_changes_no_decision(seed):
    """Fewer than half of n validators do anything, and change their mind; all groups are decided as by the honest ones."""
    rng = random.Random(seed)
    num = rng.choice([3, 4, 5, 7])
    acts = [None, *validators.MISDEEDS.values()]

    def moody(found, key):
        act = rng.choice(acts)
        return act(found, key) if act else found

    bad = [double(judge=rng.choice([judge, opposite]), act=moody) for _ in range((num - 1) // 2)]
    doubles = [*bad, *(double() for _ in range(num - len(bad)))]
    rng.shuffle(doubles)
    with validators.served(*doubles) as names, Collected(names, verdict_s=3.0) as collected:
        for step in range(1, 5):
            collected.ask(groups(6, step))
            found = collected.decisions.wait(6 * step)
        assert {key: reason for key, reason in found.items() if reason != "ok"} == {
            ("train", 1, n): "sampling" for n in BAD
        }
        assert not collected.decisions.failures
        quorum = num // 2 + 1
        for key, signed in collected.decisions.signed.items():
            expected = key[2] not in BAD
            assert sum(one.accepted == expected and one.check() for one in signed) >= quorum
