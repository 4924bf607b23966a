"""The mesh and the rules: every layout against a table written by hand, and refusals that name the field.

Layouts are checked by the data of a device (the shape of its shard, the rows it sees), not by how a spec is spelled.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import tiny

CONFIG = tiny.model(
    vocab_size=64,
    num_heads=8,
    num_kv_heads=4,
    rope_theta=10000.0,
    tie_embeddings=False,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_dim=16,
    first_dense_layers=1,
)


# ---- mesh -----------------------------------------------------------------------------------------------------------


def test_every_factorisation_of_eight_devices_is_a_mesh():
    divisors = (1, 2, 4, 8)
    shapes = [shape for shape in itertools.product(divisors, repeat=5) if math.prod(shape) == 8]
    assert len(shapes) == 35  # 2^3 over five axes: C(7, 4)
    for shape in shapes:
        mesh = mesh_lib.create(dict(zip(mesh_lib.AXES, shape, strict=True)))
        assert mesh.axis_names == ("data", "fsdp", "expert", "context", "tensor")
        assert mesh.devices.shape == shape
        # Row-major over jax.devices(): neighbours on the innermost axis are neighbours in the machine.
        assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"fsdp": -1}, (1, 8, 1, 1, 1)),
        ({"fsdp": 2, "tensor": -1}, (1, 2, 1, 1, 4)),
        ({"data": -1, "fsdp": 2, "tensor": 2}, (2, 2, 1, 1, 2)),
        ({"data": 8, "context": -1}, (8, 1, 1, 1, 1)),
    ],
)
def test_minus_one_takes_what_is_left(sizes, expected):
    assert mesh_lib.create(sizes).devices.shape == expected


def test_a_mesh_of_some_devices():
    mesh = mesh_lib.create({"tensor": -1}, devices=jax.devices()[2:5])
    assert mesh.shape["tensor"] == 3 and [d.id for d in mesh.devices.flat] == [2, 3, 4]
    assert mesh_lib.create({}, devices=jax.devices()[:1]).devices.shape == (1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"model": 2}, ["'model'", "data, fsdp, expert, context, tensor"]),
        ({"fsdp": 4}, ["fsdp=4", "8 device(s)", "config.mesh", "-1"]),
        ({}, ["8 device(s)", "config.mesh"]),
        ({"fsdp": 3, "tensor": -1}, ["fsdp=3", "tensor=-1", "8 device(s)"]),
        ({"fsdp": 16, "tensor": -1}, ["fsdp=16", "8 device(s)"]),
        ({"fsdp": -1, "tensor": -1}, ["fsdp=-1", "tensor=-1", "at most one is -1"]),
        ({"fsdp": 0, "tensor": -1}, ["fsdp=0", "positive"]),
        ({"fsdp": -2, "tensor": -4}, ["fsdp=-2", "positive"]),  # their product would be 8
    ],
)
def test_a_bad_mesh_is_refused_with_value_rule_and_remedy(sizes, words):
    with pytest.raises(ValueError) as error:
        mesh_lib.create(sizes)
    for word in words:
        assert word in str(error.value)


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a TPU v4 device that `jax.experimental.mesh_utils` reads."""

    id: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


