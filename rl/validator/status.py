"""What a validation service says of a file or of a request: its status, with the reasons and who is at fault.

1. Each rollout has a verdict; its rank is an index into RANKS. A group falls with its worst member.
2. `of_file` sums one file up: its status is the worst of its rollouts'. `combined` does the same for the files of a
   request, whose indices are then of files.
3. A status that no other company could change is `final`.
"""

import dataclasses
from collections.abc import Sequence

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from rl.ledger import balances
from rl.validator import work_units
from rl.verification import checks

PARTIAL = "incomplete_group"  # of a rollout whose group is not all there: nobody's fault, and no verdict
TOO_MANY = "file: too many groups"
MAX_REASONS = 256  # culprits of a file that are named, offences first; `failing_indices` has all
RANKS = ("accept", "incomplete_group", "crashed", "reject")  # a file's status is the worst of its rollouts'


@dataclasses.dataclass(frozen=True)
class Status:
    """What is known of one request, or of one file of it."""

    status: str
    reason: str = ""
    failing_indices: tuple[int, ...] = ()
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)  # by index, of the culprits
    input_flops: int = 0
    output_flops: int = 0
    checked: bool = False  # replayed, not only looked over
    signers: tuple[str, ...] = ()
    tasks: str = ""  # of a final one: groups in it that are not to be done again (rl/ledger/task_ranges.py)

    @property
    def final(self) -> bool:
        """Whether other company would change nothing: it was accepted, or is at fault itself."""
        return self.status == "accept" or (self.status == "reject" and bool(self.reasons))


UNKNOWN = Status("unknown", "it was never handed in, or long ago")


def of_work(work: balances.Work) -> Status | None:
    """What a ledger says of a file that was settled there, where nothing else is known of it any more."""
    if work.status == "accepted":
        units = work.units + work.invalidated + work.forfeited
        return Status("accept", output_flops=units, signers=(work.node,))
    if work.status == "invalidated":
        reason = "ledger: it was taken back, and the ledger says why"
        return Status("reject", reason, (0,), {0: reason}, signers=(work.node,))
    return None


def of_file(
    model: config_lib.ModelConfig,
    rollouts: Sequence[rollout_lib.Rollout],
    found: Sequence[checks.Verdict],
    falls: Sequence[int],
    least: int,
    checked: bool,
) -> Status:
    """Of one file. `falls`: the rank of each rollout's group; `least`: a rank that the request does not go below."""
    worst = max(least, *falls)
    own = [str(verdict).removeprefix(f"{PARTIAL}: ") for verdict in found if worst and rank(verdict) == worst]
    flops = [work_units.flops_of(model, rollout) for rollout in rollouts]
    culprits = {i: str(verdict) for i, verdict in enumerate(found) if rank(verdict) == len(RANKS) - 1}
    named = sorted(culprits, key=lambda i: (not is_offence(culprits[i]), i))[:MAX_REASONS]
    return Status(
        RANKS[worst],
        (own[0] if own else "group: it depends on another file of the request") if worst else "",
        tuple(i for i, fall in enumerate(falls) if fall),
        {i: culprits[i] for i in sorted(named)},
        sum(prompt for prompt, _ in flops),
        sum(output for _, output in flops),
        checked,
        tuple(sorted({rollout.worker for rollout in rollouts})),
    )


def rank(verdict: checks.Verdict) -> int:
    """Into RANKS. "weights" is our own fault: they could not be had here."""
    return {"ok": 0, PARTIAL: 1, "weights": 2}.get(verdict.reason, 3)


def is_offence(reason: str) -> bool:
    """Honest nodes are told to do one task twice, too (a lease ran out, a batch was stale), may have a machine on which a slow
    scorer is fast, and may write large files: not paid, no more."""
    return not reason.startswith(("duplicate", "unscored", TOO_MANY))


def with_units(file: Status, units: int) -> Status:
    """Rejects a file whose units are not its output FLOPs."""
    if abs(units - file.output_flops) <= 1:
        return file
    reason = f"units: {units} were claimed, {file.output_flops} measured"
    return dataclasses.replace(file, status="reject", reason=reason, failing_indices=(0,), reasons={0: reason})


def combined(files: Sequence[Status]) -> Status:
    """Of a request: indices are of files."""
    worst = max(files, key=lambda file: (RANKS.index(file.status), bool(file.reasons)))
    return Status(
        worst.status,
        worst.reason,
        tuple(i for i, file in enumerate(files) if file.status != "accept"),
        {i: file.reason for i, file in enumerate(files) if file.reasons},
        sum(file.input_flops for file in files),
        sum(file.output_flops for file in files),
        any(file.checked for file in files),
        tuple(sorted({signer for file in files for signer in file.signers})),
    )


def line(status: Status) -> str:
    """The reason as the ledger takes it."""
    return "".join(c if c.isprintable() else "?" for c in status.reason)[:1024] or "rejected"
