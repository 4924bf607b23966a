"""Router replay from the server's reply to the gradient: what a rollout says of its experts is kept, checked, and run.

Oracles: routers written as loops over experts in float64, packing by hand, and a learner's gradient of rows that are neither
packed nor share a prompt. Weights are random, so experts that are merely similar give other numbers.
"""

import base64
import contextlib
import dataclasses
import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs import quickstart, quickstart_moe
from inference import client as client_lib
from inference import engine as engine_lib
from inference import rollout as rollout_lib
from inference import rollout_file, routing
from inference import scheduler as scheduler_lib
from models import moe, transformer
from models import tokenizer as tokenizer_lib
from rl import (
    admission,
    calibrate,
    data,
    experiment,
    feed,
    launch,
    learner,
    packing,
    router_replay,
    validator,
    verdicts,
)
from rl import credit as credit_lib
from rl import orchestrator as orchestrator_lib
from sharding import mesh as mesh_lib
from tests import test_learner, test_orchestrator, test_rollout, test_train, tiny

# ---- how near a claim is to a router's choice ------------------------------------------------------------------------

E, X, D = 8, 3, 16
BASE = tiny.model(model_dim=D, num_experts=E, experts_per_token=X, expert_ffn_dim=12, num_layers=1)
SIGMOID = {"router": "sigmoid", "router_correction": True}
ROUTERS = {
    "softmax": BASE,
    "sigmoid": dataclasses.replace(BASE, **SIGMOID),
    "groups": dataclasses.replace(BASE, **SIGMOID, router_groups=4, router_groups_kept=2),
    "topk_softmax": dataclasses.replace(BASE, router="topk_softmax"),
}


@functools.partial(jax.jit, static_argnums=1)
def route(logits_NE, config, correction_E, given_NX=None):
    """Of a router whose weights are the identity, so that its inputs are its logits."""
    params = {"router": jnp.eye(E)} | ({"correction": correction_E} if config.router_correction else {})
    given = None if given_NX is None else given_NX[None]
    return moe.route(logits_NE[None], params, dataclasses.replace(config, model_dim=E), experts_BTX=given)


def drawn(name, count=400, seed=0):
    """(logits, correction)"""
    rng = np.random.default_rng(seed)
    correction = 0.1 * rng.standard_normal(E) if ROUTERS[name].router_correction else np.zeros(E)
    return (1.5 * rng.standard_normal((count, E))).astype(np.float32), correction.astype(np.float32)


@pytest.mark.parametrize("name", ROUTERS)
def test_what_a_router_would_choose_with_other_roundings_is_near(name):
    """Logits moved by up to r: the choice then is at most 2 r from the choice before. And the choice itself is at 0."""
    config, (logits_NE, correction_E) = ROUTERS[name], drawn(name)
    own = route(logits_NE, config, correction_E)
    assert own.gap is None
    assert not np.asarray(route(logits_NE, config, correction_E, own.experts[0]).gap).any()
    for r, rarely in ((1e-3, 0.05), (0.3, 1.0)):
        moved = logits_NE + np.random.default_rng(1).uniform(-r, r, logits_NE.shape).astype(np.float32)
        claimed_NX = np.asarray(route(moved, config, correction_E).experts[0])
        gap_N = np.asarray(route(logits_NE, config, correction_E, claimed_NX).gap)[0]
        differs_N = (np.sort(claimed_NX) != np.sort(np.asarray(own.experts[0]))).any(axis=1)
        np.testing.assert_array_equal(gap_N > 0, differs_N)
        assert gap_N.max() <= 2 * r + 1e-5 and differs_N.mean() <= rarely  # 1e-5: float32 of logits of size 5
        assert r < 0.1 or differs_N.mean() > 0.1


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "topk_softmax"])
def test_a_choice_far_from_the_routers_is_as_far_as_a_loop_says(name):
    """Every choice of three of eight, against the best that it passed over and the worst that it took."""
    config, (logits_NE, correction_E) = ROUTERS[name], drawn(name, 4)
    every = list(itertools.combinations(range(E), X))
    for logits_E in logits_NE.astype(np.float64):
        rank_E, unit = logits_E, 1.0
        if name == "sigmoid":
            rank_E, unit = 1 / (1 + np.exp(-logits_E)) + correction_E, 4.0
        repeated = np.repeat(logits_E[None].astype(np.float32), len(every), axis=0)
        gap_N = np.asarray(route(repeated, config, correction_E, np.array(every)).gap)[0]
        for claimed, gap in zip(every, gap_N, strict=True):
            passed_over = max(rank_E[e] for e in range(E) if e not in claimed)
            expected = max(0.0, unit * (passed_over - min(rank_E[e] for e in claimed)))
            assert gap == pytest.approx(expected, abs=2e-5)  # float32 of numbers of size 10


def test_experts_of_groups_that_are_not_kept_are_far():
    config, (logits_NE, correction_E) = ROUTERS["groups"], drawn("groups", 50)
    own_NX = np.asarray(route(logits_NE, config, correction_E).experts[0])
    score_NE = 1 / (1 + np.exp(-logits_NE.astype(np.float64))) + correction_E
    worth_NG = np.sort(score_NE.reshape(-1, 4, 2)).sum(axis=-1)
    order_NG = np.argsort(-worth_NG)
    claimed_NX = own_NX.copy()
    claimed_NX[:, 2] = 2 * order_NG[:, 3]  # an expert of the worst group in place of the third choice
    gap_N = np.asarray(route(logits_NE, config, correction_E, claimed_NX).gap)[0]
    least_N = 2 * (np.sort(worth_NG)[:, 2] - worth_NG.min(axis=1))  # that group comes up to the last that was kept
    assert (gap_N >= least_N - 1e-5).all() and np.median(least_N) > 0.5


