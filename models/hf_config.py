"""`config.json` of a Hugging Face checkpoint <-> `ModelConfig`.

1. `read` takes the spelling of transformers 4 (`rope_theta` beside `rope_scaling`, `torch_dtype`) or 5 (`rope_parameters`,
   nested per kind of layer for Gemma, `dtype`, `num_local_experts`).
2. `write` gives the spelling of transformers 4, which both releases load, and refuses a config that the family of
   `config.family` cannot express: what it wrote, read again, must be the config.

What changes no arithmetic in a forward pass (token ids, dropout, initialiser) is neither read nor written.
"""

import dataclasses

from models import config as config_lib

# Fields that say how, not what, is computed, or in which dtype: a checkpoint does not hold them.
COMPUTE_FIELDS = ("dtype", "remat", "scan_layers", "attention", "grouped_matmul")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
LAYER_TYPES = {"full_attention": "F", "sliding_attention": "S"}


def read(hf: dict) -> config_lib.ModelConfig:
    """The config of a parsed `config.json`; ValueError names what has no counterpart here."""
    model_type = hf.get("model_type")
    if model_type not in READERS:
        raise ValueError(
            f"model_type {model_type!r} in config.json is not supported; the supported ones are {', '.join(READERS)}"
        )
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"config.json has quantization_config ({method}): quantised weights are not read; dequantise the checkpoint "
            "to bfloat16 first and remove that entry"
        )
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = "float32" if dtype == "float16" else dtype  # bfloat16 would lose three bits of its mantissa
    fields = {
        "vocab_size": _need(hf, "vocab_size"),
        "model_dim": _need(hf, "hidden_size"),
        "num_layers": _need(hf, "num_hidden_layers"),
        "num_heads": _need(hf, "num_attention_heads"),
        "num_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "ffn_dim": _need(hf, "intermediate_size"),
        "norm_eps": float(_need(hf, "rms_norm_eps")),
        "qk_norm": False,
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_ffn_dim": 0,
        "first_dense_layers": 0,
        "norm_topk": True,
        "param_dtype": dtype,
        "dtype": dtype,
        "remat": "none",
        "max_positions": hf.get("max_position_embeddings") or 0,
    }
    return config_lib.ModelConfig(**fields | READERS[model_type](hf))


def write(config: config_lib.ModelConfig) -> dict:
    """The `config.json` of a config; ValueError names the fields that its family cannot express."""
    family = config.family
    if (family, config.num_experts > 0) not in MODEL_TYPES:
        kind = "mixtures of experts" if config.num_experts else "dense models"
        raise ValueError(f"model.family = {family!r} has no {kind}; set model.family to one of {_names(config)}")
    model_type, architecture = MODEL_TYPES[family, config.num_experts > 0]
    hf = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_rope_scaling(config),
    }
    if config.max_positions:
        hf["max_position_embeddings"] = config.max_positions
    hf["hidden_activation" if family == "gemma3" else "hidden_act"] = (
        "gelu_pytorch_tanh" if config.activation == "gelu" else "silu"
    )
    if "S" in config.layer_pattern:
        names = {letter: name for name, letter in LAYER_TYPES.items()}
        hf["layer_types"] = [names["FS"[config.is_sliding(layer)]] for layer in range(config.num_layers)]
        hf["sliding_window"] = config.window
    hf |= WRITERS[family](config)

    lost = _differences(config, read(hf))
    if lost:
        raise ValueError(
            f"a checkpoint of family {family!r} cannot express {'; '.join(lost)}; set model.family to "
            f"one of {_names(config)} that can, or change these fields"
        )
    return hf


def _names(config) -> str:
    return ", ".join(repr(family) for family, mixed in MODEL_TYPES if mixed == (config.num_experts > 0))


def _differences(config, again) -> list[str]:
    """What `again` reads differently, as 'model.x = 1 (reads as 2)'."""
    mine, theirs = _effective(config), _effective(again)
    out = []
    for name in mine:
        a, b = mine[name], theirs[name]
        same = abs(a - b) <= 1e-12 * abs(a) if isinstance(a, float) else a == b
        if not same:
            out.append(f"model.{name} = {a!r} (reads as {b!r})")
    return out


