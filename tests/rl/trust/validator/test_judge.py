"""Verdicts for an orchestrator: the checks of a real validator over its route."""

import dataclasses
import hashlib
import json
import types

import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease
from rl.protocol import verdict as verdict_lib
from rl.trust.validator import judge as judge_lib
from rl.trust.validator import routes
from rl.trust.validator import state as validator_state
from rl.trust.verification import checks, verifier
from tests.support import cheats, commands, doubles, serving

pytestmark = pytest.mark.usefixtures("compile_fast")
RUN, KEY = rollout_lib.WorkerKey.generate(), rollout_lib.WorkerKey.generate()


@pytest.fixture
def make(tmp_path):
    """Call it for a judge with the state file of the one before, which it closes."""
    states = []

    def one():
        if states:
            states.pop().close()
        states.append(validator_state.State(tmp_path / "validator.db", "a run"))
        return judge_lib.Judge(doubles.make_validator(prompts=2), KEY, RUN.worker, state=states[0], keep_steps=10)

    yield one
    states.pop().close()


def signed(key, body, validator=KEY):
    message = lease.request(key, lease.Session(RUN.worker, validator.worker), rollouts=hashlib.sha256(body).hexdigest())
    return {lease.HEADER: json.dumps(message)}


def asked(judge, rollouts, **headers):
    """The response of the route, and the verdicts in it by group."""
    body = rollouts if isinstance(rollouts, bytes) else parquet.to_bytes(list(rollouts))
    headers = signed(RUN, body) | headers
    reply = serving.asker(routes.make_app(judge))("POST", "/verdicts", content=body, headers=headers)
    found = reply.json().get("verdicts", ())
    return reply, {one["group"]: verdict_lib.SignedVerdict.read(one) for one in found}


def test_groups_of_one_request_are_replayed_together_and_each_gets_its_verdict(make, monkeypatch):
    judge, calls = make(), []
    replay = verifier.Verifier.check_groups_with_weights

    def counted(self, groups):
        calls.append(len(groups))
        return replay(self, groups)

    monkeypatch.setattr(verifier.Verifier, "check_groups_with_weights", counted)
    good, bad = (
        doubles.honest(doubles.Double(3, prompts=2)),
        doubles.CHEATS["copied_proof"](doubles.Double(3, prompts=2)),
    )
    _, found = asked(judge, [*good[:8], *bad[8:]])
    first, second = (found[group] for group in sorted(found))
    assert calls == [2] and (first.accepted, first.reason) == (True, "ok")
    assert (second.accepted, second.reason) == (False, "toploc") and second.run == RUN.worker
    assert first.digest == verdict_lib.group_digest(good[:8]) and first.validator == KEY.worker
    evidence = judge.checker.evidence.state(0)
    _, again = asked(judge, [*good[:8], *bad[8:]])  # the same bytes: the same verdicts, and no second piece of evidence
    assert {group: (one.digest, one.reason) for group, one in again.items()} == {
        group: (one.digest, one.reason) for group, one in found.items()
    }
    assert judge.checker.evidence.state(0) == evidence and calls == [2]
    restarted = make()
    assert json.dumps(restarted.checker.evidence.state(0), sort_keys=True) == json.dumps(evidence, sort_keys=True)
    _, again = asked(restarted, good[:8])
    assert again[first.group].accepted and restarted.checker.evidence.tests[doubles.NODE.worker].num_rollouts == 8


def test_rules_without_weights_are_checked_here_too(make):
    good, judge = doubles.honest(doubles.Double(3, prompts=2)), make()
    for rollouts, reason in (
        (good[:7], "samples"),
        ([dataclasses.replace(good[0], reward=0.5), *good[1:8]], "signature"),
        *(
            (cheats.CHEATS[name](doubles.Double(3, prompts=2))[:8], *cheats.REASONS[name])
            for name in ("inflated_reward", "future_version", "own_seed", "cut_completions")
        ),
    ):
        (verdict,) = asked(judge, rollouts)[1].values()
        assert (verdict.accepted, verdict.reason) == (False, reason)


def test_missing_weights_are_said_so_and_asked_for_again(make, monkeypatch, capsys):
    judge, rollouts = make(), doubles.honest(doubles.Double(3, prompts=2))[:8]
    answers, replay = (
        iter([checks.Verdict(checks.Reason.WEIGHTS, "not here yet")]),
        judge.checker.check_groups_with_weights,
    )
    monkeypatch.setattr(judge.checker, "check_groups_with_weights", lambda groups: [*answers] or replay(groups))
    assert [next(iter(asked(judge, rollouts)[1].values())).reason for _ in range(2)] == ["weights", "ok"]
    waits = iter([False, False, False, True])
    monkeypatch.setattr(routes, "REPORT_S", 4.0)
    routes._report(judge, types.SimpleNamespace(wait=lambda s: next(waits)))
    line = "verdicts: 2 (0 rejected, 1 without weights), {} groups/s, waiting for groups of the run\n"
    assert capsys.readouterr().out == line.format(0.5) + line.format("0.0")


def test_only_the_run_is_answered_and_bytes_that_are_no_rollouts_are_refused(make):
    judge, body = make(), parquet.to_bytes(doubles.honest(doubles.Double(3, prompts=2))[:8])
    good = signed(RUN, body)
    judge.verify(good[lease.HEADER])
    for headers, words in (
        ({lease.HEADER: ""}, "is missing or not JSON"),
        (signed(KEY, body), "not signed by run"),
        (signed(RUN, body, validator=RUN), "not this orchestrator"),
        (signed(RUN, b"other"), "does not have the SHA-256"),
        (good, "as a replay"),
    ):
        reply, found = asked(judge, body, **headers)
        assert reply.status_code == 400 and words in reply.text and not found
    reply, _ = asked(judge, b"PAR1")
    assert reply.status_code == 400 and "rollout file" in reply.text
    many = parquet.to_bytes(doubles.honest(doubles.Double(3, prompts=2)) * 5)  # 80, and 64 are replayed together
    reply, _ = asked(judge, many)
    assert reply.status_code == 400 and "rows" in reply.text
    assert judge.counts == {} and not judge.state.all(validator_state.COUNTED)


def test_the_key_of_a_validator_is_made_and_shown(tmp_path, capsys):
    for _ in range(2):
        assert commands.run("rl.validator", "key", "--key", tmp_path / "v.key") == 0
    found = capsys.readouterr()
    first, second = found.out.split()
    assert found.err == f"made a new key: {tmp_path / 'v.key'}\n"
    for path, error in (
        (tmp_path, "Is a directory; name a file"),
        (tmp_path / "a" / "v.key", "a does not exist; create"),
    ):
        assert commands.run("rl.validator", "key", "--key", path) == 1
        assert error in capsys.readouterr().err and not (tmp_path / "a").exists()
    assert first == second == rollout_lib.WorkerKey.load(tmp_path / "v.key").worker
