"""A mix of reasoning-gym's datasets with levels of difficulty: load("logic", mix="chain_sum=2,leg_counting", levels="0-2").

1. A task is of one dataset of the mix, by its weight, and of one of the levels, all equally likely. Both follow from the index.
2. A level sets all knobs of a dataset together, as its own curriculum in reasoning-gym defines them: 0 is the easiest, and a level past
   the last one of a knob is that last one. For a curriculum, raise `levels` from run to run, or let rl/envs mix several environments.
3. Tasks and rewards are those of `reasoning_gym:<dataset>` (rl/envs/native/reasoning.py).
"""

import dataclasses
import random
import re

from rl.envs.interface import environment
from rl.envs.native import reasoning

MIX = "knights_knaves,family_relationships,syllogism,zebra_puzzles"
MAX_LEVEL = 9
_OWN = ("seed", "size")  # fields of a dataset that no level sets


def build(
    *, mix: str = MIX, levels: str = "0", system_prompt: str = reasoning.INSTRUCTION, seed: int = 0
) -> environment.Environment:
    """Builds the environment. `mix` has names with weights, "a=2,b" for two thirds of `a`; `levels` is a number or a range, "0-3".

    Raises ValueError without reasoning-gym, for a malformed option, and for a dataset that has no levels.
    """
    weights, low, high = _weights(mix), *_range(levels)
    parts = {
        (dataset, level): reasoning.build(dataset, system_prompt=system_prompt, seed=seed, **_knobs(dataset, level))
        for dataset in weights
        for level in range(low, high + 1)
    }

    def make_task(index: int, split: str) -> environment.Task:
        rng = random.Random(environment.stable_hash(f"logic/{seed}/{split}/{index}"))
        part = rng.choices([*weights], [*weights.values()])[0], rng.randint(low, high)
        task = parts[part].make_task(index, split)
        return dataclasses.replace(task, env="logic", info=task.info | {"part": part})

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        found = parts[task.info["part"]].score
        assert found is not None
        return found(task, completion) | {"level": float(task.info["part"][1])}

    return environment.Environment("logic", make_task, score)


def _weights(mix: str) -> dict[str, float]:
    found = {}
    for part in mix.split(","):
        name, _, weight = part.strip().partition("=")
        if not re.fullmatch(r"(\d+(\.\d+)?)?", weight) or not name or name in found or float(weight or 1) == 0:
            raise ValueError(
                f"env.options.mix = {mix!r}: {part.strip()!r} is malformed; write 'chain_sum=2,leg_counting'"
            )
        found[name] = float(weight or 1)
    return found


def _range(levels: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d)(?:-(\d))?", str(levels))
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"env.options.levels = {levels!r}; write a number in 0..{MAX_LEVEL}, or a range, as in '0-3'")
    return int(match[1]), int(match[2] or match[1])


def _knobs(dataset: str, level: int) -> dict:
    """Returns the options of a dataset at a level. Level 0 of a dataset without levels is the dataset itself."""
    try:
        from reasoning_gym import factory
    except ImportError:
        return {}  # reasoning.build reports it
    if dataset not in factory.DATASETS or (not factory.has_curriculum(dataset) and level == 0):
        return {}
    if not factory.has_curriculum(dataset):
        raise ValueError(
            f"dataset reasoning_gym:{dataset} has no levels; set env.options.levels = '0', or leave it out of the mix"
        )
    curriculum = factory.create_curriculum(dataset)
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    known = {
        name
        for attribute in curriculum.attributes.values()
        for name in vars(attribute).values()
        if isinstance(name, str)
    }
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if name in known and name not in _OWN}
