"""Runs one trial of the admission check in a process of its own: makes tasks, tries completions, and reports all it saw as JSON.

1. `run` starts `python -m rl.envs.hub.trial` with the surroundings of a `Surroundings` value: hash seed, time zone, locale, folder, user, and
   clock. Variables with keys or tokens are left out.
2. The child loads the environment, makes the tasks, gives each probe to the first of them, plays episodes with random words, and
   measures time, memory, and effects. A trial with `order = -1` goes through all of it backwards: results must not depend on the order.
3. It sends a line of JSON before each step, and the result at the end. The parent ends a child that takes too long, and then knows the step.

The child runs foreign code, so the parent treats its lines as data from a stranger. A program that looks for this check can deceive it:
the check finds mistakes, not malice, which the sandbox of scoring and the verdicts of a run are for.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import random
import re
import resource
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from rl.envs.catalog import catalog
from rl.envs.hub import effects as effects_lib
from rl.envs.hub import probes
from rl.envs.interface import environment, scripted_model
from rl.envs.scoring import scorer
from rl.protocol import user_code
from sharding.system import limited_process, sandbox

ROOT = pathlib.Path(__file__).resolve().parents[3]
EPISODE_S = 20.0  # by the clock, for one episode
GARBAGE_CHARS = 10_000  # of each completion in the measurement of memory
MAX_ROUNDS = 3000  # of it: more than the entries of usual caches


@dataclasses.dataclass(frozen=True)
class Plan:
    """An environment and the sizes of a trial, the same for all trials of one check."""

    name: str  # located, as for `catalog.load`
    options: dict
    seed: int = 0
    tasks: int = 200  # made, of each split
    scored: int = 8  # of them, with all probes
    episodes: int = 4  # per scored task, with random words
    memory_s: float = 1.0  # CPU seconds that the measurement of memory may take
    limit_s: int = scorer.LIMIT_S  # CPU seconds for one completion
    timeout_s: float = 300.0  # for the trial


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The surroundings of a trial: time zone, user, clock, and the like. The result of an environment must not depend on them."""

    order: int = 1  # -1: backwards
    hash_seed: int = 0
    zone: str = "UTC"
    locale: str = "C.UTF-8"
    user: str = "one"
    clock_s: float = 0.0
    sandboxed: bool = False
    measures: bool = False  # repeats everything, plays episodes concurrently, and measures memory

    def variables(self, home: str) -> dict[str, str]:
        """Returns the environment variables of the child."""
        kept = {n: x for n, x in sandbox.environment(os.environ).items() if not n.startswith(("LC_", "PYTHONHASH"))}
        own = {"PYTHONHASHSEED": str(self.hash_seed), "TZ": self.zone, "LC_ALL": self.locale, "LANG": self.locale}
        own |= {"HOME": home, "TMPDIR": home, "USER": self.user, "LOGNAME": self.user, "HOSTNAME": self.user}
        path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
        return kept | own | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}


FIRST = Surroundings(measures=True)
SECOND = Surroundings(-1, 4242, "ELSE-13:45", "de_DE.UTF-8", "two", 4.2e6, sandboxed=True)


