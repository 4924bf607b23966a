"""Environments of several turns for tests: a game that a tiny model can learn, and programs that fail on demand."""

import asyncio
import os
import time

from rl.envs.interface import environment, episode
from rl.envs.sandbox import pool

LETTERS = "abcd"


def letters(*, turns: int = 2, seed: int = 0) -> environment.Environment:
    """Builds an environment that asks for a letter in each turn, and gives a point for each reply that begins with it, and a little for letters."""

    def make_task(index: int, split: str) -> environment.Task:
        answer = "".join(LETTERS[environment.stable_hash(f"{seed}/{split}/{index}/{n}") % 4] for n in range(turns))
        messages = ({"role": "user", "content": f"{split} {index}: say {answer[0]}"},)
        return environment.Task("letters", index, split, messages, answer=answer)

    def reply(task, messages, state):
        turn = sum(one["role"] == "assistant" for one in messages)
        return [{"role": "user", "content": f"say {task.answer[turn]}"}] if turn < turns else None

    def score(task, messages, state) -> dict[str, float]:
        said = [one["content"] for one in messages if one["role"] == "assistant"]
        points = [float(text.startswith(letter)) for text, letter in zip(said, task.answer, strict=False)]
        plain = [sum(letter.islower() for letter in text) / max(len(text), 1) for text in said]
        reward = (sum(points) + 0.1 * sum(plain)) / turns
        return {"reward": reward, "letters": float(sum(points)), "num_turns": float(len(said))}

    play = episode.conversation(score=score, reply=reply, max_turns=turns)
    return environment.Environment("letters", make_task, play=play)


def orders(*, kind: str = "pure", seed: int = 0) -> environment.Environment:
    """Builds an environment whose program follows the orders in the model's replies: end, spin, sleep, wait, kill, raise, flood, loop, or hoard."""

    def make_task(index: int, split: str) -> environment.Task:
        return environment.Task("orders", index, split, ({"role": "user", "content": f"{index}"},), answer="")

    async def play(task, model):
        messages = [*task.messages]
        for turn in range(9):
            reply = await model.chat(messages)
            order = reply.text
            if order == "spin":
                while True:
                    pass
            if order == "sleep":
                time.sleep(60)
            if order == "wait":
                await asyncio.Event().wait()
            if order == "kill":
                os._exit(7)
            if order == "raise":
                raise KeyError("no such word")
            if order == "flood":
                await model.chat([{"role": "user", "content": "x" * 2**23}])
            if order == "loop":
                while True:
                    await model.chat(messages)
            if order == "hoard":
                held = []
                while True:
                    held.append(bytes(2**28))
            if order == "busy":
                until_s = time.process_time() + 0.4
                while time.process_time() < until_s:
                    pass
            if order == "fork":
                os.fork()
            if order == "end":
                return {"reward": 1.0, "turns": float(turn)}
            messages += [reply.message, {"role": "user", "content": "on"}]
        return {"reward": 0.0, "turns": 9.0}

    return environment.Environment("orders", make_task, play=play, kind=kind)


def talk(*, seed: int = 0) -> environment.Environment:
    """Builds an environment with all kinds of calls: a tool's result, a rewritten history, and a judge. Each reply changes the scores."""

    def make_task(index: int, split: str) -> environment.Task:
        return environment.Task(
            "talk", index, split, ({"role": "user", "content": f"{split} {index} {seed}"},), answer=""
        )

    async def play(task, model):
        texts, messages = [], [*task.messages]
        for _ in range(2):
            reply = await model.chat(messages)
            texts.append(reply.text)
            messages += [reply.message, {"role": "tool", "tool_call_id": "a", "content": f"{_sum(texts)} so far"}]
        folded = [task.messages[0], {"role": "user", "content": f"sum {_sum(texts)}"}]
        texts.append((await model.chat(folded)).text)
        judged = await model.chat([{"role": "user", "content": f"grade {_sum(texts)}"}], trains=False, max_tokens=3)
        parts = {f"turn_{k + 1}": _sum([text]) / 300 for k, text in enumerate(texts)}
        return {"reward": _sum(texts) / 100, "judged": float(_sum([judged.text])), **parts}

    return environment.Environment("talk", make_task, play=play)


def programs(*, kind: str = "replayed", seed: int = 0) -> environment.Environment:
    """Builds an environment that runs each of two replies as a Python program in a sandbox, and answers with its output."""

    def make_task(index: int, split: str) -> environment.Task:
        return environment.Task("programs", index, split, ({"role": "user", "content": f"{index}"},), answer="")

    async def play(task, model):
        messages, outputs = [*task.messages], []
        for _ in range(2):
            reply = await model.chat(messages)
            result = await pool.shared().run(reply.text)
            outputs.append(result.stdout)
            messages += [reply.message, {"role": "tool", "tool_call_id": "a", "content": result.stdout}]
        return {"reward": float(outputs[0] == outputs[1]), "length": float(sum(map(len, outputs)))}

    return environment.Environment("programs", make_task, play=play, kind=kind)


def _sum(texts) -> int:
    return sum(ord(letter) for text in texts for letter in text) % 100
