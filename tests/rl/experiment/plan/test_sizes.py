"""Sizes that follow from the memory of devices, on meshes without devices; the budget by hand; the compiler itself (slow)."""

import dataclasses
import json
import operator
import os
import re
import types

import pytest
from ml_collections import config_dict

from configs import base, finetune, presets
from models.hf import config as hf_config
from models.text import tokenizer
from rl.experiment import experiment, rules
from rl.experiment.plan import lowered_programs, sizes
from tests.rl.experiment.plan import test_plan
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
    exp, text = sizes.settled(config, devices(**place), lowered_programs.resolve)
    return config_dict.ConfigDict(exp.config), text


def test_all_that_is_open_gets_a_value_that_is_printed():
    config, text = settled(config_of())
    assert (config.inference.max_model_len, config.train.row_length, config.rl.prompts_per_step) == (2048, 2048, 32)
    assert (config.model.dtype, config.model.param_dtype) == ("bfloat16", "bfloat16")
    assert config.inference.num_slots == 256 and config.train.rows == 128  # all rollouts; 32,768 tokens a chip
    for name in rules.OPEN:
        assert f"{name} = {operator.attrgetter(name)(config)}" in text
    assert (config.sampling.max_tokens, config.evaluation.num_tasks) == (1024, 100)
    kind, lengths, memory = text.splitlines()
    assert kind.startswith("chosen for 8 x v5e: model.dtype = bfloat16, ") and "at most 2048 tokens: " in lengths
    assert re.match(r"chosen for 8 x 15.75 GiB, about [\d.]+ of each in use: inference.num_slots = 256, ", memory)
    assert sizes.sized(config, None) == (config, None)  # nothing is open any more


@pytest.mark.parametrize(("memory_gib", "remat"), [(96, "none"), (30, "block")])
def test_a_cpu_computes_layers_again_only_for_want_of_memory(memory_gib, remat):
    fields = {"inference__max_model_len": 8192, "train__row_length": 8192}
    config, _ = settled(config_of(**fields), memory_gib=memory_gib, topology="v5e:1x1", is_cpu=True)
    assert (config.model.dtype, config.model.remat) == ("float32", remat)


def test_more_memory_never_means_less_and_less_memory_fits():
    """One chip, all parameters: 0.6 B with moments, gradients, and copies need 17 GiB, and the sizes take the rest."""
    found = []
    for gib in (22, 26, 31.25, 95.74):
        config, text = settled(config_of(lora__rank=0), memory_gib=gib, topology="v5e:1x1")
        assert config.model.param_dtype == "float32"
        assert float(re.search(r"about ([\d.]+) of", text)[1]) <= sizes.SHARE * gib + 0.01
        found.append((config.inference.num_slots, config.train.rows))
    assert found == sorted(found) and found[0] < found[-1] == (256, 16)


def need(text):
    return re.search(r"about ([\d.]+) of each", text)[1]


def test_the_printed_need_is_that_of_the_final_sizes():
    """Whichever of them was set by the user."""
    whole = settled(config_of())
    for fields in ({"inference__num_slots": 256}, {"train__rows": 128}):
        config, text = settled(config_of(**fields))
        assert config == whole[0] and need(text) == need(whole[1])


def test_the_memory_of_an_accelerator_is_its_own(monkeypatch):
    """Not the part that is in use now, nor the host's."""
    stats = {"bytes_in_use": 1 << 20, "bytes_limit": 15 << 30}
    chip = types.SimpleNamespace(platform="gpu", device_kind="T4", process_index=0, memory_stats=lambda: stats)
    monkeypatch.setattr(sizes.jax, "local_devices", lambda: [chip])
    monkeypatch.setattr(sizes.mesh_lib, "create", lambda axes, devices: devices)
    monkeypatch.setattr(sizes.layout, "learner_mesh", lambda config: None)
    place = sizes.present(base.get_config())
    assert (place.memory_bytes, place.kind, place.is_cpu) == (15 << 30, "T4", False)


def test_replays_on_the_accelerator_need_sizes_of_the_user():
    """Their copy of the weights is in no estimate."""
    with pytest.raises(
        ValueError, match="trust.device = 'auto' replays .* inference.num_slots and train.rows = 0 would"
    ):
        settled(config_of(trust__device="auto"))
    settled(config_of(trust__device="auto", trust__validators=(f"http://127.0.0.1:1#{64 * 'a'}",)))
    settled(config_of(trust__device="accelerator", inference__num_slots=8, train__rows=8))


