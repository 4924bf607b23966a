"""A run's ledger: durable before acknowledged, rules that prove each batch, anchors that find an older copy."""

import contextlib

import pytest

from rl.ledger import ledger as ledger_lib
from rl.ledger import run_ledger, run_rules
from tests.rl.ledger.test_ledger import ANN, BOB, KEEPER, key, work

RUN = key(7)


@contextlib.contextmanager
def opened(tmp_path, **options):
    with run_ledger.RunLedger(tmp_path / "ledger.db", KEEPER, RUN.worker, **options) as ledger:
        yield ledger


def submit(ledger, worker, group, step=1):
    """Leases and hands in a group; returns its digest."""
    digest = work(1000 * step + group)
    ledger.joined(worker)
    ledger.leased(worker=worker, split="train", step=step, group=group, version=step - 1)
    ledger.submitted(worker=worker, split="train", step=step, group=group, digest=digest)
    return digest


def test_events_are_durable_and_in_order_after_a_flush(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.resumed(0)
        ledger.joined(ANN.worker, invited=True)
        digests = [submit(ledger, ANN.worker, group) for group in range(3)]
        batch = ledger.batch(step=1, digest=run_rules.batch_digest(digests), groups=dict.fromkeys(range(3), "trusted"))
        assert batch.result() == 10
        assert ledger.published(version=1, digest=work(1)).result() == 11
        ledger.named(ANN.worker, [1])
        ledger.ejected(ANN.worker, "caught\n")
        ledger.ejected(ANN.worker, "again")
        head = ledger.head()
    report = ledger_lib.verify(tmp_path / "ledger.db", keeper=KEEPER.worker, head=head)
    assert (report.error, report.head) == (None, head) and head.startswith("13:")
    with opened(tmp_path, anchors={"a": head}) as ledger:
        assert ledger.ejected_workers == {ANN.worker}


def test_a_batch_without_trust_is_refused_and_ends_the_ledger(tmp_path):
    failures = []
    with opened(tmp_path) as ledger:
        ledger.on_failure = failures.append
        digest = submit(ledger, BOB.worker, 0)
        batch = ledger.batch(step=1, digest=run_rules.batch_digest([digest]), groups={0: "trusted"})
        with pytest.raises(ValueError, match="group: 0 is of a worker without trust"):
            batch.result()
        with pytest.raises(ValueError, match="without trust"):
            ledger.flush()
        assert len(failures) == 1
    assert ledger_lib.verify(tmp_path / "ledger.db").num_entries == 4  # open, join, lease, submission
