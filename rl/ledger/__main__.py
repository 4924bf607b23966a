"""Checks a ledger file and prints what it holds: `python -m rl.ledger verify DB` and `python -m rl.ledger show DB`."""

import sys

from rl.ledger import ledger as ledger_lib
from sharding.system import cli


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m rl.ledger", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("verify", "check every entry"), ("show", "print nodes, balances and the last entries")):
        command = commands.add_parser(name, help=what)
        command.add_argument("path", metavar="DB")
        command.add_argument("--keeper", help="public key (hex) that must have kept it")
        command.add_argument("--head", help="SEQ:HASH noted earlier, which it must contain")
        command.add_argument("--last", type=int, default=10, help="entries that show prints")
    args = parser.parse_args(argv)
    try:
        report = ledger_lib.verify(args.path, keeper=args.keeper, head=args.head)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if report.error:
        print(f"error: entry {report.bad_seq} is bad: {report.error}", file=sys.stderr)
        return 1
    if args.command == "show":
        _show(ledger_lib.Ledger(args.path), args.last)
    print(f"{report.num_entries} entries are good; head {report.head}")
    return 0


def _show(ledger: ledger_lib.Ledger, last: int) -> None:
    now_ms, state = ledger_lib.now_ms(), ledger.state
    print(f"{'node':<18}{'stake':>10}{'pending':>12}{'locked':>12}{'final':>12}{'taken back':>12}{'reputation':>12}")
    for name, node in state.nodes.items():
        balance = state.balance(name, now_ms)
        lost = balance.invalidated + balance.forfeited
        print(
            f"{name[:16]:<18}{node.stake:>10}{balance.pending:>12}{balance.locked:>12}{balance.final:>12}{lost:>12}"
            f"{'ejected' if node.ejected else f'{state.reputation(name):.3f}':>12}"
        )
    for entry in ledger.entries()[-last:] if last > 0 else []:
        fields = " ".join(f"{name}={value}" for name, value in entry.event.fields.items() if name != "validators")
        print(f"{entry.seq:>6} {entry.time_ms} {entry.event.kind:<10} {entry.event.node[:16]} {fields[:100]}")


if __name__ == "__main__":
    sys.exit(main())
