"""The validator accepts what the scheduler honestly made, also across versions, and refuses each way to cheat, by name.

The weights are 32 wide and the same machine replays, so honest margins are rounding: nothing is forgiven.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import signal
import threading
import time
import types

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.proofs import toploc
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import web
from models import transformer
from models.text import tokenizer as tokenizer_lib
from rl.envs import scorer
from rl.ledger import balances, events
from rl.ledger import ledger as ledger_lib
from rl.validator import calibrate, routes, work_units
from rl.validator import service as service_lib
from rl.validator import state as validator_state
from rl.verification import replay as replay_lib
from rl.verification import sequential_test
from rl.verification import verifier as validator_lib
from sharding import broadcast, rules
from sharding.system import sockets as listening
from tests.support import commands, doubles, tiny

MODEL = tiny.model()
K, CAPACITY = 4, 64
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=CAPACITY, prefill_batch=2, steps_per_call=K)
# Engine and replay are float32 programs of different shapes: log-probabilities near 10 agree to a few ulp (measured 4e-6).
STRICT = validator_lib.Tolerance(margin=1e-4, max_wrong_tokens=0, logprob=1e-4)
WAIT_S = 60
PROMPT = tuple(b"hello")
HONEST = scheduler_lib.GenerateRequest(PROMPT, num_samples=4, max_tokens=50, seed=2**32 - 2, proofs=True)


@functools.cache
def params(version):
    rng = np.random.default_rng(version)

    def draw(spec):
        if len(spec.shape) == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, spec.shape), jnp.float32)
        return jnp.asarray(rng.standard_normal(spec.shape) * MODEL.model_dim**-0.5, jnp.float32)

    return jax.tree.map(draw, transformer.specs(MODEL), is_leaf=rules.is_spec)


def weights(version):
    if version > 9:
        raise FileNotFoundError(f"no version {version}")
    return params(version)


class Updating(engine_lib.Engine):
    """Before the n-th `generate` call, an update is sent; it is in force from the next call on."""

    updates, scheduler, calls = {}, None, 0

    def generate(self, params_, state):
        self.calls += 1
        if self.calls in self.updates:
            self.scheduler.update(params(self.updates[self.calls]), self.updates[self.calls])
        return super().generate(params_, state)


def rollouts_of(request, *, version=0, updates=None, **claims):
    """The group a scheduler makes of `request`, as a worker writes it down."""
    engine = Updating(MODEL, CONFIG, tokenizer_lib.byte_chatml(), params(version))
    scheduler = scheduler_lib.Scheduler(engine, params(version), version)
    engine.scheduler, engine.updates = scheduler, updates or {}
    completions = scheduler.submit(request).result(WAIT_S)
    scheduler.close()
    P = len(request.tokens)
    return [
        rollout_lib.Rollout(
            **dict(
                tokens=np.array([*request.tokens, *c.tokens], np.int32),
                sampled_mask=np.array([False] * P + [True] * len(c.tokens)),
                logprobs=np.array([0.0] * P + c.logprobs, np.float32),
                versions=np.array([c.prompt_version] * P + c.versions, np.int32),
                temperature=request.temperature,
                seed=(request.seed + index) % 2**32,
                task=rollout_lib.TaskRef("reverse_text", 0, 0, 0),
                sample=index,
                step=1,
                reward=0.0,
                rewards={},
                finish_reason=c.finish_reason,
                proofs=c.proofs,
                worker="",
                signature=b"",
            )
            | claims
        )
        for index, c in enumerate(completions)
    ]


def check(rollouts, filters=request_lib.NO_FILTERS, tolerance=STRICT):
    return validator_lib.Validator(MODEL, weights, filters, tolerance, max_model_len=CAPACITY).check(rollouts)


@functools.cache
def honest():
    return rollouts_of(HONEST)


def with_sample(changed, index=2):
    """The honest group with one of its four replaced."""
    return [changed if i == index else rollout for i, rollout in enumerate(honest())]


def edited(name, position, value):
    rollout = honest()[2]
    array = getattr(rollout, name).copy()
    array[position] = value
    return with_sample(dataclasses.replace(rollout, **{name: array}))


# ---- honest ----------------------------------------------------------------------------------------------------------


def test_an_honest_group_passes():
    assert len({tuple(rollout.tokens) for rollout in honest()}) == 4
    assert check(honest()) is None
    replay = validator_lib.Validator(MODEL, weights, request_lib.NO_FILTERS, STRICT, max_model_len=CAPACITY).replay(
        honest()
    )
    for i, rollout in enumerate(honest()):
        sampled = np.flatnonzero(rollout.sampled_mask)
        # The replay's own float32: the token is the argmax but where two noised logits are closer than that.
        assert replay.margin[i, sampled].max() <= 1e-5
        np.testing.assert_allclose(replay.logp[i, sampled], rollout.logprobs[sampled], rtol=0, atol=2e-5)
        assert replay.hidden.dtype == jnp.bfloat16 and replay.hidden.shape == (4, CAPACITY, MODEL.model_dim)


def test_the_replay_scores_tempered_distributions():
    """Against the learner's forward pass and float64: log q(token) / p(token), q ~ p^b."""
    rollout = honest()[0]
    replay = validator_lib.Validator(MODEL, weights, request_lib.NO_FILTERS, STRICT, max_model_len=CAPACITY).replay(
        honest()
    )
    tokens_BT = jnp.asarray(rollout.tokens)[None]
    logits_TV = transformer.logits(params(0), MODEL, transformer.apply(params(0), MODEL, tokens_BT)[0])[0]
    logp_TV = np.asarray(logits_TV, np.float64)
    logp_TV -= np.log(np.exp(logp_TV).sum(-1, keepdims=True))
    for position in np.flatnonzero(rollout.sampled_mask):
        logp_V, token = logp_TV[position - 1], rollout.tokens[position]
        for k, b in enumerate(sequential_test.TILTS):
            q_V = np.exp(b * logp_V) / np.exp(b * logp_V).sum()
            # float32 log-probabilities near 10, times b = 4 at most: some 1e-5; a wrong exponent is off by tenths
            assert replay.tilt[0, position, k] == pytest.approx(np.log(q_V[token]) - logp_V[token], abs=1e-3)


