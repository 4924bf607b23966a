"""The procedural datasets of reasoning-gym, each with its own checker: load("reasoning_gym:chain_sum", min_terms=2).

1. `build` creates one dataset of 2**20 virtual items. Nearly all datasets generate an item on access, from seed + index, so
   access is random and the cost of creation does not grow.
2. `make_task` takes the first item in the split whose reference answer gets 1.0 from the dataset's own checker. If the
   answer field is None, the reference is the example in the metadata.
3. The reward is 1 if the checker returns 1.0, and else 0, because many checkers return a floor (0.01 for nonsense) or credit
   an answer inside a longer text. `partial_credit=True` gives the checker's number.

A completion is untrusted text. Several checkers run Python's eval on it (sympy's parse_expr does, too). They get a GUARD, which
allows only expressions that cannot do harm. REFUSED lists, with reasons, checkers that need more than that, datasets that are
not a function of their seed, and checkers that accept completions made without reading the question. Checkers were not written
against adversaries, so rl/envs/scoring/scorer.py runs them with limits.
"""

import ast
import copy
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable

from rl.envs.interface import environment
from sharding.system import text as text_lib

INSTRUCTION = "Reply with the final answer only, in the form that the question asks for."
SIZE = 2**20
SIZES = {"acre": 2**9}  # it makes all items on creation: 3.6 ms at size 1, more than 4 s at 2**20
MAX_CHARS = 8192  # a longer completion scores 0; reference answers are far shorter

_UNSTABLE = "its items differ from one Python process to the next (set order, global random state)"
_EVALUATED = "its checker evaluates the completion as code, and no safe alphabet allows the names that answers need"
_UNSOLVED = "its entries have no reference solution to check a task with"
UNSAFE = {  # whose checkers must not see untrusted text
    "coin_flip": "its checker gives 1.0 to any prefix of the decimal answer, such as 0",
    "game_of_life_halting": "its checker gives 1.0 to any nonsense when the truth is False",
    "puzzle24": "its checker accepts any four numbers that make 24, not only those of the puzzle",
    **dict.fromkeys(("polynomial_multiplication", "intermediate_integration", "simple_integration"), _EVALUATED),
}
REFUSED = {
    **UNSAFE,
    "composite": "it mixes other datasets, which can be named themselves",
    **dict.fromkeys("codeio isomorphic_strings knight_swap list_functions ransom_note word_ladder".split(), _UNSTABLE),
    **dict.fromkeys(("boxnet", "rush_hour"), _UNSOLVED),
}

# Python's own parser decides: an alphabet alone lets 2 * * 3 through, which sympy reads as a power. 9**9**9 never ends.
_DIGITS = re.compile(r"(?!.*\d{7})[\d\s+*/().-]*", re.DOTALL | re.ASCII)
_ARITHMETIC = {ast.Expression, ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv}
_ARITHMETIC |= {ast.UnaryOp, ast.UAdd, ast.USub}
_LISTS = {ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.UnaryOp, ast.USub}


def _is_arithmetic(text: str) -> bool:
    return _DIGITS.fullmatch(text) is not None and _has_only(_ARITHMETIC, text, otherwise=False)


def _is_list(text: str) -> bool:
    return _has_only(_LISTS, text, otherwise=True)  # text that is not an expression fails in eval, too


def _has_only(kinds: set[type], text: str, otherwise: bool) -> bool:
    """Returns whether a Python expression has these kinds of nodes only, or `otherwise` if the text is not an expression."""
    try:
        return {type(node) for node in ast.walk(ast.parse(text, mode="eval"))} <= kinds
    except (SyntaxError, ValueError):
        return otherwise
    except (MemoryError, RecursionError):  # thousands of signs or brackets in one another
        return False


# {dataset: function that returns True if its checker may see a completion}
GUARDS: dict[str, Callable[[str], object]] = {
    "countdown": _is_arithmetic,
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _is_list),
    "rubiks_cube": re.compile(r"(?!.*\d\d).*", re.DOTALL).fullmatch,  # the checker repeats a move any number of times
    "complex_arithmetic": re.compile(r"(?!.*nan).*", re.DOTALL | re.IGNORECASE).fullmatch,  # its distance to all is 0
}


