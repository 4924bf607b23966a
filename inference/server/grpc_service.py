"""JetStream's gRPC service (`Orchestrator.Decode`, `HealthCheck`) on this server's scheduler, for JetStream's own clients.

1. A request has text or token IDs, and max_tokens. It is sampled at temperature 1 with a random seed, because JetStream's
   protocol has no sampling fields.
   The seed is sent as the metadata `seed` of the reply.
2. The tokens of each engine call are sent as one message. The stop token is left out, as by JetStream's Driver.
3. A call without the server's API key is refused.
4. A request that cannot be served ends with INVALID_ARGUMENT and the reason, a full queue with RESOURCE_EXHAUSTED.

docs/decisions/inference.md explains why JetStream's own server and Driver are not used.
"""

import hmac
import os
import queue
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from inference.engine import request as request_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server

MAX_RPCS = 256  # each has a thread
MESSAGES: Any = jetstream_pb2  # its classes exist only at run time


def start(
    server: inference_server.InferenceServer, host: str, port: int, *, api_key: str | None = None
) -> tuple[int, grpc.Server]:
    """Starts the gRPC service on `port`, or on a free port if 0. Returns (the port, the running gRPC server).

    Clients must send `api_key` as metadata, except for health checks; None requires no key.
    Raises ValueError if the port is taken. `server.stop(grace_s).wait()` waits up to `grace_s` for running calls.
    """
    threads = futures.ThreadPoolExecutor(MAX_RPCS, "grpc")
    options = [("grpc.so_reuseport", 0)]  # or two servers could share one port, each with some of the clients
    grpc_server = grpc.server(threads, options=options, maximum_concurrent_rpcs=MAX_RPCS)
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(_Orchestrator(server, api_key), grpc_server)
    try:
        bound = grpc_server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {host}:{port} for gRPC; use another port, or 0 for a free one") from error
    grpc_server.start()
    return bound, grpc_server


class _Orchestrator(jetstream_pb2_grpc.OrchestratorServicer):
    def __init__(self, server: inference_server.InferenceServer, api_key: str | None):
        self._scheduler, self._tokenizer = server.scheduler, server.engine.tokenizer
        self._expected = f"Bearer {api_key}" if api_key else ""

    def Decode(self, request, context) -> Iterator:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if self._expected and not hmac.compare_digest(given.encode(), self._expected.encode()):
            message = "the API key is missing or wrong; send the metadata authorization: Bearer <key>"
            context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        is_text = request.WhichOneof("content") == "text_content"
        text, ids = request.text_content.text, request.token_content.token_ids
        generate = request_lib.GenerateRequest(
            tokens=self._tokenizer.prompt_ids(text) if is_text else list(ids),
            max_tokens=request.max_tokens,
            seed=int.from_bytes(os.urandom(4), "little"),
            stop_ids=self._tokenizer.stop_ids,
        )
        pieces: queue.SimpleQueue = queue.SimpleQueue()
        num_sent = 0

        def listen(index, completion):  # in the scheduler's thread
            nonlocal num_sent
            new, num_sent = completion.tokens[num_sent:], len(completion.tokens)
            pieces.put((new, bool(completion.finish_reason)))

        try:
            future = self._scheduler.submit(generate, listen)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except scheduler_lib.Overloaded as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except scheduler_lib.Closed as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        context.send_initial_metadata((("seed", str(generate.seed)),))
        future.add_done_callback(lambda _: pieces.put(None))
        context.add_callback(lambda: pieces.put(None))  # the client disconnected
        try:
            yield from self._replies(pieces, with_text=is_text)
            if context.is_active():
                future.result()
        except (scheduler_lib.Fault, scheduler_lib.Closed) as error:
            context.abort(grpc.StatusCode.INTERNAL, str(error))
        finally:
            future.cancel()

    def HealthCheck(self, request, context):
        return MESSAGES.HealthCheckResponse(is_live=self._scheduler.is_alive)

    def _replies(self, pieces: queue.SimpleQueue, *, with_text: bool) -> Iterator:
        stream = self._tokenizer.text_stream()
        content = MESSAGES.DecodeResponse.StreamContent
        for new, final in iter(pieces.get, None):
            tokens = [token for token in new if token not in self._tokenizer.stop_ids]
            text = stream.push(tokens, final=final) if with_text else ""
            sample = content.Sample(text=text, token_ids=tokens)
            yield MESSAGES.DecodeResponse(stream_content=content(samples=[sample]))
