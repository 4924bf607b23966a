"""Two hosts publish one tree: each writes its own shards, none twice, and both fail if one does."""

import json
import pathlib
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from sharding.weights import broadcast

ROOT = pathlib.Path(__file__).parents[4]

SCRIPT = """
import json, sys
import jax
import numpy as np
port, process, root = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, process)
from sharding.weights import broadcast
from sharding.weights.broadcast import destination
from sharding.weights.download import source
from sharding.weights.format import chunks
chunks.CHUNK_BYTES = 256
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
values = {"w": rng.standard_normal((32, 16)).astype(np.float32), "v": rng.standard_normal((8, 6)).astype(np.float32)}
values["r"], values["n"] = np.arange(5, dtype=np.int32), np.ones(3)
specs = {"w": jax.P("x", "y"), "v": jax.P(None, "y"), "r": jax.P()}

def put(values):
    tree = {}
    for name, spec in specs.items():
        sharding = jax.NamedSharding(mesh, spec)
        tree[name] = jax.make_array_from_callback(values[name].shape, sharding, lambda i, a=values[name]: a[i])
    tree["n"] = values["n"]  # a numpy leaf: the same on each host
    tree["t"] = tree["r"]  # tied
    return tree

shardings = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
shardings |= {"n": jax.NamedSharding(mesh, jax.P()), "t": shardings["r"]}

put_paths, real_put = [], destination.Directory.put
def noting_put(self, path, parts):
    put_paths.append(path)
    return real_put(self, path, parts)
destination.Directory.put = noting_put

read_paths = []
class Noting(source.Directory):
    def read(self, version, entry, into):
        read_paths.append(entry.path)
        super().read(version, entry, into)

jax.config.update("jax_enable_x64", True)
publisher, have = broadcast.Publisher(root, snapshot_every=3), None
digests = []
for version in range(4):
    digests.append(publisher.publish(put(values), version, metadata={"step": version}).digest)
    for before in (None, have):
        pulled = broadcast.pull(Noting(root), shardings=shardings, base=before)
        for name, leaf in pulled.params.items():
            for shard in leaf.addressable_shards:
                expected = values["r" if name == "t" else name][shard.index]
                assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected).tobytes(), (version, name)
    have = pulled
    values = {n: a if n == "n" else np.where(rng.random(a.shape) < 0.1, a + 1, a).astype(a.dtype) for n, a in values.items()}

def failing_put(self, path, parts):
    if process == 1 and path.startswith("tensors/w/c"):
        raise OSError("disk of host 1 is broken")
    return real_put(self, path, parts)
destination.Directory.put = failing_put
try:
    broadcast.publish(put(values), 4, root)
    error = ""
except OSError as caught:
    error = str(caught)
destination.Directory.put = real_put
broadcast.publish(put(values), 5, root)
print(json.dumps({"put": put_paths, "read": sorted(set(read_paths)), "digests": digests, "error": error}))
"""


@pytest.mark.slow
def test_two_hosts(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), str(port)]
    hosts = [
        subprocess.Popen(
            [*command, str(i), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        outputs = [host.communicate(timeout=240) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(error[-3000:] for _, error in outputs)
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert first["digests"] == second["digests"] == [broadcast.read_manifest(tmp_path, v).digest for v in range(4)]
    arrays = [{p for p in host["put"] if p.startswith("tensors/")} for host in (first, second)]
    assert not arrays[0] & arrays[1] and all(any(p.startswith("tensors/w/c") for p in paths) for paths in arrays)
    assert {p for p in arrays[1] if not p.startswith("tensors/w/")} == set()  # a replicated array is written once
    for paths in (first["read"], second["read"]):  # half of the rows of w each, all of the rest
        rows = {p for p in paths if p.startswith("tensors/w/c")}
        assert 0 < len(rows) < len({p for p in first["read"] + second["read"] if p.startswith("tensors/w/c")})
    assert "hosts [1] could not publish" in first["error"] and second["error"] == "disk of host 1 is broken"
    assert broadcast.versions(tmp_path) == [0, 1, 2, 3, 5]
    assert [broadcast.read_manifest(tmp_path, v).base for v in range(4)] == [None, 0, 1, None]
    for version in (0, 1, 2, 3, 5):
        broadcast.verify(tmp_path, version)
    listed = {json.loads(line)["path"] for line in (tmp_path / "v00000001/objects.jsonl").read_text().splitlines()}
    assert listed == {o.path for o in broadcast.read_manifest(tmp_path, 1).objects}
    assert not list(tmp_path.rglob(".*")), "what hosts tell each other is gone"
    pulled = broadcast.pull(tmp_path, 1)
    assert pulled.metadata == {"step": 1} and pulled.params["t"] is pulled.params["r"]
    np.testing.assert_array_equal(pulled.params["n"], 1)
