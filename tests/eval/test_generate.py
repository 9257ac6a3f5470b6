"""Batches give what the model gives alone, and files of answers hold the very tokens it wrote."""

import asyncio
import contextlib
import gzip
import json

import pytest
import torch
from demo_files import TARGET
from rounding import in_float64

from dflashdist.config import InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import parse_row
from dflashdist.eval.decode import CachedTarget, Rule, decode_plain
from dflashdist.eval.generate import (
    GreedyBatch,
    LocalAnswerer,
    encodes_back,
    is_looping,
    load_model,
    regenerate_locally,
)
from dflashdist.regenerate.replay import AnswerError
from dflashdist.regenerate.run import failed_path, regenerate

QUESTIONS = [
    "What does json.dumps do?", "Explain os.walk.", "What is shutil.copy for?",
    "Show the source of asyncio.base_events.BaseEventLoop.create_task.",
    "Write the signature of pathlib.Path.open.", "What is it?", "Describe heapq.merge please.",
    "Which functions does zipfile.ZipFile.extract call?", "What does heapq.heappush do?",
    "Explain string.Template.", "What can bisect.bisect return?", "Why?",
]  # fmt: skip
NEW = 60


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


@pytest.fixture(scope="module")
def model():
    """In float64: equal tokens must not hang on how a processor rounds."""
    return in_float64(load_model(str(TARGET), "float64", "cpu"))


@pytest.fixture
def batch(model, chat):
    return GreedyBatch(model, chat.end_ids, chat.pad_id)


@pytest.fixture(scope="module")
def alone(model, chat):
    """Prompts, and what the model answers to each on its own."""
    prompts = [chat.encode_prompt([user(text)]) for text in QUESTIONS]
    target, rule = CachedTarget(model), Rule(NEW, chat.end_ids)
    return prompts, [decode_plain(target, [ids], rule)[0][0].tokens for ids in prompts]


def user(text):
    return {"role": "user", "content": text}


def answerer(model, chat, **sizes):
    return LocalAnswerer("demo", model, chat, **({"batch_size": 5, "max_tokens": NEW} | sizes))


def test_batches_give_what_the_model_gives_alone(batch, chat, alone):
    prompts, tokens = alone
    expected = [ids if ids[-1] in chat.end_ids else None for ids in tokens]
    assert 3 <= sum(ids is None for ids in expected) <= 9  # both kinds are there
    assert batch.answers(prompts, NEW) == expected
    assert batch.answers(prompts[3:4], NEW) == expected[3:4]
    longest = max(len(ids) for ids in expected if ids)
    assert batch.answers(prompts, longest) == expected  # its end is the last token allowed
    fewer = batch.answers(prompts, longest - 1)
    assert fewer == [ids if ids and len(ids) < longest else None for ids in expected]


