"""POST /inference/v1/generate: token ids in; ids, log-probabilities, versions and proofs out.

The contract is that of vLLM-based RL clients, whose checks it passes: one log-probability per id, each entry's token
spelled `token_id:<id>`, the stop id included. `routed_experts` (routing.py) is there where the server records them, unless
`return_routed_experts` is false. Fields of ours, which they ignore: `policy_versions` (run-length), `prompt_policy_version`,
`proofs`, and `untempered_logprobs` where asked for.
"""

import asyncio
import base64
import itertools
import uuid
from collections.abc import Sequence

import fastapi
from fastapi import responses

from inference.engine import routed_experts
from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server, schemas, web


def add(app: fastapi.FastAPI, server: inference_server.InferenceServer, max_body_bytes: int) -> None:
    @app.post("/inference/v1/generate")
    async def generate(request: fastapi.Request):
        body = schemas.Generate.model_validate_json(await web.read_body(request, max_body_bytes))
        asked = server.request(body.sampling_params, body.token_ids, proofs=bool(body.proofs))
        future = asyncio.wrap_future(server.scheduler.submit(asked))
        completions = await web.until_gone(request, future)  # a client that hangs up frees its slots
        return responses.JSONResponse(reply(server, body, asked, completions))


def reply(
    server: inference_server.InferenceServer,
    body: schemas.Generate,
    asked: scheduler_lib.GenerateRequest,
    completions: list[scheduler_lib.Completion],
) -> dict:
    start = body.sampling_params.routed_experts_prompt_start or 0
    sent = {
        "request_id": body.request_id or f"gen-{uuid.uuid4().hex}",
        "choices": [_choice(index, c) | experts(server, c, start) for index, c in enumerate(completions)],
        "usage": usage([(asked, completions)]),
    }
    if asked.prompt_logprobs:
        scored = zip(body.token_ids, completions[0].prompt_logprobs, strict=True)
        sent["prompt_logprobs"] = [{str(token): {"logprob": logprob}} for token, logprob in scored]
        sent["prompt_logprobs"][0] = None  # nothing comes before it
    return sent


def usage(answered: Sequence[tuple[scheduler_lib.GenerateRequest, Sequence[scheduler_lib.Completion]]]) -> dict:
    """Of all prompts of a request, as in OpenAI's API; `cached_tokens` are those of prompts whose keys were there already."""
    num_prompt = sum(len(asked.tokens) for asked, _ in answered)
    num_new = sum(len(completion.tokens) for _, completions in answered for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(completions[0].num_cached for _, completions in answered)},
    }


def experts(server: inference_server.InferenceServer, completion: scheduler_lib.Completion, start: int) -> dict:
    """`routed_experts` of the tokens from `start` on, if they were asked for."""
    if completion.experts is None:
        return {}
    return {"routed_experts": routed_experts.reply_field(completion.experts, server.engine.model, start)}


def policy_versions(completion: scheduler_lib.Completion) -> list[list[int]]:
    """[[version, number of tokens], ...]."""
    return [[version, len(list(run))] for version, run in itertools.groupby(completion.versions)]


def _choice(index: int, completion: scheduler_lib.Completion) -> dict:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
    ]
    sent = {
        "index": index,
        "token_ids": completion.tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": content},
        "policy_versions": policy_versions(completion),
        "prompt_policy_version": completion.prompt_version,
        "proofs": base64.b64encode(completion.proofs).decode(),
    }
    if completion.raw_logprobs:
        sent["untempered_logprobs"] = completion.raw_logprobs
    return sent