@pytest.mark.parametrize("model_dim", [8, 256, 4096])
def test_every_sampled_token_is_packed_behind_its_own_prefix(model_dim):
    """What the predicting column may read, by segment and branch, spells the rollout up to there; none is left out."""
    rng = np.random.default_rng(model_dim)
    for _ in range(15):
        rollouts = []
        for _ in range(rng.integers(1, 6)):
            prompt = rng.integers(0, 250, rng.integers(1, 40))
            for _ in range(rng.integers(1, 9)):
                tokens = np.concatenate([prompt, rng.integers(0, 250, rng.integers(1, 60))]).astype(np.int32)
                mask = np.arange(len(tokens)) >= len(prompt)
                mask[len(prompt) + 1 :] &= rng.random(len(tokens) - len(prompt) - 1) < 0.8  # several turns
                claims = dict(tokens=tokens, sampled_mask=mask, seed=int(rng.integers(100)), temperature=0.5)
                rollouts.append(dataclasses.replace(honest()[0], **claims))
        blocks, places, _ = replay_lib._pack(rollouts, tiny.model(model_dim=model_dim))
        assert {(i, t) for i, t, *_ in places.tolist()} == {
            (i, t) for i, rollout in enumerate(rollouts) for t in np.flatnonzero(rollout.sampled_mask).tolist()
        }
        assert len(places) == blocks.num_targets.sum() and blocks.segment_ids.any(axis=(1, 2)).all()
        for i, position, m, n in places.tolist():
            rollout, targets = rollouts[i], blocks.targets
            row, column = divmod(int(targets.column[m, n]), blocks.tokens.shape[-1])
            tokens, positions, segments, branches = (
                x[m, row, : column + 1]
                for x in (blocks.tokens, blocks.positions, blocks.segment_ids, blocks.branch_ids)
            )
            seen = (segments == segments[-1]) & ((branches == 0) | (branches == branches[-1]))
            assert tokens[seen].tolist() == rollout.tokens[:position].tolist() and segments[-1] > 0
            assert positions[seen].tolist() == list(range(position)) and n < blocks.num_targets[m]
            claim = (targets.token[m, n], targets.position[m, n], targets.seed[m, n], targets.temperature[m, n])
            assert claim == (rollout.tokens[position], position, rollout.seed, 0.5)


def test_rollouts_packed_together_are_replayed_as_each_alone():
    """Groups of several prompts and lengths, one with more branches than a row holds, one of two turns; against the pass
    over a cache that rollouts of several versions take."""
    filters = {"top_k": 50, "top_p": 0.95, "min_p": 0.0}
    rollouts = []
    for seed, (prompt_len, samples, num_new) in enumerate([(30, 4, 60), (7, 3, 20), (40, 1, 5), (1, 2, 33)]):
        prompt = tuple(np.random.default_rng(seed).integers(0, 256, prompt_len).tolist())
        request = dataclasses.replace(
            HONEST, tokens=prompt, num_samples=samples, max_tokens=num_new, seed=seed, temperature=0.8 + 0.1 * seed
        )
        rollouts += rollouts_of(request)
    two_turns = rollouts[0].sampled_mask.copy()
    two_turns[40:50] = False
    rollouts.append(dataclasses.replace(rollouts[0], sampled_mask=two_turns))
    together = replay_lib.replay(MODEL, weights, filters, rollouts, CAPACITY)
    alone = jax.tree.map(np.zeros_like, dataclasses.asdict(together))
    replay_lib._replay_mixed(MODEL, weights, filters, rollouts, range(len(rollouts)), replay_lib.Replay(**alone))
    for row, rollout in enumerate(rollouts):
        sampled = np.flatnonzero(rollout.sampled_mask)
        for name in ("margin", "logp", "tilt"):
            got, expected = getattr(together, name)[row, sampled], alone[name][row, sampled]
            # float32 programs of other shapes; tilts are logs of up to four times as much
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
        got, expected = (x.hidden[row, sampled].astype(np.float32) for x in (together, replay_lib.Replay(**alone)))
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-4)  # a unit of bfloat16
        assert np.isfinite(together.logp[row, sampled]).any()  # others lie outside these filters


