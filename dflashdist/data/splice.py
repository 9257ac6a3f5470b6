"""Parts to stores: which conversation goes where, and their rows one after another.

Both are decided by the parts alone, in the order of the sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dflashdist.data.audit import Tally
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Rejections
from dflashdist.data.parts import Part
from dflashdist.data.shards import TokenStoreWriter

DUPLICATE = "duplicate"
RESERVED = "also in the validation sources"
# Where a kept conversation goes.
TO_TRAINING, TO_VALIDATION, TO_DUPLICATES, TO_RESERVED = range(4)
COPIES_WARNED = 0.5  # share of the conversations
REASONS = {TO_DUPLICATES: DUPLICATE, TO_RESERVED: RESERVED}


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


@dataclass
class Book:
    """A store that is being written, and what it holds."""

    writer: TokenStoreWriter
    tally: Tally

    def finish(self, about: dict[str, Any], chat: ChatTokenizer) -> None:
        """Give the store its audit: what is known of its sources, and what was counted."""
        self.writer.audit = about | self.tally.audit(chat)
        warnings = chat.warnings() + self.tally.warnings()
        if about["duplicates"] > COPIES_WARNED * about["kept"]:
            warnings.append(f"{about['duplicates']:,} conversations are copies of earlier ones")
        self.writer.audit["warnings"] = warnings


def below(digests: np.ndarray, share: float) -> np.ndarray:
    """bool [C]: whether a digest, S16 [C] and uniform, lies in the first `share` of their range."""
    first = np.frombuffer(digests.tobytes(), dtype=">u8")[::2]
    return first < np.uint64(share * 2**64)


def decide(
    gathered: Gathered,
    deduplicate: bool,
    held_out: Gathered | None = None,
    share: float | None = None,
) -> np.ndarray:
    """int [C]: where each conversation goes.

    Args:
        deduplicate: drop copies of conversations that come before.
        held_out: the validation's own sources; what has its opening in them is not trained on.
        share: of the openings, which goes to the validation store.
    """
    goes = np.full(len(gathered.copies), TO_TRAINING)
    if share:
        goes[below(gathered.digests("opening"), share)] = TO_VALIDATION
    if deduplicate:
        goes[gathered.copies] = TO_DUPLICATES
    if held_out:
        goes[np.isin(gathered.digests("opening"), held_out.digests("opening"))] = TO_RESERVED
    return goes


def splice(gathered: Gathered, goes: np.ndarray, books: Mapping[int, Book]) -> None:
    """Write the rows of the conversations that go to each book, part by part; int `goes` [C].

    The others are added to the rejections of `gathered`.
    """
    at = 0
    for path in gathered.paths:
        part = Part.load(path)
        here = goes[at : at + len(part.conversations)]
        at += len(here)
        for destination, book in books.items():
            chosen = here == destination
            rows = np.repeat(chosen, part.conversations["rows"])
            tokens = np.repeat(rows, part.rows["length"])
            ids, mask = part.ids[tokens], part.loss_mask[tokens]
            book.writer.extend(ids, mask, part.rows["length"][rows])
            book.tally.add(part, chosen, rows)
            book.tally.count_tokens(ids, mask)
        for i, destination in enumerate(here):
            if destination in REASONS:
                gathered.rejections.add(REASONS[destination], part.origins[i])
