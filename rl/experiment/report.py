"""Draws the report of a run, `<workdir>/report.html`, its trace (rl/experiment/reporting/timeline_trace.py), and rollouts.html, from its files.

Input: metrics.jsonl; evaluations.json, a list, oldest first, of {"step", "scores": {"avg@1": 0.41, "num_tasks": 200},
"intervals": {"avg@1": [0.34, 0.48]}, "samples": [{"prompt", "completion", "reward"}]}; and config.json, the resolved config, optionally
with "command" and "versions". The page names missing files; a malformed file is an error. The headline compares the first score of the
first evaluation with that of the last; margins are those of the intervals, 95 %.

The template rl/experiment/reporting/report.html draws the page, its curves as SVG. Left out: scripts (titles in the SVG show values on hover, and the
page loads nothing) and a clock (equal files give equal pages, so `python -m rl.report WORKDIR` may redraw at any time). Text of
a model is hostile: it is escaped, and characters that are invisible or change the direction of the line are shown by their code.
"""

import collections
import dataclasses
import itertools
import math
import os
import pathlib
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import markupsafe
from ml_collections import config_dict

from models.text import tokenizer as tokenizer_lib
from rl.experiment import base_fields
from rl.experiment.reporting import diagnostics, metrics, page, rollouts_page, timeline_trace
from rl.protocol.ledger import environments
from sharding.system import atomic_file, cli
from sharding.weights import bucket

MAX_RUNS = 3  # in a comparison
MAX_GROUPS = 64  # of rollouts.html
MAX_POINTS, MAX_SAMPLES = 240, 8  # per line (then means of bins), per page: below 1 MB


@dataclasses.dataclass(frozen=True)
class Curve:
    """A figure of the report: `lines` maps labels to metrics of the `phase` "rl" or "warm-up". With `zero` the axis includes 0.

    An `optional` figure is left out if the run has no such metric. With `sparse`, so is a line that is 0 throughout.
    """

    title: str
    note: str
    lines: dict[str, str]
    phase: str = "rl"
    log: bool = False
    zero: bool = True
    optional: bool = False
    sparse: bool = False


LENGTHS = {
    "length": "rollout/response_length",
    "of groups for later batches": "batch/length_waiting",  # above the batch's: it prefers short answers
    "of dropped groups": "batch/length_dropped",
}
DROPS = {name: f"batch/num_{name}" for name in ("stale", "flat", "late", "duplicate", "epoch")}
FATES = {"accepted": "trust/num_accepted", "rejected": "trust/num_refused", "called back": "trust/num_called_back"}
FLAT = {"groups": "rollout/zero_advantage_frac"}
WARM_UP = {"loss": "loss/total", "held-out": "loss/held_out"}
CURVES = (
    Curve("Reward", "mean over the rollouts of a step", {"reward": "rollout/reward"}, zero=False),
    Curve("Loss", "policy loss per token", {"loss": "loss/total"}, zero=False),
    Curve("Mismatch KL", "learner against sampler, log scale", {"KL": "loss/mismatch_kl"}, log=True, zero=False),
    Curve("Throughput", "tokens per second", {"tokens/s": "time/tokens_per_s"}),
    Curve("Response length", "tokens, mean", LENGTHS, sparse=True),
    Curve("Dropped", "groups and deliveries per step, by reason", DROPS, optional=True, sparse=True),
    Curve("Rollouts", "per step", FATES),
    Curve("Entropy", "of trained tokens, nats", {"entropy": "loss/entropy"}),
    Curve("Gradient norm", "before clipping", {"norm": "loss/grad_norm"}),
    Curve("Clipped tokens", "fraction without a gradient, by the loss", {"clipped": "loss/clip_frac"}, optional=True),
    Curve("Groups without an advantage", "fraction of a batch whose rewards are all equal", FLAT, optional=True),
    Curve("Policy lag", "versions", {"mean": "sync/lag", "max": "sync/lag_max"}, optional=True),
    Curve("KL penalty", "against objective.kl_reference", {"KL": "loss/kl"}, zero=False, optional=True),
    Curve("Distillation", "KL to the teacher, on sampled tokens", {"KL": "loss/ref_kl"}, zero=False, optional=True),
    Curve("Learning rate", "", {"rate": "optimizer/learning_rate"}, optional=True),
    Curve("Warm-up loss", "supervised, per token", WARM_UP, phase="warm-up", zero=False),
)
TILES = {
    "Tokens per second": "time/tokens_per_s",
    "Seconds per step": "time/step_s",
    "Response length": "rollout/response_length",
    "Mismatch KL": "loss/mismatch_kl",
    "Policy lag": "sync/lag",
}
TIMES = {"wait_s": "waiting for rollouts", "eval_s": "evaluation"}  # others by their name: train_step_s is "train step"


