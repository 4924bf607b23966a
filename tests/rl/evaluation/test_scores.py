"""Scores against enumeration of all subsets, intervals against the formulas of their papers and against simulation."""

import itertools
import math
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from rl.evaluation import comparison, scores


def tasks(*rewards, clusters=None, envs=None):
    names = clusters or [str(i) for i in range(len(rewards))]
    return [
        scores.TaskRewards(name, tuple(map(float, own)), (envs or [""] * len(rewards))[i])
        for i, (name, own) in enumerate(zip(names, rewards, strict=True))
    ]


@hypothesis.given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=6), min_size=1, max_size=4))
@hypothesis.settings(deadline=None, max_examples=60)
def test_pass_scores_are_means_over_all_choices_of_samples(rewards):
    found, intervals = scores.measure(tasks(*rewards))
    k = min(map(len, rewards))
    for j in (1, 2, 4):
        chosen = [[*itertools.combinations(own, j)] for own in rewards]
        any_of = [sum(max(one) >= 1 for one in own) / len(own) for own in chosen]
        all_of = [sum(min(one) >= 1 for one in own) / len(own) for own in chosen]
        assert found[f"pass@{j}"] == pytest.approx(sum(any_of) / len(any_of))
        if j > 1:
            assert found[f"pass^{j}"] == pytest.approx(sum(all_of) / len(all_of))
    assert found[f"avg@{k}"] == pytest.approx(sum(sum(own) / len(own) for own in rewards) / len(rewards))
    for name, (low, high) in intervals.items():
        assert 0 <= low <= found[name] <= high <= 1


def test_the_interval_of_single_samples_is_that_of_agresti_and_coull():
    for passed, n in ((0, 5), (3, 10), (50, 50), (7, 200)):
        values = [1.0] * passed + [0.0] * (n - passed)
        total = n + scores.Z**2
        p = (passed + scores.Z**2 / 2) / total
        half = scores.Z * math.sqrt(p * (1 - p) / total)
        found = scores.interval(values, [str(i) for i in range(n)])
        assert found == pytest.approx((max(0, p - half), min(1, p + half)))


def test_the_interval_covers_the_mean_of_clustered_samples():
    rng, hits, naive = random.Random(3), 0, 0
    for _ in range(300):
        values, clusters = [], []
        for task in range(60):
            rate = rng.betavariate(0.3, 0.3)  # tasks differ; the mean is 0.5
            for _ in range(3):  # the same prompt three times, 8 samples each
                values.append(sum(rng.random() < rate for _ in range(8)) / 8)
                clusters.append(str(task))
        low, high = scores.interval(values, clusters)
        hits += low <= 0.5 <= high
        low, high = scores.interval(values, [str(i) for i in range(len(values))])
        naive += low <= 0.5 <= high
    assert 0.912 <= hits / 300 <= 0.988 and naive / 300 < 0.85  # 3 standard errors of 0.95 are 0.038


def test_rewards_outside_of_0_and_1_widen_the_interval():
    low, high = scores.interval([2.2, 2.2, 0.0, -1.0], ["a", "b", "c", "d"])
    assert -1 <= low < 0.85 < high <= 2.2
    low, high = scores.interval([-2.0, -3.0], ["a", "b"])
    assert -3 <= low < -2.5 < high <= 1


def test_repeated_values_of_a_cluster_add_nothing():
    values, clusters = [0.0, 0.25, 1.0], ["a", "b", "c"]
    assert scores.interval(3 * values, 3 * clusters) == pytest.approx(scores.interval(values, clusters))


def test_each_environment_has_scores_of_its_own():
    found, intervals = scores.measure(tasks([1, 1], [0, 1], [0, 0], envs=["a", "b", "b"]))
    assert (found["avg@2"], found["a/avg@2"], found["b/pass@2"], found["num_tasks"]) == (0.5, 1.0, 0.5, 3)
    assert "b/avg@2" in intervals and "num_tasks" not in intervals and "b/num_tasks" not in found


