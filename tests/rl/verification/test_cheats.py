"""Every double of tests/support/doubles.py against the real validator: honest rollouts pass, and each cheat is caught soon.

Fast: two groups each, on the backend that generated. Slow: 512 rollouts each, also across bfloat16 and float32.
"""

import pytest

from rl.validator import calibrate
from rl.verification import rules as rules_lib
from rl.verification import sequential_test
from tests.support import cheats, doubles

# The first rejection of each. A cheat that changes a few tokens may be seen by the draw or by the log-probability.
REPLAYED = {"sampling", "logprob", "termination", "shape", "toploc"}
REASONS = {
    "wrong_task": {"prompt", "task"},
    "reused_rollout": {"prompt"},
    "copied_proof": {"toploc"},
    "constant_proof": {"toploc"},
    "inflated_reward": {"reward"},
    "unsigned_change": {"signature"},
    "future_version": {"versions"},
    "other_expert": {"routing", "logprob"},  # near a tie, later differences are found first
    "other_experts": {"routing"},
}
# On random weights some rollouts stop after a token or two, and a tenth more heat does not change those.
LEAST_RATE = {"temperature_0.9": 0.3, "temperature_1.1": 0.3, "best_of_2": 0.2, "early_stop": 0.5}

# Several seconds each.
SLOW = "half_the_layers another_model int8_weights early_stop edited_4 edited_16 temperature_1.1 other_experts".split()


@pytest.mark.parametrize("honest", [doubles.honest, pytest.param(doubles.honest_mixture, marks=pytest.mark.slow)])
def test_honest_rollouts_pass(honest):
    caught = cheats.play(honest, 48, prompts=2)
    assert caught.num_rollouts == 48 and caught.rate == 0 and caught.worst_until == float("inf"), caught


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in doubles.CHEATS]
)
def test_each_cheat_is_caught(name):
    caught = cheats.play(doubles.CHEATS[name], 16, prompts=2)
    assert set(caught.reasons) <= REASONS.get(name, REPLAYED), caught
    assert caught.rate >= LEAST_RATE.get(name, 0.8), caught


@pytest.mark.slow
def test_no_false_alarm_and_every_cheat_within_32_rollouts_on_one_backend():
    for honest in (doubles.honest, doubles.honest_mixture):
        passed = cheats.play(honest, 2048)
        assert passed.rate == 0 and passed.worst_until == float("inf")
    for name, cheat in doubles.CHEATS.items():
        caught = cheats.play(cheat, 512)
        assert caught.worst_until <= 32, (name, caught)


# Weights that differ by no more than bfloat16 rounds: docs/performance.md has the number of rollouts they take.
WITHIN_ROUNDING = {"older_weights", "int8_weights"}


@pytest.mark.slow
@pytest.mark.parametrize("honest", [doubles.honest, doubles.honest_mixture])
@pytest.mark.parametrize("regime", ["bfloat16", "mixed"])
def test_no_false_alarm_and_the_other_cheats_within_32_rollouts_in_bfloat16(regime, honest):
    assert sequential_test.ALPHA < 1e-4
    mixture = honest in doubles.MIXTURES
    tolerance, bands = cheats.calibrated(2048, regime, mixture)
    passed = cheats.play(honest, 2048, tolerance, bands, regime)
    assert passed.rate == 0 and passed.worst_until == float("inf"), passed
    for name, cheat in doubles.CHEATS.items():
        if name not in WITHIN_ROUNDING and (cheat in doubles.MIXTURES) == mixture:
            caught = cheats.play(cheat, 512, tolerance, bands, regime)
            assert caught.worst_until <= 32, (name, caught)


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
