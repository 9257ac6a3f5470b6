"""Files as people have them, each row read once, in units that depend on the files alone."""

import gzip
import hashlib
import json
import os
import pickle
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from spelled import spelled_rows

from dflashdist.config import InputError
from dflashdist.data import messages, readers, sources
from dflashdist.data.conversations import RowError, parse_prompt, parse_row
from dflashdist.data.locate import Dataset, refuse_inside
from dflashdist.data.sources import Source, Sources, parse_source

ROWS = [
    {"messages": [
        {"role": "user", "content": f'question {i} "]}}, {{ \\'},
        {"role": "assistant", "content": f"answer {i}\n2024-01-01"},
    ]}
    for i in range(5)
]  # fmt: skip
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def decoded(sources: Sources) -> list[dict]:
    """Every row, and on the way that the other ways to get them and to count them agree."""
    rows = list(sources.rows())
    numbered = list(sources.units())
    assert [unit.index for unit in numbered] == list(range(len(numbered)))
    sent = [row for unit in numbered for row in pickle.loads(pickle.dumps(unit)).rows()]
    assert sent == rows
    assert sources.max_rows is None or sources.max_rows == len(rows)
    return [json.loads(p) if isinstance(p, bytes) else p for _, p in rows]


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def zstd(content: bytes) -> bytes:
    """Frames after each other, as `zstd` and `cat` make them."""
    half = len(content) // 2
    return b"".join(map(zstandard.ZstdCompressor().compress, (content[:half], content[half:])))


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "content", "first"),
    [
        ("a.jsonl", LINES, ":1"),
        ("a.jsonl", LINES.rstrip(), ":1"),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n"), ":1"),
        ("a.jsonl", b"\n \r\n" + LINES, ":3"),
        ("a.JSON", LINES, ":1"),
        ("a.ndjson", LINES, ":1"),
        ("a.json", json.dumps(ROWS).encode(), "[0]"),
        ("a.json", b"\xef\xbb\xbf\r\n " + json.dumps(ROWS, indent=2).encode() + b"\n\n", "[0]"),
        ("a.json", json.dumps(ROWS).encode()[:-1] + b", \n]", "[0]"),
        ("a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(), "[0]"),
    ],
)
def test_json_in_every_wrapping(tmp_path, monkeypatch, packed, name, content, first):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[packed]
    file = write(tmp_path / (name + packed), pack(content))
    for chunk in (1 << 20, 64, 7):  # the edges of what is read at once fall anywhere
        monkeypatch.setattr(readers, "CHUNK", chunk)
        monkeypatch.setattr(readers, "PACKED_CHUNK", chunk)
        sources = Sources([file])
        assert decoded(sources) == ROWS
        assert next(sources.rows())[0] == f"{file}{first}"
        assert sources.files == [file]


def test_one_object_and_no_row_at_all(tmp_path):
    for indent in (None, 1):
        one = write(tmp_path / "one.json", json.dumps(ROWS[0], indent=indent).encode())
        assert decoded(Sources([one])) == ROWS[:1]
    for content in (b"", b"\n \n", b"[]", b" [ ] \n", b"\xef\xbb\xbf"):
        assert decoded(Sources([write(tmp_path / "none.json", content)])) == []


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_an_object_that_wraps_a_list_of_rows(tmp_path, monkeypatch, indent, chunk):
    monkeypatch.setattr(readers, "CHUNK", chunk)
    talk = [{"role": "user", "content": "]} q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": talk}, {"messages": talk[:1], "tags": ["x"]}]
    for wrapper in (
        {"train": rows},
        {"version": "1.0 [", "license": {"names": [{"of": "it"}]}, "data": rows, "tags": ["b"]},
    ):
        content = json.dumps(wrapper, indent=indent).encode()
        sources = Sources([write(tmp_path / "a.json", content)])
        assert decoded(sources) == rows
        assert [origin for origin, _ in sources.rows()] == [
            f"{sources.files[0]}[{i}]" for i in (0, 1)
        ]
        # It is the file that wraps, not one of its rows.
        for one in (b"[" + content + b"]", content + b"\n" + content):
            unwrapped = decoded(Sources([write(tmp_path / "b.json", one)]))
            assert unwrapped == [wrapper] * len(unwrapped)
        assert decoded(Sources([write(tmp_path / "c.jsonl", json.dumps(wrapper).encode())])) == [
            wrapper
        ]
    for row in (
        {"messages": talk}, {"dialog": talk}, {"train": rows, "test": rows}, {"train": ["a", "b"]},
        {"prompt": "q", "completion": "a", "sources": [{"url": "u"}]}, {"train": []},
    ):  # fmt: skip
        assert decoded(
            Sources([write(tmp_path / "d.json", json.dumps(row, indent=indent).encode())])
        ) == [row]
    spoilt = b'{"train": [{"text": "a"}, {"text": }, {"text": "b"}]}'
    read = [payload for _, payload in Sources([write(tmp_path / "e.json", spoilt)]).rows()]
    assert read == [b'{"text": "a"}', b'{"text": }', b'{"text": "b"}']


