"""Finds the program in a message of the model, runs it on hidden tests, in order, and counts those that pass.

| test | passes if |
|---|---|
| {"input": text, "output": text} | the program ends with status 0 and prints the output, except for white space at the ends of lines |
| "assert f(...) == value" | the call returns a value with this representation, or equal to it |
| another "assert ..." | the assertion does not raise, in the process of the program |

In the first two cases, the expected value stays in this process, where no program can read it. A program in the third case might deceive
the assertion, for instance by a value that is equal to all others.
"""

import ast
import re
from collections.abc import Mapping, Sequence

from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib

Test = Mapping[str, str] | str
MAX_REPR_CHARS = 10_000
MAX_CODE_CHARS = 2**16  # of a program
_BLOCK = re.compile(r"^```[ \t]*(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def last_block(text: str) -> str | None:
    """Returns the last block of Python, or without a language, in a message; None if it has none, or one of more than MAX_CODE_CHARS."""
    found = [code for language, code in _BLOCK.findall(text) if language.lower() in ("", "python", "py", "python3")]
    return found[-1] if found and len(found[-1]) <= MAX_CODE_CHARS else None


def block(code: str) -> str:
    """Returns a message with a program."""
    return f"```python\n{code.strip()}\n```"


async def count_passed(
    pool: pool_lib.Pool, code: str, tests: Sequence[Test], *, stops: bool, files: Mapping[str, str] | None = None
) -> int:
    """Returns the number of `tests` that `code` passes. With `stops`, stops at the first failure. `files` are in its folder."""
    passed = 0
    async with pool.session(files=files, watched=["_found"]) as session:
        is_loaded = False
        for test in tests:
            if isinstance(test, str):
                if not is_loaded and (await session.execute(code)).exit != 0:
                    return passed
                result, is_right = await _call(session, test)
                is_loaded = not result.stopped
            else:
                result = await pool.run(code, stdin=test["input"], files=files)
                is_right = result.exit == 0 and not result.truncated and _lines(result.stdout) == _lines(test["output"])
            passed += is_right
            if not is_right and stops:
                break
    return passed


def check(tests: Sequence) -> None:
    """Raises ValueError for malformed tests."""
    if not tests:
        raise ValueError("a task without tests; add at least one")
    for test in tests:
        if isinstance(test, str):
            try:
                is_assert = [type(part) for part in ast.parse(test).body] == [ast.Assert]
            except (SyntaxError, ValueError):
                is_assert = False
            if not is_assert:
                raise ValueError(f"test {test[:80]!r} is not an assertion; write 'assert f(1) == 2'")
        elif not (isinstance(test, dict) and all(isinstance(test.get(name), str) for name in ("input", "output"))):
            raise ValueError(f"test {str(test)[:80]!r} has no texts 'input' and 'output'; add them")


async def _call(session: pool_lib.Session, test: str) -> tuple[limits_lib.Result, bool]:
    """Runs an assertion in a session that has loaded the program. Returns the result, and True if it passes."""
    expression, expected = _parts(test)
    if expression:
        result = await session.execute(f"_found = repr({expression})")
        found = result.values.get("_found")
        return result, result.exit == 0 and isinstance(found, str) and _is_equal(found, expected)
    result = await session.execute(f"_found = None\n{test}\n_found = True")
    return result, result.exit == 0 and result.values.get("_found") is True


def _parts(test: str) -> tuple[str, object]:
    """Returns (call, expected value) of an assertion that a call equals a literal; ("", None) for others."""
    (statement,) = ast.parse(test).body
    assert isinstance(statement, ast.Assert)
    if isinstance(statement.test, ast.Compare) and [type(op) for op in statement.test.ops] == [ast.Eq]:
        try:
            return ast.unparse(statement.test.left), ast.literal_eval(statement.test.comparators[0])
        except ValueError:  # not a literal
            pass
    return "", None


def _is_equal(found: str, expected: object) -> bool:
    if found == repr(expected):
        return True
    try:
        return len(found) <= MAX_REPR_CHARS and bool(ast.literal_eval(found) == expected)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
