"""Work units: the FLOPs of a rollout, as workers claim them and validators count them.

They are those of the model's definition, not of an engine's program: 2 per parameter that a token is multiplied with (of experts, the
chosen and the shared ones), and per query head and key that it reads, 2 per dim of key and value (`models.flops.ModelFlops`).
"""

import functools

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import flops

_model_flops = functools.lru_cache(16)(flops.ModelFlops.of)


def flops_of(model: config_lib.ModelConfig, rollout: rollout_lib.Rollout) -> tuple[int, int]:
    """Returns (prompt, output) FLOPs. The output head counts per sampled token, as in INTELLECT-2: other logits are not asked for."""
    counted = _model_flops(model)
    prompt = counted.prefix_flops(rollout.prompt_length)
    head = 2 * counted.head * int(rollout.sampled_mask.sum())
    return prompt, counted.prefix_flops(len(rollout.tokens)) - prompt + head
