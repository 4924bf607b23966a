"""Episodes in child processes: results, concurrent ones, and faults that cost only the episode that caused them."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from inference.rollouts import rollout as rollout_lib
from rl.envs.host import host as host_lib
from rl.envs.recording import rollouts, tape
from rl.envs.recording import session as session_lib
from rl.envs.sandbox import backend
from tests.support import episodes
from tests.support.user_code import turn_envs

LETTERS, ORDERS, PROGRAMS = (f"{turn_envs.__file__}:{name}" for name in ("letters", "orders", "programs"))


@contextlib.asynccontextmanager
async def hosting(name=ORDERS, options=None, **changes):
    settings = {"kind": "pure", "limit_s": 1, "on_error": lambda line: None} | changes
    host = host_lib.Host(name, options or {}, 0, **settings)
    try:
        yield host
    finally:
        await host.close()


class Script(episodes.Backend):
    """Answers the calls of one episode with texts in order; the last one stays."""

    def __init__(self, *texts, delay_s=0.0):
        super().__init__()
        self.script, self.delay_s = texts, delay_s

    async def __call__(self, call):
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        text = self.script[min(len(self.calls), len(self.script) - 1)]
        tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_id]
        self.calls.append((call, tokens))
        return episodes.sample(tokens)


def session(*texts, **options):
    return episodes.session(Script(*texts, **options))


def test_many_episodes_share_a_child_and_get_their_own_replies():
    async def run():
        async with hosting(LETTERS, {"turns": 3}) as host:
            env = turn_envs.letters(turns=3)
            good = [session(*env.make_task(index, "train").answer) for index in range(40)]
            found = await asyncio.gather(*(host.play(one, index, "train") for index, one in enumerate(good)))
            assert [one.scores["letters"] for one in found] == [3.0] * 40 and not any(one.error for one in found)
            assert {(one.num_calls, len(one.streams), one.overlapped) for one in good} == {(3, 1, False)}
            bad = await host.play(session("x"), 0, "held_out")
            assert bad.scores == {"reward": pytest.approx(0.1), "letters": 0.0, "num_turns": 3.0}
            assert len(host._children) == 1

    asyncio.run(run())


FAULTS = {
    "spin": "it takes too much time: its process exceeded its CPU time",
    "kill": "its process ended",
    "wait": "it takes too much time: it neither asks nor ends for",
    "hoard": "it takes too much memory",
    "raise": "KeyError: 'no such word' (turn_envs.py:",
    "flood": "ValueError: the messages of a call have 8388",
    "loop": "BudgetSpent: the episode has asked 320 times already",
    "fork": "PermissionError: [Errno 1]",
}


@pytest.mark.parametrize(
    "faults",
    [("raise", "flood", "fork", "kill"), pytest.param(("loop", "spin", "wait", "hoard"), marks=pytest.mark.slow)],
)
def test_a_fault_costs_only_its_own_episode(faults, monkeypatch):
    """Others that run in the same child complete, and no completion is sampled twice."""
    monkeypatch.setattr(host_lib, "CROWD", 10**6)
    monkeypatch.setattr(host_lib.scorer, "CLOCK_FACTOR", 5)
    lines = []

    async def run():
        async with hosting(on_error=lines.append) as host:
            others = [session("a", "b", "c", "end", delay_s=0.05) for _ in range(8)]
            faulty = [session("a", "b", fault) for fault in faults]
            runs = [*faulty, *others]
            found = await asyncio.gather(*(host.play(one, index, "train") for index, one in enumerate(runs)))
            for fault, one in zip(faults, found, strict=False):
                assert one.scores == {"reward": 0.0, "error": 1.0} and one.error.startswith(FAULTS[fault]), one
                assert one.in_time == (fault in ("raise", "flood", "loop", "fork"))
            assert [one.scores for one in found[len(faults) :]] == [{"reward": 1.0, "turns": 3.0}] * 8
            assert [len(one._backend.calls) for one in runs] == [3] * len(faults) + [4] * 8
            assert not any(one.unused() for one in runs)
            assert len(lines) == len({FAULTS[fault].partition(":")[0] for fault in faults})  # one of each kind

    asyncio.run(run())


def test_an_environment_may_run_programs_in_sandboxes_and_sees_no_secrets(monkeypatch):
    """Their output is in the next prompt: a replay that gets the same one accepts it."""
    try:
        backend.find()
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("INTELLAX_API_KEY", "secret")
    look = "import os\nprint(os.environ.get('INTELLAX_API_KEY'), 6 * 7)"

    async def run():
        async with hosting(PROGRAMS, kind="replayed") as host:
            one = session(look, "print(None, 42)")
            found = await host.play(one, 0, "train")
            assert found.scores == {"reward": 1.0, "length": 16.0}, found
            assert "None 42" in episodes.TOKENIZER.decode(one.streams[0].tokens.tolist())
            origin = rollouts.Origin(rollout_lib.TaskRef("programs", 0, 0, 0), 1, 1.0)
            taped = tape.of_rollouts(rollouts.of_episode(one, origin, found.scores), episodes.TOKENIZER.stop_ids)
            again = session_lib.Session(episodes.TOKENIZER, None, episodes.LIMITS, seed=7, sample=0, tape=taped)
            assert (await host.play(again, 0, "train")).scores == found.scores and not again.unused()
            with open(f"/proc/{host.process_ids[0]}/environ") as file:
                assert "secret" not in file.read()

    asyncio.run(run())


@pytest.mark.slow
def test_a_child_that_is_killed_from_outside_costs_nothing():
    async def run():
        async with hosting() as host:
            runs = [session(*"abcdef", "end", delay_s=0.1) for _ in range(5)]
            tasks = [asyncio.create_task(host.play(one, index, "train")) for index, one in enumerate(runs)]
            for _ in range(2):
                await asyncio.sleep(0.25)
                while host._shared is None or host._shared._process.process is None:
                    await asyncio.sleep(0.05)
                os.kill(host._shared._process.process.pid, signal.SIGKILL)
            found = await asyncio.gather(*tasks)
            assert [one.scores["reward"] for one in found] == [1.0] * 5
            assert [len(one._backend.calls) for one in runs] == [7] * 5

    asyncio.run(run())


@pytest.mark.slow
def test_a_child_whose_event_loop_stands_still_is_replaced(monkeypatch):
    monkeypatch.setattr(host_lib.scorer, "CLOCK_FACTOR", 3)

    async def run():
        async with hosting(kind="replayed", sandbox="off") as host:
            begun_s = time.monotonic()
            found = await host.play(session("sleep"), 0, "train")
            assert "it takes too much time" in found.error and not found.in_time and time.monotonic() - begun_s < 30

    asyncio.run(run())


def test_errors_of_the_backend_reach_the_caller():
    async def run():
        async def gone(call):
            raise ConnectionError("no server")

        async with hosting() as host:
            one = session("end")
            one._backend = gone
            with pytest.raises(ConnectionError, match="no server"):
                await host.play(one, 0, "train")
            limits = episodes.LIMITS
            taped = session_lib.Session(episodes.TOKENIZER, None, limits, seed=7, sample=0, tape={})
            with pytest.raises(session_lib.NotOnTape):
                await host.play(taped, 0, "train")
            assert (await host.play(session("end"), 0, "train")).scores["reward"] == 1.0
            assert host._shared.num_episodes == 0

    asyncio.run(run())


def test_an_environment_that_cannot_be_loaded_is_named():
    async def run():
        async with hosting("reverse_text") as host:
            with pytest.raises(
                ValueError, match="host of environment reverse_text did not start: .*no episodes of several"
            ):
                await host.play(session("end"), 0, "train")
        async with hosting(digest="00" * 32) as host:
            with pytest.raises(ValueError, match="code or data has changed"):
                await host.play(session("end"), 0, "train")

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("message", ['{"call": [1, 1]}', "nonsense"])
def test_malformed_messages_of_a_child_are_its_fault(message):
    async def run():
        async with hosting() as host:
            one = session("wait")
            task = asyncio.create_task(host.play(one, 0, "train"))
            for _ in range(2):  # in the shared child, then alone
                while True:
                    await asyncio.sleep(0.01)
                    live = [
                        child
                        for child in host._children
                        if child._tasks and child._death is None and child.num_episodes
                    ]
                    if live:
                        break
                live[0]._reader.feed_data(message.encode() + b"\n")
                while live[0]._death is None:
                    await asyncio.sleep(0.01)
                if task.done():
                    break
                if host._shared is live[0]:
                    continue
            return await asyncio.wait_for(task, 30)

    found = asyncio.run(run())
    assert found.scores == host_lib.FAILED
