"""The training job, worked out from its configuration: what `plan` prints and `train` runs.

Roles, plan, steps, rounds of evaluation, the size of messages, and what is refused. Reads the token
store's index and the target's config.json; no weight of any model, no torch, no other rank.
`check_tokens` also reads the tokenizer and the rows, so one rank does it for all.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dflashdist.checks import least_share, needs_last
from dflashdist.cluster.roles import Roles, assign_roles
from dflashdist.config import AUTO, Config, InputError, queue_depth, states_dtype
from dflashdist.data.chat import OWN
from dflashdist.data.shards import TokenStore
from dflashdist.data.tokenizer import TargetTokenizer, template_digest
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import check_plain_logits, read_target_config
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.report import plan_report, read_lengths
from dflashdist.schedule.stream import EVALUATION, Rounds, Steps, Stream
from dflashdist.train.gates import Gates, round_metrics, step_metrics


class TrainingJob:
    """The same on every rank. Raises InputError.

    world_size: ranks of the job; None: as many as `roles` names. planning: nothing is trained yet,
    so a file of lengths (`data.lengths`) may stand for the token store, and the target be unknown.
    """

    def __init__(self, config: Config, world_size: int | None, planning: bool = False) -> None:
        self.config = config
        self.notes: list[str] = []  # what to tell the user of a job that may start
        from_lengths = planning and config.data.lengths
        if not config.data.store and not from_lengths:
            raise InputError(
                "data.store is not set: name the folder that `dflashdist prepare` wrote (to plan "
                "before preparing, a file of lengths as data.lengths)"
            )
        if not config.target.path and not planning:
            raise InputError("target.path is not set: name the frozen model's folder or hub name")
        self.roles: Roles = assign_roles(config.roles, config.target.tensor_parallel, world_size)
        self.store_if_any = None if from_lengths else TokenStore.open(str(config.data.store))
        self.shape_if_known = self._read_shape() if config.target.path else None
        self.plan = self._make_plan()
        self.steps = Steps(
            self.plan,
            num_drafters=self.roles.num_drafters,
            accumulation=config.train.accumulation_steps,
            num_steps=config.train.max_steps,
            epochs=config.train.epochs,
        )
        self.held_out, rounds = None, None
        if config.evaluate.every is not None and self.store_if_any:
            self.held_out, rounds = open_held_out(config, self.store_if_any, self.plan)
            if self.held_out.fingerprint == self.store_if_any.fingerprint:
                self.notes.append("evaluate.store holds the rows that are trained on")
        elif config.evaluate.every is not None:
            self.notes.append("rounds of evaluation are not planned: data.lengths has no such rows")
        self.stream = Stream(self.steps, rounds)
        self.gates = self._make_gates()
        self.depth = queue_depth(config.pipeline, self.steps.window, self.roles.num_targets)
        self._note_plan()

    @property
    def store(self) -> TokenStore:
        """The rows that are trained on."""
        assert self.store_if_any is not None, "a plan from lengths has no store"
        return self.store_if_any

    @property
    def shape(self) -> DrafterShape:
        """The drafter's shape."""
        assert self.shape_if_known is not None, "a plan without a target has no shape"
        return self.shape_if_known

    @property
    def window(self) -> int:
        """W, micro-batches of a step."""
        return self.roles.num_drafters * self.config.train.accumulation_steps

    @property
    def with_last(self) -> bool:
        """Whether the target's last normed state is sent beside the tapped layers'."""
        return needs_last(self.config.loss, self.config.drafter)

    @property
    def num_states(self) -> int:
        """States of H numbers that are sent of a token."""
        drafter = self.config.drafter
        tapped = drafter.num_features if drafter.target_layer_ids is None else len(
            drafter.target_layer_ids
        )  # fmt: skip
        return tapped + self.with_last

    @property
    def measured_on(self) -> str | None:
        """What a round's numbers depend on, beside the weights; None without rounds."""
        rounds = self.stream.rounds
        if rounds is None:
            return None
        return f"{rounds.plan.fingerprint}/{self.config.evaluate.max_new_tokens}"

    @cached_property
    def anchors_per_window(self) -> float:
        """Planned anchors of a step, over all drafters; the same for any D with W held."""
        return float(self.plan.epoch(0).num_anchors.mean()) * self.steps.window

    def kind_of(self, seq: int) -> tuple[bool, int]:
        """What tells shapes of micro-batches apart: the stream's part, and the bucket."""
        return seq < EVALUATION, self.stream.micro_batch(seq).bucket

    def warms_up(self, device: str) -> bool:
        """Whether the widest micro-batches are run before the first step."""
        wanted = self.config.train.warm_up_widest
        return wanted == "always" or (wanted == AUTO and device == "cuda")

    def widest(self) -> list[int]:
        """The seqs of the first epoch with the most padded tokens and the most padded anchors."""
        epoch = self.plan.epoch(0)
        return sorted({int(epoch.padded_tokens.argmax()), int(epoch.padded_anchors.argmax())})

    def report(self) -> dict[str, object]:
        """The plan in numbers, for JSON and `schedule.report.print_report`."""
        device = "cpu" if self.config.train.device == "cpu" else "cuda"
        roles = self.roles
        return plan_report(
            self.stream,
            queue_depth=self.depth,
            num_states=self.num_states,
            hidden_size=self.shape_if_known.hidden_size if self.shape_if_known else None,
            dtype=states_dtype(self.config.target.dtype, device),
        ) | {
            "layout": roles.layout,
            "num_ranks": roles.world_size,
            "num_targets": roles.num_targets,
            "notes": self.notes,
        }  # fmt: skip

    def _read_shape(self) -> DrafterShape:
        target = self.config.target
        assert target.path is not None
        target_config = read_target_config(target.path, target.revision)
        length = self.store_if_any.meta["tokenizer_length"] if self.store_if_any else 0
        shape = DrafterShape.from_target(target_config, length, self.config.drafter)
        if self.with_last:
            check_plain_logits(target_config)
        return shape

    def _make_plan(self) -> Plan:
        config, store = self.config, self.store_if_any
        if store:
            lengths, supervised = store.lengths, store.supervised
            longest = int(lengths.max(initial=0))
            if longest > config.data.max_length:
                raise InputError(
                    f"data.max_length={config.data.max_length}: {config.data.store} has rows of up "
                    f"to {longest} tokens; prepare it again with this length, or raise it"
                )
        else:
            lengths, supervised = read_lengths(str(config.data.lengths), config.data.max_length)
        plan = Plan(
            lengths,
            supervised,
            config.schedule,
            num_anchors=config.drafter.num_anchors,
            block_size=config.drafter.block_size,
            seed=config.seed,
            min_share=least_share(config.schedule, self.window),
            store=store.fingerprint if store else "",
        )
        if plan.supervised.max() < 2:
            raise InputError(
                f"{config.data.store or config.data.lengths}: no row has two supervised tokens, so "
                "there is nothing to learn: look at the audit of `dflashdist prepare`"
            )
        return plan

    def _make_gates(self) -> Gates:
        config = self.config
        drafts = config.drafter.block_size - (config.drafter.variant != "dspark")
        known = step_metrics(drafts + 1, self.plan.edges)
        if self.stream.rounds:
            edges = self.stream.rounds.plan.edges
            known |= round_metrics(drafts, edges, averaged=config.optim.ema is not None)
        elif config.evaluate.every is not None:  # not planned, but of the run
            return Gates((), known)
        gates = Gates(config.gates, known)
        self.notes += gates.idle(self.steps.num_steps)
        return gates

    def _note_plan(self) -> None:
        empty = int((self.plan.epoch(0).num_anchors == 0).sum())
        if empty:
            self.notes.append(
                f"{empty:,} of {self.plan.micro_batches_per_epoch:,} micro-batches have no anchor "
                "(no row with two supervised tokens): they teach nothing"
            )
        window, gaps = self.steps.window, self.plan.max_gaps
        if self.plan.num_buckets > 1 and max(gaps) > window:
            self.notes.append(
                f"the bucket up to {self.plan.edges[int(np.argmax(gaps))]} tokens is missing in "
                f"some steps: up to {max(gaps)} micro-batches lie between two of its own, a step "
                f"has {window}; schedule.bucket_edges=null and schedule.min_share=auto mend it"
            )
        if not self.config.target.path:
            self.notes.append("target.path is not set: bytes are unknown, and `train` needs it")


