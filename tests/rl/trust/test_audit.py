"""An audit finds nothing in an honest run, and names step, group, worker, and rule of each change to one."""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import sqlite3

import numpy as np
import pytest

from rl.experiment import report
from rl.protocol import curriculum
from rl.protocol.ledger import run_ledger, run_rules
from rl.trust import audit
from sharding.weights import bucket
from tests.support import recorded_run

STEPS, P, G = 4, 32, 8


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = recorded_run.write(tmp_path_factory.mktemp("run"), STEPS)
    (folder / "metrics.jsonl").write_text(f'{{"phase": "rl", "step": {STEPS}}}\n')
    return folder


def findings(workdir, capsys):
    """Returns the exit code, and the lines of errors as {(step, group): rules}; None where a place is not named."""
    code = audit.main([str(workdir)])
    captured = capsys.readouterr()
    found: dict = {}
    for line in captured.err.splitlines():
        place, _, rest = line.removeprefix("error: ").partition(": ")
        if place in audit.RULES:
            place, rest = "", f"{place}: {rest}"
        named = {part.split()[0]: part.split()[1] for part in place.split(", ") if part}
        where = tuple(int(named[name]) if name in named else None for name in ("step", "group"))
        found.setdefault(where, set()).add(rest.partition(":")[0])
    return code, found, captured


@pytest.mark.parametrize("num_steps", [STEPS, pytest.param(140, marks=pytest.mark.slow)])
def test_an_honest_run_of_the_quickstarts_size_is_clean(tmp_path, capsys, honest, num_steps):
    workdir = honest if num_steps == STEPS else recorded_run.write(tmp_path, num_steps)
    code, found, captured = findings(workdir, capsys)
    assert (code, found) == (0, {})
    words = [line.split() for line in captured.out.splitlines()]
    rows = {row[0]: row[1] for row in words if row[0] in audit.RULES}
    num_groups, num_rollouts = num_steps * P, num_steps * P * G
    assert rows["seed"] == rows["signature"] == f"{num_rollouts:,}" and rows["submitted"] == f"{num_groups:,}"
    assert 0 < int(rows["draw"].replace(",", "")) < num_groups // 2  # those of the invited worker that were not drawn
    assert f"{num_groups:,} groups, {num_rollouts:,} rollouts of 2 workers: no findings" in captured.out


def test_a_run_in_a_bucket_is_audited_and_reported(tmp_path, capsys, honest, monkeypatch):
    url = f"file://{tmp_path}/bucket/run"
    monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / "here"))
    with bucket.mirrored(url):
        shutil.copytree(honest, bucket.local_folder(url), dirs_exist_ok=True)
    for cache in ("here", "elsewhere"):
        monkeypatch.setenv("INTELLAX_BUCKET_CACHE", str(tmp_path / cache))
        assert findings(url, capsys)[:2] == (0, {})
        assert report.main([url]) == 0 and cache in capsys.readouterr().out
    assert audit.main([f"{url}/no"]) == report.main([f"{url}/no"]) == 1
    assert capsys.readouterr().err.count(f"{url}/no is not the working directory of a run; correct the URL") == 2


GROUP, STEP, SAMPLE = 37, 2, 5


def drop(kind):
    """Deletes one event about the group from the ledger's file."""

    def change(folder):
        with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as db, db:
            rows = db.execute("SELECT seq, event FROM entries").fetchall()
            place = (b'"group":%d,' % GROUP, b'"kind":"%s"' % kind.encode())
            wanted = (b'"step":%d,' % STEP, place[1]) if kind == "batch" else place
            (first, *_) = [seq for seq, event in rows if all(part in event for part in wanted)]
            assert db.execute("DELETE FROM entries WHERE seq = ?", (first,)).rowcount == 1

    return change


def of_sample(change):
    """Changes one rollout of the group in the file of its batch, without a new signature."""
    return lambda folder: recorded_run.rewrite(folder, STEP, lambda rollouts: [*map(only(change), rollouts)])


