"""Limits and bands of a run: measured on its own first honest groups, kept, and never held against its own nodes."""

import dataclasses
import errno
import functools
import json

import numpy as np
import pytest
from ml_collections import config_dict

from inference.rollouts import rollout as rollout_lib
from rl.trust.verification import evidence_log, run_bands, sequential_test, verifier
from tests.support import doubles

pytestmark = pytest.mark.usefixtures("compile_fast")
STRANGER = rollout_lib.WorkerKey.generate()


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Call it for (limits and bands, validator, lines for people, flagged nodes) of a process of the run."""
    monkeypatch.setattr(run_bands, "MIN_ROLLOUTS", 16)
    monkeypatch.setattr(run_bands, "MIN_GROUPS", 2)

    def one(own=(doubles.NODE.worker,), dtype="float32", servers=(), invited=(), experts=0):
        config, lines, flagged = config_dict.ConfigDict(doubles.experiment(dtype, 2).config), [], []
        config.topology.workers, config.topology.server_keys, config.model.num_experts = invited, servers, experts
        bands = run_bands.RunBands.of(config, tmp_path, own=own, on_note=lines.append)
        options = {"own": own, "convicts": bands.bands is not None, "on_flagged": lambda *of: flagged.append(of)}
        options["servers"] = servers
        evidence = evidence_log.EvidenceLog(bands.bands, **options)
        exp, rules = doubles.experiment(), doubles.prescribed(2)
        return (
            bands,
            verifier.Verifier(exp.model, lambda v, e: doubles.weights(v), rules, evidence, bands),
            lines,
            flagged,
        )

    return one


@functools.cache
def honest():
    return doubles.honest(doubles.Double(3, prompts=2))


def of_stranger(rollouts):
    return [rollout_lib.sign(rollout, STRANGER) for rollout in rollouts]


def test_a_run_measures_its_own_first_groups_and_a_resume_judges_by_the_same(make, tmp_path):
    killed, validator, *_ = make()
    assert all(verdict.accepted for verdict in validator.check_with_weights(honest()[:8]))
    assert killed.is_measuring and killed.measured.num_rollouts == 8  # a kill here loses them, and nothing else
    bands, validator, lines, flagged = make()
    assert bands.is_measuring and bands.tolerance.logprob == 1e-3 and not (tmp_path / run_bands.FILE).exists()
    assert all(verdict.accepted for verdict in validator.check_with_weights(of_stranger(honest())))
    assert bands.is_measuring  # a stranger's rollouts count for nothing
    assert all(verdict.accepted for verdict in validator.check_with_weights(honest()))
    assert not bands.is_measuring and "limits in" in lines[-1] and not flagged
    assert validator.rules.bands == bands.bands and validator.rules.tolerance.logprob < 1e-3
    other = rollout_lib.WorkerKey.generate()
    assert validator.check_with_weights([rollout_lib.sign(one, other) for one in honest()])[0].accepted
    assert validator.evidence.tests[other.worker].num_rollouts == 16  # tested from now on
    again, other, said, _ = make()
    assert not again.is_measuring and (again.tolerance, again.bands) == (bands.tolerance, bands.bands)
    assert (
        run_bands.digest(tmp_path / run_bands.FILE) in said[-1]
        and run_bands.digest(tmp_path / run_bands.FILE) in lines[-1]
    )
    assert other.rules.bands == bands.bands
    # Numbers that other numerics gave are not used.
    changed, _, said, _ = make(dtype="bfloat16")
    assert changed.is_measuring and "another dtype; it is measured again" in said[-1]
    assert not make(own=())[0].is_measuring and make(own=())[0].bands  # a file is a file


def test_validators_of_one_folder_judge_by_the_first_measurement_and_a_full_disk_delays_it(make, tmp_path, monkeypatch):
    (first, judge, *_), (second, other, said, _) = make(), make()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space left"):
        disk.setattr(run_bands.atomic_file, "write", full)
        judge.check_with_weights(honest())
    assert first.is_measuring and judge.rules.bands is None and not (tmp_path / run_bands.FILE).exists()
    assert all(verdict.accepted for verdict in judge.check_with_weights(honest()[:8]))
    written = (tmp_path / run_bands.FILE).read_bytes()
    assert judge.rules.bands == first.bands
    assert all(verdict.accepted for verdict in other.check_with_weights(honest()))
    assert (tmp_path / run_bands.FILE).read_bytes() == written and not said
    assert (second.tolerance, second.bands) == (first.tolerance, first.bands) and other.rules.bands == first.bands


@pytest.mark.parametrize("body", [b"", b'{"measured": {"num', b"[]", b"\xff"])
def test_a_damaged_file_is_named(make, tmp_path, body):
    (tmp_path / run_bands.FILE).write_bytes(body)
    with pytest.raises(ValueError, match=r"bands.json.*; (it must be JSON; )?correct or remove it"):
        make()


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_run_measures_what_its_workers_hand_in_whatever_server_signs_it(make, is_remote):
    """Attack: a stranger chooses among an own server's samples. In remote mode, registered servers left nothing to measure: strangers waited for ever."""
    server, node = rollout_lib.WorkerKey.generate().worker, doubles.NODE.worker
    named = {"own": (), "invited": (node,)} if is_remote else {"own": (node, server)}
    bands, validator, *_ = make(servers=(server,), **named)
    signed = [dataclasses.replace(r, server=server, server_signature=bytes(64)) for r in honest()]
    assert all(verdict.accepted for verdict in validator.check_with_weights(of_stranger(signed)))
    assert bands.is_measuring and not bands.measured.num_rollouts
    assert all(verdict.accepted for verdict in validator.check_with_weights(signed))
    assert not bands.is_measuring and not {node, STRANGER.worker} & validator.evidence.tests.keys()


