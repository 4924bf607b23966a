"""Turns groups of rollouts into the trees that the learner packs: advantages, and the tokens that each component trains.

1. Rewards are shaped (`overlong_buffer`) and turned into advantages by the tables of rl/learning/algorithms/advantages.py, in order.
2. A group whose advantages are all zero is left out of the policy loss and its token count, as in INTELLECT-2. With the average "batch"
   its tokens count.
3. `teacher_coef` weighs the distillation of the samples (rl/learning/algorithms/divergences.py); for it, those groups stay in the batch.
4. `credit` "episode" gives all turns of an episode its advantage. "turn" compares, for each turn, the sum of the rewards from it on (the
   components "turn_1", "turn_2", ...) with those of the group's other episodes that have this turn. Rollouts that do not train, such as
   those of a judge, have no turns and are in no tree.
   "vine" gives the tokens of each step inside a sample the difference of the values of the states at its ends (rl/learning/algorithms/vine.py).
5. With several environments, `envs` has rules for each, and a batch is normalized over the groups of each one apart. `average` is over all
   groups, and `weight` a factor on the advantages of an environment.
6. A group is one tree: its prompt once, its rollouts as branches; without `share_prompts`, each rollout is a stream of its own.
   With router replay, the shared part ends before the prompt's last token, which each sample ran for itself, and samples
   whose prompts ran other experts are in separate trees. So are branches of episodes that begin with another prompt.

Letters: P groups of a batch, G episodes of a group, K turns of the longest, T tokens of one rollout.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from inference.rollouts import kept_sets
from inference.rollouts import rollout as rollout_lib
from rl.learning.algorithms import advantages, vine
from rl.learning.batch import packing
from rl.learning.batch import router_replay as router_replay_lib
from sharding.system import text as text_lib

CREDITS = ("episode", "turn", "vine")
_Episode = Sequence[rollout_lib.Rollout]  # its branches


@dataclasses.dataclass(frozen=True)
class Credit:
    """A run's rules for turning rewards into advantages. The first three fields are names of tables in rl/learning/algorithms/advantages.py.

    With `envs`, each environment has its own rules there. Only `average`, `metrics`, and the arrays in trees are those of this object
    for all environments.
    """

    advantage: str | Callable = "group_mean"  # or the user's own function of a group's rewards [G]
    normalize: str = "none"
    average: str = "tokens"
    credit: str = "episode"  # or "turn", "vine"
    branch_weight: float = 1.0  # of the tokens in an episode's branches after the first
    overlong_buffer: int = 0  # tokens before `max_tokens` over which the reward falls by 1; 0: no penalty
    max_tokens: int = 0  # of a completion; needed with overlong_buffer
    gate: float = 0.0  # a group has a signal if an advantage is farther than this from 0
    teacher_coef: float = 0.0  # of the distillation on sampled tokens
    share_prompts: bool = True
    max_lag: int = 0  # versions may change within a rollout if it is above 0
    router_replay: router_replay_lib.RouterReplay | None = None  # None: trees carry no routed experts
    kept: int = 0  # tokens of a kept set at most (inference/rollouts/kept_sets.py); 0: trees carry none
    metrics: tuple[Callable, ...] = ()  # the user's own: (groups of rollouts) -> {name: number}
    weight: float = 1.0  # of the tokens in the loss, as a factor on advantages
    envs: Mapping[str, "Credit"] = dataclasses.field(default_factory=dict)  # own rules by `task.env`; {}: these for all
    field: Callable[[str], str] = "rl.{}".format  # name of a rule -> the config field that sets it, for messages

    def __post_init__(self):
        tables = advantages.ADVANTAGES, advantages.NORMALIZERS, advantages.AVERAGES
        for name, table in zip(("advantage", "normalize", "average"), tables, strict=True):
            if not callable(getattr(self, name)) and getattr(self, name) not in table:
                found = f"{self.field(name)} = {getattr(self, name)!r} is unknown{text_lib.hint(getattr(self, name), table)}"
                raise ValueError(f"{found}; choose one of {', '.join(table)}")
        if self.credit not in CREDITS:
            raise ValueError(f"{self.field('credit')} = {self.credit!r} is unknown; choose one of {', '.join(CREDITS)}")
        if self.overlong_buffer and not 0 < self.overlong_buffer <= self.max_tokens:
            raise ValueError(
                f"{self.field('overlong_buffer')} = {self.overlong_buffer} is not in 1..{self.max_tokens}, the longest completion "
                f"(sampling.max_tokens); set it in that range, or to 0 for no penalty"
            )

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of optional arrays (of `packing.OPTIONAL`) that the trees returned by `assign` have."""
        return ("ref_kl_weight",) * bool(self.teacher_coef) + ("mixed",) * bool(self.max_lag)

    def assign(self, groups: Sequence[Sequence[rollout_lib.Rollout]]) -> tuple[list[packing.Tree], float]:
        """Assigns advantages to P groups of rollouts. Returns (token trees to train on, fraction of groups with only zero advantages)."""
        groups = [group for group in groups if _trained(group)]
        if not groups:
            return [], 1.0
        episodes, rules = [*map(rollout_lib.episodes, groups)], [*map(self._rules_of, groups)]
        lengths = [*map(_lengths, episodes)]
        advantages_P = self._normalized(groups, episodes, lengths)
        is_flat = [_is_flat(advantage_G) for advantage_G in advantages_P]
        taught = [i for i, flat in enumerate(is_flat) if not flat]  # groups that train the policy
        num_tokens = int(sum(map(np.sum, lengths)))
        weights = advantages.AVERAGES[self.average]([lengths[i] for i in taught], num_tokens)
        factors = dict(zip(taught, weights, strict=True))
        trees = []
        for i, (group, rule) in enumerate(zip(episodes, rules, strict=True)):
            if i in factors or self.teacher_coef:
                factor_G = factors.get(i, np.ones(len(group))) * rule.weight
                advantage_GK = rule._by_turn(group, advantages_P[i])
                trees += rule._trees(group, advantage_GK, factor_G, trains=i in factors)
        return trees, float(np.mean(is_flat))

    def by_token(
        self, groups: Sequence[Sequence[rollout_lib.Rollout]]
    ) -> Iterator[tuple[rollout_lib.Rollout, np.ndarray]]:
        """Yields each trained rollout of a batch's groups with the advantage of each of its tokens, float32 [T]. The factors of `average` are left out."""
        groups = [group for group in groups if _trained(group)]
        episodes = [*map(rollout_lib.episodes, groups)]
        found = self._normalized(groups, episodes, [*map(_lengths, episodes)])
        for group, own, advantage_U in zip(groups, episodes, found, strict=True):
            rule = self._rules_of(group)
            for episode, advantage_K in zip(own, rule._by_turn(own, advantage_U), strict=True):
                yield from rule._weighed(episode, advantage_K, 1.0)

    def _normalized(self, groups, episodes, lengths) -> list[np.ndarray]:
        """Returns the result of `_advantages` for each group, normalized over the groups of its environment."""
        advantages_P: list[np.ndarray] = [np.zeros(0)] * len(groups)
        names = [group[0].task.env if self.envs else "" for group in groups]
        for env in dict.fromkeys(names):
            members = [i for i, name in enumerate(names) if name == env]
            rule = self._rules_of(groups[members[0]])
            rule._check_turns([groups[i] for i in members])
            found = advantages.NORMALIZERS[rule.normalize]([rule._advantages(episodes[i], lengths[i]) for i in members])
            for i, advantage_U in zip(members, found, strict=True):
                advantages_P[i] = advantage_U
        return advantages_P

    def has_signal(self, group: Sequence[rollout_lib.Rollout]) -> bool:
        """Returns False if all advantages of a group are zero, or within `gate` of it, before the batch normalizes them."""
        if not _trained(group):
            return False
        episodes = rollout_lib.episodes(group)
        return not _is_flat(self._rules_of(group)._advantages(episodes, _lengths(episodes)), self.gate)

    def _rules_of(self, group: Sequence[rollout_lib.Rollout]) -> "Credit":
        """Returns the rules for the environment of a group."""
        return self.envs[group[0].task.env] if self.envs else self

    def _check_turns(self, groups: Sequence[Sequence[rollout_lib.Rollout]]) -> None:
        """Raises ValueError if no episode has rewards of turns, which the rules need, and none could not be scored."""
        rewards = [rollout.rewards for group in groups for rollout in group]
        if self.credit == "turn" and not any("turn_1" in one or one.get("error") for one in rewards):
            found = f"{self.field('credit')} = 'turn', and no episode of the batch has a reward component 'turn_1'"
            raise ValueError(f"{found}; return turn_1, turn_2, ... from the environment's score, or set 'episode'")

    def _turns(self, episodes: Sequence[_Episode]) -> list[list[int]]:
        """Returns for each turn the numbers of the episodes that have it; with the credit "episode" all count as one turn."""
        turns_G = [
            sum(len(rollout.spans) for rollout in _trained(one)) if self.credit == "turn" else 1 for one in episodes
        ]
        return [[g for g, turns in enumerate(turns_G) if turns > k] for k in range(max(turns_G))]

    def _by_turn(self, episodes: Sequence[_Episode], advantages_U: np.ndarray) -> np.ndarray:
        """Returns the result of `_advantages` as an array [G, K], 0 where an episode does not have a turn."""
        turns = self._turns(episodes)
        advantage_GK = np.zeros((len(episodes), len(turns)))
        advantage_GK[np.concatenate(turns), np.repeat(np.arange(len(turns)), [*map(len, turns)])] = advantages_U
        return advantage_GK

    def _advantages(self, episodes: Sequence[_Episode], length_G: np.ndarray) -> np.ndarray:
        """Returns the advantages of all turns of a group's episodes, those of the first turn first."""
        if self.credit == "turn":
            turns = self._turns(episodes)
            names = [f"turn_{k + 1}" for k in range(len(turns))]
            reward_GK = np.array([[one[0].rewards.get(name, 0.0) for name in names] for one in episodes])
            return_GK = np.cumsum(reward_GK[:, ::-1], axis=1)[:, ::-1]
            return np.concatenate([self._compared(return_GK[members, k]) for k, members in enumerate(turns)])
        reward_G = np.array([one[0].reward for one in episodes], np.float64)
        if self.overlong_buffer:
            limits = {"max_tokens": self.max_tokens, "buffer": self.overlong_buffer}
            reward_G = reward_G + advantages.overlong_penalty(length_G, **limits)
        return self._compared(reward_G)

    def _compared(self, reward_G: np.ndarray) -> np.ndarray:
        """Returns the advantages of rewards that are compared with each other."""
        if not callable(self.advantage):
            return advantages.ADVANTAGES[self.advantage](reward_G)
        found = np.asarray(self.advantage(reward_G), np.float64)
        if found.shape != reward_G.shape or not np.isfinite(found).all():
            problem = f"rl.advantage returned {found.tolist()!r:.80} for {len(reward_G)} rewards"
            raise ValueError(f"{problem}; return one finite number for each")
        return found

    def _trees(
        self, episodes: Sequence[_Episode], advantage_GK: np.ndarray, factor_G: np.ndarray, *, trains: bool
    ) -> list[packing.Tree]:
        first = next(rollout for one in episodes for rollout in _trained(one))
        first_prompt = first.tokens[: first.prompt_length - bool(self.router_replay)]
        trees: dict = {}  # {key of the rollouts that share a prompt: (it, its experts, their branches)}
        for rollout, own_advantage_T in itertools.chain(*map(self._weighed, episodes, advantage_GK, factor_G)):
            start = rollout.prompt_length - bool(self.router_replay) if self.share_prompts else 0
            if self.share_prompts and np.array_equal(rollout.tokens[: len(first_prompt)], first_prompt):
                start = min(start, len(first_prompt))
            mask_T, advantage_T = rollout.sampled_mask[start:].astype(np.float32), own_advantage_T[start:]
            prompt_PLX = own_TLX = None
            if self.router_replay:
                prompt_PLX, own_TLX = np.split(self.router_replay.rows(rollout), [start])
            branch = packing.Branch(
                rollout.tokens[start:],
                mask_T * np.float32(trains),
                rollout.logprobs[start:],
                mask_T * advantage_T,
                rollout.temperature,
                ref_kl_weight=mask_T * np.float32(self.teacher_coef * self.weight) if self.teacher_coef else None,
                mixed=mask_T * _is_mixed(rollout)[start:] if self.max_lag else None,
                kept=self._kept(rollout)[start:] if self.kept else None,
                routed_experts=own_TLX,
            )
            prompt, prompt_experts = rollout.tokens[:start], b"" if prompt_PLX is None else prompt_PLX.tobytes()
            key = (prompt.tobytes(), prompt_experts) if self.share_prompts else len(trees)
            trees.setdefault(key, (prompt, prompt_PLX, []))[2].append(branch)
        return [packing.Tree(prompt, tuple(own), experts) for prompt, experts, own in trees.values()]

    def _kept(self, rollout: rollout_lib.Rollout) -> np.ndarray:
        """Returns the kept set of each token of a rollout, int32 [T, W]; -1 where it was not sampled."""
        kept_TW = np.full((len(rollout.tokens), self.kept), -1, np.int32)
        lengths = [end - start for start, end in rollout.spans]
        kept_TW[rollout.sampled_mask] = kept_sets.decode(rollout.kept, lengths, self.kept)
        return kept_TW

    def _weighed(
        self, episode: _Episode, advantage_K: np.ndarray, factor: float
    ) -> Iterator[tuple[rollout_lib.Rollout, np.ndarray]]:
        """Yields the rollouts of an episode with the advantage of each token times `factor`, float32 [T]."""
        number = itertools.count()
        for rollout in _trained(episode):
            advantage_T = np.zeros(len(rollout.tokens), np.float32)
            for start, end in rollout.spans:
                advantage_T[start:end] = advantage_K[min(next(number), len(advantage_K) - 1)] * factor
            if self.credit == "vine":
                start, values = rollout.prompt_length, collections.defaultdict(list)
                for branch in episode[1:]:
                    values[branch.prompt_length - start].append(branch.reward)
                others, states = rollout.reward - float(advantage_K[0]), sorted(values)
                means = [float(np.mean(values[state])) for state in states]
                own = vine.advantages(rollout.reward, others, len(rollout.tokens) - start, states, means)
                advantage_T[start:] = own * factor
            yield rollout, advantage_T * np.float32(self.branch_weight) if rollout.branch else advantage_T


