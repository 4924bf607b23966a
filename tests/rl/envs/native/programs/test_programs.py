"""The environments that run programs: files of tasks, tools, sub-models, edits, and optimizers, with policies instead of a model."""

import asyncio
import json
import math
import random

import numpy as np
import pytest

from rl import envs
from rl.envs.interface import scripted_model
from rl.envs.native.programs import python_tool, repository, speedrun
from rl.envs.sandbox import limits as limits_lib


def play(env, task, policy, **options):
    """Returns (scores, calls)."""
    model = scripted_model.ScriptedModel(policy, **options)
    return asyncio.run(env.play(task, model)), model.calls


def block(code):
    return f"```python\n{code}\n```"


# ---- code ------------------------------------------------------------------------------------------------------------


def rows_of(count):
    return [
        {
            "prompt": f"Add {n}.",
            "tests": [f"assert f(1) == {n + 1}", f"assert f(-{n}) == 0"],
            "solution": f"def f(x): return x + {n}",
        }
        for n in range(count)
    ]


def test_a_file_of_tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows_of(40))))
    env = envs.load("code", path=str(path), reward="fraction")
    assert 30 < env.num_tasks < 40 and env.demonstrate is None
    task = env.make_task(0, "train")
    assert play(env, task, scripted_model.always(task.answer))[0] == {"reward": 1.0, "passed": 1.0, "has_code": 1.0}
    n = len(task.info["tests"])
    assert play(env, task, scripted_model.always(block("def f(x): return 0")))[0]["reward"] == 1 / n
    assert not any(test in json.dumps(task.messages) for test in task.info["tests"])
    assert play(env, task, scripted_model.always(task.answer), max_calls=0)[0]["reward"] == 0.0


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{", "Expecting"),
        ("[]", "list indices"),
        ('{"prompt": "a"}', "tests"),
        ('{"prompt": "a", "tests": []}', "without tests"),
        ('{"prompt": 1, "tests": ["assert 1"]}', "unsupported"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, line, problem):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(rows_of(1)[0]) + "\n" + line)
    with pytest.raises(ValueError, match=f"tasks.jsonl:2 is not a task: .*{problem}.*; correct the line"):
        envs.load("code", path=str(path))
    with pytest.raises(ValueError, match="is not a file"):
        envs.load("code", path=str(tmp_path / "none"))


def test_the_solution_of_each_form_of_generated_task_passes():
    env = envs.load("code", tests=4)
    tasks = [env.make_task(index, "train") for index in range(12)]
    assert len({type(task.info["tests"][0]) for task in tasks}) == 2
    for task in tasks:
        assert play(env, task, scripted_model.always(task.answer))[0]["reward"] == 1.0
        assert play(env, task, scripted_model.always(task.decoy))[0]["reward"] == 0.0 or len(task.info["tests"]) == 4


# ---- python_tool -----------------------------------------------------------------------------------------------------


def test_a_tool_keeps_variables_and_shows_errors():
    env = envs.load("python_tool", run_s=0.5, output_bytes=200)
    task = env.make_task(0, "train")
    codes = ["x = 20", "x + 1", "1/0", "print('y' * 1000)", "while True: pass", "x", "import os; os._exit(3)"]
    steps = [{"tool": "python", "arguments": {"code": code}} for code in codes]
    scores, calls = play(env, task, scripted_model.in_order(*steps, task.answer))
    shown = [message["content"] for message in calls[-1][0] if message["role"] == "tool"]
    assert shown[0] == "(no output)" and shown[1] == "21" and shown[2].endswith("division by zero")
    assert shown[3] == "y" * 100 + "\n[801 bytes left out]\n" + "y" * 99
    assert shown[4] == "error: it took too long; all variables are lost" and "NameError" in shown[5]
    assert shown[6] == "error: the program ended with status 3"
    assert scores == {"reward": 1.0, "turns": 8.0, "has_answer": 1.0}


