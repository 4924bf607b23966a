"""What a lease alone decides about the rollouts that answer it: the cheapest checks, made of every submission.

Whoever leased the group was told its task, seeds, temperature and oldest version (rl/protocol/task_schedule.py), so that all of these are facts.
What packing or the model could not take is refused here, too: it would end the run.
"""

from collections.abc import Sequence

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.batch import router_replay
from rl.protocol import task_schedule


def refusal(
    config,
    group: task_schedule.Group,
    rollouts: Sequence[rollout_lib.Rollout],
    *,
    newest: int,
    claims: router_replay.RouterReplay | None,
) -> str | None:
    """The reason to refuse these answers to `group`, or None.

    Args:
      config: the resolved config. newest: policy version that is published. claims: what the learner asks of claimed experts.
    """
    if sorted(r.sample for r in rollouts) != list(range(group.num_samples)):
        return f"samples: expected 0..{group.num_samples - 1} once each, got {sorted(r.sample for r in rollouts)}"
    prompt = rollouts[0].tokens[: rollouts[0].prompt_length]
    for r in rollouts:
        sampled = r.versions[r.sampled_mask]
        if (r.task.env, r.task.index) != (config.env.name, group.index):
            return f"task: expected {config.env.name} {group.index}, got {r.task.env} {r.task.index}"
        if r.seed != (group.seed + r.sample) % 2**32:
            return f"seed: expected {(group.seed + r.sample) % 2**32} for sample {r.sample}, got {r.seed}"
        if abs(r.temperature - group.temperature) > 1e-6:
            return f"temperature: expected {group.temperature}, got {r.temperature}"
        if int(r.sampled_mask.sum()) > config.sampling.max_tokens:
            return f"length: {int(r.sampled_mask.sum())} sampled tokens, at most {config.sampling.max_tokens} were asked for"
        if len(r.tokens) > config.inference.max_model_len:  # packing would refuse it, and the run would end
            return f"length: {len(r.tokens)} tokens, more than the model's {config.inference.max_model_len}"
        if int(r.tokens.max()) >= config.model.vocab_size:
            return f"tokens: id {int(r.tokens.max())} is outside the vocabulary of {config.model.vocab_size}"
        if not np.array_equal(r.tokens[: r.prompt_length], prompt):
            return "prompt: the samples of one group have different prompts"
        if (oldest := int(r.versions.min())) < group.min_version:  # of the prompt's keys, too
            return f"versions: {oldest} is older than {group.min_version}, the oldest this batch may use"
        if group.split == "train" and claims and (reason := claims.misfit(r)):  # as with the length
            return f"routing: {reason}"
        if np.any(np.diff(r.versions) < 0):
            return "versions: they fall along the sequence"
        if sampled.max() > newest:
            return f"versions: {int(sampled.max())} is not published yet, the newest is {newest}"
    return None
