"""Episodes of a real engine: honest ones pass all checks, each way to change one is refused with its reason, and log-probabilities agree.

The environment has a tool's result, a rewritten history, and a judge (tests/support/user_code/turn_envs.py: talk). It runs in child processes, once for
the worker and once for the validator.
"""

import asyncio
import contextlib
import dataclasses
import functools

import numpy as np
import pytest

from configs import base
from inference.engine import engine as engine_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from rl.envs.foreign import process as foreign_process
from rl.envs.host import group as group_lib
from rl.envs.host import host as host_lib
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.experiment import experiment
from rl.protocol import lease, noise_seed, task_schedule
from rl.trust.verification import checks, episodes, verifier
from tests.support import episodes as episodes_lib
from tests.support import groups, tiny
from tests.support.user_code import turn_envs

pytestmark = pytest.mark.usefixtures("compile_fast")
KEY = rollout_lib.WorkerKey(rollout_lib.ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
ENV = f"{turn_envs.__file__}:talk"


@functools.cache
def resolved():
    c = base.get_config()
    tiny.use(c, dtype="float32")
    c.env.name, c.rl.prompts_per_step, c.rl.samples_per_prompt = ENV, 2, 3
    c.sampling.max_tokens, c.inference.max_model_len = 6, 256
    c.inference.num_slots, c.inference.prefill_batch = 8, 4
    return experiment.resolve(c)


class Generator:
    """Completes calls by an engine in this process; `shift` changes the seeds, as a worker would that tries again."""

    def __init__(self, exp, params, shift=0):
        engine = engine_lib.Engine(exp.model, exp.engine, exp.tokenizer)
        self.exp, self.shift = exp, shift
        self.scheduler = scheduler_lib.Scheduler(engine, params, 0, max_queue=10**6)

    async def __call__(self, call, count):
        filters = {name: self.exp.config.sampling[name] for name in ("top_k", "top_p", "min_p")}
        request = scheduler_lib.GenerateRequest(
            tokens=tuple(call.prompt),
            num_samples=count,
            temperature=1.0,
            seed=call.seed + self.shift,
            stop_ids=tuple(self.exp.tokenizer.stop_ids),
            proofs=True,
            max_tokens=call.max_tokens,
            **filters,
        )
        return await asyncio.wrap_future(self.scheduler.submit(request))


def played(exp, generator, groups):
    """Returns the rollouts of groups, unsigned, by group."""

    async def run():
        config = exp.config
        host = host_lib.Host(ENV, {}, config.seed, kind="pure", limit_s=1, digest=config.env.digest)
        limits = session_lib.Limits(config.sampling.max_tokens, config.inference.max_model_len, config.env.max_calls)
        player = group_lib.Player(host, exp.tokenizer, limits)
        try:
            return [
                await player.play(
                    generator,
                    group,
                    rollout_lib.TaskRef(ENV, group.index, group.group, config.seed),
                    config.env.digest,
                )
                for group in groups
            ]
        finally:
            await host.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def world():
    """A validator, the honest groups of a step, and the same groups sampled with other seeds."""
    exp, stack = resolved(), contextlib.ExitStack()
    params = tiny.params(exp.model, 3)
    with stack:
        rules = verifier.rules_of(exp.config, exp.tokenizer, stack=stack)
        validator = verifier.Verifier(exp.model, lambda version, epoch: params, rules)
        generator = Generator(exp, params)
        groups = task_schedule.train_groups(exp.config, 1)
        honest = played(exp, generator, groups)
        generator.shift = 1
        again = played(exp, generator, groups[:1])
        generator.scheduler.close()
        yield validator, honest, again[0]


def verdict(validator, rollouts):
    """Returns the verdict on a group that a worker signs and sends."""
    try:
        signed = parquet.from_bytes(parquet.to_bytes(rollout_lib.sign_all(rollouts, KEY)))
    except ValueError as error:
        return checks.Verdict("schema", str(error))
    found = checks.whole_group(signed, validator.rules)
    if found.accepted:
        found, _ = validator.check_group_without_weights(signed)
    return validator.check_groups_with_weights([signed])[0] if found.accepted else found


def test_honest_episodes_pass_and_log_probabilities_agree_on_every_branch(world):
    validator, honest, _ = world
    for group in honest:
        # A reply that ends with another stop token than the template's cannot be continued: the next call begins a branch.
        assert {one.num_branches for one in group} <= {3, 4} and len({one.env_digest for one in group}) == 1
        assert [one.trains for one in group] == [one.branch + 1 < one.num_branches for one in group]
        assert verdict(validator, group).accepted, verdict(validator, group)
        errors = [np.abs(one.error_N).max() for one in validator.replay(group)]
        assert max(errors) < 1e-4 and all(x.accepted for one in validator.replay(group) for x in one.proofs)


def changed(rollout, **fields):
    return dataclasses.replace(rollout, **fields)


def other_token(rollout, at):
    tokens = rollout.tokens.copy()
    tokens[at] = 65 + (tokens[at] - 64) % 26
    return changed(rollout, tokens=tokens)


def inserted(rollout, at, tokens):
    """Adds tokens of the worker to a later prompt."""
    put = lambda array, value: np.insert(array, at, [value] * len(tokens))  # noqa: E731
    arrays = {"sampled_mask": put(rollout.sampled_mask, False), "logprobs": put(rollout.logprobs, 0)}
    arrays |= {"versions": put(rollout.versions, 0), "tokens": np.insert(rollout.tokens, at, tokens).astype(np.int32)}
    return changed(rollout, calls=(rollout.calls + len(tokens) * (rollout.calls >= at)).astype("i4"), **arrays)


def ended(rollout, end, calls):
    arrays = {name: getattr(rollout, name)[:end] for name in ("tokens", "sampled_mask", "logprobs", "versions")}
    proofs = rollout_lib.proofs_by_call(rollout, 32)[: len(calls)]
    return changed(rollout, calls=calls, proofs=b"".join(proofs), **arrays)


def chosen(rollouts):
    """Returns the first episode of two turns in one branch, a rewritten one, and a judge."""
    return next(one.sample for one in rollouts if one.num_branches == 3)


def first(rollouts, change, branch=0):
    """Changes one branch of that episode."""
    sample = chosen(rollouts)
    return [change(one) if (one.sample, one.branch) == (sample, branch) else one for one in rollouts]


def without_judge(rollouts):
    sample = chosen(rollouts)
    kept = [one for one in rollouts if one.sample != sample or one.branch < 2]
    return [changed(one, num_branches=2) if one.sample == sample else one for one in kept]


def repeated(rollouts):
    """Calls the judge twice."""
    sample = chosen(rollouts)
    own = [changed(one, num_branches=4) if one.sample == sample else one for one in rollouts]
    return [*own, *(changed(one, branch=3) for one in own if (one.sample, one.branch) == (sample, 2))]


def of_another_sample(rollouts, *, seeds):
    """Submits the episode of another sample as this one, with the seeds that this one must have, or with its own."""
    sample, config = chosen(rollouts), resolved().config
    other = next(one.sample for one in rollouts if one.sample != sample)
    base_seed = task_schedule.train_groups(config, 1)[rollouts[0].task.group].seed
    moved = [changed(one, sample=sample) for one in rollouts if one.sample == other]
    if seeds:
        given = [(base_seed, sample, one.branch, one.tokens[: one.prompt_length], one.draw) for one in moved]
        moved = [changed(one, seed=noise_seed.stream_seed(*own)) for one, own in zip(moved, given, strict=True)]
    return [*(one for one in rollouts if one.sample != sample), *moved]


def root_alone(rollouts):
    sample = chosen(rollouts)
    kept = [one for one in rollouts if one.sample != sample or not one.branch]
    return [changed(one, num_branches=1) if one.sample == sample else one for one in kept]


def proofs_exchanged(rollout):
    return changed(rollout, proofs=b"".join(reversed(rollout_lib.proofs_by_call(rollout, 32))))


TAMPERED = {
    "another sample's episode": (lambda g: of_another_sample(g, seeds=True), "logprob sampling"),
    "another sample's seeds": (lambda g: of_another_sample(g, seeds=False), "seed"),
    "another task": (lambda g: [changed(r, task=dataclasses.replace(r.task, index=r.task.index + 1)) for r in g], "task"),
    "a token more than the limit": (lambda g: first(g, lambda r: changed(r, call_limits=np.array([5] * len(r.spans), "i4"))), "length termination environment"),
    "other stop reason": (lambda g: first(g, lambda r: changed(r, finish_reason={"stop": "length", "length": "stop"}[r.finish_reason])), "termination"),
    "branch not trained on": (lambda g: first(g, lambda r: changed(r, trains=False)), "environment"),
    "call numbered": (lambda g: first(g, lambda r: changed(r, draw=1)), "environment"),
    "all other branches dropped": (root_alone, "environment"),
    "a part of the reward added": (lambda g: [changed(r, rewards=r.rewards | {"turn_9": 9.0}) for r in g], "reward"),
    "other temperature": (lambda g: [changed(r, temperature=0.5) for r in g], "temperature"),
    "proofs of two calls exchanged": (lambda g: first(g, proofs_exchanged), "toploc"),
    "reply edited": (lambda g: first(g, lambda r: other_token(r, r.spans[0][0])), "environment logprob sampling"),
    "tool output edited": (lambda g: first(g, lambda r: other_token(r, r.spans[1][0] - 24)), "environment"),
    "judge's reply edited": (lambda g: first(g, lambda r: other_token(r, r.spans[0][0]), 2), "reward logprob"),
    "judge's prompt edited": (lambda g: first(g, lambda r: other_token(r, 8), 2), "seed"),
    "sub-call dropped": (without_judge, "environment"),
    "prompt injected": (lambda g: first(g, lambda r: inserted(r, r.spans[1][0] - 24, [72, 105])), "environment logprob"),
    "call repeated": (repeated, "environment"),
    "reward inflated": (lambda g: [changed(r, reward=r.reward + 1, rewards=r.rewards | {"reward": r.reward + 1}) for r in g], "reward"),
    "part of the reward inflated": (lambda g: [changed(r, rewards=r.rewards | {"turn_2": 9.0}) for r in g], "reward"),
    "failure claimed": (lambda g: [changed(r, reward=0.0, rewards=dict(host_lib.FAILED)) for r in g], "reward"),
    "other environment": (lambda g: [changed(r, env_digest="ab" * 32) for r in g], "task"),
    "turn cut early": (lambda g: first(g, lambda r: ended(r, r.spans[0][1] - 2, np.array([[r.spans[0][0], r.spans[0][1] - 2]], "i4"))), "termination"),
    "turn left out": (lambda g: first(g, lambda r: ended(r, r.spans[0][1], r.calls[:1])), "environment"),
    "judge trained on": (lambda g: [changed(r, trains=True) for r in g], "environment"),
    "limit raised": (lambda g: [changed(r, call_limits=None) for r in g], "termination environment"),
    "branches exchanged": (lambda g: [changed(r, branch=3 - r.branch) if r.branch and r.num_branches == 3 else r for r in g], "environment"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_each_change_of_an_episode_is_refused(world, name):
    validator, honest, _ = world
    change, reasons = TAMPERED[name]
    found = verdict(validator, change(honest[0]))
    assert found.reason in reasons.split(), found


def test_a_second_attempt_is_refused(world):
    """A worker plays again with other noise, and submits the better episode as that of the prescribed seed."""
    validator, honest, again = world
    roots = {one.sample: one for one in honest[0] if not one.branch}
    own = [one if one.branch else changed(one, seed=roots[one.sample].seed) for one in again]
    assert verdict(validator, own).reason in ("seed", "logprob", "sampling")


def test_a_run_of_one_turn_allows_one_call():
    c = base.get_config()
    c.env.max_calls = 9
    assert experiment.resolve(c).config.env.max_calls == 1


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("recorded", {}, ""),  # the run's own workers
        (
            "recorded",
            {"topology.mode": "remote"},
            "is of kind 'recorded', but workers of strangers may run kinds up to trust.environments = 'replayed'; set that",
        ),
        ("recorded", {"topology.mode": "remote", "trust.admission": "invited"}, ""),
        ("recorded", {"topology.mode": "remote", "trust.environments": "recorded"}, ""),
        (
            "replayed",
            {"topology.mode": "remote", "trust.environments": "pure"},
            "set that to 'replayed', or set trust.admission",
        ),
        ("pure", {"topology.mode": "remote", "trust.environments": "pure"}, ""),
    ],
)
def test_strangers_may_run_environments_of_the_kinds_that_the_config_allows(kind, changes, words):
    c = base.get_config()
    c.update_from_flattened_dict(changes)
    env = turn_envs.orders(kind=kind)
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        verifier.check_kind(c, env)


def ended_early(order, *more):
    """Returns the rollouts of an episode that its worker ended after its second reply, `order`, and further calls that it made up."""
    texts = iter(["on", order, *more])

    async def backend(call):
        return episodes_lib.sample([*episodes_lib.TOKENIZER.encode(next(texts)), episodes_lib.TOKENIZER.eos_id])

    session = episodes_lib.session(episodes_lib.Backend())
    session._backend = backend

    async def two_calls():
        messages = [{"role": "user", "content": "0"}]
        for _ in range(2):
            messages += [(await session.chat(messages)).message, {"role": "user", "content": "on"}]
        for text in more:
            await session.chat([{"role": "user", "content": text}])

    asyncio.run(two_calls())
    origin = rollouts_lib.Origin(rollout_lib.TaskRef("orders", 0, 0, 0), 1, 1.0)
    return rollouts_lib.of_episode(session, origin, host_lib.FAILED)


def test_a_slow_episode_may_have_failed_on_a_worker():
    """It ended the episode at its limit, which a step of 0.4 CPU seconds may exceed there, or at will."""
    cases = ("busy",), ("on",), ("busy", "a call that it does not make")
    host = host_lib.Host(f"{turn_envs.__file__}:orders", {}, 0, kind="pure", limit_s=5)
    stops = episodes_lib.TOKENIZER.stop_ids
    with contextlib.closing(
        episodes.Episodes(host, episodes_lib.TOKENIZER, episodes_lib.LIMITS, "keep", stops)
    ) as checker:
        group = lease.Lease(1, 0, "train", 0, seed=7, num_samples=1, temperature=1.0, min_version=0)
        claims = [ended_early(*case) for case in cases]
        found = [checks._reward(claimed[0], *checker.replay(group, [claimed])).reason for claimed in claims]
    assert found == ["ok", "environment", "environment"]


class Dying:
    """The host of an environment whose process ends in the episode of sample 1, each time."""

    async def play(self, session, index, split):
        if session.sample == 1:
            raise foreign_process.Died("it ended its process")
        return host_lib.Played({"reward": 0.5}, 0.0)

    async def close(self):
        pass


def test_an_episode_that_ends_the_process_of_its_environment_is_unscored_and_ends_nothing_else():
    group = lease.Lease(1, 0, "train", 0, seed=7, num_samples=3, temperature=1.0, min_version=0)
    own = episodes_lib.TOKENIZER, episodes_lib.LIMITS, "keep", episodes_lib.TOKENIZER.stop_ids
    played = episodes.Episodes(Dying(), *own)
    found = played.replay(group, [[one] for one in groups.answers(group)])
    played.close()
    assert [one.timed_out for one in found] == [False, True, False] and found[1].scores == host_lib.FAILED
    assert found[0].scores == {"reward": 0.5}
