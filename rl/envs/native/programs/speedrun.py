"""The environment "speedrun": an optimizer for a small language model, which should reach a target loss in few steps.

1. The language model predicts a letter from the one before: a table of logits, trained on a generated corpus. The model of the run writes
   `update(params, grads, state, step)`, which returns the next parameters, lists of numbers; `state` is a dict that stays.
2. The program runs in a sandbox. Its gradients come from this process, one call per step, and this process computes the loss of the
   parameters that it is given: nothing in the sandbox could shorten the count. Steps, not seconds, because only steps repeat.
3. The reward is 1 for the steps of the record, momentum with a good rate, or fewer; 0 for those of plain gradient descent, or more, and
   linear between them.
4. Gradients and losses use sums, products, and quotients alone, in a fixed order, so that each machine computes the same bits. `math.exp`
   would differ between C libraries.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Sequence

from rl.envs.interface import environment, episode
from rl.envs.native.programs import grading
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib

INSTRUCTION = "Write an optimizer in Python. End with one block of code, between ```python and ```."
TASK = """A table of {size} x {size} logits predicts a letter from the one before it. The corpus has the letters {letters}.

Write update(params, grads, state, step). It gets the parameters and the gradients of the mean loss, lists of {count} numbers, a dict \
`state` that stays, and the number of the step from 0, and returns the next parameters. Training starts from zeros. Plain gradient descent \
with rate 1 needs {most} steps to reach the target loss {target}; use fewer."""
LOOP = """
params, state, step = [0.0] * {count}, {{}}, 0
while True:
    found = gradients(params)
    if found is None:
        break
    params = update(params, found, state, step)
    step += 1
"""
RECORD = """
def update(params, grads, state, step):
    velocity = state.setdefault('velocity', [0.0] * len(params))
    for i, grad in enumerate(grads):
        velocity[i] = {momentum} * velocity[i] + grad
    return [param - {rate} * v for param, v in zip(params, velocity)]
"""
PLAIN = "def update(params, grads, state, step):\n    return [param - grad for param, grad in zip(params, grads)]\n"
MOMENTUM, RATE = 0.8, 6.0
LETTERS = "abcd"
MAX_STEPS = 400
_LN2 = 0.6931471805599453


class _Over(ValueError):
    """Raised for parameters that no program should send."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Counts of pairs of letters, and a target loss."""

    counts: tuple[tuple[int, ...], ...]
    target: float

    @property
    def num_params(self) -> int:
        """The number of logits."""
        return len(self.counts) ** 2

    def loss_and_gradients(self, params: Sequence[float]) -> tuple[float, list[float]]:
        """Returns the mean loss and its gradients."""
        total, loss, grads, size = sum(map(sum, self.counts)), 0.0, [], len(self.counts)
        for row, counts in enumerate(self.counts):
            logits = params[row * size : (row + 1) * size]
            top = max(logits)
            weights = [exp(logit - top) for logit in logits]
            norm, seen = sum(weights), sum(counts)
            loss += sum(count * (log(norm) - (logit - top)) for count, logit in zip(counts, logits, strict=True))
            grads += [(seen * weight / norm - count) / total for count, weight in zip(counts, weights, strict=True)]
        return loss / total, grads


def build(*, system_prompt: str = INSTRUCTION, run_s: float = 2.0, seed: int = 0) -> environment.Environment:
    """Builds the environment. `run_s` limits the CPU seconds of a program. Raises ValueError on a machine where no sandbox works."""
    pool = pool_lib.shared(limits_lib.Limits(cpu_s=run_s, output_bytes=256))
    record = RECORD.format(momentum=MOMENTUM, rate=RATE)

    def draw(number: int, index: int, split: str) -> environment.Task | None:
        corpus = _corpus(random.Random(number))
        most, best = steps_of(corpus, 0.0, 1.0), steps_of(corpus, MOMENTUM, RATE)
        if not 5 <= best <= most // 2 or most >= MAX_STEPS:
            return None  # too easy, or too long
        text = TASK.format(
            size=len(corpus.counts),
            letters=" ".join(LETTERS),
            count=corpus.num_params,
            most=most,
            target=corpus.target,
        )
        info = {"corpus": corpus, "most": most, "best": best}
        messages = environment.asked(text, system_prompt)
        return environment.Task("speedrun", index, split, messages, grading.block(record), grading.block(PLAIN), info)

    async def play(task: environment.Task, model: episode.Model) -> dict[str, float]:
        try:
            code = grading.last_block((await model.chat(task.messages)).text)
        except episode.BudgetSpent:
            code = None
        most, best = task.info["most"], task.info["best"]
        steps = await _train(pool, task.info["corpus"], code, most) if code else most
        return {"reward": min(max((most - steps) / (most - best), 0.0), 1.0), "steps": float(steps)}

    return environment.Environment("speedrun", environment.drawn("speedrun", seed, draw), play=play, kind="replayed")


