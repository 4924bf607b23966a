"""TOPLOC proofs: commitments to hidden states, 258 bytes per 32 tokens, in the wire format of toploc 0.1.6.

1. The engine keeps the final-norm hidden state of every row that it samples from: row j produced output token j. 32 rows
   are a chunk; the last chunk may be shorter.
2. Of each chunk, the k = 128 values of largest magnitude in bf16 are taken; ties go to the lowest index. An engine takes them
   on the device (`topk_indices`), so that only k indices and values are fetched.
3. The indices are folded by the largest m <= p = 65497 that keeps them distinct. The one polynomial f of degree < k with
   f(index mod m) = the value's 16 bits, mod p, is interpolated.
4. The proof is m, then the coefficients from c0 upward, all big-endian uint16.
5. A verifier recomputes the hidden states by one prefill, takes its own top k, evaluates f there and compares exponents,
   signs and mantissas. A rejection is a value with a reason code; malformed proofs never raise.

The check is one vote in addition to the replay of the sampling noise. A forger who does not know the indices of the largest
values needs a constant-like polynomial, since any other of degree < 128 takes one value at most 127 times in 65497: these are
rejected and signs are compared. A few massive channels give the indices away: interpolated through the channels' means, a
polynomial of full entropy passes LOOSEST for every text, and PAPER for none. So limits are PAPER's or calibrated, and
`rl.validator calibrate` refuses those with which a proof of another text passes. docs/decisions/trust.md has the alternatives.

Letters here: T tokens, D model, N chunks, M values of one chunk (rows x D), k coefficients of one proof.
All arithmetic mod p fits uint32, (p - 1)^2 + (p - 1) < 2^32, or is an exact integer sum in float64, k p^2 < 2^53.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

PRIME = 65497  # the field of toploc 0.1.6, and the largest modulus of indices
MIN_MODULUS = 2**15  # exclusive; the reference's Python helper stops its downward search here
_GUESS_SLACK = 24  # bf16 patterns below the k-th magnitude of an earlier chunk, a fifth of an octave
BATCH = 128  # chunks interpolated together: enough to amortize numpy's calls, and 16 MiB of float64 scratch
NO_AGREEMENT = 2.0**64  # mantissa statistics if no exponent agrees, as in the reference; JSON-safe


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The largest differences between claimed and recomputed hidden states with which a TOPLOC proof is accepted.

    Counts are per 128 coefficients, and in proportion for shorter proofs.
    """

    exp_mismatches: int  # positions whose exponent differs
    mantissa_mean: float  # of |difference| in units of 1/128, where the exponent agrees
    mantissa_median: float
    # Ours: toploc ignores signs. Where exponents agree an honest sign never differs (top-k values are far from 0);
    # a constant polynomial differs at half of at least 68 positions.
    sign_mismatches: int = 8


# toploc-experiments, vllm_validate_poly.py: at least 90 of 128 exponents agree.
PAPER = Thresholds(exp_mismatches=38, mantissa_mean=10, mantissa_median=8)
# toploc-validator at 55c1a23, default configuration: calibrated limits are not looser.
LOOSEST = Thresholds(exp_mismatches=60, mantissa_mean=40, mantissa_median=40)


@dataclasses.dataclass(frozen=True)
class ProofResult:
    """The result of verifying one TOPLOC proof, which covers one chunk of up to 32 hidden states.

    `reason` is "ok" or the first rule broken, in this order: "empty" (no rows to verify), "count" (not one proof per chunk),
    "length" (not 2 + 2k bytes), "modulus", "coefficient" (not reduced mod p), "non_finite" and "constant" (the verifier's own
    hidden states, so not the prover's fault), "low_entropy" (a polynomial that needs no forward pass), "exponent", "sign",
    "mantissa". A proof that was not evaluated has the worst statistics.
    """

    accepted: bool
    reason: str
    exp_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    sign_mismatches: int  # among positions whose exponent agrees


