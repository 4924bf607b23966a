"""POST /inference/v1/generate: token IDs in; IDs, log-probabilities, policy versions and proofs out.

The reply is that of vLLM as RL clients check it: one log-probability per ID, each entry's token written `token_id:<id>`, the
stop token included. `sampling_params.logprobs` of 2 to 20 adds so many alternatives to each. `routed_experts` (models/routed_experts.py) is present if the server records them, unless
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

import fastapi
import numpy as np
from fastapi import responses

from inference.engine import request as request_lib
from inference.rollouts import completion as completion_lib
from inference.server import inference_server, replies, schemas, web


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer, max_body_bytes: int) -> None:
    """Adds the route POST /inference/v1/generate (vLLM's API with token IDs) to an app."""

    @app.post("/inference/v1/generate")
    async def generate(http: fastapi.Request):
        body = await web.read_schema(http, schemas.Generate, max_body_bytes)
        adapter = server.adapter_of(body.model)
        top = {name: getattr(body, name) for name in ("proofs", "policy_version", "policy_epoch")}
        # Those that were sent: 0 is a version.
        given = {name: value for name, value in top.items() if value is not None and value is not False}
        sampling = body.sampling_params.model_copy(update=given)
        num_top = 0 if sampling.logprobs in (None, 0, 1) else sampling.logprobs
        request = server.make_request(sampling, body.token_ids, top_logprobs=num_top, adapter=adapter)
        future = asyncio.wrap_future(server.scheduler.submit(request))
        completions = await web.run_until_disconnect(http, future)  # a disconnect frees the slots
        start = sampling.routed_experts_prompt_start
        reply = {
            "request_id": body.request_id or f"gen-{uuid.uuid4().hex}",
            "choices": [choice(server, request, c, i, start) for i, c in enumerate(completions)],
            "policy_epoch": completions[0].epoch,
            "seed": request.seed,
            "usage": replies.usage([(request, completions)]),
        }
        return responses.JSONResponse(reply | prompt_logprobs(request, completions[0]))


def prompt_logprobs(request: request_lib.GenerateRequest, completion: completion_lib.Completion) -> dict:
    """Returns {"prompt_logprobs": vLLM's list} if requested, else {}. The first token has None: no token precedes it."""
    if not request.prompt_logprobs or completion.prompt_logprobs is None:
        return {}
    scored = zip(request.tokens, completion.prompt_logprobs, strict=True)
    return {"prompt_logprobs": [None, *({str(token): {"logprob": x}} for token, x in list(scored)[1:])]}


def extra_fields(
    server: inference_server.InferenceServer,
    request: request_lib.GenerateRequest,
    completion: completion_lib.Completion,
    index: int,
    experts_start: int,
) -> dict:
    """Returns the fields of finished sample `index` that OpenAI's API lacks: those of a replay, and experts from token `experts_start`."""
    runs = itertools.groupby(completion.versions)
    fields: dict = {
        "seed": request.seed_of(index),
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
        fields["routed_experts"] = _experts_field(completion.experts, experts_start)
    return fields


def choice(
    server: inference_server.InferenceServer,
    request: request_lib.GenerateRequest,
    completion: completion_lib.Completion,
    index: int,
    experts_start: int,
) -> dict:
    """Returns one completion in the form of the route's reply, with the server's signature."""
    own = extra_fields(server, request, completion, index, experts_start)
    return replies.token_choice(index, completion) | {"proofs": ""} | own


def _experts_field(experts_TLX: np.ndarray, start: int) -> dict:
    """Returns the field `routed_experts` for the tokens from `start` on; `data` is first, because clients search the text of the reply for it."""
    rows = experts_TLX[start:]
    data = base64.b64encode(rows.astype(rows.dtype.newbyteorder("<")).tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "start": start, "dtype": str(rows.dtype)}
