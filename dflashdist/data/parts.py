"""Units of the sources to parts on disk, by worker processes: parsed, rendered, masked, cut.

A part holds what one unit gave: its training rows, one entry a kept conversation (what duplicates
and the validation split are decided by), and the counts of what was rejected.

Invariants:
- A part is a function of its unit and the job alone: not of the worker, nor of what else is done.
- A part's file appears complete, by a rename. What is there is not made again; the folder's name
  must therefore change with whatever decides a part's content.
- At most workers + 2 units are in memory; parts are handed on in the order of the units.
- A worker whose parent dies ends, and a terminal's Ctrl-C is the parent's to handle.
"""

import json
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, count, islice, pairwise
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from dflashdist.config import DataConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import (
    Conversation,
    PlainText,
    Rejections,
    Row,
    RowError,
    parse_row,
)
from dflashdist.data.sources import Sources, Unit
from dflashdist.data.turns import TrainingRow
from dflashdist.files import whole_file

NOT_ADJACENT = "no two adjacent supervised tokens"
REFRAMED = "<think> block spaced as the template does"
BEYOND = "answers begin beyond data.max_length"
CHECKED = 8  # training rows a unit whose mask is verified by decoding
KINDS = ("chat", "text", "tokens")

Remark = tuple[int, str, str]  # conversation's number in the part, what or why, origin


@dataclass(frozen=True)
class PrepareJob:
    """What decides the parts beside the units; sent to every worker once."""

    folder: Path  # where the parts go
    target: str
    revision: str | None
    date: str | None  # for templates that write the date
    chat_fingerprint: str  # that every worker must find
    data: DataConfig
    verify_all: bool = False

    def load_chat(self) -> ChatTokenizer:
        """The target's chat format. Raises InputError when it is not the one of the job."""
        chat = ChatTokenizer.load(
            self.target,
            self.revision,
            template=self.data.template,
            settings=self.data.template_settings,
            date=self.date,
        )
        if chat.fingerprint != self.chat_fingerprint:
            raise InputError(f"{self.target}: changed while it was used; run the command again")
        return chat


