"""Toys of the wrappers: a policy of a few parameters learns by REINFORCE from the rewards that the environments give.

The figures are in bench/results/algorithms.md; `-s` prints them.
"""

import asyncio
import json

import numpy as np
import pytest

from configs import environments
from rl import envs
from rl.envs.interface import episode


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Says:
    """A model whose one reply has a given text and number of tokens."""

    def __init__(self, text, num_tokens):
        self.reply = episode.Reply({"role": "assistant", "content": text}, "stop", 1, num_tokens)

    async def chat(self, messages, **_):
        return self.reply


def rows(path, count):
    file = path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {i}", "answer": "yes"}) + "\n" for i in range(count)))
    return str(file)


def lengths_of(tmp_path, seed, targets, longest, alpha, steps=201, G=8, P=16):
    """Returns (task reward, length penalty, length error) by step, of a policy with a distribution of lengths for each target, and one of answers."""
    loop = asyncio.new_event_loop()
    options = {"budget": "exact", "budget_targets": targets, "budget_alpha": alpha}
    env = envs.load("dataset", path=rows(tmp_path, 64), seed=0, **options)
    rng, logits, answer, curve = np.random.default_rng(seed), np.zeros((len(targets), longest)), -1.0, []
    for step in range(steps):
        grad, grad_answer, seen = np.zeros_like(logits), 0.0, []
        for group in range(P):
            task = env.make_task((step * P + group) % env.num_tasks, "train")
            which = targets.index(task.info["budget"][1])
            chances, right = softmax(logits[which]), 1 / (1 + np.exp(-answer))
            lengths, rights = rng.choice(longest, G, p=chances), rng.random(G) < right
            scores = [
                loop.run_until_complete(env.play(task, Says("yes" if one else "no", int(length) + 1)))
                for length, one in zip(lengths, rights, strict=True)
            ]
            advantages = np.array([one["reward"] for one in scores])
            advantages -= advantages.mean()
            for length, one, advantage in zip(lengths, rights, advantages, strict=True):
                grad[which] += advantage * ((np.arange(longest) == length) - chances)
                grad_answer += advantage * (one - right)
            seen += scores
        logits, answer = logits + 0.5 * grad / P, answer + 0.5 * grad_answer / P
        curve.append(
            [np.mean([one[name] for one in seen]) for name in ("task_reward", "length_penalty", "length_error")]
        )
    loop.close()
    for step in range(0, steps, 50):
        print(f"seed {seed}, step {step}: task reward, length penalty, length error", np.round(curve[step], 3))
    return np.array(curve)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_learns_two_lengths(tmp_path, seed):
    """Targets of 4 and 12 tokens, lengths of 1 to 16, alpha * range = 1: the error falls under 20 %, and the task is learned, too."""
    curve = lengths_of(tmp_path, seed, (4, 12), 16, 1 / 16)
    assert curve[-20:, 2].mean() < 0.2 and curve[-20:, 0].mean() > 0.95
    assert curve[:5, 2].mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", environments.TARGETS)
def test_the_length_penalties_of_target_short_and_long_fall(tmp_path, name):
    """The two experiments with 250 tokens as one: targets of 4 to 16 and of 8 to 40, alpha of 0.075."""
    options = environments.get_config(name).env.options
    targets = tuple(target // 250 for target in options.budget_targets)
    curve = lengths_of(tmp_path, 0, targets, targets[-1] * 5 // 4, 250 * options.budget_alpha, steps=401)
    assert curve[-20:, 0].mean() > 0.95 and curve[-20:, 1].mean() < curve[:5, 1].mean() / 4


def learn(env, kind_of, rng, steps=20, P=8, G=8):
    """Returns the success on the learnable tasks after some steps: they share a skill, others never or always succeed."""
    skill = -2.0
    for step in range(steps):
        update = 0.0
        for group in range(P):
            task = env.make_task((step * P + group) % env.num_tasks, "train")
            chance = {"never": 0.0, "always": 1.0, "learnable": 1 / (1 + np.exp(-skill))}[
                kind_of[task.messages[-1]["content"]]
            ]
            right = rng.random(G) < chance
            rewards = np.array([env.score(task, "yes" if one else "no")["reward"] for one in right])
            update += ((rewards - rewards.mean()) * (right - chance)).mean()
        skill += 3.0 * update / P
    return 1 / (1 + np.exp(-skill))


def test_a_window_of_pass_rates_beats_all_tasks(tmp_path):
    """60 % of the tasks are never solved and 20 % always: at equal steps, the window learns more, in each of three seeds."""
    path, found = rows(tmp_path, 200), []
    plain = envs.load("dataset", path=path, seed=0)
    prompts = [plain.make_task(index, "train").messages[-1]["content"] for index in range(plain.num_tasks)]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        kind_of = {one: rng.choice(["never", "always", "learnable"], p=[0.6, 0.2, 0.2]) for one in prompts}
        rates = {"never": 0.0, "always": 1.0, "learnable": 0.25}
        file = tmp_path / f"rates{seed}.jsonl"
        keys = [envs.environment.content_key(plain.make_task(i, "train").messages) for i in range(len(prompts))]
        own = [{"key": k, "task": f"x/train/{i}", "rate": rates[kind_of[prompts[i]]]} for i, k in enumerate(keys)]
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
        window = envs.load("dataset", path=path, seed=0, solve_rate=(0.125, 0.5), solve_rates_path=str(file))
        found.append([learn(env, kind_of, np.random.default_rng(seed)) for env in (window, plain)])
    print("success after 20 steps, window and all tasks:", np.round(found, 2).tolist())
    assert all(filtered > unfiltered + 0.2 for filtered, unfiltered in found)
