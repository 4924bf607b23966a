"""Held-out scores of a checkpoint: avg@k, pass@k, and pass^k, through the same servers and workers as training.

    python -m rl.evaluate runs/quickstart --step=100
    python -m rl.evaluate --config=configs/finetune.py --config.init_from=Qwen/Qwen3-0.6B
    python -m rl.evaluate endpoint | annotate | compare | leaderboard    (rl/evaluation/commands.py)

1. The checkpoint's parameters are published to a separate broadcast, with the step as version, the run's key and its dtype,
   so that servers elsewhere (`topology.mode = "remote"`) accept them. Without --workdir, they are those of `init_from`.
2. A server and workers roll out the held-out tasks, k samples each, at `evaluation.temperature`.
3. The scores are printed. Those of a run are kept in `<workdir>/evaluations.json`, once per step, and the report is written again.
   With other settings than the run's (`--config.evaluation.*`, `sampling.*`), they go to `other_evaluations.json`, with these fields.
4. Each sample is a row in `<workdir>/samples` (rl/evaluation/samples.py). `--sets` names the evaluation sets; default: that of `evaluation` itself.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    import sys

    from absl import flags

    from rl.evaluation import commands
    from rl.experiment import command

    if sys.argv[1:] and sys.argv[1] in commands.NAMES:
        sys.exit(commands.main())
    flags.DEFINE_list("sets", [], "evaluation sets to score, with commas; none: that of config.evaluation itself")
    flags.DEFINE_string("step", "newest", "a checkpoint's step, newest, or best (by held-out score)")
    flags.DEFINE_string("workdir", None, "directory of the run; without it, config.init_from is scored")
    command.parse(needs_workdir=False, is_complete=True)

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent import futures

import numpy as np
from absl import flags

from inference.rollouts import rollout as rollout_lib
from models import transformer
from rl import sft
from rl.evaluation import commands
from rl.evaluation import samples as samples_lib
from rl.evaluation import scores as scores_lib
from rl.experiment import command, experiment, initial, layout, report
from rl.experiment import rules as config_rules
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.experiment.reporting import metrics
from rl.learning.learner import train_step
from rl.protocol import env_mix, task_schedule, timeline
from rl.swarm import colocated_server, rollout_system
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator.remote import client
from sharding.mesh import checkpoint, rules
from sharding.system import atomic_file
from sharding.weights import broadcast, bucket

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
    place = lambda e: (e["step"], e.get("changed"))  # noqa: E731
    others = [e for e in atomic_file.read_json(path, list) if place(e) != place(entry)]
    entries = sorted([*others, entry], key=lambda e: e["step"])
    atomic_file.write(path, (json.dumps(entries, indent=1) + "\n").encode())


@contextlib.contextmanager
def open_checkpoint(
    *, needs_envs: bool = True
) -> Iterator[tuple[experiment.Experiment, pathlib.Path, int, transformer.Params]]:
    """Yields (experiment, work directory, step, the model's parameters) of the checkpoint that the command line names.

    `--step` is a number, "newest", or "best": the checkpoint with the highest held-out score. LoRA adapters are attached to the
    parameters. Before the first step of RL, the checkpoint is that of supervised fine-tuning (rl/sft.py), as step 0. The work directory
    stays locked during the block. Unless `needs_envs`, code and data of environments need not exist. Raises ValueError for another
    `--step` or another config, and FileNotFoundError if the checkpoint does not exist.
    """
    exp = sizes.resolve(flags.FLAGS.config, needs_envs=needs_envs, has_rollouts=needs_envs)
    try:
        mesh = layout.learner_mesh(exp.config)
    except ValueError as error:
        text = "this command runs on one host: set a mesh for it"
        raise ValueError(f"{error}; {text}, as in --config.mesh.fsdp=-1 --config.mesh.tensor=1") from None
    root = bucket.fetched(flags.FLAGS.workdir, ("*/seal.json",)).absolute()
    directory = root / ("checkpoints" if checkpoint.complete_steps(root / "checkpoints") else "warmup")
    if not checkpoint.complete_steps(directory):  # checked first: the lock creates a file
        raise FileNotFoundError(f"no checkpoint in {root}; set --workdir to that of a run of rl.train or rl.sft")
    with run_directory.read_workdir(flags.FLAGS.workdir, exp) as workdir:
        yield exp, workdir, *_restore_policy(exp, mesh, workdir / directory.name, flags.FLAGS.step)


def _restore_policy(exp, mesh, directory: pathlib.Path, wanted: str) -> tuple[int, transformer.Params]:
    is_supervised = directory.name == "warmup"
    if is_supervised and wanted not in ("newest", "0"):
        raise ValueError(f"--step={wanted}: {directory.parent} has taken no step of RL; set it to 0 or newest")
    if wanted == "best":
        step = checkpoint.best_step(directory)
    elif re.fullmatch("newest|[0-9]+", wanted):
        step = None if wanted == "newest" or is_supervised else int(wanted)
    else:
        raise ValueError(f"--step={wanted} does not name a checkpoint; set it to a step, newest, or best")
    learner = sft.make_learner(exp, mesh) if is_supervised else exp.learner(mesh)
    if not learner.lora:
        abstract = rules.abstract(train_step.trained_specs(exp.model), mesh)
        found, params = checkpoint.restore_params(directory, abstract, step)
    else:
        with checkpoint.Checkpointer(directory, keep=exp.config.checkpoint.keep) as checkpointer:
            restored = checkpointer.restore(train_step.abstract_state(learner), step)
        assert restored is not None, directory
        found, params = restored[0], train_step.policy(learner, restored[1])
    return 0 if is_supervised else found, params


@contextlib.contextmanager
def _open_initial() -> Iterator[tuple[experiment.Experiment, pathlib.Path, int, transformer.Params]]:
    """Yields the same as `open_checkpoint`, of the checkpoint in `init_from` and of an empty directory instead of a run's."""
    if not flags.FLAGS.config.init_from:
        raise ValueError("neither --workdir nor config.init_from is set; give the run or the checkpoint to score")
    exp = sizes.resolve(flags.FLAGS.config)
    params = initial.load(exp, layout.learner_mesh(exp.config))
    with tempfile.TemporaryDirectory() as workdir:
        yield exp, pathlib.Path(workdir), 0, params


def main() -> None:
    """Runs the command that scores one checkpoint, of a run or of `init_from`, on held-out tasks."""
    is_run, names_of_sets = bool(flags.FLAGS.workdir), flags.FLAGS.sets or [""]
    for name in names_of_sets:
        if name and name not in flags.FLAGS.config.evaluation.sets:
            known = ", ".join(flags.FLAGS.config.evaluation.sets) or "none"
            raise ValueError(f"--sets {name} does not name an evaluation set of the config; it has {known}")
    with contextlib.ExitStack() as stack:
        exp, workdir, step, params = stack.enter_context(open_checkpoint() if is_run else _open_initial())
        rollout_system.check(exp)
        config_rules.check_prompts(exp.config, exp.tokenizer)
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        # The fields that change scores and differ from the run's, with their values.
        fields, prefixes = experiment.fields(exp), ("evaluation.", "sampling.", "inference.max")
        names = run_directory.differences(workdir, exp) if is_run else []
        changed = {n: fields[n] for n in names if env_mix.run_field(n).startswith(prefixes)}
        weights, key = pathlib.Path(scratch) / "weights", run_directory.signing_key(workdir)
        key.save(pathlib.Path(scratch) / "weights.key")  # where the rollout system reads it
        options = broadcast.PublishOptions(key=key.private, dtype=exp.published_dtypes)
        tree, metadata = exp.published(params)
        broadcast.publish(tree, step, str(weights), options, metadata=metadata)
        entry = broadcast.entry_of(weights, step, key=key.worker)
        assert entry is not None  # just signed
        policy = timeline.Policy(entry.epoch, step, entry.sha256)
        progress, server = metrics.Progress(), None
        writer = metrics.MetricsWriter(workdir, run_directory.monitors(workdir, exp) if is_run else {})
        stack.callback(writer.close)
        if layout.is_colocated(exp.config):
            context = colocated_server.start(exp, weights, key.worker, policy, params)
            server = lambda: stack.enter_context(context)  # noqa: E731
        system = rollout_system.start_rollout_system(
            exp, pathlib.Path(scratch), weights, policy, progress.say, server=server
        )
        with system as orchestrator:
            with Evaluations(exp, orchestrator, workdir, writer, progress, changed) as evaluations:
                evaluations.begin(step, names=names_of_sets)
                collections.deque(evaluations.finished(wait=True), maxlen=0)
    if changed:
        path = workdir / "other_evaluations.json"
        progress.say(f"saved in {path}, apart from the run's own, because of {', '.join(changed)}")
    elif is_run:
        progress.say(f"report: {report.write(workdir)}")


if __name__ == "__main__":
    command.run(main)
