"""Histories for a run's ledger."""

import hashlib

from rl.ledger import run_ledger, run_rules

WORKER = "8a" * 32


def train_on(ledger: run_ledger.RunLedger, step: int, num_groups: int = 2):
    """Records a batch of groups of an invited worker, from their leases on; returns the future of the batch's event."""
    ledger.joined(WORKER, invited=True)
    digests = [hashlib.sha256(f"{step}/{group}".encode()).hexdigest() for group in range(num_groups)]
    for group, digest in enumerate(digests):
        ledger.leased(WORKER, "train", step, group, version=step - 1)
        ledger.submitted(WORKER, "train", step, group, digest)
    return ledger.batch(step, run_rules.batch_digest(digests), dict.fromkeys(range(num_groups), "trusted"))
