"""Adapter of verifiers' first API: a package with `load_environment`, of verifiers 0.1 to 0.3. Imports nothing of ours.

The framework ends an episode by an exception where the model's reply is empty or malformed. That is not a fault of the environment: such an
episode keeps its reward, and has 1 in the metric "model_error", which is 0 in all others.
"""

import asyncio
import collections.abc
import pkgutil

MODEL_ERRORS = ("EmptyModelResponseError", "InvalidModelResponseError", "ToolParseError")


def load(target, options):
    """Returns the environment. Raises ValueError for one that scores the episodes of a group together."""
    env = pkgutil.resolve_name("verifiers:load_environment")(target, **options)
    if getattr(env, "requires_group_rollouts", False):
        raise ValueError(f"{target} scores the episodes of a group together; use an environment that scores each alone")
    return env


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
