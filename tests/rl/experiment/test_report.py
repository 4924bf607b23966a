"""The report is complete, loads nothing, survives missing and hostile data, and its headline agrees with the numbers."""

import contextlib
import html.parser
import json
import math
import re
import subprocess
import sys

import pytest

from configs import quickstart
from rl.experiment import report
from rl.experiment.reporting import metrics
from rl.experiment.reporting import page as page_lib
from tests.support import recorded_run

HOSTILE = "<script>alert('x')</script> & \"quoted\" \x1b[31m \u202e\ud800\U000e0041 \x00"


def test_a_full_run(tmp_path):
    page = _draw(_run(tmp_path))
    document = _parse(page)
    assert document.text("h1") == "Held-out avg@1 rose from 0.100 to 0.600"
    assert page.count("<svg") == page.count("<figure") == len(report.CURVES) + 1
    assert "No data" not in page and "step 7: reward 0.0700" in page and "step 20: KL 2.0e-05" in page
    assert "learner against sampler, log scale; not drawn: 1 not finite or not positive" in page
    assert "10⁻⁶" in page and "step 25: avg@1 0.200" in page and "bars: 95 %" in page
    rows = re.findall(r'<th scope="row">(.*?)</th>.*?<td>(.*?)</td><td>(.*?)</td>', page, re.S)
    # 50 steps of 1.6 s (0.1 s of each unnamed: "other"), 20 of warm-up, 15 of start-up
    assert rows == [
        ("waiting for rollouts", "0:50", "43.5%"),
        ("train step", "0:25", "21.7%"),
        ("warm-up", "0:20", "17.4%"),
        ("start-up", "0:15", "13.0%"),
        ("other", "0:05", "4.3%"),
    ]
    assert "python -m rl.train --config=configs/quickstart.py" in page and "num_layers" in page


def test_it_loads_nothing_and_escapes_everything(tmp_path):
    run = _run(tmp_path, text=HOSTILE)
    config = json.loads((run / "config.json").read_text()) | {"<b>name</b>": HOSTILE, "command": HOSTILE}
    (run / "config.json").write_text(json.dumps(config))
    page = _draw(run)
    document = _parse(page)
    assert not document.tags & {"script", "link", "img", "iframe", "a", "object", "embed", "base", "form"}
    assert not document.attributes & {"src", "href", "xlink:href", "srcset", "action", "onload", "onclick", "onerror"}
    assert "://" not in page and "url(" not in page and "@import" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in page and "&quot;quoted&quot;" in page
    for name in ("U+001B", "U+202E", "U+D800", "U+E0041", "U+0000"):
        assert f"<i>{name}</i>" in page
    assert not page_lib.HIDDEN.search(page)


def test_the_page_of_an_empty_run_names_the_missing_data(tmp_path):
    page = _draw(tmp_path)
    assert _parse(page).text("h1") == "No held-out evaluation yet"
    assert page.count("No data in this run") == 1 and "no step is complete" in page and "<svg" not in page


def test_the_rollouts_of_the_last_batch_have_a_page_that_the_report_links(tmp_path):
    recorded_run.write(tmp_path, 2, prompts_per_step=4, samples_per_prompt=2)
    config = json.loads(quickstart.get_config().to_json_best_effort())
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    page = _draw(tmp_path)
    rollouts = (tmp_path / "rollouts.html").read_text()
    assert (
        'href="rollouts.html"' in page and 'href="report.html"' in rollouts and not _parse(rollouts).tags & {"script"}
    )
    assert (
        rollouts.count("<article>") == 4 and rollouts.count("expected answer: <b>") == 4 and "advantage" not in rollouts
    )


