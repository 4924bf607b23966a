"""Small cheats over many rollouts: tests of one node that may look after every rollout and are still seldom wrong.

A cheat that moves each token a little passes every limit on a single rollout. Its sum over rollouts does not.

1. Each rollout of a node gives an `Evidence`: three numbers in [0, 1] that are small when honest, and the log-likelihood
   of its tokens under tempered copies of the policy's distribution.
2. A gambler starts with wealth 1 and bets against honesty. Under honesty the wealth is a non-negative supermartingale,
   so by Ville's inequality it ever reaches 1/alpha with probability at most alpha, however often one looks.
3. A number x with honest mean <= m (`Bands`) multiplies wealth by 1 + f (x - m) / m, f in BETS: mean <= 1, and >= 0.
   The tokens multiply it by prod q(token) / p(token), q ~ p^b, b in TILTS: mean exactly 1 when they were drawn from p,
   whatever p is. No calibration enters, and no seed: this is INTELLECT-2's check of the shape of token probabilities,
   sharp where that looks for two modes. Several bets are held side by side; their average is wealth again.
   The claimed log-probabilities play such a game, too, and without a replay: of the token that the noise g drew, log p + g
   is the largest of all, and the largest of a distribution's noised log-probabilities is Gumbel whatever the distribution
   is. So y = exp(-(log p + g)) is exponential, and (rate) exp((1 - rate) y), rate in RATES, has mean 1: too low a claim
   makes y large, too high a one small.
4. After EPOCH rollouts the wealth starts anew with a stricter threshold (alpha 6 / (pi k)^2 in epoch k), so that long
   honesty is no credit for later cheating. Summed over streams and epochs, an honest node is accused with probability
   at most ALPHA in its whole life.

The guarantee stands on the bands: an honest backend whose means exceed them will be accused. `python -m rl.validator
calibrate` measures them. Sources: Ville 1939; betting as in Waudby-Smith and Ramdas (JRSS-B 2024); margins as in
Token-DiFR (arXiv 2511.20621).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from inference.rollouts import rollout as rollout_lib

ALPHA = 5e-5  # of ever accusing an honest node
EPOCH = 1024  # rollouts
BETS = (0.5, 0.1, 0.02)  # large ones find large cheats soon, small ones do not ruin themselves on noisy honesty
TILTS = (0.5, 0.9, 1.1, 4.0)  # exponents: hotter, a tenth hotter, a tenth colder, nearly greedy
RATES = (0.5, 0.95, 1.05, 2.0)  # of an exponential: claims too low by 0.7 nats or 0.05, too high by as much
STREAMS = ("margin", "logprob", "proof", "shape", "claims")
MAX_LOG_WEALTH = 700.0  # exp of it is finite


@dataclasses.dataclass(frozen=True)
class Bands:
    """Upper bounds of what honest rollouts show on the mean, for one pair of backends (prover, verifier)."""

    margin: float  # mean over tokens of min(margin, 1), nats
    logprob: float  # mean over tokens of min(|claimed - replayed|, 1), nats
    proof: float  # mean over chunks of (exponent mismatches / k + mantissa mean / 128) / 2
    shape: float  # nats per token by which rounding may favour a tempered distribution


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one rollout contributes; `shape` is the log-likelihood ratio per tilt, [N] float64."""

    margin: float
    logprob: float
    proof: float
    shape: np.ndarray
    num_tokens: int


class Counted:
    """Rollouts whose evidence is in their node's record, for as many steps as may come again.

    A group is done again where it became stale, where another of its members was refused, or after a restart, under the same
    noise: that is no news.
    """

    def __init__(self, keep_steps: int = 16):
        self._keep_steps = keep_steps
        self._by_step: dict[int, set[tuple]] = {}

    def is_news(self, stream: str, rollout: rollout_lib.Rollout) -> bool:
        """Asked again, it says no."""
        known = self._by_step.setdefault(rollout.step, set())
        entry = stream, rollout.worker, rollout.task.group, rollout.sample
        if entry in known:
            return False
        known.add(entry)
        newest = max(self._by_step)
        for step in [step for step in self._by_step if step <= newest - self._keep_steps]:
            del self._by_step[step]
        return True

    def state(self, after: int) -> list[list]:
        """Plain JSON of what belongs to steps after this one."""
        return [[step, *entry] for step, known in self._by_step.items() if step > after for entry in sorted(known)]

    @classmethod
    def restored(cls, state: list[list]) -> "Counted":
        counted = cls()
        for step, *entry in state:
            counted._by_step.setdefault(step, set()).add(tuple(entry))
        return counted


