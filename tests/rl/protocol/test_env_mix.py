"""The environments of a run: their order against its definition and brute force, and one line for each mistake in a mix."""

import collections
import itertools
import math
import random
import re
from fractions import Fraction

import grain
import pytest

from configs import base
from rl.protocol import env_mix, task_schedule


def mix(ratios, **changes):
    config = base.get_config()
    for key, ratio in ratios.items():
        config.envs[key] = dict(name="reverse_text", ratio=ratio, **changes.get(key, {}))
    return config


RATIOS = [
    {"a": 1, "b": 1},
    {"a": 0.7, "b": 0.3},
    {"a": 0.1, "b": 0.2},
    {"a": 1 / 3, "b": 2 / 3},
    {"a": 5, "b": 1, "c": 1, "d": 3},
    {"a": 97, "b": 2, "c": 1},
    {"only": 3.5},
    *({key: random.Random(seed).randint(1, 40) for key in "abcdefg"[: 2 + seed % 6]} for seed in range(24)),
]


@pytest.mark.parametrize("ratios", RATIOS)
def test_any_first_groups_have_the_ratios_within_one_group(ratios):
    config, exact = mix(ratios), {key: Fraction(str(r)).limit_denominator(10_000) for key, r in ratios.items()}
    period, total = len(env_mix.order(config)), sum(exact.values())
    counts = collections.Counter()
    for n, (key, _) in enumerate(env_mix.places(config, range(2 * period + 7)), start=1):
        counts[key] += 1
        for own, ratio in exact.items():
            part = ratio / total * n
            assert math.floor(part) <= counts[own] <= math.ceil(part), (n, own)
        if n % period == 0:
            assert all(counts[own] == exact[own] / total * n for own in exact)


@pytest.mark.parametrize("ratios", [{"a": 3, "b": 2}, {"a": 1, "b": 1, "c": 5}, {"z": 1}])
def test_tasks_are_those_of_a_draw_one_after_another(ratios):
    """Brute force: walk the order from its start, with a cursor in the permutation of each environment. Three epochs of a dataset of 11."""
    config = mix(ratios, **{key: {"num_tasks": 11} for key in ratios})
    config.rl.prompts_per_step = 5
    drawn = [group for step in range(1, 22) for group in task_schedule.train_groups(config, step)]
    assert [group.group for group in drawn] == list(range(105))
    cursors = dict.fromkeys(ratios, 0)
    orders = {key: [g.index for g in drawn if g.env == key] for key in ratios}
    for group, key in zip(drawn, itertools.cycle(env_mix.order(config)), strict=False):
        assert group.env == key and group.index == orders[key][cursors[key]]
        cursors[key] += 1
    for own in orders.values():
        for epoch in (own[i : i + 11] for i in range(0, len(own) - 10, 11)):
            assert sorted(epoch) == list(range(11))  # each task once per epoch
    assert len({tuple(own[:11]) for own in orders.values()}) == len(ratios)  # each has a permutation of its own
    warmup = [task for step in (1, 2) for task in task_schedule.warmup_tasks(config, step)]
    assert {key for key, _ in warmup} == set(ratios) and {index for _, index in warmup} <= set(range(11))