@pytest.mark.parametrize(
    ("request_", "filters"),
    [
        (dataclasses.replace(HONEST, temperature=0.0), request_lib.NO_FILTERS),
        (
            dataclasses.replace(HONEST, temperature=0.6, top_k=30, top_p=0.9),
            request_lib.NO_FILTERS | {"top_k": 30, "top_p": 0.9},
        ),
        (scheduler_lib.GenerateRequest((3,), num_samples=4, max_tokens=1, proofs=True), request_lib.NO_FILTERS),
        (
            scheduler_lib.GenerateRequest(tuple(range(40)), num_samples=4, max_tokens=99, proofs=True),
            request_lib.NO_FILTERS,
        ),
    ],
    ids=["greedy", "filtered", "one token", "to the end of the context"],
)
def test_other_honest_groups_pass(request_, filters):
    assert check(rollouts_of(request_), filters) is None


@pytest.mark.parametrize(
    "updates", [{5: 1}, {1: 1}, {3: 1, 4: 2, 9: 5}, {2: 7, 3: 8}], ids=["two", "first call", "four", "three"]
)
def test_a_group_that_spans_versions_passes_exactly(updates):
    """Weights changed while it was generated: the replay gives each position's keys to the version that wrote them."""
    rollouts = rollouts_of(HONEST, updates=updates)
    boundaries = [K * call for call in updates]
    for rollout in rollouts:
        sampled = rollout.versions[rollout.sampled_mask]
        assert (np.flatnonzero(np.diff(sampled)) + 1).tolist() == boundaries and rollout.versions[0] == 0
    assert check(rollouts) is None


@pytest.mark.parametrize(("position", "version"), [(19, 1), (20, 0)], ids=["early", "late"])
def test_a_moved_version_stamp_is_refused(position, version):
    """One token's stamp, at the boundary."""
    rollouts = rollouts_of(HONEST, updates={5: 1})
    moved = rollouts[1].versions.copy()
    at = len(PROMPT) + position
    assert moved[at] == 1 - version
    moved[at] = version
    rollouts[1] = dataclasses.replace(rollouts[1], versions=moved)
    assert check(rollouts).startswith(("sampling: ", "logprob: "))


def test_a_prompt_under_another_version_is_refused():
    """The prefill's version counts too: the prompt's keys are in every later token."""
    rollouts = rollouts_of(HONEST, updates={1: 1})  # all but the first call by version 1
    versions = np.where(np.arange(len(rollouts[0].versions)) < len(PROMPT), 1, rollouts[0].versions).astype(np.int32)
    rollouts[0] = dataclasses.replace(rollouts[0], versions=versions)
    assert check(rollouts).startswith(("sampling: ", "logprob: "))


# ---- cheats ----------------------------------------------------------------------------------------------------------


def test_other_weights():
    """A stale, or smaller, or quantised policy under the name of version 0."""
    claimed = [
        dataclasses.replace(rollout, versions=np.zeros_like(rollout.versions))
        for rollout in rollouts_of(HONEST, version=1)
    ]
    assert check(claimed).startswith("sampling: ")


def test_an_edited_token():
    position = len(PROMPT) + 20
    token = int(honest()[2].tokens[position])
    reason = check(edited("tokens", position, (token + 1) % 256))
    assert reason.startswith("sampling: ") and f"of {HONEST.max_tokens} tokens are not what the seed draws" in reason


def test_an_edited_prompt():
    assert check(edited("tokens", 1, ord("u"))).startswith("sampling: ")


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.2])
def test_another_temperature_than_claimed(temperature):
    """Greedy decoding among them: tokens without the noise of the seed."""
    cheat = rollouts_of(dataclasses.replace(HONEST, temperature=temperature), temperature=1.0)
    assert check(cheat).startswith("sampling: ")


def test_filters_that_were_not_prescribed():
    cheat = rollouts_of(dataclasses.replace(HONEST, top_k=2))
    assert check(cheat).startswith("sampling: ")
    assert check(honest(), request_lib.NO_FILTERS | {"top_k": 2}).startswith("sampling: ")


