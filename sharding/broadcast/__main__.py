"""`python -m sharding.broadcast`: published weights for people.

    list SOURCE                   one line per version: kind, size, tensors, digest, who signed it
    verify SOURCE [--version N]   fetches and proves everything, and keeps nothing
    watch SOURCE [--after N]      does so for every new version, until interrupted
    publish-dir DIR ROOT          publishes the *.safetensors of a directory; its config.json becomes the metadata

SOURCE is a directory, a bucket URL, or the URLs of relays, separated by commas. A progress bar on a terminal's standard error.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding import broadcast
from sharding.format import chunks, manifest
from sharding.system import cli

SAFETENSORS = {
    **{"BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32"},
    **{"I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"},
}
MAX_HEADER_BYTES = 100 << 20  # the format's own limit


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m sharding.broadcast", description="Look at published weights.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(run=run)
        return sub

    for name, run, text in (
        ("list", _list, "what there is"),
        ("verify", _verify, "prove a version, by default the newest"),
        ("watch", _watch, "prove every new version"),
    ):
        sub = command(name, run, text)
        sub.add_argument("source", help="directory, bucket URL, or relay URLs separated by commas")
        sub.add_argument("--key", help="hex of the publisher's ed25519 public key; other signatures are refused")
        if name == "watch":
            sub.add_argument("--after", type=int, default=-1, help="only versions newer than this")
            sub.add_argument("--count", type=int, help="end after so many")
        else:
            sub.add_argument("--version", type=int)
    sub = command("publish-dir", _publish_dir, "publish the safetensors of a directory")
    sub.add_argument("directory")
    sub.add_argument("root", help="directory or bucket URL to publish to")
    sub.add_argument("--version", type=int, help="default: the newest there, plus 1")
    sub.add_argument("--dtype", help="cast wider floats, for example bfloat16")
    sub.add_argument("--key-file", help="PEM of an ed25519 private key to sign with")
    sub.add_argument("--keep", type=int, default=8, help="how many versions stay")
    return parser


def _list(args: argparse.Namespace) -> int:
    source = _source(args.source)
    found = broadcast.versions(source) if args.version is None else [args.version]
    if not found:
        raise FileNotFoundError(
            f"no version under {args.source} yet; give the root that a run publishes to (WORKDIR/weights)"
        )
    for version in found:
        print(_describe(broadcast.read_manifest(source, version, key=args.key)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    with _Bar("verify") as bar:
        found = broadcast.verify(_source(args.source), args.version, key=args.key, progress=bar.update)
    print(f"ok: {_describe(found)}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    source = _source(args.source)
    if args.count is not None and args.count < 1:
        raise ValueError(f"--count = {args.count} must be at least 1")
    if not ("://" in args.source or pathlib.Path(args.source).is_dir()):
        print(f"waiting for a publisher to make {args.source}", file=sys.stderr, flush=True)
    for seen, version in enumerate(broadcast.watch(source, after=args.after, key=args.key), start=1):
        with _Bar(f"version {version}") as bar:
            found = broadcast.verify(source, version, key=args.key, progress=bar.update)
        print(f"ok: {_describe(found)}", flush=True)
        if seen == args.count:
            break
    return 0


def _publish_dir(args: argparse.Namespace) -> int:
    directory = pathlib.Path(args.directory)
    params = read_safetensors(directory)
    config = directory / "config.json"
    metadata = {"config": json.loads(config.read_text())} if config.exists() else {}
    newest = broadcast.latest(args.root)
    version = args.version if args.version is not None else (0 if newest is None else newest + 1)
    key = None if args.key_file is None else _load_key(args.key_file)
    found = broadcast.publish(params, version, args.root, key=key, metadata=metadata, keep=args.keep, dtype=args.dtype)
    print(f"published: {_describe(found)}")
    return 0


def read_safetensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a directory's *.safetensors by name, memory-mapped. ValueError names a file that breaks the format."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no *.safetensors in {directory}: give a directory that holds a model's weights")
    found: dict[str, np.ndarray] = {}
    for path in paths:
        data = np.memmap(path, np.uint8, "r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or size > min(MAX_HEADER_BYTES, len(data) - 8):
            raise ValueError(f"{path} is no safetensors file: it has {len(data)} bytes and a header of {size}")
        header = json.loads(data[8 : 8 + size].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in SAFETENSORS:
                raise ValueError(f"tensor {name!r} of {path} has dtype {entry['dtype']!r}, not one of {[*SAFETENSORS]}")
            if name in found:
                raise ValueError(f"tensor {name!r} of {path} is in another file, too")
            kind = chunks.dtype(SAFETENSORS[entry["dtype"]])
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            if not 8 + size <= start <= stop <= len(data) or stop - start != math.prod(entry["shape"]) * kind.itemsize:
                raise ValueError(
                    f"tensor {name!r} of {path} has offsets {entry['data_offsets']} for shape {entry['shape']}"
                )
            found[name] = data[start:stop].view(kind).reshape(entry["shape"])
    return found


def _source(text: str) -> str | list[str]:
    return text.split(",") if "," in text else text


def _load_key(path: str | os.PathLike) -> ed25519.Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(pathlib.Path(path).read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not an unencrypted PEM private key: {error}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} holds {type(key).__name__}; versions are signed with ed25519")
    return key


def _describe(m: manifest.Manifest) -> str:
    kind = "snapshot" if m.base is None else f"deltas to {m.base}"
    signer = "unsigned" if m.public_key is None else f"signed by {m.public_key}"
    return f"version {m.version}: {kind}, {len(m.tensors)} tensors, {m.size_bytes / 1e6:.1f} MB, digest {m.digest}, {signer}"


class _Bar:
    """One line that is written over, at most ten times a second, and wiped at the end; nothing where no person looks."""

    def __init__(self, title: str):
        self._title, self._begun_s, self._drawn_s = title, time.monotonic(), 0.0
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> "_Bar":
        return self

    def update(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if not self._shown or (now_s - self._drawn_s < 0.1 and done_bytes < total_bytes):
            return
        self._drawn_s = now_s
        filled = round(30 * done_bytes / max(1, total_bytes))
        rate = done_bytes / 1e6 / max(1e-9, now_s - self._begun_s)
        line = f"{self._title} [{'#' * filled}{'.' * (30 - filled)}] {done_bytes / 1e6:.1f}/{total_bytes / 1e6:.1f} MB {rate:.0f} MB/s"
        print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: Any) -> None:
        if self._shown and self._drawn_s:
            print(f"\r{'':<100}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
