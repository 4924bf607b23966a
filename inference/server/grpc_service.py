"""JetStream's gRPC service (`Orchestrator.Decode`, `HealthCheck`) on our scheduler, for JetStream's own clients.

1. A request is text or token ids, and max_tokens; it is sampled at temperature 1 with a drawn seed, as JetStream's server
   knows no sampling fields.
2. Each engine call's tokens go out as one message; the stop id is left out, as JetStream's Driver does.
3. A request that cannot be served ends with INVALID_ARGUMENT and the reason, a full queue with RESOURCE_EXHAUSTED.

Not JetStream's own server: that runs its Driver, which needs a second set of slots, keeps the weights it was started with
and kills the process on any error. That a stock Driver can run the engine is a test (tests/inference/engine/test_engine.py).
"""

import dataclasses
import os
import queue
from collections.abc import Iterator
from concurrent import futures

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server

MAX_RPCS = 256  # each has a thread
POLL_S = 0.5  # how late a client that hung up is noticed while it waits


@dataclasses.dataclass(frozen=True)
class GrpcServer:
    port: int
    server: grpc.Server

    def stop(self, grace_s: float) -> None:
        """Takes no more calls, gives those it has `grace_s`, and returns when all have ended."""
        self.server.stop(grace_s).wait()


def start(server: inference_server.InferenceServer, host: str, port: int) -> GrpcServer:
    """Listens on `port` (0: a free one). ValueError when it is taken."""
    threads = futures.ThreadPoolExecutor(MAX_RPCS, "grpc")
    own_port = [("grpc.so_reuseport", 0)]  # or two servers would share one port, each with a part of the clients
    grpc_server = grpc.server(threads, options=own_port, maximum_concurrent_rpcs=MAX_RPCS)
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(_Orchestrator(server), grpc_server)
    try:
        bound = grpc_server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ValueError(
            f"cannot listen on {host}:{port} for gRPC; choose another port, or 0 for a free one"
        ) from error
    grpc_server.start()
    return GrpcServer(bound, grpc_server)


class _Orchestrator(jetstream_pb2_grpc.OrchestratorServicer):
    def __init__(self, server: inference_server.InferenceServer):
        self._server = server

    def Decode(self, request, context) -> Iterator:
        is_text = request.WhichOneof("content") == "text_content"
        tokenizer = self._server.tokenizer
        tokens = tokenizer.encode(request.text_content.text) if is_text else list(request.token_content.token_ids)
        asked = scheduler_lib.GenerateRequest(
            tokens=tokens,
            max_tokens=request.max_tokens,
            seed=int.from_bytes(os.urandom(4), "little"),
            stop_ids=tokenizer.stop_ids,
        )
        pieces: queue.SimpleQueue = queue.SimpleQueue()
        num_sent = 0

        def listen(index, completion):  # on the scheduler's thread
            nonlocal num_sent
            new, num_sent = completion.tokens[num_sent:], len(completion.tokens)
            pieces.put((new, bool(completion.finish_reason)))

        try:
            future = self._server.scheduler.submit(asked, listen)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except scheduler_lib.Overloaded as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except scheduler_lib.Closed as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            yield from self._samples(pieces, context, tokenizer, with_text=is_text)
            if context.is_active():
                future.result()
        except (scheduler_lib.Fault, scheduler_lib.Closed) as error:
            context.abort(grpc.StatusCode.INTERNAL, str(error))
        finally:
            future.cancel()

    def HealthCheck(self, request, context):
        return jetstream_pb2.HealthCheckResponse(is_live=self._server.scheduler.is_alive)

    def _samples(self, pieces: queue.SimpleQueue, context, tokenizer, *, with_text: bool) -> Iterator:
        stream = tokenizer.text_stream()
        content = jetstream_pb2.DecodeResponse.StreamContent
        while context.is_active():
            try:
                piece = pieces.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if piece is None:
                return
            new, final = piece
            tokens = [token for token in new if token not in tokenizer.stop_ids]
            text = [stream.push(tokens, final=final)] if with_text else []
            yield jetstream_pb2.DecodeResponse(
                stream_content=content(samples=[content.Sample(text="".join(text), token_ids=tokens)])
            )
