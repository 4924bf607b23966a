"""Converts parameters between the trees of single layers and of stacked ones (`scan_layers`)."""

import dataclasses

import jax
import jax.numpy as jnp

from models import config as config_lib
from models import transformer


def stack(params: transformer.Params, config: config_lib.ModelConfig) -> transformer.Params:
    """Converts a tree of single layers to the tree that `config` reads with `scan_layers`."""
    single = params["layers"]
    return params | {
        "layers": {
            key: jax.tree.map(lambda *x: jnp.stack(x), *(single[f"{index:03d}"] for index in indices))
            for key, indices in _stacks(config).items()
        }
    }


def unstack(params: transformer.Params, config: config_lib.ModelConfig) -> transformer.Params:
    """Converts a tree of stacked layers to one of single layers; the inverse of `stack`."""
    single = {
        f"{index:03d}": jax.tree.map(lambda x, n=n: x[n], params["layers"][key])
        for key, indices in _stacks(config).items()
        for n, index in enumerate(indices)
    }
    return params | {"layers": dict(sorted(single.items()))}


def _stacks(config: config_lib.ModelConfig) -> dict[str, list[int]]:
    return transformer.stacks(dataclasses.replace(config, scan_layers=True))
