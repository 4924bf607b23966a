"""An inference server without its routes: a running engine, the source of its weights, and the meaning of request fields.

1. `prepare` waits for the first version of a broadcast, whose manifest names model and tokenizer; `prepare_model` loads a Hugging
   Face folder. `Prepared.run` compiles the large programs concurrently, then runs one request. With several hosts, all prepare,
   the first runs, and the others follow it (inference/follower).
2. `InferenceServer.request` turns sampling fields of a request into a `GenerateRequest` and fills in defaults.
3. `InferenceServer.update` pulls other weights while the old ones serve, checks them against the model, and swaps them in
   between two engine calls. After an error before the swap, the old weights keep serving; one in the swap ends the scheduler.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
import prometheus_client

from inference.adapters import adapter_set
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.engine import routed_experts
from inference.engine import weights as weights_lib
from inference.follower import follower as follower_lib
from inference.follower import replay
from inference.rollouts import attestation
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.scheduler import warmup
from inference.server import schemas, weight_sources
from models import config as config_lib
from models import hf, hub, transformer
from models import lora as lora_lib
from models.kernels import cpu_dtype
from models.text import tokenizer as tokenizer_lib
from sharding import broadcast, rules
from sharding import mesh as mesh_lib
from sharding.download import source as source_lib
from sharding.format import gguf_header, head, manifest
from sharding.logs import role_metrics
from sharding.multihost import hosts as hosts_lib
from sharding.system import cli

START_S = 3600.0  # how long to wait for the first version: a learner loads a large checkpoint before it
NOTICE_S = 5.0  # and before a line about it is logged
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
    signers: frozenset[str] = frozenset()  # the keys that were trusted when `have` was loaded
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
            root = self.weights if source is None else weight_sources.check(source, self.sources)
            if root is None:
                raise ValueError("this server has no weight broadcast to update from; send a weight_dir")
            if isinstance(root, str) and "://" not in root:
                folder = pathlib.Path(root)
                if (folder / "config.json").is_file() or gguf_header.is_gguf(folder):
                    return self._update_from_model(folder, version, rollback)
                if (own := re.fullmatch(r"v(\d{8,})", folder.name)) and (folder / "manifest.json").is_file():
                    if version not in (None, int(own[1])):
                        raise ValueError(f"weight_dir is version {int(own[1])}, not {version}; leave version out")
                    root, version = weight_sources.check(str(folder.parent), self.sources), int(own[1])
            is_proved = bool(self.key or digest)
            epoch = epoch if is_proved else None  # an unsigned one proves nothing: only version numbers count
            if version is None:
                newest = broadcast.latest_order(root, key=self.key)
                if source is None and not rollback and (newest is None or newest <= self._floor()):
                    return self.scheduler.version
                if newest is None:
                    raise FileNotFoundError(f"no published version under {root}; send the root of a weight broadcast")
                version = newest[1]
            elif source is None and (epoch or digest or not isinstance(root, source_lib.Directory)):
                broadcast.wait_for(
                    root, version, timeout_s=weights_lib.RELAY_LAG_S, key=self.key, epoch=epoch, digest=digest
                )
            target = broadcast.read_manifest(root, version, key=self.key, digest=digest)
            if epoch not in (None, target.epoch or 0):
                found = f"version {version} is of epoch {target.epoch or 0}, not {epoch}"
                raise ValueError(f"{found}; send the epoch of the run's head")
            pins = {"key": self.key, "epoch": epoch, "digest": digest}
            is_same = self._order(target, is_proved) == self._order(self.have, is_proved)
            if is_same and self.have is not None and target.digest == self.have.digest:
                return self.scheduler.version
            self._check_order(self._order(target, is_proved), rollback, is_proved)
            offered = self._offered(digest) if source is None else None
            if offered is not None:
                pulled = dataclasses.replace(offered, digest=target.digest)
            else:
                asked = {"source": root if isinstance(root, str) else None, "version": version, "tree": target.digest}
                with self._all_fetching(**asked, epoch=epoch, digest=digest):
                    pulled = weights_lib.fetch(self.store, root, version, self.have, **pins)
            # The source may have changed since.
            self._check_order(self._order(pulled, is_proved), rollback, is_proved)
            return self._swap(pulled.params, pulled.version, pulled)

    def adapter_of(self, name: str | None) -> int:
        """Returns the number of the adapter that a request names as its model; -1 for the model itself. Raises UnknownModel for other names."""
        if name in (None, self.model_name):
            return adapter_set.NONE
        if (number := self.engine.adapters and self.engine.adapters.numbers.get(name)) is None:
            remedy = f"send {self.model_name!r} or another that GET /v1/models lists, or leave model out"
            raise UnknownModel(f"The model `{name[:64]}` does not exist. Please {remedy}.")
        return number

    def request(self, sampling: schemas.Sampling, tokens: Sequence[int], **extra) -> request_lib.GenerateRequest:
        """Returns the scheduler's request to complete the prompt `tokens`. Raises ValueError for fields of `sampling` out of range.

        `extra` are fields of `GenerateRequest` that the route sets.
        """
        if sampling.routed_experts_prompt_start >= max(len(tokens), 1):
            start = f"routed_experts_prompt_start = {sampling.routed_experts_prompt_start}"
            raise ValueError(f"{start} is past the prompt's {len(tokens)} tokens; send a smaller one")
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

    def vouch(self, request: request_lib.GenerateRequest, completion: request_lib.Completion, index: int) -> bytes:
        """Returns the signature of sample `index` of a request; b"" without a key, and for a sample that no replay can check."""
        own_stops = set(request.stop_ids) == set(self.engine.tokenizer.stop_ids)
        is_plain = request.proofs and own_stops and not request.stop_texts and request.adapter == adapter_set.NONE
        if self.signer is None or not is_plain:
            return b""
        answer = {field.name: getattr(completion, field.name) for field in dataclasses.fields(attestation.Answer)}
        if answer["experts"] is not None:
            answer["experts"] = routed_experts.with_all_layers(answer["experts"], self.engine.model)
        settings = {name: getattr(request, name) for name in ("top_k", "top_p", "min_p", "max_tokens")}
        asked = {"temperature": request.temperature, "seed": (request.seed + index) % 2**32}
        asked["settings"] = settings | {"return_routed_experts": request.routed_experts, "run": self.run}
        return self.signer.private.sign(attestation.message(request.tokens, attestation.Answer(**answer), **asked))

    def close(self) -> None:
        """Stops the server's scheduler, and the replay on its other hosts, and closes its connections to relays."""
        self.scheduler.close()
        replay.send(self.hosts, "close")
        if self.weights is not None:
            self.weights.close()

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
        replay.send(self.hosts, "fetch", **what)
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
            with engine.sent("swap") if isinstance(engine, replay.LeadingEngine) else contextlib.nullcontext():
                loaded, pulled = weights_lib.put(self.store, params, pulled, old, self.have)
            return loaded

        version = self.scheduler.update(load, version, epoch).result()
        self.have, self.signers = pulled, self._trusted_keys()
        self.on_version(version)
        return version


