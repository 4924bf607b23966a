"""Attacks on the whole path, from a signed request over HTTP to the batch that the learner takes, by one who read the defenses.

No model runs: rollouts are written by hand, and a forged one claims log-probabilities of -0.001.
"""

import contextlib
import json
import random
import threading

import numpy as np

from configs import quickstart
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.protocol import lease as lease_lib
from rl.protocol import task_schedule, timeline
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator.groups.queue_entry import State
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks
from tests.support import ledgers, signed_http, validators
from tests.support.groups import answers
from tests.support.orchestrators import inside

WAIT_S = 60
RUN, HONEST, CHEAT, STRANGER = (rollout_lib.WorkerKey.generate() for _ in range(4))
CLAIM = np.float32(-0.001)


def forged(group):
    """A group's rollouts with claims that every replay rejects."""
    logprobs = np.where(np.arange(5) < 3, 0, CLAIM).astype(np.float32)
    return answers(group, logprobs=logprobs)


def signed(rollouts, key):
    return [rollout_lib.sign(rollout, key) for rollout in rollouts]


def is_forged(rollouts):
    return any((rollout.logprobs == CLAIM).any() for rollout in rollouts)


def judge(rollouts):
    return checks.Verdict("sampling", "forged") if is_forged(rollouts) else checks.OK


def resolve(**changes):
    config = quickstart.get_config()
    config.rl.update(prompts_per_step=8, samples_per_prompt=2, num_steps=4)
    for name, value in changes.items():
        section, field = name.split("__")
        config[section][field] = value
    return experiment.resolve(config)


@contextlib.contextmanager
def running(folder, exp, *, source=None, **hooks):
    """A run with a ledger, and a client of it. Its ledger must verify in the end, and nothing may have failed it."""
    hooks = {"secret": b"secret", "credit": exp.credit, "key": RUN, "invited": [HONEST.worker, CHEAT.worker]} | hooks
    with contextlib.ExitStack() as stack:
        any_step = not task_schedule.is_fixed(exp.config.rl)
        ledger = stack.enter_context(run_ledger.RunLedger(folder / "ledger.db", RUN, RUN.worker, any_step=any_step))
        source = source or verdict_collector.VerdictCollector(RUN, lambda groups: [*map(judge, groups)])
        run = orchestrator_lib.Orchestrator(exp.config, folder, verdicts=source, ledger=ledger, **hooks)
        ledger.on_failure, run.ledger = run.fail, ledger
        ledger.resumed(0)
        run.resume(0)
        client = signed_http.Worker(run.serve())
        stack.callback(client.http.close)
        stack.callback(run.close)
        run.publish(timeline.Policy(0, 0))
        client.lease(HONEST, 0)  # it is active
        yield run, client
        assert inside(run).failure is None
    found = ledgers.verify(folder / "ledger.db", keeper=RUN.worker)
    assert found.error is None, found


def states(run):
    with run.locked:
        return {key: entry.state for key, entry in inside(run).queue.entries.items()}


def finish(run, client, step):
    """The batch after HONEST did all that is left, whose digests are those of the entries that were taken."""
    while groups := client.lease(HONEST, 4096):
        for group in groups:
            assert client.submit(HONEST, signed(answers(group), HONEST)) == ["taken"]
    batch = run.next_batch(step)
    assert not any(map(is_forged, batch.groups)), "forged groups were trained on"
    return batch


# ---- trust that was earned, or of a friend ---------------------------------------------------------------------------


def test_no_answer_tells_which_groups_pass_without_a_verdict(tmp_path):
    """A second copy of a submission was answered in another way once its group had passed."""
    go_on, keys, found = threading.Event(), [rollout_lib.WorkerKey.generate() for _ in range(8)], set()
    source = verdict_collector.VerdictCollector(RUN, lambda groups: go_on.wait(WAIT_S) and [*map(judge, groups)])
    hooks = {"source": source, "invited": [one.worker for one in (HONEST, *keys)]}
    with running(tmp_path, resolve(trust__invited_rate=0.5), **hooks) as (run, client):
        for key in keys:
            (group,) = client.lease(key)
            body = parquet.to_bytes(signed(answers(group), key))
            for again in (False, True):
                sent = client.http.post("/submit", **signed_http.submission(key, client.session, body))
                reply = sent.json()["verdicts"]
                assert list(reply) == ["/".join(map(str, group.key))] and ("refused" in str(reply)) == again
            found.add(states(run)[group.key])
        go_on.set()
        assert found == {State.QUARANTINED, State.ELIGIBLE}


# ---- bytes of others, or of other times ------------------------------------------------------------------------------


