"""Turns groups of rollouts into the trees that the learner packs: advantages, and the tokens that each component trains.

1. Rewards are shaped (`overlong_buffer`) and turned into advantages by the tables of rl/algorithms/advantages.py, in order.
2. A group whose advantages are all zero is left out of the policy loss and its token count, as in INTELLECT-2.
3. `teacher_coef` weighs the distillation of the samples (rl/algorithms/divergences.py); for it, those groups stay in the batch.
4. A group is one tree: its prompt once, its samples as branches; without `share_prompts`, each sample is a stream of its own.
   With router replay, the shared part ends before the prompt's last token, which each sample ran for itself, and samples
   whose prompts ran other experts are in separate trees.

Letters: P groups of a batch, G samples of a group, T tokens of one sample.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.algorithms import advantages
from rl.batch import packing
from rl.batch import router_replay as router_replay_lib


@dataclasses.dataclass(frozen=True)
class Credit:
    """A run's rules for turning rewards into advantages. The first three fields are names of tables in rl/algorithms/advantages.py."""

    advantage: str | Callable = "group_mean"  # or the user's own function of a group's rewards [G]
    normalize: str = "none"
    average: str = "tokens"
    overlong_buffer: int = 0  # tokens before `max_tokens` over which the reward falls by 1; 0: no penalty
    max_tokens: int = 0  # of a completion; needed with overlong_buffer
    teacher_coef: float = 0.0  # of the distillation on sampled tokens
    share_prompts: bool = True
    max_lag: int = 0  # versions may change within a rollout if it is above 0
    router_replay: router_replay_lib.RouterReplay | None = None  # None: trees carry no routed experts
    metrics: tuple[Callable, ...] = ()  # the user's own: (groups of rollouts) -> {name: number}

    def __post_init__(self):
        tables = advantages.ADVANTAGES, advantages.NORMALIZERS, advantages.AVERAGES
        for name, table in zip(("advantage", "normalize", "average"), tables, strict=True):
            if not callable(getattr(self, name)) and getattr(self, name) not in table:
                raise ValueError(f"rl.{name} = {getattr(self, name)!r} is unknown; choose one of {', '.join(table)}")
        if self.overlong_buffer and not 0 < self.overlong_buffer <= self.max_tokens:
            raise ValueError(
                f"rl.overlong_buffer = {self.overlong_buffer} is not in 1..{self.max_tokens}, the longest completion "
                f"(sampling.max_tokens); set it in that range, or to 0 for no penalty"
            )

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of optional arrays (of `packing.OPTIONAL`) that the trees returned by `assign` have."""
        return ("ref_kl_weight",) * bool(self.teacher_coef) + ("mixed",) * bool(self.max_lag)

    def assign(self, groups: Sequence[Sequence[rollout_lib.Rollout]]) -> tuple[list[packing.Tree], float]:
        """Assigns advantages to P groups of rollouts. Returns (token trees to train on, fraction of groups with only zero advantages)."""
        lengths = [np.array([int(r.sampled_mask.sum()) for r in group]) for group in groups]
        advantages_P = advantages.NORMALIZERS[self.normalize]([*map(self._advantages, groups, lengths)])
        is_flat = [_is_flat(advantage_G) for advantage_G in advantages_P]
        taught = [i for i, flat in enumerate(is_flat) if not flat]  # groups that train the policy
        factors = dict(zip(taught, advantages.AVERAGES[self.average]([lengths[i] for i in taught]), strict=True))
        trees = []
        for i, group in enumerate(groups):
            if i in factors:
                trees += self._trees(group, advantages_P[i] * factors[i], trains=True)
            elif self.teacher_coef:
                trees += self._trees(group, advantages_P[i], trains=False)
        return trees, float(np.mean(is_flat))

    def has_signal(self, group: Sequence[rollout_lib.Rollout]) -> bool:
        """Returns False if all advantages of a group are zero before the batch normalizes them."""
        return not _is_flat(self._advantages(group, np.array([int(r.sampled_mask.sum()) for r in group])))

    def _advantages(self, group: Sequence[rollout_lib.Rollout], length_G: np.ndarray) -> np.ndarray:
        reward_G = np.array([r.reward for r in group], np.float64)
        if self.overlong_buffer:
            limits = {"max_tokens": self.max_tokens, "buffer": self.overlong_buffer}
            reward_G = reward_G + advantages.overlong_penalty(length_G, **limits)
        if not callable(self.advantage):
            return advantages.ADVANTAGES[self.advantage](reward_G)
        found = np.asarray(self.advantage(reward_G), np.float64)
        if found.shape != reward_G.shape or not np.isfinite(found).all():
            problem = f"rl.advantage returned {found.tolist()!r:.80} for {len(reward_G)} rewards"
            raise ValueError(f"{problem}; return one finite number for each")
        return found

    def _trees(self, group: Sequence[rollout_lib.Rollout], advantage_G, *, trains: bool) -> list[packing.Tree]:
        start = group[0].prompt_length - bool(self.router_replay) if self.share_prompts else 0
        trees: dict = {}  # {key of the samples that share a prompt: (its experts, their branches)}
        for number, (rollout, advantage) in enumerate(zip(group, advantage_G, strict=True)):
            mask_T = rollout.sampled_mask[start:].astype(np.float32)
            prompt_PLX = own_TLX = None
            if self.router_replay:
                prompt_PLX, own_TLX = np.split(self.router_replay.rows(rollout), [start])
            branch = packing.Branch(
                rollout.tokens[start:],
                mask_T * np.float32(trains),
                rollout.logprobs[start:],
                mask_T * np.float32(advantage),
                rollout.temperature,
                ref_kl_weight=mask_T * np.float32(self.teacher_coef) if self.teacher_coef else None,
                mixed=mask_T * _is_mixed(rollout)[start:] if self.max_lag else None,
                routed_experts=own_TLX,
            )
            prompt_experts = b"" if prompt_PLX is None else prompt_PLX.tobytes()
            key = prompt_experts if self.share_prompts else number
            trees.setdefault(key, (prompt_PLX, []))[1].append(branch)
        return [packing.Tree(group[0].tokens[:start], tuple(own), prompt) for prompt, own in trees.values()]


def _is_mixed(rollout: rollout_lib.Rollout) -> np.ndarray:
    """Returns True for each token for which the sampler read a key of another version than the token's own."""
    own_T, is_sampled_T = rollout.versions, rollout.sampled_mask
    # A key is written when the next token is sampled, or by the prefill.
    keys_T = np.where(is_sampled_T[1:], own_T[1:], own_T[:-1])
    bounds = (np.minimum.accumulate(keys_T), np.maximum.accumulate(keys_T))
    return np.append(False, np.any([bound_T != own_T[1:] for bound_T in bounds], axis=0))


def _is_flat(advantage_G: np.ndarray) -> bool:
    return not np.any(np.abs(advantage_G) > 1e-9)
