"""The objective of an optimizer step: the policy loss and its companions, over counts of the whole batch.

1. `Objective` holds the coefficients of the companions (formulas in rl/learning/algorithms/divergences.py), how often a batch
   steps, and the policy that importance ratios compare with.
2. `bind` checks a policy loss and its options, before anything is compiled.
3. `count` counts the denominators of an optimizer step over all of its micro-batches: a sum over them is then exact.
4. `Objective.total` adds the companions to the policy loss of one micro-batch, with their metrics.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import struct

from models import moe
from rl.learning.algorithms import advantages, divergences, importance, losses
from rl.learning.batch import packing, router_replay


class MicroBatches(struct.PyTreeNode):
    """A batch of M micro-batches with `old_logp`, the log-probabilities [M, B, T] in the denominator of its importance ratios.

    Where `is_own` [M] is True, `old_logp` is not computed yet: the forward pass of the optimizer step provides it (`scored`).
    """

    batch: packing.TrainBatch
    old_logp: jax.Array
    is_own: jax.Array | None = None

    def __getitem__(self, i) -> "MicroBatches":
        """Returns micro-batch `i` of the batch, with arrays [B, T]."""
        return jax.tree.map(lambda x: x[i], self.replace(batch=self.batch.replace(num_micro_batches=None)))

    def scored(self, logp_BT: jax.Array) -> "MicroBatches":
        """Returns this micro-batch with `logp_BT`, without gradient, as its `old_logp` if `is_own` is True, else unchanged."""
        if self.is_own is None:
            return self
        return self.replace(old_logp=jnp.where(self.is_own, jax.lax.stop_gradient(logp_BT), self.old_logp))


class Counts(struct.PyTreeNode):
    """Counts over one optimizer step's whole batch, by which sums of the loss are divided; float32."""

    tokens: jax.Array  # that train
    positions: jax.Array  # that are not padding
    trained: jax.Array  # tokens with a weight in any component
    denom: jax.Array
    streams: jax.Array
    ce: jax.Array
    ref_kl: jax.Array


