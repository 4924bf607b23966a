"""The fields that experiments on TPU slices share: a published model in bfloat16, trained on GSM8K, servers elsewhere.

1. Download the checkpoint, `hf download ORG/NAME --local-dir checkpoints/NAME`, and train.jsonl and test.jsonl of
   github.com/openai/grade-school-math to data/gsm8k. Servers and workers elsewhere need the tokenizer at the same path.
2. Run `rl.train` on every host of the slice (`gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...`): they find each
   other. The work directory and `init_from` are on a disk that all share. 10.0.0.2 is the first host, which prints the commands
   for servers and workers and waits for them. If one host ends, all end, and the same command resumes.
3. Start validators on accelerators of their own, and name them with `--config.trust.validators` (README.md): no CPU of a host keeps up
   with the replays, and groups wait for their verdicts.

A learner splits everything over its chips (fsdp), a server over those of its host (tensor). The experiments' estimates are those of
`python -m rl.plan --config=configs/NAME.py`: the memory of parameters, gradients, and moments, and the time of a step at the lengths
of `plan.median_length`. They assume the chips' full rate: bounds, not measurements.
"""

from configs import base, presets


def get_config(checkpoint: str, topology: str):
    """Returns a config for the checkpoint ORG/NAME of configs/presets.py, in the folder checkpoints/NAME, on the slice `topology`."""
    c = base.get_config()
    presets.use(c, checkpoint)
    c.init_from = f"checkpoints/{checkpoint.partition('/')[2]}"
    c.env.name = "gsm8k"
    c.env.options.path = "data/gsm8k"
    c.optimizer.update(learning_rate=1e-6, beta2=0.999, weight_decay=0.01)  # PRIME-RL, August 2026
    c.inference.steps_per_call = 16
    c.checkpoint.every_minutes = 20.0  # a step may take half an hour
    c.topology.mode = "remote"
    c.plan.topology = topology
    return c
