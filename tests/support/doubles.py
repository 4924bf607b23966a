"""Workers that cheat, one function per known way to cheat; bench/cheats.py and tests check their rollouts.

1. A model of 2 layers and 32 dims with random weights, or an MoE model in its place, generates the prescribed groups of a run through the
   real scheduler (`Double.generate`).
2. Each double changes its requests or its claims, and signs the result.
3. Doubles that can do so get the rest right: after changing tokens they recompute log-probabilities and proofs by a prefill of their own, as
   a cheat with the weights would (`prove_again`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from inference.proofs import toploc
from inference.rollouts import rollout as rollout_lib
from models import transformer
from rl.experiment import experiment as experiment_lib
from rl.protocol import lease, task_schedule
from rl.trust.validator import calibrate
from rl.trust.verification import evidence_log, measurement, verifier
from rl.trust.verification import rules as rules_lib
from tests.support import proofs as proofs_lib
from tests.support import tiny

NODE = rollout_lib.WorkerKey.generate()
DRIFT = 3e-3  # relative change of every weight from one version to the next; RL moves bfloat16 weights by about a step
MAX_TOKENS = 48
FLOAT32 = rules_lib.Tolerance(margin=1e-3, max_wrong_tokens=0, logprob=1e-3)
EXACT = measurement.FLOORS
MIXTURE = dict(num_experts=8, experts_per_token=2, expert_ffn_dim=16)


@functools.cache
def experiment(dtype: str = "float32", prompts: int = 16, mixture: bool = False) -> experiment_lib.Experiment:
    """Returns a run on the tests' model, or an MoE model in its place: 16 groups of 8 per step."""
    c = base.get_config()
    tiny.use(c, dtype=dtype, **(MIXTURE if mixture else {}))
    c.train.router_replay = mixture
    c.rl.prompts_per_step, c.rl.samples_per_prompt, c.rl.num_steps = prompts, 8, 10**6
    c.sampling.max_tokens, c.inference.max_model_len = MAX_TOKENS, 128
    c.inference.num_slots, c.inference.prefill_batch = 64, 16
    return experiment_lib.resolve(c)


def weights(version: int, mixture: bool = False) -> transformer.Params:
    """Random weights that drift a little from one version to the next, over and over again; -1 is another model."""
    return _weights(version if version < 0 else version % 3, mixture)


@functools.cache
def _weights(version: int, mixture: bool) -> transformer.Params:
    model = experiment(mixture=mixture).model
    params = tiny.params(model, 7 if version >= 0 else -version)
    for step in range(max(version, 0)):
        rng = np.random.default_rng(1000 + step)
        params = jax.tree.map(lambda w, rng=rng: w * (1 + DRIFT * rng.standard_normal(w.shape)), params)
    return jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)


def make_validator(tolerance=FLOAT32, bands=EXACT, prompts=16, dtype="float32", mixture=False) -> verifier.Verifier:
    exp = experiment(dtype, mixture=mixture)
    return verifier.Verifier(
        exp.model,
        lambda version, epoch: weights(version, mixture),
        dataclasses.replace(prescribed(prompts, mixture), tolerance=tolerance),
        evidence_log.EvidenceLog(bands),
    )


@functools.cache
def prescribed(prompts: int, mixture: bool = False) -> rules_lib.Rules:
    exp = experiment(prompts=prompts, mixture=mixture)
    return verifier.rules_of(exp.config, exp.tokenizer)


@dataclasses.dataclass
class Double:
    """A worker that may cheat at batch `step`, whose honest policy version is step - 1."""

    step: int
    dtype: str = "float32"
    prompts: int = 16
    mixture: bool = False

    @property
    def experiment(self) -> experiment_lib.Experiment:
        return experiment(self.dtype, self.prompts, self.mixture)

    @property
    def groups(self) -> list[lease.Lease]:
        return task_schedule.train_groups(self.experiment.config, self.step)

    @property
    def version(self) -> int:
        return self.step - 1

    def generate(self, params=None, model=None, **options) -> list[rollout_lib.Rollout]:
        if params is None and model is None and not options:
            return list(_honest(*dataclasses.astuple(self)))
        params = weights(self.version, self.mixture) if params is None else params
        groups = options.pop("groups", self.groups)
        exp = dataclasses.replace(self.experiment, model=model or self.experiment.model)
        return calibrate.roll_out(exp, params, self.version, groups, NODE, **options)


