"""Where the demo's target and conversations lie."""

from pathlib import Path

DEMO = Path(__file__).parents[1] / "launch/demo"
TARGET = DEMO / "target"
