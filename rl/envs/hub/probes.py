"""The completions that the admission check tries: answers that must earn the reward, and those that must not.

Each probe is a policy (rl/envs/interface/scripted_model.py): an episode of several calls gets the same text in every turn.
"""

import random
from collections.abc import Sequence

from rl.envs.interface import environment, scripted_model

GOLD = "gold"
OTHER_GOLD = "gold of another task"
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
# {probe: identifier of the check that it belongs to}
CHECKS = {"empty": "semantic.floor_gap", OTHER_GOLD: "semantic.canary_floor"}
CHECKS |= {name: "semantic.canary_floor" for name in _BASE if name != "empty"}
CHECKS |= dict.fromkeys(_BOMBS, "statistical.adversarial_floor")
CHECKS |= dict.fromkeys(("prompt echoed", "last message echoed"), "statistical.gameability_gap")


def of(
    env: environment.Environment, task: environment.Task, others: Sequence[environment.Task]
) -> dict[str, scripted_model.Policy]:
    """Returns {name: policy} of all probes for a task. `others` are tasks whose answer should not do; GOLD is absent for a task without an answer.

    GOLD gives the task's answer, or repeats the model's messages of `env.demonstrate`.
    """
    texts = _BASE | _BOMBS
    texts["prompt echoed"] = "\n".join(str(message["content"]) for message in task.messages)
    texts["last message echoed"] = str(task.messages[-1]["content"])
    other = next((one.answer for one in others if one.answer.strip() not in ("", task.answer.strip())), "")
    if other:
        texts[OTHER_GOLD] = other
    found = {name: scripted_model.always(text) for name, text in texts.items()}
    if task.answer:
        found[GOLD] = scripted_model.always(task.answer)
    elif env.demonstrate:
        messages = env.demonstrate(task, random.Random(task.index), False)["messages"]
        found[GOLD] = scripted_model.in_order(*(one for one in messages if one["role"] == "assistant"))
    return found
