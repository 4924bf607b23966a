"""Runs the validator: `python -m rl.validator serve` checks rollouts over HTTP, `calibrate` measures its tolerance bands."""

import sys

from rl.trust.validator import calibrate, routes
from sharding.system import cli


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 after an error, which is printed, or 130 after Ctrl-C.

    Ctrl-C is the regular end of `serve`, which then returns 0.
    """
    parser = cli.Parser(prog="python -m rl.validator", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    routes.add_arguments(commands.add_parser("serve", help="check rollouts over HTTP"))
    key = commands.add_parser("key", help="print the validator's public key, for trust.validators")
    key.add_argument("--key", required=True, help="file of the private key, made if absent")
    calibrate.add_arguments(commands.add_parser("calibrate", help="measure honest pairs and write bands as JSON"))
    runs = {"serve": routes.serve, "key": routes.show_key, "calibrate": calibrate.run}
    return cli.run(parser, argv, lambda args: runs[args.command](args))


if __name__ == "__main__":
    sys.exit(main())