class Running:
    """A trial of an environment, started in a child process with these surroundings. `result` waits for its end.

    `code` are folders to import from. `on_stage` is called with the name of each step that begins.
    """

    def __init__(
        self,
        plan: Plan,
        surroundings: Surroundings,
        code: tuple[str, ...] = (),
        on_stage: Callable[[str], None] = lambda stage: None,
    ):
        self._on_stage = on_stage  # called with each step that begins
        self._folder = tempfile.TemporaryDirectory(prefix="intellax-check-")
        self._deadline_s = time.monotonic() + plan.timeout_s
        self._log = open(pathlib.Path(self._folder.name) / ".log", "w+b")
        home = pathlib.Path(self._folder.name) / ("home" if surroundings.order > 0 else "another home")
        home.mkdir()
        config = {"plan": dataclasses.asdict(plan), "surroundings": dataclasses.asdict(surroundings), "code": [*code]}
        self._child = limited_process.JsonProcess(
            [sys.executable, "-m", "rl.envs.hub.trial", json.dumps(config)],
            folder=home,
            variables=surroundings.variables(str(home)),
            output=self._log,
            is_group=True,
        )

    def result(self) -> dict:
        """Returns the child's observations; or {"failed": reason, "stage": step} if it failed or took too long."""
        stage, last = "start", {}
        try:
            while last := self._child.receive(self._deadline_s - time.monotonic()):
                if "stage" not in last:
                    break
                stage = str(last["stage"])[:80]
                self._on_stage(stage)
        finally:
            status = self._child.end()
            self._log.seek(0)
            tail = self._log.read()[-2000:].decode(errors="replace").strip().splitlines()[-1:]
            self._log.close()
            with contextlib.suppress(OSError):
                self._folder.cleanup()
        if isinstance(last.get("result"), dict) or "failed" in last:
            return last.get("result") or {"failed": str(last["failed"]), "stage": stage}
        late = time.monotonic() > self._deadline_s
        reason = (
            "it took too long" if late else f"its process ended with status {status}: {' '.join(tail) or 'no output'}"
        )
        return {"failed": reason, "stage": stage, "late": late}


# ---- the child -------------------------------------------------------------------------------------------------------


class _Slow(BaseException):
    """Raised in the code of an environment that used up its CPU time."""


