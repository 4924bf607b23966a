"""Claims of experts: in a rollout and its file, checked against a model, in a server's reply."""

import base64
import dataclasses

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inference.rollouts import parquet, parquet_footer
from inference.rollouts import rollout as rollout_lib
from inference.swarm import reply as reply_lib
from rl.experiment import experiment
from rl.learning.batch import router_replay
from rl.protocol import lease
from rl.trust.verification import checks
from rl.trust.verification import rules as rules_lib
from tests.support import claims, tiny
from tests.support import rollouts as rollouts_lib

# ---- the rollout ------------------------------------------------------------------------------------------------------


def claim(dtype=np.uint8, layers=3, high=200, seed=0):
    return np.random.default_rng(seed).integers(0, high, (9, layers, 2)).astype(dtype)


def test_a_file_keeps_claims_and_is_as_before_without():
    wide = claim(np.uint16, high=60_000)
    rollouts = [rollouts_lib.make(0, routed_experts=claim()), rollouts_lib.make(1)]
    rollouts += [rollout_lib.sign(rollouts_lib.make(2, routed_experts=wide), rollouts_lib.KEY)]
    data = parquet.to_bytes(rollouts)
    back = parquet.from_bytes(data)
    for before, after in zip(rollouts, back, strict=True):
        rollouts_lib.assert_equal(before, after)
    assert back[1].routed_experts is None and rollout_lib.signature_ok(back[2])
    parquet_footer.check(data)
    assert b"routed_experts" not in parquet.to_bytes(rollouts[1:2])


def test_the_signature_covers_the_claim():
    signed = rollout_lib.sign(rollouts_lib.make(routed_experts=claim()), rollouts_lib.KEY)
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
    reason = rollout_lib.validate(rollouts_lib.make(routed_experts=value))
    assert reason.startswith("routed_experts: ") and words in reason


def with_columns(data, shape, more=()):
    """Returns a good row with these two columns added."""
    table = pq.read_table(pa.BufferReader(parquet.to_bytes([rollouts_lib.make()])))
    columns = [("routed_experts", pa.array([data], pa.binary())), ("routed_experts_shape", shape), *more]
    for name, column in columns:
        table = table.append_column(name, column)
    return rollouts_lib.table_bytes(table)


def shape_of(*sizes, dtype=None):
    return pa.array([sizes], dtype or pa.list_(pa.int32()))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ((b"x" * 53, shape_of(9, 3, 2)), "row 0: routed_experts: must have one or two bytes per expert ID"),
        ((b"x" * 54, shape_of(9, 3, 2, dtype=pa.list_(pa.int64()))), "column 38 must be routed_experts_shape"),
        ((b"x" * 54, pa.array([None], pa.list_(pa.int32()))), "must not contain nulls"),
        ((b"x" * 54, shape_of(9, 3, 2), [("x", pa.array([1]))]), "column 'x' is not in the schema"),
    ],
)
def test_files_of_strangers_with_claims_are_refused_in_one_line(columns, words):
    with pytest.raises(ValueError) as error:
        parquet.from_bytes(with_columns(*columns))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_any_bytes_in_the_columns_are_a_record_or_a_refusal():
    rng = np.random.default_rng(0)
    for _ in range(100):
        sizes = rng.choice([-1, 0, 1, 2, 3, 6, 9, 18, 27, 54, 2**31 - 1], rng.integers(0, 5)).tolist()
        data = rng.bytes(int(rng.choice([0, 1, 9, 54, 108])))
        try:
            (record,) = parquet.from_bytes(with_columns(data, shape_of(*sizes)))
        except ValueError as error:
            assert "routed_experts" in str(error)
        else:
            assert record.routed_experts is None or record.routed_experts.tobytes() == data


# ---- claims that a model can make ---------------------------------------------------------------------------------


