'''Defines an environment: how tasks are made, how completions are scored, and which tasks are held out.

An environment is a function that returns an `Environment`; `env.name = "module:function"` names it. This one teaches addition:

    >>> import random
    >>> from rl.envs import environment
    >>> def build(*, largest: int = 99, seed: int = 0) -> environment.Environment:
    ...     """Builds an environment of sums of two numbers up to `largest`."""
    ...
    ...     def draw(number: int, index: int, split: str) -> environment.Task:
    ...         a, b = random.Random(number).choices(range(largest + 1), k=2)
    ...         messages = ({"role": "user", "content": f"{a} + {b} = ?"},)
    ...         return environment.Task("add", index, split, messages, answer=str(a + b))
    ...
    ...     def score(task: environment.Task, completion: str) -> dict[str, float]:
    ...         return {"reward": float(completion.strip() == task.answer), "length": float(len(completion))}
    ...
    ...     return environment.Environment("add", environment.drawn("add", seed, draw), score)

    >>> env = build(largest=9)
    >>> task = env.make_task(0, "train")
    >>> task.messages, task.answer
    (({'role': 'user', 'content': '7 + 7 = ?'},), '14')
    >>> env.score(task, "14\\n"), env.score(task, "I give up")
    ({'reward': 1.0, 'length': 3.0}, {'reward': 0.0, 'length': 9.0})
    >>> env.make_task(0, "train") == task
    True

1. `make_task(index, split)` must be a pure function of the builder's options, the seed, the split and the index. Workers and
   validators make each task again in their own processes, so Python's `hash`, set order and global random state are unusable.
2. The model completes `task.messages`, and continues the last one if it is the assistant's. The completion is the text as the model
   wrote it, without the reasoning of a model that reasons (`Tokenizer.scored_text`).
3. `score(task, completion)` returns finite numbers by name. "reward" is maximized by training and required; the others are
   metrics. Every completion must get the same names. A completion may come from an adversary: scoring runs in a process
   with limits (rl/envs/scoring/scorer.py), without network and files other than installed packages. The builder reads all data.
4. An exception in `make_task` ends the run with one line. A completion for which `score` raises is left out (rl.score_errors).

Training and held-out tasks are separated by content: a prompt is held out if its hash is 0 modulo 16. So no prompt is in
both, however the tasks are generated. Where all prompts are equal, tasks are separated by their index.

An environment of several turns, tools, or other models has a program `play` instead of `score` (rl/envs/interface/episode.py).
'''

import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from rl.envs.interface import episode
from rl.protocol import user_code
from sharding.system import text as text_lib

