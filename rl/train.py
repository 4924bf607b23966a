"""Asynchronous GRPO from one command: warm-up, rollouts, proofs, learning, evaluation, report.

    python -m rl.train --config=configs/quickstart.py --workdir=runs/quickstart

1. main: flags, `experiment.resolve`, the working directory.
2. Warm-up (rl/sft.py) gives policy version 0, unless a checkpoint is there to resume from.
3. The rollout side starts: broadcast, server, workers, validator, all behind the orchestrator.
4. The loop: wait for a batch, one `train_step`, publish the new version, metrics, checkpoint, evaluation.
5. Held-out score before and after, report.html.

The loop below is the whole of it: it holds no maths (rl/learner/train_step.py) and starts no process (rl/launch.py). Killed at any
moment, the same command resumes from the last complete checkpoint; with `rl.max_lag = 0` the resumed run is bit-identical.

Over several hosts each runs the loop, and all take every step, publish and save together. The first host alone has the rollout side,
the score and what people read; the others get their rows of each batch from it (rl/batch/host_feed.py), and end when it does (sharding/multihost/hosts.py).
"""

import contextlib
import dataclasses
import pathlib
import time
from concurrent import futures

import jax
from absl import flags
from jax.experimental import multihost_utils

from inference.server import inference_server
from rl import envs, evaluate, launch, report, sft
from rl.batch import host_feed, packing
from rl.experiment import experiment
from rl.experiment import rules as config_rules
from rl.experiment import workdir as run_directory
from rl.learner import optimizers
from rl.learner import reference as reference_lib
from rl.learner import train_step as learner
from rl.reporting import diagnostics, metrics
from rl.verification import verifier
from sharding import broadcast, checkpoint, rules
from sharding import mesh as mesh_lib
from sharding.multihost import hosts as hosts_lib
from sharding.system import sockets