def test_objects_in_one_line_are_read_one_by_one(tmp_path):
    joined = LINES.replace(b"\n", b"")
    for content in (joined, joined + b"\n" + LINES, joined + b'{\n"a": 1}'):
        rows = decoded(Sources([write(tmp_path / "a.json", content)]))
        assert rows[: len(ROWS)] == ROWS and len(rows) > 4


def test_a_bad_value_spoils_no_other(tmp_path):
    good = json.dumps(ROWS[0]).encode()
    values = [good, b'{"a": }', b'{"text": "\xff"}', b"nothing", b"{]", good]
    for name, content in {
        "rows.json": b"[" + b",\n".join(values) + b"]",
        "rows.jsonl": b"\r\n".join(values),
    }.items():
        rows = [payload.strip() for _, payload in Sources([write(tmp_path / name, content)]).rows()]
        assert rows == values
    # Objects that span lines: whatever stands between two of them goes to the next.
    spread = b'{\n}\n{"a": }\nnothing\n' + good + b"\n 3"
    rows = [payload.strip() for _, payload in Sources([write(tmp_path / "s.json", spread)]).rows()]
    assert rows == [b"{\n}", b'{"a": }', b"nothing\n" + good, b"3"]


def test_a_row_of_many_megabytes(tmp_path):
    row = {"text": "x" * 50_000_000 + 'x\\"\n[{' * 100_000}
    content = json.dumps(row).encode()
    for name, text in {
        "big.json": b"[" + content + b",\n" + LINES.splitlines()[0] + b"]",
        "big.jsonl": content + b"\n" + LINES.splitlines()[0],
    }.items():
        unit, small = Sources([write(tmp_path / name, text)]).units()
        assert [len(list(one.rows())) for one in (unit, small)] == [1, 1]
        assert json.loads(next(unit.rows())[1]) == row


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], r"a.jsonl.gz:\d+: cannot be read"),
        ("a.jsonl.gz", gzip.compress(LINES)[:40], r"a.jsonl.gz:1: cannot be read"),
        ("a.jsonl.gz", LINES, r"a.jsonl.gz:1: cannot be read.*gzip"),
        ("a.jsonl.zst", zstd(LINES)[:-3], r"a.jsonl.zst:\d+: cannot be read.*within a frame"),
        ("a.jsonl.zst", LINES, r"a.jsonl.zst:1: cannot be read"),
        ("a.json", json.dumps(ROWS).encode()[:-9], r"a.json\[4\]: .*within a value"),
        ("a.json", b'{\n "a": [', r"a.json\[0\]: .*within a value"),
        ("a.json", LINES + b'{"a":\n 1}\n', r"a.json:6: .*does not end in its line"),
        ("a.json", b"[{}] x", r"a.json\[1\]: .*something follows"),
        ("a.parquet", b"PAR1 and no more", r"a.parquet: cannot be read"),
    ],
)
def test_damaged_files_are_named_with_the_place(tmp_path, name, content, place):
    file = write(tmp_path / name, content)
    for read in (lambda: Sources([file]).describe(), lambda: list(Sources([file]).rows())):
        with pytest.raises(InputError, match=place.replace("parquet:", r"parquet(\[0\])?:")):
            read()


