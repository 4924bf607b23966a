"""Wordle: the model guesses a secret word, and reads after each guess which letters are right.

1. A guess is <guess>[crane]</guess>. The reply has three lines: its letters; for each G (right), Y (right letter in a wrong place), or X;
   and the number of guesses left. A letter is Y only as often as the secret has it beyond the Gs.
2. A guess of another form, or of another length, is used up, and its reply has one line.
3. The reward is that of the environment `wordle` of verifiers: 1 if the last guess is the secret; then also 1 / number of guesses, else
   0.2 for each G and 0.1 for each Y of the last reply with letters (the last guess of a lost game has none); and 0.2 times the mean format of the messages, which is 1 for
   messages of nothing but a guess.
4. `letters`, `words`, and `guesses` make a smaller game, as for a model of 0.6 M parameters.

All games have the same rules, so a number in the prompt separates training and held-out tasks. It does not determine the secret.

words.txt has common English words of 3, 4, and 5 letters in a fixed random order: a game with fewer words takes the first. They were written
down for this project from everyday vocabulary, after no published list.
"""

import pathlib
import random
import re
from collections.abc import Sequence

from rl.envs.interface import environment, episode

DATA_FILES = (pathlib.Path(__file__).with_name("words.txt"),)  # a part of the code in its digest
ALL_WORDS = DATA_FILES[0].read_text().split()
WORDS = {letters: [word for word in ALL_WORDS if len(word) == letters] for letters in (3, 4, 5)}
INSTRUCTION = (
    "You are a competitive game player. Guess a secret word. After each guess you read for each letter G (right), Y (in the word, but "
    "not there), or X (not in the word). Think step by step, then give your guess in the form <guess>[word]</guess>."
)
_GUESS = re.compile(r"<guess>\s*(.*?)\s*</guess>", re.DOTALL)


def build(
    *, letters: int = 5, words: int = 0, guesses: int = 6, system_prompt: str = INSTRUCTION, seed: int = 0
) -> environment.Environment:
    """Builds the environment of a word game. Secret words are the first `words` of the list for this number of `letters`; 0 takes all of them.

    Raises ValueError for lengths without a list, and for numbers out of range.
    """
    if letters not in WORDS:
        known = ", ".join(map(str, WORDS))
        raise ValueError(f"env.options.letters = {letters}; choose one of {known}")
    known = WORDS[letters]
    if not 0 <= words <= len(known) or words == 1:
        raise ValueError(f"env.options.words = {words}; choose 2 to {len(known)}, or 0 for all")
    if not 1 <= guesses <= 100:
        raise ValueError(f"env.options.guesses = {guesses}; choose 1 to 100")
    secrets = known[: words or len(known)]

    def draw(number: int, index: int, split: str) -> environment.Task:
        rng = random.Random(number)
        secret, game = rng.choice(secrets), rng.randrange(10**6)
        prompt = f"Game {game}: {letters} letters, {guesses} guesses."
        messages = environment.asked(prompt, system_prompt)
        return environment.Task("wordle", index, split, messages, _guess(secret), info={"secret": secret})

    def reply(task: environment.Task, messages: Sequence[dict], state: object) -> list[dict] | None:
        left = guesses - sum(message["role"] == "assistant" for message in messages)
        guess = _word(messages[-1]["content"] or "")
        if guess == task.info["secret"]:
            return None
        if len(guess) != letters:
            content = f"Write <guess>[word]</guess> with {letters} letters. {left} left."
        else:
            content = f"{' '.join(guess)}\n{' '.join(feedback(guess, task.info['secret']))}\n{left} left."
        return [{"role": "user", "content": content}] if left > 0 else None

    def score(task: environment.Task, messages: Sequence[dict], state: object) -> dict[str, float]:
        played = messages[len(task.messages) :]
        answers, replies = ([m["content"] or "" for m in played if m["role"] == role] for role in ("assistant", "user"))
        return _score(answers, replies, task.info["secret"])

    def demonstrate(task: environment.Task, rng: random.Random, is_decoy: bool) -> dict:
        """Plays the first word that fits all replies so far, a plan that a small model can learn; as a decoy, any words."""
        messages, candidates, more = [*task.messages], list(secrets), []
        while more is not None:
            guess = rng.choice(secrets) if is_decoy else candidates[0]
            messages += [*more, {"role": "assistant", "content": _guess(guess)}]
            more = reply(task, messages, None)
            marks = feedback(guess, task.info["secret"])
            candidates = [word for word in candidates if feedback(guess, word) == marks]
        return {"messages": messages}

    play = episode.conversation(score=score, reply=reply, max_turns=guesses)
    make_task = environment.drawn("wordle", seed, draw)
    return environment.Environment("wordle", make_task, play=play, demonstrate=demonstrate, reward_range=(0.0, 2.2))


def feedback(guess: str, secret: str) -> str:
    """Returns G, Y, or X for each letter of a guess that is as long as the secret."""
    marks = ["G" if a == b else "X" for a, b in zip(guess, secret, strict=True)]
    rest = [b for b, mark in zip(secret, marks, strict=True) if mark != "G"]
    for place, letter in enumerate(guess):
        if marks[place] != "G" and letter in rest:
            rest.remove(letter)
            marks[place] = "Y"
    return "".join(marks)


def _guess(word: str) -> str:
    return f"<guess>[{word}]</guess>"


def _word(text: str) -> str:
    """Returns the word of the last guess in a message, or "" if the guess has another form."""
    guess = (_GUESS.findall(text) or [""])[-1]
    return guess[1:-1] if re.fullmatch(r"\[[a-z]+\]", guess) else ""


def _score(answers: Sequence[str], replies: Sequence[str], secret: str) -> dict[str, float]:
    """Returns the scores of a game by the model's messages and the replies to them."""
    last = next((found[-1] for text in reversed(answers) if (found := _GUESS.findall(text))), "")
    solved = float(last == f"[{secret}]")
    num_guesses = sum(re.search("<guess>.*</guess>", text) is not None for text in answers)
    marks = next((lines[1] for text in reversed(replies) if len(lines := text.split("\n")) == 3), "")
    scores = {
        "solved": solved,
        "speed": solved / max(num_guesses, 1),
        "partial": (1.0 - solved) * (0.2 * marks.count("G") + 0.1 * marks.count("Y")),
        "format": sum(map(_format, answers)) / max(len(answers), 1),
    }
    reward = scores["solved"] + scores["speed"] + scores["partial"] + 0.2 * scores["format"]
    return {"reward": reward, **scores, "guesses": float(len(answers))}


def _format(text: str) -> float:
    """Returns the format reward of a message as verifiers' parser of XML computes it: 1.0 for nothing but a guess."""
    begins, ends = text.strip().startswith("<guess>"), text.strip().endswith("</guess>")
    return 0.2 + 0.4 * bool(_GUESS.search(text)) + 0.2 * begins + 0.2 * ends
