"""The environment "rlm": a recursive language model, which reads a long context by programs, and asks itself about parts of it.

1. The context is the variable `context` of a Python session, and never in a prompt of the root. A message with a block of Python runs it,
   and the next message has its output, shortened in its middle: the context printed whole does not fit.
2. The code may call `llm_batch(prompts)`, which asks the same model, each prompt in a conversation of its own, at the same time; and, up to
   `depth`, `rlm(prompt, context)`, a whole episode of this kind about another context. Beyond the depth it returns a note.
   With `sub_tools`, the sub-models may call `read(first, last)`, which returns lines of the context.
3. The answer is the variable `answer`, {"ready": False, "content": ""}. The code may edit it often; the episode ends when it is ready, or
   with a message without code. `done(value)` is short for both.
4. The reward is 1 if the content is the right one. Sub-calls are calls of the episode: they are recorded, verified, and trained on.

Generated tasks: "count" asks for the number of lines with a letter and a word, "needle" for the number in one line, "classify" for the
number of lines about animals, which needs judgment. Small contexts, such as lines=8, words=4, and system_prompt="" suit a tiny model.
"""

import asyncio
import dataclasses
import random
from collections.abc import Sequence

from rl.envs.interface import environment, episode, tools
from rl.envs.native.programs import grading, python_tool
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib

INSTRUCTION = (
    "The variable `context` has a text of {chars} characters, too long to print. A block between ```python and ``` runs, and its variables "
    "stay. llm_batch(prompts) asks a language model each of a list of prompts, and returns its answers. When you know the answer, run "
    "answer['content'] = ...; answer['ready'] = True."
)
KINDS = ("count", "needle", "classify")
ANIMALS = "cat dog horse mouse cow sheep goat lion tiger bear wolf fox".split()
LETTERS = "abcdefgh"
THINGS = "table chair lamp spoon plate river stone cloud train paper clock glass".split()
SETUP = "def done(value):\n    answer['content'] = str(value)\n    answer['ready'] = True\n"
NAMES = ["answer"]  # the variables that are read after each command


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an episode."""

    turns: int
    depth: int
    sub_turns: int
    sub_tools: bool
    max_prompts: int  # of one call of `llm_batch`


def build(
    *,
    kind: str = "count",
    lines: int = 400,
    words: int = 24,
    turns: int = 6,
    depth: int = 1,
    sub_turns: int = 3,
    sub_tools: bool = False,
    max_prompts: int = 256,
    run_s: float = 1.0,
    output_bytes: int = 2048,
    system_prompt: str = INSTRUCTION,
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment of contexts with `lines` lines of a letter, one of `words` words, and a number.

    In `system_prompt`, {chars} is the length of the context. Raises ValueError for options out of range, and a machine where no sandbox works.
    """
    if not 2 <= words <= len(ANIMALS + THINGS):
        raise ValueError(f"words={words}; choose 2 to {len(ANIMALS + THINGS)}")
    if kind not in KINDS or lines < 2 or turns < 1 or depth < 0 or sub_turns < 1 or max_prompts < 1:
        given = f"kind={kind!r}, lines={lines}, turns={turns}, depth={depth}, sub_turns={sub_turns}, max_prompts={max_prompts}"
        raise ValueError(
            f"{given}; choose one of {', '.join(KINDS)}, lines of at least 2, a depth of at least 0, and the others of at least 1"
        )
    pool = pool_lib.shared(limits_lib.Limits(cpu_s=run_s, output_bytes=output_bytes))
    options = Options(turns, depth, sub_turns, sub_tools, max_prompts)

    def draw(number: int, index: int, split: str) -> environment.Task:
        query, context, content, code, decoy = _drawn(kind, lines, words, random.Random(number))
        messages = environment.asked(query, system_prompt.replace("{chars}", str(len(context))))
        info = {"context": context, "content": content}
        return environment.Task("rlm", index, split, messages, grading.block(code), grading.block(decoy), info)

    async def play(task: environment.Task, model: episode.Model) -> dict[str, float]:
        root = _Root(pool, model, options)
        found = await root.solve(task.messages, task.info["context"], options.depth, 0)
        return {
            "reward": float(found.strip() == task.info["content"]),
            "turns": float(root.num_turns),
            "sub_calls": float(root.num_sub_calls),
            "errors": float(root.num_errors),
        }

    return environment.Environment("rlm", environment.drawn(f"rlm/{kind}", seed, draw), play=play, kind="replayed")


