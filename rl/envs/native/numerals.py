"""Reads the numbers in an answer exactly, in the notations of people and models.

1. `_plain` rewrites LaTeX, Markdown, and Unicode: 9{,}500 -> 9,500, \\frac{1}{2} or ½ -> 1/2, 10⁵ -> 10^5, **5** -> 5, –5 -> -5.
2. `_TOKEN` finds the numbers: 1,000, 12 500, -$3.5, 1/2, 1 1/2, 2^3, 3*10^5, 5 million, 50%. Digits of a name or a unit (CO2, m^2, x_1,
   COVID-19) are none. A minus sign after a digit or a bracket is an operator.
3. Notation that stands for something other than one number is found, too, without a value: 3:45, 1,2,3, 3-5, (3, 4), \\sqrt{2}, 2\\pi,
   and of 3 + 5 or "3 or 5" the last part has none.
4. `expected` is stricter than `last`: the answer of a task must be one number and no expression, time, or date.
"""

import dataclasses
import fractions
import re
import unicodedata

MAX_DIGITS = 400  # of a number; a longer one has no value
_CHARS = str.maketrans(
    dict(zip("０１２３４５６７８９−﹣－×·⋅∙÷⁄∕，’", "0123456789---****///,'", strict=True))
    | dict.fromkeys("\u00a0\u2005\u2006\u2007\u2008\u2009\u200a\u202f", " ")
    | {c: " " + unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_GROUP = r"(?:\{([^{}]*)\}|(\d))"
_NO_VALUE = "√"
_REWRITES = [
    (re.compile(pattern, re.ASCII | re.MULTILINE), new)
    for pattern, new in (
        (r"\{,\}|,\\!", ","),
        (r"\\!|\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
        (r"\\[,;: ]|~", " "),
        (r"\\([$%])", r"\1"),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:times|cdot)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\pm(?![a-zA-Z])", "±"),
        (r"\\pi(?![a-zA-Z])", "π"),
        (r"\^\s*\{?\\circ\}?", "°"),
        (rf"√\s*[\d.]+|\\sqrt\s*(?:\[[^\[\]]*\]\s*)?{_GROUP}", _NO_VALUE),
        (rf"\\[dtc]?frac\s*{_GROUP}\s*{_GROUP}", lambda found: _fraction(found)),
        (r"([\^_])\s*\{([^{}]*)\}", r"\1\2"),
        (r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)_+(?=[-$\d])|(?<=\d)_+(?!\w)", ""),
        (r"\*\*", "^"),
        (r"(?<!\d )\b(?:[Mm]inus|[Nn]egative) (?=[$\d.])", "-"),
        (r"–(?=[\d.$])|^ *–(?= )", "-"),
        (r"\b(?:USD|EUR|GBP|INR|CNY|JPY|Rs\.?)\s?(?=\d)", "$"),
        (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^" + found[0].translate(_SUPERSCRIPTS)),
    )
]
_DECIMAL = r"(?:(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+|(?:['_]\d{3})+|(?:\.\d{3}){2,})|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d{1,3})?"
_SIGN = r"(?:(?<![\w.)\]}])([-+])(?=[\d.$€£¥₹])|(?:(?<![\w)\]}])(?<![\w)\]}] )|(?<=\bis ))([-+])\s(?=[\d.$€£¥₹]))?"
_BEGIN = r"(?<![\w.^])(?<![A-Za-z]-)(?<!\^[-+])"
_TOKEN = re.compile(
    rf"[(\[{{]\s*[-\d./]+(?:\s*[,;]\s+[-\d./]+)+\s*\\?[)\]}}]|[±{_NO_VALUE}]\s*[-+]?[\d.]*|\\[dtc]?(?:frac|sqrt)[^\n]*"
    rf"|{_SIGN}(?:[$€£¥₹]\s?([-+])?)?{_BEGIN}(?:(?P<whole>\d+)\s+(?=\d+\s?/\s?\d))?(?P<first>{_DECIMAL})"
    rf"(?:\s?/\s?(?P<over>{_DECIMAL})|\^(?P<power>[+-]?\d{{1,3}})|\s?[*x]\s?10\^(?P<ten>[+-]?\d{{1,3}}))?"
    r"(?!\d|[.,:/'^*+_-]\d|e\d)(?:\s?(?P<scale>hundred|thousand|million|billion|trillion)\b)?"
    rf"(?:\s?(?P<percent>%|percent\b|per\scent\b))?(?P<irrational>\s?(?:π|{_NO_VALUE}|pi\b))?"
    rf"|{_BEGIN}\d(?:[.,:/'^*+_-]?\d)*",
    re.ASCII | re.IGNORECASE,
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNIT = re.compile(r"(?<=[A-Za-z])\^-?\d+|/(?=\s*[A-Za-z])|^\W*[A-Za-z]\w*\s*(?:\(\w\)\s*)?=", re.ASCII)
_MONTHS = "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|(?:nov|dec)(?:ember)?"
_TIME = re.compile(rf"^(?:[ap]\.?m\b|o'clock|h\d)|\b(?:{_MONTHS})\b", re.ASCII | re.IGNORECASE)
_EXPRESSION = re.compile(r"[+*^=<>≤≥±≈∞…]|\.\.|(?:^|\s)-(?:\s|$)|-$|(?<![A-Za-z])[xyz](?![A-Za-z])|\\[a-z]", re.ASCII)


_JOINED = re.compile(r"\s*(?:[-+*/]|or)\s*", re.IGNORECASE)  # between two numbers: neither is the answer
_LISTED = re.compile(r"\s*(?:[-+*/,;]|or|and)\s*", re.IGNORECASE)  # the same in a box, which has no prose


@dataclasses.dataclass(frozen=True)
class Numeral:
    """A number as it was written."""

    value: fractions.Fraction
    is_percent: bool = False

    def equals(self, other: "Numeral | None") -> bool:
        """Returns True for equal numbers; 50% also equals 0.5."""
        if other is None or self.value == other.value:
            return other is not None
        factor = 100 ** (other.is_percent - self.is_percent)
        return factor != 1 and self.value * factor == other.value


def last(text: str) -> Numeral | None:
    """Returns the number in the last \\boxed{} of a text, else its last number.

    None if there is none, its notation has no exact value, or it is a part of an expression, a choice, or a list in a box: 3 - 5, 5 or 6.
    """
    boxed = last_boxed(text)
    text = _plain(text if boxed is None else boxed)
    found = [*_TOKEN.finditer(text)]
    joined = _JOINED if boxed is None else _LISTED
    is_part = len(found) > 1 and joined.fullmatch(text, found[-2].end(), found[-1].start())
    return _numeral(found[-1]) if found and not is_part else None


def only(text: str) -> Numeral | None:
    """Returns the number in a text that has one number alone; None for other texts."""
    found = [*_TOKEN.finditer(_plain(text))]
    return _numeral(found[0]) if len(found) == 1 else None


def expected(answer: str) -> Numeral:
    """Returns the number that is the answer of a task, in its last \\boxed{} or after ####, if there is one.

    Raises ValueError for an answer that is not exactly one number, with the reward that fits it.
    """
    text = answer.rpartition("####")[2]
    boxed = last_boxed(text)
    text = _plain(text if boxed is None else boxed)
    found = [*_TOKEN.finditer(text)]
    if not found:
        raise ValueError(f"the answer {answer[:80]!r} has no number; correct it, or choose another env.options.reward")
    rest = _UNIT.sub("", text[: found[0].start()].rstrip() + " " + text[found[0].end() :].lstrip()).strip()
    problem = ""
    if len(found) > 1:
        problem = "several numbers"
    elif _TIME.search(text[found[0].end() :].lstrip()) or _TIME.search(text[: found[0].start()]):
        problem = "a time or a date"
    elif _EXPRESSION.search(rest) or (value := _numeral(found[0])) is None:
        problem = "an expression or an inexact number"
    else:
        return value
    fits = "math" if re.search(r"[\\+*^=<>≤≥±√π(\[{]|\d,", text) and problem != "a time or a date" else "exact"
    raise ValueError(
        f"the answer {answer[:80]!r} is {problem}, which reward 'number' does not take; set env.options.reward = {fits!r}"
    )


def last_boxed(text: str) -> str | None:
    """Returns the text in the last \\boxed{}, or None if there is none or it is not closed."""
    _, mark, inside = text.rpartition("\\boxed{")
    depth = 1
    for at, char in enumerate(inside if mark else ""):
        depth += (char == "{") - (char == "}")
        if not depth:
            return inside[:at]
    return None


def _plain(text: str) -> str:
    text = text.translate(_CHARS)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return text


def _fraction(found: re.Match) -> str:
    first, second = (found[1] or found[2] or "").strip(), (found[3] or found[4] or "").strip()
    is_number = all(re.fullmatch(r"-?[\d,.]*\d", part, re.ASCII) for part in (first, second))
    return f" {first}/{second}" if is_number else _NO_VALUE


def _numeral(found: re.Match) -> Numeral | None:
    if found["first"] is None or found["irrational"] or len(found[0]) > MAX_DIGITS:
        return None
    try:
        value = _exact(found["first"])
        if found["over"]:
            value /= _exact(found["over"])
        value = (value + int(found["whole"] or 0)) ** int(found["power"] or 1)
    except ZeroDivisionError:
        return None
    value *= fractions.Fraction(10) ** (int(found["ten"] or 0) + _SCALES.get((found["scale"] or "").lower(), 0))
    is_negative = sum(sign == "-" for sign in found.groups()[:3]) % 2
    return Numeral(-value if is_negative else value, bool(found["percent"]))


def _exact(text: str) -> fractions.Fraction:
    text = re.sub("[ ',_]", "", text)
    return fractions.Fraction(text.replace(".", "") if text.count(".") > 1 else text)