def only(change):
    return lambda one: change(one) if (one.task.group, one.sample) == (GROUP, SAMPLE) else one


def repeat(folder):
    earlier = recorded_run.parquet.read(recorded_run.path(folder, 1))[-G:]
    recorded_run.rewrite(folder, STEP, lambda rollouts: [*rollouts, *earlier])


def flip_byte(file, last=b""):
    """Changes the middle of a file, or the `last` such bytes: parts of a database are not in use."""

    def change(folder):
        path = folder / file
        data = bytearray(path.read_bytes())
        data[data.rindex(last) if last else len(data) // 2] ^= 1
        path.write_bytes(data)

    return change


FILE = f"rollouts/step_{STEP}/accepted.parquet"
LOST = {(None, None): {"ledger", "manifest"}} | {(step, None): {"batch"} for step in range(STEP, STEPS + 1)}


@pytest.mark.parametrize(
    ("change", "expected", "text"),
    [
        (
            of_sample(recorded_run.flip),
            {(STEP, GROUP): {"signature", "submitted"}, (STEP, None): {"batch"}},
            f"step {STEP}, group {GROUP}, worker {recorded_run.STRANGER.worker[:16]}: ",
        ),
        (flip_byte(FILE), {(STEP, None): {"file"}}, ""),
        (lambda folder: (folder / FILE).unlink(), {(STEP, None): {"file"}}, ""),
        (
            repeat,
            {(STEP, None): {"batch"}, (STEP, P - 1): {"group", "task", "submitted"}},
            "in the batch of step 1, too",
        ),
        (flip_byte(f"weights/v{STEPS:08d}/manifest.json"), {(None, None): {"manifest"}}, ""),
        (flip_byte("ledger.db", b'"kind":"verdict"'), None, "is bad at entry"),
        *(
            (drop(kind), LOST, "entry missing: the next entry has number")
            for kind in ("lease", "submission", "verdict", "batch")
        ),
    ],
    ids="bit byte file repeated manifest ledger lease submission verdict batch".split(),
)
def test_a_change_to_the_files_is_named(tmp_path, capsys, honest, change, expected, text):
    workdir = shutil.copytree(honest, tmp_path / "run")
    change(workdir)
    code, found, captured = findings(workdir, capsys)
    assert code == 1 and found == (expected or found) and text in captured.err


def of_versions(version):
    return lambda one: dataclasses.replace(one, versions=np.full_like(one.versions, version))


@pytest.mark.parametrize(
    ("change", "rules", "text"),
    [
        (lambda one: dataclasses.replace(one, seed=one.seed ^ 1), {"seed"}, "is prescribed for sample 5, got"),
        (of_versions(0), {"staleness"}, "version 0 is older than 1, the oldest that this step takes"),
        (of_versions(3), {"staleness"}, "version 3 is newer than 2"),
        (
            lambda one: dataclasses.replace(one, prefix_versions=np.array([[0, 1, 0]], np.int32)),
            {"staleness"},
            "version 0 is older than 1, the oldest that this step takes",
        ),
        (lambda one: dataclasses.replace(one, epoch=7), {"version"}, "it is of epoch 7, and the batch of epoch"),
        (lambda one: dataclasses.replace(one, temperature=0.9), {"task"}, "temperature is 0.9, and 1.0 is prescribed"),
        (lambda one: dataclasses.replace(one, sample=6), {"group", "seed"}, "expected samples 0..7 once each"),
        (
            lambda one: dataclasses.replace(one, task=dataclasses.replace(one.task, index=one.task.index ^ 1)),
            {"task"},
            "task is ",
        ),
    ],
)
def test_a_signed_rollout_that_breaks_the_schedule_is_named(tmp_path, capsys, change, rules, text):
    group = 3 * 2 - 1  # the last of step 3
    changed = lambda one: change(one) if (one.task.group, one.sample) == (group, 5) else one  # noqa: E731
    workdir = recorded_run.write(tmp_path, 3, changed, prompts_per_step=2)
    code, found, captured = findings(workdir, capsys)
    assert (code, found) == (1, {(3, group): rules}) and text in captured.err


@pytest.mark.parametrize(("recorded", "is_clean"), [(0.99, False), (recorded_run.INVITED_RATE, True)])
def test_groups_that_were_drawn_for_a_verdict_and_have_none_are_named(tmp_path, capsys, recorded, is_clean):
    """The rate is that of the ledger: the config may have changed with a resume."""
    workdir = recorded_run.write(tmp_path, 2, rates={"min_rate": 0.05, "invited_rate": recorded})
    config = json.loads((workdir / "config.json").read_text())
    if recorded != 0.99:
        config["config"]["trust"]["invited_rate"] = 0.99
    (workdir / "config.json").write_text(json.dumps(config))
    code, found, captured = findings(workdir, capsys)
    if is_clean:
        assert (code, found) == (0, {})
        return
    assert code == 1 and set().union(*found.values()) == {"draw"} and "below the rate 0." in captured.err
    assert {group % 2 for _, group in found} == {0}  # of the invited worker


@pytest.mark.parametrize("of", [1, 2, 3])
def test_a_dropped_group_that_is_in_a_batch_is_named(tmp_path, capsys, monkeypatch, of):
    """A ledger whose own rules let it through drops a group with batch 2 that batch `of` has."""
    record = run_ledger.RunLedger.batch

    def batch(self, step, *fields, **options):
        return record(self, step, *fields, **options, dropped=[(of, 2 * of - 1)] if step == 2 else ())

    monkeypatch.setattr(run_ledger.RunLedger, "batch", batch)
    monkeypatch.setattr(run_rules.RunState, "_batch_error", lambda self, fields: None)
    workdir = recorded_run.write(tmp_path, 3, prompts_per_step=2)
    code, found, captured = findings(workdir, capsys)
    assert (code, found) == (1, {(of, 2 * of - 1): {"dropped"}})
    assert "it was dropped with the batch of step 2" in captured.err


def test_a_batch_that_was_not_trained_on_is_left_out(tmp_path, capsys, honest):
    workdir = shutil.copytree(honest, tmp_path / "run")
    shutil.copytree(workdir / "rollouts" / "step_1", workdir / "rollouts" / f"step_{STEPS + 1}")
    assert findings(workdir, capsys)[0] == 0
    (workdir / "metrics.jsonl").write_text(f'{{"phase": "rl", "step": {STEPS + 1}}}\n')
    code, found, _ = findings(workdir, capsys)
    assert code == 1 and "batch" in found[STEPS + 1, None]


def test_steps_that_a_resume_took_back_are_left_out_until_they_are_made_again(tmp_path, capsys, honest):
    """The audit of a run whose learner was starting again named the steps after its checkpoint, whose metrics were still there."""
    workdir = shutil.copytree(honest, tmp_path / "run")
    lines = "".join(f'{{"phase": "rl", "step": {step}}}\n' for step in range(1, STEPS + 1))
    (workdir / "metrics.jsonl").write_text(lines)
    with run_ledger.RunLedger(workdir / "ledger.db", recorded_run.KEEPER, recorded_run.RUN.worker) as ledger:
        ledger.resumed(STEPS - 2)
    code, found, captured = findings(workdir, capsys)
    assert (code, found) == (0, {}) and f"{STEPS - 2} batches" in captured.out
    (workdir / "metrics.jsonl").write_text(lines + f'{{"phase": "rl", "step": {STEPS + 1}}}\n')
    assert findings(workdir, capsys)[0] == 1


def test_a_run_that_resumes_during_its_audit_is_audited_again(tmp_path, capsys, monkeypatch, honest):
    workdir, read = shutil.copytree(honest, tmp_path / "run"), audit.run_history.read

    def resume(file):
        history = read(file)
        if (workdir / "metrics.jsonl").exists():
            with run_ledger.RunLedger(file, recorded_run.KEEPER, recorded_run.RUN.worker) as ledger:
                ledger.resumed(STEPS - 2)
            (workdir / "metrics.jsonl").unlink()
            recorded_run.path(workdir, STEPS).unlink()
        return history

    monkeypatch.setattr(audit.run_history, "read", resume)
    assert findings(workdir, capsys)[:2] == (0, {})


def test_a_directory_without_a_run_is_one_line(tmp_path, capsys):
    assert audit.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_that_goes_on_during_its_audit_is_clean(tmp_path, capsys, monkeypatch):
    """The ledger has no event of the newest version yet; an old version goes before it is read, and others come after the ledger's end."""
    record, read, read_bytes = run_ledger.RunLedger.published, audit.run_history.read, pathlib.Path.read_bytes
    with monkeypatch.context() as patch:
        patch.setattr(run_ledger.RunLedger, "published", lambda self, v, *rest: v == 2 or record(self, v, *rest))
        workdir = recorded_run.write(tmp_path, 2, prompts_per_step=2)

    def go_on(ledger):
        history = read(ledger)
        (workdir / "metrics.jsonl").write_text('{"phase": "rl", "step": 3}\n')
        (later := workdir / "weights" / "v00000003").mkdir()
        (later / "manifest.json").write_text("newer than the history")
        return history

    def prune(path):
        if path.parent.name == "v00000000":
            path.unlink(missing_ok=True)
        return read_bytes(path)

    monkeypatch.setattr(audit.run_history, "read", go_on)
    monkeypatch.setattr(pathlib.Path, "read_bytes", prune)
    assert findings(workdir, capsys)[:2] == (0, {})


POOLS = {"curriculum": "pools", "num_tasks": 20, "prompts_per_step": 3, "samples_per_prompt": 2}


def test_draws_of_a_curriculum_are_recomputed(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    recorded_run.write(run, 6, **POOLS)
    code, found, captured = findings(run, capsys)
    assert code == 0 and not found and re.search(r"curriculum +6 +0", captured.out)

    def changed(name, change):
        folder = tmp_path / name
        shutil.copytree(run, folder)
        path = folder / "rollouts" / "step_2" / curriculum.FILE
        saved = json.loads(path.read_text())
        change(saved["results"])
        path.write_text(json.dumps(saved))
        return findings(folder, capsys)

    # The results decide later draws, so that the tasks of later batches may be wrong, too.
    for name, change, text in (
        ("reward", lambda results: results[0].__setitem__(3, 7.0), "not that of its rollouts"),
        ("a little", lambda results: results[0].__setitem__(3, 0.25), "the digest is"),
        ("task", lambda results: results[0].__setitem__(2, (results[0][2] + 1) % 20), "a task that was not drawn"),
        ("missing", lambda results: results.pop(), "has no result"),
    ):
        code, found, captured = changed(name, change)
        assert code == 1 and "curriculum" in found[2, None] and text in captured.err, name
    (run / "rollouts" / "step_3" / curriculum.FILE).unlink()
    code, found, captured = findings(run, capsys)
    assert code == 1 and "curriculum" in found[3, None] and "No such file" in captured.err


def test_a_task_that_was_not_drawn_is_named(tmp_path, capsys):
    def other(rollout):
        if (rollout.step, rollout.task.group) != (4, 10):
            return rollout
        return dataclasses.replace(rollout, task=dataclasses.replace(rollout.task, index=(rollout.task.index + 1) % 20))

    code, found, _ = findings(recorded_run.write(tmp_path, 5, other, **POOLS), capsys)
    assert code == 1 and found == {(4, 10): {"task"}}
