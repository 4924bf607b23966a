"""The orchestrator of another process: every call may be repeated, either side may start again, and an older learner is refused.

The host runs in a thread here, on an orchestrator without model and servers. `restart` is a kill: the files stay, the objects do not.
"""

import contextlib
import threading
import time
from concurrent import futures

import httpx
import jax
import numpy as np
import pytest

from inference.rollouts import parquet
from inference.server import web
from rl.learning.batch import host_feed, packing, training_batch
from rl.protocol import timeline
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator.remote import client, learner_routes
from rl.swarm.orchestrator.remote import host as host_lib
from sharding.mesh import mesh as mesh_lib
from sharding.system import sockets
from sharding.system.multihost import hosts as hosts_lib
from tests.support import killed, ledgers, proxy

TOKEN = "t" * 16
LAYOUT = packing.Layout(row_length=16, rows=2, num_micro_batches=4)


class Site:
    """A host that serves at one port, and can be killed and started again there."""

    def __init__(self, path):
        self.path, self.port, self.process, self.lines = path, 0, None, []
        self.start()

    def start(self):
        self.ledger = run_ledger.RunLedger(self.path / "ledger.db", killed.RUN, killed.RUN.worker)
        directory = self.path / "rollouts" / "open"
        make = lambda **sizes: packing.Layout(**sizes)  # noqa: E731
        self.host = host_lib.Host(
            directory, orchestrator_lib.STATES, self.ledger, self.make, make, self.check, self.lines.append
        )
        self.recovered = self.host.recover()
        app = learner_routes.make_app(self.host, lambda: "http://workers", token=TOKEN, hosts=None)
        sock = sockets.listen("127.0.0.1", self.port)
        self.port = sock.getsockname()[1]
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(web.in_thread(web.server(app, drain_s=1), sock))

    def make(self, stack, known):
        self.process = killed.Process(self.path, ledger=self.ledger)
        stack.callback(self.process.orchestrator.close)
        return self.process.orchestrator

    def check(self, fields):
        if fields != {"seed": 0}:
            raise ValueError("seed differs")

    def kill(self):
        self.stack.close()
        self.host.close()
        self.ledger.__exit__()

    def restart(self):
        self.kill()
        self.start()


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(host_lib, "WAIT_S", 0.3)
    monkeypatch.setattr(client, "PAUSE_S", 0.05)
    site = Site(tmp_path)
    with contextlib.ExitStack() as site.learners:
        yield site
    site.kill()


def policy(epoch, version):
    return timeline.Policy(epoch, version, f"{epoch}{version}" * 32)


def learner(site, name, **options):
    options = {"patience_s": 60, "layout": LAYOUT} | options
    url, token = f"http://127.0.0.1:{site.port}", options.pop("token", TOKEN)
    return site.learners.enter_context(client.RemoteOrchestrator(url, token, learner=name, **options))


def fetched(remote, step, mesh):
    """All arrays of a batch as bytes."""
    used = remote.next_batch(step).num_micro_batches
    read = lambda regions: remote.rows(step, regions)  # noqa: E731
    batch = host_feed.fetch(used, read, LAYOUT, mesh, hosts_lib.ALONE)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(batch)]


def test_a_learner_and_its_orchestrator_survive_restarts_of_each_other(site):
    mesh, notices = mesh_lib.create({"data": 2}, devices=jax.devices()[:2]), []
    remote = learner(site, "first", notify=notices.append)
    remote.attach({"seed": 0}, 0, {}, None)
    assert remote.url == "http://workers" and remote.head().startswith("2:")
    for _ in range(2):  # as if the first reply was lost
        remote.attach({"seed": 0}, 0, {}, None)
        remote.publish(policy(3, 0))
    assert site.process.answer(2) == [0, 1]
    site.restart()
    assert site.recovered and site.process.answer(1) == [2]  # by itself; 0 and 1 were kept
    batch = remote.next_batch(1)
    assert batch.metrics["rollout/num_tokens"] == 12 and "rollout/length_p50" in batch.metrics
    first = fetched(remote, 1, mesh)
    assert fetched(remote, 1, mesh) == first
    site.restart()  # the batch is in the ledger, and not trained on
    assert fetched(remote, 1, mesh) == first
    kept = host_feed.place(_trees(site), LAYOUT, mesh, hosts_lib.ALONE)  # the same rows as without a process between
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(kept)] == first
    state, head = remote.state(1), remote.head()
    assert state["standing"]
    remote.publish(policy(3, 1))
    # A learner that starts again, from its checkpoint of step 0, begins an epoch; the older one is refused.
    second = learner(site, "second")
    second.attach({"seed": 0}, 0, {}, head)
    with pytest.raises(ValueError, match="another learner continues this run"):
        remote.publish(policy(3, 2))
    second.publish(policy(4, 0))
    assert site.process.answer(9) == [0, 1, 2, 3, 4, 5]
    site.restart()
    again = fetched(second, 1, mesh)
    assert len(again) == len(first)
    second.publish(policy(4, 1))
    site.restart()
    assert fetched(second, 2, mesh)
    second.end()
    assert site.host.ended.is_set()
    # A group of the last batch is damaged, which was not published: the next learner makes the batch again.
    site.kill()
    log = site.path / "rollouts" / "open" / "step_2.log"
    log.write_bytes(log.read_bytes()[:-9])
    site.start()
    assert not site.recovered and "put the directory back" in site.lines[-1]
    with pytest.raises(ValueError, match="could not continue from its files; start the learner again"):
        second.head()
    third = learner(site, "third")
    third.attach({"seed": 0}, 1, {}, head)
    third.publish(policy(5, 1))
    assert site.process.answer(3) and fetched(third, 2, mesh)
    site.ledger.flush()
    assert ledgers.verify(site.path / "ledger.db").error is None


