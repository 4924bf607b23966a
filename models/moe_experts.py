"""Runs the experts of MoE layers: sorted assignments, grouped matmuls, and expert parallelism.

1. `run` takes tokens with their experts and weights. Assignments (a token and one of its experts) are sorted by expert, so
   that one grouped matmul runs all experts without dropping a token.
2. On a mesh this is one `shard_map`: a device gathers its experts' parameters over `fsdp`. The `expert` axis splits the
   experts. So does the `tensor` axis if it divides their number; otherwise it splits the ffn of each expert.
3. A few tokens are gathered over the `expert` axis: each device runs its own experts on all of them, and the partial sums
   are scattered back.
4. With many tokens the assignments move instead: each device sends every row to the device of its expert and gets the
   result back, both by a ragged all-to-all (padded and plain on a CPU, for which XLA has no ragged one). A device may
   receive all rows, but its buffer is bounded. So rows move in rounds of `SLACK` times the average load: one round,
   unless some device's load is larger. The gradient is the sum of the rounds' gradients, each recomputed.

Letters: B sequences, T tokens, N = B T, D model, E experts, X experts per token, A = N X assignments, F ffn of one expert,
R rows of a round, P devices of the expert axis.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import linear_call
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.sharding import PartitionSpec

from models import config as config_lib
from models import layers
from models.kernels import adapted, gpu_grouped_matmul, int8
from sharding.mesh import fsdp, rules
from sharding.mesh import mesh as mesh_lib

# Logical dims of the parameters that `shard_map` splits; models/blocks.py defines their shapes.
AXES = {
    "gate": ("experts", "model", "expert_ffn"),
    "up": ("experts", "model", "expert_ffn"),
    "down": ("experts", "expert_ffn", "model"),
    "gate_bias": ("experts", "expert_ffn"),
    "up_bias": ("experts", "expert_ffn"),
    "down_bias": ("experts", "norm"),
}
TILE = 128  # a TPU register holds rows of 128, so tiles of a matmul are multiples of it
# Rows of a megablox tile -> its most columns. Every tile reads its expert's weights again: 128 rows give 128 FLOPs per byte,
# too few to keep a TPU busy (v5p: 166, v5e: 240). With few rows per expert, larger tiles would be padding. Compile time grows
# with the product of a tile's sides.
TILES = {128: 1024, 512: 512}
GATHERED = 2**16  # most assignments that a device sorts when tokens are gathered; with more, assignments move
SLACK = 1.25  # rows of a round, over the average
# Assignments that a device works on at a time. Each array of them takes 1 GiB for 4,096 dims in bfloat16.
ROWS = 2**17


@struct.dataclass
class InStack:
    """The matrices of one layer, [E, D, F], inside the stack of all layers. The kernel reads them there, because a slice before its call would be copied."""

    stack: jax.Array  # [L, E, D, F]
    layer: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's matrices."""
        return self.stack.shape[1:]

    def astype(self, dtype: jax.typing.DTypeLike) -> "InStack | jax.Array":
        """Returns these matrices, sliced if their dtype is another one."""
        return self if self.stack.dtype == dtype else self.sliced.astype(dtype)

    @property
    def sliced(self) -> jax.Array:
        """The layer's matrices alone."""
        return self.stack[self.layer]


def left_in_stack(params: dict) -> dict:
    """Returns the matrices of a stack of MoE layers that `run` can read from the stack: plain arrays that no `fsdp` axis splits."""
    mesh = rules.several_devices()
    if mesh is not None and mesh.shape["fsdp"] > 1:
        return {}
    plain = {name for name, x in params.items() if isinstance(adapted.base_of(x), jax.Array)}
    return {name: params[name] for name in ("gate", "up", "down") if name in plain}


