"""Checkpoints: a loadable drafter folder beside the state that continues training exactly.

    checkpoints/step_00001000/
      config.json, model.safetensors   the drafter, in `checkpoint.dtype`: what serving engines load
      trainer/weights.safetensors      the same in float32
      trainer/optimizer.pt             the optimizer's state, read back with weights_only
      trainer/state.json               step, cursor, plan fingerprint, seed, config, versions
      ema/config.json, ema/model.safetensors, trainer/ema.safetensors
                                       with optim.ema: the averaged weights, likewise
    checkpoints/best -> step_00000500  the checkpoint of the best round of evaluation

Written aside, synced to disk, renamed: what carries the name is complete. What a disk or a copy
does to it later is found: trainer/state.json has each file's size and checksum, and its own.
"""

import json
import logging
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflashdist.config import CheckpointConfig, InputError
from dflashdist.files import OLD, new_folder, put_in_place, remove, restore
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import AVERAGE, save_drafter, save_tensors
from dflashdist.train.optim import Optimizer, WeightAverage

log = logging.getLogger(__name__)

SAME = {  # what must not change between a checkpoint and its continuation, and how to mend it
    "store_fingerprint": "point data.store at the store it was made with",
    "window": "keep drafters x train.accumulation_steps",
    "drafter": "restore the drafter section",
    "target": "point target.path at the model that it was trained for",
    "target_dtype": "restore target.dtype",
}
LATER = {  # the same, where older checkpoints do not say
    "optimizer": "restore optim.kind",
    "objective": "restore the loss section",
}
OLDER = {"optimizer": "adamw"}  # and what they mean then
STATE = "trainer/state.json"
CHUNK = 1 << 26  # bytes that are summed at a time
NAME = re.compile(r"step_(\d{8,})")


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, damaged: dict[str, str] | None = None
    ) -> None:
        """`damaged`: paths of checkpoints not to begin from, and why, beside those whose files have
        other sizes than were saved."""
        self.folder, self._config, self._damaged = folder, config, damaged or {}
        self.passed_over: list[str] = []  # what is wrong with checkpoints newer than the chosen one
        self.best: int | None = None  # the step of the best round so far; its checkpoint is kept
        self.kept: set[int] = set()  # steps of others that are

    def place(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step_{step:08d}"

    def steps(self) -> dict[int, Path]:
        """The checkpoints that have a state, by step, ascending."""
        return {step: path for step, path in self._named().items() if (path / STATE).is_file()}

    def _named(self) -> dict[int, Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        found = {int(match[1]): path for path in paths if (match := NAME.fullmatch(path.name))}
        return dict(sorted(found.items()))

    def choose(self, resume: str, restarted: bool = False) -> Path | None:
        """The checkpoint that `train.resume` means; None starts anew. The newest counts that is not
        damaged; `passed_over` names the others.

        `restarted`: torchrun started this job again after a failure, so what this run itself has
        saved meanwhile goes before what it was told to start from.

        Raises InputError where a named one is not there or damaged, where all are, or where two
        runs would mix.
        """
        self.recover()
        steps = self.steps()
        newest = list(steps.values())[-1] if steps else None
        if resume == "auto" or (restarted and newest):
            return self._newest_whole()
        if resume == "none":
            if newest:
                raise InputError(
                    f"train.resume=none: {self.folder} holds {len(steps)} checkpoints of another "
                    "run; take another run.dir, delete them, or use train.resume=auto"
                )
            return None
        path = Path(resume)
        if not (path / STATE).is_file():
            raise InputError(f"train.resume={resume}: no complete checkpoint (trainer/state.json)")
        if newest and newest.resolve() != path.resolve():
            raise InputError(
                f"train.resume={resume}: {self.folder} holds others up to {newest.name}, which "
                "later starts would take for this run's; delete them, or take another run.dir"
            )
        if found := self._damage(path):
            raise InputError(f"train.resume={resume}: {found}")
        return path

    def _newest_whole(self) -> Path | None:
        for path in reversed(self._named().values()):
            if not (found := self._damage(path)):
                return path
            self.passed_over.append(found)
        if self.passed_over:
            raise InputError(
                f"{self.passed_over[0]}; and no checkpoint before it is whole: delete it to start "
                "anew, or take another run.dir"
            )
        return None

    def _damage(self, path: Path) -> str:
        return self._damaged.get(str(path)) or damage(path)

    def recover(self) -> None:
        """Give back its name to a checkpoint that a kill, while its step was saved again, left
        without. All ranks may do so at once."""
        for old in self.folder.glob(f".*{OLD}"):
            restore(self.folder / old.name.removeprefix(".").removesuffix(OLD))

    def save(
        self,
        step: int,
        drafter: Drafter,
        optimizer: Optimizer,
        facts: dict[str, Any],
        average: WeightAverage | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, then drop the ones that need not be kept."""
        place = self.place(step)
        aside = new_folder(place)
        (aside / "trainer").mkdir()
        save_drafter(aside, drafter, self._config.dtype)
        save_float32(drafter, aside / "trainer/weights.safetensors")
        if average:
            save_drafter(aside / AVERAGE, average.drafter, self._config.dtype)
            save_float32(average.drafter, aside / "trainer/ema.safetensors")
        torch.save(optimizer.state_dict(), aside / "trainer/optimizer.pt")
        write_state(aside, facts | {"step": step})
        put_in_place(aside, place)  # over that of a run that passed this step before
        self.link_best()
        self.prune(facts)
        return place

    def link_best(self) -> None:
        """Let `best` lead to the best checkpoint, where there is one."""
        if self.best is None or not self.place(self.best).is_dir():
            return
        aside = self.folder / ".best.partial"
        try:
            aside.unlink(missing_ok=True)
            aside.symlink_to(self.place(self.best).name)
            aside.replace(self.folder / "best")
        except OSError as error:  # a file system without links; trainer/state.json says it as well
            log.warning("%s: no link to the best checkpoint (%s)", self.folder, error)

    def prune(self, facts: dict[str, Any]) -> None:
        """Keep the last n, every m-th and the best; remove what a killed run left unfinished.
        `facts`: of this run; a checkpoint of another one, which somebody put here, stays."""
        steps, kept = self.steps(), {self.best, *self.kept}
        every = self._config.keep_every
        for step in list(steps)[: -self._config.keep_last]:
            if step and step not in kept and not (every and step % every == 0):
                with suppress(InputError):  # one that cannot be read is whoever's
                    state = read_facts(steps[step])
                    if all(state[name] == facts[name] for name in ("fingerprint", *SAME)):
                        remove(steps[step])
        for path in self.folder.glob(".step_*.partial"):
            remove(path)


def save_float32(drafter: Drafter, file: Path) -> None:
    """All of a drafter's weights in float32, as training holds them."""
    weights = {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_tensors(weights, file)


def write_state(folder: Path, facts: dict[str, Any]) -> None:
    """trainer/state.json beside the files of a checkpoint, with their sizes and checksums."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = {str(path.relative_to(folder)): [path.stat().st_size, checksum(path)] for path in files}
    state = json.loads(json.dumps(facts | {"files": sums}))  # as it will be read
    state["checksum"] = own_checksum(state)
    (folder / STATE).write_text(json.dumps(state, indent=1))


def own_checksum(state: dict[str, Any]) -> int:
    """CRC-32 of a state without its checksum, however it is laid out in the file."""
    told = {name: value for name, value in state.items() if name != "checksum"}
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


def checksum(file: Path) -> int:
    """CRC-32 of the CRC-32s of a file's chunks, which several threads compute: 1.1 GB/s each."""

    def part(start: int) -> bytes:
        with open(file, "rb") as opened:
            opened.seek(start)
            return zlib.crc32(opened.read(CHUNK)).to_bytes(4, "little")

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return zlib.crc32(b"".join(threads.map(part, range(0, file.stat().st_size, CHUNK))))


def damage(checkpoint: Path, contents: bool = False) -> str:
    """What is wrong with a checkpoint's files, in words; empty if nothing is. `contents`: read them
    all, else their sizes alone count."""
    try:
        files = read_facts(checkpoint).get("files", {})
    except InputError as error:
        return str(error)
    for name, (size, sum_saved) in files.items():
        file = checkpoint / name
        try:
            found = file.stat().st_size
            if found != size:
                return f"{file}: has {found:,} bytes, and {size:,} were saved"
            if contents and checksum(file) != sum_saved:
                return f"{file}: holds something else than was saved (its checksum differs)"
        except OSError as error:
            return f"{file}: cannot be read ({error.strerror})"
    return ""


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """trainer/state.json of a checkpoint. Raises InputError if it cannot be read."""
    file = checkpoint / STATE
    try:
        facts = json.loads(file.read_text())
        if not isinstance(facts, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not a checkpoint's state ({error})") from error
    missing = {"step", "config", "fingerprint", "fingerprint_parts", *SAME} - facts.keys()
    if missing:
        raise InputError(f"{file}: not a checkpoint's state (no {', '.join(sorted(missing))})")
    if facts.keys() & {"files", "checksum"} and facts.get("checksum") != own_checksum(facts):
        raise InputError(f"{file}: is not as it was saved (its checksum differs)")
    return facts


def check_facts(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Refuse to continue what would not be the same run: another plan, data, window, drafter,
    optimizer or objective. Raises InputError."""
    # Another store or window has another plan, and says more.
    if all(saved[name] == now[name] for name in ("store_fingerprint", "window")):
        _check_plan(saved, now, checkpoint)
    for name, fix in SAME.items():
        if saved[name] != now[name]:
            before, after = differing(saved[name], now[name])
            raise InputError(f"{checkpoint}: {name} was {before} and is {after}; {fix}")
    for name, fix in LATER.items():
        before = saved.get(name, OLDER.get(name, now[name]))
        if before != now[name]:
            before, after = differing(before, now[name])
            raise InputError(
                f"{checkpoint}: {name} was {before} and is {after}; {fix}, or start anew "
                "from these weights with drafter.init_from in another run.dir"
            )


def differing(before: Any, after: Any) -> tuple[Any, Any]:
    """Of two dictionaries the entries that differ; what one lacks is a default. Else both."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return before, after
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    left, right = ({key: one.get(key, "default") for key in keys} for one in (before, after))
    return left, right


def _check_plan(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    if saved["fingerprint"] != now["fingerprint"]:
        before, after = saved["fingerprint_parts"], now["fingerprint_parts"]
        differing = [
            f"{name} {before.get(name)} -> {after.get(name)}"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
        raise InputError(
            f"{checkpoint}: made with another plan ({'; '.join(differing)}); restore what differs, "
            "or start anew in another run.dir"
        )


def load_training(
    checkpoint: Path,
    drafter: Drafter,
    optimizer: Optimizer,
    device: torch.device,
    average: WeightAverage | None = None,
) -> None:
    """Restore float32 weights, their average and the optimizer's state, exactly.

    An average that the checkpoint does not have begins with its weights. Raises InputError naming a
    file that cannot be read.
    """
    file = checkpoint / "trainer/weights.safetensors"
    try:
        drafter.load_state_dict(load_file(file, device=str(device)))
        if average:
            file = checkpoint / "trainer/ema.safetensors"
            if file.is_file():
                average.drafter.load_state_dict(load_file(file, device=str(device)))
            else:
                average.restart()
                log.warning("%s has no average of the weights: it begins here", checkpoint)
        file = checkpoint / "trainer/optimizer.pt"
        settings = [{**group, "params": None} for group in optimizer.param_groups]
        optimizer.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{file}: cannot be read ({reason}); delete this checkpoint's folder to go on from the "
            "one before"
        ) from error
