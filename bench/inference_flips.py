"""Counts tokens that differ between server configurations: `python -m bench.inference_flips`.

1. Random prompts of 4 to 120 tokens are completed by 64 tokens at temperature 1 on the model of bench/inference.py.
2. The same requests (same seeds) run under other sizes: slots, steps per call, prompts per prefill, chunk of long prompts,
   keys reused or not, another order of arrival. Within one configuration nothing may change a bit (tests/inference/scheduler/test_scheduler.py);
   between two, programs of other shapes round differently, and where two noised logits nearly tie, the token flips.
3. Printed per variant: flips per million tokens, where a completion counts up to its first flip (after it the prompts
   differ), the largest difference of log-probabilities before it, and the fraction of bit-equal ones.
"""

import dataclasses
import sys

import jax
import numpy as np

from inference.engine import engine as engine_lib
from inference.rollouts import completion as completion_lib
from inference.scheduler import scheduler as scheduler_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding.system import cli
from tests.support import shapes

BASE = engine_lib.EngineConfig(num_slots=32, max_model_len=192, prefill_batch=8, steps_per_call=8, prefill_chunk=128)
NUM_NEW = 64


@dataclasses.dataclass(frozen=True)
class Variant:
    """A server configuration."""

    sizes: dict
    prefix_cache_bytes: int = 0
    order: int = 0  # seed of the order of arrival; 0 keeps the order


VARIANTS = {
    "same sizes, other order": Variant({}, order=1),
    "other steps per call": Variant({"steps_per_call": 3}),
    "8 slots": Variant({"num_slots": 8}),
    "48 slots": Variant({"num_slots": 48}),
    "prefill of 2 prompts": Variant({"prefill_batch": 2}),
    "chunks of 32": Variant({"prefill_chunk": 32}),
    "chunks of 32, keys reused": Variant({"prefill_chunk": 32}, prefix_cache_bytes=2**28),
    "room for 256 tokens": Variant({"max_model_len": 256}),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.inference_flips", description=__doc__)
    parser.add_argument("--model", choices=shapes.SHAPES, default="4m")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args(argv)
    model = shapes.model(args.model)
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model)
    requests = make_requests(args.requests)
    expected = complete(model, params, requests, Variant({}))
    print(f"{args.requests} requests, {NUM_NEW} tokens each, against {BASE}", flush=True)
    for name in args.variants:
        result = compare(expected, complete(model, params, requests, VARIANTS[name]))
        print(f"{name:27} {result}", flush=True)
    return 0


def make_requests(count: int) -> list[scheduler_lib.GenerateRequest]:
    """Returns random requests. Half of them share one of a few prefixes, so that the prefix cache is used."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, (4, 96)).tolist()
    made = []
    for seed in range(count):
        tokens = rng.integers(0, 256, rng.integers(4, 24)).tolist()
        if seed % 2:
            tokens = shared[seed // 2 % 4] + tokens
        made.append(scheduler_lib.GenerateRequest(tuple(tokens), max_tokens=NUM_NEW, seed=seed))
    return made


def complete(model, params, requests, variant: Variant) -> list[completion_lib.Completion]:
    """Runs the requests under a variant."""
    engine = engine_lib.Engine(model, dataclasses.replace(BASE, **variant.sizes), tokenizer_lib.byte_chatml())
    scheduler = scheduler_lib.Scheduler(engine, params, 0, prefix_cache_bytes=variant.prefix_cache_bytes)
    order = np.random.default_rng(variant.order).permutation(len(requests)) if variant.order else range(len(requests))
    futures = {index: scheduler.submit(requests[index]) for index in order}
    results = [futures[index].result()[0] for index in range(len(requests))]
    scheduler.close()
    return results


def compare(expected: list[completion_lib.Completion], got: list[completion_lib.Completion]) -> str:
    """Formats the differences of two runs of the same requests."""
    num_tokens = num_flips = num_equal = 0
    worst = 0.0
    for one, other in zip(expected, got, strict=True):
        same = next(
            (t for t, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), len(one.tokens)
        )
        num_flips += same < len(one.tokens)
        num_tokens += min(same + 1, len(one.tokens))
        a, b = np.array(one.logprobs[:same]), np.array(other.logprobs[:same])
        num_equal += int((a == b).sum())
        worst = max(worst, float(np.abs(a - b).max(initial=0)))
    rate = f"{1e6 * num_flips / num_tokens:.0f}" if num_flips else f"0 (below {3e6 / num_tokens:.0f} at 95 %)"
    return (
        f"{rate} flips per million tokens ({num_flips} in {num_tokens}); log-probabilities differ by at most {worst:.1e}, "
        f"{num_equal / max(num_tokens - num_flips, 1):.1%} equal to the bit"
    )


if __name__ == "__main__":
    sys.exit(main())
