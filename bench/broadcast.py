"""Times weight broadcasts on one machine: `python -m bench.broadcast [--peer bench_shardcast.sh --peer_python PY]`.

1. `fanout`: a publisher, an origin relay that serves its directory, `depth` relays in a row, and `clients` that pull into
   memory from the last one. All are processes on loopback, started before the clock. The clock starts at the call of `publish`; a
   client is done when it has the verified arrays. With `--peer`, SHARDCAST moves as many bytes in the same run by the given
   script: origin, one middle node, as many clients. Its clock starts at the call of `broadcast`. "busy" is the CPU seconds of
   all processes over wall time x cores. Near 100 %, depth costs the computation of its relays, and pipelining is invisible.
   Hence `links`: the same with every relay limited to `--link_mb_per_s` per client.
2. `tree`: publish to a directory and pull from it, compared with a plain copy of a file of the same size; best of three each,
   and the fraction of the digests alone on all cores.
3. `delta`: an Adam step in bfloat16 that moves every weight by the learning rate: size, and speed of one core.

CPU seconds are user plus system. Ours start with the clock; the peer's script counts from the start of each process, with the
interpreter and imports. No side syncs to disk while a clock runs; dirty pages are synced before it starts. Memory that a
virtual machine's host must provide first costs several times the measured work, and the first process would pay for it. So
before each clock starts, as much as the largest side needs is touched and freed (`_memory`).
"""

import concurrent.futures
import contextlib
import json
import mmap
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.system import cli
from sharding.weights import broadcast
from sharding.weights.format import delta, digests

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
TENSOR_BYTES = 32 << 20
PARTS = ("fanout", "links", "tree", "delta")
HASHED_MB = 128  # sample for the speed of the digests
MEMORY = 8  # times the weights: bytes that all processes of one row write to files and arrays
TARGETS = {"last client": 0.25, "CPU s per client": 0.5}  # fractions of SHARDCAST's


def main(argv: list[str] | None = None) -> int:
    """Runs the chosen parts; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.broadcast", description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--size_mb", type=int, default=512, help="MiB of random weights for fanout")
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 3], help="relays between origin and clients")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument(
        "--link_mb_per_s", type=float, default=200.0, help="MB/s from a relay to each of its clients, for links"
    )
    parser.add_argument("--tree_mb", type=int, default=2048)
    parser.add_argument("--delta_mb", type=int, default=512)
    parser.add_argument("--peer", help="path of bench_shardcast.sh")
    parser.add_argument("--peer_python", default=sys.executable, help="Python interpreter with shardcast")
    parser.add_argument("--work", help="where files are written; default: a temporary directory, removed at the end")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown parts {unknown}; choose from {', '.join(PARTS)}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        if "fanout" in args.parts:
            fanout(args, pathlib.Path(work))
        if "links" in args.parts:
            links(args, pathlib.Path(work))
        if "tree" in args.parts:
            tree(args.tree_mb, pathlib.Path(work))
        if "delta" in args.parts:
            step(args.delta_mb, pathlib.Path(work))
    return 0


def fanout(args, work: pathlib.Path) -> None:
    """Times a broadcast over relays, for each depth, next to SHARDCAST's if given."""
    rows = {}
    if args.peer:
        rows["SHARDCAST"] = _shardcast(args, work / "shardcast")
    for depth in args.depth:
        rows[f"ours, depth {depth}"] = _ours(args, depth, work / f"depth{depth}")
    print(f"\n{args.size_mb} MiB to {args.clients} clients")
    _table(rows)
    sample = random_tree(HASHED_MB)
    _, hash_s = _best(0, lambda: _hash(sample))
    for depth in args.depth:
        cpu_s = hash_s * args.size_mb / HASHED_MB * (1 + depth + args.clients)
        least_s = cpu_s / os.cpu_count()
        print(
            f"digests alone, depth {depth}: {cpu_s:.2f} CPU s in publisher, relays, clients; {least_s:.2f} s on all cores"
        )
    first = f"ours, depth {args.depth[0]}"
    for name, target in TARGETS.items() if args.peer else ():
        print(f"{name}: {rows[first][name] / rows['SHARDCAST'][name]:.2f} x SHARDCAST (target {target})")
    _compare_depths(args, rows)


