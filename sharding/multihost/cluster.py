"""Where this process stands among those of its run: which is the first, how many there are, which one it is.

In this order: what the config says; JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; what JAX finds by itself, on a
TPU pod, or as a step of several tasks of Slurm or Open MPI. JAX is asked before it starts anything, since it has no way back.
"""

import os
from collections.abc import Sequence

from jax._src import cloud_tpu_init, clusters  # what jax.distributed.initialize() asks; it has no public name


def standing(
    coordinator: str, num_processes: int, process_id: int, timeout_s: float
) -> tuple[str, int, int, Sequence[int] | None] | None:
    """(Coordinator's address, number of this process, how many there are, its devices), or None for a process alone.

    `coordinator` is host:port of the first host, "auto" (JAX must find it), or "" (JAX may find it); num_processes and
    process_id are 0 and -1 for what the environment says. ValueError where these do not fit together.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS", "") if coordinator in ("", "auto") else coordinator
    count = num_processes or int(os.environ.get("JAX_NUM_PROCESSES", 0)) or None
    index = process_id if process_id >= 0 else int(os.environ.get("JAX_PROCESS_ID", -1))
    index, device_ids = None if index < 0 else index, None
    if not address and coordinator != "auto" and not _may_be_in_one():
        if count not in (None, 1) or index is not None:
            raise ValueError(
                "topology.num_processes and topology.process_id mean nothing without topology.coordinator; set it to HOST:PORT "
                "of the first host"
            )
        return None
    if not address or None in (count, index):
        try:
            address, count, index, device_ids = clusters.ClusterEnv.auto_detect_unset_distributed_params(
                address or None, count, index, None, None, int(timeout_s)
            )
        except OSError:  # a TPU without the metadata of a pod: a notebook's
            if address or coordinator == "auto":
                raise
            return None
    if count == 1 or (not address and not coordinator):
        return None
    if not address or count is None or index is None:
        raise ValueError(
            f"topology.coordinator = {coordinator!r}, topology.num_processes = {count or 'unset'} and topology.process_id = "
            f"{'unset' if index is None else index} do not say where this process stands, and JAX finds no cluster; set all three"
        )
    if not 0 <= index < count:
        raise ValueError(
            f"topology.process_id = {index} must be below topology.num_processes = {count}; they count from 0"
        )
    if not address.rpartition(":")[2].isdigit():
        raise ValueError(f"topology.coordinator = {address!r} must be HOST:PORT of the first host")
    return address, index, count, device_ids


def _may_be_in_one() -> bool:
    """Whether JAX is worth asking: on a machine with TPUs, or in a step of several tasks of Slurm or Open MPI."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    tasks = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    has_tpus = cloud_tpu_init.running_in_cloud_tpu_vm and (not platforms or "tpu" in platforms)
    return has_tpus or any(number.isdigit() and int(number) > 1 for number in tasks)