def test_a_registered_server_takes_no_part_in_the_measurement_through_an_own_worker(make):
    """Attack: own workers use registered servers, too. One that errs up to the loose limits would set those of all strangers."""
    server, node = rollout_lib.WorkerKey.generate().worker, doubles.NODE.worker
    bands, validator, *_ = make(own=(node, "5e" * 32), servers=(server, "5e" * 32))
    for name in (server, ""):  # "": another one served other calls of the episode
        signed = [dataclasses.replace(r, server=name, server_signature=bytes(64) * bool(name)) for r in honest()]
        assert all(verdict.accepted for verdict in validator.check_with_weights(signed)) and not bands.measured.groups
    signed = [dataclasses.replace(r, server="5e" * 32, server_signature=bytes(64)) for r in honest()]
    assert all(verdict.accepted for verdict in validator.check_with_weights(signed)) and not bands.is_measuring


@pytest.mark.parametrize("is_invited", [False, True])
def test_no_measured_limit_is_looser_than_those_that_accepted_the_rollouts(make, is_invited):
    """Attack: 12 tokens that err by 9e-4. A tail that is carried on from them to a chance of 1e-9 would let strangers err by 9e-3."""
    node = doubles.NODE.worker
    bands, validator, *_ = make(own=() if is_invited else (node,), invited=(node,) if is_invited else ())
    wrong = []
    for rollout in honest():
        logprobs = rollout.logprobs.copy()
        logprobs[-1] -= 9e-4 * (rollout.sample < 6)
        wrong.append(dataclasses.replace(rollout, logprobs=logprobs))
    loosest = bands.tolerance if is_invited else bands.loosest
    assert all(verdict.accepted for verdict in validator.check_with_weights(wrong)) and not bands.is_measuring
    assert bands.tolerance.margin <= loosest.margin and bands.tolerance.logprob <= loosest.logprob
    assert (bands.tolerance.logprob == 1e-3) == is_invited


def test_a_run_whose_rollouts_name_no_experts_measures_how_many_tokens_flip(make):
    """Else one flipped token that errs by a nat would be carried on to a limit that any token keeps."""
    bands, validator, *_ = make(experts=8)
    assert bands.tolerance.flips == run_bands.LOOSE_FLIPS
    assert all(verdict.accepted for verdict in validator.check_with_weights(honest())) and not bands.is_measuring
    assert 0 < bands.tolerance.flips < run_bands.LOOSE_FLIPS


def test_statistics_do_not_end_a_run_by_its_own_workers(make):
    """Claims that are all off in one direction, each within the limits: the run's own is reported and goes on, and a stranger's is refused."""
    bands, validator, _, flagged = make()
    assert all(verdict.accepted for verdict in validator.check_with_weights(honest()))
    shift, honest_claims = 0.7 * bands.tolerance.logprob, doubles.honest(doubles.Double(5, prompts=2))
    other = [doubles.signed(r, logprobs=r.logprobs - np.float32(shift) * r.sampled_mask) for r in honest_claims]
    assert all(verdict.accepted for verdict in validator.check_with_weights(other))
    ((node, line),) = flagged
    assert node == doubles.NODE.worker and "differ from their replay more than honest ones did: " in line
    assert "this bans no worker, and each of its groups is replayed" in line
    assert not any(verdict.accepted for verdict in validator.check_with_weights(of_stranger(other)))


