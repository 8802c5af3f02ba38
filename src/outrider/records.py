"""Readers for the rows of JSONL and Parquet files. Every error message contains the file and the line."""

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.types import Json

SUFFIXES = (".jsonl", ".parquet")
UNREADABLE = (OSError, ValueError, OverflowError, KeyError, TypeError, MemoryError, RecursionError)
"""What readers raise for a damaged table, besides the exceptions of pyarrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record. ``location`` is ``file:line`` (JSONL, from 1) or ``file:row N`` (Parquet, from 0), for
    messages. ``unreadable`` maps columns that Python cannot represent, such as dates in an unknown time zone,
    to their types; they are an error only if they are read.
    """

    location: str
    values: Mapping[str, Json]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Json:
        """The value of a column; a dotted name selects from nested records and lists (``prompt.0.content``).
        Raises DataError if it is missing.
        """
        value: Json = dict(self.values)
        if name in self.values:  # a flattened table has dots in its names
            return self.values[name]
        if (kind := self.unreadable.get(name, self.unreadable.get(name.split(".")[0]))) is not None:
            raise DataError(f"{self.location}: column {name!r} cannot be read: it is of the type {kind}")
        for part in name.split("."):
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
                continue
            if not isinstance(value, dict) or part not in value:
                raise DataError(
                    f"{self.location}: no column {name!r}; the row has {', '.join(sorted(self.values))}"
                )
            value = value[part]
        return value

    def text(self, name: str) -> str:
        """The value of a column that must be a string and not blank; raises DataError otherwise."""
        value = self.get(name)
        if isinstance(value, list) and value and isinstance(value[0], dict) and "content" in value[0]:
            raise DataError(
                f"{self.location}: column {name!r} is a list of messages: name the text of one of them, "
                f"such as {name}.{len(value) - 1}.content"
            )
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{self.location}: column {name!r} must hold a string that is not blank, got {value!r}"[:300]
            )
        return value


def number_text(value: int | float | Decimal) -> str:
    """Write a number as people do, without an exponent if it is between 1e-30 and 1e31."""
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    decimal = Decimal(repr(value)) if isinstance(value, float) else value
    return format(decimal, "f") if abs(decimal.adjusted()) <= 30 else str(value)


def read_rows(path: Path) -> list[Row]:
    """All rows of a ``.jsonl`` or ``.parquet`` file in file order; blank JSONL lines are skipped.

    Raises DataError for a missing file, an unknown suffix, malformed content or a file without rows.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected a file ({' or '.join(SUFFIXES)})")
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown kind of file, expected one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    rows = list(_read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path))
    if not rows:
        raise DataError(f"{path}: the data set is empty")
    return rows


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # written by Windows editors
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}:1: malformed JSON: UTF-16 text; save the file as UTF-8")
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        location = f"{path}:{number}"
        try:
            record = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
            if b"\\u" in raw:
                # a lone surrogate escape cannot be encoded as UTF-8
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x} at position {error.start}"
            raise DataError(
                f"{location}: malformed JSON: not UTF-8 text ({byte}); save the file as UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: malformed JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(
                f"{location}: malformed JSON: expected an object, got {type(record).__name__} "
                "(a .jsonl file has one object per line)"
            )
        yield Row(location=location, values=record)


def unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Build a JSON object. Raises ValueError for a duplicate key, because one of its values would be lost."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs more than once in an object")
    return record


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # slow to import and rarely needed
    import pyarrow.parquet as pq

    unreadable: dict[str, str] = {}
    try:
        table = pq.read_table(path)
        try:
            records = table.to_pylist()
        except (KeyError, pa.ArrowNotImplementedError):  # types without a Python equivalent
            unreadable = {name: str(table.schema.field(name).type) for name in _unreadable(table)}
            table = table.drop_columns(list(unreadable))
            records = table.to_pylist()
        for field in filter(lambda field: _is_encoded(field.type), table.schema):
            for record in records:
                record[field.name] = decode_arrow(record[field.name], field.type)
    # Text that is not UTF-8, dates out of Python's range, wrong sizes: the content contradicts the schema.
    except (pa.ArrowException, *UNREADABLE) as error:
        raise DataError(f"{path}: malformed Parquet: {' '.join(str(error).split())}"[:300]) from error
    for index, record in enumerate(records):
        yield Row(location=f"{path}:row {index}", values=record, unreadable=unreadable)


def decode_arrow(value: Any, kind: Any, *, is_json_decoded: bool = False) -> Any:
    """Decode what pyarrow's conversion to Python leaves encoded, at any depth of a value of the Arrow type
    ``kind``: columns of JSON text (``datasets`` 5 writes them for mixed values, and decodes them itself) and
    float16 and float32 fractions, which get the value of their shortest text (5.1, not 5.099999904632568).
    Integers are exact: the shortest text of the float32 number 123456792 is 1.2345679e+08. Raises ValueError
    for damaged JSON.
    """
    if not _is_encoded(kind):
        return value
    import pyarrow as pa

    json_type = getattr(pa, "JsonType", ())  # of pyarrow 19

    def decode(value: Any, kind: Any) -> Any:
        if value is None:
            return None
        if isinstance(kind, json_type):
            return value if is_json_decoded else json.loads(value)
        if pa.types.is_float32(kind) or pa.types.is_float16(kind):
            return value if value.is_integer() else float(str(kind.to_pandas_dtype()(value)))
        if isinstance(kind, pa.BaseExtensionType):
            return decode(value, kind.storage_type)
        if pa.types.is_dictionary(kind):
            return decode(value, kind.value_type)
        if pa.types.is_struct(kind) and isinstance(value, dict):
            return {field.name: decode(value[field.name], field.type) for field in kind}
        if pa.types.is_map(kind):
            return [(key, decode(item, kind.item_type)) for key, item in value]
        if isinstance(value, list):
            return [decode(item, kind.value_type) for item in value]
        return value

    return decode(value, kind)


@lru_cache(maxsize=256)
def _is_encoded(kind: Any) -> bool:
    """Whether an Arrow type may contain JSON text, or numbers in less than 64 bits."""
    return re.search(r"\b(half)?float\b|\bextension<", str(kind)) is not None


def _unreadable(table: Any) -> list[str]:
    """Names of the columns whose values cannot be converted to Python."""
    names = []
    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            column.to_pylist()
        except Exception:
            names.append(name)
    return names
