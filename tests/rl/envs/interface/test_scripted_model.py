"""The scripted model: replies are functions of the call, budgets end an episode, and tools are called as their schemas demand."""

import asyncio
import doctest
import random

import pytest

from rl.envs.interface import environment, episode, scripted_model, tools

TASK = environment.Task("t", 0, "train", ({"role": "user", "content": "Add 2 and 3"},), answer="5")


def play(program, policy=scripted_model.random_words, seed=0, **options):
    model = scripted_model.ScriptedModel(policy, seed, **options)
    return asyncio.run(program(TASK, model)), model


def add(a: int, b: int = 0, *, how: str = "plain") -> int:
    """Adds."""
    return a + b


def chatter(turns):
    def score(task, messages, state):
        return {"reward": float(len(messages))}

    return episode.conversation(
        score=score,
        reply=lambda task, messages, state: [{"role": "user", "content": "more"}],
        tools=[tools.of(add)],
        max_turns=turns,
    )


def test_the_example_runs():
    assert doctest.testmod(scripted_model).failed == 0


def test_equal_seeds_give_equal_episodes_and_others_do_not():
    (first, a), (second, b), (_, c) = play(chatter(6)), play(chatter(6)), play(chatter(6), seed=1)
    assert first == second and a.calls == b.calls and a.calls != c.calls


def test_concurrent_calls_get_the_replies_of_their_prompts():
    async def program(task, model):
        prompts = [{"role": "user", "content": str(i)} for i in (3, 1, 3, 2)]
        replies = await asyncio.gather(*(model.chat([one]) for one in prompts))
        numbered = [await model.chat(prompts[:1], number=n) for n in range(8)]
        assert replies[0] == replies[2] == numbered[0]
        assert len({one.text for one in numbered}) > 2
        return {"reward": 0.0}

    for seed in range(3):
        play(program, pauses=random.Random(seed))


def test_tools_are_called_by_their_schemas_and_sometimes_wrongly():
    outputs = []
    for seed in range(40):
        _, model = play(chatter(4), seed=seed)
        outputs += [one["content"] for one in model.calls[-1][0] if one["role"] == "tool"]
    good = sum(text.lstrip("-").isdigit() for text in outputs)
    assert good > 0.7 * len(outputs) > 20 and any(text.startswith("error:") for text in outputs)


def test_random_values_fit_their_schemas():
    schema = {
        "type": "object",
        "required": ["a"],
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}},
            "b": {"enum": ["x", "y"]},
            "c": {"type": ["string", "null"]},
            "d": {"type": "object", "properties": {"e": {"type": "boolean"}}, "required": ["e"]},
        },
    }
    for seed in range(50):
        value = scripted_model.random_value(schema, random.Random(seed))
        assert all(type(one) is int for one in value["a"])
        assert value.get("b", "x") in ("x", "y") and type(value.get("c")) in (str, type(None))
        assert type(value.get("d", {"e": True})["e"]) is bool


def test_budgets_end_an_episode_and_cut_a_reply():
    (scores, model) = play(chatter(9), scripted_model.always("a b c"), max_calls=2)
    assert len(model.calls) == 2 and scores == {"reward": 5.0}
    (_, model) = play(chatter(9), scripted_model.always("a b c"), max_tokens=4)
    assert [reply["content"] for *_, reply in model.calls] == ["a b c", "a"]

    async def program(task, model):
        reply = await model.chat(task.messages, max_tokens=2)
        assert (reply.text, reply.finish_reason, reply.num_tokens) == ("a b", "length", 2)
        return {"reward": 0.0}

    play(program, scripted_model.always("a b c"))


def test_replies_in_order_call_tools_and_repeat_the_last():
    policy = scripted_model.in_order({"tool": "add", "arguments": {"a": 2, "b": 3}}, "5")
    _, model = play(chatter(3), policy)
    final = model.calls[-1][0]
    assert [one["role"] for one in final] == ["user", "assistant", "tool", "assistant", "user"]
    assert final[2]["content"] == "5" and model.calls[-1][2]["content"] == "5"


def test_messages_that_no_server_takes_are_an_error():
    async def program(task, model):
        await model.chat([{"role": "user", "content": {1, 2}}])
        return {"reward": 0.0}

    with pytest.raises(TypeError, match="set is not JSON serializable"):
        play(program)
