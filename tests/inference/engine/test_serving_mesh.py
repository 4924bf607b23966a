"""A server over a mesh: the tokens of one device, a state that keeps its layout, and impossible meshes.

Meshes are of fake CPU devices, in float32. The oracle is the same scheduler on one device, without a mesh.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from configs import quickstart
from inference.engine import compiled_steps, kv_cache, weights
from inference.engine import engine as engine_lib
from inference.proofs import toploc
from inference.scheduler import scheduler as scheduler_lib
from inference.server import startup
from models import transformer
from models.text import tokenizer as tokenizer_lib
from rl.experiment import experiment
from rl.swarm import rollout_system
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import engines, tiny
from tests.support import proofs as proofs_lib

DENSE = tiny.model()
MIXED = tiny.model(num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1)
MODELS = {
    "dense": DENSE,
    "mixed": MIXED,
    "stacked": dataclasses.replace(MIXED, scan_layers=True, num_layers=3),
    "latent": tiny.model(kv_latent_dim=16, rope_dim=4, head_dim=12, num_kv_heads=4, qk_norm=False),
}
CONFIG = engine_lib.EngineConfig(num_slots=8, max_model_len=96, prefill_batch=2, steps_per_call=5, prefill_chunk=32)
IN_PAGES = {"num_pages": 16}  # those of whole slots
WAIT_S = 300
HELLO = tuple(b"hello")
Request = scheduler_lib.GenerateRequest
ASKS = (
    Request(HELLO, num_samples=3, max_tokens=40, seed=5, proofs=True),
    Request(tuple(range(70)), num_samples=2, max_tokens=20, seed=9, temperature=0.8, prompt_logprobs=True),  # chunks
    Request(tuple(b"sieved"), max_tokens=12, seed=1, top_k=20, top_p=0.9, raw_logprobs=True, top_logprobs=3),
    Request(tuple(b"biased"), max_tokens=9, seed=2, logit_bias=((5, 3.0), (271, -9.0))),
    Request(tuple(b"cold"), max_tokens=12, temperature=0.0),
)


@functools.cache
def params(name, version=0):
    return jax.device_put(tiny.params(MODELS[name], version))


def make(name, config=CONFIG, **axes):
    """Returns (engine, weights) on a mesh; without axes, on one device."""
    if not axes:
        return engine_lib.Engine(MODELS[name], config, tokenizer_lib.byte_chatml()), params(name)
    mesh = mesh_lib.create(axes, jax.devices()[: int(np.prod(list(axes.values())))])
    placed = jax.device_put(params(name), weights.Store(MODELS[name], mesh).shardings)
    return engine_lib.Engine(MODELS[name], config, tokenizer_lib.byte_chatml(), mesh), placed


@functools.cache
def on_one_device(name):
    return engines.complete(*make(name), ASKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "fields"),
    [
        ("dense", dict(tensor=2, data=2), {}),
        ("dense", dict(tensor=2, data=2), IN_PAGES),
        ("dense", dict(tensor=4, data=2), {}),  # two key heads: whole everywhere
        ("mixed", dict(expert=2, tensor=2), {}),
        ("mixed", dict(fsdp=2, expert=2, tensor=2), {}),
        ("mixed", dict(expert=4, data=2), {}),  # a prompt of 2 rows over 8 shards
        ("stacked", dict(expert=2, tensor=2, data=2), {}),
        ("stacked", dict(expert=4, data=2), IN_PAGES),
        ("latent", dict(tensor=4, data=2), {}),
    ],
)
def test_a_mesh_gives_the_tokens_of_one_device(name, axes, fields):
    """Batched and chunked prefill, shared prefixes, every sampling field; and one compilation of generate."""
    engine, placed = make(name, dataclasses.replace(CONFIG, **fields), **axes)
    before = compiled_steps.generate._cache_size()
    got = engines.complete(engine, placed, ASKS)
    assert compiled_steps.generate._cache_size() == before + 1
    for ask, expected, found in zip(ASKS, on_one_device(name), got, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert other.tokens == one.tokens and other.finish_reason == one.finish_reason
            for field in ("logprobs", "raw_logprobs", *(["prompt_logprobs"] if ask.prompt_logprobs else [])):
                np.testing.assert_allclose(getattr(other, field), getattr(one, field), rtol=0, atol=1e-5)
            assert [[t for t, _ in top] for top in other.top] == [[t for t, _ in top] for top in one.top]
    for sample in got[0]:  # proofs are of the hidden states of `apply`
        tokens_1T = np.array([[*HELLO, *sample.tokens]], np.int32)
        hidden_1TD, _ = jax.jit(transformer.apply, static_argnums=1)(params(name), MODELS[name], tokens_1T)
        hidden_TD = np.asarray(hidden_1TD)[0]
        rows_ND = hidden_TD[len(HELLO) - 1 : -1]
        results = proofs_lib.verify(rows_ND, toploc.split(sample.proofs, *rows_ND.shape))
        assert [result.reason for result in results] == ["ok"] * 2 and all(result.accepted for result in results)


COLLECTIVE = re.compile(
    r"= [a-z0-9]+\[([\d,]*)\][^ ]* (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
)


@pytest.mark.parametrize(
    ("name", "axes", "pages_per_slot"),
    [
        ("dense", dict(tensor=2, data=2), 0),
        pytest.param("dense", dict(tensor=2, data=2), 12, marks=pytest.mark.slow),
        pytest.param("dense", dict(tensor=4, data=2), 0, marks=pytest.mark.slow),
        pytest.param("mixed", dict(fsdp=2, expert=2, tensor=2), 0, marks=pytest.mark.slow),
        pytest.param("stacked", dict(expert=2, tensor=2, data=2), 0, marks=pytest.mark.slow),
        pytest.param("stacked", dict(expert=2, tensor=2, data=2), 12, marks=pytest.mark.slow),
    ],
)
def test_the_state_stays_where_it_is(name, axes, pages_per_slot):
    """generate returns the state in its layout and in place, and communicates nothing as large as a layer's keys."""
    capacity = 768  # a layer of keys is then larger than logits, or the windows that proofs are made of
    config = dataclasses.replace(CONFIG, max_model_len=capacity, num_pages=8 * pages_per_slot)
    engine, placed = make(name, config, **axes)
    (state,) = engine.init_decode_state()
    keys = jax.tree.leaves(state.cache)[0]
    table = np.zeros((8, pages_per_slot), np.int32) if pages_per_slot else None
    with jax.set_mesh(engine.mesh):
        args = placed, np.int32(5), table, state
        compiled = compiled_steps.generate.lower(engine.model, 5, capacity, False, 0, *args).compile()
    came, went = compiled.input_shardings[0][-1], compiled.output_shardings[0]
    same = jax.tree.map(lambda x, i, o: i.is_equivalent_to(o, x.ndim) and x.sharding == i, state, came, went)
    assert all(jax.tree.leaves(same)), same
    rows = 8 // rules.num_batch_shards(engine.mesh)
    heads = 2 if axes["tensor"] == 4 else 1
    shard = keys.sharding.shard_shape(keys.shape)
    assert (shard[2], shard[0]) == (rows * pages_per_slot, heads) if pages_per_slot else shard[-4:-2] == (rows, heads)
    num_bytes = sum(x.dtype.itemsize * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes > 0.99 * num_bytes  # donated
    largest_layer = rows * heads * capacity * 8
    travels = [np.prod([int(n) for n in dims.split(",") if n]) for dims in COLLECTIVE.findall(compiled.as_text())]
    assert travels and max(travels) < largest_layer, sorted(travels)[-3:]


@pytest.mark.slow
def test_calls_between_generates_leave_the_layout_alone():
    """insert, deactivate, a chunk and new weights: none makes generate compile again."""
    engine, placed = make("mixed", expert=2, tensor=2, data=2)
    scheduler = scheduler_lib.Scheduler(engine, placed, 0)
    scheduler.submit(ASKS[1]).result(WAIT_S)
    compiled = compiled_steps.generate._cache_size(), compiled_steps._insert_entry._cache_size()
    again = jax.device_put(params("mixed", 1), weights.Store(MIXED, engine.mesh).shardings)
    long = scheduler.submit(dataclasses.replace(ASKS[1], max_tokens=26))
    scheduler.update(again, 1).result(WAIT_S)
    long.cancel()
    scheduler.submit(ASKS[1]).result(WAIT_S)
    scheduler.submit(dataclasses.replace(ASKS[1], stop_texts=("e",))).result(WAIT_S)
    assert (compiled_steps.generate._cache_size(), compiled_steps._insert_entry._cache_size()) == compiled
    scheduler.close()


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (dict(context=2, tensor=4), ["context=2", "tensor, expert or data"]),
        (dict(data=8), ["inference.num_slots = 4", "8 batch shards", "multiple of 8"]),
        (dict(tensor=3), ["tensor=3", "8 device(s)"]),
        (dict(tensor=8), ["heads = 4", "8-way mesh axis tensor"]),
    ],
)
def test_an_impossible_mesh_is_refused(axes, words):
    config = dataclasses.replace(CONFIG, num_slots=4)
    with pytest.raises(ValueError) as error:
        _ = weights.Store(DENSE, startup.host_mesh(axes, config)).shardings
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_layouts_by_hand():
    """The fraction of a cache and a state on each device equals a table."""
    mesh = mesh_lib.create({"data": 2, "expert": 2, "tensor": 2})
    cache = jax.eval_shape(functools.partial(kv_cache.create, DENSE, 8, 96))
    layout = kv_cache.layout(cache, mesh)
    sharding = jax.sharding.NamedSharding(mesh, layout[0][0])
    assert sharding.shard_shape((8, 2, 96, 8)) == (2, 1, 96, 8)
    one = kv_cache.layout(jax.eval_shape(functools.partial(kv_cache.create, DENSE, 1, 96)), mesh)
    assert jax.sharding.NamedSharding(mesh, one[0][0]).shard_shape((1, 2, 96, 8)) == (1, 1, 96, 8)
    engine, _ = make("dense", data=2, expert=2, tensor=2)
    (state,) = engine.init_decode_state()
    assert engine.mesh.shape["tensor"] == 2 and engine.mesh.size == 8 and make("dense")[0].mesh.size == 1
    assert state.ring.sharding.shard_shape(state.ring.shape)[0] == 2
    assert state.request.sampling.bias.sharding.shard_shape(state.request.sampling.bias.shape)[0] == 2


def test_a_run_starts_its_server_on_the_mesh_of_its_config(tmp_path):
    """Checks the command; tests/rl/test_train.py runs one."""
    config = quickstart.get_config()
    plain = experiment.resolve(config)
    config.inference.mesh.tensor, config.inference.mesh.data = 2, -1
    meshed = experiment.resolve(config)
    commands = [rollout_system.server_command(one, tmp_path, tmp_path) for one in (plain, meshed)]
    assert "--mesh" not in commands[0]
    assert mesh_lib.parse(commands[1][commands[1].index("--mesh") + 1]) == {"tensor": 2, "data": -1}
