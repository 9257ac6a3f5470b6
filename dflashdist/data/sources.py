"""Where rows come from: files, folders, globs and data sets, each with a weight and a cap.

The rows of all sources, in the order given, are dealt out in units of work. Units depend on the
sources alone, so whatever is made of them, in their order, does not depend on who works on which.

Files are read as they are written. `datasets` guesses types where a file has none, above all those
of a .csv file but also dates in JSON: an answer 007 is then the number 7, and whoever parses such
a row refuses it. Name the .jsonl file itself, without split=, or give a column of text.
"""

import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflashdist.config import InputError
from dflashdist.data import readers
from dflashdist.data.locate import Dataset, Source, locate, parse_source

UNIT_ROWS = 1024
UNIT_BYTES = 16 << 20  # of payload; a single row may be larger

Payload = bytes | dict[str, Any]


@dataclass
class Unit:
    """Some rows in their order, ready to be sent to another process."""

    index: int
    source: int  # number of the source, from 0
    content: "list[tuple[str, Payload]] | PackedRows"

    def rows(self) -> Iterator[tuple[str, Payload]]:
        """(origin, payload) of each row, as `conversations.parse_row` takes them."""
        return self.content.rows() if isinstance(self.content, PackedRows) else iter(self.content)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a record batch, decoded only when they are asked for."""

    name: str
    numbers: list[int]  # their places in the file or data set
    stream: bytes

    def rows(self) -> Iterator[tuple[str, Payload]]:
        """(origin, columns) of each."""
        for number, row in zip(self.numbers, readers.from_ipc(self.stream), strict=True):
            yield f"{self.name}[{number}]", row


@dataclass(frozen=True)
class BatchRows:
    """Rows of a record batch that is not packed yet."""

    name: str
    numbers: list[int]
    batch: Any

    def packed(self) -> PackedRows:
        """The same, for another process."""
        return PackedRows(self.name, self.numbers, readers.to_ipc(self.batch))


@dataclass(frozen=True)
class RowBatches:
    """A file or data set that is read in record batches."""

    name: str
    batches: Iterable[Any]


class Quota:
    """How often each row of a source is read, by its weight, until its cap is reached."""

    def __init__(self, weight: float, cap: int | None) -> None:
        # The weight as it is written, so that ten tenths are one.
        self._above, self._below = Fraction(str(weight)).as_integer_ratio()
        self._row = 0
        self.left = sys.maxsize if cap is None else cap

    def of(self, rows: int) -> int:
        """How many rows are read of so many."""
        return min(self.left, rows * self._above // self._below)

    def take(self) -> int:
        """How often the next row is read."""
        before = self._row * self._above // self._below
        self._row += 1
        times = min(self.left, self._row * self._above // self._below - before)
        self.left -= times
        return times

    @property
    def most(self) -> int:
        """How often one row is read at most."""
        return -(-self._above // self._below)


Part = RowBatches | Iterator[tuple[str, Payload]]


def deal(parts: Iterable[Part], quota: Quota) -> Iterator[list[tuple[str, Payload]] | BatchRows]:
    """The contents of a source's units; rows of several small files may share one."""
    pending: list[tuple[str, Payload]] = []
    size = 0
    for part in parts:
        if not quota.left:
            break
        if isinstance(part, RowBatches):
            if pending:
                yield pending
                pending, size = [], 0
            yield from _batch_rows(part, quota)
            continue
        for origin, payload in part:
            length = payload_size(payload)
            for _ in range(quota.take()):
                if pending and (len(pending) == UNIT_ROWS or size + length > UNIT_BYTES):
                    yield pending
                    pending, size = [], 0
                pending.append((origin, payload))
                size += length
            if not quota.left:
                break
    if pending:
        yield pending


