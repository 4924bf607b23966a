"""Reads the rollouts, manifests, ledgers and working directories that commit 1e7b0e7 wrote.

The fixtures and their expected contents were written by that commit's own code (tests/fixtures/at_1e7b0e7/README.md). They
are never written again: a failure here means that a format changed, and that users' files are no longer read.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from absl import flags as absl_flags
from cryptography.hazmat.primitives.asymmetric import ed25519

from configs import quickstart
from inference.proofs import toploc
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from models import hf, transformer
from rl import report, sft
from rl.batch import packing
from rl.experiment import experiment
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.learner import train_step
from rl.ledger import events
from rl.ledger import ledger as ledger_lib
from rl.reporting import metrics
from rl.validator import calibrate
from rl.validator import service as validator_service
from rl.validator import state as validator_state
from rl.verification import evidence_log, run_bands, sequential_test, verifier
from rl.verification import rules as rules_lib
from sharding import broadcast, checkpoint
from sharding import mesh as mesh_lib
from sharding.download import source as source_lib
from sharding.format import journal
from tests.support import commands, ledgers, trees

TRAIN, EVALUATE, EXPORT = "rl.train", "rl.evaluate", "rl.export"  # commands: python -m NAME
CONFIG = "configs/quickstart.py"

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures" / "at_1e7b0e7"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
KEEPER, JUDGE, ANN, PUBLISHER = (
    rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number] * 32))) for number in (1, 2, 3, 5)
)


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "expected.npz") as file:
        return dict(file)


def unpacked(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The contents of a fixture under a new folder, for the test to change."""
    folder.mkdir()
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def plain(value):
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


# ---- rollouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "routed", "tampered"])
def test_rollout_files(name):
    expected = EXPECTED["rollouts"][name]["rows"]
    rollouts = parquet.read(FIXTURES / f"{name}.parquet")
    assert len(rollouts) == len(expected) == 4
    for row, (rollout, fields) in enumerate(zip(rollouts, expected, strict=True)):
        assert rollout_lib.validate(rollout) is None
        found = {"digest": rollout_lib.digest(rollout).hex(), "signature_ok": rollout_lib.signature_ok(rollout)}
        for field in dataclasses.fields(rollout):
            value = getattr(rollout, field.name)
            wanted = arrays().get(f"rollouts/{name}/{row}/{field.name}")
            if wanted is not None:
                assert value.dtype == wanted.dtype, field.name
                np.testing.assert_array_equal(value, wanted, err_msg=field.name)
            elif field.name == "task":
                found["task"] = dataclasses.asdict(value)
            else:
                found[field.name] = value.hex() if isinstance(value, bytes) else value
        lacking = {"epoch": 0, "server": "", "server_signature": "", "env_digest": ""}
        lacking |= {
            "branch": 0,
            "num_branches": 1,
            "calls": None,
            "call_limits": None,
            "draw": 0,
            "trains": True,
            "kept": "",
            "prefix_versions": None,
        }
        assert found == fields | lacking
    assert all((rollout.routed_experts is not None) == (name == "routed") for rollout in rollouts)
    assert all(rollout.proofs for rollout in rollouts)


@pytest.mark.parametrize(("workdir", "names"), [("run", ("plain", "tampered")), ("routed", ("routed",))])
def test_rollouts_pass_the_validator_again(tmp_path, workdir, names):
    """Tasks, prompts, noise, log-probabilities, experts and proofs, replayed on the weights that were published then."""
    validator, _ = make_validator(unpacked(workdir, tmp_path / "run"))
    for name in names:
        rollouts = parquet.read(FIXTURES / f"{name}.parquet")
        found = validator.check_without_weights(rollouts, newest=0)
        passed = [i for i, verdict in enumerate(found) if verdict.accepted]
        for i, verdict in zip(passed, validator.check_with_weights([rollouts[i] for i in passed]), strict=True):
            found[i] = verdict
        assert [verdict.reason for verdict in found] == EXPECTED["rollouts"][name]["verdicts"], found


