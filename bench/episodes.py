"""Measures how many episodes of several calls one worker can run at the same time, with a server that answers after a random time.

    python -m bench.episodes --episodes 512 --turns 10

The environment runs in a child process (rl/envs/host), and its calls become token IDs in this one (rl/envs/recording). Printed are, for each
round: episodes per second, the lag of the event loop, which delays heartbeats and all other groups, and the memory of both processes.
"""

import argparse
import asyncio
import contextlib
import pathlib
import random
import resource
import time

import numpy as np

from inference.rollouts import completion as completion_lib
from models.text import tokenizer as tokenizer_lib
from rl.envs.host import host as host_lib
from rl.envs.interface import environment, episode
from rl.envs.recording import session as session_lib

TICK_S = 0.01


def build(*, turns: int = 10, seed: int = 0) -> environment.Environment:
    """Builds an environment that answers each of `turns` messages with a tool's result of 200 letters."""

    def make_task(index: int, split: str) -> environment.Task:
        return environment.Task(
            "turns", index, split, ({"role": "user", "content": f"task {index} {seed}"},), answer=""
        )

    def reply(task, messages, state):
        return [{"role": "user", "content": "result " * 28}] if len(messages) < 2 * turns else None

    def score(task, messages, state) -> dict[str, float]:
        return {"reward": len(messages) / (2 * turns)}

    play = episode.conversation(score=score, reply=reply, max_turns=turns)
    return environment.Environment("turns", make_task, play=play)


async def _lags(found: list[float]) -> None:
    while True:
        begun_s = time.perf_counter()
        await asyncio.sleep(TICK_S)
        found.append(time.perf_counter() - begun_s - TICK_S)


def _resident_bytes(process: str = "self") -> int:
    pages = int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def _run(args: argparse.Namespace) -> None:
    tokenizer, rng = tokenizer_lib.byte_chatml(), random.Random(0)
    limits = session_lib.Limits(max_tokens=64, max_model_len=2**15, max_calls=args.turns)

    async def backend(call: session_lib.Call) -> completion_lib.Completion:
        await asyncio.sleep(rng.uniform(0, 2 * args.answer_s))
        tokens = [*tokenizer.encode(f"answer {call.seed}"), tokenizer.eos_id]
        return completion_lib.Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), 0, "stop", bytes(258))

    options = {"kind": "pure", "limit_s": 1}
    host = host_lib.Host(f"{pathlib.Path(__file__).resolve()}:build", {"turns": args.turns}, 0, **options)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(host.close)
        await host.play(
            session_lib.Session(tokenizer, backend, limits, seed=0, sample=0), 0, "train"
        )  # starts the child
        for number in range(args.rounds):
            lags: list[float] = []
            ticks, begun_s = asyncio.create_task(_lags(lags)), time.perf_counter()
            sessions = [session_lib.Session(tokenizer, backend, limits, seed=n, sample=0) for n in range(args.episodes)]
            played = await asyncio.gather(*(host.play(one, n, "train") for n, one in enumerate(sessions)))
            seconds = time.perf_counter() - begun_s
            ticks.cancel()
            lost = sum(one.scores["reward"] != 1.0 for one in played)
            calls = sum(one.num_calls for one in sessions)
            p50, p99, most = np.percentile(lags, (50, 99, 100)) * 1e3
            print(
                f"round {number}: {args.episodes} episodes, {calls} calls, {lost} lost, {seconds:.1f} s; lag of the event loop "
                f"p50 {p50:.1f} p99 {p99:.1f} max {most:.1f} ms; resident {_resident_bytes() / 2**20:.0f} MiB, "
                f"child {_resident_bytes(str(host.process_ids[0])) / 2**20:.0f} MiB",
                flush=True,
            )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512, help="episodes at the same time")
    parser.add_argument("--turns", type=int, default=10, help="calls of each episode")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, in which memory must not grow")
    parser.add_argument("--answer_s", type=float, default=1.0, help="mean seconds until the server answers a call")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
