"""Reads and writes the entries of `config.json` that are particular to a model family: `READERS` and `WRITERS`.

A reader returns the fields of `ModelConfig` that models/hf/config.py does not read for all families. For entries that are
absent it uses the family's defaults in transformers. A writer returns the family's own entries.
"""

import math

from models.hf import fields

# The rotary positions that transformers uses if a gpt-oss config has none.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_plain(hf: dict) -> dict:
    return {"head_dim": _head_dim(hf), "activation": fields.activation(hf)} | fields.rope(hf)


def _head_dim(hf: dict) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def _bias(hf: dict, default: bool = False) -> dict:
    bias = bool(hf.get("attention_bias", default))
    return {"qkv_bias": bias, "out_bias": bias}


def _read_llama(hf: dict) -> dict:
    return _read_plain(hf) | _bias(hf) | {"family": "llama", "ffn_bias": bool(hf.get("mlp_bias", False))}


def _read_qwen2(hf: dict) -> dict:
    return _read_plain(hf) | _qwen_layers(hf) | {"family": "qwen2", "qkv_bias": True}


def _read_qwen3(hf: dict) -> dict:
    return _read_qwen3_attention({"head_dim": 128, **hf}) | _qwen_layers(hf)


def _read_qwen3_attention(hf: dict) -> dict:
    return _read_plain(hf) | _bias(hf) | {"family": "qwen3", "qk_norm": True}


def _read_qwen3_moe(hf: dict) -> dict:
    slides = bool(hf.get("use_sliding_window") and hf.get("sliding_window"))  # then every layer does, unlike in Qwen3
    window = {"layer_pattern": "S", "window": hf["sliding_window"]} if slides else {}
    return {
        **_read_qwen3_attention(hf),
        **window,
        "num_experts": hf.get("num_experts") or fields.need(hf, "num_local_experts"),
        "experts_per_token": fields.need(hf, "num_experts_per_tok"),
        "expert_ffn_dim": fields.need(hf, "moe_intermediate_size"),
        "norm_topk": bool(hf.get("norm_topk_prob", False)),
        "mixture_every": hf.get("decoder_sparse_step", 1),
        "dense_layers": tuple(sorted(hf.get("mlp_only_layers") or ())),
    }


