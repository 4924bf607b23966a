"""The curriculum against a second program written from its docstring, and its draws under every order of delivery."""

import collections
import functools
import hashlib
import json
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from configs import base
from rl.protocol import curriculum, env_mix, task_schedule
from rl.swarm.orchestrator.groups import batches as batches_lib
from rl.swarm.orchestrator.groups import group_queue
from rl.swarm.orchestrator.groups.queue_entry import Delivery
from tests.support import groups


def config(kind="pools", num_tasks=40, **rl):
    c = base.get_config()
    c.env.num_tasks = num_tasks
    c.rl.update(curriculum=kind, prompts_per_step=4, samples_per_prompt=2, num_steps=8, **rl)
    if kind == "levels":
        c.env.options.ladder = {"max_length": (3, 4, 5, 6, 7, 8)}
    return c


def results_of(draws, step, per_step, reward):
    first = (step - 1) * per_step
    return [curriculum.Result(first + i, env, index, reward(index)) for i, (env, index) in enumerate(draws)]


def run(c, reward, steps=6):
    """Returns the curriculum after some steps in which all groups have a signal, and the draws of each step."""
    found, draws = curriculum.Curriculum(c), {}
    for step in range(1, steps + 1):
        draws[step] = found.draws(step)
        own = results_of(draws[step], step, curriculum.groups_per_step(c.rl), reward)[: c.rl.prompts_per_step]
        found.add(step, own)
    return found, draws


