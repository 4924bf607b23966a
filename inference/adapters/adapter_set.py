"""The adapters of a server: several next to one base, of which each request names one, as in vLLM.

1. Each adapted kernel has arrays A and B with `num` places next to each other, of `rank` columns of A and rows of B. Unused ones are zero.
   So the programs of any adapters are the same, until one adapts a kernel that none did before.
2. `load` copies an adapter into a place that no request uses. Its number, which no other one ever gets, is the place modulo `num`.
3. `choose` attaches the arrays to the base. A mask gives each sequence of a call its own columns (models/kernels/adapted.py): sequences of
   different adapters run in one batch, and each row is that of its adapter alone.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import lora, transformer
from models.hf import adapter_file

NONE = -1  # the number of a request without an adapter


@dataclasses.dataclass
class AdapterSet:
    """The adapters of one server. One thread, the scheduler's, calls `load`, `unload`, and `choose`; others may read `numbers`."""

    model: config_lib.ModelConfig
    mesh: jax.sharding.Mesh
    num: int  # places
    rank: int  # the highest of an adapter
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)  # of the loaded adapters, by name
    folders: dict[str, str] = dataclasses.field(default_factory=dict)  # of the same
    _next: int = 0  # the least number that was never given
    _arrays: dict = dataclasses.field(default_factory=dict)  # {"a", "b"} at the path of each adapted kernel

    def __post_init__(self):
        if self.model.scan_layers or self.mesh.is_multi_process:
            raise ValueError("adapters are for a server on one host whose layers are not stacked; leave --adapter out")
        for name, value in (("max_adapters", self.num), ("max_adapter_rank", self.rank)):
            if value < 1:
                raise ValueError(f"--{name} = {value} is too small; choose 1 or more")

    def read(self, name: str, folder: str) -> dict:
        """Returns the adapters in a folder for `load`. Raises ValueError in one line if they do not fit this model, or if their rank is too high."""
        if not pathlib.Path(folder).is_dir():
            raise ValueError(f"adapter {name!r}: the folder {folder} does not exist; give one that PEFT wrote")
        try:
            read = adapter_file.load(folder, self.model)
        except ValueError as error:
            raise ValueError(f"adapter {name!r}: {error}") from None
        if (rank := max(pair["a"].shape[-1] for pair in read.values())) > self.rank:
            found = f"adapter {name!r} has rank {rank}, more than --max_adapter_rank {self.rank}"
            raise ValueError(f"{found}; start the server with a higher one")
        return read

    def load(self, name: str, folder: str, read: dict, in_use: Collection[int] = ()) -> int:
        """Puts adapters that `read` returned under `name`; returns their number. `in_use` are the numbers of running requests.

        Raises ValueError if the name is taken, no place is free, or the memory is too small.
        """
        if name in self.numbers:
            raise ValueError(f"The lora adapter {name!r} has already been loaded; unload it, or choose another name.")
        taken = {number % self.num for number in (*self.numbers.values(), *in_use) if number != NONE}
        if not (free := [place for place in range(self.num) if place not in taken]):
            found = f"all {self.num} places for adapters are in use"
            raise ValueError(f"{found}; unload one, or start the server with a higher --max_adapters")
        try:
            for path in self._paths() | read.keys():
                self._put(path, free[0], read.get(path))
        except jax.errors.JaxRuntimeError as error:  # the place stays free, and the scheduler's thread goes on
            found = f"adapter {name!r} does not fit the memory ({str(error).splitlines()[0]})"
            raise ValueError(f"{found}; start the server with a lower --max_adapters, or fewer --num_slots") from None
        number = self._next + (free[0] - self._next) % self.num
        self._next, self.folders[name] = number + 1, folder
        self.numbers[name] = number
        return number

    def unload(self, name: str, in_use: Collection[int] = ()) -> None:
        """Removes the name of adapters; requests `in_use` keep them. Raises KeyError if no adapter has the name."""
        del self.numbers[name], self.folders[name]

    def choose(self, params: transformer.Params, numbers: Sequence[int]) -> transformer.Params:
        """Returns `params` with the adapters attached, for a call whose sequence i uses the adapter `numbers[i]`, or `NONE`."""
        places_B1 = np.array([NONE if number == NONE else number % self.num for number in numbers])[:, None]
        mask_BR = self._on_mesh(places_B1 == np.arange(self.num * self.rank) // self.rank)
        return lora.attach(params, self._arrays, lora.LoraConfig(self.rank, self.rank), mask_BR)

    def _paths(self) -> set[tuple[str, ...]]:
        found = jax.tree_util.tree_leaves_with_path(self._arrays)
        return {tuple(key.key for key in path[:-1]) for path, _ in found}

    def _put(self, path: tuple[str, ...], place: int, pair: dict[str, np.ndarray] | None) -> None:
        """Fills a place of a kernel's arrays with A and B of `pair`; None: with zeros."""
        at = self._arrays
        for name in path:
            at = at.setdefault(name, {})
        start, size = place * self.rank, self.num * self.rank
        if pair is not None and not at:
            shapes = {"a": (*pair["a"].shape[:-1], size), "b": (size, *pair["b"].shape[1:])}
            at |= {which: np.zeros(shape, np.float32) for which, shape in shapes.items()}
        a, b = (np.array(at[which]) for which in "ab")
        a[..., start : start + self.rank], b[start : start + self.rank] = 0, 0
        if pair is not None:
            rank = pair["a"].shape[-1]
            a[..., start : start + rank], b[start : start + rank] = pair["a"], pair["b"]
        at |= {"a": self._on_mesh(a), "b": self._on_mesh(b)}

    def _on_mesh(self, array: np.ndarray) -> jax.Array:
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        return jax.device_put(jnp.asarray(array), whole)
