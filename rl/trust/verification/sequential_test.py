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
5. Claims that all err to one side, or to the side of each rollout's advantage, are biased within every tolerance. A signed sum x of
   errors with honest E exp(a x) <= exp(a^2 / 2) multiplies it by exp(a x - a^2 / 2), a in SLOPES, upward, downward, and by their mean.
   The sum of absolute errors in excess of its band is bet on likewise, upward: other weights make all errors a little larger.
6. Where the two best tokens nearly tie, another backend may honestly draw the second, the more rarely the wider the tie. The bets are
   on a worker that does so as if its ties were narrower, by TIE_SHIFTS: it has other logits; or in a share of all ties up to some width: it chooses. The rare
   third token that is drawn counts by its own gap, and a group gains MAX_TIES nats at most: where the size of errors
   differs between prompts, the mean of this bet may exceed 1, and the guarantee is one by simulation (docs/decisions/trust.md).
7. Claims are compared with those of other workers in the same step (rl/trust/verification/peers.py), without a replay.
8. Samples of a group that agree up to a token have one context there, and share its rounding errors. Otherwise a policy that has
   converged, and repeats one completion, would multiply its bets on one error. So a group makes one bet per stream on a mean, or on a sum,
   divided by the largest standard deviation that any dependence within contexts can give it (`deviation`), and a context makes one bet on
   ties. `shape` counts every draw: its band has room for errors that samples share.
9. A worker may be honest for long and then cheat. So each bet runs from every starting point in parallel: the k-th addition starts one with the
   capital w_k = START_SPAN / ((k + START_SPAN - 1) (k + START_SPAN)), and these sum to 1 (an e-detector). The sum S of all their
   capital needs one number: S_n = (S_(n-1) + w_n) bet_n. Proof of the bound: S_n plus the capital of the starts to come is a
   non-negative supermartingale for an honest worker, and begins at 1. Honesty gives no credit: a start at the
   65th group has e^-6.0 of the capital, the first one e^-2.8.
10. Several bets run in parallel; their average is an e-process again. Each of the streams has ALPHA / their number, so an
   honest worker is flagged with probability at most ALPHA in its whole life.

The guarantee needs correct bands, and an honest worker whose means exceed them will be flagged. They must hold for the tokens of
every group given all before. Errors in different contexts must be independent, and sub-Gaussian with the measured scale. `python -m rl.validator calibrate` measures bands over
rollouts and over groups, with room to spare.

Sources: Ville 1939; betting as in Waudby-Smith and Ramdas (JRSS-B 2024); e-detectors as in Shin, Ramdas, and Rinaldo (arXiv 2203.03532);
margins as in Token-DiFR (arXiv 2511.20621).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

ALPHA = 5e-5  # probability of ever flagging an honest worker
START_SPAN = 16  # groups: starts among the first so many have about equal capital
BETS = (0.9, 0.5, 0.1)  # large ones find large cheats soon, small ones survive noisy honesty
TILTS = (0.5, 0.9, 1.1, 4.0)  # exponents: hotter, a tenth hotter, a tenth colder, nearly greedy
RATES = (0.5, 0.95, 1.05, 2.0)  # of an exponential: claims too low by 0.7 nats or 0.05, too high by as much
SLOPES = (0.5, 1.0, 2.0, 4.0)  # of the bets on sums of errors, per honest standard deviation
MAX_SCALED = 8.0  # standard deviations that the errors of one rollout or group count at most
TIE_WIDTHS = 12  # classes of ties; the widest is from `Bands.tie_span` down, each further one 2^0.5 as wide
TIE_SHIFTS = (2, 4, 8, 12)  # classes
TIE_CHOICES = (0.03, 0.1, 0.3)  # share of the ties that a cheat is bet to decide against the policy,
TIE_LEAST = tuple(range(6))  # of those from this class on: a cheat that takes near tokens leaves wide ties alone
TIE_MOST = 0.9  # share of the narrowest ties that a cheat is bet to decide against the policy
MAX_TIES = 5.0  # nats that the ties of one group gain at most, since its prompt may be a hard one
# The kind of thing that adds to a stream; each kind is counted on its own.
STREAMS = {
    "margin": "rollouts",
    "logprob": "rollouts",
    "proof": "rollouts",
    "shape": "rollouts",
    "claims": "claims",
    "error": "rollouts",
    "bias": "rollouts",
    "advantage": "rollouts",
    "ties": "rollouts",
    "peers": "steps",
}
MAX_LOG_EVIDENCE = 700.0  # so that exp is finite


