"""Weight broadcast, timed on one machine: python -m bench.broadcast [--peer bench_shardcast.sh --peer_python PY]

1. `fanout`: a publisher, an origin relay that serves its directory, `depth` relays in a row, `clients` that pull into
   memory from the last one; all are processes on loopback and run before the clock starts. The clock starts when `publish`
   is called; a client is done when it holds the verified arrays. With `--peer`, SHARDCAST moves as many bytes in the same run, by
   the script given: origin, one middle node, as many clients; its clock starts when `broadcast` is called.
2. `tree`: publish to a directory and pull from it, beside a plain copy of a file of the same size.
3. `delta`: an Adam step in bfloat16, every weight moved by the learning rate: size, and speed of one core.

CPU seconds are of user and system. Ours are counted from the start of the clock; the peer's script counts from the start of
each process, interpreter and imports included. Nothing is synced to disk on either side.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding import broadcast, delta

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
TENSOR_BYTES = 32 << 20
TARGETS = {"last client": 0.25, "CPU s per client": 0.5}  # of SHARDCAST's


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.broadcast", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["fanout", "tree", "delta"])
    parser.add_argument("--size_mb", type=int, default=512, help="MiB of random weights for fanout")
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 3], help="relays between origin and clients")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--tree_mb", type=int, default=2048)
    parser.add_argument("--delta_mb", type=int, default=512)
    parser.add_argument("--peer", help="path of bench_shardcast.sh")
    parser.add_argument("--peer_python", default=sys.executable, help="a Python that has shardcast")
    parser.add_argument("--work", help="where files are written; default: a temporary directory, removed at the end")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.parts) - {"fanout", "tree", "delta"})
    if unknown:
        parser.error(f"parts {unknown} are none of fanout, tree, delta")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        if "fanout" in args.parts:
            fanout(args, pathlib.Path(work))
        if "tree" in args.parts:
            tree(args.tree_mb, pathlib.Path(work))
        if "delta" in args.parts:
            step(args.delta_mb, pathlib.Path(work))
    return 0


def fanout(args, work: pathlib.Path) -> None:
    rows = {}
    if args.peer:
        rows["SHARDCAST"] = _shardcast(args)
    for depth in args.depth:
        rows[f"ours, depth {depth}"] = _ours(args, depth, work / f"depth{depth}")
        shutil.rmtree(work / f"depth{depth}")
    names = ["publish", "mirrored", "last client", "CPU s publisher", "CPU s per relay", "CPU s per client"]
    print(f"\n{args.size_mb} MiB to {args.clients} clients")
    print(f"{'':16}" + "".join(f"{name:>18}" for name in names))
    for what, row in rows.items():
        print(f"{what:16}" + "".join(f"{row[name]:18.2f}" for name in names))
    first = f"ours, depth {args.depth[0]}"
    for name, target in TARGETS.items() if args.peer else ():
        print(f"{name}: {rows[first][name] / rows['SHARDCAST'][name]:.2f} x SHARDCAST (target {target})")
    for depth in args.depth[1:]:
        ratio = rows[f"ours, depth {depth}"]["last client"] / rows[first]["last client"]
        print(f"depth {depth}: {ratio:.2f} x the time of depth {args.depth[0]} (target 1.3 for 3 to 1)")


def _ours(args, depth: int, work: pathlib.Path) -> dict[str, float]:
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
            place = ["--dir", work / f"relay{i}", "--trusted_key", PUBLIC] if i else []
            command = ["sharding.relay", "--upstream", upstream, *place, "--port", 0, "--address_file", address]
            relays.append(start(*command, stdout=subprocess.DEVNULL))
            _wait(address.exists)
            upstream = address.read_text()
        publisher = start("bench.broadcast_role", "publish", work / "pub", args.size_mb)
        clients = [start("bench.broadcast_role", "pull", upstream) for _ in range(args.clients)]
        for process in (publisher, *clients):
            assert process.stdout.readline() == "ready\n", process.args
        before = [_cpu_s(process) for process in relays]
        for process in (*clients, publisher):
            process.stdin.write("go\n")
            process.stdin.flush()
        published = json.loads(publisher.stdout.readline())
        pulled = [json.loads(client.stdout.readline()) for client in clients]
        cpu_s = [_cpu_s(process) - b for process, b in zip(relays, before, strict=True)]
    begun_s = published["begun_s"]
    assert all(p["digest"] == published["digest"] for p in pulled)
    return {
        "publish": published["done_s"] - begun_s,
        "mirrored": max(p["seen_s"] for p in pulled) - begun_s,
        "last client": max(p["done_s"] for p in pulled) - begun_s,
        "CPU s publisher": published["cpu_s"],
        "CPU s per relay": sum(cpu_s[1:]) / depth,
        "CPU s per client": sum(p["cpu_s"] for p in pulled) / len(pulled),
    }


def _shardcast(args) -> dict[str, float]:
    environment = {**os.environ, "PY": args.peer_python, "SIZE_MB": str(args.size_mb), "CLIENTS": str(args.clients)}
    done = subprocess.run(["bash", args.peer], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {args.peer} failed:\n{done.stdout}{done.stderr}")
    events = re.findall(r"^ *([0-9.]+) s +(\S+) +(\S+) *(\S*)$", done.stdout, re.MULTILINE)
    at = {(role, event): float(seconds) for seconds, role, event, _ in events}
    cpu_s = {role: float(value.removeprefix("s=")) for _, role, event, value in events if event == "cpu"}
    names = [f"client{i + 1}" for i in range(args.clients)]
    return {
        "publish": at["origin", "broadcast_done"],
        "mirrored": at["middle", "complete"],
        "last client": max(at[name, "complete"] for name in names),
        "CPU s publisher": cpu_s["origin"],
        "CPU s per relay": cpu_s["middle"],
        "CPU s per client": sum(cpu_s[name] for name in names) / len(names),
    }


def tree(size_mb: int, work: pathlib.Path) -> None:
    params = random_tree(size_mb)
    plain = work / "plain"
    with open(plain, "wb") as file:
        for leaf in params.values():
            file.write(leaf.view(np.uint8).data)
    copy_s = _seconds(lambda: shutil.copyfile(plain, work / "copy"))
    for path in (plain, work / "copy"):
        path.unlink()
    publish_s = _seconds(lambda: broadcast.publish(params, 0, work / "tree", key=KEY))
    pull_s = _seconds(lambda: broadcast.pull(work / "tree", key=PUBLIC))
    shutil.rmtree(work / "tree")
    print(f"\n{size_mb} MiB on this disk: copy of a file {copy_s:.2f} s")
    for what, seconds in (("publish", publish_s), ("pull", pull_s)):
        print(f"{what}: {seconds:.2f} s, {seconds / copy_s:.2f} x the copy (target 1.5)")


def step(size_mb: int, work: pathlib.Path) -> None:
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
    broadcast.publish(before, 0, work / "delta", key=KEY)
    base = broadcast.pull(work / "delta", 0, key=PUBLIC)
    publish_s = _seconds(lambda: broadcast.publish(after, 1, work / "delta", base=base, key=KEY))
    size = sum(o.size for o in broadcast.read_manifest(work / "delta", 1).objects)
    pull_s = _seconds(lambda: broadcast.pull(work / "delta", 1, have=base, key=PUBLIC))
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


def _cpu_s(process: subprocess.Popen) -> float:
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait(condition, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("error: a relay did not start")
        time.sleep(0.02)


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
