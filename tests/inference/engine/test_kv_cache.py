"""The cached step on a GPU: the results and the cache of a CPU, by a kernel that reads a stacked cache in place."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import compiled_steps, kv_cache
from inference.engine import engine as engine_lib
from models import transformer
from models.kernels import gpu_cached_attention
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from tests.support import cases, tiny


@pytest.mark.parametrize("is_stacked", cases.slow_but([False, True], True))
def test_a_gpu_writes_and_reads_as_a_cpu_does(is_stacked, monkeypatch):
    """One token of two sequences, the first at position 0; the kernel is interpreted."""
    rng, stack, start_B = np.random.default_rng(2), (3,) if is_stacked else (), np.array([0, 30], np.int32)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    entry = (*(draw(*stack, 2, 2, 32, 16) for _ in range(2)), *((jnp.int32(2),) if is_stacked else ()))
    new = draw(2, 1, 4, 16), draw(2, 1, 2, 16), draw(2, 1, 2, 16)

    def run(implementation="auto"):
        attend = kv_cache.attend_at(start_B, implementation=implementation)
        return jax.jit(lambda entry, *new: attend(entry, *new, window=20))(entry, *new)

    want, calls, attend = run(), [], gpu_cached_attention.attend

    def interpreted(*args, **how):
        calls.append(how)
        return attend(*args, **how, interpret=True)

    monkeypatch.setattr(mesh_lib, "platform", lambda: "gpu")
    monkeypatch.setattr(gpu_cached_attention, "attend", interpreted)
    run("xla")
    assert not calls
    got = run()
    assert calls
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), got, want)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_decode_step_for_cuda_copies_no_layer_of_the_cache():
    """The engine's decode call, lowered for a GPU: the kernel is in it, and no array of one layer's keys."""
    model = dataclasses.replace(tiny.model(head_dim=16, dtype="bfloat16"), scan_layers=True, num_layers=3)
    config = engine_lib.EngineConfig(num_slots=6, max_model_len=112, prefill_batch=2, steps_per_call=4)
    engine = engine_lib.Engine(model, config, tokenizer_lib.byte_chatml())
    state = jax.eval_shape(lambda: engine.init_slots(config.num_slots))
    traced = jax.jit(engine.generate, donate_argnums=1).trace(transformer.abstract(model), (state,))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    whole = "x".join(map(str, state.cache[0][0].shape))
    assert whole.startswith("3x6x") and f"tensor<{whole}xbf16>" in text
    assert "cached_attention" in text
    assert not re.search(rf"tensor<(1x)?{whole.removeprefix('3x')}xbf16>", text)


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_chunk_of_a_prompt_for_cuda_has_no_scores():
    """Lowered for a GPU: the kernel is in it, no array of a chunk by the capacity, and none of one layer's keys."""
    model = dataclasses.replace(tiny.model(head_dim=16, dtype="bfloat16"), scan_layers=True, num_layers=3)
    tokens, cache = np.zeros((1, 48), np.int32), jax.eval_shape(lambda: kv_cache.create(model, 1, 112))
    args = transformer.abstract(model), tokens, np.zeros(1, np.int32), cache
    traced = compiled_steps.prefill_chunk.trace(model, False, *args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = {tuple(dims.split("x")[:-1]) for dims in re.findall(r"tensor<((?:\d+x)+)", text)}
    assert ("3", "1", "2", "112", "16") in found and "cached_attention" in text
    assert not any({"48", "112"} <= set(dims) for dims in found)
    assert not any(dims[-3:] == ("2", "112", "16") and dims[:1] != ("3",) for dims in found)
