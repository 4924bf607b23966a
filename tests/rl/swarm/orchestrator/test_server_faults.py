"""Servers that sign their samples answer for them: a liar bars no honest worker, and no worker that forges can blame a server."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from configs import quickstart
from inference.rollouts import attestation, kept_sets, parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.protocol import registry, task_schedule, timeline
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator import submissions, worker_health
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks, evidence_log, rules, sequential_test
from tests.support import proxy, validators
from tests.support.groups import answers
from tests.support.orchestrators import inside, marks

RUN, WORKER, LIAR, HONEST, OWN = (rollout_lib.WorkerKey.generate() for _ in range(5))
POLICY = timeline.Policy(7, 0)
WRONG = checks.Verdict("sampling", "3 of 12 tokens")
P, MAX_ATTEMPTS = 8, 3


def sign(rollout, server=HONEST, config=None, **asked):
    """The rollout as `server` signed it and WORKER hands it in. `asked` are settings of the request other than the run's."""
    settings = {name: config.sampling[name] for name in ("top_k", "top_p", "min_p", "max_tokens")}
    message = attestation.of_call(
        rollout,
        0,
        rollout.finish_reason,
        rollout.proofs,
        settings | {"run": RUN.worker, "return_routed_experts": False} | asked,
    )
    signature = server.private.sign(message)
    named = dataclasses.replace(rollout, server=server.worker, server_signature=signature)
    return rollout_lib.sign(named, WORKER)


def is_of_liar(rollouts):
    """Returns True for groups of the liar, and for those that the tests mark by their last log-probability."""
    return any(r.server == LIAR.worker or r.logprobs[-1] == -3 for r in rollouts)


@pytest.fixture
def run(tmp_path, monkeypatch):
    with started(tmp_path, monkeypatch) as run:
        yield run


@contextlib.contextmanager
def started(tmp_path, monkeypatch):
    """A process of an orchestrator with a ledger and two servers. The draw has only group 0 replayed until a node is a suspect."""
    config = quickstart.get_config()
    config.rl.update(prompts_per_step=P, samples_per_prompt=2, num_steps=3, max_lag=0)
    config.trust.update(max_attempts=MAX_ATTEMPTS, min_rate=1e-9, invited_rate=1e-3)
    exp = experiment.resolve(config)
    monkeypatch.setattr(verdict_lib, "draw", lambda secret, name: 0.999 * (int(name.rpartition("/")[2]) % P != 0))
    may_judge = threading.Event()

    def judge(groups):
        assert may_judge.wait(60)
        return [WRONG if is_of_liar(g) else checks.OK for g in groups]

    source = verdict_collector.VerdictCollector(RUN, judge)
    keys = (LIAR.worker, HONEST.worker)
    found, of_run = [], rules.Rules.of(exp.config, RUN.worker)

    def screen(rollouts, split):
        return next((v for r in rollouts if not (v := checks.vouched(r, of_run)).accepted), checks.OK), {}

    ledger = run_ledger.RunLedger(tmp_path / "ledger.db", RUN, RUN.worker)
    run = orchestrator_lib.Orchestrator(
        exp.config,
        tmp_path,
        credit=exp.credit,
        key=RUN,
        verdicts=source,
        check_group_without_weights=screen,
        secret=b"secret",
        invited=[WORKER.worker],
        ledger=ledger,
        server_keys=keys,
        on_wait=found.append,
    )
    ledger.on_failure = run.fail
    run.lines, run.config, run.may_judge, run.ledger = found, exp.config, may_judge, ledger
    ledger.resumed(0)
    run.resume(0)
    ledger.published(POLICY.version, "0" * 64, POLICY.epoch)
    run.publish(POLICY)
    for number, key in enumerate(keys):
        url = f"http://server{number}"
        run.nodes.add(url, "http://127.0.0.1:9", key=key)
        run.nodes.beat(url, "server", registry.Report(url, POLICY), 0.0)
    run.nodes.on_served(POLICY)
    with ledger:
        yield run
        run.close()


def hand_in(run, server, count=P, change=lambda rollouts: rollouts):
    """Leases up to `count` groups as WORKER, hands them in as `server` signed them, and returns the replies. Verdicts come later."""
    replies = []
    run.may_judge.clear()
    for group in run.leases.lease(WORKER.worker, count):
        rollouts = change([sign(r, server, run.config) for r in answers(group)])
        replies += [reply.result(60) for reply in run.submit(parquet.decode(parquet.to_bytes(rollouts))).values()]
    run.may_judge.set()
    validators.settled(run)
    return replies


