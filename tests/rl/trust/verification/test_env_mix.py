"""A run with several environments: each rollout is checked by the rules of its group's own, and no worker chooses among them."""

import contextlib
import dataclasses

import numpy as np
import pytest

from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl import worker
from rl.experiment import experiment
from rl.protocol import env_mix
from rl.trust.verification import checks, verifier
from rl.trust.verification import rules as rules_lib
from tests.support import groups

TOKENIZER = tokenizer_lib.load("byte_chatml", date="2026-01-01")
KEY = rollout_lib.WorkerKey.generate()


@pytest.fixture(scope="module")
def exp():
    config = quickstart.get_config()
    config.rl.prompts_per_step = 4
    config.envs.letters = dict(name="reverse_text", options=dict(alphabet="abcd"), ratio=3, max_tokens=9)
    config.envs.digits = dict(name="reverse_text", options=dict(alphabet="0123", reward="exact"), samples_per_prompt=2)
    return experiment.resolve(config)


@pytest.fixture(scope="module")
def rules(exp):
    with contextlib.ExitStack() as stack:
        yield verifier.rules_of(exp.config, TOKENIZER, stack=stack)


def answers(exp, group, text=None):
    """Honest rollouts of a group, made by the environment of the group alone: each answers right, or with `text`."""
    entry = env_mix.entries(exp.config)[group.env]
    env = verifier.envs.load(entry.name, seed=exp.config.seed, **entry.options)
    task = env.make_task(group.index, group.split)
    prompt = TOKENIZER.render(task.messages, add_generation_prompt=True).token_ids
    tokens = [*TOKENIZER.encode(task.answer if text is None else text), TOKENIZER.stop_ids[0]]
    assert env.score is not None
    scores = env.score(task, task.answer if text is None else text)
    own = []
    for sample in range(group.num_samples):
        mask = np.arange(len(prompt) + len(tokens)) >= len(prompt)
        fields = dict(
            tokens=np.array([*prompt, *tokens], np.int32),
            sampled_mask=mask,
            logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            versions=np.zeros(len(mask), np.int32),
            task=rollout_lib.TaskRef(group.env, group.index, group.group, exp.config.seed),
            reward=scores["reward"],
            rewards=scores,
        )
        own.append(dataclasses.replace(groups.rollout(group, sample), **fields))
    return own


def of(rules, env):
    return next(group for group in rules.groups(1).values() if group.env == env)


def test_a_group_is_checked_by_the_rules_of_its_environment(exp, rules):
    letters, digits = (rules.of_group(of(rules, env)) for env in ("letters", "digits"))
    assert (letters.max_tokens, digits.max_tokens, rules.max_tokens) == (9, 12, 12)
    # one file
    assert letters.env_digest == digits.env_digest == exp.config.envs.letters.digest != exp.config.env.digest
    assert rules.max_samples == 8  # of letters, though a judge sees either first
    for env in ("letters", "digits"):
        group = of(rules, env)
        verdict = checks.check_at_lease(answers(exp, group), rules.at_lease(group, newest=0))
        assert verdict.accepted, verdict
        # 11 tokens and a stop token: as many as the run allows, and more than one of its environments does.
        long = answers(exp, group, "x" * 11)
        found = checks.check_at_lease(long, rules.at_lease(group, newest=0))
        assert found.accepted if env == "digits" else found.reason == "length", (env, found)


@pytest.mark.parametrize("claim", ["digits", "reverse_text", "gsm8k"])
def test_a_rollout_of_another_environment_than_prescribed_is_refused(exp, rules, claim):
    """The claim is refused; so is the prompt of another environment with the right claim."""
    group = of(rules, "letters")
    honest = answers(exp, group)
    lied = [dataclasses.replace(one, task=dataclasses.replace(one.task, env=claim)) for one in honest]
    verdict = checks.check_at_lease(lied, rules.at_lease(group, newest=0))
    assert verdict.reason == "task" and "expected letters" in verdict.detail
    other = answers(exp, dataclasses.replace(group, env="digits"))
    claimed = [dataclasses.replace(one, task=honest[0].task) for one in other]
    assert checks.prompt(honest[0], checks.own_rules(honest[0], rules)).accepted
    assert checks.prompt(claimed[0], checks.own_rules(claimed[0], rules)).reason == "prompt"
    validator = verifier.Verifier(exp.model, lambda *version: {}, dataclasses.replace(rules, hidden_dim=0))
    for found, expected in zip(validator.check_without_weights(rollout_lib.sign_all(lied, KEY)), lied, strict=True):
        assert found.reason == "task", expected.task


def test_rewards_are_those_of_the_group_s_own_environment(exp, rules):
    """Half right is worth something in one environment and nothing in the other."""
    for env, worth in (("letters", True), ("digits", False)):
        group = of(rules, env)
        half = answers(exp, group, "a0b1")
        own = checks.own_rules(half[0], rules)
        assert own.env == env
        assert all(verdict.accepted for verdict in checks.rewards(half, own))
        assert any(one.reward > 0 for one in half) == worth or env == "letters"
        raised = [dataclasses.replace(one, reward=1.0, rewards=dict(one.rewards) | {"reward": 1.0}) for one in half]
        assert {verdict.reason for verdict in checks.rewards(raised, own)} == {"reward"}
    prompts = [tuple(rules.of_group(group).prompt(group)) for group in rules.groups(1).values()]
    expected = [
        tuple(answers(exp, group)[0].tokens[: len(prompt)])
        for group, prompt in zip(rules.groups(1).values(), prompts, strict=True)
    ]
    assert prompts == expected


def test_rules_of_one_environment_are_unchanged():
    plain = rules_lib.Rules.of(experiment.resolve(quickstart.get_config()).config)
    group = plain.groups(1)[0]
    assert plain.of_group(group) is plain and not plain.envs
    assert (plain.env, plain.max_tokens, plain.max_turns, plain.max_samples) == ("reverse_text", 12, 1, 8)


def test_a_worker_loads_the_environments_that_the_run_describes(exp, tmp_path):
    """Names, options, digests, and lengths arrive as the orchestrator sends them; a changed digest or name is refused."""
    body = env_mix.described(exp.config) | {"tokenizer": "byte_chatml", "servers": []}
    runs = worker.read_runs(body, "off", ())
    assert {key: (run.env.name, run.sampling["max_tokens"]) for key, run in runs.items()} == {
        "letters": ("letters", 9),
        "digits": ("digits", 12),
    }
    assert runs["letters"].env.make_task(0, "train").messages != runs["digits"].env.make_task(0, "train").messages
    assert worker._digest(body) == exp.config.env.digest
    for change, words in (
        ({"digest": "0" * 64}, "other code or data here"),
        ({"name": "no_such"}, "environment 'no_such' does not exist"),
    ):
        with pytest.raises(ValueError, match=words):
            worker.read_runs(body | {"envs": body["envs"] | {"digits": body["envs"]["digits"] | change}}, "off", ())
    with pytest.raises(ValueError, match="orchestrator"):
        worker.read_runs(body | {"envs": {"digits": 3}}, "off", ())
