"""The validator accepts honest rollouts of the scheduler, also across versions, and rejects each way to cheat, by name.

The weights are 32 wide and the same machine replays, so honest margins are rounding: nothing is forgiven.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import time
import weakref
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from inference.engine import engine as engine_lib
from inference.rollouts import kept_sets
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib
from rl.trust.verification import checks, sequential_test, verifier
from rl.trust.verification import replay as replay_lib
from rl.trust.verification import rules as rules_lib
from sharding.mesh import mesh as mesh_lib
from sharding.weights import broadcast
from tests.support import bare_rules, doubles, tiny

pytestmark = pytest.mark.usefixtures("compile_fast")
MODEL = tiny.model()
K, CAPACITY = 4, 64
CONFIG = engine_lib.EngineConfig(num_slots=4, max_model_len=CAPACITY, prefill_batch=2, steps_per_call=K)
# Engine and replay are float32 programs of different shapes: log-probabilities near 10 agree to a few ulp (measured 4e-6).
STRICT = rules_lib.Tolerance(margin=1e-4, max_wrong_tokens=0, logprob=1e-4)
WAIT_S = 600  # only a hang reaches it: compiling the engine took more than 60 s on a busy machine
PROMPT = tuple(b"hello")
HONEST = scheduler_lib.GenerateRequest(PROMPT, num_samples=4, max_tokens=50, seed=2**32 - 2, proofs=True)


@functools.cache
def params(version, model=MODEL):
    return jax.tree.map(jnp.asarray, tiny.params(model, version))


def weights(version, epoch=0):
    if version > 9:
        raise FileNotFoundError(f"no version {version}")
    return params(version)


class Updating(engine_lib.Engine):
    """Sends an update before the n-th `generate` call; it is used from the next call on."""

    updates, scheduler, calls = {}, None, 0

    def generate(self, *args):
        self.calls += 1
        if self.calls in self.updates:
            self.scheduler.update(*self.updates[self.calls])
        return super().generate(*args)


def rollouts_of(request, *, version=0, updates=None, model=MODEL, config=CONFIG, with_kept=False, **claims):
    """The group a scheduler makes of `request`, as a worker writes it down."""
    engine = Updating(model, config, tokenizer_lib.byte_chatml())
    scheduler = scheduler_lib.Scheduler(engine, params(version, model), version)
    engine.scheduler = scheduler
    engine.updates = {call: (params(number, model), number) for call, number in (updates or {}).items()}
    completions = scheduler.submit(request).result(WAIT_S)
    scheduler.close()
    P = len(request.tokens)
    return [
        tiny.rollout(
            np.array([False] * P + [True] * len(c.tokens)),
            **dict(
                tokens=np.array([*request.tokens, *c.tokens], np.int32),
                logprobs=np.array([0.0] * P + c.logprobs, np.float32),
                versions=np.array([c.prompt_version] * P + c.versions, np.int32),
                temperature=request.temperature,
                seed=(request.seed + index) % 2**32,
                task=rollout_lib.TaskRef("reverse_text", 0, 0, 0),
                sample=index,
                finish_reason=c.finish_reason,
                proofs=c.proofs,
                kept=c.kept if with_kept else b"",
                routed_experts=c.experts,
            )
            | claims,
        )
        for index, c in enumerate(completions)
    ]


def check(rollouts, filters=kept_sets.OFF, tolerance=STRICT, weights=weights):
    """Returns why the replay rejects a group, or None."""
    rules = bare_rules.make(MODEL, CAPACITY, tolerance, filters=filters)
    (verdict,) = verifier.Verifier(MODEL, weights, rules).check_groups_with_weights([rollouts])
    return None if verdict.accepted else str(verdict)


def replay(rollouts):
    return replay_lib.replay(MODEL, weights, bare_rules.make(MODEL, CAPACITY, STRICT), rollouts)


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
    found = replay(honest())
    for rollout, one in zip(honest(), found, strict=True):
        sampled = np.flatnonzero(rollout.sampled_mask)
        # The replay's own float32: the token is the argmax but where two noised logits are closer than that.
        assert one.rollout is rollout and one.margin_N.max() <= 1e-5
        np.testing.assert_allclose(one.logp_N, rollout.logprobs[sampled], rtol=0, atol=2e-5)
        assert one.hidden_ND.dtype == jnp.bfloat16 and one.hidden_ND.shape == (len(sampled), MODEL.model_dim)


def test_the_replay_scores_tempered_distributions():
    """Against the learner's forward pass and float64: log q(token) / p(token), q ~ p^b."""
    rollout = honest()[0]
    found = replay_lib.recompute(MODEL, weights, bare_rules.make(MODEL, CAPACITY, STRICT), honest())

    @jax.jit
    def logits(params, tokens_BT):
        return transformer.logits(params, MODEL, transformer.apply(params, MODEL, tokens_BT)[0])[0]

    logp_TV = np.asarray(logits(params(0), jnp.asarray(rollout.tokens)[None]), np.float64)
    logp_TV -= np.log(np.exp(logp_TV).sum(-1, keepdims=True))
    for position in np.flatnonzero(rollout.sampled_mask):
        logp_V, token = logp_TV[position - 1], rollout.tokens[position]
        for k, b in enumerate(sequential_test.TILTS):
            q_V = np.exp(b * logp_V) / np.exp(b * logp_V).sum()
            # float32 log-probabilities near 10, times b = 4 at most: some 1e-5; a wrong exponent is off by tenths
            assert found["tilt"][0, position, k] == pytest.approx(np.log(q_V[token]) - logp_V[token], abs=1e-3)


