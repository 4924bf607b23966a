"""Rows of GENESYS: their format, and the score of each task type for right, wrong, and hostile responses."""

import asyncio
import builtins
import json

import pytest

from rl import envs
from rl.envs.interface import scripted_model
from rl.envs.native.genesys import checks, genesys, instructions

ROW = {"problem_id": "p", "source": "s", "task_type": "null_reward", "prompt": "Hello"}
TREE = "root\n +-- a\n |   `-- b\n `-- c"
SENTENCES = "1: One.\n2: Two.\n3: Three.\n4: Four."
MODEL = "import pydantic\nclass Person(pydantic.BaseModel):\n    name: str\n    age: int\n"
CASES = [
    ("verifiable_math", {"ground_truth": "\\frac{1}{2}"}, "It is \\boxed{0.5}.", 1.0),
    ("verifiable_math", {"ground_truth": "7"}, "7 or \\boxed{8}", 0.0),
    (
        "code_output_prediction",
        {"ground_truth": [1, 2]},
        'First {"output": 3}, then\n```json\n{"output": [1, 2]}\n```',
        1.0,
    ),
    ("code_output_prediction", {"ground_truth": [1, 2]}, '{"output": [1, 2]} no: {"output": null}', 0.0),
    ("complex_json_output", {"ground_truth": '{"a": {"b": [1]}}'}, 'So {"a": {"b": [1]}}', 1.0),
    ("complex_json_output", {"ground_truth": {"a": 1}}, "{'a': 1}", 0.0),
    ("pydantic_adherance", {"pydantic_config": MODEL, "model_name": "Person"}, '{"name": "Ada", "age": 36}', 1.0),
    ("pydantic_adherance", {"pydantic_config": MODEL, "model_name": "Person"}, '{"name": "Ada"}', 0.0),
    ("pydantic_adherance", {"pydantic_config": MODEL, "model_name": "Person"}, "Ada, 36", 0.0),
    ("reverse_text", {"ground_truth": "olleh"}, "<reversed_text>olleh</reversed_text>", 1.0),
    ("reverse_text", {"ground_truth": "olleh"}, "olleh", 0.0),
    ("unscramble_sentence", {"ground_truth": SENTENCES}, f"<unscrambled_text>{SENTENCES}</unscrambled_text>", 1.0),
    (
        "unscramble_sentence",
        {"ground_truth": SENTENCES},
        "<unscrambled_text>*1*: Three.\n*2*: Four.\n*3*: One.\n*4*: Two.</unscrambled_text>",
        0.5,
    ),
    (
        "unscramble_sentence",
        {"ground_truth": SENTENCES},
        "<unscrambled_text>1: Four.\n2: Three.\n3: Two.\n4: One.</unscrambled_text>",
        0.0,
    ),
    ("ascii_tree_formatting", {"ground_truth": TREE}, f"<ascii_formatted>\n{TREE}\n</ascii_formatted>", 1.0),
    ("ascii_tree_formatting", {"ground_truth": TREE}, TREE, 0.0),
    # Two of four lines: 0.3 * 0.5 + 0.7 * 0.25; the second line of the answer is not indented.
    (
        "ascii_tree_formatting",
        {"ground_truth": TREE},
        "<ascii_formatted>root\nx --\n |   `-- b\n z</ascii_formatted>",
        0.1625,
    ),
    ("ifeval", {"ground_truth": '{"func_name": "validate_no_commas", "N": null}'}, "no comma", 1.0),
    ("ifeval", {"ground_truth": {"func_name": "verify_bullet_points", "N": 2}}, "* a\n- b\n c", 1.0),
    ("ifeval", {"ground_truth": {"func_name": "verify_bullet_points", "N": 3}}, "* a\n- b\n c", 0.0),
    ("null_reward", {}, "anything", 0.0),
]


@pytest.mark.parametrize(("kind", "info", "completion", "expected"), CASES)
def test_scores(kind, info, completion, expected):
    checks.check(kind, info)
    assert checks.SCORES[kind](completion, info) == pytest.approx(expected)


def test_scores_of_reasoning_gym():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    for info in (
        {"dataset_name": "chain_sum", "entry": entry},
        {"reasoning_gym_dataset": "chain_sum", "reasoning_gym_entry": json.dumps(entry)},
    ):
        checks.check("reasoning_gym", info)
        score = checks.SCORES["reasoning_gym"]
        assert score(f"<answer>{entry['answer']}</answer>", info) == 1.0
        assert score(entry["answer"], info) == 0.0


