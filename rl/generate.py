"""Generates a data set with proofs: a worker against a fixed policy version, in the files that `rl.sft` and `rl.validator` read.

    python -m rl.generate --config=configs/finetune.py --config.init_from=DIR --config.env.name=genesys --config.env.options.path=TASKS.jsonl \\
        --workdir=data --server=http://HOST:8000 --num_prompts=1000 --min_score=0.5 --config.rl.samples_per_prompt=4

1. The groups are those of a run with this config, from the step after the server's policy version on, so that all rules of a run hold: tasks,
   noise, signatures, proofs. The config is in WORKDIR/config.json; a later command must have the same.
2. A group is a file, WORKDIR/rollouts/GROUP-0.parquet, which appears whole or not at all. Groups whose file exists are not made again, so a
   kill loses the groups in progress, and nothing else.
3. At the end, WORKDIR/responses.jsonl has a row per response: a GENESYS `Response` with `score` and, for one call, `messages`.
   WORKDIR/sft.jsonl, and with --parquet also sft.parquet, have those with `min_score` or more, for `warmup.data`.

`python -m rl.validator serve --workdir WORKDIR --rollouts WORKDIR/rollouts --run KEY --weights WEIGHTS` verifies the proofs by the published weights
that the server has. A score is null if the scorer had no time.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from absl import flags

    from rl.experiment import command

    flags.DEFINE_multi_string("server", [], "URL of an inference server; may be repeated")
    flags.DEFINE_integer("num_prompts", 0, "tasks of the data set; each has rl.samples_per_prompt responses")
    flags.DEFINE_float("min_score", 0.0, "the lowest score of a response in sft.jsonl")
    flags.DEFINE_bool("parquet", False, "write sft.parquet, too")
    flags.DEFINE_integer("concurrency", 64, "groups in progress at the same time")
    flags.DEFINE_float("give_up_s", 600.0, "seconds without an answer of a server")
    command.parse(is_complete=True)

import asyncio
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence

import httpx
from absl import flags

from inference import client as client_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from models import hub
from rl import envs, worker
from rl.envs.host import group as group_lib
from rl.envs.native.genesys import genesys
from rl.envs.scoring import scorer as scorer_lib
from rl.evaluation import samples as samples_lib
from rl.evaluation import sampling as sampling_lib
from rl.experiment import command, experiment
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.experiment.reporting import metrics
from rl.protocol import env_mix, lease, task_schedule
from sharding.system import atomic_file, bounded_reply, sockets

HEALTH_S = 30.0
MAX_STEPS = 2**20


def groups_of(config, version: int, count: int) -> list[lease.Lease]:
    """Returns the first `count` groups that policy `version` may generate, pinned to it."""
    found, step = [], version + 1
    while len(found) < count:
        found += task_schedule.train_groups(config, step)
        step += 1
    return [dataclasses.replace(group, version=version) for group in found[:count]]


def file_of(output: pathlib.Path, group: int) -> pathlib.Path:
    """Returns the file of a group's rollouts."""
    return output / "rollouts" / f"{group}-0.parquet"


