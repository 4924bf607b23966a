"""Completes a config from the checkpoint in `init_from`: a Hugging Face folder, or the ID of one on the hub.

1. The fields of `model` are those of its config.json, except `OWN`: dtypes, rematerialization, kernels. No checkpoint has them.
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
from models import hf, transformer
from models.hf import config as hf_config
from rl.experiment import experiment
from sharding import rules

OWN = (*hf_config.COMPUTE_FIELDS, "param_dtype")


def completed(
    config: config_dict.ConfigDict, given: Collection[str] = (), *, needs_files: bool = True
) -> config_dict.ConfigDict:
    """Returns a copy of the config with the model and the tokenizer of the checkpoint in `init_from`, if there is one.

    A field is the config's own if it differs from configs/base.py, or if `given`, the names set on the command line, has it.
    Unless `needs_files`, a config with dims of its own needs no folder. Raises ValueError in one line if the checkpoint is
    absent or not supported, or if the config contradicts it.
    """
    config, defaults = config.copy_and_resolve_references(), experiment.default_fields()
    is_own = lambda name, value: name in given or value != defaults[name]  # noqa: E731
    path, fields = config.init_from, json.loads(config.model.to_json())
    own = {n: v for n, v in fields.items() if n not in OWN and is_own(f"model.{n}", v)}
    if not path or ("model_dim" in own and not needs_files and not pathlib.Path(path).is_dir()):
        return config
    try:
        found = hf.read_config(path, scan_layers=config.model.scan_layers)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None
    model = dataclasses.replace(found, **own)
    if _shapes(model) != _shapes(found):
        wrong = [n for n, value in own.items() if value != getattr(found, n)]
        differs = "; ".join(f"model.{n} = {own[n]!r} but {path} has {getattr(found, n)!r}" for n in wrong)
        raise ValueError(f"{differs}: its parameters do not fit; leave these fields out, and it sets them")
    config.model.update({n: value for n, value in dataclasses.asdict(model).items() if n not in OWN})
    if not is_own("tokenizer", config.tokenizer):
        config.tokenizer = path
    return config


def _shapes(model: config_lib.ModelConfig):
    return jax.tree.map(lambda spec: spec.shape, transformer.specs(model), is_leaf=rules.is_spec)