def test_a_router_chooses_where_nothing_is_given_and_nan_is_never_near():
    config, (logits_NE, correction_E) = ROUTERS["softmax"], drawn("softmax", 3)
    own = route(logits_NE, config, correction_E)
    given = np.array([[7, 6, 5], [-1, -1, -1], [5, 6, 7]])
    got = route(logits_NE, config, correction_E, given)
    expected = np.where(given < 0, np.asarray(own.experts[0]), given)
    np.testing.assert_array_equal(got.experts[0], expected)
    assert got.gap[0, 1] == 0 and got.gap.shape == (1, 3)
    logits_NE[0, 0] = np.nan
    assert np.isnan(np.asarray(route(logits_NE, config, correction_E, given).gap)[0, 0])


# ---- the record ------------------------------------------------------------------------------------------------------


def claim(dtype=np.uint8, layers=3, high=200, seed=0):
    return np.random.default_rng(seed).integers(0, high, (9, layers, 2)).astype(dtype)


def test_a_file_keeps_claims_and_is_as_before_without():
    wide = claim(np.uint16, high=60_000)
    rollouts = [test_rollout.make(0, routed_experts=claim()), test_rollout.make(1)]
    rollouts += [rollout_lib.sign(test_rollout.make(2, routed_experts=wide), test_rollout.KEY)]
    data = rollout_lib.to_parquet(rollouts)
    back = rollout_lib.from_parquet(data)
    for before, after in zip(rollouts, back, strict=True):
        test_rollout.assert_equal(before, after)
    assert back[1].routed_experts is None and rollout_lib.signature_ok(back[2])
    rollout_file.check(data)
    assert b"routed_experts" not in rollout_lib.to_parquet(rollouts[1:2])


def test_the_signature_covers_the_claim():
    signed = rollout_lib.sign(test_rollout.make(routed_experts=claim()), test_rollout.KEY)
    assert rollout_lib.signature_ok(signed)
    other = claim()
    other[4, 1, 1] ^= 1
    for changed in (other, None, claim().astype(np.uint16), claim().reshape(9, 2, 3)):
        assert not rollout_lib.signature_ok(dataclasses.replace(signed, routed_experts=changed))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (claim()[:-1], "must have a row per token but the last, got [8, 3, 2]"),
        (claim()[:, :0], "must have a row per token but the last, got [9, 0, 2]"),
        (claim().astype(np.int32), "uint8 or uint16"),
        (claim().astype(">u2"), "uint8 or uint16"),
        (claim()[0], "uint8 or uint16"),
        ([[1]], "got list"),
        (np.lib.stride_tricks.as_strided(claim(), (9, 2**13, 2**11), (0, 0, 0)), "at most 134217728 bytes"),
    ],
)
def test_a_claim_of_wrong_form_is_no_record(value, words):
    reason = rollout_lib.validate(test_rollout.make(routed_experts=value))
    assert reason.startswith("routed_experts: ") and words in reason


def with_columns(data, shape, more=()):
    """A good row with these two columns behind it."""
    table = pq.read_table(pa.BufferReader(rollout_lib.to_parquet([test_rollout.make()])))
    columns = [("routed_experts", pa.array([data], pa.binary())), ("routed_experts_shape", shape), *more]
    for name, column in columns:
        table = table.append_column(name, column)
    return test_rollout.table_bytes(table)


def shape_of(*sizes, dtype=None):
    return pa.array([sizes], dtype or pa.list_(pa.int32()))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ((b"x" * 53, shape_of(9, 3, 2)), "row 0: routed_experts: must be one or two bytes per entry"),
        ((b"", shape_of(9, 3, 2)), "got 0 bytes and [9, 3, 2]"),
        ((b"x" * 54, shape_of()), "got 54 bytes and []"),
        ((b"x" * 54, shape_of(54)), "got 54 bytes and [54]"),
        ((b"x" * 54, shape_of(-9, -3, 2)), "got 54 bytes and [-9, -3, 2]"),
        ((b"", shape_of(0, 2**31 - 1, 2**31 - 1)), "got 0 bytes"),
        ((b"x" * 54, shape_of(*range(1000))), "must be one or two bytes per entry"),
        (
            (b"x" * 54, shape_of(3, 3, 6)),
            "row 0: routed_experts: must have a row per token but the last, got [3, 3, 6]",
        ),
        ((b"x" * 54, shape_of(9, 3, 2, dtype=pa.list_(pa.int64()))), "column 26 must be routed_experts_shape"),
        ((b"x" * 54, pa.array([None], pa.list_(pa.int32()))), "must not hold nulls"),
        ((b"x" * 54, shape_of(9, 3, 2), [("x", pa.array([1]))]), "column 'routed_experts' is not in the schema"),
    ],
)
def test_files_of_strangers_with_claims_are_refused_in_one_line(columns, words):
    with pytest.raises(ValueError) as error:
        rollout_lib.from_parquet(with_columns(*columns))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_any_bytes_in_the_columns_are_a_record_or_a_refusal():
    rng = np.random.default_rng(0)
    for _ in range(100):
        sizes = rng.choice([-1, 0, 1, 2, 3, 6, 9, 18, 27, 54, 2**31 - 1], rng.integers(0, 5)).tolist()
        data = rng.bytes(int(rng.choice([0, 1, 9, 54, 108])))
        try:
            (record,) = rollout_lib.from_parquet(with_columns(data, shape_of(*sizes)))
        except ValueError as error:
            assert "routed_experts" in str(error)
        else:
            assert record.routed_experts is None or record.routed_experts.tobytes() == data


