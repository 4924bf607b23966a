"""The options that every environment takes: a window of pass rates, length budgets, and ladders of difficulty."""

import asyncio
import collections
import dataclasses
import json

import pytest

from rl import envs
from rl.envs.interface import scripted_model
from rl.envs.wrappers import budget, ladder

ROWS = [{"prompt": f"{i} + {i} = ?", "answer": str(2 * i)} for i in range(40)]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(tmp_path / "train.jsonl")


def rates(tmp_path, env, rate_of, *, cut=None):
    """Writes pass rates as the annotator does: `rate_of(index)`, for the first `cut` tasks."""
    rows = [
        {
            "key": envs.environment.content_key(env.make_task(i, "train").messages),
            "task": f"x/train/{i}",
            "rate": rate_of(i),
        }
        for i in range(cut or env.num_tasks)
    ]
    file = tmp_path / "rates.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["key"])))
    return str(file)


def played(env, task, *texts):
    model = scripted_model.ScriptedModel(scripted_model.in_order(*texts))
    return asyncio.run(env.play(task, model))


def test_a_window_keeps_the_tasks_with_rates_inside(tmp_path, path):
    plain = envs.load("dataset", path=path, seed=0)
    file = rates(tmp_path, plain, lambda i: i / 32)
    found = envs.load("dataset", path=path, seed=0, solve_rate=(0.25, 0.5), solve_rates_path=file)
    kept = [i for i in range(plain.num_tasks) if 8 <= i <= 16]
    assert found.num_tasks == len(kept) == 9
    assert [found.make_task(i, "train").answer for i in range(len(kept))] == [
        plain.make_task(i, "train").answer for i in kept
    ]
    task = found.make_task(len(kept) + 1, "train")  # of the second epoch
    assert (task.answer, task.index) == (plain.make_task(kept[1], "train").answer, len(kept) + 1)
    assert found.make_task(3, "held_out") == plain.make_task(3, "held_out")
    # Another system prompt, and rows in another order: the same tasks.
    other = envs.load("dataset", path=path, seed=0, system_prompt="Hm.", solve_rate=[0.25, 0.5], solve_rates_path=file)
    assert {other.make_task(i, "train").answer for i in range(len(kept))} == {
        plain.make_task(i, "train").answer for i in kept
    }


def test_a_window_of_generated_tasks_keeps_measured_ones(tmp_path):
    plain = envs.load("reverse_text", seed=5, max_length=5)
    file = rates(tmp_path, plain, lambda i: float(i % 2), cut=10)
    found = envs.load("reverse_text", seed=5, max_length=5, solve_rate=(0.5, 1.0), solve_rates_path=file)
    assert [found.make_task(i, "train").answer for i in range(5)] == [
        plain.make_task(i, "train").answer for i in (1, 3, 5, 7, 9)
    ]
    with pytest.raises(ValueError, match="none of the 10 tasks"):
        envs.load("reverse_text", seed=6, max_length=5, solve_rate=(0.5, 1.0), solve_rates_path=file)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"solve_rate": (0.5, 0.1)}, "not a window"),
        ({"solve_rate": 0.5}, "not a window"),
        ({"solve_rate": (0.1, 0.5)}, "needs pass rates"),
        ({"solve_rate": (0.3, 0.4)}, "no task of"),
        ({"budget": "about", "budget_targets": (3,)}, "budget = 'about' is unknown"),
        ({"budget": "max", "budget_targets": (0,)}, "not positive whole numbers"),
        ({"budget": "max"}, "not positive whole numbers"),
        ({"budget_targets": (3,)}, "has no effect without"),
        ({"budget": "max", "budget_targets": (3,), "budget_alpha": -1.0}, "at least 0"),
        ({"ladder": {"max_length": (3,)}}, "the same number of values"),
        ({"ladder": {"max_length": (3, 4), "min_length": (1, 2, 3)}}, "the same number of values"),
        ({"ladder": 3}, "the same number of values"),
        ({"ladder": {"max_length": (3, 4)}, "max_length": 5}, "also in env.options.ladder"),
        ({"ladder": {"max_lenth": (3, 4)}}, "max_length"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, text):
    if options.get("solve_rate") == (0.3, 0.4):
        options = options | {
            "solve_rates_path": rates(tmp_path, envs.load("reverse_text", seed=0), lambda i: 1.0, cut=3)
        }
    with pytest.raises(ValueError, match=text):
        envs.load("reverse_text", seed=0, **options)


@pytest.mark.parametrize(
    ("kind", "reward", "target", "length", "expected"),
    [
        ("exact", 1.0, 100, 100, 1.0),
        ("exact", 1.0, 100, 150, 0.95),
        ("exact", 0.0, 100, 40, -0.06),
        ("max", 1.0, 100, 100, 0.5),
        ("max", 1.0, 100, 0, 0.6),
        ("max", 1.0, 1000, 100, 1.0),
        ("max", 1.0, 100, 900, 0.0),
        ("max", 0.5, 100, 300, 0.15),
        ("clip", 0.7, 100, 100, 0.7),
        ("clip", 0.7, 100, 101, 0.0),
    ],
)
def test_rewards_of_lengths(kind, reward, target, length, expected):
    assert budget.with_length(kind, reward, target, length, 0.001) == pytest.approx(expected)


