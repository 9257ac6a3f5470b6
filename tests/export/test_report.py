"""What was measured: of which weights, what the card says of it, and what is no report."""

import copy
import hashlib
import json
import shutil

import pytest
import torch
from exported import card_of, card_with, change_state, config_of
from safetensors.torch import load_file

from dflashdist.config import EvaluateConfig, InputError
from dflashdist.eval.acceptance import evaluate_drafters
from dflashdist.export.folder import export_drafter
from dflashdist.model.drafter_folder import load_drafter, save_drafter, weights_digest


def test_card_shows_what_was_measured(checkpoint, reports, tmp_path):
    card, one = card_with(reports, checkpoint, tmp_path / "out", ema=True), reports[1]["all"]
    low, high = one["acceptance_length_interval"]
    shown = f"{one['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"
    assert f"| acceptance length, pooled | {shown} |" in card
    assert f"| answers | {one['num_answers']} | {reports[1]['clean']['num_answers']} |" in card
    assert f"| draft 3 accepted | {one['position_acceptance'][2]:.2f} [" in card
    assert "Prompts: rows.jsonl; greedy, at most 12 new tokens, float32 on cpu" in card
    assert "equal to the target's own, token by token" in card and "WARNING" not in card
    assert "stop = [2]" in card and reports[0]["end_ids"] == [2]


def test_where_the_output_is_not_equal_the_card_says_so(checkpoint, reports, tmp_path):
    for ties, words in ((1, "but for 1 answer that parts"), (3, "but for 3 answers that part")):
        tied = reports[0] | {"rounding_ties": ties}
        card = card_with(tied, checkpoint, tmp_path / f"out{ties}")
        assert f"{words} where two logits are closer than rounding" in card
        assert "token by token" not in card
    sampled = card_with(reports[0] | {"temperature": 1.0}, checkpoint, tmp_path / "sampled")
    assert "sampled at temperature 1" in sampled and "output was equal" not in sampled


def test_a_drafter_that_does_not_serve_as_it_trains_is_named(checkpoint, reports, tmp_path):
    odd = {"serves_as_trained": False, "teacher_forced_acceptance_length": 2.5}
    card = card_with(reports[0] | odd, checkpoint, tmp_path / "out")
    warning, table = card.index("IT DOES NOT SERVE AS IT TRAINS"), card.index("| answers |")
    assert card.index("## Measured") < warning < table
    served = reports[0]["all"]["acceptance_length"]
    assert f"accepted {served:.2f} tokens a pass, training's code counts 2.50" in card


def test_the_weights_decide_whose_a_report_is(checkpoint, reports, tmp_path):
    """No path does: another run's report is refused under the right name, and the right one is
    taken under any."""
    own = reports[0] | {"checkpoint": "elsewhere/step_00000009"}
    assert "## Measured" in card_with(own, checkpoint, tmp_path / "far")
    other = reports[0] | {"digest": reports[1]["digest"]}
    assert other["checkpoint"] == str(checkpoint)
    with pytest.raises(InputError, match="measured of other weights"):
        card_with(other, checkpoint, tmp_path / "bad")
    with pytest.raises(InputError, match="measured of other weights"):
        card_with(reports[0], checkpoint, tmp_path / "bad", ema=True)
    older = {key: value for key, value in reports[0].items() if key != "digest"}
    with pytest.raises(InputError, match=r"older version, .* evaluate again"):
        card_with(older, checkpoint, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_report_of_an_export_is_one_of_the_checkpoint(checkpoint, tiny_target, tmp_path, dtype):
    out = export_drafter(checkpoint, tmp_path / "out", dtype=dtype)
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "w5 w6"}]}))
    settings = EvaluateConfig(max_new_tokens=3)
    (report,) = evaluate_drafters([out], tiny_target, prompts, settings, "cpu")
    exact = load_drafter(checkpoint)
    exact.load_state_dict(load_file(checkpoint / "trainer/weights.safetensors"))
    same = report["digest"] == weights_digest(exact)
    assert same == (dtype != "float16")  # rounded twice, so to other values
    assert same or report["digest"] == weights_digest(exact, torch.float16)
    card = card_with(report, checkpoint, tmp_path / "again")
    assert "## Measured" in card
    assert "## Measured" in card_with(report, out, tmp_path / "of-it")


