"""Conversations to a token store, in two phases: parts by worker processes, then one store of them.

First each unit of the sources becomes a part (parts.py), in a folder beside the store that is named
after all that decides the parts. Then, in the order of the sources, duplicates and the validation
split are decided, and the parts are spliced into the store, which is renamed to its place.

A prepare that was killed leaves the folder of parts and no store. The same command goes on from
there and ends with the same store, to the bit; the number of workers changes nothing. A prepare
that refuses its input leaves nothing. Source rows read = kept + rejected, always.
"""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflashdist.config import DataConfig, InputError
from dflashdist.data.audit import Tally, format_summary, summarise, write_audit
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Rejections
from dflashdist.data.locate import refuse_inside
from dflashdist.data.parts import Gathered, Part, PrepareJob, make_parts
from dflashdist.data.shards import AUDIT_JSON, META, VALIDATION, TokenStore, TokenStoreWriter
from dflashdist.data.sources import Source, Sources
from dflashdist.data.workspace import Key, StorePlace, decisive, parts_key, repeatable, store_key

__all__ = ["format_summary", "prepare", "summarise"]

# Errors that pass or can be mended: a full disk, a server of files that was away.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
DUPLICATE = "duplicate"
RESERVED = "also in the validation sources"
# Where a kept conversation goes.
TO_TRAINING, TO_VALIDATION, TO_DUPLICATES, TO_RESERVED = range(4)
COPIES_WARNED = 0.5  # share of the conversations
REASONS = {TO_DUPLICATES: DUPLICATE, TO_RESERVED: RESERVED}


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


def prepare(
    sources: Sequence[str | Path | Source],
    target: str | Path,
    out: str | Path,
    data: DataConfig,
    overwrite: bool = False,
    revision: str | None = None,
    verify_all: bool = False,
) -> dict[str, Any]:
    """Write the token store `out` of the conversations in `sources` for the target.

    A store that is there and was made of the same content, target, settings and code is left as it
    is; data.strict and data.max_rejected are held to its audit. Masks are verified by decoding on a
    sample of the rows, or on all with `verify_all`. Returns the summary that `format_summary`
    prints, with `reused`, and under `validation` that of the validation store, or None. With
    several workers, processes are spawned: a script that calls this must be importable, its own
    work under `if __name__ == "__main__"`.
    Raises InputError for bad sources, targets or masks, for too many rejected rows, when no row is
    usable, when another prepare is writing `out`, or when `out` holds something else.
    """
    place = StorePlace(out)
    read = [_open(sources, place)]
    if isinstance(data.validation, str | list):
        own = [data.validation] if isinstance(data.validation, str) else data.validation
        read.append(_open(own, place))
    described = [one.describe() for one in read]

    def load(date: str | None) -> tuple[ChatTokenizer, Key]:
        chat = ChatTokenizer.load(
            target, revision, template=data.template, settings=data.template_settings, date=date
        )
        split = described[1] if len(described) > 1 else data.validation
        return chat, store_key(described[0], split, chat, data, verify_all)

    recorded = None if data.date else place.recorded_date()
    chat, key = load(data.date or recorded)
    if place.holds(key, overwrite) and not place.partial.exists():
        return _reused(place, data)
    if recorded and not (place.partial / parts_key(key, described[0])).exists():
        chat, key = load(None)  # nothing to go on with: today's date
    jobs = [
        PrepareJob(
            place.partial / parts_key(key, one), str(target), revision, chat.rendering["date"],
            chat.fingerprint, data, verify_all,
        )
        for one in described
    ]  # fmt: skip
    try:
        with place.locked():
            parts = [job.folder for job in jobs]
            if place.holds(key, overwrite):  # made meanwhile, or its folder of parts was left
                place.clear(parts)
                return _reused(place, data)
            stale = [job.folder for job, one in zip(jobs, described, strict=True)
                     if not repeatable(one)]  # fmt: skip
            notes = _notes(jobs[0], chat)
            place.begin(key, notes, stale)
            try:
                _write(place, key, notes, chat, read, jobs)
            except InputError:
                place.clear(parts)
                raise
            place.finish()
    except BrokenProcessPool as error:
        raise InputError(
            f"{out}: a worker process was killed, perhaps for want of memory; the same command "
            "goes on where it stopped, and data.workers=N takes fewer of them"
        ) from error
    except OSError as error:
        then = "; the same command goes on where it stopped" if error.errno in PASSING else ""
        raise InputError(f"{out}: {error}{then}") from error
    return _summary(place.out, reused=False)


