"""An async client of several rollout servers. Imports no jax: a worker starts in a second.

1. A request goes to the server with the fewest requests of ours in flight (ties: the first).
2. A refused connection, a 429, a 5xx or a malformed reply is tried on the next server, with a pause once all were
   tried; each retry counts. One server that breaks, or lies, costs a retry and not the worker.
3. A 4xx is the caller's mistake and is raised with the server's own words. What comes back is checked before it is used.
"""

import asyncio
import base64
import collections
import dataclasses
import math
import os
from collections.abc import Callable, Sequence

import httpx
import numpy as np

from inference.rollouts import rollout as rollout_lib

MAX_NATS = 1e30  # of a log-probability: more is not finite in float32


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion as a server reported it: arrays of one entry per new token, the stop token included."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    prompt_version: int
    finish_reason: str
    proofs: bytes
    experts: np.ndarray | None = (
        None  # uint8 or uint16 [prompt + new tokens - 1, layers, experts per token], where asked for
    )


class Unavailable(RuntimeError):
    """No server gave a sound answer within the allowed time."""


class Malformed(ValueError):
    """A server answered 200 with something that is no answer."""


class Client:
    """Use as `async with Client(urls) as client`."""

    def __init__(
        self, urls: Sequence[str], *, timeout_s: float = 600.0, give_up_s: float = 60.0, api_key: str | None = None
    ):
        """`api_key` is that of every server; $INTELLAX_API_KEY when None."""
        if not urls:
            raise ValueError("no rollout server given; pass at least one URL")
        self._urls = [url.rstrip("/") for url in urls]
        self._give_up_s = give_up_s
        self._in_flight = dict.fromkeys(self._urls, 0)
        key = api_key or os.environ.get("INTELLAX_API_KEY")
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        self.num_retries = 0

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc) -> None:
        await self._http.aclose()

    async def generate(self, token_ids: Sequence[int], sampling: dict, *, proofs: bool = False) -> list[Sample]:
        """Returns `sampling["n"]` samples of one prompt; `sampling` as in vLLM's sampling_params.

        ValueError where a server refuses the request; Unavailable where none gives a sound answer within `give_up_s`.
        """
        body = {"model": "policy", "token_ids": list(token_ids), "sampling_params": sampling, "proofs": proofs}
        return await self._post(
            "/inference/v1/generate", body, lambda response: _read_reply(response, sampling, len(body["token_ids"]))
        )

    async def update_weights(self, version: int) -> None:
        """Asks every server to serve at least `version`; returns once all do."""

        async def update(url):
            response = await self._http.post(f"{url}/update_weights", json={"version": version})
            _raise_for(response)

        await asyncio.gather(*(update(url) for url in self._urls))

    async def health(self) -> list[dict]:
        responses = await asyncio.gather(*(self._http.get(f"{url}/health") for url in self._urls))
        return [response.json() for response in responses]

    async def _post(self, path: str, body: dict, read: Callable[[httpx.Response], list[Sample]]) -> list[Sample]:
        tried: collections.Counter = collections.Counter()
        deadline = asyncio.get_running_loop().time() + self._give_up_s
        while True:
            url = min(self._urls, key=lambda u: (tried[u], self._in_flight[u]))
            self._in_flight[url] += 1
            try:
                response = await self._http.post(url + path, json=body)
                if response.status_code != 429 and response.status_code < 500:
                    _raise_for(response)
                    return read(response)
                reason = f"HTTP {response.status_code}"
            except Malformed as error:
                reason = str(error)
            except httpx.RequestError as error:  # no connection, no whole answer, a content-encoding that is none
                reason = type(error).__name__
            finally:
                self._in_flight[url] -= 1
            tried[url] += 1
            self.num_retries += 1
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"no rollout server answered for {self._give_up_s:.0f} s; the last, {url}: {reason}")
            if all(tried[u] for u in self._urls):
                await asyncio.sleep(min(0.1 * 2 ** min(tried.values()), 5.0))


def _raise_for(response: httpx.Response) -> None:
    if response.status_code >= 400:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:500]
        raise ValueError(f"{response.request.url} refused the request: {message}")


def _read_reply(response: httpx.Response, sampling: dict, num_prompt: int) -> list[Sample]:
    """The samples that `sampling` asked for; Malformed for whatever else a server may send."""
    try:
        samples = [_read_choice(choice, sampling, num_prompt) for choice in response.json()["choices"]]
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Malformed(f"server sent a malformed reply: {type(error).__name__}: {str(error)[:200]}") from error
    except ValueError as error:
        raise Malformed(str(error)[:500]) from error
    if len(samples) != sampling.get("n", 1):
        raise Malformed(f"server sent {len(samples)} samples; {sampling.get('n', 1)} were asked for")
    return samples


def _read_choice(choice: dict, sampling: dict, num_prompt: int) -> Sample:
    """Checks one choice, so that it makes a rollout that can be signed; ValueError names what a server got wrong."""
    tokens = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    runs = choice["policy_versions"]
    integers = [*tokens, *(value for run in runs for value in run), choice["prompt_policy_version"]]
    if any(type(value) is not int or not 0 <= value < 2**31 for value in integers):
        raise ValueError("server sent a token id or a policy version that is not an integer in 0..2^31 - 1")
    if sum(count for _, count in runs) > len(tokens):  # before they are written out: a count may be anything
        raise ValueError(f"server sent {len(tokens)} tokens and versions {runs[:4]}, which are for more")
    versions = [version for version, count in runs for _ in range(count)]
    if not len(tokens) == len(logprobs) == len(versions):
        raise ValueError(f"server sent {len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions")
    if not tokens or not all(math.isfinite(logprob) and abs(logprob) < MAX_NATS for logprob in logprobs):
        raise ValueError("server sent an empty completion or a log-probability that is not finite")
    if len(tokens) > sampling.get("max_tokens", len(tokens)):
        raise ValueError(f"server sent {len(tokens)} tokens; at most {sampling['max_tokens']} were asked for")
    if choice["finish_reason"] not in rollout_lib.FINISH_REASONS:
        raise ValueError(f"server sent the finish_reason {str(choice['finish_reason'])[:80]!r}")
    proofs = base64.b64decode(choice["proofs"], validate=True)
    if len(proofs) > rollout_lib.MAX_PROOF_BYTES:
        raise ValueError(f"server sent {len(proofs)} bytes of proofs; at most {rollout_lib.MAX_PROOF_BYTES} are taken")
    experts = None
    if sampling.get("return_routed_experts"):
        experts = _read_experts(choice["routed_experts"], num_prompt + len(tokens) - 1)
    return Sample(tokens, logprobs, versions, choice["prompt_policy_version"], choice["finish_reason"], proofs, experts)


def _read_experts(field: dict, num_rows: int) -> np.ndarray:
    shape, dtype = field["shape"], str(field["dtype"])[:80]
    if dtype not in ("uint8", "uint16") or field["start"] != 0:
        raise ValueError(f"server sent routed_experts of {dtype!r} from token {str(field['start'])[:80]} on")
    if len(shape) != 3 or any(type(size) is not int or not 0 < size < 2**31 for size in shape) or shape[0] != num_rows:
        raise ValueError(f"server sent routed_experts of shape {str(shape)[:80]}; {num_rows} rows were to come")
    data = base64.b64decode(field["data"], validate=True)
    dtype = np.dtype(dtype).newbyteorder("<")
    if len(data) != math.prod(shape) * dtype.itemsize or len(data) > rollout_lib.MAX_ROUTED_BYTES:
        raise ValueError(f"server sent {len(data)} bytes of routed_experts of shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape)
