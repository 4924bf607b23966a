"""The rollout system of a run: its keys, stakes, and the commands of its processes."""

import contextlib
import queue
import stat
import types

import jax
import pytest

from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from rl import rollout_system
from rl.experiment import experiment
from rl.experiment import workdir as run_directory
from rl.ledger import events
from rl.ledger import ledger as ledger_lib
from rl.orchestrator import assembly
from rl.protocol import timeline
from rl.verification import verifier
from sharding.system import child_process
from tests.support import doubles


def test_keys_of_workers_are_not_among_the_logs(tmp_path):
    (tmp_path / "logs").mkdir()
    rollout_lib.WorkerKey.generate().save(tmp_path / "logs" / "worker0.key")  # of an older run
    old = rollout_lib.WorkerKey.load(tmp_path / "logs" / "worker0.key").worker
    for _ in range(2):
        file = run_directory.worker_key_file(tmp_path, "worker0")
        assert file == tmp_path / "keys" / "worker0.key" and rollout_lib.WorkerKey.load(file).worker == old
    assert not list((tmp_path / "logs").iterdir())
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)]
    assert modes == [0o600, 0o700]
    assert rollout_lib.WorkerKey.load(run_directory.worker_key_file(tmp_path, "worker1")).worker != old


def test_the_learners_own_validator_replays_signed_weights_only(tmp_path, monkeypatch):
    """Weights that nobody had signed decided its verdicts."""

    def published(root, *, keep, key):
        raise ValueError(f"{root} is read with {key}")

    monkeypatch.setattr(verifier, "published", published)
    key, exp = run_directory.signing_key(tmp_path).worker, experiment.resolve(quickstart.get_config())
    with pytest.raises(ValueError, match=f"{tmp_path} is read with {key}"):
        with rollout_system.start_rollout_system(exp, tmp_path, tmp_path, timeline.Policy(0, 0), print):
            pass


def test_a_stake_counts_until_its_key_is_ejected(tmp_path):
    keeper, rich, cheat = (rollout_lib.WorkerKey.generate() for _ in range(3))
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(ledger_lib.Ledger.create(tmp_path / "stakes.db", keeper))
        stake = assembly._stakes(str(tmp_path / "stakes.db"), stack)
        assert assembly._stakes("", stack)(rich.worker) == stake(rich.worker) == 0
        for key in (rich, cheat):  # while the run is on
            ledger.append(events.sign("join", key.worker, key), events.sign("stake", key.worker, key, amount=7))
            assert stake(key.worker) == 7
        ledger.append(events.sign("slash", rich.worker, keeper, amount=3, reason="forged"))
        ledger.append(events.sign("eject", cheat.worker, keeper, reason="forged"))
        assert (stake(rich.worker), stake(cheat.worker)) == (4, 0)


def test_the_server_of_a_run_trusts_its_root_file_if_there_is_one(tmp_path):
    """No replacement of the key reaches a server that trusts its hex."""
    run_directory.signing_key(tmp_path)
    trusted = [run_directory.public_key(tmp_path), str(tmp_path / "root.json")]
    for expected in trusted:
        command = rollout_system.server_command(doubles.experiment(), tmp_path, tmp_path)
        assert command[command.index("--weights_key") + 1] == expected
        (tmp_path / "root.json").write_bytes(b"of `python -m sharding.broadcast keys`")


def test_replays_on_a_cpu_that_jax_does_not_have_are_refused_before_the_run(monkeypatch):
    """Minutes of warm-up ended in a traceback if JAX_PLATFORMS was cuda."""

    def local_devices(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return jax.devices()

    monkeypatch.setattr(assembly.jax, "local_devices", local_devices)
    config = quickstart.get_config()
    rollout_system.check(experiment.resolve(config))  # on the accelerator
    config.trust.device = "cpu"
    with pytest.raises(
        ValueError, match="trust.device = 'cpu' replays on the CPU, which .*,cpu, or trust.device = 'acc"
    ):
        rollout_system.check(experiment.resolve(config))


def test_a_process_may_take_as_long_to_start_as_the_config_says(tmp_path):
    """600 s, a constant, were too few for a large model on a slow disk."""
    child = types.SimpleNamespace(
        name="server", process=types.SimpleNamespace(poll=lambda: None), log="logs/server.log"
    )
    with pytest.raises(
        ValueError, match=r"did not start in 0 s \(topology.patience_s\); read its log, logs/server.log, or"
    ):
        rollout_system._address(child, tmp_path / "server.address", 0.05)


def test_workers_start_before_an_engine_compiles_in_this_process(tmp_path, monkeypatch):
    started, exp = [], experiment.resolve(quickstart.get_config())
    died = ValueError("the engine ended")
    server = types.SimpleNamespace(url="http://a", join=lambda *args: contextlib.nullcontext(), death=lambda: died)

    def child(name, *args, **options):
        started.append((name, options["environment"]))
        return contextlib.nullcontext()

    monkeypatch.setattr(child_process, "ChildProcess", child)
    deaths: queue.SimpleQueue = queue.SimpleQueue()
    serve = lambda: started.append("server") or server  # noqa: E731
    with rollout_system.join(exp, tmp_path, "http://b", 1, serve, lambda line: None, deaths.put):
        assert deaths.get(timeout=60) is died
    assert started == [("worker1", {"JAX_PLATFORMS": "cpu"}), "server"]
