"""The model as one episode sees it: turns messages into token IDs, asks a backend for completions, and records every call.

1. `chat` implements `rl.envs.interface.episode.Model`; `ask` is the same call with token IDs in its result, for an HTTP endpoint;
   `complete_ids` takes a prompt of token IDs.
2. Messages that continue an earlier call of the episode get the token IDs of that call unchanged, then those of the new messages
   (`Tokenizer.bridge`). All others are rendered. No sampled token is ever tokenized again.
3. A prompt that extends a stream exactly is the next call of that stream and keeps its seed. Any other prompt begins a stream, with a
   seed that follows from its content (rl/protocol/noise_seed.py). The first stream is the root, with the seed of the sample.
4. A prompt that was asked for before, with the same `number`, gets the recorded completion. So an episode can run again after its
   process has died, and equal prompts get equal completions in any order.
5. `BudgetSpent` follows from the tokens of the episode alone. One exception: a program with concurrent calls may begin calls while
   others sample the last tokens of the budget (`overlapped`).

A worker's backend asks an inference server. A validator has a tape instead (rl/envs/recording/tape.py). Imports no jax.
"""

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import numpy as np

from inference.rollouts import completion as completion_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.interface import episode
from rl.protocol import noise_seed

THINKING = ("keep", "strip")
Key = tuple[bytes, int]  # of a call
THREAD_CHARS = (
    2**16
)  # of a conversation that is tokenized in a thread: 4 MB take a second, in which no other episode would go on


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of an episode, which a run prescribes. An episode may begin calls until one of the last two is reached."""

    max_tokens: int  # of one completion
    max_model_len: int  # tokens of a prompt and its completion
    max_calls: int
    max_episode_tokens: int = 0  # sampled in all calls; the last call may exceed it; 0: no limit


@dataclasses.dataclass(frozen=True)
class Call:
    """One request to a backend."""

    prompt: list[int]
    seed: int
    max_tokens: int
    number: int = 0  # of calls with this prompt that the environment wants to differ
    oldest_version: int = 0  # of the policy: the newest one that earlier calls of the stream show
    epoch: int = -1  # of earlier calls of the stream; -1: any

    @property
    def key(self) -> Key:
        """The content by which a tape finds the completion: (SHA-256 of the prompt, number)."""
        return hashlib.sha256(np.asarray(self.prompt, "<i4").tobytes()).digest(), self.number


class InvalidMessages(ValueError):
    """Raised for messages or tools that cannot be rendered; the environment made a mistake."""


class NotOnTape(Exception):
    """Raised by a session with a tape for a call that the tape lacks."""


Backend = Callable[[Call], Awaitable[completion_lib.Completion]]


def scripted(tokenizer: tokenizer_lib.Tokenizer, reply: Callable[[Call], str]) -> Backend:
    """Returns a backend, in place of a model, that answers each call with the text `reply(call)`, encoded by `tokenizer`."""

    async def complete(call: Call) -> completion_lib.Completion:
        tokens = [*tokenizer.encode(reply(call)), tokenizer.eos_id][: call.max_tokens]
        return of_tokens(tokens, tokenizer.stop_ids)

    return complete


def of_tokens(tokens: list[int], stop_ids: Collection[int]) -> completion_lib.Completion:
    """Returns a completion of which only the tokens are known. Its finish reason is "stop" if the last token is in `stop_ids`."""
    ending = "stop" if tokens[-1] in stop_ids else "length"
    return completion_lib.Completion(tokens, [0.0] * len(tokens), [0] * len(tokens), 0, ending, b"")


@dataclasses.dataclass(frozen=True)
class Turn:
    """A call that was answered: columns [start, end) of its stream are the completion."""

    start: int
    end: int
    max_tokens: int
    sample: completion_lib.Completion


@dataclasses.dataclass(eq=False)
class Stream:
    """Calls of which each one extends the tokens of the one before: a branch of the episode."""

    seed: int
    trains: bool
    number: int  # of the first call
    tokens: np.ndarray  # int32 [T] prompts and completions
    turns: list[Turn] = dataclasses.field(default_factory=list)
    is_busy: bool = False  # while a call extends it

    def extends_to(self, prompt: np.ndarray) -> bool:
        """Returns True if a prompt has all tokens of this stream, and more."""
        size = len(self.tokens)
        may_extend = len(prompt) > size > 0 and prompt[size - 1] == self.tokens[-1]
        return may_extend and np.array_equal(prompt[:size], self.tokens)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of `Session.ask`: an assistant message, and the token IDs that it consists of."""

    message: dict
    prompt: list[int]
    sample: completion_lib.Completion


