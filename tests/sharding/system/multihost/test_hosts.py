"""Several hosts as one learner: they connect, host 0 decides, and when one fails, all end with the same line.

The fast tests fork processes of a program that has imported `sharding.system.multihost.hosts` once; no JAX backend is started in them.
"""

import io
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from rl.learning.batch import host_feed, packing
from sharding.mesh import mesh as mesh_lib
from sharding.system.multihost import cluster, failure, hosts, rendezvous, transport
from tests.support import proxy

ROOT = pathlib.Path(__file__).resolve().parents[4]

# argv: folder. Runs all cases side by side and prints {case: [[exit code, stdout, stderr, seconds] per host]}.
PROGRAM = """
import ctypes, json, os, pathlib, signal, socket, sys, time
import numpy as np
from sharding.system.multihost import failure, hosts as hosts_lib, rendezvous, transport

def explain(error):
    if isinstance(error, failure.Terminated):
        return str(error), 143, failure.INTERRUPTED
    if isinstance(error, KeyboardInterrupt):
        return failure.INTERRUPTION, 130, failure.INTERRUPTED
    ranks = {ValueError: failure.MISTAKE, transport.RemoteHostError: failure.MISTAKE, OSError: failure.REMOTE}
    rank = ranks.get(type(error), failure.BUG)
    return str(error), 1, rank

def join(index, count, timeout_s=20.0, workdir="shared", jax_version=None):
    if jax_version:
        hosts_lib.jax.__version__ = jax_version
    hosts_lib.jax.distributed.initialize = lambda *args, **kwargs: None
    hosts_lib.jax.process_count, hosts_lib.jax.process_index = lambda: count, lambda: count - 1 - index
    return hosts_lib.joined(coordinator=f"127.0.0.1:{port}", num_processes=count, process_id=index, timeout_s=timeout_s,
        workdir=pathlib.Path(workdir), explain=explain)

def hang():  # as in a collective: no bytecode runs here until it is over
    ctypes.CDLL(None).sleep(60)

def messages(index):
    with join(index, 3) as hosts:
        values = [hosts.broadcast({"step": 7, "of": [hosts.index]}), hosts.broadcast(None)]
        assert not hosts.is_first or hosts.processes == {0: 2, 1: 1, 2: 0}
        arrays = lambda host: [np.full((3, 2), host, np.int32), np.zeros((0, 4)), np.arange(host, dtype=np.float32)]
        if hosts.is_first:
            hosts.scatter(lambda host: ({"for": host}, arrays(host)))
        else:
            header, data = hosts.receive()
            assert bytes(data) == b"".join(array.tobytes() for array in arrays(index)) and header["for"] == index
        for turn in range(2):
            if hosts.is_first:
                assert hosts.answers() == {1: [1, turn], 2: [2, turn]}
            else:
                hosts.answer([index, turn])
        time.sleep(0.3 * (index == 0))  # the others wait for host 0
        print(json.dumps([hosts.index, hosts.is_first, values]))

def mistake(index):
    with join(index, 2):
        hang() if index == 0 else None
        raise ValueError("rl.loss = 'x' is unknown")

def cause_comes_first(index):
    with join(index, 2):
        if index == 0:
            raise OSError("hosts [1] could not publish")
        time.sleep(0.3)
        raise ValueError("the disk is full")

def bug(index):
    with join(index, 2):
        hang() if index == 0 else None
        {}["the missing key"]

def killed(index):
    with join(index, 2) as hosts:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        raise RuntimeError("Gloo: connection closed by peer")  # as a collective would report it

def killed_during_broadcast(index):
    with join(index, 2) as hosts:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            hosts.broadcast(0)

def first_killed(index):
    with join(index, 2) as hosts:
        os.kill(os.getpid(), signal.SIGKILL) if index == 0 else hosts.receive()

def terminated(index):
    with join(index, 2) as hosts:
        if index == 1:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.fork() == 0:
                time.sleep(0.3)
                os.kill(os.getppid(), signal.SIGTERM)
                os._exit(0)
            hang()
        hosts.receive() if index else hang()

def noticed(index):
    with join(index, 2) as hosts, hosts.terminable():
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while not hosts.broadcast(hosts.is_terminating):
            time.sleep(0.05)
        if index == 0:  # its own signal comes after the notice of the other
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        raise failure.Terminated("step 7")

def counts(index):
    with join(index, (2, 3)[index]):
        hang()

def versions(index):
    with join(index, 2, jax_version=("0.11.0", "0.12.0")[index]):
        hang()

def disks(index):
    rendezvous.KEY_S = 0.5
    with join(index, 2, workdir=("here", "elsewhere")[index]):
        hang()

def missing(index):
    if index != 1:
        with join(index, 3, timeout_s=1.5):
            hang()

def twice(index):
    with join(min(index, 1), 3):
        hang()

def no_first(index):
    if index == 1:
        with join(index, 2, timeout_s=0.7):
            hang()

os.chdir(sys.argv[1])
cases = dict(messages=3, mistake=2, cause_comes_first=2, bug=2, killed=2, killed_during_broadcast=2, first_killed=2, terminated=2, noticed=2,
             counts=2, versions=2, disks=2, missing=3, twice=3, no_first=2)
running, ports = {}, []
for name in cases:
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        if port not in ports and port + 1 not in ports:
            break
    ports += [port, port + 1]
    os.mkdir(name)
    for index in range(cases[name]):
        pid = os.fork()
        if pid == 0:
            os.chdir(name)
            for fd, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{index}.{kind}", os.O_WRONLY | os.O_CREAT), fd)
            try:
                globals()[name](index)
            except BaseException as error:
                print(f"escaped: {error!r}", file=sys.stderr)
            sys.stdout.flush()
            os._exit(0)
        running[pid] = name, index
begun, found = time.monotonic(), {name: [None] * number for name, number in cases.items()}
while running:
    pid, status = os.wait()
    if pid in running:
        name, index = running.pop(pid)
        texts = [pathlib.Path(name, f"{index}.{kind}").read_text() for kind in ("out", "err")]
        found[name][index] = [os.waitstatus_to_exitcode(status), *texts, time.monotonic() - begun]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    arguments = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path_factory.mktemp("hosts"))]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_host_0_broadcasts_and_scatters(cases):
    for index, (code, out, err, _) in enumerate(cases["messages"]):
        assert (code, err) == (0, "")
        assert json.loads(out) == [index, index == 0, [{"step": 7, "of": [0]}, None]]


@pytest.mark.parametrize(
    ("case", "host", "message", "code"),
    [
        ("mistake", 1, "rl.loss = 'x' is unknown", 1),
        ("cause_comes_first", 1, "the disk is full", 1),
        ("bug", 1, "'the missing key'", 1),
        ("killed", 1, "ended without an error report", 1),
        ("killed_during_broadcast", 1, "ended without an error report", 1),
        ("first_killed", 0, "ended without an error report", 1),
        (
            "terminated",
            1,
            "interrupted; the same command resumes from the last checkpoint, if there is one",
            128 + signal.SIGTERM,
        ),
        ("noticed", 0, "terminated, with a checkpoint of step 7; the same command resumes", 128 + signal.SIGTERM),
        ("counts", 0, "has num_processes = 3, host 0 has 2; make them the same on all hosts", 1),
        ("versions", 0, "has jax = 0.12.0, host 0 has 0.11.0; make them the same on all hosts", 1),
        (
            "disks",
            0,
            "does not see the key of this run in here; give a --workdir that all hosts share, or for one in a bucket, INTELLAX_BUCKET_CACHE",
            1,
        ),
        (
            "missing",
            0,
            "host(s) 1 did not connect within 2 s; start the same command on every host, or correct num_processes = 3",
            1,
        ),
        ("twice", 0, "was started twice; give each host a different process_id", 1),
        ("no_first", 1, "host 0 did not answer at 127.0.0.1:", 1),
    ],
)
def test_one_line_names_host_and_cause_and_all_end(cases, case, host, message, code):
    for index, (found, _, err, seconds) in enumerate(cases[case]):
        if found == -signal.SIGKILL or (case, index) in (("missing", 1), ("no_first", 0)):
            continue  # the killed host, and hosts that were not started
        lines = err.splitlines()
        assert found == code and seconds < 50, (index, found, err, seconds)
        assert lines[-1].startswith("error: ") and message in lines[-1] and f"host {host}" in lines[-1], (index, err)
        assert sum(line.startswith("error: ") for line in lines) == 1 and "escaped" not in err
        assert ("Traceback" in err) == (case == "bug" and index == host), err  # a bug keeps it, on its own host


@pytest.mark.parametrize(("number", "word"), [(signal.SIGTERM, "terminated, "), (signal.SIGINT, "interrupted, ")])
def test_a_process_alone_notices_one_signal_per_run(number, word, monkeypatch):
    notes, wanted = [], 1 if number == signal.SIGINT else 0
    monkeypatch.setattr(hosts.cli, "note", notes.append)
    alone, before = hosts.Hosts(), signal.getsignal(number)
    for _ in range(2):
        with pytest.raises(failure.Terminated) as caught, alone.terminable():
            signal.raise_signal(number)
            proxy.wait_until(lambda: alone.is_terminating and len(notes) == wanted, 60, "the thread that takes it")
            assert all("Ctrl-C again" in note for note in notes)
            notes.clear()
            raise failure.Terminated("step 7")
        assert not alone.is_terminating and signal.getsignal(number) == before
        assert caught.value.number == number and str(caught.value).startswith(word)


@pytest.mark.parametrize("terminal", ["reads", "stopped", "gone"])
def test_a_second_ctrl_c_ends_a_process_alone_in_the_middle_of_a_computation(terminal):
    """A train step of minutes held both: its user saw nothing, and then a process that ended without a line.

    A line that a terminal does not take (Ctrl-S, or `2>&1 | head`) delays no signal.
    """
    program = """
