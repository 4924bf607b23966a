"""The admission check observes each fault of a set of broken environments, finds it by the right identifier, and passes the clean ones.

An environment costs two processes, and two more where its results differ, so most run with the slow tests; test_rules.py has the rules alone.
"""

import json
import pathlib
import runpy

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.envs.catalog import catalog
from rl.envs.hub import admission, effects, foreign_trial, report, trial
from rl.envs.packages import installation, package
from tests.support import commands

# A file outside of packages: the digest of code covers its whole package.
FILE = pathlib.Path(__file__).parents[3] / "fixtures" / "environments" / "broken_environments.py"
CASES = {function.__name__: check_id for function, check_id in runpy.run_path(str(FILE))["CASES"].items()}
SIZES = {"tasks": 24, "scored": 4, "episodes": 2, "memory_s": 0.3, "timeout_s": 120.0}
FAST = ("shared_counter",)


def cases():
    for name, check_id in CASES.items():
        yield pytest.param(name, check_id, id=name, marks=() if name in FAST else pytest.mark.slow)


def checked(name, options=None, **sizes):
    return admission.check(trial.Plan(name, options or {}, **(SIZES | sizes)))


def failed(found):
    return {check["check_id"]: check["evidence"] for check in found["checks"] if check["status"] == "fail"}


