"""The completions that the admission check tries: answers that must earn the reward, and those that must not.

Each probe is a policy (rl/envs/interface/scripted_model.py): an episode of several calls gets the same text in every turn.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence

from rl.envs.interface import environment, scripted_model

GOLD = "gold"
OTHER_GOLD = "gold of another task"
MAX_DEMONSTRATIONS = 200  # that are drawn to find the reply to a conversation
_BASE = {"empty": "", "zero": "0", "not a number": "nan", "infinity": "-inf 1e999999"}
_GARBAGE = random.Random(0)
_BASE["garbage"] = "".join(
    chr(_GARBAGE.choice((_GARBAGE.randint(33, 126), _GARBAGE.randint(161, 0x2FFF)))) for _ in range(10_000)
)
_BOMBS = {
    "nested JSON": "[" * 20_000,
    "nested objects": '{"a":' * 5_000 + "1" + "}" * 5_000,
    "nested markup": "<a>" * 3_000 + "<answer>" * 1_000 + "\\boxed{" * 3_000,
    "long digits": "9" * 10_000,
    "long runs": "a" * 20_000 + "!" + " " * 20_000 + "x" + "1," * 10_000,
    "hidden characters": "\x00\u202e\u200b\ufeff１２\u0301" * 20,
    "all answers": " ".join(
        [*map(str, range(1000)), *"ABCDEFGHIJ", *"abcdefghij", "yes no true false Yes No True False"]
    ),
    "all marks": " ".join(f"\\boxed{{{i}}} <answer>{i}</answer>\n#### {i}\n" for i in range(200)),
}
TEXTS = _BASE | _BOMBS  # the same for all tasks
# {probe: identifier of the check that it belongs to}
CHECKS = {"empty": "semantic.floor_gap", OTHER_GOLD: "semantic.canary_floor"}
CHECKS |= {name: "semantic.canary_floor" for name in _BASE if name != "empty"}
CHECKS |= dict.fromkeys(_BOMBS, "statistical.adversarial_floor")
CHECKS |= dict.fromkeys(("prompt echoed", "last message echoed"), "statistical.gameability_gap")


def of(
    env: environment.Environment, task: environment.Task, others: Sequence[environment.Task]
) -> dict[str, scripted_model.Policy]:
    """Returns {name: policy} of all probes for a task. `others` are further tasks, one of whose answers is tried as a wrong answer.

    The probe GOLD follows `env.demonstrate`, or gives the task's answer. It is absent for a task with neither.
    """
    texts = dict(TEXTS)
    texts["prompt echoed"] = "\n".join(str(message["content"]) for message in task.messages)
    texts["last message echoed"] = str(task.messages[-1]["content"])
    other = next((one.answer for one in others if one.answer.strip() not in ("", task.answer.strip())), "")
    if other:
        texts[OTHER_GOLD] = other
    found = {name: scripted_model.always(text) for name, text in texts.items()}
    if env.demonstrate:
        found[GOLD] = _Solution(env.demonstrate, task)
    elif task.answer:
        found[GOLD] = scripted_model.always(task.answer)
    return found


class _Solution:
    """A policy that answers each conversation as the first of the environment's demonstrations which begins with it.

    An episode may have several conversations, such as branches, of which a demonstration is one.
    """

    def __init__(self, demonstrate: Callable[[environment.Task, random.Random, bool], dict], task: environment.Task):
        self._demonstrate, self._task, self._count = demonstrate, task, 0
        self._replies: dict[str, dict] = {}

    def __call__(self, messages: Sequence[Mapping], tools: Sequence[Mapping], rng: random.Random) -> dict:
        key = _key(messages)
        while key not in self._replies and self._count < MAX_DEMONSTRATIONS:
            shown = self._demonstrate(self._task, random.Random(f"{self._task.index}/{self._count}"), False)["messages"]
            self._count += 1
            for i, message in enumerate(shown):
                if message["role"] == "assistant":
                    self._replies.setdefault(_key(shown[:i]), {"content": ""} | message)
        return self._replies.get(key, {"content": self._task.answer})


def _key(messages: Sequence[Mapping]) -> str:
    """Returns a text that is the same for conversations with equal roles and texts: identifiers of tool calls may differ."""
    return json.dumps([[message["role"], message.get("content") or ""] for message in messages])
