"""The options of a command that is no `rl.train`: argparse, with a mistake told in one line.

1. An option that no one knows is told before one that is missing: it may be the same, mistyped. The nearest known one is named.
2. The line says what is wrong, as all errors of commands do; `--help` says the rest. The exit code is 2.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    """Its subcommands are of this class, too."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        args = sys.argv[1:] if args is None else list(args)
        known = list(self._option_string_actions)
        for arg in args:
            if arg == "--" or (self._subparsers is not None and not arg.startswith("-")):
                break  # positional arguments, or a subcommand's options, follow
            name = arg.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                near = difflib.get_close_matches(name, known, 1)
                self.error(f"unknown option {name}" + (f" (did you mean {near[0]}?)" if near else ""))
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        self.exit(2, f"error: {message}; {self.prog} --help tells the options\n")
