"""Times the sampler next to its peers, in one run.

    python -m bench.inference --transformers=PYTHON --tunix=PYTHON      interpreters that have them; without, only ours
    python -m bench.inference --parts in_process proofs                 some of it: each part takes under two minutes

The model is the 4 M one of every comparison here (4 layers, 256 dims, 4 heads, 2 key heads, 64 head dims, ffn 1024,
vocabulary 512, tied, float32), the work 64 requests of 32 prompt tokens and 64 new ones (`equal`), or 8 to 256 new ones
(`skewed`), sampled at temperature 1. `--model 100m` is 12 layers of 768 dims, 8 requests of 64 + 64.

1. `in_process`: the scheduler, called from this process.
2. `proofs`: the same with a TOPLOC proof per 32 tokens. The rounds of both alternate.
3. `http`: the server in a process of its own, requests over loopback, one request per prompt.
4. `transformers`, `tunix`: their samplers on a model of the same shape. A batch of theirs runs until its longest row ends;
   only the requested tokens are counted.
5. `first_token`: at half of the load that `http` measured, requests arriving at random: time from sending to the first
   token.

Every part is warmed up first, the rounds alternate, and the median is printed with the spread, the CPU seconds, and for ours
the steps used / useful and the fractions of the machine's matmul and memory limits (measured in the same run).
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import httpx
import jax
import jax.numpy as jnp
import numpy as np

from inference.engine import engine as engine_lib
from inference.engine import weights
from inference.scheduler import scheduler as scheduler_lib
from models import config as config_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from sharding.system import cli
from sharding.weights import broadcast
from tests.support import shapes

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = pathlib.Path(__file__).with_name("inference_peer.py")
PARTS = ("in_process", "proofs", "http", "transformers", "tunix", "first_token")


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts, and the number of new tokens of each."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_new(self) -> int:
        """Number of new tokens of all requests."""
        return sum(self.lengths)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.inference", description=__doc__)
    parser.add_argument("--model", choices=shapes.SHAPES, default="4m")
    parser.add_argument("--lengths", choices=("equal", "skewed"), default="equal")
    parser.add_argument("--requests", type=int, help="number of requests (default: 64, or 8 of the 100 M model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num_slots", type=int, help="number of slots (default: 64, or 16 for skewed lengths)")
    parser.add_argument("--steps_per_call", type=int, default=16)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--transformers", metavar="PYTHON", help="an interpreter with torch and transformers")
    parser.add_argument("--tunix", metavar="PYTHON", help="an interpreter with tunix")
    parser.add_argument("--json", help="file that also gets the results")
    args = parser.parse_args(argv)
    work = make_work(args.model, args.lengths, args.requests)
    model = shapes.model(args.model)
    longest = max(len(p) + n for p, n in zip(work.prompts, work.lengths, strict=True))
    # 64 slots of skewed lengths are half empty on average, and each step reads the keys of all of them.
    slots = min(args.num_slots or (64 if args.lengths == "equal" else 16), len(work.prompts))
    sizes = engine_lib.EngineConfig(slots, longest, min(32, slots), args.steps_per_call)
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model)

    parts, pythons = set(args.parts), {"transformers": args.transformers, "tunix": args.tunix}
    ways = {}
    if parts & {"in_process", "proofs"}:
        ways["in_process"] = InProcess(model, sizes, params)
    if "proofs" in parts:
        ways["proofs"] = InProcess(model, sizes, params, proofs=True)
    if parts & {"http", "first_token"}:
        ways["http"] = OverHttp(model, sizes, params)
    ways |= {name: Peer(python, name, args.model) for name, python in pythons.items() if python and name in parts}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for way in ways.values():
            way.run(work)  # compiles
        for _ in range(args.rounds):
            for name, way in ways.items():
                wall_s, cpu_s = way.run(work)
                seconds[name].append(wall_s)
                cpu[name].append(cpu_s)
        results = {name: report(name, work, seconds[name], cpu[name]) for name in ways}
        if "in_process" in ways:
            for name in ways:
                if name != "in_process":
                    results[f"in_process / {name}"] = compare(name, seconds["in_process"], seconds[name])
            results["steps used / useful"] = ways["in_process"].step_ratio(work)
            print(f"steps used / useful: {results['steps used / useful']:.3f}")
            wall_s = statistics.median(seconds["in_process"])
            results["matmul"] = matmul_fraction(model, work, wall_s)
            results["memory"] = memory_fraction(model, work, sizes.num_slots, wall_s)
        if "first_token" in parts:
            rate = len(work.prompts) / statistics.median(seconds["http"]) / 2
            results["first_token"] = ways["http"].first_token(work, rate)
    finally:
        for way in ways.values():
            way.close()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def make_work(model: str, lengths: str, num_requests: int | None) -> Work:
    """Returns the prompts and lengths of a model's requests."""
    rng = np.random.default_rng(0)
    num = num_requests or (64 if model == "4m" else 8)
    prompt, new = (32, 64) if model == "4m" else (64, 64)
    prompts = rng.integers(0, 256, (num, prompt)).tolist()
    return Work(prompts, [new] * num if lengths == "equal" else np.geomspace(8, 256, num).astype(int).tolist())


