"""What a server keeps of a policy's weights: as they are or in int8, on one device or over its mesh.

1. As they are, every tensor is read straight into its place. The layout is that of training (`sharding.rules`), but key heads
   that do not divide over `tensor` stay whole, with their part of the cache: more devices than key heads can serve a model.
2. In int8 (models/kernels/int8.py) tensors are read into the memory of the host, and go from there one by one: to the devices, to
   integers. So the devices never hold more of the full weights than one tensor, and the host keeps what deltas add to.

A server in int8 is another policy than the one whose version it names: near it, not it. It says so (/v1/models), its
log-probabilities and proofs are of what ran, and a validator that replays them with the published weights refuses them.
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
    """How one server keeps the weights of its model."""

    model: config_lib.ModelConfig
    mesh: jax.sharding.Mesh
    quantization: str = "none"

    def __post_init__(self):
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantize = {self.quantization!r} is unknown; choose one of {', '.join(QUANTIZATIONS)}")

    @property
    def specs(self) -> transformer.Params:
        """The tree of `ParamSpec` of what is kept."""
        plain = transformer.specs(self.model)
        return int8.specs(plain) if self.quantization == "int8" else plain

    @property
    def shardings(self) -> transformer.Params:
        """The tree of `NamedSharding` of what is kept; ValueError names a dim that does not divide."""
        return rules.shardings(self.specs, self.mesh, or_whole=("kv_heads",))

    @property
    def load_shardings(self) -> transformer.Params | None:
        """Where a reader is to put the full weights; None: into the memory of the host, as numpy arrays."""
        return self.shardings if self.quantization == "none" else None

    def keep(self, params: transformer.Params) -> transformer.Params:
        """What is kept of full weights that lie where `load_shardings` says."""
        if self.quantization == "none":
            return params
        return jax.tree.map(_kept, self.specs, params, self.shardings, is_leaf=_is_kept)


def shardings(model: config_lib.ModelConfig, mesh: jax.sharding.Mesh) -> transformer.Params:
    """Of weights that are kept as they are."""
    return Store(model, mesh).shardings


def _is_kept(leaf) -> bool:
    return rules.is_spec(leaf) or int8.is_quantized(leaf)


def _kept(spec, weights: np.ndarray, sharding) -> jax.Array | int8.Quantized:
    if not int8.is_quantized(spec):
        return jax.device_put(np.asarray(weights), sharding)
    kept = _quantize(spec.scale.shape, sharding)(jax.device_put(np.asarray(weights), sharding.values))
    return jax.block_until_ready(kept)  # or the next full tensors would arrive before this one is gone


@functools.cache
def _quantize(scale_shape: tuple[int, ...], sharding: int8.Quantized):
    """One program per shape and layout."""
    return jax.jit(functools.partial(int8.quantize, scale_shape=scale_shape), out_shardings=sharding)
