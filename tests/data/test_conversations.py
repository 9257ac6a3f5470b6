"""Rows read and rejected, each kind of bad row once."""

import gzip
import json

import pytest

from dflashdist.config import InputError
from dflashdist.data import conversations as c

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BAD = {
    c.NOT_JSON: '{"messages": [',
    c.NO_MESSAGES: json.dumps({"text": "a"}),
    c.UNKNOWN_ROLE: json.dumps({"messages": [{"role": "wizard", "content": "a"}]}),
    c.NO_ANSWER: json.dumps({"messages": [{"role": "user", "content": "a"}]}),
    c.EMPTY_ANSWER: json.dumps({"messages": [{"role": "assistant", "content": " \n"}]}),
    c.NOT_TEXT: json.dumps({"messages": [{"role": "assistant", "content": None}]}),
}


def test_every_bad_row_is_counted_by_its_reason_and_place(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(GOOD), "", *BAD.values(), json.dumps(GOOD)]
    file.write_text("\n".join(lines) + "\n")
    rejections = c.Rejections()
    kept = list(c.read_conversations([file], rejections))
    assert [one.origin for one in kept] == [f"{file}:1", f"{file}:{len(lines)}"]
    assert rejections.counts == dict.fromkeys(BAD, 1)
    assert {reason: first[0] for reason, first in rejections.examples.items()} == {
        reason: f"{file}:{number}" for number, reason in enumerate(BAD, start=3)
    }


@pytest.mark.parametrize("line", ["[]", "3", '{"messages": []}', '{"messages": "a"}'])
def test_json_that_is_no_conversation(line):
    with pytest.raises(c.RowError, match=c.NO_MESSAGES):
        c.parse_conversation(line)


def test_what_follows_the_last_answer_is_left_out():
    messages = [*GOOD["messages"], {"role": "user", "content": "thanks"}]
    assert c.parse_conversation(json.dumps({"messages": messages})) == GOOD["messages"]


def test_only_the_first_few_places_are_kept():
    rejections = c.Rejections(shown=2)
    for i in range(5):
        rejections.add("why", str(i))
    assert rejections.counts == {"why": 5} and rejections.examples == {"why": ["0", "1"]}


def test_folders_and_gzip(tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((json.dumps(GOOD) + "\n").encode()))
    (tmp_path / "notes.txt").write_text("not data")
    files = c.find_files([tmp_path])
    assert [file.name for file in files] == ["a.jsonl.gz", "b.jsonl"]
    assert len(list(c.read_conversations(files, c.Rejections()))) == 2


def test_bad_sources_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").write_text("")
    for source, words in (("gone.jsonl", "no such"), ("empty", "no .jsonl"), ("rows.csv", "read")):
        with pytest.raises(InputError, match=words):
            c.find_files([tmp_path / source])
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(InputError, match=r"damaged\.jsonl\.gz:1"):
        list(c.read_rows([damaged]))
