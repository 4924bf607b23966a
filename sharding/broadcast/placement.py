"""Places a pulled tree: in host memory as numpy arrays, or on devices as jax arrays with given shardings.

Both functions return the requests for `assemble.read` and the function that turns the arrays of a request into a leaf.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sharding.broadcast import assemble
from sharding.format import chunks, manifest, tree

Placement = tuple[list[assemble.TensorRequest], Callable[[assemble.TensorRequest, list[np.ndarray]], Any]]


def on_host(target: manifest.Manifest) -> Placement:
    """Returns (read requests, function from a request and its arrays to a leaf) for whole numpy arrays on this host."""
    requests = [
        assemble.TensorRequest(t, (tuple(slice(0, n) for n in t.shape),), tuple(names)) for t, names in _leaves(target)
    ]
    return requests, lambda request, arrays: arrays[0]


def on_devices(target: manifest.Manifest, shardings: Any) -> Placement:
    """Returns (read requests, function from a request and its arrays to a leaf) for jax arrays with the given shardings.

    Only the regions of this process's devices are requested. Raises ValueError if a tensor does not fit its sharding.
    """
    checked = _checked_shardings(target, shardings)
    requests, places = [], {}
    for t, names in _leaves(target):
        by_sharding = collections.defaultdict(list)
        for name in names:
            by_sharding[checked[name]].append(name)
        for sharding, same in by_sharding.items():
            indices = sharding.addressable_devices_indices_map(t.shape)
            devices = {
                device: tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, t.shape, strict=True))
                for device, index in indices.items()
            }
            regions = tuple({tuple((s.start, s.stop) for s in region): region for region in devices.values()}.values())
            request = assemble.TensorRequest(t, regions, tuple(same))
            places[request.names] = sharding, devices
            requests.append(request)

    def place(request: assemble.TensorRequest, arrays: list[np.ndarray]) -> jax.Array:
        sharding, devices = places[request.names]
        values = []
        for device, region in devices.items():
            single = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            values.append(jax.device_put(arrays[request.regions.index(region)], single))
        return jax.make_array_from_single_device_arrays(request.tensor.shape, sharding, values)

    return requests, place


def _leaves(target: manifest.Manifest) -> list[tuple[manifest.Tensor, list[str]]]:
    """Returns (tensor, names of all leaves that are this same array) for each tensor that is stored, not tied."""
    names = collections.defaultdict(list)
    for t in target.tensors:
        names[t.tied_to or t.name].append(t.name)
    return [(t, names[t.name]) for t in target.tensors if t.tied_to is None]


def _checked_shardings(target: manifest.Manifest, shardings: Any) -> dict[str, jax.sharding.Sharding]:
    """Returns the shardings by tensor name. Raises ValueError unless each fits the shape and dtype of its tensor."""

    def check(name: str, leaf: Any) -> None:
        is_abstract = isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
        if not is_abstract and not isinstance(leaf, jax.sharding.Sharding):
            text = f"leaf {name!r} of shardings is a {type(leaf).__name__}"
            raise ValueError(f"{text}: pass a Sharding, or ShapeDtypeStruct with one")

    leaves, _ = tree.flatten(shardings, check)
    unmatched = sorted({t.name for t in target.tensors} ^ set(leaves))
    if unmatched:
        text = f"tensors of shardings and version {target.version} differ in {unmatched[:8]}"
        raise ValueError(f"{text}: use that model's config")
    checked = {}
    for t in target.tensors:
        leaf = leaves[t.name]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            if (leaf.shape, leaf.dtype.name) != (t.shape, t.dtype):
                found = f"tensor {t.name!r} of version {target.version} is {t.dtype}{list(t.shape)}"
                found += f", but the model has {leaf.dtype.name}{list(leaf.shape)}"
                raise ValueError(f"{found}: use that model's config")
            leaf = leaf.sharding
        if jax.dtypes.canonicalize_dtype(chunks.dtype(t.dtype)) != chunks.dtype(t.dtype):  # jax would truncate silently
            raise ValueError(f"tensor {t.name!r} is {t.dtype}, which jax would narrow to 32 bits: set jax_enable_x64")
        try:
            leaf.shard_shape(t.shape)
        except ValueError as error:
            text = f"tensor {t.name!r} of shape {t.shape} does not fit its sharding: {error}: change the mesh"
            raise ValueError(text) from error
        checked[t.name] = leaf
    return checked
