"""Reads the completions in a reply of an inference server to `POST /inference/v1/generate`, and checks them. Imports no jax."""

import base64
import dataclasses
import itertools
import math
from collections.abc import Collection

import httpx
import numpy as np

from inference.rollouts import attestation, kept_sets
from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib

MAX_OTHER_BYTES = 2**18  # of a reply, without its tokens
TOKEN_BYTES, EXPERTS_BYTES = 256, 2**13  # of a reply, per token and sample, at most; the second if it names experts
MAX_NATS = 1e30  # of a log-probability; larger ones may not be finite in float32


class MalformedReply(ValueError):
    """Raised when an inference server replied with status 200 but an invalid body; a client then tries another server."""


def max_bytes(body: dict) -> int:
    """Returns the size of the largest reply to the request `body`."""
    sampling = body["sampling_params"]
    num_tokens = len(body["token_ids"]) + sampling.get("max_tokens", rollout_lib.MAX_TOKENS)
    num_bytes = TOKEN_BYTES + EXPERTS_BYTES * bool(sampling.get("return_routed_experts"))
    # 4/3 of 4 bytes each, and their number
    num_bytes += 8 * kept_sets.MAX_KEPT * bool(sampling.get("return_kept_tokens"))
    return MAX_OTHER_BYTES + sampling.get("n", 1) * num_tokens * num_bytes


def read(response: httpx.Response, body: dict, keys: Collection[str], run: str) -> list[completion_lib.Completion]:
    """Returns the completions in a server's reply to the request `body`.

    Raises MalformedReply if a completion is invalid, not as requested, or not signed for `run` by one of `keys`. With no keys,
    signatures are not checked.
    """
    sampling, num_prompt = body["sampling_params"], len(body["token_ids"])
    try:
        reply = response.json()
        epoch = reply.get("policy_epoch", 0)
        if type(epoch) is not int or not 0 <= epoch < 2**48 or epoch != body.get("policy_epoch", epoch):
            raise ValueError(f"server sent policy epoch {str(epoch)[:80]}; {body.get('policy_epoch')} was requested")
        samples = [_read_choice(choice, sampling, num_prompt, epoch) for choice in reply["choices"]]
        if len(samples) != sampling.get("n", 1):
            raise ValueError(f"server sent {len(samples)} samples; {sampling.get('n', 1)} were requested")
        reused = {version for sample in samples for _, version in sample.prefix_versions}
        wrong = reused.union(*map(completion_lib.Completion.all_versions, samples)) - {body.get("policy_version")}
        if "policy_version" in body and wrong:
            raise ValueError(f"server sent policy versions {sorted(wrong)[:4]}; {body['policy_version']} was requested")
        if keys:
            signed = enumerate(zip(samples, reply["choices"], strict=True))
            samples = [_read_signature(sample, choice, index, body, keys, run) for index, (sample, choice) in signed]
        return samples
    except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedReply(f"server sent a malformed reply: {type(error).__name__}: {str(error)[:200]}") from error
    except ValueError as error:
        raise MalformedReply(str(error)[:500]) from error


def _read_signature(
    sample: completion_lib.Completion, choice: dict, index: int, body: dict, servers: Collection[str], run: str
) -> completion_lib.Completion:
    """Returns a sample with the signature of one of `servers`, or without one if "" is among them.

    Raises ValueError unless it signed sample `index` as an answer to `body`.
    """
    sampling, defaults = (
        body["sampling_params"],
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_routed_experts": False},
    )
    signature = bytes.fromhex(choice.get("server_signature", ""))
    answer = attestation.message(
        body["token_ids"],
        sample,
        temperature=sampling.get("temperature", 1.0),
        seed=(sampling.get("seed", 0) + index) % 2**32,
        settings=defaults | sampling | {"run": run},
    )
    for server in servers:
        if server and rollout_lib.signed(server, signature, answer):
            return dataclasses.replace(sample, server=server, server_signature=signature)
    if "" in servers:
        return sample
    raise ValueError(f"server sent a sample without a valid signature of its key {min(servers)[:16]}")


