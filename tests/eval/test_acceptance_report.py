"""The numbers of a report by hand, and its intervals against another way to compute them."""

import json

import numpy as np
import pytest

from dflashdist.config import InputError
from dflashdist.eval.decode import Decoded
from dflashdist.eval.figure import draw_figure, make_figure
from dflashdist.eval.report import Comparison, acceptance, format_report, make_report, warnings_of
from dflashdist.model.teacher_forced import AcceptanceSums


def answer(emitted, accepted, offered, **more):
    decoded = Decoded([0] * (1 + sum(emitted)), emitted, offered, accepted)
    return Comparison(decoded, decoded, **{"capped": False, "looping": False} | more)


ANSWERS = [
    answer([3, 1, 2], [2, 0, 2], [3, 3, 2], prompt=0, task="code", prompt_length=40),  # ended
    answer([4], [3], [3], prompt=0, task="code", prompt_length=64),
    answer([], [], [], prompt=1, task="chat", prompt_length=20),  # the end at once: no pass
    answer([1, 1], [0, 0], [3, 3], prompt=2, task="chat", prompt_length=65, capped=True),
]
TOLD = {
    "checkpoint": "runs/x/checkpoints/step_00000100", "target": "Qwen/Qwen3-8B",
    "prompts": "builtin", "temperature": 0.0, "batch_size": 1,
    "dtype": "float32", "device": "cpu", "max_new_tokens": 9,
    "num_turns_too_long": 2, "last_round": None,
    "not_first_choice": {loop: {"tokens": 400, "other": 2} for loop in ("plain", "speculative")},
}  # fmt: skip


def test_pooled_and_mean_and_positions():
    result = acceptance(ANSWERS[:3], num_drafts=3, seed=0)
    assert result["num_answers"] == 3 and result["tokens"] == 10 and result["passes"] == 4
    assert result["acceptance_length"] == 10 / 4
    assert result["mean_acceptance_length"] == (6 / 3 + 4) / 2
    assert result["position_acceptance"] == [3 / 4, 3 / 4, 1 / 3]
    assert result["emitted_histogram"] == [1, 1, 1, 1]


def test_groups_and_what_is_clean():
    report = make_report(ANSWERS, 3, (2.0, 0.5), seed=0)
    assert json.loads(json.dumps(report)) == report
    assert report["num_prompts"] == 3 and report["num_answers"] == 4
    assert report["all"]["acceptance_length"] == 12 / 6
    assert report["clean"]["acceptance_length"] == 10 / 4
    assert report["by_task"]["chat"]["all"]["acceptance_length"] == 1
    assert report["by_task"]["chat"]["clean"]["acceptance_length"] is None
    buckets = [(one["from"], one["to"]) for one in report["by_prompt_length"]]
    assert buckets == [(1, 32), (33, 64), (65, 128)]
    assert report["by_prompt_length"][1]["all"]["tokens"] == 10
    assert report["plain_tokens_per_second"] == 12 / 2.0 and report["speedup"] == 4
    assert report["tokens_compared_equal"] == 16 and report["rounding_ties"] == 0


def test_intervals_are_the_bootstraps():
    """Drawn anew, prompt by prompt, with the definition's own words."""
    random = np.random.default_rng(7)
    answers, by_prompt = [], {}
    for prompt in range(30):
        for _ in range(1 + prompt % 2):  # some of two turns
            emitted = random.integers(1, 2 + prompt % 4, 12).tolist()
            answers.append(answer(emitted, [n - 1 for n in emitted], [3] * 12, prompt=prompt))
            by_prompt.setdefault(prompt, []).extend(emitted)
    result = acceptance(answers, 3, seed=0)
    values = []
    for _ in range(4000):
        drawn = [by_prompt[i] for i in random.integers(0, 30, 30)]
        values.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    low, high = np.quantile(values, [0.025, 0.975])
    found = result["acceptance_length_interval"]
    # The two bootstraps' ends differ by their own noise, some 2 % of the width each.
    assert abs(found[0] - low) < 0.1 * (high - low) and abs(found[1] - high) < 0.1 * (high - low)
    assert found[0] < result["acceptance_length"] < found[1]
    assert acceptance(answers, 3, seed=0) == result
    assert acceptance(answers, 3, seed=1) != result
    first = result["position_acceptance_interval"][0]
    assert first[0] < result["position_acceptance"][0] < first[1]
    few = acceptance(answers[:5], 3, seed=0)  # of four prompts, which say little of others
    assert few["acceptance_length_interval"] is None


