"""Converts the metadata of a GGUF file to the entries of a `config.json`, which models/hf/config.py reads.

1. `general.architecture` chooses the model family; its entries have that name as their prefix.
2. Dims, context, and rotary positions are entries. Whether embeddings are tied, and which biases exist, is seen in the tensors.
3. Llama 3's scaling of rotary positions is a tensor of factors in these files. It is accepted if they follow from its usual settings.

Left out: Mixtral (architecture llama with experts), GLM, DeepSeek, and gpt-oss, whose tensors llama.cpp stores in another form.
"""

import math
from typing import Any

import numpy as np

from sharding.weights.format import gguf_header

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
ENTRIES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Entries of rope.scaling that have a counterpart, or change nothing.
SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
SCALING |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "type": "rope_type", "finetuned": ""}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FLOAT_KINDS = (0, 1)  # codes of F32 and F16: loaded as float32, since bfloat16 would lose bits of both


def entries(header: gguf_header.Header) -> dict[str, Any]:
    """Returns the entries of a config.json for a GGUF file. Raises ValueError, naming the entry, if the architecture or an option is not supported."""
    arch = header.metadata.get("general.architecture")
    if arch not in FAMILIES:
        raise ValueError(f"general.architecture {arch!r} is not supported; use a model of {', '.join(FAMILIES)}")

    def get(name: str, default: Any = None) -> Any:
        return header.metadata.get(f"{arch}.{name}", default)

    if header.metadata.get("split.count", 1) > 1:
        raise ValueError("it is one of several files of a model; join them with `llama-gguf-split --merge`")
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    found = {theirs: value for theirs, ours in ENTRIES.items() if (value := get(ours)) is not None}
    if bad := [name for name, value in found.items() if not isinstance(value, int | float)]:
        raise ValueError(f"{arch}.{ENTRIES[bad[0]]} is not one number: layers that differ in it are not supported")
    head_dim = found.setdefault("head_dim", found.get("hidden_size", 0) // max(found.get("num_attention_heads", 1), 1))
    if (value_dim := get("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"{arch}.attention.value_length {value_dim} differs from key_length {head_dim}: not supported")
    found |= {
        "model_type": FAMILIES[arch],
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "partial_rotary_factor": get("rope.dimension_count", head_dim) / max(head_dim, 1),
        "norm_topk_prob": True,  # as llama.cpp computes qwen3moe
        "dtype": _dtype(header),
        "rope_scaling": _rope_scaling(header, head_dim, found.get("rope_theta", 10000.0)),
    }
    if arch == "gemma3":
        heads = found["hidden_size"] / found["num_attention_heads"]
        found["query_pre_attn_scalar"] = heads if found["num_hidden_layers"] == 62 else head_dim  # 27B, as in llama.cpp
        found["sliding_window"] = get("attention.sliding_window")
        found["rope_local_base_freq"] = get("rope.freq_base_swa", 10000.0)
    elif (window := get("attention.sliding_window")) and window < get("context_length", 0):
        raise ValueError(f"{arch}.attention.sliding_window {window} is not supported; use a model without it")
    if arch == "llama" and found.pop("num_experts", 0):
        raise ValueError("architecture llama with experts (Mixtral) is not supported; use a model of qwen3moe")
    return found


def _dtype(header: gguf_header.Header) -> str:
    """Returns the dtype to load the weights in: bfloat16, unless most of them are stored in F32 or F16."""
    sizes = [(tensor.kind in FLOAT_KINDS, math.prod(tensor.shape)) for tensor in header.tensors.values()]
    return "float32" if sum(n for is_float, n in sizes if is_float) * 2 > sum(n for _, n in sizes) else "bfloat16"


def _rope_scaling(header: gguf_header.Header, head_dim: int, theta: float) -> dict | None:
    prefix = f"{header.metadata['general.architecture']}.rope.scaling."
    stated = {key.removeprefix(prefix): x for key, x in header.metadata.items() if key.startswith(prefix)}
    if unknown := [name for name in stated if name not in SCALING]:
        raise ValueError(f"{prefix}{unknown[0]} is not supported; use a model without it")
    if ROPE_FACTORS in header.tensors:
        factors = np.frombuffer(header.mapped, "<f4", head_dim // 2, header.tensors[ROPE_FACTORS].offset)
        scaling = LLAMA3 | {"rope_type": "llama3", "factor": float(factors.max())}
        if not np.allclose(factors, _llama3_factors(scaling, head_dim, theta), rtol=1e-4):
            raise ValueError(f"{ROPE_FACTORS} is not of Llama 3's kind, from {LLAMA3}: not supported")
        return scaling
    if stated.get("type", "none") == "none":
        return None
    return {SCALING[name]: value for name, value in stated.items() if SCALING[name]}


def _llama3_factors(scaling: dict, head_dim: int, theta: float) -> np.ndarray:
    """Returns the factors by which Llama 3 divides the rotary frequencies: 1 for short waves, `factor` for long ones, between them a blend."""
    low, high, original, factor = (scaling[name] for name in (*LLAMA3, "factor"))
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)
