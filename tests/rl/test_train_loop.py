"""The training loop in this process, with a rollout system that makes up its batches."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shutil
import signal
import threading
import time
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from configs import quickstart
from rl import sft, train
from rl.experiment import flags as command_line
from rl.experiment import initial
from rl.experiment.reporting import metrics
from rl.learning.batch import host_feed, packing
from rl.learning.learner import train_step
from rl.protocol.ledger import ledger as ledger_lib
from rl.swarm import rollout_system
from sharding.mesh import checkpoint
from sharding.system.multihost import failure, hosts
from sharding.weights import bucket
from sharding.weights.bucket import mirror
from tests.support import commands, ledgers, proxy, tiny, tiny_run

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = {name: value for name, value in tiny_run.TINY.items() if name.startswith("model.")}
pytestmark = pytest.mark.usefixtures("compile_fast")


class Rollouts:
    """An orchestrator's methods as the loop calls them: two groups of two samples a step, in step 1 with equal rewards."""

    def __init__(self, credit, evaluated, ledger):
        self.credit, self._evaluated, self._ledger = credit, evaluated, ledger

    def next_batch(self, step):
        ledgers.train_on(self._ledger, step).result()
        groups = [[self._rollout(reward, i) for i, reward in enumerate((0.0, float(step > 1)))] for _ in range(2)]
        trees, _ = self.credit.assign(groups)
        values = {"rollout/num_tokens": 16.0, "rollout/reward": 0.5}
        return types.SimpleNamespace(trees=trees, groups=groups, metrics=values)

    def evaluate(self, version, name=""):
        self._evaluated.append(version)
        return [[self._rollout(1.0)]]

    def fail(self, error):
        pass

    def state(self, step):
        return {}

    def publish(self, policy):
        pass

    def _rollout(self, reward, sample=0):
        mask = np.arange(8) >= 4
        one = tiny.rollout(mask, logprobs=np.where(mask, np.float32(-5), np.float32(0)), reward=reward, sample=sample)
        return dataclasses.replace(one, task=dataclasses.replace(one.task, env="reverse_text"))


@pytest.fixture
def run_main(tmp_path, monkeypatch):
    """Returns a function that runs `rl.train.main` with a loss of its own, two steps, and no process but this one.

    It returns the versions that were evaluated.
    """
    evaluated = []

    @contextlib.contextmanager
    def no_processes(exp, *args, ledger, **options):
        yield Rollouts(exp.credit, evaluated, ledger)

    def run(loss, workdir=tmp_path / "w", **fields):
        config = quickstart.get_config()
        config.rl.loss, config.rl.loss_function, config.loss_options = loss.__name__, loss, {loss.__name__: {}}
        config.update_from_flattened_dict(
            SMALL | {"rl.num_steps": 2, "warmup.num_steps": 0, "inference.max_model_len": 64} | fields
        )
        values = types.SimpleNamespace(config=config, workdir=str(workdir))
        monkeypatch.setattr(flags, "FLAGS", values)
        monkeypatch.setattr(command_line, "given", lambda: [])
        train.main()
        return evaluated

    monkeypatch.setattr(rollout_system, "start_rollout_system", no_processes)
    monkeypatch.setattr(rollout_system, "has_server_process", lambda exp: False)
    monkeypatch.setattr(train_step, "compile_train_step", lambda *args: None)  # so that the loop traces the step itself
    return run


def plain_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom):
    return -(logp_BT * mask_BT).sum() / denom, {}


def test_few_frames_from_the_command_to_the_loss(run_main, tmp_path, monkeypatch):
    """Frames of this checkout between `main` and a user's loss; those of jax, absl and the standard library do not count.

    The run ends with its report although its evaluations were given up.
    """
    monkeypatch.setattr(Rollouts, "evaluate", lambda *args: [])  # after evaluation.hold_s
    stacks = []

    def own_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom):
        frames = [f for f in traceback.extract_stack() if ROOT in pathlib.Path(f.filename).parents]
        names = [f.name for f in frames if "site-packages" not in f.filename]
        stacks.append(names[names.index("main") :])
        return plain_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, denom=denom)

    run_main(own_loss)
    print("\n".join(" -> ".join(names) for names in stacks))
    assert ["main", "train", "train_step", "gradients", "add", "loss", "own_loss"] in stacks
    assert max(map(len, stacks)) <= 7
    assert (tmp_path / "w" / "report.html").exists() and not (tmp_path / "w" / "evaluations.json").exists()


def test_a_batch_that_is_not_on_the_devices_is_refused(run_main, monkeypatch):
    """An implicit transfer in the middle of a step, on every host, is an error."""
    monkeypatch.setattr(host_feed, "place", lambda trees, layout, *args: packing.pack(trees, layout))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run_main(plain_loss)
    assert jax.config.jax_transfer_guard is None