def test_answers_of_python_tool():
    env = envs.load("python_tool", protocol="text")
    task = env.make_task(1, "train")
    number = task.answer.removeprefix("Answer: ")
    for text, reward in (
        (f"I think {number}.", 1.0),
        (f"{number} or {int(number) + 1}", 0.0),
        (block(f"print({number})"), 0.0),
        ("", 0.0),
    ):
        assert play(env, task, scripted_model.always(text))[0]["reward"] == reward, text
    questions = {env.make_task(index, "train").messages[-1]["content"].split()[1] for index in range(30)}
    assert len(questions) >= 2
    for kind in python_tool.KINDS:  # the program of a demonstration prints the answer
        env = envs.load("python_tool", protocol="text", kind=kind)
        task = env.make_task(0, "train")
        shown = env.demonstrate(task, random.Random(0), False)["messages"]
        _, calls = play(env, task, scripted_model.in_order(shown[-3]["content"], "done"))
        assert calls[-1][0][-1]["content"] == task.answer.removeprefix("Answer: ")


def test_questions_from_a_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n} + 1 = ?", "answer": n + 1}) for n in range(60)))
    env = envs.load("python_tool", path=str(path))
    task = env.make_task(0, "held_out")
    assert play(env, task, scripted_model.always(task.answer))[0]["reward"] == 1.0
    path.write_text(json.dumps({"prompt": "?", "answer": "none"}))
    with pytest.raises(ValueError, match="questions.jsonl:1 is not a question: .*no number"):
        envs.load("python_tool", path=str(path))


# ---- rlm -------------------------------------------------------------------------------------------------------------


def recursive(root, sub):
    """Returns the policy of a root that writes `root`, and of sub-models that answer `sub(prompt)`."""

    def policy(messages, tools, rng):
        if next(m for m in messages if m["role"] == "user")["content"].startswith("sub:"):
            return sub(messages, tools, rng)
        return scripted_model.in_order(*root)(messages, tools, rng)

    return policy


def test_a_root_solves_a_context_far_longer_than_its_prompts():
    env = envs.load("rlm", kind="needle", lines=8000)
    task = env.make_task(0, "train")
    prompt = sum(len(message["content"]) for message in task.messages)
    assert len(task.info["context"]) > 50 * prompt * 3
    assert play(env, task, scripted_model.always(task.answer))[0]["reward"] == 1.0
    scores, calls = play(env, task, scripted_model.always(block("print(context)")))  # reads it as its output
    assert scores["reward"] == 0.0
    assert (
        max(sum(len(message["content"]) for message in messages) for messages, *_ in calls)
        < len(task.info["context"]) / 4
    )
    assert play(env, task, scripted_model.always("1234"))[0]["reward"] == 0.0  # without the session


def test_200_sub_calls_are_concurrent_and_in_order():
    env = envs.load("rlm", kind="classify", lines=200)
    task = env.make_task(0, "train")
    query = task.messages[-1]["content"].split()
    letter, bound = query[query.index("letter") + 1], int(query[query.index("above") + 1])
    code = f"""
rows = [line.split() for line in context.splitlines()]
said = llm_batch(["sub: is it an animal? " + row[1] for row in rows])
done(sum(word == "yes" and row[0] == "{letter}" and int(row[2]) > {bound} for word, row in zip(said, rows)))"""

    def judge(messages, tools, rng):
        word = messages[0]["content"].split()[-1]
        return {
            "content": "yes" if word in "cat dog horse mouse cow sheep goat lion tiger bear wolf fox".split() else "no"
        }

    found = [
        play(env, task, recursive([block(code)], judge), max_calls=300, pauses=random.Random(seed)) for seed in range(2)
    ]
    assert [scores for scores, _ in found] == [{"reward": 1.0, "turns": 1.0, "sub_calls": 200.0, "errors": 0.0}] * 2
    wrong = lambda messages, tools, rng: {"content": "no"}  # noqa: E731
    value = play(env, task, recursive([block(code)], wrong), max_calls=300)[0]["reward"]
    assert value == float(task.info["content"] == "0")  # the answers of sub-models decide


def test_numbers_tell_equal_prompts_apart():
    env = envs.load("rlm", lines=8, words=8)
    task = env.make_task(0, "train")
    draw = lambda messages, tools, rng: {"content": str(rng.random())}  # noqa: E731
    code = block(
        "found = llm_batch(['sub: x'] * 8); again = llm_batch(['sub: x'] * 8)\nprint(len(set(found)), found == again)"
    )
    _, calls = play(env, task, recursive([code, "done"], draw))
    assert calls[-1][0][-1]["content"] == "8 True"


