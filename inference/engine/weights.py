"""The weights of a policy in a server: unchanged or in int8, on one device or over a mesh.

1. Unchanged weights are read straight to their devices, later versions to the host first. The layout is that of training
   (`sharding.rules`), but key heads that do not divide over `tensor` stay whole, with their fraction of the cache.
2. For int8 (models/kernels/int8.py) tensors are read into host memory, then copied to the devices and quantized one by one. So
   the devices never contain more than one full tensor, and deltas are applied to the host's copy.
3. A new version takes the place of the old one tensor by tensor (`Store.load`), so there is never a second one on the devices.

A server in int8 samples from another policy, close to the version that it names: a validator with the published weights
rejects its proofs. `/v1/models` reports the quantization.
"""

import dataclasses
import functools

import jax
import numpy as np

from inference.engine import cpu_weights
from models import config as config_lib
from models import transformer
from models.kernels import int8
from sharding import broadcast, rules

QUANTIZATIONS = ("none", "int8")


@dataclasses.dataclass(frozen=True)
class Store:
    """Describes how one server keeps the weights of its model: quantized or not, and their layout on its mesh."""

    model: config_lib.ModelConfig
    mesh: jax.sharding.Mesh
    quantization: str = "none"

    def __post_init__(self):
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantize = {self.quantization!r} is unknown; choose one of {', '.join(QUANTIZATIONS)}")

    @property
    def specs(self) -> transformer.Params:
        """The tree of `ParamSpec` (shape and type) of the weights as the server stores them, quantized or not."""
        plain = transformer.specs(self.model)
        return int8.specs(plain) if self.quantization == "int8" else plain

    @property
    def shardings(self) -> transformer.Params:
        """The tree of `NamedSharding` of the weights as stored. Raises ValueError if a dim does not divide over the mesh."""
        return rules.shardings(self.specs, self.mesh)

    @property
    def load_shardings(self) -> transformer.Params | None:
        """The shardings with which to read full weights; None if they are to be read as numpy arrays in host memory (int8)."""
        return self.shardings if self.quantization == "none" else None

    @property
    def abstract(self) -> transformer.Params:
        """The tree of `ShapeDtypeStruct` of the weights as stored, with their shardings."""
        return jax.tree.map(lambda x, s: x.update(sharding=s), rules.abstract(self.specs), self.shardings)

    def load(self, params: transformer.Params, old: transformer.Params | None = None) -> transformer.Params:
        """Returns full weights, of `load_shardings`, on the devices in the form that the server stores.

        Leaves may be jax arrays, numpy arrays, or staged ones of `broadcast.pull`. The arrays of `old` are deleted, each before
        its successor is placed: the devices never hold two versions. After an error in between, they hold none.
        """
        is_leaf = lambda x: rules.is_spec(x) or int8.is_quantized(x)  # noqa: E731
        specs, structure = jax.tree.flatten(self.specs, is_leaf=is_leaf)
        before = [None] * len(specs) if old is None else structure.flatten_up_to(old)
        loaded = []
        for row in zip(specs, *map(structure.flatten_up_to, (params, self.shardings)), before, strict=True):
            for array in jax.tree.leaves(row[-1]):
                if array is not row[1]:
                    array.delete()
                    if self.mesh.devices.flat[0].platform == "cpu":
                        cpu_weights.trim_memory(array.nbytes)
            loaded.append(_placed(*row[:-1]))
        return structure.unflatten(jax.block_until_ready(loaded))


def _placed(spec, weights, sharding) -> jax.Array | int8.Quantized:
    if int8.is_quantized(spec):
        full = jax.device_put(np.asarray(weights), sharding.values)
        return jax.block_until_ready(_quantize_to(spec.scale.shape, sharding)(full))  # before the next one is copied
    if isinstance(weights, broadcast.Staged):
        return weights.put()
    return weights if getattr(weights, "sharding", None) == sharding else jax.device_put(weights, sharding)


@functools.cache
def _quantize_to(scale_shape: tuple[int, ...], sharding: int8.Quantized):
    return jax.jit(functools.partial(int8.quantize, scale_shape=scale_shape), out_shardings=sharding)
