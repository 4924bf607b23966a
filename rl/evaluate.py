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
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

from absl import flags

from models import transformer
from rl import sft
from rl.evaluation import commands
from rl.experiment import command, experiment, initial, layout, report
from rl.experiment import rules as config_rules
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.experiment.reporting import metrics
from rl.learning.learner import train_step
from rl.protocol import env_mix, timeline
from rl.swarm import colocated_server, rollout_system
from rl.swarm import evaluations as evaluations_lib
from sharding.mesh import checkpoint, rules
from sharding.weights import broadcast, bucket


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
            with evaluations_lib.Evaluations(exp, orchestrator, workdir, writer, progress, changed) as evaluations:
                evaluations.begin(step, names=names_of_sets)
                collections.deque(evaluations.finished(wait=True), maxlen=0)
    if changed:
        path = workdir / "other_evaluations.json"
        progress.say(f"saved in {path}, apart from the run's own, because of {', '.join(changed)}")
    elif is_run:
        progress.say(f"report: {report.write(workdir)}")


if __name__ == "__main__":
    command.run(main)