@dataclasses.dataclass(frozen=True)
class Objective:
    """Settings of the training objective: its terms in addition to the policy loss (KL, entropy, ...), and the optimizer steps."""

    old_logprobs: str = "sampler"  # ratios against the sampler, or "learner": against the parameters before the batch
    optimizer_steps: int = 1  # per batch, each on its own share of the micro-batches
    entropy_coef: float = 0.0  # bonus on the mean entropy of trained tokens (INTELLECT-2: 0.001)
    kl_coef: float = 0.0  # penalty on the divergence from `kl_reference`, averaged as the policy loss's paper does
    kl_estimator: str = "k3"  # a name of divergences.ESTIMATORS; k1 only in the advantage
    kl_place: str = "loss"  # or "advantage": a reward of each token, without gradient
    kl_reference: str = "sampler"  # or "reference": the batch carries ref_logp
    policy_coef: float = 1.0  # of the policy loss; 0 with a teacher is distillation alone
    teacher_coef: float = 0.0  # distill the reference on sampled tokens (a weight in the batch: credit.py)
    reference_model: str = ""  # the reference policy (rl/learning/learner/reference.py)
    router_balance_coef: float = 0.0  # auxiliary loss on the load of experts (`moe.balance_loss`)
    router_balance_rate: float = 0.0  # step size of the routers' correction by load (`moe.balanced_correction`)

    def __post_init__(self):
        for field, known in (
            ("old_logprobs", ("sampler", "learner")),
            ("kl_estimator", divergences.ESTIMATORS),
            ("kl_place", ("loss", "advantage")),
            ("kl_reference", ("sampler", "reference")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} = {getattr(self, field)!r} is unknown; choose one of {', '.join(known)}")
        for field in dataclasses.fields(self):
            if field.type is float and getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} = {getattr(self, field.name)} is negative; set it to at least 0")
        if self.optimizer_steps < 1:
            raise ValueError(f"optimizer_steps = {self.optimizer_steps} is below 1; set it to at least 1")
        if self.kl_coef and self.kl_place == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator = 'k1' has no gradient in expectation as a term of the loss; "
                "choose 'k2', 'k3' or 'weighted_k3', or kl_place = 'advantage'"
            )
        if self.kl_coef and self.kl_place == "advantage" and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_estimator = {self.kl_estimator!r}, but kl_place = 'advantage' is the k1 penalty; set kl_estimator = 'k1'"
            )

    @property
    def needs_reference(self) -> bool:
        """True if batches must have `ref_logp`, the log-probabilities under the reference policy."""
        return bool(self.teacher_coef) or (bool(self.kl_coef) and self.kl_reference == "reference")

    def advantage(self, batch: packing.TrainBatch, logp_BT: jax.Array) -> jax.Array:
        """Returns the advantage of each token, less the KL penalty if `kl_place` is "advantage"."""
        if not self.kl_coef or self.kl_place != "advantage":
            return batch.advantage
        reference_BT = self._reference_logp(batch)
        return divergences.kl_in_advantage(batch.advantage, logp_BT, reference_BT, batch.loss_mask, self.kl_coef)

    def total(
        self,
        policy: jax.Array,
        micro_batch: MicroBatches,
        logp_BT: jax.Array,
        entropy_BT: jax.Array,
        routing: moe.Routing | None,
        counts: Counts,
        stream_means: bool = False,
    ) -> tuple[jax.Array, dict]:
        """Adds the other terms to `policy`, the policy loss of a micro-batch. Returns (objective to minimize, metrics).

        With `stream_means`, the KL penalty is averaged inside each stream, then over streams; otherwise over trained tokens.
        """
        batch, mask_BT = micro_batch.batch, micro_batch.batch.loss_mask
        total = self.policy_coef * policy
        entropy = importance.total(entropy_BT, mask_BT, counts.denom)
        metrics = {"loss/policy": policy, "loss/entropy": entropy}
        is_apart = self.old_logprobs == "learner"  # then the loss's own mismatch is that of the optimizer steps alone
        if is_apart or batch.mixed is not None:
            learner_logp_BT = micro_batch.old_logp if is_apart else jax.lax.stop_gradient(logp_BT)
            log_ratio_BT = importance.log_ratio(learner_logp_BT, batch.behavior_logp, mask_BT)
            kl_BT = jnp.expm1(log_ratio_BT) - log_ratio_BT
            metrics |= {"loss/sampler_kl": importance.total(kl_BT, mask_BT, counts.denom)} if is_apart else {}
            if batch.mixed is not None:
                metrics["loss/mismatch_kl_mixed"] = importance.total(kl_BT * batch.mixed, mask_BT, counts.denom)
                metrics["loss/mixed_frac"] = importance.total(batch.mixed, mask_BT, counts.denom)
        if self.entropy_coef:
            total -= self.entropy_coef * entropy
        if self.kl_coef:
            reference_BT = self._reference_logp(batch)
            weights = mask_BT, counts.denom
            if stream_means:
                stream_ids_BT = packing.stream_ids(batch.segment_ids, batch.branch_ids)
                weights = mask_BT / importance.stream_length(mask_BT, stream_ids_BT), counts.streams
            logps = logp_BT, reference_BT, batch.behavior_logp
            kl = divergences.kl_penalty(self.kl_estimator, *logps, *weights)
            metrics["loss/kl"] = kl
            if self.kl_place == "loss":
                total += self.kl_coef * kl
        if batch.ce_weight is not None:
            metrics["loss/ce"] = divergences.weighted_cross_entropy(logp_BT, batch.ce_weight, counts.ce)
            total += metrics["loss/ce"]
        if batch.ref_kl_weight is not None:
            logps = logp_BT, batch.behavior_logp, _ref_logp(batch)
            metrics["loss/ref_kl"] = divergences.reference_distillation(*logps, batch.ref_kl_weight, counts.ref_kl)
            total += metrics["loss/ref_kl"]
        if routing is not None:
            metrics["moe/load"] = routing.load
            if self.router_balance_coef:  # not linear in the load: each micro-batch is weighted by its share of tokens
                balance = moe.balance_loss(routing) * jnp.sum(batch.segment_ids != 0) / counts.positions
                metrics["loss/router_balance"] = balance
                total += self.router_balance_coef * balance
            if routing.margin is not None:
                assert batch.routed_experts is not None
                replayed_BT = batch.routed_experts[..., 0, 0] != router_replay.unrouted(batch.routed_experts.dtype)
                differing_and_all = jnp.stack([jnp.sum(routing.margin > 0), len(routing.margin) * jnp.sum(replayed_BT)])
                metrics["moe/replayed"] = differing_and_all.astype(jnp.float32)
        return total, metrics | {"loss/total": total}

    def _reference_logp(self, batch):
        return batch.behavior_logp if self.kl_reference == "sampler" else _ref_logp(batch)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A policy loss function with its options fixed, as `bind` returns it; hashable."""

    function: Callable  # with the signature of rl/learning/algorithms/losses.py
    options: tuple[tuple[str, float], ...]
    extras: tuple[str, ...]  # names of `_EXTRAS` that the function takes
    stream_means: bool = False  # True: the KL penalty is averaged inside streams, as the loss

    def arguments(self, batch: packing.TrainBatch, counts: Counts) -> dict:
        """Returns the loss function's keyword arguments for one micro-batch: its options, and the counts and arrays that it names."""
        return {name: _EXTRAS[name](batch, counts) for name in self.extras} | dict(self.options)


