"""The replay of rollouts: one prefill instead of a step per token, with the sampling noise of their seeds.

1. Rollouts of one policy version are packed without padding: samples of a group are branches of one prompt, which is computed
   once (as in the learner), and several prompts share a row. Rows run in blocks of one shape, and only columns that predict a sampled
   token get logits.
2. A rollout of several versions takes one pass per version over a KV cache. Each position's keys are written by the version that
   wrote them in the engine, so the replay computes the same function.
3. A rollout of several calls and versions is replayed in pieces: each call prefilled all tokens before it with one version, but for
   the keys that it reused (`prefix_versions`). Calls that read the same keys are one piece.
4. If rollouts name their experts, those run here, too: a tie that was broken the other way changes nothing after it.
5. Per sampled token: the margin of the noised argmax over it and over the second best, its log-probability, the hidden state that predicts it, and its
   likelihood under tempered distributions (rl/trust/verification/sequential_test.py).

Letters: G rollouts, T padded length, M blocks, B rows of a block, C columns of them all, N sampled tokens (of a block, padded), S
tokens scored together, V vocabulary, D model, K tempered distributions, L MoE layers, X experts per token.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from inference.engine import kv_cache, sampler
from inference.proofs import toploc
from inference.rollouts import kept_sets
from inference.rollouts import rollout as rollout_lib
from models import config as config_lib
from models import transformer
from rl.learning.batch import packing, router_replay
from rl.trust.verification import rules as rules_lib
from rl.trust.verification import sequential_test

BLOCK_TOKENS = 1024  # of a block: enough rows for an efficient matmul; 5 to 15 % quicker than 2048 on two cores
ROW_LENGTHS = (1.0, 1.5, 2.0, 3.0)  # tried, in units of the longest rollout: longer ones share more of a prompt
SCORED_ENTRIES = 2**20  # logits and noise of so many tokens times the vocabulary exist at one time,
SCORED_TOKENS = (128, 256)  # but of so many tokens at least and at most: a block has few parts of padding
MIN_ROW_STEP = 32  # lengths of rows are multiples of it
LENGTH_MULTIPLE = 64

Array = Any  # np.ndarray on the host, jax.Array in a program


# The recomputed values of G rollouts by field of `Replayed`: host arrays [G, T, ...]; column t is about token t if it was sampled.
_Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One rollout and the values that a validator's replay recomputed for it; arrays [N, ...] have a row per sampled token."""

    rollout: rollout_lib.Rollout
    positions_N: np.ndarray
    margin_N: np.ndarray  # largest noised logit minus that of the token, nats
    lead_N: np.ndarray  # largest noised logit minus the second largest, nats
    logp_N: np.ndarray  # of the token, in the distribution sampled from
    tilt_K: np.ndarray  # log-likelihood ratios of the whole rollout, `sequential_test.TILTS` against the policy
    hidden_ND: np.ndarray  # the states that predict the tokens
    kept_gap_N: np.ndarray | None = None  # nats by which the claimed kept set misses the filters'; None without claims
    gap_T: np.ndarray | None = None  # largest router margin of all layers, without the last token; None without experts
    proofs: Sequence[toploc.ProofResult] = ()

    @property
    def error_N(self) -> np.ndarray:
        """The claimed minus the replayed log-probability of each sampled token, [N]."""
        return self.rollout.logprobs[self.positions_N] - self.logp_N

    @property
    def doubt_N(self) -> np.ndarray:
        """1 - probability of each token in the replay, [N]."""
        return -np.expm1(np.minimum(self.logp_N.astype(np.float64), 0))

    @property
    def evidence(self) -> sequential_test.Evidence:
        """The contribution of an accepted rollout to the sequential test of its worker: differences from the replay."""
        k = min(128, self.hidden_ND.size)
        proofs = [(r.exp_mismatches / k + min(r.mantissa_mean, 128) / 128) / 2 for r in self.proofs]
        return sequential_test.Evidence(
            margin=float(np.minimum(self.margin_N, 1).mean()),
            proof=float(np.mean(proofs)),
            shape=self.tilt_K if self.rollout.temperature > 0 else np.zeros(len(self.tilt_K)),
            reward=self.rollout.reward,
            token_N=self.rollout.tokens[self.positions_N],
            error_N=self.error_N,
            doubt_N=self.doubt_N,
            gap_N=np.where(self.margin_N > 0, self.margin_N, self.lead_N),
            is_second_N=self.margin_N > 0,
        )


