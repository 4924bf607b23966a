"""The first steps of every command: mistakes of the user end in one line, and claim no working directory."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import pytest
from absl import flags
from ml_collections import config_dict

from configs import base, quickstart
from rl import envs, train
from rl.experiment import base_fields, command, experiment, layout, rules
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.experiment.plan import lowered_programs, sizes
from rl.trust.validator import calibrate
from sharding.system.multihost import failure, hosts
from tests.support import commands

# ml_collections loads a config file the old way.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
ROOT = pathlib.Path(__file__).resolve().parents[3]
MISTAKES = {
    "field": (["--config.rl.num_stepz=3"], "no field 'rl.num_stepz' (did you mean rl.num_steps?)", 2),
    "type": (
        ["--config.rl.num_steps=abc"],
        "--config.rl.num_steps=abc: its type is int; write it in Python's notation, as 140",
        2,
    ),
    "argument": (["--config.seed=1", "extra"], "argument 'extra' is not a flag", 2),
    "mesh": (["--config.mesh.fsdp=7"], "fsdp=7 x expert=1 x context=1 x tensor=1 does not fit", 1),
    "context": (
        ["--config.mesh.fsdp=4", "--config.mesh.context=2", "--config.train.row_length=161"],
        "train.row_length = 161 does not divide over the 2 devices of mesh.context; set it to 162, or to",
        1,
    ),
    "rows": (["--config.mesh.fsdp=8", "--config.train.rows=3"], "train.rows = 3 does not divide", 1),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_line_and_leaves_nothing(tmp_path, name):
    arguments, message, code = MISTAKES[name]
    where = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'w'}"]
    result = commands.forked("rl.train", *where, *arguments, num_devices=8)
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and message in result.stderr
    assert not (tmp_path / "w").exists()


SLOW = {"jax", "flax", "optax", "orbax", "grain", "pyarrow", "fastapi", "tensorstore"}


def test_all_mistakes_are_told_at_once_and_before_the_imports_that_take_seconds(tmp_path):
    fields = ["optimizer.lr=1", "rl.num_steps=abc", "rl.max_lag=-1", "rl.loss=grpoo", "env.options.min_lenght=3"]
    wrong = ["--rl.num_steps=3", "--workdr=x", *(f"--config.{field}" for field in fields)]
    for arguments, number in (
        (wrong, len(wrong)),
        (wrong[4:], 3),
        (
            [
                "--config.env.name=dataset",
                "--config.env.options.path=/none.jsonl",
                "--config.env.options.reward=numbr",
                "--config.init_from=none",
            ],
            3,
        ),
        (
            [
                "--config.env.name=dataset",
                f"--config.env.options.path=/{'x' * 300}.jsonl",
                f"--config.init_from=/{'x' * 300}",
                f"--config.warmup.data=/{'x' * 300}",
            ],
            3,
        ),
    ):
        command = [sys.executable, "-X", "importtime", "-m", "rl.train", "--config=configs/quickstart.py"]
        command += [f"--workdir={tmp_path}/w", *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        modules = {line.split("|")[-1].strip().partition(".")[0] for line in result.stderr.splitlines()}
        lines = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
        assert result.returncode == 2 and not modules & SLOW
        assert len(lines) == number and all(line.startswith("error: ") for line in lines), lines
        assert arguments is not wrong or "(did you mean --config.rl.num_steps?)" in lines[0]


@pytest.mark.parametrize(
    ("number", "after_s", "word"),
    [(2, 0.0, "interrupted"), pytest.param(2, 1.0, "interrupted", marks=pytest.mark.slow), (15, 0.0, "terminated")],
)
def test_a_signal_during_the_imports_ends_a_command(tmp_path, number, after_s, word):
    """It printed a traceback, or an extension module hid it, and the run went on; SIGTERM ended it without a line."""
    text = f"import os, threading\nthreading.Timer({after_s}, os.kill, [os.getpid(), {number}]).start()\n"
    (tmp_path / "c.py").write_text(text + "from configs.quickstart import get_config\n")
    command = [sys.executable, "-m", "rl.train", f"--config={tmp_path}/c.py", f"--workdir={tmp_path}/w"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 128 + number and result.stderr.startswith(f"error: {word}; ")
    assert result.stderr.count("\n") == 1 and not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        # The exit of Python joins the threads of pools: the process stayed for minutes after its last line.
        ("futures.ThreadPoolExecutor(1).submit(compute); raise KeyboardInterrupt", ["error: interrupted; "]),
        # A computation in the main thread held both signals.
        ("send(2, 3.0); compute()", ["interrupted; it ends after", "error: interrupted; "]),
        # Python ignores an error in __del__.
        ("finalized.append(Finalized()); finalized.clear(); time.sleep(60)", ["error: terminated; "]),
        ("send(15); fail_if_interrupted()", ["error: terminated; "]),
        ("command.before_leaving(clean_up); raise KeyboardInterrupt", ["removed", "error: interrupted; "]),
        ("hang_up(); send(2, 3.0); compute()", []),
    ],
)
def test_a_signal_ends_a_command_soon_and_with_its_line(tmp_path, code, lines):
    program = f"""
import hashlib, os, signal, sys, threading, time
from concurrent import futures
from rl.experiment import command

sys.argv[1:] = ["--config=configs/quickstart.py", "--workdir={tmp_path}/w"]
command.parse()
command.PATIENCE_S, finalized = 0.1, []

