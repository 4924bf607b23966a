"""The learner: `train_step(state, batch) -> (state, metrics)`, pure, jitted once, its input donated.

1. With `old_logprobs = "learner"`, all tokens are scored with the parameters as they are now (INTELLECT-2's estimator):
   ratios then measure what this batch's own optimizer steps changed. By default they are taken against the sampler.
2. `apply` runs the packed rows, `token_logprobs` scores their tokens at the temperature they were sampled at. Where the batch
   says which experts ran, these run again (rl/router_replay.py), here and in 1.
3. `LOSSES[name]` turns log-probabilities, advantages and masks into a scalar over the global token count; the other
   components of the objective (rl/divergences.py) are added, each over its own count.
4. Gradients are summed over micro-batches; since the denominators are global, the sum is exactly the gradient of the whole
   batch. The number of micro-batches is data, not shape: one compilation serves batches of any size.
5. optax clips, scales and applies the gradient. A gradient that is not finite is not applied: the state stays as it was, and
   the metrics say so.

The learner is algorithm-blind: rewards, groups and staleness were dealt with before a batch reaches it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import struct

from models import config as config_lib
from models import logprobs, moe, transformer
from rl import diagnostics, divergences, lora, losses, optimizers, packing, ratios, router_replay
from sharding import rules

HOST = "pinned_host"  # the memory kind of what `optimizers.offloaded` keeps off the device
OptimizerConfig = optimizers.OptimizerConfig  # what a run is described by (rl/experiment.py)


@struct.dataclass
class TrainState:
    """Everything a step changes: int32 step (batches consumed), parameters, optimizer state; and what it does not, `frozen`.

    With adapters (rl/lora.py) `params` are the adapters and `frozen` the model's own parameters; else `frozen` is empty.
    """

    step: jax.Array
    params: transformer.Params
    opt_state: optax.OptState
    frozen: transformer.Params = dataclasses.field(default_factory=dict)


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
    teacher_coef: float = 0.0  # distil the reference on sampled tokens (a weight in the batch: rl/credit.py)
    reference_model: str = ""  # what the reference is (rl/reference.py)
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


def make_optimizer(
    config: OptimizerConfig, model: config_lib.ModelConfig, adapters: lora.LoraConfig | None = None
) -> optax.GradientTransformation:
    """The optimizer of what trains: the model's parameters, or its adapters."""
    return optimizers.make(config, trained_specs(model, adapters))


def trained_specs(model: config_lib.ModelConfig, adapters: lora.LoraConfig | None = None) -> transformer.Params:
    """The tree of `ParamSpec` of what trains."""
    return lora.specs(transformer.specs(model), adapters) if adapters else transformer.specs(model)


def abstract_state(
    model: config_lib.ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    adapters: lora.LoraConfig | None = None,
) -> TrainState:
    """The train state as `ShapeDtypeStruct` with shardings; moments are split exactly as their parameters."""
    specs = trained_specs(model, adapters)
    params = rules.abstract(specs, mesh)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    layouts = dict(jax.tree_util.tree_leaves_with_path(rules.shardings(specs, mesh)))

    def layout(path, leaf, space):
        """A moment lies at the path of its parameter, below whatever optax wraps around it."""
        tails = (layouts.get(path[i:]) for i in range(len(path)))
        sharding = next((s for s in tails if s is not None), replicated) if leaf.ndim else replicated
        if space == jax.memory.Space.Host:
            sharding = sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    init, opt_state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)  # eval_shape forgets the memory space
    spaces = jax.tree.unflatten(jax.tree.structure(opt_state), [aval.memory_space for aval in init.out_avals])
    return TrainState(
        jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
        params,
        jax.tree_util.tree_map_with_path(layout, opt_state, spaces),
        transformer.abstract(model, mesh) if adapters else {},
    )


