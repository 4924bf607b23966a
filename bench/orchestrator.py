"""Measures the orchestrator's HTTP side: idle workers that wait for work, and groups handed in by busy ones.

    python -m bench.orchestrator --idle 10000 --seconds 120     CPU of the orchestrator's process, memory, lease latency
    python -m bench.orchestrator --idle 0 --busy 8 --seconds 60  groups per second that it takes

Clients run in a second process, each worker with its own key and connection. Groups are pre-made and checked as to signatures and
leases; the checks of content and the replay are left out (bench/cheats.py has them). A tenth of the time is warm-up.
"""

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import pathlib
import random
import resource
import sys
import tempfile
import time

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from configs import quickstart
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.orchestrator import orchestrator as orchestrator_lib
from rl.orchestrator import routes, verdict_collector
from rl.protocol import lease, task_schedule, timeline
from rl.verification import checks

POLL_S = 50.0  # as rl/worker.py
SAMPLES = 8


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and prints one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.orchestrator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--idle", type=int, default=1000, help="workers that wait for work")
    parser.add_argument("--busy", type=int, default=0, help="workers that hand in groups as fast as they can")
    parser.add_argument("--probes", type=float, default=5.0, help="lease requests per second of one worker, timed")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args(argv)
    _open_files()
    workers = [rollout_lib.WorkerKey.generate() for _ in range(args.idle + args.busy + 1)]
    with tempfile.TemporaryDirectory() as folder:
        run = _orchestrator(pathlib.Path(folder), [key.worker for key in workers], num_steps=10**6 if args.busy else 0)
        queue = multiprocessing.get_context("spawn").Queue()
        raw = [key.private.private_bytes_raw() for key in workers]
        client = multiprocessing.get_context("spawn").Process(target=_clients, args=(run.serve(), raw, args, queue))
        client.start()
        queue.get()  # all are connected
        time.sleep(args.seconds / 10)
        cpu_s, begun_s = time.process_time(), time.monotonic()
        taken = _take(run, args) if args.busy else 0
        time.sleep(max(0.0, args.seconds - (time.monotonic() - begun_s)))
        share = (time.process_time() - cpu_s) / (time.monotonic() - begun_s)
        found = queue.get()
        client.join()
        run.close()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    found |= {"idle": args.idle, "busy": args.busy, "cores": round(share, 3), "peak_mib": round(peak_mib)}
    print(json.dumps(found | {"groups_per_s": round(taken / args.seconds, 1)}))
    return 0


def _orchestrator(folder: pathlib.Path, invited: list[str], num_steps: int) -> orchestrator_lib.Orchestrator:
    config = quickstart.get_config()
    config.rl.update(prompts_per_step=256, samples_per_prompt=SAMPLES, num_steps=max(num_steps, 1), max_lag=8)
    config.trust.update(min_rate=1e-9, invited_rate=1e-9)
    config.topology.lease_s = 3600.0
    exp, key = experiment.resolve(config), rollout_lib.WorkerKey.generate()
    verdicts = verdict_collector.VerdictCollector(key, lambda groups: [checks.OK] * len(groups))
    run = orchestrator_lib.Orchestrator(
        exp.config, folder, credit=exp.credit, key=key, verdicts=verdicts, secret=b"secret", invited=invited
    )
    if num_steps:
        run.publish(timeline.Policy(0, 0))
    return run


def _take(run: orchestrator_lib.Orchestrator, args: argparse.Namespace) -> int:
    """Takes batches, as a learner does, for `args.seconds`; returns the number of groups."""
    begun_s, step = time.monotonic(), 0
    while time.monotonic() < begun_s + args.seconds:
        step += 1
        run.next_batch(step)
        run.publish(timeline.Policy(0, step))
    return step * 256


def _open_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _clients(url: str, raw: list[bytes], args: argparse.Namespace, queue) -> None:
    _open_files()
    queue.put(asyncio.run(_run_clients(url, raw, args, queue)))


