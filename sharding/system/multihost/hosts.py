"""Runs one learner on several hosts: they connect, host 0 decides and sends, and all end when one does.

1. `joined` finds the place of this process (sharding/system/multihost/cluster.py). A process alone gets `ALONE`, for which all
   that follows does nothing.
2. The hosts connect to host 0 (sharding/system/multihost/rendezvous.py). `jax.distributed` starts only when all are connected: it
   kills a process that misses a peer, with a stack trace.
3. Host 0 sends its decisions. A host that waits for them waits at a socket, not in a collective, so that it also receives the
   end of the run (sharding/system/multihost/failure.py). The same command on all hosts resumes from the last checkpoint.
"""

import concurrent.futures
import contextlib
import json
import pathlib
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from sharding.system import cli
from sharding.system.multihost import cluster, failure, rendezvous, transport

NOTICES = (signal.SIGTERM, signal.SIGINT)  # after which a process alone saves before it ends


class Hosts:
    """The hosts that run one learner, as this process, host `index` of `count`, reaches them."""

    def __init__(self, index: int = 0, count: int = 1, explain: failure.Explain = lambda e: (str(e), 1, failure.BUG)):
        self.index, self.count = index, count
        self._peers = transport.Peers(index, count, names={index: socket.gethostname()})
        self._connections = self._peers.connections
        self._shutdown = failure.Shutdown(self._peers, explain)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # messages from host 0
        self._changed = threading.Condition()
        # For `terminable`: we are in its block; this host got SIGTERM; some host did.
        self._is_terminable = self._is_signaled = self.is_terminating = False
        self._notice: int = signal.SIGTERM  # the signal that a process alone took first
        self._answers: dict[int, queue.SimpleQueue] = {host: queue.SimpleQueue() for host in range(1, count)}
        self._met: dict[str, dict[int, Any]] = {"process": {}, "leave": {}}  # kind of barrier -> host -> its value

    @property
    def is_first(self) -> bool:
        """True on host 0, which decides for all hosts."""
        return self.index == 0

    @property
    def address(self) -> str:
        """The IP address of this host on its connection to another host; 127.0.0.1 for a process alone."""
        return next((connection.own_address for connection in self._connections.values()), "127.0.0.1")

    @property
    def processes(self) -> dict[int, int]:
        """Each host's index among JAX's processes, {host: index}; complete on host 0 only."""
        return self._met["process"]

    def broadcast(self, value: Any = None) -> Any:
        """Returns the `value` (any JSON) that host 0 passed. All hosts must call it; the others block for host 0."""
        value = json.loads(json.dumps(value))
        for connection in self._connections.values() if self.is_first else ():
            connection.send({"kind": "value", "value": value})
        return value if self.is_first else self._next("value")[0]["value"]

    def scatter(self, part: Callable[[int], tuple[dict, Sequence]]) -> None:
        """Sends each other host its own `part(host)`, a JSON header and buffers. Only host 0 calls it; others call `receive`."""

        def send(item):
            header, buffers = part(item[0])
            item[1].send({"kind": "part"} | header, buffers)

        with concurrent.futures.ThreadPoolExecutor(max(1, len(self._connections)), "scatter") as pool:
            list(pool.map(send, self._connections.items()))

    def receive(self) -> tuple[dict, bytearray]:
        """Returns this host's part of a `scatter`: its header, and the bytes of its buffers. Blocks for host 0."""
        return self._next("part")

    def answer(self, value: Any) -> None:
        """Sends a value (any JSON) to host 0, which gets it from `answers`. Not for host 0."""
        self._connections[0].send({"kind": "answer", "value": value})

    def answers(self) -> dict[int, Any]:
        """Returns {host: the next value of its `answer`} of all other hosts, on host 0. Blocks for them."""
        return {host: self._answers[host].get() for host in self._connections}

    def report(self, kind, error: BaseException | None, trace) -> None:
        """Sends the error of a `with` block to all hosts. For `ExitStack.push`: before the slower exits of the stack run."""
        if error is not None and self.count > 1:
            self._shutdown.report(error)

    @contextlib.contextmanager
    def terminable(self) -> Iterator[None]:
        """A host's first SIGTERM in the block sets `is_terminating` on host 0, which saves and ends; its second one ends all hosts immediately.

        Ctrl-C does the same where one host runs alone.
        """
        self._is_terminable = True
        alone = self.count == 1 and threading.current_thread() is threading.main_thread()
        with self._noticing() if alone else contextlib.nullcontext():
            try:
                yield
            except failure.Terminated as error:
                error.number = self._notice
                self._is_signaled = self.is_terminating = False  # a further run of this process begins without a notice
                raise
            finally:
                self._is_terminable = False

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Has a thread take the signals of a process alone during the block: a train step may block the main thread for minutes."""
        with failure.signals_in_thread(self._terminate_alone):
            before = {number: signal.signal(number, lambda *_: None) for number in NOTICES}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _terminate_alone(self, number: int) -> None:
        if number not in NOTICES:
            return
        self._notice = number  # the first, since the second ends the process
        if not self._take_notice():
            line = f"error: {failure.INTERRUPTION}"
            self._shutdown.exit({"host": self.index, "line": line, "code": 128 + number})
        if number == signal.SIGINT:  # a terminal that takes no line must not delay the next signal
            threading.Thread(target=_note_end, name="note-end", daemon=True).start()

    def _take_notice(self) -> bool:
        """Handles SIGTERM in a `terminable` block; returns False if it is this host's second, or outside of such a block.

        A cluster signals all hosts, and the notice of another may come first.
        """
        if not self._is_terminable or self._is_signaled:
            return False
        self._is_signaled = self.is_terminating = True
        if not self.is_first:
            with contextlib.suppress(OSError):  # host 0 is gone, which the thread that listens to it reports
                self._connections[0].send({"kind": "notice"})
        return True

    def before_exit(self, clean_up: Callable[[], None]) -> None:
        """Registers `clean_up`, which is called before an error, of this host or of another, ends the process."""
        self._shutdown.cleanups.append(clean_up)

    def _register_process(self) -> None:
        """Collects the hosts' indices among JAX's processes: on TPUs the runtime numbers them itself."""
        if jax.process_count() != self.count:
            found = f"JAX sees {jax.process_count()} processes, but num_processes = {self.count}"
            raise ValueError(f"{found}: backend {jax.default_backend()} does not span the hosts; check JAX_PLATFORMS")
        self._meet("process", jax.process_index())

    def _meet(self, kind: str, value: Any = None) -> None:
        """Blocks until every host has called it (a barrier). Host 0 then has each host's `value` in `self._met[kind]`."""
        if not self.is_first:
            self._connections[0].send({"kind": kind, "value": value})
        with self._changed:
            self._met[kind][self.index] = value
            self._changed.wait_for(lambda: self._met[kind].keys() > self._connections.keys())
        for connection in self._connections.values() if self.is_first else ():
            connection.send({"kind": kind, "value": value})

    def _listen(self, host: int, connection: transport.Connection) -> None:
        """Handles the messages of one host, in a thread of its own."""
        try:
            while True:
                header, body = connection.receive()
                kind = header["kind"]
                if kind == "end":
                    self._shutdown.exit(header)
                elif kind == "notice":
                    self.is_terminating = True
                elif kind == "cause":
                    self._shutdown.submit(failure.ErrorReport(*header["report"]))
                elif kind == "answer":
                    self._answers[host].put(header["value"])
                elif kind in self._met:
                    with self._changed:
                        self._met[kind][host] = header["value"]
                        self._changed.notify_all()
                else:
                    self._inbox.put((header, body))
        except (OSError, EOFError):
            if host not in self._met["leave"]:
                self._shutdown.lost(host)

    def _next(self, kind: str) -> tuple[dict, bytearray]:
        header, body = self._inbox.get()
        assert header["kind"] == kind, f"host 0 sent {header['kind']}, host {self.index} waits for {kind}"
        return header, body


