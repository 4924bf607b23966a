"""The turned copy of a model's weights that a CPU decodes with (models/turned.py).

It is made when weights are decoded with for the first time, and kept until others are. Prefill, which multiplies many rows,
uses the weights as they are: so a CPU holds those that are multiplied with twice.
"""

import weakref

import jax

from inference import decode_attention
from models import config as config_lib
from models import quantized, transformer, turned

MAX_BYTES = 2**31  # of weights that are worth a second copy


class TurnedWeights:
    """The copy of the weights that were decoded with last."""

    def __init__(self, model: config_lib.ModelConfig):
        num_bytes = transformer.num_params(model) * jax.numpy.dtype(model.param_dtype).itemsize
        self._fits = decode_attention.fits(model) and num_bytes <= MAX_BYTES
        self._sources: list[weakref.ref] = []
        self._turned: transformer.Params = {}

    def of(self, params: transformer.Params) -> transformer.Params:
        """The same weights as a decode step is to have them."""
        if not self._fits or quantized.is_quantized(params["embed"]):
            return params
        leaves = jax.tree.leaves(params)
        # By each leaf: two versions may share some.
        if len(leaves) != len(self._sources) or any(
            s() is not leaf for s, leaf in zip(self._sources, leaves, strict=True)
        ):
            self._turned = {}  # the old copy goes before the new one comes
            self._turned = turned.turn(params)
            self._sources = [weakref.ref(leaf) for leaf in leaves]
        return self._turned
