"""Rollouts: a file reads back as it was written, and an invalid one is rejected with a reason."""

import dataclasses
import hashlib
import io
import stat
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import x25519

from inference.rollouts import parquet, parquet_footer
from inference.rollouts import rollout as rollout_lib
from tests.support.rollouts import KEY, assert_equal, make, table_bytes

INTS, FLOATS, PARTS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.map_(pa.string(), pa.float64())


def parquet_with(**columns):
    """A file of one good row with some columns replaced: {name: (values, type)}."""
    table = pq.read_table(io.BytesIO(parquet.to_bytes([make()])))
    for name, (values, dtype) in columns.items():
        position = table.schema.get_field_index(name)
        table = table.set_column(position, name, pa.array(values, dtype))
    return table_bytes(table)


def test_round_trip_of_several_rows():
    one_turn = make(1, sampled_mask=np.arange(10) >= 4, logprobs=np.where(np.arange(10) >= 4, -0.5, 0).astype("f4"))
    rollouts = [rollout_lib.sign(make(0), KEY), one_turn, make(2, rewards={}, proofs=b"", finish_reason="length")]
    calls = np.array([[3, 6], [8, 9], [9, 10]], np.int32)  # the last continues a completion
    judged = dict(call_limits=np.array([8, 1, 8], np.int32), draw=4, trains=False)
    judged |= dict(
        versions=np.full(10, 7, np.int32), prefix_versions=np.array([[0, 1, 5], [2, 4, 5], [2, 7, 6]], np.int32)
    )
    rollouts.append(make(3, calls=calls, branch=1, num_branches=2, env_digest="ab" * 32, **judged))
    odd = dict(temperature=0.0, reward=-1e308, rewards={"é/": 5e-324}, tokens=np.full(10, 2**31 - 1, np.int32))
    rollouts.append(
        make(4, **odd, sampled_mask=np.arange(10) % 3 == 1, logprobs=np.float32(-0.1) * (np.arange(10) % 3 == 1))
    )
    back = parquet.from_bytes(parquet.to_bytes(rollouts))
    assert len(back) == 5 and [one.spans for one in back[2:4]] == [[(3, 10)], [(3, 6), (8, 9), (9, 10)]]
    fields = {
        "calls": None,
        "branch": 0,
        "num_branches": 1,
        "env_digest": "",
        "call_limits": None,
        "draw": 0,
        "trains": True,
        "prefix_versions": None,
    }
    digests = [rollout_lib.digest(dataclasses.replace(back[3], **{name: fields[name]})) for name in fields]
    assert len({rollout_lib.digest(back[3]), *digests}) == 9
    assert back[3].prefix_runs(2) == [(4, 5), (7, 6)] and back[3].prefix_runs(1) == [] and back[3].oldest_version == 5
    for before, after in zip(rollouts, back, strict=True):
        assert_equal(before, after)
    assert rollout_lib.signature_ok(back[0]) and not rollout_lib.signature_ok(back[1])
    assert parquet.from_bytes(parquet.to_bytes([])) == []


def test_some_rows_of_a_file_keep_nothing_of_the_others_in_memory():
    """Attack: one leased group in a file of thousands kept the whole file in memory until a batch took the group."""
    fields = {"calls": np.array([[3, 6], [8, 10]], np.int32), "call_limits": np.array([8, 8], np.int32)}
    rows = parquet.decode(parquet.to_bytes([rollout_lib.sign(make(20, **fields), KEY) for _ in range(500)]))
    assert rows.take(range(500)) is rows
    for numbers in ([7, 8], [9, 3], [499]):
        taken = rows.take(numbers)
        assert taken.table.equals(rows.table.take(numbers))
        for number, rollout in zip(numbers, taken.rollouts, strict=True):
            assert_equal(rollout, rows.rollouts[number])
            arrays = [value for value in vars(rollout).values() if isinstance(value, np.ndarray)]
            assert len(arrays) == 6 and all(array.base is None for array in arrays)
        assert 0 < taken.table.get_total_buffer_size() < rows.table.get_total_buffer_size() / 100


def test_numpy_scalars_are_numbers():
    rollout = make(reward=np.float32(0.1), step=np.int64(4), seed=np.uint32(7), rewards={"a": np.float64(1)})
    (after,) = parquet.from_bytes(parquet.to_bytes([rollout]))
    assert rollout_lib.digest(after) == rollout_lib.digest(rollout) and after.reward == float(np.float32(0.1))


