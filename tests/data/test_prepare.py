"""From source rows to a store: every row accounted for, and never a store of something else."""

import errno
import gzip
import json
import os
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from demo_files import TARGET

from dflashdist.config import DataConfig, InputError
from dflashdist.data import messages, parts, template, workspace
from dflashdist.data import prepare as prepare_module
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.prepare import format_summary, prepare
from dflashdist.data.shards import TokenStore, TokenStoreWriter
from dflashdist.data.workspace import StorePlace

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
DATED = (
    "{{ 'Today is ' + strftime_now('%Y-%m-%d') + '\n' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


def talk(*contents: object) -> str:
    """A row of JSON Lines whose turns alternate, the user's first."""
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    return json.dumps({"messages": turns})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def run(tmp_path, lines, overwrite=True, target=TARGET, **data):
    file = write(tmp_path / "rows.jsonl", lines)
    return prepare([file], target, tmp_path / "store", DataConfig(**data), overwrite=overwrite)


def texts(store: TokenStore, chat: ChatTokenizer) -> list[str]:
    return [chat.decode(store.row(i)[0].tolist()) for i in range(store.num_rows)]


def test_counts_add_up_over_every_kind_of_row(tmp_path, chat):
    lines = [
        talk("What is it?", "A thing."),
        talk("What is it?", "word " * 40 + "end"),  # cut
        "{",
        talk("What is it?", 7),
        talk("What is it?", "a<|im_end|>b"),
        talk("word " * 60, "A thing."),
        talk("What is it?", "x"),
        talk("Only a question"),
    ]
    summary = run(tmp_path, lines, max_length=32, min_supervised=3, max_rejected=0.8)
    rejected = summary["rejected"]
    expected = (messages.NOT_JSON, messages.TYPED, messages.NO_ANSWER, parts.BEYOND)
    assert {*expected, "fewer than 3 supervised tokens"} <= set(rejected)
    assert set(rejected.values()) == {1} and len(rejected) == 6
    assert summary["source_rows"] == len(lines) == summary["kept"] + sum(rejected.values())
    whole = chat.encode_prompt(json.loads(lines[1])["messages"][:1])
    whole += chat.encode(["word " * 40 + "end<|im_end|>"])[0].ids
    assert (summary["cut_rows"], summary["cut_tokens"]) == (1, len(whole) - 32)
    store = TokenStore.open(tmp_path / "store")
    assert store.num_rows == summary["training_rows"] == summary["kept"] == 2
    assert store.lengths.max() == 32
    table = format_summary(summary)
    assert "rejected" in table and f"{tmp_path / 'rows.jsonl'}:3" in table


def test_masks_in_the_store_decode_to_the_answers(tmp_path, chat):
    answers = [f"Answer {i}: `f({i})`\n\n- café" for i in range(300)]
    file = write(tmp_path / "rows.jsonl", [talk("What?", answer) for answer in answers])
    out = tmp_path / "store"
    summary = prepare([file], TARGET, out, DataConfig(), verify_all=True)
    store = TokenStore.open(out)
    for i, answer in enumerate(answers):
        ids, mask = store.row(i)
        assert chat.decode(ids[mask == 1].tolist()) == answer + "<|im_end|>"
        assert store.supervised[i] == mask.sum()
    assert summary["checked_rows"] == 300
    assert summary["checked_tokens"] == summary["supervised_tokens"]
    # Verified in full, it also serves whoever is content with a sample; not the other way round.
    assert prepare([file], TARGET, out, DataConfig())["reused"]
    sampled = prepare([file], TARGET, tmp_path / "sampled", DataConfig())
    assert sampled["checked_rows"] == parts.CHECKED
    assert sampled["fingerprint"] == summary["fingerprint"]
    with pytest.raises(InputError, match="--verify"):
        prepare([file], TARGET, tmp_path / "sampled", DataConfig(), verify_all=True)


def test_columns_that_nobody_knows_are_named_with_what_would_read_them(tmp_path):
    row = json.dumps({"query": "What?", "response": "A thing."})
    said = (
        r"2 x no messages \(first: .*:1 \[its columns are query, response; data.fields.prompt=query"
    )
    with pytest.raises(InputError, match=said):
        run(tmp_path, [row, row])
    assert run(tmp_path, [row], fields={"prompt": "query"})["kept"] == 1


def test_two_adjacent_supervised_tokens_are_needed(tmp_path, chat):
    # Cut after the first token of the answer, or after the second.
    length = len(chat.encode_prompt([{"role": "user", "content": "What?"}]))
    with pytest.raises(InputError, match=parts.BEYOND):
        run(tmp_path, [talk("What?", "A thing.")], max_length=length + 1)
    assert run(tmp_path, [talk("What?", "A thing.")], max_length=length + 2)["kept"] == 1
    apart = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [1, 0, 1, 0, 1]}
    with pytest.raises(InputError, match=parts.NOT_ADJACENT):
        run(tmp_path, [json.dumps(apart)])