def test_a_supervised_run_has_its_losses_in_the_headline(tmp_path):
    lines = [{"phase": "warm-up", "step": n, "loss/total": 3.0 - n, "time/step_s": 1.0} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = _draw(tmp_path)
    assert (
        _parse(page).text("h1") == "Loss 2.000 → 1.000" and "2 supervised steps" in page and page.count("<figure") == 1
    )


def test_the_mismatch_curve_is_against_the_sampler(tmp_path):
    """If the learner computes old log-probabilities, loss/mismatch_kl is the change by the batch's own steps."""
    lines = [(1, "rl", {"loss/mismatch_kl": 0.5, "loss/sampler_kl": 0.001}), (1, "warm-up", {"loss/total": 2.0})]
    _write_metrics(tmp_path, lines)
    page = _draw(tmp_path)
    assert "step 1: KL 0.001" in page and "KL 0.5" not in page
    assert "Clipped tokens" not in page and "held-out</span>" not in page  # figures without data are left out


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-30, 7e20, math.nan])
def test_flat_and_extreme_curves(tmp_path, value):
    values = {name: value for curve in report.CURVES for name in curve.lines.values()}
    _write_metrics(tmp_path, [(1, "rl", values), (2, "rl", values)])
    _parse(_draw(tmp_path))


@pytest.mark.parametrize(
    "before, after, words",
    [(0.5, 0.52, "did not change measurably: 0.500 → 0.520"), (0.9, 0.2, "fell from 0.900 to 0.200")],
)
def test_the_headline_does_not_exaggerate(tmp_path, before, after, words):
    evaluations = [
        {"step": i, "scores": {"avg@1": score}, "intervals": {"avg@1": [score - 0.1, score + 0.1]}, "samples": []}
        for i, score in enumerate((before, after))
    ]
    (tmp_path / "evaluations.json").write_text(json.dumps(evaluations))
    assert _parse(_draw(tmp_path)).text("h1") == f"Held-out avg@1 {words}"


def test_the_axis_of_scores_ends_at_1_and_has_a_line_once(tmp_path):
    scores = ({"avg@1": score, "pass@1": score, "num_tasks": 200} for score in (0.185, 1.0))
    intervals = {"avg@1": [0.97, 1.01]}
    evaluations = [
        {"step": step, "scores": one, "intervals": intervals, "samples": []} for step, one in enumerate(scores)
    ]
    (tmp_path / "evaluations.json").write_text(json.dumps(evaluations))
    figure = report._score_figure(report._evaluations(tmp_path / "evaluations.json"))
    assert [y for y, _ in figure["y_ticks"]] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    low, high = figure["bars"][1]
    assert 0.97 < low < 1.0 == high and [*figure["lines"]] == ["avg@1"]


def test_long_runs_are_binned(tmp_path):
    _write_metrics(tmp_path, [(step, "rl", {"rollout/reward": step}) for step in range(1, 1001)])
    page = _draw(tmp_path)
    assert "a point is the mean of 5 steps" in page and page.count("<circle") == 200
    assert "step 5: reward 3</title>" in page  # 1 2 3 4 5


@pytest.mark.parametrize(
    "lo, hi, ticks",
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (5, 5, None),
        (-0.025, 0.008, [-0.03, -0.02, -0.01, 0, 0.01]),
    ],
)
def test_ticks_enclose(lo, hi, ticks):
    got = report._ticks(lo, hi, 5)
    assert got[0] <= lo and got[-1] >= hi and len(got) >= 2
    assert ticks is None or got == pytest.approx(ticks)


def test_the_command_redraws_the_same_page_and_complains_in_one_line(tmp_path, capsys):
    run = _run(tmp_path / "run")
    page = _draw(run)
    (run / "report.html").unlink()
    command = [sys.executable, "-m", "rl.report"]
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert done.stdout.strip() == str(run / "report.html") and not done.stderr
    assert (run / "report.html").read_text() == page
    for name, text in (("metrics.jsonl", "x\n"), ("config.json", "{"), ("evaluations.json", '[{"step": 1}]')):
        run = _run(tmp_path / name)
        (run / name).write_text(text)
        assert report.main([str(run)]) == 1 and not (run / "report.html").exists()
        (message,) = capsys.readouterr().err.splitlines()
        assert message.startswith("error: ") and name in message
    assert report.main([str(tmp_path / "absent")]) == 1 and "metrics.jsonl: not found" in capsys.readouterr().err


