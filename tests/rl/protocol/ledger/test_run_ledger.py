"""A run's ledger: durable before acknowledged, rules that prove each batch, anchors that find an older copy."""

import collections
import contextlib
import pathlib
import subprocess
import sys

import pytest

from rl.protocol.ledger import events, run_ledger, run_rules
from rl.protocol.ledger import ledger as ledger_lib
from sharding.system import atomic_file
from tests.rl.protocol.ledger.test_ledger import ANN, BOB, KEEPER, key, work
from tests.support import ledgers

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
        batch = ledger.batch(
            step=1, digest=run_rules.batch_digest(digests), groups={(1, n): "trusted" for n in range(3)}
        )
        assert batch.result() == 10
        assert ledger.published(version=1, digest=work(1)).result() == 11
        ledger.named(ANN.worker, [1])
        ledger.ejected(ANN.worker, "caught\n")
        ledger.ejected(ANN.worker, "again")
        head = ledger.head()
    report = ledgers.verify(tmp_path / "ledger.db", keeper=KEEPER.worker, head=head)
    assert (report.error, report.head) == (None, head) and head.startswith("13:")
    with opened(tmp_path, anchors={"a": head}) as ledger:
        assert ledger.ejected_workers == {ANN.worker}


def test_neighbors_are_joined_to_one_event_with_the_same_meaning(tmp_path):
    places = [(ANN, 3), (BOB, 0), (ANN, 4), (BOB, 1), (ANN, 5), (BOB, 2), (ANN, 0)]  # the last is a copy
    leases = [(one, dict(version=0, epoch=0, split="train", step=1, group=n)) for one, n in places]
    digests = {n: work(n) for n in range(3)}
    handed_in = [dict(split="train", step=1, group=n) for n in digests]
    states = []
    for is_joined in (True, False):
        path = tmp_path / str(is_joined)
        path.mkdir()
        with opened(path) as ledger:
            ledger.resumed(0)
            for key in (ANN, BOB):
                ledger.joined(key.worker, invited=True)
            for num_events, calls in (
                (3, [(ledger.leased, key.worker, fields) for key, fields in leases]),
                (
                    1,
                    [
                        (ledger.submitted, BOB.worker, place | {"digest": digests[place["group"]]})
                        for place in handed_in
                    ],
                ),
            ):
                found = []
                with ledger._lock if is_joined else contextlib.nullcontext():  # no commit begins
                    for record, worker, fields in calls:
                        found.append(record(worker, **fields))
                        if not is_joined:
                            found[-1].result()
                assert len({one.result() for one in found}) == (num_events if is_joined else len(calls))
            ledger.batch(1, run_rules.batch_digest(digests.values()), {(1, n): "trusted" for n in digests}).result()
            states.append(ledger.run)
        assert ledgers.verify(path / "ledger.db", keeper=KEEPER.worker).error is None
    one, other = (
        {name: value for name, value in vars(state).items() if name not in ("_count", "_done")} for state in states
    )
    assert one == other and one["submissions"] == {(1, n): (BOB.worker, digest) for n, digest in digests.items()}


@pytest.mark.parametrize(
    "also",
    [
        [],
        [{"step": 1}],
        [{"step": 1, "group": -1}],
        [{"step": 2, "group": 1, "digest": "0" * 64}],
        {"step": 1, "group": 1},
    ],
)
def test_further_groups_have_the_form_and_the_rules_of_the_first(tmp_path, also):
    fields = dict(split="train", step=1, group=0, version=0, epoch=0)
    bad = events.sign("lease", ANN.worker, KEEPER, **fields, also=also)
    assert (events.form_error(bad) or "").startswith("also")
    state = run_rules.RunState()
    good = events.sign("lease", ANN.worker, KEEPER, **fields, also=[{"step": 0, "group": 1}])
    assert events.form_error(good) is None and "step: batch 0" in (state.refusal(good, KEEPER.worker) or "")


def test_a_batch_without_trust_is_refused_and_ends_the_ledger(tmp_path):
    failures = []
    with opened(tmp_path) as ledger:
        ledger.on_failure = failures.append
        digest = submit(ledger, BOB.worker, 0)
        batch = ledger.batch(step=1, digest=run_rules.batch_digest([digest]), groups={(1, 0): "trusted"})
        with pytest.raises(ValueError, match="group: 0 has no verdict, and its worker is not trusted"):
            batch.result()
        with pytest.raises(ValueError, match="its worker is not trusted"):
            ledger.flush()
        assert len(failures) == 1
    assert ledgers.verify(tmp_path / "ledger.db").num_entries == 4  # open, join, lease, submission


