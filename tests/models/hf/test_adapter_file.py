"""Adapters in PEFT's format, against the files of the base and of the merged model: W + (alpha / r) B A, tensor by tensor."""

import functools
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.adapters import adapter_set
from models import hf, lora, transformer
from models.hf import adapter_file, safetensors_file
from sharding.mesh import mesh as mesh_lib
from sharding.weights.format import safetensors_header
from tests.support import tiny

CONFIG = lora.LoraConfig(rank=2, alpha=6.0)
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1)


def adapted(model, config=CONFIG):
    drawn = tiny.drawn(lora.specs(transformer.specs(model), config), 3, 0.2)
    return lora.attach(jax.tree.map(jnp.asarray, tiny.params(model, 0)), drawn, config)


def tensors(file):
    """The float32 tensors of a safetensors file, read by its specification."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = {name: entry for name, entry in json.loads(data[8:start]).items() if name != "__metadata__"}
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    ends = {name: slice(*(start + at for at in entry["data_offsets"])) for name, entry in header.items()}
    return {name: np.frombuffer(data[at], "<f4").reshape(header[name]["shape"]) for name, at in ends.items()}


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}, {"tie_embeddings": False}])
def test_the_merged_checkpoint_is_the_base_and_the_adapters(tmp_path, changes):
    model = tiny.model(**changes)
    params = adapted(model)
    hf.save(tmp_path / "base", model, lora.detach(params)[0])
    hf.save(tmp_path / "merged", model, lora.merge(params))
    adapter_file.save(tmp_path / "adapter", model, params, CONFIG, "hub/base")
    base, merged = (tensors(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    found = tensors(tmp_path / "adapter" / adapter_file.FILE)
    config = json.loads((tmp_path / "adapter" / adapter_file.CONFIG).read_text())
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    assert len(changed) == 2 * 7 and len(found) == 2 * len(changed)
    for name in changed:
        a, b = (found[f"base_model.model.{name.removesuffix('.weight')}.lora_{which}.weight"] for which in "AB")
        assert a.dtype == b.dtype == np.float32 and len(a) == config["r"]
        product = config["lora_alpha"] / config["r"] * b.astype(np.float64) @ a
        np.testing.assert_allclose(merged[name], base[name] + product, atol=1e-6)  # one float32 sum of size 1
    assert config["target_modules"] == sorted({name.split(".")[-2] for name in changed})
    assert config["base_model_name_or_path"] == "hub/base" and config["peft_type"] == "LORA"


def test_adapters_without_names_in_the_format_are_refused(tmp_path):
    latent = dict(kv_latent_dim=16, rope_dim=4, head_dim=12, num_kv_heads=4, qk_norm=False)
    for model in (tiny.model(**latent), tiny.model(**EXPERTS)):
        with pytest.raises(ValueError, match="PEFT has no adapter; export the merged model"):
            adapter_file.save(tmp_path / "out", model, adapted(model), CONFIG, "base")
    with pytest.raises(ValueError, match="has no adapters"):
        adapter_file.save(tmp_path / "out", tiny.model(), tiny.params(tiny.model(), 0), CONFIG, "base")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ValueError, match="not an empty folder"):
        adapter_file.save(tmp_path / "out", tiny.model(), adapted(tiny.model()), CONFIG, "base")


@functools.partial(jax.jit, static_argnums=1)
def run(params, model, tokens_BT):
    return transformer.logits(params, model, transformer.apply(params, model, tokens_BT)[0])


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize(("name", "other"), [("linear", "rslora"), ("rslora", "linear")])
def test_folders_of_peft_give_its_logits(name, other):
    """The oracle is PEFT in torch (tests/fixtures/peft). A place that a running request uses is given to no other adapter."""
    folder = pathlib.Path(__file__).parents[2] / "fixtures" / "peft"
    want, (model, params) = np.load(folder / "logits.npz"), hf.load(folder / "base")
    served = adapter_set.AdapterSet(model, mesh_lib.create({}, jax.devices()[:1]), 2, 4)
    read = served.read(name, str(folder / name))
    number, _ = served.load(name, "", read), served.load(other, "", served.read(other, str(folder / other)))
    for given, chosen in (("base", params), (name, served.choose(params, [number, adapter_set.NONE]))):
        logits = np.asarray(run(chosen, model, want["tokens"]))
        np.testing.assert_allclose(logits[1], want["base"][1], atol=2e-5 * np.abs(logits).max())
        np.testing.assert_allclose(logits[0], want[given][0], atol=2e-5 * np.abs(logits).max())
    served.unload(name)
    with pytest.raises(ValueError, match="all 2 places for adapters are in use"):
        served.load(name, "", read, in_use=[number])
    assert served.load(name, "", read) != number


def test_a_file_that_is_written_again_while_it_is_read_ends_no_server(tmp_path, monkeypatch):
    """A process that reads a mapped file after its end is killed."""
    model = tiny.model()
    adapter_file.save(tmp_path / "adapter", model, adapted(model), CONFIG, "base")
    file, tensor = tmp_path / "adapter" / adapter_file.FILE, safetensors_file.Reader.tensor
    expected = adapter_file.load(tmp_path / "adapter", model)

    def cut(read, *args):
        found = read(*args)
        os.truncate(file, 0)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file.Reader, "tensor", lambda *args: cut(tensor, *args))
        found = adapter_file.load(tmp_path / "adapter", model)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    shutil.rmtree(tmp_path / "adapter")
    adapter_file.save(tmp_path / "adapter", model, adapted(model), CONFIG, "base")
    monkeypatch.setattr(safetensors_file.safetensors_header, "read", functools.partial(cut, safetensors_header.read))
    with pytest.raises(ValueError, match="model.safetensors became shorter while it was read. Read it again"):
        adapter_file.load(tmp_path / "adapter", model)
    monkeypatch.undo()
    file = tmp_path / "base" / "model.safetensors"
    hf.save(file.parent, model, lora.detach(adapted(model))[0])

    def cut_before(*args):
        os.truncate(file, 9000)
        return tensor(*args)

    monkeypatch.setattr(safetensors_file.Reader, "tensor", cut_before)
    with pytest.raises(ValueError, match="model.safetensors became shorter while it was read. Read it again"):
        hf.load(file.parent)
