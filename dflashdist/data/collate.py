"""Rows of the store to one padded micro-batch: pure, so any worker may do it, in any order."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflashdist.data.shards import TokenStore


@dataclass
class TokenBatch:
    """A micro-batch's tokens on the CPU, padded on the right."""

    seq: int  # its number in the plan
    epoch: int
    row_ids: tuple[int, ...]  # row numbers of the store
    ids: Tensor  # int64 [B, S]
    loss_mask: Tensor  # bool [B, S], False at padding
    lengths: Tensor  # int64 [B], real tokens


def collate(
    store: TokenStore, *, seq: int, epoch: int, rows: np.ndarray, width: int, pad_id: int
) -> TokenBatch:
    """Micro-batch `seq` of the store's `rows` (int64 [B]), padded to `width` tokens."""
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        row_ids, row_mask = store.row(int(row))
        assert len(row_ids) <= width, f"row {row} of {len(row_ids)} tokens in a width of {width}"
        ids[i, : len(row_ids)] = row_ids
        mask[i, : len(row_ids)] = row_mask
    return TokenBatch(
        seq=seq,
        epoch=epoch,
        row_ids=tuple(int(row) for row in rows),
        ids=torch.from_numpy(ids),
        loss_mask=torch.from_numpy(mask),
        lengths=torch.from_numpy(store.lengths[rows].astype(np.int64)),
    )
