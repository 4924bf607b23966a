"""A model at an OpenAI endpoint, as the programs of environments see one. Imports no jax.

`Endpoint.chat` sends `POST URL/chat/completions`, with the fields that all servers know, and repeats it while the server is busy or
unreachable. `Episode` gives the calls of one episode their seeds; equal calls get equal replies.
"""

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from models.text import parsers
from rl.envs.interface import episode
from rl.envs.recording import session as session_lib
from sharding.system import bounded_reply, cli, retries, sockets

REPLY_S, MAX_REPLY_BYTES = 600.0, 2**26
FIRST_PAUSE_S, NOTED_PAUSE_S, MAX_PAUSE_S = 0.5, 4.0, 20.0  # the second: a wait that long is reported
BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_SEED = 2**31  # exact for all servers


class Endpoint:
    """A client of one model at the base URL of an OpenAI API, such as http://HOST:PORT/v1. Use it as `async with Endpoint(...)`.

    Args:
      url, model: the server's URL, and the name of a model; "" sends no model. The key is $OPENAI_API_KEY, if it is set.
      temperature, max_tokens: the temperature and the most tokens of each completion.
      extra: further fields of a request.
      concurrency: requests at the same time.
      give_up_s: seconds after which a request is not repeated.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        temperature: float,
        max_tokens: int,
        extra: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        give_up_s: float = 600.0,
    ):
        if not sockets.is_url(url):
            raise ValueError(f"--url {url!r} is not a URL; write http://HOST:PORT/v1")
        self.max_tokens, self._url, self._give_up_s = max_tokens, f"{url.rstrip('/')}/chat/completions", give_up_s
        self._body = ({"model": model} if model else {}) | {"temperature": temperature} | dict(extra or {})
        self._free, self._is_noted = asyncio.Semaphore(concurrency), False
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = bounded_reply.make_client(timeout=httpx.Timeout(REPLY_S, connect=10.0), headers=headers)

    @property
    def asked(self) -> dict[str, Any]:
        """The fields of each request that decide the samples: model, temperature, most tokens, and further ones."""
        return self._body | {"max_tokens": self.max_tokens}

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *_) -> None:
        await self._http.aclose()

    async def chat(
        self, messages: Sequence[Mapping], *, tools: Sequence[Mapping] = (), max_tokens: int, seed: int
    ) -> episode.Reply:
        """Returns the model's next message. Reasoning in its content is split off.

        Raises ValueError if the server refuses the request or sends no chat completion, and ConnectionError if it does not answer
        for `give_up_s` seconds.
        """
        body = self._body | {"messages": [*messages], "max_tokens": max_tokens, "seed": seed}
        body |= {"tools": [*tools]} if tools else {}
        if messages and messages[-1]["role"] == "assistant":
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        async with self._free:
            reply = await self._post(body)
        try:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            given = choice["message"]
            message = {"role": "assistant", "content": given.get("content") or ""}
            if not given.get("reasoning_content"):
                message["content"] = parsers.parse(message["content"], "chatml", read_calls=False).content
            message |= {name: given[name] for name in ("reasoning_content", "tool_calls") if given.get(name)}
            finish = "length" if choice.get("finish_reason") == "length" else "stop"
            counts = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
            return episode.Reply(message, finish, *counts)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            shown = json.dumps(reply)[:200]
            raise ValueError(f"{self._url} sent {shown}, not a chat completion; correct --url") from error

    async def _post(self, body: dict) -> dict:
        loop = asyncio.get_running_loop()
        pauses, end_s = retries.Backoff(FIRST_PAUSE_S, MAX_PAUSE_S), loop.time() + self._give_up_s
        while True:
            try:
                reply = await bounded_reply.fetch(self._http, "POST", self._url, MAX_REPLY_BYTES, REPLY_S, json=body)
                if reply.status_code == 200:
                    self._is_noted = False
                    return reply.json()
                problem = f"status {reply.status_code}: {' '.join(reply.text.split())[:300]}"
                if reply.status_code not in BUSY:
                    raise ValueError(f"{self._url} refuses a request with {problem}; correct the options")
            except (httpx.RequestError, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__} {error}"
            if loop.time() + (pause_s := pauses.next_s()) > end_s:
                text = f"{self._url} did not answer for {self._give_up_s:.0f} s ({problem})"
                raise ConnectionError(f"{text}; start it, or correct --url, and repeat the command: it continues")
            if pause_s >= NOTED_PAUSE_S and not self._is_noted:  # one line, of all requests that wait
                self._is_noted = True
                cli.note(f"waiting for {self._url} ({problem}); start it, or correct --url")
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))


class Episode:
    """The model of one episode: the part of `rl.envs.recording.session.Session` that `rl.envs.host.Host` uses, with texts for tokens."""

    def __init__(self, endpoint: Endpoint, seed: int, limits: session_lib.Limits):
        self.limits, self.cpu_s, self.has_slow_tool, self.overlapped = limits, 0.0, False, False
        self.replies: list[episode.Reply] = []  # in the order of their arrival
        self._endpoint, self._seed = endpoint, seed
        self._calls: dict[str, asyncio.Future[episode.Reply]] = {}

    def restart(self) -> None:
        """Begins again; calls that were made keep their replies."""

    async def chat(
        self,
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] = (),
        max_tokens: int | None = None,
        number: int = 0,
        trains: bool = True,
    ) -> episode.Reply:
        """Implements `episode.Model.chat`. Raises BudgetSpent after `limits.max_calls` calls, or `limits.max_episode_tokens` tokens."""
        del trains
        most = self.limits.max_tokens
        key = json.dumps([[*messages], [*tools], number, max_tokens])
        if key not in self._calls:
            num_tokens = sum(reply.num_tokens for reply in self.replies)
            if len(self._calls) >= self.limits.max_calls or 0 < self.limits.max_episode_tokens <= num_tokens:
                raise episode.BudgetSpent("the episode has no call or token left")
            seed = self._seed
            if self._calls:  # the first one has the seed that a run gives it
                digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
                seed = int.from_bytes(digest[:4], "little")
            wanted = {"tools": tools, "max_tokens": min(max_tokens or most, most), "seed": seed % MAX_SEED}
            self._calls[key] = asyncio.ensure_future(self._endpoint.chat(messages, **wanted))
            self._calls[key].add_done_callback(self._keep)
        return await self._calls[key]

    def _keep(self, call: asyncio.Future[episode.Reply]) -> None:
        if not call.cancelled() and not call.exception():
            self.replies.append(call.result())
