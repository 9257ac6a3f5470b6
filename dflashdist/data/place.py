"""Where a store is made: its place, the folder beside it, the key that both are of, and the lock.

OUT                     the store: complete, or absent
.OUT.partial/key.json   what is being prepared, and the notes of the store
.OUT.partial/lock       held as long as a prepare works here
.OUT.partial/<hex>/     parts, in a folder named after all that decides them
.OUT.partial/store      the store, until it is renamed to OUT

Nothing is removed but what stands here, and other parts only once OUT is complete: they may be
hours of work, which a mistyped command must not cost.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.data.keys import Key, differences
from dflashdist.data.shards import META, VALIDATION, TokenStore, read_meta, refuse_foreign_folder
from dflashdist.files import PARTIAL, beside, hold, put_in_place, restore, whole_file

KEY, LOCK, STORE = "key.json", "lock", "store"
PARTS = re.compile("[0-9a-f]{16}")


class StorePlace:
    """The place `out` and the folder beside it."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out).resolve() if os.path.islink(out) else Path(out)
        if self.out.name in ("", ".."):
            raise InputError(f"{out}: name a folder to make, for example {self.out / 'store'}")
        self.partial = beside(self.out, PARTIAL)
        self.store = self.partial / STORE
        restore(self.out)

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
        if not (self.out / META).is_file():
            refuse_foreign_folder(self.out)
            return False
        try:
            changed = differences(read_meta(self.out).get("key") or {}, key)
            if not changed:
                TokenStore.open(self.out)
        except InputError as error:
            if not overwrite:
                raise InputError(f"{error}; pass --overwrite to replace it") from error
            changed = ["damaged"]
        if changed and not overwrite:
            raise InputError(
                f"{self.out}: holds a store that differs in {', '.join(changed)}; pass --overwrite "
                "to replace it, or another --out"
            )
        if changed:
            refuse_foreign_folder(self.out)
        return not changed

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Work in the folder beside the place, alone. Raises InputError when another one does."""
        if self.partial.exists():
            self._refuse_foreign_parts()
        doing = "is writing it; wait for it, or give another --out"
        with hold(self.partial / LOCK, str(self.out), doing):
            yield

    def _refuse_foreign_parts(self) -> None:
        """Raise InputError where the folder beside the place holds what no prepare writes."""
        known = {KEY, LOCK, STORE, VALIDATION}
        known |= {beside(self.partial / name, PARTIAL).name for name in known}
        for entry in self.partial.iterdir():
            if entry.name not in known and not (entry.is_dir() and PARTS.fullmatch(entry.name)):
                raise InputError(
                    f"{entry}: not of a prepare, which would work in this folder and remove it; "
                    "move it elsewhere, or give another --out"
                )

    def begin(self, key: Key, notes: dict[str, Any], stale: Sequence[Path]) -> None:
        """Remove these folders of parts, which nobody can vouch for, and say what is prepared.

        `notes` are those of the store, which no part depends on.
        """
        self._remove(*stale)
        with whole_file(self.partial / KEY) as file:
            json.dump(notes | key, file)

    def finish(self) -> None:
        """Rename the complete store to its place and remove the folder beside it."""
        if self.out.exists():
            refuse_foreign_folder(self.out)  # once more: it may be hours since
        put_in_place(self.store, self.out)
        shutil.rmtree(self.partial, ignore_errors=True)

    def clear(self, parts: Sequence[Path]) -> None:
        """Remove what is not complete and these folders of parts; only under the lock."""
        torn = [self.partial / name for name in (STORE, VALIDATION)]
        self._remove(*parts, *torn, *(beside(path, PARTIAL) for path in torn))
        if not any(entry.is_dir() for entry in self.partial.iterdir()):  # no parts of others
            shutil.rmtree(self.partial, ignore_errors=True)

    def _remove(self, *folders: Path) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
