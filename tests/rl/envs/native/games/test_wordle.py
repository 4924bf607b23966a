"""Wordle: feedback and reward equal independent ones, and the game is a function of the transcript."""

import asyncio
import collections
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl import envs
from rl.envs.interface import scripted_model
from rl.envs.native.games import wordle

text = st.text(alphabet="abc", min_size=4, max_size=4)


def brute_feedback(guess, secret):
    """Marks by counting: a letter gets as many Gs and Ys together as guess and secret have it both, Gs first, then from the left."""
    marks = {place: "G" for place in range(len(guess)) if guess[place] == secret[place]}
    for letter in set(guess):
        total = min(collections.Counter(guess)[letter], collections.Counter(secret)[letter])
        places = [place for place in range(len(guess)) if guess[place] == letter]
        greens = [place for place in places if place in marks]
        for place in [place for place in places if place not in greens][: total - len(greens)]:
            marks[place] = "Y"
    return "".join(marks.get(place, "X") for place in range(len(guess)))


@given(guess=text, secret=text)
def test_feedback_is_that_of_counting(guess, secret):
    assert wordle.feedback(guess, secret) == brute_feedback(guess, secret)


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("speed", "abide", "XXYXY"),
        ("speed", "erase", "YXYYX"),
        ("geese", "eerie", "XGYXG"),
        ("llama", "label", "GYYXX"),
    ],
)
def test_repeated_letters(guess, secret, marks):
    assert wordle.feedback(guess, secret) == marks


def reward_of_the_original(messages, answer):
    """Computes the reward of verifiers' `wordle` from its description: four terms over the completion."""
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    tags = re.compile(r"<guess>\s*(.*?)\s*</guess>", re.DOTALL)
    guesses = [found[-1].strip() for found in map(tags.findall, said) if found]
    correct = 1.0 if guesses and guesses[-1] == "[" + answer + "]" else 0.0
    counted = [
        t for t in said if "<guess>" in t and any(re.search("<guess>.*</guess>", line) for line in t.split("\n"))
    ]
    partial = 0.0
    if not correct:
        for m in messages:
            lines = m["content"].strip().split("\n") if m["role"] == "user" else []
            if len(lines) == 3:  # the last one stays
                partial = 0.2 * lines[1].count("G") + 0.1 * lines[1].count("Y")
    formats = []
    for content in said:
        parts = [0.4 if tags.search(content) else 0.0, 0.2]  # a field; spacing, which is always right
        parts += [
            0.2 if content.strip().startswith("<guess>") else 0.0,
            0.2 if content.strip().endswith("</guess>") else 0.0,
        ]
        formats.append(sum(parts))
    return correct + partial + correct / (len(counted) or 1) + 0.2 * sum(formats) / len(formats)


pieces = st.sampled_from(
    ["<guess>", "</guess>", "[", "]", "\n", " ", "thus ", "<guess>[cat]</guess>", "<guess>[", "]</guess>"]
)
replies = st.lists(
    st.one_of(
        st.sampled_from(wordle.WORDS[3][:50]).map("<guess>[{}]</guess>".format),
        st.lists(st.one_of(pieces, st.sampled_from(wordle.WORDS[3][:50])), max_size=5).map("".join),
    ),
    min_size=1,
    max_size=4,
)


@given(said=replies, index=st.integers(0, 5), solves=st.booleans())
def test_reward_is_that_of_the_original(said, index, solves):
    env = envs.load("wordle", letters=3, words=50, guesses=4)
    task = env.make_task(index, "train")
    said = [*said[:3], task.answer] if solves else said
    model = scripted_model.ScriptedModel(scripted_model.in_order(*said))
    scores = asyncio.run(env.play(task, model))
    last, _, reply = model.calls[-1]
    played = [*last, reply][len(task.messages) :]
    assert scores["reward"] == pytest.approx(reward_of_the_original(played, task.info["secret"]))
    assert scores["guesses"] == len(model.calls) <= 4


def test_a_game():
    env = envs.load("wordle", letters=5, guesses=3, seed=4)
    task = env.make_task(0, "train")
    guesses = ["I think <guess>[llama]</guess>", "<guess>[LLAMA]</guess>", "llama"]
    model = scripted_model.ScriptedModel(scripted_model.in_order(*guesses))
    scores = asyncio.run(env.play(task, model))
    first, second = (messages[-1]["content"] for messages, *_ in model.calls[1:])
    assert first == f"l l a m a\n{' '.join(wordle.feedback('llama', task.info['secret']))}\n2 left."
    assert second == "Write <guess>[word]</guess> with 5 letters. 1 left."
    assert scores["format"] == pytest.approx((0.8 + 1.0 + 0.2) / 3) and scores["solved"] == 0.0


def test_word_lists():
    for letters, known in wordle.WORDS.items():
        assert len(known) == len({*known}) > 150
        assert all(re.fullmatch(f"[a-z]{{{letters}}}", word) for word in known)
