"""Maps logical dims of parameters and activations to mesh axes.

`RULES` maps the logical name of each dim (of a `ParamSpec`, or given to `constrain`) to mesh axes.
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
MAY_BE_WHOLE = ("kv_heads",)  # dims that a mesh axis splits only if it divides them: models have few key heads
COPIES = ("layers", "experts")  # dims that count independent parameters
VECTORS = ("norm", "heads", "kv_heads", "head_dim")  # a parameter with only these dims is a scale or a bias


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The declaration of one model parameter, from which its shape, sharding and initial value are derived."""

    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str, ...]  # one name of RULES per dim
    init: Callable  # (key, shape, dtype) -> array

    def __post_init__(self):
        assert len(self.shape) == len(self.logical_axes), self


def is_spec(leaf) -> bool:
    """Returns True if `leaf` is a ParamSpec. Passed as `is_leaf` to functions over trees of ParamSpecs."""
    return isinstance(leaf, ParamSpec)


def is_matrix(spec: ParamSpec) -> bool:
    """Returns True if the parameter, without its dims for layers and experts, is a matrix; False for a scale or a bias."""
    dims = [axis for axis in spec.logical_axes if axis not in COPIES]
    return len(dims) > 1 and any(axis not in VECTORS for axis in dims)


def matrix_dims(spec: ParamSpec) -> tuple[int, int]:
    """Returns the positions of a kernel's first input and first output dim: (0, 1) for a query kernel [D, H, C], which maps D to H x C.

    Dims before the inputs count copies (layers, experts). If the axis `model` is last, it is the only output: the output kernel
    [H, C, D] gives (0, 2).
    """
    inputs = sum(axis in COPIES for axis in spec.logical_axes)
    assert not set(spec.logical_axes[inputs:]) & set(COPIES), spec  # copies lead
    return inputs, len(spec.shape) - 1 if spec.logical_axes[-1] == "model" else inputs + 1


def shardings(specs, mesh: jax.sharding.Mesh):
    """Returns a tree of `NamedSharding` on `mesh`, one per `ParamSpec` of the tree `specs`.

    Raises ValueError for a dim that is not divisible by its mesh axes, other than those of `MAY_BE_WHOLE`.
    """

    def sharding(path, spec):
        axes = dim_axes(mesh, spec.shape, spec.logical_axes)
        for at, (dim, name) in enumerate(zip(spec.shape, spec.logical_axes, strict=True)):
            ways = _num_ways(mesh, axes[at])
            if dim % ways:
                raise ValueError(
                    f"parameter {jax.tree_util.keystr(path)} has {name} = {dim}, which is not divisible by the "
                    f"{ways}-way mesh axis {'/'.join(axes[at])}; change config.model or config.mesh"
                )
        used = [axis for names in axes for axis in names]
        assert len(used) == len(set(used)), f"{path}: one mesh axis on two dims: {spec.logical_axes}"
        return NamedSharding(mesh, _spec(axes))

    return jax.tree_util.tree_map_with_path(sharding, specs, is_leaf=is_spec)


def dim_axes(mesh, shape: tuple[int, ...], logical_axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the names of the mesh axes that split each dim of a parameter."""
    axes = [_present(mesh, RULES[name]) for name in logical_axes]
    for at, (dim, name) in enumerate(zip(shape, logical_axes, strict=True)):
        if name in MAY_BE_WHOLE and dim % _num_ways(mesh, axes[at]):
            axes[at] = ()
    if EXPERTS in logical_axes:
        at = logical_axes.index(EXPERTS)
        spread = _present(mesh, (*RULES[EXPERTS], *RULES[EXPERT_FFN]))
        if shape[at] % _num_ways(mesh, spread) == 0:
            axes = [() if name == EXPERT_FFN else names for name, names in zip(logical_axes, axes, strict=True)]
            axes[at] = spread
    return axes


def partition(mesh, shape: tuple[int, ...], logical_axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the `PartitionSpec` of one parameter with these logical axes. Does not check that dims are divisible."""
    return _spec(dim_axes(mesh, shape, logical_axes))


def fitting(mesh, shape: tuple[int, ...], logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the `PartitionSpec` of an activation or a cache. Does not split a dim named None, or one not divisible."""
    axes = [() if name is None else _present(mesh, RULES[name]) for name in logical_axes]
    return _spec([() if dim % _num_ways(mesh, names) else names for dim, names in zip(shape, axes, strict=True)])


def abstract(specs, mesh: jax.sharding.Mesh | None = None):
    """Returns a tree of `ShapeDtypeStruct`, one per `ParamSpec` of the tree `specs`, with shardings if a mesh is given."""
    plain = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, is_leaf=is_spec)
    if mesh is None:
        return plain
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), plain, shardings(specs, mesh))


def cast(params, specs):
    """Returns arrays in the dtypes of their specs."""
    return jax.tree.map(lambda spec, x: x.astype(spec.dtype), specs, params, is_leaf=is_spec)


def batch_sharding(mesh: jax.sharding.Mesh, ndim: int, num_whole: int = 0) -> NamedSharding:
    """Returns the sharding of a batch array of `ndim` dims, [..., B, T] and then `num_whole` dims that are not split.

    Rows (B) are split over every batch axis of the mesh, tokens (T) over `context`. A scalar is replicated.
    """
    last = [_present(mesh, RULES["batch"]), _present(mesh, RULES["sequence"])] if ndim else []
    return NamedSharding(mesh, _spec([()] * (ndim - num_whole - 2) + last))


def several_devices() -> jax.sharding.AbstractMesh | None:
    """Returns the mesh of the current context, or None if none is set or it has a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or math.prod(mesh.shape.values()) == 1 else mesh


def num_batch_shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Returns the number of shards that the rows of a batch are split into; the number of rows must be divisible by it."""
    return _num_ways(mesh, _present(mesh, RULES["batch"]))


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Returns the activation `x`, constrained to the sharding of its logical axes; unchanged without several devices."""
    mesh = several_devices()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, fitting(mesh, x.shape, logical_axes))


def _num_ways(mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _present(mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of `axes` that have more than one device in the mesh."""
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def _spec(axes: list[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in axes))