def oracle(c, history, step):
    """The draws of a step from the results of batches, by loops: `history` has a list of (index, reward) per batch."""
    newest, dropped, rule = {}, set(), c.curriculum
    for batch in history[: max(0, step - 1 - c.rl.max_lag)]:
        for index, reward in batch:
            newest[index] = reward
            dropped |= {index} if rule.drop_at and reward >= rule.drop_at else set()
    pools = {"hard": [], "normal": [], "easy": [], "unseen": []}
    for task in range(c.env.num_tasks):
        if task in dropped:
            continue
        if task not in newest:
            pools["unseen"].append(task)
        elif newest[task] <= rule.hard_below:
            pools["hard"].append(task)
        else:
            pools["easy" if newest[task] > rule.easy_above else "normal"].append(task)
    sizes = {name: rule[f"{name}_weight"] * len(tasks) for name, tasks in pools.items()}
    drawn = []
    for number in range(curriculum.groups_per_step(c.rl)):
        for attempt in range(32):
            text = f"intellax/curriculum/{c.seed}/{step}/{number}/{attempt}".encode()
            bits = hashlib.sha256(text).digest()
            first, second = (int.from_bytes(bits[at : at + 8], "little") for at in (0, 8))
            place = first / 2**64 * sum(sizes.values())
            for name in pools:
                if sizes[name] and place < sizes[name]:
                    break
                place -= sizes[name]
            task = pools[name][second * len(pools[name]) // 2**64]
            if task not in drawn:
                break
        drawn.append(task)
    return drawn


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("refill", [0.0, 0.5])
def test_draws_are_those_of_the_docstring(lag, refill):
    c = config(max_lag=lag, refill=refill)
    c.curriculum.drop_at = 0.95
    rewards = np.random.default_rng(0).choice([0.0, 0.25, 0.5, 0.75, 0.9, 1.0], c.env.num_tasks)
    _, draws = run(c, lambda index: float(rewards[index]), 8)
    history = [[(index, float(rewards[index])) for _, index in draws[step][:4]] for step in range(1, 9)]
    for step in range(1, 9):
        assert [index for _, index in draws[step]] == oracle(c, history, step)
        assert len(draws[step]) == 4 + int(refill * 4) == len(set(draws[step]))


def test_the_digest_is_a_chain():
    rows = [curriculum.Result(0, "", 1, 0.5)]
    found = {curriculum.chained(digest, step, own) for digest in "ab" for step in (1, 2) for own in (rows, [])}
    assert len(found) == 8


def test_a_state_continues_bit_for_bit():
    c = config(max_lag=1, refill=1.0)
    whole, draws = run(c, lambda index: index / 40)
    for cut in range(6):
        found = curriculum.Curriculum(c)
        state = run(c, lambda index: index / 40, cut)[0].state()
        found.restore(json.loads(json.dumps(state)))
        for step in range(cut + 1, 7):
            assert found.draws(step) == draws[step]
            found.add(step, results_of(draws[step], step, 8, lambda index: index / 40)[:4])
        assert found.state() == whole.state()


def test_weights_are_those_of_tasks():
    c = config(num_tasks=400, max_lag=0)
    c.rl.prompts_per_step = 100
    found = curriculum.Curriculum(c)
    seen = [curriculum.Result(i, "", i, (0.0, 0.5, 1.0)[i % 3]) for i in range(300)]  # 100 of each pool
    found.add(1, seen)
    counts = collections.Counter()
    for step in range(2, 42):
        counts.update((index % 3 if index < 300 else 3) for _, index in found.draws(step))
        found.add(step, [])
    expected = np.array([0.2, 1.0, 0.2, 1.0]) / 2.4  # hard, normal, easy, unseen
    measured = np.array([counts[i] for i in range(4)]) / counts.total()
    # Draws within a step are without replacement, which flattens by a few percent.
    assert np.abs(measured - expected).max() < 0.05


def test_dropped_tasks_never_come_again():
    c = config(num_tasks=8, max_lag=0)
    c.curriculum.drop_at = 0.9
    found = curriculum.Curriculum(c)
    gone = {index for _, index in found.draws(1)}
    found.add(1, [curriculum.Result(0, "", index, 1.0) for index in gone])
    assert gone.isdisjoint({index for _, index in found.draws(2)})
    found.add(2, [curriculum.Result(0, "", index, 0.0) for index in gone])  # an old group that arrives late
    assert gone.isdisjoint({index for _, index in found.draws(3)})


def test_a_run_goes_on_when_no_pool_with_a_weight_has_a_task():
    """First all tasks that are not dropped are drawn from, then all."""
    c = config(num_tasks=8, max_lag=0)
    c.curriculum.update(drop_at=0.9, hard_weight=0.0, easy_weight=0.0)
    found = curriculum.Curriculum(c)
    results = lambda reward: [curriculum.Result(0, "", index, reward(index)) for index in range(8)]  # noqa: E731
    found.add(1, results(lambda index: 0.8 if index < 5 else 1.0))
    assert {index for _, index in found.draws(2)} <= set(range(5)) and len({*found.draws(2)}) == 4
    found.add(2, results(lambda index: 1.0))
    drawn = set()
    for step in (3, 4, 5):
        drawn |= {index for _, index in found.draws(step)}
        found.add(step, [])
    assert drawn > {*range(5)} and found.metrics()["curriculum/dropped"] == 8


def test_levels_refuse_a_window_of_pass_rates_which_renumbers_tasks():
    c = config("levels")
    c.env.options.update(solve_rate=(0.1, 0.8), solve_rates_path="rates.jsonl")
    with pytest.raises(ValueError, match="solve_rate, which renumbers the tasks; remove solve_rate"):
        curriculum.Curriculum(c)


def test_levels_open_with_success():
    c = config("levels", num_tasks=0, max_lag=0)
    c.curriculum.update(level_groups=4, level_width=2)
    found = curriculum.Curriculum(c)
    tops = []
    for step in range(1, 9):
        levels = {index % 6 for _, index in found.draws(step)}
        top = int(found.metrics()["curriculum/level"])
        tops.append(top)
        assert levels <= {top, max(0, top - 1)}
        own = [curriculum.Result(i, "", 6 * i + top, 0.95) for i in range(4)]
        own += [curriculum.Result(9, "", top - 1, 0.0)] * (top > 0)  # a lower level does not count
        found.add(step, own if step != 3 else [curriculum.Result(i, "", 6 * i + top, 0.5) for i in range(4)])
    assert tops == [0, 1, 2, 2, 3, 4, 5, 5]


def test_a_mix_has_pools_of_its_own():
    c = config(max_lag=0)
    c.envs = {
        "a": {"name": "reverse_text", "num_tasks": 5},
        "b": {"name": "reverse_text", "num_tasks": 7, "ratio": 3.0},
    }
    found = curriculum.Curriculum(c)
    for step in range(1, 4):
        draws = found.draws(step)
        assert [env for env, _ in draws] == [env for env, _ in env_mix.places(c, range(4 * step - 4, 4 * step))]
        assert all(index < {"a": 5, "b": 7}[env] for env, index in draws)
        prescribed = task_schedule.train_groups(c, step, found.draws)
        assert [(group.env, group.index) for group in prescribed] == draws
        found.add(step, results_of(draws, step, 4, lambda index: 1.0))
    assert found.metrics()["curriculum/a/easy"] > 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_tasks": 0}, "makes tasks without end"),
        ({"hard_below": 0.9}, "exceeds curriculum.easy_above"),
        ({"unseen_weight": 0.0}, "unseen_weight above 0"),
        ({"level_groups": 0}, "must be at least 1"),
        ({"kind": "levels", "ladder": False}, "has no ladder"),
    ],
)
def test_wrong_rules_are_refused(changes, text):
    c = config(changes.pop("kind", "pools"))
    if not changes.pop("ladder", True):
        del c.env.options["ladder"]
    c.env.num_tasks = changes.pop("num_tasks", 40)
    c.curriculum.update(changes)
    with pytest.raises(ValueError, match=text):
        curriculum.Curriculum(c)


