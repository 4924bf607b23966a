"""The hosts of one learner: how they find each other, what the first tells the others, and how all end when one does.

1. `joined` asks where this process stands (sharding/multihost/cluster.py). If it is alone it gets `ALONE`, with which nothing below happens.
2. The first host listens one port above JAX's coordinator. The others connect, and prove with the key in the working directory that
   they belong to the run and see the same disk. Only when all are there does `jax.distributed` start: it kills a process in which a
   peer is missing, with a stack trace.
3. The first decides and tells: `agree` for small values, `deal` and `receive` for arrays. Whoever waits for it waits at a socket, not
   in a collective, so that it can be told of an end, too.
4. What goes wrong on a host is told to the first, which waits a moment for other accounts of it, picks the cause and tells all. Each
   prints that one line and ends at once, even if its main thread hangs in a collective whose other half is gone. A host that is
   killed is noticed by its closed connection, a machine that is lost by TCP's keepalive, a signal although the main thread is
   busy elsewhere.

Left out: going on without a host that was lost. The same command on all hosts resumes from the last checkpoint.
"""

import concurrent.futures
import contextlib
import dataclasses
import hmac
import json
import os
import pathlib
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from sharding.multihost import cluster

# Of several accounts of one end, the smallest is the cause.
MISTAKE, INTERRUPTED, DIED, BUG, CONSEQUENCE = range(5)
SETTLE_S = 1.0  # for others' accounts: a collective breaks on one host before the cause is told by another
KEY_S = 20.0  # a network disk may show a new file late
MAX_HEADER_BYTES = 1 << 26
MAX_HELLO_BYTES = 1 << 16  # of somebody who has proved nothing yet
LOST_S = 60  # without an answer from the other machine's TCP; less would end a host that reads nothing while it copies
_HEAD = struct.Struct(">IQ")  # sizes of a message's JSON and of the bytes behind it

Explain = Callable[[BaseException], tuple[str, int, int]]  # an error's message, exit code and rank


@dataclasses.dataclass(frozen=True, order=True)
class Cause:
    """Why a host ends."""

    rank: int
    host: int
    message: str
    code: int


class Consequence(OSError):
    """Of what went wrong on another host, whose account of it is the cause."""


