"""Async clients of inference servers: `Client` generates with several, `update_weights` changes those of one. Imports no jax.

1. A request goes to a server that inference/swarm/server_choice.py chooses. After a refused connection, a 429, a 5xx or a malformed
   reply, another server is tried. So a server that fails, or cheats, costs a retry and not the worker.
2. While a server has requests, it is asked for its health. One that is silent, or makes no token for long, loses its requests to
   others: a server that hangs costs a bounded time, however long a completion takes. Once a reply begins, its time is bounded as well.
   If a reply takes much longer than others, another server is asked, too, and the first reply counts: a server may keep a request
   for ever, and make tokens for others.
3. Another 4xx is tried on the other servers as well. If all send one, it is the caller's mistake and is raised with the message;
   else it is the fault of those that sent it.
"""

import asyncio
import base64
import collections
import dataclasses
import math
import os
import socket
from collections.abc import Collection, Mapping, Sequence

import httpx
import numpy as np

from inference.rollouts import attestation
from inference.rollouts import rollout as rollout_lib
from inference.swarm import server_choice
from sharding.system import bounded_reply

HEALTH_S = 5.0  # between two questions for the health of a server
SILENT_S, STALLED_S = 30.0, 300.0  # until it counts as hung: without an answer, and without a token, as it may compile
FIRST_REPLY_S = 300.0  # that a reply is expected to take
PATIENCE = 8.0  # mean times of a reply, until another server is asked, too
REPLY_S = 600.0  # from the first byte of a reply to its last: a server may send a byte at a time
WAIT_S = 0.1  # for a server that may be used
UPDATE_S = 600.0  # for other weights
MAX_HEALTH_BYTES = 2**18  # of a reply without completions
TOKEN_BYTES, EXPERTS_BYTES = 256, 2**13  # of a reply, per token and sample, at most; the second if it names experts
# A connection is silent for as long as a completion takes: probes keep it open, and show that the other end is gone.
KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
_PROBES = "TCP_KEEPIDLE", "TCP_KEEPINTVL"  # where the system has them
KEEPALIVE += [(socket.IPPROTO_TCP, getattr(socket, name), 10) for name in _PROBES if hasattr(socket, name)]
MAX_NATS = 1e30  # of a log-probability; larger ones may not be finite in float32