def compute():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # no code of Python runs for minutes

def send(number, *again_s):
    for seconds in (0.5, *again_s):
        threading.Timer(seconds, os.kill, [os.getpid(), number]).start()

def fail_if_interrupted():  # as with a child of the same process group, which ends first
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        raise ValueError("the worker0 process ended")

def clean_up():
    print("removed", file=sys.stderr)

def hang_up():  # as `2>&1 | head` does
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)

class Finalized:
    def __del__(self):
        signal.raise_signal(15)

def main():
    {code}

command.run(main)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    found = result.stderr.splitlines()
    assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found
    assert result.returncode == (143 if "terminated" in "".join(lines) else 130)


def test_a_python_without_jax_is_one_line():
    command = [sys.executable, "-S", "-m", "rl.train"]  # without site-packages
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "has no module 'jax'; activate the environment of the installation, or pip install" in result.stderr
    program = "try:\n    import rl\nexcept ModuleNotFoundError as error:\n    assert error.name == 'jax'"
    assert subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize("file", ["configs/quickstart.py", "examples/mix.py"])
def test_a_command_without_a_config_takes_that_of_the_run(file, tmp_path):
    exp = experiment.resolve(parsed(f"--config={file}", "--workdir=w", "--config.warmup.roles=('user',)"))
    with run_directory.open_workdir(tmp_path, exp):
        pass
    ways = {(f"--workdir={tmp_path}", "--config.seed=3"): 3, (f"--config={tmp_path}/config.json", "--workdir=w"): 0}
    for arguments, seed in ways.items():
        found = experiment.resolve(parsed(*arguments))
        assert experiment.fields(found) == experiment.fields(exp) | {"seed": seed}
        assert found.config.warmup.roles == ("user",)  # a list in JSON
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match="config.json is not the config.json of a run; give that, or a file of configs/"
    ):
        parsed(f"--workdir={tmp_path}")


def test_leftovers_of_a_config_file_and_neutral_values_are_no_mistakes(tmp_path):
    assert quickstart_with("warmup.data=f", "warmup.decoy_fraction=0").warmup.data == "f"


def quickstart_with(*overrides):
    return parsed("--config=configs/quickstart.py", "--workdir=w", *(f"--config.{text}" for text in overrides))


def test_the_home_folder_is_found_where_a_shell_leaves_its_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    fields = {"init_from": "~/m", "warmup.data": "~/a.jsonl, ~/b,c~", "topology.compile_cache": "~/x/~"}
    options = [f"--config.{name}={value}" for name, value in fields.items()]
    values = parsed_flags("--config=configs/quickstart.py", "--workdir=~/w", *options)
    found = experiment.flat(values.config.to_dict())
    assert [values.workdir, *(found[name] for name in fields)] == [
        "/home/me/w",
        "/home/me/m",
        "/home/me/a.jsonl,/home/me/b,c~",
        "/home/me/x/~",
    ]


def parsed(*argv):
    return parsed_flags(*argv).config


def parsed_flags(*argv):
    values, argv = flags.FlagValues(), ["rl.train", *argv]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)  # where ml_collections looks for fields of the config
        patch.delitem(sys.modules, "config_config", raising=False)  # else it loads one config file over the other
        command_line.define(values=values)
        command_line.parse(argv, values)
    return values


def documented_commands():
    """The `python -m rl.train` commands of the docstrings of configs and examples, and of README."""
    for path in (*sorted(ROOT.glob("configs/*.py")), *sorted(ROOT.glob("examples/*.py")), ROOT / "README.md"):
        text = path.read_text().replace("\\\n", " ")
        yield from re.findall(r"^ *python -m rl\.train (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("command", list(documented_commands()))
def test_the_documented_commands_resolve(command, tmp_path):
    """But for the checkpoint, its tokenizer, and the data, which are to be downloaded first."""
    config, rows = parsed(*shlex.split(command), "--config.init_from="), tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}?", "question": "{n}?", "answer": "{n}"}}\n' for n in range(2)))
    if config.env.name == "dataset":
        config.env.options.path = str(rows)
    exp, _ = sizes.settled(config, sizes.present, experiment.resolve)
    assert exp.config.rl.num_steps > 0


CONFIG_FILES = {
    "bad_syntax": ("def get_config(:\n", r"bad_syntax.py, line 1: invalid syntax"),
    "no_function": ("x = 1\n", "does not define get_config"),
    "mistyped": (
        "from configs import quickstart\n\n\ndef get_config():\n    c = quickstart.get_config()\n    c.rl.num_stepz = 3\n",
        r"mistyped.py, line 6: the config has no field 'num_stepz' \(did you mean rl.num_steps or warmup.num_steps\?\)",
    ),
    "no_module": ("import nonesuch\n", "no_module.py, line 1: No module named 'nonesuch'"),
    "raises": ("def get_config():\n    raise ValueError('no such size')\n", "raises.py, line 2: no such size"),
}


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_config_file_that_fails_is_told_in_one_line_with_its_place(tmp_path, name):
    text, words = CONFIG_FILES[name]
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        parsed(f"--config={tmp_path / name}.py", "--workdir=w")
    assert "\n" not in str(error.value) and "Traceback" not in str(error.value)