def init_state(
    key: jax.Array,
    model: config_lib.ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    params: transformer.Params | None = None,
    adapters: lora.LoraConfig | None = None,
) -> TrainState:
    """A fresh train state, born in its sharding; from given parameters of the model, or drawn from `key`."""
    layout = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer, mesh, adapters))

    @functools.partial(jax.jit, out_shardings=layout)
    def create(key, params):
        params = transformer.init(key, model) if params is None else params
        if not adapters:
            return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        trained = lora.init(jax.random.fold_in(key, 1), trained_specs(model, adapters))
        return TrainState(jnp.zeros((), jnp.int32), trained, optimizer.init(trained), frozen=params)

    with jax.set_mesh(mesh):
        return create(key, params)


def make_policy(
    model: config_lib.ModelConfig, mesh: jax.sharding.Mesh, adapters: lora.LoraConfig | None = None
) -> Callable[[TrainState], transformer.Params]:
    """Returns `policy(state) -> params`: the whole model as the step computes with it, to be published, saved, exported."""
    if not adapters:
        return lambda state: state.params
    merge = jax.jit(
        lambda state: lora.merge(state.frozen, state.params, transformer.specs(model), adapters),
        out_shardings=rules.shardings(transformer.specs(model), mesh),
    )

    def policy(state):
        with jax.set_mesh(mesh):
            return merge(state)

    return policy


def make_score(
    model: config_lib.ModelConfig, mesh: jax.sharding.Mesh, share_prompts: bool = True
) -> Callable[[transformer.Params, packing.TrainBatch], jax.Array]:
    """Returns `score(params, batch) -> logp [M, B, T]`, without gradient: for a reference policy's `ref_logp`.

    Its own routers choose, whatever the batch says of experts: it is another policy, maybe of another architecture.
    """

    @jax.jit
    def jitted(params, batch):
        return _score(model, params, batch.replace(routed_experts=None), share_prompts=share_prompts)

    def score(params, batch):
        with jax.set_mesh(mesh):
            return jitted(params, batch)

    score.jitted = jitted
    return score


