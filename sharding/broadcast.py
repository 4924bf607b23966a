"""Inspects and publishes weights: `python -m sharding.broadcast COMMAND`.

    list SOURCE                   prints one line per version: kind, size, tensors, digest, signer
    verify SOURCE [--version N]   reads and proves a version, and keeps nothing
    watch SOURCE [--after N]      verifies every new version, until interrupted
    publish-dir DIR ROOT          publishes the *.safetensors of a directory; its config.json becomes the metadata
    renew ROOT --key-file KEY     signs the head of an ended run again, for ten years
    keys FILE [options]           makes or changes a root file, or prints it

SOURCE is a directory, a bucket URL, or the URLs of relays, separated by commas. A terminal shows a progress bar.

A root file lets readers follow a run whose key is replaced. Its own keys stay offline (`openssl genpkey -algorithm ed25519 -out
root.pem`). A KEY is a private key's PEM file, or the hex of a public key:

    keys WORKDIR/root.json --root root.pem --online WORKDIR/weights.key --sign root.pem      makes it; give it to every reader
    keys WORKDIR/root.json --online new.key --sign root.pem                                  from now on only new.key: the other is revoked
    keys WORKDIR/root.json --root other.pem --sign root.pem other.pem                        from now on only other.pem may change it

A run reads WORKDIR/root.json when it starts, and each time it signs a head.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator

import numpy as np
import rich.console
import rich.progress

from sharding.system import atomic_file, cli, signed_message
from sharding.weights import broadcast
from sharding.weights.broadcast import assemble, destination, head_writer
from sharding.weights.format import head, manifest, roots, safetensors_header

MAX_DAYS = 36525  # of a root: a century


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 after an error, which is printed, or 130 after Ctrl-C."""
    return cli.run(_parser(), argv)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m sharding.broadcast", description="Inspects and publishes weights.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, text in (
        ("list", _list, "print one line per version"),
        ("verify", _verify, "prove a version, by default the newest"),
        ("watch", _watch, "prove every new version"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(run=run)
        sub.add_argument("source", help="directory, bucket URL, or relay URLs separated by commas")
        sub.add_argument("--key", help="the publisher's public key in hex, or its root file, which must have signed")
        if name == "watch":
            sub.add_argument("--after", type=int, default=-1, help="only versions newer than this")
            sub.add_argument("--count", type=int, help="exit after this many versions")
        else:
            sub.add_argument("--version", type=int, help=f"the version to {name}")
    sub = commands.add_parser("publish-dir", help="publish the safetensors of a directory")
    sub.set_defaults(run=_publish_dir)
    sub.add_argument("directory", help="directory with *.safetensors and, optionally, config.json")
    sub.add_argument("root", help="directory or bucket URL to publish to")
    sub.add_argument("--version", type=int, help="the new version; default: the newest one plus 1")
    sub.add_argument("--dtype", help="cast wider floats, for example to bfloat16")
    sub.add_argument("--key-file", help="PEM file of an ed25519 private key to sign with")
    sub.add_argument("--keep", type=int, default=8, help="number of versions to keep")
    sub = commands.add_parser("renew", help="sign the head of an ended run again")
    sub.set_defaults(run=_renew)
    sub.add_argument("root", help="directory or bucket URL with a head.jsonl")
    sub.add_argument("--key-file", required=True, help="PEM file of the run's private key: WORKDIR/weights.key")
    sub.add_argument("--root-file", default="", help="the run's root file, if it has one")
    text = "".join((__doc__ or "").partition("A root file")[1:])
    options = {"epilog": text, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sub = commands.add_parser("keys", help="make, change or print a root file", **options)
    sub.set_defaults(run=_keys)
    sub.add_argument("file", help="the root file; printed if no option is given")
    for name, metavar, text in (
        ("--root", "KEY", "all keys that may change the file from now on"),
        ("--online", "KEY", "all keys that may sign weights from now on"),
        ("--sign", "PEM", "private root keys, old and new, that sign the change"),
    ):
        sub.add_argument(name, nargs="+", default=(), metavar=metavar, help=text)
    sub.add_argument("--days", type=float, default=365.0, help="until the new root expires (default: 365)")
    return parser


def _list(args: argparse.Namespace) -> int:
    source = args.source.split(",")
    found = broadcast.versions(source, key=args.key) if args.version is None else [args.version]
    if not found:
        raise FileNotFoundError(f"no version under {args.source} yet; pass WORKDIR/weights of a run")
    for version in found:
        print(_describe(broadcast.read_manifest(source, version, key=args.key)))
    return 0


def _watch(args: argparse.Namespace) -> int:
    if args.count is not None and args.count < 1:
        raise ValueError(f"--count = {args.count} must be at least 1; leave it out to watch without end")
    if not ("://" in args.source or pathlib.Path(args.source).is_dir()):
        print(f"waiting for a publisher to create {args.source}", file=sys.stderr, flush=True)
    watched = broadcast.watch(args.source.split(","), after=args.after, key=args.key)
    for version in itertools.islice(watched, args.count):
        args.version = version
        _verify(args)
    return 0


def _verify(args: argparse.Namespace) -> int:
    with _progress_bar("verify" if args.version is None else f"version {args.version}") as update:
        found = broadcast.verify(args.source.split(","), args.version, key=args.key, progress=update)
    print(f"ok: {_describe(found)}", flush=True)
    return 0


def _publish_dir(args: argparse.Namespace) -> int:
    directory = pathlib.Path(args.directory)
    params = _read_safetensors(directory)
    config = directory / "config.json"
    metadata = {"config": json.loads(config.read_text())} if config.exists() else {}
    newest = broadcast.latest(args.root)
    version = args.version if args.version is not None else (0 if newest is None else newest + 1)
    key = None if args.key_file is None else signed_message.load_key(args.key_file)
    options = broadcast.PublishOptions(key=key, keep=args.keep, dtype=args.dtype)
    print(f"published: {_describe(broadcast.publish(params, version, args.root, options, metadata=metadata))}")
    return 0


def _renew(args: argparse.Namespace) -> int:
    if destination.read(args.root, head.NAME) is None:
        raise FileNotFoundError(f"{args.root} has no {head.NAME} to renew; name the root of a run, WORKDIR/weights")
    writer = head_writer.HeadWriter(args.root, signed_message.load_key(args.key_file), root_file=args.root_file)
    with destination.locked(args.root):
        writer.refresh()
    return 0


def _keys(args: argparse.Namespace) -> int:
    path = pathlib.Path(args.file)
    data = path.read_bytes() if path.exists() else b""
    if args.sign:
        if not 0 < args.days <= MAX_DAYS:
            raise ValueError(f"--days = {args.days} must be above 0 and at most {MAX_DAYS}; set it to an allowed value")
        changes = {name: [_public_hex(key) for key in getattr(args, name)] for name in ("root", "online")}
        keys, expires_s = list(map(signed_message.load_key, args.sign)), time.time() + 86400 * args.days
        data = roots.amend(data, keys, expires_s=expires_s, **changes)
        atomic_file.write(path, data, durable=True)
    elif args.root or args.online:
        raise ValueError("a change must be signed; give --sign and the PEM files of the root keys")
    elif not data:
        raise FileNotFoundError(f"{path} does not exist; give --root, --online and --sign to make it")
    print(roots.describe(data))
    return 0


def _public_hex(key: str) -> str:
    if not os.path.exists(key) and re.fullmatch("[0-9a-fA-F]+", key) and len(key) != 64:
        raise ValueError(f"{key} has {len(key)} hex digits, but a public key has 64; give these, or a PEM file")
    if re.fullmatch("[0-9a-fA-F]{64}", key):
        return key.lower()
    return signed_message.load_key(key).public_key().public_bytes_raw().hex()


def _read_safetensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a directory's *.safetensors by name, memory-mapped. Raises ValueError for a malformed file."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no *.safetensors in {directory}; give a directory with a model's weights")
    found: dict[str, np.ndarray] = {}
    for path in paths:
        entries, data = safetensors_header.read(path), np.memmap(path, np.uint8, "r")
        for name, (dtype, shape, start) in entries.items():
            if name in found:
                raise ValueError(f"tensor {name!r} of {path} is also in another file; delete one of the two files")
            found[name] = data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return found


def _describe(m: manifest.Manifest) -> str:
    kind = "snapshot" if m.base is None else f"deltas to {m.base}"
    signer = "unsigned" if m.public_key is None else f"signed by {m.public_key}"
    return f"version {m.version}: {kind}, {len(m.tensors)} tensors, {m.size_bytes / 1e6:.1f} MB, digest {m.digest}, {signer}"


@contextlib.contextmanager
def _progress_bar(title: str) -> Iterator[assemble.Progress]:
    """Shows a progress bar on a terminal's standard error. Yields a function (bytes done, bytes in total) that updates it."""
    console = rich.console.Console(stderr=True)
    columns = (rich.progress.BarColumn(), rich.progress.DownloadColumn(), rich.progress.TransferSpeedColumn())
    bar = rich.progress.Progress(title, *columns, console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main())
