"""Training under top-k and top-p: samples of the real scheduler and engine, packed by the rules for credit, through the train step."""

import dataclasses

import jax
import numpy as np
import pytest

from inference.rollouts import kept_sets
from rl.learning.batch import credit, packing
from rl.learning.learner import train_step
from tests.rl.trust.verification import test_verifier
from tests.support import small_learner as small

pytestmark = pytest.mark.usefixtures("compile_fast")
MODEL = test_verifier.MODEL


@pytest.mark.parametrize(
    "filters",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({"top_k": 20}, {"top_p": 0.9})),
        {"top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
def test_the_mean_ratio_is_1_at_lag_0(filters):
    """Within 1e-4, as rounding is; over all tokens it would be far below 1, and so it is one version later."""
    width = kept_sets.width(kept_sets.OFF | filters, MODEL.vocab_size)
    config = dataclasses.replace(test_verifier.CONFIG, kept_tokens=width)
    asked = dataclasses.replace(test_verifier.HONEST, **filters, temperature=0.8, kept_tokens=True)
    group = test_verifier.rollouts_of(asked, config=config, with_kept=True)
    group = [dataclasses.replace(one, reward=float(one.sample % 2)) for one in group]
    trees, _ = credit.Credit(kept=width).assign([group])
    batch = packing.pack(trees, packing.Layout(256, 1, 2, kept=width))
    options = {"ratio_low": 0.0, "ratio_high": 1e9}
    learner = small.make(MODEL, "masked_importance_sampling", options)
    step = train_step.jit_train_step(learner)

    def metrics(batch, version):
        state = train_step.init_state(jax.random.key(0), learner, test_verifier.params(version))
        return {name: float(x) for name, x in step(state, packing.place(batch, learner.mesh))[1].items()}

    found = metrics(batch, 0)
    assert found["loss/num_tokens"] == sum(one.sampled_mask.sum() for one in group) > 100
    assert found["loss/ratio_mean"] == pytest.approx(1, abs=1e-4) and found["loss/mismatch_kl"] < 1e-7
    assert found["loss/ratio_sq_mean"] == pytest.approx(1, abs=1e-4)  # not only on average
    assert metrics(batch.replace(kept=None), 0)["loss/ratio_mean"] < 0.95
    # Another policy differs; its ratios are over the sampler's sets, of which one entry is always 1.
    later = metrics(batch, 1)
    assert later["loss/mismatch_kl"] > 0.1 and np.isfinite(later["loss/grad_norm"])
