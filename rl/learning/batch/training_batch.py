"""The batch of one train step: its token trees, its metrics, and its rollouts by group."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.learning.batch import credit as credit_lib
from rl.learning.batch import packing
from rl.protocol import user_code
from sharding.system import cli

MAX_PARTS = 16  # parts of a reward that have a metric, by environment
Scores = Mapping[int, Mapping[str, float] | None]  # by sample; None: there was no time


@dataclasses.dataclass(frozen=True)
class Batch:
    """One training batch: token trees for the learner to pack into rows, metrics of the batch, and its rollouts by group."""

    trees: list[packing.Tree]
    metrics: dict[str, float]
    groups: list[list[rollout_lib.Rollout]]
    num_micro_batches: int = 0  # of a batch that another process packed


def failed(rollouts: Sequence[rollout_lib.Rollout], scores: Scores) -> set[int]:
    """Returns the numbers of the rollouts for which the scorer raised an exception. Our own scores count, else the worker's claims."""
    own = {one.number: scores.get(one.number, scores.get(one.sample, one.rewards)) or {} for one in rollouts}
    return {number for number, found in own.items() if found.get("error", 0.0) > 0}


def rewarded(
    rollouts: Sequence[rollout_lib.Rollout], scores: Scores, left_out: Collection[int] = (), min_group: int = 0
) -> list[rollout_lib.Rollout]:
    """Returns a group's rollouts with the rewards that we recomputed. A sample for which our scorer had no time gets 0: its worker's claim could break ties.

    Leaves out the samples and continuations whose numbers are in `left_out`, and all branches of such a sample. Returns [] if fewer
    than `min_group` samples (rl.min_group) remain: the group then trains nothing.
    """
    kept = [one for one in rollouts if not {one.number, one.sample} & {*left_out}]
    if len({one.sample for one in kept}) < min_group:
        return []
    out = []
    for one in kept:
        number = one.number if one.number in scores else one.sample  # a continuation has scores of its own
        if number in scores:
            own = scores[number] or dict.fromkeys([*one.rewards, "reward"], 0.0)
            one = dataclasses.replace(one, reward=own["reward"], rewards={name: own[name] for name in one.rewards})
        out.append(one)
    return out


def assemble(
    step: int,
    groups: list[list[rollout_lib.Rollout]],
    credit: credit_lib.Credit,
    counts: dict[str, float],
    max_streams: int | None = None,
) -> Batch:
    """Returns batch `step` of these groups; `counts` are more metrics of it. Streams beyond `max_streams`, the last ones, are left out."""
    rollouts = [rollout for group in groups for rollout in group]
    trees, flat = credit.assign(groups)
    num_streams = sum(len(tree.branches) for tree in trees)
    if max_streams is not None and num_streams > max_streams:
        trees = _first(trees, max_streams)
        counts = counts | {"batch/num_streams_left_out": float(num_streams - max_streams)}
    lag = np.array([step - 1 - int(r.versions[r.sampled_mask].min()) for r in rollouts])
    metrics = _describe(groups) | _by_env(groups, credit) | {"rollout/zero_advantage_frac": flat}
    metrics |= {"sync/lag": float(lag.mean()), "sync/lag_max": float(lag.max())}
    metrics["batch/num_row_tokens"] = float(sum(tree.num_tokens for tree in trees))
    metrics["batch/sequence_length"] = float(np.mean([len(rollout.tokens) for rollout in rollouts]))
    return Batch(trees, metrics | _own(groups, credit.metrics) | counts, groups)


def _own(groups: list[list[rollout_lib.Rollout]], functions: Sequence[Callable]) -> dict[str, float]:
    """Returns the user's metrics, without those of a function that fails: the batch is in the ledger, and would come again after a resume."""
    found: dict[str, float] = {}
    for function in functions:
        try:
            found |= {f"own/{name}": float(value) for name, value in function(groups).items()}
        except Exception as error:  # foreign code may raise anything
            name = getattr(function, "__name__", "of rl.metrics")
            cli.note(
                f"warning: metrics function {name} failed: {user_code.describe(error)}; this step lacks its metrics"
            )
    return found


def _first(trees: list[packing.Tree], count: int) -> list[packing.Tree]:
    """Returns the first `count` branches of trees, as trees."""
    found = []
    for tree in trees:
        found.append(dataclasses.replace(tree, branches=tree.branches[:count]))
        count -= len(found[-1].branches)
        if not count:
            break
    return found


def _describe(groups: list[list[rollout_lib.Rollout]]) -> dict[str, float]:
    episodes = [episode for group in groups for episode in rollout_lib.episodes(group)]
    episodes = [[one for one in episode if one.trains] or episode for episode in episodes]
    lengths = np.array([sum(int(r.sampled_mask.sum()) for r in episode) for episode in episodes])
    rewards = np.array([episode[0].reward for episode in episodes])
    turns = [sum(len(rollout.spans) for rollout in episode) for episode in episodes]
    return {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/response_length": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_frac": float(np.mean([one[-1].finish_reason == "length" for one in episodes])),
        "rollout/score_error_frac": float(np.mean([one[0].rewards.get("error", 0.0) > 0 for one in episodes])),
        "rollout/num_tokens": float(lengths.sum()),
        **({"rollout/turns": float(np.mean(turns))} if max(turns) > 1 else {}),
    }


def _by_env(groups: list[list[rollout_lib.Rollout]], credit: credit_lib.Credit) -> dict[str, float]:
    """Returns the mean of each part of the reward as env/scores/PART. With several environments, returns metrics of each.

    Those have its name after env/: rewards, lengths, turns, and the fractions as for the whole batch, and the number of groups. The
    first MAX_PARTS parts are taken in the order of their names, without those of turns.
    """
    if not credit.envs:
        return {f"env/scores/{name}": value for name, value in _parts(groups).items()}
    found: dict[str, float] = {}
    for env in sorted({group[0].task.env for group in groups}):
        own = [group for group in groups if group[0].task.env == env]
        values = {name.removeprefix("rollout/"): value for name, value in _describe(own).items()}
        values |= {f"scores/{name}": value for name, value in _parts(own).items()}
        values["zero_advantage_frac"] = float(np.mean([not credit.has_signal(group) for group in own]))
        values["num_groups"] = float(len(own))
        found |= {f"env/{env}/{name}": value for name, value in values.items()}
    return found


def _parts(groups: list[list[rollout_lib.Rollout]]) -> dict[str, float]:
    """Returns the mean of each part of the reward over the episodes that have it."""
    rewards = [episode[0].rewards for group in groups for episode in rollout_lib.episodes(group)]
    names = sorted({name for one in rewards for name in one if name not in ("reward", "error")})
    names = [name for name in names if not re.fullmatch("turn_[0-9]+", name)][:MAX_PARTS]
    return {name: float(np.mean([one[name] for one in rewards if name in one])) for name in names}
