"""The walk of a prompt in docs/architecture.md: its files and forms exist, are few, and no other file gets the prompt on the way from a worker to a batch."""

import ast
import asyncio
import dataclasses
import pathlib
import re
import sys
import threading

import numpy as np

from inference.rollouts import completion as completion_lib
from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from models.text import tokenizer as tokenizer_lib
from rl import envs
from rl.envs.host import group as group_lib
from rl.learning.batch import credit, packing, training_batch
from rl.protocol import lease

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("rl", "inference", "models", "sharding")
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALK = PAGE.partition("## The walk of a prompt\n")[2].partition("\n## ")[0]
FILES = set(re.findall(r"`([\w/]+\.py)`", WALK)) - {"tests/test_walk.py"}
FORMS = set(re.findall(r"`([A-Z]\w+)`", WALK)) | {"JSON"}


def has_prompt(value, ids: list[int], text: str, depth: int = 6) -> bool:
    """Returns True if an object has a prompt, as token IDs or as text."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, list | tuple) and value and type(value[0]) is int:
        value = np.array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "i" or not value.ndim or value.shape[-1] < len(ids):
            return False
        windows = np.lib.stride_tricks.sliding_window_view(value, len(ids), axis=-1)
        return bool((windows == ids).all(axis=-1).any())
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        is_ours = type(value).__module__.partition(".")[0] in PACKAGES
        parts = getattr(value, "__dict__", {}).values() if is_ours else ()
    return depth > 0 and any(has_prompt(part, ids, text, depth - 1) for part in [*parts])


def traced(function, ids: list[int], text: str) -> set[str]:
    """Returns the files of ours in which a function got or returned the prompt while `function` ran."""
    found = set()

    def profile(frame, event, value):
        path = pathlib.Path(frame.f_code.co_filename)
        if event not in ("call", "return") or ROOT not in path.parents:
            return
        name = path.relative_to(ROOT).as_posix()
        if name.partition("/")[0] not in PACKAGES or name in found:
            return
        values = [value] if event == "return" else [*frame.f_locals.values()]
        sys.setprofile(None)
        try:
            if any(has_prompt(one, ids, text) for one in values):
                found.add(name)
        finally:
            sys.setprofile(profile)

    threading.setprofile(profile)  # of threads that begin now
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def test_the_files_and_forms_of_the_page_exist_and_are_few():
    assert [name for name in FILES if not (ROOT / name).is_file()] == []
    trees = [ast.parse(path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert FORMS - {"JSON"} <= classes
    assert f"{len(FILES)} files write its text or tokens into the next of {len(FORMS)} forms" in WALK
    assert len(FILES) <= 35 and len(FORMS) <= 14


def test_no_other_file_gets_the_prompt_from_the_worker_to_the_batch():
    tokenizer, key = tokenizer_lib.byte_chatml(), rollout_lib.WorkerKey.generate()
    env = envs.load("reverse_text", min_length=20, max_length=20)
    run = group_lib.Run(
        env=env, scorer=None, env_seed=0, tokenizer=tokenizer, servers=[], sampling={"max_tokens": 4, "top_k": 0}
    )
    given = lease.Lease(step=1, group=0, split="train", index=7, seed=3, num_samples=2, temperature=1.0, min_version=0)
    text = env.make_task(7, "train").messages[0]["content"].removeprefix("Reverse: ")
    ids = tokenizer.encode(text)

    class Client:
        async def generate(self, token_ids, sampling, **pins):
            return [completion_lib.Completion([n, 9], [-1.0, -1.0], [0, 0], 0, "stop") for n in range(2)]

    batches = []

    def walk():
        rollouts = asyncio.run(group_lib.roll_out(Client(), run, key, given))
        rollouts = [dataclasses.replace(one, reward=float(one.sample)) for one in rollouts]  # else nothing trains
        group = parquet.decode(parquet.to_bytes(rollouts)).rollouts
        batch = training_batch.assemble(1, [training_batch.rewarded(group, {})], credit.Credit(), {})
        batches.append(packing.pack(batch.trees, packing.Layout(128, 1, 2)))

    found = traced(walk, ids, text)
    assert has_prompt(batches[0].tokens, ids, text)  # it has arrived
    assert found - FILES == set()
    expected = (
        "rl/envs/host/group.py inference/rollouts/parquet.py rl/learning/batch/credit.py models/text/tokenizer.py"
    )
    assert set(expected.split()) <= found
