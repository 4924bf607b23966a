"""A run whose working directory is on an S3 server: killed 20 times, each time continued by a machine without files."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from rl import audit
from sharding import bucket
from sharding.bucket import mirror, storage
from tests.support import proxy, s3_server, tiny_run

SEED, NUM_KILLS, CUT_S = 12, 20, 30.0
# A machine that continues a run waits for the lease of the one before; here 3 s, so that 20 kills take minutes.
LAUNCH = """
import runpy
from sharding.bucket import mirror
mirror.LEASE_S, mirror.BEAT_S, mirror.EVERY_S = 3.0, 0.5, 1.0
runpy.run_module("rl.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_run_on_an_s3_server_survives_kills_and_a_lost_connection(tmp_path, monkeypatch):
    fields, rng = {"rl__num_steps": 80}, random.Random(SEED)
    result = tiny_run.run(tmp_path / "straight", **fields)
    assert result.returncode == 0, result.stderr
    with s3_server.running() as server, proxy.Proxy(server) as link, open(tmp_path / "log", "w") as log:
        s3_server.use(monkeypatch, link.url)
        url = f"s3://{s3_server.BUCKET}/runs/tiny"
        command = [sys.executable, "-c", LAUNCH, *tiny_run.command(url, **fields)[3:]]

        def start(number):
            cache = tmp_path / f"machine{number}"
            monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(cache))
            env = os.environ | s3_server.environment(link.url) | {"INTELLAX_BUCKET_CACHE": str(cache)}
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            return subprocess.Popen(command, cwd=tiny_run.ROOT, env=env, **pipes)

        def steps():
            folder = bucket.local_folder(url)
            return len(tiny_run.lines(folder)) if (folder / "metrics.jsonl").exists() else 0

        def saved():
            """The newest checkpoint in the bucket."""
            place = storage.Storage(url)
            head = place.read(mirror.HEAD)[0]
            try:
                files = mirror._read_files(place, mirror.Head.parse(head, url)) if head else {}
            except FileNotFoundError:  # a newer state has replaced this one
                return saved()
            return max((int(step) for step in re.findall(r"checkpoints/(\d+)/seal.json", " ".join(files))), default=0)

        def output():
            return (tmp_path / "log").read_text()

        def wait(process, value, least):
            proxy.wait_until(lambda: value() >= least or process.poll() is not None, 300)

        def lives():
            """The processes that have taken a step."""
            return output().count("first step after")

        for number in range(NUM_KILLS):
            num_lives, wanted, process = lives(), rng.choice((None, 0, 1, 3, "saved")), start(number)
            if wanted is None:  # while it starts
                time.sleep(rng.uniform(0, 20))
            elif wanted == "saved":  # soon after a new checkpoint has arrived, however slow this machine is
                wait(process, saved, saved() + 1)
                time.sleep(rng.uniform(0, 1.5))
            else:
                wait(process, lives, num_lives + 1)
                wait(process, steps, steps() + wanted)
                time.sleep(rng.uniform(0, 1.5))
            assert process.poll() is None, output()[-3000:]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(tmp_path / f"machine{number}", ignore_errors=True)
        num_lives, process = lives(), start("last")
        wait(process, lives, num_lives + 1)
        link.heal()  # breaks the connections
        link.fault = lambda rng: "refuse"
        threading.Timer(CUT_S, link.heal).start()
        assert process.wait(600) == 0, output()[-3000:]
        resumed = [int(step) for step in re.findall(r"resuming after step (\d+)", output())]
        print("resumed after steps", resumed)
        assert (
            resumed == sorted(resumed) and len({*resumed}) > 2
        )  # from several checkpoints, and never from an older one
        assert f"bucket {url} has not answered for" in output() and "answers again after" in output()
        monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / "reader"))
        folder = bucket.fetched(url)
        assert tiny_run.curve(folder) == tiny_run.curve(tmp_path / "straight")
        assert audit.main([url]) == 0