def test_another_environment_does_not_change_the_tasks_of_the_others():
    two, three = (mix(ratios) for ratios in ({"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}))
    found = [
        [g.index for step in (1, 2, 3) for g in task_schedule.train_groups(config, step) if g.env == "a"]
        for config in (two, three)
    ]
    shared = min(map(len, found))
    assert shared > 20 and found[0][:shared] == found[1][:shared]


def test_a_run_with_one_environment_has_the_tasks_of_earlier_releases():
    """Written out: the permutation of the run's seed, and the fields of a group, whose environment is not named."""
    config = base.get_config()
    config.seed = 7
    order = grain.MapDataset.range(2**30).shuffle(seed=7).repeat()
    groups = task_schedule.train_groups(config, 3)
    assert [group.index for group in groups] == [order[n] for n in range(64, 96)]
    one = (groups[0].step, groups[0].group, groups[0].split, groups[0].num_samples, groups[0].temperature)
    assert one == (3, 64, "train", 8, 1.0) and {group.env for group in groups} == {""}
    assert task_schedule.warmup_tasks(config, 1)[0] == ("", order[2**30 - 1])


def test_rules_of_an_environment_replace_those_of_the_run():
    own = {"samples_per_prompt": 4, "temperature": 0.5, "max_tokens": 24, "advantage": "rloo", "weight": 0.5}
    config = mix({"a": 1, "b": 3}, a=own)
    found = env_mix.entries(config)
    assert {name: getattr(found["a"], name) for name in own} == own
    assert (found["b"].samples_per_prompt, found["b"].temperature, found["b"].max_tokens) == (8, 1.0, 16)
    groups = task_schedule.train_groups(config, 1)
    assert {(g.env, g.num_samples, g.temperature) for g in groups} == {("a", 4, 0.5), ("b", 8, 1.0)}
    assert env_mix.max_rollouts(config) == 32 * 8 and env_mix.mean_samples(config) == 7
    assert env_mix.max_tokens(config) == 24
    assert found["a"].field("temperature") == "envs.a.temperature"
    assert env_mix.run_field("envs.a.temperature") == "sampling.temperature"
    assert env_mix.run_field("envs.a.digest") == "env.digest" and env_mix.run_field("rl.loss") == "rl.loss"


def test_held_out_tasks_are_taken_in_turn_or_from_one_environment():
    config = mix({"a": 1, "b": 9})
    config.evaluation.update(num_tasks=5, sets={"only_b": {"env": "b", "num_tasks": 3}})
    found = [(group.group, group.env, group.index) for group in task_schedule.held_out_groups(config, 4)]
    turns = [(0, "a", 0), (1, "b", 0), (2, "a", 1), (3, "b", 1), (4, "a", 2)]
    assert found == [*turns, (5, "b", 0), (6, "b", 1), (7, "b", 2)]


def with_entry(**fields):
    return lambda config: config.envs.update({"a": fields})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            with_entry(name="reverse_text", ratio=0),
            "envs.a.ratio = 0 must be above 0, and finite; correct it, or remove envs.a",
        ),
        (with_entry(name="reverse_text", ratio=-1.5), "envs.a.ratio = -1.5 must be above 0"),
        (with_entry(name="reverse_text", ratio=float("inf")), "envs.a.ratio = inf must be above 0, and finite"),
        (with_entry(name="reverse_text", ratio=float("nan")), "envs.a.ratio = nan must be above 0"),
        (with_entry(name="reverse_text", ratio="half"), "envs.a.ratio = 'half' is not a number; correct it"),
        (with_entry(name="reverse_text", ratio=True), "envs.a.ratio = True is not a number; correct it"),
        (with_entry(name="reverse_text", weight=0), "envs.a.weight = 0 must be above 0"),
        (
            with_entry(name="reverse_text", temperatur=1.0),
            "no field 'temperatur' (did you mean envs.a.temperature?); set ",
        ),
        (with_entry(name="reverse_text", max_tokens=1.5), "envs.a.max_tokens = 1.5 is not a whole number"),
        (with_entry(name="reverse_text", options=3), "envs.a.options = 3 are not options; write dict(option=value)"),
        (with_entry(ratio=1), "envs.a names no environment; set envs.a.name"),
        (with_entry(), "envs.a names no environment"),
        (
            lambda config: config.envs.update({"A b": {"name": "gsm8k"}}),
            "envs has 'A b'; name environments by lower-case",
        ),
        (lambda config: config.envs.update({"a": "gsm8k"}), "envs.a = 'gsm8k' is not an environment; write dict(name"),
    ],
)
def test_a_mistake_in_a_mix_is_one_line(change, words):
    config = mix({"b": 1})
    change(config)
    with pytest.raises(ValueError, match=re.escape(words)):
        env_mix.order(config)


def test_ratios_that_never_repeat_soon_are_refused():
    for ratios in ({"a": 0.1234, "b": 0.5678, "c": 0.9871}, {"a": 1, "b": 20_000}, {"a": 1, "b": 1e-9}):
        with pytest.raises(
            ValueError, match=r"the ratios of envs \(a .*\) are not whole numbers .*; round them, as in 7 and 3"
        ):
            env_mix.order(mix(ratios))
    with pytest.raises(ValueError, match="envs has 65 environments, more than 64"):
        env_mix.order(mix({f"e{n}": 1 for n in range(65)}))
