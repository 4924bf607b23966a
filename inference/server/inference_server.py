"""An inference server without its routes: a running engine, the source of its weights, and the meaning of request fields.

1. `InferenceServer.make_request` turns sampling fields of a request into a `GenerateRequest` and fills in defaults.
2. `InferenceServer.update` pulls other weights while the old ones serve, checks them against the model, and swaps them in
   between two engine calls. After an error before the swap, the old weights keep serving; one in the swap ends the scheduler.
   It loads from the sources of the start, and from the prefixes in `--weights_allow`. They are checked before anything is opened
   or requested. So a control request cannot make the server read another file, or send a request to another host.

inference/server/startup.py makes one.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import prometheus_client

from inference.adapters import adapter_set
from inference.engine import engine as engine_lib
from inference.engine import multihost_replay
from inference.engine import request as request_lib
from inference.engine import weights as weights_lib
from inference.rollouts import attestation
from inference.rollouts import completion as completion_lib
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import schemas
from models import hf, transformer
from sharding.system.logs import role_metrics
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast
from sharding.weights.download import source as source_lib
from sharding.weights.format import gguf_header, head, manifest

# SCHEME://HOST/PATH without user, query, escapes, and parts . and .., which could lead elsewhere than they seem to.
_PLAIN_URL = re.compile(r"[a-z0-9+.-]+://[\w.:\[\]-]*(/(?!\.\.?(/|$))[\w.=,+~-]+)*/?", re.ASCII)
RATE_S = 4.0  # least time over which tokens are counted: a call makes many, and health is asked for each 5 s


class UnknownModel(ValueError):
    """Raised for a request to another model than the server's and its adapters."""


