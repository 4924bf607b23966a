"""Eight fake CPU devices, strict rank promotion, and a quick compiler for every test; slow tests only when asked for."""

import atexit
import importlib
import importlib.util
import os
import pathlib
import shutil
import signal
import tempfile
import types

os.environ["JAX_PLATFORMS"] = "cpu"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # all processes of these tests compile a program once
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="intellax-compiled-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # as for users
    # One that another process is writing is compiled again, which a command of a test does not report.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache entry")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # must precede the first use of a backend
jax.config.update("jax_numpy_rank_promotion", "raise")  # advantage_B * logp_BT with B == T is wrong and finite
TESTS = pathlib.Path(__file__).parent
LONGEST = """
    rl/test_own_worker.py rl/test_train_loop.py rl/test_train.py rl/envs/sandbox/test_pool.py inference/engine/test_cpu_layers.py
    rl/test_worker.py rl/learning/learner/test_train_step.py models/kernels/test_splash_attention.py rl/swarm/orchestrator/test_nodes.py
    rl/envs/scoring/test_scorer.py rl/envs/foreign/test_early.py models/test_moe.py models/test_families.py rl/test_train_mix.py
    rl/learning/algorithms/test_losses.py inference/test_serve.py rl/swarm/orchestrator/test_verdict_collector.py
    rl/trust/verification/test_verifier.py rl/envs/hub/test_tryout.py inference/scheduler/test_scheduler.py sharding/mesh/test_fsdp.py
    rl/trust/test_audit.py rl/experiment/plan/test_plan.py models/kernels/test_cpu_transposed.py models/hf/test_checkpoint.py
    rl/envs/catalog/test_episodes.py rl/test_kills.py
""".split()  # files by `python -m pytest --durations=0`


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate", action="store_true", help="rewrite the golden files instead of comparing with them"
    )


def pytest_configure(config):
    """Takes XLA's older code generator for the CPU in fast tests, and in commands that they start, but for those of rl/test_train.py.

    The newer one takes half of the time of the compiler: 3.2 of 6.7 s for a train step of the tests (2 vCPU Intel Xeon). Slow tests compile
    as users do. A later XLA may lack the flag, and would end.
    """
    if not config.option.markexpr and jax.__version_info__ < (0, 12):
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
    # A shell ignores Ctrl-C for the commands that it starts in the background, which commands of the tests would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config):
    """Returns the processes of -n auto: two for all fast tests, and none but this one for a part, slow tests, or -s."""
    everything = config.args == config.getini("testpaths") and not config.option.markexpr
    return 2 if everything and config.option.capture != "no" else 0


def pytest_collection_modifyitems(config, items):
    rank = {name: number for number, name in enumerate(LONGEST)}  # first: at the end, a long file would run alone
    items.sort(key=lambda item: rank.get(item.path.relative_to(TESTS).as_posix(), len(rank)))
    slow = [item for item in items if item.get_closest_marker("slow")]  # not by keyword: a parameter may be called slow
    is_asked = config.option.markexpr or any("::" in arg for arg in config.args)
    for item in slow:
        item.add_marker(pytest.mark.timeout(0) if is_asked else pytest.mark.skip(reason="slow: run with -m slow"))


@pytest.fixture(autouse=True)
def real_model(request):
    """Fetches the real model before a test that is marked `real`, and skips it where it cannot be fetched."""
    if request.node.get_closest_marker("real"):
        from tests.support import real_model

        try:
            real_model.gguf()
        except real_model.Unavailable as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def compile_fast():
    """Sets LLVM to its lowest level, also in commands that the tests start: for programs that run a few times on tiny arrays.

    A train step of the tests compiles in 0.9 s instead of 3.5 s.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def forget_heads():
    """Forgets the signed heads that this process has accepted: tests sign several runs with one key."""
    from sharding.weights.format import head

    head.verifier.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Makes the code choose as on a GPU, and JAX lower kernels for an H100: since 0.11, it reads the GPU's kind from a device."""
    from sharding.mesh import mesh as mesh_lib

    monkeypatch.setattr(mesh_lib, "platform", lambda: "gpu")
    if importlib.util.find_spec("jax._src.pallas.triton.gpu_info"):
        module = importlib.import_module("jax._src.pallas.triton.gpu_info")
        monkeypatch.setattr(module, "get_gpu_info", lambda: types.SimpleNamespace(compute_capability=90))
