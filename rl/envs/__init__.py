"""Environments by name: `load("reverse_text", max_length=5)` returns an `environment.Environment`.

rl/envs/catalog/catalog.py has the forms of a name, and rl/envs/interface/environment.py explains how to write an environment, with an
example. Nothing in this folder imports jax, so a rollout worker starts in about a second.
"""

from rl.envs.catalog.catalog import (
    CODE_HELP,
    ENVS,
    Shipped,
    check,
    check_digest,
    digest,
    folders,
    is_wrapped,
    load,
    load_all,
    locate,
    located,
    texts,
)
from rl.envs.interface import environment

__all__ = [
    "CODE_HELP",
    "ENVS",
    "Shipped",
    "check",
    "check_digest",
    "digest",
    "environment",
    "folders",
    "is_wrapped",
    "load",
    "load_all",
    "locate",
    "located",
    "texts",
]
