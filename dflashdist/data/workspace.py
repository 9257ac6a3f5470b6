"""Where a store is made, and whether the one that is there is the one asked for, by its key.

OUT                     the store: complete, or absent
.OUT.partial/key.json   what is being prepared, and the notes of the store
.OUT.partial/lock       held as long as a prepare works here
.OUT.partial/<hex>/     parts, in a folder named after all that decides them
.OUT.partial/store      the store, until it is renamed to OUT

Nothing is removed but what stands here, and other parts only once OUT is complete: they may be
hours of work, which a mistyped command must not cost.

The key holds all that decides a store's content: the sources' content, the target's tokenizer,
template and settings, the data settings that matter, the number of the rules that this package
makes rows by (FORMAT) and the libraries that make texts and ids. It holds what the target and a
template's file say, not their names, and is plain JSON, so that a difference can be named.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflashdist.config import DataConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.shards import (
    META,
    VALIDATION,
    VERSION,
    TokenStore,
    read_meta,
    refuse_foreign_folder,
)
from dflashdist.files import PARTIAL, beside, hold, put_in_place, restore, whole_file

Key = dict[str, Any]
# Raised by hand whenever a source row comes to give other ids, masks or openings, or parts on disk
# are laid out otherwise; tests/data/test_format.py fails where it was forgotten.
FORMAT = 4

Described = list[dict[str, Any]]  # by Sources.describe

# Of the whole store, not of its parts: these are decided when all parts are there.
LATE = ("validation", "deduplicate")
LIBRARIES = ("tokenizers", "jinja2")  # whose behaviour decides ids and texts
NAMES = {
    "rows": "the format of rows, which dflashdist has changed",
    "libraries": "the version of tokenizers or jinja2",
    "sources": "the sources",
    "chat": "the target's tokenizer or chat template",
    "rendering": "the chat template or its settings",
    "validation": "data.validation",
    "verify": "--verify",
}


def store_key(
    sources: Described, validation: Described | float | None, chat: ChatTokenizer,
    data: DataConfig, verify_all: bool,
) -> Key:  # fmt: skip
    """The key of a store; `validation` is a share, or sources of their own."""
    return _plain(
        {
            "version": VERSION,
            "rows": FORMAT,
            "libraries": {name: version(name) for name in LIBRARIES},
            "sources": sources,
            "chat": chat.fingerprint,
            "rendering": decisive(chat),
            "format": data.format,
            "fields": dict(data.fields),
            "turns": data.turns,
            "max_length": data.max_length,
            "min_supervised": data.min_supervised,
            "verify": "all" if verify_all else "a sample",
            "validation": validation,
            "deduplicate": data.deduplicate,
        }
    )


def decisive(chat: ChatTokenizer) -> dict[str, Any]:
    """What of the rendering decides a text: all but where the template came from."""
    return {name: value for name, value in chat.rendering.items() if name != "template"}


def parts_key(key: Key, sources: Described) -> str:
    """Hex, of what decides the parts of `sources`, which are the key's own or its validation's."""
    early = {name: value for name, value in key.items() if name not in LATE}
    text = json.dumps(early | {"sources": sources}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def repeatable(sources: Described) -> bool:
    """Whether the described sources are sure to give the same rows again."""
    return all(source.get("fingerprint", "") is not None for source in sources)


def differences(old: Key, new: Key) -> list[str]:
    """What two keys differ in, in words; empty when a store of key `old` is what `new` asks for."""
    if old.get("version") != new["version"]:
        return ["the store's version"]
    found = []
    for name, value in new.items():
        before = old.get(name)
        if before == value or (name == "verify" and before == "all"):
            continue
        if name in NAMES:
            found.append(NAMES[name])
        else:
            found.append(f"data.{name} ({before} then, {value} now)")
    validation = new["validation"] if isinstance(new["validation"], list) else []
    if not repeatable(new["sources"] + validation):
        found.append("a streamed source without a pinned revision, which may have changed")
    return found


def _plain(key: Key) -> Key:
    """As it comes back from JSON: tuples are lists, keys are strings."""
    return json.loads(json.dumps(key))


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
