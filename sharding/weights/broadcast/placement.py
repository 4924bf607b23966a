"""Places a pulled tree: in host memory as numpy arrays, or on devices as jax arrays with given shardings, now or later.

Each function returns the requests for `assemble.read` and the function that turns the arrays of a request into a leaf.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from sharding.weights.broadcast import assemble
from sharding.weights.format import chunks, manifest, tree

FILE_BYTES = 64 << 20  # of a version from which it is staged in a file, if the devices' memory is this host's
IN_FLIGHT_SHARE = 64  # of a version that is staged in a file, the part in memory meanwhile: 2 %
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


class _File:
    """A temporary file without a name, which is closed, and so deleted, with the last reference to it."""

    def __init__(self):
        self.raw = tempfile.TemporaryFile(buffering=0)

    def __del__(self):
        self.raw.close()


class Staged:
    """One verified tensor that waits on this host for its place on the devices, in memory or in a file."""

    def __init__(self, request: assemble.TensorRequest, place: Callable, file: _File | None = None):
        """`place` turns the arrays of `request` into a jax array. They wait in `file`, from its position on, if there is one."""
        self.shape, self.dtype = request.tensor.shape, chunks.dtype(request.tensor.dtype)
        self.is_finite = True  # no number is NaN or infinite
        self._request, self._place, self._file = request, place, file
        self._arrays, self._start = [], 0 if file is None else file.raw.tell()
        self._placed: jax.Array | None = None

    def add(self, arrays: list[np.ndarray]) -> "Staged":
        """Adds the next arrays of the request, or the next rows of one, and returns itself."""
        self.is_finite &= all(map(chunks.is_finite, arrays))
        if self._file is None:
            self._arrays += arrays
            return self
        for array in arrays:
            _whole(self._file.raw.write, array)
        return self

    def put(self) -> jax.Array:
        """Returns the tensor on its devices, the same array in each call. The first one frees the values on the host."""
        if self._placed is not None:
            return self._placed
        arrays, self._arrays, file, self._file = self._arrays, [], self._file, None
        if file is not None:
            file.raw.seek(self._start)
            for region in self._request.regions:
                arrays.append(assemble.empty([s.stop - s.start for s in region], self.dtype))
                _whole(file.raw.readinto, arrays[-1])
        self._placed = placed = self._place(self._request, arrays)
        return placed


def _whole(transfer: Callable[[memoryview], int], array: np.ndarray) -> None:
    """Writes an array to a file, or reads it, in as many calls as the system takes."""
    view = array.reshape(-1).view(np.uint8).data
    while view:
        if not (size := transfer(view)):
            raise OSError(f"the temporary file of new weights lacks {view.nbytes} bytes; free space under TMPDIR")
        view = view[size:]


def staged(target: manifest.Manifest, shardings: Any) -> tuple[*Placement, int]:
    """Returns the placement of `on_devices` with `Staged` leaves, which are put on the devices later, and a limit of bytes in flight.

    Staged leaves wait in host memory. On a CPU, where that is the devices' memory, too, large versions wait in an unnamed file, and are
    read a few rows at a time.
    """
    requests, place = on_devices(target, shardings)
    kinds = {device.platform for leaf in jax.tree.leaves(shardings) for device in leaf.device_set}
    num_bytes = sum(request.num_bytes for request in requests)
    if num_bytes < FILE_BYTES or kinds != {"cpu"}:
        return requests, lambda request, arrays: Staged(request, place).add(arrays), assemble.IN_FLIGHT_BYTES
    whole, limit = {request.names: request for request in requests}, num_bytes // IN_FLIGHT_SHARE
    file, leaves = _File(), {}

    def add(rows: assemble.TensorRequest, arrays: list[np.ndarray]) -> Staged:
        if rows.names not in leaves:
            leaves[rows.names] = Staged(whole[rows.names], place, file)
        return leaves[rows.names].add(arrays)

    return [rows for request in requests for rows in _by_rows(request, limit // 4)], add, limit


def _by_rows(request: assemble.TensorRequest, limit: int) -> Iterator[assemble.TensorRequest]:
    """Yields requests of a few rows each, of at most `limit` bytes if a row of chunks is not larger, in the order of their bytes."""
    if not request.num_bytes or not request.tensor.shape:
        yield request
        return
    for first, *others in request.regions:
        part = dataclasses.replace(request, regions=((slice(0, 1), *others),))
        step = max(1, limit // part.num_bytes // request.tensor.chunk[0]) * request.tensor.chunk[0]
        for start in range(first.start - first.start % step, first.stop, step):
            rows = slice(max(start, first.start), min(start + step, first.stop))
            yield dataclasses.replace(request, regions=((rows, *others),))


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
            raise ValueError(f"{text}; pass a Sharding, or ShapeDtypeStruct with one")

    leaves, _ = tree.flatten(shardings, check)
    unmatched = sorted({t.name for t in target.tensors} ^ set(leaves))
    if unmatched:
        text = f"tensors of shardings and version {target.version} differ in {unmatched[:8]}"
        raise ValueError(f"{text}; use that model's config")
    checked = {}
    for t in target.tensors:
        leaf = leaves[t.name]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            if (leaf.shape, leaf.dtype.name) != (t.shape, t.dtype):
                found = f"tensor {t.name!r} of version {target.version} is {t.dtype}{list(t.shape)}"
                found += f", but the model has {leaf.dtype.name}{list(leaf.shape)}"
                raise ValueError(f"{found}; use that model's config")
            leaf = leaf.sharding
        if jax.dtypes.canonicalize_dtype(chunks.dtype(t.dtype)) != chunks.dtype(t.dtype):  # jax would truncate silently
            raise ValueError(f"tensor {t.name!r} is {t.dtype}, which jax would narrow to 32 bits; set jax_enable_x64")
        try:
            leaf.shard_shape(t.shape)
        except ValueError as error:
            text = f"tensor {t.name!r} of shape {t.shape} does not fit its sharding: {error}; change the mesh"
            raise ValueError(text) from error
        checked[t.name] = leaf
    return checked
