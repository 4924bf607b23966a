"""The dtype of a CPU: the one with the shorter times, which are measured once per user."""

import json

import pytest

from inference import serve
from models.kernels import cpu_dtype


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Returns the dtypes that were measured; bfloat16 wins."""
    calls, times = [], {"float32": [14.0, 40.0], "bfloat16": [7.0, 52.0]}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_dtype, "_milliseconds", lambda dtype: calls.append(dtype) or times[dtype])
    cpu_dtype.fastest.cache_clear()
    yield calls
    cpu_dtype.fastest.cache_clear()


def test_it_is_measured_once(measured, tmp_path):
    line = "dtype bfloat16, the faster on this CPU (float32 1 row 14.0 ms, 64 rows 40.0 ms; bfloat16 1 row 7.0 ms, 64 rows 52.0 ms)"
    for _ in range(2):
        assert cpu_dtype.fastest() == ("bfloat16", line)
        cpu_dtype.fastest.cache_clear()  # as in another process
    assert measured == ["float32", "bfloat16"]
    (file,) = tmp_path.rglob("dtype-*.json")
    file.write_text(json.dumps({"float32": [1, 2], "bfloat16": [3, 4]}))
    assert cpu_dtype.fastest()[0] == "float32"
    for damaged in "{", '{"float32": [1, 2]}', '{"float32": 1, "bfloat16": [1, 2]}':
        file.write_text(damaged)
        cpu_dtype.fastest.cache_clear()
        assert cpu_dtype.fastest()[0] == "bfloat16"


def test_a_home_that_cannot_be_written_is_no_error(measured, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert cpu_dtype.fastest()[0] == "bfloat16"


@pytest.mark.slow
def test_real_products_take_time():
    assert all(0 < ms < 60_000 for ms in cpu_dtype._milliseconds("float32"))


def test_published_weights_keep_their_dtype(capsys):
    assert serve.main(["--weights", "x", "--dtype", "float32"]) == 1
    assert (
        "--dtype float32 is for --model, and published weights keep the dtype of their run" in capsys.readouterr().err
    )
