"""What a rollout is worth: the FLOPs that it took, as nodes claim them and validators count them.

Those of the matrix products of the model as it is defined, not as an engine runs it: 2 per weight that a token is multiplied with
(rl/plan/roofline.py counts them in the model's own tree: of experts the chosen and the shared ones, of latent attention its projections)
and, per query head and key that is read, 2 for each dim of the key and of the value. A sliding layer reads its window.
"""

import functools

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import flops


def flops_of(model: config_lib.ModelConfig, rollout: rollout_lib.Rollout) -> tuple[int, int]:
    """(prompt, output) FLOPs. The head counts where a token was sampled, as INTELLECT-2 counts only what a worker is asked for."""
    work = _work(model)

    def before(end: int) -> int:  # of the tokens at positions 0 .. end - 1
        return 2 * end * (work.multiplied - work.head) + _attention_flops(model, end)

    num_prompt, num_tokens = rollout.prompt_length, len(rollout.tokens)
    head = 2 * work.head * int(rollout.sampled_mask.sum())
    return before(num_prompt), before(num_tokens) - before(num_prompt) + head


_work = functools.lru_cache(16)(flops.ModelFlops.of)


def _attention_flops(model: config_lib.ModelConfig, end: int) -> int:
    """Token n reads n + 1 keys, or the last `window` of them."""
    num_sliding = sum(map(model.is_sliding, range(model.num_layers)))
    near = min(end, model.window)
    keys = (model.num_layers - num_sliding) * (end * (end + 1) // 2)
    keys += num_sliding * (near * (near + 1) // 2 + (end - near) * model.window)
    return 2 * model.num_heads * (model.head_dim + model.v_dim) * keys