def run(
    x_BTD: jax.Array, weights_BTX: jax.Array, experts_BTX: jax.Array, params: dict, config: config_lib.ModelConfig
) -> jax.Array:
    """Returns the weighted sum of each token's experts, [B, T, D].

    `params` has expert-major `gate`, `up` [E, D, F], `down` [E, F, D], and biases if the config has them. They are cast to the dtype of
    the tokens. Devices sum the gradients of `params` in the dtype of `params`.
    """
    mesh = rules.several_devices()
    if mesh is None:
        params = {name: param.astype(x_BTD.dtype) for name, param in params.items()}
        return _by_chunks(functools.partial(_run_all, params=params, config=config), x_BTD, weights_BTX, experts_BTX)
    tokens = PartitionSpec(rules.RULES["batch"], rules.RULES["sequence"], None)
    specs = {name: _partitions(mesh, AXES[name], x) for name, x in params.items()}
    run_local = functools.partial(_run_local, config=config)
    in_specs = (tokens, tokens, tokens, specs)
    sharded = jax.shard_map(run_local, in_specs=in_specs, out_specs=tokens, check_vma=False)
    return _evenly(
        lambda x, weights, experts: sharded(x, weights, experts, params), mesh, x_BTD, weights_BTX, experts_BTX
    )