def make_train_step(
    model: config_lib.ModelConfig,
    optimizer: optax.GradientTransformation,
    loss: str | Callable,
    loss_options: Mapping[str, float],
    mesh: jax.sharding.Mesh,
    objective: Objective = Objective(),
    adapters: lora.LoraConfig | None = None,
    share_prompts: bool = True,
) -> Callable[[TrainState, packing.TrainBatch], tuple[TrainState, dict]]:
    """Returns the jitted step. `state` is donated: use the one that comes back. `step.compile(packing.abstract(...))` compiles it
    for batches of that shape from any thread, while others work; the first call is then as quick as the next.

    `loss` is a name of `LOSSES` or a function of the same signature. Without `share_prompts`, no tree of a batch may have
    a prompt of its own or a second branch; kernels that know nothing of branches can then run. Metrics are float32 scalars on the device, equal on all
    hosts: loss/total, loss/entropy, loss/num_tokens, loss/grad_norm, grad_norm/<module>, loss/skipped (optimizer steps whose
    gradient was not finite), those of the components in use, and the loss's own; with `old_logprobs = "learner"` also
    loss/sampler_kl, k3 against the sampler; of mixtures, moe/* (`moe.load_metrics`), and of those that replay their routers
    moe/routing_mismatch, the part of tokens and layers in which the learner's own router would have chosen otherwise.
    """
    loss_fn = _bind(loss, loss_options)
    if objective.router_balance_rate and (adapters or not model.router_correction):
        raise ValueError(
            f"objective.router_balance_rate = {objective.router_balance_rate} moves the routers' corrections, which "
            f"{'adapters leave as they are' if adapters else 'this model has not (model.router_correction)'}; set it to 0"
        )

    def whole(params, frozen):
        return lora.merge(frozen, params, transformer.specs(model), adapters) if adapters else params

    def forward(params, work: _Work, frozen, counts):
        logp_BT, entropy_BT, routing = _forward(
            model,
            whole(params, frozen),
            work,
            share_prompts=share_prompts,
            entropy_gradient=objective.entropy_coef > 0,
        )
        return _components(loss_fn, objective, work, logp_BT, entropy_BT, routing, counts)

    def optimizer_step(params, opt_state, frozen, work: _Work, first, stride, is_good=True):
        """One step on the micro-batches first, first + stride, ...; not applied unless what came before `is_good`."""
        counts = _count(work, first, stride)
        grads, metrics = _accumulate(
            jax.grad(forward, has_aux=True), params, frozen, work, first, stride, counts, barrier=mesh.size > 1
        )
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss/total"])
        keeps = (
            is_good & finite & counts.trains_any
        )  # without a token there is no direction: momentum alone must not move anything
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        if (load_LE := metrics.pop("moe/load", None)) is not None:
            metrics |= moe.load_metrics(load_LE)
            if objective.router_balance_rate:
                new_params = _rebalance(model, new_params, load_LE, objective.router_balance_rate)
        if (mismatch := metrics.pop("moe/replayed", None)) is not None:
            metrics |= {"moe/routing_mismatch": mismatch[0] / jnp.maximum(mismatch[1], 1.0)}
        new = new_params, new_opt_state
        kept = jax.tree.map(lambda new, old: jnp.where(keeps, new, old), new, (params, opt_state))
        metrics |= {"loss/grad_norm": norm, "loss/skipped": 1.0 - finite} | diagnostics.module_norms(grads)
        return *kept, metrics, counts.tokens

    def train_step(state: TrainState, batch: packing.TrainBatch):
        old_logp = batch.behavior_logp
        if objective.old_logprobs == "learner":
            old_logp = _score(model, whole(state.params, state.frozen), batch, share_prompts=share_prompts)
        work, opt_state = _Work(batch, old_logp), _between_memories(state.opt_state, layout.opt_state, "device")
        if objective.optimizer_steps == 1:
            params, opt_state, metrics, tokens = optimizer_step(state.params, opt_state, state.frozen, work, 0, 1)
            metrics |= {"loss/num_tokens": tokens}
        else:
            params, opt_state, metrics = _steps(
                objective.optimizer_steps, optimizer_step, state.params, opt_state, state.frozen, work
            )
        opt_state = _between_memories(opt_state, layout.opt_state, HOST)
        return TrainState(state.step + 1, params, opt_state, state.frozen), metrics

    layout = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer, mesh, adapters))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(layout, replicated))

    def step(state, batch):
        with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
            return jitted(state, batch)

    def compile(batch):
        with jax.set_mesh(mesh):
            jitted.lower(abstract_state(model, optimizer, mesh, adapters), batch).compile()

    step.jitted, step.compile = jitted, compile
    return step


# ---- the objective ---------------------------------------------------------------------------------------------------


@struct.dataclass
class _Work:
    """A batch and the log-probabilities [M, B, T] that its ratios are taken against."""

    batch: packing.TrainBatch
    old_logp: jax.Array

    def rows(self, i) -> "_Work":
        """Micro-batch i."""
        return jax.tree.map(lambda x: x[i], self.replace(batch=self.batch.replace(num_micro_batches=None)))


@struct.dataclass
class _Counts:
    """Global denominators of an optimizer step, float32: each at least 1, but for `tokens`, the trained tokens themselves."""

    tokens: jax.Array
    positions: jax.Array  # that are no padding
    trains_any: jax.Array  # bool: whether any token has a part in any component
    denom: jax.Array
    streams: jax.Array
    ce: jax.Array
    ref_kl: jax.Array


def _bind(loss, options) -> Callable:
    """The loss with its options, checked: ValueError names what is unknown or missing."""
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

    def bound(logp_BT, work: _Work, advantage_BT, counts: _Counts):
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


