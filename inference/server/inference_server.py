"""A running engine behind the routes: where its weights come from, and what a client's request means to it.

1. `start` waits for the first version of a broadcast (its manifest names model and tokenizer); `start_model` loads a
   Hugging Face folder. Either compiles its large programs side by side, then runs one request.
2. `InferenceServer.request` turns the wire's sampling fields into a `GenerateRequest`; what is not given gets its default here.
3. `InferenceServer.update` pulls other weights while the old ones serve, checks them against the model, and swaps them in between
   two steps. Whatever fails before that leaves the old weights serving.
"""

import dataclasses
import os
import pathlib
import re
import threading
from collections.abc import Callable, Sequence

import jax

from inference.engine import engine as engine_lib
from inference.engine import weights as weights_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.scheduler import warmup
from inference.server import schemas
from models import config as config_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from sharding import broadcast, rules
from sharding import mesh as mesh_lib
from sharding.download import source as source_lib

RELAY_LAG_S = 60.0  # how long a version that was announced may take to reach our relays
NOTICE_S = 5.0  # how long a server waits for the first version before it says so


@dataclasses.dataclass
class InferenceServer:
    """A running engine and where its weights come from."""

    weights: source_lib.Source | None  # the broadcast, opened; None: updates name their folder
    scheduler: scheduler_lib.Scheduler
    engine: engine_lib.Engine
    store: weights_lib.Store | None
    model_name: str = "policy"
    key: str | None = None  # hex of the publisher's public key; None: any
    have: broadcast.Pulled | None = None  # what serves now, from which deltas lead on
    update_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def tokenizer(self) -> tokenizer_lib.Tokenizer:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.config.max_model_len

    def update(self, version: int | None, source: str | None = None) -> int:
        """Swaps other weights in and returns the version in force. Blocks.

        `version` of the broadcast `source` (ours when None), or its newest when None. `source` may also be one version's
        own folder, or a Hugging Face folder, which is then served as `version` (the next number when None).
        """
        with self.update_lock:
            if source is None and self.weights is None:
                raise ValueError("this server was started without a broadcast; name a weight_dir")
            root = self.weights if source is None else source
            if source is not None and "://" not in source:
                folder = pathlib.Path(source)
                if (folder / "config.json").is_file():
                    return self._update_from_model(folder, version)
                if (own := re.fullmatch(r"v(\d{8,})", folder.name)) and (folder / "manifest.json").is_file():
                    root, version = str(folder.parent), int(own[1])
            if version is None:
                version = broadcast.latest(root)
                if version is None and source is not None:
                    raise FileNotFoundError(f"no published version under {root}; name the root of a broadcast")
            if version is None or (version == self.scheduler.version and source is None):
                return self.scheduler.version
            if source is None and not isinstance(root, source_lib.Directory):
                broadcast.wait_for(root, version, timeout_s=RELAY_LAG_S)
            pulled = broadcast.pull(root, version, shardings=self.store.load_shardings, base=self.have, key=self.key)
            version = self._swap(pulled.params, pulled.version)
            self.have = pulled if source is None else None
            return version

    def request(self, sampling: schemas.Sampling, tokens: Sequence[int], **extra) -> scheduler_lib.GenerateRequest:
        """What the scheduler is asked for; `extra` are fields of `GenerateRequest` that a route decides."""
        for name, neutral in (("frequency_penalty", 0), ("presence_penalty", 0), ("repetition_penalty", 1)):
            if getattr(sampling, name) not in (None, neutral):
                raise ValueError(
                    f"{name} = {getattr(sampling, name)} is not supported; leave it out, or send {neutral}"
                )
        if (sampling.routed_experts_prompt_start or 0) >= max(len(tokens), 1):
            raise ValueError(
                f"routed_experts_prompt_start = {sampling.routed_experts_prompt_start} must be below the prompt's "
                f"{len(tokens)} tokens"
            )
        stop_ids = dict.fromkeys(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stop_ids |= dict.fromkeys(self.tokenizer.stop_ids)
        stop = sampling.stop
        fields = {
            "num_samples": _given(sampling.n, 1),
            "max_tokens": _given(sampling.max_tokens, max(self.max_model_len - len(tokens), 1)),
            "temperature": _given(sampling.temperature, 1.0),
            "top_k": 0 if sampling.top_k in (None, -1) else sampling.top_k,
            "top_p": _given(sampling.top_p, 1.0),
            "min_p": _given(sampling.min_p, 0.0),
            "seed": int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed % 2**32,
            "stop_ids": tuple(stop_ids),
            "stop_texts": (stop,) if isinstance(stop, str) else tuple(stop or ()),
            "logit_bias": _bias(sampling.logit_bias or {}),
            "raw_logprobs": bool(sampling.untempered_logprobs),
            "prompt_logprobs": sampling.prompt_logprobs is not None,
            "routed_experts": _given(sampling.return_routed_experts, self.engine.config.routed_experts),
        }
        return scheduler_lib.GenerateRequest(tokens=tokens, **fields | extra)

    def close(self) -> None:
        """Ends the scheduler, and the connections to relays."""
        self.scheduler.close()
        if self.weights is not None:
            self.weights.close()

    def _update_from_model(self, folder: pathlib.Path, version: int | None) -> int:
        from models import hf

        config = hf.read_config(folder)
        if config != self.engine.model:
            raise ValueError(f"{folder} is another model than the one that serves; start a server of its own on it")
        params = _load_folder(folder, self.store)
        return self._swap(params, self.scheduler.version + 1 if version is None else version)

    def _swap(self, params: transformer.Params, version: int) -> int:
        check_params(params, self.engine.model)
        return self.scheduler.update(self.store.keep(params), version).result()


def start(
    weights: str | Sequence[str],
    config: engine_lib.EngineConfig,
    *,
    key: str | None = None,
    timeout_s: float = 600.0,
    mesh: dict[str, int] | None = None,
    quantize: str = "none",
    every_length: bool = False,
    say: Callable[[str], None] = lambda line: None,
    **options,
) -> InferenceServer:
    """Loads the newest weights under `weights` (waiting for the first), compiles, and starts the scheduler.

    `weights`: a directory, a bucket URL, or the URLs of relays. `key`: hex of the public key that must have signed them.
    `mesh`: sizes of the axes of a mesh over this host's devices; one device when None. `quantize`: a name of
    weights.QUANTIZATIONS. `every_length`: compile for prompts of every length now. `say` hears what takes long.
    `options`: those of `Scheduler`.
    """
    devices = host_mesh(mesh, config)
    source = source_lib.open(weights, trusted_key=key)
    try:
        version = broadcast.wait_for(source, 0, timeout_s=min(NOTICE_S, timeout_s))
    except TimeoutError as error:
        say(f"waiting for weights: {error}")
        version = broadcast.wait_for(source, 0, timeout_s=timeout_s)
    say(f"loading policy version {version}")
    metadata = broadcast.read_manifest(source, version, key=key).metadata
    if not {"model", "tokenizer"} <= metadata.keys():
        raise ValueError(
            f"version {version} under {weights} says neither its model nor its tokenizer, as those of sharding.broadcast "
            f"publish-dir do not; serve what rl.train publishes, or a folder by --model"
        )
    model = config_lib.ModelConfig(**metadata["model"])
    store = weights_lib.Store(model, devices, quantize)
    pulled = broadcast.pull(source, version, shardings=store.load_shardings, key=key)
    tokenizer = tokenizer_lib.load(metadata["tokenizer"])
    server = _serve(source, tokenizer, config, pulled.params, pulled.version, store, options, say, every_length)
    server.key, server.have = key, pulled
    return server


def start_model(
    folder: str,
    config: engine_lib.EngineConfig,
    *,
    mesh: dict[str, int] | None = None,
    quantize: str = "none",
    every_length: bool = False,
    say: Callable[[str], None] = lambda line: None,
    **options,
) -> InferenceServer:
    """Loads a Hugging Face folder, or a hub id, as version 0; see `start`."""
    from models import hf, hub

    say(f"loading {folder}")
    folder = str(hub.folder(folder))
    devices = host_mesh(mesh, config)
    tokenizer = tokenizer_lib.load(folder)
    store = weights_lib.Store(hf.read_config(folder), devices, quantize)
    return _serve(None, tokenizer, config, _load_folder(folder, store), 0, store, options, say, every_length)


def host_mesh(sizes: dict[str, int] | None, config: engine_lib.EngineConfig) -> jax.sharding.Mesh:
    """A mesh over the devices of this process: all of them if sizes are given, or the first. ValueError if it cannot serve."""
    devices = jax.local_devices()
    mesh = mesh_lib.create(sizes, devices) if sizes else mesh_lib.create({}, devices[:1])
    engine_lib.check_mesh(config, mesh)
    return mesh


def check_params(params: transformer.Params, model: config_lib.ModelConfig) -> None:
    """ValueError naming the first tensor that is not of this model."""
    expected = _by_path(transformer.abstract(model))
    given = _by_path(params)
    for path in sorted(expected.keys() | given.keys()):
        if path not in given or path not in expected:
            where = "lack" if path not in given else "have"
            raise ValueError(
                f"the new weights {where} {path}, which the model that serves {_HAS[where]}; they are refused"
            )
        new, old = given[path], expected[path]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"the new weights have {path} as {new.dtype}{list(new.shape)}; the model that serves needs "
                f"{old.dtype}{list(old.shape)}, so they are refused"
            )


