"""The first cause is named, once, to everybody; what only follows from it is not a cause."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from dflashdist.cluster.health import Halted, is_echo
from dflashdist.cluster.roles import SPLIT, Roles
from dflashdist.cluster.transport import TransportError, naming
from dflashdist.cluster.world import Place, World
from dflashdist.config import InputError, PipelineConfig

ROLES = Roles(SPLIT, num_targets=2, num_drafters=1)
VICTIM = 2


def join(**pipeline: float) -> World:
    config = PipelineConfig(silence_seconds=60)
    for name, value in pipeline.items():
        setattr(config, name, value)
    return World(Place.from_environment(), ROLES, torch.device("cpu"), config, advice="; do this")


def cause(world: World) -> str:
    assert world.health.halt is not None
    return world.health.halt.text


def answers(ranks: Ranks, number: int) -> list[str]:
    """What the first `number` ranks returned."""
    got = [ranks.queue.get(timeout=60) for _ in range(number)]
    assert all(kind == "ok" for _, kind, _ in got), got
    return [value for _, _, value in got]


# ---- a rank whose main thread does not move


def get_stuck() -> str:
    world = join(stall_seconds=2.0)
    health = world.health
    try:
        with health.guard():
            name = "forward" if world.rank == VICTIM else "wait for hidden states"
            health.phase(name, 0, kind=0)  # the first phase of its kind may take long
            health.phase(name, 1, kind=0)
            if world.rank == VICTIM:
                time.sleep(1.0)
                health.phase(name, 2, kind=0)
                time.sleep(60)
            health.wait_key(world.store, "never")
    except Halted:
        world.linger()
    return cause(world)


@pytest.mark.dist
def test_a_stuck_rank_is_named_and_all_end():
    """Those who wait for it are in their phase longer, and are not blamed."""
    ranks = Ranks(3, get_stuck)
    causes = answers(ranks, 2)
    assert ranks.exit_codes(20) == [0, 0, 1]
    assert causes[0] == causes[1]
    assert causes[0].startswith(f"rank {VICTIM} (target) on ")
    assert "stuck for" in causes[0] and "in forward, seq 2 (pipeline.stall_seconds" in causes[0]
    assert causes[0].endswith("; do this")


def finish_late() -> str:
    world = join(stall_seconds=0.05)  # a wait may take 24 times as long, 1.2 s
    if world.rank == 0:
        for step in range(30):
            world.health.phase("step", step, kind=step)
            time.sleep(0.1)
        world.health.finish("all done")
    world.health.wait_end()
    world.close()
    return cause(world)


@pytest.mark.dist
def test_who_waits_for_the_end_is_not_stuck():
    """Whose own work was done long before the last save is judged by nobody."""
    ranks = Ranks(3, finish_late)
    assert ranks.results() == ["all done"] * 3


# ---- an exception on one rank, which closes the connections that others wait on


def raise_on_one() -> str:
    world = join()
    health = world.health
    health.phase("forward", 3)
    try:
        with health.guard():
            if world.rank == VICTIM:
                raise InputError("data.store: row 7 is not there; prepare it again")
            dist.recv(torch.zeros(8), VICTIM, group=world.data)
    except Halted:
        world.linger()
    return cause(world)


@pytest.mark.dist
def test_an_exception_is_the_first_cause():
    """The others' receives fail when its process ends: an echo."""
    ranks = Ranks(3, raise_on_one)
    causes = answers(ranks, 3)
    assert ranks.exit_codes(20) == [0, 0, 0]
    assert len(set(causes)) == 1
    assert causes[0].startswith(f"rank {VICTIM} (target) on ")
    assert causes[0].endswith(": data.store: row 7 is not there; prepare it again")


def vanish() -> str:
    world = join()
    try:
        with world.health.guard():
            if world.rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            with naming(3, "receive of seq 3"):
                dist.recv(torch.zeros(8), VICTIM, group=world.data)
    except Halted:
        world.linger()
    return cause(world)


@pytest.mark.dist
def test_an_echo_waits_for_its_cause():
    """The receives fail at once; that the process is gone is noticed up to a second later."""
    ranks = Ranks(3, vanish)
    causes = answers(ranks, 2)
    assert ranks.exit_codes(20) == [0, 0, -signal.SIGKILL]
    assert len(set(causes)) == 1
    assert causes[0].startswith(f"rank {VICTIM} (target) on ")
    assert "ended without a word" in causes[0]


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[/x/pair.cc:534] Connection closed by peer [127.0.0.1]:3402"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("NCCL error: unhandled system error, remote process exited"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (TransportError(3, "receive of seq 3 failed: Connection reset by peer"), True),
        (TransportError(3, "message from rank 1 to rank 0: cut short"), False),
        (InputError("data.store: Connection closed"), False),  # of ours, whatever it says
        (RuntimeError("CUDA error: out of memory"), False),
        (AssertionError("seq"), False),
    ],
)
def test_is_echo(error, echo):
    assert is_echo(error) is echo
