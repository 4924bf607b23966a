"""A learner without a model, in a process of its own: publishes versions until it kills itself at a file operation."""

import hashlib
import json
import os
import pathlib
import signal
import sys
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from sharding.weights import broadcast
from sharding.weights.format import journal
from tests.support import commands

OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(7, 39)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()


def weights(attempt: int, version: int) -> dict:
    """Returns weights whose every number names the attempt and the version."""
    value = np.float32(1000 * attempt + version)
    return {"a": np.full(300, value), "b": {"c": np.full((4, 8), value)}}


def start(root: pathlib.Path, attempt: int, first: int, count: int, kill_at: int = -1):
    """Starts an attempt that resumes at version `first`, and dies at file operation `kill_at` under `root`, if ever."""
    process = commands.CONTEXT.Process(target=_publish, args=(root, attempt, first, count, kill_at))
    process.start()
    return process


def log(root: pathlib.Path) -> list[tuple[int, int, int, str]]:
    """Returns (attempt, epoch, version, SHA-256 of the manifest) of all versions that were published, in order."""
    file = root.with_suffix(".log")
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _publish(root, attempt, first, count, kill_at):
    left = kill_at

    def die(event, arguments):
        nonlocal left
        if event in OPERATIONS and str(root) in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    publisher = broadcast.Publisher(root, broadcast.PublishOptions(key=KEY, keep=6), snapshot_every=3)
    publisher.forget(first)
    for version in range(first, first + count):
        written = publisher.publish(weights(attempt, version), version)
        data = (root / journal.dirname(version) / "manifest.json").read_bytes()
        line = json.dumps([attempt, written.epoch, version, hashlib.sha256(data).hexdigest()])
        with open(root.with_suffix(".log"), "a") as file:
            file.write(line + "\n")
        time.sleep(0.05)