def test_a_server_that_lies_bars_no_worker_and_is_no_longer_told(run):
    assert {*run.describe()["server_keys"].values()} == {LIAR.worker, HONEST.worker}
    assert hand_in(run, LIAR) == ["quarantined"] + ["accepted"] * (P - 1)
    # All of it was called back, and is void.
    proxy.wait_until(lambda: inside(run).queue.count()[queue_entry.State.OPEN] == P)
    with pytest.raises(ValueError, match="make another key"):  # the ledger takes no lease of it: the run ended
        run.leases.lease(LIAR.worker, 1)
    assert inside(run).servers.is_banned(LIAR.worker) and run.describe()["server_keys"] == {
        "http://server1": HONEST.worker
    }
    assert "gets no more work" in run.lines[-1] and not inside(run).failure
    # not even a suspect
    assert not inside(run).health.is_banned(WORKER.worker) and inside(run).health.rate(WORKER.worker) < 0.9
    assert marks(run, WORKER.worker)["num_halvings"] == 0
    assert inside(run).counts["refused"] == 0 and inside(run).counts["server_faults"] == 2 * P
    assert hand_in(run, HONEST) == ["quarantined"] * P  # the draws of these groups are known
    batch = run.next_batch(1)
    assert batch.metrics["trust/num_server_faults"] == 2 * P and len(batch.groups) == P
    restored = worker_health.WorkerHealth(MAX_ATTEMPTS, 60, min_rate=0.1, invited_rate=0.5, invited=[LIAR.worker])
    restored.restore(run.state(1)["servers"])
    assert restored.is_banned(LIAR.worker) and restored.state() == run.state(1)["servers"]


def test_a_restart_without_a_checkpoint_forgives_no_server(tmp_path, monkeypatch):
    with started(tmp_path, monkeypatch) as run:
        hand_in(run, LIAR, 1)
        assert inside(run).servers.state()["workers"][LIAR.worker]["num_rejected"] == 1 and not inside(run).failure
    with started(tmp_path, monkeypatch) as run:
        assert hand_in(run, LIAR) == ["quarantined"] * P  # it is a suspect
        proxy.wait_until(lambda: inside(run).servers.is_banned(LIAR.worker))
    with started(tmp_path, monkeypatch) as run:
        assert run.describe()["server_keys"] == {"http://server1": HONEST.worker}
        assert run.ledger.ejected_workers == {LIAR.worker} and WORKER.worker not in run.ledger.refusals
        assert LIAR.worker not in inside(run).health.state()["workers"] and not inside(run).failure


def mixed(rollouts):
    """One sample of its own among those of a server."""
    own = dataclasses.replace(rollouts[1], server="", server_signature=b"", logprobs=rollouts[1].logprobs * 0 - 3)
    own = dataclasses.replace(own, logprobs=own.logprobs * own.sampled_mask)
    return [rollouts[0], rollout_lib.sign(own, WORKER)]


def changed(**changes):
    return lambda rollouts: [rollout_lib.sign(dataclasses.replace(r, **changes), WORKER) for r in rollouts]


def last(name, value):
    """Changes the last entry of an array of each rollout."""

    def change(rollouts):
        out = []
        for rollout in rollouts:
            array = getattr(rollout, name).copy()
            array[-1] = value
            out.append(rollout_lib.sign(dataclasses.replace(rollout, **{name: array}), WORKER))
        return out

    return change


def asked(**settings):
    """Has an honest server generate under settings of the worker's own."""
    return lambda rollouts: [
        sign(r, HONEST, experiment.resolve(quickstart.get_config()).config, **settings) for r in rollouts
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (last("logprobs", -3), "attestation"),
        (last("tokens", 7), "attestation"),
        (changed(proofs=b"made up"), "attestation"),
        (changed(finish_reason="length"), "attestation"),
        (changed(server_signature=bytes(64)), "attestation"),
        (changed(server=LIAR.worker), "attestation"),  # who did not sign it
        (asked(top_p=0.5), "attestation"),
        (asked(max_tokens=3), "attestation"),
        (asked(run=OWN.worker), "attestation"),  # samples of another run of the server, with the same seeds
        (asked(return_routed_experts=True), "attestation"),
        (mixed, "sampling"),
        (
            lambda rollouts: [
                sign(r, OWN, experiment.resolve(quickstart.get_config()).config) for r in mixed(rollouts)
            ],
            "sampling",
        ),
    ],
)
def test_a_worker_that_forges_cannot_blame_a_server(run, change, reason):
    hand_in(run, HONEST, 1, change)  # group 0, which is replayed
    proxy.wait_until(lambda: inside(run).counts[f"refused_{reason}"] == 1, what=dict(inside(run).counts))
    assert inside(run).counts["server_faults"] == 0 and inside(run).servers.state()["workers"] == {}
    assert inside(run).health.rate(WORKER.worker) == 1.0  # a suspect