def test_another_seed_than_claimed():
    """Drawn again until it pleased."""
    assert check(with_sample(dataclasses.replace(honest()[2], seed=12345))).startswith("sampling: ")
    swapped = dataclasses.replace(honest()[2], seed=honest()[1].seed)
    assert check(with_sample(swapped)).startswith("sampling: ")


@pytest.mark.parametrize("change", [0.01, -0.01])
def test_a_log_probability_that_was_touched(change):
    position = len(PROMPT) + 7
    value = min(float(honest()[2].logprobs[position]) + change, 0.0)
    assert check(edited("logprobs", position, value)).startswith("logprob: claimed and replayed differ by 0.0")


def constant_proof():
    """f = the bits of 1.0 everywhere: right in the exponent for most large activations, with no forward pass."""
    wire = np.zeros(129, ">u2")
    wire[0], wire[1] = toploc.PRIME, 0x3F80
    return wire.tobytes()


def test_the_proof_of_another_rollout():
    assert check(with_sample(dataclasses.replace(honest()[2], proofs=honest()[1].proofs))).startswith("toploc: ")


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda proofs: b"", "toploc: count"),
        (lambda proofs: proofs[:-1], "toploc: count"),
        (lambda proofs: proofs[:258], "toploc: count"),
        (lambda proofs: proofs + b"\0", "toploc: count"),
        (lambda proofs: constant_proof() * 2, "toploc: low_entropy"),
        (lambda proofs: proofs[258:] + proofs[:258], "toploc: exponent"),
        (lambda proofs: b"\0" * len(proofs), "toploc: modulus"),
        (lambda proofs: b"\xff" * len(proofs), "toploc: modulus"),
        (lambda proofs: proofs[:2] + b"\xff\xff" + proofs[4:], "toploc: coefficient"),
    ],
    ids=["empty", "truncated", "one of two", "longer", "constant", "swapped", "zeros", "ones", "unreduced"],
)
def test_forged_proofs(forge, reason):
    assert len(honest()[2].proofs) == 2 * 258
    assert check(with_sample(dataclasses.replace(honest()[2], proofs=forge(honest()[2].proofs)))).startswith(reason)


def test_a_proof_of_a_perturbed_model():
    """Tokens and log-probabilities copied from the honest weights, hidden states from others."""
    other = rollouts_of(HONEST, version=1)[2].proofs
    assert check(with_sample(dataclasses.replace(honest()[2], proofs=other))).startswith("toploc: ")


def test_a_version_that_cannot_be_had():
    reason = check(edited("versions", slice(30, None), 10))
    assert reason == "weights: a version that it names cannot be had (no version 10)"


def test_a_stream_that_is_too_long():
    long = dataclasses.replace(
        honest()[2],
        **{
            name: np.concatenate([getattr(honest()[2], name)] * 2)
            for name in ("tokens", "sampled_mask", "logprobs", "versions")
        },
    )
    assert check(with_sample(long)) == f"length: {len(long.tokens)} tokens exceed the model's {CAPACITY}"


@pytest.mark.parametrize("token", [272, 2**31 - 1])
def test_a_token_outside_the_vocabulary(token):
    """XLA clamps and fills such an index; the verdict must not pass for that."""
    assert check(edited("tokens", len(PROMPT) + 3, token)).startswith(("sampling: ", "logprob: "))
    assert check(edited("tokens", -1, token)).startswith(("sampling: ", "logprob: "))


def test_a_few_wrong_tokens_can_be_allowed():
    """Across backends an argmax may flip: max_wrong_tokens forgives as many per rollout, and not one more."""
    rollouts = edited("tokens", -1, (int(honest()[2].tokens[-1]) + 1) % 256)  # the last: nothing follows from it
    loose = dataclasses.replace(STRICT, max_wrong_tokens=1, logprob=100.0)
    assert check(rollouts).startswith("sampling: 1 of ") and check(rollouts, tolerance=loose) is None
    assert check(rollouts, tolerance=dataclasses.replace(STRICT, max_wrong_tokens=1)).startswith("logprob: ")


# ---- weights by version ----------------------------------------------------------------------------------------------


def test_published_weights_are_verified_and_a_few_are_kept(tmp_path, monkeypatch):
    for version in range(4):
        broadcast.publish(params(version), version, str(tmp_path))
    pulled, pull = [], broadcast.pull
    monkeypatch.setattr(broadcast, "pull", lambda root, version: (pulled.append(version), pull(root, version))[1])
    get = validator_lib.published(tmp_path, keep=2)
    for version in (0, 1, 0, 2, 1, 0):
        np.testing.assert_array_equal(get(version)["embed"], params(version)["embed"])
    assert pulled == [0, 1, 2, 0]  # 2 put out 0, the oldest
    judge = validator_lib.Validator(MODEL, get, request_lib.NO_FILTERS, STRICT, max_model_len=CAPACITY)
    assert judge.check(honest()) is None
    assert judge.check(edited("versions", slice(30, None), 10)).startswith("weights: a version that it names cannot")
    for file in (tmp_path / "v00000003").rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            file.write_bytes(file.read_bytes()[:-1])
    assert judge.check(edited("versions", slice(30, None), 3)).startswith("weights: a version that it names cannot")


