"""The memory of a machine and of a container, in all and available."""

import os
import types

from sharding.mesh import host_memory


def test_a_container_has_the_memory_of_its_group(tmp_path):
    whole = host_memory.total_bytes(str(tmp_path))
    (tmp_path / "memory").mkdir()
    for name, text, expected in (
        ("memory.max", "max\n", whole),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", whole),
        ("memory.max", "1000000\n", 1000000),
    ):
        (tmp_path / name).write_text(text)
        assert host_memory.total_bytes(str(tmp_path)) == expected


def test_available_memory_is_that_of_the_system(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       100 kB\nMemFree:        1 kB\nMemAvailable:   42 kB\n")
    assert host_memory.available_bytes(str(tmp_path / "meminfo")) == 42 * 1024
    assert host_memory.available_bytes(str(tmp_path / "absent")) == host_memory.total_bytes()
    assert 0 < host_memory.available_bytes() <= host_memory.total_bytes()


def test_few_arenas_and_returned_memory_are_asked_of_the_c_library(monkeypatch):
    calls = []
    library = types.SimpleNamespace(mallopt=lambda *args: calls.append(args), malloc_trim=calls.append)
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    host_memory.limit_arenas()
    host_memory.trim(host_memory.MIN_TRIM_BYTES - 1)
    host_memory.trim(host_memory.MIN_TRIM_BYTES)
    assert calls == [(host_memory.M_ARENA_MAX, os.cpu_count()), 0]
