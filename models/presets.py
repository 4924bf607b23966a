"""The published models, by the name they go by: dims as in their config.json, bfloat16, stacked layers.

    config = presets.PRESETS["qwen3_0_6b"]

A checkpoint needs none of these (`models.hf.load` reads its own config.json): they are for building, planning and sizing a
model without its files. tests/models/hf/test_checkpoint.py counts the parameters of each.
"""

from models import config as config_lib


def _model(
    family: str, vocab_size, model_dim, num_layers, heads, head_dim, ffn_dim, **changes
) -> config_lib.ModelConfig:
    """`heads` is (query heads, key heads); defaults are those of a dense Qwen3."""
    fields = {
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "tie_embeddings": False,
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_ffn_dim": 0,
        "first_dense_layers": 0,
        "norm_topk": True,
        "param_dtype": "bfloat16",
        "dtype": "bfloat16",
        "remat": "block",
        "scan_layers": True,
    }
    return config_lib.ModelConfig(
        family=family,
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        **fields | changes,
    )


_GLM = dict(
    rope_dim=64,
    qkv_bias=True,
    norm_eps=1e-5,
    experts_per_token=8,
    router="sigmoid",
    router_correction=True,
    num_shared_experts=1,
    max_positions=131072,
)
_QWQ = dict(norm_eps=1e-5, max_positions=131072)
_INTELLECT_3 = _model(
    "glm4_moe",
    151552,
    4096,
    46,
    (96, 8),
    128,
    10944,
    **_GLM | dict(num_experts=128, expert_ffn_dim=1408, first_dense_layers=1),
)
_INTELLECT_2 = _model("qwen2", 152064, 5120, 64, (40, 8), 128, 27648, **_QWQ)

PRESETS: dict[str, config_lib.ModelConfig] = {
    "intellect_1": _model(
        "llama", 128256, 4096, 42, (32, 8), 128, 14336, rope_theta=5e5, norm_eps=1e-5, max_positions=8192
    ),
    "intellect_2": _INTELLECT_2,
    "qwq_32b": _INTELLECT_2,  # INTELLECT-2's base
    "intellect_3": _INTELLECT_3,
    "glm_4_5_air": _INTELLECT_3,  # INTELLECT-3's base
    "glm_4_5": _model(
        "glm4_moe",
        151552,
        5120,
        92,
        (96, 8),
        128,
        12288,
        **_GLM | dict(num_experts=160, expert_ffn_dim=1536, first_dense_layers=3, routed_scale=2.5, qk_norm=True),
    ),
    "qwen3_0_6b": _model("qwen3", 151936, 1024, 28, (16, 8), 128, 3072, tie_embeddings=True, max_positions=40960),
    "qwen3_1_7b": _model("qwen3", 151936, 2048, 28, (16, 8), 128, 6144, tie_embeddings=True, max_positions=40960),
    "qwen3_4b": _model("qwen3", 151936, 2560, 36, (32, 8), 128, 9728, tie_embeddings=True, max_positions=40960),
    "qwen3_8b": _model("qwen3", 151936, 4096, 36, (32, 8), 128, 12288, max_positions=40960),
    "qwen3_30b_a3b": _model(
        "qwen3",
        151936,
        2048,
        48,
        (32, 4),
        128,
        6144,
        num_experts=128,
        experts_per_token=8,
        expert_ffn_dim=768,
        max_positions=40960,
    ),
    "llama_3_1_8b": _model(
        "llama",
        128256,
        4096,
        32,
        (32, 8),
        128,
        14336,
        rope_theta=5e5,
        norm_eps=1e-5,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original_positions=8192,
        max_positions=131072,
    ),
    "qwen2_5_0_5b": _model("qwen2", 151936, 896, 24, (14, 2), 64, 4864, tie_embeddings=True, max_positions=32768),
    "qwen2_5_1_5b": _model("qwen2", 151936, 1536, 28, (12, 2), 128, 8960, tie_embeddings=True, max_positions=131072),
}
