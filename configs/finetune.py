"""Any supported checkpoint on one GPU, one TPU host, or a CPU: does RL improve your model on your task?

    python -m rl.train --config=configs/finetune.py --workdir=runs/finetune --config.init_from=Qwen/Qwen3-0.6B

`init_from` is a folder or a hub ID. It brings architecture, tokenizer, chat template and stop tokens; `model.*` is only for fields
that shall differ. It may be the working directory of another run, too. Adapters train (`lora.rank`), also in supervised fine-tuning
(`python -m rl.sft`, or `warmup.num_steps` before RL); 0 trains all parameters, in float32. The sizes that are 0 here are chosen for
the devices and their memory, and printed (rl/experiment/plan/sizes.py). The first score is the checkpoint's own.

Hardware: `python -m rl.plan --config=configs/finetune.py --config.init_from=FOLDER --topology=v5e:1x1` compiles learner and engine
for one TPU chip, and prints sizes and memory (docs/performance.md).
"""

from configs import base


def get_config():
    """Returns the config of this experiment."""
    c = base.get_config()
    c.init_from = "Qwen/Qwen3-0.6B"
    c.model.update(dtype="auto", param_dtype="auto", remat="auto", scan_layers=True)
    c.lora.rank = 16
    c.rl.update(
        num_steps=200, samples_per_prompt=8, advantage="group_mean", loss="masked_importance_sampling", average="batch"
    )
    c.sampling.max_tokens = c.rl.prompts_per_step = c.evaluation.num_tasks = 0
    c.train.row_length = c.train.rows = c.inference.num_slots = c.inference.max_model_len = c.inference.mesh.tensor = 0
    c.inference.num_pages = -1
    c.warmup.update(learning_rate=2e-4, tasks_per_step=32)  # with lora.rank = 0, 2e-5
    c.optimizer.update(learning_rate=2e-5, beta2=0.999, weight_decay=0.01)  # with lora.rank = 0, 1e-6
    # The rate falls to 0 at the end of the run: a score stays up after the policy has converged.
    c.optimizer.update(warmup_steps=2, schedule="linear")
    # Your own workers, so few replays; on the CPU, they take no memory of the chip.
    c.trust.update(device="cpu", invited_rate=0.01, min_rate=0.01)
    c.evaluation.every = 50
    return c
