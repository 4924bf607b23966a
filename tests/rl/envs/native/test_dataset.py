"""The environment `dataset`: rows of files of each kind as tasks, and rewards by their answers."""

import csv
import gzip
import json
import os
import random
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from configs import base
from models.text import tokenizer as tokenizer_lib
from rl import envs, sft
from rl.envs.catalog import catalog
from rl.envs.hub import tryout
from rl.envs.native import numerals, rewards
from rl.envs.scoring import scorer
from rl.experiment import experiment, rules
from rl.learning.data import sources
from rl.protocol import task_schedule
from tests.support import commands

ROWS = [{"question": f"What is {i} + {i}?", "result": str(2 * i), "hard": i > 20} for i in range(40)]
OPTIONS = {"prompt": "question", "answer": "result"}


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    elif path.suffix == ".json":
        path.write_text("\n" + json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            for batch in table.to_batches(7):
                stream.write(batch)
    return path


def load(path, **options):
    return envs.load("dataset", path=str(path), **OPTIONS | options)


@pytest.mark.parametrize("suffix", sources.READERS)
def test_each_kind_of_file_has_the_same_rows_in_any_order_of_access(tmp_path, suffix):
    (rows,) = sources.read(write(tmp_path / f"x{suffix}")).values()
    kind = str if suffix == ".csv" else lambda x: x
    assert [{k: kind(v) for k, v in row.items()} for row in ROWS] == list(rows) == [rows[i] for i in range(40)]


def test_lines_end_as_on_any_system(tmp_path):
    """The last one perhaps not at all."""
    lines = [json.dumps(row) for row in ROWS]
    for text in ("\n".join(lines), "\r\n".join(lines), "\r\n\r\n \n".join(lines) + "\r\n"):
        (tmp_path / "x.jsonl").write_bytes(text.encode())
        assert list(sources.read(tmp_path / "x.jsonl")["train"]) == ROWS


def test_a_folder_is_read_in_the_layout_of_hugging_face(tmp_path):
    for name, part in {
        "hub/data/train-00000-of-00002.parquet": slice(0, 15),
        "hub/data/train-of-test-00001.parquet": slice(15, 30),
        "hub/data/Test-00000-of-00001.parquet": slice(30, 40),
        "saved/train/data-00000-of-00001.arrow": slice(0, 30),
        "saved/train/cache-1.arrow": slice(0, 1),
        "saved/validation/data-00000-of-00001.arrow": slice(30, 40),
        "saved/test/data-00000-of-00001.arrow": slice(0, 3),
        "flat/contest.jsonl": slice(0, 40),  # not the word test
    }.items():
        write(tmp_path / name, ROWS[part])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / "train" / name).write_text('{"question": "", "result": ""}')
    (tmp_path / "hub" / "README.md").write_text("---\n")
    for folder, held_out in (("hub", range(30, 40)), ("saved", range(30, 40))):
        env = load(tmp_path / folder)
        assert [env.make_task(i, "train").answer for i in range(31)] == [str(2 * (i % 30)) for i in range(31)]
        assert [env.make_task(i, "held_out").answer for i in range(10)] == [str(2 * i) for i in held_out]
        assert env.num_tasks == 30
    assert load(tmp_path / "saved", held_out="test").make_task(5, "held_out").answer == "4"
    assert load(tmp_path / "flat").num_tasks < 40


