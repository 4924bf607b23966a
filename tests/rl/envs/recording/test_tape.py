"""A replay against the tape accepts every honest episode, and finds each change to one."""

import asyncio
import contextlib
import dataclasses
import random

import numpy as np
import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.interface import episode
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.envs.recording import tape as tape_lib
from tests.support import episodes

ORIGIN = rollouts_lib.Origin(rollout_lib.TaskRef("words", 4, 9, 0), step=2, temperature=1.0, env_digest="ab" * 32)
STOPS = episodes.TOKENIZER.stop_ids


def recorded(play, number=0, **limits):
    """Returns the rollouts of an episode, read again from a file."""
    session = episodes.session(episodes.Backend(), number=number, limits=limits)
    asyncio.run(play(session))
    found = rollouts_lib.of_episode(session, ORIGIN, {"reward": 1.0})
    assert [rollout_lib.validate(one) for one in found] == [None] * len(found)
    return parquet.from_bytes(parquet.to_bytes(found))


def replayed(play, rollouts, number=0, **limits):
    """Returns the first difference of a replay, or the text of the error that ended it."""
    limits = dataclasses.replace(episodes.LIMITS, **limits)
    try:
        tape = tape_lib.of_rollouts(rollouts, STOPS)
    except ValueError as error:
        return str(error)
    session = session_lib.Session(episodes.TOKENIZER, None, limits, seed=7, sample=number, tape=tape)
    try:
        asyncio.run(play(session))
    except session_lib.NotOnTape as error:
        return str(error)
    return tape_lib.difference(session, rollouts)


def test_every_honest_episode_is_equal_to_its_replay():
    num_branches = num_untrained = num_limited = 0
    for number in range(300):
        play = episodes.drawn(number)
        rollouts = recorded(play, number, max_episode_tokens=90, max_calls=7)
        assert replayed(play, rollouts, number, max_episode_tokens=90, max_calls=7) is None, number
        num_branches += len(rollouts) - 1
        num_untrained += sum(not one.trains for one in rollouts)
        num_limited += sum(one.call_limits is not None for one in rollouts)
    assert min(num_branches, num_untrained, num_limited) > 50


async def two_turns(model):
    """Asks twice, with a tool message between, and asks a judge."""
    messages = [{"role": "user", "content": "begin"}]
    messages.append((await model.chat(messages)).message)
    messages.append({"role": "tool", "content": "42", "tool_call_id": "a"})
    messages.append((await model.chat(messages)).message)
    await model.chat([{"role": "user", "content": "good?"}], trains=False, max_tokens=40)


def changed(rollout, at, value=None):
    tokens = rollout.tokens.copy()
    tokens[at] = (tokens[at] + 1) % 256 if value is None else value
    return dataclasses.replace(rollout, tokens=tokens)


def without_last_call(rollout):
    end = rollout.spans[0][1]
    arrays = {name: getattr(rollout, name)[:end] for name in ("tokens", "sampled_mask", "logprobs", "versions")}
    return dataclasses.replace(rollout, calls=rollout.calls[:1], **arrays)


def split(rollout):
    """Divides the first completion into two calls, each of which asked for as many tokens as it got."""
    (start, end), *later = rollout.spans
    calls = np.array([(start, end - 1), (end - 1, end), *later], "i4")
    return dataclasses.replace(rollout, calls=calls, call_limits=calls[:, 1] - calls[:, 0])


