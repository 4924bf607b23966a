"""Maps the tensors of a Hugging Face checkpoint to our parameters.

`tensors(config)` lists the file's tensors in the model's order. Each names the parameters it contains, with a `view` of the
tensor in our layout: loading copies out of the view, saving copies into it, so the two cannot disagree. Kernels in the
files are [out, in], heads first; ours are [in, out].

Letters: D model, H query heads, K key heads, C head dim (V of values), F ffn, E experts, R and Q latent dims, N plain and
P rotated dims of a latent head.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from models import config as config_lib
from models import transformer

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a file's tensor that is one of our parameters, or one layer or expert of a stacked parameter."""

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
    out = {"model.embed_tokens.weight": Tensor((V, D), (Part(("embed",), _same),))}
    for key, indices in transformer.stacks(config).items():
        for n, index in enumerate(indices):
            lead = (n,) if config.scan_layers else ()
            for name, (shape, views) in _layer(config, index).items():
                parts = (_part(("layers", key), lead, path, view) for path, view in views.items())
                out[f"model.layers.{index}.{name}"] = Tensor(shape, tuple(parts))
    out["model.norm.weight"] = Tensor((D,), (Part(("final_norm",), _same),))
    if not config.tie_embeddings:
        out["lm_head.weight"] = Tensor((V, D), (Part(("lm_head",), np.transpose),))
    return out


def leaves(params: transformer.Params) -> dict[Path, jax.Array]:
    """Returns the arrays of a parameter tree by path, a tuple of the keys from the root."""
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def is_ignored(name: str, config: config_lib.ModelConfig) -> bool:
    """Returns True if our models do not use the tensor `name`: multi-token prediction, rotary tables, or a tied head."""
    pieces = name.split(".")
    predicts = config.family in ("glm4_moe", "deepseek_v3")  # in others a layer too many is a wrong num_hidden_layers
    if predicts and pieces[:2] == ["model", "layers"] and len(pieces) > 2 and pieces[2].isdigit():
        if int(pieces[2]) >= config.num_layers:
            return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _part(prefix: Path, lead: tuple[int, ...], path: str, view) -> Part:
    *names, last = path.split(".")
    expert = (int(last),) if last.isdigit() else ()
    return Part((*prefix, *names, *(() if expert else (last,))), view, lead + expert)


