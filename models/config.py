"""What a model is: its dims and its switches, frozen and hashable, so that it can be a static argument of jit.

1. `ModelConfig` states one decoder. The switches cover Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE, DeepSeek-V3, gpt-oss and
   the text model of Gemma 3; a switch means one thing, whatever the family.
2. `models/hf/config.py` reads and writes the `config.json` of a Hugging Face checkpoint;
   `models/presets.py` holds the published models.
"""

import dataclasses
import math

FAMILIES = ("llama", "qwen2", "qwen3", "glm4_moe", "deepseek_v3", "gpt_oss", "gemma3")

CHOICES = {
    "family": FAMILIES,
    "param_dtype": ("float32", "bfloat16"),
    "dtype": ("float32", "bfloat16"),
    "remat": ("none", "block", "dots", "offload"),
    "norm": ("rms", "rms_float32", "rms_plus_one"),
    "activation": ("silu", "gelu", "clamped"),
    "rope_scaling": ("none", "linear", "llama3", "yarn"),
    "router": ("softmax", "sigmoid", "topk_softmax"),
    "attention": ("auto", "xla", "splash", "cudnn"),
    "grouped_matmul": ("auto", "ragged_dot", "megablox"),
}

KINDS = {
    float: (float, int),
    tuple[int, ...]: tuple,
}  # what else a field of a type may hold; JSON writes 1e6 as it likes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: norm, attention and a dense or mixture ffn per layer. Letters as in models/transformer.py."""

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
    first_dense_layers: int  # layers before the first mixture layer
    norm_topk: bool  # the chosen experts' weights sum to 1
    param_dtype: str  # of the parameters at rest
    dtype: str  # of activations and matmuls; norms, softmax, router and logits are float32
    remat: str  # what the backward pass recomputes: "none", "block" (a layer), "dots" (all but matmuls), "offload"
    family: str = "qwen3"  # whose names a saved checkpoint bears; changes no arithmetic
    max_positions: int = 0  # positions the model was trained for; 0: not known. Changes no arithmetic
    # Blocks.
    norm: str = (
        "rms"  # "rms": cast, then weight; "rms_float32": weight, then cast; "rms_plus_one": 1 + weight, then cast
    )
    post_norms: bool = False  # a second norm behind attention and ffn (Gemma)
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
    attention_softcap: float = 0.0  # scores = cap tanh(scores / cap); 0: off
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
    q_latent_dim: int = 0  # 0: queries are projected at once
    value_dim: int = 0  # C of the values; 0: head_dim
    # Mixture.
    router: str = "softmax"  # "softmax", "sigmoid", or "topk_softmax" (over the chosen only)
    router_bias: bool = False  # added to the router's logits
    router_correction: bool = False  # added to scores for the choice alone; moved by load, not by gradient
    router_groups: int = 1  # groups of experts, by the sum of their two best scores
    router_groups_kept: int = 1  # groups whose experts may be chosen
    routed_scale: float = 1.0  # factor on the chosen experts' weights
    num_shared_experts: int = 0  # run on every token, as one dense ffn of that many times expert_ffn_dim
    expert_bias: bool = False  # on gate, up and down of the experts
    mixture_every: int = 1  # layer n mixes if n + 1 is a multiple of it ...
    dense_layers: tuple[int, ...] = ()  # ... and it is not named here
    # How it is computed; changes results by rounding only.
    scan_layers: bool = False  # equal layers are stacked and scanned: compile time is flat in depth
    attention: str = "auto"  # "auto": splash on TPU, cudnn on GPU, xla elsewhere
    grouped_matmul: str = "auto"  # "auto": megablox on TPU, ragged_dot elsewhere

    def __post_init__(self):
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))  # JSON knows lists only
        _check(self)

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (0-based) routes its tokens to experts."""
        return (
            self.num_experts > 0
            and layer >= self.first_dense_layers
            and (layer + 1) % self.mixture_every == 0
            and layer not in self.dense_layers
        )

    def is_sliding(self, layer: int) -> bool:
        """Whether `layer` (0-based) reads only the last `window` tokens."""
        return self.layer_pattern[layer % len(self.layer_pattern)] == "S"

    @property
    def is_latent(self) -> bool:
        return self.kv_latent_dim > 0

    @property
    def rotated_dim(self) -> int:
        return self.rope_dim or self.head_dim

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """Factor on q k; DeepSeek's stretch sharpens it by the square of YaRN's temperature (arXiv 2412.19437)."""
        scale = self.attention_scale or self.head_dim**-0.5
        if self.is_latent and self.rope_scaling == "yarn" and self.rope_mscale_all_dim:
            scale *= yarn_temperature(self.rope_factor, self.rope_mscale_all_dim) ** 2
        return scale


def yarn_temperature(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1 (YaRN, arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _check(config: ModelConfig) -> None:
    def refuse(field: str, rule: str):
        raise ValueError(f"model.{field} = {getattr(config, field)!r} {rule}")

    for field in dataclasses.fields(config):
        value, kinds = getattr(config, field.name), KINDS.get(field.type, field.type)
        if not isinstance(value, kinds) or (isinstance(value, bool) and field.type is not bool):
            refuse(field.name, f"must be a {getattr(field.type, '__name__', field.type)}")
        if isinstance(value, float) and not math.isfinite(value):
            refuse(field.name, "must be finite")
    for field in ("vocab_size", "model_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mixture_every"):
        if getattr(config, field) < 1:
            refuse(field, "must be at least 1")
    for field in ("window", "final_softcap", "attention_softcap", "attention_scale", "norm_eps", "num_experts"):
        if getattr(config, field) < 0:
            refuse(field, "must be at least 0")
    if config.rope_theta <= 0:
        refuse("rope_theta", "must be above 0")
    if not all(map(config.is_moe, range(config.num_layers))) and config.ffn_dim < 1:
        refuse("ffn_dim", "must be at least 1 where layers are dense")
    for field, choices in CHOICES.items():
        if getattr(config, field) not in choices:
            refuse(field, f"must be one of {', '.join(map(repr, choices))}")
    if config.num_heads % config.num_kv_heads:
        refuse(
            "num_heads",
            f"is not a multiple of model.num_kv_heads = {config.num_kv_heads}; each key head serves an equal number "
            "of query heads",
        )
    # An odd part of a head rotates as one dim more (GLM's: half of 10), at the odd number's frequencies.
    odd = config.rotated_dim % 2 and (not config.rope_dim or config.is_latent or config.rope_scaling == "yarn")
    if odd or config.rotated_dim + config.rotated_dim % 2 > config.head_dim:
        field = "rope_dim" if config.rope_dim else "head_dim"
        refuse(field, f"must be even and at most head_dim = {config.head_dim}; rotary positions turn pairs of dims")
    if config.num_experts:
        _check_mixture(config, refuse)
    if not config.layer_pattern or set(config.layer_pattern) - set("FS"):
        refuse("layer_pattern", "must be a word over F (full) and S (sliding), such as 'SSSSSF'")
    if "S" in config.layer_pattern and config.window < 1:
        refuse("window", f"must be at least 1, as model.layer_pattern = {config.layer_pattern!r} has sliding layers")
    if config.rope_scaling in ("llama3", "yarn") and config.rope_original_positions < 1:
        refuse("rope_original_positions", f"must be at least 1 with model.rope_scaling = {config.rope_scaling!r}")
    if config.rope_factor <= 0:
        refuse("rope_factor", "must be positive")
    if config.rope_scaling == "llama3" and not 0 < config.rope_low_freq <= config.rope_high_freq:
        refuse("rope_low_freq", f"must lie above 0 and not above model.rope_high_freq = {config.rope_high_freq}")
    if config.is_latent and (config.num_kv_heads != config.num_heads or config.qk_norm or config.sinks):
        refuse("kv_latent_dim", "needs num_kv_heads = num_heads, and neither qk_norm nor sinks")
    if config.is_latent and not 0 < config.rope_dim < config.head_dim:
        refuse("rope_dim", f"must lie in 1..{config.head_dim - 1}: a latent head has rotated and plain dims")


def _check_mixture(config: ModelConfig, refuse) -> None:
    E, X, groups = config.num_experts, config.experts_per_token, config.router_groups
    if not 1 <= X <= E:
        refuse("experts_per_token", f"must lie in 1..model.num_experts = {E}")
    if groups < 1 or E % groups:
        refuse("router_groups", f"must divide model.num_experts = {E}")
    if not 1 <= config.router_groups_kept <= groups:
        refuse("router_groups_kept", f"must lie in 1..model.router_groups = {groups}")
    if groups > 1 and config.router != "sigmoid":
        refuse("router_groups", f"needs model.router = 'sigmoid', not {config.router!r}")
    if groups > 1 and E // groups < 2:
        refuse("router_groups", f"leaves fewer than 2 of {E} experts per group, whose two best decide")
    if config.router_groups_kept * (E // groups) < X:
        refuse(
            "experts_per_token", f"exceeds the {config.router_groups_kept * (E // groups)} experts of the kept groups"
        )
    if config.expert_ffn_dim < 1:
        refuse("expert_ffn_dim", f"must be at least 1, as model.num_experts = {E}")
