"""The transposed copy of a model's weights that decoding on a CPU uses (models/kernels/cpu_transposed.py).

It is made at the first decode call with new weights and kept until the next ones. Prefill, which multiplies many rows, uses the
original weights: so a CPU keeps most weights twice.
"""

import ctypes
import gc
import weakref

import jax

from inference.engine import cpu_decode_attention
from models import config as config_lib
from models import transformer
from models.kernels import cpu_transposed, int8

MAX_BYTES = 2**31  # of weights that are worth a second copy
MIN_TRIM_BYTES = 2**20


def trim_memory(num_bytes: int) -> None:
    """Returns memory to the operating system after `num_bytes` were freed on a CPU; does nothing for a few.

    JAX drops its references to numpy arrays in garbage collections, and malloc keeps pieces that the next weights may not fit.
    """
    if num_bytes >= MIN_TRIM_BYTES:
        gc.collect(0)
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
            trim(0)


class TransposedWeights:
    """Makes the transposed copy of weights for decoding on a CPU; keeps only the copy made last."""

    def __init__(self, model: config_lib.ModelConfig):
        self._fits = cpu_decode_attention.fits(model) and transformer.num_bytes(model) <= MAX_BYTES
        self._kept: tuple[list[weakref.ref], transformer.Params] = [], {}  # the original leaves, and the copy

    def of(self, params: transformer.Params) -> transformer.Params:
        """Returns the transposed copy of `params`, made if new; `params` itself if too large, quantized, or not for one CPU device."""
        if not self._fits or int8.is_quantized(params["embed"]):
            return params
        leaves = jax.tree.leaves(params)
        sources, made = self._kept
        # Compared leaf by leaf: two versions may share some.
        if len(sources) != len(leaves) or any(s() is not leaf for s, leaf in zip(sources, leaves, strict=True)):
            self._kept, made = ([], {}), {}  # frees the old copy before the new one is made
            trim_memory(sum(leaf.nbytes for leaf in leaves))
            made = cpu_transposed.transpose(params)
            self._kept = [weakref.ref(leaf) for leaf in leaves], made
        return made
