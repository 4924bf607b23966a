"""The output of one decode call: new tokens for each running sequence, then proofs and finished requests.

1. `StepOutput` appends the call's tokens, log-probabilities and version stamps to the sequences, and finds those that ended.
   The next call can start after that.
2. `publish` does the rest while the next call runs: proofs, listeners, finished samples.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from inference.engine import compiled_steps
from inference.engine import engine as engine_lib
from inference.proofs import toploc
from inference.proofs import window as proof_window
from inference.scheduler import sequence as sequence_lib


@dataclasses.dataclass(eq=False)
class StepOutput:
    """The output of one decode call: `collect` adds its tokens to the running sequences, `publish` completes their requests."""

    engine: engine_lib.Engine
    state: engine_lib.State
    result: compiled_steps.StepResult  # as `Engine.read` returns it
    running: Sequence[tuple[int, sequence_lib.Sample]]  # (slot, sequence)
    fail: Callable[[sequence_lib.SequenceGroup, str], None]  # ends a request with the reason
    num_tokens: int = 0
    started: list[sequence_lib.Sample] = dataclasses.field(default_factory=list)  # they got their first token
    finished: list[tuple[int, sequence_lib.Sample]] = dataclasses.field(default_factory=list)
    unseen_ends: list[int] = dataclasses.field(default_factory=list)  # slots of ends that the device cannot detect
    windows: list[tuple] = dataclasses.field(default_factory=list)  # to prove: (sequence, size, indices, bits)

    def collect(self, version: int) -> None:
        """Appends the call's tokens, sampled by policy `version`, to their sequences.

        A sequence with a log-probability that is not finite, or without a new token, fails its request.
        """
        result, counts = self.result, self.result.counts
        is_finite = np.logical_and.reduce(np.isfinite(result.logprobs), axis=1)
        for slot, sequence in self.running:
            request, completion, count = sequence.group.request, sequence.completion, int(counts[slot])
            if not is_finite[slot]:
                found = "a log-probability is not finite: broken weights or an overflow"
                self.fail(sequence.group, f"{found}; check the weights")
                continue
            if count == 0:  # without this, the request would never end
                self.fail(sequence.group, "the engine returned no token for a slot in use; send the request again")
                continue
            before = len(completion.tokens)
            tokens, logprobs = result.tokens[slot, :count].tolist(), result.logprobs[slot, :count].tolist()
            is_end_unseen = sequence.append(tokens, logprobs, version, self.engine.config.max_model_len)
            num_new = len(completion.tokens) - before
            self.num_tokens += num_new
            if before == 0:
                self.started.append(sequence)
            # Columns that no request wants are not fetched; np.asarray copies an array from the device once.
            if request.raw_logprobs:
                completion.raw_logprobs += np.asarray(result.raw_logprobs)[slot, :num_new].tolist()
            if request.top_logprobs:
                ids, logprobs = np.asarray(result.top_ids), np.asarray(result.top_logprobs)
                sequence.append_top(ids[slot, :num_new], logprobs[slot, :num_new])
            if request.routed_experts:
                sequence.experts.append(np.asarray(result.experts)[slot, :num_new])
            if request.kept_tokens:
                sequence.kept.append(np.asarray(result.kept)[slot, :num_new])
            if completion.finish_reason:
                self.finished.append((slot, sequence))
            if is_end_unseen:
                self.unseen_ends.append(slot)
            if request.proofs:
                self._add_windows(slot, sequence, before, is_end_unseen)

    def publish(self) -> None:
        """Makes the proofs, calls the listeners, and completes the futures of finished requests. Without a proof, a request fails."""
        if self.windows:  # all of a call together: 512 proofs of 7 x 128 values take 0.65 s one by one
            # A short window of a small model has fewer than k values; indices after these are padding.
            tops = [(indices[indices < size], bits[indices < size]) for _, size, indices, bits in self.windows]
            for (sequence, *_), proof in zip(self.windows, toploc.encode(tops), strict=True):
                sequence.proofs.append(proof)
                if not proof:
                    self.fail(sequence.group, "a hidden state is not finite, so it has no proof; check the weights")
        for _, sequence in self.finished:
            sequence.join_parts(self.engine.model)
        # Before a future is set: a streaming client must not see the end before the last piece.
        for _, sequence in self.running:
            if sequence.group.listener is not None:
                try:
                    sequence.group.listener(sequence.index, sequence.completion)
                except RuntimeError:  # its event loop is closed
                    sequence.group.future.cancel()
        for _, sequence in self.finished:
            sequence.finish()

    def _add_windows(self, slot: int, sequence: sequence_lib.Sample, before: int, is_end_unseen: bool) -> None:
        """Adds the proof window that a sequence filled after its first `before` tokens, and the partly filled one at its end."""
        size, after = proof_window.WINDOW, len(sequence.completion.tokens)
        whole = size if after // size > before // size else 0
        rest = after % size if sequence.completion.finish_reason else 0
        for which, num_rows in enumerate((whole, rest)):
            if not num_rows:
                continue
            if which == 1 and is_end_unseen:  # so the device has not reduced this window
                indices, bits = self.engine.top_values(self.state, slot, after // size, num_rows)
            else:
                indices = np.asarray(self.result.proof_indices)[slot, which]
                bits = np.asarray(self.result.proof_bits)[slot, which]
            self.windows.append((sequence, num_rows * self.engine.model.model_dim, indices, bits))