# ---- the service -----------------------------------------------------------------------------------------------------


def digest_of(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def service(tmp_path):
    """A service over two groups of the cheats' run, and a ledger in which their node has joined."""
    keeper = rollout_lib.WorkerKey.generate()
    book = ledger_lib.Ledger.create(tmp_path / "ledger.db", keeper)
    book.append(
        events.sign("join", doubles.NODE.worker, doubles.NODE),
        events.sign("stake", doubles.NODE.worker, doubles.NODE, amount=100),
    )
    (tmp_path / "files").mkdir()
    made = service_lib.Service(
        doubles.make_validator(prompts=2),
        doubles.prescribed(2),
        doubles.experiment().model,
        tmp_path / "files",
        lambda: 9,
        secret=b"s",
        state=validator_state.State(tmp_path / "state.db", "test", keep_steps=16),
        book=book,
        key=keeper,
        slash=30,
        eject=True,
    )
    yield made
    made.close()


@functools.cache
def batch(step=3):
    return tuple(doubles.honest(doubles.Double(step, prompts=2)))


def put(service, name, rollouts, *, units=None, node=doubles.NODE):
    """Writes a file and submits its work for the node; returns its hash."""
    data = rollouts if isinstance(rollouts, bytes) else parquet.to_bytes(list(rollouts))
    (service._root / name).write_bytes(data)
    if digest_of(data) not in service._book.state.works:
        units = units or (1 if isinstance(rollouts, bytes) else flops(rollouts))
        service._book.append(events.sign("submit", node.worker, node, work=digest_of(data), units=units))
    return digest_of(data)


def flops(rollouts):
    return sum(work_units.flops_of(doubles.experiment().model, r)[1] for r in rollouts)


def ask(service, name, shas, *, group=False, address=None):
    service.submit(name, shas, address, group=group)
    concurrent.futures.wait(list(service._jobs.values()), WAIT_S)
    return service.status(name, group=group)


def test_an_honest_file_is_accepted_once(service):
    sha = put(service, "a.parquet", batch(), units=flops(batch()))
    status = ask(service, "a.parquet", [sha], address=doubles.NODE.worker)
    assert (status.status, status.failing_indices, status.checked) == ("accept", (), True)
    assert status.output_flops == flops(batch()) > 0 < status.input_flops
    work = service._book.state.works[sha]
    assert work.status == "accepted" and service._book.state.nodes[doubles.NODE.worker].num_checked == 1
    assert ask(service, "a.parquet", [sha], address=doubles.NODE.worker) == status  # asked again: nothing happens
    again = put(service, "b.parquet", batch()[::-1])
    status = ask(service, "b.parquet", [again])
    assert status.status == "reject" and status.reason.startswith("duplicate: this rollout was accepted before")
    assert service.counts == {"accept": 1, "reject duplicate": 1}


def test_a_group_falls_with_its_member_and_the_node_with_it(service):
    bad = list(batch())
    tokens = bad[3].tokens.copy()
    tokens[-2] = (tokens[-2] + 1) % 256
    bad[3] = rollout_lib.sign(dataclasses.replace(bad[3], tokens=tokens), doubles.NODE)
    sha = put(service, "a.parquet", bad, units=flops(bad))
    status = ask(service, "a.parquet", [sha])
    assert status.status == "reject" and list(status.reasons) == [3]
    assert status.failing_indices == tuple(range(8))  # the first group; the second is sound
    state = service._book.state
    assert state.nodes[doubles.NODE.worker].stake == 70 and state.nodes[doubles.NODE.worker].ejected
    assert state.works[sha].units == 0 and ledger_lib.verify(service._book._path).error is None
    assert not service._state.seen.refusal(batch()[0])  # may come again from an honest node
    assert service._state.seen.refusal(batch()[8])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: parquet.to_bytes(list(b))[:-9], "rollout file: not readable"),
        (lambda b: parquet.to_bytes([]), "file: a.parquet holds no rollout"),
        (lambda b: b[:15], "samples: expected 0..7 once each"),
        (lambda b: [dataclasses.replace(r, reward=0.5) for r in b], "signature: the key"),
        (lambda b: doubles.inflated_reward(doubles.Double(3, prompts=2)), "reward: reward is 1.0, recomputed"),
        (lambda b: doubles.honest(doubles.Double(1, prompts=2)) + list(b), "ok"),
    ],
)
def test_files_and_what_is_said_of_them(service, change, reason):
    sha = put(service, "a.parquet", change(batch()))
    status = ask(service, "a.parquet", [sha])
    assert (status.reason or "ok").startswith(reason) and (status.status == "accept") == (reason == "ok")


