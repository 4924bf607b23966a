"""The environment "python_tool": a question about numbers, and a Python session in a sandbox that keeps its variables.

1. Questions are generated, or come from a JSONL file of {"prompt": ..., "answer": ...}. The generated ones need a computation that is
   too long to do in one's head. Those of the kind "product" suit a tiny model.
2. The tool `python` runs code and returns its output, and the value of its last expression. With `protocol="text"`, a message with a
   block of Python runs it, and the next message has the output; this needs no schemas in the prompt.
3. The first message without a call is the answer. The reward is 1 if its last number is that of the answer.
4. Long output is shortened in its middle, always in the same way, and a program that is ended at a limit has none.
"""

import math
import pathlib
import random
from collections.abc import Sequence

from rl.envs.interface import environment, episode, tools
from rl.envs.native import numerals
from rl.envs.native.programs import grading
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib
from rl.learning.data import sources

INSTRUCTION = (
    "Answer the question. You may run Python, whose variables stay. End with a message 'Answer: NUMBER' without a call."
)
INSTRUCTION_OF_TEXT = "Answer the question. A block between ```python and ``` runs, and its variables stay. End with a message 'Answer: NUMBER' without a block."
KINDS = ("power", "digits", "multiples", "primes", "pairs", "product")
ENDED = {
    "time": "error: it took too long; all variables are lost",
    "output": "error: it printed too much; all variables are lost",
    "files": "error: it wrote too many files; all variables are lost",
    "lost": "error: the sandbox ended; all variables are lost",
}


