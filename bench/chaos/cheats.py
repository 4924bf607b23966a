"""Runs a dishonest node, to show that a run survives it: `python -m bench.chaos.cheats refuse|lie|forge OPTIONS`.

- refuse: a server that answers each request for rollouts with status 400; OPTIONS are those of `inference.serve`.
- lie: a server that returns other log-probabilities than its model gave, with its own signature.
- forge: a worker that changes the sampled tokens of its rollouts, and signs them; OPTIONS are those of `rl.worker`. It drops the
  signature of the server, as if it had a server of its own, since that would show the change without a replay.

It is the real command with one function replaced, so that it knows all that an honest node knows.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence

from inference import serve
from inference.rollouts import completion as completion_lib
from inference.server import generate_routes, inference_server
from rl import worker
from rl.envs.host import group as group_lib

LIE = 0.5  # nats


def main(argv: Sequence[str]) -> int:
    """Runs the node of kind `argv[0]`; returns its exit code."""
    kind, *options = argv
    if kind == "forge":
        group_lib.make_rollouts = functools.partial(_forge, group_lib.make_rollouts)
        return worker.main(options)
    if kind == "lie":
        generate_routes.choice = functools.partial(_lie, generate_routes.choice)
    else:
        inference_server.InferenceServer.make_request = _refuse
    return serve.main(options)


def _refuse(*args, **kwargs):
    raise ValueError("this server refuses every request")


def _lie(honest, server, request, completion, *rest):
    logprobs = [logprob - LIE for logprob in completion.logprobs]
    return honest(server, request, dataclasses.replace(completion, logprobs=logprobs), *rest)


def _forge(honest, run, group, task, prompt, samples):
    return honest(run, group, task, prompt, [*map(forged, samples)])


def forged(sample: completion_lib.Completion) -> completion_lib.Completion:
    """Returns a sample with its tokens in another order; the last stays: it may be the stop token. A palindrome gets another first token."""
    tokens = [*sample.tokens[-2::-1], sample.tokens[-1]]
    tokens[0] ^= tokens == [*sample.tokens]
    return dataclasses.replace(sample, tokens=tokens, server="", server_signature=b"")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