_HAS = {"lack": "needs", "have": "has not"}


def _serve(
    weights,
    tokenizer,
    config: engine_lib.EngineConfig,
    params,
    version: int,
    store,
    options: dict,
    say: Callable,
    every_length: bool,
) -> InferenceServer:
    if tokenizer.vocab_size > store.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} entries and the model {store.model.vocab_size}: they are not of one "
            f"checkpoint; give a folder whose tokenizer.json and config.json belong together"
        )
    check_params(params, store.model)
    say("compiling")
    params = store.keep(params)
    engine = engine_lib.Engine(store.model, config, tokenizer, params, store.mesh)
    scheduler = scheduler_lib.Scheduler(
        engine, params, version, state=warmup.compile_largest(engine, params), **options
    )
    for request in warmup.requests(config, every_length=every_length):
        scheduler.submit(request).result()
    return InferenceServer(weights, scheduler, engine, store)


def _load_folder(folder: str | pathlib.Path, store: weights_lib.Store) -> transformer.Params:
    """The weights of a Hugging Face folder, where the store wants them."""
    from models import hf

    if store.load_shardings is not None:
        return hf.load(folder, shardings=store.load_shardings)[1]
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    specs = transformer.specs(store.model)
    return hf.load(folder, shardings=jax.tree.map(lambda _: host, specs, is_leaf=rules.is_spec))[1]


def _by_path(tree) -> dict[str, jax.ShapeDtypeStruct]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _given(value, default):
    return default if value is None else value


def _bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if bad := [token for token in bias if not re.fullmatch(r"\d{1,9}", token)]:
        raise ValueError(f"logit_bias has the key {bad[0]!r}; keys are token ids in decimal")
    return tuple((int(token), float(value)) for token, value in bias.items())