def _components(loss_fn, objective: Objective, work: _Work, logp_BT, entropy_BT, routing, counts: _Counts):
    """(objective, metrics) of one micro-batch; see rl/divergences.py for the sum."""
    rows, mask_BT = work.batch, work.batch.loss_mask
    advantage_BT = rows.advantage
    if objective.kl_coef:
        reference_BT = rows.behavior_logp if objective.kl_reference == "sampler" else _need(rows, "ref_logp")
        if objective.kl_place == "advantage":
            advantage_BT = divergences.kl_in_advantage(advantage_BT, logp_BT, reference_BT, mask_BT, objective.kl_coef)
    policy, metrics = loss_fn(logp_BT, work, advantage_BT, counts)
    total = objective.policy_coef * policy
    entropy = ratios.total(entropy_BT, mask_BT, counts.denom)
    metrics = metrics | {"loss/policy": policy, "loss/entropy": entropy}
    if objective.old_logprobs == "learner":  # the loss's own mismatch is that of this batch's optimizer steps alone
        log_ratio_BT = ratios.log_ratio(work.old_logp, rows.behavior_logp, mask_BT)
        sampler_kl = ratios.total(jnp.expm1(log_ratio_BT) - log_ratio_BT, mask_BT, counts.denom)
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
        if routing.gap is not None:
            replayed_BT = rows.routed_experts[..., 0, 0] != router_replay.unrouted(rows.routed_experts.dtype)
            counts_2 = jnp.stack([jnp.sum(routing.gap > 0), len(routing.gap) * jnp.sum(replayed_BT)])
            metrics |= {"moe/replayed": counts_2.astype(jnp.float32)}  # that would differ, of all
    return total, metrics | {"loss/total": total}


def _need(rows, stream):
    if (x_BT := getattr(rows, stream)) is None:
        raise ValueError(f"the objective needs the stream {stream!r}; name it in the layout's `streams` and fill it in")
    return x_BT


def _forward(model, params, work: _Work, *, share_prompts: bool, entropy_gradient: bool = False):
    """(logp_BT, entropy_BT, routing of the mixture layers or None) of a micro-batch."""
    rows = work.batch
    hidden_BTD, routing = transformer.apply_routed(
        params,
        model,
        rows.tokens,
        positions_BT=rows.positions,
        segment_ids_BT=rows.segment_ids,
        branch_ids_BT=rows.branch_ids if share_prompts else None,
        experts_LBTX=router_replay.given(rows.routed_experts),
    )
    logp_BT, entropy_BT = logprobs.token_logprobs(
        params,
        model,
        hidden_BTD,
        rows.tokens,
        rows.temperature,
        predictors_BT=rows.predictors,
        entropy_gradient=entropy_gradient,
    )
    return logp_BT, entropy_BT, routing


def _rebalance(model, params, load_LE, rate: float):
    """The parameters with each router's correction moved by the load of its experts over the step, [L, E] over mixture layers."""
    place = {index: n for n, index in enumerate(filter(model.is_mixture, range(model.num_layers)))}
    held = transformer.stacks(model) if model.scan_layers else {f"{index:03d}": index for index in place}
    blocks = dict(params["layers"])
    for key, indices in held.items():
        if "moe" in blocks[key]:
            of_key = [place[i] for i in indices] if model.scan_layers else place[indices]
            mixture = blocks[key]["moe"]
            correction = moe.balanced_correction(mixture["correction"], load_LE[jnp.array(of_key)], rate)
            blocks[key] = blocks[key] | {"moe": mixture | {"correction": correction}}
    return params | {"layers": blocks}


# ---- over micro-batches and optimizer steps --------------------------------------------------------------------------


def _score(model, params, batch: packing.TrainBatch, *, share_prompts: bool) -> jax.Array:
    """logp [M, B, T] of every token, micro-batch after micro-batch."""
    work = _Work(batch, batch.behavior_logp)

    def put(i, logp):
        return logp.at[i].set(_forward(model, params, work.rows(i), share_prompts=share_prompts)[0])

    return jax.lax.fori_loop(0, batch.num_micro_batches, put, jnp.zeros(batch.tokens.shape, jnp.float32))


