"""What was measured, as plain values, a table and a figure.

Acceptance length is the number of tokens emitted per target pass, the bonus token counted: 1 is
plain decoding, one more than the drafts of a pass the most. The prefill and the token it gives are
no pass. Pooled: all tokens over all passes; mean: the mean of the answers' own values. Intervals
hold 95 % of bootstrap samples of the prompts, drawn with replacement, a prompt's turns together.

Loops are easy to draft and inflate it, and an answer that reached `max_new_tokens` may be one. So
everything is reported twice: for all answers, and for the clean ones, which end by themselves and
do not loop.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflashdist.eval.cross_check import equal_tokens
from dflashdist.eval.decode import Decoded
from dflashdist.model.teacher_forced import AcceptanceSums

SAMPLES = 2000  # of the bootstrap: the ends of an interval move by about 2 % of its width
FEWEST = 5  # prompts: of fewer the samples are so alike that an interval would be far too narrow
# Acceptance length by decoding over that by training's own code, of the same text, is 1 but for
# rounding: bfloat16 flips a draft now and then in either, float32 hardly ever. Both count the same
# prompts, so what decides is the ratio's interval over them: the lengths' own intervals are wide
# because prompts differ, and a ratio without one says nothing of flips. A whole interval beyond
# ROUNDING is a fault; of too few prompts for one, a ratio beyond DISAGREEMENT.
ROUNDING, DISAGREEMENT = 0.01, 0.05
# Of what training measured beyond plain decoding, the least that is served without a warning. The
# texts are others, so nothing pairs them: the upper end of what is served decides, as the prompts
# asked may be hard by chance. Below FELT tokens a pass the two are noise.
SERVED, FELT = 0.5, 0.05
# Of answers, and of tokens compared, that may part at ties without a warning. The demo's target in
# bfloat16: 12 % of the answers, 0.3 % of the tokens.
PARTED_ANSWERS, PARTED_TOKENS = 0.2, 0.01


@dataclass(frozen=True)
class Comparison:
    """A prompt decoded both ways."""

    plain: Decoded
    speculative: Decoded
    capped: bool  # reached max_new_tokens without an end of turn
    looping: bool
    prompt: int = 0  # turns of one conversation share it
    task: str = ""
    prompt_length: int = 0  # tokens
    teacher_forced: AcceptanceSums | None = None  # of the same text, by training's code


def make_report(
    answers: Sequence[Comparison],
    num_drafts: int,
    seconds: tuple[float, float],
    seed: int,
    *,
    greedy: bool = True,
) -> dict[str, Any]:
    """Everything of one drafter; `seconds` of the plain and of the speculative loop. `greedy`: the
    two loops' answers are of the same tokens, but for those that part at a tie."""

    def both(some: Sequence[Comparison]) -> dict[str, Any]:
        clean = [answer for answer in some if not (answer.capped or answer.looping)]
        return {
            "all": acceptance(some, num_drafts, seed),
            "clean": acceptance(clean, num_drafts, seed),
        }

    compared = [(one.plain.tokens, one.speculative.tokens) for one in answers if greedy]
    tasks = _groups(answers, lambda answer: answer.task)
    lengths = _groups(answers, lambda answer: max(5, math.ceil(math.log2(answer.prompt_length))))
    return {
        "num_drafts": num_drafts,
        "num_prompts": len({answer.prompt for answer in answers}),
        "num_answers": len(answers),
        "num_capped": sum(answer.capped for answer in answers),
        "num_looping": sum(answer.looping for answer in answers),
        **both(answers),
        "by_task": {task: both(tasks[task]) for task in sorted(tasks)},
        "by_prompt_length": [
            {"from": 1 if power == 5 else 2 ** (power - 1) + 1, "to": 2**power}
            | both(lengths[power])
            for power in sorted(lengths)
        ],
        "tokens_compared_equal": sum(equal_tokens(one, other) for one, other in compared),
        "rounding_ties": sum(one != other for one, other in compared),
        **_teacher_forced(answers, num_drafts, seed),
        **_speed(answers, seconds),
    }


def acceptance(answers: Sequence[Comparison], num_drafts: int, seed: int) -> dict[str, Any]:
    """Acceptance length of some answers, pooled and mean, and by position in the block.

    `position_acceptance[k-1]`: of the passes that offered a k-th draft before the answer's end,
    the share in which it and all before it were accepted. `emitted_histogram[m-1]`: passes that
    emitted m tokens. `..._interval`: the 95 % interval [low, high]. None where nothing is known.
    """
    sums = _by_prompt(answers, num_drafts, lambda answer: _sums(answer, num_drafts))
    total = AcceptanceSums.total(sums, num_drafts)
    result = {
        "num_answers": len(answers),
        "tokens": int(total.part("tokens")),
        "passes": int(total.part("passes")),
        "emitted_histogram": [int(count) for count in total.part("emitted")],
    }
    samples = _resampled(sums, seed)
    for name, above, below in (
        ("acceptance_length", "tokens", "passes"),
        ("mean_acceptance_length", "means", "answers"),
        ("position_acceptance", "accepted", "offered"),
    ):
        values = _known(total.part(above) / total.part(below))
        intervals = [None] * len(values)
        if samples is not None:
            ratios = samples.part(above) / samples.part(below)  # [SAMPLES, 1 or num_drafts]
            intervals = [_interval(column) for column in ratios.T]
        whole = name == "position_acceptance"
        result[name] = values if whole else values[0]
        result[f"{name}_interval"] = intervals if whole else intervals[0]
    return result


