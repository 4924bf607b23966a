"""Compiles chat templates: the embedded ChatML template, and those of checkpoints.

1. A template comes with a downloaded checkpoint and is untrusted code: it runs in jinja2's sandbox.
2. It gets the same functions and filters as in transformers. The clock, `strftime_now`, is passed with the messages,
   because a run can fix its date (models/text/tokenizer.py).
3. `{% generation %}` blocks, which mark the assistant's text, are rendered between two private-use characters.
"""

import functools
import json
import pathlib
import re

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

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


def _raise(message: str):
    raise ValueError(f"the chat template rejects the messages: {message}")
