"""The turned copy of a model's weights that a CPU decodes with (models/kernels/cpu_transposed.py).

It is made when weights are decoded with for the first time, and kept until others are. Prefill, which multiplies many rows,
uses the weights as they are: so a CPU holds those that are multiplied with twice.
"""

import weakref

import jax

from inference.engine import cpu_decode_attention
from models import config as config_lib
from models import transformer
from models.kernels import cpu_transposed, int8

MAX_BYTES = 2**31  # of weights that are worth a second copy


class TransposedWeights:
    """The copy of the weights that were decoded with last."""

    def __init__(self, model: config_lib.ModelConfig):
        self._fits = cpu_decode_attention.fits(model) and transformer.num_bytes(model) <= MAX_BYTES
        self._kept: tuple[list[weakref.ref], transformer.Params] = [], {}  # what it was made of, and the copy

    def of(self, params: transformer.Params) -> transformer.Params:
        """The same weights as a decode step is to have them."""
        if not self._fits or int8.is_quantized(params["embed"]):
            return params
        leaves = jax.tree.leaves(params)
        sources, made = self._kept
        # By each leaf: two versions may share some.
        if len(sources) != len(leaves) or any(s() is not leaf for s, leaf in zip(sources, leaves, strict=True)):
            self._kept, made = ([], {}), {}  # the old copy goes before the new one comes
            made = cpu_transposed.transpose(params)
            self._kept = [weakref.ref(leaf) for leaf in leaves], made
        return made
