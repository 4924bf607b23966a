"""A swarm under faults: its forged rollouts are refused, and a run survives all faults of the schedule."""

import numpy as np
import pytest

from bench.chaos import cheats
from inference.rollouts import completion as completion_lib
from tests.rl.swarm import test_swarm
from tests.support import cheats as played_cheats
from tests.support import commands, doubles


def forged(double):
    """The rollouts of a double as the impostor of a swarm hands them in."""
    out = []
    for rollout in double.generate():
        P = rollout.prompt_length
        sample = completion_lib.Completion(rollout.tokens[P:].tolist(), [], [], 0, "stop", b"", server="x")
        tokens = np.array([*rollout.tokens[:P], *cheats.forged(sample).tokens], np.int32)
        out.append(doubles.signed(doubles.rewritten(double, rollout, tokens), logprobs=rollout.logprobs))
    return out


def test_each_group_of_the_impostor_is_refused_by_the_real_verifier():
    caught, reasons = played_cheats.play(forged, 32, prompts=4), {"sampling", "logprob", "toploc", "termination"}
    assert caught.worst_until <= played_cheats.GROUP and {*caught.reasons} <= reasons, caught
    for tokens in ([5, 6, 5, 2], [5, 2], [2]):  # also those that read the same backward
        assert cheats.forged(completion_lib.Completion(tokens, [], [], 0, "stop", b"")).tokens != tokens


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "apart"), [(364, ()), (3082, ("--apart",))])
def test_a_swarm_under_faults_ends_its_run_and_bars_only_cheats(tmp_path, seed, apart):
    """Nine faults. By these seeds a server lies and another refuses; learner, orchestrator, and validator are killed, or stop."""
    workdir, output = tmp_path / "run", tmp_path / "output"
    with open(output, "w") as file:
        overrides = {"rl.num_steps": 60, "rl.max_lag": 2, "topology.lease_s": 12.0}
        options = (f"--seed={seed}", "--minutes=1.5", "--workers=2", *apart)
        swarm = test_swarm.start(workdir, file, *options, module="bench.chaos", **overrides)
        assert swarm.wait(900) == 0, output.read_text()[-4000:]
    assert test_swarm.steps(workdir) == list(range(1, 61)) and not test_swarm.processes_of(workdir)
    *_, faults, starts, _, _, refused, audit = output.read_text().splitlines()
    assert faults.startswith("faults: ") and "forge 1" in faults and "learner" in starts
    assert " barred after 5: " in refused and audit.endswith("no findings")


@pytest.mark.parametrize(
    ("option", "code", "words"),
    [("--minutes=-1", 1, "--minutes=-1 must be above 0; change it"), ("--dry_run", 0, "forge      impostor")],
)
def test_the_command_lists_its_faults_or_names_a_mistake(tmp_path, option, code, words):
    found = commands.forked("bench.chaos", "--config=configs/quickstart.py", f"--workdir={tmp_path}", option)
    assert found.returncode == code and words in found.stdout + found.stderr and not [*tmp_path.iterdir()]
