"""A request to the scheduler: plain values, independent of wire formats and devices."""

import dataclasses
from collections.abc import Sequence

MAX_STOPS = 64  # stop ids, and stop strings, of a request
MAX_DELAYED_STOPS = 8  # stop ids that the device knows
MAX_BIAS = 300  # entries of a logit bias, as in OpenAI's API; and allowed ids
MAX_TOP = 20  # alternatives reported per token, as in OpenAI's API


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """A request to the scheduler for `num_samples` completions of one prompt; sample i uses seed + i (mod 2^32)."""

    tokens: Sequence[int]
    num_samples: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()  # the completion ends with the token that completes one of them
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    allowed_ids: tuple[int, ...] = ()  # no other token is sampled; (): all may be
    min_tokens: int = 0  # no stop id is sampled before so many tokens
    proofs: bool = False
    raw_logprobs: bool = False  # also under softmax(logits), untempered and unfiltered
    top_logprobs: int = 0  # likeliest alternatives per token
    prompt_logprobs: bool = False
    routed_experts: bool = False  # the experts that each token was routed to; the engine must record them
    kept_tokens: bool = False  # the tokens that the filters left to sample from; the engine must record them
    policy_version: int = -1  # the only one that may generate; -1: any, also several in turn
    policy_epoch: int = -1  # of every version that may generate; -1: any
    oldest_prefix_version: int = -1  # of keys of the prompt that may be reused; -1: only those of the version in use
    adapter: int = -1  # a number of `Engine.adapters`; -1: none, the model itself

    def seed_of(self, index: int) -> int:
        """Returns the seed of sample `index`."""
        return (self.seed + index) % 2**32

    def check(self, vocab: int, max_len: int) -> None:
        """Raises ValueError if this request is invalid for a model with `vocab` tokens and a context of `max_len` positions."""
        if not self.tokens:
            raise ValueError("token_ids is empty; a prompt needs at least one token")
        if len(self.tokens) >= max_len:
            found = f"this model's maximum context length is {max_len} tokens, but the prompt has {len(self.tokens)}"
            raise ValueError(f"{found}; shorten it")
        biased, biases = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        named = ("token", self.tokens), ("stop token", self.stop_ids), ("logit_bias token", biased)
        for name, ids in (*named, ("allowed token", self.allowed_ids)):
            if bad := [token for token in ids if not 0 <= token < vocab]:
                found = f"{name} id {bad[0]} is outside the vocabulary of {vocab} entries"
                raise ValueError(f"{found}; use ids of the model's tokenizer")
        for name, values, most in (
            ("stop token ids", self.stop_ids, MAX_STOPS),
            ("stop strings", self.stop_texts, MAX_STOPS),
            ("logit_bias entries", self.logit_bias, MAX_BIAS),
            ("allowed_token_ids", self.allowed_ids, MAX_BIAS),
        ):
            if len(values) > most:
                raise ValueError(f"{len(values)} {name} given; at most {most} are allowed, so leave some out")
        if not all(self.stop_texts):
            raise ValueError("a stop string is empty; each needs at least one character, so leave the empty one out")
        if bad := [value for value in biases if not -100 <= value <= 100]:
            raise ValueError(f"a logit_bias must be in -100..100; got {bad[0]}. Set it within these limits")
        self._check_changes()
        # float32 logits divided by less than 1e-6 overflow to inf, and inf - inf is NaN
        is_temperature_ok = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6
        oldest = self.oldest_prefix_version
        for name, value, ok, rule in (
            ("n", self.num_samples, 1 <= self.num_samples <= 1024, "in 1..1024"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "in 0..max_tokens"),
            ("temperature", self.temperature, is_temperature_ok, "0, or in 1e-6..1e6"),
            ("top_k", self.top_k, 0 <= self.top_k < 2**31, "in 0..2^31 - 1, or -1 for off"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", self.seed, 0 <= self.seed < 2**32, "in 0..2^32 - 1"),
            ("oldest_prefix_version", oldest, -1 <= oldest < 2**31, "-1, or in 0..2^31 - 1"),
            ("top_logprobs", self.top_logprobs, 0 <= self.top_logprobs <= MAX_TOP, f"in 0..{MAX_TOP}"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {rule}; got {value}. Set it to an allowed value")

    def _check_changes(self) -> None:
        """Raises ValueError if changes of the sampling distribution contradict each other, or the proofs."""
        changes = {"logit_bias": self.logit_bias, "allowed_token_ids": self.allowed_ids, "min_tokens": self.min_tokens}
        if self.proofs and (given := [name for name, value in changes.items() if value]):
            rule = "changes the sampling distribution, and rollouts do not record it: no replay could check the tokens"
            raise ValueError(f"proofs = true, but {given[0]} {rule}; leave one of them out")
        if not self.min_tokens:
            return
        if self.stop_texts:
            raise ValueError(f"min_tokens = {self.min_tokens} does not delay stop strings; leave one of them out")
        if len(self.stop_ids) > MAX_DELAYED_STOPS:
            found = f"min_tokens = {self.min_tokens} and {len(self.stop_ids)} stop token ids"
            raise ValueError(f"{found}; at most {MAX_DELAYED_STOPS} can be delayed, so leave some out")
        if self.allowed_ids and set(self.allowed_ids) <= set(self.stop_ids):
            found = f"min_tokens = {self.min_tokens}, but allowed_token_ids are stop tokens alone"
            raise ValueError(f"{found}; allow another token, or leave min_tokens out")