class Hosts:
    """This process, number `index` of `count`, and its connections to the others."""

    def __init__(self, index: int = 0, count: int = 1, explain: Explain | None = None):
        self.index, self.count, self._explain = index, count, explain
        self.processes = {index: index}  # on the first host: each host's number among JAX's processes
        self.at_end: list[Callable[[], None]] = []  # before the process ends for another host's error
        self._names = {index: socket.gethostname()}
        self._links: dict[int, _Link] = {}
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # of a later host: what the first sent
        self._changed = threading.Condition()
        self._causes: list[Cause] = []
        self._done: set[int] = set()
        self._is_over = False
        self._ending = threading.Lock()
        self._traceback = ""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def agree(self, value: Any = None) -> Any:
        """The first host's `value`, any JSON, on every host; all must call."""
        value = json.loads(json.dumps(value))
        for link in self._links.values() if self.is_first else ():
            link.send({"kind": "value", "value": value})
        return value if self.is_first else self._next("value")[0]["value"]

    def deal(self, part: Callable[[int], tuple[dict, Sequence]]) -> None:
        """On the first host: sends each other host its own `part(host)`, a header and contiguous buffers."""

        def send(item):
            header, buffers = part(item[0])
            item[1].send({"kind": "part"} | header, buffers)

        with concurrent.futures.ThreadPoolExecutor(max(1, len(self._links)), "deal") as pool:
            list(pool.map(send, self._links.items()))

    def receive(self) -> tuple[dict, bytearray]:
        """On another host: the header of its part, and the bytes of its buffers, one behind the other."""
        return self._next("part")

    def tell(self, kind, error: BaseException | None, trace) -> None:
        """For `ExitStack.push`: tells of an error that leaves the stack before its slower exits are done."""
        if error is not None and self.count > 1:
            message, code, rank = self._explain(error)
            if isinstance(error, Consequence):
                rank = CONSEQUENCE
            elif rank >= BUG:
                self._traceback = "".join(traceback.format_exception(error))
            self._account(Cause(rank, self.index, message, code))

    def fail(self, error: BaseException) -> None:
        """Ends all hosts, for this or for what another host knows to be behind it. Does not return."""
        self.tell(type(error), error, None)
        time.sleep(30)  # the threads that speak with the others end the process
        message, code, _ = self._explain(error)
        self._end({"host": self.index, "line": self._line(self.index, message), "code": code})

    # Beginning and end.

    def meet(self, address: tuple[str, int], workdir: pathlib.Path, timeout_s: float) -> None:
        """Returns once every host is connected; ValueError says who is missing, or what they disagree on."""
        if self.is_first:
            self._await_others(address, workdir, timeout_s)
        else:
            self._reach_first(address, workdir, timeout_s)

    def number(self) -> None:
        """Tells the first host by what number JAX knows this one: on TPUs the runtime counts for itself."""
        if jax.process_count() != self.count:
            raise ValueError(
                f"JAX sees {jax.process_count()} processes, the hosts are {self.count}: this {jax.default_backend()} is not theirs "
                f"together; look at JAX_PLATFORMS"
            )
        if self.is_first:
            with self._changed:
                self.processes[0] = jax.process_index()
                self._changed.wait_for(lambda: len(self.processes) == self.count)
        else:
            self._links[0].send({"kind": "process", "process": jax.process_index()})
        self.agree()

    def part(self) -> None:
        """Returns once every host has come here."""
        if self.is_first:
            with self._changed:
                self._changed.wait_for(lambda: len(self._done) == self.count - 1)
                self._is_over = True
            for link in self._links.values():
                link.send({"kind": "bye"})
        else:
            self._links[0].send({"kind": "done"})
            self._next("bye")

    def watch_signals(self) -> None:
        """From now on SIGTERM and Ctrl-C end all hosts, whatever the main thread is waiting for."""
        reader, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        # A handler, or Python does not note the signal and the thread hears nothing.
        signal.signal(signal.SIGTERM, lambda *_: None)

        def watch():
            while True:
                number = reader.recv(1)[0]
                if number in (signal.SIGINT, signal.SIGTERM):
                    self._account(Cause(INTERRUPTED, self.index, INTERRUPTION, 128 + number))

        threading.Thread(target=watch, name="signals", daemon=True).start()

    # Inside.

    def _await_others(self, address, workdir, timeout_s):
        key, expected = _key(workdir, timeout_s=None), {"count": self.count, "jax": jax.__version__}
        deadline_s = time.monotonic() + timeout_s
        _listen(address[1]).close()  # JAX kills the process if its own port is taken
        with _listen(_beside(address[1])) as listener:
            while missing := sorted(set(range(self.count)) - {0} - self._links.keys()):
                listener.settimeout(max(0.01, deadline_s - time.monotonic()))
                try:
                    link = _Link(listener.accept()[0])
                    nonce = secrets.token_hex(16)
                    link.send({"nonce": nonce})
                    hello = link.receive(timeout_s=KEY_S + 10)[0]
                except TimeoutError:
                    if time.monotonic() > deadline_s:
                        raise ValueError(
                            f"host(s) {', '.join(map(str, missing))} of {self.count} did not come within {timeout_s:.0f} s; start "
                            f"the same command on every host, or correct topology.num_processes"
                        ) from None
                    continue
                except (OSError, EOFError, ValueError):  # somebody who is no host
                    continue
                if isinstance(hello, dict):
                    self._admit(link, hello, hmac.digest(key, nonce.encode(), "sha256").hex(), workdir, expected)
        for link in self._links.values():
            link.send({"kind": "value", "value": self._names[0]})
        for host, link in self._links.items():
            threading.Thread(target=self._listen_to, args=(host, link), name=f"host {host}", daemon=True).start()

    def _admit(self, link, hello, proof, workdir, expected):
        index, name = hello.get("index"), str(hello.get("name"))[:80]
        who = f"host {index} ({name})"
        if isinstance(index, int):
            self._links.setdefault(index, link)  # to be told what is wrong
        if not hmac.compare_digest(str(hello.get("proof")).encode(), proof.encode()):
            raise ValueError(
                f"{who} does not see the key of this run in {workdir}: give a --workdir on a disk that all hosts share"
            )
        for field, words in (("count", "topology.num_processes"), ("jax", "jax")):
            if hello.get(field) != expected[field]:
                raise ValueError(
                    f"{who} has {words} = {hello.get(field)}, host 0 has {expected[field]}; make them the same everywhere"
                )
        if not isinstance(index, int) or not 0 < index < self.count or self._links[index] is not link:
            words = f"{who} was started twice; give each host a topology.process_id of its own"
            link.send({"kind": "end", "host": 0, "line": self._line(0, words), "code": 1})
            raise ValueError(words)
        self._names[index] = name

    def _reach_first(self, address, workdir, timeout_s):
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                link = _Link(socket.create_connection((address[0], _beside(address[1])), timeout=5))
                nonce = str(link.receive(timeout_s=5)[0]["nonce"])
                break
            except (
                OSError,
                EOFError,
                ValueError,
                LookupError,
                TypeError,
            ) as error:  # nobody yet, or something else's port
                if time.monotonic() > deadline_s:
                    raise ValueError(
                        f"host 0 did not answer at {address[0]}:{_beside(address[1])} within {timeout_s:.0f} s ({error}); start the same "
                        f"command there, or correct topology.coordinator"
                    ) from None
                time.sleep(0.2)
        self._links[0] = link
        key = _key(workdir, timeout_s=KEY_S)
        proof = hmac.digest(key, nonce.encode(), "sha256").hex()
        hello = {"index": self.index, "count": self.count, "jax": jax.__version__, "proof": proof}
        link.send(hello | {"name": self._names[self.index]})
        threading.Thread(target=self._listen_to, args=(0, link), name="host 0", daemon=True).start()
        self._names[0] = self._next("value")[0]["value"]

    def _listen_to(self, host, link):
        try:
            while True:
                header, body = link.receive()
                kind = header["kind"]
                if kind == "end":
                    self._end(header)
                elif kind == "cause":
                    self._account(Cause(header["rank"], host, header["message"], header["code"]))
                elif kind in ("done", "process"):
                    with self._changed:
                        self._done |= {host} if kind == "done" else set()
                        self.processes |= {host: header["process"]} if kind == "process" else {}
                        self._changed.notify_all()
                else:
                    self._is_over |= kind == "bye"
                    self._inbox.put((header, body))
        except (OSError, EOFError):
            if not self._is_over and host not in self._done:
                words = (
                    "ended without a word (killed, or out of memory?); its output and its machine's log may say more"
                )
                if self.is_first:
                    self._account(Cause(DIED, host, words, 1))
                else:
                    self._end({"host": host, "line": self._line(host, words), "code": 1})

    def _next(self, kind):
        header, body = self._inbox.get()
        assert header["kind"] == kind, f"host 0 sent {header['kind']}, host {self.index} waits for {kind}"
        return header, body

    def _account(self, cause: Cause) -> None:
        """Brings an account to the first host, or takes it in there."""
        if not self.is_first and 0 in self._links:
            with contextlib.suppress(OSError):  # then the first is gone, which the other thread tells
                self._links[0].send({"kind": "cause"} | dataclasses.asdict(cause))
            return
        with self._changed:
            self._causes.append(cause)
            if len(self._causes) == 1:
                threading.Thread(target=self._settle, name="settle", daemon=True).start()

    def _settle(self):
        time.sleep(SETTLE_S)
        cause = min(self._causes)
        end = {"host": cause.host, "line": self._line(cause.host, cause.message), "code": cause.code}

        def tell(link):
            with contextlib.suppress(OSError):
                link.send({"kind": "end"} | end)

        tellers = [threading.Thread(target=tell, args=[link], daemon=True) for link in self._links.values()]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join(2.0)
        self._end(end)

    def _line(self, host: int, message: str) -> str:
        return f"error: host {host} of {self.count} ({self._names.get(host, 'unknown')}): {message}"

    def _end(self, end: dict) -> None:
        """The last line of this process; whoever comes second waits for the end here."""
        self._ending.acquire()
        for clean_up in self.at_end:
            clean_up()
        if end["host"] == self.index and self._traceback:
            print(self._traceback, file=sys.stderr, end="")
        print(end["line"], file=sys.stderr, flush=True)
        os._exit(
            end["code"]
        )  # threads in a collective cannot be joined, and JAX's own farewell would wait for the others


