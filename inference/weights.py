"""Where a server's weights live: on one device, or over its mesh.

As in training (`sharding.rules`), but for key heads that do not divide over `tensor`: they stay whole there, with their part
of the cache, so that more devices than key heads can serve a model.
"""

import jax

from models import config as config_lib
from models import transformer
from sharding import rules


def shardings(model: config_lib.ModelConfig, mesh: jax.sharding.Mesh) -> transformer.Params:
    """The tree of `NamedSharding`; ValueError names a dim that does not divide."""
    return rules.shardings(transformer.specs(model), mesh, or_whole=("kv_heads",))
