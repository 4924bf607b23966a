"""The train step against a plain one: no packing, no shared prompts, no micro-batches, one device, the loss written out.

Gradients are read from the state of `sgd` with momentum: after one step its trace is the gradient itself.
"""

import dataclasses
import functools
import json
import math
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import config_dict

from configs import quickstart
from models import config as config_lib
from models import transformer
from rl.experiment import experiment
from rl.learning.batch import packing
from rl.learning.learner import objective as objective_lib
from rl.learning.learner import optimizers, train_step
from sharding.mesh import checkpoint
from tests.support import small_learner as small

pytestmark = pytest.mark.usefixtures("compile_fast")
EIGHT = small.axes(data=2, fsdp=2, tensor=2)  # devices, whose program several tests share


def step_once(batch, config=small.DENSE, sizes=()):
    """(metrics, gradient, new state) of one step."""
    step, fresh, mesh = small.compiled(config, sizes)
    state, metrics = step(fresh(), packing.place(batch, mesh))
    grads = jax.tree.map(np.asarray, optax.tree.get(state.opt_state, "trace"))
    return {name: float(x) for name, x in metrics.items()}, grads, state


# ---- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sizes", "rows", "capacity"),
    [
        (small.DENSE, small.axes(), 2, 6),
        pytest.param(small.DENSE, small.axes(fsdp=8), 16, 1, marks=pytest.mark.slow),
        pytest.param(small.DENSE, small.axes(fsdp=2, tensor=4), 2, 6, marks=pytest.mark.slow),
        (small.DENSE, EIGHT, 4, 3),
        pytest.param(small.DENSE, small.axes(fsdp=4, context=2), 4, 3, marks=pytest.mark.slow),
        pytest.param(small.DENSE, small.axes(tensor=8), 2, 6, marks=pytest.mark.slow),  # it has 4 key heads
        pytest.param(small.MOE, small.axes(expert=4, fsdp=2), 8, 2, marks=pytest.mark.slow),
    ],
    ids=lambda x: ("mixture" if x.num_experts else "dense") if isinstance(x, config_lib.ModelConfig) else str(x),
)
def test_packed_sharded_and_accumulated_gradients_equal_the_plain_one(config, sizes, rows, capacity):
    batch = small.pack(rows, capacity)
    metrics, grads, state = step_once(batch, config, sizes)
    (loss, entropy), expected = jax.tree.map(np.asarray, small.reference(small.params_of(config), config))
    # Float32 sums of 12 x 16 tokens in another order, and over 8 devices: measured 5e-7 on losses of size 1.
    assert metrics["loss/total"] == pytest.approx(loss, abs=3e-6)
    assert metrics["loss/entropy"] == pytest.approx(entropy, abs=3e-6)
    num_tokens = sum(branch.loss_mask.sum() for tree in small.trees() for branch in tree.branches)
    assert metrics["loss/num_tokens"] == num_tokens > 50
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(expected))
    small.assert_gradient(grads, expected)
    norm = math.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in jax.tree.leaves(expected)))
    assert metrics["loss/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for p, g, q in zip(*map(jax.tree.leaves, (small.params_of(config), grads, state.params)), strict=True):
        np.testing.assert_allclose(q, p - np.float32(0.1) * g, rtol=0, atol=1e-6)  # the rule of sgd; one rounding


def test_what_trains_nothing_changes_nothing():
    """Other tokens in the padding, other numbers where the mask is 0 and in micro-batches past the count: bitwise."""
    batch, rng = small.pack(), np.random.default_rng(0)
    padding, idle = batch.segment_ids == 0, batch.loss_mask == 0
    assert batch.num_micro_batches == 5 and padding[5].all() and padding[:5].any()
    spoiled = batch.replace(
        tokens=np.where(padding, rng.integers(0, 64, padding.shape), batch.tokens).astype(np.int32),
        behavior_logp=np.where(idle, np.float32(-np.inf), batch.behavior_logp),
        advantage=np.where(idle, np.float32(100), batch.advantage),
    )
    spoiled.advantage[5] = np.nan
    expected, got = step_once(batch), step_once(spoiled)
    assert got[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, got[1], expected[1])


def test_nothing_to_learn_is_a_gradient_of_zero():
    """No advantage, no token, or no micro-batch in use: finite, and the parameters stay where they are."""
    batch = small.pack()
    for idle in (
        batch.replace(advantage=np.zeros_like(batch.advantage)),
        batch.replace(loss_mask=np.zeros_like(batch.loss_mask)),
        batch.replace(num_micro_batches=np.int32(0)),  # the rest of the array is not run
        packing.pack([], packing.Layout(small.ROW, 2, 6)),
    ):
        metrics, _, state = step_once(idle)
        assert metrics["loss/total"] == metrics["loss/grad_norm"] == 0 and all(map(math.isfinite, metrics.values()))
        jax.tree.map(np.testing.assert_array_equal, state.params, small.params_of(small.DENSE))


def test_momentum_alone_moves_nothing():
    """Late in a run all groups of a batch may be flat: no tree is left, and the last direction must not be repeated."""
    step, fresh, mesh = small.compiled(small.DENSE, ())
    state, _ = step(fresh(), packing.place(small.pack(), mesh))
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, packing.place(packing.pack([], packing.Layout(small.ROW, 2, 6)), mesh))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))
    assert float(metrics["loss/skipped"]) == 0 and int(state.step) == 2


