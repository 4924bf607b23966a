"""Calibration: limits and bands fit the measurements, and are read back."""

import json

import jax
import pytest

from rl.validator import calibrate
from rl.verification import verifier
from sharding import broadcast
from tests.support import commands, doubles


@pytest.mark.slow
def test_calibrated_limits_hold_what_was_measured(tmp_path):
    exp = doubles.experiment(prompts=2)
    validator = doubles.make_validator(prompts=2)
    variant = calibrate.VARIANTS["bfloat16"]
    rollouts = calibrate.variant_rollouts(exp, doubles.weights(0), 0, variant, 20, doubles.NODE)
    assert len(rollouts) == 20
    measured = calibrate.measure(validator, rollouts)
    assert measured.num_rollouts == 20 and measured.num_refused > 10  # float32 limits are none for bfloat16
    tolerance, bands = calibrate.limits([measured])
    assert tolerance.margin >= measured.margin > doubles.FLOAT32.margin and bands.logprob > measured.mean["logprob"] > 0
    loose = doubles.make_validator(tolerance, bands, prompts=2)
    assert all(verdict.accepted for verdict in loose.check_with_weights(rollouts))
    verifier.save_bands(tmp_path / "bands.json", tolerance, bands, {})
    assert verifier.load_bands(tmp_path / "bands.json") == (tolerance, bands)
    for text in ("", "{}", "[]", (tmp_path / "bands.json").read_text().replace('"margin": ', '"margin": -')):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="is not a bands file: "):
            verifier.load_bands(tmp_path / "bad.json")


@pytest.mark.slow
def test_a_mesh_is_a_variant(monkeypatch):
    exp = doubles.experiment(prompts=2)
    variant = calibrate.VARIANTS["tensor_parallel"]
    rollouts = calibrate.variant_rollouts(exp, doubles.weights(0), 0, variant, 4, doubles.NODE)
    assert all(v.accepted for v in doubles.make_validator(prompts=2).check_with_weights(rollouts))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert calibrate.variant_rollouts(exp, doubles.weights(0), 0, variant, 4, doubles.NODE) is None


def test_the_calibrate_command(tmp_path, capsys):
    exp = doubles.experiment(prompts=2)
    (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(exp.config.to_json())}))
    broadcast.publish(doubles.weights(0), 4, str(tmp_path / "weights"))
    command = ["calibrate", "--workdir", str(tmp_path), "--out", str(tmp_path / "bands.json"), "--rollouts", "8"]
    assert commands.run("rl.validator", *command, "--variants", "same") == 0
    assert "same: 8 rollouts" in capsys.readouterr().out
    body = json.loads((tmp_path / "bands.json").read_text())
    assert body["measured"]["version"] == 4 and verifier.load_bands(tmp_path / "bands.json")
    assert commands.run("rl.validator", *command, "--variants", "nonsense") == 1
    assert commands.run("rl.validator", "calibrate", "--workdir", str(tmp_path / "no"), "--out", "x") == 1
    for mistake in (["--rollouts", "0"], ["--out", str(tmp_path / "no" / "x")]):  # refused before anything is generated
        assert commands.run("rl.validator", *command, *mistake) == 1
    assert (
        commands.run("rl.validator", "serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path), "--slash", "-1")
        == 1
    )
    assert (
        commands.run("rl.validator", "serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path / "absent")) == 1
    )
    assert "is not a directory" in capsys.readouterr().err
