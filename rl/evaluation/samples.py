"""Files of samples: JSON lines, one per scored completion, from which all scores follow. Imports no jax.

A row has `task` (the name of the task: that of its source, split, and index), `key` (the SHA-256 of its prompt, or of its tokens), `env`, `sample`, `reward`, `rewards`,
`finish_reason`, `num_tokens`, `prompt`, and `completion`; of an endpoint also `request`. `Log` appends rows as they are made; a line that a kill cut off is dropped.
"""

import collections
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inference.rollouts import rollout as rollout_lib
from rl.evaluation import scores as scores_lib

REQUIRED = {"task": str, "sample": int, "reward": (int, float)}
FIRST = b'{"task": "'  # bytes of a row


def source(name: str, options: Mapping[str, Any], seed: int, digest: str) -> str:
    """Returns the name of an environment's tasks: 16 hex digits of its name, options, seed, and the digest of its code and data.

    Paths among the options differ between machines, and their data is in the digest.
    """
    own = {key: value for key, value in options.items() if key != "path" and not key.endswith("_path")}
    text = json.dumps([name, own, seed, digest], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def task_name(source_name: str, split: str, index: int) -> str:
    """Returns the name of a task in rows."""
    return f"{source_name}/{split}/{index}"


def of_rollouts(
    groups: Sequence[Sequence[rollout_lib.Rollout]], split: str, sources: Mapping[str, str], decode
) -> list[dict]:
    """Returns a row for the first branch of each episode. `groups` has a list of rollouts per task.

    `sources` maps the environment name of a rollout to its `source`; `decode(token IDs)` returns their text.
    """
    rows = []
    for group in groups:
        for rollout in group:
            if rollout.branch:
                continue
            start = rollout.prompt_length
            prompt = rollout.tokens[:start]
            rows.append(
                {
                    "task": task_name(sources[rollout.task.env], split, rollout.task.index),
                    "key": hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest(),
                    "env": rollout.task.env,
                    "sample": int(rollout.sample),
                    "reward": float(rollout.reward),
                    "rewards": {name: float(value) for name, value in rollout.rewards.items()},
                    "finish_reason": rollout.finish_reason,
                    "num_tokens": int(rollout.sampled_mask.sum()),
                    "prompt": decode(prompt.tolist()),
                    "completion": decode(rollout.tokens[start:].tolist()),
                }
            )
    return rows


def encode(rows: Iterable[Mapping]) -> bytes:
    """Returns rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="surrogatepass")


def read(path: str | os.PathLike) -> list[dict]:
    """Returns the rows of a file, without a last line that was cut off. Raises ValueError with the place of a malformed row."""
    rows = []
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or was cut off
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in REQUIRED.items()):
            raise ValueError(f"{path}, line {number} is not a sample with {', '.join(REQUIRED)}; give a file of them")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no samples; give a file of samples, such as WORKDIR/samples/held_out_0.jsonl")
    return rows


def by_task(rows: Iterable[Mapping]) -> dict[str, scores_lib.TaskRewards]:
    """Returns the rewards by task, in the order of the rows."""
    found, first = collections.defaultdict(dict), {}
    for row in rows:
        found[row["task"]][row["sample"]] = float(row["reward"])
        first.setdefault(row["task"], row)
    rewards = {task: tuple(own[sample] for sample in sorted(own)) for task, own in found.items()}
    own = lambda task, name: str(first[task].get(name, ""))  # noqa: E731
    return {t: scores_lib.TaskRewards(own(t, "key") or t, rewards[t], own(t, "env")) for t in rewards}


class Log:
    """An open file of rows. `rows` has those that it had; `append` adds one, complete on the disk before it returns.

    Raises ValueError for a file of other lines, which stays as it is.
    """

    def __init__(self, path: str | os.PathLike):
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept, _, cut = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        if cut[: len(FIRST)] != FIRST[: len(cut)]:
            raise ValueError(f"{path} does not end with a sample; give another file, or one of samples")
        self.rows = read(path) if kept else []
        self._file = open(path, "ab")
        self._file.truncate(len(kept) + bool(kept))

    def append(self, rows: Sequence[Mapping]) -> None:
        """Appends rows; they are on the disk when this returns."""
        self._file.write(encode(rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
