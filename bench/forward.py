"""Times forward and backward passes in float32 on a CPU, next to transformers on torch.

    python -m bench.forward
    python -m bench.forward --peer-python=/path/to/venv/bin/python     # a venv with torch and transformers

1. Two Qwen3 models with random weights: "4m" (4 layers, D 256, V 512, tied: 4.1 M parameters; 64 rows of 96 tokens) and
   "100m" (12 layers, D 768, V 32000, tied; 8 rows of 128).
2. One process per side and model computes the mean negative log-probability of the next tokens and its gradient by every
   parameter. They take turns, one step each, so that a busy machine is busy for both.
3. Printed: the best and the median step, tokens per second of the best, and the fraction of the matmul limit that it reaches:
   FLOPs counted as 6 per token and parameter of a matmul, plus 12 L T H C per token for attention, over those of the best
   of our 2048 x 2048 float32 products, one of which is timed after each of our steps. Then the ratio of the two sides.

Acceptance: at least 2 times the peer on "4m", 1.3 times on "100m".
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from sharding.system import cli
from tests.support import shapes

BATCHES = {"4m": {"rows": 64, "tokens": 96}, "100m": {"rows": 8, "tokens": 128}}
PEER = """
import json, sys, time
import torch, transformers
m = json.loads(sys.argv[1])
torch.manual_seed(0)
config = transformers.Qwen3Config(
    vocab_size=m["vocab_size"], hidden_size=m["model_dim"], intermediate_size=m["ffn_dim"],
    num_hidden_layers=m["num_layers"], num_attention_heads=m["num_heads"], num_key_value_heads=m["num_kv_heads"],
    head_dim=m["head_dim"], tie_word_embeddings=True)
model = transformers.Qwen3ForCausalLM(config)
ids = torch.randint(0, m["vocab_size"], (m["rows"], m["tokens"]))
def step():
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
for _ in range(3):
    step()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    step()
    print(time.perf_counter() - start, flush=True)
"""


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.forward", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--peer-python", help="interpreter with torch and transformers; only ours is timed without")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # our side of a pair, in its own process
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    for name in args.models:
        compare(name, args)
    return 0


def compare(name: str, args) -> None:
    """Times both sides in turns and prints the result."""
    m = shapes.SHAPES[name] | BATCHES[name]
    sides = {"ours": [sys.executable, "-m", "bench.forward", "--serve", name]}
    if args.peer_python:
        sides["transformers"] = [args.peer_python, "-c", PEER, json.dumps(m)]
    processes = {
        side: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side, command in sides.items()
    }
    ready = {side: process.stdout.readline().split() for side, process in processes.items()}
    seconds, limit = {side: [] for side in sides}, 0.0
    for _ in range(args.turns):
        for side, process in processes.items():
            time.sleep(0.3)  # torch's threads spin for a while after a step
            process.stdin.write("go\n")
            process.stdin.flush()
            step, *rate = map(float, process.stdout.readline().split())
            seconds[side].append(step)
            limit = max(limit, *rate, 0.0)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    count, flops = (float(x) for x in ready["ours"][1:])
    tokens = m["rows"] * m["tokens"]
    print(f"{name}: {count / 1e6:.1f} M parameters, {m['rows']} x {m['tokens']} tokens, {args.turns} turns")
    print(f"  the matmul limit is {limit / 1e9:.0f} GFLOP/s")
    for side, times in seconds.items():
        best = min(times)
        print(
            f"  {side:13} {best:7.3f} s best, {statistics.median(times):7.3f} s median, {tokens / best:9,.0f} tokens/s, "
            f"{flops / best / limit:.2f} of the limit"
        )
    if args.peer_python:
        ours, peer = (min(seconds[side]) for side in ("ours", "transformers"))
        print(f"  ours / transformers: {peer / ours:.2f} x by best step")


def serve(name: str) -> int:
    """Runs our side: prints a line when warm, then runs a step per line of input."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from models import logprobs, transformer

    config, m = shapes.model(name), BATCHES[name]
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape) * 0.02, jnp.float32), transformer.abstract(config)
    )
    tokens_BT = jnp.asarray(rng.integers(0, config.vocab_size, (m["rows"], m["tokens"])), jnp.int32)
    ones_BT = jnp.ones(tokens_BT.shape, jnp.float32)

    def loss(params):
        hidden_BTD, _ = transformer.apply(params, config, tokens_BT)
        logp_BT, _ = logprobs.token_logprobs(params, config, hidden_BTD, tokens_BT, ones_BT)
        return -logp_BT.sum() / (logp_BT.size - logp_BT.shape[0])

    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(3):
        jax.block_until_ready(step(params))
    square = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(jnp.dot)
    product(square, square).block_until_ready()
    count = transformer.num_params(config)
    tokens = m["rows"] * m["tokens"]
    attention = 12 * config.num_layers * m["tokens"] * config.num_heads * config.head_dim
    print("ready", count, tokens * (6 * count + attention), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        jax.block_until_ready(step(params))
        middle = time.perf_counter()
        product(square, square).block_until_ready()
        print(middle - start, 2 * 2048**3 / (time.perf_counter() - middle), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
