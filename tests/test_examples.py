"""Runs the notebooks in a kernel, as a user does, and checks their results."""

import importlib
import os
import pathlib
import sys
import time
import types
from unittest import mock

import nbclient
import nbformat
import pyarrow as pa
import pytest
from pyarrow import parquet

from rl import envs
from tests.rl.experiment import test_experiment
from tests.support import tiny_run

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
ROOT = pathlib.Path(__file__).resolve().parents[1]
SHORT = {"rl.num_steps": 3, "rl.prompts_per_step": 8, "warmup.num_steps": 20, "evaluation.num_tasks": 8}


def notebook(name):
    return nbformat.read(ROOT / "examples" / name, as_version=4)


def outputs(cell):
    """Returns (the text that a cell printed, the MIME types of its displays)."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return printed, [kind for output in cell.outputs for kind in output.get("data", {})]


def execute(found, folder, **environment):
    """Runs all cells in a kernel that starts in `folder`; returns those with code."""
    client = nbclient.NotebookClient(found, timeout=900, resources={"metadata": {"path": str(folder)}})
    client.execute(env=os.environ | environment)
    return [cell for cell in found.cells if cell.cell_type == "code"]


@pytest.mark.slow
def test_grpo_by_hand_learns():
    found = notebook("grpo_by_hand.ipynb")
    install = next(cell for cell in found.cells if "%pip" in cell.source)
    install.source = install.source.partition("%pip")[0]
    found.cells.append(nbformat.v4.new_code_cell("print(np.mean(rewards[-10:]) - np.mean(rewards[:5]))"))
    assert float(outputs(execute(found, ROOT / "examples")[-1])[0]) > 0.2


def test_grpo_by_hand_is_stored_as_it_ran():
    install, *cells = (cell for cell in notebook("grpo_by_hand.ipynb").cells if cell.cell_type == "code")
    assert [cell.execution_count for cell in cells] == list(range(2, 2 + len(cells))) and not install.outputs
    assert sum("image/png" in outputs(cell)[1] for cell in cells) == 2
    assert (ROOT / "examples" / "grpo_by_hand.ipynb").stat().st_size < 100_000


@pytest.mark.slow
def test_the_colab_notebook_trains_and_exports_on_a_cpu(tmp_path):
    """The checkout is a copy, since the notebook writes there. It takes fewer steps."""
    for path in ROOT.iterdir():
        if path.is_dir() and path.name in ("configs", "inference", "models", "rl", "sharding"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "examples").mkdir()
    options = " ".join(f"--config.{name}={value}" for name, value in SHORT.items())
    install, choice, train, samples, report, export = execute(
        notebook("colab.ipynb"), tmp_path / "examples", INTELLAX_NOTEBOOK_OPTIONS=options
    )
    assert outputs(install)[0].endswith("runs on: cpu\n") and not (tmp_path / ".venv").exists()
    printed, kinds = outputs(train)
    assert kinds == ["text/plain", "image/png"] and "report.html" in printed  # one figure: the last one drawn
    assert len(tiny_run.lines(tmp_path / "runs" / "quickstart")) == 3
    printed = outputs(samples)[0]
    assert printed.count("--- before") == printed.count("--- after") == 4 and "'avg@1'" in printed
    assert "text/html" in outputs(report)[1]
    assert "> " in outputs(export)[0] and (tmp_path / "exported" / "model.safetensors").exists()


def test_an_interruption_of_the_colab_notebook_reaches_training_as_sigterm_alone(tmp_path, monkeypatch):
    """Jupyter signals the group of the kernel, and rl.train saves a checkpoint at SIGTERM, not at SIGINT."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport os, time\nprint(os.getpgid(0), flush=True)\ntime.sleep(60)\n")
    program.chmod(0o700)

    def interrupted(seconds):
        while not (tmp_path / "train.log").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    plots = mock.MagicMock()
    plots.subplots.side_effect = lambda *args, **options: (mock.MagicMock(), [mock.MagicMock() for _ in range(args[1])])
    scope = {"CHIP": "cpu", "PYTHON": program, "OPTIONS": [], "WORKDIR": "w", "plt": plots, "display": plots}
    scope |= {name: importlib.import_module(name) for name in ("json", "pathlib", "subprocess")}
    source = next(cell.source for cell in notebook("colab.ipynb").cells if "training.terminate()" in cell.source)
    with pytest.raises(KeyboardInterrupt):
        exec(source, scope | {"time": types.SimpleNamespace(sleep=interrupted)})
    assert int((tmp_path / "train.log").read_text()) != os.getpgid(0)


def test_the_colab_notebook_has_no_outputs_and_the_badge_of_the_readme():
    found = notebook("colab.ipynb")
    assert not any(cell.get("outputs") for cell in found.cells)
    badge = next(line for line in found.cells[0].source.splitlines() if line.startswith("[!["))
    assert badge in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("chip", ["tpu", "gpu"])
def test_the_colab_notebook_on_a_chip_finds_its_data_and_config(chip, tmp_path, monkeypatch):
    """The download writes the files of the hub; the config resolves, but for its checkpoint."""
    monkeypatch.chdir(tmp_path)

    def download(command, check):
        assert "'openai/gsm8k', repo_type='dataset', allow_patterns='main/*', local_dir='data/gsm8k'" in command[-1]
        for split in ("train", "test"):
            file = tmp_path / "data" / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {"question": f"{split} {n}", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
                for n in (1, 2)
            ]
            parquet.write_table(pa.Table.from_pylist(rows), file)

    scope = {"CHIP": chip, "PYTHON": "python", "os": os, "subprocess": types.SimpleNamespace(run=download)}
    exec(notebook("colab.ipynb").cells[4].source, scope)
    (config, *options), workdir = scope["OPTIONS"], scope["WORKDIR"]
    name, _, file = config.partition("=")
    parsed = test_experiment.parsed(f"{name}={ROOT / file}", *options, "--config.init_from=", f"--workdir={workdir}")
    assert parsed.rl.num_steps == {"tpu": 30, "gpu": 12}[chip] and parsed.lora.rank
    env = envs.load(parsed.env.name, seed=0, **parsed.env.options.to_dict())
    task = env.make_task(0, "held_out")
    assert task.messages[1]["content"] == "test 1" and env.score(task, "So it is 2.0.")["reward"] == 1.0
