"""Maps the tensors of a Hugging Face checkpoint to our parameters.

`tensors(config)` lists the file's tensors in the model's order. Each names the parameters it contains, with a `view` of the
tensor in our layout: loading copies out of the view, saving copies into it, so the two cannot disagree. Kernels in the
files are [out, in], heads first; ours are [in, out].
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from models import blocks, transformer
from models import config as config_lib
from models.kernels import int8
from sharding.mesh import rules

Path = tuple[str, ...]

# Tensors of a layer -> the parameters that they join along their last dim. A layer has those that `blocks.specs` has.
LAYER = {
    "self_attn.q_proj.weight": "attn.q",
    "self_attn.k_proj.weight": "attn.k",
    "self_attn.v_proj.weight": "attn.v",
    "self_attn.q_a_proj.weight": "attn.q_down",
    "self_attn.q_a_layernorm.weight": "attn.q_latent_norm",
    "self_attn.q_b_proj.weight": "attn.q_up",
    "self_attn.kv_a_proj_with_mqa.weight": "attn.kv_down attn.k_rope",
    "self_attn.kv_a_layernorm.weight": "attn.kv_latent_norm",
    "self_attn.kv_b_proj.weight": "attn.k_up attn.v_up",
    "self_attn.o_proj.weight": "attn.o",
    "self_attn.q_norm.weight": "attn.q_norm",
    "self_attn.k_norm.weight": "attn.k_norm",
    "self_attn.sinks": "attn.sinks",
    "mlp.gate_proj.weight": "mlp.gate",
    "mlp.up_proj.weight": "mlp.up",
    "mlp.down_proj.weight": "mlp.down",
}
FUSED_EXPERTS = {
    "mlp.router.weight": "moe.router",
    "mlp.experts.gate_up_proj": "moe.gate moe.up",
    "mlp.experts.down_proj": "moe.down",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a checkpoint's tensor that is one parameter of our model, or one layer or expert of a stacked one."""

    path: Path  # names from the root of the parameters
    view: Callable[[np.ndarray], np.ndarray]  # the tensor in our layout; shares its memory
    index: tuple[int, ...] = ()  # layer of a stack, expert of a layer


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a Hugging Face checkpoint: its shape, and the parameters of our model that it contains."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def tensors(config: config_lib.ModelConfig) -> dict[str, Tensor]:
    """Returns the tensors that a checkpoint of this model must have, by name in the file."""
    V, D = config.vocab_size, config.model_dim
    out = {"model.embed_tokens.weight": Tensor((V, D), (Part(("embed",), np.asarray),))}
    names = list(_names(config))
    for key, indices in transformer.stacks(config).items():
        specs = leaves(blocks.specs(config, indices[0]))
        for n, index in enumerate(indices):
            lead = (n,) if config.scan_layers else ()
            for name, paths in names:
                if paths[0] in specs:
                    joined = {path: specs[path] for path in paths}
                    out[f"model.layers.{index}.{name}"] = _tensor(name, joined, ("layers", key), lead)
    out["model.norm.weight"] = Tensor((D,), (Part(("final_norm",), np.asarray),))
    if not config.tie_embeddings:
        out["lm_head.weight"] = Tensor((V, D), (Part(("lm_head",), np.transpose),))
    return out


def leaves(params: transformer.Params) -> dict[Path, Any]:
    """Returns the arrays (or specs) of a parameter tree by path, a tuple of the keys from the root."""
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def is_ignored(name: str, config: config_lib.ModelConfig) -> bool:
    """Returns True if our models do not use the tensor `name`: multi-token prediction, rotary tables, or a tied head."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    predicts = config.family in ("glm4_moe", "deepseek_v3")  # in others a layer too many is a wrong num_hidden_layers
    if predicts and layer and int(layer[1]) >= config.num_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _names(config) -> Iterator[tuple[str, list[Path]]]:
    """Yields (name of a tensor in a layer, paths of the parameters that it joins); a given layer may have none of them."""
    norms = "attn_norm attn_post_norm mlp_norm mlp_post_norm" if config.post_norms else "attn_norm mlp_norm"
    before = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    names = {f"{place}_layernorm.weight": norm for place, norm in zip(before, norms.split(), strict=False)} | LAYER
    if config.family == "gpt_oss":
        names |= FUSED_EXPERTS
    else:
        names |= {"mlp.gate.weight": "moe.router", "mlp.gate.e_score_correction_bias": "moe.correction"}
        places = {f"experts.{n}": "moe" for n in range(config.num_experts)} | {"shared_experts": "moe.shared"}
        for theirs, ours in places.items():
            names |= {f"mlp.{theirs}.{name}_proj.weight": f"{ours}.{name}" for name in ("gate", "up", "down")}
    for name, joined in names.items():
        yield name, [tuple(path.split(".")) for path in joined.split()]
        bias = name.removesuffix("weight") + "bias" if name.endswith(".weight") else f"{name}_bias"
        yield bias, [tuple(f"{path}_bias".split(".")) for path in joined.split()]


def _tensor(name: str, specs: dict[Path, rules.ParamSpec], prefix: Path, lead: tuple[int, ...]) -> Tensor:
    """Returns the tensor that joins parameters along their last dim: in turn, or alternating if all experts are in one tensor."""
    expert = tuple(map(int, re.findall(r"^mlp\.experts\.(\d+)", name)))
    has_all_experts = name.startswith("mlp.experts.") and not expert
    (path, spec), *_ = specs.items()
    num_in = int8.NUM_INPUT_DIMS.get(path[-1], 1) if rules.is_matrix(spec) and not has_all_experts else 0
    sizes = [spec.shape[-1] for spec in specs.values()]
    shape = *spec.shape[len(expert) : -1], sum(sizes)
    parts = []
    for n, path in enumerate(specs):
        start = sum(sizes[:n])
        columns = slice(n, None, len(specs)) if has_all_experts else slice(start, start + sizes[n])
        view = functools.partial(_view, shape=shape, num_in=num_in, columns=columns)
        parts.append(Part((*prefix, *path), view, lead + expert))
    stored = (math.prod(shape[num_in:]), math.prod(shape[:num_in])) if num_in else (math.prod(shape),)
    return Tensor(shape if has_all_experts else stored, tuple(parts))


def _view(x: np.ndarray, shape: tuple[int, ...], num_in: int, columns: slice) -> np.ndarray:
    """Returns `columns` of the last dim of a tensor [out, in] as a parameter [in..., out...], whose first `num_in` dims are in."""
    x = x.reshape(shape[num_in:] + shape[:num_in])
    return np.moveaxis(x, tuple(range(-num_in, 0)), tuple(range(num_in)))[..., columns]
