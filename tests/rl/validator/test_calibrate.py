"""Calibration: limits and bands fit the measurements, and are read back."""

import collections
import dataclasses
import importlib
import json
import math
import types

import jax
import numpy as np
import pytest

from configs import quickstart
from inference.proofs import toploc
from rl.validator import calibrate
from rl.verification import sequential_test, verifier
from tests.support import cheats, commands, doubles, proofs


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


@pytest.mark.parametrize(("num_massive", "limits"), [(4, toploc.PAPER), (0, toploc.LOOSEST), (4, toploc.LOOSEST)])
def test_limits_that_accept_proofs_of_other_texts_are_refused(num_massive, limits):
    """Massive channels, four of them, let the published limits accept the proof of one text for another."""
    rng, chunks = np.random.default_rng(0), []
    for _ in range(8):
        hidden_TD = rng.standard_normal((32, 256))
        hidden_TD[:, :num_massive] = 60 * (1 + 0.15 * rng.standard_normal((32, num_massive)))
        hidden_TD = hidden_TD.astype(toploc.jnp.bfloat16)
        chunks.append((hidden_TD, proofs.build(hidden_TD)[0]))
    measured = [types.SimpleNamespace(chunks=chunks)]
    if limits == toploc.PAPER or not num_massive:
        assert calibrate.check_other_texts(limits, measured) == 7
        return
    with pytest.raises(ValueError, match="accept [67] of 7 proofs of other texts; replay in the dtype"):
        calibrate.check_other_texts(limits, measured)


def test_scales_and_ties_hold_for_the_rollouts_they_were_measured_on():
    """A scale bounds the mean of every bet; shares of ties come from errors where none was seen, and elsewhere from counts."""
    rng = np.random.default_rng(1)
    for x in (rng.normal(0, 3, 500), rng.standard_t(3, 500), np.full(500, -0.5)):
        scale = calibrate._scale(x)
        bets = [
            np.exp(a * np.minimum(x / scale, sequential_test.MAX_SCALED) - a * a / 2) for a in sequential_test.SLOPES
        ]
        assert np.mean(bets, axis=1).max() <= 1 and scale < 12
    bands = dataclasses.replace(calibrate.FLOORS, tie_span=0.1)
    error_N, gap_N = rng.normal(0, 0.01, 4000), rng.uniform(0, 1, 4000)
    is_second_N = gap_N < np.abs(rng.normal(0, 0.01 * 2**0.5, 4000)) * rng.choice([0, 1], 4000)
    one = sequential_test.Evidence(0, 0, 0, np.zeros(4), 0.0, np.zeros(4000), error_N, gap_N, is_second_N)

    def variant(one):
        return types.SimpleNamespace(groups=[[one]], evidence=[one])

    shares = calibrate._ties(bands, [variant(one)])
    assert shares[0] == calibrate.LEAST_TIES and shares[-1] >= 0.5 and shares[2] < shares[6] < shares[10]
    for k, share in enumerate(shares):
        seen = is_second_N[bands.classes(gap_N) == k]
        assert share >= seen.sum() / max(len(seen), 50)
    quiet = calibrate._ties(
        bands, [variant(dataclasses.replace(one, error_N=np.zeros(4000), is_second_N=gap_N < 0.05))]
    )
    assert quiet[0] == calibrate.LEAST_TIES and min(quiet[2:4]) == 1.0  # 0.05 is the border of classes 1 and 2


def test_bands_on_sums_are_those_by_hand():
    """Three groups with copies, of other lengths; one rollout alone errs much, and downward."""
    rng, quiet = np.random.default_rng(5), np.zeros(4)
    texts = [[(1, 2), (1, 2), (3, 4, 5)], [(1,), (2, 3), (2, 4)], [(7, 8, 9), (7, 8, 1), (6,)]]
    rewards = (1.0, 0.0, 0.25)
    errors = [[rng.exponential(0.002, len(text)) - 0.001 for text in group] for group in texts]
    errors[0][2] -= 0.02
    groups = [
        [
            sequential_test.Evidence(0, np.abs(e).mean(), 0, quiet, r, np.array(t), e, quiet[: len(t)], quiet[: len(t)])
            for t, e, r in zip(*group, rewards, strict=True)
        ]
        for group in zip(texts, errors, strict=True)
    ]
    signs = [[np.clip(e / 0.0125, -1, 1).sum() for e in group] for group in errors]
    mean = sum(map(sum, signs)) / 19

    def deviation(texts, weights):
        sums = collections.Counter()
        for text, weight in zip(texts, weights, strict=True):
            sums.update({text[:n]: abs(weight) for n in range(len(text))})
        return math.sqrt(sum(value**2 for value in sums.values()))

    over, lean, favored, squares = {1: [], 3: []}, {1: [], 3: []}, [], 0.0
    for text, error, sign in zip(texts, errors, signs, strict=True):
        lengths = list(map(len, text))
        squares += (sum(sign) - mean * sum(lengths)) ** 2
        for size in (1, 3):
            for first in range(0, 3, size):
                part = slice(first, first + size)
                root = deviation(text[part], [1] * size)
                over[size].append((sum(np.abs(e).sum() for e in error[part]) - 0.01 * sum(lengths[part])) / root)
                lean[size].append((sum(sign[part]) - mean * sum(lengths[part])) / root)
        per_token = np.dot(rewards, lengths) / sum(lengths)
        weights = [reward - per_token for reward in rewards]
        favored.append(sum(w * (s - mean * n) for w, s, n in zip(weights, sign, lengths, strict=True)))
        favored[-1] /= deviation(text, weights)
    expected = {
        "scatter": calibrate._scale(*map(np.array, over.values())),
        "bias": 1.25 * (abs(mean) + 4 * math.sqrt(squares) / 19),
        "spread": calibrate._scale(
            *(side * np.array(x) for side in (1, -1) for x in (*lean.values(), favored, np.zeros(9)))
        ),
    }
    bands = dataclasses.replace(calibrate.FLOORS, logprob=0.0125)
    assert calibrate._sums(bands, groups) == pytest.approx(expected)
    for n, group in enumerate(groups):
        assert calibrate._scaled(bands, mean, group) == pytest.approx((over[3][n], lean[3][n], favored[n]))
    numbers = dict.fromkeys(("margin", "logprob", "routing", "exp_mismatches", "mantissa_mean", "mantissa_median"), 1.0)
    bound = dict.fromkeys(("margin", "logprob", "proof"), 0.01)
    counts = dict(sign_mismatches=0, mean={}, num_rollouts=9, num_tokens=19, num_refused=0)
    _, found = calibrate.limits([calibrate.Measured(**numbers, **counts, bound=bound, groups=groups)])
    square = np.mean(np.concatenate(sum(errors, [])) ** 2)
    assert found.shape == pytest.approx(calibrate.SAFETY * 16 * square)
    assert found.spread == pytest.approx(expected["spread"])  # bands.logprob is 1.25 times the bound


