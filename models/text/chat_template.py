"""Renders chat templates: the embedded ChatML template, and those of checkpoints.

1. A template comes with a downloaded checkpoint and is untrusted code: it runs in jinja2's sandbox, in a child process without
   files and network (sharding/system/limited_process.py), whose CPU time and memory are limited. The embedded template needs no child.
2. It gets the same functions and filters as in transformers. The clock, `strftime_now`, is passed with the messages,
   because a run can fix its date (models/text/tokenizer.py).
3. `{% generation %}` blocks, which mark the assistant's text, are rendered between two private-use characters.
4. A conversation costs one exchange with the child. The results of short ones are cached.
"""

import datetime
import functools
import json
import math
import pathlib
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from sharding.system import limited_process

LIMIT_S = 2  # whole CPU seconds for one conversation: a million tokens take less than 0.1
CLOCK_FACTOR = 10  # as many times that by the clock
MAX_GROWTH_BYTES = 2**28  # of the child's memory
MAX_CACHED = 2**14  # characters of a request
COMMAND = ("-m", "models.text.chat_template")

# Qwen's format with two differences. The reasoning of earlier turns stays, so a conversation only grows at its end and a
# later turn can reuse the sampled ids. It renders no empty <think> block, because each byte is a token here.
CHATML = pathlib.Path(__file__).with_name("chatml.jinja").read_text("utf-8")


class Generation(jinja2.ext.Extension):
    """The Jinja extension for `{% generation %}` blocks: renders the assistant's text in a block between two marker characters."""

    tags = {"generation"}
    TAG = re.compile(r"{%-?\s*generation\b")

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parses one generation block. Returns the block's nodes, and a node before and after them that outputs a marker."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        names = ("generation_opener", "generation_closer")
        opener, closer = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line) for name in names)
        return [opener, *body, closer]


def render(text: str, inputs: Mapping, changes: Sequence[Mapping], *, now: datetime.date, origin: str) -> list[str]:
    """Renders the chat template `text` once per entry of `changes`, with the variables `inputs`, updated by that entry.

    JSON must be able to express the variables. The template's clock shows `now`. Raises ValueError if the template rejects the
    messages, is broken, or exceeds its limits; then it names `origin`, its checkpoint.
    """
    if text == CHATML:
        return _render(text, inputs, changes, now)
    clock = now.isoformat() if "strftime_now" in text else "2000-01-01"
    request = json.dumps([text, inputs, changes, clock], ensure_ascii=False)
    reply = (_cached if len(request) < MAX_CACHED else _asked)(request, origin, len(changes))
    if "texts" not in reply:
        raise ValueError(reply["error"])
    return reply["texts"]


@functools.cache
def _child() -> tuple[limited_process.LimitedProcess, threading.Lock]:
    title, remedy = "the process that renders chat templates", "run python -m models.text.chat_template to see why"
    return limited_process.LimitedProcess(COMMAND, {}, title=title, remedy=remedy), threading.Lock()


def _asked(request: str, origin: str, count: int) -> dict:
    """Returns the child's reply: {"texts": [...]}, with `count` of them, or {"error": ...}. Raises ValueError if the template exceeds its limits."""
    child, lock = _child()
    with lock:
        reply = child.exchange({"request": request}, CLOCK_FACTOR * LIMIT_S)
        texts = reply.get("texts", [reply.get("error")] * count)
        # The template may have taken the child over.
        is_valid = isinstance(texts, list) and [*map(type, texts)] == [str] * count
        if not is_valid or reply.get("grown"):
            child.end()
        status = child.status
    if is_valid:
        return reply
    limit = f"its limit of {MAX_GROWTH_BYTES >> 20} MB of memory"
    if status in limited_process.TIMEOUTS:
        limit = f"its limit of {LIMIT_S} s of CPU time"
    elif status != limited_process.OUT_OF_MEMORY:
        limit += f", or ended its process (status {status})"
    raise ValueError(
        f"the chat template of {origin} exceeded {limit} for {len(request)} characters; shorten the conversation, or put "
        "another chat_template.jinja into the checkpoint's folder"
    )


_cached = functools.lru_cache(256)(_asked)


def _render(text: str, inputs: Mapping, changes: Sequence[Mapping], now: datetime.date) -> list[str]:
    try:
        template = compiled(text)
        return [template.render(inputs, **change, strftime_now=now.strftime) for change in changes]
    except (Rejection, MemoryError):
        raise
    except jinja2.TemplateSyntaxError as error:
        found = f"the chat template is not valid Jinja: {error.message} (line {error.lineno})"
        raise ValueError(
            f"{found}; correct it in the checkpoint's chat_template.jinja or tokenizer_config.json"
        ) from error
    except Exception as error:  # a template may raise anything: a missing field, a division by zero
        raise ValueError(
            f"the chat template cannot render the messages: {error}; correct the messages or the template"
        ) from error


@functools.lru_cache(16)
def compiled(text: str) -> jinja2.Template:
    """Compiles the text of a chat template and returns it. Raises jinja2.TemplateError if its syntax is wrong."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # jinja's own escapes <, > and & for HTML
    environment.globals["raise_exception"] = _raise
    return environment.from_string(text)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Rejection(ValueError):
    """The messages break a rule of the template."""


def _raise(message: str):
    raise Rejection(f"the chat template rejects the messages: {message}")


def main(config_json: str) -> int:
    """Runs the child process that renders templates. Returns the exit status."""

    def answer(request: dict) -> dict:
        limited_process.limit_cpu(math.ceil(time.process_time()) + LIMIT_S)
        text, inputs, changes, now = json.loads(request["request"])
        try:
            return {"texts": _render(text, inputs, changes, datetime.datetime.fromisoformat(now))}
        except ValueError as error:
            return {"error": str(error)}

    return limited_process.serve(
        json.loads(config_json),
        load=lambda: None,
        rehearse=lambda: compiled.__wrapped__("{{ 1 | tojson }}").render(),
        answer=answer,
        max_growth_bytes=MAX_GROWTH_BYTES,
        patience_s=2 * CLOCK_FACTOR * LIMIT_S,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
