"""Decides on the form of a server's weights on a CPU, and returns the memory of old ones to the operating system."""

import ctypes
import gc

import jax

from models import config as config_lib

MIN_TRIM_BYTES = 2**20


def are_output_major(model: config_lib.ModelConfig, mesh: jax.sharding.Mesh) -> bool:
    """Returns True if a server on `mesh` keeps its matrices as `Transposed`: on one CPU device, and unless layers are stacked."""
    return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" and not model.scan_layers


def trim_memory(num_bytes: int) -> None:
    """Returns memory to the operating system after `num_bytes` were freed on a CPU; does nothing for a few.

    JAX drops its references to numpy arrays in garbage collections, and malloc keeps pieces that the next weights may not fit.
    """
    if num_bytes >= MIN_TRIM_BYTES:
        gc.collect(0)
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
            trim(0)
