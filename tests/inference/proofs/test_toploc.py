"""TOPLOC: bytes of the reference, an integer oracle, and forged proofs.

fixtures/toploc/README.md describes the origin and the limits of each vector.
"""

import base64
import dataclasses
import fractions
import json
import os
import pathlib
import struct

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from inference.proofs import toploc
from inference.proofs import window as proof_window
from tests.support import proofs as proofs_lib
from tests.support import toploc_reference

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures" / "toploc"
VECTORS = json.loads((FIXTURES / "vectors.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}
EXACT = [name for name, case in CASES.items() if case["path"] == "tensor" and all(case["unique"])]
P = 65497


def hidden(name):
    with np.load(FIXTURES / "activations.npz") as arrays:
        return arrays[name.replace("/", "__")].view(jnp.bfloat16)


def proofs_of(case):
    return [base64.b64decode(proof) for proof in case["proofs"]]


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.bfloat16)


def verify_one(hidden_TD, proof, **kwargs):
    (result,) = proofs_lib.verify(hidden_TD, [proof], **kwargs)
    return result


def test_the_tie_free_vectors_are_there():
    assert len(EXACT) == 9 and {"partial_last_chunk", "modulus_many_collisions", "indices_past_field"} < set(EXACT)


@pytest.mark.parametrize("name", [*EXACT, "zeros", "constant"])
def test_bytes_equal_the_reference(name):
    case = CASES[name]
    assert proofs_lib.build(hidden(name), chunk=case["chunk"], topk=case["topk"]) == proofs_of(case)


@pytest.mark.parametrize("name", [*EXACT, "boundary_ties"])
def test_statistics_equal_the_reference(name):
    case = CASES[name]
    for label, expected in case["verify"].items():
        verifier = hidden(name if label == "self" else f"{name}/{label}")
        unique = case["unique"] if label == "self" else case["verify_unique"][label]
        results = proofs_lib.verify(verifier, proofs_of(case), chunk=case["chunk"], topk=case["topk"])
        assert len(results) == len(expected)
        for result, (mismatches, mean, median), exact in zip(results, expected, unique, strict=True):
            if exact:
                assert (result.exp_mismatches, result.mantissa_mean, result.mantissa_median) == (
                    mismatches,
                    pytest.approx(mean, rel=1e-12),
                    median,
                )
            else:  # tied at the k-th magnitude: up to 5 of 128 picks may differ (measured over 40 chunks)
                assert abs(result.exp_mismatches - mismatches) <= 5
        if label == "self":
            assert all(result.accepted and result.sign_mismatches == 0 for result in results)


def test_list_prefill_vector_is_one_long_chunk_then_short_ones():
    case = CASES["list_prefill"]
    built = proofs_lib.build(hidden("list_prefill/prefill"), chunk=5, topk=4)
    built += proofs_lib.build(hidden("list_prefill/decode"), chunk=3, topk=4)
    assert [len(proof) for proof in built] == [len(proof) for proof in proofs_of(case)]
    for ours, theirs, unique in zip(built, proofs_of(case), case["unique"], strict=True):
        assert ours == theirs or not unique


@pytest.mark.parametrize("vector", VECTORS["polynomials"])
def test_polynomial_vectors(vector):
    x, y = np.array([vector["x"]]), np.array([vector["y"]], np.uint32)
    modulus = toploc._injective_modulus(x)
    folded = (x % modulus[:, None]).astype(np.uint32)
    coefficients = toploc._interpolate(folded, y)
    assert modulus.tolist() == [vector["modulus"]] and coefficients[0].tolist() == vector["coeffs"]
    assert toploc._evaluate(coefficients, *toploc._powers(folded))[0].tolist() == vector["eval_at_x_mod"]


def oracle_proof(block, topk):
    bits = block.view(np.uint16).reshape(-1).tolist()
    indices = sorted(range(len(bits)), key=lambda i: (-(bits[i] & 0x7FFF), i))[:topk]
    modulus = P
    while len({i % modulus for i in indices}) < len(indices):
        modulus -= 1
    points = [(i % modulus, bits[i]) for i in indices]
    total = [0] * len(points)
    for i, (x, y) in enumerate(points):
        term, scale = [1], 1
        for j, (other, _) in enumerate(points):
            if j != i:
                term = [(a - other * b) % P for a, b in zip([0, *term], [*term, 0], strict=True)]
                scale = scale * (x - other) % P
        for degree, coefficient in enumerate(term):
            total[degree] = (total[degree] + y * pow(scale, -1, P) * coefficient) % P
    return struct.pack(f">{1 + len(total)}H", modulus, *total)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    rows=st.integers(1, 9), dim=st.sampled_from([1, 3, 16, 40]), topk=st.integers(1, 33), seed=st.integers(0, 2**32 - 1)
)
def test_build_equals_the_integer_oracle(rows, dim, topk, seed):
    # Mutations seen to fail here: tie order, the a_0 that divides out, a modulus search that stops one early.
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, dim)) * rng.choice([0, 1, 1e-3], (rows, dim))  # zeros tie
    block = values.astype(np.float32).astype(jnp.bfloat16)
    expected = [oracle_proof(block[start : start + 4], topk) for start in range(0, rows, 4)]
    assert proofs_lib.build(block, chunk=4, topk=topk) == expected


