"""The doctor finds what a run would fail on, names the remedy, and leaves nothing behind."""

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import threading

import pytest

from configs import base
from rl import doctor
from tests.support import tiny_run


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Returns {check: result} for changed fields of the default config; devices are not opened."""
    monkeypatch.setattr(doctor, "_devices", lambda config: doctor.Result("devices", doctor.OK, "4 x TPU v5 lite"))

    def check(workdir=tmp_path / "w", **fields):
        config = base.get_config()
        config.update_from_flattened_dict({key.replace("__", "."): value for key, value in fields.items()})
        return {one.check: one for one in doctor.check(config, str(workdir))}

    return check


def test_a_good_machine_has_no_failure_and_keeps_no_probe(results, tmp_path):
    found = results(topology__metrics="0")
    assert {name: one for name, one in found.items() if one.status == doctor.FAILED} == {}
    checks = {"python", "packages", "machine", "open files", "devices", "config", "topology.port", "topology.metrics"}
    assert checks | {"workdir", "disk", "sandbox", "monitor tensorboard"} <= found.keys()
    assert [*tmp_path.iterdir()] == []


def test_each_fault_is_named_with_its_remedy(results, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = results(
            tmp_path / "file" / "w" if os.getuid() else "/proc/w",
            topology__port=port,
            topology__monitors=("mlflo",),
            rl__loss="grpoo",
        )
    faults = {name: f"{one.found}; {one.remedy}" for name, one in found.items() if one.status == doctor.FAILED}
    assert "jax 0.0.1 is not" in faults["packages"] and "pip install -r requirements.txt" in faults["packages"]
    assert str(port) in faults["topology.port"] and "choose from" in faults["monitor mlflo"]
    assert "grpo" in faults["config"] and "workdir" in faults
    for place in ("file", "file/w"):  # the probe was written next to the file
        found = results(tmp_path / place)["workdir"]
        assert found.status == doctor.FAILED and "file is not a directory" in found.found


def test_a_hub_that_cannot_be_reached_is_a_fault_with_its_remedy(results, monkeypatch):
    """Its package raises the errors of an HTTP library of its own, which are neither OSError nor those of httpx."""

    def fail(*args, **kwargs):
        raise type("ConnectError", (Exception,), {})("Name or service not known\nmore")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    found = results(init_from="Owner/Name")
    assert found["init_from"].status == found["config"].status == doctor.FAILED
    assert "(Name or service not known)" in found["init_from"].found and "HF_TOKEN" in found["init_from"].remedy
    assert "(Name or service not known)" in found["config"].found and ".gguf" in found["config"].remedy


def test_a_node_elsewhere_is_asked_and_its_clock_compared(results, monkeypatch):
    class Reply:
        status_code, headers = 200, {"date": "Wed, 21 Oct 2015 07:28:00 GMT"}

    async def fetch(*args):
        return Reply()

    monkeypatch.setattr(doctor.bounded_reply, "fetch", fetch)
    found = results(topology__servers=("http://far:8000",))
    assert found["http://far:8000"].status == doctor.OK
    assert found["clock of http://far:8000"].status == doctor.FAILED
    for date in ("yesterday", "Wed, 99 Jan 99999 99:99:99 GMT"):
        Reply.status_code, Reply.headers = 503, {"date": date}
        found = results(topology__servers=("http://far:8000",))
        assert found["http://far:8000"].status == doctor.FAILED and "clock of http://far:8000" not in found
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_devices", lambda config: doctor.Result("devices", doctor.OK, ""))
    away = results(topology__servers=("http://127.0.0.1:9",))["http://127.0.0.1:9"]
    assert away.status == doctor.FAILED and "firewall" in away.remedy
    assert results(topology__servers=("http://[::1",))["http://[::1"].status == doctor.FAILED


def test_a_node_that_sends_one_byte_at_a_time_is_given_up(results, monkeypatch):
    """Each read ended in time, so the check never did."""
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.5)
    ended = threading.Event()

    def drip(listener):
        with contextlib.suppress(OSError), listener.accept()[0] as sock:
            sock.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not ended.wait(0.05):
                sock.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        watch = threading.Timer(20.0, ended.set)  # else a check without an end would be a test without one
        watch.start()
        found = results(topology__servers=(url,))[url]
        watch.cancel()
        was_ended = ended.is_set()
        ended.set()
    assert not was_ended and found.status == doctor.FAILED and "no complete reply in 0.5 s" in found.found


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("auto", 0), ("sideways", 1)])
def test_the_command_prints_one_table(mode, code, tmp_path):
    options = [f"--config.topology.mode={mode}", f"--workdir={tmp_path}"]
    command = [sys.executable, "-m", "rl.doctor", "--config=configs/quickstart.py", *options]
    result = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == code and ("FAILED" in result.stdout) == bool(code), result.stdout + result.stderr
    assert "x cpu" in result.stdout and "Traceback" not in result.stderr
