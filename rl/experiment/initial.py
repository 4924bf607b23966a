"""Completes a config from the checkpoint in `init_from`, and loads it: a Hugging Face folder, the ID of one, or a run's working directory.

A working directory of rl.sft or rl.train stands for the newest policy that it published. Its adapters go on training if the config has
the same `lora`, and are merged otherwise. A run that starts from
it records the version, and its resumes load the same one: that policy may be the reference of a KL penalty.

1. The fields of `model` are those of the checkpoint, except `OWN`: dtypes, rematerialization, kernels. No config.json has them.
2. A field of `model` that the config sets itself, in its file or on the command line, replaces the checkpoint's, such as
   `rope_scaling` for longer contexts. If the checkpoint's parameters do not fit it, the two contradict each other.
3. The tokenizer is the checkpoint's, with its chat template and stop tokens, unless the config names another. Variables of the template
   are those of the other run, unless the config sets them.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Mapping

import jax
from ml_collections import config_dict

from models import config as config_lib
from models import hf, hub, lora, transformer
from models.hf import config as hf_config
from rl.experiment import experiment
from rl.experiment import workdir as run_directory
from rl.learning.learner import reference
from sharding.mesh import rules
from sharding.system import atomic_file, cli
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast
from sharding.weights.format import journal

OWN = (*hf_config.COMPUTE_FIELDS, "param_dtype")


def completed(
    config: config_dict.ConfigDict, given: Collection[str] = (), *, needs_files: bool = True
) -> config_dict.ConfigDict:
    """Returns a copy of the config with the model and the tokenizer of the checkpoint in `init_from`, if there is one.

    A field keeps the config's value if that differs from configs/base.py, or if `given`, the names set on the command line, has the
    field. A note lists the fields of the checkpoint that are replaced in this way. Unless `needs_files`, a config that sets `model_dim`
    needs no checkpoint. Raises ValueError in one line if the checkpoint is absent or not supported, or if the config contradicts it.
    """
    config, defaults = config.copy_and_resolve_references(), experiment.default_fields()

    def is_own(name: str, value: object) -> bool:
        return name in given or value != defaults[name]

    path, fields = config.init_from, json.loads(config.model.to_json())
    own = {n: v for n, v in fields.items() if n not in OWN and is_own(f"model.{n}", v)}
    if not path or ("model_dim" in own and not needs_files and not pathlib.Path(path).exists()):
        return config
    try:
        found, tokenizer, variables = _read(path, config.model.scan_layers)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None
    model = dataclasses.replace(found, **own)
    replaced = [n for n in own if getattr(model, n) != getattr(found, n)]
    differs = "; ".join(f"model.{n} = {own[n]!r} but {path} has {getattr(found, n)!r}" for n in replaced)
    if _shapes(model) != _shapes(found):
        raise ValueError(
            f"{differs}: the checkpoint's parameters do not fit; leave these fields out, and the checkpoint sets them"
        )
    if replaced:
        cli.note(f"note: {differs}: the config's value is used")
    config.model.update({n: value for n, value in dataclasses.asdict(model).items() if n not in OWN})
    if not is_own("tokenizer", config.tokenizer):
        config.tokenizer = tokenizer
    own = config.chat_template_kwargs
    own.update({name: value for name, value in variables.items() if name not in own})
    return config


def load(
    exp: experiment.Experiment,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path | None = None,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> transformer.Params:
    """Loads the parameters of the checkpoint in `init_from`, in the model's `param_dtype`, sharded over `mesh`. All hosts must call it.

    `workdir` is that of this run, which records the version of another run in init_from.json; None: the newest version. Raises
    ValueError if the recorded version is gone, or has other weights.
    """
    path = exp.config.init_from
    if not (weights := _weights(path)):
        return reference.load(path, exp.model, mesh)
    pin = hosts.broadcast(_pin(path, weights, workdir) if hosts.is_first else None)
    metadata, specs = broadcast.read_manifest(weights, pin["version"]).metadata, transformer.specs(exp.model)
    published, adapters = _published(metadata), lora.of_metadata(metadata)
    layout = rules.shardings(lora.published_specs(transformer.specs(published), adapters), mesh)
    params = lora.restored(broadcast.pull(weights, pin["version"], shardings=layout).params, adapters)

    def converted(params):
        if published.scan_layers != exp.model.scan_layers:
            params = transformer.restacked(params, old=published, new=exp.model)
        params = rules.cast(params, specs)  # before a merge, which rounds to it
        return params if adapters == exp.lora else lora.merge(params)

    layout = rules.shardings(specs, mesh)
    if adapters == exp.lora:
        layout = lora.attach(layout, rules.shardings(lora.specs(specs, exp.lora), mesh), exp.lora)
    return jax.jit(converted, out_shardings=layout, donate_argnums=0)(params)


def check(path: str) -> None:
    """Raises ValueError for a checkpoint on this machine whose weights are absent, cut, or not those of its config. Reads their headers."""
    if path and os.path.exists(path) and not _weights(path):
        try:
            hf.open_reader(pathlib.Path(path), hf.read_config(path))
        except ValueError as error:
            raise ValueError(f"init_from: {error}") from None


def checkpoint(path: str) -> pathlib.Path | None:
    """Returns the Hugging Face folder in which `init_from` = `path` has its origin, followed through the working directories of earlier runs.

    Returns None if there is none. Raises ValueError if the folder is gone.
    """
    while path and (weights := _weights(path)):
        path = run_directory.saved_config(weights.parent)["init_from"]
    folder = hub.folder(path, hub.TOKENIZER) if path else None
    return folder if folder and folder.is_dir() else None


def _pin(path: str, weights: pathlib.Path, workdir: pathlib.Path | None) -> dict:
    """Returns the version of another run to load, and its digest: those in init_from.json, or the newest, which it records there."""
    pin = atomic_file.read_json(workdir / "init_from.json", dict) if workdir else {}
    is_known = pin.get("init_from") == path
    version = pin["version"] if is_known else broadcast.latest(weights)
    assert version is not None, "`completed` has found one"
    try:
        digest = broadcast.read_manifest(weights, version).digest
    except FileNotFoundError:
        digest = ""
    if is_known and digest != pin["digest"]:
        found = f"{path} has {'other weights as' if digest else 'no'} version {version}, from which {workdir} began"
        raise ValueError(f"init_from: {found}; put weights/{journal.dirname(version)} back, or give another --workdir")
    pin = {"init_from": path, "version": version, "digest": digest}
    if workdir and not is_known:
        atomic_file.write(workdir / "init_from.json", json.dumps(pin).encode() + b"\n", durable=True)
    return pin


def _weights(path: str) -> pathlib.Path | None:
    """Returns the folder of the published versions of a run's working directory, or None if `path` is not one."""
    weights = (hub.folder(path, hub.CONFIG) if hub.is_url(path) else pathlib.Path(path)) / "weights"
    return weights if weights.is_dir() else None


