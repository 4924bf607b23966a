"""Completes a config from the checkpoint in `init_from`, and loads it: a Hugging Face folder, the ID of one, or a run's working directory.

A working directory of rl.sft or rl.train stands for the newest policy that it published, with adapters merged.

1. The fields of `model` are those of the checkpoint, except `OWN`: dtypes, rematerialization, kernels. No config.json has them.
2. A field of `model` that the config sets itself, in its file or on the command line, replaces the checkpoint's, such as
   `rope_scaling` for longer contexts. If the checkpoint's parameters do not fit it, the two contradict each other.
3. The tokenizer is the checkpoint's, with its chat template and stop tokens, unless the config names another.
"""

import dataclasses
import json
import pathlib
from collections.abc import Collection

import jax
from ml_collections import config_dict

from models import config as config_lib
from models import hf, hub, transformer
from models.hf import config as hf_config
from rl.experiment import experiment
from rl.learner import reference
from sharding import broadcast, rules
from sharding.system import cli

OWN = (*hf_config.COMPUTE_FIELDS, "param_dtype")


def completed(
    config: config_dict.ConfigDict, given: Collection[str] = (), *, needs_files: bool = True
) -> config_dict.ConfigDict:
    """Returns a copy of the config with the model and the tokenizer of the checkpoint in `init_from`, if there is one.

    A field is the config's own if it differs from configs/base.py, or if `given`, the names set on the command line, has it.
    Unless `needs_files`, a config with dims of its own needs no folder. Fields that replace the checkpoint's are printed. Raises ValueError in one line if the checkpoint is
    absent or not supported, or if the config contradicts it.
    """
    config, defaults = config.copy_and_resolve_references(), experiment.default_fields()
    is_own = lambda name, value: name in given or value != defaults[name]  # noqa: E731
    path, fields = config.init_from, json.loads(config.model.to_json())
    own = {n: v for n, v in fields.items() if n not in OWN and is_own(f"model.{n}", v)}
    if not path or ("model_dim" in own and not needs_files and not pathlib.Path(path).is_dir()):
        return config
    try:
        found, tokenizer = _read(path, config.model.scan_layers)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None
    model = dataclasses.replace(found, **own)
    replaced = [n for n in own if getattr(model, n) != getattr(found, n)]
    differs = "; ".join(f"model.{n} = {own[n]!r} but {path} has {getattr(found, n)!r}" for n in replaced)
    if _shapes(model) != _shapes(found):
        raise ValueError(f"{differs}: its parameters do not fit; leave these fields out, and it sets them")
    if replaced:
        cli.note(f"note: {differs}: the config's own takes the place of the checkpoint's")
    config.model.update({n: value for n, value in dataclasses.asdict(model).items() if n not in OWN})
    if not is_own("tokenizer", config.tokenizer):
        config.tokenizer = tokenizer
    return config


def load(exp: experiment.Experiment, mesh: jax.sharding.Mesh) -> transformer.Params:
    """Loads the parameters of the checkpoint in `init_from`, in the model's `param_dtype`, sharded over `mesh`."""
    if not (weights := _weights(exp.config.init_from)):
        return reference.load(exp.config.init_from, exp.model, mesh)
    specs = transformer.specs(exp.model)
    params = broadcast.pull(weights, shardings=rules.shardings(specs, mesh)).params
    return rules.cast(params, specs)


def _weights(path: str) -> pathlib.Path | None:
    """Returns the folder of the published versions of a run's working directory, or None if `path` is not one."""
    weights = (hub.folder(path) if hub.is_url(path) else pathlib.Path(path)) / "weights"
    return weights if weights.is_dir() else None


def _read(path: str, scan_layers: bool) -> tuple[config_lib.ModelConfig, str]:
    """Returns the model of a checkpoint, and its tokenizer's name or folder. Raises ValueError if it is absent or not supported."""
    if not (weights := _weights(path)):
        return hf.read_config(path, scan_layers=scan_layers), path
    if (version := broadcast.latest(weights)) is None:
        raise ValueError(f"{weights} has no policy yet; finish rl.sft, or give another checkpoint")
    metadata = broadcast.read_manifest(weights, version).metadata
    if metadata["model"]["scan_layers"] != scan_layers:
        found = f"{path} was published with model.scan_layers = {not scan_layers}"
        raise ValueError(f"{found}, and the config sets {scan_layers}; set model.scan_layers = {not scan_layers}")
    return config_lib.ModelConfig(**metadata["model"]), metadata["tokenizer"]


def _shapes(model: config_lib.ModelConfig):
    return jax.tree.map(lambda spec: spec.shape, transformer.specs(model), is_leaf=rules.is_spec)
