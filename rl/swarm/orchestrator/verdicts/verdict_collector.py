"""Collects verdicts on quarantined groups from validators: this process, or others (`python -m rl.validator serve`).

1. Each group goes to as many validators as must agree on it (`quorum`), in a random order, so that no worker knows its judges. One
   request has as many waiting groups as a replay takes together, those of the earliest batch first: the learner waits for it.
2. A validator that gives no usable answer within the time limit (it is silent or fails, lacks weights, answers about other bytes, or
   signs badly) is left alone for a while, for up to a minute after repeated faults. The next one in the order replaces it. Groups of
   a request that failed are sent one by one, since one of them may be the cause.
3. `quorum` equal verdicts decide. Where they differ, further validators are asked. If no quorum is possible, the group is void: too
   many contradict each other ("undecided"), or fail MAX_FAILURES times on this group alone while they are up ("unanswered").
   A validator that is down, or fails on one group after another, fails on none of them: an outage of all is a pause. One that often
   contradicts the quorum is not asked again.
4. Until then the group stays quarantined, and `notice` names the validators at fault. Only if all of them lack the weights does the
   run fail: the weights are ours. This process always answers, or the run fails. The caller withdraws groups that are too old for
   any batch, before the weights of their versions are gone.

All state belongs to one event loop in a thread of its own; the other threads only call the public methods.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import random
import threading
import time
from collections.abc import Callable, Sequence

import httpx

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol import lease
from rl.protocol import verdict as verdict_lib
from rl.swarm.orchestrator.groups import queue_entry
from rl.swarm.orchestrator.verdicts import verdict_case
from rl.swarm.orchestrator.verdicts.verdict_case import Case, Validator
from rl.trust.verification import checks
from sharding.system import bounded_reply, retries, signed_message
from sharding.system.logs import role_metrics

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
GREETING_S = 10.0  # that a validator has for its first sign of life
MAX_REPLY_BYTES = 2**20  # 64 verdicts of at most 2 KiB are far fewer

Groups = Sequence[Sequence[rollout_lib.Rollout]]
Replay = Callable[[Groups], list[checks.Verdict]]
# (group, digest of its rollouts, the decision on it, signed verdicts); void groups are no fault of their worker
Decide = Callable[[queue_entry.Key, str, checks.Verdict, Sequence[verdict_lib.SignedVerdict]], None]


class ServerError(ValueError):
    """A validator's reply with a status of 500 or more."""


REQUEST_ERRORS = (ValueError, OSError, httpx.HTTPError, httpx.InvalidURL)