def _qwen_layers(hf: dict) -> dict:
    """Reads the sliding layers: there are some only if both `use_sliding_window` and `sliding_window` are set."""
    if not hf.get("use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return {}
    return fields.layers(hf, [layer >= hf.get("max_window_layers", 28) for layer in range(hf["num_hidden_layers"])])


def _read_sigmoid_moe(hf: dict, **defaults) -> dict:
    """Reads experts with a sigmoid router; `defaults` are the family's in transformers."""
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError(
            f"scoring_func {hf.get('scoring_func')!r} with topk_method {hf.get('topk_method')!r} in config.json is not "
            "supported; only 'sigmoid' with 'noaux_tc' is"
        )
    hf = defaults | hf
    return {
        "num_experts": hf.get("n_routed_experts") or fields.need(hf, "num_local_experts"),
        "experts_per_token": fields.need(hf, "num_experts_per_tok"),
        "expert_ffn_dim": fields.need(hf, "moe_intermediate_size"),
        "first_dense_layers": fields.need(hf, "first_k_dense_replace"),
        "norm_topk": bool(hf.get("norm_topk_prob", True)),
        "router": "sigmoid",
        "router_correction": True,
        "router_groups": hf["n_group"] or 1,
        "router_groups_kept": hf["topk_group"] or 1,
        "routed_scale": float(fields.need(hf, "routed_scaling_factor")),
        "num_shared_experts": hf["n_shared_experts"] or 0,
    }


def _read_glm4_moe(hf: dict) -> dict:
    head_dim, stated = _head_dim(hf), hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope_dim = int(head_dim * stated.get("partial_rotary_factor", hf.get("partial_rotary_factor", 0.5)))
    moe = _read_sigmoid_moe(
        hf, first_k_dense_replace=1, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1
    )
    return {
        **fields.rope(hf, may_be_partial=True),
        **moe,
        "family": "glm4_moe",
        "activation": fields.activation(hf),
        "head_dim": head_dim,
        "rope_dim": 0 if rope_dim == head_dim else rope_dim,
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "qk_norm": bool(hf.get("use_qk_norm", False)),
    }


def _read_deepseek_v3(hf: dict) -> dict:
    nope, rope_dim = fields.need(hf, "qk_nope_head_dim"), fields.need(hf, "qk_rope_head_dim")
    rope = fields.rope(hf)
    stated = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if rope.get("rope_scaling") in ("linear", "llama3") and stated.get("mscale_all_dim"):  # transformers sharpens by it
        raise ValueError(f"mscale_all_dim with rope_type {rope['rope_scaling']!r} in config.json is not supported")
    moe = _read_sigmoid_moe(
        hf, first_k_dense_replace=3, routed_scaling_factor=2.5, n_group=8, topk_group=4, n_shared_experts=1
    )
    return {
        **rope,
        **moe,
        **_bias(hf),
        "family": "deepseek_v3",
        "activation": fields.activation(hf),
        "head_dim": nope + rope_dim,
        "rope_dim": rope_dim,
        "rope_interleaved": bool(hf.get("rope_interleave", True)),
        "q_latent_dim": hf.get("q_lora_rank") or 0,
        "kv_latent_dim": fields.need(hf, "kv_lora_rank"),
        "value_dim": fields.need(hf, "v_head_dim"),
    }


def _read_gpt_oss(hf: dict) -> dict:
    if not (hf.get("rope_scaling") or hf.get("rope_parameters")):  # absent or null
        hf = hf | {"rope_scaling": GPT_OSS_ROPE}
    return {
        "head_dim": _head_dim({"head_dim": 64} | hf),
        **_bias(hf, True),
        **fields.rope(hf, 150000.0),
        **fields.layers(hf, [layer % 2 == 0 for layer in range(hf["num_hidden_layers"])]),
        "family": "gpt_oss",
        "norm": "rms_float32",
        "activation": "clamped",
        "clamp_limit": float(hf.get("swiglu_limit") or 7.0),
        "clamp_alpha": float(hf.get("swiglu_alpha") or 1.702),
        "sinks": True,
        "num_experts": hf.get("num_local_experts") or fields.need(hf, "num_experts"),
        "experts_per_token": hf.get("num_experts_per_tok") or fields.need(hf, "experts_per_token"),
        "expert_ffn_dim": hf["intermediate_size"],
        "router": "topk_softmax",
        "router_bias": True,
        "expert_bias": True,
    }


def _read_gemma3(hf: dict) -> dict:
    # attn_logit_softcapping is Gemma 2's: transformers accepts it in a Gemma 3 config, and does not apply it.
    if hf.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention in config.json is not supported: only causal models are")
    period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    rope = fields.rope(hf, 1e6)
    return {
        "head_dim": hf.get("head_dim") or 256,
        **_bias(hf),
        **rope,
        **fields.layers(hf, [bool((layer + 1) % period) for layer in range(hf["num_hidden_layers"])]),
        "family": "gemma3",
        "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "rope_local_theta": rope["rope_local_theta"] or float(hf.get("rope_local_base_freq") or 10000.0),
        "norm": "rms_plus_one",
        "post_norms": True,
        "scale_embeddings": True,
        "qk_norm": True,
        "activation": fields.activation({"hidden_activation": "gelu_pytorch_tanh", **hf}, "hidden_activation"),
        "attention_scale": float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
        "final_softcap": float(hf.get("final_logit_softcapping") or 0.0),
    }


READERS = {
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "glm4_moe": _read_glm4_moe,
    "deepseek_v3": _read_deepseek_v3,
    "gpt_oss": _read_gpt_oss,
    "gemma3_text": _read_gemma3,
}


# ---- families, writing -----------------------------------------------------------------------------------------------

MODEL_TYPES = {
    ("llama", False): ("llama", "LlamaForCausalLM"),
    ("qwen2", False): ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", False): ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3", True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("glm4_moe", True): ("glm4_moe", "Glm4MoeForCausalLM"),
    ("deepseek_v3", True): ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("gpt_oss", True): ("gpt_oss", "GptOssForCausalLM"),
    ("gemma3", False): ("gemma3_text", "Gemma3ForCausalLM"),
}


def _write_llama(config) -> dict:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


def _write_qwen2(config) -> dict:
    return {"use_sliding_window": "S" in config.layer_pattern}


def _write_qwen3(config) -> dict:
    hf = _write_qwen2(config) | {"attention_bias": config.qkv_bias}
    if not config.num_experts:
        return hf
    # These files have no entry for first_dense_layers; they list the layers one by one.
    dense = [n for n in range(config.num_layers) if (n + 1) % config.mixture_every == 0 and not config.is_moe(n)]
    return hf | {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_ffn_dim,
        "norm_topk_prob": config.norm_topk,
        "decoder_sparse_step": config.mixture_every,
        "mlp_only_layers": dense,
    }


def _write_sigmoid_moe(config) -> dict:
    return {
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_ffn_dim,
        "first_k_dense_replace": config.first_dense_layers,
        "norm_topk_prob": config.norm_topk,
        "n_group": config.router_groups,
        "topk_group": config.router_groups_kept,
        "routed_scaling_factor": config.routed_scale,
        "n_shared_experts": config.num_shared_experts,
    }


def _write_glm4_moe(config) -> dict:
    return _write_sigmoid_moe(config) | {
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": _fraction(config.rotated_dim, config.head_dim),
    }


def _fraction(part: int, whole: int) -> float:
    """Returns the float that gives `part` when multiplied by `whole` and truncated: 1 / 49 * 49 is below 1."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, 1.0)


def _write_deepseek_v3(config) -> dict:
    return _write_sigmoid_moe(config) | {
        "attention_bias": config.qkv_bias,
        "head_dim": config.rope_dim,  # in these files
        "qk_head_dim": config.head_dim,
        "qk_nope_head_dim": config.head_dim - config.rope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_dim,
        "q_lora_rank": config.q_latent_dim or None,
        "kv_lora_rank": config.kv_latent_dim,
        "rope_interleave": config.rope_interleaved,
    }


def _write_gpt_oss(config) -> dict:
    plain = {"rope_scaling": {"rope_type": "default"}} if config.rope_scaling == "none" else {}
    return plain | {
        "attention_bias": config.qkv_bias,
        "intermediate_size": config.expert_ffn_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "swiglu_limit": config.clamp_limit,
        "swiglu_alpha": config.clamp_alpha,
    }


def _write_gemma3(config) -> dict:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    return {
        "attention_bias": config.qkv_bias,
        "rope_local_base_freq": config.rope_local_theta,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar,
        "final_logit_softcapping": config.final_softcap or None,
    }


WRITERS = {
    "llama": _write_llama,
    "qwen2": _write_qwen2,
    "qwen3": _write_qwen3,
    "glm4_moe": _write_glm4_moe,
    "deepseek_v3": _write_deepseek_v3,
    "gpt_oss": _write_gpt_oss,
    "gemma3": _write_gemma3,
}
