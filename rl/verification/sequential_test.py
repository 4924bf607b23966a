"""Sequential tests (e-processes) that find small cheats over many rollouts of one worker.

A cheat that moves each token a little passes every limit on a single rollout. Its sum over rollouts does not.

1. An e-process starts at 1 and multiplies bets against honesty. If the worker is honest it is a non-negative supermartingale, so
   by Ville's inequality it ever reaches 1/alpha with probability at most alpha, however often one looks.
2. A number x with honest mean <= m (`Bands`) multiplies it by 1 + f (x - m) / m, f in BETS: mean <= 1, and >= 0.
3. The tokens multiply it by prod q(token) / p(token), q ~ p^b, b in TILTS: mean exactly 1 if they were drawn from p, for any p. This
   needs no calibration and no seed. It is INTELLECT-2's check of the shape of token probabilities, made exact.
4. The claimed log-probabilities need no replay. The noise g draws the token with the largest log p + g, and the largest noised
   log-probability is Gumbel for every distribution. So y = exp(-(log p + g)) is exponential, and (rate) exp((1 - rate) y), rate in
   RATES, has mean 1: too low a claim makes y large, too high a claim makes it small.
5. Several bets run in parallel; their average is an e-process again. After EPOCH rollouts it starts again with a stricter threshold
   (alpha 6 / (pi k)^2 in epoch k), so that long honesty does not pay for later cheating. Summed over streams and epochs, an
   honest worker is flagged with probability at most ALPHA in its whole life.

The guarantee needs correct bands: an honest backend whose means exceed them will be flagged. `python -m rl.validator calibrate`
measures them. Sources: Ville 1939; betting as in Waudby-Smith and Ramdas (JRSS-B 2024); margins as in Token-DiFR (arXiv 2511.20621).
"""

import dataclasses
import math

import numpy as np

ALPHA = 5e-5  # probability of ever flagging an honest worker
EPOCH = 1024  # rollouts
BETS = (0.5, 0.1, 0.02)  # large ones find large cheats soon, small ones survive noisy honesty
TILTS = (0.5, 0.9, 1.1, 4.0)  # exponents: hotter, a tenth hotter, a tenth colder, nearly greedy
RATES = (0.5, 0.95, 1.05, 2.0)  # of an exponential: claims too low by 0.7 nats or 0.05, too high by as much
STREAMS = ("margin", "logprob", "proof", "shape", "claims")
MAX_LOG_EVIDENCE = 700.0  # so that exp is finite


@dataclasses.dataclass(frozen=True)
class Bands:
    """Tolerance bands: largest mean replay differences of honest workers, calibrated for one pair of backends (worker, validator)."""

    margin: float  # mean over tokens of min(margin, 1), nats
    logprob: float  # mean over tokens of min(|claimed - replayed|, 1), nats
    proof: float  # mean over chunks of (exponent mismatches / k + mantissa mean / 128) / 2
    shape: float  # nats per token by which rounding may favor a tempered distribution


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The contribution of one replayed rollout to its worker's test; `shape` [K] is the log-likelihood ratio per exponent in TILTS."""

    margin: float
    logprob: float
    proof: float
    shape: np.ndarray
    num_tokens: int


class SequentialTest:
    """The test whether one worker cheats: an e-process (running bet against honesty) per statistic in STREAMS.

    Add every rollout of the worker once, in any order. `flag` is set once the evidence suffices. Without bands, only `add_claims`
    may be called.
    """

    def __init__(self, bands: Bands | None, *, alpha: float = ALPHA, epoch: int = EPOCH):
        self._bands, self._alpha, self._epoch_length = bands, alpha, epoch
        self.num_rollouts = 0  # that were replayed
        self.num_claims = 0  # rollouts whose claims were added
        self.flag: str | None = None  # "stream: numbers" once the evidence suffices; stays
        sizes = {"shape": len(TILTS), "claims": len(RATES)}
        self._log_evidence = {name: np.zeros(sizes.get(name, len(BETS))) for name in STREAMS}

    def add(self, evidence: Evidence) -> str | None:
        """Adds the evidence of one replayed rollout. Returns the flag: None, or why the worker counts as a cheat."""
        assert self._bands is not None
        gains = {}
        for name in ("margin", "logprob", "proof"):
            m, x = getattr(self._bands, name), getattr(evidence, name)
            gain = ((x if x < 1 else 1.0) - m) / m  # NaN counts as 1: it would stop the bets for ever
            gains[name] = np.array([math.log1p(f * gain) for f in BETS])
        self._add(gains | {"shape": evidence.shape - self._bands.shape * evidence.num_tokens}, self.num_rollouts)
        self.num_rollouts += 1
        return self.flag

    def add_claims(self, ratio_K: np.ndarray) -> str | None:
        """Adds one rollout's `claims_ratio`, which needs no replay. Returns the flag: None, or why the worker counts as a cheat."""
        self._add({"claims": ratio_K}, self.num_claims)
        self.num_claims += 1
        return self.flag

    def _add(self, gains: dict[str, np.ndarray], count: int) -> None:
        """Adds the log gains of one rollout to the statistics that they are named for; `count` rollouts were added before."""
        epoch, place = divmod(count, self._epoch_length)
        limit = math.log(len(STREAMS) / self._alpha * math.pi**2 / 6 * (epoch + 1) ** 2)
        for name, gain_K in gains.items():
            total_K = gain_K if place == 0 else self._log_evidence[name] + gain_K
            self._log_evidence[name] = np.clip(total_K, -MAX_LOG_EVIDENCE, MAX_LOG_EVIDENCE)
            found = log_mean_exp(self._log_evidence[name])
            if found >= limit and self.flag is None:
                self.flag = f"{name}: e^{found:.1f} to 1 after {count + 1} rollouts, e^{limit:.1f} is enough"

    def state(self) -> dict:
        """Returns the counts, the flag, and the evidence of this test as plain JSON, for `restored`."""
        evidence = {name: values.tolist() for name, values in self._log_evidence.items()}
        counts = {"num_rollouts": self.num_rollouts, "num_claims": self.num_claims}
        return counts | {"accused": self.flag, "log_wealth": evidence}

    @classmethod
    def restored(cls, bands: Bands | None, state: dict) -> "SequentialTest":
        """Returns a test that continues from the result of `state`. `bands` may differ from before: earlier evidence stays valid."""
        test = cls(bands)
        test.num_rollouts, test.num_claims, test.flag = state["num_rollouts"], state["num_claims"], state["accused"]
        test._log_evidence = {name: np.array(state["log_wealth"][name], np.float64) for name in STREAMS}
        return test


def claims_ratio(y_N: np.ndarray) -> np.ndarray:
    """Returns log-likelihood ratios [K] of a rollout's exponential noise: each rate in RATES against rate 1. Wrong claims make them large."""
    rates = np.array(RATES)
    return len(y_N) * np.log(rates) + (1 - rates) * y_N.sum()


def log_mean_exp(values: np.ndarray) -> float:
    """Returns log(mean(exp(values))), computed without overflow."""
    top = values.max()
    return float(top + np.log(np.exp(values - top).mean()))