@struct.dataclass
class _Targets:
    """The N sampled tokens to score, in any order; every field is an array [N]."""

    column: Array  # where the hidden state that predicts the token is
    token: Array
    position: Array  # in its sequence
    seed: Array
    temperature: Array
    kept: Array  # int32 [N, W], claimed; -1 where a set has fewer tokens, and in all of those without a claim


def replay(
    model: config_lib.ModelConfig,
    weights: Callable[[int], transformer.Params],
    rules: rules_lib.Rules,
    rollouts: Sequence[rollout_lib.Rollout],
) -> list[Replayed]:
    """Recomputes well-formed rollouts with the weights of the policy versions that they name, and verifies their TOPLOC proofs.

    `weights` returns the params of a version; an error that it raises is passed on.
    """
    out = recompute(model, weights, rules, rollouts)
    found = []
    for row, rollout in enumerate(rollouts):
        sampled = np.flatnonzero(rollout.sampled_mask)
        tilt_NK = out["tilt"][row, sampled].astype(np.float64)
        found.append(
            Replayed(
                rollout,
                sampled,
                margin_N=out["margin"][row, sampled],
                lead_N=out["lead"][row, sampled],
                logp_N=out["logp"][row, sampled],
                # A token outside the filters has probability 0 and no finite ratio; `checks.sampling` rejects it.
                tilt_K=np.where(np.isfinite(tilt_NK), tilt_NK, 0).sum(axis=0),
                hidden_ND=out["hidden"][row, sampled],
                kept_gap_N=out["kept_gap"][row, sampled] if rollout.kept else None,
                gap_T=None if rollout.routed_experts is None else out["gap"][row, : len(rollout.tokens) - 1],
            )
        )
    hidden = [part for one in found for part in _by_call(one)]
    claims = [part for one in found for part in rollout_lib.proofs_by_call(one.rollout, model.model_dim)]
    proofs = [toploc.split(claim, *part.shape) for claim, part in zip(claims, hidden, strict=True)]
    results = iter(toploc.verify_proofs_batch(hidden, proofs, thresholds=rules.tolerance.proofs))
    return [dataclasses.replace(one, proofs=[x for _ in one.rollout.spans for x in next(results)]) for one in found]


def _by_call(one: Replayed) -> list[np.ndarray]:
    """Returns the hidden states [N, D] of each call."""
    return np.split(one.hidden_ND, np.cumsum([end - start for start, end in one.rollout.spans])[:-1])


