"""Which ranks run the target and which train: pure arithmetic over the world size."""

from dataclasses import dataclass

from dflashdist.config import InputError, RolesConfig

SPLIT, COLOCATED = "split", "colocated"
DRAFTER, TARGET = "drafter", "target"


@dataclass(frozen=True)
class Roles:
    """The layout of a job. In `split`, ranks [0, D) train and ranks [D, D + T) run the target;
    in `colocated` every rank trains and computes its own hidden states."""

    layout: str
    num_targets: int
    num_drafters: int

    @property
    def world_size(self) -> int:
        return self.num_drafters + (self.num_targets if self.layout == SPLIT else 0)

    @property
    def drafter_ranks(self) -> range:
        return range(self.num_drafters)

    @property
    def target_ranks(self) -> range:
        return range(self.num_drafters, self.world_size)

    def role(self, rank: int) -> str:
        return DRAFTER if rank in self.drafter_ranks else TARGET


def implied_world_size(config: RolesConfig) -> int:
    """How many ranks `roles` describes; what is not given counts as little as it can."""
    targets, drafters = config.num_targets, config.num_drafters
    if config.layout == COLOCATED:
        return drafters or 1
    if config.layout == SPLIT or targets is not None or (drafters or 1) > 1:
        return (targets or 1) + (drafters or 1)
    return 1


def assign_roles(config: RolesConfig, tensor_parallel: int, world_size: int | None) -> Roles:
    """The roles of a job of `world_size` ranks; None: of as many as `roles` describes.

    Raises InputError with the arithmetic where the counts do not add up.
    """
    if tensor_parallel != 1:
        raise InputError(
            f"target.tensor_parallel={tensor_parallel}: a target of several ranks is not built; "
            "set it to 1"
        )
    targets, drafters = config.num_targets, config.num_drafters
    if world_size is None:
        world_size = implied_world_size(config)
    layout = config.layout
    if layout not in (SPLIT, COLOCATED):
        layout = COLOCATED if world_size == 1 else SPLIT
    if layout == COLOCATED:
        if targets is not None:
            raise InputError(
                f"roles.num_targets={targets}: a colocated job of {world_size} ranks has none: "
                "each drafter runs the target itself; set it to null, or start more ranks"
            )
        if drafters not in (None, world_size):
            raise InputError(
                f"roles: colocated makes every rank a drafter, so {world_size} ranks are "
                f"{world_size} drafters, not roles.num_drafters={drafters}; set it to null"
            )
        return Roles(COLOCATED, 0, world_size)
    if world_size < 2:
        raise InputError(
            "roles.layout=split needs at least 1 drafter + 1 target = 2 ranks, and the job has "
            f"{world_size}; start more, or set roles.layout=colocated"
        )
    if targets is None and drafters is None:
        targets = 1
    if targets is None:
        targets = world_size - (drafters or 0)
    if drafters is None:
        drafters = world_size - targets
    if drafters < 1 or targets < 1 or drafters + targets != world_size:
        raise InputError(
            f"roles: {drafters} drafters + {targets} targets = {drafters + targets} ranks, "
            f"and the job has {world_size}, each of both at least 1; start as many, or change "
            "roles.num_drafters and roles.num_targets (null = the rest)"
        )
    return Roles(SPLIT, targets, drafters)


@dataclass(frozen=True)
class Member:
    """One rank as it introduces itself to the others."""

    rank: int
    role: str
    host: str
    device: str
    pid: int
    machine: str  # boot id and process namespace: where `pid` means something

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.role}) on {self.host}"


def roles_table(members: list[Member]) -> str:
    """The table that is printed before anything is built."""
    lines = [f"{'rank':>4}  {'role':<8} {'host':<20} {'device':<8} {'pid':>8}"]
    lines += [
        f"{m.rank:>4}  {m.role:<8} {m.host:<20} {m.device:<8} {m.pid:>8}"
        for m in sorted(members, key=lambda member: member.rank)
    ]
    return "\n".join(lines)
