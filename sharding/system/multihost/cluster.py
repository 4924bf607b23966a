"""Finds the place of this process among those of its run: the coordinator's address, its own index, and their number.

It looks in this order: the config; JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; JAX's own detection of TPU
pods and of steps of Slurm or Open MPI. All of it runs before JAX starts, which cannot be undone.
"""

import os
from collections.abc import Sequence

from jax._src import cloud_tpu_init, clusters  # jax.distributed.initialize() uses them; they have no public name


def detect(
    coordinator: str, num_processes: int, process_id: int, timeout_s: float
) -> tuple[str, int, int, Sequence[int] | None] | None:
    """Returns (coordinator's address, index, number of processes, device IDs or None), or None for a process alone.

    `coordinator` is host:port of host 0, "auto" (JAX must find it), or "" (JAX may find it). With `num_processes` 0 and with
    `process_id` -1 they are taken from the environment. JAX waits up to `timeout_s` for a pod's other hosts. Raises ValueError
    if the settings contradict each other, or if some are missing and JAX cannot find them.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS", "") if coordinator in ("", "auto") else coordinator
    count = num_processes or int(os.environ.get("JAX_NUM_PROCESSES", 0)) or None
    index = process_id if process_id >= 0 else int(os.environ.get("JAX_PROCESS_ID", -1))
    index, device_ids = None if index < 0 else index, None
    given = f"num_processes = {count or 'unset'} and process_id = {'unset' if index is None else index}"
    if not address and coordinator != "auto" and not _may_be_in_cluster():
        if count not in (None, 1) or index is not None:
            raise ValueError(f"{given} need coordinator; set it to HOST:PORT of host 0")
        return None
    if not address or None in (count, index):
        try:
            address, count, index, device_ids = clusters.ClusterEnv.auto_detect_unset_distributed_params(
                address or None, count, index, None, None, int(timeout_s)
            )
        except OSError:  # a TPU without a pod's metadata, as in a notebook
            if address or coordinator == "auto":
                raise
            return None
    if count == 1 or (not address and not coordinator):
        return None
    if not address or count is None or index is None:
        given = f"coordinator = {coordinator!r}, {given} do not give this process a place"
        raise ValueError(f"{given}, and JAX finds no cluster; set all three")
    if not 0 <= index < count:
        raise ValueError(f"process_id = {index} must be 0 to {count - 1}, as num_processes = {count}; correct it")
    if not address.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator = {address!r} must be HOST:PORT of host 0; correct it")
    return address, index, count, device_ids


def _may_be_in_cluster() -> bool:
    """Returns True on a machine with TPUs, and in a step of several tasks of Slurm or Open MPI."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    tasks = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    has_tpus = cloud_tpu_init.running_in_cloud_tpu_vm and (not platforms or "tpu" in platforms)
    return has_tpus or any(number.isdigit() and int(number) > 1 for number in tasks)
