"""The instructions of IFEval as GENESYS names them: `follows(text, {"func_name": ..., arguments})` is True if a text keeps one.

The names and meanings are those of AllenAI's open-instruct (`if_functions`), so that rows of SYNTHETIC-2 are scored as there. The language of
a text is not checked: that takes a model.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any


def _compares(count: int, target: int, quantifier: str, slack: float) -> bool:
    if quantifier == "at least":
        return count >= target
    if quantifier == "at most":
        return count <= target
    return quantifier == "around" and abs(count - target) <= slack


def _paragraphs_by_stars(text: str, N: int) -> bool:
    parts = [part.strip() for part in text.split("* * *")]
    return len(parts) == N and all(parts)


def _sections(text: str, N: int, section_splitter: str) -> bool:
    parts = text.split(section_splitter)
    return len(parts[1:] if parts[0] == "" else parts) == N


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1]


def _first_word(text: str, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N and 1 <= i <= N and parts[i - 1].strip().startswith(first_word)


def _sentences(text: str) -> int:
    return len(re.split(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?])\s", text))


_lower = str.lower
FUNCTIONS: dict[str, Callable[..., bool]] = {
    "verify_keywords": lambda text, keyword_list: all(word.lower() in text.lower() for word in keyword_list),
    "verify_keyword_frequency": lambda text, word, N: re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(w.lower() in text.lower() for w in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "verify_paragraph_count": _paragraphs_by_stars,
    "validate_word_constraint": lambda text, N, quantifier: _compares(
        len(text.split()), N, quantifier, max(round(N * 0.1), 1)
    ),
    "verify_sentence_constraint": lambda text, N, quantifier: _compares(_sentences(text), N, quantifier, 1),
    "validate_paragraphs": _first_word,
    "verify_postscript": lambda text, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "validate_placeholders": lambda text, N: len(re.findall(r"\[(.*?)\]", text)) >= N,
    "verify_bullet_points": lambda text, N: sum(s.strip().startswith(("*", "-")) for s in text.split("\n")) == N,
    "validate_title": lambda text: bool(re.search(r"<<(.*?)>>", text)),
    "validate_choice": lambda text, options: any(text in option for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*(.*?)\*", text)) >= N,
    "validate_sections": _sections,
    "validate_json_format": _is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": _two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: _compares(
        len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, 0
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: len(text) > 1 and text[0] == text[-1] == '"',
    "validate_no_commas": lambda text: "," not in text,
}


def check(constraint: Mapping[str, Any]) -> None:
    """Raises ValueError for an instruction that is not one of FUNCTIONS, or has other arguments."""
    name = str(constraint.get("func_name")) if isinstance(constraint, Mapping) else repr(constraint)
    if name not in FUNCTIONS:
        raise ValueError(f"instruction {name!r} is not known; remove the row, or use one of {', '.join(FUNCTIONS)}")
    try:
        follows("a text", constraint)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"instruction {name!r} has other arguments ({error}); correct the row") from None


def follows(text: str, constraint: Mapping[str, Any]) -> bool:
    """Returns True if a text keeps an instruction; arguments that are None are left out."""
    given = {key: value for key, value in constraint.items() if key != "func_name" and value is not None}
    return bool(FUNCTIONS[constraint["func_name"]](text, **given))
