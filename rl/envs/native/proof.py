"""Proofs in propositional logic, checked line by line.

1. The prompt lists premises with numbers, and a goal. A completion is a proof: each line has a formula, a rule, and the numbers of
   earlier lines or premises; its own number follows the last one.

       1 a
       2 (a>b)        the completion    b mp 1 2
       3 (b>c)                          c mp 4 3
       Prove c

2. Formulas are letters, ~X, (X&Y), (X|Y), and (X>Y). The rules, with premises in any order:

   | rule | from | follows |
   |---|---|---|
   | mp | X, (X>Y) | Y |
   | mt | (X>Y), ~Y | ~X |
   | hs | (X>Y), (Y>Z) | (X>Z) |
   | ds | (X|Y), ~X or ~Y | Y or X |
   | ai | X, Y | (X&Y) |
   | ae | (X&Y) | X, and Y |
   | oi | X | (X|Y), and (Y|X) |
   | dn | ~~X | X |

3. The reward is 1 if each line follows, and the last one is the goal. `valid` is the fraction of lines before the first wrong one.

A task is made backward: the goal is derived from new formulas by rules, and the formulas left over are the premises. So a proof exists,
but a shorter one may, too. Premises without use are added.
"""

import random
import re
from collections.abc import Callable, Sequence

from rl.envs.interface import environment

INSTRUCTION = (
    "Prove the goal. Write one line for each step: a formula, a rule, and the numbers of the lines it uses, as in 'b mp 1 2'. Your first "
    "line gets the number after the last premise. Rules: mp mt hs ds ai ae oi dn."
)
MAX_CHARS, MAX_LINES, MAX_DEPTH = 8192, 64, 50
Formula = str | tuple  # a letter, ("~", X), or (operator, X, Y)
_LINE = re.compile(r"(\S+) ([a-z]{2}) (\d{1,4})(?: (\d{1,4}))?", re.ASCII)


