"""Rollouts go through traces of verifiers 0.4 and come back bit for bit; traces of others become conversations."""

import dataclasses
import json

import numpy as np
import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl.evaluation import traces
from rl.protocol import lease
from tests.support import commands, groups

TOK = tokenizer_lib.byte_chatml()
KEY = rollout_lib.WorkerKey.generate()
GROUP = lease.Lease(3, 7, "train", 11, 5, 2, 1.0, 2)


def two_turns():
    """An episode of two branches: the second begins with the prompt and the first answer of the first one."""
    prompt, answer, reply, last = (
        TOK.encode(text) for text in ("Guess. ", "<guess>a</guess>", " No. ", "<guess>b</guess>")
    )
    one = groups.rollout(GROUP, 1)
    tokens = np.array([*prompt, *answer, *reply, *last], np.int32)
    spans = [[len(prompt), len(prompt) + len(answer)], [len(tokens) - len(last), len(tokens)]]
    mask = np.zeros(len(tokens), bool)
    for start, end in spans:
        mask[start:end] = True
    rng = np.random.default_rng(0)
    own = {"tokens": tokens, "sampled_mask": mask, "versions": np.full(len(tokens), 2, np.int32)}
    own["logprobs"] = np.where(mask, -rng.random(len(tokens)), 0).astype(np.float32)
    root = dataclasses.replace(
        one, **own, calls=np.array(spans, np.int32), num_branches=2, rewards={"reward": 1.0, "guesses": 2.0}
    )
    start = len(prompt) + len(answer) + len(reply)
    mask = np.zeros(len(tokens), bool)
    mask[start:] = True
    own |= {"sampled_mask": mask, "logprobs": np.where(mask, np.float32(-0.5), np.float32(0)), "calls": None}
    return [root, dataclasses.replace(root, **own, branch=1, draw=0)]


def test_rollouts_come_back_as_they_were(tmp_path, capsys):
    signed = rollout_lib.sign_all([groups.rollout(GROUP, 0), *two_turns()], KEY)
    parquet.write(tmp_path / "r.parquet", signed)
    argv = ["export", tmp_path / "r.parquet", "--tokenizer", "byte_chatml", "--out", tmp_path / "traces.jsonl"]
    assert commands.run("rl.rollouts", *argv) == 0
    lines = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and [len(line["traces"][0]["nodes"]) for line in lines] == [2, 6]
    assert commands.run("rl.rollouts", "import", tmp_path / "traces.jsonl", "--out", tmp_path / "b.parquet") == 0
    back = parquet.read(tmp_path / "b.parquet")
    assert [rollout_lib.digest(one) for one in back] == [rollout_lib.digest(one) for one in signed]
    assert all(rollout_lib.is_signed(one, rollout_lib.digest(one)) for one in back)
    assert (
        commands.run(
            "rl.rollouts", "import", tmp_path / "traces.jsonl", "--out", tmp_path / "s.jsonl", "--min_reward", "0.5"
        )
        == 0
    )
    (row, other) = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert row["messages"][-1]["content"] == "<guess>b</guess>" and row["reward"] == 1.0 and len(other["messages"]) == 2


def test_equal_draws_and_branches_that_do_not_train_come_back_and_are_no_conversations():
    """Two equal samples of a judge share all nodes, and a branch may end inside another one."""
    root, branch = two_turns()
    judge = dataclasses.replace(branch, trains=False)
    P = branch.prompt_length
    arrays = {name: getattr(root, name)[:P] for name in ("tokens", "sampled_mask", "logprobs", "versions")}
    inside = dataclasses.replace(root, **arrays, calls=root.calls[:1], trains=False)  # a reply to the first answer
    own = [root, judge, judge, inside]
    own = [dataclasses.replace(one, branch=i, num_branches=4, draw=i) for i, one in enumerate(own)]
    (episode,) = json.loads(json.dumps([*traces.of_rollouts(own, TOK)]))
    back = traces.rollouts_of(episode)
    assert [rollout_lib.digest(one) for one in back] == [rollout_lib.digest(one) for one in own]
    (row,) = traces.conversations_of(episode)
    assert len(row["messages"]) == 4  # of the root


def test_the_joined_nodes_are_the_tokens_of_a_branch():
    root, branch = two_turns()
    (episode,) = traces.of_rollouts([root, branch], TOK)
    nodes, found = episode["traces"][0]["nodes"], []
    leaves = set(range(len(nodes))) - {node["parent"] for node in nodes}
    for leaf in sorted(leaves):
        path = []
        while leaf is not None:
            path, leaf = [nodes[leaf], *path], nodes[leaf]["parent"]
        found.append([token for node in path for token in node["token_ids"]])
    assert found == [root.tokens.tolist(), branch.tokens.tolist()]
    for node in nodes:
        assert len(node["mask"]) == len(node["token_ids"]) and len(node["logprobs"]) == sum(node["mask"])


FOREIGN = {
    "id": "e",
    "task": {"type": "T", "data": {"idx": 0}},
    "ok": True,
    "traces": [
        {
            "task": {"type": "T", "data": {"idx": 0}},
            "agent": {"config": {}, "trainable": True},
            "rewards": {"solved": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.2}, "skipped": None},
            "nodes": [
                {
                    "message": {"role": "system", "content": "S"},
                    "tools": [{"name": "add", "description": "d", "parameters": {}}],
                },
                {"parent": 0, "message": {"role": "user", "content": [{"type": "text", "text": "U"}]}},
                {
                    "parent": 1,
                    "sampled": True,
                    "message": {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "c", "name": "add", "arguments": "{}"}],
                        "provider_state": [{}],
                    },
                },
                {"parent": 2, "message": {"role": "tool", "tool_call_id": "c", "content": "3"}},
                {
                    "parent": 3,
                    "sampled": True,
                    "message": {"role": "assistant", "content": "3", "reasoning_content": "so"},
                },
                {"parent": 1, "message": {"role": "user", "content": "not answered"}},
            ],
        },
        {
            "agent": {"config": {}, "trainable": False},
            "nodes": [{"sampled": True, "message": {"role": "assistant", "content": "judge"}}],
        },
    ],
}


def test_traces_of_others_become_conversations(tmp_path, capsys):
    (row,) = traces.conversations_of(FOREIGN)
    assert row["reward"] == pytest.approx(0.7)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert row["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "content": "3", "reasoning_content": "so"},
    ]
    assert row["tools"] == [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}]
    text = json.dumps(FOREIGN, ensure_ascii=False).replace('"U"', '"U\u2028"') + "\n"  # not the end of a line of JSON
    (tmp_path / "t.jsonl").write_text(text, encoding="utf-8")
    assert commands.run("rl.rollouts", "import", tmp_path / "t.jsonl", "--out", tmp_path / "r.parquet") == 1
    assert "no proofs and signatures" in capsys.readouterr().err
    assert commands.run("rl.rollouts", "import", tmp_path / "t.jsonl", "--out", tmp_path / "s.jsonl") == 0


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"traces": [{"nodes": []}]}', '{"traces": [{"nodes": [{"parent": 0, "sampled": true}]}]}', "x"],
)
def test_other_files_are_refused_with_the_line(tmp_path, capsys, text):
    (tmp_path / "t.jsonl").write_text(json.dumps(FOREIGN) + "\n" + text + "\n")
    assert commands.run("rl.rollouts", "import", tmp_path / "t.jsonl", "--out", tmp_path / "s.jsonl") == 1
    err = capsys.readouterr().err
    assert ":2 is not an episode" in err or "has no conversation" in err
