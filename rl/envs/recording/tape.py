"""The tape of an episode: the completions that a worker recorded, by the content of their prompts; and its comparison with a replay.

A validator runs the program of the environment with a session that answers from the tape. The program must make the recorded calls
and no others, and the streams must come out as they were submitted: then prompts, tool results, and limits are the environment's.
"""

from collections.abc import Collection, Sequence

import numpy as np

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from rl.envs.recording import session as session_lib

Tape = dict[session_lib.Key, completion_lib.Completion]


def of_rollouts(rollouts: Sequence[rollout_lib.Rollout], stop_ids: Collection[int]) -> Tape:
    """Returns the tape of an episode's rollouts. Raises ValueError if one call occurs twice."""
    tape: Tape = {}
    for rollout in rollouts:
        for index, (start, end) in enumerate(rollout.spans):
            key = session_lib.Call(rollout.tokens[:start].tolist(), 0, 0, 0 if index else rollout.draw).key
            if key in tape:
                raise ValueError(
                    f"the call with the prompt of {start} tokens in branch {rollout.branch} was recorded twice"
                )
            tape[key] = session_lib.of_tokens(rollout.tokens[start:end].tolist(), stop_ids)
    return tape


def difference(session: session_lib.Session, rollouts: Sequence[rollout_lib.Rollout]) -> str | None:
    """Returns the first difference between the rollouts of an episode, in order, and its replay in a session that ended; None if they are equal."""
    if unused := session.unused():
        return f"the environment does not make {len(unused)} of the {len(unused) + session.num_calls} recorded calls"
    limit = session.limits.max_tokens
    claimed, found = [_calls(rollout, limit) for rollout in rollouts], [_made(stream) for stream in session.streams]
    if not session.overlapped:
        if session.was_cut:
            return "the environment makes a call that was not recorded, before the budget of the episode is spent"
        wrong = next((at for at, (one, other) in enumerate(zip(claimed, found, strict=False)) if one != other), None)
        if wrong is not None:
            return f"branch {wrong} has other calls or call limits than the environment makes"
        return (
            None if len(claimed) == len(found) else f"{len(claimed)} branches, but the environment makes {len(found)}"
        )
    # Concurrent calls may begin in another order than here. When the last one began, at most one call of each stream had not ended.
    sizes = [[turn.end - turn.start for turn in stream.turns] for stream in session.streams]
    if 0 < session.limits.max_episode_tokens <= (ended := sum(sum(own) - max(own) for own in sizes)):
        return f"a call began after {ended} tokens, but the episode may have {session.limits.max_episode_tokens}"
    if sorted(sum(claimed, [])) != sorted(sum(found, [])):
        return "its calls, or their limits, are not those of the environment"
    for one in rollouts:
        for other in rollouts:
            prompt = one.tokens[: one.prompt_length]
            if one.branch and not one.draw and one.trains == other.trains and _extends(prompt, other.tokens):
                return f"branch {one.branch} continues branch {other.branch}, and is not recorded as a part of it"
    return None


def _extends(prompt: np.ndarray, tokens: np.ndarray) -> bool:
    return len(prompt) > len(tokens) and np.array_equal(prompt[: len(tokens)], tokens)


def _calls(rollout: rollout_lib.Rollout, limit: int) -> list[tuple]:
    """Returns the calls of a rollout, as `_listed` does."""
    limits = [limit] * len(rollout.spans) if rollout.call_limits is None else rollout.call_limits.tolist()
    calls = [(start, end, most) for (start, end), most in zip(rollout.spans, limits, strict=True)]
    return _listed(rollout.tokens, calls, rollout.draw, rollout.trains)


def _made(stream: session_lib.Stream) -> list[tuple]:
    """Returns the calls of a stream, as `_listed` does."""
    calls = [(turn.start, turn.end, turn.max_tokens) for turn in stream.turns]
    return _listed(stream.tokens, calls, stream.number, stream.trains)


def _listed(tokens: np.ndarray, calls: Sequence[tuple[int, int, int]], number: int, trains: bool) -> list[tuple]:
    """Returns (prompt and completion, their lengths, limit, number, trains) of each of `calls`, (start, end, limit), of one token stream."""
    return [
        (tokens[:end].tobytes(), start, end, most, 0 if index else number, trains)
        for index, (start, end, most) in enumerate(calls)
    ]