def test_units_must_be_what_was_measured(service):
    sha = put(service, "a.parquet", batch(), units=flops(batch()) + 2)
    status = ask(service, "a.parquet", [sha])
    assert status.status == "reject" and status.reason.startswith("units: ")
    assert service._book.state.balance(doubles.NODE.worker, 0).invalidated == flops(batch()) + 2


def test_what_an_asker_says_costs_nobody_anything(service):
    sha = put(service, "a.parquet", batch(), units=flops(batch()))
    for name, other, said in [
        ("a.parquet", "0" * 64, "is no work of this ledger"),
        ("a.parquet", put(service, "c.parquet", batch(5)), "the SHA-256 of a.parquet is another"),
        ("b.parquet", sha, "is not"),
    ]:
        with pytest.raises(ValueError, match=said):
            service.submit(name, [other])
    assert ask(service, "a.parquet", [sha], address="0" * 64).status == "accept"
    assert service.submit("a.parquet", [sha], "0" * 64).reason.startswith("signature: it is signed by another node")
    assert service.submit("a.parquet", [sha], doubles.NODE.worker).status == "accept"
    assert service.counts == {"accept": 1} and service._book.state.nodes[doubles.NODE.worker].stake == 100


def test_the_work_of_another_is_not_paid(service):
    thief = rollout_lib.WorkerKey.generate()
    service._book.append(events.sign("join", thief.worker, thief))
    sha = put(service, "a.parquet", batch(), node=thief)
    status = ask(service, "a.parquet", [sha])
    assert status.status == "reject" and status.reason.startswith(
        "signature: it is signed by another node than the one"
    )
    assert (
        service._book.state.nodes[thief.worker].ejected and not service._book.state.nodes[doubles.NODE.worker].ejected
    )


def test_a_borrowed_name_does_not_hide_a_cheat(service, monkeypatch):
    """The first file is of a node of good repute and fails by its signature; the second is a cheat's own."""
    good = rollout_lib.WorkerKey.generate()
    service._book.append(events.sign("join", good.worker, good))
    monkeypatch.setattr(balances.State, "reputation", lambda self, node: 0.9999 if node == good.worker else 0.0)
    monkeypatch.setattr(service_lib, "MIN_RATE", 0.0)
    shas = [
        put(service, "a-0.parquet", [dataclasses.replace(r, worker=good.worker) for r in batch()[:8]], node=good),
        put(service, "a-1.parquet", doubles.CHEATS["constant_proof"](doubles.Double(3, prompts=2))[8:]),
    ]
    status = ask(service, "a-0.parquet", shas, group=True)
    assert status.checked and status.reasons[0].startswith("signature") and status.reasons[1].startswith("toploc")


def test_names_stay_inside(service):
    sha = put(service, "a.parquet", batch())
    assert service.status("never.parquet").status == "unknown"
    (service._root / "link.parquet").symlink_to("/etc/passwd")
    for name in (
        "../a.parquet",
        "/etc/passwd.parquet",
        "a.txt",
        "",
        ".a.parquet",
        "x" * 300 + ".parquet",
        "link.parquet",
    ):
        with pytest.raises(ValueError, match="is no name of a rollout file|lies outside"):
            service.submit(name, [sha], None, group=False)
    with pytest.raises(ValueError, match="file_sha must be a SHA-256"):
        service.submit("a.parquet", ["xyz"], None, group=False)


def test_what_the_scorer_gives_up_on_is_worth_nothing_and_refuses_nothing():
    """Where all else of the group is sound; and the replay does not ask the scorer again."""
    asked, made = [], doubles.make_validator(prompts=2)
    score = made._rules.score

    def gives_up(group, completions):
        asked.append(group)
        out = score(group, completions)
        for i in (1, 4):
            out[i] = scorer.Scored(dict.fromkeys(out[i].scores, 0.0), 5.0, in_time=False)
        return out

    def claims(*samples):
        return [
            rollout_lib.sign(dataclasses.replace(r, reward=0.5, rewards=dict.fromkeys(r.rewards, 0.5)), doubles.NODE)
            if r.sample in samples
            else r
            for r in batch()[:8]
        ]

    assert not any(any(r.rewards.values()) for r in batch()[4:5])  # a claim of 0 agrees
    made._rules = dataclasses.replace(made._rules, score=gives_up)
    assert made.screen(claims(1)) == (None, {1})
    assert made.check(claims(1)) is None and len(asked) == 1
    reason, given_up = made.screen(claims(1, 3))  # the other claim is a lie, and found
    assert reason.startswith("reward: ") and "is 0.5, recomputed" in reason and not given_up
    assert made.screen(claims(1), "held_out")[0] is not None  # it is no held-out group