@dataclasses.dataclass(frozen=True)
class Sample(attestation.Answer):
    """One completion that an inference server returned."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    server: str = ""  # public key of the server that vouches for this sample; "" if none does
    server_signature: bytes = b""


class Unavailable(RuntimeError):
    """Raised when no server sent a valid reply within the allowed time."""


class VersionGone(RuntimeError):
    """Raised when no server serves the policy version that a request must use."""


class MalformedReply(ValueError):
    """Raised when an inference server replied with status 200 but an invalid body; `Client` then tries another server."""


class _Failed(RuntimeError):
    """Raised when a server did not answer a request: it hangs, is busy or broken, or rejected it."""


# The last two are of URLs that only look like one. Also no connection, and a wrong content-encoding.
_FAULTS = (MalformedReply, _Failed, httpx.RequestError, httpx.InvalidURL, UnicodeError)


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
        """Creates a client of the servers at `urls`. A request is retried for `give_up_s`.

        All servers are sent `api_key`, unless it is empty; None sends $INTELLAX_API_KEY, if it is set. A server with a public key
        in `keys`, by its URL, must sign each sample with proofs for the run with the key `run`: another reply is malformed.
        """
        self.servers = server_choice.ServerChoice(urls, keys or {})
        self._give_up_s, self._run = give_up_s, run
        self._watches: dict[str, tuple[asyncio.Task, set[object]]] = {}  # by URL: of its health, with its requests
        key = os.environ.get("INTELLAX_API_KEY") if api_key is None else api_key
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10.0),  # the watch ends a request
            limits=limits,
            # Not as `transport`, which would ignore the proxies of the environment; nor as "all://", which would replace one.
            mounts={"all://*": httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEPALIVE)},
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        self.num_retries, self._reply_s = 0, FIRST_REPLY_S  # the second is the mean time of a reply

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc) -> None:
        for watch, _ in self._watches.values():
            watch.cancel()
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
    ) -> list[Sample]:
        """Generates and returns `sampling["n"]` completions of one prompt. `sampling` has the fields of vLLM's sampling_params.

        Policy `policy_version` generates all tokens, unless it is -1, or versions of `policy_epoch`; none is older than `oldest_version`.
        Requests with the same key `sticky` go to the same server where possible. Raises VersionGone if no server serves these
        versions any more, ValueError if all servers reject the request, and Unavailable if none sends a valid reply within
        `give_up_s`.
        """
        body = {"model": "policy", "token_ids": list(token_ids), "sampling_params": sampling, "proofs": proofs}
        pins = {"policy_version": policy_version, "policy_epoch": policy_epoch}
        body |= {name: number for name, number in pins.items() if number >= 0}
        clock = asyncio.get_running_loop().time
        tried: collections.Counter = collections.Counter()
        gone: dict[str, str] = {}  # server without that version -> its message
        refused: dict[str, str] = {}  # server that rejects the request -> its message
        deadline_s, reason = clock() + self._give_up_s, "no server is known"
        pending: dict[asyncio.Future[httpx.Response], tuple[str, float]] = {}  # requests, with their servers and times
        try:
            while True:
                avoid = {*gone, *refused, *(other for other, _ in pending.values())}
                url = self.servers.choose(clock(), sticky=sticky, min_version=oldest_version, tried=tried, avoid=avoid)
                if url is not None:
                    tried[url] += 1
                    self.servers.begin(url)
                    pending[asyncio.ensure_future(self._post(url, body))] = url, clock()
                wait_s = SILENT_S + PATIENCE * self._reply_s if url else HEALTH_S  # then another may be free
                for request in await _finished(pending, wait_s):
                    at, sent_s = pending.pop(request)
                    try:
                        samples = self._read(request, at, body, gone, refused, oldest_version)
                    except _FAULTS as error:
                        reason, self.num_retries = f"{at}: {str(error) or type(error).__name__}", self.num_retries + 1
                        continue
                    self._reply_s += (clock() - sent_s - self._reply_s) / 8
                    late = {other: "it keeps a request" for other, since_s in pending.values() if since_s < sent_s}
                    for other, message in (late | refused).items():  # these without a cause
                        self.servers.fail(other, clock(), message)
                    return samples
                if pending:
                    continue
                self._check(tried, gone, refused, reason if clock() > deadline_s else "")
                if url is None or tried.keys() >= {*self.servers.urls()}:
                    await asyncio.sleep(WAIT_S)
        finally:
            for request, (url, _) in pending.items():
                request.cancel()
                self.servers.end(url, clock(), problem=None)

    def _check(self, tried: Collection[str], gone: dict[str, str], refused: dict[str, str], last_reason: str) -> None:
        """Raises the error with which a request ends, if no server will answer it or the time is over (`last_reason`)."""
        urls = set(self.servers.urls())
        if gone and urls <= {*tried}:
            raise VersionGone(next(iter(gone.values())))
        if refused and urls <= refused.keys():
            raise ValueError(next(iter(refused.values())))
        if last_reason:
            raise Unavailable(
                f"no inference server sent a valid reply in {self._give_up_s:.0f} s; the last error is from {last_reason}; "
                "check that the servers run, in the release of this client"
            )

    def _read(
        self,
        request: asyncio.Future[httpx.Response],
        url: str,
        body: dict,
        gone: dict[str, str],
        refused: dict[str, str],
        oldest_version: int,
    ) -> list[Sample]:
        """Returns the completions of a request to one server that has ended. Raises MalformedReply, _Failed, or httpx.RequestError without them."""
        problem, is_busy = None, False
        try:
            response = request.result()
            if response.status_code >= 400:
                message, problem = error_message(response), ""
                if response.status_code == 409:
                    gone[url] = message
                elif response.status_code >= 500:
                    problem = f"HTTP {response.status_code}: {message}"
                elif not (is_busy := response.status_code == 429):
                    refused[url] = f"{response.request.url} rejected the request: {message}"
                raise _Failed(f"HTTP {response.status_code}: {message}")
            keys = self.servers.keys(url) if body["proofs"] else frozenset()
            samples = _read_reply(response, body, keys, self._run)
            oldest, problem = min(map(min, map(_versions, samples))), ""
            if oldest < oldest_version:
                self.servers.lags(url, oldest)
                raise MalformedReply(f"server sent policy version {oldest}; {oldest_version} or newer was requested")
            return samples
        except _FAULTS as error:
            problem = f"{type(error).__name__}: {error}" if problem is None else problem
            raise
        finally:
            self.servers.end(url, asyncio.get_running_loop().time(), problem=problem, is_busy=is_busy)

    async def _post(self, url: str, body: dict) -> httpx.Response:
        """Returns the response of a server to a request. Raises _Failed if it is silent meanwhile."""
        watch, requests = self._watches.get(url) or (asyncio.ensure_future(self._watch(url)), set())
        self._watches[url] = watch, requests
        request = asyncio.ensure_future(self._generate(f"{url}/inference/v1/generate", body))
        requests.add(request)
        try:
            await asyncio.wait((request, watch), return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise _Failed(watch.result())
            return request.result()
        finally:
            request.cancel()
            requests.discard(request)
            if (not requests or watch.done()) and self._watches.get(url, (None,))[0] is watch:
                watch.cancel()
                del self._watches[url]

    async def _generate(self, url: str, body: dict) -> httpx.Response:
        sampling = body["sampling_params"]
        num_tokens = len(body["token_ids"]) + sampling.get("max_tokens", rollout_lib.MAX_TOKENS)
        num_bytes = TOKEN_BYTES + EXPERTS_BYTES * bool(sampling.get("return_routed_experts"))
        most = MAX_HEALTH_BYTES + sampling.get("n", 1) * num_tokens * num_bytes
        return await bounded_reply.fetch(self._http, "POST", url, most, body_s=REPLY_S, json=body)

    async def _watch(self, url: str) -> str:
        """Returns the reason why a server counts as hung, once it does."""
        clock, num_tokens = asyncio.get_running_loop().time, None
        heard_s = moved_s = clock()
        while True:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=HEALTH_S)
            try:
                response = await bounded_reply.fetch(self._http, "GET", f"{url}/health", MAX_HEALTH_BYTES, HEALTH_S)
                heard_s, found = clock(), response.json()["stats"]["tokens"]
                moved_s, num_tokens = (moved_s, found) if found == num_tokens else (heard_s, found)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, RecursionError):
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
    """Makes a server load the weights of `version` of `epoch` (None: any), also older ones than it has if `rollback`.

    `address` is that of its control listener, a URL or unix:PATH, which is sent `token`, unless None. `digest` is the SHA-256 of the
    version's manifest ("": not compared). Returns once the server has them. Raises ValueError if it rejects the request, and
    ConnectionError if it cannot be reached or ends meanwhile.
    """
    body = {"version": version, "epoch": epoch, "digest": digest, "rollback": rollback}
    path = address.removeprefix("unix:")
    transport = httpx.AsyncHTTPTransport(uds=path) if path != address else None
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
    """Returns the error message in a server's JSON reply; of a reply in another format, the start of its body."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code}: {response.text[:500]}"