def test_more_held_out_tasks_than_there_are_is_noted(tmp_path, capsys):
    path = str(write(tmp_path / "x.jsonl"))
    for name, count in (("train", 1), ("test", 3)):
        problems = [json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(problems))
    rows = [{"task_type": "null_reward", "prompt": f"{i}?", "problem_id": "p", "source": "s"} for i in range(40)]
    for name, options in (
        ("dataset", {"path": path} | OPTIONS),
        ("math", {"path": path, "problem": "question", "answer": "result"}),
        ("gsm8k", {"path": str(tmp_path)}),
        ("genesys", {"path": str(write(tmp_path / "genesys.jsonl", rows))}),
    ):
        env = envs.load(name, **options)
        found = {env.make_task(i, "held_out").messages[-1]["content"] for i in range(99)}
        assert env.num_held_out == len(found) < 40, name
        config = base.get_config()
        config.env.name, config.env.options, config.inference.max_model_len = name, options, 512
        for count in (len(found), len(found) + 1):
            config.evaluation.num_tasks = count
            rules.check_prompts(config, tokenizer_lib.load("byte_chatml"))
            noted = f"takes {count} held-out tasks of {name}: there are only {len(found)}, which"
            assert (noted in capsys.readouterr().err) == (count > len(found))


def test_held_out_prompts_that_are_trained_on_are_noted(tmp_path, capsys):
    """Equal rows have one prompt, and a file for tests may have rows of the other."""
    for name, rows in (
        ("same.jsonl", ROWS[:1] * 40),
        ("hub/train.jsonl", ROWS),
        ("hub/test.jsonl", ROWS[:3] + [ROWS[3] | {"question": "?"}]),
    ):
        write(tmp_path / name, rows)
    config = base.get_config()
    config.env.name, config.inference.max_model_len, config.evaluation.num_tasks = "dataset", 512, 4
    for name, words in (
        ("same.jsonl", "4 of 4 held-out tasks"),
        ("hub", "3 of 4 held-out tasks"),
        ("hub/train.jsonl", ""),
    ):
        config.env.options = {"path": str(tmp_path / name)} | OPTIONS
        rules.check_prompts(config, tokenizer_lib.load("byte_chatml"))
        found = capsys.readouterr().err
        assert (f"{words} of dataset have the prompt of a training task" in found) == bool(words), found


@pytest.mark.parametrize("count", [2, 40])
def test_one_file_holds_out_rows_by_their_prompts(tmp_path, count):
    """Also a small one; a prompt that occurs twice is on one side."""
    env = load(write(tmp_path / "x.jsonl", ROWS[:count] * 2))
    train = {env.make_task(i, "train").messages[-1]["content"] for i in range(env.num_tasks)}
    held = {env.make_task(i, "held_out").messages[-1]["content"] for i in range(80)}
    assert train and held and not train & held and train | held == {row["question"] for row in ROWS[:count]}
    many = load(write(tmp_path / "many.jsonl", [{"question": f"{i}?", "result": "1"} for i in range(800)]))
    assert 30 < many.num_held_out < 70 and many.num_tasks + many.num_held_out == 800  # 1 in 16


def test_each_row_comes_once_per_epoch(tmp_path):
    config = base.get_config()
    config.env.name = "dataset"
    config.env.options = {"path": str(write(tmp_path / "x.jsonl"))} | OPTIONS
    config.rl.prompts_per_step = 4
    config = experiment.resolve(config).config
    num = config.env.num_tasks
    assert num == load(tmp_path / "x.jsonl").num_tasks
    order = [group.index for step in range(1, num + 1) for group in task_schedule.train_groups(config, step)]
    epochs = np.array(order).reshape(4, num)
    assert all(sorted(epoch) == list(range(num)) for epoch in epochs) and len({*map(tuple, epochs)}) == 4


