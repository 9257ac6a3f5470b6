"""Acceptance length of a drafter, by real greedy speculative decoding of held-out prompts.

Acceptance length is the number of tokens emitted per target pass, the bonus token counted: 1 is
plain decoding, the block size is the most. The prefill and the token it gives are no pass. Pooled:
all tokens over all passes; mean: the mean of the responses' own values.

Loops are easy to draft and inflate it, and an answer that reached `max_new_tokens` may be one. So
everything is reported twice: for all answers, and for the clean ones, which end by themselves and
do not loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dflashdist.config import AUTO, EvaluateConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import RowError, parse_prompt
from dflashdist.data.sources import Sources
from dflashdist.eval.decode import (
    CachedTarget,
    Decoded,
    is_looping,
    plain_greedy,
    speculative_greedy,
)
from dflashdist.model.drafter import Drafter, load_drafter
from dflashdist.model.shape import check_supported, read_target_config


class OutputsDiffer(RuntimeError):
    """Speculative decoding emitted something that plain decoding does not: a bug, never noise."""


@dataclass(frozen=True)
class Answer:
    """A prompt decoded both ways."""

    plain: Decoded
    speculative: Decoded
    capped: bool  # reached max_new_tokens without an end of turn
    looping: bool
    tie: bool = False  # the two parted where rounding decides


def evaluate_drafters(
    checkpoints: Sequence[str | Path],
    target: str,
    prompts: str | Path,
    evaluate: EvaluateConfig,
    device: str = AUTO,
    *,
    dtype: str = AUTO,
    revision: str | None = None,
) -> list[dict[str, Any]]:
    """Decode the prompts by the target alone, once, and with each drafter: outputs must be equal.

    Args:
        checkpoints: drafters' folders (config.json and model.safetensors), trained or not.
        target: the whole target, by folder or name.
        prompts: a source of conversations (data/sources.py); a final answer is left out.
        evaluate: max_prompts and max_new_tokens.
        device: auto = CUDA where there is one. dtype: auto = bfloat16 on CUDA, float32 on CPU.

    Returns:
        A report for each, which `format_report` prints; plain values.

    Raises:
        InputError: a folder, file or prompt that cannot be used.
        OutputsDiffer: the outputs differ, and rounding does not explain it.
    """
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == AUTO:
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    drafters = [load_drafter(path, dtype=getattr(torch, dtype)) for path in checkpoints]
    for drafter in drafters:
        drafter.to(device).eval()
        _check_fit(target, drafter, revision)
    chat = ChatTokenizer.load(target, revision)
    positions = min(drafter.shape.max_position_embeddings for drafter in drafters)
    ids = read_prompts(prompts, chat, evaluate.max_prompts, positions - evaluate.max_new_tokens)
    whole = _load_target(target, dtype, device, revision)
    alone = CachedTarget(whole)
    tapped = [CachedTarget(whole, drafter.shape.target_layer_ids) for drafter in drafters]
    answers: list[list[Answer]] = [[] for _ in drafters]
    for prompt in tqdm(ids, desc="evaluate", unit=" prompts", disable=None):
        limit = (evaluate.max_new_tokens, chat.end_ids)
        plain = plain_greedy(alone, prompt, *limit)
        for model, drafter, decoded in zip(tapped, drafters, answers, strict=True):
            speculative = speculative_greedy(model, drafter, prompt, *limit)
            tie = check_equal(alone, chat, prompt, plain.tokens, speculative.tokens)
            capped = speculative.tokens[-1] not in chat.end_ids
            looping = is_looping(speculative.tokens)
            decoded.append(Answer(plain, speculative, capped, looping, tie))
    told: dict[str, Any] = {
        "target": target,
        "prompts": str(prompts),
        "device": device,
        "dtype": dtype,
        "max_new_tokens": evaluate.max_new_tokens,
    }
    return [
        {"checkpoint": str(path)} | told | _report(decoded, drafter.shape.block_size)
        for path, drafter, decoded in zip(checkpoints, drafters, answers, strict=True)
    ]


def _report(answers: Sequence[Answer], block_size: int) -> dict[str, Any]:
    clean = [answer for answer in answers if not (answer.capped or answer.looping)]
    return {
        "block_size": block_size,
        "num_prompts": len(answers),
        "num_capped": sum(answer.capped for answer in answers),
        "num_looping": sum(answer.looping for answer in answers),
        "all": acceptance(answers, block_size),
        "clean": acceptance(clean, block_size),
        "tokens_compared_equal": sum(
            len(answer.plain.tokens) for answer in answers if not answer.tie
        ),
        "rounding_ties": sum(answer.tie for answer in answers),
        **_speed(answers),
    }


def read_prompts(
    path: str | Path, chat: ChatTokenizer, max_prompts: int, longest: int
) -> list[list[int]]:
    """Token ids of the first prompts of a source, generation prompt included.

    Raises InputError for a row that is no prompt, or one of more than `longest` tokens.
    """
    prompts: list[list[int]] = []
    for origin, payload in Sources([path]).rows():
        if len(prompts) == max_prompts:
            break
        try:
            prompt = parse_prompt(origin, payload)
            last = prompt.messages[-1]["role"] == "assistant"
            messages = prompt.messages[:-1] if last else prompt.messages
            if not messages:
                raise RowError("no messages before the answer")
            prompts.append(chat.encode_prompt(messages, prompt.tools))
        except RowError as error:
            raise InputError(f"{origin}: not a prompt: {error}") from error
        if len(prompts[-1]) > longest:
            raise InputError(
                f"{origin}: a prompt of {len(prompts[-1])} tokens, where the target's positions "
                f"leave {longest}; drop it or lower evaluate.max_new_tokens"
            )
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts


def acceptance(answers: Sequence[Answer], block_size: int) -> dict[str, Any]:
    """Acceptance length of some answers, pooled and mean, and by position in the block.

    `position_acceptance[k-1]`: of the passes that offered a k-th draft before the answer's end,
    the share in which it and all before it were accepted. None where nothing was decoded.
    """
    decoded = [answer.speculative for answer in answers if answer.speculative.emitted]
    passes = sum(len(one.emitted) for one in decoded)
    tokens = sum(sum(one.emitted) for one in decoded)
    means = [sum(one.emitted) / len(one.emitted) for one in decoded]
    accepted = [count for one in decoded for count in one.accepted]
    offered = [count for one in decoded for count in one.offered]
    by_position = []
    for k in range(1, block_size):
        offers = sum(count >= k for count in offered)
        by_position.append(sum(count >= k for count in accepted) / offers if offers else None)
    return {
        "num_answers": len(answers),
        "tokens": tokens,
        "passes": passes,
        "acceptance_length": tokens / passes if passes else None,
        "mean_acceptance_length": sum(means) / len(means) if means else None,
        "position_acceptance": by_position,
    }


@torch.inference_mode()
def check_equal(
    model: CachedTarget,
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
        model.start()
        logits: Tensor = model.forward([*prompt, *plain[:at]], last_only=True)[0]
        margin = abs(float(logits[plain[at]] - logits[speculative[at]]))
        rounding = 8 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    if margin <= rounding:
        return True
    raise OutputsDiffer(
        f"speculative decoding is not lossless: token {at} of the answer to "
        f"{chat.decode(prompt)!r} is {list(speculative[at : at + 1])}, plain decoding gives "
        f"{list(plain[at : at + 1])}, logit margin {margin:.3g}"
    )


def format_report(report: dict[str, Any]) -> str:
    """The report as a table, all answers beside the clean ones."""
    both = (report["all"], report["clean"])
    rows = [
        ("", "all", "clean"),
        ("answers", *(str(part["num_answers"]) for part in both)),
        ("tokens", *(f"{part['tokens']:,}" for part in both)),
        ("target passes", *(f"{part['passes']:,}" for part in both)),
        ("acceptance length, pooled", *(_number(part["acceptance_length"]) for part in both)),
        ("acceptance length, mean", *(_number(part["mean_acceptance_length"]) for part in both)),
    ]
    for k in range(report["block_size"] - 1):
        shares = (part["position_acceptance"][k] for part in both)
        rows.append((f"  draft {k + 1} accepted", *(_number(share) for share in shares)))
    lines = [f"{name:<26}  {first:>8}  {second:>8}" for name, first, second in rows]
    return "\n".join(
        [
            f"{report['checkpoint']}: {report['num_prompts']} prompts, {report['dtype']} on "
            f"{report['device']}; left out of clean: {report['num_capped']} capped at "
            f"{report['max_new_tokens']} tokens, {report['num_looping']} looping",
            *lines,
            f"tokens/s: {report['plain_tokens_per_second']:.0f} plain, "
            f"{report['speculative_tokens_per_second']:.0f} speculative "
            f"({report['speedup']:.2f}x); {report['tokens_compared_equal']:,} tokens equal"
            + (f", {report['rounding_ties']} answers up to a tie" * bool(report["rounding_ties"])),
        ]
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _speed(answers: Sequence[Answer]) -> dict[str, float]:
    """Tokens a second after the prefill, batch size 1, of both loops."""
    rates = []
    for loop in ("plain", "speculative"):
        decoded = [getattr(answer, loop) for answer in answers]
        seconds = sum(one.seconds for one in decoded)
        rates.append(sum(sum(one.emitted) for one in decoded) / max(seconds, 1e-9))
    return {
        "plain_tokens_per_second": rates[0],
        "speculative_tokens_per_second": rates[1],
        "speedup": rates[1] / max(rates[0], 1e-9),
    }


def _check_fit(path: str, drafter: Drafter, revision: str | None) -> None:
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


def _load_target(path: str, dtype: str, device: str, revision: str | None) -> torch.nn.Module:
    """The whole target, ready to decode. Raises InputError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    auto: Any = AutoModelForCausalLM
    try:
        model = auto.from_pretrained(where, revision=revision, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path}: the target cannot be loaded: {reason}") from error
    return model.to(device).eval()
