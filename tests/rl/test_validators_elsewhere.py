"""A run whose replays are done by other processes, from the command line on."""

import contextlib
import os
import socket
import subprocess

import pytest

from rl.ledger import ledger as ledger_lib
from rl.validator import routes
from tests.support import proxy, serving, tiny_run


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def num_steps(workdir):
    return len(tiny_run.lines(workdir)) if (workdir / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_a_run_waits_for_the_verdicts_of_three_processes(tmp_path):
    """The validators start after the run, which waits for them; every group is judged by two of three, one of which dies."""
    workdir = tmp_path / "w"
    keys, ports = [tmp_path / f"{number}.key" for number in range(3)], [free_port() for _ in range(3)]
    names = tuple(
        f"http://127.0.0.1:{port}#{routes.own_key(key).worker}" for port, key in zip(ports, keys, strict=True)
    )
    overrides = {"trust__validators": str(names), "trust__min_rate": 1.0, "trust__verdict_s": 60.0, "rl__max_lag": 1}
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = tiny_run.command(workdir, **overrides)
    output = open(tmp_path / "output", "w")
    with output, subprocess.Popen(command, cwd=tiny_run.ROOT, env=environment, stdout=output, stderr=output) as run:
        try:
            proxy.wait_until(lambda: (workdir / "weights.key").exists() or run.poll() is not None, 120)
            with contextlib.ExitStack() as stack:
                processes = []
                for number, (key, port) in enumerate(zip(keys, ports, strict=True)):
                    folder = tmp_path / str(number)
                    folder.mkdir()
                    arguments = ["serve", "--workdir", workdir, "--key", key, "--port", port]
                    processes.append(stack.enter_context(serving.child(folder, "rl.validator", *arguments))[0])
                proxy.wait_until(lambda: run.poll() is not None or num_steps(workdir) >= 2, 240)
                processes[0].kill()
                assert run.wait(300) == 0, (tmp_path / "output").read_text()[-4000:]
        finally:
            run.kill()
    steps = tiny_run.lines(workdir)
    assert len(steps) == 6 and sum(step["trust/num_checked"] for step in steps) == 6 * 16
    for step in steps:
        assert (
            step["trust/num_refused"] == step["trust/num_unverified"] == step["trust/num_validator_contradictions"] == 0
        )
    with ledger_lib.Ledger(workdir / "ledger.db") as ledger:
        events = [entry.event for entry in ledger.entries()]
    judges = {event.fields["validator"] for event in events if event.kind == "verdict"}
    assert judges <= {name.partition("#")[2] for name in names} and len(judges) >= 2
    batches = [event.fields for event in events if event.kind == "batch"]
    assert len(batches) == 6 and all(batch["verified"] and not batch["trusted"] for batch in batches)
