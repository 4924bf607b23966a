"""A manifest has one meaning: bytes that do not match its digest and signature are rejected with the reason."""

import dataclasses
import json

import blake3
import numpy as np
import pytest
import tensorstore as ts
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.weights.format import journal, manifest

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()


def digest_of(text: str) -> str:
    return blake3.blake3(text.encode()).hexdigest()


def snapshot() -> manifest.Manifest:
    """Two tensors in three chunks, one tied to the first, and the objects that they need."""
    a = manifest.Tensor("a", (4, 3), "bfloat16", (2, 3), (digest_of("a0"), digest_of("a1")))
    b = manifest.Tensor("b/0", (), "int8", (), (digest_of("b"),))
    c = manifest.Tensor("c", (4, 3), "bfloat16", (2, 3), (), tied_to="a")
    objects = []
    for t in (a, b):
        data = manifest.zarr_json(t)
        objects.append(journal.Object(f"tensors/{t.name}/zarr.json", len(data), blake3.blake3(data).hexdigest()))
        objects += [
            journal.Object(path, t.chunk_bytes + 4, digest)
            for (path, _), digest in zip(t.chunk_regions(), t.chunks, strict=True)
        ]
    return manifest.Manifest(
        version=3,
        base=None,
        delta_of=None,
        encodings=("zarr3",),
        digest_before=None,
        digest_after=manifest.digest((a, b, c)),
        tensors=(a, b, c),
        objects=tuple(objects),
        containers={"b": "list"},
        metadata={"é": [1.5, None]},
        run="a run",
    )


def deltas() -> manifest.Manifest:
    """The next version: patches for one chunk of `a` and for `b`, in one object."""
    before = snapshot()
    a, b, c = before.tensors
    a = dataclasses.replace(a, chunks=(digest_of("new"), a.chunks[1]), deltas=((0, 0, 10), None))
    b = dataclasses.replace(b, deltas=((0, 10, 5),))
    return dataclasses.replace(
        before,
        version=4,
        base=3,
        delta_of=3,
        encodings=("xor",),
        digest_before=before.digest,
        digest_after=manifest.digest((a, b, c)),
        tensors=(a, b, c),
        objects=(journal.Object("deltas/00000-000000.bin", 15, digest_of("pack")),),
    )


@pytest.mark.parametrize("make", [snapshot, deltas])
@pytest.mark.parametrize("key", [None, KEY])
def test_round_trip(make, key):
    parsed = manifest.parse(manifest.encode(make(), key), version=make().version, trusted_key=key and PUBLIC)
    assert parsed.public_key == (key and PUBLIC) and (parsed.signature is None) == (key is None)
    assert dataclasses.replace(parsed, public_key=None, signature=None) == make()


