"""Runs TRL's SFTTrainer for bench/sft.py, in an interpreter that has it; imports nothing of ours.

    PYTHON bench/sft_peer.py FOLDER DATA NUM_STEPS BATCH

Prints a JSON line {"loss", "step_s"} per step. The data file's conversations are taken in the order of `<data>.ordered`.
"""

import json
import pathlib
import sys
import tempfile
import time

import datasets
import torch
import transformers
import trl

PART = 8  # conversations that are padded to one length


class Clock(transformers.TrainerCallback):
    """Prints the loss and the duration of each step."""

    def __init__(self):
        self.begun = 0.0

    def on_train_begin(self, *_, **__):
        self.begun = time.perf_counter()

    def on_log(self, *_, logs, **__):
        if "loss" in logs:
            now = time.perf_counter()
            print(json.dumps({"loss": float(logs["loss"]), "step_s": now - self.begun}), flush=True)
            self.begun = now


def main() -> None:
    """Trains, and prints a line per step."""
    folder, data, num_steps, batch = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    lines = data.with_suffix(".ordered").read_text().splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        config = trl.SFTConfig(
            output_dir=scratch,
            max_steps=num_steps,
            per_device_train_batch_size=PART,
            gradient_accumulation_steps=batch // PART,
            train_sampling_strategy="sequential",
            assistant_only_loss=True,
            max_length=512,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        # Step 0 has a rate above 0, as ours; that of transformers' own schedules is 0.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        trl.SFTTrainer(
            model=model,
            args=config,
            train_dataset=datasets.Dataset.from_list([json.loads(line) for line in lines]),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
            callbacks=[Clock()],
            optimizers=(optimizer, schedule),
        ).train()


if __name__ == "__main__":
    main()
