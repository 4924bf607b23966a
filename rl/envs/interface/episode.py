'''Defines an episode: the program of an environment that calls the model as often as it likes, and returns scores.

    >>> async def play(task, model):
    ...     """Asks for a number between 1 and 7 until it is `task.answer`, three times at most."""
    ...     messages = [*task.messages]
    ...     for turn in range(3):
    ...         reply = await model.chat(messages)
    ...         if reply.text.strip() == task.answer:
    ...             return {"reward": 1.0 / (turn + 1)}
    ...         messages += [reply.message, {"role": "user", "content": "No. Try again."}]
    ...     return {"reward": 0.0}

`environment.Environment(name, make_task, play=play)` is then an environment. `conversation` makes such a program from a function that
answers one turn, from tools, or from both.

1. A worker runs the program in a process with limits (rl/envs/host), and each call of `Model.chat` is a request to an inference server.
2. A validator runs the same program, and each call is answered from the tokens that the worker submitted (rl/envs/recording). So the
   program must be a function of its task and of the replies: no clock, no global random state, no order of sets. `random.Random` of
   the task's index is allowed. An environment that depends on more declares `kind = "recorded"`.
3. Calls may be concurrent. Equal prompts get equal replies within an episode, unless their `number` differs.
4. An exception in the program gives the episode the score 0 in every number, and 1 in "error", like one in `score` (rl.score_errors).

Left out: images, and functions that see all episodes of a group.
'''

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from rl.envs.interface import tools as tools_lib


@dataclasses.dataclass(frozen=True)
class Reply:
    """The model's answer to one call: an assistant message in the form of OpenAI's API, and how it ended."""

    message: dict  # "role", "content", and "reasoning_content" and "tool_calls" where there are some
    finish_reason: str  # "stop" | "length"
    num_prompt_tokens: int
    num_tokens: int  # sampled

    @property
    def text(self) -> str:
        """The content of the message, without reasoning and tool calls."""
        return self.message["content"] or ""


class BudgetSpent(Exception):
    """Raised by `Model.chat` if the prompt leaves no room for a token, or the episode has no call or token left.

    It depends on the tokens of the episode alone, so that a replay raises it at the same call. A program may catch it and score
    the episode so far; `conversation` does.
    """


class Model(Protocol):
    """The model as a program sees it. `rl.envs.recording.session.Session` is the implementation."""

    async def chat(
        self,
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] = (),
        max_tokens: int | None = None,
        number: int = 0,
        trains: bool = True,
    ) -> Reply:
        """Asks the model for the next message of a conversation. Raises BudgetSpent.

        Args:
          messages: the whole conversation, in the form of OpenAI's API. Where it continues an earlier call of the episode, the tokens of
            that call are kept as they were sampled.
          tools: functions that the model may call, in the form of OpenAI's API.
          max_tokens: the most tokens of the reply; None, or more than the run's limit, takes that limit.
          number: calls of one prompt with different numbers get independent replies.
          trains: False for a model that plays another role, such as a judge: its tokens are verified, and not trained on.
        """
        ...


Program = Callable[[Any, Model], Awaitable[dict[str, float]]]  # (task, model) -> {"reward": ..., further numbers}


def conversation(
    *,
    score: Callable[[Any, Sequence[dict], Any], Any],
    reply: Callable[[Any, Sequence[dict], Any], Any] | None = None,
    tools: Sequence[tools_lib.Tool] = (),
    initial_state: Callable[[Any], Any] | None = None,
    max_turns: int = 8,
    limits: tools_lib.Limits = tools_lib.DEFAULT_LIMITS,
) -> Program:
    """Returns the program of an environment that answers each turn of the model. Its functions may be coroutine functions.

    Args:
      score: (task, messages, state) -> scores of the finished conversation.
      reply: (task, messages, state) -> messages that answer the model's last one, or None at the end of the episode. Without it, the
        episode ends with the first message of the model that calls no tool.
      tools: functions that the model may call. Their results, and errors, are the answer to a message that calls them.
      initial_state: (task) -> anything that `reply`, `score`, and tools with a parameter `state` may change during the episode. If it
        has a method `close`, this is called at the end.
      max_turns: messages of the model after which the episode ends.
      limits: limits of tool calls.

    Raises ValueError for two tools of one name.
    """
    schemas, names = [tool.schema for tool in tools], [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several tools have the name {min(twice)!r}; rename all but one")

    async def play(task, model: Model) -> dict[str, float]:
        messages, state, num_calls = [*task.messages], initial_state(task) if initial_state else None, 0
        try:
            for _ in range(max_turns):
                try:
                    answer = await model.chat(messages, tools=schemas)
                except BudgetSpent:
                    break
                messages.append(answer.message)
                calls = answer.message.get("tool_calls")
                if calls and tools:
                    messages += await tools_lib.results(tools, calls, state, limits, num_calls)
                    num_calls += len(calls)
                    continue
                more = await _value(reply(task, messages, state)) if reply else None
                if more is None:
                    break
                messages += more
            return await _value(score(task, messages, state))
        finally:
            if close := getattr(state, "close", None):
                await _value(close())

    return play


async def _value(result: Any) -> Any:
    """Returns the result of a function or of a coroutine function."""
    return await result if inspect.isawaitable(result) else result