def _effective(config) -> dict:
    """The fields that matter to this config: what another switch disables is left out, what is derived is filled in."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    mixes = [config.is_mixture(layer) for layer in range(config.num_layers)]
    slides = [config.is_sliding(layer) for layer in range(config.num_layers)]
    unused = [*COMPUTE_FIELDS, "mixture_every", "dense_layers"]
    if config.rope_scaling == "none":
        unused += ["rope_factor"]
    if config.rope_scaling not in ("llama3", "yarn"):
        unused += ["rope_original_positions"]
    if config.rope_scaling != "llama3":
        unused += ["rope_low_freq", "rope_high_freq"]
    if config.rope_scaling != "yarn":
        unused += ["rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_attention_factor", "rope_mscale"]
        unused += ["rope_mscale_all_dim"]
    if config.activation != "clamped":
        unused += ["clamp_limit", "clamp_alpha"]
    if not any(slides):
        unused += ["window", "rope_local_theta"]
    if all(mixes):
        unused += ["ffn_dim", "ffn_bias"]
    if not any(mixes):
        unused += ["experts_per_token", "expert_ffn_dim", "norm_topk", "router", "router_bias", "router_correction"]
        unused += ["router_groups", "router_groups_kept", "routed_scale", "num_shared_experts", "expert_bias"]
    if config.router == "topk_softmax":
        unused += ["norm_topk"]
    for name in unused:
        fields.pop(name, None)
    return fields | {
        "first_dense_layers": mixes,  # together with the other two fields that choose the mixture layers
        "layer_pattern": slides,
        "rope_dim": config.rotated_dim,
        "value_dim": config.v_dim,
        "attention_scale": config.score_scale,
    }


# ---- rotary positions, layer patterns --------------------------------------------------------------------------------


def _rope(hf: dict, default_theta: float = 10000.0) -> dict:
    """The rope fields of either spelling. `default_theta` is the family's in transformers."""
    stated = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if LAYER_TYPES.keys() & stated.keys():
        local, stated = stated.get("sliding_attention") or {}, dict(stated.get("full_attention") or {})
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type {local['rope_type']!r} of sliding layers is not supported; only 'default' is")
        local_theta = float(local.get("rope_theta", 10000.0))
    else:
        local_theta = 0.0
    kind = stated.get("rope_type") or stated.get("type") or "default"
    fields = {
        "rope_theta": float(stated.get("rope_theta") or hf.get("rope_theta") or default_theta),
        "rope_local_theta": local_theta,
    }
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r} in config.json is not supported; default, linear, llama3 and yarn are")
    fields |= {"rope_scaling": kind, "rope_factor": float(_need(stated, "factor", "rope scaling"))}
    if kind == "linear":
        return fields
    original = stated.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
    if not original:
        raise ValueError(f"rope_type {kind!r} needs original_max_position_embeddings in config.json")
    fields["rope_original_positions"] = int(original)
    optional = {
        "llama3": {"low_freq_factor": "rope_low_freq", "high_freq_factor": "rope_high_freq"},
        "yarn": {
            "beta_fast": "rope_beta_fast",
            "beta_slow": "rope_beta_slow",
            "attention_factor": "rope_attention_factor",
            "mscale": "rope_mscale",
            "mscale_all_dim": "rope_mscale_all_dim",
        },
    }[kind]
    fields |= {ours: float(stated[name]) for name, ours in optional.items() if stated.get(name)}
    return fields | ({"rope_truncate": bool(stated.get("truncate", True))} if kind == "yarn" else {})


def _write_rope_scaling(config) -> dict | None:
    kind = config.rope_scaling
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": config.rope_factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = config.rope_original_positions
    if kind == "llama3":
        scaling |= {"low_freq_factor": config.rope_low_freq, "high_freq_factor": config.rope_high_freq}
    if kind == "yarn":
        scaling |= {"beta_fast": config.rope_beta_fast, "beta_slow": config.rope_beta_slow}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if value := getattr(config, f"rope_{name}"):
                scaling[name] = value
        if not config.rope_truncate:
            scaling["truncate"] = False
    return scaling


