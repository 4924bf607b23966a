"""Runs on several machines: the commands name each other's addresses, and each engine's stand-in carries a run to its end."""

import dataclasses
import functools
import json
import lzma
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading

import jsonschema
import pytest
import yaml

from inference.rollouts import rollout as rollout_lib
from rl.experiment.reporting import metrics
from rl.swarm import supervisor
from rl.swarm.launch import cluster, ray_cluster, scripts
from tests.rl.swarm import test_swarm
from tests.support import doubles, proxy, tiny_run

COUNTS = {"relay": 1, "server": 2, "worker": 3, "validator": 1}
# Slurm's programs on one machine. Each task of srun gets the variables by which JAX finds its place.
SCONTROL = 'echo "$SLURM_JOB_NODELIST" | tr , "\\n"'
SRUN = """
for option; do
  case $option in --ntasks=*) n=${option#*=} ;; --nodelist=*) list=${option#*=} ;; --*) ;; *) break ;; esac
  shift
done
echo "$n $list $*" >> "$FAKE_LOG"
export SLURM_NTASKS=$n SLURM_STEP_NUM_TASKS=$n SLURM_STEP_NODELIST=$list SLURM_STEP_NUM_NODES=$n SLURM_LOCALID=0
for ((i = 0; i < n; i++)); do SLURM_PROCID=$i "$@" & pids+=($!); done
trap 'kill "${pids[@]}" 2>/dev/null' TERM
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit ${code:-0}
"""


@pytest.fixture
def plan(tmp_path):
    return lambda counts=COUNTS, hosts=2, port=18000: cluster.Plan(
        doubles.experiment(), tmp_path / "It's a run", counts, ["--config=configs/quickstart.py"], hosts, port
    )


@pytest.fixture
def programs(tmp_path):
    """Returns the environment in which programs of these names, with these texts for bash, are found first."""

    def make(**texts):
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        own = os.environ | {"FAKE_LOG": str(tmp_path / "steps")}
        return own | {"PATH": f"{folder}:{os.environ['PATH']}"}

    return make


def option(command, name):
    return command[len(command) - command[::-1].index(name)]  # the last one counts


def test_the_commands_name_the_addresses_and_keys_of_each_other(plan):
    plan = plan()
    plan.workdir.mkdir()
    specs = {spec.name: spec.command for spec in plan.specs(lambda name: f"host-of-{name}")}
    assert [*specs] == ["learner", "relay0", "server0", "server1", "validator0", "worker0", "worker1", "worker2"]
    fields = dict(one.removeprefix("--config.").split("=", 1) for one in specs["learner"] if "topology" in one)
    keys = {file.stem: rollout_lib.WorkerKey.load(file).worker for file in (plan.workdir / "keys").iterdir()}
    assert keys.keys() == {*specs} - {"learner"}  # none for cheats
    trusted = [keys[name] for name in ("relay0", "server0", "server1")]
    assert fields["topology.server_keys"] == str(tuple(trusted)) and fields["topology.host"] == cluster.EVERYWHERE
    for name in keys:
        assert option(specs[name], "--orchestrator") == f"http://host-of-learner:{fields['topology.port']}"
        assert option(specs[name], "--key") == str(plan.workdir / "keys" / f"{name}.key")
    for name in ("server0", "server1"):
        port = option(specs[name], "--port")
        assert option(specs[name], "--url") == f"http://host-of-{name}:{port}"
        assert option(specs[name], "--weights") == f"http://host-of-relay0:{option(specs['relay0'], '--port')}"
    assert option(specs["relay0"], "--upstream") == f"http://host-of-learner:{fields['topology.relay_port']}"
    ports = [option(command, "--port") for name, command in specs.items() if "--port" in command]
    assert len({*ports}) == len(ports) == 4


def test_each_host_of_the_learner_gets_its_place(plan):
    plan = plan(counts=dict.fromkeys(COUNTS, 0), hosts=3)
    specs = plan.each_host({"learner": "a", "learner1": "b", "learner2": "c"})
    assert [spec.command[-1] for spec in specs] == [f"--config.topology.process_id={i}" for i in range(3)]
    assert all("--config.topology.coordinator=a:17998" in spec.command for spec in specs)
    assert [spec.role for spec in specs] == ["learner"] * 3


