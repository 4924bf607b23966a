"""Maps logical dims of parameters and activations to mesh axes.

1. A model declares each parameter once, as a `ParamSpec` with a logical name per dim.
2. `RULES` maps each logical name to mesh axes; `shardings` turns a tree of specs into a tree of `NamedSharding`, and raises an
   error naming the parameter if a dim is not divisible.
3. `constrain` sets the sharding of an activation by the same names; without a mesh it does nothing, so that the same model
   function runs on one device.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

# logical dim -> mesh axes. `batch` includes the expert axis: outside MoE layers its devices have different rows, so that no
# device is idle there.
RULES = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("context",),
    "layers": (),
    "model": ("fsdp",),  # parameters only; `model` of an activation is not split
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "expert_ffn": ("tensor",),
    "router": (),
    "norm": (),
    "rank": (),  # of LoRA adapters
}
# Experts are split over the tensor axis, too, if it divides their number, and their ffn then stays whole: a quarter of an ffn
# of 1,408 would be 352 columns, not a multiple of a TPU register's 128, and its stack would be laid out anew at every call.
EXPERTS, EXPERT_FFN = "experts", "expert_ffn"
COPIES = ("layers", "experts")  # dims that count independent parameters
VECTORS = ("norm", "heads", "kv_heads", "head_dim")  # a parameter with only these dims is a scale or a bias


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The declaration of one parameter, from which its shape, its sharding, and its initial value are derived."""

    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str, ...]  # one name of RULES per dim
    init: Callable  # (key, shape, dtype) -> array

    def __post_init__(self):
        assert len(self.shape) == len(self.logical_axes), self


def is_spec(leaf) -> bool:
    """Returns True for a ParamSpec: the `is_leaf` of trees of specs."""
    return isinstance(leaf, ParamSpec)


def is_matrix(spec: ParamSpec) -> bool:
    """Returns True if the parameter of one layer or expert is a matrix, and False for a scale or a bias."""
    dims = [axis for axis in spec.logical_axes if axis not in COPIES]
    return len(dims) > 1 and any(axis not in VECTORS for axis in dims)


def shardings(specs, mesh: jax.sharding.Mesh, *, or_whole: tuple[str, ...] = ()):
    """Returns the tree of `NamedSharding` for a tree of `ParamSpec`.

    Raises ValueError for a dim that is not divisible by its mesh axes; dims named in `or_whole` stay whole instead.
    """

    def sharding(path, spec):
        axes = _axes(mesh, spec.shape, spec.logical_axes)
        for at, name in enumerate(spec.logical_axes):
            if name in or_whole and not _divides(mesh, spec.shape[at], axes[at]):
                axes[at] = ()
        for dim, name, mesh_axes in zip(spec.shape, spec.logical_axes, axes, strict=True):
            if not _divides(mesh, dim, mesh_axes):
                ways = math.prod(mesh.shape[axis] for axis in mesh_axes)
                raise ValueError(
                    f"parameter {jax.tree_util.keystr(path)} has {name} = {dim}, which is not divisible by the "
                    f"{ways}-way mesh axis {'/'.join(mesh_axes)}: change config.model or config.mesh"
                )
        used = [axis for mesh_axes in axes for axis in mesh_axes]
        assert len(used) == len(set(used)), f"{path}: one mesh axis on two dims: {spec.logical_axes}"
        return NamedSharding(mesh, PartitionSpec(*(_entry(a) for a in axes)))

    return jax.tree_util.tree_map_with_path(sharding, specs, is_leaf=is_spec)


def partition(mesh, shape: tuple[int, ...], logical_axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the partition of one parameter, as in `shardings`."""
    return PartitionSpec(*(_entry(axes) for axes in _axes(mesh, shape, logical_axes)))


def fitting(mesh, shape: tuple[int, ...], logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the partition of an activation or a cache. A dim that is not divisible stays whole, as does one named None."""
    axes = [() if name is None else _present(mesh, RULES[name]) for name in logical_axes]
    fits = (dim_axes if _divides(mesh, dim, dim_axes) else () for dim, dim_axes in zip(shape, axes, strict=True))
    return PartitionSpec(*(_entry(dim_axes) for dim_axes in fits))


def abstract(specs, mesh: jax.sharding.Mesh | None = None):
    """Returns the tree of `ShapeDtypeStruct` for a tree of `ParamSpec`, with shardings if a mesh is given."""
    if mesh is None:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, is_leaf=is_spec)
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        specs,
        shardings(specs, mesh),
        is_leaf=is_spec,
    )


def batch_sharding(mesh: jax.sharding.Mesh, ndim: int, num_whole: int = 0) -> NamedSharding:
    """Returns the sharding of a `[..., B, T]` batch: rows over every batch axis, tokens over `context`; a scalar is replicated.

    The last `num_whole` dims, which follow T, are not split.
    """
    if ndim == 0:
        return NamedSharding(mesh, PartitionSpec())
    last = _entry(_present(mesh, RULES["batch"])), _entry(_present(mesh, RULES["sequence"]))
    return NamedSharding(mesh, PartitionSpec(*[None] * (ndim - num_whole - 2), *last))


def several_devices() -> jax.sharding.AbstractMesh | None:
    """Returns the current mesh, or None without one or with a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or math.prod(mesh.shape.values()) == 1 else mesh


def num_batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of shards of a batch. The number of rows must be a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in _present(mesh, RULES["batch"]))


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Returns `x` with the sharding of `fitting` for its logical names. Without a mesh, returns it unchanged."""
    mesh = several_devices()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, fitting(mesh, x.shape, logical_axes))


def _axes(mesh, shape, logical_axes) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dim of a parameter."""
    axes = [_present(mesh, RULES[name]) for name in logical_axes]
    if EXPERTS in logical_axes:
        at = logical_axes.index(EXPERTS)
        spread = _present(mesh, (*RULES[EXPERTS], *RULES[EXPERT_FFN]))
        if shape[at] % math.prod(mesh.shape[axis] for axis in spread) == 0:
            axes[at] = spread
            axes = [() if name == EXPERT_FFN else dim_axes for name, dim_axes in zip(logical_axes, axes, strict=True)]
    return axes


def _divides(mesh, dim: int, axes: tuple[str, ...]) -> bool:
    return dim % math.prod(mesh.shape[axis] for axis in axes) == 0


def _present(mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Drops axes of size 1, which change nothing."""
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def _entry(axes: tuple[str, ...]):
    return None if not axes else axes[0] if len(axes) == 1 else axes
