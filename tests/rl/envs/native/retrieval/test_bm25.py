"""The ranking is that of the formula, written as loops."""

import math
import random
import re

from rl.envs.native.retrieval import bm25


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
        found = bm25.Index(documents).search(query, 100)
        assert set(found) == {number for number, score in enumerate(scores) if score > 0}
        for one, other in zip(found, found[1:], strict=False):
            # The rounded logarithm moves a score by less than 2e-5 here: 4 words, each with a factor below 2.2.
            assert scores[one] > scores[other] - 2e-5
            assert scores[one] - scores[other] > 2e-5 or abs(scores[one] - scores[other]) < 2e-5
        assert bm25.Index(documents).search(query, 3) == found[:3]


def test_ties_go_to_the_lower_number():
    index = bm25.Index(["x y", "z", "y x", "x x", "y, X!"])
    assert index.search("x y", 9) == [0, 2, 4, 3] and index.search("nothing at all", 9) == []
    assert bm25.Index([]).search("x", 1) == [] and bm25.Index([""]).search("", 1) == []
