"""Judges the trials of an environment: one `Check` for each rule, by the identifiers of OpenEnv's RFC 008.

`judge` compares two trials with other surroundings and orders. Where they differ, two further trials find the cause: one equal to the first
(else the environment is random), one that only goes backwards (else the surroundings are the cause). All rules are pure functions of the
observations of rl/envs/hub/trial.py.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rl.envs.hub import probes
from rl.envs.interface import environment

FLOOR = 0.5  # largest mean reward of completions that answer nothing
MAX_SLEEP_S = 0.05  # of one completion
MAX_GROWTH_BYTES = 2048  # of memory per completion of 10 kB, once caches are full
MIN_GROWTH_BYTES = 2**22  # in total: allocators keep pages
MAX_LEAKS = 0.5  # share of tasks whose answer follows the same words of the prompt
MAX_RANDOM_REWARD = 0.9
MAX_EVIDENCE = 4
OF_RANDOM = {"semantic.verifier_determinism", "semantic.verifier_portability", "runtime.episode_determinism"}
Causes = Callable[[], tuple[dict, dict]]  # runs the two further trials


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one rule: `status` is "pass", "fail", or "skip" (not measured); a failed "warn" does not refuse an environment."""

    check_id: str
    status: str
    measured: Any  # JSON
    rule: str
    evidence: tuple[str, ...] = ()
    severity: str = "fail"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """All checks of an environment, and the kind that its trials show, one of `environment.KINDS`."""

    checks: tuple[Check, ...]
    kind: str

    @property
    def passed(self) -> bool:
        """True unless a check of severity "fail" failed."""
        return not any(check.status == "fail" and check.severity == "fail" for check in self.checks)


def judge(first: Mapping, second: Mapping, causes: Causes, *, floor: float, limit_s: float) -> Judgement:
    """Returns the judgement of an environment by the observations `first` and `second` of its two trials.

    `causes` runs further trials; it is called only where the two differ. `floor` and `limit_s` are the limits of the rules on rewards
    and on the time of a step.
    """
    if failed := next((one for one in (first, second) if "failed" in one), None):
        return _not_run(failed)
    differ = _differences(first, second)
    again, backwards = causes() if any(differ.values()) else (first, first)
    checks = [
        Check("runtime.startup", "pass", True, "it loads, and makes its tasks"),
        *_determinism(first, second, differ, again, backwards),
        *_effects(first, second),
        _resources(first, second, limit_s),
        *_rewards(first, second, floor),
        *_tasks(first),
    ]
    order = environment.KINDS
    failed_ids = {check.check_id for check in checks if check.status == "fail"}
    is_random = failed_ids & OF_RANDOM
    counts = first["effects"]["counts"]
    is_recorded = is_random or "runtime.seed_control" in failed_ids or counts["network"]
    kind = order[2] if is_recorded else order[1] if counts["process"] or counts["write"] or counts["read"] else order[0]
    replay = first.get("replay", [])  # differences between episodes and their replays
    is_kept = order.index(kind) <= order.index(first["kind"]) and not replay
    found = [*replay, f"declared {first['kind']}, and its trials show {kind}"]
    checks.append(_check("semantic.replayability", is_kept, kind, f"at most the declared kind, {first['kind']}", found))
    unmeasured = first.get("unmeasured", ())
    skipped = {"status": "skip", "measured": "not measured"}
    checks = [dataclasses.replace(c, **skipped) if c.check_id in unmeasured else c for c in checks]
    if first["kind"] == "recorded":  # whose scores need not repeat
        checks = [dataclasses.replace(c, severity="warn") if c.check_id in OF_RANDOM else c for c in checks]
    return Judgement(tuple(checks), kind)


def _check(check_id: str, is_good: bool, measured: Any, rule: str, evidence: Iterable[str] = (), **rest: Any) -> Check:
    lines = () if is_good else tuple(line[:300] for line in [*evidence][:MAX_EVIDENCE])
    return Check(check_id, "pass" if is_good else "fail", measured, rule, lines, **rest)


