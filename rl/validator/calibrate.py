"""How far apart honest backends are: measured here, and written down as limits and bands for a validator.

    python -m rl.validator calibrate --workdir=runs/quickstart --out=bands.json --rollouts=512

1. The newest checkpoint's published weights (or --version) generate the run's own prescribed groups, once per variant:
   other batch sizes, prefill batches and decode chunkings, bfloat16 against float32, and weights spread over devices.
2. The validator's backend replays them. Honest differences are read off: margins, log-probabilities, proofs, tilts.
3. Limits on one rollout are SAFETY times the worst that was seen; bands on the mean are BAND_SAFETY times an upper
   confidence bound of it (mean + 4 standard errors): a mean is known far better than an extreme. A variant that is not used in the run need not widen them: --variants.
4. Everything measured goes into the file beside the limits, so that a reader can judge them.

An honest maximum over n rollouts says that a fresh rollout exceeds it with probability about 1 / n; with SAFETY = 2 far
more seldom. The number of rollouts and the bound that no false rejection in n implies (3 / n at 95 %) are printed.
"""

import argparse
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import config_dict

from inference.engine import engine as engine_lib
from inference.engine import routed_experts
from inference.proofs import toploc
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from models import config as config_lib
from models import transformer
from rl import envs, worker
from rl.envs import scorer
from rl.experiment import experiment as experiment_lib
from rl.protocol import task_schedule
from rl.verification import checks, sequential_test, verifier
from rl.verification import rules as rules_lib
from sharding import broadcast, rules
from sharding import mesh as mesh_lib

SAFETY = 2.0
BAND_SAFETY = 1.25
# Below these a band is rounding of the measurement itself, and a bet on it would be one on a single flipped tie.
FLOORS = sequential_test.Bands(margin=1e-6, logprob=1e-6, proof=1e-4, shape=1e-6)
MIN_TOLERANCE = rules_lib.Tolerance(margin=1e-3, max_wrong_tokens=0, logprob=1e-3, routing=1e-3)
MIN_PROOFS = toploc.Thresholds(exp_mismatches=8, mantissa_mean=2, mantissa_median=2)
CEILING = toploc.DEPLOYED
WAIT_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to generate that must not matter: changes to the engine's sizes and the model's dtype, and a mesh."""

    engine: dict
    model: dict
    mesh: dict


VARIANTS = {
    "same": Variant({}, {}, {}),
    "small_batch": Variant({"num_slots": 3, "prefill_batch": 1}, {}, {}),
    "single_steps": Variant({"steps_per_call": 1}, {}, {}),
    "long_calls": Variant({"steps_per_call": 32, "num_slots": 17}, {}, {}),
    "float32": Variant({}, {"dtype": "float32"}, {}),
    "bfloat16": Variant({}, {"dtype": "bfloat16"}, {}),
    "tensor_parallel": Variant({}, {}, {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What honest rollouts of one variant showed: the worst of any, and per rollout what a record is fed with."""

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
    num_refused: int  # by the limits in force


def roll_out(
    exp: experiment_lib.Experiment,
    params: transformer.Params,
    version: int,
    groups: Sequence[task_schedule.Group],
    key: rollout_lib.WorkerKey,
    *,
    model: config_lib.ModelConfig | None = None,
    engine: engine_lib.EngineConfig | None = None,
    change: Callable = lambda request: request,
) -> list[list[rollout_lib.Rollout]]:
    """The prescribed groups, generated in this process by the real scheduler, scored and signed as a worker does.

    `change` may alter the request behind the record's back: that is how a test plays a cheat.
    """
    config = exp.config
    options = config.env.options.to_dict()
    env = envs.load(config.env.name, seed=config.seed, **options)
    scores = scorer.Scorer(config.env.name, options, config.seed, limit_s=scorer.LIMIT_S)
    run = worker.Run(env, scores, config.seed, exp.tokenizer, [], {})
    sizes = engine or exp.engine
    scheduler = scheduler_lib.Scheduler(
        engine_lib.Engine(model or exp.model, sizes, exp.tokenizer), params, version, max_queue=10**6
    )
    try:
        waiting = []
        for group in groups:
            task = env.make_task(group.index, group.split)
            prompt = list(exp.tokenizer.render(task.messages, add_generation_prompt=True).token_ids)
            request = scheduler_lib.GenerateRequest(
                tokens=tuple(prompt),
                num_samples=group.num_samples,
                max_tokens=config.sampling.max_tokens,
                temperature=group.temperature,
                top_k=config.sampling.top_k,
                top_p=config.sampling.top_p,
                min_p=config.sampling.min_p,
                seed=group.seed,
                stop_ids=tuple(exp.tokenizer.stop_ids),
                proofs=True,
                routed_experts=sizes.routed_experts,
            )
            waiting.append((group, task, prompt, scheduler.submit(change(request))))
        out = []
        for group, task, prompt, future in waiting:
            samples = future.result(WAIT_S)
            if sizes.routed_experts:
                samples = [
                    dataclasses.replace(c, experts=routed_experts.with_all_layers(c.experts, exp.model))
                    for c in samples
                ]
            made = worker.make_rollouts(run, dataclasses.asdict(group), task, prompt, samples)
            out.append([rollout_lib.sign(rollout, key) for rollout in made])
        return out
    finally:
        scheduler.close()
        scores.close()


