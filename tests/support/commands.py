"""Runs a command of the product in this process, as `python -m <name>` would."""

import runpy
import sys
import warnings
from unittest import mock


def run(name: str, *argv) -> int:
    """Returns the exit code of `python -m name argv...`; output goes to this process's standard output and error."""
    with mock.patch.object(sys, "argv", [name, *map(str, argv)]), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, of a module that was imported before
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as exit_:
            return exit_.code or 0
    return 0