def test_runs_are_compared_by_their_curves_and_fields(tmp_path, capsys):
    runs = [_run(tmp_path / name) for name in ("first", f"second{HOSTILE[:17].replace('/', '')}")]
    config = json.loads((runs[0] / "config.json").read_text())
    for run, rate in zip(runs, (0.1, 0.2), strict=True):
        fields = {"optimizer": {"learning_rate": rate, "name": HOSTILE if rate > 0.1 else "adamw"}, "seed": 0}
        (run / "config.json").write_text(json.dumps(config | {"config": fields}))
    _write_metrics(runs[1], [(51, "rl", {"rollout/reward": 0.99})])
    assert report.main([*map(str, runs)]) == 0
    path = runs[0] / "comparison.html"
    assert capsys.readouterr().out == f"{path}\n"
    page = path.read_text()
    document = _parse(page)
    assert not document.tags & {"script", "link", "img"} and not page_lib.HIDDEN.search(page)
    assert page.count("<svg") == page.count("<figure") == len(report.CURVES) + 1
    assert "step 51: second" in page and "step 50: first 0.500" in page
    flat = [tmp_path / "a", tmp_path / "b"]
    for run in flat:
        _write_metrics(run, [(1, "rl", {"rollout/reward": 0.0, "batch/num_stale": 0})])
    figures = report.compare(flat).read_text()
    assert ">Reward</b>" in figures and ">Dropped</b>" not in figures  # as in the report of a run that dropped nothing
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', page)
    assert rows[0] == ("optimizer.learning_rate", "0.1", "0.2") and [row[0] for row in rows[1:]] == ["optimizer.name"]
    assert report.main([str(runs[0])] * 4) == 1 and "at most 3" in capsys.readouterr().err


def _run(workdir, text="2 + 2 = 4"):
    times = {"time/wait_s": 1.0, "time/train_step_s": 0.5, "time/step_s": 1.6}
    warm_up = {"time/step_s": 1.0, "time/train_step_s": 0.9}
    lines = [(0, "start-up", {"time/step_s": 15.0})]
    lines += [(step, "warm-up", warm_up | {"loss/total": 1 / step}) for step in range(1, 21)]
    for step in range(1, 51):
        curves = {name: step / 100 for curve in report.CURVES for name in curve.lines.values()}
        lines.append((step, "rl", curves | {"loss/mismatch_kl": step * 1e-6 if step != 9 else math.inf} | times))
    _write_metrics(workdir, lines)
    samples = [{"prompt": "2 + 2", "completion": text, "reward": 1.0}, {"prompt": text, "completion": "", "reward": 0}]
    evaluations = [
        {"step": step, "phase": "rl", "scores": {"avg@1": score, "num_tasks": 200}, "samples": samples}
        | {"intervals": {"avg@1": [score - 0.05, score + 0.05]}}
        for step, score in ((0, 0.1), (25, 0.2), (50, 0.6))
    ]
    (workdir / "evaluations.json").write_text(json.dumps(evaluations))
    command = "python -m rl.train --config=configs/quickstart.py"
    config = {"command": command, "versions": {"jax": "0.10.2"}, "model": {"num_layers": 2}}
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir


def _write_metrics(workdir, lines):
    with contextlib.closing(metrics.MetricsWriter(workdir)) as writer:
        for line in lines:
            writer.write(*line)


def _draw(workdir):
    path = report.write(workdir)
    assert path == workdir / "report.html" and not list(workdir.glob(".*"))
    return path.read_text(encoding="utf-8")


class _Document(html.parser.HTMLParser):
    """Tags, attributes and texts; fails on a tag that does not nest."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open, self.texts = set(), set(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        assert "nan" not in str(attributes) and "inf" not in str(attributes), attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((tuple(self.open), data))

    def text(self, tag):
        return "".join(data for path, data in self.texts if tag in path)


def _parse(page):
    document = _Document()
    document.feed(page)
    document.close()
    assert document.open == []
    return document
