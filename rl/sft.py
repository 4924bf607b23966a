"""Supervised fine-tuning: the policy imitates conversations, alone or as a warm-up before RL.

    python -m rl.sft --config=configs/quickstart.py --workdir=runs/quickstart

1. Batch n is a pure function of the config: tasks of the environment (`task_schedule.warmup_indices`), each with its solution
   or, for the fraction `warmup.decoy_fraction`, a wrong one, which RL then corrects; or lines of the file `warmup.data`.
2. A conversation is rendered once, with tools and all turns. The loss is on the messages of `warmup.roles`: of an assistant,
   on its sampled text with the closing token; of the others, on their whole message.
3. The batch is packed, sent to other hosts, and stepped through exactly as in RL; only the loss differs (`cross_entropy`).
4. Training ends early after `warmup.patience` held-out losses without a new best, one every `warmup.eval_every` steps.
5. Checkpoints go to `<workdir>/warmup`; the same command resumes, and `rl.train` takes the last one as policy version 0.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from models import hf, transformer
from models.text import tokenizer as tokenizer_lib
from rl import envs
from rl.batch import host_feed, packing
from rl.envs import environment
from rl.experiment import experiment
from rl.experiment import workdir as run_directory
from rl.learner import objective, optimizers, reference, train_step
from rl.protocol import task_schedule
from rl.reporting import diagnostics, metrics
from sharding import checkpoint
from sharding import mesh as mesh_lib
from sharding.multihost import hosts as hosts_lib


def train(
    exp: experiment.Experiment,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    writer: metrics.MetricsWriter,
    progress: metrics.Progress,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> transformer.Params:
    """Runs or resumes the warm-up (supervised fine-tuning before RL) and returns the model's parameters. All hosts must call it."""
    config = exp.config
    rates = {"learning_rate": config.warmup.learning_rate, "warmup_steps": 20, "schedule": "constant"}
    rates = dataclasses.replace(exp.optimizer, **rates)
    loss, optimizer = objective.bind("cross_entropy", {}), train_step.make_optimizer(rates, exp.model)
    learner = train_step.Learner(exp.model, optimizer, loss, mesh, share_prompts=False)
    take_step, rate = train_step.jit_train_step(learner), optimizers.learning_rate(rates)
    num_steps, every = config.warmup.num_steps, config.checkpoint.every
    with checkpoint.Checkpointer(workdir / "warmup", keep=1, every=every, hosts=hosts) as checkpointer:
        start, state, patience = _restore_or_init(exp, learner, checkpointer)
        if start == num_steps or patience.is_over:
            return state.params
        writer.truncate("warm-up", start)
        source = (_from_file(exp) if config.warmup.data else _from_tasks(exp)) if hosts.is_first else None
        layout, held_out = exp.layout(mesh, config.warmup.tasks_per_step), None
        if config.warmup.eval_every:
            held_out_layout = exp.layout(mesh, config.warmup.eval_tasks)
            held_out = host_feed.place(source.held_out() if source else None, held_out_layout, mesh, hosts)
        progress.note("compiling the warm-up step")
        # Before the display's clock starts: it derives the rate from the first step.
        train_step.compile_train_step(learner, packing.abstract(layout, mesh))
        with progress.phase("warm-up", total=num_steps, initial=start) as bar:
            for step in range(start + 1, num_steps + 1):
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
                    values["loss/held_out"] = hosts.broadcast(_nll(learner, state.params, held_out))
                    patience = patience.after(values["loss/held_out"])
                values["optimizer/learning_rate"] = float(jax.device_get(rate(step - 1)))
                values["time/step_s"] = time.perf_counter() - begun
                writer.write(step, "warm-up", values)
                shown = {"loss": "loss/total", "held-out": "loss/held_out", "grad": "loss/grad_norm"}
                bar.update(step, {short: values[name] for short, name in shown.items() if name in values})
                is_last = step == num_steps or patience.is_over
                checkpointer.save(step, state, dataclasses.asdict(patience), force=is_last)
                if is_last:
                    break
        if patience.is_over:
            progress.say(f"stopped at step {step}: {patience.num_worse} held-out losses not below {patience.best:.4g}")
    return state.params


def _restore_or_init(exp, learner: train_step.Learner, checkpointer: checkpoint.Checkpointer):
    """Restores the newest checkpoint, or makes the state of step 0. Returns (step, train state, patience)."""
    if restored := checkpointer.restore(train_step.abstract_state(learner)):
        step, state, host = restored
        return step, state, Patience(**host)
    params = None
    if exp.config.init_from:
        check_initial(exp)
        params = reference.load(exp.config.init_from, exp.model, learner.mesh)
    state = train_step.init_state(jax.random.key(exp.config.seed), learner, params)
    return 0, state, Patience(limit=exp.config.warmup.patience)


