"""Checks a machine for a run, and prints each thing that would fail: `python -m rl.doctor --config=configs/NAME.py --workdir=DIRECTORY`.

Each check prints one line, with the remedy if it fails. The exit code is 1 if a check failed. A child process opens the devices and ends at
once. The only file written is a probe in the working directory, which is deleted.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from absl import flags

    from rl.experiment import command

    flags.DEFINE_string("workdir", "", "the working directory of the run to come, which may be in a bucket")
    command.parse(needs_workdir=False)

import asyncio
import contextlib
import dataclasses
import email.utils
import importlib.metadata
import json
import os
import pathlib
import re
import resource
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator

import httpx
from absl import flags

from models import flops, hub
from rl.experiment import command, experiment, initial
from rl.experiment import flags as command_line
from rl.experiment.plan import sizes
from rl.experiment.reporting import monitors
from sharding.mesh import host_memory
from sharding.system import bounded_reply, child_process, sandbox, sockets
from sharding.weights.bucket import storage
from sharding.weights.format import journal

OK, WARNING, FAILED = "ok", "warning", "FAILED"
PYTHONS = ((3, 11), (3, 14))
MIN_FILES, MIN_MEMORY_BYTES, MAX_SKEW_S, TIMEOUT_S, PROBE_S = 4096, 4 * 2**30, 5.0, 10.0, 180.0
MAX_BYTES = 2**20  # of the health of a process elsewhere
DEVICES = """
import json
from sharding.mesh import mesh
found = mesh.devices()
print(json.dumps([found[0].platform, found[0].device_kind, len(found)]))
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one check, with the remedy if it is not OK."""

    check: str
    status: str
    found: str
    remedy: str = ""


def check(config, workdir: str, given: Collection[str] = ()) -> Iterator[Result]:
    """Yields the result of each check of this machine for a config. `given` are the config fields that the command line sets."""
    yield _python()
    yield _packages()
    yield from _machine()
    devices, exp = _devices(config), None
    yield devices
    try:
        config = initial.completed(config, given)
        if devices.status != FAILED:  # the sizes depend on them
            exp, _ = sizes.settled(config, sizes.present, experiment.resolve)
            yield Result("config", OK, f"{config.env.name}, {config.topology.mode}")
    except ValueError as error:
        yield from (_failed("config", ValueError(line)) for line in str(error).split("\nerror: "))
    yield from _ports(config.topology)
    if workdir:
        yield from _workdir(workdir, exp)
    yield _sandbox(config.trust.sandbox)
    for field, name in (("init_from", config.init_from), ("tokenizer", config.tokenizer)):
        if name and (hub.is_id(name) and not pathlib.Path(name).exists() or hub.is_url(name)):
            yield _attempt(field, lambda name=name: _bucket(name) if hub.is_url(name) else _hub(name))
    for name in config.topology.monitors:
        yield _attempt(f"monitor {name}", lambda name=name: monitors.check([name]) or "installed")
    urls = [*config.topology.servers, *filter(None, [config.topology.orchestrator])]
    for url in urls:
        yield from _node(url)


def _python() -> Result:
    least, end = PYTHONS
    remedy = f"use Python {least[0]}.{least[1]} to {end[0]}.{end[1] - 1}"
    return _result("python", least <= sys.version_info[:2] < end, sys.version.split()[0], remedy)


def _packages() -> Result:
    """Compares the installed packages with requirements.txt."""
    from packaging import requirements

    problems, shown = [], []
    for line in (child_process.ROOT / "requirements.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text or text.startswith("./"):
            continue
        wanted = requirements.Requirement(text)
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{wanted.name} is not installed")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            problems.append(f"{wanted.name} {version} is not {wanted.specifier}")
        if wanted.name in ("jax", "flax", "orbax-checkpoint"):
            shown.append(f"{wanted.name} {version}")
    return _result("packages", not problems, "; ".join(problems or shown), "pip install -r requirements.txt")


def _machine() -> Iterator[Result]:
    memory = host_memory.total_bytes()
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count()
    found, remedy = f"{cores} cores, {memory / 2**30:.1f} GiB", "a run of the quickstart needs 4 GiB"
    yield _result("machine", memory >= MIN_MEMORY_BYTES, found, remedy, WARNING)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft >= MIN_FILES or soft == resource.RLIM_INFINITY
    remedy = f"ulimit -n {MIN_FILES}, for orchestrators and relays with many clients"
    yield _result("open files", is_enough, f"{soft} (at most {hard})", remedy, WARNING)
    if shutil.which("timedatectl"):
        command = ["timedatectl", "show", "-P", "NTPSynchronized"]
        answer = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        found = {"yes": "synchronized", "no": "not synchronized"}.get(answer, "unknown")
        yield _result(
            "clock", answer != "no", found, "start a time service: requests are signed with the time", WARNING
        )


def _devices(config) -> Result:
    """Opens the devices as a run would, in a process that gives them back."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=PROBE_S, cwd=child_process.ROOT
        )
    except subprocess.TimeoutExpired:
        return Result("devices", FAILED, f"JAX found none in {PROBE_S:.0f} s", "end other processes that use them")
    if result.returncode:
        found = (result.stderr.strip() or "no answer").splitlines()[-1]
        return Result("devices", FAILED, found, "see docs/performance.md for versions that work")
    platform, kind, count = json.loads(result.stdout.splitlines()[-1])
    if platform != "cpu" and config.topology.mode == "local":
        found = f"{count} x {kind}, and topology.mode = 'local' starts a second process on them"
        return Result("devices", FAILED, found, "set topology.mode = 'colocated'")
    return Result("devices", OK, f"{count} x {kind}")