@pytest.mark.parametrize(("name", "check_id"), [*cases()])
def test_each_fault_is_found(name, check_id):
    found = checked(f"{FILE}:{name}", timeout_s=25.0 if name == "waits_forever" else 120.0)
    assert check_id in failed(found) and not report.passed(found), report.table(found)
    assert failed(found)[check_id]
    assert name != "cannot_load" or report.table(found).endswith("fail: it could not be tried")
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "name", ["clean_program", *(pytest.param(name, marks=pytest.mark.slow) for name in ("clean", "clean_replayed"))]
)
def test_clean_environments_pass(name):
    found = checked(f"{FILE}:{name}")
    assert report.passed(found) and not failed(found), report.table(found)
    assert found["kind"]["tested"] == found["kind"]["declared"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Files for the environments that read some."""
    folder = tmp_path_factory.mktemp("data")
    lines = [
        {"question": f"Tom has {i} and gets {2 * i + 1}. How many?", "answer": f"So {i}+{2 * i + 1}\n#### {3 * i + 1}"}
        for i in range(40)
    ]
    for name, part in (("train", lines[:30]), ("test", lines[30:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    rows = [{"prompt": f"Add {i} and {3 * i + 1}.", "answer": str(4 * i + 1)} for i in range(60)]
    (folder / "rows").mkdir()
    (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [{"problem": f"What is {i} + {i}?", "answer": f"{2 * i}"} for i in range(60)]
    (folder / "math.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    row = {"source": "made", "task_type": "verifiable_math"}
    tasks = [row | {"problem_id": f"{i}", "prompt": f"What is {i} + {i}?"} for i in range(60)]
    infos = [{"verification_info": json.dumps({"ground_truth": f"{2 * i}"})} for i in range(60)]
    (folder / "genesys.jsonl").write_text(
        "".join(json.dumps(task | info) + "\n" for task, info in zip(tasks, infos, strict=True))
    )
    return folder


OPTIONS = {  # of environments that need some
    "gsm8k": lambda data: ("gsm8k", {"path": str(data)}),
    "math": lambda data: ("math", {"path": str(data / "math.jsonl")}),
    "dataset": lambda data: ("dataset", {"path": str(data / "rows"), "reward": "number"}),
    "reasoning_gym": lambda data: ("reasoning_gym:chain_sum", {}),
    "genesys": lambda data: ("genesys", {"path": str(data / "genesys.jsonl")}),
    "logic": lambda data: ("logic", {"mix": "chain_sum=2,syllogism"}),
}
OURS = [name for name in catalog.ENVS if name not in package.FRAMEWORKS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OURS)
def test_our_environments_pass(kind, data):
    name, options = OPTIONS[kind](data) if kind in OPTIONS else (kind, {})
    found = checked(name, options)
    assert report.passed(found), report.table(found)


def test_a_report_verifies_and_a_changed_byte_does_not(tmp_path, capsys):
    file, key = tmp_path / "report.json", tmp_path / "key.pem"
    sizes = ["--tasks", 12, "--scored", 2, "--episodes", 1]
    assert commands.run("rl.envs", "check", "reverse_text", "max_length=4", *sizes, "--report", file, "--key", key) == 0
    out = capsys.readouterr().out
    assert "pass  semantic.oracle_max" in out and "pass: its trials show the kind pure" in out
    signer = rollout_lib.WorkerKey.load(key).worker
    assert commands.run("rl.envs", "check", "--verify", file, "--signer", signer) == 0
    assert commands.run("rl.envs", "check", "reverse_text", "max_length=4", "--verify", file) == 0
    assert signer in capsys.readouterr().out
    assert commands.run("rl.envs", "check", "gsm8k", "--verify", file) == 1
    assert "has the digest" in capsys.readouterr().err
    assert commands.run("rl.envs", "check", "--verify", file, "--signer", "0" * 64) == 1
    assert "not by 0000" in capsys.readouterr().err
    content = file.read_text()
    for old, new in (
        ('"seed": 0', '"seed": 1'),
        ('"tested": "pure"', '"tested": "pur3"'),
        ("pass", "fail"),
        (signer, "ab" * 32),
    ):
        assert old in content
        (tmp_path / "changed.json").write_text(content.replace(old, new, 1))
        assert commands.run("rl.envs", "check", "--verify", tmp_path / "changed.json") == 1
        error = capsys.readouterr().err
        assert "does not fit its content; get the report again" in error and error.count("\n") == 1
    for text in ("", "[1", "[]", "{}", json.dumps(json.loads(content) | {"format": "x"}), "[" * 100_000):
        (tmp_path / "changed.json").write_text(text)
        assert commands.run("rl.envs", "check", "--verify", tmp_path / "changed.json") == 1
        assert capsys.readouterr().err.startswith("error: ")


def test_mistakes_of_the_user_are_errors_of_one_line(capsys, tmp_path):
    for words, message in (
        ([], "no environment is named"),
        (["reverse_tex"], "did you mean reverse_text?"),
        (["reverse_text", "--tasks", 0], "--tasks 0 is below 1"),
        (["reverse_text", "--report", tmp_path / "r"], "--report needs --key"),
        (["--verify", tmp_path / "none"], "is not a file; name the file of a report"),
    ):
        assert commands.run("rl.envs", "check", *words) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_effects_are_noted_by_kind_and_only_in_a_stage(tmp_path):
    found = effects.Effects([str(tmp_path / "in")])
    found.hook("open", (str(tmp_path / "out"), "w", 0o1101))
    assert not any(found.counts.values())
    found.stage = "score"
    found.hook("open", (str(tmp_path / "in" / "x"), "r", 0))
    found.hook("open", ("/dev/null", "w", 0o1))
    found.hook("open", (3, "r", 0))
    assert not any(found.counts.values())
    found.hook("open", (str(tmp_path / "in2"), "r", 0))
    found.hook("open", (str(tmp_path / "in" / "x"), "w", 0o1101))
    found.hook("subprocess.Popen", ("/bin/true", [], None, None))
    with pytest.raises(PermissionError, match="has no network"):
        found.hook("socket.getaddrinfo", ("example.org", 80, 0, 0, 0))
    assert found.counts == {"network": 1, "process": 1, "write": 1, "read": 1}
    assert found.notes["network"] == ["score: socket.getaddrinfo 'example.org'"]


FOREIGN = "plain:plain_guess:build"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check_id"),
    [
        ("", None),
        ("raise", "runtime.reward_well_formed"),
        ("spin", "runtime.resource_bounds"),
        ("clock", "runtime.seed_control"),
    ],
)
def test_environments_of_other_frameworks_are_checked_in_their_host(fault, check_id, tmp_path, monkeypatch):
    monkeypatch.setenv(package.FOLDER, str(tmp_path / "installed"))
    monkeypatch.setattr(foreign_trial, "CPU_S", 2)
    installation.install(FOREIGN, paths=[str(FILE.parent)])
    sizes = SIZES | {"scored": 1 if fault else 2, "episodes": 1}
    plan = trial.Plan(FOREIGN, {"fault": fault} if fault else {}, **sizes)
    found = admission.check(plan, floor=2.0)  # its rewards are arbitrary
    if check_id:
        assert check_id in failed(found), report.table(found)
    else:
        assert report.passed(found) and found["kind"]["tested"] == "replayed", report.table(found)
