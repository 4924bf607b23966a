"""The status that a validation service reports for a file or a request of several files.

A file has the status of its worst group (STATUSES), and a request that of its worst file, with indices of files.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import flops as flops_lib
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import balances
from rl.trust.verification import checks

TOO_MANY = "file: too many groups"
MAX_REASONS = 256  # groups of a file whose reasons are listed, offenses first; `failing_indices` lists all rollouts
STATUSES = ("accept", "incomplete_group", "crashed", "reject")  # the worst comes last
# No fault of the worker: the group's other files are missing, or the weights are not here.
NO_FAULT: dict[str, str] = {
    checks.Reason.OK: "accept",
    checks.Reason.SAMPLES: "incomplete_group",
    checks.Reason.WEIGHTS: "crashed",
}
NO_OFFENSE = (*verdict_lib.NO_BLAME, checks.Reason.DUPLICATE, checks.Reason.UNSCORED, TOO_MANY)


@dataclasses.dataclass(frozen=True)
class Status:
    """The reported status of one file (indices are of its rollouts) or of a request (of its files); the fields of the HTTP reply."""

    status: str
    reason: str = ""
    failing_indices: tuple[int, ...] = ()
    reasons: dict[int, str] = dataclasses.field(
        default_factory=dict
    )  # by index, of each rejected group's first rollout
    input_flops: int = 0
    output_flops: int = 0
    checked: bool = False  # at least one of its groups was replayed
    signers: tuple[str, ...] = ()
    tasks: str = ""  # of a final file: tasks that must not be repeated (rl/protocol/ledger/task_ranges.py)

    @property
    def final(self) -> bool:
        """True if no other file could change this file's status."""
        return self.status in ("accept", "reject")


_model_flops = functools.lru_cache(16)(flops_lib.ModelFlops.of)
UNKNOWN = Status("unknown", "it was never submitted, or too long ago")


def read(body: dict) -> Status:
    """Returns the status in the JSON of `dataclasses.asdict`."""
    tuples = {name: tuple(body[name]) for name in ("failing_indices", "signers")}
    fields: dict[str, Any] = body | tuples | {"reasons": {int(i): reason for i, reason in body["reasons"].items()}}
    return Status(**fields)


def rejected(reason: str, num_rollouts: int = 1, signers: tuple[str, ...] = (), at: int = 0) -> Status:
    """Returns the final status of a file whose rollouts are all rejected for one reason, found in rollout `at`."""
    return Status("reject", reason, tuple(range(num_rollouts)), {at: reason}, signers=signers)


def of_work(work: balances.Work) -> Status | None:
    """Returns the status of a file whose work was accepted or invalidated in the ledger, or None while the work is pending."""
    if work.status == "accepted":
        units = work.units + work.invalidated + work.forfeited
        return Status("accept", output_flops=units, signers=(work.node,))
    if work.status == "invalidated":
        return rejected("ledger: it was taken back, for the reason in the ledger", signers=(work.node,))
    return None


def of_verdict(verdict: checks.Verdict) -> str:
    """Returns the status of a group with this verdict."""
    return NO_FAULT.get(verdict.reason, "reject")


def of_file(
    model: config_lib.ModelConfig,
    rollouts: Sequence[rollout_lib.Rollout],
    groups: Sequence[tuple[Sequence[int], checks.Verdict]],
    *,
    is_checked: bool,
) -> Status:
    """Returns the status of a file: the worst of its `groups`, (indices of rollouts, verdict) each. `is_checked`: the file was replayed."""
    worst = max((verdict for _, verdict in groups), key=lambda verdict: STATUSES.index(of_verdict(verdict)))
    faults = {indices[0]: str(verdict) for indices, verdict in groups if of_verdict(verdict) == "reject"}
    listed = sorted(faults, key=lambda i: (not is_offense(faults[i]), i))[:MAX_REASONS]
    flops = [flops_of(model, rollout) for rollout in rollouts]
    return Status(
        of_verdict(worst),
        "" if worst.accepted else str(worst),
        tuple(sorted(i for indices, verdict in groups if not verdict.accepted for i in indices)),
        {i: faults[i] for i in sorted(listed)},
        sum(prompt for prompt, _ in flops),
        sum(output for _, output in flops),
        is_checked,
        tuple(sorted({rollout.worker for rollout in rollouts})),
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
    return not reason.startswith(NO_OFFENSE)


def with_units(file: Status, units: int) -> Status:
    """Returns the accepted status `file`, or a rejection if the claimed `units` differ from its output FLOPs by more than 1."""
    if abs(units - file.output_flops) <= 1:
        return file
    reason = f"units: {units} were claimed, {file.output_flops} measured"
    return dataclasses.replace(file, status="reject", reason=reason, failing_indices=(0,), reasons={0: reason})


def combined(files: Sequence[Status]) -> Status:
    """Combines the statuses of a request's files into the status of the request: the worst one, with indices of files."""
    worst = max(files, key=lambda file: STATUSES.index(file.status))
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