def links(args, work: pathlib.Path) -> None:
    """Times the same with a limited rate per link."""
    rows = {f"ours, depth {d}": _ours(args, d, work / f"links{d}", args.link_mb_per_s * 1e6) for d in args.depth}
    least_s = (args.size_mb << 20) / args.link_mb_per_s / 1e6
    print(
        f"\n{args.size_mb} MiB to {args.clients} clients, links of {args.link_mb_per_s:.0f} MB/s: {least_s:.2f} s per link"
    )
    _table(rows)
    _compare_depths(args, rows)


def _table(rows: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(rows.values())))
    print(f"{'':16}" + "".join(f"{name:>17}" for name in names))
    for what, row in rows.items():
        print(f"{what:16}" + "".join(f"{row[name]:17.2f}" for name in names))


def _compare_depths(args, rows: dict[str, dict[str, float]]) -> None:
    for depth in args.depth[1:]:
        ratio = rows[f"ours, depth {depth}"]["last client"] / rows[f"ours, depth {args.depth[0]}"]["last client"]
        print(f"depth {depth}: {ratio:.2f} x the time of depth {args.depth[0]} (target 1.3 for 3 to 1)")


def _ours(args, depth: int, work: pathlib.Path, link_bytes_per_s: float | None = None) -> dict[str, float]:
    work.mkdir()
    with contextlib.ExitStack() as stack:

        def start(*command, stdout=subprocess.PIPE):
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)], cwd=ROOT, stdin=subprocess.PIPE, stdout=stdout, text=True
            )
            stack.callback(_end, process)
            return process

        (work / "pub").mkdir()
        relays, upstream = [], work / "pub"
        for i in range(depth + 1):
            address = work / f"address{i}"
            command = ["sharding.relay", "--upstream", upstream, "--port", 0, "--address_file", address]
            if i:
                command += ["--dir", work / f"relay{i}", "--trusted_key", PUBLIC]
            if link_bytes_per_s is not None:
                command += ["--total_bytes_per_s", link_bytes_per_s * (args.clients if i == depth else 1)]
            relays.append(start(*command, stdout=subprocess.DEVNULL))
            _wait(address.exists)
            upstream = address.read_text()
        publisher = start("bench.broadcast_role", "publish", work / "pub", args.size_mb)
        clients = [start("bench.broadcast_role", "pull", upstream) for _ in range(args.clients)]
        for process in (publisher, *clients):
            assert process.stdout.readline() == "ready\n", process.args
        with _memory(MEMORY * args.size_mb << 20):
            before = [_cpu_s(process) for process in relays]
        for process in (*clients, publisher):
            process.stdin.write("go\n")
            process.stdin.flush()
        published = json.loads(publisher.stdout.readline())
        pulled = [json.loads(client.stdout.readline()) for client in clients]
        cpu_s = [_cpu_s(process) - b for process, b in zip(relays, before, strict=True)]
    shutil.rmtree(work)
    begun_s = published["begun_s"]
    last_s = max(p["done_s"] for p in pulled) - begun_s
    client_s = sum(p["cpu_s"] for p in pulled)
    assert all(p["digest"] == published["digest"] for p in pulled)
    return {
        "publish": published["done_s"] - begun_s,
        "mirrored": max(p["seen_s"] for p in pulled) - begun_s,
        "last client": last_s,
        "CPU s publisher": published["cpu_s"],
        "CPU s origin": cpu_s[0],
        "CPU s per relay": sum(cpu_s[1:]) / depth,
        "CPU s per client": client_s / len(pulled),
        "busy %": 100 * (published["cpu_s"] + sum(cpu_s) + client_s) / last_s / os.cpu_count(),
    }


