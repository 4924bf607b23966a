"""Supervised fine-tuning: the policy imitates conversations, alone or as a warm-up before RL.

    python -m rl.sft --config=configs/quickstart.py --workdir=runs/quickstart

1. Batch n is a pure function of the config: tasks of the environments (`task_schedule.warmup_tasks`), each with its solution
   or, for the fraction `warmup.decoy_fraction`, a wrong one, which RL then corrects; or rows of the files `warmup.data`.
2. A conversation is rendered once, with tools and all turns. The loss is on the messages of `warmup.roles`
   (rl/learning/batch/conversations.py).
3. The batch is packed, sent to other hosts, and stepped through exactly as in RL; only the loss differs (`cross_entropy`).
   With `lora.rank` and a checkpoint in `init_from` adapters train, as in RL.
4. Training ends early after `warmup.patience` held-out losses without a new best, one every `warmup.eval_every` steps.
5. Checkpoints go to `<workdir>/warmup`; the same command resumes, and `rl.train` takes the last one as policy version 0.
6. The command publishes that version, so that `inference.serve --weights WORKDIR` serves it; `rl.export` writes it as a folder.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from rl.experiment import command

    command.parse(is_complete=True, has_rollouts=False)

import contextlib
import dataclasses
import functools
import pathlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
from absl import flags

from models import transformer
from rl import envs
from rl.envs.interface import environment
from rl.experiment import command, experiment, initial, layout, report
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.experiment.reporting import diagnostics, metrics, start_clock
from rl.learning.batch import conversations, host_feed, packing
from rl.learning.data import sources
from rl.learning.learner import objective, optimizers, train_step
from rl.protocol import task_schedule
from sharding.mesh import checkpoint
from sharding.system.multihost import failure
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import bucket

MOST_LINES = 20  # of the check's progress
AHEAD = 2  # batches that a thread prepares while the last one trains


def train(
    exp: experiment.Experiment,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    writer: metrics.MetricsWriter,
    progress: metrics.Progress,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
    before_step: Callable[[], object] = lambda: None,
) -> transformer.Params:
    """Runs or resumes the warm-up (supervised fine-tuning before RL) and returns the policy's parameters. All hosts must call it.

    `before_step` is called before each step; an error of it ends the warm-up.
    """
    config = exp.config
    if config.init_from and not config.warmup.num_steps:
        return initial.load(exp, mesh, workdir, hosts)  # without the moments of an optimizer
    learner = make_learner(exp, mesh)
    take_step, rate = train_step.jit_train_step(learner), optimizers.learning_rate(rates(exp))
    num_steps, options = config.warmup.num_steps, config.checkpoint.to_dict() | {"keep": 1, "hosts": hosts}
    with checkpoint.Checkpointer(workdir / "warmup", **options) as checkpointer:
        start, state, patience = _restore_or_init(exp, learner, checkpointer, workdir, hosts)
        if start == num_steps or patience.is_over:
            return train_step.policy(learner, state)
        writer.truncate("warm-up", start)
        source = (from_files(exp) if config.warmup.data else from_tasks(exp)) if hosts.is_first else None
        if source and start == 0:
            _check(source.examples, progress)
        layout, held_out = exp.layout(mesh, config.warmup.tasks_per_step), None
        if config.warmup.eval_every:
            held_out_layout = exp.layout(mesh, config.warmup.eval_tasks)
            held_out = host_feed.place(source.held_out() if source else None, held_out_layout, mesh, hosts)
        progress.note("compiling the warm-up step")
        # Before the display's clock starts: it derives the rate from the first step.
        start_clock.mark("preparation")
        train_step.compile_train_step(learner, packing.abstract(layout, mesh))
        start_clock.mark("warm-up program")
        with hosts.terminable(), progress.phase("warm-up", total=num_steps, initial=start) as bar:
            for step in range(start + 1, num_steps + 1):
                before_step()
                begun = time.perf_counter()
                packed = host_feed.place(source.batch(step) if source else None, layout, mesh, hosts)
                with jax.transfer_guard("disallow"):
                    state, step_metrics = take_step(state, packed)
                values = {name: float(value) for name, value in jax.device_get(step_metrics).items()}
                if bad := hosts.broadcast(diagnostics.not_finite(values)):
                    raise ValueError(
                        f"{bad} is {values[bad]} at warm-up step {step}; the last good checkpoint is step "
                        f"{checkpointer.latest_step()}; look at the examples, or lower warmup.learning_rate"
                    )
                if held_out is not None and (step % config.warmup.eval_every == 0 or step == num_steps):
                    policy = train_step.policy(learner, state)
                    values["loss/held_out"] = hosts.broadcast(nll(learner, policy, held_out))
                    patience = patience.after(values["loss/held_out"])
                values["optimizer/learning_rate"] = float(jax.device_get(rate(step - 1)))
                values["time/step_s"] = time.perf_counter() - begun
                writer.write(step, "warm-up", values)
                shown = {"loss": "loss/total", "held-out": "loss/held_out", "grad": "loss/grad_norm"}
                bar.update(step, {short: values[name] for short, name in shown.items() if name in values})
                is_last = step == num_steps or patience.is_over
                is_ending = hosts.broadcast(hosts.is_terminating)
                checkpointer.save(step, state, dataclasses.asdict(patience), force=is_last or is_ending)
                if is_ending:
                    checkpointer.wait()
                    raise failure.Terminated(f"warm-up step {step}")
                if is_last:
                    break
        start_clock.mark(start_clock.WARM_UP)
        if patience.is_over:
            progress.say(f"stopped at step {step}: {patience.num_worse} held-out losses not below {patience.best:.4g}")
    return train_step.policy(learner, state)


def make_learner(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> train_step.Learner:
    """Returns the `Learner` of supervised fine-tuning. Without `init_from` all parameters train: adapters next to random ones would learn nothing."""
    lora = exp.lora if exp.config.init_from else None
    loss, optimizer = objective.bind("cross_entropy", {}), train_step.make_optimizer(rates(exp), exp.model, lora)
    return train_step.Learner(exp.model, optimizer, loss, mesh, lora=lora, share_prompts=False)


def rates(exp: experiment.Experiment) -> optimizers.OptimizerConfig:
    """Returns the optimizer's config with the learning rates of the warm-up."""
    warmup = exp.config.warmup
    rates = {"learning_rate": warmup.learning_rate, "warmup_steps": warmup.rate_steps, "schedule": "constant"}
    return dataclasses.replace(exp.optimizer, **rates)