def test_the_script_of_slurm_places_each_node_and_starts_the_dead_again(plan, programs, tmp_path):
    """The learner's step ends with 3 once a worker has died and is back."""
    plan = plan()
    plan.workdir.mkdir()
    script = scripts.slurm(plan, ["--partition=gpu"])
    srun = SRUN.partition("export")[0] + 'case "$*" in *rl.train*) until [ $(grep -c "worker2" "$FAKE_LOG") -ge 2 ]; do'
    srun += " read -t 0.1 <> <(:); done; exit 3 ;; *worker2*) exit 1 ;; *) exec tail -f /dev/null ;; esac"
    environment = programs(srun=srun, scontrol=SCONTROL, sleep="exit 0")
    environment["SLURM_JOB_NODELIST"] = "n0,n1,n2,n3,n4"
    (tmp_path / "script").write_text(script)
    command = ["bash", str(tmp_path / "script")]
    with subprocess.Popen(command, env=environment, start_new_session=True) as job:
        assert job.wait(30) == 3
    assert "#SBATCH --nodes=5\n" in script and "#SBATCH --partition=gpu\n" in script
    headers = [shlex.split(line)[1:] for line in script.splitlines() if line.startswith("#SBATCH")]
    assert [f"--job-name={plan.workdir.name}"] in headers and [f"--output={plan.workdir}/launch/%j.log"] in headers
    steps = [line.split(" ", 2) for line in (tmp_path / "steps").read_text().splitlines()]
    placed = {re.findall(r"keys/(\w+)\.key", text)[0]: where for _, where, text in steps if "--key" in text}
    on_first = dict.fromkeys(("relay0", "worker0", "worker1", "worker2"), "n0")
    assert placed == on_first | {"server0": "n2", "server1": "n3", "validator0": "n4"}
    (learner,) = [step for step in steps if "rl.train" in step[2]]
    assert learner[:2] == ["2", "n0,n1"] and str(plan.workdir) in learner[2]
    (server,) = [text for _, where, text in steps if where == "n2"]
    assert re.search(r"--url http://n2:\d+", server) and "--orchestrator http://n0:18000" in server


def manifests(plan, **options):
    plan.workdir.mkdir(exist_ok=True)
    places = "image:1", "disk", "google.com/tpu=4", ["cloud.google.com/gke-tpu-topology=2x2"]
    return [*yaml.safe_load_all(scripts.gke(plan, *places, **options))]


def test_the_hosts_of_a_manifest_are_the_names_of_its_pods(plan):
    (found,) = manifests(plan())
    name, jobs = found["metadata"]["name"], found["spec"]["replicatedJobs"]
    assert re.fullmatch("it-s-a-run-[0-9a-f]{6}", name) and name == found["spec"]["network"]["subdomain"]
    pods = {f"{name}-{job['name']}-0-{i}.{name}" for job in jobs for i in range(job["template"]["spec"]["completions"])}
    text = json.dumps(found)
    assert {*re.findall(rf"[\w-]+\.{name}\b", text)} <= pods and len(pods) == 9
    by_name = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}
    for job, spec in by_name.items():
        has_chips = "resources" in spec["containers"][0]
        assert has_chips == ("nodeSelector" in spec) == (job.rstrip("012") in ("learner", "server", "validator"))
    variables = [one["name"] for one in by_name["learner"]["containers"][0]["env"]]
    assert variables == ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]
    assert by_name["learner"]["restartPolicy"] == "Never" and by_name["worker0"]["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("123", "run-123"), ("null", "null"), ("on", "on"), ("a" * 22 + "_b", "a" * 22), ("\u6f22", "run")],
)
def test_a_name_of_any_folder_is_a_name_for_kubernetes(plan, name, expected):
    """A folder 123 was a number, and one of 30 letters ended in a hyphen."""
    plan = dataclasses.replace(plan(), workdir=plan().workdir / name)
    plan.workdir.mkdir(parents=True)
    for one in manifests(plan, is_elastic=True):
        schemas()[one["kind"]].validate(one)
        assert re.fullmatch(f"{expected}-[0-9a-f]{{6}}", one["metadata"]["labels"]["run"])
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", one["metadata"]["name"])


def test_two_folders_of_one_name_are_two_runs_in_the_cluster(plan):
    """The second run replaced the first."""
    plans = [dataclasses.replace(plan(), workdir=plan().workdir / name / "run") for name in "ab"]
    for one in plans:
        one.workdir.mkdir(parents=True)
    assert len({one["metadata"]["name"] for plan in plans for one in manifests(plan)}) == 2


def test_sbatch_reads_the_name_of_any_folder(plan):
    """sbatch takes a backslash in quotes, too, as an escape, and % of an output file as a pattern."""
    plan = dataclasses.replace(plan(), workdir=plan().workdir / "9 % \\ run")
    plan.workdir.mkdir(parents=True)
    script = scripts.slurm(plan, [])
    assert "#SBATCH --job-name='9 % \\\\ run'\n" in script and "9 %% \\\\ run'/launch/%j.log\n" in script
    assert not any(spec.after_port for spec in plan.specs("{}".format))  # that port is of another machine