def _shardcast(args, work: pathlib.Path) -> dict[str, float]:
    environment = {**os.environ, "PY": args.peer_python, "SIZE_MB": str(args.size_mb), "CLIENTS": str(args.clients)}
    environment["WORK"] = str(work)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with _memory(MEMORY * args.size_mb << 20):
            done = pool.submit(
                subprocess.run, ["bash", args.peer], env=environment, capture_output=True, text=True, check=False
            )
            _wait(lambda: done.done() or (work / "events.log").exists())
            os.sync()
            _wait(lambda: done.done() or (work / "go").exists(), pause_s=0.002)
        done = done.result()
    if done.returncode:
        raise SystemExit(f"error: {args.peer} failed:\n{done.stdout}{done.stderr}")
    events = re.findall(r"^ *([0-9.]+) s +(\S+) +(\S+) *(\S*)$", done.stdout, re.MULTILINE)
    at = {(role, event): float(seconds) for seconds, role, event, _ in events}
    cpu_s = {role: float(value.removeprefix("s=")) for _, role, event, value in events if event == "cpu"}
    names = [f"client{i + 1}" for i in range(args.clients)]
    last_s = max(at[name, "complete"] for name in names)
    return {
        "publish": at["origin", "broadcast_done"],
        "mirrored": at["middle", "complete"],
        "last client": last_s,
        "CPU s publisher": cpu_s["origin"],
        "CPU s origin": 0.0,  # the same process
        "CPU s per relay": cpu_s["middle"],
        "CPU s per client": sum(cpu_s[name] for name in names) / len(names),
        "busy %": 100 * sum(cpu_s.values()) / last_s / os.cpu_count(),
    }


def tree(size_mb: int, work: pathlib.Path) -> None:
    """Times publishing to and pulling from a directory."""
    params = random_tree(size_mb)
    plain = work / "plain"
    with open(plain, "wb") as file:
        for leaf in params.values():
            file.write(leaf.view(np.uint8).data)
    copy_s, copy_cpu_s = _best(size_mb, lambda: shutil.copyfile(plain, work / "copy"), (work / "copy").unlink)
    plain.unlink()
    hash_s, hash_cpu_s = _best(0, lambda: _hash(params))
    tree = work / "tree"
    publish_s, publish_cpu_s = _best(
        size_mb,
        lambda: broadcast.publish(params, 0, tree, broadcast.PublishOptions(key=KEY)),
        lambda: shutil.rmtree(tree),
    )
    broadcast.publish(params, 0, tree, broadcast.PublishOptions(key=KEY))
    pull_s, pull_cpu_s = _best(size_mb, lambda: broadcast.pull(tree, key=PUBLIC))
    shutil.rmtree(tree)
    print(f"\n{size_mb} MiB on this disk: copy of a file {copy_s:.2f} s, {copy_cpu_s:.2f} CPU s")
    least_s = (hash_cpu_s + copy_cpu_s) / os.cpu_count()
    print(f"digests alone: {hash_s:.2f} s on all cores, {hash_cpu_s:.2f} CPU s, {hash_s / copy_s:.2f} x the copy")
    print(f"digests and the copy spread over all cores: {least_s:.2f} s, {least_s / copy_s:.2f} x the copy")
    for what, seconds, cpu_s in (("publish", publish_s, publish_cpu_s), ("pull", pull_s, pull_cpu_s)):
        print(f"{what}: {seconds:.2f} s, {cpu_s:.2f} CPU s, {seconds / copy_s:.2f} x the copy (target 1.5)")


def _hash(params: dict[str, np.ndarray]) -> None:
    """Computes digests of pieces of 4 MiB, on one thread per core."""
    flat = [leaf.view(np.uint8) for leaf in params.values()]
    pieces = [leaf[i : i + (4 << 20)] for leaf in flat for i in range(0, len(leaf), 4 << 20)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(digests.of, pieces))