def test_digest_against_its_definition():
    rows = []
    for t in sorted(snapshot().tensors, key=lambda t: t.name):
        chunks = [digest_of("b")] if t.name == "b/0" else [digest_of("a0"), digest_of("a1")]
        combined = blake3.blake3(b"".join(map(bytes.fromhex, chunks))).hexdigest()
        rows.append([t.name, t.dtype, list(t.shape), list(t.chunk), combined])
    assert snapshot().digest == blake3.blake3(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def test_grid_and_cells():
    t = manifest.Tensor("w", (5, 4), "float32", (2, 4), ())
    assert t.grid == (3, 1) and t.chunk_bytes == 32
    assert list(t.chunk_regions()) == [
        ("tensors/w/c.0.0", (slice(0, 2), slice(0, 4))),
        ("tensors/w/c.1.0", (slice(2, 4), slice(0, 4))),
        ("tensors/w/c.2.0", (slice(4, 5), slice(0, 4))),
    ]
    three = manifest.Tensor("w", (5, 4, 7), "int8", (2, 3, 2), ())
    assert [three.region(i) for i in range(24)] == [region for _, region in three.chunk_regions()]
    assert manifest.Tensor("s", (), "bool", (), ()).region(0) == ()
    assert list(manifest.Tensor("s", (), "bool", (), ()).chunk_regions()) == [("tensors/s/c", ())]
    for rows in (3, 1 << 40):  # which no reader may count
        assert list(manifest.Tensor("e", (rows, 0), "bool", (3, 1), ()).chunk_regions()) == []


@pytest.mark.parametrize("dtype", manifest.ITEM_BYTES)
def test_stock_tensorstore_opens_our_array_metadata(dtype):
    t = manifest.Tensor("w", (4, 3), dtype, (2, 3), ())
    context = ts.Context()
    store = ts.KvStore.open("memory://", context=context).result()
    store.write("zarr.json", manifest.zarr_json(t)).result()
    opened = ts.open({"driver": "zarr3", "kvstore": "memory://"}, context=context, open=True).result()
    assert opened.shape == t.shape and opened.chunk_layout.read_chunk.shape == t.chunk
    assert opened.dtype.name == manifest.STORED_AS.get(dtype, dtype)
    assert opened.dtype.numpy_dtype.itemsize == manifest.ITEM_BYTES[dtype]


# ---- lies ------------------------------------------------------------------------------------------------------------


def sealed(body: dict) -> bytes:
    """A liar's manifest: changed, then hashed and signed again, so that only the rules can refuse it."""
    body = {name: value for name, value in body.items() if name not in ("own_digest", "signature")}
    body["own_digest"] = blake3.blake3(manifest.canonical(body)).hexdigest()
    body["signature"] = KEY.sign(manifest.canonical(body)).hex()
    return manifest.canonical(body)


def first_tensor(**fields):
    return lambda m: m["tensors"][0].update(fields)


def first_object(**fields):
    return lambda m: m["objects"][0].update(fields)


LIES = {
    "format": (
        lambda m: m.update(format=5),
        r"^format 5 is not 4, which this release reads; publish again, or use the release that wrote it$",
    ),
    "missing field": (lambda m: m.pop("run"), r"in addition to those of format 4, the fields \['run'\]"),
    "unknown field": (lambda m: m.update(colour="red"), "colour"),
    "version": (lambda m: m.update(version=9), "is of version 9, not of version 3"),
    "version sign": (lambda m: m.update(version=-1), "version is '-1'"),
    "base": (lambda m: m.update(base=-1), "base is '-1'"),
    "base of snapshot": (lambda m: m.update(base=2), "base 2 is not None, which encodings"),
    "delta_of alone": (lambda m: m.update(delta_of=2), "delta_of is 2"),
    "encoding": (lambda m: m.update(encodings=["gzip"]), "encodings .*gzip.* are not one of"),
    "encodings twice": (lambda m: m.update(encodings=["zarr3", "zarr3"]), "are not one of"),
    "no encoding": (lambda m: m.update(encodings=[]), "are not one of"),
    "run": (lambda m: m.update(run="x" * 201), "run is .*at most 200 characters"),
    "traversal": (first_object(path="tensors/../../secret"), "secret.*not a relative path"),
    "absolute": (first_object(path="/etc/passwd"), "/etc/passwd.*not a relative path"),
    "hidden": (first_object(path="tensors/.a/c"), r"\.a/c.*not a relative path"),
    "itself": (first_object(path="manifest.json"), "manifest.json.*not a relative path"),
    "object size": (first_object(size=1 << 60), "objects.0.size is '1152921504606846976'"),
    "negative size": (first_object(size=-1), "objects.0.size is '-1'"),
    "float size": (first_object(size=1.0), "objects.0.size is '1.0': .*valid integer"),
    "other size": (lambda m: m["objects"][1].update(size=17), "size=16, .*, not .*size=17"),
    "other hash": (lambda m: m["objects"][1].update(digest="0" * 64), "needs .*, not .*digest='000"),
    "other zarr.json": (first_object(digest="0" * 64), "zarr.json.*, not .*digest='000"),
    "no hash": (first_object(digest="x" * 64), "objects.0.digest is 'xxx.*0-9a-f"),
    "extra field of object": (first_object(mode=7), "not canonical.*too many"),
    "duplicate object": (lambda m: m["objects"].append(m["objects"][0]), "an object path occurs twice"),
    "no object": (lambda m: m["objects"].pop(), "needs .*'tensors/b/0/c'.*, not None"),
    "surplus object": (
        lambda m: m["objects"].append({"path": "x", "size": 1, "digest": "0" * 64}),
        r"\['x'\] belong to no tensor",
    ),
    "name": (first_tensor(name="../w"), r"\.\./w.*plain segments"),
    "long name": (first_tensor(name="x/" * 500 + "x"), "not a path of plain segments"),
    "duplicate tensor": (lambda m: m["tensors"].append(m["tensors"][0]), "a tensor name occurs twice"),
    "dtype": (first_tensor(dtype="object"), "unknown dtype 'object'"),
    "same-size dtype": (lambda m: m["tensors"][1].update(dtype="bool"), "needs .*zarr.json"),
    "absurd shape": (first_tensor(shape=[1 << 60, 3]), "tensors.0.shape.0 is '1152921504606846976'"),
    "negative shape": (first_tensor(shape=[-4, 3]), "tensors.0.shape.0 is '-4': .* 0; read it from another relay"),
    "rank": (first_tensor(shape=[1] * 33, chunk=[1] * 33), "tensors.0.shape is .*at most 32"),
    "huge shape": (first_tensor(shape=[1 << 40, 3]), "has 2 chunk digests for 549755813888 chunks"),
    "huge empty shape": (first_tensor(shape=[1 << 48, 0], chunks=[]), "has dims for 562949953421312 bytes, more than"),
    "huge chunk": (first_tensor(shape=[1 << 40, 3], chunk=[1 << 40, 3]), "bytes, more than 268435456"),
    "zero chunk": (first_tensor(chunk=[0, 3]), "tensors.0.chunk.0 is '0'"),
    "chunk rank": (first_tensor(chunk=[2]), r"has chunk shape \(2,\)"),
    "chunk digests": (first_tensor(chunks=["0" * 64]), "has 1 chunk digests for 2 chunks"),
    "chunk digest": (first_tensor(chunks=["0", "1"]), "tensors.0.chunks.0 is '0'"),
    "deltas in a snapshot": (first_tensor(deltas=[None, None]), "tensor 'a' must have deltas with"),
    "tensor field missing": (lambda m: m["tensors"][0].pop("tied_to"), "not canonical.*too few"),
    "tensor field added": (first_tensor(colour="red"), "not canonical.*too many"),
    "tied to nothing": (lambda m: m["tensors"][2].update(tied_to="z"), "'c' is tied to 'z'"),
    "tied to itself": (lambda m: m["tensors"][2].update(tied_to="c"), "'c' is tied to 'c'"),
    "tied to another": (lambda m: m["tensors"][2].update(tied_to="b/0"), "'c' is tied to 'b/0'"),
    "tied with chunks": (lambda m: m["tensors"][2].update(chunks=["0" * 64]), "has chunks or deltas of its own"),
    "tied with deltas": (lambda m: m["tensors"][2].update(deltas=[]), "has chunks or deltas of its own"),
    "container": (lambda m: m["containers"].update({"b/..": "list"}), "container name 'b/..'"),
    "container kind": (lambda m: m["containers"].update({"b": "set"}), "unknown kind 'set'"),
    "container is tensor": (lambda m: m["containers"].update({"a": "dict"}), "'a' is also a container"),
    "list": (lambda m: m["containers"].update({"": "list"}), "list at ''"),
    "none with children": (lambda m: m["containers"].update({"b": "none"}), "None at 'b' has children"),
    "digest": (lambda m: m.update(digest_after="0" * 64), "digest_after '000.* is not"),
    "digest_before": (lambda m: m.update(digest_before="0" * 64), "digest_before is"),
    "public key": (lambda m: m.update(public_key="0"), "not one by public_key '0'"),
}
DELTA_LIES = {
    "no base": (lambda m: m.update(base=None, delta_of=None), "delta_of is None with encodings"),
    "two bases": (lambda m: m.update(base=2), "base 2 is not 3, which encodings"),
    "base of the future": (lambda m: m.update(base=4, delta_of=4), "is not older than version 4"),
    "no digest_before": (lambda m: m.update(digest_before=None), "digest_before is None"),
    "no deltas": (first_tensor(deltas=None), "tensor 'a' must have deltas with"),
    "too few deltas": (first_tensor(deltas=[None]), "has 1 deltas for 2 chunks"),
    "delta of two": (first_tensor(deltas=[[0, 0], None]), r"tensors.0.deltas.0.2 is '\[0, 0\]': Field required"),
    "negative offset": (first_tensor(deltas=[[0, -1, 10], None]), "tensors.0.deltas.0.1 is '-1'"),
    "no such object": (first_tensor(deltas=[[1, 0, 10], None]), "outside every object of deltas"),
    "past its end": (first_tensor(deltas=[[0, 10, 10], None]), "outside every object of deltas"),
    "bytes unused": (first_tensor(deltas=[[0, 0, 9], None]), "has 15 bytes, but its patches add up to 14"),
    "object elsewhere": (first_object(path="tensors/a/c.0.0"), "outside every object of deltas"),
    "huge patch": (
        lambda m: (
            m["objects"][0].update(size=400 << 20),
            m["tensors"][0].update(deltas=[[0, 0, (400 << 20) - 5], None]),
        ),
        "at most 335544320 are allowed",
    ),
    "arrays": (lambda m: m.update(encodings=["xor", "zarr3"], base=None), "needs .*zarr.json.*, not None"),
}


@pytest.mark.parametrize(
    ("make", "lie"), [(snapshot, lie) for lie in LIES.items()] + [(deltas, lie) for lie in DELTA_LIES.items()]
)
def test_a_lie_is_refused_with_its_reason(make, lie):
    change, message = lie[1]
    body = json.loads(manifest.encode(make(), KEY))
    change(body)
    with pytest.raises(journal.CorruptSource, match=message):
        manifest.parse(sealed(body), version=make().version)


MANY = [-1] * 9


@pytest.mark.parametrize(
    "change",
    [first_tensor(**{field: MANY}) for field in ("shape", "chunk", "chunks", "deltas")]
    + [lambda m, field=field: m.update({field: MANY}) for field in ("encodings", "tensors", "objects")],
)
def test_a_list_of_mistakes_is_one_error(change):
    """Memory: a hostile list of a million numbers must not become a million errors."""
    body = json.loads(manifest.encode(snapshot(), KEY))
    change(body)
    with pytest.raises(journal.CorruptSource) as error:
        manifest.parse(sealed(body))
    assert error.value.__cause__.error_count() == 1


DATA, UNSIGNED = manifest.encode(snapshot(), KEY), json.loads(manifest.encode(snapshot()))


@pytest.mark.parametrize(
    ("data", "key", "message"),
    [
        (DATA, OTHER.public_key().public_bytes_raw().hex(), "not by the trusted"),
        (manifest.encode(snapshot()), PUBLIC, "signed by None, not by the trusted"),
        (DATA.replace(b'"run":"a run"', b'"run":"b run"'), None, "its digest is"),
        (
            manifest.encode(snapshot(), OTHER).replace(
                OTHER.public_key().public_bytes_raw().hex().encode(), PUBLIC.encode()
            ),
            None,
            "its digest is",
        ),
        (DATA.replace(b',"tensors"', b', "tensors"'), None, "not canonical"),
        (DATA.replace(b'"run":"a run"', b'"run":"x","run":"a run"'), None, "not canonical"),
        (b" " + DATA, None, "not canonical"),
        (manifest.canonical(UNSIGNED | {"signature": "0" * 128}), None, "no public_key"),
    ],
)
def test_who_signed_what(data, key, message):
    with pytest.raises(journal.CorruptSource, match=message):
        manifest.parse(data, trusted_key=key)


@pytest.mark.parametrize("signature", [None, "", "0" * 128, "zz" * 64, OTHER.sign(b"").hex()])
def test_a_signature_that_does_not_fit(signature):
    body = json.loads(DATA) | {"signature": signature}
    with pytest.raises(journal.CorruptSource, match="signature"):
        manifest.parse(manifest.canonical(body), trusted_key=PUBLIC)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format":4}', b"NaN", b"1e999", b'{"format":' + b"9" * 5000 + b"}"],
)
def test_malformed_bytes(data):
    with pytest.raises(journal.CorruptSource):
        manifest.parse(data)


