"""Acceptance length of a drafter, by real speculative decoding of held-out prompts.

Greedily, the outputs of both loops are compared token by token, always; and the acceptance of the
very text that was decoded is counted again by training's own code (model/teacher_forced.py): a
drafter that trains at one acceptance length and serves at another cannot go unseen.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dflashdist.config import AUTO, EvaluateConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import RowError
from dflashdist.eval.decode import (
    CachedTarget,
    Decoded,
    Rule,
    decode_plain,
    decode_speculative,
    is_looping,
)
from dflashdist.eval.generate import load_model
from dflashdist.eval.prompts import Prompt, read_prompts
from dflashdist.eval.report import Answer, make_report
from dflashdist.model.drafter import Drafter, load_drafter
from dflashdist.model.drafting import num_drafts
from dflashdist.model.frozen import Frozen, target_fingerprint
from dflashdist.model.loss import DrafterBatch
from dflashdist.model.shape import check_supported, read_target_config
from dflashdist.model.teacher_forced import AcceptanceSums, teacher_forced


class OutputsDiffer(RuntimeError):
    """Speculative decoding emitted something that plain decoding does not: a bug, never noise."""


def evaluate_drafters(
    checkpoints: Sequence[str | Path],
    target: str,
    prompts: str | Path,
    evaluate: EvaluateConfig,
    device: str = AUTO,
    *,
    dtype: str = AUTO,
    revision: str | None = None,
    chat: ChatTokenizer | None = None,
) -> list[dict[str, Any]]:
    """Decode the prompts by the target alone, once, and with each drafter.

    Args:
        checkpoints: drafters' folders (config.json and model.safetensors), trained or not.
        target: the whole target, by folder or name.
        prompts: see `read_prompts`: a file or folder of JSON Lines, a token store, `builtin`.
        evaluate: its task, max_prompts, max_new_tokens, temperature, batch_size and seed.
        device: auto = CUDA where there is one. dtype: auto = bfloat16 on CUDA, float32 on CPU.
        chat: the target's tokenizer and chat format; null = as the target's folder has them.

    Returns:
        A report for each, which `format_report` and `draw_figure` show; plain values.

    Raises:
        InputError: a folder, file or prompt that cannot be used, or another target's drafter.
        OutputsDiffer: the greedy outputs differ, and rounding does not explain it.
    """
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == AUTO:
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    drafters = [load_drafter(path, dtype=getattr(torch, dtype)) for path in checkpoints]
    for drafter, path in zip(drafters, checkpoints, strict=True):
        drafter.to(device).eval()
        _check_fit(target, drafter, Path(path), revision)
    chat = chat or ChatTokenizer.load(target, revision)
    positions = min(drafter.shape.max_position_embeddings for drafter in drafters)
    longest = positions - evaluate.max_new_tokens
    queue = list(enumerate(read_prompts(prompts, chat, evaluate, longest)))
    alone = CachedTarget(load_model(target, dtype, device, revision))
    runs = [
        _Run(drafter, CachedTarget(alone.model, drafter.shape.target_layer_ids))
        for drafter in drafters
    ]
    rule = _rule(evaluate, chat, device)
    rules = [_rule(evaluate, chat, device) for _ in runs]  # random numbers of their own
    seconds, too_long = 0.0, 0
    with tqdm(total=len(queue), desc="evaluate", unit=" prompts", disable=None) as progress:
        while queue:
            batch, queue = queue[: evaluate.batch_size], queue[evaluate.batch_size :]
            plain, spent = decode_plain(alone, [prompt.ids for _, prompt in batch], rule)
            seconds += spent
            for run, own_rule in zip(runs, rules, strict=True):
                run.decode(batch, plain, own_rule, chat)
            asked_next = _follow_ups(batch, plain, chat)
            fitting = [(i, prompt) for i, prompt in asked_next if len(prompt.ids) <= longest]
            too_long += len(asked_next) - len(fitting)
            queue = fitting + queue
            progress.update(len(batch) - len(fitting))
    told: dict[str, Any] = {
        "target": target,
        "prompts": str(prompts),
        "device": device,
        "dtype": dtype,
        "max_new_tokens": evaluate.max_new_tokens,
        "temperature": evaluate.temperature,
        "batch_size": evaluate.batch_size,
        "num_turns_too_long": too_long,
    }
    return [
        {"checkpoint": str(path), "block_size": run.drafter.shape.block_size, **told}
        | make_report(run.answers, run.num_drafts, (seconds, run.seconds), evaluate.seed)
        for path, run in zip(checkpoints, runs, strict=True)
    ]


@dataclass
class _Run:
    """One drafter's part of an evaluation."""

    drafter: Drafter
    target: CachedTarget  # tapped at the drafter's layers
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_drafts(self) -> int:
        return num_drafts(self.drafter.shape)

    def decode(
        self,
        batch: Sequence[tuple[int, Prompt]],
        plain: Sequence[Decoded],
        rule: Rule,
        chat: ChatTokenizer,
    ) -> None:
        """Decode some prompts, compare with the plain answers if greedy, and note what came."""
        ids = [prompt.ids for _, prompt in batch]
        fast, seconds = decode_speculative(self.target, self.drafter, ids, rule)
        self.seconds += seconds
        greedy = rule.temperature == 0
        for (i, prompt), slow, one in zip(batch, plain, fast, strict=True):
            tie = greedy and check_equal(self.target, chat, prompt.ids, slow.tokens, one.tokens)
            answer = Answer(
                slow,
                one,
                capped=one.tokens[-1] not in rule.end_ids,
                looping=is_looping(one.tokens),
                tie=tie,
                prompt=i,
                task=prompt.task,
                prompt_length=len(prompt.ids),
                teacher_forced=self._teacher_forced(prompt.ids, one.tokens, rule)
                if greedy
                else None,
            )
            self.answers.append(answer)

    @torch.no_grad()  # as in training: inference_mode would compile CUDA's attention once more
    def _teacher_forced(
        self, prompt: Sequence[int], tokens: Sequence[int], rule: Rule
    ) -> AcceptanceSums:
        """The acceptance of an answer as training counts it: one forward of the target over the
        text, without a cache, and all its blocks at once."""
        ids = torch.tensor([[*prompt, *tokens]], device=self.target.device)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(prompt) :] = True
        lengths = ids.new_tensor([ids.shape[1]])
        nothing = ids.new_zeros(1, 1)
        batch = DrafterBatch(
            ids,
            mask,
            self.target.states(ids),
            anchors=nothing,
            keep=nothing.bool(),
            lengths=lengths,
        )
        head = self.target.head
        frozen = Frozen(self.target.embedding, head, final_norm=head.new_ones(head.shape[1]))
        sums = teacher_forced(
            self.drafter,
            frozen,
            batch,
            end_ids=rule.end_ids,
            max_new_tokens=rule.max_new_tokens,
        )
        return AcceptanceSums(sums.vector.cpu())