def write(workdir: str | os.PathLike) -> pathlib.Path:
    """Draws `<workdir>/report.html` and its trace, and returns the path. Raises ValueError for a malformed file."""
    workdir = pathlib.Path(workdir)
    records = metrics.read(workdir / "metrics.jsonl")
    spans = timeline_trace.write(workdir, [record for record in records if record["phase"] == "rl"])
    reputations = environments.Reader(workdir / "ledger.db").reputations()
    rollouts = _write_rollouts(workdir)
    drawn = render(workdir, records, reputations, spans, rollouts=rollouts)
    atomic_file.write(workdir / "report.html", drawn.encode())
    return workdir / "report.html"


def _write_rollouts(workdir: pathlib.Path) -> bool:
    """Draws `<workdir>/rollouts.html` of the last batch; returns False if the run has none, or its tokenizer is not here."""
    saved = atomic_file.read_json(workdir / "config.json", dict).get("config", {})
    has_config = isinstance(saved, dict) and {"tokenizer", "env"} <= saved.keys()
    if not has_config or not any((workdir / "rollouts").glob("step_*/*.parquet")):
        return False
    try:
        tokenizer = tokenizer_lib.load(saved["tokenizer"], date=saved.get("tokenizer_date"))
    except (ValueError, OSError) as error:
        cli.note(f"note: rollouts.html is left out: {error}")
        return False
    source = rollouts_page.Source(tokenizer.decode, rollouts_page.answers(config_dict.ConfigDict(saved)))
    drawn = rollouts_page.of_step(workdir, source, most=MAX_GROUPS)
    atomic_file.write(workdir / "rollouts.html", drawn.encode())
    return True


def render(
    workdir: pathlib.Path,
    records: Sequence[dict],
    reputations: Sequence[environments.Reputation],
    spans: Sequence[timeline_trace.Span] = (),
    *,
    nodes: Sequence[Mapping[str, Any]] = (),
    doing: str = "",
    rollouts: bool = False,
    script: str = "",
    policy: str = page.POLICY,
) -> str:
    """Returns the page of a run; `records` are its metrics. Figures without data are left out until there is a step.

    The page of a live run shows the table of its `nodes` and a line on its present work (`doing`), and has a `script` that the content
    security `policy` names. With `rollouts`, it links rollouts.html.
    """
    records = _of_sampler(records)
    steps = [record for record in records if record["phase"] == "rl"]
    evaluations = _evaluations(workdir / "evaluations.json")
    config = atomic_file.read_json(workdir / "config.json", dict)
    split = _time_split(records)
    figures = [_score_figure(evaluations), *filter(None, (_curve_figure(curve, records) for curve in CURVES))]
    headline, lede = _headline(evaluations, records, sum(split.values()))
    return page.template("report.html").render(
        series=_series,
        name=workdir.resolve().name,
        headline=headline,
        advice=diagnostics.of_run(steps, _first_scores(evaluations)),
        lede=lede,
        tiles={label: _median(steps, name) for label, name in TILES.items()},
        figures=[one for one in figures if steps or one.get("steps")],
        split=split,
        shares=timeline_trace.shares(spans),
        samples=_samples(evaluations),
        environments=reputations,
        nodes=nodes,
        doing=doing,
        rollouts=rollouts,
        script=script,
        policy=policy,
        command=config.pop("command", None),
        versions=", ".join(f"{name} {version}" for name, version in config.pop("versions", {}).items()),
        config=config,
    )


