"""Weights cross process borders bit for bit, whole or not at all, and every tampering is named."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import weakref

import blake3
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.weights import broadcast
from sharding.weights.broadcast import assemble, destination, encode, placement
from sharding.weights.download import source
from sharding.weights.format import chunks, digests, journal, manifest
from tests.support import commands, proxy, trees


def _tree() -> dict:
    rng = np.random.default_rng(0)
    return {
        "embed": rng.standard_normal((64, 8)).astype(ml_dtypes.bfloat16),
        "layers": [{"w": rng.standard_normal((3, 5)).astype(np.float32)}, {"w": jnp.arange(6.0)}],
        "step": np.int32(7),
    }


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", manifest.ITEM_BYTES)
def test_every_dtype_round_trips_bitwise(tmp_path, rng, name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = rng.integers(0, 256, 35 * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        values %= 2
    if name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):  # one byte in memory, few of its values legal
        bits = int(next(c for c in name if c.isdigit()))
        values = np.arange(35).astype(dtype).view(np.uint8) if name[0] != "f" else values % (1 << bits)
    m = values.view(dtype).reshape(5, 7)
    zeros = np.zeros((4,), dtype)  # stored like any other chunk, or a missing one would look like zeros
    tree = {"m": m, "scalar": zeros[0], "empty": np.zeros((3, 0, 2), dtype), "zeros": zeros, "strided": m.T[::2]}
    broadcast.publish(tree, 0, tmp_path)
    trees.assert_same(broadcast.pull(tmp_path).params, tree)


def test_structure_metadata_and_digest_round_trip(tmp_path):
    tree = {"l": [np.arange(3), (np.float32(2), {"x": None, "y": {}, "t": (), "e": []})], "d.0-a_": {"0": jnp.ones(1)}}
    metadata = {"model": {"dim": 8, "eps": 1e-6, "names": ["é"]}, "tokenizer": "bytes"}
    written = broadcast.publish(tree, 3, tmp_path, metadata=metadata)
    pulled = broadcast.pull(tmp_path)
    trees.assert_same(pulled.params, tree)
    assert (pulled.version, pulled.metadata) == (3, metadata)
    assert pulled.digest == written.digest
    assert broadcast.read_manifest(tmp_path, 3) == written


def test_a_cpu_device_adopts_what_was_received(tmp_path):
    """A copy would cost as much as a plain copy of the file, and for a moment twice the memory."""
    broadcast.publish({"w": np.ones((300, 256), np.float32), "b": np.ones(16, np.int8)}, 0, tmp_path)
    for leaf in broadcast.pull(tmp_path).params.values():
        assert jax.device_put(leaf, jax.devices()[0]).unsafe_buffer_pointer() == leaf.ctypes.data


def test_a_large_array_begins_where_a_huge_page_does(tmp_path):
    """Elsewhere it would begin and end with up to 511 faults of 4 kB each."""
    broadcast.publish({"w": np.zeros(16 << 20, np.uint8), "v": np.zeros(17 << 20, np.uint8)}, 0, tmp_path)
    for leaf in broadcast.pull(tmp_path).params.values():
        assert leaf.ctypes.data % (2 << 20) == 0


@pytest.mark.parametrize("shape", [(9_000_011,), (2_100_001, 2), (3, 700, 1024), (1500, 1, 1024)])
def test_chunks_are_bounded_and_waste_little(shape):
    chunk = chunks.chunk_shape(shape, shape, 4)
    stored = np.prod([-(-n // c) * c for n, c in zip(shape, chunk, strict=True)])
    assert chunks.CHUNK_BYTES / 8 <= np.prod(chunk) * 4 <= chunks.CHUNK_BYTES
    assert stored <= np.prod(shape) * 1.001


def test_many_chunks_round_trip_and_stock_tensorstore_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    monkeypatch.setattr(digests, "SLICE_BYTES", 10)  # less than a chunk: its checksum goes over several parts
    tree = {"w": np.arange(7 * 11 * 3, dtype=np.int32).reshape(7, 11, 3)}
    broadcast.publish(tree, 0, tmp_path)
    trees.assert_same(broadcast.pull(tmp_path).params, tree)
    path = f"{tmp_path}/v00000000/tensors/w/"
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result().read().result()
    np.testing.assert_array_equal(array, tree["w"])


def test_pull_onto_eight_devices(tmp_path):
    tree = {"w": np.arange(64, dtype=np.float32).reshape(16, 4).astype(ml_dtypes.bfloat16), "b": [np.ones(3, np.int8)]}
    broadcast.publish(tree, 1, tmp_path)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("fsdp",), ()))
    params = broadcast.pull(tmp_path, 1, shardings={"w": split, "b": [whole]}).params
    trees.assert_same(params, tree)
    assert params["w"].sharding == split and params["w"].addressable_shards[0].data.shape == (2, 4)
    with pytest.raises(ValueError, match=r"'b/0' of shape \(3,\) does not fit"):
        broadcast.pull(tmp_path, shardings={"w": split, "b": [split]})
    with pytest.raises(ValueError, match=r"differ in \['b/0'\]"):
        broadcast.pull(tmp_path, shardings={"w": split})
    broadcast.publish({"w": np.arange(8)}, 2, tmp_path)
    with pytest.raises(ValueError, match="'w' is int64, which jax would narrow"):
        broadcast.pull(tmp_path, shardings={"w": split})


@pytest.mark.parametrize("how", ["flip", "truncate", "append", "delete", "swap"])
@pytest.mark.parametrize(
    "target", ["tensors/embed/c.0.0", "tensors/layers/1/w/zarr.json", "tensors/step/c", "manifest.json"]
)
def test_tampering_is_caught(tmp_path, target, how):
    broadcast.publish(_tree(), 0, tmp_path)
    path = tmp_path / "v00000000" / target
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "truncate":
        del data[-1:]
    elif how == "append":
        data += b"\0"
    elif how == "swap":
        data = bytearray((tmp_path / "v00000000/tensors/layers/0/w/c.0.0").read_bytes())
    path.unlink() if how == "delete" else path.write_bytes(data)
    expected, message = broadcast.CorruptSource, target
    if target == "manifest.json" and how == "delete":
        expected, message = FileNotFoundError, "no version 0"
    elif target != "manifest.json":  # the size or the hash must catch it, before tensorstore sees a byte of it
        message += {"flip": " has digest", "delete": " is missing"}.get(how, " has [0-9]+ bytes, not")
    # `zarr.json` is for other readers: only `verify` looks at it, since the manifest contains the same.
    for read in (broadcast.verify,) if target.endswith("zarr.json") else (broadcast.pull, broadcast.verify):
        with pytest.raises(expected, match=message):
            read(tmp_path, 0)


class _Counting(source.Directory):
    """A directory that records the objects read from it."""

    def __init__(self, root, key=None):
        super().__init__(str(root), key)
        self.paths = []

    def read(self, version, entry, into):
        self.paths.append((version, entry.path))
        super().read(version, entry, into)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": (8, 4), "v": (3,)}, r"differ in \['v'\]"),
        ({"w": (4, 8)}, r"'w' of version 0 is bfloat16\[8, 4\], but the model has bfloat16\[4, 8\]"),
        ({"w": (3, 4)}, "use that model's config"),
    ],
)
def test_shapes_that_differ_from_the_model_are_refused_before_any_byte_is_fetched(tmp_path, tree, message):
    broadcast.publish({"w": np.zeros((8, 4), ml_dtypes.bfloat16)}, 0, tmp_path)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = {n: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device) for n, shape in tree.items()}
    opened = _Counting(tmp_path)
    with pytest.raises(ValueError, match=message):
        broadcast.pull(opened, 0, shardings=model)
    assert opened.paths == []


def test_only_the_pinned_publisher_and_run_count(tmp_path):
    key, other = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    public, another = (k.public_key().public_bytes_raw().hex() for k in (key, other))
    broadcast.publish(_tree(), 0, tmp_path, broadcast.PublishOptions(key=key, run="mine"))
    assert broadcast.pull(tmp_path, key=public, run="mine").run == "mine"
    assert broadcast.read_manifest(tmp_path, 0).public_key == public
    with pytest.raises(broadcast.CorruptSource, match="not signed by the trusted"):
        broadcast.pull(tmp_path, key=another)
    with pytest.raises(broadcast.CorruptSource, match="is of run 'mine', not of 'yours'"):
        broadcast.pull(tmp_path, run="yours")
    broadcast.publish(_tree(), 1, tmp_path, broadcast.PublishOptions(run="mine"))
    assert broadcast.latest(tmp_path) == 1 and broadcast.pull(tmp_path, key=public).version == 0
    with pytest.raises(broadcast.CorruptSource, match=r"version 1 is not in the signed head: it has \[0\]"):
        broadcast.pull(tmp_path, 1, key=public)
    with pytest.raises(ValueError, match=f"opened with key None, not {public}; open it with that trusted_key"):
        broadcast.pull(source.open(tmp_path), key=public)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"..": np.ones(1)}, r"key '\.\.'"),
        ({"a": 1.0}, "leaf 'a' is a float"),
        ({"a": np.array(["x"])}, "tensor 'a' has dtype <U1"),
    ],
)
def test_unpublishable_trees_are_refused_before_anything_is_written(tmp_path, params, message):
    with pytest.raises(ValueError, match=message):
        broadcast.publish(params, 0, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_versions_are_immutable_and_only_grow(tmp_path):
    broadcast.publish({"a": np.ones(1)}, 4, tmp_path)
    for version, message in (
        (4, "version 4 exists"),
        (3, "version 3 is older than 4"),
        (-1, ">= 0"),
        (True, "integer"),
    ):
        with pytest.raises(ValueError, match=message):
            broadcast.publish({"a": np.zeros(1)}, version, tmp_path)
    np.testing.assert_array_equal(broadcast.pull(tmp_path).params["a"], 1)
    broadcast.remove(tmp_path, 4)
    broadcast.publish({"a": np.zeros(1)}, 3, tmp_path)
    assert broadcast.versions(tmp_path) == [3] and sorted(os.listdir(tmp_path)) == ["v00000003"]


def test_keep_deletes_the_oldest(tmp_path):
    for version in range(5):
        broadcast.publish({"a": np.full(1, version)}, version, tmp_path, broadcast.PublishOptions(keep=2))
    assert sorted(os.listdir(tmp_path)) == ["v00000003", "v00000004"]
    with pytest.raises(FileNotFoundError, match=r"no version 1 under .*has \[3, 4\]"):
        broadcast.pull(tmp_path, 1)
    with pytest.raises(ValueError, match="keep=0"):
        broadcast.publish({"a": np.ones(1)}, 5, tmp_path, broadcast.PublishOptions(keep=0))


def test_missing_places(tmp_path):
    nowhere = tmp_path / "nowhere"
    assert broadcast.latest(nowhere) is None and broadcast.latest(tmp_path) is None
    for call in (broadcast.versions, broadcast.pull):
        with pytest.raises(FileNotFoundError, match="no broadcast directory"):
            call(nowhere)
    with pytest.raises(FileNotFoundError, match="no version under"):
        broadcast.pull(tmp_path)
    with pytest.raises(
        TimeoutError, match=r"no version >= 1 .*newest: None\): no broadcast directory .*nowhere; start"
    ):
        broadcast.wait_for(nowhere, 1, timeout_s=0.1)


def test_concurrent_publishers_take_turns(tmp_path):
    outcomes = []

    def publish(value):
        try:
            broadcast.publish({"a": np.full((100, 100), value)}, 5, tmp_path)
            outcomes.append(value)
        except ValueError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=publish, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (x for x in outcomes if isinstance(x, int))
    np.testing.assert_array_equal(broadcast.pull(tmp_path).params["a"], winner)


def test_full_disk_leaves_nothing(small_disk):
    small = {"a": np.ones(1000)}
    broadcast.publish(small, 0, small_disk)
    with pytest.raises(OSError, match=f"no space left.*keep fewer than 8 versions.*{small_disk}") as caught:
        broadcast.publish({"a": np.ones(200_000), "b": np.ones(200_000)}, 1, small_disk)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(small_disk)) == ["v00000000"]
    broadcast.publish(small, 2, small_disk)
    assert broadcast.pull(small_disk).version == 2


STAGES = {  # the calls before and after which a publisher is killed, in order of time
    "begin": ("destination.Directory", "begin", 1),
    "first object": ("destination.Directory", "put", 1),
    "an object": ("destination.Directory", "put", 3),
    "its journal line": ("destination.Directory", "note", 3),
    "the last object": ("destination.Directory", "put", 4),
    "manifest": ("destination.Directory", "finish", 1),
    "manifest renamed": ("os", "replace", 1),
    "an old version": ("sys.modules['sharding.weights.broadcast.publish']", "_unneeded", 1),
}
KILLS = [(stage, when) for stage in STAGES for when in ("before", "after")]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Roots by (stage, when), each with version 1 and a publisher that got SIGKILL on the way to version 2."""
    roots = {kill: tmp_path_factory.mktemp("killed") for kill in KILLS}
    script = textwrap.dedent("""
        import itertools, json, os, signal, sys
        import numpy as np
        from sharding.weights import broadcast
        from sharding.weights.broadcast import destination

        def die(root, owner, name, count, when):
            broadcast.publish({"a": np.ones(4), "b": np.ones(4)}, 1, root)
            real, turns = getattr(owner, name), itertools.count(1)
            def dying(*args):
                turn = next(turns)  # several threads write
                if turn == count and when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*args)
                if turn == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result
            setattr(owner, name, dying)
            broadcast.publish({"a": np.zeros(4), "b": np.zeros(4)}, 2, root)

        for root, owner, name, count, when in json.loads(sys.argv[1]):
            child = os.fork()  # jax has started nothing yet
            if not child:
                die(root, eval(owner), name, count, when)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (owner, name, count, when)
    """)
    jobs = [[str(root), *STAGES[stage], when] for (stage, when), root in roots.items()]
    command = [sys.executable, "-W", "ignore", "-c", script, json.dumps(jobs)]
    subprocess.run(command, cwd=pathlib.Path(__file__).parents[4], timeout=300, check=True)
    return roots