def _restore_or_init(exp, learner: train_step.Learner, checkpointer: checkpoint.Checkpointer, workdir, hosts):
    """Restores the newest checkpoint, or makes the state of step 0. Returns (step, train state, patience)."""
    if restored := checkpointer.restore(train_step.abstract_state(learner)):
        step, state, host = restored
        return step, state, Patience(**host)
    params = initial.load(exp, learner.mesh, workdir, hosts) if exp.config.init_from else None
    state = train_step.init_state(jax.random.key(exp.config.seed), learner, params)
    return 0, state, Patience(limit=exp.config.warmup.patience)


@dataclasses.dataclass(frozen=True)
class Patience:
    """The state of early stopping: training ends after `limit` held-out losses in a row without a new best; 0 disables it."""

    limit: int = 0
    best: float = 1e30  # JSON has no infinity
    num_worse: int = 0

    @property
    def is_over(self) -> bool:
        """True if `num_worse` has reached the limit, so that training should stop."""
        return 0 < self.limit <= self.num_worse

    def after(self, loss: float) -> "Patience":
        """Returns the state of early stopping after one more held-out loss."""
        num_worse = 0 if loss < self.best else self.num_worse + 1
        return dataclasses.replace(self, best=min(self.best, loss), num_worse=num_worse)


class Source(NamedTuple):
    """The conversations to train on, by step, and those held out."""

    batch: Callable[[int], list[packing.Tree]]  # of step n
    held_out: Callable[[], list[packing.Tree]]
    examples: Sequence = ()  # to be checked before the first step