def test_data_alone_spans_slices():
    cuboid = itertools.product(range(4), range(4), range(2))
    chips = [Chip(2 * n + i, at, slice_index=i) for n, at in enumerate(cuboid) for i in range(2)]
    for data in (2, 4):
        mesh = mesh_lib.create({"data": data, "fsdp": -1}, chips)
        slices = [{chip.slice_index for chip in replica.flat} for replica in mesh.devices]
        assert mesh.devices.shape == (data, 64 // data, 1, 1, 1)
        assert slices == [{0}] * (data // 2) + [{1}] * (data // 2)
    with pytest.raises(ValueError, match=r"data=1 over 2 slices, which only this axis spans; set mesh.data to 2"):
        mesh_lib.create({"fsdp": -1}, chips)


def test_axes_that_do_not_fold_onto_the_torus_are_refused():
    """A mesh axis of a torus 4 x 4 x 4 is a product of whole dims: 4 or 16, never 32."""
    chips = [Chip(n, coords) for n, coords in enumerate(itertools.product(range(4), repeat=3))]
    with pytest.raises(ValueError, match="fsdp=32 .* tensor=2 cannot be laid out on the torus 4x4x4.*config.mesh"):
        mesh_lib.create({"fsdp": 32, "tensor": 2}, chips)
    with pytest.raises(ValueError, match="fsdp=32"):
        mesh_lib.create({"fsdp": -1, "tensor": 2}, chips)


# ---- rules ----------------------------------------------------------------------------------------------------------

# How many ways each dim of each parameter is split, by axis; written from the axes' meanings in sharding/mesh/mesh.py.
# fsdp splits the model dim of every matrix; tensor splits heads, ffn and vocabulary; expert splits experts.
WAYS = {
    "embed": ("tensor", "fsdp"),
    "lm_head": ("fsdp", "tensor"),
    "final_norm": (None,),
    "attn_norm": (None,),
    "mlp_norm": (None,),
    "q_norm": (None,),
    "k_norm": (None,),
    "q": ("fsdp", "tensor", None),
    "k": ("fsdp", "tensor", None),
    "v": ("fsdp", "tensor", None),
    "o": ("tensor", None, "fsdp"),
    "mlp.gate": ("fsdp", "tensor"),
    "mlp.up": ("fsdp", "tensor"),
    "mlp.down": ("tensor", "fsdp"),
    "moe.router": ("fsdp", None),
    # ... and experts by tensor, too, which then leaves their ffn whole.
    "moe.gate": ("expert+tensor", "fsdp", None),
    "moe.up": ("expert+tensor", "fsdp", None),
    "moe.down": ("expert+tensor", None, "fsdp"),
}


def ways(path):
    names = [key.key for key in path]
    return WAYS.get(".".join(names[-2:])) or WAYS[names[-1]]


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 4, "fsdp": 2}],
    ids=str,
)
def test_every_parameter_is_split_as_the_table_says(sizes):
    mesh = mesh_lib.create(sizes)
    layout = jax.tree_util.tree_leaves_with_path(transformer.abstract(CONFIG, mesh))
    assert {".".join(k.key for k in path[-2:]) for path, _ in layout} >= {"attn.q_norm", "moe.gate", "mlp.down"}
    for path, leaf in layout:
        expected = tuple(
            dim // math.prod(sizes.get(one, 1) for one in (axis or "").split("+"))
            for dim, axis in zip(leaf.shape, ways(path), strict=True)
        )
        assert leaf.sharding.shard_shape(leaf.shape) == expected, jax.tree_util.keystr(path)


def test_experts_that_tensor_does_not_divide_have_their_ffn_split():
    """6 experts over 4: the ffn of each is split. 6 over expert = 2 x tensor = 3: a single one per device. 7: refused."""
    for count, sizes, gate, down_bias in (
        (6, {"fsdp": 2, "tensor": 4}, (6, 4, 3), (6, 8)),
        (6, {"expert": 2, "tensor": 3}, (1, 8, 12), (1, 8)),
    ):
        specs = {
            "gate": rules.ParamSpec((count, 8, 12), "float32", ("experts", "model", "expert_ffn"), None),
            "down_bias": rules.ParamSpec((count, 8), "float32", ("experts", "norm"), None),
        }
        mesh = mesh_lib.create(sizes, jax.devices()[: math.prod(sizes.values())])
        layout = rules.shardings(specs, mesh)
        assert layout["gate"].shard_shape((count, 8, 12)) == gate
        assert layout["down_bias"].shard_shape((count, 8)) == down_bias
        assert layout["gate"].spec == rules.partition(mesh, (count, 8, 12), ("experts", "model", "expert_ffn"))
    spec = rules.ParamSpec((7, 8, 12), "float32", ("experts", "model", "expert_ffn"), None)
    with pytest.raises(ValueError, match="experts = 7.*2-way mesh axis expert"):
        rules.shardings({"gate": spec}, mesh_lib.create({"expert": 2, "fsdp": 4}))


def test_abstract_reads_shapes_without_making_arrays():
    specs = {"a": rules.ParamSpec((1 << 40, 1 << 20), "bfloat16", ("model", "ffn"), None)}  # 2 EiB
    plain = rules.abstract(specs)["a"]
    assert plain.shape == (1 << 40, 1 << 20) and plain.dtype == jnp.bfloat16 and plain.sharding is None
    split = rules.abstract(specs, mesh_lib.create({"fsdp": 8}))["a"]
    assert split.sharding.shard_shape(split.shape) == (1 << 37, 1 << 20)


