"""Adapter of OpenEnv: a class "module:Class" with `reset`, `step`, and `state`. Imports nothing of ours.

The observation is a message of the user, and the reply of the model is the action: its only text field, or all its fields as JSON. Options:
`action`, "module:Class" of the actions (default: the annotation of `step`); `system`, a text before the first observation; `max_turns`
(16); `reward`, "last" or "sum". All others are arguments of the class. Task i is the episode after reset(seed=i), for
`SEEDS` of them.
"""

import inspect
import json
import pkgutil
import re
import typing
import urllib.error
import urllib.request

SEEDS = 2**14
OWN = {"action": "", "system": "", "max_turns": 16, "reward": "last"}


def load(target, options):
    """Returns (function that makes an environment, class of its actions, the options in OWN)."""
    own = {name: options.get(name, default) for name, default in OWN.items()}
    kind = pkgutil.resolve_name(target)
    if own["reward"] not in ("last", "sum"):
        raise ValueError(f"reward = {own['reward']!r} is unknown; use 'last' or 'sum'")
    if own["action"]:
        action = pkgutil.resolve_name(own["action"])
    else:
        names = [*inspect.signature(kind.step).parameters]
        action = typing.get_type_hints(kind.step).get(names[1])
    if not hasattr(action, "model_fields") and not hasattr(action, "__dataclass_fields__"):
        raise ValueError(f"the actions of {target} have no type; name their class as the option 'action'")
    given = {name: value for name, value in options.items() if name not in OWN}
    return lambda: kind(**given), action, own


def tasks(env):
    """Yields (text, seed)."""
    for seed in range(SEEDS):
        yield str(seed), seed


def run(env, task, base_url):
    """Plays one episode."""
    make, action_kind, own = env
    world = make()
    seeded = "seed" in inspect.signature(world.reset).parameters
    seen = world.reset(seed=task) if seeded else world.reset()
    messages = [{"role": "system", "content": own["system"]}] if own["system"] else []
    rewards, stop = [], "max_turns"
    for _ in range(own["max_turns"]):
        messages.append({"role": "user", "content": _text(seen)})
        reply = _ask(base_url, {"model": "policy", "messages": messages})
        if reply is None:
            stop = "too_long"
            break
        messages.append(reply)
        try:
            action = _action(action_kind, reply.get("content") or "")
        except (TypeError, ValueError) as error:
            seen = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            continue
        seen = world.step(action)
        rewards.append(float(_get(seen, "reward") or 0))
        if _get(seen, "done"):
            stop = "done"
            break
    reward = sum(rewards) if own["reward"] == "sum" else (rewards or [0.0])[-1]
    return {"reward": reward, "metrics": {"steps": len(rewards)}, "stop": stop, "error": None}


def _ask(base_url, body):
    """Returns the model's message, or None if the episode's budget is spent."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        if error.code == 400 and "maximum context length" in text:
            return None
        raise RuntimeError(text) from None


def _get(seen, name):
    return seen.get(name) if isinstance(seen, dict) else getattr(seen, name, None)


def _fields(value):
    if isinstance(value, dict):
        return value
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else dict(vars(value))


def _text(seen):
    """Returns an observation as text: its only text field, or its fields as JSON."""
    fields = {name: value for name, value in _fields(seen).items() if name not in ("done", "reward", "metadata")}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(fields) == len(texts) == 1 else json.dumps(fields, sort_keys=True)


def _action(kind, text):
    names = [name for name in getattr(kind, "model_fields", None) or kind.__dataclass_fields__ if name != "metadata"]
    hints = typing.get_type_hints(kind)
    if len(names) == 1 and hints[names[0]] is str:
        return kind(**{names[0]: text})
    found = re.search(r"\{.*\}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the reply has no JSON object with the fields {', '.join(names)}")
    return kind(**json.loads(found[0]))
