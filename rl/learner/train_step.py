"""The learner: `train_step(state, batch) -> (state, metrics)`, pure, jitted once, its input donated.

1. With `old_logprobs = "learner"`, all tokens are scored with the parameters as they are now (INTELLECT-2's estimator):
   ratios then measure what this batch's own optimizer steps changed. By default they are taken against the sampler.
2. `apply` runs the packed rows, `token_logprobs` scores their tokens at the temperature they were sampled at. Where the batch
   says which experts ran, these run again (rl/batch/router_replay.py), here and in 1.
3. `LOSSES[name]` turns log-probabilities, advantages and masks into a scalar over the global token count; the other
   components of the objective (rl/learner/objective.py) are added, each over its own count.
4. Gradients are summed over micro-batches; since the denominators are global, the sum is exactly the gradient of the whole
   batch. The number of micro-batches is data, not shape: one compilation serves batches of any size.
5. optax clips, scales and applies the gradient. A gradient that is not finite is not applied: the state stays as it was, and
   the metrics say so.

The learner is algorithm-blind: rewards, groups and staleness were dealt with before a batch reaches it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import struct

from models import config as config_lib
from models import logprobs, moe, transformer
from rl.batch import packing, router_replay
from rl.learner import lora, optimizers
from rl.learner import objective as objective_lib
from sharding import rules

HOST = "pinned_host"  # the memory kind of what `optimizers.offloaded` keeps off the device
# What a run is described by (rl/experiment/experiment.py).
OptimizerConfig, Objective = optimizers.OptimizerConfig, objective_lib.Objective
POLICY_LOSS = Objective()  # alone


@struct.dataclass
class TrainState:
    """Everything a step changes: int32 step (batches consumed), parameters, optimizer state; and what it does not, `frozen`.

    With adapters (rl/learner/lora.py) `params` are the adapters and `frozen` the model's own parameters; else `frozen` is empty.
    """

    step: jax.Array
    params: transformer.Params
    opt_state: optax.OptState
    frozen: transformer.Params = dataclasses.field(default_factory=dict)


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
    objective: Objective = POLICY_LOSS,
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
    loss_fn = objective_lib.bind(loss, loss_options)
    if objective.router_balance_rate and (adapters or not model.router_correction):
        raise ValueError(
            f"objective.router_balance_rate = {objective.router_balance_rate} moves the routers' corrections, which "
            f"{'adapters leave as they are' if adapters else 'this model has not (model.router_correction)'}; set it to 0"
        )

    def whole(params, frozen):
        return lora.merge(frozen, params, transformer.specs(model), adapters) if adapters else params

    def forward(params, work: objective_lib.Work, frozen, counts):
        logp_BT, entropy_BT, routing = _forward(
            model,
            whole(params, frozen),
            work,
            share_prompts=share_prompts,
            entropy_gradient=objective.entropy_coef > 0,
        )
        return objective_lib.value(loss_fn, objective, work, logp_BT, entropy_BT, routing, counts)

    def optimizer_step(params, opt_state, frozen, work: objective_lib.Work, first, stride, is_good=True):
        """One step on the micro-batches first, first + stride, ...; not applied unless what came before `is_good`."""
        counts = objective_lib.count(work, first, stride)
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
        metrics |= {"loss/grad_norm": norm, "loss/skipped": 1.0 - finite} | module_norms(grads)
        return *kept, metrics, counts.tokens

    def train_step(state: TrainState, batch: packing.TrainBatch):
        old_logp = batch.behavior_logp
        if objective.old_logprobs == "learner":
            old_logp = _score(model, whole(state.params, state.frozen), batch, share_prompts=share_prompts)
        work = objective_lib.Work(batch, old_logp)
        opt_state = _between_memories(state.opt_state, layout.opt_state, "device")
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


def _forward(model, params, work: objective_lib.Work, *, share_prompts: bool, entropy_gradient: bool = False):
    """(logp_BT, entropy_BT, routing of the mixture layers or None) of a micro-batch."""
    rows = work.batch
    hidden_BTD, routing = transformer.apply(
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
    place = {index: n for n, index in enumerate(filter(model.is_moe, range(model.num_layers)))}
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
    work = objective_lib.Work(batch, batch.behavior_logp)

    def put(i, logp):
        return logp.at[i].set(_forward(model, params, work.rows(i), share_prompts=share_prompts)[0])

    return jax.lax.fori_loop(0, batch.num_micro_batches, put, jnp.zeros(batch.tokens.shape, jnp.float32))


def _accumulate(gradient, params, frozen, work: objective_lib.Work, first, stride, counts, *, barrier: bool):
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


def _steps(most: int, optimizer_step, params, opt_state, frozen, work: objective_lib.Work):
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


def module_norms(grads) -> dict[str, jax.Array]:
    """{"grad_norm/<module>": norm} over all layers: attn, mlp, moe, their norms, embed, lm_head, final_norm."""
    modules: dict[str, list] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        keys = [str(getattr(entry, "key", entry)) for entry in path]
        named = [key for key in keys if key != "layers" and not key.isdigit()]
        modules.setdefault(named[0], []).append(leaf)
    return {f"grad_norm/{name}": optax.tree.norm(leaves) for name, leaves in modules.items()}
