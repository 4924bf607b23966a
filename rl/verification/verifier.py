"""Verdicts on rollouts: was this text sampled by the weights, the seed and the temperature that it claims?

    python -m rl.validator serve --workdir=runs/quickstart --rollouts=DIR --port=8300 [--ledger=DB --key=FILE]
    python -m rl.validator calibrate --workdir=runs/quickstart --out=bands.json

For rollouts of one or more groups, cheap before dear (each check is a function of rl/verification/checks.py):
1. Form, signature, prescribed task and seed, version, bounds, ending; then prompt and reward, made again.
2. One replay on the published weights of every version they name (rl/verification/replay.py).
3. Sampling: each claimed token must be the argmax of the noised logits, up to a margin. Log-probabilities must agree.
4. The end was not absurdly unlikely, the tokens fit the claimed temperature, the TOPLOC proofs fit the hidden states.
5. What passed goes to its node's record, where small deviations add up (rl/verification/sequential_test.py).

An orchestrator calls `Validator.screen` for 1 and, of groups that it draws, `check` for 2 to 5: the first reason to refuse a
group, or None. The group falls with its worst member, since advantages compare its members. `judge` is all of it, with a
verdict per rollout. Malformed content is a verdict, never an exception.

Letters: G rollouts, N sampled tokens of one.
"""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from inference.proofs import toploc
from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import transformer
from rl import envs
from rl.batch import router_replay
from rl.envs import environment, scorer
from rl.protocol import task_schedule
from rl.verification import checks as verdicts
from rl.verification import replay as replay_lib
from rl.verification import sequential_test
from sharding import broadcast

Tolerance = verdicts.Tolerance
MAX_SCORERS = 4  # processes that score at once, should some be slow
MAX_REPLAY_ROWS = 64  # rollouts replayed together, whatever their length
MAX_REPLAY_TOKENS = 2**16  # of rollouts replayed together: their hidden states go to the host, 0.7 GB at 5120 dims