def test_a_gradient_that_is_not_finite_is_not_applied():
    """Nothing of the state moves but the count of batches, so that the batch can be replayed on the state that met it."""
    batch = small.pack()
    batch.advantage[0, 0, np.argmax(batch.loss_mask[0, 0])] = np.inf
    step, fresh, mesh = small.compiled(small.DENSE, ())
    before = jax.tree.map(np.array, fresh())
    state, metrics = step(fresh(), packing.place(batch, mesh))
    assert float(metrics["loss/skipped"]) == 1 and not math.isfinite(float(metrics["loss/grad_norm"]))
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))
    _, metrics = step(state, packing.place(small.pack(), mesh))
    assert float(metrics["loss/skipped"]) == 0


# ---- the objective ---------------------------------------------------------------------------------------------------


def weights_of(tokens):
    """Weights of the other components, and a reference's log-probability, as functions of a token's id."""
    ce = np.where(tokens % 3 == 0, (tokens + 1) / 64, 0).astype(np.float32)
    ref_kl = np.where(tokens % 4 == 1, 0.5 + tokens / 128, 0).astype(np.float32)
    return ce, ref_kl, (-2 - tokens / 32).astype(np.float32)


@pytest.mark.parametrize(
    "sizes", [(), pytest.param(small.axes(fsdp=2, context=2, tensor=2), marks=pytest.mark.slow)], ids=["one", "eight"]
)
def test_the_objective_is_the_sum_of_its_components(sizes):
    """Entropy bonus, KL to a reference, cross-entropy and distillation in addition to the policy loss."""
    objective = objective_lib.Objective(entropy_coef=0.7, kl_coef=0.3, kl_estimator="k2", kl_reference="reference")

    def with_streams(branch, first):
        ce, ref_kl, reference = weights_of(branch.tokens)
        ce[:first] = ref_kl[:first] = 0  # the first token of a stream has no predictor
        return dataclasses.replace(branch, ce_weight=ce, ref_kl_weight=ref_kl, ref_logp=reference)

    extended = [
        packing.Tree(tree.prompt, tuple(with_streams(b, not len(tree.prompt)) for b in tree.branches))
        for tree in small.trees()
    ]
    tokens_NT, _, mask_NT, behavior_NT, A_NT = small.plain_rows()
    ce_NT, ref_kl_NT, reference_NT = (x[:, 1:] for x in weights_of(tokens_NT))
    own = np.zeros((len(tokens_NT), small.ROW), bool)  # CE and distillation are of branches, not of prompts
    for row, (tree, branch) in enumerate((t, b) for t in small.trees() for b in t.branches):
        own[row, len(tree.prompt) : len(tree.prompt) + len(branch.tokens)] = True
    ce_NT, ref_kl_NT = ce_NT * own[:, 1:], ref_kl_NT * own[:, 1:]
    mask_NT, behavior_NT, A_NT = mask_NT[:, 1:], behavior_NT[:, 1:], A_NT[:, 1:]

    def loss(params):
        logp, entropy = small.plain_logp(params, small.DENSE)
        N, log_r = mask_NT.sum(), logp - behavior_NT
        policy = -(jnp.exp(log_r) * A_NT * mask_NT).sum() / N
        kl = (0.5 * (logp - reference_NT) ** 2 * mask_NT).sum() / N
        ce = -(ce_NT * logp).sum() / (ce_NT > 0).sum()
        keep = jnp.exp(logp) - np.exp(behavior_NT) >= -0.2
        teach = jax.lax.stop_gradient(reference_NT - logp) * keep
        ref_kl = (ref_kl_NT * (-teach * jnp.exp(log_r) + 1e-3 * log_r**2)).sum() / (ref_kl_NT > 0).sum()
        return policy - 0.7 * (entropy * mask_NT).sum() / N + 0.3 * kl + ce + ref_kl, (policy, kl, ce, ref_kl)

    (total, parts), expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(small.params_of(small.DENSE))
    layout = packing.Layout(small.ROW, 2, 6, streams=packing.OPTIONAL)
    options = {"ratio_low": 0.0, "ratio_high": math.inf}
    learner = small.make(loss="masked_importance_sampling", options=options, sizes=sizes, objective=objective)
    batch = packing.place(packing.pack(extended, layout), learner.mesh)
    state = train_step.init_state(jax.random.key(0), learner, small.params_of(small.DENSE))
    state, metrics = train_step.jit_train_step(learner)(state, batch)
    # As above: sums of 200 float32 tokens in another order; behaviours of -6 against -3 make ratios of 10.
    assert float(metrics["loss/total"]) == pytest.approx(float(total), rel=1e-5)
    for name, part in zip(("policy", "kl", "ce", "ref_kl"), parts, strict=True):
        assert float(metrics[f"loss/{name}"]) == pytest.approx(float(part), rel=1e-5), name
    small.assert_gradient(optax.tree.get(state.opt_state, "trace"), expected)