@pytest.mark.parametrize("easier", [0.0, 0.5])
def test_bands_on_sums_hold_where_some_prompts_are_easier_than_others(easier):
    """All samples of a prompt err less or more, so that a group is no sum of independent rollouts. The bets are those of the test itself."""
    rng = np.random.default_rng(2)

    def group():
        rate, lean = 0.01 * rng.lognormal(-(easier**2) / 2, easier), easier * rng.normal(0, 0.5)
        for first in range(8):
            error_N = rng.exponential(rate, 100) * rng.choice([-1, 1], 100, p=[0.5 - lean / 4, 0.5 + lean / 4])
            token_N, quiet = np.array([first, *range(99)]), np.zeros(100)
            logprob = np.minimum(np.abs(error_N), 1).mean()
            yield sequential_test.Evidence(
                0, logprob, 0, np.zeros(4), first % 2, token_N, error_N, quiet + 1, quiet.astype(bool)
            )

    bands = dataclasses.replace(calibrate.FLOORS, logprob=calibrate.BAND_SAFETY * 0.01)
    bands = dataclasses.replace(bands, **calibrate._sums(bands, [list(group()) for _ in range(64)]))
    gains = {"error": [], "bias": [], "advantage": []}
    for _ in range(200):
        test = sequential_test.SequentialTest(bands)
        test.add(list(group()))
        for name, found in gains.items():
            found.append(test.state()["log_wealth"][name])
    # Mutation seen to fail here: scales of rollouts alone.
    means = {name: np.exp(found).mean(axis=0).max() for name, found in gains.items()}
    assert max(means.values()) <= 1, means


def test_every_shipped_config_has_bands_for_its_family_and_dtype():
    """And they load; a name or a path works as well, and "" stands for none."""
    names = {path.stem for path in verifier.SHIPPED_BANDS.parent.glob("*.py")} - {"__init__", "presets", "tpu_gsm8k"}
    configs = [importlib.import_module(f"configs.{name}").get_config() for name in sorted(names)]
    for config in configs:
        config.model.dtype = {"auto": "bfloat16"}.get(config.model.dtype, config.model.dtype)  # rl/plan/sizes.py
    files = [verifier.bands_file(config) for config in configs]
    assert {file.name for file in files} == {"dense-float32-float32.json", "dense-bfloat16-bfloat16.json"} | {
        f"mixture-{dtype}-{dtype}.json" for dtype in ("float32", "bfloat16")
    }
    for file in sorted(verifier.SHIPPED_BANDS.glob("*.json")):
        tolerance, bands = verifier.load_bands(file)
        assert len(bands.ties) == sequential_test.TIE_WIDTHS and bands.tie_span == tolerance.margin
        about = json.loads(file.read_text())["measured"]
        assert about["proofs_of_other_texts"] > 100 and about["policies"] and about["date"], file
    config = quickstart.get_config()
    for bands, expected in (("mixture-bfloat16-float32", "mixture-bfloat16-float32.json"), ("a/b.json", "b.json")):
        config.trust.bands = bands
        assert verifier.bands_file(config).name == expected
    config.trust.bands = ""
    assert verifier.bands_file(config) is None


def test_the_calibrate_command(tmp_path, capsys, monkeypatch):
    cheats.write_run(tmp_path)
    command = ["calibrate", "--workdir", str(tmp_path), "--out", str(tmp_path / "bands.json"), "--rollouts", "16"]
    limits, found = calibrate.limits, []
    monkeypatch.setattr(calibrate, "limits", lambda measured: found.extend(measured) or limits(measured))
    assert commands.run("rl.validator", *command, "--variants", "same") == 0
    assert "same: 16 rollouts" in capsys.readouterr().out
    assert [len(group) for group in found[0].groups] == [8, 8] and found[0].bound["logprob"] > found[0].mean["logprob"]
    body = json.loads((tmp_path / "bands.json").read_text())
    assert body["measured"]["policies"][0]["version"] == 4 and verifier.load_bands(tmp_path / "bands.json")
    assert commands.run("rl.validator", *command, "--variants", "nonsense") == 1
    assert commands.run("rl.validator", "calibrate", "--workdir", str(tmp_path / "no"), "--out", "x") == 1
    for mistake in (
        ["--rollouts", "15"],
        ["--out", str(tmp_path / "no" / "x")],
    ):  # refused before anything is generated
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
    saved["config"]["env"] |= {"name": f"{own}:build", "digest": ""}  # code of a stranger's run
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