def _read(path: str, scan_layers: bool) -> tuple[config_lib.ModelConfig, str, dict]:
    """Returns (the model of a checkpoint, its tokenizer's name or folder, the variables of its run's chat template).

    Raises ValueError if the checkpoint is absent or not supported.
    """
    if not (weights := _weights(path)):
        return hf.read_config(path, scan_layers=scan_layers), path, {}
    if (version := broadcast.latest(weights)) is None:
        raise ValueError(f"{weights} has no policy yet; finish rl.sft, or give another checkpoint")
    metadata = broadcast.read_manifest(weights, version).metadata
    try:
        model, tokenizer = _published(metadata), str(metadata["tokenizer"])
    except (KeyError, TypeError) as error:
        found = f"version {version} in {weights} names no model and tokenizer ({error})"
        raise ValueError(f"{found}; give the working directory of rl.sft or rl.train, or a checkpoint") from None
    variables = dict(metadata.get("chat_template_kwargs", {}))
    return dataclasses.replace(model, scan_layers=scan_layers), tokenizer, variables


def _published(metadata: Mapping) -> config_lib.ModelConfig:
    return config_lib.ModelConfig(**metadata["model"])


def _shapes(model: config_lib.ModelConfig):
    return jax.tree.map(lambda spec: spec.shape, transformer.specs(model), is_leaf=rules.is_spec)
