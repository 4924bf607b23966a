"""The training loop in this process, with a rollout system that makes up its batches."""

import contextlib
import pathlib
import traceback
import types

import jax
import numpy as np
import pytest
from absl import flags

from configs import quickstart
from rl import launch, train
from rl.batch import packing
from rl.learner import train_step
from tests.support import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Rollouts:
    """An orchestrator's methods as the loop calls them: two groups of two samples a step."""

    def __init__(self, credit):
        self.credit = credit

    def next_batch(self, step):
        groups = [[self._rollout(reward) for reward in (0.0, 1.0)] for _ in range(2)]
        trees, _ = self.credit.assign(groups)
        values = {"rollout/num_tokens": 16.0, "rollout/reward": 0.5}
        return types.SimpleNamespace(trees=trees, groups=groups, metrics=values)

    def evaluate(self, version):
        return [[self._rollout(1.0)]]

    def state(self, step):
        return {}

    def publish(self, step):
        pass

    def _rollout(self, reward):
        mask = np.arange(8) >= 4
        return tiny.rollout(mask, logprobs=np.where(mask, np.float32(-5), np.float32(0)), reward=reward)


@pytest.fixture
def run_main(tmp_path, monkeypatch):
    """Returns a function that runs `rl.train.main` with a loss of its own, two steps, and no process but this one."""

    @contextlib.contextmanager
    def no_processes(exp, *args):
        yield Rollouts(exp.credit)

    def run(loss):
        config = quickstart.get_config()
        config.rl.loss, config.rl.loss_function, config.loss_options = loss.__name__, loss, {loss.__name__: {}}
        config.update_from_flattened_dict(
            {"model.num_layers": 1, "rl.num_steps": 2, "warmup.num_steps": 0, "inference.max_model_len": 64}
        )
        values = types.SimpleNamespace(config=config, workdir=str(tmp_path / "w"))
        monkeypatch.setattr(flags, "FLAGS", values)
        train.main()

    monkeypatch.setattr(launch, "start_rollout_system", no_processes)
    monkeypatch.setattr(train_step, "compile_train_step", lambda *args: None)  # so that the loop traces the step itself
    return run


def surrogate(logp_BT, mask_BT, denom):
    return -(logp_BT * mask_BT).sum() / denom, {}


def test_few_frames_from_the_command_to_the_loss(run_main):
    """Frames of this checkout between `main` and a user's loss; those of jax, absl and the standard library do not count."""
    stacks = []

    def own_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom):
        frames = [f for f in traceback.extract_stack() if ROOT in pathlib.Path(f.filename).parents]
        names = [f.name for f in frames if "site-packages" not in f.filename]
        stacks.append(names[names.index("main") :])
        return surrogate(logp_BT, mask_BT, denom)

    run_main(own_loss)
    print("\n".join(" -> ".join(names) for names in stacks))
    assert ["main", "train", "train_step", "gradients", "loss", "own_loss"] in stacks
    assert max(map(len, stacks)) <= 6


def test_a_batch_that_is_not_on_the_devices_is_refused(run_main, monkeypatch):
    """An implicit transfer in the middle of a step, on every host, is an error."""

    def own_loss(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom):
        return surrogate(logp_BT, mask_BT, denom)

    monkeypatch.setattr(train.host_feed, "place", lambda trees, layout, *args: packing.pack(trees, layout))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run_main(own_loss)
    assert jax.config.jax_transfer_guard is None