class VerdictCollector:
    """Asks validators for verdicts on groups, and passes decisions to the function given to `start`.

    Args:
      key: the run's, which signs requests, and verdicts of this process.
      replay: returns a verdict on each of some groups, in this process; None: `validators` replay.
      validators: "http://HOST:PORT#KEY" of each, with its public key.
      quorum: how many must agree; 0: more than half of them.
      verdict_s: seconds that a validator has for a request.
      on_fault: called with a line for people when a validator begins to fail, recovers, or is not asked again, and for a void group.
    """

    def __init__(
        self,
        key: rollout_lib.WorkerKey,
        replay: Replay | None = None,
        *,
        validators: Sequence[str] = (),
        quorum: int = 0,
        verdict_s: float = 60.0,
        on_fault: Callable[[str], None] = lambda line: None,
    ):
        parts = [one.rpartition("#") for one in validators] or [("", "", key.worker)]
        self._validators = [
            Validator(url.rstrip("/"), key, retries.Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)) for url, _, key in parts
        ]
        self.validators: Sequence[str] = [one.key for one in self._validators]  # public keys
        self.quorum = quorum or len(parts) // 2 + 1
        self._key, self._replay, self._verdict_s, self._on_fault = key, replay, verdict_s, on_fault
        self._cases: dict[str, Case] = {}  # by digest
        self.seconds = role_metrics.latency("intellax_orchestrator_verdict", "Seconds until a group has its verdicts.")
        self._counts = {"validator_faults": 0, "validator_contradictions": 0}
        self._taken = dict(self._counts)
        self._loop = asyncio.new_event_loop()
        self._wake, self._stop = asyncio.Event(), asyncio.Event()

    def start(self, decide: Decide, fail: Callable[[BaseException], None]) -> None:
        """Starts the thread that asks validators. `fail(error)` ends the run after an error that is not a worker's fault.

        `decide(group key, digest, verdict, signed verdicts)` is called once a quorum agrees on a group, or if it cannot get one.
        """
        self._decide, self._fail = decide, fail
        self._thread = threading.Thread(target=self._run, name="verdicts", daemon=True)
        self._thread.start()

    def ask(self, key: queue_entry.Key, rollouts: Sequence[rollout_lib.Rollout], digest: str) -> None:
        """Queues a group for the validators; returns immediately."""
        order = random.SystemRandom().sample(self._validators, len(self._validators))
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._add, Case(key, rollouts, digest, order, time.monotonic()))

    def withdraw(self, digest: str) -> None:
        """Forgets a group, whose verdict is not needed any more; returns immediately."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._cases.pop, digest, None)

    def notice(self) -> str:
        """Returns the validators that do not answer or are not asked again, with the reason, or ""."""
        silent = [f"{one.url} ({one.problem})" for one in self._validators if one.problem and not one.is_excluded]
        excluded = [one.url for one in self._validators if one.is_excluded]
        parts = (("validators without an answer", silent), ("validators that contradict the others", excluded))
        return "; ".join(f"{name}: {', '.join(found)}" for name, found in parts if found)

    def counts(self) -> dict[str, float]:
        """Returns the faults and contradictions of validators since the last call, and how many are not asked again."""
        counts, taken = dict(self._counts), self._taken  # the event loop counts on
        self._taken = counts
        num_excluded = float(sum(one.is_excluded for one in self._validators))
        return {name: float(counts[name] - taken[name]) for name in counts} | {"validators_excluded": num_excluded}

    def close(self) -> None:
        """Cancels all requests, waits for a replay in this process, and ends the thread."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    # ---- in the event loop

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:  # ends the run: no other code reads the result of this thread
            self._fail(error)

    async def _main(self) -> None:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:  # `_request` has the time limit
            tasks = [asyncio.ensure_future(self._serve(http, one)) for one in self._validators]
            greeting = asyncio.ensure_future(self._greet(http))
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (stop, greeting, *tasks):
                    task.cancel()
                await asyncio.gather(stop, greeting, *tasks, return_exceptions=True)
                await self._loop.shutdown_default_executor()

    async def _greet(self, http: httpx.AsyncClient) -> None:
        """Names the validators that show no sign of life when the run starts. The run goes on: they may come later."""

        async def ask(validator: Validator) -> str:
            try:
                async with asyncio.timeout(GREETING_S):
                    await _check_health(http, validator)
                return ""
            except REQUEST_ERRORS as error:
                return f"{validator.url} ({_problem(error, 'GET /health', GREETING_S)})"

        silent = [] if self._replay else [line for line in await asyncio.gather(*map(ask, self._validators)) if line]
        if silent:
            self._on_fault(f"validators without an answer at the start: {', '.join(silent)}")

    def _add(self, case: Case) -> None:
        self._cases[case.digest] = case
        self._notify()

    def _notify(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()

    async def _serve(self, http: httpx.AsyncClient, validator: Validator) -> None:
        """Sends waiting groups to one validator; never returns."""
        while True:
            wake, now_s = self._wake, time.monotonic()
            wanted = [case for case in self._cases.values() if case.wants(validator, self.quorum, now_s)]
            if not wanted:
                left_s = validator.free_s - now_s
                with contextlib.suppress(TimeoutError):
                    # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
                    async with asyncio.timeout(left_s if left_s > 0 else None):
                        await wake.wait()
                continue
            # A group that makes every request with it fail must not hold up the others: after a failure, each goes alone.
            if fresh := [case for case in wanted if not case.failed_s]:
                batch = verdict_case.take_batch(fresh)
            else:
                # First those that it has not failed on, so that an outage does not look like the fault of one of them.
                batch = [min(wanted, key=lambda case: (case.digest in validator.failed_alone, case.num_alone))]
            if self._replay:
                verdicts = await asyncio.to_thread(self._replay_here, self._replay, batch)
                for case, verdict in zip(batch, verdicts, strict=True):
                    if self._lacks_weights(case, verdict):  # of a published version: our own fault
                        found = f"the validator cannot replay {case.name}: weights: {verdict.detail}"
                        raise ValueError(f"{found}; check the published weights of the run")
                    self._vote(case, validator, verdict)
            else:
                await self._request(http, validator, batch)

    def _replay_here(self, replay: Replay, cases: list[Case]) -> list[verdict_lib.SignedVerdict]:
        """Replays groups in this process, in a thread of the event loop; returns verdicts signed by the run."""
        signed = []
        for case, verdict in zip(cases, replay([case.rollouts for case in cases]), strict=True):
            fields = case.digest, verdict.accepted, verdict.reason, verdict.detail
            signed.append(verdict_lib.SignedVerdict(self._key.worker, *case.group, *fields).sign(self._key))
        return signed

    async def _request(self, http: httpx.AsyncClient, validator: Validator, cases: list[Case]) -> None:
        """Asks a validator about groups, and records its verdicts or its fault."""
        problem, found, first, request = "", [], cases[0], "GET /health"
        is_alone, failed_s = bool(first.failed_s), first.failed_s.get(validator.key, math.inf)
        first.num_alone += is_alone
        try:
            async with asyncio.timeout(self._verdict_s):
                if is_alone:
                    await _check_health(http, validator)  # an outage is not the group's fault
                    validator.failed_alone.add(first.digest)
                request = "POST /verdicts"
                found = await _exchange(http, self._key, validator, cases)
        except REQUEST_ERRORS as error:
            problem = _problem(error, request, self._verdict_s)
            # It hangs or fails with several groups, and answered for none since: an outage, too.
            is_silent = validator.answered_s < failed_s and len(validator.failed_alone) > 1
            is_outage = is_silent and isinstance(error, TimeoutError | ServerError)
            first.failures[validator.key] += is_alone and request == "POST /verdicts" and not is_outage
        for case, verdict in zip(cases, found, strict=False):
            if self._lacks_weights(case, verdict):
                problem = f"it lacks the weights of {case.name}: {verdict.detail}"
                case.lack_weights.add(validator.key)
                case.failures[validator.key] = 0
            else:
                case.lack_weights.discard(validator.key)
                self._vote(case, validator, verdict)
        self._note(validator, problem)
        if found:
            validator.answered_s = time.monotonic()
            validator.failed_alone.clear()
        for case in cases:
            if not found:
                case.failed_s.setdefault(validator.key, time.monotonic())
            self._check_weights(case)
        for case in [*self._cases.values()]:  # others, too: they may wait for a validator that is excluded now
            if verdict := case.void(self.quorum):
                self._on_fault(f"{case.name} is void, and is generated again: {verdict.detail}")
                self._finish(case, verdict)
        self._notify()

    def _vote(self, case: Case, validator: Validator, verdict: verdict_lib.SignedVerdict) -> None:
        """Counts one verdict, and decides the group if it has a quorum."""
        if not self._is_open(case):
            return
        case.verdicts[validator.key] = verdict
        votes = case.votes
        if max(votes.values()) >= self.quorum:
            accepted = votes[True] >= self.quorum
            agreeing = [one for one in case.verdicts.values() if one.accepted == accepted]
            # Better one that others could check.
            decision = min(agreeing, key=lambda one: one.reason in verdict_case.OF_MANY)
            for one in case.order:
                if one.key in case.verdicts:
                    self._compare(case, one, decision)
            self._finish(case, checks.Verdict(decision.reason, decision.detail))

    def _is_open(self, case: Case) -> bool:
        """Returns False for a group that was decided or withdrawn meanwhile."""
        return self._cases.get(case.digest) is case

    def _lacks_weights(self, case: Case, verdict: verdict_lib.SignedVerdict) -> bool:
        """Returns True for a validator that lacks the weights of a group, unless the group was withdrawn because they are gone."""
        return verdict.reason == verdict_lib.Reason.WEIGHTS and self._is_open(case)

    def _finish(self, case: Case, verdict: checks.Verdict) -> None:
        del self._cases[case.digest]
        self.seconds.observe(time.monotonic() - case.since_s)
        self._decide(case.group, case.digest, verdict, list(case.verdicts.values()))

    def _compare(self, case: Case, validator: Validator, decision: verdict_lib.SignedVerdict) -> None:
        """Counts a verdict against its validator if the quorum decided otherwise; evidence that others may lack weighs less, or nothing."""
        verdict = case.verdicts[validator.key]
        validator.num_decided += 1
        if verdict.accepted != decision.accepted and decision.reason not in verdict_case.OF_MANY:
            if verdict.reason in verdict_case.OF_MANY:
                validator.num_doubts += 1
            else:
                self._counts["validator_contradictions"] += 1
                validator.num_contradictions += 1
            if validator.is_contradictory and not validator.is_excluded:
                validator.is_excluded = True
                num = validator.num_contradictions + validator.num_doubts
                found = f"{num} of its {validator.num_decided} verdicts contradict the others"
                self._on_fault(f"validator {validator.url} is not asked again: {found}")

    def _note(self, validator: Validator, problem: str) -> None:
        """Records the outcome of a request: after a fault (`problem`), the validator is left alone for a time that doubles."""
        if bool(problem) != bool(validator.problem):
            state = f"is replaced by others for now: {problem}" if problem else "answers again"
            self._on_fault(f"validator {validator.url} {state}")
        validator.problem = problem
        if problem:
            self._counts["validator_faults"] += 1
            validator.free_s = time.monotonic() + validator.pause.next_s()
        else:
            validator.pause.reset()

    def _check_weights(self, case: Case) -> None:
        """Fails the run if every validator that is asked lacks the weights of a group, and the time limit is over for it."""
        asked = {one.key for one in case.order if not one.is_excluded}
        is_late = time.monotonic() - case.since_s > self._verdict_s
        if self._is_open(case) and asked and asked <= case.lack_weights and is_late:
            found = f"no validator can pull the weights that {case.name} names"
            self._fail(ValueError(f"{found}; check the published weights of the run, and --weights of the validators"))


async def _exchange(
    http: httpx.AsyncClient, key: rollout_lib.WorkerKey, validator: Validator, cases: Sequence[Case]
) -> list[verdict_lib.SignedVerdict]:
    """Returns a validator's verdicts on groups of the run with this `key`. Raises ValueError if they are not its own, on exactly these groups."""
    body = await asyncio.to_thread(parquet.to_bytes, [rollout for case in cases for rollout in case.rollouts])
    session = lease.Session(key.worker, validator.key)
    signed = lease.request(key, session, rollouts=hashlib.sha256(body).hexdigest())
    sent = {"content": body, "headers": {lease.HEADER: json.dumps(signed)}}
    response = await bounded_reply.fetch(http, "POST", f"{validator.url}/verdicts", MAX_REPLY_BYTES, **sent)
    if response.status_code != 200:
        kind = ServerError if response.status_code >= 500 else ValueError
        raise kind(f"status {response.status_code}: {response.text[:200]}")
    try:
        answer = response.json()
        verdicts = {one.digest: one for one in map(verdict_lib.SignedVerdict.read, answer["verdicts"])}
        is_fresh = answer["request"] == signed["signature"] and signed_message.is_signed(validator.key, answer)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"its reply has no verdicts: {error}") from error
    if not is_fresh:  # a copy of an earlier "weights" would fail the run
        raise ValueError("its reply is not signed by its key over this request")
    for case in cases:
        expected = key.worker, *case.group, case.digest, validator.key
        one = verdicts.get(case.digest)
        if one is None or (one.run, one.split, one.step, one.group, one.digest, one.validator) != expected:
            raise ValueError(f"its reply has no verdict of its own on {case.name}")
        if one.reason in verdict_case.VOID:
            raise ValueError(f"it calls {case.name} {one.reason}, which only the collector may decide")
    return [verdicts[case.digest] for case in cases]


async def _check_health(http: httpx.AsyncClient, validator: Validator) -> None:
    async with http.stream("GET", f"{validator.url}/health") as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code} of /health")


def _problem(error: Exception, request: str, limit_s: float) -> str:
    """Returns why a request to a validator had no usable answer, for people."""
    if isinstance(error, TimeoutError):
        return f"no answer to {request} in {limit_s:g} s"
    if isinstance(error, ValueError):
        return str(error)
    return f"{request} ended with {str(error) or type(error).__name__}; see whether it runs, and read its log"
