"""A config is completed from a checkpoint's files, which transformers wrote (tests/fixtures/hf_parity)."""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from ml_collections import config_dict

from configs import base, quickstart, tpu_gsm8k
from inference.server import startup
from models import config as config_lib
from models import hf, transformer
from models.text import chat_template
from models.text import tokenizer as tokenizer_lib
from rl import generate, sft, worker
from rl.experiment import experiment, initial, rules, workdir
from rl.experiment import flags as command_line
from rl.experiment.plan import sizes
from rl.protocol import timeline
from rl.swarm.orchestrator import orchestrator
from rl.swarm.orchestrator.gate import gate
from sharding.mesh import mesh as mesh_lib
from sharding.system.multihost import hosts
from sharding.weights import broadcast
from tests.support import tiny

FOLDERS = sorted(
    path.parent for path in (pathlib.Path(__file__).parents[2] / "fixtures" / "hf_parity").glob("*/config.json")
)
LLAMA = next(path for path in FOLDERS if path.name == "llama_rope3")


def completed(folder, *given, needs_files=True, **model):
    c = base.get_config()
    c.init_from = str(folder)
    c.model.update(model)
    return initial.completed(c, given, needs_files=needs_files)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_checkpoint_brings_its_model_and_its_tokenizer(folder):
    config = completed(folder, scan_layers=True, remat="block")
    stored = json.loads((folder / "config.json").read_text())
    for field, entry in {
        "model_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "norm_eps": "rms_norm_eps",
    }.items():
        assert config.model[field] == stored[entry]
    own = {"scan_layers": True, "remat": "block", "param_dtype": "float32", "dtype": "float32"}
    assert config_lib.ModelConfig(**config.model) == dataclasses.replace(hf.read_config(folder), **own)
    assert config.tokenizer == str(folder) and config.env.name == "reverse_text"


def test_processes_in_other_folders_get_the_absolute_path_of_a_tokenizer(tmp_path, monkeypatch):
    """Children start in the checkout. Nodes elsewhere have the folder at the path of the config."""
    (tmp_path / "models" / "base").mkdir(parents=True)  # in the form of a hub ID, too
    monkeypatch.chdir(tmp_path)
    for mode, name in (("local", f"{tmp_path}/models/base"), ("remote", "models/base")):
        exp = experiment.resolve(quickstart.get_config())
        config = exp.config.as_configdict()
        config.tokenizer, config.topology.mode = "models/base", mode
        assert dataclasses.replace(exp, config=config).broadcast_metadata["tokenizer"] == name
        described = types.SimpleNamespace(_config=config)
        described.nodes = types.SimpleNamespace(servers=list)
        described.admission = gate.Admission(config, "run", (), lambda worker: 0)
        state = types.SimpleNamespace(version=-1, policy=timeline.Policy(0, -1))
        described.locked = contextlib.nullcontext(state)
        assert orchestrator.Orchestrator.describe(described)["tokenizer"] == name


def test_the_fields_of_the_config_replace_those_that_no_parameter_depends_on(capsys):
    """Also one that a command line sets to the value that it has in configs/base.py."""
    config = completed(LLAMA, rope_theta=5.0, max_positions=7)
    assert (config.model.rope_theta, config.model.max_positions) == (5.0, 7)
    note = r"note: model.rope_theta = 5.0 but \S+llama_rope3 has 5000.0; model.max_positions = 7 but .*\n"
    assert re.fullmatch(note, capsys.readouterr().err)
    completed(LLAMA, remat="block")
    assert not capsys.readouterr().err
    assert completed(LLAMA).model.norm_eps == 1e-5 and completed(LLAMA, "model.norm_eps").model.norm_eps == 1e-6
    assert completed(LLAMA, "tokenizer").tokenizer == "byte_chatml"


