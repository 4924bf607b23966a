"""The files of a finished run, made without a model: config, rollouts of every batch, ledger, and published manifests."""

import dataclasses
import hashlib
import hmac
import json

import numpy as np

from configs import quickstart
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment, workdir
from rl.protocol import curriculum, task_schedule, verdict
from rl.protocol.ledger import run_ledger, run_rules
from sharding.weights import broadcast
from sharding.weights.format import journal
from tests.rl.protocol.ledger.test_ledger import key
from tests.support import groups as written_groups

RUN, KEEPER, INVITED, STRANGER = key(7), key(8), key(9), key(10)
INVITED_RATE = 0.25
RATES = {"min_rate": 0.05, "invited_rate": INVITED_RATE}


def write(folder, num_steps, change=lambda rollout: rollout, max_lag=1, rates=RATES, num_tasks=0, **sizes):
    """Writes a run in which two workers take turns: all groups of the stranger are verified, and those of the other that are drawn.

    `change` alters rollouts before they are signed. `rates` are those that the ledger has.
    """
    config = quickstart.get_config()
    config.rl.update(num_steps=num_steps, max_lag=max_lag, **sizes)
    config.env.num_tasks = num_tasks
    config.trust.invited_rate = INVITED_RATE
    exp = experiment.resolve(config)
    chosen = curriculum.Curriculum(exp.config) if config.rl.curriculum else None
    (folder / "config.json").write_text(json.dumps({"config": json.loads(exp.config.to_json())}))
    options = broadcast.PublishOptions(key=RUN.private, keep=3)
    with (
        broadcast.Publisher(str(folder / "weights"), options) as publisher,
        run_ledger.RunLedger(folder / "ledger.db", KEEPER, RUN.worker) as ledger,
    ):
        ledger.resumed(0)
        epoch = publish(folder, publisher, ledger, 0)
        draws = hmac.digest(workdir.secret(folder, exp.config.seed), ledger.head().encode(), "sha256")
        ledger.appointed([RUN.worker], **rates)
        ledger.joined(INVITED.worker, invited=True)
        ledger.joined(STRANGER.worker)
        for step in range(1, num_steps + 1):
            prescribed = task_schedule.train_groups(exp.config, step, chosen and chosen.draws)
            groups = [dataclasses.replace(one, epoch=epoch) for one in prescribed]
            batch = [make(group, ledger, change, draws) for group in groups]
            digests = run_rules.batch_digest(verdict.group_digest(rollouts) for rollouts, _ in batch)
            basis = {(step, rollouts[0].task.group): basis for rollouts, basis in batch}
            parquet.write(path(folder, step), [rollout for rollouts, _ in batch for rollout in rollouts])
            if chosen:
                means = [sum(one.reward for one in rollouts) / len(rollouts) for rollouts, _ in batch]
                results = [curriculum.Result(g.group, "", g.index, mean) for g, mean in zip(groups, means, strict=True)]
                chosen.add(step, results)
                path(folder, step).with_name(curriculum.FILE).write_bytes(curriculum.encode(step, results))
            ledger.batch(step, digests, basis, epoch, curriculum=chosen.digest if chosen else "").result()
            publish(folder, publisher, ledger, step)
    return folder


def path(folder, step):
    return folder / "rollouts" / f"step_{step}" / "accepted.parquet"


def publish(folder, publisher, ledger, version):
    anchor = {"ledger": ledger.head()}
    written = publisher.publish({"w": np.full(4, float(version), np.float32)}, version, metadata=anchor)
    data = (folder / "weights" / journal.dirname(version) / "manifest.json").read_bytes()
    ledger.published(version, hashlib.sha256(data).hexdigest(), written.epoch or 0)
    return written.epoch or 0


def make(group, ledger, change, draws):
    """Records the events of one group; returns its signed rollouts, and why a batch may have it."""
    worker = (INVITED, STRANGER)[group.group % 2]
    rollouts = [rollout_lib.sign(change(rollout), worker) for rollout in written_groups.answers(group, group.step - 1)]
    digest = verdict.group_digest(rollouts)
    ledger.leased(worker.worker, *group.key, -1, group.epoch)
    ledger.submitted(worker.worker, *group.key, digest)
    split, step, number = group.key
    if is_verified := worker is STRANGER or verdict.draw(draws, f"{split}/{step}/{number}") < INVITED_RATE:
        ledger.verdict(verdict.SignedVerdict(RUN.worker, split, step, number, digest, True, "ok").sign(RUN))
    return rollouts, "verified" if is_verified else "trusted"


def rewrite(folder, step, change):
    """Replaces the file of a step by `change(its rollouts)`."""
    parquet.write(path(folder, step), change(parquet.read(path(folder, step))))


def flip(rollout):
    """Returns a rollout with one bit of its last token's log-probability changed."""
    logprobs = rollout.logprobs.copy()
    logprobs.view(np.uint32)[-1] ^= 1
    return dataclasses.replace(rollout, logprobs=logprobs)