def compare(workdirs: Sequence[pathlib.Path]) -> pathlib.Path:
    """Draws the curves of up to three runs and the config fields that differ, and returns the page, `comparison.html` of the first.

    Of a figure with several lines, only the first line of each run is drawn. Raises ValueError for a malformed file, or more runs than
    there are colors.
    """
    if len(workdirs) > MAX_RUNS:
        raise ValueError(
            f"{len(workdirs)} runs are given, but the page has {MAX_RUNS} colors; compare at most {MAX_RUNS} runs"
        )
    names = [folder.resolve().name for folder in workdirs]
    names = names if len({*names}) == len(names) else [str(folder) for folder in workdirs]
    records = (_of_sampler(metrics.read(folder / "metrics.jsonl")) for folder in workdirs)
    runs = dict(zip(names, records, strict=True))
    evaluated = [_evaluations(folder / "evaluations.json") for folder in workdirs]
    scores = {name: [*_first_scores(found).items()] for name, found in zip(names, evaluated, strict=True)}
    figures = [_figure(Curve("Held-out score", "", {"": "evaluations.json"}), scores, {})]
    for curve in CURVES:
        metric = next(iter(curve.lines.values()))
        series = {
            name: [(one["step"], one[metric]) for one in steps if one["phase"] == curve.phase and metric in one]
            for name, steps in runs.items()
        }
        values = [value for points in series.values() for _, value in points]
        if any(values) if curve.sparse and curve.optional else values:
            figures.append(_figure(curve, series, {}))
    saved = [atomic_file.read_json(folder / "config.json", dict).get("config", {}) for folder in workdirs]
    flat = [{name: str(value) for name, value in base_fields.flat(one).items() if value != {}} for one in saved]
    rows = {field: [one.get(field, "") for one in flat] for field in sorted(set().union(*flat))}
    differing = {field: values for field, values in rows.items() if len({*values}) > 1}
    of_page: dict = {"name": ", ".join(names), "headline": "Comparison of runs", "figures": figures, "tiles": {}}
    of_page |= {"runs": names, "config": differing, "policy": page.POLICY}
    drawn = page.template("report.html").render(series=_series, **of_page)
    atomic_file.write(workdirs[0] / "comparison.html", drawn.encode())
    return workdirs[0] / "comparison.html"


def _of_sampler(records):
    """Returns metrics whose mismatch KL is that with the sampler, the one that is drawn."""
    names = [metrics.sampler_kl(record) for record in records]
    return [r | {"loss/mismatch_kl": r[name]} if name in r else r for name, r in zip(names, records, strict=True)]


def _evaluations(path):
    evaluations = atomic_file.read_json(path, list)
    for item in evaluations:
        shape = {"step": int, "scores": dict, "samples": list}
        if not (isinstance(item, dict) and all(isinstance(item.get(k), kind) for k, kind in shape.items())):
            raise ValueError(f"{path}: {str(item)[:60]!r} is not an evaluation with step, scores, samples; delete it")
        item["scores"] = {name: score for name, score in item["scores"].items() if page.finite(score)}
        item["num_tasks"] = item["scores"].pop("num_tasks", 0)
        item["samples"] = [sample for sample in item["samples"] if isinstance(sample, dict)]
    return [item for item in evaluations if item["scores"]]


def _headline(evaluations, records, seconds):
    last = {record["phase"]: record["step"] for record in records}
    is_supervised = "warm-up" in last and "rl" not in last
    lede = f"{last['warm-up']} supervised steps" if is_supervised else f"{last.get('rl', 0)} RL steps"
    lede += f", {metrics.format_seconds(seconds)} of measured time" if seconds else ""
    losses = [record["loss/total"] for record in records if page.finite(record.get("loss/total"))]
    if not evaluations and is_supervised and losses:
        return f"Loss <b>{losses[0]:.3f}</b> → <b>{losses[-1]:.3f}</b>", f"{lede}."
    if not evaluations:
        return "No held-out evaluation yet", f"{lede}."
    first, last = evaluations[0], evaluations[-1]
    name = next(iter(last["scores"]))
    lede += f", {metrics.format_value(last['num_tasks'])} held-out tasks" if last["num_tasks"] else ""
    before, after = first["scores"].get(name), last["scores"][name]
    if first is last or before is None:
        return f"Held-out {page.text(name)} is <b>{after:.3f}</b>", f"One evaluation so far. {lede}."
    margin = math.hypot(_error(first, name), _error(last, name))
    verb, to = ("rose from", "to") if after > before + margin else ("did not change measurably:", "→")
    verb, to = ("fell from", "to") if after < before - margin else (verb, to)
    change = f"{after - before:+.3f}".replace("-", "−") + f" ± {margin:.3f} (95 %)" * bool(margin)
    return f"Held-out {page.text(name)} {verb} <b>{before:.3f}</b> {to} <b>{after:.3f}</b>", f"{change} after {lede}."