TAMPERED = {
    "a call split in two": (lambda a, b: [split(a), b], "does not make 1 of the 4 recorded calls"),
    "the first prompt": (lambda a, b: [changed(a, 8), b], "which was not recorded"),
    "a tool's output": (lambda a, b: [changed(a, a.spans[0][1] + 10), b], "which was not recorded"),
    "a judge's prompt": (lambda a, b: [a, changed(b, 8)], "which was not recorded"),
    "a dropped call of a judge": (lambda a, b: [dataclasses.replace(a, num_branches=1)], "which was not recorded"),
    "a turn cut early": (lambda a, b: [without_last_call(a), b], "which was not recorded"),
    "a further call": (lambda a, b: [a, b, changed(b, 8)], "does not make 1 of the 4 recorded calls"),
    "a repeated call": (lambda a, b: [a, b, b], "was recorded twice"),
    "branches in another order": (lambda a, b: [b, a], "branch 0 has other calls"),
    "a judge's call that trains": (lambda a, b: [a, dataclasses.replace(b, trains=True)], "branch 1 has other calls"),
    "another limit": (lambda a, b: [a, dataclasses.replace(b, call_limits=None)], "branch 1 has other calls"),
    "another number": (lambda a, b: [a, dataclasses.replace(b, draw=1)], "which was not recorded"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_each_change_is_found(name):
    number = next(
        number for number in range(99) if len((found := recorded(two_turns, number))[0].spans) == 2 and len(found) == 2
    )
    rollouts = recorded(two_turns, number)
    assert replayed(two_turns, rollouts, number) is None
    change, expected = TAMPERED[name]
    assert expected in replayed(two_turns, change(*rollouts), number)


async def three_turns(model):
    """Asks three times, with another tool message of equal length after each reply."""
    messages = [{"role": "user", "content": "begin"}]
    with contextlib.suppress(episode.BudgetSpent):
        for output in ("42", "43", "44"):
            messages.append((await model.chat(messages)).message)
            messages.append({"role": "tool", "content": output, "tool_call_id": "a"})


def test_two_exchanged_outputs_of_tools_are_found():
    found = (recorded(three_turns, number) for number in range(99))
    number, [one] = next((n, rollouts) for n, rollouts in enumerate(found) if len(rollouts[0].spans) == 3)
    text = one.tokens.astype("u4").tolist()
    at = [n for n in range(one.spans[0][1], len(text)) if text[n : n + 2] in ([*b"42"], [*b"43"])]
    assert len(at) == 2 and replayed(three_turns, [one], number) is None
    swapped = changed(changed(one, at[0] + 1, ord("3")), at[1] + 1, ord("2"))
    assert "which was not recorded" in replayed(three_turns, [swapped], number)


def test_calls_of_all_kinds_that_continue_others_are_replayed():
    async def play(model):
        first, user = [{"role": "user", "content": "begin"}], {"role": "user", "content": "on"}
        await asyncio.gather(model.chat(first), model.chat([user]))
        replies = [await model.chat(first, number=2)]
        messages = [*first, replies[0].message, user]
        replies.append(await model.chat(messages))
        replies.append(await model.chat([*messages, replies[1].message, user], trains=False))
        reasons.append([reply.finish_reason for reply in replies])

    reasons = []
    for number in range(30):
        rollouts = recorded(play, number)
        assert replayed(play, rollouts, number) is None
    assert reasons[::2] == reasons[1::2] and {reason for own in reasons for reason in own} == {"stop", "length"}


def test_a_call_left_out_in_favor_of_a_later_one_is_found():
    def asking(names):
        async def play(model):
            for name in names:
                with contextlib.suppress(episode.BudgetSpent):
                    await model.chat([{"role": "user", "content": name}])

        return play

    assert replayed(asking("abc"), recorded(asking("abc"), max_calls=2), max_calls=2) is None
    found = replayed(asking("abc"), recorded(asking("ac")), max_calls=2)
    assert "was not recorded, before the budget" in found


def tree(order, later):
    """Returns a program with concurrent calls, some after others, whose order is drawn from `order`."""

    async def play(model):
        rng = random.Random(order)

        async def one(name):
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            messages = [{"role": "user", "content": name}]
            try:
                messages += [(await model.chat(messages)).message, {"role": "user", "content": "go on"}]
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                await model.chat(messages)
            except episode.BudgetSpent:
                later.append(name)

        await asyncio.gather(*(one(f"part {number}") for number in range(5)))

    return play


@pytest.mark.parametrize("play", [three_turns, tree(3, [])], ids=["in turn", "at the same time"])
def test_calls_beyond_the_budget_and_calls_left_out_are_found(play):
    number = next(n for n in range(99) if all(len(one.spans) > 1 for one in recorded(play, n)))
    whole = recorded(play, number)
    sizes = [[end - start for start, end in one.spans] for one in whole]
    for limits in (
        {"max_calls": sum(map(len, sizes)) - 1},
        {"max_episode_tokens": sum(sum(own) - max(own) for own in sizes)},
    ):
        assert replayed(play, whole, number, **limits)
        honest = recorded(play, number, **limits)
        assert replayed(play, honest, number, **limits) is None
        assert "which was not recorded" in replayed(play, honest, number)


@pytest.mark.parametrize("tokens", [0, 100])
def test_concurrent_calls_may_begin_in_another_order(tokens):
    for number in range(60):
        spent = []
        rollouts = recorded(tree(number, []), max_episode_tokens=tokens)
        assert replayed(tree(number + 1, spent), rollouts, max_episode_tokens=tokens) is None
        assert tokens or (not spent and len(rollouts) == 5)


def test_a_stream_that_is_cut_in_two_is_found():
    whole = recorded(tree(3, []))
    one = whole[-1]
    parts = (
        without_last_call(one),
        dataclasses.replace(one, calls=one.calls[1:], sampled_mask=np.arange(len(one.tokens)) >= one.spans[1][0]),
    )
    cut = [*whole[:-1], *parts]
    assert "continues branch" in replayed(tree(3, []), cut)


def test_rollouts_hold_the_versions_proofs_and_limits_of_each_call():
    backend = episodes.Backend(texts=["ab"], version=4)
    session = episodes.session(backend)

    async def signed(call):
        made = await backend(call)
        server = {"server": f"{backend.version:064}", "server_signature": b"s" * 64}
        return dataclasses.replace(made, logprobs=[1e-7, *made.logprobs[1:]], **server)

    session._backend = signed

    async def play():
        messages = [{"role": "user", "content": "begin"}]
        messages.append((await session.chat(messages)).message)
        [first] = rollouts_lib.of_episode(session, ORIGIN, {"reward": 0.0})
        assert (first.server, first.server_signature) == (f"{4:064}", b"s" * 64)
        backend.version = 6
        await session.chat([*messages, {"role": "user", "content": "on"}], max_tokens=2)

    asyncio.run(play())
    [one] = rollouts_lib.of_episode(session, ORIGIN, {"reward": 0.5, "good": 1.0})
    (first, end), (second, last) = one.spans
    assert one.versions.tolist() == [4] * end + [6] * (last - end) and one.call_limits.tolist() == [48, 2]
    assert one.logprobs[one.sampled_mask].tolist() == [0, -0.5, -0.5, 0, -0.5] and one.finish_reason == "length"
    assert (one.server, one.server_signature) == ("", b"")  # two servers vouch for its calls
    assert (one.reward, one.rewards, one.seed, one.env_digest) == (0.5, {"reward": 0.5, "good": 1.0}, 7, "ab" * 32)
    assert tokenizer_lib.byte_chatml().decode(one.tokens[first : end - 1].tolist()) == "ab" and second > end + 1


def test_an_episode_without_calls_makes_no_rollouts():
    session = episodes.session(episodes.Backend())
    with pytest.raises(ValueError, match="no first call of the model"):
        rollouts_lib.of_episode(session, ORIGIN, {"reward": 0.0})
