"""Adapters through the whole walk: RL trains and publishes them alone, servers run them, a resume repeats, an export loads."""

import contextlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import quickstart
from models import hf, lora
from rl.experiment import experiment
from rl.learning.learner import train_step
from sharding.mesh import checkpoint
from sharding.mesh import mesh as mesh_lib
from sharding.weights import broadcast
from sharding.weights.download import source
from tests.support import small_learner, tiny_run

pytestmark = pytest.mark.slow
FIELDS = {"lora.rank": 4, "lora.alpha": 8.0, "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 0}


def test_adapters_train_publish_resume_and_export(tmp_path):
    """Stopped after step 2 and carried on to 4, against 4 steps in one go."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    for workdir, num_steps in ((straight, 4), (resumed, 2), (resumed, 4)):
        result = tiny_run.run(workdir, rl__num_steps=num_steps, **FIELDS)
        assert result.returncode == 0, result.stderr
    assert "resuming after step 2" in result.stdout
    assert tiny_run.curve(resumed) == tiny_run.curve(straight) and len(tiny_run.curve(straight)) == 4
    for line in tiny_run.curve(straight):  # servers ran the weights of the step
        assert line["loss/mismatch_kl"] < 1e-6 and line["trust/num_refused"] == 0

    state = saved_state(resumed / "checkpoints", step=4)
    frozen, adapters, first = leaves(state.frozen), leaves(lora.rounded(state.params)), None
    for workdir in (straight, resumed):
        with contextlib.closing(source.open(workdir / "weights")) as opened:
            for version in (3, 4):
                before = opened.stats().get("num_bytes", 0)
                first = broadcast.pull(opened, version, base=first).locked()
                assert_same(leaves(first.params["base"]), frozen)
                if (workdir, version) != (straight, 3):  # once for both runs, and through the resume
                    assert opened.stats()["num_bytes"] - before < 2 * sum(x.nbytes for x in adapters.values())
            assert_same(leaves(first.params["adapters"]), adapters)
    exported = {}
    for name, kernel in frozen.items():
        if (kind := name.rpartition("/")[2]) in small_learner.PRODUCTS:
            a, b = (adapters[f"{name}/{part}"].astype(np.float64) for part in "ab")
            assert a.any() and b.any()
            kernel = kernel + 8.0 / 4 * np.einsum(small_learner.PRODUCTS[kind], a, b)
        exported[name] = kernel

    argv = [sys.executable, "-m", "rl.export", f"--workdir={resumed}", f"--output={tmp_path / 'exported'}"]
    result = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    found = leaves(hf.load(tmp_path / "exported")[1])
    assert found.keys() == exported.keys()
    for name, kernel in exported.items():
        np.testing.assert_allclose(found[name], kernel, atol=1e-6, err_msg=name)  # one float32 sum of size 1


def saved_state(directory, step):
    """The train state as the config of the run describes it, on one device."""
    config = quickstart.get_config()
    config.update_from_flattened_dict(tiny_run.TINY | FIELDS)
    exp, mesh = experiment.resolve(config), mesh_lib.create({}, jax.devices()[:1])
    assert exp.lora == lora.LoraConfig(4, 8.0)
    with checkpoint.Checkpointer(directory) as checkpointer:
        return checkpointer.restore(train_step.abstract_state(exp.learner(mesh)), step)[1]


def leaves(tree) -> dict[str, np.ndarray]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in found}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
