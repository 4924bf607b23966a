"""Toys of the options of every environment, and of data from `rl.generate`: policies of a few parameters learn from the real rewards.

    python -m bench.toys

1. `window`: tasks of which many are never or always solved, with and without a window of pass rates.
2. `lengths`: a distribution of lengths for each target of a budget, and one of answers. Also the targets of `target_short` and
   `target_long` of configs/environments.py, with 250 tokens as one.
3. `accepted`: fine-tuning on all responses of a teacher that is right one time in four, and on those that a scorer, which is wrong one time
   in ten, accepts.

The figures are in bench/results/algorithms.md.
"""

import asyncio
import json
import pathlib
import tempfile

import jax
import numpy as np

from configs import environments
from rl import envs, generate
from rl.envs.interface import episode
from rl.learning.algorithms import losses
from rl.learning.data import sources

STRATEGIES = (lambda text: text[::-1], str, lambda text: "".join(sorted(text)), lambda text: text[:-1])


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


def lengths_of(folder, seed, targets, longest, alpha, steps=201, G=8, P=16):
    """Returns (task reward, length penalty, length error) by step, of a policy with a distribution of lengths for each target, and one of answers."""
    loop = asyncio.new_event_loop()
    options = {"budget": "exact", "budget_targets": targets, "budget_alpha": alpha}
    env = envs.load("dataset", path=rows(folder, 64), seed=0, **options)
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


def window(folder):
    """Prints the success on the tasks that can be learned: 60 % of all are never solved, and 20 % always."""
    path, found = rows(folder, 200), []
    plain = envs.load("dataset", path=path, seed=0)
    prompts = [plain.make_task(index, "train").messages[-1]["content"] for index in range(plain.num_tasks)]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        kind_of = {one: rng.choice(["never", "always", "learnable"], p=[0.6, 0.2, 0.2]) for one in prompts}
        rates = {"never": 0.0, "always": 1.0, "learnable": 0.25}
        file = folder / f"rates{seed}.jsonl"
        keys = [envs.environment.content_key(plain.make_task(i, "train").messages) for i in range(len(prompts))]
        own = [{"key": k, "task": f"x/train/{i}", "rate": rates[kind_of[prompts[i]]]} for i, k in enumerate(keys)]
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
        window = envs.load("dataset", path=path, seed=0, solve_rate=(0.125, 0.5), solve_rates_path=str(file))
        found.append([learn(env, kind_of, np.random.default_rng(seed)) for env in (window, plain)])
    print("success after 20 steps, window and all tasks:", np.round(found, 2).tolist())


def fine_tuned(file, env):
    """Returns the held-out score of a policy that chooses one of `STRATEGIES` per length of text, after SFT on a file of conversations."""
    rows = [[message["content"] for message in row["messages"]] for row in sources.read(file)["train"]]
    rows = [(question.removeprefix("Reverse: "), answer) for question, answer in rows]
    fits = np.float32([[make(text) == answer for make in STRATEGIES] for text, answer in rows])
    weights = fits / fits.sum(1, keepdims=True)  # a palindrome is copied, too
    length, theta = np.array([len(text) for text, _ in rows]), np.zeros((6, len(STRATEGIES)), np.float32)

    @jax.jit
    @jax.grad
    def gradient(theta):
        logp = jax.nn.log_softmax(theta)[length]
        return losses.cross_entropy(logp, logp, weights, np.ones_like(weights), denom=len(rows))[0]

    for _ in range(200):
        theta -= 2.0 * np.asarray(gradient(theta))
    p, score = np.asarray(jax.nn.softmax(theta)), 0.0
    for task in (env.make_task(index, "held_out") for index in range(100)):
        rewards = [env.score(task, make(task.answer[::-1]))["reward"] for make in STRATEGIES]
        score += float(p[len(task.answer)] @ rewards) / 100
    return score


def accepted(folder, seed):
    """Prints the held-out scores after fine-tuning on all responses, and on the accepted ones."""
    rng, rows = np.random.default_rng(seed), []
    env = envs.load("reverse_text", seed=seed, min_length=3, max_length=5, reward="exact")
    for index in range(600):
        task = env.make_task(index, "train")
        answer = STRATEGIES[rng.integers(len(STRATEGIES))](task.answer[::-1])
        right = bool(env.score(task, answer)["reward"]) != (rng.random() < 0.1)
        about = {
            "response_id": str(index),
            "problem_id": str(index),
            "task_type": "reverse_text",
            "score": float(right),
        }
        rows.append(about | {"messages": [*task.messages, {"role": "assistant", "content": answer}]})
    found = {}
    for name, min_score in (("all", 0.0), ("accepted", 0.5)):
        (folder / name).mkdir()
        count = generate.write(folder / name, rows, min_score)
        found[name] = fine_tuned(folder / name / "sft.jsonl", env)
        print(f"seed {seed}, SFT on {count} responses ({name}): held-out score {found[name]:.2f}")


def main():
    """Runs all toys."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        window(folder)
        for seed in range(3):
            lengths_of(folder, seed, (4, 12), 16, 1 / 16)
            (folder / f"{seed}").mkdir()
            accepted(folder / f"{seed}", seed)
        for target in environments.TARGETS:
            options = environments.get_config(target).env.options
            targets = tuple(one // 250 for one in options.budget_targets)
            lengths_of(folder, 0, targets, targets[-1] * 5 // 4, 250 * options.budget_alpha, steps=401)


if __name__ == "__main__":
    main()
