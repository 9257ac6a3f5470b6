"""What the tests of exports share beside fixtures."""

import json
from pathlib import Path

from dflashdist.export.folder import export_drafter

RENDERING = {
    "template": "own", "template_sha256": "ab12", "settings": {"enable_thinking": False},
    "date": None,
}  # fmt: skip


def change_state(checkpoint: Path, **changes: object) -> None:
    """Write other values into a checkpoint's state."""
    file = checkpoint / "trainer/state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


def python_of(folder: Path) -> str:
    """The Python of a model card."""
    return card_of(folder).split("```python\n")[1].split("```")[0]


def card_with(report: dict | list, checkpoint: Path, out: Path, **options) -> str:
    """The card of an export with this report."""
    file = out.with_suffix(".json")
    file.write_text(json.dumps(report))
    return card_of(export_drafter(checkpoint, out, report=file, **options))