async def _finished(pending: Collection[asyncio.Future], timeout_s: float) -> Collection[asyncio.Future]:
    return (await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED))[0] if pending else ()


def _versions(sample: Sample) -> set[int]:
    return {sample.prompt_version, *sample.versions}


def _read_reply(response: httpx.Response, body: dict, keys: Collection[str], run: str) -> list[Sample]:
    """Returns the completions in a server's reply to the request `body`.

    Raises MalformedReply if one is invalid, not as requested, or not signed for `run` by one of `keys`, unless these are none.
    """
    sampling, num_prompt = body["sampling_params"], len(body["token_ids"])
    try:
        reply = response.json()
        epoch = reply.get("policy_epoch", 0)
        if type(epoch) is not int or not 0 <= epoch < 2**48 or epoch != body.get("policy_epoch", epoch):
            raise ValueError(f"server sent policy epoch {str(epoch)[:80]}; {body.get('policy_epoch')} was requested")
        samples = [_read_choice(choice, sampling, num_prompt, epoch) for choice in reply["choices"]]
        if len(samples) != sampling.get("n", 1):
            raise ValueError(f"server sent {len(samples)} samples; {sampling.get('n', 1)} were requested")
        wrong = set().union(*map(_versions, samples)) - {body.get("policy_version")}
        if "policy_version" in body and wrong:
            raise ValueError(f"server sent policy versions {sorted(wrong)[:4]}; {body['policy_version']} was requested")
        if keys:
            signed = enumerate(zip(samples, reply["choices"], strict=True))
            samples = [_read_signature(sample, choice, index, body, keys, run) for index, (sample, choice) in signed]
        return samples
    except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedReply(f"server sent a malformed reply: {type(error).__name__}: {str(error)[:200]}") from error
    except ValueError as error:
        raise MalformedReply(str(error)[:500]) from error