async def generate(
    exp: experiment.Experiment,
    output: pathlib.Path,
    servers: Sequence[str],
    count: int,
    progress: metrics.Progress,
    *,
    concurrency: int = 64,
    give_up_s: float = 600.0,
) -> list[lease.Lease]:
    """Makes the missing files of the first `count` groups; returns the groups.

    Raises ConnectionError if a server does not answer for `give_up_s` seconds, ValueError if it refuses a request.
    """
    key = rollout_lib.WorkerKey.load_or_create(run_directory.worker_key_file(output, "generate"))
    version, epoch = await _policy(servers, give_up_s)
    pinned = output / "policy.json"
    expected = atomic_file.read_json(pinned, dict) or {"version": version, "epoch": epoch}
    if (version, epoch) != (expected["version"], expected["epoch"]):
        found = (
            f"the server has policy version {version} of epoch {epoch}, and {output} began with {expected['version']}"
        )
        raise ValueError(f"{found} of epoch {expected['epoch']}; serve that again, or give another --workdir")
    atomic_file.write(pinned, json.dumps(expected).encode(), durable=True)
    groups = [dataclasses.replace(group, epoch=epoch) for group in groups_of(exp.config, version, count)]
    missing = [group for group in groups if not file_of(output, group.group).exists()]
    (output / "rollouts").mkdir(exist_ok=True)
    for leftover in (output / "rollouts").glob(atomic_file.LEFTOVERS):
        leftover.unlink()
    runs = worker.read_runs(described(exp, servers), "auto", None)
    try:
        async with client_lib.Client(servers, give_up_s=give_up_s) as client:
            with progress.phase("groups", total=len(groups)) as bar:
                done = len(groups) - len(missing)

                async def complete(group: lease.Lease) -> None:
                    nonlocal done
                    run = runs[group.env]
                    timed = _Timed(run.scorer) if run.scorer else None
                    own = dataclasses.replace(run, scorer=timed)
                    rollouts = await group_lib.roll_out(client, own, key, group)
                    if timed and timed.late:
                        late = json.dumps(timed.late).encode()
                        atomic_file.write(_late_file(output, group.group), late, durable=True)
                    else:  # a kill may have left that of an earlier try
                        _late_file(output, group.group).unlink(missing_ok=True)
                    await asyncio.to_thread(parquet.write, file_of(output, group.group), rollouts)
                    done += 1
                    bar.update(done, {"reward": sum(one.reward for one in rollouts) / len(rollouts)})

                await sampling_lib.for_each(missing, complete, concurrency)
    except (client_lib.Unavailable, client_lib.VersionGone) as error:
        raise ConnectionError(f"{error}; repeat the command: it continues") from None
    finally:
        for run in runs.values():
            await run.close()
    return groups


def described(exp: experiment.Experiment, servers: Sequence[str]) -> dict:
    """Returns the description of this run for `worker.read_runs`, as an orchestrator sends it."""
    return env_mix.described(exp.config) | {"tokenizer": hub.pinned(exp.config.tokenizer), "servers": [*servers]}


def responses(exp: experiment.Experiment, output: pathlib.Path, groups: Sequence[lease.Lease]) -> list[dict]:
    """Returns a row per response of the groups' files, in order: a GENESYS `Response` with `score`, `rewards`, and `messages`."""
    loaded, entries, rows = envs.load_all(exp.config), env_mix.entries(exp.config), []
    sampling = {name: exp.config.sampling[name] for name in ("temperature", "top_p", "top_k", "max_tokens")}
    for group in groups:
        task, entry = loaded[group.env].make_task(group.index, group.split), entries[group.env]
        given = task.info.get("row")
        late = set(atomic_file.read_json(_late_file(output, group.group), list))
        source = samples_lib.source(entry.name, entry.options, exp.config.seed, entry.digest)
        name = samples_lib.task_name(source, group.split, group.index)
        if isinstance(given, genesys.Task):
            problem = given.model_dump()
        else:
            kind = {"problem_id": name, "source": entry.label, "task_type": entry.name}
            problem = kind | {"prompt": task.messages[-1]["content"], "gold_standard_solution": task.answer or None}
        for episode in rollout_lib.episodes(parquet.read(file_of(output, group.group))):
            one = episode[0]
            answer, has_one_call = _answer(exp, one), len(one.spans) == one.num_branches == 1
            response_id = hashlib.sha256(f"{name}/{group.group}/{one.sample}".encode()).hexdigest()[:32]
            own = {
                "llm_response": answer.get("content") or "",
                "response_id": response_id,
                "model_name": exp.config.init_from or "policy",
                "generation_config": sampling | {"seed": one.seed, "policy_version": group.version},
            }
            score = None if one.sample in late else one.reward
            more = {"score": score, "rewards": dict(one.rewards), "finish_reason": one.finish_reason}
            more["messages"] = [*task.messages, answer] if has_one_call else None
            rows.append(genesys.Response.model_validate(problem | own).model_dump() | more)
    return rows


