"""Measures the sandbox for code of the model (rl/envs/sandbox): scores of code per minute and core, and the start of a session.

    python -m bench.sandbox --scores 200 --tests 5 --backend bubblewrap

A score is one completion of the environment "code": a program that runs once per test. The rate per core is by CPU time of this process
and all sandboxes, so that a busy machine does not change it. The start of a cell is the first use, without a warm one.
"""

import argparse
import asyncio
import resource
import time

from rl.envs.sandbox import backend as backend_lib
from rl.envs.sandbox import limits as limits_lib
from rl.envs.sandbox import pool as pool_lib

PROGRAM = """
import sys, collections
words = sys.stdin.read().split()
counts = collections.Counter(words)
for word, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
    print(word, count)
"""


def cpu_s() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def scores(pool: pool_lib.Pool, count: int, num_tests: int) -> None:
    async def score(number: int) -> None:
        for test in range(num_tests):
            result = await pool.run(PROGRAM, stdin=f"a b a x{number} {test}")
            assert result.stdout.startswith("a 2\n"), result

    await asyncio.gather(*map(score, range(count)))


async def sessions(pool: pool_lib.Pool, count: int) -> None:
    for _ in range(count):
        async with pool.session(values={"context": "x" * 10**6}) as session:
            assert (await session.execute("len(context)")).stdout == "1000000\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scores", type=int, default=200)
    parser.add_argument("--tests", type=int, default=5, help="of each score")
    parser.add_argument("--backend", choices=backend_lib.NAMES, nargs="+", default=backend_lib.NAMES)
    args = parser.parse_args()
    for name in args.backend:
        backend = backend_lib.find((name,))
        for title, run, count in (
            ("first program of a new cell", lambda pool: pool.run("pass"), 1),
            (f"score of {args.tests} tests", lambda pool: scores(pool, args.scores, args.tests), args.scores),
            ("session with a context of 1 MB", lambda pool: sessions(pool, 50), 50),
        ):
            begun_s, begun_cpu_s = time.perf_counter(), cpu_s()
            pool = pool_lib.Pool(limits_lib.Limits(), backend=backend)
            asyncio.run(run(pool))
            pool.close()
            used_s = (cpu_s() - begun_cpu_s) / count
            wall_s = (time.perf_counter() - begun_s) / count
            print(
                f"{name}: {title}: {1000 * used_s:.1f} ms of CPU, {1000 * wall_s:.1f} ms by the clock, {60 / used_s:.0f} per minute and core"
            )


if __name__ == "__main__":
    main()
