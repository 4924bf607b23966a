"""The description of a model: its dims and options, frozen and hashable, a static argument of jit.

`ModelConfig` describes one decoder. Its fields cover Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE, DeepSeek-V3, gpt-oss and the
text model of Gemma 3; a field means the same in every family. `models/hf/config.py` converts it from and to the `config.json`
of a Hugging Face checkpoint; `configs/presets.py` has published ones.
"""

import dataclasses
import math
from collections.abc import Iterator

QUANTIZATIONS = ("none", "int8", "int4")  # of the weights of a server
CHOICES = {
    "family": ("llama", "qwen2", "qwen3", "glm4_moe", "deepseek_v3", "gpt_oss", "gemma3"),
    "param_dtype": ("float32", "bfloat16"),
    "dtype": ("float32", "bfloat16"),
    "remat": ("none", "block", "dots", "attention", "offload"),
    "norm": ("rms", "rms_float32", "rms_plus_one"),
    "activation": ("silu", "gelu", "clamped"),
    "rope_scaling": ("none", "linear", "llama3", "yarn"),
    "router": ("softmax", "sigmoid", "topk_softmax"),
    "attention": ("auto", "xla", "splash", "triton"),
    "grouped_matmul": ("auto", "ragged_dot", "megablox", "triton"),
    "reduce_dtype": ("auto", "float32"),
}

