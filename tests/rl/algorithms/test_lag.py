"""A tabular policy trained on samples of an exact age: OAPL needs no ratios, so old samples teach as much as new ones."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl.algorithms import advantages, losses

NUM_PROMPTS, P, G, T, V = 4, 8, 8, 6, 4
LOSSES = {
    "oapl": ("optimal", {"beta": 1e-3}, {"num_streams": float(P * G)}),
    "masked_importance_sampling": ("group_mean", {"ratio_low": 0.5, "ratio_high": 5.0}, {}),
}


def train(name, lag, seed, steps):
    """Returns the probability of the right answers (six tokens of four each) after `steps` updates of Adam at 0.03."""
    rng, (advantage, options, extras) = np.random.default_rng(seed), LOSSES[name]
    target = rng.integers(0, V, (NUM_PROMPTS, T))
    theta = jnp.asarray(rng.normal(size=(NUM_PROMPTS, T, V)) * 0.3 + 1.2 * np.eye(V)[target], jnp.float32)
    optimizer = optax.adam(0.03)
    moments, past = optimizer.init(theta), collections.deque([np.asarray(theta)], maxlen=lag + 1)

    @jax.jit
    def update(theta, moments, prompt, tokens, mu, A):
        def loss(theta):
            logp = jnp.take_along_axis(jax.nn.log_softmax(theta)[prompt], tokens[..., None], axis=-1)[..., 0]
            arrays = logp, mu, A, jnp.ones(tokens.shape)
            ids = jnp.zeros(tokens.shape, jnp.int32)
            return losses.LOSSES[name](*arrays, denom=float(tokens.size), stream_ids_BT=ids, **extras, **options)[0]

        change, moments = optimizer.update(jax.grad(loss)(theta), moments)
        return optax.apply_updates(theta, change), moments

    for _ in range(steps):
        mu_NTV = np.asarray(jax.nn.log_softmax(past[0]))
        prompt = np.repeat(rng.integers(0, NUM_PROMPTS, P), G)
        tokens = (mu_NTV[prompt] + rng.gumbel(size=(P * G, T, V))).argmax(axis=-1)
        mu = np.take_along_axis(mu_NTV[prompt], tokens[..., None], axis=-1)[..., 0]
        rewards = (tokens == target[prompt]).all(axis=1).astype(float).reshape(P, G)
        A = np.stack([advantages.ADVANTAGES[advantage](group) * (group.std() > 0) for group in rewards])
        theta, moments = update(
            theta, moments, prompt, tokens, mu, np.repeat(A.reshape(-1, 1), T, axis=1).astype(np.float32)
        )
        past.append(np.asarray(theta))
    p = np.take_along_axis(np.asarray(jax.nn.softmax(theta)), target[..., None], axis=-1)[..., 0]
    return float(p.prod(axis=1).mean())


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_oapl_learns_more_from_samples_that_are_50_updates_old(seed):
    """After 150 updates; bench/results/algorithms.md has the curves. The other loss keeps only tokens with a ratio in [0.5, 5]."""
    regression, ratios = (train(name, 50, seed, 150) for name in LOSSES)
    assert regression > 0.85 and regression > ratios + 0.1, (regression, ratios)
