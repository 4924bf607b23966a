"""Continuous batching: one thread that drives an engine. Replaces JetStream's Driver (docs/decisions/inference.md).

Each turn of the thread:
1. reads messages: new requests, cancellations, a pause, new weights (sequences keep running with their keys, and every token
   is stamped with the version that sampled it; requests pinned to the old version are finished first, for a limited time).
   Weights of another epoch end all requests, so that none spans two epochs.
   An idle engine gathers requests for a short time (slots.py);
2. prefills chunks of the long prompt that is in progress, if there is one, within a budget of tokens;
3. fills free slots (slots.py) from the prefill queue (prefill_queue.py). In a cache with pages, sequences also need free pages
   and may have to wait for them (paging.py);
4. starts one decode call, and while it runs publishes the output of the call before (step_output.py): proofs,
   listeners, futures;
5. appends the call's tokens to their sequences and frees the slots of finished ones.

If the engine cannot finish a request (NaN, out of memory), it fails alone or with all in the same call, and the thread
continues. A bug ends the thread with an error after every future is set: none is left hanging.

Left out: starting the next call before this one's tokens are read. The host needs 1 % of a call of 8 steps.
"""

import collections
import concurrent.futures
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import prometheus_client

from inference.adapters import adapter_set
from inference.engine import cpu_sub_batches, decode_state
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.rollouts import completion as completion_lib
from inference.scheduler import messages, paging, prefill_queue, prefix_cache, state_size, step_output
from inference.scheduler import sequence as sequence_lib
from inference.scheduler import slots as slots_lib
from models import transformer
from sharding.system.logs import role_metrics

GenerateRequest = request_lib.GenerateRequest
PIN_WAIT_S = 30.0  # that new weights wait for requests pinned to the old version
_STOP, _WAKE = object(), object()
_STATS = """weight_updates aborted faults prefill_calls prefill_chunks prompt_tokens tokens samples requests
    generate_calls decode_steps decode_s prefix_queries prefix_hits num_preemptions"""
# Histograms of seconds, by the name that vLLM's dashboards know.
_LATENCIES = {
    "e2e_request_latency": "Seconds per request, with all its samples.",
    "request_queue_time": "Seconds from the arrival of a request until its first sample has a slot.",
    "time_to_first_token": "Seconds from the arrival of a request until the first token of a sample.",
    "request_time_per_output_token": "Seconds per token of a sample, from its slot to its end.",
}


class Overloaded(RuntimeError):
    """Raised when the queue of requests is full; try again later, or use another server."""


class Closed(RuntimeError):
    """Raised for requests that a server cannot accept or finish because it is shutting down; use another server."""


class Fault(RuntimeError):
    """Raised when the engine could not finish a request: a number is not finite, or the device failed."""


class VersionGone(RuntimeError):
    """Raised for a request pinned to a policy version that this server does not have, or had to replace; use another server."""


