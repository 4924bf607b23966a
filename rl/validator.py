"""Verdicts on rollouts: was this text sampled by the weights, the seed and the temperature that it claims?

For a group of rollouts, with the published weights of every version they name:
1. Replay: one pass per version runs the tokens through the model; each position's keys are written by the version that
   wrote them in the engine, so that a rollout that spans several versions is replayed exactly as it was made.
2. Sampling: the noise of (seed, position) is drawn again, and each claimed token must be the argmax of noised logits,
   up to a small margin; the claimed log-probability must agree with the replayed one.
3. Computation: TOPLOC proofs are compared with the replayed hidden states (inference/toploc.py).

A verdict is a reason to refuse, or None. It is the reason of the first rollout that fails; the group falls with it, since
advantages compare its members. Malformed content is a reason, never an exception.

Left out: termination and distribution checks, reputation, thresholds calibrated per backend pair, the service.

Letters: G rollouts of a group, T padded length, V vocabulary.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from inference import kv_cache, sampler, toploc
from inference import rollout as rollout_lib
from models import config as config_lib
from models import transformer
from sharding import broadcast


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an honest replay may lie from the claim: 0 in exact arithmetic, more across backends and dtypes."""

    margin: float  # nats of noised logit by which a claimed token may miss the argmax
    max_wrong_tokens: int  # tokens of a rollout that may miss it by more
    logprob: float  # nats between claimed and replayed log-probability


class Validator:
    """Replays groups against published weights.

    Args:
      model: config of the policy.
      weights: version -> params, raising ValueError or OSError for a version that cannot be had.
      filters: top_k, top_p, min_p that the run prescribes (a worker's word is not taken for them).
    """

    def __init__(
        self,
        model: config_lib.ModelConfig,
        weights: Callable[[int], transformer.Params],
        filters: dict[str, float],
        tolerance: Tolerance,
        *,
        max_model_len: int,
    ):
        self._model, self._weights, self._filters, self._tolerance = model, weights, filters, tolerance
        self._length = max_model_len

    def check(self, rollouts: Sequence[rollout_lib.Rollout]) -> str | None:
        """Returns the reason to refuse this group, or None."""
        if too_long := [len(r.tokens) for r in rollouts if len(r.tokens) > self._length]:
            return f"length: {too_long[0]} tokens exceed the model's {self._length}"
        try:
            replay = self.replay(rollouts)
        except (ValueError, OSError) as error:
            return f"weights: a version that it names cannot be had ({error})"
        for i, rollout in enumerate(rollouts):
            if reason := self._judge(rollout, replay, i):
                return reason
        return None

    def replay(self, rollouts: Sequence[rollout_lib.Rollout]) -> "Replay":
        """Runs the group's tokens again; arrays [G, T], row t about token t (hidden: the state that predicts it)."""
        G, T = len(rollouts), self._length
        tokens, writer = np.zeros((G, T), np.int32), np.full((G, T), -1, np.int32)
        for i, r in enumerate(rollouts):
            n = len(r.tokens)
            tokens[i, :n] = r.tokens
            # Position t was run to predict token t + 1: by the version that sampled it, or by the prefill.
            writer[i, : n - 1] = np.where(r.sampled_mask[1:], r.versions[1:], r.versions[:-1])
        sampling = sampler.Sampling(
            seed=jnp.asarray([r.seed for r in rollouts], jnp.uint32),
            temperature=jnp.asarray([r.temperature for r in rollouts], jnp.float32),
            **{
                name: jnp.full((G,), self._filters[name], dtype)
                for name, dtype in (("top_k", jnp.int32), ("top_p", jnp.float32), ("min_p", jnp.float32))
            },
        )
        cache = kv_cache.create(self._model, G, T)
        merged = None
        for version in sorted(set(writer[writer >= 0].tolist())):
            mask_GT = jnp.asarray(writer == version)
            out, cache = _replay(self._model, self._weights(version), jnp.asarray(tokens), mask_GT, cache, sampling)
            merged = out if merged is None else jax.tree.map(functools.partial(_merge, mask_GT), out, merged)
        return jax.tree.map(np.asarray, merged)

    def _judge(self, rollout: rollout_lib.Rollout, replay: "Replay", i: int) -> str | None:
        sampled = np.flatnonzero(rollout.sampled_mask)
        margin, logp = replay.margin[i, sampled], replay.logp[i, sampled]
        wrong = int((margin > self._tolerance.margin).sum())
        if wrong > self._tolerance.max_wrong_tokens:
            worst = int(sampled[margin.argmax()])
            return f"sampling: {wrong} of {len(sampled)} tokens are not what the seed draws; token {worst} misses by {margin.max():.3g}"
        error = float(np.abs(logp - rollout.logprobs[sampled]).max())
        if not error <= self._tolerance.logprob:
            return f"logprob: claimed and replayed differ by {error:.3g}, more than {self._tolerance.logprob}"
        hidden_ND = replay.hidden[i, sampled]
        results = toploc.verify_proofs(hidden_ND, toploc.split(rollout.proofs, *hidden_ND.shape))
        if failed := [result for result in results if not result.accepted]:
            return f"toploc: {failed[0].reason} ({failed[0].exp_mismatches} exponent mismatches)"
        return None