@pytest.mark.parametrize(("stage", "when"), KILLS)
def test_killed_publisher_leaves_the_old_or_the_new_version(killed, stage, when):
    """A visible version is complete, and the next publisher cleans up."""
    root = killed[stage, when]
    is_out = stage == "an old version" or (stage in ("manifest", "manifest renamed") and when == "after")
    assert broadcast.versions(root) == ([1, 2] if is_out else [1])
    np.testing.assert_array_equal(broadcast.pull(root).params["a"], 0.0 if is_out else 1.0)
    broadcast.verify(root)
    broadcast.publish({"a": np.full(4, 3.0), "b": np.ones(4)}, 3, root)
    assert sorted(os.listdir(root)) == ["v00000001", *["v00000002"] * is_out, "v00000003"]
    np.testing.assert_array_equal(broadcast.pull(root).params["a"], 3.0)


def test_the_next_publisher_deletes_what_a_killed_removal_left(tmp_path, monkeypatch):
    broadcast.publish({"a": np.ones(4)}, 1, tmp_path)

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(destination.shutil, "rmtree", killed)
        destination.remove(tmp_path, 1)
    assert os.listdir(tmp_path) == [".tmp-removed-v00000001"]  # invisible already
    broadcast.publish({"a": np.zeros(4)}, 2, tmp_path)
    assert os.listdir(tmp_path) == ["v00000002"]


