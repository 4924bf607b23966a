"""A run with router replay: its requests, its rejections, and the whole walk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart_moe
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.learning.batch import router_replay
from rl.protocol import task_schedule
from rl.trust.validator import calibrate
from rl.trust.verification import checks, measurement, verifier
from rl.trust.verification import rules as rules_lib
from tests.support import claims, groups, tiny, tiny_run


def test_a_run_that_replays_records_asks_and_packs():
    exp = experiment.resolve(claims.moe_config())
    assert exp.engine.routed_experts and exp.credit.router_replay == router_replay.RouterReplay.of(exp.model)
    assert verifier.rules_of(exp.config, exp.tokenizer).router_replay
    assert rules_lib.Tolerance.of(exp.config.trust).routing == exp.config.trust.routing_margin == 0.02
    plain = experiment.resolve(quickstart_moe.get_config())
    # Servers take it from there.
    published = [one.broadcast_metadata["engine"]["routed_experts"] for one in (exp, plain)]
    assert published == [True, False]
    assert not plain.engine.routed_experts and plain.credit.router_replay is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__num_experts": 0, "model__experts_per_token": 0, "model__expert_ffn_dim": 0}, "no router to replay"),
        (
            {"train__row_length": 2**24, "inference__max_model_len": 2**23},
            "a group has .* bytes, more than the .* that a submission may have; lower rl.samples_per_prompt",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_it_starts(changes, words):
    with pytest.raises(ValueError, match=words):
        experiment.resolve(claims.moe_config(**changes))


def test_rollouts_that_do_not_say_their_experts_are_refused_where_they_are_replayed():
    exp = experiment.resolve(claims.moe_config(rl__prompts_per_step=3, rl__samples_per_prompt=2))
    group = task_schedule.train_groups(exp.config, 1)[0]
    rng = np.random.default_rng(0)

    def refusal(claim, split="train"):
        asked = dataclasses.replace(group, split=split)
        rules = rules_lib.Rules.of(exp.config).at_lease(asked, newest=0)
        return str(checks.check_at_lease(groups.answers(group, routed_experts=claim), rules))

    rows = np.stack([rng.permutation(4)[:2] for _ in range(4 * exp.model.num_layers)])
    rows = rows.reshape(4, -1, 2).astype(np.uint8)
    assert refusal(rows) == refusal(None, "held_out") == "ok"
    assert refusal(None).startswith("routing: it lacks routed experts")
    assert refusal(rows[:, :, :1]).startswith("routing: expected [4, 3, 2]")


@pytest.mark.slow
def test_honest_claims_of_every_variant_pass_at_the_default_limits():
    """Other batches, chunkings and a mesh give other near ties, and none is an offence; bfloat16 stays within the limit for it."""
    exp = experiment.resolve(claims.moe_config(model__num_experts=16, rl__max_lag=0))
    params = jax.tree.map(jnp.asarray, tiny.params(exp.model, 3))
    validator = verifier.Verifier(exp.model, lambda version, epoch: params, rules_lib.Rules.of(exp.config))
    key, measured = rollout_lib.WorkerKey.generate(), {}
    for name in ("small_batch", "long_calls", "tensor_parallel", "bfloat16"):
        rollouts = calibrate.variant_rollouts(exp, params, 0, calibrate.VARIANTS[name], 128, key)
        assert all(rollout.routed_experts is not None for rollout in rollouts)
        measured[name] = calibrate.measure(validator, rollouts)
        if name != "bfloat16":
            assert all(verdict.accepted for verdict in validator.check_with_weights(rollouts)), name
            assert measured[name].routing < 1e-3, name
    assert 1e-3 < measured["bfloat16"].routing < 0.2
    tolerance, _ = measurement.limits(list(measured.values()))
    assert tolerance.routing == measurement.ROUTING_SAFETY * measured["bfloat16"].routing


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_quickstart_of_a_mixture_replays_its_routers(tmp_path, devices):
    """The whole walk: asked for, signed, judged (every group), packed, replayed, kept. Nothing honest is refused."""
    overrides = {"train__router_replay": True, "trust__min_rate": 1.0, "model__num_layers": 2, "rl__max_lag": 1}
    overrides |= {"model__expert_ffn_dim": 32}
    env = {}
    if devices == 8:
        env, overrides = {"JAX_NUM_CPU_DEVICES": "8"}, overrides | {"mesh__fsdp": 2, "mesh__expert": 4}
    result = tiny_run.run(tmp_path / "w", config="quickstart_moe", env=env, **overrides)
    assert result.returncode == 0, result.stderr
    steps = tiny_run.curve(tmp_path / "w")
    assert len(steps) == 6
    for step in steps:
        assert step["trust/num_refused"] == 0
        # One version apart and in programs of other shapes: a few near ties, of thousands of choices.
        assert 0 <= step["moe/routing_mismatch"] < 0.2, step
    assert sum(step["trust/num_checked"] for step in tiny_run.lines(tmp_path / "w")) == 6 * 16
    assert sum(step["loss/grad_norm"] > 0 for step in steps) > 3
    kept = parquet.read(tmp_path / "w" / "rollouts" / "step_3" / "accepted.parquet")
    assert all(r.routed_experts.shape == (len(r.tokens) - 1, 2, 2) and r.routed_experts.max() < 4 for r in kept)