def _note_end() -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        cli.note("the run saves a checkpoint after this step and ends; Ctrl-C again ends it immediately")


ALONE = Hosts()


@contextlib.contextmanager
def joined(
    *,
    coordinator: str,
    num_processes: int,
    process_id: int,
    timeout_s: float,
    workdir: pathlib.Path,
    explain: failure.Explain,
) -> Iterator[Hosts]:
    """Yields the hosts of this run, connected and in one `jax.distributed`. Enter it before JAX looks for devices.

    With several hosts, an error in the block ends every host, and leaving the block waits for all of them. The first four
    arguments are those of `cluster.detect`. `workdir` is a directory that all hosts share, made if it does not exist;
    `explain` returns an error's message, exit code and priority (sharding/system/multihost/failure.py).
    """
    found = cluster.detect(coordinator, num_processes, process_id, timeout_s)
    if found is None:
        yield ALONE
        return
    address, index, count, device_ids = found
    hosts = Hosts(index, count, explain)
    try:
        hosts._shutdown.watch_signals(hosts._take_notice)
        meet = rendezvous.connect if index else rendezvous.accept_all
        name, _, port = address.rpartition(":")
        meet(hosts._peers, (name.strip("[]"), int(port)), workdir, timeout_s)
        for host, connection in hosts._connections.items():
            threading.Thread(target=hosts._listen, args=(host, connection), name=f"host {host}", daemon=True).start()
        jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and does nothing with it here
        jax.distributed.initialize(address, count, index, device_ids, initialization_timeout=int(timeout_s))
        hosts._register_process()
        yield hosts
        hosts._meet("leave")
    except BaseException as error:  # including KeyboardInterrupt: the other hosts must end, too
        hosts._shutdown.fail(error)
