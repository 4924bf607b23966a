"""The arithmetic of a model: the parameters a token is multiplied with, and FLOPs per token, sequence, and step."""

import dataclasses
import math

import jax

from models import config as config_lib
from models import transformer
from models.kernels import splash_attention
from sharding import rules


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """The parameter counts of one model, from which FLOPs follow: 2 per multiplied weight, and 2 per dim of a key or value for each query head that reads it."""

    config: config_lib.ModelConfig
    held: int  # all parameters
    multiplied: int  # those a token is multiplied with: the output head, but not the embedding table, which is a lookup
    head: int  # those of the output head, included in `multiplied`

    @classmethod
    def of(cls, config: config_lib.ModelConfig) -> "ModelFlops":
        """Returns the counts for the model of `config`. Of routed experts, only the chosen ones count as multiplied."""
        held = multiplied = 0
        for spec, is_lookup in _specs(config):
            size = math.prod(spec.shape)
            held += size
            if not rules.is_matrix(spec) or is_lookup:
                continue
            if "experts" in spec.logical_axes:
                size = size * config.experts_per_token // config.num_experts
            multiplied += size
        return cls(config, held, multiplied, config.vocab_size * config.model_dim)

    @property
    def per_key(self) -> int:
        """The forward FLOPs in one layer for each key, and its value, that a token's attention reads."""
        return 2 * self.config.num_heads * (self.config.head_dim + self.config.v_dim)

    def prefix_flops(self, length: int) -> int:
        """Returns the exact forward FLOPs of the first `length` tokens of a sequence, without the output head.

        Token n reads n + 1 keys; in a sliding layer, at most the last `window` of them.
        """
        config, near = self.config, min(length, self.config.window)
        num_sliding = sum(map(config.is_sliding, range(config.num_layers)))
        keys = (config.num_layers - num_sliding) * (length * (length + 1) // 2)
        keys += num_sliding * (near * (near + 1) // 2 + (length - near) * config.window)
        return 2 * length * (self.multiplied - self.head) + self.per_key * keys

    def attention_flops(self, keys: float) -> float:
        """Returns the forward FLOPs of attention for one token that reads `keys` keys, in sliding layers at most the window."""
        config = self.config
        read = sum(min(keys, config.window) if config.is_sliding(layer) else keys for layer in range(config.num_layers))
        return self.per_key * read

    def forward_flops(self, num_tokens: float, sequence: float) -> float:
        """Returns the forward FLOPs of `num_tokens` tokens; on average, each reads the keys of half a sequence of length `sequence`."""
        return num_tokens * (2 * self.multiplied + self.attention_flops((sequence + 1) / 2))

    def model_flops(self, num_tokens: float, sequence: float) -> float:
        """Returns the FLOPs of a train step on `num_tokens` tokens that MFU counts: three forward passes, no recomputation."""
        return 3 * self.forward_flops(num_tokens, sequence)

    def kernel_flops(self, row: int, sequence: int) -> float:
        """Returns the FLOPs of the attention kernel's forward pass per token, in rows of `row` tokens packed with sequences of `sequence`.

        It works through all keys of the blocks that it visits (models/kernels/splash_attention.py).
        """
        config, block = self.config, min(splash_attention.BLOCK, row)
        columns = range(0, row, block)

        def keys(window: int) -> float:
            firsts = (max(column // sequence * sequence, column - window + 1 if window else 0) for column in columns)
            return (
                sum(column // block - first // block + 1 for column, first in zip(columns, firsts, strict=True)) * block
            )

        layers = (config.is_sliding(layer) for layer in range(config.num_layers))
        return self.per_key * sum(keys(config.window if sliding else 0) for sliding in layers) / len(columns)

    def scoring_flops(self, num_tokens: float, row: int, sequence: int) -> float:
        """Returns the FLOPs that the chips execute in a forward pass on `num_tokens` tokens of packed rows."""
        return num_tokens * (2 * self.multiplied + self.kernel_flops(row, sequence))

    def executed_flops(self, num_tokens: float, row: int, sequence: int) -> float:
        """Returns the FLOPs that the chips execute in a train step on `num_tokens` tokens, recomputation included.

        A layer's forward pass runs again with remat "block", "attention", and "offload"; the output head's always does, and that of the
        attention kernel unless remat is "none" or "attention". The kernel's backward pass has seven matmuls: the two of the scores in
        both of its parts, dq alone, dk and dv. The forward pass has two.
        """
        again = 1 if self.config.remat in ("block", "attention", "offload") else 0
        layers = (3 + again) * 2 * (self.multiplied - self.head)
        attention = (1 + (self.config.remat not in ("none", "attention")) + 3.5) * self.kernel_flops(row, sequence)
        return num_tokens * (layers + 4 * 2 * self.head + attention)

    def read_parameters(self, num_tokens: int) -> float:
        """Returns the expected number of parameters that a forward pass of `num_tokens` tokens reads from memory.

        With random routing to X of E experts, no token reads an expert with probability (1 - X / E) ^ num_tokens.
        """
        unread = (1 - self.config.experts_per_token / max(self.config.num_experts, 1)) ** num_tokens
        return sum(
            math.prod(spec.shape) * (1 - unread if "experts" in spec.logical_axes else 1)
            for spec, is_lookup in _specs(self.config)
            if not is_lookup
        )


def _specs(config: config_lib.ModelConfig) -> list[tuple[rules.ParamSpec, bool]]:
    """Returns (spec, True if it is an embedding table that is only looked up) of each parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(transformer.specs(config), is_leaf=rules.is_spec)
    table = jax.tree_util.DictKey("embed")
    return [(spec, path[0] == table and not config.tie_embeddings) for path, spec in leaves]
