"""The user answers questions, and a model that plays the user is verified but not trained."""

import asyncio

import pytest

from rl import envs
from rl.envs.interface import episode, scripted_model


def play(env, task, *replies):
    model = scripted_model.ScriptedModel(scripted_model.in_order(*replies))
    scores = asyncio.run(env.play(task, model))
    return scores, [messages[-1]["content"] for messages, *_ in model.calls][1:]


def test_a_scripted_user():
    env = envs.load("user_sim", properties=3, turns=5)
    task = env.make_task(0, "train")
    wishes = task.info["wishes"]
    scores, shown = play(
        env, task, "Which SIZE?", "sizes and times", "time, place", "order", f"order {wishes['size']} x y"
    )
    assert shown == [wishes["size"], "?", f"{wishes['time']} {wishes['place']}", "?"]
    assert scores == {"reward": 0.0, "right": pytest.approx(1 / 3), "turns": 5.0}
    assert play(env, task, f"{task.answer} more")[0]["reward"] == 0.0
    assert play(env, task, *["?"] * 5, task.answer)[0] == {"reward": 0.0, "right": 0.0, "turns": 5.0}


def test_the_models_user_sees_the_wishes_and_is_not_trained():
    env = envs.load("user_sim", properties=2, user="model")
    task = env.make_task(1, "train")
    asked = []

    class Model:
        async def chat(self, messages, *, trains=True, **_):
            asked.append((trains, [dict(m) for m in messages]))
            if not trains:
                return episode.Reply({"role": "assistant", "content": f"reply {len(asked)}"}, "stop", 1, 1)
            content = f"question {len(asked)}" if len(asked) < 4 else task.answer
            return episode.Reply({"role": "assistant", "content": content}, "stop", 1, 1)

    assert asyncio.run(env.play(task, Model()))["reward"] == 1.0
    assert [trains for trains, _ in asked] == [True, False, True, False, True]
    for trains, messages in asked:
        has_wishes = all(value in str(messages) for value in task.info["wishes"].values())
        assert has_wishes != trains
    assert [m["content"] for m in asked[3][1]][1:] == ["question 1", "reply 2", "question 3"]
    assert [m["content"] for m in asked[4][1]][-4:] == ["question 1", "reply 2", "question 3", "reply 4"]
