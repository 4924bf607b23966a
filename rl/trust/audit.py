"""Audits a run by its files: every rollout that it trained on, against the config, the ledger, and the published manifests.

    python -m rl.audit runs/quickstart

1. The ledger is verified by its rules for joins, leases, submissions, verdicts, and batches (rl/protocol/ledger/run_history.py).
2. Each manifest that is still in WORKDIR/weights must be the one that the ledger names, and must name an entry of the ledger.
3. Each batch that the run trained on is read from WORKDIR/rollouts and checked against `RULES`, or by its hashes if it was redacted. Tasks and seeds are computed from
   config.json, digests and signatures from the rollouts.
4. A table shows how often each rule was checked and broken. The exit code is 0 if none was, else 1.

The orchestrator's code is not used, and nothing is replayed: `rl.validator serve` does that. The last batch of a run that was
killed, or goes on, may be incomplete; it is left out unless its version was published or its metrics were written.
"""

import collections
import contextlib
import functools
import hashlib
import hmac
import pathlib
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence

from ml_collections import config_dict

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import redaction
from rl.experiment import workdir as run_directory
from rl.experiment.reporting import metrics
from rl.protocol import curriculum as curriculum_lib
from rl.protocol import env_mix, lease, noise_seed, task_schedule
from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import run_history, run_rules
from sharding.system import cli
from sharding.weights import bucket
from sharding.weights.format import journal, manifest

RULES = {
    "ledger": "entries are chained, signed, and keep the run's rules",
    "manifest": "published versions have the manifests that the ledger names",
    "file": "a batch's rollouts are in a readable file",
    "batch": "the ledger has the batch, of these groups and this digest",
    "group": "a group has all samples of one worker, and is in one batch",
    "dropped": "a group that was dropped is in no batch, before or after",
    "curriculum": "the ledger has the digest of the results by which tasks are drawn, and they are those of the batch",
    "task": "step, task, and temperature are prescribed",
    "seed": "the noise is prescribed",
    "staleness": "versions are as recent as rl.max_lag, rl.max_off_policy, and rl.batch allow",
    "version": "versions were published, in the epoch of the rollout",
    "signature": "the worker signed the rollout",
    "submitted": "the worker handed in these bytes, and they were verified or trusted",
    "draw": "a group without a verdict was not drawn for one",
}
READ = ("*.json", "*.jsonl", "*.key", "ledger.db", "weights/*", "rollouts/step_*")
MAX_SHOWN = 100  # findings on the terminal


