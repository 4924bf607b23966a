"""A profile has the steps that were asked for, also where a run ends in them, or begins in them, and the memory of each program."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from configs import base
from rl.experiment import rules
from sharding.mesh import programs


def recorded(folder):
    """The numbers of the steps in all profiles of a folder, as jax reads them."""
    files = [*folder.rglob("*.xplane.pb")]
    planes = [plane for file in files for plane in jax.profiler.ProfileData.from_file(str(file)).planes]
    events = [event for plane in planes for line in plane.lines for event in line.events if event.name == "train"]
    return sorted({int(value) for event in events for key, value in event.stats if key == "step_num"})


def names(file):
    """The names of all events in a profile."""
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    return {event.name for plane in planes for line in plane.lines for event in line.events}


@pytest.mark.parametrize(("steps", "ran", "expected"), [((2, 3), range(1, 6), [2, 3]), ((), range(1, 3), [])])
def test_the_steps_that_were_asked_for_are_recorded(tmp_path, steps, ran, expected):
    with programs.Profiler(tmp_path / "profile", steps) as profile:
        for step in ran:
            with profile.begin(step):
                jax.block_until_ready(jnp.ones(8) * step)
    assert recorded(tmp_path) == expected and (tmp_path / "profile").exists() == bool(expected)


def test_the_memory_of_each_program_is_that_of_its_arrays(tmp_path):
    """The profile of the run begins and ends in the steps that were asked for."""

    def squares_of_it(x):
        return x + 1, jnp.tanh(x @ x)

    program = jax.jit(squares_of_it, donate_argnums=0)
    program(jnp.ones((8, 8)))
    for result in program(jnp.ones((256, 256))):
        jax.block_until_ready(result)
    with programs.Profiler(tmp_path, (2, 9)) as profile:
        for step in (3, 4):
            with profile.begin(step):
                pass
    assert recorded(tmp_path) == [3, 4]
    memory = json.loads((tmp_path / "memory.json").read_text())
    found = memory["jit_squares_of_it"]  # the larger of the two
    size = 256 * 256 * 4
    assert found["arguments"] == size  # one result has the memory of the argument, and a tuple has pointers
    assert size <= found["results"] < size + 100
    assert found["total"] == sum(value for name, value in found.items() if name != "total")
    totals = [parts["total"] for parts in memory.values()]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("steps", [(3,), (0, 2), (4, 3), (1, 2, 3), ("a", "b")])
def test_steps_that_are_no_range_are_refused(steps):
    config = base.get_config()
    config.profile.steps = steps
    (message,) = rules.mistakes(config)
    assert re.fullmatch(r"profile.steps = \(.*; write .*", message)
