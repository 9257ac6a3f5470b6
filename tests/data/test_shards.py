"""The store: what goes in comes out, killed writers leave nothing, and batches are padded."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from dflashdist.config import InputError
from dflashdist.data import shards
from dflashdist.data.shards import TokenStore, TokenStoreWriter, collate

SETTINGS = {"pad_id": 9, "max_length": 64}
ROWS = [
    (np.array([5, 6, 7]), np.array([0, 1, 1])),
    (np.array([8]), np.array([0])),
    (np.arange(10, 30), np.arange(20) % 2),
]


def write(path, rows=ROWS, settings=SETTINGS, **options) -> TokenStore:
    with TokenStoreWriter(path, settings, **options) as writer:
        for ids, mask in rows:
            writer.add(ids, mask)
        writer.audit = {"kept": writer.num_rows}
    return TokenStore.open(path)


def test_round_trip(tmp_path):
    store = write(tmp_path / "store")
    assert store.num_rows == 3 and store.path == tmp_path / "store"
    assert store.lengths.tolist() == [3, 1, 20] and store.lengths.dtype == np.int32
    assert store.supervised.tolist() == [2, 0, 10] and store.supervised.dtype == np.int32
    for i, (ids, mask) in enumerate(ROWS):
        got_ids, got_mask = store.row(i)
        assert got_ids.dtype == np.int32 and got_mask.dtype == np.uint8
        assert got_ids.tolist() == ids.tolist() and got_mask.tolist() == mask.tolist()
    assert store.meta["pad_id"] == 9 and store.meta["audit"] == {"kept": 3}
    assert os.listdir(tmp_path) == ["store"]


def test_fingerprint_is_of_content_and_settings_not_of_the_place(tmp_path):
    first = write(tmp_path / "a").fingerprint
    assert write(tmp_path / "b").fingerprint == first
    other_mask = [(ids, 1 - mask) for ids, mask in ROWS]
    # The same stream of ids and masks, cut into other rows.
    other_cut = [(np.concatenate([ROWS[0][0], ROWS[1][0]]), np.array([0, 1, 1, 0])), ROWS[2]]
    changed = [
        write(tmp_path / "c", [(ids + 1, mask) for ids, mask in ROWS]),
        write(tmp_path / "d", other_mask),
        write(tmp_path / "e", other_cut),
        write(tmp_path / "f", settings=SETTINGS | {"max_length": 65}),
    ]
    assert len({first, *(store.fingerprint for store in changed)}) == 5


def test_notes_are_kept_and_not_hashed(tmp_path):
    first = write(tmp_path / "a")
    with TokenStoreWriter(tmp_path / "b", SETTINGS) as writer:
        for ids, mask in ROWS:
            writer.add(ids, mask)
        writer.notes = {"target": "somewhere"}
    noted = TokenStore.open(tmp_path / "b")
    assert noted.meta["target"] == "somewhere" and noted.fingerprint == first.fingerprint


def test_rows_are_the_same_in_several_shards_and_in_one(tmp_path, monkeypatch):
    whole = write(tmp_path / "whole", ROWS * 3)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 22)
    store = write(tmp_path / "store", ROWS * 3)
    assert [shard["tokens"] for shard in store.meta["shards"]] == [24, 24, 24]
    assert store.fingerprint == whole.fingerprint and store.num_rows == 9
    for i, (ids, mask) in enumerate(ROWS * 3):
        assert (
            store.row(i)[0].tolist() == ids.tolist() and store.row(i)[1].tolist() == mask.tolist()
        )
    assert store.lengths.tolist() == whole.lengths.tolist()
    assert store.supervised.tolist() == whole.supervised.tolist()


def test_many_rows_at_once_are_the_same_as_one_by_one(tmp_path):
    one_by_one = write(tmp_path / "a")
    with TokenStoreWriter(tmp_path / "b", SETTINGS) as writer:
        ids = np.concatenate([ids for ids, _ in ROWS])
        mask = np.concatenate([mask for _, mask in ROWS]).astype(bool)
        writer.extend(ids[:4], mask[:4], [3, 1])
        writer.extend(ids[4:4], mask[4:4], [])
        writer.extend(ids[4:], mask[4:], np.array([20]))
    at_once = TokenStore.open(tmp_path / "b")
    assert at_once.fingerprint == one_by_one.fingerprint
    assert at_once.supervised.tolist() == [2, 0, 10]
    for i in range(3):
        assert at_once.row(i)[0].tolist() == one_by_one.row(i)[0].tolist()


def test_a_killed_writer_leaves_nothing_that_opens(tmp_path):
    code = f"""
