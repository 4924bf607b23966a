"""Workers without inference servers, for bench/orchestrator.py: they wait for work, or hand in groups as fast as they are asked to.

Groups are of real form: prompt, rewards, and proofs are those of the environment's task, and each rollout is signed. Nothing is
sampled: at temperature 0 any log-probability may be claimed. Samples alternate between the answer and the decoy.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.proofs import toploc
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl import envs
from rl.experiment import experiment as experiment_lib
from rl.protocol import lease
from rl.swarm.orchestrator import routes

POLL_S, MAX_POLL_S = 50.0, 490.0  # as rl/worker.py
REPORT_S = 2.0
NUM_NETWORKS = 4  # of the workers that hand in groups
Make = Callable[[lease.Lease, rollout_lib.WorkerKey], list[rollout_lib.Rollout]]


def run(url: str, raw: Sequence[bytes], config, count: int, size: int, groups_per_s: float, queue) -> None:
    """Runs the workers with these private keys until the process is ended.

    The first `count` hand in `groups_per_s` together (0: any number), `size` in a file as rl/worker.py joins them; the others are idle.
    `queue` gets {} when all are connected, then a report each `REPORT_S`: numbers of groups and polls, and seconds of leases (`size` 1).
    """
    asyncio.run(_run(url, raw, config, count, size, groups_per_s, queue))


async def _run(url: str, raw: Sequence[bytes], config, count: int, size: int, groups_per_s: float, queue) -> None:
    keys = [rollout_lib.WorkerKey(ed25519.Ed25519PrivateKey.from_private_bytes(one)) for one in raw]
    async with contextlib.AsyncExitStack() as stack:
        networks = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=60, transport=_from(f"127.0.{n}.2"))
            )
            for n in range(NUM_NETWORKS)
        ]
        body = (await networks[0].get("/run", params={"nonce": "00"})).json()
        swarm = _Swarm(networks[0].base_url, lease.Session(body["id"], body["session"]), num_idle=len(keys) - count)
        tasks = [asyncio.create_task(swarm.wait(key, n)) for n, key in enumerate(keys[count:])]
        for _ in tasks:
            await asyncio.wait_for(swarm.connected.acquire(), 120)
        if count:
            make = _maker(config)
            pause_s = count * size / groups_per_s if groups_per_s else 0.0
            tasks += [
                asyncio.create_task(swarm.work(networks[n % NUM_NETWORKS], key, make, size, pause_s))
                for n, key in enumerate(keys[:count])
            ]
        queue.put({})
        while True:
            await asyncio.sleep(REPORT_S)
            queue.put(swarm.take_report())
            if failed := [task for task in tasks if task.done()]:
                failed[0].result()


def _from(address: str) -> httpx.AsyncHTTPTransport:
    return httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=None))


class _Swarm:
    def __init__(self, url: httpx.URL, session: lease.Session, num_idle: int):
        self._session, self._num_idle, self._address = session, num_idle, (url.host, url.port)
        self._entry, self.connected = asyncio.Semaphore(20), asyncio.Semaphore(0)
        self.take_report()

    def take_report(self) -> dict:
        """Returns the numbers since the last call."""
        report = getattr(self, "_report", {})
        self._report: dict = {"groups": 0, "polls": 0, "leases": []}
        return report

    async def work(
        self, http: httpx.AsyncClient, key: rollout_lib.WorkerKey, make: Make, size: int, pause_s: float
    ) -> None:
        """Leases, makes, and hands in `size` groups each `pause_s`, for ever."""
        next_s = time.monotonic() + random.random() * pause_s
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s += pause_s
            fields = {"capacity": size, "returned": [], "work": "", "wait_s": 0.0 if size == 1 else 1.0}
            begun_s = time.perf_counter()
            reply = await http.post("/lease", json=lease.request(key, self._session, **fields))
            self._report["leases"] += [time.perf_counter() - begun_s] * (size == 1)
            if not (groups := reply.raise_for_status().json()["groups"]):
                continue
            rollouts = [one for group in groups for one in make(lease.Lease.from_json(group), key)]
            data = parquet.table_bytes([parquet.to_table(rollouts)])
            header = json.dumps(lease.request(key, self._session, digest=hashlib.sha256(data).hexdigest()))
            reply = await http.post("/submit", content=data, headers={lease.HEADER: header})
            verdicts = reply.raise_for_status().json()["verdicts"]
            if not all(one == "taken" for one in verdicts.values()):
                raise ValueError(f"groups were not taken: {verdicts}")
            self._report["groups"] += len(groups)

    async def wait(self, key: rollout_lib.WorkerKey, number: int) -> None:
        """Asks for work on a connection of its own, for ever. There is none."""
        own = f"127.0.{1 + number % 200}.1", 0  # a network may have half of the connections that are left
        await self._entry.acquire()  # until its first request is sent: a connection without one is closed
        reader, writer = await asyncio.open_connection(*self._address, local_addr=own)
        # As if they had come one after the other.
        is_in, wait_s = False, random.uniform(0.0, max(POLL_S, self._num_idle / routes.MAX_POLLS_PER_S))
        while True:
            fields = {"capacity": 1, "returned": [], "work": "", "wait_s": wait_s}
            data = json.dumps(lease.request(key, self._session, **fields)).encode()
            head = f"POST /lease HTTP/1.1\r\nhost: {self._address[0]}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            if not is_in:
                is_in = True
                self._entry.release()
                self.connected.release()
            reply = await reader.readuntil(b"\r\n\r\n")
            if not reply.startswith(b"HTTP/1.1 200"):
                raise ValueError(f"a lease was refused: {reply!r}")
            size = next(line for line in reply.lower().split(b"\r\n") if line.startswith(b"content-length"))
            reply = json.loads(await reader.readexactly(int(size.partition(b":")[2])))
            self._report["polls"] += 1
            wait_s = min(max(POLL_S, reply["wait_s"]), MAX_POLL_S) * random.uniform(0.8, 1.2)


def _maker(config) -> Make:
    """Returns the function (group, key) -> its signed rollouts, for the environment of a run with this config."""
    exp = experiment_lib.resolve(config)
    env = envs.load(config.env.name, seed=config.seed, **config.env.options.to_dict())
    stop = exp.tokenizer.stop_ids[0]
    proofs: dict[int, bytes] = {}  # by number of sampled tokens

    def make(group: lease.Lease, key: rollout_lib.WorkerKey) -> list[rollout_lib.Rollout]:
        task, worker = env.make_task(group.index, group.split), key.worker
        prompt = exp.tokenizer.render(task.messages, add_generation_prompt=True).token_ids
        kinds = []
        for text in (task.answer, task.decoy):
            sampled = [*exp.tokenizer.encode(text), stop]
            mask = np.arange(len(prompt) + len(sampled)) >= len(prompt)
            scores = env.score(task, exp.tokenizer.scored_text(prompt, sampled))
            if len(sampled) not in proofs:
                proofs[len(sampled)] = _proof(len(sampled) * exp.model.model_dim)
            fields = dict(
                tokens=np.array([*prompt, *sampled], np.int32),
                sampled_mask=mask,
                logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
                versions=np.full(len(mask), max(group.version, group.min_version), np.int32),
                proofs=proofs[len(sampled)],
                reward=scores["reward"],
                rewards=scores,
            )
            kinds.append(fields)
        out = []
        for sample in range(group.num_samples):
            rollout = rollout_lib.Rollout(
                temperature=group.temperature,
                seed=(group.seed + sample) % 2**32,
                task=rollout_lib.TaskRef(config.env.name, group.index, group.group, config.seed),
                sample=sample,
                step=group.step,
                finish_reason="stop",
                worker=worker,
                signature=b"",
                epoch=max(group.epoch, 0),
                **kinds[sample % 2],
            )
            out.append(rollout)
        # Not `rollout_lib.sign_all`, which checks each field: the orchestrator should be the busy one.
        root, paths = rollout_lib.hash_tree([rollout_lib.digest(rollout) for rollout in out])
        signature = key.private.sign(root)
        for rollout, path in zip(out, paths, strict=True):
            object.__setattr__(rollout, "signature", signature + path)
        return out

    return make


def _proof(num_values: int) -> bytes:
    """Returns a proof of random hidden states, for at most 32 tokens."""
    rng = np.random.default_rng(0)
    places = rng.permutation(num_values)[:128]
    return toploc.encode(
        [(places, (rng.normal(size=len(places)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))]
    )[0]
