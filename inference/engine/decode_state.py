"""The engine's state between two calls: prefilled prompts and running slots, as trees of arrays, and their layout.

On a mesh the slots are split over the batch axes (data, fsdp, expert), and the key heads of the cache over `tensor`. Every
program states this layout of its results (`placed`), so that they enter the next one without a copy.

Letters: B slots, P prompts of a prefill.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from inference.engine import kv_cache, paged_cache, sampler
from inference.engine import request as request_lib
from sharding.mesh import rules

# Checked on the device, per sequence; the scheduler checks further ones after each call.
MAX_STOP_IDS = request_lib.MAX_DELAYED_STOPS
Array = sampler.Array


@struct.dataclass
class Request:
    """Sampling parameters, limits, and requested outputs of each sequence, as arrays with one row per slot [B] or prompt [P]."""

    sampling: sampler.Sampling
    max_tokens: Array  # int32, new tokens at most
    min_tokens: Array  # int32, new tokens before a stop id may be sampled
    stop_ids: Array  # int32 [B, MAX_STOP_IDS], -1 where unused
    want_proof: Array  # bool
    want_raw: Array  # bool, also the log-probability under softmax(logits)
    want_top: Array  # bool, also the MAX_TOP likeliest tokens


@struct.dataclass
class Prefix:
    """Prefilled prompts, ready to be copied into slots: keys and values, last tokens, lengths."""

    cache: kv_cache.Cache
    last_token: Array  # int32 [P]
    length: Array  # int32 [P]
    experts: tuple[Array, ...] = ()  # of the prompts from their start, [P, .., L, X] each, if they are recorded


@struct.dataclass
class DecodeState:
    """The slots of one decode call, as arrays. `token` is the next token to run, at `position`; a slot decodes while `active`."""

    cache: kv_cache.Cache | paged_cache.PagedCache
    token: Array  # int32 [B]
    position: Array  # int32 [B]
    generated: Array  # int32 [B], new tokens so far
    active: Array  # bool [B]
    request: Request
    ring: jax.Array  # last hidden states by new token (inference/proofs/window.py)


def layout(tree, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh):
    """Returns the `PartitionSpec` of each array of a `DecodeState`, a `Prefix` or a cache."""
    if isinstance(tree, tuple):
        return kv_cache.layout(tree, mesh)

    def of(x):
        return rules.fitting(mesh, x.shape, ("batch", *[None] * (x.ndim - 1)))

    is_paged = isinstance(tree.cache, paged_cache.PagedCache)
    cache = paged_cache.layout(tree.cache, mesh) if is_paged else kv_cache.layout(tree.cache, mesh)
    return jax.tree.map(of, tree.replace(cache=())).replace(cache=cache)


def placed(tree):
    """Constrains each array of a program's result to its `layout`; without a mesh, returns the tree unchanged."""
    mesh = rules.several_devices()
    if mesh is None:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, layout(tree, mesh))


def request_arrays(requests: Sequence[request_lib.GenerateRequest], size: int) -> Request:
    """Converts requests to a `Request` of numpy arrays with `size` rows; padding rows have temperature 1 and one token."""

    def column(value, fill, dtype):
        return np.array([*map(value, requests), *[fill] * (size - len(requests))], dtype)

    stop_ids = np.full((size, MAX_STOP_IDS), -1, np.int32)
    bias_ids = np.full((size, request_lib.MAX_BIAS), -1, np.int32)
    bias = np.zeros((size, request_lib.MAX_BIAS), np.float32)
    for row, request in enumerate(requests):
        stops = request.stop_ids[:MAX_STOP_IDS]
        stop_ids[row, : len(stops)] = stops
        added = dict(request.logit_bias)
        for at, token in enumerate(request.allowed_ids or added):
            bias_ids[row, at], bias[row, at] = token, added.get(token, 0.0)
    return Request(
        sampling=sampler.Sampling(
            seed=column(lambda r: r.seed, 0, np.uint32),
            temperature=column(lambda r: r.temperature, 1, np.float32),
            top_k=column(lambda r: r.top_k, 0, np.int32),
            top_p=column(lambda r: r.top_p, 1, np.float32),
            min_p=column(lambda r: r.min_p, 0, np.float32),
            bias_ids=bias_ids,
            bias=bias,
            allows_biased_only=column(lambda r: bool(r.allowed_ids), False, bool),
        ),
        max_tokens=column(lambda r: min(r.max_tokens, 2**31 - 1), 1, np.int32),
        min_tokens=column(lambda r: r.min_tokens, 0, np.int32),
        stop_ids=stop_ids,
        want_proof=column(lambda r: r.proofs, False, bool),
        want_raw=column(lambda r: r.raw_logprobs, False, bool),
        want_top=column(lambda r: r.top_logprobs > 0, False, bool),
    )


def is_plain(request: Request, active_B: np.ndarray) -> bool:
    """Returns True if no active sequence has a filter, a bias, a least number of tokens, or wants more than tokens, log-probabilities, and proofs."""
    sampling = request.sampling
    filters_B = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0) | (request.min_tokens > 0)
    biased_B = np.asarray(sampling.allows_biased_only) | (np.asarray(sampling.bias_ids) >= 0).any(axis=1)
    return not (active_B & (filters_B | biased_B | request.want_raw | request.want_top)).any()


def plain(request: Request) -> Request:
    """Returns the request with constants for which `is_plain` is True, so that a compiled program omits filters, biases, and extra outputs."""
    zeros_B = np.zeros(request.min_tokens.shape, np.int32)
    filters = {"top_k": zeros_B, "top_p": zeros_B + np.float32(1), "min_p": zeros_B.astype(np.float32)}
    sampling = dataclasses.replace(request.sampling, **filters, bias_ids=None, bias=None, allows_biased_only=None)
    wants = {"want_raw": zeros_B > 0, "want_top": zeros_B > 0}
    return dataclasses.replace(request, sampling=sampling, min_tokens=zeros_B, **wants)
