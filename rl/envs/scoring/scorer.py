"""Scores completions in child processes with limits, because a completion may be hostile and make a checker run forever.

1. `Scorer` starts `python -m rl.envs.scoring.scorer` on first use and keeps it. One exchange scores all completions of one task (a
   group). If the child does not survive that, each completion gets an exchange of its own.
2. The child makes the task again from its index. Before each completion it limits its CPU time: RLIMIT_CPU also ends a
   regular expression or a product of huge numbers, and does not blame a completion for a busy machine. Memory is limited,
   too. The parent ends a child that waits. Text that a checker prints does not reach the pipe to the parent.
3. A completion that ended its child gets 0 in every number. A child whose memory grew by half of the limit is replaced, so
   that one completion does not affect the score of another. After `max_failures` of such completions in a group, the rest of the
   group gets 0 without being scored: the time of a group is bounded.
4. A completion for which `score` raises, or returns no numbers, gets 0 in every number, and 1 in a further one, "error". rl.score_errors
   decides whether it trains.
5. The child loads the environment with the rights of its user and scores without files, network, other processes, and secret
   environment variables (sharding/system/sandbox.py). Environments read their data when they are built.

Workers stop after LIMIT_S, validators, whose machines differ, after CHECK_LIMIT_S (rl/trust/verification/checks.py handles the
difference). Imports no jax.
"""

import contextlib
import dataclasses
import functools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rl.envs.catalog import catalog
from rl.envs.interface import environment
from rl.protocol import user_code
from sharding.system import cli, limited_process

LIMIT_S = 1  # CPU seconds for one completion on a worker
CHECK_LIMIT_S = 5  # and on a validator
SPREAD = CHECK_LIMIT_S // LIMIT_S  # how much faster or slower an honest machine may be
CLOCK_FACTOR = 10  # a completion may take this many times the limit by the clock
MAX_FAILURES = 16  # completions of a group that end their child on a worker, before the rest of the group is not scored
MAX_CHECK_FAILURES = 4  # and on a validator
WAITS = CLOCK_FACTOR // 2  # a completion that waits until the parent ends the child counts as this many
PATIENCE_S = 1.0  # how long to wait for a busy child before another is started
MAX_KINDS = 16  # of errors that are reported
MAX_NUMBERS, MAX_NAME = 63, 256  # limits of a rollout (inference/rollouts/rollout.py), less one number for "error"
MAX_GROWTH_BYTES = 2**30  # of address space, from when the environment is loaded
COMMAND, REMEDY = ("-m", "rl.envs.scoring.scorer"), "fix the environment or env.options"
Child = limited_process.LimitedProcess
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Scored:
    """The scores of one completion. If not `in_time`, all are 0: scoring exceeded its limits or ended its child process."""

    scores: dict[str, float]
    cpu_s: float
    in_time: bool = True


class FirstErrors:
    """Reports the first error of each kind in the code of an environment, by calling `on_error` with a line of text."""

    def __init__(self, on_error: Log):
        self._on_error, self._kinds = on_error, set()

    def report(self, found: str, error: str) -> None:
        """Reports an error, unless there was one of its kind. `found` names the failed part and its place."""
        kind = error.partition(":")[0][:80]
        if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
            self._on_error(f"{found}: {error} (rl.score_errors; metric rollout/score_error_frac)")


