"""A resume is bitwise, on any mesh, from the newest checkpoint that is still as written."""

import errno
import gc
import json
import logging
import os
import pathlib
import shutil
import types
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sharding.mesh import checkpoint
from sharding.weights.bucket import mirror
from tests.support import trees


@flax.struct.dataclass
class State:
    step: jax.Array
    params: Any
    opt_state: Any


@flax.struct.dataclass
class Adapted:
    step: jax.Array
    params: Any
    frozen: Any


OPTIMIZER = optax.adamw(1e-2)


def _state(num_weights: int = 64) -> State:
    key = jax.random.key(0)
    params = {"w": jax.random.normal(key, (num_weights, 4), jnp.bfloat16), "layers": [{"b": jnp.arange(8.0)}]}
    return State(jnp.int32(0), params, OPTIMIZER.init(params))


@jax.jit
def _train_step(state: State) -> State:
    grads = jax.tree.map(lambda p: jnp.sin(p * 3) + state.step.astype(p.dtype), state.params)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state)


def _abstract(tree: Any, sharding=None) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def _save_steps(directory, *steps, **kwargs) -> list[State]:
    states = []
    with checkpoint.Checkpointer(directory, **kwargs) as checkpointer:
        for step in steps:
            states.append(_state().replace(step=jnp.int32(step)))
            checkpointer.save(step, states[-1], {"cursor": step})
    return states


def test_train_four_is_train_two_resume_two(tmp_path):
    straight = _state()
    for _ in range(4):
        straight = _train_step(straight)

    state = _state()
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(_abstract(state)) is None and checkpointer.latest_step() is None
        for step in (1, 2):
            state = _train_step(state)
            assert checkpointer.save(step, state, {"cursor": [step, "é"], "pool": {"a": 0.1}})
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        step, resumed, host_state = checkpointer.restore(_abstract(_state()))
    assert (step, host_state) == (2, {"cursor": [2, "é"], "pool": {"a": 0.1}})
    assert jax.tree.map(jax.typeof, resumed) == jax.tree.map(jax.typeof, state)
    for _ in range(2):
        resumed = _train_step(resumed)
    trees.assert_same(resumed, straight)


def test_frozen_leaves_are_saved_once_and_whole(tmp_path):
    """Those that another start left are replaced."""

    def with_frozen(step, value):
        return Adapted(jnp.int32(step), {"a": jnp.full(8, step)}, {"w": value + jnp.sin(jnp.arange(99999.0))})

    with checkpoint.Checkpointer(tmp_path / checkpoint.FROZEN) as checkpointer:
        checkpointer.save(0, {"w": jnp.zeros(99999)}, {})
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, with_frozen(step, 1.0), {"cursor": step})
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            found, state, _ = checkpointer.restore(_abstract(with_frozen(0, 0.0)), step)
            trees.assert_same(state, with_frozen(step, 1.0))
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / part).rglob("*") if file.is_file())
        for part in ("2", "3", checkpoint.FROZEN)
    ]
    assert max(sizes[:2]) < 50_000 and sizes[2] > 100_000
    shutil.rmtree(tmp_path / checkpoint.FROZEN)
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="frozen has no parameters, which step 3 needs; put it back"):
            checkpointer.restore(_abstract(with_frozen(0, 0.0)))


def test_restore_onto_another_mesh(tmp_path):
    meshes = [jax.make_mesh((n,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)) for n in (2, 8)]
    two, eight = (jax.NamedSharding(mesh, jax.P("fsdp")) for mesh in meshes)
    tree = State(jnp.int32(3), {"w": jnp.arange(64, dtype=jnp.bfloat16).reshape(16, 4)}, {"mu": jnp.arange(8.0)})
    saved = tree.replace(params=jax.device_put(tree.params, two), opt_state=jax.device_put(tree.opt_state, two))
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, saved, {})
        wanted = _abstract(tree).replace(
            params=_abstract(tree.params, eight), opt_state=_abstract(tree.opt_state, eight)
        )
        _, restored, _ = checkpointer.restore(wanted)
    trees.assert_same(restored, tree)
    assert restored.params["w"].sharding == eight and restored.opt_state["mu"].sharding == eight
    step, params = checkpoint.restore_params(tmp_path, _abstract(tree.params, two))
    trees.assert_same(params, tree.params)
    assert step == 3 and params["w"].sharding == two


FAST_DAMAGES = [  # orbax alone returns a wrong tree for the third, and a bare Exception for the second
    ("state/d/*", "truncate"),
    ("state/ocdbt*/d/*", "truncate"),
    ("state/ocdbt*/d/*", "flip"),
    ("state/_METADATA", "delete"),
    ("host/metadata", "flip"),
    ("seal.json", "truncate"),
    ("seal.json", "delete"),
]


