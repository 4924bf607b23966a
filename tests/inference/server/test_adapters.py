"""A server of a policy with adapters: it takes the base once, then the adapters of each version, and refuses wrong ones.

The oracle of its tokens' log-probabilities is the learner's own function, and numpy's merge of the same matrices.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.server import startup
from models import logprobs, lora, transformer
from models.kernels import cpu_transposed
from rl.trust.verification import verifier
from sharding.mesh import rules
from sharding.weights import broadcast
from tests.support import cases, tiny

CONFIG = engine_lib.EngineConfig(num_slots=2, max_model_len=32, prefill_batch=1, steps_per_call=4)
LORA = lora.LoraConfig(rank=2, alpha=6.0)
MODELS = {
    "float32": tiny.model(),
    "bfloat16": tiny.model(dtype="bfloat16", param_dtype="bfloat16"),
    "stacked": tiny.model(scan_layers=True, num_experts=4, experts_per_token=2, expert_ffn_dim=32, num_layers=3),
}
NUM_ADAPTER_BYTES = 4 * sum(
    np.prod(spec.shape)
    for spec in jax.tree.leaves(lora.specs(transformer.specs(MODELS["float32"]), LORA), is_leaf=rules.is_spec)
)


@functools.cache
def policy(name, version, config=LORA, base_seed=0):
    """The parameters of a version, with adapters attached; those of version 0 change nothing."""
    model = MODELS[name]
    drawn = tiny.drawn(lora.specs(transformer.specs(model), config), version, 0.2 if version else 0.0)
    base = jax.tree.map(lambda x, spec: x.astype(spec.dtype), tiny.params(model, base_seed), transformer.specs(model))
    return lora.attach(base, drawn, config)


def publisher(root, snapshot_every=1):
    return broadcast.Publisher(root, snapshot_every=snapshot_every, fixed=lora.BASE)


def publish(to, name, version, *, tree=None, config=LORA, base_seed=0):
    tree = lora.published(policy(name, version, config, base_seed)) if tree is None else tree
    metadata = {
        "model": dataclasses.asdict(MODELS[name]),
        "tokenizer": "byte_chatml",
        "lora": dataclasses.asdict(config),
    }
    return to.publish(tree, version, metadata=metadata)


@functools.partial(jax.jit, static_argnums=1)
def scores(params, model, tokens_BT):
    hidden_BTD, _ = transformer.apply(params, model, tokens_BT)
    return logprobs.token_logprobs(params, model, hidden_BTD, tokens_BT, jnp.ones(tokens_BT.shape))[0]


def assert_samples_from(server, name, version):
    """Tokens of a request, and their log-probabilities under the policy, by the learner's function and merged in float32."""
    ask = request_lib.GenerateRequest(tuple(range(40, 50)), max_tokens=12, seed=3, temperature=1.0)
    (got,) = server.scheduler.submit(ask).result(120)
    assert set(got.versions) == {version}
    tokens = np.array([[*range(40, 50), *got.tokens]], np.int32)
    merged = jax.tree.map(
        lambda x: np.asarray(x, np.float32), lora.merge(jax.tree.map(np.float32, policy(name, version)))
    )
    wide = dataclasses.replace(MODELS[name], dtype="float32", param_dtype="float32")
    for params, model in ((policy(name, version), MODELS[name]), (merged, wide)):
        logp = scores(params, model, tokens)
        # Float32 sums in another order, or the roundings of two layers in bfloat16, of 8 bits.
        np.testing.assert_allclose(got.logprobs, np.asarray(logp)[0, 10:], atol=0.1 if name == "bfloat16" else 2e-4)


@pytest.mark.parametrize(
    ("name", "snapshot_every"), cases.slow_but([(name, every) for name in MODELS for every in (1, 9)], ("float32", 9))
)
def test_versions_bring_adapters_alone(tmp_path, name, snapshot_every):
    to = publisher(tmp_path, snapshot_every)
    publish(to, name, 0)
    with contextlib.closing(startup.prepare(str(tmp_path), CONFIG).run()) as server:
        assert_samples_from(server, name, 0)
        base = jax.tree.leaves(server.have.params[lora.BASE])
        for version in (1, 2):
            publish(to, name, version)
            before = server.weights.stats()["num_bytes"]
            assert server.update(version) == version
            assert all(map(lambda a, b: a is b, base, jax.tree.leaves(server.have.params[lora.BASE])))
            if name == "float32":
                assert server.weights.stats()["num_bytes"] - before < 1.5 * NUM_ADAPTER_BYTES
            assert_samples_from(server, name, version)
    with contextlib.closing(startup.prepare(str(tmp_path), CONFIG).run()) as late:
        assert_samples_from(late, name, 2)


