"""The report adds up, and a difference between the two outputs is caught."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import dflashdist.demo
from dflashdist.config import DrafterConfig, EvaluateConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.eval.acceptance import (
    Answer,
    OutputsDiffer,
    acceptance,
    check_equal,
    evaluate_drafters,
    format_report,
    read_prompts,
)
from dflashdist.eval.decode import CachedTarget, Decoded, plain_greedy
from dflashdist.model.drafter import Drafter, save_drafter
from dflashdist.model.shape import DrafterShape, read_target_config

DEMO = Path(dflashdist.demo.__file__).parent / "target"
QUESTIONS = ["What does json.dumps do?", "What is it?", "Describe os.walk please.", "Why?"]


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(DEMO)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target of 3 layers in a folder, with the demo's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=2112, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        initializer_range=0.2, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def drafter_folder(target, tmp_path_factory):
    settings = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[1], mask_token_id=2048)
    shape = DrafterShape.from_target(read_target_config(str(target)), None, settings)
    drafter = Drafter(shape)
    drafter.reset_parameters("fan_in", seed=0)
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(folder, drafter)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    rows[1]["messages"].append({"role": "assistant", "content": "left out"})
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_report_of_an_untrained_drafter(drafter_folder, target, prompts):
    evaluate = EvaluateConfig(max_prompts=3, max_new_tokens=16)
    report = evaluate_drafters([drafter_folder], str(target), prompts, evaluate, "cpu")[0]
    assert json.loads(json.dumps(report)) == report
    assert report["num_prompts"] == report["all"]["num_answers"] == 3
    # Each answer's first token is the prefill's.
    assert report["all"]["tokens"] == report["tokens_compared_equal"] - 3
    assert 1 <= report["all"]["acceptance_length"] < 1.5
    assert len(report["all"]["position_acceptance"]) == 3
    # A random target does not end by itself within 16 of 2,112 tokens.
    assert report["num_capped"] == 3 and report["clean"]["num_answers"] == 0
    assert report["clean"]["acceptance_length"] is None
    table = format_report(report)
    assert "3 prompts" in table and f"{report['all']['acceptance_length']:.2f}" in table


def test_several_drafters_share_the_plain_answers(drafter_folder, target, prompts):
    evaluate = EvaluateConfig(max_prompts=2, max_new_tokens=6)
    both = evaluate_drafters([drafter_folder] * 2, str(target), prompts, evaluate, "cpu")
    assert both[0]["all"] == both[1]["all"]
    assert both[0]["plain_tokens_per_second"] == both[1]["plain_tokens_per_second"]


def answer(emitted, accepted, offered):
    decoded = Decoded([0] * (1 + sum(emitted)), emitted, offered, accepted)
    return Answer(decoded, decoded, capped=False, looping=False)


def test_pooled_and_mean_and_positions():
    answers = [
        answer([3, 1, 2], accepted=[2, 0, 2], offered=[3, 3, 2]),  # the last pass met the end
        answer([4], accepted=[3], offered=[3]),
        answer([], accepted=[], offered=[]),  # the end at once: no pass, no mean
    ]
    result = acceptance(answers, block_size=4)
    assert result["num_answers"] == 3 and result["tokens"] == 10 and result["passes"] == 4
    assert result["acceptance_length"] == 10 / 4
    assert result["mean_acceptance_length"] == (6 / 3 + 4) / 2
    assert result["position_acceptance"] == [3 / 4, 3 / 4, 1 / 3]


def test_a_difference_is_raised_with_place_and_margin(target, chat):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    cached, prompt = CachedTarget(model), [5, 6, 7]
    plain = plain_greedy(cached, prompt, 8, ()).tokens
    assert not check_equal(cached, chat, prompt, plain, plain)
    other = [*plain[:3], plain[3] + 1, *plain[4:]]
    with pytest.raises(OutputsDiffer, match=r"token 3 of the answer to .* logit margin \d"):
        check_equal(cached, chat, prompt, plain, other)
    with pytest.raises(OutputsDiffer, match=r"token 5 .* margin inf"):
        check_equal(cached, chat, prompt, plain, plain[:5])
    with torch.no_grad():  # two tokens that the target cannot tell apart
        model.lm_head.weight[plain[3] + 1] = model.lm_head.weight[plain[3]]
    assert check_equal(cached, chat, prompt, plain, other)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "prompts.jsonl:1: not a prompt: not JSON"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no messages before"),
        ('{"messages": [{"role": "user", "content": "a b c d e f g h i j k l"}]}', "lower"),
        ("", "no prompts"),
    ],
)
def test_bad_prompts_are_named(tmp_path, chat, line, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(InputError, match=words):
        read_prompts(file, chat, 10, longest=20)


def test_a_final_answer_is_left_out(prompts, chat):
    ids = read_prompts(prompts, chat, 10, longest=99)
    texts = [chat.decode(one) for one in ids]
    assert texts[1] == "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert len(texts) == len(QUESTIONS)
    assert len(read_prompts(prompts, chat, 2, longest=99)) == 2


def test_another_target_is_refused(drafter_folder, prompts):
    with pytest.raises(InputError, match=r"hidden_size is 128, the drafter was made for .* 32"):
        evaluate_drafters([drafter_folder], str(DEMO), prompts, EvaluateConfig(), "cpu")