class Scorer:
    """Scores completions of one environment in child processes with limits on time and memory. Thread-safe.

    Args:
      name, options, seed: as for `catalog.load`.
      limit_s: whole CPU seconds for one completion; up to 1 s more may pass, because the system counts whole seconds.
      max_failures: completions of one group that may end their child; the rest of the group gets 0, too, which bounds the time.
      max_children: the maximum number of child processes.
      sandbox: whether children run without files and network: "auto" (as far as this machine can), "require", or "off".
      on_error: called with a line of text for the first completion of each kind that could not be scored.
      digest: the expected digest of the environment's code and data (`catalog.digest`); no child starts with another. "": any.
    """

    def __init__(
        self,
        name: str,
        options: dict,
        seed: int,
        *,
        limit_s: int,
        max_failures: int = MAX_FAILURES,
        max_children: int = 1,
        sandbox: str = "auto",
        on_error: Log = cli.note,
        digest: str = "",
    ):
        self.limit_s, self._max_failures, self._errors = limit_s, max_failures, FirstErrors(on_error)
        title, config = f"the scorer of environment {name}", config_of_child(name, options, seed, limit_s, digest)
        child = functools.partial(limited_process.LimitedProcess, COMMAND, config, title=title, remedy=REMEDY)
        self._children = [child(sandbox_mode=sandbox) for _ in range(max_children)]
        self._free, self._changed = list(self._children), threading.Condition()

    def score(self, task: environment.Task, completions: Sequence[str]) -> list[Scored]:
        """Scores the completions of a task and returns one result each. Blocks. Raises ValueError if the environment itself is broken."""
        with self._child() as child:
            if found := self._exchange(child, task, completions):
                return found
            failures, failed = 0, Scored({}, float(self.limit_s), in_time=False)
            for completion in completions:
                if failures < self._max_failures:
                    one = self._score_alone(child, task, completion)
                    if not one.in_time:
                        failures, failed = failures + (WAITS if child.status is None else 1), one
                else:
                    one = failed  # not scored
                found.append(one)
            return found

    def close(self) -> None:
        """Waits for running calls of `score`, then ends all child processes."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) == len(self._children))
            for child in self._children:
                child.end()

    @contextlib.contextmanager
    def _child(self) -> Iterator[limited_process.LimitedProcess]:
        def started():
            return next((child for child in self._free if child.process is not None), None)

        with self._changed:
            self._changed.wait_for(lambda: started() or len(self._free) == len(self._children), PATIENCE_S)
            self._changed.wait_for(lambda: self._free)
            child = started() or self._free[0]
            self._free.remove(child)
        try:
            yield child
        finally:
            with self._changed:
                self._free.append(child)
                self._changed.notify_all()

    def _score_alone(self, child: Child, task: environment.Task, completion: str) -> Scored:
        found = self._exchange(child, task, [completion])
        if not found and child.status not in limited_process.TIMEOUTS:  # another one may have used up the memory
            found = self._exchange(child, task, [completion])
        if found:
            return found[0]
        return Scored(self._zeros(child, task), float(self.limit_s), in_time=False)

    def _exchange(self, child: Child, task: environment.Task, completions: Sequence[str]) -> list[Scored]:
        """Scores completions in a child. Returns one result each, or an empty list if the child process ended."""
        reply = self._send(child, task, completions)
        failed = {}
        if errors := [error for scores, _, error in reply if scores is None]:
            failed = self._zeros(child, task, errors[0]) | {"error": 1.0}
            for error in errors:
                place = f"{task.split} task {task.index}"
                self._errors.report(f"environment {task.env} could not score a completion of {place}", error)
        return [Scored(failed if scores is None else scores, cpu_s) for scores, cpu_s, _ in reply]

    def _zeros(self, child: Child, task: environment.Task, error: str = "it takes too much time or memory") -> dict:
        """Returns {name: 0} for each number in this task's scores, found by scoring "". Raises ValueError with `error` if that fails."""
        # The first child may end for another reason.
        reply = self._send(child, task, [""]) or self._send(child, task, [""])
        if reply and reply[0][0] is not None:
            return dict.fromkeys(reply[0][0], 0.0)
        raise ValueError(
            f"environment {task.env} cannot score {task.split} task {task.index}, not even an empty completion: "
            f"{reply[0][2] if reply else error}; fix its score, which must return numbers by name, 'reward' among them, "
            "for any text"
        )

    def _send(self, child: Child, task: environment.Task, completions: Sequence[str]) -> list:
        """Sends completions to a child process. Returns (scores or None, CPU seconds, error) of each; an empty list if it ended."""
        request = {"index": task.index, "split": task.split, "completions": list(completions)}
        reply = child.exchange(request, CLOCK_FACTOR * self.limit_s)
        scored = _read_scored(reply, len(completions))
        if scored is None or reply.get("grown"):
            child.end()
        if scored is None and "error" in reply and request["completions"] == [""]:  # no completion can have sent it
            raise ValueError(reply["error"])
        return scored or []


