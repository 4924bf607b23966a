"""Questions over a corpus: each needs two documents, both protocols find them, and rewards are those of independent formulas."""

import asyncio
import json
import math
import random
import re

import pytest

from rl import envs
from rl.envs.interface import scripted_model
from rl.envs.native.retrieval import corpus, search


def play(env, task, *replies):
    model = scripted_model.ScriptedModel(scripted_model.in_order(*replies))
    scores = asyncio.run(env.play(task, model))
    return scores, [messages[-1]["content"] for messages, *_ in model.calls][1:]


def test_a_generated_corpus_answers_each_question_by_two_facts():
    made = corpus.generated(2000, True, 0)
    facts = {}
    for document in made.documents:
        match = re.fullmatch(r"(\w+) (works for|is in|was born in|was founded by) (\w+)\.", document.text)
        assert match and match[1] == document.title
        facts[match[1], match[2]] = match[3]
    assert len(facts) == len(made.documents) == 2000
    steps = {
        "Where does": ("works for", "is in"),
        "Who founded": ("works for", "was founded by"),
        "Where was": ("was founded by", "was born in"),
    }
    kinds = {kind: 0 for kind in steps}
    for questions in made.questions.values():
        for question in questions:
            kind = " ".join(question.text.split()[:2])
            (name,) = re.findall(
                r"\b[A-Z][a-z]{3}\b(?! does| was)", question.text.replace("Where", "").replace("Who", "")
            )
            first, second = steps[kind]
            assert question.path == (name, facts[name, first])
            assert question.answer == facts[facts[name, first], second]
            assert question.answer not in question.text
            kinds[kind] += 1
    assert min(kinds.values()) > 150 and len(made.questions["held_out"]) > 40
    assert made == corpus.generated(2000, True, 0) != corpus.generated(2000, True, 1)


def test_both_protocols_answer_the_same():
    for distractors in (False, True):
        options = {"distractors": distractors, "results": 3}
        text, calls = (envs.load("search", protocol=protocol, **options) for protocol in ("text", "tools"))
        task, other = text.make_task(3, "train"), calls.make_task(3, "train")
        assert task.messages[-1] == other.messages[-1] and task.info == other.info
        first, second = task.info["path"]
        number = play(text, task, f"search {first}", "answer x")[1][0].split()[0]
        commands = [f"search {first}", f"open {number}", f"find {number} {second}", "open 99999", task.answer]
        asked = [
            {"tool": "search", "arguments": {"query": first}},
            {"tool": "open", "arguments": {"number": int(number)}},
            {"tool": "find", "arguments": {"number": int(number), "words": second}},
            {"tool": "open", "arguments": {"number": 99999}},
            other.answer,
        ]
        (scores, shown), (other_scores, other_shown) = play(text, task, *commands), play(calls, other, *asked)
        assert scores == other_scores and scores["reward"] == 1.0
        assert shown[:3] == other_shown[:3] and shown[3] == "error: document 99999 does not exist"
        assert other_shown[3] == "error: ValueError: document 99999 does not exist"


def test_commands_that_are_malformed_are_answered():
    env = envs.load("search", protocol="text", turns=9)
    task = env.make_task(0, "train")
    said = ["", "look x", "open", "open -1", "find x y", "open ٣", "search", "answers x", "answer"]
    scores, shown = play(env, task, *said)
    assert scores["reward"] == 0.0 and len(shown) == 8
    assert (
        shown[0] == "error: write search, open, find, or answer"
        and shown[2] == "error: write open and the number of a document"
    )
    assert shown[6] == "nothing" and shown[7] == shown[0]
    assert (
        play(envs.load("search", protocol="text", turns=2), task, "search x", "search y", task.answer)[0]["reward"]
        == 0.0
    )


@pytest.mark.parametrize(
    ("answer", "truth", "exact", "f1"),
    [
        ("The Hague!", "hague", 1.0, 1.0),
        ("a b c", "b c d", 0.0, 0.8),  # articles go: {b, c} of {b, c, d}
        ("b b", "b", 0.0, 2 * (1 / 2) * 1 / (1 / 2 + 1)),
        ("", "x", 0.0, 0.0),
        ("x y", "z", 0.0, 0.0),
    ],
)
def test_rewards(answer, truth, exact, f1):
    assert float(search.normal(answer) == search.normal(truth)) == exact
    assert search.f1(answer, truth) == pytest.approx(f1)