def _stream(exp: experiment.Experiment, conversation: dict, where: str) -> packing.Tree:
    limits = {"roles": exp.config.warmup.roles, "max_length": exp.config.inference.max_model_len}
    try:
        return conversations.tree(exp.tokenizer, **conversation, **limits)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _numbered_stream(exp: experiment.Experiment, path: str, number: int, conversation: dict) -> packing.Tree:
    return _stream(exp, conversation, f"{path}, conversation {number}")


def from_tasks(exp: experiment.Experiment) -> Source:
    """Returns a source of training conversations: tasks of the run's environments with their answers."""
    config = exp.config
    found = envs.load_all(config)
    for env in found.values() if config.warmup.decoy_fraction else ():  # an error before the first compilation
        demonstration(env, env.make_task(0, "train"), config.seed, is_decoy=True)

    def tree(name, index, split):
        env = found[name]
        task, is_decoy = env.make_task(index, split), split == "train" and _is_decoy(index, config)
        conversation = conversations.parse(demonstration(env, task, config.seed, is_decoy))
        return _stream(exp, conversation, f"task {index} of {task.env}")

    def batch(step):
        return [tree(env, index, "train") for env, index in task_schedule.warmup_tasks(config, step)]

    def held_out():
        numbers = range(config.warmup.eval_tasks)
        return [tree(*task_schedule.in_turn([*found], number), "held_out") for number in numbers]

    return Source(batch, held_out)


