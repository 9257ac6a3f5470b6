"""Rows dealt out in units of work, which depend on the sources alone.

So whatever is made of the units, in their order, does not depend on who works on which.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dflashdist.data import readers

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