def _layer(config, index: int) -> dict:
    """Returns name within the layer -> (shape, {path within the layer, an expert's with its number: view})."""
    D = config.model_dim
    norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.post_norms:
        norms = {
            "attn_norm": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    out = {f"{theirs}.weight": ((D,), {ours: _same}) for ours, theirs in norms.items()}
    out |= _within("self_attn", "attn", _latent_attention(config) if config.is_latent else _attention(config))
    if not config.is_moe(index):
        return out | _within("mlp", "mlp", _ffn(D, config.ffn_dim, config.ffn_bias))
    return out | _within("mlp", "moe", _fused_moe(config) if config.family == "gpt_oss" else _moe(config))


def _within(theirs: str, ours: str, tensors: dict) -> dict:
    return {
        f"{theirs}.{name}": (shape, {f"{ours}.{path}": view for path, view in views.items()})
        for name, (shape, views) in tensors.items()
    }


def _attention(config) -> dict:
    D, H, K, C = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim
    out: dict[str, tuple] = {}
    for name, heads in (("q", H), ("k", K), ("v", K)):
        out[f"{name}_proj.weight"] = (heads * C, D), {name: _heads_out(heads)}
        if config.qkv_bias:
            out[f"{name}_proj.bias"] = (heads * C,), {f"{name}_bias": lambda x, heads=heads: x.reshape(heads, C)}
    out["o_proj.weight"] = (D, H * C), {"o": _heads_in(H)}
    if config.out_bias:
        out["o_proj.bias"] = (D,), {"o_bias": _same}
    if config.qk_norm:
        out |= {f"{name}.weight": ((C,), {name: _same}) for name in ("q_norm", "k_norm")}
    if config.sinks:
        out["sinks"] = (H,), {"sinks": _same}
    return out


def _latent_attention(config) -> dict:
    D, H, C, V = config.model_dim, config.num_heads, config.head_dim, config.v_dim
    R, P, Q = config.kv_latent_dim, config.rope_dim, config.q_latent_dim
    N, heads_out = C - P, _heads_out(H)
    out: dict[str, tuple] = {"q_proj.weight": ((H * C, D), {"q": heads_out})}
    if Q:
        out = {
            "q_a_proj.weight": ((Q, D), {"q_down": np.transpose}),
            "q_a_layernorm.weight": ((Q,), {"q_latent_norm": _same}),
            "q_b_proj.weight": ((H * C, Q), {"q_up": heads_out}),
        }
    if config.qkv_bias:
        key_and_value = {"kv_down_bias": lambda x: x[:R], "k_rope_bias": lambda x: x[R:]}
        out["kv_a_proj_with_mqa.bias"] = (R + P,), key_and_value
        if Q:
            out["q_a_proj.bias"] = (Q,), {"q_down_bias": _same}
    if config.out_bias:
        out["o_proj.bias"] = (D,), {"o_bias": _same}
    up = {"k_up": lambda x: heads_out(x)[..., :N], "v_up": lambda x: heads_out(x)[..., N:]}
    return out | {
        "kv_a_proj_with_mqa.weight": ((R + P, D), {"kv_down": lambda x: x[:R].T, "k_rope": lambda x: x[R:].T}),
        "kv_a_layernorm.weight": ((R,), {"kv_latent_norm": _same}),
        "kv_b_proj.weight": ((H * (N + V), R), up),
        "o_proj.weight": ((D, H * V), {"o": _heads_in(H)}),
    }


def _ffn(D: int, F: int, bias: bool) -> dict:
    out = {}
    for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        out[f"{name}_proj.weight"] = shape, {name: np.transpose}
        if bias:
            out[f"{name}_proj.bias"] = shape[:1], {f"{name}_bias": _same}
    return out


def _moe(config) -> dict:
    D, E, F = config.model_dim, config.num_experts, config.expert_ffn_dim
    out: dict[str, tuple] = {"gate.weight": ((E, D), {"router": np.transpose})}
    if config.router_correction:
        out["gate.e_score_correction_bias"] = (E,), {"correction": _same}
    expert = _ffn(D, F, False)
    for n in range(E):
        for name, (shape, views) in expert.items():
            out[f"experts.{n}.{name}"] = shape, {f"{path}.{n}": view for path, view in views.items()}
    if config.num_shared_experts:
        out |= _within("shared_experts", "shared", _ffn(D, F * config.num_shared_experts, False))
    return out


def _fused_moe(config) -> dict:
    """Returns the tensors of gpt-oss's experts: all experts in one tensor, with alternating columns of gate and up."""
    D, E, F = config.model_dim, config.num_experts, config.expert_ffn_dim

    def gate_and_up(suffix):
        return {f"gate{suffix}": lambda x: x[..., 0::2], f"up{suffix}": lambda x: x[..., 1::2]}

    return {
        "router.weight": ((E, D), {"router": np.transpose}),
        "router.bias": ((E,), {"router_bias": _same}),
        "experts.gate_up_proj": ((E, D, 2 * F), gate_and_up("")),
        "experts.gate_up_proj_bias": ((E, 2 * F), gate_and_up("_bias")),
        "experts.down_proj": ((E, F, D), {"down": _same}),
        "experts.down_proj_bias": ((E, D), {"down_bias": _same}),
    }


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _heads_out(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that views a tensor [H C, D] as [D, H, C], for `heads` = H."""
    return lambda x: x.reshape(heads, -1, x.shape[1]).transpose(2, 0, 1)


def _heads_in(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that views a tensor [D, H C] as [H, C, D], for `heads` = H."""
    return lambda x: x.reshape(x.shape[0], heads, -1).transpose(1, 2, 0)
