"""A small learner, and batches for it: the tests of rl/learning/learner share them and the programs compiled for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import transformer
from rl.learning.batch import packing
from rl.learning.learner import objective, train_step
from sharding.mesh import mesh as mesh_lib
from tests.support import tiny

DENSE = tiny.model(vocab_size=64, num_layers=1, num_heads=8, num_kv_heads=4)
MOE = dataclasses.replace(
    DENSE, num_layers=2, num_experts=4, experts_per_token=2, expert_ffn_dim=32, first_dense_layers=1
)
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "delta": 4.0}
ROW = 16
PRODUCTS = {"q": "dr,rhc->dhc", "k": "dr,rhc->dhc", "v": "dr,rhc->dhc", "o": "hcr,rd->hcd"}  # A, B of LoRA -> change
PRODUCTS |= {"gate": "dr,rf->df", "up": "dr,rf->df", "down": "fr,rd->fd"}

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


@functools.partial(jax.jit, static_argnums=1)
def plain_logp(params, config, experts_LNTX=None):
    """(logp, entropy) [N, T - 1] of the plain rows from all logits, with given experts or the routers' own."""
    tokens_NT, temperature_NT, *_ = plain_rows()
    hidden, _ = transformer.apply(params, config, tokens_NT, experts_LBTX=experts_LNTX)  # causality hides the padding
    logits = transformer.logits(params, config, hidden)[:, :-1] / temperature_NT[:, 1:, None]
    logp_NTV = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logp = (logp_NTV * np.eye(config.vocab_size, dtype=np.float32)[tokens_NT[:, 1:]]).sum(axis=-1)
    return logp, -(jnp.exp(logp_NTV) * logp_NTV).sum(axis=-1)


@functools.partial(jax.jit, static_argnums=1)
def reference(params, config, experts_LNTX=None):
    """((loss, entropy), gradient) of INTELLECT-2's formula on the plain rows."""
    mask_NT, behavior_NT, A_NT = (x[:, 1:] for x in plain_rows()[2:])

    def loss(params):
        logp, entropy = plain_logp(params, config, experts_LNTX)
        r = jnp.clip(jnp.exp(logp - behavior_NT), 0.0, CLIP["delta"])
        clipped = jnp.clip(r, 1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        total = (jnp.maximum(-r * A_NT, -clipped * A_NT) * mask_NT).sum() / mask_NT.sum()
        return total, (entropy * mask_NT).sum() / mask_NT.sum()

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_gradient(grads, expected):
    """A gradient's entries are sums of 100 products that cancel: measured 2e-6 of the largest entry of a leaf."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max(), err_msg=str(path))


def kinds(tree):
    """The shape, dtype and sharding of each array."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
