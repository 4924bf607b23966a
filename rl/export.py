"""Exports a run's policy as a Hugging Face folder that transformers, vLLM and `inference.serve` load.

    python -m rl.export --config=configs/quickstart.py --workdir=runs/quickstart --step=best --output=exported

1. The checkpoint is restored onto the config's mesh; adapters are merged (rl/learner/lora.py).
2. `models.hf.save` writes config.json and safetensors with hub-style names; the same parameters give the same bytes. The
   tokenizer is written to the same folder, which gets its name last.
"""

import pathlib

from absl import flags

from models import hf, transformer
from rl import evaluate
from rl.experiment import experiment
from rl.reporting import metrics
from sharding import bucket, rules


def main() -> None:
    """Runs the command that exports one checkpoint of a run as a Hugging Face folder."""
    output = pathlib.Path(flags.FLAGS.output)
    if bucket.is_url(flags.FLAGS.output):
        raise ValueError(
            f"--output {flags.FLAGS.output} is in a bucket; export to a folder, and copy that to the bucket"
        )
    hf.check_new(output)
    with evaluate.open_checkpoint(needs_envs=False) as (exp, workdir, step, params):
        ids = {"eos_token_id": list(exp.tokenizer.stop_ids), "pad_token_id": exp.tokenizer.pad_id}
        params = rules.cast(params, transformer.specs(exp.model))  # from float32, in which they train
        hf.save(output, exp.model, params, extra=ids, write_more=exp.tokenizer.save)
    metrics.Progress().say(f"version {step} of {workdir} is in {output}: python -m inference.chat --model {output}")


if __name__ == "__main__":
    flags.DEFINE_string("step", "newest", "a checkpoint's step, newest, or best (by held-out score)")
    flags.DEFINE_string("output", None, "a folder that does not exist yet", required=True)
    experiment.run(main)