@pytest.mark.parametrize(
    ("what", "how"),
    [
        pytest.param(what, how, marks=[pytest.mark.slow] * ((what, how) not in FAST_DAMAGES))
        for what in ("state/d/*", "state/ocdbt*/d/*", "state/_METADATA", "host/metadata", "seal.json")
        for how in ("truncate", "flip", "delete")
    ],
)
def test_damaged_newest_is_skipped(tmp_path, caplog, what, how):
    before, _ = _save_steps(tmp_path, 1, 2)
    path = max((tmp_path / "2").glob(what), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"truncate": data[: len(data) // 2], "flip": data, "delete": b""}[how])
    if how == "delete":
        path.unlink()
    with caplog.at_level(logging.WARNING), checkpoint.Checkpointer(tmp_path) as checkpointer:
        _, params = checkpoint.restore_params(tmp_path, _abstract(before.params))
        step, state, host_state = checkpointer.restore(_abstract(before))
        assert (step, host_state) == (1, {"cursor": 1})
        trees.assert_same(state, before)
        trees.assert_same(params, before.params)
        assert checkpointer.save(2, before, {"cursor": "again"})  # the torn one does not stand in the way
        checkpointer.wait()
        assert checkpointer.restore(_abstract(before))[2] == {"cursor": "again"}
    assert (what == "seal.json" and how == "delete") or "checkpoint 2 is damaged and skipped" in caplog.text
    assert (tmp_path / "torn-2").is_dir()


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path):
    (state,) = _save_steps(tmp_path, 5)
    (tmp_path / "5/host/metadata").write_bytes(b"")
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged \(\[5\]\)"):
            checkpointer.restore(_abstract(state))
        with pytest.raises(
            ValueError, match=r"checkpoint 5 is damaged .*host/metadata differs from the file that was saved"
        ):
            checkpointer.restore(_abstract(state), 5)
        (tmp_path / "5/seal.json").write_text("[]")
        with pytest.raises(ValueError, match=r"checkpoint 5 is damaged .*seal.json contains a list, not a dict"):
            checkpointer.restore(_abstract(state), 5)


def test_unfinished_save_is_invisible(tmp_path):
    (state,) = _save_steps(tmp_path, 1)
    os.rename(tmp_path / "1", tmp_path / "1.orbax-checkpoint-tmp")  # as after a kill before the rename
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.restore(_abstract(state)) is None
        assert checkpointer.save(1, state, {})
    assert os.listdir(tmp_path) == ["1"]


def test_keep_every_force_and_repeats(tmp_path):
    state = _state()
    with checkpoint.Checkpointer(tmp_path, keep=2, every=2) as checkpointer:
        assert [checkpointer.save(step, state, {}) for step in range(1, 8)] == [False, True] * 3 + [False]
        assert checkpointer.save(7, state, {}, force=True)
        assert not checkpointer.save(7, state, {}, force=True)  # the last step of a run is often also a multiple
        checkpointer.wait()
        assert checkpoint.complete_steps(tmp_path) == [6, 7] and checkpointer.latest_step() == 7
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2 .* choose one of \[6, 7\]"):
            checkpointer.restore(_abstract(state), 2)
        assert checkpointer.restore(_abstract(state), 6)[0] == 6
        with pytest.raises(ValueError, match="step 6 is not newer than 7"):
            checkpointer.save(6, state, {})
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.Checkpointer(tmp_path, keep=0)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        checkpoint.restore_params(tmp_path / "nowhere", {})


def test_a_checkpoint_is_due_by_time_too(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(checkpoint, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    with checkpoint.Checkpointer(tmp_path, every=100, every_minutes=10.0) as checkpointer:
        saved = []
        for step, minutes in enumerate((5.0, 9.9, 10.0, 19.9, 20.1), start=1):
            now_s[0] = 60 * minutes
            saved.append(checkpointer.save(step, {"x": jnp.zeros(2)}, {}))
    assert saved == [False, False, True, False, True]


def test_a_checkpoint_waits_for_the_bucket(tmp_path, monkeypatch):
    class Late:
        def check(self):
            pass

        def pace(self):
            raise ValueError("the bucket is an hour behind")

    monkeypatch.setitem(mirror._MIRRORS, tmp_path, Late())
    with checkpoint.Checkpointer(tmp_path / "checkpoints", every=2) as checkpointer:
        assert not checkpointer.save(1, {"x": jnp.zeros(2)}, {})
        with pytest.raises(ValueError, match="an hour behind"):
            checkpointer.save(2, {"x": jnp.zeros(2)}, {})


def test_the_best_is_kept_however_old(tmp_path):
    state = _state()
    with pytest.raises(FileNotFoundError, match=r"has a score yet; choose one of \[\]"):
        checkpoint.best_step(tmp_path)
    for scores in ({1: 0.2, 2: 0.9, 3: 0.9}, {4: 0.5, 5: float("nan")}):  # the second run resumes
        with checkpoint.Checkpointer(tmp_path, keep=1) as checkpointer:
            for step, value in scores.items():
                checkpointer.save(step, state, {})
                checkpointer.score(step, value)
        assert checkpoint.best_step(tmp_path) == 3  # the latest of equals
        assert {*checkpoint.complete_steps(tmp_path)} - {2} == {3, max(scores)}  # 2 was the best when 3 was saved
    for damaged in ("", "[]", '{"step": 6}'):
        (tmp_path / "best.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"best\.json.*; correct or remove it"):
            checkpoint.best_step(tmp_path)
    (tmp_path / "best.json").write_text('{"step": 6, "score": 2.0}')  # of a save that never ended
    with checkpoint.Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.restore(_abstract(state))[0] == 5
        checkpointer.save(6, state, {})
        checkpointer.score(6, 1.0)
        checkpointer.save(7, state, {})
        checkpointer.wait()
        assert checkpoint.complete_steps(tmp_path) == [6, 7]
        checkpointer.score(7, 1.5)
    assert checkpoint.best_step(tmp_path) == 7


def test_save_survives_donation(tmp_path):
    """The save is asynchronous, the next step overwrites its input: the copy must be taken before `save` returns."""
    state = _state(1 << 16)
    expected = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, state))
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state))
        _, restored, _ = checkpointer.restore(_abstract(_state(1 << 16)))
    trees.assert_same(restored, expected)


