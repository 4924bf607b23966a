"""Writes the adapters of a policy as a folder that PEFT, vLLM, and transformers load next to their base model.

1. Each adapted kernel has two tensors, `lora_A` [r, in] and `lora_B` [out, r], float32, named as the kernel in a checkpoint.
2. adapter_config.json names the base model, the rank, and alpha.

Left out: kernels that a checkpoint joins in one tensor, such as those of latent attention, and experts. Export these merged.
"""

import json
import pathlib

import numpy as np

from models import config as config_lib
from models import lora, transformer
from models.hf import checkpoint, safetensors_file, tensor_names

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


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
    path = pathlib.Path(path)
    checkpoint.check_new(path)
    left, tensors = tensor_names.leaves(lora.detach(params)[1]), {}
    places = {part.path: [] for tensor in tensor_names.tensors(model).values() for part in tensor.parts}
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
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = np.ascontiguousarray(own_a.reshape(-1, adapters.rank).T)
            tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(own_b.reshape(adapters.rank, -1).T)
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
    path.mkdir(parents=True, exist_ok=True)
    lazy = {name: (x.dtype, x.shape, lambda x=x: x) for name, x in sorted(tensors.items())}
    safetensors_file.write(path / FILE, lazy)
    (path / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", "utf-8")
