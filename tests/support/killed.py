"""Processes of an orchestrator that are killed: a kill is a copy of the files at that moment, on which the next one starts."""

import json
import pathlib

import numpy as np

from configs import quickstart
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks
from tests.support.groups import answers

KEY, RUN = rollout_lib.WorkerKey.generate(), rollout_lib.WorkerKey.generate()
WAIT_S = 60


def screened(rollouts, split):
    return checks.OK, {r.sample: {"reward": r.sample + 0.5} for r in rollouts}


class Process:
    """One process of an orchestrator on the files in `path`, with `rate` as the rate of replays, and all that it replayed."""

    def __init__(self, path: pathlib.Path, rate: float = 1e-9, ledger=None, *, rl=None, ledger_options=None, **changes):
        config = quickstart.get_config()
        config.rl.prompts_per_step, config.rl.samples_per_prompt, config.rl.num_steps = 3, 2, 10
        config.rl.advantage, config.rl.max_lag = "group_mean", 1
        config.rl.update(rl or {})
        config.trust.min_rate = config.trust.invited_rate = rate
        self.exp, self.replayed, self.path = experiment.resolve(config), [], path
        self.ledger = ledger or run_ledger.RunLedger(path / "ledger.db", RUN, RUN.worker, **ledger_options or {})
        verdicts = verdict_collector.VerdictCollector(RUN, self._replay)
        options = dict(credit=self.exp.credit, key=RUN, secret=b"secret", invited=(KEY.worker,), ledger=self.ledger)
        options |= {"check_group_without_weights": screened} | changes
        self.orchestrator = orchestrator_lib.Orchestrator(self.exp.config, path, verdicts=verdicts, **options)

    def _replay(self, groups):
        self.replayed += [group[0].task.group for group in groups]
        return [checks.OK] * len(groups)

    def resume(self, step, policy):
        states = self.path / "rollouts" / "open" / orchestrator_lib.STATES
        saved = json.loads(states.read_text()) if states.exists() else {}
        self.orchestrator.resume(step, saved.get(str(step)), saved.get(str(step + 1)))
        self.orchestrator.publish(policy)

    def answer(self, count):
        """Leases `count` groups and hands them in; returns their numbers."""
        groups = self.orchestrator.leases.lease(KEY.worker, count)
        rollouts = [rollout_lib.sign(r, KEY) for group in groups for r in answers(group)]
        for future in self.orchestrator.submit(parquet.decode(parquet.to_bytes(rollouts))).values():
            assert future.result(WAIT_S) in ("accepted", "quarantined")
        return [group.group for group in groups]

    def batch(self, step):
        """Batch `step` as bytes, to be compared."""
        batch = self.orchestrator.next_batch(step)
        arrays = [tree.prompt for tree in batch.trees]
        arrays += [getattr(b, name) for t in batch.trees for b in t.branches for name in ("tokens", "advantage")]
        return [np.asarray(array).tobytes() for array in arrays]

    def trained(self, step):
        """Returns the numbers of the groups in the file of batch `step`."""
        rollouts = parquet.read(self.path / "rollouts" / f"step_{step}" / "accepted.parquet")
        return sorted({rollout.task.group for rollout in rollouts})

    def end(self):
        self.orchestrator.close()
        self.ledger.__exit__()