def test_what_does_not_divide_is_refused_by_its_name():
    with pytest.raises(ValueError) as error:
        transformer.abstract(dataclasses.replace(CONFIG, num_heads=4), mesh_lib.create({"tensor": 8}))
    for word in ("['layers']['000']['attn']['o']", "heads = 4", "8-way", "tensor", "config.model", "config.mesh"):
        assert word in str(error.value)


def test_a_spec_names_every_dim_and_splits_each_by_another_mesh_axis():
    spec = rules.ParamSpec((8, 8), "float32", ("ffn", "heads"), None)
    with pytest.raises(AssertionError, match="ffn.*heads"):
        rules.shardings({"w": spec}, mesh_lib.create({"fsdp": 2, "tensor": 4}))
    with pytest.raises(AssertionError):
        rules.ParamSpec((8, 8), "float32", ("ffn",), None)


@pytest.mark.parametrize(
    ("sizes", "rows", "columns"),
    [
        ({"fsdp": 8}, 8, 1),
        ({"tensor": 8}, 1, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 1),
        ({"expert": 4, "fsdp": 2}, 8, 1),  # outside a mixture the expert axis is one more batch axis
        ({"data": 2, "context": 4}, 2, 4),
    ],
    ids=str,
)
def test_a_batch_is_split_over_the_batch_axes_and_context(sizes, rows, columns):
    mesh = mesh_lib.create(sizes)
    assert rules.num_batch_shards(mesh) == rows
    assert rules.batch_sharding(mesh, 2).shard_shape((16, 32)) == (16 // rows, 32 // columns)
    # Micro-batches are stacked in front and stay whole: each is split over all devices.
    assert rules.batch_sharding(mesh, 3).shard_shape((5, 16, 32)) == (5, 16 // rows, 32 // columns)
    assert rules.batch_sharding(mesh, 0).is_fully_replicated


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("", {}), ("tensor=4", {"tensor": 4}), ("tensor=4,expert=2,data=-1", {"tensor": 4, "expert": 2, "data": -1})],
)
def test_a_mesh_in_words(text, sizes):
    assert mesh_lib.parse(text) == sizes


@pytest.mark.parametrize(
    "text", ["tensor", "tensor=", "tensor=x", "rows=2", "tensor=2,tensor=2", "tensor=2 data=4", "=2"]
)
def test_a_mesh_in_bad_words(text):
    with pytest.raises(ValueError, match="write axis=size once per axis"):
        mesh_lib.parse(text)


def test_key_heads_stay_whole_where_they_do_not_divide():
    """A model may have fewer key heads than a mesh has tensor shards; the server and the learner both run it."""
    mesh = mesh_lib.create({"fsdp": 2, "tensor": 4})
    for heads, shard in ((6, (4, 6)), (8, (4, 2))):
        spec = rules.ParamSpec((8, heads), "float32", ("model", "kv_heads"), None)
        assert rules.shardings({"k": spec}, mesh)["k"].shard_shape((8, heads)) == shard
    assert jax.sharding.NamedSharding(mesh, rules.fitting(mesh, (3, 8), ("batch", "heads"))).shard_shape((3, 8)) == (
        3,
        2,
    )


# ---- constrain ------------------------------------------------------------------------------------------------------


def test_constrain_does_nothing_on_one_device():
    x = jnp.ones((3, 5))  # 3 and 5 divide nothing
    assert rules.constrain(x, "batch", "sequence") is x
    with jax.set_mesh(mesh_lib.create({}, devices=jax.devices()[:1])):
        assert rules.constrain(x, "batch", "sequence") is x


def test_constrain_lays_an_activation_out_and_changes_no_value():
    x = jnp.arange(4.0 * 6 * 8).reshape(4, 6, 8)
    with jax.set_mesh(mesh_lib.create({"fsdp": 2, "context": 2, "tensor": 2})):
        y = jax.jit(lambda x: rules.constrain(x, "batch", "sequence", None))(x)
    assert y.sharding.shard_shape(y.shape) == (2, 3, 8)
    np.testing.assert_array_equal(y, x)