class Validator:
    """Replays groups against published weights.

    Args:
      model: config of the policy.
      weights: version -> params, raising ValueError or OSError for a version that cannot be had.
      filters: top_k, top_p, min_p that the run prescribes (a worker's word is not taken for them).
      tolerance: limits on one rollout.
      rules: what else the run prescribes; without them only the replay is judged.
      bands: of honest means; without them only claims are summed up over a node's rollouts.
    """

    def __init__(
        self,
        model: config_lib.ModelConfig,
        weights: Callable[[int], transformer.Params],
        filters: dict[str, float],
        tolerance: Tolerance,
        *,
        max_model_len: int,
        rules: verdicts.Rules | None = None,
        bands: sequential_test.Bands | None = None,
    ):
        self._model, self._weights, self._filters, self._tolerance = model, weights, filters, tolerance
        self._length, self._rules, self._bands = max_model_len, rules, bands
        self._claims = router_replay.RouterReplay.of(model)
        self._lock = threading.Lock()
        self._counted = sequential_test.Counted()  # by `screen` and `check`
        self.records: dict[str, sequential_test.Record] = {}

    def check(self, rollouts: Sequence[rollout_lib.Rollout]) -> str | None:
        """The reason to refuse this group that only a replay finds, or None; what `screen` asks is not asked again."""
        found = self._judge_records(rollouts, lambda rollout: (), None)
        if all(verdict.accepted for verdict in found):
            found = self.judge_replayed(rollouts, once=True)
        return _first_reason(found)

    def screen(
        self, rollouts: Sequence[rollout_lib.Rollout], split: str = "train"
    ) -> tuple[str | None, frozenset[int]]:
        """The reason to refuse this group that can be known without weights, or None; whose lease it is was asked before.

        And the samples on which our scorer gave up. They refuse nothing: a claim that we cannot make again is worth 0, as
        it is where the worker gave up (rl/envs/scorer.py).
        """
        found = self.judge_cheaply(rollouts) if split == "train" else self._judge_held_out(rollouts)
        given_up = frozenset(
            r.sample for r, verdict in zip(rollouts, found, strict=True) if verdict.reason == "unscored"
        )
        if reason := _first_reason([verdict for verdict in found if verdict.reason != "unscored"]):
            return reason, frozenset()
        if split == "train":
            return _first_reason(self.add_claims(rollouts, once=True)), given_up
        return None, given_up

    def judge(self, rollouts: Sequence[rollout_lib.Rollout], *, newest: int | None = None) -> list[verdicts.Verdict]:
        """A verdict per rollout. `newest`: the last version published; None does not ask.

        Whether groups are whole is not asked here (`verdicts.complete`).
        """
        out = self.judge_cheaply(rollouts, newest)
        passed = [i for i, verdict in enumerate(out) if verdict.accepted]
        for i, verdict in zip(passed, self.judge_replayed([rollouts[i] for i in passed]), strict=True):
            out[i] = verdict
        return out

    def judge_cheaply(
        self, rollouts: Sequence[rollout_lib.Rollout], newest: int | None = None
    ) -> list[verdicts.Verdict]:
        """Everything that needs no weights: rewards last, and group by group."""
        rules = self._rules

        def checks(rollout):
            yield verdicts.signature(rollout)
            yield verdicts.prescribed(rollout, rules)
            yield verdicts.routed(rollout, self._claims, rules)
            yield verdicts.policy_version(rollout, rules, rollout.step - 1 if newest is None else newest)
            yield verdicts.bounds(rollout, rules)
            yield verdicts.ending(rollout, rules)
            yield verdicts.prompt(rollout, rules)

        return self._judge_records(rollouts, checks, rules)

    def add_claims(self, rollouts: Sequence[rollout_lib.Rollout], *, once: bool = False) -> list[verdicts.Verdict]:
        """Adds what these claim to the records of their nodes, replayed or not; who is accused is refused.

        With `once`, not those that were added so before.
        """
        out = []
        for rollout, y_N in zip(rollouts, verdicts.claimed_races(rollouts), strict=True):
            ratio_K = sequential_test.claims_ratio(y_N) * (rollout.temperature > 0)
            with self._lock:
                record = self._record(rollout.worker)
                if not once or self._counted.is_news("claims", rollout):
                    record.add_claims(ratio_K)
                out.append(_accused(record))
        return out

    def _record(self, node: str) -> sequential_test.Record:
        return self.records.setdefault(node, sequential_test.Record(self._bands))

    def _judge_held_out(self, rollouts: Sequence[rollout_lib.Rollout]) -> list[verdicts.Verdict]:
        rules = self._rules and dataclasses.replace(self._rules, groups=self._rules.held_out, first_step=0)
        checks = (verdicts.bounds, verdicts.ending, verdicts.prompt)
        return self._judge_records(rollouts, lambda rollout: (check(rollout, rules) for check in checks), rules)

    def _judge_records(
        self, rollouts: Sequence[rollout_lib.Rollout], checks: Callable, rules: verdicts.Rules | None
    ) -> list[verdicts.Verdict]:
        """Form, `checks`, and of rollouts that passed them the claims, and the rewards group by group."""
        out, groups = [], collections.defaultdict(list)
        for rollout in rollouts:
            verdict = verdicts.form(rollout)
            if verdict.accepted and len(rollout.tokens) > self._length:
                verdict = verdicts.Verdict("length", f"{len(rollout.tokens)} tokens exceed the model's {self._length}")
            if verdict.accepted:
                verdict = verdicts.routable(rollout, self._claims)
            if verdict.accepted and rules is not None:
                verdict = next((found for found in checks(rollout) if not found.accepted), verdicts.OK)
            out.append(verdict)
        passed = [i for i, verdict in enumerate(out) if verdict.accepted and rules is not None]
        for i, y_N in zip(passed, verdicts.claimed_races([rollouts[i] for i in passed]), strict=True):
            out[i] = verdicts.claims(rollouts[i], y_N)
            if out[i].accepted:
                groups[rollouts[i].step, rollouts[i].task.group, rollouts[i].worker].append(i)
        for members in groups.values():
            for i, verdict in zip(members, verdicts.rewards([rollouts[i] for i in members], rules), strict=True):
                out[i] = verdict
        return out

    def record_states(self, nodes: Iterable[str]) -> dict[str, dict]:
        """Of those that have a record: what `restore_records` takes."""
        with self._lock:
            return {node: self.records[node].state() for node in nodes if node in self.records}

    def restore_records(self, states: dict[str, dict]) -> None:
        """Puts these in the place of all records."""
        with self._lock:
            self.records = {node: sequential_test.Record.restored(self._bands, s) for node, s in states.items()}

    def state(self, after: int) -> dict:
        """Plain JSON of the evidence so far, for `restore`, where rollouts of steps after this one may come again."""
        with self._lock:
            records = {node: record.state() for node, record in self.records.items()}
            return {"records": records, "counted": self._counted.state(after)}

    def restore(self, state: dict) -> None:
        self.restore_records(state["records"])
        with self._lock:
            self._counted = sequential_test.Counted.restored(state["counted"])

    def forget_records(self, nodes: Iterable[str]) -> None:
        with self._lock:
            for node in nodes:
                self.records.pop(node, None)

    def replay(self, rollouts: Sequence[rollout_lib.Rollout]) -> replay_lib.Replay:
        """Runs the tokens again; see rl/verification/replay.py for the arrays, which have at least one row per rollout."""
        return replay_lib.replay(self._model, self._weights, self._filters, rollouts, self._length)

    def judge_replayed(self, rollouts: Sequence[rollout_lib.Rollout], *, once: bool = False) -> list[verdicts.Verdict]:
        """What the replay says of rollouts that passed `judge_cheaply`; `once` as in `add_claims`."""
        out: list[verdicts.Verdict] = []
        while len(out) < len(rollouts):
            rest = rollouts[len(out) :]
            longest = np.maximum.accumulate([len(rollout.tokens) for rollout in rest])
            padded = longest * np.arange(1, len(rest) + 1)
            num = max(1, int(np.searchsorted(padded, MAX_REPLAY_TOKENS, side="right")))
            out += self._judge_batch(rest[:num], once)
        return out

    def _judge_batch(self, rollouts: Sequence[rollout_lib.Rollout], once: bool) -> list[verdicts.Verdict]:
        try:
            replay = self.replay(rollouts)
        except (ValueError, OSError) as error:
            if len(rollouts) == 1:
                return [verdicts.Verdict("weights", f"a version that it names cannot be had ({error})")]
            return [
                self._judge_batch([rollout], once)[0] for rollout in rollouts
            ]  # one bad claim is not its neighbours'
        scored = [verdicts.scores(rollout, replay, i) for i, rollout in enumerate(rollouts)]
        results = verdicts.proof_results(rollouts, scored, self._tolerance.proofs)
        return [self._judge_one(*one, once) for one in zip(rollouts, scored, results, strict=True)]

    def _judge_one(
        self, rollout: rollout_lib.Rollout, scored: verdicts.Scores, results: list[toploc.ProofResult], once: bool
    ) -> verdicts.Verdict:
        verdict = verdicts.replayed(rollout, scored, results, self._tolerance, self._rules)
        if not verdict.accepted or self._bands is None:
            return verdict
        with self._lock:
            record = self._record(rollout.worker)
            if not once or self._counted.is_news("replay", rollout):
                record.add(verdicts.evidence(rollout, scored, results))
            return _accused(record)


