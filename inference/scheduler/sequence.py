"""A request while the scheduler works on it (`SequenceGroup`), and one of its samples in a slot (`Sample`)."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from inference.engine import decode_state
from inference.engine import request as request_lib
from inference.rollouts import completion as completion_lib
from inference.rollouts import kept_sets
from inference.scheduler import prefix_cache
from models import config as config_lib
from models import routed_experts
from models.text import tokenizer as tokenizer_lib

# Called on the scheduler's thread with the index of a sample and its completion so far.
Listener = Callable[[int, completion_lib.Completion], None]


@dataclasses.dataclass(eq=False)
class SequenceGroup:
    """A request in the scheduler, with its samples.

    The request waits in the prefill queue and is ready once its prompt is in `row` of `prefix`. Then its samples get slots.
    """

    request: request_lib.GenerateRequest
    future: concurrent.futures.Future
    listener: Listener | None
    submitted_s: float
    completions: dict[int, completion_lib.Completion] = dataclasses.field(default_factory=dict)  # finished, by sample
    prefix: decode_state.Prefix = dataclasses.field(init=False)
    row: int = 0
    # The number of the weights, the adapter, and the tokens: equal for two prompts if their keys and values are equal, bit for bit.
    prompt_key: tuple[int, int, tuple[int, ...]] | None = None
    prompt_version: int = 0
    prompt_logprobs: list[float] | None = None
    num_cached: int = 0
    prefix_runs: prefix_cache.Runs = ()  # (end, version) of the reused keys of older versions
    num_prefilled: int = 0  # tokens of the prompt whose keys are surely not of sampled tokens
    num_started: int = 0
    num_running: int = 0

    def start_next(self, text: tokenizer_lib.TextStream | None) -> "Sample":
        """Creates the request's next sample and returns it, with no tokens yet. `text` decodes tokens to find stop strings, if any."""
        completion = completion_lib.Completion([], [], [], self.prompt_version, num_cached=self.num_cached)
        completion.prompt_logprobs, completion.prefix_versions = self.prompt_logprobs, self.prefix_runs
        sample = Sample(self, self.num_started, completion, text)
        self.num_started += 1
        self.num_running += 1
        return sample

    def drop_keys(self) -> None:
        """Frees the prompt's keys and values, of which the slots of all samples have copies, or which will be computed again."""
        self.prefix = dataclasses.replace(self.prefix, cache=None)


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample of a request, which runs in a slot. The seed of sample i is the request's seed + i (mod 2^32)."""

    group: SequenceGroup
    index: int
    completion: completion_lib.Completion
    text: tokenizer_lib.TextStream | None  # decodes the generated tokens; None without stop strings
    begun_s: float = 0.0  # when it got its slot
    tail: str = ""  # the end of the decoded text, as long as the longest stop string
    proofs: list[bytes] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)  # [.., L, X] of each call
    kept: list[np.ndarray] = dataclasses.field(default_factory=list)  # [.., W] of each call

    @property
    def seeded_request(self) -> request_lib.GenerateRequest:
        """The group's request with the seed replaced by this sample's own."""
        return dataclasses.replace(self.group.request, seed=self.group.request.seed_of(self.index))

    def num_left(self, max_model_len: int) -> int:
        """Returns the most tokens that this sequence can still generate: up to `max_tokens` or the context length."""
        request = self.group.request
        return min(request.max_tokens, max_model_len - len(request.tokens)) - len(self.completion.tokens)

    def append(self, tokens: list[int], logprobs: list[float], version: int, max_model_len: int) -> bool:
        """Adds new tokens sampled by policy `version`. If the sequence ends, drops later tokens and sets its finish reason.

        Returns True if the sequence ended but the device would continue, because it cannot detect this stop: a stop string, or
        a stop id after the first `MAX_STOP_IDS`.
        """
        request, completion = self.group.request, self.completion
        if request.stop_texts or len(request.stop_ids) > decode_state.MAX_STOP_IDS:
            end, stopped = self._first_stop(tokens)
        else:
            end, stopped = len(tokens), tokens[-1] in request.stop_ids
        completion.tokens += tokens[:end]
        completion.logprobs += logprobs[:end]
        completion.versions += [version] * end
        is_full = self.num_left(max_model_len) <= 0
        if stopped or is_full:
            completion.finish_reason = "stop" if stopped else "length"
        on_device = completion.tokens[-1] in request.stop_ids[: decode_state.MAX_STOP_IDS]
        return bool(completion.finish_reason) and not on_device and not is_full

    def runs(self) -> prefix_cache.Runs:
        """Returns which policy versions computed the keys of this sequence, as (end, version) in order. The last token has no key."""
        group, versions = self.group, self.completion.versions
        num_prompt = len(group.request.tokens) - 1  # the last one's are computed again by the first decode step
        found = [*group.prefix_runs, (num_prompt, group.prompt_version)]
        found += [(num_prompt + at + 1, version) for at, version in enumerate(versions)]
        return prefix_cache.joined_runs(found)

    def append_top(self, ids: np.ndarray, logps: np.ndarray) -> None:
        """Adds the likeliest alternatives at each new token to the completion; both arrays are [tokens, MAX_TOP]."""
        num = self.group.request.top_logprobs
        for row_ids, row_logps in zip(ids[:, :num].tolist(), logps[:, :num].tolist(), strict=True):
            pairs = zip(row_ids, row_logps, strict=True)
            self.completion.top.append([(token, logp) for token, logp in pairs if logp > -np.inf])

    def join_parts(self, model: config_lib.ModelConfig) -> None:
        """Adds the proofs, experts, and kept sets of all calls to the finished completion of `model`."""
        request = self.group.request
        self.completion.proofs = b"".join(self.proofs)
        if request.routed_experts:
            prompt = self.group.prefix.experts, self.group.row, len(request.tokens)
            experts_TLX = routed_experts.of_sequence(*prompt, self.experts)
            self.completion.experts = routed_experts.with_all_layers(experts_TLX, model)
        if request.kept_tokens:
            self.completion.kept = kept_sets.encode(np.concatenate(self.kept))

    def finish(self) -> None:
        """Adds the finished completion to its request. With the last sample, sets the request's future to all completions."""
        group = self.group
        group.completions[self.index] = self.completion
        if len(group.completions) == group.request.num_samples:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled, or failed by another sample
                group.future.set_result([group.completions[index] for index in range(group.request.num_samples)])

    def _first_stop(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Returns (number of tokens up to the first stop, True if there is a stop); all tokens without a stop."""
        request = self.group.request
        longest = max(map(len, request.stop_texts), default=0)
        for at, token in enumerate(tokens):
            if token in request.stop_ids:
                return at + 1, True
            if self.text is not None:
                self.tail += self.text.push([token])
                if any(stop in self.tail for stop in request.stop_texts):
                    return at + 1, True
                self.tail = self.tail[-longest:]
        return len(tokens), False


def fail(future: concurrent.futures.Future, error: Exception) -> None:
    """Sets `error` as the result of a future. Does nothing if the future is done or cancelled."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_exception(error)