def make_validator(workdir, bands=None):
    """Returns a validator of a run, as `rl.validator serve` makes it, and the experiment."""
    exp = calibrate.load_experiment(str(workdir))
    tolerance, limits = run_bands.load(bands) if bands else (rules_lib.Tolerance.of(exp.config.trust), None)
    rules = dataclasses.replace(verifier.rules_of(exp.config, exp.tokenizer), tolerance=tolerance)
    weights = verifier.published(str(workdir / "weights"))
    return verifier.Validator(exp.model, weights, rules, evidence_log.EvidenceLog(limits)), exp


# ---- published weights -----------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path):
    return unpacked("broadcast", tmp_path / "broadcast")


@pytest.mark.parametrize("version", ["0", "1", "2", "3"])
def test_manifests_and_versions(published, version):
    expected, key = EXPECTED["broadcast"]["versions"][version], EXPECTED["broadcast"]["public_key"]
    manifest = broadcast.read_manifest(str(published), int(version), key=key)
    for name in ("digest", "base", "delta_of", "metadata", "signature", "size_bytes"):
        assert getattr(manifest, name) == expected[name], name
    assert list(manifest.encodings) == expected["encodings"]
    assert [dataclasses.asdict(entry) for entry in manifest.objects] == expected["objects"]
    assert manifest.containers == EXPECTED["broadcast"]["containers"] and manifest.public_key == key
    assert broadcast.verify(str(published), int(version), key=key).digest == expected["digest"]
    pulled = broadcast.pull(str(published), int(version), key=key, run=EXPECTED["broadcast"]["run"])
    assert (pulled.version, pulled.digest, pulled.metadata) == (int(version), expected["digest"], expected["metadata"])
    assert trees.digest(pulled.params) == expected["tree_digest"]
    assert pulled.params["nothing"] is None and pulled.params["empty"] == {}
    assert isinstance(pulled.params["pair"], tuple) and isinstance(pulled.params["layers"], list)
    found = leaves(pulled.params)
    assert {name: array.dtype.name for name, array in found.items()} == expected["dtypes"]
    for name, array in found.items():
        if (wanted := arrays().get(f"broadcast/{version}/{name}")) is not None:
            np.testing.assert_array_equal(
                array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array, wanted, err_msg=name
            )


def leaves(tree, prefix=""):
    """Arrays of a tree by `/`-joined names."""
    if isinstance(tree, np.ndarray):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree or ())
    return {k: v for name, value in items for k, v in leaves(value, f"{prefix}/{name}".lstrip("/")).items()}


def test_deltas_lead_from_each_version_to_the_next(published):
    """Checks deltas alone: the snapshots that they started from are deleted."""
    versions, key = EXPECTED["broadcast"]["versions"], EXPECTED["broadcast"]["public_key"]
    have = broadcast.pull(str(published), 0, key=key)
    for file in published.glob("v*/tensors/**/c.*"):
        file.unlink()
    for version in (1, 2, 3):
        have = broadcast.pull(str(published), version, base=have, key=key)
        assert have.digest == versions[str(version)]["digest"] == trees.digest(have.params)


def test_the_publication_that_was_not_finished(published):
    half = EXPECTED["broadcast"]["half"]
    with contextlib.closing(source_lib.open(str(published))) as opened:
        listing = opened.listing()
    assert (listing.complete, listing.partial) == ((0, 1, 2, 3), (4,)) and broadcast.latest(str(published)) == 3
    entries, end = journal.parse_journal((published / journal.dirname(4) / "objects.jsonl").read_bytes())
    assert (len(entries), end) == (half["entries"], half["end"])


