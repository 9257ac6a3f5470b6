"""Acceptance length of a drafter, by real speculative decoding of held-out prompts.

Greedily, the outputs of both loops are held to the target's own choice token by token, always; and
the acceptance of the very text that was decoded is counted again by training's own code
(cross_check.py): a drafter that trains at one acceptance length and serves at another cannot go
unseen.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflashdist.config import AUTO, EvaluateConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import RowError
from dflashdist.eval.cross_check import (
    Replayed,
    TrainingsCount,
    check_shares,
    last_round,
    replay,
)
from dflashdist.eval.decode import (
    CachedTarget,
    Decoded,
    Rule,
    decode_plain,
    decode_speculative,
)
from dflashdist.eval.generate import is_looping, load_model
from dflashdist.eval.prompts import Prompt, read_prompts
from dflashdist.eval.report import Comparison, make_report
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import STATE, load_drafter, read_provenance, weights_digest
from dflashdist.model.shape import check_sizes
from dflashdist.model.target import Target
from dflashdist.model.target_files import (
    TargetTensors,
    check_supported,
    need,
    read_target_config,
    target_fingerprint,
)

CONFIG = "config.json"  # in every drafter's folder
ATTENTION = (AUTO, "sdpa", "eager")  # those that take masks over a cache of uneven rows


def evaluate_drafters(
    checkpoints: Sequence[str | Path],
    target: str,
    prompts: str | Path,
    evaluate: EvaluateConfig,
    device: str = AUTO,
    *,
    dtype: str = AUTO,
    attention: str = AUTO,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat: ChatTokenizer | None = None,
) -> list[dict[str, Any]]:
    """Decode the prompts by the target alone, once, and with each drafter.

    Args:
        checkpoints: drafters' folders (config.json and model.safetensors), trained or not.
        target: the whole target, by folder or name.
        prompts: see `read_prompts`: a file or folder of JSON Lines, a token store, `builtin`.
        evaluate: its task, max_prompts, max_new_tokens, temperature, batch_size and seed.
        device: auto = CUDA where there is one. dtype: auto = bfloat16 on CUDA, float32 on CPU.
        attention: of the target: sdpa, eager, or auto, its own choice.
        chat: the target's tokenizer and chat format; null = as the target's folder has them.

    Returns:
        A report for each, which `format_report` and `draw_figure` show; plain values. Its
        `digest` says of which weights (see `weights_digest`).

    Raises:
        InputError: a folder, file or prompt that cannot be used, another target's drafter, or a
            batch that does not fit the GPU.
        OutputsDiffer: greedy outputs are not the target's own, and rounding does not explain it.
    """
    if attention not in ATTENTION:
        raise InputError(
            f"target.attention={attention}: evaluate decodes with {' or '.join(ATTENTION[1:])}; "
            "set it to auto"
        )
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == AUTO:
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    drafters = [load_drafter(path) for path in checkpoints]
    digests = [weights_digest(drafter) for drafter in drafters]  # of what lies there, not of casts
    for drafter, path in zip(drafters, checkpoints, strict=True):
        drafter.to(device, getattr(torch, dtype)).eval()
        _check_fit(target, drafter, Path(path), revision)
    chat = chat or ChatTokenizer.load(target, revision)
    positions = min(drafter.shape.max_position_embeddings for drafter in drafters)
    positions = min(positions, steady_positions(read_target_config(target, revision)))
    longest = positions - evaluate.max_new_tokens
    queue = list(enumerate(read_prompts(prompts, chat, evaluate, longest)))
    model = load_model(
        target, dtype, device, revision, attention=attention, trust_remote_code=trust_remote_code
    )
    alone, runs = CachedTarget(model), [_Run(drafter, model) for drafter in drafters]
    greedy = evaluate.temperature == 0
    if greedy:
        frozen = TargetTensors.load(
            target, revision=revision, dtype=alone.dtype, device=alone.device
        )
        for run in runs:
            layers = run.drafter.shape.target_layer_ids
            tapped = Target(target, layers, revision=revision, loaded=model)
            run.count = TrainingsCount(tapped, frozen, run.drafter)
    rule = _rule(evaluate, chat, device)
    rules = [_rule(evaluate, chat, device) for _ in runs]  # random numbers of their own
    seconds, too_long, replayed = 0.0, 0, Replayed()
    with (
        _memory(evaluate),
        tqdm(total=len(queue), desc="evaluate", unit=" prompts", disable=None) as progress,
    ):
        while queue:
            batch, queue = queue[: evaluate.batch_size], queue[evaluate.batch_size :]
            ids = [prompt.ids for _, prompt in batch]
            plain, spent = decode_plain(alone, ids, rule)
            seconds += spent
            if greedy:
                found = replay(alone, chat, ids, plain, rule, "plain")
                replayed = sum(_single(found, plain), replayed)
            for run, own_rule in zip(runs, rules, strict=True):
                run.decode(batch, plain, own_rule, chat)
            asked_next = _follow_ups(batch, plain, chat)
            fitting = [(i, prompt) for i, prompt in asked_next if len(prompt.ids) <= longest]
            too_long += len(asked_next) - len(fitting)
            queue = fitting + queue
            progress.update(len(batch) - len(fitting))
    for run in runs:
        check_shares(replayed, run.replayed)
    told: dict[str, Any] = {
        "target": target,
        "prompts": str(prompts),
        "device": device,
        "dtype": dtype,
        "max_new_tokens": evaluate.max_new_tokens,
        "temperature": evaluate.temperature,
        "batch_size": evaluate.batch_size,
        "num_turns_too_long": too_long,
        "end_ids": list(chat.end_ids),
    }
    return [
        {
            "checkpoint": str(path),
            "digest": digest,
            "block_size": run.drafter.shape.block_size,
            "last_round": last_round(path),
            **told,
            "not_first_choice": {
                "plain": asdict(replayed),
                "speculative": asdict(run.replayed),
            }
            if greedy
            else None,
        }
        | make_report(
            run.answers, run.num_drafts, (seconds, run.seconds), evaluate.seed, greedy=greedy
        )
        for path, digest, run in zip(checkpoints, digests, runs, strict=True)
    ]


def find_drafter(folder: Path) -> Path:
    """The drafter's folder that a folder means: itself, or of a run the best checkpoint, else the
    newest complete one. Raises InputError where there is none."""
    if (folder / CONFIG).is_file():
        return folder
    inside = folder / "checkpoints"
    complete = [state.parent.parent for state in inside.glob(f"step_*/{STATE}")]
    complete.sort(key=lambda place: (len(place.name), place.name))
    for found in [inside / "best", *reversed(complete)]:
        if (found / CONFIG).is_file():
            return found
    raise InputError(
        f"{folder}: no drafter here: looked for {CONFIG}, checkpoints/best and a complete "
        f"checkpoints/step_*/{STATE}; name a run, a checkpoint or an exported drafter"
    )


def steady_positions(config: dict[str, Any]) -> int:
    """Positions up to which a target rotates its keys alike whatever the text's length, by its
    config.json. Beyond, keys in a cache and keys of one forward differ, and answers with them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "dynamic"):
        return sys.maxsize
    named = "original_max_position_embeddings"
    return rope.get(named) or config.get(named) or need(config, "max_position_embeddings")