@pytest.mark.slow
def test_losses_over_streams_are_the_same_on_one_device_and_eight():
    """GSPO sums over the tokens of a stream, here cut over `context`, and counts streams over all rows and micro-batches."""
    found = []
    for sizes, rows, capacity in ((small.axes(), 2, 6), (small.axes(data=2, fsdp=2, context=2), 4, 3)):
        learner = small.make(loss="gspo", options={"clip_low": 0.5, "clip_high": 0.9}, sizes=sizes)
        state = train_step.init_state(jax.random.key(0), learner, small.params_of(small.DENSE))
        batch = packing.place(small.pack(rows, capacity), learner.mesh)
        state, metrics = train_step.jit_train_step(learner)(state, batch)
        found.append((float(metrics["loss/total"]), jax.tree.map(np.asarray, optax.tree.get(state.opt_state, "trace"))))
    tokens_NT, _, mask_NT, behavior_NT, A_NT = small.plain_rows()
    logp = np.asarray(small.plain_logp(small.params_of(small.DENSE), small.DENSE)[0], np.float64)
    total, streams = 0.0, 0
    for row in range(len(tokens_NT)):
        picked = np.flatnonzero(mask_NT[row, 1:])
        if len(picked):
            s = math.exp((logp[row, picked] - behavior_NT[row, 1:][picked]).mean())
            total += np.mean([max(-s * A, -min(max(s, 0.5), 1.9) * A) for A in A_NT[row, 1:][picked].astype(float)])
            streams += 1
    for value, grads in found:
        assert value == pytest.approx(total / streams, rel=2e-5)
        small.assert_gradient(grads, found[0][1])


SEVERAL = objective_lib.Objective(old_logprobs="learner", optimizer_steps=3)


