"""Each rule of the admission check finds its fault in the observations of trials, and names no other; the trials themselves are in test_admission."""

import copy

import pytest

from rl.envs.hub import probes, rules

REWARDS = {name: "0.0" for name in (*probes.TEXTS, probes.OTHER_GOLD)} | {probes.GOLD: "1.0"}


def attempt(reward):
    return {"scores": {"reward": reward}, "error": "", "transcript": "ab", "calls": 1, "cpu_s": 0.01, "slept_s": 0.0}


def observed():
    """Returns the observations of a trial of a clean environment with programs."""
    return {
        "kind": "pure",
        "is_program": True,
        "reward_range": [0.0, 1.0],
        "tasks": {f"{split} {n}": f"{split}{n}" for split in ("train", "held_out") for n in range(3)},
        "remade": {"train 0": "train0"},
        "attempts": {f"{task}": {name: attempt(reward) for name, reward in REWARDS.items()} for task in range(3)},
        "attempts_again": {},
        "episodes": {f"{task}/{seed}": attempt("0.0") for task in range(3) for seed in range(2)},
        "episodes_again": {},
        "effects": {"counts": dict.fromkeys(("network", "process", "write", "read"), 0), "notes": {}},
        "memory": {"rounds": 9, "growth_bytes": 0, "counted": 4},
        "malformed": [],
        **{"leaks": 0, "with_answer": 6, "shared": [], "num_shared": 0, "num_prompts": 3},
    }


def changed(found, places):
    """Returns the observations with other values at some places; "*" is each key."""
    found = copy.deepcopy(found)
    found["effects"]["notes"] = dict.fromkeys(found["effects"]["counts"], ["line"])
    for place, value in places.items():
        *path, last = place.split(".")
        parts = [found]
        for name in path:
            parts = [one for part in parts for one in (part.values() if name == "*" else [part[name]])]
        for part in parts:
            part[last] = value
    return found


def failed(first=None, second=None, again=None, backwards=None):
    """Returns the identifiers of the checks that fail, for trials with these changes of the clean observations."""
    trials = [changed(observed(), places or {}) for places in (first, second, again, backwards)]
    asked = []
    judged = rules.judge(*trials[:2], lambda: asked.append(1) or tuple(trials[2:]), floor=rules.FLOOR, limit_s=1.0)
    assert len(asked) == bool(again is not None or backwards is not None)
    assert judged.passed == (not {c.check_id for c in judged.checks if (c.status, c.severity) == ("fail", "fail")})
    return {check.check_id for check in judged.checks if check.status == "fail"}


def test_a_clean_environment_passes():
    assert failed() == set()


TASK, SCORE = {"tasks.train 1": "x"}, {"attempts.0.empty.scores": {"reward": "0.1"}}


@pytest.mark.parametrize(
    ("second", "again", "backwards", "expected"),
    [
        (TASK, TASK, TASK, {"runtime.seed_control", "semantic.replayability"}),
        (TASK, {}, {}, {"runtime.seed_control", "hub.cross_host_determinism", "semantic.replayability"}),
        (TASK, {}, TASK, {"runtime.seed_control", "runtime.episode_isolation", "semantic.replayability"}),
        (SCORE, SCORE, SCORE, {"runtime.episode_determinism", "semantic.replayability"}),
        (SCORE, {}, {}, {"runtime.episode_determinism", "semantic.replayability"}),
        (SCORE, {}, SCORE, {"runtime.episode_isolation"}),
    ],
)
def test_the_cause_of_a_difference_is_found_by_further_trials(second, again, backwards, expected):
    assert failed(second=second, again=again, backwards=backwards) == expected
    kinds = [{**one, "is_program": False} for one in ({}, second, again, backwards)]
    of_scores = "semantic.verifier_determinism" if again == SCORE else "semantic.verifier_portability"
    assert failed(*kinds) == {of_scores if name == "runtime.episode_determinism" else name for name in expected}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"episodes_together": {"0/1": attempt("0.1")}}, {"runtime.episode_isolation"}),
        ({"effects.counts.network": 1}, {"runtime.network_policy", "semantic.replayability"}),
        ({"effects.counts.write": 1}, {"runtime.host_containment", "semantic.replayability"}),
        ({"effects.counts.read": 1, "kind": "replayed"}, set()),
        ({"effects.counts.network": 1, "kind": "recorded"}, set()),
        ({"attempts.1.empty.cpu_s": 1.5}, {"runtime.resource_bounds"}),
        ({"episodes.1/1.slept_s": 0.1}, {"runtime.resource_bounds"}),
        ({"memory.growth_bytes": 2**23}, {"runtime.resource_bounds"}),
        ({"memory.growth_bytes": 2**21}, set()),
        ({"attempts.*.gold.scores": {"reward": "0.5"}}, {"semantic.oracle_max"}),
        ({"attempts.*.empty.scores": {"reward": "1.0"}}, {"semantic.floor_gap"}),
        ({"attempts.0.empty.scores": {"reward": "1.0"}}, set()),  # of three tasks, by chance
        ({"attempts.*.garbage.scores": {"reward": "0.9"}}, {"semantic.canary_floor"}),
        ({"attempts.*.all answers.scores": {"reward": "0.9"}}, {"statistical.adversarial_floor"}),
        ({"episodes.*.scores": {"reward": "0.95"}}, {"statistical.headroom"}),
        ({"attempts.0.zero.scores": {"reward": "nan"}}, {"runtime.reward_well_formed"}),
        ({"attempts.0.gold.scores": {"reward": "1.5"}}, {"runtime.reward_well_formed"}),
        ({"attempts.0.zero.scores": None, "attempts.0.zero.error": "ValueError: x"}, {"runtime.reward_well_formed"}),
        ({"attempts.0.zero.scores": {"reward": "0.0", "more": "1.0"}}, {"runtime.reward_well_formed"}),
        ({"leaks": 4}, {"semantic.no_solution_leakage"}),
        ({"leaks": 3}, set()),
        ({"malformed": ["train task 3: a message is 5"]}, {"runtime.observation_schema"}),
        ({"num_shared": 1, "shared": ["text"]}, {"runtime.task_declaration_accuracy"}),
        ({"replay": ["task 1: other scores"]}, {"semantic.replayability"}),
        ({"failed": "KeyError: 'x'", "stage": "load"}, {"runtime.startup"}),
        ({"failed": "it took too long", "stage": "load", "late": True}, {"runtime.resource_bounds"}),
    ],
)
def test_each_rule_finds_its_fault_and_no_other(places, expected):
    again = {place: value for place, value in places.items() if place.startswith(("attempts.", "episodes."))}
    assert failed(places, second=again) == expected