def parquet(path: Path, rows: list[dict], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(key for row in rows for key in row)
    table = pa.table({key: pa.array([row.get(key) for row in rows]) for key in columns})
    pq.write_table(table, path, **options)
    return path


def test_parquet_gives_the_rows_that_json_gives(tmp_path):
    for name in ("openai", "sharegpt", "system and tools beside", "input"):
        rows = [row for _, row in spelled_rows()[name]]
        lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
        table = parquet(tmp_path / "a.parquet", rows, row_group_size=2)
        from_lines, from_table = (
            [parse_row(*row) for row in Sources([file]).rows()] for file in (lines, table)
        )
        assert [row.key for row in from_table] == [row.key for row in from_lines]
        assert [row.origin for row in from_table] == [f"{table}[{i}]" for i in range(len(rows))]
        assert decoded(Sources([table])) is not None


def test_truncated_parquet(tmp_path):
    file = parquet(tmp_path / "a.parquet", ROWS * 1000, compression="none")
    whole = file.read_bytes()
    for damaged in (whole[:-30], whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a.parquet.*cannot be read"):
            Sources([file]).describe()


def test_json_columns_of_arrow_are_decoded(tmp_path):
    if not hasattr(pa, "json_"):
        pytest.skip("this pyarrow has no JSON type")
    texts = pa.array(['"q"', '[{"type": "text", "text": "a"}]'])
    content = pa.ExtensionArray.from_storage(pa.json_(), texts)
    roles = pa.array(["user", "assistant"])
    turns = pa.StructArray.from_arrays([roles, content], ["role", "content"])
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 2]), turns)})
    pq.write_table(table, tmp_path / "a.parquet")
    [(origin, row)] = Sources([tmp_path / "a.parquet"]).rows()
    assert [message["content"] for message in parse_row(origin, row).messages] == ["q", "a"]


def refused(row: tuple) -> str | None:
    """Why a row is rejected, if it is."""
    try:
        parse_row(*row)
    except RowError as error:
        return str(error)
    return None


