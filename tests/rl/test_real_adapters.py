"""Adapters next to the real model in bfloat16: they learn as next to float32, servers compute with them as the learner does, versions are small.

The oracle of the loss is the float32 base: matrices with the adapters merged in bfloat16 would hardly change (2 % of the weights after two steps).
"""

import contextlib
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import finetune
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from inference.server import startup
from models import logprobs, lora, transformer
from rl import sft
from rl.experiment import experiment, initial
from rl.learning.batch import host_feed, packing
from rl.learning.learner import train_step
from sharding.mesh import mesh as mesh_lib
from sharding.system.multihost import hosts
from sharding.weights import broadcast
from sharding.weights.download import source as source_lib
from tests.support import real_model

NUM_STEPS = 5
SIZES = {
    **{"warmup.num_steps": NUM_STEPS, "warmup.learning_rate": 2e-5, "warmup.rate_steps": 0, "warmup.tasks_per_step": 2},
    **{"inference.max_model_len": 128, "train.row_length": 128, "train.rows": 1, "inference.num_slots": 4},
    **{"sampling.max_tokens": 16, "rl.prompts_per_step": 4, "evaluation.num_tasks": 4, "inference.mesh.tensor": 1},
    **{"model.scan_layers": False, "model.remat": "none"},
}
ENGINE = engine_lib.EngineConfig(num_slots=4, max_model_len=128, prefill_batch=4, steps_per_call=8)
QUESTIONS = ("Where does the Rhine end?", "What is a sonnet?")
ANSWERS = (
    "It ends in the North Sea, near Rotterdam, after it has passed Basel, Strasbourg, Mainz, Cologne, and Arnhem.",
    "A poem of fourteen lines: an octave of eight, which asks, then a turn, and a sestet of six lines, which answers.",
)


def learner_of(dtype, tmp_path):
    """Returns (experiment, learner, train state, batch) of two conversations that are trained on in each step."""
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = finetune.get_config()
    own = {"init_from": str(real_model.folder(dtype)), "warmup.data": str(data)}
    config.update_from_flattened_dict(SIZES | own | {"model.dtype": dtype, "model.param_dtype": dtype})
    exp, mesh = (
        experiment.resolve(initial.completed(config), has_rollouts=False),
        mesh_lib.create({}, jax.devices()[:1]),
    )
    learner, layout = sft.make_learner(exp, mesh), exp.layout(mesh, 2)
    state = train_step.init_state(jax.random.key(0), learner, initial.load(exp, mesh))
    batch = host_feed.place(sft.from_files(exp).batch(1), layout, mesh, hosts.ALONE)
    train_step.compile_train_step(learner, packing.abstract(layout, mesh))
    return exp, learner, state, batch


def errors(server, params, model):
    """Returns the errors of the server's log-probabilities, in nats, for tokens that it samples: against the learner's function."""
    tokenizer, apply, found = server.engine.tokenizer, jax.jit(transformer.apply, static_argnums=1), []
    for question, seed in itertools.product(QUESTIONS, range(3)):
        prompt = tokenizer.render([{"role": "user", "content": question}]).token_ids
        (got,) = server.scheduler.submit(request_lib.GenerateRequest(prompt, max_tokens=24, seed=seed)).result(300)
        tokens = np.zeros((1, ENGINE.max_model_len), np.int32)
        tokens[0, : len(prompt) + len(got.tokens)] = *prompt, *got.tokens
        hidden, _ = apply(params, model, tokens)
        logp, _ = logprobs.token_logprobs(params, model, hidden, jnp.asarray(tokens), jnp.ones(tokens.shape))
        found.append(np.abs(np.asarray(got.logprobs) - np.asarray(logp)[0, len(prompt) :][: len(got.tokens)]))
    return np.concatenate(found)


@pytest.mark.slow  # fast on a small model: tests/rl/learning/learner/test_lora.py, tests/inference/server/test_adapters.py
@pytest.mark.real
def test_a_bfloat16_base_learns_as_a_float32_one_and_versions_are_small(tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        exp, learner, state, batch = learner_of(dtype, tmp_path)
        take, losses[dtype] = train_step.jit_train_step(learner), []
        publisher = broadcast.Publisher(tmp_path / dtype, fixed=lora.BASE)
        for version in range(NUM_STEPS + 1):
            tree, metadata = exp.published(train_step.policy(learner, state))
            publisher.publish(tree, version, metadata=metadata)
            if version < NUM_STEPS:
                state, metrics = take(state, batch)
                losses[dtype].append(float(metrics["loss/total"]))
    print(losses)
    plain, low = (np.array(losses[dtype]) for dtype in ("float32", "bfloat16"))
    np.testing.assert_allclose(low, plain, rtol=0.01)
    assert plain[-1] < 0.94 * plain[0]  # merged in bfloat16, it falls by a fifth of that

    num_model_bytes, have = transformer.num_bytes(exp.model), None
    with contextlib.closing(source_lib.open(tmp_path / "bfloat16")) as opened:
        for version in range(NUM_STEPS + 1):
            before = opened.stats()["num_bytes"] if version else 0
            have = broadcast.pull(opened, version, base=have).locked()
            num_bytes = opened.stats()["num_bytes"] - before
            print(version, num_bytes, num_model_bytes / num_bytes)
            assert version == 0 or 20 * num_bytes < num_model_bytes
        assert num_bytes > 1e6  # not those of an unchanged policy

    # The server's policy is the learner's, with adapters as without: here with ones that matter more than after five steps.
    rng, found = np.random.default_rng(0), {}
    large = jax.tree.map(lambda x: x + 0.01 * rng.standard_normal(x.shape).astype(np.float32), state.params)
    trained = train_step.policy(learner, state.replace(params=large))
    for name, params in (("without", state.frozen), ("with", trained)):
        tree, metadata = exp.published(params)
        broadcast.publish(tree, 0, tmp_path / name, metadata=metadata)
        with contextlib.closing(startup.prepare(str(tmp_path / name), ENGINE).run()) as server:
            found[name] = errors(server, params, dataclasses.replace(exp.model, attention="auto"))
    print({name: (error.mean(), error.max()) for name, error in found.items()})
    assert found["with"].mean() < 1.5 * found["without"].mean() < 0.1
