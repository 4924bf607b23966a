"""An accelerator that cannot be used ends a command in one line; JAX alone would go on with the CPU."""

import importlib.util
import logging
import os
import subprocess
import sys

import jax
import pytest

from configs import finetune
from rl.experiment.plan import sizes
from sharding.mesh import mesh
from tests.support import tiny_run

LOG = logging.getLogger("jax._src.xla_bridge")
BUSY = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by\nprocess with pid 7"


@pytest.mark.parametrize(
    ("texts", "has_libtpu", "refusal"),
    [
        ([(logging.INFO, "Unable to initialize backend 'tpu': UNIMPLEMENTED: no libtpu")], False, ""),
        ([(logging.INFO, BUSY), (logging.WARNING, "A Google TPU may be present on this machine, but")], False, ""),
        (
            [(logging.INFO, BUSY), (logging.WARNING, "A Google TPU may be present on this machine, but")],
            True,
            "'tpu': ABORTED: The TPU is already in use by process with pid 7; end the process that uses it, if",
        ),
        (
            [(logging.WARNING, "CUDA backend failed to initialize: CUDA_ERROR_X.(Set TF_CPP")],
            False,
            "CUDA_ERROR_X.*; end",
        ),
        ([(logging.WARNING, "An NVIDIA GPU may be present on this machine, but")], True, ""),
    ],
)
def test_an_accelerator_in_use_is_refused_and_one_without_a_plugin_is_not(
    monkeypatch, caplog, texts, has_libtpu, refusal
):
    def find():
        for level, text in texts:
            LOG.log(level, text)
        return ["cpu:0"]

    monkeypatch.setattr(jax, "devices", find)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_libtpu else None)
    if refusal:
        with pytest.raises(ValueError, match=refusal) as error:
            mesh.devices()
        assert "\n" not in str(error.value)
    else:
        assert mesh.devices() == ["cpu:0"]
        assert [text for _, text in texts if "may be" in text] == caplog.messages


def test_a_gpu_that_is_not_there_is_refused_in_one_line(monkeypatch):
    def find():
        assert None  # as JAX does

    monkeypatch.setattr(jax, "devices", find)
    with pytest.raises(ValueError, match="^JAX_PLATFORMS = 'cpu', and this machine has no NVIDIA GPU that JAX sees; "):
        mesh.devices()


def test_open_sizes_are_chosen_for_devices_that_were_asked_for_in_one_line(monkeypatch):
    """A config with open sizes ended in a traceback where one of fixed sizes had a line."""

    def find(*_):
        raise RuntimeError("no such platform")

    monkeypatch.setattr(jax, "devices", find)
    monkeypatch.setattr(jax, "local_devices", find)
    with pytest.raises(ValueError, match="^no such platform; end the process"):
        sizes.present(finetune.get_config())


@pytest.mark.slow
def test_a_platform_that_is_named_and_cannot_be_used_ends_a_run_in_one_line(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "tpu", "TPU_SKIP_MDS_QUERY": "1"}
    command = [sys.executable, "-m", "rl.train", "--config=configs/quickstart.py", f"--workdir={tmp_path}/w"]
    result = subprocess.run(command, cwd=tiny_run.ROOT, env=env, capture_output=True, text=True, timeout=100)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and line.startswith("error: Unable to initialize backend 'tpu'")
    assert line.endswith("or set JAX_PLATFORMS=cpu to run on the CPU")
