"""Simulates a swarm of unequal nodes on a virtual clock: how much of its work is trained on, how old it is, and how long a step takes.

    python -m bench.swarm_sim                       # the table of bench/results/swarm.md
    python -m bench.swarm_sim --nodes 400 --batch first --lag 4 --deaths 0.02 --cheats 0.02
    python -m bench.swarm_sim --intellect2          # the published figures of INTELLECT-2

1. The queue, the batches, the shares, the marks of workers, and the registry are those of the product; only time, nodes, servers, and
   the learner are simulated. A node beats and renews its leases, asks for work when it has a free slot, and generates with the newest
   policy that was loaded when it began.
2. A group takes as long as the longest of its 8 samples, whose lengths are lognormal (sigma 1), cut at 8 times the mean. The speed of a
   node is lognormal (sigma 0.5). The unit is the time of a mean group on a mean node, here 60 s.
3. A part of the groups (`--deaths`) is lost with the process that made them, and a part of the nodes (`--cheats`) hands in forgeries,
   which verdicts reject after `--verdict_s`.
4. "useful" is the work in trained groups over the work that all nodes could have done, after the first batches. The learner needs
   1 / `--learner` of the time in which all nodes could make a batch.
"""

import collections
import dataclasses
import gc
import heapq
import itertools
import math
import random
import sys
import time
import types
from typing import Any

import numpy as np

from configs import base
from rl.protocol import lease as lease_lib
from rl.protocol import registry
from rl.swarm.orchestrator import work_share, worker_health
from rl.swarm.orchestrator.groups import batches as batches_lib
from rl.swarm.orchestrator.groups import group_queue, queue_entry
from rl.swarm.orchestrator.groups.queue_entry import State
from sharding.system import cli

MASK = np.ones(1, bool)


@dataclasses.dataclass(frozen=True)
class Swarm:
    """The numbers of one simulation."""

    nodes: int = 400
    slots: int = 4  # groups that a node makes at the same time
    groups: int = 1600  # P
    lag: int = 4
    off_policy: int = 8
    batch: str = "first"
    backups: bool = True
    oversampling: float = 1.0
    deaths: float = 0.0
    cheats: float = 0.0
    learner: float = 0.8  # its speed, as a part of the speed of all nodes together
    sigma: float = 1.0  # of lengths
    cut: float = 8.0  # longest length, over the mean before the cut
    speed_sigma: float = 0.5
    samples: int = 8
    broadcast_s: float = 0.0  # from publishing to the first group with the new weights
    verdict_s: float = 6.0
    train_s: float = 0.0  # of the learner per batch; 0: from `learner`
    mean_group_s: float = 60.0
    steps: int = 20
    warm: int = 8  # first batches that are not counted
    seed: int = 0