class _Trial:
    """The state of a child process."""

    def __init__(self, config: dict):
        self.plan = Plan(**config["plan"])
        self.around = Surroundings(**config["surroundings"])
        self._pipe = limited_process.take_pipe()
        self.effects = effects_lib.watch(
            [*config["code"], *sys.path[1:], sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/localtime"]
            + ["/etc/mime.types", "/proc/self", str(ROOT / "rl"), str(ROOT / "models"), str(ROOT / "sharding")]
        )
        # The sandbox forbids new sockets, and epoll.
        self.loop = asyncio.SelectorEventLoop(selectors.PollSelector())

    def send(self, **message: Any) -> None:
        """Sends a line to the parent."""
        self._pipe.sendall(json.dumps(message).encode() + b"\n")

    def run(self) -> dict:
        """Returns all observations."""
        plan, order = self.plan, self.around.order
        self.send(stage="load")
        self.env = catalog.load(plan.name, seed=plan.seed, **plan.options)
        count = min(plan.tasks, self.env.num_tasks or plan.tasks)
        places = [(split, i) for split in environment.SPLITS for i in range(count)][::order]
        found: dict[str, Any] = {"kind": self.env.kind, "name": self.env.name, "is_program": self.env.play is not None}
        found["reward_range"] = list(self.env.reward_range)
        self.send(stage="make a task")
        self._rehearse()
        self._confine()
        self.tasks = {place: self._make(*place) for place in places}
        found["tasks"] = {f"{split} {i}": _digest(task) for (split, i), task in self.tasks.items()}
        found |= self._looks()
        chosen = [("train", i) for i in range(min(plan.scored, count))]
        scored = [self.tasks[place] for place in chosen]
        found["attempts"] = self._attempts(scored[::order])
        found["episodes"] = self._episodes(scored[::order])
        if self.around.measures:
            again = [*self.tasks][:: -max(1, len(self.tasks) // 32)]
            found["remade"] = {f"{split} {i}": _digest(self._make(split, i)) for split, i in again}
            found["attempts_again"] = self._attempts(scored[::-1], backwards=True)
            found["episodes_again"] = self._episodes(scored[::-1])
            if self.env.play:
                found["episodes_together"] = self._together(scored)
            found["memory"] = self._memory(scored[0])
        found["effects"] = {"counts": self.effects.counts, "notes": self.effects.notes}
        return found

    def _rehearse(self) -> None:
        """Runs the code once: imports at its first use may read files."""
        with contextlib.suppress(Exception):  # the trial itself meets it again
            task = self.env.make_task(0, "train")
            for policy in (scripted_model.random_words, scripted_model.always("")):
                self._attempt(task, policy)

    def _confine(self) -> None:
        """Limits memory, and takes this process's rights away as the process of a scorer does."""
        with contextlib.suppress(OSError):  # a system without /proc
            size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            limit = size + scorer.MAX_GROWTH_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, limit)
        if self.around.sandboxed and self.env.kind == "pure":
            sandbox.enter()

    def _make(self, split: str, index: int) -> environment.Task:
        self.send(stage=f"make {split} task {index}")
        with self._watched("make_task"):
            task = self.env.make_task(index, split)
        if (task.split, task.index) != (split, index):
            raise ValueError(f"make_task({index}, {split!r}) returned a task of {task.split} {task.index}")
        return task

    def _attempts(self, tasks: list[environment.Task], backwards: bool = False) -> dict:
        """Returns {task index: {probe: observations}}."""
        found: dict[str, dict] = {}
        for task in tasks:
            others = [
                self.tasks["train", i] for i in range(min(self.plan.scored, len(self.tasks) // 2)) if i != task.index
            ]
            tried = [*probes.of(self.env, task, others).items()]
            found[str(task.index)] = {}
            for name, policy in tried[:: -1 if backwards or self.around.order < 0 else 1]:
                self.send(stage=f"score task {task.index}, completion: {name}")
                found[str(task.index)][name] = self._attempt(task, policy)
        return found

    def _episodes(self, tasks: list[environment.Task]) -> dict:
        """Returns {"task/seed": observations} of episodes with random words."""
        found = {}
        for task in tasks:
            for seed in range(self.plan.episodes):
                self.send(stage=f"play task {task.index} with random words, seed {seed}")
                found[f"{task.index}/{seed}"] = self._attempt(task, scripted_model.random_words, seed)
        return found

    def _together(self, tasks: list[environment.Task]) -> dict:
        """Plays the episodes of `_episodes` at the same time; returns the same where they do not affect each other."""
        self.send(stage="play episodes at the same time")
        play = self.env.play
        assert play is not None

        async def one(task, seed):
            pauses = random.Random(f"{task.index}/{seed}")
            model = scripted_model.ScriptedModel(scripted_model.random_words, seed, pauses=pauses)
            try:
                return _observed(await play(task, model), model)
            except Exception as error:  # an environment's own code may raise anything
                return _observed(error, model)

        async def together():
            keys = [(task, seed) for task in tasks for seed in range(self.plan.episodes)]
            done = await asyncio.wait_for(asyncio.gather(*(one(*key) for key in keys)), EPISODE_S * 2)
            return {f"{task.index}/{seed}": found for (task, seed), found in zip(keys, done, strict=True)}

        with self._watched("play"):
            return self.loop.run_until_complete(together())

    def _attempt(self, task: environment.Task, policy: scripted_model.Policy, seed: int = 0) -> dict:
        """Scores one completion, or plays one episode. Returns scores or error, CPU seconds, seconds slept, and the transcript's digest."""
        model = scripted_model.ScriptedModel(policy, seed)
        begun_s, slept_s = time.process_time(), self.effects.slept_s
        place = "play" if self.env.play else "score"
        outcome: Any = None
        try:
            with self._watched(place), self._limited(begun_s):
                if self.env.score:
                    text = policy(task.messages, (), random.Random(f"{task.index}/{seed}"))["content"]
                    outcome = self.env.score(task, text)
                elif self.env.play:
                    outcome = self.loop.run_until_complete(asyncio.wait_for(self.env.play(task, model), EPISODE_S))
        except (_Slow, TimeoutError):
            outcome = TimeoutError("it did not end within its limit of time")
        except Exception as error:  # an environment's own code may raise anything
            outcome = error
        found = _observed(outcome, model)
        found |= {"cpu_s": time.process_time() - begun_s, "slept_s": self.effects.slept_s - slept_s}
        return found

    def _memory(self, task: environment.Task) -> dict:
        """Scores completions that all differ; returns the growth of resident memory in the second half, per completion."""
        self.send(stage="measure memory")
        rng, page = random.Random(1), os.sysconf("SC_PAGE_SIZE")
        resident = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * page  # noqa: E731
        sizes, begun_s = [], time.process_time()
        while len(sizes) < MAX_ROUNDS and time.process_time() < begun_s + self.plan.memory_s:
            text = f"{rng.random()} " * (GARBAGE_CHARS // 20)
            self._attempt(task, scripted_model.always(text), len(sizes))
            sizes.append(resident())
        half = len(sizes) // 2
        return {"rounds": len(sizes), "growth_bytes": max(sizes[-1] - sizes[half], 0), "counted": len(sizes) - half}

    def _looks(self) -> dict:
        """Returns the facts about the texts of all tasks: malformed messages, answers in prompts, and prompts of both splits."""
        malformed, contexts, with_answer = [], [], 0
        prompts: dict[str, set[str]] = {split: set() for split in environment.SPLITS}
        for (split, i), task in self.tasks.items():
            if reason := _malformed(task.messages):
                malformed.append(f"{split} task {i}: {reason}")
                continue
            text = "\n".join(message["content"] for message in task.messages)
            prompts[split].add(json.dumps(task.messages))
            if answer := task.answer.strip():
                with_answer += 1
                at = text.find(answer)
                contexts.append(text[max(0, at - 8) : at] if at >= 0 else None)
        common = [context for context in contexts if context is not None]
        most = max(map(common.count, set(common)), default=0)
        answers = {task.answer.strip() for task in self.tasks.values()}
        return {
            "malformed": malformed[:8],
            "leaks": most if len(answers) > 1 else 0,
            "with_answer": with_answer,
            "shared": [text[:200] for text in sorted(prompts["train"] & prompts["held_out"])[:8]],
            "num_shared": len(prompts["train"] & prompts["held_out"]),
            "num_prompts": len(prompts["held_out"]),
        }

    @contextlib.contextmanager
    def _watched(self, stage: str):
        self.effects.stage = stage
        try:
            yield
        finally:
            self.effects.stage = ""

    @contextlib.contextmanager
    def _limited(self, begun_s: float):
        def end(*_):
            resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, hard))
            raise _Slow

        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        signal.signal(signal.SIGXCPU, end)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(begun_s + self.plan.limit_s) + 1, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, hard))


def _observed(outcome: Any, model: scripted_model.ScriptedModel) -> dict:
    scores, error = None, ""
    if isinstance(outcome, BaseException):
        error = user_code.describe(outcome)
    elif (
        isinstance(outcome, Mapping)
        and all(isinstance(x, int | float) for x in outcome.values())
        and "reward" in outcome
    ):
        scores = {str(name): repr(float(value)) for name, value in outcome.items()}
    else:
        error = f"TypeError: it returned {_text(outcome)[:200]}, not numbers by name with 'reward'"
    return {"scores": scores, "error": error, "calls": len(model.calls), "transcript": _digest(model.calls)}


def _malformed(messages: Any) -> str:
    if not isinstance(messages, tuple | list) or not messages:
        return f"its messages are {_text(messages)[:80]}"
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"a message is {_text(message)[:80]}"
        if not isinstance(content := message.get("content"), str):
            return f"the content of a message is {_text(content)[:80]}, not a text"
        if any("\ud800" <= char <= "\udfff" for char in content):
            return "a message has half of a surrogate pair, which is not Unicode text"
    return "" if messages[-1]["content"].strip() else "its last message is empty"


def _digest(value: Any) -> str:
    return hashlib.sha256(_text(value).encode(errors="surrogatepass")).hexdigest()


def _text(value: Any) -> str:
    """Returns a text that is the same for equal values in all processes: sets are sorted, and addresses of objects left out."""
    if isinstance(value, environment.Task):
        return _text([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, set | frozenset):
        return "set(" + ", ".join(sorted(map(_text, value))) + ")"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def main(config_json: str) -> int:
    """Runs a child process of `Running`. Returns the exit status."""
    config = json.loads(config_json)
    sys.path += config["code"]
    trial = _Trial(config)
    if trial.around.clock_s:
        effects_lib.pretend(trial.around.clock_s)
    try:
        result = trial.run()
    except Exception as error:  # an environment's own code may raise anything
        trial.send(failed=user_code.describe(error))
        return 1
    trial.send(result=result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