def test_only_the_names_of_nodes_are_variables_of_the_script():
    assert scripts.in_shell(["a@home@b", "http://@worker0@:1"], ["worker0"]) == "'a@home@b' 'http://'\"$worker0\"':1'"


def test_a_learner_that_dies_at_once_by_ssh_ends_the_command(plan, programs, monkeypatch):
    """It was started every 16 s for ever."""
    monkeypatch.setenv("PATH", programs(ssh='echo "$@" >> "$FAKE_LOG"; echo no such loss; exit 1')["PATH"])
    monkeypatch.setenv("FAKE_LOG", str(plan().workdir.parent / "calls"))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    plan = plan(counts=dict.fromkeys(COUNTS, 0), hosts=1)
    plan.workdir.mkdir()
    with pytest.raises(ValueError, match="no such loss.* 5 times"):
        runpy.run_module("rl.launch", run_name="launch")["_by_ssh"](plan, ["host"])
    calls = (plan.workdir.parent / "calls").read_text().splitlines()
    assert len(calls) == 5 and all("-oServerAliveInterval=15" in one and " -- host cd " in one for one in calls)


def test_the_image_copies_files_that_exist():
    text = (tiny_run.ROOT / "examples" / "launch" / "Dockerfile").read_text()
    copied = [line.split()[1] for line in text.splitlines() if line.startswith("COPY")]
    assert copied[-1] == "." and all((tiny_run.ROOT / name).exists() for name in copied)
    assert "-r requirements.txt" in text and "requirements.txt" in copied


def test_nodes_that_come_and_go_are_deployments_that_the_others_find(plan):
    jobset, *others = manifests(plan(), is_elastic=True)
    assert [job["name"] for job in jobset["spec"]["replicatedJobs"]] == ["learner", "validator0"]
    services, deployments = others[::2], others[1::2]
    run = jobset["metadata"]["name"]
    names = [f"{run}-{node}" for node in ("relay0", "server0", "server1", "worker0", "worker1", "worker2")]
    assert names == [one["metadata"]["name"] for one in services] == [one["metadata"]["name"] for one in deployments]
    pods = {f"{run}-validator0-0-0.{run}", *(f"{run}-learner-0-{i}.{run}" for i in range(2))}
    text = json.dumps([jobset, *others])
    hosts = set(re.findall(r"http://([^:/]+):", text)) | {re.findall(rf'"({run}-learner[^":]*):\d+"', text)[0]}
    assert hosts <= pods | {*names} and {f"{run}-relay0", f"{run}-server1"} <= hosts
    for service, deployment in zip(services, deployments, strict=True):
        spec = deployment["spec"]
        assert service["spec"]["selector"] == spec["selector"]["matchLabels"]
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "Always" and spec["strategy"] == {"type": "Recreate"}
        (key,) = re.findall(r"keys/(\w+)\.key", json.dumps(pod))
        assert service["metadata"]["name"].endswith(f"-{key}")


