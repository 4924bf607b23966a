"""A small MoE model, a config of one, and claims of experts that its rollouts can make."""

import itertools

import numpy as np

from configs import quickstart_moe
from models.text import tokenizer as tokenizer_lib
from rl.learning.batch import router_replay
from tests.support import tiny

TOKENIZER = tokenizer_lib.byte_chatml()
MODEL = tiny.model(num_layers=3, num_experts=5, experts_per_token=2, expert_ffn_dim=16, dense_layers=(1,))
CLAIMS = router_replay.RouterReplay.of(MODEL)


def moe_config(**changes):
    """Returns the MoE quickstart with router replay; `train__share_prompts=False` sets config.train.share_prompts."""
    config = quickstart_moe.get_config()
    config.train.router_replay = True
    for name, value in changes.items():
        section, field = name.split("__")
        config[section][field] = value
    return config


def good_claim(num_rows=9, seed=0):
    """Returns random experts that MODEL has, uint8 [num_rows, 3, 2]; layer 1 is dense."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((num_rows, 3, 2), np.uint8)
    for t, layer in itertools.product(range(num_rows), (0, 2)):
        rows[t, layer] = rng.choice(5, 2, replace=False)
    return rows
