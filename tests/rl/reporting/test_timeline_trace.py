"""A trace has each group once, from its lease to its batch; lanes and shares agree with counts on a grid of seconds."""

import collections
import contextlib
import json
import random
import shutil

import pytest

from rl import report
from rl.ledger import storage
from rl.reporting import metrics, timeline_trace
from rl.reporting.timeline_trace import Span
from tests.support import recorded_run

STEPS, P = 3, 4


def test_a_run_has_a_trace_of_every_group_and_step(tmp_path):
    recorded_run.write(tmp_path, STEPS, prompts_per_step=P, samples_per_prompt=2)
    with contextlib.closing(metrics.MetricsWriter(tmp_path)) as writer:
        for step in range(1, STEPS + 1):
            parts = {"time/wait_s": 0.5, "time/train_step_s": 0.25, "time/step_s": 1.0}
            writer.write(step, "rl", parts | {"time/unix": 4e9 + step, "loss/total": 0.0})  # after all events
    assert "<th>workers</th>" in report.write(tmp_path).read_text()
    found = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in found if event["ph"] == "X"]
    names = collections.Counter(event["name"] for event in spans)
    assert STEPS * P // 2 <= names.pop("verify") <= STEPS * P
    assert names == {"wait": STEPS, "train": STEPS, "generate": STEPS * P}
    generated = {(event["args"]["step"], event["args"]["group"]) for event in spans if event["name"] == "generate"}
    assert generated == {(1 + group // P, group) for group in range(STEPS * P)}
    flows = collections.defaultdict(dict)
    for event in found:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert len(flows) == STEPS * P
    for flow in flows.values():
        for event, name in ((flow["s"], "generate"), (flow["f"], "train")):
            own = [span for span in spans if (span["pid"], span["tid"]) == (event["pid"], event["tid"])]
            (own,) = [span for span in own if span["ts"] <= event["ts"] < span["ts"] + span["dur"]]
            assert own["name"] == name


@pytest.mark.parametrize("seed", range(20))
def test_lanes_and_shares_agree_with_a_grid(seed):
    rng = random.Random(seed)
    spans = []
    for _ in range(rng.randrange(1, 60)):
        begin, role = rng.randrange(100), rng.choice(timeline_trace.ROLES)
        name = rng.choice(["wait", "train"]) if role == "learner" else "generate"
        spans.append(Span(begin, begin + rng.randrange(1, 12), role, rng.choice("ab"), name, 1))
    spans.sort()
    lanes = collections.defaultdict(set)
    for span, lane in timeline_trace._lanes(spans):
        seconds = set(range(int(span.begin_s), int(span.end_s)))
        assert not lanes[span.role, span.track, lane] & seconds
        lanes[span.role, span.track, lane] |= seconds
    for own in {(span.role, span.track) for span in spans}:  # no more lanes than spans at one time
        at = collections.Counter(
            second for s in spans if (s.role, s.track) == own for second in range(int(s.begin_s), int(s.end_s))
        )
        assert sum(place[:2] == own for place in lanes) == max(at.values())

    drawn = [
        event for event in timeline_trace.chrome_events(spans) if event["ph"] == "X"
    ]  # so the file has the same shares
    as_drawn = [(timeline_trace.ROLES[e["pid"]], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in drawn]
    assert sorted(as_drawn) == sorted((span.role, span.name, span.begin_s, span.end_s) for span in spans)

    def covered(role, *names):
        return {x for s in spans if (s.role, s.name) in {(role, n) for n in names} for x in range(s.begin_s, s.end_s)}

    whole, training = covered("learner", "wait", "train"), covered("learner", "train")
    found = timeline_trace.shares(spans)
    assert bool(found) == bool(whole)
    for role in timeline_trace.ROLES if whole else ():
        busy = covered(role, "train", "generate")
        assert found[role]["busy"] == pytest.approx(len(busy & whole) / len(whole))
        assert found[role]["idle"] == pytest.approx(1 - len(busy & whole) / len(whole))
        overlap = len(busy & training) / len(whole) if role != "learner" else 0
        assert found[role]["overlap"] == pytest.approx(overlap)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("trace_processor_shell"), reason="Perfetto's trace_processor_shell is not installed"
)
def test_perfetto_reads_the_shares_of_the_report(tmp_path):
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="pip install perfetto")
    recorded_run.write(tmp_path, STEPS, prompts_per_step=P, samples_per_prompt=2)
    first_s = min(span.begin_s for span in timeline_trace.of_ledger(entries_of(tmp_path)))
    steps = [
        {"step": n, "time/unix": first_s + n, "time/wait_s": 0.7, "time/train_step_s": 0.2, "time/step_s": 1.0}
        for n in range(1, STEPS + 1)
    ]
    expected = timeline_trace.shares(timeline_trace.write(tmp_path, steps))
    config = perfetto.TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    query = """SELECT process.pid AS role, slice.name AS name, slice.ts AS ts, slice.dur AS dur FROM slice
        JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)"""
    with contextlib.closing(perfetto.TraceProcessor(trace=str(tmp_path / "trace.json"), config=config)) as found:
        spans = [
            Span(row.ts / 1e9, (row.ts + row.dur) / 1e9, timeline_trace.ROLES[row.role], "", row.name, 1)
            for row in found.query(query)
        ]
    for role, shares in timeline_trace.shares(spans).items():
        assert shares == pytest.approx(expected[role], abs=0.01), role


def entries_of(folder):
    with contextlib.closing(storage.connect(folder / "ledger.db")) as db:
        return [(entry.time_ms / 1000, entry.event) for entry in storage.read(db, 0)]


def test_a_run_without_a_ledger_has_no_trace(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1, "time/unix": 5.0, "time/step_s": 1.0}\n')
    report.write(tmp_path)
    assert not (tmp_path / "trace.json").exists()


def test_an_arrow_starts_at_the_generation_that_was_trained_on():
    """Not at one that was refused, or trained on before a resume repeated its step."""
    made = [Span(begin_s, begin_s + 1, "workers", "ab"[begin_s // 2], "generate", 1, 0) for begin_s in (0, 2)]
    found = timeline_trace.chrome_events([*made, Span(4, 5, "learner", "", "train", 1)])
    assert [event["ts"] for event in found if event["ph"] == "s"] == [3e6 - 1]