def test_depth_and_limits():
    env = envs.load("rlm", lines=8, words=8, depth=1, max_prompts=3, turns=2)
    task = env.make_task(0, "train")
    inner = block(
        "print(rlm('sub: deeper', 'x')); answer['content'] = rlm('sub: deeper', 'x') + context; answer['ready'] = True"
    )

    def sub(messages, tools, rng):
        return {"content": inner}

    code = block("print(rlm('sub: go', 'part'))")
    scores, calls = play(env, task, recursive([code, "done"], sub))
    assert calls[-1][0][-1]["content"] == "[depth limit 1]part" and scores["sub_calls"] == 1.0
    _, calls = play(env, task, recursive([block("llm_batch(['sub: x'] * 4)"), "done"], sub))
    assert calls[-1][0][-1]["content"].endswith("RuntimeError: at most 3 prompts")
    _, calls = play(env, task, recursive([block("llm_batch('sub: x')"), "done"], sub))
    assert calls[-1][0][-1]["content"].endswith("RuntimeError: prompts must be a list of str")
    scores, _ = play(
        env, task, recursive([block("answer['content'] = '7'"), block("llm_batch(['sub: x'] * 3)")], sub), max_calls=3
    )
    assert scores["reward"] == float(task.info["content"] == "7")  # the answer so far


def test_the_answer_may_be_edited_and_is_lost_with_the_session():
    env = envs.load("rlm", lines=8, words=8, run_s=0.3, turns=6)
    task = env.make_task(0, "train")
    right = task.info["content"]
    edits = [block("answer['content'] = 'wrong'"), block(f"answer['content'] = {right}"), "It is done."]
    assert play(env, task, scripted_model.in_order(*edits))[0]["reward"] == 1.0
    ended = [block("while True: pass"), block(f"done({right!r})")]
    assert play(env, task, scripted_model.in_order(*ended))[0] == {
        "reward": 1.0,
        "turns": 2.0,
        "sub_calls": 0.0,
        "errors": 1.0,
    }
    for code in (
        "answer = 3",
        "del answer",
        "answer['ready'] = 1",
        "answer = {'ready': True}",
        f"answer['content'] = [{right}]; answer['ready'] = True",
    ):
        assert play(env, task, scripted_model.always(block(code)))[0]["reward"] == 0.0


def test_sub_models_have_tools():
    env = envs.load("rlm", lines=8, words=8, sub_tools=True, sub_turns=2)
    task = env.make_task(0, "train")

    def sub(messages, tools, rng):
        if messages[-1]["role"] == "tool":
            return {"content": messages[-1]["content"].upper()}
        assert tools[0]["function"]["name"] == "read"
        return {"content": ""} | scripted_model.call("read", {"first": 1, "last": 2}, rng)

    _, calls = play(env, task, recursive([block("print(llm_batch(['sub: x'])[0])"), "done"], sub))
    assert calls[-1][0][-1]["content"] == "\n".join(task.info["context"].splitlines()[1:3]).upper()
    assert calls[0][1] == []  # the root has none


def test_no_constant_answer_is_often_right():
    for kind in ("count", "needle"):
        env = envs.load("rlm", kind=kind, lines=20, words=8)
        answers = [env.make_task(index, "train").info["content"] for index in range(60)]
        assert max(map(answers.count, answers)) < 20 and "0" not in answers


# ---- swe_toy ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package():
    env = envs.load("swe_toy", turns=6)
    return env, env.make_task(0, "train")


def edit(path, old, new):
    return {"tool": "edit", "arguments": {"path": path, "old": old, "new": new}}


def test_tools_of_a_repository(package):
    env, task = package
    made = task.info["made"]
    steps = [
        {"tool": "run_tests"},
        {"tool": "read", "arguments": {"path": made.path}},
        {"tool": "read", "arguments": {"path": "../secret"}},
        edit(made.path, "no such text", ""),
        edit(made.path, made.wrong, made.right),
        {"tool": "run_tests"},
    ]
    scores, calls = play(env, task, scripted_model.in_order(*steps))
    replies = calls[-1][0]
    shown = [message["content"] for message in replies if message["role"] == "tool"]
    assert "Error" in shown[0] and shown[1] == made.files[made.path] and "does not exist" in shown[2]
    assert "occurs 0 times" in shown[3] and shown[4] == "edited"
    assert scores == {"reward": 1.0, "edited": 1.0, "changed_tests": 0.0, "turns": 6.0}


