"""Fixtures of the inference tests."""

import pytest

from inference.engine import compiled_steps, cpu_decode_attention, paged_cache


@pytest.fixture(scope="module", autouse=True)
def compiled_fast(compile_fast):
    """Compiles the tiny engines at LLVM's lowest level. Those of the whole runs of rl/test_train.py are optimized."""


@pytest.fixture(scope="module")
def several_blocks():
    """Divides the keys of small test caches into several blocks of 32 positions (cpu_decode_attention.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_decode_attention, "MAX_BLOCK", 32)
        compiled_steps.empty_slots.clear_cache()  # compiled states of other test files have one block
        yield
    compiled_steps.empty_slots.clear_cache()


@pytest.fixture(scope="module")
def pages_of_8():
    """Makes the pages of small test caches 8 positions long (paged_cache.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_cache, "PAGE", 8)
        compiled_steps.empty_slots.clear_cache()
        yield
    compiled_steps.empty_slots.clear_cache()
