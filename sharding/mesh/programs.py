"""The compiled programs of this process: the cache that keeps them on disk, their memory, and recordings of their work.

Programs that one process compiled are read from disk by its children, and by later starts. `enable_cache` names the folder. A folder in
the variable JAX_COMPILATION_CACHE_DIR takes precedence. Code for CPUs uses the instructions of the CPU that it was compiled on, and a home
directory may be on several machines, so each kind of CPU has a folder of its own.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax

from sharding.system import cli

MAX_BYTES = 4 << 30  # then the programs that were not used for longest are deleted
# The time to read a program from the cache is a part of its time to compile.
_COMPILED, _READ = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_retrieval_time_sec"
_config: Any = jax.config  # defines its attributes at run time
_seconds: dict[str, list[float]] = {_COMPILED: [], _READ: []}


def enable_cache(folder: str = "auto") -> None:
    """Sets the cache of this process and of those that it will start, and begins to count programs.

    "auto" is a folder of this user, unless the cache is off by JAX_ENABLE_COMPILATION_CACHE, as in a child of a run without one. ""
    means no cache. Raises ValueError if `folder` cannot be created or written; without a folder of the user, the process has no cache.
    """
    if folder == "auto" and not _config.jax_enable_compilation_cache:
        folder = ""
    if "://" in folder:
        raise ValueError(f"topology.compile_cache = {folder} is a URL, not a folder of this machine; set it to a path")
    settings: dict[str, bool | float | str] = {"jax_enable_compilation_cache": bool(folder)}
    if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            path = user_folder() if folder == "auto" else pathlib.Path(folder).absolute()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / ".lockfile").touch()  # jax locks this file to read, too
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
            if folder == "auto":
                cli.note(f"note: compiled programs are not kept: {error}")
                return enable_cache("")
            found = f"the folder {folder} of compiled programs cannot be used: {error}"
            raise ValueError(f"{found}; set topology.compile_cache to another folder, or to '' for none") from error
        settings |= {"jax_compilation_cache_dir": str(path), "jax_persistent_cache_min_compile_time_secs": 0.0}
        if importlib.util.find_spec("filelock"):  # by which jax bounds the size
            settings["jax_compilation_cache_max_size"] = MAX_BYTES
            _remove_partial(path)
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        _config.update(name, value)
    _listen()


def summary() -> str:
    """Returns a line on the programs that this process has compiled or read from the cache since `enable_cache`, and those that need most memory."""
    read, every = list(_seconds[_READ]), list(_seconds[_COMPILED])
    num_compiled = max(len(every) - len(read), 0)
    text = f"compiled {num_compiled} program{'s' * (num_compiled != 1)} in {max(sum(every) - sum(read), 0.0):.1f} s"
    if read:
        text += f", and read {len(read)} in {sum(read):.1f} s from {_config.jax_compilation_cache_dir}"
    sizes = {name: parts["total"] / 2**20 for name, parts in memory().items()}
    large = [f"{name} {size:.1f}" for name, size in sizes.items() if size >= 0.01 * max(sizes.values())]
    return text + (f"; the most MiB per device: {', '.join(large[:8])}" if large else "")


def memory() -> dict[str, dict[str, int]]:
    """Returns the bytes per device of each program of this process, the largest first: its arguments, results, workspace, and code.

    A result that reuses the memory of an argument counts as 0 bytes, so `total` counts that memory once. Of programs with one name, the
    largest is returned. A program is left out if its compiler does not report its memory.
    """
    found: dict[str, dict[str, int]] = {}
    for program in jax.local_devices()[0].client.live_executables():
        try:
            stats = program.get_compiled_memory_stats()
        except jax.errors.JaxRuntimeError as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            continue
        parts = {
            "arguments": stats.argument_size_in_bytes,
            "results": stats.output_size_in_bytes - stats.alias_size_in_bytes,
            "workspace": stats.temp_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
        }
        parts["total"] = sum(parts.values())
        name = program.hlo_modules()[0].name
        found[name] = max(parts, found.get(name, parts), key=lambda one: one["total"])
    return dict(sorted(found.items(), key=lambda item: -item[1]["total"]))


def user_folder() -> pathlib.Path:
    """Returns the user's folder for programs of this kind of CPU, and for measurements of it. Raises RuntimeError without a home."""
    home, info = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", pathlib.Path("/proc/cpuinfo")
    kind = {platform.processor()}
    if info.exists():
        names = ("model name", "flags", "Features", "CPU part")
        kind = {line for line in info.read_text().splitlines() if line.startswith(names)}
    digest = hashlib.sha256("\n".join(sorted(kind)).encode()).hexdigest()
    return pathlib.Path(home) / "intellax" / "compiled" / digest[:12]


class Profiler(contextlib.AbstractContextManager):
    """Records the steps from the first to the second of `steps`, or none for (), during a `with` block.

    The recording shows the work of this process's devices and threads, for xprof, TensorBoard, and Perfetto; `memory.json` has the
    memory of its programs. A learner records in WORKDIR/profile, a server that is its own process in WORKDIR/profile/NAME.
    """

    def __init__(self, folder: pathlib.Path, steps: Sequence[int]):
        self._folder, self._steps, self._is_running = folder, range(steps[0], steps[1] + 1) if steps else (), False

    def begin(self, step: int) -> contextlib.AbstractContextManager:
        """Calls `advance`; returns a context that gives the step a name in the recording."""
        self.advance(step)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def advance(self, step: int) -> None:
        """Starts or ends the recording at the beginning of a step."""
        if self._is_running and step not in self._steps:
            self.__exit__()
        elif not self._is_running and step in self._steps:
            jax.profiler.start_trace(self._folder)
            self._is_running = True

    def __exit__(self, *_) -> None:
        """Ends the recording if it is running, and writes it."""
        if self._is_running:
            self._is_running = False
            jax.profiler.stop_trace()
            if jax.process_index() == 0:
                (self._folder / "memory.json").write_text(json.dumps(memory(), indent=1) + "\n")


def _remove_partial(folder: pathlib.Path) -> None:
    """Deletes programs of which a killed process, or one on a full disk, wrote a part: jax would read them in vain, and never replace them.

    After a program jax writes the file of its last use. It writes both with the lock, which a process that writes now has.
    """
    import filelock

    with contextlib.suppress(OSError), filelock.FileLock(folder / ".lockfile", timeout=0):
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
        for name in sizes:  # where a full disk has taken no time either, that file is empty
            if name.endswith("-cache") and not sizes.get(name.removesuffix("-cache") + "-atime"):
                (folder / name).unlink()


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_record)


def _record(event: str, duration_secs: float, **_) -> None:
    if event in _seconds:
        _seconds[event].append(duration_secs)