def grouped_matmul(
    rows_AD: jax.Array,
    kernel_EDF: jax.Array | InStack,
    group_sizes_E: jax.Array,
    inside_A: jax.Array | None,
    config: config_lib.ModelConfig,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns rows[a] @ kernel[expert of row a] for rows sorted by expert, in `dtype` (None: theirs); `group_sizes_E` has the rows per expert.

    Rows after the last group, where `inside_A` is False (None: no such rows), give zero and get a zero gradient. Both passes
    are masked by selection: a product with zero would keep NaN. `interpret` runs the kernel of a TPU or a GPU on a CPU.
    """

    def mask(x):
        return x if inside_A is None else jnp.where(inside_A[:, None], x, 0)

    (A, D), (E, _, F), which = rows_AD.shape, kernel_EDF.shape, config.grouped_matmul
    dtype = dtype or rows_AD.dtype
    if which == "auto":
        which = {"tpu": "megablox", "gpu": "triton", "cuda": "triton"}.get(mesh_lib.platform(), "ragged_dot")
    offset = None
    if isinstance(kernel_EDF, InStack):
        if which == "megablox":  # it subtracts the offset from the number of a group
            kernel_EDF, offset = kernel_EDF.stack.reshape(-1, D, F), -E * kernel_EDF.layer
        else:
            kernel_EDF = kernel_EDF.sliced
    if which == "ragged_dot" or (which == "triton" and (D % 16 or F % 16)):
        out_AF = jax.lax.ragged_dot(mask(rows_AD), kernel_EDF, group_sizes_E, preferred_element_type=dtype)
        return checkpoint_name(mask(out_AF), layers.SAVED)
    if which == "triton":
        tile = gpu_grouped_matmul.tile_of(A, E)
    else:
        tile = max(rows for rows in TILES if rows == min(TILES) or A >= rows * E)
    padded_AD = jnp.pad(mask(rows_AD), ((0, -A % tile), (0, 0)))
    if which == "triton":
        out_AF: Any = gpu_grouped_matmul.grouped_matmul(padded_AD, kernel_EDF, group_sizes_E, interpret, dtype)
    else:
        out_AF = megablox.gmm(
            padded_AD, kernel_EDF, group_sizes_E, dtype, _tiling(tile), offset, None, False, interpret
        )
    return checkpoint_name(mask(out_AF[:A]), layers.SAVED)


@functools.cache  # megablox takes a static argument: one object for each number of rows
def _tiling(rows: int):
    """Returns a function from the dims of a matmul [m, k] [k, n] to its tile: as few tiles as possible, evenly filled."""

    def even(dim):
        return -(-dim // (-(-dim // TILES[rows]) * TILE)) * TILE

    return lambda m, k, n: (rows, even(k), even(n))


def _evenly(run, mesh, x_BTD, *choice_BTX) -> jax.Array:
    """Calls `run` on the tokens, padded or reshaped to divide evenly over the mesh: a long prompt becomes many rows."""
    B, T, D = x_BTD.shape
    rows, columns = rules.num_batch_shards(mesh), math.prod(mesh.shape[axis] for axis in rules.RULES["sequence"])
    if B % rows == 0 and T % columns == 0:
        return run(x_BTD, *choice_BTX)

    def deal(x):
        flat = x.reshape(B * T, -1)
        return jnp.pad(flat, ((0, -B * T % (rows * columns)), (0, 0))).reshape(rows, -1, x.shape[-1])

    return run(*map(deal, (x_BTD, *choice_BTX))).reshape(-1, D)[: B * T].reshape(B, T, D)


def _by_chunks(run, x_BTD, weights_BTX, experts_BTX) -> jax.Array:
    """Calls `run` on chunks of at most `ROWS` assignments, which the backward pass recomputes.

    The chunks are equal without padding if less than twice the fewest chunks suffice; otherwise the last one is padded.
    """
    B, T, X = experts_BTX.shape
    least = -(-B * T // (ROWS // X))
    num_chunks = next((n for n in range(least, 2 * least) if B * T % n == 0), least)
    if num_chunks == 1:
        return run(x_BTD, weights_BTX, experts_BTX)

    def split(x):
        padded = jnp.pad(x.reshape(B * T, -1), ((0, -B * T % num_chunks), (0, 0)))
        return padded.reshape(num_chunks, 1, -1, x.shape[-1])

    chunks = [split(x) for x in (x_BTD, weights_BTX, experts_BTX)]
    out = jax.lax.map(lambda chunk: jax.checkpoint(run)(*chunk), chunks)
    return out.reshape(-1, x_BTD.shape[-1])[: B * T].reshape(x_BTD.shape)


def _run_all(x_BTD, weights_BTX, experts_BTX, *, params, config, first_expert: jax.Array | int = 0) -> jax.Array:
    """Returns each token's weighted sum over the experts in `params`, [B, T, D]; the first has the number `first_expert`."""
    num_local = params["gate"].shape[0]
    has_all = num_local == config.num_experts
    group_A = experts_BTX.reshape(-1) - first_expert
    if not has_all:
        # Experts of other devices sort last.
        group_A = jnp.where((group_A >= 0) & (group_A < num_local), group_A, num_local)
    order = _Order.of(group_A, num_local + 1)
    rows_AD = _spread(experts_BTX.shape[-1], x_BTD.reshape(-1, x_BTD.shape[-1]), order)
    out_AD = _ffn(rows_AD, group_A[order.taken], _sizes(group_A, num_local), params, config, all_inside=has_all)
    return _combine(out_AD, weights_BTX, order)


class _Order(NamedTuple):
    """A permutation of rows and its inverse: row a of the ordered array was row taken[a]; row b moved to put[b]."""

    taken: jax.Array
    put: jax.Array

    @classmethod
    def of(cls, key_A: jax.Array, num_keys: int) -> "_Order":
        """Returns the order that sorts rows by their keys in 0 .. num_keys - 1; rows of equal keys keep their order."""
        A = key_A.shape[0]
        index_A = jnp.arange(A, dtype=jnp.int32)
        if num_keys * A < 2**31:  # key and index in one number: a sort of one array, where order cannot be ambiguous
            taken = jax.lax.sort(key_A.astype(jnp.int32) * A + index_A, is_stable=False) % A
        else:
            taken = jnp.argsort(key_A, stable=True).astype(jnp.int32)
        return cls(taken, jax.lax.sort((taken, index_A), num_keys=1, is_stable=False)[1])


def _spread(copies: int, x, order: _Order, *, sums: bool = False) -> jax.Array:
    """Returns `copies` ordered copies of each row of `x`; if `sums`, the transpose: the sum of each row's ordered copies.

    Both directions, and so the gradients, are gathers: a TPU scatters row by row.
    """

    def spread(order, x):
        return x[order.taken // copies]

    def collect(order, x):
        return x[order.put].reshape(-1, copies, *x.shape[1:]).sum(axis=1)

    return linear_call(*((collect, spread) if sums else (spread, collect)), order, x)


def _sizes(group_A, num_groups: int) -> jax.Array:
    return (group_A[:, None] == jnp.arange(num_groups)[None]).sum(axis=0, dtype=jnp.int32)


def _ffn(rows_AD, group_A, group_sizes, params, config, *, all_inside: bool) -> jax.Array:
    """Returns the output of each row's expert, for rows sorted by expert; rows after the last group give zero."""
    num_local = params["gate"].shape[0]
    inside_A = None if all_inside else group_A < num_local
    local_A = jnp.minimum(group_A, num_local - 1)

    def multiply(rows, kernel, group_sizes, inside_A, local_A, dtype=None, config=config):
        is_int8 = isinstance(kernel, int8.Quantized)
        values = kernel.values.astype(rows.dtype) if is_int8 else kernel
        out = grouped_matmul(rows, values, group_sizes, inside_A, config, dtype=dtype)
        return int8.scaled(out, kernel.scale[:, 0][local_A]) if is_int8 else out

    # The tiles of a TPU's or a GPU's kernel would be padding for the most part.
    multiply_low = functools.partial(multiply, config=dataclasses.replace(config, grouped_matmul="ragged_dot"))

    def project(rows, name):
        kernel, groups = params[name], (group_sizes, inside_A, local_A)
        if isinstance(kernel, adapted.Adapted):
            product = adapted.product(multiply, multiply_low, rows, kernel, *groups)
            out = checkpoint_name(product, layers.SAVED)
        else:
            out = multiply(rows, kernel, *groups)
        if f"{name}_bias" not in params:
            return out
        bias_AF = params[f"{name}_bias"][local_A]
        return out + (bias_AF if inside_A is None else jnp.where(inside_A[:, None], bias_AF, 0))

    hidden_AF = layers.gated(project(rows_AD, "gate"), project(rows_AD, "up"), config)
    return project(hidden_AF, "down")


def _combine(out_AD, weights_BTX, order: _Order) -> jax.Array:
    """Returns each token's weighted sum of expert outputs, [B, T, D], from outputs that are ordered by expert."""
    weights_A = _spread(1, weights_BTX.reshape(-1).astype(out_AD.dtype), order)
    summed_ND = _spread(weights_BTX.shape[-1], out_AD * weights_A[:, None], order, sums=True)
    return summed_ND.reshape(*weights_BTX.shape[:2], -1)


def _run_local(x_BTD, weights_BTX, experts_BTX, params, *, config) -> jax.Array:
    """Returns the weighted sums over all experts of one device's tokens. Runs inside `shard_map`."""
    full: dict[str, Any] = {name: _gather_model_dim(name, param, x_BTD.dtype) for name, param in params.items()}
    num_shards, num_local = jax.lax.axis_size("expert"), full["gate"].shape[0]
    splits_ffn = num_local * num_shards == config.num_experts  # else the tensor axis splits the experts, too
    if splits_ffn and "down_bias" in full:  # the sum over `tensor` below would add it once per device
        full["down_bias"] = jnp.where(jax.lax.axis_index("tensor") == 0, full["down_bias"], 0)
    first = 0 if splits_ffn else jax.lax.axis_index("tensor") * num_local
    per_shard = config.num_experts // num_shards
    arguments = x_BTD, weights_BTX, experts_BTX
    if num_shards == 1 or num_shards * experts_BTX.size > GATHERED:
        run_some = _run_all if num_shards == 1 else _exchange
        run_some = functools.partial(run_some, params=full, config=config, first_expert=first)
        return jax.lax.psum(_by_chunks(run_some, *arguments), "tensor")
    gathered = (jax.lax.all_gather(x, "expert", axis=0, tiled=True) for x in arguments)
    first += jax.lax.axis_index("expert") * per_shard
    partial_BTD = jax.lax.psum(_run_all(*gathered, params=full, config=config, first_expert=first), "tensor")
    return jax.lax.psum_scatter(partial_BTD, "expert", scatter_dimension=0, tiled=True)


def _partitions(mesh, axes: tuple[str, ...], param):
    """Returns the tree of the layouts of a parameter with these logical dims; A and B of an adapter share all but one."""
    if isinstance(param, adapted.Adapted):
        of = functools.partial(_partitions, mesh)
        a, b = of((*axes[:2], "rank"), param.a), of((axes[0], "rank", axes[2]), param.b)
        return dataclasses.replace(param, base=of(axes, param.base), a=a, b=b)
    return jax.tree.map(functools.partial(_partition, mesh, axes, param.shape), param)


def _partition(mesh, axes: tuple[str, ...], shape: tuple[int, ...], x) -> PartitionSpec:
    """Returns the layout of a parameter of `shape`, or of its int8 scales, whose summed dims have size 1."""
    spec = rules.partition(mesh, shape, axes)
    if x.ndim != len(shape):  # of an `InStack`: the stack, and the number of the layer
        return PartitionSpec(None, *spec) if x.ndim else PartitionSpec()
    return PartitionSpec(*(of_dim if n == m else None for of_dim, n, m in zip(spec, x.shape, shape, strict=True)))


def _gather_model_dim(name: str, param, dtype):
    """Returns a parameter, `Quantized` or in `dtype`, with its model dim gathered from the devices of the `fsdp` axis."""
    if "model" not in AXES[name] or isinstance(adapted.base_of(param), InStack):
        return param.astype(dtype)
    dim = AXES[name].index("model")
    if isinstance(param, adapted.Adapted):  # the model dim is of the inputs or of the outputs
        low = "a" if dim == 1 else "b"
        whole = {low: fsdp.gather_as(jnp.float32, dim, getattr(param, low))}
        return dataclasses.replace(param, base=_gather_model_dim(name, param.base, dtype), **whole)
    if isinstance(param, jax.Array):
        return fsdp.gather_as(dtype, dim, param)
    gather = functools.partial(fsdp.gather, dim=dim)
    if isinstance(param, int8.Quantized) and param.scale.shape[dim] != param.shape[dim]:  # summed dims have one scale
        return int8.Quantized(gather(param.values), param.scale)
    return jax.tree.map(gather, param)


def _exchange(x_BTD, weights_BTX, experts_BTX, *, params, config, first_expert) -> jax.Array:
    """Returns the sums of a device's tokens over `params`' experts of each device on the expert axis, [B, T, D]."""
    P, num_local = jax.lax.axis_size("expert"), params["gate"].shape[0]
    per_shard = config.num_experts // P
    within_BTX = experts_BTX % per_shard - first_expert
    ours_BTX = (within_BTX >= 0) & (within_BTX < num_local)
    key_BTX = jnp.where(ours_BTX, experts_BTX // per_shard * num_local + within_BTX, P * num_local)  # others last
    key_A = key_BTX.reshape(-1)
    counts_PE = _sizes(key_A, P * num_local).reshape(P, num_local)
    counts_SPE = jax.lax.all_gather(counts_PE, "expert")  # of each source for each target
    average = experts_BTX.size * P * num_local / config.num_experts
    rows = -(-math.ceil(SLACK * average) // TILE) * TILE
    num_rounds = -(-counts_SPE.sum(axis=(0, 2)).max() // rows)
    # All devices run the same number of rounds, even those that share no expert: it is one program.
    num_rounds = jax.lax.pmax(num_rounds, tuple(jax.sharding.get_abstract_mesh().axis_names))
    plan = _Order.of(key_A, P * num_local + 1), counts_SPE
    one_round = functools.partial(_round, config=config, rows=rows)
    return _sum_of_rounds(one_round, num_rounds, plan, (x_BTD, weights_BTX, params))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_rounds(one_round, num_rounds, plan, args):
    """Returns sum_i one_round(i, plan, *args). The number of rounds is data, and JAX derives no gradient of such a loop."""

    def add(i, total):
        return total + one_round(i, plan, *args)

    return jax.lax.fori_loop(0, num_rounds, add, jnp.zeros_like(args[0]))


def _sum_backward(one_round, saved, grad):
    num_rounds, plan, args = saved

    def add(i, total):
        _, pull = jax.vjp(lambda *args: one_round(i, plan, *args), *args)
        return jax.tree.map(jnp.add, total, pull(grad))

    return None, None, jax.lax.fori_loop(0, num_rounds, add, jax.tree.map(jnp.zeros_like, args))


_sum_of_rounds.defvjp(lambda one_round, *saved: (_sum_of_rounds(one_round, *saved), saved), _sum_backward)


def _round(i, plan, x_BTD, weights_BTX, params, *, config, rows: int) -> jax.Array:
    """Runs round i: each device receives rows i R .. (i + 1) R of its share, ordered by source and expert, and returns them."""
    order, counts_SPE = plan
    num_local = counts_SPE.shape[2]
    me, window = jax.lax.axis_index("expert"), (i * rows, (i + 1) * rows)
    sizes_SP = counts_SPE.sum(axis=2)
    at_source_SP = jnp.cumsum(sizes_SP, axis=1) - sizes_SP  # where a target's rows begin in a source's order
    at_target_SP = jnp.cumsum(sizes_SP, axis=0) - sizes_SP  # where a source's rows begin in a target's
    begin_SP, end_SP = jnp.clip(at_target_SP, *window), jnp.clip(at_target_SP + sizes_SP, *window)
    now_SP = end_SP - begin_SP
    source_SP = at_source_SP + jnp.clip(begin_SP - at_target_SP, 0, sizes_SP)
    target_SP = begin_SP - window[0]

    sorted_AD = _spread(weights_BTX.shape[-1], x_BTD.reshape(-1, x_BTD.shape[-1]), order)
    received_RD = _ragged_all_to_all(sorted_AD, rows, source_SP[me], now_SP[me], target_SP[me], now_SP[:, me])

    counts = counts_SPE[:, me].reshape(-1)
    ends = jnp.clip(jnp.cumsum(counts), *window)
    counts = jnp.diff(ends, prepend=jnp.asarray(window[0], ends.dtype)[None])  # of this window, source-major
    index_R = jnp.arange(rows)
    group_R = jnp.repeat(jnp.arange(counts.size) % num_local, counts, total_repeat_length=rows)
    group_R = jnp.where(index_R < counts.sum(), group_R, num_local)
    by_expert = _Order.of(group_R, num_local + 1)
    group_sizes = counts.reshape(-1, num_local).sum(axis=0).astype(jnp.int32)
    rows_RD = _spread(1, received_RD, by_expert)
    out_RD = _ffn(rows_RD, group_R[by_expert.taken], group_sizes, params, config, all_inside=False)
    out_RD = _spread(1, out_RD, _Order(by_expert.put, by_expert.taken))

    A = weights_BTX.size
    returned_AD = _ragged_all_to_all(out_RD, A, target_SP[:, me], now_SP[:, me], source_SP[:, me], now_SP[me])
    return _combine(returned_AD, weights_BTX, order)


def _ragged_all_to_all(rows_AD, num_rows: int, from_P, sizes_P, to_P, receive_P) -> jax.Array:
    """Sends rows from_P[p] .. + sizes_P[p] to row to_P[p] of device p on the expert axis; zero where no row arrives."""
    empty = jnp.zeros((num_rows, rows_AD.shape[1]), rows_AD.dtype)
    if mesh_lib.platform() != "cpu":
        return jax.lax.ragged_all_to_all(rows_AD, empty, from_P, sizes_P, to_P, receive_P, axis_name="expert")
    most = min(rows_AD.shape[0], num_rows)
    index_1M = jnp.arange(most)[None]
    from_PM = jnp.minimum(from_P[:, None] + index_1M, rows_AD.shape[0] - 1)
    sent_PMD = jnp.where((index_1M < sizes_P[:, None])[..., None], rows_AD[from_PM], 0)
    received_PMD = jax.lax.all_to_all(sent_PMD, "expert", 0, 0)
    to_PM = jax.lax.all_to_all(to_P, "expert", 0, 0, tiled=True)[:, None] + index_1M
    to_PM = jnp.where(index_1M < receive_P[:, None], to_PM, num_rows)
    return empty.at[to_PM].set(received_PMD, mode="drop")
