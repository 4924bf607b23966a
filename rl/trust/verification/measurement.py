"""Measures how much honest replays differ, and derives the limits on a rollout and the bands on a worker's means from it.

1. `Measured.add` takes honest rollouts with their replay. All come from one pair of backends (sampler, validator).
2. A limit on a token is a quantile of honest tokens, carried on to a probability of CHANCE by their tail (`tail_limit`): the maximum
   of n tokens is a poor guide to the largest of a million.
3. Errors grow with uncertainty: logits that err by r move the log-probability of a token by about r (1 - p). So errors are measured in units
   of `sequential_test.scales`, whose floor fits the data best, and limits on a token in log-odds. Limits on margins are measured from margins.
4. Bands on a mean are BAND_SAFETY times an upper confidence bound (mean + 4 standard errors), over rollouts and over groups.
5. MoE samplers name their experts, which run in the replay, too: limits per token are without flips of routers. In a run whose rollouts
   name none, a second replay counts the tokens that flips put over these limits (`Tolerance.flips`).
6. Proofs are compared with the hidden states of other texts, too (`check_other_texts`).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from inference.proofs import toploc
from rl.trust.verification import replay, sequential_test
from rl.trust.verification import rules as rules_lib

CHANCE = 1e-9  # of an honest token to exceed a limit: 1e-7 for a rollout of 100
TAIL = 1e-2  # the share of honest values from which a tail is carried on,
MIN_TAIL = 20  # and so many at least: few proofs are made
BAND_SAFETY = 1.25
SHAPE_SAFETY = 2.0
ROUTING_SAFETY = 3.0  # on the largest margin of a router
# Smaller bands are rounding of the measurement: a single flipped tie would exceed them.
FLOORS = sequential_test.Bands(margin=1e-6, logprob=1e-6, proof=1e-4, shape=1e-6)
# Smallest limits. Float32 log-odds err by 1.24e-4 at most, and by 7.4e-5 but for one of 71,000 tokens, in a model of 30 layers.
LEAST = dict(margin=1e-4, logprob=2e-4, routing=1e-3)
LEAST_PROOFS = dict(exp_mismatches=8, mantissa_mean=2, mantissa_median=3)
LEAST_TIES = 1e-3  # share of ties that may go to the second best, although none was seen
# Nearer to 1, tails are longer: an honest token with 1 - p = 3e-4 erred by 0.95 of it, and such errors weigh nothing in training.
SCALE_FLOORS = np.geomspace(2e-2, 1, 13)
OTHER_TEXTS = 256  # proofs at most that are compared with another text's hidden states


@dataclasses.dataclass
class Measured:
    """Honest rollouts of one pair of backends (sampler and validator), with the differences from their replay."""

    is_unnamed: bool = False  # of an MoE model, and the experts are those of the replay
    by_group: dict[tuple, list[sequential_test.Evidence]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    routing: float = 0.0  # the largest router margin
    proofs: list[tuple[float, float, float]] = dataclasses.field(
        default_factory=list
    )  # numbers in LEAST_PROOFS, of each
    chunks: dict[tuple, tuple[np.ndarray, bytes]] = dataclasses.field(default_factory=dict)  # hidden states, and proof

    def add(self, one: replay.Replayed) -> None:
        """Adds an honest rollout."""
        self.by_group[one.rollout.step, one.rollout.task.group].append(one.evidence)
        if one.gap_T is not None:
            self.routing = max(self.routing, float(one.gap_T.max()))
        num_rows, dim = one.hidden_ND.shape
        proofs = toploc.split(one.rollout.proofs, num_rows, dim)
        if proofs and isinstance(proofs, list) and len(self.chunks) < OTHER_TEXTS:
            prompt = one.rollout.tokens[: one.rollout.prompt_length].tobytes()
            # A copy: a view would keep the states of all tokens.
            self.chunks.setdefault((min(num_rows, 32), prompt), (one.hidden_ND[:32].copy(), proofs[0]))
        # Limits are per 128 values; a short tail of a small model has fewer.
        sizes = [min(128, min(32, num_rows - start) * dim) for start in range(0, num_rows, 32)]
        for result, size in zip(one.proofs, sizes, strict=False):
            mismatches = math.ceil(result.exp_mismatches * 128 / size)
            self.proofs.append((mismatches, result.mantissa_mean, result.mantissa_median))

    @property
    def groups(self) -> list[list[sequential_test.Evidence]]:
        """The rollouts of each group."""
        return [*self.by_group.values()]

    @property
    def evidence(self) -> list[sequential_test.Evidence]:
        """All rollouts, in one list."""
        return [one for group in self.groups for one in group]

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts."""
        return sum(map(len, self.by_group.values()))

    @functools.cached_property
    def error_N(self) -> np.ndarray:
        """The errors of the log-probabilities of all tokens."""
        return np.concatenate([one.error_N for one in self.evidence])

    @functools.cached_property
    def doubt_N(self) -> np.ndarray:
        """1 - probability of all tokens."""
        return np.concatenate([one.doubt_N for one in self.evidence])

    @functools.cached_property
    def margin_N(self) -> np.ndarray:
        """The margins of all tokens; 0 where the token is the best."""
        return np.concatenate([np.where(one.is_second_N, one.gap_N, 0) for one in self.evidence])

    def numbers(self) -> dict[str, float]:
        """Returns a summary for people."""
        error_N, quantiles = np.abs(self.error_N), (0.5, 0.99, 0.999, 1)
        named = {"error": error_N, "margin": self.margin_N, "proof": np.array([one[0] for one in self.proofs] or [0])}
        found = {f"{name}_{q}": float(np.quantile(x, q)) for name, x in named.items() for q in quantiles}
        return {"rollouts": self.num_rollouts, "tokens": len(error_N), "error_mean": float(error_N.mean())} | found