def recompute(model, weights, rules: rules_lib.Rules, rollouts: Sequence[rollout_lib.Rollout]) -> _Arrays:
    """Recomputes rollouts and returns arrays by name, with a row per rollout and a column per token; "gap" only if experts are named."""
    parts = [(row, *part) for row, rollout in enumerate(rollouts) for part in _calls(rollout)]
    if len(parts) == len(rollouts) and all(piece is rollouts[row] for row, _, piece in parts):
        return _recompute(model, weights, rules, rollouts)
    longest, out = max(len(rollout.tokens) for rollout in rollouts), {}
    num = max(1, rules_lib.MAX_REPLAY_TOKENS // longest)
    for first in range(0, len(parts), num):
        some = parts[first : first + num]
        found = _recompute(model, weights, rules, [piece for *_, piece in some])
        for number, (row, before, piece) in enumerate(some):
            # Experts are named for the tokens that ran, which begin with the last token of the piece before.
            spans = {"gap": slice(before, len(piece.tokens) - 1)}
            for name, array in found.items():
                if name not in out:
                    out[name] = np.zeros((len(rollouts), longest, *array.shape[2:]), array.dtype)
                span = spans.get(name, slice(piece.prompt_length, len(piece.tokens)))
                out[name][row, span] = array[number, span]
    return out


def _calls(rollout: rollout_lib.Rollout) -> list[tuple[int, rollout_lib.Rollout]]:
    """Returns pieces of a rollout of several calls and policy versions, as (the first token that no piece before has run, piece).

    A piece has the calls that follow each other and read the same keys, and all tokens before them as prompt. Another rollout is one piece.
    """
    if rollout.prefix_versions is None and (rollout.calls is None or len(np.unique(writers(rollout))) == 1):
        return [(0, rollout)]
    parts, kept, before = [], rollout_lib.kept_by_call(rollout), 0
    for number, (start, end) in enumerate(rollout.spans):
        versions, experts = rollout.versions[:end].copy(), rollout.routed_experts
        versions[:start] = versions[start - 1]
        for last, version in reversed(rollout.prefix_runs(number)):
            versions[:last] = version
        part = {"tokens": rollout.tokens[:end], "sampled_mask": np.arange(end) >= start, "versions": versions}
        part |= {"routed_experts": None if experts is None else experts[: end - 1], "kept": kept[number]}
        part |= {"prefix_versions": None, "calls": np.array([[start, end]], np.int32)}
        piece = dataclasses.replace(rollout, **part)
        if parts and (joined := _joined(parts[-1][1], piece, rollout.versions)):
            parts[-1] = parts[-1][0], joined
        else:
            parts.append((before, piece))
        before = end - 1
    return parts


def _joined(one: rollout_lib.Rollout, after: rollout_lib.Rollout, sampler_T: np.ndarray) -> rollout_lib.Rollout | None:
    """Returns one piece that replays the calls of two, or None if the same token has keys of different versions in them."""
    n, mask_T = len(one.tokens), after.sampled_mask.copy()
    mask_T[:n] = one.sampled_mask
    found = dataclasses.replace(
        after,
        sampled_mask=mask_T,
        versions=np.where(mask_T, sampler_T[: len(mask_T)], after.versions),
        calls=np.array([*one.spans, *after.spans], np.int32),
        kept=one.kept + after.kept,
    )
    writer_T = writers(after)
    is_same = np.array_equal(writer_T[: n - 1], writers(one)) and np.array_equal(writer_T, writers(found))
    return found if is_same else None


def _recompute(model, weights, rules: rules_lib.Rules, rollouts: Sequence[rollout_lib.Rollout]) -> _Arrays:
    longest = max(len(r.tokens) for r in rollouts)
    assert longest <= rules.max_model_len
    T = min(rules.max_model_len, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    shape = (len(rollouts), T)
    out: _Arrays = {
        "margin": np.zeros(shape, np.float32),
        "lead": np.zeros(shape, np.float32),
        "logp": np.zeros(shape, np.float32),
        "tilt": np.zeros((*shape, len(sequential_test.TILTS)), np.float32),
        "hidden": np.zeros((*shape, model.model_dim), jnp.bfloat16),
        "kept_gap": np.zeros(shape, np.float32),
    }
    if _any_names_experts(rollouts):
        out["gap"] = np.zeros(shape, np.float32)
    dtypes = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    filters = {name: np.asarray(rules.filters[name], dtype) for name, dtype in dtypes.items()}
    by_version: dict[int, list[int]] = {}
    mixed = []
    for i, rollout in enumerate(rollouts):
        versions = np.unique(writers(rollout))
        if len(versions) == 1:
            by_version.setdefault(int(versions[0]), []).append(i)
        else:
            mixed.append(i)
    for version, members in sorted(by_version.items()):
        _replay_packed(model, weights(version), filters, [rollouts[i] for i in members], members, out)
    if mixed:
        _replay_mixed(model, weights, filters, [rollouts[i] for i in mixed], mixed, out)
    return out


def writers(rollout: rollout_lib.Rollout) -> np.ndarray:
    """Returns the policy version that ran each position of a rollout but the last: it sampled the next token, or prefilled this one."""
    return np.where(rollout.sampled_mask[1:], rollout.versions[1:], rollout.versions[:-1])


def _any_names_experts(rollouts: Sequence[rollout_lib.Rollout]) -> bool:
    return any(rollout.routed_experts is not None for rollout in rollouts)


# ---- one version: packed ---------------------------------------------------------------------------------------------


def _replay_packed(model, params, filters, rollouts, rows_of_out, out: _Arrays) -> None:
    blocks, block_of, columns = _pack(rollouts, model)
    which, sampled = _sampled_tokens(rollouts, columns)
    members = [np.flatnonzero(block_of[which] == m) for m in range(len(blocks["tokens"]))]
    rows, N = np.asarray(rows_of_out)[which], _padded(blocks["tokens"][0].size, model)

    def run(m: int) -> dict[str, jax.Array]:
        fill = np.resize(members[m], N)  # repeated to fill up
        targets = jax.tree.map(lambda x: x[fill], sampled)
        of_block = {name: array[m] for name, array in blocks.items()}
        return _run_block(model, params, of_block, targets, np.int32(len(members[m])), filters)

    def take(m: int, scores: dict[str, jax.Array]) -> None:
        if (gap_BT := scores.pop("gap", None)) is not None and "gap" in out:
            gap_N = np.asarray(gap_BT).reshape(-1)
            for i in np.flatnonzero(block_of == m):
                out["gap"][rows_of_out[i], : len(columns[i])] = gap_N[columns[i]]
        _store(scores, rows[members[m]], sampled.position[members[m]], out)

    before = run(0)
    for m in range(1, len(members)):
        after = run(m)
        take(m - 1, before)  # while block m runs; a third one is never in memory
        before = after
    take(len(members) - 1, before)


def _store(scores: dict[str, jax.Array], rows: np.ndarray, positions: np.ndarray, out: _Arrays) -> None:
    """Copies the first len(rows) scores to (rows, positions) in `out`. As uint16, numpy copies bfloat16 faster."""
    for name, values in scores.items():
        found, into = np.asarray(values)[: len(rows)], out[name]
        if into.dtype == jnp.bfloat16:
            found, into = found.view(np.uint16), into.view(np.uint16)
        into[rows, positions] = found


def _pack(
    rollouts: Sequence[rollout_lib.Rollout], model: config_lib.ModelConfig
) -> tuple[dict[str, np.ndarray], np.ndarray, list[np.ndarray]]:
    """Packs rollouts. Returns (blocks of arrays [M, B, T], the block of each rollout, the flat columns of each rollout's tokens)."""
    longest = max(len(r.tokens) for r in rollouts)
    # Four lengths to an octave: few programs, little padding.
    step = max(1 << max(longest.bit_length() - 3, 0), MIN_ROW_STEP)
    unit, groups = -(-longest // step) * step, _by_prompt(rollouts)
    layouts = [(T, _rows(rollouts, groups, T)) for T in (int(unit * factor) for factor in ROW_LENGTHS)]
    # Work in tokens: one each, and as much again for every 3 D keys that it reads.
    T, rows = min(layouts, key=lambda layout: len(layout[1]) * layout[0] * (1 + layout[0] / (3 * model.model_dim)))
    B = max(1, BLOCK_TOKENS // T)
    M = -(-len(rows) // B)
    flat = {name: np.zeros((M, B * T), np.int32) for name in ("tokens", "positions", "segment_ids", "branch_ids")}
    claims = router_replay.RouterReplay.of(model)
    if _any_names_experts(rollouts):
        flat["routed_experts"] = claims.empty(M, B * T)
    block_of, columns = np.zeros(len(rollouts), int), [np.empty(0, int)] * len(rollouts)
    for row, trees in enumerate(rows):
        m, b = divmod(row, B)
        begin = b * T
        for segment, (prompt_len, members) in enumerate(trees, start=1):
            prompt = np.arange(begin, begin + prompt_len)
            begin += prompt_len
            for branch, i in enumerate(members, start=1):
                own = np.arange(begin, begin + len(rollouts[i].tokens) - prompt_len)
                begin += len(own)
                at = m, np.concatenate([prompt, own])
                block_of[i], columns[i] = at
                flat["tokens"][at] = rollouts[i].tokens
                flat["positions"][at] = np.arange(len(rollouts[i].tokens))
                flat["segment_ids"][at] = segment
                flat["branch_ids"][m, own] = branch
                if rollouts[i].routed_experts is not None:
                    flat["routed_experts"][at] = claims.rows(rollouts[i])
    return {name: array.reshape(M, B, T, *array.shape[2:]) for name, array in flat.items()}, block_of, columns


def _by_prompt(rollouts: Sequence[rollout_lib.Rollout]) -> list[tuple[int, list[int]]]:
    """Groups rollouts by prompt. Returns (length of the shared prompt, indices of its rollouts) per prompt.

    For rollouts that name their experts, the shared prompt ends before its last token, which each sample ran separately.
    """
    groups: dict[tuple[bytes, bytes | None], tuple[int, list[int]]] = {}
    for i, rollout in enumerate(rollouts):
        prompt_len, experts = rollout.prompt_length, None
        if rollout.routed_experts is not None:
            prompt_len -= 1
            experts = rollout.routed_experts[:prompt_len].tobytes()
        groups.setdefault((rollout.tokens[:prompt_len].tobytes(), experts), (prompt_len, []))[1].append(i)
    return list(groups.values())


def _rows(rollouts, groups: list[tuple[int, list[int]]], T: int) -> list[list[tuple[int, list[int]]]]:
    """Packs groups of one prompt into rows of T tokens. Returns the (prompt length, rollouts) in each row; long groups are split."""
    trees, sizes = [], []
    for prompt_len, members in groups:
        size = T + 1
        for i in members:
            length = len(rollouts[i].tokens) - prompt_len
            if size + length > T:
                size = prompt_len
                trees.append((prompt_len, []))
                sizes.append(size)
            size += length
            trees[-1][1].append(i)
            sizes[-1] = size
    return [[trees[k] for k in row] for row in packing.first_fit(sizes, T)]


def _sampled_tokens(
    rollouts: Sequence[rollout_lib.Rollout], columns: Sequence[np.ndarray]
) -> tuple[np.ndarray, _Targets]:
    """Returns (rollout index of each sampled token [N], the sampled tokens as targets). `columns` has those of every token per rollout."""
    positions = [np.flatnonzero(rollout.sampled_mask) for rollout in rollouts]
    which = np.repeat(np.arange(len(rollouts)), [len(position) for position in positions])
    width = max((_kept_width(rollout) for rollout in rollouts), default=0)
    kept = np.full((len(which), 1 << (width - 1).bit_length() if width else 0), -1, np.int32)
    for i, rollout in enumerate(rollouts):
        if rollout.kept:
            lengths = [end - start for start, end in rollout.spans]
            kept[which == i] = kept_sets.decode(rollout.kept, lengths, kept.shape[1])
    tokens = np.concatenate([rollout.tokens[rollout.sampled_mask] for rollout in rollouts])
    seeds = np.array([rollout.seed for rollout in rollouts], np.uint32)
    temperatures = np.array([rollout.temperature for rollout in rollouts], np.float32)
    # The token before predicts a token; a prompt's end predicts every first one.
    column_N = np.concatenate([c[position - 1] for c, position in zip(columns, positions, strict=True)])
    position_N = np.concatenate(positions).astype(np.int32)
    return which, _Targets(column_N.astype(np.int32), tokens, position_N, seeds[which], temperatures[which], kept)


def _kept_width(rollout: rollout_lib.Rollout) -> int:
    """Returns the size of the largest kept set that a well-formed rollout claims; 0 without a claim."""
    counts, _ = kept_sets.read(rollout.kept, [end - start for start, end in rollout.spans] if rollout.kept else [])
    return int(counts.max(initial=0))


def _padded(num_targets: int, model: config_lib.ModelConfig) -> int:
    """Rounds a number of targets up to whole parts that are scored together."""
    return -(-num_targets // _part(model)) * _part(model)


def _part(model: config_lib.ModelConfig) -> int:
    least, most = SCORED_TOKENS
    return min(max(SCORED_ENTRIES // model.vocab_size // least * least, least), most)


@functools.partial(jax.jit, static_argnums=0)
@transformer.precise
def _run_block(model, params, block: dict, targets: _Targets, num_targets, filters) -> dict[str, jax.Array]:
    """Runs the model on one block. Returns the scores of its targets [N, ...], and "gap" (router margins [B, T]) if experts are named."""
    hidden_BTD, routing = transformer.apply(
        params,
        model,
        block["tokens"],
        positions_BT=block["positions"],
        segment_ids_BT=block["segment_ids"],
        branch_ids_BT=block["branch_ids"],
        experts_LBTX=router_replay.given(block.get("routed_experts")),
    )
    scores = _score_all(model, params, hidden_BTD.reshape(-1, model.model_dim), targets, num_targets, filters)
    return scores if routing is None or routing.margin is None else scores | {"gap": routing.margin.max(axis=0)}


@functools.partial(jax.jit, static_argnums=0)
@transformer.precise
def _score_all(model, params, hidden_CD, targets: _Targets, num_targets, filters) -> dict[str, jax.Array]:
    """Returns the scores of the first `num_targets` of N targets, computed S at a time; `hidden_CD` has the states of all columns."""
    hidden_ND = hidden_CD[targets.column]
    N, S = len(targets.token), _part(model)
    assert N % S == 0

    def some(i, out):
        hidden_SD, part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * S, S), (hidden_ND, targets))
        scores = _score(model, params, hidden_SD, part, filters)
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, i * S, 0), out, scores)

    shapes = jax.eval_shape(
        lambda: _score(model, params, hidden_ND[:S], jax.tree.map(lambda x: x[:S], targets), filters)
    )
    blank = jax.tree.map(lambda x: jnp.zeros((N, *x.shape[1:]), x.dtype), shapes)
    return jax.lax.fori_loop(0, -(-num_targets // S), some, blank)


def _score(model, params, hidden_SD, targets: _Targets, filters) -> dict[str, jax.Array]:
    """Returns lead, margin, logp, tilt, hidden, and kept_gap (see `Replayed`) of S tokens, given the hidden states that predict them."""
    repeated = {name: jnp.broadcast_to(value, targets.seed.shape) for name, value in filters.items()}
    sampling = sampler.Sampling(seed=targets.seed, temperature=targets.temperature, **repeated)
    logits_SV = transformer.logits(params, model, hidden_SD[None])[0]
    logp_SV, kept_gap_S = sampler.scores(logits_SV, sampling), jnp.zeros(len(targets.token))
    if targets.kept.shape[1]:
        logits_SV /= jnp.where(targets.temperature > 0, targets.temperature, 1.0)[:, None]
        claimed_SV = sampler.restricted(logits_SV, targets.kept)
        kept_gap_S = kept_gap(logits_SV, claimed_SV > -jnp.inf, filters)
        logp_SV = jnp.where(targets.kept[:, :1] >= 0, claimed_SV, logp_SV)  # held-out rollouts claim none
    noise_SV = sampler.noise(targets.seed, targets.position, logp_SV.shape[-1])
    noised_SV = logp_SV + jnp.where(targets.temperature > 0, 1.0, 0.0)[:, None] * noise_SV
    at_S1 = targets.token[:, None]
    logp_S = jnp.take_along_axis(logp_SV, at_S1, axis=-1)[:, 0]
    tilts = [(b - 1) * logp_S - jax.nn.logsumexp(b * logp_SV, axis=-1) for b in sequential_test.TILTS]
    best_S = noised_SV.max(axis=-1)
    is_best_SV = jnp.arange(noised_SV.shape[-1])[None] == noised_SV.argmax(axis=-1)[:, None]
    return {
        "lead": best_S - jnp.where(is_best_SV, -jnp.inf, noised_SV).max(axis=-1),
        "margin": best_S - jnp.take_along_axis(noised_SV, at_S1, axis=-1)[:, 0],
        "logp": logp_S,
        "tilt": jnp.stack(tilts, axis=-1),
        "hidden": hidden_SD.astype(jnp.bfloat16),
        "kept_gap": kept_gap_S,
    }


def kept_gap(logits_SV: jax.Array, is_kept_SV: jax.Array, filters: dict) -> jax.Array:
    """Returns [S]: by how many nats logits would have to change for the filters to keep exactly the claimed entries; 0 if they do.

    The gap is the largest of three misses. (1) An entry that was left out is likelier than one that was kept. (2) The least likely kept
    entry misses a filter; the filter that it misses most counts. (3) The likeliest entry that was left out passes all filters; the
    filter that it passes by least counts. A mass m is log(m / (1 - m)) in nats. The mass before an entry is that of likelier entries
    alone, within the first k.
    """
    V = logits_SV.shape[-1]
    lowest_S1 = jnp.where(is_kept_SV, logits_SV, jnp.inf).min(axis=-1, keepdims=True)
    next_S1 = jnp.where(is_kept_SV, -jnp.inf, logits_SV).max(axis=-1, keepdims=True)
    top_SV, count_S1 = -jnp.sort(-logits_SV, axis=-1), is_kept_SV.sum(axis=-1, keepdims=True)
    k = jnp.where(filters["top_k"] > 0, jnp.minimum(filters["top_k"], V), V)
    top_S1, kth_S1 = top_SV[:, :1], jnp.take(top_SV, k - 1, axis=-1)[:, None]
    probs_SV = jax.nn.softmax(jnp.where(jnp.arange(V) < k, top_SV, -jnp.inf), axis=-1)
    mass_SV = jnp.cumsum(probs_SV, axis=-1)
    odds_S1, least_S1 = jax.scipy.special.logit(filters["top_p"]), top_S1 + jnp.log(filters["min_p"])

    def excess(n_S1):  # of the mass of the n likeliest over top_p; an entry after them is left out if it is above 0
        before_S1 = jnp.take_along_axis(mass_SV, jnp.clip(n_S1 - 1, 0), axis=-1)
        odds = jax.scipy.special.logit(jnp.clip(before_S1, 1e-7, 1 - 1e-7)) - odds_S1
        return jnp.where((n_S1 > 0) & (filters["top_p"] < 1), odds, -jnp.inf)

    over_S1 = jnp.maximum(jnp.maximum(kth_S1 - lowest_S1, excess(count_S1 - 1)), least_S1 - lowest_S1)
    after_S1 = jnp.take(top_SV, jnp.minimum(k, V - 1), axis=-1)[:, None]  # the first that is not among the k likeliest
    out_S1 = jnp.where(k < V, jnp.where(count_S1 >= k, jnp.inf, after_S1 - next_S1), -jnp.inf)
    out_S1 = jnp.maximum(jnp.maximum(out_S1, excess(count_S1)), least_S1 - next_S1)
    has_rest_S1 = count_S1 < V
    under_S1 = jnp.where(has_rest_S1, jnp.maximum(-out_S1, next_S1 - lowest_S1), -jnp.inf)
    over_S1 = jnp.where(count_S1 == 1, -jnp.inf, over_S1)  # the likeliest one always stays
    too_many_S1 = jnp.where(count_S1 > k, jnp.inf, -jnp.inf)
    return jnp.maximum(jnp.maximum(over_S1, under_S1), jnp.maximum(too_many_S1, 0.0))[:, 0]


# ---- several versions: one pass of each over the same keys -----------------------------------------------------------


def _replay_mixed(model, weights, filters, rollouts, rows_of_out, out: _Arrays) -> None:
    G, T = 1 << (len(rollouts) - 1).bit_length(), out["margin"].shape[1]
    tokens_GT, writer_GT = np.zeros((G, T), np.int32), np.full((G, T), -1, np.int32)
    claims = router_replay.RouterReplay.of(model)
    experts = claims.empty(G, T) if _any_names_experts(rollouts) else None
    for i, rollout in enumerate(rollouts):
        n = len(rollout.tokens)
        tokens_GT[i, :n], writer_GT[i, : n - 1] = rollout.tokens, writers(rollout)
        if experts is not None and rollout.routed_experts is not None:
            experts[i, :n] = claims.rows(rollout)
    which, sampled = _sampled_tokens(rollouts, [i * T + np.arange(T) for i in range(len(rollouts))])
    sampler_version, rows = writer_GT.reshape(-1)[sampled.column], np.asarray(rows_of_out)
    cache = kv_cache.create(model, G, T)
    for version in np.unique(writer_GT[writer_GT >= 0]).tolist():
        params = weights(version)
        hidden_CD, cache, gap_GT = _run_version(model, params, tokens_GT, writer_GT == version, cache, experts)
        if "gap" in out and gap_GT is not None:
            i, t = np.nonzero(writer_GT == version)
            out["gap"][rows[i], t] = np.asarray(gap_GT)[i, t]
        mine = sampler_version == version
        if not mine.any():  # it prefilled a prompt only
            continue
        count = int(mine.sum())
        N = _padded(1 << (count - 1).bit_length(), model)
        fill = np.resize(np.flatnonzero(mine), N)
        targets = jax.tree.map(lambda x, fill=fill: x[fill], sampled)
        scores = _score_all(model, params, hidden_CD, targets, np.int32(count), filters)
        _store(scores, rows[which[mine]], sampled.position[mine], out)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
@transformer.precise
def _run_version(model, params, tokens_GT, written_GT, cache, experts_GTLX):
    """Runs one policy version over all tokens. It writes keys to the KV cache only at its own positions (`written_GT`).

    Returns (hidden states [G T, D] of all positions, the cache, router margins [G, T] or None if no experts are named).
    """
    (G, T), start_G = tokens_GT.shape, jnp.zeros(len(tokens_GT), jnp.int32)
    attend = kv_cache.attend_at(start_G, write_BT=written_GT, implementation=model.attention)
    positions_GT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (G, T))
    given = router_replay.given(experts_GTLX)
    hidden_GTD, cache, routing = transformer.extend(
        params, model, tokens_GT, positions_GT, cache, attend, experts_LBTX=given
    )
    gap_GT = None if routing is None or routing.margin is None else routing.margin.max(axis=0)
    return hidden_GTD.reshape(G * T, -1), cache, gap_GT
