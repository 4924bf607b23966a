"""The commands of rl.evaluate that need no checkpoint, against a chat server without a model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rl import envs
from rl.evaluation import commands, endpoint, samples, scores
from rl.protocol import noise_seed
from tests.support import chat_server

pytestmark = pytest.mark.usefixtures("shared_scorers")
TASKS = ["reverse_text", "max_length=4"]


@pytest.fixture(scope="module")
def url():
    with chat_server.serving(chat_server.reverser) as found:
        yield found


def sample(url, out, *rest, command="endpoint", env=TASKS):
    common = [*env, "--url", url, "--out", str(out), "--sandbox", "off"]
    return commands.main([command, *common, *map(str, rest)])


def test_an_endpoint_is_scored_on_the_tasks_and_seeds_of_a_run(url, tmp_path, capsys):
    assert sample(url, tmp_path / "a.jsonl", "--num_tasks", 6, "--n", 4) == 0
    rows = samples.read(tmp_path / "a.jsonl")
    env = envs.load("reverse_text", max_length=4, seed=0)
    digest = envs.digest(*envs.locate("reverse_text", {"max_length": 4}))
    source = samples.source("reverse_text", {"max_length": 4}, 0, digest)
    assert len(rows) == 24 and {row["task"] for row in rows} == {f"{source}/held_out/{i}" for i in range(6)}
    for row in rows:
        index = int(row["task"].rpartition("/")[2])
        task = env.make_task(index, "held_out")
        assert env.score
        seed = (noise_seed.sampling_seed(0, "held_out", 0, index) + row["sample"]) % 2**31
        expected = chat_server.reverser({"messages": task.messages, "seed": seed})["content"]
        assert row["completion"] == expected and row["reward"] == env.score(task, expected)["reward"]
        assert (
            row["key"] == envs.environment.content_key(task.messages) and row["prompt"] == task.messages[-1]["content"]
        )
    expected, _ = scores.measure([*samples.by_task(rows).values()])
    assert f"avg@4 {expected['avg@4']:.4g} (" in capsys.readouterr().out
    assert sample(url, tmp_path / "a.jsonl", "--num_tasks", 6, "--n", 4) == 0  # nothing is left to do
    assert samples.read(tmp_path / "a.jsonl") == rows


def test_a_file_has_the_samples_of_one_model_and_its_options(url, tmp_path, capsys):
    """Else a table would have the scores of the first model under the name of the second."""
    out = tmp_path / "a.jsonl"
    assert sample(url, out, "--num_tasks", 2, "--n", 2, "--model", "A") == 0
    before = out.read_bytes()
    for other in (["--model", "B"], ["--model", "A", "--temperature", 0.5], ["--model", "A", "--max_tokens", 7]):
        assert sample(url, out, "--num_tasks", 3, "--n", 2, *other) == 1
        assert "has samples of {'model': 'A'," in capsys.readouterr().err and out.read_bytes() == before
    assert sample(url, out, "--num_tasks", 3, "--n", 3, "--model", "A") == 0 and len(samples.read(out)) == 9
    with open(out, "ab") as file:
        file.write(before.splitlines(keepends=True)[0].replace(b'"model": "A"', b'"model": "B"'))
    assert sample(url, out, "--num_tasks", 3, "--n", 3, "--model", "A") == 1
    assert "has samples of {'model': 'B'," in capsys.readouterr().err


def test_a_file_of_something_else_stays_as_it_is(url, tmp_path, capsys):
    out = tmp_path / "notes.txt"
    out.write_text("one line without an end")
    assert sample(url, out, "--num_tasks", 1, "--n", 1) == 1
    assert "does not end with a sample" in capsys.readouterr().err and out.read_text() == "one line without an end"
    out.write_text('{"ta')  # of a kill
    assert sample(url, out, "--num_tasks", 1, "--n", 1) == 0 and len(samples.read(out)) == 1


def test_compare_and_leaderboard(url, tmp_path, capsys):
    with chat_server.serving(
        lambda body: {"content": "<think>it is</think>" + body["messages"][-1]["content"][-1:8:-1]}
    ) as best:
        for name, base in (("a", url), ("b", best)):
            assert sample(base, tmp_path / f"{name}.jsonl", "--num_tasks", 12, "--n", 2) == 0
    capsys.readouterr()
    assert commands.main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert "B - A" in head and first.split()[:1] == ["avg@2"] and float(first.split()[2]) == 1.0
    assert commands.main(["leaderboard", f"ours={tmp_path / 'a.jsonl'}", str(tmp_path / "b.jsonl")]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:4]] == ["b", "ours"]
    (tmp_path / "bad.jsonl").write_text('{"task": "x"}\n')
    assert commands.main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "bad.jsonl")]) == 1
    assert "line 1 is not a sample" in capsys.readouterr().err


def test_an_environment_of_several_turns_is_played(tmp_path):
    def answer(body):
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return {"content": f"<guess>{'abcdefghij'[turn] * 3}</guess>"}

    env = ["wordle", "letters=3", "words=5", "guesses=4"]
    with chat_server.serving(answer) as url:
        assert sample(url, tmp_path / "a.jsonl", "--num_tasks", 2, "--n", 2, env=env) == 0
        assert sample(url, tmp_path / "b.jsonl", "--num_tasks", 1, "--n", 1, "--max_calls", 2, env=env) == 0
    rows = samples.read(tmp_path / "a.jsonl")
    assert len(rows) == 4 and {row["completion"] for row in rows} == {"<guess>ddd</guess>"}
    assert all(row["num_tokens"] == 4 and "reward" in row["rewards"] for row in rows)
    assert [row["num_tokens"] for row in samples.read(tmp_path / "b.jsonl")] == [2]


def test_reasoning_that_a_server_has_split_off_is_not_split_again():
    given = {"content": "The tag <think> opens, </think> closes.", "reasoning_content": "Hm."}

    async def ask(url):
        async with endpoint.Endpoint(url, "m", temperature=1.0, max_tokens=9) as model:
            return (await model.chat([{"role": "user", "content": "Tags?"}], max_tokens=9, seed=0)).message

    with chat_server.serving(lambda body: given) as url:
        assert asyncio.run(ask(url)) == {"role": "assistant"} | given


def test_a_busy_server_is_asked_again_and_a_refusal_is_reported(tmp_path, capsys, monkeypatch):
    lock, counts = threading.Lock(), {"asked": 0}

    def busy(body):
        assert "model" not in body  # a server of one model needs no name
        with lock:
            counts["asked"] += 1
            if counts["asked"] < 3:
                return 429, {"error": "busy"}
        assert body["authorization"] == "Bearer secret" and body["top_k"] == 5 and body["max_tokens"] == 9
        return chat_server.reverser(body)

    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "NOTED_PAUSE_S", 0.02)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    options = ["--num_tasks", 1, "--n", 1, "--max_tokens", 9, "--extra", '{"top_k": 5}']
    with chat_server.serving(busy) as url:
        assert sample(url, tmp_path / "a.jsonl", *options) == 0
    assert counts["asked"] == 3
    with chat_server.serving(lambda body: (400, {"error": "no such model"})) as url:
        assert sample(url, tmp_path / "b.jsonl", *options) == 1
    assert "status 400" in capsys.readouterr().err
    with chat_server.serving(lambda body: (200, {"choices": []})) as url:
        assert sample(url, tmp_path / "c.jsonl", *options) == 1
    assert "not a chat completion" in capsys.readouterr().err
    url, options = "http://127.0.0.1:9/v1", ["--num_tasks", 3, *options[2:], "--give_up_s", 0.5]
    assert sample(url, tmp_path / "d.jsonl", *options) == 1
    waiting, given_up = capsys.readouterr().err.splitlines()  # three requests wait, and one says so
    assert waiting.startswith(f"waiting for {url}/chat/completions (Connect") and "correct --url" in waiting
    assert "did not answer for 0 s" in given_up and "it continues" in given_up


@pytest.mark.slow
def test_annotations_survive_kills(url, tmp_path):
    """A process that is killed twenty times loses no finished sample, makes none twice, and writes the file of an undisturbed one."""
    argv = [*TASKS, "--url", url, "--num_tasks", "120", "--n", "4", "--sandbox", "off", "--concurrency", "2"]
    assert sample(url, tmp_path / "whole", "--num_tasks", 120, "--n", 4, command="annotate") == 0
    program = "import sys; from rl.evaluation import commands; sys.exit(commands.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "annotate", *argv, "--out", str(tmp_path / "killed")]
    log, before = tmp_path / "killed.samples.jsonl", 0
    for kill in range(20):
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while child.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < before + 20):
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, kill
        before = log.read_bytes().count(b"\n")
    with open(log, "ab") as file:
        file.write(b'{"task": "cut off')
    assert subprocess.run(command, capture_output=True).returncode == 0
    rows = samples.read(log)
    names = [(row["task"], row["sample"]) for row in rows]
    assert len(names) == len(set(names)) == 480
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()
    first = json.loads((tmp_path / "whole").read_text().splitlines()[0])
    assert first["num_samples"] == 4 and first["low"] <= first["rate"] <= first["high"]
