"""The environment "swe_toy": a package of three modules has one bug, and the model finds and mends it.

1. repository.py makes the package. The tools are `read`, `edit`, and `run_tests`, which runs the visible tests in a sandbox. With
   `protocol="text"`, a message is one command: "read PATH", "run_tests", "done", or "edit PATH", the old lines, "=>", and the new lines.
2. The episode ends with a message that calls no tool ("done" in the protocol "text").
3. The reward is 1 if all tests pass, the hidden ones too, and no test file was changed. Expected values of tests that compare with a
   literal stay outside of the sandbox (grading.py).
"""

import random
from collections.abc import Callable, Sequence

from rl.envs.interface import environment, episode, tools
from rl.envs.native.programs import grading, python_tool, repository
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib

INSTRUCTION = "The tests of a Python package fail, because one line has a bug. Find it with the tools, mend it, and then answer 'done'."
INSTRUCTION_OF_TEXT = (
    "The tests of a Python package fail, because one line has a bug. Mend it. Write one command per message: read PATH; run_tests; edit PATH, "
    "then the old lines, a line =>, and the new lines; or, at the end, done."
)
RUN = "import test_shop\ntest_shop.test_all()\nprint('all tests pass')\n"
MAX_FILE_CHARS = 2**16


class Repository:
    """The files of an episode."""

    def __init__(self, made: repository.Made, pool: pool_lib.Pool):
        self.files, self.pool = dict(made.files), pool

    def text(self, path: str) -> str:
        """Returns the text of a file. Raises ValueError if it does not exist."""
        if path not in self.files:
            raise ValueError(f"file {path!r} does not exist; choose one of {', '.join(sorted(self.files))}")
        return self.files[path]


def read(path: str, state: Repository) -> str:
    """Returns the text of a file.

    Args:
      path: of the file, as in the list of files.
      state: of the episode.
    """
    return state.text(path)


def edit(path: str, old: str, new: str, state: Repository) -> str:
    """Replaces a text that occurs once in a file.

    Args:
      path: of the file, as in the list of files.
      old: the text to replace.
      new: the text to write instead.
      state: of the episode.
    """
    text = state.text(path)
    if not old or (count := text.count(old)) != 1:
        raise ValueError(f"the old text occurs {count if old else 0} times in {path}; give one that occurs once")
    if len(text) + len(new) > MAX_FILE_CHARS:
        raise ValueError(f"the file would have more than {MAX_FILE_CHARS} characters; write less")
    state.files[path] = text.replace(old, new)
    return "edited"


async def run_tests(state: Repository) -> str:
    """Runs the tests and returns their output."""
    result = await state.pool.run(RUN, files=state.files)
    return python_tool.ENDED.get(result.stopped, "").split(";")[0] or (result.stdout + result.stderr).strip()


def build(
    *,
    protocol: str = "tools",
    turns: int = 12,
    run_s: float = 1.0,
    output_bytes: int = 2048,
    system_prompt: str | None = None,
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment. `turns` limits the messages of the model; `run_s` and `output_bytes` limit the CPU seconds and the output of a test run.

    The default of `system_prompt` depends on the protocol; "" leaves it out. Raises ValueError for options out of range, and a machine
    where no sandbox works.
    """
    tools.check_protocol(protocol, turns)
    pool = pool_lib.shared(limits_lib.Limits(cpu_s=run_s, output_bytes=output_bytes))
    instruction = tools.instruction(protocol, system_prompt, tools=INSTRUCTION, text=INSTRUCTION_OF_TEXT)

    def draw(number: int, index: int, split: str) -> environment.Task:
        made = repository.make(random.Random(number))
        listed = "\n".join(f"- {path}" for path in sorted(made.files))
        question = f"The files are:\n{listed}\n\n{made.files['test_shop.py']}"
        answer = f"edit {made.path}\n{made.wrong}\n=>\n{made.right}"
        decoy = f"edit {made.path}\n{made.wrong}\n=>\n    pass"
        messages = environment.asked(question, instruction)
        return environment.Task("swe_toy", index, split, messages, answer, decoy, {"made": made})

    async def score(task: environment.Task, messages: Sequence[dict], state: Repository) -> dict[str, float]:
        made, passes = task.info["made"], False
        is_edited = state.files != made.files
        has_changed_tests = state.files["test_shop.py"] != made.files["test_shop.py"]
        if is_edited and not has_changed_tests:
            modules = [path[:-3].replace("/", ".") for path in state.files if path.count("/")]
            code = "".join(f"from {module} import *\n" for module in modules if module != "shop.__init__")
            passed = await grading.count_passed(pool, code, made.hidden, stops=True, files=state.files)
            passes = passed == len(made.hidden)
        num_turns = sum(m["role"] == "assistant" for m in messages[len(task.messages) :])
        parts = {"edited": float(is_edited), "changed_tests": float(has_changed_tests), "turns": float(num_turns)}
        return {"reward": float(passes), **parts}

    async def reply(task: environment.Task, messages: Sequence[dict], state: Repository) -> list[dict] | None:
        text = messages[-1]["content"] or ""
        if protocol == "tools" or text.strip() == "done":
            return None
        return [{"role": "user", "content": await _command(state, text)}]

    def demonstrate(task: environment.Task, rng: random.Random, is_decoy: bool) -> dict:
        """Reads the module with the bug, mends it, and ends; a decoy removes the line instead."""
        made = task.info["made"]
        change = {"path": made.path, "old": made.wrong, "new": "    pass" if is_decoy else made.right}
        messages = [
            *task.messages,
            *tools.step(protocol, 0, f"read {made.path}", "read", {"path": made.path}, made.files[made.path]),
            *tools.step(protocol, 1, task.decoy if is_decoy else task.answer, "edit", change, "edited"),
            {"role": "assistant", "content": "done"},
        ]
        return {"messages": messages, "tools": [tool.schema for tool in offered]}

    functions: tuple[Callable, ...] = (read, edit, run_tests)
    offered = [tools.of(function) for function in functions] if protocol == "tools" else []
    begin = lambda task: Repository(task.info["made"], pool)  # noqa: E731
    play = episode.conversation(score=score, reply=reply, tools=offered, initial_state=begin, max_turns=turns)
    make_task = environment.drawn("swe_toy", seed, draw)
    return environment.Environment("swe_toy", make_task, play=play, kind="replayed", demonstrate=demonstrate)


async def _command(state: Repository, text: str) -> str:
    """Runs a command of the protocol "text" and returns its output."""
    line, _, rest = text.strip("\n").partition("\n")
    name, _, path = line.strip().partition(" ")
    try:
        if name == "run_tests":
            return await run_tests(state)
        if name == "read":
            return read(path.strip(), state)
        if name == "edit":
            old, mark, new = rest.partition("\n=>\n")
            if not mark:
                raise ValueError("write the old lines, a line =>, and the new lines")
            return edit(path.strip(), old, new, state)
        raise ValueError("write read, edit, run_tests, or done")
    except ValueError as error:
        return f"error: {error}"