def test_relays_may_read_while_it_is_published(tmp_path, monkeypatch):
    """Every line of the journal names an object that is on disk, whole, in the order of the manifest."""
    lines, note = [], destination.Directory.note

    def check(self, entry):
        data = (tmp_path / "v00000000" / entry.path).read_bytes()
        assert (len(data), blake3.blake3(data).hexdigest()) == (entry.size, entry.digest)
        assert not (tmp_path / "v00000000" / "manifest.json").exists()
        assert source.open(tmp_path).listing().partial == (0,)
        note(self, entry)
        lines.append(entry)

    monkeypatch.setattr(destination.Directory, "note", check)
    written = broadcast.publish(_tree(), 0, tmp_path)
    assert tuple(lines) == written.objects
    journal_bytes = (tmp_path / "v00000000" / "objects.jsonl").read_bytes()
    assert [json.loads(line) for line in journal_bytes.splitlines()] == [vars(o) for o in written.objects]


# ---- deltas ----------------------------------------------------------------------------------------------------------


def _nudge(tree, rng, share=0.05):
    """The tree with a share of its bytes changed."""

    def nudge(leaf):
        raw = np.array(leaf)
        flat = raw.reshape(-1).view(np.uint8)
        flat ^= np.where(rng.random(flat.shape) < share, 1, 0).astype(np.uint8)
        return raw if isinstance(leaf, np.ndarray) else jax.device_put(raw, leaf.sharding)

    return jax.tree.map(nudge, tree)