def test_a_field_that_is_set_stays_and_limits_the_others():
    config, text = settled(config_of(train__rows=8, inference__max_model_len=500, sampling__max_tokens=400))
    assert config.train.rows == 8 and config.train.row_length == 512 and "train.rows" not in text
    short, _ = settled(config_of(model__max_positions=600, sampling__max_tokens=400))
    assert short.inference.max_model_len == 600 and short.train.row_length == 640
    for length, row in ((2100, 2304), (5000, 5120)):  # in tiles of 256 and 512, which pad less than an eighth
        longer, _ = settled(config_of(inference__max_model_len=length, sampling__max_tokens=2000))
        assert longer.train.row_length == row
    for samples, memory_gib, prompts, slots in ((16, 15.75, 16, 256), (64, 95.74, 4, 256)):  # rollouts are 256
        groups, _ = settled(config_of(rl__samples_per_prompt=samples), memory_gib=memory_gib)
        assert (groups.rl.prompts_per_step, groups.inference.num_slots) == (prompts, slots)
    many, _ = settled(config_of(rl__prompts_per_step=256), memory_gib=95.74)
    assert many.inference.num_slots == sizes.MOST_SLOTS == 512  # of 2,048 rollouts
    answers, _ = settled(config_of(sampling__max_tokens=60))
    assert answers.inference.max_model_len == 572  # short answers may have long prompts
    few, _ = settled(
        config_of(
            rl__prompts_per_step=2,
            rl__samples_per_prompt=8,
            mesh__context=2,
            inference__max_model_len=120,
            sampling__max_tokens=60,
        )
    )
    assert few.train.rows == 16 and few.train.row_length == 256  # no more rows than rollouts; a tile for each shard
    cpu, _ = settled(config_of(lora__rank=0), is_cpu=True, memory_gib=64)
    assert cpu.model.dtype == "float32" and cpu.train.rows == 8  # one for each device
    assert (cpu.sampling.max_tokens, cpu.evaluation.num_tasks, cpu.rl.prompts_per_step) == (64, 64, 8)


def test_the_engines_weights_are_in_as_many_parts_as_the_memory_needs():
    """A chip has no place for 8 B parameters, much less for two copies, as while new ones are handed over."""
    config, text = settled(config_of("Qwen/Qwen3-8B"))
    assert config.inference.mesh.tensor == 4 and "inference.mesh.tensor = 4" in text
    assert float(re.search(r"about ([\d.]+) of", text)[1]) <= sizes.SHARE * 15.75
    with pytest.raises(ValueError, match="needs about"):  # parts on a CPU are in one memory
        settled(config_of("Qwen/Qwen3-8B"), is_cpu=True, memory_gib=31.25)
    more, _ = settled(config_of("Qwen/Qwen3-8B", inference__mesh__tensor=8))
    assert more.inference.mesh.tensor == 8 and settled(config_of())[0].inference.mesh.tensor == 1


def test_what_cannot_fit_and_what_is_unknown_is_refused_in_one_line():
    for config, words in (
        (
            config_of(lora__rank=0),
            r"lora.rank = 0 \(all .* needs about [\d.]+ of 8.0 GiB .*; set lora.rank = 16, use more",
        ),
        (config_of("Qwen/Qwen3-8B"), "lora.rank = 16 needs about .*; lower sampling.max_tokens, use more devices"),
        (
            config_of(topology__mode="remote"),
            "inference.num_slots = 0 fits .* but topology.mode = 'remote' has its servers elsewhere; set inference.num_slots to the slots of one",
        ),
    ):
        with pytest.raises(ValueError, match=words) as error:
            settled(config, memory_gib=8.0, topology="v5e:1x1")
        assert "\n" not in str(error.value)