@dataclasses.dataclass
class Prepared:
    """A server before its scheduler: weights on the devices, and the engine. Each host of a server prepares; the first then runs it."""

    engine: engine_lib.Engine
    params: transformer.Params
    version: int
    store: weights_lib.Store
    hosts: hosts_lib.Hosts
    sources: Sequence[str] = ()  # the following fields are those of `InferenceServer`
    weights: source_lib.Source | None = None
    key: source_lib.Trusted = None
    have: broadcast.Pulled | None = None

    def run(self, *, every_length: bool = False, **options) -> InferenceServer:
        """Compiles, starts the scheduler, and returns the server of this host, the first.

        `every_length`: compile for prompts of every length now. `options` are those of `Scheduler`.
        """
        cli.note("compiling")
        state = warmup.compile_largest(self.engine, self.params)
        options["epoch"] = (self.have and self.have.epoch) or 0
        scheduler = scheduler_lib.Scheduler(self.engine, self.params, self.version, state=state, **options)
        for request in warmup.requests(self.engine, every_length=every_length):
            scheduler.submit(request).result()
        scheduler.forget_counts().result()
        own = {name: getattr(self, name) for name in ("key", "have", "sources", "hosts")}
        server = InferenceServer(self.weights, scheduler, self.engine, self.store, **own)
        server.signers = server._trusted_keys()
        return server

    def follower(self) -> follower_lib.Follower:
        """Returns the server of this host, another than the first."""
        parts = self.hosts, self.engine, self.params, self.store, self.weights, self.key, self.have
        return follower_lib.Follower(*parts)


