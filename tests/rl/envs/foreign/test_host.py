"""Episodes of another interpreter's environment: the same everywhere, apart from each other, and equal to their replays."""

import asyncio
import dataclasses
import itertools
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.envs.foreign import host as host_lib
from rl.envs.foreign import isolation
from rl.envs.foreign import process as process_lib
from rl.envs.foreign.child import fork_server
from rl.envs.host import host as native_host
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.envs.recording import tape as tape_lib
from tests.support import episodes

FIXTURES = pathlib.Path(__file__).parents[3] / "fixtures" / "environments"
NAME = "plain:plain_guess:build"
ORIGIN = rollouts_lib.Origin(rollout_lib.TaskRef(NAME, 0, 0, 0), step=0, temperature=1.0)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new virtual environment without any package."""
    place = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    return str(place / "bin" / "python")


@pytest.fixture
def package(python, tmp_path, monkeypatch):
    monkeypatch.setenv(package_lib.FOLDER, str(tmp_path / "installed"))
    monkeypatch.setenv("SECRET_API_KEY", "x")
    markers = tmp_path / "markers"
    markers.mkdir()
    return installation.install(NAME, python=python, paths=[str(FIXTURES)], variables={"MARKERS": str(markers)})


def session(number, backend=None, tape=None, **limits):
    limits = dataclasses.replace(episodes.LIMITS, **limits)
    if tape is None:
        backend = backend or episodes.Backend()
    return session_lib.Session(episodes.TOKENIZER, backend, limits, seed=7, sample=number, tape=tape)


def play(package, sessions, *, options=None, first=0, split="train", **settings):
    """Plays task first + i with session i, all at the same time, and returns the results, or their exceptions."""

    async def run():
        foreign = package_lib.Foreign(package, options or {}, 3)
        host = host_lib.ForeignHost(foreign, episodes.TOKENIZER, on_error=lambda text: None, **settings)
        try:
            plays = (host.play(one, first + index, split) for index, one in enumerate(sessions))
            return await asyncio.gather(*plays, return_exceptions=True)
        finally:
            await host.close()

    return asyncio.run(run())


def scores(package, count=6, **options):
    return [one.scores for one in play(package, [session(0) for _ in range(count)], **options)]


def test_episodes_are_the_same_in_each_process_and_apart_from_each_other(package):
    """The tasks come from the global random generator, the prompts also, and the environment counts the episodes that it sees."""
    first, alone = scores(package), [scores(package, 1, first=index)[0] for index in (0, 5)]
    assert [first[0], first[5]] == alone
    assert {one["seen"] for one in first} == {1.0}
    assert len({one["reward"] for one in first}) > 1
    assert "note" not in first[0]


def test_the_surroundings_hold_no_keys_and_no_files(package):
    [first, second] = scores(package, 2, options={"fault": "surroundings"})
    named = {name.removeprefix("variable ") for name in first}
    assert {"PYTHONHASHSEED", "TZ", "LC_ALL", "OPENAI_BASE_URL", "MARKERS"} <= named
    assert not {"SECRET_API_KEY", "PYTHONPATH", "VIRTUAL_ENV", "HTTP_PROXY"} & named
    assert first == second
    assert first["files"] == 0.0


def test_a_replay_against_the_tape_is_equal(package):
    sessions = [session(number, max_episode_tokens=60) for number in range(20)]
    played = play(package, sessions)
    recorded = [rollouts_lib.of_episode(one, ORIGIN, found.scores) for one, found in zip(sessions, played, strict=True)]
    tapes = [tape_lib.of_rollouts(one, episodes.TOKENIZER.stop_ids) for one in recorded]
    again = [session(number, tape=tape, max_episode_tokens=60) for number, tape in enumerate(tapes)]
    replayed = play(package, again)
    assert [one.scores for one in replayed] == [one.scores for one in played]
    assert [tape_lib.difference(one, found) for one, found in zip(again, recorded, strict=True)] == [None] * 20
    assert any(not rollout.trains for one in recorded for rollout in one)  # the judge, by the client made at the load
    assert max(len(one[0].spans) for one in recorded) == 3

    # An edited reply gets another reward, or leads the environment to a prompt that the tape lacks.
    number = next(at for at, one in enumerate(recorded) if len(one[0].spans) == 3)
    start = recorded[number][0].spans[0][0]
    tokens = recorded[number][0].tokens.copy()
    tokens[start] = 66 if tokens[start] == 65 else 65
    changed = [dataclasses.replace(recorded[number][0], tokens=tokens), *recorded[number][1:]]
    tape = tape_lib.of_rollouts(changed, episodes.TOKENIZER.stop_ids)
    [found] = play(package, [session(number, tape=tape, max_episode_tokens=60)], first=number)
    assert isinstance(found, session_lib.NotOnTape) or found.scores["reward"] != played[number].scores["reward"]


@pytest.mark.parametrize(
    ("fault", "in_time", "error"),
    [
        ("raise", True, "KeyError"),
        ("exit", True, "status 3"),
        ("nan", True, "reward"),
        ("flood", True, "more than 2097152 bytes"),
        pytest.param("spin", False, "status -24", marks=pytest.mark.slow),
        ("wait", False, "no request"),
    ],
)
def test_a_failed_episode_gets_zeros_and_the_reason(package, monkeypatch, fault, in_time, error):
    monkeypatch.setattr(host_lib, "IDLE_S", 1.0 if fault == "wait" else host_lib.IDLE_S)
    settings = {"limit_s": 1} if fault == "spin" else {}
    [found] = play(package, [session(0)], options={"fault": fault}, **settings)
    assert (found.scores, found.in_time) == (native_host.FAILED, in_time)
    assert error in found.error
    limit_s = settings.get("limit_s", process_lib.CPU_S)
    assert found.cpu_s < limit_s / 4 if in_time else found.cpu_s == limit_s  # a slow one may fail in the replay alone


def test_episodes_run_again_after_the_death_of_the_server(package):
    """The recorded calls answer them then."""
    calls = episodes.Backend()
    sessions = [session(0, calls) for _ in range(2)]
    options = {"options": {"fault": "kill_server"}, "sandbox": "off"}  # it writes files that stay
    found = play(package, sessions, **options)
    assert len(calls.calls) == sum(one.num_calls for one in sessions)
    assert [one.scores for one in found] == scores(package, 2, **options)  # not a second time


def test_an_isolated_episode_cannot_end_another_one_or_answer_for_it(package):
    """Every second one kills all processes that it can name, or writes to all files that it has."""
    plain = scores(package, 4)
    assert scores(package, 4, options={"fault": "siege"}, sandbox="require") == plain
    found = play(package, [session(0) for _ in range(4)], options={"fault": "nonsense"}, sandbox="require")
    assert {one.scores["reward"] for one in found} <= {0.0, 9.0}  # its own reply is its own affair
    assert not any(isinstance(one, BaseException) for one in found)


@pytest.mark.parametrize("sandbox", ["require", "off"])
def test_an_isolated_episode_reaches_its_model_and_nothing_else(python, package, tmp_path, monkeypatch, sandbox):
    secret, caches, named = tmp_path / "id_ed25519", tmp_path / "hf" / "datasets", tmp_path / "rows.jsonl"
    caches.mkdir(parents=True)
    for file in (secret, named, tmp_path / "hf" / "token", caches / "data"):
        file.write_text("x")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    listener = socket.create_server(("127.0.0.1", 0))
    variables = {"PORT": str(listener.getsockname()[1]), "PARENT": str(os.getpid())}
    variables |= {"SECRET_NAME": str(secret).strip("/").replace("/", "|")}  # not as a path, which it may read
    package = installation.install(NAME, python=python, paths=[str(FIXTURES)], variables=variables)
    with listener:
        options = {"fault": "escape", "more": {"data": [str(named)]}}  # which it may read
        [found] = play(package, [session(0)], options=options, sandbox=sandbox)
    (FIXTURES / "new").unlink(missing_ok=True)
    pathlib.Path("/usr/lib/new").unlink(missing_ok=True)
    allowed = {"own", "data", "named", "reward"}
    if sandbox == "require":
        assert {name for name, score in found.scores.items() if score} == allowed
    else:  # the attempts are real ones
        assert {"machine", "secret", "token", "environment", "kill", "package", "cache"} <= {
            n for n, s in found.scores.items() if s
        }


def test_a_machine_that_cannot_isolate_is_named(package, monkeypatch):
    monkeypatch.setattr(isolation, "problem", lambda: "no namespaces")
    foreign, lines = package_lib.Foreign(package, {}, 3), []
    host_lib.ForeignHost(foreign, episodes.TOKENIZER, on_error=lines.append)
    assert "runs without a sandbox: no namespaces" in lines[0]
    with pytest.raises(ValueError, match="no namespaces.*use 'auto'"):
        host_lib.ForeignHost(foreign, episodes.TOKENIZER, sandbox="require")
    recorded = package_lib.Foreign(dataclasses.replace(package, kind="recorded"), {}, 3)
    with pytest.raises(ValueError, match="its kind is recorded"):
        host_lib.ForeignHost(recorded, episodes.TOKENIZER, sandbox="require")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"fault": "load"}, "no data"), ({"fault": "die"}, "with status 4"), ({"nonsense": 1}, "'nonsense'")],
)
def test_a_broken_environment_is_reported(package, options, reason):
    [found] = play(package, [session(0)], options=options)
    assert isinstance(found, process_lib.Broken) and not isinstance(found, process_lib.Died)
    assert reason in str(found)


def test_a_failed_backend_ends_the_episode_and_its_process(package):
    async def fail(call):
        raise ConnectionError("no server")

    [found] = play(package, [session(0, fail)])
    assert isinstance(found, ConnectionError)


def test_no_process_is_left(package, monkeypatch):
    monkeypatch.setattr(host_lib, "IDLE_S", 0.5)
    scores(package, 4)
    play(package, [session(0)], options={"fault": "wait"})
    left = [name for name in os.listdir("/proc") if name.isdigit() and package.python.encode() in _command_line(name)]
    assert not left


def _command_line(name):
    try:
        return pathlib.Path("/proc", name, "cmdline").read_bytes()
    except OSError:
        return b""


def test_held_out_tasks_are_others_and_the_last_is_followed_by_the_first(package):
    def prompts(split, indexes):
        backend = episodes.Backend(texts=["x"])
        sessions = [session(0, backend) for _ in indexes]
        asyncio.run(_play_each(package, sessions, indexes, split))
        texts = [episodes.TOKENIZER.decode(one.streams[0].tokens.tolist()) for one in sessions]
        return [text.split("guess ")[1].split()[0] for text in texts]

    train, held_out = prompts("train", range(50)), prompts("held_out", range(3))
    assert not {*train} & {*held_out}
    assert len({*train}) < 40
    size = train[1:].index(train[0]) + 1
    assert train[size:] == train[: 50 - size]


def test_tasks_without_end_have_a_last_one(monkeypatch):
    """A run draws from 2**30 tasks of an environment without `num_tasks`: the first episode never began."""
    monkeypatch.setattr(fork_server, "MAX_TASKS", 1000)
    tasks = fork_server._Tasks(((str(n), n) for n in itertools.count()), {})
    drawn = [tasks.find("train", index) for index in (2**30, *range(1000))]
    assert len({*drawn}) == 1000 - len({tasks.find("held_out", index) for index in range(1000)}) > 900
    assert drawn[0] == tasks.find("train", 2**30 % len({*drawn}))


@pytest.mark.parametrize("asked", ["train", "held_out"])
def test_tasks_of_any_number_have_both_splits(asked):
    """Often none of 16 to 60 tasks was held out, and the run did not begin."""
    for size, start in itertools.product((2, 15, 16, 17, 40, 60), range(0, 3000, 100)):
        tasks = fork_server._Tasks(((str(n), n) for n in range(start, start + size)), {})
        tasks.find(asked, 0)  # first: the split does not depend on the order of requests
        found = {split: {tasks.find(split, index) for index in range(size)} for split in ("train", "held_out")}
        assert min(map(len, found.values())) > 0 and len(found["train"] | found["held_out"]) == size
        assert not found["train"] & found["held_out"]


async def _play_each(package, sessions, indexes, split):
    host = host_lib.ForeignHost(package_lib.Foreign(package, {}, 3), episodes.TOKENIZER)
    await asyncio.gather(*(host.play(one, index, split) for one, index in zip(sessions, indexes, strict=True)))
    await host.close()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("ModuleNotFoundError: No module named 'textarena'", "--requirement"),
        ("ConnectionError: Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)", "network"),
        ("MissingKeyError: Missing required API key: EXA_API_KEY", "--variable"),
        ("KeyError: 'JUDGE_API_KEY'", "--variable"),
        ("ValueError: gym is unknown", "env.options = {'game': 'chess'}, or"),
    ],
)
def test_the_remedy_of_an_error(error, remedy):
    assert remedy in process_lib.remedy_of_load(error, {"game": "chess"})
    assert "--kind recorded" in process_lib.remedy_of_episode("ConnectError: All connection attempts failed")
    assert not process_lib.remedy_of_episode("KeyError: 'answer'")