class Simulation:
    """One run of the learner and its nodes. Node i has the key "n<i>"."""

    def __init__(self, swarm: Swarm):
        self.swarm, self.draw = swarm, random.Random(swarm.seed)
        self.beat_s, self.lease_s = swarm.mean_group_s / 2, 3 * swarm.mean_group_s
        self.speeds = [self.draw.lognormvariate(0, swarm.speed_sigma) for _ in range(swarm.nodes)]
        self.capacity = sum(self.speeds) * swarm.slots / swarm.mean_group_s  # mean groups per second
        self.cheats = set(self.draw.sample(range(swarm.nodes), round(swarm.cheats * swarm.nodes)))
        self.lengths: list[float] = []
        self.queue = group_queue.GroupQueue()
        sizes = {"prompts_per_step": swarm.groups, "max_lag": swarm.lag, "max_off_policy": swarm.off_policy}
        rl = base.get_config().rl
        sizes["num_steps"] = 2**31  # of a run without an end
        rl.update(batch=swarm.batch, oversampling=swarm.oversampling, **sizes)
        self.batches = batches_lib.Batches(rl, self.queue, self.make_groups)
        self.share = work_share.WorkShare(self.lease_s)
        marks = {"min_rate": 1.0, "invited_rate": 1.0, "invited": [f"n{i}" for i in range(swarm.nodes)]}
        self.health = worker_health.WorkerHealth(3, self.lease_s, **marks)
        self.nodes = registry.Registry(self.beat_s, is_named=lambda key: True)
        self.jobs: list[dict[queue_entry.Key, types.SimpleNamespace]] = [{} for _ in self.speeds]
        self.events: list[tuple[float, int, str, Any]] = []
        self.serial = itertools.count()
        self.now_s = self.trained_work = 0.0
        self.version = self.step = 0
        self.is_training = False
        self.staleness: collections.Counter[int] = collections.Counter()
        self.ends: list[float] = []  # of the steps

    def run(self) -> types.SimpleNamespace:
        """Runs all steps; returns the figures."""
        start = time.monotonic()
        mean = np.mean([self.length() for _ in range(4000)])
        self.scale = self.swarm.mean_group_s / float(mean)
        self.lengths.clear()
        self.batches.restore(0, None)
        self.batches.load(0)
        for node in range(self.swarm.nodes):
            self.at(self.draw.uniform(0, self.beat_s), "beat", node)
        work, drops = 0.0, collections.Counter()
        while self.step < self.swarm.steps:
            self.now_s, _, kind, what = heapq.heappop(self.events)
            getattr(self, kind)(what)
            self.collect()
            if self.step == self.swarm.warm and not work:
                work, drops = self.trained_work, self.queue.drops.copy()
                self.staleness.clear()
        num, seconds = self.swarm.steps - self.swarm.warm, self.ends[-1] - self.ends[self.swarm.warm - 1]
        lengths = [self.lengths[number] for number in self.trained]
        return types.SimpleNamespace(
            useful=(self.trained_work - work) / self.swarm.mean_group_s / (self.capacity * seconds),
            step_s=seconds / num,
            staleness={age: n / self.staleness.total() for age, n in sorted(self.staleness.items())},
            drops={reason: n / num for reason, n in (self.queue.drops - drops).items()},  # groups per batch
            trained_length=float(np.mean(lengths)) / self.swarm.mean_group_s,  # over that of the groups of the order
            num_banned=sum(self.health.is_banned(f"n{node}") for node in self.cheats),
            wall_s=time.monotonic() - start,
        )

    def length(self) -> float:
        """Returns the work of a group: its longest sample."""
        sigma, cut = self.swarm.sigma, self.swarm.cut
        return max(min(cut, self.draw.lognormvariate(-(sigma**2) / 2, sigma)) for _ in range(self.swarm.samples))

    def make_groups(self, numbers, version):
        """Returns the groups with these numbers, which draws their lengths."""
        for _ in range(len(self.lengths), max(numbers) + 1):
            self.lengths.append(self.length() * self.scale)
        P = self.swarm.groups
        return [lease_lib.Lease(1 + n // P, n, "train", n, n, 1, 1.0, 0) for n in numbers]

    def at(self, delay_s: float, kind: str, what: Any) -> None:
        """Schedules a call of the method `kind`."""
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.serial), kind, what))

    def beat(self, node: int) -> None:
        """A heartbeat of a node: it renews its leases and asks for work."""
        name, jobs = f"n{node}", self.jobs[node]
        self.nodes.beat(name, "worker", self.now_s, registry.Report(load=registry.Load(running=len(jobs))))
        self.health.seen(name, self.now_s)
        for lease in self.queue.expire(self.now_s):
            self.health.lost(lease.worker, lease.group.key, self.now_s)
        for key in self.queue.renew(name, [*jobs], lambda lease: self.now_s + self.lease_s):
            jobs.pop(key, None)
        self.ask(node)
        self.at(self.beat_s, "beat", node)

    def ask(self, node: int) -> None:
        """A request for work, as in `Leases.lease`."""
        name, free = f"n{node}", self.swarm.slots - len(self.jobs[node])
        if free <= 0 or self.health.is_banned(name):
            return
        held, count = len(self.queue.held(name)), self.queue.count()
        num_unfinished = count.total() - count[State.ELIGIBLE]
        self.share.seen(name, held, self.now_s)
        room = self.share.room(name, held, num_unfinished, self.now_s)
        room = min(room, self.health.room(name, "", num_unfinished, self.now_s, self.queue.held), free)
        until: dict[str, Any] = {"deadline_s": self.now_s + self.lease_s, "now_s": self.now_s}
        groups = self.queue.lease(name, room, **until)
        if not groups and self.swarm.backups and len(self.jobs[node]) < self.swarm.slots:
            is_late = lambda lease: self.share.is_late(lease.worker, lease.since_s, self.now_s)  # noqa: E731
            groups = self.queue.lease(name, max(room, free), is_late=is_late, **until)
        for group in groups:
            seconds = self.lengths[group.group] / self.speeds[node]
            job = types.SimpleNamespace(node=node, key=group.key, since_s=self.now_s, version=self.version)
            self.jobs[node][group.key] = job
            dies = self.draw.random() < self.swarm.deaths
            self.at(seconds * (self.draw.random() if dies else 1), "die" if dies else "finish", job)
        self.share.seen(name, held + len(groups), self.now_s)

    def die(self, job) -> None:
        """The process that made a group ends, without a word; another one takes its slot."""
        if self.jobs[job.node].get(job.key) is job:
            del self.jobs[job.node][job.key]
            self.ask(job.node)

    def finish(self, job) -> None:
        """A node hands in a group, unless it learned that the group is done, and asks for the next one."""
        if self.jobs[job.node].get(job.key) is not job:
            return
        del self.jobs[job.node][job.key]
        digest = f"{job.node}/{next(self.serial)}"
        rollout: Any = types.SimpleNamespace(number=0, sampled_mask=MASK, versions=MASK * job.version, epoch=0)
        fate = self.queue.deliver(job.key, f"n{job.node}", [rollout], digest)
        if fate is queue_entry.Delivery.TAKEN:
            self.quarantine(job, digest)
        self.ask(job.node)

    def quarantine(self, job, digest: str) -> None:
        """A delivered group waits for its verdict."""
        self.queue.quarantine(job.key)
        self.at(self.swarm.verdict_s, "judge", (job, digest))

    def judge(self, what) -> None:
        """A verdict arrives."""
        job, digest = what
        entry = self.queue.entries.get(job.key)
        if entry is None or entry.state is not State.QUARANTINED or entry.digest != digest:
            return
        name = f"n{job.node}"
        if job.node in self.cheats:
            self.queue.requeue(job.key)
            self.health.rejected(name, job.key, self.now_s, is_fault=True)
            if (spare := self.queue.entries[job.key]).state is State.SUBMITTED:
                maker = int(spare.worker[1:])
                self.quarantine(types.SimpleNamespace(node=maker, key=job.key, since_s=job.since_s), spare.digest)
        else:
            self.queue.accept(job.key)
            self.health.accepted(name, job.key)
            self.share.finished(name, job.since_s, self.now_s)

    def collect(self) -> None:
        """The learner takes a batch, if it waits for one and it is complete."""
        is_over = self.is_training or self.step == self.swarm.steps
        if is_over or (entries := self.batches.collect(self.step + 1)) is None:
            return
        self.step, self.is_training = self.step + 1, True
        self.trained = [entry.group.group for entry in entries]
        self.trained_work += sum(self.lengths[number] for number in self.trained)
        self.staleness.update(self.step - 1 - entry.oldest_version for entry in entries)
        needed_s = self.swarm.train_s or self.swarm.groups / (self.swarm.learner * self.capacity)
        self.at(needed_s, "publish", self.step)
        self.ends.append(self.now_s)

    def publish(self, version) -> None:
        """The learner has trained on a batch; its policy goes to the servers."""
        self.is_training = False
        self.at(self.swarm.broadcast_s, "load", version)

    def load(self, version) -> None:
        """The servers have a policy: groups open, and nodes that wait for work are woken, as by their long polls."""
        self.version = version
        self.batches.load(version)
        idle = [node for node, jobs in enumerate(self.jobs) if len(jobs) < self.swarm.slots]
        self.draw.shuffle(idle)
        for node in idle:
            if not self.queue.count()[State.OPEN]:
                break
            self.ask(node)


