"""Sizes that follow from the memory of devices, on meshes without devices; the budget by hand; the compiler itself (slow)."""

import dataclasses
import json
import re
import types

import pytest

from configs import base, finetune, presets
from models.hf import config as hf_config
from rl.experiment import experiment
from rl.plan import lowered_programs, sizes
from tests.rl.plan import test_plan
from tests.support import tiny

CHECKPOINT = "Qwen/Qwen3-0.6B"


def config_of(name=CHECKPOINT, **fields):
    c = finetune.get_config()
    c.init_from = ""
    c.model.update(presets.MODELS[name])
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in fields.items()})
    return c


def devices(memory_gib=15.75, topology="v5e:2x4", is_cpu=False):
    def of(config):
        meshes = [
            test_plan.abstract_mesh(topology, axes)
            for axes in (config.mesh.to_dict(), lowered_programs.server_axes(config))
        ]
        return sizes.Devices(*meshes, memory_gib * 2**30, "v5e", is_cpu)

    return of


def settled(config, **place):
    return sizes.settled(config, devices(**place), lowered_programs.resolve)


def test_all_that_is_open_gets_a_value_that_is_printed():
    config, text = settled(config_of())
    assert (config.inference.max_model_len, config.train.row_length, config.rl.prompts_per_step) == (2048, 2048, 32)
    assert (config.model.dtype, config.model.param_dtype) == ("bfloat16", "bfloat16")
    assert config.inference.num_slots == 256 and config.train.rows == 128  # all rollouts; 32,768 tokens a chip
    for name in sizes.FIELDS:
        section, field = name.split(".")
        assert f"{name} = {config[section][field]}" in text
    assert re.match(r"chosen for 8 x v5e with 15.75 GiB: .*; about [\d.]+ GiB of each$", text)
    assert settled(config) == (config, "")  # nothing is open any more


def test_more_memory_never_means_less_and_less_memory_fits():
    """One chip, all parameters: 0.6 B with moments, gradients, and copies need 17 GiB, and the sizes take the rest."""
    found = []
    for gib in (22, 26, 31.25, 95.74):
        config, text = settled(config_of(lora__rank=0), memory_gib=gib, topology="v5e:1x1")
        assert config.model.param_dtype == "float32"
        assert float(re.search(r"about ([\d.]+) GiB", text)[1]) <= sizes.SHARE * gib + 0.01
        found.append((config.inference.num_slots, config.train.rows))
    assert found == sorted(found) and found[0] < found[-1] == (256, 16)


def test_a_field_that_is_set_stays_and_limits_the_others():
    config, text = settled(config_of(train__rows=8, inference__max_model_len=500, sampling__max_tokens=400))
    assert config.train.rows == 8 and config.train.row_length == 512 and "train.rows" not in text
    short, _ = settled(config_of(model__max_positions=600, sampling__max_tokens=400))
    assert short.inference.max_model_len == 600 and short.train.row_length == 640
    cpu, _ = settled(config_of(lora__rank=0), is_cpu=True, memory_gib=64)
    assert cpu.model.dtype == "float32" and cpu.train.rows == 16  # 4,096 tokens a device


def test_what_cannot_fit_and_what_is_unknown_is_refused_in_one_line():
    for config, words in (
        (
            config_of(lora__rank=0),
            r"lora.rank = 0 \(all .* needs about [\d.]+ of 8.0 GiB .*; set lora.rank = 16, use more",
        ),
        (config_of("Qwen/Qwen3-8B"), "lora.rank = 16 needs about .*; lower sampling.max_tokens, use more devices"),
        (
            config_of(topology__mode="remote"),
            "model.dtype is open, but the engine has other devices than the learner; set model.d",
        ),
    ):
        with pytest.raises(ValueError, match=words) as error:
            settled(config, memory_gib=8.0, topology="v5e:1x1")
        assert "\n" not in str(error.value)