def _open(sources: Sequence[str | Path | Source], place: StorePlace) -> Sources:
    read = Sources(sources)
    stores = (place.out, place.out / VALIDATION)
    files = [store / name for store in stores for name in (META, AUDIT_JSON)]
    refuse_inside(place.out, files, read.sources)  # they are JSON, too
    return read


def _summary(path: Path, reused: bool) -> dict[str, Any]:
    inside = path / VALIDATION
    summary = summarise(TokenStore.open(path)) | {
        "reused": reused,
        "validation": summarise(TokenStore.open(inside)) if inside.exists() else None,
    }
    warnings = list(summary["warnings"])
    if summary["validation"]:
        inner = summary["validation"]["warnings"]
        warnings += [f"validation store: {warning}" for warning in inner if warning not in warnings]
    for warning in warnings:
        print(f"dflashdist prepare: warning: {warning}", file=sys.stderr)
    return summary


def _reused(place: StorePlace, data: DataConfig) -> dict[str, Any]:
    """The summary of the store that is there. Raises InputError where too much was rejected."""
    for path in (place.out / VALIDATION, place.out):
        if path.exists():
            audit = TokenStore.open(path).meta["audit"]
            counts = {k: n for k, n in audit["rejected"].items() if k not in REASONS.values()}
            rejections = Rejections(counts=counts, examples=audit["examples"])
            _refuse_strictly(rejections, data)
            _refuse_rejected(rejections, audit["source_rows"], audit["source_rows"], data)
    return _summary(place.out, reused=True)


def _write(
    place: StorePlace, key: Key, notes: dict[str, Any], chat: ChatTokenizer, read: list[Sources],
    jobs: list[PrepareJob],
) -> None:  # fmt: skip
    """Write the complete and audited store beside its place."""
    data = jobs[0].data
    # A validation set of its own comes first: what it holds is not trained on.
    held_out = _gather(read[1], jobs[1], chat) if len(read) > 1 else None
    gathered = _gather(read[0], jobs[0], chat)
    goes = decide(gathered, data.deduplicate, held_out, None if held_out else data.validation)
    _refuse_empty(goes, data)
    with ExitStack() as stack:

        def book(path: Path) -> Book:
            writer = TokenStoreWriter(path, _settings(jobs[0], chat), overwrite=True)
            writer.key, writer.notes = key, notes
            return Book(stack.enter_context(writer), Tally(chat.vocab_size))

        training = book(place.store)
        books = {TO_TRAINING: training}
        if data.validation is not None:
            books[TO_VALIDATION] = book(place.partial / VALIDATION)
        splice(gathered, goes, books)
        training.finish(_about(gathered, goes, data), chat)
        if held_out:
            own = decide(held_out, data.deduplicate)
            splice(held_out, own, {TO_TRAINING: books[TO_VALIDATION]})
            books[TO_VALIDATION].finish(_about(held_out, own, data), chat)
        elif data.validation:
            books[TO_VALIDATION].finish(_about_share(gathered, goes, data), chat)
    if data.validation is not None:
        os.rename(place.partial / VALIDATION, place.store / VALIDATION)
        write_audit(TokenStore.open(place.store / VALIDATION), chat)
    write_audit(TokenStore.open(place.store), chat)


def _gather(sources: Sources, job: PrepareJob, chat: ChatTokenizer) -> Gathered:
    """Make all parts, or stop as soon as too much is rejected. Raises InputError."""
    data, gathered, most = job.data, Gathered(), sources.max_rows
    parts = make_parts(sources, job, chat, data.workers or num_cores())
    bar = tqdm(total=most, desc="prepare", unit=" rows", disable=None)
    with closing(parts), bar:  # workers end before anything of theirs is removed
        for path in parts:
            part = gathered.add(path)
            bar.update(part.source_rows)
            _refuse_strictly(gathered.rejections, data)
            if most is not None:
                _refuse_rejected(gathered.rejections, gathered.source_rows, most, data)
    rows = gathered.source_rows
    if not any(map(len, gathered.conversations)):
        raise InputError(f"no usable row among {rows}: {_reasons(gathered.rejections)}")
    _refuse_rejected(gathered.rejections, rows, rows, data)
    return gathered


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


