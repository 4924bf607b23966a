"""Drops, encrypts, opens, and exchanges the rollouts of runs.

    python -m rl.rollouts drop runs/a --keep_steps 20
    python -m rl.rollouts key --key reader.pem                            (prints the recipient)
    python -m rl.rollouts encrypt runs/a --keep_steps 20 --recipient HEX
    python -m rl.rollouts open runs/a --key reader.pem
    python -m rl.rollouts export runs/a/rollouts/step_3/accepted.parquet --tokenizer byte_chatml --out traces.jsonl
    python -m rl.rollouts import traces.jsonl --out sft.jsonl --min_reward 0.5

1. `drop` and `encrypt` are for steps that the run has trained on; with `retention.mode` in its config it does that by itself.
2. `export` writes rollouts as traces of verifiers 0.4; `import` reads such traces as conversations, or as rollouts (--out FILE.parquet).
"""

import argparse
import collections
import itertools
import pathlib
import sys

from inference.rollouts import parquet
from models.text import tokenizer as tokenizer_lib
from rl.evaluation import samples, traces
from rl.experiment import redaction
from rl.learning.data import sources
from sharding.mesh import checkpoint
from sharding.system import atomic_file, cli


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 after an error, which is printed, or 130 after Ctrl-C."""
    parser = cli.Parser(
        prog="python -m rl.rollouts",
        description=__doc__,
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    one = commands.add_parser("export", help="write rollouts as traces of verifiers 0.4")
    one.add_argument("files", nargs="+", metavar="PARQUET", help="files of rollouts")
    one.add_argument("--tokenizer", required=True, help="as config.tokenizer")
    one.add_argument("--tokenizer_date", default="2026-01-01", help="as config.tokenizer_date")
    one.add_argument("--out", required=True, metavar="FILE", help="traces.jsonl")
    one.set_defaults(run=_export)
    one = commands.add_parser("import", help="read traces as conversations, or as rollouts")
    one.add_argument("file", metavar="JSONL", help="traces.jsonl of verifiers 0.4")
    one.add_argument("--out", required=True, metavar="FILE", help="JSONL for warmup.data, or .parquet for rollouts")
    one.add_argument(
        "--min_reward", type=float, default=float("-inf"), help="only conversations with this reward or more"
    )
    one.set_defaults(run=_import)
    return cli.run(parser, argv)


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


def _export(args) -> int:
    tokenizer, lines = tokenizer_lib.load(args.tokenizer, date=args.tokenizer_date), []
    for path in args.files:
        groups = collections.defaultdict(list)
        for one in parquet.read(path):
            groups[one.step, one.task.group].append(one)
        lines += [episode for group in groups.values() for episode in traces.of_rollouts(group, tokenizer)]
    atomic_file.write(args.out, samples.encode(lines))
    print(f"{len(lines)} episodes: {args.out}")
    return 0


def _import(args) -> int:
    def parse(episode) -> list:
        if args.out.endswith(".parquet"):
            return traces.rollouts_of(episode)
        return [row for row in traces.conversations_of(episode) if row["reward"] >= args.min_reward]

    rows = sources.parse_lines(pathlib.Path(args.file), parse, "an episode of verifiers 0.4")
    if not (found := [*itertools.chain.from_iterable(rows)]):
        raise ValueError(f"{args.file} has no conversation of reward {args.min_reward:g} or more; lower --min_reward")
    if args.out.endswith(".parquet"):
        parquet.write(args.out, found)
    else:
        atomic_file.write(args.out, samples.encode(found))
    print(f"{len(found)} {'rollouts' if args.out.endswith('.parquet') else 'conversations'}: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
