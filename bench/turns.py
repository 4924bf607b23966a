"""Times the prefill of long and of growing prompts: turns of agents, a burst of long prompts, and short requests.

    python -m bench.turns                              # this checkout
    python -m bench.turns --baseline DIR --pairs 3     # also another checkout, in turns; prints the ratios
    python -m bench.turns --only single                # the third part alone

The model is the 4 M one of bench/inference.py, on the scheduler in this process.

1. `agents`: 16 conversations of 5 turns at the same time. Their prompts begin with 100 to 2,584 tokens and have up to 3,000 in the last
   turn: each turn adds a reply of 64 tokens and 40 of a tool. `--group` conversations begin as the samples of one request, as in RL.
   Printed are turns per second and the fraction of prompt tokens whose keys were in the cache.
2. `burst`: 8 prompts of 3,000 tokens at the same time, replies of 64 tokens. Printed are seconds until the last first token.
3. `single`: 64 requests of 32 + 64 tokens, as in bench/inference.py. Printed are tokens per second, and milliseconds of
   CPU time per request.

Each process runs every part once to compile, then `--rounds` times with other tokens, and reports the medians.
"""

import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding.system import cli
from tests.support import shapes

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONVERSATIONS, TURNS, REPLY, TOOL, LONGEST = 16, 5, 64, 40, 3000
LONG = engine_lib.EngineConfig(num_slots=16, max_model_len=3200, prefill_batch=16, steps_per_call=8)
SHORT = engine_lib.EngineConfig(num_slots=64, max_model_len=96, prefill_batch=32, steps_per_call=16)
UNITS = {
    "agents": "turns/s",
    "cached": "of the prompt tokens",
    "burst": "s",
    "single": "tokens/s",
    "cpu": "ms of CPU time per short request",
}


