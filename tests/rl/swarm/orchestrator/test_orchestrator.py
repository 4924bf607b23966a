"""The orchestrator: open groups, leases, rejections with their reasons, and the batches of the learner.

No model and no server here: rollouts are written by hand, and `publish` has no server to update. Prescribed data are
recomputed from their definition.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import hashlib
import hmac
import json
import math
import re
import threading
import time

import httpx
import numpy as np
import prometheus_client
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from configs import quickstart
from docs import catalog
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl import envs
from rl.experiment import experiment
from rl.protocol import lease as lease_lib
from rl.protocol import noise_seed, task_schedule, timeline
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import environments, run_ledger, task_ranges
from rl.protocol.ledger import events as ledger_events
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator import submissions
from rl.swarm.orchestrator.groups import give_backs, queue_entry
from rl.swarm.orchestrator.verdicts import verdict_case, verdict_collector
from rl.trust.verification import checks
from rl.trust.verification import rules as rules_lib
from sharding.system import atomic_file, signed_message
from tests.support import clock, ledgers, proxy, signed_http, validators
from tests.support.groups import answers
from tests.support.orchestrators import inside, marks

KEY, OTHER, STRANGER, RUN = (
    rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n] * 32))) for n in (1, 2, 3, 4)
)
WAIT_S = 60
SAMPLING = checks.Verdict("sampling", "3 of 12 tokens")
SECRET = b"secret"
MOE = {"model__num_experts": 4, "model__experts_per_token": 2, "model__expert_ffn_dim": 192}
GOLDEN_INDICES = [757522424, 751031092, 753325213]  # of groups 3, 4, 5 under seed 0: grain's shuffle of 2^30 tasks
GOLDEN_SEEDS = [2710133136, 4190206788, 4203652136]


def resolve(**changes):
    """The quickstart with three groups of two; `rl__max_lag=1` sets config.rl.max_lag."""
    config = quickstart.get_config()
    config.rl.prompts_per_step, config.rl.samples_per_prompt, config.rl.num_steps = 3, 2, 10
    config.rl.advantage = "group_mean"
    config.trust.min_rate = config.trust.invited_rate = 1e-9
    config.evaluation.num_tasks = 2
    for name, value in changes.items():
        section, field = name.split("__")
        config[section][field] = value
    return experiment.resolve(config)


def config_of(**changes):
    return resolve(**changes).config


@pytest.fixture
def make(tmp_path, monkeypatch):
    made = []

    def make(check=lambda rollouts: checks.OK, screen=None, hooks=None, has_shares=False, **changes):
        """`check` returns the verdict on one group; KEY and OTHER are invited, and others are not.

        The hook `drawn` has the numbers of the groups that are verified at any rate below 1.
        """
        exp, hooks = resolve(**changes), {"invited": (KEY.worker, OTHER.worker)} | (hooks or {})
        if screen:
            hooks["check_group_without_weights"] = screen
        source = hooks.pop("source", None) or verdict_collector.VerdictCollector(
            RUN, lambda groups: [*map(check, groups)]
        )
        hooks |= {"key": RUN, "verdicts": source}
        if (drawn := hooks.pop("drawn", None)) is not None:
            number = lambda name: int(name.rpartition("/")[2])  # noqa: E731
            monkeypatch.setattr(verdict_lib, "draw", lambda secret, name: (number(name) not in drawn) * 0.999)
        made.append(orchestrator_lib.Orchestrator(exp.config, tmp_path, credit=exp.credit, secret=SECRET, **hooks))
        made[-1].config = exp.config
        if not has_shares:  # a worker may lease all groups at one time
            inside(made[-1]).share.room = lambda worker, num_held, num_unfinished, now_s: num_unfinished
            inside(made[-1]).share.is_late = lambda worker, since_s, now_s: False
        return made[-1]

    yield make
    for orchestrator in made:
        orchestrator.close()


def publish(orchestrator, version, epoch=0):
    orchestrator.publish(timeline.Policy(epoch, version))


checked = validators.settled  # returns once all replays are done


def submit(orchestrator, rollouts, key=KEY):
    """The one verdict on a submission of one group."""
    (verdict,) = hand_in(orchestrator, [rollout_lib.sign(r, key) if key else r for r in rollouts]).values()
    return verdict


def hand_in(orchestrator, rollouts):
    """The verdicts on a file of these."""
    found = orchestrator.submit(parquet.decode(parquet.to_bytes(rollouts)))
    return {name: future.result(WAIT_S) for name, future in found.items()}


def entries(orchestrator):
    return list(inside(orchestrator).queue.entries.values())


def num_eligible(orchestrator):
    return inside(orchestrator).queue.count()[queue_entry.State.ELIGIBLE]


def requeue(orchestrator, key):
    with orchestrator.locked:
        inside(orchestrator).queue.requeue(key)


def end_leases(orchestrator, *keys):
    """Ends the leases of these groups, or of all."""
    with orchestrator.locked:
        for key in keys or [*inside(orchestrator).queue.entries]:
            for worker in [*inside(orchestrator).queue.entries[key].leases]:
                inside(orchestrator).queue.give_back(key, worker)


def held_out_is_open(orchestrator):
    return any(entry.group.split == "held_out" for entry in entries(orchestrator))


def lease(orchestrator, capacity=100, key=KEY):
    return orchestrator.leases.lease(key.worker, capacity)


def scheduled(orchestrator, step):
    """The groups of a step as they are leased in epoch 0."""
    return [dataclasses.replace(g, epoch=0) for g in task_schedule.train_groups(orchestrator.config, step)]


def later(function, *args):
    """A call in a thread; `.result(WAIT_S)` fails rather than hang."""
    future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# ---- the prescribed data ---------------------------------------------------------------------------------------------


def test_the_groups_of_a_batch_are_golden():
    """A change of any of these numbers breaks the resume of old runs, and every recorded rollout."""
    config = config_of()
    groups = task_schedule.train_groups(config, 2)
    assert groups == task_schedule.train_groups(config_of(), 2)
    assert [(g.step, g.group, g.split, g.num_samples, g.temperature, g.min_version) for g in groups] == [
        (2, group, "train", 2, 1.0, 1) for group in (3, 4, 5)
    ]
    assert [g.index for g in groups] == GOLDEN_INDICES
    assert [g.seed for g in groups] == GOLDEN_SEEDS
    digests = [hashlib.sha256(f"intellax/sampling/0/train/2/{g}".encode()).digest() for g in (3, 4, 5)]
    assert GOLDEN_SEEDS == [int.from_bytes(digest[:4], "little") for digest in digests]
    assert [g.key for g in groups] == [("train", 2, 3), ("train", 2, 4), ("train", 2, 5)]
    # Of a validator before a resume for longer.
    assert rules_lib.Rules.of(config_of(rl__num_steps=1)).groups(2) == rules_lib.by_number(groups)


def test_batches_do_not_overlap():
    config = config_of(rl__prompts_per_step=50)
    groups = [group for step in range(1, 9) for group in task_schedule.train_groups(config, step)]
    assert [group.group for group in groups] == list(range(400))
    assert len({group.index for group in groups}) == len({group.seed for group in groups}) == 400
    warmup = {index for step in (1, 2) for _, index in task_schedule.warmup_tasks(config, step)}
    assert len(warmup) == 2 * config.warmup.tasks_per_step and not warmup & {group.index for group in groups}


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_oldest_version_a_batch_may_use(lag):
    config = config_of(rl__max_lag=lag)
    found = [task_schedule.train_groups(config, step)[0].min_version for step in (1, 2, 5)]
    assert found == [0, max(0, 1 - lag), max(0, 4 - lag)]


def test_held_out_groups_are_the_same_at_every_evaluation():
    early, late = (task_schedule.held_out_groups(config_of(), version) for version in (0, 7))
    for a, b in zip(early, late, strict=True):
        assert (a.index, a.seed, a.temperature, a.num_samples) == (b.index, b.seed, b.temperature, b.num_samples)
    assert [g.index for g in early] == [0, 1] and early[0].temperature == 0.0
    assert {(g.step, g.min_version, g.split) for g in late} == {(7, 7, "held_out")}
    assert early[0].seed == noise_seed.sampling_seed(0, "held_out", 0, 0)
    assert early[0].seed not in [noise_seed.sampling_seed(*x, 0, 0) for x in ((0, "train"), (1, "held_out"))]


def test_evaluation_sets_have_the_same_first_tasks_with_other_seeds():
    config = quickstart.get_config()
    config.evaluation.update(num_tasks=3, every=4)
    config.evaluation.sets.sampled = {"num_tasks": 2, "samples_per_task": 8, "temperature": 1.0}
    config.evaluation.sets.often = {"every": 1}
    config = experiment.resolve(config).config
    default, often, sampled = task_schedule.evaluation_sets(config)
    assert [(one.name, one.first, one.every) for one in (default, often, sampled)] == [
        ("", 0, 4),
        ("often", 3, 1),
        ("sampled", 6, 4),
    ]
    groups = task_schedule.held_out_groups(config, 5)
    assert [group.index for group in groups] == [0, 1, 2, 0, 1, 2, 0, 1] and len({group.seed for group in groups}) == 8
    assert {(g.num_samples, g.temperature) for g in groups[6:]} == {(8, 1.0)}
    assert groups[:3] == task_schedule.held_out_groups(config_of(evaluation__num_tasks=3), 5)
    assert [step for step in range(11) if default.is_due(step, 10)] == [0, 4, 8, 10]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"tasks": 1}, "sets.a has the unknown field 'tasks'"),
        ({"num_tasks": 0}, "num_tasks = 0"),
        ({"every": 0.5}, "every = 0.5"),
    ],
)
def test_wrong_evaluation_sets_are_refused(fields, found):
    config = quickstart.get_config()
    config.evaluation.sets.a = fields
    with pytest.raises(ValueError, match=found):
        experiment.resolve(config)


# ---- leases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_version_opens_the_batches_that_may_use_it(make, lag):
    orchestrator = make(rl__max_lag=lag, rl__num_steps=6)
    assert lease(orchestrator) == []
    publish(orchestrator, 0)
    groups = lease(orchestrator)
    assert groups == sum([scheduled(orchestrator, step) for step in range(1, 2 + lag)], [])
    for version in range(1, 8):
        publish(orchestrator, version)
        publish(orchestrator, version)  # again: opens nothing
        steps = [group.step for group in lease(orchestrator)]
        assert steps == ([version + 1 + lag] * 3 if version + 1 + lag <= 6 else [])


def test_a_lease_is_held_by_one_worker_until_it_runs_out(make):
    now = clock.Clock()
    orchestrator = make(hooks={"clock": now}, topology__lease_s=0.5)
    publish(orchestrator, 0)
    first, rest = lease(orchestrator, 1), lease(orchestrator, 1, OTHER)
    assert [group.group for group in first + rest] == [0, 1]
    assert [group.group for group in lease(orchestrator)] == [2] and lease(orchestrator) == []
    now.now += 0.6
    assert sorted(group.group for group in lease(orchestrator, key=OTHER)) == [0, 1, 2]  # the first is gone
    end_leases(orchestrator, ("train", 1, 2))
    assert lease(orchestrator) == []  # not its own expired group again, while another worker is active
    assert orchestrator.take_counts()["trust/num_lease_expired"] == 3
    # The first worker is late, and the group still needs its answer; the second's counts for nothing, and against no one.
    assert submit(orchestrator, answers(first[0])) == "accepted"
    assert submit(orchestrator, answers(first[0]), OTHER) == "spare"
    assert submit(orchestrator, answers(first[0]), OTHER).startswith("refused: not leased")


# ---- checks at the lease -------------------------------------------------------------------------------------------------------


def replaced(**changes):
    """Changes the second rollout of the group."""
    return lambda rollouts: [rollouts[0], dataclasses.replace(rollouts[1], **changes)]


def of_array(name, *values):
    return replaced(**{name: np.array(values, np.int32)})


REFUSALS = {  # one of each check at the lease; tests/rl/trust/verification/test_checks.py has all rules
    "samples missing": (lambda rollouts: rollouts[:1], "samples: expected 0..1 once each, got [0]"),
    "samples more": (lambda rs: [*rs, dataclasses.replace(rs[1], sample=2)], "samples: expected 0..1 once"),
    "seed swapped": (lambda rs: [dataclasses.replace(r, sample=1 - r.sample) for r in rs], "seed: expected"),
    "temperature": (replaced(temperature=0.9), "temperature: expected 1.0, got 0.9"),
    "vocabulary": (of_array("tokens", 5, 6, 6, 272, 258), "tokens: ID 272 is outside the vocabulary"),
    "prompt": (of_array("tokens", 5, 7, 6, 21, 258), "prompt: the samples of one group have"),
    "versions old": (of_array("versions", 1, 1, 1, 0, 1), "versions: 0 is older than 1"),
    "versions ahead": (of_array("versions", 1, 1, 1, 1, 2), "versions: 2 is newer than 1, the newest"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_and_leased_again(make, name):
    change, reason = REFUSALS[name]
    orchestrator = make(rl__max_lag=1)
    orchestrator.resume(1)
    publish(orchestrator, 1)
    groups = [group for group in lease(orchestrator) if group.step == 3]  # takes versions 1 and 2; 2 is not out
    verdict = submit(orchestrator, change(answers(groups[0])))
    assert verdict.startswith(f"refused: {reason}"), verdict
    assert num_eligible(orchestrator) == 0
    assert lease(orchestrator) == [groups[0]]
    assert submit(orchestrator, answers(groups[0])) == "accepted" and num_eligible(orchestrator) == 1
    counts = orchestrator.take_counts()
    assert counts["trust/num_refused"] == len(change(answers(groups[0]))) and counts["trust/num_accepted"] == 2
    assert counts[f"trust/num_refused_{reason.split(':')[0]}"] == 1


def test_groups_are_shared_and_the_idle_worker_backs_up_the_late_one(make):
    orchestrator = make(has_shares=True)
    publish(orchestrator, 0)
    first = lease(orchestrator)
    assert lease(orchestrator, key=OTHER), "no other worker was known when the first took all groups"
    both = [key for key, e in inside(orchestrator).queue.entries.items() if len(e.leases) == 2]
    assert len(both) > 1 and orchestrator.leases.has_work()
    group = next(group for group in first if group.key == both[0])
    assert submit(orchestrator, answers(group, epoch=0), OTHER) in ("quarantined", "accepted")
    assert submit(orchestrator, answers(group, epoch=0)) == "spare"
    assert submit(orchestrator, answers(group, epoch=0)).startswith("refused: not leased")
    group = next(group for group in first if group.key == both[1])
    assert submit(orchestrator, answers(group, epoch=0), OTHER) in ("quarantined", "accepted")
    orchestrator.leases.lease(KEY.worker, 0, returned=both[1:2])
    checked(orchestrator)
    assert KEY.worker not in inside(orchestrator).health.state()["workers"]  # neither is held against it
    assert not inside(orchestrator).health._pauses  # nor against the group: its work was done


def test_any_number_of_bad_spares_ends_no_run(make):
    """Attack: workers that hand in garbage for one group. Each took three frames of one stack."""
    go_on = threading.Event()
    check = lambda rollouts: checks.Verdict("sampling" if go_on.wait(WAIT_S) else "ok")  # noqa: E731
    orchestrator = make(check=check, hooks={"drawn": {0}})
    publish(orchestrator, 0)
    (group,) = lease(orchestrator, 1)
    assert submit(orchestrator, answers(group)) == "quarantined"
    with orchestrator.locked:
        spare = queue_entry.HeldLease(group, OTHER.worker, 0.0, 0.0), answers(group)[:1], "0" * 64
        inside(orchestrator).queue.entries[group.key].spares += [spare] * 1000
    go_on.set()
    checked(orchestrator)
    assert inside(orchestrator).failure is None and entries(orchestrator)[0].state is queue_entry.State.OPEN
    assert inside(orchestrator).counts["refused_samples"] == 1000


def test_a_signature_must_be_of_the_worker_that_holds_the_lease(make):
    orchestrator = make()
    publish(orchestrator, 0)
    group = lease(orchestrator)[0]
    assert submit(orchestrator, answers(group), OTHER).startswith("refused: not leased")
    assert submit(orchestrator, answers(group), None).startswith("refused: not leased")
    good = [rollout_lib.sign(r, KEY) for r in answers(group)]
    forged = [good[0], dataclasses.replace(good[1], reward=9.0)]  # the reward is under the signature, too
    assert submit(orchestrator, forged, None).startswith("refused: signature: ")
    mixed = [good[0], rollout_lib.sign(answers(group)[1], OTHER)]
    assert submit(orchestrator, mixed, None).endswith("not signed by the leaseholder; sign with its key")
    # None of it cost the holder its lease, or the group an attempt.
    assert submit(orchestrator, answers(group)) == "accepted"


def test_the_signature_of_every_continuation_is_verified(make):
    """A group of VinePPO has more rollouts than samples times calls."""
    orchestrator = make(rl__credit="vine", rl__advantage="rloo", rl__max_lag=0)
    publish(orchestrator, 0)
    group = lease(orchestrator)[0]
    roots = answers(group)
    branches = [dataclasses.replace(roots[0], branch=i, num_branches=6, trains=False) for i in range(1, 6)]
    signed = rollout_lib.sign_all([*roots, *branches], KEY)
    forged = [dataclasses.replace(one, reward=9.0) if one.branch == 5 else one for one in signed]
    assert submit(orchestrator, forged, None).startswith("refused: signature: ")
    assert submit(orchestrator, signed, None).startswith("refused: samples: ")  # nor is it a good group


def test_what_was_not_leased_or_is_there_already(make):
    blocked = threading.Event()
    orchestrator = make(check=lambda rollouts: blocked.wait(WAIT_S) and checks.OK, trust__min_rate=1.0)
    publish(orchestrator, 0)
    unleased = task_schedule.train_groups(orchestrator.config, 1)[0]
    assert submit(orchestrator, answers(unleased)).startswith("refused: not leased")
    group = lease(orchestrator, 1)[0]
    assert submit(orchestrator, answers(group)) == "quarantined"
    assert submit(orchestrator, answers(group)).startswith("refused: not leased (or already submitted)")
    blocked.set()
    checked(orchestrator)
    assert num_eligible(orchestrator) == 1
    assert submit(orchestrator, answers(group)).startswith("refused: not leased")
    beyond = task_schedule.train_groups(orchestrator.config, 5)[0]  # not open yet
    assert submit(orchestrator, answers(beyond)).startswith("refused: not leased")
    assert orchestrator.take_counts()["trust/num_unleased"] == 8
    assert group not in lease(orchestrator)


def test_leases_go_on_while_a_long_file_is_sorted_by_its_groups(make, monkeypatch):
    """Attack: the groups of all rows were looked up under one lock, and no worker got an answer meanwhile."""
    orchestrator, split, found = make(), submissions.Submissions._split, []
    publish(orchestrator, 0)
    first, second, third = (answers(group) for group in lease(orchestrator))
    second = [dataclasses.replace(r, temperature=0.5) for r in second]
    rollouts = [rollout_lib.sign(r, KEY) for r in [*first, *second, *third][::-1]]

    def between(self, step, group, index):
        found.append(later(lease, orchestrator, 1, OTHER).result(WAIT_S))
        return split(self, step, group, index)

    monkeypatch.setattr(submissions.Submissions, "_split", between)
    verdicts = hand_in(orchestrator, rollouts)
    assert verdicts.pop("train/1/1").startswith("refused: temperature") and len(found) == 3
    assert verdicts == {"train/1/0": "accepted", "train/1/2": "accepted"}


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_a_long_wait_is_told(make, monkeypatch):
    monkeypatch.setattr(orchestrator_lib, "WAIT_NOTICE_S", 0.01)
    lines = []
    orchestrator = make(hooks={"on_wait": lines.append})
    orchestrator.nodes.add("http://127.0.0.1:9", "http://127.0.0.1:9")
    orchestrator.publish(timeline.Policy(0, 0))
    batch = later(orchestrator.next_batch, 1)
    without = "0 wait for a verdict; no server can be used: no server has signed in"
    proxy.wait_until(lambda: any(line.endswith(without) for line in lines))
    orchestrator.nodes.on_served(timeline.Policy(0, 0))
    groups = lease(orchestrator)
    for group in groups[1:]:
        submit(orchestrator, answers(group))
    notice = "batch 1 has 2 of 3 groups; in the queue 0 wait for a worker, 1 are leased, 0 are being checked, 0 wait for a verdict"
    proxy.wait_until(lambda: any(line.startswith(notice) for line in lines))
    assert not batch.done() and orchestrator.waiting_for().startswith(notice)
    submit(orchestrator, answers(groups[0]))
    assert len(batch.result(WAIT_S).groups) == 3 and orchestrator.waiting_for() == ""
    lines = prometheus_client.generate_latest(orchestrator.metrics).decode().splitlines()
    expected = ['groups{name="open"} 0.0', 'rollouts_total{name="accepted"} 6.0', "policy_version 0.0"]
    expected += ['nodes{name="worker_healthy"} 1.0', "lease_seconds_count 1.0", "submit_seconds_count 3.0"]
    expected += ["update_seconds_count 1.0", "verdict_seconds_count 0.0"]
    expected += [
        'environment_groups_total{name="reverse_text"} 3.0',
        'environment_signal_total{name="reverse_text"} 3.0',
    ]
    assert {f"intellax_orchestrator_{line}" for line in expected} <= {*lines}
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == catalog.SCRAPES["orchestrator"].keys()
    assert batch.result().metrics["machine/num_workers"] == 1.0


def test_a_group_is_drawn_by_the_secret_and_the_record_of_its_worker(make):
    """HMAC under the secret below the rate, for a stranger every group at first, and fewer by and by."""
    seen = []
    orchestrator = make(
        check=lambda rollouts: seen.append(rollouts[0].task.group) or checks.OK, rl__prompts_per_step=40
    )
    publish(orchestrator, 0)
    for _ in range(40):
        (group,) = lease(orchestrator, 1, STRANGER)
        draw = hmac.new(SECRET, f"train/1/{group.group}".encode(), hashlib.sha256).digest()
        is_drawn = int.from_bytes(draw[:8], "big") / 2**64 < 32 / (32 + len(seen))
        assert submit(orchestrator, answers(group), STRANGER) == ("quarantined" if is_drawn else "accepted"), group
        checked(orchestrator)
    assert 20 < len(seen) < 40 and num_eligible(orchestrator) == 40
    metrics = orchestrator.next_batch(1).metrics
    assert metrics["trust/num_unverified"] == 2 * (40 - len(seen)) and metrics["trust/num_checked"] == 2 * len(seen)


def test_the_verdict_of_the_check_is_honoured(make):
    """Seen by the check: the whole group. Refused: leased again, and all else of that worker is replayed, too. Then accepted."""
    verdicts, seen = {}, []

    def check(rollouts):
        seen.append(rollouts[0].task.group)
        assert [r.task.group for r in rollouts] == [seen[-1]] * 2
        return verdicts.pop(seen[-1], checks.OK)

    orchestrator, drawn = make(check=check, hooks={"drawn": {1}}), ("train", 1, 1)
    publish(orchestrator, 0)
    verdicts[drawn[2]] = SAMPLING
    groups = sorted(lease(orchestrator), key=lambda group: group.key == drawn)  # the drawn one last
    assert [submit(orchestrator, answers(group)) for group in groups] == ["accepted", "accepted", "quarantined"]
    checked(orchestrator)
    assert seen[0] == drawn[2]
    checked(orchestrator)  # the two that were accepted before
    assert sorted(seen[1:]) == sorted(group.group for group in groups[:2]) and num_eligible(orchestrator) == 2
    (again,) = lease(orchestrator)
    assert again.key == drawn and submit(orchestrator, answers(again)) == "quarantined"
    checked(orchestrator)
    counts = orchestrator.next_batch(1).metrics
    names = ("checked", "refused", "refused_sampling", "called_back", "accepted")
    assert [counts[f"trust/num_{name}"] for name in names] == [8, 2, 1, 4, 10]


def test_a_caught_workers_unverified_work_is_recalled_and_named(make, tmp_path):
    """The ledger, the metrics, and a line for people have the steps that trained on groups which only trust let pass."""
    lines, bad = [], [("train", 3, 7)]
    with run_ledger.RunLedger(tmp_path / "ledger.db", RUN, RUN.worker) as ledger:
        ledger.resumed(0)
        check = lambda found: SAMPLING if ("train", found[0].step, found[0].task.group) in bad else checks.OK  # noqa: E731
        hooks = {"drawn": {1, 7}, "on_wait": lines.append, "ledger": ledger}
        orchestrator = make(check=check, hooks=hooks, rl__max_lag=3)
        orchestrator.resume(0)
        publish(orchestrator, 0)
        for group in lease(orchestrator):
            if group.key not in bad:
                submit(orchestrator, answers(group))
        checked(orchestrator)
        first, second = (orchestrator.next_batch(step).metrics for step in (1, 2))
        assert [first["trust/num_unverified"], second["trust/num_unverified"]] == [4, 6]
        marks = orchestrator.state(2)["standing"]["workers"][KEY.worker]
        assert (marks["num_unverified"], marks["steps"]) == (5, [[1, 2]])
        entry = next(entry for entry in entries(orchestrator) if entry.group.key == bad[0])
        assert not lines and submit(orchestrator, answers(entry.group)) == "quarantined"
        checked(orchestrator)  # and then the other groups of steps 3 and 4, in quarantine now
        assert "steps 1 to 2 trained on 5 groups of it that nobody verified" in lines[0] and len(lines) == 1
        bad.clear()
        assert submit(orchestrator, answers(*lease(orchestrator))) == "quarantined"
        checked(orchestrator)
        third = orchestrator.next_batch(3).metrics
        assert third["trust/num_trained_unverified_of_cheats"] == 5 and third["trust/num_unverified"] == 0
        assert third["trust/num_called_back"] == 2 * 5
        ledger.flush()
        events = [entry.event for entry in ledger._ledger.entries()]
        assert [(e.kind, e.fields["steps"]) for e in events if e.kind == "naming"] == [("naming", [1, 2])]
        kinds = collections.Counter(event.kind for event in events for _ in ledger_events.each(event.fields))
        assert kinds["lease"] == kinds["submission"] == 12 + 1 and kinds["refusal"] == 1 and kinds["batch"] == 3
        (reputation,) = environments.Reader(tmp_path / "ledger.db").reputations()
        batched = [e.fields[basis] for e in events if e.kind == "batch" for basis in ("verified", "trusted")]
        num_groups = sum(len(task_ranges.parse_tasks(text)) for text in batched if text)
        assert (reputation.groups, reputation.rollouts, reputation.errors) == (num_groups, 2 * num_groups, 0)
        assert sum(reputation.refusals.values()) == 1 and reputation.name == "reverse_text"
    with run_ledger.RunLedger(tmp_path / "ledger.db", RUN, RUN.worker) as ledger:
        ledger.resumed(0)  # after a checkpoint without the catch
        again = make(hooks={"ledger": ledger}, trust__max_attempts=2)
        again.resume(0)
        assert [inside(again).health.rate(key.worker) == 1 for key in (KEY, OTHER)] == [True, False]
        inside(again).health.rejected(KEY.worker, ("train", 1, 0), 0.0, is_fault=False)
        assert inside(again).health.is_banned(KEY.worker)
    found = ledgers.verify(tmp_path / "ledger.db", keeper=RUN.worker)
    assert found.error is None, found


def test_a_group_that_outlives_the_weights_of_its_version_in_quarantine_is_made_again(make):
    """No validator answered while the other groups filled two batches; then none could replay it, and the run ended."""
    asked, go_on = [], threading.Event()

    def check(rollouts):
        asked.append(rollouts[0].task.group)
        assert go_on.wait(WAIT_S)
        return checks.OK if rollouts[0].versions[0] else checks.Verdict("weights", "version 0 is gone")

    orchestrator = make(check=check, hooks={"drawn": {0}}, rl__batch="first", rl__max_lag=1, rl__max_off_policy=1)
    publish(orchestrator, 0)
    old = lease(orchestrator)
    with orchestrator.locked:
        (copy,) = inside(orchestrator).queue.lease(
            OTHER.worker, 1, math.inf, is_late=lambda lease: lease.group == old[0]
        )
    assert [submit(orchestrator, answers(group)) for group in old] == ["quarantined"] + 5 * ["accepted"]
    assert submit(orchestrator, answers(copy), OTHER) == "spare"
    assert orchestrator.next_batch(1).metrics["trust/num_stale"] == 0
    publish(orchestrator, 1)
    assert [submit(orchestrator, answers(group, 1)) for group in lease(orchestrator)] == 3 * ["accepted"]
    metrics = orchestrator.next_batch(2).metrics
    assert metrics["batch/num_stale"] == 2 and metrics["trust/num_stale"] == 4
    again = lease(orchestrator)[0]
    assert again == dataclasses.replace(old[0], min_version=1)
    go_on.set()
    assert submit(orchestrator, answers(again)) == "quarantined"
    checked(orchestrator)
    publish(orchestrator, 2)
    batch = orchestrator.next_batch(3)
    assert batch.groups[0][0].task.group == 0 and asked == [0, 0]
    assert batch.metrics["trust/num_refused"] == 0 and not any(
        marks(orchestrator, key.worker)["num_halvings"] for key in (KEY, OTHER)
    )


def test_a_caught_workers_work_that_no_batch_may_have_is_not_asked_about(make):
    """Attack: a worker failed a check while its unverified group waited beyond its age; nothing could replay it, and the run ended."""

    def check(rollouts):
        if not rollouts[0].versions[0]:
            return checks.Verdict("weights", "version 0 is gone")
        return SAMPLING

    orchestrator = make(check=check, hooks={"drawn": {7}}, rl__batch="first", rl__max_lag=2, rl__max_off_policy=1)
    publish(orchestrator, 0)
    groups = lease(orchestrator)
    assert [submit(orchestrator, answers(groups[n])) for n in (8, 0, 1, 2)] == 4 * ["accepted"]
    orchestrator.next_batch(1)
    publish(orchestrator, 1)
    assert [submit(orchestrator, answers(groups[n], 1)) for n in (3, 4, 5)] == 3 * ["accepted"]
    orchestrator.next_batch(2)
    assert submit(orchestrator, answers(groups[7], 1)) == "quarantined"
    checked(orchestrator)
    checked(orchestrator)
    again = {group.key: group for group in lease(orchestrator, key=OTHER)}
    assert again[groups[8].key].min_version == 1
    assert inside(orchestrator).queue.drops["stale"] == 1 and inside(orchestrator).failure is None


@pytest.mark.parametrize("verdict", [verdict_case.UNDECIDED, checks.Verdict("newcomer", "on probation")])
def test_a_group_that_is_void_by_its_verdict_is_no_fault_of_its_worker(make, verdict):
    orchestrator = make(check=lambda rollouts: verdict, trust__min_rate=1.0)
    publish(orchestrator, 0)
    group = lease(orchestrator)[0]
    assert submit(orchestrator, answers(group)) == "quarantined"
    checked(orchestrator)
    # no fault of the worker
    assert lease(orchestrator) == [group] and inside(orchestrator).health.state()["workers"] == {}
    counts = orchestrator.take_counts()
    assert counts[f"trust/num_{verdict.reason}"] == 2
    assert counts["trust/num_refused"] == counts["trust/num_accepted"] == 0


def test_a_doubt_has_all_groups_of_a_node_replayed_without_blame(make):
    """The run's own worker differs from the replay: it goes on, and nothing of it is trusted unseen."""
    orchestrator = make(hooks={"drawn": set()})
    publish(orchestrator, 0)
    groups = lease(orchestrator)
    assert submit(orchestrator, answers(groups[0])) == "accepted"
    orchestrator.doubt(KEY.worker)
    checked(orchestrator)
    assert submit(orchestrator, answers(groups[1])) == "quarantined"
    checked(orchestrator)
    counts = orchestrator.take_counts()
    assert counts["trust/num_called_back"] == 2 and counts["trust/num_checked"] == 4
    assert counts["trust/num_refused"] == 0 and not inside(orchestrator).health.is_banned(KEY.worker)


