"""Weights in int8: the arithmetic against plain matrices of the same numbers, the error against the full ones, the bytes.

The oracle is the model itself on plain matrices of the products of integers and scales, by numpy.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import serve
from inference.engine import engine as engine_lib
from inference.engine import weights
from inference.scheduler import scheduler as scheduler_lib
from inference.server import startup
from models import hf, transformer
from models.kernels import int8
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from sharding.weights import broadcast
from tests.support import cases, engines, serving, tiny

DENSE = tiny.model(tie_embeddings=False)
MIXED = tiny.model(
    num_experts=4, experts_per_token=2, expert_ffn_dim=32, num_shared_experts=1, first_dense_layers=1, qkv_bias=True
)
MODELS = {
    "dense": DENSE,
    "mixed": MIXED,
    "stacked": dataclasses.replace(MIXED, scan_layers=True, num_layers=3),
    "latent": tiny.model(kv_latent_dim=16, q_latent_dim=24, rope_dim=4, head_dim=12, num_kv_heads=4, qk_norm=False),
}
ONE = mesh_lib.create({}, jax.devices()[:1])
CONFIG = engine_lib.EngineConfig(8, 64, 2, 5, prefill_chunk=32)
TOKENS = np.random.default_rng(0).integers(0, 272, (2, 24)).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def as_on_an_accelerator():
    """The form of a CPU has its own tests (test_cpu_transposed.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights.Store, "is_output_major", False)
        yield


@functools.cache
def params(name, version=0):
    return tiny.params(MODELS[name], version)


@functools.cache
def kept(name, version=0):
    return weights.Store(MODELS[name], ONE, "int8").load(params(name, version))


def meant(tree):
    """The numbers that integers and scales stand for."""

    def of(leaf):
        if not int8.is_quantized(leaf):
            return np.asarray(leaf)
        return np.asarray(leaf.values, np.float32) * np.asarray(leaf.scale)

    return jax.tree.map(of, tree, is_leaf=int8.is_quantized)


