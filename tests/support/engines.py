"""Completions of an engine that has a scheduler to itself, and a server around an engine."""

import contextlib
from collections.abc import Iterator, Sequence

from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.engine import weights
from inference.rollouts import completion
from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server
from models import transformer

WAIT_S = 300  # a hang fails; compiling on a loaded machine does not


def complete(
    engine: engine_lib.Engine, params: transformer.Params, requests: Sequence[request_lib.GenerateRequest]
) -> list[list[completion.Completion]]:
    """Returns the completions of each request. All are submitted together."""
    scheduler = scheduler_lib.Scheduler(engine, params, 0)
    try:
        return [future.result(WAIT_S) for future in [scheduler.submit(request) for request in requests]]
    finally:
        scheduler.close()


@contextlib.contextmanager
def server(
    engine: engine_lib.Engine, params: transformer.Params, version: int = 0
) -> Iterator[inference_server.InferenceServer]:
    """Yields a server of these weights, without a source of others."""
    scheduler = scheduler_lib.Scheduler(engine, params, version)
    try:
        yield inference_server.InferenceServer(None, scheduler, engine, weights.Store(engine.model, engine.mesh))
    finally:
        scheduler.close()
