"""The rows of one file or data set: JSON rows as the bytes they are, Arrow rows as record batches.

Nothing here looks at what a row says, so no text is ever taken for a date or a number; whoever
parses a row refuses what is wrong with it. A file that is damaged as such is an InputError.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.data.messages import NOT_JSON, NOT_PLAIN, NOT_UTF8, JsonObject, Unreadable

PACKED = ("", ".gz", ".zst")
LINES = (".jsonl", ".ndjson")
SUFFIXES = (*(kind + packed for kind in (*LINES, ".json") for packed in PACKED), ".parquet")

CHUNK = 1 << 20  # bytes read at once
PACKED_CHUNK = 1 << 16  # of zstandard, which may hold a thousand times as much
BATCH_BYTES = 16 << 20  # about what a record batch may hold
BLANK = b"\xef\xbb\xbf \t\r\n"  # white space and the byte order mark
BACKSLASH = ord("\\")
REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# What pyarrow raises for text that is not UTF-8, dates that Python has not, unknown time zones, ...
UNDECODABLE = (
    ArithmeticError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError,
)  # fmt: skip
JSON_TYPE = "arrow.json"
OBJECTS = re.compile(rb"\[\s*\{")
# What a message has, and what a row has of its own: an object with them wraps no rows.
MESSAGE_KEYS = {"role", "from"}
ROW_KEYS = {
    "messages", "conversations", "conversation", "prompt", "instruction", "question", "input",
    "completion", "response", "output", "answer", "text", "chosen",
}  # fmt: skip
MARK = re.compile(rb'["{}\[\],]')


def is_parquet(path: Path) -> bool:
    """Whether the file is read in record batches; all others hold JSON."""
    return path.name.lower().endswith(".parquet")


def _has_lines(path: Path) -> bool:
    return path.name.lower().endswith(tuple(kind + packed for kind in LINES for packed in PACKED))


def json_rows(path: Path, raw: io.RawIOBase) -> Iterator[tuple[str, bytes]]:
    """(origin, JSON in what should be UTF-8) of each row of a JSON or JSON Lines file.

    A .jsonl or .ndjson file holds a row a line. A .json file is, by how it begins, either
    - JSON Lines, where the first line holds one whole object and nothing else; an object that goes
      on to the next line is then an error of the file, or
    - the elements of an array, or objects after each other, with any white space between and in
      them.
    One object alone, one of whose values is a list of rows ({"train": [...]}), is these rows, and
    is in memory as a whole.
    The origin is `file:line` in JSON Lines, else `file[index]`. No more than a few rows are in
    memory.

    Args:
        path: its name says how it is packed and what is in it.
        raw: its bytes as they are stored.

    Raises InputError, naming file and place, where it cannot be unpacked or ends within a value.
    """
    place = f"{path}:1"
    try:
        stream = io.BufferedReader(_unpacked(path, raw), CHUNK)
        blank_lines, head = _skip_blank(stream)
        whole_lines = _has_lines(path)
        lines = enumerate(stream, start=blank_lines + 1)
        spread: io.BufferedIOBase | None = None if whole_lines else stream
        if not whole_lines and _is_lines(head):
            number, line = next(lines)
            blank_lines, rest = _skip_blank(stream)
            lines = chain([(number, line)], enumerate(stream, start=number + 1 + blank_lines))
            spread = None if rest else io.BytesIO(line)  # the only line may wrap rows
        if spread is not None:
            place = f"{path}[0]"
            in_array = head.startswith(b"[")
            values = _values(spread, in_array)
            for index, value in enumerate(values if in_array else _unwrapped(values)):
                yield f"{path}[{index}]", value
                place = f"{path}[{index + 1}]"
            return
        for number, line in lines:
            if not whole_lines and line.startswith(b"{") and not line.rstrip().endswith(b"}"):
                raise EOFError(
                    "an object does not end in its line, as the first one does; a file named "
                    ".jsonl has its bad lines rejected one by one"
                )
            if not line.isspace():
                yield f"{path}:{number}", line
            place = f"{path}:{number + 1}"
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{place}: cannot be read, replace the file: {error}") from error


def parquet_batches(path: Path, batch_rows: int) -> Iterator[Any]:
    """Record batches of up to `batch_rows` rows, fewer where rows are large.

    Raises InputError for a file that is truncated or no Parquet.
    """
    row = 0
    with _parquet_errors(lambda: f"{path}[{row}]"), _parquet(path) as file:
        groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
        size = sum(group.total_byte_size for group in groups)
        fitting = BATCH_BYTES * file.metadata.num_rows // max(1, size)
        for batch in file.iter_batches(batch_size=max(1, min(batch_rows, fitting))):
            yield batch
            row += batch.num_rows


def count_parquet(path: Path) -> int:
    """Rows, by the file's footer. Raises InputError for a file that is truncated or no Parquet."""
    with _parquet_errors(lambda: str(path)), _parquet(path) as file:
        return file.metadata.num_rows


