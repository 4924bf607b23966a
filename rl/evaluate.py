"""Held-out scores of a checkpoint: avg@k and pass@k, through the same servers and workers as training.

    python -m rl.evaluate --config=configs/quickstart.py --workdir=runs/quickstart --step=100

1. The checkpoint's parameters are published to a broadcast of their own, under the step as version: signed with the run's key and
   in the dtype of its broadcast, so that servers elsewhere (`topology.mode = "remote"`) take them as they take the run's.
2. A server and workers roll out the held-out tasks, k samples each, at `evaluation.temperature`.
3. The scores are printed and kept in `<workdir>/evaluations.json`, once per step, and the report is drawn anew.

Other questions than the run's own may be asked, as in `--config.evaluation.samples_per_task=8 --config.evaluation.temperature=0.6`
(or `evaluation.num_tasks`, `sampling.*`): those scores are kept apart, with what was changed, in `<workdir>/other_evaluations.json`.
"""

import json
import math
import pathlib
import re
import tempfile
import time

import jax
from absl import flags

from inference.rollouts import rollout as rollout_lib
from models import transformer
from rl import launch, report
from rl.experiment import experiment
from rl.experiment import workdir as run_directory
from rl.learner import train_step
from rl.orchestrator import orchestrator
from rl.reporting import metrics
from sharding import broadcast, checkpoint
from sharding import mesh as mesh_lib
from sharding.system import atomic_file

NUM_SAMPLES_SHOWN = 12


def held_out(
    exp: experiment.Experiment,
    rollouts: orchestrator.Orchestrator,
    version: int,
    workdir: pathlib.Path,
    writer: metrics.MetricsWriter,
    progress: metrics.Progress,
    changed: dict | None = None,
) -> dict[str, float]:
    """Scores `version`, which the servers have, and keeps scores and samples for the report; apart from it, where the config
    that asks has `changed` fields of the run's own."""
    begun = time.perf_counter()
    progress.note(f"evaluating version {version} on {exp.config.evaluation.num_tasks} held-out tasks")
    groups = rollouts.evaluate(version)
    result = scores(groups)
    samples = [_shown(exp, group[0]) for group in groups[:NUM_SAMPLES_SHOWN]]
    entry = {"step": version, "phase": "rl", "scores": result, "samples": samples}
    if changed:
        _keep(workdir / "other_evaluations.json", entry | {"changed": changed})
    else:
        _keep(workdir / "evaluations.json", entry)
        writer.truncate("evaluation", version - 1)
        writer.write(
            version,
            "evaluation",
            {f"held_out/{name.replace('@', '_at_')}": value for name, value in result.items()}
            | {"time/eval_s": time.perf_counter() - begun},
        )
    progress.say(
        f"held-out, version {version}: " + "  ".join(f"{k} {metrics.format_value(v)}" for k, v in result.items())
    )
    return result


def scores(groups: list[list[rollout_lib.Rollout]]) -> dict[str, float]:
    """avg@k: mean reward over tasks and samples. pass@j: chance that one of j samples has the full reward of 1.

    pass@j = mean over tasks of 1 - C(k - c, j) / C(k, j), c of k samples right (arXiv 2107.03374, eq. 1), for the powers
    of two up to k.
    """
    k = len(groups[0])
    right = [sum(rollout.reward >= 1.0 for rollout in group) for group in groups]
    result = {f"avg@{k}": sum(rollout.reward for group in groups for rollout in group) / (k * len(groups))}
    j = 1
    while j <= k:
        result[f"pass@{j}"] = sum(1 - math.comb(k - c, j) / math.comb(k, j) for c in right) / len(groups)
        j *= 2
    return result | {"num_tasks": len(groups)}


def is_done(workdir: pathlib.Path, step: int) -> bool:
    """Whether `step` was scored before: a run may end between a checkpoint and its evaluation."""
    return any(entry["step"] == step for entry in _entries(workdir / "evaluations.json"))


def headline(result: dict[str, float]) -> float:
    """The one number of `scores` that checkpoints are ranked by: avg@k."""
    return next(value for name, value in result.items() if name.startswith("avg@"))


def summary(workdir: pathlib.Path) -> list[str]:
    """First and last held-out scores, a line each."""
    entries = _entries(workdir / "evaluations.json")
    return [
        f"held-out {name}: {entries[0]['scores'][name]:.3f} (version {entries[0]['step']}) -> "
        f"{entries[-1]['scores'][name]:.3f} (version {entries[-1]['step']})"
        for name in entries[-1]["scores"]
        if name != "num_tasks" and name in entries[0]["scores"]
    ]


