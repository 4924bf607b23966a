"""The trained tokens of a conversation, the sources of examples, and the end of supervised training ends."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from configs import quickstart
from models import hf, transformer
from models.text import tokenizer as tokenizer_lib
from rl import envs, sft
from rl.envs import environment
from rl.experiment import experiment
from rl.learner import train_step
from rl.protocol import task_schedule
from rl.reporting import metrics
from sharding import mesh as mesh_lib
from tests.support import clock as clock_lib

CHATML = tokenizer_lib.load("byte_chatml")
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "tool", "content": "four"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks."},
]


def trained_text(tree):
    """The runs of trained tokens, as text with specials."""
    (branch,) = tree.branches
    runs, last = [], -2
    for column in np.flatnonzero(branch.loss_mask):
        if column != last + 1:
            runs.append([])
        runs[-1].append(int(branch.tokens[column]))
        last = column
    return [CHATML.decode(run, skip_special=False) for run in runs]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("assistant",), ["4<|im_end|>", "It is 4.<|im_end|>"]),
        (("tool",), ["<|im_start|>user\n<tool_response>\nfour\n</tool_response><|im_end|>\n"]),
        (
            ("assistant", "user"),
            [
                "<|im_start|>user\n2 + 2?<|im_end|>\n",
                "4<|im_end|>",
                "It is 4.<|im_end|>",
                "<|im_start|>user\nThanks.<|im_end|>\n",
            ],
        ),
    ],
)
def test_the_loss_lies_on_the_messages_of_the_roles(roles, expected):
    """Several turns: every one of an assistant, its closing token included and its header not; others as a whole."""
    tree = sft.stream(CHATML, TURNS, roles=roles, max_length=200)
    assert trained_text(tree) == expected
    (branch,) = tree.branches
    assert branch.loss_mask[-1] == 1 and len(tree.prompt) == 0  # nothing after the last trained token
    assert branch.tokens.tolist() == CHATML.render(TURNS).token_ids[: len(branch.tokens)]
    np.testing.assert_array_equal(branch.advantage, branch.loss_mask)


def test_the_first_token_never_trains():
    (branch,) = sft.stream(CHATML, TURNS, roles=("system", "user"), max_length=200).branches
    assert branch.loss_mask[0] == 0 and branch.loss_mask[1] == 1


def test_conversations_that_cannot_train_are_refused():
    with pytest.raises(ValueError, match="messages of user, none of roles .'assistant'"):
        sft.stream(CHATML, [{"role": "user", "content": "x"}], max_length=99)
    with pytest.raises(ValueError, match="has [0-9]+ tokens, more than inference.max_model_len = 20"):
        sft.stream(CHATML, TURNS, max_length=20)


class Rewriting:
    """A template that spells a message otherwise once it is not the last, as those do that drop old reasoning."""

    def render(self, messages, tools=None):
        ids = [7] + [len(m["content"]) + (50 if i < len(messages) - 1 else 0) for i, m in enumerate(messages)]
        return tokenizer_lib.Rendered(ids, [False] * len(ids))


def test_a_template_that_rewrites_is_refused_for_other_roles():
    with pytest.raises(ValueError, match="renders message 1 differently when other messages follow"):
        sft.stream(Rewriting(), TURNS, roles=("system",), max_length=99)


def test_tools_are_rendered(monkeypatch):
    seen = []

    class Recording:
        def render(self, messages, tools=None):
            seen.append(tools)
            return CHATML.render(messages)

    sft.stream(Recording(), TURNS, tools=[{"name": "add"}], roles=("assistant", "tool"), max_length=200)
    assert len(seen) > 1 and all(tools == [{"name": "add"}] for tools in seen)


# ---- files -----------------------------------------------------------------------------------------------------------


def conversation(text):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n", encoding="utf-8")
    return str(path)


def test_messages_as_other_tools_write_them(tmp_path):
    """OpenAI's: arguments as a string, null next to a call, parts of text; and a separator of lines inside a text."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one\u2028two"}, {"type": "text", "text": "\x85"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n", encoding="utf-8")
    ((user, assistant),) = (record["messages"] for record in sft.read_conversations(str(path)))
    assert user["content"] == "one\u2028two\x85" and assistant["content"] == ""
    assert assistant["tool_calls"] == [call | {"function": {"name": "add", "arguments": {"a": 1}}}]
    for missing in ("absent.jsonl", ".", "empty.jsonl"):
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(ValueError, match="warmup.data = .* (cannot be read|is empty)"):
            sft.read_conversations(str(tmp_path / missing))