def test_evidence_outlives_a_restart_and_counts_each_rollout_once():
    """Killed behind the first group of a step: that comes again, and the record ends as it does without the kill."""
    first, second = list(batch()[:8]), list(batch()[8:])

    def bring(made, group):
        assert made.screen(group) == (None, frozenset()) and made.check(group) is None

    whole, killed, resumed = (doubles.make_validator(prompts=2) for _ in range(3))
    for group in (first, second, first):  # the last as after a stale batch
        bring(whole, group)
    bring(killed, first)
    resumed.restore(json.loads(json.dumps(killed.state(after=2))))
    for group in (first, second):
        bring(resumed, group)
    expected, found = (made.records[doubles.NODE.worker].state() for made in (whole, resumed))
    assert found["num_claims"] == expected["num_claims"] == found["num_rollouts"] == expected["num_rollouts"] == 16
    for name, values in expected["log_wealth"].items():
        np.testing.assert_allclose(
            found["log_wealth"][name], values, rtol=1e-4, err_msg=name
        )  # replayed in other company
    assert killed.state(after=3)["counted"] == [] != killed.state(after=2)["counted"]


def test_files_of_a_group_are_judged_together(service):
    halves = batch()[0::2], batch()[1::2]
    shas = [put(service, f"g-{i}.parquet", half) for i, half in enumerate(halves)]
    (service._root / "g-1.parquet").unlink()
    assert ask(service, "g-0.parquet", shas, group=True).status == "incomplete_group"
    put(service, "g-1.parquet", halves[1])
    status = ask(service, "g-0.parquet", shas, group=True)
    assert status.status == "accept" and status.output_flops == flops(batch())
    alone = put(service, "h-0.parquet", batch(5)[0::2])
    status = ask(service, "h-0.parquet", [alone], group=True)
    assert status.status == "incomplete_group" and status.reason.startswith("samples: ")
    with pytest.raises(ValueError, match="is no name of a group's file"):
        service.submit("a.parquet", [alone], None, group=True)


def test_flops_are_those_of_the_weights_one_token_at_a_time():
    model, rollout = doubles.experiment().model, batch()[0]
    layer = transformer.specs(model)["layers"]["000"]
    weights_ = [*(layer["attn"][name] for name in "qkvo"), *layer["mlp"].values()]
    counts = [0, 0]
    for position in range(len(rollout.tokens)):
        flops = sum(2 * int(np.prod(spec.shape)) for spec in weights_)
        flops += sum(4 * model.head_dim for _ in range(model.num_heads) for _ in range(position + 1))
        sampled = bool(rollout.sampled_mask[position])
        counts[sampled] += model.num_layers * flops + sampled * 2 * model.vocab_size * model.model_dim
    assert work_units.flops_of(model, rollout) == tuple(counts)


def test_good_repute_is_replayed_less(service, monkeypatch):
    assert all(service._is_drawn(doubles.NODE.worker, bytes([i])) for i in range(64))
    monkeypatch.setattr(balances.State, "reputation", lambda self, node: 0.9)
    drawn = sum(service._is_drawn(doubles.NODE.worker, i.to_bytes(2, "big")) for i in range(2000))
    assert 150 < drawn < 250  # a tenth: 200 +- 3.7 standard errors
    monkeypatch.setattr(balances.State, "reputation", lambda self, node: 0.9999)
    drawn = sum(service._is_drawn(doubles.NODE.worker, i.to_bytes(2, "big")) for i in range(2000))
    assert 60 < drawn < 140  # never below MIN_RATE


def test_a_fault_of_ours_is_a_crash_of_that_file_alone(service, monkeypatch):
    sha = put(service, "a.parquet", batch())
    with monkeypatch.context() as patch:
        patch.setattr(service._judge, "judge_cheaply", lambda *args: 1 / 0)
        status = ask(service, "a.parquet", [sha])
    assert status.status == "crashed" and "ZeroDivisionError" in status.reason
    assert ask(service, "b.parquet", [put(service, "b.parquet", batch())]).status == "accept"


