"""Prompts are what their source says, in the published shapes, and bad ones are named."""

import importlib
import importlib.util
import json
import sys
import types
from collections import Counter

import numpy as np
import pytest
from demo_files import DEMO, TARGET

from dflashdist.config import EvaluateConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.shards import TokenStoreWriter
from dflashdist.eval.prompts import TASKS, read_prompts, training_rows

ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


def write(folder, *rows):
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def test_conversations_without_their_last_answer(tmp_path, chat):
    def said(*texts):
        roles = ("user", "assistant", "user", "assistant")
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]

    file = write(
        tmp_path,
        {"messages": said("What is it?", "left out"), "category": "chat"},
        {"messages": said("a", "b", "c")},
    )
    first, second = read_prompts(file, chat, EvaluateConfig(), longest=99)
    assert chat.decode(first.ids) == ASK.format("What is it?") and first.task == "chat"
    assert "b<|im_end|>" in chat.decode(second.ids) and second.task == "prompts.jsonl"
    assert len(read_prompts(file, chat, EvaluateConfig(max_prompts=1), longest=99)) == 1


# What the published harness asks of these rows, spelled out.
PUBLISHED = {
    "gsm8k": (
        {"question": "1+1?", "answer": "#### 2"},
        "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ),
    "math500": (
        {"problem": "$x$?", "solution": ""},
        "$x$?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ),
    "humaneval": (
        {"prompt": "def f():\n", "test": ""},
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n\n```",
    ),
    "mbpp": ({"prompt": "Write a function."}, "Write a function."),
    "mtbench": ({"prompt": ["One", "Two"]}, "One"),
    "alpaca": ({"instruction": "Sum.", "input": "1, 2"}, "Sum.\n\nInput:\n1, 2"),
}


@pytest.mark.parametrize("task", TASKS)
def test_tasks_have_the_published_shape(tmp_path, chat, task):
    row, text = PUBLISHED[task]
    (prompt,) = read_prompts(write(tmp_path, row), chat, EvaluateConfig(task=task), longest=199)
    assert prompt.messages == ({"role": "user", "content": text},)
    assert prompt.task == task and prompt.ids == chat.encode_prompt(prompt.messages)


def test_tasks_are_those_of_the_dflash_package(monkeypatch):
    """Which has no alpaca."""
    pytest.importorskip("dflash", reason="pip install --no-deps dflash==0.1.0")
    monkeypatch.delitem(sys.modules, "dflash.benchmark", raising=False)
    if importlib.util.find_spec("requests") is None:  # it asks servers, which this does not
        monkeypatch.setitem(sys.modules, "requests", types.ModuleType("requests"))
    benchmark = importlib.import_module("dflash.benchmark")
    names = {"mt-bench": "mtbench"}
    assert {names.get(name, name) for name in benchmark.DATASETS} == {*TASKS} - {"alpaca"}
    for name, settings in benchmark.DATASETS.items():
        row, text = PUBLISHED[names.get(name, name)]
        asked = settings["format"](row)
        assert (asked[0] if settings.get("multi_turn") else asked) == text


def test_a_second_turn_follows_the_targets_own_answer(tmp_path, chat):
    file = write(tmp_path, {"turns": ["One", "Two"]}, {"prompt": ["Alone"]})
    two, one = read_prompts(file, chat, EvaluateConfig(task="mtbench"), longest=99)
    following = two.follow_up("An answer", chat)
    assert [message["content"] for message in following.messages] == ["One", "An answer", "Two"]
    assert following.ids == chat.encode_prompt(following.messages)
    assert following.follow_up("And", chat) is None and one.follow_up("And", chat) is None


def test_a_question_that_is_no_list_is_one_turn(tmp_path, chat):
    file = write(tmp_path, {"prompt": "Hello"})
    (prompt,) = read_prompts(file, chat, EvaluateConfig(task="mtbench"), longest=99)
    assert prompt.messages == ({"role": "user", "content": "Hello"},) and not prompt.follow_ups


@pytest.mark.parametrize(
    ("line", "task", "words"),
    [
        ("{", None, "prompts.jsonl:1: not a prompt: not JSON"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', None, "no messages before"),
        ('{"messages": [{"role": "user", "content": "a b c d e f g h i j k l"}]}', None, "lower"),
        ("", None, "no prompts"),
        ("{}", "gsm8k", "prompts.jsonl:1: not a prompt: gsm8k has a column 'question'"),
        ("[]", "gsm8k", "not a JSON object"),
        ('{"turns": null}', "mtbench", "no text where mtbench has its question"),
        ('{"turns": ["a", 2]}', "mtbench", "no text where mtbench has its question"),
        ('{"turns": []}', "mtbench", "no text where mtbench has its question"),
        ('{"prompt": null}', "humaneval", "no text where humaneval has its question"),
        ('{"question": 3}', "gsm8k", "no text where gsm8k has its question"),
        ('{"instruction": null, "input": "a"}', "alpaca", "no text where alpaca has its question"),
        ('{"prompt": " "}', "mbpp", "no text where mbpp has its question"),
        ("{}", "gsm9k", "evaluate.task=gsm9k: the tasks are gsm8k, math500"),
    ],
)
def test_bad_prompts_are_named(tmp_path, chat, line, task, words):
    with pytest.raises(InputError, match=words):
        read_prompts(write(tmp_path, line), chat, EvaluateConfig(task=task), longest=20)


def test_the_rows_of_a_token_store(tmp_path, chat):
    """To the token what training saw, up to the first answer; the validation part before all."""
    rows = [([5, 6, 7, 8, 9], [0, 0, 1, 1, 0]), ([4, 5], [1, 1]), ([9, 8, 7], [0, 1, 1])]
    settings = {"tokenizer_fingerprint": chat.tokenizer_fingerprint}
    for place, some in (("store", rows[:1]), ("store/validation", rows)):
        folder = tmp_path / place
        with TokenStoreWriter(folder, settings) as writer:
            for ids, mask in some:
                writer.add(np.array(ids), np.array(mask))
        if place == "store":
            assert training_rows(folder) == folder
    assert training_rows(folder.parent) is None is training_rows(folder)
    assert training_rows("builtin") is None
    prompts = read_prompts(folder.parent, chat, EvaluateConfig(), longest=9)
    assert [prompt.ids for prompt in prompts] == [[5, 6], [9]]  # nothing comes before row 1
    with TokenStoreWriter(tmp_path / "other", {"tokenizer_fingerprint": "f"}) as writer:
        writer.add(np.array([1, 2]), np.array([0, 1]))
    with pytest.raises(InputError, match="made with another tokenizer"):
        read_prompts(tmp_path / "other", chat, EvaluateConfig(), longest=9)


def test_built_in_prompts(chat):
    prompts = read_prompts("builtin", chat, EvaluateConfig(max_prompts=999), longest=999)
    assert Counter(prompt.task for prompt in prompts) == dict.fromkeys(
        ("chat", "code", "math", "writing"), 16
    )
    assert len({tuple(prompt.ids) for prompt in prompts}) == 64
    few = read_prompts("builtin", chat, EvaluateConfig(max_prompts=4), longest=999)
    assert [prompt.task for prompt in few] == ["chat", "code", "math", "writing"]
    heldout = DEMO / "heldout.jsonl.gz"
    assert len(read_prompts(heldout, chat, EvaluateConfig(max_prompts=999), longest=999)) == 128
