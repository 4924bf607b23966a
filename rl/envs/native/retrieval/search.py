"""Questions that the model answers by searching a corpus with BM25.

1. The corpus is generated, or comes from a folder (corpus.py). A question of a generated corpus needs two documents, the second of
   which the first one names.
2. The tools are `search`, `open`, and `find`. The first message without a call is the answer, or its part after the last "Answer:".
3. With `protocol="text"`, a message is one command, "search WORDS", "open NUMBER", "find NUMBER WORDS", or "answer WORDS". This needs
   no schemas in the prompt, so that a model with a context of a few hundred bytes can learn it.
4. The reward is `exact`, 1 for the answer up to case, punctuation, and articles, or `f1`, the overlap of their words.

BM25 scores a document for a query by the sum over the query's different words of

    idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * length / mean length)),   idf = ln(1 + (N - df + 0.5) / (df + 0.5))

A validator must find the same order on another machine. The logarithm, whose last bit differs between systems, is rounded to 6 decimals; all
else is exact IEEE arithmetic in a fixed order, that of the words in the query. Equal scores are ordered by the number of the document.
"""

import collections
import heapq
import math
import random
import re
from collections.abc import Callable, Sequence

from rl.envs.interface import environment, episode, tools
from rl.envs.native.retrieval import corpus

INSTRUCTION = (
    "Answer the question by searching the corpus. End with a message of the form 'Answer: ...' without a call."
)
INSTRUCTION_OF_TEXT = (
    "Answer the question by searching the corpus. Write one command per message: search WORDS, open NUMBER, find NUMBER WORDS, or, at the "
    "end, answer WORDS."
)
REWARDS = ("exact", "f1")
SNIPPET_CHARS = 80
MAX_ANSWER_CHARS = 1000  # a longer one is wrong
K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")
files = corpus.files


def build(
    *,
    path: str = "",
    facts: int = 2000,
    distractors: bool = True,
    protocol: str = "tools",
    reward: str = "exact",
    results: int = 5,
    turns: int = 8,
    system_prompt: str | None = None,
    seed: int = 0,
) -> environment.Environment:
    """Builds the environment. `path` is a folder of documents and questions; "" generates `facts` documents, half of them distractors.

    A search returns `results` documents. `turns` limits the messages of the model, the answer included. The default of `system_prompt`
    depends on the protocol; "" leaves it out. Raises ValueError for a malformed file and options out of range.
    """
    tools.check_protocol(protocol, turns)
    if reward not in REWARDS or results < 1:
        raise ValueError(
            f"reward={reward!r}, results={results}; choose one of {', '.join(REWARDS)}, and at least 1 result"
        )
    source = corpus.read(path) if path else corpus.generated(facts, distractors, seed)
    commands = _commands(source.documents, results)
    instruction = tools.instruction(protocol, system_prompt, tools=INSTRUCTION, text=INSTRUCTION_OF_TEXT)
    mark = "Answer: " if protocol == "tools" else "answer "

    def make_task(index: int, split: str) -> environment.Task:
        questions = source.questions[split]
        epoch, number = divmod(index, len(questions))
        order = random.Random(environment.stable_hash(f"search/{seed}/{split}/{epoch}")).sample(
            range(len(questions)), len(questions)
        )
        question = questions[order[number]]
        messages = environment.asked(question.text, instruction)
        info = {"answer": question.answer, "path": question.path}
        return environment.Task("search", index, split, messages, mark + question.answer, info=info)

    def score(task: environment.Task, messages: Sequence[dict], state: object) -> dict[str, float]:
        played = [m for m in messages[len(task.messages) :] if m["role"] == "assistant"]
        last = (played[-1]["content"] or "") if played and not played[-1].get("tool_calls") else ""
        answer = _answer(last, protocol)
        scores = {"exact": float(normal(answer) == normal(task.info["answer"])), "f1": f1(answer, task.info["answer"])}
        return {"reward": scores[reward], **scores, "turns": float(len(played))}

    def reply(task: environment.Task, messages: Sequence[dict], state: object) -> list[dict] | None:
        name, _, rest = (messages[-1]["content"] or "").strip().partition(" ")
        if protocol == "tools" or name == "answer":
            return None
        try:
            found = _command(commands, name, rest.strip())
        except ValueError as error:
            found = f"error: {error}"
        return [{"role": "user", "content": found}]

    def demonstrate(task: environment.Task, rng: random.Random, is_decoy: bool) -> dict:
        """Searches for each document of the path, then answers; a decoy stops at the first and answers with the title of the second."""
        path, messages = task.info["path"], [*task.messages]
        for turn, title in enumerate(path[:1] if is_decoy else path):
            found = commands["search"](query=title)
            messages += tools.step(protocol, turn, f"search {title}", "search", {"query": title}, found)
        answer = task.answer.replace(task.info["answer"], path[1]) if is_decoy else task.answer
        messages.append({"role": "assistant", "content": answer})
        return {"messages": messages, "tools": [tool.schema for tool in offered]}

    offered = [tools.of(command) for command in commands.values()] if protocol == "tools" else []
    play = episode.conversation(score=score, reply=reply, tools=offered, max_turns=turns)
    can_demonstrate = demonstrate if not path else None
    return environment.Environment(
        "search", make_task, num_tasks=len(source.questions["train"]), play=play, demonstrate=can_demonstrate
    )


