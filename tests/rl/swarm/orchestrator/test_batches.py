"""The batches of a run where an environment is left out, tokens are counted, or rollouts became too old."""

import types

import numpy as np
import pytest

from rl.protocol import lease
from rl.swarm.orchestrator.groups import batches as batches_lib
from rl.swarm.orchestrator.groups import group_queue
from rl.swarm.orchestrator.groups.queue_entry import State
from tests.support import rl_section


class Run:
    """Groups of two environments in turns, each of two samples of `length` tokens."""

    def __init__(self, **rule):
        self.queue = group_queue.GroupQueue()
        self.rule = rl_section.make(**dict(num_steps=9, max_lag=1, oversampling=1.0) | rule)
        self.batches = batches_lib.Batches(self.rule, self.queue, self.make_groups)

    def make_groups(self, numbers, version):
        P = self.rule.prompts_per_step
        return [lease.Lease(1 + n // P, n, "train", n, n, 2, 1.0, min_version=0, env="ab"[n % 2]) for n in numbers]

    @property
    def opened(self):
        return sorted(number for *_, number in self.queue.entries)

    def submit(self, number, version=0, length=1):
        (key,) = (key for key in self.queue.entries if key[2] == number)
        self.queue.lease("worker", 1, 99.0, may_lease=lambda one: one == key)
        mask = np.arange(1 + length) > 0
        fields = {"epoch": 0, "sampled_mask": mask, "versions": np.full(1 + length, version), "oldest_version": version}
        rollouts = [types.SimpleNamespace(number=sample, sample=sample, **fields) for sample in range(2)]
        self.queue.deliver(key, "worker", rollouts, str(number))
        return key

    def finish(self, number, **fields):
        self.queue.let_pass(self.submit(number, **fields))

    def collect(self, step):
        taken = self.batches.collect(step)
        return taken and [entry.group.group for entry in taken]


def test_batches_lack_the_groups_of_an_environment_that_is_left_out_until_a_resume():
    run = Run(prompts_per_step=2)
    run.batches.load(0)
    assert run.opened == [0, 1, 2, 3]  # of two batches
    run.batches.leave_out("b")
    assert run.opened == [0, 2] and run.batches.progress() == (0, 1)  # no later group takes their place
    assert run.collect(1) is None
    run.finish(0)
    assert run.collect(1) == [0] and run.opened == [2]
    run.batches.load(1)
    assert run.opened == [2, 4]
    resumed = Run(prompts_per_step=2)
    resumed.batches.restore(1, run.batches.state())
    resumed.batches.load(1)
    assert resumed.opened == [2, 3, 4, 5]
    run.finish(2)
    assert run.collect(2) == [2]
    run.batches.leave_out("a")
    with pytest.raises(ValueError, match="all groups of batch 3 are of a, b, which no worker can make"):
        run.collect(3)


@pytest.mark.parametrize(("num_tokens", "num_groups"), [(0, 4), (1, 1), (7, 2), (8, 2), (9, 3), (99, 4)])
def test_a_batch_ends_with_the_group_that_brings_its_tokens_to_the_number(num_tokens, num_groups):
    run = Run(prompts_per_step=4, tokens_per_step=num_tokens)
    run.batches.load(0)
    for number in range(num_groups):
        assert run.collect(1) is None
        run.finish(number, length=2)  # 4 tokens
    assert run.collect(1) == [*range(num_groups)]


def test_rollouts_that_are_too_old_for_the_next_batch_are_void_and_their_group_is_made_again():
    run = Run(prompts_per_step=1, batch="first", oversampling=3.0, max_off_policy=1)
    run.batches.load(0)
    late = run.submit(0, version=0, length=3)
    run.queue.quarantine(late)
    for step in (1, 2):
        run.finish(step, version=step - 1, length=2)
        assert run.batches.too_old() == [] and run.collect(step) == [step]
        run.batches.load(step)
    assert run.batches.too_old() == [late]
    assert [len(one.versions) for one in run.batches.void(late).rollouts] == [4, 4]
    entry = run.queue.entries[late]
    assert entry.state is State.OPEN and not entry.rollouts and run.batches.too_old() == []
    metrics = run.batches.take_metrics()
    assert (metrics["batch/length_dropped"], metrics["batch/num_stale"]) == (3.0, 1.0)
    assert run.batches.take_metrics()["batch/length_dropped"] == 0
