"""What every rank of a training job knows before it joins, refused here when it cannot work.

Reads the configuration, the token store's index, the target's config.json and the checkpoint's
facts; no weight of any model, and no other rank.
"""

import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import dflashdist
from dflashdist.checks import least_share, needs_last
from dflashdist.cluster.roles import Roles, assign_roles
from dflashdist.cluster.transport import MessageSpec
from dflashdist.cluster.world import Place
from dflashdist.config import (
    Config,
    InputError,
    LossConfig,
    changed_settings,
    dump_config,
    queue_depth,
)
from dflashdist.data.shards import TokenStore
from dflashdist.model.blocks import default_gamma
from dflashdist.model.drafter import num_drafts
from dflashdist.model.initial import check_initial
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import check_plain_logits, read_target_config, target_fingerprint
from dflashdist.schedule.plan import Plan, Steps
from dflashdist.schedule.stream import EVALUATION, Stream
from dflashdist.train.checkpoint import Checkpoints, check_facts, read_facts
from dflashdist.train.evaluation import Best, open_held_out, round_metrics
from dflashdist.train.gates import Gates
from dflashdist.train.metrics import step_metrics
from dflashdist.train.sources import Rows


class Blueprint:
    """What every rank knows before it joins; the same on all of them. Raises InputError."""

    def __init__(self, config: Config, place: Place, damaged: dict[str, str] | None = None) -> None:
        """`damaged`: checkpoints that rank 0 has found to be, and how."""
        if not config.data.store:
            raise InputError(
                "data.store is not set: name the folder that `dflashdist prepare` wrote"
            )
        if not config.target.path:
            raise InputError("target.path is not set: name the frozen model's folder or hub name")
        self.config, self.place = config, place
        self.roles: Roles = assign_roles(
            config.roles, config.target.tensor_parallel, place.world_size
        )
        self.store = TokenStore.open(config.data.store)
        longest = int(self.store.lengths.max())
        if longest > config.data.max_length:
            raise InputError(
                f"data.max_length={config.data.max_length}: {config.data.store} has rows of up to "
                f"{longest} tokens; prepare it again with this length, or raise it"
            )
        target_config = read_target_config(config.target.path, config.target.revision)
        self.shape = DrafterShape.from_target(
            target_config, self.store.meta["tokenizer_length"], config.drafter
        )
        self.target = target_fingerprint(config.target.path, config.target.revision)
        self.with_last = needs_last(config.loss, config.drafter)
        self.num_states = self.shape.num_features + self.with_last  # of H numbers a token
        if self.with_last:
            check_plain_logits(target_config)
        self.plan = Plan(
            self.store.lengths,
            self.store.supervised,
            config.schedule,
            num_anchors=config.drafter.num_anchors,
            block_size=config.drafter.block_size,
            seed=config.seed,
            min_share=least_share(
                config.schedule, self.roles.num_drafters * config.train.accumulation_steps
            ),
            store=self.store.fingerprint,
        )
        self.steps = Steps(
            self.plan,
            num_drafters=self.roles.num_drafters,
            accumulation=config.train.accumulation_steps,
            num_steps=config.train.max_steps,
            epochs=config.train.epochs,
        )
        held_out, rounds = None, None
        if config.evaluate.every is not None:
            held_out, rounds = open_held_out(config, self.store, self.plan)
        self.stream = Stream(self.steps, rounds)
        self.gates = Gates(config.gates, self.metrics())
        self.notes = self.gates.idle(self.steps.num_steps)
        self.measured_on: str | None = None  # what a round's numbers depend on, beside the weights
        if held_out and rounds:
            self.measured_on = f"{rounds.plan.fingerprint}/{config.evaluate.max_new_tokens}"
            if held_out.fingerprint == self.store.fingerprint:
                self.notes.append("evaluate.store holds the rows that are trained on")
        self.depth = queue_depth(config.pipeline, self.steps.window, self.roles.num_targets)
        self.rows = Rows(self.stream, self.store, held_out, self.store.meta["pad_id"])
        self.folder = Path(config.run.dir)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint, damaged)
        self.resume = self.checkpoints.choose(config.train.resume, place.attempt > 0)
        self.saved: dict[str, Any] = {}
        self.changes: list[str] = []  # of the configuration, since the checkpoint
        if self.resume:
            self.saved = read_facts(self.resume)
            check_facts(self.saved, self.facts(), self.resume)
            self.changes = changed_settings(self.saved["config"], config)
            check_beginning(self.changes, self.resume)
        self.first_step: int = self.saved.get("step", 0)
        cursor = self.saved.get("cursor", self.first_seq)
        if cursor < min(self.first_seq, self.steps.end):
            raise InputError(
                f"{self.resume}: its last step ended with the run at seq {cursor}; going on would "
                f"leave out seqs {cursor} to {self.first_seq - 1}; resume from the one before it"
            )
        owed = self.saved.get("evaluated") != self.first_step
        self.round_first = owed and self.stream.due(self.first_step)  # before the first step
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
        if self.measured_on in (None, best.measured_on):
            return best if here or not self.config.evaluate.keep_best else None
        if here:
            self.checkpoints.kept.add(best.step)
            self.notes.append(
                f"the best so far ({best.acceptance_length:.3f}, step {best.step}) was measured on "
                "other rows or lengths of answers: it is compared with no other, and stays"
            )
        return None

    def metrics(self) -> set[str]:
        """The names of all metrics that all drafters know."""
        drafts = num_drafts(self.shape)
        names = step_metrics(drafts + 1, self.plan.edges)
        if self.stream.rounds:
            averaged = self.config.optim.ema is not None
            names |= round_metrics(self.stream.rounds, drafts, averaged)
        return names

    def facts(self) -> dict[str, Any]:
        """What a checkpoint records, and what resuming holds it to."""
        return {
            "fingerprint": self.plan.fingerprint,
            "fingerprint_parts": self.plan.fingerprint_parts,
            "store_fingerprint": self.store.fingerprint,
            "rendering": self._rendering(),
            "window": self.steps.window,
            "drafter": self.shape.facts(),
            "target": self.target,
            "target_dtype": self.config.target.dtype,
            "seed": self.config.seed,
            "optimizer": self.config.optim.kind,
            "objective": objective(self.config.loss, self.shape),
        }

    def _rendering(self) -> dict[str, Any] | None:
        """How the store's conversations became text, where it says so."""
        meta = self.store.meta
        return meta["rendering"] | {"template": meta["template"]} if "rendering" in meta else None

    def agreement(self) -> dict[str, str]:
        """What must be alike on all ranks."""
        return {
            "dflashdist version": dflashdist.__version__,
            "plan fingerprint": self.plan.fingerprint,
            "token store": self.store.fingerprint,
            "configuration": dump_config(self.config),
            "checkpoint to resume from": str(self.first_step),
            "rows of evaluation": str(self.measured_on),
            "best checkpoint": str(self.best),
        }

    def spec_of(self, seq: int, dtype: torch.dtype) -> MessageSpec:
        """The message of a micro-batch, known from the plan alone."""
        tokens = self.stream.micro_batch(seq).num_tokens
        return MessageSpec(seq, tokens, self.num_states, self.shape.hidden_size, dtype)

    def seqs(self) -> Iterator[int]:
        """The seqs of this start of the job, in the order in which they are published."""
        return self.stream.seqs(self.first_step, self.round_first)

    def num_messages(self, drafter: int) -> int:
        """How many of them this drafter computes."""
        return self.stream.num_messages(drafter, self.first_step, self.round_first)

    @property
    def anchors_per_window(self) -> float:
        """Planned anchors of a step, over all drafters; the same for any D with W held."""
        anchors = float(self.plan.epoch(0).num_anchors.mean())
        return anchors * self.steps.window

    def kind_of(self, seq: int) -> tuple[bool, int]:
        """What tells shapes of micro-batches apart: the stream's part, and the bucket."""
        return seq < EVALUATION, self.stream.micro_batch(seq).bucket

    @property
    def first_seq(self) -> int:
        return self.first_step * self.steps.window