def test_table():
    report = TOLD | make_report(ANSWERS, 3, (2.0, 0.5), seed=0)
    table = format_report(report)
    for words in ("3 prompts of builtin, greedy", "1 answers capped at 9 tokens", "task code",
                  "2 turns too long",
                  "prompts of 33 to 64", "tokens, all: 3 1 1 1", "tokens, clean: 1 1 1 1",
                  "draft 3 accepted", "(4.00x)",
                  "16 tokens equal, 0 answers part",
                  "not the target's argmax: 0.50 % plain, 0.50 % speculative"):  # fmt: skip
        assert words in table
    assert all(len(line) <= 100 for line in table.splitlines()[1:])
    assert "WARNING" not in table and not warnings_of(report)


def test_a_drafter_that_serves_otherwise_than_it_trains_is_told():
    """The numbers of a tester's nightmare: 3.5 tokens a pass in training, 1.1 served."""
    forced = AcceptanceSums.of_answer([4, 3], [3, 3], [3, 2], 3)
    served = answer([1] * 5 + [2], [0] * 5 + [1], [3] * 6, teacher_forced=forced, prompt_length=9)
    report = TOLD | make_report([served], 3, (1.0, 1.0), seed=0)
    assert report["serves_as_trained"] is False
    assert report["teacher_forced_acceptance_length"] == 3.5
    (warning,) = warnings_of(report)
    assert warning.startswith("WARNING: ") and "IT DOES NOT SERVE AS IT TRAINS" in warning
    assert "accepts 1.17 tokens a pass, training's code 3.50" in warning


@pytest.mark.parametrize(
    ("tokens", "agrees"), [(193, True), (189, False), (207, True), (211, False)]
)
def test_five_per_cent_of_disagreement_are_rounding(tokens, agrees):
    """Of 200 tokens in 100 passes by training's code; served in 100 passes."""
    forced = AcceptanceSums.of_answer([2] * 100, [3] * 100, [1] * 100, 3)
    accepted = [count - 1 for count in passes(tokens)]
    served = answer(passes(tokens), accepted, [3] * 100, teacher_forced=forced, prompt_length=9)
    report = TOLD | make_report([served], 3, (1.0, 1.0), seed=0)
    assert report["serves_as_trained"] is agrees
    assert len(warnings_of(report)) == (not agrees)


def passes(tokens):
    """Emitted tokens of a hundred passes that add up to `tokens`, about two each."""
    emitted = [2] * 100
    for i in range(abs(tokens - 200)):
        emitted[i] += 1 if tokens > 200 else -1
    return emitted


@pytest.mark.parametrize(
    ("served", "agrees"),
    [
        ([200] * 10, True),
        ([196] * 10, False),  # little, and in every prompt
        ([300] + [200] * 9, True),  # 5 %, in one prompt: it may be a flip that had consequences
        ([120] + [200] * 9, True),
        ([230, 250, 220, 240, 210] * 2, False),  # each prompt otherwise, and never below
    ],
)
def test_the_same_prompts_by_decoding_and_by_training_are_paired(served, agrees):
    forced = AcceptanceSums.of_answer([2] * 100, [3] * 100, [1] * 100, 3)
    answers = [
        answer(passes(tokens), [count - 1 for count in passes(tokens)], [3] * 100,
               teacher_forced=forced, prompt_length=9, prompt=prompt)
        for prompt, tokens in enumerate(served)
    ]  # fmt: skip
    report = TOLD | make_report(answers, 3, (1.0, 1.0), seed=0)
    ratio, (low, high) = report["served_ratio"], report["served_ratio_interval"]
    assert ratio == sum(served) / 2000 and low <= ratio <= high
    assert report["serves_as_trained"] is agrees
    assert [line for line in warnings_of(report) if f"{ratio:.3f} [{low:.3f}, " in line] == (
        [] if agrees else warnings_of(report)
    )
    assert f"decoding's is {ratio:.3f} [{low:.3f}, {high:.3f}] of it" in format_report(report)
    assert len(warnings_of(report)) == (not agrees)