def test_columns_that_intellect_2_readers_know():
    rollout = make()
    table = pq.read_table(io.BytesIO(parquet.to_bytes([rollout])))
    row = table.to_pylist()[0]
    assert row["input_tokens"] == rollout.tokens[:3].tolist()
    assert row["output_tokens"] == rollout.tokens[3:].tolist()  # the tool result in the gap included
    assert row["output_logprobs"] == rollout.logprobs[3:].tolist() and row["input_logprobs"] == [0, 0, 0]
    assert (row["advantages"], row["length_penalties"], row["target_lengths"]) == (0, 0, -1)
    assert row["rewards"] == 0.1 and row["task_rewards"] == np.float32(0.1)
    assert (row["task_type"], row["problem_id"], row["step"]) == ("arithmetic", "arithmetic/12", 9)
    theirs = {"input_tokens": INTS, "output_tokens": INTS, "proofs": pa.binary()}
    theirs |= {"advantages": pa.float32(), "step": pa.int32(), "target_lengths": pa.int32()}
    assert all(table.schema.field(name).type == dtype for name, dtype in theirs.items())


def test_a_worker_cannot_hand_in_an_advantage():
    data = parquet_with(advantages=([99.0], pa.float32()), task_rewards=([5.0], pa.float32()))
    (after,) = parquet.from_bytes(data)
    assert_equal(after, make())


def test_write_creates_the_parent_and_reads_back(tmp_path):
    path = tmp_path / "rollouts" / "step_3" / "a.parquet"
    parquet.write(path, [make()])  # by sharding/system/atomic_file.py
    assert_equal(parquet.read(path)[0], make())
    assert [p.name for p in path.parent.iterdir()] == ["a.parquet"]


def array(name, position, value):
    changed = getattr(make(), name).copy()
    changed[position] = value
    return {name: changed}


