"""Who does what: counts that do not add up are refused with the arithmetic."""

import pytest

from dflashdist.cluster.roles import COLOCATED, DRAFTER, SPLIT, TARGET, Roles, assign_roles
from dflashdist.config import InputError, RolesConfig


@pytest.mark.parametrize(
    ("layout", "targets", "drafters", "world", "expected"),
    [
        ("auto", None, None, 1, Roles(COLOCATED, 0, 1)),
        ("auto", None, None, 4, Roles(SPLIT, 1, 3)),
        ("auto", 3, None, 4, Roles(SPLIT, 3, 1)),
        ("auto", None, 3, 4, Roles(SPLIT, 1, 3)),
        ("split", 2, 2, 4, Roles(SPLIT, 2, 2)),
        ("colocated", None, None, 4, Roles(COLOCATED, 0, 4)),
        ("colocated", None, 4, 4, Roles(COLOCATED, 0, 4)),
        # without a world: what the configuration describes
        ("auto", None, None, None, Roles(COLOCATED, 0, 1)),
        ("auto", 6, 2, None, Roles(SPLIT, 6, 2)),
        ("split", None, None, None, Roles(SPLIT, 1, 1)),
        ("colocated", None, 2, None, Roles(COLOCATED, 0, 2)),
    ],
)
def test_assigned(layout, targets, drafters, world, expected):
    roles = assign_roles(RolesConfig(layout, targets, drafters), 1, world)
    assert roles == expected
    assert world in (None, roles.world_size)


@pytest.mark.parametrize(
    ("layout", "targets", "drafters", "world", "arithmetic"),
    [
        ("auto", 2, 3, 4, "3 drafters + 2 targets = 5 ranks, and the job has 4"),
        ("auto", 1, 2, 4, "2 drafters + 1 targets = 3 ranks, and the job has 4"),
        ("auto", 4, None, 4, "0 drafters + 4 targets = 4 ranks, and the job has 4"),
        ("auto", 5, None, 4, "-1 drafters + 5 targets = 4 ranks"),
        ("auto", None, 4, 4, "4 drafters + 0 targets = 4 ranks"),
        ("split", None, None, 1, "1 drafter + 1 target = 2 ranks, and the job has 1"),
        ("colocated", None, 3, 4, "4 ranks are 4 drafters, not roles.num_drafters=3"),
        ("auto", None, 3, 1, "1 ranks are 1 drafters, not roles.num_drafters=3"),
        ("auto", 1, None, 1, "roles.num_targets=1: a colocated job of 1 ranks has none"),
    ],
)
def test_refused_with_the_arithmetic(layout, targets, drafters, world, arithmetic):
    with pytest.raises(InputError) as error:
        assign_roles(RolesConfig(layout, targets, drafters), 1, world)
    assert arithmetic in str(error.value)
    assert "roles." in str(error.value), "no key to change"
    assert "\n" not in str(error.value)


def test_a_target_of_several_ranks_is_refused():
    with pytest.raises(InputError, match=r"target\.tensor_parallel=2"):
        assign_roles(RolesConfig(), 2, 4)


def test_every_rank_has_one_role():
    roles = Roles(SPLIT, num_targets=3, num_drafters=2)
    assert [roles.role(rank) for rank in range(5)] == 2 * [DRAFTER] + 3 * [TARGET]
    assert [*roles.drafter_ranks, *roles.target_ranks] == list(range(roles.world_size))
    alone = Roles(COLOCATED, num_targets=0, num_drafters=2)
    assert [*alone.drafter_ranks] == [0, 1] and not alone.target_ranks
