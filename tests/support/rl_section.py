"""The section `rl` of a config, for tests of the structures that read it alone. Imports no jax."""

from ml_collections import config_dict

from configs import base


def make(**fields) -> config_dict.ConfigDict:
    """Returns the section of configs/base.py with these fields."""
    rl = base.get_config().rl
    rl.update(fields)
    return rl