def _layers(hf: dict, default: list[bool]) -> dict:
    """`layer_pattern` and `window` of `layer_types`, or of `default` (True: sliding) where the file has none."""
    sliding = default
    if hf.get("layer_types"):
        if unknown := set(hf["layer_types"]) - set(LAYER_TYPES):
            raise ValueError(f"layer type {sorted(unknown)[0]!r} in config.json is not one of {', '.join(LAYER_TYPES)}")
        sliding = [LAYER_TYPES[name] == "S" for name in hf["layer_types"]][: hf["num_hidden_layers"]]
    if not any(sliding):
        return {}
    return {"layer_pattern": _shortest_cycle(sliding), "window": _need(hf, "sliding_window")}


def _shortest_cycle(sliding: list[bool]) -> str:
    L = len(sliding)
    period = next(p for p in range(1, L + 1) if all(sliding[i] == sliding[i % p] for i in range(L)))
    return "".join("FS"[s] for s in sliding[:period])


def _need(hf: dict, key: str, where: str = "config.json"):
    if hf.get(key) is None:
        raise ValueError(f"{where} has no {key!r}")
    return hf[key]


def _activation(hf: dict, key: str = "hidden_act") -> str:
    name = hf.get(key, "silu")
    if name not in ACTIVATIONS:
        raise ValueError(f"{key} {name!r} in config.json is not supported; {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


# ---- families, reading -----------------------------------------------------------------------------------------------


def _read_plain(hf: dict) -> dict:
    fields = {"head_dim": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]}
    return fields | _rope(hf) | {"activation": _activation(hf)}


def _read_llama(hf: dict) -> dict:
    bias = bool(hf.get("attention_bias", False))
    return _read_plain(hf) | {
        "family": "llama",
        "qkv_bias": bias,
        "out_bias": bias,
        "ffn_bias": bool(hf.get("mlp_bias", False)),
    }


def _read_qwen2(hf: dict) -> dict:
    return _read_plain(hf) | _qwen_layers(hf) | {"family": "qwen2", "qkv_bias": True}


def _read_qwen3(hf: dict) -> dict:
    bias = bool(hf.get("attention_bias", False))
    fields = _read_plain({"head_dim": 128, **hf} if hf["model_type"] == "qwen3" else hf) | _qwen_layers(hf)
    return fields | {"family": "qwen3", "qk_norm": True, "qkv_bias": bias, "out_bias": bias}


def _read_qwen3_moe(hf: dict) -> dict:
    return _read_qwen3(hf) | {
        "num_experts": hf.get("num_experts") or _need(hf, "num_local_experts"),
        "experts_per_token": _need(hf, "num_experts_per_tok"),
        "expert_ffn_dim": _need(hf, "moe_intermediate_size"),
        "norm_topk": bool(hf.get("norm_topk_prob", False)),
        "mixture_every": hf.get("decoder_sparse_step") or 1,
        "dense_layers": tuple(sorted(hf.get("mlp_only_layers") or ())),
    }


def _qwen_layers(hf: dict) -> dict:
    """Without `use_sliding_window` a `sliding_window` in the file means nothing."""
    if not hf.get("use_sliding_window"):
        return {}
    return _layers(hf, [layer >= hf.get("max_window_layers", 28) for layer in range(hf["num_hidden_layers"])])


def _read_sigmoid_mixture(hf: dict) -> dict:
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError(
            f"scoring_func {hf.get('scoring_func')!r} with topk_method {hf.get('topk_method')!r} in config.json is not "
            "supported; 'sigmoid' with 'noaux_tc' is"
        )
    return {
        "num_experts": hf.get("n_routed_experts") or _need(hf, "num_local_experts"),
        "experts_per_token": _need(hf, "num_experts_per_tok"),
        "expert_ffn_dim": _need(hf, "moe_intermediate_size"),
        "first_dense_layers": hf.get("first_k_dense_replace", 0),
        "norm_topk": bool(hf.get("norm_topk_prob", True)),
        "router": "sigmoid",
        "router_correction": True,
        "router_groups": hf.get("n_group") or 1,
        "router_groups_kept": hf.get("topk_group") or 1,
        "routed_scale": float(hf.get("routed_scaling_factor", 1.0)),
        "num_shared_experts": hf.get("n_shared_experts") or 0,
    }


def _read_glm4_moe(hf: dict) -> dict:
    fields = _read_plain({"head_dim": 128, **hf}) | _read_sigmoid_mixture(hf)
    stated = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    partial = stated.get("partial_rotary_factor", hf.get("partial_rotary_factor", 0.5))
    rope_dim = int(fields["head_dim"] * partial)
    return fields | {
        "family": "glm4_moe",
        "rope_dim": 0 if rope_dim == fields["head_dim"] else rope_dim,
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "qk_norm": bool(hf.get("use_qk_norm", False)),
    }


