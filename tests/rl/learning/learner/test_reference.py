"""The reference: who scores a batch, and with which parameters."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import quickstart
from models import hf, transformer
from rl.experiment import experiment
from rl.learning.batch import packing
from rl.learning.learner import reference
from sharding.mesh import mesh as mesh_lib
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("compile_fast")

TEACHER = tiny.model(vocab_size=272, num_layers=1, num_heads=2, num_kv_heads=1)


def resolve(**objective):
    config = quickstart.get_config()
    for name, value in objective.items():
        config.objective[name] = value
    return experiment.resolve(config)


def one_device():
    return mesh_lib.create({}, devices=jax.devices()[:1])


def batch(mesh):
    """A prompt of two tokens with two continuations, at temperature 0.5."""
    branches = []
    for tokens in ([30, 31, 32], [40, 41]):
        ones = np.ones(len(tokens), np.float32)
        branches.append(packing.Branch(np.array(tokens, np.int32), ones, -ones, ones, 0.5))
    tree = packing.Tree(np.array([5, 6], np.int32), tuple(branches))
    return packing.place(packing.pack([tree], packing.Layout(16, 1, 1)), mesh)


def plain(params, model):
    """log-probabilities of the sampled tokens, each sequence alone, all logits."""
    found = []
    for tokens in ([5, 6, 30, 31, 32], [5, 6, 40, 41]):
        hidden, _ = transformer.apply(params, model, np.array([tokens], np.int32))
        logits = np.asarray(transformer.logits(params, model, hidden), np.float64)[0] / 0.5
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found += [logp[t - 1, tokens[t]] for t in range(2, len(tokens))]
    return found


def scored(score, mesh):
    packed = batch(mesh)
    return np.asarray(score(packed))[np.asarray(packed.loss_mask) > 0]


def make(exp, mesh, initial):
    return reference.make(exp.learner(mesh), initial, vocab_size=exp.tokenizer.vocab_size)


def test_nobody_asks_for_a_reference():
    for objective in ({}, {"kl_coef": 0.1}):
        assert make(resolve(**objective), one_device(), lambda: pytest.fail("not needed")) is None


@pytest.mark.slow
def test_the_policy_that_rl_began_with():
    exp, mesh = resolve(kl_coef=0.1, kl_reference="reference"), one_device()
    params = transformer.init(jax.random.key(1), exp.model)
    score = make(exp, mesh, lambda: params)
    # float32 sums of 128 terms against float64 of the same logits
    np.testing.assert_allclose(scored(score, mesh), plain(params, exp.model), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_checkpoint_of_another_size_teaches(tmp_path):
    params, mesh = transformer.init(jax.random.key(2), TEACHER), one_device()
    hf.save(tmp_path / "teacher", TEACHER, params)
    exp = resolve(teacher_coef=1.0, policy_coef=0.0, reference_model=str(tmp_path / "teacher"))
    assert exp.credit.streams == ("ref_kl_weight",)
    score = make(exp, mesh, lambda: pytest.fail("not needed"))
    np.testing.assert_allclose(scored(score, mesh), plain(params, TEACHER), rtol=0, atol=2e-5)  # as above


def test_a_teacher_must_know_every_token_id(tmp_path):
    small = dataclasses.replace(TEACHER, vocab_size=64)
    hf.save(tmp_path / "small", small, tiny.params(small, 2))
    exp = resolve(teacher_coef=1.0, reference_model=str(tmp_path / "small"))
    with pytest.raises(ValueError, match="has 64 token ids, but the tokenizer has 265"):
        make(exp, one_device(), dict)
