"""The rules of a run's events, against a second implementation that scans the whole history at every question."""

import collections
import hashlib
import itertools

import numpy as np
import pytest

from rl.protocol import verdict as verdict_lib
from rl.protocol.ledger import events, run_rules, task_ranges
from tests.rl.protocol.ledger.test_ledger import ANN, BOB, JUDGE, KEEPER, key, work

RUN, OTHER_RUN = KEEPER.worker, BOB.worker
JUDGES = [JUDGE, key(5), KEEPER]
WORKERS = [ANN.worker, BOB.worker]
SIGNED = {
    (judge.worker, step, group, digest, accepted): verdict_lib.SignedVerdict(
        RUN, "train", step, group, digest, accepted, "ok" if accepted else "sampling"
    ).sign(judge)
    for judge, step, group, digest, accepted in itertools.product(
        JUDGES, (1, 2, 3), (0, 1), (work(1), work(2)), (True, False)
    )
}


def event(kind, node=RUN, author=RUN, **fields):
    return events.Event(kind, node, author, "0" * 32, fields, b"")


class Oracle:
    """The same rules, each by a scan of the accepted events."""

    def __init__(self):
        self.log = []

    def since(self, kind):
        """Returns the events after the last one of a kind, each with its index."""
        last = max((i for i, e in enumerate(self.log) if e.kind == kind), default=-1)
        return [(i, e) for i, e in enumerate(self.log) if i > last]

    def lives(self):
        """Returns the events that no later resume made void: batches and versions of later steps."""
        alive = []
        for e in self.log:
            if e.kind == "resume":
                alive = [a for a in alive if a.kind != "batch" or a.fields["step"] <= e.fields["step"]]
                alive = [a for a in alive if a.kind != "publish" or a.fields["version"] < e.fields["step"]]
            alive.append(e)
        return alive

    def step(self):
        for e in reversed(self.log):
            if e.kind in ("batch", "resume"):
                return e.fields["step"]
        return 0

    def run(self):
        """Returns the key of the run since the last resume."""
        return next((e.fields["run"] for e in reversed(self.log) if e.kind == "resume"), None)

    def has_any_step(self):
        """Returns True if the last resume lets batches have groups of any step."""
        return next((e.fields.get("any_step", False) for e in reversed(self.log) if e.kind == "resume"), False)

    def is_over(self, f):
        if not self.has_any_step():
            return f["step"] <= self.step()
        return any(e.kind == "batch" and (f["step"], f["group"]) in tasks(e.fields, True) for e in self.lives())

    def group(self, step, number):
        """Returns (submitter, digest, index of the submission, refused, votes, leaseholders) of a group that no batch took, or None."""
        found = None
        for i, e in self.since("resume"):
            if e.kind == "batch" and (
                (step, number) in tasks(e.fields, True) if self.has_any_step() else e.fields["step"] == step
            ):
                found = None
            if e.fields.get("split") != "train" or (e.fields["step"], e.fields["group"]) != (step, number):
                continue
            if e.kind == "lease":
                found = ["", "", -1, False, {}, (found[5] if found else set()) | {e.node}]
            elif e.kind == "submission":
                found[:5] = [e.node, e.fields["digest"], i, False, {}]
            elif found and e.fields["digest"] == found[1]:
                if e.kind == "verdict" and e.fields["validator"] in self.appointed(i)[0]:
                    found[4] = found[4] | {e.fields["validator"]: e.fields["accepted"]}
                elif e.kind == "refusal":
                    found[3] = True
        return found

    def appointed(self, before):
        named = [e for e in self.log[:before] if e.kind == "appoint"]
        return (set(named[-1].fields["validators"]), named[-1].fields["quorum"]) if named else ({self.run()}, 1)

    def is_trusted(self, worker, submitted):
        earned = any(e.kind == "invite" and e.node == worker for e in self.log)
        for i, e in enumerate(self.log):
            if e.kind == "eject" and e.node == worker and i < submitted:
                return False
            past = Oracle()
            past.log = self.log[: i + 1]
            if e.kind == "verdict" and not earned:
                group = past.group(e.fields["step"], e.fields["group"])
                is_enough = group and sum(group[4].values()) >= past.appointed(i)[1]
                earned = bool(is_enough and group[0] == worker and group[1] == e.fields["digest"])
            if e.kind == "refusal" and e.node == worker and i > submitted and e.fields["split"] == "train":
                group = past.group(e.fields["step"], e.fields["group"])
                if group and group[:2] == [worker, e.fields["digest"]] and False in group[4].values():
                    return False
        return earned

    def allows(self, e):
        f = e.fields
        if e.author != RUN or (e.kind not in (*events.WORKER_KINDS, "eject") and e.node != RUN):
            return False
        ejected = any(o.kind == "eject" and o.node == e.node for o in self.log)
        if e.kind == "lease":
            return not ejected and (f["split"] != "train" or not self.is_over(f))
        if e.kind == "submission" and f["split"] == "train":
            group = self.group(f["step"], f["group"])
            return not self.is_over(f) and group is not None and e.node in group[5]
        if e.kind == "verdict" and f["run"] != self.run():
            return False
        if e.kind == "verdict":
            signed = SIGNED.get(tuple(f[n] for n in ("validator", "step", "group", "digest", "accepted")))
            return signed is not None and vars(signed) == f
        if e.kind == "resume":
            return f["step"] <= self.step() or not any(o.kind in ("batch", "resume") for o in self.log)
        if e.kind == "publish":
            twins = [o for o in self.lives() if o.kind == "publish" and (o.fields["version"], o.fields["epoch"])]
            twins = [o for o in twins if all(o.fields[n] == f[n] for n in ("version", "epoch"))]
            return f["version"] <= self.step() and not twins
        if e.kind == "naming":
            return all(step in self.trusted_steps(e.node) for step in f["steps"])
        return self.is_sound(f) if e.kind == "batch" else True

    def trusted_steps(self, worker):
        steps = set()
        for i, e in enumerate(self.log):
            past = Oracle()
            past.log = self.log[:i]
            if e.kind == "batch":
                for step, number in task_ranges.parse_tasks(e.fields["trusted"]) if e.fields["trusted"] else ():
                    steps |= {e.fields["step"]} if past.group(step, number)[0] == worker else set()
            elif e.kind == "resume":
                steps = {step for step in steps if step <= e.fields["step"]}
        return steps

    def is_sound(self, f):
        if f["step"] != self.step() + 1:
            return False
        bases = [(b, t) for b in ("verified", "trusted") for t in (task_ranges.parse_tasks(f[b]) if f[b] else [])]
        digests = {}
        for basis, (step, number) in bases:
            group = self.group(step, number)
            is_other = step != f["step"] and not self.has_any_step()
            if is_other or (step, number) in digests or not group or not group[1] or group[3]:
                return False
            if basis == "verified" and sum(group[4].values()) < self.appointed(len(self.log))[1]:
                return False
            if basis == "trusted" and not self.is_trusted(group[0], group[2]):
                return False
            digests[step, number] = bytes.fromhex(group[1])
        dropped = task_ranges.parse_tasks(f["dropped"]) if "dropped" in f else []
        if dropped and not self.has_any_step():
            return False
        if any(name in digests or self.is_over({"step": name[0], "group": name[1]}) for name in dropped):
            return False
        joined = b"".join(digests[name] for name in sorted(digests))
        return bool(bases) and f["digest"] == hashlib.sha256(b"intellax/batch/1" + joined).hexdigest()


