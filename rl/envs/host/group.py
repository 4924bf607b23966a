"""Plays the episodes of a group at the same time against inference servers, and returns their rollouts. Imports no jax."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from inference.rollouts import rollout as rollout_lib
from inference.swarm import sample as sample_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.host import host as host_lib
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.protocol import noise_seed

MAX_RUNS = 2  # of an episode that makes other calls when it runs again
# (call, count) -> completions of the call with the seeds call.seed to call.seed + count - 1
Generate = Callable[[session_lib.Call, int], Awaitable[list[sample_lib.Sample]]]


@dataclasses.dataclass(frozen=True)
class Player:
    """Everything that the episodes of a run share."""

    host: host_lib.Plays
    tokenizer: tokenizer_lib.Tokenizer
    limits: session_lib.Limits
    thinking: str = "keep"

    async def play(
        self, generate: Generate, group: dict, task: rollout_lib.TaskRef, env_digest: str
    ) -> list[rollout_lib.Rollout]:
        """Plays all episodes of a group, and returns their unsigned rollouts.

        Equal first prompts are one request, so that a server reads them once. Raises the errors of `generate`, and ValueError for an
        environment that is broken or not deterministic.
        """
        opening = _Opening(generate, group["seed"], group["num_samples"])
        origin = rollouts_lib.Origin(task, group["step"], group["temperature"], env_digest)
        try:
            async with asyncio.TaskGroup() as tasks:
                numbers = range(group["num_samples"])
                found = [tasks.create_task(self._episode(opening, group, origin, number)) for number in numbers]
        except* Exception as errors:  # the first one ends the group
            raise errors.exceptions[0] from None
        finally:
            await opening.close()
        return [rollout for one in found for rollout in one.result()]

    async def _episode(
        self, opening: "_Opening", group: dict, origin: rollouts_lib.Origin, number: int
    ) -> list[rollout_lib.Rollout]:
        async def backend(call: session_lib.Call) -> sample_lib.Sample:
            return await opening.sample(call, number)

        options = {"seed": group["seed"], "sample": number, "thinking": self.thinking}
        options["sampling"] = {"temperature": group["temperature"]}
        for _ in range(MAX_RUNS):
            session = session_lib.Session(self.tokenizer, backend, self.limits, **options)
            played = await self.host.play(session, group["index"], group["split"])
            if played.error and not session.streams:
                name = origin.task.env
                raise ValueError(f"an episode of environment {name} failed before it asked the model: {played.error}")
            if not session.unused():
                return rollouts_lib.of_episode(session, origin, played.scores)
        raise ValueError(
            f"an episode of environment {origin.task.env} made other calls when it ran again; its program must be a function of the task and "
            "the replies"
        )


class _Opening:
    """Completes the calls of a group's episodes. The first one that begins an episode asks for the completions of all that begin equally."""

    def __init__(self, generate: Generate, seed: int, count: int):
        self._generate, self._seed, self._count = generate, seed, count
        self._begun: set[int] = set()  # numbers of episodes
        self._requests: dict[tuple[int, ...], asyncio.Future[list[sample_lib.Sample]]] = {}

    async def sample(self, call: session_lib.Call, number: int) -> sample_lib.Sample:
        """Returns the completion of a call of an episode."""
        is_first = number not in self._begun and call.seed == noise_seed.stream_seed(self._seed, number, 0, ())
        self._begun.add(number)
        if not is_first:
            return (await self._generate(call, 1))[0]
        key = (call.max_tokens, *call.prompt)
        if key not in self._requests:
            shared = dataclasses.replace(call, seed=self._seed)
            self._requests[key] = asyncio.ensure_future(self._generate(shared, self._count))
        return (await asyncio.shield(self._requests[key]))[number]

    async def close(self) -> None:
        """Ends requests in progress."""
        for request in self._requests.values():
            request.cancel()
        await asyncio.gather(*self._requests.values(), return_exceptions=True)
