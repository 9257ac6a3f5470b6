"""Replacing an export: what carries the name is complete, whatever ends the export."""

import json
import os
import shutil
import sys

import pytest
from exported import config_of
from ranks import CONTEXT

from dflashdist.config import InputError
from dflashdist.export.folder import export_drafter
from dflashdist.model.drafter_folder import load_drafter

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def test_existing_folders_are_kept(checkpoint, tmp_path):
    out = export_drafter(checkpoint, tmp_path / "out")
    with pytest.raises(InputError, match="--overwrite"):
        export_drafter(checkpoint, out)
    export_drafter(checkpoint, out, dtype="float32", overwrite=True)
    assert config_of(out)["dtype"] == "float32"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    before = sorted(path.name for path in checkpoint.iterdir())
    with pytest.raises(InputError, match="no export"):
        export_drafter(checkpoint, checkpoint, overwrite=True)
    assert sorted(path.name for path in checkpoint.iterdir()) == before
    (tmp_path / "mine").mkdir()
    export_drafter(checkpoint, tmp_path / "mine")  # empty
    with pytest.raises(InputError, match="no such folder"):
        export_drafter(checkpoint, tmp_path / "a/b")


def test_a_file_that_no_export_wrote_is_kept(checkpoint, tmp_path):
    out = export_drafter(checkpoint, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"no export wrote \(notes\.txt\)"):
        export_drafter(checkpoint, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine" and load_drafter(out)


def test_an_export_replaces_itself(checkpoint, tmp_path):
    out = export_drafter(checkpoint, tmp_path / "out", dtype="float32")
    export_drafter(out, out, overwrite=True)
    assert config_of(out)["dtype"] == "bfloat16" and load_drafter(out)


def killed_at(count: int, checkpoint, out) -> None:
    """An export that the `count`-th change of a file below its folder's parent kills."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if event not in CHANGES and not writes:
            return
        if str(out.parent) not in str(arguments[0]):
            return
        seen += 1
        if seen == count:
            os._exit(9)

    sys.addaudithook(hook)
    export_drafter(checkpoint, out, dtype="float32", overwrite=True)
    os._exit(0)


def test_a_killed_export_loses_nothing(checkpoint, tmp_path):
    """Killed at each of its changes, one after the other, in processes of their own."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    export_drafter(checkpoint, kept)
    stages, without_name = set(), 0
    for count in range(1, 60):
        for path in tmp_path.glob(".out*"):
            shutil.rmtree(path)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(kept, out)
        process = CONTEXT.Process(target=killed_at, args=(count, checkpoint, out))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == 9
        left = sorted(path.name for path in tmp_path.glob(".out*"))
        stages.add((out.exists(), *left))
        if out.exists():
            assert json.loads((out / "config.json").read_text())["dtype"] in ("bfloat16", "float32")
            load_drafter(out)
        else:
            without_name += 1
        export_drafter(checkpoint, out, dtype="float16", overwrite=True)
        assert config_of(out)["dtype"] == "float16" and load_drafter(out)
        assert not list(tmp_path.glob(".out*"))
    else:
        pytest.fail("it never came to its end")
    # The new one half written; both complete and neither named; the old one not yet removed.
    assert {
        (True, ".out.partial"), (False, ".out.old.partial", ".out.partial"),
        (True, ".out.old.partial"),
    } <= stages  # fmt: skip
    assert count > 8 and without_name


def test_the_old_one_comes_back_if_nothing_has_the_name(checkpoint, tmp_path):
    """And it is an export again, which only --overwrite replaces."""
    out = export_drafter(checkpoint, tmp_path / "out")
    out.rename(tmp_path / ".out.old.partial")
    with pytest.raises(InputError, match="--overwrite"):
        export_drafter(checkpoint, out)
    assert load_drafter(out) and not (tmp_path / ".out.old.partial").exists()
