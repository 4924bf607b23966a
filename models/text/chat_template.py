"""Compiles chat templates: the embedded ChatML template, and those of checkpoints.

1. A template comes with a downloaded checkpoint and is untrusted code: it runs in jinja2's sandbox.
2. It gets the same functions and filters as in transformers. The clock, `strftime_now`, is passed with the messages,
   because a run can fix its date (models/text/tokenizer.py).
3. `{% generation %}` blocks, which mark the assistant's text, are rendered between two private-use characters.
"""

import functools
import json
import re

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Qwen's format with two differences. The reasoning of earlier turns stays, so a conversation only grows at its end and a
# later turn can reuse the sampled ids. It renders no empty <think> block, because each byte is a token here.
CHATML = r"""
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
    {%- if tools %}
        {{- ('\n\n' if messages[0].role == 'system' else '') + '# Tools\n\nYou may call one or more functions to ' }}
        {{- 'assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML ' }}
        {{- 'tags:\n<tools>' }}
        {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
        {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
        {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' }}
        {{- '<args-json-object>}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {%- if message.reasoning_content is string %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('a message has role "' ~ message.role ~ '"; use system, user, assistant or tool') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".lstrip("\n")


class Generation(jinja2.ext.Extension):
    """The Jinja extension for `{% generation %}` blocks: renders the assistant's text in a block between two marker characters."""

    tags = {"generation"}
    TAG = re.compile(r"{%-?\s*generation\b")

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parses one generation block. Returns its nodes between those that output `generation_opener` and `generation_closer`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opener, closer = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line)
            for name in ("generation_opener", "generation_closer")
        )
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
