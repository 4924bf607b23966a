"""Histories for a run's ledger."""

import dataclasses
import hashlib
import re
import sqlite3

from rl.protocol.ledger import ledger as ledger_lib
from rl.protocol.ledger import run_ledger, run_rules

WORKER = "8a" * 32


def train_on(ledger: run_ledger.RunLedger, step: int, num_groups: int = 2):
    """Records a batch of groups of an invited worker, from their leases on; returns the future of the batch's event."""
    ledger.joined(WORKER, invited=True)
    digests = [hashlib.sha256(f"{step}/{group}".encode()).hexdigest() for group in range(num_groups)]
    for group, digest in enumerate(digests):
        ledger.leased(WORKER, "train", step, group, version=step - 1)
        ledger.submitted(WORKER, "train", step, group, digest)
    return ledger.batch(
        step, run_rules.batch_digest(digests), {(step, group): "trusted" for group in range(num_groups)}
    )


@dataclasses.dataclass
class Report:
    """The number of good entries before the first bad one, its fault (None: the ledger is good), and the head of a good ledger."""

    num_entries: int
    error: str | None
    head: str | None = None


def verify(path, *, keeper=None, head=None) -> Report:
    """Opens a ledger, which checks all of it, and compares its keeper and an earlier head."""
    try:
        with ledger_lib.Ledger(path) as ledger:
            if head:
                ledger.check_contains(head, "the test")
            num_entries = int(ledger.head.partition(":")[0]) + 1
            return Report(num_entries, None if keeper in (None, ledger.state.keeper) else "another keeper", ledger.head)
    except (ValueError, sqlite3.Error) as error:
        found = re.search("is bad at entry ([0-9]+): (.*); restore a copy", str(error), re.S)
        return Report(int(found[1]), found[2]) if found else Report(0, str(error))
