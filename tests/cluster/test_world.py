"""Ranks that differ in what must be alike are told so before anything is built."""

import time

import pytest
import torch

from dflashdist.cluster.health import Halted
from dflashdist.cluster.roles import SPLIT, Roles
from dflashdist.cluster.world import Place, World
from dflashdist.config import PipelineConfig

pytestmark = pytest.mark.dist


def leave(world: World) -> None:
    """Rank 0 holds the store, so it leaves when all have read there why the job ended."""
    world.store.add("read", 1)
    while world.rank == 0 and world.store.add("read", 0) < world.place.world_size:
        time.sleep(0.02)


def compare_facts(odd_rank: int | None) -> tuple[list[int], str]:
    """Join; tell facts, of which one rank has some otherwise. Returns who is there, and the end."""
    roles = Roles(SPLIT, num_targets=2, num_drafters=1)
    world = World(Place.from_environment(), roles, torch.device("cpu"), PipelineConfig())
    other = "ff00" if world.rank == odd_rank else "aa11"
    facts = {"version": "0.1", "plan fingerprint": other, "token store": other}
    ranks = [member.rank for member in world.members]
    try:
        with world.health.guard():
            world.agree(facts)
    except Halted:
        assert world.health.halt is not None
        leave(world)
        return ranks, world.health.halt.text
    world.close()
    return ranks, ""


@pytest.mark.parametrize("odd_rank", [1, 2])
def test_the_differing_fact_and_rank_are_named_on_all(run_ranks, odd_rank):
    for ranks, text in run_ranks(3, compare_facts, odd_rank):
        assert ranks == [0, 1, 2]
        assert f": rank {odd_rank} on " in text
        assert "has another plan fingerprint than rank 0: 'ff00' against 'aa11'" in text


def test_equal_facts_are_agreed_on(run_ranks):
    assert run_ranks(3, compare_facts, None) == 3 * [([0, 1, 2], "")]
