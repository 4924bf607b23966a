"""An inference server with scripted completions: a tool call if tools are offered, then an answer.

    python -m tests.support.scripted_server --address_file FILE [--tokenizer FOLDER]

Only the text is scripted. Engine, scheduler, routes and log-probabilities are real, with random weights; the token ids that
the engine samples are replaced as they are read.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from inference import serve
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.engine import weights as weights_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import grpc_service, inference_server, web
from models.text import tokenizer as tokenizer_lib
from sharding.system import cli, sockets
from tests.support import tiny

MODEL = tiny.model()
TOK = tokenizer_lib.byte_chatml()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def answer(prompt: str) -> str:
    """Returns the scripted completion of a prompt, including special tokens."""
    if "<tool_response>" in prompt:
        return "The sum is 3.<|im_end|>"
    return f"{CALL}<|im_end|>" if "<tools>" in prompt else "Hello, é!<|im_end|>"


class Scripted(engine_lib.Engine):
    """An engine with scripted completions. Set `scheduler` after construction; where `script` is None, the engine's own count."""

    scheduler: scheduler_lib.Scheduler | None = None

    def script(self, prompt: str) -> list[int]:
        return TOK.encode(answer(prompt), special=True)

    def insert_batch(self, prefix, rows, state, slots, request):
        if self.script is not None:  # a sampled token stops no sequence
            request = request.replace(stop_ids=np.full_like(request.stop_ids, -1))
        return super().insert_batch(prefix, rows, state, slots, request)

    def read(self, result):
        result = super().read(result)
        tokens, valid, counts = np.array(result.tokens), np.array(result.valid), result.counts
        for slot, sample in enumerate(self.scheduler.slots if self.scheduler and self.script else ()):
            if sample is None or not counts[slot]:
                continue
            prompt = TOK.decode(list(sample.group.request.tokens), skip_special=False)
            next_tokens = self.script(prompt)[len(sample.completion.tokens) :][: counts[slot]]
            tokens[slot, : len(next_tokens)], valid[slot, len(next_tokens) :] = next_tokens, 0
        return result.replace(tokens=tokens, valid=valid)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address_file", required=True)
    parser.add_argument("--tokenizer", help="folder to write the tokenizer to, for clients that render")
    args = parser.parse_args()
    if args.tokenizer:
        TOK.save(args.tokenizer)
    params = jax.tree.map(jnp.asarray, tiny.params(MODEL, 0))
    engine = Scripted(MODEL, engine_lib.EngineConfig(8, 2048, 4, 4), TOK)
    scheduler = scheduler_lib.Scheduler(engine, params, 3)
    engine.scheduler = scheduler
    scheduler.submit(request_lib.GenerateRequest((1, 2, 3), max_tokens=1)).result()
    server = inference_server.InferenceServer(None, scheduler, engine, weights_lib.Store(MODEL, engine.mesh))
    sock = sockets.listen("127.0.0.1", 0)
    grpc_port, grpc_server = grpc_service.start(server, "127.0.0.1", 0)
    with open(f"{args.address_file}.grpc", "w") as file:
        file.write(str(grpc_port))
    sockets.announce(args.address_file, sock)
    uvicorn_server = web.server(serve.make_app(server))
    cli.stop_at_eof(lambda: setattr(uvicorn_server, "should_exit", True))
    uvicorn_server.run(sockets=[sock])
    grpc_server.stop(0).wait()
    scheduler.close()


if __name__ == "__main__":
    main()
