"""A request on its way through the scheduler: `SequenceGroup`, the request, and `Sequence`, one of its completions in a slot."""

import concurrent.futures
import dataclasses
from collections import abc

import numpy as np

from inference.engine import decode_state as state_lib
from inference.engine import request as request_lib
from models.text import tokenizer as tokenizer_lib

Listener = abc.Callable[
    [int, request_lib.Completion], None
]  # (sample index, the completion so far), on the scheduler's thread


@dataclasses.dataclass(eq=False)
class SequenceGroup:
    """Waiting, then ready with its prefilled prompt (`row` of `prefix`), then with samples in slots."""

    request: request_lib.GenerateRequest
    future: concurrent.futures.Future
    listener: Listener | None
    completions: list[request_lib.Completion | None]
    submitted_s: float
    prefix: state_lib.Prefix | None = None
    row: int = 0
    prompt_version: int = 0
    prompt_logprobs: list[float] | None = None
    num_cached: int = 0
    num_started: int = 0
    num_running: int = 0


@dataclasses.dataclass(eq=False)
class Sequence:
    """A sample in a slot."""

    group: SequenceGroup
    index: int
    completion: request_lib.Completion
    text: tokenizer_lib.TextStream | None  # of what was generated, where a stop string is looked for
    tail: str = ""  # of that text, as long as the longest stop string
    proofs: list[bytes] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)  # [.., L, X] of each call

    def num_left(self, max_model_len: int) -> int:
        """New tokens after which this sample ends in any case."""
        request = self.group.request
        return min(request.max_tokens, max_model_len - len(request.tokens)) - len(self.completion.tokens)

    def take(self, tokens: list[int], logprobs: list[float], version: int, max_model_len: int) -> bool:
        """Adds the new tokens up to where the sample ends; True if the device would go on behind that."""
        request, completion = self.group.request, self.completion
        end, stopped = len(tokens), False
        if request.stop_texts or len(request.stop_ids) > state_lib.MAX_STOP_IDS:
            end, stopped = self._first_stop(tokens)
        elif tokens:
            stopped = tokens[-1] in request.stop_ids
        completion.tokens += tokens[:end]
        completion.logprobs += logprobs[:end]
        completion.versions += [version] * end
        is_full = self.num_left(max_model_len) <= 0
        if stopped:
            completion.finish_reason = "stop"
        elif is_full:
            completion.finish_reason = "length"
        by_device = bool(completion.tokens) and completion.tokens[-1] in request.stop_ids[: state_lib.MAX_STOP_IDS]
        return bool(completion.finish_reason) and not by_device and not is_full

    def take_top(self, ids: np.ndarray, logps: np.ndarray) -> None:
        """Adds the likeliest tokens of the new positions; both [tokens, MAX_TOP]."""
        num = self.group.request.top_logprobs
        for row_ids, row_logps in zip(ids[:, :num].tolist(), logps[:, :num].tolist(), strict=True):
            pairs = zip(row_ids, row_logps, strict=True)
            self.completion.top.append([(token, logp) for token, logp in pairs if logp > -np.inf])

    def _first_stop(self, tokens: abc.Sequence[int]) -> tuple[int, bool]:
        """How many of the tokens belong to the sample, and whether the last of them stops it."""
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
