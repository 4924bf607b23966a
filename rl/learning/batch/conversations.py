"""Converts conversations to token sequences to train on, and reads them from files.

1. A conversation is {"messages": [...], "tools": [...] or None}, with messages as rl/learning/data/messages.py reads them.
2. `tree` renders it once, with tools and all turns. The loss is on the messages of the given roles: of an assistant, on its
   sampled text with the closing token; of the others, on their whole message.
3. The result is the unit of packing (rl/learning/batch/packing.py).
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from models.text import tokenizer as tokenizer_lib
from rl.learning.batch import packing
from rl.learning.data import messages as messages_lib
from rl.learning.data import sources

SHAREGPT = {"human": "user", "gpt": "assistant"}  # {role in ShareGPT's form: ours}


def tree(
    tokenizer: tokenizer_lib.Tokenizer,
    messages: Sequence[Mapping],
    *,
    tools: Sequence[Mapping] | None = None,
    num_given: int = 0,
    roles: Sequence[str] = ("assistant",),
    max_length: int,
) -> packing.Tree:
    """Returns a conversation as one token sequence to train on. Only messages of `roles` train, and none of the first `num_given`.

    Tokens after the last one that trains are cut off.

    Raises ValueError if the conversation is longer than `max_length`, no token trains, or the chat template renders a message
    differently when other messages follow, so that the tokens of a role are unknown.
    """
    ids, mask = _closed(tokenizer, messages, tools)
    mask &= "assistant" in roles
    for index, message in enumerate(messages):
        if message["role"] in set(roles) - {"assistant"}:
            mask[_span(tokenizer, messages, index, tools, ids)] = True
    if any(message["role"] in roles for message in messages[:num_given]):
        mask[: _span(tokenizer, messages, num_given - 1, tools, ids).stop] = False
    mask[0] = False  # nothing predicts the first token
    found = dict.fromkeys(message["role"] for message in messages)
    if not mask.any() and "assistant" in roles and "assistant" in found:
        raise ValueError(
            "the chat template does not mark where an answer begins and ends, so that no token trains; put {% generation %} "
            "blocks into the chat_template.jinja of the tokenizer's folder"
        )
    if not mask.any():
        raise ValueError(
            f"the conversation has messages of {', '.join(found)}, none of roles {tuple(roles)}, so that no token trains; "
            f"add an answer, or a role of the conversation to warmup.roles"
        )
    end = int(np.flatnonzero(mask)[-1]) + 1  # only template follows
    if end > max_length:
        raise ValueError(
            f"a conversation has {end} tokens, more than inference.max_model_len = {max_length}; raise it (and "
            f"train.row_length), or shorten the examples"
        )
    tokens, weights = np.array(ids[:end], np.int32), mask[:end].astype(np.float32)
    return packing.stream(tokens, weights, np.zeros_like(weights), weights, 1.0)


def read(path: str) -> Sequence[dict]:
    """Returns the conversations of a file, or of the split "train" of a folder (rl/learning/data/sources.py). Each is parsed when it is read.

    A row is {"messages": [{"role": ..., "content": ...}, ...], "tools": [...] or absent}, or TRL's {"prompt": ..., "completion": ...}: two
    lists of messages, or a user's text and the answer, which alone trains; or ShareGPT's {"conversations": [{"from": ..., "value": ...}]}.
    Messages are in the format of OpenAI's API:
    content as text parts or null, arguments of tool calls as a string. Tables fill absent fields of arguments and tools with nulls, which
    are left out; an argument that is null must be in such a string. Raises ValueError for a file that cannot be read; so does a
    row with another format, whose number the error names.
    """

    filled = messages_lib.filler(path)

    def parsed(number: int, row: sources.Row) -> dict:
        try:
            return parse(filled(row))
        except ValueError as error:
            raise ValueError(f"{path}, conversation {number}: {error}") from None

    if not (rows := sources.read(path).get("train", ())):
        raise ValueError(f"{path} has no rows of the split 'train'; set warmup.data to a file of conversations")
    return sources.Mapped(parsed, rows)


def parse(record: object) -> dict:
    """Returns a record of a data set as a conversation. Raises ValueError if it has another format."""
    given: list = []
    if isinstance(record, dict) and record.get("messages") is None and "prompt" in record:
        given = _part(record, "prompt", "user")
        record = {**record, "messages": given + _part(record, "completion", "assistant")}
    elif isinstance(record, dict) and record.get("messages") is None and isinstance(record.get("conversations"), list):
        record = {**record, "messages": [*map(_of_sharegpt, record["conversations"])]}
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(messages, list) or not messages:
        names = f", only {', '.join(map(repr, record))}"[:99] if isinstance(record, dict) and messages is None else ""
        found = f"the row has no messages, nor a prompt with its completion{names}"
        raise ValueError(f"{found}; write {{'messages': [{{'role': ..., 'content': ...}}]}}")
    if not isinstance(record.get("tools"), list | None):
        raise ValueError("tools is not a list; give function descriptions, or leave it out")
    parsed: dict = {"messages": messages_lib.parse(messages), "tools": record.get("tools")}
    return parsed | ({"num_given": len(given)} if given else {})


def _of_sharegpt(message: object) -> object:
    if not isinstance(message, dict) or "from" not in message:
        return message
    return {"role": SHAREGPT.get(str(message["from"]), message["from"]), "content": message.get("value")}


def _part(record: dict, name: str, role: str) -> list:
    """Returns the messages of a row's `prompt` or `completion`; a text becomes one of `role`."""
    part = record.get(name)
    if not (isinstance(part, str | list) and part):
        raise ValueError(f"the row's {name} is {json.dumps(part)[:60]}; make it a text, or a list of messages")
    return [{"role": role, "content": part}] if isinstance(part, str) else part


def _closed(tokenizer: tokenizer_lib.Tokenizer, messages, tools) -> tuple[list[int], np.ndarray]:
    """Returns (token IDs, assistant mask) of a conversation, with the closing token of a last answer that the template leaves open.

    GLM-4.5's template does: the next turn closes an answer. Without the token, a model would not learn to end its answers.
    """
    rendered = tokenizer.render(messages, tools=tools)
    ids, mask = rendered.token_ids, rendered.assistant_mask
    begin = len(mask) - next((at for at, on in enumerate(reversed(mask)) if not on), len(mask))
    if begin < len(mask) and not set(ids[begin:]) & set(tokenizer.stop_ids):
        closing = tokenizer.closing_ids(messages[-1], tools=tools)
        ids, mask = ids + closing, mask + [True] * len(closing)
    return ids, np.array(mask)


def _span(tokenizer, messages, index, tools, ids) -> slice:
    """Returns the slice of a conversation's token IDs that belongs to message `index`. Raises ValueError if it is unknown."""
    before = tokenizer.render(messages[:index], tools=tools).token_ids if index else []
    through = tokenizer.render(messages[: index + 1], tools=tools).token_ids
    if ids[: len(through)] != through or through[: len(before)] != before:
        raise ValueError(
            f"the chat template renders message {index + 1} differently when other messages follow; set warmup.roles to the "
            f"assistant alone, or use a template that only appends"
        )
    return slice(len(before), len(through))
