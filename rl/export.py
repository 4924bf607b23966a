"""Exports a run's policy as a Hugging Face folder that transformers, vLLM and `inference.serve` load.

    python -m rl.export runs/quickstart --step=best --output=exported

1. The checkpoint is restored onto the config's mesh; adapters are merged (models/lora.py).
   With --adapter_only they are written alone, in PEFT's format (models/hf/adapter_file.py).
2. `models.hf.save` writes config.json and safetensors with hub-style names; the same parameters give the same bytes.
3. All that training does not change is that of the checkpoint in `init_from`: entries of config.json and generation_config.json, and
   the tokenizer's files. The folder gets its name last.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from absl import flags

    from rl.experiment import command

    flags.DEFINE_string("step", "newest", "a checkpoint's step, newest, or best (by held-out score)")
    flags.DEFINE_string("output", None, "a folder that does not exist yet", required=True)
    flags.DEFINE_bool("adapter_only", False, "write the adapters alone, as PEFT and vLLM load them next to the base")
    command.parse()

import json
import pathlib

from absl import flags

from models import hf, hub, lora, transformer
from models.hf import adapter_file
from models.text import tokenizer_files
from rl import evaluate
from rl.experiment import command, experiment, initial
from rl.experiment.reporting import metrics
from sharding.mesh import rules
from sharding.system import atomic_file, cli
from sharding.weights import bucket

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def main() -> None:
    output = pathlib.Path(flags.FLAGS.output)
    if bucket.is_url(flags.FLAGS.output):
        raise ValueError(
            f"--output {flags.FLAGS.output} is in a bucket; export to a folder, and copy that to the bucket"
        )
    hf.check_new(output)
    with evaluate.open_checkpoint(needs_envs=False) as (exp, workdir, step, params):
        if flags.FLAGS.adapter_only:
            adapter_file.save(output, exp.model, params, exp.lora, exp.config.init_from)
        else:
            save(output, exp, params)
    use = "load it next to its base model" if flags.FLAGS.adapter_only else f"python -m inference.chat --model {output}"
    metrics.Progress().say(f"version {step} of {workdir} is in {output}: {use}")


def save(output: pathlib.Path, exp: experiment.Experiment, params: transformer.Params) -> None:
    """Writes parameters of a run as a Hugging Face folder that does not exist yet. Raises ValueError as `hf.save` does."""
    stored, generation, tokenizer = _kept(exp)

    def write_more(folder: pathlib.Path) -> None:
        atomic_file.write(folder / "generation_config.json", json.dumps(generation, indent=2).encode() + b"\n")
        if tokenizer:
            tokenizer_files.copy(tokenizer, folder)
        else:
            exp.tokenizer.save(folder)

    # From float32, in which all parameters train.
    params = rules.cast(lora.merge(params), transformer.specs(exp.model))
    hf.save(output, exp.model, params, stored=stored, write_more=write_more)


def _kept(exp: experiment.Experiment) -> tuple[dict, dict, pathlib.Path | None]:
    """Returns (entries of config.json, those of generation_config.json, the folder of the tokenizer's files or None) of the checkpoint.

    Its stop tokens are joined by those of the run's tokenizer. Those of another tokenizer replace all its token IDs.
    """
    try:
        base = initial.checkpoint(exp.config.init_from)
    except ValueError as error:
        cli.note(f"note: config.json has only the fields of the model, because init_from cannot be read: {error}")
        base = None
    name = exp.config.tokenizer
    tokenizer = None if name == "byte_chatml" else hub.folder(name, hub.TOKENIZER)
    tokenizer = tokenizer if tokenizer and tokenizer.is_dir() else None  # not a GGUF file
    files = ("config.json", "generation_config.json")
    stored, generation = (atomic_file.read_json(base / file, dict) if base else {} for file in files)
    ids = {"eos_token_id": [*exp.tokenizer.stop_ids], "pad_token_id": exp.tokenizer.pad_id}
    if not (base and tokenizer and base.samefile(tokenizer)):
        begin = exp.tokenizer.specials.get(exp.tokenizer.named.get("bos_token", ""))
        ids |= {} if begin is None else {"bos_token_id": begin}
        stored, generation = ({n: x for n, x in of.items() if n not in TOKEN_IDS} | ids for of in (stored, generation))
        return stored, generation, tokenizer
    generation = generation or ids | {key: stored[key] for key in TOKEN_IDS if key in stored}
    stops = generation.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if missing := [id for id in ids["eos_token_id"] if id not in stops]:
        generation["eos_token_id"] = stops + missing
    return ids | stored, generation, tokenizer


if __name__ == "__main__":
    command.run(main)