def _params(rng) -> dict:
    return {
        "w": rng.standard_normal((16, 24)).astype(ml_dtypes.bfloat16),
        "f": rng.standard_normal((5, 7)).astype(np.float32),
        "q": rng.integers(-128, 128, (9,), dtype=np.int8),
        "mask": rng.random(11) < 0.5,
        "fp8": rng.standard_normal((3, 3)).astype(ml_dtypes.float8_e4m3fn),
        "c": np.full(3, 1 + 2j, np.complex128),
        "one": np.ones((1,), np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }


def test_twenty_deltas_come_to_what_a_snapshot_holds(tmp_path, rng):
    params = _params(rng)
    chain, snapshots = broadcast.Publisher(tmp_path / "chain", snapshot_every=100), tmp_path / "snapshots"
    have = None
    for version in range(0, 42, 2):  # versions have gaps
        written = chain.publish(params, version, metadata={"step": version})
        assert (written.base, written.encodings) == ((None, ("zarr3",)) if version == 0 else (version - 2, ("xor",)))
        reference = broadcast.publish(params, version, snapshots)
        assert written.digest == reference.digest
        have = broadcast.pull(tmp_path / "chain", base=have)
        trees.assert_same(have.params, params)
        params = _nudge(params, rng)
    late = broadcast.pull(tmp_path / "chain")
    trees.assert_same(late.params, have.params)
    trees.assert_same(late.params, broadcast.pull(snapshots).params)
    assert late.metadata == {"step": 40} and late.digest == have.digest
    assert broadcast.versions(tmp_path / "chain") == list(range(0, 42, 2))  # the newest 8 need all of them


def test_a_version_that_needs_nothing_frees_the_old_ones(tmp_path, rng):
    params, publisher = _params(rng), broadcast.Publisher(tmp_path, broadcast.PublishOptions(keep=2), snapshot_every=4)
    kept = []
    for version in range(10):
        written = publisher.publish(params, version)
        assert (written.base is None) == (version % 4 == 0) and (written.delta_of is None) == (version == 0)
        kept.append(broadcast.versions(tmp_path))
        trees.assert_same(broadcast.pull(tmp_path).params, params)
        params = _nudge(params, rng)
    assert kept[3:9] == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7, 8]]


def test_the_plan_with_the_fewest_bytes_is_fetched(tmp_path, rng):
    """Deltas for a reader with the base, also across a snapshot; the snapshot without a base, or with another run's tree."""
    publisher, made = broadcast.Publisher(tmp_path, broadcast.PublishOptions(keep=9), snapshot_every=3), [_params(rng)]
    made[0]["w"] = rng.standard_normal((256, 256)).astype(np.float32)
    for version in range(6):  # 0 and 3 are snapshots
        publisher.publish(made[-1], version)
        made.append(_nudge(made[-1], rng, 0.001))

    def fetched(version, base=None):
        opened = _Counting(tmp_path)
        pulled = broadcast.pull(opened, version, base=base)
        trees.assert_same(pulled.params, made[version])
        return {(v, path.split("/")[0]) for v, path in opened.paths}

    assert fetched(5) == {(3, "tensors"), (4, "deltas"), (5, "deltas")}
    at = {v: broadcast.pull(tmp_path, v) for v in range(6)}
    assert fetched(5, at[4]) == {(5, "deltas")}
    assert fetched(5, at[1]) == {(v, "deltas") for v in (2, 3, 4, 5)}
    assert fetched(3, at[2]) == {(3, "deltas")} and fetched(3) == {(3, "tensors")}
    assert fetched(5, at[5]) == set()
    assert fetched(2, at[5]) == {(0, "tensors"), (1, "deltas"), (2, "deltas")}  # deltas lead forward only
    stranger = broadcast.Pulled(4, at[4].params, {}, "0" * 64)
    assert fetched(5, stranger) == fetched(5)
    other_model = broadcast.Pulled(4, {"w": np.ones(3)}, {}, at[4].digest)
    assert fetched(5, other_model) == fetched(5)
    broadcast.remove(tmp_path, 2)
    assert fetched(5, at[1]) == fetched(5)  # the way is broken, the snapshot is not


def test_a_base_that_was_overwritten_is_not_used(tmp_path, rng):
    params, publisher = _params(rng), broadcast.Publisher(tmp_path, snapshot_every=4)
    publisher.publish(params, 0)
    have = broadcast.pull(tmp_path)
    params = _nudge(params, rng)
    publisher.publish(params, 1)
    have.params["f"][0, 0] = 7  # another owner wrote into it
    trees.assert_same(broadcast.pull(tmp_path, base=have).params, params)
    same = broadcast.pull(tmp_path)
    same.params["q"][0] ^= 1
    trees.assert_same(broadcast.pull(tmp_path, base=same).params, params)  # also when nothing needs to be fetched


def test_a_publisher_of_another_model_or_of_a_deleted_version(tmp_path, rng):
    publisher = broadcast.Publisher(tmp_path, snapshot_every=3)
    publisher.publish(_params(rng), 0)
    with pytest.raises(ValueError, match="tensor 'x' has another shape.*version 0; create a new Publisher"):
        publisher.publish({**_params(rng), "x": np.ones(1)}, 1)
    publisher.publish(_params(rng), 1)
    broadcast.remove(tmp_path, 1)
    assert publisher.publish(_params(rng), 2).encodings == ("zarr3",)


@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "swap"])
def test_a_tampered_delta_is_named_and_a_snapshot_helps(tmp_path, how, rng):
    params, publisher = _params(rng), broadcast.Publisher(tmp_path, snapshot_every=3)
    for version in range(4):  # 3 is a snapshot and a delta
        publisher.publish(params, version)
        if version < 3:
            params = _nudge(params, rng)
    for version in (2, 3):
        (path,) = (tmp_path / f"v{version:08d}" / "deltas").iterdir()
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if how == "swap":
            data = bytearray(next((tmp_path / "v00000001" / "deltas").iterdir()).read_bytes())
        path.unlink() if how == "delete" else path.write_bytes(data[:-1] if how == "truncate" else data)
    one = broadcast.pull(tmp_path, 1)
    for have in (None, one):
        with pytest.raises(broadcast.CorruptSource, match=r"v00000002/deltas/00000-000000\.bin"):
            broadcast.pull(tmp_path, 2, base=have)
    two = broadcast.Pulled(2, params, {}, broadcast.read_manifest(tmp_path, 2).digest)
    trees.assert_same(broadcast.pull(tmp_path, 3, base=two).params, params)
    with pytest.raises(broadcast.CorruptSource, match="deltas"):
        broadcast.verify(tmp_path, 3)