@dataclasses.dataclass(frozen=True)
class Bands:
    """Tolerance bands: largest mean replay differences of honest workers, calibrated for one pair of backends (worker, validator)."""

    margin: float  # mean over tokens of min(margin, 1), nats
    logprob: float  # mean over tokens of min(|error|, 1), in units of `scales`
    proof: float  # mean over chunks of (exponent mismatches / k + mantissa mean / 128) / 2
    shape: float  # nats per token by which rounding may favor the most tempered distribution
    # By these defaults, the rest tests nothing.
    floor: float = 1.0  # of the scale of an error; 1: all tokens have the same scale
    scatter: float = math.inf  # standard deviation of a group's summed absolute errors, per root of its tokens
    alone: float = math.inf  # the same of a single rollout
    bias: float = 1.0  # |mean over tokens of `signs`|
    spread: float = math.inf  # standard deviation of a rollout's summed signs, per root of its tokens
    tie_span: float = 0.0  # nats: the widest gap between the two best tokens that counts as a tie
    # Largest share of ties, by class from the widest, in which the second is drawn.
    ties: tuple[float, ...] = (1.0,) * TIE_WIDTHS

    def errors(self, one: "Evidence") -> np.ndarray:
        """Returns the absolute error of each token, in units of its scale, limited to 1; NaN counts as 1."""
        error_N = np.abs(one.error_N) / scales(one.doubt_N, self.floor)
        return np.where(error_N < 1, error_N, 1)

    def signs(self, one: "Evidence") -> np.ndarray:
        """Returns signed errors in units of the honest mean, limited to [-1, 1]: a few large ones must not hide many small ones."""
        error_N = np.nan_to_num(one.error_N, nan=np.inf) / scales(one.doubt_N, self.floor)
        return np.clip(error_N / self.logprob, -1, 1)

    def classes(self, gap_N: np.ndarray) -> np.ndarray:
        """Returns the class of each token by the gap between its two best tokens: 0 for the widest ties, up to TIE_WIDTHS - 1; -1 if it is not a tie."""
        if not self.tie_span:
            return np.full(len(gap_N), -1)
        steps_N = np.floor(2 * np.log2(self.tie_span / np.maximum(gap_N, 1e-30)))
        return np.where(gap_N <= self.tie_span, np.minimum(steps_N, TIE_WIDTHS - 1), -1).astype(int)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The contribution of one replayed rollout to its worker's test; `shape` [K] is the log-likelihood ratio per exponent in TILTS."""

    margin: float
    proof: float
    shape: np.ndarray
    reward: float
    token_N: np.ndarray  # sampled
    error_N: np.ndarray  # claimed minus replayed log-probability of each token
    doubt_N: np.ndarray  # 1 - probability of the token, in the replay
    gap_N: np.ndarray  # nats between the two best tokens, or between the best and the drawn one
    is_second_N: np.ndarray  # the drawn token is not the best

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens, N."""
        return len(self.token_N)


class SequentialTest:
    """The test whether one worker cheats: an e-process (running bet against honesty) per statistic in STREAMS.

    Add every group of the worker once, with all its replayed samples, in any order. `flag` is set once the evidence suffices.
    Without bands, only `add_claims` and `add_peers` may be called.
    """

    def __init__(self, bands: Bands | None, *, alpha: float = ALPHA):
        self.bands, self._alpha = bands, alpha
        self._counts = dict.fromkeys(STREAMS.values(), 0)  # by kind
        self._starts = dict.fromkeys(STREAMS.values(), 0)  # additions, by kind
        self.flag: str | None = None  # "stream: numbers" once the evidence suffices; stays
        self._log_evidence = dict.fromkeys(STREAMS, np.full(1, -MAX_LOG_EVIDENCE))

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts that were replayed."""
        return self._counts["rollouts"]

    def add(self, group: Sequence[Evidence]) -> str | None:
        """Adds the evidence of replayed samples of one group. Returns the flag: None, or why the worker counts as a cheat."""
        assert self.bands is not None
        return self.add_gains(group_gains(self.bands, group), len(group))

    def add_gains(self, gains: dict[str, np.ndarray], num: int) -> str | None:
        """Adds the `group_gains` of `num` replayed samples of one group. Returns the flag: None, or why the worker counts as a cheat."""
        self._add("rollouts", gains, num)
        return self.flag

    def count_again(self, num: int) -> None:
        """Counts `num` replayed rollouts that were added before."""
        self._counts["rollouts"] += num

    def add_claims(self, ratio_K: np.ndarray, num: int = 1) -> str | None:
        """Adds the sum of the `claims_ratio` of `num` rollouts, which need no replay. Returns the flag: None, or why the worker counts as a cheat."""
        self._add("claims", {"claims": ratio_K}, num)
        return self.flag

    def add_peers(self, ratio_K: np.ndarray) -> str | None:
        """Adds the log bets of `peers.log_bets` on one step, which need no replay. Returns the flag: None, or why the worker counts as a cheat."""
        self._add("steps", {"peers": ratio_K})
        return self.flag

    def _add(self, kind: str, gains: dict[str, np.ndarray], num: int = 1) -> None:
        """Adds log gains to the statistics that they are named for; all come from `num` things of this kind (a value of STREAMS)."""
        self._counts[kind] += num
        self._starts[kind] += 1
        start = log_start(self._starts[kind])
        limit = math.log(len(STREAMS) / self._alpha)
        for name, gain_K in gains.items():
            total_K = np.logaddexp(self._log_evidence[name], start) + gain_K
            self._log_evidence[name] = np.clip(total_K, -MAX_LOG_EVIDENCE, MAX_LOG_EVIDENCE)
            found = log_mean_exp(self._log_evidence[name])
            if found >= limit and self.flag is None:
                self.flag = f"{name}: e^{found:.1f} to 1 after {self._counts[kind]} {kind}, e^{limit:.1f} is enough"

    def state(self) -> dict:
        """Returns the counts, the flag, and the evidence of this test as plain JSON, for `restored`."""
        evidence = {name: values.tolist() for name, values in self._log_evidence.items()}
        counts = {f"num_{kind}": count for kind, count in self._counts.items()}
        return counts | {"starts": dict(self._starts), "accused": self.flag, "log_wealth": evidence}

    @classmethod
    def restored(cls, bands: Bands | None, state: dict) -> "SequentialTest":
        """Returns a test that continues from the result of `state`. `bands` may differ from before: earlier evidence stays valid."""
        test = cls(bands)
        test.flag = state["accused"]
        test._counts = {kind: state[f"num_{kind}"] for kind in test._counts}
        test._starts = dict(state["starts"])
        test._log_evidence = {name: np.array(values, np.float64) for name, values in state["log_wealth"].items()}
        return test