ALONE = Hosts()
INTERRUPTION = "interrupted; the same command resumes from the last checkpoint"


@contextlib.contextmanager
def joined(
    *, coordinator: str, num_processes: int, process_id: int, timeout_s: float, workdir: pathlib.Path, explain: Explain
) -> Iterator[Hosts]:
    """The hosts of this run, connected and in one `jax.distributed`; call it before JAX looks for devices.

    With several, an error in the block ends every host (see above), and leaving it waits for all of them.

    Args:
      coordinator: host:port of the first host, "auto" (JAX must find it), or "" (JAX may find it).
      num_processes, process_id: 0 and -1 for what the environment says.
      timeout_s: how long hosts wait for each other.
      workdir: a directory that all share; made if need be.
      explain: (message, exit code, rank) of an error.
    """
    found = cluster.standing(coordinator, num_processes, process_id, timeout_s)
    if found is None:
        yield ALONE
        return
    address, index, count, device_ids = found
    hosts = Hosts(index, count, explain)
    try:
        hosts.watch_signals()
        host, _, port = address.rpartition(":")
        hosts.meet((host.strip("[]"), int(port)), workdir, timeout_s)
        jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and does nothing with it here
        jax.distributed.initialize(address, count, index, device_ids, initialization_timeout=int(timeout_s))
        hosts.number()
        yield hosts
        hosts.part()
    except BaseException as error:  # the others must hear of whatever it is
        hosts.fail(error)


