"""Conversations as JSON Lines, OpenAI-style `{"messages": [...]}`, bad rows counted by reason.

Nothing is repaired: a row is read whole or rejected with a reason, and a row rejected later
(chat.py, prepare.py) is counted in the same place, so that rows read = kept + rejected.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflashdist.config import InputError

ROLES = ("system", "user", "assistant")
SUFFIXES = (".jsonl", ".jsonl.gz")

NOT_JSON = "not JSON"
NO_MESSAGES = "no messages"
UNKNOWN_ROLE = "unknown role"
NO_ANSWER = "no assistant turn"
EMPTY_ANSWER = "empty answer"
NOT_TEXT = "content is not a string"

Message = dict[str, str]


class RowError(ValueError):
    """A row that cannot be used; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`, the last one an answer, and where they come from."""

    origin: str  # file:line
    messages: list[Message]


@dataclass
class Rejections:
    """Rejected rows by reason, with the origins of the first few of each."""

    shown: int = 3
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, origin: str) -> None:
        """Count one row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        first = self.examples.setdefault(reason, [])
        if len(first) < self.shown:
            first.append(origin)

    @property
    def total(self) -> int:
        """Rows rejected so far."""
        return sum(self.counts.values())


def find_files(sources: Iterable[str | Path]) -> list[Path]:
    """The files that sources name; a folder stands for the JSON Lines files in it, sorted.

    Raises InputError for a missing source, a file of another kind, or a folder without any.
    """
    files: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(path for path in source.iterdir() if path.name.endswith(SUFFIXES))
            if not inside:
                raise InputError(f"{source}: no .jsonl or .jsonl.gz file in this folder")
            files += inside
        elif not source.is_file():
            raise InputError(f"{source}: no such file or folder")
        elif not source.name.endswith(SUFFIXES):
            raise InputError(f"{source}: conversations are read from .jsonl or .jsonl.gz files")
        else:
            files.append(source)
    if not files:
        raise InputError("no source given: name a .jsonl file or a folder of them")
    return files


def read_rows(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """(origin, line) of every line that is not blank; origin is `file:line`.

    Raises InputError for a file that is not UTF-8 text or a damaged archive.
    """
    for path in files:
        number = 0
        try:
            with open_text(path) as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{path}:{number}", line
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise InputError(f"{path}:{number + 1}: cannot be read: {error}") from error


def open_text(path: Path, mode: str = "rt") -> Any:
    """A text stream of a plain or gzipped file."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return opener(path, mode, encoding="utf-8")


def read_conversations(files: Iterable[Path], rejections: Rejections) -> Iterator[Conversation]:
    """Usable conversations, line by line; the others are added to `rejections`.

    What follows the last answer is left out: a causal target's states of it train nothing.
    """
    for origin, line in read_rows(files):
        try:
            yield Conversation(origin, parse_conversation(line))
        except RowError as error:
            rejections.add(str(error), origin)


def parse_conversation(line: str) -> list[Message]:
    """The messages of one line, up to the last answer. Raises RowError with the reason."""
    messages = parse_messages(line)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowError(NO_ANSWER)
    if not all(messages[i]["content"].strip() for i in answers):
        raise RowError(EMPTY_ANSWER)
    return messages[: answers[-1] + 1]


def parse_messages(line: str) -> list[Message]:
    """The messages of one line, role and content only, with or without an answer.

    Raises RowError with the reason.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError(NOT_JSON) from error
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise RowError(NO_MESSAGES)
    return [_message(message) for message in messages]


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RowError(UNKNOWN_ROLE)
    if not isinstance(message.get("content"), str):
        raise RowError(NOT_TEXT)
    return {"role": message["role"], "content": message["content"]}
