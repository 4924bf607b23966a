"""Times a whole GRPO step on a CPU (rollout, advantages, packing, update, new weights), next to Tunix and TRL.

    python -m bench.grpo_step
    python -m bench.grpo_step --tunix /venv/bin/python bench_tunix_grpo.py --trl /venv/bin/python bench_trl_grpo.py

1. A Qwen3-type model of 4.1 M parameters with random weights (4 layers, D 256, 4 + 2 heads of 64, F 1024, V 512, tied, float32); 8
   prompts of 32 tokens, 8 samples each, temperature 1, no end token; group-normalized advantages of "how many ids are odd"; one AdamW
   step. The rollout runs through the real engine and scheduler, the update through `learner.train_step`.
2. `equal`: every sample has 64 tokens. `skewed`: lengths of 1 to 64 tokens drawn from 64 u^3 (mean 16), one of them 64. The peers pad
   to the longest sample and run until it ends, so that their step of equal lengths is also their step of skewed ones.
3. Each side runs in a process of its own; with peers, the three take turns `--rounds` times, so that a busy machine is busy for all.
   A peer's script prints one JSON line with step_s_median, first_step_s and peak_rss_MiB.
4. Printed per side: first step (from a model with weights to its first update, compilation included), best and median step,
   CPU seconds, peak memory, ratios to the peers; and GFLOP/s of our update, at 6 FLOPs per parameter and token of the plain
   streams, and that of a 2048 x 2048 float32 product.

Acceptance: a step of equal lengths at most half of either peer's, of skewed ones 0.35; first step no slower than Tunix's; memory
at most 0.6 of either.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time

from sharding.system import cli

P, G, PROMPT, NEW = 8, 8, 32, 64
TARGETS = {"equal": 0.5, "skewed": 0.35, "first_step_s": 1.0, "peak_rss_MiB": 0.6}


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.grpo_step", description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each side")
    parser.add_argument("--row_length", type=int, default=288, help="a prompt and four samples; 96 shares no prompt")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument(
        "--tunix", nargs=2, metavar=("PYTHON", "SCRIPT"), help="interpreter with google-tunix, its bench script"
    )
    parser.add_argument("--trl", nargs=2, metavar=("PYTHON", "SCRIPT"), help="interpreter with trl, its bench script")
    parser.add_argument("--ours", choices=("equal", "skewed"), help=argparse.SUPPRESS)  # one side, in its own process
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(run(args.ours == "skewed", args)))
        return 0

    sizes = [f"--{name}={getattr(args, name)}" for name in ("steps", "warmup", "row_length", "rows")]
    sides = {
        shape: [sys.executable, "-m", "bench.grpo_step", f"--ours={shape}", *sizes] for shape in ("equal", "skewed")
    }
    for name in ("tunix", "trl"):
        if getattr(args, name):
            sides[name] = [*getattr(args, name), f"--steps={args.steps}", f"--warmup={args.warmup}"]
    found: dict[str, list] = {side: [] for side in sides}
    for turn in range(args.rounds):
        for side, command in sides.items():
            print(f"round {turn + 1} of {args.rounds}: {side}", file=sys.stderr, flush=True)
            found[side].append(_run(command))
    return report(found)


def run(skewed: bool, args) -> dict:
    """Runs one process of ours: `--steps` whole steps."""
    import jax  # here, so that the process that waits for the others uses no memory
    import jax.numpy as jnp
    import numpy as np

    from inference.engine import engine
    from inference.scheduler import scheduler
    from models.text import tokenizer
    from rl.learning.algorithms import advantages
    from rl.learning.batch import packing
    from rl.learning.learner import objective, optimizers, train_step
    from sharding.mesh import mesh as mesh_lib
    from tests.support import shapes

    model = shapes.model("4m")
    rng = np.random.default_rng(0)
    mesh = mesh_lib.create({})
    optimizer = train_step.make_optimizer(optimizers.OptimizerConfig(1e-5, 0, 0.9, 0.999, 1e-8, 0.0, 0.0), model)
    loss = objective.bind("two_sided_clip", {"clip_low": 0.2, "clip_high": 0.2, "delta": 4.0})
    learner = train_step.Learner(model, optimizer, loss, mesh)
    state, step = train_step.init_state(jax.random.key(0), learner), train_step.jit_train_step(learner)
    layout = packing.Layout.for_streams(P * G, PROMPT + NEW, row_length=args.row_length, rows=args.rows)
    jax.block_until_ready(state)
    begun = time.perf_counter()
    # As rl/train.py does: the step is compiled while the engine compiles and rolls out.
    compiling = threading.Thread(target=train_step.compile_train_step, args=(learner, packing.abstract(layout, mesh)))
    compiling.start()
    policy = scheduler.Scheduler(
        engine.Engine(
            model,
            engine.EngineConfig(num_slots=P * G, max_model_len=PROMPT + NEW, prefill_batch=P, steps_per_call=8),
            tokenizer.load("byte_chatml"),
        ),
        jax.tree.map(jnp.copy, state.params),
        0,
    )

    def roll_out(number):
        """Returns one group's trees, trained tokens and reward. A sample with its own length is a request of its own."""
        futures = []
        for p in range(P):
            prompt = rng.integers(3, model.vocab_size, PROMPT).tolist()
            lengths = np.maximum(1, (NEW * rng.random(G) ** 3).astype(int)) if skewed else np.full(G, NEW)
            lengths[0] = NEW if p == 0 else lengths[0]
            plans = [(int(n), 1, g) for g, n in enumerate(lengths)] if skewed else [(NEW, G, 0)]
            requests = [
                scheduler.GenerateRequest(
                    prompt, num_samples=n, max_tokens=longest, seed=(number * P + p) * G + g, raw_logprobs=False
                )
                for longest, n, g in plans
            ]
            futures.append((prompt, [policy.submit(request) for request in requests]))
        trees, num_tokens = [], 0
        for prompt, parts in futures:
            done = [completion for part in parts for completion in part.result()]
            rewards = np.array([sum(t % 2 for t in c.tokens) / NEW for c in done])
            branches = []
            for completion, credit in zip(done, advantages.group_mean_std(rewards), strict=True):
                ones = np.ones(len(completion.tokens), np.float32)
                logp = np.array(completion.logprobs, np.float32)
                branches.append(
                    packing.Branch(np.array(completion.tokens, np.int32), ones, logp, ones * np.float32(credit), 1.0)
                )
                num_tokens += len(ones)
            trees.append(packing.Tree(np.array(prompt, np.int32), tuple(branches)))
        return trees, num_tokens

    marks = []
    for number in range(args.steps):
        times = [(time.perf_counter(), time.process_time())]
        trees, num_tokens = roll_out(number)
        times.append((time.perf_counter(), time.process_time()))
        compiling.join()
        state, metrics = step(state, packing.place(packing.pack(trees, layout), mesh))
        metrics = jax.device_get(metrics)
        times.append((time.perf_counter(), time.process_time()))
        policy.update(jax.tree.map(jnp.copy, state.params), number + 1).result()
        times.append((time.perf_counter(), time.process_time()))
        marks.append((times, num_tokens))
    policy.close()
    # The ratio is computed against the engine's own report: had the two models differed, it would show here.
    assert abs(float(metrics["loss/ratio_mean"]) - 1) < 1e-3, metrics

    counted = marks[args.warmup :]
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    updates = [(times[2][0] - times[1][0]) for times, _ in counted]
    plain = statistics.median([tokens for _, tokens in counted]) + P * G * PROMPT
    return {
        "first_step_s": marks[0][0][-1][0] - begun,
        "step_s_median": statistics.median(times[-1][0] - times[0][0] for times, _ in counted),
        "step_s_min": min(times[-1][0] - times[0][0] for times, _ in counted),
        "step_cpu_s_median": statistics.median(times[-1][1] - times[0][1] for times, _ in counted),
        "rollout_s": statistics.median(times[1][0] - times[0][0] for times, _ in counted),
        "train_s": statistics.median(updates),
        "params_M": num_params / 1e6,
        "train_gflops": 6 * num_params * plain / min(updates) / 1e9,
        "matmul_gflops": _matmul_gflops(jax, jnp),
        "peak_rss_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load1": os.getloadavg()[0],
    }