def test_prompts_may_be_messages_and_solutions_longer_than_answers(tmp_path):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rows = [{"question": prompt, "result": 2, "work": "It is 2."}, {"question": "2?", "result": 2, "work": "2."}]
    env = load(write(tmp_path / "x.jsonl", rows), solution="work", reward="number", system_prompt="Add.")
    tasks = {split: env.make_task(0, split) for split in ("train", "held_out")}
    task = next(task for task in tasks.values() if len(task.messages) == 3)
    assert task.messages == ({"role": "system", "content": "Add."}, *prompt) and task.answer == "It is 2."
    assert env.score(task, task.answer) == {"reward": 1.0} and env.score(task, "3") == {"reward": 0.0}
    assert env.score(task, f"{' ' * 65536}2") == {"reward": 0.0}


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "1 + 1?", "name": "ann"},
    {"role": "assistant", "content": None, "reasoning_content": "Add.", "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c", "name": "add"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_prompt_keeps_all_fields_of_its_messages(tmp_path, suffix):
    """Arguments may be JSON, and a table fills absent fields with nulls."""
    plain = [CALLED[0], CALLED[1] | {"content": ""}, CALLED[2] | {"content": "2"}]
    as_json = CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}}
    calls = [CALL, as_json] if suffix == ".jsonl" else [as_json]
    prompts = [[CALLED[0], CALLED[1] | {"tool_calls": [call]}, CALLED[2] | {"content": "2"}] for call in calls]
    prompts += [CALLED] if suffix == ".jsonl" else []
    env = load(
        write(tmp_path / f"x{suffix}", [{"question": prompt, "result": "2"} for prompt in [*prompts, prompts[0]]])
    )
    assert env.make_task(0, "train").messages == env.make_task(0, "held_out").messages == tuple(plain)
    tokenizer = tokenizer_lib.load("byte_chatml")
    text = tokenizer.decode(env.make_task(0, "train").messages and tokenizer.render(plain).token_ids)
    assert "<think>\nAdd.\n</think>" in text and '{"name": "add", "arguments": {"a": 1}}' in text


def test_a_prompt_that_ends_with_the_assistant_is_continued_in_rollouts_and_in_training(tmp_path):
    prompt = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is"}]
    env = load(write(tmp_path / "x.jsonl", [{"question": prompt, "result": " 2"}, {"question": "2?", "result": " 2"}]))
    split = next(split for split in ("train", "held_out") if len(env.make_task(0, split).messages) == 2)
    tokenizer = tokenizer_lib.load("byte_chatml")
    task, ids = envs.environment.prompts(env, tokenizer)(0, split)
    assert tokenizer.decode(ids, skip_special=False).endswith("<|im_start|>assistant\nIt is")
    trained = sft.demonstration(env, task, 0, False)
    assert tokenizer.render(**trained).token_ids[: len(ids) + 2] == [*ids, *b" 2"]