class Audit:
    """The audit of one run. `checked` and `broken` count by rule, `findings` has a line for each broken one, `lags` counts rollouts by lag."""

    def __init__(self, workdir: pathlib.Path):
        self.workdir = workdir
        # Before the ledger, which then has all that they name: the run may go on.
        self._trained = [one["step"] for one in metrics.read_steps(workdir)]
        self._manifests: dict[pathlib.Path, bytes] = {}
        for file in sorted((workdir / "weights").glob("v*/manifest.json")):
            with contextlib.suppress(FileNotFoundError):  # the run kept it no longer
                self._manifests[file] = file.read_bytes()
        self.history = history = run_history.read(workdir / "ledger.db")
        self.config = config_dict.ConfigDict(run_directory.saved_config(workdir), type_safe=False)
        self.checked, self.broken = collections.Counter[str](), collections.Counter[str]()
        self.findings: list[str] = []
        self.lags = collections.Counter[int]()
        self.bases = collections.Counter[str]()  # groups by "verified" and "trusted"
        self.workers: set[str] = set()
        self.num_rollouts = self.num_redacted = 0
        self._step_of: dict[int, int] = {}  # by group
        self._dropped = {group: step for step, batch in history.batches.items() for group in batch.dropped}
        self._published = history.run.published
        self._versions = {version for _, version in self._published}
        self._envs = env_mix.entries(self.config)
        self._is_fixed = task_schedule.is_fixed(self.config.rl)
        self._curriculum = curriculum_lib.Curriculum(self.config) if self.config.rl.curriculum else None
        draws = self._curriculum.draws if self._curriculum else None
        prescribed = functools.partial(task_schedule.train_groups, self.config, draws=draws)
        self._train_groups = functools.lru_cache(16)(prescribed)
        self._per_step = curriculum_lib.groups_per_step(self.config.rl)
        has_secret = (workdir / "secret.key").exists()
        self._secret = run_directory.secret(workdir, self.config.seed) if has_secret else b""

    def steps(self) -> range:
        """Returns the steps that the run trained on, up to the last with a version or a line of metrics."""
        trained = {*self._trained} - self.history.undone  # a learner that resumes has not deleted their lines yet
        return range(1, max([0, *trained, *self._versions]) + 1)

    def check_ledger(self) -> None:
        """Checks the ledger's entries, and the manifests in WORKDIR/weights against it."""
        self.checked["ledger"] += len(self.history.heads)
        self._check("ledger", [self.history.error])
        for file, data in self._manifests.items():
            self._check("manifest", [self._manifest_error(file, data)])

    def check_batch(self, step: int) -> None:
        """Checks the batch of one step: its file, its event in the ledger, and each of its groups."""
        path = self.workdir / "rollouts" / f"step_{step}" / redaction.FILE
        try:
            redacted = None if path.exists() else redaction.digests(path.parent)
            rollouts = [] if redacted is not None else parquet.read(path)
        except (ValueError, OSError) as error:
            return self._check("file", [f"{path}: {error}"], step=step)
        self._check("file", [None])
        groups: dict[int, list[rollout_lib.Rollout]] = collections.defaultdict(list)
        for rollout in rollouts:
            groups[rollout.task.group].append(rollout)
        self.num_redacted += redacted is not None
        digests = redacted or {number: verdict_lib.group_digest(group) for number, group in sorted(groups.items())}
        batch = self.history.batches.get(step)
        self._check("batch", [_batch_error(batch, digests)], step=step)
        for number in sorted({*digests, *(batch.basis if batch else ())}):
            late = f"it was dropped with the batch of step {self._dropped.get(number)}"
            self._check("dropped", [late if number in self._dropped else None], step=step, group=number)
        for number, group in groups.items():
            self._check_group(step, group, digests[number], batch)
        self.num_rollouts += len(rollouts)
        if self._curriculum:
            self._check("curriculum", [self._curriculum_error(step, groups, batch)], step=step)

    def _check(self, rule: str, errors: Sequence[str | None], **place: int | str) -> None:
        """Counts checks of a rule at one place. The broken ones are one finding, which names the step, group, and worker in `place`."""
        self.checked[rule] += len(errors)
        if broken := [error for error in errors if error]:
            self.broken[rule] += 1
            where = ", ".join(f"{name} {value}" for name, value in place.items())
            more = f" (and {len(broken) - 1} more of its rollouts)" if broken[1:] else ""
            self.findings.append(f"{where}{': ' * bool(where)}{rule}: {broken[0]}{more}")

    def _manifest_error(self, file: pathlib.Path, data: bytes) -> str | None:
        try:
            found = manifest.parse(data, is_proved=True)
        except journal.CorruptSource as error:
            return f"{file}: {error}"
        digest, epoch = hashlib.sha256(data).hexdigest(), found.epoch or 0
        if (anchor := str(found.metadata.get("ledger", "none"))) not in self.history.heads:
            return f"{file} names {anchor}, which never was the ledger's head"
        is_next = found.version > max(self._versions, default=-1)  # the ledger gets it after the file
        expected = self._published.get((epoch, found.version), digest if is_next else "none")
        name = f"version {found.version} of epoch {epoch}"
        return None if expected == digest else f"{file} has the digest {digest}; the ledger's for {name} is {expected}"

    def _check_group(
        self, step: int, rollouts: Sequence[rollout_lib.Rollout], digest: str, batch: run_history.Batch | None
    ) -> None:
        """Checks the rollouts of one group of a batch: whole, prescribed, recent, signed, and as in the ledger's events."""
        number, worker = rollouts[0].task.group, rollouts[0].worker
        place, group = {"step": step, "group": number, "worker": worker[:16]}, self._prescribed(step, number)
        self.workers.add(worker)
        self._check("group", [self._group_error(step, group, rollouts)], **place)
        self._check("task", [self._task_error(group, rollout) for rollout in rollouts], **place)
        self._check("seed", [_seed_error(group, rollout) for rollout in rollouts], **place)
        self._check("staleness", [self._staleness_error(step, rollout) for rollout in rollouts], **place)
        self._check("signature", [_signature_error(rollout) for rollout in rollouts], **place)
        if batch is None:
            return
        self._check("version", [self._version_error(batch.epoch, rollout) for rollout in rollouts], **place)
        owner, submitted = batch.submissions.get(number, ("none", "none"))
        found = f"the ledger has {submitted[:16]} of {owner[:16]}, and the digest is {digest[:16]}"
        self._check("submitted", [None if (owner, submitted) == (worker, digest) else found], **place)
        basis = batch.basis.get(number, "neither")
        self.bases[basis] += 1
        if self._secret and basis == "trusted":
            self._check("draw", [self._draw_error(number, worker, batch)], **place)

    def _group_error(self, step, group, rollouts) -> str | None:
        number, episodes = rollouts[0].task.group, rollout_lib.episodes(rollouts)
        found = [episode[0].sample for episode in episodes]
        if (first := self._step_of.setdefault(number, step)) != step:
            return f"it is in the batch of step {first}, too"
        if len({rollout.worker for rollout in rollouts}) > 1:
            return "its rollouts are of several workers"
        count = group.num_samples if group else env_mix.max_samples(self.config)
        is_whole = all([rollout.branch for rollout in one] == [*range(one[0].num_branches)] for one in episodes)
        if found == [*range(count)] and is_whole:
            return None
        return f"expected samples 0..{count - 1} once each, got {found[:16]}, {'' if is_whole else 'not '}with all branches"

    def _prescribed(self, step: int, number: int) -> lease.Lease | None:
        """Returns the group with this number if batch `step` may have it by rl.batch, else None."""
        of = number // self._per_step + 1
        allowed = [step] if self._is_fixed or self._curriculum else task_schedule.group_steps(self.config)
        return next(group for group in self._train_groups(of) if group.group == number) if of in allowed else None

    def _curriculum_error(
        self, step: int, groups: Mapping[int, Sequence[rollout_lib.Rollout]], batch: run_history.Batch | None
    ) -> str | None:
        """Returns the first mistake in the results of a batch, by which the tasks of later ones are drawn, or None."""
        assert self._curriculum is not None
        path = self.workdir / "rollouts" / f"step_{step}" / curriculum_lib.FILE
        try:
            results = curriculum_lib.decode(path.read_bytes())
        except (ValueError, OSError) as error:
            results, found = [], f"{path}: {error}"
        else:
            draws = dict(enumerate(self._curriculum.draws(step), (step - 1) * self._per_step))
            own = {one.group: one for one in results}
            found = next((f"group {n} has no result" for n in groups if n not in own), None)
            wrong = (n for n, one in own.items() if draws.get(n) != (one.env, one.index))
            found = found or next((f"group {n} has a result of a task that was not drawn" for n in wrong), None)
            off = (n for n, group in groups.items() if n in own and not _fits(own[n].reward, group))
            found = found or next((f"the result of group {n} is not that of its rollouts" for n in off), None)
        self._curriculum.add(step, results)
        named = batch.curriculum if batch else ""
        if not found and named != self._curriculum.digest:
            found = f"the digest is {self._curriculum.digest[:16]}, and {named[:16] or 'none'} in the ledger"
        return found

    def _task_error(self, group: lease.Lease | None, rollout: rollout_lib.Rollout) -> str | None:
        if group is None:
            return "this step has no such group"
        task = rollout.task
        found = rollout.step, task.env, task.index, task.seed, rollout.temperature
        expected = group.step, self._envs[group.env].label, group.index, self.config.seed, group.temperature
        names = ("step", "environment", "task", "seed of the environment", "temperature")
        pairs = zip(names, found, expected, strict=True)
        return next((f"{name} is {a}, and {b} is prescribed" for name, a, b in pairs if a != b), None)

    def _staleness_error(self, step: int, rollout: rollout_lib.Rollout) -> str | None:
        self.lags[step - 1 - int(rollout.versions[rollout.sampled_mask].min())] += 1
        low, high = rollout.oldest_version, int(rollout.versions.max())
        rl = self.config.rl
        oldest = step - 1 - (min(rl.max_lag, rl.max_off_policy) if self._is_fixed else rl.max_off_policy)
        if low < oldest:
            return f"version {low} is older than {oldest}, the oldest that this step takes"
        return f"version {high} is newer than {step - 1}, the newest that could be known" if high >= step else None

    def _version_error(self, epoch: int, rollout: rollout_lib.Rollout) -> str | None:
        if rollout.epoch != epoch:
            return f"it is of epoch {rollout.epoch}, and the batch of epoch {epoch}"
        for version in sorted(rollout.all_versions):
            if (epoch, version) not in self._published:
                return f"version {version} of epoch {epoch} was not published"
        return None

    def _draw_error(self, number: int, worker: str, batch: run_history.Batch) -> str | None:
        """Returns why the group needed a verdict: its draw is below the lowest rate that its worker can have had, by the ledger."""
        record = float(batch.records.get(worker, 0))
        if worker in self.history.run.invited:
            record += verdict_lib.HALF_AT * (1 / batch.rates["invited_rate"] - 1)
        rate = verdict_lib.check_rate(verdict_lib.reputation(record), batch.rates["min_rate"])
        secret = hmac.digest(self._secret, batch.draw_head.encode(), "sha256")
        of = number // self._per_step + 1
        draw = verdict_lib.draw(secret, f"train/{of}/{number}")
        return (
            None
            if draw >= rate
            else f"it needed a verdict: its draw is {draw:.3f}, below the rate {rate:.3f} of its worker"
        )


