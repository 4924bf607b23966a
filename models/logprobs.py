"""Log-probabilities and entropies of given tokens, from hidden states, without storing the logits of all tokens.

Logits are computed per chunk of tokens and of vocabulary (online softmax, arXiv 1805.02867), and again in the backward
pass. On a mesh each device scores its tokens against its part of the vocabulary; statistics are reduced over `tensor`.

Column t of the result belongs to token t. Column 0 has no predictor: it is 0, without a gradient.

Letters: B sequences, T tokens of one, N chunks of tokens, M tokens of a chunk, D model, V columns of the vocabulary (all,
a device's, or a chunk's).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models import config as config_lib
from models import transformer
from sharding.mesh import fsdp, rules

MASKED = -1e30  # finite: exp gives 0, and 0 times it is 0, where -inf would give NaN
CHUNK_LOGITS = 2**23  # logits that exist at a time: 32 MiB in float32
VOCAB_CHUNK = 8192  # columns per chunk, at most


def token_logprobs(
    params: transformer.Params,
    config: config_lib.ModelConfig,
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    temperature_BT: jax.Array,
    *,
    predictors_BT: jax.Array | None = None,
    kept_BTW: jax.Array | None = None,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp_BT, entropy_BT), float32, in nats, of each token under softmax(logits / temperature).

    `hidden_BTD` is the result of `transformer.apply` for the same tokens. Gradients flow to it and to the output head, the only one of
    `params` that is read. `temperature_BT` is the temperature each token was sampled at; values <= 0 (greedy) count as 1.
    `predictors_BT` is the column whose hidden state predicts the token; the one before it when None. `kept_BTW` has the kept vocabulary
    entries of each token, int32, padded with -1: both results are then of the softmax over these entries alone. A token whose first
    entry is -1 has all entries. `entropy_gradient` gives the entropy a gradient, for an entropy bonus.
    """
    kept_BTW = jnp.zeros((*tokens_BT.shape, 0), jnp.int32) if kept_BTW is None else kept_BTW
    column_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
    predictors_BT = jnp.maximum(column_BT - 1 if predictors_BT is None else predictors_BT, 0)
    name = "embed" if config.tie_embeddings else "lm_head"
    head = _Head.of(config, name, entropy_gradient)
    temperature_BT = jnp.where(temperature_BT > 0, temperature_BT, 1.0)
    logp_BT, entropy_BT = _score(head, hidden_BTD, params[name], predictors_BT, temperature_BT, tokens_BT, kept_BTW)
    return jnp.where(column_BT > 0, logp_BT, 0.0), jnp.where(column_BT > 0, entropy_BT, 0.0)