def matrices(tree):
    """path -> leaf, of those that are quantized."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=int8.is_quantized)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if int8.is_quantized(leaf)}


def logits(name, tree):
    hidden_BTD, _ = jax.jit(transformer.apply, static_argnums=1)(tree, MODELS[name], TOKENS)
    return np.asarray(transformer.logits(tree, MODELS[name], hidden_BTD))


@pytest.mark.parametrize("name", cases.slow_but(MODELS, "mixed", "latent"))
def test_entries_are_off_by_at_most_half_a_scale_of_their_output(name):
    full = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params(name))}
    found = matrices(kept(name))
    for path, leaf in found.items():
        weight, values, scale = full[path], np.asarray(leaf.values, np.float64), np.asarray(leaf.scale, np.float64)
        assert leaf.values.dtype == np.int8 and np.abs(values).max() == 127
        assert (np.abs(values * scale - weight) <= scale * 0.5000001).all()
        summed = tuple(dim for dim, size in enumerate(scale.shape) if size == 1)
        np.testing.assert_allclose(scale, np.abs(weight).max(axis=summed, keepdims=True) / 127, rtol=1e-6)
    names = {path.rpartition("['")[2][:-2] for path in found}
    expected = {"embed", "gate", "up", "down", "o"} | ({"lm_head"} if name == "dense" else set())
    latent = {"kv_down", "k_rope", "q_down", "q_up"}
    assert names == expected | (latent if name == "latent" else {"q", "k", "v"})


def test_scales_are_of_output_channels():
    """Lists by hand the dims of each matrix that have a scale of their own."""
    shapes = {path: leaf.scale.shape for path, leaf in matrices(kept("mixed")).items()}
    block = "['layers']['001']"
    assert shapes["['embed']"] == (272, 1)
    assert shapes[f"{block}['attn']['q']"] == (1, 4, 8) and shapes[f"{block}['attn']['o']"] == (1, 1, 32)
    assert shapes[f"{block}['moe']['gate']"] == (4, 1, 32) and shapes[f"{block}['moe']['down']"] == (4, 1, 32)
    stacked = {path: leaf.scale.shape for path, leaf in matrices(kept("stacked")).items()}
    assert stacked["['layers']['001']['moe']['up']"] == (2, 4, 1, 32)


@pytest.mark.parametrize("name", cases.slow_but(MODELS, "mixed"))
def test_a_model_of_integers_is_the_model_of_the_numbers_they_stand_for(name):
    got, expected, full = logits(name, kept(name)), logits(name, meant(kept(name))), logits(name, params(name))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())  # float32, another order
    error = np.sqrt(np.mean((got - full) ** 2)) / full.std()
    assert 1e-3 < error < 0.06  # about 1 % per matrix in the way; it is not nothing, and the next assertion can tell
    swapped = logits(name, params(name, 1))
    assert np.sqrt(np.mean((swapped - full) ** 2)) / full.std() > 1


def test_zeros_and_bfloat16():
    weight = jnp.zeros((3, 4), jnp.bfloat16).at[0, 1].set(2.0)
    leaf = int8.quantize(weight, (1, 4))
    np.testing.assert_array_equal(int8.dense(leaf, jnp.float32), weight)
    assert leaf.scale.dtype == jnp.float32 and np.isfinite(leaf.scale).all()


def num_bytes(specs):
    return sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in jax.tree.leaves(specs, is_leaf=rules.is_spec))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "Qwen/QwQ-32B"])
def test_half_the_bytes_of_bfloat16(name):
    model = tiny.published(name)
    full, small = (num_bytes(weights.Store(model, ONE, kind).specs) for kind in ("none", "int8"))
    assert 0.5 < small / full < 0.51


# ---- serving ---------------------------------------------------------------------------------------------------------


def answers(name, tree, mesh=None):
    """Compares the output of a scheduler; prompts in a batch and in chunks, with log-probabilities of a prompt."""
    engine = engine_lib.Engine(MODELS[name], CONFIG, tokenizer_lib.byte_chatml(), mesh)
    asks = [
        scheduler_lib.GenerateRequest(tuple(b"hello"), num_samples=2, max_tokens=12, seed=5, prompt_logprobs=True),
        scheduler_lib.GenerateRequest(tuple(range(40)), max_tokens=12, seed=9, proofs=True),
    ]
    return [one for samples in engines.complete(engine, tree, asks) for one in samples]


def same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-5)
        if other.prompt_logprobs:
            np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, rtol=0, atol=2e-5)


AXES = {"dense": dict(tensor=2, data=4), "mixed": dict(fsdp=2, expert=2, tensor=2), "stacked": dict(expert=4, tensor=2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"), [*AXES.items(), *((name, dict(tensor=4, fsdp=2)) for name in ("dense", "latent"))]
)
def test_integers_on_a_mesh(name, axes):
    mesh = mesh_lib.create(axes)
    store = weights.Store(MODELS[name], mesh, "int8")
    placed = store.load(params(name))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert held < 0.55 * sum(x.nbytes for x in jax.tree.leaves(kept(name)))  # norms are whole everywhere
    for x, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(store.shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    same(answers(name, placed, mesh), answers(name, kept(name)))


@pytest.mark.slow
def test_a_server_in_int8_updates_and_says_what_it_is(tmp_path):
    """From a broadcast, by a delta, and from the same in a folder; refused names; the host's copy stays what was published."""
    root, metadata = tmp_path / "weights", {"model": dataclasses.asdict(DENSE), "tokenizer": "byte_chatml"}
    broadcast.publish(params("dense"), 0, str(root), metadata=metadata)
    server = startup.prepare(str(root), CONFIG, quantize="int8").run()
    server.sources = [str(tmp_path)]

    def ask(method, path, body=None):
        make_app = serve.make_control_app if path == "/update_weights" else serve.make_app
        return serving.asker(make_app(server))(method, path, json=body or {}).json()

    def sampled():
        body = {"token_ids": list(b"hello"), "sampling_params": {"max_tokens": 9, "seed": 1, "ignore_eos": True}}
        return ask("POST", "/inference/v1/generate", body)["choices"][0]

    try:
        assert ask("GET", "/v1/models")["data"][0]["quantization"] == "int8"
        before = sampled()
        broadcast.publish(params("dense", 1), 1, str(root), metadata=metadata)
        assert ask("POST", "/update_weights")["version"] == 1
        after = sampled()
        assert after["token_ids"] != before["token_ids"] and after["policy_versions"] == [[1, 9]]
        jax.tree.map(np.testing.assert_array_equal, server.have.params, params("dense", 1))
        assert all(type(x) is np.ndarray for x in jax.tree.leaves(server.have.params))
        found, expected = (jax.tree.leaves(tree) for tree in (server.scheduler._params, kept("dense", 1)))
        assert len(found) == len(expected) and all(map(np.array_equal, found, expected))
        folder = tmp_path / "folder"
        hf.save(folder, DENSE, params("dense"))
        tokenizer_lib.byte_chatml().save(folder)
        assert ask("POST", "/update_weights", {"weight_dir": str(folder), "version": 7})["version"] == 7
        assert sampled()["token_ids"] == before["token_ids"]
    finally:
        server.close()