def texts(values: list[bytes]) -> pa.Array:
    """An Arrow column of text that need not be UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values).buffers())


def reasons(path: Path, columns: dict[str, pa.Array]) -> list[str | None]:
    pq.write_table(pa.table(columns), path)
    rows = list(Sources([path]).rows())
    assert [origin for origin, _ in rows] == [f"{path}[{i}]" for i in range(len(rows))]
    return [refused(row) for row in rows]


def test_a_bad_cell_costs_its_row_and_only_where_it_is_used(tmp_path):
    good = [json.dumps(row["messages"]).encode() for row in ROWS]
    bad = [*good[:2], b'[{"role": "user", "content": "\xff"}]', *good[3:]]
    path, fine = tmp_path / "a.parquet", [None] * 5
    one = [None, None, messages.NOT_UTF8, None, None]
    assert reasons(path, {"messages": texts(bad)}) == one
    assert reasons(path, {"messages": texts(bad).dictionary_encode()}) == one
    assert reasons(path, {"prompt": texts([b"q"] * 5), "completion": texts(bad)}) == one
    assert reasons(path, {"messages": texts(good), "text": texts(bad)}) == fine
    moments = pa.array([2**62, 0, 1, 2, 3], pa.timestamp("us"))
    nowhere = pa.array([0] * 5, pa.timestamp("us", tz="No/Where"))
    columns = {"messages": texts(good), "at": moments, "there": nowhere}
    assert reasons(path, columns) == fine
    asked = texts([b"q"] * 5)
    assert reasons(path, {"prompt": asked, "completion": moments}) == [
        messages.NOT_PLAIN, *[messages.TYPED] * 4,
    ]  # fmt: skip
    turns = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"] * 2), texts([b"q", b"a", b"q", b"\xff"])],
        ["role", "content"],
    )
    nested = pa.ListArray.from_arrays(pa.array([0, 2, 4]), turns)
    assert reasons(path, {"messages": nested}) == [None, messages.NOT_UTF8]


def json_column(values: list[bytes]) -> pa.Array:
    if not hasattr(pa, "json_"):
        pytest.skip("this pyarrow has no JSON type")
    return pa.ExtensionArray.from_storage(pa.json_(), texts(values))


def test_bad_json_in_a_json_column(tmp_path):
    good = json.dumps(ROWS[0]["messages"]).encode()
    columns = {"messages": json_column([good, b"{oops", b'["\xff"]', good])}
    assert reasons(tmp_path / "a.parquet", columns) == [
        None, messages.NOT_JSON, messages.NOT_UTF8, None,
    ]  # fmt: skip


def test_nulls_in_json_columns_are_values(tmp_path):
    call = {"name": "f", "arguments": {"a": None, "b": [{"c": None}]}}
    row = {"messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
    ]}  # fmt: skip
    [line] = Sources([write(tmp_path / "a.jsonl", json.dumps(row).encode())]).rows()
    column = json_column([json.dumps(row["messages"]).encode()])
    pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    [cell] = Sources([tmp_path / "a.parquet"]).rows()
    read = parse_prompt(*cell)
    assert read.messages == parse_prompt(*line).messages
    assert read.messages[1]["tool_calls"][0]["function"] == call


def test_other_data_in_a_folder_is_named(tmp_path, capsys):
    write(tmp_path / "a" / "z.jsonl", LINES)
    for stray in ("README.txt", "LICENSE.txt", ".hidden.csv", "a/x.py", "dataset_infos.json"):
        write(tmp_path / stray, b"stray")
    for source in (tmp_path / "a", f"{tmp_path}/a/*.jsonl"):
        Sources([source])
        assert not capsys.readouterr().err
    others = [write(tmp_path / name, b"") for name in ("b.csv", "c.jsonl.xz", "d.arrow", "e.txt")]
    for source in (f"{tmp_path}/*", tmp_path / "a" / ".."):
        Sources([source])
        told = capsys.readouterr().err
        assert "warning" in told and told.count("\n") == 1 and "and 1 more" in told
        assert all(other.name in told for other in others[:3])
        assert not any(stray in told for stray in ("README", "LICENSE", "hidden", "x.py"))


def test_what_a_source_would_read_is_no_place_to_write(tmp_path):
    write(tmp_path / "in" / "deep" / "a.jsonl", LINES)
    write(tmp_path / "in" / "x1.jsonl", LINES)
    write(tmp_path / "in" / "x[1].jsonl", LINES)
    os.symlink(tmp_path / "in", tmp_path / "link")
    for source, out, reads in (
        ("in", "in/new.jsonl", True),
        ("link", "in/deep/new.jsonl", True),
        ("in", "link/new.jsonl", True),
        ("in", "inside.jsonl", False),
        ("in/x1.jsonl", "in/x1.jsonl", True),
        ("in/x[1].jsonl", "in/x1.jsonl", False),
        ("link/*.jsonl", "in/new.jsonl", True),
        ("in/*", "in/deep/new.jsonl", True),
        ("in/*.jsonl", "in/deep/new.jsonl", False),
        ("in/**/*.jsonl", "in/new.jsonl", True),
        ("in/**/*.jsonl", "in/deep/more/new.jsonl", True),
        ("i?/**", "in/deep/new.jsonl", True),
        ("in/**/*.json", "in/deep/new.jsonl", False),
    ):
        place = tmp_path / out
        try:
            refuse_inside(place, [place], [Source(f"{tmp_path}/{source}")])
        except InputError as error:
            assert reads and "would be read as part of" in str(error), (source, out)
        else:
            assert not reads, (source, out)


def test_folders_and_globs(tmp_path, monkeypatch):
    one = json.dumps(ROWS[0]).encode()
    wanted = [
        write(tmp_path / "a" / "z.jsonl", one),
        parquet(tmp_path / "b.parquet", ROWS[:1]),
        write(tmp_path / "c.json.gz", gzip.compress(one)),
        write(tmp_path / "linked.jsonl", one),
    ]
    for stray in ("README.md", "a/notes.txt", ".git/x.jsonl", "._c.json", "dataset_infos.json"):
        write(tmp_path / stray, b"stray")
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    assert Sources([tmp_path]).files == wanted
    assert len(decoded(Sources([tmp_path]))) == 4
    assert Sources([f"{tmp_path}/*.j*"]).files == wanted[2:]
    os.unlink(tmp_path / "a" / "loop")
    assert Sources([f"{tmp_path}/**/*.jsonl"]).files == [wanted[0], wanted[3]]
    assert Sources([str(tmp_path / "[ab]*"), wanted[0]]).files == [*wanted[:2], wanted[0]]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Sources(["~/c.json.gz,cap=1"]).files == wanted[2:3]


def test_what_is_no_source_is_named_with_the_fix(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "rows.csv", b"")
    write(tmp_path / "rows.jsonl", LINES)
    for source, words in {
        "gone.jsonl": "no such file or folder",
        "empty": "no .jsonl",
        "*.csv": "no .jsonl",
        "rows.csv": "are read from .jsonl",
        "rows.jsonl,split=train": "a file has no splits",
        "rows.jsonl,revision=main": "add split=NAME",
        "rows.jsonl,streaming=true": "add split=NAME",
    }.items():
        with pytest.raises(InputError, match=words):
            Sources([f"{tmp_path}/{source}"])
    with pytest.raises(InputError, match="no source given"):
        Sources([])


def test_how_sources_are_written(tmp_path):
    file = str(write(tmp_path / "a,cap=3.jsonl", LINES))
    assert parse_source(file) == Source(file)
    assert parse_source(f"{file},cap=2") == Source(file, cap=2)
    text = "org/name,split=train[:10%],cap=1000,weight=0.5,revision=r,streaming=true"
    assert parse_source(text) == Source("org/name", "train[:10%]", "r", 1000, 0.5, True)
    for path in ("h/date=2024/*.jsonl", "h/a=1,date=2024/*.jsonl", f"{file[:-6]}*,b=1/*.jsonl"):
        assert parse_source(path) == Source(path)
        assert parse_source(f"{path},cap=2") == Source(path, cap=2)
    assert parse_source("gone, really.jsonl").path == "gone, really.jsonl"
    for wrong, words in {
        "x,caps=3": "nearest known option: 'cap'",
        "x,cap=0": "cap=0: must be a whole number",
        "x,weight=-1": "must be a number above 0",
        "x,weight=nan": "must be a number above 0",
        "x,weight=inf": "must be a number above 0",
        "x,streaming=1": "must be true or false",
        "x,split=": "must be a name",
        "x,cap=1,cap=2": "given twice",
        ",cap=1": "begins with a path",
    }.items():
        with pytest.raises(InputError, match=words):
            parse_source(wrong)


@pytest.mark.parametrize("weight", [0.1, 0.3, 0.5, 1, 1.5, 2, 2.7])
@pytest.mark.parametrize("cap", [None, 1, 7, 10_000])
def test_weights_and_caps(tmp_path, weight, cap):
    rows = [{"text": str(i)} for i in range(40)]
    for first in (0, 10):
        part = "\n".join(map(json.dumps, rows[first : first + 10]))
        write(tmp_path / f"{first}.jsonl", part.encode())
    parquet(tmp_path / "2.parquet", rows[20:], row_group_size=7)
    read = decoded(Sources([Source(str(tmp_path), cap=cap, weight=weight)]))
    tenths = round(weight * 10)
    times = [(i + 1) * tenths // 10 - i * tenths // 10 for i in range(40)]
    assert read == [row for row, n in zip(rows, times, strict=True) for _ in range(n)][:cap]


def test_units_are_full_and_skipped_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_ROWS", 10)
    monkeypatch.setattr(sources, "UNIT_BYTES", 600)
    generator = random.Random(0)
    rows = [{"text": "x" * generator.choice([10, 40, 200, 900])} for _ in range(200)]
    for k in range(4):
        part = rows[50 * k : 50 * k + 50]
        write(tmp_path / f"{k}.jsonl", "\n".join(map(json.dumps, part)).encode())
    parquet(tmp_path / "4.parquet", rows)
    whole = list(Sources([tmp_path]).units())
    assert [row for unit in whole for row in map(text_of, unit.rows())] == [
        row["text"] for row in rows * 2
    ]
    for unit in whole:
        sizes = [sources.payload_size(payload) for _, payload in unit.rows()]
        assert len(sizes) == 1 or (len(sizes) <= 10 and sum(sizes) <= 600)
    lines = [unit for unit in whole if isinstance(unit.content, list)]
    assert len({origin.split(":")[0] for unit in lines for origin, _ in unit.rows()}) == 4
    for first in (0, 3, len(lines) + 2, len(whole)):
        assert [pickle.dumps(unit) for unit in Sources([tmp_path]).units(first)] == [
            pickle.dumps(unit) for unit in whole[first:]
        ]


def text_of(row: tuple) -> str:
    return json.loads(row[1])["text"] if isinstance(row[1], bytes) else row[1]["text"]


def test_descriptions_are_of_the_content(tmp_path):
    file = write(tmp_path / "a.jsonl", LINES)
    table = parquet(tmp_path / "b.parquet", ROWS)

    def describe():
        return Sources([f"{file},cap=3", table]).describe()

    first = describe()
    assert json.loads(json.dumps(first)) == first == describe()
    assert [(entry["name"], entry["source"], entry["cap"]) for entry in first] == [
        ("a.jsonl", 0, 3),
        ("b.parquet", 1, None),
    ]
    for entry, path in zip(first, (file, table), strict=True):
        content = path.read_bytes()
        assert entry["size"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    write(file, LINES.replace(b"answer 3", b"answer 4"))
    changed = describe()
    assert changed[0]["sha256"] != first[0]["sha256"] and changed[1] == first[1]


def test_a_file_that_grows_meanwhile_is_noticed(tmp_path):
    file = write(tmp_path / "a.jsonl", LINES)
    sources = Sources([file])
    sources.describe()
    with open(file, "ab") as more:
        more.write(LINES)
    with pytest.raises(InputError, match=r"a.jsonl: it changed while it was read"):
        list(sources.units())


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """`datasets` kept offline, and a saved set of two splits."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    train = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict({"train": train, "test": train.select([4, 1])})
    both.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_saved_data_sets(saved):
    for split, expected in (("train", ROWS), ("test", [ROWS[4], ROWS[1]])):
        sources = Sources([f"{saved},split={split}"])
        assert decoded(sources) == expected
        assert next(sources.rows())[0] == f"{saved}:{split}[0]"
        assert sources.describe()[0]["fingerprint"] and not sources.files
    assert decoded(Sources([saved / "train"])) == ROWS
    assert decoded(Sources([f"{saved},split=train,weight=0.5,cap=1"])) == ROWS[1:2]
    with pytest.raises(InputError, match="add split=NAME, one of train, test"):
        Sources([saved])
    with pytest.raises(InputError, match="one of train, test"):
        Sources([f"{saved},split=dev"])
    with pytest.raises(InputError, match="written by save_to_disk; name it"):
        Sources([saved.parent])
    with pytest.raises(InputError, match="no streaming"):
        Sources([f"{saved},split=train,streaming=true"])


