"""Orders for a user who must be asked: the model learns which facts are missing, and asks before it acts.

1. A simulated user wants something with a few properties (a table for 4, outdoors, at 7), and names none of them at first. The model
   asks for a property by its name, and ends with "order", followed by all values in the order of the prompt.
2. `user="scripted"`: a message that names properties gets their values; one that names none gets "?".
   `user="model"`: the same model plays the user, with the wishes in its own prompt. Its messages are part of the episode, and verified,
   but are not trained on. It may be unhelpful; then even a good question is in vain.
3. The reward is 1 if all values of the order are right. `right` is their fraction, `turns` the number of messages of the model.
"""

import random
import re
from collections.abc import Sequence

from rl.envs.interface import environment, episode

PROPERTIES = {
    "size": "2 3 4 5 6 7 8 9".split(),
    "time": "noon one two five six seven eight nine".split(),
    "place": "bar attic garden window corner terrace cellar hall".split(),
    "menu": "fish soup pasta curry salad pizza tofu rice".split(),
    "drink": "water tea juice cola cider milk mate coffee".split(),
}
INSTRUCTION = "A user wants to book. Ask for the properties, one question per message. End with 'order' and the values."
PERSONA = "You booked nothing yet. You want: {wishes}. Answer a question about one of these in a few words. Offer nothing else."
USERS = ("scripted", "model")


def build(
    *, properties: int = 3, turns: int = 8, user: str = "scripted", system_prompt: str = INSTRUCTION, seed: int = 0
) -> environment.Environment:
    """Builds the environment of bookings whose order has `properties` parts. `turns` limits the messages of the model, the order included.

    Raises ValueError for numbers out of range and an unknown `user`.
    """
    if not 1 <= properties <= len(PROPERTIES) or turns < 1:
        raise ValueError(
            f"properties={properties}, turns={turns}; choose 1 to {len(PROPERTIES)} properties, and at least 1 turn"
        )
    if user not in USERS:
        raise ValueError(f"env.options.user = {user!r}; choose one of {', '.join(USERS)}")
    names = [*PROPERTIES][:properties]

    def draw(number: int, index: int, split: str) -> environment.Task:
        rng = random.Random(number)
        wishes = {name: rng.choice(PROPERTIES[name]) for name in names}
        # The number separates the splits; all else of the prompt is equal.
        content = f"Booking {rng.randrange(10**6)}: {' '.join(names)}?"
        messages = environment.asked(content, system_prompt)
        answer = " ".join(["order", *wishes.values()])
        return environment.Task("user_sim", index, split, messages, answer, info={"wishes": wishes})

    def score(task: environment.Task, messages: Sequence[dict], state: object) -> dict[str, float]:
        answers = [m["content"] or "" for m in messages[len(task.messages) :] if m["role"] == "assistant"]
        order, wishes = _order(answers[-1]) if answers else [], [*task.info["wishes"].values()]
        right = sum(a == b for a, b in zip(order, wishes, strict=False)) / len(wishes)
        return {"reward": float(order == wishes), "right": right, "turns": float(len(answers))}

    def reply(task: environment.Task, messages: Sequence[dict], state: object) -> list[dict] | None:
        answer = messages[-1]["content"] or ""
        return None if _order(answer) else [{"role": "user", "content": _answer(answer, task.info["wishes"])}]

    async def play_with_model(task: environment.Task, model: episode.Model) -> dict[str, float]:
        messages = [*task.messages]
        wishes = ", ".join(f"{name} {value}" for name, value in task.info["wishes"].items())
        persona = [{"role": "system", "content": PERSONA.format(wishes=wishes)}]
        try:
            for turn in range(turns):
                answer = await model.chat(messages)
                messages.append(answer.message)
                if _order(answer.text) or turn == turns - 1:
                    break
                persona.append({"role": "user", "content": answer.text})
                user = await model.chat(persona, trains=False)
                persona.append(user.message)
                messages.append({"role": "user", "content": user.text})
        except episode.BudgetSpent:
            pass
        return score(task, messages, None)

    def demonstrate(task: environment.Task, rng: random.Random, is_decoy: bool) -> dict:
        """Asks for each property in random order, then orders; as a decoy, does not ask for the last and guesses it."""
        messages, wishes = [*task.messages], dict(task.info["wishes"])
        for name in rng.sample(names, len(names))[: len(names) - is_decoy]:
            wishes.pop(name)
            messages.append({"role": "assistant", "content": f"{name}?"})
            messages += reply(task, messages, None) or []
        guessed = {name: rng.choice(PROPERTIES[name]) for name in wishes}
        order = " ".join(["order", *(task.info["wishes"] | guessed).values()])
        return {"messages": [*messages, {"role": "assistant", "content": order}]}

    play = episode.conversation(score=score, reply=reply, max_turns=turns) if user == "scripted" else play_with_model
    make_task = environment.drawn("user_sim", seed, draw)
    return environment.Environment(
        "user_sim", make_task, play=play, demonstrate=demonstrate if user == "scripted" else None
    )


def _order(text: str) -> list[str]:
    """Returns the words after "order" in a message that begins with this word, such as "order 4 noon"; [] for any other."""
    words = text.strip().split()
    return words[1:] if words and words[0] == "order" else []


def _answer(question: str, wishes: dict[str, str]) -> str:
    asked = [value for name, value in wishes.items() if re.search(rf"\b{name}\b", question.lower())]
    return " ".join(asked) or "?"
