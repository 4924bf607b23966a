"""Measures log-probabilities: memory of the chunked path against the full softmax, and time at a small model's shapes.

    python -m bench.logprobs [--tokens=8x4096] [--vocab=152064] [--model=1024] [--turns=20]

1. Memory: both are compiled for [B, T] tokens (forward and backward, bfloat16 hidden states, float32 head) and the
   compiler's memory analysis is printed; nothing is run. The chunked path must stay below a printed bound, or the
   command exits with 1.
2. Time: at the quickstart's shapes (8 x 160 tokens, D 128, V 272) both are run in turns; the medians are printed.
   "full" is softmax over all logits, rematerialized in the backward pass, as the code was before it was chunked.

Letters: B sequences, T tokens, D model, V vocabulary.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import logprobs, transformer
from sharding.system import cli
from tests.support import tiny

GIB = 2**30


def main() -> None:
    """Runs the benchmark; exits with 1 if the memory bound is exceeded."""
    parser = cli.Parser(prog="python -m bench.logprobs", description=__doc__)
    parser.add_argument("--tokens", default="8x4096", help="B x T of the memory comparison")
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--model", type=int, default=1024, help="D of the memory comparison")
    parser.add_argument("--turns", type=int, default=20, help="timed turns; 0 skips the timing")
    args = parser.parse_args()
    B, T = map(int, args.tokens.split("x"))
    fits = memory(B, T, args.model, args.vocab)
    if args.turns:
        timing(8, 160, 128, 272, args.turns)
    raise SystemExit(0 if fits else 1)


def memory(B: int, T: int, D: int, V: int) -> bool:
    """Prints the temporaries of both; returns True if the chunked path is within its bound."""
    config = model(D, V, "bfloat16")
    shapes = (
        {"lm_head": jax.ShapeDtypeStruct((D, V), jnp.float32)},
        jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
        jax.ShapeDtypeStruct((B, T), jnp.float32),
    )
    used = {}
    for name, function in (("chunked", logprobs.token_logprobs), ("full", full_softmax)):
        step = jax.jit(jax.value_and_grad(total(function, config), argnums=(0, 1)))
        used[name] = step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    # Per token: its predictor in bfloat16 and the gradient of that in float32, each twice (order of tokens, order of
    # columns), and a dozen scalars. Per chunk: four arrays of its logits, and three of its columns of the head.
    chunk = 4 * 4 * logprobs.CHUNK_LOGITS + 3 * 4 * D * logprobs.VOCAB_CHUNK
    bound = B * T * (2 * (2 + 4) * D + 12 * 4) + chunk
    print(f"[{B}, {T}] tokens, D {D}, V {V}: temporaries of value and gradient, {jax.default_backend()}")
    print(f"  all logits in float32  {4 * B * T * V / GIB:8.2f} GiB")
    print(f"  full softmax           {used['full'] / GIB:8.2f} GiB")
    print(f"  chunked                {used['chunked'] / GIB:8.2f} GiB, bound {bound / GIB:.2f} GiB")
    return used["chunked"] <= bound


def timing(B: int, T: int, D: int, V: int, turns: int) -> None:
    """Prints the median times of both."""
    config = model(D, V, "float32")
    rng = np.random.default_rng(0)
    arrays = (
        {"lm_head": rng.standard_normal((D, V)).astype(np.float32) / np.sqrt(D)},
        rng.standard_normal((B, T, D)).astype(np.float32),
        rng.integers(0, V, (B, T)).astype(np.int32),
        np.ones((B, T), np.float32),
    )
    arrays = jax.device_put(arrays)
    steps = {
        name: jax.jit(jax.value_and_grad(total(function, config), argnums=(0, 1)))
        for name, function in (("chunked", logprobs.token_logprobs), ("full", full_softmax))
    }
    seconds = {name: [] for name in steps}
    for turn in range(turns + 2):  # two to warm up
        for name, step in steps.items():
            begun = time.perf_counter()
            jax.block_until_ready(step(*arrays))
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begun)
    print(f"[{B}, {T}] tokens, D {D}, V {V}: value and gradient, median of {turns} turns (and the best)")
    for name, values in seconds.items():
        print(f"  {name:<22} {1e3 * statistics.median(values):8.2f} ms ({1e3 * min(values):.2f})")


def total(function, config):
    """Returns a scalar function of the results of `function`, for `jax.grad`; entropy has no gradient."""

    def loss(params, hidden_BTD, tokens_BT, temperature_BT):
        logp_BT, entropy_BT = function(params, config, hidden_BTD, tokens_BT, temperature_BT)
        return logp_BT.sum(), entropy_BT.sum()

    def scalar(*args):
        logp, entropy = loss(*args)
        return logp + jax.lax.stop_gradient(entropy)

    return scalar


def full_softmax(params, config, hidden_BTD, tokens_BT, temperature_BT):
    """Returns (logp_BT, entropy_BT) from all logits together, computed again in the backward pass."""

    @jax.checkpoint
    def score(params, hidden_BTD, target_BT, temperature_BT):
        logits_BTV = transformer.logits(params, config, hidden_BTD) / temperature_BT[..., None]
        logp_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
        logp_BT = jnp.take_along_axis(logp_BTV, target_BT[..., None], axis=-1)[..., 0]
        return logp_BT, -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)

    scored = score(params, hidden_BTD[:, :-1], tokens_BT[:, 1:], temperature_BT[:, 1:])
    return tuple(jnp.pad(x_BT, ((0, 0), (1, 0))) for x_BT in scored)


def model(D: int, V: int, dtype: str) -> config_lib.ModelConfig:
    """Returns a model whose head has the given size; the rest, which does not count here, is minimal."""
    dims = dict(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, ffn_dim=1, qk_norm=False, tie_embeddings=False)
    return tiny.model(vocab_size=V, model_dim=D, dtype=dtype, **dims)


if __name__ == "__main__":
    main()