BROKEN = [
    (dict(tokens=np.zeros(9, np.int32)), "sampled_mask: must have one entry per token"),
    (dict(tokens=np.zeros(10, np.int64)), "tokens: must be a numpy int32"),
    (dict(tokens=[1, 2]), "tokens: must be a numpy int32"),
    (dict(tokens=np.zeros((10, 1), np.int32)), "tokens: must be a numpy int32"),
    (array("tokens", 9, -1), "tokens: must be >= 0, got -1"),
    (dict(logprobs=np.zeros(11, np.float32)), "logprobs: must have one entry per token"),
    (array("logprobs", 4, np.nan), "logprobs: must be finite and <= 1e-06, got nan at position 4"),
    (array("logprobs", 4, -np.inf), "logprobs: must be finite"),
    (array("logprobs", 4, 1e-5), "logprobs: must be finite and <= 1e-06"),
    (array("logprobs", 0, -1), "logprobs: must be 0 where the token was not sampled"),
    (dict(sampled_mask=np.zeros(10, bool)), "sampled_mask: must have at least one True"),
    (array("sampled_mask", 0, True), "sampled_mask: position 0"),
    (dict(versions=np.zeros(3, np.int32)), "versions: must have one entry per token"),
    (array("versions", 2, -1), "versions: must be >= 0"),
    (dict(temperature=float("nan")), "temperature: must be finite"),
    (dict(temperature=-1.0), "temperature: must be finite and >= 0"),
    (dict(seed=2**32), "seed: must be an integer in"),
    (dict(seed=True), "seed: must be an integer in"),
    (dict(seed=10**5000), "seed: must be an integer in"),
    (dict(step=-1), "step: must be"),
    (dict(sample=1.0), "sample: must be"),
    (dict(task=None), "task: must be"),
    (dict(task=rollout_lib.TaskRef("", 0, 0, 0)), "task.env: must be"),
    (dict(task=rollout_lib.TaskRef("a\ud800", 0, 0, 0)), "task.env: must be"),
    (dict(task=rollout_lib.TaskRef("a", -1, 0, 0)), "task.index: must be"),
    (dict(reward=float("inf")), "reward: must be finite"),
    (dict(reward="1"), "reward: must be finite"),
    (dict(reward=10**400), "reward: must be finite"),
    (dict(rewards={"a": float("nan")}), "rewards: must map"),
    (dict(rewards={1: 1.0}), "rewards: must map"),
    (dict(rewards={str(i): 1.0 for i in range(65)}), "rewards: must be a dict of at most 64"),
    (dict(rewards=None), "rewards: must be a dict"),
    (dict(finish_reason="tired"), "finish_reason: must be one of"),
    (dict(finish_reason=["stop"]), "finish_reason: must be one of"),
    (dict(proofs=None), "proofs: must be"),
    (dict(worker="zz" * 32), "worker: must be"),
    (dict(worker="AB" * 32), "worker: must be"),  # one key, one spelling
    (dict(branch=1), "branch: must be less than num_branches"),
    (dict(num_branches=0), "branch: must be less than num_branches"),
    (dict(env_digest="x"), "env_digest: must be a SHA-256"),
    (dict(trains=1), "trains: must be True or False"),
    (dict(draw=-1), "draw: must be an integer in"),
    (dict(call_limits=np.array([1, 2], np.int32)), "call_limits: must be None or a numpy int32 [1], one per call"),
    (dict(call_limits=np.array([0], np.int32)), "call_limits: must be > 0"),
    (dict(calls=np.array([3, 10], np.int32)), "calls: must be None or a numpy int32 [N, 2]"),
    (dict(calls=np.zeros((0, 2), np.int32)), "calls: must have 1 to 4096 rows, got 0"),
    *(
        (dict(calls=np.array(calls, np.int32)), "calls: must be the sampled tokens")
        for calls in ([[3, 10]], [[3, 6]], [[8, 10], [3, 6]], [[3, 6], [8, 11]], [[3, 6], [8, 8], [8, 10]])
    ),
    *(
        (dict(prefix_versions=np.array(rows, dtype), versions=np.full(10, 5, np.int32)), "prefix_versions: must")
        for rows, dtype in (
            ([1, 2, 3], "i4"),
            (np.zeros((0, 3)), "i4"),
            ([[0, 2, 3]], "i8"),
            ([[0, 3, 4]], "i4"),  # no token is left to prefill
            ([[0, 0, 4]], "i4"),
            ([[1, 2, 4]], "i4"),  # there is one call
            ([[-1, 2, 4]], "i4"),
            ([[0, 2, 5]], "i4"),  # the version of the rest
            ([[0, 2, -1]], "i4"),
            ([[0, 1, 4], [0, 2, 4]], "i4"),
            ([[0, 2, 3], [0, 1, 4]], "i4"),
            ([[0, 2, 3], [0, 2, 4]], "i4"),
        )
    ),
    (dict(calls=np.array([[3, 6], [8, 10]], np.int32), server="ab" * 32, server_signature=bytes(64)), "server_sig"),
    *((dict(signature=bytes(size)), "signature: must be") for size in (5, 32, 65, 80, 64 + 17 * 32)),
]


@pytest.mark.parametrize(("changes", "reason"), BROKEN)
def test_each_rule_names_its_field(changes, reason):
    bad = make(**changes)
    assert rollout_lib.validate(bad).startswith(reason)
    assert rollout_lib.signature_ok(bad) is False
    with pytest.raises(ValueError, match="rollout 1 cannot be written"):
        parquet.to_bytes([make(), bad])