def format_report(report: dict[str, Any]) -> str:
    """The report as a table, all answers beside the clean ones."""

    def row(name: str, form: Callable[[dict[str, Any]], str], part: dict[str, Any]) -> str:
        return f"{name:<28}  {form(part['all']):>19}  {form(part['clean']):>19}"

    def share(k: int) -> Callable[[dict[str, Any]], str]:
        return lambda one: format_number(
            one["position_acceptance"][k], one["position_acceptance_interval"][k]
        )

    greedy = report["temperature"] == 0
    how = "greedy" if greedy else f"sampled at temperature {report['temperature']:g}"
    lines = [
        f"{report['checkpoint']}: {report['num_prompts']} prompts of {report['prompts']}, {how}, "
        f"batches of {report['batch_size']}, {report['dtype']} on {report['device']}",
        f"left out of clean: {report['num_capped']} answers capped at "
        f"{report['max_new_tokens']} tokens, {report['num_looping']} looping"
        + f"; {report['num_turns_too_long']} turns too long to ask"
        * bool(report["num_turns_too_long"]),
        "acceptance length: tokens a target pass of speculative decoding, 1 = plain decoding",
        f"{'':<28}  {'all':>19}  {'clean':>19}",
        row("answers", lambda one: f"{one['num_answers']:,}", report),
        row("tokens", lambda one: f"{one['tokens']:,}", report),
        row("target passes", lambda one: f"{one['passes']:,}", report),
        row("acceptance length, pooled", _length, report),
        row("acceptance length, mean", _mean, report),
    ]
    lines += [
        row(f"  draft {k + 1} accepted", share(k), report) for k in range(report["num_drafts"])
    ]
    lines += [row(f"  task {task}", _length, part) for task, part in report["by_task"].items()]
    lines += [
        row(f"  prompts of {part['from']} to {part['to']}", _length, part)
        for part in report["by_prompt_length"]
    ]
    for kind in ("all", "clean"):
        counts = " ".join(f"{count:,}" for count in report[kind]["emitted_histogram"])
        lines.append(f"passes of 1, 2, ... tokens, {kind}: {counts}")
    lines.append(
        f"tokens/s: {report['plain_tokens_per_second']:.0f} plain, "
        f"{report['speculative_tokens_per_second']:.0f} speculative ({report['speedup']:.2f}x)"
    )
    if greedy:
        lines.append(_equality(report))
    forced, trained = report["teacher_forced_acceptance_length"], report["last_round"]
    if forced is not None:
        ratio = format_number(report["served_ratio"], report["served_ratio_interval"], 3)
        lines.append(
            f"acceptance length of the same text by training's code: {forced:.2f}; decoding's is "
            f"{ratio} of it"
        )
    if trained:
        lines.append(
            f"training measured {trained['acceptance_length']:.2f} on its held-out rows at step "
            f"{trained['step']}"
        )
    return "\n".join(lines)


def warnings_of(report: dict[str, Any]) -> list[str]:
    """A line for each thing that makes the report doubtful."""
    served, found = report["all"]["acceptance_length"], []
    if report["serves_as_trained"] is False:
        forced = report["teacher_forced_acceptance_length"]
        ratio = format_number(report["served_ratio"], report["served_ratio_interval"], 3)
        found.append(
            f"IT DOES NOT SERVE AS IT TRAINS: decoding accepts {served:.2f} tokens a pass, "
            f"training's code {forced:.2f} of the same text (ratio {ratio}); this is a fault of "
            "the code, not of the drafter"
        )
    trained = report["last_round"]
    if trained and served is not None and report["temperature"] == 0:  # as training measures
        gain = trained["acceptance_length"] - 1
        most = (report["all"]["acceptance_length_interval"] or [served])[-1]
        if most - 1 < SERVED * gain and gain - (most - 1) > FELT:
            found.append(
                f"served at {served:.2f} tokens a pass, where training measured {1 + gain:.2f} on "
                f"its held-out rows (step {trained['step']}): other prompts, another chat format, "
                "answers that are not the target's own, or a fault"
            )
    parted, tokens = report["rounding_ties"], report["tokens_compared_equal"]
    if parted > PARTED_ANSWERS * report["num_answers"] and parted > PARTED_TOKENS * tokens:
        found.append(
            f"{parted} of {report['num_answers']} answers part from plain decoding, after "
            f"{tokens / parted:.0f} tokens on average, where two logits are closer than rounding: "
            "target.dtype=float32 compares all"
        )
    return [f"WARNING: {report['checkpoint']}: {line}" for line in found]