@dataclass
class Part:
    """What one unit gave. C kept conversations, R training rows, T tokens."""

    source: int = 0  # the unit's
    source_rows: int = 0
    rejections: Rejections = field(default_factory=Rejections)
    origins: list[str] = field(default_factory=list)  # [C]
    left_out: list[Remark] = field(default_factory=list)  # training rows of kept conversations
    remarks: list[Remark] = field(default_factory=list)  # on kept conversations
    checked_rows: int = 0
    checked_tokens: int = 0
    conversations: np.ndarray = field(default_factory=lambda: np.zeros(0, CONVERSATION))  # [C]
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, ROW))  # [R]
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [T]
    loss_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))  # uint8 [T]

    def save(self, path: Path) -> None:
        """Write the part to `path`, which appears complete or not at all."""
        ledger = {
            "source": self.source,
            "source_rows": self.source_rows,
            "counts": self.rejections.counts,
            "examples": self.rejections.examples,
            "origins": self.origins,
            "left_out": self.left_out,
            "remarks": self.remarks,
            "checked": [self.checked_rows, self.checked_tokens],
        }
        arrays = {
            "ledger": np.frombuffer(json.dumps(ledger).encode(), np.uint8),
            "conversations": self.conversations,
            "rows": self.rows,
            "ids": self.ids,
            "loss_mask": self.loss_mask,
        }
        with whole_file(path, "wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path, tokens: bool = True) -> "Part":
        """The part at `path`; without `tokens` its ids and loss masks stay on disk."""
        with np.load(path) as arrays:
            ledger = json.loads(arrays["ledger"].tobytes())
            part = cls(
                source=ledger["source"],
                source_rows=ledger["source_rows"],
                rejections=Rejections(counts=ledger["counts"], examples=ledger["examples"]),
                origins=ledger["origins"],
                left_out=[tuple(entry) for entry in ledger["left_out"]],
                remarks=[tuple(entry) for entry in ledger["remarks"]],
                checked_rows=ledger["checked"][0],
                checked_tokens=ledger["checked"][1],
                conversations=arrays["conversations"],
                rows=arrays["rows"],
            )
            if tokens:
                part.ids, part.loss_mask = arrays["ids"], arrays["loss_mask"]
        return part


# One entry a kept conversation.
CONVERSATION = np.dtype(
    [
        ("key", "u1", 16),  # of its content
        ("opening", "u1", 16),  # of what precedes its first answer
        ("kind", "u1"),  # index in KINDS
        ("rows", "i4"),  # training rows written
        ("answers", "i4"),
        ("unsupervised", "i4"),  # answers of them that no written row supervises
    ]
)
# One entry a training row.
ROW = np.dtype([("length", "i4"), ("supervised", "i4"), ("lost", "i4")])  # tokens; lost: cut off


@dataclass
class Gathered:
    """All parts of one set of sources. C conversations are kept so far, 46 bytes each."""

    paths: list[Path] = field(default_factory=list)
    source_rows: int = 0
    rejections: Rejections = field(default_factory=Rejections)
    checked_rows: int = 0
    checked_tokens: int = 0
    conversations: list[np.ndarray] = field(default_factory=list)  # CONVERSATION [C of a part]
    repeats: list[np.ndarray] = field(default_factory=list)  # bool [C of a part]: the row before
    _last: tuple[int, str] = (-1, "")  # the last kept row: its source's number, its origin

    def add(self, path: Path) -> Part:
        """Count the next part; returns it without its tokens."""
        part = Part.load(path, tokens=False)
        self.paths.append(path)
        self.source_rows += part.source_rows
        self.rejections.merge(part.rejections)
        self.checked_rows += part.checked_rows
        self.checked_tokens += part.checked_tokens
        self.conversations.append(part.conversations)
        rows = [self._last, *((part.source, origin) for origin in part.origins)]
        self.repeats.append(np.array([a == b for a, b in pairwise(rows)], dtype=bool))
        self._last = rows[-1]
        return part

    def digests(self, name: str) -> np.ndarray:
        """The `key` or `opening` of every conversation: S16 [C], in which numpy can look up."""
        columns = [np.zeros((0, 16), np.uint8), *(part[name] for part in self.conversations)]
        return np.concatenate(columns).view("S16").ravel()

    @cached_property
    def copies(self) -> np.ndarray:
        """bool [C]: whether another row before is the same conversation; once all parts are here.

        A row that a weight above 1 repeats is no copy of itself: it is one row, read again.
        """
        row = np.cumsum(~np.concatenate([np.zeros(0, dtype=bool), *self.repeats]))
        _, first, same = np.unique(self.digests("key"), return_index=True, return_inverse=True)
        return row != row[first[same]]


def part_path(folder: Path, index: int) -> Path:
    """The file of the part of unit `index`."""
    return folder / f"{index:06d}.npz"


def make_parts(
    sources: Sources, job: PrepareJob, chat: ChatTokenizer, workers: int
) -> Generator[Path]:
    """Make the parts that are not there yet; yields the path of every part in order.

    One worker, or a single unit, is done in this process.
    Raises InputError for what the sources or the check of a mask raise, and BrokenProcessPool when
    a worker was killed.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    first = next(i for i in count() if not part_path(job.folder, i).exists())
    yield from (part_path(job.folder, i) for i in range(first))
    units = iter(sources.units(first))
    ahead = list(islice(units, 2))
    units = chain(ahead, units)
    if workers == 1 or len(ahead) < 2:
        maker = PartMaker(job, chat)
        yield from map(maker.make, units)
        return
    with _pool(job, workers) as pool:
        pending: deque[Future[Path]] = deque()
        try:
            for unit in units:
                pending.append(pool.submit(_make, unit))
                if len(pending) == workers + 2:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class PartMaker:
    """Makes parts, one after another."""

    def __init__(self, job: PrepareJob, chat: ChatTokenizer) -> None:
        self._job, self._chat = job, chat
        self._least = job.data.min_supervised

    def make(self, unit: Unit) -> Path:
        """Make and write the part of a unit, unless it is there; returns its path."""
        path = part_path(self._job.folder, unit.index)
        if not path.exists():
            self.part(unit).save(path)
        return path

    def part(self, unit: Unit) -> Part:
        """The part of a unit. Raises InputError when a mask does not decode to its answers."""
        data, part = self._job.data, Part(source=unit.source)
        conversations: list[tuple[Any, ...]] = []
        rows: list[tuple[int, int, int]] = []
        ids: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        whole: list[tuple[TrainingRow, Row]] = []  # kept rows before the cut, for the check
        for origin, payload in unit.rows():
            part.source_rows += 1
            try:
                row = parse_row(origin, payload, data.format, data.fields)
                turns = self._chat.training_rows(row, data.turns)
                kept, reasons = self._cut(turns.rows)
            except RowError as error:
                part.rejections.add(error, origin)
                continue
            for made, length in kept:
                mask = made.loss_mask[:length]
                rows.append((length, int(mask.sum()), len(made.ids) - length))
                ids.append(made.ids[:length])
                masks.append(mask)
                whole.append((made, row))
            remarks = row.remarks if isinstance(row, Conversation) else ()
            remarks += (REFRAMED,) if turns.reframed else ()
            part.remarks += [(len(part.origins), remark, origin) for remark in remarks]
            part.left_out += [(len(part.origins), reason, origin) for reason in reasons]
            part.origins.append(origin)
            kind = KINDS.index(_kind(row))
            supervised = sum(supervised_answers(made, length) for made, length in kept)
            conversations.append(
                (
                    np.frombuffer(row.key, np.uint8), np.frombuffer(row.opening, np.uint8),
                    kind, len(kept), turns.answers, max(0, turns.answers - supervised),
                )
            )  # fmt: skip
        part.conversations = np.array(conversations, dtype=CONVERSATION)
        part.rows = np.array(rows, dtype=ROW)
        if rows:
            part.ids = np.concatenate(ids, dtype=np.int32)
            part.loss_mask = np.concatenate(masks, dtype=np.uint8)
        self._check(part, whole, unit.index)
        return part

    def _cut(self, rows: list[TrainingRow]) -> tuple[list[tuple[TrainingRow, int]], list[str]]:
        """The usable rows with the length each keeps, and why the others are not.

        Raises RowError with the last reason when none is usable.
        """
        kept, reasons = [], []
        for row in rows:
            length = cut_length(row.loss_mask, self._job.data.max_length)
            reason = unusable(row.loss_mask, length, self._least)
            if reason:
                reasons.append(reason)
            else:
                kept.append((row, length))
        if not kept:
            raise RowError(reasons[-1])
        return kept, reasons

    def _check(self, part: Part, whole: list[tuple[TrainingRow, Row]], seed: int) -> None:
        """Verify masks by decoding: a random sample that depends on the unit alone, or all."""
        if not self._job.verify_all and len(whole) > CHECKED:
            whole = random.Random(seed).sample(whole, CHECKED)
        for row, source in whole:
            self._chat.check(row, source)
            part.checked_rows += 1
            part.checked_tokens += int(row.loss_mask.sum())


def cut_length(loss_mask: np.ndarray, max_length: int) -> int:
    """Tokens that a row of this mask, uint8 [len], keeps: all, or those up to the last supervised
    one within `max_length`.
    """
    if len(loss_mask) <= max_length:
        return len(loss_mask)
    supervised = np.flatnonzero(loss_mask[:max_length])
    return int(supervised[-1]) + 1 if len(supervised) else 0


def supervised_answers(row: TrainingRow, length: int) -> int:
    """How many of a row's answers are supervised, at least in part, when it is cut to `length`."""
    if length == len(row.ids):
        return len(row.answers)
    return int(np.count_nonzero(np.diff(row.loss_mask[:length], prepend=np.uint8(0)) == 1))


def unusable(loss_mask: np.ndarray, length: int, least: int) -> str | None:
    """Why a row of this mask, cut to `length`, cannot be trained on, or None.

    A block of a drafter is an anchor and what follows it: two adjacent supervised tokens.
    """
    kept = loss_mask[:length]
    if kept.sum() < least:
        return BEYOND if loss_mask.sum() >= least else f"fewer than {least} supervised tokens"
    return None if (kept[1:] & kept[:-1]).any() else NOT_ADJACENT


def _kind(row: Row) -> str:
    if isinstance(row, Conversation):
        return "chat"
    return "text" if isinstance(row, PlainText) else "tokens"


# In a worker process.

_jobs: list[PrepareJob] = []  # the one that the worker was started for


def _pool(job: PrepareJob, workers: int) -> ProcessPoolExecutor:
    """Workers that are started as they are needed. Spawned: a fork would copy locks of the
    tokenizer's threads.
    """
    context = get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(job,))


def _begin_worker(job: PrepareJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a worker already
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _jobs.append(job)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@cache
def _maker() -> PartMaker:
    return PartMaker(_jobs[0], _jobs[0].load_chat())


def _make(unit: Unit) -> Path:
    return _maker().make(unit)