def test_devices_apart_are_filled_apart(monkeypatch):
    """A learner with half of a host's chips, the engine with the others; and a learner whose servers are elsewhere."""
    monkeypatch.setattr(lowered_programs, "create_mesh", test_plan.abstract_mesh)

    def chosen(memory_gib, **fields):
        def devices(config):
            return dataclasses.replace(sizes.planned(config, "v5e:2x4"), memory_bytes=memory_gib * 2**30)

        exp, text = sizes.settled(config_of(**fields), devices, lowered_programs.resolve)
        config, place = exp.config, devices(exp.config)
        assert float(re.search(r"about ([\d.]+) of", text)[1]) <= sizes.SHARE * memory_gib
        return (
            config.inference.num_slots,
            config.train.rows,
            place.mesh.size,
            place.server_mesh and place.server_mesh.size,
        )

    assert chosen(15.75, mesh__rollout_devices=4) == (128, 64, 4, 4)
    place = sizes.planned(config_of(inference__mesh__tensor=1), "v5e:4x4")
    assert (place.mesh.size, place.server_mesh.size) == (16, 4)  # each host has an engine of its own
    assert chosen(15.75, topology__mode="remote", inference__num_slots=24) == (24, 128, 8, None)
    # Slots and rows limit the other's number on devices that both use, and only there.
    few, many = (chosen(8, mesh__rollout_devices=4, train__rows=rows)[0] for rows in (4, 64))
    assert few == many


def test_the_budget_is_the_sum_by_hand():
    """A train step and the slots take turns; old and new weights of the engine exist together, while it decodes."""
    programs = {
        name: program(name, held)
        for name, held in {
            "train": {"parameters": 10.0, "optimizer": 20.0, "batch": 1.0},
            "prefill": {"parameters": 5.0, "cache": 2.0},
            "decode": {"parameters": 5.0, "cache": 40.0, "other state": 3.0},
        }.items()
    }
    parts = sizes.budget(programs, {"train": 4.0, "prefill": 1.0, "decode": 2.0})
    assert parts == {"train state": 30.0, "weights of the engine": 5.0, "new version": 5.0 + 46.0}
    assert sizes.budget(programs, {"train": 90.0, "decode": 6.0})["train"] == 91.0


def program(name, held):
    fields = dict.fromkeys(("title", "mesh", "lower", "num_tokens", "executed_flops", "read_bytes"))
    return lowered_programs.LoweredProgram(name=name, held=held, needed={}, **fields)


def test_the_devices_of_this_process_are_those_of_the_config(monkeypatch):
    """Eight of a CPU, of which the engine has one; half of the memory of the machine is theirs. The config is resolved once."""
    c = base.get_config()
    place = sizes.present(c)
    assert (place.mesh.size, place.server_mesh.size, place.kind, place.is_cpu) == (8, 1, "cpu", True)
    assert place.memory_bytes * 16 == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    c.train.rows = c.inference.num_slots = 0
    loaded, load = [], tokenizer.load
    monkeypatch.setattr(tokenizer, "load", lambda *args, **options: loaded.append(args) or load(*args, **options))
    exp, text = sizes.settled(c, lambda config: place, experiment.resolve)
    assert len(loaded) == 1
    assert (exp.config.train.rows, exp.engine.num_slots) == (16, 256) and "chosen for 8 x " in text


def test_a_run_keeps_its_sizes_on_other_devices(tmp_path, monkeypatch, capsys):
    """A run without a checkpoint does not: a mistake may be corrected."""
    monkeypatch.setattr(sizes.flags, "FLAGS", types.SimpleNamespace(workdir=str(tmp_path)))
    monkeypatch.setattr(sizes.command_line, "given", lambda: [])
    c = base.get_config()
    here, c.inference.num_slots, c.model.dtype, c.model.remat = sizes.present(c), 0, "auto", "block"
    found = []
    for memory_mib, checkpoint in ((20, None), (999, "warmup/1"), (20, "checkpoints/0"), (20, None)):
        place = dataclasses.replace(here, memory_bytes=memory_mib * 2**20)
        monkeypatch.setattr(sizes, "present", lambda config, place=place, **options: place)
        exp = sizes.resolve(c)
        found.append(exp.engine.num_slots)
        (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(exp.config.to_json())}))
        if checkpoint:
            (tmp_path / checkpoint).mkdir(parents=True)
            (tmp_path / checkpoint / "seal.json").touch()
    assert found[0] < found[1] == found[2] == found[3] == 256
    assert capsys.readouterr().out.count("inference.num_slots = ") == 2


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
    estimated = float(re.search(r"chosen for .* GiB, about ([\d.]+) of each", out)[1])
    compiled = float(re.search(r"same chips\n  memory per chip .*: ([\d.]+) GiB of", out)[1])
    assert compiled <= estimated / sizes.SHARE, out