SPLITS = ("train", "held_out")
# "pure": the task and the completions; "replayed": also this machine's tools, such as a sandbox for code; "recorded": more than that,
# such as a clock or the web, so that no validator can repeat it. trust.environments is the rule for strangers.
KINDS = ("pure", "replayed", "recorded")
HELD_OUT_ONE_IN = 16
MAX_EQUAL = 64  # attempts, after which equal prompts count as all that there are
MAX_ATTEMPTS = 512  # all of them miss the held-out split by chance with (15/16)^512 = 5e-15


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem that an environment poses: its prompt and the data to score completions. `Environment.make_task` returns it."""

    env: str  # name of the environment
    index: int
    split: str  # "train" or "held_out"
    # The prompt, in the form of OpenAI's API; the model continues a last message of the assistant.
    messages: tuple[dict, ...]
    answer: str  # a completion with reward 1.0
    decoy: str = ""  # a tempting completion with a lower reward, for studies of wrong demonstrations; "" for none
    info: dict = dataclasses.field(default_factory=dict)  # further data for `score`; never leaves the process


@dataclasses.dataclass(frozen=True)
class Environment:
    """A source of tasks with a function that scores completions. The module docstring has an example and the rules for both."""

    name: str
    make_task: Callable[[int, str], Task]  # (index, split) -> task
    # (task, completion) -> {"reward": ..., further numbers}
    score: Callable[[Task, str], dict[str, float]] | None = None
    num_tasks: int = 0  # for training, each of them once per epoch; 0: as many as a run needs
    play: episode.Program | None = None  # an episode of several calls of the model, instead of `score`
    kind: str = "pure"  # one of KINDS: the needs of a validator that repeats an episode
    # rl.envs.packages.package.Foreign of an environment that runs in its own interpreter, by rl/envs/foreign
    foreign: Any = None
    # (task, rng, is_decoy) -> {"messages": a whole conversation, "tools": their schemas, if any} for the warm-up to imitate: a solution
    # or, if `is_decoy`, a tempting one with a lower reward. None: `Task.answer` and `Task.decoy` are solutions in one message.
    demonstrate: Callable[[Task, random.Random, bool], dict] | None = None
    # of all rewards; `python -m rl.envs check` holds the environment to it
    reward_range: tuple[float, float] = (0.0, 1.0)
    num_held_out: int = 0  # different held-out tasks; 0: as many as a run needs


def drawn(name: str, seed: int, draw: Callable[[int, int, str], Task | None]) -> Callable[[int, str], Task]:
    """Returns the `make_task` of an environment that draws its tasks at random.

    It draws until the prompt of a task belongs to the split; if all prompts are equal, the first task counts. `draw(number, index, split)`
    makes a task from a 64-bit number, or returns None if the number gives no usable task. The numbers depend on `name`, `seed`, and the
    task's split and index alone, so the result is always the same. `make_task` raises ValueError if none of MAX_ATTEMPTS draws is usable.
    """

    def make_task(index: int, split: str) -> Task:
        first, prompts, differ = None, set(), False
        for attempt in range(MAX_ATTEMPTS):
            if (task := draw(stable_hash(f"{name}/{seed}/{split}/{index}/{attempt}"), index, split)) is None:
                continue
            prompt = prompt_text([message for message in task.messages if message["role"] != "system"])
            if split_of(prompt) == split:
                return task
            first, prompts = first or task, prompts | {prompt}
            differ = differ or task != first
            if attempt >= MAX_EQUAL and len(prompts) == 1 and differ:  # else there is one task only
                return first
        raise ValueError(
            f"environment {name} drew no usable {split} prompt for task {index} in {MAX_ATTEMPTS} attempts: too few prompts "
            "are possible to hold some out; widen its options (env.options)"
        )

    return make_task


def asked(question: str, system_prompt: str = "") -> tuple[dict, ...]:
    """Returns the messages of a prompt: a question of the user, after `system_prompt` if that is not empty."""
    system = ({"role": "system", "content": system_prompt},) if system_prompt else ()
    return (*system, {"role": "user", "content": question})


def prompt_text(messages: Sequence[Mapping]) -> str:
    """Returns the text whose hash decides a prompt's split: the content of a single plain message, else JSON of all messages."""
    if len(messages) == 1 and set(messages[0]) == {"role", "content"}:
        return messages[0]["content"]
    return json.dumps(messages, sort_keys=True)


def split_of(prompt: str) -> str:
    """Returns the split that a prompt belongs to by its hash: "train" or "held_out"."""
    return "held_out" if stable_hash(prompt) % HELD_OUT_ONE_IN == 0 else "train"


def splits_of(prompts: Sequence[str], origin: str) -> dict[str, list[int]]:
    """Returns the numbers of the prompts of each split. A split that would be empty gets one prompt.

    Equal prompts are in one split; if all are equal, their numbers decide. Raises ValueError for less than two prompts.
    """
    if len(prompts) < 2:
        raise ValueError(f"{origin} has {len(prompts)} tasks; add some, because one must be held out")
    keys = prompts if len(set(prompts)) > 1 else [f"{prompt}/{i}" for i, prompt in enumerate(prompts)]
    hashes = [*map(stable_hash, keys)]
    least, most = min(hashes), max(hashes)
    # The least hash stands in where a small file has none in the sixteenth part; the largest one trains.
    held_out = {x for x in hashes if x % HELD_OUT_ONE_IN == 0 and x != most} or {least}
    return {split: [i for i, x in enumerate(hashes) if (x in held_out) == (split == "held_out")] for split in SPLITS}