def test_validate_is_total():
    assert rollout_lib.validate(None).startswith("rollout: must be a Rollout")
    junk = [None, 0, -1, 2**70, 0.5, float("nan"), "", "x", b"", [], {}, object]
    junk += [np.zeros(0), np.array(3), np.array(["a"])]
    for field in dataclasses.fields(rollout_lib.Rollout):
        for value in junk:
            reason = rollout_lib.validate(make(**{field.name: value}))
            assert reason is None or ": " in reason
    for field in dataclasses.fields(rollout_lib.TaskRef):
        for value in junk:
            task = dataclasses.replace(make().task, **{field.name: value})
            assert (rollout_lib.validate(make(task=task)) or "task.").startswith("task.")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (dict(step=([9], pa.int64())), "column 22 must be step: int32, got 'step': int64"),
        (dict(input_tokens=([[1, 2, 3]], pa.list_(pa.int64()))), "column 0 must be input_tokens"),
        (dict(input_tokens=([None], INTS)), "column input_tokens must not contain nulls"),
        (dict(input_tokens=([[1, None, 3]], INTS)), "column input_tokens must not contain nulls"),
        (dict(rewards=([None], pa.float64())), "column rewards must not contain nulls"),
        (dict(rewards=([float("nan")], pa.float64())), "row 0: reward: must be finite"),
        (dict(input_tokens=([[1, 2]], INTS)), "row 0: sampled_mask: must have one entry per token"),
        (dict(output_logprobs=([[0.5] * 7], FLOATS)), "row 0: logprobs: must be finite and <="),
        (dict(finish_reason=(["tired"], pa.string())), "row 0: finish_reason: must be one of"),
        (dict(reward_parts=([[("a", 1.0), ("a", 2.0)]], PARTS)), "row 0: reward_parts: names must differ"),
        (dict(input_tokens=([[1] * 4], INTS), output_tokens=([[1] * 6], INTS)), "row 0: input_tokens: must end where"),
        (
            dict(input_logprobs=([[0] * 2], FLOATS), output_logprobs=([[0] * 8], FLOATS)),
            "row 0: input_logprobs: must have",
        ),
    ],
)
def test_each_refusal_names_its_column(columns, message):
    with pytest.raises(ValueError, match="rollout file") as error:
        parquet.from_bytes(parquet_with(**columns))
    assert message in str(error.value)


def test_other_layouts_are_refused():
    table = pq.read_table(io.BytesIO(parquet.to_bytes([make()])))
    for options in (
        {},
        {"compression": "snappy", "data_page_version": "2.0"},
        {"compression": "none", "data_page_size": 1},
    ):
        (after,) = parquet.from_bytes(table_bytes(table, **options))  # another writer's options are fine
        assert_equal(after, make())
    for data, message in [
        (table_bytes(table.drop_columns(["signature"])), "column 36 must be signature: binary, got nothing"),
        (
            table_bytes(table.drop_columns(["server_signature"])),
            "29 must be server_signature: binary, got 'env_digest'",
        ),
        (table_bytes(table.append_column("extra", pa.array([1]))), "column 'extra' is not in the schema"),
        (table_bytes(table.select(table.schema.names[::-1])), "column 0 must be input_tokens"),
        (table_bytes(table, use_dictionary=True), "only plain encoding"),
        (table_bytes(table, compression="gzip"), "only plain encoding"),
        (table_bytes(table, column_encoding={"step": "DELTA_BINARY_PACKED"}), "a page in encoding 5"),
        (b"", "not readable as Parquet"),
        (b"PAR1" * 9, "not readable as Parquet"),
        ("text", "must be bytes, got str"),
    ]:
        with pytest.raises(ValueError, match=message):
            parquet.from_bytes(data)


