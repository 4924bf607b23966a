"""Gathers arrays that the `fsdp` axis splits, and sums their gradients; in two steps where the axis fills a TPU slice of three dims.

There the TPU compiler has neither an all-gather nor a reduce-scatter over the axis: it reduces whole arrays, padded with zeros, which
sends twice the bytes. It has both over the devices of one dim of the torus, and over those of the other dims together. The axis
counts the last dim first, so the devices of that dim are neighbors: groups of `near` devices, each with a part of the array. The
first step gathers within these groups, the second between them. Gradients take the steps in the other order.
"""

import functools
import math

import jax
from jax.sharding import PartitionSpec

from sharding.mesh import rules

AXIS = "fsdp"
LARGE = 64  # devices: on fewer, the compiler needs no steps


def near() -> int:
    """Returns the number of devices that the first of two gathering steps joins; 1 if the axis needs one step.

    Two steps are for a TPU slice of three dims that the axis fills: the first joins the devices along the last dim.
    """
    mesh = jax.sharding.get_abstract_mesh()
    size, device = mesh.shape.get(AXIS, 1), mesh.abstract_device
    is_alone = size * mesh.shape.get("data", 1) == math.prod(mesh.shape.values())
    is_3d = device is not None and device.platform == "tpu" and "lite" not in device.device_kind
    if size < LARGE or not is_alone or not is_3d:
        return 1
    return 2 ** math.ceil(math.log2(size) / 3)  # of 4x4x4, 4x4x8, 4x8x8, ...: the last dim is the largest


def gather(x: jax.Array, dim: int) -> jax.Array:
    """Returns an array whole, given its part of `dim` on each device of the axis. Runs inside `shard_map`, as do its gradients."""
    for groups in _steps():
        x = jax.lax.all_gather(x, AXIS, axis=dim, tiled=True, axis_index_groups=groups)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_as(dtype: jax.typing.DTypeLike, dim: int, x: jax.Array) -> jax.Array:
    """Returns `gather` of an array cast to `dtype`. The gradient is summed in the array's own dtype."""
    return gather(x.astype(dtype), dim)


# The backward pass needs the dtype of the array alone, which an empty part of it has.
gather_as.defvjp(
    lambda dtype, dim, x: (gather_as(dtype, dim, x), x[:0]), lambda _, dim, x, out: (scatter(out.astype(x.dtype), dim),)
)


def scatter(x: jax.Array, dim: int) -> jax.Array:
    """Returns this device's part of `dim` of the sum over the axis. Runs inside `shard_map`."""
    for groups in reversed(_steps()):
        x = jax.lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return x


def whole(x: jax.Array, dim: int, *others: str | None) -> jax.Array:
    """Returns an array whole on each device of the axis, which splits its dim `dim`. `others` are the mesh axes of its first dims."""
    ins = [*others, *[None] * (x.ndim - len(others))]
    outs, ins[dim] = tuple(ins), (ins[dim], AXIS) if ins[dim] else AXIS
    step = functools.partial(gather, dim=dim)
    return jax.shard_map(step, in_specs=PartitionSpec(*ins), out_specs=PartitionSpec(*outs), check_vma=False)(x)


def summed(function, x: jax.Array, y: jax.Array, dim: int, ndim: int) -> jax.Array:
    """Returns the sum over devices of `function(x, y)`, where each device has its rows of x and y. The axis splits dim `dim` of the `ndim` dims of the result."""
    rows = PartitionSpec(rules.RULES["batch"])

    def local(x, y):
        part = scatter(function(x, y), dim)
        # A sum over one device would be a copy.
        return jax.lax.psum(part, "data") if jax.lax.axis_size("data") > 1 else part

    spec = PartitionSpec(*(AXIS if n == dim else None for n in range(ndim)))
    return jax.shard_map(local, in_specs=(rows, rows), out_specs=spec, check_vma=False)(x, y)


def _steps() -> list[list[list[int]] | None]:
    size, inner = jax.lax.axis_size(AXIS), near()
    if inner == 1:
        return [None]
    firsts = range(0, size, inner)
    return [[[a + b for b in range(inner)] for a in firsts], [[a + b for a in firsts] for b in range(inner)]]