def test_nothing_unverified_reaches_a_batch_while_validators_are_silent(make, monkeypatch):
    """Over HTTP: a batch waits, and its notice names them; a trusted worker's other groups count as eligible meanwhile."""
    monkeypatch.setattr(orchestrator_lib, "WAIT_NOTICE_S", 0.05)
    monkeypatch.setattr(verdict_collector, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(verdict_collector, "MAX_PAUSE_S", 0.1)
    lines, act = [], validators.MISDEEDS["another status"]
    doubles = [validators.Double(RUN.worker, act=act, is_up=False) for _ in range(3)]
    with validators.served(*doubles) as names:
        options = dict(validators=names, verdict_s=5.0, on_fault=lines.append)
        source = verdict_collector.VerdictCollector(RUN, **options)
        hooks = {"drawn": {0, 2}, "on_wait": lines.append, "source": source}
        orchestrator = make(hooks=hooks)
        publish(orchestrator, 0)
        batch = later(orchestrator.next_batch, 1)
        found = [submit(orchestrator, answers(group)) for group in lease(orchestrator)]
        assert found == ["quarantined", "accepted", "quarantined"]
        counts = "in the queue 0 wait for a worker, 0 are leased, 0 are being checked, 2 wait for a verdict"
        notice = f"batch 1 has 1 of 3 groups; {counts}; validators without an answer: "
        proxy.wait_until(lambda: any(line.startswith(notice) and "status 503" in line for line in lines))
        assert not batch.done()
        for one in (doubles[0], doubles[2]):
            one.act, one.is_up = None, True
        metrics = batch.result(WAIT_S).metrics
        assert metrics["trust/num_validator_faults"] >= 1 and metrics["trust/num_unverified"] == 2
        proxy.wait_until(lambda: any(line.endswith("answers again") for line in lines))


def test_no_count_falls_below_zero_where_a_suspects_groups_are_called_back(make):
    """They were accepted, and counted, with an earlier batch; and while they are replayed, another batch is handed off."""
    found, go_on = [], threading.Event()
    go_on.set()

    def check(rollouts):
        if found:
            return found.pop()
        assert go_on.wait(WAIT_S)
        return checks.OK

    hooks = {"drawn": {1, 4, 7}}
    orchestrator = make(check=check, screen=lambda rollouts, split: (checks.OK, {0: None}), rl__max_lag=2, hooks=hooks)
    publish(orchestrator, 0)
    groups = lease(orchestrator, 6, OTHER)  # of batches 1 and 2
    *early, drawn = sorted(lease(orchestrator), key=lambda group: group.group == 7)
    for group in groups:
        submit(orchestrator, answers(group), OTHER)
    for group in early:
        assert submit(orchestrator, answers(group)) == "accepted"
    checked(orchestrator)
    first = orchestrator.next_batch(1).metrics
    found.append(SAMPLING)
    go_on.clear()
    assert submit(orchestrator, answers(drawn)) == "quarantined"
    proxy.wait_until(lambda: num_eligible(orchestrator) == 3)  # those of batch 2
    second = orchestrator.next_batch(2).metrics
    assert min(second.values()) >= 0 and second["trust/num_called_back"] == 4
    go_on.set()
    checked(orchestrator)
    assert submit(orchestrator, answers(*lease(orchestrator))) == "quarantined"
    checked(orchestrator)
    third = orchestrator.next_batch(3).metrics
    counts = [m["trust/num_accepted"] - m["trust/num_called_back"] for m in (first, second, third)]
    assert counts == [16, -4, 6] and sum(counts) == 3 * 6
    assert [m["trust/num_given_up"] for m in (first, second, third)] == [3, 3, 3]


def test_an_evaluation_waits_for_its_version(make):
    """Asked for earlier, it would be answered with the weights before it, and refused."""
    orchestrator = make()
    publish(orchestrator, 0)
    waiting = later(orchestrator.evaluate, 1)
    time.sleep(0.1)
    assert all(group.split == "train" for group in lease(orchestrator, 1))
    publish(orchestrator, 1)
    proxy.wait_until(lambda: held_out_is_open(orchestrator))
    for group in lease(orchestrator):
        submit(orchestrator, answers(group, 1))
    assert len(waiting.result(WAIT_S)) == 2


def test_training_goes_on_during_an_evaluation_of_one_version(make):
    # given up once there is a newer version, and not before
    orchestrator = make(rl__max_lag=0, evaluation__hold_s=0.01)
    publish(orchestrator, 0)
    evaluated = later(orchestrator.evaluate, 0)
    proxy.wait_until(lambda: held_out_is_open(orchestrator))
    train, held_out = lease(orchestrator, 3), lease(orchestrator)
    assert [(group.split, group.version) for group in held_out] == [("held_out", 0)] * 2
    for version in (0, 1):
        for group in train:
            assert submit(orchestrator, answers(group, version)) == "accepted"
        assert len(orchestrator.next_batch(version + 1).groups) == 3
        if version == 0:  # after its first batch the run has a newer version, and not all of the evaluation
            assert submit(orchestrator, answers(held_out[0], 0)) == "accepted" and not evaluated.done()
            publish(orchestrator, 1)
            train = lease(orchestrator)
    assert evaluated.result(WAIT_S) == []  # after hold_s
    ((name, late),) = hand_in(orchestrator, [rollout_lib.sign(r, KEY) for r in answers(held_out[1], 0)]).items()
    assert (name, late[:19]) == ("held_out/0/1", "refused: not leased")
    assert inside(orchestrator).failure is None and not held_out_is_open(orchestrator)


def test_slow_scoring_of_one_worker_stops_no_other(make, monkeypatch):
    """Over HTTP: more slow files at the same time than slots to decode or to judge; others are judged, garbage is refused."""
    go_on, begun, screened = threading.Event(), threading.Semaphore(0), []

    def screen(rollouts, split):
        screened.append(rollouts[0].task.group)
        if rollouts[0].worker == KEY.worker:
            begun.release()
            assert go_on.wait(WAIT_S)
        return checks.OK, {}

    orchestrator = make(screen=screen, rl__prompts_per_step=12)
    url = orchestrator.serve()

    def post(rollouts, key):
        body = parquet.to_bytes([rollout_lib.sign(r, key) for r in rollouts])
        with httpx.Client(base_url=url, timeout=WAIT_S) as http:
            return http.post("/submit", **signed_http.submission(key, signed_http.session(http), body))

    publish(orchestrator, 0)
    groups = lease(orchestrator, 11)
    slow = [later(post, answers(group), KEY) for group in groups]
    assert begun.acquire(timeout=WAIT_S) and begun.acquire(timeout=WAIT_S)
    (other,) = lease(orchestrator, key=OTHER)
    assert list(post(answers(other), OTHER).json()["verdicts"].values()) == ["taken"]
    (budget,) = {orchestrator._web.config.app.state.body_budget}
    proxy.wait_until(lambda: inside(orchestrator).queue.count()[queue_entry.State.LEASED] == 0 and not budget.used)
    (refused,) = post(answers(groups[0]), KEY).json()["verdicts"].values()
    assert refused.startswith("refused: not leased") and not any(future.done() for future in slow)
    go_on.set()
    assert all(list(future.result(WAIT_S).json()["verdicts"].values()) == ["taken"] for future in slow)
    assert num_eligible(orchestrator) == 12 and sorted(screened) == list(range(12))  # each, although none is drawn
    orchestrator.close()


def test_what_one_address_makes_us_decode_stops_no_other(make, monkeypatch):
    orchestrator, go_on, decode = make(), threading.Event(), parquet.decode
    limited = lambda body, **limits: decode(body, **limits) if body != b"slow" or go_on.wait(WAIT_S) else []  # noqa: E731
    monkeypatch.setattr(parquet, "decode", limited)
    url = orchestrator.serve()
    publish(orchestrator, 0)

    def post(body, address):
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(base_url=url, transport=transport, timeout=WAIT_S) as http:
            return http.post("/submit", **signed_http.submission(KEY, signed_http.session(http), body))

    (group,) = lease(orchestrator, 1)
    slow = [later(post, b"slow", "127.0.0.2") for _ in range(5)]
    (budget,) = {orchestrator._web.config.app.state.body_budget}
    proxy.wait_until(lambda: budget.used["127.0.0.2"] == 5 * len(b"slow"))
    good = parquet.to_bytes([rollout_lib.sign(r, KEY) for r in answers(group)])
    assert list(post(good, "127.0.0.1").json()["verdicts"].values()) == ["taken"]
    assert not any(future.done() for future in slow)
    go_on.set()
    assert all(future.result(WAIT_S).status_code == 400 for future in slow)
    orchestrator.close()


def test_a_reward_that_our_scorer_gave_up_on_is_worth_nothing_and_refuses_nothing(make, tmp_path):
    """However often: a slow task ends no run, and our rewards replace the claims. The files keep the signed ones; a group refused otherwise loses the note."""
    refusals = [SAMPLING]

    def screen(rollouts, split):
        if refusals:
            return refusals.pop(), {}
        if split == "held_out":
            return checks.OK, {0: None}
        return checks.OK, {1: None} if rollouts[0].task.group != 2 else {1: {"reward": 4.0, "style": 2.0}}

    orchestrator = make(screen=screen, trust__max_attempts=2, evaluation__num_tasks=1)
    publish(orchestrator, 0)
    evaluated = later(orchestrator.evaluate, 0)
    proxy.wait_until(lambda: held_out_is_open(orchestrator))
    held_out, *groups = lease(orchestrator)
    assert submit(orchestrator, answers(groups[0])).startswith("refused: sampling")
    rewards = dict(reward=5.0, rewards={"reward": 5.0, "style": 2.0})
    for group in [held_out, *lease(orchestrator), *groups[1:]]:
        assert submit(orchestrator, answers(group, **rewards)) in ("accepted", "quarantined")  # after a fault
    (samples,) = evaluated.result(WAIT_S)
    assert [r.reward for r in samples] == [0.0]
    batch = orchestrator.next_batch(1)
    assert [[r.reward for r in group] for group in batch.groups] == [[5, 0], [5, 0], [5, 4]]
    assert batch.groups[0][1].rewards == {"reward": 0.0, "style": 0.0} and batch.metrics["trust/num_given_up"] == 3
    assert batch.metrics["rollout/reward"] == pytest.approx(19 / 6) and inside(orchestrator).failure is None
    kept = parquet.read(tmp_path / "rollouts" / "step_1" / "accepted.parquet")
    assert [r.reward for r in kept] == [5.0] * 6 and all(map(rollout_lib.signature_ok, kept))


def test_a_worker_that_is_refused_too_often_ends_no_run(make):
    """An earlier release ended the run if no other worker had asked for work lately."""
    orchestrator = make(trust__max_attempts=2)
    publish(orchestrator, 0)
    for _ in range(2):
        (group,) = lease(orchestrator, 1)
        assert submit(orchestrator, answers(group, temperature=0.3)).startswith("refused: temperature")
    assert lease(orchestrator) == [] and inside(orchestrator).failure is None
    (row,) = orchestrator.table()
    found = "2 rejected groups; the last, group 0 of step 1: temperature: exp"
    assert row["state"] == "banned" and row["problem"].startswith(found)
    for group in lease(orchestrator, key=OTHER):
        assert submit(orchestrator, answers(group), key=OTHER) == "accepted"
    assert len(later(orchestrator.next_batch, 1).result(WAIT_S).groups) == 3


def test_a_resumed_run_knows_its_workers(make, monkeypatch):
    """The marks are those at the hand-off of the batch: later groups are generated again."""
    asked_steps = []
    first = make(hooks={"evidence": lambda step: asked_steps.append(step) or {"of": step}}, trust__max_attempts=3)
    publish(first, 0)
    assert lease(first, 1, OTHER)
    for _ in range(2):
        assert submit(first, answers(lease(first, 1)[0], temperature=0.3)).startswith("refused: temperature")
    end_leases(first)  # as if they had expired, without a mark for it
    for group in lease(first, key=OTHER)[:3]:
        submit(first, answers(group), OTHER)
    first.next_batch(1)
    publish(first, 1)
    assert submit(first, answers(lease(first, 1)[0], temperature=0.3)).startswith("refused: temperature")
    assert lease(first) == []  # barred
    state = json.loads(json.dumps(first.state(1)))
    assert state["evidence"] == {"of": 1} and asked_steps == [1] and first.state(0) == {}
    lines = []
    second = make(hooks={"on_wait": lines.append}, trust__max_attempts=3)
    second.resume(1, state)
    assert second.state(1) == state  # for a run that stops before its first batch
    publish(second, 1)
    assert lease(second, 1, OTHER)
    assert submit(second, answers(lease(second, 1)[0], temperature=0.3)).startswith("refused: temperature")
    # the run continues with others
    assert lease(second) == [] and inside(second).failure is None and lease(second, key=OTHER)
    monkeypatch.setattr(orchestrator_lib, "WAIT_NOTICE_S", 0.01)
    waiting = later(second.next_batch, 2)
    proxy.wait_until(lambda: lines)
    assert lines[0].endswith("0 wait for a verdict; workers banned after trust.max_attempts rejections: 1")
    second.fail(ValueError("enough"))
    second.fail(ValueError("and then another"))  # the first is the cause
    with pytest.raises(ValueError, match="enough"):
        waiting.result(WAIT_S)


@pytest.mark.parametrize("message", ["the validator is broken", "weights: version 0 cannot be pulled"])
def test_a_validator_that_breaks_or_lacks_weights_stops_the_run(make, message):
    def check(rollouts):
        if message.startswith("weights"):
            return checks.Verdict(*message.split(": "))
        raise ValueError(message)

    orchestrator = make(check=check, trust__min_rate=1.0)
    publish(orchestrator, 0)
    waiting = later(orchestrator.next_batch, 1)
    assert submit(orchestrator, answers(lease(orchestrator)[0])) == "quarantined"
    with pytest.raises(ValueError, match=message):
        waiting.result(WAIT_S)
    assert not orchestrator.take_counts()["trust/num_refused"]


# ---- hand-off --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failed", "rule", "left_out"),
    [
        ({(0, 0)}, "leave out", 1),
        ({(0, 0), (0, 1), (2, 1)}, "leave out", 3),
        ({(0, 0), (0, 1), (1, 0), (2, 1)}, "zero", 0),
    ],
)
def test_samples_for_which_the_scorer_raised_are_left_out_of_the_batch(make, failed, rule, left_out):
    def screen(rollouts, split):
        own = {r.sample: {"reward": 1.0 + r.sample} for r in rollouts}
        raised = {r.sample for r in rollouts if (r.task.group, r.sample) in failed}
        return checks.OK, own | dict.fromkeys(raised, {"reward": 0.0, "error": 1.0})

    lines: list[str] = []
    orchestrator = make(
        screen=screen, hooks={"on_wait": lines.append, "first_error": lambda: "KeyError: 'x'"}, rl__score_errors=rule
    )
    publish(orchestrator, 0)
    for group in lease(orchestrator):
        assert submit(orchestrator, answers(group, rewards={"reward": 1.0})) == "accepted"
    batch = orchestrator.next_batch(1)
    kept = [(r.task.group, r.sample) for group in batch.groups for r in group]
    assert kept == [(g, i) for g in range(3) for i in range(2) if rule == "zero" or (g, i) not in failed]
    assert batch.metrics["batch/num_left_out"] == left_out
    assert batch.metrics["rollout/score_error_frac"] == len(failed) / 6
    noted = f"batch 1 leaves out {len(failed)} of 6 samples, for which the scorer failed (rl.score_errors); the first error: KeyError"
    assert any(noted in line for line in lines) == (rule != "zero")


