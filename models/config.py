"""What a model is: its dims and its switches, frozen and hashable, so that it can be a static argument of jit."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Qwen3 family: RMSNorm, rotary positions, grouped queries, SwiGLU or a mixture of them."""

    vocab_size: int  # V; rows of the embedding, padding for sharding included
    model_dim: int  # D
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # K; H is a multiple of it
    head_dim: int  # C
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
    remat: str  # what the backward pass recomputes: "none", "block" (everything inside a layer)

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} is not a multiple of model.num_kv_heads = {self.num_kv_heads}; "
                f"each key head serves an equal number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim} is odd; rotary positions turn pairs of dims")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model.experts_per_token = {self.experts_per_token} must lie in 1..model.num_experts = "
                f"{self.num_experts}"
            )
        for field in ("vocab_size", "model_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"model.{field} = {getattr(self, field)} must be at least 1")
        for field in ("param_dtype", "dtype"):
            if getattr(self, field) not in ("float32", "bfloat16"):
                raise ValueError(f"model.{field} = {getattr(self, field)!r} must be 'float32' or 'bfloat16'")
        if self.remat not in ("none", "block"):
            raise ValueError(f"model.remat = {self.remat!r} must be 'none' or 'block'")

    def is_mixture(self, layer: int) -> bool:
        """Whether `layer` (0-based) routes its tokens to experts."""
        return self.num_experts > 0 and layer >= self.first_dense_layers