@pytest.mark.parametrize("model_dim", [8, 256, 4096])
def test_every_sampled_token_is_packed_behind_its_own_prefix(model_dim):
    """The tokens that a predicting column may read, by segment and branch, are the rollout up to there; no column is missing."""
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
        blocks, block_of, columns = replay_lib._pack(rollouts, tiny.model(model_dim=model_dim))
        which, targets = replay_lib._sampled_tokens(rollouts, columns)
        assert list(zip(which.tolist(), targets.position.tolist(), strict=True)) == [
            (i, t) for i, rollout in enumerate(rollouts) for t in np.flatnonzero(rollout.sampled_mask).tolist()
        ]
        assert blocks["segment_ids"].any(axis=(1, 2)).all()
        for n, (i, position) in enumerate(zip(which.tolist(), targets.position.tolist(), strict=True)):
            rollout = rollouts[i]
            row, column = divmod(int(targets.column[n]), blocks["tokens"].shape[-1])
            tokens, positions, segments, branches = (
                blocks[name][block_of[i], row, : column + 1]
                for name in ("tokens", "positions", "segment_ids", "branch_ids")
            )
            seen = (segments == segments[-1]) & ((branches == 0) | (branches == branches[-1]))
            assert tokens[seen].tolist() == rollout.tokens[:position].tolist() and segments[-1] > 0
            assert positions[seen].tolist() == list(range(position))
            claim = (targets.token[n], targets.seed[n], targets.temperature[n])
            assert claim == (rollout.tokens[position], rollout.seed, 0.5)


@pytest.mark.slow
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
    rules = bare_rules.make(MODEL, CAPACITY, STRICT, filters=filters)
    together = replay_lib.recompute(MODEL, weights, rules, rollouts)
    alone = jax.tree.map(np.zeros_like, together)
    replay_lib._replay_mixed(MODEL, weights, filters, rollouts, range(len(rollouts)), alone)
    for row, rollout in enumerate(rollouts):
        sampled = np.flatnonzero(rollout.sampled_mask)
        for name in ("margin", "logp", "tilt"):
            got, expected = together[name][row, sampled], alone[name][row, sampled]
            # float32 programs of other shapes; tilts are logs of up to four times as much
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
        got, expected = (x["hidden"][row, sampled].astype(np.float32) for x in (together, alone))
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-4)  # a unit of bfloat16
        assert np.isfinite(together["logp"][row, sampled]).any()  # others lie outside these filters


@pytest.mark.parametrize(
    ("request_", "filters"),
    [
        (dataclasses.replace(HONEST, temperature=0.0), kept_sets.OFF),
        (
            dataclasses.replace(HONEST, temperature=0.6, top_k=30, top_p=0.9),
            kept_sets.OFF | {"top_k": 30, "top_p": 0.9},
        ),
        (scheduler_lib.GenerateRequest((3,), num_samples=4, max_tokens=1, proofs=True), kept_sets.OFF),
        (
            scheduler_lib.GenerateRequest(tuple(range(40)), num_samples=4, max_tokens=99, proofs=True),
            kept_sets.OFF,
        ),
    ],
    ids=["greedy", "filtered", "one token", "to the end of the context"],
)
def test_other_honest_groups_pass(request_, filters):
    assert check(rollouts_of(request_), filters) is None


