"""Runs a command of the product as `python -m <name>` would: in this process, or in a fork of one that has imported it."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import warnings
from unittest import mock

import jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
WAIT_S = 300
CONTEXT = multiprocessing.get_context("forkserver")  # one server for all that a process of pytest forks
CONTEXT.set_forkserver_preload(
    ["rl.train", "rl.export", "rl.swarm.processes", "rl.swarm.orchestrator.assembly", "tests.support.learner_double"]
)


def run(name: str, *argv) -> int:
    """Returns the exit code of `python -m name argv...`; output goes to this process's standard output and error."""
    with mock.patch.object(sys, "argv", [name, *map(str, argv)]), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, of a module that was imported before
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as exit_:
            return exit_.code or 0
    return 0


def forked(name: str, *argv, num_devices=1, **environment) -> subprocess.CompletedProcess:
    """Returns the result of a command with a config, which defines flags and so needs a process of its own.

    That is mostly imports, 4 s of CPU time, so that it is forked from one process that has done them.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [multiprocessing.reduction.DupFd(file.fileno()) for file in (out, err)]
        process = CONTEXT.Process(target=_begin, args=(files, num_devices, environment, name, argv))
        process.start()
        process.join(WAIT_S)
        assert process.exitcode is not None, f"{name} {argv} did not end in {WAIT_S} s"
        texts = [file.seek(0) or file.read() for file in (out, err)]
        return subprocess.CompletedProcess([name, *argv], process.exitcode, *texts)


def _begin(files, num_devices, environment, name, argv):
    for number, file in enumerate(files, start=1):
        os.dup2(file.detach(), number)
    os.environ.update(environment)
    jax.config.update("jax_num_cpu_devices", num_devices)
    os.chdir(ROOT)
    sys.exit(run(name, *argv))
