"""Work units: the FLOPs of each family against a count by hand, one token, layer, matrix and key at a time."""

import numpy as np
import pytest

from rl.trust.validator import status as validator_status
from tests.support import tiny

D, V, H, K, C = 24, 300, 4, 2, 8
MIXTURE = dict(num_experts=8, experts_per_token=2, expert_ffn_dim=16)


def ordinary(sliding=False):
    """(matrices that a token is multiplied with, keys that a token reads, dims of a key and a value) of attention."""
    return [(D, H * C), (D, K * C), (D, K * C), (H * C, D)], sliding, 2 * C


def ffn(width):
    return [(D, width), (D, width), (width, D)]


def experts(num_shared=0):
    """The router, two chosen experts, and the shared experts."""
    return [(D, 8)] + 2 * ffn(16) + (ffn(16 * num_shared) if num_shared else [])


def latent(q_latent):
    """DeepSeek-V3 in small: a dense layer, then mixtures with two shared experts."""
    queries = [(D, q_latent), (q_latent, H * 7)] if q_latent else [(D, H * 7)]
    attention = [*queries, (D, 10), (D, 2), (10, H * 5), (10, H * 6), (H * 6, D)], False, 7 + 6
    changes = dict(num_kv_heads=H, head_dim=7, first_dense_layers=1, num_shared_experts=2, router="sigmoid")
    changes |= dict(kv_latent_dim=10, q_latent_dim=q_latent, value_dim=6, rope_dim=2)
    return MIXTURE | changes, [(attention, ffn(32)), (attention, experts(2))]


FAMILIES = {
    "deepseek": latent(0),
    "deepseek_latent_queries": latent(7),
    "llama": ({}, [(ordinary(), ffn(32))] * 2),
    "qwen3": (dict(qk_norm=True, tie_embeddings=True), [(ordinary(), ffn(32))] * 2),
    "qwen2": (dict(qkv_bias=True, num_layers=1), [(ordinary(), ffn(32))]),
    "qwen3_moe": (MIXTURE, [(ordinary(), experts())] * 2),
    "glm4_moe": (
        MIXTURE
        | dict(first_dense_layers=1, num_shared_experts=1, router="sigmoid", router_correction=True, num_layers=3),
        [(ordinary(), ffn(32)), (ordinary(), experts(1)), (ordinary(), experts(1))],
    ),
    "gpt_oss": (
        MIXTURE
        | dict(
            layer_pattern="SF", window=5, sinks=True, expert_bias=True, router_bias=True, out_bias=True, qkv_bias=True
        ),
        [(ordinary(sliding=True), experts()), (ordinary(), experts())],
    ),
    "gemma3": (
        dict(layer_pattern="SSF", window=5, num_layers=3, tie_embeddings=True, post_norms=True),
        [(ordinary(sliding=True), ffn(32))] * 2 + [(ordinary(), ffn(32))],
    ),
    "scanned": (MIXTURE | dict(scan_layers=True, num_layers=4), [(ordinary(), experts())] * 4),
}


def count(layers, mask):
    """(Prompt, output) FLOPs: multiply-adds are two."""
    flops, first = [0, 0], int(np.argmax(mask))
    for position in range(len(mask)):
        for (projections, sliding, dims), matrices in layers:
            for rows, columns in projections + matrices:
                flops[position >= first] += 2 * rows * columns
            for key in range(position + 1):
                if not sliding or position - key < 5:
                    flops[position >= first] += 2 * H * dims
        flops[position >= first] += 2 * D * V * bool(mask[position])
    return tuple(flops)


MASKS = [np.arange(17) >= 6, np.arange(3) >= 1, np.isin(np.arange(14), (4, 5, 6, 9, 10, 13))]  # the last: several turns


@pytest.mark.parametrize("mask", MASKS, ids=["long", "short", "turns"])
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_a_count_by_hand(family, mask):
    changes, layers = FAMILIES[family]
    base = dict(vocab_size=V, model_dim=D, num_layers=2, num_heads=H, num_kv_heads=K, head_dim=C, ffn_dim=32)
    model = tiny.model(**base | dict(tie_embeddings=False, qk_norm=False) | changes)
    assert validator_status.flops_of(model, tiny.rollout(mask)) == count(layers, mask)