def steps_of(corpus: Corpus, momentum: float, rate: float) -> int:
    """Returns the number of steps that gradient descent with momentum needs for the target, at most MAX_STEPS."""
    params, velocity = [0.0] * corpus.num_params, [0.0] * corpus.num_params
    for step in range(MAX_STEPS):
        loss, grads = corpus.loss_and_gradients(params)
        if loss <= corpus.target:
            return step
        velocity = [momentum * v + grad for v, grad in zip(velocity, grads, strict=True)]
        params = [param - rate * v for param, v in zip(params, velocity, strict=True)]
    return MAX_STEPS


def exp(x: float) -> float:
    """Returns e^x for x <= 0, the same bits on each machine, with a relative error below 1e-12."""
    if x < -700:
        return 0.0
    twos = math.floor(x / _LN2 + 0.5)
    rest, term, total = x - twos * _LN2, 1.0, 1.0
    for n in range(1, 14):
        term = term * rest / n
        total += term
    return math.ldexp(total, twos)


def log(x: float) -> float:
    """Returns the natural logarithm of x > 0, the same bits on each machine, with an error below 1e-14."""
    mantissa, twos = math.frexp(x)
    ratio = (mantissa - 0.75) / (mantissa + 0.75)
    square, power, total = ratio * ratio, ratio, 0.0
    for n in range(1, 40, 2):
        total += power / n
        power *= square
    return 2 * total + twos * _LN2 + -0.2876820724517809  # the logarithm of 0.75


async def _train(pool: pool_lib.Pool, corpus: Corpus, code: str, most: int) -> int:
    """Trains with the program's `update` and returns the steps to the target; `most` if it does not reach it sooner, or fails."""
    steps, reached = 0, False

    async def gradients(params: list) -> list[float] | None:
        nonlocal steps, reached
        if len(params) != corpus.num_params or not all(
            isinstance(x, (int, float)) and math.isfinite(x) for x in params
        ):
            raise _Over(f"params must be {corpus.num_params} finite numbers")
        if max(map(abs, params)) > 1e6:
            raise _Over("params must be below 1e6")
        loss, grads = corpus.loss_and_gradients([float(x) for x in params])
        reached |= loss <= corpus.target
        if reached or steps >= most:
            return None
        steps += 1
        return grads

    async with pool.session(functions={"gradients": gradients}) as session:
        await session.execute(code)
        await session.execute(LOOP.format(count=corpus.num_params))
    return steps if reached else most


@functools.lru_cache(1024)
def _transitions(seed: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(seed)
    return tuple(tuple(rng.choice((1, 2, 4, 8, 16)) for _ in LETTERS) for _ in LETTERS)


def _corpus(rng: random.Random) -> Corpus:
    """Returns the counts of a text drawn from random transitions. The target is 0.5 % above the least loss."""
    weights = _transitions(rng.getrandbits(32))
    counts, letter = [[1] * len(LETTERS) for _ in LETTERS], 0
    for _ in range(400):
        (after,) = rng.choices(range(len(LETTERS)), weights[letter])
        counts[letter][after] += 1
        letter = after
    total, least = sum(map(sum, counts)), 0.0
    for row in counts:
        least += sum(count * (log(sum(row)) - log(count)) for count in row) / total
    return Corpus(tuple(map(tuple, counts)), round(1.005 * least, 5))
