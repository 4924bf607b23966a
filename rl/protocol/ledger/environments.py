"""The reputation of environments by a run's ledger: how many of their groups taught something, and how many rollouts and groups failed.

The batch events have counts by environment, which the run's own scorer found; the refusals name the environment of their group. A resume
takes back the batches of later steps.
"""

import collections
import contextlib
import dataclasses
import pathlib

from rl.protocol.ledger import events, storage
from rl.protocol.ledger import ledger as ledger_lib

COUNTS = ("groups", "signal", "rollouts", "errors")  # of an environment in a batch event
UNKNOWN = "(not recorded)"  # the environment of refusals without one


@dataclasses.dataclass(frozen=True)
class Reputation:
    """Counts of groups, rollouts, and refusals of one environment with one digest, summed over a run."""

    name: str
    digest: str
    groups: int = 0
    signal: int = 0  # groups with an advantage other than 0
    rollouts: int = 0
    errors: int = 0  # rollouts that raised an error, or could not be scored in time
    refusals: dict[str, int] = dataclasses.field(default_factory=dict)  # refused groups, by the code of the reason

    @property
    def signal_share(self) -> float:
        """The share of groups with a signal."""
        return self.signal / max(self.groups, 1)

    @property
    def error_rate(self) -> float:
        """The share of rollouts with an error."""
        return self.errors / max(self.rollouts, 1)


def read(path: str | pathlib.Path) -> list[Reputation]:
    """Returns the reputations in a ledger file, which is verified. Raises ValueError for a bad ledger, FileNotFoundError without one."""
    ledger_lib.Ledger(path).close()
    return Reader(pathlib.Path(path)).reputations()


class Reader:
    """The reputations in a ledger file that grows, unverified. Entries that were read once are not read again."""

    def __init__(self, path: pathlib.Path):
        self._path, self._next = path, 0
        self._batches: dict[int, list[dict]] = {}
        self._refusals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def reputations(self) -> list[Reputation]:
        """Returns the reputation of each environment so far, by name and digest; [] without a file.

        A refusal counts for the newest digest of its environment. Raises ValueError for an entry that cannot be decoded.
        """
        if not self._path.exists():
            return []
        with contextlib.closing(storage.connect(self._path)) as db:
            for entry in storage.read(db, self._next):
                self._add(entry.event)
                self._next = entry.seq + 1
        sums: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
        newest: dict[str, str] = {}
        for _, counts in sorted(self._batches.items()):
            for one in counts:
                newest[one["name"]] = one["digest"]
                sums[one["name"], one["digest"]].update({name: one[name] for name in COUNTS})
        refused = {(name, newest.get(name, "")): dict(found) for name, found in self._refusals.items()}
        return [
            Reputation(name, digest, **sums[name, digest], refusals=refused.get((name, digest), {}))
            for name, digest in sorted({*sums, *refused})
        ]

    def _add(self, event: events.Event) -> None:
        if event.kind == "resume":
            kept = event.fields["step"]
            self._batches = {step: one for step, one in self._batches.items() if step <= kept}
        elif event.kind == "batch":
            self._batches[event.fields["step"]] = event.fields.get("environments", [])
        elif event.kind == "refusal":
            reason = event.fields["reason"].partition(":")[0][:40]
            self._refusals[event.fields.get("environment", UNKNOWN)][reason] += 1


def table(found: list[Reputation]) -> list[str]:
    """Returns the lines of a table for people."""
    lines = [
        f"{'environment':<28}{'digest':<18}{'groups':>8}{'with signal':>13}{'rollouts':>10}{'errors':>8}  refused groups"
    ]
    for one in found:
        refused = ", ".join(f"{reason} {number}" for reason, number in sorted(one.refusals.items())) or "0"
        share, errors = f"{one.signal_share:.1%}", f"{one.error_rate:.1%}"
        lines.append(
            f"{one.name[:26]:<28}{one.digest[:16]:<18}{one.groups:>8}{share:>13}{one.rollouts:>10}{errors:>8}  {refused}"
        )
    return lines