def test_results_are_read_as_they_were_written():
    own = [curriculum.Result(3, "", 7, 0.1 + 0.2), curriculum.Result(4, "a", 0, 1.0)]
    assert curriculum.decode(curriculum.encode(5, own)) == own
    for data in (b"", b"{}", b'{"results": [[1, "a", 2]]}', b'{"results": [["x", "a", 2, 0.5]]}'):
        with pytest.raises(ValueError, match="not the results of a batch"):
            curriculum.decode(data)
    assert curriculum.chained("0" * 64, 1, own) != curriculum.chained("0" * 64, 1, own[::-1])


# ---- a worker cannot move a draw by speed or failure -----------------------------------------------------------------

WORKERS = [f"{i:064x}" for i in range(3)]


def reward_of(index, sample, group):
    """The samples of a task by its number: a third never pass, a third always, and the others one time in two."""
    return float((0, (sample + group) % 2, 1)[index % 3])


def schedule(c, draw, num_steps=5, cuts=()):
    """Trains `num_steps` batches under a random order of leases, deliveries, failures, and publications; returns all draws and batches.

    After the batches in `cuts`, the run is resumed from its state.
    """
    seen, state, done = {}, None, 0
    while done < num_steps:
        queue, found = group_queue.GroupQueue(), curriculum.Curriculum(c)
        make = functools.partial(task_schedule.numbered_groups, c, draws=found.draws)
        has_signal = lambda entry: len({one.reward for one in entry.rollouts}) > 1  # noqa: E731
        batches = batches_lib.Batches(c.rl, queue, make, has_signal)
        queue.begin_epoch(0)
        batches.restore(done, state and state["batches"])
        if state:
            found.restore(json.loads(json.dumps(state["curriculum"])))
        batches.load(done)
        now = 0.0
        until = next((cut for cut in cuts if cut > done), num_steps)
        leased = []
        while done < until:
            now += draw.choice([0.1, 1.0, 7.0])
            queue.expire(now)
            worker = draw.choice(WORKERS)
            leased += [
                (group, worker)
                for group in queue.lease(worker, draw.randint(1, 3), deadline_s=now + 5, version=-1, now_s=now)
            ]
            draw.shuffle(leased)
            for group, worker in [leased.pop() for _ in range(min(len(leased), draw.randint(0, 3)))]:
                if draw.random() < 0.3:
                    continue  # the worker failed; its lease expires
                rollouts = [groups.rollout(group, i, reward=reward_of(group.index, i, group.group)) for i in range(2)]
                entry = queue.entries.get(group.key)
                if entry is None or not entry.lease_of(worker, rollouts):
                    continue
                if queue.deliver(group.key, worker, rollouts, f"{group.group:064x}") is Delivery.TAKEN:
                    queue.quarantine(group.key)
                    queue.accept(group.key)
                    if draw.random() < 0.5:
                        batches.accepted(group.key)
            taken = batches.collect(done + 1)
            if taken is None:
                continue
            done += 1
            own = sorted([*taken, *batches.take_flat()], key=lambda entry: entry.group.group)
            means = [
                curriculum.Result(e.group.group, "", e.group.index, sum(r.reward for r in e.rollouts) / 2) for e in own
            ]
            seen[done] = [(one.group, one.index, one.reward) for one in means], [e.group.group for e in taken]
            found.add(done, means)
            state = {"batches": batches.state(), "curriculum": found.state()}
            batches.load(done if draw.random() < 0.6 else max(0, done - c.rl.max_lag))
        seen["digest"] = found.digest
    return seen


@hypothesis.given(st.integers(0, 2**32), st.sampled_from([0, 1, 2]), st.sets(st.integers(1, 4), max_size=2))
@hypothesis.settings(deadline=None, max_examples=12)
def test_no_worker_moves_a_draw_by_speed_or_failure(seed, lag, cuts):
    c = config(max_lag=lag, refill=1.5, max_off_policy=8)
    c.curriculum.drop_at = 0.99
    calm = schedule(c, random.Random(1))
    assert schedule(c, random.Random(seed), cuts=sorted(cuts)) == calm
    for step in range(1, 6):
        results, taken = calm[step]
        assert len(taken) == 4 and [group for group, _, _ in results] == sorted(group for group, _, _ in results)
        flat = [group for group, _, mean in results if mean in (0.0, 1.0)]
        assert len(results) - len(taken) == min(len(flat), 6)  # the most that others replace; further ones train
