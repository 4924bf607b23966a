"""The cache in pages: attention against a plain one in float64, by XLA and by the TPU's kernel in interpret mode, and sequences
that move between slots and pages."""

import collections
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inference.engine import decode_state, paged_cache, weights
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from models.kernels import paged_attention
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from tests.support import cases, tiny

S, W, LAYERS = 8, 4, 3
pytestmark = pytest.mark.usefixtures("pages_of_8")


def plain(q_HC, k_SKC, v_SKC, scale):
    """One query head after the other, in float64."""
    out = np.zeros(q_HC.shape)
    for head, query in enumerate(q_HC):
        group = head // (len(q_HC) // k_SKC.shape[1])
        scores = k_SKC[:, group] @ query * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v_SKC[:, group]
    return out


class Case:
    """A cache of random keys, and a new token of each of B slots, the last of which is not active."""

    def __init__(self, seed, H, K, C, dtype, layer, page_dtype=""):
        self.rng = rng = np.random.default_rng(seed)
        self.B = 4
        num_pages = self.B * W + 3
        page_dtype = page_dtype or dtype
        self.cache = jnp.asarray(rng.standard_normal((K, LAYERS, num_pages, S, 2 * C)), page_dtype)
        self.table = rng.permutation(num_pages)[: self.B * W].reshape(self.B, W).astype(np.int32)
        self.position = rng.integers(0, S * W, self.B).astype(np.int32)
        self.active = np.arange(self.B) < self.B - 1
        self.q = jnp.asarray(rng.standard_normal((self.B, 1, H, C)), dtype)
        new = (
            jnp.asarray(rng.standard_normal((self.B, 1, K, C)), page_dtype) for _ in range(2)
        )  # pages hold it exactly
        self.k, self.v = (x.astype(dtype) for x in new)
        self.layer = layer

    def run(self, step):
        """Returns the output of a step of `program` and its cache."""
        places = self.position, self.active, self.table
        out, cache = step(self.cache, self.layer, *places, self.q, self.k, self.v)
        return np.asarray(out.astype(jnp.float32))[:, 0], cache

    def sequence(self, pages, new, slot):
        """Keys or values of a slot up to its new token, [positions, K, C] in float64."""
        pages = np.asarray(pages[:, self.layer].astype(jnp.float32), np.float64)[:, self.table[slot]]
        rows = np.moveaxis(pages.reshape(len(pages), W * S, -1), 0, 1)[: self.position[slot]]
        return np.concatenate([rows, np.asarray(new[slot].astype(jnp.float32), np.float64)])

    def expected(self, slot, scale):
        halves = jnp.split(self.cache, 2, axis=-1)
        k, v = (self.sequence(x, new, slot) for x, new in zip(halves, (self.k, self.v), strict=True))
        return plain(np.asarray(self.q[slot, 0].astype(jnp.float32), np.float64), k, v, scale)


def program(scale=None):
    """Returns a step that is compiled once for all cases of a shape."""

    @jax.jit
    def step(cache, layer, position, active, table, *qkv):
        attend = paged_cache.attend_at(paged_cache.PagedCache(((cache,),)), position, active, table)
        out, (cache, _) = attend((cache, layer), *qkv, scale=scale)
        return out, cache

    return step


