"""Reads and writes adapters in PEFT's format: folders that PEFT, vLLM, and transformers load next to their base model.

1. Each adapted kernel has two tensors, `lora_A` [r, in] and `lora_B` [out, r], named as the kernel in a checkpoint. We write float32.
2. adapter_config.json names the base model, the rank, and alpha.

Left out: kernels that a checkpoint joins in one tensor, such as those of latent attention, and experts. Export these merged.
"""

import collections
import json
import math
import pathlib
from typing import Any

import numpy as np

from models import config as config_lib
from models import lora, transformer
from models.hf import checkpoint, safetensors_file, tensor_names
from models.kernels import cpu_transposed
from sharding.mesh import rules
from sharding.system import atomic_file
from sharding.weights.format import chunks

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MAX_ALPHA = 2**20
PREFIX, ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
# Fields of PEFT's config that change the product, with the values that do not.
PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False, "fan_in_fan_out": False}
EMPTY = """modules_to_save alpha_pattern trainable_token_indices target_parameters layer_replication alora_invocation_tokens
    use_qalora use_bdlora""".split()


def save(
    path: str | pathlib.Path,
    model: config_lib.ModelConfig,
    params: transformer.Params,
    adapters: lora.LoraConfig,
    base: str,
) -> None:
    """Writes the adapters that are attached to `params` to a new folder. `base` names the checkpoint next to which they trained.

    Raises ValueError if the folder has files, or the format has no names for an adapted kernel.
    """
    left, tensors, places = tensor_names.leaves(lora.detach(params)[1]), {}, collections.defaultdict(list)
    for name, tensor in tensor_names.tensors(model).items():
        for part in tensor.parts:
            places[part.path].append((name, part, len(tensor.parts) == 1 and "experts" not in name))
    for kernel in sorted({leaf[:-1] for leaf in left}):
        a, b = (np.asarray(left[*kernel, which], np.float32) for which in "ab")
        for name, part, has_name in places[kernel]:
            if not has_name:
                found = f"the kernel {'.'.join(kernel)} is only a part of the tensor {name}"
                raise ValueError(f"{found}, next to which PEFT has no adapter; export the merged model instead")
            own_a, own_b = (x[part.index] if part.index else x for x in (a, b))
            module = f"{PREFIX}{name.removesuffix('.weight')}"
            tensors[module + ENDS[0]] = np.ascontiguousarray(own_a.reshape(-1, adapters.rank).T)
            tensors[module + ENDS[1]] = np.ascontiguousarray(own_b.reshape(adapters.rank, -1).T)
    if not tensors:
        raise ValueError("the policy has no adapters; export the whole model, or set lora.rank as in the run")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    lazy = {name: (x.dtype, x.shape, lambda x=x: x) for name, x in sorted(tensors.items())}
    with checkpoint.new_folder(path) as folder:
        safetensors_file.write(folder / FILE, lazy)
        (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", "utf-8")


def load(path: str | pathlib.Path, model: config_lib.ModelConfig) -> dict[tensor_names.Path, dict[str, np.ndarray]]:
    """Reads the adapters in a folder. Returns {"a": A, "b": s B}, float32, by the path of each kernel of `model`, whose layers are not stacked.

    Raises ValueError, in one line, if the folder does not have plain LoRA adapters for this model.
    """
    path = pathlib.Path(path)
    if not (path / CONFIG).is_file() or not (path / FILE).is_file():
        raise ValueError(
            f"{path} has no {CONFIG} and {FILE}; give a folder that PEFT or rl.export --adapter_only wrote"
        )
    fields: Any = atomic_file.read_json(path / CONFIG, dict)
    wrong = {n: fields[n] for n, value in PLAIN.items() if fields.get(n, value) != value}
    wrong |= {n: fields[n] for n in EMPTY if fields.get(n)}
    alpha = fields.get("lora_alpha")
    if wrong or type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
        name, value = next(iter(wrong.items()), ("lora_alpha", alpha))
        found = f"{path / CONFIG} has {name} = {value!r:.80}, and only plain LoRA runs next to the base"
        raise ValueError(f"{found}; merge the adapter into a checkpoint")
    reader, adapters = safetensors_file.Reader(path, in_memory=True), {}
    known, specs = tensor_names.tensors(model), tensor_names.leaves(transformer.specs(model))
    left = set(reader.entries)
    for name in sorted(name for name in left if name.endswith(ENDS[0])):
        pair, kernel = (name, name.removesuffix(ENDS[0]) + ENDS[1]), name.removeprefix(PREFIX).removesuffix(ENDS[0])
        tensor = known.get(f"{kernel}.weight", tensor_names.Tensor((), ()))
        parts = tensor.parts if len(tensor.shape) == 2 else ()
        if len(parts) != 1 or not cpu_transposed.MODULES.intersection(parts[0].path[-2:-1]):
            found = f"{path / FILE} has {name}, and this {model.family} model has no matrix of that name that an adapter runs next to"
            raise ValueError(f"{found}; train adapters of its layers' projections")
        shapes = [list(reader.entries[n].shape) if n in left else None for n in pair]
        rank = min(shapes[0] or [0])
        if not rank or shapes != [[rank, tensor.shape[1]], [tensor.shape[0], rank]]:
            found = f"{path / FILE} has lora_A {shapes[0]} and lora_B {shapes[1]} for {kernel}, which is {list(tensor.shape)} here"
            raise ValueError(f"{found}; give an adapter of this base model")
        scale, shape = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank), specs[parts[0].path].shape
        with np.errstate(over="ignore", invalid="ignore"):
            a, b = (np.asarray(reader.tensor(n), np.float32) for n in pair)
            b = np.float32(scale) * b
        if not (chunks.is_finite(a) and chunks.is_finite(b)):  # 0 times it is NaN, in the rows of other adapters
            raise ValueError(f"{path / FILE} has NaN or infinity for {kernel}; train it again")
        left -= {*pair}
        _, split = rules.matrix_dims(specs[parts[0].path])
        a, b = a.T.reshape(*shape[:split], rank), b.T.reshape(rank, *shape[split:])
        adapters[parts[0].path] = {"a": a, "b": b}
    if left or not adapters:
        found = f"the tensor {min(left)}" if left else f"no tensor *{ENDS[0]}"
        raise ValueError(f"{path / FILE} has {found}; only pairs of lora_A and lora_B can be read, as PEFT writes them")
    return adapters