def test_the_publisher_goes_on_and_others_are_refused(published):
    key, run = EXPECTED["broadcast"]["public_key"], EXPECTED["broadcast"]["run"]
    base = broadcast.pull(str(published), 3, key=key)
    tree = base.params | {"mask": ~base.params["mask"]}
    options = broadcast.PublishOptions(key=PUBLISHER.private, run=run)
    broadcast.publish(tree, 4, str(published), options)
    pulled = broadcast.pull(str(published), 4, base=base, key=key, run=run)
    assert pulled.digest == trees.digest(tree) and broadcast.versions(str(published)) == [0, 1, 2, 3, 4]
    with pytest.raises(broadcast.CorruptSource):
        broadcast.pull(str(published), 2, key=ANN.worker)
    with pytest.raises(broadcast.CorruptSource, match="of run"):
        broadcast.pull(str(published), 2, key=key, run="another")
    chunk = next((published / journal.dirname(0)).glob("tensors/layers/*/w/c.*"))
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    with pytest.raises(broadcast.CorruptSource):
        broadcast.pull(str(published), 0, key=key)


# ---- ledger and validator ----------------------------------------------------------------------------------------------


@pytest.fixture
def judged(tmp_path):
    return unpacked("validator", tmp_path / "validator")


def test_ledger(judged):
    expected, path = EXPECTED["ledger"], judged / "ledger.db"
    found = ledgers.verify(path, keeper=expected["keeper"], head=expected["head"])
    assert (found.error, found.head, found.num_entries) == (None, expected["head"], len(expected["entries"]))
    with ledger_lib.Ledger(path) as ledger:
        recorded, state = ledger.entries(), ledger.state
    entries = [
        {
            "seq": entry.seq,
            "time_ms": entry.time_ms,
            "hash": entry.hash.hex(),
            "event": dataclasses.asdict(entry.event) | {"signature": entry.event.signature.hex()},
        }
        for entry in recorded
    ]
    assert entries == expected["entries"]
    kinds = {entry["event"]["kind"] for entry in entries}
    assert kinds == {"open", *events.NODE_KINDS, *events.VALIDATOR_KINDS}
    assert (state.keeper, sorted(state.validators)) == (expected["keeper"], expected["validators"])
    assert state.window_ms == expected["window_ms"]
    assert {name: dataclasses.asdict(node) for name, node in state.workers.items()} == expected["nodes"]
    assert plain({sha: dataclasses.asdict(work) for sha, work in state.works.items()}) == expected["works"]
    assert {name: state.reputation(name) for name in state.workers} == expected["reputations"]
    for when, now_ms in expected["times"].items():
        balances = {name: dataclasses.asdict(state.balance(name, now_ms)) for name in state.workers}
        assert balances == expected["balances"][when], when
    runs = {run for run, _, _ in expected["done"]}
    done = [[run, step, group] for run in runs for step in range(8) for group in range(1100)]
    assert sorted(task for task in done if tuple(task) in state.done) == sorted(expected["done"])


def test_ledger_show(judged, capsys):
    assert commands.run("rl.ledger", "show", judged / "ledger.db", "--last", 50) == 0
    assert capsys.readouterr().out == EXPECTED["ledger"]["show"]


def test_the_keeper_goes_on_with_the_ledger(judged):
    path, expected = judged / "ledger.db", EXPECTED["ledger"]
    pending = next(sha for sha, work in expected["works"].items() if work["status"] == "pending" and work["units"] == 5)
    with ledger_lib.Ledger(path, KEEPER) as ledger:
        with pytest.raises(ValueError, match="in the ledger already"):
            event = expected["entries"][-1]["event"]
            ledger.append(events.Event(**event | {"signature": bytes.fromhex(event["signature"])}))
        ledger.append(events.sign("accept", ANN.worker, JUDGE, work=pending, checked=True))
    found = ledgers.verify(path, keeper=KEEPER.worker, head=expected["head"])
    assert found.error is None and found.num_entries == len(expected["entries"]) + 1


def test_validator_state(judged):
    expected = EXPECTED["validator"]
    with pytest.raises(ValueError, match="belongs to"):
        validator_state.State(judged / "validator.db", "another run", keep_steps=expected["keep_steps"])
    state = validator_state.State(judged / "validator.db", expected["identity"], keep_steps=expected["keep_steps"])
    with contextlib.closing(state):
        assert plain({sha: dataclasses.asdict(status) for sha, status in state.files.items()}) == expected["files"]
        assert [[name, is_group, list(job)] for (name, is_group), job in state.names.items()] == expected["names"]
        assert sorted(state.unsettled) == expected["unsettled"] and state.tests() == expected["records"]
        assert state.seen.newest == expected["newest_seen"]
    tolerance, bands = run_bands.load(judged / "bands.json")
    limits = dict(expected["tolerance"])
    proofs = toploc.Thresholds(**limits.pop("proofs"))
    assert tolerance == rules_lib.Tolerance(**limits, proofs=proofs)
    assert bands == sequential_test.Bands(**expected["bands"])