def _ports(topology) -> Iterator[Result]:
    wanted = [] if topology.orchestrator else [("topology.port", topology.host, topology.port)]
    if topology.mode == "remote":
        wanted.append(("topology.relay_port", topology.relay_host, topology.relay_port))
    if topology.metrics:
        host, _, port = topology.metrics.rpartition(":")
        wanted.append(("topology.metrics", host or "127.0.0.1", int(port) if port.isdecimal() else -1))
    for name, host, port in wanted:
        yield _attempt(name, lambda host=host, port=port: _listen(host, port))


def _listen(host: str, port: int) -> str:
    with sockets.listen(host, port) as sock:
        return f"{sockets.address(sock)} is free" if port else f"{host} has free ports"


def _workdir(workdir: str, exp: experiment.Experiment | None) -> Iterator[Result]:
    if storage.is_url(workdir):
        yield _attempt("workdir", lambda: _bucket(workdir, is_written=True))
        return
    path = pathlib.Path(workdir).expanduser().absolute()
    parent = next(one for one in (path, *path.parents) if one.is_dir())
    found = next(one for one in (path, *path.parents) if one.exists())

    def probe() -> str:
        if found != parent:
            raise ValueError(f"{found} is not a directory; give another --workdir")
        file = parent / f".doctor-{secrets.token_hex(4)}"
        file.write_bytes(b"x")
        file.rename(file.with_suffix(".renamed")).unlink()
        return f"{path} can be written"

    yield _attempt("workdir", probe)
    if exp is None:
        return
    # A checkpoint has the parameters and two moments in float32; those kept, the one being written, and the published versions.
    held = 4 * flops.ModelFlops.of(exp.model).held
    needed = held * (3 * (exp.config.checkpoint.keep + 2) + exp.num_kept_versions)
    free = shutil.disk_usage(parent).free
    found = f"{free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} needed"
    yield _result("disk", free > needed, found, "free space, give another --workdir, or lower checkpoint.keep")


def _sandbox(mode: str) -> Result:
    missing = sandbox.missing()
    if not missing:
        return Result("sandbox", OK, "Landlock and seccomp")
    found = f"without {', '.join(missing)} (trust.sandbox = {mode!r})"
    remedy = "use Linux 5.13 or newer on x86_64 or aarch64, or trust only your own workers"
    return _result("sandbox", mode == "off", found, remedy, FAILED if mode == "require" else WARNING)


def _hub(name: str) -> str:
    import huggingface_hub

    try:
        huggingface_hub.HfApi().model_info(name.partition("@")[0], timeout=TIMEOUT_S)
        return f"{name} can be downloaded"
    except Exception as error:  # versions of the hub's package raise those of other HTTP libraries
        if not isinstance(cached := huggingface_hub.try_to_load_from_cache(name.partition("@")[0], "config.json"), str):
            line = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"{name} cannot be downloaded ({line}); check the name, the network, and HF_TOKEN"
            ) from error
        return f"{name} is in the cache, {pathlib.Path(cached).parent}"


def _bucket(url: str, *, is_written: bool = False) -> str:
    found = storage.Storage(url)
    try:
        if is_written:
            key = f".doctor-{secrets.token_hex(4)}"
            found.write(key, b"x", patience_s=TIMEOUT_S)
            found.delete([key])
        else:
            found.keys(TIMEOUT_S)
        return f"{url} can be {'written' if is_written else 'read'}"
    finally:
        found.close()


def _node(url: str) -> Iterator[Result]:
    """Asks a process elsewhere for its health, and compares its clock."""
    if url.startswith("unix:"):
        return
    try:
        reply = asyncio.run(bounded_reply.get(f"{url}/health", MAX_BYTES, TIMEOUT_S))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield Result(url, FAILED, f"does not answer: {error}", "start it, or open its port in the firewall")
        return
    yield _result(url, reply.status_code < 500, f"answers with status {reply.status_code}", "read its log")
    with contextlib.suppress(ValueError, OverflowError):  # no date, or a malformed one
        skew_s = email.utils.parsedate_to_datetime(reply.headers.get("date", "")).timestamp() - time.time()
        remedy = "start a time service on both"
        yield _result(f"clock of {url}", abs(skew_s) <= MAX_SKEW_S, f"{skew_s:+.0f} s", remedy)


def _result(name: str, is_good: bool, found: str, remedy: str, otherwise: str = FAILED) -> Result:
    return Result(name, OK, found) if is_good else Result(name, otherwise, found, remedy)


def _attempt(name: str, action: Callable[[], str]) -> Result:
    try:
        return Result(name, OK, action())
    except (ValueError, OSError, journal.Unavailable) as error:
        return _failed(name, error)


def _failed(name: str, error: BaseException) -> Result:
    found, _, remedy = " ".join(str(error).split()).rpartition("; ")
    return Result(name, FAILED, found or remedy, remedy if found else "")


def main() -> None:
    """Runs the command; exits with code 1 if a check failed."""
    results = []
    for one in check(flags.FLAGS.config, flags.FLAGS.workdir or "", command_line.given()):
        results.append(one)
        lines = [f"{one.status:8}{one.check:20}{one.found}", *[f"{'':28}{one.remedy}"] * bool(one.remedy)]
        print("\n".join(re.sub(r"[^ -~]", "?", line) for line in lines), flush=True)  # a check may take a minute
    if failed := sum(one.status == FAILED for one in results):
        found = f"{failed} of {len(results)} checks failed; a run with this config would not work here"
        print(f"error: {found}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    command.run(main)
