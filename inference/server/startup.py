"""The start of an inference server: from a source of weights to one that serves.

1. `prepare` waits for the first version of a broadcast, whose manifest names model and tokenizer; `prepare_model` loads a Hugging
   Face folder, and `prepare_pulled` takes weights that are on the devices.
2. `Prepared.run` compiles the two programs that take longest, prefill and decode, at the same time (`compile_largest`). Then
   warm-up requests run as any others: they compile the copies of prompts into slots, and prefill for further lengths.
3. With several hosts, all prepare, the first runs, and the others follow it (inference/engine/multihost_replay.py).
"""

import concurrent.futures
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from inference.adapters import adapter_set
from inference.engine import cpu_sub_batches, multihost_replay
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.engine import weights as weights_lib
from inference.options import server_options
from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server
from models import config as config_lib
from models import hf, hub, transformer
from models import lora as lora_lib
from models.kernels import cpu_dtype
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from sharding.system import cli
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast
from sharding.weights.download import source as source_lib

START_S = server_options.START_S
NOTICE_S = 5.0  # and before a line about it is logged


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

    def run(self, *, every_length: bool = False, **options) -> inference_server.InferenceServer:
        """Compiles, starts the scheduler, and returns the server of this host, the first.

        `every_length`: compile for prompts of every length now. `options` are those of `Scheduler`.
        """
        cli.note("compiling")
        state = compile_largest(self.engine, self.params)
        options["epoch"] = (self.have and self.have.epoch) or 0
        scheduler = scheduler_lib.Scheduler(self.engine, self.params, self.version, state=state, **options)
        for request in warmup_requests(self.engine, every_length=every_length):
            scheduler.submit(request).result()
        scheduler.forget_counts().result()
        return inference_server.InferenceServer(
            self.weights,
            scheduler,
            self.engine,
            self.store,
            key=self.key,
            have=self.have,
            sources=self.sources,
            hosts=self.hosts,
        )

    def follower(self) -> multihost_replay.Follower:
        """Returns the server of this host, another than the first."""
        return multihost_replay.Follower(
            self.hosts, self.engine, self.params, self.store, self.weights, self.key, self.have
        )


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
      config: sizes of the engine, or a function that returns them for the sizes published with the weights ({} if there are none).
      key: the publisher's key, which must have signed the weights: hex, a root file, or a verifier; None accepts any.
      mesh: {axis: size} of a mesh over the devices of `hosts`; None for one device.
      quantize: one of models.config.QUANTIZATIONS.
      wait_s: seconds that a version may take to appear; None: START_S.
      expected: the metadata that the version will have, if known. A server on one host then compiles its engine while it waits for
        the version.
      chat_template_kwargs: variables of the chat template in requests that do not set them, in addition to those of the run.
      hosts: the hosts that serve together; each calls this function, and loads the version that the first has chosen.
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
            limit_s = START_S if wait_s is None else wait_s
            limit = f", for up to {limit_s:g} s" if limit_s < math.inf else ""
            cli.note(f"waiting for weights{limit}: {error}")
            version = broadcast.wait_for(source, 0, timeout_s=limit_s)
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

    `dtype` is the dtype of weights and activations. "auto" takes the folder's; for a dense model on a CPU it takes the fastest one
    there (models/kernels/cpu_dtype.py). `adapters` has folders by name, to which others may be added up to `max_adapters`. Raises
    ValueError if an adapter does not fit the model.
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


def compile_largest(engine: engine_lib.Engine, params: transformer.Params) -> cpu_sub_batches.State:
    """Compiles the slowest programs (prefill of the shortest bucket, and decode); returns a decode state with no slot in use.

    Where the state follows the load, it has one slot, and no program is slow.
    """
    if engine.follows_load:
        return engine.init_decode_state()
    tokens_PT = np.zeros((engine.config.prefill_batch, engine.config.buckets[0]), np.int32)
    length_P = np.ones((engine.config.prefill_batch,), np.int32)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        chosen = engine.choose(params, [adapter_set.NONE] * len(length_P))
        prefilled = other.submit(engine.prefill_batch, chosen, tokens_PT, length_P)
        chosen = engine.choose(params, [adapter_set.NONE] * engine.config.num_slots)
        state, _ = engine.generate(chosen, engine.init_decode_state())  # no slot is active, so no step runs
        prefilled.result()
    return state


def warmup_requests(engine: engine_lib.Engine, *, every_length: bool) -> Iterator[request_lib.GenerateRequest]:
    """Yields one warm-up request per program to compile, for short prompts or `every_length`. Each must end before the next is sent."""
    config = engine.config
    longest = config.max_model_len - 1  # leaves room for one new token
    shortest = 64 if engine.follows_load else 8
    lengths = [min(bucket, longest) for bucket in (config.buckets if every_length else [shortest])]
    if every_length and longest > config.prefill_chunk:
        for count in config.key_counts[:-1]:  # after it, a short chunk and a whole one
            lengths += [count + 1, min(count + config.prefill_chunk, longest)]
    for length in dict.fromkeys(lengths):
        # With long prompts in all slots, a state that follows the load would take the memory of its whole capacity.
        is_any_size = not engine.follows_load or (every_length and length == lengths[0])
        for size in engine.slot_sizes if is_any_size else (1,):
            yield request_lib.GenerateRequest((0,) * length, max_tokens=1, num_samples=size, proofs=True)


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
    for request in warmup_requests(server.engine, every_length=True):
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
        make = functools.partial(multihost_replay.LeadingEngine, hosts)
    return Prepared(make(store.model, config, tokenizer, store.mesh), params, version, store, hosts)
