"""Reads and writes the entries of a `config.json` that all families share: rotary positions, layer types, activation.

Both spellings are read: `rope_theta` with `rope_scaling` (transformers 4), and `rope_parameters`, nested by layer type if
the types differ (transformers 5). Entries without a counterpart here raise an error: ignoring them would give wrong logits.
"""

from typing import Any

from models import config as config_lib

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
# Entries of a rope_type that are optional or (llama3) required, and their fields.
SCALING = {
    "linear": {},
    "llama3": {"low_freq_factor": "rope_low_freq", "high_freq_factor": "rope_high_freq"},
    "yarn": {key: f"rope_{key}" for key in "beta_fast beta_slow attention_factor mscale mscale_all_dim".split()},
}
LAYER_TYPES = {"full_attention": "F", "sliding_attention": "S"}


def rope(hf: dict, default: dict, default_theta: float, *, may_be_partial: bool) -> dict:
    """Returns the `ModelConfig` fields of rotary positions in a config.json; the defaults are used for absent entries.

    Raises ValueError if the scaling is not supported, or if only a fraction of each head rotates and not `may_be_partial`.
    """
    stated = hf.get("rope_scaling") or hf.get("rope_parameters") or default
    if not isinstance(stated, dict):
        raise ValueError(
            f"rope_scaling {stated!r} in config.json is not an object; write {{'rope_type': {stated!r}, ...}}"
        )
    local = stated.get("sliding_attention") or {}
    if is_nested := bool(LAYER_TYPES.keys() & stated.keys()):
        stated = stated.get("full_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {local['rope_type']!r} of sliding layers is not supported; use 'default'")
    for part in (hf.get("partial_rotary_factor"), *(x.get("partial_rotary_factor") for x in (stated, local))):
        if part not in (None, 1.0) and not may_be_partial:
            raise ValueError(
                f"partial_rotary_factor {part} in config.json must be 1.0 for a {hf['model_type']!r} model; use one with 1.0"
            )
    kind = stated.get("rope_type") or stated.get("type") or "default"
    fields: dict = {"rope_theta": float(stated.get("rope_theta") or hf.get("rope_theta") or default_theta)}
    if is_nested:
        fields["rope_local_theta"] = float(local.get("rope_theta", 10000.0))
    if kind == "default":
        return fields
    if kind not in SCALING:
        raise ValueError(f"rope_type {kind!r} in config.json is not supported; use default, linear, llama3 or yarn")
    original = int(stated.get("original_max_position_embeddings") or hf.get("max_position_embeddings") or 0)
    if not original and kind != "linear":
        raise ValueError(f"rope_type {kind!r} needs original_max_position_embeddings in config.json; add it")
    factor, where = stated.get("factor"), "the rope scaling in config.json"
    if factor is None and kind == "yarn" and hf.get("max_position_embeddings"):
        factor = hf["max_position_embeddings"] / original
    fields |= {"rope_scaling": kind, "rope_factor": float(need({"factor": factor}, "factor", where))}
    if kind == "linear":
        return fields
    fields["rope_original_positions"] = original
    if kind == "llama3":
        return fields | {ours: float(need(stated, name, where)) for name, ours in SCALING[kind].items()}
    if stated.get("attention_factor") == 0:
        raise ValueError("attention_factor 0 in config.json would erase all keys; remove it to derive it from factor")
    fields |= {ours: float(stated[name]) for name, ours in SCALING[kind].items() if stated.get(name)}
    return fields | {"rope_truncate": bool(stated.get("truncate", True))}


def write_rope_scaling(config: config_lib.ModelConfig) -> dict | None:
    """Returns the value of `rope_scaling` for a config.json of transformers 4, or None if positions are not scaled."""
    kind = config.rope_scaling
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": config.rope_factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = config.rope_original_positions
    scaling |= {name: value for name, ours in SCALING[kind].items() if (value := getattr(config, ours))}
    if kind == "yarn" and not config.rope_truncate:
        scaling["truncate"] = False
    return scaling


def layers(hf: dict, default: list[bool]) -> dict:
    """Returns the `ModelConfig` fields of sliding-window layers, `layer_pattern` and `window`; {} if no layer slides.

    The entry `layer_types` of config.json lists the layers; without it, `default` has True for each sliding layer.
    """
    sliding = default
    if kinds := hf.get("layer_types"):
        if unknown := set(kinds) - set(LAYER_TYPES):
            raise ValueError(
                f"layer type {min(unknown)!r} in config.json is not one of {', '.join(LAYER_TYPES)}; correct it"
            )
        if len(kinds) != (L := hf["num_hidden_layers"]):
            raise ValueError(
                f"layer_types in config.json has {len(kinds)} entries, but num_hidden_layers is {L}; correct the wrong one"
            )
        sliding = [LAYER_TYPES[name] == "S" for name in kinds]
    if not any(sliding):
        return {}
    L = len(sliding)
    # the shortest cycle
    period = next(p for p in range(1, L + 1) if all(sliding[i] == sliding[i % p] for i in range(L)))
    return {"layer_pattern": "".join("FS"[s] for s in sliding[:period]), "window": need(hf, "sliding_window")}


def head_dim(hf: dict) -> int:
    """Returns the dims of an attention head: the entry `head_dim` of config.json, or hidden_size / num_attention_heads."""
    return hf.get("head_dim") or hf["hidden_size"] // max(hf["num_attention_heads"], 1)


def need(hf: dict, key: str, where: str = "config.json") -> Any:
    """Returns the entry `key` of config.json (or of the part `where`). Raises ValueError if it is absent or null."""
    if hf.get(key) is None:
        raise ValueError(f"{where} has no entry {key!r}; add it")
    return hf[key]


def activation(hf: dict, key: str) -> str:
    """Returns `ModelConfig.activation` for the entry `key` of config.json. Raises ValueError if the function is unsupported."""
    name = hf.get(key, "silu")
    if name not in ACTIVATIONS:
        raise ValueError(f"{key} {name!r} in config.json is not supported; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