def test_an_answer_is_one_guess():
    env = envs.load("search")
    task = env.make_task(0, "train")
    right = task.info["answer"]
    assert play(env, task, f"I found it. answer: {right}.")[0]["reward"] == 1.0
    assert play(env, task, f"Answer: {right} Answer: other")[0]["reward"] == 0.0
    assert play(env, task, f"{right} other")[0]["reward"] == 0.0
    assert play(envs.load("search", reward="f1"), task, f"{right} other")[0]["reward"] == pytest.approx(2 / 3)
    assert play(env, task, "x " * 10**6)[0] == {"reward": 0.0, "exact": 0.0, "f1": 0.0, "turns": 1.0}


def test_your_own_files(tmp_path):
    rows = [{"title": f"t{n}", "text": f"line one of {n}\nthe secret is s{n}"} for n in range(40)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "questions.jsonl").write_text(
        "\n".join(json.dumps({"question": f"Secret of t{n}?", "answer": f"s{n}"}) for n in range(40))
    )
    env = envs.load("search", path=str(tmp_path))
    texts = [
        env.make_task(i, s).messages[-1]["content"]
        for s, n in (("train", env.num_tasks), ("held_out", 40 - env.num_tasks))
        for i in range(n)
    ]
    assert sorted(texts) == sorted(f"Secret of t{n}?" for n in range(40)) and 0 < env.num_tasks < 40
    task = env.make_task(0, "train")
    scores, shown = play(env, task, {"tool": "find", "arguments": {"number": 7, "words": "SECRET is"}}, task.answer)
    assert scores["reward"] == 1.0 and shown == ["the secret is s7"]
    before = envs.digest("search", {"path": str(tmp_path)})
    (tmp_path / "corpus.jsonl").write_text("{}")
    assert envs.digest("search", {"path": str(tmp_path)}) != before
    with pytest.raises(ValueError, match="corpus.jsonl:1 is not an object with the texts title, text"):
        envs.load("search", path=str(tmp_path))
    with pytest.raises(ValueError, match="has no corpus.jsonl"):
        envs.load("search", path=str(tmp_path / "none"))


def test_every_question_comes_once_per_epoch():
    env = envs.load("search", facts=100, distractors=False)
    texts = [env.make_task(index, "train").messages[-1]["content"] for index in range(2 * env.num_tasks)]
    half = env.num_tasks
    assert (
        len({*texts[:half]}) == half and sorted(texts[:half]) == sorted(texts[half:]) and texts[:half] != texts[half:]
    )
    assert (
        env.demonstrate(env.make_task(0, "train"), random.Random(0), True)["messages"][-1]["content"]
        != env.make_task(0, "train").answer
    )


def scores_by_loops(documents, query):
    split = [re.findall(r"\w+", document.lower()) for document in documents]
    mean = sum(len(words) for words in split) / len(split)
    asked = []
    for word in re.findall(r"\w+", query.lower()):
        if word not in asked:
            asked.append(word)
    found = []
    for words in split:
        total = 0.0
        for word in asked:
            df = sum(word in other for other in split)
            tf = words.count(word)
            idf = math.log(1 + (len(split) - df + 0.5) / (df + 0.5))
            total += idf * (tf * 2.2) / (tf + 1.2 * (0.25 + 0.75 * len(words) / mean))
        found.append(total)
    return found


def test_order_is_that_of_the_formula():
    rng = random.Random(0)
    vocabulary = "a b c d e f g H I J".split()
    for _ in range(60):
        documents = [" ".join(rng.choices(vocabulary, k=rng.randint(0, 12))) for _ in range(rng.randint(1, 25))]
        documents[0] += " a"
        query = " ".join(rng.choices([*vocabulary, "unknown"], k=rng.randint(1, 4)))
        scores = scores_by_loops(documents, query)
        found = search.Index(documents).search(query, 100)
        assert set(found) == {number for number, score in enumerate(scores) if score > 0}
        for one, other in zip(found, found[1:], strict=False):
            # The rounded logarithm moves a score by less than 2e-5 here: 4 words, each with a factor below 2.2.
            assert scores[one] > scores[other] - 2e-5
            assert scores[one] - scores[other] > 2e-5 or abs(scores[one] - scores[other]) < 2e-5
        assert search.Index(documents).search(query, 3) == found[:3]


def test_ties_go_to_the_lower_number():
    index = search.Index(["x y", "z", "y x", "x x", "y, X!"])
    assert index.search("x y", 9) == [0, 2, 4, 3] and index.search("nothing at all", 9) == []
    assert search.Index([]).search("x", 1) == [] and search.Index([""]).search("", 1) == []