def test_sizes_are_bounded(monkeypatch, tmp_path):
    bomb = make(proofs=bytes(2**21))  # compresses to nothing
    data = parquet.to_bytes([bomb])
    assert len(data) < 2**14
    (tmp_path / "a.parquet").write_bytes(data)
    for limit, value, message in [
        ("MAX_DECODED_BYTES", 2**21, "decoded bytes, at most 2097152 are read"),
        ("MAX_FILE_BYTES", 1000, "at most 1000 are read"),
        ("MAX_ROWS", 0, "1 rows, at most 0"),
        ("MAX_TOKENS", 9, "tokens: at most 9, got 10"),
        ("MAX_PROOF_BYTES", 100, "proofs: must be at most"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(parquet_footer if hasattr(parquet_footer, limit) else rollout_lib, limit, value)
            with pytest.raises(ValueError, match=message):
                parquet.read(tmp_path / "a.parquet")
    assert_equal(parquet.read(tmp_path / "a.parquet")[0], bomb)


def streams(rng, num_rows, longest):
    """Honest rollouts, as the largest model and the worst compression make them: their own lengths, and zeros otherwise."""
    for sample in range(num_rows):
        T = int(rng.integers(2, longest + 1))
        mask = np.arange(T) >= rng.integers(1, T)
        proofs = bytes(PROOF_BYTES * -(-int(mask.sum()) // PROOF_TOKENS))
        arrays = {"tokens": np.zeros(T, np.int32), "logprobs": np.zeros(T, np.float32)}
        yield make(**arrays, sampled_mask=mask, versions=np.zeros(T, np.int32), proofs=proofs, sample=sample)


PROOF_BYTES, PROOF_TOKENS = 258, 32


@pytest.mark.parametrize("seed", range(12))
def test_sizes_that_no_rollout_has_are_refused_before_they_are_decoded(monkeypatch, seed):
    """Honest files of any shape pass; more rows than are leased, longer streams, or other bytes cost their sender alone."""
    rng = np.random.default_rng(seed)
    num_rows, longest = int(rng.integers(1, 40)), int(2 ** rng.uniform(1, 12))
    honest = list(streams(rng, num_rows, longest))
    total = sum(len(rollout.tokens) for rollout in honest)
    data = parquet.to_bytes(honest)
    assert len(parquet.from_bytes(data, max_rows=num_rows, max_tokens=longest)) == num_rows
    size = int(2 ** rng.uniform(22.5, 24))  # bytes
    more = -(-size // 12)
    bombs = {
        "proofs": parquet_with(proofs=([bytes(size)], pa.binary())),
        "worker": parquet_with(worker=(["x" * size], pa.string())),
        "versions": parquet_with(versions=([np.zeros(more, np.int32)], pa.list_(pa.int32()))),
        "input_logprobs": parquet_with(input_logprobs=([np.zeros(more, np.float32)], pa.list_(pa.float32()))),
        "output_tokens": parquet_with(output_tokens=([np.zeros(more, np.int32)], pa.list_(pa.int32()))),
    }
    monkeypatch.setattr(parquet.pq, "ParquetFile", None)  # nothing is decoded
    with pytest.raises(ValueError, match=f"{num_rows} rows, at most {num_rows - 1} are read"):
        parquet.from_bytes(data, max_rows=num_rows - 1)
    if total > (too_few := total // num_rows // 3) * num_rows * 2 + 2 * num_rows:
        with pytest.raises(ValueError, match="column (in|out)put_tokens has "):
            parquet.from_bytes(data, max_tokens=too_few)
    for name, bomb in bombs.items():
        with pytest.raises(ValueError, match=f"column {name} has .* for 1 rollouts of"):
            parquet.from_bytes(bomb, max_tokens=2**12)


def test_reward_parts_are_counted_before_they_are_objects(monkeypatch):
    """Ten million empty names take 7 kB in a file, and took 1 GB of tuples."""
    N = 200_000
    names = pa.StringArray.from_buffers(N, pa.py_buffer(bytes(4 * (N + 1))), pa.py_buffer(b""))
    parts = pa.MapArray.from_arrays(pa.array([0, N], pa.int32()), names, np.zeros(N))
    data = parquet_with(reward_parts=(parts, PARTS))
    assert len(data) < 12_000
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"column reward_parts has {N} entries in a row"):
        parquet.from_bytes(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * N  # of Python and numpy; a tuple of each would be 56
    parts = {str(i): 1.0 for i in range(rollout_lib.MAX_REWARD_PARTS)}
    data = parquet.to_bytes([make(rewards=parts)] * 3)
    assert len(parquet.from_bytes(data)) == 3
    monkeypatch.setattr(parquet, "MAX_FILE_PARTS", 3 * len(parts) - 1)
    with pytest.raises(ValueError, match="entries in a row and 192 in all"):
        parquet.from_bytes(data)


def test_texts_are_measured_before_they_are_objects():
    """One wide character makes every character of a Python string four bytes."""
    wide = "x" * 2**20 + "\U0001f600"
    for name, limit in {"worker": 64, "finish_reason": 64, "task_type": 1024}.items():
        with pytest.raises(ValueError, match=f"column {name}: must be at most {limit} bytes, got {2**20 + 4}"):
            parquet.from_bytes(parquet_with(**{name: ([wide], pa.string())}))
    with pytest.raises(ValueError, match="column signature: must be at most 576 bytes, got 577"):
        parquet.from_bytes(parquet_with(signature=([bytes(577)], pa.binary())))
    with pytest.raises(ValueError, match="column reward_parts: must be at most 1024 bytes"):
        parquet.from_bytes(parquet_with(reward_parts=([[(wide, 1.0)]], PARTS)))
    longest = make(task=rollout_lib.TaskRef("\U0001f600" * rollout_lib.MAX_NAME, 2**63 - 1, 0, 0))
    assert_equal(parquet.from_bytes(parquet.to_bytes([longest]))[0], longest)


def test_headers_that_end_the_process_elsewhere():
    # pyarrow 26: reading `.compression` of the first, or `.column(...)` of the second, is a C++ terminate.
    table = pq.read_table(io.BytesIO(parquet.to_bytes([make()])))
    data = table_bytes(table, compression="none")
    bad_codec = data.replace(b"\x04step\x15\x00", b"\x04step\x15\x7f")
    bad_size = data.replace(b"\x04step\x15\x00\x16\x02", b"\x04step\x15\x00\x16\x01")
    shared_pages = data.replace(b"\x04step\x15\x00\x16\x02", b"\x04step\x15\x00\x16" + b"\xff" * 9 + b"\x01")
    for bad in (bad_codec, bad_size, shared_pages):
        assert bad != data
        with pytest.raises(ValueError, match="rollout file: "):
            parquet.from_bytes(bad)
    chunk = {3: {4: 0, 5: 0, 7: 0, 9: 4}}
    assert list(parquet_footer.pages(b"", chunk)) == [0]
    for extra in ({1: b"another.file"}, {3: chunk[3] | {11: 4}}):  # a dictionary page moves where pyarrow starts
        with pytest.raises(ValueError, match="only plain encoding"):
            list(parquet_footer.pages(b"", chunk | extra))
    for footer, message in [
        (b"\x1c" * 5000 + b"\x00" * 5000, "a field of kind 12, 16 deep"),  # structs in structs
        (b"\x19" * 5000 + b"\x00" * 5000, "a field of kind 9, 16 deep"),  # lists in lists
        (b"\x1c\x19" * 5000 + b"\x00" * 5000, "a field of kind 12, 16 deep"),  # in turns
        (b"\x19\xfc" + b"\xff" * 9 + b"\x01", "broken footer"),  # 2**63 structs that are not there
        (b"\x18\xff\xff\xff\xff\x0f", "broken footer"),  # a string of 2**32 bytes
        (b"\x16" + b"\xff" * 11, "a number of more than 64 bits"),
        (b"\x1b\x00", "a field of kind 11"),
        (b"\x15\x00\x05\x02\x00", "a field appears twice"),
    ]:
        with pytest.raises(ValueError, match=f"not readable as Parquet: {message}"):
            parquet.from_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    large = bytes(parquet_footer.MAX_FOOTER_BYTES + 1)
    with pytest.raises(ValueError, match=f"{len(large)} bytes of footer, at most {len(large) - 1} are read"):
        parquet.from_bytes(b"PAR1" + large + len(large).to_bytes(4, "little") + b"PAR1")


def test_signature_covers_every_field_but_itself():
    calls = np.array([[3, 5], [5, 6], [8, 10]], np.int32)
    fields = dict(epoch=2, server="ab" * 32, server_signature=bytes(192), calls=calls, branch=1, num_branches=3)
    signed = rollout_lib.sign(make(**fields), KEY)
    assert signed.worker == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"  # RFC 8032 key of 0..31
    assert rollout_lib.signature_ok(signed)
    other = dict(
        tokens=array("tokens", 3, 1001)["tokens"],
        sampled_mask=[],  # as `calls`
        logprobs=array("logprobs", 3, -9)["logprobs"],
        versions=array("versions", 0, 6)["versions"],
        temperature=0.70001,
        seed=1,
        task=[dataclasses.replace(signed.task, **c) for c in ({"env": "b"}, {"index": 1}, {"group": 1}, {"seed": 1})],
        sample=6,
        step=8,
        reward=np.nextafter(0.1, 1),
        rewards=[{"correct": 0.3, "format": -0.1}, {"correct": 0.3}, {"correct": 0.3, "formaT": -0.2}],
        finish_reason="length",
        proofs=signed.proofs + b"\0",
        worker=rollout_lib.WorkerKey.generate().worker,
        routed_experts=np.zeros((9, 1, 1), np.uint8),
        epoch=[0, 1],  # 0 is not digested
        server="cd" * 32,
        server_signature=bytes(191) + b"x",
        env_digest="ef" * 32,
        branch=[0, 2],  # 0 is not digested
        num_branches=2,
        calls=np.array([[3, 4], [4, 6], [8, 10]], np.int32),
        call_limits=[np.array([4, 4, 4], np.int32), np.array([4, 5, 4], np.int32)],
        draw=[1, 2],
        trains=False,
        kept=[],  # as `calls`
        prefix_versions=[np.array([[1, 2, 0]], np.int32), np.array([[1, 3, 0]], np.int32)],
    )
    assert {*other, "signature"} == {field.name for field in dataclasses.fields(rollout_lib.Rollout)}
    for name, values in other.items():
        for value in values if isinstance(values, list) else [values]:
            changed = dataclasses.replace(signed, **{name: value})
            assert rollout_lib.validate(changed) is None and not rollout_lib.signature_ok(changed), name
            assert rollout_lib.digest(changed) != rollout_lib.digest(signed), name
    again = dataclasses.replace(signed, rewards=dict(reversed(signed.rewards.items())), signature=b"")
    assert rollout_lib.digest(again) == rollout_lib.digest(signed)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_one_signature_covers_all_rollouts_and_each_alone(count):
    signed = rollout_lib.sign_all([make(sample=number) for number in range(count)], KEY)
    paths = {rollout.signature[64:] for rollout in signed}
    assert len({rollout.signature[:64] for rollout in signed}) == 1 and len(paths) == count
    assert {len(path) for path in paths} <= {32 * depth for depth in (count.bit_length() - 1, (count - 1).bit_length())}
    for number, rollout in enumerate(parquet.from_bytes(parquet.to_bytes(signed))):
        assert rollout_lib.signature_ok(rollout)
        other = signed[number - 1] if count > 1 else make(9)
        assert not rollout_lib.signature_ok(dataclasses.replace(rollout, signature=other.signature))
        assert not rollout_lib.signature_ok(dataclasses.replace(rollout, signature=rollout.signature + bytes(32)))
        assert not rollout_lib.signature_ok(dataclasses.replace(rollout, reward=0.0))
    # By hand: the root over the first two, which the key signed.
    if count == 2:
        root = hashlib.sha256(b"intellax/node/1" + b"".join(sorted(map(rollout_lib.digest, signed)))).digest()
        assert rollout_lib.signed(KEY.worker, signed[0].signature[:64], root)


def test_tables_with_and_without_experts_make_one_file():
    rollouts = [make(sample=number, routed_experts=e) for number, e in enumerate((None, np.zeros((9, 1, 1), np.uint8)))]
    found = parquet.from_bytes(parquet.table_bytes([parquet.to_table([one]) for one in rollouts]))
    assert [*map(rollout_lib.digest, found)] == [*map(rollout_lib.digest, rollouts)]


def test_digest_is_pinned():
    # A change here invalidates every signature in every ledger: it wants a new preimage tag.
    tokens = np.arange(4, dtype=np.int32)
    rollout = make(
        tokens=tokens, sampled_mask=tokens > 1, logprobs=np.array([0, 0, -0.5, -1], np.float32), versions=tokens
    )
    assert rollout_lib.digest(rollout).hex() == "cfe00e7c506fe6cda68798cf898e8a4ef319e28c086a3f3188b5a427eede632b"


def test_signature_ok_is_total():
    signed = rollout_lib.sign(make(), KEY)
    broken = [("signature", value) for value in (b"", bytes(64), b"\xff" * 64, None)]
    broken += [("worker", value) for value in ("", "ff" * 32, "00" * 32)]  # the second is not a point on the curve
    for name, value in (*broken, ("tokens", None)):
        assert rollout_lib.signature_ok(dataclasses.replace(signed, **{name: value})) is False
    assert rollout_lib.signature_ok(None) is False
    with pytest.raises(ValueError, match="cannot be signed: reward"):
        rollout_lib.sign(make(reward=float("nan")), KEY)


def test_key_file(tmp_path):
    path = tmp_path / "keys" / "worker.pem"
    key = rollout_lib.WorkerKey.generate()
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert rollout_lib.WorkerKey.load(path).worker == key.worker
    assert "private" not in repr(key).lower().replace("workerkey", "")
    with pytest.raises(FileExistsError):
        KEY.save(path)
    for content, reason in ((b"", "it is empty"), (b"not a key", ""), (path.read_bytes()[:60], "")):
        bad = tmp_path / "bad.pem"
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=rf"is not an unencrypted PEM private key \({reason}.*put this one back"):
            rollout_lib.WorkerKey.load(bad)
    foreign = x25519.X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    bad.write_bytes(foreign)
    with pytest.raises(ValueError, match="X25519PrivateKey, but must be ed25519"):
        rollout_lib.WorkerKey.load(bad)