NEAREST = {
    "configs/quickstart": "does not exist (did you mean configs/quickstart.py?); choose one of configs/",
    "configs": "config file configs is a folder; choose one of configs/",
    "configs/recipes.py:intelect2": "recipe 'intelect2' does not exist (did you mean intellect2?)",
    "modell.x=3": "'modell' (did you mean model?)",
    "num_steps=3": "'num_steps' (did you mean rl.num_steps or warmup.num_steps?)",
    "optimizer.lr=1": "'optimizer.lr' (did you mean optimizer.learning_rate?)",
    "rl.num_steps.x=3": "no field 'rl.num_steps.x'",
    "nonsense=3": "no field 'nonsense'; --help lists all fields",
}


@pytest.mark.parametrize("wrong", NEAREST)
def test_a_wrong_name_is_answered_with_its_path_and_the_nearest(wrong):
    with pytest.raises(ValueError, match=re.escape(NEAREST[wrong])):
        parsed(f"--config={wrong}", "--workdir=w") if "=" not in wrong else quickstart_with(wrong)


@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("true", True), ("8", 8), ("low", "low"), ("2026-01-01", "2026-01-01")]
)
def test_variables_of_a_chat_template_are_set_on_the_command_line(text, value):
    found = quickstart_with(f"chat_template_kwargs.any={text}").chat_template_kwargs.to_dict()
    assert found == {"any": value} and type(found["any"]) is type(value)


def test_help_lists_every_field_with_its_default_and_comment():
    lines = [line.strip() for line in base_fields.listing().splitlines() if " = " in line and line[2] != "#"]
    shown = dict(line.partition("  #")[0].split(" = ", 1) for line in lines)
    defaults = experiment.flat(base.get_config().to_dict()) | {"env.options": {}, "envs": {}}
    defaults |= {"evaluation.sets": {}, "chat_template_kwargs": {}}
    assert {name: shown.pop(name) for name in defaults} == {name: repr(value) for name, value in defaults.items()}
    losses = base.get_config().loss_options
    assert shown == {f"loss_options.{name}": "{}" for name in losses if not losses[name]}
    for line in (  # alone; of a value in parentheses
        "rl.prompts_per_step = 32  # P: groups in a batch",
        "rl.score_errors = 'leave out'  # samples for which",
    ):
        assert any(found.startswith(line) for found in lines), line
    assert "  # 0: those samples are worth 0" not in base_fields.listing().splitlines()
    assert "  model.attention_scale = 0.0  # 0: head_dim ** -0.5" in base_fields.listing()
    assert "  # Multi-head latent attention, if kv_latent_dim is above 0.\n  model.kv" in base_fields.listing()