def measure(validator: verifier.Validator, rollouts: Sequence[rollout_lib.Rollout]) -> Measured:
    """Replays honest rollouts and reads off how far they are from themselves."""
    evidence, margins, errors, gaps, proofs, mismatches, refused = [], [], [], [0.0], [], [], 0
    for start in range(0, len(rollouts), verifier.MAX_REPLAY_ROWS):
        batch = rollouts[start : start + verifier.MAX_REPLAY_ROWS]
        for one in validator.replay(batch):
            evidence.append(checks.evidence(one))
            margins.append(one.margin_N.max())
            errors.append(one.error_N.max())
            gaps += [] if one.gap_T is None else [one.gap_T.max()]
            proofs += one.proofs
            # Limits are per 128 values; a short tail of a small model has fewer.
            num_rows, dim = one.hidden_ND.shape
            sizes = [min(128, min(32, num_rows - start) * dim) for start in range(0, num_rows, 32)]
            mismatches += [math.ceil(r.exp_mismatches * 128 / k) for r, k in zip(one.proofs, sizes, strict=True)]
            refused += not checks.first_failure(checks.WITH_WEIGHTS, one, validator.rules).accepted
    means = {name: np.array([getattr(e, name) for e in evidence]) for name in ("margin", "logprob", "proof")}
    tokens = np.array([e.num_tokens for e in evidence])
    return Measured(
        margin=float(max(margins)),
        logprob=float(max(errors)),
        routing=float(max(gaps)),
        exp_mismatches=max(mismatches),
        mantissa_mean=max(r.mantissa_mean for r in proofs),
        mantissa_median=max(r.mantissa_median for r in proofs),
        sign_mismatches=max(r.sign_mismatches for r in proofs),
        mean={name: float(values.mean()) for name, values in means.items()},
        bound={name: float(v.mean() + 4 * v.std() / np.sqrt(len(v))) for name, v in means.items()},
        num_rollouts=len(rollouts),
        num_tokens=int(tokens.sum()),
        num_refused=refused,
    )


def limits(measured: Sequence[Measured]) -> tuple[rules_lib.Tolerance, sequential_test.Bands]:
    """Limits and bands that hold for all that was measured."""
    worst = {name: SAFETY * max(getattr(m, name) for m in measured) for name in ("margin", "logprob", "routing")}
    proofs = {
        name: min(
            getattr(CEILING, name), max(getattr(MIN_PROOFS, name), SAFETY * max(getattr(m, name) for m in measured))
        )
        for name in ("exp_mismatches", "mantissa_mean", "mantissa_median")
    }
    tolerance = rules_lib.Tolerance(
        margin=max(MIN_TOLERANCE.margin, worst["margin"]),
        max_wrong_tokens=0,
        logprob=max(MIN_TOLERANCE.logprob, worst["logprob"]),
        proofs=toploc.Thresholds(**proofs | {"exp_mismatches": math.ceil(proofs["exp_mismatches"])}),
        routing=max(MIN_TOLERANCE.routing, worst["routing"]),
    )
    bands = {
        name: max(getattr(FLOORS, name), BAND_SAFETY * max(m.bound[name] for m in measured))
        for name in ("margin", "logprob", "proof")
    }
    # Honest tilts scatter far more than rounding biases them, so their mean cannot be measured. Rounding that moves log p
    # by r at random biases the mean of (q/p), q ~ p^b, by about (b r)^2 / 2 a token; r is what log-probabilities show.
    noise = max(m.bound["logprob"] for m in measured)
    shape = max(FLOORS.shape, SAFETY * (max(sequential_test.TILTS) * noise) ** 2)
    return tolerance, sequential_test.Bands(**bands, shape=shape)