def test_the_base_of_a_server_in_int8_is_quantized_once(tmp_path):
    to = publisher(tmp_path)
    publish(to, "float32", 0)
    with contextlib.closing(startup.prepare(str(tmp_path), CONFIG, quantize="int8").run()) as server:
        before = jax.tree.leaves(server.scheduler._params)
        publish(to, "float32", 1)
        assert server.update(1) == 1
        after = jax.tree.leaves(server.scheduler._params)
        kept = [a is b for a, b in zip(before, after, strict=True)]
        assert len(after) - sum(kept) == 2 * 7 * 2  # A and B of seven kernels of two layers
        assert not any(x.is_deleted() for x in after)


def nan(tree):
    tree["adapters"]["layers"]["001"]["attn"]["q"]["b"][0] = np.nan


def narrow(tree):
    a = tree["adapters"]["layers"]["000"]["mlp"]["up"]
    a["a"], a["b"] = a["a"][..., :1], a["b"][:1]


def bare(tree):
    del tree["adapters"]["layers"]["000"]["mlp"]["up"]


def other_base(tree):
    tree["base"]["embed"] = tree["base"]["embed"][:, :16]


REFUSED = [
    (nan, LORA, "NaN or infinity in ['adapters']"),
    (narrow, LORA, "['mlp']['up']['a']"),
    (bare, LORA, "differ in"),
    (other_base, LORA, "['base']['embed']"),
    (lambda tree: None, dataclasses.replace(LORA, alpha=7.0), "alpha=7.0"),
    (lambda tree: None, dataclasses.replace(LORA, rank=3), "rank=3"),
]


@pytest.mark.parametrize(("spoil", "config", "words"), cases.slow_but(REFUSED, REFUSED[0], REFUSED[2], REFUSED[4]))
def test_other_adapters_are_refused_and_the_old_ones_serve_on(tmp_path, spoil, config, words):
    publish(publisher(tmp_path), "float32", 1)
    with contextlib.closing(startup.prepare(str(tmp_path), CONFIG).run()) as server:
        tree = jax.tree.map(np.array, lora.published(policy("float32", 2, config)))
        spoil(tree)
        publish(publisher(tmp_path), "float32", 2, tree=tree, config=config)
        with pytest.raises(ValueError) as error:
            server.update(2)
        assert words in str(error.value) and "\n" not in str(error.value)
        assert_samples_from(server, "float32", 1)
        # A run that resumes with another base is a new policy: all of it comes.
        publish(publisher(tmp_path), "float32", 3, base_seed=5)
        assert server.update(3) == 3
        merged = lora.merge(lora.restored(cpu_transposed.views(server.have.params), LORA))
        want = lora.merge(policy("float32", 3, base_seed=5))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, want)


def test_metadata_that_is_no_description_of_adapters_is_refused(tmp_path):
    publish(publisher(tmp_path), "float32", 0)
    for lies in (
        {"rank": 2},
        {"rank": 2, "alpha": 1.0, "targets": ["q"], "more": 1},
        ["q"],
        {"rank": -2, "targets": []},
    ):
        with pytest.raises(ValueError, match="lora"):
            lora.of_metadata({"lora": lies})


def test_a_validator_shares_the_base_of_its_versions(tmp_path):
    to = publisher(tmp_path)
    for version in range(2):
        publish(to, "float32", version)
    get = verifier.published(str(tmp_path))
    for version in range(2):
        jax.tree.map(np.testing.assert_array_equal, get(version), policy("float32", version))
    bases = [jax.tree.leaves(lora.detach(get(version))[0]) for version in range(2)]
    assert all(a is b for a, b in zip(*bases, strict=True))