def test_the_learner_waits_for_its_evaluations_only_at_the_end(run_main, tmp_path, monkeypatch):
    """The results of the first version come after the last step, and count for its checkpoint. A finished run is not scored again."""
    (next_batch, evaluate), steps, go_on = (Rollouts.next_batch, Rollouts.evaluate), [], threading.Event()

    def seen_batch(self, step):
        steps.append((step, written()))
        return next_batch(self, step)

    def written():
        path = tmp_path / "w" / "evaluations.json"
        return [entry["step"] for entry in json.loads(path.read_text())] if path.exists() else []

    def publish(self, policy):
        if policy.version == 2:
            go_on.set()

    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "next_batch", seen_batch)
        patch.setattr(Rollouts, "publish", publish)
        patch.setattr(Rollouts, "evaluate", lambda self, *args: go_on.wait(60) and evaluate(self, *args))
        assert sorted(run_main(plain_loss)) == [0, 2]
    assert steps == [(1, []), (2, [])] and written() == [0, 2]
    config, lines = quickstart.get_config().optimizer, metrics.read(tmp_path / "w" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["phase"] == "evaluation"] == [0, 2]
    assert config.warmup_steps > 1
    rates = [line["optimizer/learning_rate"] for line in lines if line["phase"] == "rl"]
    # Step 1 trains no token, so step 2 takes the first rate of the warm-up.
    assert rates == pytest.approx([config.learning_rate / config.warmup_steps] * 2)
    assert checkpoint.best_step(tmp_path / "w" / "checkpoints") == 2  # the latest of equals
    (tmp_path / "w" / "checkpoints" / "best.json").unlink()  # as if killed after evaluations.json was written
    assert sorted(run_main(plain_loss)) == [0, 2]
    assert checkpoint.best_step(tmp_path / "w" / "checkpoints") == 2


def events_of(path):
    with ledger_lib.Ledger(path) as ledger:
        return [entry.event for entry in ledger.entries()]


def test_a_killed_run_resumes_from_its_bucket_on_an_empty_machine(run_main, tmp_path, monkeypatch, capfd):
    """The kill is during step 2, when the bucket has the checkpoint of step 1."""
    monkeypatch.setattr(mirror, "EVERY_S", 0.05)
    monkeypatch.setattr(mirror, "LEASE_S", 0.5)
    url, next_batch, killed = f"file://{tmp_path}/bucket/run", Rollouts.next_batch, []

    def policy(folder):
        return json.loads((folder / "weights" / "v00000002" / "manifest.json").read_bytes())["digest_after"]

    def killing(self, step):
        if step == 2 and not killed:
            (one,) = mirror._MIRRORS.values()
            killed.append(one.folder)
            proxy.wait_until(lambda: "checkpoints/1/seal.json" in one._files, 30)
            one._storage.close()
            one._closed.set()
            raise KeyboardInterrupt
        return next_batch(self, step)

    run_main(plain_loss, **{"checkpoint.every": 1})
    monkeypatch.setattr(Rollouts, "next_batch", killing)
    for name in ("first", "second"):
        monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / name))
        with contextlib.nullcontext() if killed else pytest.raises(KeyboardInterrupt):
            run_main(plain_loss, url, **{"checkpoint.every": 1})
    folder = bucket.fetched(url)
    assert [folder.relative_to(tmp_path).parts[0], *killed[0].relative_to(tmp_path).parts[:1]] == ["second", "first"]
    events = events_of(folder / "ledger.db")
    assert [event.fields["step"] for event in events if event.kind == "resume"] == [0, 1]
    assert tiny_run.curve(folder) == tiny_run.curve(tmp_path / "w")
    assert policy(folder) == policy(tmp_path / "w")
    monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / "third"))
    config = quickstart.get_config()
    config.init_from = url  # the newest policy of the run
    assert initial.completed(config).model.model_dim == SMALL["model.model_dim"] != config.model.model_dim
    assert commands.run("inference.serve", "--weights", url, "--watch", "1", "--port", "0") == 1
    assert f"--watch sees no later state of {url}, the working directory of a run" in capfd.readouterr().err


def notice(number):
    """Sends this process a signal, and waits until a thread has taken it."""
    signal.raise_signal(number)
    while not hosts.ALONE.is_terminating:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_notice_in_the_last_step_ends_the_run_before_its_evaluation(number, run_main, tmp_path, monkeypatch):
    go_on, evaluate = threading.Event(), Rollouts.evaluate
    monkeypatch.setattr(Rollouts, "evaluate", lambda self, *args: go_on.wait(60) and evaluate(self, *args))
    monkeypatch.setattr(Rollouts, "fail", lambda self, error: go_on.set())
    monkeypatch.setattr(Rollouts, "publish", lambda _, policy: policy.version == 2 and notice(number))
    with pytest.raises(failure.Terminated, match="checkpoint of step 2"):
        run_main(plain_loss)
    assert checkpoint.complete_steps(tmp_path / "w" / "checkpoints") == [0, 2]
    assert not (tmp_path / "w" / "evaluations.json").exists()


