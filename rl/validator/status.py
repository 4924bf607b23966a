"""The status that a validation service reports for a file or a request of several files.

Each rollout has a verdict; its rank is an index into RANKS. A group is rejected with its worst member. `of_file` combines the rollouts of
a file: its status is the worst of theirs. `combined` does the same for the files of a request, with indices of files.
"""

import dataclasses
import functools
from collections.abc import Sequence

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import flops as flops_lib
from rl.ledger import balances
from rl.verification import checks

PARTIAL = "incomplete_group"  # reason of a rollout whose group is incomplete, which is not the worker's fault
TOO_MANY = "file: too many groups"
MAX_REASONS = 256  # rollouts of a file whose reasons are listed, offenses first; `failing_indices` lists all
RANKS = ("accept", "incomplete_group", "crashed", "reject")
REJECT = RANKS.index("reject")


@dataclasses.dataclass
class Checked:
    """One rollout in a request to the validation service, with its verdict so far; a later check may replace the verdict."""

    rollout: rollout_lib.Rollout
    file: int  # its number in the request
    verdict: checks.Verdict = checks.OK
    group_rank: int = 0  # that of its group's worst member
    is_replayed: bool = False

    @property
    def rank(self) -> int:
        """The index in RANKS of the status that this verdict means. Missing weights are the validator's fault and rank as "crashed"."""
        return {"ok": 0, PARTIAL: 1, "weights": 2}.get(self.verdict.reason, REJECT)


@dataclasses.dataclass(frozen=True)
class Status:
    """The reported status of one file (indices are of its rollouts) or of a request (of its files); the fields of the HTTP reply."""

    status: str
    reason: str = ""
    failing_indices: tuple[int, ...] = ()
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)  # by index, of the rollouts or files at fault
    input_flops: int = 0
    output_flops: int = 0
    checked: bool = False  # at least one of its groups was replayed
    signers: tuple[str, ...] = ()
    tasks: str = ""  # of a final file: tasks that must not be repeated (rl/ledger/task_ranges.py)

    @property
    def final(self) -> bool:
        """True if no other file could change this file's status: the file was accepted, or has a fault of its own."""
        return self.status == "accept" or (self.status == "reject" and bool(self.reasons))


_model_flops = functools.lru_cache(16)(flops_lib.ModelFlops.of)
UNKNOWN = Status("unknown", "it was never submitted, or too long ago")


def rejected(reason: str, num_rollouts: int = 1, signers: tuple[str, ...] = ()) -> Status:
    """Returns the final status of a file whose rollouts are all rejected for one reason."""
    return Status("reject", reason, tuple(range(num_rollouts)), {0: reason}, signers=signers)


def of_work(work: balances.Work) -> Status | None:
    """Returns the status of a file whose work was accepted or invalidated in the ledger, or None while the work is pending."""
    if work.status == "accepted":
        units = work.units + work.invalidated + work.forfeited
        return Status("accept", output_flops=units, signers=(work.node,))
    if work.status == "invalidated":
        return rejected("ledger: it was taken back, for the reason in the ledger", signers=(work.node,))
    return None


def of_file(model: config_lib.ModelConfig, rollouts: Sequence[Checked], least: int) -> Status:
    """Combines the verdicts of a file's rollouts into the file's status: the worst of them, and at least as bad as RANKS[`least`]."""
    worst = max(least, *(one.group_rank for one in rollouts))
    own = [str(one.verdict).removeprefix(f"{PARTIAL}: ") for one in rollouts if worst and one.rank == worst]
    flops = [flops_of(model, one.rollout) for one in rollouts]
    faults = {i: str(one.verdict) for i, one in enumerate(rollouts) if one.rank == REJECT}
    listed = sorted(faults, key=lambda i: (not is_offense(faults[i]), i))[:MAX_REASONS]
    return Status(
        RANKS[worst],
        (own[0] if own else "group: it depends on another file of the request") if worst else "",
        tuple(i for i, one in enumerate(rollouts) if one.group_rank),
        {i: faults[i] for i in sorted(listed)},
        sum(prompt for prompt, _ in flops),
        sum(output for _, output in flops),
        any(one.is_replayed for one in rollouts),
        tuple(sorted({one.rollout.worker for one in rollouts})),
    )


def flops_of(model: config_lib.ModelConfig, rollout: rollout_lib.Rollout) -> tuple[int, int]:
    """Returns (prompt FLOPs, output FLOPs) of one rollout; output FLOPs are the work units that workers claim.

    FLOPs are counted from the model's definition (`models.flops.ModelFlops`), not from the engine's program. The output head counts
    once per sampled token, as in INTELLECT-2, since no other position needs logits.
    """
    counted = _model_flops(model)
    prompt = counted.prefix_flops(rollout.prompt_length)
    head = 2 * counted.head * int(rollout.sampled_mask.sum())
    return prompt, counted.prefix_flops(len(rollout.tokens)) - prompt + head


def is_offense(reason: str) -> bool:
    """Returns True if only a dishonest worker can cause a rejection with this reason, which is then penalized.

    Honest workers may repeat a task (an expired lease, a stale batch), score faster than the validator, or write too large files:
    such work is neither paid nor penalized.
    """
    return not reason.startswith(("duplicate", "unscored", "newcomer", TOO_MANY))


def with_units(file: Status, units: int) -> Status:
    """Returns the accepted status `file`, or a rejection if the claimed `units` differ from its output FLOPs by more than 1."""
    if abs(units - file.output_flops) <= 1:
        return file
    reason = f"units: {units} were claimed, {file.output_flops} measured"
    return dataclasses.replace(file, status="reject", reason=reason, failing_indices=(0,), reasons={0: reason})


def combined(files: Sequence[Status]) -> Status:
    """Combines the statuses of a request's files into the status of the request: the worst one, with indices of files."""
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
