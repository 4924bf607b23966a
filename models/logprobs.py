"""Log-probability and entropy of given tokens, from hidden states, a chunk of tokens at a time.

The logits of a chunk exist only while the chunk is worked on (forward and backward: the chunk is rematerialised),
so that memory is `chunk x V` instead of `B x T x V`.

Convention: row t of the result belongs to token t, and is predicted by the hidden state of token t - 1 (or of the column
that `predictors_BT` names, where branches share a prompt). Column 0 has no predictor and gets 0; the loss mask never
selects it.
"""

import jax
import jax.numpy as jnp

from models import config as config_lib
from models import transformer


def token_logprobs(
    params: transformer.Params,
    config: config_lib.ModelConfig,
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    temperature_BT: jax.Array,
    *,
    predictors_BT: jax.Array | None = None,
    chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp_BT, entropy_BT), float32, of each token under softmax(logits / temperature).

    The entropy carries no gradient (it is a diagnostic; an entropy bonus needs its own term).

    Args:
      hidden_BTD: output of `transformer.apply` for the same tokens.
      tokens_BT: the tokens to score.
      temperature_BT: the temperature each token was sampled at; values <= 0 (greedy) count as 1.
      predictors_BT: the column whose hidden state predicts the token; the one before it when None.
      chunk: tokens per chunk, over B x T.
    """
    B, T, D = hidden_BTD.shape
    # Targets are columns 1..T-1; flattened, then padded to whole chunks.
    if predictors_BT is None:
        hidden_BTD = hidden_BTD[:, :-1]
    else:
        hidden_BTD = jnp.take_along_axis(hidden_BTD, predictors_BT[:, 1:, None], axis=1)
    hidden_ND = hidden_BTD.reshape(-1, D)
    target_N = tokens_BT[:, 1:].reshape(-1)
    temperature_N = temperature_BT[:, 1:].reshape(-1)
    N = hidden_ND.shape[0]
    chunk = min(chunk, N)
    pad = -N % chunk

    @jax.checkpoint
    def score(args):
        hidden_MD, target_M, temperature_M = args
        logits_MV = transformer.logits(params, config, hidden_MD[None])[0]
        logits_MV = logits_MV / jnp.where(temperature_M > 0, temperature_M, 1.0)[:, None]
        logp_MV = jax.nn.log_softmax(logits_MV, axis=-1)
        logp_M = jnp.take_along_axis(logp_MV, target_M[:, None], axis=-1)[:, 0]
        entropy_M = -jnp.sum(jnp.exp(logp_MV) * logp_MV, axis=-1)
        return logp_M, jax.lax.stop_gradient(entropy_M)

    def chunked(x, value):
        widths = ((0, pad),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=value).reshape(-1, chunk, *x.shape[1:])

    args = chunked(hidden_ND, 0), chunked(target_N, 0), chunked(temperature_N, 1)
    if N <= chunk:
        logp, entropy = score(jax.tree.map(lambda x: x[0], args))
    else:
        logp, entropy = jax.lax.map(score, args)

    def restore(x):
        return jnp.pad(x.reshape(-1)[:N].reshape(B, T - 1), ((0, 0), (1, 0)))

    return restore(logp), restore(entropy)
