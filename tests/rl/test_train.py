"""The whole walk in small: one command, real processes, killed and resumed, on one device and on eight.

A run here is the quickstart with fewer steps and tasks: same model function, engine, HTTP server, broadcast, proofs.
"""

import json
import re
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

from docs import catalog
from models import hf, transformer
from models.text import tokenizer
from rl import train
from rl.evaluation import samples
from rl.evaluation import scores as scores_lib
from rl.protocol.ledger import ledger as ledger_lib
from rl.protocol.ledger import task_ranges
from rl.trust import audit
from sharding.mesh import checkpoint
from sharding.mesh import mesh as mesh_lib
from sharding.system.logs import run_logs
from tests.support import ledgers, tiny_run


def num_claims(workdir) -> int:
    """The number of rollouts in the last checkpoint's evidence about the run's one worker."""
    texts = (file.read_text() for file in (workdir / "checkpoints" / "6" / "host").iterdir())
    (text,) = (text for text in texts if "evidence" in text)
    (record,) = json.loads(text)["rollouts"]["evidence"]["records"].values()
    return record["num_claims"]


def recorded(workdir) -> tuple[list, list[int], int]:
    """Verifies a run's ledger; returns its batches that are not void, those that are, and the number of starts."""
    assert ledgers.verify(workdir / "ledger.db").error is None
    batches, void, num_starts = [], [], 0
    with ledger_lib.Ledger(workdir / "ledger.db") as ledger:
        for event in (entry.event for entry in ledger.entries()):
            if event.kind == "resume":
                num_starts += 1
                void += [batch["step"] for batch in batches if batch["step"] > event.fields["step"]]
                batches = [batch for batch in batches if batch["step"] <= event.fields["step"]]
            elif event.kind == "batch":
                batches.append(event.fields)
        assert 6 in [version for _, version in ledger.state.run.published]
    return batches, void, num_starts


