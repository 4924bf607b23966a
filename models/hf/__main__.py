"""Inspects, converts and compares Hugging Face checkpoints.

python -m models.hf inspect DIR              prints the model and its parameters; fails if `load` would
python -m models.hf convert DIR OUT          writes the checkpoint to OUT, optionally in another dtype
python -m models.hf compare DIR [OTHER]      compares with OTHER tensor by tensor, or with transformers' logits (needs torch)
"""

import collections
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import sys
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import hf, hub, transformer
from models.hf import checkpoint, tensor_names
from models.hf import config as hf_config
from models.text import tokenizer as tokenizer_lib
from models.text import tokenizer_files
from sharding.system import cli
from sharding.weights.format import gguf_header


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of `python -m models.hf`. Returns the exit code: 1 after an error, or if compared checkpoints differ."""
    parser = cli.Parser(prog="python -m models.hf", description="Inspect, convert or compare checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="print the model and its parameters; fail if it cannot be loaded")
    convert = commands.add_parser("convert", help="write a copy of the checkpoint, optionally in another dtype")
    compare = commands.add_parser("compare", help="compare with another checkpoint, or with transformers' logits")
    for command in (inspect, convert, compare):
        command.add_argument("dir", help="checkpoint folder, GGUF file, or hub id")
    convert.add_argument("out", help="folder to write; must be new or empty")
    dtype_help = "dtype to write; the checkpoint's by default"
    convert.add_argument("--dtype", choices=config_lib.CHOICES["dtype"], help=dtype_help)
    compare.add_argument("other", nargs="?", help="checkpoint to compare with, instead of transformers' logits")
    runs = {"inspect": _inspect, "convert": _convert, "compare": _compare}
    return cli.run(parser, argv, lambda args: runs[args.command](args))


def _inspect(args) -> int:
    folder = hub.folder(args.dir)
    config = hf.read_config(folder)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in hf_config.COMPUTE_FIELDS and value != field.default:
            print(f"{field.name:24} {value}")
    reader = checkpoint.open_reader(folder, config)
    counts = collections.Counter()
    for entry in reader.entries.values():
        counts[getattr(entry, "kind", str(entry.dtype))] += math.prod(entry.shape)
    print(f"{'parameters':24} {transformer.num_params(config):,}")
    print(f"{'in the files':24} {', '.join(f'{count:,} {dtype}' for dtype, count in sorted(counts.items()))}")
    ignored = [name for name in reader.entries if tensor_names.is_ignored(name, config)]
    if ignored:
        print(f"{'ignored':24} {len(ignored)} tensors, such as {ignored[0]}")
    print("all tensors are present, with the right shapes")
    return 0


def _convert(args) -> int:
    hf.check_new(pathlib.Path(args.out))
    folder = hub.folder(args.dir)
    config, params = hf.load(folder, dtype=args.dtype)
    if gguf_header.is_gguf(folder):
        stored, write_more = {}, tokenizer_lib.load(folder).save
    else:
        stored = json.loads((folder / "config.json").read_text("utf-8"))
        write_more = functools.partial(tokenizer_files.copy, folder)
    hf.save(args.out, config, params, stored=stored, write_more=write_more)
    print(f"wrote {args.out}: {transformer.num_params(config):,} parameters in {config.param_dtype}")
    return 0


def _compare(args) -> int:
    config, params = hf.load(args.dir, dtype="float32")
    if args.other is None:
        worst, size = _logit_difference(args.dir, config, params)
        print(f"logits: max |difference| {worst:.3g} at max |logit| {size:.3g}, float32, against transformers")
        return int(worst > 1e-4 * max(1.0, size / 10))
    other_config, other = hf.load(args.other, dtype="float32")
    mine, theirs = tensor_names.leaves(params), tensor_names.leaves(other)
    if mine.keys() != theirs.keys() or any(mine[path].shape != theirs[path].shape for path in mine):
        other_fields = dataclasses.asdict(other_config)
        changed = ", ".join(name for name, value in dataclasses.asdict(config).items() if value != other_fields[name])
        raise ValueError(f"{args.dir} and {args.other} differ in {changed}; compare checkpoints of one model")
    differs = 0
    for path, leaf in mine.items():
        if (error := float(jnp.abs(leaf - theirs[path]).max())) > 0:
            differs += 1
            size = float(jnp.abs(leaf).max())
            print(f"{'.'.join(path):40} max |difference| {error:.3g} at max |value| {size:.3g}")
    print(f"{len(mine) - differs} of {len(mine)} parameters are equal")
    return int(differs > 0)


def _logit_difference(folder: str, config: config_lib.ModelConfig, params) -> tuple[float, float]:
    """Compares logits with transformers on 2 x 32 random tokens. Returns (largest |difference|, largest |logit|)."""
    try:
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    except ImportError as error:
        raise ValueError(
            f"comparing logits needs torch and transformers ({error}); install both, or give a second checkpoint"
        ) from error
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 32))
    model = transformers.AutoModelForCausalLM.from_pretrained(hub.folder(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        expected_BTV = model(torch.as_tensor(tokens_BT)).logits.numpy()
    hidden_BTD, _ = transformer.apply(params, config, jnp.asarray(tokens_BT, jnp.int32))
    logits_BTV = np.asarray(transformer.logits(params, config, hidden_BTD))
    return float(np.abs(logits_BTV - expected_BTV).max()), float(np.abs(expected_BTV).max())


if __name__ == "__main__":
    sys.exit(main())
