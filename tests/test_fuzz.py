"""Random and mutated bytes for every parser of untrusted input: a verdict each time, in a process that is watched.

Mutants with a new kind of rejection join the corpus, so that the search goes deeper where the parser has more rules: a coarse
coverage guidance that needs no instrumented interpreter. Each run is a process of its own with an alarm (no hang) and a limit
on its peak memory (1 GiB above its start); a crash is its exit status.

Fast: some hundreds of inputs. Slow: a million, half of them files and half proofs.
"""

import functools
import io
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from inference.proofs import toploc
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.protocol.ledger import balances, events
from tests.support import proofs as proofs_lib
from tests.support import tiny

ROOT = pathlib.Path(__file__).parents[1]
ONE_INPUT_S = 20  # generous on a busy machine; a file that claims the most we decode takes under a second
MAX_GROWTH_KIB = 2**20
INTERESTING = (0, 1, 2, 3, 15, 16, 0x19, 0x1C, 0x7F, 0x80, 0xFC, 0xFE, 0xFF)


def mutate(data, rng, corpus):
    """Makes up to four random changes; half of them near the end, where a Parquet file has its footer."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        if not data:
            return bytes(rng.bytes(int(rng.integers(64))))
        low = max(0, len(data) - 3000) if rng.random() < 0.5 else 0
        at = int(rng.integers(low, len(data)))
        kind = rng.integers(7)
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at] = int(rng.choice(INTERESTING))
        elif kind == 2:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 3:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 4:  # a run from elsewhere, of it or of another
            other = corpus[int(rng.integers(len(corpus)))]
            start, size = int(rng.integers(len(other) + 1)), int(rng.integers(1, 200))
            data[at : at + size] = other[start : start + size]
        elif kind == 5:
            data[at : at + 8] = int(rng.integers(0, 2**63)).to_bytes(8, "little")[: max(0, len(data) - at)]
        else:  # a varint of many bytes
            data[at : at + 1] = b"\xff" * int(rng.integers(1, 10)) + b"\x01"
    if rng.random() < 0.3 and len(data) > 12 and bytes(data[:4]) == b"PAR1":  # the footer's length made right again
        end = data.rfind(b"PAR1")
        if end > 12:
            data = data[: end + 4]
    if rng.random() < 0.02:
        data = data[: int(rng.integers(len(data) + 1))]
    return bytes(data)


@functools.cache
def rollouts():
    key = rollout_lib.WorkerKey.generate()
    rng = np.random.default_rng(0)
    signed = []
    for n in (6, 40):
        mask = np.arange(n) >= 3
        made = tiny.rollout(
            mask,
            tokens=rng.integers(0, 272, n).astype(np.int32),
            logprobs=np.where(mask, -rng.random(n), 0).astype(np.float32),
            versions=np.full(n, 2, np.int32),
            seed=7,
            task=rollout_lib.TaskRef("reverse_text", 1, 2, 3),
            step=3,
            reward=0.5,
            rewards={"reward": 0.5, "exact": 0.0},
            finish_reason="stop",
            proofs=rng.bytes(258),
        )
        signed.append(rollout_lib.sign(made, key))
    return signed


def signed_digests():
    return {rollout_lib.digest(rollout) for rollout in rollouts()}


def seeds():
    """Returns whole files: ours, and the same rollouts with the options of other writers."""
    files = [parquet.to_bytes(rollouts()), parquet.to_bytes([])]
    table = pq.read_table(io.BytesIO(files[0]))
    for options in (
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "use_dictionary": False, "data_page_version": "2.0"},
        {"compression": "none", "use_dictionary": False, "data_page_size": 1, "row_group_size": 1},
        {"compression": "gzip", "use_dictionary": True},
    ):
        sink = io.BytesIO()
        pq.write_table(table, sink, **options)
        files.append(sink.getvalue())
    nested = b"\x19" * 5000 + b"\x00" * 5000  # a footer of lists in lists
    return [*files, b"PAR1" + nested + len(nested).to_bytes(4, "little") + b"PAR1"]


def one_file(data, rng):
    """Reads a mutated file. Rollouts of one that is not rejected are as they were signed, or have a broken signature."""
    try:
        found = parquet.from_bytes(data)
    except ValueError as error:
        assert str(error).startswith("rollout file"), error
        return re.sub(r"[0-9]+|b?'[^']*'|\"[^\"]*\"", "", str(error))[:80]
    for rollout in found:
        assert rollout_lib.validate(rollout) is None
        assert not rollout_lib.signature_ok(rollout) or rollout_lib.digest(rollout) in signed_digests()
    return f"{len(found)} rollouts"


HIDDEN = np.random.default_rng(1).standard_normal((200, 40)).astype(toploc.jnp.bfloat16)
PROOFS = proofs_lib.build(HIDDEN)


def one_proof(data, rng):
    """Verifies a mutated column of seven proofs (the last is short), whole or cut at random places."""
    split = toploc.split(data, *HIDDEN.shape)
    if isinstance(split, str):
        cuts = sorted(int(cut) for cut in rng.integers(0, len(data) + 1, 6))
        split = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    results = proofs_lib.verify(HIDDEN, split)
    assert len(results) == 7 and all(type(result.accepted) is bool for result in results)
    json.dumps([vars(result) for result in results], allow_nan=False)  # a verdict must fit the ledger
    assert all(
        not r.accepted or p == q or r.exp_mismatches <= 60 for r, p, q in zip(results, split, PROOFS, strict=True)
    )
    return " ".join(sorted({result.reason for result in results}))


def one_event(data, rng):
    event = events.decode(data, rng.bytes(64))
    if isinstance(event, str):
        return event
    assert events.signature_error(event)  # 64 random bytes
    return re.sub("[0-9]+", "", str(balances.State().refusal(event, 0)))[:80]


def event_seeds():
    key = rollout_lib.WorkerKey.generate()
    made = [
        events.sign("open", key.worker, key, validators=[key.worker], window_ms=5),
        events.sign("submit", key.worker, key, work="0" * 64, units=3),
        events.sign("slash", key.worker, key, amount=3, reason="é"),
    ]
    return [events.encode(event) for event in made]


TARGETS = {
    "files": (one_file, seeds),
    "proofs": (one_proof, lambda: [b"".join(PROOFS), b"".join(PROOFS[:3]), bytes(258), b""]),
    "events": (one_event, event_seeds),
}


def peak_kib():
    """The peak of this process alone; that of getrusage starts with the peak of the process that forked it."""
    return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


def hammer(target, count, seed):
    """Runs in a process of its own; prints the number of kinds of verdict."""
    parse, make_seeds = TARGETS[target]
    rng, corpus = np.random.default_rng(seed), make_seeds()
    for data in corpus:
        parse(data, rng)
    seen, slowest = {}, 0.0
    before = peak_kib()
    for n in range(count):
        data = rng.bytes(int(rng.integers(600))) if n % 50 == 0 else corpus[int(rng.integers(len(corpus)))]
        data = mutate(data, rng, corpus)
        signal.alarm(ONE_INPUT_S)  # kills the process: a hang is a status, too
        begun = time.perf_counter()
        verdict = parse(data, rng)
        slowest = max(slowest, time.perf_counter() - begun)
        if verdict not in seen and len(corpus) < 500 and len(data) < 100_000:
            corpus.append(data)
        seen[verdict] = seen.get(verdict, 0) + 1
    signal.alarm(0)
    growth = peak_kib() - before
    assert growth < MAX_GROWTH_KIB, f"{growth} KiB"
    print(f"{target}: {count} inputs, {len(seen)} kinds of verdict, slowest {slowest:.3f} s, {growth // 1024} MiB more")


def run(target, count, seed):
    code = f"from tests import test_fuzz; test_fuzz.hammer({target!r}, {count}, {seed})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


@pytest.mark.parametrize(("target", "count"), [("files", 600), ("proofs", 300), ("events", 1000)])
def test_some_hundred_inputs(target, count):
    kinds = int(re.search(r"(\d+) kinds", run(target, count, 0))[1])
    assert kinds >= {"files": 15, "proofs": 6, "events": 4}[target]  # the search gets past the first check


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(("target", "count"), [("files", 120_000), ("proofs", 110_000), ("events", 25_000)])
def test_a_million_inputs(target, count, seed):
    print(run(target, count, seed))
