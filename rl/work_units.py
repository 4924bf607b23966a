"""What a rollout is worth: the FLOPs that it took, as nodes claim them and validators count them."""

from inference import rollout as rollout_lib
from models import config as config_lib
from rl import verdicts


def flops_of(model: config_lib.ModelConfig, rollout: rollout_lib.Rollout) -> tuple[int, int]:
    """(prompt, output) FLOPs of the matrix products: 2 per weight in use and token, 4 H C per position attended to.

    The head counts where a token was sampled, as INTELLECT-2 counts only what a worker is asked for.
    """
    D, C, H, K, L = model.model_dim, model.head_dim, model.num_heads, model.num_kv_heads, model.num_layers
    dense = 3 * D * model.ffn_dim
    moe = 3 * D * model.expert_ffn_dim * model.experts_per_token + D * model.num_experts
    num_dense = L if not model.num_experts else model.first_dense_layers
    per_token = 2 * (L * (2 * D * H * C + 2 * D * K * C) + num_dense * dense + (L - num_dense) * moe)

    def span(start: int, end: int) -> int:  # tokens at positions start .. end - 1
        attended = (end * (end + 1) - start * (start + 1)) // 2
        return (end - start) * per_token + 4 * L * H * C * attended

    num_prompt, num_tokens = verdicts.prompt_length(rollout), len(rollout.tokens)
    head = 2 * D * model.vocab_size * int(rollout.sampled_mask.sum())
    return span(0, num_prompt), span(num_prompt, num_tokens) + head