def test_a_stranger_that_hands_in_before_the_measurement_is_reported_and_convicted_only_by_it(make):
    """Claims that err within the loose limits of the dtype, and by more than honest ones of this model."""
    bands, validator, _, flagged = make()
    biased = [
        rollout_lib.sign(dataclasses.replace(r, logprobs=r.logprobs - 9e-4 * r.sampled_mask.astype("f4")), STRANGER)
        for r in honest()
    ]
    forged = [
        rollout_lib.sign(dataclasses.replace(r, proofs=biased[i - 1].proofs), STRANGER) for i, r in enumerate(biased)
    ]
    assert {verdict.reason for verdict in validator.check_with_weights(biased)} == {"ok"} and bands.is_measuring
    assert not any(verdict.accepted for verdict in validator.check_with_weights(forged))  # no limit is that loose
    assert all(verdict.accepted for verdict in validator.check_with_weights(honest()))
    assert {verdict.reason for verdict in validator.check_with_weights(biased)} == {"logprob"} and not flagged


@pytest.mark.parametrize("is_measured", [False, True])
def test_statistics_notify_before_a_measurement_and_convict_after_it(is_measured):
    told = []
    log = evidence_log.EvidenceLog(None, convicts=is_measured, on_flagged=lambda *of: told.append(of))
    wrong = [
        rollout_lib.sign(dataclasses.replace(r, logprobs=r.logprobs - r.sampled_mask.astype("f4")), STRANGER)
        for r in honest()
    ]
    reasons = {verdict.reason for verdict in log.add_claims(wrong)}
    assert reasons == ({"statistics"} if is_measured else {"ok"}) and len(told) == (not is_measured)
    # all newcomers are flagged, too
    assert log.verdict(STRANGER.worker).reason == ("statistics" if is_measured else "ok")
    assert log.tests[evidence_log.NEWCOMERS].flag


def test_a_run_without_nodes_to_measure_says_what_to_do(make, tmp_path):
    bands, _, lines, _ = make(own=())
    assert (
        not bands.is_measuring
        and bands.bands is None
        and "run `python -m rl.validator calibrate`, or invite" in lines[-1]
    )
    (tmp_path / run_bands.FILE).write_text('{"measured": 3}')
    assert "measured with another model, dtype, device, jax; it is measured again" in make()[2][-1]
    (tmp_path / run_bands.FILE).write_text(json.dumps({"measured": {"numerics": bands.numerics}}))
    with pytest.raises(ValueError, match="is not a bands file"):
        make()


# ---- newcomers: one test for all keys that were not invited --------------------------------------------------------------

BANDS = sequential_test.Bands(margin=0.01, logprob=0.02, proof=0.05, shape=1e-3, scatter=0.02)


def group(key, number, errors):
    """Returns a group of 8 accepted rollouts of a key with its evidence: 32 tokens each, which err by `errors`."""
    out = []
    for rollout in honest()[:8]:
        task = dataclasses.replace(rollout.task, group=number)
        tokens = (number, rollout.sample, *range(30))
        arrays = (
            np.array(tokens),
            np.full(32, errors) * (-1.0) ** np.arange(32),
            np.ones(32),
            np.ones(32),
            np.zeros(32, bool),
        )
        evidence = sequential_test.Evidence(0.0, 0.0, np.zeros(4), 0.0, *arrays)
        out.append((dataclasses.replace(rollout, worker=key, task=task), evidence))
    return out


def test_fresh_keys_do_not_escape_statistics():
    """Two groups per key are too few for its own test. All newcomers share one more, which convicts no key and lets none of them train."""
    told = []
    log = evidence_log.EvidenceLog(BANDS, invited=["invited"], on_flagged=lambda *of: told.append(of))

    def hand_in(key, number, errors):
        log.add_replays(group(key, number, errors))
        return log.verdict(key).reason

    found = [hand_in(f"key{n // 2}", n, 0.0235) for n in range(24)]
    first = found.index("newcomer")
    assert first <= 16 and set(found[:first]) == {"ok"} and set(found[first:]) == {"newcomer"}, found
    assert [key for key, _ in told] == [evidence_log.NEWCOMERS] and "train nothing" in told[0][1]
    # An honest newcomer is through after 64 rollouts, invited workers are not newcomers, and a restart forgets nothing.
    again = evidence_log.EvidenceLog(BANDS, invited=["invited"])
    again.restore(**json.loads(json.dumps(log.state(0))))
    for one in (log, again):
        log = one
        assert [hand_in("honest", 100 + n, 0.015) for n in range(9)] == ["newcomer"] * 7 + ["ok"] * 2
        assert hand_in("invited", 200, 0.015) == "ok"
        assert [hand_in("alone", 300 + n % 2, 0.015) for n in range(9)] == ["newcomer"] * 7 + [
            "ok"
        ] * 2  # no other work


def test_honest_newcomers_raise_no_alarm():
    log = evidence_log.EvidenceLog(BANDS)
    for n in range(200):
        log.add_replays(group(f"key{n}", n, 0.0195))
        assert log.verdict(f"key{n}").accepted