def test_a_publisher_that_patches_wrongly_is_found_out(tmp_path, rng):
    """All hashes of objects agree, and the result is still wrong: only the digest after applying shows it."""
    params = {"w": rng.standard_normal((64, 4))}
    publisher = broadcast.Publisher(tmp_path, snapshot_every=3)
    publisher.publish(params, 0)
    publisher._copy.chunks["w", 0][0] ^= 1
    publisher.publish(_nudge(params, rng), 1)
    with pytest.raises(broadcast.CorruptSource, match="tensor 'w', chunk 0: version 0 and 1 deltas result in digest"):
        broadcast.pull(tmp_path)


def test_a_chunk_that_changes_without_a_patch_is_found_out(tmp_path, rng):
    """The publisher's own manifest claims another digest for a chunk that no delta touches: no tree has the promised digest."""
    params = {"a": rng.standard_normal(300), "b": rng.standard_normal(300)}
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    publisher = broadcast.Publisher(tmp_path, snapshot_every=3)
    publisher.publish(params, 0)
    base = broadcast.pull(tmp_path)
    written = publisher.publish({**params, "a": params["a"] + 1}, 1)
    a, b = written.tensors
    assert a.deltas != (None,) and b.deltas == (None,)
    tensors = (a, dataclasses.replace(b, chunks=("0" * 64,)))
    forged = dataclasses.replace(written, tensors=tensors, digest_after=manifest.digest(tensors))
    (tmp_path / "v00000001/manifest.json").write_bytes(manifest.encode(forged, key))
    for given in (None, base):
        with pytest.raises(journal.CorruptSource, match="'b', chunk 0"):
            broadcast.pull(tmp_path, 1, base=given)


def test_a_chain_of_another_run_is_refused(tmp_path, rng):
    publisher = broadcast.Publisher(tmp_path, snapshot_every=3)
    publisher.publish(_params(rng), 0)
    publisher.publish(_params(rng), 1)
    broadcast.remove(tmp_path, 0)
    broadcast.publish(_params(rng), 0, tmp_path / "other")
    os.rename(tmp_path / "other" / "v00000000", tmp_path / "v00000000")
    with pytest.raises(broadcast.CorruptSource, match="published again, or by another run"):
        broadcast.pull(tmp_path)
    broadcast.remove(tmp_path, 0)
    with pytest.raises(FileNotFoundError, match="no version 0"):
        broadcast.pull(tmp_path)


def test_a_publisher_that_failed_starts_over_with_a_snapshot(tmp_path, monkeypatch, rng):
    params, publisher = _params(rng), broadcast.Publisher(tmp_path, snapshot_every=8)
    publisher.publish(params, 0)
    with monkeypatch.context() as patch:
        patch.setattr(destination.Directory, "finish", lambda *args: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            publisher.publish(_nudge(params, rng), 1)
    assert os.listdir(tmp_path) == ["v00000000"]
    params = _nudge(params, rng)
    assert publisher.publish(params, 1).encodings == ("zarr3",)
    trees.assert_same(broadcast.pull(tmp_path).params, params)
    with pytest.raises(ValueError, match="snapshot_every=0"):
        broadcast.Publisher(tmp_path, snapshot_every=0)


def test_deltas_of_many_chunks_in_many_objects(tmp_path, monkeypatch, rng):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256)
    monkeypatch.setattr(encode, "DELTA_OBJECT_BYTES", 1000)
    params, have = {"w": rng.standard_normal((61, 33)), "v": rng.standard_normal(501)}, None
    publisher = broadcast.Publisher(tmp_path, snapshot_every=5)
    for version in range(3):
        written = publisher.publish(params, version)
        have = broadcast.pull(tmp_path, base=have)
        trees.assert_same(have.params, params)
        trees.assert_same(broadcast.pull(tmp_path).params, params)
        frozen, params = params, _nudge(params, rng, 0.02)
        params["v"][:250] = frozen["v"][:250]  # frozen: chunks without a patch
    deltas = [d for t in written.tensors for d in t.deltas]
    assert len(written.objects) > 5 and None in deltas and len({d[0] for d in deltas if d}) == len(written.objects)


def test_an_rl_sized_step_moves_a_thirtieth(tmp_path, rng):
    """Measures all files of a version after a step of Adam (learning rate 1e-6, bfloat16)."""
    weights = rng.normal(0, 0.02, (1024, 2048)).astype(np.float32)
    publisher = broadcast.Publisher(tmp_path, broadcast.PublishOptions(dtype="bfloat16"), snapshot_every=8)
    sizes = []
    for version in range(3):
        publisher.publish({"w": jnp.asarray(weights)}, version)
        sizes.append(sum(p.stat().st_size for p in (tmp_path / f"v{version:08d}").rglob("*") if p.is_file()))
        weights = weights - 1e-6 * np.clip(rng.standard_normal(weights.shape), -3, 3).astype(np.float32)
    assert max(sizes[1:]) * 30 <= sizes[0]


# ---- meshes, dtypes, ties --------------------------------------------------------------------------------------------


