"""How one step's micro-batches are shared among its drafters: equal counts, nearly equal cost.

A step ends when its slowest drafter does, so the largest share is what counts. Longest processing
time first, then swaps: at 7 drafters x 4 on chats (512 anchors a row, blocks of 16 sorted) the
largest share is 1.043 of the mean after the first and 1.007 after the second. Fixed counts are why
swaps pay: whoever lacks one of the few cheap micro-batches cannot make up for it by taking fewer.
"""

from heapq import heapify, heappop, heapreplace

import numpy as np

_EMPTY = -1


def share_out(costs: np.ndarray, num_shares: int, places: int) -> list[list[int]]:
    """Indices into `costs` of each share, ascending; at most `places` in each.

    costs: int64 [n], n <= num_shares x places; with equality every share has `places` exactly. A
    pure function: equal costs and loads are told apart by their index.
    """
    assert len(costs) <= num_shares * places, (len(costs), num_shares, places)
    index_DA = np.full((num_shares, places), _EMPTY)
    taken = [0] * num_shares
    room = [(0, share) for share in range(num_shares)]
    heapify(room)
    for index in (-costs).argsort(kind="stable").tolist():
        load, share = room[0]
        index_DA[share, taken[share]] = index
        taken[share] += 1
        if taken[share] < places:
            heapreplace(room, (load + int(costs[index]), share))
        else:
            heappop(room)
    _swap(index_DA, np.append(costs, 0)[index_DA])  # an empty place, -1, costs the 0 at the end
    return [sorted(index for index in share if index != _EMPTY) for share in index_DA.tolist()]


def _swap(index_DA: np.ndarray, cost_DA: np.ndarray) -> None:
    """Swap places of the largest share with others, in place, while the larger of the two shrinks.

    Each swap lowers the sorted loads, so it ends; the limit only bounds the time.
    """
    num_shares, places = cost_DA.shape
    load_D = cost_DA.sum(axis=1)
    for _ in range(num_shares * places):
        top = int(load_D.argmax())
        moved_ADA = cost_DA[top][:, None, None] - cost_DA
        larger_ADA = np.maximum(load_D[top] - moved_ADA, load_D[:, None] + moved_ADA)
        best = int(larger_ADA.argmin())
        if larger_ADA.flat[best] >= load_D[top]:
            return
        mine, other, theirs = (int(i) for i in np.unravel_index(best, larger_ADA.shape))
        moved = moved_ADA[mine, other, theirs]
        load_D[top] -= moved
        load_D[other] += moved
        for table in (index_DA, cost_DA):
            here, there = table[top, mine], table[other, theirs]
            table[top, mine], table[other, theirs] = there, here
