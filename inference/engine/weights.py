"""The weights of a policy in a server: unchanged or as integers, on one device or over a mesh.

1. Unchanged weights are read straight to their devices, later versions to the host first. The layout is that of training
   (`sharding.mesh.rules`), but key heads that do not divide over `tensor` stay whole, with their fraction of the cache.
2. For int8 (models/kernels/int8.py) tensors are read into host memory, then copied to the devices and quantized one by one. So
   the devices never contain more than one full tensor, and deltas are applied to the host's copy.
3. On one CPU device, matrices are output-major (models/kernels/cpu_transposed.py), and those of layers may be in 4 bits.
4. A new version is fetched into host memory while the old one serves (`fetch`), and then takes the place of the old one tensor by tensor
   (`put`), so there is never a second one on the devices. With several hosts, each fetches and puts its own shards.

5. A policy with adapters (models/lora.py) is kept as base and adapters, and attached for the engine. Versions share the base: a new one
   brings the adapters alone, and the base stays where it is.

A server that quantizes samples from another policy, close to the version that it names: a validator with the published weights
rejects its proofs. `/v1/models` reports the quantization.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import hf, transformer
from models import lora as lora_lib
from models.kernels import cpu_transposed, int8
from sharding.mesh import host_memory, rules
from sharding.weights import broadcast
from sharding.weights.download import source as source_lib
from sharding.weights.format import chunks

RELAY_LAG_S = 60.0  # how long an announced version may take to reach the relays


@dataclasses.dataclass(frozen=True)
class Store:
    """Describes how one server keeps the weights of its model: quantized or not, and their layout on its mesh."""

    model: config_lib.ModelConfig
    mesh: jax.sharding.Mesh
    quantization: str = "none"
    lora: lora_lib.LoraConfig | None = None  # None: the policy has no adapters

    def __post_init__(self):
        if self.quantization == "int4" and not self.is_output_major:
            found = "quantize = 'int4' is for a server on one CPU device whose layers are not stacked (scan_layers)"
            raise ValueError(f"{found}; choose int8")

    @property
    def specs(self) -> transformer.Params:
        """The tree of `ParamSpec` (shape and type) of the weights as this server stores them, quantized if it quantizes."""
        if self.quantization == "none":
            return self.plain_specs
        model = int8.specs(transformer.specs(self.model))
        return self.plain_specs | {lora_lib.BASE: model} if self.lora else model

    @property
    def plain_specs(self) -> transformer.Params:
        """The tree of `ParamSpec` of the weights as they are published."""
        return lora_lib.published_specs(transformer.specs(self.model), self.lora)

    @property
    def is_output_major(self) -> bool:
        """True if matrices are kept as `cpu_transposed.Transposed`: on one CPU device, and unless layers are stacked."""
        is_cpu = self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"
        return is_cpu and not self.model.scan_layers

    @property
    def shardings(self) -> transformer.Params:
        """The tree of `NamedSharding` of the weights as stored. Raises ValueError if a dim does not divide over the mesh."""
        return rules.shardings(self.specs, self.mesh)

    @property
    def load_shardings(self) -> transformer.Params | None:
        """The shardings with which to read full weights; None if they are to be read as numpy arrays in host memory (int8)."""
        return self.shardings if self.quantization == "none" else None

    @property
    def abstract(self) -> transformer.Params:
        """The tree of `ShapeDtypeStruct` of the weights as stored, with their shardings."""
        return jax.tree.map(lambda x, s: x.update(sharding=s), rules.abstract(self.specs), self.shardings)

    def load(
        self,
        params: transformer.Params,
        old: transformer.Params | None = None,
        before: transformer.Params | None = None,
    ) -> transformer.Params:
        """Returns full weights, of `load_shardings`, on the devices in the form that the engine takes.

        Leaves may be jax arrays, numpy arrays, or staged ones of `broadcast.pull`. The arrays of `old` are deleted, each before its
        successor is placed: the devices never hold two versions. After an error in between, they hold none. An array of `old` stays if
        its leaf in `params` is the same object as in `before`, the weights that `old` was loaded from. Jax arrays in `params` are
        deleted if the server keeps them in another form.
        """
        specs, structure = jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=_is_spec)
        none = [None] * len(specs)
        olds = none if old is None else structure.flatten_up_to(lora_lib.published(old))
        sources = none if before is None or old is None else structure.flatten_up_to(before)
        loaded = []
        rows = zip(specs, *map(structure.flatten_up_to, (params, self.shardings)), olds, sources, strict=True)
        for (path, spec), new, sharding, old_leaf, source in rows:
            if new is source:
                loaded.append(old_leaf)
                continue
            kept = {id(array) for array in jax.tree.leaves(new)}
            for array in jax.tree.leaves(old_leaf):
                if id(array) not in kept:
                    array.delete()
                    if self.mesh.devices.flat[0].platform == "cpu":
                        host_memory.trim(array.nbytes)
            loaded.append(self._placed(tuple(key.key for key in path), spec, new, sharding))
        return lora_lib.restored(structure.unflatten(jax.block_until_ready(loaded)), self.lora)

    def _placed(self, path: tuple[str, ...], spec, weights, sharding):
        if self.is_output_major and (made := self._output_major(path, weights, sharding)) is not None:
            return made
        if int8.is_quantized(spec):
            full = jax.device_put(np.asarray(weights), sharding.values)
            made = _quantize_to(spec.scale.shape, sharding)(full)
            return jax.block_until_ready(made)  # before the next one is copied
        if isinstance(weights, broadcast.Staged):
            return weights.put()
        return weights if getattr(weights, "sharding", None) == sharding else jax.device_put(weights, sharding)

    def _output_major(self, path: tuple[str, ...], weights, sharding) -> cpu_transposed.Transposed | None:
        """Returns a parameter as the server of a CPU keeps it, None if unchanged. Deletes the jax array that it was, unless it is shared."""
        if isinstance(weights, cpu_transposed.Transposed):
            return weights
        num_inputs = cpu_transposed.num_input_dims(path, self.model.tie_embeddings)
        if num_inputs is None:
            return None
        if isinstance(weights, broadcast.Staged):
            array = weights.put()
        else:
            array = weights if isinstance(weights, jax.Array) else jax.device_put(weights, jax.tree.leaves(sharding)[0])
        is_head, kind = path[-1] in (cpu_transposed.HEAD, int8.EMBEDDING), self.quantization
        kind = "int8" if is_head and kind == "int4" else kind  # logits need more than 4 bits
        made = jax.block_until_ready(cpu_transposed.transpose(array, num_inputs, kind))
        if all(array is not leaf for leaf in jax.tree.leaves(made)):
            array.delete()
        return made


def fetch(
    store: Store, root: source_lib.Source | str, version: int, base: broadcast.Pulled | None, **pins
) -> broadcast.Pulled:
    """Reads a version of a broadcast into host memory, as `store` will need it. `pins` are `key`, `epoch` and `digest` of `broadcast.pull`.

    Raises the errors of `broadcast.pull` and of `check_params`.
    """
    shown = base and dataclasses.replace(base, params=cpu_transposed.views(base.params))
    pulled = broadcast.pull(root, version, shardings=store.load_shardings, staged=True, base=shown, **pins)
    if (found := lora_lib.of_metadata(pulled.metadata)) != store.lora:
        text = f"version {version} has adapters {found}, and this server runs {store.lora}"
        raise ValueError(f"{text}; start a new server for it")
    check_params(pulled.params, store, shown)
    if base is None or shown is None:
        return pulled
    # Leaves that `pull` returned again are those of the base, not views of them.
    leaves = jax.tree.leaves(base.params, is_leaf=cpu_transposed.is_transposed)
    own = {id(view): leaf for view, leaf in zip(jax.tree.leaves(shown.params), leaves, strict=True)}
    return dataclasses.replace(pulled, params=jax.tree.map(lambda leaf: own.get(id(leaf), leaf), pulled.params))


def put(
    store: Store,
    params: transformer.Params,
    pulled: broadcast.Pulled | None,
    old: transformer.Params,
    have: broadcast.Pulled | None,
) -> tuple[transformer.Params, broadcast.Pulled | None]:
    """Returns fetched weights on the devices, in place of `old`, which is deleted, and `pulled` as the base of deltas to come.

    `have` is the version that `old` was loaded from, None for weights of another origin.
    """
    loaded = store.load(params, old, have and have.params)
    return loaded, pulled and as_base(store, pulled, loaded)


def as_base(store: Store, pulled: broadcast.Pulled, loaded: transformer.Params) -> broadcast.Pulled:
    """Returns the version `pulled` as the base of later ones: with the arrays that were loaded, or the host's if these are quantized."""
    if store.load_shardings is None:
        return pulled.locked()
    return dataclasses.replace(pulled, params=lora_lib.published(loaded))