# ---- what a claim can be, of a model ---------------------------------------------------------------------------------

TOKENIZER = tokenizer_lib.byte_chatml()
MODEL = tiny.model(num_layers=3, num_experts=5, experts_per_token=2, expert_ffn_dim=16, dense_layers=(1,))
CLAIMS = router_replay.RouterReplay.of(MODEL)


def good_claim(num_rows=9, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.zeros((num_rows, 3, 2), np.uint8)
    for t, layer in itertools.product(range(num_rows), (0, 2)):
        rows[t, layer] = rng.choice(5, 2, replace=False)
    return rows


def changed(at, value):
    rows = good_claim()
    rows[at] = value
    return rows


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "does not say which experts ran"),
        (claim(layers=2), "expected [9, 3, 2] of rows, layers and experts per token, got [9, 2, 2]"),
        (np.concatenate([good_claim()] * 2, axis=2), "got [9, 3, 4]"),
        (changed((4, 2), (1, 5)), "expert 5 is not one of the model's 5"),
        (changed((4, 0), (3, 3)), "one expert twice"),
        (changed((0, 1), (0, 1)), "a layer that has none"),
    ],
)
def test_a_claim_that_the_model_cannot_have_is_refused(value, words):
    rollout = test_rollout.make(routed_experts=value)
    assert words in CLAIMS.refusal(rollout)
    # Off where nothing is claimed, but in a run that replays.
    verdict = verdicts.routable(rollout, CLAIMS)
    if value is None:
        assert verdict.accepted
        rules = validator.rules_of(experiment.resolve(moe_config()).raw, TOKENIZER)
        verdict = verdicts.routed(rollout, CLAIMS, rules)
        assert verdicts.routed(rollout, CLAIMS, dataclasses.replace(rules, router_replay=False)).accepted
    assert verdict.reason == "routing" and words in str(verdict)
    assert CLAIMS.refusal(test_rollout.make(routed_experts=good_claim())) is None
    dense = router_replay.RouterReplay.of(tiny.model())
    assert "this model has none" in dense.refusal(test_rollout.make(routed_experts=good_claim()))


def test_rows_hold_mixtures_and_leave_the_last_token_to_the_router():
    """In one byte below 256 experts; at 256 all values of a byte are experts."""
    rollout = test_rollout.make(routed_experts=good_claim())
    rows = CLAIMS.rows(rollout)
    assert rows.shape == (10, 2, 2) and rows.dtype == np.uint8 and (rows[-1] == 255).all()
    np.testing.assert_array_equal(rows[:-1], good_claim()[:, [0, 2]])
    given = np.asarray(jax.jit(router_replay.given)(rows[None]))
    assert given.shape == (2, 1, 10, 2) and given.dtype == np.int32 and (given[:, :, -1] == -1).all()
    np.testing.assert_array_equal(given[:, 0, :-1], np.moveaxis(good_claim()[:, [0, 2]].astype(int), 1, 0))
    many = dataclasses.replace(CLAIMS, num_experts=256)
    full = np.full((9, 3, 2), 255, np.uint8)
    assert many.rows(dataclasses.replace(rollout, routed_experts=full)).tolist()[:9] == [[[255] * 2] * 2] * 9
    assert many.dtype == np.uint16 and router_replay.unrouted(many.dtype) == 65535


# ---- the reply and the worker ----------------------------------------------------------------------------------------


def reply(**changes):
    rows = good_claim(4)
    field = {"data": base64.b64encode(rows.tobytes()).decode(), "shape": [4, 3, 2], "start": 0, "dtype": "uint8"}
    return {
        "token_ids": [5, 6, 7],
        "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -0.5}] * 3},
        "policy_versions": [[3, 3]],
        "prompt_policy_version": 2,
        "proofs": "",
        "routed_experts": field | changes,
    }


def test_a_client_takes_experts_that_it_asked_for():
    sampling = {"max_tokens": 3, "return_routed_experts": True}
    sample = client_lib._read_choice(reply(), sampling, 2)
    np.testing.assert_array_equal(sample.experts, good_claim(4))
    assert client_lib._read_choice(reply(), {"max_tokens": 3}, 2).experts is None
    wide = base64.b64encode(good_claim(4).astype("<u2").tobytes()).decode()
    assert client_lib._read_choice(reply(data=wide, dtype="uint16"), sampling, 2).experts.dtype == np.uint16


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"dtype": ["uint8"]},
        {"start": 1},
        {"shape": [3, 3, 2]},
        {"shape": [4, 3]},
        {"shape": [4, -3, -2]},
        {"shape": [4, 3, 2.0]},
        {"shape": None},
        {"data": "AA=="},
        {"data": "?"},
        {"data": None},
        {"shape": [4, 2**30, 2**30]},
    ],
)
def test_a_reply_with_broken_experts_is_malformed(changes):
    with pytest.raises((ValueError, TypeError)):  # the two that `_read_reply` makes Malformed
        client_lib._read_choice(reply(**changes), {"return_routed_experts": True}, 2)


# ---- the batch -------------------------------------------------------------------------------------------------------

P, G = 4, 3


def group(claims_of=lambda i: good_claim(4 + 3, seed=i), versions=(0, 0, 0)):
    """Three samples of one prompt of 4 tokens, 4 sampled tokens each."""
    rng, out = np.random.default_rng(3), []
    for i in range(G):
        fields = dict(
            tokens=np.concatenate([np.arange(P), 100 + 10 * i + np.arange(4)]).astype(np.int32),
            sampled_mask=np.arange(8) >= P,
            logprobs=np.where(np.arange(8) >= P, -rng.random(8), 0).astype(np.float32),
            versions=np.full(8, versions[i], np.int32),
            sample=i,
            reward=float(i),
            routed_experts=claims_of(i),
        )
        out.append(test_rollout.make(**fields))
    return out


