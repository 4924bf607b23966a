"""An engine whose mesh spans several hosts: host 0 decides, and the other hosts replay its calls.

1. Host 0 has a `LeadingEngine`, which its scheduler uses like any engine. It sends each call, with its small arguments, to the
   other hosts, then makes it, too. One thread at a time makes calls, so all hosts start the same programs in the same order.
2. Each other host has a `Replay`, which makes the calls on its own shards of the same arrays. Weights and decode state are
   always the current ones. Keys of prompts, and sequences that wait for pages, have the number of the call that made them, and are
   dropped after host 0 dropped them.
3. `Follower` is such a host of an inference server: it has no routes and no scheduler. It waits for calls at a socket, not in a
   collective. A fetch of other weights runs in a thread, while calls go on. Its end is reported to the first host, which then
   swaps, and the swap is one of the calls.

An error of a call on host 0 ends all hosts: the others may be in the same program, and wait for it.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from inference.engine import decode_state, kv_cache
from inference.engine import engine as engine_lib
from inference.engine import weights as weights_lib
from models import transformer
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast
from sharding.weights.download import source as source_lib

Made = TypeVar("Made", kv_cache.Cache, engine_lib.Swapped)


def send(hosts: hosts_lib.Hosts, call: str, arrays: Sequence[decode_state.Array] = (), **fields) -> None:
    """Sends a call, with numpy arrays and JSON fields, from host 0 to each other host, where `receive` returns it."""
    buffers = [np.asarray(array, order="C") for array in arrays]
    header = {"call": call, "arrays": [(array.dtype.name, array.shape) for array in buffers]} | fields
    hosts.scatter(lambda host: (header, buffers))


def receive(hosts: hosts_lib.Hosts) -> tuple[dict, list[np.ndarray]]:
    """Returns the next call of host 0: its fields, with its name under "call", and its arrays. Blocks until one comes."""
    header, data = hosts.receive()
    arrays, start = [], 0
    for dtype, shape in header.pop("arrays"):
        arrays.append(np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape))
        start += arrays[-1].nbytes
    return header, arrays


class LeadingEngine(engine_lib.Engine):
    """The engine of host 0, which sends each call to the other hosts. Its prefixes have last tokens and lengths as numpy arrays."""

    def __init__(self, hosts: hosts_lib.Hosts, *args):
        """Creates the engine that replays on `hosts`; the other arguments are those of `Engine`."""
        super().__init__(*args)
        self._hosts, self._lock, self._counter = hosts, threading.RLock(), itertools.count()
        # id of a cache's first array, or of a swapped sequence -> number of the call that made it
        self._numbers: dict[int, int] = {}
        self._freed: collections.deque[int] = collections.deque()  # numbers that the other hosts have not dropped yet

    @contextlib.contextmanager
    def sent(self, call: str, *arrays: decode_state.Array, **fields) -> Iterator[int]:
        """Sends a call to the other hosts; yields its number to a block that makes it here. An error in the block ends all hosts."""
        with self._lock:
            freed = [self._freed.popleft() for _ in range(len(self._freed))]
            number = next(self._counter)
            with self._ending_all():
                send(self._hosts, call, arrays, number=number, freed=freed, **fields)
                yield number

    def prefill_batch(self, params, tokens_PT, length_P):
        with self.sent("prefill_batch", tokens_PT, length_P) as number:
            prefix = super().prefill_batch(params, tokens_PT, length_P)
            self._keep(prefix.cache, number)
        last_P = np.asarray(tokens_PT)[np.arange(len(length_P)), np.asarray(length_P) - 1]
        return dataclasses.replace(prefix, last_token=last_P, length=np.asarray(length_P))

    def prefill_chunk(self, params, tokens_1T, start, cache, *, is_shared=False):
        source = None if cache is None else self._number(cache)
        with self.sent("prefill_chunk", tokens_1T, start=start, kept=source, is_shared=is_shared) as number:
            cache, experts = super().prefill_chunk(params, tokens_1T, start, cache, is_shared=is_shared)
            return self._keep(cache, number), experts

    def prompt_logprobs(self, params, tokens_1T):
        with self.sent("prompt_logprobs", tokens_1T):
            return super().prompt_logprobs(params, tokens_1T)

    def insert_batch(self, prefix, rows, state, slots, request):
        arrays = prefix.last_token, prefix.length, rows, slots, *jax.tree.leaves(request)
        with self.sent("insert_batch", *arrays, kept=self._number(prefix.cache)):
            return super().insert_batch(prefix, rows, state, slots, request)

    def insert_pages(self, prefix, state, copies):
        with self.sent("insert_pages", np.array(copies, np.int32), kept=self._number(prefix.cache)):
            return super().insert_pages(prefix, state, copies)

    def swap_out(self, state, slot, pages):
        """Does as `Engine.swap_out`, on all hosts: each keeps its shards of the pages."""
        with self.sent("swap_out", np.array(pages, np.int32), slot=int(slot)) as number:
            return self._keep(super().swap_out(state, slot, pages), number)

    def swap_in(self, state, slot, pages, swapped):
        with self.sent("swap_in", np.array(pages, np.int32), slot=int(slot), kept=self._number(swapped)):
            return super().swap_in(state, slot, pages, swapped)

    def deactivate(self, state, slots):
        with self.sent("deactivate", slots):
            return super().deactivate(state, slots)

    def top_values(self, state, slot, window_index, num_rows):
        with self.sent("top_values", at=[slot, window_index, num_rows]):
            return super().top_values(state, slot, window_index, num_rows)

    def init_decode_state(self):
        with self.sent("init_decode_state"):
            return super().init_decode_state()

    def generate(self, params, decode_state, limit=None, table=None):
        tables = [] if table is None else [table]
        with self.sent("generate", *tables, limit=None if limit is None else int(limit)):
            return super().generate(params, decode_state, limit, table)

    def read(self, result):
        """Does as `Engine.read`, here alone. Raises the error of the decode call, if there is one, and ends all hosts."""
        with self._ending_all():
            return super().read(result)

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.push(self._hosts.report)
            yield

    def _keep(self, made: Made, number: int) -> Made:
        """Records that the call `number` made a cache or a swapped sequence, until it is garbage."""
        first = jax.tree.leaves(made)[0]
        self._numbers[id(first)] = number
        weakref.finalize(first, self._forget, id(first), number).atexit = False
        return made

    def _forget(self, key: int, number: int) -> None:
        del self._numbers[key]
        self._freed.append(number)

    def _number(self, made: kv_cache.Cache | engine_lib.Swapped) -> int:
        return self._numbers[id(jax.tree.leaves(made)[0])]


class Replay:
    """The calls of host 0's engine on another host, with its shards of the weights `params`, of the decode state, and of prompts."""

    def __init__(
        self,
        engine: engine_lib.Engine,
        params: transformer.Params,
        swap: Callable[[transformer.Params], transformer.Params],
    ):
        """`swap` returns new weights in place of those given, for the call "swap"."""
        self._params, self._engine, self._swap = params, engine, swap
        self._state: engine_lib.State = ()
        self._kept: dict[int, Any] = {}  # caches and swapped sequences

    def run(self, header: dict, arrays: Sequence[np.ndarray]) -> None:
        """Makes one call that `receive` returned. Blocks until its programs have ended, so that their errors are raised here."""
        engine, kept = self._engine, cast(Any, self._kept.get(header.get("kept", -1)))
        for number in header["freed"]:
            self._kept.pop(number, None)
        made = None
        match header["call"]:
            case "prefill_batch":
                made = engine.prefill_batch(self._params, *arrays).cache
            case "prefill_chunk":
                how = {"is_shared": header["is_shared"]}
                made, _ = engine.prefill_chunk(self._params, arrays[0], header["start"], kept, **how)
            case "prompt_logprobs":
                engine.prompt_logprobs(self._params, *arrays)
            case "insert_batch":
                last_token, length, rows, slots, *leaves = arrays
                prefix = decode_state.Prefix(kept, last_token, length)
                structure = jax.tree.structure(decode_state.request_arrays((), 1))
                self._state = engine.insert_batch(prefix, rows, self._state, slots, structure.unflatten(leaves))
            case "insert_pages":
                none = np.zeros(0)
                prefix = decode_state.Prefix(kept, none, none)
                self._state = engine.insert_pages(prefix, self._state, arrays[0].tolist())
            case "swap_out":
                made = engine.swap_out(self._state, header["slot"], arrays[0].tolist())
            case "swap_in":
                self._state = engine.swap_in(self._state, header["slot"], arrays[0].tolist(), kept)
            case "deactivate":
                self._state = engine.deactivate(self._state, *arrays)
            case "top_values":
                engine.top_values(self._state, *header["at"])
            case "init_decode_state":
                self._state = engine.init_decode_state()
            case "generate":
                self._state, result = engine.generate(self._params, self._state, header["limit"], *arrays)
                engine.read(result)
            case "swap":
                self._params = self._swap(self._params)
            case other:
                raise AssertionError(f"host 0 sent the call {other!r}")
        if made is not None:
            self._kept[header["number"]] = made
        jax.block_until_ready((made, self._state))