def check_initial(exp: experiment.Experiment) -> None:
    """Raises ValueError if the model of the checkpoint in `init_from` differs from the config's in a field that changes parameters."""
    path, model = exp.config.init_from, exp.model
    found = hf.read_config(path, dtype=model.param_dtype, scan_layers=model.scan_layers)
    free = ("dtype", "remat", "attention", "grouped_matmul", "max_positions", "family")  # change no parameter
    found = dataclasses.replace(found, **{field: getattr(model, field) for field in free})
    wanted, given = dataclasses.asdict(model), dataclasses.asdict(found)
    if differs := [field for field in wanted if wanted[field] != given[field]]:
        raise ValueError(
            "; ".join(f"model.{field} = {wanted[field]!r} but {path} has {given[field]!r}" for field in differs)
            + "; set the config's model to that of the checkpoint (`python -m models.hf inspect` prints it)"
        )


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


def stream(
    tokenizer: tokenizer_lib.Tokenizer,
    messages: Sequence[Mapping],
    *,
    tools: Sequence[Mapping] | None = None,
    roles: Sequence[str] = ("assistant",),
    max_length: int,
) -> packing.Tree:
    """Returns a conversation as one token sequence to train on. Only messages of `roles` train; tokens after them are cut off.

    Raises ValueError if the conversation is longer than `max_length`, no token trains, or the chat template renders a message
    differently when other messages follow, so that the tokens of a role are unknown.
    """
    rendered = tokenizer.render(messages, tools=tools)
    mask = np.array(rendered.assistant_mask) if "assistant" in roles else np.zeros(len(rendered.token_ids), bool)
    for index, message in enumerate(messages):
        if message["role"] in set(roles) - {"assistant"}:
            mask[_span(tokenizer, messages, index, tools, rendered.token_ids)] = True
    mask[0] = False  # nothing predicts the first token
    found = dict.fromkeys(message["role"] for message in messages)
    if not mask.any() and "assistant" in roles and "assistant" in found:
        raise ValueError(
            "the chat template does not mark where an answer begins, so that no token trains; put {% generation %} blocks "
            "into the chat_template.jinja of the tokenizer's folder"
        )
    if not mask.any():
        raise ValueError(
            f"the conversation has messages of {', '.join(found)}, none of roles {tuple(roles)}, so that no token trains; "
            f"add a role of the conversation to warmup.roles"
        )
    end = int(np.flatnonzero(mask)[-1]) + 1  # only template follows
    if end > max_length:
        raise ValueError(
            f"a conversation has {end} tokens, more than inference.max_model_len = {max_length}; raise it (and "
            f"train.row_length), or shorten the examples"
        )
    tokens, weights = np.array(rendered.token_ids[:end], np.int32), mask[:end].astype(np.float32)
    return packing.stream(tokens, weights, np.zeros_like(weights), weights, 1.0)


def read_conversations(path: str) -> list[dict]:
    """Reads conversations from a JSONL file with lines {"messages": [{"role": ..., "content": ...}, ...], "tools": [...] or absent}.

    Messages in the format of OpenAI's API are accepted: content as text parts or null, arguments of tool calls as a string.
    Raises ValueError if the file cannot be read, or a line, whose number the error names, has another format.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"warmup.data = {path!r} cannot be read: {error}; set it to a JSONL file") from error
    found = []
    for number, line in enumerate(text.split("\n"), start=1):  # text may contain other line separators, such as U+2028
        try:
            found += [_conversation(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}; write one object per line") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"warmup.data = {path!r} is empty; set it to a JSONL file of conversations")
    return found


def _conversation(line: str) -> dict:
    record = json.loads(line)
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("the line has no messages; write {'messages': [{'role': ..., 'content': ...}]}")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("a message has no role; add one, such as 'user' or 'assistant'")
    if not isinstance(record.get("tools"), list | None):
        raise ValueError("tools is not a list; give function descriptions, or leave it out")
    return {"messages": [_plain(message) for message in messages], "tools": record.get("tools")}


def _plain(message: Mapping) -> dict:
    """Returns the message as chat templates expect it: content as a string, arguments of calls as an object."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise ValueError("a message has a part that is not text; remove it")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise ValueError(
            f"a message's content is {json.dumps(content)[:60]}; make it a string, or a list of text parts"
        )
    plain = dict(message) | {"content": content or ""}
    if calls is None:
        return plain
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError("tool_calls is not a list of objects; write [{'function': {'name': ..., 'arguments': {...}}}]")
    return plain | {"tool_calls": [_plain_call(call) for call in calls]}


def _plain_call(call: Mapping) -> dict:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no name; set function.name to a string")
    arguments = function.get("arguments", {})
    try:
        loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        loaded = None
    if not isinstance(loaded, dict):
        raise ValueError(f"the arguments of a call of {function['name']} are {arguments!r}; make them a JSON object")
    function = function | {"arguments": loaded}
    return dict(call) | {"function": function} if "function" in call else function