def encode(tops: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[bytes]:
    """Returns one proof per chunk of hidden states. `tops` has the k largest of each chunk: (indices row * D + column, bf16 bit patterns).

    The proof is b"" for a chunk with NaN or inf, which are always among the k largest, or if no modulus keeps the indices distinct, which was
    never observed. Every verifier rejects b"" as "length". Nothing is raised: one bad chunk must not affect others.
    """
    proofs = [b""] * len(tops)
    for members in _batches([0 if _non_finite(bits_k).any() else len(bits_k) for _, bits_k in tops]):
        indices_Nk, bits_Nk = (np.stack(column) for column in zip(*(tops[n] for n in members), strict=True))
        modulus_N = _injective_modulus(indices_Nk)
        x_Nk = (indices_Nk % np.maximum(modulus_N, 1)[:, None]).astype(np.uint32)
        coefficients_Nk = _interpolate(x_Nk, bits_Nk.astype(np.uint32))
        wire = np.concatenate([modulus_N[:, None], coefficients_Nk], axis=1).astype(">u2")
        for n, modulus, row in zip(members, modulus_N.tolist(), wire, strict=True):
            proofs[n] = row.tobytes() if modulus else b""
    return proofs


def topk_indices(bits_NM: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Finds the k largest magnitudes of each row of bf16 values, given as their bits (uint16), inside a jitted program.

    Returns (indices_Nk int32, bits_Nk uint16): the same set as the host path, ties included, in any order. A partly filled
    chunk must be zero after its last row: zeros tie and the lowest index wins, so padding is chosen only if rows * D < k, and
    then with indices after the real values.

    A CPU keeps a heap of k (XLA's TopK). Elsewhere `jax.lax.top_k` would sort all M, so the k-th magnitude is counted out.
    """
    assert bits_NM.dtype == jnp.uint16 and k <= bits_NM.shape[1]

    def by_heap(magnitude_NM):  # float32, for which TopK is fast; the lower index wins a tie
        return jax.lax.top_k(magnitude_NM.astype(jnp.float32), k)[1]

    by_counting = functools.partial(_by_counting, k=k)
    indices_Nk = jax.lax.platform_dependent(bits_NM & 0x7FFF, cpu=by_heap, default=by_counting)
    return indices_Nk, jnp.take_along_axis(bits_NM, indices_Nk, axis=1)


def _by_counting(magnitude_NM, k: int):
    """Returns each row's indices of the k largest. A magnitude has 15 bits, so 15 counting passes find the k-th exactly."""
    magnitude_NM = magnitude_NM.astype(jnp.int32)

    def bisect(i, threshold_N1):
        candidate_N1 = threshold_N1 | (1 << (14 - i))
        enough_N1 = (magnitude_NM >= candidate_N1).sum(axis=1, keepdims=True, dtype=jnp.int32) >= k
        return jnp.where(enough_N1, candidate_N1, threshold_N1)

    threshold_N1 = jax.lax.fori_loop(0, 15, bisect, jnp.zeros((magnitude_NM.shape[0], 1), jnp.int32))
    above_NM = jnp.cumsum(magnitude_NM > threshold_N1, axis=1, dtype=jnp.int32)
    ties_NM = jnp.cumsum(magnitude_NM == threshold_N1, axis=1, dtype=jnp.int32)
    # The number of positions 0..i that are chosen; the j-th choice is where this count first reaches j.
    chosen_NM = above_NM + jnp.minimum(ties_NM, k - above_NM[:, -1:])
    return jax.vmap(lambda chosen_M: jnp.searchsorted(chosen_M, jnp.arange(1, k + 1)))(chosen_NM).astype(jnp.int32)


def verify_proofs_batch(
    hiddens: Iterable, proofs_of: Iterable, *, chunk: int = 32, topk: int = 128, thresholds: Thresholds = PAPER
) -> list[list[ProofResult]]:
    """Verifies the proofs of several sequences together, against the verifier's own hidden states [T, D] of each.

    Returns, for each sequence, one result per chunk. The list is never empty, so that all(...) over the results is not
    vacuously true. `proofs_of` is untrusted: the entry of a sequence may be anything, including the return value of `split`.
    """
    results, blocks, proofs, places = [], [], [], []  # the last three: of sequences with as many proofs as chunks
    for hidden_TD, claimed in zip(hiddens, proofs_of, strict=True):
        own = _chunks(hidden_TD, chunk)
        is_complete = isinstance(claimed, list | tuple) and len(claimed) == len(own)
        reason = "length" if is_complete else "count"  # until evaluated
        results.append([_rejected(reason, min(topk, bits_M.size)) for bits_M in own] or [_rejected("empty", 0)])
        if is_complete:
            places += [(results[-1], n) for n in range(len(own))]
            blocks += own
            proofs += claimed
    tops = _top_values(blocks, topk)
    sizes = [len(bits_k) for _, bits_k in tops]
    is_whole = [isinstance(proof, bytes) and len(proof) == 2 + 2 * k for proof, k in zip(proofs, sizes, strict=True)]
    for members in _batches([k * whole for k, whole in zip(sizes, is_whole, strict=True)]):
        num_values = np.array([blocks[n].size for n in members])
        indices_Nk, own_Nk = (np.stack(column) for column in zip(*(tops[n] for n in members), strict=True))
        wire = np.frombuffer(b"".join(proofs[n] for n in members), ">u2").reshape(len(members), -1).astype(np.uint32)
        reasons = np.array(_reasons(wire, own_Nk, num_values))
        sound = np.flatnonzero(reasons == "")
        x_Nk = (indices_Nk[sound] % wire[sound, :1]).astype(np.uint32)
        compared = iter(_compare(_evaluate(wire[sound, 1:], *_powers(x_Nk)), own_Nk[sound], thresholds))
        for n, reason in zip(members, reasons.tolist(), strict=True):
            sequence, at = places[n]
            sequence[at] = _rejected(reason, sizes[n]) if reason else next(compared)
    return results


def split(data: bytes, num_rows: int, hidden_dim: int, chunk: int = 32, topk: int = 128) -> list[bytes] | str:
    """Splits the joined proofs of a sequence of `num_rows` hidden states into one proof per chunk.

    If `data` does not have exactly the expected length, returns one str instead of the list: "length: " and an explanation.
    """
    num_values = [min(chunk, num_rows - start) * hidden_dim for start in range(0, num_rows, chunk)]
    lengths = [2 + 2 * min(topk, values) for values in num_values]
    if not isinstance(data, bytes) or len(data) != sum(lengths):
        size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        return f"length: {size} of proofs, but {num_rows} rows of {hidden_dim} take exactly {sum(lengths)}"
    ends = np.cumsum(lengths).tolist()
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def malformed(data: bytes, num_rows: int, hidden_dim: int, chunk: int = 32, topk: int = 128) -> str | None:
    """Returns the first rule that the joined proofs of a sequence break by their bytes alone, as text; None if they break none.

    These rules need no hidden states: lengths, moduli, coefficients, and entropy. Bytes that pass prove nothing yet.
    """
    proofs = split(data, num_rows, hidden_dim, chunk, topk)
    if isinstance(proofs, str):
        return proofs
    whole, rest = divmod(num_rows, chunk)
    found = []
    for same, rows in ((proofs[:whole], chunk), (proofs[whole:], rest)):  # proofs of one length each
        if same:
            wire = np.frombuffer(b"".join(same), ">u2").reshape(len(same), -1).astype(np.uint32)
            found += _form_reasons(wire, np.full(len(same), rows * hidden_dim))
    return next((f"{reason}: proof {n} is not of hidden states" for n, reason in enumerate(found) if reason), None)


def _chunks(hidden_TD, chunk: int) -> list[np.ndarray]:
    """Splits hidden states into chunks of `chunk` rows; returns the bits of each chunk's bf16 values, flattened."""
    hidden_TD = np.asarray(hidden_TD)
    if hidden_TD.ndim != 2 or hidden_TD.dtype not in (jnp.bfloat16, np.float32):
        found = f"{hidden_TD.dtype}{list(hidden_TD.shape)}"
        raise ValueError(
            f"hidden states are {found}, but must be [T, D] in bfloat16 or float32; pass those of the final norm"
        )
    bits_TD = np.ascontiguousarray(hidden_TD.astype(jnp.bfloat16, copy=False)).view(np.uint16)  # to nearest even
    return [bits_TD[start : start + chunk].reshape(-1) for start in range(0, len(bits_TD), chunk)]


def _top_values(blocks: list[np.ndarray], topk: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (ascending indices, bfloat16 bit patterns) of the `topk` largest magnitudes of each chunk, or all if it has fewer.

    A guess at the k-th magnitude, from an earlier chunk, leaves a few hundred candidates of a chunk in three passes.
    If it leaves fewer than k, a partition finds them. The guess cannot change the result.
    """
    largest = max((bits_M.size for bits_M in blocks), default=0)
    # Reused by all chunks: touching fresh pages costs more than the passes.
    scratch, over = np.empty(largest, np.uint16), np.empty(largest, bool)
    guess, tops = 0, []
    for bits_M in blocks:
        k = min(topk, bits_M.size)
        magnitude_M = np.bitwise_and(bits_M, 0x7FFF, out=scratch[: bits_M.size])
        over_M = np.greater_equal(magnitude_M, guess, out=over[: bits_M.size])
        candidates = np.flatnonzero(over_M) if guess else ()
        if not k <= len(candidates) <= 8 * k:
            kth = int(np.partition(magnitude_M, bits_M.size - k)[bits_M.size - k])
            candidates = np.flatnonzero(magnitude_M >= kth)
            guess = max(kth - _GUESS_SLACK, 0)
        best = np.argsort(0x7FFF - magnitude_M[candidates], kind="stable")[:k]
        indices_k = np.sort(candidates[best])
        tops.append((indices_k, bits_M[indices_k]))
    return tops


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields batches of at most BATCH positions in `sizes`, each batch of positions with one equal size; skips size 0."""
    for size in sorted({*sizes} - {0}):
        members = [n for n, own in enumerate(sizes) if own == size]
        yield from (members[start : start + BATCH] for start in range(0, len(members), BATCH))


def _injective_modulus(indices_Nk: np.ndarray) -> np.ndarray:
    """Returns the largest modulus that keeps each row's indices distinct; 0 if none above MIN_MODULUS does."""
    modulus_N, left = np.full(len(indices_Nk), PRIME), np.arange(len(indices_Nk))
    while len(left):
        folded = np.sort(indices_Nk[left] % modulus_N[left, None], axis=1)
        left = left[(folded[:, 1:] == folded[:, :-1]).any(axis=1)]
        modulus_N[left] -= 1
        modulus_N[left[modulus_N[left] == MIN_MODULUS]] = 0
        left = left[modulus_N[left] > 0]
    return modulus_N


@functools.cache
def _inverses() -> np.ndarray:
    return np.array([0, *(pow(a, -1, PRIME) for a in range(1, PRIME))], np.uint32)


def _interpolate(x_Nk: np.ndarray, y_Nk: np.ndarray) -> np.ndarray:
    """Returns the coefficients, lowest degree first, of the polynomial through k points per row, mod p.

    Lagrange with A(x) = prod_i (x - x_i) = sum_j a_j x^j: f = sum_i w_i A(x) / (x - x_i), w_i = y_i / A'(x_i). By
    synthetic division the coefficient j of A(x) / (x - x_i) is sum_m a_{j+m+1} x_i^m, so with the moments
    u_m = sum_i w_i x_i^m it is f_j = sum_m a_{j+m+1} u_m. No k x k loop is left in Python.
    """
    N, k = x_Nk.shape
    powers_Nki, giant_Nk = _powers(x_Nk)
    master_Nk = _monic_product(x_Nk)[:, 1:]  # a_1 .. a_k: a_0 divides out
    derivative_Nk = master_Nk * np.arange(1, k + 1, dtype=np.uint32) % PRIME
    weight_Nk = y_Nk % PRIME * _inverses()[_evaluate(derivative_Nk, powers_Nki, giant_Nk)] % PRIME

    steps = [weight_Nk]  # w_i x_i^(16 j)
    for _ in range(16, k, 16):
        steps.append(steps[-1] * giant_Nk % PRIME)
    moments_Njs = _mod(np.stack(steps, axis=1).astype(np.float64) @ powers_Nki)
    moments_Nk = moments_Njs.reshape(N, -1)[:, :k].astype(np.float64)
    padded = np.concatenate([master_Nk, np.zeros((N, k - 1), np.uint32)], axis=1).astype(np.float64)
    hankel_Nkk = np.lib.stride_tricks.sliding_window_view(padded, k, axis=1)
    return _mod(hankel_Nkk @ moments_Nk[..., None])[..., 0]


def _evaluate(coefficients_Nj: np.ndarray, powers_Nki: np.ndarray, giant_Nk: np.ndarray) -> np.ndarray:
    """Evaluates one polynomial per row at its k points, mod p: Horner in x^16 over sums of 16 terms, exact in float64."""
    N, num = coefficients_Nj.shape
    steps = -(-num // 16)
    padded = np.zeros((N, steps * 16))
    padded[:, :num] = coefficients_Nj
    inner_Njk = _mod(padded.reshape(N, steps, 16) @ powers_Nki.swapaxes(1, 2))
    value_Nk = inner_Njk[:, -1]
    for j in range(steps - 2, -1, -1):
        value_Nk = _reduce(value_Nk * giant_Nk + inner_Njk[:, j])
    return value_Nk


def _powers(x_Nk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the powers of each x mod p: (x^0 .. x^15 in float64, on a new last dim; x^16 in uint32)."""
    powers = np.empty((*x_Nk.shape, 17), np.uint32)
    powers[..., 0] = 1
    powers[..., 1] = x_Nk % PRIME
    for w in (1, 2, 4, 8):
        powers[..., w + 1 : 2 * w + 1] = _reduce(powers[..., 1 : w + 1] * powers[..., w : w + 1])
    return powers[..., :16].astype(np.float64), powers[..., 16]


def _monic_product(x_Nk: np.ndarray) -> np.ndarray:
    """Returns the coefficients a_0 .. a_k, mod p, of prod_i (x - x_i) over the k points x_i of each row."""
    N, k = x_Nk.shape
    negative_kN = ((PRIME - x_Nk) % PRIME).T.copy()
    a_kN = np.zeros((k + 1, N), np.uint32)  # coefficients are rows, so that each factor is one shifted add in place
    a_kN[k] = 1
    for i in range(k):
        low = k - i  # a_0 of the product of the first i factors
        a_kN[low - 1 : k] = _reduce(a_kN[low - 1 : k] + a_kN[low:] * negative_kN[i])
    return a_kN.T


def _reduce(x: np.ndarray) -> np.ndarray:
    """Returns x mod p for uint32 x. numpy's // uses SIMD; its % does not and takes 2.6 times as long."""
    return x - x // np.uint32(PRIME) * np.uint32(PRIME)


def _mod(exact: np.ndarray) -> np.ndarray:
    return (exact.astype(np.uint64) % PRIME).astype(np.uint32)


def _reasons(wire_Nc: np.ndarray, own_Nk: np.ndarray, num_values: np.ndarray) -> list[str]:
    """Returns, for each proof of the right length, the code of the first rule that it breaks before it is evaluated, or ""."""
    is_constant_N = (own_Nk == own_Nk[:, :1]).all(axis=1)
    own = np.where(_non_finite(own_Nk).any(axis=1), "non_finite", np.where(is_constant_N, "constant", "")).tolist()
    form = _form_reasons(wire_Nc, num_values)
    return [o if o and f in ("", "low_entropy") else f for o, f in zip(own, form, strict=True)]


def _form_reasons(wire_Nc: np.ndarray, num_values: np.ndarray) -> list[str]:
    """Returns, for each proof of the right length, the code of the first rule that its bytes alone break, or ""."""
    modulus_N, coefficients_Nk = wire_Nc[:, 0], wire_Nc[:, 1:]
    # Indices below p are distinct unfolded, so a chunk of at most p values leaves the prover no choice.
    lowest_N = np.where(num_values <= PRIME, PRIME, MIN_MODULUS + 1)
    # Honest coefficients look uniform: 128 draws of 65497 had at most one zero and seldom a pair.
    ordered_Nk = np.sort(coefficients_Nk, axis=1)
    is_new_Nk = np.diff(ordered_Nk, axis=1, prepend=0) > 0
    is_bad_modulus_N = (modulus_N < lowest_N) | (modulus_N > PRIME)
    is_unreduced_N = (coefficients_Nk >= PRIME).any(axis=1)  # c and c + p would be two spellings of one proof
    is_low_N = is_new_Nk.sum(axis=1) < 3 * coefficients_Nk.shape[1] // 4
    return np.select(
        [is_bad_modulus_N, is_unreduced_N, is_low_N], ["modulus", "coefficient", "low_entropy"], ""
    ).tolist()


def _compare(claimed_Nk: np.ndarray, own_Nk: np.ndarray, thresholds: Thresholds) -> list[ProofResult]:
    k, own_Nk = own_Nk.shape[1], own_Nk.astype(np.uint32)
    agree_Nk = (claimed_Nk >> 7) & 0xFF == (own_Nk >> 7) & 0xFF
    agree_N = agree_Nk.sum(axis=1)
    sign_N = (agree_Nk & (claimed_Nk >> 15 != own_Nk >> 15)).sum(axis=1)
    mantissa_Nk = np.abs((claimed_Nk & 0x7F).astype(np.int64) - (own_Nk & 0x7F).astype(np.int64))
    total_N = np.where(agree_Nk, mantissa_Nk, 0).sum(axis=1)
    ordered_Nk = np.sort(np.where(agree_Nk, mantissa_Nk, 128), axis=1)  # 128 > any difference: disagreement sorts last
    results = []
    for agree, sign, total, ordered_k in zip(agree_N.tolist(), sign_N.tolist(), total_N, ordered_Nk, strict=True):
        mean = float(total / agree) if agree else NO_AGREEMENT
        median = float(ordered_k[agree // 2]) if agree else NO_AGREEMENT  # the upper median, as in the reference
        broken = {
            "exponent": (k - agree) * 128 > thresholds.exp_mismatches * k,
            "sign": sign * 128 > thresholds.sign_mismatches * k,
            "mantissa": mean > thresholds.mantissa_mean or median > thresholds.mantissa_median,
        }
        reason = next((reason for reason, is_broken in broken.items() if is_broken), "ok")
        results.append(ProofResult(reason == "ok", reason, k - agree, mean, median, sign))
    return results


def _rejected(reason: str, k: int) -> ProofResult:
    return ProofResult(False, reason, k, NO_AGREEMENT, NO_AGREEMENT, k)


def _non_finite(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7F80) == 0x7F80