MAX_LAYERS, MAX_EXPERTS = 1024, 2**17  # in all layers: a config from elsewhere must not exhaust memory or time
KINDS = {float: (float, int), tuple[int, ...]: tuple}  # field type -> accepted types; JSON may write 1e6 as an integer


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder-only model: dims, attention, dense or mixture-of-experts ffn, and implementation.

    Construction raises ValueError, naming the field and the rule, if the fields do not fit together. The letters in the
    comments (D model, H heads, ...) are explained in models/transformer.py.
    """

    vocab_size: int  # V; rows of the embedding, padding for sharding included
    model_dim: int  # D
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # K; H is a multiple of it
    head_dim: int  # C, of queries and keys
    ffn_dim: int  # F of a dense layer
    rope_theta: float
    norm_eps: float
    qk_norm: bool  # RMSNorm on each query and key head, before the rotation
    tie_embeddings: bool  # the output head is the embedding, transposed
    num_experts: int  # E; 0 makes every layer dense
    experts_per_token: int  # X
    expert_ffn_dim: int  # F of one expert
    first_dense_layers: int  # layers before the first MoE layer
    norm_topk: bool  # the chosen experts' weights sum to 1
    param_dtype: str  # of the parameters at rest
    dtype: str  # of activations and matmuls; norms, softmax, router and logits are float32
    remat: str  # the backward pass recomputes "none", "block" (whole layers), "dots" (all but matmuls), "attention" (all but it), or "offload"
    family: str = "qwen3"  # decides the tensor names of a saved checkpoint; changes no arithmetic
    max_positions: int = 0  # positions the model was trained for; 0: unknown. Changes no arithmetic
    # Blocks.
    norm: str = "rms"  # cast, then weight; "rms_float32": weight, then cast; "rms_plus_one": 1 + weight, then cast
    post_norms: bool = False  # a second norm after attention and ffn (Gemma)
    scale_embeddings: bool = False  # embeddings times sqrt(D) (Gemma)
    activation: str = "silu"  # of the ffn's gate: "silu", "gelu" (tanh), "clamped" (gpt-oss)
    clamp_limit: float = 7.0  # of "clamped": gate <= limit, |up| <= limit
    clamp_alpha: float = 1.702  # of "clamped": gate sigmoid(alpha gate) (up + 1)
    ffn_bias: bool = False  # on gate, up and down of dense layers
    final_softcap: float = 0.0  # logits = cap tanh(logits / cap); 0: off
    # Attention.
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False  # one learned logit per query head in the softmax, without a value (gpt-oss)
    window: int = 0  # tokens that a sliding layer reads, its own included
    layer_pattern: str = "F"  # repeated over the layers: F reads its whole sequence, S slides
    attention_scale: float = 0.0  # of q k; 0: head_dim ** -0.5
    # Rotary positions.
    rope_dim: int = 0  # leading dims of a head that rotate (of MLA: the trailing ones), in pairs; 0: all
    rope_interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + d / 2)
    rope_local_theta: float = 0.0  # of sliding layers, unscaled; 0: they rotate as the others
    rope_scaling: str = "none"
    rope_factor: float = 1.0  # stretch of "linear", "llama3", "yarn"
    rope_original_positions: int = 0  # trained length before the stretch; "llama3", "yarn"
    rope_low_freq: float = 1.0  # "llama3"
    rope_high_freq: float = 4.0
    rope_beta_fast: float = 32.0  # "yarn"
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True  # "yarn": the ramp starts and ends at whole dims
    rope_attention_factor: float = 0.0  # "yarn": factor on cos and sin; 0: derived from the stretch
    rope_mscale: float = 0.0  # "yarn", DeepSeek's; 0: absent
    rope_mscale_all_dim: float = 0.0
    # Multi-head latent attention (DeepSeek): keys and values are made from one latent per token.
    kv_latent_dim: int = 0  # R; 0: ordinary attention
    q_latent_dim: int = 0  # 0: queries are projected directly
    value_dim: int = 0  # C of the values; 0: head_dim
    # Mixture of experts.
    router: str = "softmax"  # "softmax", "sigmoid", or "topk_softmax" (over the chosen only)
    router_bias: bool = False  # added to the router's logits
    router_correction: bool = False  # added to scores for the choice alone; updated from the load, not by gradient
    router_groups: int = 1  # groups of experts, by the sum of their two best scores
    router_groups_kept: int = 1  # groups whose experts may be chosen
    routed_scale: float = 1.0  # factor on the chosen experts' weights
    num_shared_experts: int = 0  # run on every token, as one dense ffn of that many times expert_ffn_dim
    expert_bias: bool = False  # on gate, up and down of the experts
    mixture_every: int = 1  # layer n has experts if n + 1 is a multiple of this ...
    dense_layers: tuple[int, ...] = ()  # ... and n is not listed here
    # Implementation; changes results by rounding only.
    scan_layers: bool = False  # equal layers are stacked and scanned: compile time is flat in depth
    attention: str = "auto"  # "auto": splash on TPU, triton on GPU, xla elsewhere
    grouped_matmul: str = "auto"  # "auto": megablox on TPU, triton on GPU, ragged_dot elsewhere
    reduce_dtype: str = "auto"  # in which devices sum their gradients of matrices; "auto": that of activations

    def __post_init__(self):
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))  # JSON has lists only
        for holds, field, rule in _rules(self):
            if not holds:
                raise ValueError(f"model.{field} = {getattr(self, field)!r} {rule}")

    def is_moe(self, layer: int) -> bool:
        """Returns True if `layer` (0-based) routes its tokens to experts."""
        is_dense = layer < self.first_dense_layers or layer in self.dense_layers
        return self.num_experts > 0 and (layer + 1) % self.mixture_every == 0 and not is_dense

    def is_sliding(self, layer: int) -> bool:
        """Returns True if `layer` (0-based) reads only the last `window` tokens."""
        return self.layer_pattern[layer % len(self.layer_pattern)] == "S"

    @property
    def is_latent(self) -> bool:
        """True if the model has multi-head latent attention (DeepSeek)."""
        return self.kv_latent_dim > 0

    @property
    def rotated_dim(self) -> int:
        """The number of dims of each head that rotary positions rotate."""
        return self.rope_dim or self.head_dim

    @property
    def v_dim(self) -> int:
        """The number of dims of a value head, which may differ from that of queries and keys."""
        return self.value_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """The factor on attention scores q k. DeepSeek includes the square of YaRN's factor on queries and keys (arXiv 2412.19437)."""
        scale = self.attention_scale or self.head_dim**-0.5
        if self.is_latent and self.rope_scaling == "yarn" and self.rope_mscale_all_dim:
            scale *= yarn_factor(self.rope_factor, self.rope_mscale_all_dim) ** 2
        return scale