def _lengths(episodes: Sequence[_Episode]) -> np.ndarray:
    return np.array([sum(int(rollout.sampled_mask.sum()) for rollout in _trained(one)) for one in episodes])


def _trained(episode: _Episode) -> list[rollout_lib.Rollout]:
    return [rollout for rollout in episode if rollout.trains]


def _is_mixed(rollout: rollout_lib.Rollout) -> np.ndarray:
    """Returns True for each token for which the sampler read a key of another version than the token's own."""
    is_mixed_T = np.zeros(len(rollout.tokens), bool)
    # of most rollouts, and 70 us less for each
    if rollout.prefix_versions is None and (rollout.versions == rollout.versions[0]).all():
        return is_mixed_T
    for call, (start, end) in enumerate(rollout.spans):
        if rollout.prefix_runs(call):  # the keys of an older version
            is_mixed_T[start:end] = True
            continue
        # A later call prefills all tokens before it with one version. Each sampled token writes the key of the token before it.
        is_first = start == rollout.prompt_length
        own_N = np.delete(rollout.versions[:end], start - 1) if is_first else rollout.versions[start - 1 : end]
        bounds = (np.minimum.accumulate(own_N), np.maximum.accumulate(own_N))
        is_mixed_T[start:end] = np.any([bound_N != own_N for bound_N in bounds], axis=0)[start - end :]
    return is_mixed_T


def _is_flat(advantage_G: np.ndarray, gate: float = 0.0) -> bool:
    return not np.any(np.abs(advantage_G) > max(gate, 1e-9))
