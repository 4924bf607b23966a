"""Adapter of OpenEnv: a class "module:Class" with `reset`, `step`, and `state`. Imports nothing of ours.

The observation is a message of the user, and the reply of the model is the action: its only text field, or all its fields as JSON. Options:
`action`, "module:Class" of the actions (default: the annotation of `step`); `system`, a text before the first observation; `max_turns`
(16); `reward`, "last" or "sum". All others are arguments of the class. Task i is the episode after reset(seed=i), for
`SEEDS` of them.

An environment whose actions are calls of tools (OpenEnv's `MCPEnvironment`) gives the model its tools. A reply without a call ends the
episode.
"""

import inspect
import json
import pkgutil
import re
import sys
import typing
import urllib.error
import urllib.request

SEEDS = 2**14
OWN = {"action": "", "system": "", "max_turns": 16, "reward": "last"}


def load(target, options):
    """Returns (function that makes an environment, its action class or the module with its tool actions, the options in OWN)."""
    own = {name: options.get(name, default) for name, default in OWN.items()}
    kind = pkgutil.resolve_name(target)
    _check(own)
    if own["action"]:
        action = pkgutil.resolve_name(own["action"])
    elif tooled := [base for base in kind.__mro__ if base.__name__ == "MCPEnvironment"]:
        action = sys.modules[tooled[0].__module__]
    else:
        names = [*inspect.signature(kind.step).parameters]
        action = typing.get_type_hints(kind.step).get(names[1])
    if not any(hasattr(action, name) for name in ("model_fields", "__dataclass_fields__", "CallToolAction")):
        raise ValueError(f"the actions of {target} have no type; name their class as the option 'action'")
    given = {name: value for name, value in options.items() if name not in OWN}
    inspect.signature(kind).bind(**given)  # a wrong option fails now, and not in each episode
    return lambda: kind(**given), action, own


def _check(own):
    named = {name: f"env.options.{name} = {value!r}" for name, value in own.items()}
    if own["reward"] not in ("last", "sum"):
        raise ValueError(f"{named['reward']} is unknown; use 'last' or 'sum'")
    if type(own["max_turns"]) is not int or own["max_turns"] < 1:
        raise ValueError(f"{named['max_turns']} is not a number of turns; use an integer of at least 1")
    for name in ("action", "system"):
        if not isinstance(own[name], str):
            raise ValueError(f"{named[name]} is not a text; write a string")


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
    messages.append({"role": "user", "content": _text(seen)})
    tools = _tools(world.step(action_kind.ListToolsAction())) if inspect.ismodule(action_kind) else []
    rewards, stop = [], "max_turns"
    for _ in range(own["max_turns"]):
        reply = _ask(base_url, {"model": "policy", "messages": messages} | ({"tools": tools} if tools else {}))
        if reply is None:
            stop = "too_long"
            break
        messages.append(reply)
        if inspect.ismodule(action_kind):
            steps = [_call(world, action_kind, call) for call in reply.get("tool_calls") or ()]
        else:
            steps = [_act(world, action_kind, reply.get("content") or "")]
        messages += [message for _, message in steps]
        taken = [seen for seen, _ in steps if seen is not None]
        rewards += [float(_get(seen, "reward") or 0) for seen in taken]
        if not steps or any(_get(seen, "done") for seen in taken):
            stop = "done" if steps else "no_call"
            break
    reward = sum(rewards) if own["reward"] == "sum" else (rewards or [0.0])[-1]
    return {"reward": reward, "metrics": {"steps": len(rewards)}, "stop": stop, "error": None}


def _act(world, kind, text):
    """Returns (observation, or None if the reply is not an action; the message that shows it)."""
    try:
        action = _action(kind, text)
    except (TypeError, ValueError) as error:
        return None, {"role": "user", "content": json.dumps({"error": _first_line(error)})}
    seen = world.step(action)
    return seen, {"role": "user", "content": _text(seen)}


def _call(world, actions, call):
    """Returns (observation, or None if the arguments are malformed; the message that shows the result of a tool)."""
    message = {"role": "tool", "tool_call_id": call["id"]}
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        action = actions.CallToolAction(tool_name=call["function"]["name"], arguments=arguments)
    except (TypeError, ValueError) as error:
        return None, message | {"content": f"error: {_first_line(error)}"}
    seen = world.step(action)
    if error := _get(seen, "error"):
        return seen, message | {"content": f"error: {_get(error, 'message')}"}
    result = _get(seen, "result")
    blocks = _get(result, "content")
    texts = [_get(block, "text") for block in blocks] if isinstance(blocks, list) else [json.dumps(result, default=str)]
    return seen, message | {"content": "\n".join(text for text in texts if text)}


def _tools(seen):
    """Returns the tools of an observation in OpenAI's form."""
    found = [(_get(tool, "name"), _get(tool, "description"), _get(tool, "input_schema")) for tool in seen.tools]
    functions = [{"name": name, "description": text or "", "parameters": schema} for name, text, schema in found]
    return [{"type": "function", "function": function} for function in functions]


def _first_line(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


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
    """Returns an observation as text: its only text field, or its fields as JSON. Metadata counts only if there is nothing else."""
    given = _fields(seen)
    fields = {name: value for name, value in given.items() if name not in ("done", "reward", "metadata")}
    fields = fields or given.get("metadata") or {}
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
