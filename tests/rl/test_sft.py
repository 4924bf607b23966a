"""The sources of examples and their batches, and when supervised training ends."""

import collections
import json
import subprocess
import sys
import types

import httpx
import jax
import numpy as np
import pytest
from absl import flags

from configs import quickstart
from inference import chat
from models import hf
from rl import envs, sft
from rl.envs import environment
from rl.experiment import experiment
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.experiment.reporting import metrics
from rl.learning.batch import conversations as conversations_lib
from rl.learning.data import sources
from rl.learning.learner import train_step
from rl.protocol import task_schedule
from sharding.mesh import mesh as mesh_lib
from sharding.weights import broadcast
from tests.rl.learning.batch.test_conversations import conversation, trained_text, write
from tests.support import clock as clock_lib
from tests.support import commands, conversations, tiny, tiny_run
from tests.support.user_code import turn_envs

pytestmark = pytest.mark.usefixtures("compile_fast")
ONE, TWO = [{"a": i} for i in range(10)], [{"b": i} for i in range(7)]


def config_of(**changes):
    c = quickstart.get_config()
    c.model.update(model_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_dim=64)
    c.warmup.tasks_per_step, c.train.rows = 4, 2
    c.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return c


def test_a_file_is_gone_through_once_per_epoch_without_what_is_held_out(tmp_path):
    path = write(tmp_path / "c.jsonl", [conversation(chr(97 + i) * 3) for i in range(14)])
    exp = experiment.resolve(config_of(warmup__data=path, warmup__eval_every=1, warmup__eval_tasks=4))
    source = sft.from_files(exp)

    def texts(trees):
        return ["".join(trained_text(tree)).removesuffix("<|im_end|>") for tree in trees]

    letters = [text[0] for step in range(1, 6) for text in texts(source.batch(step))]  # 20 of 10 conversations
    assert sorted(letters[:10]) == sorted(letters[10:]) == list("abcdefghij") and letters[:10] != letters[10:]
    assert [text[0] for text in texts(source.held_out())] == list("klmn")
    assert texts(source.batch(2)) == texts(source.batch(2))  # a function of the step, for a resume
    whole = sft.from_files(experiment.resolve(config_of(warmup__data=path)))
    assert len(set(sum((texts(whole.batch(step)) for step in range(1, 8)), []))) == 14
    other = sft.from_files(experiment.resolve(config_of(warmup__data=path, seed=1)))
    assert texts(other.batch(1)) != texts(whole.batch(1))
    with pytest.raises(ValueError, match="14 conversations, all of them held out .warmup.eval_tasks = 64"):
        sft.from_files(experiment.resolve(config_of(warmup__data=path, warmup__eval_every=1)))
    other = write(tmp_path / "d.jsonl", [conversation(c * 3) for c in "AB"])
    both = config_of(
        warmup__data=f"{path}, {other}", warmup__weights=(1.0, 3.0), warmup__eval_every=1, warmup__eval_tasks=1
    )
    mixed = sft.from_files(experiment.resolve(both))
    assert texts(mixed.held_out()) == ["nnn"]  # and one row of the other file, so that any may be the one
    assert sum(text == "AAA" for step in range(1, 6) for text in texts(mixed.batch(step))) == 15


def test_examples_that_cannot_train_are_named_before_the_first_step(tmp_path, capsys, monkeypatch):
    """Rows are parsed when they are read, so that memory does not grow with the file."""
    texts = ["x" * 99 if i in (3, 11) else "abc" for i in range(14)]
    exp = experiment.resolve(config_of(warmup__data=write(tmp_path / "c.jsonl", [conversation(x) for x in texts])))
    parsed, parse = [], conversations_lib.parse
    monkeypatch.setattr(
        conversations_lib, "parse", lambda row: parsed.append(row["messages"][0]["content"]) or parse(row)
    )
    sft.from_files(exp)
    assert not {*parsed} & {*texts}
    mesh = mesh_lib.create({}, devices=jax.devices()[:1])
    writer, progress = metrics.MetricsWriter(tmp_path), metrics.Progress()
    with pytest.raises(
        ValueError, match="c.jsonl, conversation 4: a .* tokens, more than .* .2 of 14 conversations are"
    ):
        sft.train(exp, mesh, tmp_path, writer, progress)
    writer.close()
    assert parsed[-14:] == texts and "checking conversations  step 14/14  refused 2" in capsys.readouterr().out


