"""Draws the page of the rollouts of a batch: of a run that is on (rl/swarm/live.py), and WORKDIR/rollouts.html (rl/experiment/report.py).

Tokens are colored by their log-probabilities, by their advantages, or by noise: the sampling noise and the claimed log-probability give each token
a number that is exponentially distributed for an honest worker. A group has its prompt, its expected answer, rewards with their parts, advantages,
proofs, and verdicts; an episode of several turns has a label where the model, or its environment, begins. The page begins with a histogram of the
rewards and their means by task.

Text of models and strangers is hostile; it is escaped as in the report.
"""

import dataclasses
import functools
import itertools
import pathlib
import sqlite3
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import markupsafe
import numpy as np

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl import envs
from rl.envs.interface import environment
from rl.experiment.reporting import page
from rl.protocol import env_mix
from rl.protocol.ledger import run_history

MAX_GROUPS, NUM_BINS, MAX_TASKS = 16, 10, 64
MAX_REWARD = 1e30  # in means and ranges: a claim that our scorer had no time to compare may be any number
# A token's color is the class and the first limit that is at least its value. The noise is negative: -7 has a probability of 0.1 %.
COLORS: dict[str, tuple[str, tuple[float, ...]]] = {
    "logprob": ("p", (-4.0, -2.0, -0.7, -0.1)),
    "noise": ("p", (-7.0, -5.0, -3.0, -1.5)),
    "advantage": ("a", (-1.0, -1e-9, 1e-9, 1.0)),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Functions that give the page of a run more than its files have."""

    decode: Callable[[Sequence[int]], str]
    answer: Callable[[rollout_lib.TaskRef], str] = lambda task: ""  # the expected one of a training task; "": unknown
    # The credit of each token of each rollout of some groups (`Credit.by_token`), and the negative noise of each token of a rollout.
    advantages: Callable[[list[list[rollout_lib.Rollout]]], Iterable[tuple[rollout_lib.Rollout, np.ndarray]]] | None = (
        None
    )
    noise: Callable[[rollout_lib.Rollout], np.ndarray] | None = None


def answers(config) -> Callable[[rollout_lib.TaskRef], str]:
    """Returns a function for the expected answers of the training tasks of a run, whose environments it builds when they are first needed."""

    @functools.cache
    def load() -> dict[str, environment.Environment]:
        labels = {key: entry.label for key, entry in env_mix.entries(config).items()}
        try:
            return {labels[key]: env for key, env in envs.load_all(config).items()}
        except (ValueError, OSError):  # its data may be gone
            return {}

    def answer(task: rollout_lib.TaskRef) -> str:
        try:
            return load()[task.env].make_task(task.index, "train").answer
        except (KeyError, ValueError):
            return ""

    return answer


def of_step(
    workdir: pathlib.Path,
    source: Source,
    step: int = -1,
    first: int = 0,
    color: str = "logprob",
    *,
    most: int = MAX_GROUPS,
    token: str = "",
    policy: str = page.POLICY,
) -> str:
    """Returns the page of a batch, `most` groups from number `first` on; of the newest batch if there is no such step.

    If the source has noise, the run is live, and the page links to other steps and colors. Such links carry `token`, which the live
    server asks for. Raises ValueError for a malformed file.
    """
    folders = {int(path.name[5:]): path for path in (workdir / "rollouts").glob("step_*") if path.name[5:].isdecimal()}
    step = step if step in folders else max(folders, default=0)
    found = [one for file in sorted(folders[step].glob("*.parquet")) for one in parquet.read(file)] if folders else []
    found.sort(key=lambda one: (one.task.group, one.sample, one.branch))
    groups = [list(of) for _, of in itertools.groupby(found, key=lambda one: one.task.group)]
    advantages = {id(one): advantage_T for one, advantage_T in (source.advantages(groups) if source.advantages else ())}
    verdicts = _verdicts(workdir, step)

    def row(one: rollout_lib.Rollout) -> dict[str, Any]:
        advantage_T = advantages.get(id(one), np.zeros(len(one.tokens), np.float32))
        values_T = {"logprob": one.logprobs, "advantage": advantage_T}.get(color)
        if values_T is None:
            assert source.noise, "the page has no such color"
            values_T = source.noise(one)
        turns = [float(advantage_T[start]) for start, _ in one.spans] if advantages else []
        pieces = markupsafe.Markup("").join(colored(one, source.decode, color, values_T))
        return {"rollout": one, "text": pieces, "advantages": turns if len({*turns}) > 1 else turns[:1]}

    shown = [
        {
            "name": f"{group[0].task.env}, task {group[0].task.index}, group {group[0].task.group}",
            "prompt": source.decode(group[0].tokens[: group[0].prompt_length].tolist()),
            "answer": source.answer(group[0].task),
            "rollouts": [*map(row, group)],
            "verdicts": verdicts.get(group[0].task.group, []),
        }
        for group in groups[max(first, 0) :][:most]
    ]
    links = {}
    if source.noise:
        places = {"older": (step - 1, 0, color), "newer": (step + 1, 0, color)}
        links = {name: place for name, place in places.items() if place[0] in folders}
        if first + most < len(groups):
            links["more groups"] = (step, first + most, color)
        links |= {f"color: {name}": (step, first, name) for name in COLORS if name != color}
    return page.template("rollouts.html").render(
        step=step,
        groups=shown,
        num_groups=len(groups),
        bins=_histogram([_bounded(one.reward) for one in found if one.branch == 0]),
        tasks=_tasks(groups),
        links=links,
        is_live=bool(source.noise),
        color=color,
        token=token,
        policy=policy,
        style=page.style(),
    )


def _histogram(rewards: Sequence[float]) -> list[tuple[str, int]]:
    """Returns (range of rewards, number of rollouts) for `NUM_BINS` ranges of equal width, or a range for each of a few values."""
    values = sorted({*rewards})
    if len(values) <= NUM_BINS:
        return [(f"{value:.3g}", rewards.count(value)) for value in values]
    low, size = values[0], (values[-1] - values[0]) / NUM_BINS
    numbers = [min(int((reward - low) / size), NUM_BINS - 1) for reward in rewards]
    return [(f"{low + n * size:.3g} to {low + (n + 1) * size:.3g}", numbers.count(n)) for n in range(NUM_BINS)]


def _tasks(groups: Sequence[Sequence[rollout_lib.Rollout]]) -> list[dict[str, Any]]:
    """Returns the mean reward and its parts of each task, the lowest first."""
    found = []
    for group in groups:
        first = [one for one in group if one.branch == 0]
        parts = {name for one in first for name in one.rewards} - {"reward"}
        means = {n: statistics.fmean(_bounded(one.rewards.get(n, 0.0)) for one in first) for n in sorted(parts)}
        mean = statistics.fmean(_bounded(one.reward) for one in first)
        name = f"{first[0].task.env}, task {first[0].task.index}"
        found.append({"name": name, "mean": mean, "parts": means, "count": len(first)})
    return sorted(found, key=lambda one: one["mean"])[:MAX_TASKS]


def _bounded(reward: float) -> float:
    return min(max(reward, -MAX_REWARD), MAX_REWARD)


def _verdicts(workdir: pathlib.Path, step: int) -> dict[int, list[dict[str, Any]]]:
    """Returns the verdicts on the groups of a step; {} if the ledger is elsewhere, or locked."""
    try:
        return run_history.verdicts(workdir / "ledger.db", step)
    except (FileNotFoundError, ValueError, sqlite3.Error):
        return {}


def colored(
    rollout: rollout_lib.Rollout, decode: Callable[[Sequence[int]], str], color: str, values_T: np.ndarray
) -> Iterator[markupsafe.Markup]:
    """Yields the completion of a rollout as escaped pieces of HTML, each of tokens with one color.

    `values_T` has the number of each token that decides its color, by the scale `color` of `COLORS`. Tokens of the environment have the
    class "t".
    """
    (kind, limits), unit = COLORS[color], f"claimed {color}" if color == "noise" else color
    starts = {start: number for number, (start, _) in enumerate(rollout.spans, start=1)}
    columns = range(rollout.prompt_length, len(rollout.tokens))
    is_model, has_turns = rollout.sampled_mask.tolist(), len(starts) > 1

    def name_of(t: int) -> tuple[str, int]:
        name = f"{kind}{sum(float(values_T[t]) > limit for limit in limits)}" if is_model[t] else "t"
        return name, max((number for start, number in starts.items() if start <= t), default=0)

    speaker = None
    for (name, turn), of in itertools.groupby(columns, key=name_of):
        piece = [*of]
        if has_turns and speaker != (name == "t", turn):
            speaker = name == "t", turn
            label = "environment" if name == "t" else f"model, turn {turn}"
            yield markupsafe.Markup('<b class="who">{}</b>').format(label)
        text = page.text(decode(rollout.tokens[piece].tolist()))
        least = min(float(values_T[t]) for t in piece)
        yield markupsafe.Markup('<span class="{}" title="{} tokens, {} from {:.2f}">{}</span>').format(
            name, len(piece), unit, least, text
        )
