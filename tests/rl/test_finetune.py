"""One command trains a checkpoint, another scores it without a run, and transformers loads the result."""

import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from models import hf
from models.text import tokenizer
from sharding.weights import broadcast
from tests.models.hf import test_variants
from tests.rl.learning.batch import test_conversations
from tests.support import commands, small_learner, tiny, tiny_run

pytestmark = pytest.mark.usefixtures("compile_fast")
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


def options_of(folder, *options, **fields):
    """Returns the options of a command on configs/finetune.py, with `folder` as its checkpoint and no field of `model`."""
    own = {"init_from": folder} | TINY | fields
    return "--config=configs/finetune.py", *options, *(f"--config.{name}={value}" for name, value in own.items())


def run(module, folder, *options, **fields):
    argv = [sys.executable, "-m", module, *options_of(folder, *options, **fields)]
    return subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("own") / "checkpoint")


def checkpoint(path):
    """Writes a Qwen3 with tokenizer, as a user has it."""
    model, ours = tiny.model(max_positions=256), tokenizer.byte_chatml()
    hf.save(path, model, tiny.params(model, 0), write_more=ours.save)
    return path


@pytest.mark.slow
def test_a_checkpoint_is_scored_without_a_run(folder, tmp_path):
    """Its score is that of a run's baseline: greedy, of the same tasks. Without a folder and a run, one line."""
    scored = run("rl.evaluate", folder)
    assert scored.returncode == 0 and list(tmp_path.iterdir()) == [], scored.stderr
    trained = run("rl.train", folder, f"--workdir={tmp_path / 'w'}", **{"rl.num_steps": 0})
    line = r"held-out, baseline: (avg@1 .*)  num_tasks"
    assert re.search(line, scored.stdout)[1] == re.search(line, trained.stdout)[1]
    neither = run("rl.evaluate", "")
    assert neither.returncode == 1 and neither.stderr.count("\n") == 1 and "neither --workdir nor" in neither.stderr


@pytest.mark.parametrize(
    ("fields", "code", "words"),  # 2: found before anything is loaded
    [
        (
            {},
            1,
            "error: the prompt of task 0 .* this tokenizer has no chat template; put a chat_template.jinja next to",
        ),
        ({"init_from": "/nowhere"}, 2, "error: init_from = '/nowhere' does not exist; give a checkpoint"),
        (
            {"model.num_layers": 3},
            1,
            "error: model.num_layers = 3 but .* has 2: the checkpoint's parameters do not fit; leave these fields out",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(folder, tmp_path, fields, code, words):
    bare = shutil.copytree(folder, tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    done = commands.forked("rl.train", *options_of(bare, f"--workdir={tmp_path / 'w'}", **fields))
    assert done.returncode == code and done.stderr.count("\n") == 1 and re.match(words, done.stderr), done.stderr
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_adapters_of_supervised_tuning_are_scored_exported_and_trained_on(folder, tmp_path):
    """Merged, and the same in each: RL of another working directory begins with them, and with adapters of its own."""
    data = test_conversations.write(tmp_path / "c.jsonl", [test_conversations.conversation(x) for x in ("abc", "bca")])
    tuned, own = tmp_path / "tuned", {"warmup.num_steps": 3, "warmup.data": data, "warmup.tasks_per_step": 2}
    done = run("rl.sft", folder, f"--workdir={tuned}", **own)
    assert done.returncode == 0, done.stderr
    for module, start, workdir, fields, options in (
        ("rl.export", folder, tuned, own, [f"--output={tmp_path / 'out'}"]),
        ("rl.evaluate", folder, tuned, own, []),
        ("rl.train", tuned, tmp_path / "run", {}, []),
    ):
        done = run(module, start, f"--workdir={workdir}", *options, **fields)
        assert done.returncode == 0, (module, done.stdout, done.stderr)
    scored = [json.loads((workdir / "evaluations.json").read_text())[0] for workdir in (tuned, tmp_path / "run")]
    assert scored[0] == scored[1] and scored[0]["step"] == 0  # with the same samples
    begun = broadcast.pull(tmp_path / "run" / "weights", 0).params
    for params in (broadcast.pull(tuned / "weights", 0).params, hf.load(tmp_path / "out", scan_layers=True)[1]):
        jax.tree.map(np.testing.assert_array_equal, begun, params)
    (before,) = hf.load(folder, scan_layers=True)[1:]
    moved = {path[-1].key for path, x in jax.tree_util.tree_leaves_with_path(jax.tree.map(_differ, begun, before)) if x}
    assert moved == set(small_learner.PRODUCTS)


def _differ(a, b):
    return not np.array_equal(a, b)


FAMILIES = {
    "Qwen3": dict(head_dim=16),
    "Llama": dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}),
    "Gemma3Text": dict(head_dim=16, sliding_window=8, num_hidden_layers=4),
    "Glm4Moe": test_variants.GLM | dict(head_dim=16),
    "GptOss": test_variants.GPT_OSS | dict(head_dim=16, num_hidden_layers=2),
}
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
    chat = [{"role": "user", "content": "What is 1 + 2?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    before = transformers.AutoModelForCausalLM.from_pretrained(pathlib.Path(name).parent, dtype=torch.float32)
    moved = sum((a != b).sum().item() for a, b in zip(model.parameters(), before.parameters()))
    print(pathlib.Path(name).parent.name, out.shape[1] - ids["input_ids"].shape[1], moved > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_learns_from_a_file_and_goes_back(family, tmp_path):
    """One command on the user's rows: some of 256 samples of a random model end with the right digit, and that moves its parameters."""
    (tmp_path / "tokenizer").mkdir()
    tokenizer.byte_chatml().save(tmp_path / "tokenizer")
    test_variants.run_torch(WRITE, str(tmp_path), json.dumps({family: FAMILIES[family]}))
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"path": tmp_path / "sums.jsonl", "prompt": "question", "reward": "number"}
    fields = {"env.name": "dataset"} | {f"env.options.{name}": value for name, value in options.items()}
    fields |= {"rl.num_steps": 2, "rl.prompts_per_step": 8, "rl.samples_per_prompt": 16, "optimizer.warmup_steps": 0}
    workdir, output = tmp_path / "w", tmp_path / family / "out"
    for module, options in (("rl.train", []), ("rl.export", [f"--output={output}"])):
        done = run(module, tmp_path / family, f"--workdir={workdir}", *options, **fields)
        assert done.returncode == 0, (module, done.stdout, done.stderr)
    assert any(line["rollout/reward"] > 0 for line in tiny_run.lines(workdir))
    assert test_variants.run_torch(READ, str(output)) == f"{family} 4 True\n"
