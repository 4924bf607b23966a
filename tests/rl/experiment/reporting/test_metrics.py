"""metrics.jsonl survives kills and resumes; the display is right about rate and time left."""

import contextlib
import errno
import io
import json
import math
import re

import numpy as np
import pytest
import tensorboardX.proto.event_pb2 as event_pb2
from tensorboardX import record_writer

from rl.experiment.reporting import metrics, monitors
from tests.support import clock as clock_lib


def test_lines_are_exact_sorted_and_finite_json(tmp_path):
    def run(workdir):
        with contextlib.closing(metrics.MetricsWriter(workdir)) as writer:
            writer.write(1, "rl", {"rollout/reward": 0.1 + 0.2, "loss/total": np.float32(0.1), "loss/kl": math.nan})
            writer.write(2, "rl", {"loss/kl": -math.inf})
        return (workdir / "metrics.jsonl").read_bytes()

    text = run(tmp_path / "a")
    first, second = text.decode().splitlines()
    assert first == (
        '{"phase": "rl", "step": 1, "loss/kl": "nan", "loss/total": 0.10000000149011612, '
        '"rollout/reward": 0.30000000000000004}'
    )
    assert json.loads(second)["loss/kl"] == "-inf"
    assert text == run(tmp_path / "b")
    records = metrics.read(tmp_path / "a" / "metrics.jsonl")
    assert math.isnan(records[0]["loss/kl"]) and records[1]["loss/kl"] == -math.inf
    assert records[0]["rollout/reward"] == 0.1 + 0.2


def test_a_name_without_an_area_is_refused(tmp_path):
    with contextlib.closing(metrics.MetricsWriter(tmp_path)) as writer:
        with pytest.raises(ValueError, match=r"metrics \['step'\] have no area"):
            writer.write(1, "rl", {"step": 2.0})


def with_charts(workdir):
    run = monitors.Run(workdir, "key", {})
    return metrics.MetricsWriter(workdir, monitors.begin(["tensorboard"], run))