def test_an_environment_that_no_worker_can_make_is_left_out_of_a_mixture(make, tmp_path, monkeypatch):
    """The run ended; the batches of the others go on, a resume tries it again, and more than half of a run is not left out."""
    monkeypatch.setattr(give_backs, "PATIENCE_S", 0.0)
    mixture = {f"envs__{key}": {"name": "reverse_text", "ratio": ratio} for key, ratio in (("good", 2.0), ("bad", 1.0))}

    def work(orchestrator, version, fails):
        """Makes all groups but those of `fails`; returns the environments of the groups of each step."""
        found = collections.defaultdict(list)
        for _ in range(6):
            for group in lease(orchestrator):
                found[group.step if group.split == "train" else "held_out"].append(group.env)
                if group.env == fails:
                    problem = f"environment {fails}: task {group.index} has no data"
                    orchestrator.leases.lease(KEY.worker, 0, returned=[group.key], problem=problem)
                else:
                    task = rollout_lib.TaskRef(group.env, group.index, group.group, 0)
                    assert submit(orchestrator, answers(group, version, task=task)) == "accepted"
        return {step: {*names} for step, names in found.items()}

    for number, (refill, sizes) in enumerate([(0.0, [2, 2]), (1.0, [3, 3])]):
        lines, is_any = [], refill > 0
        with run_ledger.RunLedger(tmp_path / f"ledger{number}.db", RUN, RUN.worker, any_step=is_any) as ledger:
            ledger.resumed(0)
            hooks, options = {"on_wait": lines.append, "ledger": ledger}, {"rl__refill": refill, "rl__max_lag": 0}
            orchestrator = make(hooks=hooks, **mixture, **options)
            publish(orchestrator, 0)
            evaluated = later(orchestrator.evaluate, 0)
            proxy.wait_until(functools.partial(held_out_is_open, orchestrator))
            assert work(orchestrator, 0, "bad")[1] == {"good", "bad"}
            assert [group[0].task.env for group in evaluated.result(WAIT_S)] == ["good"]
            assert len(orchestrator.next_batch(1).groups) == sizes[0]
            state = orchestrator.state(1)
            publish(orchestrator, 1)
            assert {"good"} == set().union(*work(orchestrator, 1, "bad").values())
            batch = orchestrator.next_batch(2)
            assert [group[0].task.env for group in batch.groups] == ["good"] * sizes[1]
            notices = [line for line in lines if line.startswith("left out from now on: bad, 33% of the groups")]
            assert len(notices) == 1 and re.search(r"The reason: environment bad: task \d+ has no data$", notices[0])
            assert inside(orchestrator).failure is None
            ledger.flush()
            ledger.resumed(1)
            again = make(hooks=hooks, **mixture, **options)
            again.resume(1, state)
            publish(again, 1)
            assert "bad" in set().union(*work(again, 1, "").values())
            assert len(again.next_batch(2).groups) == 3
    orchestrator = make(**mixture)
    publish(orchestrator, 0)
    work(orchestrator, 0, "good")
    with pytest.raises(ValueError, match="no worker can make a group: environment good: task .* has no data"):
        orchestrator.next_batch(1)