@pytest.mark.parametrize("updates", [{1: 1}, {3: 1, 4: 2, 9: 5}], ids=["first call", "four"])
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


AT = len(PROMPT)  # the first sampled token


def changed(**fields):
    """The honest group with other fields in one of its rollouts."""
    return with_sample(dataclasses.replace(honest()[2], **fields))


# Cheats that tests/support/doubles.py does not have: all else is honest, and XLA clamps and fills an index out of range.
CHEATS = {
    "the proof of other weights": (lambda: changed(proofs=rollouts_of(HONEST, version=1)[2].proofs), "toploc: "),
    "a version that cannot be had": (
        lambda: edited("versions", slice(30, None), 10),
        r"weights: a version that it names is not available \(no version 10\)$",
    ),
}
for value, at in itertools.product((272, 2**31 - 1), (AT + 3, -1)):
    CHEATS[f"token {value} at {at}"] = (lambda value=value, at=at: edited("tokens", at, value), "sampling: |logprob: ")


@pytest.mark.parametrize("name", CHEATS)
def test_each_cheat_is_refused_by_name(name):
    cheat, reason = CHEATS[name]
    assert re.match(reason, found := check(cheat())), found


def test_weights_that_are_missing_fail_the_rollouts_that_name_them_alone():
    judge = verifier.Verifier(MODEL, weights, bare_rules.make(MODEL, CAPACITY, STRICT))
    group = edited("versions", slice(30, None), 10)
    assert [one.reason for one in judge.check_with_weights(group)] == ["ok", "ok", "weights", "ok"]
    assert [one.reason for one in judge.check_with_weights(group[2:3])] == ["weights"]


def test_each_rollout_is_replayed_by_the_weights_of_its_epoch():
    """A resumed run may publish a version again."""
    asked = []

    def of_epoch(version, epoch):
        asked.append((version, epoch))
        return params(version + epoch)

    mixed = [a if i % 2 else b for i, (a, b) in enumerate(zip(honest(), rollouts_of(HONEST, version=1), strict=True))]
    mixed = [
        dataclasses.replace(one, epoch=1 - i % 2, versions=np.zeros_like(one.versions)) for i, one in enumerate(mixed)
    ]
    found = verifier.Verifier(MODEL, of_epoch, bare_rules.make(MODEL, CAPACITY, STRICT)).replay(mixed)
    assert sorted(asked) == [(0, 0), (0, 1)]
    for rollout, one in zip(mixed, found, strict=True):
        assert one.rollout is rollout and one.margin_N.max() <= 1e-5


def test_filters_that_are_prescribed_are_applied():
    assert check(honest(), kept_sets.OFF | {"top_k": 2}).startswith("sampling: ")


def test_a_few_wrong_tokens_can_be_allowed():
    """Across backends an argmax may flip: max_wrong_tokens forgives as many per rollout, and not one more."""
    rollouts = edited("tokens", -1, (int(honest()[2].tokens[-1]) + 1) % 256)  # the last: nothing follows from it
    loose = dataclasses.replace(STRICT, max_wrong_tokens=1, logprob=100.0)
    assert check(rollouts).startswith("sampling: 1 of ") and check(rollouts, tolerance=loose) is None
    assert check(rollouts, tolerance=dataclasses.replace(STRICT, max_wrong_tokens=1)).startswith("logprob: ")


# ---- weights by version ----------------------------------------------------------------------------------------------


