"""Ranks documents by BM25: a deterministic index in memory.

The score of a document for a query is the sum over the query's different words of

    idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * length / mean length)),   idf = ln(1 + (N - df + 0.5) / (df + 0.5))

1. A validator must find the same order on another machine. The logarithm, whose last bit differs between systems, is rounded to 6
   decimals; all else is exact IEEE arithmetic in a fixed order, that of the words in the query.
2. Equal scores are ordered by the number of the document. Documents without a word of the query are not found.
"""

import collections
import heapq
import math
import re
from collections.abc import Sequence

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class Index:
    """An index of documents, which are named by their position."""

    def __init__(self, documents: Sequence[str]):
        self._postings: dict[str, list[tuple[int, float]]] = {}  # {word: (document, its part of the sum without idf)}
        counted = [collections.Counter(words(text)) for text in documents]
        mean = sum(count.total() for count in counted) / max(len(counted), 1)
        for number, count in enumerate(counted):
            norm = K1 * (1 - B + B * count.total() / mean) if mean else 0.0
            for word, tf in count.items():
                self._postings.setdefault(word, []).append((number, tf * (K1 + 1) / (tf + norm)))
        self._size = len(counted)

    def search(self, query: str, limit: int) -> list[int]:
        """Returns the numbers of at most `limit` documents, best first."""
        scores: dict[int, float] = collections.defaultdict(float)
        for word in dict.fromkeys(words(query)):
            found = self._postings.get(word, [])
            idf = round(math.log(1 + (self._size - len(found) + 0.5) / (len(found) + 0.5)), 6)
            for number, part in found:
                scores[number] += idf * part
        return heapq.nsmallest(limit, scores, key=lambda number: (-scores[number], number))


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return _WORD.findall(text.lower())