def test_slow_checks_of_newcomers_hold_up_no_known_worker(make):
    """Attack: completions of fresh keys on several networks, each of which takes a scorer's whole time limit, kept all threads."""
    release, known = threading.Event(), (KEY.worker, OTHER.worker)

    def screen(rollouts, split):
        assert rollouts[0].worker in known or release.wait(WAIT_S)
        return checks.OK, {}

    orchestrator = make(screen=screen, rl__prompts_per_step=16)
    publish(orchestrator, 0)
    waiting = []
    for number in range(submissions.NUM_CHECKS):
        key = rollout_lib.WorkerKey.generate()
        (group,) = orchestrator.leases.lease(key.worker, 1, f"network {number}")
        rows = parquet.to_bytes([rollout_lib.sign(r, key) for r in answers(group)])
        waiting += orchestrator.submit(parquet.decode(rows)).values()
    try:
        assert submit(orchestrator, answers(lease(orchestrator, 1)[0])) == "accepted"
        assert not any(reply.done() for reply in waiting)
    finally:
        release.set()
    assert [reply.result(WAIT_S) for reply in waiting] == ["quarantined"] * len(waiting)


def test_a_run_whose_scorer_fails_for_most_samples_ends_with_the_first_error(make):
    def failed(rollouts, split):
        return checks.OK, {r.sample: {"reward": 0.0, "error": float(r.task.group < 2)} for r in rollouts}

    orchestrator = make(screen=failed, hooks={"first_error": lambda: "KeyError: 'x'"})
    publish(orchestrator, 0)
    for group in lease(orchestrator):
        submit(orchestrator, answers(group, rewards={"reward": 0.0, "error": 0.0}))
    words = "failed for 4 of 6 samples of this run, 4 of 6 in batch 1; the first error: KeyError: 'x'; correct the environment, or set"
    with pytest.raises(ValueError, match=words):
        orchestrator.next_batch(1)