def test_changed_tests_and_cheats_get_nothing(package):
    env, task = package
    made = task.info["made"]
    mended = edit(made.path, made.wrong, made.right)
    tests = edit("test_shop.py", "def test_all():", "def test_all():\n    return")
    assert play(env, task, scripted_model.in_order(mended, tests, "done"))[0]["reward"] == 0.0
    assert play(env, task, scripted_model.in_order(tests, "done"))[0]["reward"] == 0.0
    assert play(env, task, scripted_model.in_order("done"))[0]["reward"] == 0.0
    for cheat in ("raise SystemExit(0)", "import os; os._exit(0)", "while True: pass", "pass"):
        text = made.files[made.path]
        first = text.splitlines()[0]
        assert (
            play(env, task, scripted_model.in_order(edit(made.path, first, f"{cheat}\n{first}"), "done"))[0]["reward"]
            == 0.0
        )


def test_each_bug_fails_a_test_and_is_mended_by_one_line():
    for number in range(20):
        made = repository.make(random.Random(number))
        for text, fails in (
            (made.files[made.path], True),
            (made.files[made.path].replace(made.wrong, made.right), False),
        ):
            namespace, failed = {}, 0
            for path, source in {**made.files, made.path: text}.items():
                if path.startswith("shop/"):
                    exec(source, namespace)
            for test in made.hidden:
                try:
                    exec(test, namespace)
                except Exception:  # as a broken package may raise
                    failed += 1
            assert bool(failed) == fails


# ---- speedrun --------------------------------------------------------------------------------------------------------


def test_functions_are_those_of_the_c_library():
    for x in (0.0, -1e-9, -0.1, -1.0, -3.3, -50.0, -690.0):
        assert speedrun.exp(x) == pytest.approx(math.exp(x), rel=1e-12)  # the error that its docstring states
    assert speedrun.exp(-1e4) == 0.0
    for x in (1e-9, 0.3, 0.75, 1.0, 2.0, 5.5, 1e9):
        assert speedrun.log(x) == pytest.approx(math.log(x), abs=1e-13)


def test_gradients_are_those_of_numpy():
    corpus = speedrun.Corpus(((3, 1), (2, 5)), 0.0)
    params = np.array([[0.5, -0.25], [1.0, 0.0]])
    counts = np.array(corpus.counts, float)
    norm = np.exp(params).sum(1, keepdims=True)
    loss, grads = corpus.loss_and_gradients([*params.ravel()])
    assert loss == pytest.approx(-(counts * (params - np.log(norm))).sum() / counts.sum())
    expected = (np.exp(params) / norm * counts.sum(1, keepdims=True) - counts) / counts.sum()
    np.testing.assert_allclose(grads, expected.ravel(), rtol=1e-12)


def test_optimizers_are_paid_by_steps():
    env = envs.load("speedrun")
    task = env.make_task(0, "train")
    most, best = task.info["most"], task.info["best"]
    rate_3 = speedrun.steps_of(task.info["corpus"], 0.0, 3.0)
    update = "def update(params, grads, state, step):\n    "
    cases = {
        task.answer: 1.0,
        task.decoy: 0.0,
        block(update + "return [p - 3.0 * g for p, g in zip(params, grads)]"): min(
            (most - rate_3) / (most - best), 1.0
        ),
        block(update + "return [float('nan')] * len(params)"): 0.0,
        block(update + "return params[:1]"): 0.0,
        block(update + "return 'x' * len(params)"): 0.0,
        block(update + "return [True] * 10**6"): 0.0,
        block(update + "while True: pass"): 0.0,
        block("gradients = lambda params: None\n" + update + "return params"): 0.0,
        block("import os\nos._exit(0)"): 0.0,
    }
    for text, reward in cases.items():
        assert play(env, task, scripted_model.always(text))[0]["reward"] == pytest.approx(reward), text


# ---- all -------------------------------------------------------------------------------------------------------------


def test_slow_programs_are_noted_for_validators():
    env = envs.load("python_tool", run_s=0.5)
    task = env.make_task(0, "train")

    async def largest(code):
        model = scripted_model.ScriptedModel(
            scripted_model.in_order({"tool": "python", "arguments": {"code": code}}, "1")
        )
        with limits_lib.measured() as times:
            await env.play(task, model)
        return times.largest

    assert asyncio.run(largest("1 + 1")) < 1 / limits_lib.SPREAD
    assert asyncio.run(largest("while True: pass")) >= 1.0
