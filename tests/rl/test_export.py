"""The files of an exported checkpoint in addition to its parameters: those of the checkpoint that the run began with."""

import json
import pathlib

import pytest

from configs import base
from models import hf
from rl import export
from rl.experiment import experiment, initial
from rl.experiment import workdir as run_directory
from sharding.system.multihost import hosts
from tests.rl import test_finetune
from tests.support import tiny

STOP, PAD = 258, 256
MORE = {
    "config.json": {"bos_token_id": 257, "eos_token_id": STOP, "pad_token_id": PAD, "use_cache": True, "own": [1]},
    "generation_config.json": {"eos_token_id": [STOP], "do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "tokenizer_config.json": {"model_max_length": 8192, "padding_side": "left", "bos_token": "<|im_start|>"},
    "special_tokens_map.json": {"eos_token": "<|im_end|>"},
}


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def folder(tmp_path):
    """A checkpoint as the hub has it, with entries and files that this package does not write."""
    path = test_finetune.checkpoint(tmp_path / "base")
    for name, more in MORE.items():
        stored = read(path / name) if (path / name).exists() else {}
        (path / name).write_text(json.dumps(stored | more))
    truncation = {"direction": "Left", "max_length": 99, "strategy": "LongestFirst", "stride": 0}
    (path / "tokenizer.json").write_text(json.dumps(read(path / "tokenizer.json") | {"truncation": truncation}))
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("{{ messages[0].content }}")
    return path


def run_of(init_from, **fields):
    config = base.get_config()
    config.init_from = str(init_from)
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    return experiment.resolve(initial.completed(config, fields))


def exported(exp, output):
    export.save(output, exp, tiny.params(exp.model, 3))
    return {path.relative_to(output): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def of_run(folder, workdir):
    """The working directory of a run that began with `folder`, and has published its weights."""
    exp = run_of(folder)
    with run_directory.open_workdir(workdir, exp) as path, run_directory.publisher(path, exp, hosts.ALONE) as publisher:
        publisher.publish(tiny.params(exp.model, 3), 0, metadata=exp.broadcast_metadata)
    return workdir


@pytest.mark.parametrize("through_runs", [0, 1, 2])
def test_all_that_training_does_not_change_is_the_sources(folder, tmp_path, through_runs):
    """Byte for byte but for the weights, also if the run began with another run's working directory."""
    begin = folder
    for number in range(through_runs):
        begin = of_run(begin, tmp_path / f"run{number}")
    found = exported(run_of(begin), tmp_path / "out")
    assert found.keys() == {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    for name in found.keys() - {pathlib.Path("model.safetensors")}:
        if name.name in ("config.json", "generation_config.json"):
            assert json.loads(found[name]) == read(folder / name), name
        else:
            assert found[name] == (folder / name).read_bytes(), name


def test_changed_fields_dtypes_and_stop_tokens_are_written(folder, tmp_path):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": PAD, "top_k": 5}))  # as of a base model
    exported(run_of(folder, model__rope_theta=123.0, model__param_dtype="bfloat16"), tmp_path / "out")
    changed = {"rope_theta": 123.0, "torch_dtype": "bfloat16"}
    assert read(tmp_path / "out" / "config.json").items() >= (MORE["config.json"] | changed).items()
    assert hf.read_config(tmp_path / "out").rope_theta == 123.0
    assert read(tmp_path / "out" / "generation_config.json") == {"eos_token_id": [PAD, STOP], "top_k": 5}
    (folder / "generation_config.json").unlink()
    exported(run_of(folder), tmp_path / "more")
    ids = {name: value for name, value in MORE["config.json"].items() if name.endswith("_id")}
    assert read(tmp_path / "more" / "generation_config.json") == ids | {"eos_token_id": STOP}


def test_another_tokenizer_brings_its_own_ids(folder, tmp_path):
    exported(run_of(folder, tokenizer="byte_chatml"), tmp_path / "out")
    ids = {"eos_token_id": [STOP, PAD], "pad_token_id": PAD}
    stored = {name: value for name, value in read(folder / "config.json").items() if name != "bos_token_id"}
    assert read(tmp_path / "out" / "config.json") == stored | ids
    assert (
        read(tmp_path / "out" / "generation_config.json") == {"do_sample": True, "temperature": 0.7, "top_p": 0.9} | ids
    )
    assert read(tmp_path / "out" / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_source_that_is_gone_costs_its_entries_alone(folder, tmp_path, capsys):
    exp = run_of(of_run(folder, tmp_path / "run"), tokenizer="byte_chatml")
    folder.rename(tmp_path / "moved")
    exported(exp, tmp_path / "out")
    assert "note: config.json has only the fields of the model, because init_from cannot" in capsys.readouterr().err
    assert read(tmp_path / "out" / "config.json")["eos_token_id"] == [STOP, PAD]
