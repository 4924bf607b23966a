"""The signature by which an inference server vouches for one sample of its reply.

1. A server with a key signs each sample of a plain request: the question (prompt, seed, temperature, filters, length) and the answer
   (tokens, log-probabilities, policy versions, epoch, ending, proofs, experts).
2. The worker's client verifies the signature against the key that the run names, and the rollout carries both.
3. If a replay refuses such a rollout, the server is at fault: the worker could not know (rl/verification/responsibility.py). A worker that
   changes anything, or that asked for something else than the run prescribes, has no signature that fits.

Left out: requests with a bias, stops of their own, or without proofs. They cannot be replayed, so no signature is given.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inference.rollouts import rollout as rollout_lib

# Of a request, which a rollout does not name.
SETTINGS = ("top_k", "top_p", "min_p", "max_tokens", "return_routed_experts")


def message(
    *,
    tokens: Sequence[int] | np.ndarray,
    num_prompt: int,
    logprobs: Sequence[float] | np.ndarray,
    versions: Sequence[int] | np.ndarray,
    prompt_version: int,
    epoch: int,
    temperature: float,
    seed: int,
    finish_reason: str,
    proofs: bytes,
    experts: np.ndarray | None,
    settings: Mapping[str, Any],
) -> bytes:
    """Returns the bytes that a server signs for one sample: SHA-256 over all arguments. `settings` has the values of `SETTINGS`.

    `tokens` are prompt and completion; `logprobs` and `versions` have an entry per token of the completion. `experts` are of
    all tokens but the last, or None.
    """
    hasher = hashlib.sha256(b"intellax/sample/1")
    arrays = [np.asarray(tokens, "<i4"), np.asarray(versions, "<i4"), _capped(logprobs)]
    parts = [array.tobytes() for array in arrays]
    parts += [struct.pack("<3q", num_prompt, prompt_version, epoch), struct.pack("<dq", temperature, seed)]
    fixed = {name: settings[name] for name in SETTINGS}
    fixed |= {name: float(fixed[name]) for name in ("top_p", "min_p")} | {"top_k": max(fixed["top_k"], 0)}
    parts += [json.dumps(fixed, sort_keys=True).encode(), finish_reason.encode(), proofs]
    if experts is not None:
        parts.append(struct.pack("<4q", *experts.shape, experts.itemsize) + rollout_lib.little_endian(experts))
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)) + part)
    return hasher.digest()


def sign(key: rollout_lib.WorkerKey, **fields: Any) -> bytes:
    """Returns the signature of a sample by the server's key. The fields are the arguments of `message`."""
    return key.private.sign(message(**fields))


def is_signed(server: str, signature: bytes, **fields: Any) -> bool:
    """Returns True if `server`, a public key in hex, signed the sample with these arguments of `message`."""
    return rollout_lib.signed(server, signature, message(**fields))


def fits(rollout: rollout_lib.Rollout, settings: Mapping[str, Any]) -> bool:
    """Returns True if the server that a well-formed rollout names vouches for all of it under the `settings` of a run. Never raises."""
    P = rollout.prompt_length
    versions = rollout.versions
    if not rollout.sampled_mask[P:].all() or (versions[:P] != versions[0]).any():
        return False
    return is_signed(
        rollout.server,
        rollout.server_signature,
        tokens=rollout.tokens,
        num_prompt=P,
        logprobs=rollout.logprobs[P:],
        versions=versions[P:],
        prompt_version=int(versions[0]),
        epoch=int(rollout.epoch),
        temperature=float(rollout.temperature),
        seed=int(rollout.seed),
        finish_reason=rollout.finish_reason,
        proofs=rollout.proofs,
        experts=rollout.routed_experts,
        settings=settings,
    )


def _capped(logprobs: Sequence[float] | np.ndarray) -> bytes | np.ndarray:
    """Returns log-probabilities as a worker stores them: float32, at most 0, and without a negative 0."""
    return (np.minimum(np.asarray(logprobs, "<f4"), 0) + 0).astype("<f4")