def yarn_factor(factor: float, mscale: float) -> float:
    """Returns YaRN's factor on attention, 0.1 mscale ln(factor) + 1 (arXiv 2309.00071, section 3.4), or 1 if factor <= 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rules(c: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    """Yields (True if the config keeps the rule, name of the field, text of the rule). A rule relies on the earlier ones."""
    for field in dataclasses.fields(c):
        value, kinds = getattr(c, field.name), KINDS.get(field.type, field.type)
        is_kind = isinstance(value, kinds) and (field.type is bool or not isinstance(value, bool))
        yield is_kind, field.name, f"must be of type {getattr(field.type, '__name__', field.type)}"
        yield not isinstance(value, float) or math.isfinite(value), field.name, "must be finite"
    for name in ("vocab_size", "model_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mixture_every"):
        yield getattr(c, name) >= 1, name, "must be at least 1"
    for name in ("window", "final_softcap", "attention_scale", "norm_eps", "num_experts"):
        yield getattr(c, name) >= 0, name, "must be at least 0"
    yield c.num_layers <= MAX_LAYERS, "num_layers", f"must be at most {MAX_LAYERS}"
    most = MAX_EXPERTS // c.num_layers
    yield c.num_experts <= most, "num_experts", f"must be at most {most} with model.num_layers = {c.num_layers}"
    for name, choices in CHOICES.items():
        yield getattr(c, name) in choices, name, f"must be one of {', '.join(map(repr, choices))}"
    all_moe = all(map(c.is_moe, range(c.num_layers)))
    yield c.ffn_dim >= 1 or all_moe, "ffn_dim", "must be at least 1 if any layer is dense"
    rule = f"must be a multiple of model.num_kv_heads = {c.num_kv_heads}: key heads serve equal numbers of query heads"
    yield c.num_heads % c.num_kv_heads == 0, "num_heads", rule
    if c.num_experts:
        yield from _moe_rules(c)
    yield from _attention_rules(c)


def _moe_rules(c: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    E, X, groups, kept = c.num_experts, c.experts_per_token, c.router_groups, c.router_groups_kept
    yield 1 <= X <= E, "experts_per_token", f"must be in 1..model.num_experts = {E}"
    yield groups >= 1 and E % groups == 0, "router_groups", f"must divide model.num_experts = {E}"
    yield 1 <= kept <= groups, "router_groups_kept", f"must be in 1..model.router_groups = {groups}"
    if groups > 1:
        yield c.router == "sigmoid", "router_groups", f"needs model.router = 'sigmoid', but it is {c.router!r}"
        rule = f"leaves fewer than 2 of {E} experts per group; a group's score is the sum of its best two"
        yield E // groups >= 2, "router_groups", rule
    num_kept = kept * (E // groups)
    yield num_kept >= X, "experts_per_token", f"must be at most {num_kept}, the number of experts in the kept groups"
    yield c.expert_ffn_dim >= 1, "expert_ffn_dim", f"must be at least 1, because model.num_experts = {E}"


def _attention_rules(c: ModelConfig) -> Iterator[tuple[bool, str, str]]:
    # An odd rope_dim rotates as one dim more (GLM's half of 10), at the odd number's frequencies.
    is_odd = c.rotated_dim % 2 == 1
    may_be_odd = c.rope_dim > 0 and not c.is_latent and c.rope_scaling != "yarn"
    fits = (may_be_odd or not is_odd) and c.rotated_dim + is_odd <= c.head_dim
    rule = f"must be even and at most head_dim = {c.head_dim}: rotary positions rotate pairs of dims"
    yield fits, "rope_dim" if c.rope_dim else "head_dim", rule
    yield c.rope_theta > 0, "rope_theta", "must be above 0"
    pattern, scaling = c.layer_pattern, c.rope_scaling
    is_pattern = bool(pattern) and not set(pattern) - set("FS")
    yield is_pattern, "layer_pattern", "must consist of the letters F (full) and S (sliding), such as 'SSSSSF'"
    rule = f"must be at least 1, because model.layer_pattern = {pattern!r} has sliding layers"
    yield "S" not in pattern or c.window >= 1, "window", rule
    rule = f"must be at least 1 with model.rope_scaling = {scaling!r}"
    yield scaling not in ("llama3", "yarn") or c.rope_original_positions >= 1, "rope_original_positions", rule
    yield c.rope_factor > 0, "rope_factor", "must be above 0"
    if scaling == "llama3":
        rule = f"must be above 0 and at most model.rope_high_freq = {c.rope_high_freq}"
        yield 0 < c.rope_low_freq <= c.rope_high_freq, "rope_low_freq", rule
    if c.is_latent:
        plain_heads = c.num_kv_heads == c.num_heads and not c.qk_norm and not c.sinks
        yield plain_heads, "kv_latent_dim", "needs num_kv_heads = num_heads, qk_norm = False and sinks = False"
        rule = f"must be in 1..{c.head_dim - 1}: a latent head has rotated and plain dims"
        yield 0 < c.rope_dim < c.head_dim, "rope_dim", rule
