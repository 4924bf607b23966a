"""Plans a run without its hardware: `python -m rl.plan --config=configs/X.py --topology=v5p:4x4x4`."""

import resource
import time

import jax
from absl import flags
from ml_collections import config_dict

from models import flops
from rl.experiment import command, initial
from rl.experiment import flags as command_line
from rl.experiment.plan import lowered_programs, plan, roofline, sizes
from sharding.mesh import programs


def main() -> None:
    """Compiles each program of a config for a TPU topology, and prints its report; exits with code 1 if one does not fit."""
    jax.config.update("jax_platforms", "cpu")  # a TPU of this machine stays free for other programs
    programs.enable_cache("")  # programs for other hardware would be read only by another plan
    config = flags.FLAGS.config
    topology = flags.FLAGS.topology or config.plan.topology
    if not topology:
        raise ValueError("no topology is set; give --topology=<kind>:<dims>, as in v5p:4x4x4, or set plan.topology")
    chip = roofline.chip_of(topology)
    place, server_topology = flags.FLAGS.server_topology, roofline.host_of(topology)
    if not lowered_programs.has_engine(config):
        server_topology = place or f"{topology.partition(':')[0]}:{chip.host}"
    elif place:
        found = f"topology.mode = {config.topology.mode!r} has its engine on the learner's hosts"
        raise ValueError(f"{found}; leave --server_topology out, or set topology.mode = 'remote'")
    config.plan.num_slices = flags.FLAGS.num_slices or config.plan.num_slices
    config = initial.completed(config, command_line.given(), needs_files=False)
    exp, chosen = sizes.settled(config, lambda config: sizes.planned(config, topology), lowered_programs.resolve)
    print(chosen, end="\n" if chosen else "")
    config = config_dict.ConfigDict(exp.config)
    work = flops.ModelFlops.of(exp.model)
    print(f"model    {work.held / 1e9:.2f} B parameters, {work.multiplied / 1e9:.2f} B multiplied per token")
    places = {name: topology if name in lowered_programs.LEARNER else server_topology for name in flags.FLAGS.programs}
    refused, outcomes = [], {}
    for name, place in places.items():
        program = plan.make_program(name, exp, place)
        axes = " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items() if size > 1)
        print(f"\n{place}, {program.mesh.size} chips, mesh {axes or 'of one'}", flush=True)
        # One at a time: a compilation uses all cores, and two in parallel have crashed the compiler.
        outcome = plan.compile_program(program, roofline.chip_of(place), flags.FLAGS.effort)
        outcomes[name] = outcome
        print(plan.describe(outcome, place), flush=True)
        refused += [name] if outcome.refusal else []
    for role in (lowered_programs.LEARNER, lowered_programs.SERVER):
        if names := [name for name in refused if name in role]:
            print(f"\nremedy for {' and '.join(names)}: {plan.remedy(config, places[names[0]], names)}", flush=True)
    if lowered_programs.is_shared(config) and not refused and outcomes.keys() >= {"train", "decode"}:
        text, fits = plan.shared(outcomes, chip)
        print(f"\nlearner and engine on the same chips\n{text}", flush=True)
        refused += [] if fits else ["both"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    verdict, seconds = "does not fit" if refused else "fits", time.perf_counter() - BEGUN
    print(f"\n{verdict}; {seconds:.0f} s, {peak:.1f} GiB of this machine")
    raise SystemExit(1 if refused else 0)


def define_flags() -> None:
    """Defines the flags of the command, except `--config`."""
    flags.DEFINE_string("topology", None, "topology of the learner, <kind>:<dims>; config.plan.topology by default")
    flags.DEFINE_integer("num_slices", None, "slices of the learner; config.plan.num_slices by default", lower_bound=1)
    flags.DEFINE_string("server_topology", None, "topology of a server; one host of the learner's kind by default")
    flags.DEFINE_enum("effort", plan.EFFORT, [*plan.EFFORTS], "effort of the compiler; run: that of a run")
    names = [*lowered_programs.LEARNER, *lowered_programs.SERVER]
    flags.DEFINE_multi_enum("programs", names, names, "programs to compile; all by default")


BEGUN = time.perf_counter()


if __name__ == "__main__":
    define_flags()
    command.parse(needs_workdir=False)
    command.run(main)
