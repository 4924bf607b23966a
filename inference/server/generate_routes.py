"""POST /inference/v1/generate: token IDs in; IDs, log-probabilities, policy versions and proofs out.

The reply is that of vLLM as RL clients check it: one log-probability per ID, each entry's token written `token_id:<id>`, the
stop token included. `sampling_params.logprobs` of 2 to 20 adds so many alternatives to each. `routed_experts` (inference/engine/routed_experts.py) is present if the server records them, unless
`return_routed_experts` is false; `kept_tokens` (inference/rollouts/kept_sets.py) if `return_kept_tokens` is true. Further fields, which those clients ignore: `policy_versions` (run-length),
`prompt_policy_version`, `prefix_policy_versions` (runs of (end, version): keys of older versions that the prompt reused, only if
`oldest_prefix_version` allows them), `policy_epoch` (of the whole reply), `proofs`, and `untempered_logprobs` if requested. `seed` is that of the
request, or the one drawn for it; each choice has its own. A request with
`policy_version` gets all tokens from that version, or status 409 if the server has another one, is about to, or had to replace it
meanwhile; the same holds for `policy_epoch`, and without either for a reply that would span two epochs. A server with a key adds
`server_signature` to each sample with proofs (inference/rollouts/attestation.py). `proofs`, `policy_version` and `policy_epoch`
may also be in `sampling_params`, for clients that send nothing else.
"""

import asyncio
import base64
import itertools
import uuid
from collections.abc import Sequence

import fastapi
from fastapi import responses

from inference.engine import request as request_lib
from inference.engine import routed_experts
from inference.server import inference_server, schemas, web


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer, max_body_bytes: int) -> None:
    """Adds the route POST /inference/v1/generate (vLLM's API with token IDs) to an app."""

    @app.post("/inference/v1/generate")
    async def generate(http: fastapi.Request):
        body = await web.read_schema(http, schemas.Generate, max_body_bytes)
        adapter = server.adapter_of(body.model)
        sampling = body.sampling_params.model_copy(update=_replay_fields(body))
        num_top = 0 if sampling.logprobs in (None, 0, 1) else sampling.logprobs
        request = server.request(sampling, body.token_ids, top_logprobs=num_top, adapter=adapter)
        future = asyncio.wrap_future(server.scheduler.submit(request))
        completions = await web.run_until_disconnect(http, future)  # a disconnect frees the slots
        start = sampling.routed_experts_prompt_start
        reply = {
            "request_id": body.request_id or f"gen-{uuid.uuid4().hex}",
            "choices": [choice(server, request, c, i, start) for i, c in enumerate(completions)],
            "policy_epoch": completions[0].epoch,
            "seed": request.seed,
            "usage": usage([(request, completions)]),
        }
        return responses.JSONResponse(reply | prompt_logprobs(request, completions[0]))


def usage(answered: Sequence[tuple[request_lib.GenerateRequest, Sequence[request_lib.Completion]]]) -> dict:
    """Returns OpenAI's `usage` object, the token counts of all prompts; `cached_tokens` were found in the prefix cache."""
    num_prompt = sum(len(request.tokens) for request, _ in answered)
    num_new = sum(len(completion.tokens) for _, completions in answered for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(completions[0].num_cached for _, completions in answered)},
    }


def prompt_logprobs(request: request_lib.GenerateRequest, completion: request_lib.Completion) -> dict:
    """Returns {"prompt_logprobs": vLLM's list} if requested, else {}. The first token has None: no token precedes it."""
    if not request.prompt_logprobs or completion.prompt_logprobs is None:
        return {}
    scored = zip(request.tokens, completion.prompt_logprobs, strict=True)
    return {"prompt_logprobs": [None, *({str(token): {"logprob": x}} for token, x in list(scored)[1:])]}


def extra_fields(
    server: inference_server.InferenceServer,
    request: request_lib.GenerateRequest,
    completion: request_lib.Completion,
    index: int,
    experts_start: int,
) -> dict:
    """Returns the fields of finished sample `index` that OpenAI's API lacks: those of a replay, and experts from token `experts_start`."""
    runs = itertools.groupby(completion.versions)
    fields: dict = {
        "seed": seed(request, index),
        "policy_versions": [[version, len(list(run))] for version, run in runs],
        "prompt_policy_version": completion.prompt_version,
    }
    if completion.prefix_versions:
        fields["prefix_policy_versions"] = [*map(list, completion.prefix_versions)]
    if request.proofs:
        fields["proofs"] = base64.b64encode(completion.proofs).decode()
    if vouched := server.vouch(request, completion, index):
        fields["server_signature"] = vouched.hex()
    if completion.raw_logprobs:
        fields["untempered_logprobs"] = completion.raw_logprobs
    if request.kept_tokens:
        fields["kept_tokens"] = base64.b64encode(completion.kept).decode()
    if completion.experts is not None:
        fields["routed_experts"] = routed_experts.reply_field(completion.experts, server.engine.model, experts_start)
    return fields


def seed(request: request_lib.GenerateRequest, index: int) -> int:
    """Returns the seed of sample `index` of a request."""
    return (request.seed + index) % 2**32


def choice(
    server: inference_server.InferenceServer,
    request: request_lib.GenerateRequest,
    completion: request_lib.Completion,
    index: int,
    experts_start: int,
) -> dict:
    """Returns one completion as the reply has it, with the server's signature."""

    def entry(token: int, logprob: float) -> dict:
        return {"token": f"token_id:{token}", "logprob": logprob}

    content = [entry(*pair) for pair in zip(completion.tokens, completion.logprobs, strict=True)]
    for one, top in zip(content, completion.top, strict=False):
        one["top_logprobs"] = [entry(*pair) for pair in top]
    return {
        "index": index,
        "token_ids": completion.tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": content},
        "proofs": "",
    } | extra_fields(server, request, completion, index, experts_start)


def _replay_fields(body: schemas.Generate) -> dict:
    """Returns the fields at the top of a request that count as those of `sampling_params`."""
    named = {name: getattr(body, name) for name in ("proofs", "policy_version", "policy_epoch")}
    return {name: value for name, value in named.items() if value is not None and value is not False}  # 0 is a version