def _batch_error(batch: run_history.Batch | None, digests: dict[int, str]) -> str | None:
    if batch is None:
        return "the ledger has no such batch"
    if others := sorted(batch.basis.keys() ^ digests.keys()):
        where = "the file" if others[0] in digests else "the ledger"
        return f"group {others[0]} is only in {where}; groups that differ: {len(others)}"
    expected = run_rules.batch_digest(digests.values())
    return None if batch.digest == expected else f"the digest is {expected[:16]}, and {batch.digest[:16]} in the ledger"


def _fits(result: float, rollouts: Sequence[rollout_lib.Rollout]) -> bool:
    """Returns True if a group may have this mean reward: our scorer gives 0 to a sample that it had no time for, or leaves it out."""
    rewards = [one.reward for one in rollouts if one.branch == 0]
    return min(0.0, *rewards) - 1e-9 <= result <= max(0.0, *rewards) + 1e-9


def _seed_error(group: lease.Lease | None, rollout: rollout_lib.Rollout) -> str | None:
    expected = rollout.seed
    if group:
        prompt = rollout.tokens[: rollout.prompt_length]
        expected = noise_seed.stream_seed(group.seed, rollout.sample, rollout.branch, prompt, rollout.draw)
    found = f"{expected} is prescribed for sample {rollout.sample}, got {rollout.seed}"
    return None if rollout.seed == expected else found


