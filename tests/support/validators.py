"""Validators for tests: an HTTP server that signs scripted verdicts, and ways to misbehave."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import threading

import fastapi

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from inference.server import web
from rl.protocol import lease
from rl.protocol import verdict as verdict_lib
from rl.swarm.orchestrator.groups import queue_entry
from sharding.system import signed_message
from tests.support import serving

SILENT_S = 4.0  # longer than a limit that others keep to, beside any other work


@dataclasses.dataclass
class Double:
    """A validator of run `run` that answers (accepted, reason) per group by `judge`; `act` may misbehave before or after.

    `act(verdicts, key)` returns the verdicts to send, or a `fastapi.Response`; it may raise or sleep.
    """

    run: str
    judge: object = lambda rollouts: (True, "ok")
    act: object = None
    key: rollout_lib.WorkerKey = dataclasses.field(default_factory=rollout_lib.WorkerKey.generate)
    asked: list = dataclasses.field(default_factory=list)  # the numbers of the groups of each request
    url: str = ""
    is_up: bool = True

    @property
    def name(self):
        return f"{self.url}#{self.key.worker}"

    def app(self):
        app = fastapi.FastAPI()
        requests = lease.RequestVerifier(lease.Session(self.run, self.key.worker))

        @app.get("/health")
        async def health():
            return fastapi.Response(status_code=200 if self.is_up else 503)

        @app.post("/verdicts")
        async def verdicts(request: fastapi.Request):
            message = json.loads(request.headers[lease.HEADER])
            assert requests.verify(message, "verdicts") == self.run
            groups = collections.defaultdict(list)
            for rollout in parquet.from_bytes(await web.read_body(request)):
                groups[rollout.step, rollout.task.group].append(rollout)
            self.asked.append([group for _, group in groups])
            found = []
            for (step, group), rollouts in groups.items():
                digest = verdict_lib.group_digest(rollouts)
                accepted, reason = self.judge(rollouts)
                found.append(verdict_lib.SignedVerdict(self.run, "train", step, group, digest, accepted, reason))
            found = [one.sign(self.key) for one in found]
            if self.act:
                found = self.act(found, self.key)
                found = await found if asyncio.iscoroutine(found) else found
            if isinstance(found, fastapi.Response):
                return found
            return reply(found, self.key, message["signature"])

        return app


@contextlib.contextmanager
def served(*doubles):
    """Serves the doubles, each in a thread, and sets their URLs."""
    with contextlib.ExitStack() as stack:
        for double in doubles:
            double.url = stack.enter_context(serving.in_thread(double.app()))
        yield [double.name for double in doubles]


def reply(found, key, request):
    """The body of a reply to the request with this signature."""
    return signed_message.sign(
        key.private, {"verdicts": [dataclasses.asdict(one) for one in found], "request": request}
    )


def copied(found, key):
    """A reply of the validator to an earlier request, when it lacked the weights."""
    earlier = reply(changed(accepted=False, reason="weights")(found, key), key, "00" * 64)
    return fastapi.Response(json.dumps(earlier))


def changed(**fields):
    """Signs verdicts with other fields, such as another digest."""
    return lambda found, key: [dataclasses.replace(one, **fields).sign(key) for one in found]


def _dated(verdict, key, time_us):
    fields = vars(verdict) | {"time_us": time_us}
    del fields["signature"]
    return verdict_lib.SignedVerdict(**signed_message.sign(key.private, fields))


async def silence(found, key):
    await asyncio.sleep(SILENT_S)


MISDEEDS = {
    "sleeps": silence,
    "errs": lambda found, key: 1 / 0,
    "another status": lambda found, key: fastapi.Response("{}", 503),
    "no JSON": lambda found, key: fastapi.Response(b"\xff\x00"),
    "another shape": lambda found, key: fastapi.Response('{"verdicts": 3}'),
    "a deep reply": lambda found, key: fastapi.Response("[" * 10**5),
    "a long reply": lambda found, key: fastapi.Response(b" " * 2**21),
    "nothing": lambda found, key: [],
    "another digest": changed(digest="0" * 64),
    "another group": changed(group=99),
    "another run": changed(run="0" * 64),
    "another key": lambda found, key: [one.sign(rollout_lib.WorkerKey.generate()) for one in found],
    "bad signatures": lambda found, key: [dataclasses.replace(one, signature="00" * 64) for one in found],
    "rejects by accepting": lambda found, key: changed(accepted=False, reason="ok")(found, key),
    "accepts by rejecting": lambda found, key: changed(accepted=True, reason="toploc")(found, key),
    "a reason of lines": lambda found, key: changed(accepted=False, reason="sampling\n" * 9999)(found, key),
    "a time below 0": lambda found, key: [_dated(one, key, -1) for one in found],
    "a time of 400 digits": lambda found, key: [_dated(one, key, 10**400) for one in found],
    "capital letters": lambda found, key: [dataclasses.replace(one, signature=one.signature.upper()) for one in found],
    "calls it void": lambda found, key: changed(accepted=False, reason="undecided")(found, key),
    "a copied reply": copied,
    "no weights": lambda found, key: changed(accepted=False, reason="weights")(found, key),
}


class Decisions:
    """Collects the decisions and failures of a source of verdicts."""

    def __init__(self, source):
        self.changed, self.found, self.failures = threading.Condition(), {}, []
        self.signed = collections.defaultdict(list)
        source.start(self.decide, self.failures.append)

    def decide(self, key, digest, verdict, signed):
        with self.changed:
            self.signed[key] += signed
            assert key not in self.found, key
            self.found[key] = verdict.reason
            self.changed.notify_all()

    def wait(self, count, timeout_s=60):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.found) >= count, timeout_s), self.found
        return self.found


def settled(orchestrator, timeout_s=60):
    """Returns once no group of the orchestrator waits for a verdict, or the run has failed."""
    with orchestrator.locked as state:
        try:
            is_done = lambda: not state.queue.count()[queue_entry.State.QUARANTINED]  # noqa: E731
            assert orchestrator.locked.wait_for(is_done, timeout_s)
        except BaseException as error:
            if error is not state.failure:
                raise