@pytest.mark.parametrize(
    ("given", "model", "words"),
    [
        (
            (),
            {"num_layers": 9, "rope_theta": 5.0},
            r"model.num_layers = 9 but .*llama_rope3 has \d+; model.rope_theta = 5.0 ",
        ),
        (
            ("model.model_dim",),
            {},
            r"model.model_dim = 128 but .*llama_rope3 has \d+: the checkpoint's parameters do not fit; leave",
        ),
        ((), {"num_kv_heads": 3}, "model.num_heads = .* must be a multiple of model.num_kv_heads = 3"),
    ],
)
def test_a_field_that_contradicts_the_checkpoint_is_refused(given, model, words):
    with pytest.raises(ValueError, match=words) as error:
        completed(LLAMA, *given, **model)
    assert "\n" not in str(error.value)


def test_weights_are_checked_before_a_working_directory_is_made(tmp_path):
    """A cut file was found after the compilation had begun, and left a folder behind."""
    shutil.copytree(LLAMA, folder := tmp_path / "m")
    initial.check(str(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match="init_from: .*: the file is truncated, or its header is wrong. Download it again"
    ):
        initial.check(str(folder))
    weights.unlink()
    with pytest.raises(ValueError, match="init_from: no weights in .*m: expected model.safetensors, or"):
        initial.check(str(folder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "init_from: .*config.json does not exist; give a checkpoint folder, with config.json"),
        (
            '{"model_type": "mamba"}',
            "init_from: .*model_type 'mamba' in config.json is not supported; use one of llama, ",
        ),
        ("[]", "init_from: .*contains a list, not a dict"),
        ("{", "init_from: .*config.json"),
    ],
)
def test_a_wrong_folder_is_answered_in_one_line(tmp_path, text, words):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        completed(tmp_path)
    assert "\n" not in str(error.value)
    config = quickstart.get_config()
    config.init_from = str(tmp_path)
    found = [*rules.mistakes_outside(config)]  # before JAX is imported
    assert found == [str(error.value)] * ("mamba" not in words)
    config.init_from, config.warmup.data = "", f"{tmp_path}, chats.jsonl"  # of two paths, one exists
    assert "warmup.data = 'chats.jsonl' does not exist; set it to files" in "".join(rules.mistakes_outside(config))
    (run := tmp_path / "run").mkdir()
    (run / "metrics.jsonl").touch()
    assert [*rules.mistakes_outside(config, str(run))] == []  # one that has begun is scored without them
    (tmp_path / "config.json").unlink(missing_ok=True)
    (gguf := tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=f"config.json does not exist; for the GGUF file in this folder, give {gguf}"):
        completed(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="init_from: .* has adapters alone; merge them into their checkpoint"):
        completed(tmp_path)
    with pytest.raises(ValueError, match="init_from: /nowhere is not a folder; give a folder, a .gguf file"):
        completed("/nowhere")


def test_a_working_directory_stands_for_its_newest_policy_at_the_first_start(tmp_path):
    """Reads a run of other dtypes, and layers that are stored otherwise. A run that has not published is refused in one line."""
    c, mesh = base.get_config(), mesh_lib.create({}, devices=jax.devices()[:1])
    c.model.update(model_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, dtype="bfloat16")
    exp = experiment.resolve(c)
    (tmp_path / "weights").mkdir()
    with pytest.raises(ValueError, match="init_from: .*weights has no policy yet; finish rl.sft"):
        completed(tmp_path)
    for number, metadata in enumerate(({}, {"model": {"num_layers": 1}, "tokenizer": "byte_chatml"})):
        broadcast.publish({"w": np.ones(2, np.float32)}, 0, tmp_path / f"{number}/weights", metadata=metadata)
        with pytest.raises(
            ValueError, match="version 0 in .*weights names no model and tokenizer .*; give the working"
        ):
            completed(tmp_path / str(number))
    (own := tmp_path / "own").mkdir()

    def publish(seed, version):
        with workdir.publisher(tmp_path, exp, hosts.ALONE) as publisher:
            publisher.publish(tiny.params(exp.model, seed), version, metadata=exp.broadcast_metadata)

    def check(seed, own=None):
        exp = experiment.resolve(config)
        params = sft.train(exp, mesh, own, None, None) if own else initial.load(exp, mesh)
        expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), tiny.params(exp.model, seed))
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), params, expected)

    publish(0, 0)
    publish(1, 1)
    config = completed(tmp_path, dtype="float32")
    assert (config.model.num_layers, config.model.dtype, config.tokenizer) == (1, "float32", "byte_chatml")
    check(1, own)
    publish(2, 2)  # the other run has gone on
    check(1, own)
    check(2)
    scanned = experiment.resolve(completed(tmp_path, dtype="float32", scan_layers=True))
    apart = initial.load(experiment.resolve(config), mesh)
    jax.tree.map(
        np.testing.assert_array_equal,
        initial.load(scanned, mesh),
        transformer.restacked(apart, exp.model, scanned.model),
    )
    kept = (pin := own / "init_from.json").read_text()
    pin.write_text(json.dumps(json.loads(kept) | {"init_from": "another"}))
    check(2, own)  # it began with another run, and has no checkpoint yet
    pin.write_text(kept)
    for version in (2, 1):
        broadcast.remove(tmp_path / "weights", version)
    with pytest.raises(
        ValueError, match="init_from: .* has no version 1, from which .*own began; put weights/v00000001 back"
    ):
        check(1, own)
    publish(3, 1)
    with pytest.raises(ValueError, match="init_from: .* has other weights as version 1, from which .*own began; put"):
        check(1, own)


