"""A completion: one sample of a request, as the engine makes it, the routes send it, and a client reads it again. Imports no jax."""

import dataclasses
from collections.abc import Sequence

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
