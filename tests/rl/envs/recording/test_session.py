"""A session keeps sampled tokens as they are: streams, seeds, budgets, and recorded calls, on conversations drawn at random."""

import asyncio
import dataclasses

import numpy as np
import pytest

from inference.rollouts import rollout as rollout_lib
from rl.envs.interface import episode
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.learning.batch import credit
from rl.protocol import noise_seed
from tests.support import episodes

USER = {"role": "user", "content": "go"}


def trained(group):
    """Yields (all tokens before, tokens) of each run of tokens that the trees of a group train."""
    trees, _ = credit.Credit(advantage="group_mean").assign([group])
    assert sum(tree.num_tokens for tree in trees) < sum(len(one.tokens) for one in group if one.trains)
    for tree in trees:
        for branch in tree.branches:
            tokens = [*tree.prompt.tolist(), *branch.tokens.tolist()]
            mask = np.concatenate([np.zeros(len(tree.prompt)), branch.loss_mask, [0]])
            bounds = np.flatnonzero(np.diff(mask, prepend=0))
            yield from ((tokens[:start], tokens[start:end]) for start, end in bounds.reshape(-1, 2))


@pytest.mark.parametrize("thinking", ["keep", "strip"])
def test_trained_tokens_are_the_sampled_ones_each_once(thinking):
    num_extended = num_branches = 0
    group, asked = [], []
    for number in range(500):
        backend, (task, sample) = episodes.Backend(), divmod(number, 4)
        session = episodes.session(backend, number=sample, limits={"max_model_len": 1200}, thinking=thinking)
        asyncio.run(episodes.drawn(task)(session))
        found = [
            (stream.tokens[: turn.start].tolist(), stream.tokens[turn.start : turn.end].tolist())
            for stream in session.streams
            for turn in stream.turns
        ]
        assert sorted(found) == sorted((call.prompt, tokens) for call, tokens in backend.calls)
        assert len(found) == session.num_calls
        for at, stream in enumerate(session.streams):
            first = stream.tokens[: stream.turns[0].start]
            assert stream.seed == noise_seed.stream_seed(7, sample, at, first, stream.number)
            used = [
                call.seed
                for call, _ in backend.calls
                for turn in stream.turns
                if call.prompt == stream.tokens[: turn.start].tolist()
                and call.number == (stream.number if turn is stream.turns[0] else 0)
            ]
            assert {*used} == {stream.seed}
        num_extended += sum(len(stream.turns) - 1 for stream in session.streams)
        num_branches += len(session.streams) - 1
        origin = rollouts_lib.Origin(rollout_lib.TaskRef("drawn", task, task, 0), 1, 1.0)
        group += rollouts_lib.of_episode(session, origin, {"reward": float(sample)})
        asked += [
            (stream.tokens[: turn.start].tolist(), turn.sample.tokens)
            for stream in session.streams
            for turn in stream.turns
            if stream.trains
        ]
        if sample == 3:  # a group, as the learner packs it
            assert sorted(trained(group)) == sorted(asked)
            group, asked = [], []
    assert num_extended > 200 and num_branches > 200


def test_a_reply_without_its_reasoning_is_continued_or_stripped():
    for thinking, num_streams in (("keep", 1), ("strip", 2)):
        backend = episodes.Backend(texts=["<think>so</think>yes"])
        session = episodes.session(backend, thinking=thinking)

        async def play(session=session):
            reply = await session.chat([USER])
            assert reply.message["reasoning_content"] == "so" and reply.text == "yes"
            await session.chat([USER, reply.message | {"tool_calls": [], "name": None}, USER])

        asyncio.run(play())
        assert len(session.streams) == num_streams
        text = episodes.TOKENIZER.decode(session.streams[-1].tokens.tolist(), skip_special=False)
        assert text.count("<think>so</think>") == (2 if thinking == "keep" else 1)


