"""Shows the logs of a run, all processes in the order of time: `python -m rl.logs WORKDIR --role=worker --follow`."""

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

from sharding.system import cli
from sharding.system.logs import run_logs
from sharding.weights import bucket

PERIOD_S = 0.3


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = cli.Parser(prog="python -m rl.logs", description=__doc__)
    add = parser.add_argument
    add("workdir", metavar="WORKDIR", help="the run's working directory, also in a bucket")
    helps = "of these processes, with commas: worker is all workers, worker0 is one"
    add("--role", type=lambda names: names.split(","), default=(), metavar="NAMES", help=helps)
    add("--level", choices=run_logs.LEVELS, default="INFO", help="at least this level (default: INFO)")
    add("--attempt", type=int, help="of this start of the run (default: the newest)")
    add("--follow", action="store_true", help="go on as the logs grow, and with the next attempt")
    return cli.run(parser, argv, _show)


def lines(
    workdir: pathlib.Path, roles: Sequence[str], levels: Sequence[str], attempt: int | None, *, is_following: bool
) -> Iterator[str]:
    """Yields the lines of `attempt` (None: the newest) by time. With `is_following`, waits for more without end."""
    ends: dict[pathlib.Path, int] = {}
    while True:
        files = _files(workdir, roles, attempt)
        if roles and not (files or is_following):
            known = ", ".join(file.stem for file in _files(workdir, (), attempt)) or "no process"
            raise ValueError(f"--role={','.join(roles)} has no logs here; these have some: {known}")
        # Also those of the last attempt: it may write its last lines when the next one has begun.
        found = [line for file in dict.fromkeys([*ends, *files]) for line in _new_lines(file, ends)]
        parsed = [(one, _printable(line)) for line in found if (one := run_logs.LINE.fullmatch(line))]
        yield from (line for one, line in sorted(parsed, key=lambda pair: pair[0]["time"]) if one["level"] in levels)
        if not is_following:
            return
        time.sleep(PERIOD_S)


def _show(args) -> int:
    workdir = pathlib.Path(bucket.fetched(args.workdir, ["logs/*"], is_optional=True))
    known = [folder.attempt for folder in run_logs.attempts(workdir)]
    if args.attempt not in (None, *known) or not (known or args.follow):
        found = f"{workdir} has the logs of {f'attempts {known[0]} to {known[-1]}' if known else 'no attempt'}"
        raise ValueError(f"{found}; give the working directory of a run, and one of them with --attempt")
    levels = run_logs.LEVELS[run_logs.LEVELS.index(args.level) :]
    with contextlib.suppress(KeyboardInterrupt):
        for line in lines(workdir, args.role, levels, args.attempt, is_following=args.follow):
            print(line, flush=args.follow)
    return 0


def _files(workdir: pathlib.Path, roles: Sequence[str], attempt: int | None) -> list[pathlib.Path]:
    """Returns the logs of these processes, of all for (), in an attempt, for None in the newest."""
    found = run_logs.attempts(workdir)
    folders = found[-1:] if attempt is None else [folder for folder in found if folder.attempt == attempt]
    files = [file for folder in folders for file in sorted(folder.path.glob("*.log"))]
    return [file for file in files if not roles or {file.stem, file.stem.rstrip("0123456789")} & {*roles}]


def _new_lines(file: pathlib.Path, ends: dict[pathlib.Path, int]) -> list[str]:
    """Returns the complete lines of a file after the last call: all if it is shorter than then, none if it is gone."""
    try:
        with file.open("rb") as opened:
            begin = ends.get(file, 0)
            begin = opened.seek(begin if begin <= os.fstat(opened.fileno()).st_size else 0)
            whole, newline, _ = opened.read().rpartition(b"\n")
    except FileNotFoundError:
        return []
    ends[file] = begin + len(whole) + len(newline)
    return whole.decode(errors="replace").split("\n") if newline else []


def _printable(line: str) -> str:
    """Shows characters that could control a terminal by their code: workers of strangers write to logs, too."""
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)


if __name__ == "__main__":
    sys.exit(main())
