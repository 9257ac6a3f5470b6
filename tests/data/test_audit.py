"""The audit: its numbers are the store's, and what it marks is what is supervised."""

import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from demo_files import TARGET

from dflashdist.commands import inspected
from dflashdist.config import Config, DataConfig, InputError
from dflashdist.data.audit import (
    CLOSE,
    GREEN,
    OPEN,
    PLAIN,
    Tally,
    format_summary,
    inspect_row,
    summarise,
)
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Rejections
from dflashdist.data.prepare import prepare
from dflashdist.data.shards import TokenStore, TokenStoreWriter
from dflashdist.data.tokenizer import TargetTokenizer

ANSWER = "Use ```` and \x1b[2J:\n\n```python\nx = 1\n```"


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    folder = tmp_path_factory.mktemp("audit")
    rows = []
    for i in range(40):
        asked = {"role": "user", "content": f"What is {i}?"}
        answered = {"role": "assistant", "content": f"{i}: {ANSWER}"}
        again = {"role": "user", "content": "Thanks, and now?"}
        rows.append({"messages": [asked, answered, again, answered]})
    rows += [{"text": "Plain text, " * 200}, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare([folder / "rows.jsonl"], TARGET, folder / "store", DataConfig())
    return TokenStore.open(folder / "store")


def test_the_numbers_are_those_of_the_rows(store, chat):
    summary = summarise(store)
    rows = [store.row(i) for i in range(store.num_rows)]
    assert summary["tokens"] == sum(len(ids) for ids, _ in rows)
    assert summary["supervised_tokens"] == sum(int(mask.sum()) for _, mask in rows)
    assert summary["conversations"] == {"chat": 40, "text": 1, "tokens": 1}
    assert (summary["source_rows"], summary["kept"], summary["training_rows"]) == (43, 42, 42)
    assert summary["answers"] == 80 and summary["unsupervised_answers"] == 0
    lengths = sorted(len(ids) for ids, _ in rows)
    assert summary["length_p10_p50_p90_p99_max"][-1] == lengths[-1]
    assert summary["length_p10_p50_p90_p99_max"][1] == lengths[21]
    counts = Counter(int(i) for ids, mask in rows for i in ids[mask == 1])
    assert [n for _, _, n in summary["frequent_tokens"]] == [n for _, n in counts.most_common(20)]
    assert all(counts[i] == n for i, _, n in summary["frequent_tokens"])
    assert all(chat.decode([i]) == text for i, text, _ in summary["frequent_tokens"])
    written = json.loads((store.path / "audit.json").read_text())
    assert written == {name: value for name, value in summary.items() if name != "store"}


def test_what_is_marked_is_what_is_supervised(store, chat):
    tokenizer = TargetTokenizer.read(TARGET)
    text = inspect_row(store, tokenizer, 3, color=False)
    head, body = text.split("\n", 1)
    assert (
        head == f"row 3 of 42: {store.lengths[3]} tokens, {store.supervised[3]} of them supervised"
    )
    shown = ANSWER.replace("\x1b", "\u241b")  # not what clears the reader's terminal
    marked = re.findall(f"{OPEN}(.*?){CLOSE}", body, re.DOTALL)
    assert marked == [f"3: {shown}<|im_end|>"] * 2
    whole = chat.decode(store.row(3)[0].tolist()).replace("\x1b", "\u241b")
    assert body.replace(OPEN, "").replace(CLOSE, "") == whole
    colored = inspect_row(store, tokenizer, 3, color=True).split("\n", 1)[1]
    assert colored == body.replace(OPEN, GREEN).replace(CLOSE, PLAIN)


def test_the_report_shows_a_dozen_rows(store):
    report = (store.path / "audit.md").read_text()
    assert len(re.findall(r"^## Row \d+$", report, re.MULTILINE)) == 12
    # Fences are longer than any in the rows, so they pair up.
    fences = re.findall(r"^(`{5,})(text)?$", report, re.MULTILINE)
    assert len(fences) > 12 and all(name == "text" for _, name in fences[0::2])
    for (opening, _), (closing, name) in zip(fences[0::2], fences[1::2], strict=True):
        assert opening == closing and not name
    assert "rejected" in report and "rows.jsonl:43" in report


def test_rows_and_tokenizers_that_are_not_there(store, tmp_path):
    tokenizer = TargetTokenizer.read(TARGET)
    for n in (-1, 42):
        with pytest.raises(InputError, match=f"no row {n}; it has rows 0 to 41"):
            inspect_row(store, tokenizer, n, color=False)
    with TokenStoreWriter(tmp_path / "store", {"tokenizer_fingerprint": "0123"}) as writer:
        writer.add(np.array([1, 2]), np.array([1, 1]))
    with pytest.raises(InputError, match="another tokenizer"):
        inspect_row(TokenStore.open(tmp_path / "store"), tokenizer, 0, color=False)


def test_a_row_is_inspected_without_a_template_from_anywhere(tmp_path, monkeypatch):
    """The store knows its tokenizer by an absolute path; the template may be gone."""
    shutil.copytree(TARGET, tmp_path / "target")
    row = {"prompt": "What?", "completion": "A thing."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    monkeypatch.chdir(tmp_path)
    prepare(["rows.jsonl"], "target", "store", DataConfig())
    (tmp_path / "target" / "chat_template.jinja").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shown = inspected(str(tmp_path / "store"), 0, None, Config())
    assert f"{OPEN}A thing.<|im_end|>{CLOSE}" in shown


def test_the_table_says_which_rows_are_where(store, tmp_path):
    assert re.search(
        r"\n  kept +42  \(40 chat, 1 text, 1 tokens\)\n", format_summary(summarise(store))
    )
    rows = [{"prompt": f"What is {i}?", "completion": "A thing."} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(validation=0.5)
    summary = prepare([tmp_path / "rows.jsonl"], TARGET, tmp_path / "store", data)
    inside = summary["validation"]["kept"]
    kept = f"40  (to train on: {40 - inside} chat; for validation: {inside})"
    assert re.search(rf"\n  kept +{re.escape(kept)}\n", format_summary(summary))


def test_absurd_stores_warn_loudly(tmp_path, capsys):
    asked = {"role": "user", "content": "What is it?"}
    row = {"messages": [asked, {"role": "assistant", "content": "word " * 30}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 5))
    summary = prepare([tmp_path / "rows.jsonl"], TARGET, tmp_path / "a", DataConfig(max_length=32))
    cut, copies = summary["warnings"]
    assert cut == "5 of 5 rows are cut: raise data.max_length"
    assert copies == "4 conversations are copies of earlier ones"
    assert f"warning: {cut}\n" in capsys.readouterr().err
    assert f"**Warning:** {cut}" in (tmp_path / "a" / "audit.md").read_text()


def test_what_is_absurd():
    good = {"answers": 10, "training_rows": 10, "chat_tokens": 900, "chat_supervised": 90}
    few = {"cut_rows": 1, "left_out": Rejections(counts={"why": 1})}
    assert Tally(10, **good, **few).warnings() == []
    for wrong, words in [
        ({"chat_supervised": 900}, "100.0% of the conversations' tokens"),
        ({"chat_supervised": 0}, "0.0% of the conversations' tokens"),
        ({"cut_rows": 2}, "2 of 10 rows are cut"),
        ({"unsupervised_answers": 6}, "6 of 10 answers are not supervised"),
        ({"left_out": Rejections(counts={"why": 2})}, "2 of 12 training rows are left out (why)"),
    ]:
        (warning,) = Tally(10, **(good | wrong)).warnings()
        assert words in warning