def test_a_template_in_which_no_answer_can_be_found_is_told_apart():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    plain = dataclasses.replace(CHATML, chat_template=template)
    with pytest.raises(ValueError, match="does not mark where an answer begins.*generation"):
        sft.stream(plain, TURNS, max_length=200)


def test_conversations_are_read(tmp_path):
    good = write(tmp_path / "good.jsonl", [conversation("ab"), conversation("é") | {"tools": [{"name": "f"}]}])
    first, second = sft.read_conversations(good)
    assert first == conversation("ab") | {"tools": None} and second["tools"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "no messages"),
        ({"messages": []}, "no messages"),
        ({"content": "x"}, "a message has no role"),
        (conversation("a") | {"tools": "f"}, "tools is not a list"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a message has a part that is not text"),
        ({"role": "user", "content": {"text": "x"}}, "make it a string, or a list of text parts"),
        ({"role": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "make them a JSON object"),
        ({"role": "x", "tool_calls": [{"function": {}}]}, "a tool call has no name; set function.name"),
        ({"role": "x", "tool_calls": {}}, "tool_calls is not a list"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, words):
    if isinstance(line, dict):  # a message, unless it is a whole record
        line = json.dumps(line if "messages" in line else {"messages": [line]})
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(conversation("ok")) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"line 2.*{words}"):
        sft.read_conversations(str(path))


def config_of(**changes):
    c = quickstart.get_config()
    c.model.update(model_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_dim=64)
    c.warmup.tasks_per_step, c.train.rows = 4, 2
    c.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return c


def test_a_file_is_gone_through_once_per_epoch_without_what_is_held_out(tmp_path):
    path = write(tmp_path / "c.jsonl", [conversation(chr(97 + i) * 3) for i in range(14)])
    exp = experiment.resolve(config_of(warmup__data=path, warmup__eval_every=1, warmup__eval_tasks=4))
    source = sft._from_file(exp)

    def texts(trees):
        return ["".join(trained_text(tree)).removesuffix("<|im_end|>") for tree in trees]

    letters = [text[0] for step in range(1, 6) for text in texts(source.batch(step))]  # 20 of 10 conversations
    assert sorted(letters[:10]) == sorted(letters[10:]) == list("abcdefghij") and letters[:10] != letters[10:]
    assert [text[0] for text in texts(source.held_out())] == list("klmn")
    assert texts(source.batch(2)) == texts(source.batch(2))  # a function of the step, for a resume
    whole = sft._from_file(experiment.resolve(config_of(warmup__data=path)))
    assert len(set(sum((texts(whole.batch(step)) for step in range(1, 8)), []))) == 14
    with pytest.raises(ValueError, match="14 conversations, all of them held out .warmup.eval_tasks = 64"):
        sft._from_file(experiment.resolve(config_of(warmup__data=path, warmup__eval_every=1)))
    long = write(tmp_path / "long.jsonl", [conversation("x" * 99)])
    with pytest.raises(ValueError, match="conversation 1: a conversation has .* tokens, more than"):
        sft._from_file(experiment.resolve(config_of(warmup__data=long))).batch(1)


def test_tasks_are_taught_with_their_answers_but_for_the_decoys():
    exp = experiment.resolve(config_of(warmup__decoy_fraction=0.5, warmup__eval_tasks=3))
    source = sft._from_tasks(exp)
    taught = [trained_text(tree)[0].removesuffix("<|im_end|>") for step in range(1, 9) for tree in source.batch(step)]
    env = envs.load("reverse_text", seed=0, **exp.config.env.options.to_dict())
    wrong = 0
    for step in range(1, 9):
        for i, index in enumerate(task_schedule.warmup_indices(exp.config, step)):
            task, text = env.make_task(index, "train"), taught[(step - 1) * 4 + i]
            assert text in (task.answer, task.decoy)
            lot = environment.stable_hash(f"decoy/0/{index}") / 2**64
            assert text == (task.decoy if lot < 0.5 else task.answer)
            wrong += text != task.answer
    assert 5 < wrong < 27
    held_out = [trained_text(tree)[0].removesuffix("<|im_end|>") for tree in source.held_out()]
    assert held_out == [env.make_task(index, "held_out").answer for index in range(3)]


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


@pytest.mark.slow
def test_training_stops_when_the_held_out_loss_rises(tmp_path):
    """Two conversations to learn by heart, two of another kind held out: it stops early, reports why, and stays stopped."""
    records = [conversation("abc"), conversation("bca"), conversation("XYZ"), conversation("ZZY")]
    path = write(tmp_path / "c.jsonl", records)
    rates = {"warmup__patience": 2, "warmup__num_steps": 80, "warmup__learning_rate": 1e-2}
    exp = experiment.resolve(config_of(warmup__data=path, warmup__eval_every=4, warmup__eval_tasks=2, **rates))
    mesh = mesh_lib.create({}, devices=jax.devices()[:1])
    writer, progress = metrics.MetricsWriter(tmp_path, tensorboard=False), metrics.Progress()
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
    clock = clock_lib.Clock()
    compile_train_step, jit_train_step = train_step.compile_train_step, train_step.jit_train_step
    compiled = []

    def timed_compile(*args):
        compile_train_step(*args)
        compiled.append(clock.now)
        clock.now += 60.0

    def timed_step(learner):
        def step(*args):
            clock.now += 1.0 if compiled else 61.0
            return jit_train_step(learner)(*args)

        step.lower = jit_train_step(learner).lower
        return step

    monkeypatch.setattr(train_step, "compile_train_step", timed_compile)
    monkeypatch.setattr(train_step, "jit_train_step", timed_step)
    exp, mesh = experiment.resolve(config_of(warmup__num_steps=2)), mesh_lib.create({}, devices=jax.devices()[:1])
    writer, progress = metrics.MetricsWriter(tmp_path, tensorboard=False), metrics.Progress(clock=clock)
    sft.train(exp, mesh, tmp_path, writer, progress)
    writer.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling the warm-up step" and "s/step" not in lines[1], lines
    assert lines[2].endswith("1.00 s/step  took 0:02"), lines


def test_a_run_starts_from_a_hugging_face_folder(tmp_path):
    config = quickstart.get_config()
    config.model.max_positions = 64  # save writes it; a run may set another value
    model = experiment.resolve(config).model
    params = transformer.init(jax.random.key(3), model)
    hf.save(tmp_path / "model", model, params)
    config.init_from, config.model.max_positions, config.warmup.num_steps = str(tmp_path / "model"), 0, 0
    exp, mesh = experiment.resolve(config), mesh_lib.create({"fsdp": 8})
    (tmp_path / "run").mkdir()
    writer = metrics.MetricsWriter(tmp_path / "run")
    found = sft.train(exp, mesh, tmp_path / "run", writer, metrics.Progress(active=False))
    writer.close()
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert found["layers"]["000"]["mlp"]["gate"].sharding.spec[0] == "fsdp"

    config.model.ffn_dim, config.model.rope_theta = 400, 5e5
    with pytest.raises(ValueError, match="model.ffn_dim = 400 but .* has 384; model.rope_theta = 500000.0 but"):
        sft.check_initial(experiment.resolve(config))
