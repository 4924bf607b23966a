"""Continuous batching: one thread that owns the engine's slots. Replaces JetStream's Driver.

Each turn of the loop:
1. takes what other threads asked for: new requests, aborts, new weights;
2. swaps weights if there are new ones (between calls: running sequences go on with their keys, and every token is
   stamped with the version that produced it);
3. while slots are free, prefills up to `prefill_batch` waiting prompts and starts their samples;
4. runs one `generate` call and hands out its tokens; a finished request's future is set, its slots are free.

JetStream's Driver is not used because it takes no sampling parameters, returns no log-probabilities, cannot swap
weights or abort, prefills one prompt at a time, and kills the process on any error.

Left out: prefix reuse across requests, chunked prefill, run-ahead of the device while the host works.
"""

import collections
import concurrent.futures
import dataclasses
import queue
import threading
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from inference import engine as engine_lib
from inference import sampler, toploc
from models import transformer


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One prompt, `num_samples` completions; sample i uses seed + i (mod 2^32)."""

    tokens: Sequence[int]
    num_samples: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    proofs: bool = False


@dataclasses.dataclass
class Completion:
    """One sample. `logprobs` and `versions` have one entry per token; the stop token is included."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    prompt_version: int  # the policy version that prefilled the prompt
    finish_reason: str  # "stop" | "length"
    proofs: bytes


class Overloaded(RuntimeError):
    """The queue is full; try again later, or another server."""


class Closed(RuntimeError):
    """The server is shutting down."""


@dataclasses.dataclass
class _Job:
    request: GenerateRequest
    future: concurrent.futures.Future
    completions: list[Completion | None]


@dataclasses.dataclass
class _Sample:
    """A sample on its way: waiting with its prefilled prompt, or in a slot."""

    job: _Job
    index: int
    prefix: engine_lib.Prefix
    row: int
    completion: Completion
    proofs: list[bytes] = dataclasses.field(default_factory=list)


