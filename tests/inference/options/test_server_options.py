"""Mistakes in the options of `python -m inference.serve` that are found before JAX is imported."""

import os
import pathlib
import subprocess
import sys

import pytest

from inference import serve
from inference.engine import engine as engine_lib
from inference.options import server_options
from models.kernels import cpu_dtype

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_the_defaults_are_those_of_the_engine():
    assert server_options.SIZES["num_pages"] == engine_lib.AUTO
    assert server_options.DTYPES == cpu_dtype.DTYPES


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--model", "m", "--quantize", "int5"], 2, "--quantize: invalid choice: 'int5'"),
        (["--model", "m", "--dtype", "float16"], 1, "--dtype float16 is unknown; choose auto, float32 or bfloat16"),
        (
            ["--weights", "."],
            1,
            "--weights . has no weights/ of a run, and no published version such as v00000000/; give",
        ),
    ],
)
def test_a_mistake_is_refused_before_jax_is_imported(options, status, words, tmp_path):
    """It took 8 s."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise SystemExit(7)")
    command = [sys.executable, "-m", "inference.serve", *options]
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == status and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    good = subprocess.run([*command[:3], "--model", "m"], cwd=ROOT, env=variables, capture_output=True, check=False)
    assert good.returncode == 7


FOLDERS = {
    "model": (["config.json", "model.safetensors"], "serve it by --model "),
    "other": (["notes.txt"], "give the working directory of a run, or its weights/"),
    "hidden": ([".lock"], ""),
    "empty": ([], ""),
    "version": (["v00000000/objects.jsonl"], ""),
    "begun": (["epoch.jsonl"], ""),
    "run": (["weights/v00000000/manifest.json", "config.json"], ""),
    "run without weights": (["config.json", "metrics.jsonl"], ""),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_no_run_publishes_to_is_refused(name, tmp_path, monkeypatch, capsys):
    """The server waited an hour for a version, and named no end."""
    files, words = FOLDERS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text('{"config": {}}' if name.startswith("run") else '{"model_type": "llama"}')
    if words:
        assert serve.main(["--weights", str(tmp_path), "--port", "0"]) == 1
        error = capsys.readouterr().err
        assert (
            error.startswith(f"error: --weights {tmp_path} has no weights/ of a run, and no published")
            and words in error
        )
        return
    monkeypatch.setattr(sys, "argv", ["serve", "--weights", str(tmp_path)])
    server_options.refuse(None)
    waits = f"--weights {tmp_path} has no published version yet: the server waits for up to 3600 s until a run publishes there\n"
    assert capsys.readouterr().err == ("" if name in ("version", "begun", "run") else waits)
    args = server_options.parse(["--weights", str(tmp_path)], None)
    inner = "/weights" if name.startswith("run") else ""
    assert serve._sources(args) == [f"{tmp_path}{inner}"]


def test_a_folder_that_does_not_exist_is_named(tmp_path, monkeypatch, capsys):
    absent = tmp_path / "absent"
    monkeypatch.setattr(sys, "argv", ["serve", "--weights", str(absent)])
    server_options.refuse(None)
    assert capsys.readouterr().err.startswith(f"--weights {absent} does not exist yet: the server waits")
    sys.argv.append("--exit_with_parent")  # that of a run, which publishes to it later
    server_options.refuse(None)
    assert not capsys.readouterr().err
    (tmp_path / "file").touch()
    assert serve.main(["--weights", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith(f"error: --weights {tmp_path}/file is a file; give")