def test_the_validation_service_goes_on(judged, tmp_path):
    """Continues with old files, ledger, and state: no file is checked, paid, or punished twice."""
    expected, run = EXPECTED["validator"], unpacked("run", tmp_path / "run")
    validator, exp = make_validator(run, judged / "bands.json")
    secret = run_directory.secret(run, exp.config.seed)
    assert validator_state.identity(secret, KEEPER.worker) == expected["identity"]
    (judged / "files").mkdir()
    for step in (1, 2):
        shutil.copy(run / "rollouts" / f"step_{step}" / "accepted.parquet", judged / "files" / f"step-{step}.parquet")
    shutil.copy(judged / "files" / "step-1.parquet", judged / "files" / "again.parquet")
    ledger = ledger_lib.Ledger(judged / "ledger.db", KEEPER)
    service = validator_service.Service(
        validator,
        judged / "files",
        lambda: 2,
        secret=secret,
        min_rate=exp.config.trust.min_rate,
        state=validator_state.State(judged / "validator.db", expected["identity"], keep_steps=expected["keep_steps"]),
        ledger=ledger,
        slash=30,
    )
    with ledger, contextlib.closing(service):
        for name, answer in expected["answers"].items():
            assert plain(dataclasses.asdict(service.status(name))) == answer
        answer, deadline = service.submit("again.parquet", [expected["shas"]["1"]]), time.monotonic() + 60
        while answer.status == "pending" and time.monotonic() < deadline:
            time.sleep(0.01)
            answer = service.status("again.parquet")
        assert plain(dataclasses.asdict(answer)) == expected["answers"]["step-1.parquet"]
        for worker, before in expected["records"].items():  # streams that came later have no evidence
            after = validator.evidence.tests[worker].state()
            assert after | {"log_wealth": 0} == after | before | {"log_wealth": 0}
            assert after["log_wealth"] == after["log_wealth"] | before["log_wealth"]
        assert len(ledger.entries()) == len(EXPECTED["ledger"]["entries"])


# ---- working directory -------------------------------------------------------------------------------------------------


@pytest.fixture
def workdir(tmp_path):
    return unpacked("run", tmp_path / "run")


def flags(workdir, **changes) -> list[str]:
    """The flags of the command that wrote the working directory, which is elsewhere now."""
    _, config, *fields = EXPECTED["run"]["command"]
    assert config == "--config=configs/quickstart.py"
    changed = [f"--config.{name.replace('__', '.')}={value}" for name, value in changes.items()]
    return [f"--config={CONFIG}", *fields, *changed, f"--workdir={workdir}"]


