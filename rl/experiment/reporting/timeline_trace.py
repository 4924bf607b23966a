"""Draws a run over time, as a Chrome trace for Perfetto (ui.perfetto.dev): WORKDIR/trace.json, from the ledger and metrics.jsonl.

1. The ledger has the times of leases, submissions, verdicts and batches: the spans "generate", "eval" and "verify" of workers and validators.
2. A line of metrics has the end of its step and the seconds of each part, in their order: the spans of the learner.
3. In the trace a role is a process, and spans of one worker or validator that overlap are on several threads of it. An arrow leads from
   the generation of each group to the train step of its batch.

Nothing is recorded for it during the run, so any run with a ledger has a trace. A verification lasts from submission to verdict, the
time in a queue included. Entries are not verified here: rl/trust/audit.py does that.
"""

import collections
import contextlib
import dataclasses
import heapq
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from rl.protocol.ledger import events, storage
from sharding.system import atomic_file

ROLES = ("learner", "workers", "validators")
MAX_ENTRIES = 200_000  # the newest of the ledger: the trace then has about 30 MB, which a browser can still draw
TICK_S = 1e-3  # the resolution of the ledger's times
PARTS = {"wait": "wait", "train_step": "train", "publish": "broadcast", "checkpoint": "checkpoint", "eval": "eval"}


@dataclasses.dataclass(frozen=True, order=True)
class Span:
    """One stretch of work of a role, from `begin_s` to `end_s` in Unix seconds. `track` names the learner, worker, or validator that did it."""

    begin_s: float
    end_s: float
    role: str
    track: str
    name: str
    step: int
    group: int = -1


def write(workdir: pathlib.Path, steps: Sequence[dict]) -> list[Span]:
    """Writes trace.json from the ledger and the metrics of train `steps`; returns its spans, [] for a run without a ledger."""
    file, entries = workdir / "ledger.db", []
    if file.exists():
        with contextlib.closing(storage.connect(file)) as db:
            (last,) = db.execute("SELECT MAX(seq) FROM entries").fetchone()
            first = max(0, (last or 0) + 1 - MAX_ENTRIES)
            entries = [(entry.time_ms / 1000, entry.event) for entry in storage.read(db, first)]
    spans = sorted([*of_learner(steps), *of_ledger(entries)]) if entries else []
    if spans:
        lines = (json.dumps(event, separators=(",", ":")) for event in chrome_events(spans))
        atomic_file.write(workdir / "trace.json", b"[\n", ",\n".join(lines).encode(), b"\n]\n")
    return spans


def of_learner(steps: Iterable[dict]) -> Iterator[Span]:
    """Yields the spans of the train steps whose metrics have the time of their end."""
    for record in steps:
        if "time/unix" not in record:
            continue
        begin_s = record["time/unix"] - record["time/step_s"]
        for part, name in PARTS.items():
            end_s = begin_s + record.get(f"time/{part}_s", 0.0)
            if end_s > begin_s:
                yield Span(begin_s, end_s, "learner", "", name, record["step"])
            begin_s = end_s


def of_ledger(entries: Iterable[tuple[float, events.Event]]) -> Iterator[Span]:
    """Yields the spans of workers and validators in a run's ledger, of entries as (Unix seconds, event)."""
    leased: dict[tuple, float] = {}  # (split, step, group, worker) -> begin
    submitted: dict[str, float] = {}  # digest -> end
    for now_s, event, fields in ((at_s, one, of) for at_s, one in entries for of in events.each(one.fields)):
        if event.kind == "resume":
            leased.clear()
            submitted.clear()
        if "split" not in fields:
            continue
        place = fields["split"], fields["step"], fields["group"]
        if event.kind == "lease":
            leased[*place, event.node] = now_s
        elif event.kind == "submission" and (begin_s := leased.pop((*place, event.node), None)) is not None:
            submitted[fields["digest"]] = now_s
            name, group = ("generate", place[2]) if place[0] == "train" else ("eval", -1)
            yield Span(begin_s, max(now_s, begin_s + TICK_S), "workers", event.node[:16], name, place[1], group)
        elif event.kind == "verdict" and fields["digest"] in submitted:
            begin_s = submitted[fields["digest"]]
            end_s = max(now_s, begin_s + TICK_S)
            yield Span(begin_s, end_s, "validators", fields["validator"][:16], "verify", place[1])