def prepare(
    weights: str | Sequence[str],
    config: engine_lib.EngineConfig | Callable[[dict], engine_lib.EngineConfig],
    *,
    key: source_lib.Trusted = None,
    mesh: dict[str, int] | None = None,
    quantize: str = "none",
    wait_s: float | None = None,
    expected: dict | None = None,
    chat_template_kwargs: Mapping | None = None,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> Prepared:
    """Prepares a server of the newest version of a weight broadcast. Blocks until a version exists and is on the devices.

    Args:
      weights: a directory, a bucket URL, or the URLs of relays. Raises TimeoutError if no version appears within `wait_s`.
      config: sizes of the engine, or the function from those that were published with the weights ({} if none were).
      key: of the publisher, who must have signed the weights: hex, a root file, or a verifier; None accepts any.
      mesh: {axis: size} of a mesh over the devices of `hosts`; None for one device.
      quantize: one of weights.QUANTIZATIONS.
      wait_s: how long a version may take to appear; None: START_S.
      expected: the metadata that the version will have, if known: then a process alone compiles the engine while it does not exist.
      chat_template_kwargs: variables of the chat template in requests that do not set them, in addition to those of the run.
      hosts: those that serve together; each calls this function, and loads the version that the first has chosen.
    """
    source, version = source_lib.open(weights, trusted_key=key), 0

    def tokenizer(metadata: dict) -> tokenizer_lib.Tokenizer:
        variables = {**metadata.get("chat_template_kwargs", {}), **(chat_template_kwargs or {})}
        return tokenizer_lib.load(metadata["tokenizer"], variables=variables)

    if expected and hosts.count == 1:
        if not {"model", "tokenizer"} <= expected.keys():
            raise ValueError("the expected metadata has no model and tokenizer; give those of a published manifest")
        _compile(source, key, *_sizes(expected, config, mesh, quantize, hosts), tokenizer(expected))
    if hosts.is_first:
        try:
            version = broadcast.wait_for(source, 0, timeout_s=NOTICE_S)
        except TimeoutError as error:
            cli.note(f"waiting for weights: {error}")
            version = broadcast.wait_for(source, 0, timeout_s=START_S if wait_s is None else wait_s)
        cli.note(f"loading policy version {version}")
    version = hosts.broadcast(version)
    if not hosts.is_first:
        broadcast.wait_for(source, version, timeout_s=weights_lib.RELAY_LAG_S, key=key)
    metadata = broadcast.read_manifest(source, version, key=key).metadata
    if not {"model", "tokenizer"} <= metadata.keys():
        found = f"version {version} under {weights} has a manifest without model and tokenizer"
        found += ", as publish-dir of sharding.broadcast writes it"
        raise ValueError(f"{found}; serve weights that rl.train published, or a folder by --model")
    sizes, store = _sizes(metadata, config, mesh, quantize, hosts)
    pulled = _pull(source, version, store, key, hosts)
    if hosts.broadcast(pulled.digest) != pulled.digest:
        raise ValueError(f"version {version} under {weights} is another here than on host 0; give both one source")
    sources = [weights] if isinstance(weights, str) else weights
    return prepare_pulled(pulled, source, sizes, store, tokenizer(metadata), key=key, sources=sources, hosts=hosts)


def prepare_pulled(
    pulled: broadcast.Pulled,
    source: source_lib.Source,
    config: engine_lib.EngineConfig,
    store: weights_lib.Store,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    key: source_lib.Trusted = None,
    sources: Sequence[str] = (),
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> Prepared:
    """Prepares a server of weights that are on its devices already; later versions come from the broadcast `source`.

    `key` and `hosts` are those of `prepare`.
    """
    prepared = _prepared(config, store, tokenizer, pulled.params, pulled.version, hosts)
    have = weights_lib.as_base(store, pulled, prepared.params)
    return dataclasses.replace(prepared, weights=source, key=key, have=have, sources=sources)


def prepare_model(
    folder: str,
    config: engine_lib.EngineConfig,
    *,
    mesh: dict[str, int] | None = None,
    quantize: str = "none",
    dtype: str = "auto",
    chat_template_kwargs: Mapping | None = None,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
    adapters: Mapping[str, str] = {},
    max_adapters: int = 0,
    max_adapter_rank: int = 16,
) -> Prepared:
    """Prepares a server of the weights of a Hugging Face folder or hub ID, as version 0. Other arguments are those of `prepare`.

    `dtype` is that of weights and activations. "auto" is the folder's, but for a dense model on a CPU the one that is fastest there.
    `adapters` has folders by name, to which others may be added up to `max_adapters`. Raises ValueError if one does not fit the model.
    """
    cli.note(f"loading {folder}")
    folder = str(hub.folder(folder))
    devices, model = host_mesh(mesh, config, hosts), hf.read_config(folder)
    if dtype == "auto" and devices.size == 1 and devices.devices.flat[0].platform == "cpu" and not model.num_experts:
        dtype, reason = cpu_dtype.fastest()
        cli.note(reason)
    model = hf.read_config(folder, dtype=None if dtype == "auto" else dtype)
    store, own = weights_lib.Store(model, devices, quantize), None
    if num := max(len(adapters), max_adapters):
        own = adapter_set.AdapterSet(model, devices, num, max_adapter_rank)
        for name, path in adapters.items():
            own.load(name, path, own.read(name, path))
    tokenizer = tokenizer_lib.load(folder, variables=chat_template_kwargs)
    prepared = _prepared(config, store, tokenizer, weights_lib.load_folder(folder, store), 0, hosts, own)
    return dataclasses.replace(prepared, sources=[folder])


def host_mesh(
    sizes: dict[str, int] | None, config: engine_lib.EngineConfig, hosts: hosts_lib.Hosts = hosts_lib.ALONE
) -> jax.sharding.Mesh:
    """Returns a mesh over all devices of `hosts`, or, for a process alone and empty `sizes`, over its first device.

    Raises ValueError if the engine of `config` cannot run on that mesh, or an accelerator cannot be used.
    """
    mesh_lib.devices()
    if hosts.count > 1 and not sizes:
        found = f"--mesh is empty, and {hosts.count} hosts have {jax.device_count()} devices"
        raise ValueError(f"{found}, all of which a server over several hosts uses; give their axes, such as tensor=-1")
    devices = jax.local_devices() if hosts.count == 1 else jax.devices()
    mesh = mesh_lib.create(sizes, devices) if sizes else mesh_lib.create({}, devices[:1])
    engine_lib.check_mesh(config, mesh)
    return mesh


def _sizes(metadata: dict, config, mesh, quantize: str, hosts) -> tuple[engine_lib.EngineConfig, weights_lib.Store]:
    """Returns the sizes of the engine, and how it keeps its weights, for versions with this metadata. Other arguments are those of `prepare`."""
    if not isinstance(config, engine_lib.EngineConfig):
        published = metadata.get("engine")
        config = config(published if isinstance(published, dict) else {})
    model, lora = config_lib.ModelConfig(**metadata["model"]), lora_lib.of_metadata(metadata)
    return config, weights_lib.Store(model, host_mesh(mesh, config, hosts), quantize, lora)


def _pull(source, version: int, store: weights_lib.Store, key, hosts: hosts_lib.Hosts) -> broadcast.Pulled:
    """Returns a version; on a host alone the newest one instead, if a run that is faster than the pull deletes it meanwhile."""
    while True:
        try:
            return broadcast.pull(source, version, shardings=store.load_shardings, key=key)
        except FileNotFoundError as error:
            newest = broadcast.latest(source, key=key)
            if hosts.count > 1 or newest in (None, version):
                raise
            cli.note(f"{error}; loading policy version {newest}")
            version = newest


def _compile(source, key, config: engine_lib.EngineConfig, store: weights_lib.Store, tokenizer) -> None:
    """Compiles the programs of a server, which JAX keeps: runs one on parameters of zeros. For further lengths only until a version exists."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), rules.abstract(store.plain_specs))
    server = _prepared(config, store, tokenizer, zeros, 0, hosts_lib.ALONE).run()
    for request in warmup.requests(server.engine, every_length=True):
        try:
            broadcast.wait_for(source, 0, timeout_s=0, key=key)
            break
        except TimeoutError:
            server.scheduler.submit(request).result()
    server.close()
    del server, zeros
    gc.collect()  # before the weights come


def _prepared(
    config,
    store: weights_lib.Store,
    tokenizer: tokenizer_lib.Tokenizer,
    params,
    version: int,
    hosts: hosts_lib.Hosts,
    adapters: adapter_set.AdapterSet | None = None,
) -> Prepared:
    if tokenizer.vocab_size > store.model.vocab_size:
        found = f"the tokenizer has {tokenizer.vocab_size} entries, and the model only {store.model.vocab_size}"
        raise ValueError(f"{found}; use tokenizer.json and config.json of the same checkpoint")
    weights_lib.check_params(params, store)
    params = store.load(params)
    make = functools.partial(engine_lib.Engine, adapters=adapters)
    if hosts.count > 1 and hosts.is_first:
        make = functools.partial(replay.LeadingEngine, hosts)
    return Prepared(make(store.model, config, tokenizer, params, store.mesh), params, version, store, hosts)
