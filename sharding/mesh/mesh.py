"""The device mesh: five named axes over the available devices, and arrays handed from one mesh to another.

On a TPU the inner axes (tensor, context) get the fastest links, and `data` alone spans slices, which a slower network joins. Axes are `Auto`: the compiler derives most shardings.

The axes, outermost first:
  data     replicas of the parameters; gradients are summed over it (crosses slices and data centers)
  fsdp     the batch and every parameter are split over it
  expert   the experts of an MoE layer are split over it; elsewhere it is one more batch axis
  context  one sequence is split over it
  tensor   heads, ffn and vocabulary are split over it
"""

import importlib.util
import logging
import math
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "expert", "context", "tensor")
_IN_USE = "end the process that uses it, if there is one, or set JAX_PLATFORMS=cpu to run on the CPU"
_REMEDY = "change config.mesh, or --mesh of a server (one axis may be -1 and takes the remaining devices)"


def devices() -> list[Any]:
    """Returns `jax.devices()`. Raises ValueError in one line if this machine or JAX_PLATFORMS has an accelerator that JAX cannot use.

    An accelerator whose plugin is not installed is only a line in the log.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    heard, level = _Heard(), logger.level
    logger.addFilter(heard)
    logger.setLevel(logging.INFO)
    try:
        found = jax.devices()
    except RuntimeError as error:
        raise ValueError(f"{_line(error)}; {_IN_USE}") from error
    except AssertionError as error:  # JAX skips "cuda" on a machine without a GPU, and then has no backend
        found = f"JAX_PLATFORMS = {jax.config.jax_platforms!r}, and this machine has no NVIDIA GPU that JAX sees"
        raise ValueError(f"{found}; check the driver with nvidia-smi, or set JAX_PLATFORMS=cpu") from error
    finally:
        logger.removeFilter(heard)
        logger.setLevel(level)
    for text in heard.warnings:
        if text.startswith("CUDA backend failed to initialize"):
            raise ValueError(f"{_line(text)}; {_IN_USE}")
        if text.startswith("A Google TPU may be present") and importlib.util.find_spec("libtpu"):
            raise ValueError(f"{_line(heard.failures.get('tpu', text))}; {_IN_USE}")
        logger.warning(text)
    return found


def create(sizes: dict[str, int], devices=None) -> jax.sharding.Mesh:
    """Returns a device mesh with the five axes `AXES`.

    Args:
      sizes: size of each axis by name; a missing axis has size 1, and one axis may be -1 (the remaining devices).
      devices: the devices to use; all of them when None.

    Raises:
      ValueError: an unknown axis, sizes whose product is not the number of devices, or axes that do not fit a TPU's torus.
    """
    devices = jax.devices() if devices is None else devices
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise ValueError(f"mesh axis {unknown[0]!r} does not exist; use one of {', '.join(AXES)}")
    shape = _fill([int(sizes.get(axis, 1)) for axis in AXES], len(devices))
    is_torus = devices[0].platform == "tpu"
    device_array = _on_torus(shape, devices) if is_torus else np.asarray(devices).reshape(shape)
    return jax.sharding.Mesh(device_array, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def parse(text: str) -> dict[str, int]:
    """Returns the axis sizes in a text such as "tensor=4,data=-1". Raises ValueError for an entry that is not axis=size."""
    sizes = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not re.fullmatch(r"-?\d{1,9}", size):
            raise ValueError(f"mesh {text!r} has entry {part!r}; write axis=size once per axis of {', '.join(AXES)}")
        sizes[axis] = int(size)
    return sizes


def platform() -> str:
    """Returns the platform ("cpu", "gpu", "tpu") that the function being traced will run on: that of the current mesh, if set."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def hand_over(tree: Any, targets: Any) -> Any:
    """Returns copies of the arrays in `tree` with the dtypes and shardings of `targets`, a tree of `ShapeDtypeStruct`. Blocks.

    From the learner's mesh to an engine on devices of this process, never through files; one leaf after another, so that besides both
    trees at most one is in memory. The copies share no memory with `tree`, whose arrays a train step may donate. All hosts of `tree` must
    call it together: each gets a whole leaf, since it has an engine of its own.
    """
    return jax.tree.map(_handed_over, tree, targets)


def _handed_over(leaf: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    if leaf.dtype != target.dtype:
        leaf = leaf.astype(target.dtype)
    if not leaf.is_fully_addressable:
        leaf = _gathered(leaf)
    return jax.block_until_ready(jax.device_put(leaf, target.sharding, may_alias=False))


def _gathered(leaf: jax.Array) -> jax.Array:
    """Returns an array of all hosts as an array of this process, whole on each of its devices that `leaf` is on."""
    devices = sorted(leaf.sharding.device_set, key=lambda device: device.id)
    everywhere = jax.sharding.Mesh(np.array(devices), ("device",))
    whole = jax.device_put(leaf, NamedSharding(everywhere, PartitionSpec()))
    parts = [shard.data for shard in whole.addressable_shards]
    own = jax.sharding.Mesh(np.array([part.device for part in parts]), ("device",))
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(own, PartitionSpec()), parts)


def _on_torus(shape: list[int], devices) -> np.ndarray:
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if shape[0] % num_slices:
        found = f"mesh {_format(shape)} has data={shape[0]} over {num_slices} slices, which only this axis spans"
        raise ValueError(f"{found}; set mesh.data to {num_slices}, or to a multiple of it")
    try:
        if num_slices > 1:
            inside, across = [shape[0] // num_slices, *shape[1:]], [num_slices] + [1] * (len(shape) - 1)
            return mesh_utils.create_hybrid_device_mesh(inside, across, devices)
        return mesh_utils.create_device_mesh(shape, devices)
    except (NotImplementedError, AssertionError):  # the latter: devices that are not a cuboid
        torus = "x".join(str(1 + max(device.coords[dim] for device in devices)) for dim in range(3))
        text = f"mesh {_format(shape)} cannot be laid out on the torus {torus}"
        raise ValueError(f"{text}; axes must be products of dims; {_REMEDY}") from None


def _fill(shape: list[int], num_devices: int) -> list[int]:
    """Returns `shape` with a -1 replaced by the remaining devices. Raises ValueError unless the product is `num_devices`."""
    text = _format(shape)
    if shape.count(-1) > 1 or any(size == 0 or size < -1 for size in shape):
        raise ValueError(f"mesh {text} is malformed; make every axis a positive size; at most one is -1")
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape and num_devices % known == 0:
        shape = [num_devices // known if size == -1 else size for size in shape]
    if math.prod(shape) != num_devices:
        raise ValueError(f"mesh {text} does not fit {num_devices} device(s), which must be its product; {_REMEDY}")
    return shape


def _format(shape: list[int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))


class _Heard(logging.Filter):
    """Keeps the messages of JAX about backends: {platform: error} of those that failed, and warnings."""

    def __init__(self):
        super().__init__()
        self.failures: dict[str, str] = {}
        self.warnings: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Records a message of JAX; returns True for errors alone, which are shown."""
        text = record.getMessage()
        if text.startswith("Unable to initialize backend '"):
            self.failures[text.split("'")[1]] = text
        elif record.levelno == logging.WARNING:
            self.warnings.append(text)
        return record.levelno > logging.WARNING


def _line(error: object) -> str:
    return " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
