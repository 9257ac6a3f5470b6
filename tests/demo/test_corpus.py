"""Conversations from source: deterministic, and the held-out modules apart."""

import ast
import gzip
import json

import corpus
import pytest
from demo_files import DEMO

from dflashdist.data.conversations import parse_row

SOURCE = '''
"""A module.

More."""
import os
from sys import path

class Box(dict):
    """Holds things."""

    @staticmethod
    def open(lid, *, wide=False):
        """Open it.

        Slowly.
        """
        # A comment.
        if wide:
            return os.stat(lid)
        return abs(lid)
'''


@pytest.fixture(scope="module")
def things():
    tree = ast.parse(SOURCE)
    found = [corpus._module("pkg.mod", tree)]
    found += corpus._definitions("pkg.mod", tree, SOURCE.splitlines())
    return {thing.name: thing.answers for thing in found}


def test_answers_of_a_module_and_a_class(things):
    assert things["pkg.mod"]["imports"] == "```python\nimport os\nfrom sys import path\n```"
    assert things["pkg.mod"]["names"] == "Module `mod` defines:\n- `Box` (class)"
    assert things["pkg.mod"]["summary"] == "A module."
    assert things["pkg.mod.Box"]["signature"] == "```python\nclass Box(dict):\n```"
    assert things["pkg.mod.Box"]["methods"] == "`Box` has 1 method:\n- `open`"


def test_answers_of_a_function(things):
    answers = things["pkg.mod.Box.open"]
    assert answers["doc"] == "Open it.\n\nSlowly."
    assert answers["signature"] == "```python\ndef open(lid, *, wide=False):\n```"
    assert answers["returns"] == "```python\nreturn os.stat(lid)\nreturn abs(lid)\n```"
    assert answers["calls"] == "- `os.stat`\n- `abs`"
    code = answers["source"].removeprefix("```python\n").removesuffix("\n```")
    assert code.startswith("def open") and "# A comment." in code
    ast.parse(code)  # dedented as a whole


def test_conversations_are_usable_and_the_same_each_time(things):
    for name, answers in things.items():
        thing = corpus.Thing(name, answers)
        talks = list(corpus.conversations(thing))
        assert talks == list(corpus.conversations(thing))
        for messages in talks:
            assert parse_row("row", json.dumps({"messages": messages})).messages == messages
            assert name in messages[0]["content"]


def test_some_conversations_have_several_turns():
    answers = dict.fromkeys(["doc", "source", "signature", "returns"], "An answer.")
    turns = [
        len(messages) // 2
        for i in range(200)
        for messages in corpus.conversations(corpus.Thing(f"pkg.f{i}", answers))
    ]
    assert set(turns) == {1, 2, 3, 4}


def test_held_out_is_by_top_level_module():
    assert corpus.is_held_out("pathlib") and corpus.is_held_out("pathlib.Path.open")
    assert not corpus.is_held_out("json.pathlib")
    names = [name for name, _ in corpus.library_modules()]
    assert "json.decoder" in names and "json" in names
    assert not any(part in corpus.LEFT_OUT for name in names for part in name.split("."))
    share = sum(map(corpus.is_held_out, names)) / len(names)
    assert 0.005 < share < 0.15  # about one in 25, by top-level module


def test_shipped_answers_keep_the_parts_apart():
    folder = DEMO
    parts = {}
    for part in ("train", "heldout"):
        with gzip.open(folder / f"{part}.jsonl.gz", "rt") as lines:
            parts[part] = [parse_row("row", line).messages for line in lines]
    assert len(parts["train"]) >= 2000 and len(parts["heldout"]) >= 100
    answers = {
        part: [m["content"] for talk in talks for m in talk if m["role"] == "assistant"]
        for part, talks in parts.items()
    }
    assert not set(answers["train"]) & set(answers["heldout"])
    assert len(set(answers["heldout"])) == len(answers["heldout"])
    for part, held_out in (("train", False), ("heldout", True)):
        for messages in parts[part]:
            words = messages[0]["content"].rstrip("?.").split()
            dotted = [word for word in words if "." in word]
            assert all(corpus.is_held_out(word) == held_out for word in dotted)