class Record:
    """The wealth against one node, by stream. Feed it with every rollout of that node, in any order.

    Without bands it takes claims only.
    """

    def __init__(self, bands: Bands | None, *, alpha: float = ALPHA, epoch: int = EPOCH):
        self._bands, self._alpha, self._epoch_length = bands, alpha, epoch
        self.num_rollouts = 0  # that were replayed
        self.num_claims = 0  # rollouts of which the claims were looked at
        self.accused: str | None = None
        self._log_wealth: dict[str, np.ndarray] = {}
        self._restart(*STREAMS)

    def add(self, evidence: Evidence) -> str | None:
        """The accusation as "stream: numbers", from the rollout that brought it on; None while there is none."""
        if self.num_rollouts and self.num_rollouts % self._epoch_length == 0:
            self._restart(*STREAMS[:4])
        self.num_rollouts += 1
        for name in ("margin", "logprob", "proof"):
            m, x = getattr(self._bands, name), getattr(evidence, name)
            gain = ((x if x < 1 else 1.0) - m) / m  # NaN is 1, too: it would stop the bets for ever
            self._log_wealth[name] += [math.log1p(f * gain) for f in BETS]
        self._log_wealth["shape"] += evidence.shape - self._bands.shape * evidence.num_tokens
        return self._look(STREAMS[:4], self.num_rollouts)

    def add_claims(self, ratio_K: np.ndarray) -> str | None:
        """`claims_ratio` of one rollout; as `add`."""
        if self.num_claims and self.num_claims % self._epoch_length == 0:
            self._restart("claims")
        self.num_claims += 1
        self._log_wealth["claims"] += ratio_K
        return self._look(("claims",), self.num_claims)

    def _look(self, names: Sequence[str], count: int) -> str | None:
        epoch = 1 + (count - 1) // self._epoch_length
        limit = math.log(len(STREAMS) / self._alpha * math.pi**2 / 6 * epoch**2)
        for name in names:
            np.clip(self._log_wealth[name], -MAX_LOG_WEALTH, MAX_LOG_WEALTH, out=self._log_wealth[name])
            wealth = log_mean_exp(self._log_wealth[name])
            if wealth >= limit and self.accused is None:
                self.accused = f"{name}: e^{wealth:.1f} to 1 after {count} rollouts, e^{limit:.1f} is enough"
        return self.accused

    def state(self) -> dict:
        """All that `restored` needs, as plain JSON."""
        wealth = {name: values.tolist() for name, values in self._log_wealth.items()}
        counts = {"num_rollouts": self.num_rollouts, "num_claims": self.num_claims}
        return counts | {"accused": self.accused, "log_wealth": wealth}

    @classmethod
    def restored(cls, bands: Bands | None, state: dict) -> "Record":
        """A record that goes on where `state` was taken; under other bands its wealth is still that of fair bets."""
        record = cls(bands)
        record.num_rollouts, record.num_claims = state["num_rollouts"], state["num_claims"]
        record.accused = state["accused"]
        record._log_wealth = {name: np.array(state["log_wealth"][name], np.float64) for name in STREAMS}
        return record

    def log_wealth(self) -> dict[str, float]:
        return {name: log_mean_exp(values) for name, values in self._log_wealth.items()}

    def _restart(self, *names: str) -> None:
        sizes = {"shape": len(TILTS), "claims": len(RATES)}
        self._log_wealth |= {name: np.zeros(sizes.get(name, len(BETS))) for name in names}


def claims_ratio(y_N: np.ndarray) -> np.ndarray:
    """Log-likelihood ratios [K] of exponentials of the RATES against the standard one."""
    rates = np.array(RATES)
    return len(y_N) * np.log(rates) + (1 - rates) * y_N.sum()


def log_mean_exp(values: np.ndarray) -> float:
    top = values.max()
    return float(top + np.log(np.exp(values - top).mean()))
