"""A swarm under faults: their schedule, broken links, forged rollouts, and a run that survives all of them."""

import collections
import itertools
import socket
import threading
import time
import types
from unittest import mock

import numpy as np
import pytest

from bench.chaos import cheats, fault_schedule, tcp_link
from bench.chaos import faults as faults_lib
from inference.rollouts import completion as completion_lib
from rl.swarm import supervisor
from tests.rl.swarm import test_swarm
from tests.support import cheats as played_cheats
from tests.support import commands, doubles, proxy


@pytest.mark.parametrize("seed", range(8))
def test_ten_minutes_repeat_by_seed_and_hit_each_role_with_all_that_it_can_suffer(seed):
    counts = {"learner": 1, "orchestrator": seed % 2, "relay": 2, "server": 2, "worker": 4, "validator": 1}
    roles = {f"{role}{i}": role for role, count in counts.items() for i in range(count)} | {"impostor": "impostor"}
    schedules = (fault_schedule.schedule(one, roles) for one in (seed, seed, seed + 1))
    faults, same, other = (list(itertools.takewhile(lambda fault: fault.at_s < 600, one)) for one in schedules)
    assert faults == same and faults != other and len(faults) == 59
    assert faults[0].kind == "forge"  # it needs time to be barred
    kinds = {(kind, role) for kind, (hit, *_) in fault_schedule.KINDS.items() for role in hit if role in roles.values()}
    assert {(fault.kind, roles[fault.target]) for fault in faults} == kinds
    assert [fault.at_s % fault_schedule.INTERVAL_S for fault in faults] == [0.0] * 59
    ends = collections.defaultdict(float)
    for fault in faults:
        _, shortest, longest = fault_schedule.KINDS[fault.kind]
        assert shortest <= fault.duration_s <= longest and fault.at_s >= ends[fault.target]
        ends[fault.target] = fault.at_s + fault.duration_s + fault_schedule.REST_S


def test_faults_begin_when_they_are_due_and_are_healed_in_time(tmp_path):
    roles = {"learner": "learner", "relay0": "relay", "server0": "server", "impostor": "impostor"}
    specs = {name: supervisor.Spec(name, role, ["inference.serve"]) for name, role in roles.items()}
    running = {name: types.SimpleNamespace(child=name != "impostor", spec=spec) for name, spec in specs.items()}
    nodes, links, lines, seen = mock.Mock(nodes=running), mock.Mock(), [], []
    nodes.signal.side_effect = lambda name, number: seen.append(running[name].spec.command[0])
    schedules = itertools.tee(fault for fault in fault_schedule.schedule(5, roles) if fault.kind != "full_disk")
    due = collections.Counter(one.kind for one in itertools.takewhile(lambda one: one.at_s < 300, schedules[0]))
    with faults_lib.Faults(nodes, links, schedules[1], specs, {}, tmp_path / "chaos.jsonl", lines.append) as faults:
        for elapsed_s in range(400):
            faults.tick(float(elapsed_s), begin=elapsed_s < 300)
        assert faults.active == {"impostor": "forge"} and faults.counts == due
    begun, ended = ([line for line in lines if line.endswith(word)] for word in ("begins", "ends"))
    lasting = [line for line in begun if not line.startswith(("chaos: kill", "chaos: reset"))]
    assert not faults.active and [line.replace("begins", "ends") for line in sorted(lasting)] == sorted(ended)
    assert {*seen} == {"inference.serve", "bench.chaos.cheats"} and running["server0"].spec == specs["server0"]
    assert links.set.call_args_list[-1].args[1] == tcp_link.OPEN and "impostor" not in running
    assert len((tmp_path / "chaos.jsonl").read_text().splitlines()) == len(lines)


