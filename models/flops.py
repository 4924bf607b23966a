"""The arithmetic of a model: parameters that a token is multiplied with, and FLOPs per token and per step."""

import dataclasses
import math

import jax

from models import config as config_lib
from models import transformer
from sharding import rules


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """Of one model. `multiplied` are parameters that a token is multiplied with, `held` all that there are."""

    config: config_lib.ModelConfig
    held: int
    multiplied: int  # output head included, embedding table not: it is looked up
    head: int  # of the multiplied ones, those of the output head

    @classmethod
    def of(cls, config: config_lib.ModelConfig) -> "ModelFlops":
        held = multiplied = 0
        specs = transformer.specs(config)
        for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=rules.is_spec):
            size = math.prod(spec.shape)
            held += size
            is_table = path[0] == jax.tree_util.DictKey("embed") and not config.tie_embeddings
            if not rules.is_matrix(spec) or is_table:
                continue
            if "experts" in spec.logical_axes:
                size = size * config.experts_per_token // config.num_experts
            multiplied += size
        return cls(config, held, multiplied, config.vocab_size * config.model_dim)

    def attention_flops(self, keys: float) -> float:
        """Forward FLOPs of a token that reads `keys` keys; a sliding layer has it read its window."""
        config = self.config
        read = sum(min(keys, config.window) if config.is_sliding(layer) else keys for layer in range(config.num_layers))
        return 2 * config.num_heads * (config.head_dim + config.v_dim) * read

    def forward_flops(self, num_tokens: float, sequence: float) -> float:
        """Of `num_tokens` tokens in sequences of `sequence`."""
        return num_tokens * (2 * self.multiplied + self.attention_flops((sequence + 1) / 2))

    def model_flops(self, num_tokens: float, sequence: float) -> float:
        """Of a training step: what MFU counts."""
        return 3 * self.forward_flops(num_tokens, sequence)

    def executed_flops(self, num_tokens: float, row: float) -> float:
        """Of a training step, recomputation included: what the chips have to do.

        A layer's forward pass runs again with remat "block" and "offload"; the output head's always does
        (models/logprobs.py). The attention kernel works through the causal half of whole rows, and recomputes its
        scores in the backward pass: five matmuls for the forward pass's two.
        """
        again = 1 if self.config.remat in ("block", "offload") else 0
        layers = (3 + again) * 2 * (self.multiplied - self.head)
        attention = (1 + again + 2.5) * self.attention_flops((row + 1) / 2)
        return num_tokens * (layers + 4 * 2 * self.head + attention)

    def read_parameters(self, num_tokens: int) -> float:
        """Parameters that a step of `num_tokens` tokens reads: of a mixture, the experts that any of them chose.

        With routing at random an expert is left alone with probability (1 - X / E) ^ tokens. The embedding table is
        looked up, not read.
        """
        config = self.config
        read = 0.0
        for path, spec in jax.tree_util.tree_leaves_with_path(transformer.specs(config), is_leaf=rules.is_spec):
            if path[0] == jax.tree_util.DictKey("embed") and not config.tie_embeddings:
                continue
            share = 1.0
            if "experts" in spec.logical_axes:
                share = 1 - (1 - config.experts_per_token / config.num_experts) ** num_tokens
            read += share * math.prod(spec.shape)
        return read