@functools.lru_cache(maxsize=8)
def _honest(step: int, dtype: str, prompts: int, mixture: bool) -> tuple[rollout_lib.Rollout, ...]:
    """Returns the honest rollouts of a batch, which most cheats change, so that they are generated once."""
    double = Double(step, dtype, prompts, mixture)
    return tuple(double.generate(weights(double.version, mixture)))


def prove_again(double: Double, rollouts: Sequence[rollout_lib.Rollout]) -> list[rollout_lib.Rollout]:
    """Log-probabilities and proofs of the texts as they now stand, from an honest prefill, and new signatures."""
    out = []
    for start in range(0, len(rollouts), 64):
        batch = rollouts[start : start + 64]
        found = _prefiller(double.dtype).replay(batch)
        for one in found:
            logprobs = np.zeros(len(one.rollout.tokens), np.float32)
            logprobs[one.positions_N] = np.minimum(one.logp_N, 0)
            out.append(signed(one.rollout, logprobs=logprobs, proofs=b"".join(proofs_lib.build(one.hidden_ND))))
    return out


def rewritten(double: Double, rollout: rollout_lib.Rollout, tokens: np.ndarray, **changes) -> rollout_lib.Rollout:
    """Returns the rollout with other tokens after the same prompt, all of one version, and their true reward."""
    mask = np.arange(len(tokens)) >= rollout.prompt_length
    group = next(group for group in double.groups if group.group == rollout.task.group)
    rewards = prescribed(double.prompts).score(group, [tokens[mask].tolist()])[0].scores
    return dataclasses.replace(
        rollout,
        tokens=tokens,
        sampled_mask=mask,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), rollout.versions[0], np.int32),
        reward=rewards["reward"],
        rewards=rewards,
        **changes,
    )


@functools.cache
def _prefiller(dtype: str) -> verifier.Verifier:
    exp = experiment(dtype)
    return verifier.Verifier(exp.model, lambda version, epoch: weights(version), rules_lib.Rules.of(exp.config))


def signed(rollout: rollout_lib.Rollout, **changes) -> rollout_lib.Rollout:
    """Returns the rollout with other fields, signed anew."""
    return rollout_lib.sign(dataclasses.replace(rollout, **changes), NODE)


# ---- the doubles: each returns the rollouts of one batch --------------------------------------------------------------


def honest(double: Double) -> list[rollout_lib.Rollout]:
    return double.generate()


def older_weights(double: Double) -> list[rollout_lib.Rollout]:
    """Weights one version older than claimed."""
    return double.generate(weights(double.version - 1))


def int8_weights(double: Double) -> list[rollout_lib.Rollout]:
    """Every matrix rounded to 255 levels per row."""

    def quantise(w):
        if w.ndim == 1:
            return w
        scale = jnp.abs(w).max(axis=-1, keepdims=True) / 127
        return jnp.round(w / scale) * scale

    return double.generate(jax.tree.map(quantise, weights(double.version)))


def half_the_layers(double: Double) -> list[rollout_lib.Rollout]:
    exp = double.experiment
    params = dict(weights(double.version))
    half = exp.model.num_layers // 2
    params["layers"] = {name: params["layers"][name] for name in sorted(params["layers"])[:half]}
    return double.generate(params, model=dataclasses.replace(exp.model, num_layers=half))


def another_model(double: Double) -> list[rollout_lib.Rollout]:
    return double.generate(weights(-1))


