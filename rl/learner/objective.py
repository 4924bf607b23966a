"""What a step optimises: the policy loss and its companions, over counts of the whole batch.

1. `Objective` says which components there are beside the loss (rl/algorithms/divergences.py has their formulas), how often a batch
   steps, and against which policy ratios are taken.
2. `count` counts what an optimizer step divides by, over all of its micro-batches: a sum over them is then exact.
3. `bind` checks a loss of `LOSSES` and its options; `value` adds the components up for one micro-batch, with their metrics.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import struct

from models import moe
from rl.algorithms import divergences, importance, losses
from rl.batch import packing, router_replay


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a step optimises beside the policy loss, how often it steps, and against which policy ratios are taken."""

    old_logprobs: str = "sampler"  # ratios against the sampler, or "learner": against the parameters before the batch
    optimizer_steps: int = 1  # per batch, each on its own part of the micro-batches
    entropy_coef: float = 0.0  # bonus on the mean entropy of trained tokens (INTELLECT-2: 0.001)
    kl_coef: float = 0.0  # penalty on the divergence from `kl_reference`
    kl_estimator: str = "k3"  # a name of divergences.ESTIMATORS; k1 only in the advantage
    kl_place: str = "loss"  # or "advantage": a reward of each token, without gradient
    kl_reference: str = "sampler"  # or "reference": the batch carries ref_logp
    policy_coef: float = 1.0  # of the policy loss; 0 beside a teacher is distillation alone
    teacher_coef: float = 0.0  # distil the reference on sampled tokens (a weight in the batch: rl/batch/credit.py)
    reference_model: str = ""  # what the reference is (rl/learner/reference.py)
    router_balance_coef: float = 0.0  # auxiliary loss on the load of experts (`moe.balance_loss`)
    router_balance_rate: float = 0.0  # step of the routers' correction by load (`moe.balanced_correction`)

    def __post_init__(self):
        for field, known in (
            ("old_logprobs", ("sampler", "learner")),
            ("kl_estimator", divergences.ESTIMATORS),
            ("kl_place", ("loss", "advantage")),
            ("kl_reference", ("sampler", "reference")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} = {getattr(self, field)!r} is unknown; choose one of {', '.join(known)}")
        for field in (
            "entropy_coef",
            "kl_coef",
            "policy_coef",
            "teacher_coef",
            "router_balance_coef",
            "router_balance_rate",
        ):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)} must be at least 0")
        if self.optimizer_steps < 1:
            raise ValueError(f"optimizer_steps = {self.optimizer_steps} must be at least 1")
        if self.kl_coef and self.kl_place == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator = 'k1' has no gradient in expectation when it is part of the loss; "
                "choose 'k2' or 'k3', or kl_place = 'advantage'"
            )
        if self.kl_coef and self.kl_place == "advantage" and self.kl_estimator != "k1":
            raise ValueError("kl_place = 'advantage' is the k1 penalty; set kl_estimator = 'k1'")

    @property
    def needs_reference(self) -> bool:
        """Whether batches must carry `ref_logp`."""
        return bool(self.teacher_coef) or (bool(self.kl_coef) and self.kl_reference == "reference")


@struct.dataclass
class Work:
    """A batch and the log-probabilities [M, B, T] that its ratios are taken against."""

    batch: packing.TrainBatch
    old_logp: jax.Array

    def rows(self, i) -> "Work":
        """Micro-batch i."""
        return jax.tree.map(lambda x: x[i], self.replace(batch=self.batch.replace(num_micro_batches=None)))


@struct.dataclass
class Counts:
    """Global denominators of an optimizer step, float32: each at least 1, but for `tokens`, the trained tokens themselves."""

    tokens: jax.Array
    positions: jax.Array  # that are no padding
    trains_any: jax.Array  # bool: whether any token has a part in any component
    denom: jax.Array
    streams: jax.Array
    ce: jax.Array
    ref_kl: jax.Array


def count(work: Work, first, stride) -> Counts:
    """Of the optimizer step on the micro-batches first, first + stride, ..."""
    batch = work.batch
    index_M = jnp.arange(batch.tokens.shape[0])
    mine_M = (index_M < batch.num_micro_batches) & (index_M % stride == first)
    mask = jnp.where(mine_M[:, None, None], batch.loss_mask, 0.0)
    tokens = jnp.sum(mask)

    def num_streams(mask_BT, segment_ids_BT, branch_ids_BT):
        return importance.num_streams(mask_BT, packing.stream_ids(segment_ids_BT, branch_ids_BT))

    streams = jnp.sum(jax.vmap(num_streams)(mask, batch.segment_ids, batch.branch_ids))

    def mine(x):
        return jnp.zeros(()) if x is None else jnp.where(mine_M[:, None, None], x, 0.0)

    weights = [mine(batch.ce_weight), mine(batch.ref_kl_weight)]

    return Counts(
        tokens,
        jnp.maximum(jnp.sum(jnp.where(mine_M[:, None, None], batch.segment_ids != 0, False)).astype(jnp.float32), 1.0),
        (tokens > 0) | functools.reduce(jnp.logical_or, [jnp.any(weight != 0) for weight in weights]),
        jnp.maximum(tokens, 1.0),
        jnp.maximum(streams, 1.0),
        *(divergences.count(weight) for weight in weights),
    )


