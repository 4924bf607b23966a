"""Each line that the checker accepts follows from the premises by z3, and mutated proofs fail."""

import itertools
import random
import re

import pytest
import z3

from rl import envs
from rl.envs.native import proof


def to_z3(formula):
    if isinstance(formula, str):
        return z3.Bool(formula)
    operator, *parts = formula
    parts = [to_z3(part) for part in parts]
    return {"~": z3.Not, "&": z3.And, "|": z3.Or, ">": z3.Implies}[operator](*parts)


def entails(premises, formula):
    solver = z3.Solver()
    solver.add(*map(to_z3, premises), z3.Not(to_z3(formula)))
    return solver.check() == z3.unsat


def random_formula(rng, depth, letters="ab"):
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(letters)
    operator = rng.choice("~&|>")
    return (operator, *(random_formula(rng, depth - 1, letters) for _ in range(1 + (operator != "~"))))


def parts(formula):
    return (formula, *(formula[1:] if isinstance(formula, tuple) else ()))


def test_proofs_of_all_rules_are_found_and_sound():
    used = set()
    for max_steps, extra in ((1, 0), (4, 1), (7, 3)):
        env = envs.load("proof", max_steps=max_steps, extra=extra)
        for index in range(30):
            task = env.make_task(index, "train")
            premises, goal = task.info["premises"], task.info["goal"]
            assert env.score(task, task.answer) == {"reward": 1.0, "valid": 1.0, "lines": len(task.answer.splitlines())}
            assert entails(premises, goal) and goal not in premises
            for formula in proof.proved(premises, task.answer.splitlines()):
                assert entails(premises, formula)
            used |= set(re.findall(r" ([a-z]{2}) ", task.answer))
            written = [proof.parse(line.split(" ")[1]) for line in task.messages[-1]["content"].splitlines()[:-1]]
            assert written == premises
    assert used == set(proof.RULES)


@pytest.mark.parametrize("rule", proof.RULES)
def test_no_rule_accepts_a_formula_that_does_not_follow(rule):
    """Over random formulas of two letters, so that rules often nearly apply."""
    rng, accepted = random.Random(rule), 0
    pool = [random_formula(rng, 2) for _ in range(60)]
    pool += [("~", x) for x in pool[:30]] + [
        (op, a, b) for op in "&|>" for a, b in itertools.product(pool[:8], pool[:8])
    ]
    count = 1 if rule in ("ae", "oi", "dn") else 2
    for _ in range(20000):
        used = [rng.choice(pool) for _ in range(count)]
        near = [part for one in used for x in parts(one) for part in parts(x)]
        formula = rng.choice(
            [rng.choice(near), ("~", rng.choice(near)), (rng.choice("&|>"), rng.choice(near), rng.choice(near))]
        )
        line = f"{proof.text(formula)} {rule} {' '.join(str(n + 1) for n in range(count))}"
        if len(proof.proved(used, [line])) > count:
            accepted += 1
            if accepted < 40:
                assert entails(used, formula), line
    assert accepted > 3


def test_mutated_proofs_fail():
    env, rng, failed, total = envs.load("proof", min_steps=2), random.Random(0), 0, 0
    for index in range(30):
        task = env.make_task(index, "train")
        lines = task.answer.splitlines()
        for mutated in (
            lines[:-1],
            lines[1:],
            lines[::-1],
            [],
            [*lines, "zz mp 1 2"],
            [line.upper() for line in lines],
        ):
            if mutated != lines:
                assert env.score(task, "\n".join(mutated))["reward"] == 0.0
        for at in range(len(task.answer)):  # one character replaced: either still a proof by z3, or refused
            text = task.answer[:at] + rng.choice("abz12 ~&|>()\n") + task.answer[at + 1 :]
            if env.score(task, text)["reward"]:
                assert all(
                    entails(task.info["premises"], f) for f in proof.proved(task.info["premises"], text.splitlines())
                )
            else:
                failed += 1
            total += 1
    assert failed > 0.6 * total


@pytest.mark.parametrize(
    "line",
    "a|a mp|a mp 1|a mp 1 2 3|a mp 0 1|a mp 1 9|a mp -1 2|a xx 1 2|a  mp 1 2|A mp 1 2|a mp 1 ٢".split("|")
    + [
        "~" * 9000 + "a dn 1",
        "(" * 9000 + "a dn 1",
        "(a>b mp 1 2",
        "(a>b)) mp 1 2",
        "(ab) mp 1 2",
        "() mp 1 2",
        "a mp 99999 1",
    ],
)
def test_malformed_lines(line):
    known = ["b", (">", "b", "a")]
    assert proof.proved(known, ["a mp 1 2"]) == [*known, "a"] and proof.proved(known, ["a mp 2 1"]) == [*known, "a"]
    assert proof.proved(known, [line]) == known


def test_text_and_parse_are_inverse():
    rng = random.Random(1)
    for _ in range(300):
        formula = random_formula(rng, 4, "abcz")
        assert proof.parse(proof.text(formula)) == formula