@pytest.fixture(scope="module", autouse=True)
def compiler_of_users():
    """Leaves the flags of tests/conftest.py to this process, which reads them with its first program."""
    jax.block_until_ready(jax.numpy.ones(1) + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        yield


def test_a_run_learns_validates_and_reports(trained):
    workdir, printed = trained
    steps = tiny_run.lines(workdir)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step["trust/num_accepted"] == 16 and step["trust/num_refused"] == 0
        assert step["trust/num_checked"] + step["trust/num_unverified"] == 16
        assert step["sync/lag"] == 0
        assert step["loss/mismatch_kl"] < 1e-6  # learner and engine logprobs agree to 1e-4, hence KL below 1e-8 or so
        assert abs(step["loss/ratio_mean"] - 1) < 1e-4
        assert not [name for name in step if "/" in name and not catalog.describe(name)]
        assert 0 <= step["machine/learner_busy_frac"] <= 1 and step["machine/memory_peak_bytes"] > 2**26
        assert step["machine/num_servers"] == 1 and "machine/mfu" not in step  # a CPU has no known peak
        assert step["batch/num_row_tokens"] >= 0 and step["batch/sequence_length"] > 1
    batches, void, num_starts = recorded(workdir)
    assert [batch["step"] for batch in batches] == [1, 2, 3, 4, 5, 6] and not void and num_starts == 1
    verified = [len(task_ranges.parse_tasks(batch["verified"])) if batch["verified"] else 0 for batch in batches]
    assert [4 * number for number in verified] == [step["trust/num_checked"] for step in steps]
    report = (workdir / "report.html").read_text()
    assert "<th>validators</th>" in report and audit.main([str(workdir)]) == 0
    assert "<svg" in report and str(workdir / "report.html") in printed
    assert list((workdir / "tensorboard").rglob("*tfevents*"))
    (attempt,) = run_logs.attempts(workdir)
    assert {log.stem for log in attempt.path.glob("*.log")} == {"learner", "server", "worker0"}
    assert "rl  step 6/6" in (attempt.path / "learner.log").read_text()
    config = json.loads((workdir / "config.json").read_text())["config"]
    assert config["rl"]["num_steps"] == 6 and "rl.num_steps" in printed


def test_kill_and_resume_repeats_the_run_bit_for_bit(trained, tmp_path):
    workdir, log = tmp_path / "w", open(tmp_path / "log", "w")
    process = subprocess.Popen(tiny_run.command(workdir), cwd=tiny_run.ROOT, stdout=log, stderr=log)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (workdir / "metrics.jsonl").exists() and len(tiny_run.curve(workdir)) >= 3:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    log.close()
    assert len(tiny_run.curve(workdir)) < 6, "the run ended before it was killed"
    result = tiny_run.run(workdir)
    assert result.returncode == 0, result.stderr
    assert "resuming after step" in result.stdout
    assert tiny_run.curve(workdir) == tiny_run.curve(trained[0])
    batches, void, num_starts = recorded(workdir)
    assert [batch["step"] for batch in batches] == [1, 2, 3, 4, 5, 6] and len(void) < 6 and num_starts == 2
    assert audit.main([str(workdir)]) == 0
    # Each rollout is added once. The evidence itself depends on the order in which the groups of a step arrive.
    assert num_claims(workdir) == num_claims(trained[0]) == 6 * 16


@pytest.mark.slow
def test_a_number_that_is_none_stops_the_warm_up(tmp_path):
    """A rate of 1e30 makes the first step's parameters useless: the second step finds out."""
    result = tiny_run.run(tmp_path / "w", warmup__learning_rate=1e30)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(r"is (nan|inf) at warm-up step [23]; .* or lower warmup.learning_rate", line)


@pytest.mark.slow
def test_evaluate_scores_a_checkpoint(trained, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "w")
    argv = [*tiny_run.command(workdir, module="rl.evaluate"), "--step=4"]
    result = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    entries = json.loads((workdir / "evaluations.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 4, 6]
    assert {"avg@1", "pass@1", "num_tasks"} <= entries[1]["scores"].keys()
    rows = samples.read(workdir / "samples" / "held_out_4.jsonl")
    assert len(rows) == 8 and rows[0]["prompt"].endswith("assistant\n")
    scores, intervals = scores_lib.measure([*samples.by_task(rows).values()])
    assert entries[1]["scores"] == scores and entries[1]["intervals"]["avg@1"] == [*intervals["avg@1"]]

    argv[-1] = "--step=last"
    result = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 1 and "set it to a step, newest, or best" in result.stderr

    argv[-1] = "--step=5"
    result = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert re.match("error: .*5.*4", result.stderr)  # names the existing ones


@pytest.mark.slow
def test_other_questions_of_a_finished_run_are_kept_apart(trained, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "w")
    before, entries = ((workdir / name).read_bytes() for name in ("config.json", "evaluations.json"))
    asked = {"evaluation.samples_per_task": 2, "evaluation.temperature": 0.5, "evaluation.num_tasks": 3}
    argv = [
        *tiny_run.command(workdir, module="rl.evaluate"),
        *(f"--config.{name}={value}" for name, value in asked.items()),
    ]
    result = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    (kept,) = json.loads((workdir / "other_evaluations.json").read_text())
    assert kept["changed"] == asked and kept["scores"]["num_tasks"] == 3
    assert {"pass@2", "pass^2"} <= kept["scores"].keys()
    (path,) = (workdir / "samples").glob("other_*_6.jsonl")
    assert len(samples.read(path)) == 6
    assert [(workdir / name).read_bytes() for name in ("config.json", "evaluations.json")] == [before, entries]


def test_the_terminal_shows_what_there_is():
    """A loss of one's own, and cross_entropy, compare no policies; old log-probabilities of the learner hide the sampler's."""
    assert train.shown({"loss/total": 1.0, "rollout/reward": 0.5}) == {"reward": 0.5, "loss": 1.0}
    both = {"loss/mismatch_kl": 0.5, "loss/sampler_kl": 0.01}
    assert train.shown(both) == {"mismatch kl": 0.01} and train.shown({"loss/mismatch_kl": 0.5}) == {"mismatch kl": 0.5}


@pytest.mark.slow
def test_export_writes_a_folder_that_loads(trained, tmp_path):
    """The best of the run's two by held-out score."""
    workdir = trained[0]
    output = tmp_path / "exported"
    argv = [*tiny_run.command(workdir, module="rl.export"), "--step=best", f"--output={output}"]
    result = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    best = checkpoint.best_step(workdir / "checkpoints")
    assert f"version {best} of" in result.stdout
    model, params = hf.load(output)
    _, saved = checkpoint.restore_params(
        workdir / "checkpoints", transformer.abstract(model, mesh_lib.create({}, jax.devices()[:1])), best
    )
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(a, b)
    assert tokenizer.load(output).encode("abc") == tokenizer.load("byte_chatml").encode("abc")
    again = subprocess.run(argv, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200)
    assert again.returncode == 1 and "Traceback" not in again.stderr and str(output) in again.stderr


@pytest.mark.slow
def test_a_swarm_learns_the_same_bits_at_lag_0(trained, tmp_path):
    """A relay, two servers, two workers, and a validator are processes: other orders, batches of requests, and copies of groups."""
    counts = ("--relays=1", "--servers=2", "--workers=2", "--validators=1")
    command = [*tiny_run.command(tmp_path / "w", module="rl.swarm"), *counts]
    result = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    found, expected = tiny_run.learned(tmp_path / "w"), tiny_run.learned(trained[0])
    assert len(found[0]) == 6 and found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        ("quickstart", {"mesh__fsdp": 8}),
        ("quickstart_moe", {"mesh__fsdp": 2, "mesh__expert": 4}),
        ("quickstart_moe", {"mesh__fsdp": 8, "inference__mesh__data": -1, "inference__mesh__expert": 2}),
        ("quickstart_moe", {}),
    ],
)
def test_both_quickstarts_train_on_eight_devices(tmp_path, config, mesh):
    env = {"JAX_NUM_CPU_DEVICES": "8"} if mesh else {}
    result = tiny_run.run(tmp_path / "w", config, env=env, **mesh)
    assert result.returncode == 0, result.stderr
    steps = tiny_run.curve(tmp_path / "w")
    trained = [step["loss/mismatch_kl"] for step in steps if step["loss/num_tokens"]]  # a batch may be all flat
    assert len(steps) == 6 and len(trained) >= 3 and max(trained) < 1e-6


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    """Neither the run nor its server: they read the cache of another start, in another work directory."""
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found = []
    for name in ("first", "second"):
        result = tiny_run.run(tmp_path / name, rl__num_steps=1, env=env)
        assert result.returncode == 0, result.stderr
        texts = result.stdout, (tmp_path / name / "logs" / "attempt_0001" / "server.log").read_text()
        found.append([int(re.search(r"compiled (\d+) programs in", text)[1]) for text in texts])
    assert min(found[0]) > 10 and found[1] == [0, 0]