def test_sigterm_to_the_whole_group_saves_although_the_workers_are_dead(run_main, tmp_path, monkeypatch):
    """An evaluation in flight fails with the death of a worker, which systemd and SLURM signal, too."""
    died = threading.Event()

    def evaluate(self, *args):
        died.wait(60)
        raise ValueError("the worker0 process ended with code 143")

    def publish(self, policy):
        if policy.version == 1:
            notice(signal.SIGTERM)
            died.set()
            time.sleep(0.2)  # until the future of the evaluation has failed

    monkeypatch.setattr(Rollouts, "evaluate", evaluate)
    monkeypatch.setattr(Rollouts, "publish", publish)
    with pytest.raises(failure.Terminated, match="checkpoint of step 1"):
        run_main(plain_loss)
    assert checkpoint.complete_steps(tmp_path / "w" / "checkpoints") == [0, 1]


def test_a_resume_finds_an_older_copy_of_the_ledger(run_main, tmp_path):
    """The head is in each manifest and checkpoint: a rollback of the whole file lacks it. A longer ledger is fine."""

    def own_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom):
        if path.exists():  # not when the config is resolved
            shutil.copy(path, tmp_path / "older.db")  # of the last step, before its version and its checkpoint
        return plain_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, denom=denom)

    path = tmp_path / "w" / "ledger.db"
    run_main(own_loss)
    events = events_of(path)
    assert [e.fields["step"] for e in events if e.kind == "batch"] == [1, 2]
    manifests = [path.parent / "weights" / f"v{version:08d}" / "manifest.json" for version in range(3)]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in manifests]
    assert [e.fields["digest"] for e in events if e.kind == "publish"] == digests
    heads = [json.loads(file.read_bytes())["metadata"]["ledger"] for file in manifests]
    for head in heads:
        assert ledgers.verify(path, head=head).error is None
    shutil.copy(path, tmp_path / "newest.db")
    for swap, error in (
        (lambda: path.unlink(), "ledger.db does not exist; put it back, or the whole directory"),
        (lambda: shutil.copy(tmp_path / "older.db", path), "ends after entry .*older or another history; put back"),
    ):
        swap()
        with pytest.raises(ValueError, match=f"names entry .* of the run's ledger, but .*{error}"):
            run_main(own_loss)
    shutil.copy(tmp_path / "newest.db", path)
    run_main(own_loss)
    assert ledgers.verify(path, head=heads[-1]).error is None
    assert events_of(path)[-1].kind == "publish"  # version 2 again, after a resume


@pytest.mark.parametrize(("spoiled", "value"), [("loss/total", jnp.nan), ("loss/own", jnp.inf)])
def test_a_state_is_saved_as_the_one_before_the_failed_batch_only_if_it_is(run_main, tmp_path, spoiled, value):
    """A loss that is not finite is refused by `update`; another metric is not, and step 2 is already in the state."""

    def own_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom):
        total = -(logp_BT * mask_BT).sum() / denom
        added = jnp.where(mask_BT.any(), value, 0.0)
        return (total + added, {}) if spoiled == "loss/total" else (total, {"loss/own": added})

    with pytest.raises(ValueError, match=f"is {value} at step 2; nothing of this step was published"):
        run_main(own_loss)
    batch = packing.load(tmp_path / "w" / "failed_batch.npz")
    assert batch.loss_mask.sum() == 16 and set(np.sign(batch.advantage[batch.loss_mask > 0])) == {-1, 1}
    assert checkpoint.complete_steps(tmp_path / "w" / "checkpoints") == ([0, 1] if spoiled == "loss/total" else [0])


def test_the_processes_begin_before_the_warm_up_of_a_new_run(run_main, monkeypatch):
    """They import and compile meanwhile. Not where versions are published: the server would load one that a resume replaces."""
    events, warm_up, system = [], sft.train, rollout_system.start_rollout_system

    def start(*args, begun, **options):
        events.append(begun)
        return system(*args, **options)

    monkeypatch.setattr(rollout_system, "has_server_process", lambda exp: True)
    monkeypatch.setattr(rollout_system, "begin", lambda *args: events.append("processes") or "begun")
    monkeypatch.setattr(sft, "train", lambda *args: events.append("warm-up") or warm_up(*args))
    monkeypatch.setattr(rollout_system, "start_rollout_system", start)
    run_main(plain_loss)
    run_main(plain_loss)
    assert events == ["processes", "warm-up", "begun", None]
