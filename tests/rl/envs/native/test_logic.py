"""Mixes follow their weights, levels make tasks harder, and scores are those of the datasets."""

import collections

from rl import envs


def test_weights_and_levels():
    env = envs.load("logic", mix="chain_sum=3, leg_counting", levels="0-2", system_prompt="")
    tasks = [env.make_task(index, "train") for index in range(400)]
    parts = collections.Counter(task.info["part"] for task in tasks)
    assert 250 < sum(n for (name, _), n in parts.items() if name == "chain_sum") < 350
    assert len(parts) == 6 and min(n for (name, _), n in parts.items() if name == "chain_sum") > 70
    for task in tasks[:20]:
        assert env.score(task, task.answer) == {
            "reward": 1.0,
            "score": 1.0,
            "error": 0.0,
            "level": float(task.info["part"][1]),
        }
        assert env.score(task, "nonsense")["reward"] == 0.0


def test_levels_are_harder():
    def terms(level):
        env = envs.load("logic", mix="chain_sum", levels=level)
        return sum(env.make_task(i, "train").info["entry"]["metadata"]["num_terms"] for i in range(30)) / 30

    assert terms("0") + 0.5 < terms("3") and terms("9") >= terms("3")


def test_a_dataset_without_levels_has_level_0():
    env = envs.load("logic", mix="gsm_symbolic")
    task = env.make_task(0, "train")
    assert env.score(task, task.answer)["reward"] == 1.0


def test_its_package_is_in_the_digest(monkeypatch):
    from importlib import metadata

    before = envs.digest("logic", {})
    monkeypatch.setattr(metadata, "version", lambda name: "0.0")
    assert envs.digest("logic", {}) != before
