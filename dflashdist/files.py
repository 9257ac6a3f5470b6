"""Files and folders that are complete or absent, whatever ends the process; and locks.

What is written lies beside its place until it is on the disk, then takes the name; what has a name
loses it before it is removed. Beside a place NAME, all of which a later start may remove, lie:

    .NAME.partial           not complete
    .NAME.old.partial       complete: what had the name, until the new one has it
    .NAME.dropped.partial   being removed
"""

import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dflashdist.config import InputError

log = logging.getLogger(__name__)

PARTIAL, OLD, DROPPED = ".partial", ".old.partial", ".dropped.partial"


def beside(place: Path, ending: str) -> Path:
    """The name beside `place` with this ending."""
    return place.with_name(f".{place.name}{ending}")


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_file(place: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write, which has the name `place` once the block has ended without an error."""
    aside = beside(place, PARTIAL)
    try:
        with open(aside, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, place)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(place.parent)


def new_folder(place: Path) -> Path:
    """An empty folder beside `place`, to be filled and `put_in_place`."""
    aside = beside(place, PARTIAL)
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    return aside


def put_in_place(folder: Path, place: Path) -> None:
    """Give a complete folder the name `place`; the one that had it is removed last."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
    old = beside(place, OLD)
    if place.exists():
        remove(old)
        os.rename(place, old)
    os.rename(folder, place)
    sync(place.parent)
    remove(old)


def restore(place: Path) -> None:
    """Give its name back to a folder that a kill in `put_in_place` left without. Several processes
    may do so at once."""
    with suppress(OSError):  # nothing to restore, or another process was first
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            os.rename(beside(place, OLD), place)


def remove(folder: Path) -> None:
    """Remove a folder, if it is there; a kill leaves nothing of it under its name."""
    aside = folder
    if not folder.name.endswith(DROPPED):
        aside = folder.with_name(f".{folder.name.lstrip('.')}{DROPPED}")
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def lock(file: IO[Any]) -> bool:
    """Hold an open file against other processes until it is closed; False where its file system has
    no locks. Raises BlockingIOError when another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def hold(path: Path, name: str, doing: str) -> IO[str]:
    """Hold the lock file at `path`, made with its folder if need be, until what is returned is
    closed. Where its file system has no locks that is said in the log.

    Raises InputError when another process has it: `name`, that process, and what it is `doing`.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115, held open
        except FileNotFoundError:  # the one before has just removed the folder
            continue
        try:
            if not lock(file):
                log.warning("%s: no file locks here, a second process is not noticed", path.parent)
                return file
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise InputError(f"{name}: {holder} {doing}") from error
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # the lock of a folder that is gone
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
