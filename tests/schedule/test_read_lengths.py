"""A file of lengths is read, cut to the maximum, or refused by name with the fix."""

import numpy as np
import pytest

from dflashdist.config import InputError
from dflashdist.schedule.report import read_lengths


def test_read_lengths_cuts_to_the_maximum(tmp_path):
    path = tmp_path / "l.npy"
    np.save(path, np.array([[10, 300, 50], [0, 250, 50]], dtype=np.int32))
    lengths, supervised = read_lengths(path, 100)
    assert lengths.tolist() == [10, 100, 50] and supervised.tolist() == [0, 100, 50]
    assert lengths.dtype == supervised.dtype == np.int64
    np.save(path, np.array([7, 200], dtype=np.uint64))
    lengths, supervised = read_lengths(path, 100)
    assert lengths.tolist() == supervised.tolist() == [7, 100]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(0, dtype=int), r"shape \[0\]"),
        (np.ones((3, 2), dtype=int), r"shape \[3, 2\]"),
        (np.ones((2, 2, 2), dtype=int), r"shape \[2, 2, 2\]"),
        (np.int64(3), r"shape \[\]"),
        (np.ones(3), "dtype float64"),
        (np.ones(3, dtype=bool), "dtype bool"),
        (np.array([{}], dtype=object), "not a readable"),
        (np.array([4, 0, 3]), "row 1 has a length of 0"),
        (np.array([[4, 5], [3, -2]]), "row 1 has a supervised count of -2"),
        (np.array([[4, 5], [5, 5]]), "row 0 has a supervised count of 5"),
    ],
)
def test_read_lengths_refuses(tmp_path, array, message):
    path = tmp_path / "bad.npy"
    np.save(path, array)
    with pytest.raises(InputError, match=message) as caught:
        read_lengths(path, 100)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_read_lengths_refuses_other_files(tmp_path):
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "many.npz", a=np.ones(3, dtype=int))
    for name in ("text.npy", "empty.npy", "many.npz", "missing.npy", ""):
        with pytest.raises(InputError, match=r"\[2, N\]"):
            read_lengths(tmp_path / name, 100)
