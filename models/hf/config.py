"""Converts the `config.json` of a Hugging Face checkpoint to `ModelConfig`, and back.

`read` accepts the entries of transformers 4 and 5; `write` gives those of 4, which both load. `update` keeps all entries of the
checkpoint that a model began with, also those that this package does not read, except those that the model contradicts.

Family-specific entries are in models/hf/families.py, shared ones in models/hf/fields.py. Entries that change no arithmetic
in a forward pass (token ids, dropout, initializer) are neither read nor written.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from models import config as config_lib
from models.hf import families
from models.hf import fields as hf_fields

# Fields of the implementation (how, and in which dtype): a checkpoint does not contain them.
COMPUTE_FIELDS = ("dtype", "remat", "scan_layers", "attention", "grouped_matmul", "reduce_dtype")
# Entries that must be whole numbers, in addition to all that begin with num_.
COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "sliding_window")

# Entries that would precede or limit those of `write`.
STATED_TWICE = ("rope_parameters", "rope_scaling", "layer_types", "sliding_window", "use_sliding_window", "dtype")

# Fields that a model has only if its family sets them.
ABSENT = dict.fromkeys(("num_experts", "experts_per_token", "expert_ffn_dim", "first_dense_layers"), 0)
ABSENT |= {"qk_norm": False, "norm_topk": True}
FIELD_TYPES = {field.name: field.type for field in dataclasses.fields(config_lib.ModelConfig)}


def read(hf: dict, **changes) -> config_lib.ModelConfig:
    """Returns the `ModelConfig` of a parsed `config.json`; `changes` override fields.

    Raises ValueError, naming the entry, if the architecture or an option is not supported.
    """
    model_type, supported = hf.get("model_type"), ", ".join(families.FAMILIES)
    if model_type not in families.FAMILIES:
        raise ValueError(f"model_type {model_type!r} in config.json is not supported; use one of {supported}")
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"config.json has quantization_config ({method}): quantized weights are not supported; dequantize the "
            "checkpoint to bfloat16 and remove that entry"
        )
    for name in (*COUNTS, *(name for name in hf if name.startswith("num_"))):
        if type(hf.get(name)) not in (int, type(None)):
            raise ValueError(f"{name} in config.json is {hf[name]!r}; it must be a whole number; correct it")
    if (hf.get("num_hidden_layers") or 0) > config_lib.MAX_LAYERS:  # before they are gone through
        raise ValueError(f"num_hidden_layers in config.json is above {config_lib.MAX_LAYERS}; correct it")
    family = families.FAMILIES[model_type]
    hf = family.defaults | hf
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = "float32" if dtype == "float16" else dtype  # bfloat16 would lose three bits of its mantissa
    fields: dict[str, Any] = ABSENT | {"param_dtype": dtype, "dtype": dtype, "remat": "none", "family": family.name}
    fields |= {field: _entry(hf, field, names) for field, names in (families.COMMON | family.entries).items()}
    fields |= {"head_dim": hf_fields.head_dim(hf)} | family.fixed
    if "activation" not in fields:
        fields["activation"] = hf_fields.activation(hf, family.activation)
    fields |= hf_fields.rope(hf, family.rope, family.rope_theta, may_be_partial=model_type == "glm4_moe")
    return config_lib.ModelConfig(**fields | family.read(hf) | changes)


def _entry(hf: dict, field: str, names: str) -> Any:
    """Returns the value of a `ModelConfig` field from config.json: of the first of its `names` that is set."""
    *preferred, last = names.split()
    name = next((name for name in preferred if hf.get(name)), last)
    kind = FIELD_TYPES[field]
    if kind is bool:
        return bool(hf.get(name))
    value = hf.get(name) or families.EMPTY.get(name, hf.get(name))
    value = hf_fields.need({name: value}, name)
    return float(value) if kind is float else value


def write(config: config_lib.ModelConfig) -> dict:
    """Returns the contents of the `config.json` for a model's config.

    Raises ValueError, naming the fields, if the files of `config.family` cannot express the config.
    """
    is_moe = config.num_experts > 0
    candidates = {key: x for key, x in families.FAMILIES.items() if ("num_experts" in x.entries) == is_moe}
    names = ", ".join(repr(family.name) for family in candidates.values())
    model_type = next((key for key, family in candidates.items() if family.name == config.family), None)
    if model_type is None:
        kind = "mixtures of experts" if is_moe else "dense models"
        raise ValueError(f"model.family = {config.family!r} has no {kind}; set model.family to one of {names}")
    family = candidates[model_type]
    hf = {name.split()[0]: getattr(config, field) for field, name in (families.COMMON | family.entries).items()}
    hf |= {
        "model_type": model_type,
        "architectures": [family.architecture],
        "head_dim": config.head_dim,
        "torch_dtype": config.param_dtype,
        "rope_theta": config.rope_theta,
        "rope_scaling": hf_fields.write_rope_scaling(config),
        family.activation: "gelu_pytorch_tanh" if config.activation == "gelu" else "silu",
    }
    if not config.max_positions:
        del hf["max_position_embeddings"]
    slides = [config.is_sliding(layer) for layer in range(config.num_layers)]
    if any(slides) or family.name in ("gpt_oss", "gemma3"):  # without layer_types, these two have sliding layers
        hf["layer_types"] = [list(hf_fields.LAYER_TYPES)[is_sliding] for is_sliding in slides]
    if any(slides):
        hf["sliding_window"] = config.window
    hf |= family.write(config)
    if lost := _differences(config, read(hf)):
        raise ValueError(
            f"a checkpoint of family {family.name!r} cannot express {'; '.join(lost)}; set model.family to "
            f"one of {names} that can, or change these fields"
        )
    return hf


def update(stored: Mapping, config: config_lib.ModelConfig) -> dict:
    """Returns the contents of the `config.json` for a model that began with a checkpoint, whose `config.json` has `stored`.

    Raises ValueError as `write` does.
    """
    own = write(config)
    names = [name for name in ("dtype", "torch_dtype") if name in stored] or ["torch_dtype"]
    kept = dict(stored) | dict.fromkeys(names, config.param_dtype)
    kept.pop("auto_map", None)  # it names Python files of the first checkpoint
    plain = {name: value for name, value in kept.items() if name not in STATED_TWICE}
    for found in (kept, kept | own, plain | own):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            if not _differences(config, read(found)):
                return found
    return own


def _differences(config: config_lib.ModelConfig, again: config_lib.ModelConfig) -> list[str]:
    """Returns the effective fields in which two configs differ, as 'model.x = 1 (reads as 2)'."""
    mine, theirs = _effective(config), _effective(again)

    def same(a, b):
        return abs(a - b) <= 1e-12 * abs(a) if isinstance(a, float) else a == b

    return [f"model.{n} = {mine[n]!r} (reads as {theirs[n]!r})" for n in mine if not same(mine[n], theirs[n])]


def _effective(config: config_lib.ModelConfig) -> dict:
    """Returns the fields of `config` that matter: without those that another field disables, with derived ones filled in."""
    has_experts = [config.is_moe(layer) for layer in range(config.num_layers)]
    slides = [config.is_sliding(layer) for layer in range(config.num_layers)]
    moe = "experts_per_token expert_ffn_dim norm_topk router router_bias router_correction router_groups"
    yarn = "rope_beta_fast rope_beta_slow rope_truncate rope_attention_factor rope_mscale rope_mscale_all_dim"
    unused = {
        "mixture_every dense_layers": True,
        "rope_factor": config.rope_scaling == "none",
        "rope_original_positions": config.rope_scaling not in ("llama3", "yarn"),
        "rope_low_freq rope_high_freq": config.rope_scaling != "llama3",
        yarn: config.rope_scaling != "yarn",
        "clamp_limit clamp_alpha": config.activation != "clamped",
        "window rope_local_theta": not any(slides),
        "ffn_dim ffn_bias": all(has_experts),
        f"{moe} router_groups_kept routed_scale num_shared_experts expert_bias": not any(has_experts),
        "norm_topk": config.router == "topk_softmax",
    }
    absent = {name for names, is_unused in unused.items() if is_unused for name in names.split()}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in fields.items() if name not in absent and name not in COMPUTE_FIELDS} | {
        "first_dense_layers": has_experts,  # stands for all three fields that choose the MoE layers
        "layer_pattern": slides,
        "rope_dim": config.rotated_dim,
        "value_dim": config.v_dim,
        "attention_scale": config.score_scale,
    }