def test_published_weights_are_verified_and_a_few_are_kept(tmp_path, monkeypatch):
    key, other = rollout_lib.WorkerKey.generate(), rollout_lib.WorkerKey.generate()
    for version in range(4):
        broadcast.publish(params(version), version, str(tmp_path), broadcast.PublishOptions(key=key.private))
    pulled, kept, pull = [], [], broadcast.pull

    def pull_and_count(root, version, **options):
        pulled.append((version, sum(array() is not None for array in kept)))
        return pull(root, version, **options)

    monkeypatch.setattr(broadcast, "pull", pull_and_count)
    get = verifier.published(str(tmp_path), keep=2, key=key.worker)
    for version in (0, 1, 0, 2, 1, 0):
        found = get(version)["embed"]
        np.testing.assert_array_equal(found, params(version)["embed"])
        kept.append(weakref.ref(found))
        del found
    assert [version for version, _ in pulled] == [0, 1, 2, 0]  # 2 put out 0, the oldest
    assert max(others for _, others in pulled) == 1
    assert check(honest(), weights=get) is None
    forged = verifier.published(str(tmp_path), key=other.worker)
    assert check(honest(), weights=forged).startswith("weights: a version that it names is not available (")
    with pytest.raises(ValueError, match="^a bug$"):  # of the replay itself, which is not blamed on the weights
        monkeypatch.setattr(replay_lib, "recompute", lambda *args: (_ for _ in ()).throw(ValueError("a bug")))
        check(honest(), weights=get)
    monkeypatch.undo()
    missing = "weights: a version that it names is not"
    assert check(edited("versions", slice(30, None), 10), weights=get).startswith(missing)
    for file in (tmp_path / "v00000003").rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            file.write_bytes(file.read_bytes()[:-1])
    assert check(edited("versions", slice(30, None), 3), weights=get).startswith(missing)


# ---- groups of an orchestrator ---------------------------------------------------------------------------------------


@functools.cache
def batch(step=3):
    return tuple(doubles.honest(doubles.Double(step, prompts=2)))


@pytest.mark.parametrize(
    ("backend", "on_cpu", "is_kept"), [("cpu", False, True), ("gpu", False, False), ("gpu", True, True)]
)
def test_an_accelerator_has_published_weights_only_while_they_are_used(tmp_path, monkeypatch, backend, on_cpu, is_kept):
    """A replay on the CPU of a machine with an accelerator (trust.device) keeps them."""
    broadcast.publish({"w": np.arange(4.0)}, 0, tmp_path)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    weights, mesh = verifier.published(str(tmp_path)), mesh_lib.create({}, devices=jax.devices()[:1])
    with jax.set_mesh(mesh) if on_cpu else contextlib.nullcontext():
        used = weights(0)["w"]
    assert used.tolist() == [0, 1, 2, 3] and isinstance(used, jax.Array)
    alive = weakref.ref(used)
    del used
    assert (alive() is not None) == is_kept


def test_what_the_scorer_gives_up_on_is_worth_nothing_and_refuses_nothing():
    """The group is otherwise good; and the replay does not call the scorer again."""
    asked, validator = [], doubles.make_validator(prompts=2)
    score = validator.rules.score

    def gives_up(group, completions):
        asked.append(group)
        out = score(group, completions)
        for i in (1, 4):
            out[i] = rules_lib.Recomputed(dict.fromkeys(out[i].scores, 0.0), slow=True, timed_out=True)
        return out

    def claims(*samples):
        return [
            rollout_lib.sign(dataclasses.replace(r, reward=0.5, rewards=dict.fromkeys(r.rewards, 0.5)), doubles.NODE)
            if r.sample in samples
            else r
            for r in batch()[:8]
        ]

    # A claim of 0 agrees, and changes nothing: the worker cannot choose.
    assert not any(any(r.rewards.values()) for r in batch()[4:5])
    validator.rules = dataclasses.replace(validator.rules, score=gives_up)
    verdict, scores = validator.check_group_without_weights(claims(1))
    assert verdict == checks.OK and [sample for sample, found in scores.items() if found is None] == [1, 4]
    own = {"reward": batch()[0].reward} | batch()[0].rewards
    assert scores[0] == own
    assert validator.check_groups_with_weights([claims(1)])[0].accepted and len(asked) == 1
    verdict, scores = validator.check_group_without_weights(claims(1, 3))  # the other claim is false, and found
    assert verdict.reason == "reward" and "is 0.5, recomputed" in verdict.detail and not scores
    assert not validator.check_group_without_weights(claims(1), "held_out")[0].accepted  # it is not a held-out group
    near = own | {"reward": own["reward"] + 9e-7}  # within the tolerance of claims: ours are taken all the same
    near = dataclasses.replace(batch()[0], reward=near["reward"], rewards=near)
    group = [rollout_lib.sign(near, doubles.NODE), *batch()[1:8]]
    verdict, scores = validator.check_group_without_weights(group)
    assert verdict == checks.OK and scores[0] == own


