"""Parts: the same store from any number of workers, and after any kill."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from demo_files import TARGET

from dflashdist.config import DataConfig, InputError
from dflashdist.data import parts
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.parts import Part, PartMaker, PrepareJob, cut_length, make_parts, unusable
from dflashdist.data.prepare import prepare
from dflashdist.data.sources import Sources, Unit
from dflashdist.data.workspace import StorePlace

PREPARE = """
import sys
from dflashdist.config import DataConfig
from dflashdist.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2], sys.argv[3], DataConfig(workers=2, validation=0.1))
"""


def line(i: int) -> str:
    """Token rows, which cost little, then conversations; a bad row in each unit."""
    if i % 1000 == 0:
        return "{"
    if i < 4096:
        return json.dumps({"input_ids": [i % 2000, 1, 2, 3 + i % 11], "loss_mask": [0, 1, 1, 1]})
    asked = {"role": "user", "content": f"What is {i % 900}?"}
    answer = {"role": "assistant", "content": f"Thing {i} is `f({i})`: " + "a word " * (i % 7)}
    return json.dumps({"messages": [asked, answer]})


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Six units, the fifth of which takes longest, and one duplicate far away."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join([line(i) for i in range(5200)] + [line(1)]))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def reference(rows, tmp_path_factory) -> dict[str, bytes]:
    """The files of the store that one process makes."""
    out = tmp_path_factory.mktemp("reference") / "store"
    prepare([rows], TARGET, out, DataConfig(workers=1, validation=0.1))
    return files(out)


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def job(folder: Path, **data) -> PrepareJob:
    chat = ChatTokenizer.load(TARGET)
    return PrepareJob(folder, str(TARGET), None, None, chat.fingerprint, DataConfig(**data))


@pytest.mark.dist
def test_workers_change_nothing(rows, reference, tmp_path):
    summary = prepare([rows], TARGET, tmp_path / "store", DataConfig(workers=3, validation=0.1))
    assert files(tmp_path / "store") == reference
    assert summary["source_rows"] == 5201 and summary["rejected"] == {"not JSON": 6}
    assert summary["duplicates"] == 1
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.dist
def test_a_killed_prepare_goes_on_and_ends_with_the_same_store(rows, reference, tmp_path):
    out = tmp_path / "store"
    partial = StorePlace(out).partial
    command = [sys.executable, "-c", PREPARE, str(rows), str(TARGET), str(out)]
    process = subprocess.Popen(command)
    wait_for(lambda: list(partial.glob("*/*.npz")))
    workers = children(process.pid)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(running, workers)))  # they do not outlive it
    assert len(workers) >= 2 and not out.exists()
    (folder,) = {path.parent for path in partial.glob("*/*.npz")}
    there = {path: path.stat().st_mtime_ns for path in folder.glob("*.npz")}
    assert 1 <= len(there) < 6
    torn = folder / ".000005.npz.partial"
    torn.write_bytes(b"torn")
    # What is there is not made again: the same files serve the one who goes on.
    found = list(make_parts(Sources([rows]), job(folder), ChatTokenizer.load(TARGET), workers=2))
    assert found == [parts.part_path(folder, i) for i in range(6)]
    assert there == {path: path.stat().st_mtime_ns for path in there}
    prepare([rows], TARGET, out, DataConfig(workers=2, validation=0.1))
    assert files(out) == reference
    assert os.listdir(tmp_path) == ["store"]


def test_parts_of_something_else_are_not_gone_on_with(rows, tmp_path):
    out = tmp_path / "store"
    partial = StorePlace(out).partial
    stale = partial / "0123456789abcdef"
    stale.mkdir(parents=True)
    maker = PartMaker(job(stale, max_length=30), ChatTokenizer.load(TARGET))
    for unit in Sources([rows]).units():
        maker.make(unit)
    prepare([rows], TARGET, out, DataConfig(workers=1))
    assert json.loads((out / "meta.json").read_text())["audit"]["cut_rows"] == 0
    assert not partial.exists()


@pytest.mark.dist
def test_a_part_that_is_there_is_used(rows, tmp_path):
    """Also one after a gap: the order of the units alone decides where it goes."""
    chat = ChatTokenizer.load(TARGET)
    PartMaker(job(tmp_path), chat).make(list(Sources([rows]).units())[3])
    third = parts.part_path(tmp_path, 3)
    written = third.stat().st_mtime_ns
    for workers in (1, 2):
        found = list(make_parts(Sources([rows]), job(tmp_path), chat, workers))
        assert [path.name for path in found] == [f"00000{i}.npz" for i in range(6)]
        assert third.stat().st_mtime_ns == written
        for path in found[:3]:
            path.unlink()


@pytest.mark.dist
def test_a_killed_worker_ends_it_and_leaves_the_parts(rows, reference, tmp_path):
    out = tmp_path / "store"
    partial = StorePlace(out).partial

    def kill_a_worker() -> None:
        wait_for(lambda: list(partial.glob("*/*.npz")))
        pid = multiprocessing.active_children()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    with pytest.raises(InputError, match=r"a worker process was killed.*goes on"):
        prepare([rows], TARGET, out, DataConfig(workers=2, validation=0.1))
    killer.join()
    assert list(partial.glob("*/*.npz")) and not out.exists()
    prepare([rows], TARGET, out, DataConfig(workers=1, validation=0.1))
    assert files(out) == reference


@pytest.mark.dist
def test_few_units_are_in_memory(rows, tmp_path):
    class Counted(Sources):
        read = 0

        def units(self, first: int = 0) -> Iterator[Unit]:
            for unit in super().units(first):
                self.read += 1
                yield unit

    sources = Counted([rows, rows])
    chat = ChatTokenizer.load(TARGET)
    made = make_parts(sources, job(tmp_path), chat, workers=2)
    assert [sources.read - i <= 4 for i, _ in enumerate(made)] == [True] * 12


def test_a_part_survives_the_disk(rows, tmp_path):
    chat = ChatTokenizer.load(TARGET)
    unit = next(iter(Sources([rows]).units()))
    part = PartMaker(job(tmp_path), chat).part(unit)
    part.left_out.append((1, "why", "here"))
    part.save(tmp_path / "part.npz")
    assert os.listdir(tmp_path) == ["part.npz"]
    loaded = Part.load(tmp_path / "part.npz")
    for name in ("conversations", "rows", "ids", "loss_mask"):
        assert np.array_equal(getattr(loaded, name), getattr(part, name)), name
        assert getattr(loaded, name).dtype == getattr(part, name).dtype
    assert loaded.rejections == part.rejections and loaded.origins == part.origins
    assert loaded.left_out == part.left_out and loaded.source_rows == 1024
    assert (loaded.checked_rows, loaded.checked_tokens) == (8, part.checked_tokens)
    assert len(Part.load(tmp_path / "part.npz", tokens=False).ids) == 0


def test_a_changed_target_is_noticed(tmp_path):
    other = PrepareJob(tmp_path, str(TARGET), None, None, "0123", DataConfig())
    with pytest.raises(InputError, match="changed while it was used"):
        other.load_chat()


@pytest.mark.parametrize(
    ("mask", "max_length", "kept", "reason"),
    [
        ([0, 1, 1, 1], 4, 4, None),
        ([0, 1, 1, 1], 3, 3, None),
        ([0, 1, 1, 0, 0, 1, 1], 5, 3, None),
        ([0, 1, 1, 0], 4, 4, None),
        ([0, 0, 0, 1, 1], 3, 0, parts.BEYOND),
        ([0, 0, 1, 1, 1], 3, 3, parts.BEYOND),
        ([0, 1, 0], 3, 3, "fewer than 2 supervised tokens"),
        ([1, 0, 1, 0, 1], 9, 5, parts.NOT_ADJACENT),
    ],
)
def test_the_cut_and_what_is_too_little(mask, max_length, kept, reason):
    loss_mask = np.array(mask, np.uint8)
    assert cut_length(loss_mask, max_length) == kept
    assert unusable(loss_mask, kept, 2) == reason