def open_held_out(config: Config, store: TokenStore, plan: Plan) -> tuple[TokenStore, Rounds]:
    """The held-out rows of `evaluate.store`, or of the split that `store` has, and their rounds.

    Of more than `evaluate.max_rows`, rows at even distances: the same in every round and run.
    Buckets are those of the training plan. Raises InputError where there are no such rows, or they
    do not fit the run.
    """
    path = Path(config.evaluate.store or store.path / "validation")
    if config.evaluate.store is None and not path.is_dir():
        raise InputError(
            f"evaluate.every={config.evaluate.every}: {store.path} has no validation split; "
            "prepare it with data.validation=0.01, or set evaluate.store to a token store"
        )
    held_out = TokenStore.open(path)
    if held_out.meta["tokenizer_fingerprint"] != store.meta["tokenizer_fingerprint"]:
        raise InputError(f"{path}: made with another tokenizer than {store.path}; prepare it anew")
    mine, theirs = (s.meta.get("rendering", {}) for s in (store, held_out))
    differing = [k for k in ("template_sha256", "settings") if mine.get(k) != theirs.get(k)]
    if mine and theirs and differing:
        raise InputError(
            f"{path}: rendered with another {differing[0]} than {store.path} "
            f"({theirs.get(differing[0])} against {mine.get(differing[0])}); prepare it alike"
        )
    rows = np.flatnonzero(held_out.supervised >= 2)  # an answer of one token needs no pass
    if len(rows) == 0:
        raise InputError(f"{path}: no row with an answer of two tokens; take another store")
    number = min(config.evaluate.max_rows, len(rows))
    rows = rows[np.arange(number) * len(rows) // number]
    lengths, supervised = held_out.lengths[rows], held_out.supervised[rows]
    longest = int(lengths.max())
    if longest > min(config.data.max_length, config.schedule.max_tokens):
        raise InputError(
            f"{path}: has rows of up to {longest} tokens, above data.max_length or "
            "schedule.max_tokens; prepare it again with the training rows' length"
        )
    edges = [*plan.edges, longest] if longest > plan.edges[-1] else [*plan.edges]
    most = max(config.schedule.max_anchors, int(supervised.max()))  # of one row
    rounds = Plan(
        lengths,
        supervised,
        replace(config.schedule, bucket_edges=edges, max_anchors=most),
        num_anchors=longest,  # a block may start at any token of an answer
        block_size=config.drafter.block_size,
        seed=0,
        store=held_out.fingerprint,
    )
    assert config.evaluate.every is not None
    return held_out, Rounds(rounds, rows, config.evaluate.every)


def check_tokens(job: TrainingJob) -> None:
    """Hold that the store is the target's, and that its mask token means nothing else.

    A store rendered by a template's file is held to the tokenizer alone. Reads the tokenizer's
    files and all of the store's ids, so one rank does it for all. Raises InputError.
    """
    target = job.config.target
    tokenizer = TargetTokenizer.read(str(target.path), target.revision)
    check_store(job, tokenizer)
    check_mask_token(job, tokenizer)


def check_store(job: TrainingJob, target: TargetTokenizer) -> None:
    """Hold that the store was made with the target's own tokenizer, and template if it says so."""
    config, meta = job.config, job.store.meta
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


def check_mask_token(job: TrainingJob, target: TargetTokenizer) -> None:
    """Refuse a mask token that the target emits, or that rows hold.

    A block of masks beside such a token in the text would mean two things at once.
    """
    mask = job.shape.mask_token_id
    eos = job.shape.eos_token_id
    roles = {
        "an end-of-turn token": {*target.end_ids, *(eos if isinstance(eos, tuple) else (eos,))},
        "the pad token": {target.pad_id, job.store.meta["pad_id"]},
        "the beginning-of-text token": {job.shape.bos_token_id},
    }
    for name, text in target.specials.items():
        roles.setdefault(name, set()).add(target.tokenizer.token_to_id(text))
    for role, ids in roles.items():
        if mask in ids:
            raise InputError(
                f"drafter.mask_token_id={mask}: is {role} of the target; take a row of its "
                "embedding that is never emitted, or null: the first one past the tokenizer"
            )
    stores = [store for store in (job.store, job.held_out) if store]
    found = sum(store.count_token(mask) for store in stores)
    if not found:
        return
    token = target.tokenizer.id_to_token(mask)
    text = f"drafter.mask_token_id={mask} ({token!r}) occurs {found:,} times in the rows"
    if not job.config.drafter.mask_token_in_data:
        raise InputError(
            f"{text}; take a token that does not, or null: the first embedding row past the "
            "tokenizer (drafter.mask_token_in_data=true trains all the same)"
        )
    job.notes.append(f"{text}: drafts learn that it is a mask and a word")