def test_a_known_prompt_gets_the_recorded_reply_and_a_number_another():
    backend = episodes.Backend()
    session = episodes.session(backend)

    async def play():
        same = await asyncio.gather(*(session.chat([USER]) for _ in range(3)))
        others = [await session.chat([USER], number=number) for number in (1, 2)]
        return same, others, await session.chat([USER], number=2)

    same, others, again = asyncio.run(play())
    assert same[0].message == same[1].message == same[2].message and again.message == others[1].message
    assert len(backend.calls) == session.num_calls == len(session.streams) == 3
    assert len({stream.seed for stream in session.streams}) == 3 and session.streams[0].seed == 7
    assert not session.overlapped


def test_a_numbered_call_one_of_another_role_and_one_at_the_same_time_begin_streams():
    backend = episodes.Backend()
    session = episodes.session(backend)

    async def play():
        more = [USER, (await session.chat([USER])).message, USER]
        numbered = await session.chat(more, number=1)
        await session.chat([*more, numbered.message, USER])  # extends two streams: the longer one has it
        await session.chat(more, trains=False, max_tokens=10**6)
        tails = ({"role": "user", "content": name} for name in "ab")
        await asyncio.gather(*(session.chat([*more[:2], tail]) for tail in tails))

    asyncio.run(play())
    kinds = [(stream.number, stream.trains, len(stream.turns)) for stream in session.streams]
    assert kinds == [(0, True, 2), (1, True, 2), (0, False, 1), (0, True, 1)]
    assert {call.max_tokens for call, _ in backend.calls} == {episodes.LIMITS.max_tokens}


def test_budgets_depend_on_tokens_alone():
    async def count(**limits):
        backend = episodes.Backend(texts=["12345"])
        session = episodes.session(backend, limits=limits)
        messages, calls = [USER], 0
        with pytest.raises(episode.BudgetSpent):
            while True:
                messages += [(await session.chat(messages)).message, USER]
                calls += 1
        assert calls == session.num_calls == len(backend.calls)
        return calls

    assert asyncio.run(count(max_calls=3)) == 3
    assert asyncio.run(count(max_episode_tokens=13)) == 3  # 6 tokens each: the third begins after 12
    # A turn takes 6 sampled tokens and those of the template; the prompt must leave one free.
    assert asyncio.run(count(max_model_len=40)) == 1
    assert asyncio.run(count(max_model_len=21)) == 0 and asyncio.run(count(max_model_len=22)) == 1


def test_a_call_that_failed_can_be_repeated():
    backend, answers = episodes.Backend(), []

    async def flaky(call):
        answers.append(call)
        if len(answers) == 1:
            raise ConnectionError("gone")
        return await episodes.Backend.__call__(backend, call)

    session = episodes.session(backend)
    session._backend = flaky

    async def play():
        with pytest.raises(ConnectionError):
            await session.chat([USER])
        assert session.num_calls == 0 and not session.streams
        await session.chat([USER])

    asyncio.run(play())
    assert answers[0] == answers[1] and session.streams[0].seed == 7


def test_a_later_call_asks_for_versions_no_older_than_those_before():
    backend = episodes.Backend(version=5)
    session = episodes.session(backend)

    async def updated(call):
        made = await backend(call)
        return dataclasses.replace(made, versions=[*made.versions[:-1], 6])

    session._backend = updated

    async def play():
        reply = await session.chat([USER])
        await session.chat([USER, reply.message, USER])

    asyncio.run(play())
    (first, _), (second, _) = backend.calls
    assert (first.oldest_version, first.epoch) == (0, -1) and (second.oldest_version, second.epoch) == (6, 0)
    assert np.array_equal(second.prompt[: len(first.prompt)], first.prompt)


def test_an_unknown_rule_for_reasoning_is_refused():
    with pytest.raises(ValueError, match="env.thinking = 'drop' is unknown; choose one of keep, strip"):
        episodes.session(episodes.Backend(), thinking="drop")


def test_a_conversation_that_is_much_too_long_spends_the_budget():
    async def play():
        session = episodes.session(episodes.Backend())
        long = [{"role": "user", "content": "é" * 2 * session_lib.THREAD_CHARS}]
        found = await asyncio.gather(session.chat(long), session.chat([USER]), return_exceptions=True)
        assert isinstance(found[0], episode.BudgetSpent) and found[1].num_prompt_tokens == 21
        assert session.num_calls == 1 and not session.overlapped

    asyncio.run(play())