@pytest.mark.parametrize(("passed", "n"), [(0, 8), (3, 8), (8, 8), (55, 100)])
def test_wilson(passed, n):
    expected = stats.binomtest(passed, n).proportion_ci(method="wilson")
    assert scores.wilson(passed, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


def named(*rewards):
    return {f"task{i}": one for i, one in enumerate(tasks(*rewards))}


def test_a_small_comparison_enumerates_all_flips_of_signs():
    a, b = named([0, 0], [0, 1], [1, 1], [0, 0]), named([1, 1], [1, 1], [1, 1], [0, 1])
    found = comparison.compare(a, b)[0]
    oracle = stats.permutation_test(
        ([1.0, 0.5, 0.0, 0.5], [0.0] * 4),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        n_resamples=10**6,
    )
    assert found.name == "avg@2" and found.p == pytest.approx(oracle.pvalue)
    assert (found.num_better, found.num_worse) == (3, 0) and found.b - found.a == 0.5
    assert (found.low, found.high) == pytest.approx(stats.ttest_1samp([1.0, 0.5, 0.0, 0.5], 0).confidence_interval())


def test_p_values_at_their_ends():
    """A mean of 0 has p = 1, though the sum of floats is not 0; the least p of random flips is not 0."""
    a, b = named([0, 0, 0], [0, 0, 0], [1, 1, 1]), named([1, 0, 0], [1, 1, 0], [0, 0, 0])
    assert comparison.compare(a, b)[0].p == 1
    a, b = (named(*([reward] for _ in range(40))) for reward in (0, 1))
    assert comparison.compare(a, b)[0].p == 1 / 10_001


@pytest.mark.parametrize("num_tasks", [5, 20])
def test_the_interval_of_a_difference_covers_it(num_tasks):
    """1.96 standard errors cover 87 % with 5 tasks, and 93 % with 20."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        a, b = rng.normal(0.5, 0.1, num_tasks), rng.normal(0.7, 0.1, num_tasks)
        found = comparison.compare(named(*([x] for x in a)), named(*([x] for x in b)))[0]
        covered += found.low <= 0.2 <= found.high
    assert 0.93 <= covered / 1000 <= 0.97


def test_pairs_find_a_difference_that_intervals_of_two_means_miss():
    rng = random.Random(0)
    rates = [rng.random() for _ in range(300)]
    make = lambda gain: named(*([float(rng.random() < min(1, rate + gain)) for _ in range(16)] for rate in rates))  # noqa: E731
    a, b = make(0.0), make(0.03)
    (_, of_a), (_, of_b) = (scores.measure([*one.values()]) for one in (a, b))
    assert of_a["avg@16"][1] > of_b["avg@16"][0]  # they overlap
    found = comparison.compare(a, b)[0]
    assert found.low > 0 and found.p < 0.01
    assert comparison.compare(a, make(0.0))[0].p > 0.05


def test_tasks_in_common_are_compared_and_none_is_an_error():
    a, b = named([1], [0], [1]), named([1], [1], [1])
    del b["task2"]
    assert comparison.compare(a, b)[0].b == 1.0
    with pytest.raises(ValueError, match="no task in common"):
        comparison.compare(a, {"other": b["task0"]})


def test_the_leaderboard_begins_with_the_best():
    lines = comparison.table(
        {"weak": named([0, 0], [1, 0]), "strong": named([1, 1], [1, 0]), "mid": named([1, 0], [1, 0])}
    )
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| strong", "| mid", "| weak"]
    assert "0.750 ±" in lines[2] and lines[5].startswith("2 tasks, 2 samples each")


def test_pass_rates_are_by_content():
    row = lambda task, sample, reward: {"task": task, "key": f"key of {task[0]}", "sample": sample, "reward": reward}  # noqa: E731
    rows = [row("a1", 0, 1.0), row("a1", 1, 0.5), row("a2", 0, 1.0), row("b1", 0, 0.0)]
    a, b = scores.pass_rates(reversed(rows))
    assert (a["key"], a["num_samples"], a["num_passed"], a["task"]) == ("key of a", 3, 2, "a1")
    assert b["rate"] == 0 and b["high"] == pytest.approx(scores.wilson(0, 1)[1])
    assert scores.shown_rates([a, b]) == "2 tasks, mean pass rate 0.333: 1 never passed, 0 always"