def _mesh(*shape):
    return jax.make_mesh(shape, ("x", "y", "z")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


LAYOUTS = {
    "one device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    "rows of 8": lambda: jax.NamedSharding(_mesh(8), jax.P("x")),
    "columns of 8": lambda: jax.NamedSharding(_mesh(8), jax.P(None, "x")),
    "4 x 2": lambda: jax.NamedSharding(_mesh(4, 2), jax.P("x", "y")),
    "2 x 4 transposed, replicated over z": lambda: jax.NamedSharding(_mesh(2, 2, 2), jax.P("y", "x")),
    "replicated": lambda: jax.NamedSharding(_mesh(8), jax.P()),
    "both axes on one dim": lambda: jax.NamedSharding(_mesh(4, 2), jax.P(("x", "y"), None)),
}


@pytest.mark.parametrize("ours", LAYOUTS)
def test_any_layout_to_any_layout(tmp_path, monkeypatch, ours, rng):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 200)  # several chunks per shard
    tree = {
        "w": rng.standard_normal((48, 40)).astype(np.float32),
        "h": rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16),
        "e": rng.integers(0, 256, (8, 16, 12), dtype=np.uint8).view(
            np.float32
        ),  # [8, 16, 3], as of experts; NaN included
    }
    publisher = broadcast.Publisher(tmp_path, snapshot_every=3)
    have = {}
    for version in range(2):
        publisher.publish(jax.device_put(tree, LAYOUTS[ours]()), version)
        for theirs, layout in LAYOUTS.items():
            sharding = layout()
            shardings = dict.fromkeys(tree, sharding)
            pulled = broadcast.pull(tmp_path, shardings=shardings)
            trees.assert_same(pulled.params, tree)
            assert all(leaf.sharding == sharding for leaf in pulled.params.values())
            if version:  # the base has their layout, the patches ours
                trees.assert_same(broadcast.pull(tmp_path, shardings=shardings, base=have[theirs]).params, tree)
            have[theirs] = pulled
        trees.assert_same(broadcast.pull(tmp_path).params, tree)
        tree = _nudge(tree, rng)
    reused = {"w": LAYOUTS["rows of 8"](), "h": LAYOUTS["columns of 8"](), "e": LAYOUTS["4 x 2"]()}
    last = broadcast.pull(tmp_path)
    trees.assert_same(broadcast.pull(tmp_path, shardings=reused, base=last).params, last.params)


def test_a_learner_that_changes_its_mesh_goes_on_publishing(tmp_path, monkeypatch, rng):
    """Chunks that fit the old shards may straddle the new ones: then a snapshot, and deltas again after it."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 200)
    tree = {"w": rng.standard_normal((48, 56)).astype(np.float32)}  # chunks of 112 or 168 bytes
    publisher, have, kinds = broadcast.Publisher(tmp_path, snapshot_every=100), None, []
    for version, layout in enumerate(layout for layout in LAYOUTS.values() for _ in range(2)):
        kinds.append(publisher.publish(jax.device_put(tree, layout()), version).encodings)
        have = broadcast.pull(tmp_path, base=have)
        trees.assert_same(have.params, tree)
        tree = _nudge(tree, rng)
    assert ("zarr3",) in kinds[2::2] and kinds[1::2] == [("xor",)] * len(LAYOUTS)


def test_the_host_never_holds_the_tree_beside_the_devices(tmp_path, monkeypatch):
    """While a tensor is put on its devices, the host arrays of those before it are gone, and few after it have begun."""
    tree = {f"t{i}": np.full((100, 100), i) for i in range(12)}
    broadcast.publish(tree, 0, tmp_path)
    monkeypatch.setattr(assemble, "IN_FLIGHT_BYTES", 2 * tree["t0"].nbytes)
    target = broadcast.read_manifest(tmp_path, 0)
    requests, _ = placement.on_host(target)
    begun, alive, view_in = [], [], chunks.view_in

    def noting(array, *args):
        begun.append(weakref.ref(array))
        return view_in(array, *args)

    monkeypatch.setattr(chunks, "view_in", noting)

    def place(request, arrays):
        alive.append(sum(ref() is not None for ref in begun))

    for _ in assemble.read(source.open(tmp_path), assemble.Plan((), target), requests, place):
        pass
    assert len(begun) == len(alive) == 12
    assert max(alive) <= 4  # this one, two in flight, one that a thread is letting go of


def test_a_host_fetches_only_what_its_devices_need(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)
    tree = {"w": np.arange(64 * 64, dtype=np.float32).reshape(64, 64)}
    broadcast.publish(tree, 0, tmp_path)
    target = broadcast.read_manifest(tmp_path, 0)
    request = assemble.TensorRequest(
        target.tensors[0], ((slice(8, 10), slice(0, 64)), (slice(60, 64), slice(10, 20))), ("w",)
    )
    opened = _Counting(tmp_path)
    ((_, arrays),) = assemble.read(opened, assemble.Plan((), target), [request], lambda request, arrays: arrays)
    np.testing.assert_array_equal(arrays[0], tree["w"][8:10])
    np.testing.assert_array_equal(arrays[1], tree["w"][60:64, 10:20])
    assert {path for _, path in opened.paths} == {f"tensors/w/c.{i}.0" for i in (4, 30, 31)}


@pytest.mark.parametrize("shard", [(1250, 8), (7, 4096), (18992, 4096), (1187, 4096), (3, 3)])
def test_chunks_divide_the_shards(shard):
    shape = (shard[0] * 8, shard[1])
    chunk = chunks.chunk_shape(shape, shard, 2)
    assert shard[0] % chunk[0] == 0 and chunk[1] == shard[1] or shard[1] % chunk[1] == 0
    assert np.prod(chunk) * 2 <= 4 * chunks.CHUNK_BYTES


def test_very_large_arrays_have_larger_chunks_not_more():
    shape = (64, 8192, 29568)  # 31 GB of bfloat16
    chunk = chunks.chunk_shape(shape, shape, 2)
    assert chunks.CHUNK_BYTES < np.prod(chunk) * 2 <= chunks.LARGEST_CHUNK_BYTES
    assert np.prod([-(-n // c) for n, c in zip(shape, chunk, strict=True)]) < 2000


def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path):
    shared = np.arange(12.0).reshape(3, 4)
    tree = {"embed": shared, "head": shared, "twin": shared.copy()}
    publisher = broadcast.Publisher(tmp_path, snapshot_every=3)
    for version in range(2):
        written = publisher.publish(tree, version)
        assert [t.tied_to for t in written.tensors] == [None, "embed", None]
        pulled = broadcast.pull(tmp_path)
        trees.assert_same(pulled.params, tree)
        assert pulled.params["embed"] is pulled.params["head"] and pulled.params["embed"] is not pulled.params["twin"]
        assert pulled.digest == trees.digest(tree) == trees.digest(pulled.params)
        assert not (tmp_path / f"v{version:08d}" / "tensors" / "head").exists()
        shared[0, 0] += 1
        tree["twin"][0, 0] -= 1
    mesh = _mesh(2)
    rows, columns = jax.NamedSharding(mesh, jax.P("x")), jax.NamedSharding(mesh, jax.P(None, "x"))
    broadcast.publish({"a": (x := jnp.arange(8.0).reshape(2, 4)), "b": x, "c": x}, 0, tmp_path / "f32")
    params = broadcast.pull(tmp_path / "f32", shardings={"a": rows, "b": rows, "c": columns}).params
    assert params["a"] is params["b"] and params["c"].sharding == columns
    trees.assert_same(params, {"a": x, "b": x, "c": x})


def test_cast_on_the_way_out(tmp_path, rng):
    tree = {
        "w": jax.device_put(rng.standard_normal((8, 16)).astype(np.float32), jax.NamedSharding(_mesh(8), jax.P("x"))),
        "host": rng.standard_normal(5).astype(np.float32),
        "half": rng.standard_normal(5).astype(np.float16),  # no wider than bfloat16: stays
        "count": np.int32(3),
    }
    broadcast.publish(tree, 0, tmp_path, broadcast.PublishOptions(dtype="bfloat16"))
    expected = {n: np.asarray(a).astype(ml_dtypes.bfloat16) if n in ("w", "host") else a for n, a in tree.items()}
    trees.assert_same(broadcast.pull(tmp_path).params, expected)
    for dtype in ("int8", "bf16"):
        with pytest.raises(ValueError, match=f"dtype '{dtype}' is not a floating dtype"):
            broadcast.publish(tree, 1, tmp_path, broadcast.PublishOptions(dtype=dtype))


def test_the_tree_that_a_publisher_keeps_is_its_own(tmp_path):
    """A host copy on CPU may be a view of the array; a base that changes with the next step would make wrong deltas."""
    params, publisher = {"w": np.zeros((4, 4), np.float32)}, broadcast.Publisher(tmp_path, snapshot_every=4)
    for version in range(3):
        publisher.publish(params, version)
        np.testing.assert_array_equal(broadcast.pull(tmp_path).params["w"], version)
        params["w"] += 1


# ---- other places ----------------------------------------------------------------------------------------------------


def test_bucket(tmp_path, rng):
    """The code of gs:// and s3://, on tensorstore's own file store."""
    root = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    params, publisher = _params(rng), broadcast.Publisher(root, broadcast.PublishOptions(keep=2), snapshot_every=2)
    have = None
    for version in range(5):
        publisher.publish(params, version)
        have = broadcast.pull(root, base=have)
        trees.assert_same(have.params, params)
        trees.assert_same(broadcast.pull(root).params, params)
        params = _nudge(params, rng)
    assert broadcast.versions(root) == [2, 3, 4]
    broadcast.remove(root, 4)
    assert broadcast.latest(root) == 3
    with pytest.raises(ValueError, match="version 3 exists"):
        broadcast.publish(params, 3, root)


