"""Where a start of the job begins: at nothing, or at a checkpoint of the same run."""

import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dflashdist
from dflashdist.cluster.world import Place
from dflashdist.config import InputError, LossConfig, changed_settings, dump_config
from dflashdist.model.blocks import default_gamma
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import target_fingerprint
from dflashdist.train.checkpoint import Checkpoints, check_facts, damage, read_facts
from dflashdist.train.evaluation import Best
from dflashdist.train.job import TrainingJob


class Start:
    """The checkpoint that this start of the job goes on from, if any. Raises InputError."""

    def __init__(
        self, job: TrainingJob, place: Place, damaged: dict[str, str] | None = None
    ) -> None:
        """`damaged`: checkpoints that rank 0 has found to be, and how."""
        config = job.config
        self.job, self.place = job, place
        self.folder = Path(config.run.dir)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint, damaged)
        self.checkpoint = self.checkpoints.choose(config.train.resume, place.attempt > 0)
        self._target = target_fingerprint(str(config.target.path), config.target.revision)
        self.notes: list[str] = []  # what to tell the user of the checkpoint
        self.saved: dict[str, Any] = {}
        self.changes: list[str] = []  # of the configuration, since the checkpoint
        if self.checkpoint:
            self.saved = read_facts(self.checkpoint)
            check_facts(self.saved, self.facts(), self.checkpoint)
            self.changes = changed_settings(self.saved["config"], config)
            check_beginning(self.changes, self.checkpoint)
        self.step: int = self.saved.get("step", 0)  # the first to run
        first_seq = self.step * job.steps.window
        cursor = self.saved.get("cursor", first_seq)
        if cursor < min(first_seq, job.steps.end):
            raise InputError(
                f"{self.checkpoint}: its last step ended with the run at seq {cursor}; going on "
                f"would leave out seqs {cursor} to {first_seq - 1}; resume from the one before it"
            )
        owed = self.saved.get("evaluated") != self.step
        self.round_first = owed and job.stream.due(self.step)  # before the first step
        self.checkpoints.kept = set(self.saved.get("kept", []))
        self.best = self._saved_best()
        if self.best and config.evaluate.keep_best:
            self.checkpoints.best = self.best.step

    def _saved_best(self) -> Best | None:
        """The best round that the checkpoint knows of. Where this run measures something else, so
        that its rounds do not compare, the checkpoint of the old best is kept beside the new one.
        """
        if not self.saved.get("best"):
            return None
        best = Best(**{"measured_on": "", **self.saved["best"]})
        here = self.checkpoints.place(best.step).is_dir()
        if self.job.measured_on in (None, best.measured_on):
            return best if here or not self.job.config.evaluate.keep_best else None
        if here:
            self.checkpoints.kept.add(best.step)
            self.notes.append(
                f"the best so far ({best.acceptance_length:.3f}, step {best.step}) was measured on "
                "other rows or lengths of answers: it is compared with no other, and stays"
            )
        return None

    def facts(self) -> dict[str, Any]:
        """What a checkpoint records, and what resuming holds it to."""
        job = self.job
        config, meta = job.config, job.store.meta
        rendering = None  # how the store's conversations became text, where it says so
        if "rendering" in meta:
            rendering = meta["rendering"] | {"template": meta["template"]}
        return {
            "fingerprint": job.plan.fingerprint,
            "fingerprint_parts": job.plan.fingerprint_parts,
            "store_fingerprint": job.store.fingerprint,
            "rendering": rendering,
            "window": job.steps.window,
            "drafter": job.shape.facts(),
            "target": self._target,
            "target_dtype": config.target.dtype,
            "seed": config.seed,
            "optimizer": config.optim.kind,
            "objective": objective(config.loss, job.shape),
        }

    def agreement(self) -> dict[str, str]:
        """What must be alike on all ranks."""
        return {
            "dflashdist version": dflashdist.__version__,
            "plan fingerprint": self.job.plan.fingerprint,
            "token store": self.job.store.fingerprint,
            "configuration": dump_config(self.job.config),
            "checkpoint to resume from": str(self.step),
            "rows of evaluation": str(self.job.measured_on),
            "best checkpoint": str(self.best),
        }

    def seqs(self) -> Iterator[int]:
        """The seqs of this start of the job, in the order in which they are published."""
        return self.job.stream.seqs(self.step, self.round_first)

    def num_messages(self, drafter: int) -> int:
        """How many of them this drafter computes."""
        return self.job.stream.num_messages(drafter, self.step, self.round_first)


def begin_whole(start: Start) -> tuple[Start, dict[str, str]]:
    """The start from the newest checkpoint whose files, all read, are as they were saved; and what
    is wrong with newer ones, by path."""
    damaged: dict[str, str] = {}
    while start.checkpoint and (found := damage(start.checkpoint, contents=True)):
        damaged[str(start.checkpoint)] = found
        start = Start(start.job, start.place, damaged)
    return start, damaged


def check_beginning(changes: list[str], checkpoint: Path) -> None:
    """Refuse to go on with first weights that the run did not begin with: they would not be read.
    Raises InputError."""
    for change in changes:
        if change.startswith(("drafter.init:", "drafter.init_from:")):
            raise InputError(
                f"{change}: {checkpoint} goes on with weights of its own; take another run.dir"
            )


def objective(loss: LossConfig, shape: DrafterShape) -> dict[str, Any]:
    """What is minimised: the settings of the loss that have an effect and are not the default."""
    idle = {"chunk_size"}  # it says how, not what
    by_distance = loss.weights == "decay" or (loss.weights == "dpace" and shape.confidence_head)
    if not by_distance or loss.gamma == default_gamma(shape.block_size + shape.ahead):
        idle.add("gamma")
    idle |= {"dpace_alpha", "dpace_by"} if loss.weights != "dpace" else set()
    idle |= {"selector"} if shape.variant != "dflash2" else set()
    idle |= {"confidence"} if not shape.confidence_head else set()
    default, values = asdict(LossConfig()), asdict(loss)
    values["terms"] = {name: share for name, share in sorted(loss.terms.items()) if share > 0}
    return {k: v for k, v in values.items() if k not in idle and v != default[k]}


def versions() -> dict[str, str]:
    """What ran, for checkpoints and the run folder."""
    names = ("dflashdist", "torch", "transformers", "numpy", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in names}