def log_start(n: int) -> float:
    """Returns the log of the starting capital of the bets that begin with addition `n` (1-based). Over all n, the capital sums to 1."""
    return math.log(START_SPAN / ((n + START_SPAN - 1) * (n + START_SPAN)))


def scales(doubt_N: np.ndarray, floor: float) -> np.ndarray:
    """Returns the scale of each token's error, min(1 - p + floor, 1): if all logits err alike, its log-probability changes by 1 - p as much."""
    return np.minimum(doubt_N + floor, 1)


def log_odds(error_N: np.ndarray, doubt_N: np.ndarray, floor: float) -> np.ndarray:
    """Returns by how much each error changes the log-odds of its token, log(p / (1 - p + floor)); the error itself if `floor` is 1.

    A logit that errs by r changes the log-odds by r, however likely the token is. Divided by `scales`, the error of a likely token is up to e^r - 1.
    """
    if floor >= 1:
        return error_N
    claimed_N = np.maximum(1 - (1 - doubt_N) * np.exp(error_N), 0)
    return error_N - np.log((claimed_N + floor) / (doubt_N + floor))


def group_gains(bands: Bands, group: Sequence[Evidence]) -> dict[str, np.ndarray]:
    """Returns the log bets of each stream on the replayed samples of one group."""
    counts = np.array([one.num_tokens for one in group])
    context_N = contexts([one.token_N for one in group])
    errors = np.array([bands.errors(one).sum() for one in group])
    means = {name: np.array([getattr(one, name) for one in group]) for name in ("margin", "proof")}
    gains = {name: _mean_gains(x_S, getattr(bands, name)) for name, x_S in means.items()}
    gains["logprob"] = _mean_gains(errors / np.maximum(counts, 1), bands.logprob)
    # Rounding that moves log p by r moves the log of a ratio by (b - 1) r.
    allowed_K = bands.shape * ((np.array(TILTS) - 1) / (max(TILTS) - 1)) ** 2
    gains["shape"] = np.sum([one.shape - allowed_K * one.num_tokens for one in group], axis=0)
    gains["ties"] = np.minimum(_tie_gains(bands, group, context_N), MAX_TIES)
    signs = np.array([bands.signs(one).sum() for one in group])
    weights = advantages([one.reward for one in group], counts)
    root, scale = deviation(context_N), deviation(context_N, np.repeat(weights, counts))
    gains["error"] = _slope_gains(errors.sum(), bands.logprob * counts.sum(), bands.scatter * root)
    gains["bias"] = _signed_gains(float(signs.sum()), bands.bias * counts.sum(), bands.spread * root)
    favored, allowed = float(weights @ signs), float(bands.bias * np.abs(weights) @ counts)
    gains["advantage"] = _signed_gains(favored, allowed, bands.spread * scale)
    return gains