def _accused(record: sequential_test.Record) -> verdicts.Verdict:
    return verdicts.Verdict("statistics", record.accused) if record.accused else verdicts.OK


def _first_reason(found: Sequence[verdicts.Verdict]) -> str | None:
    return next((str(verdict) for verdict in found if not verdict.accepted), None)


def published(root: pathlib.Path, *, keep: int = 4) -> Callable[[int], transformer.Params]:
    """Weights by version from a broadcast, verified on the way; the last `keep` stay in memory."""
    held: dict[int, transformer.Params] = {}

    def weights(version: int) -> transformer.Params:
        if version not in held:
            params = jax.tree.map(jnp.asarray, broadcast.pull(str(root), version).params)
            while len(held) >= keep:  # before it is added: a rollout may name a version older than all of these
                del held[min(held)]
            held[version] = params
        return held[version]

    return weights


def rules_of(config, tokenizer, on_error: Callable[[str], None] = scorer.tell) -> verdicts.Rules:
    """The rules of a run, from its resolved config: tasks, prompts and rewards are made by its environment.

    `on_error` hears of completions that it cannot score.
    """
    env = envs.load(config.env.name, seed=config.seed, **config.env.options.to_dict())

    @functools.lru_cache(1024)  # a batch of 256 rollouts asks for the same 32 groups 256 times
    def task(group: task_schedule.Group) -> environment.Task:
        return env.make_task(group.index, group.split)

    @functools.lru_cache(1024)
    def prompt(group: task_schedule.Group) -> list[int]:
        return list(tokenizer.render(task(group).messages, add_generation_prompt=True).token_ids)

    scores = scorer.Scorer(
        config.env.name,
        config.env.options.to_dict(),
        config.seed,
        limit_s=scorer.CHECK_LIMIT_S,
        max_children=MAX_SCORERS,
        on_error=on_error,
    )

    def score(group: task_schedule.Group, completions: Sequence[Sequence[int]]) -> list[scorer.Scored]:
        return scores.score(
            task(group), [tokenizer.scored_text(prompt(group), completion) for completion in completions]
        )

    return verdicts.Rules(
        env=env.name,
        env_seed=config.seed,
        vocab_size=config.model.vocab_size,
        max_model_len=config.inference.max_model_len,
        max_tokens=config.sampling.max_tokens,
        stop_ids=tuple(tokenizer.stop_ids),
        groups=functools.lru_cache(16)(lambda step: task_schedule.train_groups(config, step)),
        num_steps=config.rl.num_steps,
        max_lag=config.rl.max_lag,
        router_replay=config.train.router_replay,
        prompt=prompt,
        reward_bounds=(-math.inf, math.inf),  # they are made again, whatever the environment's scale
        held_out=functools.lru_cache(4)(lambda version: task_schedule.held_out_groups(config, version)),
        score=score,
    )


def load_bands(path: str | pathlib.Path) -> tuple[Tolerance, sequential_test.Bands]:
    """What `calibrate` wrote. ValueError where it is something else."""
    try:
        body = json.loads(pathlib.Path(path).read_text())
        tolerance = dict(body["tolerance"])
        proofs = toploc.Thresholds(**tolerance.pop("proofs"))
        bands = sequential_test.Bands(**body["bands"])
        values = [*tolerance.values(), *vars(proofs).values(), *vars(bands).values()]
        if (
            not all(isinstance(value, int | float) and 0 <= value < 1e9 for value in values)
            or min(vars(bands).values()) <= 0
        ):
            raise ValueError("a limit is not a number above 0")
        return Tolerance(**tolerance, proofs=proofs), bands
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not what python -m rl.validator calibrate writes: {error}") from error


def save_bands(path: str | pathlib.Path, tolerance: Tolerance, bands: sequential_test.Bands, measured: dict) -> None:
    body = {"tolerance": dataclasses.asdict(tolerance), "bands": dataclasses.asdict(bands), "measured": measured}
    pathlib.Path(path).write_text(json.dumps(body, indent=1) + "\n")
