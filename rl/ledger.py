"""Checks a ledger file and prints its content: `python -m rl.ledger verify DB`, `show DB`, `environments DB`, and `events DB [--follow]`."""

import json
import os
import pathlib
import signal
import sqlite3
import sys
import time

from rl.protocol.ledger import environments, storage
from rl.protocol.ledger import events as ledger_events
from rl.protocol.ledger import ledger as ledger_lib
from sharding.system import cli

POLL_S = 0.3
CHUNK = 1000  # entries in memory
NOTICE_S = 2.0  # between two lines of progress


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0 for a good ledger, 1 for a bad or missing one."""
    parser = cli.Parser(prog="python -m rl.ledger", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("verify", "check every entry"),
        ("show", "print workers, balances, and the last entries"),
        ("environments", "print the reputation of environments: groups with a signal, errors, refusals"),
        ("events", "print every entry as a line of JSON, after checking it"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", metavar="DB", help="the ledger file; that of a run is WORKDIR/ledger.db")
        command.add_argument("--keeper", help="public key (hex) of the keeper; default: the one in the first entry")
        command.add_argument("--head", help="SEQ:HASH that an earlier verify printed; the ledger must contain it")
        if name == "show":
            command.add_argument("--last", type=int, default=10, help="number of entries to print")
        if name == "events":
            command.add_argument("--kind", nargs="+", choices=ledger_events.KINDS, help="print these; default: all")
            text = "wait for further entries, until Ctrl-C, SIGTERM, or the end of the reader of the output"
            command.add_argument("--follow", action="store_true", help=text)
    return cli.run(parser, argv, _run, (sqlite3.Error,))


def _run(args) -> int:
    with ledger_lib.Ledger(args.path, on_checked=_Progress()) as ledger:
        if args.keeper not in (None, ledger.state.keeper):
            raise ValueError(f"{args.path} is kept by {ledger.state.keeper}, not by --keeper; get the right file")
        if args.head:
            ledger.check_contains(args.head, "--head")
        if args.command == "events":
            _stream(ledger, args.kind, args.follow)
            return 0
        if args.command == "environments":
            found = environments.Reader(pathlib.Path(args.path)).reputations()
            print("\n".join(environments.table(found)))
        if args.command == "show":
            _show(ledger, args.last)
        print(f"{int(ledger.head.partition(':')[0]) + 1} entries are good; head {ledger.head}")
        return 0


class _Progress:
    """Prints how many entries are checked to standard error, at most every `NOTICE_S` seconds."""

    def __init__(self):
        self._begun_s = self._shown_s = time.monotonic()

    def __call__(self, entry: storage.Entry, state: object) -> None:
        now_s, num_entries = time.monotonic(), entry.seq + 1
        if now_s >= self._shown_s + NOTICE_S:
            self._shown_s = now_s
            rate = num_entries / (now_s - self._begun_s)
            print(f"checked {num_entries} entries, {rate:.0f} per second", file=sys.stderr, flush=True)


def _stream(ledger: ledger_lib.Ledger, kinds: list[str] | None, follow: bool) -> None:
    """Prints the entries of a ledger (None: of all kinds) and, with `follow`, those that other processes append."""
    stopped = []  # not by KeyboardInterrupt, which a finalizer or a callback of SQLite may swallow
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: stopped.append(True)) for number in numbers}
    try:
        number = 0
        while not stopped:
            for entry in (entries := ledger.entries(number, CHUNK)):
                if not kinds or entry.event.kind in kinds:
                    print(_as_json(entry))
            number += len(entries)
            if entries:
                sys.stdout.flush()
            elif follow:
                time.sleep(POLL_S)
                ledger.refresh()
            else:
                break
    except BrokenPipeError:  # the reader ended, such as head; Python would complain about it once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _as_json(entry) -> str:
    event = entry.event
    named = {"seq": entry.seq, "time_ms": entry.time_ms, "kind": event.kind, "node": event.node, "author": event.author}
    return json.dumps(named | {"fields": event.fields, "hash": entry.hash.hex()})


def _show(ledger: ledger_lib.Ledger, last: int) -> None:
    now_ms, state = ledger_lib.now_ms(), ledger.state
    print(f"{'node':<18}{'stake':>10}{'pending':>12}{'locked':>12}{'final':>12}{'taken back':>12}{'reputation':>12}")
    for name, worker in state.workers.items():
        balance = state.balance(name, now_ms)
        lost = balance.invalidated + balance.forfeited
        print(
            f"{name[:16]:<18}{worker.stake:>10}{balance.pending:>12}{balance.locked:>12}{balance.final:>12}{lost:>12}"
            f"{'ejected' if worker.ejected else f'{state.reputation(name):.3f}':>12}"
        )
    for entry in ledger.entries()[-last:] if last > 0 else []:
        fields = " ".join(f"{name}={value}" for name, value in entry.event.fields.items() if name != "validators")
        print(f"{entry.seq:>6} {entry.time_ms} {entry.event.kind:<10} {entry.event.node[:16]} {fields[:100]}")


if __name__ == "__main__":
    sys.exit(main())
