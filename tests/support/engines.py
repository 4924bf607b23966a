"""Completions of an engine that has a scheduler to itself, and servers with and without an engine."""

import concurrent.futures
import contextlib
import types
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


class Scheduler:
    """Keeps the newest weights, and generates nothing."""

    version = -1

    def update(self, params, version, epoch):
        """Returns a future that is done."""
        self.version, self.epoch, self.params = version, epoch, params(None)
        (done := concurrent.futures.Future()).set_result(version)
        return done


def without_engine(opened, scheduler: Scheduler, *trusted) -> inference_server.InferenceServer:
    """Returns a server that takes all weights of an opened source; `trusted` are its key or verifier, and the weights that it has."""
    store = types.SimpleNamespace(model=None, lora=None, load_shardings=None, load=lambda params, *old: params)
    return inference_server.InferenceServer(opened, scheduler, types.SimpleNamespace(model=None), store, "", *trusted)