def run(module, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result


def test_files_of_a_working_directory(workdir):
    expected = EXPECTED["run"]
    assert metrics.read(workdir / "metrics.jsonl") == expected["records"]
    assert json.loads((workdir / "evaluations.json").read_text()) == expected["evaluations"]
    assert run_directory.signing_key(workdir).worker == expected["weights_key"]
    assert validator_state.run_of(run_directory.secret(workdir, 0)) == expected["secret_run"]
    assert rollout_lib.WorkerKey.load(workdir / "logs" / "worker0.key").worker == expected["worker"]
    rollouts = parquet.read(workdir / "rollouts" / "step_2" / "accepted.parquet")
    assert {rollout.worker for rollout in rollouts} == {expected["worker"]} and {r.step for r in rollouts} == {2}
    assert all(map(rollout_lib.signature_ok, rollouts))
    for name, digest in expected["files"].items():
        assert hashlib.sha256((workdir / name).read_bytes()).hexdigest() == digest


def test_the_config_of_a_working_directory(workdir):
    """No field of it has another name or default, or the same command would be refused there."""
    config = quickstart.get_config()
    for flag in EXPECTED["run"]["command"][2:]:
        name, value = flag.removeprefix("--config.").split("=", 1)
        with contextlib.suppress(ValueError):
            value = ast.literal_eval(value)
        config.update_from_flattened_dict({name: value})
    for exp in (calibrate.load_experiment(str(workdir)), experiment.resolve(config)):
        assert run_directory.differences(workdir, exp) == []
        with run_directory.open_workdir(str(workdir), exp) as opened:
            assert opened == workdir
        found = plain(exp.broadcast_metadata)
        assert found.pop("engine")["max_model_len"] and found == EXPECTED["run"]["metadata"]


def test_checkpoints_of_a_working_directory(workdir):
    expected, exp = EXPECTED["run"], calibrate.load_experiment(str(workdir))
    assert checkpoint.complete_steps(workdir / "checkpoints") == expected["steps"]
    assert checkpoint.best_step(workdir / "checkpoints") == expected["best"]["step"]
    mesh = mesh_lib.create({}, jax.devices()[:1])
    for name, wanted in (("checkpoints", expected["state"]), ("warmup", expected["warmup"])):
        with checkpoint.Checkpointer(workdir / name, keep=9) as checkpointer:
            step, state, host = checkpointer.restore(train_step.abstract_state(exp.learner(mesh)))
        named, _ = jax.tree_util.tree_flatten_with_path(state)
        found = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf).tobytes() for path, leaf in named
        }
        digests = {key: hashlib.sha256(data).hexdigest()[:16] for key, data in found.items()}
        assert (step, digests, host) == (wanted["step"], wanted["arrays"], wanted["host"])
    assert sft.Patience(**host) == sft.Patience(limit=exp.config.warmup.patience)
    for step in expected["steps"]:
        _, params = checkpoint.restore_params(workdir / "checkpoints", transformer.abstract(exp.model, mesh), step)
        assert trees.digest(params) == expected["weights"][str(step)]["digest"]


def test_weights_of_the_working_directories(workdir, tmp_path):
    expected, root = EXPECTED["run"], str(workdir / "weights")
    assert broadcast.versions(root) == [0, 1, 2]
    for version in (0, 1, 2):
        manifest = broadcast.verify(root, version, key=expected["weights_key"])
        found = {"digest": manifest.digest, "base": manifest.base, "encodings": list(manifest.encodings)}
        assert found == expected["weights"][str(version)] and manifest.metadata == expected["metadata"]
    routed = unpacked("routed", tmp_path / "routed")
    key = run_directory.signing_key(routed).worker
    assert broadcast.verify(str(routed / "weights"), 0, key=key).digest == EXPECTED["routed_run"]["digest"]


def test_report_of_a_working_directory(workdir):
    assert report.main([str(workdir)]) == 0
    page = (workdir / "report.html").read_text()
    assert "<svg" in page and "No data in this run" not in page and "No samples" not in page