def test_rollouts_of_another_run_are_not_handed_in_in_their_signers_name(tmp_path):
    """Two runs with one seed prescribe the same groups, and rollouts name no run: here, another policy made them."""
    exp = resolve()
    with running(tmp_path, exp, invited=[HONEST.worker]) as (run, client):
        groups = client.lease(HONEST, 7)
        assert client.lease(STRANGER, 1)
        elsewhere = [rollout for group in groups for rollout in signed(forged(group), HONEST)]
        body = parquet.to_bytes(elsewhere)
        reply = client.http.post("/submit", **signed_http.submission(STRANGER, client.session, body))
        validators.settled(run)
        assert reply.status_code == 400 and "submit your own" in reply.json()["error"]["message"]
        assert inside(run).health.state()["workers"] == {} and inside(run).health.rate(HONEST.worker) < 1
        for group in groups:
            assert client.submit(HONEST, signed(answers(group), HONEST)) == ["taken"]


def test_bytes_that_race_for_one_lease_are_judged_as_they_are_trained_on(tmp_path):
    """Good and forged rollouts of a group arrive together: whichever is taken, the verdict and the batch are on the same bytes."""
    with running(tmp_path, resolve(trust__min_rate=1.0, trust__invited_rate=1.0)) as (run, client):
        for group in client.lease(CHEAT, 8):
            bodies = [signed(make(group), CHEAT) for make in (answers, forged, answers)]
            threads = [threading.Thread(target=client.submit, args=(CHEAT, body)) for body in bodies]
            random.Random(group.group).shuffle(threads)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        validators.settled(run)
        batch = finish(run, client, 1)
        run.ledger.flush()
        events = [entry.event for entry in run.ledger._ledger.entries()]
    accepted = {e.fields["digest"] for e in events if e.kind == "verdict" and e.fields["accepted"]}
    assert {verdict_lib.group_digest(group) for group in batch.groups} <= accepted


def test_an_ejected_worker_hands_in_the_groups_that_it_still_holds(tmp_path):
    """The ledger refuses an ejected worker's leases: those that it has must end neither the run nor the rules."""
    with running(tmp_path, resolve(trust__max_attempts=2)) as (run, client):
        groups = client.lease(CHEAT, 7)
        for make in (lambda g: answers(g)[:1], lambda g: answers(g)[:1], answers, forged, answers, forged, answers):
            client.submit(CHEAT, signed(make(groups.pop()), CHEAT))
        validators.settled(run)
        assert client.lease(CHEAT, 7) == [] and inside(run).health.is_banned(CHEAT.worker)
        metrics = finish(run, client, 1).metrics
        assert metrics["trust/num_unverified"] <= 2 * 5 and metrics["trust/num_checked"] >= 2 * 3


# ---- malformed requests ----------------------------------------------------------------------------------------------


def test_no_json_of_a_request_is_more_than_an_error(tmp_path):
    with running(tmp_path, resolve()) as (run, client):
        good = signed_http.lease_body(STRANGER, client.session)
        text = json.dumps(good)
        changes = {
            **{
                f"capacity {value}": text.replace('"capacity": 1', f'"capacity": {value}')
                for value in ("NaN", "1e400", "-Infinity", "true", "1.0", "1e0", "9" * 4400, '"1"', "[[]]", "null")
            },
            "time 1e400": text.replace(str(good["time_us"]), "1e400"),
            "twice": text.replace('"capacity": 1', '"capacity": 1, "capacity": 4096'),
            "twice, signed last": text.replace('"capacity": 1', '"capacity": 1, "worker": "00"'),
            "a surrogate": text.replace('"work"', '"\\ud800"'),
            "a wide digit": text.replace('"capacity": 1', '"capacity": "\uff11"'),
            "a wide key": text.replace('"capacity"', '"\uff43apacity"'),
            "a NUL": text.replace('"work": ""', '"work": "\\u0000"'),
            "a line after the key": text.replace(good["worker"], good["worker"] + "\\n"),
            "deep": '{"returned": ' + "[" * 4000,
            "not UTF-8": text.encode() + b"\xff",
        }
        for name, body in changes.items():
            body = body if isinstance(body, bytes) else body.encode()
            replies = [client.http.post("/lease", content=body, headers={"content-type": "application/json"})]
            if "not" not in name and "wide" not in name:
                replies.append(client.http.post("/submit", content=b"", headers={lease_lib.HEADER: body}))
            for reply in replies:
                assert reply.status_code == 400 and reply.json()["error"]["message"], name
        assert client.http.get("/run", params={"nonce": "x" * 65}).status_code == 400
        assert State.LEASED not in states(run).values() and client.lease(STRANGER)