@pytest.mark.parametrize(("measured", "warns"), [(3.2, False), (6.0, True)])
def test_prompts_that_may_be_hard_by_chance_are_no_warning(measured, warns):
    answers = [
        answer([length] * 10, [length - 1] * 10, [3] * 10, prompt=i, prompt_length=9)
        for i, length in enumerate([1, 1, 1, 3, 3, 3])
    ]
    report = TOLD | make_report(answers, 3, (2.0, 0.5), seed=0)
    assert report["all"]["acceptance_length"] == 2
    report["last_round"] = {"step": 750, "acceptance_length": measured}
    assert len(warnings_of(report)) == warns


@pytest.mark.parametrize(("measured", "warns"), [(3.1, True), (2.9, False), (1.0, False)])
def test_half_of_what_training_measured_must_be_served(measured, warns):
    report = TOLD | make_report(ANSWERS, 3, (2.0, 0.5), seed=0)
    assert report["all"]["acceptance_length"] == 2
    report["last_round"] = {"step": 750, "acceptance_length": measured}
    line = f"training measured {measured:.2f} on its held-out rows at step 750"
    assert line in format_report(report).splitlines()
    told = warnings_of(report)
    assert len(told) == warns
    if warns:
        assert f"served at 2.00 tokens a pass, where training measured {measured:.2f}" in told[0]


def test_next_to_nothing_is_no_half():
    served = answer([1] * 10, [0] * 10, [3] * 10, prompt_length=9)
    report = TOLD | make_report([served], 3, (2.0, 0.5), seed=0)
    for measured, warns in ((1.04, False), (1.06, True)):
        report["last_round"] = {"step": 750, "acceptance_length": measured}
        assert len(warnings_of(report)) == warns


def test_ties_are_counted_and_many_are_told():
    def parting(at):
        tokens = list(range(20))
        other = [*tokens[:at], *(token + 1 for token in tokens[at:])]
        fast = Decoded(other, [19], [19], [18])
        slow = Decoded(tokens, [1] * 19, [0] * 19, [0] * 19)
        return Comparison(slow, fast, capped=False, looping=False, prompt_length=9)

    def reported(*places):
        return TOLD | make_report([parting(at) for at in places], 20, (2.0, 0.5), seed=0)

    few = reported(20, 20, 20, 20, 7)
    assert few["rounding_ties"] == 1 and few["tokens_compared_equal"] == 87
    assert not warnings_of(few)  # 20 % of the answers
    many = reported(20, 20, 20, 20, 7, 12)
    assert many["rounding_ties"] == 2 and many["tokens_compared_equal"] == 99
    (warning,) = warnings_of(many)
    assert "2 of 6 answers part from plain decoding, after 50 tokens on average" in warning
    sampled = make_report([parting(7)], 20, (2.0, 0.5), seed=0, greedy=False)
    assert sampled["rounding_ties"] == sampled["tokens_compared_equal"] == 0


