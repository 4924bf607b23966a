"""Fixtures of the tests of kernels."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_fast(compile_fast):
    """Compiles the kernels at LLVM's lowest level: a kernel runs a few times on tiny arrays. Whole runs have optimized ones."""