def test_tasks_are_taught_with_their_answers_but_for_the_decoys():
    exp = experiment.resolve(config_of(warmup__decoy_fraction=0.5, warmup__eval_tasks=3))
    source = sft.from_tasks(exp)
    taught = [trained_text(tree)[0].removesuffix("<|im_end|>") for step in range(1, 9) for tree in source.batch(step)]
    env = envs.load("reverse_text", seed=0, **exp.config.env.options.to_dict())
    wrong = 0
    for step in range(1, 9):
        for i, (_, index) in enumerate(task_schedule.warmup_tasks(exp.config, step)):
            task, text = env.make_task(index, "train"), taught[(step - 1) * 4 + i]
            assert text in (task.answer, task.decoy)
            lot = environment.stable_hash(f"decoy/0/{index}") / 2**64
            assert text == (task.decoy if lot < 0.5 else task.answer)
            wrong += text != task.answer
    assert 5 < wrong < 27
    held_out = [trained_text(tree)[0].removesuffix("<|im_end|>") for tree in source.held_out()]
    assert held_out == [env.make_task(index, "held_out").answer for index in range(3)]
    config = config_of(warmup__decoy_fraction=0.01, env__name=f"{turn_envs.__file__}:letters")
    config.env.options = {}
    with pytest.raises(ValueError, match="has no decoys; set config.warmup.decoy_fraction to 0"):
        sft.from_tasks(experiment.resolve(config))  # before a step is compiled


def test_whole_games_are_taught_where_an_environment_demonstrates():
    config = config_of(
        warmup__decoy_fraction=0.5, inference__max_model_len=272, train__row_length=272, env__name="wordle"
    )
    config.env.options = {"letters": 3, "words": 50, "guesses": 4, "system_prompt": ""}
    exp = experiment.resolve(config)
    source, solved = sft.from_tasks(exp), [0, 0]
    env = envs.load("wordle", seed=0, **exp.config.env.options.to_dict())
    for step in range(1, 9):
        for (_, index), tree in zip(task_schedule.warmup_tasks(exp.config, step), source.batch(step), strict=True):
            guesses = "".join(trained_text(tree)).split("<|im_end|>")[:-1]
            assert 1 <= len(guesses) <= 4 and all(guess.startswith("<guess>[") for guess in guesses)
            is_decoy = environment.stable_hash(f"decoy/0/{index}") / 2**64 < 0.5
            solved[is_decoy] += guesses[-1] == env.make_task(index, "train").answer
    assert solved[False] > 8 > 4 > solved[True]
    assert "".join(trained_text(source.batch(1)[0])) == "".join(trained_text(source.batch(1)[0]))


@pytest.mark.parametrize("change", ["edited", "deleted", "another row", "another file", "renamed in its folder"])
def test_a_resume_on_other_data_is_refused(tmp_path, change):
    """The files of `warmup.data` belong to the run as its code does; commands that only read a run need none."""
    (folder := tmp_path / "data").mkdir()
    file = folder / "train.jsonl"
    write(file, [conversation(c * 3) for c in "abcd"])
    data, workdir, exp = f"{folder},{file}", tmp_path / "run", lambda: experiment.resolve(config_of(warmup__data=data))
    with run_directory.open_workdir(workdir, exp()):
        (workdir / "metrics.jsonl").write_text("{}\n")
    other = config_of(warmup__data=data, sampling__max_tokens=9, inference__max_model_len=60, rl__num_steps=7)
    with run_directory.open_workdir(workdir, experiment.resolve(other), free=run_directory.FOR_ROLLOUTS):
        pass
    with pytest.raises(ValueError, match="belongs to another config: inference.max_model_len was 60, now"):
        run_directory.open_workdir(workdir, exp()).__enter__()
    with run_directory.open_workdir(workdir, exp(), free=run_directory.FOR_ROLLOUTS):
        pass
    if change == "edited":
        file.write_text(file.read_text().replace("aaa", "aba"))
    elif change == "another row":
        file.write_text(file.read_text() + json.dumps(conversation("x")) + "\n")
    elif change == "another file":
        write(folder / "more.jsonl", [conversation("x")])
    else:
        file.rename(tmp_path / "old" if change == "deleted" else folder / "moved.jsonl")
    with pytest.raises(ValueError, match=r"code or data of the run \(warmup.digest\) changed since its first start"):
        run_directory.open_workdir(workdir, exp()).__enter__()
    with run_directory.read_workdir(workdir, exp()):
        saved = experiment.flat(run_directory.saved_config(workdir))
    assert experiment.resolve(config_of(warmup__data=data), saved=saved).config.warmup.digest == saved["warmup.digest"]