def shared_prompt(i):
    """Claims that agree on the tokens before the prompt's last."""
    rows = good_claim(7, seed=i)
    rows[: P - 1] = good_claim(P - 1, seed=99)
    return rows


def streams_of(batch):
    """{token of a sample: (its experts, position)}, read back from the packed arrays of a batch with one row in use."""
    found = {}
    for token, position, segment, branch, experts in zip(
        *(getattr(batch, n)[0, 0] for n in ("tokens", "positions", "segment_ids", "branch_ids", "routed_experts")),
        strict=True,
    ):
        found[int(segment), int(branch), int(position)] = int(token), experts.tolist()
    return found


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_group_is_laid_out_with_what_each_of_its_tokens_ran(share_prompts):
    """The prompt's last token once per sample: each ran it for itself. What nobody ran is left to the routers."""
    credit = credit_lib.Credit(share_prompts=share_prompts, router_replay=CLAIMS)
    (rollouts,) = groups = [group(shared_prompt)]
    trees, _ = credit.assign(groups)
    layout = packing.Layout(64, 1, 1, router_replay=CLAIMS)
    batch = packing.pack(trees, layout)
    found = streams_of(batch)
    if share_prompts:
        assert len(trees) == 1 and trees[0].num_tokens == P - 1 + G * 5
        branches = [[*([1, 0, t] for t in range(P - 1)), *([1, i + 1, t] for t in range(P - 1, 8))] for i in range(G)]
    else:
        assert [tree.num_tokens for tree in trees] == [8] * G
        branches = [[[i + 1, 1, t] for t in range(8)] for i in range(G)]
    for rollout, places in zip(rollouts, branches, strict=True):
        for t, place in enumerate(places):
            token, experts = found[tuple(place)]
            assert token == rollout.tokens[t]
            assert experts == (rollout.routed_experts[t, [0, 2]].tolist() if t < 7 else [[255, 255]] * 2)
    used = batch.segment_ids[0, 0] > 0
    assert (batch.routed_experts[0, 0][~used] == 255).all() and used.sum() == sum(t.num_tokens for t in trees)


def test_samples_whose_prompts_took_other_experts_do_not_share_them():
    def claims_of(i):
        rows = shared_prompt(i)
        rows[1, 0] = (0, 1) if i == 1 else (2, 3)
        return rows

    trees, _ = credit_lib.Credit(router_replay=CLAIMS).assign([group(claims_of)])
    assert sorted(len(tree.branches) for tree in trees) == [1, 2]
    by_branch = {int(branch.tokens[-1]): tree for tree in trees for branch in tree.branches}
    for rollout in group(claims_of):
        tree = by_branch[int(rollout.tokens[-1])]
        np.testing.assert_array_equal(tree.routed_experts, rollout.routed_experts[: P - 1, [0, 2]])


def test_without_replay_nothing_is_carried():
    trees, _ = credit_lib.Credit().assign([group(shared_prompt)])
    assert trees[0].routed_experts is None and len(trees[0].prompt) == P
    batch = packing.pack(trees, packing.Layout(32, 1, 1))
    assert batch.routed_experts is None
    mesh = mesh_lib.create({}, jax.devices()[:1])
    assert len(jax.tree.leaves(packing.abstract(packing.Layout(32, 1, 1), mesh))) == 10


def test_batches_are_saved_placed_and_sent_with_their_experts(tmp_path):
    mesh = mesh_lib.create({"data": 2, "fsdp": 2, "context": 2})
    layout = packing.Layout(16, 4, 2, shards=4, router_replay=CLAIMS)
    trees, _ = credit_lib.Credit(router_replay=CLAIMS).assign([group(lambda i: good_claim(7, seed=i))] * 2)
    batch = packing.pack(trees, layout)
    packing.save(batch, tmp_path / "b.npz")
    loaded = packing.load(tmp_path / "b.npz")
    placed = packing.place(batch, mesh)
    header, blocks = feed._cut(batch, layout, mesh, 0)
    sent = feed._assemble(header["num_micro_batches"], bytearray(b"".join(map(bytes, blocks))), layout, mesh)
    for name in packing.empty_row(layout):
        expected = getattr(batch, name)
        for other in (loaded, placed, sent):
            np.testing.assert_array_equal(np.asarray(getattr(other, name)), expected, err_msg=name)
    assert sent.routed_experts.sharding == placed.routed_experts.sharding
    assert {shard.data.shape for shard in placed.routed_experts.addressable_shards} == {(2, 1, 8, 2, 2)}
    promised, got = packing.abstract(layout, mesh), jax.tree.map(lambda x: x, placed)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), promised) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), got
    )


# ---- the learner -----------------------------------------------------------------------------------------------------

MIXED = test_learner.MIXED  # a dense layer, then a mixture: what its router reads does not depend on its experts
SCAN = dataclasses.replace(MIXED, num_layers=4, first_dense_layers=0, scan_layers=True)
ROW = test_learner.ROW


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def experts_of(key, length, config):
    """[length, L, X] drawn by what the tokens are."""
    rng = np.random.default_rng(key)
    rows = router_replay.RouterReplay.of(config).empty(length)
    for t, layer in np.ndindex(rows.shape[:2]):
        rows[t, layer] = rng.choice(config.num_experts, config.experts_per_token, replace=False)
    return rows


