"""Weights cross process borders bit for bit, whole or not at all, and every tampering is named."""

import errno
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from sharding import broadcast


def _tree() -> dict:
    rng = np.random.default_rng(0)
    return {
        "embed": rng.standard_normal((64, 8)).astype(ml_dtypes.bfloat16),
        "layers": [{"w": rng.standard_normal((3, 5)).astype(np.float32)}, {"w": jnp.arange(6.0)}],
        "step": np.int32(7),
    }


def _assert_same(tree, other):
    """Bitwise, types of containers included: NaN payloads and -0.0 count."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", broadcast.DTYPES)
def test_every_dtype_round_trips_bitwise(tmp_path, name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.random.default_rng(0).integers(0, 256, 35 * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        values %= 2
    if name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):  # one byte in memory, few of its values legal
        bits = int(next(c for c in name if c.isdigit()))
        values = np.arange(35).astype(dtype).view(np.uint8) if name[0] != "f" else values % (1 << bits)
    m = values.view(dtype).reshape(5, 7)
    zeros = np.zeros((4,), dtype)  # stored like any other chunk, or a missing one could not be told from zeros
    tree = {"m": m, "scalar": zeros[0], "empty": np.zeros((3, 0, 2), dtype), "zeros": zeros, "strided": m.T[::2]}
    broadcast.publish(tree, 0, tmp_path)
    _assert_same(broadcast.pull(tmp_path).params, tree)


def test_structure_metadata_and_digest_round_trip(tmp_path):
    tree = {"l": [np.arange(3), (np.float32(2), {"x": None, "y": {}, "t": (), "e": []})], "d.0-a_": {"0": jnp.ones(1)}}
    metadata = {"model": {"dim": 8, "eps": 1e-6, "names": ["é"]}, "tokenizer": "bytes"}
    manifest = broadcast.publish(tree, 3, tmp_path, metadata=metadata)
    pulled = broadcast.pull(tmp_path)
    _assert_same(pulled.params, tree)
    assert (pulled.version, pulled.metadata) == (3, metadata)
    assert pulled.digest == manifest.digest == broadcast.tree_digest(tree)
    assert broadcast.read_manifest(tmp_path, 3) == manifest


def test_digest_against_its_definition():
    rows = []
    for name, a in (("a/0", np.arange(3, dtype=np.int16)), ("b", np.array(1.5, np.float64))):
        rows.append([name, a.dtype.name, list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()])
    expected = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    big_endian = np.array(1.5, ">f8")  # the digest is over little-endian bytes
    assert broadcast.tree_digest({"b": big_endian, "a": [np.arange(3, dtype=np.int16)]}) == expected
    assert broadcast.tree_digest({"b": np.float64(1.5), "a": [np.arange(3, dtype=np.uint16)]}) != expected


@pytest.mark.parametrize("shape", [(9_000_011,), (2_100_001, 2), (3, 700, 1024), (1500, 1, 1024)])
def test_chunks_are_bounded_and_waste_little(shape):
    chunk = broadcast._chunk_shape(shape, 4)
    stored = np.prod([-(-n // c) * c for n, c in zip(shape, chunk, strict=True)])
    assert broadcast.CHUNK_BYTES / 8 <= np.prod(chunk) * 4 <= broadcast.CHUNK_BYTES
    assert stored <= np.prod(shape) * 1.001


def test_many_chunks_round_trip_and_stock_tensorstore_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(broadcast, "CHUNK_BYTES", 64)
    tree = {"w": np.arange(7 * 11 * 3, dtype=np.int32).reshape(7, 11, 3)}
    broadcast.publish(tree, 0, tmp_path)
    _assert_same(broadcast.pull(tmp_path).params, tree)
    path = f"{tmp_path}/v00000000/tensors/w/"
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result().read().result()
    np.testing.assert_array_equal(array, tree["w"])


def test_pull_onto_eight_devices(tmp_path):
    tree = {"w": np.arange(64, dtype=np.float32).reshape(16, 4).astype(ml_dtypes.bfloat16), "b": [np.ones(3, np.int8)]}
    broadcast.publish(tree, 1, tmp_path)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("fsdp",), ()))
    params = broadcast.pull(tmp_path, 1, shardings={"w": split, "b": [whole]}).params
    _assert_same(params, tree)
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
    expected, message = broadcast.CorruptBroadcast, target
    if target == "manifest.json" and how == "delete":
        expected, message = FileNotFoundError, "no version 0"
    elif target != "manifest.json":  # the size or the hash must catch it, before tensorstore sees a byte of it
        message += {"flip": " has sha256", "delete": " is missing"}.get(how, " has [0-9]+ bytes, not")
    for read in (broadcast.pull, broadcast.verify):
        with pytest.raises(expected, match=message):
            read(tmp_path, 0)


def test_swapped_objects_of_one_size_are_caught(tmp_path):
    broadcast.publish({"a": np.zeros(4), "b": np.ones(4)}, 0, tmp_path)
    a, b = (tmp_path / f"v00000000/tensors/{name}/c.0" for name in "ab")
    a.write_bytes(b.read_bytes())
    with pytest.raises(broadcast.CorruptBroadcast, match="tensors/a/c.0 has sha256"):
        broadcast.pull(tmp_path)


def test_edited_metadata_is_caught(tmp_path):
    broadcast.publish(_tree(), 0, tmp_path, metadata={"tokenizer": "bytes"})
    path = tmp_path / "v00000000/manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"tokenizer":"bytes"', b'"tokenizer":"other"'))
    with pytest.raises(broadcast.CorruptBroadcast, match="its sha256 is"):
        broadcast.read_manifest(tmp_path, 0)


def _rewrite(root: pathlib.Path, change) -> None:
    """A liar's manifest: changed, then hashed again, so that only the rules can refuse it."""
    path = root / "v00000000/manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    change(body)
    tensors = [broadcast.Tensor(**t) for t in body["tensors"] if isinstance(t, dict)]
    if "digest" in body and all(isinstance(t.name, str) for t in tensors):
        body["digest"] = broadcast._combine(tensors)
    digest = hashlib.sha256(broadcast._canonical(body)).hexdigest()
    path.write_bytes(json.dumps({"manifest": body, "sha256": digest}).encode())