def test_long_evaluations_are_begun_once_and_delay_no_other_call(site, monkeypatch):
    remote, begun, ended = learner(site, "first"), [], threading.Event()
    remote.attach({"seed": 0}, 0, {}, None)
    evaluate = lambda version, name: begun.append(version) or (version < 16 and ended.wait(5) and []) or []  # noqa: E731
    monkeypatch.setattr(site.process.orchestrator, "evaluate", evaluate)
    monkeypatch.setattr(host_lib, "WAIT_S", 2.0)
    with futures.ThreadPoolExecutor(16) as pool:
        found = [pool.submit(remote.evaluate, version) for version in range(16)]
        proxy.wait_until(lambda: len(begun) > 5)
        begun_s = time.monotonic()
        assert remote.head() and time.monotonic() - begun_s < 1.0
        assert [site.host.evaluate("first", version) for version in range(16, 34)] == [b""] * 18
        assert site.host.evaluate("first", 0) is None  # still the same
        ended.set()
        assert [one.result() for one in found] == [[]] * 16 and sorted(begun) == [*range(34)]


def _trees(site):
    """The trees of batch 1, assembled again from the file of its rollouts."""
    rollouts = parquet.read(site.path / "rollouts" / "step_1" / "accepted.parquet")
    scores = {sample: {"reward": sample + 0.5} for sample in range(2)}
    groups = [training_batch.rewarded(rollouts[i : i + 2], scores) for i in range(0, 6, 2)]
    return site.process.exp.credit.assign(groups)[0]


def test_a_learner_waits_for_groups_and_for_an_orchestrator_that_is_away(site):
    remote, notices = learner(site, "first"), []
    remote._notify = notices.append
    client_notice, client.NOTICE_S = client.NOTICE_S, 0.0
    try:
        remote.attach({"seed": 0}, 0, {}, None)
        remote.publish(policy(3, 0))
        done = threading.Event()
        waiting = threading.Thread(target=lambda: (remote.next_batch(1), done.set()))
        waiting.start()
        proxy.wait_until(lambda: any("batch 1 has 0 of 3 groups" in line for line in notices))
        assert not done.is_set()
        site.restart()
        notices.clear()
        proxy.wait_until(lambda: any("batch 1 has 0 of 3 groups" in line for line in notices))
        assert not done.is_set()
        site.process.answer(3)
        assert done.wait(60)
        site.kill()
        client.NOTICE_S = 60.0
        impatient = learner(site, "first", patience_s=0.5, notify=notices.append)
        notices.clear()
        with pytest.raises(ValueError, match="no answer from the orchestrator for 0 s .topology.patience_s."):
            impatient.check({"seed": 0})
        (line,) = notices  # without delay: the address may be wrong
        assert line.startswith(f"waiting for the orchestrator at http://127.0.0.1:{site.port}: ")
        with pytest.raises(ValueError, match="no answer from the orchestrator for 0 s .topology.patience_s."):
            impatient.head()
        impatient.end()
        assert notices[-1].startswith("the run has ended, and got no answer")
        assert impatient.waiting_for().startswith("waiting for the orchestrator at http://127.0.0.1:")
        remote.fail(ValueError("the relay ended"))
        with pytest.raises(ValueError, match="the relay ended"):
            remote.next_batch(2)
    finally:
        client.NOTICE_S = client_notice
        site.start()


def test_what_is_refused(site):
    remote = learner(site, "first")
    with pytest.raises(ValueError, match="another learner continues this run"):
        remote.head()
    remote.check({"seed": 0})
    with pytest.raises(ValueError, match="seed differs"):
        remote.check({"seed": 1})
    with pytest.raises(ValueError, match="seed differs"):
        remote.attach({"seed": 1}, 0, {}, None)
    with pytest.raises(ValueError, match="the restored checkpoint names entry 7:"):
        remote.attach({"seed": 0}, 0, {}, "7:" + "ab" * 32)
    remote.attach({"seed": 0}, 0, {}, None)
    with pytest.raises(ValueError, match="the fields of head are"):
        remote._call("head", more=1)
    with pytest.raises(ValueError, match="is unknown"):
        remote._call("drop")
    stranger = learner(site, "first", token="u" * 16)
    other = learner(site, "first")
    other._http = httpx.Client(
        base_url="http://x", transport=httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    )
    with pytest.raises(ValueError, match="is not the control listener of rl.swarm.orchestrator; set it to the URL"):
        other.check({"seed": 0})
    for call in (stranger.head, lambda: stranger.check({"seed": 0})):
        with pytest.raises(ValueError, match="the control token is missing or wrong"):
            call()
    site.process.orchestrator.fail(TimeoutError("the disk did not reply"))  # not by us, so asking again has no use
    with pytest.raises(ValueError, match="the disk did not reply"):
        remote.next_batch(1)
