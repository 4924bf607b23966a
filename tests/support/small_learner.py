"""A small learner, and batches for it: the tests of rl/learner share them and the programs compiled for them."""

import dataclasses
import functools

import jax
import numpy as np
import optax

from rl.batch import packing
from rl.learner import objective, train_step
from sharding import mesh as mesh_lib
from tests.support import tiny

DENSE = tiny.model(vocab_size=64, num_layers=1, num_heads=8, num_kv_heads=4)
MOE = dataclasses.replace(
    DENSE, num_layers=2, num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1
)
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "delta": 4.0}
ROW = 16

SGD = optax.sgd(0.1, momentum=0.9)  # after one step its trace is the gradient itself


def make(config=DENSE, loss="two_sided_clip", options=None, sizes=(), optimizer=SGD, **fields) -> train_step.Learner:
    """Returns a learner on a mesh of `sizes`, of one device without any."""
    bound = objective.bind(loss, CLIP if options is None else options)
    return train_step.Learner(config, optimizer, bound, make_mesh(sizes), **fields)


@functools.cache
def compiled(config, sizes):
    """Returns (step, a function that makes a fresh state, mesh); the programs are shared by all tests of a process."""
    learner = make(config, sizes=sizes)
    state = train_step.init_state(jax.random.key(0), learner, params_of(config))
    layout = jax.tree.map(lambda x: x.sharding, state)
    host = jax.tree.map(np.array, state)
    return train_step.jit_train_step(learner), lambda: jax.device_put(host, layout), learner.mesh


def make_mesh(sizes):
    return mesh_lib.create(dict(sizes), devices=None if sizes else jax.devices()[:1])


def axes(**sizes):
    return tuple(sizes.items())


@functools.cache
def params_of(config):
    return tiny.params(config, 7)


@functools.cache
def trees():
    """Twelve streams and two groups that share a prompt: a prompt, sampled tokens with an observation inside.

    The second group is longer than a row, and is split with its prompt computed twice. One stream is a single token.
    """
    rng = np.random.default_rng(1)

    def branch(length, first):
        mask = ((np.arange(length) >= first) & (rng.random(length) < 0.9)).astype(np.float32)
        return packing.Branch(
            tokens=rng.integers(0, DENSE.vocab_size, length).astype(np.int32),
            loss_mask=mask,
            behavior_logp=rng.uniform(-6, -3, length).astype(np.float32) * mask,
            advantage=np.float32(rng.standard_normal()) * mask,
            temperature=float(rng.choice([0.6, 1.0, 1.5])),
        )

    def tree(prompt_length, *lengths):
        prompt = rng.integers(0, DENSE.vocab_size, prompt_length).astype(np.int32)
        first = [0 if prompt_length else max(1, length // 3) for length in lengths]
        return packing.Tree(prompt, tuple(branch(*pair) for pair in zip(lengths, first, strict=True)))

    return [tree(4, 3, 5, 2), tree(6, 10, 4, 1), *(tree(0, n) for n in (14, 13, 12, 11, 9, 8, 7, 7, 5, 3, 2, 1))]


def pack(rows=2, capacity=6):
    """Packs the trees, by default into six micro-batches of two rows, of which five are used."""
    return packing.pack(trees(), packing.Layout(ROW, rows, capacity))


@functools.cache
def plain_rows():
    """(tokens, temperature, mask, behavior, A, stream) of every branch in a row of its own, [N, T], with their prompts."""
    pairs = [(tree.prompt, branch) for tree in trees() for branch in tree.branches]
    arrays = {name: np.zeros((len(pairs), ROW), np.float32) for name in ("loss_mask", "behavior_logp", "advantage")}
    tokens_NT, temperature_NT = np.zeros((len(pairs), ROW), np.int32), np.ones((len(pairs), ROW), np.float32)
    for row, (prompt, branch) in enumerate(pairs):
        sequence = [*prompt, *branch.tokens]
        tokens_NT[row, : len(sequence)], temperature_NT[row] = sequence, branch.temperature
        for name, array in arrays.items():
            array[row, len(prompt) : len(sequence)] = getattr(branch, name)
    return tokens_NT, temperature_NT, *arrays.values()
