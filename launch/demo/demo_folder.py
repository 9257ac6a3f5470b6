"""The folder of a demo's run: nothing that the demo did not make is ever removed.

    python launch/demo/demo_folder.py claim [KEY=VALUE ...]    makes and marks it; prints its name
    python launch/demo/demo_folder.py clear FOLDER             removes what the demo before trained

A folder that holds anything and lacks the mark is refused. The mark names the folder, so that a
copy or a renamed one is no longer the demo's.
"""

import sys
from pathlib import Path

from dflashdist.config import InputError, load_config
from dflashdist.files import hold, remove

CONF = "conf/demo.yaml"
MARK = ".made-by-the-demo"
TRAINED = ("checkpoints", "tb", "logs", "eval")


def is_marked(folder: Path) -> bool:
    """Whether a demo has made this folder."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text() == f"{folder.resolve()}\n"


def claim(overrides: list[str]) -> Path:
    """The run folder of a demo with these overrides, marked.

    Raises InputError for what the configuration refuses, and for a folder of somebody else.
    """
    folder = Path(load_config(CONF, overrides).run.dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run.dir={folder}: is a file")
    if folder.is_dir() and any(folder.iterdir()) and not is_marked(folder):
        raise InputError(
            f"run.dir={folder}: holds what no demo made, and a demo starts anew; name another one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(f"{folder.resolve()}\n")
    return folder


def clear(folder: Path) -> None:
    """Remove what the demo before has trained here. Raises InputError where it is still at it, or
    where no demo was."""
    if not is_marked(folder):
        raise InputError(f"{folder}: no demo made it")
    with hold(folder / ".lock", f"run.dir={folder}", "trains in it; wait for its end"):
        for name in TRAINED:
            remove(folder / name)


def main() -> None:
    """Command line: see the module."""
    try:
        match sys.argv[1:]:
            case ["claim", *overrides]:
                print(claim(overrides))
            case ["clear", folder]:
                clear(Path(folder))
            case _:
                raise InputError("claim [KEY=VALUE ...], or clear FOLDER")
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
