"""Converts rollouts to the episodes of verifiers 0.4 (its traces.jsonl), and episodes to rollouts or conversations. Imports no jax.

1. An episode has one trace: a graph of nodes, each a message with the tokens that it adds. The nodes from a root to a leaf, joined, are the
   tokens of a branch; nodes that branches share are stored once.
2. A rollout knows its tokens, and not which messages its prompt was rendered from. So the prompt is one user message with the whole text, and so are
   the tokens between two calls. Answers are parsed.
3. `info["intellax"]` has the rest of each rollout: its last node (`leaf`), versions, noise, proofs, signatures. With it, `rollouts_of` returns the rollouts as they
   were, and `conversations_of` leaves out those that do not train. Traces of other programs have no proofs: `conversations_of` takes their messages.

verifiers is not imported: it needs an interpreter of its own.
"""

import base64
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib

BUILD = {"version": "0.4.0"}  # of verifiers, whose format this is
_ARRAYS = ("tokens", "sampled_mask", "logprobs", "task")
_BYTES = tuple(field.name for field in dataclasses.fields(rollout_lib.Rollout) if field.type is bytes)


def of_rollouts(rollouts: Sequence[rollout_lib.Rollout], tokenizer: tokenizer_lib.Tokenizer) -> Iterator[dict]:
    """Yields the episodes of the rollouts of one group, as JSON. Raises ValueError for routed experts, which JSON would multiply."""
    for own in rollout_lib.episodes(rollouts):
        if any(one.routed_experts is not None for one in own):
            raise ValueError("a rollout names the experts of its tokens, which traces leave out; export to Parquet")
        yield _episode(own, tokenizer)


def rollouts_of(episode: Mapping[str, Any]) -> list[rollout_lib.Rollout]:
    """Returns the rollouts of an episode that `of_rollouts` made. Raises ValueError for another one."""
    found = []
    for trace in episode["traces"]:
        for fields, path in _branches(trace):
            if fields is None:
                raise ValueError(
                    "the trace has no proofs and signatures of Intellax; import it as conversations (--out FILE.jsonl)"
                )
            nodes = [trace["nodes"][at] for at in path]
            mask = np.array([bit for node in nodes for bit in node["mask"]], bool)
            logprobs = np.zeros(len(mask), np.float32)
            logprobs[mask] = [value for node in nodes for value in node["logprobs"]]
            own: dict[str, Any] = {name: base64.b64decode(fields[name]) for name in _BYTES}
            lists = {name: fields.get(name) for name in ("calls", "call_limits", "prefix_versions")}
            own |= {name: value and np.array(value, np.int32) for name, value in lists.items()}
            own["versions"] = np.array(fields["versions"], np.int32)
            own["task"] = rollout_lib.TaskRef(**fields["task"])
            tokens = np.array([token for node in nodes for token in node["token_ids"]], np.int32)
            one = rollout_lib.Rollout(**fields | own, tokens=tokens, sampled_mask=mask, logprobs=logprobs)
            if reason := rollout_lib.validate(one):
                raise ValueError(f"the trace is not a rollout: {reason}")
            found.append(one)
    return found


def conversations_of(episode: Mapping[str, Any]) -> Iterator[dict]:
    """Yields {"messages", "tools", "reward"} of each branch that trains, in the form that `warmup.data` takes. Raises ValueError for a trace without nodes."""
    for trace in episode["traces"]:
        if not trace.get("nodes"):
            raise ValueError("a trace has no nodes; give a traces.jsonl of verifiers 0.4")
        rewards = [one for one in (trace.get("rewards") or {}).values() if one]
        reward = sum(one["score"] * one.get("weight", 1.0) for one in rewards)
        if not (trace.get("agent") or {}).get("trainable", True):
            continue
        for fields, path in _branches(trace):
            nodes = [trace["nodes"][at] for at in path]
            if not any(node.get("sampled") for node in nodes) or not (fields or {}).get("trains", True):
                continue
            tools = [_tool(tool) for tool in nodes[0].get("tools", ())]
            row = {"messages": [_message(node["message"]) for node in nodes], "reward": reward}
            yield row | ({"tools": tools} if tools else {})


