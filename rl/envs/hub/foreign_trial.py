"""Runs one trial of the admission check for an environment of another framework, whose code runs in its own interpreter.

1. Its host (rl/envs/foreign) loads it in a process, and forks this for each episode. A second trial loads it in another process, and plays
   backwards. The host's surroundings are always the same, so their effect is not measured, nor are files, connections, and memory.
2. The model is scripted: each call is answered with a probe's text, or random words that follow from the prompt.
3. Each episode is played again from its recorded calls, as a validator does, which must give the same scores and use each call.

The observations have the form of rl/envs/hub/trial.py. A task is known by the tokens of its first prompt.
"""

import asyncio
import contextlib
import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

from inference.rollouts import completion as completion_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.catalog import catalog
from rl.envs.foreign import host as foreign_host
from rl.envs.foreign import process as process_lib
from rl.envs.host import host as host_lib
from rl.envs.hub import effects, probes, trial
from rl.envs.interface import scripted_model
from rl.envs.recording import session as session_lib

LIMITS = session_lib.Limits(max_tokens=1024, max_model_len=32768, max_calls=32)
UNMEASURED = ["hub.cross_host_determinism", "statistical.gameability_gap"]
UNMEASURED += [f"runtime.{name}" for name in ("network_policy", "host_containment", "observation_schema")]
UNMEASURED += ["runtime.task_declaration_accuracy"]
CPU_S = 10  # of an episode


def run(plan: trial.Plan, surroundings: trial.Surroundings, on_stage: Callable[[str], None]) -> dict:
    """Returns the observations of a trial, or {"failed": reason, "stage": step}; calls `on_stage` with each step that begins. Blocks."""
    try:
        return asyncio.run(asyncio.wait_for(_Trial(plan, surroundings, on_stage).run(), plan.timeout_s))
    except TimeoutError:
        return {"failed": "it took too long", "stage": "play episodes", "late": True}
    except (process_lib.Broken, process_lib.Died, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}", "stage": "load"}


class _Trial:
    def __init__(self, plan: trial.Plan, surroundings: trial.Surroundings, on_stage: Callable[[str], None]):
        self._plan, self._around, self._on_stage = plan, surroundings, on_stage
        self._env = catalog.load(plan.name, seed=plan.seed, **plan.options)
        self._tokenizer = tokenizer_lib.byte_chatml()
        self._replayed: list[str] = []  # differences
        self._prompts: dict[str, str] = {}  # of tasks

    async def run(self) -> dict:
        assert self._env.foreign
        self._host = foreign_host.ForeignHost(
            self._env.foreign, self._tokenizer, limit_s=CPU_S, on_error=lambda line: None
        )
        try:
            return await self._observe()
        finally:
            with contextlib.suppress(process_lib.Died):
                await self._host.close()

    async def _observe(self) -> dict:
        numbers = range(self._plan.scored)[:: self._around.order]
        texts = probes.TEXTS
        names = [*texts][:: self._around.order]
        self._on_stage(f"load, and play {len(numbers)} tasks with {len(names)} fixed answers")
        attempts = {
            str(i): {name: await self._play(f"{i}, {name}", i, scripted_model.always(texts[name])) for name in names}
            for i in numbers
        }
        seeds = [(i, seed) for i in numbers for seed in range(self._plan.episodes)]
        self._on_stage(f"play {len(seeds)} episodes with random words")
        episodes = {
            f"{i}/{seed}": await self._play(f"{i}/{seed}", i, scripted_model.random_words, seed) for i, seed in seeds
        }
        found: dict[str, Any] = {"kind": self._env.kind, "name": self._env.name, "is_program": True}
        found |= {"attempts": attempts, "episodes": episodes, "attempts_again": {}, "episodes_again": {}, "remade": {}}
        if self._around.measures:
            self._on_stage(f"play {len(seeds)} episodes at the same time")
            plays = [self._play(f"{i}/{seed}", i, scripted_model.random_words, seed) for i, seed in seeds]
            together = await asyncio.gather(*plays)
            found["episodes_together"] = dict(zip(episodes, together, strict=True))
        # Files and processes are allowed where code runs in its own interpreter.
        counts = dict.fromkeys(effects.KINDS, 0) | {"process": 1}
        found["effects"] = {"counts": counts, "notes": {kind: [] for kind in effects.KINDS}}
        found |= {"tasks": self._prompts, "replay": self._replayed, "reward_range": [-math.inf, math.inf]}
        found |= {"memory": {"rounds": 0, "growth_bytes": 0, "counted": 1}, "malformed": [], "leaks": 0}
        return found | {"with_answer": 0, "shared": [], "num_shared": 0, "num_prompts": 0, "unmeasured": UNMEASURED}

    async def _play(self, name: str, index: int, policy: scripted_model.Policy, seed: int = 0) -> dict:
        tape: dict[session_lib.Key, completion_lib.Completion] = {}
        model = session_lib.scripted(
            self._tokenizer, lambda call: policy((), (), random.Random(f"{seed}/{call.key}"))["content"]
        )

        async def backend(call: session_lib.Call) -> completion_lib.Completion:
            tape[call.key] = await model(call)
            return tape[call.key]

        session = session_lib.Session(self._tokenizer, backend, LIMITS, seed=0, sample=0)
        found = self._observed(session, await self._host.play(session, index, "train"))
        if session.streams:
            first = session.streams[0]
            prompt = [int(token) for token in first.tokens[: first.turns[0].start if first.turns else None]]
            self._prompts.setdefault(f"train {index}", hashlib.sha256(repr(prompt).encode()).hexdigest())
        if self._around.measures:
            again = session_lib.Session(self._tokenizer, None, LIMITS, seed=0, sample=0, tape=tape)
            try:
                second = self._observed(again, await self._host.play(again, index, "train"))
                unused = len(again.unused())
            except session_lib.NotOnTape as error:
                second, unused = {"error": str(error)}, 0
            if unused or any(second.get(key) != found[key] for key in ("scores", "transcript")):
                reason = second.get("error") or f"{second.get('scores')}, {unused} calls unused"
                self._replayed.append(f"task {name}: {found['scores']}, and from its recorded calls {reason}")
        return found

    def _observed(self, session: session_lib.Session, played: host_lib.Played) -> dict:
        streams = [[[int(x) for x in stream.tokens]] for stream in session.streams]
        digest = hashlib.sha256(repr(streams).encode()).hexdigest()
        error = "" if played.in_time else "TimeoutError: it did not end within its limit of time"
        if "error" in played.scores and played.in_time:
            error = f"Error: {played.error}"
        scores = None if error else {name: repr(value) for name, value in sorted(played.scores.items())}
        found = {"scores": scores, "error": error, "transcript": digest, "calls": session.num_calls}
        return found | {"cpu_s": played.cpu_s, "slept_s": 0.0}
