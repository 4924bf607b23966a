"""The weights of a policy in a server: unchanged or in int8, on one device or over a mesh.

1. Unchanged weights are read straight to their devices. The layout is that of training (`sharding.rules`), but key heads that
   do not divide over `tensor` stay whole, with their fraction of the cache.
2. For int8 (models/kernels/int8.py) tensors are read into host memory, then copied to the devices and quantized one by one. So
   the devices never contain more than one full tensor, and deltas are applied to the host's copy.

A server in int8 samples from another policy, close to the version that it names: a validator with the published weights
rejects its proofs. `/v1/models` reports the quantization.
"""

import dataclasses
import functools

import jax
import numpy as np

from models import config as config_lib
from models import transformer
from models.kernels import int8
from sharding import rules

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

    def keep(self, params: transformer.Params) -> transformer.Params:
        """Converts full weights, read with `load_shardings`, to the form that the server stores, and returns that."""
        if self.quantization == "none":
            return params
        return jax.tree.map(
            _quantized, self.specs, params, self.shardings, is_leaf=lambda x: rules.is_spec(x) or int8.is_quantized(x)
        )


def _quantized(spec, weights: np.ndarray, sharding) -> jax.Array | int8.Quantized:
    if not int8.is_quantized(spec):
        return jax.device_put(np.asarray(weights), sharding)
    full = jax.device_put(np.asarray(weights), sharding.values)
    return jax.block_until_ready(_quantize_to(spec.scale.shape, sharding)(full))  # before the next one is copied


@functools.cache
def _quantize_to(scale_shape: tuple[int, ...], sharding: int8.Quantized):
    return jax.jit(functools.partial(int8.quantize, scale_shape=scale_shape), out_shardings=sharding)