def from_files(exp: experiment.Experiment) -> Source:
    """Returns a source of the conversations in `warmup.data`, in a new order every epoch; `eval_every` holds out the last of each file."""
    warmup = exp.config.warmup
    paths = [path.strip() for path in warmup.data.split(",")]
    share, parts, held = -(-warmup.eval_tasks // len(paths)) if warmup.eval_every else 0, [], []
    for path in paths:
        if len(rows := conversations.read(path)) <= share:
            raise ValueError(
                f"warmup.data = {path} has {len(rows)} conversations, all of them held out (warmup.eval_tasks = "
                f"{warmup.eval_tasks}); add conversations, or set warmup.eval_tasks lower"
            )
        trees = sources.Mapped(functools.partial(_numbered_stream, exp, path), rows)
        num_trained = len(rows) - share
        parts.append(sources.Chosen(trees, range(num_trained)))
        held.append(sources.Chosen(trees, range(num_trained, len(rows))))
    batch = in_order(mix(parts, warmup.weights, warmup.tasks_per_step, exp.config.seed))
    held_out = sources.join(held)
    held_out = sources.Chosen(held_out, range(min(warmup.eval_tasks, len(held_out))))
    return Source(lambda step: batch(step - 1), lambda: list(held_out), sources.join([*parts, held_out]))


def mix(
    parts: Sequence[sources.Rows], weights: Sequence[float], size: int, seed: int
) -> grain.MapDataset[list[sources.Row]]:
    """Returns the endless batches of `size` rows of some sources, with random access.

    Source i gives the fraction weights[i] / sum(weights) of the rows. Without weights, the rows of all sources are shuffled together.
    """
    if weights and len(weights) != len(parts):
        found = f"warmup.weights has {len(weights)} numbers for {len(parts)} files of warmup.data"
        raise ValueError(f"{found}; give one for each, or none")
    parts = parts if weights else [sources.join(parts)]
    shuffled = [grain.MapDataset.source(part).shuffle(seed=seed + i).repeat() for i, part in enumerate(parts)]
    mixed = grain.MapDataset.mix(shuffled, weights=list(weights)) if weights else shuffled[0]
    return mixed.batch(size, drop_remainder=True, batch_fn=list)


def in_order(batches: grain.MapDataset) -> Callable[[int], Any]:
    """Returns a function of a batch's number, from 0. A thread prepares the batches that follow; any other number begins there."""
    iterator, following = iter(batches.to_iter_dataset(grain.ReadOptions(1, prefetch_buffer_size=AHEAD))), 0

    def batch(number: int) -> Any:
        nonlocal following
        if number != following:
            iterator.set_state({"next_index": number})
        following = number + 1
        return next(iterator)

    return batch


def _check(examples: Sequence, progress: metrics.Progress) -> None:
    """Makes each example once, since its batch may be hours away. Raises ValueError with the first that cannot be trained on, and their number."""
    first, num_bad, count = None, 0, len(examples)
    with progress.phase("checking conversations", total=count) as bar:
        for number in range(1, count + 1):
            try:
                examples[number - 1]
            except ValueError as error:
                first, num_bad = first or error, num_bad + 1
            if number == count or number % -(-count // MOST_LINES) == 0:
                bar.update(number, {"refused": num_bad})
    if first:
        raise ValueError(f"{first} ({num_bad} of {count} conversations are refused)")


def nll(learner: train_step.Learner, params: transformer.Params, batch: packing.TrainBatch) -> float:
    """Returns the mean negative log-likelihood per trained token of a batch, in nats."""
    logp = train_step.score(learner, params, batch)
    return float(-jnp.sum(logp * batch.loss_mask) / jnp.sum(batch.loss_mask))


def _is_decoy(index: int, config) -> bool:
    """Returns True for the fraction `decoy_fraction` of the tasks, whose demonstrations are wrong."""
    return environment.stable_hash(f"decoy/{config.seed}/{index}") / 2**64 < config.warmup.decoy_fraction


def demonstration(env: environment.Environment, task: environment.Task, seed: int, is_decoy: bool) -> dict:
    """Returns the conversation to imitate: a solution, or a wrong one if `is_decoy`. Raises ValueError if a wrong one does not exist."""
    if env.demonstrate:
        rng = random.Random(environment.stable_hash(f"demonstration/{seed}/{task.split}/{task.index}"))
        return env.demonstrate(task, rng, is_decoy)
    if is_decoy and not task.decoy:
        raise ValueError(f"environment {task.env!r} has no decoys; set config.warmup.decoy_fraction to 0")
    *before, last = [*task.messages, {"role": "assistant", "content": task.decoy if is_decoy else task.answer}]
    if before and before[-1]["role"] == "assistant":  # which the answer continues
        opened = before.pop()
        last = opened | {"content": opened["content"] + last["content"]}
    return {"messages": [*before, last]}


@contextlib.contextmanager
def _whole(workdir: str, hosts: hosts_lib.Hosts) -> Iterator[None]:
    """Removes the local working directory that the block makes if it fails before the first step, so that nothing is left to resume."""
    path = pathlib.Path(workdir)
    is_new = bool(workdir) and hosts.is_first and not bucket.is_url(workdir) and not path.exists()
    try:
        yield
    except BaseException:
        if is_new and not metrics.read(path / "metrics.jsonl"):
            shutil.rmtree(path, ignore_errors=True)
        raise


def main() -> None:
    if flags.FLAGS.config.warmup.num_steps == 0:
        raise ValueError("warmup.num_steps = 0, so no step would be taken; set it to at least 1")
    with experiment.joined() as hosts:
        exp = sizes.resolve(flags.FLAGS.config, has_rollouts=False)
        mesh = layout.learner_mesh(exp.config)
        initial.check(exp.config.init_from)
        free = run_directory.FOR_ROLLOUTS if exp.config.warmup.data else ()
        name = flags.FLAGS.workdir
        with _whole(name, hosts), run_directory.open_workdir(name, exp, hosts, free) as workdir:
            progress, writer = metrics.of_host(workdir, hosts, run_directory.monitors(workdir, exp, hosts))
            params = train(exp, mesh, workdir, writer, progress, hosts)
            if hosts.broadcast(bool(checkpoint.complete_steps(workdir / "checkpoints"))):  # RL has begun
                progress.say(f"checkpoint: {workdir / 'warmup'}")
                return
            with run_directory.publisher(workdir, exp, hosts) as publisher:
                if hosts.is_first:
                    publisher.forget(0)
                hosts.broadcast()
                tree, metadata = exp.published(params)
                publisher.publish(tree, 0, metadata=metadata)
            progress.say(f"checkpoint: {workdir / 'warmup'}; chat: python -m inference.chat --weights {workdir}")
            if hosts.is_first:
                progress.say(f"report: {report.write(workdir)}")


if __name__ == "__main__":
    command.run(main)
