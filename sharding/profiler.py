"""Records the work of this process's devices and threads in some train steps, for xprof, TensorBoard, and Perfetto.

A learner records its steps in WORKDIR/profile, and a server that is its own process those that its versions are for, in WORKDIR/profile/NAME.
The file `memory.json` there has the memory of each program of the process.
"""

import contextlib
import json
import pathlib
from collections.abc import Sequence

import jax

from sharding.system import compile_cache


class Profiler(contextlib.AbstractContextManager):
    """The recording of the steps from the first to the second of `steps`, or of none for (), during a `with` block."""

    def __init__(self, folder: pathlib.Path, steps: Sequence[int]):
        self._folder, self._steps, self._is_running = folder, range(steps[0], steps[1] + 1) if steps else (), False

    def begin(self, step: int) -> contextlib.AbstractContextManager:
        """Calls `advance`; returns a context that gives the step a name in the recording."""
        self.advance(step)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def advance(self, step: int) -> None:
        """Starts or ends the recording at the begin of a step."""
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
                (self._folder / "memory.json").write_text(json.dumps(compile_cache.memory(), indent=1) + "\n")