def tasks(fields, with_dropped=False):
    """Returns the (step, group) pairs of a batch event, on request with those that it dropped."""
    names = ("verified", "trusted", *["dropped"] * with_dropped)
    return [task for name in names if fields.get(name) for task in task_ranges.parse_tasks(fields[name])]


def drawn(rng, oracle, order):
    """Returns a random event that often continues the history so far, and sometimes breaks it."""

    def pick(values):
        return values[int(rng.integers(len(values)))]

    if not oracle.run() and rng.random() < 0.7:
        return event("resume", step=int(rng.integers(2)), run=RUN, **order)
    step = oracle.step() + 1 if rng.random() < 0.8 else int(rng.integers(1, 4))
    place = dict(split="train" if rng.random() < 0.95 else "held_out", step=min(step, 3), group=pick((0, 1)))
    place |= {"step": pick((1, 2, 3))} if order else {}
    group = oracle.group(place["step"], place["group"])
    worker = (group[0] or min(group[5])) if group and rng.random() < 0.9 else pick(WORKERS)
    digest = group[1] if group and group[1] and rng.random() < 0.9 else pick((work(1), work(2)))
    if rng.random() < 0.6:  # the next event in the life of the group
        kind = "lease" if not group else "submission" if not group[1] else pick(("verdict", "verdict", "batch"))
    else:
        kind = pick(("lease", "submission", "verdict", "refusal", "batch", "publish", "naming", "appoint", "resume"))
        kind = pick(("invite", "invite", "eject")) if rng.random() < 0.03 else kind
    if kind == "lease":
        return event("lease", pick(WORKERS), version=-1, epoch=-1, **place)
    if kind == "submission":
        return event("submission", worker, digest=digest, **place)
    if kind == "verdict":
        signed = SIGNED[pick(JUDGES).worker, place["step"], place["group"], digest, bool(rng.random() < 0.7)]
        fields = dict(vars(signed))
        return event("verdict", **(fields | {"accepted": not signed.accepted} if rng.random() < 0.05 else fields))
    if kind == "refusal":
        return event("refusal", worker, digest=digest, reason="x", **place)
    if kind == "batch":
        names = [(of, n) for of in ((1, 2, 3) if order else (step,)) for n in (0, 1)]
        groups = {name: oracle.group(*name) for name in names}
        if order:
            quorum = oracle.appointed(len(oracle.log))[1]
            rates = {
                name: 0.02 if not g or not g[1] else 1 if sum(g[4].values()) >= quorum else 0.2
                for name, g in groups.items()
            }
            groups = {name: group for name, group in groups.items() if rng.random() < rates[name]}
        else:
            groups = {name: group for name, group in groups.items() if group or rng.random() < 0.2}
        enough = {
            n: group and sum(group[4].values()) >= oracle.appointed(len(oracle.log))[1] for n, group in groups.items()
        }
        bases = {n: "verified" if enough[n] and rng.random() < 0.9 else pick(("verified", "trusted")) for n in groups}
        digests = [g[1] if g and g[1] else work(1) for _, g in sorted(groups.items())]
        texts = {
            b: task_ranges.format_tasks(name for name in bases if bases[name] == b) for b in ("verified", "trusted")
        }
        texts |= {"trusted": texts["verified"]} if rng.random() < 0.1 else {}
        digest = run_rules.batch_digest(digests) if rng.random() < 0.9 else work(9)
        if rng.random() < 0.15 if order else len(oracle.log) % 40 == 39:
            rest = [name for name in itertools.product((1, 2, 3), (0, 1)) if name not in bases or rng.random() < 0.05]
            texts |= {"dropped": task_ranges.format_tasks([pick(rest or [(1, 0)])])}
        return event("batch", step=step, digest=digest, **texts)
    if kind == "publish":
        return event("publish", version=int(rng.integers(4)), digest=work(3), epoch=int(rng.integers(2)))
    if kind == "naming":
        return event("naming", worker, steps=[pick((1, 2, 3)) if not order else max(1, oracle.step())])
    if kind == "appoint":
        return event(
            "appoint", validators=[j.worker for j in JUDGES if rng.random() < 0.8] or [RUN], quorum=pick((1, 1, 2))
        )
    if kind == "resume":
        step = int(rng.integers(4)) if rng.random() < 0.3 else oracle.step()
        return event("resume", step=step, run=RUN if rng.random() < 0.9 or not oracle.run() else OTHER_RUN, **order)
    return event(kind, worker, **({"reason": "x"} if kind == "eject" else {}))