def _read_signature(sample: Sample, choice: dict, index: int, body: dict, servers: Collection[str], run: str) -> Sample:
    """Returns a sample with the signature of one of `servers`, or without one if "" is among them.

    Raises ValueError unless it signed sample `index` as an answer to `body`.
    """
    sampling, settings = body["sampling_params"], {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    signature = bytes.fromhex(choice.get("server_signature", ""))
    asked = {"temperature": sampling.get("temperature", 1.0), "seed": (sampling.get("seed", 0) + index) % 2**32}
    asked["settings"] = settings | {"return_routed_experts": False} | sampling | {"run": run}
    answer = attestation.message(body["token_ids"], sample, **asked)
    for server in servers:
        if server and rollout_lib.signed(server, signature, answer):
            return dataclasses.replace(sample, server=server, server_signature=signature)
    if "" in servers:
        return sample
    raise ValueError(f"server sent a sample without a signature of its key {min(servers)[:16]} that fits")


def _read_choice(choice: dict, sampling: dict, num_prompt: int, epoch: int) -> Sample:
    """Converts one entry of the reply's `choices` to a Sample. Raises ValueError with the server's mistake if it is invalid."""
    tokens = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    runs = choice["policy_versions"]
    integers = [*tokens, *(value for run in runs for value in run), choice["prompt_policy_version"]]
    if any(type(value) is not int or not 0 <= value < 2**31 for value in integers):
        raise ValueError("server sent a token ID or a policy version that is not an integer in 0..2^31 - 1")
    if sum(count for _, count in runs) > len(tokens):  # before they are expanded: a count may be huge
        raise ValueError(f"server sent {len(tokens)} tokens, and policy_versions {runs[:4]} for more than those")
    versions = [version for version, count in runs for _ in range(count)]
    if not len(tokens) == len(logprobs) == len(versions):
        counts = f"{len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions"
        raise ValueError(f"server sent {counts}, not equally many")
    if not tokens or not all(math.isfinite(logprob) and abs(logprob) < MAX_NATS for logprob in logprobs):
        raise ValueError("server sent an empty completion or a log-probability that is not finite")
    if len(tokens) > sampling.get("max_tokens", len(tokens)):
        raise ValueError(f"server sent {len(tokens)} tokens; at most {sampling['max_tokens']} were requested")
    if (reason := choice["finish_reason"]) not in rollout_lib.FINISH_REASONS:
        raise ValueError(f"server sent the finish_reason {str(reason)[:80]!r}, which a rollout does not allow")
    proofs = base64.b64decode(choice["proofs"], validate=True)
    if len(proofs) > (most := rollout_lib.MAX_PROOF_BYTES):
        raise ValueError(f"server sent {len(proofs)} bytes of proofs, more than {most}, the maximum")
    has_experts, num_rows = sampling.get("return_routed_experts"), num_prompt + len(tokens) - 1
    experts = _read_experts(choice["routed_experts"], num_rows) if has_experts else None
    return Sample(tokens, logprobs, versions, choice["prompt_policy_version"], reason, proofs, experts, epoch)


def _read_experts(field: dict, num_rows: int) -> np.ndarray:
    shape, dtype = field["shape"], str(field["dtype"])[:80]
    if dtype not in ("uint8", "uint16") or field["start"] != 0:
        found = f"{dtype!r} from token {str(field['start'])[:80]}"
        raise ValueError(f"server sent routed_experts of {found}, not uint8 or uint16 from token 0")
    if len(shape) != 3 or any(type(size) is not int or not 0 < size < 2**31 for size in shape) or shape[0] != num_rows:
        raise ValueError(f"server sent routed_experts of shape {str(shape)[:80]}; {num_rows} rows were requested")
    data = base64.b64decode(field["data"], validate=True)
    dtype = np.dtype(dtype).newbyteorder("<")
    if len(data) != math.prod(shape) * dtype.itemsize or len(data) > rollout_lib.MAX_ROUTED_BYTES:
        raise ValueError(f"server sent {len(data)} bytes of routed_experts, too many or not of shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape)