def plain_rows(config, choose):
    """([N, T] tokens, [L, N, T, X] experts, -1 in padding), every branch with its prompt in a row of its own."""
    tokens_NT, *_ = test_learner.plain_rows()
    L, X = router_replay.RouterReplay.of(config).row_shape
    experts_NTLX = np.full((*tokens_NT.shape, L, X), -1)
    pairs = [
        (i, tree, j, branch) for i, tree in enumerate(test_learner.trees()) for j, branch in enumerate(tree.branches)
    ]
    for row, (i, tree, j, branch) in enumerate(pairs):
        prompt, own = choose(i, tree, j, branch)
        experts_NTLX[row, : len(prompt) + len(own)] = np.concatenate([prompt, own])
    return tokens_NT, np.moveaxis(experts_NTLX, 2, 0)


def drawn_experts(config):
    def choose(i, tree, j, branch):
        return experts_of((1, i), len(tree.prompt), config), experts_of((2, i, j), len(branch.tokens), config)

    return choose


def with_experts(choose):
    """The trees of tests/test_learner.py with these experts."""
    out = []
    for i, tree in enumerate(test_learner.trees()):
        chosen = [choose(i, tree, j, branch) for j, branch in enumerate(tree.branches)]
        branches = [
            dataclasses.replace(branch, routed_experts=own)
            for branch, (_, own) in zip(tree.branches, chosen, strict=True)
        ]
        out.append(dataclasses.replace(tree, branches=tuple(branches), routed_experts=chosen[0][0]))
    return out


def pack(trees, config, rows=2, capacity=6):
    return packing.pack(trees, packing.Layout(ROW, rows, capacity, router_replay=router_replay.RouterReplay.of(config)))


@functools.partial(jax.jit, static_argnums=1)
def reference(params, config, experts_LNTX):
    """(loss, gradient) of INTELLECT-2's formula on rows that are not packed, with given experts or the routers' own."""
    tokens_NT, temperature_NT, mask_NT, behavior_NT, A_NT = test_learner.plain_rows()
    clip = test_learner.CLIP

    def loss(params):
        hidden = transformer.apply(params, config, tokens_NT, experts_LBTX=experts_LNTX)
        logits = transformer.logits(params, config, hidden)[:, :-1] / temperature_NT[:, 1:, None]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens_NT[:, 1:, None], axis=-1)[..., 0]
        r = jnp.clip(jnp.exp(logp - behavior_NT[:, 1:]), 0, clip["delta"])
        clipped = jnp.clip(r, 1 - clip["clip_low"], 1 + clip["clip_high"])
        total = jnp.maximum(-r * A_NT[:, 1:], -clipped * A_NT[:, 1:]) * mask_NT[:, 1:]
        return total.sum() / mask_NT.sum()

    return jax.value_and_grad(loss)(params)


def assert_gradient(state, expected):
    grads = optax.tree.get(state.opt_state, "trace")
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        # As in tests/test_learner.py: sums of 100 products that cancel.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max(), err_msg=str(path))


axes = test_learner.axes


@pytest.mark.parametrize(
    ("config", "sizes", "rows", "capacity"),
    [
        (MIXED, axes(), 2, 6),
        pytest.param(MIXED, axes(expert=4, fsdp=2), 8, 2, marks=pytest.mark.slow),
        pytest.param(MIXED, axes(data=2, fsdp=2, context=2), 4, 3, marks=pytest.mark.slow),
        pytest.param(SCAN, axes(), 2, 6, marks=pytest.mark.slow),
    ],
    ids=["one", "expert_parallel", "context_parallel", "stacked"],
)
def test_the_given_experts_are_run_packed_sharded_and_accumulated(config, sizes, rows, capacity):
    """Against unpacked rows with repeated prompts on one device; and far from what the routers would have made of it."""
    choose = drawn_experts(config)
    step, fresh, mesh = test_learner.compiled(config, sizes)
    state, metrics = step(fresh(), packing.place(pack(with_experts(choose), config, rows, capacity), mesh))
    params = test_learner.params_of(config)
    tokens_NT, experts = plain_rows(config, choose)
    loss, expected = reference(params, config, experts)
    assert float(metrics["loss/total"]) == pytest.approx(float(loss), abs=3e-6)
    assert_gradient(state, expected)
    own, _ = reference(params, config, None)
    assert abs(float(own) - float(loss)) > 1e-3
    counts = np.array([(experts[layer][..., None] == np.arange(4)).sum() for layer in range(len(experts))])
    assert (counts > 0).all()


def test_the_part_that_would_have_been_chosen_otherwise():
    """By the router's own choice on unpacked rows, counted over the tokens of the trees, a shared prompt once."""
    choose = drawn_experts(MIXED)
    tokens_NT, experts_LNTX = plain_rows(MIXED, choose)
    _, routing = jax.jit(transformer.apply_routed, static_argnums=1)(test_learner.params_of(MIXED), MIXED, tokens_NT)
    own_NT2, given_NT2 = (np.sort(np.asarray(x)[0], axis=-1) for x in (routing.experts, experts_LNTX))
    row, differs = 0, []
    for tree in test_learner.trees():
        room = 0
        for branch in tree.branches:
            computes_prompt = room < len(branch.tokens)  # what does not fit beside its siblings has a prompt of its own
            room = (ROW - len(tree.prompt) if computes_prompt else room) - len(branch.tokens)
            span = slice(0 if computes_prompt else len(tree.prompt), len(tree.prompt) + len(branch.tokens))
            differs += (own_NT2[row, span] != given_NT2[row, span]).any(axis=-1).tolist()
            row += 1
    step, fresh, mesh = test_learner.compiled(MIXED, ())
    batch = pack(with_experts(choose), MIXED)
    assert (batch.segment_ids > 0).sum() == len(differs)
    _, metrics = step(fresh(), packing.place(batch, mesh))
    assert float(metrics["moe/routing_mismatch"]) == pytest.approx(np.mean(differs)) and 0.5 < np.mean(differs) < 1
    with jax.set_mesh(mesh):
        _, without = step.jitted.eval_shape(fresh(), packing.place(test_learner.pack(), mesh))
    assert without.keys() == metrics.keys() - {"moe/routing_mismatch"} and "moe/max_violation" in without


