"""Makes the pages of a run from templates, and escapes the text of models and strangers, which is hostile.

Characters that are invisible or change the direction of the line are shown by their code. A page loads nothing, and runs nothing but the script
that its policy names.
"""

import functools
import html
import json
import math
import pathlib
import re
from typing import Any

import jinja2
import markupsafe

from rl.experiment.reporting import metrics

# The page has no script: nothing runs, and nothing is loaded.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
FOLDER = pathlib.Path(__file__).parent
MAX_CHARS = 4000  # of a text
# Control characters except tab and newline, zero-width and bidirectional marks, separators, surrogates, private use, tags, U+FFFD.
_RANGES = "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\uf8ff\ufeff"
HIDDEN = re.compile(f"[{_RANGES}\ufff0-\uffff\U000e0000-\U0010ffff]")


@functools.cache
def template(name: str) -> jinja2.Template:
    """Returns a template of this folder, which escapes all text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"text": text, "pre": pre, "number": number, "seconds": metrics.format_seconds}
    return environment.from_string((FOLDER / name).read_text())


def style() -> str:
    """Returns the style of the report, for other pages."""
    return (FOLDER / "report.html").read_text().partition("<style>")[2].partition("</style>")[0].strip()


def pre(value: Any, max_chars: int = MAX_CHARS) -> markupsafe.Markup:
    """Returns a text, or JSON, as a block of at most `max_chars` characters."""
    whole = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    cut = f"<i>{len(whole) - max_chars} more characters</i>" if len(whole) > max_chars else ""
    return markupsafe.Markup(f'<pre tabindex="0">{text(whole[:max_chars])}{cut}</pre>')


def text(value: str) -> markupsafe.Markup:
    """Returns hostile text for a page: escaped, and characters that are invisible or change the direction of the line by their code."""
    return markupsafe.Markup(HIDDEN.sub(lambda match: f"<i>U+{ord(match[0]):04X}</i>", html.escape(value)))


def number(value: Any) -> str:
    """Returns a number with three digits, or a dash for any other value."""
    return metrics.format_value(value) if finite(value) else "–"


def finite(value: Any) -> bool:
    """Returns True for a number that is neither infinite nor NaN."""
    return isinstance(value, int | float) and math.isfinite(value)
