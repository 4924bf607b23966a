"""Downloads a folder of plain files from a bucket, such as a checkpoint for `init_from`, and looks for changes at each use."""

import json
import pathlib
from collections.abc import Sequence
from concurrent import futures

from sharding.system import atomic_file, cli
from sharding.system import files as files_lib
from sharding.weights.bucket import mirror, storage

NUM_DOWNLOADS = 2  # each has its file in memory
FILE_S = 3600.0  # for one file


def downloaded(url: str, names: Sequence[str] = ("*",)) -> pathlib.Path:
    """Returns the local copy of a folder in a bucket, with its newest files that match `names`, which are patterns.

    For the working directory of a run, these are the files of its newest state. Raises ValueError if there are no such files.
    """
    bucket = storage.Storage(url.rstrip("/"))
    if bucket.read(mirror.HEAD, storage.START_S)[0] is not None:
        return mirror.fetched(url, names)
    folder = mirror.local_folder(url)
    folder.mkdir(parents=True, exist_ok=True)
    record = folder.parent / "generations.json"
    with files_lib.locked(folder.parent / ".lock"):
        keys = [key for key in bucket.keys(storage.START_S) if storage.matches(key, names)]
        if not keys:
            raise ValueError(f"{bucket.url} has no files{'' if '*' in names else f' like {names[0]}'}; correct the URL")
        known = atomic_file.read_json(record, dict)

        def fetch(key: str) -> None:
            target = folder / key
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{bucket.url} has an object named {key!r}, which is outside of a folder; remove it")
            old = bytes.fromhex(known[key]) if key in known and target.is_file() else None
            data, generation = bucket.read_new(key, old, storage.START_S, FILE_S)
            if data is None:
                return
            cli.note(f"downloaded {key} from {bucket.url}")
            target.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write(target, data)
            known[key] = generation.hex()

        try:
            with futures.ThreadPoolExecutor(NUM_DOWNLOADS) as pool:
                list(pool.map(fetch, (key for key in keys if not key.endswith("/"))))  # some tools make such objects
        finally:
            atomic_file.write(record, json.dumps(known).encode())
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            name = str(path.relative_to(folder))
            if name not in keys and storage.matches(name, names):
                path.unlink()
    return folder