def dataset_batches(dataset: Any, batch_rows: int) -> Iterator[Any]:
    """Record batches of a data set of the `datasets` package, fewer rows where they are large."""
    table = dataset.with_format("arrow")
    fitting = BATCH_BYTES * len(dataset.data) // max(1, dataset.data.nbytes)
    batch_rows = max(1, min(batch_rows, fitting))
    for first in range(0, len(dataset), batch_rows):
        yield from table[first : first + batch_rows].combine_chunks().to_batches()


def stream_batches(dataset: Any, batch_rows: int) -> Iterator[Any]:
    """Record batches of a streamed data set of the `datasets` package."""
    for table in dataset.with_format("arrow").iter(batch_rows):
        yield from table.combine_chunks().to_batches()


def to_ipc(batch: Any) -> bytes:
    """A record batch as an Arrow stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def from_ipc(stream: bytes) -> Iterator[dict[str, Any]]:
    """The rows of a record batch; values of the JSON type, which Arrow keeps as text, decoded.

    A value that its type cannot hold is Unreadable, which matters only to a row that needs it.
    """
    import pyarrow as pa

    with pa.ipc.open_stream(stream) as reader:
        for batch in reader:
            columns = [_column(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                yield dict(zip(batch.schema.names, values, strict=True))


def _column(column: Any) -> list[Any]:
    """The values of an Arrow array: at once, unless some need a look of their own."""
    if JSON_TYPE not in str(column.type):
        try:
            return column.to_pylist()
        except UNDECODABLE:
            pass
    return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    """An Arrow scalar, whose type is asked at every level: one bad value spoils no other."""
    import pyarrow as pa

    if not scalar.is_valid:
        return None
    kind = scalar.type
    if pa.types.is_struct(kind):
        return {kind[i].name: _value(scalar[i]) for i in range(kind.num_fields)}
    if any(is_list(kind) for is_list in (pa.types.is_list, pa.types.is_large_list)):
        return [_value(item) for item in scalar.values]
    try:
        value = scalar.as_py()
        is_json = getattr(kind, "extension_name", None) == JSON_TYPE
        return json.loads(value, object_hook=JsonObject) if is_json else value
    except UnicodeDecodeError:
        return Unreadable(NOT_UTF8)
    except json.JSONDecodeError:
        return Unreadable(NOT_JSON)
    except UNDECODABLE:
        return Unreadable(NOT_PLAIN)


def _parquet(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)


@contextmanager
def _parquet_errors(place: Callable[[], str]) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{place()}: cannot be read, replace the file: {reason}") from error


def _unpacked(path: Path, raw: io.RawIOBase) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    return _Zstandard(raw) if suffix == ".zst" else raw


class _Zstandard(io.RawIOBase):
    """The content of zstandard frames; unlike the package's own reader it misses a missing end."""

    def __init__(self, raw: io.RawIOBase) -> None:
        import zstandard

        self._raw, self._failure = raw, zstandard.ZstdError
        # The largest window that `zstd --long=31` may ask for; it is allocated as it is used.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None  # the one begun and not ended
        self._packed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._raw.read(PACKED_CHUNK) or b""
            if not self._packed:
                if self._frame:
                    raise EOFError("the compressed file ends within a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._content = memoryview(self._frame.decompress(self._packed))
            except self._failure as error:
                raise OSError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


def _skip_blank(stream: io.BufferedReader) -> tuple[int, bytes]:
    """Lines that end before the first byte that is not blank, and what follows, as far as seen."""
    lines = 0
    while ahead := stream.peek():
        head = ahead.lstrip(BLANK)
        blank = stream.read(len(ahead) - len(head))
        lines += blank.count(b"\n")
        if head:
            return lines, head
    return lines, b""


def _is_lines(head: bytes) -> bool:
    """Whether a .json file is JSON Lines: one object begins and ends in its first line."""
    line, newline, _ = head.partition(b"\n")
    if not line.startswith(b"{") or (newline and not line.rstrip().endswith(b"}")):
        return False
    values = 0
    with suppress(EOFError):  # as far as it is seen
        for _ in _values(io.BytesIO(line), in_array=False):
            values += 1
    return values < 2


def _values(stream: io.BufferedIOBase, in_array: bool) -> Iterator[bytes]:
    """The JSON of each element of an array, or of each value of a sequence, not yet parsed.

    Found by strings, brackets and commas alone: one bad value does not spoil the next. Raises
    EOFError where the stream ends within a value or before the array does.
    """
    stream.read(1 if in_array else 0)
    buffer, at, depth = b"", 0, 0  # the buffer begins with a value; it is known as far as `at`
    while more := stream.read(max(CHUNK, len(buffer))):  # doubled, so that a long row is linear
        buffer += more
        start = 0
        while found := MARK.search(buffer, at):
            mark, place, at = found[0], found.start(), found.end()
            if mark == b'"':
                at = _string_end(buffer, at)
                if not at:
                    at = place
                    break
            elif mark in b"[{":
                depth += 1
            elif depth > 1 or (depth and in_array):
                depth -= mark != b","
            elif in_array and mark != b"}":
                if value := buffer[start:place].strip():
                    yield value
                start = at
                if mark == b"]":
                    _check_blank(buffer[start:], stream)
                    return
            elif not in_array and mark != b",":
                depth = 0
                yield buffer[start:at]
                start = at
        else:
            at = len(buffer)
        buffer, at = buffer[start:], at - start
    if in_array or depth:
        raise EOFError("it ends within a value: the file is truncated")
    if buffer.strip():
        yield buffer


def _unwrapped(values: Iterator[bytes]) -> Iterator[bytes]:
    """The values, or the rows that the only one of them wraps."""
    first, second = next(values, None), next(values, None)
    inside = _list_of_rows(first) if first and second is None else None
    if inside:
        return _values(io.BytesIO(inside), in_array=True)
    return chain((value for value in (first, second) if value is not None), values)


def _list_of_rows(value: bytes) -> bytes | None:
    """The one list of objects in an object that is itself no row, as it stands there."""
    found, at, depth, start = [], 0, 0, 0
    while mark := MARK.search(value, at):
        at = mark.end()
        if mark[0] == b'"':
            at = _string_end(value, at) or len(value)
        elif mark[0] in b"[{":
            depth += 1
            start = mark.start() if depth == 2 else start
        elif mark[0] != b",":
            depth -= 1
            if depth == 1 and OBJECTS.match(value, start):
                found.append(slice(start, at))
    if len(found) != 1:
        return None
    rows = value[found[0]]
    try:
        wrapper = json.loads(value[: found[0].start] + b"0" + value[found[0].stop :])
        first = json.loads(next(_values(io.BytesIO(rows), in_array=True)))
    except (ValueError, RecursionError):
        return None
    return None if ROW_KEYS & wrapper.keys() or MESSAGE_KEYS & first.keys() else rows


def _string_end(buffer: bytes, at: int) -> int:
    """Where the string ends whose content begins at `at`; 0 where the buffer ends before it."""
    quote = buffer.find(b'"', at)  # at once, where no quote is escaped
    if quote >= 0 and buffer[quote - 1] == BACKSLASH:
        rest = REST_OF_STRING.match(buffer, at)
        return rest.end() if rest else 0
    return quote + 1


def _check_blank(rest: bytes, stream: io.BufferedIOBase) -> None:
    """Raises EOFError where anything but white space follows an array."""
    while not rest.strip():
        rest = stream.read(CHUNK)
        if not rest:
            return
    raise EOFError("something follows the end of the array")