def limits(
    measured: Sequence[Measured], most: rules_lib.Tolerance | None = None
) -> tuple[rules_lib.Tolerance, sequential_test.Bands]:
    """Returns (limits on one rollout, bands on a worker's means) that honest rollouts of all variants keep.

    None is looser than in `most`, by which the rollouts were accepted: a tail that is carried on from values near a limit would be.
    """
    named = [m for m in measured if not m.is_unnamed] or measured
    error_N, doubt_N = (np.concatenate([getattr(m, name) for m in named]) for name in ("error_N", "doubt_N"))
    floor = _floor(error_N, doubt_N)
    odds = [np.abs(sequential_test.log_odds(m.error_N, m.doubt_N, floor)) for m in named]
    limit = {
        "logprob": max(map(tail_limit, odds)),
        "margin": max(tail_limit(m.margin_N) for m in named),
        "routing": ROUTING_SAFETY * max(m.routing for m in named),
    }
    limit = {name: max(least, limit[name]) for name, least in LEAST.items()}
    if most:
        limit = {name: min(value, getattr(most, name)) for name, value in limit.items()}
    proofs = _proof_limits(np.concatenate([np.array(m.proofs).reshape(-1, 3) for m in measured]))
    flips = max((_flips(m, limit, floor) for m in measured if m.is_unnamed), default=0.0)
    flips = min(flips, most.flips) if most else flips
    tolerance = rules_lib.Tolerance(**limit, floor=floor, max_wrong_tokens=0, proofs=proofs, flips=flips)
    # Honest tilts scatter far more than rounding biases them, so their mean cannot be measured. Rounding that moves log p
    # by r at random biases the mean of (q/p), q ~ p^b, by about (b r)^2 / 2 per token; log-probabilities show r.
    noise = max(_rms(m.error_N) for m in measured)
    shape = max(FLOORS.shape, SHAPE_SAFETY * (max(sequential_test.TILTS) * noise) ** 2)
    bands = dataclasses.replace(FLOORS, shape=shape, floor=floor, tie_span=tolerance.margin)
    values = {
        "margin": lambda one: one.margin,
        "logprob": lambda one: bands.errors(one).mean(),
        "proof": lambda one: one.proof,
    }
    means = {}
    for name, value in values.items():
        found = [_mean([sum(map(value, group)) for group in m.groups], map(len, m.groups)) for m in measured]
        means[name] = max(getattr(FLOORS, name), BAND_SAFETY * max(mean + 4 * error for mean, error in found))
    bands = dataclasses.replace(bands, **means)
    sums = [_sums(bands, m.groups) for m in measured]
    largest = {name: max(found[name] for found in sums) for name in sums[0]}
    return tolerance, dataclasses.replace(bands, **largest, ties=_ties(bands, measured))


def tail_limit(x_N: np.ndarray) -> float:
    """Returns a limit that an honest value exceeds with a probability of about CHANCE; 0 without values."""
    least, excess, share = _tail(x_N)
    return max(least + excess * math.log(share / CHANCE), 1.25 * float(x_N.max(initial=0)))