import os, signal, numpy as np
from dflashdist.data.shards import TokenStoreWriter
with TokenStoreWriter({str(tmp_path / "store")!r}, {{}}) as writer:
    for _ in range(1000):
        writer.add(np.arange(100), np.ones(100, dtype=int))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (partial,) = tmp_path.iterdir()
    for path in (tmp_path / "store", partial):
        with pytest.raises(InputError, match="dflashdist prepare"):
            TokenStore.open(path)
    assert write(tmp_path / "store").num_rows == 3  # and is no obstacle
    assert os.listdir(tmp_path) == ["store"]


def test_an_error_leaves_nothing_and_keeps_the_old_store(tmp_path):
    write(tmp_path / "store")
    with pytest.raises(RuntimeError), TokenStoreWriter(tmp_path / "store", {}, True) as writer:
        writer.add(*ROWS[0])
        raise RuntimeError
    assert os.listdir(tmp_path) == ["store"] and TokenStore.open(tmp_path / "store").num_rows == 3


def test_an_existing_folder_is_refused_or_replaced(tmp_path):
    write(tmp_path / "store")
    with pytest.raises(InputError, match="--overwrite"):
        write(tmp_path / "store")
    assert write(tmp_path / "store", ROWS[:1], overwrite=True).num_rows == 1
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("")
    with pytest.raises(InputError, match="not a token store"):
        write(tmp_path / "precious", overwrite=True)


def test_damage_is_refused(tmp_path):
    path = tmp_path / "store"
    write(path)
    saved = {file.name: file.read_bytes() for file in path.iterdir()}
    meta = json.loads(saved["meta.json"])
    fewer_rows = json.dumps(meta | {"shards": [{"rows": 2, "tokens": 24}]}).encode()
    for name, content, words in [
        ("meta.json", json.dumps(meta | {"version": 1}).encode(), "version 1, this is version 2"),
        ("meta.json", b"[]", "not that of a token store"),
        ("meta.json", b'{"version": 2}', "damaged"),
        ("meta.json", fewer_rows, "disagree"),
        (
            "ids-00000.bin",
            saved["ids-00000.bin"][:8],
            r"ids-00000\.bin: missing or not of 96 bytes",
        ),
        ("loss_mask-00000.bin", b"", r"loss_mask-00000\.bin: missing or not of 24 bytes"),
        ("lengths.npy", saved["lengths.npy"][:-4], "damaged"),
        ("supervised.npy", b"", "damaged"),
    ]:
        (path / name).write_bytes(content)
        with pytest.raises(InputError, match=words):
            TokenStore.open(path)
        (path / name).write_bytes(saved[name])
    assert TokenStore.open(path).num_rows == 3


def test_collate_pads_on_the_right(tmp_path):
    store = write(tmp_path / "store")
    batch = collate(store, seq=4, epoch=1, rows=np.array([2, 0]), width=24, pad_id=9)
    assert (batch.seq, batch.epoch, batch.row_ids) == (4, 1, (2, 0))
    assert batch.ids.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
    assert batch.lengths.tolist() == [20, 3] and batch.lengths.dtype == torch.int64
    assert batch.ids.tolist() == [[*range(10, 30)] + [9] * 4, [5, 6, 7] + [9] * 21]
    assert batch.loss_mask.sum(1).tolist() == [10, 2] and not batch.loss_mask[1, 3:].any()
    with pytest.raises(AssertionError, match="row 2 of 20 tokens in a width of 19"):
        collate(store, seq=0, epoch=0, rows=np.array([2]), width=19, pad_id=9)
