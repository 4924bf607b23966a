"""A worker without a model against the real checks, over HTTP: none of its groups is trained on, under any config.

An honest worker generates with the real engine and loses no group. Run on the code before groups were quarantined, 56 of 64 forged
groups were trained on at the default fraction of replays, and all where a config left them to another service.
"""

import dataclasses

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.validator import calibrate
from rl.trust.verification import evidence_log, run_bands, verifier
from tests.rl.swarm.orchestrator.test_attacks import HONEST, RUN, running
from tests.support import forger as forger_lib
from tests.support import small_configs, validators
from tests.support.orchestrators import inside, marks

pytestmark = pytest.mark.usefixtures("compile_fast")
WAIT_S = 120


def run(exp, tmp_path, *, one_key, formed):
    """A run in which a forger gets at all groups first, with `one_key` before any verdict, then an honest worker. Returns (number of forged groups, batches)."""
    params, steps = small_configs.params(exp.model), exp.config.rl.num_steps
    num_groups = steps * exp.config.rl.prompts_per_step
    tolerance = run_bands.loose(exp.config)  # before a measurement
    rules = dataclasses.replace(verifier.rules_of(exp.config, exp.tokenizer), tolerance=tolerance)
    evidence = evidence_log.EvidenceLog(None)
    validator = verifier.Verifier(exp.model, lambda version, epoch: params, rules, evidence)
    hooks = {
        "source": verdict_collector.VerdictCollector(RUN, validator.check_groups_with_weights),
        "invited": [HONEST.worker],
    }
    hooks["check_group_without_weights"] = validator.check_group_without_weights
    forger, key, num_forged = forger_lib.Forger(exp, formed=formed), rollout_lib.WorkerKey.generate(), 0
    with running(tmp_path, exp, **hooks) as (orchestrator, worker):
        # Admission alone would keep the forger to a fraction of the groups.
        health, room = inside(orchestrator).health, lambda worker, network, num_unfinished, now_s, held: num_unfinished
        health.room = lambda worker, *rest: 0 if health.is_banned(worker) else room(worker, *rest)
        while num_forged < num_groups:
            leased = worker.lease(key, num_groups if one_key else 1)
            worker.submit(key, [rollout for group in leased for rollout in forger.forge(group, key, 0)])
            num_forged, key = num_forged + len(leased), rollout_lib.WorkerKey.generate()
        validators.settled(orchestrator, WAIT_S)
        groups = worker.lease(HONEST, 4096)
        made = calibrate.roll_out(exp, params, 0, groups, HONEST)
        for first in range(0, len(made), 128):
            assert set(worker.submit(HONEST, made[first : first + 128])) == {"taken"}
        batches = [orchestrator.next_batch(step) for step in range(1, steps + 1)]
    assert not marks(orchestrator, HONEST.worker)["num_rejected"], "an honest group was rejected"
    return num_forged, batches


def check(name, tmp_path, *, prompts=64, steps=1, one_key=False, formed=True):
    exp = small_configs.shrunk(name, tmp_path, prompts=prompts, samples=2, steps=steps, max_lag=steps - 1)
    num_forged, batches = run(exp, tmp_path, one_key=one_key, formed=formed)
    assert num_forged == steps * prompts
    signers = {rollout.worker for batch in batches for group in batch.groups for rollout in group}
    assert signers == {HONEST.worker} and [len(batch.groups) for batch in batches] == [prompts] * steps
    assert sum(batch.metrics["trust/num_refused"] for batch in batches) == 2 * num_forged


def test_8_groups_forged_without_a_model(tmp_path):
    check("quickstart", tmp_path, prompts=8)


@pytest.mark.slow
@pytest.mark.parametrize(("one_key", "formed"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("name", small_configs.NAMES)
def test_512_groups_forged_without_a_model(tmp_path, name, one_key, formed):
    """`formed`: the proofs have the right form, so that only the replay finds them out."""
    check(name, tmp_path, steps=8, one_key=one_key, formed=formed)
