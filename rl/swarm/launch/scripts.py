"""Renders a plan as a script for Slurm, or as a manifest for Kubernetes with JobSet."""

import hashlib
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable, Sequence

import jinja2

from rl.swarm.launch import cluster
from sharding.system import child_process


def slurm(plan: cluster.Plan, options: Sequence[str]) -> str:
    """Returns the script of a job with a node for each host of the learner and each accelerated node; the others run on the first."""
    specs = plan.specs(lambda name: f"@{name}@")
    own = [spec.name for spec in specs[1:] if spec.role in cluster.ACCELERATED]
    return _render(
        "slurm.sh",
        plan=plan,
        options=options,
        own=own,
        learner=in_shell(specs[0].command, plan.roles),
        others=[(spec.name, in_shell(spec.command, plan.roles)) for spec in specs[1:]],
    )


def gke(
    plan: cluster.Plan, image: str, claim: str, accelerator: str, selectors: Sequence[str], *, is_elastic: bool = False
) -> str:
    """Returns the manifest of a JobSet, with a job for each node. A pod has a name in DNS that follows from its job's.

    With `is_elastic`, relays, servers, and workers are Deployments next to the JobSet, each with a service of its name.
    """
    name = re.sub(r"[^a-z0-9]+", "-", plan.workdir.name.lower())[:23].strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".strip("-")  # a service may not begin with a digit
    name += f"-{hashlib.sha256(str(plan.workdir).encode()).hexdigest()[:6]}"  # runs/1/a and runs/2/a are two runs
    elastic = cluster.ELASTIC if is_elastic else ()

    def pod(node: str) -> str:
        return f"{name}-{node}" if plan.roles[node] in elastic else f"{name}-{node}-0-0.{name}"

    resource, _, count = accelerator.partition("=")
    return _render(
        "gke.yaml",
        plan=plan,
        name=name,
        specs=plan.specs(pod),
        coordinator=f"{pod('learner')}:{plan.port - 2}",
        image=image,
        claim=claim,
        resources={resource: count} if accelerator else {},
        selectors={label: value for label, _, value in (one.partition("=") for one in selectors)},
        accelerated=cluster.ACCELERATED,
        elastic=elastic,
    )


def in_shell(command: Sequence[str], nodes: Iterable[str]) -> str:
    """Returns the arguments of `python -m` quoted for a shell. "@NODE@" with a name in `nodes` becomes the shell variable $NODE."""
    quoted = ("'" + one.replace("'", "'\\''") + "'" for one in command)
    return re.sub(f"@({'|'.join(nodes)})@", r"""'"$\1"'""", " ".join(quoted))


def _render(template_name: str, **values: object) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["sbatch"] = lambda value: shlex.quote(value.replace("\\", "\\\\"))  # it reads \\ in quotes, too
    template = environment.from_string(pathlib.Path(__file__).with_name(template_name).read_text())
    return template.render(root=child_process.ROOT, python=sys.executable, **values)