class _Root:
    """An episode: the conversation of the root, and those of its sub-calls."""

    def __init__(self, pool: pool_lib.Pool, model: episode.Model, options: Options):
        self._pool, self._model, self._options = pool, model, options
        self.num_turns = self.num_sub_calls = self.num_errors = 0

    async def solve(self, messages: Sequence[dict], context: str, depth: int, number: int) -> str:
        """Returns the answer of a conversation with a session about `context`; "" without one."""

        async def llm_batch(prompts: list) -> list[str]:
            _check(
                isinstance(prompts, list) and all(isinstance(x, str) for x in prompts), "prompts must be a list of str"
            )
            _check(len(prompts) <= self._options.max_prompts, f"at most {self._options.max_prompts} prompts")
            asked = (self._ask(x, context, i) for i, x in enumerate(prompts))
            # all of them, so that a replay asks for the same
            found = await asyncio.gather(*asked, return_exceptions=True)
            for error in found:
                if isinstance(error, BaseException):
                    raise error
            return found  # type: ignore[return-value]

        async def rlm(prompt: str, part: str) -> str:
            _check(isinstance(prompt, str) and isinstance(part, str), "prompt and context must be str")
            if depth < 1:
                return f"[depth limit {self._options.depth}]"
            self.num_sub_calls += 1
            return await self.solve([*system, {"role": "user", "content": prompt}], part, depth - 1, number)

        system = [message for message in messages if message["role"] == "system"]
        functions = {"llm_batch": llm_batch, "rlm": rlm}
        values = {"context": context, "answer": {"ready": False, "content": ""}}
        answer, messages = "", [*messages]
        async with self._pool.session(values=values, functions=functions, watched=NAMES) as session:
            for _ in range(self._options.turns):
                try:
                    reply = await self._model.chat(messages, number=number)
                    self.num_turns += 1
                    messages.append(reply.message)
                    if (code := grading.last_block(reply.text)) is None:
                        break
                    if not session.is_open:  # at first, and after a limit
                        await session.execute(SETUP)
                    result = await session.execute(code)
                except episode.BudgetSpent:
                    break
                self.num_errors += bool(result.exit or result.stopped)
                found = result.values.get("answer")
                if isinstance(found, dict):
                    answer = str(found.get("content", ""))[:10_000]
                    if found.get("ready") is True:
                        return answer
                messages.append({"role": "user", "content": python_tool.shown(result)})
        return answer

    async def _ask(self, prompt: str, context: str, number: int) -> str:
        """Returns the answer of a sub-model to one prompt."""
        self.num_sub_calls += 1
        lines = context.splitlines()

        def read(first: int, last: int) -> str:
            """Returns lines of the context.

            Args:
              first: number of the first line, from 0.
              last: number of the last line.
            """
            return "\n".join(lines[max(first, 0) : last + 1])

        offered = [tools.of(read)] if self._options.sub_tools else []
        messages: list[dict] = [{"role": "user", "content": prompt}]
        for _ in range(self._options.sub_turns):
            reply = await self._model.chat(messages, tools=[tool.schema for tool in offered], number=number)
            if not (calls := reply.message.get("tool_calls")) or not offered:
                return reply.text
            messages += [reply.message, *await tools.results(offered, calls)]
        return "[turn limit]"


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _drawn(kind: str, lines: int, words: int, rng: random.Random) -> tuple[str, str, str, str, str]:
    """Returns query, context, answer, code that solves the task, and code that gets it wrong."""
    known = [word for pair in zip(ANIMALS, THINGS, strict=True) for word in pair][:words]
    letter, word, bound = rng.choice(LETTERS), rng.choice(known), rng.randint(0, 89)
    rows = [(rng.choice(LETTERS), rng.choice(known), rng.randint(0, 99)) for _ in range(lines)]
    wrong = "done(len(context.splitlines()) + 1)"
    if kind == "needle":
        rows = [row for row in rows if row[:2] != (letter, word)]
        value = rng.randint(1000, 9999)
        rows.insert(rng.randint(0, len(rows)), (letter, word, value))
        query = f"Which number does the line with {letter} {word} have?"
        code = f"done([l.split()[2] for l in context.splitlines() if l.startswith('{letter} {word} ')][0])"
    elif kind == "count":
        # As many as any: with few, a model learns to answer 0.
        value = rng.randint(1, max(lines // 2, 1))
        others = [row for row in rows if row[:2] != (letter, word)]
        rows = others[: lines - value] + [(letter, word, rng.randint(0, 99)) for _ in range(value)]
        rng.shuffle(rows)
        query = f"How many lines begin with {letter} {word}?"
        code = f"done(sum(l.startswith('{letter} {word} ') for l in context.splitlines()))"
    else:
        rows = [(rng.choice((letter, row[0])), *row[1:]) for row in rows]
        value = sum(row[0] == letter and row[1] in ANIMALS and row[2] > bound for row in rows)
        query = f"How many lines with the letter {letter} and a number above {bound} are about animals?"
        rule = f"r[0] == '{letter}' and r[1] in {ANIMALS} and int(r[2]) > {bound}"
        code = f"done(sum({rule} for r in map(str.split, context.splitlines())))"
    return query, "\n".join(f"{a} {b} {c}" for a, b, c in rows), str(value), code, wrong
