"""Only the last box counts, integers are compared as such, and other answers by math-verify."""

import json

import pytest

from rl import envs
from rl.envs.native import numerals

ROWS = [
    ("1 + 1?", "2"),
    ("Half?", "\\frac{1}{2}"),
    ("Both?", "\\{1, 2\\}"),
    ("Big?", "1" * 300),
    ("Expand.", "x^2+2x+1"),
]
ROWS += [(f"{n} + {n}?", str(2 * n)) for n in range(40)]


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    path = tmp_path_factory.mktemp("math") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"problem": p, "answer": a}) for p, a in ROWS))
    return envs.load("math", path=str(path))


def task_of(env, problem):
    for split in ("train", "held_out"):
        for index in range(len(ROWS)):
            task = env.make_task(index, split)
            if task.messages[-1]["content"] == problem:
                return task
    raise AssertionError(problem)


def test_own_answers_score_one_and_junk_nothing(env):
    for problem, answer in ROWS:
        task = task_of(env, problem)
        assert task.env == "math" and task.answer == f"\\boxed{{{answer}}}"
        assert env.score(task, f"So it is ${task.answer}$.\n") == {"reward": 1.0}
        for junk in (
            "",
            answer,
            "\\boxed{}",
            "\\boxed{zzz}",
            "\\boxed{" * 9000,
            "{" * 9000,
            task.answer[:-1],
            "9" * 70000,
        ):
            assert env.score(task, junk)["reward"] == 0.0, (problem, junk[:40])


@pytest.mark.parametrize(
    ("problem", "completion", "reward"),
    [
        ("1 + 1?", "\\boxed{3} \\boxed{2}", 1.0),
        ("1 + 1?", "\\boxed{2} \\boxed{3}", 0.0),
        ("1 + 1?", "\\boxed{2} or \\boxed{", 0.0),
        ("1 + 1?", "\\boxed{\\boxed{2}}", 1.0),
        ("1 + 1?", "\\boxed{ +02 }", 1.0),
        ("1 + 1?", "\\boxed{\\frac{4}{2}}", 1.0),
        ("1 + 1?", "\\boxed{2, 3}", 0.0),
        ("Half?", "\\boxed{0.5}", 1.0),
        ("Half?", "\\boxed{\\dfrac{2}{4}}", 1.0),
        ("Half?", "\\boxed{2}", 0.0),
        ("Both?", "\\boxed{\\{2,1\\}}", 1.0),
        ("Big?", "\\boxed{" + "1" * 299 + "2}", 0.0),  # equal as floats
        ("Expand.", "\\boxed{(x+1)^2}", 1.0),
    ],
)
def test_boxes(env, problem, completion, reward):
    assert env.score(task_of(env, problem), completion)["reward"] == reward


def box_by_stack(text):
    """Finds the last box by a list of open braces."""
    begin = text.rfind("\\boxed{")
    stack = []
    for at in range(begin + 6, len(text)) if begin >= 0 else ():
        if text[at] == "{":
            stack.append(at)
        elif text[at] == "}":
            stack.pop()
        if not stack:
            return text[begin + 7 : at]
    return None


def test_the_last_box_is_that_of_a_stack():
    import random

    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(["\\boxed{", "{", "}", "x", "\\"], k=rng.randint(0, 9)))
        assert numerals.last_boxed(text) == box_by_stack(text)


def test_a_file_is_needed(tmp_path):
    with pytest.raises(ValueError, match="env.options.path is empty"):
        envs.load("math")
    (tmp_path / "rows.jsonl").write_text('{"question": "1?", "answer": "1"}')
    with pytest.raises(ValueError, match="field 'problem' does not exist"):
        envs.load("math", path=str(tmp_path / "rows.jsonl"))