def _tail(x_N: np.ndarray) -> tuple[float, float, float]:
    """Returns (a value, the mean excess of the larger ones over it, their share of at most about TAIL). The excess is exponentially distributed.

    SmolLM2's margins in bfloat16 exceed any threshold up to 0.25 nats by 0.053 on average. Most are 0, so no multiple of a quantile or of the
    maximum bounds them. Where more than 1 - TAIL are 0, those that are not are the tail.
    """
    num = max(int(TAIL * len(x_N)), min(MIN_TAIL, len(x_N) // 4), 1)
    least = float(np.sort(np.append([0.0, 0.0], x_N))[-num - 1])
    top = x_N[x_N > least]
    return least, float((top - least).sum()) / max(len(top), 1), max(len(top), 1) / max(len(x_N), 1)


def _floor(error_N: np.ndarray, doubt_N: np.ndarray) -> float:
    """Returns the floor of `sequential_test.scales` under which the errors are likeliest, as of a Laplace distribution."""

    def score(floor: float) -> float:
        scale_N = sequential_test.scales(doubt_N, floor)
        return float(np.log(scale_N).mean() + np.log((np.abs(error_N) / scale_N).mean() + 1e-30))

    return float(min(SCALE_FLOORS, key=score))


def _proof_limits(found_N3: np.ndarray) -> toploc.Thresholds:
    """Returns limits on proofs that honest ones keep, not looser than any that were published."""
    limit = dict(zip(LEAST_PROOFS, map(tail_limit, found_N3.T), strict=True))
    limit = {name: min(getattr(toploc.LOOSEST, name), max(LEAST_PROOFS[name], x)) for name, x in limit.items()}
    return toploc.Thresholds(**limit | {"exp_mismatches": math.ceil(limit["exp_mismatches"])})


def _flips(measured: Measured, limit: dict[str, float], floor: float) -> float:
    """Returns `Tolerance.flips`: an upper bound on the share of tokens over the limits per token."""
    odds_N = np.abs(sequential_test.log_odds(measured.error_N, measured.doubt_N, floor))
    is_over_N = (odds_N > limit["logprob"]) | (measured.margin_N > limit["margin"])
    over = float(is_over_N.sum())
    return BAND_SAFETY * (over + 4 * math.sqrt(over + 1)) / len(is_over_N)


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
        (sum(bands.signs(one).sum() for one in group) for group in groups),
        (sum(one.num_tokens for one in group) for group in groups),
    )
    excess, signed = [], []
    for parts in ([[one] for group in groups for one in group], groups):
        over_P, lean_P, favored_P = np.array([_scaled(bands, mean, part) for part in parts]).T
        excess.append(over_P)
        signed += [lean_P, favored_P]
    return {
        "scatter": max(FLOORS.logprob, _scale(*excess)),
        "alone": max(FLOORS.logprob, _scale(excess[0])),
        "bias": BAND_SAFETY * (abs(mean) + 4 * error),
        "spread": max(1e-3, _scale(*signed, *(-x_P for x_P in signed))),
    }


def _scaled(
    bands: sequential_test.Bands, mean: float, group: Sequence[sequential_test.Evidence]
) -> tuple[float, float, float]:
    """Returns a group's (errors beyond the honest mean, signs beyond their `mean`, signs along advantages), over their deviations."""
    counts = np.array([one.num_tokens for one in group])
    context_N = sequential_test.contexts([one.token_N for one in group])
    over = sum(bands.errors(one).sum() for one in group) - bands.logprob / BAND_SAFETY * counts.sum()
    signs = np.array([bands.signs(one).sum() for one in group]) - mean * counts
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
    """Returns `Bands.ties` for honest rollouts: the largest of the share seen in all and of those that the errors and the margins of a variant explain.

    Two logits that are `gap` apart change places if their errors differ by more. There are more errors than ties. Few wide ties
    are lost, so the tail of all margins gives their share, with a mean excess that is one standard error larger.
    """
    edges = bands.tie_span / 2 ** (np.arange(sequential_test.TIE_WIDTHS + 1) / 2)
    edges[-1] = 0  # the last class has all that is narrower
    explained = []
    for variant in variants:
        error_N, margin_N = variant.error_N, variant.margin_N
        apart_N = np.abs(error_N - np.random.default_rng(0).permutation(error_N))
        least, excess, share = _tail(margin_N)
        excess *= 1 + 1 / math.sqrt(max(share * len(margin_N), 1))
        lost_K = share * np.exp(-(edges - least) / max(excess, 1e-30)) * (edges >= least)
        class_N, explained_K = bands.classes(np.concatenate([one.gap_N for one in variant.evidence])), []
        for k, (most, narrow) in enumerate(itertools.pairwise(edges)):
            # Gaps are uniform within a class. Of equal errors, every second one is to the other side.
            by_errors = np.clip((apart_N - narrow) / (most - narrow), 0, 1).mean() / 2
            by_margins = len(class_N) * (lost_K[k + 1] - lost_K[k]) / max((class_N == k).sum(), 50)
            explained_K.append(float(max(by_errors, by_margins)))
        explained.append(explained_K)
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
    pairs = []
    for m in measured:
        chunks = [m.chunks[key] for key in sorted(m.chunks)]
        pairs += [
            (hidden_TD, [proof])
            for (hidden_TD, _), (other_TD, proof) in itertools.pairwise(chunks)
            if len(hidden_TD) == len(other_TD)
        ]
    results = toploc.verify_proofs_batch(*zip(*pairs, strict=True), thresholds=thresholds) if pairs else []
    if accepted := sum(one.accepted for (one,) in results):
        found = f"{thresholds} accept {accepted} of {len(pairs)} proofs of other texts"
        raise ValueError(f"{found}; replay in the dtype and on the device of the samplers, whose proofs differ less")
    return len(pairs)
