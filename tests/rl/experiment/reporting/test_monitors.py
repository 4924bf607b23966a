"""Monitors get the lines of metrics.jsonl, an error of one ends that one alone, and a resume continues the run of the program."""

import json
import os
import re
import subprocess
import sys

import prometheus_client
import pytest

from rl.experiment.reporting import metrics, monitors

STEPS = {1: {"loss/total": 0.5, "held_out/avg@1": 0.25}, 2: {"loss/total": 0.25, "held_out/avg@1": 0.5}}


class Recorder:
    """A monitor that fails at step `fails_at`."""

    def __init__(self, fails_at=None):
        self.seen, self.fails_at = [], fails_at

    def write(self, step, phase, values):
        if step == self.fails_at:
            raise RuntimeError("no network")
        self.seen.append((step, phase, values["loss/total"]))

    def truncate(self, phase, after_step):
        self.seen.append((phase, after_step))

    def close(self):
        self.seen.append("closed")


def test_a_failing_monitor_is_named_once_and_the_others_go_on(tmp_path, capsys):
    good, bad = Recorder(), Recorder(fails_at=2)
    writer = metrics.MetricsWriter(tmp_path, {"bad": bad, "good": good})
    for step in (1, 2, 3):
        writer.write(step, "rl", {"loss/total": 1.0 * step})
    writer.truncate("rl", 2)
    writer.close()
    assert good.seen == [(1, "rl", 1.0), (2, "rl", 2.0), (3, "rl", 3.0), ("rl", 2), "closed"]
    assert bad.seen == [(1, "rl", 1.0)]
    assert capsys.readouterr().err.count("notice: monitor 'bad' failed and gets no more metrics: no network") == 1
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_unknown_and_absent_monitors_are_refused(monkeypatch):
    monitors.check(["tensorboard"])
    with pytest.raises(ValueError, match="contains 'tensorbord', which is unknown; choose from tensorboard, wandb"):
        monitors.check(["tensorbord"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="contains 'mlflow', which is not installed; pip install mlflow"):
        monitors.check(["mlflow"])


def test_the_learner_is_scraped_with_the_newest_values_and_the_times_of_all_steps():
    learner = monitors.Prometheus()
    learner.write(7, "warm-up", {"loss/held_out": 2.0, "time/step_s": 100.0})
    learner.write(1, "rl", {"loss/total": 0.5, "loss/entropy": 1.0, "time/step_s": 2.0, "time/wait_s": 1.5})
    learner.write(2, "rl", {"loss/total": 0.25, "time/step_s": 4.0, "time/wait_s": 0.25})
    learner.write(2, "evaluation", {"held_out/avg_at_1": 0.5, "time/eval_s": 9.0})
    lines = prometheus_client.generate_latest(learner.metrics).decode().splitlines()
    expected = ['metric{name="loss/total"} 0.25', 'metric{name="held_out/avg_at_1"} 0.5', "step 2.0"]
    expected += ["step_seconds_count 2.0", "step_seconds_sum 6.0", "wait_seconds_sum 1.75", "eval_seconds_count 0.0"]
    assert {f"intellax_learner_{line}" for line in expected} <= {*lines}
    assert not any("loss/entropy" in line for line in lines)  # of an older step


# In a process of their own: these programs set signal handlers, start threads, and warn.
TRACKED = """
import json, pathlib, sys
from rl.experiment.reporting import monitors
name, workdir, steps = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
run = monitors.Run(workdir, "ab" * 32, {"rl.loss": "grpo", "rl.num_steps": 2})
for step, values in steps.items():  # each in a start of its own
    members = monitors.Monitors(monitors.begin([name], run))
    members.write(int(step), "rl", values)
    members.close()
"""
READ_MLFLOW = """
import mlflow, json, sys
client = mlflow.MlflowClient("sqlite:///" + sys.argv[1] + "/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("intellax").experiment_id])
print(json.dumps([[p.step, p.value] for p in client.get_metric_history(run.info.run_id, "rl/loss/total")]))
"""
READ_TRACKIO = """
import json, sqlite3, sys, pathlib
(file,) = pathlib.Path(sys.argv[1], "trackio").glob("intellax*.db")
rows = sqlite3.connect(file).execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
print(json.dumps([[step, json.loads(text)["rl/loss/total"]] for step, text in rows]))
"""


def run_python(code, *args, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.getcwd()} | environment,
    )
    assert result.returncode == 0 and "notice: monitor" not in result.stderr, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_program_has_all_steps_of_a_resumed_run(name, tmp_path):
    pytest.importorskip(name)
    steps = {step: {k.replace("@", "_at_"): v for k, v in values.items()} for step, values in STEPS.items()}
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    run_python(TRACKED, name, tmp_path, json.dumps(steps), **home)
    if name == "wandb":
        files = [*(tmp_path / "wandb").glob("offline-run-*/*.wandb")]
        data = b"".join(file.read_bytes() for file in files)
        assert len(files) == 2 and len(re.findall(rb"rl/loss/total", data)) >= 2
        return
    read = READ_MLFLOW if name == "mlflow" else READ_TRACKIO
    found = json.loads(run_python(read, tmp_path, **home).splitlines()[-1])
    assert found == [[1, 0.5], [2, 0.25]]
