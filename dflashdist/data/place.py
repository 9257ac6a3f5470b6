"""Where a store is made: its place, the folder beside it, the key that both are of, and the lock.

OUT                     the store: complete, or absent
.OUT.partial/key.json   what is being prepared, and the notes of the store
.OUT.partial/lock       held as long as a prepare works here
.OUT.partial/<hex>/     parts, in a folder named after all that decides them
.OUT.partial/store      the store, until it is renamed to OUT
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.data.keys import Key, differences
from dflashdist.data.shards import (
    META,
    TokenStore,
    put_in_place,
    read_meta,
    refuse_foreign_folder,
)

KEY, LOCK, STORE = "key.json", "lock", "store"


class StorePlace:
    """The place `out` and the folder beside it."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        if self.out.name in ("", ".."):
            raise InputError(f"{out}: name a folder to make, for example {self.out / 'store'}")
        self.partial = self.out.with_name(f".{self.out.name}.partial")
        self.store = self.partial / STORE

    def recorded_date(self) -> str | None:
        """The day that was today when the store here, or the started one, was asked for; None if
        its templates write no date, or one that data.date gave.
        """
        for file in (self.out / META, self.partial / KEY):
            try:
                recorded = json.loads(file.read_text(encoding="utf-8"))
                if not recorded["date_given"]:
                    return recorded["rendering"]["date"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # absent, not a store, or torn: decided where it is used
        return None

    def holds(self, key: Key, overwrite: bool) -> bool:
        """Whether the store here is the one that `key` asks for.

        Raises InputError when it is another one or damaged, unless `overwrite`, and always when
        something else than a store is here.
        """
        if not os.path.exists(self.out):  # also where it cannot be: said when it is made
            return False
        refuse_foreign_folder(self.out)
        if not any(self.out.iterdir()):
            return False
        try:
            changed = differences(read_meta(self.out).get("key") or {}, key)
            if not changed:
                TokenStore.open(self.out)
        except InputError as error:
            if not overwrite:
                raise InputError(f"{error}; pass --overwrite to replace it") from error
            return False
        if changed and not overwrite:
            raise InputError(
                f"{self.out}: holds a store that differs in {', '.join(changed)}; pass --overwrite "
                "to replace it, or another --out"
            )
        return not changed

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Work in the folder beside the place, alone. Raises InputError when another one does."""
        handle = self._lock()
        try:
            yield
        finally:
            os.close(handle)

    def _lock(self) -> int:
        path = self.partial / LOCK
        while True:
            self.partial.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # the one before has just cleared the folder
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(handle)
                raise InputError(
                    f"{self.out}: another prepare is writing it; wait for it, or give another --out"
                ) from error
            except OSError as error:  # a file system without locks
                print(f"dflashdist prepare: warning: {path}: no lock: {error}", file=sys.stderr)
                return handle
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
            os.close(handle)  # the lock of a folder that is gone

    def begin(self, key: Key, notes: dict[str, Any], parts: Sequence[Path]) -> None:
        """Leave nothing beside the place but these folders of parts, which are gone on with.

        `notes` are those of the store, which no part depends on.
        """
        for entry in self.partial.iterdir():
            if entry.is_dir() and entry not in parts:
                shutil.rmtree(entry)
        torn = self.partial / f"{KEY}.torn"
        torn.write_text(json.dumps(notes | key), encoding="utf-8")
        os.rename(torn, self.partial / KEY)

    def finish(self) -> None:
        """Rename the complete store to its place and clear the folder beside it."""
        put_in_place(self.store, self.out)
        self.clear()

    def clear(self) -> None:
        """Remove the folder beside the place; only under the lock."""
        shutil.rmtree(self.partial, ignore_errors=True)