def check_params(params: transformer.Params, store: Store, have: broadcast.Pulled | None = None) -> None:
    """Raises ValueError, naming the first wrong tensor, if the published `params` do not fit the store, or have a number that is not finite.

    Leaves of `have` were checked before.
    """
    expected, given = _types_by_path(rules.abstract(store.plain_specs)), _types_by_path(params)
    for path in sorted(expected.keys() | given.keys()):
        if given.get(path) != expected.get(path):
            found = f"the new weights have {path} as {given.get(path, 'no tensor')}"
            found += f", and the model that serves needs {expected.get(path, 'none')}"
            raise ValueError(f"{found}; publish weights of that model")
    known = {id(leaf) for leaf in jax.tree.leaves(have.params)} if have else ()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if id(leaf) in known:
            continue
        if isinstance(leaf, broadcast.Staged):
            is_finite = leaf.is_finite
        else:
            is_finite = chunks.is_finite(leaf) if isinstance(leaf, np.ndarray) else _is_finite(leaf)
        if not is_finite:
            name = jax.tree_util.keystr(path)
            found = f"the new weights have NaN or infinity in {name}"
            raise ValueError(f"{found}; publish weights of a run that did not diverge")


def load_folder(folder: str | pathlib.Path, store: Store, on_host: bool = False) -> transformer.Params:
    """Reads the weights of a Hugging Face folder onto the devices as `store` requires, or into this host's memory."""
    shardings = None if on_host else store.load_shardings
    return hf.load(folder, dtype=store.model.dtype, shardings=shardings, on_host=shardings is None)[1]


def _is_spec(x: object) -> bool:
    return rules.is_spec(x) or int8.is_quantized(x)


@functools.cache
def _quantize_to(scale_shape: tuple[int, ...], sharding: int8.Quantized):
    return jax.jit(functools.partial(int8.quantize, scale_shape=scale_shape), out_shardings=sharding)


@jax.jit
def _is_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


def _types_by_path(tree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