class _Source(NamedTuple):
    batch: Callable[[int], list[packing.Tree]]  # of step n
    held_out: Callable[[], list[packing.Tree]]


def _stream(exp: experiment.Experiment, messages, tools, where: str) -> packing.Tree:
    limits = {"roles": exp.config.warmup.roles, "max_length": exp.config.inference.max_model_len}
    try:
        return stream(exp.tokenizer, messages, tools=tools, **limits)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _from_tasks(exp: experiment.Experiment) -> _Source:
    """Returns a source of training conversations: tasks of the run's environment with their answers."""
    config = exp.config
    env = envs.load(config.env.name, seed=config.seed, **config.env.options.to_dict())

    def tree(task, answer):
        messages = [*task.messages, {"role": "assistant", "content": answer}]
        return _stream(exp, messages, None, f"task {task.index} of {task.env}")

    def batch(step):
        tasks = [env.make_task(index, "train") for index in task_schedule.warmup_indices(config, step)]
        return [tree(task, _demonstration(task, config)) for task in tasks]

    def held_out():
        tasks = [env.make_task(index, "held_out") for index in range(config.warmup.eval_tasks)]
        return [tree(task, task.answer) for task in tasks]

    return _Source(batch, held_out)


def _from_file(exp: experiment.Experiment) -> _Source:
    """Returns a source of the conversations in `warmup.data`, in a new order every epoch; `eval_every` holds out the last `eval_tasks`."""
    warmup, seed = exp.config.warmup, exp.config.seed
    path, count, records = warmup.data, warmup.tasks_per_step, read_conversations(warmup.data)
    cut = len(records) - (warmup.eval_tasks if warmup.eval_every else 0)
    if cut < 1:
        raise ValueError(
            f"warmup.data = {path} has {len(records)} conversations, all of them held out (warmup.eval_tasks = "
            f"{warmup.eval_tasks}); add conversations, or set warmup.eval_tasks lower"
        )

    def tree(index):
        return _stream(exp, **records[index], where=f"{path}, conversation {index + 1}")

    def batch(step):
        wanted = range((step - 1) * count, step * count)
        orders = {i // cut: np.random.default_rng([seed, i // cut]).permutation(cut) for i in wanted}
        return [tree(int(orders[i // cut][i % cut])) for i in wanted]

    return _Source(batch, lambda: [tree(index) for index in range(cut, len(records))])


def _nll(learner: train_step.Learner, params: transformer.Params, batch: packing.TrainBatch) -> float:
    """Returns the mean negative log-likelihood per trained token of a batch, in nats."""
    logp = train_step.score(learner, params, batch)
    return float(-jnp.sum(logp * batch.loss_mask) / jnp.sum(batch.loss_mask))


def _demonstration(task: environment.Task, config) -> str:
    """Returns the answer to imitate: the right one, or, for the fraction `decoy_fraction` of the tasks, a wrong one (decoy)."""
    lot = environment.stable_hash(f"decoy/{config.seed}/{task.index}") / 2**64
    if lot >= config.warmup.decoy_fraction:
        return task.answer
    if not task.decoy:
        raise ValueError(f"environment {task.env!r} has no decoys; set config.warmup.decoy_fraction to 0")
    return task.decoy


def _span(tokenizer, messages, index, tools, ids) -> slice:
    """Returns the slice of a conversation's token IDs that belongs to message `index`. Raises ValueError if it is unknown."""
    before = tokenizer.render(messages[:index], tools=tools).token_ids if index else []
    through = tokenizer.render(messages[: index + 1], tools=tools).token_ids
    if ids[: len(through)] != through or through[: len(before)] != before:
        raise ValueError(
            f"the chat template renders message {index + 1} differently when other messages follow; set warmup.roles to the "
            f"assistant alone, or use a template that only appends"
        )
    return slice(len(before), len(through))


def main() -> None:
    """Runs the command that does only the warm-up (supervised fine-tuning) of an experiment."""
    with experiment.joined() as hosts:
        exp = experiment.resolve(flags.FLAGS.config)
        mesh = mesh_lib.create(exp.config.mesh.to_dict())
        if exp.config.warmup.num_steps == 0:
            raise ValueError("warmup.num_steps = 0, so no step would be taken; set it to at least 1")
        with run_directory.open_workdir(flags.FLAGS.workdir, exp, hosts) as workdir:
            progress, writer = metrics.of_host(workdir, hosts)
            train(exp, mesh, workdir, writer, progress, hosts)
            progress.say(f"checkpoint: {workdir / 'warmup'}")


if __name__ == "__main__":
    experiment.run(main)