def test_checkers_of_reasoning_gym_run_no_code_of_a_completion():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("n_queens", size=1, seed=1)[0]
    info, run = {"dataset_name": "n_queens", "entry": entry}, []
    checks.check("reasoning_gym", info)
    score = checks.SCORES["reasoning_gym"]
    right = entry["metadata"]["valid_answers"][0]
    assert score(f"<answer>{right}</answer>", info) == 1.0
    builtins.genesys_test = run
    assert score("<answer>__import__('builtins').genesys_test.append(1)</answer>", info) == 0.0 and not run
    with pytest.raises(ValueError, match="accepts any four numbers"):
        checks.check("reasoning_gym", {"dataset_name": "puzzle24", "entry": {}})


HOSTILE = [
    "",
    "{" * 5000,
    "[" * 5000,
    "<ascii_formatted>",
    "\\boxed{",
    '{"output": ' + "9" * 300 + "}",
    "\x00é" * 50,
    "<answer></answer>",
]


@pytest.mark.parametrize(("kind", "info"), [(kind, info) for kind, info, _, expected in CASES if expected == 1.0])
def test_hostile_completions_score_0_and_raise_nothing(kind, info):
    for text in HOSTILE:
        score = checks.SCORES[kind](text, info)
        assert 0 <= score <= 0.3 or (kind == "ifeval" and score == 1.0)


ARGUMENTS = [
    ("verify_keywords", {"keyword_list": ["Sun", "moon"]}, "The sun, the Moon", "The sun"),
    ("verify_keyword_frequency", {"word": "go", "N": 2}, "Go, go!", "going go"),
    ("validate_forbidden_words", {"forbidden_words": ["bad"]}, "good", "Bad luck"),
    ("verify_letter_frequency", {"letter": "l", "N": 3}, "hello world", "help"),
    ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a\n* * *\n"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "w " * 22, "w " * 23),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "One. Two.", "One"),
    ("validate_paragraphs", {"N": 2, "first_word": "Two", "i": 2}, "One\n\nTwo three", "Two\n\nOne"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Hi. P.S. more", "Hi. P.S."),
    ("validate_placeholders", {"N": 2}, "[a] and [b]", "[a]"),
    ("validate_title", {}, "<<Title>> text", "Title"),
    ("validate_choice", {"options": ["yes or no"]}, "yes", "maybe"),
    ("validate_highlighted_sections", {"N": 1}, "a *b* c", "a b c"),
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "SECTION 1 SECTION 2", "SECTION 1"),
    ("validate_json_format", {}, '{"a": 1}', "{a}"),
    ("validate_repeat_prompt", {"original_prompt": "Say"}, "Say it", "It"),
    ("validate_two_responses", {}, "a ****** b", "a ****** a"),
    ("validate_uppercase", {}, "LOUD", "Loud"),
    ("validate_lowercase", {}, "quiet", "Quiet"),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, "one NASA", "NASA ESA"),
    ("validate_end", {"end_phrase": "the end"}, "it is the end", "the end?"),
    ("validate_quotation", {}, '"q"', '"'),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), ARGUMENTS)
def test_instructions(name, arguments, good, bad):
    constraint = {"func_name": name} | arguments
    instructions.check(constraint)
    assert instructions.follows(good, constraint) and not instructions.follows(bad, constraint)