def test_old_logprobs_of_the_learner_and_several_steps_on_a_batch():
    """INTELLECT-2: score once, then step on each part; against single steps on the parts with those scores in the batch.

    A batch of fewer micro-batches than steps takes as many as it has, in the same program.
    """
    mesh, batch = small.make_mesh(()), small.pack()
    single, fresh, _ = small.compiled(small.DENSE, ())
    step = train_step.jit_train_step(small.make(objective=SEVERAL))
    score = functools.partial(train_step.score, small.make())

    def by_hand(batch, num_steps):
        state = fresh()
        old = np.asarray(score(state.params, packing.place(batch, mesh)))
        assert (old[batch.loss_mask > 0] < 0).all() and np.abs(old - batch.behavior_logp)[batch.loss_mask > 0].max() > 1
        metrics = []
        for k in range(num_steps):
            part = jax.tree.map(lambda x, k=k: x[k::num_steps] if x.ndim else x, batch.replace(behavior_logp=old))
            used = len(range(k, int(batch.num_micro_batches), num_steps))
            room = [(0, 6 - len(part.tokens)), (0, 0), (0, 0)]
            part = jax.tree.map(lambda x, room=room: np.pad(x, room) if x.ndim else x, part)
            part = part.replace(num_micro_batches=np.int32(used))
            state, got = single(state, packing.place(part, mesh))
            metrics.append({name: float(x) for name, x in got.items()})
        tokens = [m["loss/num_tokens"] for m in metrics]
        return state, {n: np.average([m[n] for m in metrics], weights=tokens) for n in metrics[0]}, sum(tokens)

    few = packing.pack(small.trees()[:1], packing.Layout(small.ROW, 2, 6))
    for work, num_steps in ((batch, 3), (few, 1)):
        expected, averages, tokens = by_hand(work, num_steps)
        state, metrics = step(fresh(), packing.place(work, mesh))
        assert float(metrics["loss/num_tokens"]) == tokens and float(metrics["loss/optimizer_steps"]) == num_steps
        for name, value in averages.items():
            if name != "loss/num_tokens":
                # Two programs of the same sums; the second and third step start from parameters 1e-7 apart.
                assert float(metrics[name]) == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert int(state.step) == 1
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))
    assert step._cache_size() == 1
    assert float(metrics["loss/mismatch_kl"]) < 1e-9  # one step: the ratio is against the parameters themselves
    mask = few.loss_mask > 0  # in addition, the distance of the sampler
    log_r = np.asarray(score(fresh().params, packing.place(few, mesh)))[mask] - few.behavior_logp[mask]
    assert float(metrics["loss/sampler_kl"]) == pytest.approx((np.exp(log_r) - 1 - log_r).mean(), rel=1e-4)


@pytest.mark.slow
def test_the_first_optimizer_step_scores_its_own_tokens():
    """One step on a batch runs no pass more than without scores; of three, the first leaves its micro-batches out of that pass."""
    mesh, batch = small.make_mesh(()), small.pack()
    products = []
    for old_logprobs in ("sampler", "learner"):
        learner = small.make(objective=objective_lib.Objective(old_logprobs=old_logprobs))
        step = functools.partial(train_step.train_step, learner)
        program = jax.make_jaxpr(step)(train_step.abstract_state(learner), batch)
        products.append(str(program).count("dot_general"))
    assert products[0] == products[1] > 10
    learner, params = small.make(), small.params_of(small.DENSE)
    whole = np.asarray(train_step.score(learner, params, packing.place(batch, mesh)))
    with jax.set_mesh(learner.mesh):
        rest = jax.jit(functools.partial(train_step._score_batch, learner))(params, batch, 3)
    used = int(batch.num_micro_batches)
    is_first = np.arange(used) % 3 == 0
    assert 0 < is_first.sum() < used
    np.testing.assert_array_equal(rest[:used], np.where(is_first[:, None, None], 0, whole[:used]))


@functools.cache
def distilling(num_steps):
    """Returns (learner at a rate of 0, its train step) of this many optimizer steps on a batch."""
    learner = small.make(optimizer=optax.sgd(0.0), objective=objective_lib.Objective(optimizer_steps=num_steps))
    return learner, train_step.jit_train_step(learner)