def _none_found(check_id: str, found: list[str], rule: str) -> Check:
    """Returns the check that fails if anything was found."""
    return _check(check_id, not found, len(found), rule, found)


def _not_run(failed: Mapping) -> Judgement:
    text = f"{failed['stage']}: {failed['failed']}"
    if failed.get("late"):
        return Judgement(
            (_check("runtime.resource_bounds", False, "no end", "a trial ends in time", [text]),), "recorded"
        )
    return Judgement((_check("runtime.startup", False, False, "it loads, and makes its tasks", [text]),), "recorded")


# ---- equal results ---------------------------------------------------------------------------------------------------


def _outcome(one: Mapping) -> tuple:
    """Returns the part of an attempt that must repeat; of an error the type only, because its text may have paths."""
    return one["scores"], one["error"].partition(":")[0], one["transcript"]


def _unequal(a: Mapping, b: Mapping) -> list[str]:
    """Returns a line for each attempt of both observations, {task: {probe: attempt}} or {name: attempt}, whose outcomes differ."""
    lines = []
    for key in a.keys() & b.keys():
        if "transcript" not in a[key]:
            lines += [f"task {key}, {line}" for line in _unequal(a[key], b[key])]
        elif _outcome(a[key]) != _outcome(b[key]):
            lines.append(f"{key}: {_short(a[key])}, and then {_short(b[key])}")
    return sorted(lines)


def _short(one: Mapping) -> str:
    scores = ", ".join(f"{name} {value}" for name, value in (one["scores"] or {}).items())
    return f"{scores or one['error']} (transcript {one['transcript'][:8]})"


def _changed(a: Mapping, b: Mapping) -> list[str]:
    return [f"{name} differs" for name in a if name in b and a[name] != b[name]]


def _differences(first: Mapping, second: Mapping) -> dict[str, list[str]]:
    return {
        "tasks": _changed(first["tasks"], second["tasks"]),
        "remade": _changed(first["tasks"], first["remade"]),
        "scores": _results(first, second),
        "repeated": _unequal(first["attempts"], first["attempts_again"])
        + _unequal(first["episodes"], first["episodes_again"]),
    }


def _results(a: Mapping, b: Mapping) -> list[str]:
    return _unequal(a["attempts"], b["attempts"]) + _unequal(a["episodes"], b["episodes"])


def _determinism(
    first: Mapping, second: Mapping, differ: Mapping[str, list[str]], again: Mapping, backwards: Mapping
) -> list[Check]:
    unequal_tasks = differ["tasks"] + differ["remade"]
    for other in (again, backwards):
        if "failed" in other:
            text = f"{other['stage']}: {other['failed']}"
            return [_check("runtime.seed_control", False, "no end", "each trial ends alike", [text])]
    random_tasks = _changed(first["tasks"], again["tasks"])
    random_scores = [] if random_tasks else _results(first, again)
    # A random environment differs between two trials that are equal in all else; one with a global state does not.
    stateful = [] if random_tasks else differ["remade"] + _changed(first["tasks"], backwards["tasks"])
    if not random_scores and not random_tasks and not stateful:
        stateful = differ["repeated"] + _results(first, backwards)
    together = _unequal(first["episodes"], first.get("episodes_together", {})) if not random_scores else []
    is_same = not (random_tasks or random_scores or stateful)
    moved_tasks, moved_scores = (differ["tasks"], differ["scores"]) if is_same else ([], [])
    moved_scores = [] if moved_tasks else moved_scores
    num, scored = len(first["tasks"]), sum(map(len, first["attempts"].values())) + len(first["episodes"])
    where = "with another hash seed, time zone, locale, folder, user, host, clock, and sandbox"
    together = [f"at the same time as others: {line}" for line in together]
    rule = "0 results depend on the order of tasks, or on other episodes"
    out = [
        _none_found("runtime.seed_control", unequal_tasks, f"0 of {num} tasks differ between processes"),
        _none_found("hub.cross_host_determinism", moved_tasks, f"0 of {num} tasks differ {where}"),
        _none_found("runtime.episode_isolation", stateful + together, rule),
    ]
    if first["is_program"]:
        rule = f"0 of {scored} episodes differ when the model's replies do not"
        return [*out, _none_found("runtime.episode_determinism", random_scores or moved_scores, rule)]
    return [
        *out,
        _none_found(
            "semantic.verifier_determinism", random_scores, f"0 of {scored} scores differ between equal processes"
        ),
        _none_found("semantic.verifier_portability", moved_scores, f"0 of {scored} scores differ {where}"),
    ]