def _shown(exp: experiment.Experiment, rollout: rollout_lib.Rollout) -> dict:
    """A rollout as text for people."""
    text = exp.tokenizer.decode
    return {
        "prompt": text(rollout.tokens[~rollout.sampled_mask].tolist(), skip_special=True),
        "completion": text(rollout.tokens[rollout.sampled_mask].tolist(), skip_special=True),
        "reward": rollout.reward,
    }


def _keep(path: pathlib.Path, entry: dict) -> None:
    """Adds an evaluation to a file of them, in the place of one of the same step and the same questions."""
    same = (entry["step"], entry.get("changed"))
    entries = [e for e in _entries(path) if (e["step"], e.get("changed")) != same]
    entries = sorted([*entries, entry], key=lambda e: e["step"])
    atomic_file.write(path, (json.dumps(entries, indent=1) + "\n").encode())


def _entries(path: pathlib.Path) -> list[dict]:
    return json.loads(path.read_text()) if path.exists() else []


def restore_policy(
    exp: experiment.Experiment, mesh: jax.sharding.Mesh, workdir: pathlib.Path, wanted: str
) -> tuple[int, transformer.Params]:
    """(step, parameters of the whole model) of a run's checkpoint: `wanted` is a step, "newest" or "best" (held-out score).

    A run with adapters merges them, and needs all of its state for that.
    """
    directory = workdir / "checkpoints"
    if wanted != "best" and wanted != "newest" and not re.fullmatch("[0-9]+", wanted):
        raise ValueError(f"--step={wanted} is no checkpoint; give a step, newest, or best")
    if wanted == "best":
        step = checkpoint.best_step(directory)
    else:
        step = None if wanted == "newest" else int(wanted)
    if not exp.lora:
        return checkpoint.restore_params(str(directory), transformer.abstract(exp.model, mesh), step)
    learner = exp.learner(mesh)
    with checkpoint.Checkpointer(directory, keep=exp.config.checkpoint.keep) as checkpointer:
        step, state, _ = checkpointer.restore(train_step.abstract_state(learner), step)
    return step, train_step.policy(learner, state)


def check_run(workdir: str) -> None:
    """FileNotFoundError, before anything is created, where `workdir` holds no run."""
    if not (pathlib.Path(workdir) / "checkpoints").is_dir():
        raise FileNotFoundError(f"no checkpoints in {workdir}; give the --workdir of a run of rl.train")


def main() -> None:
    exp = experiment.resolve(flags.FLAGS.config)
    mesh = mesh_lib.create(exp.config.mesh.to_dict())
    check_run(flags.FLAGS.workdir)
    with run_directory.read_workdir(flags.FLAGS.workdir, exp) as workdir, tempfile.TemporaryDirectory() as scratch:
        changed = _changed(workdir, exp)
        step, params = restore_policy(exp, mesh, workdir, flags.FLAGS.step)
        weights, key = pathlib.Path(scratch) / "weights", run_directory.signing_key(workdir)
        key.save(pathlib.Path(scratch) / "weights.key")  # where the rollout side looks for it
        options = broadcast.PublishOptions(key=key.private, dtype=exp.config.broadcast.dtype or None)
        broadcast.publish(params, step, str(weights), options, metadata=exp.broadcast_metadata)
        progress, writer = metrics.Progress(), metrics.MetricsWriter(workdir)
        with launch.start_rollout_system(exp, pathlib.Path(scratch), weights, step, progress.say) as rollouts:
            held_out(exp, rollouts, step, workdir, writer, progress, changed)
    if changed:
        progress.say(f"kept in {workdir / 'other_evaluations.json'}, since {', '.join(changed)} differs from the run's")
    else:
        progress.say(f"report: {report.write(workdir)}")


def _changed(workdir: pathlib.Path, exp: experiment.Experiment) -> dict:
    """Field -> value of what makes these scores others than the run's own."""
    names = [
        n
        for n in run_directory.differences(workdir, exp)
        if n.startswith(("evaluation.", "sampling.", "inference.max"))
    ]
    fields = experiment.fields(exp)
    return {name: fields[name] for name in names}


if __name__ == "__main__":
    experiment.define_flags()
    flags.DEFINE_string("step", "newest", "a checkpoint's step, newest, or best (by held-out score)")
    experiment.run(main)