def test_a_config_file_may_add_options_of_its_environment_and_its_loss(tmp_path):
    (tmp_path / "own.py").write_text(
        "from configs import base\n\n\ndef get_config():\n    c = base.get_config()\n    c.env.options.path = 'x'\n"
        "    c.loss_options.mine = dict(beta=1.0)\n    return c\n"
    )
    config = parsed(f"--config={tmp_path}/own.py", "--workdir=w", "--config.env.options.path=y")
    assert config.env.options.path == "y" and config.loss_options.mine.beta == 1.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loss_options.grpo.clip_low=0.1", "rl.loss is 'two_sided_clip'; set rl.loss = 'grpo'"),
        ("lora.alpha=8", "set lora.rank above 0"),
        ("objective.kl_estimator=k2", "set objective.kl_coef above 0"),
        ("optimizer.momentum=0.9", "set optimizer.name = 'muon' or 'sgd'"),
        ("optimizer.final_rate=0.1", "set optimizer.schedule"),
        ("topology.relay_port=8200", "set topology.mode = 'remote'"),
        ("topology.control_token_file=FILE", "set topology.mode = 'remote'"),
        ("trust.min_stake=5", "set trust.admission = 'stake'"),
        ("trust.work_bits=20", "set trust.admission = 'work'"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(override, words):
    with pytest.raises(ValueError, match=f"config.{override.partition('=')[0]} has no effect here; .*{words}"):
        quickstart_with(override)


@pytest.mark.parametrize(
    ("found", "words"), [(None, "or pip install tensorboard; tensorboard --"), (1, "or tensorboard --")]
)
def test_a_command_that_is_not_installed_is_named_with_its_installation(monkeypatch, found, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert words in experiment.describe(resolved(), pathlib.Path("w"))


def test_an_option_that_is_read_is_not_refused():
    config = quickstart_with(
        "lora.rank=2", "lora.alpha=8.0", "loss_options.two_sided_clip.delta=3.0", "optimizer.beta1=0.8"
    )
    assert (config.lora.alpha, config.loss_options.two_sided_clip.delta) == (8.0, 3.0)


def resolved(**changes):
    config = quickstart.get_config()
    for name, value in changes.items():
        *section, field = name.split("__")
        (config[section[0]] if section else config)[field] = value
    return experiment.resolve(config)


OAPL = {"rl__loss": "oapl", "rl__advantage": "optimal"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl__loss": "gropo"}, r"rl.loss = 'gropo' is unknown \(did you mean grpo\?\); choose one of "),
        ({"rl__samples_per_prompt": 0}, "rl.samples_per_prompt = 0 must be at least 1"),
        ({"trust__min_rate": 0.0}, r"trust.min_rate = 0.0 must be in \(0, 1\]"),
        (
            {"trust__validators": ("http://v:1",)},
            "contains 'http://v:1', without a public key; write http://HOST:PORT#KEY",
        ),
        ({"trust__validators": ("v:1",)}, "trust.validators contains 'v:1', which is not a URL"),
        ({"trust__validators": (f"http://v:1#{'a' * 64}",) * 2}, "whose key is listed more than once"),
        ({"trust__validators": (f"http://v:1#{'a' * 64}",), "trust__quorum": 2}, "trust.quorum = 2 exceeds the 1"),
        ({"sampling__temperature": 0.0}, "sampling.temperature = 0.0 must be above 0"),
        ({"train__row_length": 32}, "inference.max_model_len = 64 exceeds train.row_length = 32"),
        ({"topology__mode": "remote"}, "needs inference servers; set .* makes a key"),
        ({"objective__policy_coef": 0.0}, "leaves nothing to learn from"),
        (
            {"objective__policy_coef": 0.0, "objective__teacher_coef": 1.0},
            "teacher is the policy itself; set objective.ref",
        ),
        ({"objective__reference_model": "dir"}, "reference_model has no effect; set objective.teacher_coef"),
        ({"objective__entropy_coef": -0.1}, "entropy_coef = -0.1 must be at least 0"),
        ({"rl__loss": "decoupled_ppo"}, "set objective.old_logprobs = 'learner'"),
        ({"rl__loss": "gspo", "rl__average": "samples"}, "set rl.average = 'tokens'"),
        ({"rl__loss": "oapl", "rl__advantage": "rloo"}, "rl.advantage = 'rloo' changes it; set it to 'optimal'"),
        (OAPL | {"rl__normalize": "batch_std"}, "rl.normalize = 'batch_std' changes it; set it to 'none'"),
        (OAPL | {"rl__branch_weight": 0.5}, "rl.branch_weight = 0.5 changes it; set it to 1.0"),
        (OAPL | {"objective__old_logprobs": "learner"}, "set objective.old_logprobs = 'sampler'"),
        (
            {"retention__mode": "drop", "topology__orchestrator": "http://a:1"},
            "the rollouts are with the orchestrator at http://a:1, .*; set retention.mode = 'keep'",
        ),
        (
            {"rl__samples_per_prompt": 2**15, "sampling__top_k": 64},  # 4 bytes for each token that is kept
            "a group has up to 589299712 bytes, .*; lower rl.samples_per_prompt or inference.max_model_len, or sampling",
        ),
        ({"rl__samples_per_prompt": 1}, "the advantage of a group of one is always 0"),
        ({"rl__min_group": 9}, r"rl.min_group = 9 of 8 samples .*: set it in 2..8, or to 0"),
        ({"rl__score_errors": "skip"}, "rl.score_errors = 'skip' is unknown; choose 'leave out' or 'zero'"),
        ({"rl__overlong_buffer": 99}, "rl.overlong_buffer = 99 is not in 1..12"),
        ({"evaluation__samples_per_task": 4}, "raise evaluation.temperature"),
        ({"warmup__patience": 2}, "set warmup.eval_every"),
        ({"warmup__data": "a.jsonl,"}, "warmup.data = 'a.jsonl,' has an empty path; remove a comma"),
        (
            {"optimizer__schedule": "cosine", "optimizer__total_steps": 20},
            "floor for the rest of the run; set it to 140",
        ),
        ({"optimizer__learning_rate": float("nan")}, "optimizer.learning_rate = nan must be at least 0"),
        ({"optimizer__beta2": 1.0}, r"optimizer.beta2 = 1.0 must be in \[0, 1\)"),
        ({"sampling__top_p": 0.0}, r"sampling.top_p = 0.0 must be in \(0, 1\]"),
        ({"sampling__max_tokens": 64}, "no room for a prompt: it must exceed sampling.max_tokens = 64; raise it"),
        (
            {"sampling__max_tokens": 64, "model__max_positions": 64},
            "exceed sampling.max_tokens = 64; set sampling.max_tokens below the model.s 64 positions",
        ),
        ({"broadcast__snapshot_every": 0}, "broadcast.snapshot_every = 0 must be at least 1"),
        ({"broadcast__dtype": "int8"}, "choose one of '', float32"),
        ({"topology__servers": ("http://a:1",)}, "set topology.mode = 'remote'"),
        ({"trust__admission": "all"}, "trust.admission = 'all' is unknown; choose one of '', open, invited"),
        ({"trust__admission": "stake"}, "set trust.stake_ledger to its file"),
        ({"trust__work_bits": 0}, "trust.work_bits = 0 must be in 1..40"),
        (
            {"topology__mode": "remote", "topology__servers": ("http://a:1",)},
            "control_servers has 0 URLs for 1 servers; set it",
        ),
        (
            {"topology__mode": "remote", "topology__servers": ("http://a:99999",)},
            "'http://a:99999', which is not a URL",
        ),
        ({"topology__workers": ("zz",)}, "'zz', which is not a public key"),
        ({"topology__server_keys": ("zz",)}, "topology.server_keys contains 'zz', which is not a public key; write 64"),
        ({"topology__orchestrator": "host:1"}, "'host:1' is not a URL; write http://HOST:PORT, or unix:PATH"),
        ({"topology__heartbeat_s": 0.0}, "topology.heartbeat_s = 0.0 must be above 0; "),
        ({"topology__patience_s": float("nan")}, "topology.patience_s = nan must be above 0"),
        ({"evaluation__hold_s": -1.0}, "evaluation.hold_s = -1.0 must be above 0"),
        ({"evaluation__sets": {"A b": {}}}, "evaluation.sets has 'A b'; name sets by lower-case letters"),
        ({"evaluation__sets": {"a": 3}}, "evaluation.sets.a = 3 is not a set; write dict\\("),
        ({"evaluation__sets": {"a": {"tasks": 3}}}, "has the unknown field 'tasks'; use num_tasks, "),
        ({"evaluation__sets": {"a": {"num_tasks": "3"}}}, "num_tasks = '3' must be a whole number of at least 1"),
        ({"rl__batch": "last"}, "rl.batch = 'last' is unknown; choose one of prescribed, first"),
        ({"rl__oversampling": 0.5}, "rl.oversampling = 0.5 must be at least 1"),
        ({"rl__oversampling": 2.0}, "set rl.batch = 'first' or rl.refill, or raise rl.max_lag"),
        ({"rl__refill": -0.1}, "rl.refill = -0.1 must be at least 0"),
        ({"rl__tokens_per_step": -1}, "rl.tokens_per_step = -1 must be at least 0"),
        ({"topology__workers": ("ab" * 32,)}, "invites the workers that it starts; set topology.mode = 'remote' to"),
        ({"model__experts_per_token": 2}, "set model.num_experts"),
        ({"model__num_experts": 4, "model__experts_per_token": 2}, "expert_ffn_dim = 0 must be at least 1"),
        ({"model__window": 8}, "model.layer_pattern"),
        ({"model__rope_factor": 8.0}, "model.rope_factor has no effect; set model.rope_scaling"),
        ({"model__ffn_dim": -3}, "ffn_dim = -3 must be at least 1"),
        ({"model__max_positions": 16}, "exceeds model.max_positions"),
        ({"objective__router_balance_coef": 0.1}, "the model has no experts to balance"),
        ({"objective__kl_coef": -1.0}, "^objective.kl_coef = -1.0 must be at least 0"),
        ({"optimizer__schedule": "cosin"}, "optimizer.schedule = 'cosin' is unknown"),
        ({"tokenizer_date": "2026-02-30"}, "'2026-02-30' is not a date; write it as YYYY-MM-DD"),
        ({"model__vocab_size": 64}, "model.vocab_size = 64 is smaller than the tokenizer's 265 entries"),
    ],
)
def test_what_no_single_field_can_check(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(**changes)


def test_a_falling_rate_ends_with_the_run():
    steps = dict(rl__num_steps=30, objective__optimizer_steps=2, optimizer__schedule="linear")
    assert resolved(**steps).optimizer.total_steps == 60
    assert resolved(**steps, optimizer__total_steps=80).optimizer.total_steps == 80
    assert resolved(**steps | {"rl__num_steps": 0}).optimizer.total_steps == 11  # beyond the warm-up
    assert resolved(rl__num_steps=30).optimizer.total_steps == 0


def test_filters_must_leave_a_set_that_a_rollout_can_name():
    """Rollouts name the kept tokens, so any objective may have filters; of a large vocabulary, top_p alone may keep too many."""
    for filters in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05, "top_k": 9}, {}):
        exp = resolved(**{f"sampling__{name}": value for name, value in filters.items()})
        rules.check_trainable(exp.config)
        width = min(filters.get("top_k") or 272, 272) if filters else 0
        assert exp.credit.kept == exp.engine.kept_tokens == width
    large = {"model__vocab_size": 2048, "sampling__top_p": 0.9}
    rules.check_trainable(resolved(**large, sampling__top_k=50).config)
    with pytest.raises(ValueError, match=r"sampling.top_p = 0.9, .* keep up to 2048 tokens.*; set sampling.top_k, too"):
        rules.check_trainable(resolved(**large).config)