def test_float32_rounds_to_nearest_even():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 4096, np.uint32) & np.uint32(0xBFFFFFFF)  # |value| < 2, so finite
    bits[:64] = (bits[:64] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # exact halves
    values = bits.view(np.float32).reshape(4, 1024)

    def nearest_even(value):  # among the two bf16 neighbours, in exact rationals
        low = struct.unpack(">I", struct.pack(">f", value))[0] >> 16
        ends = [fractions.Fraction(struct.unpack(">f", struct.pack(">I", b << 16))[0]) for b in (low, low + 1)]
        below, above = (abs(fractions.Fraction(value) - end) for end in ends)
        return low + (above < below or (above == below and low % 2))

    expected = np.array([nearest_even(float(value)) for value in values.reshape(-1)], np.uint16)
    rounded = expected.view(jnp.bfloat16).reshape(4, 1024)
    assert proofs_lib.build(values) == proofs_lib.build(rounded) == proofs_lib.build(jnp.asarray(rounded))


def test_batch_equals_one_by_one():
    sequences = [normal((rows, 24), rows) for rows in (1, 0, 40, 3, 64, 5)]  # tails of 24, 72, 120 and 128 values
    built = [proofs_lib.build(sequence) for sequence in sequences]
    assert [[len(p) for p in proofs] for proofs in built] == [[50], [], [258, 258], [146], [258, 258], [242]]
    built[2][0] = built[4][0]  # another sequence's
    batch = toploc.verify_proofs_batch(sequences, built)
    assert batch == [proofs_lib.verify(*pair) for pair in zip(sequences, built, strict=True)]
    reasons = [[result.reason for result in results] for results in batch]
    assert reasons == [["ok"], ["empty"], ["exponent", "ok"], ["ok"], ["ok", "ok"], ["ok"]]


@pytest.mark.parametrize("dim", [2, 40, 300])
def test_top_values_equal_a_full_sort_whatever_came_before(dim):
    # Mutations seen to fail here: a guess that is trusted when it leaves fewer than k; ties kept to the last; ranks
    # counted over all chunks instead of per chunk.
    rng = np.random.default_rng(dim)
    scales = np.array([1, 1, 1e-3, 1e3, 1, 0, 1, 30, 1, 1e-38])  # guesses far too low, far too high, and all alike
    blocks = [(scale * rng.standard_normal((rng.integers(1, 33), dim))).astype(jnp.bfloat16) for scale in scales]
    blocks += [np.full((32, dim), 2.0, jnp.bfloat16), np.round(4 * normal((32, dim))).astype(jnp.bfloat16)]
    for rounds in (blocks, blocks[::-1], [blocks[7]] * 3):
        flat = [block.view(np.uint16).reshape(-1) for block in rounds]
        for bits_M, (indices, bits) in zip(flat, toploc._top_values(flat, 128), strict=True):
            ordered = sorted(range(len(bits_M)), key=lambda i, bits_M=bits_M: (-(int(bits_M[i]) & 0x7FFF), i))
            expected = sorted(ordered[:128])
            assert indices.tolist() == expected and bits.tolist() == [int(bits_M[i]) for i in expected]


def test_more_chunks_than_one_batch():
    sequence = normal((300, 8), 4)
    proofs = proofs_lib.build(sequence, chunk=1, topk=5)
    assert len(proofs) == 300 > 2 * toploc.BATCH
    assert proofs[150] == proofs_lib.build(sequence[150:151], topk=5)[0]
    assert all(result.accepted for result in proofs_lib.verify(sequence, proofs, chunk=1, topk=5))


@pytest.mark.parametrize("way", ["cpu", "default"])
def test_device_topk_equals_the_host_path(monkeypatch, way):
    """Both ways, on any platform that the tests run on."""
    # Mutations seen to fail here: 14 passes for 15; ties kept to the last instead of the first.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda magnitude, **ways: ways[way](magnitude))
    rng = np.random.default_rng(2)
    values = rng.standard_normal((14, 32 * 40)).astype(np.float32)
    values[1] = np.round(values[1])  # a handful of magnitudes: ties everywhere
    values[2] = 0
    values[3, 3 * 40 :] = 0  # a chunk of three rows, zero after them: 120 values < topk
    values[4] *= 1e-40  # subnormal
    values[5, :2] = [np.inf, -3e38]
    values = values.astype(jnp.bfloat16)
    values[6:] = rng.integers(0x3F80, 0x3FC0, (8, 1280), np.uint16).view(jnp.bfloat16)  # thresholds of either parity
    indices, bits = map(np.asarray, jax.jit(lambda bits: toploc.topk_indices(bits, 128))(values.view(np.uint16)))
    for row in range(14):
        ((host_indices, host_bits),) = toploc._top_values([values[row].view(np.uint16)], 128)
        order = np.argsort(indices[row])
        assert np.array_equal(indices[row, order], host_indices) and np.array_equal(bits[row, order], host_bits)
    assert toploc.encode(list(zip(indices[:2], bits[:2], strict=True))) == proofs_lib.build(values[:2].reshape(64, 40))


@pytest.mark.parametrize("dim", [40, 300])
def test_proofs_of_windows_on_the_device_are_those_of_their_rows(dim):
    """Sequences of every kind that one call can leave: one window, a tail, both, neither, a tail cut by the host."""

    def encode(sizes, *tops):  # without the zeros after the rows of a short window
        tops = zip(sizes, *tops, strict=True)
        return toploc.encode([(i[i < size * dim], bits[i < size * dim]) for size, i, bits in tops])

    rows = normal((5, 80, dim), 4)
    ring, write = proof_window.create(5, dim), jax.jit(proof_window.write)
    before, after = np.array([20, 30, 31, 3, 33]), np.array([32, 39, 32, 9, 64])
    for row in range(64):
        slots = jnp.full((5,), row)
        ring = write(ring, rows[:, row], slots, slots < after)
    there, window, count = proof_window.finished(before, after, np.array([True, True, False, False, False]))
    assert there.tolist() == [[True, False], [True, True], [True, False], [False, False], [True, False]]
    indices, bits = map(np.asarray, jax.jit(proof_window.reduce)(ring, there, window, count))
    sizes = [32, 32, 7, 32, 32]
    expected = [rows[0, :32], rows[1, :32], rows[1, 32:39], rows[2, :32], rows[4, 32:64]]
    got = encode(sizes, indices[there], bits[there])
    assert got == [proofs_lib.build(block)[0] for block in expected]
    assert not indices[~np.asarray(there)].any() and not bits[~np.asarray(there)].any()
    # The host ends sequence 4 after 35 rows, and sequence 1 after 33; the device has written more rows after them.
    tops = map(np.asarray, proof_window.top_values(ring, np.array([4, 1]), np.array([1, 1]), np.array([3, 1])))
    got = encode([3, 1], *tops)
    assert got == [proofs_lib.build(rows[4, 32:35])[0], proofs_lib.build(rows[1, 32:33])[0]]


def test_join_and_split():
    sequence = normal((70, 2))
    proofs = proofs_lib.build(sequence)
    data = b"".join(proofs)
    assert toploc.split(data, 70, 2) == proofs and [len(p) for p in proofs] == [130, 130, 26]
    assert toploc.split(b"", 0, 2) == []
    for bad in (data[:-1], data + b"\0", b"", None, "text"):
        reason = toploc.split(bad, 70, 2)
        assert reason.startswith("length: ")
        assert {result.reason for result in proofs_lib.verify(sequence, reason)} == {"count"}


@pytest.mark.parametrize("thresholds", [toploc.PAPER, toploc.LOOSEST])
def test_honest_noise_passes_and_another_model_does_not(thresholds):
    sequence = normal((64, 512), 5)
    noise = 1 + 0.01 * np.random.default_rng(6).standard_normal(sequence.shape)
    proofs = proofs_lib.build((sequence.astype(np.float32) * noise).astype(jnp.bfloat16))
    assert all(result.accepted for result in proofs_lib.verify(sequence, proofs, thresholds=thresholds))
    other = proofs_lib.verify(normal((64, 512), 7), proofs, thresholds=thresholds)
    assert {result.reason for result in other} == {"exponent"}


@pytest.mark.parametrize(("num_values", "most"), [(128, 8), (64, 4)])
def test_as_many_signs_may_differ_as_the_thresholds_allow(num_values, most):
    """8 of 128, and in proportion for a shorter proof; one more, or all, are rejected."""
    block = normal((1, num_values), 3)  # all values are in the proof
    for num_flipped, reason in ((most, "ok"), (most + 1, "sign"), (num_values, "sign")):
        flipped = block.copy()
        flipped[0, :num_flipped] *= -1
        result = verify_one(block, proofs_lib.build(flipped)[0])
        assert (result.reason, result.sign_mismatches, result.exp_mismatches) == (reason, num_flipped, 0)


def test_wrong_mantissas_are_refused():
    block = normal((2, 64))  # all 128 values are in the proof, so only mantissas can differ
    (proof,) = proofs_lib.build((block.view(np.uint16) ^ 0x60).view(jnp.bfloat16))
    result = verify_one(block, proof)
    assert (result.reason, result.exp_mismatches) == ("mantissa", 0) and result.mantissa_median >= 32


def test_statistics_of_a_hand_made_comparison():
    def bits(sign, exponent, mantissa):
        return sign << 15 | exponent << 7 | mantissa

    own = np.array([[bits(0, 100, 10), bits(1, 101, 20), bits(0, 102, 30), bits(1, 103, 40)]], np.uint32)
    claimed = np.array([[bits(0, 100, 13), bits(0, 101, 20), bits(0, 99, 127), bits(1, 103, 35)]], np.uint32)
    loose = toploc.Thresholds(exp_mismatches=32, mantissa_mean=8 / 3, mantissa_median=3, sign_mismatches=32)
    (result,) = toploc._compare(claimed, own, loose)  # |3|, |0|, -, |5|
    assert result == toploc.ProofResult(True, "ok", 1, pytest.approx(8 / 3), 3, 1)
    claimed[0, 1] = bits(0, 90, 20)  # |3| and |5| are left: the reference takes the upper median
    (result,) = toploc._compare(claimed, own, toploc.LOOSEST)
    assert result == toploc.ProofResult(False, "exponent", 2, 4, 5, 0)
    for field, tighter, reason in [
        ("exp_mismatches", 63, "exponent"),
        ("mantissa_mean", 3.9, "mantissa"),
        ("mantissa_median", 4, "mantissa"),
    ]:
        bounds = toploc.Thresholds(64, 4, 5, 0)
        assert toploc._compare(claimed, own, bounds)[0].accepted
        bounds = dataclasses.replace(bounds, **{field: tighter})
        assert toploc._compare(claimed, own, bounds)[0].reason == reason


def test_forgery_passes_the_reference_rule_and_is_refused_here():
    """One typical magnitude as a constant polynomial: no forward pass, and the reference accepts it."""
    forged = struct.pack(">129H", P, 0x4038, *[0] * 127)  # 2.875, near the top 128 of 32 x 512 normal values
    for seed in range(8):
        sequence = normal((32, 512), seed)
        ((_, bits),) = toploc._top_values([sequence.view(np.uint16).reshape(-1)], 128)
        # The reference's rule: f(index) = 0x4038 everywhere, the sign ignored, at most 60 exponents off.
        agree = (bits >> 7) & 0xFF == (0x4038 >> 7) & 0xFF
        mantissa = np.abs((bits[agree] & 0x7F).astype(int) - (0x4038 & 0x7F))
        assert 128 - agree.sum() <= 60 and mantissa.mean() <= 40 and np.median(mantissa) <= 40
        assert verify_one(sequence, forged).reason == "low_entropy"
        # A second line: the signs give it away even if it were dressed up.
        claimed = np.full((1, 128), 0x4038, np.uint32)
        (result,) = toploc._compare(claimed, bits[None].astype(np.uint32), toploc.LOOSEST)
        assert result.reason == "sign" and result.sign_mismatches > 30


def test_nearly_constant_polynomials_are_refused():
    sequence = normal((32, 64))
    for coefficients in ([0] * 128, [5] * 128, [7, 9] * 64, list(range(1, 96)) + [0] * 33):
        assert verify_one(sequence, struct.pack(">129H", P, *coefficients)).reason == "low_entropy"
        assert toploc.malformed(struct.pack(">129H", P, *coefficients), 32, 64).startswith("low_entropy: proof 0")


@pytest.mark.parametrize(("rows", "dim"), [(1, 32), (31, 64), (32, 64), (70, 16), (96, 2100)])
def test_the_form_of_proofs_is_judged_without_hidden_states(rows, dim):
    """Whole chunks and a rest: honest proofs pass; bytes that no chunk can give are refused by the number of their proof."""
    proofs = proofs_lib.build(normal((rows, dim), rows))
    assert toploc.malformed(b"".join(proofs), rows, dim) is None
    for n, proof in enumerate(proofs):
        for forged, said in (
            (bytes(len(proof)), f"modulus: proof {n} "),
            (proof[:2] + b"\xff\xff" + proof[4:], f"coefficient: proof {n} "),
            (proof[:2] + bytes(len(proof) - 2), f"low_entropy: proof {n} "),
            (proof[:-1], "length: "),
        ):
            assert toploc.malformed(b"".join([*proofs[:n], forged, *proofs[n + 1 :]]), rows, dim).startswith(said)
    folded = struct.pack(">H", 40000) + proofs[0][2:]  # a smaller modulus is honest where the indices exceed p only
    refused = toploc.malformed(b"".join([folded, *proofs[1:]]), rows, dim)
    assert refused is None if min(rows, 32) * dim > P else refused.startswith("modulus: proof 0 ")


@pytest.mark.parametrize("dim", [256, 1024])
def test_massive_channels_pass_for_one_another_at_loose_limits_only(dim):
    """Four channels hold the 128 largest values, as in real models; their places and means need no forward pass of this text."""
    rng = np.random.default_rng(dim)
    mean_4 = np.array([60, -45, 90, -70.0])
    columns, passed = rng.choice(dim, 4, replace=False), {"loosest": 0, "paper": 0, "honest": 0}
    places = np.add.outer(np.arange(32) * dim, np.sort(columns)).reshape(-1)
    guess = np.tile(mean_4[np.argsort(columns)], 32).astype(jnp.bfloat16).view(np.uint16)
    (forged,) = toploc.encode([(places, guess)])
    assert toploc.malformed(forged, 32, dim) is None  # of full entropy
    for _ in range(40):
        sequence = rng.standard_normal((32, dim))
        sequence[:, columns] = mean_4 * (1 + 0.15 * rng.standard_normal((32, 4)))
        sequence = sequence.astype(jnp.bfloat16)
        for name, limits in (("loosest", toploc.LOOSEST), ("paper", toploc.PAPER)):
            passed[name] += verify_one(sequence, forged, thresholds=limits).accepted
        honest = proofs_lib.build(sequence)[0]
        passed["honest"] += verify_one(sequence, honest, thresholds=toploc.PAPER).accepted
    assert passed == {"loosest": 40, "paper": 0, "honest": 40}


def test_constant_and_non_finite_activations_are_refused():
    for name in ("zeros", "constant"):
        assert verify_one(hidden(name), proofs_of(CASES[name])[0]).reason == "constant"
    for name in ("inf_nan", "nan_above_field"):
        assert verify_one(hidden(name), proofs_of(CASES[name])[0]).reason == "non_finite"
        assert proofs_lib.build(hidden(name)) == proofs_lib.build(hidden(name).astype(np.float32)) == [b""]


def test_a_bad_chunk_has_a_null_proof_and_the_chunks_around_it_have_theirs():
    good, bad = normal((70, 16), 8), normal((70, 16), 9)
    bad[40, 3] = np.nan
    built = proofs_lib.build(bad)
    assert built == [proofs_lib.build(bad[:32])[0], b"", proofs_lib.build(bad[64:])[0]]
    assert [result.reason for result in proofs_lib.verify(normal((70, 16), 9), built)] == ["ok", "length", "ok"]
    assert [result.reason for result in proofs_lib.verify(bad, proofs_lib.build(good))][1] == "non_finite"
    assert toploc.split(b"".join(built), 70, 16).startswith("length: ")
    tops = map(np.asarray, toploc.topk_indices(jnp.asarray(bad[:64].reshape(2, 512).view(np.uint16)), 128))
    assert toploc.encode(list(zip(*tops, strict=True))) == built[:2]


def test_indices_that_no_modulus_keeps_apart_have_no_proof():
    """Their differences are all the numbers of 2^15 + 1 .. p, each a modulus that would fold two onto one."""
    clashing = np.array([*range(256), *range(33024, 33024 + 128 * 256, 256)])
    bits = np.full(384, 0x3F80)
    null, proof = toploc.encode([(clashing, bits), (np.arange(384), bits)])
    assert null == b"" and [proof] == toploc.encode([(np.arange(384), bits)])


def test_own_input_of_another_kind_is_an_error():
    for array in (np.zeros((2, 4), np.float16), np.zeros((2, 4)), np.zeros(4, np.float32)):
        with pytest.raises(ValueError, match=r"must be \[T, D\] in bfloat16"):
            proofs_lib.build(array)


def test_every_reason_for_a_malformed_proof():
    sequence = normal((32, 64))
    good = proofs_lib.build(sequence)[0]
    assert verify_one(sequence, good).reason == "ok"
    malformed = {
        "length": [b"", good[:-1], good[:-2], good + b"\0", good + b"\0\0", good[:4], None, 3, "x" * 258, [good]],
        # 2048 indices are distinct unfolded, so only m = p is honest
        "modulus": [struct.pack(">H", m) + good[2:] for m in (0, 1, 2**15, 40000, P - 1, P + 1, 65535)],
        "coefficient": [good[:-2] + struct.pack(">H", c) for c in (P, 65535)],
    }
    for reason, proofs in malformed.items():
        for proof in proofs:
            result = verify_one(sequence, proof)
            assert not result.accepted and result.reason == reason
            assert result.exp_mismatches == 128 and result.mantissa_mean == 2.0**64
    for proofs in ([], [good, good], None, 7, good, {0: good}):
        assert [result.reason for result in proofs_lib.verify(sequence, proofs)] == ["count"]
    assert [result.reason for result in proofs_lib.verify(sequence[:0], [])] == ["empty"]


def test_a_folding_modulus_is_bounded_where_indices_exceed_the_field():
    sequence = normal((32, 5120))
    good = proofs_lib.build(sequence)[0]
    for modulus, reason in [(2**15, "modulus"), (P + 1, "modulus"), (0, "modulus"), (2**15 + 1, "exponent")]:
        assert verify_one(sequence, struct.pack(">H", modulus) + good[2:]).reason == reason


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("TOPLOC_PYTHON"), reason="set TOPLOC_PYTHON to a Python that imports toploc 0.1.6"
)
@pytest.mark.parametrize("dim", [1024, 5120])
def test_proofs_are_exchanged_with_the_published_package(dim):
    sequence = normal((256, dim), dim)
    ours = proofs_lib.build(sequence)
    theirs = toploc_reference.run(os.environ["TOPLOC_PYTHON"], sequence, ours, repeat=1)
    proofs = [bytes.fromhex(proof) for proof in theirs["proofs"]]
    bits = sequence.view(np.uint16) & 0x7FFF
    for n, result in enumerate(proofs_lib.verify(sequence, proofs)):
        ordered = np.sort(bits[32 * n : 32 * n + 32].reshape(-1))
        if ordered[-128] > ordered[-129]:  # no tie at the boundary: nothing is left to choose
            assert proofs[n] == ours[n]
        # At most 5 of 128 picks differ for ties (measured over 40 chunks), and their mantissas hardly.
        assert result.accepted and result.exp_mismatches <= 5 and result.mantissa_mean <= 1
        assert theirs["view"][n][0] <= 5 and theirs["view"][n][1] <= 1