def normal(text: str) -> list[str]:
    """Returns the words of an answer without case, punctuation, and articles."""
    return [word for word in words_of(text) if word not in ("a", "an", "the")]


def f1(answer: str, truth: str) -> float:
    """Returns the harmonic mean of precision and recall of the answer's words."""
    said, true = collections.Counter(normal(answer)), collections.Counter(normal(truth))
    return 2 * (said & true).total() / max(said.total() + true.total(), 1)


def _answer(text: str, protocol: str) -> str:
    """Returns the answer in the last message, or ""."""
    if protocol == "text":
        name, _, rest = text.strip().partition(" ")
        text = rest if name == "answer" else ""
    else:
        text = re.split(r"answer:", text, flags=re.IGNORECASE)[-1]
    return text if len(text) <= MAX_ANSWER_CHARS else ""


def _commands(documents: Sequence[corpus.Document], limit: int) -> dict[str, Callable[..., str]]:
    """Returns {name: function} of the tools."""
    index = Index([f"{document.title} {document.text}" for document in documents])

    def document_of(number: int) -> corpus.Document:
        if not 0 <= number < len(documents):
            raise ValueError(f"document {number} does not exist")
        return documents[number]

    def search(query: str) -> str:
        """Returns the number, title, and beginning of the documents that fit the query best.

        Args:
          query: words to search for.
        """
        found = index.search(query, limit)
        lines = [f"{number} {documents[number].title}: {documents[number].text[:SNIPPET_CHARS]}" for number in found]
        return "\n".join(lines) or "nothing"

    def open(number: int) -> str:
        """Returns the text of a document.

        Args:
          number: of the document, as `search` returns it.
        """
        return document_of(number).text

    def find(number: int, words: str) -> str:
        """Returns the lines of a document that contain all the words.

        Args:
          number: of the document, as `search` returns it.
          words: to find, in any case and order.
        """
        wanted = {*words_of(words)}
        lines = document_of(number).text.splitlines()
        return "\n".join(line for line in lines if wanted <= {*words_of(line)}) or "nothing"

    return {"search": search, "open": open, "find": find}


def _command(commands: dict[str, Callable[..., str]], name: str, rest: str) -> str:
    """Runs a command of the protocol "text". Raises ValueError for a malformed one."""
    number, _, words = rest.partition(" ")
    if name == "search":
        return commands[name](rest)
    if name not in commands:
        raise ValueError("write search, open, find, or answer")
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise ValueError(f"write {name} and the number of a document")
    return commands[name](int(number), words) if name == "find" else commands[name](int(number))


class Index:
    """A BM25 index in memory of documents, which are named by their position."""

    def __init__(self, documents: Sequence[str]):
        self._postings: dict[str, list[tuple[int, float]]] = {}  # {word: (document, its part of the sum without idf)}
        counted = [collections.Counter(words_of(text)) for text in documents]
        mean = sum(count.total() for count in counted) / max(len(counted), 1)
        for number, count in enumerate(counted):
            norm = K1 * (1 - B + B * count.total() / mean) if mean else 0.0
            for word, tf in count.items():
                self._postings.setdefault(word, []).append((number, tf * (K1 + 1) / (tf + norm)))
        self._size = len(counted)

    def search(self, query: str, limit: int) -> list[int]:
        """Returns the numbers of at most `limit` documents, best first; none without a word of the query."""
        scores: dict[int, float] = collections.defaultdict(float)
        for word in dict.fromkeys(words_of(query)):
            found = self._postings.get(word, [])
            idf = round(math.log(1 + (self._size - len(found) + 0.5) / (len(found) + 0.5)), 6)
            for number, part in found:
                scores[number] += idf * part
        return heapq.nsmallest(limit, scores, key=lambda number: (-scores[number], number))


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return _WORD.findall(text.lower())
