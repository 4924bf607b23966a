"""`config.json` of a Hugging Face checkpoint <-> `ModelConfig`.

1. `read` takes the spelling of transformers 4 (`rope_theta` beside `rope_scaling`, `torch_dtype`) or 5 (`rope_parameters`,
   nested per kind of layer for Gemma, `dtype`, `num_local_experts`).
2. `write` gives the spelling of transformers 4, which both releases load, and refuses a config that the family of
   `config.family` cannot express: what it wrote, read again, must be the config.

What the families differ in is in models/hf/families.py, the entries that they share in models/hf/fields.py. What changes no
arithmetic in a forward pass (token ids, dropout, initialiser) is neither read nor written.
"""

import dataclasses

from models import config as config_lib
from models.hf import families
from models.hf import fields as hf_fields

# Fields that say how, not what, is computed, or in which dtype: a checkpoint does not hold them.
COMPUTE_FIELDS = ("dtype", "remat", "scan_layers", "attention", "grouped_matmul")


def read(hf: dict, **changes) -> config_lib.ModelConfig:
    """The config of a parsed `config.json`, in the spelling of transformers 4 or 5; `changes` are set on top.

    Raises:
      ValueError: an architecture or a switch that has no counterpart here, by name.
    """
    if not isinstance(hf, dict):
        raise ValueError(f"config.json holds {type(hf).__name__}, not an object")
    model_type = hf.get("model_type")
    if model_type not in families.READERS:
        raise ValueError(
            f"model_type {model_type!r} in config.json is not supported; the supported ones are {', '.join(families.READERS)}"
        )
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"config.json has quantization_config ({method}): quantised weights are not read; dequantise the checkpoint "
            "to bfloat16 first and remove that entry"
        )
    _check_numbers(hf)
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = "float32" if dtype == "float16" else dtype  # bfloat16 would lose three bits of its mantissa
    fields = {
        "vocab_size": hf_fields.need(hf, "vocab_size"),
        "model_dim": hf_fields.need(hf, "hidden_size"),
        "num_layers": hf_fields.need(hf, "num_hidden_layers"),
        "num_heads": hf_fields.need(hf, "num_attention_heads"),
        "num_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "ffn_dim": hf_fields.need(hf, "intermediate_size"),
        "norm_eps": float(hf_fields.need(hf, "rms_norm_eps")),
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
    return config_lib.ModelConfig(**fields | families.READERS[model_type](hf) | changes)


def _check_numbers(hf: dict) -> None:
    """What counts something must be a whole number, before anything is computed with it."""
    for name in (*COUNTS, *(name for name in hf if name.startswith("num_"))):
        if type(hf.get(name)) not in (int, type(None)):
            raise ValueError(f"{name} in config.json is {hf[name]!r}; it must be a whole number")


COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "sliding_window")


def write(config: config_lib.ModelConfig) -> dict:
    """The `config.json` of a config; ValueError names the fields that its family cannot express."""
    family = config.family
    if (family, config.num_experts > 0) not in families.MODEL_TYPES:
        kind = "mixtures of experts" if config.num_experts else "dense models"
        raise ValueError(f"model.family = {family!r} has no {kind}; set model.family to one of {_names(config)}")
    model_type, architecture = families.MODEL_TYPES[family, config.num_experts > 0]
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
        "rope_scaling": hf_fields.write_rope_scaling(config),
    }
    if config.max_positions:
        hf["max_position_embeddings"] = config.max_positions
    hf["hidden_activation" if family == "gemma3" else "hidden_act"] = (
        "gelu_pytorch_tanh" if config.activation == "gelu" else "silu"
    )
    slides = [config.is_sliding(layer) for layer in range(config.num_layers)]
    if any(slides) or family in ("gpt_oss", "gemma3"):  # where the file says nothing, these two slide
        names = {letter: name for name, letter in hf_fields.LAYER_TYPES.items()}
        hf["layer_types"] = [names["FS"[sliding]] for sliding in slides]
    if any(slides):
        hf["sliding_window"] = config.window
    hf |= families.WRITERS[family](config)

    lost = _differences(config, read(hf))
    if lost:
        raise ValueError(
            f"a checkpoint of family {family!r} cannot express {'; '.join(lost)}; set model.family to "
            f"one of {_names(config)} that can, or change these fields"
        )
    return hf


def _names(config) -> str:
    return ", ".join(repr(family) for family, mixed in families.MODEL_TYPES if mixed == (config.num_experts > 0))


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
    mixes = [config.is_moe(layer) for layer in range(config.num_layers)]
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