def _refuse_strictly(rejections: Rejections, data: DataConfig) -> None:
    """Raise InputError for a rejected row when data.strict wants none."""
    if data.strict and rejections.total:
        reason = next(iter(rejections.counts))
        raise InputError(
            f"{rejections.examples[reason][0]}: {reason}; mend or leave out the row, or set "
            "data.strict=false"
        )


def _refuse_rejected(rejections: Rejections, read: int, rows: int, data: DataConfig) -> None:
    """Raise InputError when more than data.max_rejected of `rows` are rejected, of which `read` are
    read so far, whatever follows.

    Copies and validation rows, which are left out on purpose, come later and do not count.
    """
    rejected = rejections.total
    if rejected > Fraction(str(data.max_rejected)) * rows:  # exact: 29 of 100 are not over 0.29
        raise InputError(
            f"{rejected:,} rejected of the first {read:,} of at most {rows:,} "
            f"source rows, which is more than data.max_rejected={data.max_rejected}: "
            f"{_reasons(rejections)}; mend or leave out these rows, or raise data.max_rejected"
        )


def _reasons(rejections: Rejections) -> str:
    if not rejections.counts:
        return "the sources are empty"
    return "; ".join(
        f"{count:,} x {reason} (first: {rejections.examples[reason][0]})"
        for reason, count in sorted(rejections.counts.items(), key=lambda item: -item[1])
    )


def _refuse_empty(goes: np.ndarray, data: DataConfig) -> None:
    """Raise InputError when one of the stores asked for would have no row."""
    if not (goes == TO_TRAINING).any():
        raise InputError(
            f"all {len(goes):,} conversations are in the validation set (data.validation="
            f"{data.validation}), so none is left to train on; make it smaller"
        )
    if isinstance(data.validation, float) and not (goes == TO_VALIDATION).any():
        raise InputError(
            f"data.validation={data.validation}: no opening of {len(goes):,} conversations falls "
            "into this share; raise it, or name sources of their own"
        )


def _settings(job: PrepareJob, chat: ChatTokenizer) -> dict[str, Any]:
    """What decided the rows of a store, beside the sources; training reads some of it."""
    return {
        "tokenizer_fingerprint": chat.tokenizer_fingerprint,
        "chat_fingerprint": chat.fingerprint,
        "tokenizer_length": chat.length,
        "vocab_size": chat.vocab_size,
        "pad_id": chat.pad_id,
        "rendering": decisive(chat),
        "max_length": job.data.max_length,
        "min_supervised": job.data.min_supervised,
        "turns": job.data.turns,
    }


def _notes(job: PrepareJob, chat: ChatTokenizer) -> dict[str, Any]:
    """Where the target and its template came from, which decides no row."""
    folder = Path(job.target).expanduser()
    return {
        "target": os.path.abspath(folder) if folder.is_dir() else job.target,
        "revision": job.revision,
        "template": chat.rendering["template"],
        "date_given": job.data.date is not None,
    }


def _about(gathered: Gathered, goes: np.ndarray, data: DataConfig) -> dict[str, Any]:
    """The audit's part on the sources, after the splice."""
    to_validation = int(np.count_nonzero(goes == TO_VALIDATION))
    kept = gathered.source_rows - gathered.rejections.total
    assert kept == to_validation + np.count_nonzero(goes == TO_TRAINING), "rows unaccounted for"
    return {
        "source_rows": gathered.source_rows,
        "kept": kept,
        "to_validation": to_validation,
        "rejected": gathered.rejections.counts,
        "examples": gathered.rejections.examples,
        "duplicates": int(np.count_nonzero(gathered.copies)),
        "deduplicated": data.deduplicate,
        "checked_rows": gathered.checked_rows,
        "checked_tokens": gathered.checked_tokens,
    }


def _about_share(gathered: Gathered, goes: np.ndarray, data: DataConfig) -> dict[str, Any]:
    """The same of a validation store that is a share: only what went into it is known of it."""
    inside = goes == TO_VALIDATION
    kept, copies = map(int, (np.count_nonzero(inside), np.count_nonzero(gathered.copies & inside)))
    return {
        "source_rows": kept, "kept": kept, "to_validation": 0, "rejected": {}, "examples": {},
        "duplicates": copies, "deduplicated": data.deduplicate,
    }  # fmt: skip


def num_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1
