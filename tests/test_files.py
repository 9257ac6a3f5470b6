"""What has a name is complete, whatever ends the process that gives it; and locks hold."""

import os
import shutil
import sys

import pytest
from ranks import CONTEXT

from dflashdist import files
from dflashdist.config import InputError
from dflashdist.files import beside, hold, new_folder, put_in_place, remove, restore, whole_file

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def kill_at_change(count: int, function, *arguments) -> None:
    """Run the function; the `count`-th change of a file or folder ends the process."""
    seen = 0

    def hook(event, details):
        nonlocal seen
        writes = event == "open" and isinstance(details[2], int) and details[2] & os.O_ACCMODE
        if event in CHANGES or writes:
            seen += 1
            if seen == count:
                os._exit(9)

    sys.addaudithook(hook)
    function(*arguments)
    os._exit(0)


def each_kill(function, *arguments):
    """The number of the change at which a process was killed, for each there is."""
    for count in range(1, 40):
        process = CONTEXT.Process(target=kill_at_change, args=(count, function, *arguments))
        process.start()
        process.join(60)
        yield count
        if process.exitcode == 0:
            return
        assert process.exitcode == 9
    pytest.fail("it never came to its end")


def write(place) -> None:
    with whole_file(place) as file:
        file.write("new" * 5000)


def replace_folder(place) -> None:
    folder = new_folder(place)
    (folder / "a").write_text("new")
    (folder / "b").write_text("new")
    put_in_place(folder, place)


def write_folder(place, texts: dict[str, str]) -> None:
    place.mkdir()
    for name, text in texts.items():
        (place / name).write_text(text)


def contents(place) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.iterdir()}


def test_a_killed_process_leaves_a_file_whole(tmp_path):
    place, seen = tmp_path / "file", set()
    place.write_text("old")
    for _ in each_kill(write, place):
        seen.add(place.read_text()[:3])
        assert place.read_text() in ("old", "new" * 5000)
        place.write_text("old")
    assert seen == {"old", "new"}
    assert not beside(place, files.PARTIAL).exists()


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    place = tmp_path / "file"
    place.write_text("old")
    with pytest.raises(ZeroDivisionError), whole_file(place) as file:
        file.write("half")
        print(1 / 0, file=file)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and place.read_text() == "old"


def test_a_killed_process_leaves_a_folder_whole(tmp_path):
    """Under its name, or where `restore` finds it; and the next one clears what was left."""
    place, seen = tmp_path / "folder", set()
    old, new = dict.fromkeys("xyz", "old"), dict.fromkeys("ab", "new")
    write_folder(place, old)
    for _ in each_kill(replace_folder, place):
        named = place.exists()
        restore(place)
        assert contents(place) in (old, new)
        seen.add((named, contents(place) == new))
        replace_folder(place)
        assert [path.name for path in tmp_path.iterdir()] == ["folder"] and contents(place) == new
        shutil.rmtree(place)
        write_folder(place, old)
    assert seen == {(True, False), (False, False), (True, True)}


def test_what_is_removed_is_gone_from_its_name_at_once(tmp_path, monkeypatch):
    place = tmp_path / "folder"
    replace_folder(place)

    def killed(folder, ignore_errors=False):
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(place)
    assert not place.exists()
    remove(place)
    assert not list(tmp_path.iterdir())
    remove(place)  # nothing there


def test_restore_gives_back_only_where_nothing_is_lost(tmp_path):
    place, old = tmp_path / "folder", tmp_path / ".folder.old.partial"
    replace_folder(place)
    shutil.copytree(place, old)
    (place / "a").write_text("newest")
    restore(place)
    assert (place / "a").read_text() == "newest" and old.exists()
    shutil.rmtree(place)
    place.mkdir()  # an empty folder holds nothing to lose
    restore(place)
    assert contents(place) == {"a": "new", "b": "new"} and not old.exists()


def hold_until_told(path, held, done) -> None:
    file = hold(path, "store", "writes it")
    held.set()
    done.wait(60)
    file.close()


def test_a_lock_names_its_holder(tmp_path):
    held, done = CONTEXT.Event(), CONTEXT.Event()
    path = tmp_path / "deep" / "lock"
    process = CONTEXT.Process(target=hold_until_told, args=(path, held, done))
    process.start()
    assert held.wait(60)
    with pytest.raises(InputError, match=rf"^store: process {process.pid} on \S+ writes it$"):
        hold(path, "store", "writes it")
    done.set()
    process.join(60)
    hold(path, "store", "writes it").close()


def test_the_lock_of_a_folder_that_is_gone_holds_nobody(tmp_path):
    """Who opened the lock just before its folder was removed must not believe that it has it."""
    path = tmp_path / "work" / "lock"
    real = files.lock

    def folder_goes_first(file):
        files.lock = real
        shutil.rmtree(path.parent)
        return real(file)

    files.lock = folder_goes_first
    try:
        with hold(path, "store", "writes it") as file:
            assert os.path.samestat(os.fstat(file.fileno()), path.stat())
    finally:
        files.lock = real
