"""What a source names: a file, a folder or glob of them, or a data set that `datasets` loads."""

import difflib
import glob
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.data import readers

READABLE = ".jsonl, .ndjson or .json (also .gz or .zst) or .parquet"
# Ends of names of files that hold data, which are not read and not silently passed over.
DATA = (
    ".arrow", ".avro", ".bz2", ".csv", ".feather", ".gz", ".jsonlines", ".lz4", ".orc", ".pickle",
    ".pkl", ".tar", ".tgz", ".tsv", ".txt", ".xlsx", ".xz", ".zip", ".zst",
)  # fmt: skip
# What the `datasets` package writes beside the data: JSON files without a row.
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
SAVED = ("dataset_dict.json", "state.json")  # a folder written by save_to_disk has one
OPTIONS = ("split", "revision", "cap", "weight", "streaming")


@dataclass(frozen=True)
class Source:
    """A file, a folder, a glob, or with a split a data set by name or folder, and how much of it.

    Row i of it is read floor((i+1) x weight) - floor(i x weight) times: a weight of 0.5 takes every
    second row, one of 2 takes each twice; `cap` is the most that is read.
    """

    path: str
    split: str | None = None
    revision: str | None = None  # of a data set by name
    cap: int | None = None
    weight: float = 1.0
    streaming: bool = False  # read a data set as it downloads


@dataclass(frozen=True)
class Dataset:
    """A data set as `datasets` loads it, and the name that its rows go by."""

    name: str
    data: Any
    streaming: bool
    revision: str | None = None

    @property
    def fingerprint(self) -> str | None:
        """What vouches for the content; of a stream only the commit that it is pinned to."""
        if not self.streaming:
            return self.data._fingerprint
        return self.revision if re.fullmatch("[0-9a-f]{40}", self.revision or "") else None

    def batches(self, batch_rows: int) -> Iterator[Any]:
        """Record batches of up to `batch_rows` rows, as they arrive. Raises InputError."""
        read = readers.stream_batches if self.streaming else readers.dataset_batches
        with _loading(self.name):
            yield from read(self.data, batch_rows)


def parse_source(text: str) -> Source:
    """A source as it is written: PATH[,split=NAME][,cap=N][,weight=W]...

    An option is what follows a comma, so a path like chats/date=2026/*.jsonl has none; a path that
    exists may also hold commas. Raises InputError for an option that is unknown or wrong.
    """
    path, options = text, {}
    while not _exists(path):
        rest, comma, last = path.rpartition(",")
        key, sign, value = last.partition("=")
        if not (comma and sign):
            break
        if key not in OPTIONS:
            if "/" in last:  # a folder's name, as in a,date=2026/*.jsonl
                break
            near = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.0)[0]
            raise InputError(f"{text}: unknown option {key!r}; nearest known option: {near!r}")
        if key in options:
            raise InputError(f"{text}: {key} is given twice; give it once")
        path, options[key] = rest, _option(text, key, value)
    if not path:
        raise InputError(f"{text!r}: a source begins with a path or a data set's name")
    return Source(path, **options)


def locate(source: Source) -> list[Path | Dataset]:
    """Its files in their order, or its data set.

    Files of a folder or glob that hold data of another kind are named on stderr.

    Raises InputError, naming the source and the fix, for one that is missing, of another kind,
    without any readable file, or that `datasets` cannot load.
    """
    path = Path(source.path).expanduser()
    if any((path / name).is_file() for name in SAVED):
        return [_saved_dataset(source, path)]
    if source.split is not None:
        return [_loaded_dataset(source, path)]
    for option in ("revision", "streaming"):
        if getattr(source, option):
            raise InputError(f"{source.path}: {option} is of data sets: add split=NAME")
    if path.is_dir():
        files = _inside(path)
    elif path.exists():
        if not _is_readable(path):
            raise InputError(f"{source.path}: rows are read from {READABLE} files")
        files = [path]
    elif glob.has_magic(source.path):
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        inside = chain.from_iterable(_inside(one) if one.is_dir() else [one] for one in matches)
        files = list(dict.fromkeys(inside))
    else:
        raise InputError(
            f"{source.path}: no such file or folder; to load a data set by name, add split=NAME"
        )
    found = [file for file in files if _is_readable(file)]
    if not found:
        raise InputError(f"{source.path}: no {READABLE} file in it")
    others = [str(file) for file in files if _is_other_data(file)]
    if others:
        names = ", ".join(others[:3]) + (f" and {len(others) - 3:,} more" if others[3:] else "")
        warning = f"{source.path}: not read: {names}; only {READABLE} files are"
        print(f"dflashdist: warning: {warning}", file=sys.stderr)
    return list[Path | Dataset](found)


