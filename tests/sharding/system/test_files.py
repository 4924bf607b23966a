"""A lock is held by one process or descriptor at a time, on a file or a folder, and its end frees it."""

import hashlib
import os

import pytest

from sharding.system import files


@pytest.mark.parametrize("flags", [os.O_RDWR | os.O_CREAT, files.FOLDER])
def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path, flags):
    place = tmp_path if flags == files.FOLDER else tmp_path / "lock"
    with files.locked(place, flags):
        with pytest.raises(BlockingIOError):
            files.lock(place, flags, wait=False)
    os.close(files.lock(place, flags, wait=False))


def test_a_symbolic_link_is_not_followed_where_the_caller_forbids_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        files.lock(tmp_path / "link", files.FOLDER | os.O_NOFOLLOW)


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "data").write_bytes(bytes(range(256)) * 5000)
    assert files.sha256(tmp_path / "data") == hashlib.sha256(bytes(range(256)) * 5000).hexdigest()
