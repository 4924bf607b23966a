"""The signature by which an inference server vouches for one sample of its reply.

1. A server with a key signs each sample of a plain request: the run, the question (prompt, seed, temperature, filters, length), and the
   answer (tokens, log-probabilities, policy versions, epoch, ending, proofs, experts, kept sets).
2. The worker's client verifies the signature against the key that the run names, and the rollout carries both.
3. If a replay refuses such a rollout, the server is at fault: the worker could not know (rl/trust/verification/evidence_log.py). A worker that
   changes anything, or that asked for something else than the run prescribes, has no signature that fits.

Left out: requests with a bias, stops of their own, or without proofs. They cannot be replayed, so no signature is given.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib

# Of a request, which a rollout does not name. "run" is the public key of the run whose weights the server serves: another run that
# registers the same server could else be given its samples.
SETTINGS = ("run", "top_k", "top_p", "min_p", "max_tokens", "return_routed_experts")


def message(
    prompt: Sequence[int] | np.ndarray,
    answer: completion_lib.Completion,
    *,
    temperature: float,
    seed: int,
    settings: Mapping[str, Any],
) -> bytes:
    """Returns the bytes that a server signs for one sample: SHA-256 over all arguments. `settings` has the values of `SETTINGS`."""
    hasher = hashlib.sha256(b"intellax/sample/1")
    tokens = np.concatenate([np.asarray(prompt, "<i4"), np.asarray(answer.tokens, "<i4")])
    parts = [array.tobytes() for array in (tokens, np.asarray(answer.versions, "<i4"), _capped(answer.logprobs))]
    parts += [
        struct.pack("<3q", len(prompt), answer.prompt_version, answer.epoch),
        struct.pack("<dq", temperature, seed),
    ]
    fixed = {name: settings[name] for name in SETTINGS}
    fixed |= {name: float(fixed[name]) for name in ("top_p", "min_p")} | {"top_k": max(fixed["top_k"], 0)}
    parts += [json.dumps(fixed, sort_keys=True).encode(), answer.finish_reason.encode(), answer.proofs]
    if (experts := answer.experts) is not None:
        parts.append(struct.pack("<4q", *experts.shape, experts.itemsize) + rollout_lib.little_endian(experts))
    parts += [b"kept", answer.kept] if answer.kept else []
    if answer.prefix_versions:
        parts += [b"prefix_versions", np.asarray(answer.prefix_versions, "<i4").tobytes()]
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)) + part)
    return hasher.digest()


def of_call(
    rollout: rollout_lib.Rollout, index: int, finish_reason: str, proofs: bytes, settings: Mapping[str, Any]
) -> bytes:
    """Returns the message for call `index` of a well-formed rollout, which ended with `finish_reason` and has these proofs."""
    start, end = rollout.spans[index]
    answer = completion_lib.Completion(
        tokens=rollout.tokens[start:end].tolist(),
        logprobs=rollout.logprobs[start:end].tolist(),
        versions=rollout.versions[start:end].tolist(),
        prompt_version=int(rollout.versions[start - 1]),
        finish_reason=finish_reason,
        proofs=proofs,
        experts=None if rollout.routed_experts is None else rollout.routed_experts[: end - 1],
        epoch=int(rollout.epoch),
        kept=rollout_lib.kept_by_call(rollout)[index],
        prefix_versions=rollout.prefix_runs(index),
    )
    if rollout.call_limits is not None:
        settings = {**settings, "max_tokens": int(rollout.call_limits[index])}
    return message(
        rollout.tokens[:start],
        answer,
        temperature=float(rollout.temperature),
        seed=int(rollout.seed),
        settings=settings,
    )


def fits(rollout: rollout_lib.Rollout, settings: Mapping[str, Any], hidden_dim: int = 0) -> bool:
    """Returns True if the server that a well-formed rollout names vouches for all of it under the `settings` of a run. Never raises.

    `hidden_dim` of the model is needed for several calls.
    """
    spans, versions, before = rollout.spans, rollout.versions, 0
    if rollout.calls is None and not rollout.sampled_mask[rollout.prompt_length :].all():
        return False
    for index, proofs in enumerate(rollout_lib.proofs_by_call(rollout, hidden_dim)):
        start, end = spans[index]
        if (versions[before:start] != versions[start - 1]).any():
            return False
        signature, before = rollout.server_signature[64 * index : 64 * (index + 1)], end
        # Only the last ending is recorded; `checks.ending` sees whether an earlier one was possible.
        endings = (rollout.finish_reason,) if end == spans[-1][1] else rollout_lib.FINISH_REASONS
        messages = (of_call(rollout, index, ending, proofs, settings) for ending in endings)
        if not any(rollout_lib.signed(rollout.server, signature, one) for one in messages):
            return False
    return True


def _capped(logprobs: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns log-probabilities as a worker stores them: float32, at most 0, and without a negative 0."""
    return (np.minimum(np.asarray(logprobs, "<f4"), 0) + 0).astype("<f4")
