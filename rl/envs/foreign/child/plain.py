"""Adapter of a function "module:function" that returns an object with `tasks` and `run(task, base_url)`. Imports nothing of ours.

`tasks` is an iterable of JSON values, or a function that returns one. `run` may be a coroutine function. It asks the model "policy" at
`base_url` by any client of OpenAI's API, and returns {"reward": number, further numbers}.
"""

import asyncio
import inspect
import json
import pkgutil
import typing


def load(target, options):
    """Returns the object that the function returns for these options."""
    return pkgutil.resolve_name(target)(**options)


def tasks(env):
    """Yields (text, task)."""
    drawn: typing.Any = env.tasks
    if callable(drawn):
        drawn = drawn()
    for task in drawn:
        yield json.dumps(task, sort_keys=True), task


def run(env, task, base_url):
    """Plays one episode."""
    found = env.run(task, base_url)
    scores = dict(asyncio.run(found) if inspect.iscoroutine(found) else found)
    return {"reward": scores.pop("reward"), "metrics": scores, "stop": None, "error": None}
