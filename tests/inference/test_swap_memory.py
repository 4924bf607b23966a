"""Swaps of a server's weights take no second copy of them: measured on a CPU, where the devices' memory is the process's own."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import pytest

from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.engine import weights
from inference.server import startup
from models import config as config_lib
from models import transformer
from models.kernels import cpu_transposed, int8
from sharding.mesh import mesh as mesh_lib
from sharding.weights import broadcast
from tests.support import tiny

WIDE = dict(model_dim=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn_dim=3072)
# 438 and 219 MB.
MODELS = {
    "float32": tiny.model(**WIDE, num_layers=8),
    "bfloat16": tiny.model(**WIDE, num_layers=8, dtype="bfloat16", param_dtype="bfloat16"),
}
CONFIG = engine_lib.EngineConfig(num_slots=2, max_model_len=32, prefill_batch=1, steps_per_call=2)
NUM_SWAPS = 20


def peak_bytes(work) -> int:
    """Returns the largest resident size of this process while `work` runs."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    work()
    (line,) = (x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def swap_all(root: str) -> None:
    """Serves while two versions take turns; prints the peak of resident bytes without a swap, and with all."""
    server = startup.prepare(root, CONFIG).run()
    ask = request_lib.GenerateRequest(range(8), max_tokens=20)

    def swap():
        for turn in range(NUM_SWAPS):
            running = server.scheduler.submit(ask)
            server.update(turn % 2, rollback=True)
            assert running.result()[0].tokens

    print(peak_bytes(lambda: server.scheduler.submit(ask).result()), peak_bytes(swap))
    assert server.scheduler.stats["weight_updates"] == NUM_SWAPS
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", MODELS)
def test_twenty_swaps_need_no_second_copy(tmp_path, dtype):
    model: config_lib.ModelConfig = MODELS[dtype]
    metadata = {"model": dataclasses.asdict(model), "tokenizer": "byte_chatml"}
    for version in range(2):
        broadcast.publish(transformer.init(jax.random.key(version), model), version, tmp_path, metadata=metadata)
    done = subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    without, peak = map(int, done.stdout.split()[-2:])
    assert peak - without <= 0.05 * transformer.num_bytes(model), (without, peak)


@pytest.mark.parametrize("kind", config_lib.QUANTIZATIONS)
def test_each_old_array_is_deleted_before_its_successor_is_placed(monkeypatch, kind):
    """But for an array that stays."""
    model = tiny.model()
    store = weights.Store(model, mesh_lib.create({}, jax.devices()[:1]), kind)
    old = store.load(tiny.params(model, 0))
    is_leaf = lambda x: isinstance(x, cpu_transposed.Transposed | int8.Quantized)  # noqa: E731
    leaves, place, counts = jax.tree.leaves(old, is_leaf=is_leaf), weights.Store._placed, []

    def counted(*row):
        counts.append(sum(jax.tree.leaves(leaf)[0].is_deleted() for leaf in leaves))
        return place(*row)

    monkeypatch.setattr(weights.Store, "_placed", counted)
    new = store.load(tiny.params(model, 1), old)
    assert counts == list(range(1, len(leaves) + 1))
    if kind == "none":
        assert not any(x.is_deleted() for x in jax.tree.leaves(store.load(new, new)))


def test_a_jax_array_is_deleted_once_the_server_has_it_in_another_form():
    model = tiny.model()
    params = jax.tree.map(jax.numpy.asarray, tiny.params(model, 0))
    weights.Store(model, mesh_lib.create({}, jax.devices()[:1])).load(params)
    assert params["layers"]["000"]["mlp"]["up"].is_deleted()
    assert not params["embed"].is_deleted() and not params["final_norm"].is_deleted()


if __name__ == "__main__":
    swap_all(sys.argv[1])