@pytest.mark.parametrize("snapshot_every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_fixed_tensors_are_read_written_and_fetched_once(tmp_path, rng, snapshot_every, capsys):
    """Each version is whole for a reader that joins, and has the digest of one that was written whole."""
    key = ed25519.Ed25519PrivateKey.generate()
    public, options = key.public_key().public_bytes_raw().hex(), broadcast.PublishOptions(key=key, keep=3)
    publisher = broadcast.Publisher(tmp_path / "pub", options, snapshot_every=snapshot_every, fixed="base")
    tree = {"base": {"w": rng.standard_normal((300, 256)).astype(np.float32)}, "own": np.zeros((16, 16), np.float32)}
    with (
        proxy.running(tmp_path / "pub") as origin,
        proxy.running(origin.url, tmp_path / "relay", trusted_key=public) as relay,
    ):
        have, mirrored = None, [0]
        for version in range(7):
            if version == 5:  # a resume: its publisher reads the base again, and readers and relays do not
                publisher = broadcast.Publisher(tmp_path / "pub", options, snapshot_every=snapshot_every, fixed="base")
                publisher.forget(version)
            if version == 3:  # a snapshot: it is written whole
                for file in (tmp_path / "pub").glob("v*/tensors/base/w/c.*"):
                    file.unlink()
            tree = tree | {"own": rng.standard_normal((16, 16)).astype(np.float32)}
            written = publisher.publish(tree, version)
            assert ("version 3 is written whole" in capsys.readouterr().err) == (version == 3)
            assert written.digest == broadcast.publish(tree, version, tmp_path / "whole").digest
            assert broadcast.wait_for(relay.url, version, timeout_s=30) == version
            with contextlib.closing(source.open(relay.url, trusted_key=public)) as opened:
                have = broadcast.pull(opened, version, base=have, key=public).locked()
                fetched = opened.stats()["num_bytes"]
            mirrored.append(relay.mirror.log.counters["bytes"])
            assert (fetched > 300_000) == (mirrored[-1] - mirrored[-2] > 300_000) == (version == 0)
            for place in (tmp_path / "pub", relay.url):
                trees.assert_same(broadcast.pull(place, version, key=public).params, tree)
    for folder in ("pub", "relay"):
        assert len({file.stat().st_ino for file in (tmp_path / folder).glob("v*/tensors/base/w/c.*")}) <= 4  # not 3 x 2
    with pytest.raises(ValueError, match="fixed tensor 'base/w' has another shape"):
        publisher.publish(tree | {"base": {"w": np.zeros(3, np.float32)}}, 7)


def test_progress_ends_at_the_total(tmp_path, rng):
    params, publisher = _params(rng), broadcast.Publisher(tmp_path, snapshot_every=4)
    for version in range(3):
        publisher.publish(params, version)
        params = _nudge(params, rng)
    seen = []
    broadcast.verify(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen) and len({total for _, total in seen}) == 1


def test_watch_only_grows(tmp_path):
    broadcast.publish({"a": np.ones(1)}, 3, tmp_path)
    watched = broadcast.watch(tmp_path)
    assert next(watched) == 3 == broadcast.wait_for(tmp_path, 2, timeout_s=0)
    broadcast.remove(tmp_path, 3)
    broadcast.publish({"a": np.ones(1)}, 2, tmp_path)  # a learner that went back to a checkpoint
    threading.Timer(0.1, broadcast.publish, ({"a": np.ones(1)}, 4, tmp_path)).start()
    assert next(watched) == 4


def test_a_bucket_without_a_fixed_tensor_gets_it_again(tmp_path, rng, capsys):
    root, tree = f"file://{tmp_path}", {"base": {"w": rng.standard_normal(9)}, "own": np.zeros(3)}
    publisher = broadcast.Publisher(root, fixed="base")
    publisher.publish(tree, 0)
    (tmp_path / "v00000000/tensors/base/w/c.0").unlink()
    publisher.publish(tree, 1)
    assert "version 1 is written whole" in capsys.readouterr().err
    trees.assert_same(broadcast.pull(root, 1).params, tree)


def test_no_one_waits_for_a_version_that_was_deleted(tmp_path):
    """A server that was paused for longer than its run keeps versions got the name of a deleted one."""
    options = broadcast.PublishOptions(key=ed25519.Ed25519PrivateKey.generate(), keep=2)
    key, digests = options.key.public_key().public_bytes_raw().hex(), []
    for version in range(4):
        broadcast.publish({"a": np.ones(version + 1)}, version, tmp_path, options)
        digests.append(broadcast.entry_of(tmp_path, version, key=key).sha256)
    epoch = broadcast.entry_of(tmp_path, 3, key=key).epoch
    with proxy.running(tmp_path) as relay:
        for root in (tmp_path, relay.url):
            assert broadcast.wait_for(root, 3, 30, key=key, epoch=epoch, digest=digests[3]) == 3
            for wanted in (
                dict(at_least=1, digest=digests[1]),
                dict(at_least=2, digest=digests[1]),
            ):  # the latter: replaced
                with pytest.raises(FileNotFoundError, match="is not published any more; pull the newest version"):
                    broadcast.wait_for(root, timeout_s=30, key=key, epoch=epoch, **wanted)
            for later in (dict(at_least=4, epoch=epoch), dict(at_least=2, epoch=epoch + 1)):  # on its way
                with pytest.raises(TimeoutError):
                    broadcast.wait_for(root, timeout_s=0.2, key=key, digest=digests[1], **later)


def test_command_line(tmp_path, capsys):
    written = broadcast.publish(
        _tree(), 0, tmp_path, broadcast.PublishOptions(key=ed25519.Ed25519PrivateKey.generate())
    )
    for argv in (
        ["list", str(tmp_path)],
        ["verify", str(tmp_path), "--key", written.public_key],
        ["verify", str(tmp_path), "--version", "0"],
        ["watch", str(tmp_path), "--count", "1"],
    ):
        assert commands.run("sharding.broadcast", *argv) == 0
        assert written.digest in (out := capsys.readouterr().out) and f"signed by {written.public_key}" in out
    (tmp_path / "v00000000/tensors/embed/c.0.0").unlink()
    for argv in (
        ["verify", str(tmp_path)],
        ["list", str(tmp_path), "--key", "0" * 64],
        ["list", str(tmp_path / "nowhere")],
        ["verify", str(tmp_path), "--version", "7"],
        ["publish-dir", str(tmp_path), str(tmp_path)],
    ):
        assert commands.run("sharding.broadcast", *argv) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_publish_dir(tmp_path, capsys, rng):
    tensors = {
        "model.embed.weight": rng.standard_normal((4, 6)).astype(np.float32),
        "lm_head": np.arange(3, dtype=np.int8),
    }
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for (name, array), code in zip(tensors.items(), ("F32", "I8"), strict=True):
        end = len(body) + array.nbytes
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [len(body), end]}
        body += array.tobytes()
    head = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + body)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    root = tmp_path / "root"
    for version in range(2):
        assert commands.run("sharding.broadcast", "publish-dir", str(tmp_path), str(root)) == 0
        assert f"published: version {version}: snapshot" in capsys.readouterr().out
    pulled = broadcast.pull(root)
    trees.assert_same(pulled.params, tensors)
    assert pulled.metadata == {"config": {"model_type": "qwen3"}}
    file.write_bytes(len(head).to_bytes(8, "little") + head + body[:-1])
    assert commands.run("sharding.broadcast", "publish-dir", str(tmp_path), str(root)) == 1
    assert "tensor lm_head (3,) of I8" in capsys.readouterr().err