def build(
    dataset: str = "", *, partial_credit: bool = False, system_prompt: str = INSTRUCTION, seed: int = 0, **config
) -> environment.Environment:
    """Builds the environment of one dataset of reasoning-gym. `config` has the fields of the dataset's own config class.

    Raises ValueError if reasoning-gym is not installed, and for a dataset or an option that does not exist.
    """
    try:
        import reasoning_gym  # takes 1 to 2 s: only when used
        from reasoning_gym import factory
    except ImportError as error:
        reason = f"environment reasoning_gym:{dataset} needs the optional package reasoning-gym ({error})"
        raise ValueError(f'{reason}; run pip install -e ".[reasoning-gym]" in the checkout') from error
    name = f"reasoning_gym:{dataset}"
    _check(dataset, config, factory.DATASETS)
    size = SIZES.get(dataset, SIZE)
    # Adjacent seeds would give overlapping items, because most datasets seed item i with seed + i.
    first = environment.stable_hash(f"{name}/{seed}") % 2**31
    items = reasoning_gym.create_dataset(dataset, seed=first, size=size, **config)

    def draw(number: int, index: int, split: str) -> environment.Task | None:
        entry = items[number % size]
        if environment.split_of(entry["question"]) != split:  # before the checker runs, which is slower
            return None
        answer = _reference(entry)
        if answer is None or checked(dataset, items.score_answer, answer, entry) != (1.0, 0.0):
            return None
        messages = environment.asked(entry["question"], system_prompt)
        return environment.Task(name, index, split, messages, answer, info={"entry": entry})

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        number, error = checked(dataset, items.score_answer, completion, task.info["entry"])
        return {"reward": number if partial_credit else float(number >= 1.0), "score": number, "error": error}

    return environment.Environment(name, environment.drawn(name, seed, draw), score)


def checked(dataset: str, checker: Callable, completion: str, entry: dict) -> tuple[float, float]:
    """Returns (the score by a dataset's checker, 1.0 if the checker was not run or failed, else 0.0)."""
    completion, guard = completion.strip(), GUARDS.get(dataset)
    if len(completion) > MAX_CHARS or (guard is not None and not guard(completion)):
        return 0.0, 1.0
    try:
        number = float(checker(completion, copy.deepcopy(entry)))  # some checkers modify the entry
    except Exception:  # about 100 foreign checkers, on untrusted text: any exception means "wrong"
        return 0.0, 1.0
    return (number, 0.0) if 0.0 <= number <= 1.0 else (0.0, 1.0)


def _check(dataset: str, config: dict, datasets: dict) -> None:
    if dataset not in datasets:
        found = f"reasoning_gym has no dataset {dataset!r}{text_lib.hint(dataset, datasets)}"
        raise ValueError(f"{found}; write reasoning_gym:<one of its names>")
    if dataset in REFUSED:
        raise ValueError(f"dataset reasoning_gym:{dataset} cannot be used: {REFUSED[dataset]}; choose another one")
    known = sorted({field.name for field in dataclasses.fields(datasets[dataset][1])} - {"seed", "size"})
    environment.check_options(f"dataset reasoning_gym:{dataset}", config.keys(), known)
    # A worker's options come from an orchestrator, its prompts go to servers, and any file would become prompts.
    if (file := str(config.get("data_file", "a"))) != pathlib.PurePath(file).name:
        raise ValueError(f"env.options.data_file = {file!r} is a path; name a file among reasoning_gym's own data")


def _reference(entry: dict) -> str | None:
    if entry["answer"] is not None:
        return str(entry["answer"])
    for key in ("example_answer", "example_correct_answer", "possible_answer"):
        if (example := entry["metadata"].get(key)) is not None:
            return example if isinstance(example, str) else json.dumps(example)
    return None