import hashlib, os, sys
from sharding.system.multihost import hosts

with hosts.ALONE.terminable():
    os.set_blocking(2, sys.argv[1] != "stopped")
    try:
        while sys.argv[1] == "stopped":
            os.write(2, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(2, True)
    print("computes", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # no code of Python runs for minutes
"""
    command, pipes = [sys.executable, "-c", program, terminal], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "computes\n"
            if terminal == "gone":
                process.stderr.close()
            process.send_signal(signal.SIGINT)
            if terminal == "reads":
                assert "Ctrl-C again" in process.stderr.readline()
            else:
                time.sleep(1.0)  # two that are pending are one
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert terminal != "reads" or process.stderr.read() == f"error: {failure.INTERRUPTION}\n"
        finally:
            process.kill()


def test_a_notice_saves_where_its_line_cannot_be_printed(monkeypatch):
    """Ctrl-C while a line is being printed, as to a terminal that Ctrl-S has stopped, and after `2>&1 | head` has ended."""
    alone = hosts.Hosts()

    class Terminal(io.RawIOBase):
        def writable(self):
            return True

        is_signaled = False

        def write(self, data):
            if not self.is_signaled:
                self.is_signaled = True
                signal.raise_signal(signal.SIGINT)
            return len(data)

    class Gone(io.TextIOBase):
        def write(self, text):
            raise BrokenPipeError

    for stderr in (io.TextIOWrapper(io.BufferedWriter(Terminal())), Gone()):
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(failure.Terminated), alone.terminable():
            if isinstance(stderr, Gone):
                signal.raise_signal(signal.SIGINT)
            else:
                print("step 7", file=stderr, flush=True)
            proxy.wait_until(lambda: alone.is_terminating, 60, "the thread that takes it")
            raise failure.Terminated("step 7")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1", 2, 2), "process_id = 2 must be 0 to 1, as num_processes = 2"),
        (("localhost", 2, 0), "coordinator = 'localhost' must be HOST:PORT"),
        (
            ("localhost:1", 0, -1),
            "num_processes = unset and process_id = unset do not give this process a place",
        ),
        (("auto", 0, -1), "JAX finds no cluster; set all three"),
        (("", 2, 0), "need coordinator"),
    ],
)
def test_contradicting_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        cluster.detect(*arguments, timeout_s=1.0)


def test_settings_and_variables_give_a_place(monkeypatch):
    assert cluster.detect("", 0, -1, 1.0) is None
    assert cluster.detect("localhost:1", 1, 0, 1.0) is None
    assert cluster.detect("localhost:1", 2, 1, 1.0)[:3] == ("localhost:1", 1, 2)
    for name, value in (("COORDINATOR_ADDRESS", "first:7"), ("NUM_PROCESSES", "4"), ("PROCESS_ID", "3")):
        monkeypatch.setenv(f"JAX_{name}", value)
    assert cluster.detect("", 0, -1, 1.0)[:3] == ("first:7", 3, 4)


def test_a_pod_and_a_slurm_step_are_found(monkeypatch):
    """Three workers of a TPU slice, the second of which is this process; four tasks of Slurm; a single machine, in both."""
    with monkeypatch.context() as patch:
        patch.setattr(cluster.cloud_tpu_init, "running_in_cloud_tpu_vm", True)
        patch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
        patch.delenv("JAX_PLATFORMS")
        variables = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost,b,c", "TPU_WORKER_ID": "1"}
        for name, value in (
            variables | {"MEGASCALE_COORDINATOR_ADDRESS": "localhost", "MEGASCALE_NUM_SLICES": "1"}
        ).items():
            patch.setenv(name, value)
        patch.setenv("MEGASCALE_SLICE_ID", "0")
        address, index, count, device_ids = cluster.detect("", 0, -1, 1.0)
        assert (address.split(":")[0], index, count, device_ids) == ("localhost", 1, 3, None)
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_WORKER_ID", "0")
        assert cluster.detect("", 0, -1, 1.0) is None
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost,b,c")
        assert cluster.detect("", 0, -1, 1.0) is None  # the CPU of a pod's host, for an export
    variables = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
    for name, value in (variables | {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}).items():
        monkeypatch.setenv(name, value)
    address, *rest = cluster.detect("", 0, -1, 1.0)
    assert address.startswith("node3:") and rest == [2, 4, [0]]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # a shell in an allocation
    assert cluster.detect("", 0, -1, 1.0) is None


def test_malformed_messages_are_refused(tmp_path):
    """Random bytes, and a header that claims a terabyte, raise an error that the rendezvous ignores."""
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 12, transport.HEAD.pack(2, 1 << 40) + b"{}"):
        one, other = proxy.socket.socketpair()
        with one, other:
            one.sendall(sent)
            one.shutdown(proxy.socket.SHUT_WR)
            connection = transport.Connection.__new__(transport.Connection)
            connection._sock = other
            with pytest.raises((OSError, EOFError, ValueError)):
                connection.receive(timeout_s=1.0)


@pytest.mark.parametrize("index", [0, 2, -1])
def test_an_index_that_no_other_host_has_is_refused(tmp_path, index):
    """Host 0 of two hosts admits host 1 only."""
    peers = transport.Peers(0, 2, names={0: "first"})
    one, other = socket.socketpair()
    with one, other:
        hello = {"index": index, "name": "x", "count": 2, "jax": jax.__version__, "proof": "right"}
        connection = transport.Connection.__new__(transport.Connection)
        connection._sock, connection._lock = one, threading.Lock()
        with pytest.raises(ValueError, match=rf"host {index} \(x\) was started twice"):
            rendezvous._admit(peers, tmp_path, connection, hello, "right")
    assert peers.names == {0: "first"}


def test_scattered_rows_are_the_rows_that_were_packed():
    """Cutting and assembling the rows of the only host gives the same global arrays, unused micro-batches included."""
    rng = np.random.default_rng(0)
    trees = []
    for length in rng.integers(3, 9, 10):
        ones = np.ones(length, np.float32)
        trees.append(packing.stream(rng.integers(0, 9, length).astype(np.int32), 0 * ones, -ones, 0.5 * ones, 0.7))
    layout = packing.Layout(16, 4, 5, shards=4, streams=("ce_weight",))
    batch = packing.pack(trees, layout)
    assert 0 < batch.num_micro_batches < 5
    for sizes in ({"fsdp": 4, "context": 2}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = mesh_lib.create(sizes)
        buffers = host_feed.cut(batch, layout, host_feed.regions(layout, mesh, 0))
        data = bytearray(b"".join(buffer.tobytes() for buffer in buffers))
        built = host_feed.assemble(int(batch.num_micro_batches), data, layout, mesh)
        for name, placed in vars(packing.place(batch, mesh)).items():
            found = getattr(built, name)
            assert (found is None) == (placed is None)
            if placed is not None:
                assert found.sharding == placed.sharding and found.dtype == placed.dtype
                np.testing.assert_array_equal(jax.device_get(found), jax.device_get(placed), err_msg=name)
        used = sum(field.nbytes for name, field in vars(batch).items() if field is not None and field.ndim)
        assert len(data) == used * int(batch.num_micro_batches) // 5  # each row once, and no empty row
