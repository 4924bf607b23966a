"""Trains the quickstart's model on samples of an exact age, with several losses: does each still learn from policies 50 steps old?

    python -m bench.lagged                                    # OAPL and masked importance sampling at lag 50, three seeds each
    python -m bench.lagged --lags 0 --steps 60 --seeds 0

1. A seed has one warm-up (`rl.sft.train`), from which all its runs begin.
2. Step n trains on samples of the parameters before step n - lag, or of the first ones. Sampling, credit, packing, and the train step are
   those of a run, in this process and in turns: no server, no proofs.
3. Each run prints the held-out score of its newest parameters (greedy, 100 tasks) every `--every` steps.

`rl.train` has no such mode: there `rl.max_lag` is the most that a sample may be old, and a server takes the newest policy.
"""

import collections
import dataclasses
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from configs import quickstart
from inference.engine import engine as engine_lib
from inference.scheduler import scheduler as scheduler_lib
from models import transformer
from rl import envs, sft
from rl.envs.host import group as group_lib
from rl.experiment import experiment as experiment_lib
from rl.experiment.reporting import metrics
from rl.learning.batch import packing
from rl.learning.learner import objective, train_step
from rl.protocol import task_schedule
from sharding.mesh import mesh as mesh_lib
from sharding.system import cli

WAIT_S = 600
LOSSES = {
    "oapl": {"loss": "oapl", "advantage": "optimal"},
    "masked_importance_sampling": {"loss": "masked_importance_sampling", "advantage": "group_mean"},
}
# OAPL ends at a policy whose log-ratio is A / beta. The paper's 1e-3, for a rate of 1e-6, is hundreds of nats, and breaks this model within 25 steps.
BETA = 0.1


def config_of(loss: str, seed: int, steps: int):
    """Returns the quickstart's config with a loss and its advantage, half of its groups, and its own rate of learning."""
    c = quickstart.get_config()
    c.seed = seed
    c.rl.update(LOSSES[loss] | {"num_steps": steps, "prompts_per_step": 16})
    c.loss_options.oapl.beta = BETA
    return c


class Sampler:
    """The engine of a run's policy in this process."""

    def __init__(self, exp: experiment_lib.Experiment, params: transformer.Params):
        self.exp, self.env = exp, envs.load(exp.config.env.name, seed=exp.config.seed, **exp.config.env.options)
        engine = engine_lib.Engine(exp.model, exp.engine, exp.tokenizer)
        self.scheduler = scheduler_lib.Scheduler(engine, params, 0, max_queue=10**6)
        self.version = 0

    def sample(self, params: transformer.Params, groups, *, temperature: float | None = None, split: str = "train"):
        """Returns the scored rollouts of groups of tasks, group by group, sampled with `params`."""
        self.version += 1
        self.scheduler.update(params, self.version).result(WAIT_S)
        waiting = []
        for group in groups:
            task = self.env.make_task(group.index, split)
            prompt = list(self.exp.tokenizer.render(task.messages, add_generation_prompt=True).token_ids)
            request = scheduler_lib.GenerateRequest(
                tokens=tuple(prompt),
                num_samples=group.num_samples if temperature is None else 1,
                temperature=group.temperature if temperature is None else temperature,
                max_tokens=self.exp.config.sampling.max_tokens,
                seed=group.seed,
                stop_ids=tuple(self.exp.tokenizer.stop_ids),
            )
            waiting.append((group, task, prompt, self.scheduler.submit(request)))
        return [self._rollouts(group, task, prompt, future.result(WAIT_S)) for group, task, prompt, future in waiting]

    def _rollouts(self, group, task, prompt, completions):
        run = group_lib.Run(self.env, None, self.exp.config.seed, self.exp.tokenizer, [], {})
        made = group_lib.make_rollouts(run, group, task, prompt, completions)
        assert self.env.score is not None
        texts = [self.exp.tokenizer.scored_text(prompt, one.tokens) for one in completions]
        return [
            dataclasses.replace(one, reward=float(self.env.score(task, text)["reward"]))
            for one, text in zip(made, texts, strict=True)
        ]


def warm_up(seed: int, workdir: pathlib.Path) -> transformer.Params:
    """Returns the parameters after the quickstart's warm-up; a finished one is not repeated."""
    exp = experiment_lib.resolve(config_of("oapl", seed, 1))
    mesh = mesh_lib.create({}, jax.devices()[:1])
    folder = workdir / f"seed_{seed}"
    return sft.train(exp, mesh, folder, metrics.MetricsWriter(folder), metrics.Progress())


def train(loss: str, lag: int, seed: int, steps: int, every: int, start: transformer.Params) -> list[float]:
    """Trains from `start` on samples that are `lag` steps old. Returns the held-out score at step 0 and every `every` steps, and prints them."""
    exp = experiment_lib.resolve(config_of(loss, seed, steps))
    mesh = mesh_lib.create({}, jax.devices()[:1])
    bound = objective.bind(exp.loss, exp.loss_options)
    optimizer = train_step.make_optimizer(exp.optimizer, exp.model)
    learner = train_step.Learner(exp.model, optimizer, bound, mesh, exp.objective)
    copy = lambda params: jax.tree.map(jnp.copy, params)  # noqa: E731  # the train step donates its argument
    state = train_step.init_state(jax.random.key(0), learner, copy(start))
    step_of, sampler = train_step.jit_train_step(learner), Sampler(exp, copy(start))
    layout, past = exp.rollout_layout(mesh), collections.deque([copy(start)], maxlen=lag + 1)
    scores, ages = [], []
    for step in range(1, steps + 2):
        if (step - 1) % every == 0 or step == steps + 1:
            tasks = task_schedule.train_groups(exp.config, 1)[:1] * 100
            tasks = [dataclasses.replace(one, index=n) for n, one in enumerate(tasks)]
            found = sampler.sample(past[-1], tasks, temperature=0.0, split="held_out")
            scores.append(statistics.fmean(one.reward for (one,) in found))
            print(f"{loss} lag {lag} seed {seed} step {step - 1}: {scores[-1]:.3f}", flush=True)
        if step > steps:
            break
        groups = sampler.sample(past[0], task_schedule.train_groups(exp.config, step))
        ages.append(len(past) - 1)
        trees, _ = exp.credit.assign(groups)
        state, values = step_of(state, packing.place(packing.pack(trees, layout), mesh))
        if not np.isfinite(float(values["loss/total"])):
            raise ValueError(
                f"the loss of {loss} at step {step} is {values['loss/total']}; lower optimizer.learning_rate"
            )
        past.append(copy(state.params))
    sampler.scheduler.close()
    print(
        f"{loss} lag {lag} seed {seed}: mean age {statistics.fmean(ages):.1f}, " + " ".join(f"{x:.2f}" for x in scores),
        flush=True,
    )
    return scores


def main(argv: list[str] | None = None) -> int:
    """Runs the command with `argv` (default: the process's arguments); returns the exit code."""
    parser = cli.Parser(prog="python -m bench.lagged", description=__doc__)
    add = parser.add_argument
    add("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    add("--lags", type=int, nargs="+", default=[50])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=200)
    add("--every", type=int, default=25)
    add("--workdir", type=pathlib.Path, default=pathlib.Path("runs/lagged"))
    options = parser.parse_args(argv)
    for seed in options.seeds:
        start = warm_up(seed, options.workdir)
        for lag in options.lags:
            for loss in options.losses:
                train(loss, lag, seed, options.steps, options.every, start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
