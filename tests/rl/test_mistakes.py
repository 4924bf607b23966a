"""A mistake on the command line of a node ends it before it works: one line with the value and a remedy, and no traceback."""

import re
import subprocess
import sys

import pytest

from tests.support import commands

URL, NONE = "http://127.0.0.1:1", "/nowhere"
SERVE = ["inference.serve", "--weights", NONE, "--port", "0"]
APART = [
    "rl.swarm.orchestrator",
    "--config.topology.mode=remote",
    "--config.topology.server_keys=('" + 64 * "a" + "',)",
]
RELAY = ["sharding.relay", "--upstream", NONE, "--dir", "mirror", "--port", "0"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["rl.audit", NONE], "no ledger at /nowhere/ledger.db; that of a run is WORKDIR/ledger.db; correct the path"),
        (["rl.audit", "file"], "no ledger at .*/file/ledger.db"),
        (["rl.audit", "."], "config.json is not a run's config .* use another"),
        ([*SERVE, "--orchestrator", URL], f"--orchestrator {URL} needs --key, .* add --key FILE"),
        (
            [*SERVE, "--orchestrator", "host:1", "--key", "k"],
            "--orchestrator 'host:1' is not a URL; write http://HOST:",
        ),
        ([*SERVE, "--url", "host:1"], "--url 'host:1' is not a URL; write http://HOST:PORT"),
        ([*SERVE, "--key", "k"], "--key k signs samples for one run; add --run with the run.s public key"),
        ([*SERVE, "--run", "a", "--key", "."], r"worker key . cannot be read: Is a directory; name a file"),
        (
            [*SERVE, "--run", "a", "--key", "file"],
            "worker key file is not an unencrypted PEM private key .* name another file",
        ),
        (
            ["rl.validator", "serve", "--workdir", "s3://b/run"],
            "s3://b/run is in a bucket, .* copy the run's config.json",
        ),
        ([*RELAY, "--orchestrator", URL], f"--orchestrator {URL} needs --key, .* add --key FILE"),
        ([*SERVE, "--control", "a:xx"], r"--control a:xx has the port 'xx', .* write HOST:PORT, or ./a:xx for a path"),
        ([*RELAY, "--orchestrator", URL, "--key", "file"], "file is not an unencrypted PEM private key"),
        (["rl.worker", "--orchestrator", "host:1"], "--orchestrator 'host:1' is not a URL; write http://HOST:PORT"),
        (
            ["rl.worker", "--orchestrator", URL, "--server", URL, "nonsense"],
            "--server 'nonsense' is not a URL; write http://HOST:PORT",
        ),
        (
            ["rl.worker", "--orchestrator", URL, "--run", "zz"],
            "--run 'zz' is not a public key; write the 64 hex digits",
        ),
        (
            ["rl.worker", "--orchestrator", URL, "--key", "."],
            "worker key . cannot be read: Is a directory; name a file",
        ),
        (
            ["rl.worker", "--orchestrator", URL, "--server", "h:1"],
            "--server 'h:1' is not a URL; write http://HOST:PORT",
        ),
        (["rl.worker", "--orchestrator", URL, "--concurrency", "0"], "--concurrency = 0"),
        (["rl.worker", "--orchestrator", URL, "--give_up_s", "-1"], "--give_up_s = -1 must be at least 0; raise it"),
        (
            ["rl.worker", "--orchestrator", URL, "--give_up_s", "0"],
            f"no reply from the orchestrator at {URL}.* for 0 s: .*; check the URL, and that the run is on",
        ),
    ],
)
def test_a_mistake_ends_a_node_with_one_line(tmp_path, monkeypatch, capfd, command, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no key")
    (tmp_path / "ledger.db").write_text("no ledger" * 100)
    assert commands.run(*command) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(words, line), line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["rl.swarm.orchestrator"], "set topology.mode = 'remote'"),
        ([*APART, "--metrics=x"], "the address of metrics is 'x'; give PORT, or HOST:PORT"),
        ([*APART, "--control=nonsense:70000"], "write HOST:PORT, or ./nonsense:70000 for a path"),
        (["rl.export", "--output=x", "--config.mesh.fsdp=7"], "as in --config.mesh.fsdp=-1 --config.mesh.tensor=1"),
        (["rl.export", "--output=s3://b/x"], "export to a folder, and copy that to the bucket"),
        ([*APART, "--workdir=file:///nowhere/run"], "give the orchestrator a local folder"),
        (["rl.swarm", "--servers=0"], "--servers=0 is not in 1..32; change it"),
        (["rl.swarm", "--config.topology.port=1"], "--config.topology.port=1 is set by the swarm; leave it out"),
    ],
)
def test_a_mistake_ends_a_command_of_a_config_with_one_line(tmp_path, command, words):
    module, *options = command
    found = commands.forked(
        module,
        "--config=configs/quickstart.py",
        f"--workdir={tmp_path}",
        *options,
        INTELLAX_BUCKET_CACHE=str(tmp_path / "cache"),
    )
    assert found.returncode == 1 and found.stderr.startswith("error: ") and found.stderr.strip().endswith(words)


def test_a_command_that_is_run_as_a_file_names_the_module():
    found = subprocess.run([sys.executable, "rl/train.py"], cwd=commands.ROOT, capture_output=True, text=True)
    assert found.returncode == 1 and re.fullmatch("error: .*; run python -m rl.train .*\n", found.stderr)


def test_a_command_takes_its_working_directory_as_the_first_argument(tmp_path):
    """Here one without a config.json, as a mistyped one, so that a config is missing."""
    found = commands.forked("rl.export", tmp_path, "--output=x")
    line = f"error: workdir {tmp_path} has no config.json: it is not a run; correct it, or give --config\n"
    assert found.returncode == 2 and found.stderr == line
    found = commands.forked("rl.export", tmp_path, "--help")
    assert found.returncode == 0 and not found.stderr and "fields of the config" in found.stdout
