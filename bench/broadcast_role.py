"""Runs one process of bench/broadcast.py: prints `ready`, waits for a line, publishes or pulls once, and reports as JSON.

It then runs until its input ends, as a learner or a server does: the exit of an interpreter takes a fifth of a CPU second from
the processes that are still being timed.
"""

import json
import resource
import sys
import time

from bench import broadcast as bench
from sharding.weights import broadcast
from sharding.weights.download import source as source_lib


def main() -> None:
    """Runs the role given by the arguments: `publish` or `pull`."""
    role, place = sys.argv[1:3]
    params = bench.random_tree(int(sys.argv[3])) if role == "publish" else None
    source = source_lib.open(place, trusted_key=bench.PUBLIC) if role == "pull" else None
    print("ready", flush=True)
    sys.stdin.readline()
    report = {"begun_s": time.time()}
    before_s = _cpu_s()
    if role == "publish":
        result = broadcast.publish(params, 0, place, broadcast.PublishOptions(key=bench.KEY))
    else:
        version = broadcast.wait_for(source, 0, timeout_s=300.0)
        report["seen_s"] = time.time()
        result = broadcast.pull(source, version, key=bench.PUBLIC)
    report |= {"done_s": time.time(), "cpu_s": _cpu_s() - before_s, "digest": result.digest}
    print(json.dumps(report), flush=True)
    sys.stdin.read()
    if source is not None:
        source.close()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