def check(case, step, tolerance, scale=None):
    out, cache = case.run(step)
    for slot in np.flatnonzero(case.active):
        wanted = case.expected(slot, case.q.shape[-1] ** -0.5 if scale is None else scale)
        np.testing.assert_allclose(out[slot], wanted, atol=tolerance)
    # Only the new keys of active slots are written, in their layer.
    for old, new, rows in zip(*(jnp.split(x, 2, axis=-1) for x in (case.cache, cache)), (case.k, case.v), strict=True):
        old = np.array(old.astype(jnp.float32))
        for slot in np.flatnonzero(case.active):
            page, at = case.table[slot, case.position[slot] // S], case.position[slot] % S
            old[:, case.layer, page, at] = np.asarray(rows[slot, 0].astype(jnp.float32))
        np.testing.assert_array_equal(np.asarray(new.astype(jnp.float32)), old)
    return out


def shuffled(case):
    """The same slots with their pages elsewhere, and other neighbors of slot 0."""
    order = case.rng.permutation(case.cache.shape[2])
    case.cache = case.cache[:, :, np.argsort(order)]
    case.table = order[case.table].astype(np.int32)
    case.q, case.k, case.v = (x.at[1:].multiply(-1) for x in (case.q, case.k, case.v))
    case.position[1:] = case.rng.integers(0, S * W, case.B - 1)
    return case


HEADS = [(H, K, page_dtype) for H, K in ((1, 1), (4, 2), (8, 1), (16, 1)) for page_dtype in paged_cache.DTYPES]


@pytest.mark.parametrize(
    ("H", "K", "page_dtype"), cases.slow_but(HEADS, (1, 1, "float8_e4m3fn"), (4, 2, "float8_e4m3fn"), (16, 1, ""))
)
def test_gathered_pages(H, K, page_dtype):
    step = program(scale=0.3)
    for seed in range(5):
        case = Case(seed, H, K, 16, jnp.float32, seed % LAYERS, page_dtype)
        before = check(case, step, 2e-6, scale=0.3)  # float32, sums of up to 32 keys
        np.testing.assert_array_equal(check(shuffled(case), step, 2e-6, scale=0.3)[0], before[0])


SHAPES = [(2, 2, 128, ""), (16, 2, 128, ""), (4, 2, 128, "float8_e4m3fn"), (9, 3, 64, ""), (4, 1, 64, "float8_e4m3fn")]


@pytest.mark.parametrize(
    ("H", "K", "C", "page_dtype"), cases.slow_but([*SHAPES, (2, 1, 192, "")], (4, 1, 64, "float8_e4m3fn"))
)
def test_kernel_of_a_tpu(H, K, C, page_dtype, monkeypatch):
    """A slot without a sequence is in between. No number of a page that its sequence does not reach counts, not even a NaN."""
    monkeypatch.setattr(mesh_lib, "platform", lambda: "tpu")
    monkeypatch.setattr(paged_attention, "MAX_PAGES", 3)  # of four: a slot's last step has fewer
    with pltpu.force_tpu_interpret_mode():
        step, case = program(), Case(H, H, K, C, jnp.bfloat16, 1, page_dtype)
        case.active[1] = False
        before = check(case, step, 0.02)  # outputs of up to 3 in bfloat16, whose steps there are 2^-7
        np.testing.assert_array_equal(check(shuffled(case), step, 0.02)[0], before[0])
        for slot in range(case.B):
            case.cache = case.cache.at[:, :, case.table[slot, case.position[slot] // S + 1 :]].set(jnp.nan)
            case.cache = case.cache.at[
                :, :, case.table[slot, case.position[slot] // S], case.position[slot] % S + 1 :
            ].set(jnp.nan)
        np.testing.assert_array_equal(case.run(step)[0][0], before[0])


@pytest.mark.parametrize("num_pages", [1, 3, 4])
def test_the_kernel_copies_each_page_in_use_once(num_pages):
    """Pallas copies the page of an input if the step before did not have it there."""
    rng = np.random.default_rng(num_pages)
    lengths = rng.permutation([0, 1, S, S + 1, 2 * S + 3, 0, W * S, 1, W * S - 1])
    table = rng.permutation(len(lengths) * W).reshape(-1, W)
    visits = jax.jit(paged_attention.visits, static_argnums=(2, 3))
    steps = visits(jnp.asarray(lengths), jnp.asarray(table, jnp.int32), S, num_pages)
    count, used = int(steps.count[0]), -(-lengths // S)
    wanted = [(slot, block) for slot, size in enumerate(used) for block in range(-(-size // num_pages))]
    assert [*zip(steps.sequence[:count].tolist(), steps.block[:count].tolist(), strict=True)] == wanted
    copied = []
    for column in np.asarray(steps.pages).reshape(-1, num_pages)[:count].T.tolist():
        copied += [page for page, before in zip(column, [None, *column], strict=False) if page != before]
    pages = [page for slot, size in enumerate(used) for page in table[slot, :size].tolist()]
    left = collections.Counter(copied) - collections.Counter(pages)
    assert not collections.Counter(pages) - collections.Counter(copied) and left.total() < num_pages
    for step, (slot, block) in enumerate(wanted):
        named = np.asarray(steps.pages).reshape(-1, num_pages)[step, : used[slot] - block * num_pages]
        np.testing.assert_array_equal(named, table[slot, block * num_pages :][: len(named)])


def test_eight_bits_hold_their_largest_number_where_a_key_is_larger():
    cache = paged_cache.create(MODEL, 2, "float8_e4m3fn")
    (pages,), *_ = cache.entries
    assert pages.nbytes == pages.size
    new = jnp.full((*pages.shape[:2], 1, *pages.shape[3:]), -1000.0)
    (got,), *_ = paged_cache.put(cache, ((new,),) * len(cache.entries), jnp.array([1])).entries
    np.testing.assert_array_equal(np.asarray(got[:, :, 1].astype(jnp.float32)), -448)
    assert not np.asarray(got[:, :, 0].astype(jnp.float32)).any()


@pytest.mark.parametrize("fields", [{"page_dtype": "int4", "num_pages": 24}, {"page_dtype": "float8_e4m3fn"}])
def test_a_dtype_of_pages_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match="page_dtype = .* is not float8_e4m3fn, or num_pages is 0"):
        dataclasses.replace(CONFIG, **{"num_pages": 0} | fields)


@pytest.mark.parametrize(
    ("platform", "fields", "pages"),
    [
        ("tpu", {}, 24),  # those of three whole slots
        ("tpu", {"head_dim": 64}, 24),  # a key and its value fill a vector
        ("tpu", {"head_dim": 32}, 0),
        ("tpu", {"window": 16}, 0),
        ("gpu", {}, 0),  # XLA gathers whole slots
    ],
)
def test_a_tpu_has_pages_by_itself_where_its_kernel_reads_them(platform, fields, pages):
    device = types.SimpleNamespace(platform=platform)
    axes = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    mesh = types.SimpleNamespace(shape=axes, abstract_mesh=types.SimpleNamespace(abstract_device=device))
    model = dataclasses.replace(MODEL, **{"head_dim": 128, "dtype": "bfloat16"} | fields)
    config = dataclasses.replace(CONFIG, num_pages=engine_lib.AUTO, page_dtype="float8_e4m3fn")
    settled = config.settled(model, mesh)
    assert settled == dataclasses.replace(config, num_pages=pages, page_dtype="float8_e4m3fn" if pages else "")
    assert CONFIG.settled(model, mesh) is CONFIG
    assert engine_lib.Engine(MODEL, config, tokenizer_lib.byte_chatml()).config.num_pages == 0  # on a CPU


MODEL = tiny.model(num_layers=1)
CONFIG = engine_lib.EngineConfig(
    num_slots=3, max_model_len=64, prefill_batch=2, steps_per_call=4, prefill_chunk=32, num_pages=24
)


@pytest.mark.parametrize(
    ("tensor", "page_dtype"), cases.slow_but([(1, ""), (2, ""), (1, "float8_e4m3fn")], (1, "float8_e4m3fn"))
)
def test_a_sequence_goes_on_bit_for_bit_in_another_slot_and_other_pages(tensor, page_dtype):
    """Its keys are those of the weights that computed them, also if others are in use when it comes back."""
    mesh = mesh_lib.create({"tensor": tensor}, jax.devices()[:tensor])
    placed = weights.Store(MODEL, mesh).shardings
    old, new = (jax.device_put(tiny.params(MODEL, seed), placed) for seed in (1, 2))
    config = dataclasses.replace(CONFIG, page_dtype=page_dtype)
    engine = engine_lib.Engine(MODEL, config, tokenizer_lib.byte_chatml(), mesh)
    prompt = np.arange(1, 20, dtype=np.int32)
    request = request_lib.GenerateRequest(tuple(prompt.tolist()), max_tokens=40, temperature=0.7, seed=5, proofs=True)
    arrays = decode_state.request_arrays([request], 1)
    padded = np.zeros((2, 32), np.int32)
    padded[0, : len(prompt)] = prompt
    prefix = engine.prefill_batch(old, padded, np.array([len(prompt), 1], np.int32))

    def run(moves):
        state, slot, pages = engine.init_decode_state(), 0, [*range(8)]
        state = engine.insert_pages(prefix, state, [(0, number, pages[number]) for number in range(3)])
        state = engine.insert_batch(prefix, np.array([0], np.int32), state, np.array([slot], np.int32), arrays)
        read = []
        for call in range(6):
            if moves and call in (1, 3):
                swapped = engine.swap_out(state, slot, pages[: 3 + call])
                state = engine.init_decode_state()  # of which nothing remains
                slot, pages = (slot + 2) % 3, [(page * 5 + 7) % 24 for page in pages]
                state = engine.swap_in(state, slot, pages[: 3 + call], swapped)
            table = np.zeros((3, 8), np.int32)
            table[slot] = pages
            state, result = engine.generate(old if call < 2 else new, state, None, table)
            columns = result.tokens, result.valid, result.logprobs, result.proof_indices, result.proof_bits
            read.append([np.asarray(x)[slot] for x in columns])
        return read

    for stayed, moved in zip(run(False), run(True), strict=True):
        for a, b in zip(stayed, moved, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "mesh", "message"),
    [
        ({"sinks": True}, {}, "attention sinks"),
        ({"window": 8, "layer_pattern": "SF"}, {}, "sliding layers"),
        ({}, {"data": 4, "tensor": 2}, "4 batch shards .* those of whole slots"),
        ({}, {"tensor": 8}, "2 key heads over tensor=8"),
    ],
)
def test_what_pages_do_not_support(change, mesh, message):
    model, mesh = tiny.model(**change), mesh_lib.create(mesh, None if mesh else jax.devices()[:1])
    config = dataclasses.replace(CONFIG, num_slots=4)
    with pytest.raises(ValueError, match=f"inference.num_pages.*{message}.*set it to"):
        engine_lib.Engine(model, config, tokenizer_lib.byte_chatml(), mesh)


def test_fewer_pages_than_one_sequence_needs():
    with pytest.raises(ValueError, match="num_pages = 7 of 8 positions do not hold one sequence.*at least 8"):
        dataclasses.replace(CONFIG, num_pages=7)
