"""Unmodified environments of verifiers 0.3.0 and 0.4.0 are recorded, and equal to their replays in another process.

Slow, and skipped without $INTELLAX_FOREIGN_SOURCES, a folder with `v0`, `v1_030`, and `v1_040`: the folders `environments` of verifiers'
repository at commit 985739b, at tag v0.3.0, and at commit a60a606. The releases are installed by pip, once (minutes):

    INTELLAX_FOREIGN_SOURCES=sources INTELLAX_ENVIRONMENTS=~/.cache/intellax/environments \\
        python -m pytest -m slow -n 0 tests/rl/envs/foreign/test_frameworks.py
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import random

import pytest

from inference.rollouts import parquet
from inference.rollouts import rollout as rollout_lib
from rl.envs.foreign import host as host_lib
from rl.envs.packages import installation
from rl.envs.packages import package as package_lib
from rl.envs.recording import rollouts as rollouts_lib
from rl.envs.recording import session as session_lib
from rl.envs.recording import tape as tape_lib
from tests.rl.envs.recording import test_tape
from tests.support import episodes

SOURCES = os.environ.get("INTELLAX_FOREIGN_SOURCES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="INTELLAX_FOREIGN_SOURCES names no folder with verifiers' environments"),
]
V03 = ("verifiers==0.3.0", "prime-sandboxes==0.2.36", "renderers==0.1.10", "reasoning-gym==0.1.25")
V04 = ("verifiers==0.4.0", "datasets")
LIMITS = session_lib.Limits(max_tokens=96, max_model_len=8192, max_calls=12, max_episode_tokens=400)
ORIGIN = rollouts_lib.Origin(rollout_lib.TaskRef("foreign", 0, 0, 0), step=0, temperature=1.0)
ANSWERS = [f"<answer>{number}</answer>" for number in range(-3, 4)]
CALLS = ["<tool_call>\n" + json.dumps({"name": f"tool_{x}", "arguments": {"x": 1}}) + "\n</tool_call>" for x in "ABCD"]
MOVES = ["[check]", "[bet]", "[fold]", "[call]", "hm"]
LOOKUP = [
    "<tool_call>\n" + json.dumps({"name": "facts_lookup", "arguments": {"name": "Ada Lovelace"}}) + "\n</tool_call>"
]
SORTED = ["<alphabetical_sorted>\nAdaLovelace\n</alphabetical_sorted>", "<combined_alphabetical_sorted>\nx", "no"]
REVERSED = ["<reversed_text>abc</reversed_text>", "<reversed_text>0d", "x"]
# name: (package, requirements, place in SOURCES, options, texts of the model, episodes)
CASES = {
    "reasoning_gym_env": ("reasoning_gym_env", V03, "v0/reasoning_gym_env", {"gym": "chain_sum"}, ANSWERS, 100),
    "tool_test": ("tool_test", V03, "v0/tool_test", {}, CALLS, 100),
    "alphabet_sort": ("alphabet_sort", V03, "v0/alphabet_sort", {"dataset_name": "DATA/names"}, SORTED, 100),
    "reverse_text_v1": (
        "reverse_text_v1",
        V03,
        "v1_030/reverse_text_v1",
        {"taskset": {"dataset_name": "DATA/words"}},
        REVERSED,
        60,
    ),
    "kuhn_poker_v1": ("kuhn_poker_v1", V03, "v1_030/kuhn_poker_v1", {"trained_agent": "player0"}, MOVES, 60),
    "glossary_v1": ("glossary_v1", V03, "v1_030/glossary_v1", {}, [*LOOKUP, "x"], 6),
    "reverse_text": (
        "reverse_text",
        V04,
        "v1_040/reverse_text",
        {"taskset": {"dataset_name": "DATA/words"}},
        REVERSED,
        60,
    ),
    "kuhn_poker": ("kuhn_poker", V04, "v1_040/kuhn_poker", {"trained_agent": "player0"}, MOVES, 60),
    "glossary": ("glossary", V04, "v1_040/glossary", {}, [*LOOKUP, "x"], 6),
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


def play(package, options, sessions, on_error=print):
    async def run():
        foreign = package_lib.Foreign(package, options, 0)
        host = host_lib.ForeignHost(foreign, episodes.TOKENIZER, max_episodes=8, on_error=on_error)
        try:
            plays = (host.play(one, one.sample, "train") for one in sessions)
            return await asyncio.gather(*plays, return_exceptions=True)
        finally:
            await host.close()

    return asyncio.run(run())


def taped(number, rollouts):
    tape = tape_lib.of_rollouts(rollouts, episodes.TOKENIZER.stop_ids)
    return session_lib.Session(episodes.TOKENIZER, None, LIMITS, seed=7, sample=number, tape=tape)


@pytest.mark.parametrize("name", CASES)
def test_honest_episodes_are_equal_to_their_replays_and_changes_are_found(name, tmp_path):
    target, requirements, place, options, texts, count = CASES[name]
    write_data(tmp_path)
    options = json.loads(json.dumps(options).replace("DATA", str(tmp_path)))
    folder = str(pathlib.Path(SOURCES) / place)
    package = installation.install(
        f"verifiers:{target}", requirements, paths=[folder], variables={"PYTHONPATH": folder}
    )
    backend = episodes.Backend(texts=texts)
    sessions = [
        session_lib.Session(episodes.TOKENIZER, backend, LIMITS, seed=7, sample=number) for number in range(count)
    ]
    played = play(package, options, sessions)
    assert not [one for one in played if isinstance(one, BaseException)]
    errors = {one.error for one in played if one.error}
    assert not errors, errors
    recorded = [
        parquet.from_bytes(parquet.to_bytes(rollouts_lib.of_episode(one, ORIGIN, found.scores)))
        for one, found in zip(sessions, played, strict=True)
    ]
    again = [taped(number, one) for number, one in enumerate(recorded)]
    replayed = play(package, options, again)
    refused = [
        (number, found if isinstance(found, Exception) else tape_lib.difference(one, rollouts))
        for number, (one, found, rollouts) in enumerate(zip(again, replayed, recorded, strict=True))
        if isinstance(found, Exception) or found.scores != rollouts[0].rewards or tape_lib.difference(one, rollouts)
    ]
    assert not refused, refused[:3]

    rewards = [one.scores["reward"] for one in played]
    num_turns = max(len(one[0].spans) for one in recorded)
    print(f"{name}: {count} episodes, 0 refused, {num_turns} turns at most, rewards {sorted({*rewards})[:6]}")

    # Each change is refused: by the tape, or by another reward.
    number = next((at for at, one in enumerate(recorded) if len(one[0].spans) > 1), 0)
    whole = recorded[number]
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
    for change, rollouts in changes.items():
        try:
            session = taped(number, rollouts)
        except ValueError:
            continue
        [found] = play(package, options, [session])
        is_found = isinstance(found, session_lib.NotOnTape) or bool(tape_lib.difference(session, rollouts))
        assert is_found or found.scores != rollouts[0].rewards, change
    assert package_lib.digest(package, options) != package_lib.digest(package, options | {"more": 1})