def check_beginning(changes: list[str], resume: Path) -> None:
    """Refuse to go on with first weights that the run did not begin with: they would not be read.
    Raises InputError."""
    for change in changes:
        if change.startswith(("drafter.init:", "drafter.init_from:")):
            raise InputError(
                f"{change}: {resume} goes on with weights of its own; take another run.dir"
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


def target_dtype(name: str, device: torch.device) -> torch.dtype:
    """The target's dtype, and so that of the hidden states: auto is bfloat16 on CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def check_tokenizer(blueprint: Blueprint) -> None:
    """Hold that the store was made with the target's own tokenizer, and its template if it says so.

    A store rendered by a template's file is held to the tokenizer alone. Raises InputError.
    """
    from dflashdist.data.chat import OWN
    from dflashdist.data.tokenizer import TargetTokenizer, template_digest

    config, meta = blueprint.config, blueprint.store.meta
    assert config.target.path is not None
    target = TargetTokenizer.read(config.target.path, config.target.revision)
    differs = None
    if target.fingerprint != meta["tokenizer_fingerprint"]:
        differs = "tokenizer"
    elif meta.get("template") == OWN:
        found = template_digest(target.templates) if target.templates else None
        differs = "chat template" if found != meta["rendering"]["template_sha256"] else None
    if differs:
        raise InputError(
            f"{config.data.store}: made with another {differs} (of {meta['target']}) than "
            f"{config.target.path} has; prepare anew with --target {config.target.path}"
        )


def check_first_weights(blueprint: Blueprint) -> None:
    """Hold that the first weights will fit, where a run begins with them. Raises InputError."""
    target = blueprint.config.target
    assert target.path is not None
    if blueprint.resume is None:
        check_initial(blueprint.shape, blueprint.config.drafter, target.path, target.revision)


def versions() -> dict[str, str]:
    """What ran, for checkpoints and the run folder."""
    names = ("dflashdist", "torch", "transformers", "numpy", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in names}
