"""The evaluations of a run, which go on while it trains, and the files that have their results.

1. `begin` hands the held-out tasks of the sets that are due to the orchestrator, whose workers sample them next to those of the batches.
2. `finished` writes each result when it has arrived: scores to `evaluations.json`, samples to `samples/`, metrics.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Collection, Iterator
from concurrent import futures

import numpy as np

from inference.rollouts import rollout as rollout_lib
from rl.evaluation import samples as samples_lib
from rl.evaluation import scores as scores_lib
from rl.experiment import experiment
from rl.experiment.reporting import metrics
from rl.protocol import env_mix, task_schedule
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator.remote import client
from sharding.system import atomic_file

NUM_SAMPLES_SHOWN = 12


@dataclasses.dataclass(eq=False)
class Evaluations(contextlib.AbstractContextManager):
    """The evaluations of a run, which go on while it trains. Scores, samples, and metrics are written when they arrive.

    Results are written in the order in which the evaluations began.
    """

    exp: experiment.Experiment
    orchestrator: orchestrator_lib.Orchestrator | client.RemoteOrchestrator
    workdir: pathlib.Path
    writer: metrics.MetricsWriter
    progress: metrics.Progress
    changed: dict | None = None  # fields that differ from the run's config: results then get a file of their own

    def __post_init__(self) -> None:
        self._sets = task_schedule.evaluation_sets(self.exp.config)
        self._threads = futures.ThreadPoolExecutor(16, "evaluation")
        self._running = collections.deque[tuple[int, task_schedule.EvaluationSet, float, futures.Future]]()

    def begin(self, version: int, *, names: Collection[str] | None = None) -> None:
        """Begins the evaluations that are due at a version just published, or those of the sets in `names`."""
        num_steps = self.exp.config.rl.num_steps
        for one in self._sets:
            if one.is_due(version, num_steps) if names is None else one.name in names:
                result = self._threads.submit(self.orchestrator.evaluate, version, one.name)
                self._running.append((version, one, time.perf_counter(), result))

    def finished(self, *, wait: bool = False) -> Iterator[tuple[int, float]]:
        """Writes results; yields (version, avg@k) of those of the default set. With `wait`, waits for all that were begun."""
        if wait and self._running:
            self.progress.note(f"evaluating version {self._running[-1][0]} on held-out tasks")
        while self._running and (wait or self._running[0][-1].done()):
            version, one, begun, result = self._running[0]
            groups = result.result()
            self._running.popleft()
            if not groups:
                limit = f"evaluation.hold_s = {self.exp.config.evaluation.hold_s:.0f} s"
                self.progress.say(f"held-out, version {version}: given up after {limit}")
                continue
            score = self._write(version, one, groups, time.perf_counter() - begun)
            if not one.name:
                yield version, score

    def _write(self, version: int, one: task_schedule.EvaluationSet, groups: list, seconds: float) -> float:
        """Saves the scores of a set, and samples for the report; returns avg@k."""
        entries, suffix = env_mix.entries(self.exp.config), f"_{one.name}" if one.name else ""
        sources = {
            entry.label: samples_lib.source(entry.name, entry.options, self.exp.config.seed, entry.digest)
            for entry in entries.values()
        }
        rows = samples_lib.of_rollouts(groups, "held_out", sources, self.exp.tokenizer.decode)
        result, intervals = scores_lib.measure([*samples_lib.by_task(rows).values()])
        samples = [_shown(self.exp, group[0]) for group in groups[:NUM_SAMPLES_SHOWN]]
        entry = {"step": version, "phase": "rl", "scores": result, "intervals": intervals, "samples": samples}
        digest = hashlib.sha256(json.dumps(self.changed).encode()).hexdigest()
        kind = f"other_{digest[:8]}" if self.changed else "held_out"
        path = self.workdir / "samples" / f"{kind}{suffix}_{version}.jsonl"
        path.parent.mkdir(exist_ok=True)
        atomic_file.write(path, samples_lib.encode(rows))
        if self.changed:
            _keep(self.workdir / "other_evaluations.json", entry | {"changed": self.changed})
        else:
            _keep(self.workdir / f"evaluations{suffix}.json", entry)
            self.writer.truncate(f"evaluation{suffix}", version - 1)
            named = ((name.replace("@", "_at_").replace("^", "_all_"), value) for name, value in result.items())
            values = {f"held_out{suffix}/{name}": value for name, value in named}
            self.writer.write(version, f"evaluation{suffix}", values | {"time/eval_s": seconds})
        shown = scores_lib.shown(result, intervals)
        is_baseline = version == 0 and self.exp.config.init_from and not self.exp.config.warmup.num_steps
        policy = "baseline" if is_baseline else f"version {version}"
        self.progress.say(f"held-out{f' {one.name}' if one.name else ''}, {policy}: {shown}")
        return _mean_reward(result)

    def __exit__(self, *_) -> None:
        if self._running:  # the run failed
            self.orchestrator.fail(ValueError("the run ends"))
        self._threads.shutdown(cancel_futures=True)


def saved_score(workdir: pathlib.Path, step: int) -> float | None:
    """Returns the mean held-out reward of `step` in evaluations.json; None if a run ended between its checkpoint and its evaluation."""
    entries = atomic_file.read_json(workdir / "evaluations.json", list)
    return next((_mean_reward(entry["scores"]) for entry in entries if entry["step"] == step), None)


def _mean_reward(result: dict[str, float]) -> float:
    """Returns the mean over the tasks of all environments."""
    return next(value for name, value in result.items() if name.startswith("avg@"))


def _shown(exp: experiment.Experiment, rollout: rollout_lib.Rollout) -> dict:
    """Returns a rollout as shown in the report: {prompt, completion, reward}, tokens decoded to text."""
    parts = np.split(rollout.tokens, [rollout.prompt_length])
    prompt, completion = (exp.tokenizer.decode(part.tolist()) for part in parts)
    return {"prompt": prompt, "completion": completion, "reward": rollout.reward}


def _keep(path: pathlib.Path, entry: dict) -> None:
    """Adds an evaluation to a JSON file; replaces an earlier one of the same step and the same changed fields."""

    def place(e: dict) -> tuple:
        return e["step"], e.get("changed")

    others = [e for e in atomic_file.read_json(path, list) if place(e) != place(entry)]
    entries = sorted([*others, entry], key=lambda e: e["step"])
    atomic_file.write(path, (json.dumps(entries, indent=1) + "\n").encode())
