"""Toys of the wrappers: a policy of a few parameters learns by REINFORCE from the rewards that the environments give.

The figures are in docs/performance.md; `-s` prints them.
"""

import asyncio
import json

import numpy as np
import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_learns_two_lengths(tmp_path, seed):
    """Targets of 4 and 12 tokens, lengths of 1 to 16, alpha * range = 1: the error falls under 20 %, and the task is learned, too."""
    targets, longest, G, P, loop = (4, 12), 16, 8, 16, asyncio.new_event_loop()
    options = {"budget": "exact", "budget_targets": targets, "budget_alpha": 1 / longest}
    env = envs.load("dataset", path=rows(tmp_path, 64), seed=0, **options)
    rng, logits, answer, curve = np.random.default_rng(seed), np.zeros((2, longest)), -1.0, []
    for step in range(201):
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
        names = ("task_reward", "length_penalty", "length_error")
        curve.append([np.mean([one[name] for one in seen]) for name in names])
    loop.close()
    for step in (0, 50, 100, 200):
        print(f"seed {seed}, step {step}: task reward, length penalty, length error", np.round(curve[step], 3))
    assert np.mean(curve[-20:], 0)[2] < 0.2 and np.mean(curve[-20:], 0)[0] > 0.95
    assert np.mean(curve[:5], 0)[2] > 0.5


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