def test_all_processes_render_with_the_variables_of_the_run(tmp_path, monkeypatch):
    """Learner, worker, server, validator, and a run that starts from this one; a request may set others."""
    tokenizer_lib.byte_chatml().save(folder := tmp_path / "base")
    thinks = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    template = chat_template.CHATML.rstrip().removesuffix("{% endif %}") + thinks + "{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    c = base.get_config()
    c.model.update(model_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    c.tokenizer, c.chat_template_kwargs.enable_thinking = str(folder), False
    exp = experiment.resolve(c)
    with workdir.open_workdir(tmp_path / "run", exp) as run, workdir.publisher(run, exp, hosts.ALONE) as publisher:
        publisher.publish(tiny.params(exp.model, 0), 0, metadata=exp.broadcast_metadata)
    described = json.loads(json.dumps(generate.described(exp, [])))
    later = completed(run)
    server = startup.prepare(str(run / "weights"), exp.engine)
    saved = config_dict.ConfigDict(workdir.saved_config(run))
    found = {
        "learner": exp.tokenizer,
        "worker": worker.read_runs(described, "off", None)[""].tokenizer,
        "server": server.engine.tokenizer,
        "validator": experiment.resolve(saved).tokenizer,
        "later run": experiment.resolve(later).tokenizer,
    }
    user = [{"role": "user", "content": "2 + 2?"}]
    for name, tokenizer in found.items():
        text = [
            tokenizer.decode(
                tokenizer.render(user, add_generation_prompt=True, variables=own).token_ids, skip_special=False
            )
            for own in (None, {"enable_thinking": True})
        ]
        assert text[0] == text[1] + "<think>\n\n</think>\n\n", name
    c.chat_template_kwargs.enable_thinking = True
    with pytest.raises(ValueError, match="chat_template_kwargs.enable_thinking was False, now True"):
        (run / "metrics.jsonl").write_text("{}\n")
        workdir.open_workdir(run, experiment.resolve(c)).__enter__()
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(workdir=""))
    c.chat_template_kwargs.enable_thinkin = False
    for name in ("enable_thinking", "enable_thinkin"):
        monkeypatch.setattr(command_line, "given", lambda name=name: [f"chat_template_kwargs.{name}"])
        context = pytest.raises(ValueError, match="has no variable 'enable_thinkin'; remove it")
        with contextlib.nullcontext() if name == "enable_thinking" else context:
            sizes.resolve(c)


def test_a_plan_of_a_known_size_needs_no_files():
    config = tpu_gsm8k.get_config("Qwen/Qwen3-0.6B", "v5e:2x4")
    assert initial.completed(config, needs_files=False).model.model_dim == 1024
    with pytest.raises(ValueError, match="init_from: /nowhere is not a folder"):  # no dims of its own
        completed("/nowhere", needs_files=False)
    with pytest.raises(ValueError, match="init_from: /nowhere is not a folder"):  # a run needs them
        completed("/nowhere", model_dim=1024)
