"""Calibration: measures how much honest backends differ, and writes limits and bands for a validator.

    python -m rl.validator calibrate --workdir=runs/quickstart --out=bands.json --rollouts=512

1. Published weights generate the run's own groups, once per variant (VARIANTS). The validator's backend replays the rollouts.
2. Limits on one rollout are SAFETY or TOKEN_SAFETY times the largest difference. Bands on the mean are BAND_SAFETY times an upper confidence bound
   (mean + 4 standard errors), since a mean is known far better than an extreme.
3. MoE samplers name their experts, which run in the replay, too: limits per token are without flips of routers. In a run whose rollouts
   name none, a second replay counts the tokens that flips put over these limits (`Tolerance.flips`).
4. Proofs are compared with the hidden states of other texts, too. If the limits would accept one, no file is written.

The maximum over n honest rollouts is exceeded by another one with probability about 1 / n; a factor makes that far rarer. If none
of n is falsely rejected, the rate of false rejections is at most 3 / n, at 95 %.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import config_dict

from inference.engine import engine as engine_lib
from inference.engine import routed_experts
from inference.proofs import toploc
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.swarm import sample as sample_lib
from models import transformer
from rl import envs, worker
from rl.algorithms import advantages
from rl.envs.scoring import scorer
from rl.experiment import experiment as experiment_lib
from rl.experiment import workdir as run_directory
from rl.protocol import env_mix, task_schedule
from rl.verification import checks, sequential_test, verifier
from rl.verification import rules as rules_lib
from sharding import broadcast, bucket, rules
from sharding import mesh as mesh_lib

SAFETY = 2.0  # of limits on proofs
TOKEN_SAFETY = 3.0  # on tokens: of 127,000 honest ones in bfloat16, one erred by twice the maximum of 8,000
BAND_SAFETY = 1.25
# Smaller bands are rounding of the measurement: a single flipped tie would exceed them.
FLOORS = sequential_test.Bands(margin=1e-6, logprob=1e-6, proof=1e-4, shape=1e-6)
# Smallest limits on one rollout, by name in `Measured`. Float32 errors are 6e-6 at most in models of two and three layers.
LEAST = dict(margin=1e-4, logprob=1e-4, routing=1e-3, exp_mismatches=8, mantissa_mean=2, mantissa_median=2)
LEAST_TIES = 1e-3  # share of ties that may go to the second best, although none was seen
OTHER_TEXTS = 256  # proofs at most that are compared with another text's hidden states, per variant
OF_TOKENS = ("margin", "logprob", "routing")
DTYPES = ("float32", "bfloat16")
WAIT_S = 3600.0
# Honest ways to generate rollouts, which a validator must accept: changed fields of engine and model config, and a mesh.
VARIANTS: dict[str, dict[str, dict]] = {
    "same": {},
    "small_batch": {"engine": {"num_slots": 3, "prefill_batch": 1}},
    "single_steps": {"engine": {"steps_per_call": 1}},
    "long_calls": {"engine": {"steps_per_call": 32, "num_slots": 17}},
    "float32": {"model": {"dtype": "float32"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "tensor_parallel": {"mesh": {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}},
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """The replay differences of honest rollouts of one variant: the largest per check, and means for the sequential tests."""

    margin: float
    logprob: float
    routing: float
    exp_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    sign_mismatches: int
    mean: dict[str, float]  # per stream, over rollouts
    bound: dict[str, float]  # mean + 4 standard errors
    num_rollouts: int
    num_tokens: int
    num_refused: int  # rejected with the validator's tolerance
    is_unnamed: bool = False  # of an MoE model, and the experts are those of the replay
    groups: Sequence[Sequence[sequential_test.Evidence]] = ()
    chunks: Sequence[tuple[np.ndarray, bytes]] = ()  # (hidden states, proof) of texts with different prompts

    @property
    def evidence(self) -> list[sequential_test.Evidence]:
        """All rollouts, in one list."""
        return [one for group in self.groups for one in group]

    def numbers(self) -> dict:
        """Returns the summary for the bands file, without the evidence and proofs that it sums up."""
        made_of = ("groups", "chunks", "is_unnamed")
        return {name: value for name, value in vars(self).items() if name not in made_of}


def roll_out(
    exp: experiment_lib.Experiment,
    params: transformer.Params,
    version: int,
    groups: Sequence[task_schedule.Group],
    key: rollout_lib.WorkerKey,
    *,
    change: Callable = lambda request: request,
) -> list[rollout_lib.Rollout]:
    """Generates, scores, and signs rollouts as an honest worker does, in this process. Returns them group by group.

    The rollouts claim to be of policy `version`. `change` alters each request to the engine but not the rollouts' claims, so that
    tests can cheat.
    """
    config = exp.config
    options = config.env.options.to_dict()
    env = envs.load(config.env.name, seed=config.seed, **options)
    sampling = {name: config.sampling[name] for name in ("max_tokens", "top_k", "top_p", "min_p")}
    engine = engine_lib.Engine(exp.model, exp.engine, exp.tokenizer)
    scores = None  # of the first calls of episodes, which have none
    if env.play is None:
        scores = scorer.Scorer(
            config.env.name, options, config.seed, limit_s=scorer.LIMIT_S, sandbox=config.trust.sandbox
        )
    scheduler = scheduler_lib.Scheduler(engine, params, version, max_queue=10**6)
    with contextlib.closing(scores) if scores else contextlib.nullcontext(), contextlib.closing(scheduler):
        run = worker.Run(env, scores, config.seed, exp.tokenizer, [], {})
        waiting = []
        for group in groups:
            task = env.make_task(group.index, group.split)
            prompt = list(exp.tokenizer.render(task.messages, add_generation_prompt=True).token_ids)
            request = scheduler_lib.GenerateRequest(
                tokens=tuple(prompt),
                num_samples=group.num_samples,
                temperature=group.temperature,
                seed=group.seed,
                stop_ids=tuple(exp.tokenizer.stop_ids),
                proofs=True,
                routed_experts=exp.engine.routed_experts,
                kept_tokens=exp.engine.kept_tokens > 0,
                **sampling,
            )
            waiting.append((group, task, prompt, scheduler.submit(change(request))))
        out = []
        for group, task, prompt, future in waiting:
            completions = future.result(WAIT_S)
            is_named = exp.engine.routed_experts
            experts = [routed_experts.with_all_layers(c.experts, exp.model) if is_named else None for c in completions]
            samples = [
                sample_lib.Sample(
                    c.tokens, c.logprobs, c.versions, c.prompt_version, c.finish_reason, c.proofs, e, kept=c.kept
                )
                for c, e in zip(completions, experts, strict=True)
            ]
            made = worker.make_rollouts(run, dataclasses.asdict(group), task, prompt, samples)
            out += [rollout_lib.sign(rollout, key) for rollout in made]
        return out


def measure(
    validator: verifier.Validator, rollouts: Sequence[rollout_lib.Rollout], *, is_unnamed: bool = False
) -> Measured:
    """Replays honest rollouts of one variant and returns how much the replay differs from their claims."""
    if is_unnamed:
        rollouts = [dataclasses.replace(rollout, routed_experts=None) for rollout in rollouts]
    largest: dict[str, Any] = {}
    groups, refused, chunks = collections.defaultdict(list), 0, {}
    for start in range(0, len(rollouts), rules_lib.MAX_REPLAY_ROWS):
        for one in validator.replay(rollouts[start : start + rules_lib.MAX_REPLAY_ROWS]):
            groups[one.rollout.step, one.rollout.task.group].append(checks.evidence(one))
            refused += not checks.first_failure(checks.WITH_WEIGHTS, one, validator.rules).accepted
            num_rows, dim = one.hidden_ND.shape
            if proofs := toploc.split(one.rollout.proofs, num_rows, dim):
                prompt = one.rollout.tokens[: one.rollout.prompt_length].tobytes()
                chunks.setdefault((min(num_rows, 32), prompt), (one.hidden_ND[:32], proofs[0]))
            # Limits are per 128 values; a short tail of a small model has fewer.
            sizes = [min(128, min(32, num_rows - start) * dim) for start in range(0, num_rows, 32)]
            mismatches = [proof.exp_mismatches for proof in one.proofs]
            found: dict[str, Any] = {
                "margin": one.margin_N,
                "logprob": np.abs(one.error_N),
                "routing": 0.0 if one.gap_T is None else one.gap_T,
                "exp_mismatches": [math.ceil(n * 128 / k) for n, k in zip(mismatches, sizes, strict=True)],
            }
            for name in ("mantissa_mean", "mantissa_median", "sign_mismatches"):
                found[name] = [getattr(proof, name) for proof in one.proofs]
            for name, values in found.items():
                value = np.max(values).item()
                largest[name] = max(largest.get(name, value), value)
    means = {
        name: _mean([sum(getattr(one, name) for one in group) for group in groups.values()], map(len, groups.values()))
        for name in ("margin", "logprob", "proof")
    }
    return Measured(
        **largest,
        mean={name: mean for name, (mean, _) in means.items()},
        bound={name: mean + 4 * error for name, (mean, error) in means.items()},
        num_rollouts=len(rollouts),
        num_tokens=sum(one.num_tokens for group in groups.values() for one in group),
        num_refused=refused,
        is_unnamed=is_unnamed,
        groups=list(groups.values()),
        chunks=[chunks[key] for key in sorted(chunks)][:OTHER_TEXTS],
    )


def limits(measured: Sequence[Measured]) -> tuple[rules_lib.Tolerance, sequential_test.Bands]:
    """Returns (limits on one rollout, bands on a worker's means) that honest rollouts of all measured variants keep."""
    limit: dict[str, Any] = {}
    for name, least in LEAST.items():
        of = [m for m in measured if not (m.is_unnamed and name in OF_TOKENS)] or measured
        factor = TOKEN_SAFETY if name in OF_TOKENS else SAFETY
        limit[name] = max(least, factor * max(getattr(m, name) for m in of))
    names = ("exp_mismatches", "mantissa_mean", "mantissa_median")
    # Two tokens change places if their errors differ by more than their gap, and errors are seen at every token.
    limit["margin"] = max(limit["margin"], limit["logprob"])
    proofs = {name: min(getattr(toploc.LOOSEST, name), limit.pop(name)) for name in names}
    proofs["exp_mismatches"] = math.ceil(proofs["exp_mismatches"])
    flips = max((_flips(m, limit) for m in measured if m.is_unnamed), default=0.0)
    tolerance = rules_lib.Tolerance(**limit, max_wrong_tokens=0, proofs=toploc.Thresholds(**proofs), flips=flips)
    bands = {
        name: max(getattr(FLOORS, name), BAND_SAFETY * max(m.bound[name] for m in measured))
        for name in ("margin", "logprob", "proof")
    }
    # Honest tilts scatter far more than rounding biases them, so their mean cannot be measured. Rounding that moves log p
    # by r at random biases the mean of (q/p), q ~ p^b, by about (b r)^2 / 2 per token; log-probabilities show r.
    noise = max(_rms(np.concatenate([one.error_N for one in m.evidence])) for m in measured)
    shape = max(FLOORS.shape, SAFETY * (max(sequential_test.TILTS) * noise) ** 2)
    first = sequential_test.Bands(**bands, shape=shape)
    first = dataclasses.replace(first, tie_span=tolerance.margin)
    sums = [_sums(first, m.groups) for m in measured]
    return tolerance, dataclasses.replace(
        first,
        **{name: max(found[name] for found in sums) for name in sums[0]},
        ties=_ties(first, measured),
    )


def _flips(measured: Measured, limit: dict[str, float]) -> float:
    """Returns `Tolerance.flips`: an upper bound on the share of tokens over the limits per token."""
    every = measured.evidence
    over = sum(
        ((abs(e.error_N) > limit["logprob"]) | (e.is_second_N & (e.gap_N > limit["margin"]))).sum() for e in every
    )
    return BAND_SAFETY * float(over + 4 * math.sqrt(over + 1)) / measured.num_tokens


def _mean(total_G: Iterable[float], num_G: Iterable[float]) -> tuple[float, float]:
    """Returns (mean per item, its standard error) of groups with these totals of so many items, which may depend on each other."""
    total_G, num_G = np.array([*total_G]), np.array([*num_G])
    mean = total_G.sum() / num_G.sum()
    return float(mean), float(np.sqrt(((total_G - mean * num_G) ** 2).sum()) / num_G.sum())


def _sums(bands: sequential_test.Bands, groups: Sequence[Sequence[sequential_test.Evidence]]) -> dict[str, float]:
    """Returns the fields of `Bands` for sums over honest rollouts.

    Scales hold for rollouts and for groups: all samples of a prompt that is easier or harder than others err less or more. They
    hold along advantages, too.
    """
    mean, error = _mean(
        (sum(bands.signs(one.error_N).sum() for one in group) for group in groups),
        (sum(one.num_tokens for one in group) for group in groups),
    )
    excess, signed = [], []
    for parts in ([[one] for group in groups for one in group], groups):
        over_P, lean_P, favored_P = np.array([_scaled(bands, mean, part) for part in parts]).T
        excess.append(over_P)
        signed += [lean_P, favored_P]
    return {
        "scatter": max(FLOORS.logprob, _scale(*excess)),
        "bias": BAND_SAFETY * (abs(mean) + 4 * error),
        "spread": max(1e-3, _scale(*signed, *(-x_P for x_P in signed))),
    }


def _scaled(
    bands: sequential_test.Bands, mean: float, group: Sequence[sequential_test.Evidence]
) -> tuple[float, float, float]:
    """Returns a group's (errors beyond the honest mean, signs beyond their `mean`, signs along advantages), over their deviations."""
    counts = np.array([one.num_tokens for one in group])
    context_N = sequential_test.contexts([one.token_N for one in group])
    over = np.array([one.logprob for one in group]) @ counts - bands.logprob / BAND_SAFETY * counts.sum()
    signs = np.array([bands.signs(one.error_N).sum() for one in group]) - mean * counts
    weights = sequential_test.advantages([one.reward for one in group], counts)
    root = sequential_test.deviation(context_N)
    scale = sequential_test.deviation(context_N, np.repeat(weights, counts)) or 1.0  # 0 if no sample has an advantage
    return over / root, float(signs.sum()) / root, float(weights @ signs) / scale


def _scale(*samples: np.ndarray) -> float:
    """Returns a scale s with mean exp(a x / s) <= exp(a^2 / 2), a in `sequential_test.SLOPES`, for the numbers x of each sample."""
    scale = BAND_SAFETY * max(map(_rms, samples)) or 1e-12
    slope_K1 = np.array(sequential_test.SLOPES)[:, None]
    for x in samples:  # heavy tails, as of rollouts of one token, take a larger scale than their deviation
        while (
            np.exp(slope_K1 * np.minimum(x / scale, sequential_test.MAX_SCALED) - slope_K1**2 / 2).mean(axis=1).max()
            > 1
        ):
            scale *= 1.05
    return scale


def _ties(bands: sequential_test.Bands, variants: Sequence[Measured]) -> tuple[float, ...]:
    """Returns `Bands.ties` for honest rollouts: the larger of the share seen in all and of that which the errors of a variant explain.

    Two logits that are `gap` apart change places if their errors differ by more. There are more errors than ties.
    """
    explained = []
    for variant in variants:
        error_N = np.concatenate([one.error_N for one in variant.evidence])
        apart_N = np.abs(error_N - np.random.default_rng(0).permutation(error_N))
        edges = bands.tie_span / 2 ** (np.arange(sequential_test.TIE_WIDTHS + 1) / 2)
        edges[-1] = 0  # the last class has all that is narrower
        # Gaps are uniform within a class. Of equal errors, every second one is to the other side.
        share_N = [np.clip((apart_N - least) / (most - least), 0, 1) for most, least in itertools.pairwise(edges)]
        explained.append([float(share.mean()) / 2 for share in share_N])
    every = [one for variant in variants for one in variant.evidence]
    class_N = bands.classes(np.concatenate([one.gap_N for one in every]))
    is_second_N = np.concatenate([one.is_second_N for one in every])
    shares = []
    for k, least in enumerate(np.max(explained, axis=0).tolist()):
        seen = is_second_N[class_N == k]
        share = float(seen.sum() + 2 * math.sqrt(seen.sum())) / max(len(seen), 50)
        shares.append(min(1.0, max(LEAST_TIES, BAND_SAFETY * max(share, least))))
    return tuple(shares)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def check_other_texts(thresholds: toploc.Thresholds, measured: Sequence[Measured]) -> int:
    """Returns the number of proofs that were compared with another text's hidden states. Raises ValueError if one is accepted."""
    pairs = [
        (hidden_TD, [proof])
        for m in measured
        for (hidden_TD, _), (other_TD, proof) in zip(m.chunks, m.chunks[1:], strict=False)
        if len(hidden_TD) == len(other_TD)
    ]
    results = toploc.verify_proofs_batch(*zip(*pairs, strict=True), thresholds=thresholds) if pairs else []
    if accepted := sum(one.accepted for (one,) in results):
        found = f"{thresholds} accept {accepted} of {len(pairs)} proofs of other texts"
        raise ValueError(f"{found}; replay in the dtype and on the device of the samplers, whose proofs differ less")
    return len(pairs)


def run(args: argparse.Namespace) -> int:
    """Measures all variants and writes the bands file; returns the exit code. Raises ValueError for wrong options or missing weights."""
    if not pathlib.Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out} is in a directory that does not exist; create the directory first")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        raise ValueError(f"--variants {unknown[0]!r} is not a variant; choose among {', '.join(VARIANTS)}")
    measured: dict[str, Measured] = {}
    policies = [_measure_run(args, workdir, measured) for workdir in args.workdir]
    if not measured:
        found = f"--variants {' '.join(args.variants)}: all need more than {jax.device_count()} devices"
        raise ValueError(f"{found}; add one that needs fewer")
    tolerance, bands = limits(list(measured.values()))
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "options": {name: value for name, value in vars(args).items() if value is not None},
        "backend": jax.devices()[0].device_kind,
        "policies": policies,
        "proofs_of_other_texts": check_other_texts(tolerance.proofs, list(measured.values())),
        "variants": {name: m.numbers() for name, m in measured.items()},
    }
    verifier.save_bands(args.out, tolerance, bands, about)
    print(f"wrote {args.out}")
    return 0


