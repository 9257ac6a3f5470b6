"""launch/demo.sh removes nothing that a demo did not make, and nothing before all is accepted."""

import os
import shutil
import subprocess
from pathlib import Path

import demo_folder
import pytest
from demo_files import DEMO

from dflashdist.config import InputError
from dflashdist.files import hold

ROOT = DEMO.parents[1]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def finished(tmp_path) -> Path:
    """The folder of a demo that has ended."""
    folder = demo_folder.claim([f"run.dir={tmp_path / 'run'}"])
    fill(folder)
    return folder


def fill(folder: Path) -> None:
    for name in ("checkpoints/step_00000100/model.safetensors", "tb/events", "store/meta.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("of value")


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    fill(tmp_path / "mine")
    before = contents(tmp_path / "mine")
    with pytest.raises(InputError, match=r"run\.dir=.*/mine: holds what no demo made"):
        demo_folder.claim([f"run.dir={tmp_path / 'mine'}"])
    with pytest.raises(InputError, match="no demo made it"):
        demo_folder.clear(tmp_path / "mine")
    assert contents(tmp_path / "mine") == before
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        demo_folder.claim([f"run.dir={tmp_path / 'file'}"])


def test_only_what_was_trained_is_cleared(finished):
    assert demo_folder.claim([f"run.dir={finished}"]) == finished
    assert "checkpoints/step_00000100/model.safetensors" in contents(finished)
    demo_folder.clear(finished)
    assert contents(finished) == {demo_folder.MARK, ".lock", "store/meta.json"}


def test_a_copied_or_renamed_folder_is_its_owner_s(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    with pytest.raises(InputError, match="no demo made"):
        demo_folder.claim([f"run.dir={tmp_path / 'copy'}"])
    kept = finished.rename(tmp_path / "kept")
    with pytest.raises(InputError, match="no demo made"):
        demo_folder.claim([f"run.dir={kept}"])


def test_a_running_demo_is_not_cleared(finished):
    before = contents(finished) | {".lock"}
    with (
        hold(finished / ".lock", "run", "trains"),
        pytest.raises(InputError, match=r"process \d+ on \S+ trains in it; wait for its end"),
    ):
        demo_folder.clear(finished)
    assert contents(finished) == before


def demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    """launch/demo.sh in this environment, which has all that it would install."""
    environment = tmp_path / "environment"
    environment.mkdir()
    files = [ROOT / "pyproject.toml", ROOT / "launch/constraints.txt"]
    text = b"".join(file.read_bytes() for file in files) + f"{ROOT}\n".encode()
    stamp = subprocess.run(["cksum"], input=text, capture_output=True, check=True).stdout
    (environment / f".dflashdist-{stamp.decode().strip().replace(' ', '-')}").touch()
    return subprocess.run(
        ["bash", str(ROOT / "launch/demo.sh"), *arguments], capture_output=True, text=True,
        env=os.environ | {"VIRTUAL_ENV": str(environment), "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["train.max_stepz=5"], "demo: train.max_stepz=5: unknown key"),
        (["train.max_steps=5", "--regenrate"], "demo: '--regenrate': an override is key=value"),
        (["data.store=mine"], "demo: data.store=mine: the demo makes its own store"),
        (["schedule.max_tokens=16"], "dflashdist plan: schedule.max_tokens=16: row 1752 has 244"),
    ],
)
def test_what_is_not_accepted_removes_nothing(finished, tmp_path, arguments, error):
    """Wherever it is found: by the shell, the configuration, or the plan."""
    shutil.rmtree(finished / "store")
    before = contents(finished)
    result = demo(tmp_path, *arguments, f"run.dir={finished}")
    assert result.returncode == 2 and result.stderr.startswith(error), result.stderr
    assert result.stderr.count("\n") == 1 and before <= contents(finished)


def test_help_needs_nothing_and_may_stand_anywhere(tmp_path):
    result = subprocess.run(
        ["bash", str(ROOT / "launch/demo.sh"), "run.dir=x", "--help"], capture_output=True,
        text=True, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0 and "--regenerate" in result.stdout and not result.stderr