def bind(loss: str | Callable, options: Mapping[str, float]) -> Callable:
    """The loss, a name of `LOSSES` or a function of that signature, with its options; ValueError names what is unknown or missing."""
    if isinstance(loss, str):
        if loss not in losses.LOSSES:
            raise ValueError(f"loss {loss!r} is unknown; choose one of {', '.join(losses.LOSSES)}")
        name, loss = loss, losses.LOSSES[loss]
    else:
        name = getattr(loss, "__name__", "given")
    known = {p.name: p for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY}
    wanted = {n: p for n, p in known.items() if n not in _HANDED}
    if unknown := sorted(set(options) - set(wanted)):
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; it takes {', '.join(wanted) or 'none'}")
    if missing := [n for n, p in wanted.items() if p.default is p.empty and n not in options]:
        raise ValueError(f"loss {name!r} needs the option {missing[0]!r}; set config.loss_options.{name}.{missing[0]}")
    handed = [n for n in known if n in _HANDED]

    def bound(logp_BT, work: Work, advantage_BT, counts: Counts):
        rows = work.batch
        extras = {n: _HANDED[n](work, counts) for n in handed}
        return loss(logp_BT, work.old_logp, advantage_BT, rows.loss_mask, **extras, **options)

    return bound


_HANDED = {  # what the learner hands to a loss that names it
    "denom": lambda work, counts: counts.denom,
    "stream_ids_BT": lambda work, counts: packing.stream_ids(work.batch.segment_ids, work.batch.branch_ids),
    "num_streams": lambda work, counts: counts.streams,
    "sampler_logp_BT": lambda work, counts: work.batch.behavior_logp,
}


def value(loss_fn, objective: Objective, work: Work, logp_BT, entropy_BT, routing, counts: Counts):
    """(objective, metrics) of one micro-batch; `loss_fn` is what `bind` returned, see rl/algorithms/divergences.py for the sum."""
    rows, mask_BT = work.batch, work.batch.loss_mask
    advantage_BT = rows.advantage
    if objective.kl_coef:
        reference_BT = rows.behavior_logp if objective.kl_reference == "sampler" else _need(rows, "ref_logp")
        if objective.kl_place == "advantage":
            advantage_BT = divergences.kl_in_advantage(advantage_BT, logp_BT, reference_BT, mask_BT, objective.kl_coef)
    policy, metrics = loss_fn(logp_BT, work, advantage_BT, counts)
    total = objective.policy_coef * policy
    entropy = importance.total(entropy_BT, mask_BT, counts.denom)
    metrics = metrics | {"loss/policy": policy, "loss/entropy": entropy}
    if objective.old_logprobs == "learner":  # the loss's own mismatch is that of this batch's optimizer steps alone
        log_ratio_BT = importance.log_ratio(work.old_logp, rows.behavior_logp, mask_BT)
        sampler_kl = importance.total(jnp.expm1(log_ratio_BT) - log_ratio_BT, mask_BT, counts.denom)
        metrics |= {"loss/sampler_kl": sampler_kl}
    if objective.entropy_coef:
        total -= objective.entropy_coef * entropy
    if objective.kl_coef:
        kl = divergences.kl_penalty(objective.kl_estimator, logp_BT, reference_BT, mask_BT, counts.denom)
        metrics |= {"loss/kl": kl}
        if objective.kl_place == "loss":
            total += objective.kl_coef * kl
    if rows.ce_weight is not None:
        ce = divergences.weighted_cross_entropy(logp_BT, rows.ce_weight, counts.ce)
        metrics |= {"loss/ce": ce}
        total += ce
    if rows.ref_kl_weight is not None:
        ref_kl = divergences.reference_distillation(
            logp_BT, rows.behavior_logp, _need(rows, "ref_logp"), rows.ref_kl_weight, counts.ref_kl
        )
        metrics |= {"loss/ref_kl": ref_kl}
        total += ref_kl
    if routing is not None:
        metrics |= {"moe/load": routing.load}
        if objective.router_balance_coef:  # not linear in the load: each micro-batch weighs by its part of the tokens
            balance = moe.balance_loss(routing) * jnp.sum(rows.segment_ids != 0) / counts.positions
            metrics |= {"loss/router_balance": balance}
            total += objective.router_balance_coef * balance
        if routing.margin is not None:
            replayed_BT = rows.routed_experts[..., 0, 0] != router_replay.unrouted(rows.routed_experts.dtype)
            counts_2 = jnp.stack([jnp.sum(routing.margin > 0), len(routing.margin) * jnp.sum(replayed_BT)])
            metrics |= {"moe/replayed": counts_2.astype(jnp.float32)}  # that would differ, of all
    return total, metrics | {"loss/total": total}


def _need(rows, stream):
    if (x_BT := getattr(rows, stream)) is None:
        raise ValueError(f"the objective needs the stream {stream!r}; name it in the layout's `streams` and fill it in")
    return x_BT