def write(output: pathlib.Path, rows: Sequence[dict], min_score: float, *, as_parquet: bool = False) -> int:
    """Writes responses.jsonl, and those with a score of at least `min_score` as sft.jsonl (and sft.parquet); returns the number of the latter."""
    good = [row for row in rows if row["messages"] and row["score"] is not None and row["score"] >= min_score]
    fields = ("messages", "response_id", "problem_id", "task_type", "score")
    accepted = [{name: row[name] for name in fields} for row in good]
    atomic_file.write(output / "responses.jsonl", samples_lib.encode(rows))
    atomic_file.write(output / "sft.jsonl", samples_lib.encode(accepted))
    if as_parquet and accepted:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with atomic_file.replacing(output / "sft.parquet") as path:
            pq.write_table(pa.Table.from_pylist(accepted), path, compression="zstd")
    return len(accepted)


def _answer(exp: experiment.Experiment, rollout: rollout_lib.Rollout) -> dict:
    """Returns the message that a rollout ends with, parsed from its tokens."""
    (start, end), tokens = rollout.spans[-1], rollout.tokens.tolist()
    return exp.tokenizer.parse(tokens[start:end], prompt_ids=tokens[:start])


class _Timed:
    """The scorer of one group, with the numbers of the samples for which there was no time in `late`."""

    def __init__(self, scorer: scorer_lib.Scorer):
        self._scorer, self.late = scorer, []

    def score(self, task: envs.environment.Task, completions: Sequence[str]) -> list[scorer_lib.Scored]:
        found = self._scorer.score(task, completions)
        self.late = [sample for sample, one in enumerate(found) if not one.in_time]
        return found


def _late_file(output: pathlib.Path, group: int) -> pathlib.Path:
    return output / "rollouts" / f"{group}-late.json"


async def _policy(servers: Sequence[str], give_up_s: float) -> tuple[int, int]:
    """Returns (version, epoch) of the policy that the servers have. Raises ValueError if they differ, ConnectionError without an answer."""
    found = {}
    for url in servers:
        end_s = asyncio.get_running_loop().time() + give_up_s
        while True:
            try:
                reply = await bounded_reply.get(f"{url.rstrip('/')}/health", client_lib.MAX_HEALTH_BYTES, HEALTH_S)
                health = reply.json()
                found[url] = int(health["policy_version"]), int(health["policy_epoch"])
                break
            except (httpx.RequestError, ValueError, KeyError, TypeError) as error:
                if asyncio.get_running_loop().time() > end_s:
                    text = f"{url} sends no health ({type(error).__name__})"
                    raise ConnectionError(f"{text}; start python -m inference.serve, and repeat the command") from error
                await asyncio.sleep(1.0)
    if len(set(found.values())) > 1:
        raise ValueError(
            f"the servers have different policies (version, epoch): {found}; serve the same weights on all"
        )
    return next(iter(found.values()))


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    for url in values.server:
        if not sockets.is_url(url):
            raise ValueError(f"--server={url} is not a URL; write http://HOST:PORT")
    if not values.server or values.num_prompts < 1 or values.concurrency < 1:
        raise ValueError("--server, and --num_prompts and --concurrency of at least 1, are needed; give them")
    config = values.config
    # One policy makes all groups, so none is too old.
    config.rl.update(max_lag=MAX_STEPS, max_off_policy=MAX_STEPS, num_steps=MAX_STEPS)
    config.rl.update(batch="prescribed", refill=0.0, curriculum="")
    exp, progress = sizes.resolve(config), metrics.Progress()
    with run_directory.open_workdir(values.workdir, exp) as output:
        options = {"concurrency": values.concurrency, "give_up_s": values.give_up_s}
        groups = asyncio.run(generate(exp, output, values.server, values.num_prompts, progress, **options))
        rows = responses(exp, output, groups)
        accepted = write(output, rows, values.min_score, as_parquet=values.parquet)
        progress.say(
            f"{len(rows)} responses of {len(groups)} tasks, {accepted} with a score of {values.min_score:g} or more: {output / 'sft.jsonl'}"
        )


if __name__ == "__main__":
    command.run(main)
