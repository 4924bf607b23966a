"""Leaves that wait on the host for their devices: in memory or in a file, each of the published values, put once."""

import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sharding.weights import broadcast
from sharding.weights.broadcast import placement
from sharding.weights.format import chunks
from tests.support import trees

LAYOUTS = {"whole": (), "rows": ("x",), "columns": (None, "x")}


@pytest.fixture(params=["memory", "file"])
def files(request, monkeypatch):
    """The temporary files that are made; chunks and parts are of a few rows."""
    made, create = [], placement.tempfile.TemporaryFile
    monkeypatch.setattr(
        placement.tempfile, "TemporaryFile", lambda **options: (made.append(create(**options)), made[-1])[1]
    )
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 200)
    monkeypatch.setattr(placement, "FILE_BYTES", 0 if request.param == "file" else 2**30)
    yield made
    assert len(made) > 0 if request.param == "file" else not made
    gc.collect()
    assert all(file.closed for file in made)


@pytest.mark.parametrize(
    ("files", "layout"), [*zip(["memory", "file", "file"], LAYOUTS, strict=True)], indirect=["files"]
)
def test_staged_leaves_become_those_of_a_pull(tmp_path, files, layout):
    rng = np.random.default_rng(0)
    tree = {
        "w": rng.standard_normal((48, 40)).astype(np.float32),
        "h": rng.standard_normal((150, 8)).astype(ml_dtypes.bfloat16),  # chunks of 12 rows, or of a shard's
        "empty": np.zeros((8, 0, 8), np.float32),
    }
    tree["tied"], tree["scalar"], tree["integers"] = tree["w"], np.float32(3), np.full((8, 8), 2**31 - 1, np.int32)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    shardings = {name: jax.NamedSharding(mesh, jax.P(*LAYOUTS[layout])) for name in tree}
    shardings["scalar"] = jax.NamedSharding(mesh, jax.P())
    have = None
    publisher = broadcast.Publisher(tmp_path, snapshot_every=2)
    for version in range(2):  # a snapshot, and a delta
        publisher.publish(tree, version)
        pulled = broadcast.pull(tmp_path, shardings=shardings, staged=True, base=have)
        assert all(leaf.is_finite for leaf in pulled.params.values())
        assert {n: (x.shape, x.dtype) for n, x in pulled.params.items()} == {
            n: (x.shape, x.dtype) for n, x in tree.items()
        }
        params = jax.tree.map(placement.Staged.put, pulled.params)
        have = broadcast.Pulled(version, params, {}, pulled.digest)
        assert params["tied"] is params["w"]
        assert {name: leaf.sharding for name, leaf in params.items()} == shardings
        trees.assert_same(params, tree)
        tree["h"] = np.where(rng.random((150, 8)) < 0.1, 1, tree["h"]).astype(ml_dtypes.bfloat16)


def test_a_number_that_is_not_finite_is_seen(tmp_path, files):
    tree = {}
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        name = np.dtype(dtype).name
        tree[f"{name}_largest"] = largest = np.full((100, 3), jnp.finfo(dtype).max, dtype)
        for value in (np.nan, np.inf, -np.inf):
            tree[f"{name}_{value}"] = np.where(np.arange(300).reshape(100, 3) == 150, value, -largest).astype(dtype)
    broadcast.publish(tree, 0, tmp_path)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = broadcast.pull(tmp_path, shardings=dict.fromkeys(tree, whole), staged=True).params
    assert {name for name, leaf in found.items() if leaf.is_finite} == {name for name in tree if "largest" in name}


def test_a_damaged_version_leaves_no_file(tmp_path, files):
    broadcast.publish({"w": np.ones((100, 3), np.float32)}, 0, tmp_path)
    (last,) = (tmp_path / "v00000000/tensors/w").glob("c.5.0")
    last.write_bytes(bytes(last.stat().st_size))
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(broadcast.CorruptSource):
        broadcast.pull(tmp_path, shardings={"w": whole}, staged=True)