def test_who_has_ended_leaves_the_batch(batch, alone):
    prompts, tokens = alone
    batch.answers(prompts, NEW)
    assert batch.num_tokens == sum(
        -(-len(ids) // 8) * 8 if len(ids) < 56 else NEW for ids in tokens
    )


def test_positions_count_from_a_prompts_first_token(batch, alone):
    seen = []
    hook = batch.model.register_forward_pre_hook(
        lambda _module, _arguments, keywords: seen.append(keywords), with_kwargs=True
    )
    batch.answers(alone[0][:3], 2)
    hook.remove()
    for prompt, positions in zip(alone[0], seen[0]["position_ids"].tolist(), strict=False):
        assert positions[-len(prompt) :] == list(range(len(prompt)))
    assert seen[1]["position_ids"].flatten().tolist() == [len(ids) for ids in alone[0][:3]]


def test_giving_up(batch, chat, alone):
    prompts, tokens = alone
    shown = []
    answers = batch.answers(
        prompts, NEW, give_up=lambda ids: shown.append(list(ids)) or len(ids) > 9
    )
    ends = [ids[-1] in chat.end_ids and len(ids) <= 10 for ids in tokens]
    assert [ids is not None for ids in answers] == ends
    assert not any(token in chat.end_ids for ids in shown for token in ids)
    looping = batch.answers(prompts, NEW, give_up=is_looping)
    assert all(not is_looping(ids[:-1]) for ids in looping if ids)


def test_answers_are_trained_on_as_the_tokens_they_were_written_in(tmp_path, model, chat, alone):
    source, out = tmp_path / "in.jsonl", tmp_path / "made" / "out.jsonl"
    out.parent.mkdir()
    rows = [{"messages": [user(text)]} for text in QUESTIONS]
    rows.insert(4, {"text": "no conversation"})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = regenerate_locally(
        [source], out, target=str(TARGET), batch_size=5, max_tokens=NEW, device="cpu"
    )
    expected = {
        text: ids for text, ids in zip(QUESTIONS, alone[1], strict=True) if ids[-1] in chat.end_ids
    }
    written = {}
    for line in out.read_text().splitlines():
        [row] = chat.training_rows(parse_row("x", line)).rows
        text = json.loads(line)["messages"][0]["content"]
        written[text] = row.ids[row.loss_mask.astype(bool)].tolist()
    assert written == expected
    assert counts["input"] == 13 and counts["skipped"] == 1
    assert (counts["succeeded"], counts["failed"]) == (len(expected), 12 - len(expected))
    assert counts["reasons"]["failed"]["counts"] == {
        "answer cut off at max_tokens": counts["failed"]
    }
    again = LocalAnswerer(str(TARGET), model, chat, batch_size=5, max_tokens=NEW)
    assert regenerate([source], out, again, concurrency=5)["already"] == len(expected)
    assert again._batch.num_tokens == 0  # nor are the cut ones asked again
    assert len(failed_path(out).read_text().splitlines()) == 12 - len(expected)


def test_settings_of_local_answers_stand_in_their_file(tmp_path):
    """Of the template's settings too; the day only where it is named: tomorrow goes on."""
    template = tmp_path / "dated.jinja"
    text = (TARGET / "chat_template.jinja").read_text()
    template.write_text("{%- set today = strftime_now('%d %b %Y') -%}" + text)
    source, out = tmp_path / "in.jsonl", tmp_path / "made" / "out.jsonl"
    out.parent.mkdir()
    source.write_text(json.dumps({"messages": [user(QUESTIONS[1])]}) + "\n")

    def ask(**settings):
        return regenerate_locally(
            [source], out, target=str(TARGET), batch_size=1, max_tokens=NEW, device="cpu",
            template=str(template), **settings,
        )  # fmt: skip

    assert ask()["succeeded"] == 1
    assert "date" not in json.loads(out.read_text())["settings"]
    with pytest.raises(InputError, match='date: no such setting there, "2024-01-02" now'):
        ask(date="2024-01-02")
    with pytest.raises(InputError, match=r"template_settings\.brief: no such setting there, true"):
        ask(template_settings={"brief": True})
    out.unlink()
    assert ask(date="2024-01-02")["succeeded"] == 1
    assert json.loads(out.read_text())["settings"]["date"] == "2024-01-02"


def test_the_shipped_conversations_come_out_again(tmp_path, model, chat):
    """The next question follows the model's own answer: these were made like that."""
    with gzip.open(TARGET.parent / "train.jsonl.gz", "rt") as lines:
        shipped = [json.loads(line)["messages"] for line in lines]
    shipped = [messages for messages in shipped if len(messages) > 2][:6]
    source, out = tmp_path / "in.jsonl", tmp_path / "made" / "out.jsonl"
    out.parent.mkdir()
    rows = [
        {"messages": [m if m["role"] == "user" else m | {"content": "theirs"} for m in messages]}
        for messages in shipped
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    regenerate([source], out, answerer(model, chat, max_tokens=128), concurrency=5)
    written = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert sorted(written, key=str) == sorted(shipped, key=str)


def test_an_answer_in_other_tokens_than_its_text_encodes_to(chat):
    messages = [user("Why?"), {"role": "assistant", "content": "A walk."}]
    whole = [*chat.encode(["A walk."])[0].ids, chat.end_ids[0]]
    letters = [token for letter in "A walk." for token in chat.encode([letter])[0].ids]
    assert encodes_back(chat, messages, None, whole)
    assert not encodes_back(chat, messages, None, [*letters, chat.end_ids[0]])


def test_what_does_not_fit_is_refused(model, chat):
    with pytest.raises(InputError, match="demo has 2048 positions"):
        answerer(model, chat, max_tokens=2048)
    with pytest.raises(InputError, match="batch_size=0"):
        answerer(model, chat, batch_size=0)
    with pytest.raises(InputError, match="nowhere: the target cannot be loaded"):
        load_model("/nowhere")

    async def ask_much():
        await answerer(model, chat, max_tokens=2000).answer([user("word " * 100)], None)

    with pytest.raises(AnswerError, match="leaves no room"):
        asyncio.run(ask_much())


def test_a_batch_that_is_stopped_ends_within_a_few_tokens(model, chat, alone):
    endless = next(
        text
        for text, ids in zip(QUESTIONS, alone[1], strict=True)
        if len(ids) == NEW and is_looping(ids)
    )
    local = answerer(model, chat, max_tokens=900)

    async def start_and_stop():
        asking = asyncio.create_task(local.answer([user(endless)], None))
        while not local._batch.num_tokens:
            await asyncio.sleep(0.001)
        asking.cancel()
        await local.close()
        assert asking.cancelled()

    asyncio.run(start_and_stop())
    assert local._batch.num_tokens < 900


def test_questions_that_wait_are_answered_together(model, chat):
    local = answerer(model, chat, batch_size=4)
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda _module, _arguments, keywords: sizes.append(tuple(keywords["input_ids"].shape)),
        with_kwargs=True,
    )

    async def converse(first, second):
        for text in (first, second):
            with contextlib.suppress(AnswerError):
                await local.answer([user(text)], None)

    async def ask_all():
        pairs = zip(QUESTIONS[:5], QUESTIONS[5:10], strict=True)
        await asyncio.gather(*(converse(*pair) for pair in pairs))

    asyncio.run(ask_all())
    hook.remove()
    # The fifth question of the first round waits for three of the second.
    assert [rows for rows, width in sizes if width > 1] == [4, 4, 2]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("broken"), RuntimeError), (torch.OutOfMemoryError("full"), InputError)],
)
def test_a_model_that_breaks_ends_the_run(tmp_path, model, chat, error, raised):
    source, out = tmp_path / "in.jsonl", tmp_path / "made" / "out.jsonl"
    out.parent.mkdir()
    source.write_text(json.dumps({"messages": [user("Why?")]}) + "\n")

    def fail(_module, _arguments):
        raise error

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(raised, match=r"broken|do not fit .*lower --batch-size"):
        regenerate([source], out, answerer(model, chat), concurrency=2)
    hook.remove()