LIES = {
    "traversal": (lambda m: m["objects"][0].update(path="tensors/../../secret"), "secret.*plain segments"),
    "absolute": (lambda m: m["objects"][0].update(path="/etc/passwd"), "/etc/passwd.*plain segments"),
    "name": (lambda m: m["tensors"][0].update(name="../w"), r"\.\./w.*plain segments"),
    "name type": (lambda m: m["tensors"][0].update(name=3), "3 is no path"),
    "container": (lambda m: m["containers"].update({"layers/..": "list"}), "layers/...*plain segments"),
    "container kind": (lambda m: m["containers"].update({"layers": "set"}), "unknown kind 'set'"),
    "list": (lambda m: m["containers"].update({"layers/0": "list"}), r"list at 'layers/0'"),
    "duplicate tensor": (lambda m: m["tensors"].append(m["tensors"][0]), "tensor name occurs twice"),
    "duplicate object": (lambda m: m["objects"].append(m["objects"][0]), "object path occurs twice"),
    "extra object": (lambda m: m["objects"].append({**m["objects"][0], "path": "tensors/x/c"}), "objects are listed"),
    "no object": (lambda m: m["objects"].pop(), "has 1 objects, not 2"),
    "object size": (lambda m: m["objects"][0].update(size=1 << 40), "size 1099511627776"),
    "negative size": (lambda m: m["objects"][0].update(size=-1), "size -1"),
    "huge shape": (lambda m: m["tensors"][0].update(shape=[1 << 40, 8]), "objects, not"),
    "huge chunk": (lambda m: m["tensors"][0].update(shape=[1 << 40, 8], chunk=[1 << 40, 8]), "bytes, but chunk"),
    "absurd shape": (lambda m: m["tensors"][0].update(shape=[1 << 60]), "has shape"),
    "zero chunk": (lambda m: m["tensors"][0].update(chunk=[0, 0]), r"chunk \(0, 0\)"),
    "chunk rank": (lambda m: m["tensors"][0].update(chunk=[64]), r"chunk \(64,\)"),
    "dtype": (lambda m: m["tensors"][0].update(dtype="object"), "unknown dtype 'object'"),
    "same-size dtype": (lambda m: m["tensors"][0].update(dtype="float16"), "tensor 'embed'"),
    "other shape": (lambda m: m["tensors"][0].update(shape=[8, 64], chunk=[8, 64]), "tensor 'embed'"),
    "tensor hash": (lambda m: m["tensors"][0].update(sha256="0" * 64), "tensor 'embed'.*has sha256"),
    "tensors type": (lambda m: m.update(tensors={}), "tensors is a dict"),
    "tensor type": (lambda m: m.update(tensors=["x"]), "TypeError"),
    "metadata type": (lambda m: m.update(metadata=[]), "metadata is a list"),
    "missing field": (lambda m: m.pop("digest"), "digest"),
    "unknown field": (lambda m: m.update(base=3), "base"),
    "format": (lambda m: m.update(format=2), "format 2 is not 1"),
    "replayed version": (lambda m: m.update(version=9), "version 9 lies in the directory of version 0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_manifest_is_refused(tmp_path, lie):
    broadcast.publish(_tree(), 0, tmp_path)
    change, message = LIES[lie]
    _rewrite(tmp_path, change)
    with pytest.raises(broadcast.CorruptBroadcast, match=message):
        broadcast.pull(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"codecs": [{"name": "gzip"}]},  # a decompression bomb
        {"shape": [1 << 40, 8]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40, 8]}}},
        {"data_type": "float16"},
    ],
)
def test_zarr_json_cannot_choose(tmp_path, change):
    broadcast.publish(_tree(), 0, tmp_path)
    path = "tensors/embed/zarr.json"
    data = json.dumps({**json.loads((tmp_path / "v00000000" / path).read_bytes()), **change}).encode()
    (tmp_path / "v00000000" / path).write_bytes(data)

    def vouch(manifest):
        (entry,) = (o for o in manifest["objects"] if o["path"] == path)
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    _rewrite(tmp_path, vouch)
    with pytest.raises(broadcast.CorruptBroadcast, match="tensor 'embed'.*FAILED_PRECONDITION"):
        broadcast.pull(tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"manifest":1,"sha256":2}', b"NaN"])
