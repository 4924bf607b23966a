"""The commands of `python -m rl.evaluate` that need no checkpoint: endpoint, annotate, compare, leaderboard. Imports no jax.

Each function returns the exit code. They raise ValueError and OSError for mistakes of the user.
"""

import argparse
import json
import os
import pathlib
import sys

from rl import envs
from rl.evaluation import comparison, samples, sampling
from rl.evaluation import endpoint as endpoint_lib
from rl.evaluation import scores as scores_lib
from sharding.system import atomic_file, cli
from sharding.system import sandbox as sandbox_lib

NAMES = ("endpoint", "annotate", "compare", "leaderboard")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 after an error, which is printed, or 130 after Ctrl-C."""
    parser = cli.Parser(prog="python -m rl.evaluate", description="Scores models without a checkpoint of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("endpoint", help="score any model with an OpenAI API on held-out tasks")
    _add_sampling(one, split="held_out")
    one.add_argument("--out", required=True, metavar="FILE", help="JSON lines of samples; the same command continues")
    one.set_defaults(run=_endpoint)
    one = commands.add_parser("annotate", help="measure the pass rate of each training task")
    _add_sampling(one, split="train")
    one.add_argument(
        "--out", required=True, metavar="FILE", help="JSON lines of pass rates; samples: FILE.samples.jsonl"
    )
    one.set_defaults(run=_annotate)
    one = commands.add_parser("compare", help="test the difference of two models on the same tasks")
    one.add_argument("a", metavar="A", help="a file of samples")
    one.add_argument("b", metavar="B", help="another one")
    one.set_defaults(run=_compare)
    one = commands.add_parser("leaderboard", help="print a table of several models on the tasks that all have")
    one.add_argument("files", nargs="+", metavar="[NAME=]FILE", help="files of samples")
    one.set_defaults(run=_leaderboard)
    return cli.run(parser, argv)


def _add_sampling(parser: argparse.ArgumentParser, split: str) -> None:
    add = parser.add_argument
    add("name", metavar="ENV", help="as config.env.name")
    add("options", nargs="*", metavar="OPTION=VALUE", help="as config.env.options")
    add("--url", required=True, help="base URL of the API, as in http://HOST:PORT/v1; $OPENAI_API_KEY is sent")
    add("--model", default="", help="its name at the server; default: none is sent, for a server of one model")
    add("--num_tasks", type=int, default=0, help="the first so many tasks; 0: 200, or all of a dataset to annotate")
    add("--split", choices=envs.environment.SPLITS, default=split, help="which tasks")
    add("--n", type=int, default=8, help="samples of each task")
    add("--temperature", type=float, default=1.0, help="of sampling")
    add("--max_tokens", type=int, default=1024, help="of a completion")
    add("--max_calls", type=int, default=sampling.MAX_CALLS, help="of an episode of several calls")
    add("--extra", type=json.loads, default={}, metavar="JSON", help="further fields of each request, as an object")
    add("--seed", type=int, default=0, help="as config.seed")
    add("--concurrency", type=int, default=32, help="requests at the same time")
    add("--give_up_s", type=float, default=600.0, help="seconds without an answer of the server")
    add("--sandbox", choices=sandbox_lib.MODES, default="auto", help="as config.trust.sandbox")
    add("--code", **cli.FOLDERS, help="folders to import your code from")


def _endpoint(args) -> int:
    sys.path += args.code
    rows = _sample(args, args.out, args.num_tasks or 200)
    print(scores_lib.shown(*scores_lib.measure([*samples.by_task(rows).values()])))
    return 0


def _annotate(args) -> int:
    sys.path += args.code
    name, options = envs.locate(args.name, _options(args))
    env = envs.load(name, seed=args.seed, **options)
    if not (args.num_tasks or env.num_tasks):
        raise ValueError(f"environment {args.name} makes tasks without end; set --num_tasks")
    rows = _sample(args, f"{args.out}.samples.jsonl", args.num_tasks or env.num_tasks)
    found = scores_lib.pass_rates(rows)
    atomic_file.write(args.out, samples.encode(found), durable=True)
    print(scores_lib.shown_rates(found))
    return 0


def _options(args) -> dict:
    texts = envs.texts(args.name)
    return dict(cli.option(option, texts) for option in args.options)


def _sample(args, path: str | os.PathLike, num_tasks: int) -> list[dict]:
    for name in ("n", "max_tokens", "concurrency", "max_calls"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} is below 1; raise it")
    if num_tasks < 1 or not isinstance(args.extra, dict) or not args.temperature >= 0:
        raise ValueError("--num_tasks and --temperature must not be negative, and --extra must be a JSON object")
    source = sampling.Source(args.name, _options(args), args.seed, args.split, num_tasks, args.max_calls)
    own = {name: getattr(args, name) for name in ("temperature", "max_tokens", "extra", "concurrency", "give_up_s")}
    endpoint = endpoint_lib.Endpoint(args.url, args.model, **own)

    def show(done: int, total: int) -> None:
        if done % -(-total // 20) == 0:
            cli.note(f"{done} of {total} samples")

    return sampling.run(source, endpoint, args.n, path, sandbox=args.sandbox, on_progress=show)


def _compare(args) -> int:
    a, b = (samples.by_task(samples.read(path)) for path in (args.a, args.b))
    found = comparison.compare(a, b)
    print(f"{'score':<10}{'A':>9}{'B':>9}{'B - A':>9}   95 % interval        p   tasks better, worse")
    for one in found:
        interval = f"{one.low:+.3f} to {one.high:+.3f}"
        counts = f"{one.num_better}, {one.num_worse}"
        print(
            f"{one.name:<10}{one.a:>9.3f}{one.b:>9.3f}{one.b - one.a:>+9.3f}   {interval:<17}{one.p:>7.3g}   {counts}"
        )
    return 0


def _leaderboard(args) -> int:
    files = {}
    for text in args.files:
        name, is_named, path = text.partition("=")
        path = path if is_named else text
        name = name if is_named else pathlib.Path(path).stem
        if name in files:
            raise ValueError(f"two files have the name {name!r}; write NAME=FILE")
        files[name] = samples.by_task(samples.read(path))
    print("\n".join(comparison.table(files)))
    return 0