# ---- effects and resources -------------------------------------------------------------------------------------------


def _effects(first: Mapping, second: Mapping) -> list[Check]:
    counts, notes, kind = first["effects"]["counts"], first["effects"]["notes"], first["kind"]
    network = counts["network"] if kind != "recorded" else 0
    kinds = ("process", "write", "read") if kind == "pure" else ()
    contained = sum(counts[name] for name in kinds)
    lines = [line for name in kinds for line in notes[name]]
    rule = "0 connections, unless it is declared recorded"
    made = [_check("runtime.network_policy", not network, network, rule, notes["network"])]
    rule = "0 files and processes once it is built, unless it is declared replayed"
    return [*made, _check("runtime.host_containment", not contained, contained, rule, lines)]


def _resources(first: Mapping, second: Mapping, limit_s: float) -> Check:
    tried = [*_named(first), *_named(second)]
    slow = [f"{name}: {one['cpu_s']:.2f} CPU seconds {one['error']}" for name, one in tried if one["cpu_s"] > limit_s]
    slow += [
        f"{name}: {one['error']}" for name, one in tried if one["error"].startswith("TimeoutError: it did not end")
    ]
    slow += [f"{name}: out of memory" for name, one in tried if one["error"].startswith("MemoryError")]
    slept = [f"{name}: sleeps {one['slept_s']:.2f} s" for name, one in tried if one["slept_s"] > MAX_SLEEP_S]
    memory = first["memory"]
    growth = memory["growth_bytes"] / max(memory["counted"], 1)
    grown = memory["growth_bytes"] > MIN_GROWTH_BYTES and growth > MAX_GROWTH_BYTES
    lines = slow + slept + [f"memory grows by {growth:.0f} bytes per completion, after {memory['rounds']}"] * grown
    cpu = [one["cpu_s"] for _, one in tried]
    measured = {"max_cpu_s": round(max(cpu), 4), "median_cpu_s": round(statistics.median(cpu), 6)}
    measured |= {"max_slept_s": round(max(one["slept_s"] for _, one in tried), 4), "growth_bytes": round(growth)}
    rule = f"at most {limit_s:g} CPU seconds and {MAX_SLEEP_S} s of waiting per completion, and memory that stays"
    return _check("runtime.resource_bounds", not lines, measured, rule, lines)


def _named(found: Mapping) -> list[tuple[str, Mapping]]:
    tried = [(f"task {task}, {name}", one) for task, all_ in found["attempts"].items() for name, one in all_.items()]
    return tried + [(f"episode {name}", one) for name, one in found["episodes"].items()]


# ---- rewards ---------------------------------------------------------------------------------------------------------


