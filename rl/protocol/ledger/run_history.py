"""The batches of a training run as its ledger states them, for an audit.

`read` verifies a ledger file as rl/protocol/ledger/ledger.py does. So each batch keeps the rules of rl/protocol/ledger/run_rules.py: its groups were leased and
submitted by a worker that had joined, and a quorum accepted them, or their worker had trust. The history ends before the first bad entry.
"""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

from rl.protocol.ledger import balances, run_rules, storage
from rl.protocol.ledger import ledger as ledger_lib


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch event, and the state of the run at that time."""

    digest: str
    epoch: int  # of its rollouts
    basis: dict[int, str]  # group -> "verified" or "trusted"
    submissions: dict[int, tuple[str, str]]  # group -> worker and digest
    draw_head: str  # of the ledger when this start of the run began, from which the draws of its groups follow
    rates: dict[str, float]  # min_rate and invited_rate of that start
    records: dict[str, int]  # worker -> its groups that a quorum had accepted
    dropped: list[int]  # groups that no batch may have
    curriculum: str = ""  # the digest of all results up to this batch; "": the run has no curriculum


class History:
    """The state of a run after the entries of its ledger; `error` names the first bad one, None if there is none."""

    def __init__(self):
        self.error: str | None = None
        self.heads: set[str] = set()  # "SEQ:HASH" of each entry, for the anchors in manifests
        self.batches: dict[int, Batch] = {}  # by step, of the last timeline
        self.num_resumes = 0
        self.undone: set[int] = set()  # steps that a resume took back, and that no batch has made again
        self.run = run_rules.RunState()
        # Head and rates of the last start; before one, every group needs a verdict.
        self._draw: tuple[str, dict[str, float]] = "", {"min_rate": 1.0, "invited_rate": 1.0}

    def add(self, entry: storage.Entry, state: balances.State) -> None:
        """Adds an entry; `state` is that after it."""
        fields, self.run = entry.event.fields, state.run
        if entry.event.kind == "resume":
            self.num_resumes += 1
            self.undone |= {step for step in self.batches if step > fields["step"]}
            self.batches = {step: batch for step, batch in self.batches.items() if step not in self.undone}
        elif entry.event.kind == "appoint":
            rates = {name: fields[name] for name in ("min_rate", "invited_rate")}
            self._draw = f"{entry.seq - 1}:{entry.previous.hex()}", rates
        elif entry.event.kind == "batch":
            basis = {group: basis for (_, group), basis in self.run.batch.items()}
            submissions = {group: submitted for (_, group), submitted in self.run.submissions.items()}
            draw_head, rates = self._draw
            self.undone.discard(fields["step"])
            self.batches[fields["step"]] = Batch(
                digest=fields["digest"],
                epoch=fields["epoch"],
                basis=basis,
                submissions=submissions,
                draw_head=draw_head,
                rates=rates,
                records=dict(self.run.records),
                dropped=[group for _, group in self.run.dropped],
                curriculum=fields.get("curriculum", ""),
            )
        self.heads.add(f"{entry.seq}:{entry.hash.hex()}")


def read(path: pathlib.Path) -> History:
    """Returns the history in a ledger file. Raises FileNotFoundError without a file; a bad entry is not raised, but in `History.error`."""
    history = History()
    try:
        ledger_lib.Ledger(path, on_checked=history.add).close()
    except ValueError as error:
        history.error = str(error)
    return history


def verdicts(path: pathlib.Path, step: int) -> dict[int, list[dict[str, Any]]]:
    """Returns the fields of the verdicts on the groups of a train step, by group, the oldest first. For display: nothing is verified.

    Raises sqlite3.Error if another process has locked the file.
    """
    has = "instr(event, CAST(? AS BLOB))"
    query = f"SELECT event FROM entries WHERE {has} AND {has} ORDER BY seq"
    found: dict[int, list[dict[str, Any]]] = {}
    with contextlib.closing(storage.connect(path)) as db:
        for (body,) in db.execute(query, ('"verdict"', f'"step":{step},')):  # canonical JSON, so without spaces
            event = json.loads(body)
            fields = event["fields"]
            if event["kind"] == "verdict" and (fields["split"], fields["step"]) == ("train", step):
                found.setdefault(fields["group"], []).append(fields)
    return found
