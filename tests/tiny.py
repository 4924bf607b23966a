"""The model that most tests run: two layers of 32 dims, float32, every switch stated once."""

from models import config as config_lib


def model(**changes) -> config_lib.ModelConfig:
    fields = {
        "vocab_size": 272,
        "model_dim": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 64,
        "rope_theta": 1000.0,
        "norm_eps": 1e-6,
        "qk_norm": True,
        "tie_embeddings": True,
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_ffn_dim": 0,
        "first_dense_layers": 0,
        "norm_topk": True,
        "param_dtype": "float32",
        "dtype": "float32",
        "remat": "none",
    }
    return config_lib.ModelConfig(**fields | changes)