def _key(workdir: pathlib.Path, *, timeout_s: float | None) -> bytes:
    """The key of this run's hosts: made by the first, which passes None; read by the others, and empty if it does not appear."""
    file = workdir / ".hosts"
    if timeout_s is None:
        if workdir.exists() and not workdir.is_dir():
            raise ValueError(f"workdir {workdir} is a file; give a directory")
        workdir.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            temporary = workdir / ".hosts.tmp"
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                stream.write(secrets.token_bytes(32))
            temporary.rename(file)
        return file.read_bytes()
    deadline_s = time.monotonic() + timeout_s
    while not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return file.read_bytes() if file.exists() else b""


def _beside(port: int) -> int:
    """Where the first host listens when JAX's coordinator has `port`; Slurm's may be the last there is."""
    return port + 1 if port < 65535 else port - 1


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ValueError(
            f"port {port} of the first host cannot be used ({error}); topology.coordinator needs its own port and the next one free"
        ) from None


class _Link:
    """Messages over a connection: JSON, and bytes behind it. `send` may be called by several threads, and raises `Consequence`."""

    def __init__(self, sock: socket.socket):
        self._sock, self._lock = sock, threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {"TCP_KEEPIDLE": LOST_S // 4, "TCP_KEEPINTVL": LOST_S // 4, "TCP_KEEPCNT": 3}
        for name, value in (options | {"TCP_USER_TIMEOUT": 1000 * LOST_S}).items():
            if hasattr(socket, name):  # on Linux all
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, header: dict, buffers: Sequence = ()) -> None:
        text = json.dumps(header).encode()
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        try:
            with self._lock:
                self._sock.sendall(_HEAD.pack(len(text), sum(view.nbytes for view in views)) + text)
                for view in views:
                    self._sock.sendall(view)
        except OSError as error:
            raise Consequence(f"another host could not be told: {error}") from error

    def receive(self, timeout_s: float | None = None) -> tuple[dict, bytearray]:
        """The next message; with a timeout only one without bytes. EOFError at the end of the connection."""
        self._sock.settimeout(timeout_s)
        text_bytes, body_bytes = _HEAD.unpack(self._read(_HEAD.size))
        most = MAX_HEADER_BYTES if timeout_s is None else MAX_HELLO_BYTES
        if text_bytes > most or (timeout_s is not None and body_bytes):
            raise OSError(f"a message of {text_bytes} + {body_bytes} bytes is none of ours")
        return json.loads(self._read(text_bytes)), self._read(body_bytes)

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            received = self._sock.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return data