_EXTRAS = {  # keyword arguments that the learner passes to a loss that names them
    "denom": lambda batch, counts: counts.denom,
    "stream_ids_BT": lambda batch, counts: packing.stream_ids(batch.segment_ids, batch.branch_ids),
    "num_streams": lambda batch, counts: counts.streams,
    "sampler_logp_BT": lambda batch, counts: batch.behavior_logp,
}


def bind(loss: str | Callable, options: Mapping[str, float]) -> PolicyLoss:
    """Returns a policy loss with its options fixed. `loss` is a name in `losses.LOSSES` or a function with the same signature.

    Raises ValueError if the name or an option is unknown, or an option without a default is missing.
    """
    if isinstance(loss, str) and loss not in losses.LOSSES:
        raise ValueError(f"loss {loss!r} is unknown; choose one of {', '.join(losses.LOSSES)}")
    function: Callable = losses.LOSSES[loss] if isinstance(loss, str) else loss
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "given")
    # A decorated loss may take keywords of its own and pass others on to the function that it wraps: both are known.
    signatures = (inspect.signature(function, follow_wrapped=follow) for follow in (True, False))
    known = {p.name: p for s in signatures for p in s.parameters.values() if p.kind is p.KEYWORD_ONLY}
    own = {n: p for n, p in known.items() if n not in _EXTRAS}
    if unknown := sorted(set(options) - set(own)):
        raise ValueError(f"loss {name!r} has no option {unknown[0]!r}; choose from {', '.join(own) or '(it has none)'}")
    if missing := [n for n, p in own.items() if p.default is p.empty and n not in options]:
        raise ValueError(f"loss {name!r} needs the option {missing[0]!r}; set config.loss_options.{name}.{missing[0]}")
    extras = tuple(n for n in known if n in _EXTRAS)
    stream_means = isinstance(loss, str) and advantages.OWN_AVERAGES.get(loss) == "streams"
    return PolicyLoss(function, tuple(sorted(options.items())), extras, stream_means)


def check_own(function: Callable, options: Mapping[str, float]) -> None:
    """Raises ValueError unless a user's loss function takes the arguments of a loss, and returns (loss, metrics).

    Traces the function on two rows of eight tokens; an error inside it is raised as it is.
    """
    loss, name = bind(function, options), function.__name__
    float_BT, count = jax.ShapeDtypeStruct((2, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    arrays = {"stream_ids_BT": jax.ShapeDtypeStruct((2, 8), jnp.int32), "sampler_logp_BT": float_BT}
    extras = {extra: arrays.get(extra, count) for extra in loss.extras}
    rule = "(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom, OPTIONS) -> (loss, metrics)"
    remedy = f"write it as {name}{rule}; rl/learning/algorithms/losses.py explains the arguments"
    try:
        inspect.signature(function, follow_wrapped=False).bind(*[None] * 4, **extras, **options)
    except TypeError as error:
        found = f"your loss function {name} cannot be called with the four arrays of a loss: {error}"
        raise ValueError(f"{found}; {remedy}") from None
    result = jax.eval_shape(functools.partial(function, **options), *[float_BT] * 4, **extras)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    if not (is_pair and all(x.shape == () for x in jax.tree.leaves(result)) and all("/" in key for key in result[1])):
        shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", result)
        found = f"your loss function {name} returns {shown}, not a scalar and a dict of scalars such as 'loss/NAME'"
        raise ValueError(f"{found}; {remedy}")


def count(micro_batches: MicroBatches, first, stride) -> Counts:
    """Counts tokens and streams of one optimizer step, which takes the micro-batches first, first + stride, ..."""
    batch = micro_batches.batch
    index_M = jnp.arange(batch.tokens.shape[0])
    mine_M = (index_M < batch.num_micro_batches) & (index_M % stride == first)

    def mine(x):
        return jnp.where(mine_M[:, None, None], x, 0)

    mask = mine(batch.loss_mask)
    tokens = jnp.sum(mask)
    stream_ids = jax.vmap(packing.stream_ids)(batch.segment_ids, batch.branch_ids)
    streams = jnp.sum(jax.vmap(importance.num_streams)(mask, stream_ids))
    ce, ref_kl = (mine(jnp.zeros(()) if x is None else x) for x in (batch.ce_weight, batch.ref_kl_weight))
    return Counts(
        tokens,
        jnp.maximum(jnp.sum(mine(batch.segment_ids) != 0, dtype=jnp.float32), 1.0),
        jnp.sum((mask != 0) | (ce != 0) | (ref_kl != 0), dtype=jnp.float32),
        jnp.maximum(tokens, 1.0),
        jnp.maximum(streams, 1.0),
        divergences.count(ce),
        divergences.count(ref_kl),
    )


def _ref_logp(batch: packing.TrainBatch) -> jax.Array:
    if batch.ref_logp is None:
        found = "the batch has no stream 'ref_logp', which the objective needs"
        raise ValueError(f"{found}; name it in the layout's `streams` and fill it in")
    return batch.ref_logp