def test_folders_that_datasets_loads(saved, tmp_path):
    folder = tmp_path / "folder"
    parquet(folder / "train-0.parquet", ROWS)
    source = f"{folder},split=train"
    assert decoded(Sources([source])) == ROWS
    assert Sources([source]).describe()[0]["fingerprint"]
    stream = Sources([f"{source},streaming=true"])
    assert decoded(stream) == ROWS and stream.max_rows is None
    assert stream.describe()[0]["fingerprint"] is None
    assert Sources([f"{source},streaming=true,cap=2"]).max_rows == 2
    told = write(tmp_path / "dates" / "train.jsonl", b'{"prompt": "q", "completion": "2024-01-01"}')
    for options in ("", ",streaming=true"):
        [row] = Sources([f"{told.parent},split=train{options}"]).rows()
        assert refused(row) == messages.TYPED
    with pytest.raises(InputError, match="a folder has no revisions"):
        Sources([f"{source},revision=main"])
    with pytest.raises(InputError, match="the data set cannot be read"):
        Sources([f"{folder},split=nowhere"])
    with pytest.raises(InputError, match="no-such-name: the data set cannot be read"):
        Sources(["no-such-name,split=train"])


@pytest.mark.parametrize("revision", [None, "main", "0f" * 20])
def test_only_a_commit_vouches_for_a_stream(revision):
    pinned = revision if revision == "0f" * 20 else None
    assert Dataset("org/name:train", iter(()), True, revision).fingerprint == pinned
