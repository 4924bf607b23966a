"""A file is complete or absent, no matter which call fails."""

import builtins
import os
import signal
import subprocess
import sys

import pytest

from sharding.system import atomic_file


class Short:
    """A file that takes two bytes at a time, and after `most` calls none."""

    def __init__(self, file, most):
        self._file, self._most = file, most

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def fileno(self):
        return self._file.fileno()

    def write(self, data):
        self._most -= 1
        return self._file.write(data[:2]) if self._most >= 0 else full()


def full(*args):
    raise OSError(28, "No space left on device")


@pytest.fixture
def shortening(monkeypatch):
    def shorten(most):
        monkeypatch.setattr(atomic_file, "open", lambda *a, **k: Short(builtins.open(*a, **k), most), raising=False)

    return shorten


def test_parts_become_one_file(tmp_path):
    path = tmp_path / "a.json"
    atomic_file.write(path, b"")
    assert path.read_bytes() == b""
    atomic_file.write(path, b"one ", memoryview(bytearray(b"two ")), b"", b"three", durable=True)
    assert path.read_bytes() == b"one two three" and os.listdir(tmp_path) == ["a.json"]


def test_short_writes_lose_nothing(tmp_path, shortening):
    shortening(1000)
    atomic_file.write(tmp_path / "a.json", b"before", b"after")
    assert (tmp_path / "a.json").read_bytes() == b"beforeafter"


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_the_old_file_stays_when_the_disk_fails(tmp_path, monkeypatch, shortening, failing):
    path = tmp_path / "a.json"
    atomic_file.write(path, b"before")
    if failing == "write":
        shortening(2)
    else:
        monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space"):
        atomic_file.write(path, b"after that", durable=True)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("failing", ["write", "fsync", "link", None])
def test_a_key_is_whole_or_absent_and_its_owners_alone(tmp_path, monkeypatch, shortening, failing):
    path = tmp_path / "secret.key"
    with monkeypatch.context() as patch:
        if failing == "write":
            shortening(2)
        elif failing:
            patch.setattr(os, failing, full)
        if failing:
            with pytest.raises(OSError, match="No space"):
                atomic_file.secret_key(path)
            assert os.listdir(tmp_path) == []
            return
    key = atomic_file.secret_key(path)
    assert len(key) == 32 and atomic_file.secret_key(path) == key and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        atomic_file.write(path, b"another", secret=True)
    assert path.read_bytes() == key and os.listdir(tmp_path) == ["secret.key"]


def test_the_leftover_of_a_kill_is_found_and_is_not_an_object(tmp_path):
    code = "import os, signal, sys; from sharding.system import atomic_file; os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", f"{code}; atomic_file.write(sys.argv[1], b'half')", tmp_path / "c.0"])
    assert done.returncode == -signal.SIGKILL
    assert [path.read_bytes() for path in tmp_path.glob(atomic_file.LEFTOVERS)] == [b"half"]
    assert not list(tmp_path.glob("c.*"))
