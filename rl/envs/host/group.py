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

MAX_RUNS = 2  # of an episode that makes other calls when it runs again


@dataclasses.dataclass(frozen=True)
class Player:
    """Everything that the episodes of a run share."""

    host: host_lib.Plays
    tokenizer: tokenizer_lib.Tokenizer
    limits: session_lib.Limits
    thinking: str = "keep"

    async def play(
        self,
        generate: Callable[[session_lib.Call, int], Awaitable[sample_lib.Sample]],
        group: dict,
        task: rollout_lib.TaskRef,
        env_digest: str,
    ) -> list[rollout_lib.Rollout]:
        """Plays all episodes of a group, and returns their unsigned rollouts.

        `generate` makes the completion of a call of an episode, given by its number. Raises the errors of `generate`, and ValueError for an
        environment that is broken or not deterministic.
        """
        origin = rollouts_lib.Origin(task, group["step"], group["temperature"], env_digest)
        try:
            async with asyncio.TaskGroup() as tasks:
                numbers = range(group["num_samples"])
                found = [tasks.create_task(self._episode(generate, group, origin, number)) for number in numbers]
        except* Exception as errors:  # the first one ends the group
            raise errors.exceptions[0] from None
        return [rollout for one in found for rollout in one.result()]

    async def _episode(
        self, generate: Callable, group: dict, origin: rollouts_lib.Origin, number: int
    ) -> list[rollout_lib.Rollout]:
        async def backend(call: session_lib.Call) -> sample_lib.Sample:
            return await generate(call, number)

        options = {"seed": group["seed"], "sample": number, "thinking": self.thinking}
        options["sampling"] = {"temperature": group["temperature"]}
        for _ in range(MAX_RUNS):
            session = session_lib.Session(self.tokenizer, backend, self.limits, **options)
            played = await self.host.play(session, group["index"], group["split"])
            if not session.unused():
                return rollouts_lib.of_episode(session, origin, played.scores)
        raise ValueError(
            f"an episode of environment {origin.task.env} made other calls when it ran again; its program must be a function of the task and "
            "the replies"
        )
