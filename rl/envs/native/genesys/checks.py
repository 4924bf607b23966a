"""The scores of GENESYS by task type, as functions of the completion and the row's `verification_info`.

| task type | `verification_info` | score |
|---|---|---|
| verifiable_math | ground_truth | 1 if the last expression, best in \\boxed{}, is equal (math-verify) |
| code_output_prediction | ground_truth | 1 if "output" of the last JSON object is equal |
| complex_json_output | ground_truth | 1 if the last JSON object is equal |
| pydantic_adherance | pydantic_config, model_name | 1 if the last JSON object fits the model |
| reasoning_gym | dataset_name and entry (or reasoning_gym_dataset, reasoning_gym_entry) | that of the dataset, for the text in <answer> |
| reverse_text | ground_truth | similarity to the text in <reversed_text> |
| unscramble_sentence | ground_truth | longest run of sentences in order / their number, 0 for a run of one |
| ascii_tree_formatting | ground_truth | 0.3 similarity of lines + 0.7 longest run / their number, halved for a malformed tree |
| ifeval | ground_truth: func_name and arguments | 1 if the instruction is kept (instructions.py) |
| null_reward | | 0 |

The types with code (verifiable_code, prime_rl_code, deepcoder) and the one with a judge (llm_judgeable_groundtruth_similarity) need more than the
text: genesys.py has them. Left out: kernelbench, which needs a GPU, and formatask and git_diff, whose rows are not public.
"""

import difflib
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from rl.envs.native import reasoning, rewards
from rl.envs.native.genesys import instructions

MAX_CHARS = 65536  # a longer completion scores as an empty one
Score = Callable[[str, Mapping[str, Any]], float]


def last_json(text: str) -> Any:
    """Returns the last JSON object or array in a text that is not inside another one; None if there is none."""
    decoder, at, found = json.JSONDecoder(), 0, None
    while (start := min((i for i in (text.find("{", at), text.find("[", at)) if i >= 0), default=-1)) >= 0:
        try:
            found, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            at = start + 1
    return found


def parsed(info: Mapping[str, Any], name: str) -> Any:
    """Returns the field `name` of `info`, parsed if it is JSON in a text. Raises ValueError for a text that is not JSON."""
    value = info[name]
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name} {value[:80]!r} is not JSON ({error}); correct the row") from None


def tagged(text: str, tag: str) -> str | None:
    """Returns the text in the first pair of tags, or None."""
    match = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return match[1].strip() if match else None


def _code_output(completion: str, info: Mapping[str, Any]) -> float:
    found = last_json(completion)
    return float(isinstance(found, dict) and "output" in found and found["output"] == info["ground_truth"])


def _complex_json(completion: str, info: Mapping[str, Any]) -> float:
    found = last_json(completion)
    return float(bool(found) and found == parsed(info, "ground_truth"))


def _pydantic(completion: str, info: Mapping[str, Any]) -> float:
    payload = last_json(completion)
    if payload is None:
        return 0.0
    module = types.ModuleType("genesys_row")
    exec(info["pydantic_config"], module.__dict__)  # of the row, in the sandbox of the scorer
    model = getattr(module, info["model_name"])
    try:
        model.model_validate(payload)
    except pydantic.ValidationError:
        return 0.0
    return 1.0


def _reasoning_gym(completion: str, info: Mapping[str, Any]) -> float:
    import reasoning_gym

    (name, entry), answer = _gym_entry(info), tagged(completion, "answer")
    checker = reasoning_gym.get_score_answer_fn(name)
    return 0.0 if answer is None else reasoning.checked(name, checker, answer, entry)[0]


def _gym_entry(info: Mapping[str, Any]) -> tuple[str, Any]:
    prefix = "reasoning_gym_" if "reasoning_gym_entry" in info else ""
    return str(info.get("dataset_name") or info.get("reasoning_gym_dataset")), parsed(info, f"{prefix}entry")


def _reverse(completion: str, info: Mapping[str, Any]) -> float:
    found = tagged(completion, "reversed_text")
    return 0.0 if found is None else difflib.SequenceMatcher(None, found, info["ground_truth"]).ratio()


def _unscramble(completion: str, info: Mapping[str, Any]) -> float:
    def sentences(text: str) -> list[str]:
        lines = (re.search(r"\d+\*?[.:]\s+(.+)", line) for line in text.split("\n"))
        return [match[1].strip() for match in lines if match]

    found, truth = sentences(tagged(completion, "unscrambled_text") or ""), sentences(info["ground_truth"])
    if not found or not truth:
        return 0.0
    run = difflib.SequenceMatcher(None, found, truth, autojunk=False).find_longest_match().size
    return run / len(truth) if run > 1 else 0.0


def _tree(completion: str, info: Mapping[str, Any]) -> float:
    answer = tagged(completion, "ascii_formatted")
    if answer is None:
        return 0.0
    lines, truth = answer.split("\n"), info["ground_truth"].strip().split("\n")
    matcher = difflib.SequenceMatcher(None, lines, truth, autojunk=False)
    score = 0.3 * matcher.ratio() + 0.7 * matcher.find_longest_match().size / len(truth)
    is_indented = all(line.startswith(" ") or line.rstrip() == lines[0] for line in lines[1:])
    has_branches = any("--" in line for line in lines[1:])
    return score * (1.0 if is_indented else 0.5) * (1.0 if has_branches else 0.5)


def _ifeval(completion: str, info: Mapping[str, Any]) -> float:
    return float(bool(completion.strip()) and instructions.follows(completion.strip(), parsed(info, "ground_truth")))


def _math(completion: str, info: Mapping[str, Any]) -> float:
    return rewards.make("math")(completion, str(info["ground_truth"]), {})


SCORES: dict[str, Score] = {
    "verifiable_math": _math,
    "code_output_prediction": _code_output,
    "complex_json_output": _complex_json,
    "pydantic_adherance": _pydantic,
    "reasoning_gym": _reasoning_gym,
    "reverse_text": _reverse,
    "unscramble_sentence": _unscramble,
    "ascii_tree_formatting": _tree,
    "ifeval": _ifeval,
    "null_reward": lambda completion, info: 0.0,
}
NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(SCORES, ("ground_truth",))
NEEDS |= {"pydantic_adherance": ("pydantic_config", "model_name"), "reasoning_gym": (), "null_reward": ()}


def check(task_type: str, info: Mapping[str, Any]) -> None:
    """Raises ValueError if `info` lacks data that the score of a `task_type` needs, or if that needs a package that is not installed."""
    for name in NEEDS[task_type]:
        if name not in info:
            raise ValueError(f"verification_info of {task_type} has no {name!r}; add it")
    if task_type == "complex_json_output":
        parsed(info, "ground_truth")
    elif task_type == "ifeval":
        instructions.check(parsed(info, "ground_truth"))
    elif task_type == "verifiable_math":
        rewards.make("math")
    elif task_type == "reasoning_gym":
        try:
            import reasoning_gym

            name, _ = _gym_entry(info)
            reasoning_gym.get_score_answer_fn(name)
        except ImportError as error:
            raise ValueError(
                f'task type reasoning_gym needs a package ({error}); pip install -e ".[reasoning-gym]"'
            ) from error
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"verification_info of reasoning_gym names no dataset and entry ({error}); add them"
            ) from None
        if name in reasoning.UNSAFE:
            raise ValueError(f"dataset {name} cannot be used: {reasoning.UNSAFE[name]}; remove the row")
