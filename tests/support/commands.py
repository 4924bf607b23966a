"""Runs a command of the product in this process, as `python -m <name>` would."""

import runpy
import sys
from unittest import mock


def run(name: str, *argv) -> int:
    """Returns the exit code of `python -m name argv...`; output goes to this process's standard output and error."""
    with mock.patch.object(sys, "argv", [name, *map(str, argv)]):
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as exit_:
            return exit_.code or 0
    return 0
