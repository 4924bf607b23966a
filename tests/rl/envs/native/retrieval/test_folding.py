"""Branches see one page, the main conversation none, and the sum is right only if all pages are read."""

import asyncio

from rl import envs
from rl.envs.interface import scripted_model


def run(env, task, policy):
    model = scripted_model.ScriptedModel(policy)
    return asyncio.run(env.play(task, model)), model.calls


def reader(letter, max_return=100):
    """Returns a policy that reads one page after the other, and adds."""

    def policy(messages, tools, rng):
        last, said = messages[-1]["content"], [m["content"] for m in messages if m["role"] == "assistant"]
        if said and said[-1].startswith("branch") and not last.startswith("returned"):
            return {"content": f"return {sum(int(word[1:]) for word in last.split() if word[0] == letter)}"}
        returned = [int(m["content"].split()[1]) for m in messages[1:] if m["content"].startswith("returned")]
        return {"content": f"branch {len(returned) + 1}" if len(returned) < 3 else f"answer {sum(returned)}"}

    return policy


def test_history_is_folded():
    env = envs.load("folding", pages=3, entries=40, system_prompt="")
    for index in range(5):
        task = env.make_task(index, "train")
        letter = task.messages[-1]["content"].split("sum ")[1][0]
        expected = [sum(int(e[1:]) for e in page.split() if e[0] == letter) for page in task.info["pages"]]
        assert expected == task.info["sums"] and task.answer == f"answer {sum(expected)}"
        scores, calls = run(env, task, reader(letter))
        assert scores == {"reward": 1.0, "branches": 3.0, "right_returns": 1.0}
        for number, (messages, *_) in enumerate(calls):
            pages = [m["content"] for m in messages if m["content"] in task.info["pages"]]
            assert len(pages) == number % 2  # main, branch, main, branch, ...
        main = [messages for messages, *_ in calls[::2]]
        for one, other in zip(main, main[1:], strict=False):
            assert other[: len(one)] == one and len(other) == len(one) + 2
        for before, branch in zip(main, [messages for messages, *_ in calls[1::2]], strict=False):
            assert branch[: len(before)] == before


def test_malformed_commands_are_answered_and_long_returns_are_cut():
    env = envs.load("folding", pages=2, entries=3, turns=8)
    task = env.make_task(0, "train")
    said = iter(["branch 3", "page 1", "branch 1", "hm", "return " + "9" * 1000, "branch 1", "return", "answer x"])
    scores, calls = run(env, task, lambda *_: {"content": next(said)})
    shown = [messages[-1]["content"] for messages, *_ in calls[1:]]
    assert shown[0] == shown[1] == "error: write branch 1 to 2, or answer"
    assert shown[3] == "error: write return and a result" and shown[4] == "returned " + "9" * 200
    assert shown[6] == "returned " and scores == {"reward": 0.0, "branches": 2.0, "right_returns": 0.0}


def test_an_answer_in_a_branch_is_not_one():
    env = envs.load("folding", pages=1, entries=3, turns=2)
    task = env.make_task(0, "train")
    said = iter(["branch 1", task.answer])
    assert run(env, task, lambda *_: {"content": next(said)})[0]["reward"] == 0.0