def test_malformed_manifest_is_refused(tmp_path, data):
    broadcast.publish(_tree(), 0, tmp_path)
    (tmp_path / "v00000000/manifest.json").write_bytes(data)
    with pytest.raises(broadcast.CorruptBroadcast, match=r"manifest\.json"):
        broadcast.read_manifest(tmp_path, 0)


def test_tensor_inside_a_tensor_is_refused():
    with pytest.raises(ValueError, match="'a/b' lies inside another tensor"):
        broadcast._unflatten({"a": 1, "a/b": 2}, {})
    with pytest.raises(ValueError, match="'a' is also a container"):
        broadcast._unflatten({"a/b": 2, "a": 1}, {})


@pytest.mark.parametrize(
    "params, message",
    [
        ({"a/b": np.ones(1)}, "key 'a/b'"),
        ({"..": np.ones(1)}, r"key '\.\.'"),
        ({"": np.ones(1)}, "key ''"),
        ({1: np.ones(1)}, "key 1"),
        ({"a": 1.0}, "leaf 'a' is a float"),
        ({"a": np.array(["x"])}, "tensor 'a' has dtype <U1"),
        (np.ones(1), "wrap it in a dict"),
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
        broadcast.publish({"a": np.full(1, version)}, version, tmp_path, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["v00000003", "v00000004"]
    with pytest.raises(FileNotFoundError, match=r"no version 1 under .*holds \[3, 4\]"):
        broadcast.pull(tmp_path, 1)
    with pytest.raises(ValueError, match="keep=0"):
        broadcast.publish({"a": np.ones(1)}, 5, tmp_path, keep=0)


def test_missing_places(tmp_path):
    nowhere = tmp_path / "nowhere"
    assert broadcast.latest(nowhere) is None and broadcast.latest(tmp_path) is None
    for call in (broadcast.versions, broadcast.pull):
        with pytest.raises(FileNotFoundError, match="no broadcast directory"):
            call(nowhere)
    with pytest.raises(FileNotFoundError, match="no version under"):
        broadcast.pull(tmp_path)
    with pytest.raises(TimeoutError, match=r"no version >= 1 .*newest: None"):
        broadcast.wait_for(nowhere, 1, timeout_s=0.1)
    with pytest.raises(ValueError, match="gs://bucket is a URL"):
        broadcast.publish({"a": np.ones(1)}, 0, "gs://bucket")


def test_wait_for_sees_a_later_publish(tmp_path):
    broadcast.publish({"a": np.ones(1)}, 1, tmp_path)
    later = threading.Timer(0.1, broadcast.publish, ({"a": np.ones(1)}, 2, tmp_path))
    later.start()
    assert broadcast.wait_for(tmp_path, 1, timeout_s=0) == 1
    assert broadcast.wait_for(tmp_path, 2, timeout_s=10, poll_s=0.01) == 2
    later.join()


def test_version_deleted_while_read_is_not_called_corrupt(tmp_path):
    broadcast.publish(_tree(), 0, tmp_path)
    manifest = broadcast.read_manifest(tmp_path, 0)
    broadcast.remove(tmp_path, 0)
    with pytest.raises(FileNotFoundError, match="deleted while it was read"):
        broadcast._read_tensors(tmp_path, manifest, lambda tensor, array: array)


def test_killed_publisher_leaves_nothing_visible(tmp_path):
    """SIGKILL once the first manifest is written and not yet renamed: the last moment a version is invisible."""
    script = textwrap.dedent("""
        import os, signal, sys
        import numpy as np
        from sharding import broadcast
        broadcast.publish({"a": np.ones(4)}, 1, sys.argv[1])
        def die(directory):
            assert os.path.exists(os.path.join(sys.argv[1], ".tmp-v00000002", "manifest.json"))
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast._fsync = die
        broadcast.publish({"a": np.zeros(4)}, 2, sys.argv[1])
    """)
    root = pathlib.Path(__file__).parents[1]
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".tmp-v00000002", "v00000001"]
    assert broadcast.latest(tmp_path) == 1
    np.testing.assert_array_equal(broadcast.pull(tmp_path).params["a"], 1)
    broadcast.publish({"a": np.full(4, 3.0)}, 3, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["v00000001", "v00000003"]


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


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs root to mount a 1 MB tmpfs: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_full_disk_leaves_nothing(small_disk):
    small = {"a": np.ones(1000)}
    broadcast.publish(small, 0, small_disk)
    with pytest.raises(OSError, match=f"no space left.*lower keep=8.*{small_disk}") as caught:
        broadcast.publish({"a": np.ones(200_000), "b": np.ones(200_000)}, 1, small_disk)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(small_disk)) == ["v00000000"]
    broadcast.publish(small, 2, small_disk)
    assert broadcast.pull(small_disk).version == 2


def test_command_line(tmp_path, capsys):
    manifest = broadcast.publish(_tree(), 0, tmp_path)
    for argv in (["list", str(tmp_path)], ["verify", str(tmp_path)], ["verify", str(tmp_path), "--version", "0"]):
        assert broadcast.main(argv) == 0
        assert manifest.digest in capsys.readouterr().out
    (tmp_path / "v00000000/tensors/embed/c.0.0").unlink()
    for argv in (
        ["verify", str(tmp_path)],
        ["list", str(tmp_path / "nowhere")],
        ["verify", str(tmp_path), "--version", "7"],
    ):
        assert broadcast.main(argv) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_published_manifest_is_stable(tmp_path):
    """The wire format: whoever changes this dict changes FORMAT too, or old readers refuse new weights unexplained."""
    broadcast.publish({"w": [np.arange(3, dtype=np.int16)]}, 1, tmp_path, metadata={"model": "tiny"})
    body = json.loads((tmp_path / "v00000001/manifest.json").read_bytes())["manifest"]
    header, chunk = body.pop("objects")
    assert header["path"] == "tensors/w/0/zarr.json"  # its size and hash are tensorstore's business
    assert (chunk["path"], chunk["size"]) == ("tensors/w/0/c.0", 10)
    sha256 = hashlib.sha256(b"\0\0\1\0\2\0").hexdigest()
    assert body == {
        "format": 1,
        "version": 1,
        "digest": "71f059c49cbb9c84bc9c45105531f6ed4cb897b053c830fc4b0a1c0a50a23a08",
        "tensors": [{"name": "w/0", "shape": [3], "dtype": "int16", "chunk": [3], "sha256": sha256}],
        "containers": {"w": "list"},
        "metadata": {"model": "tiny"},
    }
