"""A bfloat16 checkpoint is fine-tuned in float32: parameters that train, their moments, and adapters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf, lora
from rl.learning.batch import packing
from rl.learning.learner import optimizers, reference, train_step
from tests.support import small_learner as small

pytestmark = pytest.mark.usefixtures("compile_fast")
ADAMW = optimizers.OptimizerConfig(1e-6, 0, 0.9, 0.999, 1e-8, 0.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "model"
    model = dataclasses.replace(small.DENSE, param_dtype="bfloat16", dtype="bfloat16")
    hf.save(path, model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), small.params_of(small.DENSE)))
    return path


def begun(folder, dtype, adapters=None):
    """Returns (learner, state of step 0) of a folder, read in `dtype`; None for its own."""
    model = hf.read_config(folder, dtype=dtype)
    optimizer = train_step.make_optimizer(ADAMW, model, adapters)
    learner = small.make(model, "cross_entropy", {}, optimizer=optimizer, lora=adapters)
    params = reference.load(str(folder), model, learner.mesh)
    return learner, train_step.init_state(jax.random.key(0), learner, params)


def moved(folder, dtype):
    """Returns the change of all parameters in 50 steps, as one float64 vector."""
    learner, state = begun(folder, dtype)
    step, batch = train_step.jit_train_step(learner), packing.place(small.pack(), learner.mesh)
    flat = lambda params: np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(params)])  # noqa: E731
    before = flat(state.params)
    for _ in range(50):
        state, _ = step(state, batch)
    assert {str(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim} == {"float32"}
    return flat(state.params) - before


def test_a_bfloat16_folder_moves(folder):
    """50 AdamW steps of 1e-6: in bfloat16 alone 0.2 % of the entries would move."""
    change = np.abs(moved(folder, None))
    assert (change > 0).mean() > 0.95 and np.median(change) > 25e-6


@pytest.mark.slow
def test_a_bfloat16_folder_moves_as_in_float32(folder):
    """50 AdamW steps of 1e-6: in bfloat16 alone 0.2 % of the entries would move. Activations are bfloat16 in one run only."""
    narrow, wide = moved(folder, None), moved(folder, "float32")
    assert narrow @ wide / np.linalg.norm(narrow) / np.linalg.norm(wide) > 0.99
    assert np.linalg.norm(narrow) == pytest.approx(np.linalg.norm(wide), rel=0.01)


@pytest.mark.slow
def test_adapters_of_a_bfloat16_base_are_float32(folder):
    learner, state = begun(folder, None, lora.LoraConfig(rank=2))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), state.frozen)  # as a warm-up of all parameters leaves them
    again = train_step.init_state(jax.random.key(0), learner, wide)
    assert jax.tree.map(jax.typeof, again) == jax.tree.map(jax.typeof, state)
    assert {str(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(state.frozen)} == {"bfloat16"}