def _single(found: Sequence[Replayed], answers: Sequence[Decoded]) -> Iterator[Replayed]:
    """Of answers that do not loop: those meet the same near tie in every round of it."""
    pairs = zip(found, answers, strict=True)
    return (one for one, answer in pairs if not is_looping(answer.tokens))


class _Run:
    """One drafter's part of an evaluation."""

    def __init__(self, drafter: Drafter, model: torch.nn.Module) -> None:
        self.drafter = drafter
        self.target = CachedTarget(model, drafter.shape.target_layer_ids)
        self.count: TrainingsCount | None = None  # of greedy answers
        self.answers: list[Comparison] = []
        self.replayed = Replayed()
        self.seconds = 0.0

    @property
    def num_drafts(self) -> int:
        return self.drafter.shape.num_drafts

    def decode(
        self,
        batch: Sequence[tuple[int, Prompt]],
        plain: Sequence[Decoded],
        rule: Rule,
        chat: ChatTokenizer,
    ) -> None:
        """Decode some prompts, hold greedy answers to the target's own, and note what came."""
        ids = [prompt.ids for _, prompt in batch]
        fast, seconds = decode_speculative(self.target, self.drafter, ids, rule)
        self.seconds += seconds
        forced = [None] * len(batch)
        if self.count:
            found = replay(self.target, chat, ids, fast, rule, "speculative")
            self.replayed = sum(_single(found, fast), self.replayed)
            forced = self.count(ids, fast, rule)
        for (i, prompt), slow, one, counted in zip(batch, plain, fast, forced, strict=True):
            answer = Comparison(
                slow,
                one,
                capped=one.tokens[-1] not in rule.end_ids,
                looping=is_looping(one.tokens),
                prompt=i,
                task=prompt.task,
                prompt_length=len(prompt.ids),
                teacher_forced=counted,
            )
            self.answers.append(answer)


@contextmanager
def _memory(evaluate: EvaluateConfig) -> Iterator[None]:
    """Raises InputError where the GPU's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = "evaluate.batch_size" if evaluate.batch_size > 1 else "evaluate.max_new_tokens"
        raise InputError(
            f"CUDA is out of memory with evaluate.batch_size={evaluate.batch_size} and "
            f"evaluate.max_new_tokens={evaluate.max_new_tokens}: lower {fix}"
        ) from error


def _follow_ups(
    batch: Sequence[tuple[int, Prompt]], answers: Sequence[Decoded], chat: ChatTokenizer
) -> list[tuple[int, Prompt]]:
    """The next turns of those prompts that have one, after the target's own answers."""
    found = []
    for (i, prompt), answer in zip(batch, answers, strict=True):
        ended = answer.tokens[-1] in chat.end_ids
        text = chat.decode(answer.tokens[:-1] if ended else answer.tokens)
        try:
            following = prompt.follow_up(text, chat)
        except RowError as error:
            raise InputError(f"{prompt.origin}: no prompt in its next turn: {error}") from error
        if following:
            found.append((i, following))
    return found


def _rule(evaluate: EvaluateConfig, chat: ChatTokenizer, device: str) -> Rule:
    generator = torch.Generator(device).manual_seed(evaluate.seed)
    return Rule(evaluate.max_new_tokens, chat.end_ids, evaluate.temperature, generator)


def _check_fit(path: str, drafter: Drafter, checkpoint: Path, revision: str | None) -> None:
    """Raises InputError for a target that is unsupported or not the one of this drafter."""
    config = read_target_config(path, revision)
    check_supported(config)
    check_sizes(path, config, drafter.shape)
    trained_for, found = read_provenance(checkpoint).fingerprint, target_fingerprint(path, revision)
    if trained_for not in (None, found):
        raise InputError(
            f"{path}: another target (fingerprint {found}) than {checkpoint} was trained for "
            f"({trained_for}): point target.path at that one"
        )