def own_experts(config, params):
    """What the routers of `params` choose on rows that are not packed."""
    tokens_NT, *_ = test_learner.plain_rows()
    _, routing = jax.jit(transformer.apply_routed, static_argnums=1)(params, config, tokens_NT)
    dtype = router_replay.RouterReplay.of(config).dtype
    chosen_NTLX = np.moveaxis(np.asarray(routing.experts), 0, 2).astype(dtype)
    first = np.cumsum([0, *(len(tree.branches) for tree in test_learner.trees())])

    def choose(i, tree, j, branch):
        rows, P = chosen_NTLX[first[i] + j], len(tree.prompt)
        return rows[:P], rows[P : P + len(branch.tokens)]

    return choose


def test_replay_of_the_same_weights_is_no_replay():
    """Loss and gradient of rows whose routers choose, to rounding; and none would have chosen otherwise."""
    params = test_learner.params_of(MIXED)
    step, fresh, mesh = test_learner.compiled(MIXED, ())
    state, metrics = step(fresh(), packing.place(pack(with_experts(own_experts(MIXED, params)), MIXED), mesh))
    loss, expected = reference(params, MIXED, None)
    assert float(metrics["moe/routing_mismatch"]) == 0
    assert float(metrics["loss/total"]) == pytest.approx(float(loss), abs=3e-6)
    assert_gradient(state, expected)


@pytest.mark.slow
def test_learners_old_logprobs_run_the_given_experts_too():
    """With one step on a batch the ratio is against these very parameters: 1, only if both passes ran the same experts."""
    mesh = test_learner.make_mesh(())
    objective = learner.Objective(old_logprobs="learner")
    step = learner.make_train_step(MIXED, test_learner.SGD, "two_sided_clip", test_learner.CLIP, mesh, objective)
    _, fresh, _ = test_learner.compiled(MIXED, ())
    batch = packing.place(pack(with_experts(drawn_experts(MIXED)), MIXED), mesh)
    _, metrics = step(fresh(), batch)
    assert float(metrics["loss/mismatch_kl"]) < 1e-9 and float(metrics["moe/routing_mismatch"]) > 0.5
    score = learner.make_score(MIXED, mesh)  # a reference's routers choose for themselves
    state = fresh()
    np.testing.assert_array_equal(
        score(state.params, batch), score(state.params, packing.place(test_learner.pack(), mesh))
    )


# ---- the validator ---------------------------------------------------------------------------------------------------

CAPACITY = 64
ENGINE = engine_lib.EngineConfig(4, CAPACITY, 2, 4, routed_experts=True)
STRICT = verdicts.Tolerance(margin=1e-4, max_wrong_tokens=0, logprob=1e-4, routing=1e-4)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
REQUEST = scheduler_lib.GenerateRequest(
    tuple(b"hello"), num_samples=4, max_tokens=30, seed=5, proofs=True, routed_experts=True
)


@functools.cache
def weights(version):
    return jax.tree.map(jnp.asarray, tiny.params(MODEL, version))


class Updating(engine_lib.Engine):
    """Before the second call of `generate` version 1 is sent; it is in force from the next on."""

    scheduler, calls = None, 0

    def generate(self, params, state):
        self.calls += 1
        if self.calls == 2 and self.scheduler is not None:
            self.scheduler.update(weights(1), 1)
        return super().generate(params, state)


@functools.cache
def honest(updated=False):
    """A group as the scheduler makes it and a worker writes it down."""
    engine = Updating(MODEL, ENGINE, TOKENIZER, weights(0))
    scheduler = scheduler_lib.Scheduler(engine, weights(0), 0)
    engine.scheduler = scheduler if updated else None
    completions = scheduler.submit(REQUEST).result(60)
    scheduler.close()
    P = len(REQUEST.tokens)
    return tuple(
        test_rollout.make(
            tokens=np.array([*REQUEST.tokens, *c.tokens], np.int32),
            sampled_mask=np.array([False] * P + [True] * len(c.tokens)),
            logprobs=np.array([0.0] * P + c.logprobs, np.float32),
            versions=np.array([c.prompt_version] * P + c.versions, np.int32),
            temperature=1.0,
            seed=REQUEST.seed + i,
            sample=i,
            step=1,
            finish_reason=c.finish_reason,
            proofs=c.proofs,
            routed_experts=routing.full(c.experts, MODEL),
        )
        for i, c in enumerate(completions)
    )


def judge(rollouts, tolerance=STRICT):
    return validator.Validator(MODEL, weights, OFF, tolerance, max_model_len=CAPACITY).judge(rollouts)


