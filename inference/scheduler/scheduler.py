"""Continuous batching: one thread that owns the engine's slots. Replaces JetStream's Driver.

Each turn of the loop:
1. takes what other threads asked for: new requests, aborts, new weights, a pause; an idle engine waits for the requests that come
   close behind the first, up to a batch, since a call costs the same however many slots it finds in use;
2. swaps weights if there are new ones (between calls: running sequences go on with their keys, and every token is
   stamped with the version that produced it);
3. runs one chunk of a long prompt, if one is under way;
4. while slots are free, prefills up to `prefill_batch` waiting prompts and starts their samples; a prompt whose keys are
   kept (prefix_cache.py) is not prefilled again;
5. starts one `generate` call, and while it runs does what is left to do of the call before: makes proofs, tells
   listeners, sets the futures of finished requests;
6. takes the call's tokens; the slots of finished samples are free. While others wait the call ends with the step that is
   known to free a slot, so that none stands empty for the rest of it; while slots are free and requests keep coming, calls
   are short, so that the next one does not wait for a whole call.

Requests start in the order they came, but none holds more than half of the slots while others wait. A request that the
engine cannot finish (NaN, no memory) fails alone or with those beside it; the thread goes on. A bug ends it, loudly, with
every request failed: no future is left hanging.

JetStream's Driver is not used because it takes no sampling parameters, returns no log-probabilities, cannot swap
weights or abort, prefills one prompt at a time, and kills the process on any error.

Left out: run-ahead of the device while the host works (a call of 8 steps takes the host a hundredth of its time).
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from inference.engine import decode_state as state_lib
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.engine import routed_experts
from inference.proofs import toploc
from inference.proofs import window as proof_window
from inference.scheduler import prefill_queue
from inference.scheduler import sequence as sequence_lib
from models import transformer

GenerateRequest, Completion = request_lib.GenerateRequest, request_lib.Completion  # what `submit` takes and gives

Listener = sequence_lib.Listener


class Overloaded(RuntimeError):
    """The queue is full; try again later, or another server."""


class Closed(RuntimeError):
    """The server is shutting down."""


class Fault(RuntimeError):
    """The engine could not finish this request: its numbers are not finite, or the device failed."""


@dataclasses.dataclass(frozen=True)
class _Window:
    """Rows of a sample that a proof is due of, as their top values."""

    sample: sequence_lib.Sequence
    num_rows: int
    indices_k: np.ndarray
    bits_k: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What is left to do of a call once its tokens are taken."""

    told: list[sequence_lib.Sequence]
    windows: list[_Window]
    finished: list[sequence_lib.Sequence]


@dataclasses.dataclass(frozen=True)
class _Update:
    params: transformer.Params
    version: int
    done: concurrent.futures.Future


@dataclasses.dataclass(frozen=True)
class _Pause:
    paused: bool
    clear: bool
    done: concurrent.futures.Future


SHORT = 4  # a short call has steps_per_call / SHORT steps
RECENT_S = 0.25  # requests keep coming if the last one is no older
GAP_S, GATHER_S = 0.005, 0.03  # an idle engine starts once no request came for the one, or they came for the other

_STOP, _WAKE = object(), object()
_STATS = (
    "weight_updates",
    "aborted",
    "faults",
    "prefill_calls",
    "prefill_chunks",
    "prompt_tokens",
    "tokens",
    "samples",
)
_STATS += (
    "generate_calls",
    "decode_steps",
    "decode_s",
    "prefix_queries",
    "prefix_hits",
    "first_tokens",
    "first_token_s",
)