def _episode(own: Sequence[rollout_lib.Rollout], tokenizer: tokenizer_lib.Tokenizer) -> dict:
    nodes, calls, known, first, leaves = [], [], {}, own[0], []

    def add(
        parent: int | None, tokens: Sequence[int], logprobs: Sequence[float], message: dict, *, sampled: bool
    ) -> int:
        key = parent, sampled, tuple(tokens), tuple(logprobs)
        if key not in known:
            known[key] = len(nodes)
            node = {"parent": parent, "message": message, "sampled": sampled, "token_ids": [*tokens]}
            nodes.append(node | {"mask": [sampled] * len(tokens), "logprobs": [*logprobs]})
        return known[key]

    for rollout in own:
        tokens, at, parent = rollout.tokens.tolist(), 0, None
        for start, end in rollout.spans:
            if start > at:
                parent = add(
                    parent,
                    tokens[at:start],
                    (),
                    {"role": "user", "content": tokenizer.decode(tokens[at:start])},
                    sampled=False,
                )
            answer = _wire(tokenizer.parse(tokens[start:end], prompt_ids=tokens[:start]))
            parent = add(parent, tokens[start:end], rollout.logprobs[start:end].tolist(), answer, sampled=True)
            usage = {"prompt_tokens": start, "completion_tokens": end - start}
            sampling = {"temperature": rollout.temperature}
            calls.append({"node": parent, "usage": usage, "finish_reason": rollout.finish_reason, "sampling": sampling})
            at = end
        if at < len(tokens):
            rest = {"role": "user", "content": tokenizer.decode(tokens[at:])}
            parent = add(parent, tokens[at:], (), rest, sampled=False)
        leaves.append(parent)
    task = {"type": first.task.env, "data": {"idx": first.task.index, "prompt": nodes[0]["message"]["content"]}}
    trace = {
        "version": 1,
        "id": rollout_lib.digest(first).hex()[:32],
        "verifiers": BUILD,
        "task": task,
        "agent": {"config": {}, "name": "agent", "trainable": any(one.trains for one in own)},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"reward": {"score": first.reward, "weight": 1.0}},
        "metrics": {name: value for name, value in first.rewards.items() if name != "reward"},
        "info": {"intellax": [{"leaf": leaf} | _rest(one) for leaf, one in zip(leaves, own, strict=True)]},
        "is_completed": True,
        "ok": True,
        "stop_condition": first.finish_reason,
    }
    return {"id": trace["id"], "env": {"id": first.task.env}, "task": task, "ok": True, "traces": [trace]}


def _rest(one: rollout_lib.Rollout) -> dict:
    """Returns the fields of a rollout that the nodes do not have, as JSON."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        if field.name in _BYTES:
            value = base64.b64encode(value).decode()
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        if field.name not in _ARRAYS:
            found[field.name] = value
    return found | {"task": dataclasses.asdict(one.task)}


def _branches(trace: Mapping) -> Iterator[tuple[dict[str, Any] | None, list[int]]]:
    """Yields (fields of a rollout, its nodes from the root on) for each rollout; (None, nodes) for each leaf of a trace of another program."""
    nodes, saved = trace["nodes"], (trace.get("info") or {}).get("intellax")
    inner = {node.get("parent") for node in nodes}
    if inner >= {*range(len(nodes))}:
        raise ValueError("the parents of a trace's nodes form a cycle; correct the file")
    for fields in saved or ({"leaf": leaf} for leaf in range(len(nodes)) if leaf not in inner):
        path, at = [], fields["leaf"]
        while at is not None:
            path.append(at)
            at = nodes[at].get("parent")
            if len(path) > len(nodes):
                raise ValueError("the parents of a trace's nodes form a cycle; correct the file")
        yield {name: value for name, value in fields.items() if name != "leaf"} or None, path[::-1]


def _wire(message: Mapping) -> dict:
    """Returns an assistant message with tool calls as verifiers has them: {"id", "name", "arguments"}."""
    calls = [{"id": one["id"], **one["function"]} for one in message.get("tool_calls") or ()]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _message(message: Mapping) -> dict:
    """Returns a message of verifiers in the form of OpenAI's API."""
    found = {name: value for name, value in message.items() if value is not None and name != "provider_state"}
    if isinstance(found.get("content"), list):
        found["content"] = "".join(part.get("text", "") for part in found["content"])
    if calls := found.pop("tool_calls", None):
        functions = [{name: one[name] for name in ("name", "arguments")} for one in calls]
        pairs = zip(calls, functions, strict=True)
        found["tool_calls"] = [{"id": one["id"], "type": "function", "function": own} for one, own in pairs]
    return {"content": "", **found}


def _tool(tool: Mapping) -> dict:
    function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": function}
