"""A completion: one sample of a request, as the engine makes it, the routes send it, and a client reads it again. Imports no jax.

`of_calls` has the fields of a rollout that follow from completions: those of one call, or of several that extend one token stream.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Completion:
    """One sample of a prompt. Lists have one entry per generated token, the stop token included."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    prompt_version: int  # the policy version that prefilled the prompt
    finish_reason: str = ""  # "stop" | "length"; "": not finished
    proofs: bytes = b""  # TOPLOC, if asked for
    # uint8 or uint16 [prompt + new tokens - 1, layers, experts per token]: the last token was not run; if asked for.
    experts: np.ndarray | None = dataclasses.field(default=None, compare=False)
    epoch: int = 0  # of all these versions
    kept: bytes = b""  # of inference/rollouts/kept_sets.py, if asked for
    prefix_versions: Sequence[tuple[int, int]] = ()  # (end, older version): keys of the prompt that were reused
    server: str = ""  # public key of the server that vouches for this sample; "" if none does
    server_signature: bytes = b""  # inference/rollouts/attestation.py
    # The following fields are for clients other than workers, which do not read them.
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)  # without temperature and filters, if asked for
    # Per token the likeliest (ID, log-probability), best first, if asked for.
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] | None = None  # one per prompt token, 0 for the first
    num_cached: int = dataclasses.field(default=0, compare=False)  # prompt tokens found in the prefix cache

    def all_versions(self) -> set[int]:
        """Returns the policy versions that computed the prompt and the tokens."""
        return {self.prompt_version, *self.versions}


Call = tuple[int, int, Completion]  # of a token stream: columns [first, end) are the completion


def of_calls(tokens: np.ndarray, calls: Sequence[Call]) -> dict[str, Any]:
    """Returns the fields of a `Rollout` with these tokens, int32 [T], that follow from its calls, in order."""
    T, before, reused, completions = len(tokens), 0, [], [one for _, _, one in calls]
    mask_T, logprobs_T, versions_T = np.zeros(T, bool), np.zeros(T, np.float32), np.zeros(T, np.int32)
    for number, (start, end, one) in enumerate(calls):
        mask_T[start:end] = True
        logprobs_T[start:end] = np.minimum(one.logprobs, 0)
        versions_T[before:start] = one.prompt_version
        versions_T[start:end] = one.versions
        reused += [(number, prefix_end, version) for prefix_end, version in one.prefix_versions]
        before = end
    experts = _experts(calls)
    server, signature = _server(calls, experts)
    return {
        "tokens": tokens,
        "sampled_mask": mask_T,
        "logprobs": logprobs_T,
        "versions": versions_T,
        "finish_reason": completions[-1].finish_reason,
        "proofs": b"".join(one.proofs for one in completions),
        "routed_experts": experts,
        "epoch": completions[0].epoch,
        "server": server,
        "server_signature": signature,
        "kept": b"".join(one.kept for one in completions),
        "prefix_versions": np.array(reused, np.int32) if reused else None,
    }


def _experts(calls: Sequence[Call]) -> np.ndarray | None:
    """Returns the experts of all tokens but the last, those of each token from the first call that ran it; None if calls name none."""
    parts, size = [], 0
    for _, end, one in calls:
        if one.experts is None:
            return None
        parts.append(one.experts[size : end - 1])
        size = end - 1
    return np.concatenate(parts)


def _server(calls: Sequence[Call], experts: np.ndarray | None) -> tuple[str, bytes]:
    """Returns (the server that vouches for all calls of a stream, its signatures), or ("", b"")."""
    is_one = len({one.server for _, _, one in calls}) == 1
    # A server signs the experts of the whole prompt; near ties in routing may fall to others in a later call.
    own = [(one.experts, end) for _, end, one in calls]
    is_same = experts is None or all(one is not None and np.array_equal(one, experts[: end - 1]) for one, end in own)
    if not (is_one and is_same):
        return "", b""
    return calls[0][2].server, b"".join(one.server_signature for _, _, one in calls)
