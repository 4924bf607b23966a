"""Checks a ledger file and prints its content: `python -m rl.ledger verify DB` and `python -m rl.ledger show DB`."""

import sys

from rl.ledger import ledger as ledger_lib
from sharding.system import cli


def main(argv: list[str] | None = None) -> int:
    """Runs the command `verify` or `show`; returns the exit code: 0 for a good ledger, 1 for a bad or missing one."""
    parser = cli.Parser(prog="python -m rl.ledger", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("verify", "check every entry"), ("show", "print workers, balances, and the last entries")):
        command = commands.add_parser(name, help=text)
        command.add_argument("path", metavar="DB", help="the ledger file")
        command.add_argument("--keeper", help="public key (hex) of the keeper; default: the one in the first entry")
        command.add_argument("--head", help="SEQ:HASH that an earlier verify printed; the ledger must contain it")
        command.add_argument("--last", type=int, default=10, help="number of entries that show prints")
    args = parser.parse_args(argv)
    try:
        report = ledger_lib.verify(args.path, keeper=args.keeper, head=args.head)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if report.error:
        found = f"entry {report.num_entries} of {args.path} is bad: {report.error}"
        print(f"error: {found}; restore a good copy", file=sys.stderr)
        return 1
    if args.command == "show":
        with ledger_lib.Ledger(args.path) as ledger:
            _show(ledger, args.last)
    print(f"{report.num_entries} entries are good; head {report.head}")
    return 0


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
