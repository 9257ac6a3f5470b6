"""A whole evaluation adds up, and what must not pass in silence does not."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from demo_files import TARGET
from safetensors.torch import load_file, save_file

from dflashdist.config import DrafterConfig, EvaluateConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.eval import decode
from dflashdist.eval.acceptance import _follow_ups, _memory, evaluate_drafters
from dflashdist.eval.cross_check import OutputsDiffer
from dflashdist.eval.decode import Decoded
from dflashdist.eval.figure import draw_figure
from dflashdist.eval.prompts import Prompt
from dflashdist.eval.report import format_report
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import save_drafter
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import read_target_config, target_fingerprint

QUESTIONS = ["What does json.dumps do?", "What is it?", "Describe os.walk please.", "Why?"]


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


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
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # of few words, so that even a random drafter is right now and then
        model.lm_head.weight[:300] = model.lm_head.weight[308:] = 0
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TARGET / file, folder / file)
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


def test_report_of_an_untrained_drafter(drafter_folder, target, prompts, tmp_path):
    evaluate = EvaluateConfig(max_prompts=3, max_new_tokens=16)
    report = evaluate_drafters([drafter_folder], str(target), prompts, evaluate, "cpu")[0]
    assert json.loads(json.dumps(report)) == report
    assert report["num_prompts"] == report["all"]["num_answers"] == 3
    # Each answer's first token is the prefill's.
    assert report["all"]["tokens"] == report["tokens_compared_equal"] - 3
    assert 1.05 < report["all"]["acceptance_length"] < 1.5
    assert len(report["all"]["position_acceptance"]) == 3
    # A random target does not end by itself within 16 of 2,112 tokens.
    assert report["num_capped"] == 3 and report["clean"]["num_answers"] == 0
    assert report["clean"]["acceptance_length"] is None
    # Both loops' tokens were held to the target's own.
    num = report["all"]["tokens"] + 3
    both = report["not_first_choice"]
    assert both["plain"] == both["speculative"] == {"tokens": num, "other": 0, "unusual": 0}
    # Training's code counts the same on the same text: float32, so to the last token.
    assert report["teacher_forced_acceptance_length"] == report["all"]["acceptance_length"]
    assert report["serves_as_trained"] is True
    table = format_report(report)
    assert "3 prompts" in table and f"{report['all']['acceptance_length']:.2f}" in table
    draw_figure([report], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture(scope="module")
def greedy(drafter_folder, target, prompts):
    evaluate = EvaluateConfig(max_prompts=4, max_new_tokens=10)
    return evaluate_drafters([drafter_folder] * 2, str(target), prompts, evaluate, "cpu")


def test_several_drafters_share_the_plain_answers(greedy):
    assert greedy[0]["all"] == greedy[1]["all"]
    assert greedy[0]["plain_tokens_per_second"] == greedy[1]["plain_tokens_per_second"]


def test_a_batch_changes_no_number(greedy, drafter_folder, target, prompts):
    evaluate = EvaluateConfig(max_prompts=4, max_new_tokens=10, batch_size=3)
    (report,) = evaluate_drafters([drafter_folder], str(target), prompts, evaluate, "cpu")
    assert report["all"] == greedy[0]["all"]
    assert report["by_prompt_length"] == greedy[0]["by_prompt_length"]


def test_sampling_repeats_with_its_seed(drafter_folder, target, prompts):
    def sampled(seed):
        evaluate = EvaluateConfig(max_prompts=2, max_new_tokens=16, temperature=1.0, seed=seed)
        (report,) = evaluate_drafters([drafter_folder], str(target), prompts, evaluate, "cpu")
        assert report["serves_as_trained"] is None  # its text is not the greedy one
        assert "sampled at temperature 1," in format_report(report)
        return report["all"]

    first, again, other = map(sampled, (0, 0, 1))
    assert first == again != other


def test_two_turns_of_one_prompt(drafter_folder, target, tmp_path):
    file = tmp_path / "mt.jsonl"
    rows = [{"prompt": ["What is os?", "And sys?"]}, {"prompt": ["What is re?", "Why?"]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    for batch_size in (1, 2):
        evaluate = EvaluateConfig(max_new_tokens=6, task="mtbench", batch_size=batch_size)
        (report,) = evaluate_drafters([drafter_folder], str(target), file, evaluate, "cpu")
        assert report["num_prompts"] == 2 and report["num_answers"] == 4
        assert set(report["by_task"]) == {"mtbench"}


def test_follow_ups_stand_after_the_targets_own_text(chat):
    """Its end token is not part of the text, and an answer that was cut has none."""
    prompt = Prompt([1], "", "", ({"role": "user", "content": "What?"},), follow_ups=("Why?",))
    tokens = chat.encode_prompt([{"role": "user", "content": "Own text"}])[2:5]
    end = next(iter(chat.end_ids))
    cases = [Decoded([*tokens, end]), Decoded(tokens), Decoded([9])]
    batch = [(0, prompt), (1, prompt), (2, replace(prompt, follow_ups=()))]
    found = _follow_ups(batch, cases, chat)
    assert [i for i, _ in found] == [0, 1]
    for _, following in found:
        said = {"role": "assistant", "content": chat.decode(tokens)}
        messages = [*prompt.messages, said, {"role": "user", "content": "Why?"}]
        assert list(following.messages) == messages
        assert following.ids == chat.encode_prompt(messages)


def test_a_verifier_that_says_the_second_best_token_is_found(
    drafter_folder, target, prompts, tmp_path, monkeypatch
):
    verify, nearness = decode.verify, 0.0

    def second_best(logits, *rest):
        two = logits.float().topk(2, -1)
        near = two.values[..., 0] * (1 - nearness) < two.values[..., 1]
        swapped = torch.where(near, two.values[..., 1] - 9, two.values[..., 0])
        largest = two.indices[..., :1]
        return verify(logits.scatter(-1, largest, swapped[..., None].to(logits.dtype)), *rest)

    monkeypatch.setattr(decode, "verify", second_best)
    settings = EvaluateConfig(max_prompts=2, max_new_tokens=24)

    def evaluated(folder, dtype):
        evaluate_drafters([drafter_folder], str(folder), prompts, settings, "cpu", dtype=dtype)

    evaluated(target, "float32")
    nearness = 0.3
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(OutputsDiffer, match=r"token \d+ of .* logit margin \d"):
            evaluated(target, dtype)
    # Where each word has a twin 2 eps below it, rounding hides each such token alone: they are
    # too many.
    nearness = 5 * torch.finfo(torch.bfloat16).eps
    twins = tmp_path / "twins"
    shutil.copytree(target, twins)
    weights = load_file(twins / "model.safetensors")
    head = weights["lm_head.weight"]
    head[308:316] = head[300:308] * (1 - 2 * torch.finfo(torch.bfloat16).eps)
    save_file(weights, twins / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OutputsDiffer, match=r"% of its tokens are not the target's first choice"):
        evaluated(twins, "bfloat16")


def test_memory_names_the_setting():
    for batch_size, fix in ((8, "batch_size"), (1, "max_new_tokens")):
        settings = EvaluateConfig(batch_size=batch_size)
        told = pytest.raises(InputError, match=rf"batch_size={batch_size} .* lower evaluate.{fix}")
        with told, _memory(settings):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_another_target_is_refused(drafter_folder, prompts):
    with pytest.raises(InputError, match=r"hidden_size is 128, the drafter was made for .* 32"):
        evaluate_drafters([drafter_folder], str(TARGET), prompts, EvaluateConfig(), "cpu")


def test_another_target_of_the_same_shape_is_refused(drafter_folder, target, prompts, tmp_path):
    checkpoint = tmp_path / "step_00000001"
    shutil.copytree(drafter_folder, checkpoint)
    (checkpoint / "trainer").mkdir()
    state = checkpoint / "trainer/state.json"
    evaluate = EvaluateConfig(max_prompts=1, max_new_tokens=2)
    state.write_text(json.dumps({"target": target_fingerprint(str(target))}))
    assert evaluate_drafters([checkpoint], str(target), prompts, evaluate, "cpu")
    state.write_text(json.dumps({"target": "0123456789abcdef"}))
    shutil.copytree(drafter_folder, checkpoint / "ema")
    for place in (checkpoint, checkpoint / "ema"):
        with pytest.raises(InputError, match=r"another target .* \(0123456789abcdef\)"):
            evaluate_drafters([place], str(target), prompts, evaluate, "cpu")
    for corrupt in ("[", "[]"):
        state.write_text(corrupt)
        with pytest.raises(InputError, match=r"state\.json: "):
            evaluate_drafters([checkpoint], str(target), prompts, evaluate, "cpu")
