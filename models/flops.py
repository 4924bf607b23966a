"""The arithmetic of a model: the parameters a token is multiplied with, and FLOPs per token, sequence, and step."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

from models import config as config_lib
from models import transformer
from models.kernels import splash_attention
from sharding.mesh import rules


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The lengths of the sequences in each row of `row_length` tokens, in order; the rest of a row is padding."""

    row_length: int
    sequences: Sequence[Sequence[int]]  # of each row

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(map(sum, self.sequences))

    @property
    def num_columns(self) -> int:
        """The number of tokens of all rows, padding included."""
        return self.row_length * len(self.sequences)

    def visited_keys(self, window: int) -> int:
        """Returns the number of keys in the blocks that the attention kernel visits, summed over all tokens (models/kernels/splash_attention.py)."""
        block = splash_attention.block_of(self.row_length)
        columns_N, num_blocks = np.arange(0, self.row_length, block), 0
        for lengths, count in collections.Counter(map(tuple, self.sequences)).items():
            ends = np.cumsum(lengths, dtype=np.int64)
            of_N = np.searchsorted(ends, columns_N, side="right")  # the sequence of each block's first query
            first_N = np.where(of_N < len(ends), np.append(0, ends)[of_N], columns_N)  # padding reads its own block
            if window:
                first_N = np.maximum(first_N, columns_N - window + 1)
            num_blocks += count * int((columns_N // block - first_N // block + 1).sum())
        return num_blocks * block**2


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """The parameter counts of one model, from which FLOPs follow: 2 per multiplied weight, and 2 per dim of a key or value for each query head that reads it."""

    config: config_lib.ModelConfig
    held: int  # all parameters
    multiplied: int  # those a token is multiplied with: the output head, but not the embedding table, which is a lookup
    head: int  # those of the output head, included in `multiplied`
    last: int  # those of each layer's last matmul, included in `multiplied`, whose product no gradient needs
    is_frozen: bool = False  # True: adapters train alone, and no gradient of these parameters is computed

    @classmethod
    def of(cls, config: config_lib.ModelConfig, *, is_frozen: bool = False) -> "ModelFlops":
        """Returns the counts for a model. Only chosen experts count as multiplied. `is_frozen`: its own parameters do not train."""
        held = multiplied = last = 0
        for name, spec, is_lookup in _specs(config):
            size = math.prod(spec.shape)
            held += size
            if not rules.is_matrix(spec) or is_lookup:
                continue
            if "experts" in spec.logical_axes:
                size = size * config.experts_per_token // config.num_experts
            multiplied += size
            # The products of experts are needed: they are multiplied with the router's weights.
            last += size * (name == "down" and "experts" not in spec.logical_axes and not config.post_norms)
        return cls(config, held, multiplied, config.vocab_size * config.model_dim, last, is_frozen)

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
        """Returns the forward FLOPs of the attention scores and the weighted values of one token, over all layers, without projections.

        The token reads `keys` keys, in sliding layers at most the window.
        """
        config = self.config
        read = sum(min(keys, config.window) if config.is_sliding(layer) else keys for layer in range(config.num_layers))
        return self.per_key * read

    def forward_flops(self, rows: PackedRows) -> float:
        """Returns the forward FLOPs that the sequences of packed rows need: each token reads itself and those before it."""
        sequences = collections.Counter(itertools.chain(*rows.sequences))
        layers = sum(count * self.prefix_flops(length) for length, count in sequences.items())
        return layers + 2 * self.head * rows.num_tokens

    def model_flops(self, rows: PackedRows) -> float:
        """Returns the FLOPs of a train step that MFU counts: three forward passes, no recomputation and no padding.

        Frozen parameters have no gradient, and adapters next to them count as nothing.
        """
        return 3 * self.forward_flops(rows) - self.is_frozen * 2 * self.multiplied * rows.num_tokens

    def kernel_flops(self, rows: PackedRows) -> float:
        """Returns the FLOPs of the attention kernel's forward pass, which works through all keys of the blocks that it visits."""
        config, num_sliding = self.config, sum(map(self.config.is_sliding, range(self.config.num_layers)))
        keys = (config.num_layers - num_sliding) * rows.visited_keys(0)
        return self.per_key * (keys + (num_sliding * rows.visited_keys(config.window) if num_sliding else 0))

    def scoring_flops(self, rows: PackedRows) -> float:
        """Returns the FLOPs that the chips execute in a forward pass on packed rows."""
        return 2 * self.multiplied * rows.num_columns + self.kernel_flops(rows)

    def executed_flops(self, rows: PackedRows) -> float:
        """Returns the FLOPs that the chips execute in a train step on packed rows, recomputation and padding included.

        A layer's forward pass runs again with remat "block", "attention", and "offload", without its last matmul; the output head's
        always does, and that of the attention kernel unless remat is "none" or "attention". The kernel's backward pass has five
        matmuls: the two of the scores, dq, dk, and dv. The forward pass has two.
        """
        again = 1 if self.config.remat in ("block", "attention", "offload") else 0
        layers = (3 + again) * 2 * (self.multiplied - self.head) - again * 2 * self.last
        attention = 1 + (self.config.remat not in ("none", "attention")) + 2.5
        layers += 4 * 2 * self.head - self.is_frozen * 2 * self.multiplied
        return rows.num_columns * layers + attention * self.kernel_flops(rows)

    def read_parameters(self, num_tokens: int) -> float:
        """Returns the expected number of parameters that a forward pass of `num_tokens` tokens reads from memory.

        With random routing to X of E experts, no token reads an expert with probability (1 - X / E) ^ num_tokens.
        """
        unread = (1 - self.config.experts_per_token / max(self.config.num_experts, 1)) ** num_tokens
        return sum(
            math.prod(spec.shape) * (1 - unread if "experts" in spec.logical_axes else 1)
            for _, spec, is_lookup in _specs(self.config)
            if not is_lookup
        )


def _specs(config: config_lib.ModelConfig) -> list[tuple[str, rules.ParamSpec, bool]]:
    """Returns (the last part of its name, spec, True if it is an embedding table that is only looked up) of each parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(transformer.specs(config), is_leaf=rules.is_spec)
    table = jax.tree_util.DictKey("embed")
    return [(path[-1].key, spec, path[0] == table and not config.tie_embeddings) for path, spec in leaves]
