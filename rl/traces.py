"""Exports rollouts as traces of verifiers 0.4, and imports such traces as conversations or rollouts.

python -m rl.traces export runs/quickstart/rollouts/step_3/accepted.parquet --tokenizer byte_chatml --out traces.jsonl
python -m rl.traces import traces.jsonl --out sft.jsonl --min_reward 0.5
"""

import collections
import itertools
import pathlib
import sys

from inference.rollouts import parquet
from models.text import tokenizer as tokenizer_lib
from rl.evaluation import samples, traces
from rl.learning.data import sources
from sharding.system import atomic_file, cli


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


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, or 1 after an error, which is printed."""
    parser = cli.Parser(prog="python -m rl.traces", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
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


if __name__ == "__main__":
    sys.exit(main())
