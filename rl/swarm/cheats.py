"""Runs a dishonest node, to show that a run survives it: `python -m rl.swarm.cheats refuse|lie|forge OPTIONS`.

- refuse: a server that answers each request for rollouts with status 400; OPTIONS are those of `inference.serve`.
- lie: a server that returns other log-probabilities than its model gave, with its own signature.
- forge: a worker that changes the sampled tokens of its rollouts, and signs them; OPTIONS are those of `rl.worker`. It drops the
  signature of the server, as if it had a server of its own, since that would show the change without a replay.

It is the real command with one function replaced, so that it knows all that an honest node knows.
"""

import concurrent.futures
import dataclasses
import sys
from collections.abc import Sequence

from inference import client as client_lib
from inference import serve
from inference.engine import request as request_lib
from inference.scheduler import scheduler
from inference.server import inference_server
from rl import worker

LIE = 0.5  # nats


def main(argv: Sequence[str]) -> int:
    """Runs the node of kind `argv[0]`; returns its exit code."""
    kind, *options = argv
    return {"refuse": _refuse, "lie": _lie, "forge": _forge}[kind](options)


def _refuse(options: list[str]) -> int:
    def request(*args, **kwargs):
        raise ValueError("this server refuses every request")

    inference_server.InferenceServer.request = request
    return serve.main(options)


def _lie(options: list[str]) -> int:
    submit = scheduler.Scheduler.submit

    def submit_and_lie(self, *args, **kwargs) -> concurrent.futures.Future[list[request_lib.Completion]]:
        honest, told = submit(self, *args, **kwargs), concurrent.futures.Future()

        def answer(future: concurrent.futures.Future) -> None:
            if error := future.exception():
                told.set_exception(error)
            else:
                told.set_result([_changed(completion) for completion in future.result()])

        honest.add_done_callback(answer)
        return told

    scheduler.Scheduler.submit = submit_and_lie
    return serve.main(options)


def _changed(completion: request_lib.Completion) -> request_lib.Completion:
    return dataclasses.replace(completion, logprobs=[logprob - LIE for logprob in completion.logprobs])


def _forge(options: list[str]) -> int:
    make_rollouts = worker.make_rollouts

    def forge(run, group, task, prompt, samples):
        return make_rollouts(run, group, task, prompt, [*map(forged, samples)])

    worker.make_rollouts = forge
    return worker.main(options)


def forged(sample: client_lib.Sample) -> client_lib.Sample:
    """Returns a sample with its tokens in another order. The last stays: it may be the stop token."""
    tokens = [*sample.tokens[-2::-1], sample.tokens[-1]]
    return dataclasses.replace(sample, tokens=tokens, server="", server_signature=b"")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
