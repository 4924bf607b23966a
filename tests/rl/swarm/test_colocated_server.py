"""The server in the learner's process, in this process: whose weights it uses, and when it stops."""

import concurrent.futures
import re
import weakref

import httpx
import jax
import pytest

from configs import quickstart
from inference.engine import request as request_lib
from inference.engine import weights as weights_lib
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from models import transformer
from rl.experiment import experiment, layout
from rl.protocol import timeline
from rl.swarm import colocated_server
from sharding.weights import broadcast
from tests.support import tiny, tiny_run

WAIT_S = 60
ASK = request_lib.GenerateRequest(tuple(b"hello"), seed=5, max_tokens=40)


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the engine's, at the end
@pytest.mark.parametrize("num_rollout_devices", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_the_engine_uses_the_learners_own_arrays(tmp_path, monkeypatch, num_rollout_devices):
    config, key = quickstart.get_config(), rollout_lib.WorkerKey.generate()
    few_programs = {"inference.num_slots": 8, "inference.prefill_batch": 8}  # one per number of slots to insert into
    fields = tiny_run.TINY | few_programs | {"topology.mode": "colocated", "mesh.rollout_devices": num_rollout_devices}
    config.update_from_flattened_dict(fields)
    exp = experiment.resolve(config)
    abstract = transformer.abstract(exp.model, layout.learner_mesh(exp.config))
    options = broadcast.PublishOptions(key=key.private)

    def published(version):
        params = jax.device_put(tiny.params(exp.model, version), jax.tree.map(lambda x: x.sharding, abstract))
        broadcast.publish(params, version, str(tmp_path), options, metadata=exp.broadcast_metadata)
        entry = broadcast.entry_of(tmp_path, version, key=key.worker)
        assert entry is not None
        return params, timeline.Policy(entry.epoch, version, entry.sha256)

    def step(params):
        jax.jit(lambda tree: jax.tree.map(lambda x: 0 * x, tree), donate_argnums=0)(params)

    def no_memory():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate")

    monkeypatch.setenv("INTELLAX_API_KEY", "secret")
    pull = broadcast.pull
    monkeypatch.setattr(broadcast, "pull", lambda *args, **options: pytest.fail("weights were read from files"))
    params, policy = published(0)
    first = weakref.ref(jax.tree.leaves(params)[0])
    with colocated_server.start(exp, tmp_path, key.worker, policy, params) as colocated:
        step(params)
        server, submit = colocated.server, colocated.server.scheduler.submit
        assert httpx.get(f"{colocated.url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{colocated.url}/v1/models", headers=headers).status_code == 200

        def tokens(future):
            (sample,) = future.result(WAIT_S)
            return sample.tokens, sample.logprobs, {*sample.versions}

        expected = tokens(submit(ASK))
        colocated.release()
        during = submit(ASK)
        if num_rollout_devices:
            assert tokens(during) == expected  # next to a train step
        else:
            with pytest.raises(concurrent.futures.TimeoutError):
                during.result(0.3)
        params, policy = published(1)
        assert first() is None  # a second copy of the parameters would stay on the devices
        colocated.hand_over(params, policy)
        colocated.reclaim()
        step(params)
        check = weights_lib.check_params
        monkeypatch.setattr(weights_lib, "check_params", lambda *args: pytest.fail("a step may be on the devices"))
        # It uses them only when they are named.
        assert tokens(during) == expected == tokens(submit(ASK))
        assert server.update(1, epoch=policy.epoch, digest=policy.digest) == 1
        assert server.policy_digest == policy.digest
        after = tokens(submit(ASK))
        assert after[0] != expected[0] and after[2] == {1}
        monkeypatch.setattr(weights_lib, "check_params", check)
        monkeypatch.setattr(broadcast, "pull", pull)  # a rollback deletes the arrays that were handed over
        assert server.update(0, rollback=True) == 0 and tokens(submit(ASK)) == expected
        assert server.update(1, epoch=policy.epoch, digest=policy.digest) == 1 and tokens(submit(ASK)) == after
        params, policy = published(2)
        with pytest.raises(ValueError, match="the new weights have NaN or infinity in"):
            colocated.hand_over(jax.tree.map(lambda x: x.at[:1].set(jax.numpy.nan), params), policy)
        with pytest.raises(ValueError, match="NaN or infinity"):
            server.offered[1].result(0)  # an update to this policy fails, too, and does not wait
        if num_rollout_devices:
            monkeypatch.setattr(server.engine, "generate", lambda *args: 1 // 0)
            with pytest.raises(scheduler_lib.Closed):
                submit(ASK).result(WAIT_S)
            words = "the inference engine of this process ended: ZeroDivisionError: .*; the same command resumes"
        else:
            monkeypatch.setattr(server.engine, "init_decode_state", no_memory)
            colocated.release()
            words = "the inference engine of this process ended: .* Out of memory; lower inference.num_slots or .*"
            for call in (colocated.reclaim, colocated.release):
                with pytest.raises(ValueError, match=words):
                    call()
        assert re.fullmatch(words, str(colocated.death()))