def agents(scheduler: scheduler_lib.Scheduler, rng: np.random.Generator, group: int) -> dict[str, float]:
    """Runs all conversations; returns turns per second and the fraction of prompt tokens found in the cache."""
    lengths = np.geomspace(100, LONGEST - (TURNS - 1) * (REPLY + TOOL), CONVERSATIONS // group).astype(int)
    firsts = [rng.integers(0, 256, length).tolist() for length in lengths]
    tools = rng.integers(0, 256, (CONVERSATIONS, TURNS, TOOL)).tolist()

    def ask(prompt: list[int], **options):
        # A baseline of 2026-11-26 has no such field.
        if "oldest_prefix_version" in scheduler_lib.GenerateRequest.__dataclass_fields__:
            options["oldest_prefix_version"] = 0
        return scheduler.submit(scheduler_lib.GenerateRequest(tuple(prompt), max_tokens=REPLY, **options))

    begun = time.perf_counter()
    openings = [ask(first, seed=n * group, num_samples=group) for n, first in enumerate(firsts)]

    def converse(number: int) -> tuple[int, int]:
        prompt, num_prompt, num_cached = list(firsts[number // group]), 0, 0
        for turn in range(TURNS):
            replies = (ask(prompt, seed=number) if turn else openings[number // group]).result()
            reply = replies[0 if turn else number % group]
            num_prompt, num_cached = num_prompt + len(prompt), num_cached + reply.num_cached
            prompt += reply.tokens + tools[number][turn]
        return num_prompt, num_cached

    with concurrent.futures.ThreadPoolExecutor(CONVERSATIONS) as pool:
        counts = list(pool.map(converse, range(CONVERSATIONS)))
    seconds = time.perf_counter() - begun
    num_prompt, num_cached = np.sum(counts, axis=0)
    return {"agents": CONVERSATIONS * TURNS / seconds, "cached": float(num_cached / num_prompt)}


def burst(scheduler: scheduler_lib.Scheduler, rng: np.random.Generator) -> dict[str, float]:
    """Sends 8 long prompts; returns the seconds until each has its first token."""
    prompts, first_s = rng.integers(0, 256, (8, LONGEST)).tolist(), {}
    begun = time.perf_counter()
    futures = [
        scheduler.submit(
            scheduler_lib.GenerateRequest(tuple(prompt), max_tokens=REPLY),
            lambda index, completion, n=n: first_s.setdefault(n, time.perf_counter() - begun),
        )
        for n, prompt in enumerate(prompts)
    ]
    concurrent.futures.wait(futures)
    return {"burst": max(first_s.values())}


def single(scheduler: scheduler_lib.Scheduler, rng: np.random.Generator) -> dict[str, float]:
    """Runs 64 short requests; returns tokens per second, and milliseconds of CPU time per request."""
    prompts = rng.integers(0, 256, (64, 32)).tolist()
    begun, cpu_s = time.perf_counter(), time.process_time()
    futures = [
        scheduler.submit(scheduler_lib.GenerateRequest(tuple(prompt), max_tokens=REPLY, seed=n))
        for n, prompt in enumerate(prompts)
    ]
    concurrent.futures.wait(futures)
    passed_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
    return {"single": len(prompts) * REPLY / passed_s, "cpu": 1e3 * cpu_s / len(prompts)}


def measure(rounds: int, group: int, only: str) -> dict[str, float]:
    """Runs all parts in this process, or `only` one; returns the median of each figure."""
    model, found = shapes.model("4m"), []
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model)
    schedulers = [
        scheduler_lib.Scheduler(engine_lib.Engine(model, sizes, tokenizer_lib.byte_chatml()), params, 0)
        for sizes in (LONG, SHORT)
    ]
    for seed in range(rounds + 1):
        rng = np.random.default_rng(seed)
        found.append({})
        if only in ("", "agents"):
            found[-1] |= agents(schedulers[0], rng, group)
        if only in ("", "burst"):
            found[-1] |= burst(schedulers[0], rng)
        for _ in range(1 if seed == 0 else 3) if only in ("", "single") else ():
            found[-1] |= single(schedulers[1], rng)
    for scheduler in schedulers:
        scheduler.close()
    return {name: statistics.median(one[name] for one in found[1:]) for name in found[-1]}


def main() -> None:
    """Prints the figures of this checkout, and with `--baseline` those of another and their ratios."""
    parser = cli.Parser(prog="python -m bench.turns", description=__doc__)
    parser.add_argument("--baseline", type=pathlib.Path, help="another checkout, for example of the commit before")
    parser.add_argument("--pairs", type=int, default=1, help="processes of each checkout")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each process")
    parser.add_argument("--group", type=int, default=4, help="conversations that begin as samples of one request")
    parser.add_argument("--only", choices=("agents", "burst", "single"), default="", help="one part; default: all")
    parser.add_argument("--json", action="store_true", help="measure in this process and print only JSON")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure(args.rounds, args.group, args.only)))
        return
    # -P: this file's folder holds an `inference.py`, which would hide the package.
    command = [sys.executable, "-P", __file__, "--json", "--rounds", str(args.rounds), "--group", str(args.group)]
    command += ["--only", args.only] if args.only else []
    ratios: list[dict[str, float]] = []
    for pair in range(args.pairs):
        found = {}
        for name, root in {"baseline": args.baseline, "this": ROOT}.items():
            if root is not None:
                environ = {**os.environ, "PYTHONPATH": str(root)}
                lines = subprocess.run(command, cwd=root, env=environ, check=True, stdout=subprocess.PIPE).stdout
                found[name] = json.loads(lines)
                figures = ", ".join(f"{key} {value:.3g} {UNITS[key]}" for key, value in found[name].items())
                print(f"pair {pair + 1}, {name}: {figures}", flush=True)
        if args.baseline:
            ratios.append({key: value / found["baseline"][key] for key, value in found["this"].items()})
    if ratios:
        medians = {key: statistics.median(one[key] for one in ratios) for key in ratios[0]}
        print("this / baseline: " + ", ".join(f"{key} {value:.3f}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
