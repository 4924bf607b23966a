"""Rewards of a completion by the answer of a dataset's row: `make("number")` returns a function for `rl/envs/native/dataset.py`.

| name | 1 if |
|---|---|
| exact | the completion is the answer, without white space around it |
| number | the number in the last \\boxed{} of the completion, else its last number, equals the answer, which is one number, in any notation: 1,000 = 1000.0 = 1e3, 1/2 = 0.5 (rl/envs/native/numerals.py) |
| regex | the last match of `pattern` in the completion (its first group, if it has one) is the answer |
| math | the last expression of the completion, best in \\boxed{}, is equal to the answer (math-verify) |
| boxed | the expression in the last \\boxed{} of the completion is equal to the answer (math-verify) |
| module:function | `function(completion, row)` returns the reward, or a dict of numbers with "reward" among them |

A completion is untrusted text, and a policy learns to use every weakness: `number` and `math` take one guess, the last.
math-verify limits its time by a signal of its own, which needs the main thread and disturbs others. It runs without:
rl/envs/scoring/scorer.py ends a process that computes for too long.
"""

import functools
import logging
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from rl.envs.native import numerals
from rl.protocol import user_code
from sharding.system import text as text_lib

Reward = Callable[[str, str, Mapping[str, Any]], Any]  # (completion, answer, row)
NAMES = ("exact", "number", "regex", "math", "boxed")
WITH_MATH_VERIFY = ("math", "boxed")
_FLOAT = re.compile(r"[+-]?\d+\.0", re.ASCII)  # an integer in a column of a table with a missing number
_INTEGER = re.compile(r"[+-]?\d{1,400}", re.ASCII)


def make(name: str, pattern: str = "") -> Reward:
    """Returns the reward of this name. Raises ValueError for an unknown one, an unusable `pattern`, or a package that is missing."""
    if user_code.is_name(name):
        function = user_code.load(name)
        user_code.check_arguments(function, name, "reward(completion, row)", 2)
        return lambda completion, answer, row: function(completion, row)
    if name not in NAMES:
        found = f"reward {name!r} is unknown{text_lib.hint(name, NAMES)}"
        raise ValueError(f"{found}; choose one of {', '.join(NAMES)}, or module:function")
    if (name == "regex") != bool(pattern):
        remedy = "needs env.options.pattern, as in '<answer>(.*?)</answer>'" if name == "regex" else "has no pattern"
        raise ValueError(f"reward {name!r} {remedy}; set reward = 'regex' and pattern together")
    if name == "regex":
        try:
            return functools.partial(_regex, re.compile(pattern, re.DOTALL))
        except re.error as error:
            raise ValueError(
                f"env.options.pattern = {pattern!r} is not a regular expression: {error}; correct it"
            ) from None
    if name in WITH_MATH_VERIFY:
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            reason = f"reward {name!r} needs the package math-verify, an optional dependency ({error})"
            raise ValueError(f'{reason}; run pip install -e ".[math]" in the checkout') from error
        logging.getLogger("math_verify").setLevel("ERROR")  # not a warning that no timeout is set
    return {"exact": _exact, "number": _number, "math": _math, "boxed": _boxed}[name]


def check_answer(name: str, answer: str) -> None:
    """Raises ValueError for an answer that no completion can match, or that the reward cannot represent."""
    if answer.strip().lower() in ("", "nan"):
        raise ValueError(f"the answer is {'NaN, a missing number' if answer.strip() else 'empty'}; correct it")
    if name == "number":
        numerals.expected(answer)


def _exact(completion: str, answer: str, row) -> float:
    found, wanted = _normal(completion), _normal(answer)
    return float(found == wanted or (_FLOAT.fullmatch(wanted) is not None and found == wanted.removesuffix(".0")))


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


def _number(completion: str, answer: str, row) -> float:
    return float(_expected(answer).equals(numerals.last(completion)))


def _regex(pattern: re.Pattern, completion: str, answer: str, row) -> float:
    matches = list(pattern.finditer(completion))
    return float(bool(matches) and _normal(matches[-1][min(pattern.groups, 1)] or "") == _normal(answer))


def _math(completion: str, answer: str, row) -> float:
    import math_verify

    found = math_verify.parse(completion, parsing_timeout=0)
    if not (gold := _gold(answer)):  # a word
        return _exact(completion, answer, row)
    return float(bool(found) and math_verify.verify(gold, found, timeout_seconds=0))


def _boxed(completion: str, answer: str, row) -> float:
    found = numerals.last_boxed(completion)
    if found is None:
        return 0.0
    gold = numerals.last_boxed(answer)
    gold, found = (answer if gold is None else gold).strip(), found.strip()
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(found):
        return float(int(gold) == int(found))
    return _math(f"\\boxed{{{found}}}", answer, row)


_expected = functools.lru_cache(4096)(numerals.expected)


@functools.lru_cache(4096)
def _gold(answer: str) -> list:
    import math_verify

    text = answer.rpartition("####")[2].strip()  # GSM8K's mark
    is_marked = "\\boxed" in text or "$" in text
    return math_verify.parse(text if is_marked else f"\\boxed{{{text}}}", parsing_timeout=0)
