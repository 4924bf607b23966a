"""The limits and bands that a validator judges a run's rollouts by, and the file that keeps them.

1. `trust.bands` names a file of `python -m rl.validator calibrate`, or is "" for the limits in the config and no tests of replays.
2. "auto": WORKDIR/bands.json, if it was measured for these numerics: model, dtype, device, and version of jax. Two processes
   with the same digest judge alike, so a resume and a validator elsewhere print it.
3. Without it, limits are those that any honest device keeps in the run's dtype (LOOSE), and statistics convict no worker. The first accepted replays of the run's own nodes, or of the
   keys that it invited if it has none, are measured (rl/trust/verification/measurement.py); strangers wait meanwhile
   (rl/swarm/orchestrator/worker_health.py). Then the file is written, and holds from then on.
4. The run's own nodes are never judged by measured limits. Where they break these, sampler and validator compute differently, which is a
   fault of the setting: it is reported, and the run goes on with each group of them replayed under `loosest`.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from inference.proofs import toploc
from rl.trust.verification import measurement, replay, sequential_test
from rl.trust.verification import rules as rules_lib
from sharding.mesh import mesh as mesh_lib
from sharding.system import atomic_file

AUTO = "auto"
FILE = "bands.json"  # in the working directory
MIN_ROLLOUTS, MIN_GROUPS = 128, 16  # of a measurement: below, its upper bounds are wide
# Before a measurement. Float32 errs by 7e-5 nats at most in a model of 30 layers, bfloat16 by 0.5; a router's logits by as much.
LOOSE: dict[str, dict[str, Any]] = {
    "float32": dict(margin=1e-3, logprob=1e-3, routing=0.02),
    "bfloat16": dict(margin=1.0, logprob=2.0, routing=0.2),
}
LOOSE_FLIPS = 0.05  # share of tokens, in rollouts of an MoE model that name no experts


@dataclasses.dataclass
class RunBands:
    """The limits on one rollout, and the bands of the sequential tests, or None; measured here if `file` is set."""

    tolerance: rules_lib.Tolerance
    bands: sequential_test.Bands | None
    loosest: rules_lib.Tolerance  # for the nodes in `own`, in any data type
    own: frozenset[str] = frozenset()  # public keys of the run's own workers and servers
    file: pathlib.Path | None = None  # to be written after the measurement; None: nothing is measured
    numerics: dict[str, str] = dataclasses.field(default_factory=dict)
    measured_from: frozenset[str] = frozenset()  # public keys
    has_other_servers: bool = False  # than those in `own`: registered ones, which may serve some calls of an episode
    on_note: Callable[[str], None] = lambda line: None
    measured: measurement.Measured = dataclasses.field(default_factory=measurement.Measured)

    @classmethod
    def of(
        cls,
        config,
        workdir: pathlib.Path,
        *,
        own: Collection[str] = (),
        file: str = "",
        on_note: Callable[[str], None] = lambda line: None,
    ) -> "RunBands":
        """Returns the tolerance and bands of a run from `file`, else from `trust.bands`. Raises ValueError for a file that cannot be read."""
        own, name = frozenset(own), file or config.trust.bands
        loosest = dataclasses.replace(loose(config, "bfloat16"), proofs=toploc.LOOSEST)
        if name != AUTO:
            found = load(name) if name else (rules_lib.Tolerance.of(config.trust), None)
            return cls(*found, loosest, own, on_note=on_note)
        path, expected, from_keys = workdir / FILE, numerics(config), own or frozenset(config.topology.workers)
        options = {"numerics": expected, "measured_from": from_keys, "on_note": on_note}
        options["has_other_servers"] = not own.issuperset(config.topology.server_keys)
        if path.is_file():
            found = _numerics_of(path)
            if found == expected:
                on_note(f"{path} has the limits of honest rollouts, digest {digest(path)}")
                return cls(*load(path), loosest, own, **options)
            changed = [k for k in expected if found.get(k) != expected[k]]
            on_note(f"{path} was measured with another {', '.join(changed)}; it is measured again")
        elif not from_keys:
            remedy = "run `python -m rl.validator calibrate`, or invite a worker that you trust (topology.workers)"
            on_note(f"this run has no workers of its own to measure honest rollouts: statistics only notify; {remedy}")
        return cls(loose(config), None, loosest, own, path, **options)

    @property
    def is_measuring(self) -> bool:
        """True until enough honest rollouts were measured, if there are nodes to measure."""
        return self.file is not None and bool(self.measured_from) and self.bands is None

    @property
    def convicts(self) -> bool:
        """False until the bands are measured: statistics only notify then."""
        return self.file is None or bool(self.bands)

    def add(self, replayed: Sequence[replay.Replayed]) -> bool:
        """Adds accepted replays to the measurement, if it goes on. Returns True if they complete it.

        Only rollouts of workers in `measured_from` are measured. A stranger could choose among the samples of an own server, and an
        invited worker may use a server that is only registered. Own workers may use one, too. Then samples count that an own one signed.
        """
        if not self.is_measuring:
            return False
        self.measured.is_unnamed = self.loosest.flips > 0
        for one in replayed:
            is_own = one.rollout.server in self.own or not (self.own and self.has_other_servers)
            if is_own and one.rollout.worker in self.measured_from and one.rollout.temperature > 0:
                self.measured.add(one)
        if self.measured.num_rollouts < MIN_ROLLOUTS or len(self.measured.groups) < MIN_GROUPS:
            return False
        assert self.file is not None
        if not self.file.is_file() or _numerics_of(self.file) != self.numerics:  # else by another validator meanwhile
            self._measure(self.file)
        self.tolerance, self.bands = load(self.file)
        self.measured = measurement.Measured()
        return True

    def _measure(self, file: pathlib.Path) -> None:
        """Writes the file by the replays that were added. After an OSError nothing has changed, and the next replays measure again."""
        tolerance, bands = measurement.limits([self.measured], self.loosest if self.own else self.tolerance)
        try:
            measurement.check_other_texts(tolerance.proofs, [self.measured])
        except ValueError:  # a few massive channels; the paper's limits are for those
            tolerance = dataclasses.replace(tolerance, proofs=toploc.PAPER)
        about = {"numerics": self.numerics, **self.measured.numbers()}
        save(file, tolerance, bands, about)
        found = f"honest replays differ by {about['error_mean']:.2g} nats on average, {about['error_1']:.2g} at most"
        self.on_note(f"{found} ({about['rollouts']} rollouts); limits in {file}, digest {digest(file)}")


def loose(config, dtype: str = "") -> rules_lib.Tolerance:
    """Returns limits that honest rollouts keep on any device, in `dtype` or the run's: wide, so that rounding convicts no worker."""
    flips = LOOSE_FLIPS if config.model.num_experts and not config.train.router_replay else 0.0
    return rules_lib.Tolerance(max_wrong_tokens=0, flips=flips, **LOOSE[dtype or config.model.dtype])


