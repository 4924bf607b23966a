"""Programs of one process are read by later ones and by children, unless the cache is off."""

import json
import os
import pathlib
import subprocess
import sys

import filelock
import jax
import pytest

from sharding.mesh import programs
from tests.support import tiny_run

PROGRAM = """
import json, os, subprocess, sys
from sharding.mesh import programs
programs.enable_cache(*sys.argv[1:])
import jax
program = jax.jit(lambda x: x * 3 + 1)
value = float(program(2.0))
print(json.dumps([value, programs.summary(), jax.config.jax_compilation_cache_dir, os.environ["JAX_ENABLE_COMPILATION_CACHE"],
    jax.config.jax_compilation_cache_max_size]))
"""


def start(home, *args, **variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    env |= {"HOME": str(home), "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-c", PROGRAM, *args]
    result = subprocess.run(command, cwd=tiny_run.ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_later_process_reads_the_programs_of_an_earlier_one(tmp_path):
    """Also if a killed process left them half written. jax writes the time of the last use after a program, and no program over another."""
    value, first, folder, _, max_bytes = start(tmp_path)
    assert max_bytes == programs.MAX_BYTES  # no limit would fill the disk
    assert value == 7 and first.startswith("compiled ") and "read" not in first
    assert folder.startswith(f"{tmp_path}/.cache/intellax/compiled/") and os.stat(folder).st_mode & 0o77 == 0
    stored = {path: path.read_bytes() for path in pathlib.Path(folder).glob("*-cache")}
    for number, (path, data) in enumerate(stored.items()):
        path.write_bytes(data[:-1])
        used = path.with_name(path.name.removesuffix("-cache") + "-atime")
        used.write_bytes(b"") if number else used.unlink()
    with filelock.FileLock(f"{folder}/.lockfile"):  # by a process that writes
        programs._remove_partial(pathlib.Path(folder))
    assert all(path.exists() for path in stored)
    assert "read" not in start(tmp_path)[1]
    assert all(len(path.read_bytes()) >= len(data) for path, data in stored.items())
    value, third, *_ = start(tmp_path)
    assert value == 7 and third.startswith("compiled 0 programs in 0.")
    assert ", and read " in third and f" from {folder}; the most MiB per device: jit_" in third
    off = start(tmp_path, "")
    assert "read" not in off[1] and off[3] == "False"


def test_programs_go_to_the_users_folder_or_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert str(programs.user_folder()).startswith(f"{tmp_path}/x/intellax/compiled/")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "True")  # to be restored
    before = jax.config.jax_enable_compilation_cache
    try:
        programs.enable_cache()
        assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "False"
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_each_kind_of_cpu_has_a_folder_of_its_own(monkeypatch):
    """Code for one crashes on another with fewer instructions. The present clock rate does not make another kind."""
    found = []
    for flags, clock in (("sse avx512f", 2500), ("sse avx512f", 800), ("sse", 2500)):
        text = f"model name\t: X\ncpu MHz\t\t: {clock}\nflags\t\t: {flags}\n"
        monkeypatch.setattr(programs.pathlib.Path, "read_text", lambda path, text=text: text)
        found.append(programs.user_folder())
    assert found[0] == found[1] != found[2]


def test_a_folder_that_the_user_named_for_jax_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "True")  # to be restored
    before = jax.config.jax_compilation_cache_dir
    programs.enable_cache(str(tmp_path / "other"))
    assert jax.config.jax_compilation_cache_dir == before and not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(
        ValueError, match="file/x of compiled programs .* Not a directory.*; set topology.compile_cache to"
    ):
        programs.enable_cache(str(tmp_path / "file" / "x"))
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed" / ".lockfile").symlink_to(
        tmp_path / "none" / "x"
    )  # no file can be made, as on a read-only disk
    with pytest.raises(
        ValueError, match="fixed of compiled programs cannot be used: .*; set topology.compile_cache to"
    ):
        programs.enable_cache(str(tmp_path / "fixed"))
    with pytest.raises(ValueError, match="topology.compile_cache = gs://b/x is a URL, not a folder of this machine"):
        programs.enable_cache("gs://b/x")
    assert jax.config.jax_compilation_cache_dir == before
