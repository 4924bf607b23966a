"""The quickstart with a mixture of experts: 4 experts, 2 per token.

    python -m rl.train --config=configs/quickstart_moe.py --workdir=runs/quickstart_moe

Over 8 fake devices: JAX_NUM_CPU_DEVICES=8, --config.mesh.fsdp=2 --config.mesh.expert=4.
"""

from configs import quickstart


def get_config():
    """Returns the config of this experiment."""
    c = quickstart.get_config()
    c.model.update(num_experts=4, experts_per_token=2, expert_ffn_dim=192)
    return c
