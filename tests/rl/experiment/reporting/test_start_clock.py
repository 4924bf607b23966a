"""The seconds until the first step of RL, by part."""

import pathlib
import subprocess
import sys
import time

from rl.experiment.reporting import start_clock
from tests.support import tiny_run


def test_parts_follow_each_other_and_sum_to_the_total(monkeypatch):
    ages_s = iter([3.0, 5.0, 45.0, 45.5])
    monkeypatch.setattr(start_clock, "_parts", {})
    monkeypatch.setattr(start_clock, "_marked_s", None)
    monkeypatch.setattr(start_clock, "age_s", lambda: next(ages_s))
    for part in ("imports", "rest", start_clock.WARM_UP, "rest"):
        start_clock.mark(part)
    line = "first step after 45.5 s, 5.5 s without warm-up steps: imports 3.0, rest 2.5, warm-up steps 40.0"
    assert start_clock.summary("first step") == line


def test_the_first_part_begins_with_the_process():
    """Its age is known to a hundredth of a second; Python itself starts before any module is imported."""
    program = (
        "import time; time.sleep(0.3); from rl.experiment.reporting import start_clock; print(start_clock.age_s())"
    )
    begun_s = time.monotonic()
    age_s = float(subprocess.check_output([sys.executable, "-c", program], cwd=tiny_run.ROOT))
    least_s = 0.29 if pathlib.Path("/proc/self/stat").exists() else 0.0
    assert least_s <= age_s <= time.monotonic() - begun_s + 0.01