def test_a_command_that_fails_before_its_first_step_leaves_nothing(tmp_path):
    """Its directory was that of a run without a step. One that was there before stays."""
    data, workdir = write(tmp_path / "long.jsonl", [conversation("abc" * 99)]), tmp_path / "run"
    command = ["rl.sft", "--config=configs/quickstart.py", f"--workdir={workdir}", f"--config.warmup.data={data}"]
    for is_known in (False, True):
        found = commands.forked(*command, "--config.warmup.decoy_fraction=0")
        assert found.returncode == 1 and "more than inference.max_model_len" in found.stderr
        assert workdir.exists() == is_known
        workdir.mkdir(exist_ok=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"inference.max_model_len": 16, "train.row_length": 16, "sampling.max_tokens": 16},
        {"sampling.max_tokens": 500},
        {"topology.mode": "remote"},
        {"inference.num_slots": 0, "topology.mode": "remote"},
        {"inference.max_model_len": 0, "train.row_length": 40},
        {"inference.max_model_len": 32, "train.row_length": 0, "sampling.max_tokens": 32},
        {"rl.samples_per_prompt": 1},
        {"objective.policy_coef": 0.0},
    ],
    ids=str,
)
def test_fields_of_rollouts_alone_refuse_nothing(fields, monkeypatch):
    config = config_of(train__rows=8)
    config.update_from_flattened_dict(fields)
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(workdir="", config=config))
    monkeypatch.setattr(command_line, "given", lambda: [])
    with pytest.raises(ValueError):
        sizes.resolve(config)
    exp = sizes.resolve(config, has_rollouts=False)
    length, row = exp.config.inference.max_model_len, exp.config.train.row_length
    assert 16 <= length <= row and exp.config.inference.num_slots > 0
    config.update_from_flattened_dict({"inference.max_model_len": 64, "train.row_length": 32})
    with pytest.raises(ValueError, match="max_model_len = 64 exceeds train.row_length = 32"):
        sizes.resolve(config, has_rollouts=False)


# ---- when it ends ----------------------------------------------------------------------------------------------------


def test_patience_counts_losses_without_a_new_best():
    patience = sft.Patience(limit=2)
    for loss, over in ((3.0, False), (2.0, False), (2.5, False), (1.9, False), (1.9, False), (2.0, True)):
        patience = patience.after(loss)
        assert patience.is_over == over, loss
    assert patience.best == 1.9
    never = sft.Patience()
    for loss in range(50):
        never = never.after(float(loss))
    assert not never.is_over


def test_the_held_out_loss_is_a_mean_over_trained_tokens(monkeypatch):
    """Neither prompts nor padding count."""
    logp = np.array([[9, -1, -2, 9], [9, 9, -6, 9]], np.float32)
    batch = types.SimpleNamespace(loss_mask=np.array([[0, 1, 1, 0], [0, 0, 1, 0]], np.float32))
    monkeypatch.setattr(train_step, "score", lambda *args: logp)
    assert sft.nll(None, None, batch) == 3.0