def test_only_groups_whose_every_sample_passed_a_replay_are_compared_with(monkeypatch):
    validator, groups = doubles.make_validator(prompts=2), [list(batch()[:8]), list(batch()[8:])]
    for group in groups:
        assert validator.check_group_without_weights(group)[0].accepted
    bad = dataclasses.replace(groups[1][3], proofs=groups[1][2].proofs[: len(groups[1][3].proofs)])
    checked = validator.check_with_weights([*groups[0], *groups[1][:3], bad, *groups[1][4:]])
    assert [verdict.accepted for verdict in checked] == [True] * 11 + [False] + [True] * 4
    found = {group: is_verified for _, group, _, _, is_verified in validator.evidence.state(0)["groups"]["groups"]}
    assert found == {groups[0][0].task.group: True, groups[1][0].task.group: False}
    validator.evidence.add_verified(groups[1])  # by validators elsewhere
    restored = doubles.make_validator(prompts=2).evidence
    restored.restore(**json.loads(json.dumps(validator.evidence.state(0))))
    assert json.dumps(restored.state(0)) == json.dumps(validator.evidence.state(0))
    assert all(one[-1] for one in restored.state(0)["groups"]["groups"])


def test_evidence_outlives_a_restart_and_counts_each_rollout_once():
    """Repeats the first group of a step after a kill; the evidence ends as it does without the kill."""
    first, second = list(batch()[:8]), list(batch()[8:])

    def bring(validator, group):
        assert validator.check_group_without_weights(group)[0].accepted
        assert validator.check_groups_with_weights([group])[0].accepted

    whole, killed, resumed = (doubles.make_validator(prompts=2) for _ in range(3))
    for group in (first, second, first):  # the last as after a stale batch
        bring(whole, group)
    bring(killed, first)
    resumed.evidence.restore(**json.loads(json.dumps(killed.evidence.state(after=2))))
    for group in (first, second):
        bring(resumed, group)
    expected, found = (v.evidence.tests[doubles.NODE.worker].state() for v in (whole, resumed))
    assert found["num_claims"] == expected["num_claims"] == found["num_rollouts"] == expected["num_rollouts"] == 16
    for name, values in expected["log_wealth"].items():
        # Replayed in other company.
        np.testing.assert_allclose(found["log_wealth"][name], values, rtol=1e-4, err_msg=name)
    assert killed.evidence.state(after=3)["counted"] == [] != killed.evidence.state(after=2)["counted"]


def test_threads_pull_published_weights_in_turn(monkeypatch):
    """Verdicts and rollout files have a thread each: two pulls at a time would be more versions in memory than are kept."""
    running, most = [], []

    def pull(root, version, *, base, key, digest):
        assert base is None  # no version is kept during a pull
        running.append(version)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(version)
        return broadcast.Pulled(version, {"w": np.full(1, version)}, {}, "")

    monkeypatch.setattr(broadcast, "pull", pull)
    monkeypatch.setattr(broadcast, "entry_of", lambda root, version, *, key: None)
    with futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(verifier.published("", keep=1), range(8)))
    assert [int(params["w"][0]) for params in found] == list(range(8)) and max(most) == 1


@pytest.mark.parametrize("root", ["http://127.0.0.1:1", "/nowhere"])
def test_a_root_that_does_not_answer_is_a_verdict_that_blames_no_worker(root):
    for key in (ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex(), None):
        found = check(honest(), weights=verifier.published(root, key=key))
        assert found.startswith("weights: a version that it names is not available (")


def test_weights_that_a_resumed_run_has_published_again_are_pulled_again(tmp_path):
    """A validator kept those of the number, and would have judged honest workers of the resumed run by them."""
    key, root = ed25519.Ed25519PrivateKey.generate(), str(tmp_path)
    public = key.public_key().public_bytes_raw().hex()
    for trusted in (public, None):
        get = verifier.published(root, key=trusted)
        for value in (1.0, 2.0):
            publisher = broadcast.Publisher(root, broadcast.PublishOptions(key=key))
            publisher.forget(0)
            publisher.publish({"w": np.full(2, value, np.float32)}, 5)
            expected = value if trusted else 1.0  # without a key no head is read
            assert get(5)["w"][0] == expected and get(5) is get(5)
            if trusted:
                epoch = broadcast.entry_of(root, 5, key=trusted).epoch
                assert get(5, epoch) is get(5)
                with pytest.raises(ValueError, match=f"version 5 of epoch {epoch + 1} is not published any more"):
                    get(5, epoch + 1)
