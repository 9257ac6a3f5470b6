"""The token store: token ids and loss masks in flat mapped files, complete or absent.

    ids.bin         int32, all rows one after another
    loss_mask.bin   uint8, likewise
    lengths.npy     int32 [N], tokens a row
    supervised.npy  int32 [N], supervised tokens a row
    meta.json       version, fingerprint, settings, audit; written last

A store is written in a folder beside its place, synced to disk and renamed. A killed writer leaves
only that folder, without meta.json, which does not open.
"""

import hashlib
import json
import os
import shutil
from array import array
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from dflashdist.config import InputError

VERSION = 1
IDS, MASK, LENGTHS, SUPERVISED, META = (
    "ids.bin",
    "loss_mask.bin",
    "lengths.npy",
    "supervised.npy",
    "meta.json",
)


class TokenStore:
    """A store opened for reading. Rows are views of the mapped files."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.fingerprint: str = meta["fingerprint"]
        self.lengths: np.ndarray = np.load(path / LENGTHS)  # int32 [N]
        self.supervised: np.ndarray = np.load(path / SUPERVISED)  # int32 [N]
        self.num_rows = len(self.lengths)
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self._ids = np.memmap(path / IDS, dtype=np.int32, mode="r")
        self._mask = np.memmap(path / MASK, dtype=np.uint8, mode="r")

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """The store at `path`.

        Raises InputError when it is missing, incomplete or of another version.
        """
        path = Path(path)
        again = "make it with `dflashdist prepare`"
        if not path.is_dir():
            raise InputError(f"{path}: no token store here; {again}")
        try:
            meta = json.loads((path / META).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not a complete token store (no {META}); {again}") from error
        if meta.get("version") != VERSION:
            found = meta.get("version")
            raise InputError(
                f"{path}: store version {found}, this is version {VERSION}; {again} anew"
            )
        sizes = {IDS: 4 * meta["num_tokens"], MASK: meta["num_tokens"]}
        for name, size in sizes.items():
            file = path / name
            if not file.is_file() or file.stat().st_size != size:
                raise InputError(f"{file}: missing or not of {size} bytes; {again} anew")
        store = cls(path, meta)
        if not store.num_rows == meta["num_rows"] == len(store.supervised):
            raise InputError(f"{path}: its files disagree on the number of rows; {again} anew")
        return store

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Row i: ids int32 [len] and loss mask uint8 [len]."""
        start, end = self._offsets[i], self._offsets[i + 1]
        return self._ids[start:end], self._mask[start:end]


class TokenStoreWriter:
    """Writes a store; use as a context manager. An exception leaves nothing, also not a part.

    `settings` (what decided the rows' content) enters the fingerprint, `audit` only meta.json.
    Raises InputError when `path` exists, unless `overwrite`: then the old store stays until the
    new one is complete.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], overwrite: bool = False) -> None:
        self.path = Path(path)
        self.audit: dict[str, Any] = {}
        self._settings = settings
        if self.path.exists():
            if not overwrite:
                raise InputError(f"{self.path}: exists already; pass --overwrite or another --out")
            if any(self.path.iterdir()) and not (self.path / META).is_file():
                raise InputError(
                    f"{self.path}: not a token store, so not overwritten; give another --out"
                )
        self._partial = self.path.with_name(f".{self.path.name}.partial")

    def __enter__(self) -> "TokenStoreWriter":
        shutil.rmtree(self._partial, ignore_errors=True)  # of a writer that was killed
        self._partial.mkdir(parents=True)
        self._ids: IO[bytes] = open(self._partial / IDS, "wb")
        self._mask: IO[bytes] = open(self._partial / MASK, "wb")
        self._ids_hash, self._mask_hash = hashlib.sha256(), hashlib.sha256()
        self._lengths, self._supervised = array("i"), array("i")
        return self

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return len(self._lengths)

    def add(self, ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Append a row: ids [len] (any integers below 2^31), loss_mask [len] of 0 and 1."""
        assert len(ids) == len(loss_mask) > 0
        for values, dtype, file, digest in (
            (ids, "<i4", self._ids, self._ids_hash),
            (loss_mask, "u1", self._mask, self._mask_hash),
        ):
            data = np.ascontiguousarray(values, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
        self._lengths.append(len(ids))
        self._supervised.append(int(np.count_nonzero(loss_mask)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in (self._ids, self._mask):
            _sync(file)
            file.close()
        if kind is not None:
            shutil.rmtree(self._partial)
            return
        lengths = np.array(self._lengths, dtype=np.int32)
        for name, values in (
            (LENGTHS, lengths),
            (SUPERVISED, np.array(self._supervised, np.int32)),
        ):
            with open(self._partial / name, "wb") as file:
                np.save(file, values)
                _sync(file)
        meta = {
            "version": VERSION,
            "fingerprint": self._fingerprint(lengths),
            "num_rows": len(lengths),
            "num_tokens": int(lengths.sum(dtype=np.int64)),
            **self._settings,
            "audit": self.audit,
        }
        with open(self._partial / META, "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            _sync(file)
        sync(self._partial)
        self._put_in_place()

    def _fingerprint(self, lengths: np.ndarray) -> str:
        """Hex, of every id, mask and length, and of the settings."""
        settings = json.dumps(self._settings, sort_keys=True).encode()
        parts = (self._ids_hash.digest(), self._mask_hash.digest(), lengths.astype("<i4").tobytes())
        return hashlib.sha256(b"".join(parts) + settings).hexdigest()[:32]

    def _put_in_place(self) -> None:
        old = self.path.with_name(f".{self.path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.path.exists():
            os.rename(self.path, old)
        os.rename(self._partial, self.path)
        sync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