def schemas():
    file = tiny_run.ROOT / "tests" / "fixtures" / "kubernetes" / "schemas.json.xz"
    found = json.loads(lzma.decompress(file.read_bytes()))
    return {
        kind: jsonschema.Draft202012Validator(schema | {"$defs": found["$defs"]})
        for kind, schema in found["kinds"].items()
    }


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_published_schemas_of_kubernetes_and_jobset_accept_every_manifest(plan, hosts, is_elastic):
    for one in manifests(plan(hosts=hosts), is_elastic=is_elastic):
        schemas()[one["kind"]].validate(one)


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("JobSet", "spec.failurePolicy.maxRestart", 20),
        ("JobSet", "spec.replicatedJobs.0.template.spec.completions", "1"),
        ("JobSet", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.arg", []),
        ("Deployment", "spec.replicas", "1"),
        ("Deployment", "spec.template.spec.containers.0.volumeMounts.0.path", "/"),
        ("Deployment", "spec.strategy.kind", "Recreate"),
        ("Service", "spec.headless", True),
    ],
)
def test_the_schemas_find_a_wrong_field(plan, kind, place, value):
    one = next(one for one in manifests(plan(), is_elastic=True) if one["kind"] == kind)
    *names, last = place.split(".")
    functools.reduce(lambda at, name: at[int(name) if name.isdigit() else name], names, one)[last] = value
    assert [error.json_path for error in schemas()[kind].iter_errors(one)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target=slurm", "--servers=1"], "servers need workers"),
        (["--target=slurm", "--relays=1"], "needs servers"),
        (["--target=ssh"], "--machines"),
        (["--target=gke"], "--image"),
        (["--target=local", "--hosts=2"], "this host alone"),
        (["--target=slurm", "--elastic"], "leave it out"),
        (["--target=ssh", "--machines=a", "--submit"], "leave it out"),
        (["--target=slurm", "--workdir=gs://b/run"], "mount it"),
        (["--target=slurm", "--sbatch=--partition=a\ntouch b"], "control characters"),
        (["--target=gke", "--accelerator=GPU"], "NAME=VALUE"),
    ],
)
def test_contradictions_are_one_line(options, words, tmp_path):
    command = [sys.executable, "-m", "rl.launch", "--config=configs/quickstart.py", f"--workdir={tmp_path}", *options]
    result = subprocess.run(command, cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and words in result.stderr, result.stderr


def launch(workdir, environment, *options, **fields):
    command = [*tiny_run.command(workdir, module="rl.launch", **fields), *options]
    return subprocess.Popen(command, cwd=tiny_run.ROOT, env=environment, start_new_session=True)


def free_port():
    """A port below the ephemeral ones, so that the next twenty are likely free."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return 20000 + sock.getsockname()[1] % 10000


def is_complete(workdir):
    return [line["step"] for line in metrics.read_steps(workdir)] == [*range(1, 7)] and not test_swarm.processes_of(
        workdir
    )


SMALL = [f"--{name}=1" for name in ("servers", "workers")]


@pytest.mark.slow
def test_a_job_of_slurm_runs_a_learner_of_two_hosts(programs, tmp_path):
    environment = programs(sbatch='exec setsid bash "$1"', srun=SRUN, scontrol=SCONTROL)
    environment |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "127.0.0.1,localhost,127.0.0.1"}
    environment |= {"JAX_NUM_CPU_DEVICES": "1"}
    options = ["--target=slurm", "--hosts=2", "--submit", f"--port={free_port()}", *SMALL]
    with launch(tmp_path / "w", environment, *options, mesh__fsdp=2) as job:
        assert job.wait(900) == 0
    assert is_complete(tmp_path / "w")


@pytest.mark.slow
def test_machines_by_ssh_carry_a_run(programs, tmp_path):
    environment = programs(ssh='echo "${@: -2:1}" >> "$FAKE_LOG"; exec bash -c "${@: -1}"')
    options = ["--target=ssh", "--machines=127.0.0.1,localhost", f"--port={free_port()}", *SMALL]
    with launch(tmp_path / "w", environment, *options) as job:
        assert job.wait(900) == 0
    assert is_complete(tmp_path / "w")
    assert sorted({*(tmp_path / "steps").read_text().split()}) == ["127.0.0.1", "localhost"]


@pytest.mark.slow
def test_a_killed_actor_of_ray_comes_back_and_the_run_ends(plan, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="pip install ray")
    from ray import cluster_utils  # pyright: ignore[reportMissingImports]

    log, hosts, broken, plan = tmp_path / "starts", {}, set(), plan(counts=COUNTS | {"worker": 1, "server": 1}, hosts=1)
    plan.workdir.mkdir()

    def stand_ins(self, host_of):
        hosts.update(host_of)
        command = lambda name: ["\0" if name in broken else "tests.support.stand_in_role", name, str(log)]  # noqa: E731
        return [supervisor.Spec(name, name.rstrip("0"), command(name)) for name in self.names]

    def kill():
        proxy.wait_until(lambda: log.exists() and "worker0" in log.read_text(), 150)
        os.kill(int(re.findall(r"worker0 (\d+)", log.read_text())[0]), signal.SIGKILL)  # the actor

    monkeypatch.setattr(cluster.Plan, "each_host", stand_ins)
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    try:
        nodes.add_node(num_cpus=2, num_gpus=0)
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        ray_cluster.run(plan, nodes.address, "")
        starts = [line.split()[0] for line in log.read_text().splitlines()]
        log.unlink()
        broken.add("worker0")  # its process cannot be started: the learner would wait for it
        with pytest.raises(ValueError, match="null byte"):
            ray_cluster.run(plan, nodes.address, "")
    finally:
        nodes.shutdown()
    assert sorted({*starts}) == sorted(plan.names) == sorted(hosts) and starts.count("worker0") == 2
    proxy.wait_until(lambda: not test_swarm.processes_of(log), 60)