def run(args: argparse.Namespace) -> int:
    if args.rollouts < 1:
        raise ValueError(f"--rollouts = {args.rollouts} must be at least 1")
    if not pathlib.Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out} lies in no directory; make it first")
    exp = load_experiment(args.workdir)
    weights = pathlib.Path(args.workdir) / "weights"
    version = broadcast.latest(str(weights)) if args.version is None else args.version
    if version is None:
        raise ValueError(f"{weights} holds no weights; run rl.train first or give --version of a published one")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variant {unknown[0]!r} is unknown; choose among {', '.join(VARIANTS)}")
    get = verifier.published(weights)
    config = exp.config
    validator = verifier.Validator(exp.model, get, rules_lib.Rules.of(config))
    key, measured = rollout_lib.WorkerKey.generate(), {}
    for name in args.variants:
        rollouts = variant_rollouts(exp, get(version), version, VARIANTS[name], args.rollouts, key)
        if rollouts is None:
            print(
                f"{name}: needs {np.prod(list(VARIANTS[name].mesh.values()))} devices, has {jax.device_count()}; left out"
            )
            continue
        m = measured[name] = measure(validator, rollouts)
        print(
            f"{name}: {m.num_rollouts} rollouts, {m.num_tokens} tokens; worst margin {m.margin:.3g}, logprob "
            f"{m.logprob:.3g}, exponents {m.exp_mismatches}, mantissa {m.mantissa_mean:.3g}; "
            f"{m.num_refused} refused at the limits of the config (0 of {m.num_rollouts} would bound the rate by "
            f"{3 / m.num_rollouts:.2g})",
            flush=True,
        )
    if not measured:
        raise ValueError("none of --variants could be measured here; name one that needs fewer devices")
    tolerance, bands = limits(list(measured.values()))
    verifier.save_bands(
        args.out,
        tolerance,
        bands,
        {
            "version": version,
            "backend": jax.devices()[0].device_kind,
            "variants": {name: dataclasses.asdict(m) for name, m in measured.items()},
        },
    )
    print(f"wrote {args.out}")
    return 0


def variant_rollouts(exp, params, version, variant: Variant, count: int, key) -> list[rollout_lib.Rollout] | None:
    """At least `count` honest rollouts of whole groups; None where the machine lacks the devices."""
    if variant.mesh:
        if jax.device_count() < np.prod(list(variant.mesh.values())):
            return None
        mesh = mesh_lib.create(variant.mesh, devices=jax.devices()[: int(np.prod(list(variant.mesh.values())))])
        params = jax.device_put(params, rules.shardings(transformer.specs(exp.model), mesh))
    groups: list[task_schedule.Group] = []
    step = 1
    while sum(group.num_samples for group in groups) < count:
        groups += task_schedule.train_groups(exp.config, step)
        step += 1
    made = roll_out(
        exp,
        params,
        version,
        groups,
        key,
        model=dataclasses.replace(exp.model, **variant.model),
        engine=dataclasses.replace(exp.engine, **variant.engine),
    )
    return [rollout for group in made for rollout in group][:count]


def load_experiment(workdir: str) -> experiment_lib.Experiment:
    """The resolved experiment of a run, from the config it saved."""
    file = pathlib.Path(workdir) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} is not there; give the --workdir of a run (rl.train writes its config there)")
    return experiment_lib.resolve(config_dict.ConfigDict(json.loads(file.read_text())["config"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, help="of the run whose policy and tasks are used")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--version", type=int, help="of the published weights (default: the newest)")
    parser.add_argument("--rollouts", type=int, default=512, help="per variant")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help=", ".join(VARIANTS))
