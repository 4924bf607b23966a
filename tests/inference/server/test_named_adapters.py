"""A server of one base and several adapters, which requests name. The oracle: the base with numpy's merge of the adapter's file.

All adapters decode in one batch, and each with the same prompt: a shared prefix or a swapped place would show.
"""

import contextlib
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import serve
from inference.adapters import adapter_set
from inference.engine import cpu_layers, cpu_sub_batches, request
from inference.engine import engine as engine_lib
from inference.server import startup
from models import hf, logprobs, lora, transformer
from models.hf import adapter_file, safetensors_file, tensor_names
from models.text import tokenizer as tokenizer_lib
from tests.models.hf import test_adapter_file
from tests.support import cases, serving, tiny

MODEL = tiny.model()
SIZES = engine_lib.EngineConfig(num_slots=8, max_model_len=128, prefill_batch=4, steps_per_call=4, prefill_chunk=32)
PROMPT = tuple(range(40, 80))  # longer than a chunk, so that its first one can be shared
FIELDS = {"peft_type": "LORA", "lora_alpha": 3, "r": 8}  # of red: PEFT also writes many more


def write_adapter(folder, tensors, **fields):
    folder.mkdir()
    lazy = {f"base_model.model.{name}.weight": (x.dtype, x.shape, lambda x=x: x) for name, x in tensors.items()}
    safetensors_file.write(folder / adapter_file.FILE, lazy)
    (folder / adapter_file.CONFIG).write_text(json.dumps(FIELDS | fields))
    return str(folder)