@dataclasses.dataclass(frozen=True)
class _Head:
    """The layout of the output head in memory and on the mesh, and other options that are static under jit."""

    vocab_dim: int  # the kernel's dim of the vocabulary: 0 when the embedding is the head
    num_columns: int  # of the vocabulary, on one device
    entropy_gradient: bool
    softcap: float  # logits = cap tanh(logits / cap); 0: off
    # Mesh axes over which each of them is split; empty without a mesh.
    batch_axes: tuple[str, ...] = ()
    context_axes: tuple[str, ...] = ()
    model_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config, name, entropy_gradient) -> "_Head":
        spec, mesh = transformer.specs(config)[name], rules.several_devices()
        vocab_dim = spec.logical_axes.index("vocab")
        sizes = {} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1}
        dims = ("batch", "sequence", "model", "vocab")
        axes = [tuple(axis for axis in rules.RULES[dim] if axis in sizes) for dim in dims]
        num_columns = spec.shape[vocab_dim] // math.prod(sizes[axis] for axis in axes[-1])
        return cls(vocab_dim, num_columns, entropy_gradient, config.final_softcap, *axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        return self.batch_axes + self.context_axes

    def over_mesh(self, function, ins: str, outs: str):
        """Returns `function(self, ...)` run per device; `ins`, `outs`: h hidden states, k head weights, t numbers per token, s sets."""
        function = functools.partial(function, self)
        if not (self.token_axes + self.model_axes + self.vocab_axes):
            return function
        kernel = [self.model_axes or None] * 2
        kernel[self.vocab_dim] = self.vocab_axes or None
        specs = {
            "h": PartitionSpec(self.batch_axes or None, self.context_axes or None, None),
            "k": PartitionSpec(*kernel),
            "t": PartitionSpec(self.batch_axes or None, self.context_axes or None),
            "s": PartitionSpec(self.batch_axes or None, self.context_axes or None, None),
        }
        in_specs, out_specs = (tuple(specs[letter] for letter in letters) for letters in (ins, outs))
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_columns // VOCAB_CHUNK)

    @property
    def chunk_size(self) -> int:
        """The number of vocabulary columns per chunk, a multiple of 128 (a TPU's lanes) unless it is all columns."""
        return min(-(-self.num_columns // self.num_chunks // 128) * 128, self.num_columns)

    def start(self, i):
        """Returns the first of this device's vocabulary columns in chunk i; the last chunk may overlap the one before it."""
        return jnp.minimum(i * self.chunk_size, self.num_columns - self.chunk_size)

    def split(self, x_BT, fill=0) -> jax.Array:
        """Returns an array [B, T] cut into chunks [N, M]; the last chunk is padded with `fill`, which gets no gradient."""
        num_chunks = max(-(-x_BT.size // max(CHUNK_LOGITS // self.chunk_size, 1)), 1)
        return jnp.pad(x_BT.reshape(-1), (0, -x_BT.size % num_chunks), constant_values=fill).reshape(num_chunks, -1)

    def split_sets(self, kept_BTW) -> jax.Array:
        """Returns kept sets [B, T, W] cut into chunks [N, M, W]; the last chunk is padded with sets that keep all."""
        split = jax.vmap(functools.partial(self.split, fill=-1), in_axes=2, out_axes=2)
        return (
            split(kept_BTW) if kept_BTW.shape[2] else jnp.zeros((*self.split(kept_BTW.sum(axis=2)).shape, 0), jnp.int32)
        )

    def columns(self, kernel, i, dtype):
        """Returns chunk i of the head: (weights [D, V], token id [V] of each column, or -1 if an earlier chunk has it)."""
        start, size = self.start(i), self.chunk_size
        part = jax.lax.dynamic_slice_in_dim(kernel, start, size, axis=self.vocab_dim).astype(dtype)
        if self.model_axes:
            part = fsdp.gather(part, 1 - self.vocab_dim)
        local_V = start + jnp.arange(size, dtype=jnp.int32)
        first = self.num_columns * jax.lax.axis_index(self.vocab_axes) if self.vocab_axes else 0
        ids_V = jnp.where(local_V >= i * size, local_V + first, -1)
        return (part.T if self.vocab_dim == 0 else part), ids_V

    def add_columns(self, d_kernel, i, d_columns_DV):
        """Adds the gradient of chunk i, summed over all tokens of the mesh, to this device's part of the kernel gradient."""
        d_part = d_columns_DV.T if self.vocab_dim == 0 else d_columns_DV
        if self.model_axes:
            d_part = fsdp.scatter(d_part, 1 - self.vocab_dim)
        if others := tuple(axis for axis in self.token_axes if axis not in self.model_axes):
            d_part = jax.lax.psum(d_part, others)
        start = self.start(i)
        before = jax.lax.dynamic_slice_in_dim(d_kernel, start, self.chunk_size, axis=self.vocab_dim)
        after = before + d_part.astype(d_kernel.dtype)  # columns of an earlier chunk get zeros
        return jax.lax.dynamic_update_slice_in_dim(d_kernel, after, start, axis=self.vocab_dim)

    def logits(self, hidden_MD, columns_DV, ids_V, temperature_M, kept_MW):
        """Returns (logits of a chunk over temperature, float32 [M, V], False where they are masked).

        Masked are columns that an earlier chunk has, and those outside a token's kept set.
        """
        raw_MV = jnp.einsum("MD,DV->MV", hidden_MD, columns_DV, preferred_element_type=jnp.float32)
        if self.softcap:
            raw_MV = self.softcap * jnp.tanh(raw_MV / self.softcap)
        in_MV = jnp.broadcast_to(ids_V[None] >= 0, raw_MV.shape)
        if kept_MW.shape[1]:
            M, V = raw_MV.shape
            local_MW = kept_MW - (ids_V[-1] - V + 1)  # the last columns of a chunk are always its own
            column_MW = jnp.where((kept_MW >= 0) & (local_MW >= 0) & (local_MW < V), local_MW, V)
            is_kept_MV = jnp.zeros((M, V), bool).at[jnp.arange(M)[:, None], column_MW].set(True, mode="drop")
            in_MV &= is_kept_MV | (kept_MW[:, :1] < 0)
        return jnp.where(in_MV, raw_MV / temperature_M[:, None], MASKED), in_MV

    def d_logits(self, d_MV, logits_MV, in_MV, temperature_M):
        """Returns the gradient of hidden @ columns, given `d_MV`, the gradient of the result of `logits`."""
        d_MV = d_MV / temperature_M[:, None]
        if self.softcap:
            d_MV *= 1 - (logits_MV * temperature_M[:, None] / self.softcap) ** 2
        return jnp.where(in_MV, d_MV, 0.0)  # masked logits are large enough to square to infinity


def _score_tokens(head: _Head, *args) -> tuple:
    return _score_forward(head, *args)[0]


def _score_forward(head, *args):
    logp_BT, entropy_BT, log_norm_BT = head.over_mesh(_forward, "hkttts", "ttt")(*args)
    return (logp_BT, entropy_BT), (*args, log_norm_BT, entropy_BT)


def _score_backward(head, residuals, cotangents):
    d_hidden_BTD, d_kernel = head.over_mesh(_backward, "hktttstttt", "hk")(*residuals, *cotangents)
    return d_hidden_BTD, d_kernel, None, None, None, None


_score = jax.custom_vjp(_score_tokens, nondiff_argnums=(0,))
_score.defvjp(_score_forward, _score_backward)


def _forward(head: _Head, hidden_BTD, kernel, predictors_BT, temperature_BT, tokens_BT, kept_BTW):
    """Returns (logp, entropy, log normalizer) of this device's tokens, [B, T]."""
    hidden_NMD = _predictors(head, predictors_BT, hidden_BTD)
    tokens_NM, temperature_NM = head.split(tokens_BT), head.split(temperature_BT, fill=1)
    kept_NMW = head.split_sets(kept_BTW)

    def over_vocabulary(i, stats):
        columns_DV, ids_V = head.columns(kernel, i, hidden_BTD.dtype)

        def over_tokens(n, stats):
            max_M, sum_M, moment_M, target_M = (x_NM[n] for x_NM in stats)
            logits_MV, _ = head.logits(hidden_NMD[n], columns_DV, ids_V, temperature_NM[n], kept_NMW[n])
            new_max_M = jnp.maximum(max_M, logits_MV.max(axis=-1))
            below_MV, down_M = logits_MV - new_max_M[:, None], max_M - new_max_M
            weight_MV = jnp.exp(below_MV)
            # The first moment is about the maximum: about 0, large logits would cost the entropy its digits.
            moment_M = jnp.exp(down_M) * (moment_M + down_M * sum_M) + (weight_MV * below_MV).sum(axis=-1)
            sum_M = jnp.exp(down_M) * sum_M + weight_MV.sum(axis=-1)
            target_M += jnp.where(ids_V[None] == tokens_NM[n][:, None], logits_MV, 0.0).sum(axis=-1)
            new = new_max_M, sum_M, moment_M, target_M
            return tuple(x_NM.at[n].set(x_M) for x_NM, x_M in zip(stats, new, strict=True))

        return _loop(len(tokens_NM), over_tokens, stats)

    zero_NM = jnp.zeros(tokens_NM.shape, jnp.float32)
    stats = zero_NM + MASKED, zero_NM, zero_NM, zero_NM
    max_NM, sum_NM, moment_NM, target_NM = _loop(head.num_chunks, over_vocabulary, stats)
    if head.vocab_axes:
        whole_NM = jax.lax.pmax(max_NM, head.vocab_axes)
        down_NM = max_NM - whole_NM
        moment_NM = jax.lax.psum(jnp.exp(down_NM) * (moment_NM + down_NM * sum_NM), head.vocab_axes)
        sum_NM = jax.lax.psum(jnp.exp(down_NM) * sum_NM, head.vocab_axes)
        target_NM = jax.lax.psum(target_NM, head.vocab_axes)
        max_NM = whole_NM
    log_sum_NM = jnp.log(sum_NM)
    logp_NM = (target_NM - max_NM) - log_sum_NM  # in this order it cannot exceed 0
    entropy_NM = log_sum_NM - moment_NM / sum_NM
    results = logp_NM, entropy_NM, max_NM + log_sum_NM
    return tuple(x_NM.reshape(-1)[: tokens_BT.size].reshape(tokens_BT.shape) for x_NM in results)


def _backward(head: _Head, hidden_BTD, kernel, predictors_BT, temperature_BT, tokens_BT, kept_BTW, *others_BT):
    """Returns the gradients of this device's part of the hidden states and of the kernel.

    With p = exp(z - log_norm) the probability of a tempered logit z, and H the entropy:
        d logp / dz_v = [v is the token] - p_v        dH / dz_v = -p_v (log p_v + H)
    """
    gather, dtype = functools.partial(_predictors, head, predictors_BT), hidden_BTD.dtype
    hidden_NMD, temperature_NM = gather(hidden_BTD), head.split(temperature_BT, fill=1)
    tokens_NM, kept_NMW = head.split(tokens_BT), head.split_sets(kept_BTW)
    log_norm_NM, entropy_NM, d_logp_NM, d_entropy_NM = map(head.split, others_BT)

    def over_vocabulary(i, carry):
        d_hidden_NMD, d_kernel = carry
        columns_DV, ids_V = head.columns(kernel, i, dtype)

        def over_tokens(n, carry):
            d_hidden_NMD, d_columns_DV = carry
            logits_MV, in_MV = head.logits(hidden_NMD[n], columns_DV, ids_V, temperature_NM[n], kept_NMW[n])
            log_p_MV = logits_MV - log_norm_NM[n][:, None]
            p_MV = jnp.exp(log_p_MV)
            is_token_MV = ids_V[None] == tokens_NM[n][:, None]
            d_MV = d_logp_NM[n][:, None] * (is_token_MV - p_MV)
            if head.entropy_gradient:
                d_MV -= d_entropy_NM[n][:, None] * p_MV * (log_p_MV + entropy_NM[n][:, None])
            d_MV = head.d_logits(d_MV, logits_MV, in_MV, temperature_NM[n]).astype(dtype)
            d_hidden_MD = jnp.einsum("MV,DV->MD", d_MV, columns_DV, preferred_element_type=jnp.float32)
            d_columns_DV += jnp.einsum("MD,MV->DV", hidden_NMD[n], d_MV, preferred_element_type=jnp.float32)
            return d_hidden_NMD.at[n].add(d_hidden_MD), d_columns_DV

        blank_DV = jnp.zeros(columns_DV.shape, jnp.float32)
        d_hidden_NMD, d_columns_DV = _loop(len(tokens_NM), over_tokens, (d_hidden_NMD, blank_DV))
        return d_hidden_NMD, head.add_columns(d_kernel, i, d_columns_DV)

    blank = jnp.zeros(hidden_NMD.shape, jnp.float32), jnp.zeros_like(kernel)
    d_hidden_NMD, d_kernel = _loop(head.num_chunks, over_vocabulary, blank)
    if head.vocab_axes:
        d_hidden_NMD = jax.lax.psum(d_hidden_NMD, head.vocab_axes)
    (d_hidden_BTD,) = jax.linear_transpose(gather, jax.ShapeDtypeStruct(hidden_BTD.shape, jnp.float32))(d_hidden_NMD)
    return d_hidden_BTD.astype(dtype), d_kernel


def _predictors(head: _Head, predictors_BT, hidden_BTD) -> jax.Array:
    """Returns the hidden state that predicts each token, in chunks [N, M, D]; linear in `hidden_BTD`."""
    if head.context_axes:
        hidden_BTD = jax.lax.all_gather(hidden_BTD, head.context_axes, axis=1, tiled=True)
    B, T, D = hidden_BTD.shape
    return hidden_BTD.reshape(-1, D)[head.split(predictors_BT + jnp.arange(B, dtype=jnp.int32)[:, None] * T)]


def _loop(num: int, body, carry):
    """Runs a `fori_loop`, or a plain call if `num` is 1: a small model needs no loop."""
    return body(0, carry) if num == 1 else jax.lax.fori_loop(0, num, body, carry)
