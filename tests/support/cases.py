"""Parameters of a test, a few of which run with the fast tests and all with the slow ones."""

from collections.abc import Iterable

import pytest


def slow_but(cases: Iterable, *quick) -> list:
    """Returns the cases as parameters, all marked slow but the quick ones. A tuple is one value for each name of the test."""
    cases = list(cases)
    assert all(case in cases for case in quick), quick
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*value, marks=[] if case in quick else [pytest.mark.slow])
        for case, value in zip(cases, values, strict=True)
    ]