def test_other_state_is_refused_by_name(tmp_path):
    """orbax alone casts int32 to float32 in silence, and leaves a missing parameter abstract."""
    (state,) = _save_steps(tmp_path, 1)
    for change, message in (
        (lambda s: s.replace(step=jax.ShapeDtypeStruct((2,), jnp.int32)), r"step was saved as \(\(\), .*not \(\(2,\)"),
        (lambda s: s.replace(step=jax.ShapeDtypeStruct((), jnp.float32)), "step was saved as .*int32"),
        (lambda s: s.replace(params={**s.params, "q": s.step}), "params/q is not in the checkpoint"),
        (lambda s: s.replace(params={"w": s.params["w"]}), "params/layers/0/b is in the checkpoint but not in"),
    ):
        wanted = change(_abstract(state))
        with checkpoint.Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=message):
            checkpointer.restore(wanted)
        if "params" in message:
            with pytest.raises(ValueError, match=message):
                checkpoint.restore_params(tmp_path, wanted.params)


def test_nothing_on_stderr(tmp_path, capfd):
    (state,) = _save_steps(tmp_path, 1)
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(_abstract(state))
    checkpoint.restore_params(tmp_path, _abstract(state.params))
    assert capfd.readouterr() == ("", "")
    assert json.loads((tmp_path / "1/seal.json").read_text()).keys() >= {"host/metadata", "state/manifest.ocdbt"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax drops its loop in mid-failure
def test_full_disk(small_disk: pathlib.Path, caplog):
    small, large = _state(), _state(1 << 19)
    with checkpoint.Checkpointer(small_disk) as checkpointer:
        checkpointer.save(1, small, {})
        with pytest.raises(OSError, match=f"no space left for a checkpoint.*{small_disk}") as caught:
            checkpointer.save(2, large, {})
            checkpointer.wait()
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(small_disk) == ["1"]
        assert checkpointer.restore(_abstract(small))[0] == 1
        assert checkpointer.save(2, small, {})  # space again: the same step can be saved
        checkpointer.wait()
        assert checkpointer.latest_step() == 2
    assert not caplog.records
    gc.collect()  # objects that orbax dropped are collected here, not in the next test


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        *((ValueError(f"RESOURCE_EXHAUSTED [os_error_code='{code}']"), code) for code in checkpoint.FULL),
        (ValueError("INTERNAL [os_error_code='5']"), errno.EIO),
    ],
)
def test_each_spelling_of_a_full_disk_gets_the_remedy(tmp_path, error, code):
    remedy = "Input/output error; look at the disk" if code == errno.EIO else "disk space, or lower checkpoint.keep"
    with pytest.raises(OSError, match=remedy) as caught, checkpoint._disk_errors(tmp_path):
        raise error
    assert caught.value.errno == code and caught.value.filename == str(tmp_path)
    with pytest.raises(ValueError, match="other"), checkpoint._disk_errors(tmp_path):
        raise ValueError("other")
