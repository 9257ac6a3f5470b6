"""The token store, token ids and loss masks in mapped shard files; its rows as padded batches.

    ids-00000.bin        int32, the rows of shard 0 one after another
    loss_mask-00000.bin  uint8, likewise
    ...                  a shard ends with the row or batch that fills it (SHARD_TOKENS)
    lengths.npy          int32 [N], tokens a row, over all shards
    supervised.npy       int32 [N], supervised tokens a row
    meta.json            version, fingerprint, shards, settings, notes, key, audit; written last

It is complete or absent: written in a folder beside its place, synced to disk and renamed. A killed
writer leaves only that folder, without meta.json, which does not open. The fingerprint is of every
id, mask and length and of the settings: not of how the rows are split into shards, of the place, or
of the notes, which say where things came from.
"""

import hashlib
import json
import re
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from dflashdist.config import InputError
from dflashdist.files import new_folder, put_in_place

if TYPE_CHECKING:  # whoever only plans loads no torch
    from torch import Tensor

VERSION = 2
SHARD_TOKENS = 1 << 28  # 1.25 GiB a shard: few files to hold open, and none too large to copy
LENGTHS, SUPERVISED, META = "lengths.npy", "supervised.npy", "meta.json"
AUDIT_JSON, AUDIT_TEXT = "audit.json", "audit.md"
VALIDATION = "validation"  # the validation store's folder inside the store's
FILES = re.compile(
    rf"(ids|loss_mask)-\d+\.bin|{LENGTHS}|{SUPERVISED}|{META}|{AUDIT_JSON}|{AUDIT_TEXT}"
)


def shard_names(i: int) -> tuple[str, str]:
    """The files of shard i: its ids, its loss masks."""
    return f"ids-{i:05d}.bin", f"loss_mask-{i:05d}.bin"


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
        rows = [shard["rows"] for shard in meta["shards"]]
        self._first_rows: list[int] = [sum(rows[:i]) for i in range(len(rows))]
        names = [shard_names(i) for i in range(len(rows))]
        self._ids = [np.memmap(path / ids, dtype=np.int32, mode="r") for ids, _ in names]
        self._masks = [np.memmap(path / mask, dtype=np.uint8, mode="r") for _, mask in names]

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """The store at `path`.

        Raises InputError when it is missing, incomplete, damaged or of another version.
        """
        path = Path(path)
        meta = read_meta(path)
        again = "make it with `dflashdist prepare` anew"
        if meta.get("version") != VERSION:
            found = meta.get("version")
            raise InputError(f"{path}: store version {found}, this is version {VERSION}; {again}")
        try:
            for i, shard in enumerate(meta["shards"]):
                for name, bytes_a_token in zip(shard_names(i), (4, 1), strict=True):
                    file, size = path / name, bytes_a_token * shard["tokens"]
                    if not file.is_file() or file.stat().st_size != size:
                        raise InputError(f"{file}: missing or not of {size} bytes; {again}")
            store = cls(path, meta)
            rows = {store.num_rows, len(store.supervised), meta["num_rows"]}
            rows.add(sum(shard["rows"] for shard in meta["shards"]))
            tokens = {int(store._offsets[-1]), meta["num_tokens"]}
            tokens.add(sum(shard["tokens"] for shard in meta["shards"]))
        except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: damaged ({error}); {again}") from error
        if len(rows) > 1 or len(tokens) > 1:
            raise InputError(f"{path}: its files disagree on the number of rows; {again}")
        return store

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Row i: ids int32 [len] and loss mask uint8 [len]."""
        shard = bisect_right(self._first_rows, i) - 1
        base = self._offsets[self._first_rows[shard]]
        start, end = self._offsets[i] - base, self._offsets[i + 1] - base
        return self._ids[shard][start:end], self._masks[shard][start:end]

    def count_token(self, token: int) -> int:
        """How often a token id occurs in all rows."""
        part = 1 << 22  # ids at a time
        return sum(
            int(np.count_nonzero(ids[first : first + part] == token))
            for ids in self._ids
            for first in range(0, len(ids), part)
        )


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of the store at `path`, of whatever version.

    Raises InputError when there is no complete store.
    """
    again = "make it with `dflashdist prepare`"
    if not path.is_dir():
        raise InputError(f"{path}: no token store here; {again}")
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a complete token store (no {META}); {again}") from error
    if not isinstance(meta, dict):
        raise InputError(f"{path}: its {META} is not that of a token store; {again}")
    return meta


