"""Reading what a run left: weights, losses, the trace."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The float32 weights of a checkpoint."""
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / "trainer/weights.safetensors")


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, from the tensorboard files."""
    return scalars(folder)["loss"]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value, of all that tensorboard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    shown = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        shown[name] = {point.step: point.value for point in points}
        assert len(shown[name]) == len(points), f"{name}: a step is shown twice"
    return shown


def trace(folder: Path, event: str) -> list[dict]:
    """The events of this name of all ranks, by time; a line cut short by a kill is left out."""
    facts = []
    for file in sorted((folder / "logs").glob("trace_rank*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                facts.append(json.loads(line) | {"rank": int(file.stem[10:])})
            except ValueError:
                continue
    return sorted((fact for fact in facts if fact["event"] == event), key=lambda fact: fact["ns"])


def slots(folder: Path) -> dict[int, tuple]:
    """seq -> (step, drafter, rows), as last trained on."""
    return {f["seq"]: (f["step"], f["rank"], tuple(f["rows"])) for f in trace(folder, "slot")}


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