@pytest.mark.parametrize("updated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_honest_claims_are_accepted_with_and_beside_others(updated):
    """Within one version and across a swap in flight; a group in which one claims nothing is judged as well."""
    rollouts = list(honest(updated))
    versions = np.unique(np.concatenate([r.versions for r in rollouts])).tolist()
    assert versions == ([0, 1] if updated else [0])
    assert all(verdict.accepted for verdict in judge(rollouts)), judge(rollouts)
    beside = [rollouts[0], dataclasses.replace(rollouts[1], routed_experts=None), *rollouts[2:]]
    assert all(verdict.accepted for verdict in judge(beside)), judge(beside)


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("where", ["prompt", "prompt's last", "first", "last"])
def test_one_expert_that_the_policy_did_not_choose_is_found(updated, where):
    """Of one token, in either mixture; those beside it are not blamed."""
    rollouts = list(honest(updated))
    t = {"prompt": 1, "prompt's last": 4, "first": 5, "last": len(rollouts[2].tokens) - 2}[where]
    for layer in (0, 2):
        claim = rollouts[2].routed_experts.copy()
        claim[t, layer, 1] = next(e for e in range(5) if e not in claim[t, layer])
        found = judge([*rollouts[:2], dataclasses.replace(rollouts[2], routed_experts=claim), rollouts[3]])
        assert [verdict.reason for verdict in found] == ["ok", "ok", "routing", "ok"], found
        assert f"token {t} miss" in found[2].detail or updated


@pytest.mark.slow
def test_stacked_layers_are_replayed_as_single_ones():
    """Of one version in packed rows, of two over a cache of keys."""
    stacked = dataclasses.replace(MODEL, scan_layers=True)
    check = validator.Validator(
        stacked, lambda version: transformer.stack(weights(version), stacked), OFF, STRICT, max_model_len=CAPACITY
    )
    for updated in (False, True):
        rollouts = list(honest(updated))
        claim = rollouts[1].routed_experts.copy()
        claim[-1, 2, 0] = next(e for e in range(5) if e not in claim[-1, 2])
        rollouts[1] = dataclasses.replace(rollouts[1], routed_experts=claim)
        found = check.judge(rollouts)
        assert [verdict.reason for verdict in found] == ["ok", "routing", "ok", "ok"], found


def test_a_claim_of_experts_at_random_is_refused_for_that():
    """What poisons most: the learner would run these. It is not mistaken for text that was not sampled."""
    (rollout, *_) = honest()
    rows = good_claim(len(rollout.tokens) - 1)
    (verdict,) = judge([dataclasses.replace(rollout, routed_experts=rows)])
    assert verdict.reason == "routing" and "name experts that its policy does not choose" in verdict.detail
    for malformed in (rows[:, :2], np.full_like(rows, 200), np.zeros_like(rows)):
        (verdict,) = judge([dataclasses.replace(rollout, routed_experts=malformed)])
        assert verdict.reason == "routing"


@pytest.mark.slow
def test_near_ties_are_forgiven_up_to_the_tolerance_and_measured():
    """In the last layer of the last token that was run, the second choice against the third: their logits' difference.

    Nothing that was sampled later reads it, but for one token's log-probability, so that `routing` is asked alone.
    """
    rollout = honest()[0]
    t = len(rollout.tokens) - 2
    padded = np.zeros((1, CAPACITY), np.int32)
    padded[0, : len(rollout.tokens)] = rollout.tokens
    seen = []
    spied = functools.partial(spy, seen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "route", spied)
        transformer.apply(weights(0), MODEL, padded)  # not compiled: arrays pass through `route`
    logits_E = seen[-1][0, t]
    order = np.argsort(-logits_E)
    claim = rollout.routed_experts.copy()
    assert set(claim[t, 2].tolist()) == set(order[:2].tolist())
    claim[t, 2] = order[[0, 2]]
    flipped = dataclasses.replace(rollout, routed_experts=claim)
    gap = float(logits_E[order[1]] - logits_E[order[2]])
    loose = dataclasses.replace(STRICT, margin=1e9, logprob=1e9)
    check = validator.Validator(MODEL, weights, OFF, loose, max_model_len=CAPACITY)
    replay = check.replay([flipped])
    assert replay.gap[0, t] == pytest.approx(gap, abs=1e-4) and np.delete(replay.gap[0], t).max() < 1e-4
    for routing_tolerance, reason in ((gap * 0.99, "routing"), (gap * 1.01, "ok")):
        tolerance = dataclasses.replace(loose, routing=routing_tolerance)
        assert verdicts.routing(verdicts.scores(flipped, replay, 0), tolerance).reason == reason


_route = moe.route


def spy(seen, x_BTD, params, config, **options):
    seen.append(np.asarray(x_BTD, np.float64) @ np.asarray(params["router"], np.float64))
    return _route(x_BTD, params, config, **options)


def test_a_gap_that_is_no_number_is_refused():
    scored = verdicts.Scores(*[np.zeros(2)] * 6, gap_T=np.array([0.0, np.nan]))
    assert verdicts.routing(scored, STRICT).reason == "routing"
    assert verdicts.routing(dataclasses.replace(scored, gap_T=None), STRICT).accepted


# ---- the run ---------------------------------------------------------------------------------------------------------


def moe_config(**changes):
    config = quickstart_moe.get_config()
    config.train.router_replay = True
    for name, value in changes.items():
        section, field = name.split("__")
        config[section][field] = value
    return config


def test_a_run_that_replays_records_asks_and_packs(monkeypatch, tmp_path):
    exp = experiment.resolve(moe_config())
    assert exp.engine.routed_experts and exp.credit.router_replay == router_replay.RouterReplay.of(exp.model)
    assert validator.rules_of(exp.raw, exp.tokenizer).router_replay
    assert verdicts.Tolerance.of(exp.raw.trust).routing == exp.raw.trust.routing_margin == 0.02
    commands = []

    def answering(name, command, *rest):
        commands.append(command)
        return contextlib.nullcontext("url")

    monkeypatch.setattr(launch, "_answering", answering)
    with launch._server(exp, tmp_path, tmp_path, None):
        pass
    plain = experiment.resolve(quickstart_moe.get_config())
    with launch._server(plain, tmp_path, tmp_path, None):
        pass
    assert "--routed_experts" in commands[0] and "--routed_experts" not in commands[1]
    assert not plain.engine.routed_experts and plain.credit.router_replay is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__num_experts": 0, "model__experts_per_token": 0, "model__expert_ffn_dim": 0}, "no router to replay"),
        (
            {"train__row_length": 2**24, "inference__max_model_len": 2**23},
            "a whole group with its experts in one submission",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_it_starts(changes, words):
    with pytest.raises(ValueError, match=words):
        experiment.resolve(moe_config(**changes))


def test_rollouts_that_do_not_say_their_experts_are_refused_where_they_are_replayed(tmp_path):
    config = moe_config(rl__prompts_per_step=3, rl__samples_per_prompt=2, rl__num_steps=10, trust__check_fraction=0.0)
    exp = experiment.resolve(config)
    orchestrator = orchestrator_lib.Orchestrator(
        exp.raw, tmp_path, credit=exp.credit, check=lambda rollouts: None, secret=b"s", on_wait=print
    )
    assert orchestrator.describe()["router_replay"] is True
    group = data.train_groups(exp.raw, 1)[0]
    rng = np.random.default_rng(0)

    def refusal(claim, split="train"):
        rollouts = test_orchestrator.answers(group, routed_experts=claim)
        asked = dataclasses.replace(group, split=split)
        return admission.refusal(exp.raw, asked, rollouts, newest=0, claims=exp.credit.router_replay)

    rows = np.stack([rng.permutation(4)[:2] for _ in range(4 * exp.model.num_layers)])
    rows = rows.reshape(4, -1, 2).astype(np.uint8)
    assert refusal(rows) is None and refusal(None, "held_out") is None
    assert refusal(None).startswith("routing: it does not say which experts ran")
    assert refusal(rows[:, :, :1]).startswith("routing: expected [4, 3, 2]")
    orchestrator._updater.shutdown()
    orchestrator._screeners.close()
    orchestrator._checker.shutdown()


@pytest.mark.slow
def test_honest_claims_of_every_variant_pass_at_the_default_limits():
    """Other batches, chunkings and a mesh give other near ties, and none is an offence; bfloat16 stays within the limit for it."""
    exp = experiment.resolve(moe_config(model__num_experts=16, rl__max_lag=0))
    params = jax.tree.map(jnp.asarray, tiny.params(exp.model, 3))
    limits = verdicts.Tolerance.of(exp.raw.trust)
    judge = validator.Validator(
        exp.model, lambda version: params, OFF, limits, max_model_len=exp.raw.inference.max_model_len
    )
    key, measured = rollout_lib.WorkerKey.generate(), {}
    for name in ("small_batch", "long_calls", "tensor_parallel", "bfloat16"):
        rollouts = calibrate.variant_rollouts(exp, params, 0, calibrate.VARIANTS[name], 128, key)
        assert all(rollout.routed_experts is not None for rollout in rollouts)
        measured[name] = calibrate.measure(judge, rollouts, limits)
        if name != "bfloat16":
            assert measured[name].num_refused == 0 and measured[name].routing < 1e-3, measured
    assert 1e-3 < measured["bfloat16"].routing < 0.2, measured
    tolerance, _ = calibrate.limits(list(measured.values()))
    assert tolerance.routing == calibrate.SAFETY * measured["bfloat16"].routing


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_quickstart_of_a_mixture_replays_its_routers(tmp_path, devices):
    """The whole walk: asked for, signed, judged (every group), packed, replayed, kept. Nothing honest is refused."""
    overrides = {"train__router_replay": True, "trust__check_fraction": 1.0, "model__num_layers": 2, "rl__max_lag": 1}
    overrides |= {"model__expert_ffn_dim": 32}
    env = {}
    if devices == 8:
        env, overrides = {"JAX_NUM_CPU_DEVICES": "8"}, overrides | {"mesh__fsdp": 2, "mesh__expert": 4}
    result = test_train.run(tmp_path / "w", config="quickstart_moe", env=env, **overrides)
    assert result.returncode == 0, result.stderr
    steps = test_train.curve(tmp_path / "w")
    assert len(steps) == 6
    for step in steps:
        assert step["trust/num_refused"] == 0
        # One version apart and in programs of other shapes: a few near ties, of thousands of choices.
        assert 0 <= step["moe/routing_mismatch"] < 0.2, step
    assert sum(step["trust/num_checked"] for step in steps) == 6 * 16
    assert sum(step["loss/grad_norm"] > 0 for step in steps) > 3
    kept = rollout_lib.read(tmp_path / "w" / "rollouts" / "step_3" / "accepted.parquet")
    assert all(r.routed_experts.shape == (len(r.tokens) - 1, 2, 2) and r.routed_experts.max() < 4 for r in kept)


@pytest.mark.slow
def test_a_dense_run_says_so_in_one_line(tmp_path):
    argv = [sys.executable, "-m", "rl.train", "--config=configs/quickstart.py", f"--workdir={tmp_path / 'w'}"]
    argv += ["--config.train.router_replay=True"]
    result = subprocess.run(argv, cwd=test_train.ROOT, capture_output=True, text=True, env=os.environ, timeout=200)
    assert result.returncode == 1 and "Traceback" not in result.stderr and "no router to replay" in result.stderr
    assert quickstart.get_config().train.router_replay is False
