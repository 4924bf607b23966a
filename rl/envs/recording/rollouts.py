"""Turns the streams of a finished episode into rollouts: one for each stream, in the order in which they began."""

import dataclasses
from collections.abc import Mapping

import numpy as np

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
    T, samples = len(stream.tokens), [turn.sample for turn in stream.turns]
    mask_T, logprobs_T, versions_T = np.zeros(T, bool), np.zeros(T, np.float32), np.zeros(T, np.int32)
    before = 0
    for turn in stream.turns:
        mask_T[turn.start : turn.end] = True
        logprobs_T[turn.start : turn.end] = np.minimum(turn.sample.logprobs, 0)
        versions_T[before : turn.start] = turn.sample.prompt_version
        versions_T[turn.start : turn.end] = turn.sample.versions
        before = turn.end
    runs = enumerate(sample.prefix_versions for sample in samples)
    reused = [(call, end, version) for call, own in runs for end, version in own]
    limits = np.array([turn.max_tokens for turn in stream.turns], np.int32)
    server, signature = _server(stream)
    return rollout_lib.Rollout(
        tokens=stream.tokens,
        sampled_mask=mask_T,
        logprobs=logprobs_T,
        versions=versions_T,
        temperature=origin.temperature,
        seed=stream.seed,
        task=origin.task,
        sample=session.sample,
        step=origin.step,
        reward=scores["reward"],
        rewards=dict(scores),
        finish_reason=samples[-1].finish_reason,
        proofs=b"".join(sample.proofs for sample in samples),
        worker="",
        signature=b"",
        routed_experts=_experts(stream),
        epoch=samples[0].epoch,
        server=server,
        server_signature=signature,
        env_digest=origin.env_digest,
        branch=branch,
        num_branches=len(session.streams),
        calls=np.array([(turn.start, turn.end) for turn in stream.turns], np.int32),
        call_limits=limits if (limits != session.limits.max_tokens).any() else None,
        draw=stream.number,
        trains=stream.trains,
        kept=b"".join(sample.kept for sample in samples),
        prefix_versions=np.array(reused, np.int32) if reused else None,
    )


def _experts(stream: session_lib.Stream) -> np.ndarray | None:
    """Returns the experts of all tokens but the last, those of each token from the first call that ran it; None if calls name none."""
    parts, size = [], 0
    for turn in stream.turns:
        if turn.sample.experts is None:
            return None
        parts.append(turn.sample.experts[size : turn.end - 1])
        size = turn.end - 1
    return np.concatenate(parts)


def _server(stream: session_lib.Stream) -> tuple[str, bytes]:
    """Returns (the server that vouches for all calls of a stream, its signatures), or ("", b"")."""
    samples = [turn.sample for turn in stream.turns]
    experts = _experts(stream)
    is_one = len({sample.server for sample in samples}) == 1
    # A server signs the experts of the whole prompt; near ties in routing may fall to others in a later call.
    own = [(turn.sample.experts, turn.end) for turn in stream.turns]
    is_same = experts is None or all(one is not None and np.array_equal(one, experts[: end - 1]) for one, end in own)
    if not (is_one and is_same):
        return "", b""
    return samples[0].server, b"".join(sample.server_signature for sample in samples)
