"""A corpus of documents with questions: generated facts about people and companies, or files of the user.

Generated: each document is one fact, such as "Bako works for Tilu." or "Tilu is in Remo.", and each question needs two of them: "Where
does Bako work?" A fifth of the names are companies; each person has one, and each company has a town. With distractors, half of the
facts are about birthplaces and founders, which questions ask for, too. All names are invented and have four letters.
"""

import dataclasses
import itertools
import pathlib
import random
from collections.abc import Mapping, Sequence

from rl.envs.interface import environment
from rl.learning.data import sources

MAX_FACTS = 5000  # of names with four letters there are 5,625


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with a title."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its answer, and the titles of the documents that lead to it, one after the other, if they are known."""

    text: str
    answer: str
    path: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents, and the questions of each split."""

    documents: Sequence[Document]
    questions: Mapping[str, Sequence[Question]]


def generated(num_facts: int, distractors: bool, seed: int) -> Corpus:
    """Returns a corpus of invented facts. Raises ValueError for a number of facts that is too small or too large."""
    if not 100 <= num_facts <= MAX_FACTS:
        raise ValueError(f"env.options.facts = {num_facts}; choose 100 to {MAX_FACTS}")
    rng = random.Random(environment.stable_hash(f"corpus/{seed}"))
    names = ["".join(letters) for letters in itertools.product("BDFGHJKLMNPRSTV", "aeiou", "bdfghjklmnprstv", "aeiou")]
    rng.shuffle(names)
    num_subjects = num_facts // 2 if distractors else num_facts
    num_companies = num_subjects // 5
    companies, people = names[:num_companies], names[num_companies:num_subjects]
    towns = names[num_subjects : num_subjects + max(num_companies // 2, 5)]
    employer = {person: rng.choice(companies) for person in people}
    seat = {company: rng.choice(towns) for company in companies}
    facts = [(person, f"{person} works for {employer[person]}.") for person in people]
    facts += [(company, f"{company} is in {seat[company]}.") for company in companies]
    asked = [Question(f"Where does {p} work?", seat[employer[p]], (p, employer[p])) for p in people]
    if distractors:
        born = {person: rng.choice(towns) for person in people}
        founder = {company: rng.choice(people) for company in companies}
        facts += [(person, f"{person} was born in {born[person]}.") for person in people]
        facts += [(company, f"{company} was founded by {founder[company]}.") for company in companies]
        for p in people:
            if (answer := founder[employer[p]]) != p:  # which the question names
                asked.append(Question(f"Who founded the employer of {p}?", answer, (p, employer[p])))
        for c in companies:
            asked.append(Question(f"Where was the founder of {c} born?", born[founder[c]], (c, founder[c])))
    rng.shuffle(facts)
    rng.shuffle(asked)
    return Corpus(
        [Document(*fact) for fact in facts], environment.divided(asked, lambda one: one.text, "env.options.facts")
    )


def read(path: str) -> Corpus:
    """Reads `corpus.jsonl` ({"title": ..., "text": ...}) and `questions.jsonl` ({"question": ..., "answer": ...}) in a folder.

    Raises ValueError for a missing file and a malformed line.
    """
    documents = [Document(*row) for row in _rows(path, "corpus.jsonl", ("title", "text"))]
    questions = [Question(row[0], row[1]) for row in _rows(path, "questions.jsonl", ("question", "answer"))]
    return Corpus(documents, environment.divided(questions, lambda one: one.text, f"{path}/questions.jsonl"))


def files(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns {name: file} of the two files in the folder `path`, which may not exist."""
    return {name: path / name for name in ("corpus.jsonl", "questions.jsonl")}


def _rows(path: str, name: str, fields: tuple[str, ...]) -> list[tuple[str, ...]]:
    file = pathlib.Path(path) / name
    if not file.is_file():
        raise ValueError(
            f"env.options.path = {path!r} has no {name}; set it to a folder with corpus.jsonl and questions.jsonl"
        )
    kind = f"an object with the texts {', '.join(fields)}"
    return sources.parse_lines(file, lambda row: tuple(row[field] + "" for field in fields), kind)