@pytest.mark.parametrize(
    "vary",
    [
        lambda i: [{"role": "user", "content": f"{i}"}, {"role": "user", "content": f"Q{i % 2}"}],
        lambda i: [
            {"role": "user", "content": f"{i}"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Q"},
        ],
        lambda i: [{"role": "system", "content": f"Be {i}."}, {"role": "user", "content": "Q"}],
        lambda i: [{"role": "user", "content": "Q"}, {"role": "assistant", "content": f"{i}"}],
        lambda i: [{"role": "user", "content": "Q", "name": f"{i}"}],
        lambda i: [CALLED[0], CALLED[1] | {"reasoning_content": f"{i}"}, CALLED[2]],
        lambda i: [CALLED[0], CALLED[1] | {"tool_calls": [CALL | {"id": f"{i}"}]}, CALLED[2]],
        lambda i: "Q",  # the task's number decides
        lambda i: [{"role": "user", "content": "Q"}],
    ],
)
def test_the_whole_prompt_decides_the_split(tmp_path, vary):
    env = load(write(tmp_path / "x.jsonl", [{"question": vary(i), "result": str(i)} for i in range(1600)]))
    assert 70 < env.num_held_out < 130 and env.num_tasks + env.num_held_out == 1600


def rehearsed(config):
    """The lines for people before a run."""
    lines: list[str] = []
    tryout.rehearse(config, tokenizer_lib.load("byte_chatml"), lines.append)
    return lines


def test_a_prompt_that_answers_itself_is_noted(tmp_path, capsys):
    rows = [{"question": f"Is it {i}, or rather {i + 1}?", "result": i + i % 2} for i in range(32)]
    path = write(tmp_path / "x.jsonl", rows)
    config = base.get_config()
    config.env.name, config.env.options = "dataset", {"path": str(path), "reward": "number"} | OPTIONS
    env = load(path, reward="number")
    own = [
        env.make_task(i, "train").answer == env.make_task(i, "train").messages[0]["content"].split()[-1][:-1]
        for i in range(env.num_tasks)
    ]
    warning = "warning: the prompt's own text, sent back as an answer, earns the reward of {} of {} tasks of dataset: a"
    assert 0 < sum(own[:16]) < 16 and rehearsed(config)[0].startswith(warning.format(sum(own[:16]), 16))
    options = [f"path={path}", "reward=number", "prompt=question", "answer=result"]
    assert commands.run("rl.envs", "try", "dataset", *options, "--n", 24) == 0
    assert warning.format(sum(own[:24]), 24) in capsys.readouterr().out
    config.env.options.reward = "exact"
    assert rehearsed(config) == []


REWARDS = [
    ("exact", "a b", " a b\n", "a  b"),
    ("number", "1,000", "It costs $1000.00.", "1000 or 1001"),
    ("number", "#### -2", "1 - 3 = -2", "10 - 2"),
    ("number", "5", "3 + 2 is 5", "five"),
    ("number", "2", "f(3)-2", "f(3) -2"),
    ("number", "-5", "\u22125", "5"),
    ("number", "-5", "-$5.00", "$5"),
    ("number", ".5", "0.50", "...5"),
    ("number", "1e+16", "1E16", "16"),  # as JSON has 10000000000000000.0
    ("exact", "Cafe\u0301", "Caf\u00e9", "Cafe"),
    ("exact", "72.0", "72", "72.5"),  # a column of a table with a missing number
    ("exact", "-3.0", "-3.0", "3"),
    ("exact", "1.0.0", "1.0.0", "1.0"),
    ("regex", "Zoe\u0308", "<a>Zo\u00eb</a>", "<a>Zoe</a>"),
    ("regex", "a\nb", "<a>a\nb</a>", "<a>a b</a>"),
    ("regex", "Paris", "<a>Rome</a> <a> Paris </a>", "<a>Paris</a> <a>Rome</a>"),
    ("math", "\\boxed{3} + 4\n#### 7", "It is 7.", "3"),
    ("math", "0.5", r"so \boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}"),
    ("math", r"\frac{x}{2}", r"$\frac{2x}{4}$", "x"),
    ("math", "7", "The answer is 7.", ""),
    ("math", "It is \\boxed{3}.\n#### 7", "7", "3"),
    ("math", "1<x<2", r"\boxed{(1,2)}", r"\boxed{(1,3)}"),  # an interval may answer an inequality, not the reverse
    ("math", "(1,2)", r"\boxed{(1,2)}", r"\boxed{1<x<2}"),
]


@pytest.mark.parametrize(("name", "answer", "right", "wrong"), REWARDS)
def test_rewards(name, answer, right, wrong):
    reward = rewards.make(name, "<a>(.*?)(</a>)" if name == "regex" else "")
    rewards.check_answer(name, answer)
    assert (reward(right, answer, {}), reward(wrong, answer, {})) == (1.0, 0.0)


def test_math_and_own_rewards_are_computed_in_the_sandbox(tmp_path):
    """A tower of powers ends its process, and neither the run nor the other completions."""
    (tmp_path / "own_reward.py").write_text(
        "def reward(completion, row):\n    return {'reward': float(completion == row['result']), 'hard': float(row['hard'])}\n"
    )
    path = write(tmp_path / "x.jsonl")
    own = f"{tmp_path}/own_reward.py:reward"
    for reward, completions, expected in (
        ("math", [r"\boxed{%s}", r"\boxed{9^{9^{9^{9}}}}", "7.5"], [1, 0, 0]),
        (own, ["%s", "x"], [1, 0]),
    ):
        options = {"path": str(path), "reward": reward} | OPTIONS
        task = envs.load("dataset", **options).make_task(3, "train")
        away = scorer.Scorer("dataset", options, 0, limit_s=1, digest=envs.digest(*envs.locate("dataset", options)))
        found = away.score(task, [text.replace("%s", task.answer) for text in completions])
        assert [one.scores["reward"] for one in found] == expected
        away.close()
    with open(tmp_path / "own_reward.py", "a") as file:
        file.write("\n")
    changed = scorer.Scorer("dataset", options, 0, limit_s=1, digest="0" * 64)
    with pytest.raises(ValueError, match="did not start: ValueError: its code or data has changed since the run began"):
        changed.score(task, ["x"])
    sys.modules.pop("own_reward", None)


def test_the_digest_covers_rows_rewards_and_the_shipped_code(tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text("def reward(completion, row):\n    return 1.0\n")
    write(tmp_path / "x.jsonl")
    options = {"path": str(tmp_path / "x.jsonl"), "reward": f"{tmp_path}/own_reward.py:reward"}
    paths = catalog._files_of(sys.modules["rl.envs.native.dataset"])
    assert {"dataset.py", "environment.py", "rewards.py", "sources.py"} <= {path.name for path in paths}
    assert {path.parent.name for path in paths} == {"native", "interface", "data"}
    found = [envs.digest("dataset", options)]
    for name in ("x.jsonl", "own_reward.py"):
        with open(tmp_path / name, "a") as file:
            file.write("\n")
        found.append(envs.digest("dataset", options))
    assert len({*found, envs.digest("dataset", {"reward": "math"})}) == 4
    for reward, is_same in (("math", False), ("boxed", False), ("exact", True)):  # of the package that scores
        before = envs.digest("dataset", {"reward": reward})
        with monkeypatch.context() as patch:
            patch.setattr(catalog.metadata, "version", lambda package: "0")
            assert (envs.digest("dataset", {"reward": reward}) == before) == is_same
    for kind in ("dataset", "gsm8k"):  # files that they do not read change nothing
        (tmp_path / kind).mkdir()
        before = []
        for name, is_read in (
            ("train.jsonl", True),
            ("notes.txt", False),
            ("cache-1.arrow", False),
            ("test.jsonl", True),
        ):
            before.append(envs.digest(kind, {"path": str(tmp_path / kind)}))
            (tmp_path / kind / name).write_text(name)
            assert (envs.digest(kind, {"path": str(tmp_path / kind)}) != before[-1]) == is_read
    with pytest.raises(ValueError, match="env.options.reward = .* in /nowhere .--code.; add"):
        envs.locate("dataset", options | {"path": ""}, ["/nowhere"])
    with pytest.raises(ValueError, match="env.options.path = .*x.jsonl' does not exist in /nowhere"):
        envs.locate("dataset", {"path": options["path"]}, ["/nowhere"])


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, {}, "x.jsonl does not exist; give a file or a folder with rows"),
        ("", {}, "x.jsonl has no rows; give a file"),
        ("{}\n[1]\n", {}, "x.jsonl, train row 1: field 'question' does not exist; set env.options.prompt$"),
        ('{"questions": ""}', {}, "field 'question' does not exist, only 'questions' .did you mean questions"),
        ('{"question": "a", "result": 1}\n\n{"a"', {}, r"^\S+x.jsonl, line 3 is not a JSON object: "),
        pytest.param("[" * 10**5, {}, "x.jsonl cannot be read: maximum recursion", id="nested"),
        ('{"question": "a", "result": ""}', {}, "row 1: the answer is empty; correct it"),
        ('{"question": "a", "result": null}', {}, "row 1: the answer is empty; correct it"),
        ('{"question": "a", "result": "b"}', {"reward": "number"}, "the answer 'b' has no number; correct it"),
        ('{"question": "a", "result": " "}', {"reward": "math"}, "row 1: the answer is empty; correct it"),
        (
            '{"question": "a", "result": ["1", "2"]}',
            {},
            r"row 1: the answer \['1', '2'\] is not a text or a number; set",
        ),
        (
            r'{"question": "\ud800", "result": "b"}',
            {},
            "x.jsonl, train row 1: 'utf-8' codec can't encode .*; remove the character",
        ),
        ('{"question": "a", "result": "b", "result": "c"}', {}, "line 1 .*has the field 'result' twice; remove one"),
        ('{"question": "a", "result": NaN}', {}, "row 1: the answer is NaN, a missing number; correct it"),
        ('{"question": "a", "result": "3:45"}', {"reward": "number"}, "row 1: the answer '3:45' is .*reward = 'exact'"),
        ('{"question": "a", "result": "(3, 4)"}', {"reward": "number"}, "row 1: the answer .* is .*reward = 'math'"),
        ('{"question": " ", "result": "b"}', {}, "row 1: the prompt is ' ', which has no text; write a text, or"),
        ('{"question": [{"role": "user", "content": null}], "result": "b"}', {}, "which has no text; write a text"),
        (
            '{"question": [{"role": "user", "content": [{"type": "image_url"}]}], "result": "b"}',
            {},
            "row 1: a message has a part of type 'image_url', and only text is supported; remove it",
        ),
        ('{"question": [{"content": "a"}], "result": "b"}', {}, "row 1: a message has no role; add one"),
        ('{"question": {"role": "user"}, "result": "b"}', {}, "write a text, or messages with role and content"),
        (
            '{"question": [{"role": "assistant", "tool_calls": [{"function": {}}]}], "result": "b"}',
            {},
            "row 1: a tool call has no name; set function.name",
        ),
        ('{"question": 5, "result": "b"}', {}, "the prompt is '5'; write a text, or messages with role"),
        ('{"question": [], "result": "b"}', {}, "the prompt is '..', which has no text; write a text"),
        ('{"question": [{"role": "user"}], "result": "b"}', {}, "the prompt is .* or messages with role"),
        (
            '{"question": "a"}',
            {"solution": "work", "reward": "rl.envs.native.rewards:make"},
            "field 'work' does not exist, only 'question'; set env.options.solution",
        ),
        ('{"question": "a", "result": "b"}', {}, "x.jsonl has 1 tasks; add some, because one must be held out"),
        ('{"question": "a", "result": "b"}', {"held_out": "test"}, "has no split 'test' to hold out .* it has train"),
        ('{"question": "a", "result": "b"}', {"held_out": "train"}, "has no split 'train' to hold out"),
        ("", {"reward": "nubmer"}, "reward 'nubmer' is unknown .did you mean number"),
        ("", {"reward": "regex"}, "reward 'regex' needs env.options.pattern"),
        ("", {"reward": "regex", "pattern": "("}, "pattern = '.' is not a regular expression: missing .*; correct it"),
        ("", {"pattern": "a"}, "reward 'exact' has no pattern; set reward = 'regex'"),
        ("", {"reward": "json:loads"}, "json:loads cannot be called as reward.completion, row.: too many"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, content, options, words):
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        load(tmp_path / "x.jsonl", **options)
    assert "\n" not in str(error.value)


def test_bytes_in_a_table_are_no_answer(tmp_path):
    """No completion equals b'2', so the policy earned nothing."""
    rows = [row | {"result": row["result"].encode()} for row in ROWS]
    with pytest.raises(
        ValueError, match="train row 1: the answer b'0' is not a text or a number; set env.options.reward"
    ):
        load(write(tmp_path / "x.parquet", rows))


def test_messages_in_a_column_of_texts_are_messages(tmp_path):
    """A table of CSV has no other place for them; the model saw the brackets of JSON."""
    rows = [{"question": json.dumps([{"role": "user", "content": f"Q{i}"}]), "result": str(i)} for i in range(40)]
    env = load(write(tmp_path / "x.jsonl", [*rows, {"question": '[{"role"', "result": "no JSON"}]))
    texts = {env.make_task(i, "train").messages[0]["content"] for i in range(env.num_tasks)}
    assert texts < {*(f"Q{i}" for i in range(40)), '[{"role"'} and len(texts) > 20


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_row(tmp_path):
    rows = [{"a": "1"}, {"a": "2"}]
    for name, text in (
        ("x.json", json.dumps(rows)),
        ("array.jsonl", json.dumps(rows, indent=1)),
        ("x.jsonl", "\n".join(map(json.dumps, rows))),
        ("x.csv", "a\n1\n2\n"),
    ):
        (tmp_path / name).write_text(text, "utf-8-sig")
        assert [*sources.read(tmp_path / name)["train"]] == rows


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.txt", "a", "x.txt is not a file of rows; use one that ends with .jsonl"),
        ("x.csv", "a,b\n1\n", "x.csv cannot be read: row 1 does not have the 2 fields of the first line; correct"),
        ("x.csv", "a,b,a\n1,2,3\n", "x.csv cannot be read: two columns have the name 'a'; rename one"),
        ("x.csv", "a,b\n1,2,3\n", "x.csv cannot be read: row 1 does not have the 2 fields of the first line; correct"),
        ("x.csv", 'a,b\n"1"x,2\n', "x.csv cannot be read: .* expected after"),
        ("x.csv", "a;b\n1;2\n", "x.csv cannot be read: its fields are separated by ';' in place of commas; correct"),
        ("x.csv", "a,b\n\udcff,2\n", "x.csv cannot be read: 'utf-8' codec can't decode .*; save it as UTF-8"),
        ("x.json", "[1", "x.json cannot be read: Expecting"),
        ("x.json", '[{"a": 1, "a": 2}]', "x.json cannot be read: an object has the field 'a' twice; remove one"),
        pytest.param("x.json", "[" * 10**5, "x.json cannot be read: maximum recursion", id="nested"),
        ("x.parquet", "a", "x.parquet cannot be read: .*; correct the file"),
        (
            "x.jsonl",
            json.dumps(ROWS[0]).encode("utf-16"),
            r"x.jsonl, line 1 is not UTF-8 \(.*\); save the file as UTF-8",
        ),
        ("x.jsonl", gzip.compress(b"{}", mtime=0), r"x.jsonl, line 1 is not UTF-8 \(.*\); save .*, and not compressed"),
        ("x.jsonl", None, "x.jsonl is a pipe or a device; save its rows to a file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, words):
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(
            content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
        )
    with pytest.raises(ValueError, match=words):
        [*sources.read(tmp_path / name)["train"]]


# ---- math ------------------------------------------------------------------------------------------------------------

PROBLEMS = {"1 + 1?": "2", "Half?": r"\frac{1}{2}", "Both?": r"\{1, 2\}", "Big?": "1" * 300, "Expand.": "x^2+2x+1"}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Returns the environment `math`, and its tasks by their problems."""
    rows = [*PROBLEMS.items(), *((f"{n} + {n}?", str(2 * n)) for n in range(2, 40))]
    path = write(tmp_path_factory.mktemp("math") / "rows.jsonl", [{"problem": p, "answer": a} for p, a in rows])
    env = envs.load("math", path=str(path))
    tasks = [env.make_task(index, split) for split in ("train", "held_out") for index in range(len(rows))]
    return env, {task.messages[-1]["content"]: task for task in tasks}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_own_answers_in_a_box_score_one_and_junk_nothing(problems, problem):
    env, task, answer = problems[0], problems[1][problem], PROBLEMS[problem]
    assert task.env == "math" and task.answer == f"\\boxed{{{answer}}}"
    assert env.score(task, f"So it is ${task.answer}$.\n") == {"reward": 1.0}
    for junk in ("", answer, r"\boxed{}", r"\boxed{zzz}", r"\boxed{" * 9000, "{" * 9000, task.answer[:-1], "9" * 70000):
        assert env.score(task, junk)["reward"] == 0.0, junk[:40]


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
def test_the_last_box_counts(problems, problem, completion, reward):
    assert problems[0].score(problems[1][problem], completion)["reward"] == reward


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
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(["\\boxed{", "{", "}", "x", "\\"], k=rng.randint(0, 9)))
        assert numerals.last_boxed(text) == box_by_stack(text)
