"""Supervised warm-up: the policy imitates solved tasks until it can begin to learn from reward.

    python -m rl.sft --config=configs/quickstart.py --workdir=runs/quickstart

1. Batch n holds the tasks `data.warmup_indices` names; each is rendered with its solution, and the assistant's tokens
   (its closing token included) carry the loss. With `warmup.decoy_fraction`, that part of them is answered wrongly
   instead, by the environment's decoy: a policy for RL to put right.
2. The batch is packed and stepped through exactly as in RL; only the loss differs (`cross_entropy`).
3. Checkpoints go to `<workdir>/warmup`; the same command resumes, and `rl.train` takes the last one as policy version 0.
"""

import dataclasses
import pathlib
import time

import jax
import numpy as np
from absl import flags

from models import tokenizer as tokenizer_lib
from models import transformer
from rl import data, envs, experiment, learner, metrics, packing
from rl.envs import environment
from sharding import checkpoint
from sharding import mesh as mesh_lib


def train(
    exp: experiment.Experiment,
    workdir: pathlib.Path,
    mesh: jax.sharding.Mesh,
    writer: metrics.MetricsWriter,
    progress: metrics.Progress,
) -> transformer.Params:
    """Runs (or resumes) the warm-up and returns its parameters; with 0 steps, the initial ones."""
    config = exp.raw
    optimizer = learner.make_optimizer(
        dataclasses.replace(exp.optimizer, learning_rate=config.warmup.learning_rate, warmup_steps=20)
    )
    num_steps = config.warmup.num_steps
    with checkpoint.Checkpointer(workdir / "warmup", keep=1, every=config.checkpoint.every) as checkpointer:
        restored = checkpointer.restore(learner.abstract_state(exp.model, optimizer, mesh))
        if restored:
            start, state, _ = restored
        else:
            start, state = 0, learner.init_state(jax.random.key(config.seed), exp.model, optimizer, mesh)
        if start == num_steps:
            return state.params
        writer.truncate("warm-up", start)
        step_fn = learner.make_train_step(exp.model, optimizer, "cross_entropy", {}, mesh)
        env = envs.load(config.env.name, seed=config.seed, **config.env.options.to_dict())
        layout = packing.Layout.for_streams(
            config.warmup.tasks_per_step,
            config.inference.max_model_len,
            row_length=config.train.row_length,
            rows=exp.rows(mesh),
        )
        progress.note("compiling the warm-up step")
        with progress.phase("warm-up", total=num_steps, unit="step", initial=start) as bar:
            for step in range(start + 1, num_steps + 1):
                begun = time.perf_counter()
                tasks = [env.make_task(index, "train") for index in data.warmup_indices(config, step)]
                trees = [
                    _stream(exp.tokenizer, task, _demonstration(task, config), config.inference.max_model_len)
                    for task in tasks
                ]
                batch = packing.pack(trees, layout)
                state, step_metrics = step_fn(state, packing.place(batch, mesh))
                values = {name: float(value) for name, value in jax.device_get(step_metrics).items()}
                values["time/step_s"] = time.perf_counter() - begun
                writer.write(step, "warm-up", values)
                bar.update(step, {"loss": values["loss/total"], "grad": values["loss/grad_norm"]})
                checkpointer.save(step, state, {}, force=step == num_steps)
    return state.params


def _demonstration(task: environment.Task, config) -> str:
    """The answer that is taught: right, or the decoy for a fixed part of the tasks, drawn by their index."""
    lot = environment.stable_hash(f"decoy/{config.seed}/{task.index}") / 2**64
    if lot >= config.warmup.decoy_fraction:
        return task.answer
    if not task.decoy:
        raise ValueError(f"{task.env} has no decoys; set config.warmup.decoy_fraction to 0")
    return task.decoy


def _stream(tokenizer: tokenizer_lib.Tokenizer, task: environment.Task, answer: str, max_length: int) -> packing.Tree:
    """A task and its answer as a stream: loss on what the assistant says."""
    rendered = tokenizer.render([*task.messages, {"role": "assistant", "content": answer}])
    end = max(i for i, mine in enumerate(rendered.assistant_mask) if mine) + 1  # what follows its end is template
    if end > max_length:
        raise ValueError(
            f"task {task.index} of {task.env} has {end} tokens with its solution, more than inference.max_model_len = "
            f"{max_length}; raise it (and train.row_length), or narrow env.options"
        )
    mask = np.array(rendered.assistant_mask[:end], np.float32)
    return packing.stream(np.array(rendered.token_ids[:end], np.int32), mask, np.zeros_like(mask), mask, 1.0)


def main() -> None:
    exp = experiment.resolve(flags.FLAGS.config)
    with experiment.open_workdir(flags.FLAGS.workdir, exp) as workdir:
        progress, writer = metrics.Progress(), metrics.MetricsWriter(workdir)
        if exp.raw.warmup.num_steps == 0:
            raise ValueError("warmup.num_steps = 0: there is nothing to do; set it to the number of supervised steps")
        train(exp, workdir, mesh_lib.create(exp.raw.mesh.to_dict()), writer, progress)
        progress.say(f"checkpoint: {workdir / 'warmup'}")


if __name__ == "__main__":
    experiment.define_flags()
    experiment.run(main)
