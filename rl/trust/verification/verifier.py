"""Verification of rollouts: were these tokens sampled by the weights, the seed, and the temperature that they claim?

1. `check_without_weights`: the rules that need no model; prompt and reward are made again.
2. `check_with_weights`: one replay (rl/trust/verification/replay.py) with the published weights of every version that the rollouts name.
3. Rollouts that pass are added to the sequential test of their worker (rl/trust/verification/evidence_log.py), where small deviations add up.

The rules are in rl/trust/verification/checks.py. A validation service takes the verdicts per rollout; an orchestrator takes one verdict per
group, which is rejected with its worst member, since advantages compare its members.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import lora, transformer
from rl import envs
from rl.envs.foreign import host as foreign_host
from rl.envs.interface import environment
from rl.envs.recording import session
from rl.envs.scoring import scorer
from rl.protocol import env_mix, lease, task_schedule
from rl.trust.verification import checks, episodes, evidence_log, run_bands, sequential_test
from rl.trust.verification import replay as replay_lib
from rl.trust.verification import rules as rules_lib
from sharding.mesh import mesh as mesh_lib
from sharding.system import cli
from sharding.weights import broadcast
from sharding.weights.format import head

MAX_SCORERS = 4  # processes that score at the same time, in case some are slow


class WeightsUnavailable(ValueError):
    """The weights of a policy version that a rollout names cannot be loaded."""


class Verifier:
    """Verifies rollouts of workers against the rules of a run and its published weights. Any thread may call the methods.

    Args:
      model: config of the policy.
      weights: function (version, epoch) -> params; raises ValueError or OSError for a policy that is not available.
      rules: the rules of the run.
      evidence: sequential tests per worker, to which accepted rollouts are added; by default they take claims only.
      bands: limits and bands of the run, which it measures here; None: those of `rules`.
    """

    def __init__(
        self,
        model: config_lib.ModelConfig,
        weights: Callable[[int, int], transformer.Params],
        rules: rules_lib.Rules,
        evidence: evidence_log.EvidenceLog | None = None,
        bands: run_bands.RunBands | None = None,
    ):
        self.model, self._weights, self._bands = model, weights, bands
        self.rules, self.evidence = rules, evidence or evidence_log.EvidenceLog(None)
        if bands:
            self.rules = dataclasses.replace(rules, tolerance=bands.tolerance, bands=bands.bands)

    def check_without_weights(
        self,
        rollouts: Sequence[rollout_lib.Rollout],
        *,
        split: str = "train",
        is_signed: bool = False,
    ) -> list[checks.Verdict]:
        """Runs all checks that need no model, the environment's scorer included, on rollouts of any groups. Returns a verdict per rollout.

        `split` ("train" or "held_out") names the tasks that the rollouts must belong to. With `is_signed`, fields and signatures were
        checked before.
        """
        rules = self.rules
        if split == "held_out" and rules.held_out:
            rules = dataclasses.replace(rules, groups=rules.held_out)
        out = [checks.first_failure(() if is_signed else checks.UNSIGNED, rollout, rules) for rollout in rollouts]
        for i, rollout in enumerate(rollouts):
            if out[i].accepted:
                out[i] = checks.first_failure(checks.IF_SIGNED, rollout, checks.own_rules(rollout, rules))
        passed = [i for i, verdict in enumerate(out) if verdict.accepted]
        groups = collections.defaultdict(list)
        for i, verdict in zip(passed, checks.claimed_logprobs([rollouts[i] for i in passed]), strict=True):
            out[i] = verdict
            if verdict.accepted:
                groups[rollouts[i].step, rollouts[i].task.group, rollouts[i].worker].append(i)
        if any(one.replay for one in rules.each):
            groups = _whole_episodes(rollouts, out, groups)
        for members in groups.values():
            own = checks.own_rules(rollouts[members[0]], rules)
            for i, verdict in zip(members, checks.rewards([rollouts[i] for i in members], own), strict=True):
                out[i] = verdict
        return out

    def check_with_weights(self, rollouts: Sequence[rollout_lib.Rollout]) -> list[checks.Verdict]:
        """Recomputes rollouts with the published weights and returns a verdict per rollout. Accepted ones are added to the evidence.

        All rollouts must have passed `check_without_weights`. The verdict is "weights" (not the worker's fault) if the weights
        of a policy version that the rollout names are not available.
        """
        handed_in, rollouts = rollouts, self.evidence.attributed(rollouts)
        nodes = [rollout.worker for rollout in rollouts]  # that answer for them
        found: list[tuple[checks.Verdict, sequential_test.Evidence | None]] = []
        while (start := len(found)) < len(rollouts):
            rest = handed_in[start:]
            longest = np.maximum.accumulate([len(rollout.tokens) for rollout in rest])
            padded = longest * np.arange(1, len(rest) + 1)
            num = max(1, int(np.searchsorted(padded, rules_lib.MAX_REPLAY_TOKENS, side="right")))
            found += self._check_batch(rest[:num], nodes[start : start + num])
        groups = collections.defaultdict(list)
        for rollout, (_, evidence) in zip(rollouts, found, strict=True):
            groups[rollout.step, rollout.task.group, rollout.worker].append((rollout, evidence))
        for group in groups.values():
            good = [(rollout, evidence) for rollout, evidence in group if evidence is not None]
            if good:
                self.evidence.add_replays(good)
            if len(good) == len(group):
                self.evidence.add_verified([rollout for rollout, _ in group])
        judged = zip(rollouts, found, strict=True)
        return [self.evidence.verdict(rollout.worker) if one.accepted else one for rollout, (one, _) in judged]

    def check_group_without_weights(
        self, rollouts: Sequence[rollout_lib.Rollout], split: str = "train", *, is_signed: bool = False
    ) -> tuple[checks.Verdict, dict[int, Mapping[str, float] | None]]:
        """Checks a group of one lease without running the model, and adds the claims of a training group to the evidence.

        `is_signed` leaves out fields and signatures, which the caller has checked: they cost as much as all other checks.
        Returns (verdict on the group, the reward components that we computed by sample, {} if it is rejected). They are None where
        our scorer timed out. That does not reject the group: it sets the sample's reward to 0, as when the worker's own scorer times out.
        """
        found = self.check_without_weights(rollouts, split=split, is_signed=is_signed)
        verdict = checks.first_rejection(one for one in found if one.reason != checks.Reason.UNSCORED)
        if not verdict.accepted:
            return verdict, {}
        if split == "train":
            verdict = checks.first_rejection(self.evidence.add_claims(rollouts))
        if not any(one.score or one.replay for one in self.rules.each):
            return verdict, {}
        # Each continuation has a reward of its own.
        samples = [rollout.number if self.rules.vine else rollout.sample for rollout in rollouts]
        return verdict, {sample: one.scores for sample, one in zip(samples, found, strict=True)}

    def check_groups_with_weights(self, groups: Sequence[Sequence[rollout_lib.Rollout]]) -> list[checks.Verdict]:
        """Replays together groups that passed `check_group_without_weights`. Returns a verdict on each group."""
        found = iter(self.check_with_weights([rollout for group in groups for rollout in group]))
        return [checks.first_rejection([next(found) for _ in group]) for group in groups]

    def replay(
        self, rollouts: Sequence[rollout_lib.Rollout], rules: rules_lib.Rules | None = None
    ) -> list[replay_lib.Replayed]:
        """Replays rollouts and returns the recomputed values and proof results of each, without verdicts. Raises WeightsUnavailable.

        Proofs are compared by `rules`, by default those of the run.
        """
        out: dict[int, replay_lib.Replayed] = {}
        for epoch in sorted({rollout.epoch for rollout in rollouts}):
            rows = [row for row, rollout in enumerate(rollouts) if rollout.epoch == epoch]
            load = functools.partial(self._load, epoch)
            found = replay_lib.replay(self.model, load, rules or self.rules, [rollouts[row] for row in rows])
            out |= zip(rows, found, strict=True)
        return [out[row] for row in range(len(rollouts))]

    def _load(self, epoch: int, version: int) -> transformer.Params:
        try:
            return self._weights(version, epoch)
        except (ValueError, OSError) as error:
            raise WeightsUnavailable(str(error)) from error

    def _check_batch(
        self, rollouts: Sequence[rollout_lib.Rollout], nodes: Sequence[str]
    ) -> list[tuple[checks.Verdict, sequential_test.Evidence | None]]:
        """Replays rollouts, for which `nodes` answer, together. Returns the verdict on each one alone, with its evidence if it is accepted."""
        try:
            replayed = self.replay(rollouts)
        except WeightsUnavailable as error:  # any other error is a bug, which must not be blamed on the weights
            if len(rollouts) == 1:
                return [
                    (checks.Verdict(checks.Reason.WEIGHTS, f"a version that it names is not available ({error})"), None)
                ]
            # One bad claim must not fail the others.
            return [self._check_batch([rollout], [node])[0] for rollout, node in zip(rollouts, nodes, strict=True)]
        judged = [self._judge(one, node) for one, node in zip(replayed, nodes, strict=True)]
        if self._bands and self._bands.add([one for verdict, one in judged if verdict.accepted]):
            assert self._bands.bands is not None
            self.rules = dataclasses.replace(self.rules, tolerance=self._bands.tolerance, bands=self._bands.bands)
            self.evidence.set_bands(self._bands.bands)
        return [(verdict, one.evidence if verdict.accepted else None) for verdict, one in judged]

    def _judge(self, one: replay_lib.Replayed, node: str) -> tuple[checks.Verdict, replay_lib.Replayed]:
        """Returns the verdict on one rollout of `node` alone. The run's own are judged by the loosest limits if they break others."""
        verdict = checks.first_failure(checks.WITH_WEIGHTS, one, self.rules)
        if verdict.accepted or not self._bands or node not in self._bands.own:
            return verdict, one
        loose = dataclasses.replace(self.rules, tolerance=self._bands.loosest, bands=None)
        (again,) = self.replay([one.rollout], loose)
        found = checks.first_failure(checks.WITH_WEIGHTS, again, loose)
        if found.accepted:
            self.evidence.notify(node, str(verdict))
        return found, again


def _whole_episodes(
    rollouts: Sequence[rollout_lib.Rollout], verdicts: list[checks.Verdict], groups: Mapping[tuple, list[int]]
) -> dict[tuple, list[int]]:
    """Returns groups of rollout numbers without the episodes of which a rollout is rejected; their other rollouts get its verdict."""

    def of(i: int) -> tuple:
        return rollouts[i].step, rollouts[i].task.group, rollouts[i].worker, rollouts[i].sample

    rejected = {
        of(i): one
        for i, one in reversed([*enumerate(verdicts)])
        if not one.accepted and one.reason != checks.Reason.SCHEMA
    }
    for i in (i for members in groups.values() for i in members if of(i) in rejected):
        verdicts[i] = rejected[of(i)]
    return {name: kept for name, members in groups.items() if (kept := [i for i in members if of(i) not in rejected])}


def published(root: str, *, keep: int = 4, key: str | None = None) -> Callable[..., transformer.Params]:
    """Returns a function (version, epoch) -> params that pulls policies from `root`, a directory or URL. An epoch of None accepts any.

    `key` must have signed the version (None: no signature needed, and epochs are not compared). The function caches `keep` versions,
    until a resumed run has published one again. Threads that call it take turns.
    """
    cached: dict[int, tuple[head.Entry | None, broadcast.Pulled]] = {}
    lock = threading.Lock()

    def weights(version: int, epoch: int | None = None) -> transformer.Params:
        is_cpu = mesh_lib.platform() == "cpu"
        with lock:
            entry = broadcast.entry_of(root, version, key=key)
            if entry is not None and epoch not in (None, entry.epoch):
                found = f"version {version} of epoch {epoch} is not published any more"
                raise ValueError(f"{found}: a resumed run has published it again in epoch {entry.epoch}")
            if version in cached and entry is not None and entry != cached[version][0]:
                del cached[version]
            if version not in cached:
                while len(cached) >= keep:  # before the pull: no more than `keep` versions are ever in memory
                    del cached[min(cached)]
                base = cached[max(cached)][1] if cached else None  # versions share tensors that do not change
                digest = "" if entry is None else entry.sha256
                pulled = broadcast.pull(root, version, base=base, key=key, digest=digest)
                params = jax.tree.map(jnp.asarray, pulled.params) if is_cpu else pulled.params
                cached[version] = entry, dataclasses.replace(pulled, params=params).locked()
            pulled = cached[version][1]
            params = lora.restored(pulled.params, lora.of_metadata(pulled.metadata))
            # The memory of an accelerator is the learner's: it has a version only during a replay.
            return params if is_cpu else jax.tree.map(jnp.asarray, params)

    return weights


def rules_of(
    config,
    tokenizer,
    on_error: Callable[[str], None] = cli.note,
    stack: contextlib.ExitStack | None = None,
    run: str = "",
    code: Sequence[str] | None = None,
) -> rules_lib.Rules:
    """Returns all rules of the run with the public key `run` from its resolved config. The run's environment makes the tasks, prompts, and rewards.

    `on_error` is called with a line of text if completions cannot be scored. Closing `stack` ends the processes that score. The
    environment of a stranger's run is loaded from the folders `code` alone; None: from anywhere.
    """
    rules = dataclasses.replace(
        rules_lib.Rules.of(config, run), stop_ids=tuple(tokenizer.stop_ids), held_out=_held_out(config)
    )
    if config.envs:
        own = {key: rules_of(env_mix.alone(config, key), tokenizer, on_error, stack, run, code) for key in rules.envs}
        own = {key: dataclasses.replace(one, env=key) for key, one in own.items()}
        return dataclasses.replace(rules, envs=own, max_turns=max(one.max_turns for one in own.values()))
    name, options = envs.locate(config.env.name, config.env.options.to_dict(), code)
    env = envs.load(name, seed=config.seed, **options)
    own = {"sandbox": config.trust.sandbox, "on_error": on_error, "digest": config.env.digest}
    if env.play is not None:
        check_kind(config, env)
        if env.kind == "recorded":
            return rules
        return dataclasses.replace(rules, replay=_replayer(config, env, tokenizer, name, options, own, stack))
    limits = {"limit_s": scorer.CHECK_LIMIT_S, "max_failures": scorer.MAX_CHECK_FAILURES, "max_children": MAX_SCORERS}
    scores = scorer.Scorer(name, options, config.seed, **limits, **own)
    if stack is not None:
        stack.callback(scores.close)
    task = environment.prompts(env, tokenizer)

    def score(group: lease.Lease, completions: Sequence[Sequence[int]]) -> list[rules_lib.Recomputed]:
        made, prompt = task(group.index, group.split)
        texts = [tokenizer.scored_text(prompt, completion) for completion in completions]
        return recomputed(scores.score(made, texts))

    return dataclasses.replace(rules, prompt=lambda group: task(group.index, group.split)[1], score=score, max_turns=1)


def _held_out(config) -> Callable[[int], rules_lib.GroupsByNumber]:
    """Returns a function from a policy version to the groups of its evaluation."""
    return functools.lru_cache(4)(lambda version: rules_lib.by_number(task_schedule.held_out_groups(config, version)))


def check_kind(config, env: environment.Environment) -> None:
    """Raises ValueError if strangers may work for a run whose environment depends on more than `trust.environments` allows."""
    admission = config.trust.admission or ("invited" if config.topology.workers else "open")
    has_strangers = config.topology.mode == "remote" and admission != "invited"
    kinds, allowed = environment.KINDS, config.trust.environments
    if has_strangers and kinds.index(env.kind) > kinds.index(allowed):
        found = f"environment {env.name} is of kind {env.kind!r}, but workers of strangers may run kinds up to trust.environments = {allowed!r}"
        remedy = f"set that to {env.kind!r}, or set trust.admission = 'invited'"
        raise ValueError(f"{found}; {remedy}")


def _replayer(config, env: environment.Environment, tokenizer, name: str, options: dict, own: dict, stack) -> Callable:
    """Returns `Rules.replay` of an environment with episodes of several calls."""
    limits = session.Limits(
        config.sampling.max_tokens, config.inference.max_model_len, config.env.max_calls, config.env.max_episode_tokens
    )
    host = foreign_host.of_environment(env, name, options, config.seed, tokenizer, limit_s=scorer.CHECK_LIMIT_S, **own)
    played = episodes.Episodes(host, tokenizer, limits, config.env.thinking, tokenizer.stop_ids)
    if stack is not None:
        stack.callback(played.close)
    return played.replay


def recomputed(scored: Sequence[scorer.Scored]) -> list[rules_lib.Recomputed]:
    """Converts a scorer's results for a group to the form that `checks.rewards` compares.

    `slow` is True if a worker may have claimed 0 honestly: its time limit is shorter, and after some timeouts it scores no more.
    """
    out, num_slow = [], 0
    for one in scored:
        is_slow = one.cpu_s >= scorer.LIMIT_S / scorer.SPREAD
        out.append(rules_lib.Recomputed(one.scores, is_slow or num_slow >= scorer.MAX_FAILURES, not one.in_time))
        num_slow += is_slow
    return out