def test_failed_batch():
    batch = packing.load(FIXTURES / "failed_batch.npz")
    names = [field.name for field in dataclasses.fields(batch) if getattr(batch, field.name) is not None]
    assert names == EXPECTED["failed_batch"]
    for name in names:
        found, wanted = np.asarray(getattr(batch, name)), arrays()[f"failed_batch/{name}"]
        assert found.dtype == wanted.dtype, name
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.slow
def test_a_working_directory_is_resumed(workdir):
    expected = EXPECTED["run"]
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    result = run(TRAIN, *flags(workdir, rl__num_steps=expected["resumed"]["rl.num_steps"]))
    assert "resuming after step 2" in result.stdout
    records = metrics.read(workdir / "metrics.jsonl")
    assert (workdir / "metrics.jsonl").read_text().splitlines()[: len(lines)] == lines
    (third,) = [record for record in records if record["phase"] == "rl" and record["step"] == 3]
    assert third["trust/num_accepted"] == 4 and third["trust/num_refused"] == 0
    assert third["loss/mismatch_kl"] < 1e-6
    assert [entry["step"] for entry in json.loads((workdir / "evaluations.json").read_text())] == [0, 2, 3]
    rollouts = parquet.read(workdir / "rollouts" / "step_3" / "accepted.parquet")
    prescribed = [
        {
            "task": dataclasses.asdict(rollout.task),
            "sample": rollout.sample,
            "seed": rollout.seed,
            "prompt": rollout.tokens[: int(rollout.sampled_mask.argmax())].tolist(),
        }
        for rollout in sorted(rollouts, key=lambda rollout: (rollout.task.group, rollout.sample))
    ]
    assert prescribed == expected["third_step"]  # the run's data goes on where it was
    assert {rollout.worker for rollout in rollouts} == {expected["worker"]}
    assert broadcast.verify(str(workdir / "weights"), 3, key=expected["weights_key"]).version == 3
    records = json.loads(host_of(workdir, 3))["rollouts"]["evidence"]["records"].values()
    # The records cover all steps: the worker answers for the first two, and the server that signs now for the third.
    assert sorted(record["num_claims"] for record in records) == [4, 8]


def host_of(workdir, step) -> str:
    files = (workdir / "checkpoints" / str(step) / "host").iterdir()
    return next(text for file in files if "evidence" in (text := file.read_text()))


@pytest.mark.slow
def test_a_working_directory_is_resumed_from_its_warm_up(workdir):
    """Resumes from the warm-up, as after a kill before the first checkpoint of reinforcement learning."""
    for name in ("checkpoints", "weights"):
        shutil.rmtree(workdir / name)
    result = run(TRAIN, *flags(workdir, rl__num_steps=1))
    assert "warm-up  step 1/2" not in result.stdout
    root = str(workdir / "weights")
    assert broadcast.read_manifest(root, 0).digest == EXPECTED["run"]["weights"]["0"]["digest"]


@pytest.mark.slow
def test_a_working_directory_is_evaluated(workdir):
    for changes, name, steps in (
        ({}, "evaluations.json", [0, 2]),
        ({"evaluation__num_tasks": 3}, "other_evaluations.json", [2]),
    ):
        run(EVALUATE, *flags(workdir, **changes), "--step=newest")
        entries = json.loads((workdir / name).read_text())
        assert [entry["step"] for entry in entries] == steps
        assert {"avg@1", "pass@1", "num_tasks"} <= entries[-1]["scores"].keys()


@pytest.mark.parametrize(("asked", "step"), [("newest", 2), ("best", 0)])
def test_a_working_directory_is_exported(workdir, tmp_path, asked, step):
    result = run(EXPORT, *flags(workdir), f"--step={asked}", f"--output={tmp_path / 'exported'}")
    assert f"version {step} of" in result.stdout
    _, params = hf.load(tmp_path / "exported")
    assert trees.digest(params) == EXPECTED["run"]["weights"][str(step)]["digest"]


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_rate_of_replays_that_earlier_configs_set_is_dropped(tmp_path, monkeypatch):
    """A config file, a command line, and a saved config may have `trust.check_fraction`; its neighbors are still checked."""
    file = tmp_path / "mine.py"
    lines = ["from configs import quickstart", "def get_config():", "    c = quickstart.get_config()"]
    file.write_text("\n".join([*lines, "    c.trust.check_fraction = 0.0", "    return c"]))

    def parsed(*argv):
        values = absl_flags.FlagValues()
        monkeypatch.setattr(sys, "argv", ["rl.train", f"--config={file}", f"--workdir={tmp_path}", *argv])
        monkeypatch.delitem(sys.modules, "config_config", raising=False)  # of another test's config file
        command_line.define(values=values)
        command_line.parse(sys.argv, values)
        return experiment.resolve(values.config).config

    for trust in (parsed().trust, parsed("--config.trust.check_fraction=0.5").trust):
        assert "check_fraction" not in trust and trust.min_rate == 0.05
    with pytest.raises(ValueError, match="check_fractio"):
        parsed("--config.trust.check_fractio=0.5")