def changed(at, value):
    rows = claims.good_claim()
    rows[at] = value
    return rows


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "it lacks routed experts"),
        (claim(layers=2), "expected [9, 3, 2] of rows, layers and experts per token, got [9, 2, 2]"),
        (np.concatenate([claims.good_claim()] * 2, axis=2), "got [9, 3, 4]"),
        (changed((4, 2), (1, 5)), "expert 5 is not one of the model's 5"),
        (changed((4, 0), (3, 3)), "one expert twice"),
        (changed((0, 1), (0, 1)), "experts in a dense layer"),
    ],
)
def test_a_claim_that_the_model_cannot_have_is_refused(value, words):
    rollout = rollouts_lib.make(routed_experts=value)
    assert words in claims.CLAIMS.refusal(rollout)
    # Off where nothing is claimed, but in a run that replays.
    rules = dataclasses.replace(
        rules_lib.Rules.of(experiment.resolve(claims.moe_config()).config), experts=claims.CLAIMS
    )
    rules = rules.at_lease(lease.Lease(1, rollout.task.group, "train", 0, 0, 1, 1.0, 0), 0)
    verdict = checks.experts_exist(rollout, rules)
    if value is None:
        assert verdict.accepted
        verdict = checks.experts_named(rollout, rules)
        assert checks.experts_named(rollout, dataclasses.replace(rules, router_replay=False)).accepted
        held_out = dataclasses.replace(rules.groups(1)[rollout.task.group], split="held_out")
        assert checks.experts_named(rollout, rules.at_lease(held_out, 0)).accepted
    assert verdict.reason == "routing" and words in str(verdict)
    assert claims.CLAIMS.refusal(rollouts_lib.make(routed_experts=claims.good_claim())) is None
    dense = router_replay.RouterReplay.of(tiny.model())
    assert "this model has none" in dense.refusal(rollouts_lib.make(routed_experts=claims.good_claim()))


def test_rows_hold_mixtures_and_leave_the_last_token_to_the_router():
    """Rows take one byte below 256 experts; at 256 all values of a byte are experts."""
    rollout = rollouts_lib.make(routed_experts=claims.good_claim())
    rows = claims.CLAIMS.rows(rollout)
    assert rows.shape == (10, 2, 2) and rows.dtype == np.uint8 and (rows[-1] == 255).all()
    np.testing.assert_array_equal(rows[:-1], claims.good_claim()[:, [0, 2]])
    given = np.asarray(jax.jit(router_replay.given)(rows[None]))
    assert given.shape == (2, 1, 10, 2) and given.dtype == np.int32 and (given[:, :, -1] == -1).all()
    np.testing.assert_array_equal(given[:, 0, :-1], np.moveaxis(claims.good_claim()[:, [0, 2]].astype(int), 1, 0))
    many = dataclasses.replace(claims.CLAIMS, num_experts=256)
    full = np.full((9, 3, 2), 255, np.uint8)
    assert many.rows(dataclasses.replace(rollout, routed_experts=full)).tolist()[:9] == [[[255] * 2] * 2] * 9
    assert many.dtype == np.uint16 and router_replay.unrouted(many.dtype) == 65535


# ---- the reply and the worker ----------------------------------------------------------------------------------------


def reply(**changes):
    rows = claims.good_claim(4)
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
    sample = reply_lib._read_choice(reply(), sampling, 2, 0)
    np.testing.assert_array_equal(sample.experts, claims.good_claim(4))
    assert reply_lib._read_choice(reply(), {"max_tokens": 3}, 2, 0).experts is None
    wide = base64.b64encode(claims.good_claim(4).astype("<u2").tobytes()).decode()
    assert reply_lib._read_choice(reply(data=wide, dtype="uint16"), sampling, 2, 0).experts.dtype == np.uint16


BROKEN = {
    "dtype": ["float32", ["uint8"]],
    "start": [1],
    "shape": [[3, 3, 2], [4, 3], [4, -3, -2], [4, 3, 2.0], None, [4, 2**30, 2**30]],
    "data": ["AA==", "?", None],
}


@pytest.mark.parametrize("changes", [{name: value} for name, values in BROKEN.items() for value in values])
def test_a_reply_with_broken_experts_is_malformed(changes):
    with pytest.raises((ValueError, TypeError)):  # the two that `_read_reply` makes Malformed
        reply_lib._read_choice(reply(**changes), {"return_routed_experts": True}, 2, 0)