def step(size_mb: int, work: pathlib.Path) -> None:
    """Times the delta of an Adam step."""
    rng = np.random.default_rng(0)
    shape = (TENSOR_BYTES // 2,)
    before, after = {}, {}
    for i in range(max(1, (size_mb << 20) // TENSOR_BYTES)):
        weights = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        before[f"w{i}"] = weights.astype(ml_dtypes.bfloat16)
        after[f"w{i}"] = (weights + np.float32(1e-6) * rng.choice((-1, 1), shape).astype(np.float32)).astype(
            ml_dtypes.bfloat16
        )
    num_bytes = sum(leaf.nbytes for leaf in before.values())
    changed = np.mean([np.mean(before[k].view(np.uint16) != after[k].view(np.uint16)) for k in before])
    publisher = broadcast.Publisher(work / "delta", broadcast.PublishOptions(key=KEY), snapshot_every=2)
    publisher.publish(before, 0)
    base = broadcast.pull(work / "delta", 0, key=PUBLIC)
    publish_s = _seconds(lambda: publisher.publish(after, 1))
    size = sum(o.size for o in broadcast.read_manifest(work / "delta", 1).objects)
    pull_s = _seconds(lambda: broadcast.pull(work / "delta", 1, base=base, key=PUBLIC))
    shutil.rmtree(work / "delta")

    old, new = (next(iter(t.values())).view(np.uint8) for t in (before, after))
    pieces = [slice(i, i + (4 << 20)) for i in range(0, len(old), 4 << 20)]
    begun_s = time.process_time()
    patches = [delta.encode(old[piece], new[piece], 2) for piece in pieces]
    encode_s, begun_s = time.process_time() - begun_s, time.process_time()
    target = old.copy()
    begun_s = time.process_time()
    for piece, patch in zip(pieces, patches, strict=True):
        if patch is not None:
            delta.apply(target[piece], patch, 2)
    apply_s = time.process_time() - begun_s
    assert np.array_equal(target, new)
    print(f"\n{num_bytes >> 20} MiB of bfloat16, learning rate 1e-6, {100 * changed:.1f} % changed")
    print(f"delta: 1/{num_bytes / size:.0f} of the full size (target 1/30)")
    print(
        f"encode {len(old) / encode_s / 1e6:.0f} MB/s, apply {len(old) / apply_s / 1e6:.0f} MB/s per core (target 500)"
    )
    print(
        f"publish {num_bytes / publish_s / 1e6:.0f} MB/s, pull {num_bytes / pull_s / 1e6:.0f} MB/s of weights, hashes included"
    )


def random_tree(size_mb: int) -> dict[str, np.ndarray]:
    """Returns `size_mb` MiB of random bfloat16 weights by name."""
    rng = np.random.default_rng(0)
    count, rest = divmod(size_mb << 20, TENSOR_BYTES)
    sizes = [TENSOR_BYTES] * count + [rest] * bool(rest)
    return {
        f"w{i:04d}": rng.integers(0, 1 << 16, n // 2, np.uint16).view(ml_dtypes.bfloat16) for i, n in enumerate(sizes)
    }


def _seconds(function) -> float:
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def _best(size_mb: int, function: Callable, undo: Callable = lambda: None) -> tuple[float, float]:
    """Returns (wall seconds, CPU seconds) of the fastest of three calls, each with `size_mb` of memory ready."""
    measured = []
    for _ in range(3):
        with _memory(size_mb << 20):
            pass
        begun_cpu_s = time.process_time()
        seconds = _seconds(function)
        measured.append((seconds, time.process_time() - begun_cpu_s))
        undo()
    return min(measured)


@contextlib.contextmanager
def _memory(num_bytes: int) -> Iterator[None]:
    """Touches memory, syncs dirty pages to disk, and frees the memory at the end of the block."""
    with mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a host reclaims free memory in large pages
            held.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, num_bytes, mmap.PAGESIZE):
            held[start] = 1
        os.sync()
        yield


def _cpu_s(process: subprocess.Popen) -> float:
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait(condition, timeout_s: float = 60.0, pause_s: float = 0.02) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("error: a relay did not start within 60 s; see its output above")
        time.sleep(pause_s)


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
