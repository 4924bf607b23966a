"""The reference policy, which does not train: it scores the sampled tokens for a KL penalty or for distillation.

It is the policy that RL began with, or, with `objective.reference_model`, a Hugging Face checkpoint of any family and size
with the same token ids (on-policy distillation: a large teacher scores the student's own samples).
"""

import dataclasses
from collections.abc import Callable

import jax

from models import config as config_lib
from models import hf, transformer
from rl.learning.batch import packing
from rl.learning.learner import objective as objective_lib
from rl.learning.learner import train_step
from sharding.mesh import rules

Score = Callable[[packing.TrainBatch], jax.Array]


def make(learner: train_step.Learner, initial: Callable[[], transformer.Params], *, vocab_size: int) -> Score | None:
    """Returns a function batch -> log-probabilities [M, B, T] under the reference policy; None if the objective needs none.

    Each token has its own temperature. Unless the reference is a checkpoint, `initial` returns the parameters that RL began with.
    Raises ValueError if the checkpoint is unreadable, or its vocabulary is too small.
    """
    objective = learner.objective
    if not objective.needs_reference:
        return None
    model, path = model_of(objective, learner.model, vocab_size), objective.reference_model
    scorer = dataclasses.replace(learner, model=model, objective=objective_lib.Objective(), lora=None)
    params = load(path, model, learner.mesh) if path else initial()
    return lambda batch: train_step.score(scorer, params, batch)


def load(path: str, model: config_lib.ModelConfig, mesh: jax.sharding.Mesh) -> transformer.Params:
    """Loads the parameters of a Hugging Face checkpoint with the config `model`, sharded over `mesh`."""
    shardings = rules.shardings(transformer.specs(model), mesh)
    return hf.load(path, dtype=model.param_dtype, shardings=shardings, scan_layers=model.scan_layers)[1]


def model_of(
    objective: objective_lib.Objective, policy: config_lib.ModelConfig, vocab_size: int
) -> config_lib.ModelConfig:
    """Returns the model config of the reference policy: the policy's, or the checkpoint's with the policy's dtype and kernels.

    Raises ValueError if the checkpoint's vocabulary is smaller than the tokenizer's `vocab_size`.
    """
    path = objective.reference_model
    if not path:
        return policy
    model = hf.read_config(path, dtype=policy.param_dtype, scan_layers=policy.scan_layers)
    if model.vocab_size < vocab_size:
        raise ValueError(
            f"objective.reference_model = {path!r} has {model.vocab_size} token ids, but the tokenizer has {vocab_size}; "
            f"choose a checkpoint with the same tokenizer"
        )
    how = ("dtype", "attention", "grouped_matmul")
    return dataclasses.replace(model, **{field: getattr(policy, field) for field in how})