@torch.inference_mode()
def check_equal(
    target: CachedTarget,
    chat: ChatTokenizer,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
) -> bool:
    """Whether two outputs part at a tie: the target's passes of one and of several tokens round
    differently, so two logits closer than that may change places. False when they are equal.

    Raises OutputsDiffer when the margin at the first difference is more than rounding.
    """
    if list(plain) == list(speculative):
        return False
    pairs = enumerate(zip(plain, speculative, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(speculative)))
    margin, rounding = float("inf"), 0.0
    if at < min(len(plain), len(speculative)):
        logits: Tensor = target.prefill([[*prompt, *plain[:at]]], room=0)[0]
        margin = abs(float(logits[plain[at]] - logits[speculative[at]]))
        rounding = 8 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    if margin <= rounding:
        return True
    raise OutputsDiffer(
        f"speculative decoding is not lossless: token {at} of the answer to "
        f"{chat.decode(prompt)!r} is {list(speculative[at : at + 1])}, plain decoding gives "
        f"{list(plain[at : at + 1])}, logit margin {margin:.3g}"
    )


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
    shape = drafter.shape
    for key, expected in (
        ("hidden_size", shape.hidden_size),
        ("vocab_size", shape.vocab_size),
        ("num_hidden_layers", shape.num_target_layers),
    ):
        if config[key] != expected:
            raise InputError(
                f"{path}: {key} is {config[key]}, the drafter was made for a target with {expected}"
            )
    trained_for, found = _trained_for(checkpoint), target_fingerprint(path, revision)
    if trained_for not in (None, found):
        raise InputError(
            f"{path}: another target (fingerprint {found}) than {checkpoint} was trained for "
            f"({trained_for}): point target.path at that one"
        )


def _trained_for(checkpoint: Path) -> str | None:
    """Fingerprint of the target of a checkpoint, its `ema` folder or an export; None elsewhere."""
    places = (checkpoint, checkpoint.resolve().parent)  # the averaged weights lie in one's `ema`
    states = [place / "trainer/state.json" for place in places]
    file = next((file for file in states if file.is_file()), checkpoint / "config.json")
    try:
        told = json.loads(file.read_text())
        if file.name == "config.json":
            told = {"target": (told.get("dflashdist") or {}).get("target", {}).get("fingerprint")}
        return told.get("target")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{file}: not a checkpoint's state or configuration ({error})") from error