def config_of_child(name: str, options: dict, seed: int, limit_s: int, digest: str) -> dict:
    """Returns the config of a child process that runs code of an environment (`load_in_child`)."""
    with contextlib.suppress(ValueError):  # which the child reports
        name, options = catalog.locate(name, options)  # a child has another current directory
    return {"name": name, "options": options, "seed": seed, "limit_s": limit_s, "digest": digest}


def load_in_child(config: dict) -> environment.Environment:
    """Returns the environment of a child's config. Raises ValueError for code or data of another digest, and as `catalog.load`."""
    name, options = config["name"], config["options"]
    if config["digest"] and catalog.digest(name, options) != config["digest"]:
        raise ValueError("its code or data has changed since the run began")
    return catalog.load(name, seed=config["seed"], **options)


def numbers(scores: dict) -> dict[str, float]:
    """Converts an environment's scores to floats. Raises TypeError or ValueError for scores that a rollout cannot contain."""
    if not isinstance(scores, dict) or len(scores) > MAX_NUMBERS:
        raise TypeError(f"score returned {type(scores).__name__}; return a dict of at most {MAX_NUMBERS} numbers")
    if "reward" not in scores:
        raise TypeError(f"score returned the names {list(scores)[:8]} without 'reward'; add the reward")
    for name, value in scores.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise TypeError(f"score returned the name {str(name)[:80]!r}; use 1 to {MAX_NAME} printable characters")
        try:
            is_finite = not isinstance(value, str) and math.isfinite(value)
        except TypeError:  # no number at all, such as None or a list
            is_finite = False
        if not is_finite:
            raise ValueError(f"score returned {name} = {value!r:.80}; return finite numbers")
    return {name: float(value) for name, value in scores.items()}


def _read_scored(reply: dict, count: int) -> list | None:
    """Returns (scores or None, CPU seconds, error) of each of `count` completions. Returns None for a malformed reply."""
    try:
        found = [
            (None if scores is None else numbers(scores), float(cpu_s), str(error))
            for scores, cpu_s, error in reply["scored"]
        ]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    is_printable = all(error.isprintable() for *_, error in found)  # logs show it
    return found if is_printable and len(found) == count else None


# ---- the child -------------------------------------------------------------------------------------------------------


def main(config_json: str) -> int:
    """Runs the child process of a Scorer. Returns the exit status.

    `config_json` is an object with name, options, seed, limit_s, digest, and the fields of `limited_process.serve`.
    """
    config = json.loads(config_json)
    made: list[environment.Environment] = []

    @functools.lru_cache(1024)
    def make_task(index: int, split: str) -> environment.Task:
        return made[0].make_task(index, split)

    def answer(request: dict) -> dict:
        try:
            task = make_task(request["index"], request["split"])
        except ValueError as error:
            return {"error": str(error)}
        return {"scored": _score(made[0], task, request["completions"], config["limit_s"])}

    def describe(error: BaseException) -> str:
        return "scoring an empty completion: " * len(made) + user_code.describe(error)

    return limited_process.serve(
        config,
        load=lambda: made.append(load_in_child(config)),
        rehearse=lambda: numbers(_score_of(made[0])(make_task(0, "train"), "")),
        answer=answer,
        max_growth_bytes=MAX_GROWTH_BYTES,
        patience_s=2 * CLOCK_FACTOR * config["limit_s"],
        describe=describe,
    )


def _score_of(env: environment.Environment) -> Callable[[environment.Task, str], dict[str, float]]:
    if env.score is None:
        raise ValueError(f"environment {env.name} has episodes of several calls, which rl/envs/host runs")
    return env.score


def _score(env: environment.Environment, task: environment.Task, completions: list[str], limit_s: int) -> list:
    """Scores completions in this process. Returns (scores, CPU seconds, "") of each, or (None, CPU seconds, error) if `score` raised."""
    score, out, begun_s = _score_of(env), [], time.process_time()
    for completion in completions:
        limited_process.limit_cpu(math.ceil(begun_s + limit_s))
        try:
            scores, error = numbers(score(task, completion)), ""
        except MemoryError:
            raise
        except Exception as raised:  # an environment's own code may raise anything
            scores, error = None, user_code.describe(raised)
        ended_s = time.process_time()
        out.append((scores, ended_s - begun_s, error))
        begun_s = ended_s
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
