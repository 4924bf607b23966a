"""The train step: a pure function (learner, state, batch) -> (state, metrics), compiled once, with the state donated.

1. With `old_logprobs = "learner"`, all tokens are scored with the parameters before the step (INTELLECT-2's estimator), those of the
   first optimizer step by its own forward pass: ratios then measure the change made by this batch's own optimizer steps. By default
   they compare with the sampler.
2. `loss` scores the tokens of a micro-batch, at the temperature they were sampled at, among the tokens that filters kept, and with
   the experts that the batch names (rl/learning/batch/router_replay.py), and adds the components of the objective, each over its own global count.
3. `gradients` are summed over micro-batches: exactly the gradient of the whole batch, since the denominators are global.
4. `update` clips, scales and applies the gradient. One that is not finite changes nothing; loss/skipped counts it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from models import config as config_lib
from models import logprobs, moe, transformer
from models import lora as lora_lib
from rl.learning.batch import packing, router_replay
from rl.learning.learner import objective as objective_lib
from rl.learning.learner import optimizers
from sharding.mesh import rules

HOST = "pinned_host"  # the memory kind of the optimizer state with `OptimizerConfig.offload_moments`


@dataclasses.dataclass(frozen=True)
class Learner:
    """The static parts of a train step: model, optimizer, objective, mesh. Hashable: `jit` compiles once per learner and batch shape."""

    model: config_lib.ModelConfig
    optimizer: optax.GradientTransformation  # of `make_optimizer`
    policy_loss: objective_lib.PolicyLoss  # of `objective.bind`
    mesh: jax.sharding.Mesh
    objective: objective_lib.Objective = objective_lib.Objective()  # by default the policy loss alone
    lora: lora_lib.LoraConfig | None = None  # None, or rank 0: all parameters train
    share_prompts: bool = True  # False: no tree of a batch has a prompt of its own or a second branch

    def __repr__(self) -> str:
        return "Learner"  # jax's error messages print it: the fields are hundreds of lines

    def __post_init__(self):
        if self.objective.router_balance_rate and (self.lora or not self.model.router_correction):
            raise ValueError(
                f"objective.router_balance_rate = {self.objective.router_balance_rate} moves the routers' corrections, which "
                f"{'LoRA does not train' if self.lora else 'this model lacks (model.router_correction)'}; set it to 0"
            )


class TrainState(struct.PyTreeNode):
    """The state that training updates: the parameters that train, the optimizer state, and the number of batches consumed (int32).

    With LoRA (models/lora.py) `params` are the adapters and `frozen` the model's own parameters, in its `param_dtype`; else
    `frozen` is empty. `params` and moments are float32.
    """

    step: packing.Array
    params: transformer.Params
    opt_state: optax.OptState
    frozen: transformer.Params = dataclasses.field(default_factory=dict)


def train_step(learner: Learner, state: TrainState, batch: packing.TrainBatch) -> tuple[TrainState, dict]:
    """Takes all optimizer steps on one batch; returns (new state, metrics). Callers use the compiled form, `jit_train_step`.

    Metrics are float32 scalars on the device, equal on all hosts: of the policy loss, of the other terms of the objective,
    and of `update`; for MoE models also moe/* (`moe.load_metrics`), and with router replay moe/routing_mismatch, the fraction of
    (token, MoE layer) pairs in which the learner's own router would have chosen other experts.
    """
    objective, layout = learner.objective, _shardings(learner).opt_state
    with transformer.precision(learner.model), jax.sharding.use_abstract_mesh(learner.mesh.abstract_mesh):
        micro_batches = objective_lib.MicroBatches(batch, batch.behavior_logp)
        if objective.old_logprobs == "learner":
            micro_batches = _scored_before(learner, state, batch)
        state = state.replace(opt_state=_between_memories(state.opt_state, layout, "device"))
        if objective.optimizer_steps > 1:
            state, metrics = _several_optimizer_steps(learner, state, micro_batches)
        else:
            counts = objective_lib.count(micro_batches, 0, 1)
            grads, metrics = gradients(learner, state, micro_batches, 0, 1, counts)
            state, metrics = update(learner, state, grads, metrics, counts)
            metrics |= {"loss/num_tokens": counts.tokens}
        opt_state = _between_memories(state.opt_state, layout, HOST)
        return state.replace(step=state.step + 1, opt_state=opt_state), metrics


def gradients(learner, state, micro_batches, first, stride, counts):
    """Returns (gradient, metrics), summed over the used micro-batches first, first + stride, ...: one program for any number of them."""
    gradient = jax.grad(functools.partial(loss, learner), has_aux=True)
    one = jax.eval_shape(objective_lib.MicroBatches.__getitem__, micro_batches, 0)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, state.params, state.frozen, one, counts))

    def add(turn, total):
        i, params, frozen = first + turn * stride, state.params, state.frozen
        if learner.mesh.size > 1:
            # Parameters are the same in every turn, so the compiler would gather all that fsdp splits *before* the loop, and
            # keep the whole model in memory. After a barrier with the turn's number they are not.
            (params, frozen), i = jax.lax.optimization_barrier(((params, frozen), i))
        return jax.tree.map(jnp.add, total, gradient(params, frozen, micro_batches[i], counts))

    num_turns = (micro_batches.batch.num_micro_batches - first + stride - 1) // stride
    return jax.lax.fori_loop(0, num_turns, add, zeros)


def loss(learner: Learner, params, frozen, micro_batch: objective_lib.MicroBatches, counts: objective_lib.Counts):
    """Returns (objective to minimize, metrics) of one micro-batch. `jax.grad` differentiates it by `params`."""
    objective, batch = learner.objective, micro_batch.batch
    whole = _whole(learner, params, frozen)
    logp_BT, entropy_BT, routing = _log_probs(learner, whole, batch, entropy_gradient=objective.entropy_coef > 0)
    micro_batch = micro_batch.scored(logp_BT)
    policy, metrics = learner.policy_loss.function(
        logp_BT,
        micro_batch.old_logp,
        objective.advantage(batch, logp_BT),
        batch.loss_mask,
        **learner.policy_loss.arguments(batch, counts),
    )
    stream_means = learner.policy_loss.stream_means
    total, components = objective.total(policy, micro_batch, logp_BT, entropy_BT, routing, counts, stream_means)
    return total, metrics | components


def update(learner: Learner, state: TrainState, grads, metrics, counts: objective_lib.Counts, is_good=True):
    """Takes one optimizer step along the gradient `grads`, of a batch with these `metrics` and `counts`. Returns (state, metrics).

    Parameters and optimizer state stay unchanged if the gradient is not finite, no token trains, or `is_good` is False.
    """
    metrics, norm = dict(metrics), optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss/total"])
    keeps = is_good & finite & (counts.trained > 0)  # without a token, momentum alone must move nothing
    updates, opt_state = learner.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    if (load_LE := metrics.pop("moe/load", None)) is not None:
        metrics |= moe.load_metrics(load_LE)
        if rate := learner.objective.router_balance_rate:
            params = _rebalance(learner.model, params, load_LE, rate)
    if (differing_and_all := metrics.pop("moe/replayed", None)) is not None:
        metrics |= {"moe/routing_mismatch": differing_and_all[0] / jnp.maximum(differing_and_all[1], 1.0)}
    old = state.params, state.opt_state
    params, opt_state = jax.tree.map(lambda new, old: jnp.where(keeps, new, old), (params, opt_state), old)
    metrics |= {"loss/grad_norm": norm, "loss/skipped": 1.0 - finite} | module_norms(grads)
    return state.replace(params=params, opt_state=opt_state), metrics


@functools.lru_cache(maxsize=16)
def jit_train_step(learner: Learner):
    """Returns the jitted function (state, batch) -> (new state, metrics), cached per learner. The old `state` is donated."""
    replicated = jax.sharding.NamedSharding(learner.mesh, jax.sharding.PartitionSpec())
    step = functools.partial(train_step, learner)
    return jax.jit(step, donate_argnums=0, out_shardings=(_shardings(learner), replicated))


def compile_train_step(learner: Learner, batch: packing.TrainBatch) -> None:
    """Compiles `jit_train_step(learner)` for batches with the shapes in `batch` (of `packing.abstract`). Blocks."""
    jit_train_step(learner).lower(abstract_state(learner), batch).compile()


@functools.partial(jax.jit, static_argnums=0)
def score(learner: Learner, params: transformer.Params, batch: packing.TrainBatch) -> jax.Array:
    """Returns the log-probabilities [M, B, T] of the batch's tokens under `params`, the whole model's parameters.

    Routed experts of the batch are ignored: they may belong to another policy, even of another architecture.
    """
    with transformer.precision(learner.model), jax.sharding.use_abstract_mesh(learner.mesh.abstract_mesh):
        return _score_batch(learner, params, batch.replace(routed_experts=None))


def make_optimizer(
    config: optimizers.OptimizerConfig, model: config_lib.ModelConfig, lora: lora_lib.LoraConfig | None = None
) -> optax.GradientTransformation:
    """Returns the optimizer of the parameters that train: the model's, or with `lora` the adapters'."""
    return optimizers.make(config, trained_specs(model, lora))


def trained_specs(model: config_lib.ModelConfig, lora: lora_lib.LoraConfig | None = None) -> dict:
    """Returns the specs of the parameters that train: float32 at any `param_dtype`, since bfloat16 would lose most steps of 1e-6."""
    specs = transformer.specs(dataclasses.replace(model, param_dtype="float32"))
    return lora_lib.specs(specs, lora) if lora else specs


def init_state(key: jax.Array, learner: Learner, params: transformer.Params | None = None) -> TrainState:
    """Returns the train state of step 0, sharded over the mesh, with the model parameters `params`, or random ones from `key`.

    Adapters that `params` have go on training.
    """

    # A program that runs once: on a CPU, LLVM takes half the time for it at level 1, and the numbers are the same.
    is_cpu = learner.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 1} if is_cpu else None

    @functools.partial(jax.jit, out_shardings=_shardings(learner), compiler_options=options)
    def create(key, params):
        trained, frozen = transformer.init(key, learner.model) if params is None else params, {}
        specs = trained_specs(learner.model, learner.lora)
        if learner.lora:
            base, trained = lora_lib.detach(trained)
            frozen = rules.cast(base, transformer.specs(learner.model))
            trained = trained or lora_lib.init(jax.random.fold_in(key, 1), specs)
        trained = rules.cast(trained, specs)
        return TrainState(jnp.zeros((), jnp.int32), trained, learner.optimizer.init(trained), frozen)

    with jax.set_mesh(learner.mesh):
        return create(key, params)


def abstract_state(learner: Learner) -> TrainState:
    """Returns the train state as `ShapeDtypeStruct` with shardings; optimizer moments are split exactly as their parameters."""
    specs = trained_specs(learner.model, learner.lora)
    params = rules.abstract(specs, learner.mesh)
    replicated = jax.sharding.NamedSharding(learner.mesh, jax.sharding.PartitionSpec())
    layouts = dict(jax.tree_util.tree_leaves_with_path(rules.shardings(specs, learner.mesh)))

    def layout(path, leaf, space):
        """Returns the abstract form of an optimizer-state leaf, sharded as the parameter whose path ends the leaf's path."""
        tails = (layouts.get(path[i:]) for i in range(len(path)))
        sharding = next((s for s in tails if s is not None), replicated) if leaf.ndim else replicated
        if space == jax.memory.Space.Host:
            sharding = sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    # Not jax.eval_shape, which loses the memory space.
    init, opt_state = jax.make_jaxpr(learner.optimizer.init, return_shape=True)(params)
    avals: Any = init.out_avals  # jax 0.12 types them without their memory space
    spaces = jax.tree.unflatten(jax.tree.structure(opt_state), [aval.memory_space for aval in avals])
    return TrainState(
        jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
        params,
        jax.tree_util.tree_map_with_path(layout, opt_state, spaces),
        transformer.abstract(learner.model, learner.mesh) if learner.lora else {},
    )


def policy(learner: Learner, state: TrainState) -> transformer.Params:
    """Returns the whole model's parameters in a train state, adapters next to their kernels: the policy that the learner computes with."""
    return _whole(learner, state.params, state.frozen)


def _whole(learner: Learner, params, frozen) -> transformer.Params:
    if not learner.lora:
        return params
    return lora_lib.attach(frozen, lora_lib.rounded(params), learner.lora)


def _shardings(learner: Learner) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, abstract_state(learner))


def _between_memories(opt_state, layout, kind: str):
    """Moves the optimizer-state leaves that `layout` places in host memory to memory `kind`; other leaves stay."""

    def move(x, sharding):
        return jax.device_put(x, sharding.with_memory_kind(kind)) if sharding.memory_kind == HOST else x

    return jax.tree.map(move, opt_state, layout)


def _several_optimizer_steps(learner, state, micro_batches):
    """Takes up to `objective.optimizer_steps` steps, at most one per micro-batch. Returns (new state, mean metrics).

    Step k of n takes the micro-batches k, k + n, ...: neighbors have rows of similar length, and so every step gets
    long and short rows. After a step whose gradient was not finite, no further step is applied. Metrics are means over
    the steps, by the tokens that each metric is about (`_weight`).
    """
    most, stride = learner.objective.optimizer_steps, _num_optimizer_steps(learner, micro_batches.batch)

    def step(k, carry):
        params, opt_state, is_good = carry
        before = state.replace(params=params, opt_state=opt_state)
        counts = objective_lib.count(micro_batches, k, stride)
        grads, metrics = gradients(learner, before, micro_batches, k, stride, counts)
        after, metrics = update(learner, before, grads, metrics, counts, is_good)
        weights = {name: _weight(name, counts) for name in metrics}
        is_good &= metrics["loss/skipped"] == 0
        weighted = {name: value * weights[name] for name, value in metrics.items()}
        return (after.params, after.opt_state, is_good), (weighted, weights, counts.tokens)

    def add(k, carry_and_total):
        carry, weighted = step(k, carry_and_total[0])
        return carry, jax.tree.map(jnp.add, carry_and_total[1], weighted)

    carry = state.params, state.opt_state, jnp.array(True)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(step, 0, carry)[1])
    (params, opt_state, _), (totals, weights, tokens) = jax.lax.fori_loop(0, stride, add, (carry, zeros))
    metrics = {name: total / jnp.maximum(weights[name], 1.0) for name, total in totals.items()}
    metrics |= {"loss/num_tokens": tokens}
    taken = stride.astype(jnp.float32)
    metrics |= {"loss/optimizer_steps": taken, "loss/optimizer_steps_missing": most - taken}
    return state.replace(params=params, opt_state=opt_state), metrics


def _num_optimizer_steps(learner, batch: packing.TrainBatch) -> jax.Array:
    return jnp.clip(batch.num_micro_batches, 1, learner.objective.optimizer_steps)


def _weight(name: str, counts: objective_lib.Counts) -> jax.Array:
    """Returns the number of tokens that the metric `name` of an optimizer step is a mean over, or those of the whole step."""
    if name in ("loss/ce", "loss/ref_kl"):
        return getattr(counts, name.removeprefix("loss/"))
    whole = ("loss/total", "loss/skipped", "loss/grad_norm", "loss/router_balance", "grad_norm/", "moe/")
    return counts.trained if name.startswith(whole) else counts.tokens


def _scored_before(learner, state, batch: packing.TrainBatch) -> objective_lib.MicroBatches:
    """Returns the micro-batches with log-probabilities of the parameters before the step; those of its first optimizer step are its own."""
    stride = _num_optimizer_steps(learner, batch)
    is_own_M = jnp.arange(batch.tokens.shape[0]) % stride == 0
    if learner.objective.optimizer_steps == 1:
        return objective_lib.MicroBatches(batch, batch.behavior_logp, is_own_M)
    old_logp = _score_batch(learner, _whole(learner, state.params, state.frozen), batch, stride)
    return objective_lib.MicroBatches(batch, old_logp, is_own_M)


def _score_batch(learner, params, batch: packing.TrainBatch, stride=None) -> jax.Array:
    """Returns the log-probabilities of the batch's tokens; with `stride`, zeros for the micro-batches 0, stride, 2 stride, ..."""
    micro_batches, num = objective_lib.MicroBatches(batch, batch.behavior_logp), batch.num_micro_batches

    def put(n, logp):
        i = n if stride is None else n + n // jnp.maximum(stride - 1, 1) + 1
        return logp.at[i].set(_log_probs(learner, params, micro_batches[i].batch)[0])

    num_scored = num if stride is None else num - (num + stride - 1) // stride
    return jax.lax.fori_loop(0, num_scored, put, jnp.zeros(batch.tokens.shape, jnp.float32))


def _log_probs(learner, params, batch, *, entropy_gradient: bool = False):
    """Runs the model on a micro-batch. Returns (logp_BT, entropy_BT, routing of the MoE layers or None)."""
    hidden_BTD, routing = transformer.apply(
        params,
        learner.model,
        batch.tokens,
        positions_BT=batch.positions,
        segment_ids_BT=batch.segment_ids,
        branch_ids_BT=batch.branch_ids if learner.share_prompts else None,
        experts_LBTX=router_replay.given(batch.routed_experts),
    )
    options = {"predictors_BT": batch.predictors, "entropy_gradient": entropy_gradient, "kept_BTW": batch.kept}
    scores = logprobs.token_logprobs(params, learner.model, hidden_BTD, batch.tokens, batch.temperature, **options)
    return *scores, routing


def _rebalance(model, params, load_LE, rate: float):
    """Adjusts each router's correction bias by `load_LE`, the load of its experts in the step. Returns new parameters."""
    place = {index: n for n, index in enumerate(filter(model.is_moe, range(model.num_layers)))}
    blocks = dict(params["layers"])
    for key, indices in transformer.stacks(model).items():
        if "moe" in blocks[key]:
            layer = blocks[key]["moe"]
            load = load_LE[jnp.array([place[index] for index in indices])].reshape(layer["correction"].shape)
            correction = moe.balanced_correction(layer["correction"], load, rate)
            blocks[key] = blocks[key] | {"moe": layer | {"correction": correction}}
    return params | {"layers": blocks}


def module_norms(grads) -> dict[str, jax.Array]:
    """Returns {"grad_norm/<module>": norm} over all layers: attn, mlp, moe, their norms, embed, lm_head, final_norm."""
    modules: dict[str, list] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = next(entry.key for entry in path if entry.key != "layers" and not entry.key.isdigit())
        modules.setdefault(name, []).append(leaf)
    return {f"grad_norm/{name}": optax.tree.norm(leaves) for name, leaves in modules.items()}
