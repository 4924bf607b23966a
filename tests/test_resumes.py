"""Resumes above relays, with a real orchestrator, server, worker, and replay: no honest rollout is refused for one."""

import asyncio
import contextlib
import dataclasses
import hashlib
import random
import socket
import threading
import time

import pytest

from inference import serve
from inference.rollouts import rollout as rollout_lib
from inference.server import startup
from rl import worker
from rl.orchestrator import orchestrator
from rl.orchestrator.verdicts import verdict_collector
from rl.protocol import timeline
from rl.verification import verifier
from sharding import broadcast
from sharding.format import journal
from tests.support import doubles, learner_double, serving, tiny
from tests.test_timelines import TRUSTED, relays


class Lives:
    """A run whose learner process ends in the middle of batches, with a real orchestrator, server, worker, and replay of every group."""

    def __init__(self, folder, root, lag, seed):
        self.exp, self.folder, self.root, self.rng = doubles.experiment(prompts=2), folder, root, random.Random(seed)
        self.attempt = self.step = 0
        config = self.exp.config.as_configdict()
        with config.unlocked(), socket.create_server(("127.0.0.1", 0)) as sock:
            config.topology.update(port=sock.getsockname()[1], heartbeat_s=0.5)
            config.trust.update(min_rate=1.0, max_attempts=1, sandbox="off")
            config.rl.update(max_lag=lag, num_steps=100)
        self.config, self.stack, self.batches = config, contextlib.ExitStack(), []
        self.run, self.worker, self.signer = (rollout_lib.WorkerKey.generate() for _ in range(3))
        rules = dataclasses.replace(
            verifier.rules_of(config, self.exp.tokenizer, stack=self.stack, run=self.run.worker),
            tolerance=doubles.FLOAT32,
        )
        published = verifier.published(str(root), key=TRUSTED)
        self.validator = verifier.Verifier(self.exp.model, published, rules)

    def begin(self):
        """A learner that resumes after `step`: its epoch."""
        self.publisher = broadcast.Publisher(self.root, broadcast.PublishOptions(key=learner_double.KEY, keep=8))
        self.publisher.forget(self.step)
        return self.publish(self.step)

    def publish(self, version):
        params = tiny.params(self.exp.model, 1000 * self.attempt + version)
        written = self.publisher.publish(params, version, metadata=self.exp.broadcast_metadata)
        data = (self.root / journal.dirname(version) / "manifest.json").read_bytes()
        return timeline.Policy(written.epoch, version, hashlib.sha256(data).hexdigest())

    def serve(self, url):
        """The inference server and the worker, which outlive the learners."""
        server = startup.prepare([url], self.exp.engine, key=TRUSTED).run()
        server.signer, server.run = self.signer, self.run.worker
        self.stack.callback(server.close)
        urls = [
            self.stack.enter_context(serving.in_thread(make(server)))
            for make in (serve.make_app, serve.make_control_app)
        ]
        self.server = urls
        options = {"concurrency": 2, "give_up_s": 120, "sandbox": "off"}
        url = f"http://127.0.0.1:{self.config.topology.port}"
        work = worker.Worker(url, self.worker, self.run.worker, **options).work

        def run():
            try:
                asyncio.run(work())
            except* ConnectionError:  # after `give_up_s` without another learner
                pass

        threading.Thread(target=run, daemon=True).start()

    def live(self, policy, num_batches):
        """One process of the learner: takes batches, publishes after each, and ends while workers make the next."""
        verdicts = verdict_collector.VerdictCollector(self.run, self.validator.check_groups_with_weights)
        run = orchestrator.Orchestrator(
            self.config,
            self.folder,
            credit=self.exp.credit,
            key=self.run,
            verdicts=verdicts,
            check_group_without_weights=self.validator.check_group_without_weights,
            secret=b"secret",
            invited=[self.worker.worker],
            server_keys=[self.signer.worker],
        )
        run.resume(self.step)
        run.nodes.add(*self.server, key=self.signer.worker)
        run.serve()
        run.publish(policy)
        for _ in range(num_batches):
            self.step += 1
            self.batches.append((policy.epoch, run.next_batch(self.step)))
            policy = self.publish(self.step)
            run.publish(policy)
        time.sleep(self.rng.random())
        run.close()
        self.attempt, self.step = self.attempt + 1, max(0, self.step - self.rng.randint(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "delay_s", "lag", "num_lives"), [(1, 0.0, 2, 6), (2, 0.0, 1, 6), (2, 0.1, 1, 2)])
def test_resumes_above_relays_refuse_no_honest_rollout(tmp_path, depth, delay_s, lag, num_lives):
    root = tmp_path / "weights"
    lives = Lives(tmp_path, root, lag, seed=f"{depth} {delay_s} {lag}")
    with lives.stack, relays(root, tmp_path, depth, delay_s) as url:
        for number in range(num_lives):
            policy = lives.begin()
            if number == 0:
                lives.serve(url)
            lives.live(policy, lives.rng.randint(1, 3))
    assert len({epoch for epoch, _ in lives.batches}) == num_lives
    for epoch, batch in lives.batches:
        assert {rollout.epoch for group in batch.groups for rollout in group} == {epoch}
        assert {rollout.server for group in batch.groups for rollout in group} == {lives.signer.worker}
        assert batch.metrics["trust/num_refused"] == batch.metrics["trust/num_server_faults"] == 0
    print(
        f"{num_lives} lives, {sum(len(batch.groups) for _, batch in lives.batches)} groups of {len(lives.batches)} batches"
    )
