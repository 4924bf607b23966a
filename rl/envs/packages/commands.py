"""The command `python -m rl.envs install` for environments of other frameworks, which makes them usable by their names."""

import sys

from rl.envs.interface import environment
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib


def add_options(parser) -> None:
    """Adds the options of `install` for environments of other frameworks to its parser."""
    group = parser.add_argument_group("environments of other frameworks, each in an interpreter of its own")
    add = group.add_argument
    add("--requirement", nargs="+", default=[], metavar="REQ", help="for pip (default: PACKAGE==VERSION)")
    add(
        "--python",
        default=sys.executable,
        help="interpreter to use; with requirements, the base of a new virtual environment",
    )
    add("--path", nargs="+", default=[], metavar="FOLDER", help="further folders to import the environment from")
    add("--variable", nargs="+", default=[], metavar="NAME=VALUE", help="environment variables of its process")
    add("--kind", choices=environment.KINDS[1:], default="replayed", help="recorded: it depends on a clock or the web")


def install(args) -> int:
    """Installs the environment `args.name`, and prints its interpreter and digest. Returns the exit code."""
    pairs = [text.partition("=") for text in args.variable]
    if bad := [name for name, is_set, _ in pairs if not is_set or not name.isidentifier()]:
        raise ValueError(f"--variable {bad[0]!r} has no value; write NAME=VALUE")
    variables = {name: value for name, _, value in pairs}
    settings = {"python": args.python, "paths": args.path, "variables": variables, "kind": args.kind}
    found = installation.install(args.name, args.requirement, **settings)
    print(f"{found.name}: {found.python} (Python {found.version}), adapter {found.adapter}, kind {found.kind}")
    print(f"record: {package_lib.record_file(found.name)}; digest without options {package_lib.digest(found, {})}")
    return 0