def _signature_error(rollout: rollout_lib.Rollout) -> str | None:
    is_signed = rollout_lib.is_signed(rollout, rollout_lib.digest(rollout))
    return None if is_signed else f"its key did not sign sample {rollout.sample}"


def run(workdir: pathlib.Path, progress: metrics.Progress) -> Audit:
    """Audits the run in `workdir`, and shows the progress. Raises ValueError or OSError for a directory that is not a run's."""
    progress.note(f"verifying {workdir / 'ledger.db'}")
    audit = Audit(workdir)
    audit.check_ledger()
    steps, begun_s = audit.steps(), time.monotonic()
    with progress.phase("batches", total=len(steps)) as bar:
        for step in steps:
            audit.check_batch(step)
            per_s = audit.num_rollouts / max(time.monotonic() - begun_s, 1e-9)
            bar.update(step, {"rollouts/s": per_s, "findings": len(audit.findings)})
    if audit.findings and run_history.read(workdir / "ledger.db").num_resumes > audit.history.num_resumes:
        progress.say("the run was resumed meanwhile, which replaces files: auditing it again")
        return run(workdir, progress)
    return audit


def table(audit: Audit) -> str:
    """Returns the result of an audit as text: per rule the checks and the findings, then lags and verdicts."""
    lines = [f"{'rule':<10} {'checked':>9} {'broken':>7}"]
    lines += [f"{rule:<10} {audit.checked[rule]:>9,} {audit.broken[rule]:>7,}  {text}" for rule, text in RULES.items()]
    lags = ", ".join(f"{lag}: {count:,}" for lag, count in sorted(audit.lags.items()))
    bases = ", ".join(f"{name}: {count:,}" for name, count in sorted(audit.bases.items()))
    lines += [f"rollouts by lag in versions: {lags or 'none'}; groups by verdict: {bases or 'none'}"]
    if audit.num_redacted:
        lines += [
            f"{audit.num_redacted:,} batches were redacted: their groups are compared with the ledger by digests alone"
        ]
    num_groups = audit.bases.total()
    size = f"{len(audit.steps()):,} batches, {num_groups:,} groups, {audit.num_rollouts:,} rollouts"
    return "\n".join([*lines, f"{size} of {len(audit.workers)} workers: {len(audit.findings) or 'no'} findings"])


def main(argv: list[str] | None = None) -> int:
    """Runs the command `python -m rl.audit WORKDIR`; returns its exit code: 0 if no rule is broken, else 1."""
    parser = cli.Parser(prog="python -m rl.audit", description=__doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="work directory of a run")
    return cli.run(parser, argv, _audit, (sqlite3.Error,))


def _audit(args) -> int:
    audit = run(bucket.fetched(args.workdir, READ), metrics.Progress())
    for finding in audit.findings[:MAX_SHOWN]:
        print(f"error: {finding}", file=sys.stderr)
    if len(audit.findings) > MAX_SHOWN:
        print(f"and {len(audit.findings) - MAX_SHOWN} more", file=sys.stderr)
    print(table(audit))
    return 1 if audit.findings else 0


if __name__ == "__main__":
    sys.exit(main())
