"""New weights in the middle of a conversation, from the worker to the verdict: each side agrees on the versions of reused keys.

A worker plays episodes of four turns against an inference server over HTTP. The server gets new weights before the third turn, so that the
third turn reuses keys of the old version, and the fourth those of both.
"""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest

from configs import base
from inference import client as client_lib
from inference import serve
from inference.rollouts import attestation, parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import startup
from rl import generate, worker
from rl.envs.host import group as group_lib
from rl.experiment import experiment
from rl.protocol import task_schedule
from rl.trust.verification import checks, evidence_log, verifier
from rl.trust.verification import replay as replay_lib
from rl.trust.verification import rules as rules_lib
from sharding.weights import broadcast
from tests.support import serving, tiny
from tests.support.user_code import turn_envs

pytestmark = pytest.mark.usefixtures("compile_fast")
KEY, SERVER, PUBLISHER = (
    rollout_lib.WorkerKey(rollout_lib.ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2, 3)
)
RUN, MAX_TOKENS, TURNS, STEP, OLD, NEW = "ab" * 32, 20, 4, 5, 3, 4


def resolved():
    c = base.get_config()
    tiny.use(c, dtype="float32")
    c.env.name, c.env.options = f"{turn_envs.__file__}:letters", {"turns": TURNS}
    c.rl.prompts_per_step, c.rl.samples_per_prompt, c.rl.max_lag, c.rl.max_off_policy = 1, 2, 2, 2
    c.sampling.max_tokens, c.inference.max_model_len = MAX_TOKENS, 256
    c.inference.num_slots, c.inference.prefill_batch = 4, 2
    return experiment.resolve(c)


