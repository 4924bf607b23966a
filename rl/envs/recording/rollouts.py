"""Turns the streams of a finished episode into rollouts: one for each stream, in the order in which they began."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from rl.envs.recording import session as session_lib


@dataclasses.dataclass(frozen=True)
class Origin:
    """The fields that all rollouts of an episode share."""

    task: rollout_lib.TaskRef
    step: int
    temperature: float
    env_digest: str = ""


def of_episode(session: session_lib.Session, origin: Origin, scores: Mapping[str, float]) -> list[rollout_lib.Rollout]:
    """Returns the unsigned rollouts of an episode with these scores. Raises ValueError if it has no call, or its first one failed."""
    streams = session.streams
    if not streams or streams[0].seed != session.root_seed:
        raise ValueError("the episode has no first call of the model, so that nothing can be trained on")
    return [_rollout(session, origin, scores, branch) for branch in range(len(streams))]


def _rollout(
    session: session_lib.Session, origin: Origin, scores: Mapping[str, float], branch: int
) -> rollout_lib.Rollout:
    stream = session.streams[branch]
    calls = [(turn.start, turn.end, turn.sample) for turn in stream.turns]
    limits = np.array([turn.max_tokens for turn in stream.turns], np.int32)
    return rollout_lib.Rollout(
        **completion_lib.of_calls(stream.tokens, calls),
        temperature=origin.temperature,
        seed=stream.seed,
        task=origin.task,
        sample=session.sample,
        step=origin.step,
        reward=scores["reward"],
        rewards=dict(scores),
        worker="",
        signature=b"",
        env_digest=origin.env_digest,
        branch=branch,
        num_branches=len(session.streams),
        calls=np.array([(start, end) for start, end, _ in calls], np.int32),
        call_limits=limits if (limits != session.limits.max_tokens).any() else None,
        draw=stream.number,
        trains=stream.trains,
    )