def test_the_routes(service):
    sock = listening.listen("127.0.0.1", 0)
    server = web.server(routes.make_app(service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    with httpx.Client(base_url=listening.address(sock), timeout=WAIT_S) as http:
        sha = put(service, "a-0.parquet", batch())
        body = {"file_sha": sha, "address": doubles.NODE.worker}
        assert http.post("/validate/a-0.parquet", json=body).json()["status"] in ("pending", "accept")
        while (status := http.get("/status/a-0.parquet").json())["status"] == "pending":
            time.sleep(0.01)
        assert status["status"] == "accept" and set(status) >= {
            "input_flops",
            "output_flops",
            "failing_indices",
            "reason",
        }
        body = {"file_shas": [sha], "group_id": "a", "file_number": 0, "group_size": 1}
        http.post("/validategroup/a-0.parquet", json=body)
        while (status := http.get("/statusgroup/a-0.parquet").json())["status"] == "pending":
            time.sleep(0.01)
        assert status["status"] == "accept" and status["output_flops"] == flops(batch())
        assert http.get("/status/other").json()["status"] == "unknown"
        for route, bad in [
            ("/validate/a-0.parquet", {}),
            ("/validate/a-0.parquet", {"file_sha": "0" * 64}),
            ("/validate/..%2Fa.parquet", {"file_sha": sha}),
            ("/validate/a-0.parquet", {"file_sha": sha, "address": 3}),
            ("/validategroup/a-0.parquet", {"file_shas": "x"}),
            ("/validategroup/a-0.parquet", {"file_shas": [sha], "group_size": 2}),
            ("/validategroup/a-0.parquet", {"file_shas": []}),
        ]:
            reply = http.post(route, json=bad)
            assert reply.status_code == 400 and reply.json()["error"]["message"]
        assert http.post("/validate/a-0.parquet", content=b"{").status_code == 400
        assert http.get("/health").json()["verdicts"] == {"accept": 1}
    server.should_exit = True
    thread.join()


def test_an_interrupted_service_ends_in_order(tmp_path, monkeypatch):
    exp = doubles.experiment(prompts=2)
    (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(exp.config.to_json())}))
    closed = []

    def run(sockets):
        sockets[0].close()
        signal.raise_signal(signal.SIGINT)

    server = types.SimpleNamespace(run=run)
    monkeypatch.setattr(routes.web, "server", lambda app: server)
    monkeypatch.setattr(routes.validator_service.Service, "close", lambda self: closed.append(self))
    assert (
        commands.run("rl.validator", "serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path), "--port", "0")
        == 0
    )
    assert len(closed) == 1
    closed[0]._state.close()


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calibrated_limits_hold_what_was_measured(tmp_path):
    exp = doubles.experiment(prompts=2)
    judge = doubles.make_validator(prompts=2)
    variant = calibrate.VARIANTS["bfloat16"]
    rollouts = calibrate.variant_rollouts(exp, doubles.weights(0), 0, variant, 20, doubles.NODE)
    assert len(rollouts) == 20
    measured = calibrate.measure(judge, rollouts, doubles.FLOAT32)
    assert measured.num_rollouts == 20 and measured.num_refused > 10  # float32 limits are none for bfloat16
    tolerance, bands = calibrate.limits([measured])
    assert tolerance.margin >= measured.margin > doubles.FLOAT32.margin and bands.logprob > measured.mean["logprob"] > 0
    loose = doubles.make_validator(tolerance, bands, prompts=2)
    assert all(verdict.accepted for verdict in loose.judge_replayed(rollouts))
    validator_lib.save_bands(tmp_path / "bands.json", tolerance, bands, {})
    assert validator_lib.load_bands(tmp_path / "bands.json") == (tolerance, bands)
    for text in ("", "{}", "[]", (tmp_path / "bands.json").read_text().replace('"margin": ', '"margin": -')):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="is not what python -m rl.validator calibrate writes"):
            validator_lib.load_bands(tmp_path / "bad.json")


@pytest.mark.slow
def test_a_mesh_is_a_variant(monkeypatch):
    exp = doubles.experiment(prompts=2)
    variant = calibrate.VARIANTS["tensor_parallel"]
    rollouts = calibrate.variant_rollouts(exp, doubles.weights(0), 0, variant, 4, doubles.NODE)
    assert all(v.accepted for v in doubles.make_validator(prompts=2).judge_replayed(rollouts))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert calibrate.variant_rollouts(exp, doubles.weights(0), 0, variant, 4, doubles.NODE) is None


def test_the_calibrate_command(tmp_path, capsys):
    exp = doubles.experiment(prompts=2)
    (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(exp.config.to_json())}))
    broadcast.publish(doubles.weights(0), 4, str(tmp_path / "weights"))
    command = ["calibrate", "--workdir", str(tmp_path), "--out", str(tmp_path / "bands.json"), "--rollouts", "8"]
    assert commands.run("rl.validator", *command, "--variants", "same") == 0
    assert "same: 8 rollouts" in capsys.readouterr().out
    body = json.loads((tmp_path / "bands.json").read_text())
    assert body["measured"]["version"] == 4 and validator_lib.load_bands(tmp_path / "bands.json")
    assert commands.run("rl.validator", *command, "--variants", "nonsense") == 1
    assert commands.run("rl.validator", "calibrate", "--workdir", str(tmp_path / "no"), "--out", "x") == 1
    for mistake in (["--rollouts", "0"], ["--out", str(tmp_path / "no" / "x")]):  # told before anything is generated
        assert commands.run("rl.validator", *command, *mistake) == 1
    assert (
        commands.run("rl.validator", "serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path), "--slash", "-1")
        == 1
    )
    assert (
        commands.run("rl.validator", "serve", "--workdir", str(tmp_path), "--rollouts", str(tmp_path / "absent")) == 1
    )
    assert "is no directory" in capsys.readouterr().err
