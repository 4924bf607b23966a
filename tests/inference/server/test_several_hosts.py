"""A server over two hosts: two processes of four fake devices, which serve one model over a mesh of all eight.

The oracle is one process with eight devices on the same mesh. Each sum of the mesh has two terms, so that its order changes no bit.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest

from models import hf
from models.text import tokenizer as tokenizer_lib
from sharding.weights import broadcast
from tests.rl import test_train_hosts
from tests.support import serving, tiny

pytestmark = pytest.mark.slow
MODEL = tiny.model(num_heads=8, num_kv_heads=4, num_experts=4, experts_per_token=2, expert_ffn_dim=32)
METADATA = {"model": dataclasses.asdict(MODEL), "tokenizer": "byte_chatml"}
SIZES = {
    "mesh": "fsdp=2,expert=2,tensor=2",
    "num_slots": 8,
    "prefill_batch": 2,
    "max_model_len": 512,
    "prefill_chunk": 32,
}
WAIT_S = 200
PROMPTS = {
    "several": (list(b"hello"), {"n": 3, "max_tokens": 40, "seed": 5}),
    "chunks": (list(range(70)), {"n": 2, "max_tokens": 20, "seed": 9, "temperature": 0.8}),
    "a longer one": (list(range(75)), {"max_tokens": 20, "seed": 8, "prompt_logprobs": 1}),
    "stop": (list(b"sieved"), {"max_tokens": 60, "seed": 1, "top_k": 20, "top_p": 0.9, "stop": ["e", "a"]}),
}
LONG = list(b"long"), {"max_tokens": 400, "seed": 3, "ignore_eos": True}


def publish(root, version):
    broadcast.publish(tiny.params(MODEL, version), version, str(root), broadcast.PublishOptions(), metadata=METADATA)


@contextlib.contextmanager
def started(folder, num_hosts, own=({}, {}), are_apart=False, num_devices=8):
    """The processes of a server, of version 0, by host. `are_apart`: each has weights of its own. Output: FOLDER/HOST.out and .err."""
    port, processes = test_train_hosts.free_ports(), []
    for host in range(num_hosts):
        place = folder / str(host if are_apart else 0)
        if not place.exists():
            publish(place / "weights", 0)
        options = SIZES | {"weights": "weights", "port": "0", "drain_s": 120}
        options |= {"address_file": folder / "address", "control": folder / "control"}
        if num_hosts > 1:
            options |= {"coordinator": f"127.0.0.1:{port}", "num_processes": num_hosts, "process_id": str(host)}
            options |= {"workdir": folder / "shared"}
        options |= own[host]
        command = [sys.executable, "-m", "inference.serve", *["--routed_experts"] * ("model" not in options)]
        command += [text for name, value in options.items() if value for text in (f"--{name}", str(value))]
        env = os.environ | {
            "JAX_NUM_CPU_DEVICES": str(num_devices // num_hosts),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(serving.ROOT),
        }
        with open(folder / f"{host}.out", "w") as out, open(folder / f"{host}.err", "w") as err:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            processes.append(subprocess.Popen(command, cwd=place, env=env, **pipes))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def address(folder, processes):
    deadline_s = time.monotonic() + WAIT_S
    while not (folder / "address").exists():
        assert time.monotonic() < deadline_s and all(process.poll() is None for process in processes), errors(folder)
        time.sleep(0.05)
    return (folder / "address").read_text().strip()


def errors(folder):
    return [path.read_text()[-3000:] for path in sorted(folder.glob("*.err"))]


def the_error(folder):
    """The one line that each host prints."""
    lines = [re.findall("^error: .*", text, re.MULTILINE) for text in errors(folder)]
    assert all(len(found) == 1 for found in lines if found), lines
    return [found[0] for found in lines if found]


def ask(url, tokens, sampling):
    body = {"model": "policy", "token_ids": tokens, "proofs": True, "sampling_params": sampling | {"logprobs": 1}}
    response = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def update(folder, version, status=200, **more):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(folder / "control")), timeout=WAIT_S) as client:
        response = client.post("http://control/update_weights", json={"version": version} | more)
    assert response.status_code == status, response.text
    return response.text


def begun(pool, url):
    """A future of the reply to LONG, of which some tokens have been sampled."""
    before, running = num_tokens(url), pool.submit(ask, url, *LONG)
    deadline_s = time.monotonic() + WAIT_S
    while num_tokens(url) < before + 40:
        assert time.monotonic() < deadline_s and not running.done()
        time.sleep(0.02)
    return running


def num_tokens(url):
    return metric(url, "vllm:generation_tokens_total")


def metric(url, name):
    text = httpx.get(f"{url}/metrics").text
    return sum(map(float, re.findall(rf"^{name}\S* (\S+)", text, re.MULTILINE)))


def test_two_hosts_serve_as_one(tmp_path):
    """Bit for bit: tokens, log-probabilities, proofs and experts, before and after an update. Then SIGTERM to the other host."""
    replies = []
    for num_hosts in (1, 2):
        folder = tmp_path / str(num_hosts)
        with started(folder, num_hosts) as processes, concurrent.futures.ThreadPoolExecutor(1) as pool:
            url = address(folder, processes)
            replies.append([ask(url, *one) for one in PROMPTS.values()] + [ask(url, *LONG)])
            publish(folder / "0" / "weights", 1)
            running = begun(pool, url)
            update(folder, 1)
            ((_, num_old), (_, num_new)) = (choice := running.result()[0])["policy_versions"]
            assert num_old >= 40 and num_new >= 1 and num_old + num_new == 400
            assert choice["token_ids"][:num_old] == replies[-1][-1][0]["token_ids"][:num_old]
            replies[-1] += [ask(url, *one) for one in PROMPTS.values()]
            last = begun(pool, url)
            processes[-1].send_signal(signal.SIGTERM)
            replies[-1].append(last.result())  # running requests get their time
            assert [process.wait(WAIT_S) for process in processes] == [0] * num_hosts, errors(folder)
            assert not the_error(folder)
    assert replies[0] == replies[1]


def test_pages_over_two_hosts(tmp_path):
    """Three sequences of seven pages share ten: some wait in the memory of both hosts, and come back."""
    replies, own = [], {"mesh": "tensor=2", "num_pages": 10}
    for num_hosts in (1, 2):
        folder = tmp_path / str(num_hosts)
        with started(folder, num_hosts, own=(own, own), num_devices=2) as processes:
            url = address(folder, processes)
            replies.append([ask(url, LONG[0], LONG[1] | {"n": 3}), *(ask(url, *one) for one in PROMPTS.values())])
            assert metric(url, "vllm:num_preemptions_total") > 0
    assert replies[0] == replies[1]


def test_a_hugging_face_folder_in_int8(tmp_path):
    """Each host quantizes its shards; the update is another folder."""
    model, replies = tiny.model(num_heads=8, num_kv_heads=4), []
    for version in (0, 1):
        hf.save(tmp_path / f"m{version}", model, tiny.params(model, version))
        tokenizer_lib.byte_chatml().save(tmp_path / f"m{version}")
    own = {"weights": None, "model": tmp_path / "m0", "weights_allow": tmp_path, "quantize": "int8"}
    for num_hosts in (1, 2):
        folder = tmp_path / str(num_hosts)
        with started(folder, num_hosts, own=(own, own)) as processes:
            url = address(folder, processes)
            replies.append([ask(url, *one) for one in PROMPTS.values()])
            update(folder, None, weight_dir=str(tmp_path / "m1"))
            replies[-1] += [ask(url, *one) for one in PROMPTS.values()]
            assert replies[-1][-1][0]["policy_versions"][0][0] == 1
    assert replies[0] == replies[1] and replies[0][:4] != replies[0][4:]


@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_one_host_ends_all(tmp_path, killed):
    folder = tmp_path / "server"
    with started(folder, 2) as processes, concurrent.futures.ThreadPoolExecutor(1) as pool:
        url = address(folder, processes)
        running = begun(pool, url)
        processes[killed].send_signal(signal.SIGKILL)
        begun_s = time.monotonic()
        assert processes[1 - killed].wait(WAIT_S) == 1 and time.monotonic() - begun_s < 60
        with pytest.raises((httpx.HTTPError, AssertionError)):
            running.result()
    (line,) = the_error(folder)
    assert re.match(rf"error: host {killed} of 2 \(.*\): its process ended without an error report", line)


def test_hosts_with_other_settings_are_refused(tmp_path):
    folder = tmp_path / "server"
    with started(folder, 2, own=({}, {"num_slots": 16})) as processes:
        assert [process.wait(WAIT_S) for process in processes] == [1, 1]
    first, second = the_error(folder)
    assert first == second and re.search(r"host 1 of 2 .*--num_slots is 16 here and 8 on host 0; give all", first)


def test_weights_that_one_host_cannot_fetch_are_not_swapped(tmp_path):
    """The other host has a damaged copy, then a version that is not the first host's, then the same one."""
    folder = tmp_path / "server"
    with started(folder, 2, are_apart=True) as processes:
        url = address(folder, processes)
        reply = ask(url, *PROMPTS["stop"])
        publish(folder / "0" / "weights", 1)
        copy = shutil.copytree(folder / "0" / "weights" / "v00000001", folder / "1" / "weights" / "v00000001")
        damaged = max((path for path in copy.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        data = damaged.read_bytes()
        damaged.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        assert "host 1 could not fetch these weights: " in update(folder, 1, 500)
        shutil.rmtree(copy)
        broadcast.publish(tiny.params(MODEL, 2), 1, str(copy.parent), broadcast.PublishOptions(), metadata=METADATA)
        assert "is another here than on host 0" in update(folder, 1, 500)
        assert ask(url, *PROMPTS["stop"]) == reply
        shutil.rmtree(copy)
        shutil.copytree(folder / "0" / "weights" / "v00000001", copy)
        update(folder, 1)
        assert ask(url, *PROMPTS["stop"])[0]["policy_versions"][0][0] == 1
