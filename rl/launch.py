"""Starts a run on a machine or a cluster: `python -m rl.launch --target=slurm --config=configs/NAME.py --workdir=DIR --servers=4 --workers=8`.

1. Without --servers, each of the --hosts of the learner has an inference server and workers of its own (topology.mode "colocated"). With them,
   servers, relays, and validators sign in with keys in WORKDIR/keys, and the learner knows their public halves.
2. Target local and ssh supervise the processes here, and ray on a cluster of Ray: a process that dies starts again, and all end with the learner.
   slurm and gke write WORKDIR/launch/run.sbatch or run.yaml, and --submit hands it to sbatch or kubectl, whose engine does the same.

Every machine sees the checkout and WORKDIR at the same paths (docs/launch).
"""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import time

from absl import flags

from rl.experiment import command
from rl.experiment import flags as command_line
from rl.experiment import workdir as run_directory
from rl.experiment.plan import sizes
from rl.swarm import processes, supervisor
from rl.swarm.launch import cluster, ray_cluster, scripts
from sharding.weights import bucket

SUBMIT = {"slurm": ["sbatch"], "gke": ["kubectl", "apply", "--filename"]}
TARGETS = ("local", "ssh", "ray", *SUBMIT)


def main() -> None:
    """Runs the command of the command line; returns when the run ends, or once it is rendered or submitted."""
    values = flags.FLAGS
    counts = {role: getattr(values, f"{role}s") for role in processes.ROLES}
    _check(counts)
    arguments = command_line.config_arguments(sys.argv[1:])
    if values.target == "local":
        own = [f"--{role}s={count}" for role, count in counts.items()] if counts["server"] else []
        command = ["rl.swarm" if own else "rl.train", *arguments, f"--workdir={values.workdir}", *own]
        os.execv(sys.executable, [sys.executable, "-m", *command])
    experiment = sizes.resolve(values.config) if counts["server"] else None
    workdir = pathlib.Path(values.workdir).absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    plan = cluster.Plan(experiment, workdir, counts, arguments, values.hosts, values.port)
    if values.target == "ssh":
        _by_ssh(plan, values.machines)
    elif values.target == "ray":
        ray_cluster.run(plan, values.ray, values.accelerator)
    else:
        _submit(plan)


def _check(counts: dict[str, int]) -> None:
    values, target = flags.FLAGS, flags.FLAGS.target
    if bool(counts["server"]) != bool(counts["worker"]) or (not counts["server"] and any(counts.values())):
        given = ", ".join(f"--{role}s={count}" for role, count in counts.items())
        raise ValueError(f"{given} contradict each other; servers need workers, and each other role needs servers")
    if values.hosts < 1 or min(counts.values()) < 0:
        raise ValueError(f"--hosts={values.hosts} and numbers of nodes must be positive; correct them")
    if target == "local" and values.hosts > 1:
        raise ValueError(f"--target=local uses this host alone, but --hosts={values.hosts}; choose another target")
    if target != "local" and bucket.is_url(values.workdir):
        raise ValueError(f"--workdir={values.workdir} is in a bucket; mount it, or give a folder that all hosts share")
    if target == "ssh" and len(values.machines) < values.hosts:
        raise ValueError(f"--machines has {len(values.machines)} names for --hosts={values.hosts}; name more of them")
    if values.submit and target not in SUBMIT:
        raise ValueError(f"--submit is for the targets {' and '.join(SUBMIT)}, not {target}; leave it out")
    for name, texts in (("workdir", [values.workdir]), ("sbatch", values.sbatch)):
        if broken := [text for text in texts if not text.isprintable()]:
            raise ValueError(f"--{name}={broken[0]!r} has control characters; leave them out")
    for name, texts in (("accelerator", [values.accelerator]), ("node_selector", values.node_selector)):
        if broken := [text for text in texts if text and not all(text.partition("=")[::2])]:
            raise ValueError(f"--{name}={broken[0]} has no name or no value; write NAME=VALUE")
    if values.elastic and not (target == "gke" and counts["server"]):
        raise ValueError("--elastic is for --target=gke with --servers and --workers; add these, or leave it out")
    if target == "gke" and not (values.image and values.claim):
        raise ValueError("--target=gke needs --image and --claim: a container image, and the volume claim of WORKDIR")


def _by_ssh(plan: cluster.Plan, machines: list[str]) -> None:
    """Keeps the processes alive on machines by name, the learner's first; the others in turn on those that are left."""
    rest = machines[plan.hosts :] or machines
    names = [name for name in plan.names if not name.startswith("learner")]
    host_of = dict(zip(plan.learners, machines, strict=False))
    host_of |= {name: rest[i % len(rest)] for i, name in enumerate(names)}
    note = functools.partial(print, flush=True)
    with contextlib.ExitStack() as stack:
        ended = supervisor.ended_by_signal(stack)
        logs = run_directory.logs(plan.workdir)
        nodes = stack.enter_context(supervisor.Supervisor(logs, note, lambda spec: time.monotonic()))
        for spec in plan.each_host(host_of):
            nodes.add(spec)
        note(f"starting {len(nodes.nodes)} processes; python -m rl.logs {plan.workdir} --follow")
        while not nodes.is_over and not ended:
            nodes.tick(time.monotonic(), vital=("learner",))
            time.sleep(supervisor.TICK_S)
    if not nodes.is_over:
        sys.exit(128 + ended[0])


def _submit(plan: cluster.Plan) -> None:
    values = flags.FLAGS
    file = plan.workdir / "launch" / f"run.{'sbatch' if values.target == 'slurm' else 'yaml'}"
    file.parent.mkdir(exist_ok=True)
    if values.target == "slurm":
        text = scripts.slurm(plan, values.sbatch)
    else:
        places = values.image, values.claim, values.accelerator, values.node_selector
        text = scripts.gke(plan, *places, is_elastic=values.elastic)
    file.write_text(text)
    command = [*SUBMIT[values.target], str(file)]
    if not values.submit:
        print(f"wrote {file}; to start it: {' '.join(command)}")
        return
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"{' '.join(command)} failed ({error}); run it where {command[0]} works") from error


if __name__ == "__main__":
    flags.DEFINE_enum("target", None, TARGETS, "where the run starts", required=True)
    flags.DEFINE_integer("hosts", 1, "hosts of the learner")
    for role in processes.ROLES:
        flags.DEFINE_integer(f"{role}s", 0, f"{role}s, apart from the learner")
    flags.DEFINE_integer("port", 18000, "first port of the processes; each has one of its own")
    flags.DEFINE_bool("submit", False, "slurm, gke: submit the file that is written")
    flags.DEFINE_list("machines", [], "ssh: names of the machines, the learner's first")
    flags.DEFINE_string("ray", "auto", "ray: address of the cluster")
    flags.DEFINE_multi_string("sbatch", [], "slurm: a further option of sbatch, such as --gpus-per-node=8")
    flags.DEFINE_string("image", "", "gke: container image with this checkout (examples/launch/Dockerfile)")
    flags.DEFINE_string("claim", "", "gke: claim of the volume that is mounted at WORKDIR")
    flags.DEFINE_string(
        "accelerator", "", "gke, ray: RESOURCE=COUNT of learner, server, and validator, such as google.com/tpu=4"
    )
    helps = "gke: relays, servers, and workers as Deployments, which outlive restarts of the learner and can be scaled"
    flags.DEFINE_bool("elastic", False, helps)
    flags.DEFINE_multi_string("node_selector", [], "gke: LABEL=VALUE of nodes with an accelerator")
    command.parse()
    command.run(main)
