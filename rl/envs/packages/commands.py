"""The command `python -m rl.envs install`: makes an environment of another framework usable by its name."""

import sys

from rl.envs.interface import environment
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib


def add_install(commands) -> None:
    """Adds the command `install` to a parser's commands."""
    parser = commands.add_parser("install", help="install an environment of another framework in its own interpreter")
    add = parser.add_argument
    add("name", help="verifiers:PACKAGE[@VERSION], openenv:MODULE:CLASS, or plain:MODULE:FUNCTION, as config.env.name")
    add("--requirement", nargs="+", default=[], metavar="REQ", help="for pip (default: PACKAGE==VERSION)")
    add(
        "--python",
        default=sys.executable,
        help="interpreter to use; with requirements, the base of a new virtual environment",
    )
    add("--path", nargs="+", default=[], metavar="FOLDER", help="further folders to import the environment from")
    add("--variable", nargs="+", default=[], metavar="NAME=VALUE", help="environment variables of its process")
    add("--kind", choices=environment.KINDS[1:], default="replayed", help="recorded: it depends on a clock or the web")
    parser.set_defaults(run=install, code=[], options=[])


def install(args, options: dict) -> int:
    """Installs an environment, and prints its interpreter and digest. Returns the exit code."""
    pairs = [text.partition("=") for text in args.variable]
    if bad := [name for name, is_set, _ in pairs if not is_set or not name.isidentifier()]:
        raise ValueError(f"--variable {bad[0]!r} has no value; write NAME=VALUE")
    variables = {name: value for name, _, value in pairs}
    settings = {"python": args.python, "paths": args.path, "variables": variables, "kind": args.kind}
    found = installation.install(args.name, args.requirement, **settings)
    print(f"{found.name}: {found.python} (Python {found.version}), adapter {found.adapter}, kind {found.kind}")
    print(f"record: {package_lib.record_file(found.name)}; digest without options {package_lib.digest(found, {})}")
    return 0