def _measure_run(args: argparse.Namespace, workdir: str, measured: dict[str, Measured]) -> dict:
    """Adds the measurements of one run to `measured`. Returns its policy for people to read: version, dtypes, and model."""
    folder = bucket.fetched(workdir, ("*.json", "*.key", "weights/*"))
    exp, weights = load_experiment(folder, args.code), folder / "weights"
    config = config_dict.ConfigDict(exp.config)
    for one in envs.located(config, args.code).values():
        section = config.envs[one.key] if one.key else config.env
        section.name, section.options = one.name, one.options
    exp = dataclasses.replace(exp, config=config_dict.FrozenConfigDict(config))
    if args.rollouts < (least := 2 * env_mix.max_samples(exp.config)):
        raise ValueError(f"--rollouts {args.rollouts} is less than two groups of {workdir}; give {least} or more")
    version = broadcast.latest(str(weights)) if args.version is None else args.version
    if version is None:
        raise ValueError(f"{weights} contains no published weights; run python -m rl.train first")
    trusted = run_directory.trusted_key(folder)
    get = verifier.published(str(weights), key=trusted)
    replayed = dataclasses.replace(exp.model, dtype=args.replay_dtype or exp.model.dtype)
    validator = verifier.Validator(replayed, lambda version, epoch: get(version), rules_lib.Rules.of(exp.config))
    sampled = dataclasses.replace(exp.model, dtype=args.sampler_dtype or exp.model.dtype)
    engine = dataclasses.replace(exp.engine, routed_experts=exp.model.num_experts > 0)
    exp = dataclasses.replace(exp, model=sampled, engine=engine)
    key = rollout_lib.WorkerKey.generate()
    for i, name in enumerate(args.variants):
        step = 1 + i * args.rollouts  # other tasks for each variant, since rare errors depend on the text
        rollouts = variant_rollouts(exp, get(version), version, VARIANTS[name], args.rollouts, key, step=step)
        if rollouts is None:
            num_devices = math.prod(VARIANTS[name]["mesh"].values())
            print(f"{name}: left out, it needs {num_devices} devices and {jax.device_count()} are available")
            continue
        m = measured[f"{workdir}: {name}"] = measure(validator, rollouts)
        if exp.model.num_experts and not exp.config.train.router_replay:
            measured[f"{workdir}: {name}, experts not named"] = measure(validator, rollouts, is_unnamed=True)
        print(
            f"{name}: {m.num_rollouts} rollouts, {m.num_tokens} tokens; worst margin {m.margin:.3g}, logprob "
            f"{m.logprob:.3g}, exponents {m.exp_mismatches}, mantissa {m.mantissa_mean:.3g}; "
            f"{m.num_refused} rejected with the limits of the config (0 of {m.num_rollouts} would bound the rate by "
            f"{3 / m.num_rollouts:.2g})",
            flush=True,
        )
    dtypes = {"sampler_dtype": exp.model.dtype, "replay_dtype": replayed.dtype}
    return {"workdir": workdir, "version": version, **dtypes, "model": dataclasses.asdict(exp.model)}


