"""Adapter of verifiers' first API: a package with `load_environment`, of verifiers 0.1 to 0.3. Imports nothing of ours.

The framework ends an episode by an exception where the model's reply is empty or malformed. That is not a fault of the environment: such an
episode keeps its reward, and has 1 in the metric "model_error", which is 0 in all others.
"""

import asyncio
import collections.abc
import inspect
import pkgutil
import sys

MODEL_ERRORS = ("EmptyModelResponseError", "InvalidModelResponseError", "ToolParseError")


def load(target, options):
    """Returns the environment. Raises ValueError for one that scores the episodes of a group together."""
    _note_unnamed(target, options)
    env = pkgutil.resolve_name("verifiers:load_environment")(target, **options)
    if getattr(env, "requires_group_rollouts", False):
        raise ValueError(f"{target} scores the episodes of a group together; use an environment that scores each alone")
    return env


def _note_unnamed(target, options):
    module = target.replace("-", "_").split("/")[-1]  # as verifiers finds it
    try:
        parameters = inspect.signature(pkgutil.resolve_name(f"{module}:load_environment")).parameters.values()
    except (ImportError, AttributeError, ValueError, TypeError):
        return  # the call of verifiers raises its own error
    named = [one.name for one in parameters if one.kind != one.VAR_KEYWORD]
    unnamed = ", ".join(name for name in options if name not in named)
    if unnamed and len(named) < len(parameters):  # otherwise the call fails
        rule = f"load_environment names no option {unnamed}, and may ignore it; it names {', '.join(named)}"
        print(f"environment verifiers:{target}: {rule}", file=sys.stderr, flush=True)


def tasks(env):
    """Yields (prompt, row number) of the training data."""
    for number, prompt in enumerate(env.get_dataset()["prompt"]):
        yield repr(prompt), number


def run(env, task, base_url):
    """Plays one episode."""
    row = dict(env.get_dataset()[task])
    if not isinstance(row.get("task", {}), collections.abc.Mapping):
        del row["task"]  # a name, which releases since 0.1.14 refuse
    config = pkgutil.resolve_name("verifiers.types:ClientConfig")
    client = config(api_base_url=base_url, api_key_var="OPENAI_API_KEY", max_retries=0)
    found = asyncio.run(env.run_rollout(row, client, "policy", {}, state_columns=[]))
    error = found.get("error")
    kind = error.get("error") if isinstance(error, collections.abc.Mapping) else type(error).__name__
    is_models = kind in MODEL_ERRORS
    return {
        "reward": found["reward"],
        "metrics": {**found["metrics"], "model_error": float(is_models)},
        "stop": found.get("stop_condition"),
        "error": None if is_models else error and str(error)[:500],
    }