@pytest.fixture
def echo():
    """A port that returns the bytes that it gets."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve():
            while True:
                try:
                    client, _ = sock.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(client,), daemon=True).start()

        def answer(client):
            with client:
                try:
                    while data := client.recv(65536):
                        client.sendall(data)
                except OSError:
                    pass

        threading.Thread(target=serve, daemon=True).start()
        yield sock.getsockname()[1]


def test_a_link_forwards_holds_slows_and_resets(echo):
    with tcp_link.Links() as links:
        port = int(links.add(frozenset({"a", "b"}), echo).rpartition(":")[2])
        links.add(frozenset({"c"}), echo)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:

            def ask(data: bytes) -> float:
                begun_s, got = time.monotonic(), b""
                client.sendall(data)
                while len(got) < len(data):
                    got += client.recv(65536)
                assert got == data
                return time.monotonic() - begun_s

            ask(b"x" * 300_000)
            links.set("b", tcp_link.Condition(is_held=True))
            client.sendall(b"held")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(5)
            links.set("a", tcp_link.OPEN)
            assert client.recv(10) == b"held"
            links.set("a", tcp_link.Condition(bytes_per_s=100_000))
            assert ask(b"x" * 20_000) >= 0.3  # 0.2 s each way, minus the bytes under way
            links.set("a", tcp_link.Condition(delay_s=0.2))
            assert ask(b"x") >= 0.4
            links.set("a", tcp_link.OPEN)
            links.reset("c")
            ask(b"x")
            links.reset("a")
            with pytest.raises(ConnectionResetError):
                proxy.wait_until(lambda: client.recv(1) == b"", 5, "the reset")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:  # heals by itself
            ask(b"again")


def forged(double):
    """The rollouts of a double as the impostor of a swarm hands them in."""
    out = []
    for rollout in double.generate():
        P = rollout.prompt_length
        sample = completion_lib.Completion(rollout.tokens[P:].tolist(), [], [], 0, "stop", b"", server="x")
        tokens = np.array([*rollout.tokens[:P], *cheats.forged(sample).tokens], np.int32)
        out.append(doubles.signed(doubles.rewritten(double, rollout, tokens), logprobs=rollout.logprobs))
    return out


def test_each_group_of_the_impostor_is_refused_by_the_real_verifier():
    caught, reasons = played_cheats.play(forged, 32, prompts=4), {"sampling", "logprob", "toploc", "termination"}
    assert caught.worst_until <= played_cheats.GROUP and {*caught.reasons} <= reasons, caught
    for tokens in ([5, 6, 5, 2], [5, 2], [2]):  # also those that read the same backward
        assert cheats.forged(completion_lib.Completion(tokens, [], [], 0, "stop", b"")).tokens != tokens


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "apart"), [(364, ()), (3082, ("--apart",))])
def test_a_swarm_under_faults_ends_its_run_and_bars_only_cheats(tmp_path, seed, apart):
    """Nine faults. By these seeds a server lies and another refuses; learner, orchestrator, and validator are killed, or stop."""
    workdir, output = tmp_path / "run", tmp_path / "output"
    with open(output, "w") as file:
        overrides = {"rl.num_steps": 60, "rl.max_lag": 2, "topology.lease_s": 12.0}
        options = (f"--seed={seed}", "--minutes=1.5", "--workers=2", *apart)
        swarm = test_swarm.start(workdir, file, *options, module="bench.chaos", **overrides)
        assert swarm.wait(900) == 0, output.read_text()[-4000:]
    assert test_swarm.steps(workdir) == list(range(1, 61)) and not test_swarm.processes_of(workdir)
    *_, faults, starts, _, _, refused, audit = output.read_text().splitlines()
    assert faults.startswith("faults: ") and "forge 1" in faults and "learner" in starts
    assert " barred after 5: " in refused and audit.endswith("no findings")


@pytest.mark.parametrize(
    ("option", "code", "words"),
    [("--minutes=-1", 1, "--minutes=-1 must be above 0; change it"), ("--dry_run", 0, "forge      impostor")],
)
def test_the_command_lists_its_faults_or_names_a_mistake(tmp_path, option, code, words):
    found = commands.forked("bench.chaos", "--config=configs/quickstart.py", f"--workdir={tmp_path}", option)
    assert found.returncode == code and words in found.stdout + found.stderr and not [*tmp_path.iterdir()]
