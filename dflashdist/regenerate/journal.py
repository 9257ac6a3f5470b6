"""A JSON Lines file of answers, added to row by row, that a kill can tear only at its end.

Invariants:
- Every row begins with its key, the name of the model that answered and its settings, so that a
  file of a million answers is read back in seconds, and no two models' answers ever mix in one.
- A row is whole or absent: it is handed to the system in one go, a write that fails is taken back,
  and a line without its newline, which only a kill leaves, is cut off when the file is next opened.
- Nothing but our own rows is ever cut or added to: another file is refused.
- One process at a time: the file is locked while it is open, where its file system has locks.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.files import lock, whole_file

KEY = re.compile(rb'\{"key": "([0-9a-f]{32})", ')
START = b'{"key": "'
MARK = b'cut_off": true'
CUT_OFF = "cut_off"  # true and first in a row that a later, longer one of its key may replace


class Journal:
    """Rows by key in `path`. `offsets`: bytes before the last row of each 16-byte key, and
    `cut_off`: the keys whose last row is marked so.

    `made_with`: each settings that rows found there were made with, and the first line that was.
    """

    def __init__(self, path: Path, model: str, settings: Mapping[str, Any]) -> None:
        """Opens the file, new or from an earlier run. `settings`: of the rows to come, plain JSON.

        Raises InputError when it cannot be opened, is in use, holds other rows than a journal's or
        another model's, or is damaged before its end.
        """
        self.path, self.model, self.settings = path, model, settings
        self.offsets: dict[bytes, int] = {}
        self.cut_off: set[bytes] = set()
        self.made_with: list[tuple[int, dict[str, Any]]] = []
        self._heads: list[bytes] = []  # what may follow the key of a row that was found
        try:
            self._file: Any = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, key: bytes) -> bool:
        return key in self.offsets

    def rows(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Keys and their last rows. Raises InputError for a damaged one."""
        with self.path.open("rb") as file:
            for key, offset in sorted(self.offsets.items(), key=lambda item: item[1]):
                file.seek(offset)
                yield key, self._decoded(file.readline(), offset)

    def row(self, key: bytes) -> dict[str, Any]:
        """The last row of a key. Raises InputError for a damaged one."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[key])
            return self._decoded(file.readline(), self.offsets[key])

    def append(self, key: bytes, row: dict[str, Any]) -> None:
        """Add a row, safe from a kill when this returns. Raises InputError, the file as before."""
        entry = {"key": key.hex(), "model": self.model, "settings": self.settings} | row
        line = memoryview(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror}; mend that and run the same "
                "command again: it goes on from here"
            ) from error
        self._note(key, end, cut_off=bool(row.get(CUT_OFF)))

    def keep(self, keys: Iterable[bytes]) -> None:
        """Leave only the last rows of these keys, at once, and close; no file if there are none.

        On a full disk the file stays as it is: rows too many, which the next run drops.
        """
        offsets = sorted(self.offsets[key] for key in keys)
        with suppress(OSError):
            if not offsets:
                self.path.unlink()
            else:
                with self.path.open("rb") as old, whole_file(self.path, "wb") as new:
                    for offset in offsets:
                        old.seek(offset)
                        new.write(old.readline())
        self.close()

    def close(self) -> None:
        """Unlock the file, its rows on the disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _lock(self) -> None:
        try:
            lock(self._file)  # without locks on its file system all else still holds
        except BlockingIOError as error:
            raise InputError(
                f"{self.path}: another process is writing it; wait for its end or name another file"
            ) from error

    def _read(self) -> None:
        """Find the rows, and cut off a torn last one."""
        end, bare = 0, False  # bytes of the rows so far; whether the last one lacks its newline
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                bare = not line.endswith(b"\n")
                if bare and not _is_object(line):
                    if number == 1 and not line.startswith(START[: len(line)]):
                        raise InputError(self._foreign(number))
                    self._file.truncate(end)
                    return
                key = KEY.match(line)
                if key is None or not line.endswith((b"}", b"}\n")):
                    raise InputError(self._foreign(number))
                heads = (head for head in self._heads if line.startswith(head, key.end()))
                head = next(heads, None) or self._learn_head(line, key.end(), number)
                cut_off = line.startswith(MARK, key.end() + len(head))
                self._note(bytes.fromhex(key[1].decode()), end, cut_off)
                end += len(line)
        if bare:
            self._file.write(b"\n")

    def _note(self, key: bytes, offset: int, cut_off: bool) -> None:
        self.offsets[key] = offset
        (self.cut_off.add if cut_off else self.cut_off.discard)(key)

    def _learn_head(self, line: bytes, start: int, number: int) -> bytes:
        """Note the settings of a row, the first with these; what follows its key. Raises
        InputError."""
        try:
            row = json.loads(line)
            model, settings = row["model"], row["settings"]
        except (ValueError, KeyError) as error:
            raise InputError(self._foreign(number)) from error
        head = _head(model, settings)
        if not line.startswith(head, start) or not isinstance(settings, dict):
            raise InputError(self._foreign(number))
        if model != self.model:
            raise InputError(
                f'{self.path}:{number}: holds answers of "{model}", this run asks "{self.model}"; '
                "name another file"
            )
        self._heads.append(head)
        self.made_with.append((number, settings))
        return head

    def _decoded(self, line: bytes, offset: int) -> dict[str, Any]:
        try:
            return json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{self.path}: the line at byte {offset} is damaged ({error}); remove it"
            ) from error

    def _foreign(self, number: int) -> str:
        return (
            f"{self.path}:{number}: not a row that `dflashdist regenerate` wrote; name another "
            "file, or remove this line"
        )


def _head(model: Any, settings: Any) -> bytes:
    text = json.dumps({"model": model, "settings": settings}, ensure_ascii=False)
    return f'{text[1:-1]}, "'.encode()


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
