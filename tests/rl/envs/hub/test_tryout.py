"""`rl.envs try` of environments of several turns shows each branch, its scores, and failures."""

import itertools
import pathlib
import sys

import pytest

from configs import quickstart
from models.text import tokenizer
from rl.envs.hub import tryout
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib
from tests.support import commands, foreign_sums

BROKEN = """
from rl.envs.interface import environment

def build(*, seed=0):
    async def play(task, model):
        await model.chat(task.messages)
        return {"reward": 1 / task.index}
    def make_task(index, split):
        return environment.Task("broken", index, split, ({"role": "user", "content": f"task {index}"},), answer="1")
    return environment.Environment("broken", make_task, play=play)
"""


def test_episodes_are_shown_with_all_that_the_model_reads(capfd):
    assert commands.run("rl.envs", "try", "wordle", "letters=3", "--n", 2) == 0
    out = capfd.readouterr().out
    assert out.count("<|im_start|>system") == 4  # two tasks, each with its answer and with random words
    assert out.count("solved 1") == 2
    assert "calls 1 to 6" in out
    assert commands.run("rl.envs", "try", "search", "--n", 2) == 0
    out = capfd.readouterr().out
    assert "<tool_response>" in out.partition("random words")[2]


def test_a_failed_episode_is_named_and_the_exit_code_is_1(capfd, tmp_path: pathlib.Path):
    (tmp_path / "broken.py").write_text(BROKEN)
    assert commands.run("rl.envs", "try", f"{tmp_path}/broken.py:build", "--n", 2) == 1
    out = capfd.readouterr().out
    assert out.count("failed: ZeroDivisionError") == 2
    assert out.count("scores: reward 1") == 2


STRANGE = (
    foreign_sums.CODE
    + """
import atexit, dataclasses, pathlib, sys, time, types

class Late(Sums):
    def run(self, task, base_url):
        return {"reward": float(pathlib.Path("/no/answers.txt").read_text())}

def named(*, name, target="x", framework="y"):
    return Sums([f"{name} {target} {framework} {n}" for n in range(50)])

def sums(*, terms=2):
    return Sums([f"{n} + {n}" for n in range(50)])

def rows(*, path="/data/of/another/machine.json"):
    return Sums(json.loads(pathlib.Path(path).read_text()))

def equal(*, count=100, others=()):
    return Sums(["the same game", *others] * count)

def corpus():
    atexit.register(print, "the end of the interpreter", flush=True)
    text = "Resource brown not found. Please use the NLTK Downloader: nltk.download('brown')"
    raise LookupError("*" * 70 + text + " For further information visit https://nltk.example " + "*" * 70)

def late():
    return Late(["a", "b", "c"])

class Unloaded:
    @property
    def __class__(self):
        raise RuntimeError("a lazy module was imported")

def lazy():
    clients = {name: type(name, (), {}) for name in ("OpenAI", "AsyncOpenAI")}
    sys.modules["openai"] = types.SimpleNamespace(lazy=Unloaded(), **clients)
    return sums()

def slow():
    time.sleep(3.5)  # the import of a large framework
    return sums()

@dataclasses.dataclass
class Action:
    message: str = ""

@dataclasses.dataclass
class Seen:
    message: str
    reward: float = 0.0
    done: bool = False

class Game:
    def __init__(self, *, size: int = 3):
        self.size = size

    def reset(self, seed=0):
        return Seen("guess a number" if self.size > 2 else "guess a digit")

    def step(self, action: Action):
        return Seen("no", 1.0, True)
"""
)
REHEARSALS = {
    "options": (
        "plain:strange:sums",
        {"term": 3},
        "cannot be loaded: TypeError: .* 'term'.*; correct env.options = {'term': 3}, or",
    ),
    "options of a class": (
        "openenv:strange:Game",
        {"sizes": 3},
        "unexpected keyword argument 'sizes'; correct env.opt",
    ),
    "value of a class": (
        "openenv:strange:Game",
        {"size": "big"},
        "no train episode can begin: TypeError: '>' .*; correct env.options = {'size': 'big'}, or the environment",
    ),
    "turns": ("openenv:strange:Game", {"max_turns": "two"}, "max_turns = 'two' is .*; use an integer of at least 1$"),
    "no turns": (
        "openenv:strange:Game",
        {"max_turns": 0},
        "env.options.max_turns = 0 is .*; use an integer of at least",
    ),
    "system": ("openenv:strange:Game", {"system": 3}, "env.options.system = 3 is not a text; write a string$"),
    "data": ("plain:strange:rows", {}, "No such file.*; it needs data that is not on this machine"),
    "corpus": (
        "plain:strange:corpus",
        {},
        r"LookupError: Resource brown .*'brown'\); it needs .* connect this machine and download it once",
    ),
    "data of an episode": (
        "plain:strange:late",
        {},
        r"no train episode can begin: FileNotFoundError.*answers.txt. \(strange.py:\d+\); it needs data",
    ),
    "one task": (
        "plain:strange:equal",
        {"count": 1},
        "no task is in the split .* with env.options = {'count': 1}; let the environment make more tasks$",
    ),
    "seed": ("plain:strange:sums", {"seed": 3}, "env.options.seed = 3 is that of the run; remove it"),
    "options of any name": ("plain:strange:named", {"name": "a", "target": "b", "framework": "c"}, ""),
    "equal prompts": ("plain:strange:equal", {}, ""),
    "one prompt for each split": ("plain:strange:equal", {"others": ["another game"]}, ""),
    "slow": ("plain:strange:slow", {}, ""),
    "lazy modules": ("plain:strange:lazy", {}, ""),
    "a good class": ("openenv:strange:Game", {}, ""),
}