def test_a_run_without_bands_leaves_no_room_to_live_in(tmp_path):
    """The limits of `trust` bound one token; with no test of sums, more than float32 rounds is a worker's to use."""
    rules.check_tolerances(resolved(trust__margin=0.2).config)  # bands of the shipped file are in force
    rules.check_tolerances(resolved(trust__bands="", trust__margin=1e-3).config)
    for name, value in (("margin", 0.02), ("logprob_tolerance", 0.05), ("max_wrong_tokens", 1)):
        config = resolved(trust__bands="", **{"trust__margin": 0.0, f"trust__{name}": value}).config
        with pytest.raises(
            ValueError, match=f"trust.{name} = {value} exceeds .* lower it, or set trust.bands = 'auto'"
        ):
            rules.check_tolerances(config)
    (tmp_path / "text").write_text("no ledger")
    for name, error in (("none", "no ledger at .*none"), ("text", ".*text is not a ledger")):
        config = resolved(trust__admission="stake", trust__stake_ledger=str(tmp_path / name)).config
        with pytest.raises(ValueError, match=f"trust.stake_ledger: {error}.* recipe"):
            rules.check_stakes(config)


def test_a_workdir_belongs_to_its_config_from_the_first_step_on(tmp_path):
    one, other = resolved(), resolved(rl__prompts_per_step=7)
    moved = resolved(mesh__fsdp=1, rl__num_steps=7, trust__max_attempts=9)
    for chosen in (other, one, moved, one):  # nothing was done yet: a mistake may be corrected
        with run_directory.open_workdir(tmp_path / "w", chosen) as workdir:
            saved = json.loads((workdir / "config.json").read_text())["config"]
            assert saved == json.loads(chosen.config.to_json())
    (workdir / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    with run_directory.open_workdir(tmp_path / "w", moved):  # where it runs and how long may change
        pass
    refused(workdir, other, "rl.prompts_per_step was 32, now 7;")
    with run_directory.open_workdir(workdir, one):
        refused(workdir, one, "in use by another run")


def test_a_run_keeps_to_the_code_of_its_environment(tmp_path, monkeypatch):
    """It goes on with no other code, and can still be looked at."""
    code = "from rl.envs.native import reverse_text\n\nbuild = reverse_text.build\n"
    (tmp_path / "own_task.py").write_text(code)
    own = {"env__name": f"{tmp_path}/own_task.py:build"}
    with run_directory.open_workdir(tmp_path / "w", resolved(**own)) as workdir:
        (workdir / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    (tmp_path / "own_task.py").write_text(code + "\n")
    other = resolved(**own)
    refused(workdir, other, "code or data of the run .env.digest. changed since its first start; restore")
    with run_directory.read_workdir(workdir, other):
        pass
    with pytest.raises(ValueError, match="has other code or data here .digest .* in a folder of --code"):
        calibrate.load_experiment(str(workdir), [str(tmp_path)])
    with pytest.raises(ValueError, match="env.digest has no effect here; it follows from the code and data"):
        quickstart_with("env.digest=1")


@pytest.mark.parametrize("kind", ["module", "dataset", "mix"])
def test_an_export_needs_no_environment(kind, tmp_path, monkeypatch):
    """Its code or data may be gone."""
    code, data = tmp_path / f"own_gone_{kind}.py", tmp_path / "x.jsonl"
    code.write_text("from rl.envs.native import reverse_text\n\nbuild = reverse_text.build\n")
    data.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    config = quickstart.get_config()
    own, rows = {"name": f"{code}:build", "options": {}}, {"name": "dataset", "options": {"path": str(data)}}
    for name, value in {"module": own, "dataset": rows}.get(kind, {}).items():
        config.env[name] = value
    if kind == "mix":
        config.envs = {"own": own, "rows": rows}
    with run_directory.open_workdir(tmp_path / "w", experiment.resolve(config)) as workdir:
        (workdir / "checkpoints" / "1").mkdir(parents=True)
        (workdir / "checkpoints" / "1" / "seal.json").write_text("{}")
    code.unlink()
    data.unlink()
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(workdir=str(workdir)))
    monkeypatch.setattr(command_line, "given", list)
    exp = sizes.resolve(config, needs_envs=False)
    with run_directory.read_workdir(workdir, exp):
        assert exp.config.env.digest == run_directory.saved_config(workdir)["env"]["digest"] != ""


OPTIONS = {
    "base": (["env.options.min_length=4", "env.options.alphabet=ab"], {"min_length": 4, "alphabet": "ab"}),
    "quickstart": (["env.options.min_length=4"], {"min_length": 4, "alphabet": "abcdefgh"}),
    "another": (["env.name=reasoning_gym:chain_sum", "env.options.min_terms=2"], {"min_terms": 2}),
    "same": (["env.name=reverse_text", "env.options.min_length=4"], {"min_length": 4, "alphabet": "abcdefgh"}),
    "texts": (["env.name=dataset", "env.options.prompt=0", "env.options.path=5"], {"prompt": "0", "path": "5"}),
    "kinds": (
        [f"env.options.{text}" for text in ("a=0.5", "b=true", "c=(1,'x')", "d=a b", "e=[1]", "f=None", "g")],
        {"a": 0.5, "b": True, "c": (1, "x"), "d": "a b", "e": "[1]", "f": "None", "g": True},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_environment_may_be_given_on_the_command_line(name):
    overrides, expected = OPTIONS[name]
    file = "base" if name in ("base", "kinds") else "quickstart"
    config = parsed(f"--config=configs/{file}.py", "--workdir=w", *(f"--config.{text}" for text in overrides))
    found = config.env.options.to_dict()
    assert found | expected == found and (name != "another" or found == expected)


def refused(workdir, exp, message, opened=run_directory.open_workdir):
    with pytest.raises(ValueError, match=message), opened(workdir, exp):
        pass


def test_a_look_at_a_run_may_ask_otherwise_and_changes_nothing(tmp_path):
    with run_directory.open_workdir(tmp_path / "w", resolved()) as workdir:
        (workdir / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    before = (workdir / "config.json").read_bytes()
    other = resolved(evaluation__num_tasks=9, sampling__max_tokens=9, inference__num_slots=4)
    with run_directory.read_workdir(workdir, other) as path:
        names = run_directory.differences(path, other)
    assert names == ["evaluation.num_tasks", "inference.num_slots", "sampling.max_tokens"]
    assert (workdir / "config.json").read_bytes() == before
    refused(workdir, resolved(model__ffn_dim=128), "model.ffn_dim was 384, now 128", run_directory.read_workdir)


def test_a_run_describes_only_the_fields_that_differ_and_the_files_to_watch(tmp_path):
    exp = resolved(rl__num_steps=7, seed=0)
    text = experiment.describe(exp, tmp_path)
    assert "  rl.num_steps " in text and "= 7 (was 100)" in text and "= 5 (was None)" in text
    assert "warmup.roles" not in text and len(text.splitlines()) < 20 < len(experiment.fields(exp))
    for name in ("config.json", "metrics.jsonl", "tensorboard", "logs"):
        assert str(tmp_path / name) in text


def test_a_config_that_was_cut_is_named_with_its_fault(tmp_path):
    with run_directory.open_workdir(tmp_path / "w", resolved()) as workdir:
        (workdir / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    text = (workdir / "config.json").read_text()
    (workdir / "config.json").write_text(text[:400])
    refused(
        workdir,
        resolved(),
        r"config.json is not a run's config \(it is cut or damaged at line \d+: .*; put it back from",
    )


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    refused(tmp_path, resolved(), "it is not a run")
    refused(tmp_path / "thesis.tex", resolved(), "is a file")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # of a checkpoint; the run's took its place
    refused(tmp_path, resolved(), "config.json is not a run's config .*; use another --workdir")
    assert "llama" in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(("folder", "code"), [("rl", failure.MISTAKE), ("configs", failure.BUG), ("runs", failure.BUG)])
def test_an_error_of_a_function_in_a_config_file_keeps_its_traceback(folder, code):
    with pytest.raises(ValueError) as caught:
        exec(compile("raise ValueError('boom')", ROOT / folder / "mine.py", "exec"))
    assert command.explain(caught.value)[2] == code


def test_memory_that_the_learner_lacks_is_one_line():
    """XLA appends a table of allocations. Its other errors are bugs."""
    text = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
    message, code, priority = command.explain(jax.errors.JaxRuntimeError(f"{text}\n\ttable"))
    assert f"{text}; lower inference.num_slots or train.rows, " in message and "\n" not in message and code == 1
    assert priority == failure.MISTAKE
    assert command.explain(jax.errors.JaxRuntimeError("INTERNAL: a"))[2] == failure.BUG


def test_no_held_out_task_is_evaluated_twice(tmp_path, capsys):
    """README's second example chose 64 tasks of 55, and noted that they are taken several times."""
    rows = [f'{{"prompt": "{n}", "answer": "b"}}\n' for n in range(40)]
    (tmp_path / "x.jsonl").write_text("".join(rows))
    config = quickstart.get_config()
    config.env.name, config.env.options = "dataset", {"path": f"{tmp_path}/x.jsonl"}
    config.evaluation.sets = {"sampled": {"num_tasks": 30, "temperature": 1.0}, "few": {"num_tasks": 1}}
    exp = experiment.resolve(config)
    (env,) = envs.load_all(exp.config).values()
    found = exp.config.evaluation
    assert found.num_tasks == found.sets.sampled.num_tasks == env.num_held_out < 30 and found.sets.few.num_tasks == 1
    rules.check_prompts(exp.config, exp.tokenizer)
    assert "note" not in capsys.readouterr().err


def test_a_prompt_without_room_for_an_answer_is_named_before_the_run(tmp_path):
    """The servers would refuse it, and its group would be leased for ever. Those too short for that are not rendered."""
    prompts = [f"{n} {'x' * (1024 if n == 7 else 0)}" for n in range(20)]
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    path = tmp_path / "rows.jsonl"
    c = quickstart.get_config()
    c.env.name, c.env.options = "dataset", {"path": str(path)}
    with pytest.raises(ValueError, match="rows.jsonl does not exist; give a file"):
        experiment.resolve(c)
    assert lowered_programs.resolve(c).config.env.name == "dataset"  # a plan needs no data
    path.write_text("\n".join(map(json.dumps, rows)))
    exp = experiment.resolve(c)
    long = len(exp.tokenizer.render([{"role": "user", "content": prompts[7]}], add_generation_prompt=True).token_ids)
    for limit, is_refused in ((64, True), (long, True), (long + 1, False)):
        c.inference.max_model_len = c.train.row_length = limit
        exp = experiment.resolve(c)
        if not is_refused:
            rules.check_prompts(exp.config, exp.tokenizer)
            continue
        with pytest.raises(ValueError, match=rf"task \d+ \(held_out\) has {long} tokens, .* = {limit} has no room"):
            train.check(exp, layout.learner_mesh(exp.config), hosts.ALONE)
    # of 20 MB, 26 s
    path.write_text("\n".join(json.dumps({"prompt": f"{n} " * 2**20, "answer": "1"}) for n in range(3)))
    with pytest.raises(ValueError, match=r"task \d+ \(\w+\) has \d{7} bytes, .* has no room for an answer; raise it"):
        rules.check_prompts(exp.config, exp.tokenizer)


def test_a_prompt_that_the_template_rejects_is_named_before_the_run(tmp_path):
    """Its group would be given back and leased for ever."""
    turns = [["user"], ["system", "user"], ["user", "assistant", "user"], ["user"], ["human"], ["user"]]
    rows = [
        {"prompt": [{"role": role, "content": f"{n}"} for role in one], "answer": "1"} for n, one in enumerate(turns)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    c = quickstart.get_config()
    c.env.name, c.env.options = "dataset", {"path": str(tmp_path)}
    exp = experiment.resolve(c)
    with pytest.raises(ValueError, match=r'the prompt of task 4 \(train\) cannot be rendered: .* has role "human"'):
        rules.check_prompts(exp.config, exp.tokenizer)
    empty = dataclasses.replace(exp.tokenizer, chat_template="")
    with pytest.raises(ValueError, match=r"template renders the prompt of task 0 \(train\) as no token; correct the"):
        rules.check_prompts(exp.config, empty)


def mixed(**entries):
    defaults = {"sums": {"name": "reverse_text"}, "words": {"name": "reverse_text"}}
    return {"envs": {key: defaults.get(key, {}) | entries.get(key, {}) for key in defaults | entries}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            mixed(sums={"ratios": 1}),
            r"envs.sums has no field 'ratios' \(did you mean envs.sums.ratio\?\); set one of name,",
        ),
        (mixed(sums={"ratio": 0}), "envs.sums.ratio = 0 must be above 0, and finite; correct it, or remove envs.sums"),
        (mixed(sums={"samples_per_prompt": 0}), "envs.sums.samples_per_prompt = 0 must be at least 1"),
        (
            mixed(sums={"samples_per_prompt": 1}),
            "envs.sums.samples_per_prompt = 1: .* set envs.sums.advantage = 'given'",
        ),
        (mixed(words={"temperature": 0}), "envs.words.temperature = 0 must be above 0"),
        (mixed(words={"max_tokens": 64}), "it must exceed envs.words.max_tokens = 64; raise it"),
        (
            mixed(words={"advantage": "rlo"}),
            r"envs.words.advantage = 'rlo' is unknown \(did you mean rloo\?\); choose one",
        ),
        (mixed(words={"credit": "step"}), "envs.words.credit = 'step' is unknown; choose one of episode, turn"),
        (mixed(words={"overlong_buffer": 99}), "envs.words.overlong_buffer = 99 is not in 1..12"),
        (
            mixed(words={"overlong_buffer": 2, "credit": "turn"}),
            "envs.words.overlong_buffer = 2 shapes .* of an episode",
        ),
        (
            mixed(words={"samples_per_prompt": 4}) | {"rl__min_group": 5},
            "min_group = 5 of 4 samples .envs.words.samples",
        ),
        (mixed(words={"weight": 2.0}) | OAPL, "envs.words.weight = 2.0 changes it; set it to 1.0"),
        (mixed(words={"branch_weight": -1.0}), "envs.words.branch_weight = -1.0 must be at least 0"),
        (
            mixed(words={"name": "gsm8k", "options": {"path": 3}}) | {"rl__normalize": "std"},
            "rl.normalize|envs.*normalize",
        ),
        (
            mixed() | {"evaluation__sets": {"a": {"env": "sum"}}},
            r"'sum' is not an environment .*did you mean sums\?\); choose",
        ),
        ({"evaluation__sets": {"a": {"env": "sum"}}}, "env = 'sum' is not an environment of this run; remove it"),
    ],
)
def test_mistakes_in_a_mix_of_environments(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(**changes)


def test_a_mix_is_resolved_with_a_digest_and_rules_of_each_environment(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "1 + 2?", "answer": "#### 3"}\n')
    own = {
        "name": "gsm8k",
        "options": {"path": str(tmp_path), "system_prompt": ""},
        "max_tokens": 10,
        "advantage": "rloo",
    }
    exp = resolved(**mixed(sums=own))
    digests = {exp.config.envs.sums.digest, exp.config.envs.words.digest, exp.config.env.digest}
    assert len(digests) == 3 and all(len(digest) == 64 for digest in digests)
    assert (exp.credit.envs["sums"].advantage, exp.credit.envs["words"].advantage) == ("rloo", "group_mean_std")
    assert (exp.credit.envs["sums"].max_tokens, exp.credit.envs["words"].max_tokens) == (10, 12)
    assert experiment.resolve(config_dict.ConfigDict(exp.config)).config == exp.config  # from config.json: the same
    assert experiment.code_options(exp) == ["--code", str(tmp_path.parent)]
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 3"}\n')
    changed = resolved(**mixed(sums=own)).config
    assert changed.env.digest not in digests and changed.envs.words == exp.config.envs.words
    rules.check_prompts(changed, exp.tokenizer)
    missing = resolved(**mixed(sums={"name": "gsm8k"})).config
    with pytest.raises(ValueError, match="envs.sums: envs.sums.options.path = '' has no train.jsonl"):
        rules.check_prompts(missing, exp.tokenizer)
    with pytest.raises(ValueError, match="envs.sums: environment 'gsm8' does not exist .did you mean gsm8k"):
        rules.check_prompts(resolved(**mixed(sums={"name": "gsm8"})).config, exp.tokenizer)


def test_the_command_line_sets_fields_of_a_mix_that_the_file_lacks(tmp_path):
    (tmp_path / "own.py").write_text(
        "from configs import quickstart\n\n\ndef get_config():\n    c = quickstart.get_config()\n"
        "    c.envs.sums = dict(name='gsm8k', ratio=1.0)\n    return c\n"
    )
    flags = [
        "--config.envs.sums.options.path=/data",
        "--config.envs.sums.temperature=0.5",
        "--config.envs.more.name=dataset",
    ]
    argv = [f"--config={tmp_path}/own.py", "--workdir=w", *flags]
    config = parsed(*argv)
    assert (config.envs.sums.options.path, config.envs.sums.temperature, config.envs.more.name) == (
        "/data",
        0.5,
        "dataset",
    )
    with pytest.raises(ValueError, match="config.env.name has no effect here; envs names the environments"):
        parsed(*argv, "--config.env.name=gsm8k")
