"""Shared by the tests of whole runs: the quickstart with a smaller model, fewer steps and tasks, as a command."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest

from rl.experiment.reporting import metrics
from sharding.weights import broadcast

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = {
    "model.model_dim": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.ffn_dim": 64,
    "warmup.num_steps": 3,
    "warmup.tasks_per_step": 8,
    "rl.num_steps": 6,
    "rl.prompts_per_step": 4,
    "rl.samples_per_prompt": 4,
    "evaluation.num_tasks": 8,
    "checkpoint.every": 2,
    "inference.num_slots": 16,
    "inference.prefill_batch": 4,
    "env.options.reward": "lcs",  # an untrained model scores 0 on "exact", and no advantage means no gradient
    "trust.invited_rate": 0.5,
}


def command(workdir, config="quickstart", module="rl.train", **overrides) -> list[str]:
    fields = TINY | {key.replace("__", "."): value for key, value in overrides.items()}
    return [
        *(sys.executable, "-m", module, f"--config=configs/{config}.py", f"--workdir={workdir}"),
        *(f"--config.{key}={value}" for key, value in fields.items()),
    ]


def run(*args, env=None, **kwargs) -> subprocess.CompletedProcess:
    environment, argv = os.environ | (env or {}), command(*args, **kwargs)
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def lines(workdir, phase="rl") -> list[dict]:
    """All metrics of the steps of a phase."""
    return metrics.read(workdir / "metrics.jsonl", phase)


def curve(workdir, phases=("rl",)) -> list[dict]:
    """The metrics of the steps of these phases, without those that depend on the clock, or on the secret: it draws the groups to verify."""
    lines = [record for record in metrics.read(workdir / "metrics.jsonl") if record["phase"] in phases]
    varying = ("time/", "machine/", "trust/num_checked", "trust/num_unverified")
    return [{k: v for k, v in line.items() if not k.startswith(varying)} for line in lines]


def learned(workdir) -> tuple[list[dict], list[str]]:
    """Everything that the learner computed in the steps of a run, and the digests of the weights that it published."""
    areas = ("loss/", "rollout/", "optimizer/", "grad_norm/", "sync/")
    found = [{name: value for name, value in line.items() if name.startswith(areas)} for line in lines(workdir)]
    return found, [broadcast.read_manifest(workdir / "weights", n).digest for n in range(len(found) + 1)]


@contextlib.contextmanager
def small_disk(tmp_path, size="400k"):
    """Yields a folder on a disk of that size; skips the test where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)