def alone(bands: Bands, one: Evidence) -> dict[str, float]:
    """Returns the log odds, by stream, that one rollout's errors and ties are not honest; each e^odds has a mean of at most 1 if they are."""
    allowed, scale = bands.logprob * one.num_tokens, bands.alone * math.sqrt(one.num_tokens)
    errors, ties = (
        _slope_gains(bands.errors(one).sum(), allowed, scale),
        _tie_gains(bands, [one], np.arange(one.num_tokens)),
    )
    return {"error": log_mean_exp(errors), "ties": log_mean_exp(ties)}


def _mean_gains(x_S: np.ndarray, m: float) -> np.ndarray:
    """Returns log bets [len(BETS)] that the mean of a group exceeds `m`: one bet, since its samples may share their errors."""
    mean = np.where(x_S < 1, x_S, 1).mean()  # NaN counts as 1: it would stop the bets forever
    return np.log1p(np.array(BETS) * (mean - m) / m)


def _slope_gains(total: float, allowed: float, scale: float) -> np.ndarray:
    """Returns log bets [len(SLOPES)] that a sum exceeds `allowed`; `scale` is its standard deviation."""
    if not 0 < scale < math.inf:  # nothing to compare, or not measured
        return np.zeros(len(SLOPES))
    slope_K, excess = np.array(SLOPES), (total - allowed) / scale
    return slope_K * (excess if excess < MAX_SCALED else MAX_SCALED) - slope_K**2 / 2  # NaN counts as much


