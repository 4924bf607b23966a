"""Requests that fail, hang, or come late: which are repeated, for how long, and which end a command."""

import types

import pytest

from sharding.weights.bucket import folder, mirror, storage
from sharding.weights.format import journal

BEAT_S, LEASE_S, TRY_S = mirror.BEAT_S, mirror.LEASE_S, storage.TRY_S  # those of users: the tests have shorter ones


class Store:
    """A store whose requests take `seconds`, and fail with these errors at first."""

    def __init__(self, store, *errors, seconds=0.0):
        self._store, self._errors, self._seconds = store, [*errors], seconds

    def __getattr__(self, name):
        return lambda *args, **options: self._begun(getattr(self._store, name)(*args, **options))

    def _begun(self, future):
        def result(timeout):
            if self._errors:
                raise self._errors.pop(0)
            if timeout < self._seconds:
                raise TimeoutError
            return future.result()

        return types.SimpleNamespace(result=result, cancel=lambda: None)


@pytest.fixture
def place(tmp_path):
    found = storage.Storage(f"file://{tmp_path}/bucket")
    found.write("a", b"1")
    return found


def test_a_run_outlives_any_error_and_a_start_only_those_that_pass(place):
    """Credentials may expire and come back while a run goes on."""
    expired, busy = ValueError("PERMISSION_DENIED: the token expired [source]"), ValueError("UNAVAILABLE: busy")
    real = place._store
    place._store = Store(real, expired, busy)
    assert place.read("a")[0] == b"1"
    place._store = Store(real, busy)
    assert place.read("a", 60.0)[0] == b"1"
    place._store = Store(real, expired)
    with pytest.raises(ValueError, match="bucket file://.*: PERMISSION_DENIED: the token expired; check its name, and"):
        place.read("a", 60.0)


def test_a_long_list_and_a_large_file_may_take_minutes(place):
    place._store = Store(place._store, seconds=300.0)
    assert place.keys(0.0) == ["a"]
    assert place.read_new("a", None, 0.0, folder.FILE_S)[0] == b"1"
    with pytest.raises(journal.Unavailable, match="has not answered for 0 s"):
        place.read("a", 0.0)


def test_a_file_that_is_deleted_during_a_download_is_not_left_out(place):
    with pytest.raises(FileNotFoundError, match="bucket/b was deleted during the download; start again"):
        place.read_new("b", None, 0.0, folder.FILE_S)


def test_a_lost_request_does_not_cost_the_lease():
    assert BEAT_S + TRY_S < LEASE_S
