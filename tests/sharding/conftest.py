"""Fixtures of the tests of sharding/."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a disk of 1 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs root to mount a 1 MB tmpfs: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)
