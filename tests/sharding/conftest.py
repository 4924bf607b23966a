"""Fixtures of the tests of sharding/."""

import pytest

from tests.support import tiny_run


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 1 MB."""
    with tiny_run.small_disk(tmp_path, "1m") as disk:
        yield disk