@dataclasses.dataclass
class InferenceServer:
    """One running inference server: the engine, its scheduler, and the source of new weights. The HTTP routes call its methods."""

    weights: source_lib.Source | None  # None if updates name their folder
    scheduler: scheduler_lib.Scheduler
    engine: engine_lib.Engine
    store: weights_lib.Store
    model_name: str = "policy"
    key: source_lib.Trusted = None  # the publisher's, which must have signed all weights; None accepts any
    have: broadcast.Pulled | None = None  # the version in use, for deltas; None if it is from a Hugging Face folder
    # The digest of a policy whose weights are on the devices, or will be soon, and were checked: an update to it pulls nothing.
    offered: tuple[str, "concurrent.futures.Future[broadcast.Pulled]"] | None = None
    signers: frozenset[str] = dataclasses.field(init=False)  # the keys that were trusted when `have` was loaded
    sources: Sequence[str] = ()  # those that an update may name, each with everything below it
    signer: rollout_lib.WorkerKey | None = None  # signs the samples of replies; None: nobody does
    run: str = ""  # the public key of the run for which it signs
    hosts: hosts_lib.Hosts = hosts_lib.ALONE  # those that its mesh spans; this is host 0
    allows_adapters: bool = False  # control clients may load and unload adapters
    on_version: Callable[[int], object] = lambda version: None  # called with each version that the engine has loaded
    _counted: tuple[float, int, float] = (0.0, 0, 0.0)  # (time, tokens until then, tokens per second before it)
    update_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    update_s: prometheus_client.Histogram = dataclasses.field(
        default_factory=lambda: role_metrics.latency("intellax:update", "Seconds per update of the weights.")
    )

    def __post_init__(self):
        self.signers = self._trusted_keys()

    @property
    def policy_digest(self) -> str:
        """The SHA-256 of the manifest of the weights in use; "" for those of a Hugging Face folder."""
        return "" if self.have is None else self.have.sha256

    def load(self) -> dict[str, float]:
        """Returns the load as heartbeats and the health have it (rl/protocol/registry.py)."""
        scheduler, config = self.scheduler, self.engine.config
        return {
            "running": len(scheduler.slots.running),
            "waiting": scheduler.num_waiting,
            "kv_used": min(max(float(scheduler.slots.usage()), 0.0), 1.0),
            "preemptions": int(scheduler.stats["num_preemptions"]),
            "finished": int(scheduler.stats["samples"]),
            "capacity": min(config.num_slots, config.num_pages // config.pages_per_slot or config.num_slots),
            "tokens_per_s": self._tokens_per_s(),
        }

    def _tokens_per_s(self) -> float:
        """Returns the tokens generated per second over the last `RATE_S` or more."""
        (then_s, before, rate), now_s = self._counted, time.monotonic()
        if now_s - then_s >= RATE_S:
            tokens = int(self.scheduler.stats["tokens"])
            rate = (tokens - before) / (now_s - then_s)
            self._counted = now_s, tokens, rate  # one assignment: several threads ask
        return rate

    def update(
        self,
        version: int | None,
        source: str | None = None,
        *,
        epoch: int | None = None,
        digest: str = "",
        rollback: bool = False,
    ) -> int:
        """Loads other weights into the engine and returns the version in use. Blocks until the engine generates with them.

        Args:
          version: a version of `source`, the newest if None. For a Hugging Face folder, the version number to give its weights;
            None takes the current number + 1.
          source: a weight broadcast (None: the one the server started with), the folder of one version, or a Hugging Face folder.
          epoch: the epoch that `version` must be of; None accepts any. Not compared without `key` or `digest`.
          digest: the SHA-256 of the version's manifest, which proves its epoch as a signed head does; "" accepts any.
          rollback: allow an older version than the one in use, and other weights under the same number.

        Raises ValueError for weights of another model, that are older, or that `sources` does not allow, and OSError or
        CorruptSource if they cannot be read.
        """
        with self.update_lock, self.update_s.time():
            root = self.weights if source is None else checked_source(source, self.sources)
            if root is None:
                raise ValueError("this server has no weight broadcast to update from; send a weight_dir")
            if isinstance(root, str) and "://" not in root:
                folder = pathlib.Path(root)
                if (folder / "config.json").is_file() or gguf_header.is_gguf(folder):
                    return self._update_from_model(folder, version, rollback)
                root, version = self._broadcast_of(folder, version)
            return self._update_from_broadcast(
                root, version, is_own=source is None, epoch=epoch, digest=digest, rollback=rollback
            )

    def adapter_of(self, name: str | None) -> int:
        """Returns the number of the adapter that a request names as its model; -1 for the model itself. Raises UnknownModel for other names."""
        if name in (None, self.model_name):
            return adapter_set.NONE
        if (number := self.engine.adapters and self.engine.adapters.numbers.get(name)) is None:
            remedy = f"send {self.model_name!r} or another that GET /v1/models lists, or leave model out"
            raise UnknownModel(f"The model `{name[:64]}` does not exist. Please {remedy}.")
        return number

    def make_request(self, sampling: schemas.Sampling, tokens: Sequence[int], **extra) -> request_lib.GenerateRequest:
        """Returns the scheduler's request to complete the prompt `tokens`. Raises ValueError for fields of `sampling` out of range.

        `extra` are fields of `GenerateRequest` that the route sets.
        """
        if sampling.routed_experts_prompt_start >= max(len(tokens), 1):
            start = f"routed_experts_prompt_start = {sampling.routed_experts_prompt_start}"
            raise ValueError(f"{start} is not below the prompt's {len(tokens)} tokens; send a smaller one")
        if bad := [token for token in sampling.logit_bias if not re.fullmatch(r"\d{1,9}", token)]:
            raise ValueError(f"logit_bias has the key {bad[0]!r}; write keys as token IDs in decimal")
        own_stops = () if sampling.ignore_eos else self.engine.tokenizer.stop_ids
        experts, left = sampling.return_routed_experts, max(self.engine.config.max_model_len - len(tokens), 1)
        version, epoch, oldest = sampling.policy_version, sampling.policy_epoch, sampling.oldest_prefix_version
        return request_lib.GenerateRequest(
            tokens=tokens,
            num_samples=sampling.n,
            max_tokens=left if sampling.max_tokens is None else sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=0 if sampling.top_k == -1 else sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed % 2**32,
            stop_ids=tuple(dict.fromkeys([*sampling.stop_token_ids, *own_stops])),
            stop_texts=(sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop),
            logit_bias=tuple((int(token), float(value)) for token, value in sampling.logit_bias.items()),
            allowed_ids=tuple(dict.fromkeys(sampling.allowed_token_ids or ())),
            min_tokens=sampling.min_tokens,
            proofs=sampling.proofs,
            policy_version=-1 if version is None else version,
            policy_epoch=-1 if epoch is None else epoch,
            oldest_prefix_version=-1 if oldest is None else oldest,
            raw_logprobs=sampling.untempered_logprobs,
            prompt_logprobs=sampling.prompt_logprobs is not None,
            routed_experts=self.engine.config.routed_experts if experts is None else experts,
            kept_tokens=sampling.return_kept_tokens,
            **extra,
        )

    def vouch(self, request: request_lib.GenerateRequest, completion: completion_lib.Completion, index: int) -> bytes:
        """Returns the signature of sample `index` of a request; b"" without a key, and for a sample that no replay can check."""
        own_stops = set(request.stop_ids) == set(self.engine.tokenizer.stop_ids)
        is_plain = request.proofs and own_stops and not request.stop_texts and request.adapter == adapter_set.NONE
        if self.signer is None or not is_plain:
            return b""
        settings = {name: getattr(request, name) for name in ("top_k", "top_p", "min_p", "max_tokens")}
        message = attestation.message(
            request.tokens,
            completion,
            temperature=request.temperature,
            seed=request.seed_of(index),
            settings=settings | {"return_routed_experts": request.routed_experts, "run": self.run},
        )
        return self.signer.private.sign(message)

    def close(self) -> None:
        """Stops the server's scheduler, and the replay on its other hosts, and closes its connections to relays."""
        self.scheduler.close()
        multihost_replay.send(self.hosts, "close")
        if self.weights is not None:
            self.weights.close()

    def _broadcast_of(self, folder: pathlib.Path, version: int | None) -> tuple[str, int | None]:
        """Returns the broadcast and the version that a folder names: itself, or the folder above if it is that of a version."""
        own = re.fullmatch(r"v(\d{8,})", folder.name)
        if own is None or not (folder / "manifest.json").is_file():
            return str(folder), version
        if version not in (None, int(own[1])):
            raise ValueError(f"weight_dir is version {int(own[1])}, not {version}; leave version out")
        return checked_source(str(folder.parent), self.sources), int(own[1])

    def _update_from_broadcast(
        self,
        root: source_lib.Source | str,
        version: int | None,
        *,
        is_own: bool,
        epoch: int | None,
        digest: str,
        rollback: bool,
    ) -> int:
        """Does as `update` for a broadcast; `is_own`: the one that the server started with."""
        is_proved = bool(self.key or digest)
        epoch = epoch if is_proved else None  # an unsigned one proves nothing: only version numbers count
        pins = {"key": self.key, "epoch": epoch, "digest": digest}
        if version is None:
            newest = broadcast.latest_order(root, key=self.key)
            if is_own and not rollback and (newest is None or newest <= self._floor()):
                return self.scheduler.version
            if newest is None:
                raise FileNotFoundError(f"no published version under {root}; send the root of a weight broadcast")
            version = newest[1]
        elif is_own and (epoch or digest or not isinstance(root, source_lib.Directory)):
            broadcast.wait_for(root, version, timeout_s=weights_lib.RELAY_LAG_S, **pins)
        target = broadcast.read_manifest(root, version, key=self.key, digest=digest)
        if epoch not in (None, target.epoch or 0):
            found = f"version {version} is of epoch {target.epoch or 0}, not {epoch}"
            raise ValueError(f"{found}; send the epoch of the run's head")
        is_same = self._order(target, is_proved) == self._order(self.have, is_proved)
        if is_same and self.have is not None and target.digest == self.have.digest:
            return self.scheduler.version
        self._check_order(self._order(target, is_proved), rollback, is_proved)
        offered = self._offered(digest) if is_own else None
        if offered is not None:
            pulled = dataclasses.replace(offered, digest=target.digest)
        else:
            place = root if isinstance(root, str) else None
            with self._all_fetching(source=place, version=version, tree=target.digest, epoch=epoch, digest=digest):
                pulled = weights_lib.fetch(self.store, root, version, self.have, **pins)
        # The source may have changed since.
        self._check_order(self._order(pulled, is_proved), rollback, is_proved)
        return self._swap(pulled.params, pulled.version, pulled)

    def _update_from_model(self, folder: pathlib.Path, version: int | None, rollback: bool) -> int:
        if self.key is not None:
            found = f"{folder} is a Hugging Face folder, which has no signature"
            found += ", and this server takes only weights signed by --weights_key"
            raise ValueError(f"{found}; publish them with that key, or start a server without --weights_key")
        version = self.scheduler.version + 1 if version is None else version
        self._check_order((0, version), rollback)
        config = hf.read_config(folder, dtype=self.engine.model.dtype)
        if config != self.engine.model:
            raise ValueError(f"{folder} has another model than this server; send the same model, or start a new server")
        with self._all_fetching(folder=str(folder)):
            params = weights_lib.load_folder(folder, self.store, on_host=True)
            weights_lib.check_params(params, self.store)
        return self._swap(params, version)

    def _order(self, weights: broadcast.Pulled | manifest.Manifest | None, is_proved: bool = False) -> tuple[int, int]:
        """Returns (epoch, version) of `weights`, None for those of a Hugging Face folder. An epoch that nothing proves is 0."""
        if weights is None:
            return 0, self.scheduler.version
        return (weights.epoch or 0) if self.key or is_proved else 0, weights.version

    def _floor(self, is_proved: bool = False) -> tuple[int, int]:
        """Returns the order that other weights must exceed: that of the weights in use, unless their key was revoked since.

        Otherwise a stolen key could sign an epoch so high that nothing of the honest keys is ever newer, as in `HeadVerifier`.
        """
        is_revoked = bool(self.signers - self._trusted_keys())
        return (-1, -1) if is_revoked else self._order(self.have, is_proved)

    def _offered(self, digest: str) -> broadcast.Pulled | None:
        """Returns the offered weights of policy `digest`; None without them, or if a swap to others has deleted them."""
        offered = self.offered  # another thread replaces it
        if offered is None or not digest or offered[0] != digest:
            return None
        pulled = offered[1].result()
        return None if any(leaf.is_deleted() for leaf in jax.tree.leaves(pulled.params)) else pulled

    def _trusted_keys(self) -> frozenset[str]:
        verifier = head.verifier_of(self.key)
        return verifier.keys if verifier is not None else frozenset()

    def _check_order(self, order: tuple[int, int], rollback: bool, is_proved: bool = False) -> None:
        """Raises ValueError for weights that are not newer than those in use: a number is one policy, for every rollout."""
        current = self._floor(is_proved)
        if order <= current and not rollback:
            new, used = (f"version {one[1]}" + f" of epoch {one[0]}" * (one[0] > 0) for one in (order, current))
            found = f"{new} {'has other weights' if order == current else 'is older'} than {used}, which is in use"
            raise ValueError(f'{found}; send a newer version, or "rollback": true to load it all the same')

    @contextlib.contextmanager
    def _all_fetching(self, **what) -> Iterator[None]:
        """Makes the other hosts fetch the same weights during the block. Raises OSError after it if one of them could not."""
        multihost_replay.send(self.hosts, "fetch", **what)
        try:
            yield
        finally:
            problems = self.hosts.answers()
        for host, problem in problems.items():
            if problem:
                raise OSError(f"host {host} could not fetch these weights: {problem}")

    def _swap(self, params: transformer.Params, version: int, pulled: broadcast.Pulled | None = None) -> int:
        epoch = (pulled and pulled.epoch) or 0

        def load(old: transformer.Params) -> transformer.Params:
            nonlocal pulled
            engine = self.engine
            with (
                engine.sent("swap") if isinstance(engine, multihost_replay.LeadingEngine) else contextlib.nullcontext()
            ):
                loaded, pulled = weights_lib.put(self.store, params, pulled, old, self.have)
            return loaded

        version = self.scheduler.update(load, version, epoch).result()
        self.have, self.signers = pulled, self._trusted_keys()
        self.on_version(version)
        return version


def checked_source(source: str, prefixes: Iterable[str]) -> str:
    """Returns `source`, with links resolved if it is a path. Raises ValueError if it is neither one of `prefixes` nor below one."""
    found = _resolve(source) if "://" not in source else source
    if "://" in source and not _PLAIN_URL.fullmatch(source):
        text = f"weight_dir {source[:200]!r} is not a plain URL"
        raise ValueError(f"{text}; send SCHEME://HOST/PATH without user, query or escapes")
    roots = (prefix if "://" in prefix else _resolve(prefix) for prefix in prefixes)
    if not any(f"{found.rstrip('/')}/".startswith(f"{root.rstrip('/')}/") for root in roots):
        text = f"weight_dir {source[:200]!r} is not one of this server's sources"
        raise ValueError(f"{text}; send one of those, or start the server with --weights_allow and a prefix of it")
    return found


def _resolve(path: str) -> str:
    try:
        return str(pathlib.Path(path).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a NUL, or links in a ring
        raise ValueError(f"weight_dir {path[:200]!r} is not a path: {error}; send a path or a URL") from error