# A process imports once, then forks a writer per kill: it continues after the last batch of the ledger, as after a resume, and
# writes a line for each event that is durable. It is killed at a random moment while it opens the file, or after.
KILLS = """
import itertools, os, pathlib, random, signal, sys, time
from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import events, run_ledger, run_rules
from rl.protocol.ledger import ledger as ledger_lib
from rl.protocol.ledger import run_ledger
from tests.support import ledgers

folder, num_kills, rng = pathlib.Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
key = rollout_lib.WorkerKey.load(folder / "ledger.key")

def write(out):
    ledger = run_ledger.RunLedger(folder / "ledger.db", key, key.worker)
    step = ledger._ledger.state.run.step
    ledger.resumed(step).result()
    os.write(out, b"0 open 0\\n")
    def note(kind, number):
        return lambda done: os.write(out, f"{done.result()} {kind} {number}\\n".encode())
    for step in itertools.count(step + 1):
        batch = ledgers.train_on(ledger, step, num_groups=rng.randrange(1, 9))
        batch.add_done_callback(note("batch", step))
        batch.result()
        ledger.published(step, f"{step:064x}").add_done_callback(note("publish", step))
        if rng.random() < 0.3:
            ledger.head()

for kill in range(num_kills):
    rng.seed(rng.random())
    source, out = os.pipe()
    child = os.fork()
    if not child:
        try:
            write(out)
        finally:
            os._exit(1)
    os.close(out)
    lines, wanted = b"", rng.choice((0, 1, 2, 3, 6))  # with 0 it may be killed while it opens the file
    while lines.count(b"\\n") < wanted:
        lines += os.read(source, 4096)
    time.sleep(0.02 * rng.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(source, "rb") as rest:
        lines += rest.read()
    print(lines[: lines.rfind(b"\\n") + 1].decode(), end="", flush=True)
    if (folder / "ledger.db").exists() and (kill % 10 == 9 or num_kills < 100):
        report = ledgers.verify(folder / "ledger.db", keeper=key.worker)
        assert report.error is None, (kill, report)
"""


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_moments_lose_nothing_acknowledged_and_repeat_nothing(tmp_path, num_kills):
    KEEPER.save(tmp_path / "ledger.key")
    command = [sys.executable, "-c", KILLS, str(tmp_path), str(num_kills), "8"]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parents[4], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    acknowledged = [line.split() for line in done.stdout.splitlines() if "open" not in line]
    assert len(acknowledged) > num_kills / 2
    with ledger_lib.Ledger(tmp_path / "ledger.db") as ledger:
        entries = ledger.entries()
    for seq, kind, number in acknowledged:
        event = entries[int(seq)].event
        assert (event.kind, event.fields["step" if kind == "batch" else "version"]) == (kind, int(number))
    steps = [entry.event.fields["step"] for entry in entries if entry.event.kind == "batch"]
    assert steps == list(range(1, len(steps) + 1))  # none twice: no resume went back
    assert collections.Counter(entry.event.kind for entry in entries)["join"] == 1
    names = {"ledger.key", "ledger.db", "ledger.db-journal"} | {
        file.name for file in tmp_path.glob(atomic_file.LEFTOVERS)
    }
    assert {file.name for file in tmp_path.iterdir()} <= names


def test_steps_after_the_checkpoint_are_void_and_repeated(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.resumed(0)
        for step in (1, 2, 3):
            ledgers.train_on(ledger, step)
            ledger.published(step, work(step))
        ledger.resumed(1)
        ledger.published(1, work(4))
        ledger.named(ledgers.WORKER, [1])
        ledgers.train_on(ledger, 2).result()
    for event, rule in (
        (lambda ledger: ledger.named(ledgers.WORKER, [1, 3]), "steps: one of them"),
        (lambda ledger: ledger.published(2, work(5)), None),
        (lambda ledger: ledger.published(2, work(5)), "version: it was published already"),
        (lambda ledger: ledger.published(3, work(5)), "version: batch 3 was not trained on"),
        (lambda ledger: ledger.resumed(3), "step: the last batch is 2; entries are missing"),
        (lambda ledger: ledgers.train_on(ledger, 2), "step: batch 2 was trained on already"),
        (lambda ledger: ledger.batch(3, work(1), {(3, 0): "verified"}), "group: 0 was not handed in"),
    ):
        with contextlib.ExitStack() as stack:
            ledger = stack.enter_context(opened(tmp_path))
            event(ledger)
            if rule:
                stack.enter_context(pytest.raises(ValueError, match=rule))
            ledger.flush()
    report = ledgers.verify(tmp_path / "ledger.db")
    assert report.error is None and report.head.startswith("30:")


def test_what_comes_after_the_end_fails_and_a_swapped_file_ends_the_run(tmp_path):
    failures = []
    with opened(tmp_path) as ledger:
        ledger.on_failure = failures.append
        ledger.resumed(0).result()
        (tmp_path / "ledger.db").rename(tmp_path / "moved.db")
        with pytest.raises(OSError, match="cannot be written .* put the file back"):
            ledger.resumed(0).result()
        assert len(failures) == 1
    (tmp_path / "moved.db").rename(tmp_path / "ledger.db")
    with opened(tmp_path) as other, pytest.raises(TypeError, match="not JSON serializable"):
        other.resumed({1}).result()  # a bug of a caller ends the run, too, and not the thread alone
    for late in (lambda: ledger.resumed(0).result(), ledger.head):
        with pytest.raises(ValueError, match="came after the run's ledger was closed; open the ledger again"):
            late()