def refuse_inside(out: Path, files: Sequence[Path], sources: Sequence[Source]) -> None:
    """Raise InputError when a source would read what is written to `out` the next time.

    Args:
        out: as it was given, for the message.
        files: what is written there.
    """
    for source in sources:
        place = Path(source.path).expanduser().resolve()
        for file in (file.resolve() for file in files):
            if place.is_file():
                reads = file == place
            else:  # a folder is read with all that is in it
                within = (file, *file.parents)
                reads = place in within or any(_matches(one.parts, place.parts) for one in within)
            if reads:
                raise InputError(
                    f"{out}: would be read as part of {source.path} the next time; give an --out "
                    "outside of it"
                )


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _option(text: str, key: str, value: str) -> Any:
    try:
        if key == "cap" and int(value) > 0:
            return int(value)
        if key == "weight" and 0 < float(value) < math.inf:
            return float(value)
    except ValueError:
        pass
    if key in ("split", "revision") and value:
        return value
    if key == "streaming" and value in ("true", "false"):
        return value == "true"
    wanted = {"cap": "a whole number from 1", "weight": "a number above 0"}
    wanted |= {"streaming": "true or false"}
    raise InputError(f"{text}: {key}={value}: must be {wanted.get(key, 'a name')}")


def _is_readable(path: Path) -> bool:
    name = path.name.lower()
    return name.endswith(readers.SUFFIXES) and name not in NOT_ROWS and not name.startswith(".")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path is what the pattern, perhaps a glob, names."""
    if not (parts and pattern):
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _is_other_data(path: Path) -> bool:
    """Whether a file that is not read holds data by its name."""
    name = path.name.lower()
    about = name.startswith((".", "readme", "license"))
    return name.endswith(DATA) and not about and not _is_readable(path)


def _inside(folder: Path) -> list[Path]:
    """The files of a folder and of those in it, sorted by their paths."""
    found, seen = [], set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        if real in seen:  # a link may lead back up
            folders[:] = []
            continue
        seen.add(real)
        if any(name in SAVED for name in names):
            raise InputError(f"{here}: a data set written by save_to_disk; name it as a source")
        found += [Path(here, name) for name in names]
    return sorted(found)


def _saved_dataset(source: Source, path: Path) -> Dataset:
    if source.revision or source.streaming:
        raise InputError(f"{source.path}: written by save_to_disk: no revision, no streaming")
    import datasets

    with _loading(source.path):
        data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        if source.split not in data:
            raise InputError(f"{source.path}: add split=NAME, one of {', '.join(map(str, data))}")
        return Dataset(f"{source.path}:{source.split}", data[source.split], streaming=False)
    if source.split is not None:
        raise InputError(f"{source.path}: it has no splits; leave split={source.split} out")
    return Dataset(source.path, data, streaming=False)


def _loaded_dataset(source: Source, path: Path) -> Dataset:
    if path.is_file():
        raise InputError(f"{source.path}: a file has no splits; leave split={source.split} out")
    if path.is_dir() and source.revision is not None:
        raise InputError(f"{source.path}: a folder has no revisions; leave revision= out")
    import datasets

    where = str(path) if path.is_dir() else source.path
    with _loading(source.path):
        data = datasets.load_dataset(
            where, split=source.split, revision=source.revision, streaming=source.streaming
        )
    name = f"{source.path}:{source.split}"
    return Dataset(name, data, source.streaming, source.revision)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Errors of the `datasets` package, which are of many classes of several packages."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name}: the data set cannot be read: {reason}") from error