@pytest.mark.parametrize(
    ("pinned", "versions", "is_server"),
    [
        (-1, (3, 3, 3, 3, 3), False),  # too old, which the worker knew; the server may have had no other
        (7, (6, 6, 6, 6, 6), False),
        (7, (7, 7, 7, 7, 8), False),
        (-1, (8, 8, 8, 8, 7), True),
        (-1, (8, 8, 8, 8, 9), True),  # was not published
    ],
)
def test_a_server_answers_for_invented_versions_and_not_for_those_that_the_lease_excludes(pinned, versions, is_server):
    config = experiment.resolve(quickstart.get_config()).config
    group = dataclasses.replace(task_schedule.train_groups(config, 9)[0], num_samples=2, min_version=5, version=pinned)
    rollouts = [sign(r, HONEST, config) for r in answers(group, versions=np.array(versions, np.int32))]
    of_lease = rules.Rules.of(config, RUN.worker).at_lease(group, newest=8)
    verdict = checks.check_at_lease(rollouts, of_lease)
    assert verdict.reason == "versions"
    found = evidence_log.server_at_fault(rollouts, verdict, of_lease, [HONEST.worker])
    assert found == (HONEST.worker if is_server else "")


@pytest.mark.parametrize("has_kept", [True, False])
def test_a_server_answers_for_wrong_kept_sets_and_not_for_those_that_its_worker_did_not_ask_for(has_kept):
    config = quickstart.get_config()
    config.sampling.top_k = 20
    config = experiment.resolve(config).config
    group = dataclasses.replace(task_schedule.train_groups(config, 1)[0], num_samples=2)
    kept = kept_sets.encode(np.array([[5, 6], [5, 6]])) if has_kept else b""  # without the sampled tokens
    rollouts = [sign(r, HONEST, config) for r in answers(group, kept=kept)]
    of_lease = rules.Rules.of(config, RUN.worker).at_lease(group, newest=8)
    verdict = checks.kept_named(rollouts[0], of_lease)
    assert verdict.reason == "kept"
    found = evidence_log.server_at_fault(rollouts, verdict, of_lease, [HONEST.worker])
    assert found == (HONEST.worker if has_kept else "")


def test_a_group_is_replayed_at_the_larger_rate_of_its_worker_and_its_server(run):
    group = run_group(run.config)
    by = {key: [sign(r, key, run.config) for r in group] for key in (LIAR, HONEST, OWN)}

    def answering(rollouts):
        entry = queue_entry.Entry(None, worker=WORKER.worker, rollouts=rollouts)
        return [name for _, name in submissions.answering(inside(run), entry)]

    assert answering(by[HONEST]) == [WORKER.worker, HONEST.worker]
    mixed = [by[HONEST][0], by[LIAR][1]]  # the worker's alone: it chose to mix
    assert answering(by[OWN]) == answering(group) == answering(mixed) == [WORKER.worker]
    assert not inside(run).health.invited & inside(run).servers.invited
    inside(run).servers.rejected(LIAR.worker, ("train", 1, 0), 0.0, is_fault=True)
    assert hand_in(run, HONEST, 2) == ["quarantined", "accepted"] and hand_in(run, LIAR, 2) == ["quarantined"] * 2


def run_group(config):
    return answers(dataclasses.replace(task_schedule.train_groups(config, 1)[0], num_samples=2))


def test_evidence_is_against_the_server_that_signed_the_whole_group():
    config = experiment.resolve(quickstart.get_config()).config
    group = [sign(r, HONEST, config) for r in run_group(config)]
    log = evidence_log.EvidenceLog(None, servers=[HONEST.worker])
    log.add_claims(group)
    assert [*log.tests] == [HONEST.worker]
    log.add_claims([group[0], *mixed(group)[1:]])
    assert [*log.tests] == [HONEST.worker, evidence_log.NEWCOMERS, WORKER.worker]
    assert evidence_log.server_of(group, [LIAR.worker]) == ""


def test_a_worker_that_chooses_which_samples_it_hands_in_signed_bars_no_server():
    """Attack: the signature of the server is left out, but where its noise happens to look bad."""
    config = experiment.resolve(quickstart.get_config()).config
    rng, lines = np.random.default_rng(0), []
    log = evidence_log.EvidenceLog(None, servers=[HONEST.worker], on_flagged=lambda key, line: lines.append(line))
    group = dataclasses.replace(task_schedule.train_groups(config, 1)[0], num_samples=1)
    for number in range(600):
        (rollout,) = answers(dataclasses.replace(group, group=number, seed=number), logprobs=np.zeros(5, np.float32))
        (noise_N,) = checks.exponential_noise([rollout])
        y_N = rng.exponential(size=len(noise_N))  # an honest server's
        rollout.logprobs[rollout.sampled_mask] = np.log(noise_N / y_N)
        looks_bad = sequential_test.claims_ratio(y_N)[-1] > 0
        assert log.add_claims([dataclasses.replace(rollout, server=HONEST.worker if looks_bad else "")]) == [checks.OK]
    flagged = log.tests[HONEST.worker].flag
    assert flagged and len(lines) == 1 and flagged in lines[0]
    verdict = checks.Verdict("statistics", flagged)  # of a validator that knows no servers
    signed = [sign(one, HONEST, config) for one in answers(group)]
    assert not evidence_log.server_at_fault(signed, verdict, rules.Rules.of(config, RUN.worker), [HONEST.worker])
