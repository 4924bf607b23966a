"""Rates of replays by hand: 32 good groups halve the rate, and the draw is 53 bits or more of an HMAC."""

import hmac

import pytest

from rl.protocol import verdict as verdict_lib


@pytest.mark.parametrize(
    ("record", "offenses", "rate"), [(0, 0, 1), (32, 0, 0.5), (96, 0, 0.25), (32, 1, 0.75), (1e9, 0, 0.05)]
)
def test_the_rate_falls_with_good_groups_and_rises_with_offenses(record, offenses, rate):
    assert verdict_lib.check_rate(verdict_lib.reputation(record, offenses), 0.05) == pytest.approx(rate)


def test_a_draw_follows_from_the_secret_and_the_name():
    expected = int.from_bytes(hmac.digest(b"secret", b"train/3/7", "sha256")[:8], "big") / 2**64
    found = verdict_lib.draw(b"secret", "train/3/7")
    assert found == pytest.approx(expected, abs=2**-52) and found != verdict_lib.draw(b"secret", "train/3/8")