def another_prompt(double: Double) -> list[rollout_lib.Rollout]:
    """Generated from a prompt with one letter changed, submitted under the prescribed one."""

    def change(request):
        tokens = list(request.tokens)
        tokens[len(tokens) // 2] = (tokens[len(tokens) // 2] + 1) % 256
        return dataclasses.replace(request, tokens=tuple(tokens))

    return double.generate(change=change)


def edited(count: int, prove: bool, double: Double) -> list[rollout_lib.Rollout]:
    rng, out = np.random.default_rng(double.step), []
    for rollout in double.generate():
        tokens = rollout.tokens.copy()
        # The last may be a stop token.
        for at in rng.permutation(np.flatnonzero(rollout.sampled_mask)[:-1])[:count]:
            tokens[at] = (tokens[at] + rng.integers(1, 256)) % 256
        changed = rewritten(double, rollout, tokens)
        out.append(dataclasses.replace(changed, logprobs=rollout.logprobs, versions=rollout.versions))
    return prove_again(double, out) if prove else [rollout_lib.sign(rollout, NODE) for rollout in out]


def proved(change: Callable) -> Callable:
    """Sampled by changed requests; log-probabilities and proofs made to fit the claim."""
    return lambda double: prove_again(double, double.generate(change=change))


def temperature(value: float) -> Callable:
    """Sampled at another temperature than prescribed."""
    return proved(lambda r: dataclasses.replace(r, temperature=value))


def relabeled(change: Callable) -> Callable:
    """Honest rollouts with the fields that `change` returns, signed anew."""
    return lambda double: [signed(r, **change(r)) for r in double.generate()]


def other_seed(r):
    return dataclasses.replace(r, seed=(r.seed + 10**6) % 2**32)


def drawn_twice(double: Double):
    """Pairs of the prescribed rollout and one of another seed under the prescribed number."""
    return zip(double.generate(), double.generate(change=other_seed), strict=True)


def best_of_2(double: Double) -> list[rollout_lib.Rollout]:
    """Drawn twice, with the prescribed seed and another; the better one is handed in under the prescribed seed."""
    return [max(pair, key=lambda r: r.reward) for pair in drawn_twice(double)]


def early_stop(double: Double) -> list[rollout_lib.Rollout]:
    """Eight tokens and a stop token, proved again."""
    stop, out = experiment().tokenizer.stop_ids[0], []
    for rollout in double.generate(change=lambda r: dataclasses.replace(r, max_tokens=8)):
        tokens = rollout.tokens if rollout.finish_reason == "stop" else np.append(rollout.tokens, np.int32(stop))
        out.append(rewritten(double, rollout, tokens.astype(np.int32), finish_reason="stop"))
    return prove_again(double, out)


def padded_length(double: Double) -> list[rollout_lib.Rollout]:
    """Cheap filler after 16 real tokens, up to the full length, to be paid for all of it."""
    out = []
    for rollout in double.generate(change=lambda r: dataclasses.replace(r, max_tokens=16)):
        text = rollout.tokens if rollout.finish_reason == "length" else rollout.tokens[:-1]
        missing = rollout.prompt_length + MAX_TOKENS - len(text)
        tokens = np.concatenate([text, np.full(missing, ord(" "), np.int32)])
        out.append(rewritten(double, rollout, tokens, finish_reason="length"))
    return prove_again(double, out)


def wrong_task(double: Double) -> list[rollout_lib.Rollout]:
    """The tasks of the next batch, which it likes better, under the names of this one's groups."""
    other = task_schedule.train_groups(double.experiment.config, double.step + 1)
    groups = [dataclasses.replace(g, index=o.index) for g, o in zip(double.groups, other, strict=True)]
    rollouts = double.generate(groups=groups)
    index = {g.group: g.index for g in double.groups}
    return [signed(r, task=dataclasses.replace(r.task, index=index[r.task.group])) for r in rollouts]


def reused_rollout(double: Double) -> list[rollout_lib.Rollout]:
    """The rollouts of the next batch handed in as this one's, relabelled and signed anew."""
    old = Double(double.step + 1, double.dtype, double.prompts).generate()
    places = [(group, sample) for group in double.groups for sample in range(group.num_samples)]
    out = []
    for rollout, (group, sample) in zip(old, places, strict=True):
        task = dataclasses.replace(rollout.task, index=group.index, group=group.group)
        seed = (group.seed + sample) % 2**32
        versions = np.minimum(rollout.versions, double.version)
        out.append(signed(rollout, task=task, sample=sample, seed=seed, step=double.step, versions=versions))
    return out


def copied_proof(double: Double) -> list[rollout_lib.Rollout]:
    """The proofs of its neighbour, cut or repeated to the right length."""
    rollouts = double.generate()
    out = []
    for i, rollout in enumerate(rollouts):
        size = len(rollout.proofs)
        other = max((rollouts[i - j].proofs for j in (1, 2, 3, 4)), key=len)
        out.append(signed(rollout, proofs=(other * (1 + size // max(len(other), 1)))[:size]))
    return out


def constant_proof(double: Double) -> list[rollout_lib.Rollout]:
    """The forgery that needs no forward pass and passes the published rule: one typical magnitude as a polynomial."""
    wire = np.zeros(129, ">u2")
    wire[0], wire[1] = toploc.PRIME, 0x4010  # 2.25
    out = []
    for rollout in double.generate():
        sizes = [len(p) for p in toploc.split(rollout.proofs, int(rollout.sampled_mask.sum()), tiny.model().model_dim)]
        out.append(signed(rollout, proofs=b"".join(wire.tobytes()[:size] for size in sizes)))
    return out


def swapped_group(double: Double) -> list[rollout_lib.Rollout]:
    """Each group's samples handed in under the next sample's number."""
    out, groups = [], {group.group: group for group in double.groups}
    for rollout in double.generate():
        group = groups[rollout.task.group]
        sample = (rollout.sample + 1) % group.num_samples
        out.append(signed(rollout, sample=sample, seed=(group.seed + sample) % 2**32))
    return out


def unsigned_change(double: Double) -> list[rollout_lib.Rollout]:
    """Changed on the way: the signature is another text's."""
    return [dataclasses.replace(r, tokens=np.where(r.tokens == ord("e"), ord("f"), r.tokens)) for r in honest(double)]


def honest_mixture(double: Double) -> list[rollout_lib.Rollout]:
    """Honest rollouts of an MoE model, which name their experts."""
    return honest(double)


def other_expert(double: Double) -> list[rollout_lib.Rollout]:
    """Names one expert, of one token in one layer, that did not run. Text, log-probabilities and proofs are honest."""
    rng, out = np.random.default_rng(double.step), []
    for rollout in honest_mixture(double):
        experts = rollout.routed_experts.copy()
        at = tuple(rng.integers(experts.shape))
        experts[at] = rng.choice([e for e in range(MIXTURE["num_experts"]) if e not in experts[at[:2]]])
        out.append(signed(rollout, routed_experts=experts))
    return out


inflated_reward = relabeled(lambda r: {"reward": 1.0, "rewards": dict(r.rewards) | {"reward": 1.0}})
future_version = relabeled(lambda r: {"versions": r.versions + r.step})
# Experts that did not run for every token: the learner would run these.
other_experts = relabeled(lambda r: {"routed_experts": (r.routed_experts + 1) % MIXTURE["num_experts"]})
MIXTURES = (honest_mixture, other_expert, other_experts)
NAMED = (older_weights, int8_weights, half_the_layers, another_model, another_prompt, best_of_2, early_stop)
NAMED += (padded_length, wrong_task, reused_rollout, copied_proof, constant_proof, swapped_group, unsigned_change)
CHEATS: dict[str, Callable[[Double], list[rollout_lib.Rollout]]] = {
    **{f"edited_{count}": functools.partial(edited, count, False) for count in (1, 4, 16)},
    "proved_edit_1": functools.partial(edited, 1, True),
    "temperature_0.9": temperature(0.9),
    "temperature_1.1": temperature(1.1),
    "greedy": temperature(0.0),
    **{cheat.__name__: cheat for cheat in (*NAMED, other_expert)},
    "inflated_reward": inflated_reward,
    "future_version": future_version,
    "other_experts": other_experts,
}
