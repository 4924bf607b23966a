"""The architectures of published checkpoints, by hub ID, for experiments that `rl.plan` compiles without the files.

A run with `init_from` takes them from config.json instead (rl/experiment/initial.py).
"""

from ml_collections import config_dict

DIMS = ("vocab_size", "model_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")


def use(c: config_dict.ConfigDict, name: str) -> None:
    """Sets `c.model` to the architecture of the checkpoint `name`, with scanned layers in bfloat16 that the backward pass recomputes."""
    c.model.update(MODELS[name] | dict(dtype="bfloat16", remat="block", scan_layers=True))


def _model(family: str, *dims: int, **changes) -> dict:
    """Returns the `model` fields of an architecture: `dims` in the order of `DIMS`, `changes` to those of a dense Qwen model."""
    fields = dict(family=family, rope_theta=1e6, qk_norm=family == "qwen3", qkv_bias=family == "qwen2")
    return fields | dict(tie_embeddings=False) | dict(zip(DIMS, dims, strict=True)) | changes


def _glm(*dims: int, **changes) -> dict:
    fields = dict(rope_dim=64, qkv_bias=True, norm_eps=1e-5, experts_per_token=8, num_shared_experts=1)
    fields |= dict(router="sigmoid", router_correction=True, max_positions=131072)
    return _model("glm4_moe", *dims, **fields | changes)


_LLAMA = dict(rope_theta=5e5, norm_eps=1e-5)
_LLAMA_3_1 = _LLAMA | dict(rope_scaling="llama3", rope_factor=8.0, rope_original_positions=8192, max_positions=131072)
_GLM_4_5 = dict(num_experts=160, expert_ffn_dim=1536, first_dense_layers=3, routed_scale=2.5, qk_norm=True)
_GLM_4_5_AIR = dict(num_experts=128, expert_ffn_dim=1408, first_dense_layers=1)
_QWEN3_MOE = dict(num_experts=128, experts_per_token=8, expert_ffn_dim=768, max_positions=40960)
_SMALL_QWEN3 = dict(tie_embeddings=True, max_positions=40960)

MODELS: dict[str, dict] = {
    "PrimeIntellect/INTELLECT-1-Instruct": _model(
        "llama", 128256, 4096, 42, 32, 8, 128, 14336, max_positions=8192, **_LLAMA
    ),
    "Qwen/QwQ-32B": _model("qwen2", 152064, 5120, 64, 40, 8, 128, 27648, norm_eps=1e-5, max_positions=131072),
    "zai-org/GLM-4.5-Air-Base": _glm(151552, 4096, 46, 96, 8, 128, 10944, **_GLM_4_5_AIR),
    "zai-org/GLM-4.5-Base": _glm(151552, 5120, 92, 96, 8, 128, 12288, **_GLM_4_5),
    "Qwen/Qwen3-0.6B": _model("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, **_SMALL_QWEN3),
    "Qwen/Qwen3-1.7B": _model("qwen3", 151936, 2048, 28, 16, 8, 128, 6144, **_SMALL_QWEN3),
    "Qwen/Qwen3-4B": _model("qwen3", 151936, 2560, 36, 32, 8, 128, 9728, **_SMALL_QWEN3),
    "Qwen/Qwen3-8B": _model("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, max_positions=40960),
    "Qwen/Qwen3-30B-A3B": _model("qwen3", 151936, 2048, 48, 32, 4, 128, 6144, **_QWEN3_MOE),
    "meta-llama/Llama-3.1-8B-Instruct": _model("llama", 128256, 4096, 32, 32, 8, 128, 14336, **_LLAMA_3_1),
    "Qwen/Qwen2.5-0.5B": _model("qwen2", 151936, 896, 24, 14, 2, 64, 4864, tie_embeddings=True, max_positions=32768),
    "Qwen/Qwen2.5-1.5B": _model("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, tie_embeddings=True, max_positions=131072),
}
