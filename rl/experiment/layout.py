"""The devices of a run: those of the learner, and those of an engine in the learner's process (`topology.mode = "colocated"`).

Time-shared (`mesh.rollout_devices = 0`): the engine uses all devices of its host, and stops during each train step.
Split: the last `mesh.rollout_devices` devices of each host are the engine's, and the others are the learner's; both run at the
same time if `rl.max_lag` allows it. Over several hosts the learner spans all of them, and each host has an engine of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax

from inference.engine import engine as engine_lib
from rl.experiment import experiment as experiment_lib
from sharding.mesh import mesh as mesh_lib


def is_colocated(config) -> bool:
    """Returns True if a run has its inference server in the learner's process: by default on an accelerator."""
    if config.topology.mode == "auto":
        return config.mesh.rollout_devices > 0 or jax.default_backend() != "cpu"
    return config.topology.mode == "colocated"


def learner_mesh(config) -> jax.sharding.Mesh:
    """Returns the mesh of `config.mesh` over the learner's part of all devices of all hosts."""
    axes = config.mesh.to_dict()
    num_rollout_devices = axes.pop("rollout_devices")
    return mesh_lib.create(axes, split(mesh_lib.devices(), num_rollout_devices)[0])


def engine_mesh(experiment: experiment_lib.Experiment) -> jax.sharding.Mesh:
    """Returns the mesh of the engine in this process: the axes of `inference.mesh`, of which `data` takes the remaining devices.

    Raises ValueError if the axes or the number of slots do not fit the engine's devices.
    """
    _, devices = split(jax.local_devices(), experiment.config.mesh.rollout_devices)
    try:
        mesh = mesh_lib.create({"data": -1} | experiment.server_mesh, devices)
        engine_lib.check_mesh(experiment.engine, mesh)
    except ValueError as error:
        raise ValueError(f"inference.mesh: {error}") from None
    return mesh


def split(devices: Sequence[Any], num_rollout_devices: int) -> tuple[list[Any], list[Any]]:
    """Returns (the learner's devices, the engines'): each host's last `num_rollout_devices` are its engine's. 0: both have all devices."""
    if not num_rollout_devices:
        return [*devices], [*devices]
    of_host = {device.process_index: [] for device in devices}
    for device in devices:
        of_host[device.process_index].append(device)
    fewest = min(map(len, of_host.values()))
    if num_rollout_devices >= fewest:
        found = f"mesh.rollout_devices = {num_rollout_devices} leaves the learner none of a host's {fewest} devices"
        raise ValueError(f"{found}; lower it, or set it to 0: learner and engine then take turns on all devices")
    engines = {device for own in of_host.values() for device in own[-num_rollout_devices:]}
    return [d for d in devices if d not in engines], [d for d in devices if d in engines]