def pairs(seed, rank, targets, layers=(0, 1)):
    """Random A and B for projections of the tiny model, by their names in a file."""
    rng, found = np.random.default_rng(seed), {}
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (16, 32), "mlp.down_proj": (32, 64)}
    for layer in layers:
        for name in targets:
            (out, inputs), module = shapes[name], f"model.layers.{layer}.{name}"
            found[f"{module}.lora_A"] = rng.standard_normal((rank, inputs)).astype(np.float32) * 0.3
            found[f"{module}.lora_B"] = rng.standard_normal((out, rank)).astype(np.float32) * 0.3
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, and the adapters: `blue` as rl.export writes it, on all kernels; `red` as PEFT does, of another rank, on some."""
    root = tmp_path_factory.mktemp("adapters")
    blue = test_adapter_file.adapted(MODEL)
    hf.save(root / "base", MODEL, lora.detach(blue)[0], write_more=tokenizer_lib.byte_chatml().save)
    adapter_file.save(root / "blue", MODEL, blue, test_adapter_file.CONFIG, "base")
    write_adapter(root / "red", pairs(1, 8, ("self_attn.q_proj", "mlp.down_proj")), use_rslora=True)
    write_adapter(root / "green", pairs(2, 1, ("self_attn.v_proj",), layers=[1]))
    return root


def merged(folders, name):
    """The parameters of the base with the file of an adapter merged, tensor by tensor; "policy" is the base."""
    tensors = dict(test_adapter_file.tensors(folders / "base" / "model.safetensors"))
    if name != "policy":
        config = json.loads((folders / name / adapter_file.CONFIG).read_text())
        found = test_adapter_file.tensors(folders / name / adapter_file.FILE)
        for key in (key for key in found if "lora_A" in key):
            a, b = found[key].astype(np.float64), found[key.replace("lora_A", "lora_B")].astype(np.float64)
            scale = config["lora_alpha"] / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            kernel = key.removeprefix("base_model.model.").replace(".lora_A", "")
            tensors[kernel] = (tensors[kernel] + scale * b @ a).astype(np.float32)
    params = jax.tree.map(np.array, tiny.params(MODEL, 0))
    leaves = tensor_names.leaves(params)
    for key, tensor in tensor_names.tensors(MODEL).items():
        leaves[tensor.parts[0].path][...] = tensor.parts[0].view(tensors[key])
    return params


@pytest.fixture(params=cases.slow_but(["small", "follows the load", "pages"], "small"))
def server(request, folders, monkeypatch):
    config, kind = SIZES, request.param
    if kind == "follows the load":
        monkeypatch.setattr(cpu_sub_batches, "MAX_WEIGHTS_BYTES", 0)
    if kind == "pages":
        config = dataclasses.replace(SIZES, num_pages=24)
    named = {name: str(folders / name) for name in ("blue", "red")}
    options = {"adapters": named, "max_adapters": 3, "dtype": "float32"}
    prepared = startup.prepare_model(str(folders / "base"), config, **options)
    assert prepared.engine.follows_load == (kind == "follows the load") == cpu_layers.fits(MODEL)
    with contextlib.closing(prepared.run()) as server:
        server.allows_adapters = True
        yield server


def submit(server, name, seed, **fields):
    fields = {"max_tokens": 12, "seed": seed, "prompt_logprobs": seed == 0} | fields
    asked = request.GenerateRequest(PROMPT, adapter=server.adapter_of(name), **fields)
    return server.scheduler.submit(asked)


@jax.jit
def scores(params, tokens_BT):
    hidden_BTD, _ = transformer.apply(params, MODEL, tokens_BT)
    return logprobs.token_logprobs(params, MODEL, hidden_BTD, tokens_BT, jnp.ones(tokens_BT.shape))[0]


def assert_of(folders, name, completion):
    """The log-probabilities of a completion, and of its prompt if they were asked for, are those of the merged matrices."""
    params = merged(folders, name)
    tokens = np.array([[*PROMPT, *completion.tokens]], np.int32)
    logp = np.asarray(scores(params, tokens))[0]
    np.testing.assert_allclose(
        completion.logprobs, logp[len(PROMPT) :], atol=2e-4, err_msg=name
    )  # float32 sums in other orders
    if completion.prompt_logprobs is not None:
        np.testing.assert_allclose(completion.prompt_logprobs[1:], logp[1 : len(PROMPT)], atol=2e-4)


def test_each_request_of_a_batch_has_its_own_adapter(server, folders):
    names = ["policy", "blue", "red", "blue", "policy", "red"]
    for turn in range(2):  # the second finds the first chunk of each in the prefix cache
        futures = [submit(server, name, seed=turn + at) for at, name in enumerate(names)]
        for name, future in zip(names, futures, strict=True):
            (got,) = future.result(120)
            assert_of(folders, name, got)
            assert got.num_cached > 0 or not turn


def no_memory(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes\na table")


def test_adapters_come_and_go(server, folders, monkeypatch):
    """A new one gets the free place, then that of one that went: its keys in the prefix cache are not used."""
    control, data = serving.asker(serve.make_control_app(server)), serving.asker(serve.make_app(server))

    def names():
        return [card["id"] for card in data("GET", "/v1/models").json()["data"]]

    def post(path, **body):
        return control("POST", f"/v1/{path}_lora_adapter", json=body)

    def refusal(status, path, **body):
        error = post(path, **body)
        assert error.status_code == status, error.text
        return error.json()["error"]["message"]

    assert names() == ["policy", "blue", "red"]
    assert data("GET", "/v1/models/red").json()["parent"] == "policy"
    assert "choose one of 'policy', 'blue', 'red'" in data("GET", "/v1/models/green").json()["error"]["message"]
    green = {"lora_name": "green", "lora_path": str(folders / "green")}
    with monkeypatch.context() as full:
        full.setattr(adapter_set.AdapterSet, "_on_mesh", no_memory)
        assert "'green' does not fit the memory (RESOURCE_EXHAUSTED: 9 bytes);" in refusal(400, "load", **green)
    assert names() == ["policy", "blue", "red"]
    assert post("load", **green).text == "Success: LoRA adapter 'green' added successfully."
    assert_of(folders, "green", submit(server, "green", 0).result(120)[0])
    assert "the folder /none does not exist" in refusal(400, "load", lora_name="other", lora_path="/none")
    assert "'green' has already been loaded" in refusal(400, "load", **green)
    assert "all 3 places for adapters are in use" in refusal(400, "load", **green | {"lora_name": "other"})
    before = server.adapter_of("red")
    submit(server, "red", 0).result(120)
    assert post("unload", lora_name="red").text == "Success: LoRA adapter 'red' removed successfully."
    assert "'red' cannot be found" in refusal(404, "unload", lora_name="red") and names() == ["policy", "blue", "green"]
    with pytest.raises(ValueError, match="was unloaded"):
        server.scheduler.submit(request.GenerateRequest(PROMPT, adapter=before)).result(60)
    reply = data("POST", "/v1/completions", json={"model": "red", "prompt": "a", "max_tokens": 1})
    assert reply.status_code == 404 and reply.json()["error"]["message"].startswith("The model `red` does not exist.")
    post("load", **green | {"lora_name": "again"})
    (got,) = submit(server, "again", 0).result(120)
    assert got.num_cached == 0
    assert_of(folders, "green", got)  # on kernels that red adapted, too: its numbers are gone
    body = {"model": "again", "prompt": [*PROMPT], "max_tokens": 12, "seed": 0, "temperature": 0, "logprobs": 0}
    reply = data("POST", "/v1/completions", json=body).json()
    (want,) = submit(server, "green", 0, temperature=0.0).result(120)
    assert reply["model"] == "again"
    np.testing.assert_allclose(reply["choices"][0]["logprobs"]["token_logprobs"], want.logprobs, atol=2e-4)


def test_wrong_folders_are_refused_in_one_line(folders, tmp_path):
    def read(name, tensors=None, **fields):
        if tensors is not None:
            write_adapter(tmp_path / name, tensors, **fields)
        options = {"adapters": {"x": str(tmp_path / name)}, "max_adapter_rank": 8}
        with pytest.raises(ValueError) as error:
            startup.prepare_model(str(folders / "base"), SIZES, dtype="float32", **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    good, q = pairs(1, 2, ["self_attn.q_proj"]), "model.layers.0.self_attn.q_proj"
    assert "adapter 'x': the folder" in read("none") and "does not exist" in read("none")
    (tmp_path / "empty").mkdir()
    assert "has no adapter_config.json and adapter_model.safetensors" in read("empty")
    assert "has rank 9, more than --max_adapter_rank 8" in read("rank", pairs(1, 9, ["self_attn.q_proj"]))
    assert "use_dora = True" in read("dora", good, use_dora=True)
    assert "lora_alpha = None" in read("alpha", good, lora_alpha=None)
    assert "alpha_pattern" in read("pattern", good, alpha_pattern={"q_proj": 3})
    narrow = good | {f"{q}.lora_A": np.zeros((2, 31), np.float32)}
    assert "lora_A [2, 31] and lora_B [32, 2]" in read("narrow", narrow) and "give an adapter of this base" in read(
        "narrow"
    )
    single = {name: x for name, x in good.items() if name != f"{q}.lora_B"}
    assert "lora_A [2, 32] and lora_B None" in read("single", single)
    assert "has no matrix of that name" in read("layer", pairs(1, 2, ["self_attn.q_proj"], layers=[2]))
    assert "NaN or infinity" in read("nan", good | {f"{q}.lora_A": np.full((2, 32), np.nan, np.float32)})
    # Attacks: infinity times the 0 of all other rows of a batch is NaN in these, too; an integer too large for a float.
    huge = {name: np.full_like(x, 3e38) if name.endswith("B") else x for name, x in good.items()}
    assert "NaN or infinity" in read("huge", huge, lora_alpha=64)
    for number, alpha in enumerate((1e300, 10**400, -(2**21))):
        assert f"lora_alpha = {alpha!r:.80}, and" in read(f"alpha{number}", good, lora_alpha=alpha)
    assert "the tensor base_model.model.lm_head.weight" in read(
        "more", good | {"lm_head": np.zeros((2, 2), np.float32)}
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "m", "--adapter", "folder"], "--adapter folder is not NAME=FOLDER"),
        (["--model", "m", "--adapter", "policy=folder"], "--adapter policy=folder is not NAME=FOLDER"),
        (["--weights", "w", "--adapter", "a=b"], "--adapter needs --model"),
    ],
)
def test_wrong_flags(flags, words, capsys):
    assert serve.main([*flags, "--port", "0"]) == 1
    assert words in capsys.readouterr().err
