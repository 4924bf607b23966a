"""Describes how each model family spells its `config.json`: one `Family` per model_type, in `FAMILIES`.

Most entries have a field of `ModelConfig` as their counterpart. A table lists these pairs, for reading and writing. A
family's `read` and `write` add the fields and entries that must be computed. models/hf/config.py applies all of them.
"""

import dataclasses
import math
from collections.abc import Callable

from models.hf import fields


@dataclasses.dataclass(frozen=True)
class Family:
    """The rules to convert the config.json of one model family (a `model_type`) to the fields of `ModelConfig` and back."""

    name: str  # ModelConfig.family
    architecture: str
    # Field -> its entry; of several names the first one in use is read, and the first is written.
    entries: dict[str, str]
    fixed: dict = dataclasses.field(default_factory=dict)  # fields that have one value in this family
    defaults: dict = dataclasses.field(default_factory=dict)  # values of absent entries, as in transformers
    rope_theta: float = 10000.0  # if absent or null
    rope: dict = dataclasses.field(default_factory=dict)  # rotary positions if absent or null
    activation: str = "hidden_act"  # name of this entry
    read: Callable[[dict], dict] = lambda hf: {}  # other fields
    write: Callable[..., dict] = lambda config: {}  # other entries; replaces those of the same name


# Entries that may be absent, null or 0, and their value then.
EMPTY = dict.fromkeys(("max_position_embeddings", "n_shared_experts", "q_lora_rank"), 0) | {
    "n_group": 1,
    "topk_group": 1,
}
EMPTY |= {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "rope_local_base_freq": 10000.0, "final_logit_softcapping": 0.0}
COMMON = {
    "vocab_size": "vocab_size",
    "model_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads num_attention_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}
BIAS = {"out_bias": "attention_bias", "qkv_bias": "attention_bias"}
MOE = {
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_dim": "moe_intermediate_size",
    "norm_topk": "norm_topk_prob",
}
SIGMOID_MOE = MOE | {
    "num_experts": "n_routed_experts num_local_experts",
    "first_dense_layers": "first_k_dense_replace",
    "router_groups": "n_group",
    "router_groups_kept": "topk_group",
    "routed_scale": "routed_scaling_factor",
    "num_shared_experts": "n_shared_experts",
}
SIGMOID = {"router": "sigmoid", "router_correction": True}
SIGMOID_DEFAULTS = {"n_shared_experts": 1, "norm_topk_prob": True}


def _read_qwen(hf: dict) -> dict:
    """Returns the fields of sliding layers; none unless both `use_sliding_window` and `sliding_window` are set."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return {}
    return fields.layers(hf, [layer >= hf.get("max_window_layers", 28) for layer in range(hf["num_hidden_layers"])])


def _write_qwen(config) -> dict:
    return {"use_sliding_window": "S" in config.layer_pattern}


def _read_qwen3_moe(hf: dict) -> dict:
    size = hf.get("use_sliding_window") and hf.get("sliding_window", 4096)  # every layer slides, unlike in Qwen3
    window = {"layer_pattern": "S", "window": size} if size else {}
    return window | {"dense_layers": tuple(sorted(hf.get("mlp_only_layers") or ()))}


def _write_qwen3_moe(config) -> dict:
    # These files have no entry for first_dense_layers; they list the layers one by one.
    dense = [n for n in range(config.num_layers) if (n + 1) % config.mixture_every == 0 and not config.is_moe(n)]
    return _write_qwen(config) | {"mlp_only_layers": dense}


def _check_sigmoid_moe(hf: dict) -> None:
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError(
            f"scoring_func {hf.get('scoring_func')!r} with topk_method {hf.get('topk_method')!r} in config.json is not "
            "supported; use a checkpoint with 'sigmoid' and 'noaux_tc'"
        )


def _read_glm4_moe(hf: dict) -> dict:
    _check_sigmoid_moe(hf)
    head_dim, stated = fields.head_dim(hf), hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope_dim = int(head_dim * stated.get("partial_rotary_factor", hf["partial_rotary_factor"]))
    return {"rope_dim": 0 if rope_dim == head_dim else rope_dim}


def _write_glm4_moe(config) -> dict:
    # The float that gives the rotated dims when multiplied and truncated: 1 / 49 * 49 is below 1.
    fraction = config.rotated_dim / config.head_dim
    is_exact = int(config.head_dim * fraction) == config.rotated_dim
    return {"partial_rotary_factor": fraction if is_exact else math.nextafter(fraction, 1.0)}


def _read_deepseek_v3(hf: dict) -> dict:
    _check_sigmoid_moe(hf)
    nope, rope_dim = fields.need(hf, "qk_nope_head_dim"), fields.need(hf, "qk_rope_head_dim")
    stated = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = stated.get("rope_type") or stated.get("type")
    if kind in ("linear", "llama3") and stated.get("mscale_all_dim"):  # transformers sharpens by it
        raise ValueError(f"mscale_all_dim with rope_type {kind!r} in config.json is not supported; use 'yarn'")
    return {"head_dim": nope + rope_dim, "rope_dim": rope_dim}


def _write_deepseek_v3(config) -> dict:
    return {
        "head_dim": config.rope_dim,  # in these files
        "qk_head_dim": config.head_dim,
        "qk_nope_head_dim": config.head_dim - config.rope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_dim,
        "q_lora_rank": config.q_latent_dim or None,
    }


def _read_gpt_oss(hf: dict) -> dict:
    return fields.layers(hf, [layer % 2 == 0 for layer in range(hf["num_hidden_layers"])])


def _write_gpt_oss(config) -> dict:
    return {"rope_scaling": {"rope_type": "default"}} if config.rope_scaling == "none" else {}


def _read_gemma3(hf: dict) -> dict:
    # attn_logit_softcapping is Gemma 2's: transformers accepts it in a Gemma 3 config, and does not apply it.
    if hf.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention in config.json is not supported; use a causal model")
    period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    return fields.layers(hf, [bool((layer + 1) % period) for layer in range(hf["num_hidden_layers"])]) | {
        "head_dim": hf.get("head_dim") or 256,
        "attention_scale": float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
    }


def _write_gemma3(config) -> dict:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    return {
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar,
        "final_logit_softcapping": config.final_softcap or None,
    }


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", BIAS | {"ffn_bias": "mlp_bias"}),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", {}, {"qkv_bias": True}, read=_read_qwen, write=_write_qwen),
    "qwen3": Family(
        "qwen3", "Qwen3ForCausalLM", BIAS, {"qk_norm": True}, {"head_dim": 128}, read=_read_qwen, write=_write_qwen
    ),
    "qwen3_moe": Family(
        "qwen3",
        "Qwen3MoeForCausalLM",
        BIAS | MOE | {"num_experts": "num_experts num_local_experts", "mixture_every": "decoder_sparse_step"},
        {"qk_norm": True},
        {"decoder_sparse_step": 1},
        read=_read_qwen3_moe,
        write=_write_qwen3_moe,
    ),
    "glm4_moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        SIGMOID_MOE | {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        SIGMOID,
        SIGMOID_DEFAULTS
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
        | {"partial_rotary_factor": 0.5},
        read=_read_glm4_moe,
        write=_write_glm4_moe,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        SIGMOID_MOE
        | {"q_latent_dim": "q_lora_rank", "kv_latent_dim": "kv_lora_rank", "value_dim": "v_head_dim"}
        | BIAS
        | {"rope_interleaved": "rope_interleave"},
        SIGMOID,
        SIGMOID_DEFAULTS
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
        | {"rope_interleave": True},
        read=_read_deepseek_v3,
        write=_write_deepseek_v3,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        BIAS
        | {"expert_ffn_dim": "intermediate_size", "experts_per_token": "num_experts_per_tok experts_per_token"}
        | {
            "num_experts": "num_local_experts num_experts",
            "clamp_limit": "swiglu_limit",
            "clamp_alpha": "swiglu_alpha",
        },
        {"norm": "rms_float32", "activation": "clamped", "sinks": True}
        | {"router": "topk_softmax", "router_bias": True, "expert_bias": True},
        {"head_dim": 64, "attention_bias": True},
        rope_theta=150000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
        read=_read_gpt_oss,
        write=_write_gpt_oss,
    ),
    "gemma3_text": Family(
        "gemma3",
        "Gemma3ForCausalLM",
        BIAS | {"rope_local_theta": "rope_local_base_freq", "final_softcap": "final_logit_softcapping"},
        {"norm": "rms_plus_one", "post_norms": True, "scale_embeddings": True, "qk_norm": True},
        {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
        rope_theta=1e6,
        activation="hidden_activation",
        read=_read_gemma3,
        write=_write_gemma3,
    ),
}