def test_the_budget_is_the_sum_by_hand():
    """A train step and the slots take turns; old and new weights of the engine exist together."""
    programs = {
        name: program(name, held)
        for name, held in {
            "train": {"parameters": 10.0, "optimizer": 20.0, "batch": 1.0},
            "prefill": {"parameters": 5.0, "cache": 2.0},
            "decode": {"parameters": 5.0, "cache": 40.0, "other state": 3.0},
        }.items()
    }
    parts = sizes.budget(programs, {"train": 4.0, "prefill": 1.0, "decode": 2.0})
    assert parts == {"train state": 30.0, "weights of the engine": 5.0, "prefill with slots": 46.0}
    assert sizes.budget(programs, {"train": 90.0, "decode": 6.0})["train"] == 91.0
    programs["decode"].held.update({"cache": 0.0, "other state": 0.0})
    assert sizes.budget(programs, {"train": 1.0, "decode": 2.0})["new version"] == 5.0


def program(name, held):
    fields = dict.fromkeys(("title", "mesh", "lower", "num_tokens", "executed_flops", "read_bytes"))
    return lowered_programs.LoweredProgram(name=name, held=held, needed={}, **fields)


def test_the_devices_of_this_process_are_those_of_the_config():
    """Eight of a CPU, of which the engine has one; half of the memory of the machine is theirs."""
    c = base.get_config()
    place = sizes.present(c)
    assert (place.mesh.size, place.server_mesh.size, place.kind, place.is_cpu) == (8, 1, "cpu", True)
    c.train.rows = c.inference.num_slots = 0
    config, text = sizes.settled(c, lambda config: place, experiment.resolve)
    assert config.train.rows == 128 and config.inference.num_slots == 256 and "chosen for 8 x cpu with" in text


def test_a_run_keeps_its_sizes_on_other_devices(tmp_path, monkeypatch, capsys):
    """A run without a checkpoint does not: a mistake may be corrected."""
    monkeypatch.setattr(sizes.flags, "FLAGS", types.SimpleNamespace(workdir=str(tmp_path)))
    monkeypatch.setattr(sizes.command_line, "given", lambda: [])
    c = base.get_config()
    here, c.inference.num_slots, c.model.dtype, c.model.remat = sizes.present(c), 0, "auto", "block"
    found = []
    for memory_mib, checkpoint in ((20, None), (999, "1"), (20, "2")):
        place = dataclasses.replace(here, memory_bytes=memory_mib * 2**20)
        monkeypatch.setattr(sizes, "present", lambda config, place=place: place)
        exp = sizes.resolve(c)
        found.append(exp.engine.num_slots)
        (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(exp.config.to_json())}))
        if checkpoint:
            (tmp_path / "checkpoints" / checkpoint).mkdir(parents=True)
    assert found[0] < found[1] == found[2] == 256
    assert capsys.readouterr().out.count("chosen for") == 2


@pytest.mark.slow
@test_plan.needs_compiler
@pytest.mark.parametrize(
    ("topology", "rank"), [("v5e:1x1", 16), ("v6e:1x1", 16), ("v6e:1x1", 0), ("v5e:2x4", 16), ("v5e:2x4", 0)]
)
def test_a_checkpoint_trains_on_one_chip_and_on_a_host(tmp_path, topology, rank):
    """Learner and engine fit together with the sizes that estimates chose, and the estimate is near the compiled need."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config.write(tiny.published(CHECKPOINT))))
    fields = [f"--config.init_from={tmp_path}", f"--config.lora.rank={rank}"]
    code, out, err = test_plan.command("--config=configs/finetune.py", f"--topology={topology}", *fields)
    assert code == 0, out + err
    estimated = float(re.search(r"chosen for .* about ([\d.]+) GiB of each", out)[1])
    compiled = float(re.search(r"same chips\n  memory per chip .*: ([\d.]+) GiB of", out)[1])
    assert compiled <= estimated / sizes.SHARE, out