def report(name: str, work: Work, seconds: list[float], cpu: list[float]) -> dict:
    """Prints and returns the results of one part."""
    rates = sorted(work.num_new / s for s in seconds)
    middle = statistics.median(rates)
    print(
        f"{name:14} {middle:9.0f} tok/s ({rates[0]:.0f} to {rates[-1]:.0f}), {statistics.median(cpu):.2f} CPU s a round",
        flush=True,
    )
    return {"tok_per_s": middle, "lowest": rates[0], "highest": rates[-1], "cpu_s": statistics.median(cpu)}


def compare(name: str, ours: list[float], theirs: list[float]) -> float:
    """Returns the speed of `in_process` over that of another part: the median over rounds, each of which ran both."""
    ratio = statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
    print(f"in_process / {name}: {ratio:.2f}" + (f" (proofs on / off: {1 / ratio:.3f})" if name == "proofs" else ""))
    return ratio


class InProcess:
    """The scheduler, called from this process."""

    def __init__(self, model, sizes, params, *, proofs: bool = False):
        mesh = mesh_lib.create({}, jax.devices()[:1])
        params = weights.Store(model, mesh).load(jax.tree.map(np.asarray, params))  # a copy: `load` deletes
        self._engine = engine_lib.Engine(model, sizes, tokenizer_lib.byte_chatml())
        self._scheduler = scheduler_lib.Scheduler(self._engine, params, 0, prefix_cache_bytes=0)
        self._proofs = proofs

    def run(self, work: Work) -> tuple[float, float]:
        """Runs all requests once; returns (wall seconds, CPU seconds)."""
        begun, cpu = time.perf_counter(), _cpu_s()
        futures = [
            self._scheduler.submit(scheduler_lib.GenerateRequest(tuple(p), max_tokens=n, seed=i, proofs=self._proofs))
            for i, (p, n) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        results = [future.result() for future in futures]
        wall_s, cpu_s = time.perf_counter() - begun, _cpu_s() - cpu
        assert [len(r[0].tokens) for r in results] == work.lengths
        assert all(bool(r[0].proofs) == self._proofs for r in results)
        return wall_s, cpu_s

    def step_ratio(self, work: Work) -> float:
        """Returns the decode steps of one round over those of a perfect packing of its lengths, in order, into the slots."""
        before = self._scheduler.stats["decode_steps"]
        self.run(work)
        ends = [0] * self._engine.config.num_slots
        for length in work.lengths:
            slot = ends.index(min(ends))
            ends[slot] += length
        return (self._scheduler.stats["decode_steps"] - before) / max(ends)

    def close(self) -> None:
        """Ends the process or thread of this part."""
        self._scheduler.close()


class OverHttp:
    """The server in a process of its own, over loopback."""

    def __init__(self, model, sizes, params):
        self._folder = tempfile.TemporaryDirectory()
        root = pathlib.Path(self._folder.name)
        metadata = {"model": dataclasses.asdict(model), "tokenizer": "byte_chatml"}
        broadcast.publish(params, 0, str(root / "weights"), metadata=metadata)
        command = [sys.executable, "-m", "inference.serve", "--weights", str(root / "weights"), "--port", "0"]
        command += ["--address_file", str(root / "address"), "--prefix_cache_mib", "0", "--warm_up"]
        command += ["--exit_with_parent"]
        for name in ("num_slots", "max_model_len", "prefill_batch", "steps_per_call"):
            command += [f"--{name}", str(getattr(sizes, name))]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        while not (root / "address").exists():
            if self._process.poll() is not None:
                raise ValueError("the server did not start; see its output above")
            time.sleep(0.05)
        self._url = (root / "address").read_text()

    def run(self, work: Work) -> tuple[float, float]:
        """Runs all requests once; returns (wall seconds, CPU seconds)."""
        return asyncio.run(self._run(work))

    async def _run(self, work: Work) -> tuple[float, float]:
        host, port = self._url.removeprefix("http://").split(":")

        async def one(i, prompt, length):
            """Over a plain socket: a client library takes as much of two cores as the server's own part does."""
            sampling = {"max_tokens": length, "ignore_eos": True, "seed": i}
            body = json.dumps({"token_ids": prompt, "sampling_params": sampling})
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /inference/v1/generate HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
            head += "content-type: application/json\r\nconnection: close\r\n"
            writer.write(f"{head}\r\n{body}".encode())
            reply = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            writer.close()
            assert len(reply["choices"][0]["token_ids"]) == length, reply

        begun, cpu = time.perf_counter(), _cpu_s() + _cpu_of(self._process.pid)
        tasks = enumerate(zip(work.prompts, work.lengths, strict=True))
        await asyncio.gather(*(one(i, p, n) for i, (p, n) in tasks))
        return time.perf_counter() - begun, _cpu_s() + _cpu_of(self._process.pid) - cpu

    def first_token(self, work: Work, requests_per_s: float) -> dict:
        """Returns the seconds to the first token, with requests arriving at random at a given rate."""
        waits = sorted(asyncio.run(self._first_tokens(work, requests_per_s)))
        middle, late = waits[len(waits) // 2], waits[int(len(waits) * 0.95)]
        print(f"first token at {requests_per_s:.1f} requests/s: median {middle * 1e3:.0f} ms, 95 % {late * 1e3:.0f} ms")
        return {"median_s": middle, "p95_s": late, "requests_per_s": requests_per_s}

    async def _first_tokens(self, work: Work, requests_per_s: float) -> list[float]:
        rng = np.random.default_rng(1)
        async with httpx.AsyncClient(base_url=self._url, timeout=600) as http:

            async def one(prompt, length):
                body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True}
                begun, first = time.perf_counter(), None
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        first = first or (time.perf_counter() - begun if line.startswith("data: {") else None)
                return first

            tasks = []
            for prompt, length in zip(work.prompts, work.lengths, strict=True):
                tasks.append(asyncio.create_task(one(prompt, length)))
                await asyncio.sleep(rng.exponential(1 / requests_per_s))
            return await asyncio.gather(*tasks)

    def close(self) -> None:
        """Ends the process or thread of this part."""
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


class Peer:
    """A peer's sampler in another interpreter (bench/inference_peer.py): a line of JSON in and one out, per round."""

    def __init__(self, python: str, name: str, model: str):
        command = [python, str(PEER), name, json.dumps(shapes.SHAPES[model])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, work: Work) -> tuple[float, float]:
        """Runs all requests once; returns (wall seconds, CPU seconds)."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"prompts": work.prompts, "lengths": work.lengths}) + "\n")
            self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise ValueError("the peer process ended; see its output above")
        return tuple(json.loads(line))

    def close(self) -> None:
        """Ends the process or thread of this part."""
        self._process.kill()
        self._process.communicate()


def matmul_fraction(model: config_lib.ModelConfig, work: Work, wall_s: float) -> dict:
    """Returns our multiply-adds per second over those of a plain matmul of as many rows, the limit of the machine."""
    B, D, F = min(64, len(work.prompts)), model.model_dim, model.ffn_dim
    x, w = jnp.ones((B, D)), jnp.ones((D, F))
    chain = jax.jit(lambda x, w: jax.lax.fori_loop(0, 200, lambda _, y: (y @ w) @ w.T * 1e-6, x))
    chain(x, w).block_until_ready()
    limit = max(200 * 2 * 2 * B * D * F / _seconds(chain, x, w) for _ in range(5))
    held, head = transformer.num_params(model), model.vocab_size * model.model_dim
    ours = 2 * (held * work.num_new + (held - head) * sum(map(len, work.prompts))) / wall_s
    print(
        f"{ours / 1e9:.0f} GFLOP/s, {ours / limit:.0%} of the {limit / 1e9:.0f} that a matmul of {B} rows reaches here"
    )
    return {"flop_per_s": ours, "limit_flop_per_s": limit}


def memory_fraction(model: config_lib.ModelConfig, work: Work, num_slots: int, wall_s: float) -> dict:
    """Returns the bytes that decoding must read over those that a plain sum reads in that time.

    Decoding reads the weights once per step and the keys once per token.
    """
    big = jnp.ones((2**26,), jnp.float32)
    total = jax.jit(jnp.sum)
    total(big).block_until_ready()
    limit = max(big.nbytes / _seconds(total, big) for _ in range(5))
    steps = max(max(work.lengths), work.num_new / num_slots)
    key_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    read = sum(n * len(p) + n * n / 2 for p, n in zip(work.prompts, work.lengths, strict=True)) * key_bytes
    ours = (4 * transformer.num_params(model) * steps + read) / wall_s
    print(f"{ours / 1e9:.1f} GB/s, {ours / limit:.0%} of the {limit / 1e9:.1f} that a sum over 256 MiB reads here")
    return {"bytes_per_s": ours, "limit_bytes_per_s": limit}


def _seconds(function, *args) -> float:
    begun = time.perf_counter()
    function(*args).block_until_ready()
    return time.perf_counter() - begun


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu_of(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # clock ticks


if __name__ == "__main__":
    sys.exit(main())