def numerics(config) -> dict[str, str]:
    """Returns the causes of differences between honest replays, for people, too: model, dtype, device, and version of jax."""
    model = {name: value for name, value in config.model.items() if name not in ("dtype", "param_dtype", "remat")}
    return {
        "model": hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "dtype": config.model.dtype,
        "device": jax.devices()[0].device_kind if mesh_lib.platform() != "cpu" else "cpu",
        "jax": jax.__version__,
    }


def _numerics_of(path: pathlib.Path) -> dict:
    """Returns the numerics that a file names; {} for one that names none, as of `calibrate`. Raises ValueError if it is not JSON."""
    measured = atomic_file.read_json(path, dict).get("measured")
    found = measured.get("numerics") if isinstance(measured, dict) else None
    return found if isinstance(found, dict) else {}


def digest(path: pathlib.Path) -> str:
    """Returns a short name of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load(path: str | pathlib.Path) -> tuple[rules_lib.Tolerance, sequential_test.Bands]:
    """Reads a file of `save`. Raises ValueError for a missing or malformed one."""
    try:
        body = json.loads(pathlib.Path(path).read_text())
        tolerance = dict(body["tolerance"])
        proofs = toploc.Thresholds(**tolerance.pop("proofs"))
        bands = sequential_test.Bands(**body["bands"])
        bands = dataclasses.replace(bands, ties=tuple(bands.ties))
        limits = [bands.margin, bands.logprob, bands.proof, bands.shape, bands.bias, bands.floor, *bands.ties]
        values = [*tolerance.values(), *vars(proofs).values(), *limits, bands.tie_span]
        if not all(isinstance(value, int | float) and 0 <= value < 1e9 for value in values):
            raise ValueError("a limit in the bands file is not a number from 0 to 1e9")
        if not (
            min(*limits, bands.spread, bands.scatter, bands.alone) > 0 and len(bands.ties) == sequential_test.TIE_WIDTHS
        ):
            raise ValueError(
                f"the tolerance bands must be numbers above 0, with {sequential_test.TIE_WIDTHS} of them for ties"
            )
        return rules_lib.Tolerance(**tolerance, proofs=proofs), bands
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a bands file: {error}; write one with rl.validator calibrate") from error


def save(
    path: str | pathlib.Path, tolerance: rules_lib.Tolerance, bands: sequential_test.Bands, measured: dict
) -> None:
    """Writes tolerance and bands to a JSON file for `load`. `measured` names the numerics that they hold for."""
    body = {"tolerance": dataclasses.asdict(tolerance), "bands": dataclasses.asdict(bands), "measured": measured}
    atomic_file.write(pathlib.Path(path), json.dumps(body, indent=1).encode() + b"\n", durable=True)
