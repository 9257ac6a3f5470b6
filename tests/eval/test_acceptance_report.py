"""The numbers of a report by hand, and its intervals against another way to compute them."""

import json

import numpy as np
import pytest

from dflashdist.config import InputError
from dflashdist.eval.decode import Decoded
from dflashdist.eval.figure import draw_figure
from dflashdist.eval.report import Answer, acceptance, format_report, make_report
from dflashdist.model.teacher_forced import AcceptanceSums


def answer(emitted, accepted, offered, **more):
    decoded = Decoded([0] * (1 + sum(emitted)), emitted, offered, accepted)
    return Answer(decoded, decoded, **{"capped": False, "looping": False} | more)


ANSWERS = [
    answer([3, 1, 2], [2, 0, 2], [3, 3, 2], prompt=0, task="code", prompt_length=40),  # ended
    answer([4], [3], [3], prompt=0, task="code", prompt_length=64),
    answer([], [], [], prompt=1, task="chat", prompt_length=20),  # the end at once: no pass
    answer([1, 1], [0, 0], [3, 3], prompt=2, task="chat", prompt_length=65, capped=True),
]
TOLD = {
    "checkpoint": "runs/x/checkpoints/step_00000100", "prompts": "builtin", "temperature": 0.0,
    "batch_size": 1, "dtype": "float32", "device": "cpu", "max_new_tokens": 9,
    "num_turns_too_long": 2,
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
    table = format_report(TOLD | make_report(ANSWERS, 3, (2.0, 0.5), seed=0))
    for words in ("3 prompts of builtin, greedy", "1 answers capped at 9 tokens", "task code",
                  "2 turns too long",
                  "prompts of 33 to 64", "tokens, all: 3 1 1 1", "tokens, clean: 1 1 1 1",
                  "draft 3 accepted", "(4.00x)",
                  "16 tokens equal"):  # fmt: skip
        assert words in table
    assert all(len(line) <= 100 for line in table.splitlines()[1:])
    assert "WARNING" not in table


def test_a_drafter_that_serves_otherwise_than_it_trains_is_told():
    """The numbers of a tester's nightmare: 3.5 tokens a pass in training, 1.1 served."""
    forced = AcceptanceSums.of_answer([4, 3], [3, 3], [3, 2], 3)
    served = answer([1] * 5 + [2], [0] * 5 + [1], [3] * 6, teacher_forced=forced, prompt_length=9)
    report = TOLD | make_report([served], 3, (1.0, 1.0), seed=0)
    assert report["serves_as_trained"] is False
    assert report["teacher_forced_acceptance_length"] == 3.5
    assert "WARNING: IT DOES NOT SERVE AS IT TRAINS" in format_report(report)
    assert "accepts 1.17 tokens a pass, training's code 3.50" in format_report(report)


def test_figure(tmp_path):
    reports = [TOLD | make_report(some, 3, (2.0, 0.5), seed=0) for some in (ANSWERS, ANSWERS[3:])]
    draw_figure(reports, tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").stat().st_size > 10_000
    with pytest.raises(InputError, match="cannot be written"):
        draw_figure(reports, tmp_path / "no such folder/acceptance.png")