def _read_deepseek_v3(hf: dict) -> dict:
    if hf.get("attention_bias"):
        raise ValueError("attention_bias in the config.json of a deepseek_v3 checkpoint is not supported")
    nope, rope = _need(hf, "qk_nope_head_dim"), _need(hf, "qk_rope_head_dim")
    return (
        _rope(hf)
        | _read_sigmoid_mixture(hf)
        | {
            "family": "deepseek_v3",
            "activation": _activation(hf),
            "head_dim": nope + rope,
            "rope_dim": rope,
            "rope_interleaved": bool(hf.get("rope_interleave", True)),
            "q_latent_dim": hf.get("q_lora_rank") or 0,
            "kv_latent_dim": _need(hf, "kv_lora_rank"),
            "value_dim": _need(hf, "v_head_dim"),
        }
    )


def _read_gpt_oss(hf: dict) -> dict:
    bias = bool(hf.get("attention_bias", True))
    return (
        {"head_dim": hf.get("head_dim") or 64}
        | _rope(hf, 150000.0)
        | _layers(hf, [layer % 2 == 0 for layer in range(hf["num_hidden_layers"])])
        | {
            "family": "gpt_oss",
            "norm": "rms_float32",
            "activation": "clamped",
            "clamp_limit": float(hf.get("swiglu_limit") or 7.0),
            "clamp_alpha": float(hf.get("swiglu_alpha") or 1.702),
            "qkv_bias": bias,
            "out_bias": bias,
            "sinks": True,
            "num_experts": hf.get("num_local_experts") or _need(hf, "num_experts"),
            "experts_per_token": hf.get("num_experts_per_tok") or _need(hf, "experts_per_token"),
            "expert_ffn_dim": hf["intermediate_size"],
            "router": "topk_softmax",
            "router_bias": True,
            "expert_bias": True,
        }
    )


def _read_gemma3(hf: dict) -> dict:
    if hf.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention in config.json is not supported; every model here is causal")
    period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    rope = _rope(hf, 1e6)
    bias = bool(hf.get("attention_bias", False))
    return (
        {"head_dim": hf.get("head_dim") or 256}
        | rope
        | _layers(hf, [bool((layer + 1) % period) for layer in range(hf["num_hidden_layers"])])
        | {
            "family": "gemma3",
            "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
            "rope_local_theta": rope["rope_local_theta"] or float(hf.get("rope_local_base_freq") or 10000.0),
            "norm": "rms_plus_one",
            "post_norms": True,
            "scale_embeddings": True,
            "qk_norm": True,
            "activation": _activation({"hidden_activation": "gelu_pytorch_tanh", **hf}, "hidden_activation"),
            "attention_scale": float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
            "attention_softcap": float(hf.get("attn_logit_softcapping") or 0.0),
            "final_softcap": float(hf.get("final_logit_softcapping") or 0.0),
            "qkv_bias": bias,
            "out_bias": bias,
        }
    )


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
    # first_dense_layers has no name in these files; the layers are listed one by one.
    dense = [n for n in range(config.num_layers) if (n + 1) % config.mixture_every == 0 and not config.is_mixture(n)]
    return hf | {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_ffn_dim,
        "norm_topk_prob": config.norm_topk,
        "decoder_sparse_step": config.mixture_every,
        "mlp_only_layers": dense,
    }


def _write_sigmoid_mixture(config) -> dict:
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
    return _write_sigmoid_mixture(config) | {
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": config.rotated_dim / config.head_dim,
    }


def _write_deepseek_v3(config) -> dict:
    return _write_sigmoid_mixture(config) | {
        "attention_bias": False,
        "head_dim": config.rope_dim,  # of this family, in these files
        "qk_head_dim": config.head_dim,
        "qk_nope_head_dim": config.head_dim - config.rope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_dim,
        "q_lora_rank": config.q_latent_dim or None,
        "kv_lora_rank": config.kv_latent_dim,
        "rope_interleave": config.rope_interleaved,
    }


def _write_gpt_oss(config) -> dict:
    return {
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
        "attn_logit_softcapping": config.attention_softcap or None,
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
