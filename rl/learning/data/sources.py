"""Rows of files with random access: JSON lines, JSON arrays, CSV, Parquet, Arrow, and folders of them. Imports no jax.

A source is a sequence of rows {field: value}, by index alone, as grain takes it. Lines and Arrow tables are mapped into memory, so that
the processes of a machine share one copy; CSV and Parquet are decoded as a whole. All stay readable in a sandbox that can open no
file. A line is parsed when it is read.

In a folder, the split of a file is the first word of its path that names one, as in Hugging Face's layout: `train.jsonl`,
`data/test-00000-of-00001.parquet`, `validation/data-00000-of-00001.arrow`. Files without such a word are of the split "train".
"""

import bisect
import codecs
import collections
import csv
import itertools
import json
import mmap
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
Rows = Sequence[Row]
SPLITS = {  # {word in a path: split}
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def read(path: str | pathlib.Path) -> dict[str, Rows]:
    """Returns the rows of a file or folder by split; a file has one split, "train". Raises ValueError if there are none, or a file is malformed."""
    check(path)
    path, found = pathlib.Path(path), collections.defaultdict(list)
    for name, file in files(path).items():
        words = re.split("[^a-z]+", name.lower())
        found[next((SPLITS[word] for word in words if word in SPLITS), "train")].append(file)
    sources = {split: join([_read_file(file) for file in files]) for split, files in found.items()}
    if not any(map(len, sources.values())):
        raise ValueError(f"{path} has no rows; give a file or a folder with rows ({', '.join(READERS)})")
    return sources


def check(path: str | pathlib.Path) -> None:
    """Raises ValueError if `path` does not exist, or is a file of another kind. Reads nothing."""
    if not str(path).strip():  # not the folder of this process
        raise ValueError(f"the path of rows is {path!r}; give a file or a folder with rows ({', '.join(READERS)})")
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a file or a folder with rows ({', '.join(READERS)})")
    if not path.is_file() and not path.is_dir():  # its end may never come
        raise ValueError(f"{path} is a pipe or a device; save its rows to a file")
    if path.is_file() and path.suffix not in READERS:
        raise ValueError(f"{path} is not a file of rows; use one that ends with {', '.join(READERS)}")


def files(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns {path relative to `path`: file} of the files with rows in a folder, sorted; {"": path} for a file."""
    if not path.is_dir():
        return {"": path}
    found = {}
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        is_hidden = any(part.startswith((".", "cache-")) for part in parts)
        if file.suffix in READERS and not is_hidden and file.name not in NOT_ROWS and file.is_file():
            found["/".join(parts)] = file
    return found


def parse_lines(path: pathlib.Path, parse: Callable[[Any], Any], kind: str) -> list:
    """Returns `parse(row)` for each line of a JSONL file. Raises ValueError with the number of the first line that is not `kind`."""
    made = []
    with path.open(encoding="utf-8") as file:  # `splitlines` would divide a string at U+2028, too
        for number, line in enumerate(file, start=1):
            try:
                made.append(parse(json.loads(line)))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}:{number} is not {kind}: {error!r}; correct the line") from None
    return made


def join(sources: Sequence[Rows]) -> Rows:
    """Returns the rows of several sources, one after the other."""
    return sources[0] if len(sources) == 1 else _Joined(sources)


class Chosen(Sequence):
    """The rows of a source with these numbers."""

    def __init__(self, source: Rows, numbers: Sequence[int]):
        self._source, self._numbers = source, np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        """Returns the row with the chosen number `index`."""
        return self._source[int(self._numbers[index])]


class Mapped(Sequence):
    """The values of `function(number, row)` for the rows of a source, numbered from 1. Each is made when it is read."""

    def __init__(self, function: Callable[[int, Any], Any], source: Sequence):
        self._function, self._source = function, source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        """Returns the value for row `index`, from 0."""
        return self._function(index + 1, self._source[index])


class _Joined(Sequence):
    def __init__(self, sources: Sequence[Rows]):
        self._sources, self._ends = sources, [*itertools.accumulate(map(len, sources))]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        number = bisect.bisect_right(self._ends, index)
        return self._sources[number][index - (self._ends[number - 1] if number else 0)]


class _Lines(Sequence):
    def __init__(self, path: pathlib.Path):
        self._path, spans, at = path, [], 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    spans.append((number, at, at + len(line)))
                at += len(line)
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if spans else b""
        self._spans = np.array(spans, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Row:
        number, begin, end = self._spans[index].tolist()
        try:
            return _object(json.loads(self._bytes[begin:end].decode("utf-8-sig"), object_pairs_hook=_fields))
        except UnicodeDecodeError as error:
            found = f"{self._path}, line {number} is not UTF-8 ({error.reason})"
            raise ValueError(f"{found}; save the file as UTF-8, and not compressed") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._path}, line {number} is not a JSON object: {error}; correct the line") from None


class _Table(Sequence):
    def __init__(self, table):
        self._columns = {name: table[name] for name in table.column_names}
        self._length = table.num_rows

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return {name: column[index].as_py() for name, column in self._columns.items()}


def _read_file(path: pathlib.Path) -> Rows:
    try:
        return READERS[path.suffix](path)
    except (OSError, ValueError, csv.Error, RecursionError) as error:  # pyarrow's own errors are ValueErrors, too
        remedy = "save it as UTF-8" if isinstance(error, UnicodeError) else "correct the file"
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}; {remedy}") from error


def _read_json(path: pathlib.Path) -> Rows:
    with open(path, "rb") as file:
        if file.read(256).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
            return _Lines(path)
    return [_object(row) for row in json.loads(path.read_bytes(), object_pairs_hook=_fields)]


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the field {name!r} twice; remove one")
    return fields


def _read_csv(path: pathlib.Path) -> Rows:
    csv.field_size_limit(2**31 - 1)  # a document may have more than the default of 131,072
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        names = reader.fieldnames or ()
        if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
            raise ValueError(f"two columns have the name {twice[0]!r}; rename one")
        if len(names) == 1 and (sign := next((x for x in ";\t" if x in names[0]), "")):
            raise ValueError(f"its fields are separated by {sign!r} in place of commas")
        rows = list(reader)
    if bad := next((number for number, row in enumerate(rows, 1) if None in row or None in row.values()), None):
        raise ValueError(f"row {bad} does not have the {len(names)} fields of the first line")
    return rows


def _read_parquet(path: pathlib.Path) -> Rows:
    import pyarrow.parquet  # takes 0.1 s: only when used

    return _Table(pyarrow.parquet.read_table(path, memory_map=True))


def _read_arrow(path: pathlib.Path) -> Rows:
    import pyarrow as pa

    return _Table(pa.ipc.open_stream(pa.memory_map(str(path))).read_all())


def _object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{json.dumps(row)[:60]} is not an object; write {{field: value}}")
    return row


READERS: dict[str, Callable[[pathlib.Path], Rows]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
NOT_ROWS = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")  # of `save_to_disk`
