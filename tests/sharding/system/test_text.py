"""Texts of others are checked and shown in one form."""

import pytest

from sharding.system import text


@pytest.mark.parametrize(
    ("value", "digits", "is_hex"),
    [("0f" * 32, 64, True), ("0F" * 32, 64, False), ("0f" * 32 + "\n", 64, False), ("0f", 64, False)]
    + [("ab" * 64, 128, True), (b"0f" * 32, 64, False), (None, 64, False), (7, 1, False)],
)
def test_hex_digits_are_lowercase_and_counted(value, digits, is_hex):
    assert text.is_hex(value, digits) is is_hex


def test_characters_that_could_control_a_terminal_are_replaced():
    assert text.printable("a\x1b[2Jé\n\u202e") == "a?[2Jé??"
    assert text.printable("a\tb\n", " ") == "a b "


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("gsm8", ["gsm8k", "math"], " (did you mean gsm8k?)"),
        ("optimizer.lr", ["optimizer.learning_rate", "lora.rank"], " (did you mean optimizer.learning_rate?)"),
        ("num_steps", ["rl.num_steps", "warmup.num_steps"], " (did you mean rl.num_steps or warmup.num_steps?)"),
        ("zzz", ["gsm8k"], ""),
    ],
)
def test_the_most_similar_known_name_is_named(name, known, hint):
    assert text.hint(name, known) == hint
