"""Rollouts written by hand for a leased group, without a model."""

import numpy as np

from inference.rollouts import rollout as rollout_lib
from tests.support import tiny


def rollout(group, sample, version=None, /, prompt=(5, 6), **changes):
    """An unsigned rollout of `reverse_text` that fits the lease: prompt, the group's number, two sampled tokens."""
    tokens = np.array([*prompt, group.group % 200, 20 + sample, 258], np.int32)
    P = len(prompt) + 1
    mask = np.arange(len(tokens)) >= P
    fields = dict(
        tokens=tokens,
        logprobs=np.where(mask, -0.25 * (1 + sample), 0).astype(np.float32),
        versions=np.full(len(tokens), group.min_version if version is None else version, np.int32),
        temperature=group.temperature,
        seed=(group.seed + sample) % 2**32,
        task=rollout_lib.TaskRef("reverse_text", group.index, group.group, 0),
        sample=sample,
        step=group.step,
        reward=float(sample),
        rewards={"reward": float(sample)},
        finish_reason="stop",
        epoch=max(group.epoch, 0),
    )
    return tiny.rollout(mask, **fields | changes)


def answers(group, version=None, /, **changes):
    """The rollouts of all samples of a group."""
    return [rollout(group, sample, version, **changes) for sample in range(group.num_samples)]
