"""The rollout system of a run: its keys, stakes, and the commands of its processes."""

import contextlib
import dataclasses
import os
import queue
import signal
import stat
import subprocess
import types

import jax
import pytest
from ml_collections import config_dict

from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.experiment import workdir as run_directory
from rl.protocol import timeline
from rl.protocol.ledger import events
from rl.protocol.ledger import ledger as ledger_lib
from rl.swarm import rollout_system
from rl.swarm.orchestrator import assembly
from rl.trust.verification import verifier
from sharding.system import child_process
from tests.rl.swarm import test_swarm
from tests.sharding.mesh import test_profiler
from tests.support import doubles, proxy, tiny_run


def test_keys_of_workers_are_for_their_owner_alone(tmp_path):
    files = [run_directory.worker_key_file(tmp_path, name) for name in ("worker0", "worker0", "worker1")]
    assert files[0] == tmp_path / "keys" / "worker0.key"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (files[0], files[0].parent)] == [0o600, 0o700]
    first, again, other = (rollout_lib.WorkerKey.load(file).worker for file in files)
    assert first == again != other


@pytest.mark.parametrize("names_servers", [False, True])
def test_the_commands_of_all_roles_are_said(tmp_path, names_servers):
    """Those that sign in name the key's file, and where its key belongs; servers that the config names need none."""
    config = quickstart.get_config()
    config.topology.update(mode="remote", server_keys=("a" * 64,))
    if names_servers:
        own = {"servers": ("http://s:1",), "control_servers": ("http://s:2",), "server_keys": ()}
        config.topology.update(own)
    run = run_directory.signing_key(tmp_path).worker
    lines = [*rollout_system.commands_elsewhere(experiment.resolve(config), tmp_path, "http://o:1", "http://r:2")]
    signing = f"--orchestrator http://o:1 --run {run} --key FILE"
    commands = {line.partition(" elsewhere: ")[0]: line for line in lines if " elsewhere: " in line}
    assert commands.keys() == {"servers", "workers", "relays"} | (set() if names_servers else {"validators"})
    for role, module in (
        ("servers", "inference.serve"),
        ("relays", "sharding.relay"),
        ("validators", "rl.validator serve"),
    ):
        command = commands.get(role, f"{module} http://r:2")
        assert module in command and "http://r:2" in command and (signing in command) == (not names_servers)
    assert commands["workers"].endswith(f"rl.worker --orchestrator http://o:1 --run {run} --key FILE")
    assert f"--upstream http://r:2 --dir DIR --host ADDRESS --trusted_key {run}" in commands["relays"]
    said = "in topology.server_keys when this run started; python -m rl.validator key --key FILE makes FILE"
    assert (said in lines[-1]) == (not names_servers)


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


def test_the_server_of_a_run_records_the_profile_of_its_config(tmp_path):
    exp = doubles.experiment()
    assert "--profile" not in rollout_system.server_command(exp, tmp_path, tmp_path)
    config = config_dict.ConfigDict(exp.config)
    config.profile.steps = (10, 13)
    exp = dataclasses.replace(exp, config=config)
    *_, flag, folder, steps, first, last = rollout_system.server_command(exp, tmp_path, tmp_path, "server1")
    assert (flag, folder) == ("--profile", str(tmp_path / "profile" / "server1"))
    assert (steps, first, last) == ("--profile_steps", "10", "13")


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


def test_a_process_that_ended_before_the_run_needs_it_is_named_with_its_last_words(tmp_path):
    server = types.SimpleNamespace(process=types.SimpleNamespace(poll=lambda: None))
    with child_process.ChildProcess("worker0", ["no_such_module"], run_directory.logs(tmp_path)) as worker:
        worker.process.wait(60)
        with pytest.raises(
            ValueError, match="the worker0 process ended with code 1: .*No module .*. Read its log: .*log"
        ):
            rollout_system.Begun(server, "", tmp_path, [worker]).check()


@pytest.mark.slow
def test_a_server_that_dies_during_the_warm_up_ends_the_run(tmp_path):
    """The run noticed it after its last warm-up step."""
    command = tiny_run.command(tmp_path, warmup__num_steps=10**6)
    with subprocess.Popen(
        command, cwd=tiny_run.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        proxy.wait_until(lambda: tiny_run.lines(tmp_path, "warm-up"), 240)
        (server,) = [pid for pid, line in test_swarm.processes_of(tmp_path).items() if "inference.serve" in line]
        os.kill(server, signal.SIGKILL)
        _, error = run.communicate(timeout=60)
    assert run.returncode == 1 and "error: the server process ended with code -9: " in error and "Read its log" in error
    assert not test_swarm.processes_of(tmp_path)


@pytest.mark.slow
def test_a_profile_has_the_learner_and_the_engine_of_another_process(tmp_path):
    """Only the learner's was written. The engine's begins with the version that step 2 trains on, and ends with that of step 3."""
    result = tiny_run.run(tmp_path, profile__steps="(2, 3)", rl__num_steps=5)
    assert result.returncode == 0, result.stderr
    own = {
        file.is_relative_to(tmp_path / "profile" / "server"): file
        for file in (tmp_path / "profile").rglob("*.xplane.pb")
    }
    assert own.keys() == {True, False}
    names = {is_server: test_profiler.names(file) for is_server, file in own.items()}
    assert any("decode" in name for name in names[True]) and "train" not in names[True]
    assert "train" in names[False] and test_profiler.recorded(tmp_path / "profile" / "plugins") == [2, 3]
    assert (tmp_path / "profile" / "server" / "memory.json").exists()


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