def test_the_digest_is_of_names_and_values(checkpoint, tmp_path):
    drafter = load_drafter(checkpoint)
    first = weights_digest(drafter)
    assert first == weights_digest(load_drafter(checkpoint, dtype=torch.bfloat16))
    held = load_file(checkpoint / "trainer/weights.safetensors")
    drafter.load_state_dict(held)
    assert weights_digest(drafter) == first  # rounded as the served ones are
    expected = hashlib.sha256()
    for name in sorted(held):
        expected.update(f"{name} {tuple(held[name].shape)}".encode())
        expected.update(held[name].bfloat16().view(torch.uint8).numpy().tobytes())
    assert first == expected.hexdigest()[:16]
    with torch.no_grad():
        k, v = drafter.layers[0].self_attn.k_proj.weight, drafter.layers[0].self_attn.v_proj.weight
        swapped = k.clone(), v.clone()
        k.copy_(swapped[1]), v.copy_(swapped[0])
    assert weights_digest(drafter) != first
    save_drafter(tmp_path / "out", drafter)
    assert weights_digest(load_drafter(tmp_path / "out")) == weights_digest(drafter)


NOT_REPORTS = [
    ("all", {}), ("all", None), ("checkpoint", None), ("temperature", None), ("prompts", 3),
    ("by_task", {"gsm8k": 1}), ("rounding_ties", "two"), ("end_ids", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), NOT_REPORTS)
def test_half_a_report_is_one_line(checkpoint, reports, tmp_path, key, value):
    with pytest.raises(InputError, match="not a report"):
        card_with(reports[0] | {key: value}, checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("acceptance_length", "2"), ("position_acceptance", None), ("num_answers", None),
        ("acceptance_length_interval", [1]), ("position_acceptance_interval", [1, 2, 3]),
    ],
)  # fmt: skip
def test_half_a_part_of_a_report_is_one_line(checkpoint, reports, tmp_path, key, value):
    report = copy.deepcopy(reports[0])
    report["clean"][key] = value
    with pytest.raises(InputError, match="not a report"):
        card_with(report, checkpoint, tmp_path / "out")


def test_other_files_are_no_reports(checkpoint, tmp_path):
    (tmp_path / "text").write_text("WARNING: {")
    for what in ([1], [], {}, 3):
        with pytest.raises(InputError, match="not a report"):
            card_with(what, checkpoint, tmp_path / "out")
    for name in ("text", "none"):
        with pytest.raises(InputError, match="not a report"):
            export_drafter(checkpoint, tmp_path / "out", report=tmp_path / name)


def test_the_card_says_what_training_began_with(checkpoint, tmp_path):
    """By the folder's name: its path is nobody's business."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    assert "begun from" not in card_of(export_drafter(source, tmp_path / "plain"))
    config = json.loads((source / "trainer/state.json").read_text())["config"]
    assert config.count("init_from: null") == 1
    change_state(source, config=config.replace("init_from: null", "init_from: /home/alice/base"))
    card = card_of(export_drafter(source, tmp_path / "out"))
    assert "- begun from the weights of `base`\n" in card and "alice" not in card


def test_best_of_training_is_not_this_folders_result(checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    change_state(source, best={"step": 1, "acceptance_length": 2.345, "rows": "ab"})
    card = card_of(export_drafter(source, tmp_path / "out"))
    told = "best round of evaluation so far: step 1, acceptance length 2.35 (teacher-forced; not of"
    assert told in card
    assert config_of(tmp_path / "out")["dflashdist"]["training"]["best"]["step"] == 1