def build(
    *,
    min_steps: int = 1,
    max_steps: int = 4,
    extra: int = 1,
    rules: str = "mp mt hs ds ai ae oi dn",
    system_prompt: str = INSTRUCTION,
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment of proofs. A task needs `min_steps` to `max_steps` steps by these `rules`, and has `extra` useless premises.

    Raises ValueError for numbers out of order and an unknown rule.
    """
    if not 1 <= min_steps <= max_steps <= 10 or not 0 <= extra <= 10:
        found = f"min_steps={min_steps}, max_steps={max_steps}, extra={extra}"
        raise ValueError(f"{found}; choose 1 <= min_steps <= max_steps <= 10, and 0 <= extra <= 10")
    if "mp" not in (chosen := rules.split()) or {*chosen} - RULES.keys():
        raise ValueError(f"env.options.rules = {rules!r}; choose mp, and more of {' '.join(RULES)}")

    def draw(number: int, index: int, split: str) -> environment.Task | None:
        rng = random.Random(number)
        problem = _problem(rng, rng.randint(min_steps, max_steps), extra, chosen)
        if problem is None:
            return None
        premises, goal, proof = problem
        lines = [f"{at} {text(premise)}" for at, premise in enumerate(premises, start=1)]
        messages = environment.asked("\n".join([*lines, f"Prove {text(goal)}"]), system_prompt)
        return environment.Task("proof", index, split, messages, proof, info={"premises": premises, "goal": goal})

    def score(task: environment.Task, completion: str) -> dict[str, float]:
        lines = completion.strip().splitlines()
        if len(completion) > MAX_CHARS or not 0 < len(lines) <= MAX_LINES:
            return {"reward": 0.0, "valid": 0.0, "lines": 0.0}
        known = proved(task.info["premises"], lines)[len(task.info["premises"]) :]
        is_proof = len(known) == len(lines) and known[-1] == task.info["goal"]
        return {"reward": float(is_proof), "valid": len(known) / len(lines), "lines": float(len(lines))}

    return environment.Environment("proof", environment.drawn("proof", seed, draw), score)


def proved(premises: Sequence[Formula], lines: Sequence[str]) -> list[Formula]:
    """Returns the premises and the formulas of the lines before the first one that does not follow."""
    known = list(premises)
    for line in lines:
        match = _LINE.fullmatch(line.strip())
        if not match or (formula := parse(match[1])) is None or match[2] not in RULES:
            break
        used = [int(number) for number in match.groups()[2:] if number]
        if not all(1 <= number <= len(known) for number in used):
            break
        given = [known[number - 1] for number in used]
        rule, count = RULES[match[2]], 1 if match[2] in ("ae", "oi", "dn") else 2
        if len(given) != count or not (rule(formula, *given) or (count == 2 and rule(formula, *given[::-1]))):
            break
        known.append(formula)
    return known


def _is(formula: Formula, operator: str) -> bool:
    return isinstance(formula, tuple) and formula[0] == operator


# {rule: function of (formula, the formulas it uses) that returns True if it follows from them in this order}
RULES: dict[str, Callable[..., bool]] = {
    "mp": lambda y, x, implied: implied == (">", x, y),
    "mt": lambda no_x, implied, no_y: _is(implied, ">") and no_y == ("~", implied[2]) and no_x == ("~", implied[1]),
    "hs": lambda xz, xy, yz: _is(xy, ">") and _is(yz, ">") and xy[2] == yz[1] and xz == (">", xy[1], yz[2]),
    "ds": lambda y, either, no_x: (
        _is(either, "|") and (no_x, y) in ((("~", either[1]), either[2]), (("~", either[2]), either[1]))
    ),
    "ai": lambda both, x, y: both == ("&", x, y),
    "ae": lambda x, both: _is(both, "&") and x in both[1:],
    "oi": lambda either, x: _is(either, "|") and x in either[1:],
    "dn": lambda x, twice: twice == ("~", ("~", x)),
}


def text(formula: Formula) -> str:
    """Returns a formula as text; `parse` is the inverse."""
    if isinstance(formula, str):
        return formula
    operator, *parts = formula
    return f"~{text(parts[0])}" if operator == "~" else f"({text(parts[0])}{operator}{text(parts[1])})"


def parse(written: str) -> Formula | None:
    """Returns the formula of a text, or None for one that is malformed or too deep."""

    def read(at: int, depth: int) -> tuple[Formula, int] | None:
        char = written[at : at + 1]
        if len(char) == 1 and "a" <= char <= "z":
            return char, at + 1
        if depth > MAX_DEPTH or char not in ("~", "(") or (first := read(at + 1, depth + 1)) is None:
            return None
        if char == "~":
            return ("~", first[0]), first[1]
        operator = written[first[1] : first[1] + 1]
        second = read(first[1] + 1, depth + 1) if operator and operator in "&|>" else None
        if second is None or written[second[1] : second[1] + 1] != ")":
            return None
        return (operator, first[0], second[0]), second[1] + 1

    found = read(0, 0)
    return found[0] if found and found[1] == len(written) else None


def _problem(
    rng: random.Random, num_steps: int, num_extra: int, rules: Sequence[str]
) -> tuple[list[Formula], Formula, str] | None:
    """Returns (premises, goal, proof), or None if the letters do not suffice."""
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", 26)
    premises: list[Formula] = []
    steps: list[tuple[Formula, str, list[Formula]]] = []

    def derive(goal: Formula, num: int) -> None:
        """Adds premises and `num` steps after which `goal` is known."""
        if num == 0:
            premises.append(goal)
            return
        operator = goal[0] if isinstance(goal, tuple) else ""
        fits = {"mt": operator == "~", "ai": operator == "&", "oi": operator == "|", "hs": operator == ">"}
        # A rule for a compound goal is three times as likely as one for any goal.
        rule = rng.choice([rule for rule in rules if fits.get(rule, True) for _ in range(3 if rule in fits else 1)])
        left, new = rng.randint(0, num - 1), letters.pop()
        if rule == "mp":
            used = [(new, num - 1), ((">", new, goal), 0)]
        elif rule == "mt":
            used = [((">", goal[1], new), 0), (("~", new), num - 1)]
        elif rule == "hs":
            used = [((">", goal[1], new), left), ((">", new, goal[2]), num - 1 - left)]
        elif rule == "ds":
            either = ("|", new, goal) if rng.random() < 0.5 else ("|", goal, new)
            used = [(either, 0), (("~", new), num - 1)]
        elif rule == "ai":
            used = [(goal[1], left), (goal[2], num - 1 - left)]
        elif rule == "ae":
            used = [(("&", new, goal) if rng.random() < 0.5 else ("&", goal, new), num - 1)]
        elif rule == "oi":
            used = [(goal[1 + (rng.random() < 0.5)], num - 1)]
        else:
            used = [(("~", ("~", goal)), num - 1)]
        for formula, count in used:
            derive(formula, count)
        steps.append((goal, rule, [formula for formula, _ in used]))

    goal: Formula = letters.pop()
    if len({*rules} & {"ai", "oi", "hs"}) and rng.random() < 0.3:
        operators = [operator for rule, operator in (("ai", "&"), ("oi", "|"), ("hs", ">")) if rule in rules]
        goal = (rng.choice(operators), goal, letters.pop())
    try:
        derive(goal, num_steps)
        premises += [(">", letters.pop(), rng.choice([letters.pop(), goal])) for _ in range(num_extra)]
    except IndexError:
        return None
    rng.shuffle(premises)
    places = {formula: at for at, formula in reversed([*enumerate(premises, start=1)])}
    lines = []
    for formula, rule, used in steps:
        lines.append(" ".join([text(formula), rule, *(str(places[one]) for one in used)]))
        places.setdefault(formula, len(premises) + len(lines))
    return (premises, goal, "\n".join(lines)) if goal not in premises else None
