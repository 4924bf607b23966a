from typing import Any

from absl import flags

def DEFINE_config_file(
    name: str,
    default: str | None = None,
    help_string: str = ...,
    flag_values: flags.FlagValues = ...,
    lock_config: bool = ...,
    accept_new_attributes: bool = ...,
    **kwargs: Any,
) -> flags.FlagHolder[Any]: ...
def get_override_values(config_flag: Any) -> dict[str, Any]: ...
