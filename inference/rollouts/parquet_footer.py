"""Checks an untrusted Parquet file by its footer and page headers, before decoding it.

`check` parses the footer and every page header here, in Python, and adds up the decoded sizes that all pages declare. Only
then is pyarrow given the bytes: its parser ends the process (C++ terminate, pyarrow 26) on an unknown codec or a malformed
size statistic, and a few bytes of dictionary or delta encoding expand to any amount of memory. Field numbers are those of
parquet.thrift; the wire format is Thrift's compact protocol.

For any bytes, `check` raises only a ValueError that names the rule. No jax here.
"""

import itertools
from collections.abc import Iterator
from typing import Any

MAX_ROWS = 2**16
MAX_FILE_BYTES = 2**28
MAX_DECODED_BYTES = 2**28  # as declared; pyarrow's table and our copies of it take up to three times that
MAX_FOOTER_BYTES = 2**20  # ours take 5 KiB per row group
MAX_PAGE_HEADER_BYTES = 2**14
MAX_DEPTH = 16  # of structs and lists in one another; Parquet nests eight deep
CODECS = (0, 1, 6)  # none, snappy, zstd
ENCODINGS = (0, 3)  # plain, run length
PAGES = {0: (5, 2), 3: (8, 4)}  # data page, data page v2: the fields of its header and of the encoding in that header


def check_size(num_bytes: int) -> None:
    """Raises ValueError if a rollout file of `num_bytes` is too large to read: more than `MAX_FILE_BYTES`."""
    _check_most(num_bytes, MAX_FILE_BYTES, "bytes")


def check(data: bytes, *, max_rows: int | None = None) -> dict[str, list[int]]:
    """Returns {column: [its values, the bytes of its pages when decoded]} as a rollout file declares them.

    Raises ValueError if the file is too large, decodes to too many bytes, or uses Parquet features not read here.
    """
    check_size(len(data))
    most_rows = MAX_ROWS if max_rows is None else min(max_rows, MAX_ROWS)
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    if data[:4] != b"PAR1" or data[-4:] != b"PAR1" or not 0 < footer_bytes <= len(data) - 12:
        raise ValueError(
            "rollout file: not readable as Parquet: no PAR1 at both ends, or no whole footer; write it again"
        )
    _check_most(footer_bytes, MAX_FOOTER_BYTES, "bytes of footer")
    try:
        footer, _ = _thrift_struct(data[-8 - footer_bytes : -8], 0)
        groups = _listed(footer, 4)
        _check_most(max(_counted(footer, 3), sum(_counted(group, 3) for group in groups)), most_rows, "rows")
        total_bytes, sizes = 0, {}
        for chunk in itertools.chain.from_iterable(_listed(group, 1) for group in groups):
            size = sizes.setdefault(_column(chunk), [0, 0])
            for page_bytes in pages(data, chunk):
                size[1] += page_bytes
                total_bytes += page_bytes
                _check_most(total_bytes, MAX_DECODED_BYTES, "decoded bytes")  # for each page: chunks may share pages
            size[0] += _counted(chunk[3], 5)
        return sizes
    except (IndexError, KeyError) as error:  # bytes end early; a required field is missing or of another type
        broken = "rollout file: not readable as Parquet: broken footer or page header; write the file again"
        raise ValueError(broken) from error


def _check_most(found: int, most: int, unit: str) -> None:
    if found > most:
        raise ValueError(f"rollout file: {found} {unit}, at most {most} are read; write fewer rollouts per file")


def pages(data: bytes, chunk: dict) -> Iterator[int]:
    """Yields upper bounds of the memory of a column chunk's pages when decoded: declared size, 4 bytes per value, and 4096.

    `chunk` is the chunk's entry in the footer. Raises ValueError if it uses a dictionary, codec, or encoding that is not read
    here, and KeyError or IndexError if a header is broken.
    """
    meta = chunk[3]
    if not isinstance(meta, dict) or 1 in chunk or 11 in meta or _counted(meta, 4) not in CODECS:
        raise ValueError(
            "rollout file: a column has a dictionary, an unknown codec, or data in another file; only plain encoding is "
            "read, with zstd, snappy or no compression; write the file like that"
        )
    at, end = _counted(meta, 9), _counted(meta, 9) + _counted(meta, 7)
    yield 4 * _counted(meta, 5)
    while at < end:
        header, size = _thrift_struct(data[at : at + MAX_PAGE_HEADER_BYTES], 0)
        where, encoding = PAGES.get(_counted(header, 1), (-1, -1))
        body = header[where]
        if (code := _counted(body, encoding)) not in ENCODINGS:
            raise ValueError(f"rollout file: a page in encoding {code} of Parquet; write it in plain encoding")
        yield _counted(header, 2) + 4 * _counted(body, 1) + 4096
        at += size + _counted(header, 3)


def _column(chunk: dict) -> str:
    """Returns the name of a chunk's column: the first part of its path in the schema."""
    path = chunk[3][3] if isinstance(chunk[3], dict) else None
    if not isinstance(path, list) or not path or not isinstance(path[0], bytes):
        raise KeyError(3)
    return path[0].decode("utf-8", "replace")


def _listed(fields: dict, number: int) -> list[dict]:
    if not isinstance(fields[number], list) or not all(isinstance(item, dict) for item in fields[number]):
        raise KeyError(number)
    return fields[number]


def _counted(fields: dict, number: int) -> int:
    if not isinstance(fields, dict) or type(fields[number]) is not int or fields[number] < 0:
        raise KeyError(number)
    return fields[number]


def _thrift_struct(data: bytes, at: int, depth: int = 0) -> tuple[dict, int]:
    """Parses the struct of Thrift's compact protocol at `data[at]`; returns ({field number: value}, position after the struct).

    Raises IndexError if the bytes end early, and ValueError if the struct breaks a rule. `depth` counts the structs around it.
    """
    fields: dict[int, object] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _thrift_value(data, at, 4, depth)
        if number in fields:
            raise ValueError("rollout file: not readable as Parquet: a field appears twice; write the file again")
        kind = head & 15
        if 4 <= kind <= 6 and data[at] < 0x80:  # most are small integers
            fields[number], at = (data[at] >> 1) ^ -(data[at] & 1), at + 1
        else:
            fields[number], at = (kind == 1, at) if kind in (1, 2) else _thrift_value(data, at, kind, depth)
    return fields, at + 1


def _thrift_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2, 3):  # a bool in a list, i8
        return data[at], at + 1
    if kind in (4, 5, 6):  # i16, i32, i64: zigzag varint
        value, at = _varint(data, at)
        return (value >> 1) ^ -(value & 1), at
    if kind in (7, 8):  # double, binary
        length, at = (8, at) if kind == 7 else (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
        if length > len(data) - at:
            raise IndexError
        return data[at : at + length], at + length
    if kind in (9, 10) and depth < MAX_DEPTH:  # list, set
        length, item_kind = data[at] >> 4, data[at] & 15
        length, at = _varint(data, at + 1) if length == 15 else (length, at + 1)
        items = []
        for _ in range(length):  # each item takes at least a byte, so the data bound the loop
            item, at = _thrift_value(data, at, item_kind, depth + 1)
            items.append(item)
        return items, at
    if kind == 12 and depth < MAX_DEPTH:  # struct
        return _thrift_struct(data, at, depth + 1)
    raise ValueError(f"rollout file: not readable as Parquet: a field of kind {kind}, {depth} deep; write it again")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("rollout file: not readable as Parquet: a number of more than 64 bits; write the file again")
