"""The models of the comparisons: Qwen3-type, tied, random weights, float32. A peer builds the same from the same numbers."""

from models import config as config_lib

SHAPES = {
    "tiny": dict(vocab_size=272, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64),
    "4m": dict(vocab_size=512, model_dim=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=1024),
    "100m": dict(
        vocab_size=32000, model_dim=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64, ffn_dim=2304
    ),
}


def model(name: str) -> config_lib.ModelConfig:
    rest = dict(rope_theta=10000.0, norm_eps=1e-6, qk_norm=True, tie_embeddings=True, num_experts=0)
    rest |= dict(experts_per_token=0, expert_ffn_dim=0, first_dense_layers=0, norm_topk=True)
    return config_lib.ModelConfig(**SHAPES[name], **rest, param_dtype="float32", dtype="float32", remat="none")
