"""One command trains a checkpoint, another scores it without a run, and transformers loads the result."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from models import hf
from models.text import tokenizer
from tests.models.hf import test_variants
from tests.support import tiny, tiny_run

TINY = {
    "rl.num_steps": 1,
    "rl.prompts_per_step": 4,
    "rl.samples_per_prompt": 4,
    "sampling.max_tokens": 12,
    "inference.max_model_len": 128,
    "inference.prefill_batch": 4,
    "evaluation.num_tasks": 4,
    "lora.rank": 2,
    "trust.invited_rate": 0.5,
}


def run(module, folder, *options, config="configs/finetune.py", **fields):
    """Runs a command on configs/finetune.py, with `folder` as its checkpoint and no field of `model`."""
    own = {"init_from": folder} | TINY | fields
    argv = [sys.executable, "-m", module, f"--config={config}", *map(str, options)]
    argv += [f"--config.{name}={value}" for name, value in own.items()]
    return subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 with tokenizer, as a user has it."""
    path, model, ours = (
        tmp_path_factory.mktemp("own") / "checkpoint",
        tiny.model(max_positions=256),
        tokenizer.byte_chatml(),
    )
    hf.save(path, model, tiny.params(model, 0), write_more=ours.save)
    return path


def test_a_folder_trains_after_its_baseline(folder, tmp_path):
    """Its score stands before the first step, and the sizes that follow from the memory are those of config.json."""
    done = run("rl.train", folder, f"--workdir={tmp_path / 'w'}")
    assert done.returncode == 0, done.stderr
    chosen = re.search(r"^chosen for .*: (.*); about", done.stdout, re.MULTILINE)[1]
    saved = json.loads((tmp_path / "w" / "config.json").read_text())["config"]
    for name, value in (part.split(" = ") for part in chosen.split(", ")):
        section, field = name.split(".")
        assert str(saved[section][field]) == value
    assert saved["tokenizer"] == str(folder) and saved["model"]["num_layers"] == 2 and saved["model"]["model_dim"] == 32
    baseline, first = (
        done.stdout.index("held-out, baseline: avg@1"),
        re.search(r"^rl +step +1/1 ", done.stdout, re.MULTILINE).start(),
    )
    assert baseline < first and "held-out, version 1: avg@1" in done.stdout


@pytest.mark.slow
def test_a_checkpoint_is_scored_without_a_run(folder, tmp_path):
    """Its score is that of a run's baseline: greedy, of the same tasks. Without a folder and a run, one line."""
    scored = run("rl.evaluate", folder)
    assert scored.returncode == 0 and list(tmp_path.iterdir()) == [], scored.stderr
    trained = run("rl.train", folder, f"--workdir={tmp_path / 'w'}", **{"rl.num_steps": 0})
    line = r"held-out, baseline: (avg@1 \S+  pass@1 \S+)"
    assert re.search(line, scored.stdout)[1] == re.search(line, trained.stdout)[1]
    neither = run("rl.evaluate", "")
    assert neither.returncode == 1 and neither.stderr.count("\n") == 1 and "neither --workdir nor" in neither.stderr


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "error: this tokenizer has no chat template; put a chat_template.jinja next to its tokenizer.json"),
        ({"init_from": "/nowhere"}, "error: init_from: /nowhere is not a folder; give a checkpoint folder or a hub id"),
        (
            {"model.num_layers": 3},
            "error: model.num_layers = 3 but .* has 2: its parameters do not fit; leave these fields out",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(folder, tmp_path, fields, words):
    bare = shutil.copytree(folder, tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    done = run("rl.train", bare, f"--workdir={tmp_path / 'w'}", **fields)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and re.match(words, done.stderr), done.stderr
    assert not (tmp_path / "w").exists()


FAMILIES = {
    "Qwen3": dict(head_dim=16),
    "Llama": dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}),
    "Gemma3Text": dict(head_dim=16, sliding_window=8, num_hidden_layers=4),
    "Glm4Moe": test_variants.GLM | dict(head_dim=16),
    "GptOss": test_variants.GPT_OSS | dict(head_dim=16, num_hidden_layers=2),
}
PARTIAL = "    c.env.options.reward = 'lcs'\n    return c\n"
WRITE = """
import json, pathlib, sys, torch, transformers
root = pathlib.Path(sys.argv[1])
dims = dict(vocab_size=272, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, pad_token_id=256, bos_token_id=None, eos_token_id=[258, 256])
tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tokenizer")
for family, options in json.loads(sys.argv[2]).items():
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**dims | options)
    model = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config)
    model.save_pretrained(root / family)
    tokenizer.save_pretrained(root / family)
"""
READ = """
import pathlib, sys, torch, transformers
for name in sys.argv[1:]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (name, info)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    chat = [{"role": "user", "content": "Reverse: abc"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    before = transformers.AutoModelForCausalLM.from_pretrained(pathlib.Path(name).parent, dtype=torch.float32)
    moved = sum((a != b).sum().item() for a, b in zip(model.parameters(), before.parameters()))
    print(pathlib.Path(name).parent.name, out.shape[1] - ids["input_ids"].shape[1], moved > 0)
"""


@pytest.mark.slow
def test_folders_of_transformers_train_and_go_back(tmp_path):
    """transformers writes a tiny folder of five families; each trains, is exported, and transformers generates with it."""
    (tmp_path / "tokenizer").mkdir()
    tokenizer.byte_chatml().save(tmp_path / "tokenizer")
    test_variants.run_torch(WRITE, str(tmp_path), json.dumps(FAMILIES))
    config = tmp_path / "partial.py"  # rewards below 1, without which a random model learns nothing
    config.write_text("from configs import finetune\n\n\ndef get_config():\n    c = finetune.get_config()\n" + PARTIAL)
    for family in FAMILIES:
        fields = {"config": config, "rl.num_steps": 2, "optimizer.warmup_steps": 0}
        for module, options in (("rl.train", []), ("rl.export", [f"--output={tmp_path / family / 'out'}"])):
            done = run(module, tmp_path / family, f"--workdir={tmp_path / family / 'w'}", *options, **fields)
            assert done.returncode == 0, (family, module, done.stdout, done.stderr)
    printed = test_variants.run_torch(READ, *(str(tmp_path / family / "out") for family in FAMILIES))
    assert printed.split("\n")[:-1] == [f"{family} 4 True" for family in FAMILIES], printed
