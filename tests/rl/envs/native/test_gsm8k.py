"""GSM8K from files: the reference earns 1, near misses nothing, a bad file is named."""

import fractions
import json

import pytest

from rl import envs
from rl.envs.native import gsm8k

TRAIN = [("How many clips?", "48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72.\n#### 72"), ("Cost?", "#### 1,080")]
TEST = [("Left?", "16 - 3 = 13\n#### -13")]


@pytest.fixture
def path(tmp_path):
    for name, rows in (("train.jsonl", TRAIN), ("test.jsonl", TEST)):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_reference_earns_one_and_has_no_calculator_marks(path):
    env = envs.load("gsm8k", path=str(path))
    tasks = [env.make_task(0, "train"), env.make_task(1, "train"), env.make_task(0, "held_out")]
    assert tasks[0].answer == "48/2 = 24 in May.\n48+24 = 72.\n#### 72"
    assert [task.info["number"] for task in tasks] == [72, 1080, -13]
    assert all(env.score(task, task.answer) == {"reward": 1.0, "has_answer": 1.0} for task in tasks)
    assert env.make_task(3, "train").messages == tasks[1].messages  # past the end it starts over
    assert tasks[0].messages[-1] == {"role": "user", "content": "How many clips?"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", 72),
        ("so ####72.", 72),
        ("#### -3.5", fractions.Fraction("-3.5")),
        (r"thus \boxed{72}", 72),
        ("#### 1\nno: #### 2", 2),  # the last one counts
        ("72", None),
        ("The answer is 72", None),
        ("#### 72 or 73", None),
        ("#### ", None),
        ("#### nan", None),
        ("#### 18 dollars", 18),
        ("#### **18**", 18),
        (r"#### \boxed{18}", 18),
        (r"\boxed{\$18}", 18),
        ("####\n18", 18),
        ("#### 3 * 6 = 18 dollars", 18),
        ("#### 18 eggs (9 + 9)", 18),
        ("#### The answer is 18.", 18),
        (r"$\boxed{\text{18 dollars}}$", 18),
        (r"\boxed{(3, 18)}", None),
        (r"\boxed{18", None),
        ("#### ٧٢", None),  # digits of another script
        ("#### " + "9" * 5000, None),
        ("x" * 70000 + "#### 72", None),
        ("", None),
    ],
)
def test_only_a_marked_number_is_an_answer(text, number):
    assert gsm8k.final_number(text) == number


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "train.jsonl:1 is not a GSM8K problem"),
        ('{"question": "?"}', "train.jsonl:1 is not a GSM8K problem: KeyError"),
        ('{"question": "?", "answer": 3}', "train.jsonl:1 is not a GSM8K problem: TypeError"),
        ('{"question": "?", "answer": "72"}', "train.jsonl:1 is not a GSM8K problem: .*does not end with"),
        ("", "is empty"),
    ],
)
def test_a_bad_file_is_named(path, line, message):
    (path / "train.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        envs.load("gsm8k", path=str(path))


def test_missing_files():
    with pytest.raises(ValueError, match="env.options.path = '' has no train.jsonl; set it to a directory"):
        envs.load("gsm8k")