def _first_scores(evaluations):
    """Returns {version: held-out score} of the score in the headline."""
    return {item["step"]: next(iter(item["scores"].values())) for item in evaluations}


def _error(item, name):
    """Returns half the 95 % interval of a score; 0 for one without."""
    low, high = item.get("intervals", {}).get(name, (0.0, 0.0))
    return (high - low) / 2


def _median(steps, name):
    values = [one[name] for one in steps if page.finite(one.get(name))]
    return statistics.median(values) if values else None


def _score_figure(evaluations):
    names = list(evaluations[-1]["scores"]) if evaluations else []
    names = ([name for name in names if "avg@" in name] if any("/avg@" in name for name in names) else names)[:3]
    series = {name: [(item["step"], item["scores"].get(name, math.nan)) for item in evaluations] for name in names}
    # There are three colors.
    for name in [name for name in names[1:] if series[name] == series[names[0]]]:  # pass@1 of rewards 0 and 1 is avg@1
        del series[name]
    scores = [(item, item["scores"][names[0]]) for item in evaluations if names and names[0] in item["scores"]]
    errors = [(item["step"], score, _error(item, names[0])) for item, score in scores]
    bars = {step: (max(score - error, 0.0), min(score + error, 1.0)) for step, score, error in errors if error}
    note = "bars: 95 %" if bars else ""
    return _figure(Curve("Held-out score", note, {"": "evaluations.json"}), series, bars)


def _curve_figure(curve, records):
    records = [r for r in records if r["phase"] == curve.phase]
    series = {label: [(r["step"], r[name]) for r in records if name in r] for label, name in curve.lines.items()}
    found = {label: points for label, points in series.items() if points}
    if curve.sparse:
        found = {label: points for label, points in found.items() if any(y for _, y in points)}
    return None if curve.optional and not found else _figure(curve, found or series, {})


def _figure(curve, series, bars):
    """Returns the template's data of a figure. `bars` maps x to the ends of an error bar of the first series."""
    notes, lines = [curve.note] * bool(curve.note), {}
    for label, points in series.items():
        good = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not curve.log)]
        good = sorted((x, math.log10(y) if curve.log else y) for x, y in good)
        if len(good) < len(points):
            notes.append(f"not drawn: {len(points) - len(good)} not finite" + " or not positive" * curve.log)
        size = math.ceil(len(good) / MAX_POINTS) or 1
        if size > 1:
            notes.append(f"a point is the mean of {size} steps")
        bins = [good[i : i + size] for i in range(0, len(good), size)]
        lines[label] = [(b[-1][0], statistics.fmean(y for _, y in b)) for b in bins]
    scale = _scale(curve, list(lines.values()), bars) if any(lines.values()) else {}
    return {"curve": curve, "notes": notes, "lines": lines, "bars": bars} | scale


def _scale(curve, lines, bars):
    """Returns the axes of a drawing: ticks as (value, label), and the functions X and Y from values to coordinates."""
    xs, ys = [x for line in lines for x, _ in line], [y for line in lines for _, y in line] + [0.0] * curve.zero
    ys += [y for x, _ in lines[0] for y in bars.get(x, ())]
    x_lo, x_hi, y_ticks = min(xs), max(xs), _ticks(min(ys), max(ys), 5, whole=curve.log)
    left, right, top, bottom = 56, 464, 10, 190
    x_scale, y_scale = (right - left) / (x_hi - x_lo or 1), (bottom - top) / (y_ticks[-1] - y_ticks[0])
    x_ticks = [x for x in _ticks(x_lo, x_hi, 6, whole=True) if x_lo <= x <= x_hi]
    return {
        "steps": f"{x_lo} to {x_hi}",
        "x_ticks": [(x, _tick_label(x)) for x in x_ticks],
        "y_ticks": [(y, "10" + str(round(y)).translate(SUPERSCRIPT) if curve.log else _tick_label(y)) for y in y_ticks],
        "X": lambda x: f"{left + (x - x_lo) * x_scale:.1f}",
        "Y": lambda y, shift=0: f"{bottom - (y - y_ticks[0]) * y_scale + shift:.1f}",
    }