async def _run_clients(url: str, raw: list[bytes], args: argparse.Namespace, queue) -> dict:
    keys = [rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(one)) for one in raw]
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = (await http.get("/run", params={"nonce": "00"})).json()
        session = lease.Session(body["id"], body["session"])
        host, port = url.removeprefix("http://").split(":")
        entry, connected, latencies, num_polls = asyncio.Semaphore(20), asyncio.Semaphore(0), [], 0

        async def idle(key, number: int) -> None:
            nonlocal num_polls
            own = f"127.0.{1 + number % 200}.1", 0  # a network may have half of the connections that are left
            await entry.acquire()  # until its first request is sent: a connection without one is closed
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=own)
            is_in, wait_s = (
                False,
                random.uniform(0.0, max(POLL_S, args.idle / routes.MAX_POLLS_PER_S)),
            )  # as if they had come one after the other
            while True:
                fields = {"capacity": 1, "returned": [], "work": "", "wait_s": wait_s}
                data = json.dumps(lease.request(key, session, **fields)).encode()
                head = f"POST /lease HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                if not is_in:
                    is_in = True
                    entry.release()
                    connected.release()
                reply = await reader.readuntil(b"\r\n\r\n")
                assert reply.startswith(b"HTTP/1.1 200"), reply
                size = next(line for line in reply.lower().split(b"\r\n") if line.startswith(b"content-length"))
                reply = json.loads(await reader.readexactly(int(size.partition(b":")[2])))
                num_polls, wait_s = num_polls + 1, max(POLL_S, reply["wait_s"]) * random.uniform(0.8, 1.2)

        async def probe(key) -> None:
            while True:
                await asyncio.sleep(1 / args.probes)
                begun_s = time.perf_counter()
                fields = {"capacity": 0, "returned": [], "work": ""}
                (await http.post("/lease", json=lease.request(key, session, **fields))).raise_for_status()
                latencies.append(time.perf_counter() - begun_s)

        async def busy(key) -> None:
            while True:
                fields = {"capacity": 8, "returned": [], "work": "", "wait_s": 1.0}
                reply = (await http.post("/lease", json=lease.request(key, session, **fields))).json()
                groups = [task_schedule.Group(**group) for group in reply["groups"]]
                if not groups:
                    continue
                data = parquet.to_bytes([_rollout(group, sample, key) for group in groups for sample in range(SAMPLES)])
                header = json.dumps(lease.request(key, session, digest=hashlib.sha256(data).hexdigest()))
                reply = await http.post("/submit", content=data, headers={lease.HEADER: header})
                assert all(one == "taken" for one in reply.json()["verdicts"].values()), reply.text

        tasks = [asyncio.create_task(idle(key, number)) for number, key in enumerate(keys[: args.idle])]
        for _ in tasks:
            await asyncio.wait_for(connected.acquire(), 120)
        tasks += [asyncio.create_task(busy(key)) for key in keys[args.idle : -1]]
        tasks.append(asyncio.create_task(probe(keys[-1])))
        queue.put(None)
        stop_s = time.monotonic() + args.seconds * 1.1
        while time.monotonic() < stop_s:
            await asyncio.sleep(0.5)
            if failed := [task for task in tasks if task.done()]:
                failed[0].result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    slow_s = float(np.quantile(latencies, 0.99)) if latencies else 0.0
    return {"lease_p99_ms": round(1e3 * slow_s, 1), "polls_per_s": round(num_polls / args.seconds / 1.1, 1)}


def _rollout(group: task_schedule.Group, sample: int, key: rollout_lib.WorkerKey) -> rollout_lib.Rollout:
    mask = np.arange(52) >= 40
    rollout = rollout_lib.Rollout(
        tokens=np.arange(52, dtype=np.int32) % 250,
        sampled_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.full(52, max(group.version, group.min_version), np.int32),
        temperature=group.temperature,
        seed=(group.seed + sample) % 2**32,
        task=rollout_lib.TaskRef("reverse_text", group.index, group.group, 0),
        sample=sample,
        step=group.step,
        reward=float(sample % 2),
        rewards={"reward": float(sample % 2)},
        finish_reason="length",
        proofs=b"",
        worker="",
        signature=b"",
        epoch=max(group.epoch, 0),
    )
    return rollout_lib.sign(rollout, key)


if __name__ == "__main__":
    sys.exit(main())
