"""Calibration: measures how much honest backends differ, and writes limits and bands for a validator.

    python -m rl.validator calibrate --workdir=runs/quickstart --out=bands.json --rollouts=512

1. Published weights generate the run's own groups, once per variant (VARIANTS). The validator's backend replays the rollouts.
2. rl/trust/verification/measurement.py derives limits and bands from them. A run with workers of its own does the same by itself, from its first
   groups (`trust.bands = "auto"`); this command is for backends that the run does not have, and for more rollouts.
3. If the limits would accept the proofs of other texts, no file is written.

If none of n honest rollouts is falsely rejected, the rate of false rejections is at most 3 / n, at 95 %.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
from ml_collections import config_dict

from inference.engine import engine as engine_lib
from inference.engine import weights as weights_lib
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from models import lora, transformer
from rl import envs
from rl.envs.host import group as group_lib
from rl.envs.scoring import scorer
from rl.experiment import experiment as experiment_lib
from rl.experiment import workdir as run_directory
from rl.learning.algorithms import advantages
from rl.protocol import env_mix, lease, task_schedule, user_code
from rl.trust.verification import measurement, run_bands, verifier
from rl.trust.verification import rules as rules_lib
from sharding.mesh import mesh as mesh_lib
from sharding.system import cli
from sharding.weights import broadcast, bucket

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


def roll_out(
    exp: experiment_lib.Experiment,
    params: transformer.Params,
    version: int,
    groups: Sequence[lease.Lease],
    key: rollout_lib.WorkerKey,
    *,
    mesh: jax.sharding.Mesh | None = None,
    change: Callable = lambda request: request,
) -> list[rollout_lib.Rollout]:
    """Generates, scores, and signs rollouts as an honest worker does, in this process. Returns them group by group.

    `params` are on `mesh`, or on the first device. The rollouts claim to be of policy `version`. `change` alters each request to the
    engine but not the rollouts' claims, so that tests can cheat.
    """
    config = exp.config
    options = config.env.options.to_dict()
    env = envs.load(config.env.name, seed=config.seed, **options)
    sampling = {name: config.sampling[name] for name in ("max_tokens", "top_k", "top_p", "min_p")}
    engine = engine_lib.Engine(exp.model, exp.engine, exp.tokenizer, mesh)
    scores = None  # of the first calls of episodes, which have none
    if env.play is None:
        own = {"limit_s": scorer.LIMIT_S, "sandbox": config.trust.sandbox}
        scores = scorer.Scorer(config.env.name, options, config.seed, **own)
    scheduler = scheduler_lib.Scheduler(engine, params, version, max_queue=10**6)
    with contextlib.closing(scores) if scores else contextlib.nullcontext(), contextlib.closing(scheduler):
        run = group_lib.Run(env, scores, config.seed, exp.tokenizer, [], {})
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
            made = group_lib.make_rollouts(run, group, task, prompt, future.result(WAIT_S))
            out += [rollout_lib.sign(rollout, key) for rollout in made]
        return out


def run(args: argparse.Namespace) -> int:
    """Measures all variants and writes the bands file; returns the exit code. Raises ValueError for wrong options or missing weights."""
    if not pathlib.Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out} is in a directory that does not exist; create the directory first")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        raise ValueError(f"--variants {unknown[0]!r} is not a variant; choose among {', '.join(VARIANTS)}")
    measured: dict[str, measurement.Measured] = {}
    policies = [_measure_run(args, workdir, measured) for workdir in args.workdir]
    if not measured:
        found = f"--variants {' '.join(args.variants)}: all need more than {jax.device_count()} devices"
        raise ValueError(f"{found}; add one that needs fewer")
    tolerance, bands = measurement.limits(list(measured.values()))
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "options": {name: value for name, value in vars(args).items() if value is not None},
        "backend": jax.devices()[0].device_kind,
        "policies": policies,
        "proofs_of_other_texts": measurement.check_other_texts(tolerance.proofs, list(measured.values())),
        "variants": {name: m.numbers() for name, m in measured.items()},
    }
    run_bands.save(args.out, tolerance, bands, about)
    print(f"wrote {args.out}")
    return 0


def _measure_run(args: argparse.Namespace, workdir: str, measured: dict[str, measurement.Measured]) -> dict:
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
    validator = verifier.Verifier(replayed, lambda version, epoch: get(version), rules_lib.Rules.of(exp.config))
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
        found = m.numbers()
        print(
            f"{name}: {found['rollouts']} rollouts, {found['tokens']} tokens; worst margin {found['margin_1']:.3g}, logprob "
            f"{found['error_1']:.3g}, exponents {found['proof_1']:.0f} (0 of {found['rollouts']} falsely rejected would bound the rate by "
            f"{3 / found['rollouts']:.2g})",
            flush=True,
        )
    dtypes = {"sampler_dtype": exp.model.dtype, "replay_dtype": replayed.dtype}
    return {"workdir": workdir, "version": version, **dtypes, "model": dataclasses.asdict(exp.model)}


def measure(
    validator: verifier.Verifier, rollouts: Sequence[rollout_lib.Rollout], *, is_unnamed: bool = False
) -> measurement.Measured:
    """Replays honest rollouts of one variant; returns the differences. `is_unnamed` ignores the experts that they name."""
    if is_unnamed:
        rollouts = [dataclasses.replace(rollout, routed_experts=None) for rollout in rollouts]
    found = measurement.Measured(is_unnamed)
    for start in range(0, len(rollouts), rules_lib.MAX_REPLAY_ROWS):
        for one in validator.replay(rollouts[start : start + rules_lib.MAX_REPLAY_ROWS]):
            found.add(one)
    return found


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
    mesh = None
    if axes := variant.get("mesh"):
        num_devices = math.prod(axes.values())
        if jax.device_count() < num_devices:
            return None
        mesh = mesh_lib.create(axes, devices=jax.devices()[:num_devices])
        adapters = exp.lora if lora.detach(params)[1] else None
        params = weights_lib.Store(exp.model, mesh, lora=adapters).load(lora.published(params))
    groups: list[lease.Lease] = []
    while sum(group.num_samples for group in groups) < count:
        groups += task_schedule.train_groups(exp.config, step)
        step += 1
    model = dataclasses.replace(exp.model, **variant.get("model", {}))
    engine = dataclasses.replace(exp.engine, **variant.get("engine", {}))
    changed = dataclasses.replace(exp, model=model, engine=engine)
    by_env: dict[str, list[lease.Lease]] = {}
    for group in groups:
        by_env.setdefault(group.env, []).append(group)
    out = []
    for env, own in by_env.items():
        config = config_dict.FrozenConfigDict(env_mix.alone(exp.config, env)) if env else exp.config
        out += roll_out(dataclasses.replace(changed, config=config), params, version, own, key, mesh=mesh)
    return out[:count]


def load_experiment(workdir: str | os.PathLike, code: Sequence[str] = ()) -> experiment_lib.Experiment:
    """Returns the experiment of a run from the config in its working directory. The run's own loss, advantage, and metric functions are left out.

    Raises ValueError if config.json is missing, or if the environment's code or data differ from those of the run. They come from the
    folders `code` alone, since the working directory may be a stranger's.
    """
    file = pathlib.Path(workdir) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the --workdir of a run (rl.train writes its config there)")
    saved = json.loads(file.read_text())["config"]
    if saved["rl"]["loss_function"] or user_code.is_name(saved["rl"]["loss"]):
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
    add("--code", **cli.FOLDERS, help=envs.CODE_HELP)
    add("--version", type=int, help="version of the published weights (default: the newest of each run)")
    add("--rollouts", type=int, default=512, help="number of rollouts per variant")
    add("--sampler_dtype", choices=DTYPES, help="dtype of the samplers (default: that of the run)")
    add("--replay_dtype", choices=DTYPES, help="dtype of the validator (default: that of the run)")
    add("--variants", nargs="+", default=names, help=f"ways to generate (default: all of {', '.join(names)})")