def test_figure(tmp_path):
    reports = [TOLD | make_report(some, 3, (2.0, 0.5), seed=0) for some in (ANSWERS, ANSWERS[3:])]
    draw_figure(reports, tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").read_bytes()[:4] == b"\x89PNG"
    for wrong in ("no such folder/acceptance.png", ""):
        with pytest.raises(InputError, match="cannot be written"):
            draw_figure(reports, tmp_path / wrong)


def test_the_figure_shows_the_reports_numbers():
    """Points and the ends of their bars, drafter by drafter; clean answers, or all of a drafter
    without any."""
    random = np.random.default_rng(3)
    answers = []
    for prompt in range(24):
        emitted = random.integers(1, 5, 4 + prompt % 5).tolist()
        task = ("code", "chat")[prompt % 2]
        answers.append(
            answer(emitted, [n - 1 for n in emitted], [3] * len(emitted), prompt=prompt, task=task,
                   prompt_length=20 + 60 * (prompt % 3), capped=prompt == 3)
        )  # fmt: skip
    reports = [TOLD | make_report(some, 3, (2.0, 0.5), seed=0) for some in (answers, ANSWERS[3:])]
    panels = make_figure(reports).axes
    assert len(panels) == 3
    for number, (report, kind) in enumerate(zip(reports, ("clean", "all"), strict=True)):
        shift = 0.1 * (number - 0.5)
        part = report[kind]
        shares, intervals = part["position_acceptance"], part["position_acceptance_interval"]
        shown = {k + 1: (shares[k], intervals[k]) for k in range(3)}
        assert drawn(panels[0].containers[number], shift) == pytest.approx(flat(shown))
        lengths = ("1-32", "65-128", "129-256")
        assert [label.get_text() for label in panels[1].get_xticklabels()] == list(lengths)
        shown = {
            lengths.index(f"{one['from']}-{one['to']}"): length_of(one[kind])
            for one in report["by_prompt_length"]
        }
        assert drawn(panels[1].containers[number], shift) == pytest.approx(flat(shown))
        assert [label.get_text() for label in panels[2].get_xticklabels()] == ["chat", "code"]
        shown = {
            ("chat", "code").index(task): length_of(one[kind])
            for task, one in report["by_task"].items()
        }
        assert drawn(panels[2].containers[number], shift) == pytest.approx(flat(shown))


def test_the_figure_says_what_it_shows_and_has_no_empty_place():
    def drafter(length, name):
        answers = [
            answer([length] * 4, [length - 1] * 4, [3] * 4, prompt=i, task=("code", "chat")[i % 2],
                   prompt_length=20 + 20 * (i % 3))
            for i in range(12)
        ]  # fmt: skip
        cut = answer([4], [3], [3], prompt=12, task="math", prompt_length=500, capped=True)
        report = TOLD | make_report([*answers, cut], 3, (2.0, 0.5), seed=0)
        return report | {"checkpoint": f"runs/{name}/checkpoints/best"}

    figure = make_figure([drafter(4, "high"), drafter(2, "low")])
    title = figure.get_suptitle()
    for words in ("Qwen/Qwen3-8B", "13 prompts of builtin", "greedy", "up to 9 tokens"):
        assert words in title
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "high/checkpoints/best: 4.00 [4.00, 4.00], 12 clean answers",
        "low/checkpoints/best: 2.00 [2.00, 2.00], 12 clean answers",
    ]
    shares, lengths, tasks = figure.axes
    assert [label.get_text() for label in tasks.get_xticklabels()] == ["chat", "code"]
    assert tasks.get_xlabel() == "task\nno such answers: math"
    assert [label.get_text() for label in lengths.get_xticklabels()] == ["1-32", "33-64"]
    assert lengths.get_xlabel().endswith("no such answers: 257-512")
    figure.canvas.draw()
    for panel in (shares, lengths, tasks):  # whole marks, the highest included
        inside = panel.get_window_extent()
        for container in panel.containers:
            for point in panel.transData.transform(container[0].get_xydata()):
                room = container[0].get_markersize() / 2 * figure.dpi / 72
                assert inside.y0 + room < point[1] < inside.y1 - room


def length_of(part):
    return part["acceptance_length"], part["acceptance_length_interval"]


def flat(points):
    """x, value, low, high of each point in order, one after the other."""
    return [n for x, (y, ends) in sorted(points.items()) for n in (x, y, *(ends or (y, y)))]


def drawn(container, shift):
    """The same of what an error bar's artists hold."""
    line, _, (bars,) = container
    points = zip(line.get_xdata(), line.get_ydata(), bars.get_segments(), strict=True)
    found = [(x - shift, y, low, high) for x, y, ((_, low), (_, high)) in points]
    return [n for point in sorted(found) for n in point]