@pytest.mark.parametrize("order", [{}, {"any_step": True}], ids=["own_step", "any_step"])
@pytest.mark.parametrize("block", range(2))
def test_any_history_is_judged_as_by_the_second_implementation(block, order):
    counts = collections.Counter()
    for seed in (*range(block * 100, block * 100 + 100), (8070, 8944)[block]):  # the last: ejected twice
        rng, oracle, state = np.random.default_rng(seed), Oracle(), run_rules.RunState()
        for _ in range(70):
            one = drawn(rng, oracle, order)
            reason = state.refusal(one, RUN) if one.kind != "eject" else None
            assert (reason is None) == oracle.allows(one), (seed, one, reason)
            if reason is None:
                state.apply(one)
                oracle.log.append(one)
            name = one.kind
            if name == "batch" and reason is None:
                name = "trusted batch" if one.fields["trusted"] else "verified batch"
            counts[name if reason is None else (reason.partition(":")[0], name)] += 1
        assert state.step == oracle.step()
        opened = {(e.fields["step"], e.fields["group"]) for e in oracle.log if e.kind == "lease"}
        held = {name for name in opened if oracle.group(*name)}
        assert {(step, number) for step, groups in state._open.items() for number in groups} == held, seed
    assert min(counts["verified batch"], counts["trusted batch"], counts["naming"], counts["publish"]) > 4, counts