def test_a_batch_is_its_groups_in_order_with_advantages(make, tmp_path):
    orchestrator = make(rl__max_lag=1, train__share_prompts=True)
    publish(orchestrator, 0)
    groups = lease(orchestrator)  # of batches 1 and 2
    rewards = {0: (0.0, 1.0), 1: (0.5, 0.5), 2: (3.0, -1.0)}
    for group in groups[:3][::-1]:  # done in another order
        errors = ({}, {"error": 0.0}, {"error": 0.0})[group.group]
        rs = answers(group, rewards={"reward": 0.0} | errors)
        rs = [dataclasses.replace(r, reward=rewards[group.group][r.sample]) for r in rs]
        assert submit(orchestrator, rs[::-1]) == "accepted"
    assert submit(orchestrator, answers(groups[3])) == "accepted"  # of batch 2, and early
    batch = orchestrator.next_batch(1)
    assert [[(r.task.group, r.sample) for r in group] for group in batch.groups] == [[(g, 0), (g, 1)] for g in range(3)]
    # A - mean over the group; the flat group has no gradient and is left out.
    credit = [[branch.advantage.tolist() for branch in tree.branches] for tree in batch.trees]
    assert credit == [[[-0.5, -0.5], [0.5, 0.5]], [[2.0, 2.0], [-2.0, -2.0]]]
    assert [tree.prompt.tolist() for tree in batch.trees] == [[5, 6, 0], [5, 6, 2]]
    for name, value in {
        "rollout/reward": 4 / 6,
        "rollout/zero_advantage_frac": 1 / 3,
        "rollout/score_error_frac": 0.0,
        "rollout/response_length": 2.0,
        "rollout/truncated_frac": 0.0,
        "rollout/num_tokens": 12.0,
        "sync/lag": 0.0,
        "trust/num_accepted": 8.0,
    }.items():
        assert batch.metrics[name] == pytest.approx(value), name
    assert num_eligible(orchestrator) == 1
    kept = parquet.read(tmp_path / "rollouts" / "step_1" / "accepted.parquet")
    flat = [r for group in batch.groups for r in group]
    assert [rollout_lib.digest(r) for r in kept] == [rollout_lib.digest(r) for r in flat]
    assert all(rollout_lib.signature_ok(r) for r in kept)
    # The counters start again; batch 2 was generated with a lag of 1.
    for group in groups[4:]:
        submit(orchestrator, answers(group))
    metrics = orchestrator.next_batch(2).metrics
    assert metrics["trust/num_accepted"] == 4.0 and metrics["sync/lag"] == metrics["sync/lag_max"] == 1.0