def _equality(report: dict[str, Any]) -> str:
    """How the two greedy loops compare, in one line."""
    shares = (
        f"{100 * one['other'] / max(1, one['tokens']):.2f} %"
        for one in (report["not_first_choice"][loop] for loop in ("plain", "speculative"))
    )
    return (
        f"{report['tokens_compared_equal']:,} tokens equal, {report['rounding_ties']} answers part "
        f"at a tie; not the target's argmax: {next(shares)} plain, {next(shares)} speculative"
    )


def _groups(
    answers: Iterable[Comparison], key: Callable[[Comparison], Any]
) -> dict[Any, list[Comparison]]:
    groups: dict[Any, list[Comparison]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return groups


def _by_prompt(
    answers: Iterable[Comparison], num_drafts: int, counted: Callable[[Comparison], Any]
) -> list[AcceptanceSums]:
    """The sums of each prompt, its turns together."""
    prompts = _groups(answers, lambda answer: answer.prompt).values()
    return [AcceptanceSums.total(map(counted, turns), num_drafts) for turns in prompts]


def _sums(answer: Comparison, num_drafts: int) -> AcceptanceSums:
    one = answer.speculative
    return AcceptanceSums.of_answer(one.emitted, one.offered, one.accepted, num_drafts)


def _resampled(sums: Sequence[AcceptanceSums], seed: int) -> AcceptanceSums | None:
    """Sums [SAMPLES, size] of as many prompts drawn with replacement; None of too few prompts."""
    count = len(sums)
    if count < FEWEST:
        return None
    random = np.random.default_rng(seed)
    times = random.multinomial(count, np.full(count, 1 / count), size=SAMPLES)
    return AcceptanceSums(torch.from_numpy(times).double() @ torch.stack([s.vector for s in sums]))


def _interval(values: Tensor) -> list[float] | None:
    """[low, high] of 95 % of the samples; those in which nothing was offered are left out."""
    values = values[~values.isnan()]
    if not len(values):
        return None
    return np.quantile(values.numpy(), [0.025, 0.975]).tolist()


def _known(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _teacher_forced(answers: Sequence[Comparison], num_drafts: int, seed: int) -> dict[str, Any]:
    """Acceptance length of the same texts by training's code, and decoding's as a share of it."""
    counted = [answer for answer in answers if answer.teacher_forced is not None]
    served = _by_prompt(counted, num_drafts, lambda answer: _sums(answer, num_drafts))
    forced = _by_prompt(counted, num_drafts, lambda answer: answer.teacher_forced)
    decoded, trained = (AcceptanceSums.total(sums, num_drafts) for sums in (served, forced))
    if not trained.part("passes"):
        return {"teacher_forced_acceptance_length": None, "serves_as_trained": None}
    ratio, interval = decoded.acceptance_length / trained.acceptance_length, None
    pair = [_resampled(sums, seed) for sums in (served, forced)]  # by one seed: the same prompts
    if pair[0] and pair[1]:
        lengths = [samples.part("tokens") / samples.part("passes") for samples in pair if samples]
        interval = _interval((lengths[0] / lengths[1]).squeeze(1))
    low, high = interval or (ratio - DISAGREEMENT + ROUNDING, ratio + DISAGREEMENT - ROUNDING)
    return {
        "teacher_forced_acceptance_length": trained.acceptance_length,
        "served_ratio": ratio,
        "served_ratio_interval": interval,
        "serves_as_trained": low - ROUNDING <= 1 <= high + ROUNDING,
    }


def _speed(answers: Sequence[Comparison], seconds: tuple[float, float]) -> dict[str, float]:
    """Tokens a second after the prefill of both loops, of all answers together."""
    tokens = [sum(sum(a.plain.emitted) for a in answers), 0]
    tokens[1] = sum(sum(a.speculative.emitted) for a in answers)
    plain, fast = (n / max(spent, 1e-9) for n, spent in zip(tokens, seconds, strict=True))
    return {
        "plain_tokens_per_second": plain,
        "speculative_tokens_per_second": fast,
        "speedup": fast / max(plain, 1e-9),
    }


def _length(one: dict[str, Any]) -> str:
    return format_number(one["acceptance_length"], one["acceptance_length_interval"])


def _mean(one: dict[str, Any]) -> str:
    return format_number(one["mean_acceptance_length"], one["mean_acceptance_length_interval"])


def format_number(value: float | None, interval: Sequence[float] | None, decimals: int = 2) -> str:
    """A value with its interval."""
    if value is None:
        return "-"
    told = [f"{number:.{decimals}f}" for number in (value, *(interval or ()))]
    return told[0] + (f" [{', '.join(told[1:])}]" if interval else "")
