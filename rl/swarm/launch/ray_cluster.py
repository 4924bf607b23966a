"""Keeps the processes of a run alive on a cluster of Ray (`pip install ray`): an actor for each, in a bundle of one placement group.

Ray starts a dead actor again, maybe on another node, and with it its process; an actor starts a dead process again.
"""

import dataclasses
import os

from rl.experiment import workdir as run_directory
from rl.swarm import supervisor
from rl.swarm.launch import cluster
from sharding.system import child_process
from sharding.system.logs import run_logs


def run(plan: cluster.Plan, address: str, accelerator: str) -> None:
    """Runs a plan on the cluster at `address` until the learner ends. Raises ValueError if the learner died too often.

    `accelerator` is RESOURCE=COUNT of each accelerated process, or "".
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.util import scheduling_strategies  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("--target=ray needs the package ray, which is not installed; pip install ray") from None

    class Process:
        """An actor that keeps a process alive. It is sent by value, and imports no JAX, so it starts fast."""

        def host(self) -> str:
            return ray.util.get_node_ip_address()

        def keep(self, spec: supervisor.Spec, logs: run_logs.Folder) -> str:
            return supervisor.keep(spec, logs)

    path = os.pathsep.join(filter(None, [str(child_process.ROOT), os.environ.get("PYTHONPATH")]))
    ray.init(address, runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
    resource, _, count = accelerator.partition("=")
    extra = {resource: float(count)} if accelerator else {}
    accelerated = [name for name in plan.names if name.rstrip("0123456789") in cluster.ACCELERATED]
    needs = [{"CPU": 1.0} | (extra if name in accelerated else {}) for name in plan.names]
    try:
        group = ray.util.placement_group(needs, strategy="SPREAD")
        ray.get(group.ready())
        make = ray.remote(Process)
        actors = {}
        for i, (name, bundle) in enumerate(zip(plan.names, needs, strict=True)):
            place = scheduling_strategies.PlacementGroupSchedulingStrategy(group, i)
            own = {"resources": {key: n for key, n in bundle.items() if key not in ("CPU", "GPU")}}
            own |= {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "max_restarts": -1, "max_task_retries": -1}
            actors[name] = make.options(name=name, scheduling_strategy=place, **own).remote()
        hosts = ray.get([actor.host.remote() for actor in actors.values()])
        logs = run_directory.logs(plan.workdir)
        specs = plan.each_host(dict(zip(actors, hosts, strict=True)))
        here = [dataclasses.replace(spec, host="") for spec in specs]  # an actor is on the host of its process
        kept = {actors[spec.name].keep.remote(spec, logs): spec.name for spec in here}
        while {*plan.learners} & {*kept.values()}:
            (ended,), _ = ray.wait([*kept])  # of the others, only those that raise an error, such as without WORKDIR
            if words := ray.get(ended):
                raise ValueError(words)
            del kept[ended]
    finally:
        ray.shutdown()  # ends the group and its actors, and these their processes