def divided(rows: Iterable, prompt_of: Callable[[Any], str], origin: str) -> dict[str, list]:
    """Returns the rows of each split; `prompt_of(row)` is the prompt that decides, as in `splits_of`. Raises its ValueError."""
    rows = [*rows]
    found = splits_of([*map(prompt_of, rows)], origin)
    return {split: [rows[i] for i in numbers] for split, numbers in found.items()}


def content_key(messages: Sequence[Mapping]) -> str:
    """Returns the SHA-256 (hex) of the roles and texts of a prompt's messages, without system messages.

    A file of pass rates names tasks by this key, so that another system prompt or another order of tasks does not matter.
    """
    content = [[message["role"], message["content"]] for message in messages if message["role"] != "system"]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def stable_hash(text: str) -> int:
    """Returns a 64-bit hash of a text that is the same in every process, unlike Python's `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def checked(env: Environment) -> Environment:
    """Returns the environment with a `make_task` that checks its arguments and raises only ValueError, naming the task.

    Raises ValueError for an environment with both or neither of `score` and `play`, or an unknown kind.
    """
    if (env.score is None) == (env.play is None):
        found = "neither score nor play" if env.score is None else "both score and play"
        raise ValueError(f"environment {env.name} has {found}; give it one of them")
    if env.kind not in KINDS:
        raise ValueError(f"environment {env.name} has kind={env.kind!r}; use one of {', '.join(KINDS)}")

    def make_task(index: int, split: str) -> Task:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; use 'train' or 'held_out'")
        if index < 0:
            raise ValueError(f"task index is {index}; use 0 or more")
        try:
            return env.make_task(index, split)
        except Exception as error:  # foreign code may raise anything
            reason = f"environment {env.name} cannot make {split} task {index}: {user_code.describe(error)}"
            raise ValueError(f"{reason}; fix its make_task or its options (env.options)") from error

    return dataclasses.replace(env, make_task=make_task)


def prompts(env: Environment, tokenizer: Any) -> Callable[[int, str], tuple[Task, list[int]]]:
    """Returns a function (index, split) -> (task, token IDs of its prompt), which keeps the last 1024 of each split.

    A batch needs a task for each of its rollouts, and every evaluation needs the same tasks.
    """

    def prompt(index: int, split: str) -> tuple[Task, list[int]]:
        task = env.make_task(index, split)
        return task, list(tokenizer.render(task.messages, add_generation_prompt=True).token_ids)

    kept = {split: functools.lru_cache(1024)(prompt) for split in SPLITS}
    return lambda index, split: kept.get(split, prompt)(index, split)


def echoes(task: Task) -> list[str]:
    """Returns the texts of a prompt that a model could send back: its last message, and all messages."""
    texts = [message["content"] or "" for message in task.messages]
    return [*dict.fromkeys([texts[-1], "\n".join(texts)])]


def echo_warning(label: str, count: int, total: int) -> str:
    """Returns the warning for tasks whose prompt, sent back as an answer, earns as much as their answer."""
    found = f"warning: the prompt's own text, sent back as an answer, earns the reward of {count} of {total} tasks of {label}"
    return f"{found}: a model can learn to copy; choose a stricter env.options.reward, or reword the prompts"


def check_options(owner: str, options: Set[str], known: Collection[str]) -> None:
    """Raises ValueError for the first of `options` that is not in `known`. `owner` names the environment or dataset in the message."""
    for option in options - set(known):
        found = f"{owner} has no option {option!r} of env.options{text_lib.hint(option, known)}"
        raise ValueError(f"{found}; choose from {', '.join(known)}")
