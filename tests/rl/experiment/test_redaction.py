"""Trajectories that were trained on are dropped or encrypted, and the ledger is still checked by their hashes."""

import json

import pytest

from inference.rollouts import parquet
from rl.experiment import redaction
from rl.experiment.reporting import metrics
from rl.trust import audit
from tests.support import commands, recorded_run


@pytest.fixture
def run(tmp_path):
    return recorded_run.write(tmp_path, 4, prompts_per_step=2, samples_per_prompt=2)


def audited(folder):
    return audit.run(folder, metrics.Progress())


def test_dropped_steps_are_audited_by_their_digests(run):
    before = audited(run)
    assert not before.findings
    assert redaction.apply(run, 4, redaction.Rule("drop", keep_steps=2)) == [1, 2]
    assert redaction.apply(run, 4, redaction.Rule("drop", keep_steps=2)) == []  # nothing is left to do
    assert not recorded_run.path(run, 1).exists() and recorded_run.path(run, 3).exists()
    found = audited(run)
    assert not found.findings and found.num_redacted == 2 and "2 batches were redacted" in audit.table(found)
    assert found.checked["batch"] == 4 and found.checked["signature"] == before.checked["signature"] // 2

    path = run / "rollouts" / "step_1" / redaction.HASHES
    saved = json.loads(path.read_text())
    saved["groups"][min(saved["groups"])] = "0" * 64
    path.write_text(json.dumps(saved))
    assert any("step 1: batch" in line for line in audited(run).findings)
    path.write_text("{}")
    assert any("not a list of digests" in line for line in audited(run).findings)


def test_encrypted_steps_open_with_the_private_key_alone(run, tmp_path, capsys):
    data = recorded_run.path(run, 1).read_bytes()
    assert commands.run("rl.rollouts", "key", "--key", tmp_path / "reader.pem") == 0
    recipient = capsys.readouterr().out.strip()
    assert redaction.apply(run, 4, redaction.Rule("encrypt", 0, recipient)) == [1, 2, 3, 4]
    sealed = run / "rollouts" / "step_1" / redaction.SEALED
    assert data[40:80] not in sealed.read_bytes() and not audited(run).findings
    assert commands.run("rl.rollouts", "open", run, "--key", tmp_path / "reader.pem") == 0
    assert recorded_run.path(run, 1).read_bytes() == data and len(parquet.read(recorded_run.path(run, 4))) == 4
    assert audited(run).num_redacted == 0 and not audited(run).findings

    with pytest.raises(ValueError, match="cannot be opened"):
        redaction.open_sealed(sealed, redaction.load_or_create_key(tmp_path / "other.pem"))
    changed = bytearray(sealed.read_bytes())
    changed[-1] ^= 1
    sealed.write_bytes(changed)
    with pytest.raises(ValueError, match="cannot be opened"):
        redaction.open_sealed(sealed, redaction.load_or_create_key(tmp_path / "reader.pem"))
    assert redaction.apply(run, 4, redaction.Rule("drop", 1)) == [1, 2, 3] and not sealed.exists()


def test_a_kill_between_two_files_is_repaired(run, monkeypatch):
    unlink = redaction.pathlib.Path.unlink

    def killed(path, *args, **kwargs):
        if path.name == redaction.FILE:
            raise KeyboardInterrupt
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(redaction.pathlib.Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        redaction.apply(run, 4, redaction.Rule("drop", 3))
    assert audited(run).num_redacted == 0  # the file is still there, and counts
    monkeypatch.undo()
    assert redaction.apply(run, 4, redaction.Rule("drop", 3)) == [1] and not audited(run).findings


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (("hide",), "is unknown"),
        (("drop", -1), "at least 0"),
        (("encrypt", 1), "recipient = ''"),
        (("drop", 1, "a" * 64), "recipient = 'aaa"),
        (("encrypt", 1, "xyz"), "not a public key"),
    ],
)
def test_wrong_rules_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        redaction.Rule(*fields)


def test_a_folder_without_checkpoint_is_refused(tmp_path, capsys):
    assert commands.run("rl.rollouts", "drop", tmp_path, "--keep_steps", "1") == 1
    assert "has no checkpoint" in capsys.readouterr().err
