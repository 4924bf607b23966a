"""The objective of one micro-batch against sums written out in numpy, where the two policies that a ratio may mean differ."""

import dataclasses

import numpy as np
import pytest

from rl.experiment.reporting import diagnostics
from rl.learning.batch import packing
from rl.learning.learner import objective as objective_lib

PPO = {"clip_low": 0.2, "clip_high": 0.2}
OPTIONS = {"grpo": PPO, "dapo": PPO, "sapo": {"tau_positive": 1.0, "tau_negative": 1.05}}


def draw():
    """(micro-batch whose old log-probabilities are not the sampler's, logp, mask)."""
    rng = np.random.default_rng(0)
    shape = (2, 8)
    logp, old, sampler, reference = (rng.uniform(-3, -1, shape).astype(np.float32) for _ in range(4))
    mask = (rng.random(shape) < 0.7).astype(np.float32)
    integers = {name: np.zeros(shape, np.int32) for name in packing._INTEGERS}
    floats = {"loss_mask": mask, "behavior_logp": sampler, "advantage": mask, "temperature": np.ones(shape, np.float32)}
    batch = packing.TrainBatch(**integers, **floats, num_micro_batches=None, ref_logp=reference)
    return objective_lib.MicroBatches(batch, old), logp, mask


def counts(mask):
    one = np.float32(1)
    return objective_lib.Counts(mask.sum(), one, mask.sum(), mask.sum(), one, one, one)


@pytest.mark.parametrize("name", ["sampler", "reference"])
@pytest.mark.parametrize("old_logprobs", ["sampler", "learner"])
def test_the_kl_is_to_the_policy_that_kl_reference_names(name, old_logprobs):
    """It is to the sampler's log-probabilities, also where the ratios are taken against the learner's own."""
    micro_batch, logp, mask = draw()
    objective = objective_lib.Objective(
        old_logprobs=old_logprobs, kl_coef=0.5, kl_estimator="k2", kl_reference=name, policy_coef=2.0
    )
    other = micro_batch.batch.behavior_logp if name == "sampler" else micro_batch.batch.ref_logp
    total, metrics = objective.total(3.0, micro_batch, logp, np.zeros_like(logp), None, counts(mask))
    kl = (0.5 * (logp.astype(np.float64) - other) ** 2 * mask).sum() / mask.sum()
    assert float(metrics["loss/kl"]) == pytest.approx(kl, rel=1e-6)  # float32 sums of ten numbers
    assert float(total) == pytest.approx(2 * 3 + 0.5 * kl, rel=1e-6)
    if old_logprobs == "learner":
        log_r = micro_batch.old_logp.astype(np.float64) - micro_batch.batch.behavior_logp
        expected = ((np.expm1(log_r) - log_r) * mask).sum() / mask.sum()
        assert float(metrics["loss/sampler_kl"]) == pytest.approx(expected, rel=1e-5)


def test_a_kl_in_the_advantage_is_to_the_sampler_too():
    micro_batch, logp, mask = draw()
    objective = objective_lib.Objective(
        old_logprobs="learner", kl_coef=0.5, kl_estimator="k1", kl_place="advantage", kl_reference="sampler"
    )
    expected = np.where(mask > 0, 1 - 0.5 * (logp - micro_batch.batch.behavior_logp), 0)
    np.testing.assert_allclose(objective.advantage(micro_batch.batch, logp), expected, rtol=1e-6)


def test_the_kl_is_averaged_as_the_loss_of_its_paper():
    """GRPO and its kin have the mean over streams of the means over their tokens, all other losses the mean over tokens."""
    micro_batch, logp, mask = draw()
    segment_ids = np.int32([[1, 1, 1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    micro_batch = micro_batch.replace(batch=micro_batch.batch.replace(segment_ids=segment_ids))
    objective = objective_lib.Objective(kl_coef=1.0, kl_estimator="k2", kl_reference="reference")
    kl = 0.5 * (logp.astype(np.float64) - micro_batch.batch.ref_logp) ** 2
    streams = [(b, segment_ids[b] == n) for b in range(2) for n in (1, 2)]
    lengths = [mask[b][own].sum() for b, own in streams]
    assert len(set(lengths)) > 1 and min(lengths) > 0
    of_streams = np.mean([(kl[b] * mask[b])[own].sum() / n for (b, own), n in zip(streams, lengths, strict=True)])
    number = dataclasses.replace(counts(mask), streams=np.float32(4))
    for loss, expected in (("grpo", of_streams), ("sapo", of_streams), ("dapo", (kl * mask).sum() / mask.sum())):
        has_stream_means = objective_lib.bind(loss, OPTIONS[loss]).stream_means
        scores = logp, np.zeros_like(logp), None, number
        _, metrics = objective.total(0.0, micro_batch, *scores, has_stream_means)
        assert float(metrics["loss/kl"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("old_logprobs", ["sampler", "learner"])
def test_the_mismatch_of_mixed_tokens_is_shown_apart(old_logprobs):
    micro_batch, logp, mask = draw()
    mixed = mask * (np.arange(mask.size).reshape(mask.shape) % 3 == 0)
    micro_batch = micro_batch.replace(batch=micro_batch.batch.replace(mixed=mixed.astype(np.float32)))
    objective = objective_lib.Objective(old_logprobs=old_logprobs)
    _, metrics = objective.total(3.0, micro_batch, logp, np.zeros_like(logp), None, counts(mask))
    log_r = (logp if old_logprobs == "sampler" else micro_batch.old_logp) - np.float64(micro_batch.batch.behavior_logp)
    kl = np.expm1(log_r) - log_r
    values = {name: float(value) for name, value in metrics.items()} | {
        "loss/mismatch_kl": (kl * mask).sum() / mask.sum()
    }
    shown = diagnostics.derived(
        values
        | dict.fromkeys(("loss/mismatch_kl_dropped", "loss/clip_frac", "loss/ratio_mean"), 0.0)
        | {"loss/ratio_sq_mean": 1.0}
    )
    assert values["loss/mixed_frac"] == pytest.approx(mixed.sum() / mask.sum())
    assert shown["loss/mismatch_kl_per_mixed"] == pytest.approx(kl[mixed > 0].mean(), rel=1e-5)
    assert shown["loss/mismatch_kl_per_unmixed"] == pytest.approx(kl[(mask > 0) & (mixed == 0)].mean(), rel=1e-5)