def test_rows_go_through_the_schema_unchanged():
    row = ROW | {
        "in_source_id": None,
        "gold_standard_solution": "x",
        "verification_info": {"a": [1]},
        "metadata": {"k": "v"},
    }
    texts = row | {name: json.dumps(row[name]) for name in ("verification_info", "metadata")} | {"solve_rate": 0.5}
    assert genesys.task_of(row).model_dump() == genesys.task_of(texts).model_dump() == row
    answer = {"llm_response": "y", "response_id": "r", "model_name": "m", "generation_config": {"temperature": 1.0}}
    full = row | answer | {"machine_info": None}
    assert genesys.Response.model_validate(json.loads(genesys.Response(**full).model_dump_json())).model_dump() == full


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"task_type": "kernelbench"}, "cannot run here"),
        ({"prompt": None}, "field prompt"),
        ({"verification_info": "{"}, "verification_info"),
        ({"task_type": "verifiable_math"}, "has no 'ground_truth'"),
        (
            {"task_type": "ifeval", "verification_info": {"ground_truth": {"func_name": "x"}}},
            "instruction 'x' is not known",
        ),
        (
            {"task_type": "ifeval", "verification_info": {"ground_truth": {"func_name": "validate_end"}}},
            "other arguments",
        ),
        ({"task_type": "ifeval", "verification_info": {"ground_truth": "[1]"}}, "is not known"),
        ({"task_type": "ifeval", "verification_info": {"ground_truth": "no commas"}}, "is not JSON"),
        ({"task_type": "complex_json_output", "verification_info": {"ground_truth": "{'a': 1}"}}, "is not JSON"),
        ({"task_type": "verifiable_code", "verification_info": {"test_cases": "print(1)"}}, "is not JSON"),
        ({"task_type": "verifiable_code", "verification_info": {"language": "rust"}}, "needs a compiler"),
        ({"task_type": "verifiable_code", "verification_info": {"test_cases": []}}, "without tests"),
        ({"task_type": "llm_judgeable_groundtruth_similarity"}, "no ground_truth"),
    ],
)
def test_wrong_rows_are_refused_with_their_number(tmp_path, change, text):
    file = tmp_path / "t.jsonl"
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in (ROW, ROW | {"prompt": "b"}, ROW | {"prompt": "c"} | change))
    )
    with pytest.raises(ValueError, match=f"row 3: .*{text}"):
        envs.load("genesys", path=str(file), seed=0)
    if change.get("task_type") == "kernelbench":
        assert envs.load("genesys", path=str(file), types="null_reward", seed=0).num_tasks == 1


def rows(tmp_path, *found):
    file = tmp_path / "tasks.jsonl"
    filler = [ROW | {"prompt": f"filler {i}"} for i in range(40)]
    file.write_text("".join(json.dumps(ROW | row) + "\n" for row in (*found, *filler)))
    return str(file)


def task_for(env, prompt):
    tasks = (env.make_task(index, split) for split in ("train", "held_out") for index in range(45))
    return next(task for task in tasks if task.messages[-1]["content"] == prompt)


def test_code_runs_its_cases_in_the_sandbox(tmp_path):
    stdin = [
        {"type": "stdin_stdout", "input": "3\n", "output": "6"},
        {"type": "stdin_stdout", "input": "4\n", "output": "9"},
    ]
    calls = [{"type": "function_call", "fn_name": "f", "input": [2, 3], "output": 5}]
    path = rows(
        tmp_path,
        {
            "prompt": "double",
            "task_type": "verifiable_code",
            "verification_info": {"language": "python", "test_cases": stdin},
        },
        {"prompt": "strict", "task_type": "prime_rl_code", "verification_info": {"test_cases": json.dumps(stdin)}},
        {"prompt": "add", "task_type": "deepcoder", "verification_info": {"test_cases": calls}},
    )
    env = envs.load("genesys", path=path, seed=0)
    assert env.score is None and env.kind == "replayed"
    play = lambda prompt, text: asyncio.run(  # noqa: E731
        env.play(task_for(env, prompt), scripted_model.ScriptedModel(scripted_model.always(text)))
    )
    program = "```python\nprint(2 * int(input()))\n```"
    assert play("double", program) == {"reward": 0.5} and play("strict", program) == {"reward": 0.0}
    assert play("add", "```python\ndef f(a, b):\n    return a + b\n```") == {"reward": 1.0}
    assert play("add", "```python\nclass Solution:\n    def f(self, a, b):\n        return a + b\n```") == {
        "reward": 1.0
    }
    assert play("add", "no code") == {"reward": 0.0} and play("filler 3", "x") == {"reward": 0.0}


def test_a_judge_is_the_model_itself_in_a_call_that_does_not_train(tmp_path):
    path = rows(
        tmp_path, {"prompt": "Why?", "task_type": genesys.JUDGED, "verification_info": {"ground_truth": "Because."}}
    )
    env = envs.load("genesys", path=path, seed=0)
    seen = []

    class Judge(scripted_model.ScriptedModel):
        async def chat(self, messages, **options):
            seen.append((messages[-1]["content"], options.get("trains", True)))
            return await super().chat(messages, **options)

    model = Judge(
        lambda messages, tools, rng: {"content": "85" if "Reference answer" in messages[-1]["content"] else "So."}
    )
    assert asyncio.run(env.play(task_for(env, "Why?"), model)) == {"reward": 0.85}
    assert [trains for _, trains in seen] == [True, False] and "Because." in seen[1][0] and "So." in seen[1][0]
    for text, expected in (("0", 0.01), ("nothing", 0.0), ("999999", 1.0)):
        assert genesys._judged(text) == expected