@pytest.mark.slow
@pytest.mark.parametrize("flat", [(0, 3), range(6)])
def test_means_over_several_steps_are_those_of_one_step(flat):
    """Flat groups only distill: with a rate of 0, each metric counts the tokens that it is about, and no others."""
    batch = packing.pack(small.trees(), packing.Layout(small.ROW, 2, 6, streams=("ref_kl_weight", "ref_logp")))
    _, weight, reference = weights_of(batch.tokens)
    weight = np.where(batch.loss_mask > 0, weight, 0)
    mask = batch.loss_mask.copy()
    mask[list(flat)] = 0
    fields = {"ref_kl_weight": weight, "ref_logp": reference, "loss_mask": mask}
    found = []
    for num_steps in (1, 3):
        learner, step = distilling(num_steps)
        state = train_step.init_state(jax.random.key(0), learner, small.params_of(small.DENSE))
        found.append(step(state, packing.place(batch.replace(**fields), learner.mesh))[1])
    one, several = found
    assert float(several["loss/num_tokens"]) == mask.sum() and float(several["loss/optimizer_steps"]) == 3
    assert float(one["loss/ref_kl"]) != 0 and float(several["loss/grad_norm"]) > 0
    sums = ("loss/total", "loss/grad_norm", "grad_norm/")  # of components with different counts, or of gradients
    names = [name for name in one if not name.startswith(sums)] if mask.any() else ["loss/ref_kl", "loss/total"]
    for name in names:
        assert float(several[name]) == pytest.approx(float(one[name]), rel=1e-5, abs=1e-7), name


def test_after_a_gradient_that_is_not_finite_no_later_step_of_the_batch_is_applied():
    """The first of three optimizer steps is not finite; the others would be, from parameters that it left as they were."""
    batch = small.pack()
    batch.advantage[0, 0, np.argmax(batch.loss_mask[0, 0])] = np.inf  # micro-batch 0 belongs to the first step
    step = train_step.jit_train_step(small.make(objective=SEVERAL))
    _, fresh, mesh = small.compiled(small.DENSE, ())
    before = jax.tree.map(np.array, fresh())
    state, metrics = step(fresh(), packing.place(batch, mesh))
    assert float(metrics["loss/optimizer_steps"]) == 3 and 0 < float(metrics["loss/skipped"]) < 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))


def test_a_loss_of_your_own_is_a_function():
    """It gets the arguments that it names, and learns; unknown options are refused."""

    def reinforce(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, scale, num_streams, denom):
        total = -scale * jnp.sum(jnp.where(mask_BT > 0, logp_BT * advantage_BT, 0.0))
        return total / num_streams, {"loss/streams": num_streams}

    mesh = small.make_mesh(())
    step = train_step.jit_train_step(small.make(loss=reinforce, options={"scale": 2.0}))
    _, fresh, _ = small.compiled(small.DENSE, ())
    _, metrics = step(fresh(), packing.place(small.pack(), mesh))
    num_streams = sum(branch.loss_mask.any() for tree in small.trees() for branch in tree.branches)
    _, _, mask_NT, _, A_NT = small.plain_rows()
    logp = np.asarray(small.plain_logp(small.params_of(small.DENSE), small.DENSE)[0])
    expected = -2 * (logp * A_NT[:, 1:] * mask_NT[:, 1:]).sum() / num_streams
    assert float(metrics["loss/total"]) == pytest.approx(expected, rel=1e-5)
    # Every micro-batch reports the global count, and metrics add up over micro-batches: five are in use.
    assert float(metrics["loss/streams"]) == 5 * num_streams
    for options, words in (
        ({"scale": 1.0, "bias": 2.0}, ("'reinforce' has no option 'bias'", "scale")),
        ({}, ("'reinforce' needs the option 'scale'", "config.loss_options.reinforce.scale")),
    ):
        with pytest.raises(ValueError) as error:
            small.make(loss=reinforce, options=options)
        assert all(word in str(error.value) for word in words)