def _read_choice(choice: dict, sampling: dict, num_prompt: int, epoch: int) -> completion_lib.Completion:
    """Converts one entry of the reply's `choices` to a completion. Raises ValueError with the server's mistake if it is invalid."""
    tokens = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    runs = choice["policy_versions"]
    integers = [*tokens, *(value for run in runs for value in run), choice["prompt_policy_version"]]
    if any(type(value) is not int or not 0 <= value < 2**31 for value in integers):
        raise ValueError("server sent a token ID or a policy version that is not an integer in 0..2^31 - 1")
    if sum(count for _, count in runs) > len(tokens):  # before they are expanded: a count may be huge
        raise ValueError(f"server sent {len(tokens)} tokens, but policy_versions {runs[:4]} are for more")
    versions = [version for version, count in runs for _ in range(count)]
    if not len(tokens) == len(logprobs) == len(versions):
        counts = f"{len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions"
        raise ValueError(f"server sent {counts}; they must be equally many")
    if not tokens or not all(math.isfinite(logprob) and abs(logprob) < MAX_NATS for logprob in logprobs):
        raise ValueError("server sent an empty completion or a log-probability that is not finite")
    if len(tokens) > sampling.get("max_tokens", len(tokens)):
        raise ValueError(f"server sent {len(tokens)} tokens; at most {sampling['max_tokens']} were requested")
    if (reason := choice["finish_reason"]) not in rollout_lib.FINISH_REASONS:
        raise ValueError(f"server sent the finish_reason {str(reason)[:80]!r}, which a rollout does not allow")
    proofs = base64.b64decode(choice["proofs"], validate=True)
    if len(proofs) > (most := rollout_lib.MAX_PROOF_BYTES):
        raise ValueError(f"server sent {len(proofs)} bytes of proofs, more than {most}, the maximum")
    has_experts, num_rows = sampling.get("return_routed_experts"), num_prompt + len(tokens) - 1
    experts = _read_experts(choice["routed_experts"], num_rows) if has_experts else None
    kept = base64.b64decode(choice["kept_tokens"], validate=True) if sampling.get("return_kept_tokens") else b""
    if sampling.get("return_kept_tokens"):
        kept_sets.read(kept, [len(tokens)])
    prompt_version, oldest = choice["prompt_policy_version"], sampling.get("oldest_prefix_version")
    prefix = _read_prefix(choice.get("prefix_policy_versions", []), num_prompt, oldest, prompt_version)
    return completion_lib.Completion(
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        prompt_version=prompt_version,
        finish_reason=reason,
        proofs=proofs,
        experts=experts,
        epoch=epoch,
        kept=kept,
        prefix_versions=prefix,
    )


def _read_prefix(runs: list, num_prompt: int, oldest: int | None, prompt_version: int) -> tuple[tuple[int, int], ...]:
    """Returns the (end, version) runs of reused keys in a reply. Raises ValueError if they are not in order, or were not allowed."""
    found = tuple((end, version) for end, version in runs[:num_prompt])
    if any(type(value) is not int for run in found for value in run) or (found and oldest is None):
        raise ValueError(f"server sent prefix_policy_versions {str(found)[:80]}, which were not requested")
    ends, versions = [0, *(end for end, _ in found)], [*(version for _, version in found), prompt_version]
    is_in_order = all(one < other for values in (ends, versions) for one, other in itertools.pairwise(values))
    if not is_in_order or ends[-1] >= num_prompt or (found and versions[0] < (oldest or 0)):
        raise ValueError(
            f"server sent prefix_policy_versions {str(found)[:80]} of {num_prompt} tokens, from {oldest} on"
        )
    return found


def _read_experts(field: dict, num_rows: int) -> np.ndarray:
    shape, dtype = field["shape"], str(field["dtype"])[:80]
    if dtype not in ("uint8", "uint16") or field["start"] != 0:
        found = f"{dtype!r} from token {str(field['start'])[:80]}"
        raise ValueError(f"server sent routed_experts of {found}, not uint8 or uint16 from token 0")
    if len(shape) != 3 or any(type(size) is not int or not 0 < size < 2**31 for size in shape) or shape[0] != num_rows:
        raise ValueError(f"server sent routed_experts of shape {str(shape)[:80]}; {num_rows} rows were requested")
    data = base64.b64decode(field["data"], validate=True)
    dtype = np.dtype(dtype).newbyteorder("<")
    if len(data) != math.prod(shape) * dtype.itemsize or len(data) > rollout_lib.MAX_ROUTED_BYTES:
        raise ValueError(f"server sent {len(data)} bytes of routed_experts, too many or not of shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape)
