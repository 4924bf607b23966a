"""Measures the orchestrator's HTTP side: idle workers that wait for work, and groups handed in by busy ones.

    python -m bench.orchestrator --idle 10000 --seconds 120               CPU of the orchestrator's process, memory, lease latency
    python -m bench.orchestrator --idle 0 --busy 16 --rate 500 --seconds 600   small groups at a rate, with ledger, log and learner

Clients run in processes of their own: one for the busy workers, one for the idle ones and for one that takes a group now and then and
whose leases are timed. Groups are of real form (prompt, rewards, proofs). A part of them (`--screened`) is checked as in a run without
a replay; the others as to signatures and leases only. A tenth of the time is warm-up. Each 10 s a line; at the end JSON, and a verdict.
`signature_us` is the CPU time of one signature check meanwhile: on a shared machine all CPU times grow with it.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import queue as queue_lib
import random
import resource
import sys
import tempfile
import threading
import time

import numpy as np
from ml_collections import config_dict

from bench import fake_workers
from configs import quickstart
from inference.rollouts import rollout as rollout_lib
from rl.experiment import experiment
from rl.protocol import timeline
from rl.protocol.ledger import run_ledger
from rl.swarm.orchestrator import orchestrator as orchestrator_lib
from rl.swarm.orchestrator.verdicts import verdict_collector
from rl.trust.verification import checks, evidence_log, verifier

LINE_S = 10.0
FILE_GROUPS = 8  # in a submission of a busy worker
MAX_LEASE_P99_S, MAX_GROWTH = 0.1, 0.05  # of the verdict; growth of the memory over the last half
KEY = rollout_lib.WorkerKey.generate()
SIGNATURE = KEY.private.sign(b"")
SPAWN = multiprocessing.get_context("spawn")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, and prints its figures and a verdict; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.orchestrator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--idle", type=int, default=1000, help="workers that wait for work")
    parser.add_argument("--busy", type=int, default=0, help="workers that hand in groups")
    parser.add_argument(
        "--rate", type=float, default=500.0, help="groups per second of all busy workers; 0: any number"
    )
    parser.add_argument("--screened", type=float, default=0.1, help="part of the groups checked without a replay")
    parser.add_argument("--probes", type=float, default=5.0, help="lease requests per second of one worker, timed")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args(argv)
    _open_files()
    keys = [rollout_lib.WorkerKey.generate() for _ in range(args.busy + 1 + args.idle)]
    raw = [key.private.private_bytes_raw() for key in keys]
    with tempfile.TemporaryDirectory() as folder:
        run = _orchestrator(pathlib.Path(folder), [key.worker for key in keys], args)
        url, queue, config = run.serve(), SPAWN.Queue(), _config()
        parts = [(raw[args.busy :], config, 1, 1, args.probes)]  # the timed one, and the idle ones
        parts += [(raw[: args.busy], config, args.busy, FILE_GROUPS, args.rate)] * bool(args.busy)
        clients = [SPAWN.Process(target=fake_workers.run, args=(url, *part, queue), daemon=True) for part in parts]
        for client in clients:
            client.start()
        if args.busy:
            threading.Thread(target=_learn, args=[run], name="learner", daemon=True).start()
        for _ in clients:
            _get(queue, clients)  # all are connected
        figures = _watch(run, queue, clients, args)
        for client in clients:
            client.terminate()
        run.fail(EOFError("the benchmark is over"))
        run.close()
    print(json.dumps(figures))
    return _judge(figures, args)


def _orchestrator(folder: pathlib.Path, invited: list[str], args) -> orchestrator_lib.Orchestrator:
    exp, key = experiment.resolve(_config(is_ended=not args.busy)), rollout_lib.WorkerKey.generate()
    config = config_dict.ConfigDict(exp.config)
    config.sampling.temperature = 0.0  # without noise any tokens fit any log-probabilities, so that no model is needed
    validator = verifier.Verifier(
        exp.model,
        _no_weights,
        verifier.rules_of(config, exp.tokenizer),
        evidence_log.EvidenceLog(None),
    )
    ledger = run_ledger.RunLedger(folder / "ledger.db", rollout_lib.WorkerKey.generate(), key.worker)

    def screen(rollouts, split):
        is_drawn = random.random() < args.screened
        return validator.check_group_without_weights(rollouts, split, is_signed=True) if is_drawn else (checks.OK, {})

    run = orchestrator_lib.Orchestrator(
        config,
        folder,
        credit=exp.credit,
        key=key,
        verdicts=verdict_collector.VerdictCollector(key, lambda groups: [checks.OK] * len(groups)),
        check_group_without_weights=screen,
        evidence=validator.evidence.state,
        secret=b"secret",
        invited=invited,
        ledger=ledger,
    )
    ledger.on_failure = run.fail
    ledger.resumed(0)
    run.resume(0)
    if args.busy:
        run.publish(timeline.Policy(0, 0))
    return run


def _config(*, is_ended: bool = False):
    config = quickstart.get_config()
    config.rl.update(prompts_per_step=256, num_steps=1 if is_ended else 10**6, max_lag=8)
    config.trust.update(min_rate=1e-9, invited_rate=1e-9)
    config.topology.lease_s = 3600.0
    return config


def _no_weights(version: int, epoch: int):
    raise AssertionError("nothing is replayed here")


def _learn(run: orchestrator_lib.Orchestrator) -> None:
    """Takes batches, as a learner does, until the run fails."""
    step = 0
    while True:
        step += 1
        try:
            run.next_batch(step)
        except EOFError:
            return
        run.publish(timeline.Policy(0, step))


def _get(queue, clients) -> dict:
    while True:
        try:
            return queue.get(timeout=1.0)
        except queue_lib.Empty:
            if dead := [client for client in clients if client.exitcode is not None]:
                raise RuntimeError(f"a client ended with exit code {dead[0].exitcode}; its error is above") from None


def _watch(run: orchestrator_lib.Orchestrator, queue, clients, args) -> dict:
    """Prints a line per `LINE_S`; returns the figures after the warm-up."""
    begun_s, warm_s = time.monotonic(), args.seconds / 10
    marks: list[tuple[float, float, float]] = []  # time, CPU, MiB
    found, leases, checks_s, threads = {"groups": 0, "polls": 0}, [], [], {}
    while not marks or marks[-1][0] < begun_s + warm_s + args.seconds:
        report = _get(queue, clients)
        checks_s.append(_signature_s())
        now_s = time.monotonic()
        if now_s < begun_s + warm_s:
            continue
        if not marks:
            marks, threads = [(now_s, time.process_time(), _mib())], _thread_s()
            continue
        for name in found:
            found[name] += report.pop(name, 0)
        leases += report.pop("leases", [])
        if now_s - marks[-1][0] >= LINE_S:
            marks.append((now_s, time.process_time(), _mib()))
            p99_ms, passed_s = 1e3 * _p99(leases), now_s - marks[0][0]
            line = f"{passed_s:5.0f} s: {found['groups'] / passed_s:5.0f} groups/s, lease p99 {p99_ms:5.1f} ms"
            print(f"{line}, {_cores(marks[-2:]):.2f} cores, {marks[-1][2]:.0f} MiB", flush=True)
    seconds, cpu_s = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    spent = {name: s - threads.get(name, 0.0) for name, s in _thread_s().items()}
    per_group = 1e3 / found["groups"] if found["groups"] else 0.0
    half = [mib for _, _, mib in marks[len(marks) // 2 :]]
    return {
        "idle": args.idle,
        "busy": args.busy,
        "groups_per_s": round(found["groups"] / seconds, 1),
        "polls_per_s": round(found["polls"] / seconds, 1),
        "lease_p99_ms": round(1e3 * _p99(leases), 1),
        "cores": round(cpu_s / seconds, 3),
        "cpu_ms_per_group": round(cpu_s * per_group, 2),
        "threads_ms_per_group": {name: round(s * per_group, 2) for name, s in spent.items() if s * per_group >= 0.01},
        "signature_us": round(1e6 * float(np.mean(checks_s)), 1),
        "mib": [round(marks[0][2]), round(half[0]), round(half[-1])],
        "growth": round(float(np.mean(half[-3:]) / np.mean(half[:3])) - 1, 3),
    }


def _judge(figures: dict, args) -> int:
    """Prints whether the figures keep the limits; returns the exit code."""
    rules = {
        f"lease p99 {figures['lease_p99_ms']} ms, at most {1e3 * MAX_LEASE_P99_S:.0f}": figures["lease_p99_ms"]
        <= 1e3 * MAX_LEASE_P99_S,
        f"memory {figures['growth']:+.1%} over the last half, at most {MAX_GROWTH:+.0%}": figures["growth"]
        <= MAX_GROWTH,
    }
    if args.busy:
        rate = figures["groups_per_s"]
        rules[f"{rate} groups/s, at least {0.98 * args.rate:.0f}"] = rate >= 0.98 * args.rate
        rules[f"{figures['cores']} cores, at most 2"] = figures["cores"] <= 2
    else:
        rules[f"{figures['cores']} cores, at most 0.1"] = figures["cores"] <= 0.1
    print(
        "PASS" if all(rules.values()) else "FAIL",
        "; ".join(f"{'ok' if ok else 'NOT'}: {text}" for text, ok in rules.items()),
    )
    return 0 if all(rules.values()) else 1


def _signature_s() -> float:
    key, begun_s = KEY.worker, time.thread_time()
    for _ in range(20):
        rollout_lib.signed(key, SIGNATURE, b"")
    return (time.thread_time() - begun_s) / 20


def _p99(seconds: list[float]) -> float:
    return float(np.quantile(seconds, 0.99)) if seconds else 0.0


def _cores(marks: list[tuple[float, float, float]]) -> float:
    (begun_s, begun_cpu_s, _), (end_s, end_cpu_s, _) = marks
    return (end_cpu_s - begun_cpu_s) / (end_s - begun_s)


def _mib() -> float:
    """Returns the memory of this process; elsewhere than on Linux, its peak."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _thread_s() -> dict[str, float]:
    """Returns the CPU seconds of each thread so far, on Linux."""
    out = {}
    for thread in threading.enumerate() if sys.platform == "linux" else []:
        fields = pathlib.Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        name = thread.name.rstrip("-_0123456789") or thread.name
        out[name] = out.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return out


def _open_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