def report(found: dict[str, list[dict]]) -> int:
    """Prints medians over rounds and the ratios to the peers; returns 1 if a target was missed."""
    names = ("first_step_s", "step_s_median", "step_s_min", "step_cpu_s_median", "rollout_s", "train_s", "peak_rss_MiB")
    middle = {
        side: {
            name: statistics.median(r[name] for r in rounds if name in r)
            for name in names
            if any(name in r for r in rounds)
        }
        for side, rounds in found.items()
    }
    print(f"{'':22}" + "".join(f"{side:>12}" for side in found))
    for name in names:
        cells = (f"{middle[side][name]:12.3f}" if name in middle[side] else f"{'':>12}" for side in found)
        print(f"{name:22}" + "".join(cells))
    for shape in ("equal", "skewed"):
        best = max(found[shape], key=lambda r: r["train_gflops"])
        print(
            f"{shape}: update {best['train_gflops']:.0f} GFLOP/s of plain streams, matmul {best['matmul_gflops']:.0f} GFLOP/s"
        )
    missed = 0
    for peer in (side for side in found if side in ("tunix", "trl")):
        for shape in ("equal", "skewed"):
            pairs = [("step_s_median", TARGETS[shape]), ("peak_rss_MiB", TARGETS["peak_rss_MiB"])]
            if peer == "tunix":
                pairs.append(("first_step_s", TARGETS["first_step_s"]))
            for name, target in pairs:
                # Compared round by round: a slow machine slows both sides of a round.
                ratio = statistics.median(a[name] / b[name] for a, b in zip(found[shape], found[peer], strict=True))
                missed += ratio > target
                print(
                    f"{shape:7} {name:16} / {peer:6} {ratio:6.2f}  target {target:.2f}{'' if ratio <= target else '  missed'}"
                )
    return int(missed > 0)


def _run(command: list[str]) -> dict:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        raise SystemExit(
            f"{' '.join(command)} ended with {result.returncode} and without results:\n{result.stderr[-2000:]}"
        )
    return json.loads(lines[-1])


def _matmul_gflops(jax, jnp) -> float:
    n, x = 2048, jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        product(x).block_until_ready()
        times.append(time.perf_counter() - begun)
    return 2 * n**3 / min(times) / 1e9


if __name__ == "__main__":
    sys.exit(main())
