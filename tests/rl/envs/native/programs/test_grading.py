"""Hidden tests: right programs pass, wrong ones do not, and programs that cheat gain nothing."""

import asyncio

import pytest

from rl.envs.native.programs import grading
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib

PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
CALLS = ["assert f(1, 2) == 3", "assert f([1], [2]) == [1, 2]", "assert f('a', 'b') == 'ab'"]
READ = "a, b = map(int, input().split())\n"


@pytest.fixture(scope="module")
def pool():
    pool = pool_lib.Pool(limits_lib.Limits(cpu_s=0.5))
    yield pool
    pool.close()


def passed(pool, code, tests, stops=False):
    return asyncio.run(grading.count_passed(pool, code, tests, stops=stops))


@pytest.mark.parametrize(
    "code, count",
    [
        (READ + "print(a + b)", 2),
        (READ + "print(a + b, end='  \\n\\n')", 2),
        (READ + "print(3)", 1),
        (READ + "print(a + b); raise SystemExit(1)", 0),
        (READ + "print('so', a + b)", 0),
        ("while True: pass", 0),
        ("print(open('output').read())", 0),
        ("syntax error", 0),
        ("", 0),
        (READ + "print(a + b)\nprint('x' * 10**6)", 0),
    ],
)
def test_programs(pool, code, count):
    assert passed(pool, code, PAIRS) == count


@pytest.mark.parametrize(
    "code, count",
    [
        ("def f(a, b): return a + b", 3),
        ("def f(a, b):\n    print('noise', a)\n    return a + b", 3),
        ("def f(a, b): return 3", 1),
        ("def f(a, b): raise SystemExit(0)", 0),
        ("import os\ndef f(a, b): os._exit(0)", 0),
        ("raise SystemExit(0)", 0),
        ("def f(a, b):\n    while True: pass", 0),
        ("class Any:\n    def __eq__(self, other): return True\ndef f(a, b): return Any()", 0),
        ("class Any:\n    def __repr__(self): return '[' * 5000\ndef f(a, b): return Any()", 0),
        ("import builtins\nbuiltins.repr = lambda x: '3'\ndef f(a, b): return 0", 1),
        ("def g(): pass", 0),
        ("_found = '3'\ndef f(a, b): raise ValueError", 0),
        ("import sys\ndef f(a, b): return [x for x in sys._getframe(1).f_globals.values() if x == 3]", 0),
    ],
)
def test_functions(pool, code, count):
    assert passed(pool, code, CALLS) == count


def test_values_are_compared_like_python_does(pool):
    code = "def f(x): return x"
    tests = [
        "assert f({1, 2}) == {2, 1}",
        "assert f({'a': 1.0}) == {'a': 1}",
        "assert f(None) == None",
        "assert f(1) == True",
    ]
    assert passed(pool, code, tests) == 4
    assert (
        passed(
            pool,
            "import collections\ndef f(x): return collections.Counter(x)",
            ["assert dict(f('aab')) == {'a': 2, 'b': 1}"],
        )
        == 1
    )


def test_other_assertions_run_in_the_process(pool):
    tests = ["assert abs(f(0.1) - 0.3) < 1e-9", "assert f(2) > 5", "assert not f(0)"]
    assert passed(pool, "def f(x): return 3 * x", tests) == 3
    assert passed(pool, "def f(x): return 2 * x", tests) == 1
    assert passed(pool, "import os\ndef f(x): os._exit(0)", tests) == 0
    assert passed(pool, "def f(x): raise SystemExit(0)", tests) == 0


def test_it_stops_at_the_first_failure(pool):
    assert passed(pool, "def f(a, b): return [1, 2]", CALLS, stops=True) == 0
    assert passed(pool, "def f(a, b): return [1, 2]", CALLS) == 1


def test_a_program_ended_at_a_limit_is_loaded_again(pool):
    code = "def f(a, b):\n    while a == [1]: pass\n    return a + b"
    assert passed(pool, code, CALLS) == 2


@pytest.mark.parametrize(
    "tests", [[], ["f(1) == 2"], ["assert 1; assert 2"], ["assert ("], [{"input": "x"}], [3], ["assert f(1)\0"]]
)
def test_malformed_tests_are_refused(tests):
    with pytest.raises(ValueError, match="; (add|write)|; add them"):
        grading.check(tests)


@pytest.mark.parametrize(
    "text, code",
    [
        ("```python\na\n```", "a\n"),
        ("x\n```\na\n```\ny\n```py\nb\nc\n```\nz", "b\nc\n"),
        ("```bash\nls\n```", None),
        ("```python\na\n```\n```json\n{}\n```", "a\n"),
        ("```python\nunfinished", None),
        ("no block", None),
        ("", None),
        ("```python\n" + "a" * 70000 + "\n```", None),
    ],
)
def test_the_last_block_of_python(text, code):
    assert grading.last_block(text) == code
    assert grading.last_block(grading.block("x = 1")) == "x = 1\n"
