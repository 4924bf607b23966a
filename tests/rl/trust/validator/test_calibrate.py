"""Calibration: limits and bands fit the measurements, and are read back."""

import json

import jax
import numpy as np
import pytest

from rl.trust.validator import calibrate
from rl.trust.verification import measurement, run_bands
from tests.support import cheats, commands, doubles


@pytest.mark.slow
def test_calibrated_limits_hold_what_was_measured(tmp_path):
    exp = doubles.experiment(prompts=2)
    validator = doubles.make_validator(prompts=2)
    variant = calibrate.VARIANTS["bfloat16"]
    rollouts = calibrate.variant_rollouts(exp, doubles.weights(0), 0, variant, 20, doubles.NODE)
    assert len(rollouts) == 20
    measured = calibrate.measure(validator, rollouts)
    assert measured.num_rollouts == 20
    tolerance, bands = measurement.limits([measured])
    assert tolerance.margin >= measured.margin_N.max() > doubles.FLOAT32.margin
    assert bands.logprob > np.mean([bands.errors(one).mean() for one in measured.evidence]) > 0
    loose = doubles.make_validator(tolerance, bands, prompts=2)
    assert all(verdict.accepted for verdict in loose.check_with_weights(rollouts))
    run_bands.save(tmp_path / "bands.json", tolerance, bands, {})
    assert run_bands.load(tmp_path / "bands.json") == (tolerance, bands)
    for text in ("", "{}", "[]", (tmp_path / "bands.json").read_text().replace('"margin": ', '"margin": -')):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="is not a bands file: "):
            run_bands.load(tmp_path / "bad.json")


def test_the_calibrate_command(tmp_path, capsys, monkeypatch):
    cheats.write_run(tmp_path)
    command = ["calibrate", "--workdir", str(tmp_path), "--out", str(tmp_path / "bands.json"), "--rollouts", "16"]
    limits, found = measurement.limits, []
    monkeypatch.setattr(measurement, "limits", lambda measured: found.extend(measured) or limits(measured))
    assert commands.run("rl.validator", *command, "--variants", "tensor_parallel") == 0
    assert "tensor_parallel: 16 rollouts" in capsys.readouterr().out
    assert [len(group) for group in found[0].groups] == [8, 8]
    assert found[0].numbers()["error_1"] < 1e-4
    body = json.loads((tmp_path / "bands.json").read_text())
    assert body["measured"]["policies"][0]["version"] == 4 and run_bands.load(tmp_path / "bands.json")
    assert commands.run("rl.validator", *command, "--variants", "nonsense") == 1
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        assert commands.run("rl.validator", *command, "--variants", "tensor_parallel") == 1
    assert "all need more than 1 devices" in capsys.readouterr().err
    assert commands.run("rl.validator", "calibrate", "--workdir", str(tmp_path / "no"), "--out", "x") == 1
    # refused before anything is generated
    for mistake in (["--rollouts", "15"], ["--out", str(tmp_path / "no" / "x")]):
        assert commands.run("rl.validator", *command, *mistake) == 1
    assert (
        commands.run("rl.validator", "serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path), "--slash", "-1")
        == 1
    )
    assert (
        commands.run("rl.validator", "serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path / "absent")) == 1
    )
    assert "is not a directory" in capsys.readouterr().err
    own, saved = tmp_path / "weights" / "own_code.py", json.loads((tmp_path / "config.json").read_text())
    own.write_text("import pathlib\n\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    own_loss = saved["config"] | {"rl": saved["config"]["rl"] | {"loss": f"{own}:loss"}}  # code of a stranger's run
    (tmp_path / "config.json").write_text(json.dumps({"config": own_loss}))
    assert calibrate.load_experiment(tmp_path).config.rl.loss == "cross_entropy"
    assert not own.with_suffix(".ran").exists()
    saved["config"]["env"] |= {"name": f"{own}:build", "digest": ""}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert commands.run("rl.validator", *command) == 1
    assert "give the folder that has it with --code" in capsys.readouterr().err and not own.with_suffix(".ran").exists()


def test_files_of_any_worker_are_refused_where_only_the_orchestrator_knows_the_tasks(tmp_path, capsys):
    cheats.write_run(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["config"]["rl"]["curriculum"], saved["config"]["env"]["num_tasks"] = "pools", 100
    (tmp_path / "config.json").write_text(json.dumps(saved))
    command = ["serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path)]
    assert commands.run("rl.validator", *command) == 1
    assert "only the orchestrator knows; leave --rollouts out" in capsys.readouterr().err