def _count(work: _Work, first, stride) -> _Counts:
    batch = work.batch
    index_M = jnp.arange(batch.tokens.shape[0])
    mine_M = (index_M < batch.num_micro_batches) & (index_M % stride == first)
    mask = jnp.where(mine_M[:, None, None], batch.loss_mask, 0.0)
    tokens = jnp.sum(mask)

    def num_streams(mask_BT, segment_ids_BT, branch_ids_BT):
        return ratios.num_streams(mask_BT, packing.stream_ids(segment_ids_BT, branch_ids_BT))

    streams = jnp.sum(jax.vmap(num_streams)(mask, batch.segment_ids, batch.branch_ids))

    def mine(x):
        return jnp.zeros(()) if x is None else jnp.where(mine_M[:, None, None], x, 0.0)

    weights = [mine(batch.ce_weight), mine(batch.ref_kl_weight)]

    return _Counts(
        tokens,
        jnp.maximum(jnp.sum(jnp.where(mine_M[:, None, None], batch.segment_ids != 0, False)).astype(jnp.float32), 1.0),
        (tokens > 0) | functools.reduce(jnp.logical_or, [jnp.any(weight != 0) for weight in weights]),
        jnp.maximum(tokens, 1.0),
        jnp.maximum(streams, 1.0),
        *(divergences.count(weight) for weight in weights),
    )


def _accumulate(gradient, params, frozen, work: _Work, first, stride, counts, *, barrier: bool):
    """Sums gradients and metrics over the micro-batches first, first + stride, ... in use; one program whatever their number."""
    num = work.batch.num_micro_batches

    def add(turn, total):
        i = first + turn * stride
        # Parameters are the same in every turn, so the compiler would gather all that fsdp split *before* the loop, and hold
        # the whole model. Behind a barrier with the turn's number they are not.
        here, i = jax.lax.optimization_barrier(((params, frozen), i)) if barrier else ((params, frozen), i)
        return jax.tree.map(jnp.add, total, gradient(here[0], work.rows(i), here[1], counts))

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(gradient, params, jax.eval_shape(lambda w: w.rows(0), work), frozen, counts),
    )
    return jax.lax.fori_loop(0, (num - first + stride - 1) // stride, add, zeros)


def _steps(most: int, optimizer_step, params, opt_state, frozen, work: _Work):
    """`most` optimizer steps, or as many as there are micro-batches; metrics are means over the batch's tokens.

    Step k takes the micro-batches k, k + n, ...: rows are packed by length, so neighbours are alike, and every step shall see
    long and short ones. After one whose gradient was not finite, no other is applied.
    """
    stride = jnp.clip(work.batch.num_micro_batches, 1, most)

    def one(k, carry):
        params, opt_state, total, is_good = carry
        params, opt_state, metrics, tokens = optimizer_step(params, opt_state, frozen, work, k, stride, is_good)
        weighted = jax.tree.map(lambda x: x * tokens, metrics) | {"loss/num_tokens": tokens}
        return params, opt_state, jax.tree.map(jnp.add, total, weighted), is_good & (metrics["loss/skipped"] == 0)

    shape = jax.eval_shape(lambda p, o: optimizer_step(p, o, frozen, work, 0, stride)[2], params, opt_state)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape) | {"loss/num_tokens": jnp.zeros(())}
    params, opt_state, total, _ = jax.lax.fori_loop(0, stride, one, (params, opt_state, zeros, jnp.array(True)))
    tokens = total.pop("loss/num_tokens")
    means = jax.tree.map(lambda x: x / jnp.maximum(tokens, 1.0), total)
    steps = {"loss/optimizer_steps": stride.astype(jnp.float32), "loss/optimizer_steps_missing": (most - stride) / 1.0}
    return params, opt_state, means | {"loss/num_tokens": tokens} | steps


def _between_memories(opt_state, layout, kind: str):
    """Brings what lies on the host to the device, or back; leaves that always live on the device stay where they are."""

    def move(x, sharding):
        return jax.device_put(x, sharding.with_memory_kind(kind)) if sharding.memory_kind == HOST else x

    return jax.tree.map(move, opt_state, layout)