def _rewards(first: Mapping, second: Mapping, floor: float) -> list[Check]:
    low, high = first["reward_range"]
    wrong, names = [], {tuple(sorted(one["scores"])) for _, one in _named(first) if one["scores"]}
    for place, one in [*_named(first), *_named(second)]:
        rewards = {name: float(value) for name, value in (one["scores"] or {}).items()}
        if one["scores"] is None and not one["error"].startswith(("TimeoutError: it did not end", "MemoryError")):
            wrong.append(f"{place}: {one['error']}")
        elif not all(map(math.isfinite, rewards.values())):
            wrong.append(f"{place}: {_short(one)} is not finite")
        elif rewards and not low - 1e-9 <= rewards["reward"] <= high + 1e-9:
            wrong.append(f"{place}: reward {rewards['reward']:g} is not in [{low:g}, {high:g}]")
    if len(names) > 1:
        wrong.append(f"the names of the scores differ: {' and '.join(map(str, sorted(names)[:2]))}")
    rule = f"finite numbers of the same names for every completion, with a reward in [{low:g}, {high:g}]"
    out = [_none_found("runtime.reward_well_formed", wrong, rule)]
    gold = _of_probe(first, probes.GOLD)
    bad = [f"task {task}: reward {value:g}" for task, value in gold.items() if not value >= min(1.0, high) - 1e-9]
    rule = "the answer of each task has a reward of 1"
    none = Check("semantic.oracle_max", "skip", "no task has an answer", rule)
    out.append(_check("semantic.oracle_max", not bad, min(gold.values()), rule, bad) if gold else none)
    for check_id in dict.fromkeys(probes.CHECKS.values()):
        means = {
            name: _lower_mean(_of_probe(first, name)) for name, owner in probes.CHECKS.items() if owner == check_id
        }
        high_ones = [f"{name}: mean reward {mean:.3f}" for name, (mean, bound) in means.items() if bound > floor]
        worst = max((mean for mean, _ in means.values()), default=0.0)
        of = ", ".join(means) if len(means) < 4 else f"{len(means)} kinds of junk"
        out.append(
            _check(check_id, not high_ones, round(worst, 4), f"mean reward of {of} at most {floor:g}", high_ones)
        )
    chance = _lower_mean({name: _reward(one) for name, one in first["episodes"].items()})
    text = f"mean reward of random words at most {MAX_RANDOM_REWARD}"
    is_low, found = chance[1] <= MAX_RANDOM_REWARD, [f"it is {chance[0]:.3f}"]
    return [*out, _check("statistical.headroom", is_low, round(chance[0], 4), text, found, severity="warn")]


def _reward(one: Mapping) -> float:
    value = float((one["scores"] or {"reward": 0.0})["reward"])
    return value if math.isfinite(value) else 0.0


def _of_probe(found: Mapping, name: str) -> dict[str, float]:
    return {task: _reward(tried[name]) for task, tried in found["attempts"].items() if name in tried}


def _lower_mean(rewards: Mapping[str, float]) -> tuple[float, float]:
    """Returns the mean of rewards, and its lower bound by two standard errors: half of yes-or-no answers are right by chance."""
    values = [*rewards.values()]
    if not values:
        return 0.0, 0.0
    mean = statistics.fmean(values)
    return mean, mean - 2 * (statistics.pstdev(values) / math.sqrt(len(values)))


# ---- tasks -----------------------------------------------------------------------------------------------------------


def _tasks(first: Mapping) -> list[Check]:
    share = first["leaks"] / max(first["with_answer"], 1)
    leak = [f"in {first['leaks']} of {first['with_answer']} tasks, the answer follows the same words of the prompt"]
    rule = f"the answer follows the same words of the prompt in at most {MAX_LEAKS:.0%} of tasks"
    leaks = _check("semantic.no_solution_leakage", share <= MAX_LEAKS, round(share, 4), rule, leak)
    shared, overlap = first["num_shared"], f"0 of {first['num_prompts']} held-out prompts are training prompts"
    if not first["with_answer"]:
        leaks = Check(leaks.check_id, "skip", "no task has an answer", rule)
    return [
        leaks,
        _none_found("runtime.observation_schema", first["malformed"], "messages have a role and a text"),
        _check("runtime.task_declaration_accuracy", not shared, shared, overlap, first["shared"]),
    ]
