"""The faults of a swarm under test: their schedule, and broken links."""

import collections
import itertools
import socket
import threading
import time

import pytest

from rl.swarm import fault_schedule, tcp_link
from tests.support import proxy

ROLES = {name: name for name in ("learner", "orchestrator", "impostor")} | {
    f"{role}{i}": role for role in ("relay", "server", "worker", "validator") for i in range(2)
}


@pytest.mark.parametrize("seed", range(8))
def test_a_schedule_repeats_and_hits_each_role_with_all_that_it_can_suffer(seed):
    faults = list(itertools.islice(fault_schedule.schedule(seed, ROLES), 120))
    assert faults == list(itertools.islice(fault_schedule.schedule(seed, ROLES), 120))
    possible = {(kind, role) for kind, (roles, *_) in fault_schedule.KINDS.items() for role in roles}
    assert {(fault.kind, ROLES[fault.target]) for fault in faults} == possible
    assert [fault.at_s % fault_schedule.INTERVAL_S for fault in faults] == [0.0] * len(faults)
    ends = collections.defaultdict(float)
    for fault in faults:
        _, shortest, longest = fault_schedule.KINDS[fault.kind]
        assert shortest <= fault.duration_s <= longest and fault.at_s >= ends[fault.target]
        ends[fault.target] = fault.at_s + fault.duration_s + fault_schedule.REST_S


def test_schedules_of_other_seeds_and_fewer_roles_differ():
    alone = {"learner": "learner", "server0": "server"}
    faults = list(itertools.islice(fault_schedule.schedule(1, alone), 40))
    assert {fault.target for fault in faults} == set(alone) and not {"forge"} & {fault.kind for fault in faults}
    assert faults != list(itertools.islice(fault_schedule.schedule(2, alone), 40))


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