def _series(line, number, label, figure):
    """Returns the SVG of a line: thin and as its moving mean, with points that have titles, invisible where there are many.

    Not by the template, which needs seven times as long.
    """
    X, Y, is_long, is_log = figure["X"], figure["Y"], len(line) >= 24, figure["curve"].log
    lines, kind, name = {"raw": line} if is_long else {}, "hit" if is_long else "dot", page.text(label)
    pieces = [
        f'<path class="{of} s{number}" d="M{"L".join(f"{X(x)} {Y(y)}" for x, y in points)}"/>'
        for of, points in (lines | {"mean": _moving_mean(line)}).items()
        if points
    ]
    for x, y in line:
        title = f"step {x}: {name} {page.number(10**y if is_log else y)}"
        pieces.append(f'<circle class="{kind} s{number}" cx="{X(x)}" cy="{Y(y)}" r="4"><title>{title}</title></circle>')
    return markupsafe.Markup("".join(pieces))


def _moving_mean(line):
    """Returns the centered moving mean of a line of (x, y), over a twelfth of the run, less at its ends."""
    half = len(line) // 24
    windows = ([y for _, y in line[max(0, i - half) : i + half + 1]] for i in range(len(line)))
    return [(x, statistics.fmean(window)) for (x, _), window in zip(line, windows, strict=True)]


def _ticks(lo, hi, num, *, whole=False):
    """Returns about `num` round numbers, at least two, that enclose lo and hi; integers if `whole`."""
    hi = hi if hi > lo or hi else 1.0  # a metric that is always 0
    rough = max((hi - lo) / num, abs(hi) * 1e-9, 1e-12)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    step = max(1, math.ceil(step)) if whole else step
    first, last = math.floor(lo / step + 1e-6), math.ceil(hi / step - 1e-6)
    return [k * step for k in range(first, max(last, first + 1) + 1)]


def _tick_label(value):
    return (f"{value / 1000:.6g}k" if abs(value) >= 10_000 else f"{value:.6g}").replace("-", "−")


def _time_split(records):
    """Returns seconds by activity, most first. Each other phase is one activity; unnamed time of an RL step is "other"."""
    split: dict[str, float] = collections.defaultdict(float)
    names = [name for name in set().union(*records) if re.fullmatch(r"time/\w+(?<!_per)_s", name)]
    for record in records:
        times = {name[5:]: record[name] for name in names if name in record}
        parts: dict[str, float] = {name: seconds for name, seconds in times.items() if math.isfinite(seconds)}
        total = parts.pop("step_s", sum(parts.values()))
        if record["phase"] != "rl":
            split[record["phase"]] += total
            continue
        for name, seconds in parts.items():
            split[TIMES.get(name, name.removesuffix("_s").replace("_", " "))] += seconds
        split["other"] += max(total - sum(parts.values()), 0.0)
    return {name: seconds for name, seconds in sorted(split.items(), key=lambda item: -item[1]) if seconds > 0}


def _samples(evaluations):
    """Returns per prompt [(when, sample)]: a sample of the first evaluation, and that of the last if it has the prompt."""
    rows = [[("before", sample)] for sample in evaluations[0]["samples"][:MAX_SAMPLES]] if evaluations else []
    for row in rows if len(evaluations) > 1 else ():
        same = (s for s in evaluations[-1]["samples"] if s.get("prompt") == row[0][1].get("prompt"))
        row += [("after", sample) for sample in itertools.islice(same, 1)]
    return rows


def main(argv: list[str] | None = None) -> int:
    """Runs the command `python -m rl.report WORKDIR...`; returns its exit code."""
    parser = cli.Parser(prog="python -m rl.report", description=__doc__)
    helps = "work directory of a run; of several, their curves are compared"
    parser.add_argument("workdirs", metavar="WORKDIR", nargs="+", help=helps)
    return cli.run(parser, argv, _draw)


def _draw(args) -> int:
    folders = [bucket.fetched(workdir, ("*.json", "*.jsonl", "ledger.db")) for workdir in args.workdirs]
    if missing := [path for folder in folders if not (path := folder / "metrics.jsonl").exists()]:
        raise ValueError(f"{missing[0]}: not found; give the --workdir of a run")
    print(write(*folders) if len(folders) == 1 else compare(folders))
    return 0


SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

if __name__ == "__main__":
    sys.exit(main())
