"""Rules for rollouts that belong to no run: a replay can be checked, prescribed tasks cannot."""

from inference.rollouts import kept_sets
from models import config as config_lib
from rl.learning.batch import router_replay
from rl.trust.verification import rules as rules_lib


def make(
    model: config_lib.ModelConfig, max_model_len: int, tolerance: rules_lib.Tolerance, **changes
) -> rules_lib.Rules:
    """Returns rules without groups; `changes` replace fields."""
    fields = dict(
        env="",
        env_seed=0,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_tokens=max_model_len,
        groups=lambda step: {},
        filters=kept_sets.OFF,
        tolerance=tolerance,
        experts=router_replay.RouterReplay.of(model),
    )
    return rules_lib.Rules(**fields | changes)
