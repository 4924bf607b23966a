"""Every double of tests/support/doubles.py and forgeries.py against the real validator: honest rollouts pass, each cheat is caught soon.

Fast: two groups each, on the backend that generated. Slow: 128 rollouts each, also across bfloat16 and float32, with measured bands.
"""

import re

import pytest

from rl.trust.validator import calibrate
from rl.trust.verification import peers, sequential_test
from rl.trust.verification import rules as rules_lib
from tests.support import cheats, commands, doubles

pytestmark = pytest.mark.usefixtures("compile_fast")
# A part of their rollouts is as if honest, so 16 of them are too few; the test of 48 rollouts has them.
LATE = {"logit_bias_0.1", "old_tail_8", "runner_up_0.02", "runner_up_0.001", "temperature_0.97", "temperature_1.03"}
LATE |= {"logit_bias_1", "speculation_0.02"}

# Those that generate once more, or replay two versions or a mixture; of cheats that differ in size or direction, one is fast.
SLOW = (
    "half_the_layers another_model int8_weights early_stop edited_4 edited_16 temperature_0.9 temperature_1.1".split()
)
SLOW += "other_expert other_experts likeliest_stop best_of_2 shorter_of_2 hidden_top_k versions_half_old".split()
SLOW += ["prompt_keys_older", "older_weights", "another_prompt", "padded_length", "no_model_random_proofs"]
SLOW += [f"claims_{size}_{side}" for size in ("0.045", "0.0009") for side in ("up", "down", "random")]
SLOW += ["claims_0.045_advantage", *sorted(cheats.HARMLESS)]


@pytest.mark.parametrize("honest", [doubles.honest, pytest.param(doubles.honest_mixture, marks=pytest.mark.slow)])
def test_honest_rollouts_pass(honest):
    caught = cheats.play(honest, 48, prompts=2)
    assert caught.num_rollouts == 48 and caught.rate == 0 and caught.worst_until == float("inf"), caught


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in cheats.CHEATS
        if name not in LATE
    ],
)
def test_each_cheat_is_caught(name):
    caught = cheats.play(cheats.CHEATS[name], 16, *cheats.measured("float32", count=128), prompts=2)
    assert set(caught.reasons) <= cheats.REASONS.get(name, cheats.REPLAYED), caught
    if name in cheats.HARMLESS:
        assert caught.rate == 0, caught
    else:
        assert caught.rate >= cheats.LEAST_RATE.get(name, 0.8), caught


@pytest.mark.slow
def test_a_forger_with_proofs_of_the_right_form_is_found_without_any_replay_of_its_own():
    """It does 4 of 16 groups with right answers. Three steps convict it, once they are over; three honest workers pass."""
    flagged, others = cheats.play_among_others(cheats.CHEATS["no_model_random_proofs"], num_steps=3 + peers.OPEN_STEPS)
    assert flagged == (3 + peers.OPEN_STEPS) * 32 and others.startswith("0 of 3"), (flagged, others)


@pytest.mark.slow
def test_the_bench_prints_how_soon_a_cheat_is_caught(capsys):
    """It ended at its first option for a while."""
    options = ["--rollouts", 8, "--honest", 8, "--regimes", "float32", "--cheats", "no_model"]
    assert commands.run("bench.cheats", *options) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n  honest +8 +0.000 +inf +inf +\n  no_model +8 +1.000 +1.0 +1  toploc 8 \n", out), out
    assert "never replayed: flagged after" in out and "false alarms of honest workers: 0" in out


# Within the rounding of bfloat16 against float32, in rollouts of 31 tokens: bench/results/verification.md has how many they take. None moves a
# probability by more than honest backends do.
WITHIN_ROUNDING = {"older_weights", "old_tail_8", "logit_bias_0.1", "temperature_0.97", "temperature_1.03"}
WITHIN_ROUNDING |= {"versions_half_old", "prompt_keys_older", "runner_up_0.02", "runner_up_0.001"}
WITHIN_ROUNDING |= {f"claims_0.0009_{side}" for side in ("up", "down", "random", "advantage")}


@pytest.mark.slow
@pytest.mark.parametrize("first", [doubles.honest, doubles.honest_mixture])
@pytest.mark.parametrize("regime", ["float32", "mixed"])
def test_no_false_alarm_in_4096_and_every_cheat_within_48_rollouts(regime, first):
    assert sequential_test.ALPHA < 1e-4
    mixture = first in doubles.MIXTURES
    limits = cheats.measured(regime, mixture)
    passed = cheats.play(first, 512 if mixture else 4096, *limits, regime)
    assert passed.rate == 0 and passed.worst_until == float("inf"), passed
    for name, cheat in cheats.CHEATS.items():
        if (cheat in doubles.MIXTURES) == mixture and name not in cheats.HARMLESS | (
            WITHIN_ROUNDING if regime == "mixed" else set()
        ):
            caught = cheats.play(cheat, 128, *limits, regime)
            assert caught.worst_until <= 48, (name, caught)


@pytest.mark.slow
def test_two_thousand_honest_rollouts_of_all_variants_pass_at_the_default_limits():
    """Other batch sizes, prefill batches, decode chunkings and a mesh: one refusal would be one too many."""
    limits = rules_lib.Tolerance.of(doubles.experiment().config.trust)
    validator, count = doubles.make_validator(limits, doubles.EXACT), 0
    for name in ("same", "small_batch", "single_steps", "long_calls", "float32", "tensor_parallel"):
        variant = calibrate.VARIANTS[name]
        rollouts = calibrate.variant_rollouts(doubles.experiment(), doubles.weights(0), 0, variant, 352, doubles.NODE)
        rejected = [verdict for verdict in validator.check_with_weights(rollouts) if not verdict.accepted]
        assert not rejected, (name, rejected)
        count += len(rollouts)
    assert count >= 2000
