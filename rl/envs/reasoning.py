"""The procedural datasets of reasoning-gym, each with its own checker: load("reasoning_gym:chain_sum", min_terms=2).

1. `build` makes one dataset of 2**20 virtual items: nearly all of them generate an item when it is asked for, from
   seed + index, so that access is random and the cost of creation does not grow.
2. `make_task` takes the first item on the wanted side of the split whose reference answer its own checker gives 1.0.
   Where the answer field is None the reference is the metadata's example.
3. `score` gives the checker's verdict: 1 for a score of 1.0 and 0 below it, since many checkers hand out floors (0.01
   for nonsense) and credit for an answer buried in a longer text. `partial_credit=True` gives the raw score.

A completion is a stranger's text. Several checkers run Python's eval on it (sympy's parse_expr is eval too): those get
a GUARD, an alphabet in which no harm can be spelled. Checkers that need more than that, datasets that are not a
function of their seed, and checkers that can be satisfied without reading the question are REFUSED, with the reason.
Checkers were not written against an adversary: whoever scores strangers' text does it by rl/envs/scorer.py, which ends
one that takes too long.
"""

import copy
import dataclasses
import difflib
import json
import re

from rl.envs import environment

INSTRUCTION = "Reply with the final answer only, in the form that the question asks for."
SIZE = 2**20
SIZES = {
    "acre": 2**9,  # makes every item at once: 3.6 ms at size 1, more than 4 s at 2**20
}
MAX_CHARS = 8192  # a longer completion scores 0; no reference answer comes near

_UNSTABLE = "its items differ from one Python process to the next (set order, global random state)"
_EVALUATED = "its checker evaluates the completion as code, and answers need names that no safe alphabet excludes"
_UNSOLVED = "it gives no reference solution to check a task against"
REFUSED = {
    "coin_flip": "its checker gives 1.0 to any prefix of the decimal answer, so to 0",
    "composite": "it mixes other datasets; name them as environments of their own",
    "game_of_life_halting": "its checker gives 1.0 to any nonsense when the truth is False",
    "puzzle24": "its checker accepts any four numbers that make 24, not only those of the puzzle",
    "codeio": _UNSTABLE,
    "isomorphic_strings": _UNSTABLE,
    "knight_swap": _UNSTABLE,
    "list_functions": _UNSTABLE,
    "ransom_note": _UNSTABLE,
    "word_ladder": _UNSTABLE,
    "polynomial_multiplication": _EVALUATED,
    "intermediate_integration": _EVALUATED,
    "simple_integration": _EVALUATED,
    "boxnet": _UNSOLVED,
    "rush_hour": _UNSOLVED,
}

_ARITHMETIC = re.compile(r"(?!.*\*\*)(?!.*\d{7})[\d\s+*/().-]*", re.DOTALL)  # no powers: 9**9**9 never ends
# Without parentheses and dots nothing can be called; "for" would make loops within loops.
_LISTS = re.compile(r"(?!.*\bfor\b)[\w\s\[\]',\"]*", re.DOTALL)
GUARDS = {
    "countdown": _ARITHMETIC,
    "binary_matrix": _LISTS,
    "n_queens": _LISTS,
    "spiral_matrix": _LISTS,
    "string_insertion": _LISTS,
    "rubiks_cube": re.compile(r"(?!.*\d{3}).*", re.DOTALL),  # the checker repeats a move as often as it is told
}


def build(
    dataset: str = "",
    *,
    partial_credit: bool = False,
    system_prompt: str = INSTRUCTION,
    seed: int = 0,
    **config,
) -> environment.Environment:
    """`config` goes to the dataset's own config class."""
    import reasoning_gym  # 1 to 2 s and sympy: only for those who ask
    from reasoning_gym import factory

    name = f"reasoning_gym:{dataset}"
    _check(dataset, config, factory.DATASETS)
    size = SIZES.get(dataset, SIZE)
    # Neighbouring seeds would give overlapping items, as most datasets seed item i with seed + i.
    first = environment.stable_hash(f"{name}/{seed}") % 2**31
    items = reasoning_gym.create_dataset(dataset, seed=first, size=size, **config)
    guard = GUARDS.get(dataset)

    def make_task(index: int, split: str) -> environment.Task:
        for number in environment.candidates(name, seed, split, index):
            entry = items[number % size]
            if environment.split_of(entry["question"]) != split:
                continue
            answer = _reference(entry)
            if answer is None or _raw_score(answer, entry) != (1.0, 0.0):
                continue
            messages = ({"role": "user", "content": entry["question"]},)
            if system_prompt:
                messages = ({"role": "system", "content": system_prompt}, *messages)
            return environment.Task(name, index, split, messages, answer, decoy="", info={"entry": entry})
        raise AssertionError("candidates raises when it runs out")

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        raw, error = _raw_score(completion, task.info["entry"])
        return {"reward": raw if partial_credit else float(raw >= 1.0), "score": raw, "error": error}

    def _raw_score(completion: str, entry: dict) -> tuple[float, float]:
        """The checker's score, and 1.0 where it could not be asked or did not survive."""
        completion = completion.strip()
        if len(completion) > MAX_CHARS or (guard is not None and not guard.fullmatch(completion)):
            return 0.0, 1.0
        try:
            raw = float(items.score_answer(completion, copy.deepcopy(entry)))  # some checkers play moves on the entry
        except (
            Exception
        ):  # about 100 foreign checkers meet a stranger's text: they raise anything, and it means "wrong"
            return 0.0, 1.0
        return (raw, 0.0) if 0.0 <= raw <= 1.0 else (0.0, 1.0)

    return environment.Environment(name, make_task, score)


def _check(dataset: str, config: dict, datasets: dict) -> None:
    if dataset not in datasets:
        close = difflib.get_close_matches(dataset, datasets, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"reasoning_gym has no dataset {dataset!r}; {hint}write reasoning_gym:<one of its names>")
    if dataset in REFUSED:
        raise ValueError(f"reasoning_gym:{dataset} is refused: {REFUSED[dataset]}; choose another dataset")
    known = {field.name for field in dataclasses.fields(datasets[dataset][1])} - {"seed", "size"}
    for option in config:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"reasoning_gym:{dataset} has no option {option!r}; {hint}it has {sorted(known)}")


def _reference(entry: dict) -> str | None:
    if entry["answer"] is not None:
        return str(entry["answer"])
    for key in ("example_answer", "example_correct_answer", "possible_answer"):
        example = entry["metadata"].get(key)
        if example is not None:
            return example if isinstance(example, str) else json.dumps(example)
    return None