def test_resume_after_a_kill_holds_every_step_once(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(with_charts(tmp_path)) as writer:
        writer.write(7, "warm-up", {"loss/total": 2.0})
        for step in range(1, 6):
            writer.write(step, "rl", {"loss/total": 1 / step})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"phase": "rl", "step": 6, "loss/to')
    assert [r["step"] for r in metrics.read(path)] == [7, 1, 2, 3, 4, 5]  # the incomplete end is not a line
    with contextlib.closing(with_charts(tmp_path)) as writer:
        assert path.read_bytes() == whole
        writer.truncate("rl", 3)  # the checkpoint was of step 3; warm-up's step 7 is another count
        for step in (4, 5, 6):
            writer.write(step, "rl", {"loss/total": 1 / step})
    assert [(r["phase"], r["step"]) for r in metrics.read(path)] == [
        ("warm-up", 7), *(("rl", step) for step in range(1, 7))
    ]  # fmt: skip
    assert path.read_bytes().startswith(whole)
    assert list(tmp_path.glob(".*")) == [] and not capsys.readouterr().err

    files = sorted((tmp_path / "tensorboard" / "rl").iterdir())
    assert len(files) == 2  # even if both were opened within one second
    steps = [{e.step for e in _events(file) if e.summary.value} for file in files]
    purges = [[e.step for e in _events(file) if e.session_log.status] for file in files]
    assert sorted(zip(steps, purges, strict=True), key=str) == [({1, 2, 3, 4, 5}, []), ({4, 5, 6}, [4])]
    for step, lacks in ((7, ""), (9, "lacks 2 of the 9 steps")):  # a kill may lose the last one, a cut loses more
        with contextlib.closing(with_charts(tmp_path)) as writer:
            writer.truncate("rl", step)
        notice = capsys.readouterr().err
        assert lacks in notice and bool(lacks) == bool(notice)


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for broken in ("{", "[1]", '"x"', '{"step": 1}', '{"phase": "rl", "step": 1, "loss/total": "x"}'):
        path.write_text('{"phase": "rl", "step": 1}\n' + broken + "\n")
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .* delete it"):
            metrics.read(path)


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_of_a_growing_file_agrees_with_one_of_the_whole(tmp_path, seed):
    """The file grows by parts of lines, is cut, replaced, rewritten in place, broken, and deleted, as no one writer does."""
    rng, path = np.random.default_rng(seed), tmp_path / "metrics.jsonl"
    reader, text, step = metrics.Reader(path), b"", 0
    for _ in range(60):
        step += 1
        line = json.dumps({"phase": "rl", "step": step, "loss/total": rng.random(), "x/\u6f22": step}).encode() + b"\n"
        change = rng.choice(["append", "append", "part", "cut", "replace", "rewrite", "break", "delete"])
        if change == "part":
            line = line[: rng.integers(len(line))]
        kept = text[: text.rfind(b"\n") + 1]
        if change in ("cut", "replace", "rewrite"):
            kept = b"".join(kept.splitlines(keepends=True)[: rng.integers(8)])
        text = kept + (b"{\n" if change == "break" else line)
        if change in ("replace", "delete"):
            path.unlink(missing_ok=True)
        if change != "delete":
            path.write_bytes(text)
        else:
            text = b""
        lines = text.split(b"\n")[:-1]
        if b"{" in lines:
            with pytest.raises(ValueError, match=rf"metrics\.jsonl:{lines.index(b'{') + 1}: "):
                reader.records()
            text = text.replace(b"{\n", b"")
            path.write_bytes(text)
            lines = text.split(b"\n")[:-1]
        assert reader.records() == [json.loads(line) for line in lines]


def test_charts_that_a_full_disk_cuts_hide_no_other_error(tmp_path, monkeypatch):
    writer = with_charts(tmp_path)
    writer.write(1, "rl", {"loss/total": 1.0})
    (chart,) = writer.monitors._members["tensorboard"]._writers.values()

    def fail():
        raise OSError(errno.EFBIG, "File too large")

    with monkeypatch.context() as patch:
        patch.setattr(chart, "close", fail)
        writer.close()
    chart.close()


def test_other_hosts_write_and_print_nothing(tmp_path, capsys):
    writer = metrics.MetricsWriter(tmp_path / "run", active=False)
    writer.write(1, "rl", {"loss/total": 1.0})
    writer.truncate("rl", 0)
    writer.close()
    progress = metrics.Progress(active=False)
    progress.note("compiling")
    with progress.phase("rl", total=1) as bar:
        bar.update(1, {})
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_plain_lines_first_last_and_at_most_one_per_interval(capsys):
    clock = clock_lib.Clock()
    progress = metrics.Progress(clock=clock)
    progress.note("compiling train_step for [8, 256] ...")
    with progress.phase("rl", total=20) as bar:
        for step in range(1, 18):
            clock.now += 1.0
            bar.update(step, {"reward": step / 17, "kl": 3.1e-8, "tok/s": 8123.4})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling train_step for [8, 256] ..."
    assert lines[1].startswith("rl  step  1/20  reward 0.0588  kl 3.1e-08  tok/s 8.1k")
    assert [line.split()[2] for line in lines[1:]] == ["1/20", "6/20", "11/20", "16/20", "17/20"]
    assert len({line.index("kl") for line in lines[1:]}) == 1  # aligned
    assert lines[-1].endswith("1.00 s/step  eta 0:03")


def test_rate_after_resume_counts_only_own_steps_and_no_compilation(capsys):
    clock = clock_lib.Clock()
    with metrics.Progress(clock=clock).phase("rl", total=150, initial=100) as bar:
        clock.now += 60.0  # compiles, and waits for servers
        bar.update(101, {})
        assert bar.pace() == []
        for step in range(102, 112):
            clock.now += 2.0
            bar.update(step, {})
        assert bar.pace() == ["2.00 s/step", "eta 1:18"]
        clock.now += 78.0
        bar.update(150, {})
        assert bar.pace()[-1] == "took 2:38"
    assert "step 150/150" in capsys.readouterr().out


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_note_is_the_present_work_until_a_line_ends_it(is_terminal):
    stream, clock = io.StringIO(), clock_lib.Clock()
    stream.isatty = lambda: is_terminal
    progress = metrics.Progress(out=stream, clock=clock)
    progress.note("compiling the train step")
    assert progress.doing().startswith("compiling the train step, for 0:0")
    progress.say("ready")
    assert progress.doing() == "" and "compiling the train step" in stream.getvalue()


def test_a_terminal_gets_a_bar_and_one_line_per_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = metrics.Progress(out=stream, clock=clock_lib.Clock())
    progress.note("compiling [8, 256]")
    with pytest.raises(KeyboardInterrupt):
        with progress.phase("rl", total=3) as bar:
            for step in (1, 2):
                progress.say("held-out, version 1: avg@1 0.5")
                bar.update(step, {"reward": 0.5})
            raise KeyboardInterrupt
    text = stream.getvalue()
    assert "compiling [8, 256]  0.0 s" in text  # brackets are not markup
    assert text.count("step 1/3  reward 0.500") == text.count("step 2/3  reward 0.500") == 1
    assert re.search(r"compiling \[8, 256\].*0:00", text)
    with progress.phase("rl", total=3, initial=1):
        pass
    assert "━" in stream.getvalue() and stream.getvalue().count("step 1/3") == 1  # no step was done, so no line
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize(
    "value, text",
    [(0.433, "0.433"), (-0.0123, "-0.0123"), (8123.4, "8.1k"), (3.1e-8, "3.1e-08"), (256, "256"), (0.0, "0"),
     (999.7, "1.0k"), (123.4, "123"), (2.5e6, "2.5M"), (math.nan, "nan"), (-math.inf, "-inf"), ("ok", "ok")],
)  # fmt: skip
def test_format_value(value, text):
    assert metrics.format_value(value) == text


def test_format_seconds():
    assert [metrics.format_seconds(s) for s in (0.4, 59.6, 161, 3761)] == ["0:00", "1:00", "2:41", "1:02:41"]


def _events(path):
    """TFRecord framing: length, crc, bytes, crc."""
    data, events = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        assert record_writer.masked_crc32c(data[:8]).to_bytes(4, "little") == data[8:12]
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events