class Session:
    """The calls of one episode. All methods run in one event loop.

    Args:
      tokenizer: the policy's.
      backend: makes the completion of a call; None with a tape. Its exceptions pass through `chat`; the call may then be repeated.
      limits: limits of the episode.
      seed: the seed of the noise of the group's sample 0.
      sample: the number of the episode in its group.
      thinking: "keep" keeps the reasoning of earlier turns in the prompt, also if the environment leaves it out of the messages that
        it sends back. "strip" renders the conversation again without it at each user message, which begins a stream.
      tape: completions of the calls that a worker recorded. A call that is not among them raises NotOnTape.
      sampling: fields of the run that a program may repeat in its requests, such as the temperature.
      hold_s: seconds that each answer from the tape takes, so that calls of a program in another process overlap as they did on the
        worker.
    """

    def __init__(
        self,
        tokenizer: tokenizer_lib.Tokenizer,
        backend: Backend | None,
        limits: Limits,
        *,
        seed: int,
        sample: int,
        thinking: str = "keep",
        tape: Mapping[Key, completion_lib.Completion] | None = None,
        sampling: Mapping[str, float] | None = None,
        hold_s: float = 0.0,
    ):
        if thinking not in THINKING:
            raise ValueError(f"env.thinking = {thinking!r} is unknown; choose one of {', '.join(THINKING)}")
        self._tokenizer, self._backend, self._tape, self.limits = tokenizer, backend, tape, limits
        self._seed, self.sample, self._thinking = seed, sample, thinking
        self.sampling, self._hold_s = sampling or {}, hold_s
        self.streams: list[Stream] = []  # in the order in which they began
        # True once two calls ran at the same time; may be set from outside, where that is known
        self.overlapped = False
        # True once a call was refused for the budget that calls on the tape, not yet made here, have spent
        self.was_cut = False
        self.num_tokens = 0  # sampled
        self.cpu_s = 0.0  # of the slowest step of the program, as its host has reported so far
        # True once another machine may have ended a tool that this one did not, or the reverse
        self.has_slow_tool = False
        self._calls: dict[Key, asyncio.Future[completion_lib.Completion]] = {}
        self._asked: set[Key] = set()  # since the program began, or began again
        self._num_running = 0
        # {digest of a conversation that ends with our message: (stream, end column, number)}
        self._known: dict[bytes, tuple[Stream, int, int]] = {}
        self._places: dict[Key, tuple[Stream, int]] = {}  # {key of a call: (stream, end column)}
        self._taped_tokens = sum(len(sample.tokens) for sample in (tape or {}).values())

    @property
    def num_calls(self) -> int:
        """The number of calls that began, without repeated ones."""
        return len(self._calls)

    @property
    def root_seed(self) -> int:
        """The seed of the first stream."""
        return noise_seed.stream_seed(self._seed, self.sample, 0, ())

    def restart(self) -> None:
        """Notes that the program begins again: it must make the same calls."""
        self._asked.clear()

    def unused(self) -> list[Key]:
        """Returns the recorded calls, or those on the tape, that the program has not made since it began, or began again."""
        return [key for key in (self._calls if self._tape is None else self._tape) if key not in self._asked]

    async def chat(
        self,
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] = (),
        max_tokens: int | None = None,
        number: int = 0,
        trains: bool = True,
    ) -> episode.Reply:
        """Asks the model for the next message of a conversation, as `episode.Model.chat` describes. Raises BudgetSpent."""
        answer = await self.ask(messages, tools=tools, max_tokens=max_tokens, number=number, trains=trains)
        sample = answer.sample
        return episode.Reply(answer.message, sample.finish_reason, len(answer.prompt), len(sample.tokens))

    async def ask(
        self,
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] = (),
        variables: Mapping | None = None,
        max_tokens: int | None = None,
        number: int = 0,
        trains: bool = True,
    ) -> Answer:
        """Asks the model for the next message; `variables` are those of the chat template. Raises BudgetSpent and InvalidMessages."""
        try:
            if sum(len(str(message.get("content"))) for message in messages) > THREAD_CHARS:
                given = {"tools": tools, "variables": variables}
                prompt = await asyncio.to_thread(self.prompt_ids, messages, **given)
            else:
                prompt = self.prompt_ids(messages, tools=tools, variables=variables)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidMessages(str(error)) from error
        sample = await self.complete_ids(prompt, max_tokens=max_tokens, number=number, trains=trains)
        given = {"tools": tools or None, "read_calls": bool(tools)}
        message = self._tokenizer.parse(sample.tokens, prompt_ids=prompt, **given)
        stream, end = self._places[Call(prompt, 0, 0, number).key]
        digest = self._digest([*messages, message], tools, variables)
        if digest not in self._known or number < self._known[digest][2]:
            self._known[digest] = stream, end, number
        return Answer(message, prompt, sample)

    def prompt_ids(
        self, messages: Sequence[Mapping], *, tools: Sequence[Mapping] = (), variables: Mapping | None = None
    ) -> list[int]:
        """Returns the token IDs of a conversation. Those of earlier calls that it continues are kept. Raises ValueError for invalid messages."""
        last = next((at for at in range(len(messages), 0, -1) if messages[at - 1].get("role") == "assistant"), 0)
        tail = messages[last:]
        strips = self._thinking == "strip" and any(message.get("role") == "user" for message in tail)
        given = {"tools": list(tools) or None, "variables": variables}
        if last and tail and not strips and all(message.get("role") in ("user", "tool") for message in tail):
            if found := self._known.get(self._digest(messages[:last], tools, variables)):
                stream, end, _ = found
                start, tokens = next(turn.start for turn in stream.turns if turn.end == end), stream.tokens.tolist()
                bridged = self._tokenizer.bridge(tokens[:start], tokens[start:end], tail, **given)
                if bridged is not None:
                    return bridged
        if strips:
            messages = [{n: x for n, x in one.items() if n not in tokenizer_lib.REASONING} for one in messages]
        return list(self._tokenizer.render(messages, add_generation_prompt=True, **given).token_ids)

    async def complete_ids(
        self, prompt: Sequence[int], *, max_tokens: int | None = None, number: int = 0, trains: bool = True
    ) -> completion_lib.Completion:
        """Returns the completion of a prompt of token IDs; `number` and `trains` are those of `episode.Model.chat`. Raises BudgetSpent."""
        key = Call(list(prompt), 0, 0, number).key
        self._asked.add(key)
        if (recorded := self._calls.get(key)) is not None:
            return await recorded
        limit = min(max_tokens or self.limits.max_tokens, self.limits.max_tokens)
        self._check_budget(key, len(prompt))
        self._calls[key] = made = asyncio.get_running_loop().create_future()
        stream, is_new = self._stream_of(np.asarray(prompt, np.int32), number, trains)
        stream.is_busy, self._num_running = True, self._num_running + 1
        self.overlapped |= self._num_running > 1
        try:
            call = Call(list(prompt), stream.seed, limit, number)
            if stream.turns:
                before = stream.turns[-1].sample
                call = dataclasses.replace(call, oldest_version=max(before.all_versions()), epoch=before.epoch)
            sample = await self._answer(call)
        except BaseException:
            made.cancel()
            del self._calls[key]
            if is_new:
                self.streams.remove(stream)
            raise
        finally:
            stream.is_busy, self._num_running = False, self._num_running - 1
        start, end = len(prompt), len(prompt) + len(sample.tokens)
        stream.tokens = np.array([*prompt, *sample.tokens], np.int32)
        stream.turns.append(Turn(start, end, limit, sample))
        self._places[key] = stream, end
        self.num_tokens += len(sample.tokens)
        made.set_result(sample)
        return sample

    async def _answer(self, call: Call) -> completion_lib.Completion:
        if self._tape is None:
            assert self._backend is not None
            return await self._backend(call)
        if (sample := self._tape.get(call.key)) is None:
            number = f"call {self.num_calls} of the episode (prompt of {len(call.prompt)} tokens, number {call.number})"
            raise NotOnTape(f"the environment makes {number}, which was not recorded")
        await asyncio.sleep(self._hold_s)  # other calls that the program made at the same time begin, too
        return sample

    def _check_budget(self, key: Key, num_prompt: int) -> None:
        if num_prompt >= (most := self.limits.max_model_len):
            raise episode.BudgetSpent(f"the prompt has {num_prompt} tokens, which leave no room in a context of {most}")
        spent = self._spent(self.num_calls, self.num_tokens)
        if self._tape is not None and key in self._tape:
            if self.overlapped:  # calls that ended here may have been running when the worker made this one
                spent = self._spent(self.num_calls, 0)
        elif self._tape is not None and not spent:
            spent = self._spent(len(self._tape), self._taped_tokens)
            self.was_cut |= bool(spent)
        if spent:
            raise episode.BudgetSpent(spent)

    def _spent(self, num_calls: int, num_tokens: int) -> str:
        """Returns the reason why an episode with so many calls and sampled tokens may begin no further call, or ""."""
        limits = self.limits
        if num_calls >= limits.max_calls:
            return f"the episode has made {limits.max_calls} calls, its limit"
        is_over = 0 < limits.max_episode_tokens <= num_tokens
        return f"the episode has {num_tokens} tokens; its limit is {limits.max_episode_tokens}" if is_over else ""

    def _stream_of(self, prompt: np.ndarray, number: int, trains: bool) -> tuple[Stream, bool]:
        """Returns (the stream that a call belongs to, whether the call begins it). The longest that the prompt extends is chosen."""
        free = (one for one in self.streams if number == 0 and one.trains == trains and not one.is_busy)
        fits = [stream for stream in free if stream.extends_to(prompt)]
        if fits:
            return max(fits, key=lambda stream: len(stream.tokens)), False
        seed = noise_seed.stream_seed(self._seed, self.sample, len(self.streams), prompt, number)
        stream = Stream(seed, trains, number, np.empty(0, np.int32))
        self.streams.append(stream)
        return stream, True

    def _digest(self, messages: Sequence[Mapping], tools: Sequence[Mapping], variables: Mapping | None) -> bytes:
        """Returns a hash of a conversation, in which fields without a value do not count, nor the reasoning of "keep"."""
        dropped = tokenizer_lib.REASONING if self._thinking == "keep" else ()
        seen = [
            {name: value for name, value in message.items() if value not in (None, "", []) and name not in dropped}
            for message in messages
        ]
        return hashlib.sha256(json.dumps([seen, [*tools], variables or {}], sort_keys=True).encode()).digest()
