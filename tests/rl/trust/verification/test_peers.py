"""Claims compared with other workers': an exact bet against enumeration, honest runs of every shape, and a forger near 0."""

import itertools
import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from rl.protocol import task_schedule
from rl.trust.verification import evidence_log, peers, sequential_test
from tests.support import tiny

VALUES = st.lists(st.sampled_from([-1.0, -0.5, -0.4, 0.0]), min_size=2, max_size=7)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(VALUES, st.data())
def test_the_bets_are_those_of_all_choices_and_exactly_fair(values, data):
    """Enumerates which of the groups could be the worker's: the bet on each over their mean, ties of ranks included."""
    k = data.draw(st.integers(1, len(values) - 1))
    rank = {v: (sum(o < v for o in values) + sum(o <= v for o in values)) / (2 * len(values)) for v in values}
    choices = list(itertools.combinations(range(len(values)), k))
    odds = []
    for chosen in choices:
        own = np.array([[values[i]] for i in chosen])
        others = np.array([[values[i]] for i in range(len(values)) if i not in chosen])
        found = peers.log_bets(own, others)
        for tilt, bet in zip(peers.TILTS, found, strict=True):
            product = [math.exp(tilt * sum(rank[values[i]] for i in same)) for same in choices]
            expected = math.log(product[choices.index(chosen)] / np.mean(product)) - k * peers.HETEROGENEITY
            assert bet == pytest.approx(expected, abs=1e-9)
        odds.append(np.exp(found + k * peers.HETEROGENEITY))
    np.testing.assert_allclose(np.mean(odds, axis=0), 1, rtol=1e-9)


def group(step, number, worker, logprobs):
    mask = np.arange(len(logprobs) + 1) >= 1
    task = rollout_lib.TaskRef("e", number, number, 0)
    claims = np.array([0, *logprobs], np.float32)
    return [
        tiny.rollout(mask, tokens=np.zeros(len(mask), np.int32), logprobs=claims, task=task, step=step, worker=worker)
    ]


def run(claims, *, num_steps, shares, alpha, verified=lambda worker: True):
    """Plays a run: worker w does shares[w] of each step's groups and claims `claims(w, rng)`. Returns the tests of the workers."""
    tests = [sequential_test.SequentialTest(None, alpha=alpha) for _ in shares]
    rng, compared = np.random.default_rng(num_steps + len(shares)), peers.Peers()
    for step in range(1, num_steps + 1):
        places = rng.permutation(np.repeat(np.arange(len(shares)), shares))
        for number, worker in enumerate(places.tolist()):
            one = group(step, number, str(worker), claims(worker, rng))
            compared.add(one)
            if verified(worker):
                compared.verify(one[0])
        compared = peers.Peers.restored(json.loads(json.dumps(compared.state())))
        for worker, ratio_K in compared.bets(step):
            tests[int(worker)].add_peers(ratio_K)
    return tests


def honest(worker, rng):
    """Claims of tasks that differ much more from each other than workers do."""
    return -np.exp(rng.normal(0, 1.5)) * rng.exponential(size=30)


@pytest.mark.parametrize("stride", [12, pytest.param(2, marks=pytest.mark.slow)])
def test_honest_workers_are_flagged_no_more_often_than_promised(stride):
    """45 or 250 lives at an alpha that can be counted, with shares from one group in 16 to twelve, and groups of all kinds."""
    lengths, shares = range(10, 110, stride), (1, 2, 3, 12, 5)
    tests = [test for n in lengths for test in run(honest, num_steps=n // 2, shares=shares, alpha=0.5)]
    flagged, num_lives = sum(test.flag is not None for test in tests), 5 * len(lengths)
    bound = 0.5 / len(sequential_test.STREAMS) + 3 * math.sqrt(0.05 / num_lives)
    assert len(tests) == num_lives and flagged / num_lives <= bound


@pytest.mark.parametrize("share", [1, 4, 8])
def test_a_forger_near_0_is_found_without_weights(share):
    """Within 7 groups (56 rollouts of 8) if it does one of 16, and at the flag level of a run; others with the same shares pass."""

    def claims(worker, rng):
        return np.full(30, -0.001) if worker == 0 else honest(worker, rng)

    num_steps = peers.OPEN_STEPS + (7 if share == 1 else 3)
    tests = run(claims, num_steps=num_steps, shares=(share, 8, 8), alpha=sequential_test.ALPHA)
    assert tests[0].flag.startswith("peers: ") and not tests[1].flag and not tests[2].flag


def test_forgers_in_the_majority_cannot_make_an_honest_worker_stand_out():
    """Only verified groups are compared with, and a forger's replay fails."""

    def claims(worker, rng):
        return honest(worker, rng) if worker < 2 else np.full(30, -0.001)

    shares, alpha = (2, 2, 6, 6), sequential_test.ALPHA
    tests = run(claims, num_steps=20, shares=shares, alpha=alpha, verified=lambda worker: worker < 2)
    assert not tests[0].flag and not tests[1].flag and tests[2].flag and tests[3].flag


def test_a_step_is_compared_once_and_stragglers_are_not(monkeypatch):
    """The first claim of a group counts, of at most MAX_GROUPS in a step."""
    monkeypatch.setattr(peers, "MAX_GROUPS", 2)
    compared = peers.Peers()
    for worker, claim in (("a", -1.0), ("a", -0.5), ("b", -1.0), ("c", -1.0)):
        compared.add(group(1, ord(worker), worker, [claim]))
        compared.verify(group(1, ord(worker), worker, [claim])[0])
    kept = [[1, ord(worker), worker, (-1.0, 0.0), True] for worker in "ab"]
    assert compared.state() == {"over": -1, "groups": kept}
    assert not list(compared.bets(peers.OPEN_STEPS))
    assert [worker for worker, _ in compared.bets(1 + peers.OPEN_STEPS)] == ["a", "b"]
    for step in (0, 1):
        compared.add(group(step, 7, "c", [-1.0]))
    assert compared.state() == {"over": 1, "groups": []} and not list(compared.bets(9))


def test_late_groups_are_compared_as_long_as_batches_take_them():
    """Else a forger among batches of the first groups would only have to be slow."""
    config = quickstart.get_config()
    config.rl.update(batch="first", max_lag=1, max_off_policy=8, oversampling=1.5, refill=0.5)
    num_steps = task_schedule.num_open_steps(config)
    assert num_steps == 10 * 2 + 1
    for wait, is_compared in ((num_steps - 1, True), (num_steps, False)):
        log = evidence_log.EvidenceLog(None, open_steps=num_steps)
        log.add_claims(group(1, 0, "a", [-1.0]))
        log.add_verified(group(1, 0, "a", [-1.0]))
        log.add_claims(group(1 + wait, 1, "a", [-1.0]))
        log.add_claims(group(1, 2, "b", [-0.001]))  # late
        log.add_claims(group(1 + num_steps, 3, "a", [-1.0]))
        assert (log.tests["b"].state()["log_wealth"]["peers"] != [-sequential_test.MAX_LOG_EVIDENCE]) == is_compared
