"""Unmodified environments of verifiers 0.3.0 and 0.4.0 are recorded, and verified by replay in another process.

Slow, and skipped without $INTELLAX_FOREIGN_SOURCES, a folder with `v0`, `v1_030`, and `v1_040`: the folders `environments` of verifiers'
repository at commit 985739b, at tag v0.3.0, and at commit a60a606. The releases are installed by pip, once (minutes):

    INTELLAX_FOREIGN_SOURCES=sources INTELLAX_ENVIRONMENTS=~/.cache/intellax/environments \\
        python -m pytest -m slow -n 0 tests/rl/envs/foreign/test_frameworks.py
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re

import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.envs.foreign import host as host_lib
from rl.envs.host import group as group_lib
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib
from rl.envs.recording import session as session_lib
from rl.protocol import lease
from rl.trust.verification import episodes
from tests.rl.envs.recording import test_tape
from tests.support import episodes as episodes_lib

SOURCES = os.environ.get("INTELLAX_FOREIGN_SOURCES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="INTELLAX_FOREIGN_SOURCES names no folder with verifiers' environments"),
]
V03 = ("verifiers==0.3.0", "prime-sandboxes==0.2.36", "renderers==0.1.10", "reasoning-gym==0.1.25")
V04 = ("verifiers==0.4.0", "datasets")
LIMITS = session_lib.Limits(max_tokens=96, max_model_len=8192, max_calls=12, max_episode_tokens=400)
SAMPLES = 4  # episodes of a group
CALLS = ["<tool_call>\n" + json.dumps({"name": f"tool_{x}", "arguments": {"x": 1}}) + "\n</tool_call>" for x in "ABCD"]
MOVES = ["[check]", "[bet]", "[fold]", "[call]", "hm"]
SORTED = ["<alphabetical_sorted>\nAdaLovelace\n</alphabetical_sorted>", "<combined_alphabetical_sorted>\nx", "no"]
REVERSED = ["<reversed_text>abc</reversed_text>", "<reversed_text>0d", "x"]


def sums(prompt):
    """Returns a wrong answer to a sum, and the right one."""
    numbers = re.findall(r"[-+ ]*\d+(?=[-+ \d]*=)", prompt.rpartition("problem:")[2])
    return ["<answer>-12345</answer>", f"<answer>{sum(int(one.replace(' ', '')) for one in numbers)}</answer>"]


def facts(prompt):
    """Returns calls for the fact that a task asks for and for another one, and then the fact that the tool has found and another text."""
    if found := re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", prompt):
        return [f"<answer>{found[-1]}</answer>", "<answer>no</answer>"]
    named = [re.findall(r'look up "(.+?)"', prompt)[-1], "Ada Lovelace"]
    calls = [{"name": "facts_lookup", "arguments": {"name": name}} for name in named]
    return ["x", *(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)]


# name: (package, requirements, place in SOURCES, options, texts of the model, groups of episodes)
CASES = {
    "reasoning_gym_env": ("reasoning_gym_env", V03, "v0/reasoning_gym_env", {"gym": "chain_sum"}, sums, 25),
    "tool_test": ("tool_test", V03, "v0/tool_test", {}, CALLS, 25),
    "alphabet_sort": ("alphabet_sort", V03, "v0/alphabet_sort", {"dataset_name": "DATA/names"}, SORTED, 25),
    "reverse_text_v1": (
        "reverse_text_v1",
        V03,
        "v1_030/reverse_text_v1",
        {"taskset": {"dataset_name": "DATA/words"}},
        REVERSED,
        15,
    ),
    "kuhn_poker_v1": ("kuhn_poker_v1", V03, "v1_030/kuhn_poker_v1", {"trained_agent": "player0"}, MOVES, 15),
    "glossary_v1": ("glossary_v1", V03, "v1_030/glossary_v1", {}, facts, 3),
    "reverse_text": (
        "reverse_text",
        V04,
        "v1_040/reverse_text",
        {"taskset": {"dataset_name": "DATA/words"}},
        REVERSED,
        15,
    ),
    "kuhn_poker": ("kuhn_poker", V04, "v1_040/kuhn_poker", {"trained_agent": "player0"}, MOVES, 15),
    "glossary": ("glossary", V04, "v1_040/glossary", {}, facts, 3),
}


def write_data(folder):
    """Writes the data sets that environments would fetch from a hub: words, and lists of names."""
    rng = random.Random(0)
    words = [{"prompt": "".join(rng.choices("abcdefgh ", k=8)).strip() + str(number)} for number in range(200)]
    people = [f"{a} {b}" for a in ("Ada", "Alan", "Emmy", "Kurt") for b in ("Gauss", "Hilbert", "Noether", "Turing")]
    names = [{"names": rng.sample(people, 12)} for _ in range(100)]
    for name, rows in (("words", words), ("names", names)):
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def installed(name, folder):
    """Returns (environment as installed, its options, the texts of the model, number of groups)."""
    target, requirements, place, options, texts, count = CASES[name]
    if not (folder / "words").exists():
        write_data(folder)
    options = json.loads(json.dumps(options).replace("DATA", str(folder)))
    package = installation.install(f"verifiers:{target}", requirements, paths=[str(pathlib.Path(SOURCES) / place)])
    return package, options, texts, count


def groups_of(count):
    """Returns groups of tasks 0 to count - 1."""
    fields = {"num_samples": SAMPLES, "temperature": 1.0, "min_version": 0}
    return [lease.Lease(1, index, "train", index, 7 + SAMPLES * index, **fields) for index in range(count)]


def played(package, options, groups, generate, digest, *, seed=0, max_tokens=LIMITS.max_tokens, on_error=print):
    """Returns the rollouts of each group, as a worker submits them, before it signs them."""
    limits = dataclasses.replace(LIMITS, max_tokens=max_tokens)

    async def run():
        foreign = package_lib.Foreign(package, options, seed)
        host = host_lib.ForeignHost(foreign, episodes_lib.TOKENIZER, on_error=on_error)
        player, turns = group_lib.Player(host, episodes_lib.TOKENIZER, limits), asyncio.Semaphore(2)

        async def play(group):
            async with turns:
                task = rollout_lib.TaskRef(package.name, group.index, group.group, seed)
                return await player.play(generate, group, task, digest)

        try:
            return await asyncio.gather(*map(play, groups))
        finally:
            await host.close()

    return asyncio.run(run())


def by_sample(rollouts):
    return [[one for one in rollouts if one.sample == sample] for sample in range(SAMPLES)]


@pytest.mark.parametrize("name", CASES)
def test_honest_episodes_are_equal_to_their_replays_and_changes_are_found(name, tmp_path):
    package, options, texts, count = installed(name, tmp_path)
    backend, failures = episodes_lib.Backend(texts=texts), []

    async def generate(call, count):
        return [await backend(dataclasses.replace(call, seed=call.seed + number)) for number in range(count)]

    groups = groups_of(count)
    recorded = played(package, options, groups, generate, "", on_error=failures.append)
    assert not failures
    recorded = [by_sample(parquet.from_bytes(parquet.to_bytes(one))) for one in recorded]

    host = host_lib.ForeignHost(package_lib.Foreign(package, options, 0), episodes_lib.TOKENIZER)
    own = episodes_lib.TOKENIZER, LIMITS, "keep", episodes_lib.TOKENIZER.stop_ids
    with contextlib.closing(episodes.Episodes(host, *own)) as checker:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            found = [*threads.map(checker.replay, groups, recorded)]
        pairs = [pair for one, other in zip(recorded, found, strict=True) for pair in zip(one, other, strict=True)]
        refused = [again for one, again in pairs if again.mismatch or again.scores != one[0].rewards]
        assert not refused, refused[:3]
        rewards = sorted({one[0].rewards["reward"] for one, _ in pairs})
        num_turns = max(len(one[0].spans) for one, _ in pairs)
        print(f"{name}: {len(pairs)} episodes, 0 refused, {num_turns} turns at most, rewards {rewards[:6]}")

        # Each change is found: by the tape, or by another reward.
        places = [(g, one) for g, group in enumerate(recorded) for one in group]
        g, whole = max(places, key=lambda place: (len(place[1][0].spans) > 1, place[1][0].reward))
        first = whole[0]
        changes = {
            "prompt injected": [test_tape.changed(first, 8), *whole[1:]],
            "reward inflated": [dataclasses.replace(one, rewards=one.rewards | {"reward": 9.0}) for one in whole],
            "call repeated": [*whole, whole[-1]],
        }
        if len(first.spans) > 1:
            end = first.spans[0][1]
            changes["tool output or user's turn edited"] = [test_tape.changed(first, end + 22), *whole[1:]]
            changes["turn cut early"] = [test_tape.without_last_call(first), *whole[1:]]
        if len(whole) > 1:
            changes["call dropped"] = whole[:-1]
        if callable(texts):  # a right answer becomes a wrong one: its last character, before the tag
            assert rewards[0] < rewards[-1] == first.reward
            changes["reply edited"] = [test_tape.changed(first, -11), *whole[1:]]
        for change, rollouts in changes.items():
            [again] = checker.replay(groups[g], [rollouts])
            assert again.mismatch or again.scores != rollouts[0].rewards, change


def test_another_version_of_an_environment_has_another_digest(tmp_path):
    package, options, *_ = installed("tool_test", tmp_path)
    folder = tmp_path / "other"
    folder.mkdir()
    for file in pathlib.Path(package.paths[0]).glob("*.py"):
        (folder / file.name).write_text(file.read_text() + "\n")
    other = dataclasses.replace(package, paths=(str(folder),))
    digests = {package_lib.digest(package, options), package_lib.digest(other, options)}
    assert len(digests | {package_lib.digest(package, options | {"more": 1})}) == 3