def test_the_files_of_a_batch_survive_a_power_failure(make, monkeypatch):
    """An empty states.json made a restarted orchestrator forget where it was, after the ledger had the batch."""
    orchestrator, write, written = make(), atomic_file.write, {}
    publish(orchestrator, 0)
    for group in lease(orchestrator):
        submit(orchestrator, answers(group))

    def noted(path, *parts, durable=False, **options):
        written[path.name] = durable
        write(path, *parts, durable=durable, **options)

    monkeypatch.setattr(atomic_file, "write", noted)
    orchestrator.next_batch(1)
    assert written == {"accepted.parquet": True, orchestrator_lib.STATES: True}


@pytest.mark.parametrize("num_old", [3, 4])  # the prompt alone, and a sampled token
def test_what_is_stale_at_hand_off_is_dropped_and_leased_again(make, num_old):
    """Allowed when it was made (max_lag 2), too old when it is used (max_off_policy 1): the oldest token counts, as in an audit."""
    orchestrator = make(rl__max_lag=2, rl__max_off_policy=1)
    orchestrator.resume(1)
    publish(orchestrator, 0)
    leased = lease(orchestrator)
    groups = [group for group in leased if group.step == 3]
    publish(orchestrator, 1)
    mixed = np.array([0] * num_old + [1] * (5 - num_old), np.int32)
    assert submit(orchestrator, answers(groups[0], versions=mixed)) == "accepted"
    for group in leased:
        assert group.step == 3 or submit(orchestrator, answers(group, 1)) == "accepted"
    orchestrator.next_batch(2)
    publish(orchestrator, 2)
    for group in groups[1:]:
        assert submit(orchestrator, answers(group, 1)) == "accepted"
    waiting = later(orchestrator.next_batch, 3)
    again = []
    proxy.wait_until(lambda: again.extend(group for group in lease(orchestrator) if group.step == 3) or again)
    assert again == [dataclasses.replace(groups[0], min_version=1)]
    assert submit(orchestrator, answers(groups[0], 2)) == "quarantined"  # its worker knows how it was drawn
    batch = waiting.result(WAIT_S)
    assert batch.metrics["trust/num_stale"] == 2 and batch.metrics["sync/lag_max"] == 1
    assert batch.groups[0][0].versions.tolist() == [2] * 5