def test_published_manifest_is_stable(tmp_path):
    """The wire format: a change of this dict needs another FORMAT, or old readers reject new weights unexplained."""
    options = broadcast.PublishOptions(run="r")
    broadcast.publish({"w": [np.arange(3, dtype=np.int16)]}, 1, tmp_path, options, metadata={"model": "tiny"})
    body = json.loads((tmp_path / "v00000001/manifest.json").read_bytes())
    digest = blake3.blake3((tmp_path / "v00000001/tensors/w/0/c.0").read_bytes()).hexdigest()
    header, chunk = body.pop("objects")
    assert header["path"] == "tensors/w/0/zarr.json"
    assert chunk == {"path": "tensors/w/0/c.0", "size": 10, "digest": digest}
    del body["own_digest"]  # of these fields
    assert trees.digest({"b": np.array(1.5, ">f8")}) == trees.digest({"b": np.float64(1.5)})  # of little-endian bytes
    nulls = dict.fromkeys(("base", "delta_of", "digest_before", "public_key", "signature", "epoch"))
    tensor = {"name": "w/0", "shape": [3], "dtype": "int16", "chunk": [3], "deltas": None, "tied_to": None}
    assert body == nulls | {
        "format": 4,
        "version": 1,
        "encodings": ["zarr3"],
        "digest_after": "f0af3f91c7b504328debd26570b96f947036c7e009a75b981f6ecb9e603d181c",
        "tensors": [tensor | {"chunks": [digest]}],
        "containers": {"w": "list"},
        "metadata": {"model": "tiny"},
        "run": "r",
    }