def test_a_config_file_may_bring_its_own_loss():
    """The run is known by the function's name and text: other text is another run."""

    def reinforce(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, scale, denom):
        return -scale * (logp_BT * advantage_BT * mask_BT).sum() / denom, {}

    def stronger(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, scale, denom):
        return -2 * scale * (logp_BT * advantage_BT * mask_BT).sum() / denom, {}

    saved = []
    for function in (reinforce, stronger, reinforce):
        config = quickstart.get_config()
        config.rl.loss, config.rl.loss_function = "reinforce", function
        config.loss_options.reinforce = config_dict.ConfigDict({"scale": 2.0})
        exp = experiment.resolve(config)
        assert exp.loss is function and exp.loss_options == {"scale": 2.0}
        saved.append(json.loads(exp.config.to_json())["rl"]["loss_function"])
    assert saved[0] == saved[2] != saved[1] and saved[0].startswith("reinforce ")
    config = quickstart.get_config()
    config.rl.loss, config.rl.loss_function = "plain", losses_of_users()["plain"]
    assert experiment.resolve(config).loss_options == {}  # and no loss_options.plain is needed
    config.rl.loss = "reinforced"
    with pytest.raises(ValueError, match="rl.loss = 'reinforced' is unknown"):
        experiment.resolve(config)
    config = quickstart.get_config()
    config.rl.loss_function = "reinforce"
    with pytest.raises(ValueError, match="is not a function"):
        experiment.resolve(config)
    plain = experiment.resolve(quickstart.get_config())
    assert plain.loss == "two_sided_clip" and plain.loss_options["delta"] == 4.0