def test_held_out_tasks_follow_the_next_batch_and_are_kept_apart(make):
    orchestrator = make(rl__max_lag=1, trust__min_rate=1.0, check=lambda rollouts: checks.Verdict("toploc"))
    publish(orchestrator, 0)
    waiting = later(orchestrator.evaluate, 0)
    proxy.wait_until(lambda: held_out_is_open(orchestrator))
    groups = lease(orchestrator)
    order = [*(("train", n) for n in range(3)), ("held_out", 0), ("held_out", 1), ("train", 3)]
    assert [(group.split, group.group) for group in groups[:6]] == order
    for group in groups[4:2:-1]:
        assert submit(orchestrator, answers(group)) == "accepted"  # not checked
    results = waiting.result(WAIT_S)
    assert [[r.task.index for r in task] for task in results] == [[0], [1]]
    assert orchestrator.take_counts()["trust/num_accepted"] == 0 and num_eligible(orchestrator) == 0

    publish(orchestrator, 4)
    waiting = later(orchestrator.evaluate, 3)
    proxy.wait_until(lambda: held_out_is_open(orchestrator))
    group = next(group for group in lease(orchestrator) if group.split == "held_out")
    assert submit(orchestrator, answers(group, 2)).startswith("refused: versions: ")
    for group in lease(orchestrator, 1) + [task_schedule.held_out_groups(orchestrator.config, 3)[1]]:
        assert submit(orchestrator, answers(group, 3)) == "accepted"  # not by version 4, which servers have by now
    assert len(waiting.result(WAIT_S)) == 2


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def test_the_routes(make):
    there = {f"topology__{name}": ("http://127.0.0.1:1",) for name in ("servers", "control_servers")}
    orchestrator = make(topology__mode="remote", **there, topology__workers=(KEY.worker,), hooks={"invited": ()})
    with httpx.Client(base_url=orchestrator.serve(), timeout=WAIT_S) as http:
        run = http.get("/run").json()["run"]
        options = orchestrator.config.env.options.to_dict()
        digest = envs.digest("reverse_text", options)
        episodes = {"max_calls": 1, "max_episode_tokens": 0, "thinking": "keep"}
        assert run["env"] == {"name": "reverse_text", "options": options, "seed": 0, "digest": digest} | episodes
        assert run["sampling"] == {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12}
        assert (run["tokenizer"], run["tokenizer_date"]) == ("byte_chatml", "2026-01-01")
        assert run["chat_template_kwargs"] == orchestrator.config.chat_template_kwargs.to_dict()
        assert run["servers"] == [] and run["step"] == -1
        publish(orchestrator, 0)
        assert http.get("/run").json()["run"] == run | {"step": 0, "policy": {"epoch": 0, "version": 0, "digest": ""}}
        moe = make(**MOE, train__router_replay=True)
        assert moe.describe()["router_replay"] and not run["router_replay"]

        session = signed_http.session(http)
        assert session.run == RUN.worker
        differs = http.post("/lease", json=signed_http.lease_body(KEY, session, env_digest="0" * 64))
        words = (
            f"your environment reverse_text has the digest {'0' * 16}, and that of the run {digest[:16]}; get the run's"
        )
        assert differs.status_code == 400 and words in differs.json()["error"]["message"]
        good = signed_http.lease_body(KEY, session, 2, env_digest=digest)
        for body in ({}, good | {"capacity": 3}, good | {"worker": OTHER.worker}, []):
            reply = http.post("/lease", json=body)
            assert reply.status_code == 400 and reply.json()["error"]["message"], body
        assert http.post("/lease", content=b"{").status_code == 400
        assert "262144 bytes" in http.post("/lease", content=b" " * (2**18 + 1)).json()["error"]["message"]

        reply = http.post("/lease", json=good).json()
        assert signed_message.is_signed(session.run, reply) and reply["request"] == good["signature"]
        groups = [lease_lib.Lease.from_json(group) for group in reply["groups"]]
        assert groups == scheduled(orchestrator, 1)[:2]
        stranger = http.post("/lease", json=signed_http.lease_body(STRANGER, session))
        assert stranger.status_code == 400 and "topology.workers" in stranger.json()["error"]["message"]
        assert "as a replay" in http.post("/lease", json=good).json()["error"]["message"]

        def submit(body, **changes):
            return http.post("/submit", **signed_http.submission(KEY, session, body, **changes))

        good = parquet.to_bytes([rollout_lib.sign(r, KEY) for r in answers(groups[0])])
        for garbage in (b"", b"PAR1", b"\0" * 1000, good[:-1], good[:200] + b"\xff" + good[201:], b"{}"):
            reply = submit(garbage)
            assert reply.status_code == 400 and "rollout file" in reply.json()["error"]["message"], garbage[:9]
        rows = orchestrator.submission_limits["max_rows"]
        many = parquet.to_bytes([rollout_lib.sign(answers(groups[0])[0], KEY)] * (rows + 1))
        assert f"{rows + 1} rows, at most {rows} are read" in submit(many).json()["error"]["message"]
        for header in ({}, {lease_lib.HEADER: "[]"}, {lease_lib.HEADER: "{"}):
            reply = http.post("/submit", content=good, headers=header)
            assert reply.status_code == 400 and lease_lib.HEADER in reply.json()["error"]["message"]
        other = signed_http.submission(KEY, session, garbage) | {"content": good}
        assert "does not have the SHA-256" in http.post("/submit", **other).json()["error"]["message"]
        assert "not signed by" in submit(good, worker=OTHER.worker).json()["error"]["message"]
        assert signed_message.is_signed(RUN.worker, reply := submit(good).json())
        assert reply["verdicts"] == {"train/1/0": "taken"}
        assert submit(good).json()["verdicts"]["train/1/0"].startswith("refused: not leased")
        assert http.get("/nothing").status_code == 404
    orchestrator.close()


def test_a_full_disk_ends_the_run_and_leaves_its_workers_an_answer(make, caplog):
    """A request that fails with the run prints no traceback ahead of the line with the remedy."""

    def screen(rollouts, split):
        raise OSError("ledger.db cannot be written")

    orchestrator = make(screen=screen)
    with httpx.Client(base_url=orchestrator.serve(), timeout=WAIT_S) as http:
        publish(orchestrator, 0)
        session = signed_http.session(http)
        reply = http.post("/lease", json=signed_http.lease_body(KEY, session, 2)).json()
        groups = [lease_lib.Lease.from_json(group) for group in reply["groups"]]
        body = parquet.to_bytes([rollout_lib.sign(r, KEY) for group in groups for r in answers(group)])
        reply = http.post("/submit", **signed_http.submission(KEY, session, body))
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "ledger.db cannot be written")
    with pytest.raises(OSError, match="cannot be written"):
        orchestrator.next_batch(1)
    orchestrator.close()
    gc.collect()
    assert not caplog.records