@pytest.mark.slow
def test_training_stops_when_the_held_out_loss_rises(tmp_path):
    """Two conversations to learn by heart, two of another kind held out: it stops early, reports why, and stays stopped."""
    records = [conversation("abc"), conversation("bca"), conversation("XYZ"), conversation("ZZY")]
    path = write(tmp_path / "c.jsonl", records)
    rates = {"warmup__patience": 2, "warmup__num_steps": 80, "warmup__learning_rate": 1e-2}
    exp = experiment.resolve(config_of(warmup__data=path, warmup__eval_every=4, warmup__eval_tasks=2, **rates))
    mesh = mesh_lib.create({}, devices=jax.devices()[:1])
    writer, progress = metrics.MetricsWriter(tmp_path), metrics.Progress()
    params = sft.train(exp, mesh, tmp_path, writer, progress)
    lines = metrics.read(tmp_path / "metrics.jsonl")
    losses = {line["step"]: line["loss/held_out"] for line in lines if "loss/held_out" in line}
    assert list(losses) == list(range(4, lines[-1]["step"] + 1, 4)) and lines[-1]["step"] < 80
    best = min(losses, key=losses.get)
    assert lines[-1]["step"] == best + 8 and lines[-1]["loss/total"] < 0.5 * lines[0]["loss/total"]
    again = sft.train(exp, mesh, tmp_path, writer, progress)
    writer.close()
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == len(lines)


def test_the_display_leaves_the_compilation_out(tmp_path, monkeypatch, capsys):
    """It takes a minute on this clock, a step a second: the rate counts from the end of the first."""
    clock, compiled, found = clock_lib.Clock(), [], {"loss/total": jax.numpy.ones(())}

    def timed_compile(*args):
        compiled.append(clock.now)
        clock.now += 60.0

    def timed_step(state, batch):
        clock.now += 1.0 if compiled else 61.0
        return state, found

    monkeypatch.setattr(train_step, "compile_train_step", timed_compile)
    monkeypatch.setattr(train_step, "jit_train_step", lambda learner: timed_step)
    monkeypatch.setattr(sft, "nll", lambda *args: 1.0)
    fields = dict(warmup__num_steps=2, warmup__eval_every=9, warmup__eval_tasks=1, lora__rank=2)
    exp, mesh = experiment.resolve(config_of(**fields)), mesh_lib.create({}, devices=jax.devices()[:1])
    writer, progress = metrics.MetricsWriter(tmp_path), metrics.Progress(clock=clock)
    sft.train(exp, mesh, tmp_path, writer, progress)
    writer.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling the warm-up step" and "s/step" not in lines[1], lines
    assert lines[2].endswith("1.00 s/step  took 0:02") and "held-out" in lines[2], lines  # also at the last step
    assert sft.make_learner(exp, mesh).lora is None  # adapters of random parameters would learn nothing


def test_a_run_starts_from_a_hugging_face_folder(tmp_path):
    config = config_of(model__max_positions=64)  # save writes it; a run may set another value
    model = experiment.resolve(config).model
    params = tiny.params(model, 3)
    hf.save(tmp_path / "model", model, params)
    config.init_from, config.model.max_positions, config.warmup.num_steps = str(tmp_path / "model"), 0, 0
    exp, mesh = experiment.resolve(config), mesh_lib.create({"fsdp": 8})
    (tmp_path / "run").mkdir()
    writer = metrics.MetricsWriter(tmp_path / "run")
    found = sft.train(exp, mesh, tmp_path / "run", writer, metrics.Progress(active=False))
    writer.close()
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert found["layers"]["000"]["mlp"]["gate"].sharding.spec[0] == "fsdp"


