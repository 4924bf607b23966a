"""Drops or encrypts the trajectories of a run that it has trained on, and opens encrypted ones.

    python -m rl.retention drop runs/a --keep_steps 20
    python -m rl.retention key --key reader.pem                            (prints the recipient)
    python -m rl.retention encrypt runs/a --keep_steps 20 --recipient HEX
    python -m rl.retention open runs/a --key reader.pem

A run does the first two by itself with `retention.mode` in its config.
"""

import pathlib
import sys

from rl.experiment import redaction
from sharding.mesh import checkpoint
from sharding.system import cli


def _redact(args) -> int:
    workdir = pathlib.Path(args.workdir)
    steps = checkpoint.complete_steps(workdir / "checkpoints")
    if not steps:
        raise ValueError(f"{workdir} has no checkpoint, so a resume needs its rollouts; give the --workdir of a run")
    rule = redaction.Rule(args.command, args.keep_steps, getattr(args, "recipient", ""))
    found = redaction.apply(workdir, max(steps), rule)
    done = "dropped" if args.command == "drop" else "encrypted"
    print(f"{len(found)} steps up to {max(steps) - args.keep_steps}: {done}")
    return 0


def _key(args) -> int:
    print(redaction.public_hex(redaction.load_or_create_key(args.key)))
    return 0


def _open(args) -> int:
    if not pathlib.Path(args.key).exists():
        raise ValueError(f"--key {args.key} does not exist; give the private key of the recipient")
    key = redaction.load_or_create_key(args.key)
    files = sorted(pathlib.Path(args.workdir).glob(f"rollouts/step_*/{redaction.SEALED}"))
    for file in files:
        redaction.open_sealed(file, key)
    print(f"{len(files)} steps opened")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, or 1 after an error, which is printed."""
    parser = cli.Parser(prog="python -m rl.retention", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("drop", "encrypt"):
        one = commands.add_parser(name, help=f"{name} the rollouts of trained steps")
        one.add_argument("workdir", metavar="WORKDIR", help="working directory of a run")
        one.add_argument("--keep_steps", type=int, required=True, help="steps before the newest checkpoint that stay")
        if name == "encrypt":
            one.add_argument("--recipient", required=True, metavar="HEX", help="public key, as `key` prints it")
        one.set_defaults(run=_redact)
    one = commands.add_parser("key", help="print a public key; make the private one if it does not exist")
    one.add_argument("--key", required=True, metavar="FILE", help="PEM file of the private key")
    one.set_defaults(run=_key)
    one = commands.add_parser("open", help="put encrypted rollouts back")
    one.add_argument("workdir", metavar="WORKDIR", help="working directory of a run")
    one.add_argument("--key", required=True, metavar="FILE", help="PEM file of the private key")
    one.set_defaults(run=_open)
    return cli.run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