def test_too_many_bytes_are_not_even_read(monkeypatch):
    monkeypatch.setattr(journal, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(journal.CorruptSource, match="at most 100 are allowed"):
        manifest.parse(DATA)


def test_random_values_in_random_places_are_refused_and_nothing_else_happens():
    """Each run puts a wrong value somewhere in the tree of JSON, re-signed; a crash would be another exception."""
    rng = np.random.default_rng(0)
    values = [None, True, -1, 0, 1 << 70, 1.5, "", "../x", "x" * 300, [], {}, [[]], {"a": 1}, float("1e308")]
    refused = 0
    for _ in range(600):
        body = json.loads(manifest.encode([snapshot, deltas][rng.integers(2)](), KEY))
        node = body
        while True:
            key = list(node)[rng.integers(len(node))] if isinstance(node, dict) else int(rng.integers(len(node)))
            if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
                break
            node = node[key]
        node[key] = values[rng.integers(len(values))]
        try:
            manifest.parse(sealed(body))
        except journal.CorruptSource as error:
            refused += 1
            assert len(str(error)) < 2000
    assert refused > 450  # some values are allowed where they fall: metadata, run, another version number


def test_what_nobody_signed_is_small_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(json, "loads", lambda data: pytest.fail("parsed"))
    lists, large = b"[" + b"[]," * (1 << 20) + b"1]", b'"' + b"x" * manifest.MAX_UNPROVED_BYTES + b'"'
    for data, match in (
        (lists, "manifest has 1048577 lists in 3145731 bytes"),
        (large, "at most 16777216 are allowed"),
    ):
        with pytest.raises(journal.CorruptSource, match=match):
            manifest.parse(data)


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "metadata", [{"a": "\ud800"}, {"\udfff": 1}, nested(200), {"a": float("nan")}, {"a": {1}}, [1]]
)
def test_metadata_that_readers_refuse_is_not_published(metadata):
    for write in (manifest.readable, lambda m: manifest.encode(dataclasses.replace(snapshot(), metadata=m), KEY)):
        with pytest.raises((ValueError, TypeError)):
            write(metadata)


@pytest.mark.parametrize("metadata", [{"a": (1, 2.5, None)}, {"é": "\U0001f600"}, nested(150), None])
def test_metadata_that_is_published_is_read(metadata):
    body = dataclasses.replace(snapshot(), metadata=manifest.readable(metadata))
    assert manifest.parse(manifest.encode(body, KEY)).metadata == manifest.readable(metadata)
