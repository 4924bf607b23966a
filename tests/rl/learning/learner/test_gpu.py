"""The train step lowered for an NVIDIA GPU, on a machine without one: its attention and its experts are kernels."""

import importlib
import re

import jax
import pytest

from rl.experiment.plan import lowered_programs
from rl.learning.learner import train_step
from sharding.mesh import mesh as mesh_lib
from tests.support import small_configs

FAST = ("qwen3_30b_a3b",)  # a mixture, which has both kinds of kernels


def text_for_cuda(name: str) -> tuple[str, int, bool]:
    """Returns (the train step of a config, lowered, its row length, whether it is a mixture): rows are whole, and widths are tiny."""
    module, _, argument = name.partition(":")
    c = importlib.import_module(f"configs.{module}").get_config(*filter(None, [argument]))
    c.model.update(small_configs.DIMS)
    if c.model.num_experts:
        c.model.update(num_experts=4, experts_per_token=2, expert_ffn_dim=16, first_dense_layers=0)
    c.model.rope_dim = min(c.model.rope_dim, 4)
    c.init_from, c.inference.mesh.tensor = "", c.inference.mesh.tensor or 1
    c.sampling.max_tokens, c.evaluation.num_tasks = c.sampling.max_tokens or 64, c.evaluation.num_tasks or 1
    c.model.remat = {"auto": "block"}.get(c.model.remat, c.model.remat)
    for section, field, value in (("train", "row_length", 4096), ("train", "rows", 2), ("rl", "prompts_per_step", 4)):
        c[section][field] = c[section][field] or value
    c.inference.update(num_slots=c.inference.num_slots or 8, max_model_len=c.inference.max_model_len or 2048)
    for field in ("dtype", "param_dtype"):
        c.model[field] = {"auto": "bfloat16"}.get(c.model[field], c.model[field])
    exp, mesh = lowered_programs.resolve(c), mesh_lib.create({}, jax.devices()[:1])
    learner = exp.learner(mesh)
    with jax.set_mesh(mesh):
        traced = train_step.jit_train_step(learner).trace(train_step.abstract_state(learner), exp.abstract_batch(mesh))
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.as_text(), c.train.row_length, bool(exp.model.num_experts)


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in small_configs.NAMES]
)
def test_no_array_has_a_row_twice(name):
    """No array of the program has two dims of a row (or of its whole blocks): no mask, no bias, no scores."""
    text, T, is_mixture = text_for_cuda(name)
    lengths = {str(T), str(T + -T % 32), str(T + -T % 64)}  # 32 and 64: the blocks of float32 and bfloat16
    found = {dims for dims in re.findall(r"tensor<((?:\d+x)+)", text)}
    assert any(T_ in dims.split("x") for dims in found for T_ in lengths)  # the expression sees rows
    squared = {dims for dims in found if sum(dim in lengths for dim in dims.split("x")) > 1}
    assert not squared
    for kernel in ("attention_forward", "attention_dq", "attention_dkv"):
        assert kernel in text
    assert "ragged_dot" not in text
    assert ("grouped_product" in text and "grouped_gradient" in text) == is_mixture