class Scheduler:
    """Runs an engine in a thread of its own; every method may be called from any thread."""

    def __init__(self, engine: engine_lib.Engine, params: transformer.Params, version: int, *, max_queue: int = 4096):
        self._engine, self._params, self.version = engine, params, version
        self._max_queue = max_queue
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._waiting: collections.deque[_Job] = collections.deque()
        self._ready: collections.deque[_Sample] = collections.deque()
        self._slots: list[_Sample | None] = [None] * engine.config.num_slots
        self._num_pending = 0
        self._lock = threading.Lock()
        self._closing = False
        self.stats = collections.Counter()
        self._state = engine.init_decode_state()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> "concurrent.futures.Future[list[Completion]]":
        """Queues a request. The future may be cancelled at any time, which frees its slots.

        Raises:
          ValueError: the request cannot be served, with the value and the rule.
          Overloaded: too many requests wait already.
          Closed: `close` was called.
        """
        self._check(request)
        job = _Job(request, concurrent.futures.Future(), [None] * request.num_samples)
        with self._lock:
            if self._closing:
                raise Closed("the server is shutting down")
            if self._num_pending >= self._max_queue:
                raise Overloaded(f"{self._num_pending} requests are pending, the most this server takes")
            self._num_pending += 1
            job.future.add_done_callback(self._forget)
            # Under the lock: once _closing is set the thread empties the inbox a last time.
            self._inbox.put(job)
        return job.future

    def update(self, params: transformer.Params, version: int) -> "concurrent.futures.Future[int]":
        """Swaps the weights between two engine calls; the future gives the version once it is in force. Closed as `submit`."""
        done = concurrent.futures.Future()
        with self._lock:
            if self._closing:
                raise Closed("the server is shutting down")
            self._inbox.put((params, version, done))
        return done

    def close(self) -> None:
        """Fails what is pending and ends the thread."""
        with self._lock:
            self._closing = True
        self._inbox.put(None)
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

    def _check(self, request: GenerateRequest) -> None:
        vocab, capacity = self._engine.model.vocab_size, self._engine.config.max_model_len
        if not request.tokens:
            raise ValueError("token_ids is empty; a prompt has at least one token")
        if bad := [t for t in request.tokens if not 0 <= t < vocab]:
            raise ValueError(f"token id {bad[0]} is outside the vocabulary of {vocab} entries")
        if len(request.tokens) >= capacity:
            raise ValueError(
                f"this model's maximum context length is {capacity} tokens, but the prompt has {len(request.tokens)}"
            )
        if len(request.stop_ids) > engine_lib.MAX_STOP_IDS:
            raise ValueError(
                f"{len(request.stop_ids)} stop token ids given; at most {engine_lib.MAX_STOP_IDS} are held"
            )
        if bad := [t for t in request.stop_ids if not 0 <= t < vocab]:
            raise ValueError(f"stop token id {bad[0]} is outside the vocabulary of {vocab} entries")
        for name, ok, rule in (
            ("n", 1 <= request.num_samples <= 1024, "in 1..1024"),
            ("max_tokens", request.max_tokens >= 1, "at least 1"),
            # float32 logits divided by less than 1e-6 overflow to inf, and inf - inf is no log-probability
            ("temperature", request.temperature == 0 or 1e-6 <= request.temperature <= 1e6, "0, or in 1e-6..1e6"),
            ("top_k", 0 <= request.top_k < 2**31, "in 0..2^31 - 1, or -1 for off"),
            ("top_p", 0 < request.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= request.min_p <= 1, "in [0, 1]"),
            ("seed", 0 <= request.seed < 2**32, "in 0..2^32 - 1"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {rule}; got {getattr(request, _FIELDS.get(name, name))}")

    def _forget(self, future):
        with self._lock:
            self._num_pending -= 1

    # Below here: the scheduler's thread only.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:  # an error in the engine fails every request rather than leave one hanging; the thread then dies loudly
            with self._lock:
                self._closing = True
            self._fail_all()

    def _turn(self) -> bool:
        idle = not (self._waiting or self._ready or self.num_running)
        if not self._take_messages(block=idle):
            return False
        self._drop_cancelled()
        self._start_samples()
        if self.num_running:
            self._generate()
        return True

    def _take_messages(self, *, block: bool) -> bool:
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if message is None:
                return False
            if isinstance(message, _Job):
                self._waiting.append(message)
            else:
                self._params, self.version, done = message
                self.stats["weight_updates"] += 1
                done.set_result(self.version)

    def _drop_cancelled(self) -> None:
        self._ready = collections.deque(s for s in self._ready if not s.job.future.cancelled())
        self._waiting = collections.deque(j for j in self._waiting if not j.future.cancelled())
        dropped = [i for i, s in enumerate(self._slots) if s is not None and s.job.future.cancelled()]
        if dropped:
            self.stats["aborted"] += len(dropped)
            self._state = self._engine.deactivate(self._state, self._pad(dropped, self._engine.config.num_slots))
            for slot in dropped:
                self._slots[slot] = None

    def _start_samples(self) -> None:
        free = [i for i, sample in enumerate(self._slots) if sample is None]
        while free and (self._ready or self._waiting):
            if not self._ready:
                self._prefill()
            # one insert call takes samples of one prefill
            prefix, slots = self._ready[0].prefix, []
            rows, seeds = [], []
            while free and self._ready and self._ready[0].prefix is prefix:
                sample, slot = self._ready.popleft(), free.pop(0)
                self._slots[slot] = sample
                slots.append(slot)
                rows.append(sample.row)
                seeds.append((sample.job.request.seed + sample.index) % 2**32)
            self._state = self._engine.insert_batch(
                prefix,
                self._pad(rows, 0),
                self._state,
                self._pad(slots, len(self._slots)),
                self._pad(seeds, 0, np.uint32),
            )

    def _prefill(self) -> None:
        """Prefills the next waiting prompts of one length bucket, oldest first."""
        P = self._engine.config.prefill_batch
        bucket = self._engine.bucket(len(self._waiting[0].request.tokens))
        jobs, rest = [], collections.deque()
        for job in self._waiting:
            same = len(jobs) < P and self._engine.bucket(len(job.request.tokens)) == bucket
            (jobs if same else rest).append(job)

        tokens_PT, length_P = np.zeros((P, bucket), np.int32), np.ones((P,), np.int32)
        for row, job in enumerate(jobs):
            length_P[row] = len(job.request.tokens)
            tokens_PT[row, : length_P[row]] = job.request.tokens
        prefix = self._engine.prefill_batch(
            self._params, tokens_PT, length_P, _request_arrays([job.request for job in jobs], P)
        )
        self._waiting = rest  # not before: should the engine raise, `_fail_all` finds them there
        self.stats["prefill_calls"] += 1
        self.stats["prompt_tokens"] += int(length_P[: len(jobs)].sum())
        for row, job in enumerate(jobs):
            for index in range(job.request.num_samples):
                completion = Completion([], [], [], self.version, "", b"")
                self._ready.append(_Sample(job, index, prefix, row, completion))

    def _generate(self) -> None:
        begun = time.perf_counter()
        self._state, result = self._engine.generate(self._params, self._state)
        tokens, logprobs, counts = self._engine.read(result)
        self.stats["generate_calls"] += 1
        self.stats["decode_steps"] += int(counts.max())
        self.stats["decode_s"] += time.perf_counter() - begun

        finished, windows = [], []
        for slot, sample in enumerate(self._slots):
            if sample is None:
                continue
            completion, count = sample.completion, int(counts[slot])
            self.stats["tokens"] += count
            before = len(completion.tokens)
            completion.tokens += tokens[slot, :count].tolist()
            completion.logprobs += logprobs[slot, :count].tolist()
            completion.versions += [self.version] * count
            reason = self._finish_reason(sample)
            if sample.job.request.proofs:
                after = len(completion.tokens)
                for start in range(before - before % engine_lib.PROOF_WINDOW, after, engine_lib.PROOF_WINDOW):
                    if after >= start + engine_lib.PROOF_WINDOW or reason:
                        windows.append((slot, sample, start, min(after, start + engine_lib.PROOF_WINDOW)))
            if reason:
                completion.finish_reason = reason
                finished.append(slot)
        self._prove(windows)
        for slot in finished:
            sample, self._slots[slot] = self._slots[slot], None
            self._finish(sample)

    def _finish_reason(self, sample: _Sample) -> str:
        request, tokens = sample.job.request, sample.completion.tokens
        if tokens and tokens[-1] in request.stop_ids:
            return "stop"
        full = len(request.tokens) + len(tokens) >= self._engine.config.max_model_len
        return "length" if full or len(tokens) >= request.max_tokens else ""

    def _prove(self, windows: list) -> None:
        """Builds the proofs of finished windows, before the ring overwrites their rows; all of a call at once, because
        512 proofs of 7 x 128 values take 0.65 s one by one."""
        if not windows:
            return
        slots = sorted({slot for slot, *_ in windows})
        size = 1 << (len(slots) - 1).bit_length()  # a handful of shapes instead of one per count
        rings = np.asarray(self._engine.harvest(self._state, self._pad(slots, slots[-1], size=size)))
        ring_of = dict(zip(slots, rings, strict=False))
        hiddens = [ring_of[slot][np.arange(start, end) % engine_lib.RING] for slot, _, start, end in windows]
        for (_, sample, _, _), proofs in zip(windows, toploc.build_proofs_batch(hiddens), strict=True):
            sample.proofs += proofs

    def _finish(self, sample: _Sample) -> None:
        job = sample.job
        sample.completion.proofs = toploc.join(sample.proofs)
        job.completions[sample.index] = sample.completion
        self.stats["samples"] += 1
        if all(c is not None for c in job.completions) and job.future.set_running_or_notify_cancel():
            job.future.set_result(job.completions)

    def _fail_all(self) -> None:
        jobs = {id(s.job): s.job for s in [*self._ready, *self._slots] if s is not None}
        jobs |= {id(j): j for j in self._waiting}
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Job):
                jobs[id(message)] = message
            elif message is not None:
                message[2].set_exception(Closed("the server is shutting down"))
        for job in jobs.values():
            if not job.future.done() and job.future.set_running_or_notify_cancel():
                job.future.set_exception(Closed("the server stopped before the request was finished"))

    def _pad(self, values: list[int], fill: int, dtype=np.int32, size: int | None = None) -> np.ndarray:
        """A list as an array of fixed size (the number of slots), so that no program is compiled twice."""
        padded = np.full((size or len(self._slots),), fill, dtype)
        padded[: len(values)] = values
        return padded


_FIELDS = {"n": "num_samples"}


def _request_arrays(requests: list[GenerateRequest], size: int) -> engine_lib.Request:
    """Stacks requests into arrays of `size` rows."""

    def column(values, fill, dtype):
        return jnp.asarray(np.array([*values, *[fill] * (size - len(values))], dtype))

    stop_ids = np.full((size, engine_lib.MAX_STOP_IDS), -1, np.int32)
    for row, request in enumerate(requests):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids
    return engine_lib.Request(
        sampling=sampler.Sampling(
            seed=column([r.seed for r in requests], 0, np.uint32),
            temperature=column([r.temperature for r in requests], 1, np.float32),
            top_k=column([r.top_k for r in requests], 0, np.int32),
            top_p=column([r.top_p for r in requests], 1, np.float32),
            min_p=column([r.min_p for r in requests], 0, np.float32),
        ),
        max_tokens=column([min(r.max_tokens, 2**31 - 1) for r in requests], 1, np.int32),
        stop_ids=jnp.asarray(stop_ids),
    )