def intellect2() -> Swarm:
    """Returns INTELLECT-2's published numbers: 256 groups of 16, two steps of asynchrony, 62 GB broadcast at 590 Mb/s, a step of 22 minutes."""
    # Of 16 answers of 6,000 tokens in the mean, cut at 16,000, the longest takes 8 minutes at 30 tokens/s. The slots are those with
    # which all nodes make a batch in 0.8 of a step: the paper does not give them.
    times: dict[str, Any] = {"mean_group_s": 480.0, "train_s": 22 * 60.0, "broadcast_s": 62e9 * 8 / 590e6, "steps": 40}
    numbers = {"groups": 256, "lag": 2, "off_policy": 4, "samples": 16, "cut": 16 / 6, "verdict_s": 60.0}
    return Swarm(**numbers, **times, deaths=0.02, nodes=round(256 * 480.0 / (0.8 * times["train_s"]) / 4))


def main(argv: list[str] | None = None) -> int:
    """Prints the figures of one simulation, or without arguments a table of several; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.swarm_sim", description=__doc__)
    for field in dataclasses.fields(Swarm):
        default: Any = field.default
        kind = (lambda text: text == "True") if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{field.name}", type=kind, default=None, help=f"default {default}")
    parser.add_argument("--intellect2", action="store_true", help="the published numbers of INTELLECT-2")
    found = vars(parser.parse_args(argv))
    is_intellect2 = found.pop("intellect2")
    given = {name: value for name, value in found.items() if value is not None}
    gc.disable()  # it takes a third of the time, and finds nothing
    swarm = dataclasses.replace(intellect2() if is_intellect2 else Swarm(), **given)
    _show(swarm, Simulation(swarm).run()) if given or is_intellect2 else _show_table()
    return 0


def _show_table() -> None:
    print(f"| nodes, slots, P | batch, lag | useful, learner {Swarm.learner} | the same, 2 % of groups die ", end="")
    print("| a fast learner | staleness |\n|---|---|---|---|---|---|")
    rules = [("prescribed", lag, backups) for lag in (1, 4) for backups in (False, True)] + [("first", 4, True)]
    changes = {}, {"deaths": 0.02}, {"deaths": 0.02, "learner": 10.0}
    for (nodes, groups), (batch, lag, backups) in itertools.product(((100, 400), (400, 1600)), rules):
        one = Swarm(nodes=nodes, groups=groups, batch=batch, lag=lag, backups=backups)
        results = [Simulation(dataclasses.replace(one, **change)).run() for change in changes]
        staleness = sum(age * part for age, part in results[0].staleness.items())
        cells = " | ".join(f"{result.useful:.2f}" for result in results)
        name = f"{batch} {lag}{' + backups' if backups else ''}"
        print(f"| {nodes}, {4 * nodes}, {groups} | {name} | {cells} | {staleness:.1f} |", flush=True)


def _show(swarm: Swarm, result: types.SimpleNamespace) -> None:
    numbers = dataclasses.asdict(swarm).items()
    print(", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers))
    print(f"useful {result.useful:.3f}, {result.step_s / 60:.1f} min per step, {result.wall_s:.0f} s of simulation")
    print(f"trained groups are {result.trained_length:.2f} of the mean length; cheats banned {result.num_banned}")
    print("dropped per batch: " + (", ".join(f"{reason} {n:.1f}" for reason, n in result.drops.items()) or "none"))
    for age, part in result.staleness.items():
        print(f"  {age} versions old: {part:6.1%} {'#' * math.ceil(50 * part)}")


if __name__ == "__main__":
    sys.exit(main())