class Follower:
    """A host of an inference server other than its first, with its engine, and the fields of `InferenceServer` that concern weights."""

    def __init__(
        self,
        hosts: hosts_lib.Hosts,
        engine: engine_lib.Engine,
        params: transformer.Params,
        store: weights_lib.Store,
        weights: source_lib.Source | None,
        key: source_lib.Trusted,
        have: broadcast.Pulled | None,
    ):
        """`params` are the weights in use, and `have` is the version they are of."""
        self.hosts, self.store, self.weights, self.key, self.have = hosts, store, weights, key, have
        self._calls = Replay(engine, params, self._swap)
        self._fetched: tuple[transformer.Params, broadcast.Pulled | None] | None = None

    def run(self) -> None:
        """Replays the calls of the first host, until that closes its server."""
        while (call := receive(self.hosts))[0]["call"] != "close":
            if call[0]["call"] == "fetch":
                threading.Thread(target=self._answer_fetch, args=[call[0]], name="fetch", daemon=True).start()
            else:
                self._calls.run(*call)
        if self.weights is not None:
            self.weights.close()

    def _answer_fetch(self, asked: dict) -> None:
        problem = ""
        with contextlib.ExitStack() as stack:
            stack.push(self.hosts.report)
            try:
                self._fetch(**{name: value for name, value in asked.items() if name not in ("call", "kind")})
            except (ValueError, OSError) as error:
                problem = str(error)
            self.hosts.answer(problem)

    def _fetch(self, *, folder: str = "", source: str | None = None, version: int = 0, tree: str = "", **pins) -> None:
        """Fetches the weights of a Hugging Face folder, or of a broadcast (None: that of the start) whose digest is `tree`."""
        self._fetched = None
        if folder:
            params = weights_lib.load_folder(pathlib.Path(folder), self.store, on_host=True)
            weights_lib.check_params(params, self.store)
            self._fetched = params, None
            return
        root = self.weights if source is None else source
        assert root is not None
        broadcast.wait_for(root, version, timeout_s=weights_lib.RELAY_LAG_S, key=self.key, **pins)
        pulled = weights_lib.fetch(self.store, root, version, self.have, key=self.key, **pins)
        if pulled.digest != tree:
            raise OSError(f"version {version} is another here than on host 0; give both hosts one source")
        self._fetched = pulled.params, pulled

    def _swap(self, old: transformer.Params) -> transformer.Params:
        assert self._fetched is not None
        fetched, self._fetched = self._fetched, None
        params, self.have = weights_lib.put(self.store, *fetched, old, self.have)
        return params