class Swapping(client_lib.Client):
    """Waits until each episode has come to the third turn, and then has new weights loaded."""

    def __init__(self, urls, swap, count, **options):
        super().__init__(urls, **options)
        self.swap, self.barrier, self.turns = swap, asyncio.Barrier(count), []

    async def generate(self, token_ids, sampling, **how):
        self.turns.append(bytes(token for token in token_ids if token < 256).count(b"say "))
        if self.turns[-1] == 3 and await self.barrier.wait() == 0:
            await asyncio.to_thread(self.swap)
        if self.turns[-1] == 3:
            await self.barrier.wait()
        return await super().generate(token_ids, sampling, **how)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The rules of a run, a validator, and the rollouts of a group in a file."""
    exp, folder = resolved(), tmp_path_factory.mktemp("run")
    group, root = task_schedule.train_groups(exp.config, STEP)[0], str(folder / "weights")

    def publish(version):
        metadata = {"model": dataclasses.asdict(exp.model), "tokenizer": "byte_chatml"}
        options = broadcast.PublishOptions(key=PUBLISHER.private)
        broadcast.publish(tiny.params(exp.model, version), version, root, options, metadata=metadata)

    async def played(url, swap):
        run = worker.read_runs(generate.described(exp, [url]) | {"server_keys": {url: SERVER.worker}}, "off", None)
        own = run[""]
        try:
            async with Swapping([url], swap, group.num_samples, keys=own.server_keys, run=RUN) as client:
                return await group_lib.roll_out(client, own, KEY, group)
        finally:
            await own.close()

    with contextlib.ExitStack() as stack:
        publish(OLD - 1)
        publish(OLD)
        server = startup.prepare(root, exp.engine, key=PUBLISHER.worker).run()
        stack.callback(server.close)
        server.signer, server.run = SERVER, RUN
        publish(NEW)
        url = stack.enter_context(serving.in_thread(serve.make_app(server)))
        found, find = [], server.scheduler.prefixes.find
        server.scheduler.prefixes.find = lambda *prompt: found.append(find(*prompt)) or found[-1]
        parquet.write(folder / "group.parquet", asyncio.run(played(url, lambda: server.update(NEW))))
        rules = verifier.rules_of(exp.config, exp.tokenizer, stack=stack, run=RUN)
        validator = verifier.Verifier(exp.model, verifier.published(root, key=PUBLISHER.worker), rules)
        versions = {tuple(version for _, version in one.runs) for one in found if one}
        yield validator, parquet.read(folder / "group.parquet"), versions


def verdict(validator, rollouts):
    """Returns the verdict on a group that a worker signs and sends."""
    try:
        signed = parquet.from_bytes(parquet.to_bytes(rollout_lib.sign_all(rollouts, KEY)))
    except ValueError as error:
        return checks.Verdict("schema", str(error))
    found, _ = validator.check_group_without_weights(signed)
    return validator.check_groups_with_weights([signed])[0] if found.accepted else found


def claiming(group, change, signer=None):
    """Returns the group with other claims about reused keys, which a server signs if there is a `signer`."""
    found = []
    for one in group:
        rows = None if one.prefix_versions is None else change(one, one.prefix_versions)
        one = dataclasses.replace(one, prefix_versions=rows, server="", server_signature=b"")
        if signer:
            signed = b"".join(signer.private.sign(message) for message in messages(one))
            one = dataclasses.replace(one, server=signer.worker, server_signature=signed)
        found.append(one)
    return found


def messages(one):
    """Yields the message that a server signs for each call of a rollout."""
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": MAX_TOKENS, "return_routed_experts": False}
    for call, proofs in enumerate(rollout_lib.proofs_by_call(one, tiny.model().model_dim)):
        start, end = one.spans[call]
        ending = "length" if end - start == MAX_TOKENS else "stop"
        yield attestation.of_call(one, call, ending, proofs, settings | {"run": RUN})


def ending_at(place):
    """Claims that the older keys end at another place of the rollout, for the turn number `call` of a row."""
    return lambda one, rows: np.array([(call, place(one, call, end), old) for call, end, old in rows.tolist()], "i4")


BORDERS = {
    "the turn before": ending_at(lambda one, call, end: end - (one.spans[1][1] - one.spans[0][1])),
    "this turn": ending_at(lambda one, call, end: one.spans[call - 1][1] if call == 3 else end),
    "no row for a turn": lambda one, rows: rows[:1],
    "no field": lambda one, rows: None,
    "an older version": lambda one, rows: rows - np.array([0, 0, 1], "i4"),
}


def test_a_turn_that_reused_keys_of_two_versions_is_accepted(world):
    validator, group, versions = world
    assert (OLD, NEW) in versions
    for one in group:
        assert one.num_branches == 1 and [int(one.versions[start - 1]) for start, _ in one.spans] == [3, 3, 4, 4]
        assert one.server == SERVER.worker and one.oldest_version == OLD
        calls, ends, old = one.prefix_versions.T.tolist()
        assert calls == [2, 3] and old == [OLD] * 2 and one.spans[0][1] < min(ends) <= max(ends) < one.spans[1][1]
    assert checks.whole_group(group, validator.rules).accepted and verdict(validator, group).accepted
    assert max(np.abs(one.error_N).max() for one in validator.replay(group)) < 1e-4


@pytest.mark.parametrize(
    "name", [name if name == "the turn before" else pytest.param(name, marks=pytest.mark.slow) for name in BORDERS]
)
def test_a_false_claim_about_reused_keys_is_refused(world, name):
    """A worker cannot make it in the name of its server; a server that makes it is at fault."""
    validator, group, _ = world
    found = verdict(validator, claiming(group, BORDERS[name]))
    assert found.reason in ("sampling", "logprob", "toploc"), found
    signed = [
        dataclasses.replace(one, server=SERVER.worker, server_signature=true.server_signature)
        for one, true in zip(claiming(group, BORDERS[name]), group, strict=True)
    ]
    assert verdict(validator, signed).reason == "attestation"
    lied = claiming(group, BORDERS[name], SERVER)
    assert verdict(validator, lied).reason == found.reason
    servers = [evidence_log.server_at_fault(of, found, validator.rules, [SERVER.worker]) for of in (signed, lied)]
    assert servers == ["", SERVER.worker]


def test_the_oldest_version_of_a_key_is_in_the_window(world):
    validator, group, _ = world
    groups = validator.rules.groups

    def narrow(step):
        return {number: dataclasses.replace(one, min_version=OLD) for number, one in groups(step).items()}

    strict = verifier.Verifier(validator.model, None, dataclasses.replace(validator.rules, groups=narrow))
    assert strict.check_group_without_weights(group)[0].accepted
    older = claiming(group, BORDERS["an older version"])
    assert str(verdict(strict, older)).startswith(f"versions: {OLD - 1} is older than {OLD}")


@pytest.mark.slow
def test_calls_that_read_the_same_keys_are_replayed_together(world, monkeypatch):
    """The calls before and after the new weights are two pieces; and their values are the same one piece at a time."""
    validator, group, _ = world
    for one in group:
        pieces = replay_lib._calls(one)
        assert [(before, piece.spans) for before, piece in pieces] == [
            (0, one.spans[:2]),
            (one.spans[1][1] - 1, one.spans[2:]),
        ]
    monkeypatch.setattr(rules_lib, "MAX_REPLAY_TOKENS", 1)
    replayed = validator.replay(group)
    assert max(np.abs(one.error_N).max() for one in replayed) < 1e-4
    assert all(proof.accepted for one in replayed for proof in one.proofs)


@pytest.mark.slow
def test_a_claim_about_a_first_call_is_replayed(world):
    """A branch of an episode may begin like an earlier one: here with the tokens before the third turn, as a prompt."""
    validator, group, _ = world
    one = group[0]
    (start, end), rows = one.spans[2], one.prefix_versions[:1] - np.array([2, 0, 0], "i4")
    fields = {name: getattr(one, name)[:end] for name in ("tokens", "logprobs")}
    fields |= {"sampled_mask": np.arange(end) >= start, "versions": np.full(end, NEW, "i4"), "calls": None}
    fields["proofs"] = rollout_lib.proofs_by_call(one, validator.model.model_dim)[2]
    claims = [dataclasses.replace(one, **fields, prefix_versions=claim) for claim in (rows, None)]
    true, false = [np.abs(validator.replay([claim])[0].error_N).max() for claim in claims]
    assert true < 1e-4 and false > 1e-3