def payload_size(value: Any) -> int:
    """Bytes of a payload, about."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(payload_size, value)) + sum(map(payload_size, value.values()))
    return sum(map(payload_size, value)) if isinstance(value, list) else 8


def _batch_rows(part: RowBatches, quota: Quota) -> Iterator[BatchRows]:
    first = 0
    for batch in part.batches:
        all_rows = list(range(batch.num_rows))
        picks = [row for row in all_rows for _ in range(quota.take())]
        if picks:
            numbers = [first + row for row in picks]
            chosen = batch if picks == all_rows else batch.take(picks)
            yield from _fitting(BatchRows(part.name, numbers, chosen))
        first += len(all_rows)
        if not quota.left:
            break


def _fitting(rows: BatchRows) -> Iterator[BatchRows]:
    """The rows in halves of halves, until each piece fits a unit."""
    count = len(rows.numbers)
    if count == 1 or (count <= UNIT_ROWS and rows.batch.nbytes <= UNIT_BYTES):
        yield rows
        return
    half = count // 2
    for start, length in ((0, half), (half, count - half)):
        numbers = rows.numbers[start : start + length]
        yield from _fitting(BatchRows(rows.name, numbers, rows.batch.slice(start, length)))


__all__ = ["Source", "Sources", "Unit", "parse_source"]

# How a row of `dflashdist regenerate` begins, up to the end of its key, and what marks one cut off.
_ANSWERED, _HEAD, _MARK, _MOST = b'{"key": "', 41, b', "cut_off": true, ', "max_tokens"


class Sources:
    """What to read, resolved and checked.

    Raises InputError, naming the source and the fix, for one that is missing, of another kind,
    without any readable file, or that `datasets` cannot load.
    """

    files: list[Path]  # what was found, data sets aside

    def __init__(self, sources: Sequence[str | Path | Source]) -> None:
        if not sources:
            raise InputError("no source given: name a .jsonl file or a folder of them")
        self.sources = [_as_source(source) for source in sources]
        self._parts = [locate(source) for source in self.sources]
        self.files = [part for parts in self._parts for part in parts if isinstance(part, Path)]

    def describe(self) -> list[dict[str, Any]]:
        """What the rows are, by content: plain values, equal only where the rows are.

        A file's name, size and sha256; a data set's name, split, revision and fingerprint, which
        is None where nothing vouches for its content (streamed, and no commit to pin it). Each
        with the number of its source, and that source's cap and weight. Reads all files once.
        """
        entries = []
        for number, (source, parts) in enumerate(zip(self.sources, self._parts, strict=True)):
            rest = {"source": number, "cap": source.cap, "weight": source.weight}
            for part in parts:
                if isinstance(part, Path):
                    known = self._contents[part]
                    what = {"name": part.name, "size": known.stamp[0], "sha256": known.sha256}
                else:
                    what = {"name": source.path, "split": source.split}
                    what |= {"revision": source.revision, "fingerprint": part.fingerprint}
                entries.append(what | rest)
        return entries

    @property
    def max_rows(self) -> int | None:
        """The most rows that `units` can give; None where a stream has no cap. Reads all files."""
        total = 0
        for source, parts in zip(self.sources, self._parts, strict=True):
            if source.streaming and source.cap is None:
                return None
            rows = sum(sys.maxsize if source.streaming else self._count(part) for part in parts)
            total += Quota(source.weight, source.cap).of(rows)
        return total

    def units(self, first: int = 0) -> Iterator[Unit]:
        """All rows, at most 1,024 and 16 MB in a unit; a row that is larger makes its own.

        Units before number `first` are read and not given. Raises InputError for a damaged file,
        or one that changed since it was described.
        """
        index = 0
        for number, (source, parts) in enumerate(zip(self.sources, self._parts, strict=True)):
            quota = Quota(source.weight, source.cap)
            for content in deal((self._read(part, quota) for part in parts), quota):
                if index >= first:
                    packed = content.packed() if isinstance(content, BatchRows) else content
                    yield Unit(index, number, packed)
                index += 1

    def rows(self) -> Iterator[tuple[str, Payload]]:
        """(origin, payload) of all rows."""
        for unit in self.units():
            yield from unit.rows()

    @cached_property
    def _contents(self) -> dict[Path, "_FileContent"]:
        """Size, sha256 and rows of every file, read once."""
        files = list(dict.fromkeys(self.files))
        total = sum(_stamp(path)[0] for path in files)
        with tqdm(desc="examine", total=total, unit="B", unit_scale=True, disable=None) as bar:
            return {path: _examine(path, bar) for path in files}

    def _count(self, part: Path | Dataset) -> int:
        return self._contents[part].rows if isinstance(part, Path) else len(part.data)

    def _read(self, part: Path | Dataset, quota: Quota) -> Part:
        """What `deal` takes."""
        batch_rows = max(1, UNIT_ROWS // quota.most)
        if isinstance(part, Dataset):
            return RowBatches(part.name, part.batches(batch_rows))
        if readers.is_parquet(part):
            batches = readers.parquet_batches(part, batch_rows)
            return RowBatches(str(part), self._checked(part, batches))
        return self._checked(part, self._file_rows(part))

    def _file_rows(self, path: Path) -> Iterator[tuple[str, bytes]]:
        described = self._contents[path] if "_contents" in self.__dict__ else None
        replaced = described.replaced if described else frozenset()
        with _opened(path) as raw:
            rows = readers.json_rows(path, raw)
            yield from (row for row in rows if row[0] not in replaced)

    def _checked(self, path: Path, rows: Iterator[Any]) -> Iterator[Any]:
        """The rows. Raises InputError at their end where the file is not the one described."""
        yield from rows
        if "_contents" in self.__dict__ and _stamp(path) != self._contents[path].stamp:
            raise InputError(f"{path}: it changed while it was read; start again when it is whole")


@dataclass(frozen=True)
class _FileContent:
    stamp: tuple[int, int]  # bytes, and when it was last changed
    sha256: str
    rows: int  # without those that are
    replaced: frozenset[str]  # origins of `_Replaced`


class _Replaced:
    """Origins of rows of `dflashdist regenerate` whose last answer was cut off (regenerate/run.py),
    where a later row of the file has the same conversation, asked again with more tokens."""

    def __init__(self) -> None:
        self.origins: set[str] = set()
        self._cut_off: dict[str, str] = {}  # by conversation, model and settings, the latest origin
        self._keys: set[bytes] = set()  # of these

    def see(self, origin: str, line: bytes) -> None:
        """Look at the next row of a file."""
        key = line[:_HEAD] if line.startswith(_ANSWERED) else b""
        if not key or not (key in self._keys or _MARK in line):
            return
        try:
            row = json.loads(line)
            settings = {name: value for name, value in row["settings"].items() if name != _MOST}
            made = json.dumps([row["key"], row["model"], settings], sort_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # no row of ours; whoever parses it refuses it
        if made in self._cut_off:
            self.origins.add(self._cut_off.pop(made))
        if row.get("cut_off") is True:
            self._cut_off[made] = origin
            self._keys.add(key)


class _Hashed(io.RawIOBase):
    """A file that is hashed as it is read."""

    def __init__(self, raw: io.RawIOBase, bar: Any) -> None:
        self._raw, self._bar, self.sha256 = raw, bar, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        self.sha256.update(memoryview(buffer)[:count])
        self._bar.update(count)
        return count


def _examine(path: Path, bar: Any) -> _FileContent:
    """Read a file to its end. Raises InputError where it is damaged."""
    stamp, rows, replaced = _stamp(path), 0, _Replaced()
    with _opened(path) as raw:
        hashed = _Hashed(raw, bar)
        if readers.is_parquet(path):
            rows = readers.count_parquet(path)
        else:
            for origin, line in readers.json_rows(path, hashed):
                replaced.see(origin, line)
                rows += 1
        while hashed.read(readers.CHUNK):
            pass
    if replaced.origins:
        told = f"{len(replaced.origins):,} rows whose last answer was cut off are not read"
        print(f"dflashdist: {path}: {told}: later rows have it whole", file=sys.stderr)
    rows -= len(replaced.origins)
    return _FileContent(stamp, hashed.sha256.hexdigest(), rows, frozenset(replaced.origins))


def _opened(path: Path) -> io.RawIOBase:
    try:
        return open(path, "rb", buffering=0)  # the readers buffer
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def _as_source(source: str | Path | Source) -> Source:
    if isinstance(source, Source):
        return source
    return parse_source(source) if isinstance(source, str) else Source(str(source))
