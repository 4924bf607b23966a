"""Async clients of inference servers: `Client` generates with several, `update_weights` changes those of one. Imports no jax.

1. A request goes to a server that inference/swarm/server_choice.py chooses. After a refused connection, a 429, a 5xx or a malformed
   reply, another server is tried. So a server that fails, or cheats, costs a retry and not the worker.
2. While a server has requests, it is asked for its health. One that is silent, or makes no token for long, loses its requests to
   others: a server that hangs costs a bounded time, however long a completion takes. Once a reply begins, its time is bounded as well.
   If a reply takes much longer than others, or than its tokens should, another server is asked, too, and the first reply counts: a
   server may keep a request forever, and make tokens for others.
3. Another 4xx is tried on the other servers as well. If all send one, it is the caller's mistake and is raised with the message;
   else it is the fault of those that sent it.
"""

import asyncio
import collections
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import httpx

from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from inference.swarm import reply as reply_lib
from inference.swarm import server_choice
from sharding.system import bounded_reply

HEALTH_S = 5.0  # between two questions for the health of a server
SILENT_S, STALLED_S = 30.0, 300.0  # until it counts as hung: without an answer, and without a token, as it may compile
PATIENCE, SMOOTHING = 8.0, 8.0  # mean times of a reply, until another server is asked, too; replies in this mean
SLOW, MAX_S = 10.0, 1800.0  # tokens/s of the slowest sequence, before any reply; at most, until another server is asked
REPLY_S = 600.0  # from the first byte of a reply to its last: a server may send a byte at a time
WAIT_S = 0.1  # for a server that may be used
UPDATE_S = 600.0  # for other weights
MAX_HEALTH_BYTES = 2**18  # of a reply without samples


class Unavailable(RuntimeError):
    """Raised when no server sent a valid reply within the allowed time."""


class VersionGone(RuntimeError):
    """Raised when no server serves the policy version that a request must use."""


class _Failed(RuntimeError):
    """Raised when a server did not answer a request: it hangs, is busy or broken, or rejected it."""


# The last two are of URLs that only look like one. Also no connection, and a wrong content-encoding.
_FAULTS = (reply_lib.MalformedReply, _Failed, httpx.RequestError, httpx.InvalidURL, UnicodeError)


