"""Tasks and their rewards: `load("reverse_text", max_length=5)` gives an `environment.Environment`.

A name is a key of ENVS; what follows a colon is the builder's first argument: "reasoning_gym:chain_sum".
Nothing here imports jax: a rollout worker starts in about a second.
"""

import difflib
import inspect
from collections.abc import Callable

from rl.envs import environment, gsm8k, reasoning, reverse_text

ENVS = {
    "reverse_text": reverse_text.build,
    "gsm8k": gsm8k.build,
    "reasoning_gym": reasoning.build,
}


def load(name: str, **options) -> environment.Environment:
    """The environment called `name`; `options` are the keyword arguments of its builder."""
    kind, _, variant = name.partition(":")
    if kind not in ENVS:
        close = difflib.get_close_matches(kind, ENVS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"there is no environment {kind!r}; {hint}known: {', '.join(ENVS)}")
    if kind == "reasoning_gym":
        return environment.checked(reasoning.build(variant, **options))
    if variant:
        raise ValueError(f"{name!r}: {kind} takes no variant; write {kind!r}")
    _check_options(kind, ENVS[kind], options)
    return environment.checked(ENVS[kind](**options))


def _check_options(kind: str, build: Callable, options: dict) -> None:
    known = [p.name for p in inspect.signature(build).parameters.values() if p.name != "seed"]
    for option in options.keys() - {"seed", *known}:
        close = difflib.get_close_matches(option, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{kind} has no option {option!r} (env.options); {hint}it has {', '.join(known)}")