def test_a_budget_is_in_the_prompt_and_in_the_reward(path):
    options = {"budget": "exact", "budget_targets": (2, 5), "budget_alpha": 0.1}
    plain, env = envs.load("dataset", path=path, seed=0), envs.load("dataset", path=path, seed=0, **options)
    n = plain.num_tasks
    assert env.num_tasks == 2 * n and env.score is None
    targets = collections.defaultdict(set)
    for index in range(2 * n):
        task = env.make_task(index, "train")
        goal = task.info["budget"][1]
        assert task.messages[-1]["content"].endswith(f"\nThink for {goal} tokens before giving a response.")
        targets[task.answer].add(goal)
    assert set(map(frozenset, targets.values())) == {frozenset({2, 5})}  # an epoch has each task with each target
    assert len({env.make_task(i, "held_out").info["budget"][1] for i in range(2)}) >= 1
    task = env.make_task(3, "train")
    goal = task.info["budget"][1]
    scores = played(env, task, task.answer)  # one word, which is a token of the scripted model
    assert scores == pytest.approx(
        {
            "reward": 1.0 - 0.1 * (goal - 1),
            "task_reward": 1.0,
            "length": 1.0,
            "length_target": goal,
            "length_error": (goal - 1) / goal,
            "length_penalty": 0.1 * (goal - 1),
        }
    )


def test_a_budget_counts_the_root_stream_of_episodes():
    env = envs.load("wordle", letters=3, words=5, guesses=3, budget="clip", budget_targets=(4,), seed=0)
    task = env.make_task(0, "train")
    assert played(env, task, "<guess>zzz</guess>")["length"] == 3
    scores = played(env, task, "<guess>zzz</guess> and more")  # 9 tokens
    assert scores["length"] == 9 and scores["reward"] == 0 and scores["length_penalty"] == scores["task_reward"]


def test_a_budget_does_not_count_other_conversations(path):
    async def play(task, model):
        for messages in ([{"role": "user", "content": "a judge"}], task.messages):
            text = (await model.chat(messages)).text
        return {"reward": float(len(text))}

    plain = dataclasses.replace(envs.load("dataset", path=path, seed=0), play=play, score=None)
    env = budget.budgeted(plain, "max", (4,))
    assert played(env, env.make_task(0, "train"), "1 2 3 4 5")["length"] == 5


def test_a_ladder_has_a_level_for_each_index():
    env = envs.load("reverse_text", seed=1, ladder={"min_length": (2, 5, 9), "max_length": (2, 5, 9)})
    for split in ("train", "held_out"):
        for index in range(9):
            task = env.make_task(index, split)
            assert len(task.answer) == (2, 5, 9)[index % 3] and task.index == index
            assert env.score and env.score(task, task.answer)["reward"] == 1
    assert (
        env.make_task(4, "train").answer
        == envs.load("reverse_text", seed=1, min_length=5, max_length=5).make_task(1, "train").answer
    )
    assert ladder.levels({"a": (1, 2)}, {}) == [{"a": 1}, {"a": 2}]


def test_a_ladder_of_episodes_with_a_budget():
    env = envs.load("wordle", words=5, guesses=3, ladder={"letters": (3, 4)}, budget="max", budget_targets=(4,), seed=0)
    scores = [played(env, env.make_task(index, "train"), "<guess>zzz</guess>") for index in (0, 1)]
    assert all(one["length"] == 3 and "length_target" in one for one in scores)


def test_a_window_over_a_ladder_scores_each_task_on_its_level(tmp_path):
    """The window changes the index of a task, by which its level was chosen."""
    steps = {"min_length": (3, 4), "max_length": (3, 5), "reward": ("exact", "lcs")}
    ladder_only = envs.load("reverse_text", seed=1, ladder=steps)
    file = rates(tmp_path, ladder_only, lambda i: float(i % 2), cut=8)
    env = envs.load("reverse_text", seed=1, ladder=steps, solve_rate=(0.5, 1.0), solve_rates_path=file)
    for index in range(env.num_tasks):  # all of level 1, whose scorer gives a part of the reward
        task = env.make_task(index, "train")
        assert env.score and 0 < env.score(task, task.answer[:-1])["reward"] < 1


def test_the_digest_covers_wrappers_and_pass_rates(tmp_path):
    plain = envs.load("reverse_text", seed=0)
    digest = lambda **options: envs.digest(*envs.locate("reverse_text", options))  # noqa: E731
    file = rates(tmp_path, plain, lambda i: 0.5, cut=4)
    window = {"solve_rate": (0.1, 0.9), "solve_rates_path": file}
    one = digest(**window)
    rates(tmp_path, plain, lambda i: 0.6, cut=4)
    found = {
        digest(),
        digest(budget="max", budget_targets=(3,)),
        digest(ladder={"max_length": (3, 4)}),
        one,
        digest(**window),
    }
    assert len(found) == 5
