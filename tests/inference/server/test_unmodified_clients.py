"""Unmodified clients against a server, each release in a virtual environment of its own.

Slow: the environments are installed from the package index (minutes). INTELLAX_CLIENT_VENVS names a folder to keep them in.
The server is tests/support/scripted_server.py: the product with a scripted model.
"""

import base64
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

from models.text import tokenizer as tokenizer_lib
from tests.support import serving

pytestmark = pytest.mark.slow
VENVS = {
    "new": ("verifiers==0.3.0", "prime-sandboxes==0.2.36", "renderers==0.1.10", "openai"),
    "old": ("verifiers==0.1.12",),
    # JetStream itself is the one installed here; these are imports of its benchmark that its metadata lacks.
    "jetstream": ("pandas", "tqdm", "nltk", "evaluate"),
}
INSTALL_S, CLIENT_S = 1200, 240


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """python(name) -> the interpreter of that environment, installed on first use."""
    kept = os.environ.get("INTELLAX_CLIENT_VENVS")
    folder = pathlib.Path(kept or tmp_path_factory.mktemp("venvs"))

    def python(name):
        root = folder / name
        if not (root / "installed").exists():  # a half-installed one is made again
            shutil.rmtree(root, ignore_errors=True)
            child([sys.executable, "-m", "venv", root], INSTALL_S)
            child([root / "bin" / "pip", "-q", "install", *VENVS[name]], INSTALL_S)
            if name == "jetstream":
                (pure,) = root.glob("lib/python*/site-packages")
                (pure / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
            (root / "installed").write_text("\n".join(VENVS[name]) + "\n")
        return root / "bin" / "python"

    return python


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, gRPC port, folder of the tokenizer)."""
    folder = tmp_path_factory.mktemp("server")
    command = ["tests.support.scripted_server", "--tokenizer", folder / "tokenizer"]
    with serving.child(folder, *command) as (process, url):
        yield url, (folder / "address.grpc").read_text(), str(folder / "tokenizer")
        process.stdin.close()
        assert process.wait(60) == 0, (folder / "output").read_text()[-6000:]


def child(command, limit_s, **how):
    """Runs a program to its end. A failure shows its output, also after a timeout."""
    command = [str(part) for part in command]
    try:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, timeout=limit_s, **how)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")[-6000:]
        pytest.fail(f"{command[0]} took over {limit_s} s; its output:\n{said}")
    if done.returncode:
        pytest.fail(f"{command[0]} ended with {done.returncode}; its output:\n{done.stdout[-8000:]}")
    return done.stdout


def run(python, server, script):
    """Runs a client's script, whose assertions are the test."""
    environment = os.environ | {"KEY": "none", "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    return child([python, "-c", script, *server], CLIENT_S, env=environment, cwd="/")


OPENAI = """
import json, sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
hello = [{"role": "user", "content": "hello"}]
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

assert [model.id for model in client.models.list()] == ["policy"]
done = client.chat.completions.create(model="policy", messages=hello, logprobs=True, top_logprobs=2, n=2)
assert [choice.message.content for choice in done.choices] == ["Hello, é!"] * 2
content = done.choices[0].logprobs.content
assert bytes(b for entry in content for b in entry.bytes) == "Hello, é!<|im_end|>".encode()
assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)
assert done.usage.completion_tokens == 2 * len(content) and done.choices[0].finish_reason == "stop"

stream = client.chat.completions.create(model="policy", messages=hello, stream=True,
                                        stream_options={"include_usage": True})
chunks = list(stream)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, é!"
assert chunks[-1].usage.completion_tokens == len(content) and chunks[-2].choices[0].finish_reason == "stop"

done = client.chat.completions.create(model="policy", messages=hello, tools=[tool])
(call,) = done.choices[0].message.tool_calls
assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
assert done.choices[0].finish_reason == "tool_calls"
with client.chat.completions.stream(model="policy", messages=hello, tools=[tool]) as events:
    final = events.get_final_completion()
assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
more = client.chat.completions.create(model="policy", messages=hello + [done.choices[0].message, answer], tools=[tool])
assert more.choices[0].message.content == "The sum is 3."

text = client.completions.create(model="policy", prompt=["a", "b"], max_tokens=5, logprobs=1)
assert [choice.text for choice in text.choices] == ["Hello"] * 2
assert len(text.choices[0].logprobs.token_logprobs) == 5
try:
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 5000}])
    raise AssertionError
except openai.BadRequestError as error:
    assert "maximum context length" in str(error) and error.body["code"] == 400
"""

V0 = """
import asyncio, sys
import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

def add(a: int, b: int) -> int:
    \"\"\"Adds two numbers.\"\"\"
    return a + b

rows = Dataset.from_list([{"question": "what is 1 + 2?", "answer": "3"}])
rubric = vf.Rubric(funcs=[lambda completion, answer: float(answer in completion[-1]["content"])])
single = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
tools = vf.ToolEnv(tools=[add], dataset=rows, rubric=rubric, max_turns=4)

def run(env, kind):
    client = ClientConfig(client_type=kind, api_key_var="KEY", api_base_url=sys.argv[1] + "/v1", max_retries=0)
    sampling = {"temperature": 0.7, "max_tokens": 200, "logprobs": True, "extra_body": {"return_token_ids": True}}
    return asyncio.run(env.run_rollout(env.get_dataset()[0], client, "policy", sampling, state_columns=["trajectory"]))

for kind in ("openai_chat_completions", "openai_chat_completions_token"):
    out = run(single, kind)
    assert out.get("error") is None, out["error"]
    (step,) = out["trajectory"]
    tokens = step["tokens"]
    assert out["reward"] == 1.0
    assert bytes(t for t in tokens["completion_ids"] if t < 256).decode() == "Hello, é!"
    assert len(tokens["completion_logprobs"]) == len(tokens["completion_ids"]) == 11
    out = run(tools, kind)
    assert out.get("error") is None, out["error"]
    first, second = out["trajectory"]
    assert out["reward"] == 1.0 and len(second["tokens"]["completion_logprobs"]) == len(second["tokens"]["completion_ids"])
    if kind.endswith("token"):
        before = list(first["tokens"]["prompt_ids"]) + list(first["tokens"]["completion_ids"])
        assert list(second["tokens"]["prompt_ids"])[: len(before)] == before
    print(kind, "ok")
"""

V1_TRAIN = """
import asyncio, sys
from renderers import Qwen3RendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

config = TrainClientConfig(base_url=sys.argv[1] + "/v1", api_key_var="KEY", renderer_model_name=sys.argv[3],
                           renderer=Qwen3RendererConfig())
tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters":
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}

async def main():
    client = TrainClient(config)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    plain = await client.get_response(ChatDialect(), body, "policy", SamplingConfig(temperature=0.9, max_tokens=60))
    assert plain.message.content == "Hello, é!" and plain.finish_reason == "stop"
    assert len(plain.tokens.completion_ids) == len(plain.tokens.completion_logprobs) == 11
    called = await client.get_response(ChatDialect(), body | {"tools": [tool]}, "policy", SamplingConfig(max_tokens=99))
    assert [call.name for call in called.message.tool_calls] == ["add"]

asyncio.run(main())
"""


def test_openai(python, server):
    run(python("new"), server, OPENAI)


@pytest.mark.parametrize("name", ["new", "old"])
def test_verifiers_v0_chat_and_token_in(python, server, name):
    """The old one is of the INTELLECT-3 era."""
    assert run(python(name), server, V0).count(" ok\n") == 2


def test_verifiers_v1_train_client(python, server):
    assert tokenizer_lib.load(server[2]).vocab_size == 265
    run(python("new"), server, V1_TRAIN)


def test_jetstreams_benchmark(python, server, tmp_path):
    """Its own program as installed: it tokenizes (Llama 3's format, here single bytes), asks by token ids and decodes."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (tmp_path / "bytes.model").write_text("\n".join(lines) + "\n")
    turns = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "a golden answer of 29 tokens."}]
    (tmp_path / "data.json").write_text(json.dumps([{"conversations": turns}] * 20))
    program = pathlib.Path(importlib.util.find_spec("benchmarks").origin).with_name("benchmark_serving.py")
    command = [python("jetstream"), program, "--server", "127.0.0.1", "--port", server[1], "--num-prompts", "12"]
    command += ["--model", "llama-3", "--tokenizer", tmp_path / "bytes.model", "--disable-tqdm"]
    command += ["--dataset", "sharegpt", "--dataset-path", tmp_path / "data.json", "--save-request-outputs"]
    command += ["--request-outputs-file-path", tmp_path / "out.json"]
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": "", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    said = child(command, CLIENT_S, env=environment, cwd=tmp_path)
    assert "Successful requests: 12" in said, said
    got = json.loads((tmp_path / "out.json").read_text())
    assert [(one["success"], one["generated_text"]) for one in got] == [(True, "Hello, é!")] * 12