# ---- in and out ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_base_tokenizer_learns_answers_and_is_exported_served_and_talked_to(tmp_path):
    """The whole chain, as commands. The model learns to reason, answer, and stop as its template closes a turn."""
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "so"}
    turn = {"role": "user", "content": "a?"}
    data = write(tmp_path / "c.jsonl", [{"messages": [turn, answer] * count} for count in (1, 2)])
    fields = {"tokenizer": conversations.base_folder(tmp_path / "base"), "warmup.data": data, "warmup.num_steps": 60}
    fields |= {"warmup.learning_rate": 1e-2, "inference.max_model_len": 160}
    workdir, output = tmp_path / "run", tmp_path / "exported"
    result = tiny_run.run(workdir, module="rl.sft", **fields)
    assert result.returncode == 0, result.stderr
    assert f"inference.chat --weights {workdir}" in result.stdout
    command = [*tiny_run.command(workdir, module="rl.export", **fields), f"--output={output}"]
    for step, code in (("--step=5", 1), ("--step=newest", 0)):
        result = subprocess.run([*command, step], cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
        assert result.returncode == code, result.stderr
        assert code == 0 or "has taken no step of RL; set it to 0 or newest" in result.stderr
    assert json.loads((output / "generation_config.json").read_text())["eos_token_id"] == [256, 258]
    for source in (["--weights", workdir], ["--model", output]):
        with chat.served([*map(str, source), "--max_model_len", "160"]) as url:
            messages = {"messages": [turn, answer, turn], "temperature": 0, "max_tokens": 60}
            (choice,) = httpx.post(f"{url}/v1/chat/completions", json=messages, timeout=100).json()["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Yes.", "so")
        assert choice["finish_reason"] == "stop"
    talk = [sys.executable, "-m", "inference.chat", "--weights", str(workdir), "--temperature=0", "--max_model_len=160"]
    talk = [*talk, "--max_tokens=60"]
    result = subprocess.run(talk, input="a?\na?\n", cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0 and result.stdout.count("soYes.") == 2, result.stdout + result.stderr


@pytest.mark.slow
def test_rl_goes_on_from_published_supervised_weights(tmp_path):
    """Its own version 0 replaces them, and rl.sft leaves the run's versions alone from then on."""
    for module, steps in (("rl.sft", 0), ("rl.train", 2), ("rl.sft", 2)):
        result = tiny_run.run(tmp_path / "w", module=module, rl__num_steps=2)
        assert result.returncode == 0, result.stderr
        listed = broadcast.latest(tmp_path / "w" / "weights")
        assert listed == steps


def test_each_row_comes_once_per_epoch_in_a_new_order():
    made = sft.mix([ONE, TWO], (), 4, seed=3)
    rows = [tuple(row.items()) for number in range(17) for row in made[number]]
    epochs = [rows[i : i + 17] for i in range(0, 68, 17)]
    everything = sorted(tuple(row.items()) for row in ONE + TWO)
    assert all(sorted(epoch) == everything for epoch in epochs) and len({*map(tuple, epochs)}) == 4
    assert made[5] != sft.mix([ONE, TWO], (), 4, seed=4)[5]


def test_sources_are_mixed_by_weight_and_each_keeps_its_epochs():
    made = sft.mix([ONE, TWO], (3.0, 1.0), 4, seed=3)
    rows = [row for number in range(70) for row in made[number]]
    counts = collections.Counter(next(iter(row)) for row in rows)
    assert counts == {"a": 210, "b": 70}
    assert collections.Counter(row["b"] for row in rows if "b" in row) == dict.fromkeys(range(7), 10)
    twins = [row for number in range(10) for row in sft.mix([ONE, ONE], (1.0, 1.0), 2, seed=3)[number]]
    assert twins[::2] != twins[1::2]  # sources of one length have orders of their own
    with pytest.raises(ValueError, match="warmup.weights has 1 numbers for 2 files of warmup.data; give one for each"):
        sft.mix([ONE, TWO], (1.0,), 4, seed=3)


def test_batches_ahead_are_those_of_random_access_from_any_number():
    made = sft.mix([ONE], (), 3, seed=0)
    expected = [made[number] for number in range(20)]
    batch = sft.in_order(made)
    for number in (0, 1, 2, 12, 13, 3, 3):
        assert batch(number) == expected[number], number


def test_an_error_of_a_row_is_raised_as_it_is():
    def fail(rows):
        raise ValueError("row 3 is bad")

    with pytest.raises(ValueError, match="row 3 is bad"):
        sft.in_order(sft.mix([ONE], (), 3, seed=0).map(fail))(0)


def test_a_joined_source_has_the_rows_of_its_parts():
    joined = sources.join([ONE, TWO, ONE])
    assert [*joined] == ONE + TWO + ONE and joined[10] == TWO[0] and joined[17] == ONE[0] and len(joined) == 27
    assert [*sources.Chosen(joined, [16, 0])] == [TWO[6], ONE[0]]