def variant_rollouts(
    exp: experiment_lib.Experiment,
    params: transformer.Params,
    version: int,
    variant: dict[str, dict],
    count: int,
    key: rollout_lib.WorkerKey,
    *,
    step: int = 1,
) -> list[rollout_lib.Rollout] | None:
    """Generates `count` honest rollouts of the tasks from `step` on with `variant`, a value of VARIANTS. Returns None if the machine has too few devices for its mesh."""
    if axes := variant.get("mesh"):
        num_devices = math.prod(axes.values())
        if jax.device_count() < num_devices:
            return None
        mesh = mesh_lib.create(axes, devices=jax.devices()[:num_devices])
        params = jax.device_put(params, rules.shardings(transformer.specs(exp.model), mesh))
    groups: list[task_schedule.Group] = []
    while sum(group.num_samples for group in groups) < count:
        groups += task_schedule.train_groups(exp.config, step)
        step += 1
    model = dataclasses.replace(exp.model, **variant.get("model", {}))
    engine = dataclasses.replace(exp.engine, **variant.get("engine", {}))
    changed = dataclasses.replace(exp, model=model, engine=engine)
    by_env: dict[str, list[task_schedule.Group]] = {}
    for group in groups:
        by_env.setdefault(group.env, []).append(group)
    out = []
    for env, own in by_env.items():
        config = config_dict.FrozenConfigDict(env_mix.alone(exp.config, env)) if env else exp.config
        out += roll_out(dataclasses.replace(changed, config=config), params, version, own, key)
    return out[:count]


