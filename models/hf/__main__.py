"""Commands on Hugging Face checkpoints: `python -m models.hf inspect|convert|compare`."""

import collections
import dataclasses
import json
import math
import pathlib
import shutil
import sys
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import hub, transformer
from models.hf import checkpoint, safetensors_file, tensor_names
from models.hf import config as hf_config
from sharding.system import cli


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m models.hf", description="Look at, convert, compare checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="the model, its parameters, what would be refused")
    convert = commands.add_parser("convert", help="write the checkpoint anew, optionally in another dtype")
    compare = commands.add_parser("compare", help="with another checkpoint, or its logits with transformers'")
    for command in (inspect, convert, compare):
        command.add_argument("dir", help="checkpoint folder or hub id")
    convert.add_argument("out", help="folder to write; must not exist")
    convert.add_argument("--dtype", choices=config_lib.CHOICES["dtype"], help="the checkpoint's own by default")
    compare.add_argument("other", nargs="?", help="checkpoint to compare with; transformers' logits when absent")
    args = parser.parse_args(argv)
    try:
        return {"inspect": _inspect, "convert": _convert, "compare": _compare}[args.command](args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _inspect(args) -> int:
    folder = hub.folder(args.dir)
    config = checkpoint.read_config(folder)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in hf_config.COMPUTE_FIELDS and value != field.default:
            print(f"{field.name:24} {value}")
    reader = safetensors_file.Reader(folder)
    held = collections.Counter()
    for name in reader.names():
        held[str(reader.dtype(name))] += math.prod(reader.shape(name))
    print(f"{'parameters':24} {transformer.num_params(config):,}")
    print(f"{'in the files':24} {', '.join(f'{count:,} {dtype}' for dtype, count in sorted(held.items()))}")
    ignored = [name for name in reader.names() if tensor_names.is_ignored(name, config)]
    if ignored:
        print(f"{'ignored':24} {len(ignored)} tensors, such as {ignored[0]}")
    checkpoint.check_files(reader, config, folder)
    print("every tensor is there, in its shape")
    return 0


def _convert(args) -> int:
    checkpoint.check_new(pathlib.Path(args.out))
    config, params = checkpoint.load(args.dir, dtype=args.dtype)
    hf = json.loads((hub.folder(args.dir) / "config.json").read_text("utf-8"))
    kept = {name: hf[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in hf}
    folder = hub.folder(args.dir)

    def copy_beside(out: pathlib.Path) -> None:
        for name in checkpoint.BESIDE:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)

    checkpoint.save(args.out, config, params, extra=kept, beside=copy_beside)
    print(f"wrote {args.out}: {transformer.num_params(config):,} parameters in {config.param_dtype}")
    return 0


def _compare(args) -> int:
    config, params = checkpoint.load(args.dir, dtype="float32")
    if args.other is None:
        worst, size = _logit_difference(args.dir, config, params)
        print(f"logits: max |difference| {worst:.3g} at max |logit| {size:.3g}, float32, against transformers")
        return int(worst > 1e-4 * max(1.0, size / 10))
    other_config, other = checkpoint.load(args.other, dtype="float32")
    mine, theirs = checkpoint.param_leaves(params), checkpoint.param_leaves(other)
    if mine.keys() != theirs.keys() or any(mine[path].shape != theirs[path].shape for path in mine):
        changed = [
            f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(other_config, f.name)
        ]
        raise ValueError(f"the two are different models; their configs differ in {', '.join(changed)}")
    differs = 0
    for path in mine:
        error = float(jnp.abs(mine[path] - theirs[path]).max())
        if error > 0:
            differs += 1
            print(
                f"{'.'.join(path):40} max |difference| {error:.3g} at max |value| {float(jnp.abs(mine[path]).max()):.3g}"
            )
    print(f"{len(mine) - differs} of {len(mine)} parameters are equal")
    return int(differs > 0)


def _logit_difference(folder: str, config: config_lib.ModelConfig, params) -> tuple[float, float]:
    """(max |difference|, max |logit|) over 2 rows of 32 random tokens."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(f"comparing logits needs torch and transformers ({error}); or name a second folder") from error
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 32))
    model = transformers.AutoModelForCausalLM.from_pretrained(hub.folder(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        expected_BTV = model(torch.as_tensor(tokens_BT)).logits.numpy()
    hidden_BTD, _ = transformer.apply(params, config, jnp.asarray(tokens_BT, jnp.int32))
    logits_BTV = np.asarray(transformer.logits(params, config, hidden_BTD))
    return float(np.abs(logits_BTV - expected_BTV).max()), float(np.abs(expected_BTV).max())


if __name__ == "__main__":
    sys.exit(main())