class TokenStoreWriter:
    """Writes a store; use as a context manager. An exception leaves nothing, also not a part.

    `settings` (what decided the rows' content) enters the fingerprint; `notes`, `key` and `audit`,
    which may be set until the end, only meta.json. Raises InputError when `path` exists, unless
    `overwrite`: then the old store stays until the new one is complete.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], overwrite: bool = False) -> None:
        self.path = Path(path)
        self.audit: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self.key: dict[str, Any] = {}
        self._settings = settings
        if self.path.exists():
            if not overwrite:
                raise InputError(f"{self.path}: exists already; pass --overwrite or another --out")
            refuse_foreign_folder(self.path)

    def __enter__(self) -> "TokenStoreWriter":
        self._partial = new_folder(self.path)
        self._files: list[IO[bytes]] = []  # of the shard that is being filled
        self._shards: list[dict[str, int]] = []
        self._ids_hash, self._mask_hash = hashlib.sha256(), hashlib.sha256()
        self._lengths, self._supervised = array("i"), array("i")
        return self

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return len(self._lengths)

    def add(self, ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Append a row: ids [len] (any integers below 2^31), loss_mask [len] of 0 and 1."""
        self.extend(ids, loss_mask, [len(ids)])

    def extend(
        self, ids: np.ndarray, loss_mask: np.ndarray, lengths: Sequence[int] | np.ndarray
    ) -> None:
        """Append rows that lie one after another: ids and loss_mask [sum of lengths].

        They stay in one shard, so a call should bring no more than a few million tokens.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        assert len(ids) == len(loss_mask) == sizes.sum() and (sizes > 0).all()
        if not len(sizes):
            return
        if not self._shards or self._shards[-1]["tokens"] >= SHARD_TOKENS:
            self._begin_shard()
        shard = self._shards[-1]
        shard["rows"] += len(sizes)
        shard["tokens"] += len(ids)
        mask = np.ascontiguousarray(loss_mask, dtype="u1")
        assert mask.max() <= 1, "a loss mask holds 0 and 1"
        flat = np.ascontiguousarray(ids, dtype="<i4")
        hashes = (self._ids_hash, self._mask_hash)
        for values, file, digest in zip((flat, mask), self._files, hashes, strict=True):
            file.write(values.data)
            digest.update(values.data)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        supervised = np.add.reduceat(mask, starts, dtype=np.int32)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._supervised.frombytes(supervised.tobytes())

    def _begin_shard(self) -> None:
        self._end_shard()
        names = shard_names(len(self._shards))
        self._files = [open(self._partial / name, "wb") for name in names]  # noqa: SIM115
        self._shards.append({"rows": 0, "tokens": 0})

    def _end_shard(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_shard()
        if kind is not None:
            shutil.rmtree(self._partial)
            return
        lengths = np.array(self._lengths, dtype=np.int32)
        supervised = np.array(self._supervised, dtype=np.int32)
        for name, values in ((LENGTHS, lengths), (SUPERVISED, supervised)):
            np.save(self._partial / name, values)
        assert not self.notes.keys() & self._settings.keys(), "what is hashed is no note"
        meta = {
            "version": VERSION,
            "fingerprint": self._fingerprint(lengths),
            "num_rows": len(lengths),
            "num_tokens": int(lengths.sum(dtype=np.int64)),
            "shards": self._shards,
            **self._settings,
            **self.notes,
            "key": self.key,
            "audit": self.audit,
        }
        (self._partial / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        put_in_place(self._partial, self.path)

    def _fingerprint(self, lengths: np.ndarray) -> str:
        """Hex, of every id, mask and length, and of the settings."""
        settings = json.dumps(self._settings, sort_keys=True).encode()
        parts = (self._ids_hash.digest(), self._mask_hash.digest(), lengths.astype("<i4").tobytes())
        return hashlib.sha256(b"".join(parts) + settings).hexdigest()[:32]


def refuse_foreign_folder(path: Path) -> None:
    """Raise InputError unless the existing `path` is a folder that a token store may replace: an
    empty one, or a store, whole or damaged, and nothing else beside its files.
    """
    hint = "so not overwritten; give another --out"
    if not path.is_dir():
        raise InputError(f"{path}: not a token store, {hint}")
    entries = sorted(path.iterdir())
    if entries and not (path / META).is_file():
        raise InputError(f"{path}: not a token store, {hint}")
    if entries and not _is_of_store(path):
        raise InputError(f"{path / META}: not of a token store, {hint}")
    for entry in entries:
        if entry.name == VALIDATION and not entry.is_symlink():
            refuse_foreign_folder(entry)
        elif entry.is_symlink() or entry.is_dir() or not FILES.fullmatch(entry.name):
            raise InputError(f"{entry}: no file of a token store, {hint}, or move it elsewhere")


def _is_of_store(path: Path) -> bool:
    """Whether meta.json is a store's as far as it can be read."""
    try:
        return bool(read_meta(path).keys() & {"version", "fingerprint"})
    except InputError:
        return True


@dataclass
class TokenBatch:
    """A micro-batch's tokens on the CPU, padded on the right."""

    seq: int  # its number in the plan
    epoch: int
    row_ids: tuple[int, ...]  # row numbers of the store
    ids: "Tensor"  # int64 [B, S]
    loss_mask: "Tensor"  # bool [B, S], False at padding
    lengths: "Tensor"  # int64 [B], real tokens


def collate(
    store: TokenStore, *, seq: int, epoch: int, rows: np.ndarray, width: int, pad_id: int
) -> TokenBatch:
    """Micro-batch `seq` of the store's `rows` (int64 [B]), padded to `width` tokens: pure, so any
    worker may do it, in any order.
    """
    import torch

    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        row_ids, row_mask = store.row(int(row))
        assert len(row_ids) <= width, f"row {row} of {len(row_ids)} tokens in a width of {width}"
        ids[i, : len(row_ids)] = row_ids
        mask[i, : len(row_ids)] = row_mask
    return TokenBatch(
        seq=seq,
        epoch=epoch,
        row_ids=tuple(int(row) for row in rows),
        ids=torch.from_numpy(ids),
        loss_mask=torch.from_numpy(mask),
        lengths=torch.from_numpy(store.lengths[rows].astype(np.int64)),
    )