def _signed_gains(total: float, allowed: float, scale: float) -> np.ndarray:
    """Returns log bets [3 len(SLOPES)] that a sum exceeds `allowed` upward, downward, and either way."""
    up_K, down_K = (_slope_gains(side, allowed, scale) for side in (total, -total))
    return np.concatenate([up_K, down_K, np.logaddexp(up_K, down_K) - math.log(2)])


def _tie_gains(bands: Bands, group: Sequence[Evidence], context_N: np.ndarray) -> np.ndarray:
    """Returns log bets that second-best tokens were drawn as if ties were narrower (TIE_SHIFTS), or in a share of those of some width (TIE_CHOICES).

    Ties after the same tokens share one bet on their mean, since they share the rounding errors that decide them.
    """
    class_N = np.concatenate([bands.classes(one.gap_N) for one in group])
    is_tie_N = class_N >= 0
    class_M, is_second_M = class_N[is_tie_N], np.concatenate([one.is_second_N for one in group])[is_tie_N]
    shares = np.minimum([*bands.ties, *[TIE_MOST] * max(TIE_SHIFTS)], TIE_MOST)
    honest_M = shares[class_M]
    _, place_M, num_C = np.unique(context_N[is_tie_N], return_inverse=True, return_counts=True)
    gains = []
    bets = [np.maximum(shares[class_M + shift], honest_M) for shift in TIE_SHIFTS]
    bets += [
        honest_M + share * (1 - honest_M) * (class_M >= least)
        for share, least in itertools.product(TIE_CHOICES, TIE_LEAST)
    ]
    for cheat_M in bets:
        ratio_M = np.where(is_second_M, cheat_M / honest_M, (1 - cheat_M) / (1 - honest_M))
        gains.append(np.log(np.bincount(place_M, ratio_M) / num_C).sum())
    return np.array(gains)


def contexts(completions: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the context [N] of each token of S completions, concatenated: a number per sequence of tokens before it, 0 for none."""
    known: dict[tuple[int, int], int] = {}
    context_N = []
    for tokens in completions:
        context = 0
        for token in tokens.tolist():
            context_N.append(context)
            context = known.setdefault((context, token), len(known) + 1)
    return np.array(context_N, int)


def deviation(context_N: np.ndarray, weight_N: np.ndarray | None = None) -> float:
    """Returns the largest standard deviation of a sum of errors of deviation 1, one per token, weighted by `weight_N` (None: 1).

    Errors are independent between contexts, and within one they may be equal or opposite: their deviations add up.
    """
    sum_C = np.bincount(context_N, None if weight_N is None else np.abs(weight_N))
    return math.sqrt((sum_C**2).sum())


def advantages(rewards: Sequence[float], counts: np.ndarray) -> np.ndarray:
    """Returns the rewards of a group's samples less a baseline, chosen so that their mean over tokens is 0; `counts` has the tokens of each sample.

    An equal shift of all errors then favors no sample. Rewards that differ within the tolerance count as equal.
    """
    advantages = np.array(rewards) - np.mean(rewards)
    # Differences within the tolerance of claimed rewards are no advantage: ties that a cheat breaks would dilute its evidence.
    advantages *= np.abs(advantages) > 1e-5 * max(1.0, np.abs(rewards).max())
    return advantages - advantages @ counts / max(counts.sum(), 1)


def claims_ratio(y_N: np.ndarray) -> np.ndarray:
    """Returns log-likelihood ratios [K] of a rollout's exponential noise: each rate in RATES against rate 1. Wrong claims make them large."""
    rates = np.array(RATES)
    return len(y_N) * np.log(rates) + (1 - rates) * y_N.sum()


def log_mean_exp(values: np.ndarray) -> float:
    """Returns log(mean(exp(values))), computed without overflow."""
    top = values.max()
    return float(top + np.log(np.exp(values - top).mean()))