class Scheduler:
    """Serves requests with an engine by continuous batching, in its own thread. Every method may be called from any thread.

    Other threads may only read `slots`, `paging`, `prefixes`, and `stats`.
    """

    def __init__(
        self,
        engine: engine_lib.Engine,
        params: transformer.Params,
        version: int,
        *,
        epoch: int = 0,
        max_queue: int = 4096,
        prefix_cache_bytes: int = 2**28,
        state: cpu_sub_batches.State | None = None,
    ):
        """Starts the thread with weights of policy `version` of `epoch`. `state` is an unused decode state of the engine; None creates one."""
        self._engine, self._params, self.version, self.epoch = engine, params, version, epoch
        self._max_queue, self._num_slots = max_queue, engine.config.num_slots
        self._updates: list[messages.Update] = []  # wait for pinned requests; meanwhile, no further ones are accepted
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._arrivals = slots_lib.ArrivalWindow(self._num_slots)
        self.slots = slots_lib.Slots(self._num_slots, engine.config.max_model_len, engine.config.num_positions)
        self.paging = paging.Paging(engine, self.slots) if engine.config.num_pages else None
        self._output: step_output.StepOutput | None = None  # of the last call, not yet published
        self._pending: set[sequence_lib.SequenceGroup] = set()  # requests whose future is not done
        self._lock = threading.Lock()
        self._is_closing = False
        self.is_paused = False
        self.error: BaseException | None = None  # that ended the thread
        # While released: since when, and the state of running sequences, if there are any.
        self._released: tuple[float, cpu_sub_batches.State | None] | None = None
        self.stats: dict[str, float] = {}  # never a new key: other threads copy it
        self._set_counts_to_0()
        self.prefixes = prefix_cache.PrefixCache(
            engine.config.prefill_chunk,
            prefix_cache_bytes,
            lambda slot, num_tokens: engine.read_slot(self._state, slot, num_tokens),
        )
        self._size = state_size.StateSize(engine, self.slots, self.prefixes)
        self._waiting = prefill_queue.PrefillQueue(engine, self.prefixes, self.stats)
        self._waiting.set_weights(params, version, epoch)
        self._state = engine.init_decode_state() if state is None else state
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(
        self, request: GenerateRequest, listener: sequence_lib.Listener | None = None
    ) -> "concurrent.futures.Future[list[completion_lib.Completion]]":
        """Queues a request; returns a future of its completions, one per sample. Cancelling the future frees their slots.

        `listener(sample index, completion so far)` is called after each decode call with new tokens. It must not block. A
        RuntimeError from the listener (its event loop is closed) cancels the request.

        Raises ValueError for a request that cannot be served, Overloaded if too many are pending, and Closed after `close`.
        """
        request.check(self._engine.model.vocab_size, self._engine.config.max_model_len)
        if request.routed_experts and not self._engine.config.routed_experts:
            found = "return_routed_experts = true, but this server does not record routed experts"
            raise ValueError(
                f"{found}. Start it with --routed_experts on a model that has experts, or leave the field out"
            )
        if request.kept_tokens and not 0 < (request.top_k or self._engine.model.vocab_size) <= self._engine.num_kept:
            found = f"return_kept_tokens = true and top_k = {request.top_k}, but this server records {self._engine.num_kept} tokens"
            raise ValueError(f"{found}; send a smaller top_k, or start the server with a larger --kept_tokens")
        group = sequence_lib.SequenceGroup(request, concurrent.futures.Future(), listener, time.monotonic())
        self._put(group)
        group.future.add_done_callback(functools.partial(self._ended, group))
        return group.future

    def update(
        self,
        params: transformer.Params | Callable[[transformer.Params], transformer.Params],
        version: int,
        epoch: int = 0,
    ) -> "concurrent.futures.Future[int]":
        """Replaces the weights before the next decode call, also for running sequences. Raises Closed after `close`.

        `params` is the new weights, or a function that makes them between two calls and may delete its argument, the weights in use. An
        error of that function ends the thread: no weights are left.

        Requests pinned to the old version are finished first; those left after PIN_WAIT_S seconds, or during a pause, fail with
        VersionGone. If the weights are of another epoch, all requests fail so immediately. Returns a future that is set to `version`
        once the new weights are in use.
        """
        update = messages.Update(params, version, epoch, time.monotonic() + PIN_WAIT_S)
        self._put(update)
        return update.future

    def pause(self, *, clear_prefixes: bool = False) -> concurrent.futures.Future:
        """Pauses decoding; sequences keep their keys. With `clear_prefixes`, empties the prefix cache. Returns a future set once no decode call runs."""
        return self._send(functools.partial(self._set_paused, True, clear_prefixes))

    def resume(self) -> concurrent.futures.Future:
        """Continues decoding after `pause`. Returns a future that is set once the scheduler has resumed."""
        return self._send(functools.partial(self._set_paused, False, False))

    def release(self) -> concurrent.futures.Future:
        """Pauses decoding, and frees the device memory of the decode state, of the prefix cache, and of prompts without a slot.

        Running sequences keep their state in host memory until `reclaim`. Returns a future that is set once no decode call runs.
        """
        return self._send(self._release)

    def reclaim(self) -> concurrent.futures.Future:
        """Continues decoding after `release`, bit for bit as without it. Returns a future that is set once the memory is taken."""
        return self._send(self._reclaim)

    def between_calls(self, action: Callable[[set[int]], object]) -> concurrent.futures.Future:
        """Calls `action` with the numbers of the adapters that requests use; returns a future that is set then, also to its ValueError or KeyError."""
        return self._send(lambda: action({group.request.adapter for group in self._groups()}))

    def forget_counts(self) -> concurrent.futures.Future:
        """Sets the metrics of requests back to 0, as after a warm-up. Returns a future that is set once this is done."""
        return self._send(self._set_counts_to_0)

    def close(self, drain_s: float = 0.0) -> None:
        """Rejects new requests, waits up to `drain_s` seconds for pending ones, fails the rest, and blocks until the thread has ended."""
        with self._lock:
            self._is_closing = True
        deadline = time.monotonic() + drain_s
        while self.num_pending and self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        self._inbox.put(_STOP)
        self._thread.join()

    def join(self) -> BaseException | None:
        """Blocks until the scheduler's thread has ended; returns the error that ended it, or None after `close`."""
        self._thread.join()
        return self.error

    @property
    def is_released(self) -> bool:
        """True between `release` and `reclaim`."""
        return self._released is not None

    @property
    def num_pending(self) -> int:
        """The number of requests whose future is not done."""
        return len(self._pending)

    @property
    def num_waiting(self) -> int:
        """The number of samples of pending requests that have no slot yet, or had to leave it."""
        with self._lock:
            return sum(one.request.num_samples - one.num_started for one in self._pending) + len(self.paging or ())

    @property
    def is_alive(self) -> bool:
        """True until the scheduler's thread has ended, by `close` or by an error."""
        return self._thread.is_alive()

    def _send(self, action: Callable[[], object]) -> concurrent.futures.Future:
        """Queues `action` for the scheduler's thread; returns a future of the policy version after the action."""
        message = messages.Action(action)
        self._put(message)
        return message.future

    def _put(self, message: "sequence_lib.SequenceGroup | messages.Update | messages.Action") -> None:
        with self._lock:  # once _is_closing is set, the thread empties the inbox a last time
            if self._is_closing:
                raise _shutting_down()
            if isinstance(message, sequence_lib.SequenceGroup):
                if (count := len(self._pending)) >= self._max_queue:
                    found = f"{count} requests are pending, the most that this server accepts"
                    raise Overloaded(f"{found}; try again later")
                self._pending.add(message)
            self._inbox.put(message)

    def _ended(self, group: sequence_lib.SequenceGroup, future: concurrent.futures.Future) -> None:
        self.seconds["e2e_request_latency"].observe(time.monotonic() - group.submitted_s)
        self.stats["requests"] += not future.cancelled() and future.exception() is None
        with self._lock:
            self._pending.discard(group)
        if future.cancelled():
            self._inbox.put(_WAKE)  # a paused thread would keep the request otherwise

    # All methods below run on the scheduler's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.error = error
            raise
        finally:  # an error in the engine fails every request, so that no caller waits forever; then the thread ends
            with self._lock:
                self._is_closing = True
            self._fail_all(Closed("the server stopped before the request was finished; send the request elsewhere"))
            while not self._inbox.empty():
                message = self._inbox.get()
                if message is not _STOP and message is not _WAKE:
                    sequence_lib.fail(message.future, _shutting_down())
            for update in self._updates:
                sequence_lib.fail(update.future, _shutting_down())

    def _turn(self) -> bool:
        """Runs one turn of the scheduler thread's loop: messages, prefill, one decode call. Returns False if the loop should end."""
        is_empty = self.is_paused or not (self._waiting or self.slots.running or self.paging)
        is_idle = self.is_released or (is_empty and not self._updates)
        if is_idle:
            self._publish()
        if not self._read_messages(is_idle):
            self._publish()
            return False
        if self.is_released:
            return True
        self._drop_done()
        self._set_weights()
        if self.is_paused:
            return True
        try:
            self._waiting.begin_step()
            if self._engine.follows_load:  # its calls block, and the state that the output refers to may be replaced
                self._publish()
            self._start_sequences()
            if self.slots.running:
                self._decode()
            else:
                self._publish()
        except jax.errors.JaxRuntimeError as error:  # out of memory, or a lost device; the donated state is gone
            self.stats["faults"] += 1
            self._publish()
            self._fail_all(Fault(f"the device failed during this request; send the request again: {error}"))
            self.prefixes.clear()
            self._state = self._engine.init_decode_state()
        return True

    def _read_messages(self, is_idle: bool) -> bool:
        """Handles all messages in the inbox; an idle thread waits for the first. Returns False after the message to stop."""
        self._arrivals.reopen()
        wait_s = None if is_idle else 0.0
        while True:
            try:
                message = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                return True
            wait_s = 0.0
            if message is _STOP:
                return False
            if isinstance(message, messages.Update):
                self._updates.append(message)
            elif isinstance(message, sequence_lib.SequenceGroup):
                if (error := self._refusal(message.request)) is not None:
                    sequence_lib.fail(message.future, error)
                    continue
                self._waiting.add(message)
                window_s = self._arrivals.add(message.request.num_samples, time.monotonic())
                wait_s = window_s if is_idle and not self.is_paused else 0.0
            elif isinstance(message, messages.Action):
                message.run(self.version)

    def _refusal(self, request: GenerateRequest) -> Exception | None:
        """Returns the error of a request that weights in use, or those that come next, cannot serve; None for any other."""
        pending = self._updates[-1] if self._updates else None
        version, epoch = (pending.version, pending.epoch) if pending else (self.version, self.epoch)
        is_pinned = request.policy_version >= 0
        if (is_pinned and (pending or request.policy_version != version)) or request.policy_epoch not in (-1, epoch):
            return _gone(request, version, epoch)
        adapters = self._engine.adapters
        if request.adapter >= 0 and (adapters is None or request.adapter not in adapters.numbers.values()):
            return ValueError("the adapter was unloaded; name another model")
        return None

    def _set_weights(self) -> None:
        """Puts new weights in use unless requests pinned to the old version still run; fails these after the time limit.

        Of another epoch, they end all requests: a version number names one policy within an epoch only.
        """
        if not self._updates:
            return
        begins_epoch = any(update.epoch != self.epoch for update in self._updates)
        groups = [group for group in self._groups() if not group.future.done()]
        pinned = [group for group in groups if begins_epoch or group.request.policy_version >= 0]
        is_early = not self.is_paused and time.monotonic() < self._updates[0].deadline_s
        if pinned and is_early and not begins_epoch:
            return
        for group in pinned:
            sequence_lib.fail(group.future, _gone(group.request, self._updates[-1].version, self._updates[-1].epoch))
        self._drop_done()
        for update in self._updates:
            if update.future.set_running_or_notify_cancel():  # not cancelled meanwhile
                try:
                    self._params = update.params(self._params) if callable(update.params) else update.params
                except BaseException as error:
                    update.future.set_exception(error)
                    raise
                self.version, self.epoch = update.version, update.epoch
                self._waiting.set_weights(self._params, update.version, update.epoch)
                self.stats["weight_updates"] += 1
                update.future.set_result(update.version)
        self._updates.clear()

    def _set_counts_to_0(self) -> None:
        self.stats.update(dict.fromkeys(_STATS.split(), 0))
        self.seconds: dict[str, prometheus_client.Histogram] = {
            name: role_metrics.latency(f"vllm:{name}", text) for name, text in _LATENCIES.items()
        }

    def _set_paused(self, is_paused: bool, clear_prefixes: bool) -> None:
        self.is_paused = is_paused
        if clear_prefixes:
            self.prefixes.clear()

    def _release(self) -> None:
        if self._released is None:
            self._publish()  # it refers to the state
            self._waiting.release()
            kept = engine_lib.moved(self._state, engine_lib.HOST) if self.slots.running else None
            self._state, self._released = (), (time.monotonic(), kept)

    def _reclaim(self) -> None:
        if self._released is None:
            return
        since_s, state = self._released
        self._state = self._engine.init_decode_state() if state is None else engine_lib.moved(state, engine_lib.DEVICE)
        for update in self._updates:  # their requests did not run meanwhile
            update.deadline_s += time.monotonic() - since_s
        self._released = None

    def _drop_done(self) -> None:
        """Removes requests that were cancelled or failed, from the queue and from slots."""
        self._waiting.drop_done()
        if dropped := [slot for slot, sequence in self.slots.running if sequence.group.future.done()]:
            self.stats["aborted"] += len(dropped)
            self._deactivate(dropped)
            for slot in dropped:
                self._release_slot(slot)
        if self.paging is not None:
            self.stats["aborted"] += self.paging.drop_done()

    def _groups(self) -> Iterator[sequence_lib.SequenceGroup]:
        """Yields the requests that are in slots or wait; one with samples here and there more than once."""
        yield from (*self.slots.groups, *self._waiting, *(self.paging.groups if self.paging else ()))

    def _release_slot(self, slot: int) -> None:
        self.slots.release(slot)
        if self.paging is not None:
            self.paging.pages.release(slot)

    def _deactivate(self, slots: list[int]) -> None:
        """Stops decoding in the given slots on the device."""
        self._state = self._engine.deactivate(self._state, _pad(slots, self._num_slots, fill=self._num_slots))

    def _start_sequences(self) -> None:
        """Fills the free slots from the prefill queue, with one insert call for all prompts of one prefill."""
        fits = None
        if self.paging is not None:
            self._state, fits = self.paging.resume(self._state), self.paging.fits
        free = self.slots.free if self.paging is None else self.paging.pages.by_part(self.slots.free)
        free = collections.deque(free)
        started: dict[int, list[tuple[int, sequence_lib.Sample]]] = collections.defaultdict(list)
        while free and (sequence := self._waiting.next(max(1, self._num_slots // 2), fits)):
            slot = free.popleft()
            self.prefixes.take(slot)
            sequence.completion.epoch, sequence.begun_s = self.epoch, time.monotonic()
            if sequence.index == 0:
                self.seconds["request_queue_time"].observe(sequence.begun_s - sequence.group.submitted_s)
            self.slots.put(slot, sequence)
            if self.paging is not None:
                self.paging.admit(slot, sequence.group)
            started[id(sequence.group.prefix)].append((slot, sequence))
        if num_new := sum(map(len, started.values())):
            self._state = self._size.grown(self._state, num_new)
        for pairs in started.values():
            slots, sequences = zip(*pairs, strict=True)
            size = next(size for size in self._engine.insert_sizes if size >= len(slots))
            prefix, rows = sequences[0].group.prefix, [sequence.group.row for sequence in sequences]
            if self.paging is not None:
                self._state = self.paging.insert(prefix, self._state, [*zip(slots, rows, strict=True)])
            self._state = self._engine.insert_batch(
                prefix,
                _pad(rows, size, fill=0),
                self._state,
                _pad(slots, size, fill=self._num_slots),
                decode_state.request_arrays([sequence.seeded_request for sequence in sequences], size),
            )
            for group in {sequence.group for sequence in sequences}:
                if group.num_started == group.request.num_samples:
                    group.drop_keys()

    def _decode(self) -> None:
        """Runs one decode call; publishes the output of the previous call meanwhile, then collects the output of this call."""
        self._state = self._size.grown(self._size.shrunk(self._state))
        begun = time.perf_counter()
        is_likely = self._arrivals.is_next_likely(time.monotonic())
        steps_per_call, is_waiting = self._engine.config.steps_per_call, bool(self._waiting or self.paging)
        num_steps = self.slots.num_steps(steps_per_call, is_any_waiting=is_waiting, is_request_likely=is_likely)
        table = None
        if self.paging is not None:
            if preempted := self.paging.make_room(self._state, num_steps):
                self.stats["num_preemptions"] += len(preempted)
                self._deactivate(preempted)
            table = self.paging.pages.table.copy()  # the call may read it after the next change
        numbers = [adapter_set.NONE] * self._engine.sizes(self._state)[0]
        for slot, sequence in self.slots.running:
            numbers[slot] = sequence.group.request.adapter
        params = self._engine.choose(self._params, numbers)
        self._state, result = self._engine.generate(params, self._state, num_steps, table)
        self._publish()
        result = self._engine.read(result)
        self.stats["generate_calls"] += 1
        self.stats["decode_steps"] += int(result.counts.max())
        self.stats["decode_s"] += time.perf_counter() - begun
        output = step_output.StepOutput(self._engine, self._state, result, self.slots.running, self._fail)
        output.collect(self.version)
        self.stats["tokens"] += output.num_tokens
        now_s = time.monotonic()
        for sequence in output.started:
            self.seconds["time_to_first_token"].observe(now_s - sequence.group.submitted_s)
        for _, sequence in output.finished:
            seconds = (now_s - sequence.begun_s) / len(sequence.completion.tokens)
            self.seconds["request_time_per_output_token"].observe(seconds)
        if output.unseen_ends:
            self._deactivate(output.unseen_ends)
        for slot, sequence in output.finished:
            self._waiting.keep(slot, sequence)
            self._release_slot(slot)
        self._output = output

    def _publish(self) -> None:
        """Publishes the output of the last decode call (proofs, listeners, futures), unless it is already published."""
        if self._output is not None:
            self.stats["samples"] += len(self._output.finished)  # first: a client may read it after its future
            self._output.publish()
            self._output = None

    def _fail(self, group: sequence_lib.SequenceGroup, reason: str) -> None:
        """Fails a request with a `Fault` that has this reason. The next turn frees the request's slots."""
        self.stats["faults"] += 1
        sequence_lib.fail(group.future, Fault(reason))

    def _fail_all(self, error: Exception) -> None:
        finished = [sequence.group for _, sequence in self._output.finished] if self._output else []
        for group in (*self._groups(), *finished):
            sequence_lib.fail(group.future, error)
        self.slots.clear()
        if self.paging is not None:
            self.paging = paging.Paging(self._engine, self.slots)
        self._waiting.drop_done()
        self._output = None


def _pad(values: Sequence[int], size: int, *, fill: int) -> np.ndarray:
    """Returns int32 [size]: the values, then `fill`. The fixed size avoids compiling a program twice."""
    return np.array([*values, *[fill] * (size - len(values))], np.int32)


def _gone(request: GenerateRequest, version: int, epoch: int) -> VersionGone:
    pins = (("version", request.policy_version), ("epoch", request.policy_epoch))
    wanted = " of ".join(f"policy {name} {pin}" for name, pin in pins if pin >= 0) or "any policy"
    found = f"{wanted} was requested, and this server has version {version} of epoch {epoch}"
    return VersionGone(f"{found}, or will have it next; send the request to another server")


def _shutting_down() -> Closed:
    return Closed("the server is shutting down; send the request to another server")