def train(
    exp: experiment.Experiment,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> pathlib.Path | None:
    """Runs or resumes the experiment in `workdir` on the learner's `mesh`; returns the path of its report, on the first host."""
    config, weights = exp.config, workdir / "weights"
    progress, writer = metrics.of_host(workdir, hosts)
    optimizer = learner.make_optimizer(exp.optimizer, exp.model, exp.lora)
    train_step = learner.make_train_step(
        exp.model,
        optimizer,
        exp.loss,
        exp.loss_options,
        mesh,
        exp.objective,
        exp.lora,
        config.train.share_prompts,
    )
    publisher = broadcast.Publisher(
        str(weights),
        key=run_directory.signing_key(workdir, hosts).private,
        snapshot_every=config.broadcast.snapshot_every,
        keep=config.rl.max_lag + config.rl.max_off_policy + 2,  # every version that a rollout in flight may name
        dtype=config.broadcast.dtype or None,
    )
    policy, rate = learner.make_policy(exp.model, mesh, exp.lora), optimizers.learning_rate(exp.optimizer)
    layout = packing.Layout.for_streams(
        config.rl.prompts_per_step * config.rl.samples_per_prompt,
        config.inference.max_model_len,
        row_length=config.train.row_length,
        rows=exp.rows(mesh),
        shards=rules.num_batch_shards(mesh),
        # A layer multiplies a token by about 12 D^2 parameters, and a key takes 2 D products more.
        key_cost=1 / (6 * exp.model.model_dim),
        streams=exp.credit.streams,
        router_replay=exp.credit.router_replay,
    )

    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(
            checkpoint.Checkpointer(
                workdir / "checkpoints", keep=config.checkpoint.keep, every=config.checkpoint.every, hosts=hosts
            )
        )
        reference = reference_lib.make(
            exp.objective,
            exp.model,
            mesh,
            lambda: sft.train(exp, workdir, mesh, writer, progress, hosts),
            vocab_size=exp.tokenizer.vocab_size,
            share_prompts=exp.credit.share_prompts,
        )
        state, start, known = _restore_or_warm_up(exp, workdir, mesh, optimizer, checkpointer, writer, progress, hosts)
        writer.truncate("rl", start)
        if hosts.is_first:
            _forget_versions(weights, start)
        hosts.agree()
        publisher.publish(policy(state), start, metadata=exp.broadcast_metadata)
        if hosts.is_first:
            progress.note("starting the rollout server and its workers")
            rollouts = stack.enter_context(
                launch.start_rollout_system(exp, workdir, weights, start, progress.say, hosts.count, known)
            )
        # Compiled while the first score and the first batch are made.
        with_reference = ("ref_logp",) if reference is not None else ()
        shapes = packing.abstract(dataclasses.replace(layout, streams=layout.streams + with_reference), mesh)
        compiler = futures.ThreadPoolExecutor(1)
        stack.callback(compiler.shutdown, wait=False)
        compiled = compiler.submit(train_step.compile, shapes)
        stack.push(hosts.tell)

        def score(step):
            result = evaluate.held_out(exp, rollouts, step, workdir, writer, progress)
            checkpointer.score(step, evaluate.headline(result))

        unscored = start < config.rl.num_steps and _is_scored(config, start)
        if hosts.is_first and unscored and not evaluate.is_done(workdir, start):
            score(start)

        if not compiled.done():
            progress.note("compiling the train step")
        compiled.result()
        with progress.phase("rl", total=config.rl.num_steps, unit="step", initial=start) as bar:
            history = []
            for step in range(start + 1, config.rl.num_steps + 1):
                clock = _Clock()
                with clock("wait"):
                    batch = rollouts.next_batch(step) if hosts.is_first else None
                with clock("train_step"):
                    host_batch = packing.pack(batch.trees, layout) if hosts.is_first else None
                    packed = host_feed.place(host_batch, layout, mesh, hosts)
                    if reference is not None:
                        packed = packed.replace(ref_logp=reference(packed))
                    state, step_metrics = train_step(state, packed)
                    values = {name: float(value) for name, value in jax.device_get(step_metrics).items()}
                    if bad := hosts.agree(diagnostics.not_finite(values)):
                        before = {"step": step - 1, "rollouts": rollouts.state(step - 1) if hosts.is_first else {}}
                        _stop(step, f"{bad} is {values[bad]}", exp, packed, state, before, checkpointer, workdir, hosts)
                with clock("publish"):
                    publisher.publish(policy(state), step, metadata=exp.broadcast_metadata)
                    if hosts.is_first:
                        rollouts.publish(step)
                is_last, scored = step == config.rl.num_steps, _is_scored(config, step)
                with clock("checkpoint"):
                    host_state = {"step": step, "rollouts": rollouts.state(step) if hosts.is_first else {}}
                    checkpointer.save(step, state, host_state, force=scored or is_last)
                if not hosts.is_first:
                    continue
                with clock("eval"):
                    if scored and not is_last:
                        score(step)
                values["optimizer/learning_rate"] = float(rate((step - 1) * exp.objective.optimizer_steps))
                values |= batch.metrics | clock.seconds(num_tokens=batch.metrics["rollout/num_tokens"])
                values |= diagnostics.derived(values)
                values |= diagnostics.of_groups(batch.groups, step=step, max_tokens=config.sampling.max_tokens)
                writer.write(step, "rl", values)
                bar.update(step, _line(values))
                history.append(values)
                if step % 5 == 0 and (line := diagnostics.advice(history)):
                    progress.say(f"advice: {line}")
        if hosts.is_first:
            score(config.rl.num_steps)
    if not hosts.is_first:
        return None
    path = report.write(workdir)
    progress.say(*evaluate.summary(workdir), f"report: {path}")
    return path


def _restore_or_warm_up(exp, workdir, mesh, optimizer, checkpointer, writer, progress, hosts):
    """The train state to start from, the last step it has seen, and what the rollout side knew then: a checkpoint, or the end
    of the warm-up as step 0."""
    restored = checkpointer.restore(learner.abstract_state(exp.model, optimizer, mesh, exp.lora))
    if restored:
        step, state, host_state = restored
        if step > exp.config.rl.num_steps:
            raise ValueError(
                f"{workdir} has taken {step} steps, more than rl.num_steps = {exp.config.rl.num_steps}; raise it, or export "
                f"an earlier checkpoint (python -m rl.export)"
            )
        progress.say(f"resuming after step {step} from {workdir / 'checkpoints'}")
        return state, step, host_state.get("rollouts")
    params = sft.train(exp, workdir, mesh, writer, progress, hosts)
    state = learner.init_state(jax.random.key(exp.config.seed), exp.model, optimizer, mesh, params, exp.lora)
    checkpointer.save(0, state, {"step": 0}, force=True)
    return state, 0, None


def _forget_versions(weights: pathlib.Path, start: int) -> None:
    """Deletes what was published from beyond the checkpoint, or was not synced to disk when the power failed."""
    for newer in broadcast.versions(str(weights)) if weights.exists() else ():
        if newer >= start:
            broadcast.remove(str(weights), newer)


def _is_scored(config, step: int) -> bool:
    """Whether the held-out tasks are rolled out after `step`, beside the last."""
    return step == 0 or (config.evaluation.every > 0 and step % config.evaluation.every == 0)


def _stop(step, reason: str, exp, packed, state, host_state, checkpointer: checkpoint.Checkpointer, workdir, hosts):
    """Raises, and leaves what a replay needs: the batch, and the state that met it (unless it took several optimizer steps)."""
    whole = packed if hosts.count == 1 else multihost_utils.process_allgather(packed, tiled=True)
    if hosts.is_first:
        packing.save(whole, workdir / "failed_batch.npz")
    checkpointer.wait()
    if exp.objective.optimizer_steps == 1 and hosts.agree(step - 1 > (checkpointer.latest_step() or 0)):
        checkpointer.save(step - 1, state.replace(step=state.step - 1), host_state, force=True)
        checkpointer.wait()
    raise ValueError(
        f"{reason} at step {step}; nothing of this step was published. Its batch is {workdir / 'failed_batch.npz'}, its "
        f"rollouts are in {workdir / 'rollouts' / f'step_{step}'}, the last good checkpoint is step "
        f"{checkpointer.latest_step()}; look at the rollouts, or start another --workdir with a lower optimizer.learning_rate"
    )


class _Clock:
    """Seconds of one step by what the loop waited for: `with clock("publish"): ...`."""

    def __init__(self):
        self._begun, self._parts = time.perf_counter(), {}

    @contextlib.contextmanager
    def __call__(self, part: str):
        begun = time.perf_counter()
        yield
        self._parts[f"time/{part}_s"] = time.perf_counter() - begun

    def seconds(self, *, num_tokens: float) -> dict[str, float]:
        """time/<part>_s, time/step_s, and time/tokens_per_s of sampled tokens."""
        total = time.perf_counter() - self._begun
        return self._parts | {"time/step_s": total, "time/tokens_per_s": num_tokens / total}


def _line(values: dict[str, float]) -> dict[str, float]:
    """What the terminal shows of a step; a loss of one's own need not compare policies."""
    shown = {
        "reward": "rollout/reward",
        "loss": "loss/total",
        "kl": metrics.sampler_kl(values),
        "entropy": "loss/entropy",
        "lag": "sync/lag",
        "tok/s": "time/tokens_per_s",
        "accepted": "trust/num_accepted",
        "refused": "trust/num_refused",
    }
    return {short: values[name] for short, name in shown.items() if name in values}


def _check(exp: experiment.Experiment, mesh: jax.sharding.Mesh, hosts: hosts_lib.Hosts) -> None:
    """Raises every mistake that can be known before the working directory is claimed, and before minutes of warm-up."""
    config = exp.config
    exp.rows(mesh)
    config_rules.check_trainable(config)
    launch.check(exp, hosts.count)
    if config.init_from:
        sft.check_initial(exp)
    if config.objective.reference_model:
        reference_lib.model_of(exp.objective, exp.model, exp.tokenizer.vocab_size)
    if config.warmup.num_steps and config.warmup.data and not pathlib.Path(config.warmup.data).is_file():
        raise ValueError(f"warmup.data = {config.warmup.data!r} is no file; give a JSONL file of conversations")
    if not hosts.is_first:
        return
    envs.load(config.env.name, seed=config.seed, **config.env.options.to_dict())
    if config.trust.bands:
        if not pathlib.Path(config.trust.bands).is_file():
            raise ValueError(
                f"trust.bands = {config.trust.bands!r} is no file; give what `python -m rl.validator calibrate` wrote"
            )
        verifier.load_bands(config.trust.bands)
    sockets.listen(config.topology.host, config.topology.port).close()
    if config.topology.mode == "remote":
        sockets.listen(config.topology.relay_host, config.topology.relay_port).close()
    elif exp.server_mesh:
        try:
            inference_server.host_mesh(exp.server_mesh, exp.engine)
        except ValueError as error:
            raise ValueError(f"inference.mesh: {error}") from None


def main() -> None:
    with experiment.joined() as hosts:
        exp = experiment.resolve(flags.FLAGS.config)
        mesh = mesh_lib.create(exp.config.mesh.to_dict())
        _check(exp, mesh, hosts)
        with run_directory.open_workdir(flags.FLAGS.workdir, exp, hosts) as workdir:
            if hosts.is_first:
                print(experiment.describe(exp, workdir))
            train(exp, mesh, workdir, hosts)


if __name__ == "__main__":
    experiment.define_flags()
    experiment.run(main)