def chrome_events(spans: Sequence[Span]) -> Iterator[dict]:
    """Yields the events of a Chrome trace of spans in ascending order: names, complete events, and an arrow per group of a batch."""
    for pid, role in enumerate(ROLES):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": role}}
    last = {(span.step, span.group): span for span in spans}  # else it was refused, or a resume repeated its step
    begun = {span.step: span.begin_s for span in spans if span.name == "train"}
    threads = {("learner", "", 0): 0}  # (role, track, lane) -> tid
    for number, (span, lane) in enumerate(_lanes(spans)):
        place = span.role, span.track, lane
        at = {"pid": ROLES.index(span.role), "tid": threads.setdefault(place, len(threads))}
        if threads[place] == len(threads) - 1:
            yield at | {"ph": "M", "name": "thread_name", "args": {"name": f"{span.track} {lane}".strip()}}
        args = {"step": span.step} | ({"group": span.group} if span.group >= 0 else {})
        begin_us, length_us = _us(span.begin_s), _us(span.end_s) - _us(span.begin_s)
        yield at | {"ph": "X", "name": span.name, "ts": begin_us, "dur": length_us, "args": args}
        if span.group >= 0 and last[span.step, span.group] is span and begun.get(span.step, 0.0) >= span.end_s:
            arrow = {"name": "group", "cat": "batch", "id": number}
            yield at | arrow | {"ph": "s", "ts": begin_us + length_us - 1}  # within the span
            yield arrow | {"ph": "f", "bp": "e", "pid": 0, "tid": 0, "ts": _us(begun[span.step])}


def _lanes(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yields each span with the first lane of its role and track that is free: spans of one lane do not overlap."""
    free: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    busy: dict[tuple[str, str], list[tuple[float, int]]] = collections.defaultdict(list)
    for span in spans:
        own = span.role, span.track
        while busy[own] and busy[own][0][0] <= span.begin_s:
            heapq.heappush(free[own], heapq.heappop(busy[own])[1])
        lane = heapq.heappop(free[own]) if free[own] else len(busy[own])
        heapq.heappush(busy[own], (span.end_s, lane))
        yield span, lane


def shares(spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Returns, per role, the fractions of the learner's time in which the role was "busy", "idle", and busy while the learner trained ("overlap").

    A learner that waits for a batch is idle. The time between two starts of a run does not count.
    """
    changes = [(at, sign, span) for span in spans for at, sign in ((span.begin_s, 1), (span.end_s, -1))]
    running: collections.Counter[str] = collections.Counter()  # spans, by role; a learner's wait is "wait"
    busy, overlap, total_s, last_s = dict.fromkeys(ROLES, 0.0), dict.fromkeys(ROLES, 0.0), 0.0, 0.0
    for now_s, sign, span in sorted(changes, key=lambda change: change[0]):
        if running["learner"] or running["wait"]:
            total_s += now_s - last_s
            for role in ROLES:
                busy[role] += (now_s - last_s) * (running[role] > 0)
                overlap[role] += (now_s - last_s) * (min(running[role], running["learner"]) > 0)
        running["wait" if span.name == "wait" else span.role] += sign
        last_s = now_s
    overlap["learner"] = 0.0
    return {
        role: {"busy": busy[role] / total_s, "idle": 1 - busy[role] / total_s, "overlap": overlap[role] / total_s}
        for role in ROLES
        if total_s
    }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
