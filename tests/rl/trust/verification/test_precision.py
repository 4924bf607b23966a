"""Products of a float32 model are float32 products on every device: in the engine, in the replay, and in the train step.

Else a GPU rounds their operands to TF32 and a TPU to bfloat16, in each program in its own way, and the replay of an honest rollout
differs from its sampler by more than the run allows. A CPU rounds nothing, so the programs' text is read.
"""

import functools
import re

import jax
import numpy as np
import pytest

from inference.engine import compiled_steps, kv_cache
from rl.learning.batch import packing
from rl.learning.learner import train_step
from rl.trust.verification import replay
from tests.support import small_learner as small
from tests.support import tiny

MODEL = tiny.model(num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1)
PRODUCT = re.compile(r"(?:dot_general|ragged_dot)\b.*?: \(tensor<(?:\d+x)*([a-z]\w*)>")


def products(lowered):
    """Returns ({dtype of a product's left operand}, lines of float32 products at a lower precision) of a lowered program."""
    lines = [line for line in lowered.as_text().splitlines() if PRODUCT.search(line)]
    dtypes = {PRODUCT.search(line)[1] for line in lines}
    rounded = [line for line in lines if PRODUCT.search(line)[1] == "f32" and "HIGHEST" not in line]
    return dtypes, rounded


def engine(model):
    params, tokens = tiny.params(model, 0), np.zeros((2, 8), np.int32)
    state = compiled_steps.empty_slots(model, 2, 16)
    yield compiled_steps.prefill.lower(model, False, params, tokens, np.array([3, 8], np.int32))
    yield compiled_steps.generate.lower(model, 2, 16, False, 0, params, np.int32(2), None, state)
    yield compiled_steps.score.lower(model, params, tokens)


def replays(model):
    params, tokens = tiny.params(model, 0), np.zeros((2, 8), np.int32)
    cache = jax.eval_shape(functools.partial(kv_cache.create, model, 2, 8))
    yield replay._run_version.lower(model, params, tokens, tokens == 0, cache, None)


def learner(model):
    made = small.make(model)
    shapes = packing.abstract(packing.Layout(small.ROW, 2, 6), made.mesh)
    yield train_step.jit_train_step(made).lower(train_step.abstract_state(made), shapes)


@pytest.mark.parametrize("programs", [engine, replays, learner])
def test_products_of_float32_are_float32(programs):
    for lowered in programs(MODEL):
        dtypes, rounded = products(lowered)
        assert dtypes == {"f32"} and not rounded


@pytest.mark.slow
@pytest.mark.parametrize("programs", [engine, replays, learner])
def test_products_of_bfloat16_are_left_alone(programs):
    """Kernels of TPUs reject them with another precision."""
    for lowered in programs(tiny.model(dtype="bfloat16")):
        text = lowered.as_text()
        assert not [x for x in text.splitlines() if (m := PRODUCT.search(x)) and m[1] == "bf16" and "HIGHEST" in x]
        assert "bf16" in products(lowered)[0]