def test_a_cut_goes_back_to_the_last_supervised_token(tmp_path, chat):
    line = talk("What?", "A thing.", "And what " * 30, "Another thing.")
    first = json.loads(line)["messages"][:1]
    end = len(chat.encode_prompt(first)) + len(chat.encode(["A thing.<|im_end|>"])[0].ids)
    for max_length in (end, end + 1, end + 20):
        summary = run(tmp_path, [line], max_length=max_length)
        store = TokenStore.open(tmp_path / "store")
        assert store.lengths.tolist() == [end] and store.row(0)[1][-1] == 1
        assert summary["cut_rows"] == 1
    assert run(tmp_path, [line])["cut_rows"] == 0


def test_rows_left_out_of_kept_conversations_are_counted(tmp_path):
    """A template that rewrites history gives a row an answer; one of them is too short."""
    folder = tmp_path / "target"
    last = "{% if loop.last and m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    with_template(folder, DATED.replace("m['content'] + ", "'' }}" + last + "{{ m['content'] + "))
    line = talk("What?", "A thing.", "And?", "Another thing, which is longer than the first.")
    summary = run(tmp_path, [line], target=folder, min_supervised=18, date="2020-02-02")
    assert summary["training_rows_made"] == 2 and summary["training_rows"] == 1
    assert summary["left_out"] == {"fewer than 18 supervised tokens": 1}
    assert summary["source_rows"] == summary["kept"] == 1 and summary["answers"] == 2
    assert summary["unsupervised_answers"] == 1
    assert "1 of 2 training rows are left out (fewer than 18 supervised" in summary["warnings"][0]


def test_answers_beyond_the_cut_are_not_supervised(tmp_path):
    line = talk("What?", "A thing.", "And what " * 30, "Another thing.", "And?", "No more.")
    summary = run(tmp_path, [line, json.dumps({"text": "word " * 99})], max_length=40)
    assert (summary["answers"], summary["unsupervised_answers"]) == (3, 2)


@pytest.mark.parametrize("bad", [["{", "{"], [""]])
def test_no_usable_row_is_an_error_and_leaves_nothing(tmp_path, bad):
    with pytest.raises(InputError, match=r"no usable row among \d"):
        run(tmp_path, bad, max_rejected=1)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_store_is_reused_only_for_the_same(tmp_path):
    lines = [talk("What?", "A thing."), talk("Why?", "A reason.")]
    first = run(tmp_path, lines, overwrite=False)
    meta = tmp_path / "store" / "meta.json"
    written = meta.stat().st_mtime_ns
    again = run(tmp_path, lines, overwrite=False, workers=2, max_rejected=0.5)
    assert again["reused"] and not first["reused"] and meta.stat().st_mtime_ns == written
    assert {**again, "reused": False} == first
    for changed, words in [
        ({"max_length": 100}, r"data.max_length \(3072 then, 100 now\)"),
        ({"turns": "last"}, "data.turns"),
        ({"deduplicate": True}, "data.deduplicate"),
        ({"validation": 0.5}, "data.validation"),
        ({"fields": {"text": "body"}}, "data.fields"),
    ]:
        with pytest.raises(InputError, match=f"differs in {words}.*--overwrite"):
            run(tmp_path, lines, overwrite=False, **changed)
    with pytest.raises(InputError, match="differs in the sources"):
        run(tmp_path, [*lines, lines[0]], overwrite=False)
    key = json.loads(meta.read_text())
    key["key"]["rows"] -= 1
    meta.write_text(json.dumps(key))
    with pytest.raises(InputError, match="differs in the format of rows, which dflashdist has"):
        run(tmp_path, lines, overwrite=False)
    replaced = run(tmp_path, lines, max_length=100)
    assert not replaced["reused"] and replaced["fingerprint"] != first["fingerprint"]
    assert run(tmp_path, lines)["fingerprint"] == first["fingerprint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "store"]


def test_limits_hold_for_a_store_that_is_there(tmp_path):
    held = write(
        tmp_path / "held.jsonl", ["[]", *(talk(f"Who is {i}?", "I am.") for i in range(9))]
    )
    good = [talk(f"What is {i}?", "A thing.") for i in range(19)]
    lines = [*good, "{", good[0], talk("Who is 1?", "I.")]
    options = {"deduplicate": True, "validation": [str(held)], "overwrite": False}
    made = run(tmp_path, lines, max_rejected=0.1, **options)
    assert sum(made["rejected"].values()) == 3
    with pytest.raises(InputError, match=r"held\.jsonl:1: not a JSON object; .*data\.strict"):
        run(tmp_path, lines, max_rejected=0.1, strict=True, **options)
    with pytest.raises(InputError, match=r"1 rejected of the first 10 .*max_rejected=0\.09"):
        run(tmp_path, lines, max_rejected=0.09, **options)
    assert run(tmp_path, lines, max_rejected=0.1, **options)["reused"]
    # What is left out on purpose is no rejected row: copies, and what validation holds.
    write(held, [talk("Who is 1?", "I am.")])
    clean = [*lines[:19], *lines[20:]]
    made = run(tmp_path, clean, strict=True, max_rejected=0, **(options | {"overwrite": True}))
    assert sum(made["rejected"].values()) == 2
    assert run(tmp_path, clean, strict=True, max_rejected=0, **options)["reused"]
    made = run(tmp_path, ["{", *clean], max_rejected=0.5, **(options | {"overwrite": True}))
    with pytest.raises(InputError, match=r"rows\.jsonl:1: not JSON"):
        run(tmp_path, ["{", *clean], max_rejected=0.5, strict=True, **options)


def test_names_of_target_and_template_change_nothing(tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", [talk("What?", "A thing.")])
    monkeypatch.chdir(TARGET.parent)
    first = prepare([file], "target", tmp_path / "a", DataConfig())
    assert first["target"] == os.path.abspath(TARGET)
    assert prepare([file], TARGET, tmp_path / "a", DataConfig())["reused"]
    shutil.copytree(TARGET, tmp_path / "copy")
    assert prepare([file], tmp_path / "copy", tmp_path / "a", DataConfig())["reused"]
    copied = prepare([file], tmp_path / "copy", tmp_path / "b", DataConfig())
    assert copied["fingerprint"] == first["fingerprint"] and copied["target"] != first["target"]
    for name in ("one.jinja", "other.jinja"):
        shutil.copy(TARGET / "chat_template.jinja", tmp_path / name)
    data = [DataConfig(template=str(tmp_path / name)) for name in ("one.jinja", "other.jinja")]
    given = prepare([file], TARGET, tmp_path / "c", data[0])
    assert given["fingerprint"] == first["fingerprint"]
    assert TokenStore.open(tmp_path / "c").meta["template"] == "one.jinja"
    assert prepare([file], TARGET, tmp_path / "c", data[1])["reused"]


def test_another_tokenizers_package_makes_another_store(tmp_path, monkeypatch):
    lines = [talk("What?", "A thing.")]
    run(tmp_path, lines)
    monkeypatch.setattr(workspace, "version", lambda name: f"{name} of tomorrow")
    with pytest.raises(InputError, match="differs in the version of tokenizers or jinja2;"):
        run(tmp_path, lines, overwrite=False)


def test_a_damaged_store_is_not_reused(tmp_path):
    lines = [talk("What?", "A thing.")]
    run(tmp_path, lines)
    (tmp_path / "store" / "lengths.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"damaged.*--overwrite"):
        run(tmp_path, lines, overwrite=False)
    assert run(tmp_path, lines)["kept"] == 1


def with_template(folder: Path, template: str) -> Path:
    folder.mkdir()
    for name in FILES:
        shutil.copy(TARGET / name, folder / name)
    (folder / "chat_template.jinja").write_text(template)
    return folder


class LongAgo(date):
    """A day on which a command ran."""

    @classmethod
    def today(cls) -> date:
        return date(2020, 2, 2)


def test_the_day_of_a_store_holds_tomorrow(tmp_path, chat, monkeypatch):
    target = with_template(tmp_path / "target", DATED)
    lines = [talk("What?", "A thing.")]
    with monkeypatch.context() as then:
        then.setattr(template, "Date", LongAgo)
        run(tmp_path, lines, target=target)
    store = TokenStore.open(tmp_path / "store")
    assert store.meta["rendering"]["date"] == "2020-02-02"
    assert texts(store, chat)[0].startswith("Today is 2020-02-02\n")
    assert run(tmp_path, lines, target=target, overwrite=False)["reused"]
    with pytest.raises(InputError, match="template"):
        run(tmp_path, lines, target=target, overwrite=False, date="2020-02-03")
    run(tmp_path, [*lines, *lines], target=target)  # another store is of today
    assert TokenStore.open(tmp_path / "store").meta["rendering"]["date"] > "2020-02-02"


def test_a_day_that_was_asked_for_is_not_kept_when_it_is_no_more(tmp_path):
    target = with_template(tmp_path / "target", DATED)
    lines = [talk("What?", "A thing.")]
    run(tmp_path, lines, target=target, date="2020-02-02")
    assert run(tmp_path, lines, target=target, overwrite=False, date="2020-02-02")["reused"]
    with pytest.raises(InputError, match="differs in the target's tokenizer or chat template"):
        run(tmp_path, lines, target=target, overwrite=False)
    run(tmp_path, lines, target=target)
    assert TokenStore.open(tmp_path / "store").meta["rendering"]["date"] > "2020-02-02"


def test_what_was_started_yesterday_keeps_its_day(tmp_path, monkeypatch):
    """Also when it was interrupted in its last phase: the disk was full."""
    target = with_template(tmp_path / "target", DATED)
    lines = [talk("What?", "A thing.")]

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(prepare_module, "write_audit", full)
        broken.setattr(template, "Date", LongAgo)
        with pytest.raises(InputError, match=r"No space left.*goes on"):
            run(tmp_path, lines, target=target)
    partial = StorePlace(tmp_path / "store").partial
    (path,) = partial.glob("*/*.npz")
    assert not (tmp_path / "store").exists()
    part = parts.Part.load(path)
    part.ids[0] = 3  # the part that is there is the one that is used
    part.save(path)
    run(tmp_path, lines, target=target)
    store = TokenStore.open(tmp_path / "store")
    assert store.meta["rendering"]["date"] == "2020-02-02" and store.row(0)[0][0] == 3
    assert not partial.exists()


def test_strict_stops_at_the_first_bad_row(tmp_path):
    lines = [talk("What?", "A thing."), "{", talk("What?")]
    with pytest.raises(InputError, match=r"rows\.jsonl:2: not JSON; .*data\.strict"):
        run(tmp_path, lines, strict=True, max_rejected=1)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_too_many_rejected_rows_end_it(tmp_path):
    good = [talk(f"What is {i}?", "A thing.") for i in range(19)]
    assert run(tmp_path, [*good, "{"])["rejected"] == {messages.NOT_JSON: 1}
    many = [talk(f"What is {i}?", "A thing.") for i in range(71)] + ["{"] * 29
    assert run(tmp_path, many, max_rejected=0.29)["rejected"] == {messages.NOT_JSON: 29}
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(InputError, match=r"2 rejected .* data.max_rejected=0.05: .*jsonl:19"):
        run(tmp_path, [*good[:18], "{", "{"])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_too_many_rejected_rows_end_it_as_soon_as_it_is_certain(tmp_path):
    lines = [talk(f"What is {i}?") for i in range(1024)]
    lines += [talk(f"What is {i}?", "A thing.") for i in range(2 * 1024)]
    with pytest.raises(InputError, match="1,024 rejected of the first 1,024 of at most 3,072"):
        run(tmp_path, lines, workers=1, max_rejected=0.3)


def test_duplicates_are_counted_and_dropped_on_request(tmp_path, chat):
    # Spelled otherwise, and in another place, it is the same conversation.
    pair = json.dumps({"prompt": "What?", "completion": "A thing."})
    lines = [talk("What?", "A thing."), talk("Why?", "A reason."), pair, talk("What?", "A thing.")]
    summary = run(tmp_path, lines)
    assert summary["duplicates"] == 2 and summary["kept"] == 4 and not summary["rejected"]
    summary = run(tmp_path, lines, deduplicate=True, max_rejected=0)
    assert summary["rejected"] == {prepare_module.DUPLICATE: 2} and summary["kept"] == 2
    assert summary["examples"][prepare_module.DUPLICATE] == [
        f"{tmp_path / 'rows.jsonl'}:3", f"{tmp_path / 'rows.jsonl'}:4"
    ]  # fmt: skip
    assert summary["duplicates"] == 2
    first, second = texts(TokenStore.open(tmp_path / "store"), chat)
    assert "A thing." in first and "A reason." in second


@pytest.mark.dist
def test_what_a_weight_repeats_is_no_duplicate(tmp_path):
    lines = [talk(f"What is {i}?", "A thing.") for i in range(700)] + [
        talk("What is 3?", "A thing.")
    ]
    file = write(tmp_path / "rows.jsonl", lines)  # in several units: some rows lie in two
    for workers in (1, 2):
        data = DataConfig(deduplicate=True, max_rejected=0, workers=workers)
        summary = prepare([f"{file},weight=3"], TARGET, tmp_path / f"{workers}", data)
        assert summary["source_rows"] == 3 * 701 and summary["kept"] == 3 * 700
        assert summary["duplicates"] == 3 and summary["rejected"] == {prepare_module.DUPLICATE: 3}
    # The same file as another source is another copy of it, also where its one row follows itself.
    file = write(tmp_path / "row.jsonl", lines[:1])
    twice = prepare([file, file], TARGET, tmp_path / "twice", DataConfig())
    assert (twice["kept"], twice["duplicates"]) == (2, 1)


def test_a_share_for_validation_never_shares_an_opening(tmp_path, chat):
    lines = [talk(f"What is {i % 200}?", f"It is thing {i}.") for i in range(600)]
    summary = run(tmp_path, lines, validation=0.2)
    store = TokenStore.open(tmp_path / "store")
    held_out = TokenStore.open(tmp_path / "store" / "validation")
    inside, outside = texts(held_out, chat), texts(store, chat)
    assert len(inside) + len(outside) == 600 == summary["kept"]
    assert summary["to_validation"] == len(inside) == summary["validation"]["kept"]
    assert 0.1 < len(inside) / 600 < 0.3

    def openings(rows: list[str]) -> set[str]:
        return {text.split("assistant\n")[0] for text in rows}

    assert not openings(inside) & openings(outside)
    assert {len([t for t in inside if opening in t]) for opening in openings(inside)} == {3}
    assert held_out.meta["max_length"] == store.meta["max_length"]
    assert summary["validation"]["tokens"] == int(held_out.lengths.sum())
    with pytest.raises(InputError, match=r"data\.validation=0\.001: no opening"):
        run(tmp_path, lines[:20], validation=0.001)


def test_what_is_wrong_with_the_validation_store_is_said(tmp_path, capsys):
    held = write(
        tmp_path / "held.jsonl", [talk(f"Who is {i}?", "I. " * 50) for i in range(9)] + ["{"]
    )
    lines = [talk(f"What is {i}?", "A thing.") for i in range(20)]
    options = {"validation": str(held), "max_rejected": 0.1, "max_length": 40}
    for overwrite in (True, False):  # made, and reused
        summary = run(tmp_path, lines, overwrite=overwrite, **options)
        said = "warning: validation store: 9 of 9 rows are cut: raise data.max_length\n"
        assert said in capsys.readouterr().err and not summary["warnings"]
        table = format_summary(summary).split("validation store", 1)[1]
        assert "  rejected" in table and f"{messages.NOT_JSON}" in table and f"{held}:10" in table


def test_validation_sources_are_never_trained_on(tmp_path, chat):
    held = write(tmp_path / "held.jsonl", [talk("What?", "A thing."), "{", talk("What?", "b c")])
    lines = [talk("What?", "Other words."), talk("Why?", "A reason."), talk("Why?", "A reason.")]
    options = {"validation": [str(held)], "max_rejected": 0.4}
    summary = run(tmp_path, lines, **options)
    assert summary["rejected"] == {prepare_module.RESERVED: 1}
    assert summary["kept"] == 2 and summary["duplicates"] == 1
    inside = summary["validation"]
    assert inside["source_rows"] == 3 == inside["kept"] + sum(inside["rejected"].values())
    assert inside["rejected"] == {messages.NOT_JSON: 1}
    store = TokenStore.open(tmp_path / "store")
    assert all("Why?" in text for text in texts(store, chat))
    assert all("What?" in text for text in texts(TokenStore.open(store.path / "validation"), chat))
    write(held, [talk("Why?", "c d")])
    with pytest.raises(InputError, match=r"data\.validation"):
        run(tmp_path, lines, overwrite=False, **options)
    with pytest.raises(InputError, match="none is left"):
        run(tmp_path, lines[1:], **options)
    assert TokenStore.open(store.path).fingerprint == store.fingerprint  # the old one stays


def test_another_prepare_into_the_same_place_is_refused(tmp_path):
    lines = [talk("What?", "A thing.")]
    with StorePlace(tmp_path / "store").locked(), pytest.raises(InputError, match="is writing it"):
        run(tmp_path, lines)
    assert run(tmp_path, lines)["kept"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "store"]


def test_what_was_left_beside_a_finished_store_is_cleared(tmp_path):
    lines = [talk("What?", "A thing.")]
    run(tmp_path, lines)
    partial = StorePlace(tmp_path / "store").partial
    for torn in ("store", "validation", ".store.partial"):
        (partial / torn).mkdir(parents=True)
    assert run(tmp_path, lines, overwrite=False)["reused"] and not partial.exists()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "name", ["notes.txt", "validation/notes.txt", "figures/one.png", "ids-00000.bin.orig", ".note"]
)
def test_overwriting_a_store_removes_nobodys_files(tmp_path, name):
    lines = [talk(f"What is {i}?", "A thing.") for i in range(40)]
    run(tmp_path, lines, validation=0.3)
    stranger = tmp_path / "store" / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("mine")
    there = files(tmp_path)
    refused = tmp_path / "store" / name.split("/")[0] if "figures" in name else stranger
    with pytest.raises(InputError, match=f"^{refused}: no file of a token store"):
        run(tmp_path, lines, validation=0.3, max_length=100)
    assert files(tmp_path) == there
    # A store that stays is as good with it as without.
    assert run(tmp_path, lines, validation=0.3)["reused"]
    (tmp_path / "store" / "lengths.npy").write_bytes(b"")  # damaged: to be replaced
    with pytest.raises(InputError, match=f"^{refused}: no file of a token store"):
        run(tmp_path, lines, validation=0.3)
    assert stranger.read_text() == "mine"


def test_a_folder_that_is_no_store_is_not_taken_for_one(tmp_path):
    others = tmp_path / "store"
    others.mkdir()
    (others / "meta.json").write_text('{"dataset": "mine"}')
    with pytest.raises(InputError, match=r"meta\.json.* not overwritten"):
        run(tmp_path, [talk("What?", "A thing.")])
    assert (others / "meta.json").read_text() == '{"dataset": "mine"}'


def test_files_that_came_into_a_store_meanwhile_stay_with_the_work_that_was_done(tmp_path):
    lines = [talk("What?", "A thing.")]
    run(tmp_path, lines)
    place = StorePlace(tmp_path / "store")
    place.partial.mkdir()
    (tmp_path / "store" / "notes.txt").write_text("mine")
    with TokenStoreWriter(place.store, {}) as writer:
        writer.add(np.array([1, 2]), np.array([1, 1]))
    with pytest.raises(InputError, match="no file of a token store"):
        place.finish()
    assert (tmp_path / "store" / "notes.txt").read_text() == "mine"
    assert TokenStore.open(place.store).num_rows == 1


def test_the_folder_beside_a_store_is_only_removed_if_it_is_a_prepares(tmp_path):
    lines = [talk("What?", "A thing.")]
    beside = StorePlace(tmp_path / "store").partial
    beside.mkdir()
    (beside / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"thesis\.txt: not of a prepare"):
        run(tmp_path, lines)
    assert (beside / "thesis.txt").read_text() == "mine" and not (tmp_path / "store").exists()


def test_a_mistyped_command_does_not_cost_the_parts_of_another(tmp_path, monkeypatch):
    lines = [talk("What?", "A thing."), *["{"] * 3]

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(prepare_module, "write_audit", full)
        with pytest.raises(InputError, match="goes on"):
            run(tmp_path, lines, max_rejected=0.9)
    partial = StorePlace(tmp_path / "store").partial
    (part,) = partial.glob("*/*.npz")
    for typo in ({"max_length": 1}, {"max_rejected": 0.9, "min_supervised": 100}):
        with pytest.raises(InputError):
            run(tmp_path, lines, **typo)
        assert list(partial.glob("*/*.npz")) == [part]
    assert run(tmp_path, lines, max_rejected=0.9)["kept"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "store"]


def test_a_link_to_a_store_stays_a_link(tmp_path):
    lines = [talk("What?", "A thing.")]
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    assert not run(tmp_path, lines)["reused"]
    assert not run(tmp_path, lines, max_length=100)["reused"]
    assert (tmp_path / "store").is_symlink() and TokenStore.open(tmp_path / "disk").num_rows == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "rows.jsonl", "store"]


def test_places_that_are_refused(tmp_path):
    file = write(tmp_path / "rows.jsonl", [talk("What?", "A thing.")])
    for source in (tmp_path, f"{tmp_path}/*"):
        with pytest.raises(InputError, match="would be read as part of"):
            prepare([source], TARGET, tmp_path / "store", DataConfig())
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("")
    (tmp_path / "note.txt").write_text("")
    for out in (tmp_path / "precious", tmp_path / "note.txt"):
        with pytest.raises(InputError, match="not a token store"):
            prepare([file], TARGET, out, DataConfig(), overwrite=True)
    with pytest.raises(InputError, match="name a folder"):
        prepare([file], TARGET, ".", DataConfig())
    with TokenStoreWriter(tmp_path / "other", {}) as writer:
        writer.add(np.array([1, 2]), np.array([1, 1]))
    with pytest.raises(InputError, match="differs in"):
        prepare([file], TARGET, tmp_path / "other", DataConfig())


def test_a_place_that_cannot_be_promises_nothing(tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", [talk("What?", "A thing.")])
    (tmp_path / "taken").write_text("")
    for out in (tmp_path / "taken" / "store", tmp_path / ("long" * 100)):
        with pytest.raises(InputError) as refused:
            prepare([file], TARGET, out, DataConfig())
        assert str(refused.value).startswith(f"{out}: [Errno") and "goes on" not in str(
            refused.value
        )

    def away(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(prepare_module, "write_audit", away)
    with pytest.raises(InputError, match="the same command goes on"):
        prepare([file], TARGET, tmp_path / "store", DataConfig())


def test_a_damaged_source_leaves_nothing(tmp_path):
    packed = gzip.compress(talk("What?", "A thing.").encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(packed[:-9])
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz"):
        prepare([tmp_path / "rows.jsonl.gz"], TARGET, tmp_path / "store", DataConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl.gz"]