class Client:
    """A client that spreads requests over several inference servers. Use it as `async with Client(urls) as client`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        give_up_s: float = 60,
        api_key: str | None = None,
        keys: Mapping[str, str] | None = None,
        run: str = "",
    ):
        """Creates a client of the servers at `urls`. A request that fails is retried for `give_up_s`.

        All servers are sent `api_key`, unless it is empty; None sends $INTELLAX_API_KEY, if it is set. A server with a public key
        in `keys`, by its URL, must sign the samples of a request with proofs, for the run whose public key is `run`; else its reply is
        malformed.
        """
        self.servers = server_choice.ServerChoice(urls, keys or {})
        self.give_up_s, self.run = give_up_s, run
        self._watches: dict[str, _Watch] = {}  # by URL, of servers with requests
        key = os.environ.get("INTELLAX_API_KEY") if api_key is None else api_key
        self._http = bounded_reply.make_client(
            timeout=httpx.Timeout(None, connect=10.0),  # the watch ends a request
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        self.num_retries, self._patience_s = 0, 0.0  # the second is 0 before the first reply

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc) -> None:
        for watch in self._watches.values():
            watch.task.cancel()
        await self._http.aclose()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: dict,
        *,
        proofs: bool = False,
        policy_version: int = -1,
        policy_epoch: int = -1,
        oldest_version: int = 0,
        sticky: str = "",
    ) -> list[completion_lib.Completion]:
        """Generates and returns `sampling["n"]` completions of one prompt. `sampling` has the fields of vLLM's sampling_params.

        With `proofs`, the completions have TOPLOC proofs. Policy `policy_version` generates all tokens, unless it is -1, or versions of
        `policy_epoch`; none is older than `oldest_version`. Requests with the same key `sticky` go to the same server where possible.
        Raises VersionGone if no server serves these versions any more, ValueError if all servers reject the request, and Unavailable if
        none sends a valid reply `give_up_s` after the first failure.
        """
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "proofs": proofs}
        pins = {"policy_version": policy_version, "policy_epoch": policy_epoch}
        body |= {name: number for name, number in pins.items() if number >= 0}
        return await _Request(self, body, oldest_version, sticky).complete()

    async def _post(self, url: str, body: dict) -> httpx.Response:
        """Returns the response of a server to a request. Raises _Failed if it hangs meanwhile."""
        if (watch := self._watches.get(url)) is None:
            watch = self._watches[url] = _Watch(self._http, url)
        target, most = f"{url}/inference/v1/generate", reply_lib.max_bytes(body)
        fetch = bounded_reply.fetch(self._http, "POST", target, most, body_s=REPLY_S, json=body)
        request = asyncio.ensure_future(fetch)
        watch.num_requests += 1
        try:
            await asyncio.wait((request, watch.task), return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise _Failed(watch.task.result())
            return request.result()
        finally:
            request.cancel()
            watch.num_requests -= 1
            if (not watch.num_requests or watch.task.done()) and self._watches.get(url) is watch:
                watch.task.cancel()
                del self._watches[url]

    def _patience(self, url: str, sampling: dict) -> float:
        """Returns how long a server may keep a request: by the time of earlier replies, or before any by the number of tokens."""
        watch, num_tokens = self._watches.get(url), sampling.get("max_tokens", rollout_lib.MAX_TOKENS)
        shown_s = num_tokens * watch.token_s if watch else math.inf  # a liar may show anything
        # Bounded: a server could raise the mean by each reply that it keeps nearly as long as it may.
        return min(self._patience_s, SILENT_S + MAX_S) or SILENT_S + min(num_tokens / SLOW, MAX_S, shown_s)


@dataclasses.dataclass(frozen=True, eq=False)
class _Attempt:
    """A request that was sent to a server."""

    url: str
    sent_s: float
    response: asyncio.Future[httpx.Response]


class _Request:
    """A request of a client: its attempts at servers, and their results."""

    def __init__(self, client: Client, body: dict, oldest_version: int, sticky: str):
        self._client, self._servers, self._body = client, client.servers, body
        self._oldest_version, self._sticky = oldest_version, sticky
        self._clock, self._num_samples = asyncio.get_running_loop().time, body["sampling_params"].get("n", 1)
        self._tried: collections.Counter[str] = collections.Counter()  # attempts by server
        self._pending: list[_Attempt] = []  # in the order of sending
        self._gone: dict[str, str] = {}  # server without that version -> its message
        self._refused: dict[str, str] = {}  # server that rejects the request -> its message
        self._reason = "no server is known"  # of the last failure

    async def complete(self) -> list[completion_lib.Completion]:
        """Returns the samples of the first valid reply. Raises the errors of `Client.generate`."""
        deadline_s = None
        try:
            while True:
                self._send()
                if not self._pending:
                    await asyncio.sleep(WAIT_S)
                elif (samples := await self._receive()) is not None:
                    return samples
                if not self._pending:
                    deadline_s = self._clock() + self._client.give_up_s if deadline_s is None else deadline_s
                    self._check(is_over=self._clock() > deadline_s)
        finally:
            for attempt in self._pending:
                attempt.response.cancel()
                self._servers.end(attempt.url, self._clock(), self._num_samples, problem=None)

    def _send(self) -> None:
        """Sends the request to one more server, if one is free, and if no attempt runs or the newest one takes longer than expected."""
        now_s, sampling = self._clock(), self._body["sampling_params"]
        if self._pending:
            last = self._pending[-1]
            if now_s < last.sent_s + self._client._patience(last.url, sampling):
                return
        options = {"sticky": self._sticky, "min_version": self._oldest_version, "tried": self._tried}
        avoid = {*self._gone, *self._refused, *(attempt.url for attempt in self._pending)}
        if url := self._servers.choose(now_s, num_samples=self._num_samples, avoid=avoid, **options):
            self._tried[url] += 1
            self._servers.begin(url, self._num_samples)
            self._pending.append(_Attempt(url, now_s, asyncio.ensure_future(self._client._post(url, self._body))))

    async def _receive(self) -> list[completion_lib.Completion] | None:
        """Waits a while for replies; returns the samples of the first valid one, or None."""
        responses = [attempt.response for attempt in self._pending]
        await asyncio.wait(responses, timeout=HEALTH_S, return_when=asyncio.FIRST_COMPLETED)
        ended = [attempt for attempt in self._pending if attempt.response.done()]
        self._pending = [attempt for attempt in self._pending if attempt not in ended]
        valid = [(attempt, samples) for attempt in ended if (samples := self._read(attempt)) is not None]
        if not valid:
            return None
        first, samples = valid[0]
        late = {other.url: "it keeps a request" for other in self._pending if other.sent_s < first.sent_s}
        for url, message in (late | self._refused).items():  # these without a cause
            self._servers.fail(url, self._clock(), message)
        return samples

    def _read(self, attempt: _Attempt) -> list[completion_lib.Completion] | None:
        """Records how an attempt ended; returns its samples, None if it has no valid ones."""
        client, url, now_s = self._client, attempt.url, self._clock()
        samples, problem, is_busy = None, "", False  # of the server; a rejection and an old version are none
        try:
            response = attempt.response.result()
            if response.status_code >= 400:
                message = error_message(response)
                reason = f"HTTP {response.status_code}: {message}"
                if response.status_code == 409:
                    self._gone[url] = message
                elif response.status_code >= 500:
                    problem = reason
                elif not (is_busy := response.status_code == 429):
                    self._refused[url] = f"{response.request.url} rejected the request: {message}"
            else:
                keys = self._servers.keys(url) if self._body["proofs"] else frozenset()
                samples = reply_lib.read(response, self._body, keys, client.run)
                oldest = min(min(sample.all_versions()) for sample in samples)
                reason = f"server sent policy version {oldest}; {self._oldest_version} or newer was requested"
                if oldest < self._oldest_version:
                    self._servers.lags(url, oldest)
                    samples = None
        except _FAULTS as error:
            reason, problem = str(error) or type(error).__name__, f"{type(error).__name__}: {error}"
        self._servers.end(url, now_s, self._num_samples, problem=problem, is_busy=is_busy)
        if samples is None:
            self._reason, client.num_retries = f"{url}: {reason}", client.num_retries + 1
        else:
            patience_s = client._patience(url, self._body["sampling_params"])
            target_s = SILENT_S + PATIENCE * (now_s - attempt.sent_s)
            client._patience_s = patience_s + (target_s - patience_s) / SMOOTHING
        return samples

    def _check(self, *, is_over: bool) -> None:
        """Raises the error with which a request ends, if no server will answer it or its time `is_over`."""
        urls = set(self._servers.urls())
        if self._gone and urls <= self._tried.keys():
            raise VersionGone(next(iter(self._gone.values())))
        if self._refused and urls <= self._refused.keys():
            raise ValueError(next(iter(self._refused.values())))
        if is_over:
            raise Unavailable(
                f"no inference server sent a valid reply in {self._client.give_up_s:.0f} s; the last error is from {self._reason}; "
                "check that the servers run, in the release of this client"
            )


class _Watch:
    """Asks a server for its health while it has requests."""

    def __init__(self, http: httpx.AsyncClient, url: str):
        self.num_requests = 0
        self.token_s = math.inf  # that a sample's token takes if all samples take turns; infinity: unknown
        self.task = asyncio.ensure_future(self._run(http, f"{url}/health"))

    async def _run(self, http: httpx.AsyncClient, url: str) -> str:
        """Returns the reason why the server counts as hung, once it does."""
        clock, first, num_tokens, most = asyncio.get_running_loop().time, None, None, 1.0
        heard_s = moved_s = clock()
        while True:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=HEALTH_S)
            try:
                health = (await bounded_reply.fetch(http, "GET", url, MAX_HEALTH_BYTES, HEALTH_S)).json()
                heard_s, found = clock(), health["stats"]["tokens"]
                # A released server makes no token because a train step has its devices.
                is_moving = found != num_tokens or health.get("released") is True
                moved_s, num_tokens = heard_s if is_moving else moved_s, found
                first = first or (heard_s, found)
                most = max(most, health["load"]["running"] + health["load"]["waiting"])
                if found > first[1]:
                    self.token_s = most * (heard_s - first[0]) / (found - first[1])
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                pass  # silent, or without such a health
            if clock() - heard_s > SILENT_S:
                return f"the server is silent for {SILENT_S:.0f} s"
            if clock() - moved_s > STALLED_S:
                return f"the server made no token for {STALLED_S:.0f} s"


async def update_weights(
    address: str,
    version: int,
    *,
    token: str | None = None,
    epoch: int | None = None,
    digest: str = "",
    rollback: bool = False,
) -> None:
    """Makes a server load the weights of `version` of `epoch` (None: any). With `rollback`, the version may be older than the one in use.

    `address` is the server's control listener, a URL or unix:PATH. `token` is sent to it, unless None. `digest` is the SHA-256 of the
    version's manifest ("": not compared). Returns once the server has loaded the weights. Raises ValueError if it rejects the request,
    and ConnectionError if it cannot be reached or ends meanwhile.
    """
    body = {"version": version, "epoch": epoch, "digest": digest, "rollback": rollback}
    path = address.removeprefix("unix:")
    # no TLS: no context of it
    transport = httpx.AsyncHTTPTransport(uds=path, verify=False) if path != address else None
    url = f"{'http://localhost' if transport else address.rstrip('/')}/update_weights"
    headers = {"authorization": f"Bearer {token}"} if token else {}
    timeout = httpx.Timeout(UPDATE_S, connect=10.0)
    try:
        async with httpx.AsyncClient(transport=transport, headers=headers, timeout=timeout) as http:
            response = await bounded_reply.fetch(http, "POST", url, MAX_HEALTH_BYTES, json=body)
    except httpx.TransportError as error:  # some have no text
        raise ConnectionError(f"no answer from {address}: {str(error) or type(error).__name__}") from error
    if response.status_code >= 400:
        raise ValueError(f"{url} rejected the request: {error_message(response)}")


def error_message(response: httpx.Response) -> str:
    """Returns the error message in a server's JSON reply, or the start of the body if the reply has another format."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code}: {response.text[:500]}"
