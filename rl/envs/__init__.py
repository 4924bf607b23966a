"""Environments by name: `load("reverse_text", max_length=5)` returns an `environment.Environment`.

rl/envs/environment.py explains how to write one, with an example. Nothing in this folder imports jax, so a rollout worker
starts in about a second.
"""

import inspect
from collections.abc import Callable

from rl.envs import environment, gsm8k, reasoning, reverse_text

# {name: function that builds the environment}. The builder's keyword arguments are the options `env.options` of a config.
# A builder with a positional argument gets the text after a colon: "reasoning_gym:chain_sum" calls build("chain_sum").
ENVS: dict[str, Callable[..., environment.Environment]] = {
    "reverse_text": reverse_text.build,
    "gsm8k": gsm8k.build,
    "reasoning_gym": reasoning.build,
}


def load(name: str, **options) -> environment.Environment:
    """Builds the environment `name`, a key of ENVS or "key:variant", with `options` as keyword arguments of its builder.

    Raises ValueError for a name or an option that does not exist, and for options that the builder rejects.
    """
    kind, _, variant = name.partition(":")
    if kind not in ENVS:
        hint = environment.did_you_mean(kind, ENVS)
        raise ValueError(f"environment {kind!r} does not exist; {hint}choose one of {', '.join(ENVS)}")
    parameters = inspect.signature(ENVS[kind]).parameters.values()
    takes_variant = any(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    if variant and not takes_variant:
        raise ValueError(f"environment {name!r}: {kind} has no variants; write {kind!r}")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters if parameter.name != "seed"]
        environment.check_options(f"environment {kind}", options.keys() - {"seed"}, known)
    return environment.checked(ENVS[kind](*[variant] * takes_variant, **options))