def build(
    *,
    path: str = "",
    kind: str = "all",
    protocol: str = "tools",
    turns: int = 8,
    run_s: float = 1.0,
    output_bytes: int = 2048,
    system_prompt: str | None = None,
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment. `path`: a JSONL file of questions; "": generated ones, of all KINDS or of one `kind`.

    `turns` limits the messages of the model, the answer included; `run_s` and `output_bytes` limit the CPU seconds and the output of
    each command. The default of `system_prompt` depends on the protocol; "" leaves it out. Raises ValueError for a malformed file,
    options out of range, and a machine where no sandbox works.
    """
    tools.check_protocol(protocol, turns)
    if kind not in ("all", *KINDS):
        raise ValueError(f"env.options.kind = {kind!r}; choose all, or one of {', '.join(KINDS)}")
    pool = pool_lib.shared(limits_lib.Limits(cpu_s=run_s, output_bytes=output_bytes))
    instruction = tools.instruction(protocol, system_prompt, tools=INSTRUCTION, text=INSTRUCTION_OF_TEXT)
    rows = _read(pathlib.Path(path)) if path else {}
    offered = [tools.of(python)] if protocol == "tools" else []

    def task_of(asked: tuple[str, str, str], index: int, split: str) -> environment.Task:
        question, answer, code = asked
        messages = environment.asked(question, instruction)
        return environment.Task("python_tool", index, split, messages, f"Answer: {answer}", info={"code": code})

    def of_row(index: int, split: str) -> environment.Task:
        return task_of((*rows[split][index % len(rows[split])], ""), index, split)

    def draw(number: int, index: int, split: str) -> environment.Task:
        return task_of(_question(number, kind), index, split)

    def score(task: environment.Task, messages: Sequence[dict], state: object) -> dict[str, float]:
        played = [m for m in messages[len(task.messages) :] if m["role"] == "assistant"]
        is_over = bool(played) and not played[-1].get("tool_calls")
        last = (played[-1]["content"] or "") if is_over else ""
        if protocol == "text" and grading.last_block(last) is not None:
            last = ""
        number = numerals.last(last[-1000:])
        right = numerals.expected(task.answer).equals(number)
        return {"reward": float(right), "turns": float(len(played)), "has_answer": float(number is not None)}

    async def reply(task: environment.Task, messages: Sequence[dict], state: pool_lib.Session) -> list[dict] | None:
        code = grading.last_block(messages[-1]["content"] or "") if protocol == "text" else None
        return None if code is None else [{"role": "user", "content": await python(code, state)}]

    def demonstrate(task: environment.Task, rng: random.Random, is_decoy: bool) -> dict:
        """Computes the answer in a program; a decoy guesses."""
        code, answer, ran = task.info["code"], task.answer, []
        if is_decoy:
            answer = f"Answer: {rng.randint(0, 99)}"
        else:
            result = answer.removeprefix("Answer: ")
            ran = tools.step(protocol, 0, grading.block(code), "python", {"code": code}, result)
        messages = [*task.messages, *ran, {"role": "assistant", "content": answer}]
        return {"messages": messages, "tools": [tool.schema for tool in offered]}

    play = episode.conversation(
        score=score, reply=reply, tools=offered, initial_state=lambda task: pool.session(), max_turns=turns
    )
    if rows:
        num_tasks = len(rows["train"])
        return environment.Environment("python_tool", of_row, num_tasks=num_tasks, play=play, kind="replayed")
    make_task = environment.drawn("python_tool", seed, draw)
    return environment.Environment("python_tool", make_task, play=play, kind="replayed", demonstrate=demonstrate)


async def python(code: str, state: pool_lib.Session) -> str:
    """Runs Python code and returns its output, and the value of its last expression. Variables stay between calls.

    Args:
      code: lines of Python, without files, network, and other programs.
      state: of the episode.
    """
    return shown(await state.execute(code))


def shown(result: limits_lib.Result) -> str:
    """Returns the text that a model reads about a command."""
    if result.stopped:
        return ENDED[result.stopped]
    if result.exit and not result.stdout:
        return f"error: the program ended with status {result.exit}"
    return result.stdout.rstrip("\n") or "(no output)"


def _question(number: int, kind: str) -> tuple[str, str, str]:
    """Returns a question, its answer, and code that prints the answer."""
    rng = random.Random(number)
    n, m, a, b = rng.randint(30, 300), rng.randint(100, 999), rng.randint(2, 99), rng.randint(20, 400)
    p, q = rng.sample([2, 3, 5, 7, 11, 13], 2)
    x, y = rng.randint(10, 99), rng.randint(10, 99)
    questions = {
        "power": (f"What is the remainder of {a}^{b} divided by {m}?", pow(a, b, m), f"print(pow({a}, {b}, {m}))"),
        "digits": (
            f"What is the sum of the digits of {n}! (the factorial)?",
            sum(map(int, str(math.factorial(n)))),
            f"import math\nprint(sum(int(d) for d in str(math.factorial({n}))))",
        ),
        "multiples": (
            f"How many whole numbers from 1 to {a * b} are divisible by {p} or by {q}, but not by both?",
            sum((x % p == 0) != (x % q == 0) for x in range(1, a * b + 1)),
            f"print(sum((x % {p} == 0) != (x % {q} == 0) for x in range(1, {a * b + 1})))",
        ),
        "primes": (
            f"What is the sum of the primes below {n}?",
            sum(x for x in range(2, n) if all(x % d for d in range(2, math.isqrt(x) + 1))),
            f"print(sum(x for x in range(2, {n}) if all(x % d for d in range(2, x))))",
        ),
        "pairs": (
            f"How many ordered pairs (x, y) of whole numbers from 1 to {n} have x * y divisible by {m}?",
            sum(n // (m // math.gcd(m, x)) for x in range(1, n + 1)),
            f"import math\nprint(sum({n} // ({m} // math.gcd({m}, x)) for x in range(1, {n + 1})))",
        ),
        "product": (f"What is {x} * {y}?", x * y, f"print({x} * {y})"),
    }
    question, answer, code = questions[rng.choice(KINDS) if kind == "all" else kind]
    return question, str(answer), code


def _read(path: pathlib.Path) -> dict[str, list[tuple[str, str]]]:
    """Returns (question, answer) of each task by split. Raises ValueError with the line of a malformed one."""
    if not path.is_file():
        raise ValueError(f"env.options.path = {str(path)!r} is not a file; set it to a JSONL file of questions")

    def parse(row) -> tuple[str, str]:
        numerals.expected(str(row["answer"]))
        return row["prompt"] + "", str(row["answer"])

    return environment.divided(sources.parse_lines(path, parse, "a question"), lambda row: row[0], str(path))