def load_experiment(workdir: str | os.PathLike, code: Sequence[str] = ()) -> experiment_lib.Experiment:
    """Returns the experiment of a run, from the config in its working directory, but for its own functions that only a learner needs.

    Raises ValueError if config.json is missing, or if the environment's code or data, which come from the folders `code` alone, differ
    from those of the run: its working directory may be a stranger's.
    """
    file = pathlib.Path(workdir) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the --workdir of a run (rl.train writes its config there)")
    saved = experiment_lib.with_new_fields(json.loads(file.read_text())["config"])
    if saved["rl"]["loss_function"]:
        saved["rl"] |= {"loss": "cross_entropy", "loss_function": None}
        saved["loss_options"] = {"cross_entropy": {}}
    for section in (saved["rl"], *saved["envs"].values()):
        if section.get("advantage", "given") not in advantages.ADVANTAGES:
            section["advantage"] = "given"
    saved["rl"]["metrics"] = []
    found = experiment_lib.resolve(config_dict.ConfigDict(saved), code)
    if expected := saved["env"]["digest"]:
        names = ", ".join(one.label for one in env_mix.entries(found.config).values())
        envs.check_digest(names, found.config.env.digest, expected)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command `calibrate` to its parser."""
    add, names = parser.add_argument, list(VARIANTS)
    add("--workdir", nargs="+", required=True, help="working directories of runs whose policies and tasks are used")
    add("--out", required=True, help="JSON file to write")
    add("--code", nargs="+", action="extend", default=[], metavar="FOLDER", help=envs.CODE_HELP)
    add("--version", type=int, help="version of the published weights (default: the newest of each run)")
    add("--rollouts", type=int, default=512, help="number of rollouts per variant")
    add("--sampler_dtype", choices=DTYPES, help="dtype of the samplers (default: that of the run)")
    add("--replay_dtype", choices=DTYPES, help="dtype of the validator (default: that of the run)")
    add("--variants", nargs="+", default=names, help=f"ways to generate (default: all of {', '.join(names)})")