SCORES = {
    "float('yes' in completion)": "",
    "float(completion.split()[0] == 'yes')": r"did not start: scoring an empty completion: IndexError: .*\(judge_\d+.py:\d+\); fix",
    "float('nan')": "did not start: scoring an empty completion: ValueError: score returned reward = nan; return fin",
    "float(open('/etc/hosts').read() == completion)": "in the sandbox, without files .*: PermissionError: ",
    "float(completion) if completion else 0.0": None,  # noted, and no error
}


@pytest.mark.parametrize(("name", "score"), [*zip(itertools.cycle(["dataset", "{}:build"]), SCORES, strict=False)])
def test_a_run_does_not_begin_with_a_scorer_that_fails_for_an_empty_completion(score, name, tmp_path):
    """It was heard of after the warm-up, and the run ended minutes later."""
    judge = tmp_path / f"judge_{abs(hash(tmp_path))}.py"  # a process has one module of a name
    judge.write_text(f"""
from rl.envs import environment

def build(*, seed=0):
    def make_task(index, split):
        return environment.Task("judge", index, split, ({{"role": "user", "content": f"{{split}} {{index}}"}},), answer="yes")
    return environment.Environment("judge", make_task, lambda task, completion: {{"reward": reward(completion, {{}})}})

def reward(completion, row):
    return {score}
""")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "row {n}", "answer": "yes"}}\n' for n in range(40)))
    config, lines = quickstart.get_config(), []
    config.env.name, config.env.options = name.format(judge), {}
    if name == "dataset":
        config.env.options = {"path": f"{tmp_path}/rows.jsonl", "reward": f"{judge}:reward"}
    if SCORES[score]:
        with pytest.raises(ValueError, match=SCORES[score]):
            tryout.rehearse(config, tokenizer.byte_chatml(), lines.append)
    else:
        tryout.rehearse(config, tokenizer.byte_chatml(), lines.append)
        assert [("could not score a completion" in line) for line in lines] == [True] * (SCORES[score] is None)


SLOW = ("options of a class", "no turns", "system", "data", "one task", "options of any name", "equal prompts", "slow")
SLOW += ("lazy modules",)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in REHEARSALS])
def test_a_run_does_not_begin_with_an_environment_that_no_worker_could_play(case, tmp_path, monkeypatch, capfd):
    name, options, problem = REHEARSALS[case]
    monkeypatch.setenv(package_lib.FOLDER, str(tmp_path / "installed"))
    (tmp_path / "strange.py").write_text(STRANGE)
    installation.install(name, python=sys.executable, paths=[str(tmp_path)])
    config, lines = quickstart.get_config(), []
    config.env.name, config.env.options, config.inference.max_model_len = name, options, 512
    if problem:
        with pytest.raises(ValueError, match=problem):
            tryout.rehearse(config, tokenizer.byte_chatml(), lines.append)
        assert "the end of the interpreter" not in capfd.readouterr().err  # which takes seconds with a large framework
    else:
        tryout.rehearse(config, tokenizer.byte_chatml(), lines.append)
        held_out, trained = "so held-out scores may not show new tasks; replace them", "so a run may learn one answer"
        equal = {"equal prompts": [held_out], "a good class": [held_out], "one prompt for each split": [trained]}
        equal = equal.get(case, [])
        waits = [line for line in lines if "loads, or plays its first episodes, for 3 s so far" in line]
        assert waits or case != "slow"
        lines = [line for line in lines if line not in waits]
        assert len(lines) == 1 + len(equal) and "loaded, and an episode of each split played, in " in lines[-1]
        assert all(words in lines[0] for words in equal)