def losses_of_users():
    def plain(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, denom):
        return -(logp_BT * advantage_BT * mask_BT).sum() / denom, {}

    def two(logp_BT, advantage_BT):
        return 0.0, {}

    def no_star(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, denom):
        return plain(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, denom=denom)

    def bare(logp_BT, behavior_logp_BT, advantage_BT, mask_BT):
        return logp_BT.sum()

    def per_token(logp_BT, behavior_logp_BT, advantage_BT, mask_BT):
        return logp_BT, {}

    def no_area(logp_BT, behavior_logp_BT, advantage_BT, mask_BT, *, stream_ids_BT, num_streams):
        return logp_BT.sum(), {"streams": num_streams + stream_ids_BT.sum()}

    return {function.__name__: function for function in (plain, two, no_star, bare, per_token, no_area)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two", "too many positional arguments"),
        ("no_star", "missing a required argument: 'denom'"),
        ("bare", r"returns float32\[\], not"),
        ("per_token", r"returns \('float32\[2, 8\]', "),
        ("no_area", r"returns .*'streams'.*not a scalar and a dict of scalars such as 'loss/NAME'"),
    ],
)
def test_a_loss_with_a_wrong_signature_is_reported_with_the_config(name, words):
    """An hour later, it would be a traceback of jax."""
    config = quickstart.get_config()
    config.rl.loss, config.rl.loss_function = name, losses_of_users()[name]
    with pytest.raises(
        ValueError, match=f"your loss function {name} .*{words}.*; write it as {name}\\(logp_BT, "
    ) as error:
        experiment.resolve(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"old_logprobs": "both"}, "old_logprobs = 'both' is unknown; choose one of sampler, learner"),
        ({"optimizer_steps": 0}, "optimizer_steps = 0"),
        ({"kl_estimator": "k4"}, "choose one of k1, k2, k3"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "no gradient in expectation"),
        ({"kl_coef": 0.1, "kl_place": "advantage"}, "set kl_estimator = 'k1'"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        objective_lib.Objective(**fields)
    with pytest.raises(ValueError, match="loss 'ppo' is unknown; choose one of two_sided_clip, "):
        small.make(loss="ppo", options={})


def test_a_stream_that_the_objective_needs_must_be_there():
    objective = objective_lib.Objective(kl_coef=0.1, kl_reference="reference")
    step = train_step.jit_train_step(small.make(objective=objective))
    _, fresh, mesh = small.compiled(small.DENSE, ())
    with pytest.raises(ValueError, match="no stream 'ref_logp', .* needs; name it in the layout's `streams`"):
        step(fresh(), packing.place(small.pack(), mesh))


# ---- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parameters_are_gathered_inside_the_loop_over_micro_batches():
    """Gathered before it, all of them would be in memory at the same time, which fsdp must prevent."""
    step, fresh, mesh = small.compiled(small.DENSE, small.axes(fsdp=8))
    text = step.lower(fresh(), packing.place(small.pack(16, 1), mesh)).compile().as_text()
    inside, outside = 0, 0
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        num = len(re.findall(r"= f32\[[^=]* all-gather(?:-start)?\(", computation))  # other dtypes: token ids
        if computation.startswith("ENTRY"):
            outside += num
        else:
            inside += num
    # All but the scales of norms, and the table of the embedding, of which tokens are exchanged.
    num_matrices = len(jax.tree.leaves(small.params_of(small.DENSE))) - 5
    assert outside == 0 and inside >= num_matrices


# ---- the state -------------------------------------------------------------------------------------------------------

ADAMW = optimizers.OptimizerConfig(
    learning_rate=2e-2, warmup_steps=2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, clip_norm=1.0
)


def test_a_step_is_a_fixed_point_of_types_and_overfits(caplog, request):
    """Twenty steps of supervised learning, on eight devices: one program, same types, old states gone.

    The program is compiled ahead, from shapes alone, by a thread of its own. Every third batch is a small one, with fewer micro-batches
    in use: that is data, and compiles nothing.
    """
    optimizer = train_step.make_optimizer(ADAMW, small.DENSE)
    learner = small.make(loss="cross_entropy", options={}, sizes=small.axes(fsdp=2, tensor=4), optimizer=optimizer)
    step, mesh = train_step.jit_train_step(learner), learner.mesh
    state = train_step.init_state(jax.random.key(0), learner, small.params_of(small.DENSE))
    layout = packing.Layout(small.ROW, 2, 6)
    whole, part = (
        packing.place(batch.replace(advantage=np.ones_like(batch.advantage)), mesh)
        for batch in (small.pack(), packing.pack(small.trees()[:4], layout))
    )
    assert (int(whole.num_micro_batches), int(part.num_micro_batches)) == (5, 3)

    def types(state):
        return jax.tree.map(lambda x: (jax.typeof(x), x.sharding, x.committed), state)

    def num_compilations():
        return sum("Finished XLA compilation of jit(train_step)" in line for line in caplog.messages)

    promised = train_step.abstract_state(learner)
    before, losses = types(state), []
    assert small.kinds(promised) == small.kinds(state)
    jax.config.update("jax_log_compiles", True)  # of all threads, unlike the context manager
    request.addfinalizer(lambda: jax.config.update("jax_log_compiles", False))
    caplog.set_level("WARNING")
    ahead = threading.Thread(target=train_step.compile_train_step, args=(learner, packing.abstract(layout, mesh)))
    ahead.start()
    ahead.join()
    assert num_compilations() == 1
    for i in range(20):
        old = state
        state, metrics = step(old, part if i % 3 == 2 else whole)
        losses.append(float(metrics["loss/total"]))
        assert types(state) == before
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        assert int(state.step) == i + 1 and not whole.tokens.is_deleted()
    assert step._cache_size() == num_compilations() == 1
    # It starts near log V = 4.2; that it learns 70 random tokens by heart is the point of 20 steps at a rate of 0.02.
    assert losses[0] > 3 and losses[-1] < losses[0] / 3


def test_two_steps_saved_restored_and_two_more_are_four(tmp_path):
    """Bit for bit, on eight devices."""
    step, fresh, mesh = small.compiled(small.DENSE, EIGHT)
    batch = packing.place(small.pack(4, 3), mesh)

    def run(state, num):
        for _ in range(num):
            state, metrics = step(state, batch)
        return state, {name: float(x) for name, x in metrics.items()}

    whole, whole_metrics = run(fresh(), 4)
    half, _ = run(fresh(), 2)
    with checkpoint.Checkpointer(tmp_path, keep=1, every=1) as checkpointer:
        checkpointer.save(2, half, {})
    del half
    learner = small.make(sizes=EIGHT)
    with checkpoint.Checkpointer(tmp_path, keep=1, every=1) as checkpointer:
        number, restored, _ = checkpointer.restore(train_step.abstract_state(learner))
    resumed, metrics = run(restored, 2)
    assert number == 2 and int(resumed.step) == 4 and metrics == whole_metrics
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert step._cache_size() == 1


@pytest.mark.slow
def test_parameters_are_born_the_same_on_every_mesh():
    key = jax.random.key(5)
    expected = jax.jit(transformer.init, static_argnums=1)(key, small.DENSE)
    state = train_step.init_state(key, small.make(sizes=small.axes(fsdp=2, tensor=4)))
    # The bits drawn are equal; the inverse error function of a normal may be fused otherwise, one unit off.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state.params, expected)
    assert int(state.step) == 0 and not np.asarray(optax.tree.get(state.opt_state, "trace")["embed"]).any()