def published(root: pathlib.Path, *, keep: int = 4) -> Callable[[int], transformer.Params]:
    """Weights by version from a broadcast, verified on the way; the last `keep` stay in memory."""
    held: dict[int, transformer.Params] = {}

    def weights(version: int) -> transformer.Params:
        if version not in held:
            params = jax.tree.map(jnp.asarray, broadcast.pull(str(root), version).params)
            while len(held) >= keep:  # before it is added: a rollout may name a version older than all of these
                del held[min(held)]
            held[version] = params
        return held[version]

    return weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """Row t is about token t: arrays [G, T] (hidden [G, T, D], bfloat16)."""

    margin: jax.Array  # max of the noised logits minus that of the token
    logp: jax.Array  # of the token, under the distribution sampled from
    hidden: jax.Array  # the state that predicted the token


@functools.partial(jax.jit, static_argnums=0)
def _replay(model, params, tokens_GT, mask_GT, cache, sampling) -> tuple[Replay, kv_cache.Cache]:
    """One version's pass: its keys go where `mask` says it wrote; other positions keep theirs."""
    G, T = tokens_GT.shape
    attend_all = kv_cache.attend_at(jnp.zeros((G,), jnp.int32))

    def attend(entry, q_GTHC, k_GTKC, v_GTKC):
        keep_GTKC = mask_GT[:, :, None, None]
        k_GTKC = jnp.where(keep_GTKC, k_GTKC, entry[0].swapaxes(1, 2))
        v_GTKC = jnp.where(keep_GTKC, v_GTKC, entry[1].swapaxes(1, 2))
        return attend_all(entry, q_GTHC, k_GTKC, v_GTKC)

    positions_GT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (G, T))
    hidden_GTD, cache = transformer.extend(params, model, tokens_GT, positions_GT, cache, attend)

    def score(row):  # one rollout at a time: logits are [T, V]
        hidden_TD, tokens_T, sampling = row
        repeated = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (T,)), sampling)
        logp_TV = sampler.scores(transformer.logits(params, model, hidden_TD[None])[0], repeated)
        target_T = jnp.roll(tokens_T, -1)[:, None]
        noise_TV = sampler.noise(repeated.seed, jnp.arange(T, dtype=jnp.int32) + 1, logp_TV.shape[-1])
        noised_TV = logp_TV + jnp.where(repeated.temperature > 0, 1.0, 0.0)[:, None] * noise_TV
        margin_T = noised_TV.max(axis=-1) - jnp.take_along_axis(noised_TV, target_T, axis=-1)[:, 0]
        return margin_T, jnp.take_along_axis(logp_TV, target_T, axis=-1)[:, 0]

    margin_GT, logp_GT = jax.lax.map(score, (hidden_GTD, tokens_GT, sampling))
    out = Replay(margin_GT, logp_GT, hidden_GTD.astype(jnp.bfloat16))
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), out), cache


def _merge(mask_GT, new, old):
    """Takes `new` where this version predicted (one to the right of where it wrote)."""
    where = jnp.roll(mask_GT, 1, axis=1)
    return jnp.where(where.reshape(where.shape + (1,) * (new.ndim - 2)), new, old)