class Scheduler:
    """Runs an engine in a thread of its own; every method may be called from any thread."""

    def __init__(
        self,
        engine: engine_lib.Engine,
        params: transformer.Params,
        version: int,
        *,
        max_queue: int = 4096,
        prefix_cache_bytes: int = 2**28,
        state: state_lib.DecodeState | None = None,
    ):
        """`state` is a fresh one of the engine, which makes its own when None."""
        self._engine, self._params, self.version = engine, params, version
        self._max_queue, self._max_model_len = max_queue, engine.config.max_model_len
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._outcome: _Outcome | None = None
        self._slots: list[sequence_lib.Sequence | None] = [None] * engine.config.num_slots
        self._num_pending = 0
        self._lock = threading.Lock()
        self._closing = False
        self._last_arrival_s = -RECENT_S
        self.is_paused = False
        self.stats = collections.Counter(dict.fromkeys(_STATS, 0))  # all keys at once: other threads copy it
        self._prompts = prefill_queue.Prompts(engine, prefix_cache_bytes, self.stats)
        self._state = engine.init_decode_state() if state is None else state
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(
        self, request: GenerateRequest, listener: Listener | None = None
    ) -> "concurrent.futures.Future[list[Completion]]":
        """Queues a request. The future may be cancelled at any time, which frees its slots.

        `listener` is told of new tokens; it must return at once, and a RuntimeError from it (its event loop is gone)
        cancels the request.

        Raises:
          ValueError: the request cannot be served, with the value and the rule.
          Overloaded: too many requests wait already.
          Closed: `close` was called.
        """
        request.check(self._engine.model.vocab_size, self._max_model_len)
        if request.routed_experts and not self._engine.config.routed_experts:
            raise ValueError(
                "return_routed_experts = true, but this server does not record experts; start it with --routed_experts on a "
                "model that has some"
            )
        job = sequence_lib.SequenceGroup(
            request, concurrent.futures.Future(), listener, [None] * request.num_samples, time.monotonic()
        )
        with self._lock:
            if self._closing:
                raise Closed("the server is shutting down")
            if self._num_pending >= self._max_queue:
                raise Overloaded(f"{self._num_pending} requests are pending, the most this server takes")
            self._num_pending += 1
            # Under the lock: once _closing is set the thread empties the inbox a last time.
            self._inbox.put(job)
        job.future.add_done_callback(self._forget)
        return job.future

    def update(self, params: transformer.Params, version: int) -> "concurrent.futures.Future[int]":
        """Swaps the weights between two engine calls; the future gives the version once it is in force. Closed as `submit`."""
        return self._send(lambda done: _Update(params, version, done))

    def pause(self, *, clear_prefixes: bool = False) -> concurrent.futures.Future:
        """Stops stepping, with every sequence and its keys kept; the future is set once no call runs."""
        return self._send(lambda done: _Pause(True, clear_prefixes, done))

    def resume(self) -> concurrent.futures.Future:
        return self._send(lambda done: _Pause(False, False, done))

    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, waits up to `drain_s` for those it has, fails what is left and ends the thread."""
        with self._lock:
            self._closing = True
        deadline = time.monotonic() + drain_s
        while self._num_pending and self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        self._inbox.put(_STOP)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    @property
    def num_running(self) -> int:
        return sum(sample is not None for sample in self._slots)

    @property
    def num_running_requests(self) -> int:
        return len({id(sample.group) for sample in list(self._slots) if sample is not None})

    @property
    def prefix_bytes(self) -> int:
        return self._prompts.kept_bytes

    def cache_usage(self) -> float:
        """Part of the slots' positions that hold a token, 0..1."""
        lengths = [len(s.group.request.tokens) + len(s.completion.tokens) for s in list(self._slots) if s is not None]
        return sum(lengths) / (len(self._slots) * self._max_model_len)

    def _send(self, message: Callable) -> concurrent.futures.Future:
        done: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self._closing:
                raise Closed("the server is shutting down")
            self._inbox.put(message(done))
        return done

    def _forget(self, future):
        with self._lock:
            self._num_pending -= 1
        if future.cancelled():
            self._inbox.put(_WAKE)  # also of a paused thread, which would keep the request otherwise

    # Below here: the scheduler's thread only.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:  # an error in the engine fails every request rather than leave one hanging; the thread then dies loudly
            with self._lock:
                self._closing = True
            self._fail_all(Closed("the server stopped before the request was finished"))
            self._empty_inbox()

    def _turn(self) -> bool:
        idle = self.is_paused or not (self._prompts or self.num_running)
        if idle:
            self._settle()
        if not self._take_messages(idle=idle):
            self._settle()
            return False
        self._drop_done()
        if self.is_paused:
            return True
        try:
            self._prompts.extend(self._params, self.version)
            self._start_samples()
            if self.num_running:
                self._generate()
            else:
                self._settle()
        except jax.errors.JaxRuntimeError as error:  # out of memory, a lost device: the state was donated, and is gone
            self.stats["faults"] += 1
            self._settle()
            self._fail_all(Fault(f"the device failed: {error}"))
            self._prompts.forget_kept()
            self._state = self._engine.init_decode_state()
        return True

    def _take_messages(self, *, idle: bool) -> bool:
        block, wait_s, first_s, num_samples = idle, None, None, 0
        while True:
            try:
                message = self._inbox.get(block=block, timeout=wait_s)
            except queue.Empty:
                return True
            block = False
            if message is _STOP:
                return False
            if isinstance(message, sequence_lib.SequenceGroup):
                self._prompts.add(message)
                self._last_arrival_s = time.monotonic()
                first_s, num_samples = first_s or self._last_arrival_s, num_samples + message.request.num_samples
                is_early = self._last_arrival_s - first_s < GATHER_S and num_samples < len(self._slots)
                block, wait_s = idle and not self.is_paused and is_early, GAP_S
            elif message is not _WAKE and message.done.set_running_or_notify_cancel():  # not given up meanwhile
                if isinstance(message, _Update):
                    self._swap(message.params, message.version)
                else:
                    self.is_paused = message.paused
                    if message.clear:
                        self._prompts.forget_kept()
                message.done.set_result(self.version)

    def _swap(self, params: transformer.Params, version: int) -> None:
        self._params, self.version = params, version
        self._prompts.restart()
        self.stats["weight_updates"] += 1

    def _drop_done(self) -> None:
        """Forgets requests that were cancelled, or failed, wherever they are."""
        self._prompts.drop_done()
        dropped = [i for i, sample in enumerate(self._slots) if sample is not None and sample.group.future.done()]
        if dropped:
            self.stats["aborted"] += len(dropped)
            self._deactivate(dropped)

    def _deactivate(self, slots: list[int]) -> None:
        self._state = self._engine.deactivate(self._state, self._pad(slots, len(self._slots)))
        for slot in slots:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._slots[slot].group.num_running -= 1
        self._slots[slot] = None

    def _start_samples(self) -> None:
        free = collections.deque(i for i, sample in enumerate(self._slots) if sample is None)
        most = max(1, len(self._slots) // 2)
        started: dict[int, list[tuple[int, sequence_lib.Sequence]]] = collections.defaultdict(list)
        while free and (job := self._prompts.next(self._params, self.version, most)):
            streams = self._engine.tokenizer.text_stream() if job.request.stop_texts else None
            completion = Completion([], [], [], job.prompt_version, prompt_logprobs=job.prompt_logprobs)
            completion.num_cached = job.num_cached
            sample = sequence_lib.Sequence(job, job.num_started, completion, streams)
            job.num_started += 1
            job.num_running += 1
            if job.num_started == job.request.num_samples:
                self._prompts.started(job)
            slot = free.popleft()
            self._slots[slot] = sample
            started[id(job.prefix)].append((slot, sample))
        for group in started.values():  # one insert call takes samples of one prefill
            slots, samples = zip(*group, strict=True)
            size = next(size for size in self._engine.config.insert_sizes if size >= len(slots))
            requests = [
                dataclasses.replace(s.group.request, seed=(s.group.request.seed + s.index) % 2**32) for s in samples
            ]
            self._state = self._engine.insert_batch(
                samples[0].group.prefix,
                self._pad([s.group.row for s in samples], 0, size),
                self._state,
                self._pad(slots, len(self._slots), size),
                state_lib.request_arrays(requests, size),
            )

    def _generate(self) -> None:
        begun = time.perf_counter()
        state = self._engine.with_limit(self._state, self._num_steps())
        self._state, result = self._engine.generate(self._params, state)
        self._settle()
        tokens, logprobs, counts = self._engine.read(result)
        self.stats["generate_calls"] += 1
        self.stats["decode_steps"] += int(counts.max())
        self.stats["decode_s"] += time.perf_counter() - begun

        running = [(slot, s) for slot, s in enumerate(self._slots) if s is not None]
        finite = np.isfinite(logprobs).all(axis=1)
        raw = np.asarray(result.raw_logps) if any(s.group.request.raw_logprobs for _, s in running) else None
        tops = None
        if any(s.group.request.top_logprobs for _, s in running):
            tops = np.asarray(result.top_ids), np.asarray(result.top_logps)
        experts = np.asarray(result.experts) if any(s.group.request.routed_experts for _, s in running) else None
        finished, cut, windows = [], [], []
        for slot, sample in running:
            count = int(counts[slot])
            if not finite[slot]:
                self._fail(sample.group, "a log-probability is not finite: the weights, or an overflow in the model")
                continue
            if count == 0:  # each call adds a token to each slot; without this the request would never end
                self._fail(sample.group, "the engine gave no token for a slot that is in use")
                continue
            before = len(sample.completion.tokens)
            if before == 0:
                self.stats["first_tokens"] += 1
                self.stats["first_token_s"] += time.monotonic() - sample.group.submitted_s
            new = tokens[slot, :count].tolist(), logprobs[slot, :count].tolist()
            active = sample.take(*new, self.version, self._max_model_len)
            after = len(sample.completion.tokens)
            self.stats["tokens"] += after - before
            if sample.group.request.raw_logprobs:
                sample.completion.raw_logprobs += raw[slot, : after - before].tolist()
            if sample.group.request.top_logprobs:
                sample.take_top(tops[0][slot, : after - before], tops[1][slot, : after - before])
            if sample.group.request.routed_experts:
                sample.experts.append(experts[slot, : after - before])
            if sample.completion.finish_reason:
                finished.append((slot, sample))
                if active:
                    cut.append(slot)
            if sample.group.request.proofs:
                windows += self._windows(slot, sample, before, after, result, by_host=slot in cut)
        if cut:  # what ended them the device does not know of
            self._state = self._engine.deactivate(self._state, self._pad(cut, len(self._slots)))
        for slot, _ in finished:
            self._release(slot)
        self._outcome = _Outcome([sample for _, sample in running], windows, [sample for _, sample in finished])

    def _num_steps(self) -> int:
        """Steps of the next call, at most."""
        steps = self._engine.config.steps_per_call
        if self._prompts:
            return min(steps, *(s.num_left(self._max_model_len) for s in self._slots if s is not None))
        if None in self._slots and time.monotonic() - self._last_arrival_s < RECENT_S:
            return -(-steps // SHORT)
        return steps

    def _windows(
        self, slot: int, sample: sequence_lib.Sequence, before: int, after: int, result, *, by_host: bool
    ) -> list[_Window]:
        """The windows that a sample finished when it grew from `before` to `after` tokens."""
        size, out = proof_window.WINDOW, []
        if after // size > before // size:
            indices, bits = self._engine.read_proofs(result)
            out.append(_Window(sample, size, indices[0, slot], bits[0, slot]))
        if sample.completion.finish_reason and after % size:
            if by_host:  # the device does not see the end here
                where = (np.array([value], np.int32) for value in (slot, after // size, after % size))
                indices, bits = map(np.asarray, self._engine.top_values(self._state, *where))
                out.append(_Window(sample, after % size, indices[0], bits[0]))
            else:
                indices, bits = self._engine.read_proofs(result)
                out.append(_Window(sample, after % size, indices[1, slot], bits[1, slot]))
        return out

    def _settle(self) -> None:
        """What is left to do of the last call: proofs, listeners, futures."""
        if self._outcome is None:
            return
        windows = self._outcome.windows
        if windows:  # all of a call at once: 512 proofs of 7 x 128 values take 0.65 s one by one
            tops = np.stack([w.indices_k for w in windows]), np.stack([w.bits_k for w in windows])
            proofs = proof_window.encode([w.num_rows for w in windows], *tops, self._engine.model.model_dim)
            for window, proof in zip(windows, proofs, strict=True):
                window.sample.proofs.append(proof)
                if not proof:
                    self._fail(window.sample.group, "a hidden state is not finite, so there is no proof of it")
        self._tell(self._outcome.told)  # before a future is set: who streams must not see the end before the last piece
        for sample in self._outcome.finished:
            self._finish(sample)
        self._outcome = None

    def _finish(self, sample: sequence_lib.Sequence) -> None:
        job = sample.group
        sample.completion.proofs = toploc.join(sample.proofs)
        if job.request.routed_experts:
            num_prompt = len(job.request.tokens)
            sample.completion.experts = routed_experts.of_sample(
                job.prefix.experts, job.row, num_prompt, sample.experts
            )
        job.completions[sample.index] = sample.completion
        self.stats["samples"] += 1
        all_there = all(c is not None for c in job.completions)
        if all_there and not job.future.done() and job.future.set_running_or_notify_cancel():
            job.future.set_result(job.completions)

    def _tell(self, samples: list[sequence_lib.Sequence]) -> None:
        for sample in samples:
            if sample.group.listener is not None:
                try:
                    sample.group.listener(sample.index, sample.completion)
                except RuntimeError:  # the event loop it spoke to was closed
                    sample.group.future.cancel()

    def _fail(self, job: sequence_lib.SequenceGroup, reason: str) -> None:
        """Ends one request with a Fault; its slots are freed by `_drop_done`."""
        self.stats["faults"] += 1
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled, or failed by another sample
            job.future.set_exception(Fault(reason))

    def _fail_all(self, error: Exception) -> None:
        jobs = {id(s.group): s.group for s in self._slots if s is not None}
        jobs |= {id(j): j for j in self._prompts}
        if self._outcome is not None:
            jobs |= {id(s.group): s.group for s in self._outcome.finished}
        for job in jobs.values():
            if not job.future.done() and job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        self._slots = [None] * len(self._slots)
        self._prompts.clear()
        self._outcome = None

    def _empty_inbox(self) -> None:
        closed = Closed("the server is shutting down")
        while not self._inbox.empty():
            message = self._inbox.get()
            future = (
                message.future if isinstance(message, sequence_lib.SequenceGroup) else getattr(message, "done", None)
            )
            if future is not None and not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(closed)

    def _pad(self, values: Sequence[int], fill: int, size: int | None = None) -> np.ndarray:
        """A list as an array of fixed size (the number of slots), so that no program is compiled twice."""
        padded = np.full((size or len(self._slots),), fill, np.int32)
        padded[: len(values)] = values
        return padded
